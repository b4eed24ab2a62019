"""Tables and pictures of runs, for compare.py and ablate.py."""

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import samples
from cli import cell, counted, some, table
from runs import Logs, Run
from samples import BITS, CAP_BYTES, Places, pairs_by_seed, places, unit_of, value_of


def report(logs: Logs, allow: Collection[str] = ()) -> str:
    """What differs, times, results, data and notes, in blocks."""
    runs = logs.runs
    title = "Results (result: the one that counts, bits per byte; bytes; left: of 16,000,000)"
    blocks = [
        difference_lines(runs),
        ["Time (wait: for input, per step)", *table_of(runs, TIME)],
        [title, *table_of(runs, RESULT)],
        [*group_lines(runs, allow), data_line(runs)],
        note_lines(logs),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def difference_lines(runs: Sequence[Run]) -> list[str]:
    known = samples.all_conditions(runs)
    equal = sum(len(values) == 1 for values in known.values())
    rows = [("seed", value_words(places(run.known_seed for run in runs)))]
    for name in samples.differences(known):
        rows.append((name + " (harmless)" * samples.is_harmless(name), value_words(known[name])))
    lines = [f"What differs (numbers: the runs below; {equal} settings and conditions are equal)"]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    alone: dict[str, list[str]] = {}
    for name, values in known.items():
        if len(values) == 2 and None in values:
            value, numbers = next(one for one in values.items() if one[0] is not None)
            alone.setdefault(counted(numbers), []).append(f"{name} {str(value)[:40]}")
    lines += [f"  only in {numbers}: {some(texts, 12)}" for numbers, texts in alone.items()]
    return lines


def value_words(values: Places) -> str:
    named = [("not known" if value is None else value, n) for value, n in values.items()]
    return some([f"{str(value)[:40]}: {counted(numbers)}" for value, numbers in named], 6, " | ")


def seconds(ms: float | None) -> str:
    return cell(ms and ms / 1e3, ",.1f")


Columns = dict[str, Callable[[Run], str]]  # what each shows of a run
TIME: Columns = {
    "status": lambda run: run.status,
    "seed": lambda run: cell(run.known_seed) + " (name)" * (run.seed != run.known_seed),
    "steps": lambda run: f"{run.last_step:,}",
    "ms/step": lambda run: cell(run.step_ms, ".2f"),
    "wait ms": lambda run: cell(run.input_wait_per_step(), ".2f"),
    "train s": lambda run: seconds(run.train_time_ms),
    "val s": lambda run: seconds(run.val_total_ms),
    "eval s": lambda run: seconds(run.eval_ms),
}
RESULT: Columns = {
    "train loss": lambda run: f"{run.steps[-1].train_loss:.4f}" if run.steps else "-",
    "val loss": lambda run: f"{run.validations[-1].val_loss:.4f}" if run.validations else "-",
    "result": lambda run: f"{run.result.val_bpb:.5f}" if run.result else "-",
    "its nats": lambda run: cell(run.result and run.result.val_loss, ".5f"),
    "kind": lambda run: run.result.kind if run.result else "-",
    "code": lambda run: cell(run.code_bytes, ","),
    "model": lambda run: cell(run.model_bytes, ","),
    "total": lambda run: cell(run.total_bytes, ","),
    "left": lambda run: cell(run.total_bytes and CAP_BYTES - run.total_bytes, ","),
}


def table_of(runs: Sequence[Run], columns: Columns) -> list[str]:
    names = enumerate(zip(samples.labels(runs), runs, strict=True), 1)
    rows = [[str(n), name, *(show(run) for show in columns.values())] for n, (name, run) in names]
    return table(["#", "log", *columns], rows)


def group_lines(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    lines, unit = [], unit_of(runs)
    for numbers in samples.seed_groups(runs, allow):
        values = [value_of(runs[number], unit) for number in numbers]
        if len(numbers) > 1 and None not in values:
            mean = f"{unit} {fmean(values):.5f} std {stdev(values):.5f}"
            lines.append(f"Runs {counted(numbers)}, equal but for the seed: {mean}")
    return lines


def data_line(runs: Sequence[Run]) -> str:
    """Were the same batches trained on, up to the last step that all logs have?"""
    known = [run.crc_at() for run in runs]
    steps = [set(crcs) for crcs in known if crcs]
    common = set.intersection(*steps) if steps[1:] else None
    if not common:
        return "Same data: not known (no common step with a data_crc)"
    crcs = places(own.get(max(common)) for own in known)
    answer = "yes" if len(crcs.keys() - {None}) == 1 else "NO"
    at = f"data_crc at step {max(common)} (the last common one)"
    return f"Same data: {answer}, {at}: {value_words(crcs)}"


def note_lines(logs: Logs) -> list[str]:
    """What a reader must know of the files and their runs."""
    notes = [*logs.problems, *samples.faults_of_split(logs.runs)]
    for run in logs.runs:
        if run.error:
            notes.append(f"{run.name}: {run.status} at step {run.last_step}: {run.error}")
        if run.resumed_at:
            notes.append(f"{run.name}: resumed at step {some(run.resumed_at)}")
    return ["Notes", *(f"  {note}" for note in notes)] if notes else []


# Okabe and Ito's colours, told apart with any colour vision, without the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", ":", "-.", "-", "--", ":")  # as many
MARKERS = ("D", "o", "s", "^", "v", "X")
WIDTH = 12  # inches
FEW = 3  # points that each run needs for a curve
NO_CURVES = f"no curves: not all runs have {FEW} validations, or training losses of one tokenizer"
QUANTITIES = {  # of a curve: its lines and the axis
    "val_bpb": ("validations", "validation, bits per byte"),
    "mean_loss": ("steps", "training loss, mean since the line before, nats per token"),
    "train_loss": ("steps", "training loss of single batches, nats per token"),
}


class Arm(NamedTuple):
    """Runs that differ only in their seed, and how they are drawn."""

    name: str
    runs: Sequence[Run]
    style: dict[str, str]


def plot(
    arms: Sequence[Sequence[Run]], names: Sequence[str], path: Path, verdicts: Sequence[str] = ()
) -> None:
    """Writes the picture of compare.py and ablate.py: each arm's mean over its seeds against steps,
    with a band, and the results, or, with `verdicts`, the differences from the first arm by seed.
    A run without a result is not a seed of an arm that has results. A note below says what a reader
    must know."""
    from matplotlib import cycler  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    kept = [[run for run in arm if run.result] or list(arm) for arm in arms]
    styles = cycle(cycler(marker=MARKERS) * cycler(color=COLOURS, linestyle=DASHES))
    arms_and_styles = zip(names, kept, styles, strict=False)
    drawn = [Arm(name[:72], runs, style) for name, runs, style in arms_and_styles]
    quantity = quantity_of([run for runs in kept for run in runs])
    values, words = dots_of(drawn, by_seed=bool(verdicts))
    notes = notes_on(arms, kept) + [NO_CURVES] * (not quantity)
    title = verdicts or [f"arms: {len(drawn)}, runs: {sum(map(len, kept))}"]
    note = textwrap.fill(f"Note: {'; '.join(notes)}", 13 * WIDTH) if notes else ""
    lines = [part for line in title for part in textwrap.wrap(line, 11 * WIDTH)]
    rows = len(arms) + note.count("\n") + len(lines)
    figure = Figure(figsize=(WIDTH, 4.4 + 0.2 * rows), layout="constrained")
    if quantity:
        curves, dots = figure.subplots(1, 2, width_ratios=[3, 2])
        draw_curves(curves, drawn, quantity)
    else:
        dots = figure.subplots()
    draw_dots(dots, drawn, values, words)
    for axis in figure.axes:
        axis.grid(color="#dddddd", linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], **arm.style, label=arm.name) for arm in drawn]
    place = {"loc": "outside lower center", "frameon": False}
    legend = figure.legend(handles=handles, title=note or None, title_fontsize=9, **place)
    legend.get_title().set_color("#a00000")
    figure.suptitle("\n".join(lines), fontsize=11)
    figure.savefig(path, dpi=150)


