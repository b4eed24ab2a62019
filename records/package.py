"""From the logs of a run's seeds to a record's folder, complete and checked.

    python3 records/package.py logs/s1.txt logs/s2.txt logs/s3.txt \\
        --track track_10min_16mb --name "Wider MLP" \\
        --author "Ada Lovelace" --github-id ada \\
        --description "MLP three times as wide, 8 layers." [--date 2026-04-01]

makes records/<track>/<date>_WiderMLP/ with train_gpt.py as the logs hold it, the logs as
train_seed<N>.log, submission.json filled from them, and a README.md whose TODO is yours. The
settings come from the .jsonl beside each log. Nothing is made that records/check.py would refuse,
and no folder is overwritten. In track_non_record_16mb logs of several configurations are arms of
one study: the first log's is the one submitted.

    python3 records/package.py --pack train_gpt.py      the submitted form: train_gpt_packed.py
    python3 records/package.py --unpack FILE            and back: FILE's readable script

The packed form runs itself, to the digit as the readable script does, and its log names its size.

Exit code: 0 made, 1 refused, with the reasons, 2 wrong usage.
"""

import argparse
import ast
import contextlib
import copy
import datetime
import json
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _code import look, pack, promised_sha256
from _reader import (
    Run,
    differences,
    embedded_source,
    first_difference,
    merge,
    read_bytes,
    read_log,
    reason,
    seed_groups,
    summary,
)
from _script import packed_size
from check import (
    RECORD,
    TODO,
    Options,
    Report,
    check_folder,
    lines,
    parsed_date,
    size_lines,
    track_argument,
)

RECORDS = Path(__file__).resolve().parent
# Of the settings: written otherwise, or not.
NOT_COMMAND = {"run_id", "seed", "data_path", "tokenizer_path", "resume"}
RESULT_HEAD = (
    "log",
    "seed",
    "steps",
    "ms a step",
    "train s",
    "eval s",
    "val_bpb before quantisation",
    "val_loss",
    "val_bpb",
    "model bytes",
    "total bytes",
)
STATED = {RECORD: "10min_16mb"}  # the track in submission.json, as most records write it


class RefusedError(Exception):
    """What stands against making the folder, in one line."""


@dataclass
class Log:
    """A log to be packaged: its bytes and run,
    and the settings, from the events beside it where there are some.
    """

    path: Path
    data: bytes
    run: Run
    full: Run  # with the settings of the .jsonl
    source: bytes
    name: str = ""  # in the record's folder
    arm: str = ""  # "" : the configuration that is submitted


@dataclass
class About:
    """What is typed by hand."""

    track: str
    name: str
    author: str
    github_id: str
    description: str
    date: datetime.date

    @property
    def folder(self) -> str:
        return f"{self.date}_{slug(self.name)}"


