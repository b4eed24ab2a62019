"""Compare runs: how do they differ, how long did they take, is one better?
It reads logs of the parameter-golf family, of modded-nanogpt and of nanoGPT.

    # tables; a LOG is a file, a run of it (a.txt#2), or a folder of logs
    python3 logs/compare.py LOG...
    # a picture for a pull request (.png or .svg)
    python3 logs/compare.py LOG... --plot runs.svg
    # is A's loss lower than B's by more than --margin?
    python3 logs/compare.py --a LOG... --b LOG...

A and B are runs of one configuration each, with several seeds. The results that are submitted (the
last of each run) are compared by Welch's one-sided test, in nats per token, or in bits per byte if
tokenizers differ. The time spent waiting for input is compared, too. The test is refused, with the
reasons, if a group mixes configurations (--allow NAME says that a difference in NAME does not
matter), if runs are missing, unfinished or the same, or if a run was scored on a part of the split.

Exit code: 0 done, 1 refused or nothing read, 2 wrong usage.
"""

import argparse
import difflib
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cli
from configuration import FACTS, conditions, differences, seed_groups, telling, trace
from results import evaluation_ms, headline
from runs import Logs, Run, read_logs
from significance import ALPHA, Comparison, Question, compare_groups, verdict
from tables import labels, report

LENGTHS = {"iterations", "max_wallclock_seconds"}


# --- what was asked ---


def gather(options: argparse.Namespace) -> tuple[Logs, Comparison | None, list[list[Run]]]:
    """All logs named, each read once; A against B where they are given; the arms of a picture."""
    known: dict[str, Logs] = {}

    def read(paths: Sequence[str]) -> list[Logs]:
        return [known.setdefault(path, read_logs([path])) for path in paths]

    parts = [read(paths) for paths in (options.a or [], options.b or [], options.logs)]
    everything = merged([logs for part in parts for logs in part])
    runs = everything.runs
    if not options.a:
        arms = [[runs[i] for i in numbers] for numbers in seed_groups(runs, options.allow)]
        return everything, None, arms
    unread = [
        f"no run was read from {path}" for path in (*options.a, *options.b) if not known[path].runs
    ]
    groups = [merged(part).runs for part in parts[:2]]
    alpha = ALPHA if options.alpha is None else options.alpha
    score = options.score or "submitted"
    question = Question(options.margin, alpha, options.allow, score)
    return everything, compare_groups(*groups, question, unread), groups


def merged(parts: Sequence[Logs]) -> Logs:
    """The runs of several, each once."""
    runs: dict[tuple[str, int], Run] = {}
    problems: dict[str, None] = {}
    for part in parts:
        runs |= {(os.path.realpath(run.path), run.number): run for run in part.runs}
        problems |= dict.fromkeys(part.problems)
    return Logs(list(runs.values()), list(problems))


def deciding_line(runs: Sequence[Run]) -> str:
    """Two runs alone: the command that decides between them, to be pasted; else what would."""
    first, other = (run.config for run in runs)
    names = telling(runs)
    unknown = [d.name for d in differences(runs)[0] if d.unknown and not d.harmless]
    settings = [name for name in names if name in first and name in other and name not in FACTS]
    if len(names) != 1 or names != settings or unknown or LENGTHS & {*names}:
        return "One seed each cannot tell more: run each with two other seeds, then --a and --b"
    name = settings[0]
    values = ",".join(str(int(v) if isinstance(v, bool) else v) for v in (first[name], other[name]))
    command = [cli.python_of_runs(), os.path.relpath(cli.ROOT / "logs" / "ablate.py")]
    command += ["--vary", f"{name.upper()}={values}"]
    cap, steps = first.get("max_wallclock_seconds"), max(run.last_step for run in runs)
    capped = isinstance(cap, int | float) and any(run.stopped_early for run in runs)
    command += ["--seconds", f"{cap:g}"] if capped else ["--steps", str(steps)]
    command += ["--seeds", "3", "--", os.path.relpath(cli.ROOT / "train_gpt.py")]
    return f"This decides it, with their other settings set as they were: {shlex.join(command)}"


# --- for other programs ---


def facts(run: Run, name: str) -> dict[str, Any]:
    """A run as one flat row."""
    result, times, sizes = headline(run), run.step_times(), run.sizes
    row = {
        "log": name,
        "path": run.path,
        "number": run.number,
        "seed": run.known_seed,
        "status": run.status,
        "steps": run.last_step,
        "train_time_ms": run.train_time_ms,
        "val_total_ms": run.val_total_ms,
        "eval_total_ms": evaluation_ms(run),
        "input_wait_ms_per_step": run.input_wait_per_step(),
        "input_wait_percent": run.input_wait_percent,
        "submitted": result and result.tag,
        "kind": result and result.kind,
        "val_loss": result and result.val_loss,
        "val_bpb": result and result.val_bpb,
        "eval_ms": result and result.eval_ms,
        "partial_val": run.partial_val,
        "model_bytes": sizes.artifact,
        "total_bytes": sizes.total,
    }
    row |= {f"step_ms_{name}": value for name, value in asdict(times).items()}
    return row | conditions(run)


