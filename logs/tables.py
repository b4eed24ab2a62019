"""Runs as text: what differs, how long, how good, on the same data. For compare.py and ablate.py.

report(logs, comparison=None, allow=())   the lines of all tables
labels(runs)                              names of the logs that tell them apart
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cli import cell, ranges, table
from configuration import differences, same_data, seed_groups, trace
from results import evaluation_ms, headline, passed_over, score
from runs import Logs, Run
from significance import (
    BITS,
    CAP_BYTES,
    NATS,
    Comparison,
    Question,
    other_texts,
    passed_over_words,
    some,
    summary,
    value_of,
    verdict,
    wait_words,
)


def report(
    logs: Logs, comparison: Comparison | None = None, allow: Collection[str] = ()
) -> list[str]:
    """All blocks, the answer first."""
    runs, blocks = logs.runs, []
    if comparison:
        blocks.append(comparison_lines(comparison))
    if len(runs) == 2 and (sentence := pair_words(runs)):
        blocks.append([f"Two runs: {sentence}"])
    if runs:
        blocks += [difference_lines(runs), group_lines(runs, allow), *table_lines(runs)]
        blocks += [part(runs) for part in (data_lines, remark_lines)]
    if logs.problems:
        blocks.append(["Could not be read", *(f"  {problem}" for problem in logs.problems)])
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def labels(runs: Sequence[Run], longest: int = 24) -> list[str]:
    """Names of the logs; with their folders, at most so long, where some are alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        folders = [Path(run.path).resolve().parent.name for run in runs]
        pairs = zip(folders, names, strict=True)
        names = [
            f"{folder[:longest]}{'…' * (len(folder) > longest)}/{name}" for folder, name in pairs
        ]
    return names


# --- the answer ---


def comparison_lines(comparison: Comparison) -> list[str]:
    lines = ["A against B", f"  {verdict(comparison)}"]
    if text := wait_words(comparison):
        lines.append(f"  {text}")
    for name, group in (("A", comparison.a), ("B", comparison.b)):
        if group:
            mean = f"{group.mean:.5f} {comparison.unit}, std {group.std:.5f}"
            lines.append(f"  {name}: {group.n} runs, submitted {mean}")
    if test := comparison.test:
        lines.append(
            f"  Welch's test: t = {test.t:.3f}, {test.df:.2f} degrees of freedom, "
            f"p = {test.p:.3g} (one-sided, margin {test.margin:g})"
        )
    return [*lines, *(f"  note: {note}" for note in comparison.notes)]


def pair_words(runs: Sequence[Run]) -> str:
    """Two runs alone: what input explains of their difference."""
    first, second = (run.step_times().mean for run in runs)
    results = [value_of(headline(run), BITS) for run in runs]
    parts = []
    if texts := other_texts(runs, Question()):
        parts += texts
    elif None not in results:
        parts.append(result_words(*results))
    waits = [run.input_wait_per_step() for run in runs]
    if first and second:
        more = f"{abs(second - first):.2f} ms per step {'more' if second >= first else 'less'}"
        explained = "what input has to do with it is not known: no input_wait in these logs"
        if None not in waits:
            explained = f"waiting for input is {waits[1] - waits[0]:+.2f} ms of that"
        parts.append(f"it takes {more} ({100 * (second / first - 1):+.1f} %), and {explained}")
    return "; ".join(parts)


def result_words(first: float, second: float) -> str:
    if first == second:
        return "the two runs have the same score"
    lower = "lower" if second < first else "higher"
    return f"run 2 is {abs(second - first):.5f} bits per byte {lower} than run 1"


# --- what differs ---


def difference_lines(runs: Sequence[Run]) -> list[str]:
    conditions, equal = differences(runs)
    seeds: dict[int | None, list[int]] = {}
    for index, run in enumerate(runs):
        seeds.setdefault(run.seed, []).append(index)
    rows = [("seed", value_words(list(seeds.items())))]
    for d in conditions:
        unknown = f" | not known: {ranges(d.unknown)}" if d.unknown else ""
        rows.append((d.name + " (harmless)" * d.harmless, value_words(d.values) + unknown))
    width = max(len(name) for name, _ in rows)
    title = "What differs in configuration (numbers: the runs below"
    lines = [f"{title}; {equal} conditions are equal)"]
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    if not conditions:
        lines.append("  nothing else" if len(runs) > 1 else "  one run: nothing to differ from")
    return lines


def value_words(values: Sequence[tuple[Any, Sequence[int]]], most: int = 8) -> str:
    parts = [f"{cell(value)[:60]}: {ranges(numbers)}" for value, numbers in values[:most]]
    if len(values) > most:
        parts.append(f"{len(values) - most} more values")
    return " | ".join(parts)


# --- tables ---


def run_row(run: Run) -> list[str]:
    seed = cell(run.seed)
    if run.seed is None and run.seed_in_name is not None:
        seed = f"{run.seed_in_name} (name)"
    gpus, device = run.hardware.get("gpus") or run.world_size, str(run.hardware.get("device", "-"))
    hardware = f"{gpus} x {device}" if gpus and device != "-" else device
    figures = cell(run.model_params, ","), cell(run.train_shards), cell(run.epochs, ".2f")
    return [run.status, seed, cell(run.versions.get("torch")), hardware, *figures]


