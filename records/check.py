"""Is this record accepted? One line a finding; nothing of a folder is ever run.

    python3 records/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 records/check.py FOLDER --track track_10min_16mb     judged by that track's rules
    python3 records/check.py FOLDER --previous FOLDER|SCORE      better, by 0.005 nats at p < 0.01?

refused: it breaks a rule of the challenge. warned: a maintainer will ask about it. note: for you.
SCORE is in bits a byte (1.1228) or in nats (1.8957nats). records/README.md explains the [rules].

Exit code: 0 no folder refused, 1 one was, 2 wrong usage.
"""

import argparse
import datetime
import hashlib
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from statistics import mean, stdev
from typing import Any

from _code import Script, look, packed_form, promised_sha256
from _reader import Folder, Parser, Run, first_difference, list_folder, read_log, reason, welch
from _submission import decimals, read_submission, results_by_seed, seeds_named

RECORD, OPEN = TRACKS = ("track_10min_16mb", "track_non_record_16mb")
LEVELS = ("note", "warned", "refused")
CAP_BYTES = 16_000_000  # script and model, decimal
CAP_MS = 600_000.0  # of training, and of evaluation
LATE_STEPS = 2  # by which a run that stops itself may miss the cap
MARGIN_NATS, ALPHA = 0.005, 0.01
CLOSE = 1e-4  # nats or bits: no other result, but one rounded elsewhere
MAX_LOGS = 60
TODO = "TODO: "  # begins what package.py leaves to be written by hand
# What the challenge's requirements install.
COMES_WITH = re.compile(
    "torch|triton|numpy|sentencepiece|huggingface_hub|tqdm|datasets|tiktoken|kernels|setuptools|"
    "typing_extensions|torchvision"
)
CODE = re.compile(r"\.(py|pyx|c|cc|cpp|cu|cuh|h|hpp|so|sh|xz|lzma)")
WEIGHTS = re.compile(r"\.(pt|ptz|pth|safetensors|bin|npz|npy|ckpt)")
PROSE = re.compile(r"\.(md|txt|log|out|png|svg|jpg|pdf|csv|tsv|jsonl)$")
FOLDER_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_\S.*")
NOT_CONFIGURATION = re.compile(
    r"(run_id|seed|resume|rank|local_rank|distributed|is_main_process|warning|.*(_|log)(dir|path|file|files)"
    r"|(train|val|checkpoint|trace)_.*(_every|_steps|_keep))"
)
# Predicted tokens of published validation splits, and the bytes of their text.
SPLITS = {
    62_021_632: 151_080_362,
    62_013_440: 151_061_140,
    61_997_056: 151_024_098,
    45_508_608: 151_074_052,
    45_514_752: 151_074_923,
    40_540_160: 151_078_221,
    47_851_520: 151_074_498,
    151_130_112: 151_130_112,
    63_779_840: 155_769_746,
}
BYTES_OFF, BYTES_WRONG = 1e-3, 1e-2  # shares of a split's bytes: asked about, and refused


@dataclass
class Finding:
    """What was found, in one line; in `logs`, or in the folder."""

    level: str  # one of LEVELS
    rule: str
    words: str
    logs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" and {len(self.logs) - 1} more" if len(self.logs) > 1 else ""
        return plain((f"{self.logs[0]}{more}: " if self.logs else "") + self.words)


@dataclass
class Log:
    """A finished run, and the name of its file in the folder."""

    name: str
    run: Run

    @property
    def seed(self) -> int | None:
        return self.run.seed if self.run.seed is not None else self.run.seed_in_name


@dataclass
class Previous:
    """Results to beat: of each seed, or one number twice; nan where not known."""

    name: str
    losses: list[float]
    bpbs: list[float]


@dataclass
class Options:
    """What a folder is judged by."""

    track: str | None = None  # None: as the folder's place says
    previous: Previous | None = None


