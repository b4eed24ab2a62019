"""Compare runs: what differs, how long, how good, on the same data?
Any log of the parameter-golf family is read.

    # tables; a LOG is a file or a folder of logs
    python3 logs/compare.py LOG...
    # a picture for a pull request (.png or .svg)
    python3 logs/compare.py LOG... --plot runs.svg
    # is A's loss lower than B's by more than --margin?
    python3 logs/compare.py --a LOG... --b LOG...

A and B are runs of one configuration each, with several seeds. Compared are the results that are
submitted (the last of each run), by Welch's one-sided test, in nats a token; in bits a byte where
tokenizers differ. It is refused, with the reasons, where a group mixes configurations, where runs
are missing, unfinished or the same, where one was scored on a part of the split.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launch
import stats
from read_log import Logs, Run, read_logs

CAP_BYTES = 16_000_000  # script and model, decimal
MARGIN = 0.005  # nats a token: what the challenge asks of a record
SAME_RATE = 0.002  # of bytes a token: runs that differ by more have other tokenizers
NOT_CONFIGURATION = {
    "run_id", "seed", "logfile", "log_file", "artifact_dir", "output_dir", "model_path", "resume",
    "quantized_model_path", "checkpoint_dir", "ttt_output_dir", "rank", "local_rank", "distributed",
    "is_main_process", "warning",
}  # fmt: skip
PATHS = {
    "data_path", "tokenizer_path", "data_dir", "datasets_dir", "train_files", "val_files",
    "val_bytes_files",
}  # fmt: skip
# Shown where they differ, but no reason why results would: periods of lines, surroundings.
HARMLESS = {
    "train_log_every", "val_loss_every", "val_progress_log_every", "training_timing_every",
    "checkpoint_every", "checkpoint_keep", "trace_steps", "python", "cpus", "platform", "data_dir",
}  # fmt: skip


@dataclass
class Difference:
    """A condition that is not equal in all runs: each value with the numbers (from 0) of its runs,
    and the runs whose logs do not tell it."""

    name: str
    values: list[tuple[Any, list[int]]]
    unknown: list[int]
    harmless: bool


@dataclass
class Comparison:
    """A against B: refused for `refusals`, or tested."""

    unit: str = "nats"  # or bits a byte
    margin: float = MARGIN
    alpha: float = 0.01
    a: stats.Group | None = None
    b: stats.Group | None = None
    test: stats.Test | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# --- what differs ---


def conditions(run: Run) -> dict[str, Any]:
    """All that a run was made with and that a log may tell: settings, code, versions, devices,
    data; not the seed."""
    found = {
        name: Path(value).name if name in PATHS and isinstance(value, str) else value
        for name, value in run.config.items()
        if name not in NOT_CONFIGURATION and name != "datasets_dir"
    }
    if run.grad_accum_steps is not None:
        found.pop("grad_accum_steps", None)
    found |= {
        "code": run.source_sha256 and run.source_sha256[:12],
        "code_bytes": run.sizes.code or run.source_bytes,
        "model_params": run.model_params,
        "world_size": run.world_size,
        "effective_grad_accum_steps": run.grad_accum_steps,
        "dataset": run.dataset,
        "train_shards": run.train_shards,
        "val_split_tokens": run.val_tokens,
        **run.versions,
        **run.hardware,
    }
    return {name: value for name, value in found.items() if value is not None}


def differences(runs: Sequence[Run]) -> tuple[list[Difference], int]:
    """Conditions that differ, and how many are equal in all runs that tell them."""
    told = [conditions(run) for run in runs]
    hashed = all("code" in one for one in told)  # then the number of code bytes says nothing more
    result, equal = [], 0
    for name in dict.fromkeys(name for one in told for name in one):
        values: dict[Any, list[int]] = {}
        for index, one in enumerate(told):
            if name in one:
                values.setdefault(one[name], []).append(index)
        if len(values) > 1:
            unknown = [index for index, one in enumerate(told) if name not in one]
            harmless = name in HARMLESS or hashed and name == "code_bytes"
            result.append(Difference(name, list(values.items()), unknown, harmless))
        else:
            equal += 1
    return sorted(result, key=lambda difference: difference.harmless), equal


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Numbers of the runs that differ in nothing but seed, harmless settings and surroundings."""
    telling = [difference.name for difference in differences(runs)[0] if not difference.harmless]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, run in enumerate(runs):
        told = conditions(run)
        groups.setdefault(tuple(told.get(name) for name in telling), []).append(index)
    return list(groups.values())


