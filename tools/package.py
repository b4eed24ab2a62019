"""Make a complete and checked record folder from the logs of several seeds.

    python3 tools/package.py logs/s1.txt logs/s2.txt logs/s3.txt \\
        --track track_10min_16mb --name "Wider MLP" --author "Ada Lovelace" --github-id ada \\
        --description "MLP three times as wide, 8 layers." [--date 2026-04-01] [--script FILE]

This makes records/<track>/<date>_WiderMLP/ with the script of the logs (or --script), the logs,
submission.json, and a README.md with a TODO that you must replace. If tools/check.py would refuse
the folder, it is not created. No folder is overwritten.

    python3 tools/package.py --pack train_gpt.py      write the packed form, train_gpt_packed.py
    python3 tools/package.py --diff SCRIPT            print how SCRIPT changes train_gpt.py

Exit code: 0 made, 1 refused, with the reasons, 2 wrong usage.
"""

# This module builds on check.py (checks the folder), packed.py (packs scripts) and runs.py (reads
# logs).

import argparse
import datetime
import difflib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from check import SCORES, TRACKS, check_folder, report_lines
from cli import ToolError
from packed import comparable_form, pack, unpack_script
from runs import Run, read_log

RECORDS = Path(os.path.relpath(cli.ROOT / "records"))
TRAINER = cli.ROOT / "train_gpt.py"
README = Path(__file__).with_name("record_readme.txt")
MAX_DIFF_LINES = 200  # in the README
# Settings that the README's command sets in another way.
NOT_LISTED = {"RUN_ID", "SEED", "RESUME", "DATA_PATH", "TOKENIZER_PATH"}


def read_runs(paths: Sequence[Path]) -> dict[int, Run]:
    """Return {seed: run}. Raises ToolError if a log has no result, or no seed of its own."""
    runs: dict[int, Run] = {}
    for given in paths:
        path = given.with_suffix(".txt") if given.suffix == ".jsonl" else given
        log = read_log(path, events=False)  # the text log contains the script
        run = log.runs[0] if log.runs else Run(str(path))
        if run.result is None:
            raise ToolError(
                f"{path}: {[*log.problems, run.status][0]}; give the log of a finished run"
            )
        if run.known_seed is None or run.known_seed in runs:
            fault = "its seed is not known"
            if run.known_seed is not None:
                fault = f"another log has the same seed {run.known_seed}"
            words = "run it with another SEED, or rename it to train_seed<N>.log"
            raise ToolError(f"{path}: {fault}; {words}")
        runs[run.known_seed] = run
    return runs


def make_submission(
    options: argparse.Namespace, runs: dict[int, Run], source: bytes
) -> dict[str, Any]:
    """Return the values of submission.json."""
    models = [run.model_bytes for run in runs.values() if run.model_bytes]
    values = {
        "author": options.author.strip(),
        "github_id": options.github_id.strip(),
        "name": options.name.strip(),
        "blurb": options.description.strip(),
        "date": options.date,
        "track": options.track.removeprefix("track_"),
        "bytes_total": max(models) + len(source) if models else None,
        "bytes_code": len(source),
        "seeds": [*runs],
        "seed_results": {str(seed): run_results(run) for seed, run in runs.items()},
    }
    for key in SCORES:
        numbers = [getattr(run.result, key) for run in runs.values()]
        values[key] = round(fmean(numbers), 8)
    return {key: value for key, value in values.items() if value is not None}


def run_results(run: Run) -> dict[str, Any]:
    """Return what submission.json and the README list of a run."""
    facts = {name: getattr(run, name) for name in ("model_bytes", "last_step", "train_time_ms")}
    return {key: getattr(run.result, key) for key in SCORES} | facts


def diff_lines(script: bytes) -> list[str]:
    """Return the lines of a unified diff from train_gpt.py to a script. A packed script has no
    comments, so comments are left out of both."""
    texts = [TRAINER.read_bytes(), script]
    if unpack_script(script):
        texts = [comparable_form(text) for text in texts]
    before, after = (text.decode("utf-8", "replace").splitlines() for text in texts)
    return [*difflib.unified_diff(before, after, "train_gpt.py", "the record", lineterm="")]


