"""Tables and plots of runs, for compare.py and ablate.py.

This module builds on runs.py (what a log says), samples.py (which runs belong together), cli.py
(tables as text) and figures.py (writes plots). matplotlib and pandas are imported only for a plot.
"""

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import samples
from cli import format_cell, format_numbers, format_table, join_some, one_line
from figures import write_figure
from runs import Logs, Run
from samples import (
    BITS,
    SIZE_LIMIT_BYTES,
    IndicesByValue,
    choose_unit,
    indices_by_value,
    pairs_by_seed,
    result_value,
)


def report(logs: Logs, allow: Collection[str] = ()) -> str:
    """Return what differs, times, results, data and notes, as blocks of text."""
    runs = logs.runs
    title = "Results in bits per byte; sizes in bytes; left = unused bytes of 16,000,000"
    blocks = [
        difference_lines(runs),
        ["Time (wait = input wait per step)", *format_runs(runs, TIME)],
        [title, *format_runs(runs, RESULT)],
        [line for line in (*group_lines(runs, allow), data_line(runs)) if line],
        note_lines(logs),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def difference_lines(runs: Sequence[Run]) -> list[str]:
    """Return the seeds and the conditions that differ. A single run differs from nothing."""
    if len(runs) < 2:
        return []
    known = samples.all_conditions(runs)
    equal = sum(len(values) == 1 for values in known.values())
    rows = [("seed", value_words(indices_by_value(run.known_seed for run in runs)))]
    for name in samples.differing_conditions(known):
        note = " (harmless)" if samples.is_harmless(name) else ""
        rows.append((name + note, value_words(known[name])))
    title = "What differs (with the numbers of the runs below;"
    lines = [f"{title} {equal} settings and conditions are equal)"]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    # Conditions that only some logs have, such as the setting of a recipe.
    only_in: dict[str, list[str]] = {}
    for name, values in known.items():
        if len(values) == 2 and None in values:
            [value] = [value for value in values if value is not None]
            numbers = format_numbers(values[value])
            only_in.setdefault(numbers, []).append(f"{name} {str(value)[:40]}")
    lines += [f"  only in {numbers}: {join_some(texts, 12)}" for numbers, texts in only_in.items()]
    return lines


def value_words(values: IndicesByValue) -> str:
    """Return each value with the numbers of its runs, such as `0.04: 1, 2 | 0.02: 3`."""
    texts = []
    for value, indices in values.items():
        name = "not known" if value is None else str(value)[:40]
        texts.append(f"{name}: {format_numbers(indices)}")
    return join_some(texts, 6, " | ")


def seconds(ms: float | None) -> str:
    return format_cell(ms and ms / 1e3, ",.1f")


Columns = dict[str, Callable[[Run], str]]  # {head of a column: the cell of a run}
TIME: Columns = {
    "status": lambda run: run.status,
    # "(name)": the log says no seed, but its name does.
    "seed": lambda run: format_cell(run.known_seed) + " (name)" * (run.seed != run.known_seed),
    "steps": lambda run: f"{run.last_step:,}",
    "ms/step": lambda run: format_cell(run.step_ms, ".2f"),
    "wait ms": lambda run: format_cell(run.input_wait_per_step(), ".2f"),
    "train s": lambda run: seconds(run.train_time_ms),
    "val s": lambda run: seconds(run.val_total_ms),
    "eval s": lambda run: seconds(run.eval_ms),
}
RESULT: Columns = {
    "train loss": lambda run: f"{run.steps[-1].train_loss:.4f}" if run.steps else "-",
    "val loss": lambda run: f"{run.validations[-1].val_loss:.4f}" if run.validations else "-",
    "result": lambda run: f"{run.result.val_bpb:.5f}" if run.result else "-",
    "nats": lambda run: format_cell(run.result and run.result.val_loss, ".5f"),
    "kind": lambda run: run.result.kind if run.result else "-",
    "code": lambda run: format_cell(run.code_bytes, ","),
    "model": lambda run: format_cell(run.model_bytes, ","),
    "total": lambda run: format_cell(run.total_bytes, ","),
    "left": lambda run: format_cell(run.total_bytes and SIZE_LIMIT_BYTES - run.total_bytes, ","),
}


def format_runs(runs: Sequence[Run], columns: Columns) -> list[str]:
    """Return a table with a line for each run: its number, its log's name and the columns."""
    rows = []
    for number, (name, run) in enumerate(zip(samples.log_labels(runs), runs, strict=True), 1):
        rows.append([str(number), name, *(show(run) for show in columns.values())])
    return format_table(["#", "log", *columns], rows)


def group_lines(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    """Return mean and standard deviation of each group of runs that differ only in their seed."""
    unit = choose_unit(runs)
    lines = []
    for indices in samples.seed_groups(runs, allow):
        values = [result_value(runs[index], unit) for index in indices]
        if len(indices) > 1 and None not in values:
            mean = f"mean {fmean(values):.5f} {unit}, std {stdev(values):.5f}"
            lines.append(f"Runs {format_numbers(indices)} differ only in their seed: {mean}")
    return lines


def data_line(runs: Sequence[Run]) -> str:
    """Return whether the runs trained on the same batches, up to the last step that all logs have.
    For a single run, return an empty line."""
    if len(runs) < 2:
        return ""
    known = [run.data_crcs() for run in runs]
    steps = [set(crcs) for crcs in known if crcs]
    common = set.intersection(*steps) if len(steps) > 1 else None
    if not common:
        return "Same data: not known (the logs have no common step with a data_crc)"
    step = max(common)
    crcs = indices_by_value(crcs_of_run.get(step) for crcs_of_run in known)
    answer = "yes" if len(crcs.keys() - {None}) == 1 else "NO"
    return (
        f"Same data: {answer}, data_crc at step {step} (the last common one): {value_words(crcs)}"
    )


def note_lines(logs: Logs) -> list[str]:
    """Return what a reader must know about the files and their runs."""
    notes = [*logs.problems, *samples.find_split_faults(logs.runs)]
    for run in logs.runs:
        if run.error:
            notes.append(f"{run.name}: {run.status} at step {run.last_step}: {run.error}")
        if run.resumed_at:
            notes.append(f"{run.name}: resumed at step {join_some(run.resumed_at)}")
    return ["Notes", *(f"  {note}" for note in notes)] if notes else []


# The palette of Okabe and Ito without its yellow: people with any colour vision can read it.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", ":", "-.", "-", "--", ":")  # one for each colour
MARKERS = ("D", "o", "s", "^", "v", "X")
WIDTH = 12  # inches
MIN_POINTS = 3  # that each run needs for a curve
NO_CURVES = (
    f"no curves: not all runs have {MIN_POINTS} validations, or training losses of one tokenizer"
)
QUANTITIES = {  # what a curve can show: {name: (lines of the log, label of the axis)}
    "val_bpb": ("validations", "validation score (bits per byte)"),
    "mean_loss": ("steps", "training loss (nats per token), mean since the previous line"),
    "train_loss": ("steps", "training loss of single batches (nats per token)"),
}


class Variant(NamedTuple):
    """Runs that differ only in their seed, and how they are drawn."""

    name: str
    runs: Sequence[Run]
    style: dict[str, str]


def plot(
    groups: Sequence[Sequence[Run]],
    names: Sequence[str],
    path: Path,
    verdicts: Sequence[str] = (),
) -> bool:
    """Write the plot of compare.py and ablate.py. On the left is each variant's mean over its seeds
    against the step, with a band of one standard deviation. On the right are the results or, with
    `verdicts`, the differences from the first variant with the same seed. If a variant has runs
    with a result, its other runs are left out. A note below says what a reader must know. Return
    whether the plot was written; if not, the reason was printed."""
    names, verdicts = [one_line(name) for name in names], [one_line(line) for line in verdicts]
    return write_figure(lambda: make_figure(groups, names, verdicts), path)


def make_figure(
    groups: Sequence[Sequence[Run]], names: Sequence[str], verdicts: Sequence[str]
) -> Any:
    """Return the matplotlib figure that `plot` writes."""
    from matplotlib import cycler  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    kept = [[run for run in group if run.result] or list(group) for group in groups]
    styles = cycle(cycler(marker=MARKERS) * cycler(color=COLOURS, linestyle=DASHES))
    drawn = [
        Variant(name[:72], runs, style)
        for name, runs, style in zip(names, kept, styles, strict=False)
    ]
    quantity = choose_quantity([run for runs in kept for run in runs])
    values, axis_label = values_to_draw(drawn, by_seed=bool(verdicts))
    notes = plot_notes(groups, kept)
    if not quantity:
        notes.append(NO_CURVES)
    title = verdicts or [f"variants: {len(drawn)}, runs: {sum(map(len, kept))}"]
    note = textwrap.fill(f"Note: {'; '.join(notes)}", 13 * WIDTH) if notes else ""
    lines = [part for line in title for part in textwrap.wrap(line, 11 * WIDTH)]
    rows = len(groups) + note.count("\n") + len(lines)
    figure = Figure(figsize=(WIDTH, 4.4 + 0.2 * rows), layout="constrained", dpi=150)
    if quantity:
        curves, dots = figure.subplots(1, 2, width_ratios=[3, 2])
        draw_curves(curves, drawn, quantity)
    else:
        dots = figure.subplots()
    draw_dots(dots, drawn, values, axis_label)
    for axis in figure.axes:
        axis.grid(color="#dddddd", linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], **variant.style, label=variant.name) for variant in drawn]
    place = {"loc": "outside lower center", "frameon": False}
    legend = figure.legend(handles=handles, title=note or None, title_fontsize=9, **place)
    legend.get_title().set_color("#a00000")
    figure.suptitle("\n".join(lines), fontsize=11)
    return figure


