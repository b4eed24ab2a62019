"""The facts of a record's folder: read once, never changed. Nothing of the folder is run."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from findings import OPEN, RECORD, TRACKS, Finding
from packed import packed_form
from reader import (
    Result,
    Run,
    half_unit,
    headline,
    read_log,
    submitted,
    times,
    validation_result,
)
from script import Script, look
from submission import Submission, is_number, read_submission

MAX_BYTES = 64 << 20  # read of one file
MAX_SCRIPT = 16_000_000  # of the script: the cap
MAX_ENTRIES = 2_000  # of a folder that is looked through
MAX_LOGS = 60
CODE = re.compile(r"\.(py|pyx|c|cc|cpp|cu|cuh|h|hpp|so|sh|xz|lzma)")
WEIGHTS = re.compile(r"\.(pt|ptz|pth|safetensors|bin|npz|npy|ckpt)")
LOG = re.compile(r"\.(log|txt|out)")
NO_LOG = re.compile(r"(requirements|readme|license)")
PICTURE = re.compile(r"\.(png|svg|jpe?g|gif|pdf)")
NO_LINE = "(no such line)"
TOKENIZER = re.compile(r"\.(model|vocab)")


# --- files ---


@dataclass(frozen=True)
class Files:
    """The files below a folder by their path in it ('/' between), with their sizes."""

    root: Path
    sizes: Mapping[str, int] = field(default_factory=dict)
    outside: tuple[str, ...] = ()  # links to outside, never followed
    problems: tuple[str, ...] = ()

    @property
    def top(self) -> dict[str, int]:
        return {name: size for name, size in self.sizes.items() if "/" not in name}

    def read(self, name: str, most: int = MAX_BYTES) -> bytes:
        """Raises OSError or ValueError, in words."""
        return read_bytes(self.root / name, most)

    def text(self, name: str) -> str:
        """Empty where the file cannot be read: the rule on that file says why."""
        try:
            return self.read(name).decode("utf-8", "replace")
        except (OSError, ValueError):
            return ""


def list_folder(path: Path) -> Files:
    """What lies in a folder, hidden files left out, without opening any of it."""
    folder = Path(os.path.abspath(path))
    root, seen = os.path.realpath(path), 0
    sizes: dict[str, int] = {}
    outside: list[str] = []
    problems: list[str] = []

    def note(error: OSError) -> None:
        problems.append(f"{error.filename}: cannot be listed: {reason(error)}")

    for inside, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted([*names, *folders]):
            seen += 1
            full = os.path.join(inside, name)
            shown = os.path.relpath(full, folder).replace(os.sep, "/")
            target = os.path.realpath(full) + os.sep
            if os.path.islink(full) and not target.startswith(root + os.sep):
                outside.append(shown)
            elif os.path.isfile(full) and not name.startswith("."):
                sizes[shown] = os.path.getsize(full)
        if seen > MAX_ENTRIES:
            problems.append(f"more than {MAX_ENTRIES:,} files: the rest was not looked at")
            break
    return Files(folder, sizes, tuple(outside), tuple(problems))


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """A regular file of at most `most` bytes; else OSError or ValueError, in words."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    if about.st_size > most:
        raise ValueError(f"{about.st_size:,} bytes: more than {most:,} are not read")
    return Path(path).read_bytes()


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def first_difference(first: bytes, second: bytes) -> tuple[int, str, str]:
    """The number of the first line, from 1, in which two texts differ, and both lines.

    0: they are equal, but for line ends and empty lines in front and at the end.
    """
    a, b = ([line.rstrip() for line in text.strip().split(b"\n")] for text in (first, second))
    if a == b:
        return 0, "", ""
    number = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if number is None:
        number = min(len(a), len(b))
    here, there = (lines[number] if number < len(lines) else None for lines in (a, b))
    if here is not None and there is not None and here.strip() != there.strip():
        here, there = here.strip(), there.strip()  # else they differ in their indentation
    return number + 1, shown_line(here), shown_line(there)


