"""Reads training logs of the parameter-golf family: a Run for each log, and in words what could
not be read.

A run of our trainer is read from its .jsonl alone. Any other log is text: of the challenge's
script and its descendants, or a .txt of ours without its .jsonl. Its result is the last one on the
decoded artifact that is not followed by a training step. What a launcher put in front of every
line is taken off. A damaged file raises nothing, and nothing that it contains is executed.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
    mean_loss: float | None = None  # of the steps since the line before


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
    return [Step(step, train_loss, time, crc[1] if crc else None, figure("mean_loss", rest))]


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


def line_events(text: str) -> list[Event]:
    """What a line says, in its order."""
    partial: list[Event] = [Fact("partial_val", True)] if "partial_val:1" in text else []
    for regex, read in READERS:
        if match := regex.match(text):
            return [*read(match, text), *partial]
    return []


# --- a run, and its files ---

MAX_BYTES = 50_000_000  # of a log; those of the field have 200,000
MAX_LINE = 1 << 12  # characters of one line
LOG_SUFFIXES = {".txt", ".log"}
# They quote lines of logs, or lie beside them.
NO_LOGS = {".md", ".rst", ".py", ".json", ".ptz", ".gz", ".pt", ".png", ".svg"}
CUT = re.compile(r"[:=][ ]?\d*\.?\d{0,3}\Z")  # the end of a log that ends inside a number
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
STEP_LINE = r"(?:step:)?\d{1,12}/\d{1,12}\s+(?:train|val)_loss: ?\d"
FRONTED = re.compile(rf"(.{{1,80}}?){STEP_LINE}")
VERSIONS = re.compile(r"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
# The first line of a script: an import, a comment or a string.
START = re.compile(r"^(?:import \w|from [\w.]+ import |#|[rRuU]?[\"'])", re.MULTILINE)


@dataclass
class Run:
    """What one run left in a log. None, or an empty collection: the log does not say."""

    path: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    settings: dict[str, str] | None = None  # those that were given, as text
    made_of: dict[str, str] = field(default_factory=dict)  # script, tokenizer, shards: checksums
    machine: dict[str, Any] = field(default_factory=dict)  # device, cpus, torch, python
    world_size: int | None = None
    micro_steps: int | None = None  # in effect
    model_params: int | None = None
    dataset: str | None = None
    train_shards: int | None = None
    val_tokens: int | None = None  # predicted tokens of the validation split
    steps: list[Step] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # all after the last training step
    result: Result | None = None  # the one that counts
    code_bytes: int | None = None  # of the script as it is
    model_bytes: int | None = None  # compressed
    total_bytes: int | None = None  # what is held against the cap
    train_time_ms: float | None = None  # of the whole training
    val_total_ms: float | None = None
    eval_ms: float | None = None  # of the evaluation after training
    input_wait_ms: float | None = None  # of the whole training
    source: bytes | None = field(default=None, repr=False)  # the script's text in a text log
    scripts: list[str] = field(default_factory=list)  # sha256 of each script that trained it
    resumed_at: list[int] = field(default_factory=list)  # first step of each continuation
    partial_val: bool = False  # scored on a part of the validation split
    status: str = "unfinished"  # finished, failed, interrupted, unfinished, no steps
    error: str | None = None
    conditions: dict[str, Any] | None = field(default=None, repr=False, compare=False)  # samples.py

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def seed_in_name(self) -> int | None:
        match = re.search(r"seed[_-]?(\d{1,9})", self.name, re.IGNORECASE)
        return int(match[1]) if match else None

    @property
    def known_seed(self) -> int | None:
        return self.seed_in_name if self.seed is None else self.seed

    @property
    def last_step(self) -> int:
        return max(0, last_line(self))

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of training per step."""
        if self.train_time_ms is None or not self.last_step:
            return None
        return self.train_time_ms / self.last_step

    def input_wait_per_step(self) -> float | None:
        """Milliseconds per step spent waiting for input."""
        if self.input_wait_ms is None or not self.last_step or self.resumed_at:
            return None
        return self.input_wait_ms / self.last_step

    def crc_at(self) -> dict[int, str]:
        """data_crc of each logged step."""
        return {s.step: s.data_crc for s in self.steps if s.data_crc is not None}