def notes_on(arms: Sequence[Sequence[Run]], kept: Sequence[Sequence[Run]]) -> list[str]:
    left_out = sum(map(len, arms)) - sum(map(len, kept))
    notes = [f"{left_out} unfinished run{'s' * (left_out != 1)} left out"] if left_out else []
    notes += samples.faults_of_split([run for arm in kept for run in arm])
    scored = [[run for run in arm if run.result] for arm in kept]
    scores = [{(run.known_seed, run.result.val_bpb) for run in arm} for arm in scored if arm]
    if (most := max(map(scores.count, scores), default=0)) > 1:
        notes.append(f"{most} arms have equal results, seed by seed, to the digit")
    return notes


def quantity_of(runs: Sequence[Run]) -> str:
    """The first quantity of which all runs have enough points; none: empty."""
    for name in QUANTITIES if unit_of(runs) != BITS else ["val_bpb"]:
        if all(len(points_of(run, name)) >= FEW for run in runs):
            return name
    return ""


def points_of(run: Run, quantity: str) -> dict[int, float]:
    """Without the validation before the first step: the line from it shows nothing."""
    lines = [line for line in getattr(run, QUANTITIES[quantity][0]) if line.step > 0]
    values = {line.step: getattr(line, quantity) for line in lines}
    return {step: v for step, v in values.items() if v is not None and math.isfinite(v)}