def shown_line(line: bytes | None) -> str:
    return NO_LINE if line is None else line.decode("utf-8", "replace")[:80]


# --- logs ---


@dataclass(frozen=True)
class LogFile:
    """A file that may be a log, and the runs read from it."""

    name: str
    runs: tuple[Run, ...] = ()
    problem: str = ""  # why no run was read
    same_as: str | None = None  # another file with the same bytes; then runs are not read again
    last_numbers: tuple[float, ...] = ()  # with decimals, behind the last line of a step


@dataclass(frozen=True)
class LoggedRun:
    """A run, and how the folder names it; of a submitted run also its result line."""

    log: str
    run: Run
    result: Result | None = None

    @property
    def seed(self) -> int | None:
        return self.run.known_seed

    @property
    def model_bytes(self) -> int | None:
        """Of the compressed model."""
        sizes = self.run.sizes
        if sizes.artifact is None and None not in (sizes.total, sizes.code):
            return sizes.total - sizes.code
        return sizes.artifact


def read_logs(files: Files) -> tuple[LogFile, ...]:
    names = [
        name
        for name in files.sizes
        if LOG.fullmatch(PurePosixPath(name).suffix)
        and not NO_LOG.match(PurePosixPath(name).name.lower())
    ]
    names.sort(key=lambda name: (name.count("/"), len(name), name))
    seen: dict[str, str] = {}
    logs = []
    for name in names[:MAX_LOGS]:
        try:
            data = files.read(name)
        except (OSError, ValueError) as error:
            logs.append(LogFile(name, problem=f"cannot be read: {reason(error)}"))
            continue
        first = seen.setdefault(hashlib.sha256(data).hexdigest(), name)
        if first != name and data:
            logs.append(LogFile(name, same_as=first))
            continue
        log = read_log(files.root / name)
        problem = "" if log.runs else "; ".join(log.problems[:1]) or "no run in it"
        logs.append(LogFile(name, tuple(log.runs), problem, None, tuple(last_numbers(data))))
    return tuple(logs)


def last_numbers(log: bytes) -> Iterator[float]:
    """Numbers with decimals behind the last line of a step: the results, in whatever words."""
    at = 0
    for step in re.finditer(rb"step[:= ]{0,9}\d+/\d+[^\n]*", log):
        at = step.end()
    end = log[at:][-100_000:]
    unit = rb"(?!\d|\.|[ \t]?(?:ms|s|m|min|h|x|%|[kMG]i?B)\b)"
    for number in re.findall(rb"(?<![\w.])\d{1,2}\.\d{3,12}" + unit, end):
        yield float(number)


# --- the folder as a whole ---


@dataclass(frozen=True)
class Needed:
    """A file beside the script that runs with it, or is read by it."""

    name: str
    size: int
    by: str  # the script that needs it
    is_code: bool
    certain: bool  # the script cannot do without it


