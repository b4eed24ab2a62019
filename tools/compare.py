"""Compare runs: print how they differ and how long they took, and test whether one is better.

    python3 tools/compare.py LOG...                     # tables; LOG: a file or a folder of logs
    python3 tools/compare.py LOG... --plot logs/runs.svg  # a plot for a pull request (or .png)
    python3 tools/compare.py --a LOG... --b LOG...      # test whether A's loss is lower

A and B are the runs of one configuration each, with several seeds. Welch's one-sided test compares
their results in nats per token, or in bits per byte if the tokenizers differ. If A and B have the
same seeds, their paired differences are printed, too. compare.py refuses the test, with one line
for each reason, if a group mixes configurations (--allow NAME says that a difference in NAME does
not matter), if runs are missing, unfinished or the same, if a group has two runs of one seed, if
neither group has results that differ, if the validation data differ, or if only a part of them was
scored.

Exit code: 0 done, 1 the test was refused, no log was read or the plot failed, 2 wrong usage.
"""

# This module builds on runs.py (reads logs), samples.py (groups and tests) and report.py (tables
# and plots).

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
import samples
from cli import join_some
from report import plot, report
from runs import Logs, Run, read_logs
from samples import (
    BITS,
    Test,
    choose_unit,
    indices_by_value,
    pairs_by_seed,
    relevant_differences,
    result_value,
    run_identity,
)

MARGIN = 0.005  # nats per token: what the challenge asks of a record
ALPHA = 0.01
Runs = Sequence[Run]


def refusals(a: Runs, b: Runs, allow: Sequence[str]) -> Iterator[str]:
    """Yield the reasons why A and B cannot be compared."""
    runs = [*a, *b]
    unit = choose_unit(runs)
    for name, group in (("A", a), ("B", b)):
        if mixed := relevant_differences(group, allow):
            options = " ".join(f"--allow {word}" for word in mixed)
            remedy = f"give the runs of one configuration, or add {options} if it does not matter"
            yield f"{name} mixes configurations: {join_some(mixed)} differ; {remedy}"
        if len(group) < 2:
            yield f"{name} has {len(group)} runs; a test needs at least two, and three are better"
    for run in runs:
        if run.status in ("failed", "interrupted") or result_value(run, unit) is None:
            state = f"{run.name} ({run.error or run.status}, step {run.last_step})"
            remedy = "leave it out, or finish it"
            if run.status in ("finished", "no val_bpb"):
                remedy = "leave it out"
            yield f"{state} has no result to compare; {remedy}"
    yield from find_repeats(a, b, unit)
    different = [len({result_value(run, unit) for run in group}) for group in (a, b)]
    if max(different) < 2 <= min(len(a), len(b)):
        yield "the results in each group are equal, so the spread between seeds is not known"
    yield from samples.find_split_faults(runs, allow)


def find_repeats(a: Runs, b: Runs, unit: str) -> Iterator[str]:
    """Yield the runs that are given twice, or else the seeds that a group has twice."""
    runs = [*a, *b]
    same_run = False
    for known, numbers in indices_by_value(map(run_identity, runs)).items():
        if known and numbers[1:]:
            names = " and ".join(runs[number].name for number in numbers)
            yield f"{names} are the same run, equal to the last digit; give it once, in A or in B"
            same_run = True
    if same_run:
        return
    for name, group in (("A", a), ("B", b)):
        scored = [run for run in group if result_value(run, unit) is not None]
        for seed, repeated in samples.repeated_seeds(scored).items():
            names = " and ".join(run.name for run in repeated)
            words = f"{name} has {len(repeated)} runs of seed {seed}: {names}"
            yield f"{words}; they are one sample, not {len(repeated)}, so give one of them"


