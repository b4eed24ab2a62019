"""Is this record accepted? One line a finding, with the rule behind it;
nothing of a folder is ever run.

    # records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 records/check.py FOLDER...
    # judged by another track's rules than its place says
    python3 records/check.py FOLDER --track track_10min_16mb
    # is it better, by 0.005 nats at p < 0.01?
    python3 records/check.py FOLDER --previous FOLDER|SCORE
    # data_crc of the logs, computed again from the shards
    python3 records/check.py FOLDER --data data/datasets/NAME
    python3 records/check.py FOLDER... --json

Verdicts: accepted, warned (a maintainer will ask), refused. SCORE is in bits a byte (1.1228) or in
nats (1.8957nats). Folders may be anybody's: the script is parsed in a limited process of its own,
no link is followed out of the folder, at most 64 MB of a file are read.

Exit code: 0 no folder refused, 1 one was, 2 wrong usage.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from _reader import (
    CAP_BYTES,
    MAX_BYTES,
    Group,
    Listing,
    Run,
    byte_words,
    differences,
    embedded_source,
    first_difference,
    listing,
    read_bytes,
    read_log,
    reason,
    seed_groups,
    summary,
    welch,
)
from _script import MAX_SCRIPT, Script, look, packed_size
from _shards import Shards, data_crcs
from _submission import Decimal, decimals, read_submission

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("note", "warned", "refused")
CAP_MS = 600_000.0  # of training, and of evaluation
MARGIN_NATS, ALPHA = 0.005, 0.01
CLOSE = 1e-4  # nats or bits: no other result, but a mean of rounded ones
PUBLISHED_SHARDS = 80  # of the training split that the challenge's download brings
MAX_LOGS, MAX_LOG_BYTES = 50, 128 << 20  # of a folder
TODO = "TODO: "  # begins what package.py leaves to be written by hand
# What the challenge's requirements install.
COMES_WITH = {
    "torch",
    "triton",
    "numpy",
    "sentencepiece",
    "huggingface_hub",
    "tqdm",
    "datasets",
    "tiktoken",
    "kernels",
    "setuptools",
    "typing_extensions",
    "torchvision",
}
WEIGHTS = (".pt", ".ptz", ".pth", ".safetensors", ".bin", ".npz", ".npy", ".ckpt")
FOLDER = re.compile(r"(\d{4}-\d{2}-\d{2})_[A-Za-z0-9][A-Za-z0-9._+-]*")
# The group: an arm's name.
LOG_NAME = re.compile(r"train(?:_([A-Za-z0-9._+-]+))?_seed\d+\.log|train\.log")
SURROUNDINGS = {"torch", "cuda", "driver_cuda", "device", "gpus"}
DECODED = ("ttt", "sliding", "roundtrip", "other")

RULES = {
    "name": "a record's folder is called YYYY-MM-DD_Description",
    "place": "a record lies in records/<track>/",
    "files": "a record holds README.md, submission.json, train_gpt.py and the log of each seed",
    "links": "a record is whole without anything outside its folder",
    "submission": "submission.json is as records/submission.schema.json says",
    "score": "val_loss and val_bpb are the mean of the logs' results for the decoded artifact",
    "sizes": "bytes_total is the largest log's total, bytes_code the size of train_gpt.py",
    "cap": "train_gpt.py and the compressed model are at most 16,000,000 bytes (decimal)",
    "code size": "`Code size` of every log is the size of the shipped train_gpt.py",
    "script": "train_gpt.py compiles, and holds all code that counts",
    "source": "every log was made by the shipped train_gpt.py",
    "log": "every log is complete, from the settings to the result",
    "seeds": "several seeds, each once",
    "configuration": "all seeds ran with one configuration",
    "training time": (
        "training takes at most 600 s; a run that stops itself may end within two steps of it"
    ),
    "evaluation time": "evaluation takes at most 600 s",
    "hardware": "the track is run on 8 H100s",
    "bytes": "val_loss and val_bpb imply the bytes of the validation split",
    "data": "the whole validation split is scored; training reads the published shards, once",
    "data_crc": "the logs' data_crc is that of the shards",
    "significance": (
        "a record is better than the last by 0.005 nats at p < 0.01 "
        "(changes of speed alone are exempt)"
    ),
    "checker": "a folder that cannot be judged is not accepted",
}


@dataclass
class Finding:
    """What was found, in one line; in `logs`, or in the folder."""

    level: str  # one of LEVELS
    rule: str  # one of RULES
    words: str
    logs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words, self.logs = plain(self.words), [plain(name) for name in self.logs]

    def __str__(self) -> str:
        more = f" and {len(self.logs) - 1} more" if len(self.logs) > 1 else ""
        return (f"{self.logs[0]}{more}: " if self.logs else "") + self.words


def plain(text: str) -> str:
    """What strangers wrote, without control characters for the terminal and lone surrogates."""
    text = text[:400].encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass
class Options:
    """What a folder is judged by."""

    track: str | None = None  # None: as the folder's place says
    previous: "Previous | None" = None  # results of the record to beat
    shards: Shards | None = None  # of --data
    margin: float = MARGIN_NATS
    alpha: float = ALPHA


@dataclass
class Previous:
    """Results to beat: of each seed, or one number twice. A value that is not known is nan."""

    name: str
    losses: list[float]
    bpbs: list[float]
    val_tokens: int | None = None


@dataclass
class Report:
    """A judged folder."""

    folder: str
    track: str = RECORD
    findings: list[Finding] = field(default_factory=list)
    logs: int = 0
    seeds: list[int] = field(default_factory=list)
    val_loss: Group | None = None
    val_bpb: Group | None = None
    code_bytes: int | None = None
    packed_code_bytes: int | None = None
    artifact_bytes: int | None = None  # of the largest seed

    @property
    def level(self) -> str:
        return max((one.level for one in self.findings), key=LEVELS.index, default="note")

    @property
    def verdict(self) -> str:
        return "accepted" if self.level == "note" else self.level

    @property
    def totals(self) -> tuple[int | None, int | None]:
        """Bytes of script and compressed model:
        with the script as it is, with the script packed.
        """
        plain_total, packed_total = (
            None if code is None or self.artifact_bytes is None else code + self.artifact_bytes
            for code in (self.code_bytes, self.packed_code_bytes)
        )
        return plain_total, packed_total


@dataclass
class Case:
    """A folder while it is judged."""

    report: Report
    options: Options
    listing: Listing
    place: Path
    values: dict[str, Any] = field(default_factory=dict)  # of submission.json
    text: bytes | None = None  # of train_gpt.py
    script: Script | None = None
    runs: list[Run] = field(default_factory=list)  # all finished ones
    main: list[Run] = field(default_factory=list)  # those of the configuration that is submitted

    def add(self, level: str, rule: str, words: str, log: str | None = None) -> None:
        """A finding; the same one of another log is one finding of both."""
        found = Finding(level, rule, words, [] if log is None else [log])
        same = next(
            (
                one
                for one in self.report.findings
                if log is not None
                and one.logs
                and (one.level, one.rule, one.words) == (level, rule, found.words)
            ),
            None,
        )
        if same is None:
            self.report.findings.append(found)
        elif found.logs[0] not in same.logs:
            same.logs += found.logs

    @property
    def strict(self) -> bool:
        return self.report.track == RECORD

    @property
    def severe(self) -> str:
        """The level of what a record must not have, and another submission may."""
        return "refused" if self.strict else "warned"


def check_folder(
    folder: str | os.PathLike[str],
    options: Options | None = None,
    *,
    place: str | os.PathLike[str] | None = None,
) -> Report:
    """Judges a folder; `place`: as if it lay there. Raises nothing for what the folder holds."""
    options = options or Options()
    case = Case(
        Report(os.fspath(place or folder)),
        options,
        Listing(""),
        Path(os.path.abspath(place or folder)),
    )
    if not os.path.isdir(folder):
        case.add("refused", "files", f"{folder}: no such folder")
        return case.report
    case.listing = listing(folder)
    check_files(case)
    check_submission(case)
    check_place(case)
    check_script(case)
    check_logs(case)
    if case.runs:
        for judge in (
            check_groups,
            check_source,
            check_score,
            check_seed_results,
            check_sizes,
            check_times,
            check_bytes,
            check_data,
            check_crc,
            check_significance,
        ):
            judge(case)
    case.report.findings.sort(key=lambda one: -LEVELS.index(one.level))
    return case.report


# --- the folder and its files ---


def check_files(case: Case) -> None:
    found = case.listing
    for problem in found.problems:
        case.add("refused", "files", problem)
    for name in found.leaving[:10]:
        case.add(
            "refused",
            "links",
            f"{name} is a link that leaves the folder: put the file itself there",
        )
    for name in found.odd[:10]:
        case.add("refused", "files", f"{name} is neither file nor folder")
    for name in ("README.md", "submission.json", "train_gpt.py"):
        if name not in found.files:
            close = next((other for other in found.files if other.lower() == name.lower()), None)
            case.add(
                "refused",
                "files",
                f"no {name}" + (f" (but {close}: the name matters)" if close else ""),
            )
        elif found.files[name] == 0:
            case.add("refused", "files", f"{name} is empty")
    for name, size in found.files.items():
        if PurePosixPath(name).suffix in WEIGHTS:
            case.add(
                "warned",
                "files",
                f"{name} ({size:,} bytes): weights and data are not part of a record",
            )
    check_readme(case)


def check_readme(case: Case) -> None:
    found = case.listing
    try:
        readme = read_bytes(found.path("README.md"), 4 << 20).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        if "README.md" in found.files:
            case.add("warned", "files", f"README.md cannot be read: {reason(error)}")
        return
    if found.files.get("README.md") and len(readme.split()) < 20:
        case.add(
            "warned", "files", "README.md says nothing: what was done, the command, the results?"
        )
    if TODO in readme:
        case.add("warned", "files", "README.md still has a TODO: say what was done")


def check_submission(case: Case) -> None:
    if "submission.json" not in case.listing.files:
        return
    submission = read_submission(case.listing.path("submission.json"))
    case.values = submission.values
    shown = submission.faults[:30]
    for level, words in shown:
        case.add(level, "submission", words)
    if len(submission.faults) > len(shown):
        worst = max((level for level, _ in submission.faults), key=LEVELS.index)
        case.add(
            worst, "submission", f"{len(submission.faults) - len(shown)} more faults like these"
        )


def check_place(case: Case) -> None:
    """The folder's name and place; which track it is judged by."""
    name, above = case.place.name, case.place.parent
    stated = track_named(case.values.get("track"))
    placed = above.name if above.name in TRACKS else None
    case.report.track = case.options.track or placed or stated or RECORD
    if placed and case.options.track and placed != case.options.track:
        case.add("refused", "place", f"it lies in {placed}, not in records/{case.options.track}/")
    elif not placed or above.parent.name != "records":
        level = "refused" if above.parent.name == "records" else "warned"
        case.add(
            level,
            "place",
            f"it lies in {above.parent.name}/{above.name}/, not in records/{case.report.track}/",
        )
    if stated and stated != case.report.track:
        case.add(
            "refused",
            "place",
            f"submission.json says track {case.values['track']}, it is judged as "
            f"{case.report.track}",
        )
    found = FOLDER.fullmatch(name)
    date = found and parsed_date(found[1])
    if not date:
        case.add(
            "refused",
            "name",
            f"{name}: YYYY-MM-DD, an underscore, and letters, digits and ._+- are expected",
        )
        return
    if date > datetime.date.today() + datetime.timedelta(days=1):
        case.add("warned", "name", f"{date} is in the future")
    given = case.values.get("date")
    if isinstance(given, str) and parsed_date(given[:10]) not in (None, date):
        case.add("warned", "name", f"the folder says {date}, submission.json {given[:10]}")