def same_data(runs: Sequence[Run]) -> tuple[int, dict[str, list[int]]] | None:
    """The last step of which all runs that have one logged a data_crc, and the runs of each crc
    there."""
    told = {index: crcs for index, run in enumerate(runs) if (crcs := run.crc_at())}
    common = set.intersection(*map(set, told.values())) if len(told) > 1 else set()
    if not common:
        return None
    step, found = max(common), {}
    for index, crcs in told.items():
        found.setdefault(crcs[step], []).append(index)
    return step, found


def bytes_a_token(run: Run) -> float | None:
    """From a loss and its bits per byte."""
    score = run.headline
    values = (score.val_loss, score.val_bpb) if score else (None, None)
    if not all(value is not None and 0 < value < math.inf for value in values):
        return None
    return score.val_loss / math.log(2) / score.val_bpb


# --- A against B ---


def compare_groups(
    a: Sequence[Run], b: Sequence[Run], options: argparse.Namespace, unread: list[str]
) -> Comparison:
    """Welch's test of A's results against B's, or the reasons why there is none."""
    result = Comparison(alpha=options.alpha, refusals=unread)
    refuse = result.refusals.append
    for name, group in (("A", a), ("B", b)):
        _check_group(name, group, refuse)
    if {_trace(run) for run in a} & {_trace(run) for run in b} - {None}:
        refuse("A and B share a run (equal to the digit): each run belongs to one of them")
    if not (a and b):
        return result
    _choose_unit(a, b, options, result)
    obstacles = _some([d.name for d in differences([*a, *b])[0] if not d.harmless])
    words = "the logs show no difference in configuration between A and B"
    if obstacles:
        words = f"A and B differ in {obstacles}: which is better is tested, not why"
    result.notes.append(words)
    if not result.refusals:
        values = [[_value(run, result.unit) for run in group] for group in (a, b)]
        result.a, result.b = map(stats.summary, values)
        result.test = stats.welch(*values, margin=result.margin)
    return result


def _value(run: Run, unit: str) -> float | None:
    score = run.headline
    value = score and (score.val_loss if unit == "nats" else score.val_bpb)
    return value if value is not None and math.isfinite(value) else None


def other_tokenizers(runs: Sequence[Run]) -> list[float]:
    """Bytes a token, the lowest and the highest, where the runs cannot have one tokenizer."""
    rates = [rate for run in runs if (rate := bytes_a_token(run))]
    apart = rates and max(rates) / min(rates) > 1 + SAME_RATE
    return [min(rates), max(rates)] if apart else []


def _choose_unit(
    a: Sequence[Run], b: Sequence[Run], options: argparse.Namespace, result: Comparison
) -> None:
    """Nats a token; bits a byte across tokenizers, or where a log has no loss."""
    runs = [*a, *b]
    scored = [run for run in runs if _value(run, "bits a byte") is not None]
    if other_tokenizers(runs):
        result.unit = "bits a byte"
        result.notes.append("tokenizers differ: compared in bits a byte, not in nats a token")
    elif any(_value(run, "nats") is None for run in scored):
        result.unit = "bits a byte"
    for run in runs:
        if _value(run, result.unit) is None:
            result.refusals.append(
                f"{run.name} has no result to compare ({run.status}, step {run.last_step}): "
                "leave it out, or let it end"
            )
    if len({run.partial_val for run in runs}) > 1:
        result.refusals.append(
            "some runs were validated on a part of the split: run them again without VAL_TOKENS"
        )
    kinds = {run.headline.kind for run in runs if run.headline}
    if len(kinds) > 1:
        words = f"the results come from different evaluations ({', '.join(sorted(kinds))})"
        result.notes.append(f"{words}: their difference is the model's and the evaluation's")
    result.margin = MARGIN if options.margin is None else options.margin
    if options.margin is None and result.unit != "nats":
        # As many nats of B's tokens, whose bytes are known where B has losses.
        rate = next((rate for run in b if (rate := bytes_a_token(run))), 2.5)
        result.margin = float(f"{MARGIN / math.log(2) / rate:.2g}")