def plot_notes(groups: Sequence[Sequence[Run]], kept: Sequence[Sequence[Run]]) -> list[str]:
    """Return what the plot cannot show: runs that are left out, scores that are not comparable,
    variants whose results are equal."""
    left_out = sum(map(len, groups)) - sum(map(len, kept))
    notes = [f"{left_out} unfinished run{'s' * (left_out != 1)} left out"] if left_out else []
    notes += samples.find_split_faults([run for runs in kept for run in runs])
    scored = [[run for run in runs if run.result] for runs in kept]
    scores = [{(run.known_seed, run.result.val_bpb) for run in runs} for runs in scored if runs]
    most_equal = max(map(scores.count, scores), default=0)
    if most_equal > 1:
        notes.append(
            f"the results of {most_equal} variants are equal to the last digit for each seed"
        )
    return notes


def choose_quantity(runs: Sequence[Run]) -> str:
    """Return the first of QUANTITIES of which all runs have enough points; empty if there is none.
    Training losses of different tokenizers are not comparable."""
    for name in QUANTITIES if choose_unit(runs) != BITS else ["val_bpb"]:
        if all(len(curve_points(run, name)) >= MIN_POINTS for run in runs):
            return name
    return ""


def curve_points(run: Run, quantity: str) -> dict[int, float]:
    """Return {step: value}, without the validation before the first step, which is far above."""
    lines = [line for line in getattr(run, QUANTITIES[quantity][0]) if line.step > 0]
    values = {line.step: getattr(line, quantity) for line in lines}
    return {step: v for step, v in values.items() if v is not None and math.isfinite(v)}