def parsed_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    if not isinstance(text, str):
        return None
    plain = text.lower().replace("-", "_").replace(" ", "_").removeprefix("track_")
    if plain in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.fullmatch(r"non_?record(?:_unlimited_compute)?(?:_16mb)?", plain) else None


def check_script(case: Case) -> None:
    size = case.listing.files.get("train_gpt.py")
    if size is None:
        return
    case.report.code_bytes = size
    if size > CAP_BYTES:
        case.add("refused", "cap", f"train_gpt.py alone has {size:,} bytes")
        return
    try:
        case.text = read_bytes(case.listing.path("train_gpt.py"), CAP_BYTES)
    except (OSError, ValueError) as error:
        case.add("refused", "script", f"train_gpt.py cannot be read: {reason(error)}")
        return
    case.script = look(case.text)
    inside = case.script.unpacked_bytes is not None
    if inside or size <= MAX_SCRIPT:
        case.report.packed_code_bytes = size if inside else packed_size(case.text)
    if inside:
        case.add(
            "note", "script", f"train_gpt.py is packed: {case.script.unpacked_bytes:,} bytes inside"
        )
    if case.script.unsure:
        case.add(
            "warned",
            "script",
            f"train_gpt.py: whether it compiles is not known: {case.script.unsure}",
        )
    check_imports(case)