def slug(name: str) -> str:
    """A folder's Description from a title: as it is where it may be, else its words joined."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", plain):
        return plain[:80]
    return "".join(word[0].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", plain))[:80]


# --- the logs ---


def read(path: Path) -> Log:
    """Raises RefusedError for a log that cannot be submitted."""
    text = path.with_suffix(".txt") if path.suffix == ".jsonl" else path
    try:
        data = read_bytes(text)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{text}: {reason(error)}: name the text log of a run") from error
    found = read_log(text)
    if len(found.runs) != 1:
        raise RefusedError(
            f"{text}: {len(found.runs)} runs in it: a record takes logs of one run each"
        )
    run = found.runs[0]
    if run.status != "finished" or run.headline is None:
        raise RefusedError(
            f"{text}: {run.status} at step {run.last_step}: "
            f"{run.error or 'it ends before the result'}"
        )
    if run.seed is None:
        raise RefusedError(f"{text}: it does not tell its seed")
    source = embedded_source(data, run) if run.source_sha256 else None
    if source is None:
        raise RefusedError(
            f"{text}: it does not begin with the script's text: "
            "name logs/<RUN_ID>.txt, not what the console printed"
        )
    return Log(text, data, run, with_events(run, text.with_suffix(".jsonl")), source)


def with_events(run: Run, path: Path) -> Run:
    """The run with what its .jsonl tells besides; the run itself where there is none."""
    if not path.is_file():
        return run
    found = read_log(path).runs
    same = [
        one
        for one in found
        if one.headline
        and abs(one.headline.val_bpb - run.headline.val_bpb) < 1e-6
        and one.seed == run.seed
        and one.last_step == run.last_step
    ]
    if not same:
        raise RefusedError(
            f"{path}: not of the run of the .txt beside it: move it away, or name another log"
        )
    result = copy.deepcopy(run)
    merge(result, same[-1])
    return result


def same_source(logs: Sequence[Log], script: Path | None) -> bytes:
    """The script's text, equal in all logs and to `script`.

    Raises RefusedError with the first line that differs.
    """
    first = logs[0]
    texts = [(str(log.path), log.source) for log in logs[1:]]
    if script is not None:
        try:
            texts.append((str(script), read_bytes(script)))
        except (OSError, ValueError) as error:
            raise RefusedError(f"{script}: {reason(error)}") from error
    for name, text in texts:
        number, ours, theirs = first_difference(first.source, text)
        if number:
            raise RefusedError(
                f"{name}: not the script of {first.path}: line {number} is {theirs!r}, "
                f"not {ours!r}: all seeds must be run with one train_gpt.py"
            )
    return first.source


def name_logs(logs: Sequence[Log]) -> None:
    """Sorts the logs into arms, the first log's first, and names them for the folder."""
    runs = [log.full for log in logs]
    telling = [one.name for one in differences(runs)[0] if not one.harmless]
    # Effective states (train_io.prefetch) follow from settings where those are known.
    settings = logs[0].full.config
    varied = [name for name in telling if "." not in name and name in settings] or telling
    groups = sorted(seed_groups(runs), key=lambda group: 0 not in group)
    for number, group in enumerate(groups):
        for index in group:
            logs[index].arm = arm_name(logs[index].full, varied, number) if number else ""
    for log in logs:
        arm = f"{log.arm}_" if log.arm else ""
        log.name = "train.log" if len(logs) == 1 else f"train_{arm}seed{log.run.seed}.log"
    for index, log in enumerate(logs):
        twin = next((one for one in logs[:index] if one.name == log.name), None)
        if twin:
            raise RefusedError(
                f"{log.path}: seed {log.run.seed} again, configured as {twin.path}: each seed once"
            )


def arm_name(run: Run, varied: Sequence[str], number: int) -> str:
    words = [f"{name}{value_word(run.config.get(name, 'none'))}" for name in varied]
    plain = "-".join(re.sub(r"[^A-Za-z0-9._+]", "", word) for word in words)
    return plain if len(words) <= 3 and 0 < len(plain) <= 60 else f"arm{number + 1}"