def _check_group(name: str, group: Sequence[Run], refuse: Callable[[str], None]) -> None:
    """Reasons why some runs are no sample of one configuration."""
    if len(group) < 2:
        count = f"{len(group)} run{'s' * (len(group) != 1)}"
        refuse(f"{name} has {count}: a test needs two a group at least, better three")
    if found := [d.name for d in differences(group)[0] if not d.harmless]:
        refuse(f"{name} mixes configurations: {_some(found)} differ: name the runs of one")
    traces = [_trace(run) for run in group]
    for index, run in enumerate(group):
        if traces[index] is not None and traces[index] in traces[:index]:
            refuse(f"{name}: {run.name} repeats another run's seed and result: one run counts once")
        if run.status in ("failed", "interrupted", "nonfinite"):
            refuse(f"{name}: {run.name} {run.status}: {run.error or 'the log does not say why'}")


def _trace(run: Run) -> tuple[Any, ...] | None:
    """What two records of one run have in common to the digit, and two runs do not; None: too
    little is known."""
    if run.train_time_ms is None or not run.last_step:
        return None
    times, head = tuple(step.train_time_ms for step in run.steps), run.headline
    return (run.seed, run.last_step, run.train_time_ms, times, head and head.val_bpb)


def verdict(result: Comparison) -> str:
    """The outcome in one sentence."""
    if result.refusals:
        return "refused: " + "; ".join(result.refusals)
    test, unit = result.test, result.unit
    measured = (
        f"A is {abs(test.difference):.5f} {unit} {'lower' if test.difference >= 0 else 'higher'} "
        f"(95 % interval of the difference {test.low:+.5f} to {test.high:+.5f})"
    )
    claim = f"A is better than B by more than {test.margin:g} {unit}: p = {test.p:.2g}"
    if test.p < result.alpha:
        return f"{claim} < {result.alpha:g}; {measured}"
    none = "; no measurable difference" if test.low <= 0 <= test.high else ""
    return f"not shown that {claim}, not below {result.alpha:g}; {measured}{none}"


def pair_words(runs: Sequence[Run]) -> str:
    """Two runs alone: what input explains of their difference."""
    one, two = (run.step_times().mean for run in runs)
    heads = [_value(run, "bits a byte") for run in runs]
    words = []
    if None not in heads:
        lower = "lower" if heads[1] <= heads[0] else "higher"
        words.append(f"run 2 is {abs(heads[1] - heads[0]):.5f} bits a byte {lower} than run 1")
    waits = [run.input_wait_percent for run in runs]
    if one and two:
        more = f"{abs(two - one):.2f} ms a step {'more' if two >= one else 'less'}"
        explained = "what input has to do with it is not known: no input_wait in these logs"
        if None not in waits:
            part = (two * waits[1] - one * waits[0]) / 100
            explained = f"waiting for input is {part:+.2f} ms of that"
        words.append(f"it takes {more} ({100 * (two / one - 1):+.1f} %), and {explained}")
    return "; ".join(words)


