"""Compare runs: how do they differ, how long did they take, is one better?

    python3 tools/compare.py LOG...                     # tables; LOG: a file or a folder of logs
    python3 tools/compare.py LOG... --plot runs.svg     # a picture for a pull request (or .png)
    python3 tools/compare.py --a LOG... --b LOG...      # is A's loss lower by more than --margin?

A and B are runs of one configuration each, with several seeds. Their results are compared by
Welch's one-sided test, in nats per token, or in bits per byte if tokenizers differ. The time spent
waiting for input is compared, too. The test is refused, with one line for each reason, if a group
mixes configurations (--allow NAME says that a difference in NAME does not matter), if runs are
missing, unfinished or the same, if validation data differ, or if a part of them was scored.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import cli
import configuration
import picture
from cli import cell, counted, some, table
from configuration import conditions, faults_of_group, faults_of_split, seed_groups, telling, trace
from runs import NO_LOGS, Logs, Run, read_logs
from significance import CAP_BYTES, Comparison, compare_samples, spread, value_of, welch

# --- A against B ---


def compare_groups(
    a: Sequence[Run], b: Sequence[Run], options: argparse.Namespace, unread: Sequence[str] = ()
) -> Comparison:
    """Two groups of runs: refused also where a group is not a sample of one configuration.
    `unread`: more refusals."""
    allow, runs, reasons = options.allow, [*a, *b], [*unread]
    if {trace(run) for run in a} & {trace(run) for run in b} - {None}:
        reasons.append("A and B share a run (equal to the digit): each run belongs to one of them")
    names = [f"{run.name} ({run.status}, step {run.last_step})" for run in runs]
    samples = [[run.result for run in group] for group in (a, b)]
    comparison = compare_samples(*samples, options.margin, names)
    notes = comparison.notes
    reasons += [*faults_of_group("A", a, allow), *faults_of_group("B", b, allow)]
    reasons += [*comparison.refusals, *faults_of_split(runs, allow)]
    comparison.refusals = list(dict.fromkeys(reasons))
    kinds = sorted({run.result.kind for run in runs if run.result})
    if len(kinds) > 1:
        notes.append(f"results of different evaluations ({', '.join(kinds)}) differ by them, too")
    known = [name for run in runs for name in (*conditions(run), *run.config)]
    if unknown := [name for name in allow if name.lower() not in known]:
        notes.append(f"--allow does nothing for {some(unknown)}: no run has such a condition")
    elif allow:
        notes.append(f"--allow: the runs of a group may differ in {some(allow)}")
    if apart := telling(runs):
        notes.append(f"A and B differ in {some(apart)}: which is better is tested, not why")
    elif stepless := [run.name for run in runs if not run.steps]:
        notes.append(f"no step was read from {some(stepless)}: in what it differs is not known")
    else:
        notes.append("the logs show no difference in configuration between A and B")
    return comparison


def wait_lines(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The time spent waiting for input; empty where not all logs tell it."""
    waits = [[run.input_wait_per_step() for run in group] for group in (a, b)]
    if any(wait is None or not math.isfinite(wait) for group in waits for wait in group):
        return []
    test = welch(*waits)
    reach = f"95 % interval of B - A {test.low:+.2f} to {test.high:+.2f} ms"
    none = "" if test.measurable else ": no measurable difference"
    means = [f"{fmean(group):.2f}" for group in waits]
    return [f"  input_wait: A {means[0]} ms per step, B {means[1]} ({reach}{none})"]


def comparison_lines(comparison: Comparison, a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    lines, test = ["A against B"], comparison.test
    if comparison.refusals:
        return [*lines, *(f"  refused: {reason}" for reason in comparison.refusals)]
    lines += [*(f"  {part}" for part in comparison.verdict()), *wait_lines(a, b)]
    for name, values in zip("AB", comparison.samples, strict=True):
        mean = f"{fmean(values):.5f} {comparison.unit}, std {spread(values):.5f}"
        lines.append(f"  {name}: {len(values)} runs, {mean}")
    lines.append(
        f"  Welch's test: t = {test.t:.3f}, {test.df:.2f} degrees of freedom, "
        f"p = {test.p:.3g} (one-sided, margin {test.margin:g})"
    )
    return [*lines, *(f"  note: {note}" for note in comparison.notes)]


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
    different, equal = configuration.differences(runs)
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
    names = enumerate(zip(configuration.labels(runs), runs, strict=True), 1)
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


# --- the program ---


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
    picture.draw(dict(zip(names, kept, strict=True)), notes, path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, or a folder of logs")
    add("--a", nargs="+", metavar="LOG", help="runs of A, which may be better: several seeds")
    add("--b", nargs="+", metavar="LOG", help="runs of B, with which A is compared")
    help_text = "by how much A must be better, in the unit compared (default: 0.005 nats)"
    add("--margin", type=cli.number(float, 0), help=help_text)
    help_text = "conditions in which runs of one group may differ: NAME,NAME; may be repeated"
    add("--allow", action="append", default=[], metavar="NAME", help=help_text)
    add("--plot", type=Path, metavar="FILE", help="a picture of the runs: .png or .svg")
    options = parser.parse_intermixed_args(arguments)
    options.allow = [name for text in options.allow for name in text.split(",")]
    if fault := fault_of_options(options):
        parser.exit(2, f"error: {fault}\n")
    return options


def fault_of_options(options: argparse.Namespace) -> str:
    """What is wrong with the options, in words; nothing: empty."""
    for path in (*options.logs, *(options.a or ()), *(options.b or ())):
        if "," in path and not Path(path).exists():
            return f"{path}: no such file: separate logs by blanks"
    if bool(options.a) != bool(options.b):
        return "--a and --b belong together: name the logs of both groups"
    if bool(options.logs) == bool(options.a):
        return "name logs, such as logs/*.txt, or two groups with --a and --b, not both"
    if options.plot and options.plot.suffix.lower() not in (".png", ".svg"):
        return f"--plot {options.plot}: name a file that ends in .png or .svg"
    if options.margin is not None and not options.a:
        return "--margin does nothing without --a and --b: give them, or leave it out"
    return ""


def compare(options: argparse.Namespace) -> int:
    logs, answer, comparison = read_logs([*options.logs]), [], None
    groups = seed_groups(logs.runs, options.allow)
    arms = [[logs.runs[i] for i in group] for group in groups]
    if options.a:
        a, b = read_logs(options.a), read_logs(options.b)
        named = [path for path in (*options.a, *options.b) if Path(path).suffix not in NO_LOGS]
        unread = [f"no run was read from {path}" for path in named if not read_logs([path]).runs]
        comparison = compare_groups(a.runs, b.runs, options, unread)
        answer = [*comparison_lines(comparison, a.runs, b.runs), ""]
        logs = Logs([*a.runs, *b.runs], [*a.problems, *b.problems])
        arms = [a.runs, b.runs]
    if options.plot and logs.runs:  # first: a reader of the tables may close the pipe
        arms = [arm for arm in arms if arm]
        plot(arms, configuration.arm_names(arms), options.plot)
    if not logs.runs:
        raise cli.ToolError("\n".join(logs.problems))
    print("\n".join([*answer, *report(logs, options.allow)]))
    return int(comparison is not None and bool(comparison.refusals))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return cli.run(lambda: compare(options))


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(main())
