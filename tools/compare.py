"""Compare runs: how do they differ, how long did they take, is one better?
It reads logs of the parameter-golf family and of modded-nanogpt.

    # tables; a LOG is a file or a folder of logs
    python3 tools/compare.py LOG...
    # a picture for a pull request (.png or .svg)
    python3 tools/compare.py LOG... --plot runs.svg
    # is A's loss lower than B's by more than --margin?
    python3 tools/compare.py --a LOG... --b LOG...

A and B are runs of one configuration each, with several seeds. Their results are compared by
Welch's one-sided test, in nats per token, or in bits per byte if tokenizers differ. The time spent
waiting for input is compared, too. The test is refused, with one line for each reason, if a group
mixes configurations (--allow NAME says that a difference in NAME does not matter), if runs are
missing, unfinished or the same, if validation data differ, or if a part of them was scored.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import cli
import picture
from configuration import seed_groups
from runs import NO_LOGS, Logs, Run, read_logs
from significance import Comparison, compare_groups
from tables import report


def gather(options: argparse.Namespace) -> tuple[Logs, Comparison | None, list[list[Run]]]:
    """All logs named; A against B where they are given; the arms of a picture."""
    if not options.a:
        logs = read_logs(options.logs)
        numbers = seed_groups(logs.runs, options.allow)
        return logs, None, [[logs.runs[i] for i in group] for group in numbers]
    a, b = read_logs(options.a), read_logs(options.b)
    named = [path for path in (*options.a, *options.b) if Path(path).suffix not in NO_LOGS]
    paths = [path for path in named if not read_logs([path]).runs]
    unread = [f"no run was read from {path}" for path in paths]
    everything = Logs([*a.runs, *b.runs], [*a.problems, *b.problems])
    comparison = compare_groups(a.runs, b.runs, options.margin, options.allow, unread)
    return everything, comparison, [a.runs, b.runs]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logs, comparison, arms = gather(options)
    problems = [] if logs.runs else logs.problems
    if options.plot and logs.runs:  # first: a reader of the tables may close the pipe
        fault = picture.attempt(arms, options.plot)
        problems = [fault] if fault else []
    if logs.runs:
        print("\n".join(report(logs, comparison, options.allow)))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems or comparison and comparison.refusals))


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