def deciding_words(runs: Sequence[Run]) -> str:
    """Two runs alone: the command that decides between them, to be pasted; else what would."""
    one, two = (run.config for run in runs)
    told = [d.name for d in differences(runs)[0] if not (d.harmless or d.unknown)]
    varied = [name for name in told if name in one and name in two][:2]
    if not varied:
        return "One seed each cannot tell more: run each with two other seeds, then --a and --b"
    command = [launch.python_of_runs(), os.path.relpath(launch.ROOT / "logs" / "ablate.py")]
    for name in varied:
        values = (str(int(v) if isinstance(v, bool) else v) for v in (one[name], two[name]))
        command += ["--vary", f"{name.upper()}={','.join(values)}"]
    cap, steps = one.get("max_wallclock_seconds"), max(run.last_step for run in runs)
    if not {"iterations", "max_wallclock_seconds"} & {*varied}:
        capped = isinstance(cap, int | float) and any(run.stopped_early for run in runs)
        command += ["--seconds", f"{cap:g}"] if capped else ["--steps", str(steps)]
    command += ["--seeds", "3", "--", os.path.relpath(launch.ROOT / "train_gpt.py")]
    return f"This decides it, with their other settings set as they were: {shlex.join(command)}"


# --- tables ---


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the logs; with their folders, shortened, where some are alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        folders = [Path(run.path).resolve().parent.name for run in runs]
        pairs = zip(folders, names, strict=True)
        names = [f"{folder[:24]}{'…' * (len(folder) > 24)}/{name}" for folder, name in pairs]
    return names


def numbers_in_words(indices: Sequence[int]) -> str:
    """Numbers from 1, with ranges: 1-3, 5."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index:
            parts[-1][1] = index + 1
        else:
            parts.append([index + 1, index + 1])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cell(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Aligned columns, two spaces apart: the first `left` to the left, numbers to the right;
    without empty columns."""
    kept = [c for c in range(len(head)) if c < left or any(row[c] != "-" for row in rows)]
    widths = {c: max(len(head[c]), *(len(row[c]) for row in rows)) for c in kept}
    return [
        "  ".join(
            row[c].ljust(widths[c]) if c < left else row[c].rjust(widths[c]) for c in kept
        ).rstrip()
        for row in (head, *rows)
    ]


def difference_lines(runs: Sequence[Run]) -> list[str]:
    found, equal = differences(runs)
    seeds: dict[int | None, list[int]] = {}
    for index, run in enumerate(runs):
        seeds.setdefault(run.seed, []).append(index)
    rows = [("seed", _values(list(seeds.items())))]
    for d in found:
        not_told = f" | not told: {numbers_in_words(d.unknown)}" if d.unknown else ""
        rows.append((d.name + " (harmless)" * d.harmless, _values(d.values) + not_told))
    width = max(len(name) for name, _ in rows)
    title = "What differs in configuration (numbers: the runs below"
    lines = [f"{title}; {equal} conditions are equal)"]
    lines += [f"  {name.ljust(width)}  {words}" for name, words in rows]
    if not found:
        lines.append("  nothing else" if len(runs) > 1 else "  one run: nothing to differ from")
    return lines


def _values(values: Sequence[tuple[Any, Sequence[int]]], most: int = 8) -> str:
    words = [f"{cell(value)[:60]}: {numbers_in_words(numbers)}" for value, numbers in values[:most]]
    if len(values) > most:
        words.append(f"{len(values) - most} more values")
    return " | ".join(words)


def run_row(run: Run) -> list[str]:
    seed = cell(run.seed)
    if run.seed is None and run.seed_in_name is not None:
        seed = f"{run.seed_in_name} (name)"
    gpus, device = run.hardware.get("gpus") or run.world_size, str(run.hardware.get("device", "-"))
    hardware = f"{gpus} x {device}" if gpus and device != "-" else device
    figures = cell(run.model_params, ","), cell(run.train_shards), cell(run.epochs, ".2f")
    return [run.status, seed, cell(run.versions.get("torch")), hardware, *figures]


def time_row(run: Run) -> list[str]:
    times, totals = run.step_times(), (run.train_time_ms, run.val_total_ms, run.eval_total_ms)
    wait = run.input_wait_percent
    return [
        f"{run.last_step:,}",
        *(cell(ms, ".2f") for ms in (times.mean, times.p50, times.p99, times.max)),
        *(cell(ms and ms / 1e3, ",.1f") for ms in totals),
        "-" if wait is None else f"{wait:.2f}%",
        cell(run.peak_mib, ","),
    ]


