"""What one line of a training log says: `events(text)` gives its events.

The function is pure: the same text always gives the same events, whatever stands around it.
runs.py decides what follows from the order of lines, results.py which result counts.

PATTERNS is the whole knowledge of how lines are written. Each kind of line has a regular
expression, the function that reads a match, and an example with its events, which is also its test.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_VALUE = 400  # characters of a value
MAX_BPB = 30  # a larger number is not a result

# What a result is, by the first pattern that is found in what the log calls it. Those above
# "ttt" are never submitted.
NAMES = (
    (
        "progress",
        r"(?<![a-z])chunk[\s:=\[]+\d|progress|(?<![a-z])(batch|run)_(bpb|loss)|running[_ ]|cumul|"
        r"\d\s*/\s*\d|\d\s?%|^\W*(step|iter|epoch)|(?<![a-z])rank:\d|"
        r"^(a?l)?_(bpb|loss)",  # the end of a line that lost its beginning
    ),
    (
        "diagnostic",
        r"(^|[\W_])(delta|gain|diff(?!u)|gap|improvement|change|reduction|penalt|std|target|sota|best|"
        r"mean(?![a-z])|average(?!d)|leader|record\b|threshold|expect|sanity|subset|probe|debug|"
        r"control|diagnostics)|"
        r"baseline[_ ](val_)?bpb|"
        r"(over|vs\.?|than)( the)? baseline|calib\w*[_ ](loss|bpb)|train.?bpb|"
        r"(pre|before|without|no)[-_ ]?(ttt|slot|adapt)|^\W*(#|//|-{2})",
    ),
    (
        "pre_quant",
        r"^(?!.*(round_?trip|(?<!un)quantized|post.?quant|int\d)).*"
        r"(pre[-_ ]?(gptq|export)|full.?prec|(fp|bf|float)_?(16|32)\b|post.?ema|checkpoint|"
        r"(^|[\W_])((post[-_ ]?)?(ema|swa|lawa|raw)\b|(ema|swa|lawa|raw)_(val_)?bpb))"
        r"|pre[-_ ]?quant|un-?quant",
    ),
    ("diagnostic", r"diagnostic"),
    ("ttt", r"ttt|test.?time"),
    ("sliding", r"slid|stride|(^|[\W_])sw([\W_\d]|$)"),
    ("roundtrip", r"round_?trip|quant|int\d|zlib|zstd|lzma|brotli|decoded|artifact"),
    ("other", r""),
)
SUBMITTED = ("roundtrip", "sliding", "ttt", "other")  # kinds that may be submitted
_NAMES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in NAMES)


# --- events ---


@dataclass(frozen=True, slots=True)
class Step:
    """A training line."""

    step: int
    train_loss: float  # nats per token
    train_time_ms: float | None = None  # training since its start
    data_crc: str | None = None
    step_avg_ms: float | None = None  # as printed


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation while training."""

    step: int
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None
    train_time_ms: float | None = None
    digits: int | None = None  # decimals of val_bpb as printed; None: full precision
    last_step: int | None = None  # the M of step:N/M
    partial: bool = False  # scored on a part of the split
    line: int = field(default=0, compare=False)  # its number in the file


@dataclass(frozen=True, slots=True)
class Result:
    """A result after training."""

    kind: str  # one of NAMES, or validation
    name: str  # as the log calls it
    val_loss: float | None = None
    val_bpb: float | None = None
    eval_ms: float | None = None
    digits: int | None = None  # decimals of val_bpb as printed; None: full precision
    partial: bool = False  # scored on a part of the split
    line: int = field(default=0, compare=False)  # its number in the file

    @property
    def tag(self) -> str:
        """The name without the _exact of a line that repeats it in more digits."""
        return self.name.removesuffix("_exact")


@dataclass(frozen=True, slots=True)
class Fact:
    """Anything else: a field of the run, source, begin, python, torch, config.NAME of a setting,
    bytes.NAME with a name of Sizes."""

    name: str
    value: Any


Event = Step | Validation | Result | Fact
FIELDS = ("world_size", "grad_accum_steps", "model_params", "seed")  # in lines of settings


# --- values ---

# Lengths are bounded, so that no line takes more time than its length.
NUMBER = r"-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"
TIME_MS = {"ms": 1.0, "s": 1e3}


def printed(name: str, text: str) -> str:
    """The number of `name:number` or `name=number` in a line; none: empty."""
    match = re.search(rf"(?<![\w/.]){name}[:=]\s?({NUMBER})(?![\w.])", text)
    return match[1] if match else ""


def figure(name: str, text: str) -> float | None:
    value = printed(name, text)
    return float(value) if value else None


