"""What one line of a training log says: `events(text)` gives its events.

runs.py decides what follows from the order of lines. The patterns at the end are the whole
knowledge of how lines are written.
"""

import math
import re
from typing import Any, NamedTuple

MAX_VALUE = 400  # characters of a value
# What a result is, by the first pattern that is found in its name.
KINDS = {
    "before": r"diagnostic|pre.?quant|un.?quant|(post.?)?ema\b|\bswa\b|\braw\b",
    "ttt": r"ttt|test.?time",
    "sliding": r"slid|stride|\bsw\b",
    "roundtrip": r"round_?trip|quant|int\d",
    "other": r"",
}
SUBMITTED = ("ttt", "sliding", "roundtrip", "other")  # measured on the decoded artifact


# --- events ---


class Step(NamedTuple):
    """A training line."""

    step: int
    train_loss: float  # nats per token
    train_time_ms: float | None = None  # training since its start
    data_crc: str | None = None


class Validation(NamedTuple):
    """A validation while training."""

    step: int
    val_loss: float  # nats per token
    val_bpb: float
    train_time_ms: float | None = None


class Result(NamedTuple):
    """A result after training."""

    kind: str  # one of KINDS
    name: str  # as the log calls it
    val_loss: float | None
    val_bpb: float
    eval_ms: float | None = None
    digits: int = 12  # decimals of val_bpb as printed; 12: full precision

    @property
    def bytes_per_token(self) -> float | None:
        values = (self.val_loss, self.val_bpb)
        if not all(value is not None and 0 < value < math.inf for value in values):
            return None
        return self.val_loss / math.log(2) / self.val_bpb


class Fact(NamedTuple):
    """A field of the run, or source, python, torch, device, config.NAME of a setting."""

    name: str
    value: Any


Event = Step | Validation | Result | Fact
# Words of a line of settings that are fields of the run.
FIELDS = {name: name for name in ("world_size", "model_params", "seed")}
FIELDS["grad_accum_steps"] = "micro_steps"


# --- values ---

# Lengths are bounded, so that no line takes more time than its length.
NUMBER = r"-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"
TIME_MS = {"ms": 1.0, "s": 1e3}


def figure(name: str, text: str) -> float | None:
    """The number of `name:number` or `name=number` in a line."""
    match = re.search(rf"(?<![\w/.]){name}[:=]\s?({NUMBER})(?![\w.])", text)
    return float(match[1]) if match else None


def time_ms(names: str, text: str) -> float | None:
    """The time after one of `names`. Minutes are too coarse to be used."""
    match = re.search(rf"\b(?:{names})[:=]\s?({NUMBER})(ms|s)\b", text)
    return float(match[1]) * TIME_MS[match[2]] if match else None


def typed(text: str) -> Any:
    """A setting's printed value as bool, int, float or str."""
    text = text.strip()[:MAX_VALUE]
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}|\d{1,3}(,\d{3}){1,5}", text):
        return int(text.replace(",", ""))
    return float(text) if re.fullmatch(NUMBER, text) else text


# --- what reads a match ---


def read_facts(match: re.Match[str], text: str) -> list[Event]:
    """Each named group is a field of the run."""
    return [Fact(name, typed(value)) for name, value in match.groupdict().items() if value]


def read_step(match: re.Match[str], text: str) -> list[Event]:
    """A training line or a validation of a step."""
    step, rest = int(match[1]), match[2]
    time = time_ms("train_time", rest)
    losses = figure("val_loss", rest), figure("val_bpb", rest)
    if None not in losses:
        return [Validation(step, *losses, time)]
    train_loss = figure("train_loss", rest)
    if train_loss is None:
        return []
    crc = re.search(r"\bdata_crc:([0-9a-f]{8})\b", rest)
    return [Step(step, train_loss, time, crc[1] if crc else None)]


def read_result(match: re.Match[str], text: str) -> list[Event]:
    """A name, val_loss and val_bpb, after training."""
    name, loss, bpb = match[1].strip(" :"), float(match[2]), match[3]
    kind = next(kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    time, digits = time_ms("eval_time|elapsed", text), len(bpb.partition(".")[2])
    return [Result(kind, name, loss, float(bpb), time, digits)]


def read_settings(match: re.Match[str], text: str) -> list[Event]:
    """Words of name:value; which overlap is in effect has the names of the settings."""
    split = f"{match['split']}_" if "split" in match.groupdict() else ""
    result = []
    for name, value in re.findall(r"\b([A-Za-z_]\w{0,60})(?:: ?|=)(\S+)", text[match.end() :]):
        if split and (value == "0" or name == "copy_stream"):
            continue  # not used; in effect only on CUDA
        known = FIELDS.get(name) if type(typed(value)) is int else None
        result.append(Fact(known or f"config.{split}{name.lower()}", typed(value)))
    return result


# --- how lines are written ---

# The first pattern that matches reads a line. tests/tools/test_reading.py has an example of each.
FACTS = (
    r"Running Python (?P<python>\d+\.\d+\.[\w.+]+)",
    r"Running PyTorch (?P<torch>\d+\.\d+\.[\w.+]+)",
    r"\|\s+\d+\s+(?P<device>(?:NVIDIA|Tesla|GeForce|Quadro|AMD)\b[^|]*?)\s+(?:On|Off|N/A)\s+\|",
    r"stopping_early:.*?\btrain_time: ?(?P<train_time_ms>\d{1,15})ms",
    r"timing_train_loop_ms:(?P<train_time_ms>\d{1,15})ms",
    r"input_wait total:(?P<input_wait_ms>[\d.]{1,18})ms ",
    r"(?:train_loader:dataset:(?P<dataset>\S{1,400}) )?train_shards: ?(?P<train_shards>\d+)",
    r"(?:val_loader:.* |val_)tokens: ?(?P<val_tokens>\d+)",
    r"resumed: step:(?P<resumed>\d{1,12})\b",
    r"Code size[^:]{0,40}: (?P<code_bytes>\d[\d,]{0,20}) bytes",
    r"Serialized model \(?[\w+.-]{1,40}\)?: (?P<model_bytes>\d[\d,]{0,20}) bytes",
    r"Total submission size[^:]{0,40}: (?P<total_bytes>\d[\d,]{0,20}) bytes",
)
RESULT = (
    rf"([A-Za-z][^{{}}\"']{{0,80}}?)\bval_loss[:=] ?({NUMBER})[ ,]"
    rf".*?\bval_bpb[:=] ?({NUMBER})(?![\w.])"
)
SETTINGS = (
    r"settings:",
    r"(?P<split>train|val)_io:",
    r"(?=model_params:|world_size:|attention_mode:|tie_embeddings:|train_batch_tokens:|seed:)",
    r"(?=  [a-z_]\w*: \S+$)",
)
STEP = r"(?:step:)?\s?(\d{1,12})(?:/\d{1,12})?\s+((?:train|val)_loss:.*)"
READERS = [(re.compile(STEP), read_step)]
READERS += [(re.compile(pattern), read_facts) for pattern in FACTS]
READERS += [(re.compile(pattern), read_settings) for pattern in SETTINGS]
READERS += [(re.compile(RESULT), read_result)]


def events(text: str) -> list[Event]:
    """What a line says, in its order."""
    partial: list[Event] = [Fact("partial_val", True)] if "partial_val:1" in text else []
    for regex, read in READERS:
        if match := regex.match(text):
            return [*read(match, text), *partial]
    return []