@dataclass(frozen=True)
class Facts:
    """All that rules judge a folder by."""

    shown: str  # the folder as it was given
    place: Path  # where it lies, or is to lie
    files: Files
    track: str = RECORD
    submission: Submission = Submission()
    submission_name: str | None = None
    logs: tuple[LogFile, ...] = ()
    submitted: tuple[LoggedRun, ...] = ()
    script_name: str = "train_gpt.py"
    source: bytes | None = None  # the script as shipped
    source_problem: str = ""
    script: Script | None = None
    needed: tuple[Needed, ...] = ()

    @cached_property
    def finished(self) -> tuple[LoggedRun, ...]:
        """Runs with a result, each once."""
        different = {id(run) for run in different_runs(self.logs)}
        return tuple(
            LoggedRun(shown_run(log.name, run), run)
            for log in self.logs
            for run in log.runs
            if is_finished(run) and id(run) in different
        )

    @cached_property
    def readme(self) -> str:
        return self.files.text("README.md")

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.submitted} - {None})

    def results(self, key: str) -> list[float]:
        """val_bpb or val_loss of each submitted run; empty where one does not say it."""
        values = [getattr(run.result, key) for run in self.submitted]
        return values if all(map(is_number, values)) else []

    # sizes

    @property
    def code_beside(self) -> list[Needed]:
        return [file for file in self.needed if file.is_code]

    @property
    def code_bytes(self) -> int | None:
        """Of the script and the code that it needs, as shipped."""
        if self.source is None:
            return None
        return len(self.source) + sum(file.size for file in self.code_beside)

    @cached_property
    def packed_bytes(self) -> int | None:
        """Of the code as package.py --pack would write it; as it is where it is packed."""
        if self.source is None:
            return None
        beside = [self.files.read(file.name) for file in self.code_beside]
        if self.script.packed or self.script.opaque:
            return len(self.source) + (len(packed_form(b"".join(beside))) if beside else 0)
        return min(self.code_bytes, len(packed_form(b"".join([self.source, *beside]))))

    @property
    def model_bytes(self) -> int | None:
        """Of the largest compressed model that the logs name."""
        for runs in (self.submitted, self.finished):  # a log of an evaluation alone may not say
            sizes = [run.model_bytes for run in runs if run.model_bytes is not None]
            if sizes:
                return max(sizes)
        return None


def is_finished(run: Run) -> bool:
    result = headline(run)
    return result is not None and is_number(result.val_bpb) and result.val_bpb > 0


def shown_run(name: str, run: Run) -> str:
    return name if run.number == 1 else f"{name}#{run.number}"


def facts_of(folder: str | os.PathLike[str], place: Path, shown: str, track: str | None) -> Facts:
    """Reads a folder. Raises nothing for what it holds."""
    files = list_folder(Path(folder))
    name = submission_name(files)
    submission = Submission()
    if name is not None:
        try:
            submission = read_submission(files.read(name, 1 << 20), name)
        except (OSError, ValueError) as error:
            message = f"{name} cannot be read: {reason(error)}"
            submission = Submission(findings=(Finding("R201", message),))
    logs = read_logs(files)
    runs = submitted_runs(logs, submission)
    script_name = script_that_ran(files, runs)
    source, problem = read_source(files, script_name)
    script = look(source) if source else None
    return Facts(
        shown,
        place,
        files,
        track or track_of(place, submission),
        submission,
        name,
        logs,
        runs,
        script_name,
        source,
        problem,
        script,
        needed_files(files, script_name, script, logs) if script else (),
    )


def submission_name(files: Files) -> str | None:
    """submission.json, or what stands for it."""
    if "submission.json" in files.top:
        return "submission.json"
    names = [name for name in files.top if re.fullmatch(r"submission.*\.json", name.lower())]
    return names[0] if names else None


def track_of(place: Path, submission: Submission) -> str:
    """The folder's place decides, then submission.json."""
    if place.parent.name in TRACKS:
        return place.parent.name
    return track_named(submission.values.get("track")) or RECORD


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    if not isinstance(text, str):
        return None
    name = re.sub(r"[-\s]", "_", text.lower()).removeprefix("track_")
    if name in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.match(r"non_?record", name) else None


def submitted_runs(logs: Sequence[LogFile], submission: Submission) -> tuple[LoggedRun, ...]:
    """The submitted runs with their result lines, as logs/results.py chooses them."""
    names = {id(run): shown_run(log.name, run) for log in logs for run in log.runs}
    chosen = [
        LoggedRun(names[id(choice.run)], choice.run, choice.result)
        for choice in submitted(different_runs(logs), submission.values)
        if is_number(choice.result.val_bpb) and choice.result.val_bpb > 0
    ]
    return tuple(chosen) or validated_runs(logs, submission)


