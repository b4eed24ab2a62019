"""The picture of compare.py, for a pull request: one colour an arm, its mean and a band over its
seeds against steps or seconds, and beside it the submitted results with their intervals."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare
import numpy as np
import pandas as pd
import stats
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from read_log import Run

# Okabe and Ito's colours, told apart with any colour vision, without the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", ":", "-.")
FEW = 3  # points that a curve needs; with fewer there are bars alone
MAX_NAME = 44  # characters of an arm's name
SEED_OR_SUFFIX = r"[._-]*seed[._-]?\d+|\.(txt|log)\b"  # of a log's name
QUANTITIES = {  # of a curve: its lines and their field, and the axis
    "val_bpb": ("validations", "validation, bits per byte"),
    "train_loss": ("steps", "training loss, nats per token"),
}


@dataclass
class Arm:
    """Runs that differ in their seed alone, under one name and colour."""

    name: str
    runs: list[Run]
    colour: str
    dashes: str


def named(arms: Sequence[Sequence[Run]]) -> tuple[str, list[Arm]]:
    """A title, and the arms under what tells them apart: their settings, else their logs' names."""
    arms = [list(arm) for arm in arms if arm]
    firsts = [arm[0] for arm in arms]
    found = [d for d in compare.differences(firsts)[0] if not d.harmless] if len(arms) > 1 else []
    settings = [d.name for d in found if d.name in firsts[0].config and not d.unknown]
    settings = [name for name in settings if "." not in name] or [d.name for d in found]
    told = [compare.conditions(run) for run in firsts]
    names = [
        ", ".join(f"{name} {compare.cell(one.get(name))}" for name in settings[:3]) for one in told
    ]
    if len(settings) > 3 or len(set(names)) < len(names) or len(arms) == 1:
        names = [re.sub(SEED_OR_SUFFIX, "", label) for label in compare.labels(firsts)]
        names = [f"{n}: {name}" for n, name in enumerate(names, 1)] if len(arms) > 1 else names
    counts = sorted({len(arm) for arm in arms})
    each = f"{' to '.join(map(str, counts[:: len(counts) - 1 or 1]))} seeds each"
    what = f"{' and '.join(settings)}: {len(arms)} arms" if 0 < len(settings) <= 2 else ""
    title = f"{what or f'{len(arms)} configurations'}, {each}"
    if len(arms) == 1:
        title = f"{names[0]}, {each.removesuffix(' each')}"
    looks = [(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % 4]) for i in range(len(arms))]
    return title, [
        Arm(shortened(name), arm, *look) for name, arm, look in zip(names, arms, looks, strict=True)
    ]


