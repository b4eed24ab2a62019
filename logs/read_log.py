"""Reads training logs of the parameter-golf family: a Run for each run, and in words what could
not be read.

    from read_log import read_logs
    logs = read_logs(["logs/", "train_seed42.log"])
    for run in logs.runs: print(run.name, run.seed, run.last_step, run.headline)
    for problem in logs.problems: print(problem)

Understood: text logs of the challenge's script and its descendants, ours among them: lines of
`key:value`, `key: value` or `key=value`, times in ms, s or m, something in front of each line (a
time, [rank0]:, a level), the script's text anywhere, several runs behind each other, a log that
ends anywhere. Of our <RUN_ID>.jsonl only what <RUN_ID>.txt does not print is read: all settings.
A damaged file raises nothing, and nothing that it contains is executed. At most
`max_bytes` of a file are read: of a larger one the first and the last half.
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

MAX_BYTES = 64 << 20  # read of one file
MAX_LINE = 1 << 12  # characters of one line
MAX_HEADER = 20_000  # lines looked at for settings
MAX_PROBLEMS = 20  # named of one file; the others are counted
MAX_SETTINGS, MAX_VALUE, MAX_SCORES = 500, 400, 500  # of one run; MAX_VALUE: characters
LOG_SUFFIXES = {".txt", ".log"}
SHARD_TOKENS = 100_000_000  # of the published shards: epochs are estimated where a log says none
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
        r"(^|[\W_])(post[-_ ]?)?(ema|swa|lawa|raw)\b)",
    ),
    ("pre_quant", r"pre[-_ ]?quant|un-?quant"),
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
    iterations: int | None = None
    train_loss: float | None = None  # nats a token
    train_time_ms: float | None = None  # training since its start
    step_avg_ms: float | None = None
    tok_s: float | None = None
    input_wait_percent: float | None = None
    data_crc: str | None = None


@dataclass(slots=True)
class Validation:
    """A validation while training."""

    step: int
    iterations: int | None = None
    val_loss: float | None = None  # nats a token
    val_bpb: float | None = None
    train_time_ms: float | None = None
    val_ms: float | None = None
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
    loss_digits: int | None = None


@dataclass(slots=True)
class Sizes:
    """Bytes, as the log states them; the last statement counts, `stated` has every one."""

    model: int | None = None  # the raw model
    code: int | None = None  # the script as it is
    packed_code: int | None = None  # as compressed for the artifact, where a log knows both
    artifact: int | None = None  # the compressed model
    total: int | None = None  # what is held against the cap
    codec: str | None = None  # such as int8+zlib
    stated: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepTimes:
    """Milliseconds a step. Percentiles and maximum are of the means between two training lines,
    weighted by steps."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    widest: int = 0  # steps between two lines, at most: 1 means that each step was timed


