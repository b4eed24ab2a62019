"""Tables and pictures of runs, for compare.py and ablate.py."""

import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from cli import ToolError, cell, counted, some, table
from runs import Logs, Run
from samples import (
    BITS,
    CAP_BYTES,
    differences,
    faults_of_split,
    interval,
    labels,
    other_tokenizers,
    seed_groups,
    spread,
    trace,
    value_of,
)

# --- tables ---


def report(logs: Logs, allow: Collection[str] = ()) -> list[str]:
    """What differs, times, results, data and remarks, in blocks."""
    runs, notes = logs.runs, [f"  {problem}" for problem in logs.problems]
    title = "Results (result: the one that counts, bits per byte; bytes; left: of 16,000,000)"
    blocks = [difference_lines(runs)]
    blocks += [["Time (wait: for input, per step)", *table_of(runs, TIME)]]
    blocks += [[title, *table_of(runs, RESULT)]]
    blocks += [[*group_lines(runs, allow), data_line(runs)], remark_lines(runs)]
    blocks += [["Notes on the files", *notes]] if notes else []
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def difference_lines(runs: Sequence[Run]) -> list[str]:
    different, equal = differences(runs)
    numbers = [run.known_seed for run in runs]
    seeds = {seed: [i for i, other in enumerate(numbers) if other == seed] for seed in numbers}
    rows = [("seed", value_words([*seeds.items()]))]
    for d in different:
        unknown = f" | not known: {counted(d.unknown)}" if d.unknown else ""
        rows.append((d.name + " (harmless)" * d.harmless(), value_words(d.values) + unknown))
    lines = [f"What differs (numbers: the runs below; {equal} settings and conditions are equal)"]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    if not different and all(run.steps for run in runs):
        lines.append("  nothing else" if len(runs) > 1 else "  one run: nothing to differ from")
    return lines


def value_words(values: Sequence[tuple[Any, Sequence[int]]]) -> str:
    return some([f"{cell(value)[:40]}: {counted(numbers)}" for value, numbers in values], 6, " | ")


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
    names = enumerate(zip(labels(runs), runs, strict=True), 1)
    rows = [[str(n), name, *(show(run) for show in columns.values())] for n, (name, run) in names]
    return table(["#", "log", *columns], rows)


def group_lines(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    lines = []
    for numbers in seed_groups(runs, allow):
        parts = []
        for unit in ("nats", "bits per byte"):
            values = [value_of(runs[i].result, unit) for i in numbers]
            if len(numbers) > 1 and None not in values:
                parts.append(f"{unit} {fmean(values):.5f} std {spread(values):.5f}")
        if parts:
            lines.append(f"Runs {counted(numbers)}, equal but for the seed: {', '.join(parts)}")
    return lines


def data_line(runs: Sequence[Run]) -> str:
    """Were the same batches trained on, up to the last step that all logs have?"""
    without = [index for index, run in enumerate(runs) if not run.crc_at()]
    missing = f"; no data_crc: {counted(without)}" if without else ""
    known = {index: crcs for index, run in enumerate(runs) if (crcs := run.crc_at())}
    common = set.intersection(*map(set, known.values())) if len(known) > 1 else set()
    if not common:
        return f"Same data: not known (no common step with a data_crc{missing})"
    step, crcs = max(common), {}
    for index, logged in known.items():
        crcs.setdefault(logged[step], []).append(index)
    text = " | ".join(f"{crc}: {counted(numbers)}" for crc, numbers in crcs.items())
    answer = "yes" if len(crcs) == 1 else "NO"
    return f"Same data: {answer}, data_crc at step {step} (the last common one): {text}{missing}"


def remark_lines(runs: Sequence[Run]) -> list[str]:
    """What a careful reader would notice about single runs."""
    remarks: dict[str, list[int]] = {}
    traces = [trace(run) for run in runs]
    for index, run in enumerate(runs):
        again = traces[index] is not None and traces[index] in traces[:index]
        same = [f"the same run as {1 + traces.index(traces[index])}, to the digit"] * again
        for remark in (*remarks_on(run), *same):
            remarks.setdefault(remark, []).append(index)
    lines = [f"  {counted(numbers)}: {remark}" for remark, numbers in remarks.items()]
    return ["Remarks", *lines] if lines else []


def remarks_on(run: Run) -> Iterator[str]:
    if not run.steps:
        yield "no step was read: in what it differs, and whether it is finished, is not known"
    elif run.status != "finished":
        yield f"{run.status} at step {run.last_step}" + (f": {run.error}" if run.error else "")
    if run.crc_at() and not run.path.endswith(".jsonl"):
        yield "read from its text, as another trainer's: there is no .jsonl beside it"
    if run.seed is not None and run.seed_in_name not in (None, run.seed):
        yield f"its name says seed {run.seed_in_name}, its log {run.seed}"
    if run.partial_val:
        yield "validated on a part of the split: its score may not be submitted"
    if run.resumed_at:
        other = ", with another script" if len({*run.scripts}) > 1 else ""
        yield f"resumed at step {some(run.resumed_at)}{other}"


def plot(arms: Sequence[Sequence[Run]], names: Sequence[str], path: Path) -> None:
    """Writes the picture. A run without a result is not a seed of an arm that has results."""
    kept = [[run for run in arm if run.result] or list(arm) for arm in arms]
    left_out = sum(map(len, arms)) - sum(map(len, kept))
    notes = [f"{left_out} unfinished run{'s' * (left_out != 1)} left out"] if left_out else []
    runs = [run for arm in kept for run in arm]
    notes += faults_of_split(runs, ["partial_val"])
    if all(run.partial_val for run in runs):
        notes.append("all runs were validated on a part of the split")
    datasets = sorted({run.dataset for run in runs if run.dataset})
    if len(datasets) > 1:
        notes.append(f"the runs have different data: {some(datasets, 4)}")
    draw(dict(zip(names, kept, strict=True)), notes, path)


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