def time_row(run: Run) -> list[str]:
    times, totals = run.step_times(), (run.train_time_ms, run.val_total_ms, evaluation_ms(run))
    share = run.input_wait_percent
    return [
        f"{run.last_step:,}",
        *(cell(ms, ".2f") for ms in (times.mean, times.p50, times.p99, times.max)),
        cell(run.input_wait_per_step(), ".2f"),
        "-" if share is None else f"{share:.2f}%",
        *(cell(ms and ms / 1e3, ",.1f") for ms in totals),
        cell(run.peak_mib, ","),
    ]


def score_row(run: Run) -> list[str]:
    last, own, total = run.final_validation, headline(run), run.sizes.total
    loss = next((s.train_loss for s in reversed(run.steps) if s.train_loss is not None), None)
    stages = (score(run, kind) for kind in ("pre_quant", "roundtrip", "sliding", "ttt"))
    return [
        cell(loss, ".4f"),
        cell(last and last.val_loss, ".4f"),
        cell(last and last.val_bpb, ".4f"),
        *(cell(stage and stage.val_bpb, ".5f") for stage in stages),
        cell(own and own.val_bpb, ".5f"),
        cell(own and own.val_loss, ".5f"),
        cell(run.sizes.code or run.source_bytes, ","),
        cell(run.sizes.artifact, ","),
        cell(total, ","),
        cell(None if total is None else CAP_BYTES - total, ","),
    ]


TABLES = (
    ("Runs", run_row, "status seed torch hardware parameters shards epochs"),
    (
        "Time (p50, p99, max: of the means between two training lines; wait: for input)",
        time_row,
        "steps ms/step p50 p99 max wait_ms/step wait train_s val_s eval_s peak_MiB",
    ),
    (
        "Results (bits per byte of each stage; submitted: the last one of the decoded artifact)",
        score_row,
        "train_loss val_loss val_bpb pre-quant roundtrip sliding TTT submitted its_nats code_B "
        "model_B total_B left_B",
    ),
)


def table_lines(runs: Sequence[Run]) -> list[list[str]]:
    names = list(enumerate(labels(runs), 1))
    blocks = []
    for title, row, head in TABLES:
        rows = [
            [str(number), name, *row(run)] for (number, name), run in zip(names, runs, strict=True)
        ]
        columns = [word.replace("_", " ") for word in head.split()]
        blocks.append([title, *table(["#", "log", *columns], rows)])
    return blocks


def group_lines(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    lines = []
    for numbers in seed_groups(runs, allow):
        parts = []
        for unit in (NATS, BITS):
            values = [value_of(headline(runs[i]), unit) for i in numbers]
            if len(numbers) > 1 and None not in values:
                group = summary(values)
                parts.append(f"{unit} {group.mean:.5f} std {group.std:.5f}")
        waits = [runs[i].input_wait_per_step() for i in numbers]
        if len(numbers) > 1 and None not in waits:
            group = summary(waits)
            parts.append(f"input_wait {group.mean:.2f} ms per step std {group.std:.2f}")
        if parts:
            lines.append(f"  runs {ranges(numbers)}: {', '.join(parts)}")
    return ["Groups: equal but for the seed (submitted results)", *lines] if lines else []


def data_lines(runs: Sequence[Run]) -> list[str]:
    without = [index for index, run in enumerate(runs) if not run.crc_at()]
    missing = f"; no data_crc: {ranges(without)}" if without else ""
    common = same_data(runs)
    if common is None:
        return [f"Same data: not known (no common step with a data_crc{missing})"]
    step, crcs = common
    text = " | ".join(f"{crc}: {ranges(numbers)}" for crc, numbers in crcs.items())
    answer = "yes" if len(crcs) == 1 else "NO"
    return [f"Same data: {answer}, data_crc at step {step} (the last common one): {text}{missing}"]


def remark_lines(runs: Sequence[Run]) -> list[str]:
    """What a careful reader would notice about single runs."""
    lines, first_of = [], {}
    for index, run in enumerate(runs, 1):
        known = trace(run)
        remarks = [*remarks_on(run)]
        if known is not None and first_of.setdefault(known, index) != index:
            same = f"to the digit the seed, time and result of run {first_of[known]}"
            remarks.append(f"{same}: the same run?")
        lines += [f"  {index}: {remark}" for remark in remarks]
    return ["Remarks", *lines] if lines else []


def remarks_on(run: Run) -> Iterable[str]:
    if run.status != "finished":
        yield f"{run.status} at step {run.last_step}" + (f": {run.error}" if run.error else "")
    if run.seed is not None and run.seed_in_name not in (None, run.seed):
        yield f"its name says seed {run.seed_in_name}, its log {run.seed}"
    if run.partial_val:
        yield "validated on a part of the split: its score may not be submitted"
    if run.resumed_at:
        yield f"continued at step {some([str(step) for step in run.resumed_at])}"
    if failed := passed_over(run):
        yield passed_over_words(run, failed).removeprefix(f"{run.name}: ")
    yield from size_remarks(run)


def size_remarks(run: Run) -> Iterator[str]:
    total = run.sizes.total
    if total is not None and total > CAP_BYTES:
        yield f"{total - CAP_BYTES:,} bytes over the cap of {CAP_BYTES:,}"