def time_ms(names: str, text: str) -> float | None:
    """The time after one of `names`. Minutes are too coarse to be used."""
    match = re.search(rf"\b(?:{names})[:=]\s?({NUMBER})(ms|s)\b", text)
    return float(match[1]) * TIME_MS[match[2]] if match else None


def typed(text: str) -> Any:
    """A setting's printed value as bool, int, float or str."""
    text = text.strip()[:MAX_VALUE]
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(NUMBER, text) else text


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


# --- what reads a match ---


def read_facts(match: re.Match[str], text: str) -> list[Event]:
    """Each named group is a field of the run."""
    return [Fact(name, typed(value)) for name, value in match.groupdict().items() if value]


def read_step(match: re.Match[str], text: str) -> list[Event]:
    """A training line or a validation of a step."""
    step, last_step, rest = int(match[1]), match[2], match[3]
    time = time_ms("train_time", rest)
    losses = figure("val_loss", rest), figure("val_bpb", rest)
    if losses != (None, None):
        digits = decimals(printed("val_bpb", rest)) if losses[1] is not None else None
        end = int(last_step) if last_step else None
        return [Validation(step, *losses, time, digits, end, "partial_val:1" in rest)]
    train_loss = figure("train_loss", rest)
    if train_loss is None:
        return []
    crc = re.search(r"\bdata_crc:([0-9a-f]{8})\b", rest)
    average = time_ms("step_avg", rest)
    return [Step(step, train_loss, time, crc[1] if crc else None, average)]


# The name of a result, and its number.
BPB = re.compile(
    r"(?<![\w/.-])([\w/.-]{0,60}?bpb)[\"']?(?: ?\([^()]{0,40}\))?"
    rf"(?:[ \t]{{0,20}}[:=][ \t]{{0,20}}| (?=\d\.\d{{3}}))({NUMBER})(?![\w.])",
    re.IGNORECASE,
)


def result_kind(name: str) -> str:
    """What a log calls a result: a kind of NAMES."""
    return next(kind for kind, pattern in _NAMES if pattern.search(name))


def read_results(match: re.Match[str], text: str) -> list[Event]:
    """A line with bits per byte, after training or while it is evaluated."""
    results: list[Event] = []
    text, first_kind, at = text.lstrip(), None, 0
    for pair in BPB.finditer(text):
        front, at = text[at : pair.start()], pair.end()
        kind = result_kind(front + pair[1])
        kind = first_kind if kind == "other" and first_kind in SUBMITTED else kind
        first_kind = first_kind or kind
        if first_kind == "progress":
            break
        value = float(pair[2])
        impossible = value <= 0 or value > MAX_BPB
        if kind == "progress" or len(front) > MAX_VALUE or impossible:
            continue
        name = re.split(r"\b(?:val_loss|stride)\b", front)[0].strip(" :=|-,;([{\"'") or pair[1]
        time = time_ms("eval_time|elapsed|time", text)
        figures = figure("val_loss", text), value, time, decimals(pair[2])
        results.append(Result(kind, name, *figures, partial="partial_val:1" in text))
    return results


def read_bytes(match: re.Match[str], text: str) -> list[Event]:
    """Sizes of the code and of what is compressed; a total of the raw model is followed by that of
    the compressed one."""
    label, codec = match[1], match[2]
    size = int(match[3].replace(",", ""))
    if label == "Code size":
        return [Fact("bytes.packed_code" if codec == "compressed" else "bytes.code", size)]
    if label == "Total submission size":
        return [Fact("bytes.total", size)]
    return [Fact("bytes.artifact", size)] if codec else []


def read_settings(match: re.Match[str], text: str) -> list[Event]:
    """Words of name:value; which overlap is in effect has the names of the settings."""
    split = f"{match['split']}_" if "split" in match.groupdict() else ""
    result = []
    for name, value in re.findall(r"\b([A-Za-z_]\w{0,60})(?:: ?|=)(\S+)", text[match.end() :]):
        if split and (value == "0" or name == "copy_stream"):
            continue  # not used; in effect only on CUDA
        known = name in FIELDS and type(typed(value)) is int
        result.append(Fact(name if known else f"config.{split}{name.lower()}", typed(value)))
    return result


# --- the table ---


class Pattern(NamedTuple):
    """A kind of line; the first pattern of PATTERNS that matches reads it."""

    read: Callable[[re.Match[str], str], list[Event]]
    regex: str
    example: str
    events: tuple[Event, ...]