def shortened(name: str) -> str:
    """Both ends of a long name: the beginning and the end tell it from others."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[-half:]}"


def draw(named_arms: tuple[str, list[Arm]], path: Path, x: str, title: str) -> str:
    """Writes the picture; returns in one line why there is nothing to draw, else nothing. Raises
    OSError where the file cannot be written."""
    own_title, arms = named_arms
    curves = next((found for name in QUANTITIES if (found := curves_of(arms, name, x))), None)
    results = [final_values(arm) for arm in arms]
    has_results = any(results)
    if not curves and not has_results:
        return f"--plot {path}: no run has a result, or {FEW} points of a curve: let one end"
    panels = [panel for panel, there in (("curves", curves), ("bars", has_results)) if there]
    widths = [3, 2] if len(panels) == 2 else [1]
    rows = math.ceil(len(arms) / 2)
    figure = Figure(
        figsize=(11 if len(panels) == 2 else 7, 4.6 + 0.22 * rows), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for panel, axis in zip(panels, axes, strict=True):
        if panel == "curves":
            draw_curves(axis, arms, curves, x)
        else:
            draw_bars(axis, arms, results)
        axis.grid(color="#dddddd", linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, words = axes[0].get_legend_handles_labels()
    columns = 2 if max(map(len, words)) > 20 else min(4, len(words))
    figure.legend(handles, words, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title or own_title)
    save(figure, path)
    return ""


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)


# --- curves ---


@dataclass
class Curves:
    """One quantity of all arms: a table an arm, a column a run, over steps or seconds."""

    tables: list[pd.DataFrame]
    axis: str


def curves_of(arms: Sequence[Arm], quantity: str, x: str) -> Curves | None:
    """None: some arm has too few points for a curve, or nats of several tokenizers."""
    if quantity == "train_loss" and compare.other_tokenizers([r for arm in arms for r in arm.runs]):
        return None
    lines, axis = QUANTITIES[quantity]
    tables = [
        pd.concat([series(getattr(run, lines), quantity, x) for run in arm.runs], axis=1)
        for arm in arms
    ]
    if any(len(one) < FEW for one in tables):
        return None
    # Each run between its own points, never beyond them.
    tables = [one.interpolate("index", limit_area="inside") for one in tables]
    return Curves(tables, axis)


def series(lines: Sequence[Any], quantity: str, x: str) -> pd.Series:
    """One run's finite values. Without the validation before the first step: the line from it to
    the next one shows nothing."""
    found = {
        (line.step if x == "steps" else line.train_time_ms / 1e3): getattr(line, quantity)
        for line in lines
        if line.step > 0
        and getattr(line, quantity) is not None
        and math.isfinite(getattr(line, quantity))
        and (x == "steps" or line.train_time_ms is not None)
    }
    return pd.Series(found, dtype=float).sort_index()


def draw_curves(axis: Any, arms: Sequence[Arm], curves: Curves, x: str) -> None:
    for arm, one in zip(arms, curves.tables, strict=True):
        mean, spread = one.mean(axis=1, skipna=False), one.std(axis=1)
        marker = "o" if len(mean) < 25 else None
        style = {"color": arm.colour, "linestyle": arm.dashes, "marker": marker, "markersize": 3}
        axis.plot(mean.index, mean, linewidth=1.6, label=arm.name, **style)
        if len(arm.runs) > 1:
            low, high = mean - spread, mean + spread
            axis.fill_between(mean.index, low, high, color=arm.colour, alpha=0.2, linewidth=0)
    band = any(len(arm.runs) > 1 for arm in arms)
    axis.set_title("mean over seeds, band: one standard deviation" if band else "", fontsize=9)
    unit = "training step" if x == "steps" else "training time, seconds"
    axis.set(xlabel=unit, ylabel=curves.axis)
    axis.set_ylim(*limits(curves.tables))
    axis.set_xlim(left=0)


def limits(tables: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """A range of y that shows how the curves end, not the fall of the first steps."""
    end = max(one.index.max() for one in tables)
    late = np.concatenate([one[one.index >= 0.2 * end].to_numpy().ravel() for one in tables])
    late = late[np.isfinite(late)]
    low, high = late.min(), np.quantile(late, 0.98)
    room = 0.06 * (high - low) or 0.01 * abs(low) or 0.01
    return low - room, high + room


# --- results ---


def final_values(arm: Arm) -> list[float]:
    heads = (run.headline for run in arm.runs)
    return [head.val_bpb for head in heads if head and math.isfinite(head.val_bpb)]


def draw_bars(axis: Any, arms: Sequence[Arm], results: Sequence[list[float]]) -> None:
    reached = []
    for place, (arm, values) in enumerate(zip(arms, results, strict=True)):
        if not values:
            axis.text(place, 0.02, "no result", ha="center", transform=axis.get_xaxis_transform())
            continue
        mean, reach = sum(values) / len(values), stats.interval(values)
        reach = None if math.isnan(reach) else reach
        look = {"color": arm.colour, "alpha": 0.45, "label": arm.name}
        axis.bar(place, mean, width=0.6, yerr=reach, capsize=5, **look)
        axis.scatter([place] * len(values), values, color=arm.colour, s=18, zorder=3)
        top = max(mean + (reach or 0), *values)
        place_of_text = {"textcoords": "offset points", "ha": "center"}
        size = 9 if len(arms) < 6 else 6
        axis.annotate(f"{mean:.4f}", (place, top), (0, 4), fontsize=size, **place_of_text)
        reached += [mean - (reach or 0), top, *values]
    low, high = min(reached), max(reached)
    room = (high - low) or 0.01 * abs(low)
    axis.set_ylim(low - 0.5 * room, high + 0.3 * room)
    axis.set_xlim(-0.7, max(len(arms) - 0.3, 1.3))
    axis.set_xticks([])
    axis.yaxis.set_major_locator(MaxNLocator(6))
    axis.set_ylabel("submitted result, bits per byte (axis cut)")
    several = any(len(values) > 1 for values in results)
    axis.set_title("mean, 95 % interval, a dot a seed" if several else "one seed each", fontsize=9)