@dataclass
class Report:
    """A folder while it is judged, and afterwards."""

    shown: str  # the folder as it was given
    place: Path
    options: Options
    folder: Folder
    track: str = RECORD
    findings: list[Finding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # of submission.json
    script_name: str = "train_gpt.py"
    text: bytes | None = None  # of the script
    script: Script | None = None
    beside: dict[str, int] = field(default_factory=dict)  # code that the script needs: bytes
    ends: list[float] = field(default_factory=list)  # numbers that the logs end with
    logs: list[Log] = field(default_factory=list)
    main: list[Log] = field(default_factory=list)  # those that are submitted

    def add(self, level: str, rule: str, words: str, log: str | None = None) -> None:
        """A finding; the same one of another log is one finding of both."""
        for one in self.findings:
            if log and one.logs and (one.level, one.rule, one.words) == (level, rule, words):
                if log not in one.logs:
                    one.logs.append(log)
                return
        self.findings.append(Finding(level, rule, words, [log] if log else []))

    def read_or_nothing(self, name: str) -> bytes:
        try:
            return self.folder.read(name)
        except (OSError, ValueError):
            return b""  # whoever judges the file says why

    def text_of(self, name: str) -> str:
        return self.read_or_nothing(name).decode("utf-8", "replace")

    @property
    def verdict(self) -> str:
        level = max((one.level for one in self.findings), key=LEVELS.index, default="note")
        return "accepted" if level == "note" else level

    @property
    def strict(self) -> bool:
        return self.track == RECORD

    @property
    def severe(self) -> str:
        """The level of what a record must not have, and another submission may."""
        return "refused" if self.strict else "warned"

    @property
    def seeds(self) -> list[int]:
        return sorted({log.seed for log in self.main} - {None})

    def results(self, key: str) -> list[float]:
        found = [getattr(log.run.headline, key) for log in self.main]
        return found if all(map(is_number, found)) else []

    @property
    def code_bytes(self) -> int | None:
        return None if self.text is None else len(self.text) + sum(self.beside.values())

    @property
    def packed_bytes(self) -> int | None:
        """Of the code as --pack would write it; as it is where it is packed."""
        if self.text is None:
            return None
        beside = [self.folder.read(name) for name in self.beside]
        if self.script.packed or self.script.opaque:
            return len(self.text) + (len(packed_form(b"".join(beside))) if beside else 0)
        return min(self.code_bytes, len(packed_form(b"".join([self.text, *beside]))))

    @property
    def model_bytes(self) -> int | None:
        """Of the largest compressed model that the logs tell of."""
        for logs in (self.main, self.logs):  # a log of an evaluation alone may not say
            found = [size for log in logs if (size := model_size(log.run)) is not None]
            if found:
                return max(found)
        return None


def model_size(run: Run) -> int | None:
    sizes = run.sizes
    if sizes.artifact is None and None not in (sizes.total, sizes.code):
        return sizes.total - sizes.code
    return sizes.artifact


def plain(text: str) -> str:
    """What strangers wrote, without control characters for the terminal and lone surrogates."""
    text = text[:400].encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in text)


def is_number(value: object) -> bool:
    if value is None or isinstance(value, (bool, str, list, dict)):
        return False
    return math.isfinite(value)


def check_folder(
    folder: str | os.PathLike[str],
    options: Options | None = None,
    *,
    place: str | os.PathLike[str] | None = None,
) -> Report:
    """Judges a folder; `place`: as if it lay there. Raises nothing for what the folder holds."""
    shown = os.fspath(place or folder)
    report = Report(shown, Path(os.path.abspath(shown)), options or Options(), Folder(Path(folder)))
    if not os.path.isdir(folder):
        what = "it is a file" if os.path.exists(folder) else "no such folder"
        report.add("refused", "files", f"{what}: name the folder of a record")
        return report
    report.folder = list_folder(folder)
    inside = [name for name in report.folder.files if re.search(r"/submission[^/]*\.json$", name)]
    if inside and not any(re.match(r"submission.*\.json", name) for name in report.folder.files):
        first = Path(shown, inside[0]).parent
        words = f"no record, but a folder of records: name those, as {first}"
        report.add("refused", "files", words)
        return report
    check_files(report)
    check_submission(report)
    check_place(report)
    check_logs(report)
    check_script(report)
    check_stated_size(report)
    if report.logs:
        judges = (check_seeds, check_source, check_score, check_seed_results, check_sizes)
        for judge in (*judges, check_times, check_data, check_significance):
            judge(report)
    return report


# --- the folder ---


def check_files(report: Report) -> None:
    found = report.folder
    for problem in found.problems:
        report.add("warned", "files", problem)
    for name in found.leaving[:5]:
        report.add("refused", "files", f"{name} is a link that leaves the folder: copy the file")
    if not found.files:
        report.add("refused", "files", "the folder is empty")
        return
    for name, size in found.files.items():
        if WEIGHTS.fullmatch(PurePosixPath(name).suffix):
            report.add("warned", "files", f"{name} ({size:,} bytes): leave weights and data out")
    left = [name for name in found.files if name.startswith("logs/")]
    if left and any(re.fullmatch(r"[^/]+\.log", name) for name in found.files):
        words = "is what a run in this folder left: remove logs/, the record has its .log files"
        report.add("warned", "files", f"{left[0]} {words}")
    if "README.md" not in found.files:
        close = [name for name in found.files if name.lower() in ("readme.md", "readme.txt")]
        report.add("warned" if close else "refused", "files", f"no README.md{but(close)}")
        return
    readme = report.text_of("README.md")
    if len(readme.split()) < 20:
        report.add("warned", "files", "README.md says nothing: what was done, how to run it?")
    if TODO in readme:
        report.add("warned", "files", "README.md still has a TODO: say what was done")


def but(names: Sequence[str]) -> str:
    return f", but {names[0]}: rename it" if names else ""


