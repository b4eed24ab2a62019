"""Reads training logs of the parameter-golf family:
one Run record a run, and in words what could not be read.

    from read_log import read_logs
    logs = read_logs(["logs/", "train_seed42.log"])
    for run in logs.runs: print(run.name, run.seed, run.last_step, run.headline)
    for problem in logs.problems: print(problem)

Understood: our <RUN_ID>.jsonl, and text logs of the challenge's script and its descendants: lines
of `key:value` or `key: value` or `key=value`, times in ms, s or m, something in front of each line
(a time, [rank0]:, a level), the script's text at the start or in the middle, several runs behind
each other, a log that ends anywhere. A damaged file raises nothing. The text of the script is no
log: its lines are left out, its length and SHA-256 are kept. Nothing that a log contains is ever
executed. At most `max_bytes` of a file are read: of a larger one the first and the last half.
"""

import bisect
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20  # read of one file
MAX_EVENT, MAX_LINE = 1 << 16, 1 << 12  # bytes of one JSON line, of any other
MAX_HEADER = 20_000  # lines looked at for settings
MAX_RULES = 8  # rules of ==== looked at inside one script
MAX_POINTS = 200_000  # training lines kept of one run; of more, every second one is left out
MAX_PROBLEMS = 20  # named of one file; the others are counted
# Settings of a run, characters of a value, results of a run.
MAX_SETTINGS, MAX_VALUE, MAX_SCORES = 500, 400, 200
LOG_SUFFIXES = {".txt", ".log", ".jsonl"}
# Of the published shards: what epochs are estimated from where a log does not say.
SHARD_TOKENS = 100_000_000
KINDS = ("pre_quant", "roundtrip", "sliding", "ttt", "other")
SCORED = ("ttt", "sliding", "roundtrip")  # results of the decoded artifact, the latest stage first


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
    # Other tags under which the log repeats this very result.
    aliases: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sizes:
    """Bytes, as the log states them; the last statement counts, `stated` has every one."""

    model: int | None = None  # the raw model
    code: int | None = None  # the script as it is
    # The script as compressed for the artifact, where a log knows both.
    packed_code: int | None = None
    artifact: int | None = None  # the compressed model
    total: int | None = None  # what is held against the cap
    codec: str | None = None  # such as int8+zlib
    stated: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepTimes:
    """Milliseconds a step.

    Percentiles and maximum are of the means between two training lines, weighted by steps.
    """

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
    first_line: int = 1
    run_id: str | None = None
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    versions: dict[str, str] = field(default_factory=dict)  # python, torch, cuda, driver, nccl
    # Device (its name), gpus (seen), cpus, platform.
    hardware: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    grad_accum_steps: int | None = None  # in effect
    model_params: int | None = None
    dataset: str | None = None
    train_shards: int | None = None
    val_tokens: int | None = None  # predicted tokens of the validation split
    val_bytes: int | None = None
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
    status: str = "unfinished"  # finished, failed, interrupted, unfinished
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    partner: str | None = None  # the other file of the same run, merged into this record

    @property
    def name(self) -> str:
        return Path(self.path).name + (f"#{self.number}" if self.number > 1 else "")

    @property
    def seed_in_name(self) -> int | None:
        found = re.search(r"seed[_-]?(\d{1,9})", Path(self.path).name, re.IGNORECASE)
        return int(found[1]) if found else None

    @property
    def last_step(self) -> int:
        return max(
            [
                0,
                self.stop_step or 0,
                *(line.step for line in (*self.steps[-1:], *self.validations[-1:])),
            ]
        )

    @property
    def iterations(self) -> int | None:
        stated = [
            line.iterations
            for line in (*self.steps[-1:], *self.validations[-1:])
            if line.iterations is not None
        ]
        return stated[0] if stated else _whole(self.config.get("iterations"))

    @property
    def final_validation(self) -> Validation | None:
        return next(
            (
                v
                for v in reversed(self.validations)
                if v.val_loss is not None or v.val_bpb is not None
            ),
            None,
        )

    @property
    def headline(self) -> Score | None:
        """The result to be submitted:
        the lowest of the decoded artifact's, plain, with sliding windows or TTT.
        """
        found = [
            score for kind in SCORED if (score := self.score(kind)) and score.val_bpb is not None
        ]
        return min(
            found,
            key=lambda score: math.inf if math.isnan(score.val_bpb) else score.val_bpb,
            default=None,
        )

    def score(self, kind: str) -> Score | None:
        """The last result of a kind.

        Without one of its own, pre_quant is the validation of the last step.
        """
        found = next((score for score in reversed(self.scores) if score.kind == kind), None)
        last = self.final_validation
        if (
            found is None
            and kind == "pre_quant"
            and last is not None
            and last.step == self.last_step > 0
        ):
            return Score(
                "pre_quant",
                "validation",
                last.val_loss,
                last.val_bpb,
                last.val_ms,
                last.digits,
                last.digits,
            )
        return found

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
        return StepTimes(
            mean,
            _weighted(parts, 0.5),
            _weighted(parts, 0.99),
            parts[-1][0],
            max(n for _, n in parts),
        )

    def tokens(self) -> int | None:
        """Tokens trained on: stated, else steps times tokens a step."""
        batch = _whole(self.config.get("train_batch_tokens"))
        if self.tokens_seen is not None or batch is None:
            return self.tokens_seen
        return self.last_step * batch

    def epochs_seen(self) -> float | None:
        """Passes over the training shards:
        stated, else estimated for published shards (100,000,000 tokens each).
        """
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
        return not (
            self.steps
            or self.validations
            or self.scores
            or self.sizes.stated
            or self.error
            or self.status != "unfinished"
        )