def check_imports(case: Case) -> None:
    required: set[str] = set()
    if "requirements.txt" in case.listing.files:
        try:
            data = read_bytes(case.listing.path("requirements.txt"), 1 << 20)
            required = {
                re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0].lower().replace("-", "_")
                for line in data.decode("utf-8", "replace").splitlines()
            }
        except (OSError, ValueError) as error:
            case.add("warned", "files", f"requirements.txt cannot be read: {reason(error)}")
    others = [
        name
        for name in case.listing.files
        if name.endswith((".py", ".so", ".cu")) and name != "train_gpt.py"
    ]
    beside = {PurePosixPath(name).parts[0].split(".")[0] for name in others}
    for name in others[:5]:
        case.add(
            "note",
            "script",
            f"{name}: code beside train_gpt.py is not counted, so it must do without",
        )
    reported: set[str] = set()
    for one in case.script.imports:
        root = one.module.split(".")[0]
        if one.module.startswith(".") or root in beside:
            words = (
                f"line {one.line} imports {one.module} from the folder: its bytes are not counted"
            )
            level = "refused"
        elif (
            one.guarded or root in sys.stdlib_module_names | COMES_WITH or root.lower() in required
        ):
            continue
        else:
            words = (
                f"line {one.line} imports {root}, "
                "which is not in requirements.txt and not made optional by try"
            )
            level = "warned"
        if root not in reported:
            case.add(level, "script", f"train_gpt.py: {words}")
        reported.add(root)


def check_compiles(case: Case, runs: Sequence[Run]) -> None:
    """After the logs: a script that ran on a newer Python than this one may be right."""
    if case.script is None or not case.script.error:
        return
    ran = [
        tuple(map(int, found.groups()))
        for run in runs
        if (found := re.match(r"(\d{1,3})\.(\d{1,3})", run.versions.get("python", "")))
    ]
    here = sys.version_info[:2]
    newer = max(ran, default=here) > here
    words = f"train_gpt.py does not compile with Python {here[0]}.{here[1]}: {case.script.error}"
    if newer:
        words += f" (its log is of Python {max(ran)[0]}.{max(ran)[1]}: check with that)"
    case.add("warned" if newer else "refused", "script", words)


# --- the logs ---


def check_logs(case: Case) -> None:
    """Reads the logs, and keeps the finished runs."""
    names = [
        name
        for name in case.listing.files
        if PurePosixPath(name).suffix in (".log", ".txt")
        and PurePosixPath(name).name.lower()
        not in ("requirements.txt", "readme.txt", "license.txt")
    ]
    top = [name for name in names if "/" not in name]
    if top:
        # Such as a run of the script inside its folder leaves behind.
        for name in [name for name in names if "/" in name][:5]:
            case.add(
                "note", "files", "lies in a subfolder: not judged, not part of the record", name
            )
    budget, kept = MAX_LOG_BYTES, 0
    for name in sorted(top or names):
        size = case.listing.files[name]
        if kept >= MAX_LOGS or min(size, MAX_BYTES) > budget:
            case.add(
                "refused",
                "log",
                f"more than {MAX_LOGS} logs or {MAX_LOG_BYTES >> 20} MiB: {name} was not read",
            )
            break
        found = read_log(case.listing.path(name))
        if not found.runs and name.endswith(".txt"):
            continue
        budget, kept = budget - min(size, MAX_BYTES), kept + 1
        if not LOG_NAME.fullmatch(name):
            case.add(
                "warned",
                "files",
                "a log is called train_seed<N>.log (train.log when there is one)",
                name,
            )
        for problem in found.problems[:3]:
            case.add(
                "warned" if found.runs or not LOG_NAME.fullmatch(name) else "refused",
                "log",
                problem,
                name,
            )
        take_runs(case, name, found.runs)
    case.report.logs = kept
    if not kept:
        case.add(
            "refused",
            "files",
            "no log of a run (.log); logs/*.txt is ignored by git: rename it, or git add -f",
        )
    elif not case.runs:
        case.add("refused", "log", "no log holds a finished run")
    check_compiles(case, case.runs)