def as_json(logs: Logs, comparison: Comparison | None, options: argparse.Namespace) -> str:
    runs = logs.runs
    different, equal = differences(runs)
    document = {
        "runs": [facts(run, name) for run, name in zip(runs, labels(runs), strict=True)],
        "differences": [asdict(difference) for difference in different],
        "equal_conditions": equal,
        "groups": seed_groups(runs, options.allow),
        "same_run": [index for index, run in enumerate(runs) if is_copy(runs, index, run)],
        "problems": logs.problems,
    }
    if comparison:
        document["comparison"] = asdict(comparison) | {"verdict": verdict(comparison)}
    return json.dumps(finite(document), indent=1)


def is_copy(runs: Sequence[Run], index: int, run: Run) -> bool:
    own = trace(run)
    return own is not None and any(trace(other) == own for other in runs[:index])


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def as_csv(logs: Logs) -> str:
    import pandas as pd  # optional, and slow to import

    rows = [facts(run, name) for run, name in zip(logs.runs, labels(logs.runs), strict=True)]
    return pd.DataFrame(rows).to_csv(index=False).rstrip("\n")


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("logs", nargs="*", metavar="LOG", help="a log, a run of it (a.txt#2), or a folder of logs")
    add("--a", nargs="+", metavar="LOG", help="runs of A, which may be better: several seeds")
    add("--b", nargs="+", metavar="LOG", help="runs of B, with which A is compared")
    help_text = "by how much A must be better, in the unit compared (default: 0.005 nats)"
    add("--margin", type=cli.number(float, 0), help=help_text)
    help_text = "A counts as better if p is below this (default: 0.01)"
    add("--alpha", type=cli.number(float, 0), help=help_text)
    help_text = "a condition in which runs of one group may differ; may be repeated"
    add("--allow", action="append", default=[], metavar="NAME", help=help_text)
    help_text = "compare each run's submitted result (default) or its last validation"
    add("--score", choices=("submitted", "validation"), help=help_text)
    form = parser.add_mutually_exclusive_group().add_argument
    form("--json", action="store_true", help="print everything as JSON instead of tables")
    form("--csv", action="store_true", help="print one line per run, with all its settings")
    add("--plot", type=Path, metavar="FILE", help="a picture of the runs: .png or .svg")
    help_text = "panels of the picture (default: curves,results, and wait where it differs)"
    add("--panels", type=panels, metavar="NAMES", help=help_text)
    help_text = "what the curves are drawn against (default: steps)"
    add("--x", choices=("steps", "seconds"), help=help_text)
    add("--title", help="title of the picture")
    options = parser.parse_intermixed_args(arguments)
    if fault := fault_of_options(options):
        parser.exit(2, f"error: {fault}\n")
    return options


def panels(text: str) -> list[str]:
    names = text.split(",")
    if not {*names} <= {"curves", "results", "wait"}:
        raise argparse.ArgumentTypeError(f"{text}: curves, results and wait, with commas between")
    return names


def fault_of_options(options: argparse.Namespace) -> str:
    """What is wrong with the options, in words; nothing: empty."""
    if bool(options.a) != bool(options.b):
        return "--a and --b belong together: name the logs of both groups"
    if not (options.logs or options.a):
        return "name a log, such as: python3 logs/compare.py logs/*.txt"
    for log in (*options.logs, *(options.a or []), *(options.b or [])):
        if "," in log and not os.path.exists(log):
            return f"{log}: no such log: write spaces between logs, no commas"
        if (options.json or options.csv) and log.endswith((".json", ".csv")):
            return f"{log}: --json and --csv take no file: write > {log} after the command"
    if options.alpha is not None and not 0 < options.alpha < 1:
        return f"--alpha {options.alpha:g}: a probability between 0 and 1, such as 0.01"
    if options.plot and options.plot.suffix.lower() not in (".png", ".svg"):
        return f"--plot {options.plot}: name a file that ends in .png or .svg"
    return cli.alone(options, {"plot": ("panels", "x", "title"), "a": ("margin", "alpha", "score")})


def fault_of_allowed(options: argparse.Namespace, runs: Sequence[Run]) -> str:
    """A name of --allow that is no condition of any run, in words; none: empty."""
    known = {name.lower() for run in runs for name in conditions(run)}
    for name in options.allow:
        if runs and name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "the tables name them"
            return f"--allow {name}: no run has this condition: {remedy}"
    return ""


def draw(arms: Sequence[Sequence[Run]], options: argparse.Namespace) -> str:
    import picture  # numpy, only where a picture is asked for

    wish = picture.Wish(options.plot, options.x or "steps", options.title or "", options.panels)
    return picture.attempt(arms, wish)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logs, comparison, arms = gather(options)
    if fault := fault_of_allowed(options, logs.runs):
        print(f"error: {fault}", file=sys.stderr)
        return 2
    if options.json:
        print(as_json(logs, comparison, options))
    elif options.csv:
        print(as_csv(logs))
    elif logs.runs or comparison:
        print("\n".join(report(logs, comparison, options.allow)))
        if len(logs.runs) == 2:
            print(f"\n{deciding_line(logs.runs)}")
    problems = [] if logs.runs else logs.problems
    if options.plot and logs.runs:
        problems = list(filter(None, [draw(arms, options)]))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems or comparison and comparison.refusals))


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