@dataclass
class Run:
    """What one run left in a log. None, or an empty collection: the log does not say."""

    path: str
    number: int = 1  # of the runs in its file, from 1
    run_id: str | None = None
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    versions: dict[str, str] = field(default_factory=dict)  # python, torch, cuda, driver, nccl
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
    tokens_seen: int | None = None
    epochs: float | None = None
    input_wait_percent: float | None = None  # of training time
    peak_mib: int | None = None
    source_bytes: int | None = None  # of the script's text inside the log
    source_sha256: str | None = None
    resumed_at: list[int] = field(default_factory=list)  # first step of each continuation
    partial_val: bool = False  # scored on a part of the validation split
    status: str = "unfinished"  # finished, failed, interrupted, nonfinite, unfinished
    error: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return Path(self.path).name + (f"#{self.number}" if self.number > 1 else "")

    @property
    def seed_in_name(self) -> int | None:
        found = re.search(r"seed[_-]?(\d{1,9})", Path(self.path).name, re.IGNORECASE)
        return int(found[1]) if found else None

    @property
    def last_step(self) -> int:
        lines = (*self.steps[-1:], *self.validations[-1:])
        return max([0, self.stop_step or 0, *(line.step for line in lines)])

    @property
    def iterations(self) -> int | None:
        lines = (*self.steps[-1:], *self.validations[-1:])
        stated = [line.iterations for line in lines if line.iterations is not None]
        return stated[0] if stated else _whole(self.config.get("iterations"))

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
        figures = (last.val_loss, last.val_bpb, last.val_ms, last.digits, last.digits)
        return Score("pre_quant", "validation", *figures)

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
        return StepTimes(mean, middle, late, each[-1], max(count for _, count in parts))

    def tokens(self) -> int | None:
        """Tokens trained on: stated, else steps times tokens a step."""
        batch = _whole(self.config.get("train_batch_tokens"))
        if self.tokens_seen is not None or batch is None:
            return self.tokens_seen
        return self.last_step * batch

    def epochs_seen(self) -> float | None:
        """Passes over the training shards: stated, else estimated for the published shards."""
        tokens = self.tokens()
        if self.epochs is not None or tokens is None or not self.train_shards:
            return self.epochs
        if "fineweb" not in (self.dataset or "").lower():
            return None
        return tokens / (self.train_shards * SHARD_TOKENS)

    def crc_at(self) -> dict[int, str]:
        """data_crc of each logged step."""
        return {s.step: s.data_crc for s in self.steps if s.data_crc is not None}

    @property
    def empty(self) -> bool:
        told = self.steps or self.validations or self.scores or self.sizes.stated or self.error
        return not told and self.status == "unfinished"


@dataclass
class LogFile:
    """A file's runs, in order, and what of it could not be read."""

    path: str
    bytes: int = 0
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Logs:
    """Several files, all their runs, and the problems, each with its file."""

    files: list[LogFile] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]], *, max_bytes: int = MAX_BYTES) -> Logs:
    """Files, and folders of .txt and .log files (not deeper). For a .jsonl its .txt is read."""
    result, seen = Logs(), set()
    for given in _expand(paths, result.problems):
        path = given.removesuffix(".jsonl") + ".txt" if given.endswith(".jsonl") else given
        real = os.path.realpath(path)
        if real in seen and path == given:
            result.problems.append(f"{path}: named twice: read once")
        if real in seen:
            continue
        seen.add(real)
        log = read_log(path, max_bytes=max_bytes)
        result.files.append(log)
        result.runs += log.runs
        result.problems += [f"{path}: {problem}" for problem in log.problems]
    return result


def read_log(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> LogFile:
    """One file. Never raises for what the file is or contains: LogFile.problems says it."""
    log = LogFile(os.fspath(path))
    try:
        data, log.bytes = _load(Path(path), max_bytes)
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    if data[:2] == b"\x1f\x8b" or data[:4] in (b"PK\x03\x04", b"\x89PNG"):
        log.problems.append("not a text file (compressed, or an image): name the log itself")
        return log
    if log.bytes > max_bytes:
        half = max_bytes // 2
        log.problems.append(f"{log.bytes:,} bytes: only the first and the last {half:,} were read")
    reader = _Reader(log)
    reader.feed(_as_utf8(data))
    reader.finish()
    if len(log.runs) == 1:
        add_events(log.runs[0], Path(path).with_suffix(".jsonl"))
    return log


def add_events(run: Run, path: Path) -> None:
    """What the events of our own trainer say that its text does not: all settings, the machine, and
    how the run ended. Events of another seed's run, and damaged ones, are left out."""
    try:
        lines = _load(path, MAX_BYTES)[0].decode("utf-8", "replace").splitlines()
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
        run.status = str(end.get("status"))
        run.error = _text(end.get("error"))


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
            if one.suffix in LOG_SUFFIXES
            and one.name not in ("requirements.txt", "README.txt")
            and one.is_file()
        )
        if not found:
            problems.append(f"{path}: a folder without .txt or .log files: name the logs")
        yield from found


