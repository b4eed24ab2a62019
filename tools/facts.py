"""The facts of a record's folder: read once, never changed. Nothing of the folder is run."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path, PurePosixPath
from typing import Any

from configuration import times
from lines import Result
from results import arm_of, headline, is_number, stated_by_seed, submitted
from runs import Run, read_log
from script import Script, look

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("refused", "warned", "note", "not checked")
SCHEMA = Path(__file__).resolve().parent / "submission.schema.json"
CODE = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".sh", ".xz")
LOG = re.compile(r"(?!requirements|readme|license).*\.(log|txt|out)", re.IGNORECASE)
NO_LINE = "(no such line)"


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


def difference(first: bytes, second: bytes) -> tuple[int, str, str]:
    """The number of the first line, from 1, in which two texts differ, and both lines; 0: none.

    Line ends, and empty lines at the beginning and at the end, make no difference.
    """
    both = ([line.rstrip() for line in text.strip().split(b"\n")] for text in (first, second))
    for number, pair in enumerate(zip_longest(*both, fillvalue=NO_LINE.encode()), 1):
        if pair[0] != pair[1]:
            here, there = (line.decode("utf-8", "replace").strip() for line in pair)
            start = max(0, len(commonprefix([here, there])) - 30)  # long lines: where they differ
            return number, here[start : start + 80], there[start : start + 80]
    return 0, "", ""


def is_code(name: str) -> bool:
    return name.endswith(CODE)


# --- submission.json ---


def read_submission(data: bytes, name: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values under the schema's names, and the file's faults. Floats are Decimals, as they were
    written."""
    import jsonschema

    try:
        text = data.decode("utf-8-sig")
        given = json.loads(text, parse_float=Decimal, parse_constant=str)
        values = {key: value for key, value in given.items() if value is not None}
    except (ValueError, ArithmeticError, RecursionError, AttributeError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        return {}, [("refused", f"{name}: it is not a JSON object{where}")]
    rules = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for key, rule in rules["properties"].items():
        names = (key, *rule["x-synonyms"])
        written = next((name for name in values if name.lower().replace("-", "_") in names), None)
        if key not in values and written is not None:
            values[key] = values[written]
    faults = {"": f"{name}: rename it to submission.json"} if name != "submission.json" else {}
    for error in jsonschema.Draft202012Validator(rules).iter_errors(values):
        key = str(next(iter(error.absolute_path), ""))
        words = f"{key} is {shown(values[key])}: write {error.schema['x-write']}" if key else ""
        faults.setdefault(key or error.message, f"{name}: {words or error.message}")
    return values, [("warned", fault) for fault in faults.values()]


def shown(value: object) -> str:
    """A value as it stands in the JSON, shortened."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- logs ---


@dataclass(frozen=True)
class LoggedRun:
    """A run with its result line, and how the folder names it."""

    log: str
    run: Run
    result: Result | None
    seed: int | None

    @property
    def misnamed(self) -> bool:
        """Is another seed in the log's name than in the log?"""
        return self.run.seed_in_name not in (self.seed, None) and str(self.seed) not in self.log

    @property
    def is_scored(self) -> bool:
        result = self.result
        return result is not None and is_number(result.val_bpb) and result.val_bpb > 0


def read_logs(root: Path, files: Sequence[str]) -> tuple[list[LoggedRun], dict[str, str]]:
    """Each run once, and why no run was read from a file that may be a log. Copies of a file are
    one log, and a file may hold both the console's lines and the log's."""
    names = [name for name in files if LOG.fullmatch(PurePosixPath(name).name)]
    runs: dict[object, LoggedRun] = {}
    problems: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name.count("/"), len(name), name)):
        log = read_log(root / name, events=False)  # the reviewer reads the text
        if not log.runs:
            problems[name] = "; ".join(log.problems[:1]) or "no run in it"
        for run in log.runs:
            result = headline(run)
            shown = name if run.number == 1 else f"{name}#{run.number}"
            known = result is not None and len(run.steps) > 1
            key = (run.known_seed, *times(run), result.val_bpb) if known else shown
            first = runs.setdefault(key, LoggedRun(shown, run, result, run.known_seed))
            if first.log != shown and run.seed_in_name not in (None, first.seed):
                problems[name] = f"it is a copy of {first.log}, with another seed in its name"
    return list(runs.values()), problems


def seeds_of(stated: Mapping[str, Any]) -> list[int]:
    """The seeds that submission.json says were run."""
    given = stated.get("seeds", list(stated_by_seed(stated)))
    return sorted(
        seed for seed in (given if isinstance(given, list) else [given]) if type(seed) is int
    )