def check_submission(report: Report) -> None:
    name, top = "submission.json", [one for one in report.folder.files if "/" not in one]
    if name not in top:
        close = [one for one in top if re.fullmatch(r"submission.*\.json", one.lower())]
        report.add("warned" if close else "refused", "files", f"no {name}{but(close)}")
        if not close:
            return
        name = close[0]
    try:
        submission = read_submission(report.folder.read(name, 1 << 20))
    except (OSError, ValueError) as error:
        report.add("refused", "submission", f"{name} cannot be read: {reason(error)}")
        return
    report.values = submission.values
    for level, words in submission.faults:
        report.add(level, "submission", f"{name}: {words}")


def check_place(report: Report) -> None:
    """Which track it is judged by; the folder's name."""
    above = report.place.parent.name
    stated = track_named(report.values.get("track"))
    placed = above if above in TRACKS else None
    report.track = report.options.track or placed or stated or RECORD
    if placed and placed != report.track:
        report.add("warned", "place", f"it lies in {placed}: move it to records/{report.track}/")
    if stated and stated != (placed or stated):
        said = report.values["track"]
        report.add("warned", "place", f"it lies in {placed}, submission.json says track {said}")
    found = FOLDER_NAME.fullmatch(report.place.name)
    if not found or not parsed_date(found[1]):
        words = f"{report.place.name}: a record's folder is called YYYY-MM-DD_Description"
        report.add("warned", "place", words)


def parsed_date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def track_named(text: object) -> str | None:
    """A track of TRACKS from how people write it; None: another, or none."""
    if not isinstance(text, str):
        return None
    words = re.sub(r"[-\s]", "_", text.lower()).removeprefix("track_")
    if words in ("10min_16mb", "record_16mb", "10min"):
        return RECORD
    return OPEN if re.match(r"non_?record", words) else None


# --- the script ---


def check_script(report: Report) -> None:
    top = {name: size for name, size in report.folder.files.items() if "/" not in name}
    report.script_name = name = script_that_ran(report, top)
    if name not in top:
        report.add("refused", "files", "no train_gpt.py")
        return
    if name != "train_gpt.py":
        what = "is not what ran" if "train_gpt.py" in top else "is missing"
        report.add("warned", "files", f"train_gpt.py {what}: {name} is to be called so")
    if not top[name]:
        report.add("refused", "script", f"{name} is empty")
        return
    try:
        report.text = report.folder.read(name, CAP_BYTES)
    except (OSError, ValueError) as error:
        report.add("refused", "script", f"{name} cannot be read: {reason(error)}")
        return
    script = report.script = look(report.text)
    if script.packed:
        words = f"{name} is packed: {len(script.text):,} readable bytes (package.py --unpack)"
        report.add("note", "script", words)
        promised = promised_sha256(report.text)
        if promised and promised != hashlib.sha256(script.text).hexdigest():
            report.add("warned", "script", f"{name}: its first line names another source's sha256")
    if script.error:
        here = sys.version_info[:2]
        words = f"Python {here[0]}.{here[1]} cannot parse {name}: {script.error}"
        words += "" if here >= (3, 12) else "; newer ones take more (f-strings of 3.12, say)"
        report.add("warned" if here >= (3, 12) else "note", "script", words)
    if script.opaque:
        words = f"{name} is packed, and not by lzma, zlib or bz2: what is inside was not judged"
        report.add("warned", "script", words)
    check_imports(report)
    check_beside(report)


def script_that_ran(report: Report, top: dict[str, int]) -> str:
    """train_gpt.py; another train*.py where the submitted logs counted that one's bytes."""
    counted = {log.run.sizes.code for log in report.main}
    others = [name for name in top if re.fullmatch(r"train.*\.py", name)]
    others = others or [name for name in top if name.endswith(".py")]
    ran = [name for name in others if top[name] in counted] or others
    if "train_gpt.py" in top:
        named = report.text_of("train_gpt.py")
        if top["train_gpt.py"] in counted or ran == others or any(name in named for name in ran):
            return "train_gpt.py"
    return max(ran, key=lambda name: (top[name], name), default="train_gpt.py")


def check_imports(report: Report) -> None:
    """Packages that a reader of the folder would not know of, and downloads."""
    told = report.text_of("requirements.txt") + report.text_of("README.md")
    told = re.sub(r"[^a-z0-9]", "", told.lower())
    local = {PurePosixPath(name).parts[0].split(".")[0] for name in report.folder.files}
    for module, (line, optional) in report.script.imports.items():
        root = module.split(".")[0]
        if not root or optional or root in sys.stdlib_module_names | local:
            continue
        if COMES_WITH.fullmatch(root):
            continue
        # flash_attn_interface is told of as flash-attn, FlashAttention 3 ...
        if re.sub(r"[^a-z0-9]", "", root.lower().split("_")[0]) not in told:
            words = f"line {line} imports {root}: requirements.txt and README.md say nothing of it"
            report.add("warned", "script", f"{report.script_name}: {words}")
    for call, line in report.script.fetches.items():
        words = f"line {line} downloads ({call}): nothing may be fetched while it is evaluated"
        report.add("warned", "script", f"{report.script_name}: {words}")