def take_runs(case: Case, name: str, runs: Sequence[Run]) -> None:
    finished = []
    for run in runs:
        head = run.headline
        usable = head is not None and math.isfinite(head.val_bpb) and head.val_bpb > 0
        if run.status == "finished" and usable:
            finished.append(run)
            continue
        why = run.error or (
            "it ends before the result" if head is None else "its result is no number"
        )
        level = "refused" if len(runs) == 1 else "warned"
        case.add(level, "log", f"{run.status} at step {run.last_step:,}: {why}", name)
    if len(runs) > 1:
        case.add("warned", "log", f"{len(runs)} runs in one file, {len(finished)} finished", name)
        if not finished:
            case.add("refused", "log", "none of its runs is finished", name)
    for run in finished:
        if run.resumed_at:
            case.add(
                case.severe,
                "log",
                f"resumed at step {run.resumed_at[-1]:,}: its clock is two runs'",
                name,
            )
        if (
            None not in (run.seed, run.seed_in_name)
            and run.seed != run.seed_in_name
            and len(runs) == 1
        ):
            case.add("refused", "seeds", f"this run's seed is {run.seed}", name)
    case.runs += finished


def seed_of(run: Run) -> int | None:
    return run.seed if run.seed is not None else run.seed_in_name


def check_groups(case: Case) -> None:
    """One configuration, several seeds; a submission that is no record may hold several arms."""
    report, runs = case.report, case.runs
    telling = [
        one
        for one in differences(runs)[0]
        if not one.harmless and one.name not in SURROUNDINGS | {"code", "code_bytes"}
    ]
    around = [one.name for one in differences(runs)[0] if one.name in SURROUNDINGS]
    if around:
        case.add("warned", "configuration", f"the seeds differ in {', '.join(around)}")
    arms = arms_of(runs)
    case.main = runs if case.strict or len(arms) == 1 else submitted_arm(case, arms)
    words = ", ".join(
        f"{one.name} ({' | '.join(str(value)[:30] for value, _ in one.values[:4])})"
        for one in telling[:6]
    )
    if case.strict and telling:
        case.add("refused", "configuration", f"the logs differ in {words}")
    elif case.main is not runs:
        case.add(
            "note",
            "configuration",
            f"{len(arms)} arms that differ in {words or 'what their logs do not tell'}; "
            f"submitted: {Path(case.main[0].path).name} and its seeds",
        )
    seeds = [seed_of(run) for run in case.main]
    report.seeds = sorted(set(seeds) - {None})
    if None in seeds:
        case.add(
            "warned",
            "seeds",
            "does not tell its seed",
            Path(case.main[seeds.index(None)].path).name,
        )
    repeated = sorted({seed for seed in seeds if seed is not None and seeds.count(seed) > 1})
    if repeated:
        case.add("refused", "seeds", f"seed {repeated[0]} more than once")
    if len(case.main) < 3:
        runs_found = f"{len(case.main)} run{'s' * (len(case.main) > 1)}"
        case.add("warned" if case.strict else "note", "seeds", f"{runs_found}: three are usual")
    report.val_bpb = summary([run.headline.val_bpb for run in case.main])
    losses = [run.headline.val_loss for run in case.main]
    report.val_loss = (
        summary(losses)
        if all(value is not None and math.isfinite(value) for value in losses)
        else None
    )


def arms_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one configuration each, and of one arm's name:
    a text log does not tell every setting. Unnamed first.
    """
    arms: dict[tuple[str, int], list[Run]] = {}
    for number, group in enumerate(seed_groups(runs)):
        for index in group:
            name = LOG_NAME.fullmatch(Path(runs[index].path).name)
            arms.setdefault((name[1] or "" if name else "", number), []).append(runs[index])
    return [arms[key] for key in sorted(arms)]


def submitted_arm(case: Case, arms: list[list[Run]]) -> list[Run]:
    """The arm whose mean is that of submission.json; else the largest, the first of such."""
    given = case.values.get("val_bpb")
    if is_number(given):
        near = min(
            arms, key=lambda arm: abs(summary([run.headline.val_bpb for run in arm]).mean - given)
        )
        if abs(summary([run.headline.val_bpb for run in near]).mean - given) <= CLOSE:
            return near
    return max(arms, key=len)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_source(case: Case) -> None:
    """Each log's embedded script is the shipped one, to the byte."""
    if case.text is None:
        return
    right = {
        hashlib.sha256(case.text).hexdigest(),
        hashlib.sha256(case.text.replace(b"\r\n", b"\n")).hexdigest(),
    }
    told = set()
    for run in case.runs:
        name, sha = Path(run.path).name, run.source_sha256
        if sha is None:
            level = "warned" if case.strict else "note"
            case.add(level, "source", "without the script's text: what ran is not proved", name)
        elif sha not in right | {case.script.unpacked_sha256} | told:
            told.add(sha)
            different = where_other(case.text, run)
            if different is not None:
                case.add("refused", "source", f"holds another train_gpt.py{different}", name)
        check_code_size(case, run, name)
    if len({run.source_sha256 for run in case.runs} - {None}) > 1:
        case.add("refused", "source", "the logs are of different scripts")


