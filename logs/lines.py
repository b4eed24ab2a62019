"""What one line of a training log says: `events(text)` gives its events.

The function is pure: the same text always gives the same events, whatever stands around it. What
follows from the order of lines is decided in runs.py; which result was submitted in results.py.

PATTERNS is the whole knowledge of how lines are written: for each kind of line a regular
expression, the function that reads a match, and an example with its events, which is also its test.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_VALUE = 400  # characters of a value
MAX_BPB = 30  # a larger number is no result

# What a result is, by the first pattern that is found in what the log calls it. Those above
# "ttt" never count as a result that is submitted.
NAMES = (
    (
        "progress",
        r"(?<![a-z])chunk[\s:=\[]+\d|progress|(?<![a-z])(batch|run)_(bpb|loss)|running[_ ]|cumul|"
        r"\d\s*/\s*\d|\d\s?%|^\W*(step|iter|epoch)|(?<![a-z])rank:\d",
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
        r"(pre[-_ ]?(gptq|export)|full.?prec|(fp|bf|float)_?(16|32)\b|post.?ema|"
        r"(^|[\W_])((post[-_ ]?)?(ema|swa|lawa|raw)\b|(ema|swa|lawa|raw)_(val_)?bpb))"
        r"|pre[-_ ]?quant|un-?quant",
    ),
    ("diagnostic", r"diagnostic"),
    ("ttt", r"ttt|test.?time"),
    ("sliding", r"slid|stride|(^|[\W_])sw([\W_\d]|$)"),
    ("roundtrip", r"round_?trip|quant|int\d|zlib|zstd|lzma|brotli|decoded|artifact"),
    ("other", r""),
)
KINDS = ("pre_quant", "diagnostic", "roundtrip", "sliding", "ttt", "other", "validation")
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
    coarse_time_ms: float | None = None  # as train_time_ms, printed in tenths of minutes
    step_avg_ms: float | None = None  # as printed
    step_ms: float | None = None  # of this step alone, where the log prints that
    tokens_per_second: float | None = None


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

    kind: str  # one of KINDS
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
class Bytes:
    """A statement about sizes."""

    # model, code, packed_code, artifact, total; raw_total (perhaps of the uncompressed model) or
    # artifact_total (a total where no other is stated)
    what: str
    count: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A name with its printed value. `indented`: of a block, where a value may have spaces."""

    name: str
    value: str
    indented: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """A field of the run that this line states."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Begin:
    """A line that stands at the beginning of a run."""

    what: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Training ended before its last step."""

    reason: str
    step: int | None = None
    train_time_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """`traceback`: one begins; `raised`: its last line; `error`: a message of the trainer."""

    what: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that ought to say something, and why it does not."""

    reason: str


Event = Step | Validation | Result | Bytes | Setting | Fact | Begin | Stop | Failure | Unreadable


# --- values ---

NUMBER = r"-?(?:\d[\d,]{0,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"
TIME_MS = {"ms": 1.0, "": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6}
# Names and gaps are bounded, so that no line takes more time than its length.
PAIR = re.compile(
    r"(?<![\w/.])([A-Za-z_][\w/.]{0,60})[ \t]{0,20}[:=][ \t]{0,20}"
    rf"({NUMBER})(ms|min|m|s|h|%)?(?![\w.])"
)
Pairs = dict[str, tuple[str, str]]  # name: number and unit


def number(value: object) -> float | None:
    """A float from a JSON value or a printed number; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value.replace(",", "") if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None


def whole(value: object) -> int | None:
    quantity = number(value)
    return int(quantity) if quantity is not None and math.isfinite(quantity) else None


def typed(text: str) -> Any:
    """A setting's printed value as bool, int, float or str."""
    text = text.strip()[:MAX_VALUE]
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    value = number(text) if re.fullmatch(NUMBER, text) and "," not in text else None
    return text if value is None else value


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def pairs_of(text: str) -> Pairs:
    return {name: (value, unit) for name, value, unit in PAIR.findall(text)}