def _load(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """The file's bytes, of a large one both ends, and its size. A pipe is refused unopened."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    with open(path, "rb") as file:
        if about.st_size <= max_bytes:
            return file.read(max_bytes), about.st_size
        half = max_bytes // 2
        head = file.read(half)
        file.seek(-half, os.SEEK_END)
        tail = file.read(half)
    return head[: head.rfind(b"\n") + 1] + tail[tail.find(b"\n") + 1 :], about.st_size


def _as_utf8(data: bytes) -> bytes:
    """Without a byte-order mark; UTF-16 (of some shells) and carriage returns made plain."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    data = data.removeprefix(b"\xef\xbb\xbf")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


# --- the script's text inside a log ---

SCRIPT_START = re.compile(
    rb"^(?:import [\w.]+(?: as \w+)?(?:, ?[\w., ]+)?\s*(?:#[^\n]*)?$|from [\w.]+ import [\w(]|#!/|"
    rb"[rR]?\"\"\"|[rR]?'''|(?P<inside>(?:def|class) \w+[(:]))",
    re.MULTILINE,
)
# A rule of ====, or the first lines of a log.
SCRIPT_END = re.compile(
    rb"^(?:={20,}[ \t]*$|logs/[^\n]{1,300}\.txt[ \t]*$|val_bpb:enabled |Running Python |"
    rb"Hyperparameters:[ \t]*$)",
    re.MULTILINE,
)
DEFINITION = re.compile(rb"^(?:def|class) \w", re.MULTILINE)
MAX_TRIES = 50  # starts and ends of scripts looked at in one log


def scripts(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whole) of each script's text in a log; whole: with its beginning, and a rule
    behind it. Printing added one line end to the script's own."""
    at, tries = 0, 0
    while tries < MAX_TRIES and (start := SCRIPT_START.search(data, at)):
        tries += 1
        begin, end = start.start(), len(data)
        for found, _ in zip(SCRIPT_END.finditer(data, begin), range(MAX_TRIES), strict=False):
            if _ends_script(data, begin, found):
                end = found.start()
                break
        rule = data[end : end + 1] == b"="
        if not rule and not DEFINITION.search(data, begin, end):
            at = start.end()
            continue
        yield _leading_lines(data, at, begin), end, rule and not start["inside"]
        at = end


def embedded_source(data: bytes) -> bytes | None:
    """The text of the script that a log holds, exactly; None: it holds none that is whole."""
    spans = (data[begin:end].removesuffix(b"\n") for begin, end, whole in scripts(data) if whole)
    return next(spans, None)


def _ends_script(data: bytes, begin: int, end: re.Match[bytes]) -> bool:
    """A rule inside a script (in its docstring) is followed by more of it, the one behind it by
    versions."""
    if end[0][:1] != b"=":
        return DEFINITION.search(data, begin, end.start()) is not None
    behind = data[end.end() + 1 : end.end() + 400]
    return b"Running Py" in behind or not SCRIPT_START.search(behind)


def _leading_lines(data: bytes, floor: int, begin: int) -> int:
    """Where the comments, strings and empty lines in front of `begin` start."""
    while begin > floor:
        previous = data.rfind(b"\n", floor, begin - 1) + 1 or floor
        line = data[previous:begin].strip()
        if line and line[:1] not in b"#\"'":
            break
        begin = previous
    return begin


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


def _text(value: object) -> str | None:
    return str(value)[:MAX_VALUE] if value else None


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
DRIVER = re.compile(r"NVIDIA-SMI.*Driver Version:\s*([\d.]+)\s+CUDA Version:\s*([\d.]+)")
VERSION = re.compile(r"(?:Running )?(Python|PyTorch)[: ]+(\d[\w.+]*)")
RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*))?$")
LINE = re.compile(rb"[^\n]{4,}")  # shorter ones say nothing
RULE = re.compile(r"={20,}\s*$")
TIME_MS = {"ms": 1.0, "": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6}
# Names of lines, not of settings.
NOT_SETTINGS = re.compile(
    r"(?:\w+_)?warmup_step|step|error|warning|logs|peak|input|val_bpb|val_progress|https?|trace|"
    r"timing_breakdown|(?:train|val)_(?:io|loader)|shards|sdp_backends|overlappable|data_verify"
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

    def __init__(self, log: LogFile) -> None:
        self.log, self.run, self.opened = log, Run(log.path), set()
        self.data, self.position = b"", 0
        self.problem_count, self.broken_lines, self.header_lines = 0, 0, 0
        self.previous, self.mode = "", ""
        self.traceback = False
        self.in_block = False  # the indented settings under `Hyperparameters:`

    def feed(self, data: bytes) -> None:
        self.data, at = data, 0
        for begin, end, whole in scripts(data):
            self.lines(at, begin)
            self.script(begin, end, whole)
            at = end
        self.lines(at, len(data))

    def script(self, begin: int, end: int, whole: bool) -> None:
        self.position = begin
        self.open("script")
        if whole:
            text = self.data[begin:end].removesuffix(b"\n")
            self.run.source_bytes = len(text)
            self.run.source_sha256 = hashlib.sha256(text).hexdigest()
        elif end == len(self.data):
            self.problem("the log ends inside the script's text")
        self.previous = ""

    def lines(self, at: int, end: int) -> None:
        for found in LINE.finditer(self.data, at, end):
            self.position, stop = found.span()
            raw = self.data[self.position : min(stop, self.position + MAX_LINE)]
            self.raw_line(raw, stop == len(self.data))

    def raw_line(self, raw: bytes, cut: bool) -> None:
        text = raw.decode("utf-8", "replace")
        self.broken_lines += "\ufffd" in text
        text = ANSI.sub("", text).rstrip()
        if text == self.previous:
            return
        self.previous = text
        if text[:1] in "[0123456789rdwnID" and (prefix := PREFIX.match(text)):
            text = text[prefix.end() :]
        self.text_line(text, cut)

    def finish(self) -> None:
        self.close()
        log = self.log
        if self.broken_lines:
            log.problems.append(f"{self.broken_lines} lines are not UTF-8")
        if self.problem_count > MAX_PROBLEMS:
            log.problems.append(f"{self.problem_count - MAX_PROBLEMS} more lines like these")
        log.runs = _joined(log.runs)
        for number, run in enumerate(log.runs, 1):
            run.number = number
        if not log.runs:
            words = "no training log: no line of one was found" if log.bytes else "empty"
            log.problems.append(words)

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
        self.run, self.opened, self.mode = Run(self.log.path), set(), ""
        self.traceback = self.in_block = False
        self.header_lines = 0

    # --- text ---

    def text_line(self, text: str, cut: bool) -> None:
        if self.begins(text) or self.failure(text):
            return
        bare = text.lstrip()
        if found := re.match(r"val_stage_time_ms:\s*([\d.]+)ms step:\s*(\d{1,12})", bare):
            if self.run.validations and self.run.validations[-1].step == int(found[2]):
                self.run.validations[-1].val_ms = _number(found[1])
        elif (found := STEP.match(bare) or BARE_STEP.match(bare)) and "final" not in found[3]:
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
            self.run.run_id = Path(text).stem
        elif found := VERSION.match(text):
            if text.startswith("Running Python"):
                self.open("python")
            self.run.versions["python" if found[1] == "Python" else "torch"] = found[2]
        elif found := GPU.match(text):
            run.hardware.setdefault("device", found[1])
            run.hardware["gpus"] = run.hardware.get("gpus", 0) + 1
        elif found := DRIVER.search(text):
            run.versions.update(driver=found[1], driver_cuda=found[2])
        elif found := re.match(r"NCCL version ([\w.+]+)", text):
            run.versions["nccl"] = found[1]
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
        elif text.startswith(("warning: ", "WARNING: ")):
            if len(run.warnings) < MAX_PROBLEMS:
                run.warnings.append(text[9:][:MAX_VALUE])
        else:
            return False
        return True

    def step_line(self, found: re.Match[str], cut: bool) -> None:
        step, rest = int(found[1]), found[3]
        iterations = int(found[2]) if found[2] else None
        pairs = _pairs(rest)
        if cut and rest and not rest.endswith(("ms", "s", "%")) and "tok/s" not in pairs:
            self.problem("the last line is cut off")
            return

        def figure(*names: str) -> float | None:
            return next((_number(pairs[name][0]) for name in names if name in pairs), None)

        time_ms = _time_ms(pairs, "train_time", "t", "time")
        if "val_loss" in pairs or "val_bpb" in pairs:
            self.run.partial_val |= "partial_val:1" in rest
            digits = _digits(pairs.get("val_bpb", ("", ""))[0])
            scored = figure("val_loss"), figure("val_bpb")
            self.add_validation(Validation(step, iterations, *scored, time_ms, None, digits))
            return
        loss = figure("train_loss", "loss", "train/loss")
        if loss is None:
            if re.search(r"(?:train|val)_loss|val_bpb", rest) and "None" not in rest:
                self.problem(f"a step without a readable loss: {found[0][:80]}")
            return
        average, speed = figure("step_avg", "avg"), figure("tok_s", "tok/s")
        if pairs.get("train_time", ("", ""))[1] in ("m", "min"):
            time_ms = self.finer_time(step, speed, time_ms)
            average = time_ms / step if step else average
        crc = CRC.search(rest)
        times = time_ms, average, speed, figure("input_wait")
        self.add_step(Step(step, iterations, loss, *times, crc[1] if crc else None))

    def finer_time(self, step: int, tok_s: float | None, time_ms: float) -> float:
        """Tenths of minutes are coarse: where tokens a second so far agree with them, the time
        follows from those."""
        batch = _number(self.run.config.get("train_batch_tokens"))
        if not batch or not tok_s:
            return time_ms
        finer = 1e3 * step * batch / tok_s
        return finer if abs(finer - time_ms) <= 3_100 else time_ms

    def add_step(self, line: Step) -> None:
        self.rewind(line.step)
        steps = self.run.steps
        if steps and steps[-1].step == line.step:
            steps[-1] = line
            return
        steps.append(line)

    def add_validation(self, line: Validation) -> None:
        self.rewind(line.step)
        validations = self.run.validations
        if validations and validations[-1].step == line.step:
            line.val_ms = line.val_ms if line.val_ms is not None else validations[-1].val_ms
            validations[-1] = line
            return
        validations.append(line)

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
        if len(run.resumed_at) < MAX_PROBLEMS:
            run.resumed_at.append(step)
        run.steps = [s for s in run.steps if s.step < step]
        run.validations = [v for v in run.validations if v.step < step]

    def stop_line(self, reason: str, text: str) -> None:
        self.run.stopped_early = reason[:MAX_VALUE]
        time_ms = _time_ms(_pairs(text), "train_time")
        self.run.train_time_ms = time_ms if time_ms is not None else self.run.train_time_ms
        if step := re.search(r"\bstep:\s*(\d{1,12})", text):
            self.run.stop_step = int(step[1])

    def result_line(self, text: str, cut: bool) -> bool:
        """A line with bits per byte, after training or while it is evaluated."""
        if found := re.match(r"final_eval_mode:\s*(\w+)", text):
            self.mode = found[1]
            return True
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
            or value is None
            or value <= 0
            or value > 30
            or len(front) > MAX_VALUE
        ):
            return
        words = re.split(r"(?:\b(?:val_loss|stride|sliding val_loss)\b\s*[:=]|$)", front)[0]
        tag = words.strip(" :=|-,;([{\"'") or found[1]
        eval_ms = _time_ms(_pairs(text), "eval_time", "elapsed", "time")
        digits = _digits(printed), _digits(loss[1]) if loss else None
        figures = loss and _number(loss[1]), value, eval_ms, *digits
        self.run.partial_val |= "partial_val:1" in text
        self.add_score(Score(kind, tag.removesuffix("_exact"), *figures))

    def kind_of(self, name: str, line: str) -> str:
        kind = score_kind(name)
        if kind in ("roundtrip", "sliding", "other"):
            later = score_kind(line)  # such as eval_mode:online_ttt behind the number
            kind = later if later in ("sliding", "ttt") else kind
        return "sliding" if kind == "roundtrip" and self.mode.startswith("sliding") else kind

    def add_score(self, score: Score) -> None:
        """A result. The same one again, in more digits or under another name, completes the first;
        it comes last where it is called final."""
        scores = self.run.scores
        old = next((old for old in reversed(scores) if _same_result(old, score)), None)
        if old is None:
            if len(scores) < MAX_SCORES:
                scores.append(score)
            return
        if old.digits is not None and (score.digits is None or score.digits > old.digits):
            old.val_bpb, old.digits = score.val_bpb, score.digits
            if score.val_loss is not None:
                old.val_loss, old.loss_digits = score.val_loss, score.loss_digits
        old.eval_ms = score.eval_ms if old.eval_ms is None else old.eval_ms
        if score.tag.lower().startswith(("final", "val_bpb")) and score.kind in SUBMITTED:
            scores.remove(old)
            scores.append(old)

    def add_size(self, label: str, codec: str, count: int) -> None:
        sizes = self.run.sizes
        if len(sizes.stated) < 100:
            sizes.stated.append((f"{label} {codec}".strip(), count))
        if label == "Code size":
            if codec == "compressed":
                sizes.packed_code = count
            else:
                sizes.code = count
        elif label == "Raw model" or label == "Serialized model" and not codec:
            sizes.model = count
        elif label.startswith("Total") or label == "budget":
            raw = not codec and sizes.model is not None and count >= sizes.model
            sizes.total = sizes.total if raw else count
        elif label == "artifact_bytes":
            sizes.total = sizes.total if sizes.total is not None else count
        else:
            sizes.artifact, sizes.codec = count, codec or label.removesuffix(" model")

    def report_line(self, text: str) -> bool:
        """The lines on time, memory and input behind training."""
        run = self.run
        if text.startswith("timing_train_loop_ms"):
            pairs = _pairs(text)
            run.train_time_ms = _time_ms(pairs, "timing_train_loop_ms")
            run.val_total_ms = _time_ms(pairs, "timing_val_total_ms")
        elif found := re.match(r"peak memory allocated: (\d{1,12}) MiB", text):
            run.peak_mib = int(found[1])
        elif found := re.match(r"(?:input: )?input cost ([\d.]{1,12}) ?% of training", text):
            run.input_wait_percent = run.input_wait_percent or _number(found[1])
        elif found := re.match(
            r"input_wait .*?\b(?:percent|share):([\d.]{1,12})%? .*?epochs:([\d.]{1,18})", text
        ):
            run.input_wait_percent, run.epochs = (_number(word) for word in found.groups())
        elif found := re.match(r"tokens_seen:(\d{1,18})(?: epochs:([\d.]{1,18}))?", text):
            run.tokens_seen, run.epochs = int(found[1]), _number(found[2])
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
        self.header_lines += 1
        trained = run.steps or run.scores or run.sizes.stated
        if self.header_lines > MAX_HEADER or trained or re.match(r"(?:\w+_)?warmup_\w*step", bare):
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
        """The challenge's own lines on data, attention and, in our logs, overlap."""
        run = self.run
        if bare.startswith(("train_io:", "val_io:")):
            room, _, words = bare.partition(":")
            for name, value in re.findall(r"\b(\w{1,60}):(\S+)", words):
                self.setting(f"{room}.{name}", value)
        elif found := re.match(r"train_loader:dataset:(\S+)(?: train_shards:(\d{1,9}))?", bare):
            run.dataset, run.train_shards = found[1][:MAX_VALUE], _whole(found[2])
        elif found := re.match(r"val_loader:.*?\btokens:\s*(\d{1,15})", bare):
            run.val_tokens = int(found[1])
            run.partial_val |= "partial_val:1" in bare
        elif found := re.match(r"sdp_backends:([\w,]{1,100})$", bare):
            self.setting("sdp.backends", found[1])
        elif bare.startswith(("val_bpb:enabled", "sdp_backends:")):
            for name, value in re.findall(r"\b(\w{1,60})=(\S+)", bare):
                self.setting(name if name.startswith("tokenizer") else f"sdp.{name}", value)
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
            if name in ("model_params", "train_shards", "val_tokens"):
                return
        elif name == "run_id":
            run.run_id = value
        elif name == "datasets_dir" and value:
            run.dataset = Path(value).name
        if len(run.config) < MAX_SETTINGS:
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
    timed = [v.val_ms for v in run.validations]
    if run.val_total_ms is None and timed and None not in timed:
        run.val_total_ms = sum(timed)
    timed = [score.eval_ms for score in run.scores if score.eval_ms is not None]
    if run.eval_total_ms is None and timed:
        run.eval_total_ms = sum(timed)
    if run.input_wait_percent is None:
        run.input_wait_percent = _input_wait(run.steps)
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


