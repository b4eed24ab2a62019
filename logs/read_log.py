"""Reads training logs of the parameter-golf family: a Run for each run, and in words what could
not be read.

    for run in read_logs(["logs/", "train_seed42.log"]).runs: print(run.name, run.headline)

Understood: text logs of the challenge's script and its descendants, ours among them: lines of
`key:value`, `key: value` or `key=value`, times in ms, s or m, something in front of each line (a
time, [rank0]:, a level), the script's text anywhere, several runs behind each other, a log that
ends anywhere. Of our <RUN_ID>.jsonl only what <RUN_ID>.txt does not print is read: all settings.
A damaged file raises nothing, and nothing that it contains is executed.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20  # of one file
MAX_LINE = 1 << 12  # characters of one line
MAX_PROBLEMS = 20  # named of one file; the others are counted
MAX_VALUE = 400  # characters of a value
LOG_SUFFIXES = {".txt", ".log"}
# A last evaluation has failed that is this much worse than the one before it; adaptation at test
# time is there to make it better.
FAILED, TTT_FAILED = 1.1, 1.001

# What a result is, by the first pattern that is found in what the log calls it. What stands in
# front of the others never counts as a result that is submitted.
NAMES = (
    (
        "progress",
        r"(?<![a-z])chunk[\s:=\[]+\d|progress|batch_(bpb|loss)|running[_ ]|cumul|\d\s*/\s*\d|"
        r"\d\s?%|^\W*(step|iter|epoch)",
    ),
    (
        "diagnostic",
        r"(^|[\W_])(delta|gain|diff(?!u)|gap|improvement|change|reduction|penalt|std|target|sota|best|"
        r"mean(?![a-z])|average(?!d)|leader|record\b|threshold|expect|sanity|subset|probe|debug|"
        r"diagnostics)|"
        r"baseline[_ ](val_)?bpb|"
        r"(over|vs\.?|than)( the)? baseline|calib\w*[_ ](loss|bpb)|train.?bpb|"
        r"(pre|before|without|no)[-_ ]?(ttt|slot|adapt)|^\W*(#|//|-{2})",
    ),
    (
        "pre_quant",
        r"^(?!.*(round_?trip|(?<!un)quantized|post.?quant|int\d)).*"
        r"(pre[-_ ]?(gptq|export)|full.?prec|(fp|bf|float)_?(16|32)\b|post.?ema|"
        r"(^|[\W_])(post[-_ ]?)?(ema|swa|lawa|raw)\b)|pre[-_ ]?quant|un-?quant",
    ),
    ("diagnostic", r"diagnostic"),
    ("ttt", r"ttt|test.?time"),
    ("sliding", r"slid|stride|(^|[\W_])sw([\W_\d]|$)"),
    ("roundtrip", r"round_?trip|quant|int\d|zlib|zstd|lzma|brotli|decoded|artifact"),
    ("other", r""),
)
KINDS = ("pre_quant", "diagnostic", "roundtrip", "sliding", "ttt", "other")
SUBMITTED = ("roundtrip", "sliding", "ttt", "other")
_NAMES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES)


@dataclass(slots=True)
class Step:
    """A training line."""

    step: int
    train_loss: float  # nats a token
    train_time_ms: float | None = None  # training since its start
    data_crc: str | None = None


@dataclass(slots=True)
class Validation:
    """A validation while training."""

    step: int
    val_loss: float | None = None  # nats a token
    val_bpb: float | None = None
    train_time_ms: float | None = None
    digits: int | None = None  # decimals of val_bpb as printed; None: full precision


@dataclass(slots=True)
class Score:
    """A result after training."""

    kind: str  # one of KINDS
    tag: str  # as the log calls it, without _exact
    val_loss: float | None = None
    val_bpb: float | None = None
    eval_ms: float | None = None
    digits: int | None = None  # decimals of val_bpb as printed; None: full precision


@dataclass(slots=True)
class Sizes:
    """Bytes, as the log states them; the last statement counts."""

    model: int | None = None  # the raw model
    code: int | None = None  # the script as it is
    packed_code: int | None = None  # as compressed for the artifact, where a log knows both
    artifact: int | None = None  # the compressed model
    total: int | None = None  # what is held against the cap


@dataclass(slots=True)
class StepTimes:
    """Milliseconds a step. Percentiles and maximum are of the means between two training lines,
    weighted by steps."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass
class Run:
    """What one run left in a log. None, or an empty collection: the log does not say."""

    path: str
    number: int = 1  # of the runs in its file, from 1
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    versions: dict[str, str] = field(default_factory=dict)  # python, torch, cuda
    hardware: dict[str, Any] = field(default_factory=dict)  # device (its name), gpus (seen), cpus
    world_size: int | None = None
    grad_accum_steps: int | None = None  # in effect
    model_params: int | None = None
    dataset: str | None = None
    train_shards: int | None = None
    val_tokens: int | None = None  # predicted tokens of the validation split
    steps: list[Step] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    sizes: Sizes = field(default_factory=Sizes)
    stopped_early: str | None = None  # the reason, such as wallclock_cap
    stop_step: int | None = None
    train_time_ms: float | None = None  # of the whole training
    val_total_ms: float | None = None
    eval_total_ms: float | None = None  # of all evaluation after training
    epochs: float | None = None
    input_wait_percent: float | None = None  # of training time
    peak_mib: int | None = None
    source: bytes | None = field(default=None, repr=False)  # the script's text in the log
    resumed_at: list[int] = field(default_factory=list)  # first step of each continuation
    partial_val: bool = False  # scored on a part of the validation split
    status: str = "unfinished"  # finished, failed, interrupted, nonfinite, unfinished
    error: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name + (f"#{self.number}" if self.number > 1 else "")

    @property
    def source_bytes(self) -> int | None:
        return None if self.source is None else len(self.source)

    @property
    def source_sha256(self) -> str | None:
        return None if self.source is None else hashlib.sha256(self.source).hexdigest()

    @property
    def seed_in_name(self) -> int | None:
        found = re.search(r"seed[_-]?(\d{1,9})", Path(self.path).name, re.IGNORECASE)
        return int(found[1]) if found else None

    @property
    def last_step(self) -> int:
        lines = (*self.steps[-1:], *self.validations[-1:])
        return max([0, self.stop_step or 0, *(line.step for line in lines)])

    @property
    def final_validation(self) -> Validation | None:
        told = (v for v in reversed(self.validations) if (v.val_loss, v.val_bpb) != (None, None))
        return next(told, None)

    @property
    def headline(self) -> Score | None:
        """The result that is submitted: the last one of the decoded artifact, unless that
        evaluation has failed and an earlier one has not."""
        found = [score for score in self.scores if score.kind in SUBMITTED]
        finite = [score for score in found if math.isfinite(score.val_bpb)]
        while len(finite) > 1:
            bound = TTT_FAILED if finite[-1].kind == "ttt" else FAILED
            if finite[-1].val_bpb <= bound * finite[-2].val_bpb:
                break
            finite.pop()
        return finite[-1] if finite else found[-1] if found else None

    def score(self, kind: str) -> Score | None:
        """The last result of a kind; of "pre_quant" else the validation of the last step."""
        found = next((score for score in reversed(self.scores) if score.kind == kind), None)
        last = self.final_validation
        if found or kind != "pre_quant" or last is None or not last.step == self.last_step > 0:
            return found
        return Score("pre_quant", "validation", last.val_loss, last.val_bpb, None, last.digits)

    def step_times(self) -> StepTimes:
        """From the times of the training lines: of a mean alone no stall can be seen."""
        timed = [(0, 0.0)] if not self.resumed_at else []
        timed += [(s.step, s.train_time_ms) for s in self.steps if s.train_time_ms is not None]
        if len(timed) < 2:
            return StepTimes()
        parts = sorted(
            ((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in pairwise(timed) if b[0] > a[0]
        )
        last, ms = timed[-1]
        if self.train_time_ms is not None:
            last, ms = self.last_step, self.train_time_ms
        mean = ms / last if last else None
        if not parts:
            return StepTimes(mean)
        each = [pace for pace, count in parts for _ in range(count)]
        middle, late = each[math.ceil(0.5 * len(each)) - 1], each[math.ceil(0.99 * len(each)) - 1]
        return StepTimes(mean, middle, late, each[-1])

    def crc_at(self) -> dict[int, str]:
        """data_crc of each logged step."""
        return {s.step: s.data_crc for s in self.steps if s.data_crc is not None}

    @property
    def empty(self) -> bool:
        told = self.steps or self.validations or self.scores or self.error
        return not told and self.sizes == Sizes() and self.status == "unfinished"


@dataclass
class Logs:
    """The runs of a file, or of several, in order, and what could not be read."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> Logs:
    """Files, FILE#2 for the second run of one, and folders of .txt and .log files (not deeper).
    Each run once. For a .jsonl its .txt is read."""
    result, found = Logs(), {}
    for given in _expand(paths, result.problems):
        file, sign, number = given.rpartition("#")
        path, numbered = (given, False) if os.path.exists(given) or not sign else (file, True)
        path = path.removesuffix(".jsonl") + ".txt" if path.endswith(".jsonl") else path
        log = read_log(path)
        runs = [run for run in log.runs if number == str(run.number) or not numbered]
        found |= {(os.path.realpath(path), run.number): run for run in runs}
        problems = [f"{path}: {problem}" for problem in log.problems]
        if log.runs and not runs:
            problems.append(f"{given}: no such run: {path} has {len(log.runs)}, from #1 on")
        result.problems += [problem for problem in problems if problem not in result.problems]
    result.runs = [*found.values()]
    return result


def read_log(path: str | os.PathLike[str]) -> Logs:
    """One file. Never raises for what the file is or contains: its problems say it."""
    log = Logs()
    try:
        data = _load(Path(path))
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    _Reader(log, os.fspath(path), _as_utf8(data)).read()
    if len(log.runs) == 1:
        add_events(log.runs[0], Path(path).with_suffix(".jsonl"))
    return log


def add_events(run: Run, path: Path) -> None:
    """What the events of our own trainer say that its text does not: all settings, the machine, and
    how the run ended. Events of another seed's run, and damaged ones, are left out."""
    try:
        lines = _load(path).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if name := re.match(r'\{"event": "(config|hardware|end)"', line):
            with contextlib.suppress(ValueError, RecursionError):
                fields = json.loads(line).items()
                plain = {k: v for k, v in fields if v is None or isinstance(v, (str, int, float))}
                found[name[1]] = {k: v for k, v in plain.items() if k not in ("event", "time")}
    settings, machine, end = (found.get(name, {}) for name in ("config", "hardware", "end"))
    if run.seed not in (None, settings.get("seed")):
        return
    run.config |= settings
    run.versions |= {k: str(machine[k]) for k in ("torch", "cuda", "python") if machine.get(k)}
    run.hardware |= {k: machine[k] for k in ("device", "cpus") if machine.get(k)}
    if end:
        run.status, run.error = str(end.get("status")), str(end.get("error") or "") or None


def score_kind(name: str) -> str:
    """What a log calls a result: one of KINDS, or progress."""
    return next(kind for kind, pattern in _NAMES if pattern.search(name))


# --- files ---


def _expand(paths: Iterable[str | os.PathLike[str]], problems: list[str]) -> Iterator[str]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield os.fspath(given)
            continue
        found = sorted(
            os.fspath(one)
            for one in path.iterdir()
            if one.suffix in LOG_SUFFIXES and one.name != "requirements.txt" and one.is_file()
        )
        if not found:
            problems.append(f"{path}: a folder without .txt or .log files: name the logs")
        yield from found


def _load(path: Path) -> bytes:
    """The file's bytes. A pipe is refused unopened."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    if about.st_size > MAX_BYTES:
        raise ValueError(f"{about.st_size:,} bytes: name a log of {MAX_BYTES:,} at most")
    return path.read_bytes()


def _as_utf8(data: bytes) -> bytes:
    """Without a byte-order mark; carriage returns made plain."""
    return data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


# --- the script's text inside a log ---

# The first line of a script: an import or a docstring, with the comments, strings and empty lines
# in front of it; where a log begins, or behind a rule, any comment or string.
SCRIPT_START = re.compile(
    rb"^(?:(?:[#\"'][^\n]*)?\n){0,200}(?:import [\w.]+(?: as \w+)?(?:, ?[\w., ]+)?\s*(?:#[^\n]*)?$|"
    rb"from [\w.]+ import [\w(]|#!/|[rR]?\"\"\"|[rR]?''')|"
    rb"(?:\A|^={20,}[ \t]*\n)\s*(?P<text>[rRuU]?[#\"'])",
    re.MULTILINE,
)
DEFINITION = re.compile(rb"^(?:def|class) \w", re.MULTILINE)
# Behind the challenge's scripts come a rule and the versions; behind others the log's first lines.
VERSIONS_BEHIND = re.compile(rb"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
LOG_BEHIND = re.compile(
    rb"^(?:={20,}[ \t]*$|logs/[^\n]{1,300}\.txt[ \t]*$|val_bpb:enabled |Running Python |"
    rb"Hyperparameters:[ \t]*$)",
    re.MULTILINE,
)


def scripts(data: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each script's text in a log."""
    at = 0
    while start := SCRIPT_START.search(data, at):
        begin = start.start("text") if start["text"] else start.start()
        end = VERSIONS_BEHIND.search(data, begin)
        if end is None:
            definition = DEFINITION.search(data, begin)
            if definition is None:
                return
            end = LOG_BEHIND.search(data, definition.end())
        at = end.start() if end else len(data)
        yield begin, at


# --- values ---


def _number(value: object) -> float | None:
    """A float from a JSON value or a printed number; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _whole(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def _typed(text: str) -> Any:
    """A setting's printed value as bool, int, float or str."""
    text = text.strip()[:MAX_VALUE]
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    number = _number(text) if re.fullmatch(NUMBER, text) and "," not in text else None
    return text if number is None else number


def _digits(text: str) -> int:
    return len(text.partition(".")[2])


# --- lines ---

# A time, a rank or a level in front of a line.
PREFIX = re.compile(
    r"(?:(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?|"
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?|\[?\d{9,11}\.\d+\]?|"
    r"\[\s*\d+(?:\.\d+)?s?\]|\d+\.\d+s?\s*(?=\|)|"
    r"\[?(?:rank|default|worker|node)[ _]?\d+\]?(?=[:\]| ])|"
    r"\[(?:modal|local)\]|\[?(?:INFO|DEBUG)\]?(?=[:\]| -]))"
    r"[ \t]*[:|-]?[ \t]?)+"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NUMBER = r"-?(?:\d[\d,]{0,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"
# Names and gaps are bounded, so that no line takes more time than its length.
PAIR = re.compile(
    r"(?<![\w/.])([A-Za-z_][\w/.]{0,60})[ \t]{0,20}[:=][ \t]{0,20}"
    rf"({NUMBER})(ms|min|m|s|h|%)?(?![\w.])"
)
# The name, the number and, where an arrow follows, the number behind it.
BPB = re.compile(
    r"(?<![\w/.-])([\w/.-]{0,60}?(?:bpb|bits[ _]?per[ _]?byte))[\"']?(?:[ \t]?\([^()]{0,40}\))?"
    rf"[ \t]{{0,20}}(?:[:=][ \t]{{0,20}}|(?=\d\.\d{{3}}))({NUMBER})"
    rf"(?:[ \t]?(?:->|→|=>)[ \t]?({NUMBER}))?(?![\w.]|\.\d)",
    re.IGNORECASE,
)
LOSS = re.compile(rf"(?<![a-zA-Z])(?:val_?|test_)?loss[ \t]{{0,20}}[:=][ \t]{{0,20}}({NUMBER})")
STEP = re.compile(
    r"\[?(?:step|iter|iteration)\s*[:= ]\s*(\d{1,12})(?:\s*/\s*(\d{1,12}))?(?![\w.])(.*)",
    re.IGNORECASE,
)
BARE_STEP = re.compile(r"(\d{1,12})/(\d{1,12})\s+((?:train_|val_)?loss\s*[:=].*)")
CRC = re.compile(r"\bdata_crc:([0-9a-f]{8})\b")
BYTES = re.compile(
    r"(Serialized model|Code size|Total submission size|Total submission|Raw model|artifact_bytes|"
    r"budget|[\w.+-]{1,40} model)(?: ?\(?([\w+.-]{1,40})\)?)?\s*:\s*(\d[\d,]{0,20})(?: bytes)?"
    r"(?![\w.])"
)
STOP = re.compile(r"(?:stopping_early|early_?stop\w*)\s*[:=]\s*(\S+)")
WORDS = re.compile(r"[a-z_]\w*[:=]\S+(?:\s+[a-z_]\w*[:=]\S+)*\s*$")
SETTING = re.compile(r"([a-z_]\w*):(?:\s+(.*?))?\s*$")
GPU = re.compile(r"\|\s+\d+\s+((?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b[^|]*?)\s+(?:On|Off|N/A)\s+\|")
VERSION = re.compile(r"(?:Running )?(Python|PyTorch)[: ]+(\d[\w.+]*)")
RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*))?$")
LINE = re.compile(rb"[^\n]{4,}")  # shorter ones say nothing
RULE = re.compile(r"={20,}\s*$")
TIME_MS = {"ms": 1.0, "": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6}
# Names of lines, not of settings.
NOT_SETTINGS = re.compile(
    r"(?:\w+_)?warmup_step|step|error|warning|logs|peak|input|val_bpb|val_progress|https?|trace|"
    r"timing_breakdown|(?:train|val)_(?:io|loader)|shards|sdp_backends|val_stage_time_ms|data_verify"
)
NUMBERS = ("world_size", "grad_accum_steps", "model_params", "train_shards", "val_tokens", "seed")


def _time_ms(pairs: dict[str, tuple[str, str]], *names: str) -> float | None:
    """The first of `names` in milliseconds, whatever its unit."""
    for name in names:
        if name in pairs and pairs[name][1] != "%":
            value = _number(pairs[name][0])
            return None if value is None else value * TIME_MS[pairs[name][1]]
    return None


def _pairs(text: str) -> dict[str, tuple[str, str]]:
    return {name: (value, unit) for name, value, unit in PAIR.findall(text)}


class _Reader:
    """A file's lines into its runs, one line at a time."""

    def __init__(self, log: Logs, path: str, data: bytes) -> None:
        self.log, self.run, self.opened = log, Run(path), set()
        self.data, self.position = data, 0
        self.problem_count = 0
        self.previous, self.traceback = "", False
        self.in_block = False  # the indented settings under `Hyperparameters:`

    def read(self) -> None:
        at = 0
        for begin, end in scripts(self.data):
            self.lines(at, begin)
            self.position, self.previous, at = begin, "", end
            self.open("script")
            if end < len(self.data):
                # Printing added one line end to the script's own.
                self.run.source = self.data[begin:end].removesuffix(b"\n")
            else:
                self.problem("the log ends inside the script's text")
        self.lines(at, len(self.data))
        self.finish()

    def lines(self, at: int, end: int) -> None:
        for found in LINE.finditer(self.data, at, end):
            self.position, stop = found.span()
            raw = self.data[self.position : min(stop, self.position + MAX_LINE)]
            self.raw_line(raw, stop == len(self.data))

    def raw_line(self, raw: bytes, cut: bool) -> None:
        text = ANSI.sub("", raw.decode("utf-8", "replace")).rstrip()
        if text == self.previous:
            return
        self.previous = text
        if text[:1] in "[0123456789rdwnID" and (prefix := PREFIX.match(text)):
            text = text[prefix.end() :]
        self.text_line(text, cut)

    def finish(self) -> None:
        self.close()
        log = self.log
        if self.problem_count > MAX_PROBLEMS:
            log.problems.append(f"{self.problem_count - MAX_PROBLEMS} more lines like these")
        log.runs = _joined(log.runs)
        for number, run in enumerate(log.runs, 1):
            run.number = number
        if not log.runs:
            log.problems.append("no training log: no line of one was found")

    def problem(self, words: str) -> None:
        self.problem_count += 1
        if self.problem_count <= MAX_PROBLEMS:
            number = self.data.count(b"\n", 0, self.position) + 1
            self.log.problems.append(f"line {number}: {words}")

    def open(self, kind: str) -> None:
        """A line that begins a run: a new one if this run has had such a line, or has trained."""
        if kind in self.opened or self.run.steps or self.run.validations or self.run.scores:
            self.close()
        self.opened.add(kind)

    def close(self) -> None:
        run = self.run
        _settle(run)
        if not run.empty or run.config and not self.log.runs and run.seed is not None:
            self.log.runs.append(run)
        self.run, self.opened = Run(run.path), set()
        self.traceback = self.in_block = False

    # --- text ---

    def text_line(self, text: str, cut: bool) -> None:
        if self.begins(text) or self.failure(text):
            return
        bare = text.lstrip()
        if (found := STEP.match(bare) or BARE_STEP.match(bare)) and "final" not in found[3]:
            self.step_line(found, cut)
        elif found := STOP.match(bare):
            self.stop_line(found[1], bare)
        elif "Size" not in bare and self.result_line(bare, cut):
            pass
        elif BYTES.search(bare):
            for label, codec, digits in BYTES.findall(bare):
                self.add_size(label, codec, int(digits.replace(",", "")))
        elif not self.report_line(bare):
            self.header_line(text)

    def begins(self, text: str) -> bool:
        """Lines that open a run, and the versions and devices that follow."""
        run = self.run
        if text.startswith("val_bpb:enabled"):
            self.open("enabled")
            return False
        if text.startswith("Hyperparameters:"):
            self.open("block")
            self.in_block = True
        elif re.match(r"logs/[^\s]{1,300}\.txt$", text):
            self.open("path")
        elif found := VERSION.match(text):
            if text.startswith("Running Python"):
                self.open("python")
            self.run.versions["python" if found[1] == "Python" else "torch"] = found[2]
        elif found := GPU.match(text):
            run.hardware.setdefault("device", found[1])
            run.hardware["gpus"] = run.hardware.get("gpus", 0) + 1
        else:
            return RULE.match(text) is not None
        return True

    def failure(self, text: str) -> bool:
        run = self.run
        if text.startswith("Traceback (most recent call last)"):
            self.traceback = True
        elif self.traceback and RAISED.match(text):
            run.error, self.traceback = text[:MAX_VALUE], False
        elif text.startswith("error: "):
            run.error = text[7:][:MAX_VALUE]
        else:
            return False
        return True

    def step_line(self, found: re.Match[str], cut: bool) -> None:
        step, rest, pairs = int(found[1]), found[3], _pairs(found[3])
        if cut and rest and not rest.endswith(("ms", "s", "%")) and "tok/s" not in pairs:
            self.problem("the last line is cut off")
            return

        def figure(*names: str) -> float | None:
            return next((_number(pairs[name][0]) for name in names if name in pairs), None)

        time_ms = _time_ms(pairs, "train_time", "t", "time")
        loss = figure("train_loss", "loss", "train/loss")
        if "val_loss" in pairs or "val_bpb" in pairs:
            self.run.partial_val |= "partial_val:1" in rest
            digits = _digits(pairs.get("val_bpb", ("", ""))[0])
            scored = figure("val_loss"), figure("val_bpb")
            self.add(Validation(step, *scored, time_ms, digits))
        elif loss is not None:
            if pairs.get("train_time", ("", ""))[1] in ("m", "min"):
                time_ms = None  # tenths of minutes are too coarse for the time of a step
            crc = CRC.search(rest)
            self.add(Step(step, loss, time_ms, crc[1] if crc else None))
        elif re.search(r"(?:train|val)_loss|val_bpb", rest) and "None" not in rest:
            self.problem(f"a step without a readable loss: {found[0][:80]}")

    def add(self, line: Step | Validation) -> None:
        """The last line of a step counts."""
        self.rewind(line.step)
        lines = self.run.steps if isinstance(line, Step) else self.run.validations
        if lines and lines[-1].step == line.step:
            lines.pop()
        lines.append(line)

    def rewind(self, step: int) -> None:
        """A step number that goes back: from the start it is another run, else the run went on
        from there."""
        run = self.run
        last = max([-1, *(s.step for s in run.steps[-1:]), *(v.step for v in run.validations[-1:])])
        if step >= last:
            return
        if step <= 1 or run.scores:
            self.close()
            return
        run.resumed_at.append(step)
        run.steps = [s for s in run.steps if s.step < step]
        run.validations = [v for v in run.validations if v.step < step]

    def stop_line(self, reason: str, text: str) -> None:
        run, time_ms = self.run, _time_ms(_pairs(text), "train_time")
        run.stopped_early = reason[:MAX_VALUE]
        run.train_time_ms = run.train_time_ms if time_ms is None else time_ms
        if step := re.search(r"\bstep:\s*(\d{1,12})", text):
            run.stop_step = int(step[1])

    def result_line(self, text: str, cut: bool) -> bool:
        """A line with bits per byte, after training or while it is evaluated."""
        found = list(BPB.finditer(text))
        if not found or text.startswith("val_bpb:byte_sidecar"):
            if re.search(r"\bval_bpb[:=](?!enabled|byte)", text):
                self.problem(f"a result without a readable val_bpb: {text[:80]}")
                return True
            return False
        last = found[-1]
        digits = _digits(last[3] or last[2])
        if cut and last.end() == len(text) and digits < (8 if "_exact" in text else 4):
            self.problem("the last line is cut off")
            return True
        first_kind, at = None, 0
        for one in found:
            front, at = text[at : one.start()], one.end()
            kind = self.kind_of(front + one[1], text if len(found) == 1 else "")
            kind = first_kind if kind == "other" and first_kind in SUBMITTED else kind
            first_kind = first_kind or kind
            if first_kind == "progress":
                break
            self.result(kind, front, one, text)
        return True

    def result(self, kind: str, front: str, found: re.Match[str], text: str) -> None:
        printed = found[3] or found[2]
        value, loss = _number(printed), LOSS.search(text)
        if (
            kind == "progress"
            or len(front) > MAX_VALUE
            or value is None
            or value <= 0
            or value > 30
        ):
            return
        words = re.split(r"(?:\b(?:val_loss|stride|sliding val_loss)\b\s*[:=]|$)", front)[0]
        tag = words.strip(" :=|-,;([{\"'") or found[1]
        eval_ms = _time_ms(_pairs(text), "eval_time", "elapsed", "time")
        figures = loss and _number(loss[1]), value, eval_ms, _digits(printed)
        self.run.partial_val |= "partial_val:1" in text
        self.add_score(Score(kind, tag.removesuffix("_exact"), *figures))

    def kind_of(self, name: str, line: str) -> str:
        kind = score_kind(name)
        if kind in ("roundtrip", "sliding", "other"):
            later = score_kind(line)  # such as eval_mode:online_ttt behind the number
            kind = later if later in ("sliding", "ttt") else kind
        return kind

    def add_score(self, score: Score) -> None:
        """A result. The same one again, in more digits or under another name, completes the first;
        it comes last where it is called final."""
        scores = self.run.scores
        old = next((old for old in reversed(scores) if _same_result(old, score)), None)
        if old is None:
            scores.append(score)
            return
        if old.digits is not None and (score.digits is None or score.digits > old.digits):
            old.val_bpb, old.digits = score.val_bpb, score.digits
            if score.val_loss is not None:
                old.val_loss = score.val_loss
        old.eval_ms = score.eval_ms if old.eval_ms is None else old.eval_ms
        if score.tag.lower().startswith(("final", "val_bpb")) and score.kind in SUBMITTED:
            scores.remove(old)
            scores.append(old)

    def add_size(self, label: str, codec: str, count: int) -> None:
        sizes = self.run.sizes
        if label == "Code size" and codec == "compressed":
            sizes.packed_code = count
        elif label == "Code size":
            sizes.code = count
        elif label == "Raw model" or label == "Serialized model" and not codec:
            sizes.model = count
        elif label.startswith("Total") or label == "budget":
            raw = not codec and sizes.model is not None and count >= sizes.model
            sizes.total = sizes.total if raw else count
        elif label == "artifact_bytes":
            sizes.total = sizes.total if sizes.total is not None else count
        else:
            sizes.artifact = count

    def report_line(self, text: str) -> bool:
        """The lines on time, memory and input behind training."""
        run = self.run
        if text.startswith("timing_train_loop_ms"):
            pairs = _pairs(text)
            run.train_time_ms = _time_ms(pairs, "timing_train_loop_ms")
            run.val_total_ms = _time_ms(pairs, "timing_val_total_ms")
        elif found := re.match(r"peak memory allocated: (\d{1,12}) MiB", text):
            run.peak_mib = int(found[1])
        elif found := re.match(
            r"input_wait .*?\b(?:percent|share):([\d.]{1,12})%? .*?epochs:([\d.]{1,18})", text
        ):
            run.input_wait_percent, run.epochs = (_number(word) for word in found.groups())
        elif found := re.match(r"artifact:[\d.]{1,12}MB .*\bcode:(\d{1,12})", text):
            run.sizes.code = int(found[1])
        elif found := re.match(r"total_eval_time:\s*([\d.]{1,18})s", text):
            run.eval_total_ms = 1e3 * (_number(found[1]) or 0)
        else:
            return False
        return True

    def header_line(self, text: str) -> None:
        """Settings, in the lines before the first step: words of key:value, or an indented block
        of `key: value`."""
        run, bare = self.run, text.strip()
        trained = run.steps or run.scores or run.sizes != Sizes()
        if trained or re.match(r"(?:\w+_)?warmup_\w*step|(?:train|val)_io:|sdp_backends:", bare):
            return
        if not self.stated_line(bare):
            if WORDS.match(bare):
                for name, value in re.findall(r"\b([a-z_]\w{0,60})[:=](\S+)", bare):
                    self.setting(name, value)
            elif (found := SETTING.match(bare)) and (
                self.in_block and text != bare or " " not in (found[2] or "")
            ):
                self.setting(found[1], found[2] or "")

    def stated_line(self, bare: str) -> bool:
        """The challenge's own lines on data."""
        run = self.run
        if found := re.match(r"train_loader:dataset:(\S+)(?: train_shards:(\d{1,9}))?", bare):
            run.dataset, run.train_shards = found[1][:MAX_VALUE], _whole(found[2])
        elif found := re.match(r"val_loader:.*?\btokens:\s*(\d{1,15})", bare):
            run.val_tokens = int(found[1])
            run.partial_val |= "partial_val:1" in bare
        else:
            return False
        return True

    def setting(self, name: str, value: str) -> None:
        run, value = self.run, value.strip()
        if NOT_SETTINGS.fullmatch(name) or "//" in value or value == "" and not self.in_block:
            return
        if name in NUMBERS:
            number = _whole(value)
            if number is None:
                self.problem(f"{name} is not a number: {value[:40]}")
                return
            if name == "seed" and run.seed not in (None, number):
                self.problem(f"seed {number} in a run that began with seed {run.seed}")
            setattr(run, name, number)
            if name in ("world_size", "model_params", "train_shards", "val_tokens"):
                return
        elif name == "datasets_dir" and value:
            run.dataset = Path(value).name
        run.config[name] = _typed(value)


def _same_result(old: Score, new: Score) -> bool:
    """Equal as far as both were printed, to four decimals at least; a summary may have fewer."""
    if (old.kind in SUBMITTED) != (new.kind in SUBMITTED):
        return False
    if old.val_bpb == new.val_bpb and old.tag == new.tag:
        return True
    printed = [digits for digits in (old.digits, new.digits) if digits is not None]
    coarse = min(printed, default=12)
    if coarse < (2 if coarse == new.digits else 4):
        return False
    return abs(old.val_bpb - new.val_bpb) <= 0.51 * 10.0**-coarse


def _settle(run: Run) -> None:
    """What follows from the lines once a run is complete."""
    lines = [x for x in (*run.steps[-1:], *run.validations[-1:]) if x.train_time_ms is not None]
    if run.train_time_ms is None and lines:
        run.train_time_ms = max(lines, key=lambda line: line.step).train_time_ms
    times = {s.step: s.train_time_ms for s in run.steps} | {run.last_step: run.train_time_ms}
    for validation in run.validations:
        validation.train_time_ms = validation.train_time_ms or times.get(validation.step)
    sizes = run.sizes
    if sizes.artifact is None and None not in (sizes.total, sizes.code):
        sizes.artifact = sizes.total - sizes.code
    timed = [score.eval_ms for score in run.scores if score.eval_ms is not None]
    if run.eval_total_ms is None and timed:
        run.eval_total_ms = sum(timed)
    tied = run.config.get("tie_embeddings") is True and "vocab_size" not in run.config
    if tied and "embed_lr" in run.config:
        # The header prints the rate in effect: with tied embeddings TIED_EMBED_LR, no HEAD_LR.
        run.config["tied_embed_lr"] = run.config.pop("embed_lr")
        run.config.pop("head_lr", None)
    if run.status == "unfinished" and run.error:
        run.status = "interrupted" if "nterrupt" in run.error else "failed"
    scored = run.status == "failed" and run.sizes.total is not None
    if run.headline and (run.status == "unfinished" or scored):
        run.status = "finished"


def _joined(runs: list[Run]) -> list[Run]:
    """One run are: a console and a log in one file, a run and an evaluation started behind it."""
    result: list[Run] = []
    for run in runs:
        old = result[-1] if result else Run(run.path)
        lines = [[(s.step, s.train_loss, s.train_time_ms) for s in one.steps] for one in (old, run)]
        if old.steps and lines[0] == lines[1] and old.seed == run.seed:
            result[-1] = run if run.source or not old.source else old  # the console has no source
        elif old.steps and not (run.steps or run.validations) and run.seed in (None, old.seed):
            old.scores += run.scores
            old.status = run.status
        else:
            result.append(run)
    return result
