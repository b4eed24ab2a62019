"""Reads training logs of the parameter-golf family: a Run for each log, and in words what could
not be read. tools/README.md says which logs, and which result counts.

What the lines of a text log say becomes the events of a .jsonl. A damaged file raises nothing, and
nothing that it contains is executed.
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

# What a result is, by the first pattern that is found in its name.
KINDS = {
    "before": r"diagnostic|pre.?quant|un.?quant|(post.?)?ema\b|\bswa\b|\braw\b",
    "ttt": r"ttt|test.?time",
    "sliding": r"slid|stride|\bsw\b",
    "roundtrip": r"round_?trip|quant|int\d|^score$",
    "other": r"",
}
SUBMITTED = ("ttt", "sliding", "roundtrip", "other")  # measured on the decoded artifact


class Line(NamedTuple):
    """A training line, or a validation while training."""

    step: int
    train_time_ms: float | None = None  # training since its start
    train_loss: float | None = None  # nats per token
    mean_loss: float | None = None  # of the steps since the line before
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None
    data_crc: str | None = None


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


Event = dict[str, Any]  # a line of a .jsonl, or what a line of text says in the same words

# Lengths are bounded, so that no line takes more time than its length.
NUMBER = r"-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"


def figure(name: str, text: str) -> float | None:
    """The number of `name:number` or `name=number` in a line."""
    match = re.search(rf"(?<![\w/.]){name}[:=]\s?({NUMBER})(?![\w.])", text)
    return float(match[1]) if match else None


def time_ms(names: str, text: str) -> float | None:
    """The time after one of `names`. Minutes are too coarse to be used."""
    match = re.search(rf"\b(?:{names})[:=]\s?({NUMBER})(ms|s)\b", text)
    return float(match[1]) * (1 if match[2] == "ms" else 1e3) if match else None


def typed(value: Any) -> Any:
    """A setting's printed value as bool, int, float or str."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}|\d{1,3}(,\d{3}){1,5}", text):
        return int(text.replace(",", ""))
    return float(text) if re.fullmatch(NUMBER, text) else text


# The first pattern that matches reads a line. tests/tools/test_reading.py has an example of each.
STEP = re.compile(r"(?:step:)?\s?(\d{1,12})(?:/\d{1,12})?\s+((?:train|val)_loss:.*)")
FACTS = {  # events, and lines that say their values, as named groups
    "hardware": (
        r"Running Python (?P<python>\d+\.\d+\.[\w.+]+)",
        r"Running PyTorch (?P<torch>\d+\.\d+\.[\w.+]+)",
        r"\|\s+\d+\s+(?P<device>(?:NVIDIA|Tesla|GeForce|AMD)\b[^|]*?)\s+(?:On|Off|N/A)\s+\|",
    ),
    "input": (
        r"stopping_early:.*?\btrain_time: ?(?P<timing_train_loop_ms>\d{1,15})ms",
        r"timing_train_loop_ms:(?P<timing_train_loop_ms>\d{1,15})ms",
        r"input_wait total:(?P<total_ms>[\d.]{1,18})ms ",
    ),
    "data": (
        r"(?:train_loader:dataset:(?P<dataset>\S{1,400}) )?train_shards: ?(?P<train_shards>\d+)",
        r"(?:val_loader:.* |val_)tokens: ?(?P<val_tokens>\d+)",
    ),
    "warning": (r"WARNING: (?P<text>.+)",),
    "checkpoint": (r"resumed: step:(?P<step>\d{1,12})(?P<resumed_from>\b.*)",),
    "artifact": (
        r"Code size[^:]{0,40}: (?P<code_bytes>\d[\d,]{0,20}) bytes",
        r"Serialized model \(?[\w+.-]{1,40}\)?: (?P<artifact_bytes>\d[\d,]{0,20}) bytes",
        r"Total submission size[^:]{0,40}: (?P<total_bytes>\d[\d,]{0,20}) bytes",
    ),
}
FACTS = [(kind, re.compile(pattern)) for kind, patterns in FACTS.items() for pattern in patterns]
SETTINGS = re.compile(
    r"settings:|(?P<split>train|val)_io:|"
    r"(?=model_params:|world_size:|attention_mode:|tie_embeddings:|train_batch_tokens:|seed:)|"
    r"(?=  [a-z_]\w*: \S+$)"
)
RESULT = re.compile(
    rf"([A-Za-z][^{{}}\"']{{0,80}}?)\bval_loss[:=] ?({NUMBER})[ ,]"
    rf".*?\bval_bpb[:=] ?({NUMBER})(?![\w.])"
)