def check_beside(report: Report) -> None:
    """Files that the script needs or reads: code counts as the script itself does."""
    for name, (by, certain) in needed(report).items():
        suffix, size = PurePosixPath(name).suffix, report.folder.files[name]
        if CODE.fullmatch(suffix):
            report.beside[name] = size
            level = "warned" if certain else "note"
            report.add(level, "cap", f"{by} needs {name}: its {size:,} bytes are counted")
        elif suffix not in (".model", ".vocab"):
            words = f"{by} reads {name} ({size:,} bytes): as part of the model or code it counts"
            report.add("warned", "cap", words)


def needed(report: Report) -> dict[str, tuple[str, bool]]:
    """Files beside the script by name: (by what they are needed, whether it cannot do without)."""
    found: dict[str, tuple[str, bool]] = {}
    rest = {name for name in report.folder.files if not PROSE.search(name)}
    rest -= {report.script_name, "submission.json"}
    todo = [(report.script_name, report.script, True)]
    while todo:
        by, script, certain = todo.pop()
        text = script.text.decode("utf-8", "replace")
        runs = re.search(r"\bexec\s*\(|\brunpy\b", text) is not None
        for name in sorted(rest - set(found)):
            how = how_needed(name, script, text)
            if how is None or WEIGHTS.fullmatch(PurePosixPath(name).suffix):
                continue
            sure = certain and (how == "imports" or runs and how == "names")
            found[name] = (by, sure)
            if name.endswith(".py"):
                todo.append((name, look(report.folder.read(name)), sure))
    return found


def how_needed(name: str, script: Script, text: str) -> str | None:
    """Does a script import this file, or name it in quotes?"""
    path = PurePosixPath(name)
    modules = {".".join(path.with_suffix("").parts), path.stem, path.parts[0]}
    for module, (_, optional) in script.imports.items():
        module = module.lstrip(".")
        if path.suffix in (".py", ".so") and (
            module in modules or module.split(".")[0] == path.parts[0]
        ):
            return "may import" if optional else "imports"
    quoted = rf"[\"'](?:[^\"'\n]*/)?{re.escape(path.name)}[\"']"
    return "names" if re.search(quoted, text) else None


# --- the logs ---


def check_logs(report: Report) -> None:
    """Reads the logs: finished runs, and which of them are submitted."""
    names = [
        name
        for name in report.folder.files
        if PurePosixPath(name).suffix in (".log", ".txt", ".out")
        and not re.match(r"(requirements|readme|license)", PurePosixPath(name).name.lower())
    ]
    seen: dict[str, str] = {}
    broken: list[tuple[str, str]] = []
    read = 0
    for name in sorted(names, key=lambda name: (name.count("/"), len(name), name))[:MAX_LOGS]:
        data = report.read_or_nothing(name)
        same = seen.setdefault(hashlib.sha256(data).hexdigest(), name)
        if same != name and data:
            report.add("note", "seeds", f"the same bytes as {same}: one run", name)
            continue
        found = read_log(report.folder.root / name)
        if not found.runs and name.endswith(".txt"):
            continue
        read += 1
        report.ends += numbers_at_the_end(data)
        take_runs(report, name, found.runs, broken)
        if not found.runs:
            broken.append((name, "; ".join(found.problems[:1]) or "no run in it"))
    if len(names) > MAX_LOGS:
        report.add("warned", "log", f"{len(names)} logs: only {MAX_LOGS} were read")
    if not read:
        words = "no log of a run: call it train_seed<N>.log (git ignores logs/)"
        report.add("refused", "files", words)
    unread = "warned" if told_at_the_end(report, "val_bpb") else "refused"
    for name, words in broken:
        level = "note" if "/" in name else "warned"
        report.add(level if report.logs else unread, "log", words, name)
    report.main = submitted(report.logs, report.values)


def numbers_at_the_end(log: bytes) -> list[float]:
    """Those with decimals behind the last line of a step: the results, in whatever words."""
    steps = list(re.finditer(rb"step[:= ]*\d+/\d+[^\n]*", log))
    end = log[steps[-1].end() if steps else 0 :][-100_000:]
    return [float(number) for number in re.findall(rb"(?<![\w.])\d{1,2}\.\d{3,12}(?!\d)", end)]


def told_at_the_end(report: Report, key: str) -> bool:
    """Does a log end with the result given, or do they end with those given for each seed?"""

    def told(value: object) -> bool:
        return is_number(value) and any(
            abs(float(value) - number) <= half_unit(value) for number in report.ends
        )

    each = [values.get(key) for values in results_by_seed(report.values).values()]
    return told(report.values.get(key)) or bool(each) and all(map(told, each))


def take_runs(
    report: Report, name: str, runs: Sequence[Run], broken: list[tuple[str, str]]
) -> None:
    for run in runs:
        head = run.headline
        if head is not None and is_number(head.val_bpb) and head.val_bpb > 0:
            report.logs.append(Log(name if run.number == 1 else f"{name}#{run.number}", run))
            continue
        why = run.error or ("it ends before the result" if head is None else "no number as result")
        broken.append((name, f"{run.status} at step {run.last_step:,}: {why}"))


