"""The facts of a record's folder: read once, never changed. Nothing of the folder is run."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

from configuration import trace
from runs import Run, read_log

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("refused", "warned", "note", "not checked")
SCRIPT = "train_gpt.py"
SCHEMA = Path(__file__).resolve().parent / "submission.schema.json"
LOG = re.compile(r"(?!requirements|readme|license).*\.(log|txt|out)", re.IGNORECASE)
SUBMITTED_LOG = re.compile(r"train(_seed\d+)?\.log")


def list_folder(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The files below a folder by their path in it, with their sizes, and links that lead out of
    it, which are never followed."""
    sizes: dict[str, int] = {}
    outside: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            outside.append(name)
        elif path.is_file() and not name.startswith(".git/"):
            sizes[name] = path.stat().st_size
    return sizes, outside


# --- submission.json ---


def read_submission(data: bytes) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values, and the file's faults. Floats are Decimals, as they were written."""
    import jsonschema

    try:
        text = data.decode("utf-8-sig")
        given = json.loads(text, parse_float=Decimal, parse_constant=str)
        values = {key: value for key, value in given.items() if value is not None}
    except (ValueError, ArithmeticError, RecursionError, AttributeError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        return {}, [("refused", f"submission.json: it is not a JSON object{where}")]
    rules = json.loads(SCHEMA.read_text(encoding="utf-8"))
    faults: dict[str, str] = {}
    for error in jsonschema.Draft202012Validator(rules).iter_errors(values):
        key = str(next(iter(error.absolute_path), ""))
        words = f"{key} is {shown(values[key])}: write {error.schema['x-write']}" if key else ""
        faults.setdefault(key or error.message, f"submission.json: {words or error.message}")
    return values, [("warned", fault) for fault in faults.values()]


def shown(value: object) -> str:
    """A value as it stands in the JSON, shortened."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: object) -> bool:
    return type(value) in (int, float, Decimal) and abs(value) < 1e18  # not nan


# --- logs ---


def read_runs(root: Path, files: Sequence[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """The run of each log by its name, and why no run was read from a file that may be a log. Of
    copies the first one is read."""
    names = [name for name in files if LOG.fullmatch(PurePosixPath(name).name)]
    runs: dict[str, Run] = {}
    problems: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (not is_submitted(name), name)):
        log = read_log(root / name, events=False)  # the reviewer reads the text
        if not log.runs:
            problems[name] = "; ".join(log.problems[:1])
        for run in log.runs:
            known = trace(run)
            first = next((other for other, one in runs.items() if known == trace(one)), None)
            if known is None or first is None:
                runs[name] = run
            else:
                problems[name] = f"it is a copy of {first}"
    return runs, problems


def is_submitted(name: str) -> bool:
    """Is it a log of the submitted runs by its name?"""
    return SUBMITTED_LOG.fullmatch(name) is not None


@dataclass(frozen=True)
class Facts:
    """All that rules judge a folder by."""

    root: Path  # its name, and that of the folder it lies in, count
    track: str = RECORD
    files: Mapping[str, int] = field(default_factory=dict)  # by path, with sizes
    outside: Sequence[str] = ()  # links to outside
    stated: Mapping[str, Any] = field(default_factory=dict)  # submission.json
    of_submission: Sequence[tuple[str, str]] = ()  # its faults: levels and sentences
    runs: Mapping[str, Run] = field(default_factory=dict)  # by the names of their logs
    no_logs: Mapping[str, str] = field(default_factory=dict)  # files: why no run was read
    source: bytes = b""  # the script as shipped

    @property
    def judged(self) -> dict[str, Run]:
        """The submitted runs: those of train_seed<N>.log or train.log that have a result; without
        such logs all that have one."""
        scored = {name: run for name, run in self.runs.items() if is_scored(run)}
        return {name: run for name, run in scored.items() if is_submitted(name)} or scored

    @property
    def serious(self) -> str:
        """The level of what refuses a record, and is asked about in the other track."""
        return "refused" if self.track == RECORD else "warned"

    def results(self, key: str) -> list[float]:
        """val_bpb or val_loss of each judged run; empty where one does not say it."""
        values = [getattr(run.result, key) for run in self.judged.values()]
        return values if all(map(is_number, values)) else []

    @property
    def stated_track(self) -> str | None:
        return track_named(self.stated.get("track"))

    @property
    def by_seed(self) -> dict[int, dict[str, Any]]:
        """What submission.json says of each seed."""
        given = self.stated.get("seed_results")
        return {
            int(number[0]): value if isinstance(value, dict) else {"val_bpb": value}
            for key, value in (given if isinstance(given, dict) else {}).items()
            if (number := re.search(r"\d{1,12}", key))
        }

    def number(self, key: str) -> int:
        """A number of submission.json; 0: it does not say it."""
        value = self.stated.get(key)
        return value if is_number(value) else 0

    @property
    def model_bytes(self) -> int:
        """Of the largest compressed model that the logs name; 0: they name none."""
        return max([0, *(run.model_bytes or 0 for run in self.judged.values())])


def is_scored(run: Run) -> bool:
    return run.result is not None and is_number(run.result.val_bpb) and run.result.val_bpb > 0


def facts_of(folder: Path, track: str | None = None) -> Facts:
    """Reads a folder. Raises nothing for what it holds."""
    root = Path(os.path.abspath(folder))
    files, outside = list_folder(root)
    values: dict[str, Any] = {}
    faults = [("refused", "no submission.json: let tools/package.py make one of the logs")]
    if "submission.json" in files:
        values, faults = read_submission((root / "submission.json").read_bytes())
    runs, no_logs = read_runs(root, list(files))
    source = (root / SCRIPT).read_bytes() if SCRIPT in files else b""
    own = root.parent.name if root.parent.name in TRACKS else None
    track = track or own or track_named(values.get("track")) or RECORD
    return Facts(root, track, files, outside, values, faults, runs, no_logs, source)


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    name = re.sub(r"[-\s]", "_", str(text).lower()).removeprefix("track_")
    if name in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.match(r"non_?record", name) else None