def draw_curves(axis: Any, arms: Sequence[Arm], quantity: str) -> None:
    import pandas  # slow to import

    for arm in arms:
        columns = [pandas.Series(points_of(run, quantity), dtype=float) for run in arm.runs]
        points = pandas.concat(columns, axis=1).sort_index()
        # All runs at all steps, between their own points and never beyond them.
        curve = points.interpolate("index", limit_area="inside").dropna()
        curve = curve[curve.index >= 0.2 * curve.index.max()]  # after the fall of the first steps
        mean = curve.mean(axis=1)
        style = arm.style | {"marker": "o" if len(curve) < 25 else None}
        axis.plot(curve.index, mean, linewidth=1.6, markersize=3, **style)
        if len(arm.runs) > 1:
            low, high = mean - curve.std(axis=1), mean + curve.std(axis=1)
            style = {"color": arm.style["color"], "alpha": 0.2, "linewidth": 0}
            axis.fill_between(curve.index, low, high, **style)
    axis.set_title("mean over seeds, band: one standard deviation", fontsize=9)
    axis.set(xlabel="training step", ylabel=QUANTITIES[quantity][1])


def dots_of(arms: Sequence[Arm], by_seed: bool) -> tuple[list[list[float]], str]:
    """The results of each arm, or how much higher that of each seed is than the first arm's."""
    if not by_seed:
        known = [[value_of(run, BITS) for run in arm.runs] for arm in arms]
        return [[v for v in arm if v is not None] for arm in known], "result, bits per byte"
    unit = unit_of([run for arm in arms for run in arm.runs])
    first, *others = (arm.runs for arm in arms)
    pairs = [pairs_by_seed(first, runs, lambda run: value_of(run, unit)) for runs in others]
    values = [[theirs - ours for ours, theirs in arm] for arm in pairs]
    return [[], *values], f"{unit} above {arms[0].name}, same seed; lower is better"


def draw_dots(axis: Any, arms: Sequence[Arm], values: list[list[float]], words: str) -> None:
    for place, (arm, given) in enumerate(zip(arms, values, strict=True)):
        if not given:
            continue
        mean, reach = fmean(given), 0.0
        style = {"color": arm.style["color"]}
        if len(given) > 1:
            reach = samples.t_test([0.0] * len(given), given, by_seed=True).high - mean
            places = place + 0.28 + np.linspace(-0.1, 0.1, len(given))
            axis.scatter(places, given, s=16, alpha=0.55, **style)
        axis.errorbar(place, mean, reach or None, capsize=6, fmt=arm.style["marker"], **style)
        top = (place, max(mean + reach, *given))
        style |= {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axis.annotate(f"{mean:#.5g}", top, (0, 5), **style)
    if not values[0] and values[1:]:  # differences: the first arm is the line at 0
        axis.axhline(0, color=arms[0].style["color"], linewidth=1.2)
    axis.margins(y=0.15)
    axis.set_xlim(-0.6, len(arms) - 0.2)
    axis.set_xticks([])
    axis.set_ylabel(words)
    axis.set_title("mean, 95 % interval, one dot per seed", fontsize=9)