def arm_of(log: Log) -> tuple[str, str]:
    """Folder and name of a log without its seed: equal for the seeds of one arm."""
    path = PurePosixPath(log.name.partition("#")[0])
    stem = re.sub(r"(?i)[_-]?(?<![a-z])(seed|s)[_-]?\d+", "", path.stem)
    stem = re.sub(rf"(?:(?<=train)|[_-]){log.seed}(?!\.?\d)", "", stem)
    return str(path.parent), f"{stem}#{log.run.number}"


def submitted(logs: Sequence[Log], values: dict[str, Any]) -> list[Log]:
    """The runs that submission.json speaks of: of one arm, of a folder, or of all.

    The results that it names for each seed tell, or its val_bpb; where neither fits, they are the
    largest group that is highest up.
    """
    named = runs_named(logs, results_by_seed(values))
    if named:
        return named
    groups: dict[tuple[str, ...], list[Log]] = {}
    for log in logs:
        folder, arm = arm_of(log)
        for key in ((folder, arm), (folder,)):
            groups.setdefault(key, []).append(log)
    given = values.get("val_bpb")

    def fit(key: tuple[str, ...]) -> tuple[int, ...]:
        depth = 0 if key[0] == "." else key[0].count("/") + 1
        distance = 2
        if is_number(given):
            off = abs(mean(log.run.headline.val_bpb for log in groups[key]) - float(given))
            distance = 0 if off <= half_unit(given) else 1 if off <= CLOSE else 2
        return distance, depth, -len(key), -len(groups[key])

    return groups[min(groups, key=fit)] if groups else []


def runs_named(logs: Sequence[Log], results: dict[int, dict[str, Any]]) -> list[Log]:
    """The run of each seed whose result is the one that submission.json gives for it."""
    found = []
    for seed, values in results.items():
        given = values.get("val_bpb")
        if not is_number(given):
            return []
        same = [log for log in logs if log.seed == seed]
        near = [log for log in same if abs(log.run.headline.val_bpb - float(given)) <= CLOSE / 2]
        if not near:
            return []
        found.append(near[0])
    return found


def check_seeds(report: Report) -> None:
    """Which runs are judged; several seeds, each once, of one configuration."""
    main = report.main
    others = len(report.logs) - len(main)
    if others:
        names = ", ".join(log.name for log in main[:3]) + (" ..." if len(main) > 3 else "")
        count = f"{others} other run{'s were' if others > 1 else ' was'} not judged"
        report.add("note", "seeds", f"submitted is {names}; {count}")
    for log in main:
        run = log.run
        if None not in (run.seed, run.seed_in_name) and run.seed != run.seed_in_name:
            report.add("warned", "seeds", f"this run's seed is {run.seed}", log.name)
        if run.resumed_at:
            report.add(report.severe, "log", f"resumed at step {run.resumed_at[-1]:,}", log.name)
    seeds = [log.seed for log in main if log.seed is not None]
    for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        report.add("warned", "seeds", f"seed {seed} is in {seeds.count(seed)} different runs")
    if len(main) < 3:
        found = f"{len(main)} run{'s' * (len(main) > 1)}"
        report.add("warned" if report.strict else "note", "seeds", f"{found}: three are usual")
    check_seeds_named(report)
    told = [telling(log.run.config, log.run) for log in main]
    for name in sorted(set.intersection(*map(set, told))):
        values = list(dict.fromkeys(str(one[name])[:30] for one in told))
        if len(values) > 1:
            report.add("warned", "seeds", f"its runs differ in {name}: {' | '.join(values)}")


def check_seeds_named(report: Report) -> None:
    """Those of submission.json have logs, and those of the logs are named."""
    named = seeds_named(report.values)
    for seed in [seed for seed in named if seed not in {log.seed for log in report.logs}][:5]:
        report.add("warned", "seeds", f"submission.json names seed {seed}, which has no log")
    missing = [str(seed) for seed in report.seeds if seed not in named]
    if named and missing:
        report.add("warned", "seeds", f"submission.json leaves out seed {', '.join(missing)}")


def telling(config: dict[str, Any], run: Run) -> dict[str, Any]:
    """What all seeds should have been run with alike."""
    found = {name: value for name, value in config.items() if not NOT_CONFIGURATION.fullmatch(name)}
    found |= {"world_size": run.world_size, "val_tokens": run.val_tokens}
    return {name: value for name, value in found.items() if value is not None}


def check_source(report: Report) -> None:
    """Which script the logs hold: the shipped one, or the one packed in it."""
    if report.text is None:
        return
    silent, wrong = [], []
    for log in report.main:
        text = log.run.source
        if text is None:
            silent.append(log.name)
            check_code_size(report, log)
            continue
        words = another_script(report, text)
        if words:
            wrong.append((log.name, words))
    for name in silent:
        report.add("note", "source", "does not hold its script: what ran is not proved", name)
    for name, words in wrong:
        # A packed script may be shorter inside than what ran, its names and comments left out.
        certain = len(wrong) == len(report.main) and not report.script.packed
        report.add(report.severe if certain else "warned", "source", words, name)