@dataclass
class Logs:
    """The runs of some logs in order, and what could not be read."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> Logs:
    """Files and folders of logs. Each run once: a .txt and the .jsonl beside it are one log."""
    result, distinct_runs = Logs(), {}
    for path in expanded(paths, result.problems):
        log = read_log(path)
        distinct_runs |= {os.path.realpath(run.path): run for run in log.runs}
        result.problems += [f"{path}: {problem}" for problem in log.problems]
    result.runs = [*distinct_runs.values()]
    return result


def expanded(paths: Iterable[str | os.PathLike[str]], problems: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        files = [file for file in path.iterdir() if file.is_file()]
        logs = [f for f in files if f.suffix in LOG_SUFFIXES and f.name != "requirements.txt"]
        stems = {log.stem for log in logs}
        logs += [f for f in files if f.suffix == ".jsonl" and f.stem not in stems]
        yield from sorted(logs)
        if not logs:
            problems.append(f"{path}: a folder without .txt, .log or .jsonl files: name the logs")


def read_log(path: str | os.PathLike[str], events: bool = True) -> Logs:
    """One file, or the .jsonl beside it if `events`. Raises nothing: its problems say it."""
    log, path = Logs(), Path(path)
    if path.suffix.lower() in NO_LOGS:
        log.problems.append("no log by its name: name the .jsonl, .txt or .log file of a run")
        return log
    beside = path.with_suffix(".jsonl")
    if events and path.suffix in LOG_SUFFIXES and beside.is_file():
        path = beside
    try:
        read = read_events if path == beside else read_text
        run = read(path, text_of(read_file(path)), log.problems)
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    if not (run.steps or run.validations or run.results or run.error):
        log.problems.append("no training log: no step and no result is in it")
    else:
        log.runs.append(run)
    return log


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """The file's bytes. A pipe is refused unopened, and so is what has more than `most` bytes."""
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{size:,} bytes, of which {most:,} are read at most")
    return path.read_bytes()


def text_of(data: bytes) -> str:
    """Carriage returns are made plain, colours are taken off. A byte that is not UTF-8 comes back
    when the text is encoded in the same way."""
    zeros = data[:200:2].count(0), data[1:200:2].count(0)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or min(zeros) < 10 < 50 < max(zeros):
        raise ValueError("UTF-16: iconv -f UTF-16 -t UTF-8 LOG > NEW.log makes it UTF-8")
    if max(zeros) > 10:
        raise ValueError("a binary file, no log")
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    return COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


# --- our own trainer: events ---


NAMES = ("model_params", "dataset", "train_shards", "val_tokens", "world_size", "micro_steps")
COPIED = {  # what an event says of the run: its fields, and their names there
    "run": {name: name for name in (*NAMES, "settings")},
    "config": {"seed": "seed"},
    "input": {
        "train_time_ms": "timing_train_loop_ms",
        "val_total_ms": "timing_val_total_ms",
        "input_wait_ms": "total_ms",
    },
    "artifact": {"code_bytes": "code_bytes", "model_bytes": "artifact_bytes"},
    "end": {"status": "status", "error": "error"},
}
KEPT = ("path", "steps", "validations", "scripts", "resumed_at")  # when a run starts once more


def read_events(path: Path, text: str, problems: list[str]) -> Run:
    """The run that a .jsonl describes, without events that are damaged."""
    run, damaged = Run(os.fspath(path)), 0
    for line in text.splitlines():
        try:
            take_event(run, json.loads(line))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged line{'s' * (damaged > 1)} left out")
    if None not in (run.code_bytes, run.model_bytes):
        run.total_bytes = run.code_bytes + run.model_bytes
    settle(run)
    return run


def take_event(run: Run, event: dict[str, Any]) -> None:
    kind, time = event["event"], event.get("train_time_ms")
    known = {k: v for k, v in event.items() if k not in ("event", "time")}
    if kind == "run":  # its score and its end are still to come
        vars(run).update(vars(Run(**{name: getattr(run, name) for name in KEPT})))
    for ours, theirs in COPIED.get(kind, {}).items():
        setattr(run, ours, event.get(theirs) or None)
    if kind == "config":
        plain = {k: v for k, v in known.items() if isinstance(v, (str, int, float))}
        run.config = {k: typed(v) if isinstance(v, str) else v for k, v in plain.items()}
        run.seed = event.get("seed")
    elif kind == "made_of":
        run.made_of = {k: str(v) for k, v in known.items()}
        add_script(run, run.made_of.get("script", ""))
    elif kind == "hardware":
        run.machine = {k: v for k, v in known.items() if v}
    elif kind == "step":
        rest = time, event.get("data_crc"), event.get("mean_loss")
        step = Step(int(event["step"]), float(event["train_loss"]), *rest)
        append_step(run.steps, step)
    elif kind in ("validation", "score"):
        losses = float(event["val_loss"]), float(event["val_bpb"])
        if kind == "score":
            run.results = [Result("roundtrip", "score", *losses, event.get("eval_time_ms"))]
        else:
            append_step(run.validations, Validation(int(event["step"]), *losses, time))
    elif kind == "checkpoint" and "resumed_from" in event:  # what came after it is dropped
        run.resumed_at.append(int(event["step"]) + 1)
        drop_from(run, run.resumed_at[-1])
    run.partial_val |= bool(event.get("partial_val"))


# --- text: from the lines' events to a run ---