def judged_runs(runs: Sequence[LoggedRun], stated: Mapping[str, Any]) -> list[LoggedRun]:
    """The runs that results.py finds to be submitted, with their result lines, and those of other
    seeds whose logs have the same name: a seed is not left out."""
    by_run = {id(one.run): one for one in runs}
    chosen = submitted([one.run for one in runs], stated)
    judged = [replace(by_run[id(one.run)], result=one.result) for one in chosen]
    arms = {arm_of(one.run) for one in judged}
    sisters = {one.run.seed_in_name or one.seed: one for one in runs if arm_of(one.run) in arms}
    known = [one.run.seed_in_name or one.seed for one in judged]
    judged += [one for seed, one in sisters.items() if seed not in known]
    return [one for one in judged if one.is_scored]


@dataclass(frozen=True)
class Facts:
    """All that rules judge a folder by."""

    root: Path
    place: Path  # where it lies, or is to lie
    track: str = RECORD
    files: Mapping[str, int] = field(default_factory=dict)  # by path, with sizes
    outside: Sequence[str] = ()  # links to outside
    stated: Mapping[str, Any] = field(default_factory=dict)  # submission.json
    of_submission: Sequence[tuple[str, str]] = ()  # its faults: levels and sentences
    runs: Sequence[LoggedRun] = ()  # each once
    judged: Sequence[LoggedRun] = ()  # the submitted ones, with the lines that were submitted
    no_logs: Mapping[str, str] = field(default_factory=dict)  # files: why no run was read
    script_name: str = "train_gpt.py"
    source: bytes = b""  # the script as shipped
    script: Script = Script(b"")

    @property
    def serious(self) -> str:
        """The level of what refuses a record, and is asked about in the other track."""
        return "refused" if self.track == RECORD else "warned"

    def text(self, name: str) -> str:
        return (self.root / name).read_bytes().decode("utf-8", "replace")

    def results(self, key: str) -> list[float]:
        """val_bpb or val_loss of each judged run; empty where one does not say it."""
        values = [getattr(one.result, key) for one in self.judged]
        return values if all(map(is_number, values)) else []

    def number(self, key: str) -> int:
        """A number of submission.json; 0: it does not say it."""
        value = self.stated.get(key)
        return value if is_number(value) else 0

    @cached_property
    def needed(self) -> dict[str, str]:
        """Files that the script imports or names, and by which file; tokenizers do not count."""
        needed: dict[str, str] = {}
        todo = [(self.script_name, self.script)]
        while todo:
            by, script = todo.pop()
            for name in self.files.keys() - needed.keys() - {self.script_name}:
                tokenizer = name.endswith((".model", ".vocab")) and self.files[name] < 1e6
                if script.needs(name) and not tokenizer:
                    needed[name] = by
                    if name.endswith(".py"):
                        todo.append((name, look((self.root / name).read_bytes())))
        return needed

    @property
    def code_bytes(self) -> int:
        """Of the script and the code that it needs, as shipped."""
        return len(self.source) + sum(self.files[name] for name in self.needed if is_code(name))

    @property
    def model_bytes(self) -> int:
        """Of the largest compressed model that the logs name; 0: they name none."""
        for runs in (self.judged, self.runs):  # a log of an evaluation alone may not say
            if sizes := [one.run.sizes.artifact for one in runs if one.run.sizes.artifact]:
                return max(sizes)
        return 0


def facts_of(root: Path, place: Path, track: str | None) -> Facts:
    """Reads a folder. Raises nothing for what it holds."""
    files, outside = list_folder(root)
    values: dict[str, Any] = {}
    faults = [("refused", "no submission.json: let tools/package.py make one of the logs")]
    stated = [name for name in files if re.fullmatch(r"submission[^/]*\.json", name)]
    for name in sorted(stated, key=lambda name: name != "submission.json")[:1]:
        values, faults = read_submission((root / name).read_bytes(), name)
    runs, no_logs = read_logs(root, list(files))
    judged = judged_runs(runs, values)
    scripts = [name for name in files if re.fullmatch(r"train[^/]*\.py", name)]
    script_name = max(scripts, key=lambda name: (name == "train_gpt.py", files[name]), default="")
    source = (root / script_name).read_bytes() if script_name else b""
    own = place.parent.name if place.parent.name in TRACKS else None
    return Facts(
        root,
        place,
        track or own or track_named(values.get("track")) or RECORD,
        files,
        outside,
        values,
        faults,
        runs,
        judged,
        no_logs,
        script_name or "train_gpt.py",
        source,
        look(source),
    )


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    name = re.sub(r"[-\s]", "_", str(text).lower()).removeprefix("track_")
    if name in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.match(r"non_?record", name) else None
