"""The picture of compare.py and ablate.py, for a pull request.

    attempt(arms, wish) -> ""     writes it, or says in one line why it cannot be drawn

Panels: `curves`, each arm's mean over its seeds with a band, against steps or seconds; `results`
and `wait`, the submitted result and the time spent waiting for input, each a dot per seed with
the mean and its 95 % interval. An arm is a list of runs that differ in their seed alone. What a
reader must know before comparing (a part of the split, other data, runs left out) stands in it.
"""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cli import missing
from configuration import FACTS, conditions, label, telling
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from results import headline
from runs import Run
from significance import BITS, NATS, interval, other_tokenizers, value_of
from tables import labels

# Okabe and Ito's colours, told apart with any colour vision, without the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", ":", "-.")
FEW = 3  # points that each run needs for a curve
MANY = 200  # points of a drawn curve at most: more are averaged
LINE = 44  # characters of a line of an arm's name
SETTINGS_IN_NAME = 3  # at most; arms that differ in more are named after their logs
LATE = 0.2  # the range of y shows an arm from this share of its run on
SEED_OR_SUFFIX = r"[._-]*seed[._-]?\d+|\.(txt|log)\b"  # of a log's name
PANELS = ("curves", "results", "wait")
QUANTITIES = {  # of a curve: its lines and their field, and the axis
    "val_bpb": ("validations", "validation, bits per byte"),
    "val_loss": ("validations", "validation, nats per token"),
    "train_loss": ("steps", "training loss, nats per token"),
}


@dataclass
class Wish:
    """What is to be drawn."""

    path: Path
    x: str = "steps"  # or seconds
    title: str = ""
    panels: list[str] | None = None  # None: what there is to see


@dataclass
class Arm:
    """Runs that differ in their seed alone, under one name and colour."""

    name: str
    runs: list[Run]
    colour: str
    dashes: str


@dataclass
class Curve:
    """An arm's mean over its runs where all of them have points, and their standard deviation."""

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    averaged: bool = False


@dataclass
class Curves:
    """One quantity of all arms."""

    of: list[Curve]
    axis: str


@dataclass
class Dots:
    """A number of each run, for each arm."""

    values: list[list[float]]
    axis: str
    form: str = ".4f"
    lowest: float = -math.inf  # where the axis ends
    title: str = field(init=False)

    def __post_init__(self) -> None:
        several = any(len(values) > 1 for values in self.values)
        self.title = "mean, 95 % interval, one dot per seed" if several else "one seed each"
        if len(self.values) > 1 and len({tuple(sorted(values)) for values in self.values}) == 1:
            self.title = "equal to the digit in all arms"


# --- arms and what is to be said of them ---


def named(groups: Sequence[Sequence[Run]]) -> list[Arm]:
    """The arms with their names: the settings that differ, as they are set; else their logs."""
    firsts = [group[0] for group in groups]
    names = setting_names(firsts)
    if not names:
        names = [re.sub(SEED_OR_SUFFIX, "", name) for name in labels(firsts, 3 * LINE)]
        if len(set(names)) < len(names):
            names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    looks = [(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % 4]) for i in range(len(groups))]
    return [
        Arm(wrapped(name), list(group), *look)
        for name, group, look in zip(names, groups, looks, strict=True)
    ]


def setting_names(firsts: Sequence[Run]) -> list[str]:
    """TRAIN_PREFETCH=1 for each arm; nothing where settings are not all that differs."""
    if len(firsts) < 2:
        return []
    different = telling(firsts)
    known = [conditions(run) for run in firsts]
    settings = [name for name in different if name not in FACTS and "." not in name]
    all_known = all(name in setup for setup in known for name in settings)
    if settings != different or not all_known or not 0 < len(settings) <= SETTINGS_IN_NAME:
        return []
    names = [label(run, settings) for run in firsts]
    return names if len(set(names)) == len(names) else []