def another_script(report: Report, text: bytes) -> str | None:
    """In what a log's script is another than the shipped one; None: in nothing that counts."""
    theirs = look(text)
    pairs = [(text, report.text), (theirs.text, report.script.text)]
    found = [first_difference(here, there) for here, there in pairs]
    if not all(number for number, _, _ in found):
        return None
    number, here, there = found[1]
    return f"holds another script: line {number} is {here!r}, in {report.script_name} {there!r}"


# --- submission.json against the logs ---


def half_unit(given: object) -> float:
    """What rounding to the digits written leaves open; four at least."""
    return 0.51 * 10.0 ** -max(4, decimals(given))


def check_score(report: Report) -> None:
    for key in ("val_bpb", "val_loss"):
        given, found = report.values.get(key), report.results(key)
        if not found:
            report.add("note", "score", f"the logs do not tell {key} of each run")
        elif is_number(given) and given > 0:
            level, words = verdict_on(report, key, float(given), half_unit(given))
            asked = any(one.rule == "score" and one.level != "note" for one in report.findings)
            if level and not (key == "val_loss" and asked):  # once is enough
                report.add(level, "score", f"{key} {given}{words}")


def verdict_on(report: Report, key: str, given: float, open_: float) -> tuple[str, str]:
    """What the given number is, going by the logs: ("", "") where it is what it should be."""
    found = report.results(key)
    right = mean(found)
    whole = f"{'the mean of the logs' if len(found) > 1 else 'the log'} is {right:.8f}"
    digits = [log.run.headline.digits for log in report.main]
    open_ += max([0.51 * 10.0**-places for places in digits if places is not None], default=0)
    if abs(given - right) <= open_:
        return "", ""
    if abs(given - right) <= CLOSE:
        return "note", f" is nearly right: {whole}"
    bpbs = report.results("val_bpb")
    if key == "val_loss" and bpbs and abs(given - mean(bpbs)) <= CLOSE:
        return "warned", f" is the bits a byte: {whole}"
    for log, value in zip(report.main, found, strict=True):
        if abs(given - value) <= open_:
            return "warned", f" is that of seed {log.seed} alone: {whole}"
    for tag, value in stages(report, key).items():
        if abs(given - value) <= open_:
            return "warned", f" is {tag}: {whole} for what ran last"
    before = [getattr(log.run.score("pre_quant"), key, None) for log in report.main]
    if all(map(is_number, before)) and abs(given - mean(before)) <= open_:
        return report.severe, f" is the result before quantisation: {whole}"
    if told_at_the_end(report, key):
        return "warned", f" is not what ran last: {whole}"
    return "refused" if given < right else "warned", f" is in no log: {whole}"


def stages(report: Report, key: str) -> dict[str, float]:
    """Results other than those that ran last, in words: of all runs, then of each."""
    told = [
        {score.tag: getattr(score, key) for score in log.run.scores if score.kind != "pre_quant"}
        for log in report.main
    ]
    found = {}
    for tag in told[0]:
        values = [one.get(tag) for one in told]
        if all(map(is_number, values)):
            found[f"the result called {tag}"] = mean(values)
    for log, one in zip(report.main, told, strict=True):
        known = {tag: value for tag, value in one.items() if is_number(value)}
        found |= {f"{log.name}'s {tag}": value for tag, value in known.items()}
    return found


def check_seed_results(report: Report) -> None:
    """seed_results, as far as each log tells the same; people round as they copy."""
    results = results_by_seed(report.values)
    for log in report.main:
        run, sizes, model = log.run, log.run.sizes, model_size(log.run)
        codes = (0, sizes.code, sizes.packed_code, report.code_bytes)
        told = {sizes.total} | {model + code for code in codes if None not in (model, code)}
        known: dict[str, tuple[float, set[float | None]]] = {
            "val_bpb": (CLOSE, {score.val_bpb for score in run.scores}),
            "val_loss": (10 * CLOSE, {score.val_loss for score in run.scores}),
            "steps": (1, {run.last_step or None}),
            "artifact_bytes": (0, told),
            "bytes_total": (0, told),
        }
        for key, (open_, values) in known.items():
            said, values = results.get(log.seed, {}).get(key), values - {None}
            if values and is_number(said) and min(abs(float(said) - v) for v in values) > open_:
                log_says = " or ".join(f"{value:,}" for value in sorted(values)[:2])
                words = f"seed_results: {key} of seed {log.seed} is {said}, its log says {log_says}"
                report.add("warned", "score", words)


# --- sizes, time, data ---