def different_runs(logs: Sequence[LogFile]) -> list[Run]:
    """Each run once: a file may hold both the console's lines and the log's."""
    runs: dict[tuple[object, ...], Run] = {}
    for log in logs:
        for number, run in enumerate(log.runs):
            result = headline(run)
            known = result is not None and len(run.steps) > 1
            key = (run.known_seed, *times(run), result.val_bpb) if known else (log.name, number)
            runs.setdefault(key, run)
    return list(runs.values())


def validated_runs(logs: Sequence[LogFile], submission: Submission) -> tuple[LoggedRun, ...]:
    """Where no log has a result: the run whose last validation was submitted."""
    given = submission.values.get("val_bpb")
    for log in logs if is_number(given) else ():
        for run in log.runs:
            last = validation_result(run)
            if last is None or not is_number(last.val_bpb):
                continue
            if abs(last.val_bpb - float(given)) <= half_unit(given):
                return (LoggedRun(shown_run(log.name, run), run, last),)
    return ()


# --- the script and what it needs ---


def script_that_ran(files: Files, runs: Sequence[LoggedRun]) -> str:
    """train_gpt.py; another train*.py where the submitted logs counted that one's bytes."""
    top = files.top
    counted = {logged.run.sizes.code for logged in runs}
    others = [name for name in top if re.fullmatch(r"train.*\.py", name)]
    others = others or [name for name in top if name.endswith(".py")]
    ran = [name for name in others if top[name] in counted] or others
    if "train_gpt.py" in top:
        text = files.text("train_gpt.py")
        if top["train_gpt.py"] in counted or ran == others or any(name in text for name in ran):
            return "train_gpt.py"
    return max(ran, key=lambda name: (top[name], name), default="train_gpt.py")


def read_source(files: Files, name: str) -> tuple[bytes | None, str]:
    """The script as shipped, or why there is none."""
    if name not in files.top:
        return None, ""
    if not files.top[name]:
        return None, f"{name} is empty"
    try:
        return files.read(name, MAX_SCRIPT), ""
    except (OSError, ValueError) as error:
        return None, f"{name} cannot be read: {reason(error)}"


def needed_files(
    files: Files, script_name: str, script: Script, logs: Sequence[LogFile]
) -> tuple[Needed, ...]:
    """What lies beside the script and is needed by it, or by what it needs."""
    read = {log.name for log in logs if log.runs or log.same_as}
    rest = [name for name in sorted(files.sizes) if may_be_needed(name, read | {script_name})]
    needed: dict[str, Needed] = {}
    todo = [(script_name, script, True)]
    while todo:
        by, script, certain = todo.pop()
        for name in rest:
            how = how_needed(name, script)
            if how is None or name in needed:
                continue
            is_code = CODE.fullmatch(PurePosixPath(name).suffix) is not None
            sure = certain and (how == "imports" or script.runs_files and how == "names")
            needed[name] = Needed(name, files.sizes[name], by, is_code, sure)
            if name.endswith(".py"):
                todo.append((name, look(files.text(name).encode()), sure))
    return tuple(needed.values())


def may_be_needed(name: str, known: set[str]) -> bool:
    path = PurePosixPath(name)
    if name in known or name in ("README.md", "submission.json"):
        return False
    if NO_LOG.match(path.name.lower()) and path.suffix in (".txt", ".md"):
        return False
    patterns = (PICTURE, WEIGHTS, TOKENIZER)
    return not any(pattern.fullmatch(path.suffix) for pattern in patterns)


def how_needed(name: str, script: Script) -> str | None:
    """Does a script import this file, or name it in a text?"""
    path = PurePosixPath(name)
    if path.suffix in (".py", ".so"):
        modules = (".".join(path.with_suffix("").parts), path.stem, path.parts[0])
        for module in modules:
            if place := script.imported.get(module):
                return "may import" if place.optional else "imports"
    return "names" if path.name in script.named else None