def wrapped(name: str) -> str:
    """Long names in lines, broken between words."""
    lines = [""]
    for piece in re.findall(r".+?(?:[ _/-]+|$)", name):
        if lines[-1] and len(lines[-1]) + len(piece) > LINE:
            lines.append("")
        lines[-1] += piece
    lines = [line if len(line) <= LINE else f"{line[: LINE - 1]}…" for line in lines]
    return "\n".join(lines if len(lines) <= 3 else [*lines[:2], f"{lines[2][: LINE - 1]}…"]).strip()


def title_of(arms: Sequence[Arm]) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    seeds = f"{counts[0]} seed{'s' * (counts[-1] != 1)}"
    if len(counts) > 1:
        seeds = f"{counts[0]} to {counts[-1]} seeds"
    if len(arms) == 1:
        return f"{arms[0].name}, {seeds}".replace("\n", "")
    firsts = [arm.runs[0] for arm in arms]
    names = [name.upper() for name in telling(firsts)] if setting_names(firsts) else []
    what = f"{' and '.join(names)}: {len(arms)} arms" if names else f"{len(arms)} configurations"
    return f"{what}, {seeds} each"


def without_unfinished(groups: Sequence[Sequence[Run]]) -> tuple[list[list[Run]], list[str]]:
    """A run without a result is no seed of an arm that has results."""
    kept, left_out = [], 0
    for group in groups:
        finished = [run for run in group if headline(run) is not None]
        left_out += len(group) - len(finished) if finished else 0
        kept.append(finished or list(group))
    notices = [f"{left_out} unfinished run{'s' * (left_out != 1)} left out"] if left_out else []
    alone = sum(1 for group in kept if group and headline(group[0]) is None)
    if alone:
        notices.append(f"{alone} arm{'s' * (alone != 1)} without a finished run")
    return [group for group in kept if group], notices


