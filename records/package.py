"""Make a record's folder, complete and checked, from the logs of its seeds.

    python3 records/package.py logs/s1.txt logs/s2.txt logs/s3.txt \\
        --track track_10min_16mb --name "Wider MLP" --author "Ada Lovelace" --github-id ada \\
        --description "MLP three times as wide, 8 layers." [--date 2026-04-01] [--script FILE]

This makes records/<track>/<date>_WiderMLP/ with the script that the logs hold (or that --script
names), the logs as train_seed<N>.log, submission.json, and a README.md with a TODO that you must
replace. The settings come from the .jsonl beside each log. A folder that records/check.py would
refuse is not made, and no folder is overwritten. In track_non_record_16mb the logs may have several
configurations: that of the first log is submitted.

    python3 records/package.py --pack train_gpt.py      the submitted form: train_gpt_packed.py
    python3 records/package.py --unpack FILE            the readable script inside FILE

The packed script gives the same results to the digit, and its log counts its own size.

Exit code: 0 made, 1 refused, with the reasons, 2 wrong usage.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from check import (
    INSTALL,
    Report,
    check_folder,
    lines,
    track_argument,
)
from facts import LoggedRun, first_difference, read_bytes, reason
from findings import OPEN, RECORD, REFUSED, TRACKS
from packed import packed_form, promised_sha256
from reader import (
    CAP_BYTES,
    Parser,
    Run,
    conditions,
    differences,
    headline,
    missing,
    read_log,
    score,
)
from rules import TODO, parsed_date
from script import UNKNOWN, Default, look, pack, settings

RECORDS = Path(os.path.relpath(Path(__file__).resolve().parent))
TYPED = ("track", "name", "author", "github_id", "description")  # needed, beside the logs
NOT_COMMAND = {"run_id", "seed", "data_path", "tokenizer_path", "resume"}  # written otherwise
NOT_COMMAND |= {"world_size", "local_rank", "rank"}  # of no command
# Conditions that are no setting of the run: check.py judges them.
SURROUNDINGS = {"code", "code_bytes", "device", "gpus", "torch", "cuda"}
COLUMNS = ("log", "seed", "steps", "train s", "eval s", "val_loss", "val_bpb", "model", "total")


class RefusedError(Exception):
    """What stands against making the folder, in one line."""


@dataclass
class Log:
    """A log to be packaged, with the machine that it or its .jsonl names."""

    path: Path
    data: bytes
    run: Run
    seed: int
    machine: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # in the record's folder
    arm: str = ""  # "": the configuration that is submitted


def slug(name: str) -> str:
    """A folder's Description from a title: as it is where it may be, else its words joined."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", plain):
        return plain[:80]
    return "".join(word[0].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", plain))[:80]


# --- the logs ---


def read_all(paths: Sequence[Path]) -> list[Log]:
    """Each log once: a copy under another name is the same run."""
    logs: list[Log] = []
    for path in paths:
        log = read(path)
        if log.data not in [other.data for other in logs]:
            logs.append(log)
    return logs


def read(path: Path) -> Log:
    """Raises RefusedError for a log that cannot be submitted."""
    text = path.with_suffix(".txt") if path.suffix == ".jsonl" else path
    try:
        data = read_bytes(text)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{text}: {reason(error)}: name the text log of a run") from error
    runs = read_log(text).runs
    finished = [run for run in runs if headline(run) is not None]
    if not runs:
        raise RefusedError(f"{text}: no run in it: name logs/<RUN_ID>.txt")
    if not finished:
        why = runs[-1].error or "it ends before the result"
        raise RefusedError(
            f"{text}: {runs[-1].status} at step {runs[-1].last_step}: {why}: name a finished run"
        )
    run = finished[-1]
    seed = run.known_seed
    if seed is None:
        raise RefusedError(f"{text}: it does not say its seed: rename it to train_seed<N>.log")
    return Log(text, data, run, seed, {**run.hardware, **run.versions})


def source_to_ship(logs: Sequence[Log], script: Path | None) -> bytes:
    """The script of --script, for check.py to hold against the logs; else the one they all hold.

    Raises RefusedError with the first line in which a log holds another; packed is no difference.
    """
    if script is not None:
        try:
            return read_bytes(script)
        except (OSError, ValueError) as error:
            raise RefusedError(f"{script}: {reason(error)}: name the script that ran") from error
    held = [(log.path, log.run.source) for log in logs]
    texts = [(path, text) for path, text in held if text is not None]
    if not texts:
        raise RefusedError(
            f"{logs[0].path}: it does not hold the script that ran: name logs/<RUN_ID>.txt, "
            "or the script: --script FILE"
        )
    first, source = texts[0]
    for path, other in texts[1:]:
        number, ours, theirs = first_difference(look(source).text, look(other).text)
        if number:
            raise RefusedError(
                f"{path}: not the script of {first}: line {number} is {theirs!r}, not {ours!r}: "
                "leave one out, or name the script to ship: --script FILE"
            )
    return source


def name_logs(logs: Sequence[Log], track: str) -> None:
    """Sorts the logs into arms, the first log's first, and names them for the folder."""
    configurations = [conditions(log.run) for log in logs]
    varied = [
        difference.name
        for difference in differences([log.run for log in logs])[0]
        if not difference.harmless
        and not difference.unknown
        and difference.name not in SURROUNDINGS
    ]
    # The lines on input say again what settings say.
    varied = [name for name in varied if "_io_" not in name] or varied
    if varied and track == RECORD:
        given = dict.fromkeys(str(values[varied[0]]) for values in configurations)
        raise RefusedError(
            f"the logs differ in {varied[0]} ({' | '.join(given)}): name those of one configuration"
        )
    arms = list(
        dict.fromkeys(tuple(str(values[name]) for name in varied) for values in configurations)
    )
    for log, values in zip(logs, configurations, strict=True):
        arm = tuple(str(values[name]) for name in varied)
        if arm != arms[0]:
            parts = [f"{name}{value_word(values[name])}" for name in varied]
            plain = "-".join(re.sub(r"[^A-Za-z0-9._+]", "", part) for part in parts)
            short = len(parts) <= 3 and len(plain) <= 60
            log.arm = plain if short else f"arm{arms.index(arm) + 1}"
        prefix = f"{log.arm}_" if log.arm else ""
        log.name = "train.log" if len(logs) == 1 else f"train_{prefix}seed{log.seed}.log"
        twins = [other for other in logs if other.name == log.name and other is not log]
        if twins:
            raise RefusedError(
                f"{log.path}: seed {log.seed} again, as {twins[0].path}: "
                "run it with another SEED, or leave it out"
            )


def value_word(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# --- the files ---


def results(logs: Sequence[Log], key: str) -> list[float]:
    return [getattr(headline(log.run), key) for log in logs]


def model_size(run: Run) -> int | None:
    return LoggedRun("", run).model_bytes


def total_bytes(log: Log, source: bytes) -> int | None:
    """Of the model and the script that is shipped, whichever one the log counts."""
    size = model_size(log.run)
    return log.run.sizes.total if size is None else size + len(source)


def submission(options: argparse.Namespace, logs: Sequence[Log], source: bytes) -> dict[str, Any]:
    """submission.json from the logs of the submitted arm."""
    totals = [total for log in logs if (total := total_bytes(log, source)) is not None]
    values: dict[str, Any] = {
        "author": options.author.strip(),
        "github_id": options.github_id.strip(),
        "name": options.name.strip(),
        "blurb": options.description.strip(),
        "date": str(options.day),
        "track": "10min_16mb" if options.track == RECORD else "non_record_16mb",
    }
    for key in ("val_loss", "val_bpb"):
        of_seeds = results(logs, key)
        if None not in of_seeds:
            values[key] = round(mean(of_seeds), 8)
            if len(of_seeds) > 1:
                values[f"{key}_std"] = round(stdev(of_seeds), 8)
    values |= {
        "bytes_total": max(totals, default=None),
        "bytes_code": len(source),
        "seeds": [log.seed for log in logs],
        "seed_results": {str(log.seed): seed_result(log, source) for log in logs},
        "hardware": hardware(logs[0]),
        "pytorch_version": logs[0].machine.get("torch"),
    }
    return {key: value for key, value in values.items() if value is not None}


def seed_result(log: Log, source: bytes) -> dict[str, Any]:
    run, result = log.run, headline(log.run)
    before = score(run, "pre_quant")
    values = {
        "val_loss": result.val_loss,
        "val_bpb": result.val_bpb,
        "pre_quant_val_bpb": before and before.val_bpb,
        "bytes_total": total_bytes(log, source),
        "artifact_bytes": model_size(run),
        "steps": run.last_step or None,
        "train_time_ms": run.train_time_ms,
        "eval_time_ms": result.eval_ms,
    }
    return {key: value for key, value in values.items() if value is not None}


def hardware(log: Log) -> str | None:
    device = log.machine.get("device")
    return f"{log.run.world_size or 1}x {device}" if device else None


@dataclass
class Settings:
    """The script's settings in a run, by upper-case name."""

    changed: dict[str, str] = field(default_factory=dict)  # those that are not its defaults
    unusable: dict[str, str] = field(default_factory=dict)  # values that the script cannot take
    unknown: list[str] = field(default_factory=list)  # those that the log does not say


def settings_of(log: Log, source: bytes) -> Settings:
    result = Settings()
    for name, default in settings(look(source).text).items():
        if name in NOT_COMMAND:
            continue
        value = log.run.config.get(name, UNKNOWN)
        if value is UNKNOWN:
            result.unknown.append(name.upper())
        elif not same_value(value, default.value):
            kind = result.changed if takes(default, value) else result.unusable
            kind[name.upper()] = value_word(value)
    return result


def takes(default: Default, value: object) -> bool:
    """Can a script with this default take the value? Where it makes a number of it: a number."""
    number = isinstance(default.value, (int, float)) or default.kind is not None
    if not number:
        return True
    try:
        (default.kind or float)(value_word(value))
    except ValueError:
        return False
    return True


def same_value(value: object, default: object) -> bool:
    """A setting's value is its default, as text or as a number ("1" is True, "0.50" is 0.5)."""
    try:
        return float(value) == float(default)
    except (TypeError, ValueError):
        return str(value) == str(default)


def command(logs: Sequence[Log], source: bytes) -> list[str]:
    """The shell lines that run it again, in the record's folder."""
    first, taken = logs[0], settings(look(source).text)
    assignments = ['RUN_ID="seed$seed" SEED="$seed"']
    for name, folder in (("data_path", "datasets"), ("tokenizer_path", "tokenizers")):
        last = Path(str(first.run.config.get(name) or "")).name
        last = last or (first.run.dataset or "NAME" if name == "data_path" else "")
        if name in taken and last:
            assignments.append(f"{name.upper()}={shlex.quote(f'../../../data/{folder}/{last}')}")
    changed = settings_of(first, source).changed
    assignments += [f"{name}={shlex.quote(value)}" for name, value in changed.items()]
    ranks = first.run.world_size or 1
    launch = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python3"
    return [
        f"for seed in {' '.join(str(log.seed) for log in logs)}; do",
        *(f"  {assignment} \\" for assignment in assignments),
        f"  {launch} train_gpt.py",
        "done",
    ]


def left_out(log: Log, source: bytes) -> list[str]:
    """What the command cannot hold, in lines for the README."""
    of_log = settings_of(log, source)
    result = [
        f"{TODO}{name} is left out above: the log says {value!r}, which the script cannot take."
        for name, value in of_log.unusable.items()
    ]
    if of_log.unknown:
        names = ", ".join(of_log.unknown[:12]) + (" ..." if len(of_log.unknown) > 12 else "")
        result.append(f"The logs do not say {names}: the script's defaults are used.")
    return ["", *result] if result else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def cell(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def result_row(log: Log, source: bytes) -> list[str]:
    run, result = log.run, headline(log.run)
    times = (run.train_time_ms, result.eval_ms)
    return [
        log.name,
        str(log.seed),
        f"{run.last_step:,}",
        *(cell(None if ms is None else ms / 1e3, ",.1f") for ms in times),
        cell(result.val_loss, ".8f"),
        cell(result.val_bpb, ".8f"),
        cell(model_size(run), ","),
        cell(total_bytes(log, source), ","),
    ]


def readme(options: argparse.Namespace, logs: Sequence[Log], source: bytes) -> str:
    """A skeleton: every figure from the logs, and a TODO for what only the author knows."""
    main = [log for log in logs if not log.arm]
    means = [
        f"{key} {mean(values):.5f} +- {stdev(values):.5f}"
        for key in ("val_loss", "val_bpb")
        if None not in (values := results(main, key)) and len(values) > 1
    ]
    first = main[0]
    run, steps = first.run, first.run.steps
    crc = steps[-1].data_crc if steps else None
    facts = {
        "data": f"{run.dataset or 'unknown'}, {cell(run.train_shards)} training shards, "
        f"{cell(run.val_tokens, ',')} validation tokens",
        "machine": hardware(first) or "not in the logs",
        "versions": ", ".join(
            f"{name} {first.machine[name]}"
            for name in ("python", "torch", "cuda")
            if first.machine.get(name)
        ),
        "data_crc": f"{crc} at step {steps[-1].step:,}" if crc else "not in the logs",
    }
    todo = f"{TODO}what was changed against which record, why it helps, what failed."
    return "\n".join(
        [
            f"# {options.name.strip()}\n\n{options.description.strip()}\n",
            f"{options.author.strip()} (@{options.github_id.strip()}), {options.day}, "
            f"{options.track}.\n\n## Result\n",
            *table(COLUMNS, [result_row(log, source) for log in logs]),
            *([f"\nMean of {len(main)} seeds: {', '.join(means)}."] if means else []),
            f"\n## What was done\n\n{todo}\n\n## Run it again\n\nIn this folder:\n```bash",
            *command(main, source),
            "```",
            *left_out(first, source),
            "\n## Data and machine\n",
            *(f"- {key}: {value or '-'}" for key, value in facts.items()),
            "",
        ]
    )


# --- the folder ---


def refuse_too_large(logs: Sequence[Log], source: bytes) -> None:
    """A readable script that is too large, but would fit packed: RefusedError says how."""
    totals = [total for log in logs if (total := total_bytes(log, source)) is not None]
    total, packed = max(totals, default=0), len(packed_form(source))
    if total > CAP_BYTES >= total - len(source) + packed:
        raise RefusedError(
            f"code and model would be {total:,} bytes, more than {CAP_BYTES:,}: write the packed "
            "script with package.py --pack train_gpt.py, and ship it: --script train_gpt_packed.py"
        )


def package(options: argparse.Namespace, logs: Sequence[Log], source: bytes) -> tuple[Path, Report]:
    """Makes the folder, whole or not at all.

    Raises RefusedError where it exists; a refused report means: not made.
    """
    target = options.records / options.track / f"{options.day}_{slug(options.name)}"
    if os.path.lexists(target):
        raise RefusedError(f"{target}: exists: remove it, or give another --name or --date")
    main = [log for log in logs if not log.arm]
    refuse_too_large(main, source)
    values = submission(options, main, source)
    files = {
        "train_gpt.py": source,
        **{log.name: log.data for log in logs},
        "submission.json": (json.dumps(values, indent=2) + "\n").encode(),
        "README.md": readme(options, logs, source).encode(),
    }
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    made = [folder for folder in (target.parent.parent, target.parent) if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        report = check_folder(temporary, options.track, place=target)
        if report.verdict != REFUSED:
            os.rename(temporary, target)
    except OSError as error:
        raise RefusedError(f"{target}: cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():
            for folder in made[::-1]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
    return target, report


# --- the submitted form ---


def write_form(options: argparse.Namespace) -> str:
    """--pack and --unpack: what was written, in words. Raises RefusedError."""
    given = options.pack or options.unpack
    suffix = "packed" if options.pack else "readable"
    target = options.output or given.with_name(f"{given.stem}_{suffix}.py")
    try:
        text = read_bytes(given)
        result = pack(text) if options.pack else readable(text)
    except (OSError, ValueError) as error:
        remedy = "" if given.is_file() else ": name a script of Python"
        raise RefusedError(f"{given}: {reason(error)}{remedy}") from error
    try:
        if target.exists() and promised_sha256(read_bytes(target)) is None:
            raise ValueError("it exists and is no packed script")
        target.write_bytes(result)
    except (OSError, ValueError) as error:
        message = f"{target}: {reason(error)}: name another --output FILE"
        raise RefusedError(message) from error
    run = f": run it as you would {given}, its log names this size" if options.pack else ""
    return f"{target}: {len(text):,} bytes have become {len(result):,}{run}"


def readable(text: bytes) -> bytes:
    script = look(text)
    if not script.packed:
        raise ValueError("no packed script: it is readable as it is")
    return script.text


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("logs", nargs="*", type=Path, metavar="LOG", help="logs/<RUN_ID>.txt of each seed")
    add("--pack", type=Path, metavar="SCRIPT", help="write the packed form of this script")
    add("--unpack", type=Path, metavar="SCRIPT", help="write the script inside a packed one")
    add("--output", type=Path, metavar="FILE", help="file to write (default: SCRIPT_packed.py)")
    add("--track", type=track_argument, help=f"{RECORD} or {OPEN}")
    add("--name", help="the title; its words make the folder's name")
    add("--author", help="your name as it will be shown")
    add("--github-id", help="your GitHub login")
    add("--description", help="a sentence or two")
    add("--date", help="YYYY-MM-DD (default: today)")
    add("--script", type=Path, metavar="FILE", help="script to submit (default: that of the logs)")
    add("--records", type=Path, default=RECORDS, metavar="DIR", help="folder of the tracks")
    options = parser.parse_args(arguments)
    if options.pack or options.unpack:
        if options.logs:
            parser.error("--pack and --unpack take no logs: make the record in a second command")
        return options
    if not options.logs:
        parser.error("no log is named: name logs/<RUN_ID>.txt of each seed, or --pack SCRIPT")
    for name in TYPED:
        if not (getattr(options, name) or "").strip():
            parser.error(f"--{name.replace('_', '-')} is needed")
    options.day = datetime.date.today() if options.date is None else parsed_date(options.date)
    if options.day is None or options.date not in (None, str(options.day)):
        parser.error(f"--date {options.date}: YYYY-MM-DD is expected")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,39}", options.github_id.strip()):
        parser.error(f"--github-id {options.github_id}: write the login alone, such as ada")
    if options.records.resolve().name in TRACKS:
        parser.error(f"--records {options.records}: a track's folder: name the one that holds it")
    if not slug(options.name):
        parser.error(f"--name {options.name}: letters or digits are needed for the folder's name")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.pack or options.unpack:
            print(write_form(options))
            return 0
        logs = read_all(options.logs)
        source = source_to_ship(logs, options.script)
        name_logs(logs, options.track)
        target, report = package(options, logs, source)
    except ModuleNotFoundError as error:
        print(f"error: {missing(error.name, INSTALL)}", file=sys.stderr)
        return 2
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(report)))
    if report.verdict == REFUSED:
        print(f"error: {target} was not made: see what was refused above", file=sys.stderr)
        return 1
    print(f"made {target}: write its README's TODO, then: git add {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