def where_other(text: bytes, run: Run) -> str | None:
    """In which line the log's script is another, as far as can be told;
    None: it is the same after all.
    """
    try:
        other = embedded_source(read_bytes(run.path), run)
    except (OSError, ValueError):
        return ""
    if other is None or text.count(b"\n") > 100_000:
        return ""
    number, here, there = first_difference(text, other)
    return f": line {number} is {there!r} in the log, {here!r} in the folder" if number else None


def check_code_size(case: Case, run: Run, name: str) -> None:
    stated, shipped = run.sizes.code, case.report.code_bytes
    if stated is None and run.sizes.packed_code is None:
        case.add("warned", "code size", "no line `Code size`", name)
    elif shipped not in (stated, run.sizes.packed_code):
        inside = " (it counted the unpacked script)" if stated == case.script.unpacked_bytes else ""
        said = run.sizes.packed_code if stated is None else stated
        case.add(
            "refused",
            "code size",
            f"Code size: {said:,}, but train_gpt.py has {shipped:,}{inside}",
            name,
        )


# --- submission.json against the logs ---


def stages(runs: Sequence[Run], key: str) -> dict[str, list[tuple[float, int]]]:
    """(value, decimals) of each run, for every kind of result that all runs have;
    the one that counts first.
    """
    result: dict[str, list[tuple[float, int]]] = {}
    for kind in ("headline", *DECODED, "pre_quant"):
        found = [run.headline if kind == "headline" else run.score(kind) for run in runs]
        values = [score and getattr(score, key) for score in found]
        if all(value is not None and math.isfinite(value) for value in values):
            places = [score.digits if key == "val_bpb" else score.loss_digits for score in found]
            result[kind] = [
                (value, 12 if digits is None else digits)
                for value, digits in zip(values, places, strict=True)
            ]
    return result


def agrees(given: float, value: float, digits: int) -> bool:
    """Equal, as far as both were written out; to three decimals at least."""
    return abs(given - value) <= 0.51 * (10.0 ** -max(3, decimals(given)) + 10.0**-digits)


def check_score(case: Case) -> None:
    means = {}
    for key in ("val_bpb", "val_loss"):
        given, found = case.values.get(key), stages(case.main, key)
        if not found:
            case.add("warned", "score", f"the logs tell no {key}")
            continue
        mean = math.nan
        if "headline" in found:
            mean = summary([value for value, _ in found["headline"]]).mean
        means[key] = mean
        if not is_number(given):
            continue
        level, words = verdict_on(given, key, found, case.main)
        if (
            key == "val_loss"
            and level == "refused"
            and abs(given - means.get("val_bpb", math.nan)) <= CLOSE
        ):
            words = f"val_loss {shown(given)} is val_bpb: the mean loss is {mean:.8f}"
        if level:
            case.add(level, "score", words)


def verdict_on(
    given: float, key: str, found: dict[str, list[tuple[float, int]]], runs: Sequence[Run]
) -> tuple[str, str]:
    """What the given number is, going by the logs: ("", "") where it is what it should be."""
    whole = "the mean of the logs" if len(runs) > 1 else "the log's"
    means = {
        kind: (summary([value for value, _ in values]).mean, min(digits for _, digits in values))
        for kind, values in found.items()
    }
    right = f"{means['headline'][0]:.8f}" if "headline" in means else "unknown"
    for kind, (mean, digits) in means.items():
        if not agrees(given, mean, digits):
            continue
        if kind == "pre_quant":
            return (
                "refused",
                f"{key} {shown(given)} is the result before quantisation: {whole} is {right}",
            )
        if decimals(given) < 4 and abs(given - mean) > CLOSE:
            return "warned", f"{key} {shown(given)} is rounded: {whole} is {mean:.8f}"
        if kind == "headline":
            return "", ""
        level = "warned" if kind == "other" else "note"
        return (
            level,
            f"{key} {shown(given)} is the {kind} result; the lowest in the logs is {right}",
        )
    for kind in means:
        for run, (value, digits) in zip(runs, found[kind], strict=True):
            if agrees(given, value, max(4, digits)) and kind != "pre_quant":
                return (
                    "warned",
                    f"{key} {shown(given)} is that of seed {seed_of(run)} alone: "
                    f"{whole} is {right}",
                )
    if any(abs(given - mean) <= CLOSE for kind, (mean, _) in means.items() if kind != "pre_quant"):
        return "warned", f"{key} {shown(given)} is only nearly {whole}, {right}"
    return "refused", f"{key} is {shown(given)}, {whole} is {right}"


def shown(value: float) -> str:
    return f"{value:.{min(8, decimals(value))}f}" if isinstance(value, Decimal) else str(value)[:40]


def check_seed_results(case: Case) -> None:
    runs: dict[int, list[Run]] = {}
    for run in case.runs:
        runs.setdefault(seed_of(run), []).append(run)
    seeds = case.values.get("seeds")
    named = [value for value in seeds if is_number(value)] if isinstance(seeds, list) else []
    results = per_seed(case.values.get("seed_results"))
    for key, given in (("seeds", named), ("seed_results", [seed for seed, _ in results])):
        for seed in [one for one in dict.fromkeys(given) if one not in runs][:5]:
            case.add(
                "refused", "seeds", f"submission.json: {key} has {str(seed)[:20]}, which has no log"
            )
        missing = [seed for seed in case.report.seeds if seed not in given]
        if missing and (given or len(case.main) > 1):
            case.add(
                "warned",
                "seeds",
                f"submission.json: {key} is without {', '.join(map(str, missing[:5]))}",
            )
    for seed, values in results[:MAX_LOGS]:
        for key in ("val_bpb", "val_loss", "bytes_total"):
            given = values.get(key)
            if (
                seed in runs
                and is_number(given)
                and not any(told(run, key, given) for run in runs[seed])
            ):
                case.add(
                    "refused",
                    "score",
                    f"submission.json: {key} of seed {seed} is {shown(given)}, not the log's",
                )