def value_word(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# --- the files ---


def submission(about: About, logs: Sequence[Log], source: bytes) -> dict[str, Any]:
    """submission.json from the logs of the submitted arm."""
    heads = [log.run.headline for log in logs]
    loss, bpb = (summary([getattr(head, key) for head in heads]) for key in ("val_loss", "val_bpb"))
    run = logs[0].full
    result: dict[str, Any] = {
        "author": about.author,
        "github_id": about.github_id,
        "name": about.name,
        "blurb": about.description,
        "date": str(about.date),
        "track": STATED.get(about.track, "non_record_16mb"),
        "val_loss": round(loss.mean, 8),
        "val_bpb": round(bpb.mean, 8),
    }
    if loss.n > 1:
        result |= {"val_loss_std": round(loss.std, 8), "val_bpb_std": round(bpb.std, 8)}
    result |= {
        "bytes_total": max(log.run.sizes.total or 0 for log in logs),
        "bytes_code": len(source),
        "seeds": [log.run.seed for log in logs],
        "seed_results": {str(log.run.seed): seed_result(log.run) for log in logs},
    }
    if hardware(logs[0]):
        result["hardware"] = hardware(logs[0])
    if run.versions.get("torch"):
        result["pytorch_version"] = run.versions["torch"]
    return result


def seed_result(run: Run) -> dict[str, Any]:
    head, before = run.headline, run.score("pre_quant")
    found = {
        "val_loss": head.val_loss,
        "val_bpb": head.val_bpb,
        "pre_quant_val_bpb": before and before.val_bpb,
        "bytes_total": run.sizes.total,
        "artifact_bytes": run.sizes.artifact,
        "steps": run.last_step,
        "train_time_ms": run.train_time_ms,
        "eval_time_ms": run.eval_total_ms,
    }
    return {key: value for key, value in found.items() if value is not None}


def hardware(log: Log) -> str:
    run = log.full
    device = {**run.hardware, **log.run.hardware}.get("device")
    return f"{run.world_size or 1}x {device}" if device else ""


def defaults(source: bytes) -> dict[str, Any]:
    """The script's own defaults, read from its class Config without running it;
    {}: it has no such class.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {
                target.id: node.value.value
                for target in node.targets
                if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            name = getattr(node.target, "id", "")
            if isinstance(constants.get(name), str) and isinstance(node.value.value, str):
                constants[name] += node.value.value
    config = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"),
        None,
    )
    found = {}
    for node in config.body if config else []:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            if isinstance(node.value, ast.Name) and node.value.id in constants:
                found[node.target.id] = constants[node.value.id]
                continue
            with contextlib.suppress(ValueError):
                found[node.target.id] = ast.literal_eval(node.value)
    return found


def changed_settings(log: Log) -> dict[str, Any]:
    """The settings that differ from the script's defaults;
    all that are known where it has no readable ones.
    """
    known = defaults(log.source)
    found = {k: v for k, v in log.full.config.items() if k not in NOT_COMMAND}
    if not known:
        return {k: v for k, v in found.items() if "." not in k}
    return {name: value for name, value in found.items() if name in known and value != known[name]}


def command(log: Log, seeds: Sequence[int]) -> list[str]:
    """The shell lines that run it again, in the record's folder."""
    run, config = log.full, log.full.config
    data, model = (Path(str(config.get(key) or "")).name for key in ("data_path", "tokenizer_path"))
    words = ['RUN_ID="seed$seed" SEED="$seed"']
    words += [f"DATA_PATH=../../../data/datasets/{shlex.quote(data or run.dataset or 'NAME')}"]
    words += [f"TOKENIZER_PATH=../../../data/tokenizers/{shlex.quote(model)}"] if model else []
    words += [
        f"{name.upper()}={shlex.quote(value_word(value))}"
        for name, value in changed_settings(log).items()
    ]
    ranks = run.world_size or 1
    launch = (
        f"torchrun --standalone --nproc_per_node={ranks} train_gpt.py"
        if ranks > 1
        else "python3 train_gpt.py"
    )
    return [
        f"for seed in {' '.join(map(str, seeds))}; do",
        *(f"  {word} \\" for word in words),
        f"  {launch}",
        "done",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def cell(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def result_rows(logs: Sequence[Log]) -> list[list[str]]:
    rows = []
    for log in logs:
        run, head, before = log.run, log.run.headline, log.run.score("pre_quant")
        seconds = [
            None if ms is None else ms / 1e3 for ms in (run.train_time_ms, run.eval_total_ms)
        ]
        rows.append(
            [
                log.name,
                str(run.seed),
                f"{run.last_step:,}",
                cell(run.step_times().mean, ".2f"),
                *(cell(one, ",.1f") for one in seconds),
                cell(before and before.val_bpb, ".4f"),
                cell(head.val_loss, ".8f"),
                cell(head.val_bpb, ".8f"),
                cell(run.sizes.artifact, ","),
                cell(run.sizes.total, ","),
            ]
        )
    return rows


def arm_rows(logs: Sequence[Log]) -> list[list[str]]:
    rows = []
    for arm in dict.fromkeys(log.arm for log in logs):
        members = [log.run for log in logs if log.arm == arm]
        groups = [
            summary([getattr(run.headline, key) for run in members])
            for key in ("val_loss", "val_bpb")
        ]
        paces = [pace for run in members if (pace := run.step_times().mean) is not None]
        rows.append(
            [
                arm or "submitted",
                ", ".join(str(run.seed) for run in members),
                *(
                    f"{one.mean:.5f}" + (f" +- {one.std:.5f}" if one.n > 1 else "")
                    for one in groups
                ),
                cell(summary(paces).mean if paces else None, ".2f"),
            ]
        )
    return rows


def readme(about: About, logs: Sequence[Log], source: bytes) -> str:
    """A skeleton: every figure from the logs, and a TODO for what only the author knows."""
    main = [log for log in logs if not log.arm]
    todo = (
        f"{TODO}what was changed against which record, why it helps, "
        "what was tried without success."
    )
    return "\n".join(
        [
            f"# {about.name}",
            "",
            about.description,
            "",
            f"{about.author} (@{about.github_id}), {about.date}, {about.track}.",
            "",
            *result_section(logs, main, source),
            "## What was done",
            "",
            todo,
            "",
            *command_section(main),
            *machine_section(main[0]),
        ]
    )


def result_section(logs: Sequence[Log], main: Sequence[Log], source: bytes) -> list[str]:
    """The results of all runs, and what the submitted ones come to."""
    arms = []
    if len(main) < len(logs):
        arms = [*table(["arm", "seeds", "val_loss", "val_bpb", "ms a step"], arm_rows(logs)), ""]
    sizes = Report(
        "",
        code_bytes=len(source),
        packed_code_bytes=packed_size(source),
        artifact_bytes=max((log.run.sizes.artifact or 0 for log in main), default=None),
    )
    return [
        "## Result",
        "",
        *table(RESULT_HEAD, result_rows(logs)),
        "",
        *arms,
        *mean_lines(main),
        "```",
        *size_lines(sizes),
        "```",
        "",
    ]


def command_section(main: Sequence[Log]) -> list[str]:
    """The command that runs it again, and what it sets."""
    first = main[0]
    told = ""
    if first.full is first.run:
        told = "As far as the text log tells; the .jsonl beside it would have told all.\n"
    settings = ["All settings are the script's defaults."]
    if changed := changed_settings(first):
        rows = [[name.upper(), value_word(value)] for name, value in changed.items()]
        settings = [
            "Settings other than the script's defaults:",
            "",
            *table(["setting", "value"], rows),
        ]
    return [
        "## Run it again",
        "",
        "In this folder:",
        "```bash",
        *command(first, [log.run.seed for log in main]),
        "```",
        told,
        *settings,
        "",
    ]


def machine_section(first: Log) -> list[str]:
    """On what it was run."""
    run, steps = first.full, first.run.steps
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    facts = {
        "data": f"{run.dataset or 'unknown'}, {cell(run.train_shards)} training shards, "
        f"{cell(run.epochs_seen(), '.3f')} epochs, {cell(run.tokens(), ',')} tokens",
        "validation": f"{cell(run.val_tokens, ',')} predicted tokens",
        "machine": hardware(first) or "not in the logs",
        "versions": versions or "not in the logs",
        "data_crc": f"{steps[-1].data_crc or '-'} at step {steps[-1].step:,}" if steps else "-",
    }
    return [
        "## Data and machine",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
    ]


def mean_lines(logs: Sequence[Log]) -> list[str]:
    loss, bpb = (
        summary([getattr(log.run.headline, key) for log in logs]) for key in ("val_loss", "val_bpb")
    )
    if bpb.n < 2:
        return []
    return [
        f"Mean of {bpb.n} seeds: val_loss {loss.mean:.5f} +- {loss.std:.5f}, "
        f"val_bpb {bpb.mean:.5f} +- {bpb.std:.5f} (standard deviation).",
        "",
    ]


# --- the folder ---


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes a rename inside outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def package(about: About, logs: Sequence[Log], source: bytes, records: Path) -> tuple[Path, Report]:
    """Makes the folder, whole or not at all.

    Raises RefusedError where it exists; a refused report means: not made.
    """
    target = records / about.track / about.folder
    if os.path.lexists(target):
        raise RefusedError(f"{target}: exists: remove it, or give another --name or --date")
    main = [log for log in logs if not log.arm]
    files = {
        "train_gpt.py": source,
        **{log.name: log.data for log in logs},
        "submission.json": (json.dumps(submission(about, main, source), indent=2) + "\n").encode(),
        "README.md": readme(about, logs, source).encode(),
    }
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    first_here = not target.parent.exists()
    try:
        write_folder(temporary, files)
        report = check_folder(temporary, Options(about.track), place=target)
        if report.verdict != "refused":
            os.rename(temporary, target)
            sync_folder(target.parent)
    except OSError as error:
        raise RefusedError(f"{target}: cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if first_here and not target.exists():
            with contextlib.suppress(OSError):
                target.parent.rmdir()
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
        if target.exists() and promised_sha256(read_bytes(target)) is None:
            raise ValueError(f"{target} exists and is no packed script: name another --output")
        target.write_bytes(result)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{given}: {reason(error)}") from error
    run = f": run it as you would {given}, its log names this size" if options.pack else ""
    return f"{target}: {len(text):,} bytes have become {len(result):,}{run}"


def readable(text: bytes) -> bytes:
    script = look(text)
    if not script.packed:
        raise ValueError("no packed script: it is readable as it is")
    return script.text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("logs", nargs="*", type=Path, metavar="LOG", help="logs/<RUN_ID>.txt of each seed")
    add("--pack", type=Path, metavar="SCRIPT", help="write its submitted form")
    add("--unpack", type=Path, metavar="SCRIPT", help="write the script inside a packed one")
    add("--output", type=Path, metavar="FILE", help="where (default: SCRIPT_packed.py)")
    add(
        "--track",
        type=track_argument,
        help="track_10min_16mb or track_non_record_16mb",
    )
    add("--name", help="the title; its words make the folder's name")
    add("--author")
    add("--github-id", help="your GitHub login")
    add("--description", help="a sentence or two")
    add("--date", help="YYYY-MM-DD (default: today)")
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="refuse unless this is the script that the logs hold",
    )
    add(
        "--records",
        type=Path,
        default=RECORDS,
        metavar="DIR",
        help="where the track's folder is (default: here)",
    )
    options = parser.parse_args(arguments)
    if options.pack or options.unpack:
        return options
    for name in ("logs", "track", "name", "author", "github_id", "description"):
        if not getattr(options, name):
            parser.error(f"{name if name == 'logs' else option(name)}: needed to make a record")
    options.day = datetime.date.today() if options.date is None else parsed_date(options.date)
    if options.day is None or options.date not in (None, str(options.day)):
        parser.error(f"--date {options.date}: YYYY-MM-DD is expected")
    for name in ("name", "author", "github_id", "description"):
        if not getattr(options, name).strip():
            parser.error(f"{option(name)} is empty")
    if not slug(options.name):
        parser.error(f"--name {options.name}: letters or digits are needed for the folder's name")
    return options


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.pack or options.unpack:
        try:
            print(write_form(options))
        except RefusedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    about = About(
        options.track,
        options.name.strip(),
        options.author.strip(),
        options.github_id.strip(),
        options.description.strip(),
        options.day,
    )
    try:
        logs = [read(path) for path in options.logs]
        source = same_source(logs, options.script)
        name_logs(logs)
        target, report = package(about, logs, source, options.records)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(report)))
    if report.verdict == "refused":
        print(f"error: {target} was not made: see what was refused above", file=sys.stderr)
        return 1
    print(f"made {target}: write its README's TODO, then: git add -f {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
