"""Compare runs: how do they differ, how long did they take, is one better?

    python3 tools/compare.py LOG...                     # tables; LOG: a file or a folder of logs
    python3 tools/compare.py LOG... --plot runs.svg     # a picture for a pull request (or .png)
    python3 tools/compare.py --a LOG... --b LOG...      # is A's loss lower by more than --margin?

A and B are runs of one configuration each, with several seeds. Their results are compared by
Welch's one-sided test, in nats per token, or in bits per byte if tokenizers differ; where both have
the same seeds, their paired differences are shown, too. So is the time spent waiting for input. The
test is refused, with one line for each reason, if a group mixes configurations (--allow NAME says
that a difference in NAME does not matter), if runs are missing, unfinished or the same, if no group
has results that differ, if validation data differ, or if a part of them was scored.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import cli
from cli import some
from report import plot, report
from runs import NO_LOGS, Logs, Run, read_logs
from samples import (
    Comparison,
    arm_names,
    compare_samples,
    conditions,
    faults_of_group,
    faults_of_split,
    pairs_by_seed,
    seed_groups,
    spread,
    telling,
    trace,
    value_of,
    welch,
)

# --- A against B ---


def compare_groups(
    a: Sequence[Run], b: Sequence[Run], options: argparse.Namespace, unread: Sequence[str] = ()
) -> Comparison:
    """Two groups of runs: refused also where a group is not a sample of one configuration.
    `unread`: more refusals."""
    allow, runs, reasons = options.allow, [*a, *b], [*unread]
    if {trace(run) for run in a} & {trace(run) for run in b} - {None}:
        reasons.append("A and B share a run (equal to the digit): each run belongs to one of them")
    known = {name for run in runs for name in (*conditions(run), *run.config)}
    if unknown := [name for name in allow if name.lower() not in known]:
        near = difflib.get_close_matches(unknown[0].lower(), known, 1)
        remedy = f"did you mean {near[0]}?" if near else "the table names those that differ"
        raise cli.ToolError(f"--allow {unknown[0]}: no run has such a condition: {remedy}")
    names = [f"{run.name} ({run.status}, step {run.last_step})" for run in runs]
    samples = [[run.result for run in group] for group in (a, b)]
    comparison = compare_samples(*samples, options.margin, names)
    notes = comparison.notes
    pairs = pairs_by_seed(a, b, lambda run: value_of(run.result, comparison.unit))
    if len(pairs) == len(a) == len(b):
        comparison.pairs = pairs
    reasons += [*faults_of_group("A", a, allow), *faults_of_group("B", b, allow)]
    reasons += [*comparison.refusals, *faults_of_split(runs, allow)]
    comparison.refusals = list(dict.fromkeys(reasons))
    kinds = sorted({run.result.kind for run in runs if run.result})
    if len(kinds) > 1:
        notes.append(f"results of different evaluations ({', '.join(kinds)}) differ by them, too")
    if allow:
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


# --- the program ---


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
        plot(arms, arm_names(arms), options.plot)
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