PATTERNS = (
    Pattern(
        read_facts,
        r"(?P<begin>val_bpb:enabled|Hyperparameters:|logs/[^\s]{1,300}\.txt$)",
        "logs/try7.txt",
        (Fact("begin", "logs/try7.txt"),),
    ),
    Pattern(
        read_facts,
        r"Running (?:Python (?P<python>\d+\.\d+\.[\w.+]+)|PyTorch (?P<torch>\d+\.\d+\.[\w.+]+))",
        "Running PyTorch 2.9.1+cu128",
        (Fact("torch", "2.9.1+cu128"),),
    ),
    Pattern(
        read_facts,
        r"\|\s+\d+\s+(?P<device>(?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b[^|]*?)\s+"
        r"(?:On|Off|N/A)\s+\|",
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |",
        (Fact("device", "NVIDIA H100 80GB HBM3"),),
    ),
    Pattern(
        read_step,
        r"(?:step:)?\s?(\d{1,12})(?:/(\d{1,12}))?\s+((?:train|val)_loss:.*)",
        "step:1999/2000 val_loss:2.4048 val_bpb:1.4242 train_time:79000ms",
        (Validation(1999, 2.4048, 1.4242, 79_000.0, 4, 2000),),
    ),
    Pattern(
        read_facts,
        r"(?:stopping_early:.*?\btrain_time: ?|timing_train_loop_ms:)(?P<train_time_ms>\d{1,15})ms",
        "stopping_early: wallclock_cap train_time:20500ms step:500/20000",
        (Fact("train_time_ms", 20_500),),
    ),
    Pattern(
        read_results,
        r"(?i)(?=.*bpb)",
        "final_int8_zlib_roundtrip val_loss:2.4200 val_bpb:1.4333 eval_time:1401ms",
        (Result("roundtrip", "final_int8_zlib_roundtrip", 2.42, 1.4333, 1401.0, 4),),
    ),
    Pattern(
        read_bytes,
        r"(Serialized model|Code size|Total submission size)(?: \(?([\w+.-]{1,40})\)?)?"
        r": (\d[\d,]{0,20}) bytes",
        "Total submission size int8+zlib: 15,750,424 bytes",
        (Fact("bytes.total", 15_750_424),),
    ),
    Pattern(
        read_facts,
        r"input_wait total:(?P<input_wait_ms>[\d.]{1,18})ms ",
        "input_wait total:1.198ms share:0.004% epochs:0.027",
        (Fact("input_wait_ms", 1.198),),
    ),
    Pattern(
        read_facts,
        r"total_eval_time:\s*(?P<eval_total_s>[\d.]{1,18})s",
        "total_eval_time:372.5s",
        (Fact("eval_total_s", 372.5),),
    ),
    Pattern(
        read_facts,
        r"(?:train_loader:dataset:(?P<dataset>\S{1,400}) )?train_shards: ?(?P<train_shards>\d+)",
        "train_loader:dataset:fineweb10B_sp1024 train_shards:80",
        (Fact("dataset", "fineweb10B_sp1024"), Fact("train_shards", 80)),
    ),
    Pattern(
        read_facts,
        r"(?:val_loader:.* |val_)tokens: ?(?P<val_tokens>\d+)(?: partial_val:(?P<partial_val>1))?",
        "val_loader:shards pattern=./data/fineweb_val_*.bin tokens:62021632",
        (Fact("val_tokens", 62_021_632),),
    ),
    Pattern(
        read_settings,
        r"settings:",
        "settings: EMA_DECAY=0.997",
        (Fact("config.ema_decay", 0.997),),
    ),
    Pattern(
        read_facts,
        r"resumed: step:(?P<resumed>\d{1,12})\b",
        "resumed: step:6000 resumed_from:checkpoints/r/step_00006000.pt",
        (Fact("resumed", 6000),),
    ),
    Pattern(
        read_settings,
        r"(?P<split>train|val)_io:",
        "train_io:prefetch:True copy_stream:False prefetch_queue:2 gpu_prefetch:0",
        (
            Fact("config.train_prefetch", True),
            Fact("config.train_prefetch_queue", 2),
        ),
    ),
    Pattern(
        read_settings,
        r"(?=model_params:|world_size:|attention_mode:|tie_embeddings:|train_batch_tokens:|seed:|"
        r"  [a-z_]\w*: \S+$)",
        "world_size:8 grad_accum_steps:1",
        (Fact("world_size", 8), Fact("grad_accum_steps", 1)),
    ),
)
READERS = [(re.compile(pattern.regex), pattern.read) for pattern in PATTERNS]


def events(text: str) -> list[Event]:
    """What a line says, in its order."""
    for regex, read in READERS:
        if match := regex.match(text):
            return read(match, text)
    return []
