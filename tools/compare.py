"""Compare runs: how do they differ, how long did they take, is one better?

    python3 tools/compare.py LOG...                     # tables; LOG: a file or a folder of logs
    python3 tools/compare.py LOG... --plot runs.svg     # a picture for a pull request (or .png)
    python3 tools/compare.py --a LOG... --b LOG...      # is A's loss lower by more than --margin?

A and B are runs of one configuration each, with several seeds. Their results are compared by
Welch's one-sided test, in nats per token, or in bits per byte if tokenizers differ; where both have
the same seeds, their paired differences are shown, too. The test is refused, with one line for each
reason, if a group mixes configurations (--allow NAME says that a difference in NAME does not
matter), if runs are missing, unfinished or the same, if no group has results that differ, if
validation data differ, or if a part of them was scored.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
import samples
from cli import some
from report import plot, report
from runs import Logs, Run, read_logs
from samples import BITS, Test, pairs_by_seed, places, telling, trace, unit_of, value_of

MARGIN = 0.005  # nats per token: what the challenge asks of a record
ALPHA = 0.01
Runs = Sequence[Run]


def refusals(a: Runs, b: Runs, allow: Sequence[str]) -> Iterator[str]:
    """Why A and B are not compared."""
    runs = [*a, *b]
    unit = unit_of(runs)
    for name, group in (("A", a), ("B", b)):
        if mixed := telling(group, allow):
            options = " ".join(f"--allow {word}" for word in mixed)
            remedy = f"name the runs of one, or say that it does not matter: {options}"
            yield f"{name} mixes configurations: {some(mixed)} differ: {remedy}"
        if len(group) < 2:
            yield f"{name} has {len(group)} of the two runs that a test needs; three are better"
    for run in runs:
        if run.status in ("failed", "interrupted") or value_of(run, unit) is None:
            state = f"{run.name} ({run.error or run.status}, step {run.last_step})"
            yield f"{state} has no result to compare: leave it out, or let it end"
    for known, numbers in places(map(trace, runs)).items():
        if known and numbers[1:]:
            names = " and ".join(runs[number].name for number in numbers)
            yield f"{names} are the same run, to the digit: it counts once, in A or in B"
    different = [len({value_of(run, unit) for run in group}) for group in (a, b)]
    if max(different) < 2 <= min(len(a), len(b)):
        yield "the results of each group are equal to the digit: how seeds differ is not known"
    yield from samples.faults_of_split(runs, allow)


def comparison_lines(a: Runs, b: Runs, margin: float | None) -> list[str]:
    """The test of two groups that can be compared: a claim, and what was measured."""
    unit = unit_of([*a, *b])
    results = [[value_of(run, unit) for run in group] for group in (a, b)]
    if margin is None and unit == BITS:  # as many as MARGIN nats are in the first run of B
        margin = float(f"{MARGIN / math.log(2) / samples.rates([*b, *a])[0]:.2g}")
    elif margin is None:
        margin = MARGIN
    test = samples.t_test(*results, margin)
    claim = f"A is better than B by more than {margin:g} {unit}: p = {test.p:.2g}"
    if test.p < ALPHA:
        lines = [f"{claim} < {ALPHA:g}"]
    else:
        lines = [f"not shown that {claim}, not below {ALPHA:g}"]
    pairs = pairs_by_seed(a, b, lambda run: value_of(run, unit))
    pairs = pairs if len(pairs) == len(a) == len(b) else []
    if pairs and all(ours == theirs for ours, theirs in pairs):
        lines.append(f"A and B are equal seed by seed, to the digit ({len(pairs)} pairs)")
    else:
        lines.append(measured(test, unit, ""))
        if len({round(theirs - ours, 9) for ours, theirs in pairs}) > 1:
            by_seed = samples.t_test(*zip(*pairs, strict=True), by_seed=True)
            lines.append(measured(by_seed, unit, f"paired by seed ({len(pairs)} pairs): "))
    for name, values in zip("AB", results, strict=True):
        mean = f"{fmean(values):.5f} {unit}, std {stdev(values):.5f}"
        lines.append(f"{name}: {len(values)} runs, {mean}")
    figures = f"t = {test.t:.3f}, {test.df:.2f} degrees of freedom, p = {test.p:.3g}"
    lines.append(f"Welch's test: {figures} (one-sided, margin {margin:g})")
    if unit == BITS:
        lines.append("note: tokenizers differ: compared in bits per byte, not in nats per token")
    kinds = sorted({run.result.kind for run in [*a, *b]})
    if len(kinds) > 1:
        words = f"results of different evaluations ({', '.join(kinds)}) differ by them, too"
        lines.append(f"note: {words}")
    return lines


def measured(test: Test, unit: str, how: str) -> str:
    interval = f"95 % interval of the difference {test.low:+.5f} to {test.high:+.5f}"
    side = "lower" if test.difference >= 0 else "higher"
    return f"{how}A is {abs(test.difference):.5f} {unit} {side} ({interval})"


def compare(options: argparse.Namespace) -> int:
    answer, refused = [], []
    if options.a:
        a, b = read_logs(options.a), read_logs(options.b)
        logs = Logs([*a.runs, *b.runs], [*a.problems, *b.problems])
        arms = [arm for arm in (a.runs, b.runs) if arm]
        known = {name for run in logs.runs for name in (*run.conditions, *run.config)}
        if unknown := [name for name in options.allow if name not in known]:
            raise cli.ToolError(f"--allow {unknown[0]}: no run has it: see compare.py LOG...")
        paths = [*options.a, *options.b]
        refused = [f"no run was read from {path}" for path in paths if not read_logs([path]).runs]
        refused += refusals(a.runs, b.runs, options.allow)
        answer = [f"refused: {reason}" for reason in refused]
        answer = answer or comparison_lines(a.runs, b.runs, options.margin)
        answer = ["A against B", *(f"  {line}" for line in answer), ""]
    else:
        logs = read_logs(options.logs)
        groups = samples.seed_groups(logs.runs, options.allow)
        arms = [[logs.runs[number] for number in group] for group in groups]
    if not logs.runs:
        raise cli.ToolError("\n".join(logs.problems))
    if options.plot:  # first: a reader of the tables may close the pipe
        plot(arms, samples.labels([arm[0] for arm in arms], with_seed=False), options.plot)
    print("\n".join([*answer, report(logs, options.allow)]))
    return int(bool(refused))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, or a folder of logs")
    add("--a", nargs="+", metavar="LOG", help="runs of A, which may be better: several seeds")
    add("--b", nargs="+", metavar="LOG", help="runs of B, with which A is compared")
    add("--margin", type=cli.number(float, 0), help="by how much A must be better (default: 0.005)")
    text = "conditions in which runs of one group may differ: NAME,NAME; may be repeated"
    add("--allow", action="append", default=[], metavar="NAME", help=text)
    add("--plot", type=cli.picture, metavar="FILE", help="a picture of the runs: .png or .svg")
    options = parser.parse_intermixed_args(arguments)
    options.allow = [name.lower() for text in options.allow for name in text.split(",")]
    if bool(options.a) != bool(options.b) or bool(options.logs) == bool(options.a):
        parser.error("name logs, such as logs/*.txt, or two groups with --a and --b, not both")
    if options.margin is not None and not options.a:
        parser.error("--margin does nothing without --a and --b: give them, or leave it out")
    return cli.run(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