def line_event(text: str) -> Event | None:
    """What a line says, as an event."""
    if match := STEP.match(text):
        return step_event(int(match[1]), match[2])
    for kind, pattern in FACTS:
        if match := pattern.match(text):
            values = {name: typed(value) for name, value in match.groupdict().items()}
            return {"event": kind} | {n: v for n, v in values.items() if v is not None}
    if match := SETTINGS.match(text):
        return settings_event(match["split"], text[match.end() :])
    if match := RESULT.match(text):
        name, loss, bpb = match[1].strip(" :"), float(match[2]), match[3]
        values = {"name": name, "val_loss": loss, "val_bpb": float(bpb)}
        time, digits = time_ms("eval_time|elapsed", text), len(bpb.partition(".")[2])
        return {"event": "score", **values, "eval_time_ms": time, "digits": digits}
    return None


def step_event(step: int, text: str) -> Event | None:
    """A training line or a validation of a step."""
    values = {"step": step, "train_time_ms": time_ms("train_time", text)}
    values |= {name: figure(name, text) for name in ("val_loss", "val_bpb")}
    if None not in (values["val_loss"], values["val_bpb"]):
        return {"event": "validation", **values}
    values |= {name: figure(name, text) for name in ("train_loss", "mean_loss")}
    crc = re.search(r"\bdata_crc:([0-9a-f]{8})\b", text)
    values["data_crc"] = crc[1] if crc else None
    return {"event": "step", **values} if values["train_loss"] is not None else None


def settings_event(split: str | None, text: str) -> Event:
    """Words of name:value; which overlap is in effect has the names of the settings."""
    result: Event = {"event": "settings"}
    for name, value in re.findall(r"\b([A-Za-z_]\w{0,60})(?:: ?|=)(\S+)", text):
        if split and (value == "0" or name == "copy_stream"):
            continue  # not used; in effect only on CUDA
        result[f"{split}_{name}" if split else name.lower()] = typed(value)
    return result


MAX_BYTES = 50_000_000  # of a log; those of the field have 200,000
MAX_LINE = 1 << 12  # characters of one line
# Names of the run, its files and its processes: no part of a configuration.
NOT_CONFIGURATION = re.compile(
    r"run_id|seed|resume|device|rank|local_rank|distributed|is_main_process|warning|logfile|"
    r".*(_|log)(dir|path|file|files)"
)
MADE_OF = {  # conditions that are checksums: the names of what they are made of
    "tokenizer": "tokenizer",
    "validation_shards": r"fineweb_val_\d+\.bin",
    "training_shards": r"fineweb_train_\d+\.bin",
}
# Files that decide what is trained on: compared by their names, wherever they lie.
DATA_FILES = {"data_path", "data_dir", "datasets_dir", "tokenizer_path"}
CONDITIONS = ("model_params", "world_size", "micro_steps", "dataset", "train_shards", "val_tokens")
CONDITIONS += ("partial_val",)
LOG_SUFFIXES = {".txt", ".log", ".jsonl"}
FRONT = re.compile(r"\[\w+\]:|[\d:.TZ-]{10,40}(?: |$)")  # [default0]: or a time stamp
VERSIONS = re.compile(r"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
# The first line of a script: an import, a comment or a string.
START = re.compile(r"^(?:import \w|from [\w.]+ import |#|[rRuU]?[\"'])", re.MULTILINE)


@dataclass
class Run:
    """What one run left in a log. None, or an empty collection: the log does not say."""

    path: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    # Settings, code, versions, devices, data: all that may change a result, but for the seed.
    conditions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] | None = None  # those that were given, as text
    made_of: dict[str, str] = field(default_factory=dict)  # script, tokenizer, shards: checksums
    machine: dict[str, Any] = field(default_factory=dict)  # device, cpus, torch, python
    world_size: int | None = None
    micro_steps: int | None = None  # in effect
    model_params: int | None = None
    dataset: str | None = None
    train_shards: int | None = None
    val_tokens: int | None = None  # predicted tokens of the validation split
    steps: list[Line] = field(default_factory=list)
    validations: list[Line] = field(default_factory=list)
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
    warnings: list[str] = field(default_factory=list)  # of a text log
    partial_val: bool = False  # scored on a part of the validation split
    status: str = "unfinished"  # finished, failed, interrupted, unfinished, no steps
    error: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def known_seed(self) -> int | None:
        """That which the log or else its name tells."""
        match = re.search(r"seed[_-]?(\d{1,9})", self.name, re.IGNORECASE)
        in_name = int(match[1]) if match else None
        return in_name if self.seed is None else self.seed

    @property
    def last_step(self) -> int:
        """That of the last training line or validation."""
        return max([0, *(line.step for line in (*self.steps[-1:], *self.validations[-1:]))])

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
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if file.suffix in LOG_SUFFIXES]
            files = [file for file in files if file.name != "requirements.txt"]
        if not files:
            words = "a folder without .txt, .log or .jsonl files: name the logs"
            result.problems.append(f"{path}: {words}")
        for file in files:
            log = read_log(file)
            distinct_runs |= {os.path.realpath(run.path): run for run in log.runs}
            result.problems += [f"{file}: {problem}" for problem in log.problems]
    result.runs = [*distinct_runs.values()]
    return result