def draw_curves(axis: Any, variants: Sequence[Variant], quantity: str) -> None:
    import pandas  # slow to import

    for variant in variants:
        columns = [pandas.Series(curve_points(run, quantity), dtype=float) for run in variant.runs]
        points = pandas.concat(columns, axis=1).sort_index()
        # Runs may have logged different steps, so each run is interpolated between its points.
        curve = points.interpolate("index", limit_area="inside").dropna()
        curve = curve[curve.index >= 0.2 * curve.index.max()]  # without the steep first fifth
        mean = curve.mean(axis=1)
        style = variant.style | {"marker": "o" if len(curve) < 25 else None}
        axis.plot(curve.index, mean, linewidth=1.6, markersize=3, **style)
        if len(variant.runs) > 1:
            low, high = mean - curve.std(axis=1), mean + curve.std(axis=1)
            style = {"color": variant.style["color"], "alpha": 0.2, "linewidth": 0}
            axis.fill_between(curve.index, low, high, **style)
    axis.set_title("mean over the seeds; the band is one standard deviation", fontsize=9)
    axis.set(xlabel="training step", ylabel=QUANTITIES[quantity][1])


def values_to_draw(variants: Sequence[Variant], by_seed: bool) -> tuple[list[list[float]], str]:
    """Return (the values of each variant, the label of their axis): the results, or, with by_seed,
    how much higher the result of each seed is than that of the first variant."""
    if not by_seed:
        results = [[result_value(run, BITS) for run in variant.runs] for variant in variants]
        known = [[value for value in values if value is not None] for values in results]
        return known, "result (bits per byte)"
    unit = choose_unit([run for variant in variants for run in variant.runs])
    first, *others = (variant.runs for variant in variants)
    differences = [[]]  # the first variant does not differ from itself
    for runs in others:
        pairs = pairs_by_seed(first, runs, lambda run: result_value(run, unit))
        differences.append([value - base for base, value in pairs])
    return differences, f"{unit} above {variants[0].name} with the same seed; lower is better"