def time_ms(pairs: Pairs, *names: str) -> float | None:
    """The first of `names` in milliseconds, whatever its unit."""
    for name in names:
        if name in pairs and pairs[name][1] != "%":
            value = number(pairs[name][0])
            return None if value is None else value * TIME_MS[pairs[name][1]]
    return None


def figure(pairs: Pairs, *names: str) -> float | None:
    return next((number(pairs[name][0]) for name in names if name in pairs), None)


# --- what stands in front of a line ---

# A time, a rank or a level.
PREFIX = re.compile(
    r"(?:[ \t]*(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?|"
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?|\[?\d{9,11}\.\d+\]?|"
    r"\[\s*\d+(?:\.\d+)?s?\]|\d+\.\d+s?\s*(?=\|)|"
    r"\[?(?:rank|default|worker|node)[ _]?\d+\]?(?=[:\]| ])|"
    r"\[(?:modal|local)\]|\[?(?:INFO|DEBUG)\]?(?=[:\]| -]))"
    r"(?:[ \t]*[:|-])?[ \t]?)+"  # more blanks are the line's own: settings are indented
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def without_prefix(text: str) -> str:
    if text[:1] in "[0123456789rdwnID" and (prefix := PREFIX.match(text)):
        return text[prefix.end() :]
    return text


# --- lines that begin a run, and failures ---


def read_begin(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    if match["enabled"]:
        # The settings of this line count, too.
        return [Begin("enabled"), *read_settings(match, text, cut)]
    if match["block"]:
        return [Begin("block")]
    return [Begin("path")]


def read_version(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    python = [Begin("python")] if text.startswith("Running Python") else []
    name = "python" if match[1] == "Python" else "torch"
    return [*python, Fact(f"versions.{name}", match[2])]


def read_device(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Fact("device", match[1])]


def read_nothing(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return []


def read_failure(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    if text.startswith("Traceback"):
        return [Failure("traceback")]
    return [Failure("error", text[7:][:MAX_VALUE])]


def read_raised(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Failure("raised", text[:MAX_VALUE])]


# --- steps ---

CRC = re.compile(r"\bdata_crc:([0-9a-f]{8})\b")
# Words instead of names, and no sign in front of the number: `Val Loss: 2.4`, `val loss 2.4`.
LOOSE = re.compile(
    rf"\b(?:(train|val|validation)[ _]?)?(loss|bpb)\b[ \t]{{0,9}}[:=]?[ \t]{{0,9}}({NUMBER})"
    r"(?![\w.])",
    re.IGNORECASE,
)


def loose_pairs(text: str) -> Pairs:
    """Losses and bits per byte, however they are written; the first of each name."""
    pairs: Pairs = {}
    if text.lstrip()[:1] in (":", "|", ",", "-"):
        for split, quantity, value in LOOSE.findall(text):
            split = "val" if split.lower().startswith("val") or quantity.lower() == "bpb" else split
            pairs.setdefault(f"{split.lower() or 'train'}_{quantity.lower()}", (value, ""))
    return pairs


def read_step(match: re.Match[str], text: str, cut: bool) -> list[Event] | None:
    """A training line or a validation of a step; None: it only looks like one."""
    step, rest = int(match[1]), match[3]
    if "final" in rest:
        return None
    pairs = pairs_of(rest)
    if cut and rest and not rest.endswith(("ms", "s", "%")) and "tok/s" not in pairs:
        return [Unreadable("the last line is cut off")]
    if not {"train_loss", "loss", "train/loss", "val_loss", "val_bpb"} & set(pairs):
        pairs = loose_pairs(rest) | {k: v for k, v in pairs.items() if k in ("train_time", "t")}
    time = time_ms(pairs, "train_time", "t", "time")
    loss = figure(pairs, "train_loss", "loss", "train/loss")
    if "val_loss" in pairs or "val_bpb" in pairs:
        digits = decimals(pairs["val_bpb"][0]) if "val_bpb" in pairs else None
        scored = figure(pairs, "val_loss"), figure(pairs, "val_bpb")
        partial = "partial_val:1" in rest
        return [Validation(step, *scored, time, digits, whole(match[2]), partial)]
    if loss is not None:
        coarse = time if pairs.get("train_time", ("", ""))[1] in ("m", "min") else None
        crc = CRC.search(rest)
        return [
            Step(
                step,
                loss,
                train_time_ms=None if coarse is not None else time,
                data_crc=crc[1] if crc else None,
                coarse_time_ms=coarse,
                step_avg_ms=time_ms(pairs, "step_avg"),
                tokens_per_second=figure(pairs, "tok_s", "tok/s"),
            )
        ]
    if re.search(r"(?:train|val)_loss|val_bpb", rest) and "None" not in rest:
        return [Unreadable(f"a step without a readable loss: {text.strip()[:80]}")]
    return []


def read_nanogpt(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    if cut and not text.endswith(("ms", "%")):
        return [Unreadable("the last line is cut off")]
    return [Step(int(match[1]), float(match[2]), step_ms=float(match[3]))]


def read_stop(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    step = re.search(r"\bstep:\s*(\d{1,12})", text)
    time = time_ms(pairs_of(text), "train_time")
    return [Stop(match[1][:MAX_VALUE], int(step[1]) if step else None, time)]


# --- results ---

# The name, the number and, where an arrow follows, the number behind it.
BPB = re.compile(
    r"(?<![\w/.-])([\w/.-]{0,60}?(?:bpb|bits[ _]?per[ _]?byte))[\"']?(?:[ \t]?\([^()]{0,40}\))?"
    rf"[ \t]{{0,20}}(?:[:=][ \t]{{0,20}}|(?=\d\.\d{{3}}))({NUMBER})"
    rf"(?:[ \t]?(?:->|→|=>)[ \t]?({NUMBER}))?(?![\w.]|\.\d)",
    re.IGNORECASE,
)
LOSS = re.compile(rf"(?<![a-zA-Z])(?:val_?|test_)?loss[ \t]{{0,20}}[:=][ \t]{{0,20}}({NUMBER})")


def result_kind(name: str) -> str:
    """What a log calls a result: one of KINDS, or progress."""
    return next(kind for kind, pattern in _NAMES if pattern.search(name))


def kind_in_line(name: str, line: str) -> str:
    kind = result_kind(name)
    if kind in ("roundtrip", "sliding", "other"):
        later = result_kind(line)  # such as eval_mode:online_ttt behind the number
        kind = later if later in ("sliding", "ttt") else kind
    return kind


def read_results(match: re.Match[str], text: str, cut: bool) -> list[Event] | None:
    """A line with bits per byte, after training or while it is evaluated."""
    text = text.lstrip()
    if "Size" in text:
        return None
    numbers = list(BPB.finditer(text))
    if not numbers or text.startswith("val_bpb:byte_sidecar"):
        if re.search(r"\bval_bpb[:=](?!enabled|byte)", text):
            return [Unreadable(f"a result without a readable val_bpb: {text[:80]}")]
        return None
    last = numbers[-1]
    complete = 8 if "_exact" in text else 4
    if cut and last.end() == len(text) and decimals(last[3] or last[2]) < complete:
        return [Unreadable("the last line is cut off")]
    results, first_kind, at = [], None, 0
    for pair in numbers:
        front, at = text[at : pair.start()], pair.end()
        kind = kind_in_line(front + pair[1], text if len(numbers) == 1 else "")
        kind = first_kind if kind == "other" and first_kind in SUBMITTED else kind
        first_kind = first_kind or kind
        if first_kind == "progress":
            break
        results += read_result(kind, front, pair, text)
    return results


def read_result(kind: str, front: str, pair: re.Match[str], text: str) -> list[Event]:
    printed = pair[3] or pair[2]
    value, loss = number(printed), LOSS.search(text)
    impossible = value is None or value <= 0 or value > MAX_BPB
    if kind == "progress" or len(front) > MAX_VALUE or impossible:
        return []
    label = re.split(r"(?:\b(?:val_loss|stride|sliding val_loss)\b\s*[:=]|$)", front)[0]
    name = label.strip(" :=|-,;([{\"'") or pair[1]
    eval_ms = time_ms(pairs_of(text), "eval_time", "elapsed", "time")
    figures = loss and number(loss[1]), value, eval_ms, decimals(printed)
    return [Result(kind, name, *figures, "partial_val:1" in text)]


# --- bytes and reports ---


def read_bytes(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [
        Bytes(size_name(label, codec), int(digits.replace(",", "")))
        for label, codec, digits in BYTES.findall(text)
    ]


def size_name(label: str, codec: str) -> str:
    if label == "Code size":
        return "packed_code" if codec == "compressed" else "code"
    if label == "Raw model" or label == "Serialized model" and not codec:
        return "model"
    if label.startswith("Total") or label == "budget":
        return "total" if codec else "raw_total"
    return "artifact_total" if label == "artifact_bytes" else "artifact"


BYTES = re.compile(
    r"(Serialized model|Code size|Total submission size|Total submission|Raw model|artifact_bytes|"
    r"budget|[\w.+-]{1,40} model)(?: ?\(?([\w+.-]{1,40})\)?)?\s*:\s*(\d[\d,]{0,20})(?: bytes)?"
    r"(?![\w.])"
)


def read_train_times(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    pairs = pairs_of(text)
    return [
        Fact("train_time_ms", time_ms(pairs, "timing_train_loop_ms")),
        Fact("val_total_ms", time_ms(pairs, "timing_val_total_ms")),
    ]


def read_memory(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Fact("peak_mib", int(match[1]))]


def read_input_wait(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    total = time_ms(pairs_of(text), "total")
    return [
        Fact("input_wait_ms", total),
        Fact("input_wait_percent", number(match[1])),
        Fact("epochs", number(match[2])),
    ]


def read_code_size(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Bytes("code", int(match[1]))]


def read_eval_time(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Fact("eval_total_ms", 1e3 * (number(match[1]) or 0))]


def read_resumed(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Fact("resumed_from", int(match[1]))]


# --- settings ---

# Names of lines, not of settings.
NOT_SETTINGS = re.compile(
    r"(?:\w+_)?warmup_step|step|error|warning|logs|peak|input|val_bpb|val_progress|https?|trace|"
    r"timing_breakdown|(?:train|val)_(?:io|loader)|shards|sdp_backends|val_stage_time_ms|data_verify"
)
WORDS = re.compile(r"[a-z_]\w*[:=]\S+(?:\s+[a-z_]\w*[:=]\S+)*\s*$")
SETTING = re.compile(r"([a-z_]\w*):(?:\s+(.*?))?\s*$")


def read_dataset(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    return [Fact("dataset", match[1][:MAX_VALUE]), Fact("train_shards", whole(match[2]))]


def read_split(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    partial = [Fact("partial_val", True)] if "partial_val:1" in text else []
    return [Fact("val_tokens", int(match[1])), *partial]


def read_overlap(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    """What overlaps in effect, under the names of the settings. A switch that cannot be on has its
    reason behind it, and a name of its own: what it was set to is not known. Neither are sizes of
    queues that are not used."""
    split, result = match[1], []
    entries = re.findall(r"\b(prefetch|copy_stream|prefetch_queue):(\w+)(\([\w ,]*\))?", match[2])
    for name, value, reason in entries:
        if reason:
            result.append(Setting(f"{split}_io_{name}", value + reason))
        elif value != "0" or name != "prefetch_queue":
            result.append(Setting(f"{split}_{name}", value))
    return result


def read_settings(match: re.Match[str], text: str, cut: bool) -> list[Event]:
    """Words of key:value, or one `key: value`."""
    bare = text.strip()
    if re.match(r"(?:\w+_)?warmup_\w*step|sdp_backends:", bare):
        return []
    if WORDS.match(bare):
        pairs = re.findall(r"\b([a-z_]\w{0,60})[:=](\S+)", bare)
        return [Setting(*pair) for pair in pairs if is_setting(*pair)]
    setting = SETTING.match(bare)
    if setting is None or not is_setting(setting[1], setting[2] or ""):
        return []
    return [Setting(setting[1], (setting[2] or "").strip(), text != bare)]


def is_setting(name: str, value: str) -> bool:
    return not NOT_SETTINGS.fullmatch(name) and "//" not in value


# --- the table ---


class Pattern(NamedTuple):
    """A kind of line: tried in the order of PATTERNS; `read` may say None: not this kind."""

    name: str
    regex: re.Pattern[str]
    read: Callable[[re.Match[str], str, bool], list[Event] | None]
    example: str
    events: tuple[Event, ...]


PATTERNS = (
    Pattern(
        "beginning",
        re.compile(
            r"(?P<enabled>val_bpb:enabled)|(?P<block>Hyperparameters:)|logs/[^\s]{1,300}\.txt$"
        ),
        read_begin,
        "logs/try7.txt",
        (Begin("path"),),
    ),
    Pattern(
        "version",
        re.compile(r"(?:Running )?(Python|PyTorch)[: ]+(\d[\w.+]*)"),
        read_version,
        "Running PyTorch 2.9.1+cu128",
        (Fact("versions.torch", "2.9.1+cu128"),),
    ),
    Pattern(
        "device",
        re.compile(
            r"\|\s+\d+\s+((?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b[^|]*?)\s+(?:On|Off|N/A)\s+\|"
        ),
        read_device,
        "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |",
        (Fact("device", "NVIDIA H100 80GB HBM3"),),
    ),
    Pattern("rule", re.compile(r"={20,}\s*$"), read_nothing, 100 * "=", ()),
    Pattern(
        "failure",
        re.compile(r"Traceback \(most recent call last\)|error: "),
        read_failure,
        "error: rank 3: no shard",
        (Failure("error", "rank 3: no shard"),),
    ),
    Pattern(
        "raised",
        re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*))?$"),
        read_raised,
        "torch.OutOfMemoryError: CUDA out of memory.",
        (Failure("raised", "torch.OutOfMemoryError: CUDA out of memory."),),
    ),
    Pattern(
        "nanoGPT's step",
        re.compile(r"\s*iter (\d{1,12}): loss ([\d.]{1,18}), time ([\d.]{1,18})ms"),
        read_nanogpt,
        "iter 100: loss 3.2011, time 135.25ms, mfu 30.1%",
        (Step(100, 3.2011, step_ms=135.25),),
    ),
    Pattern(
        "step",
        re.compile(
            r"\s*\[?(?:step|iter|iteration)\s*[:= ]\s*(\d{1,12})(?:\s*/\s*(\d{1,12}))?"
            r"(?![\w.])(.*)",
            re.IGNORECASE,
        ),
        read_step,
        "Step 1999 | Val Loss: 2.4048 | Val BPB: 1.4242",
        (Validation(1999, 2.4048, 1.4242, digits=4),),
    ),
    Pattern(
        "step without its word",
        re.compile(r"\s*(\d{1,12})/(\d{1,12})\s+((?:train_|val_)?loss\s*[:=].*)"),
        read_step,
        "500/20000 train_loss: 3.3800 train_time: 0.8m tok/s: 7764000",
        (Step(500, 3.38, coarse_time_ms=48_000.0, tokens_per_second=7_764_000.0),),
    ),
    Pattern(
        "stop",
        re.compile(r"\s*(?:stopping_early|early_?stop\w*)\s*[:=]\s*(\S+)"),
        read_stop,
        "stopping_early: wallclock_cap train_time:20500ms step:500/20000",
        (Stop("wallclock_cap", 500, 20_500.0),),
    ),
    Pattern(
        "result",
        re.compile(r"(?i)(?=.*(?:bpb|bits[ _]?per[ _]?byte))"),
        read_results,
        "final_int8_zlib_roundtrip val_loss:2.4200 val_bpb:1.4333 eval_time:1401ms",
        (Result("roundtrip", "final_int8_zlib_roundtrip", 2.42, 1.4333, 1401.0, 4),),
    ),
    Pattern(
        "bytes",
        re.compile(rf"(?=.*?{BYTES.pattern})"),
        read_bytes,
        "Total submission size int8+zlib: 15,750,424 bytes",
        (Bytes("total", 15_750_424),),
    ),
    Pattern(
        "times",
        re.compile(r"\s*timing_train_loop_ms"),
        read_train_times,
        "timing_train_loop_ms:27401ms timing_val_total_ms:18122ms",
        (Fact("train_time_ms", 27_401.0), Fact("val_total_ms", 18_122.0)),
    ),
    Pattern(
        "memory",
        re.compile(r"\s*peak memory allocated: (\d{1,12}) MiB"),
        read_memory,
        "peak memory allocated: 10210 MiB reserved: 10236 MiB",
        (Fact("peak_mib", 10_210),),
    ),
    Pattern(
        "input wait",
        re.compile(r"\s*input_wait .*?\b(?:percent|share):([\d.]{1,12})%? .*?epochs:([\d.]{1,18})"),
        read_input_wait,
        "input_wait total:1.198ms share:0.004% p99:0.120ms max:0.253ms slowest:1 epochs:0.027",
        (Fact("input_wait_ms", 1.198), Fact("input_wait_percent", 0.004), Fact("epochs", 0.027)),
    ),
    Pattern(
        "code size",
        re.compile(r"\s*artifact:[\d.]{1,12}MB .*\bcode:(\d{1,12})"),
        read_code_size,
        "artifact:15.92MB ternary:6(7B) code:70000",
        (Bytes("code", 70_000),),
    ),
    Pattern(
        "evaluation time",
        re.compile(r"\s*total_eval_time:\s*([\d.]{1,18})s"),
        read_eval_time,
        "total_eval_time:372.5s",
        (Fact("eval_total_ms", 372_500.0),),
    ),
    Pattern(
        "resumed",
        re.compile(r"\s*resumed: step:(\d{1,12})"),
        read_resumed,
        "resumed: step:400 resumed_from:checkpoints/x/step_00000400.pt",
        (Fact("resumed_from", 400),),
    ),
    Pattern(
        "training data",
        re.compile(r"\s*train_loader:dataset:(\S+)(?: train_shards:(\d{1,9}))?"),
        read_dataset,
        "train_loader:dataset:fineweb10B_sp1024 train_shards:80",
        (Fact("dataset", "fineweb10B_sp1024"), Fact("train_shards", 80)),
    ),
    Pattern(
        "validation data",
        re.compile(r"\s*val_loader:.*?\btokens:\s*(\d{1,15})"),
        read_split,
        "val_loader:shards pattern=./data/fineweb_val_*.bin tokens:62021632",
        (Fact("val_tokens", 62_021_632),),
    ),
    Pattern(
        "overlap",
        re.compile(r"\s*(train|val)_io:(.*)"),
        read_overlap,
        "train_io:prefetch:True copy_stream:False(no_cuda) prefetch_queue:2 gpu_prefetch:0",
        (
            Setting("train_prefetch", "True"),
            Setting("train_io_copy_stream", "False(no_cuda)"),
            Setting("train_prefetch_queue", "2"),
        ),
    ),
    Pattern(
        "settings",
        re.compile(r"\s*[a-z_]\w*[:=]"),
        read_settings,
        "train_seq_len:1024 iterations:20000",
        (Setting("train_seq_len", "1024"), Setting("iterations", "20000")),
    ),
)


def events(text: str, cut: bool = False) -> list[Event]:
    """What a line says, in its order. `cut`: the file ends in it, without a line end."""
    for pattern in PATTERNS:
        if match := pattern.regex.match(text):
            result = pattern.read(match, text, cut)
            if result is not None:
                return result
    return []