def read_log(path: str | os.PathLike[str], events: bool = True) -> Logs:
    """One file, or the .jsonl beside it if `events`. Raises nothing: its problems say it."""
    log, path = Logs(), Path(path)
    beside = path.with_suffix(".jsonl")
    if events and path.suffix in LOG_SUFFIXES and beside.is_file():
        path = beside
    try:
        # A byte that is not UTF-8 comes back when the text is encoded in the same way.
        text = read_file(path).decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n")
        run = read_run(path, text, log.problems)
    except OSError as error:
        log.problems.append(f"cannot be read: {error.strerror}")
        return log
    if not (run.steps or run.validations or run.results or run.error):
        log.problems.append("no training log: no step and no result is in it")
    else:
        log.runs.append(run)
    return log


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """The file's bytes. A pipe is refused unopened, and so is what has more than `most` bytes."""
    if path.exists() and not path.is_file():
        raise OSError(None, "not a file", str(path))
    if (size := path.stat().st_size) > most:
        raise OSError(None, f"{size:,} bytes, of which {most:,} are read at most", str(path))
    return path.read_bytes()


def without_fronts(text: str) -> str:
    """The text without what a launcher or a container has put in front of every line."""
    lines = text.splitlines(keepends=True)
    if any(line.strip() and not FRONT.match(line) for line in lines):
        return text
    return "".join(FRONT.sub("", line, 1) for line in lines)