def draw_dots(
    axis: Any, variants: Sequence[Variant], values: list[list[float]], axis_label: str
) -> None:
    """Draw for each variant the mean of its values, its 95 % interval, and a dot for each seed."""
    import numpy as np  # slow to import

    for x, (variant, seed_values) in enumerate(zip(variants, values, strict=True)):
        if not seed_values:
            continue
        mean, half_width = fmean(seed_values), 0.0
        style = {"color": variant.style["color"]}
        if len(seed_values) > 1:
            zeros = [0.0] * len(seed_values)
            half_width = samples.t_test(zeros, seed_values, by_seed=True).high - mean
            dots_x = x + 0.28 + np.linspace(-0.1, 0.1, len(seed_values))
            axis.scatter(dots_x, seed_values, s=16, alpha=0.55, **style)
        marker = variant.style["marker"]
        axis.errorbar(x, mean, half_width or None, capsize=6, fmt=marker, **style)
        top = (x, max(mean + half_width, *seed_values))
        style |= {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axis.annotate(f"{mean:#.5g}", top, (0, 5), **style)
    if not values[0] and values[1:]:  # the values are differences: the first variant is at 0
        axis.axhline(0, color=variants[0].style["color"], linewidth=1.2)
    axis.margins(y=0.15)
    axis.set_xlim(-0.6, len(variants) - 0.2)
    axis.set_xticks([])
    axis.set_xlabel("variants, in the order of the legend")
    axis.set_ylabel(axis_label)
    axis.set_title("mean with its 95 % interval; one dot for each seed", fontsize=9)


class Effect(NamedTuple):
    """The difference of a variant's loss from that of the first variant, for `plot_effects`."""

    variant: str
    block: str  # for example DATA_PATH=prose; empty if there is only one block
    unit: str
    test: samples.Test
    measurable: bool


def plot_effects(effects: Sequence[Effect], path: Path) -> bool:
    """Write a forest plot: for each variant, and for each block, the difference of the loss with
    its 95 % interval, the variant with the lowest mean at the top. Return whether it was written;
    if not, the reason was printed."""
    return write_figure(lambda: make_effects_figure(effects), path)


def make_effects_figure(effects: Sequence[Effect]) -> Any:
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.lines import Line2D

    by_variant: dict[str, list[float]] = {}
    for effect in effects:
        by_variant.setdefault(effect.variant, []).append(effect.test.difference)
    names = sorted(by_variant, key=lambda name: fmean(by_variant[name]))
    blocks = [*dict.fromkeys(effect.block for effect in effects)]
    styles = [
        {"marker": marker, "color": colour}
        for marker, colour, _ in zip(cycle(MARKERS), cycle(COLOURS), blocks, strict=False)
    ]
    height = 1.6 + len(names) * (0.16 + 0.14 * len(blocks))
    figure = Figure(figsize=(WIDTH * 0.8, height), layout="constrained", dpi=150)
    axis = figure.subplots()
    for effect in effects:
        number = blocks.index(effect.block)
        style = styles[number]
        y = names.index(effect.variant) + 0.22 * (number - (len(blocks) - 1) / 2)
        half_width = effect.test.high - effect.test.difference
        fill = {"markerfacecolor": None if effect.measurable else "white"}
        bar = {"xerr": half_width, "linestyle": "none", "markersize": 5, "capsize": 2}
        axis.errorbar(effect.test.difference, y, **bar, **style, **fill)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(names)), [one_line(name)[:60] for name in names], fontsize=9)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(color="#dddddd", linewidth=0.6, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(
        f"difference of the loss from the first variant ({effects[0].unit}); left: better"
    )
    handles = [
        Line2D([], [], linestyle="none", label=one_line(block), **style)
        for block, style in zip(blocks, styles, strict=True)
        if block
    ]
    marker = {"linestyle": "none", "marker": MARKERS[0], "color": "#444444"}
    handles.append(Line2D([], [], label="measurable", **marker))
    handles.append(Line2D([], [], label="not measurable", markerfacecolor="white", **marker))
    place = {"loc": "outside lower center", "frameon": False, "ncols": 2, "fontsize": 9}
    figure.legend(handles=handles, **place)
    figure.suptitle("Effect on the loss, with 95 % intervals, paired by seed", fontsize=11)
    return figure