def check_sizes(report: Report) -> None:
    """The cap holds for what is shipped; what the logs and submission.json say of it."""
    model, code = report.model_bytes, report.code_bytes
    if model is None:
        report.add("warned", "cap", "no log says how large the compressed model is")
        return
    totals = {log.name: log.run.sizes.total for log in report.main if log.run.sizes.total}
    for name, total in totals.items():
        if total > CAP_BYTES:
            words = f"its total is {total:,} bytes, {total - CAP_BYTES:,} too many"
            report.add(over_cap(total), "cap", words, name)
    if code is None:
        return
    total = model + code
    if total > CAP_BYTES:
        theirs = [log.run.sizes.packed_code for log in report.main if log.run.sizes.packed_code]
        forms = {"with the script that --pack makes": report.packed_bytes}
        forms |= {"with the script packed as the log counts it": min(theirs)} if theirs else {}
        words = f"as shipped {total:,} bytes, {total - CAP_BYTES:,} too many"
        fits = [(how, model + size) for how, size in forms.items() if model + size <= CAP_BYTES]
        if fits:
            words += f"; {fits[0][0]} {fits[0][1]:,}: ship that"
            report.add("warned", "cap", words)
        else:
            certain = len(report.text) + model > CAP_BYTES
            report.add(over_cap(total) if certain else "warned", "cap", words)
    stated = report.values.get("bytes_total")
    if is_number(stated) and totals and stated < min(*totals.values(), total) != model:
        words = f"bytes_total {stated:,} is in no log: they say {max(totals.values()):,}"
        report.add(
            "warned", "cap", words if stated != model else f"{words}; that is the model alone"
        )


def over_cap(total: int) -> str:
    """The level of a total above the cap: of far too much, it may be the model before packing."""
    return "refused" if total < 1.5 * CAP_BYTES else "warned"


def check_stated_size(report: Report) -> None:
    """bytes_total and bytes_code of submission.json."""
    stated = report.values.get("bytes_total")
    if is_number(stated) and stated > CAP_BYTES:
        words = f"bytes_total {stated:,}: {CAP_BYTES:,} are allowed (see package.py --pack)"
        report.add("refused", "cap", words)
    stated = report.values.get("bytes_code")
    known = None if report.text is None else (len(report.text), report.code_bytes)
    if known and is_number(stated) and stated not in known:
        words = f"bytes_code {stated:,}: {report.script_name} has {len(report.text):,} bytes"
        report.add("warned", "cap", words)


def check_code_size(report: Report, log: Log) -> None:
    """Of a log without its script, the code size alone says which one ran."""
    counted = {log.run.sizes.code, log.run.sizes.packed_code} - {None}
    shipped = {len(report.text), report.code_bytes, len(report.script.text)}
    if counted and not counted & (shipped | set(report.beside.values())):
        words = f"Code size {max(counted):,}, but {report.script_name} has {len(report.text):,}"
        report.add("warned", "source", f"{words}: which one ran?", log.name)


def check_times(report: Report) -> None:
    """Ten minutes of training, and of evaluation, on 8 H100s: for the record track."""
    for log in report.main:
        run, told = log.run, log.run.train_time_ms
        by_lines = [line.train_time_ms for line in run.steps if is_number(line.train_time_ms)]
        longest = max([*by_lines, *([told] if is_number(told) else [])], default=None)
        if by_lines and is_number(told) and not run.resumed_at and longest > 1.01 * told + 1000:
            seconds = (told / 1e3, longest / 1e3)
            words = "its end tells {:,.1f} s of training, its steps {:,.1f} s".format(*seconds)
            report.add("warned", "time", words, log.name)
        if not report.strict:
            continue
        if longest is None:
            report.add("note", "time", "does not tell how long it trained", log.name)
        elif longest > CAP_MS + LATE_STEPS * longest / max(1, run.last_step):
            report.add("refused", "time", f"trained for {longest / 1e3:,.1f} s, not 600", log.name)
        ms = run.headline.eval_ms
        if is_number(ms) and ms > CAP_MS:
            report.add("refused", "time", f"evaluated for {ms / 1e3:,.1f} s, not 600", log.name)
        device, gpus = run.hardware.get("device"), run.world_size
        if gpus not in (None, 8) or device and "H100" not in str(device):
            ran = f"on {gpus or '?'} x {device}" if device else f"as {gpus} processes"
            words = f"ran {ran}, not on 8 H100s: --track {OPEN} has no such rule"
            report.add("refused", "time", words, log.name)


def check_data(report: Report) -> None:
    """The whole validation split, and its true bytes."""
    for log in report.main:
        run, head = log.run, log.run.headline
        if run.partial_val:
            report.add("refused", "data", "partial_val:1: it scored a part of the split", log.name)
        size = SPLITS.get(run.val_tokens)
        if size is None or not is_number(head.val_loss) or not head.val_loss > 0:
            continue
        share = head.val_loss / math.log(2) * run.val_tokens / head.val_bpb / size - 1
        if abs(share) > BYTES_OFF:
            guess = ": the leading space counted twice?" if 0.14 < share < 0.2 else ""
            words = f"val_loss and val_bpb imply {100 * share:+.2f} % of the split's bytes{guess}"
            level = "refused" if abs(share) > BYTES_WRONG and report.strict else "warned"
            report.add(level, "data", words, log.name)