def scripts_in(log: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each script in a log: it stands in front of a rule and the versions."""
    at = 0
    for versions in VERSIONS.finditer(log):
        if start := START.search(log, at, versions.start()):
            yield start.start(), versions.start()
        at = versions.end()


def text_events(text: str) -> Iterator[Event]:
    """Those of any other log. The text of a script is one event."""
    at = 0
    for begin, end in [*scripts_in(text), (len(text), len(text))]:
        for line in text[at:begin].splitlines():
            if event := line_event(line[:MAX_LINE].rstrip()):
                yield event | {"partial_val": "partial_val:1" in line}
        if begin < end:
            # Printing added one line end to the script's own.
            source = text[begin:end].removesuffix("\n").encode("utf-8", "surrogateescape")
            yield {"event": "made_of", "script": hashlib.sha256(source).hexdigest()}
            yield {"event": "source", "source": source}
        at = end


# What events say of the run: their names, and its fields.
FIELDS = {
    "timing_train_loop_ms": "train_time_ms",
    "timing_val_total_ms": "val_total_ms",
    "total_ms": "input_wait_ms",
    "artifact_bytes": "model_bytes",
}
FIELDS |= {name: name for name in (*CONDITIONS, "settings", "source", "status", "error")}
FIELDS |= {name: name for name in ("code_bytes", "total_bytes")}
OF_KIND = dict.fromkeys(("run", "data", "input", "artifact", "end", "source"), FIELDS)
OF_KIND["config"] = {"seed": "seed"}
OF_KIND["settings"] = {"seed": "seed", "grad_accum_steps": "micro_steps"}
OF_KIND["settings"] |= {"world_size": "world_size", "model_params": "model_params"}
KEPT = ("path", "steps", "validations", "scripts", "resumed_at")  # when a run starts once more


def read_run(path: Path, text: str, problems: list[str]) -> Run:
    """The last run that a log describes, without events that are damaged."""
    run, damaged, own = Run(os.fspath(path)), 0, path.suffix == ".jsonl"
    text = text if own else without_fronts(text)
    for event in text.splitlines() if own else text_events(text):
        try:
            take_event(run, json.loads(event) if own else event)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged line{'s' * (damaged > 1)} left out")
    settle(run)
    if run.result and not own:
        run.status = "finished" if run.steps or run.validations else "no steps"
    return run


def take_event(run: Run, event: Event) -> None:
    kind, fields = event["event"], OF_KIND.get(event["event"], {})
    known = {k: v for k, v in event.items() if k not in ("event", "time", "partial_val")}
    if kind == "run":  # its score and its end are still to come
        vars(run).update(vars(Run(**{name: getattr(run, name) for name in KEPT})))
    for name in fields.keys() & known.keys():
        setattr(run, fields[name], known[name] if known[name] != "" else None)
    if kind in ("config", "settings") and not run.results:
        named = known if kind == "config" else {k: known[k] for k in known if k not in fields}
        run.config |= {k: typed(v) for k, v in named.items() if isinstance(v, (str, int, float))}
    elif kind == "made_of":
        run.made_of = {k: str(v) for k, v in known.items()}
        script = run.made_of["script"]
        kept = run.scripts if run.last_step else []
        run.scripts = kept if script in kept[-1:] else [*kept, script]
    elif kind == "hardware":
        run.machine |= {k: v for k, v in known.items() if v}
    elif kind == "checkpoint" and "resumed_from" in event:  # what came after it is dropped
        run.resumed_at.append(int(event["step"]) + 1)
        drop_from(run, run.resumed_at[-1])
    elif kind == "score":
        name = event.get("name", "score")
        kind = next(kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
        losses = float(event["val_loss"]), float(event["val_bpb"])
        rest = event.get("eval_time_ms"), event.get("digits", 12)
        run.results.append(Result(kind, name, *losses, *rest))
    elif kind in ("step", "validation"):
        take_step(run, event)
    elif kind == "warning":
        run.warnings.append(str(event["text"]))
    run.partial_val |= bool(event.get("partial_val"))


def take_step(run: Run, event: Event) -> None:
    """Results before it were printed while training. If it goes back, the run was resumed there,
    or another one starts."""
    step, last = int(event["step"]), run.last_step
    validated = event["event"] == "validation"
    kept = run.validations if validated else run.steps
    losses = ("val_loss", "val_bpb") if validated else ("train_loss",)
    values = {name: event.get(name) for name in Line._fields}
    values |= {name: float(event[name]) for name in losses}
    line = Line(**values | {"step": step})
    if step < last:
        drop_from(run, step)
        run.total_bytes = run.train_time_ms = None
        run.resumed_at = [*run.resumed_at, step] if step > 1 else []
        run.scripts = run.scripts if step > 1 else run.scripts[-1:]
    if step != last:
        run.results.clear()
    if kept and kept[-1].step == step:  # the last line of a step counts
        kept.pop()
    kept.append(line)


def drop_from(run: Run, step: int) -> None:
    """Takes back the lines of a step and of all after it."""
    for kept in (run.steps, run.validations):
        while kept and kept[-1].step >= step:
            kept.pop()


def settle(run: Run) -> None:
    """What follows from the lines once a run is read: its result, first of all."""
    run.result = next((one for one in reversed(run.results) if one.kind in SUBMITTED), None)
    if run.result:
        timed = [r.eval_ms for r in run.results if r.kind == run.result.kind and r.eval_ms]
        run.eval_ms = timed[-1] if timed else None
    timed = [x for x in (*run.steps[-1:], *run.validations[-1:]) if x.train_time_ms is not None]
    if run.train_time_ms is None and timed:
        run.train_time_ms = max(timed, key=lambda line: line.step).train_time_ms
    if run.model_bytes is None and None not in (run.total_bytes, run.code_bytes):
        run.model_bytes = run.total_bytes - run.code_bytes
    if run.total_bytes is None and None not in (run.model_bytes, run.code_bytes):
        run.total_bytes = run.model_bytes + run.code_bytes
    run.conditions = conditions(run)


def conditions(run: Run) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in run.config.items():
        if name in DATA_FILES:
            values[name] = Path(str(value)).name
        elif not NOT_CONFIGURATION.fullmatch(name):
            values[name] = value
    if run.micro_steps is not None:  # what GRAD_ACCUM_STEPS has led to
        values.pop("grad_accum_steps", None)
    values |= {
        "code": run.scripts[-1][:12] if run.scripts else None,
        "code_bytes": None if run.scripts else run.code_bytes,
        **{name: getattr(run, name) for name in CONDITIONS},
        **run.machine,
        **{name: checksum(run.made_of, pattern) for name, pattern in MADE_OF.items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def checksum(made_of: dict[str, str], pattern: str) -> str | None:
    """Eight digits that stand for all the files of a kind."""
    parts = {name: value for name, value in made_of.items() if re.fullmatch(pattern, name)}
    text = json.dumps(parts, sort_keys=True)
    shards = f"{len(parts)} shards, " if len(parts) > 1 else ""
    return shards + hashlib.sha256(text.encode()).hexdigest()[:8] if parts else None