def score_row(run: Run) -> list[str]:
    last, head, total = run.final_validation, run.headline, run.sizes.total
    loss = next((s.train_loss for s in reversed(run.steps) if s.train_loss is not None), None)
    stages = (run.score(kind) for kind in ("pre_quant", "roundtrip", "sliding", "ttt"))
    return [
        cell(loss, ".4f"),
        cell(last and last.val_loss, ".4f"),
        cell(last and last.val_bpb, ".4f"),
        *(cell(score and score.val_bpb, ".5f") for score in stages),
        cell(head and head.val_bpb, ".5f"),
        cell(head and head.val_loss, ".5f"),
        cell(run.sizes.code or run.source_bytes, ","),
        cell(run.sizes.artifact, ","),
        cell(total, ","),
        cell(None if total is None else CAP_BYTES - total, ","),
    ]


TABLES = (
    ("Runs", run_row, "status seed torch hardware parameters shards epochs"),
    (
        "Time (p50, p99, max: of the means between two training lines)",
        time_row,
        "steps ms/step p50 p99 max train_s val_s eval_s input_wait peak_MiB",
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


def group_lines(runs: Sequence[Run]) -> list[str]:
    lines = []
    for numbers in seed_groups(runs):
        words = []
        for unit in ("nats", "bits a byte"):
            values = [_value(runs[i], unit) for i in numbers]
            if len(numbers) > 1 and None not in values:
                group = stats.summary(values)
                words.append(f"{unit} {group.mean:.5f} std {group.std:.5f}")
        if words:
            lines.append(f"  runs {numbers_in_words(numbers)}: {', '.join(words)}")
    return ["Groups: equal but for the seed (submitted results)", *lines] if lines else []


def data_lines(runs: Sequence[Run]) -> list[str]:
    without = [index for index, run in enumerate(runs) if not run.crc_at()]
    missing = f"; no data_crc: {numbers_in_words(without)}" if without else ""
    found = same_data(runs)
    if found is None:
        return [f"Same data: not known (no common step with a data_crc{missing})"]
    step, crcs = found
    words = " | ".join(f"{crc}: {numbers_in_words(numbers)}" for crc, numbers in crcs.items())
    answer = "yes" if len(crcs) == 1 else "NO"
    return [f"Same data: {answer}, data_crc at step {step} (the last common one): {words}{missing}"]


def remark_lines(runs: Sequence[Run]) -> list[str]:
    """What a careful reader would notice about single runs."""
    lines, first_of = [], {}
    for index, run in enumerate(runs, 1):
        trace = _trace(run)
        remarks = [*_remarks(run)]
        if trace is not None and first_of.setdefault(trace, index) != index:
            same = f"to the digit the seed, time and result of run {first_of[trace]}"
            remarks.append(f"{same}: the same run?")
        lines += [f"  {index}: {remark}" for remark in remarks]
    return ["Remarks", *lines] if lines else []


def _remarks(run: Run) -> Iterable[str]:
    sizes = run.sizes
    if run.status != "finished":
        yield f"{run.status} at step {run.last_step}" + (f": {run.error}" if run.error else "")
    if run.seed is not None and run.seed_in_name not in (None, run.seed):
        yield f"its name says seed {run.seed_in_name}, its log {run.seed}"
    if run.partial_val:
        yield "validated on a part of the split: its score may not be submitted"
    if run.resumed_at:
        yield f"continued at step {_some([str(step) for step in run.resumed_at])}"
    if sizes.total is not None and sizes.total > CAP_BYTES:
        yield f"{sizes.total - CAP_BYTES:,} bytes over the cap of {CAP_BYTES:,}"


def comparison_lines(result: Comparison) -> list[str]:
    lines = ["A against B"]
    for name, group in (("A", result.a), ("B", result.b)):
        if group:
            mean = f"{group.mean:.5f} {result.unit}, std {group.std:.5f}"
            lines.append(f"  {name}: {group.n} runs, submitted {mean}")
    if result.test:
        lines.append(
            f"  Welch's test: t = {result.test.t:.3f}, {result.test.df:.2f} degrees of freedom, "
            f"p = {result.test.p:.3g} (one-sided, margin {result.test.margin:g})"
        )
    return [*lines, *(f"  note: {note}" for note in result.notes), f"  {verdict(result)}"]


def report(logs: Logs, comparison: Comparison | None) -> list[str]:
    runs, blocks = logs.runs, []
    if runs:
        blocks = [difference_lines(runs), *table_lines(runs)]
        blocks += [part(runs) for part in (group_lines, data_lines, remark_lines)]
    if comparison:
        blocks.append(comparison_lines(comparison))
    if len(runs) == 2 and (words := pair_words(runs)):
        blocks.append([f"Two runs: {words}"])
    if logs.problems:
        blocks.append(["Could not be read", *(f"  {problem}" for problem in logs.problems)])
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = launch.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, a run of it (a.txt#2), or a folder of logs")
    add("--a", nargs="+", metavar="LOG", help="the runs that are held to be better, several seeds")
    add("--b", nargs="+", metavar="LOG", help="the runs they are compared with")
    words = "by how much A must be better, in the unit compared (default: 0.005 nats)"
    add("--margin", type=float, help=words)
    words = "the p below which that counts as shown (default: 0.01)"
    add("--alpha", type=float, default=0.01, help=words)
    add("--plot", type=Path, metavar="FILE", help="a picture of the runs: .png or .svg")
    add("--x", choices=("steps", "seconds"), default="steps", help="of the picture's curves")
    add("--title", help="of the picture")
    options = parser.parse_args(arguments)
    if fault := fault_of_options(options):
        parser.exit(2, f"error: {fault}\n")
    return options


def fault_of_options(options: argparse.Namespace) -> str:
    """What is wrong with the options, in words; nothing: empty."""
    if bool(options.a) != bool(options.b):
        return "--a and --b belong together: name the logs of both groups"
    if not (options.logs or options.a):
        return "name a log, such as: python3 logs/compare.py logs/*.txt"
    if not 0 < options.alpha < 1:
        return f"--alpha {options.alpha:g}: a probability between 0 and 1, such as 0.01"
    if options.margin is not None and not 0 <= options.margin < math.inf:
        return f"--margin {options.margin:g}: a number from 0, such as 0.005"
    if options.plot and options.plot.suffix.lower() not in (".png", ".svg"):
        return f"--plot {options.plot}: name a file that ends in .png or .svg"
    return ""


def gather(options: argparse.Namespace) -> tuple[Logs, Comparison | None, list[list[Run]]]:
    """All logs named, each read once; A against B where they are given; the arms of a picture."""
    logs = read_logs([*(options.a or []), *(options.b or []), *options.logs])
    if not options.a:
        return logs, None, [[logs.runs[i] for i in numbers] for numbers in seed_groups(logs.runs)]
    groups = [read_logs(options.a), read_logs(options.b)]
    named = [*options.a, *options.b]
    unread = [f"no run was read from {path}" for path in named if not read_logs([path]).runs]
    result = compare_groups(*(group.runs for group in groups), options, unread)
    return logs, result, [group.runs for group in groups]


def draw(arms: Sequence[Sequence[Run]], path: Path, x: str = "steps", title: str = "") -> str:
    """The picture, or in one line why there is none."""
    try:
        import picture

        return picture.draw(picture.named(arms), path, x, title)
    except ImportError as error:
        return f"{path}: not drawn: {launch.missing(error.name, 'matplotlib pandas')}"
    except OSError as error:
        reason = error.strerror or error
        return f"--plot {path}: cannot be written: {reason}: name a file in a folder of yours"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logs, comparison, arms = gather(options)
    print("\n".join(report(logs, comparison)))
    if len(logs.runs) == 2:
        print(f"\n{deciding_words(logs.runs)}")
    plotted = options.plot and logs.runs
    problem = draw(arms, options.plot, options.x, options.title or "") if plotted else ""
    if not logs.runs:
        problem = f"no run was read ({logs.problems[0]}): name a training log"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problem or comparison and comparison.refusals))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager has seen enough
    sys.exit(main())