def per_seed(results: object) -> list[tuple[int, dict[str, Any]]]:
    """(seed, results) from the ways in which people write seed_results."""
    found: list[tuple[int, dict[str, Any]]] = []
    if isinstance(results, dict):
        for key, value in list(results.items())[:1000]:
            number = re.search(r"\d{1,10}", key)
            if number:
                found.append(
                    (int(number[0]), value if isinstance(value, dict) else {"val_bpb": value})
                )
    elif isinstance(results, list):
        found = [
            (one["seed"], one)
            for one in results[:1000]
            if isinstance(one, dict) and isinstance(one.get("seed"), int)
        ]
    return found


def told(run: Run, key: str, given: float) -> bool:
    """Does the log say this of its run, at any stage?"""
    if key == "bytes_total":
        return run.sizes.total is None or given in {count for _, count in run.sizes.stated}
    values = [
        (getattr(score, key), score.digits)
        for score in (*run.scores, run.final_validation)
        if score is not None
    ]
    return any(
        value is not None
        and math.isfinite(value)
        and (agrees(given, value, 12 if digits is None else digits) or abs(given - value) <= CLOSE)
        for value, digits in values
    )


# --- sizes ---


def check_sizes(case: Case) -> None:
    report, runs = case.report, case.main
    artifacts = [run.sizes.artifact for run in runs if run.sizes.artifact is not None]
    totals = [run.sizes.total for run in runs if run.sizes.total is not None]
    report.artifact_bytes = max(artifacts, default=None)
    if report.artifact_bytes is None and totals and all(run.sizes.code is not None for run in runs):
        report.artifact_bytes = max(
            run.sizes.total - run.sizes.code for run in runs if run.sizes.total is not None
        )
    for run in case.runs:
        check_run_size(case, run, Path(run.path).name)
    largest = max([*totals, *([] if report.totals[0] is None else report.totals[:1])], default=None)
    given = case.values.get("bytes_total")
    if is_number(given) and largest is not None:
        mean = round(sum(totals) / len(totals)) if totals else None
        if given in (max(totals, default=None), largest):
            pass
        elif given in artifacts:
            case.add(
                "warned",
                "sizes",
                f"bytes_total {given:,} is the model alone: with the script it is {largest:,}",
            )
        elif given in totals or mean is not None and abs(given - mean) <= 1:
            case.add(
                "warned",
                "sizes",
                f"bytes_total {given:,} is not that of the largest seed, {largest:,}",
            )
        else:
            case.add("refused", "sizes", f"bytes_total is {given:,}, the logs say {largest:,}")
    given = case.values.get("bytes_code")
    if is_number(given) and report.code_bytes is not None and given != report.code_bytes:
        case.add(
            "refused",
            "sizes",
            f"bytes_code is {given:,}, train_gpt.py has {report.code_bytes:,} bytes",
        )


def check_run_size(case: Case, run: Run, name: str) -> None:
    sizes, shipped = run.sizes, case.report.code_bytes
    counted = None if sizes.artifact is None or shipped is None else sizes.artifact + shipped
    worst = max((count for count in (sizes.total, counted) if count is not None), default=None)
    if worst is None:
        case.add("refused", "cap", "does not say how large the artifact is", name)
    elif worst > CAP_BYTES:
        mebi = " (below 16 MiB, but MB are decimal)" if worst <= 16 << 20 else ""
        case.add("refused", "cap", f"{worst:,} bytes, {worst - CAP_BYTES:,} too many{mebi}", name)
    codes = [code for code in (sizes.code, sizes.packed_code) if code is not None]
    if sizes.total is None and worst is not None:
        case.add("warned", "cap", "no line `Total submission size` of the compressed model", name)
    elif (
        codes
        and sizes.artifact is not None
        and sizes.total not in [sizes.artifact + code for code in codes]
    ):
        parts = f"model {sizes.artifact:,} + code {codes[0]:,}"
        case.add("warned", "cap", f"its total {sizes.total:,} is not {parts}", name)


# --- time, data, bytes ---


def check_times(case: Case) -> None:
    if not case.strict:
        return
    for run in case.runs:
        name, ms = Path(run.path).name, run.train_time_ms
        if ms is None or not math.isfinite(ms):
            case.add("refused", "training time", "does not tell the training time", name)
        elif ms > CAP_MS:
            mean = ms / run.last_step if run.last_step else 0.0
            late = f"{ms / 1e3:,.3f} s, {ms - CAP_MS:,.0f} ms above the cap"
            if run.stopped_early and ms - CAP_MS <= 2 * mean:
                case.add(
                    "note",
                    "training time",
                    f"{late}, {(ms - CAP_MS) / mean:.1f} steps, stopping_early",
                    name,
                )
            else:
                unsaid = "" if run.stopped_early else ", without stopping_early"
                case.add("refused", "training time", late + unsaid, name)
        ms = run.eval_total_ms
        if ms is None or not math.isfinite(ms):
            case.add("warned", "evaluation time", "does not tell the time of evaluation", name)
        elif ms > CAP_MS:
            case.add("refused", "evaluation time", f"{ms / 1e3:,.1f} s", name)
        device, gpus = run.hardware.get("device"), run.world_size
        if gpus not in (None, 8) or isinstance(device, str) and "H100" not in device:
            case.add("refused", "hardware", f"{gpus or '?'} x {device or 'unknown device'}", name)