@dataclass
class LogFile:
    """A file's runs, in order, and what of it could not be read."""

    path: str
    bytes: int = 0
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Logs:
    """Several files: their runs (a .txt and a .jsonl of one run are one), and the problems,
    each with its file.
    """

    files: list[LogFile] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# A time, a rank or a level in front of a line.
PREFIX = (
    r"(?:(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?|"
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?|\[?\d{9,11}\.\d+\]?|"
    r"\[\s*\d+(?:\.\d+)?s?\]|\d+\.\d+s?\s*(?=\|)|"
    r"\[?(?:rank|default|worker|node)[ _]?\d+\]?(?=[:\]| ])|"
    r"\[(?:modal|local)\]|\[?(?:INFO|DEBUG)\]?(?=[:\]| -]))"
    r"[ \t]*[:|-]?[ \t]?)+"
)
AT_PREFIX = re.compile(PREFIX)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Where the script's text may begin, and the lines that begin a log where no rule ends that text.
SOURCE_START = re.compile(
    rb"^(?:import [\w.]+(?: as \w+)?(?:, [\w., ]+)?\s*(?:#[^\n]*)?$|from [\w.]+ import [\w(]|#!/|"
    rb"[rR]?\"\"\"|[rR]?'''|(?P<inside>(?:def|class) \w+[(:]))",
    re.MULTILINE,
)
SOURCE_END = re.compile(
    rb"^(?:={20,}[ \t]*$|logs/[^\n]{1,300}\.txt[ \t]*$|val_bpb:enabled |Running Python |"
    rb"Hyperparameters:[ \t]*$|\{\"event\": )",
    re.MULTILINE,
)
DEFINITION = re.compile(rb"^(?:def|class) \w", re.MULTILINE)
LINE = re.compile(rb"[^\n]{4,}")  # shorter ones say nothing
RULE = re.compile(r"={20,}\s*$")

NUMBER = r"-?(?:\d[\d,]{0,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"
# Names and gaps are bounded, so that no line takes more time than its length.
PAIR = re.compile(
    r"(?<![\w/.])([A-Za-z_][\w/.]{0,60})[ \t]{0,20}[:=][ \t]{0,20}"
    rf"({NUMBER})(ms|min|m|s|h|%)?(?![\w.])"
)
STEP = re.compile(
    r"(?:step|iter|iteration)\s*[:= ]\s*(\d{1,12})(?:\s*/\s*(\d{1,12}))?(?![\w.])(.*)"
)
BARE_STEP = re.compile(r"(\d{1,12})/(\d{1,12})\s+((?:train_|val_)?loss\s*[:=].*)")
CRC = re.compile(r"\bdata_crc:([0-9a-f]{8})\b")
BYTES = re.compile(
    r"(Serialized model|Code size|Total submission size|Total submission|Raw model|artifact_bytes|"
    r"[\w.+-]{1,40} model)(?: ?\(?([\w+.-]{1,40})\)?)?\s*:\s*(\d[\d,]{0,20})(?: bytes)?(?![\w.])"
)
STOP = re.compile(r"stopping_early\s*:\s*(\S+)")
WORDS = re.compile(r"[a-z_]\w*[:=]\S+(?:\s+[a-z_]\w*[:=]\S+)*\s*$")
SETTING = re.compile(r"([a-z_]\w*):(?:\s+(.*?))?\s*$")
GPU = re.compile(r"\|\s+\d+\s+((?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b[^|]*?)\s+(?:On|Off|N/A)\s+\|")
DRIVER = re.compile(r"NVIDIA-SMI.*Driver Version:\s*([\d.]+)\s+CUDA Version:\s*([\d.]+)")
VERSION = re.compile(r"(?:Running )?(Python|PyTorch)[: ]+(\d[\w.+]*)")
RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*))?$")
# A cheap look at a line before the dear ones:
# lines without any of these words say nothing that is kept.
TELLING = re.compile(
    r"loss|bpb|step:|bytes|size|Running |NVIDIA|PyTorch|NCCL version|stopping|time|peak memory|"
    r"tokens|epochs|shards|seed|_|:|logs/|Traceback|Error|Exception|Interrupt|input"
)
NOT_SETTINGS = {
    "step",
    "warmup_step",
    "loop_warmup_step",
    "error",
    "warning",
    "logs",
    "peak",
    "input",
    "val_bpb",
    "val_progress",
    "timing_breakdown",
    "train_io",
    "val_io",
    "train_loader",
    "val_loader",
    "shards",
    "sdp_backends",
    "trace",
    "overlappable",
    "data_verify",
}
TIME_MS = {"ms": 1.0, None: 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6}