def comparison_lines(a: Runs, b: Runs, margin: float | None) -> list[str]:
    """Return the test's verdict on two groups that can be compared, and what was measured."""
    unit = choose_unit([*a, *b])
    results = [[result_value(run, unit) for run in group] for group in (a, b)]
    if margin is None and unit == BITS:  # MARGIN in bits per byte, at the tokens of B's first run
        bytes_per_token = samples.list_bytes_per_token([*b, *a])[0]
        margin = float(f"{MARGIN / math.log(2) / bytes_per_token:.2g}")
    elif margin is None:
        margin = MARGIN
    test = samples.t_test(*results, margin)
    by = f"B by more than {margin:g} {unit}"
    if test.p < ALPHA:
        lines = [f"A is better than {by} (p = {test.p:.2g}, below {ALPHA:g})"]
    else:
        lines = [f"A is not shown to beat {by} (p = {test.p:.2g}; needs p < {ALPHA:g})"]
    pairs = pairs_by_seed(a, b, lambda run: result_value(run, unit))
    pairs = pairs if len(pairs) == len(a) == len(b) else []
    if pairs and all(of_a == of_b for of_a, of_b in pairs):
        lines.append(f"A and B are equal to the last digit for each seed ({len(pairs)} pairs)")
    else:
        lines.append(format_difference(test, unit))
        if len({round(of_b - of_a, 9) for of_a, of_b in pairs}) > 1:
            by_seed = samples.t_test(*zip(*pairs, strict=True), by_seed=True)
            prefix = f"paired by seed ({len(pairs)} pairs): "
            lines.append(prefix + format_difference(by_seed, unit))
    for name, values in zip("AB", results, strict=True):
        mean = f"{fmean(values):.5f} {unit}, std {stdev(values):.5f}"
        lines.append(f"{name}: {len(values)} runs, {mean}")
    figures = f"t = {test.t:.3f}, {test.df:.2f} degrees of freedom, p = {test.p:.3g}"
    lines.append(f"Welch's test: {figures} (one-sided, margin {margin:g})")
    if unit == BITS:
        lines.append(
            "note: the tokenizers differ, so bits per byte are compared, not nats per token"
        )
    kinds = sorted({run.result.kind for run in [*a, *b]})
    if len(kinds) > 1:
        words = f"the runs were evaluated in different ways ({', '.join(kinds)})"
        lines.append(f"note: {words}, which changes results, too")
    return lines


def format_difference(test: Test, unit: str) -> str:
    interval = f"95 % interval of the difference {test.low:+.5f} to {test.high:+.5f}"
    side = "lower" if test.difference >= 0 else "higher"
    return f"A is {abs(test.difference):.5f} {unit} {side} ({interval})"


def compare(options: argparse.Namespace) -> int:
    """Print the tables, and the test of A and B if they are given. Return the exit code."""
    answer, refused = [], []
    if options.a:
        a, b = read_logs(options.a), read_logs(options.b)
        logs = Logs([*a.runs, *b.runs], [*a.problems, *b.problems])
        groups = [group for group in (a.runs, b.runs) if group]
        known = {name for run in logs.runs for name in (*run.conditions, *run.config)}
        if unknown := [name for name in options.allow if name not in known]:
            raise cli.ToolError(
                f"--allow {unknown[0]}: no run has this condition; compare.py LOG... shows them"
            )
        paths = [*options.a, *options.b]
        refused = [f"no run was read from {path}" for path in paths if not read_logs([path]).runs]
        refused += refusals(a.runs, b.runs, options.allow)
        answer = [f"refused: {reason}" for reason in refused]
        answer = answer or comparison_lines(a.runs, b.runs, options.margin)
        answer = ["A against B", *(f"  {line}" for line in answer), ""]
    else:
        logs = read_logs(options.logs)
        indices = samples.seed_groups(logs.runs, options.allow)
        groups = [[logs.runs[index] for index in group] for group in indices]
    if not logs.runs:
        raise cli.ToolError("\n".join(logs.problems))
    plotted = True
    if options.plot:  # before the tables are printed: their reader may close the pipe
        plotted = plot(groups, samples.variant_labels(groups), options.plot)
    print("\n".join([*answer, report(logs, options.allow)]))
    return int(bool(refused) or not plotted)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, or a folder of logs")
    add(
        "--a",
        nargs="+",
        metavar="LOG",
        help="runs of A, several seeds; the test asks whether A is better",
    )
    add("--b", nargs="+", metavar="LOG", help="runs of B, several seeds")
    add(
        "--margin",
        type=cli.number(float, 0),
        help="by how much A must be better (default: 0.005 nats)",
    )
    text = "conditions in which the runs of a group may differ (NAME,NAME; may be repeated)"
    add("--allow", action="append", default=[], metavar="NAME", help=text)
    add("--plot", type=cli.plot_path, metavar="FILE", help="write a plot of the runs: .png or .svg")
    options = parser.parse_intermixed_args(arguments)
    options.allow = [name.lower() for text in options.allow for name in text.split(",")]
    if bool(options.a) != bool(options.b) or bool(options.logs) == bool(options.a):
        parser.error("give either logs, such as logs/*.txt, or two groups with --a and --b")
    if options.margin is not None and not options.a:
        parser.error("--margin needs the groups --a and --b; add them, or remove --margin")
    paths = [*options.logs, *(options.a or ()), *(options.b or ())]
    parser.require(paths, "give logs, or folders of logs")
    return cli.run(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