def _input_wait(steps: list[Step]) -> float | None:
    """The share of all training time that was spent waiting for input, from those of its parts."""
    told = [s for s in steps if None not in (s.input_wait_percent, s.train_time_ms)]
    if not told or not told[-1].train_time_ms:
        return None
    begins = [0.0, *(s.train_time_ms for s in told)]
    parts = zip(told, begins, strict=False)
    spent = sum(s.input_wait_percent * (s.train_time_ms - begin) for s, begin in parts)
    return spent / told[-1].train_time_ms


def _joined(runs: list[Run]) -> list[Run]:
    """One run are: a run and its continuation, a console and a log in one file, a run and an
    evaluation that was started behind it."""
    result: list[Run] = []
    for run in runs:
        old = result[-1] if result else None
        if old is None:
            result.append(run)
        elif _lines(old) == _lines(run) and old.steps and old.seed == run.seed:
            _merge(run, old)
            result[-1] = run
        elif _continues(old, run):
            first = min(line.step for line in (*run.steps[:1], *run.validations[:1]))
            run.steps[:0] = [s for s in old.steps if s.step < first]
            run.validations[:0] = [v for v in old.validations if v.step < first]
            run.resumed_at = [*old.resumed_at, first, *run.resumed_at]
            run.config = {**old.config, **run.config}
            if run.source_sha256 is None:
                run.source_bytes, run.source_sha256 = old.source_bytes, old.source_sha256
            result[-1] = run
        elif not (run.steps or run.validations) and old.steps and run.seed in (None, old.seed):
            _merge(run, old)
            result[-1] = run
        else:
            result.append(run)
    return result


def _lines(run: Run) -> list[tuple[int, float | None, float | None]]:
    return [(s.step, s.train_loss, s.train_time_ms) for s in run.steps]


def _continues(old: Run, new: Run) -> bool:
    first = min((line.step for line in (*new.steps[:1], *new.validations[:1])), default=0)
    same = old.seed == new.seed and old.run_id == new.run_id
    return 1 < first <= old.last_step + 100_000 and not old.headline and same


def _merge(run: Run, other: Run) -> None:
    """Makes `run` say what `other`, of the same run, says where it is silent; results add up."""
    known = [score for score in other.scores if not any(_same_result(score, s) for s in run.scores)]
    run.scores = known + run.scores
    for name, value in vars(other).items():
        mine = getattr(run, name)
        if isinstance(mine, dict):
            setattr(run, name, {**value, **mine})
        elif mine is None or mine == []:
            setattr(run, name, value)
    if not run.sizes.stated or len(run.sizes.stated) < len(other.sizes.stated):
        run.sizes = other.sizes
    if run.status == "unfinished":
        run.status = other.status