def read_logs(paths: Iterable[str | os.PathLike[str]], *, max_bytes: int = MAX_BYTES) -> Logs:
    """Files, and folders of .txt, .log, .jsonl files (not deeper);
    a .txt and a .jsonl of one run become one record.
    """
    result, seen, by_stem = Logs(), set(), {}
    for path in _expand(paths, result.problems):
        real = os.path.realpath(path)
        if real in seen:
            result.problems.append(f"{path}: named twice: read once")
            continue
        seen.add(real)
        log = read_log(path, max_bytes=max_bytes)
        result.files.append(log)
        result.problems += [f"{path}: {problem}" for problem in log.problems]
        partner = by_stem.get(os.path.splitext(real)[0])
        if partner and _same_run(partner, log):
            merge(partner.runs[0], log.runs[0])
        else:
            by_stem[os.path.splitext(real)[0]] = log
            result.runs += log.runs
    return result


def read_log(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> LogFile:
    """One file. Never raises for what the file is or contains: LogFile.problems says it."""
    log = LogFile(os.fspath(path))
    try:
        data, gap, log.bytes = _load(Path(path), max_bytes)
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    if data[:2] == b"\x1f\x8b" or data[:4] in (b"PK\x03\x04", b"\x89PNG"):
        log.problems.append("not a text file (compressed, or an image)")
        return log
    if gap:
        log.problems.append(
            f"{log.bytes:,} bytes: only the first and the last {max_bytes // 2:,} were read"
        )
    reader = _Reader(log)
    reader.feed(_as_utf8(data))
    reader.finish()
    return log


def merge(run: Run, other: Run) -> None:
    """Fills `run` with what only `other`, another log of the same run, says;
    events are more exact than text.
    """
    exact, coarse = (run, other) if run.path.endswith(".jsonl") else (other, run)
    _fill(run, exact, coarse)
    run.partner = other.path


def _fill(run: Run, exact: Run, coarse: Run) -> None:
    """Makes `run`, one of the two, say what `exact` says,
    and where that is silent what `coarse` says.
    """
    for name in ("config", "versions", "hardware"):
        setattr(run, name, {**getattr(coarse, name), **getattr(exact, name)})
    for name in Run.__dataclass_fields__:
        best, rest = getattr(exact, name), getattr(coarse, name)
        if name in ("config", "versions", "hardware", "path", "number", "first_line", "partner"):
            continue
        if name == "sizes":
            best = Sizes(*map(_either, astuple(best), astuple(rest)))
        elif name == "status":
            best = rest if best == "unfinished" else best
        elif name == "partial_val":
            best = best or rest
        setattr(run, name, _either(best, rest))


def _either(best: Any, rest: Any) -> Any:
    return rest if best is None or best == [] else best


def score_kind(tag: str) -> str:
    """One of KINDS, from what a log calls a result."""
    tag = tag.lower()
    if "ttt" in tag:
        return "ttt"
    if "sliding" in tag or re.search(r"(?:^|_)sw(?:_|$|\d)", tag):
        return "sliding"
    if (
        re.search(r"pre[-_ ]?quant|post[-_ ]?ema|(?:^|[_ ])(?:ema|swa|lawa)(?:[_ ]|$)", tag)
        and "roundtrip" not in tag
    ):
        return "pre_quant"
    return "roundtrip" if re.search(r"round_?trip|quantized|(?:^|_)int\d", tag) else "other"


def _expand(paths: Iterable[str | os.PathLike[str]], problems: list[str]) -> Iterator[str]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield os.fspath(given)
            continue
        found = sorted(
            os.fspath(p)
            for p in path.iterdir()
            if p.suffix in LOG_SUFFIXES
            and p.name not in ("requirements.txt", "README.txt")
            and p.is_file()
        )
        if not found:
            problems.append(f"{path}: a folder without .txt, .log or .jsonl files")
        yield from found


def _load(path: Path, max_bytes: int) -> tuple[bytes, bool, int]:
    """The file's bytes, whether some in the middle were left out, its size.

    A pipe or a device is refused unopened.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    with open(path, "rb") as file:
        if about.st_size <= max_bytes:
            return file.read(max_bytes), False, about.st_size
        half = max_bytes // 2
        head = file.read(half)
        file.seek(-half, os.SEEK_END)
        tail = file.read(half)
    return head[: head.rfind(b"\n") + 1] + tail[tail.find(b"\n") + 1 :], True, about.st_size


def _as_utf8(data: bytes) -> bytes:
    """Without a byte-order mark;
    UTF-16 (what some shells redirect into) and carriage returns made plain.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    data = data.removeprefix(b"\xef\xbb\xbf")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _source_regions(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whole) of each script's text.

    Whole: it has its beginning, and a rule follows it.
    """
    ends, definitions = (
        [found.start() for found in pattern.finditer(data)] for pattern in (SOURCE_END, DEFINITION)
    )
    at = 0
    while start := SOURCE_START.search(data, at):
        begin, place = start.start(), bisect.bisect(ends, start.start())
        end = next(
            (
                one
                for one in ends[place : place + MAX_RULES]
                if _ends_script(data, begin, one, definitions)
            ),
            None,
        )
        stop = len(data) if end is None else end
        if not _defines(definitions, begin, stop) and not _is_rule(data, end):
            at = start.end()
            continue
        yield _leading_comments(data, at, begin), stop, _is_rule(data, end) and not start["inside"]
        at = stop


def _is_rule(data: bytes, at: int | None) -> bool:
    return at is not None and data[at : at + 1] == b"="


def _defines(definitions: list[int], begin: int, end: int) -> bool:
    place = bisect.bisect_left(definitions, begin)
    return place < len(definitions) and definitions[place] < end


def _ends_script(data: bytes, begin: int, end: int, definitions: list[int]) -> bool:
    """A rule inside a script (in its docstring) is followed by more of it;
    the one behind it by versions.
    """
    if not _is_rule(data, end) or _defines(definitions, begin, end):
        return True
    behind = data.find(b"\n", end) + 1
    versions = data.find(b"Running Py", behind, behind + 400) >= 0
    return versions or not SOURCE_START.search(data, behind, behind + 400)


def _leading_comments(data: bytes, floor: int, begin: int) -> int:
    """Where the comments and empty lines in front of `begin` start: they belong to the script."""
    while begin > floor:
        previous = data.rfind(b"\n", floor, begin - 1) + 1 or floor
        line = data[previous:begin].strip()
        if line and not line.startswith(b"#"):
            break
        begin = previous
    return begin


def _same_run(first: LogFile, second: LogFile) -> bool:
    a, b = first.runs, second.runs
    return (
        len(a) == len(b) == 1
        and {Path(first.path).suffix, Path(second.path).suffix} == {".txt", ".jsonl"}
        and (a[0].seed == b[0].seed or None in (a[0].seed, b[0].seed))
    )


def _weighted(parts: list[tuple[float, int]], share: float) -> float:
    """The smallest value that `share` of the steps do not exceed;
    `parts` are (value, steps), sorted.
    """
    wanted, seen = share * sum(n for _, n in parts), 0
    for value, count in parts:
        seen += count
        if seen >= wanted:
            return value
    return parts[-1][0]


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


def _event_digits(value: object) -> int | None:
    """Decimals of a number in an event that was rounded for a line; None: it was not."""
    count = _digits(repr(value)) if isinstance(value, float) else 0
    return count if 0 < count <= 8 else None


class _Reader:
    """A file's lines into its runs, one line at a time."""

    def __init__(self, log: LogFile) -> None:
        self.log, self.run, self.opened = log, Run(log.path), set()
        self.data, self.position, self.counted = b"", 0, (0, 1)
        self.problem_count, self.broken_lines = 0, 0
        self.previous, self.mode, self.traceback = "", None, False
        self.in_block = False  # the indented settings under `Hyperparameters:`
        self.header_lines = 0

    def feed(self, data: bytes) -> None:
        self.data, at = data, 0
        for begin, end, whole in _source_regions(data):
            self.lines(data, at, begin)
            self.source(data, begin, end, whole)
            at = end
        self.lines(data, at, len(data))

    def source(self, data: bytes, begin: int, end: int, whole: bool) -> None:
        self.position = begin
        self.open("source")
        if whole:
            # Printing added one line end to the script's own.
            text = data[begin:end].removesuffix(b"\n")
            self.run.source_bytes = len(text)
            self.run.source_sha256 = hashlib.sha256(text).hexdigest()
        elif end == len(data):
            self.problem("the log ends inside the script's text")
        self.previous = ""

    def lines(self, data: bytes, at: int, end: int) -> None:
        for found in LINE.finditer(data, at, end):
            self.position, stop = found.start(), found.end()
            limit = MAX_EVENT if data[self.position : self.position + 1] == b"{" else MAX_LINE
            self.raw_line(data[self.position : min(stop, self.position + limit)], stop == len(data))

    @property
    def number(self) -> int:
        """Of the current line, from 1; counted on from where it was last asked for."""
        line_ends = self.data.count(b"\n", self.counted[0], self.position)
        self.counted = (self.position, self.counted[1] + line_ends)
        return self.counted[1]

    def raw_line(self, raw: bytes, cut: bool) -> None:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = raw.decode("utf-8", "replace")
            self.broken_lines += 1
        if "\x1b" in text:
            text = ANSI.sub("", text)
        text = text.rstrip()
        if text == self.previous or not TELLING.search(text) and not RULE.match(text):
            return
        self.previous = text
        if text.startswith('{"'):
            self.json_line(text)
            return
        if text[:1] in "[0123456789rdwnID" and (prefix := AT_PREFIX.match(text)):
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
            log.problems.append(
                "empty" if not log.bytes else "no training log: no line of one was found"
            )

    def problem(self, words: str) -> None:
        self.problem_count += 1
        if self.problem_count <= MAX_PROBLEMS:
            self.log.problems.append(f"line {self.number}: {words}")

    def open(self, kind: str) -> None:
        """A line that begins a run:
        a new one if this run has had such a line, or has already trained.
        """
        if kind in self.opened or self.run.steps or self.run.validations or self.run.scores:
            self.close()
        self.opened.add(kind)

    def close(self) -> None:
        run = self.run
        _settle(run)
        if not run.empty or run.config and not self.log.runs and run.seed is not None:
            self.log.runs.append(run)
        self.run, self.opened, self.mode = Run(self.log.path, first_line=self.number), set(), None
        self.traceback = self.in_block = False
        self.header_lines = 0

    # --- text ---

    def text_line(self, text: str, cut: bool) -> None:
        if self.begins(text) or self.failure(text):
            return
        bare = text.lstrip()
        if bare.startswith("val_stage_time_ms"):
            self.stage_time(bare)
        elif (found := STEP.match(bare)) or (found := BARE_STEP.match(bare)):
            self.step_line(found, cut)
        elif found := STOP.match(bare):
            self.stop_line(found, bare)
        elif self.may_be_score(bare):
            self.score_line(bare, cut)
        elif found := BYTES.search(bare):
            self.size_line(bare)
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
            return True
        if re.match(r"logs/[^\s]{1,300}\.txt$", text):
            self.open("path")
            self.run.run_id = Path(text).stem
            return True
        if found := VERSION.match(text):
            if text.startswith("Running Python"):
                self.open("python")
            self.run.versions["python" if found[1] == "Python" else "torch"] = found[2]
            return True
        if found := GPU.match(text):
            run.hardware.setdefault("device", found[1])
            run.hardware["gpus"] = run.hardware.get("gpus", 0) + 1
            return True
        if found := DRIVER.search(text):
            run.versions.update(driver=found[1], driver_cuda=found[2])
            return True
        if found := re.match(r"NCCL version ([\w.+]+)", text):
            run.versions["nccl"] = found[1]
            return True
        return bool(RULE.match(text))

    def failure(self, text: str) -> bool:
        run = self.run
        if text.startswith("Traceback (most recent call last)"):
            self.traceback = True
        elif self.traceback and RAISED.match(text):
            run.error, self.traceback = text[:MAX_VALUE], False
        elif text.startswith("error: "):
            run.error = text[7:][:MAX_VALUE]
        elif re.match(r"warning: |WARNING: ", text):
            if len(run.warnings) < MAX_PROBLEMS:
                run.warnings.append(text[9:][:MAX_VALUE])
        else:
            return False
        return True

    def step_line(self, found: re.Match[str], cut: bool) -> None:
        step, rest = int(found[1]), found[3]
        iterations = int(found[2]) if found[2] else None
        pairs = {name: (value, unit) for name, value, unit in PAIR.findall(rest)}
        if cut and rest and not rest.endswith(("ms", "s", "%")) and "tok/s" not in pairs:
            self.problem("the last line is cut off")
            return
        time_ms = _time_ms(pairs, "train_time", "t", "time")
        if "val_loss" in pairs or "val_bpb" in pairs:
            loss, bpb = (pairs.get(name, ("", ""))[0] for name in ("val_loss", "val_bpb"))
            self.run.partial_val |= "partial_val:1" in rest
            self.add_validation(
                Validation(
                    step, iterations, _number(loss), _number(bpb), time_ms, None, _digits(bpb)
                )
            )
            return
        loss = next(
            (pairs[name][0] for name in ("train_loss", "loss", "train/loss") if name in pairs), None
        )
        if loss is None:
            if re.search(r"(?:train|val)_loss|val_bpb", rest) and "None" not in rest:
                self.problem(f"a step without a readable loss: {found[0][:80]}")
            return
        crc = CRC.search(rest)
        average = next(
            (_number(pairs[name][0]) for name in ("step_avg", "avg") if name in pairs), None
        )
        speed = next(
            (_number(pairs[name][0]) for name in ("tok_s", "tok/s") if name in pairs), None
        )
        if "train_time" in pairs and pairs["train_time"][1] in ("m", "min"):
            time_ms = self.finer_time(step, speed, time_ms)
            average = time_ms / step if step and time_ms is not None else average
        wait = _number(pairs.get("input_wait", (None,))[0])
        self.add_step(
            Step(
                step,
                iterations,
                _number(loss),
                time_ms,
                average,
                speed,
                wait,
                crc[1] if crc else None,
            )
        )

    def finer_time(self, step: int, tok_s: float | None, time_ms: float | None) -> float | None:
        """Tenths of minutes are coarse:
        where tokens a second so far agree with them, the time follows from those.
        """
        batch = _number(self.run.config.get("train_batch_tokens"))
        if not batch or not tok_s or time_ms is None:
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
        if len(steps) > MAX_POINTS:
            self.problem(f"more than {MAX_POINTS:,} training lines: every second one is left out")
            del steps[1:-1:2]

    def add_validation(self, line: Validation) -> None:
        self.rewind(line.step)
        validations = self.run.validations
        if validations and validations[-1].step == line.step:
            line.val_ms = line.val_ms if line.val_ms is not None else validations[-1].val_ms
            validations[-1] = line
            return
        validations.append(line)
        if len(validations) > MAX_POINTS:
            del validations[1:-1:2]

    def rewind(self, step: int) -> None:
        """A step number that goes back:
        from the start it is another run, else the run went on from there.
        """
        run = self.run
        last = max([-1, *(s.step for s in run.steps[-1:]), *(v.step for v in run.validations[-1:])])
        if step >= last:
            return
        if step <= 1 or run.scores:
            self.close()
            return
        if not run.resumed_at or len(run.resumed_at) < MAX_PROBLEMS:
            run.resumed_at.append(step)
        while run.steps and run.steps[-1].step >= step:
            run.steps.pop()
        while run.validations and run.validations[-1].step >= step:
            run.validations.pop()

    def stage_time(self, text: str) -> None:
        found = re.match(r"val_stage_time_ms:\s*([\d.]+)ms step:\s*(\d{1,12})", text)
        if found and self.run.validations and self.run.validations[-1].step == int(found[2]):
            self.run.validations[-1].val_ms = _number(found[1])

    def stop_line(self, found: re.Match[str], text: str) -> None:
        pairs = {name: (value, unit) for name, value, unit in PAIR.findall(text)}
        self.run.stopped_early = found[1][:MAX_VALUE]
        time_ms = _time_ms(pairs, "train_time")
        self.run.train_time_ms = time_ms if time_ms is not None else self.run.train_time_ms
        if step := re.search(r"\bstep:\s*(\d{1,12})", text):
            self.run.stop_step = int(step[1])

    def may_be_score(self, text: str) -> bool:
        if text.startswith(("val_bpb:enabled", "val_bpb:byte_sidecar")):
            return False
        if found := re.match(r"final_eval_mode:\s*(\w+)", text):
            self.mode = found[1]
            return False
        return "val_bpb" in text or text.startswith("final_") and "val_loss" in text

    def score_line(self, text: str, cut: bool) -> None:
        pairs = {name: (value, unit) for name, value, unit in PAIR.findall(text)}
        loss, bpb = (pairs.get(name, ("", ""))[0] for name in ("val_loss", "val_bpb"))
        tag = re.split(
            r"\s{0,20}(?:\b(?:val_loss|val_bpb|stride|sliding val_loss)\b\s*[:=]|$)",
            text,
            maxsplit=1,
        )[0]
        if not bpb:
            if tag and ("val_bpb:" in text or "val_bpb=" in text):
                self.problem(f"a result without a readable val_bpb: {text[:80]}")
            return
        if tag.startswith(("http", "#", "-", "|")) or len(tag) > 80:
            return
        exact = tag.endswith("_exact")
        if cut and (
            _digits(bpb) < 8 if exact else not text.endswith(("ms", "s", ")")) and _digits(bpb) < 4
        ):
            self.problem("the last line is cut off")
            return
        kind = score_kind(text if "sliding val_" in text or "ttt" in text else tag)
        if kind == "roundtrip" and self.mode and self.mode.startswith("sliding"):
            kind = "sliding"
        self.run.partial_val |= "partial_val:1" in text
        eval_ms = _time_ms(pairs, "eval_time", "elapsed", "time")
        self.add_score(
            Score(
                kind,
                tag.removesuffix("_exact") or "val_bpb",
                _number(loss),
                _number(bpb),
                eval_ms,
                _digits(bpb),
                _digits(loss),
            )
        )

    def add_score(self, score: Score) -> None:
        """A result; the same one again, in more digits or under another name,
        completes the first.
        """
        scores = self.run.scores
        twins = [old for old in scores if _repeats(old, score)]
        if not twins:
            if len(scores) < MAX_SCORES:
                scores.append(score)
            return
        kept = next((old for old in twins if old.tag == score.tag), twins[0])
        for other in (score, *twins):
            if other is kept:
                continue
            if kept.digits is not None and (other.digits is None or other.digits > kept.digits):
                kept.val_loss, kept.loss_digits = other.val_loss, other.loss_digits
                kept.val_bpb, kept.digits = other.val_bpb, other.digits
            kept.eval_ms = other.eval_ms if kept.eval_ms is None else kept.eval_ms
            kept.aliases += [
                tag for tag in (other.tag, *other.aliases) if tag not in (kept.tag, *kept.aliases)
            ]
        self.run.scores = [old for old in scores if old is kept or old not in twins]

    def size_line(self, text: str) -> None:
        for label, codec, digits in BYTES.findall(text):
            self.add_size(label, codec, int(digits.replace(",", "")))

    def add_size(self, label: str, codec: str, count: int) -> None:
        sizes = self.run.sizes
        if len(sizes.stated) < 100:
            sizes.stated.append((f"{label} {codec}".strip(), count))
        if label == "Code size":
            if codec == "compressed":
                sizes.packed_code = count
            else:
                sizes.code = count
        elif label == "Serialized model" and not codec:
            sizes.model = count
        elif label == "Serialized model":
            sizes.artifact, sizes.codec = count, codec
        elif label.startswith("Total submission"):
            raw = label.endswith("size") and not codec  # of the model before compression
            sizes.total = sizes.total if raw else count
        elif label == "artifact_bytes":
            sizes.total = sizes.total if sizes.total is not None else count
        elif label == "Raw model":
            sizes.model = count
        else:
            sizes.artifact, sizes.codec = count, label.removesuffix(" model")

    def report_line(self, text: str) -> bool:
        """The lines on time, memory and input behind training."""
        run = self.run
        if text.startswith("timing_train_loop_ms"):
            pairs = {name: (value, unit) for name, value, unit in PAIR.findall(text)}
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
        elif found := re.match(r"total_eval_time:\s*([\d.]{1,18})s", text):
            run.eval_total_ms = 1e3 * (_number(found[1]) or 0)
        else:
            return False
        return True

    def header_line(self, text: str) -> None:
        """Settings, in the lines before the first step:
        words of key:value, or an indented block of `key: value`.
        """
        run, bare = self.run, text.strip()
        self.header_lines += 1
        if (
            self.header_lines > MAX_HEADER
            or run.steps
            or run.scores
            or run.sizes.stated
            or re.match(r"(?:\w+_)?warmup_\w*step", bare)
        ):
            return
        if bare.startswith(("train_io:", "val_io:")):
            room, _, words = bare.partition(":")
            self.settings(re.findall(r"\b(\w{1,60}):(\S+)", words), f"{room}.")
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
        elif WORDS.match(bare):
            self.settings(re.findall(r"\b([a-z_]\w{0,60})[:=](\S+)", bare))
        elif (found := SETTING.match(bare)) and (
            self.in_block and text != bare or " " not in (found[2] or "")
        ):
            self.setting(found[1], found[2] or "")

    def settings(self, found: Iterable[tuple[str, str]], room: str = "") -> None:
        for name, value in found:
            self.setting(room + name, value)

    def setting(self, name: str, value: str) -> None:
        run, value = self.run, value.strip()
        if name in NOT_SETTINGS or value == "" and not self.in_block:
            return
        number = _whole(value)
        if name in (
            "world_size",
            "grad_accum_steps",
            "model_params",
            "train_shards",
            "val_tokens",
            "seed",
        ):
            if number is None:
                self.problem(f"{name} is not a number: {value[:40]}")
                return
            if name == "seed" and run.seed not in (None, number):
                self.problem(f"seed {number} in a run that began with seed {run.seed}")
            setattr(run, name, number)
            if name in ("model_params", "train_shards", "val_tokens"):
                return
        elif name in ("run_id", "datasets_dir"):
            run.run_id = value if name == "run_id" else run.run_id
            run.dataset = Path(value).name if name == "datasets_dir" and value else run.dataset
        if len(run.config) < MAX_SETTINGS:
            run.config[name] = _typed(value)

    # --- events ---

    def json_line(self, text: str) -> None:
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            self.problem(f"not a JSON object: {text[:60]}")
            return
        if not isinstance(event, dict):
            return
        handler = getattr(self, f"event_{event.get('event')}", None)
        try:
            if handler:
                handler(event)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            self.problem(
                f"a damaged {event.get('event')} event ({type(error).__name__}): {text[:60]}"
            )

    def event_run(self, event: dict[str, Any]) -> None:
        self.open("event")
        self.run.run_id = _text(event.get("run_id"))

    def event_config(self, event: dict[str, Any]) -> None:
        for name, value in list(event.items())[:MAX_SETTINGS]:
            if name not in ("event", "time") and isinstance(
                value, (str, int, float, bool, type(None))
            ):
                self.run.config[name] = value[:MAX_VALUE] if isinstance(value, str) else value
        self.run.seed = _whole(event.get("seed"))
        self.run.dataset = Path(_text(event.get("data_path")) or "").name or None
        self.run.run_id = self.run.run_id or _text(event.get("run_id"))

    def event_hardware(self, event: dict[str, Any]) -> None:
        run = self.run
        run.versions.update(
            {
                k: str(event[k])[:MAX_VALUE]
                for k in ("torch", "cuda", "python", "nccl", "driver")
                if event.get(k)
            }
        )
        run.hardware.update(
            {
                k: event[k]
                for k in ("device", "cpus", "platform", "gpus")
                if event.get(k) is not None
            }
        )
        run.world_size = _whole(event.get("world_size"))

    def event_step(self, event: dict[str, Any]) -> None:
        crc = event.get("data_crc")
        self.add_step(
            Step(
                int(event["step"]),
                _whole(event.get("iterations")),
                _number(event.get("train_loss")),
                *(
                    _number(event.get(k))
                    for k in ("train_time_ms", "step_avg_ms", "tok_s", "input_wait_percent")
                ),
                crc if isinstance(crc, str) else None,
            )
        )

    def event_validation(self, event: dict[str, Any]) -> None:
        self.run.partial_val |= bool(event.get("partial_val"))
        self.add_validation(
            Validation(
                int(event["step"]),
                _whole(event.get("iterations")),
                *(_number(event.get(k)) for k in ("val_loss", "val_bpb", "train_time_ms")),
                _first(event, "val_ms", "val_stage_time_ms"),
                _event_digits(event.get("val_bpb")),
            )
        )
        self.run.val_tokens = _whole(event.get("val_tokens")) or self.run.val_tokens
        self.run.val_bytes = _whole(event.get("val_bytes")) or self.run.val_bytes

    def event_input(self, event: dict[str, Any]) -> None:
        run, peak = self.run, event.get("peak_mib")
        run.stop_step = _whole(event.get("step"))
        run.train_time_ms = _first(event, "train_time_ms", "timing_train_loop_ms")
        run.val_total_ms = _first(event, "val_total_ms", "timing_val_total_ms")
        run.tokens_seen, run.epochs = _whole(event.get("tokens_seen")), _number(event.get("epochs"))
        waits = "percent_of_slowest_rank", "wait_percent", "share_percent"
        run.input_wait_percent = _first(event, *waits)
        run.peak_mib = _whole(peak[0] if isinstance(peak, list) and peak else peak)

    def event_artifact(self, event: dict[str, Any]) -> None:
        for label, codec, name in (
            ("Serialized model", "", "model_bytes"),
            ("Code size", "", "code_bytes"),
            ("Serialized model", "int8+zlib", "artifact_bytes"),
            ("Total submission size", "int8+zlib", "total_bytes"),
        ):
            if (count := _whole(event.get(name))) is not None:
                self.add_size(label, str(event.get("codec", codec)) if codec else "", count)

    def event_score(self, event: dict[str, Any]) -> None:
        tag = str(event.get("tag") or event.get("kind") or "final_int8_zlib_roundtrip")[:80]
        self.run.partial_val |= bool(event.get("partial") or event.get("partial_val"))
        self.add_score(
            Score(
                score_kind(tag),
                tag,
                *(_number(event.get(k)) for k in ("val_loss", "val_bpb")),
                _first(event, "eval_ms", "eval_time_ms"),
                _event_digits(event.get("val_bpb")),
                _event_digits(event.get("val_loss")),
            )
        )

    def event_end(self, event: dict[str, Any]) -> None:
        status = str(event.get("status"))
        self.run.status = (
            status if status in ("finished", "failed", "interrupted") else "unfinished"
        )
        self.run.error = _text(event.get("error"))


def _first(event: dict[str, Any], *names: str) -> float | None:
    """The number under the first of `names` that is there: they have changed over time."""
    return next((_number(event[name]) for name in names if event.get(name) is not None), None)


def _time_ms(pairs: dict[str, tuple[str, str]], *names: str) -> float | None:
    """The first of `names` in milliseconds, whatever its unit."""
    for name in names:
        if name in pairs and pairs[name][1] != "%":
            value = _number(pairs[name][0])
            return None if value is None else value * TIME_MS[pairs[name][1] or None]
    return None


def _repeats(old: Score, new: Score) -> bool:
    """The same result again:
    equal digits, under the same name or, to at least six decimals, under another.
    """
    digits = min((d for d in (old.digits, new.digits) if d is not None), default=12)
    return _equal(old.val_bpb, new.val_bpb, (old.digits, new.digits)) and (
        old.tag == new.tag
        or digits >= 6
        and _equal(old.val_loss, new.val_loss, (old.loss_digits, new.loss_digits))
    )


def _equal(
    first: float | None, second: float | None, digits: tuple[int | None, int | None]
) -> bool:
    """As far as the shorter of the two was printed; None: full precision."""
    if first is None or second is None:
        return False
    printed = [d for d in digits if d is not None]
    return first == second or bool(printed) and abs(first - second) <= 0.51 * 10.0 ** -min(printed)


def _settle(run: Run) -> None:
    """What follows from the lines once a run is complete."""
    last = next(
        (
            line
            for line in sorted(
                (*run.steps[-1:], *run.validations[-1:]), key=lambda line: -line.step
            )
            if line.train_time_ms is not None
        ),
        None,
    )
    if run.train_time_ms is None and last is not None:
        run.train_time_ms = last.train_time_ms
    times = {s.step: s.train_time_ms for s in run.steps}
    for validation in run.validations:
        if validation.train_time_ms is None:
            validation.train_time_ms = (
                run.train_time_ms
                if validation.step == run.last_step
                else times.get(validation.step)
            )
    if (
        run.val_total_ms is None
        and run.validations
        and all(v.val_ms is not None for v in run.validations)
    ):
        run.val_total_ms = sum(v.val_ms for v in run.validations)
    timed = [score.eval_ms for score in run.scores if score.eval_ms is not None]
    if run.eval_total_ms is None and timed:
        run.eval_total_ms = sum(timed)
    waits = [
        s for s in run.steps if s.input_wait_percent is not None and s.train_time_ms is not None
    ]
    if run.input_wait_percent is None and waits:
        ends = [0.0, *(s.train_time_ms for s in waits)]
        spent = sum(
            step.input_wait_percent * (end - begin)
            for step, (begin, end) in zip(waits, pairwise(ends), strict=True)
        )
        run.input_wait_percent = spent / ends[-1] if ends[-1] else None
    if (
        run.config.get("tie_embeddings") is True
        and "vocab_size" not in run.config
        and "embed_lr" in run.config
    ):
        # The header prints the rate in effect:
        # with tied embeddings that is TIED_EMBED_LR, and no HEAD_LR.
        run.config["tied_embed_lr"] = run.config.pop("embed_lr")
        run.config.pop("head_lr", None)
    if run.status == "unfinished" and run.error:
        run.status = "interrupted" if "nterrupt" in run.error else "failed"
    if run.headline and (
        run.status == "unfinished" or run.status == "failed" and run.sizes.total is not None
    ):
        run.status = "finished"


def _joined(runs: list[Run]) -> list[Run]:
    """A run that was resumed into the same file is one run;
    so is one whose console and log were put into one file.
    """
    result: list[Run] = []
    for run in runs:
        first = min(
            [s.step for s in run.steps[:1]] + [v.step for v in run.validations[:1]], default=0
        )
        old = result[-1] if result else None
        if old and _copy(old, run):
            _fill(old, run, old)
            continue
        if not (
            old
            and first > 1
            and not old.headline
            and old.seed == run.seed
            and old.run_id == run.run_id
            and first <= old.last_step + 100_000
        ):
            result.append(run)
            continue
        run.steps[:0] = [s for s in old.steps if s.step < first]
        run.validations[:0] = [v for v in old.validations if v.step < first]
        run.resumed_at = [*old.resumed_at, first, *run.resumed_at]
        run.config, run.first_line = {**old.config, **run.config}, old.first_line
        if run.source_sha256 is None:
            run.source_bytes, run.source_sha256 = old.source_bytes, old.source_sha256
        result[-1] = run
    return result


def _copy(old: Run, new: Run) -> bool:
    def lines(run: Run) -> list[tuple[int, float | None, float | None]]:
        return [(s.step, s.train_loss, s.train_time_ms) for s in run.steps]

    return bool(old.steps) and old.seed == new.seed and lines(old) == lines(new)