def notices_on(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before comparing."""
    notices = []
    parts = sum(run.partial_val for run in runs)
    if parts:
        which = "all runs were" if parts == len(runs) else f"{parts} of {len(runs)} runs were"
        notices.append(f"{which} validated on a part of the split")
    datasets = sorted({run.dataset for run in runs if run.dataset})
    splits = {run.val_tokens for run in runs if run.val_tokens is not None}
    if len(datasets) > 1:
        notices.append(f"the runs have different data: {', '.join(datasets[:4])}")
    elif len(splits) > 1 and not parts:
        notices.append("the runs were validated on different numbers of tokens")
    return notices


# --- curves ---


def curves_of(arms: Sequence[Arm], quantity: str, x: str) -> Curves | None:
    """None: some run has too few points for a curve, or the nats are of several tokenizers."""
    runs = [run for arm in arms for run in arm.runs]
    if quantity.endswith("loss") and other_tokenizers([headline(run) for run in runs]):
        return None
    lines, axis = QUANTITIES[quantity]
    curves = []
    for arm in arms:
        points = [points_of(getattr(run, lines), quantity, x) for run in arm.runs]
        curve = mean_curve(points) if min(len(xs) for xs, _ in points) >= FEW else None
        if curve is None:
            return None
        curves.append(curve)
    averaged = ", averaged" if any(curve.averaged for curve in curves) else ""
    return Curves(curves, axis + averaged)


def points_of(lines: Sequence[Any], quantity: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """One run's finite values, in the order of x. Without the validation before the first step: the
    line from it to the next one shows nothing."""
    values = {}
    for line in lines:
        place = line.step if x == "steps" else line.train_time_ms and line.train_time_ms / 1e3
        value = getattr(line, quantity)
        if line.step > 0 and None not in (place, value) and math.isfinite(value):
            values[place] = value
    xs = sorted(values)
    return np.array(xs, float), np.array([values[place] for place in xs], float)


def mean_curve(points: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve | None:
    """All runs on one grid, between their own points and never beyond them."""
    first, last = max(xs[0] for xs, _ in points), min(xs[-1] for xs, _ in points)
    grid = np.unique(np.concatenate([xs for xs, _ in points]))
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) < 2:
        return None
    many = len(grid) > MANY
    if many:
        grid = np.linspace(first, last, MANY)
        points = [(grid, averages(xs, ys, grid)) for xs, ys in points]
    values = np.array([np.interp(grid, xs, ys) for xs, ys in points])
    return Curve(grid, values.mean(axis=0), spread(values), many)


def spread(values: np.ndarray) -> np.ndarray:
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def averages(xs: np.ndarray, ys: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The mean of a run's values around each place of the grid."""
    half = (grid[1] - grid[0]) / 2
    low = np.searchsorted(xs, grid - half, side="left")
    high = np.searchsorted(xs, grid + half, side="right")
    sums = np.concatenate([[0.0], np.cumsum(ys)])
    count = high - low
    mean = (sums[high] - sums[low]) / np.maximum(count, 1)
    return np.where(count > 0, mean, np.interp(grid, xs, ys))


def draw_curves(axis: Any, arms: Sequence[Arm], curves: Curves, x: str) -> None:
    for arm, curve in zip(arms, curves.of, strict=True):
        marker = "o" if len(curve.x) < 25 else None
        style = {"color": arm.colour, "linestyle": arm.dashes, "marker": marker, "markersize": 3}
        axis.plot(curve.x, curve.mean, linewidth=1.6, label=arm.name, **style)
        if len(arm.runs) > 1:
            low, high = curve.mean - curve.std, curve.mean + curve.std
            axis.fill_between(curve.x, low, high, color=arm.colour, alpha=0.2, linewidth=0)
    band = any(len(arm.runs) > 1 for arm in arms)
    title = "mean over seeds, band: one standard deviation" if band else ""
    if len(arms) > 1 and all(equal(curves.of[0], curve) for curve in curves.of):
        title = "all arms lie on one line"
    axis.set_title(title, fontsize=9)
    unit = "training step" if x == "steps" else "training time, seconds"
    axis.set(xlabel=unit, ylabel=curves.axis)
    axis.set_ylim(*limits(curves.of))
    axis.set_xlim(left=0)


def equal(first: Curve, second: Curve) -> bool:
    return np.array_equal(first.x, second.x) and np.array_equal(first.mean, second.mean)


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """A range of y that shows how each curve ends, not the fall of the first steps."""
    late = []
    for curve in curves:
        shown = curve.x >= LATE * curve.x[-1]
        shown[len(curve.x) // 2 :] = True  # where most lines are of the first steps
        late += [(curve.mean - curve.std)[shown], (curve.mean + curve.std)[shown]]
    values = np.concatenate(late)
    low, high = values.min(), np.quantile(values, 0.98)
    room = 0.06 * (high - low) or 0.01 * abs(low) or 0.01
    return low - room, high + room


# --- numbers of runs ---


def result_dots(arms: Sequence[Arm]) -> Dots | None:
    """Submitted results, in bits per byte; in nats where no log has bits."""
    for unit in (BITS, NATS):
        results = [[value_of(headline(run), unit) for run in arm.runs] for arm in arms]
        values = [[value for value in arm if value is not None] for arm in results]
        if any(values):
            axis = f"submitted result, {unit if unit == BITS else 'nats per token'}"
            return Dots(values, axis)
    return None


def wait_dots(arms: Sequence[Arm]) -> Dots | None:
    """Milliseconds per step spent waiting for input, where the logs of all arms tell it."""
    waits = [[run.input_wait_per_step() for run in arm.runs] for arm in arms]
    if any(value is None for values in waits for value in values):
        return None
    highest = max(max(values) for values in waits)
    form = ".1f" if highest >= 10 else ".2g"
    return Dots(waits, "waiting for input, ms per step", form, lowest=-0.03 * highest)


def draw_dots(axis: Any, arms: Sequence[Arm], dots: Dots) -> None:

    reached = []
    for place, (arm, values) in enumerate(zip(arms, dots.values, strict=True)):
        if not values:
            axis.text(place, 0.02, "no result", ha="center", transform=axis.get_xaxis_transform())
            continue
        mean, reach = sum(values) / len(values), interval(values) if len(values) > 1 else math.nan
        reach = 0.0 if math.isnan(reach) else reach
        offsets = np.linspace(-0.1, 0.1, len(values)) if len(values) > 1 else [0.0]
        axis.scatter(place + 0.28 + np.array(offsets), values, color=arm.colour, s=16, alpha=0.55)
        look = {"fmt": "D", "color": arm.colour, "markersize": 6, "capsize": 6, "elinewidth": 1.8}
        axis.errorbar(place, mean, yerr=reach or None, label=arm.name, **look)
        top = max(mean + reach, *values)
        size = 9 if len(arms) < 6 else 7
        text = format(mean, dots.form)
        place_of_text = {"textcoords": "offset points", "ha": "center", "fontsize": size}
        axis.annotate(text, (place, top), (0, 5), **place_of_text)
        reached += [mean - reach, top, *values]
    low, high = min(reached), max(reached)
    room = (high - low) or 0.01 * abs(low) or 0.01
    axis.set_ylim(max(low - 0.15 * room, dots.lowest), high + 0.2 * room)
    axis.set_xlim(-0.6, len(arms) - 0.2)
    axis.set_xticks([])
    axis.yaxis.set_major_locator(MaxNLocator(6))
    axis.set_ylabel(dots.axis)
    axis.set_title(dots.title, fontsize=9)


# --- the whole ---


def panels_of(arms: Sequence[Arm], wish: Wish) -> dict[str, Any]:
    """What is drawn, by its name. The wait is shown where arms differ in it, if not asked for."""
    curves = next((c for name in QUANTITIES if (c := curves_of(arms, name, wish.x))), None)
    panels = {"curves": curves, "results": result_dots(arms), "wait": wait_dots(arms)}
    asked = wish.panels or [
        name for name in PANELS if name != "wait" or waits_differ(panels["wait"])
    ]
    return {name: panels[name] for name in asked if panels[name] is not None}


def waits_differ(dots: Dots | None) -> bool:
    """Do two arms wait differently, by more than their seeds do?"""
    if dots is None or len(dots.values) < 2:
        return False
    ordered = sorted(dots.values, key=lambda values: sum(values) / len(values))
    return max(ordered[0]) < min(ordered[-1])


def attempt(groups: Sequence[Sequence[Run]], wish: Wish) -> str:
    """Writes the picture; returns in one line why there is none, else nothing."""
    try:
        return draw(groups, wish)
    except ImportError as error:
        return f"{wish.path}: not drawn: {missing(error.name or '', 'matplotlib scipy')}"
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}: name a file in a folder of yours"
        return f"--plot {wish.path}: {reason}"


def draw(groups: Sequence[Sequence[Run]], wish: Wish) -> str:

    kept, notices = without_unfinished(groups)
    arms = named(kept)
    panels = panels_of(arms, wish)
    if not panels:
        return f"--plot {wish.path}: no run has a result, or {FEW} points of a curve: let one end"
    notices += notices_on([run for arm in arms for run in arm.runs])
    widths = [3 if name == "curves" else 2 for name in panels]
    lines = sum(arm.name.count("\n") + 1 for arm in arms)
    size = (2.6 + 2.1 * sum(widths) * (0.8 if len(panels) > 1 else 1), 4.6 + 0.2 * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axis, (name, content) in zip(axes, panels.items(), strict=True):
        if name == "curves":
            draw_curves(axis, arms, content, wish.x)
        else:
            draw_dots(axis, arms, content)
        axis.grid(color="#dddddd", linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    draw_legend(figure, axes[0], size[0], f"Note: {'; '.join(notices)}" if notices else "")
    figure.suptitle(wish.title or title_of(arms))
    save(figure, wish.path)
    return ""


def draw_legend(figure: Any, axis: Any, inches: float, note: str) -> None:
    """Below the panels, in as many columns as the picture is wide."""
    handles, names = axis.get_legend_handles_labels()
    widest = max((len(line) for name in names for line in name.split("\n")), default=1)
    columns = max(1, min(len(names), int(inches * 12 / (widest + 8))))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    legend = figure.legend(handles, names, title=note or None, title_fontsize=9, **place)
    legend.get_title().set_color("#a00000")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit("error: picture.py is a part of another tool: logs/compare.py LOG... --plot FILE.svg")