def check_bytes(case: Case) -> None:
    for run in case.runs:
        name, found = Path(run.path).name, byte_words(run)
        if found is None:
            case.add("warned", "bytes", "no result with both val_loss and val_bpb", name)
        elif found[0] == "differs":
            case.add("refused", "bytes", found[1], name)
        elif found[0] != "agrees":
            case.add(
                "warned" if case.strict or found[0] == "near" else "note", "bytes", found[1], name
            )


def check_data(case: Case) -> None:
    for run in case.runs:
        if run.partial_val:
            case.add(
                "refused",
                "data",
                "partial_val:1: scored on a part of the validation split",
                Path(run.path).name,
            )
    first, level = case.main[0], "warned" if case.strict else "note"
    if first.train_shards not in (None, PUBLISHED_SHARDS):
        guess = (
            ": the export that leaves validation documents in training?"
            if first.train_shards == 1499
            else ""
        )
        case.add(
            level,
            "data",
            f"train_shards:{first.train_shards}, {PUBLISHED_SHARDS} are published{guess}",
        )
    epochs = max(
        (epochs for run in case.main if is_number(epochs := run.epochs_seen())), default=None
    )
    if epochs is not None and epochs > 1:
        case.add(level, "data", f"{epochs:.2f} epochs: training saw the same tokens again")
    paths = " ".join(
        str(value) for run in case.main for value in run.config.values() if isinstance(value, str)
    )
    if "datasets/datasets" in paths:
        case.add(level, "data", "a path with datasets/datasets: which export is that?")


def check_crc(case: Case) -> None:
    """--data: the logs' data_crc at every logged step, against the shards."""
    shards = case.options.shards
    if shards is None:
        return
    known: dict[tuple[int, int], dict[int, str]] = {}
    for run in case.runs:
        name, crcs = Path(run.path).name, run.crc_at()
        batch, length = (run.config.get(key) for key in ("train_batch_tokens", "train_seq_len"))
        if not crcs or not isinstance(batch, int) or not isinstance(length, int):
            case.add(
                "warned",
                "data_crc",
                "no data_crc, or not its batch: its data cannot be proved",
                name,
            )
            continue
        try:
            if not set(crcs) <= set(known.get((batch, length), {})):
                known[batch, length] = data_crcs(
                    shards, batch_tokens=batch, seq_len=length, steps=crcs
                )
        except (OSError, ValueError) as error:
            case.add("warned", "data_crc", reason(error), name)
            continue
        wrong = [step for step, crc in sorted(crcs.items()) if known[batch, length][step] != crc]
        if wrong:
            case.add(
                "refused",
                "data_crc",
                f"step {wrong[0]:,} has {crcs[wrong[0]]}, the shards give "
                f"{known[batch, length][wrong[0]]}: other data",
                name,
            )
        else:
            case.add(
                "note",
                "data_crc",
                f"{len(crcs)} checksums, to step {max(crcs):,}, are those of the shards",
                name,
            )


def check_significance(case: Case) -> None:
    """Welch's test against the previous best:
    in nats where both are known for the same split, else in bits a byte.
    """
    previous, level = case.options.previous, "refused" if case.strict else "note"
    if previous is None:
        return
    bpbs, losses = (
        [getattr(run.headline, key) for run in case.main] for key in ("val_bpb", "val_loss")
    )
    tokens = {run.val_tokens for run in case.main} | {previous.val_tokens}
    usable = all(map(is_number, [*losses, *previous.losses])) and len(tokens - {None}) < 2
    if not usable and not all(map(is_number, previous.bpbs)):
        case.add(
            "warned", "significance", f"{previous.name} and these logs have no result in one unit"
        )
        return
    unit, margin, ours, theirs = "nats", case.options.margin, losses, previous.losses
    if not usable:
        share = 1 / math.log(2)
        if case.report.val_loss:
            share = case.report.val_bpb.mean / case.report.val_loss.mean
        unit, margin, ours, theirs = "bits a byte", margin * share, bpbs, previous.bpbs
    if len(ours) < 2:
        case.add(level, "significance", "one run shows no significance: run three seeds")
        return
    try:
        test = welch(ours, theirs, margin=margin)
    except ValueError as error:
        case.add("warned", "significance", f"{previous.name}: {error}")
        return
    better = test.p < case.options.alpha
    words = (
        f"{test.difference:+.5f} {unit} better than {previous.name} "
        f"(95 % interval {test.low:+.5f} to {test.high:+.5f}); by {margin:.5g}: p = {test.p:.2g}"
    )
    case.add("note" if better else level, "significance", words + ("" if better else ": not shown"))


# --- command line ---


