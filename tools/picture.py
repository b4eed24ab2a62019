"""The picture of compare.py and ablate.py, for a pull request.

It shows each arm's mean over its seeds against steps, with a band; the results; and the time spent
waiting for input where arms differ in it: a dot per seed with the mean and its 95 % interval. An
arm is a list of runs that differ only in their seed. A note below says what a reader must know.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cli import ToolError
from runs import Run
from significance import BITS, interval, other_tokenizers, value_of

# Okabe and Ito's colours, told apart with any colour vision, without the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", ":", "-.")
FEW = 3  # points that each run needs for a curve
LINE = 72  # characters of an arm's name
LATE = 0.2  # the range of y shows an arm from this share of its run on
QUANTITIES = {  # of a curve: its lines and the axis
    "val_bpb": ("validations", "validation, bits per byte"),
    "train_loss": ("steps", "training loss, nats per token"),
}


class Arm(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[Run]
    style: dict[str, str]  # colour and dashes


def style(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}


# --- curves ---


def curves_of(arms: Sequence[Arm]) -> tuple[list[Any], str]:
    """A table for each arm, a row for each step and a column for each run, and the axis: of the
    first quantity that all runs have. None: empty."""
    results = [run.result for arm in arms for run in arm.runs]
    names = ["val_bpb"] if other_tokenizers(results) else list(QUANTITIES)
    for name in names:
        curves = [curve_of(arm.runs, name) for arm in arms]
        if all(curve is not None for curve in curves):
            return curves, QUANTITIES[name][1]
    return [], ""


def curve_of(runs: Sequence[Run], quantity: str) -> Any | None:
    """All runs at all steps, between their own points and never beyond them. Without the validation
    before the first step: the line from it to the next one shows nothing."""
    import pandas  # optional, and slow to import

    columns = []
    for run in runs:
        lines = [line for line in getattr(run, QUANTITIES[quantity][0]) if line.step > 0]
        values = {line.step: getattr(line, quantity) for line in lines}
        columns.append(pandas.Series(values, dtype=float))
    points = pandas.concat(columns, axis=1).replace([math.inf, -math.inf], math.nan).sort_index()
    curve = points.interpolate("index", limit_area="inside").dropna()
    return curve if points.count().min() >= FEW and len(curve) > 1 else None


def draw_curves(axis: Any, arms: Sequence[Arm], curves: list[Any], words: str) -> None:
    for arm, curve in zip(arms, curves, strict=True):
        mean = curve.mean(axis=1)
        marker = "o" if len(curve) < 25 else None
        axis.plot(curve.index, mean, linewidth=1.6, marker=marker, markersize=3, **arm.style)
        if len(arm.runs) > 1:
            low, high = mean - curve.std(axis=1), mean + curve.std(axis=1)
            axis.fill_between(
                curve.index, low, high, color=arm.style["color"], alpha=0.2, linewidth=0
            )
    band = any(len(arm.runs) > 1 for arm in arms)
    title = "mean over seeds, band: one standard deviation" if band else ""
    axis.set_title(title, fontsize=9)
    axis.set(xlabel="training step", ylabel=words)
    axis.set_ylim(*limits(curves))
    axis.set_xlim(left=0)


def limits(curves: Sequence[Any]) -> tuple[float, float]:
    """A range of y that shows how each curve ends, not the fall of the first steps."""
    late = [curve[curve.index >= LATE * curve.index[-1]] for curve in curves]
    values = np.concatenate([curve.to_numpy().ravel() for curve in late])
    low, high = values.min(), np.quantile(values, 0.98)
    room = 0.06 * (high - low) or 0.01 * abs(low) or 0.01
    return low - room, high + room


def result_values(arms: Sequence[Arm]) -> tuple[list[list[float]], str]:
    known = [[value_of(run.result, BITS) for run in arm.runs] for arm in arms]
    values = [[value for value in arm if value is not None] for arm in known]
    return (values, "result, bits per byte") if any(values) else ([], "")


def wait_values(arms: Sequence[Arm]) -> tuple[list[list[float]], str]:
    """Milliseconds per step spent waiting for input, where two arms differ in it by more than their
    seeds do, and by more than half a percent of a step."""
    waits = [[run.input_wait_per_step() for run in arm.runs] for arm in arms]
    if any(value is None for values in waits for value in values):
        return [], ""
    ordered = sorted(waits, key=lambda values: sum(values) / len(values))
    step = min(run.step_ms or 0 for arm in arms for run in arm.runs)
    differ = min(ordered[-1]) - max(ordered[0]) > 0.005 * step
    return (waits, "waiting for input, ms per step") if differ else ([], "")


def draw_dots(axis: Any, arms: Sequence[Arm], values: list[list[float]], words: str) -> None:
    reached = []
    for place, (arm, given) in enumerate(zip(arms, values, strict=True)):
        if not given:
            axis.text(place, 0.02, "no result", ha="center", transform=axis.get_xaxis_transform())
            continue
        mean, reach = sum(given) / len(given), interval(given) if len(given) > 1 else 0.0
        if len(given) > 1:
            places = place + 0.28 + np.linspace(-0.1, 0.1, len(given))
            axis.scatter(places, given, color=arm.style["color"], s=16, alpha=0.55)
        axis.errorbar(place, mean, reach or None, fmt="D", color=arm.style["color"], capsize=6)
        top = max(mean + reach, *given)
        style = {"textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{mean:#.5g}", (place, top), (0, 5), fontsize=8, **style)
        reached += [mean - reach, top, *given]
    low, high = min(reached), max(reached)
    room = (high - low) or 0.01 * abs(low) or 0.01
    axis.set_ylim(low - 0.15 * room, high + 0.2 * room)
    axis.set_xlim(-0.6, len(arms) - 0.2)
    axis.set_xticks([])
    axis.locator_params(axis="y", nbins=6)
    axis.set_ylabel(words)
    several = any(len(given) > 1 for given in values)
    axis.set_title("mean, 95 % interval, one dot per seed" if several else "one seed", fontsize=9)


def draw(groups: Mapping[str, Sequence[Run]], notes: list[str], path: Path) -> None:
    """Writes the picture of the arms by their names, with notes."""
    from matplotlib.figure import Figure  # optional, and slow to import

    arms = [Arm(name[:LINE], runs, style(n)) for n, (name, runs) in enumerate(groups.items())]
    curves, words = curves_of(arms)
    panels: list[Callable[[Any], None]] = []
    if curves:
        panels.append(lambda axis: draw_curves(axis, arms, curves, words))
    for values, about in (result_values(arms), wait_values(arms)):
        if values:
            panels.append(lambda axis, v=values, w=about: draw_dots(axis, arms, v, w))
    if not panels:
        raise ToolError(f"--plot {path}: no run has a result or a curve")
    if not curves:
        notes.append(f"no curves: not all runs have {FEW} points of a quantity to compare")
    widths = [3 if curves and not i else 2 for i in range(len(panels))]
    width = 2.6 + 2.1 * sum(widths) * (0.8 if len(panels) > 1 else 1)
    note = textwrap.fill(f"Note: {'; '.join(notes)}", int(13 * width)) if notes else ""
    lines = len(arms) + note.count("\n")
    figure = Figure(figsize=(width, 4.6 + 0.2 * lines), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis)
        axis.grid(color="#dddddd", linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    draw_legend(figure, arms, note)
    runs = f"{sum(len(arm.runs) for arm in arms)} runs"
    name = arms[0].name if len(arms) == 1 else f"{len(arms)} arms"
    figure.suptitle(f"{name}, {runs}")
    figure.savefig(path, dpi=150)


def draw_legend(figure: Any, arms: Sequence[Arm], note: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **arm.style, marker="D", label=arm.name) for arm in arms]
    place = {"loc": "outside lower center", "frameon": False}
    legend = figure.legend(handles=handles, title=note or None, title_fontsize=9, **place)
    legend.get_title().set_color("#a00000")