def make_readme(runs: dict[int, Run], values: dict[str, Any], source: bytes, folder: Path) -> str:
    """Return tools/record_readme.txt with the figures of the logs. TODO marks what only the author
    knows."""
    first = [*runs.values()][0]
    known = read_log(first.path).runs  # the events contain the settings that were given
    given = known[0].settings if known else None
    todo = ""
    if given is None:
        todo = "TODO: the log does not contain all settings; add them below.\n\n"
    settings = given or {}
    names = sorted(settings.keys() - NOT_LISTED)
    lines = [f"  {name}={shlex.quote(settings[name])} \\\n" for name in names]
    ranks = first.world_size or 1
    results = [{"seed": seed, **run_results(run)} for seed, run in runs.items()]
    rows = [[*results[0]], ["---"] * len(results[0]), *(one.values() for one in results)]
    diff = diff_lines(source)
    texts = {
        "track": folder.parent.name,
        "table": "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows),
        "todo": todo,
        "each_seed": " ".join(map(str, runs)),
        "settings": "".join(lines),
        "launch": f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python3",
        "folder": folder,
        "lines": len(diff),
        "shown": MAX_DIFF_LINES,
        "diff": "\n".join(diff[:MAX_DIFF_LINES]),
    }
    for name in ("data_path", "tokenizer_path"):
        path = settings.get(name.upper()) or first.config.get(name) or f"<{name}>"
        texts[name] = shlex.quote(Path(str(path)).name)
    return README.read_text(encoding="utf-8").format(**values | texts)


def make(options: argparse.Namespace) -> None:
    """Make the folder completely, or not at all."""
    runs = read_runs(options.logs)
    sources = [run.source for run in runs.values() if run.source is not None]
    if not (options.script or sources):
        raise ToolError(f"{options.logs[0]} contains no script; add --script FILE")
    source = options.script.read_bytes() if options.script else sources[0]
    words = re.findall(r"[A-Za-z0-9][A-Za-z0-9._+-]*", options.name)
    title = "".join(word[0].upper() + word[1:] for word in words)[:80]
    target = RECORDS / options.track / f"{options.date}_{title}"
    if os.path.lexists(target):
        raise ToolError(f"{target} exists already; remove it, or give another --name or --date")
    values = make_submission(options, runs, source)
    names = {seed: f"train_seed{seed}.log" if len(runs) > 1 else "train.log" for seed in runs}
    files = {names[seed]: Path(run.path).read_bytes() for seed, run in runs.items()}
    files |= {
        "train_gpt.py": source,
        "submission.json": (json.dumps(values, indent=2) + "\n").encode(),
        "README.md": make_readme(runs, values, source, target).encode(),
    }
    with tempfile.TemporaryDirectory(dir=RECORDS, prefix=".package") as temporary:
        folder = Path(temporary, options.track, target.name)
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        record = check_folder(folder)
        print("\n".join(report_lines(record, target)))
        if record.verdict == "refused":
            raise ToolError(f"{target} was not made; the reasons are above")
        target.parent.mkdir(exist_ok=True)
        os.rename(folder, target)
    print(f"made {target}; replace the TODO in its README.md, then run: git add {target}")


def write_packed(script: Path) -> None:
    """Write the packed form of a script beside it."""
    target = script.with_name(f"{script.stem}_packed.py")
    text = script.read_bytes()
    if target.exists() and not unpack_script(target.read_bytes()):
        raise ToolError(f"{target} exists and is not a packed script; move it away")
    try:
        result = pack(text)
    except ValueError as error:
        raise ToolError(f"{script}: {error}") from error
    target.write_bytes(result)
    print(f"{target}: {len(text):,} bytes became {len(result):,}, without comments and docstrings")


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    needed = not any(word.startswith(("--pack", "--diff")) for word in words)
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "logs",
        nargs="+" if needed else "*",
        type=Path,
        metavar="LOG",
        help="the logs, one for each seed",
    )
    add(
        "--pack",
        type=Path,
        metavar="SCRIPT",
        help="write this script packed, without comments and docstrings",
    )
    add(
        "--diff",
        type=Path,
        metavar="SCRIPT",
        help="print the changes of train_gpt.py in this script",
    )
    add("--track", choices=TRACKS, required=needed, help="the folder below records/")
    add("--name", required=needed, help="the title; the folder's name is made from its words")
    add("--author", required=needed, help="your name")
    add("--github-id", required=needed, help="your GitHub login")
    add("--description", required=needed, help="one or two sentences about the record")
    add("--date", help="YYYY-MM-DD (default: today)", default=str(datetime.date.today()))
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="script to submit (default: the script in the logs)",
    )
    options = parser.parse_args(arguments)
    parser.require(options.logs, "give the logs of finished runs, such as logs/s1.txt")
    parser.require([options.pack, options.diff, options.script], "give a script")
    if options.diff:
        return cli.run(lambda: print("\n".join(diff_lines(options.diff.read_bytes())))) or 0
    if options.pack:
        return cli.run(lambda: write_packed(options.pack)) or 0
    return cli.run(lambda: make(options)) or 0


if __name__ == "__main__":
    sys.exit(main())
