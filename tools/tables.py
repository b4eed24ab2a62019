"""Runs as text, for compare.py and ablate.py: what differs, how long, how good, on what data."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from cli import cell, counted, table
from configuration import differences, same_data, seed_groups, trace
from results import evaluation_ms, headline, passed_over, score
from runs import Logs, Run
from significance import (
    BITS,
    CAP_BYTES,
    NATS,
    Comparison,
    some,
    summary,
    value_of,
    verdict,
    wait_words,
)

MOST_ROWS = 12  # of settings that differ; the others are named
STAGES = ("pre_quant", "roundtrip", "sliding", "ttt")


def report(
    logs: Logs, comparison: Comparison | None = None, allow: Collection[str] = ()
) -> list[str]:
    """All blocks, the answer first."""
    runs, blocks = logs.runs, []
    if comparison:
        blocks.append(comparison_lines(comparison))
    if runs:
        blocks += [difference_lines(runs), time_lines(runs), result_lines(runs)]
        blocks.append([*group_lines(runs, allow), data_line(runs)])
        blocks.append(remark_lines(runs))
    if logs.problems:
        blocks.append(["Notes on the files", *(f"  {problem}" for problem in logs.problems)])
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the logs; with their folders where some are alike."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{Path(run.path).resolve().parent.name[:24]}/{run.name}" for run in runs]


def comparison_lines(comparison: Comparison) -> list[str]:
    lines = ["A against B"]
    if comparison.refusals:
        return [*lines, *(f"  refused: {reason}" for reason in comparison.refusals)]
    lines += [f"  {part}" for part in verdict(comparison).split("; ")]
    lines += [f"  {text}"] if (text := wait_words(comparison)) else []
    for name, group in (("A", comparison.a), ("B", comparison.b)):
        mean = f"{group.mean:.5f} {comparison.unit}, std {group.std:.5f}"
        lines.append(f"  {name}: {group.n} runs, {mean}")
    test = comparison.test
    lines.append(
        f"  Welch's test: t = {test.t:.3f}, {test.df:.2f} degrees of freedom, "
        f"p = {test.p:.3g} (one-sided, margin {test.margin:g})"
    )
    return [*lines, *(f"  note: {note}" for note in comparison.notes)]


# --- what differs ---


def difference_lines(runs: Sequence[Run]) -> list[str]:
    conditions, equal = differences(runs)
    seeds: dict[int | None, list[int]] = {}
    for index, run in enumerate(runs):
        seeds.setdefault(run.known_seed, []).append(index)
    rows = [("seed", value_words(list(seeds.items())))]
    for d in conditions[:MOST_ROWS]:
        unknown = f" | not known: {counted(d.unknown)}" if d.unknown else ""
        rows.append((d.name + " (harmless)" * d.harmless, value_words(d.values) + unknown))
    lines = [f"What differs (numbers: the runs below; {equal} settings and conditions are equal)"]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    if more := [d.name for d in conditions[MOST_ROWS:]]:
        lines.append(f"  also: {some(more, 20)}")
    if not conditions:
        lines.append("  nothing else" if len(runs) > 1 else "  one run: nothing to differ from")
    return lines


def value_words(values: Sequence[tuple[Any, Sequence[int]]], most: int = 6) -> str:
    parts = [f"{cell(value)[:40]}: {counted(numbers)}" for value, numbers in values[:most]]
    if len(values) > most:
        parts.append(f"{len(values) - most} more values")
    return " | ".join(parts)


# --- tables ---


def numbered(runs: Sequence[Run], head: Sequence[str], rows: Sequence[list[str]]) -> list[str]:
    names = enumerate(labels(runs), 1)
    cells = [[str(n), name, *row] for (n, name), row in zip(names, rows, strict=True)]
    return table(["#", "log", *head], cells)


def time_lines(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        totals = (run.train_time_ms, run.val_total_ms, evaluation_ms(run))
        named = run.seed is None and run.known_seed is not None
        rows.append(
            [
                run.status,
                cell(run.known_seed) + " (name)" * named,
                f"{run.last_step:,}",
                cell(run.step_ms, ".2f"),
                cell(run.input_wait_per_step(), ".2f"),
                *(cell(ms and ms / 1e3, ",.1f") for ms in totals),
            ]
        )
    head = "status,seed,steps,ms/step,wait ms,train s,val s,eval s"
    return ["Time (wait: for input, per step)", *numbered(runs, head.split(","), rows)]


def result_lines(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        last, own, total = run.final_validation, headline(run), run.sizes.total
        loss = run.steps[-1].train_loss if run.steps else None
        stages = [score(run, kind) for kind in STAGES]
        rows.append(
            [
                cell(loss, ".4f"),
                cell(last and last.val_loss, ".4f"),
                *("-" if s in (None, own) else cell(s.val_bpb, ".5f") for s in stages),
                cell(own and own.val_bpb, ".5f"),
                cell(own and own.val_loss, ".5f"),
                cell(run.sizes.code or run.source_bytes, ","),
                cell(run.sizes.artifact, ","),
                cell(total, ","),
                cell(None if total is None else CAP_BYTES - total, ","),
            ]
        )
    head = "train loss,val loss,pre-quant,roundtrip,sliding,TTT,result,its nats,code,model,total"
    title = "Results (bits per byte; result: the one that counts; bytes; left: of 16,000,000)"
    return [title, *numbered(runs, [*head.split(","), "left"], rows)]


def group_lines(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    lines = []
    for numbers in seed_groups(runs, allow):
        parts = []
        for unit in (NATS, BITS):
            values = [value_of(headline(runs[i]), unit) for i in numbers]
            if len(numbers) > 1 and None not in values:
                group = summary(values)
                parts.append(f"{unit} {group.mean:.5f} std {group.std:.5f}")
        if parts:
            lines.append(f"Runs {counted(numbers)}, equal but for the seed: {', '.join(parts)}")
    return lines


def data_line(runs: Sequence[Run]) -> str:
    without = [index for index, run in enumerate(runs) if not run.crc_at()]
    missing = f"; no data_crc: {counted(without)}" if without else ""
    common = same_data(runs)
    if common is None:
        return f"Same data: not known (no common step with a data_crc{missing})"
    step, crcs = common
    text = " | ".join(f"{crc}: {counted(numbers)}" for crc, numbers in crcs.items())
    answer = "yes" if len(crcs) == 1 else "NO"
    return f"Same data: {answer}, data_crc at step {step} (the last common one): {text}{missing}"


def remark_lines(runs: Sequence[Run]) -> list[str]:
    """What a careful reader would notice about single runs."""
    remarks: dict[str, list[int]] = {}
    first_of: dict[Any, int] = {}
    for index, run in enumerate(runs):
        known = trace(run)
        said = [*remarks_on(run)]
        if known is not None and first_of.setdefault(known, index) != index:
            same = f"to the digit the seed, time and result of run {first_of[known] + 1}"
            said.append(f"{same}: the same run?")
        for remark in said:
            remarks.setdefault(remark, []).append(index)
    lines = [f"  {counted(numbers)}: {remark}" for remark, numbers in remarks.items()]
    return ["Remarks", *lines] if lines else []


def remarks_on(run: Run) -> Iterable[str]:
    if run.status != "finished":
        yield f"{run.status} at step {run.last_step}" + (f": {run.error}" if run.error else "")
    if run.seed is not None and run.seed_in_name not in (None, run.seed):
        yield f"its name says seed {run.seed_in_name}, its log {run.seed}"
    if run.partial_val:
        yield "validated on a part of the split: its score may not be submitted"
    if run.resumed_at:
        yield f"resumed at step {some([str(step) for step in run.resumed_at])}"
    if passed_over(run):
        last, own = passed_over(run)[-1], headline(run)
        yield (
            f"its last result, {last.tag} {last.val_bpb} (line {last.line}), is taken for a "
            f"failed evaluation: {own.tag} {own.val_bpb} counts instead"
        )
    total = run.sizes.total
    if total is not None and total > CAP_BYTES:
        yield f"{total - CAP_BYTES:,} bytes over the cap of {CAP_BYTES:,}"