def without_fronts(text: str) -> str:
    """The text without what a launcher, a container or a logger has put in front of every line;
    ValueError where it stands in front of some lines only."""
    every = text.splitlines(keepends=True)
    if any(re.match(rf"\s?{STEP_LINE}", line) for line in every):
        return text
    fronts = [match[1] for line in every if (match := FRONTED.match(line))]
    if not fronts:
        return text
    inner, blank = fronts[-1].rstrip(), fronts[-1][len(fronts[-1].rstrip()) :]
    parts = re.findall(r"\w+|\s+|[^\w\s]", inner)
    words = [r"\w+" if p[0].isalnum() else r"\s+" if p.isspace() else re.escape(p) for p in parts]
    front = re.compile("".join(words) + f"(?:{blank}|(?=\n)|$)")
    kept = [(line, front.match(line)) for line in every if line.strip()]
    if not all(match for _, match in kept):
        raise ValueError(f"its step lines begin with {fronts[-1]!r}, others do not: remove it")
    return "".join(line[match.end() :] for line, match in kept)


def scripts_in(log: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each script in a log: it stands in front of a rule and the versions."""
    at = 0
    for versions in VERSIONS.finditer(log):
        if start := START.search(log, at, versions.start()):
            yield start.start(), versions.start()
        at = versions.end()


def events_of(text: str) -> Iterator[Event]:
    """The events of a log. The text of a script is one event."""
    at = 0
    for begin, end in [*scripts_in(text), (len(text), len(text))]:
        for line in text[at:begin].splitlines():
            yield from line_events(line[:MAX_LINE].rstrip())
        if begin < end:
            yield Fact("source", text[begin:end])
        at = end


def read_text(path: Path, text: str, problems: list[str]) -> Run:
    """The last run of a text log."""
    run, text = Run(os.fspath(path)), without_fronts(text)
    last = text[text.rfind("\n") + 1 :]
    if CUT.search(last):
        text = text.removesuffix(last)
        problems.append("the last line is cut off")
    for event in events_of(text):
        if isinstance(event, Result):
            run.results.append(event)
        elif isinstance(event, Fact):
            take_fact(run, event.name, event.value)
        else:
            rewind(run, event.step)
            append_step(run.steps if isinstance(event, Step) else run.validations, event)
    settle(run)
    if run.result:
        run.status = "finished" if run.steps or run.validations else "no steps"
    return run


def rewind(run: Run, step: int) -> None:
    """What follows from a line of this step: results before it were printed while training. If it
    goes back, the run was resumed there, or another one starts."""
    last = last_line(run)
    if step < last:
        drop_from(run, step)
        run.total_bytes = run.train_time_ms = None
        run.resumed_at = [*run.resumed_at, step] if step > 1 else []
        run.scripts = run.scripts if step > 1 else run.scripts[-1:]
    if step != last:
        run.results.clear()


def take_fact(run: Run, name: str, value: Any) -> None:
    kind, _, part = name.partition(".")
    if kind == "source":  # printing added one line end to the script's own
        run.source = value.removesuffix("\n").encode("utf-8", "surrogateescape")
        add_script(run, hashlib.sha256(run.source).hexdigest())
    elif kind in ("python", "torch", "device"):
        run.machine[kind] = value
    elif kind == "config":
        if not run.results:
            run.config[part] = value
    elif kind == "resumed":
        drop_from(run, value + 1)
        run.resumed_at.append(value + 1)
    else:
        setattr(run, name, value)


def add_script(run: Run, sha256: str) -> None:
    if not run.steps and not run.validations:
        run.scripts.clear()
    if sha256 and sha256 not in run.scripts[-1:]:
        run.scripts.append(sha256)


def last_line(run: Run) -> int:
    """The step of the last training line or validation; -1: there is none."""
    return max([-1, *(line.step for line in (*run.steps[-1:], *run.validations[-1:]))])


def drop_from(run: Run, step: int) -> None:
    """Takes back the lines of a step and of all after it."""
    for kept in (run.steps, run.validations):
        while kept and kept[-1].step >= step:
            kept.pop()


def append_step(kept: list[Any], line: Step | Validation) -> None:
    """The last line of a step counts."""
    if kept and kept[-1].step == line.step:
        kept.pop()
    kept.append(line)


def settle(run: Run) -> None:
    """What follows from the lines once a run is read: its result, first of all."""
    run.result = next((one for one in reversed(run.results) if one.kind in SUBMITTED), None)
    if run.result:
        timed = [r.eval_ms for r in run.results if r.kind == run.result.kind and r.eval_ms]
        run.eval_ms = timed[-1] if timed else None
    timed = [x for x in (*run.steps[-1:], *run.validations[-1:]) if x.train_time_ms is not None]
    if run.train_time_ms is None and timed:
        run.train_time_ms = max(timed, key=lambda line: line.step).train_time_ms
    if run.config.get("tie_embeddings") is True and "tied_embed_lr" not in run.config:
        # A text log prints the rate in effect.
        run.config["tied_embed_lr"] = run.config.pop("embed_lr", None)
        run.config.pop("head_lr", None)
    if run.model_bytes is None and None not in (run.total_bytes, run.code_bytes):
        run.model_bytes = run.total_bytes - run.code_bytes