def read_previous(given: str) -> Previous:
    """--previous: a score, or a folder of which the logs count. Raises ValueError, in words."""
    found = re.fullmatch(r"(\d{0,4}\.?\d{1,12})\s*(nats|bpb)?", given)
    if found and not os.path.isdir(given):
        value = [float(found[1])] * 2
        if not value[0] > 0:
            raise ValueError(f"--previous {given}: a score above 0, such as 1.1228")
        unknown = [math.nan] * 2
        return (
            Previous(given, value, unknown)
            if found[2] == "nats"
            else Previous(f"{given} bpb", unknown, value)
        )
    if not os.path.isdir(given):
        raise ValueError(
            f"--previous {given}: neither a folder "
            "nor a score such as 1.1228 (bits a byte) or 1.8957nats"
        )
    case = Case(Report(given, OPEN), Options(), listing(given), Path(os.path.abspath(given)))
    check_submission(case)
    check_logs(case)
    name = case.place.name
    if case.runs:
        check_groups(case)
        heads = [run.headline for run in case.main]
        losses = [math.nan if head.val_loss is None else head.val_loss for head in heads]
        repeat = 2 if len(heads) == 1 else 1
        return Previous(
            name,
            losses * repeat,
            [head.val_bpb for head in heads] * repeat,
            case.main[0].val_tokens,
        )
    if not is_number(case.values.get("val_bpb")):
        raise ValueError(f"--previous {given}: no finished log and no val_bpb in it")
    loss = case.values.get("val_loss")
    return Previous(
        name,
        [float(loss) if is_number(loss) else math.nan] * 2,
        [float(case.values["val_bpb"])] * 2,
    )


def lines(report: Report) -> list[str]:
    counts = [
        f"{n} {level}"
        for level in reversed(LEVELS[1:])
        if (n := sum(one.level == level for one in report.findings))
    ]
    head = f"{plain(report.folder)}: {report.verdict}"
    result = [head + (f" ({', '.join(counts)})" if counts else "") + f" as {report.track}"]
    if report.val_bpb is not None:
        spread = f" +- {report.val_bpb.std:.5f}" if report.val_bpb.n > 1 else ""
        loss = f", val_loss {report.val_loss.mean:.5f}" if report.val_loss else ""
        result.append(
            f"  val_bpb {report.val_bpb.mean:.5f}{spread}{loss}, seeds "
            f"{', '.join(map(str, report.seeds)) or 'unknown'}"
        )
    result += [f"  {line}" for line in size_lines(report)]
    return result + [
        f"  {one.level:8}{one} [{one.rule}: {RULES[one.rule]}]" for one in report.findings
    ]


def size_lines(report: Report) -> list[str]:
    """Both totals, with the bytes left: with the script as it is, and as it would be packed."""
    result = []
    codes = (("code as it is", report.code_bytes), ("code packed (lzma)", report.packed_code_bytes))
    for (label, code), total in zip(codes, report.totals, strict=True):
        if total is not None:
            left = CAP_BYTES - total
            result.append(
                f"{label:18} {code:>9,} + model {report.artifact_bytes:>12,} = {total:>12,} bytes, "
                + (f"{left:,} left" if left >= 0 else f"{-left:,} too many")
            )
    return result


def as_json(reports: Sequence[Report]) -> str:
    def group(found: Group | None) -> dict[str, Any] | None:
        return found and {
            "n": found.n,
            "mean": found.mean,
            "std": found.std if found.n > 1 else None,
        }

    return json.dumps(
        {
            "folders": [
                {
                    "folder": one.folder,
                    "track": one.track,
                    "verdict": one.verdict,
                    "logs": one.logs,
                    "seeds": one.seeds,
                    "val_loss": group(one.val_loss),
                    "val_bpb": group(one.val_bpb),
                    "code_bytes": one.code_bytes,
                    "packed_code_bytes": one.packed_code_bytes,
                    "artifact_bytes": one.artifact_bytes,
                    "total_bytes": one.totals[0],
                    "packed_total_bytes": one.totals[1],
                    "cap_bytes": CAP_BYTES,
                    "findings": [
                        {
                            "level": f.level,
                            "rule": f.rule,
                            "words": f.words,
                            "logs": f.logs,
                            "because": RULES[f.rule],
                        }
                        for f in one.findings
                    ],
                }
                for one in reports
            ]
        },
        indent=1,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", help="a record's folder")
    add(
        "--track",
        type=track_argument,
        help=f"{' or '.join(TRACKS)} (default: as the folder's place says)",
    )
    add("--previous", metavar="FOLDER|SCORE", help="the record to beat")
    add("--margin", type=float, default=MARGIN_NATS, help="by how many nats (default: 0.005)")
    add(
        "--alpha",
        type=float,
        default=ALPHA,
        help="the p below which that counts as shown (default: 0.01)",
    )
    add("--data", type=Path, metavar="DIR", help="the training shards: compute data_crc again")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not 0 < options.alpha < 1:
        parser.error(f"--alpha {options.alpha:g}: a probability between 0 and 1, such as 0.01")
    if not (math.isfinite(options.margin) and options.margin >= 0):
        parser.error(f"--margin {options.margin:g}: a number from 0, such as 0.005")
    try:
        options.previous = read_previous(options.previous) if options.previous is not None else None
        options.shards = Shards(options.data) if options.data is not None else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def track_argument(text: str) -> str:
    found = track_named(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: no such track: {' or '.join(TRACKS)}")
    return found


def guarded(folder: str, judge: Callable[[], Report]) -> Report:
    """One folder that defeats the checker must not take the others' verdicts along."""
    try:
        return judge()
    except Exception as error:
        words = f"the checker failed on it ({type(error).__name__}: {error}): please report this"
        return Report(folder, findings=[Finding("refused", "checker", words)])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    settings = Options(
        options.track, options.previous, options.shards, options.margin, options.alpha
    )
    try:
        reports = [
            guarded(folder, lambda folder=folder: check_folder(folder, settings))
            for folder in options.folders
        ]
        if options.json:
            text = as_json(reports)
        else:
            text = "\n\n".join("\n".join(lines(one)) for one in reports)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, a pager say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return int(any(one.verdict == "refused" for one in reports))


if __name__ == "__main__":
    sys.exit(main())