def check_significance(report: Report) -> None:
    """Welch's test against the record to beat: in nats where both have them, else in bits."""
    previous, level = report.options.previous, "refused" if report.strict else "note"
    if previous is None:
        return
    ours, theirs, unit, margin = report.results("val_loss"), previous.losses, "nats", MARGIN_NATS
    if not ours or not all(map(is_number, theirs)):
        share = 1 / math.log(2)
        if ours:
            share = mean(report.results("val_bpb")) / mean(ours)
        ours, theirs = report.results("val_bpb"), previous.bpbs
        unit, margin = "bits a byte", MARGIN_NATS * share
    if not all(map(is_number, theirs)):
        words = f"{previous.name} is in nats, these logs are not: give a score in bits a byte"
        report.add("warned", "significance", words)
    elif len(ours) < 2:
        report.add(level, "significance", "one run shows no significance: run three seeds")
    else:
        gain, p = mean(theirs) - mean(ours), welch(ours, theirs, margin=margin).p
        words = f"{abs(gain):.5f} {unit} {'better' if gain >= 0 else 'worse'} than {previous.name}"
        words += f"; better by {margin:.5f}: p = {p:.2g}"
        better = p < ALPHA
        words += "" if better else ": not shown"
        report.add("note" if better else level, "significance", words)


# --- command line ---


def read_previous(given: str) -> Previous:
    """--previous: a score, or a folder of which the logs count. Raises ValueError, in words."""
    found = re.fullmatch(r"(\d{0,4}\.?\d{1,12})\s*(nats|bpb)?", given)
    if found and not os.path.isdir(given):
        value, unknown = [float(found[1])] * 2, [math.nan] * 2
        if not value[0] > 0:
            raise ValueError(f"--previous {given}: a score above 0, such as 1.1228")
        if found[2] == "nats":
            return Previous(given, value, unknown)
        return Previous(f"{given} bpb", unknown, value)
    if not os.path.isdir(given):
        raise ValueError(
            f"--previous {given}: neither a folder nor a score, such as 1.1228 or 1.8957nats"
        )
    report = check_folder(given)
    losses, bpbs = report.results("val_loss"), report.results("val_bpb")
    if not bpbs and is_number(report.values.get("val_bpb")):
        bpbs = [float(report.values["val_bpb"])]
    if not bpbs:
        raise ValueError(f"--previous {given}: no finished log in it: give its score, as 1.1228")
    repeat = 2 if len(bpbs) == 1 else 1
    return Previous(report.place.name, losses * repeat or [math.nan], bpbs * repeat)


def lines(report: Report) -> list[str]:
    counts = [sum(one.level == level for one in report.findings) for level in LEVELS]
    told = [
        f"{n} {level}" for n, level in zip(counts, LEVELS, strict=True) if n and level != "note"
    ]
    head = f"{plain(report.shown)}: {report.verdict}"
    counted = f" ({', '.join(told[::-1])})" if told else ""
    result = [f"{head}{counted} as {report.track}"]
    if report.main:
        result.append(f"  {score_words(report)}")
    result += [f"  {line}" for line in size_lines(report)]
    findings = sorted(report.findings, key=lambda one: -LEVELS.index(one.level))
    return result + [f"  {one.level:8}{one} [{one.rule}]" for one in findings]


def score_words(report: Report) -> str:
    words = []
    for key in ("val_bpb", "val_loss"):
        found = report.results(key)
        if found:
            spread = f" +- {stdev(found):.5f}" if len(found) > 1 else ""
            words.append(f"{key} {mean(found):.5f}{spread}")
    return f"{', '.join(words)}, seeds {', '.join(map(str, report.seeds)) or 'unknown'}"


def size_lines(report: Report) -> list[str]:
    """The total with the bytes left: with the script as it is, and as it would be packed."""
    if report.model_bytes is None or report.code_bytes is None:
        return []
    result = []
    forms = {"as it is": report.code_bytes, "packed": report.packed_bytes}
    for label, code in forms.items():
        total = code + report.model_bytes
        left = CAP_BYTES - total
        words = f"{left:,} left" if left >= 0 else f"{-left:,} too many"
        parts = f"code {label:8} {code:>9,} + model {report.model_bytes:>12,} = {total:>12,} bytes"
        if label == "as it is" or code < report.code_bytes:
            result.append(f"{parts}, {words}")
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", help="a record's folder")
    add("--track", type=track_argument, help=" or ".join(TRACKS))
    add("--previous", metavar="FOLDER|SCORE", help="the record to beat")
    options = parser.parse_args(arguments)
    try:
        options.previous = read_previous(options.previous) if options.previous is not None else None
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
        report = Report(folder, Path(folder), Options(), Folder(Path(folder)))
        report.add("warned", "checker", words)
        return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    settings = Options(options.track, options.previous)
    reports = [
        guarded(folder, lambda folder=folder: check_folder(folder, settings))
        for folder in options.folders
    ]
    print("\n\n".join("\n".join(lines(one)) for one in reports))
    return int(any(one.verdict == "refused" for one in reports))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager has seen enough
    sys.exit(main())
