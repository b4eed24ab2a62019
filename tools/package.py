"""Make a record's folder, complete and checked, from the logs of its seeds.

    python3 tools/package.py logs/s1.txt logs/s2.txt logs/s3.txt \\
        --track track_10min_16mb --name "Wider MLP" --author "Ada Lovelace" --github-id ada \\
        --description "MLP three times as wide, 8 layers." [--date 2026-04-01] [--script FILE]

This makes records/<track>/<date>_WiderMLP/ with the script of the logs (or --script), the logs,
submission.json, and a README.md with a TODO that you must replace. A folder that tools/check.py
would refuse is not made, and no folder is overwritten.

    python3 tools/package.py --pack train_gpt.py      the submitted form: train_gpt_packed.py
    python3 tools/package.py --diff FOLDER/train_gpt.py       a script's changes of train_gpt.py

Exit code: 0 made, 1 refused, with the reasons, 2 wrong usage.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
from check import SCORES, TRACKS, check_folder, lines
from cli import ToolError
from packed import pack, plain_form, unpacked
from runs import Run, read_log

RECORDS = Path(os.path.relpath(cli.ROOT / "records"))
TRAINER = cli.ROOT / "train_gpt.py"
README = Path(__file__).with_name("record_readme.txt")
SHOWN = 200  # lines of a diff
OF_ONE_RUN = {"RUN_ID", "SEED", "RESUME", "DATA_PATH", "TOKENIZER_PATH"}  # written otherwise


def read_runs(paths: Sequence[Path]) -> dict[int, Run]:
    """The run of each seed. Raises ToolError for a log without a seed or a result of its own."""
    runs: dict[int, Run] = {}
    for given in paths:
        path = given.with_suffix(".txt") if given.suffix == ".jsonl" else given
        log = read_log(path, events=False)  # the text holds the script
        run = log.runs[0] if log.runs else Run(str(path))
        if run.result is None:
            raise ToolError(f"{path}: {[*log.problems, run.status][0]}: name a finished run")
        if run.known_seed is None or run.known_seed in runs:
            words = "run it with another SEED, or rename it to train_seed<N>.log"
            raise ToolError(f"{path}: seed {run.known_seed} is not its own: {words}")
        runs[run.known_seed] = run
    return runs


def submission(options: argparse.Namespace, runs: dict[int, Run], source: bytes) -> dict[str, Any]:
    """submission.json from the logs."""
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
        "seed_results": {str(seed): results_of(run) for seed, run in runs.items()},
    }
    for key in SCORES:
        numbers = [getattr(run.result, key) for run in runs.values()]
        values[key] = round(fmean(numbers), 8)
    return {key: value for key, value in values.items() if value is not None}


def results_of(run: Run) -> dict[str, Any]:
    own = {name: getattr(run, name) for name in ("model_bytes", "last_step", "train_time_ms")}
    return {key: getattr(run.result, key) for key in SCORES} | own


def changes(script: bytes) -> list[str]:
    """The lines of a unified diff from train_gpt.py to a script; of a packed one, which has no
    comments, without them."""
    texts = [TRAINER.read_bytes(), script]
    if unpacked(script):
        texts = [plain_form(text) for text in texts]
    before, after = (text.decode("utf-8", "replace").splitlines() for text in texts)
    return [*difflib.unified_diff(before, after, "train_gpt.py", "the record", lineterm="")]


def readme(runs: dict[int, Run], values: dict[str, Any], source: bytes, folder: Path) -> str:
    """tools/record_readme.txt with figures from the logs; a TODO is for what only the author
    knows."""
    first = [*runs.values()][0]
    known = read_log(first.path).runs  # the events know what was given
    given = known[0].settings if known else None
    todo = "TODO: the log does not say all settings: add them below.\n\n" if given is None else ""
    settings = given or {}
    own = sorted(settings.keys() - OF_ONE_RUN)
    lines = [f"  {name}={shlex.quote(settings[name])} \\\n" for name in own]
    ranks = first.world_size or 1
    results = [{"seed": seed, **results_of(run)} for seed, run in runs.items()]
    rows = [[*results[0]], ["---"] * len(results[0]), *(one.values() for one in results)]
    diff = changes(source)
    texts = {
        "track": folder.parent.name,
        "table": "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows),
        "todo": todo,
        "each_seed": " ".join(map(str, runs)),
        "settings": "".join(lines),
        "launch": f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python3",
        "folder": folder,
        "lines": len(diff),
        "shown": SHOWN,
        "diff": "\n".join(diff[:SHOWN]),
    }
    for name in ("data_path", "tokenizer_path"):
        path = settings.get(name.upper()) or first.config.get(name) or f"<{name}>"
        texts[name] = shlex.quote(Path(str(path)).name)
    return README.read_text(encoding="utf-8").format(**values | texts)


def make(options: argparse.Namespace) -> None:
    """Makes the folder, whole or not at all."""
    runs = read_runs(options.logs)
    sources = [run.source for run in runs.values() if run.source is not None]
    if not (options.script or sources):
        raise ToolError(f"{options.logs[0]}: no script is in it: add --script FILE")
    source = options.script.read_bytes() if options.script else sources[0]
    words = re.findall(r"[A-Za-z0-9][A-Za-z0-9._+-]*", options.name)
    title = "".join(word[0].upper() + word[1:] for word in words)[:80]
    target = RECORDS / options.track / f"{options.date}_{title}"
    if os.path.lexists(target):
        raise ToolError(f"{target}: exists: remove it, or give another --name or --date")
    values = submission(options, runs, source)
    names = {seed: f"train_seed{seed}.log" if len(runs) > 1 else "train.log" for seed in runs}
    files = {names[seed]: Path(run.path).read_bytes() for seed, run in runs.items()}
    files |= {
        "train_gpt.py": source,
        "submission.json": (json.dumps(values, indent=2) + "\n").encode(),
        "README.md": readme(runs, values, source, target).encode(),
    }
    with tempfile.TemporaryDirectory(dir=RECORDS, prefix=".package") as temporary:
        folder = Path(temporary, options.track, target.name)
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        record = check_folder(folder)
        print("\n".join(lines(record, target)))
        if record.verdict == "refused":
            raise ToolError(f"{target} was not made: see what was refused above")
        target.parent.mkdir(exist_ok=True)
        os.rename(folder, target)
    print(f"made {target}: write its README's TODO, then: git add {target}")


def write_packed(script: Path) -> None:
    target, text = script.with_name(f"{script.stem}_packed.py"), script.read_bytes()
    if target.exists() and not unpacked(target.read_bytes()):
        raise ToolError(f"{target}: exists and is not a packed script: move it away")
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
    add("logs", nargs="+" if needed else "*", type=Path, metavar="LOG", help="log of each seed")
    add(
        "--pack",
        type=Path,
        metavar="SCRIPT",
        help="write it without comments and docstrings, packed",
    )
    add("--diff", type=Path, metavar="SCRIPT", help="print its changes of train_gpt.py")
    add("--track", choices=TRACKS, required=needed, help="the track's folder below records/")
    add("--name", required=needed, help="the title; its words make the folder's name")
    add("--author", required=needed, help="your name as it will be shown")
    add("--github-id", required=needed, help="your GitHub login")
    add("--description", required=needed, help="a sentence or two")
    add("--date", help="YYYY-MM-DD (default: today)", default=str(datetime.date.today()))
    add("--script", type=Path, metavar="FILE", help="script to submit (default: that of the logs)")
    options = parser.parse_args(arguments)
    if options.diff:
        return cli.run(lambda: print("\n".join(changes(options.diff.read_bytes())))) or 0
    if options.pack:
        return cli.run(lambda: write_packed(options.pack)) or 0
    return cli.run(lambda: make(options)) or 0


if __name__ == "__main__":
    sys.exit(main())
