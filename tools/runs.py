"""Read training logs of the parameter-golf family: return a Run for each log, and say in words what
could not be read. tools/README.md says which logs can be read, and which result of a log counts.

The lines of a text log are turned into the same events as a .jsonl contains. A damaged file raises
no error, and nothing that a log contains is executed. This module builds on the standard library
only.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# The kind of a result is the first one whose pattern is found in the name of the result.
KINDS = {
    "before": r"diagnostic|pre.?quant|un.?quant|(post.?)?ema\b|\bswa\b|\braw\b",
    "ttt": r"ttt|test.?time",
    "sliding": r"slid|stride|\bsw\b",
    "roundtrip": r"round_?trip|quant|int\d|^score$",
    "other": r"",
}
# Kinds of results that are measured on the decoded artifact.
SUBMITTED = ("ttt", "sliding", "roundtrip", "other")


class Line(NamedTuple):
    """A training line, or a validation during training."""

    step: int
    train_time_ms: float | None = None  # milliseconds of training since the start
    train_loss: float | None = None  # nats per token
    mean_loss: float | None = None  # nats per token, over the steps since the previous line
    val_loss: float | None = None  # nats per token
    val_bpb: float | None = None
    data_crc: str | None = None


class Result(NamedTuple):
    """A score after training."""

    kind: str  # one of KINDS
    name: str  # as in the log
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


Event = dict[str, Any]  # a line of a .jsonl, or a line of a text log in the same form

# Lengths are bounded, so that the time to read a line does not grow faster than its length.
NUMBER = r"-?\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)"


def find_number(name: str, text: str) -> float | None:
    """Return the number of `name:number` or `name=number` in a line."""
    match = re.search(rf"(?<![\w/.]){name}[:=]\s?({NUMBER})(?![\w.])", text)
    return float(match[1]) if match else None


def find_time_ms(names: str, text: str) -> float | None:
    """Return the milliseconds after one of `names`. Times in minutes are too coarse to be used."""
    match = re.search(rf"\b(?:{names})[:=]\s?({NUMBER})(ms|s)\b", text)
    return float(match[1]) * (1 if match[2] == "ms" else 1e3) if match else None


def parse_value(value: Any) -> Any:
    """Return the printed value of a setting as bool, int, float or str."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d{1,18}|\d{1,3}(,\d{3}){1,5}", text):
        return int(text.replace(",", ""))
    return float(text) if re.fullmatch(NUMBER, text) else text


# A line is read by the first pattern that matches. tests/tools/test_reading.py has examples.
STEP = re.compile(r"(?:step:)?\s?(\d{1,12})(?:/\d{1,12})?\s+((?:train|val)_loss:.*)")
FACTS = {  # {event: patterns of lines whose named groups are values of the event}
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
        r"ttt\w{0,40}:start chunks=(?P<val_chunks>\d{1,9})"
        r"( chunk_tokens=(?P<chunk_tokens>\d{1,9}))?",
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


# The last line of a run of this trainer says how the run ended. On the console, `finished` is
# followed by the name of the log.
END = re.compile(r"(?P<status>finished|failed|interrupted)(?:: (?P<error>.+))?")


def parse_line(text: str) -> Event | None:
    """Return the event that a line of a text log stands for; None if there is none."""
    if match := STEP.match(text):
        return parse_step(int(match[1]), match[2])
    for kind, pattern in FACTS:
        if match := pattern.match(text):
            values = {name: parse_value(value) for name, value in match.groupdict().items()}
            return {"event": kind} | {n: v for n, v in values.items() if v is not None}
    if match := SETTINGS.match(text):
        return parse_settings(match["split"], text[match.end() :])
    if match := RESULT.match(text):
        name, loss, bpb = match[1].strip(" :"), float(match[2]), match[3]
        values = {"name": name, "val_loss": loss, "val_bpb": float(bpb)}
        time, digits = find_time_ms("eval_time|elapsed", text), len(bpb.partition(".")[2])
        return {"event": "score", **values, "eval_time_ms": time, "digits": digits}
    return None


def parse_step(step: int, text: str) -> Event | None:
    """Return the event of a training line or of a validation."""
    values = {"step": step, "train_time_ms": find_time_ms("train_time", text)}
    values |= {name: find_number(name, text) for name in ("val_loss", "val_bpb")}
    if None not in (values["val_loss"], values["val_bpb"]):
        return {"event": "validation", **values}
    values |= {name: find_number(name, text) for name in ("train_loss", "mean_loss")}
    crc = re.search(r"\bdata_crc:([0-9a-f]{8})\b", text)
    values["data_crc"] = crc[1] if crc else None
    if values["train_loss"] is not None:
        return {"event": "step", **values}
    # Logs of modded-nanogpt and nanoGPT have no bits per byte.
    return {"event": "validation", **values} if values["val_loss"] is not None else None


def parse_settings(split: str | None, text: str) -> Event:
    """Return the event of a line of name:value. In lines train_io and val_io, the overlap in effect
    gets the names of the settings, such as train_prefetch."""
    result: Event = {"event": "settings"}
    for name, value in re.findall(r"\b([A-Za-z_]\w{0,60})(?:: ?|=)(\S+)", text):
        if split and (value == "0" or name == "copy_stream"):
            continue  # switched off, or in effect only with CUDA
        result[f"{split}_{name}" if split else name.lower()] = parse_value(value)
    return result


MAX_BYTES = 50_000_000  # size limit of a log; logs of the challenge have 200,000 bytes
MAX_LINE = 1 << 12  # characters of a line that are read
# Settings that name the run, its files or its processes are no part of a configuration.
NOT_CONFIGURATION = re.compile(
    r"run_id|seed|resume|device|rank|local_rank|distributed|is_main_process|warning|logfile|"
    r".*(_|log)(dir|path|file|files)"
)
FINGERPRINT_CONDITIONS = {  # {condition: pattern of the fingerprint's entries that it sums up}
    "tokenizer": "tokenizer",
    "validation_shards": r"fineweb_val_\d+\.bin",
    "training_shards": r"fineweb_train_\d+\.bin",
}
# Settings with paths of data. Only the last part of the path is compared.
DATA_FILES = {"data_path", "data_dir", "datasets_dir", "tokenizer_path"}
CONDITIONS = ("model_params", "world_size", "micro_steps", "dataset", "train_shards", "val_tokens")
CONDITIONS += ("partial_val",)
LOG_SUFFIXES = {".txt", ".log", ".jsonl"}
LINE_PREFIX = re.compile(r"\[\w+\]:|[\d:.TZ-]{10,40}(?: |$)")  # [default0]: or a time stamp
# A script in a log ends before a rule and the versions of Python and torch.
SCRIPT_END = re.compile(r"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
# The first line of a script is an import, a comment or a string.
SCRIPT_START = re.compile(r"^(?:import \w|from [\w.]+ import |#|[rRuU]?[\"'])", re.MULTILINE)


@dataclass
class Run:
    """What a log says about one run. None or an empty collection means that the log does not
    say."""

    path: str
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # {lower-case setting: typed value}
    # Settings, code, versions, devices and data: all that may change a result, except for the seed.
    conditions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] | None = None  # given settings, as text
    # Checksums of script, tokenizer and shards, as in the event "made_of".
    fingerprint: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)  # device, cpus, torch, python
    world_size: int | None = None
    micro_steps: int | None = None  # gradient accumulation steps in effect
    model_params: int | None = None
    dataset: str | None = None
    train_shards: int | None = None
    val_tokens: int | None = None  # predicted tokens of the validation split
    # Test-time training scores the split in chunks of chunk_tokens, of which the last is shorter.
    val_chunks: int | None = None
    chunk_tokens: int | None = None
    steps: list[Line] = field(default_factory=list)
    validations: list[Line] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # all results after the last training step
    result: Result | None = None  # the result that counts, see derive_results
    code_bytes: int | None = None  # of the script as it ran
    model_bytes: int | None = None  # of the compressed model
    total_bytes: int | None = None  # which the size limit applies to
    train_time_ms: float | None = None  # milliseconds of the whole training
    val_total_ms: float | None = None
    eval_ms: float | None = None  # of the evaluation after training
    input_wait_ms: float | None = None  # milliseconds during the whole training
    source: bytes | None = field(default=None, repr=False)  # the script in a text log
    scripts: list[str] = field(default_factory=list)  # sha256 of each script that trained the run
    resumed_at: list[int] = field(default_factory=list)  # the first step after each resume
    warnings: list[str] = field(default_factory=list)  # the warnings in a text log
    earlier_runs: int = 0  # runs in the same file before this one
    says_its_end: bool = False  # a text log whose last line says how the run ended, see END
    notes: list[str] = field(default_factory=list)  # in words: what was left out of the log
    partial_val: bool = False  # the run scored only a part of the validation split
    # finished, failed, interrupted, unfinished, no steps, no val_bpb (another trainer's log)
    status: str = "unfinished"
    error: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def known_seed(self) -> int | None:
        """The seed in the log or, if it has none, in the name of the log."""
        match = re.search(r"seed[_-]?(\d{1,9})", self.name, re.IGNORECASE)
        in_name = int(match[1]) if match else None
        return in_name if self.seed is None else self.seed

    @property
    def last_step(self) -> int:
        """The step of the last training line or validation."""
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

    def data_crcs(self) -> dict[int, str]:
        """Return {step: data_crc} of the logged steps."""
        return {s.step: s.data_crc for s in self.steps if s.data_crc is not None}


@dataclass
class Logs:
    """The runs of several logs in order, and in words what could not be read."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> Logs:
    """Read files and folders of logs. A .txt and the .jsonl beside it are one log."""
    result, distinct_runs = Logs(), {}
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if file.suffix in LOG_SUFFIXES]
            files = [file for file in files if file.name != "requirements.txt"]
        if not files:
            words = "the folder contains no .txt, .log or .jsonl files; give logs"
            result.problems.append(f"{path}: {words}")
        for file in files:
            log = read_log(file)
            distinct_runs |= {os.path.realpath(run.path): run for run in log.runs}
            result.problems += [f"{file}: {problem}" for problem in log.problems]
    result.runs = [*distinct_runs.values()]
    return result


def read_log(path: str | os.PathLike[str], events: bool = True) -> Logs:
    """Read one log, or, with `events`, the .jsonl beside it. If the log cannot be read, no error is
    raised: `problems` of the result says why."""
    log, path = Logs(), Path(path)
    beside = path.with_suffix(".jsonl")
    if events and path.suffix in LOG_SUFFIXES and beside.is_file():
        path = beside
    try:
        data = read_file(path)
    except OSError as error:
        log.problems.append(f"cannot be read: {error.strerror}")
        return log
    run = read_run(path, decode(data), log.problems)
    log.problems += run.notes
    if not (run.steps or run.validations or run.results or run.error):
        kind = describe_foreign_file(data)
        log.problems.append(kind or "not a training log: it contains no step and no result")
    else:
        log.runs.append(run)
    return log


def decode(data: bytes) -> str:
    """Return the text of a log without colours. Bytes that are not UTF-8 survive: they return when
    the text is encoded in the same way. PowerShell writes UTF-16, with a byte order mark."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", "replace")
    else:
        text = data.decode("utf-8-sig", "surrogateescape")
    return re.sub(r"\x1b\[[0-9;]{0,20}[A-Za-z]", "", text).replace("\r\n", "\n")


def describe_foreign_file(data: bytes) -> str:
    """Return what a file is that was given in place of a log, and what to do; empty if unknown."""
    if data.startswith(b"version https://git-lfs.github.com/"):
        return "a Git LFS pointer, not a log; run git lfs pull in its repository"
    if data.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        return "a packed file, not a log; unpack it first"
    if re.match(rb"\s*<(!doctype|html)", data, re.IGNORECASE):
        return "a page of HTML, not a log; download the file itself (on GitHub: Raw)"
    return ""


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError, before the file is opened, if it is no regular
    file or has more than `most` bytes."""
    if path.exists() and not path.is_file():
        raise OSError(None, "not a regular file", str(path))
    if (size := path.stat().st_size) > most:
        raise OSError(None, f"the file has {size:,} bytes; at most {most:,} are read", str(path))
    return path.read_bytes()


def strip_line_prefixes(text: str) -> str:
    """Return the text without the prefix that a launcher or a container puts before every line."""
    lines = text.splitlines(keepends=True)
    if any(line.strip() and not LINE_PREFIX.match(line) for line in lines):
        return text
    return "".join(LINE_PREFIX.sub("", line, 1) for line in lines)


def find_scripts(log: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each script in a log."""
    position = 0
    for end in SCRIPT_END.finditer(log):
        if start := SCRIPT_START.search(log, position, end.start()):
            yield start.start(), end.start()
        position = end.end()


def without_cut_line(text: str) -> tuple[str, bool]:
    """Return the text without a last line that was cut in a number, and whether there was one.
    A line without a line end may be cut, unless it says how the run ended, or is a result that goes
    on behind its last number or has all decimals of its loss."""
    lines = text.splitlines(keepends=True)
    if not lines or lines[-1].endswith("\n"):
        return text, False
    last = lines[-1][:MAX_LINE]
    event = parse_line(last) or {"event": ""}
    if event["event"] not in ("step", "validation", "score"):
        return text, False
    if match := RESULT.match(last):
        decimals = [len(number.partition(".")[2]) for number in match.groups()[1:]]
        if match.end() < len(last) or decimals[1] >= decimals[0]:
            return text, False
    return "".join(lines[:-1]), True


def iter_text_events(text: str) -> Iterator[Event]:
    """Yield the events of a text log. The text of a script is one event. The event "begin" means
    that a run of this trainer begins: the line of its settings and the line of its overlap are
    there. The event "end" is only known in these logs."""
    position, own_lines = 0, 0
    for begin, end in [*find_scripts(text), (len(text), len(text))]:
        for line in text[position:begin].splitlines():
            line = line[:MAX_LINE].rstrip()
            if line.startswith("settings:"):
                own_lines = 1
            elif own_lines == 1 and line.startswith("train_io:"):
                own_lines = 2
                yield {"event": "begin", "says_its_end": True, "status": "unfinished", "error": ""}
            if own_lines == 2 and (match := END.fullmatch(line)):
                found = {name: value for name, value in match.groupdict().items() if value}
                is_place = found["status"] != "failed"  # on the console: the name of the log
                yield {"event": "end", **found, **({"error": ""} if is_place else {})}
            elif event := parse_line(line):
                yield event | {"partial_val": "partial_val:1" in line}
        if begin < end:
            # Printing the script added one line end.
            source = text[begin:end].removesuffix("\n").encode("utf-8", "surrogateescape")
            yield {"event": "made_of", "script": hashlib.sha256(source).hexdigest()}
            yield {"event": "source", "source": source}
        position = end


# {value of an event: attribute of Run}
FIELDS = {
    "timing_train_loop_ms": "train_time_ms",
    "timing_val_total_ms": "val_total_ms",
    "total_ms": "input_wait_ms",
    "artifact_bytes": "model_bytes",
}
FIELDS |= {name: name for name in (*CONDITIONS, "settings", "source", "status", "error")}
FIELDS |= {name: name for name in ("code_bytes", "total_bytes", "val_chunks", "chunk_tokens")}
FIELDS |= {"says_its_end": "says_its_end"}
EVENTS_WITH_FIELDS = ("begin", "run", "data", "input", "artifact", "end", "source")
FIELDS_BY_EVENT = dict.fromkeys(EVENTS_WITH_FIELDS, FIELDS)
FIELDS_BY_EVENT["config"] = {"seed": "seed"}
FIELDS_BY_EVENT["settings"] = {"seed": "seed", "grad_accum_steps": "micro_steps"}
FIELDS_BY_EVENT["settings"] |= {"world_size": "world_size", "model_params": "model_params"}
NUMBERS = {*FIELDS.values(), "seed"} - {
    "dataset",
    "settings",
    "source",
    "status",
    "error",
    "partial_val",
}
# Attributes that are kept if a log goes on with a second run, which resumes the first one.
KEPT = ("path", "steps", "validations", "scripts", "resumed_at", "earlier_runs")
# Attributes that are known only after training. They do not belong to a run that begins later in
# the same file.
MEASURED = ("code_bytes", "model_bytes", "total_bytes", "train_time_ms", "val_total_ms")
MEASURED += ("input_wait_ms", "eval_ms")


def read_run(path: Path, text: str, problems: list[str]) -> Run:
    """Return the last run that a log describes. Damaged events are left out."""
    run = Run(os.fspath(path))
    is_jsonl = path.suffix == ".jsonl"
    if is_jsonl:
        damaged = sum(not apply_line(run, line) for line in text.splitlines())
    else:
        run, damaged = read_text_run(run, strip_line_prefixes(text))
    if damaged:
        problems.append(f"{damaged} damaged line{'s' * (damaged > 1)} left out")
    if run.earlier_runs:
        words = f"{run.earlier_runs + 1} runs are in this file; only the last one is read"
        run.notes.append(f"{words}; write each run to a file of its own")
    derive_results(run)
    if run.result and not (is_jsonl or run.says_its_end):
        run.status = "finished" if run.steps or run.validations else "no steps"
    elif run.validations and not any(line.val_bpb is not None for line in run.validations):
        run.status = "no val_bpb"
        words = "its lines have val_loss but no val_bpb, like those of modded-nanogpt"
        run.notes.append(f"{words}: its losses are shown, but there is no score to compare")
    return run


def apply_line(run: Run, line: str | Event) -> bool:
    """Add to the run what a line of a .jsonl, or an event, says. Return False if it is damaged."""
    try:
        apply_event(run, json.loads(line) if isinstance(line, str) else line)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False
    return True


def read_text_run(run: Run, text: str) -> tuple[Run, int]:
    """Return the last run of a text log, and the number of damaged lines; `run` is empty. A header
    after training lines begins another run if the next step is the first one, or if the seed is
    another one. Otherwise the header belongs to the same run, which was resumed or evaluated
    again."""
    text, was_cut = without_cut_line(text)
    damaged = 0
    header: list[Event] = []  # of a run that may be another one
    for event in iter_text_events(text):
        if header or (is_header(event) and (run.last_step or run.results)):
            header.append(event)
            if is_progress(event):
                if begins_another_run(header, run):
                    run = Run(run.path, earlier_runs=run.earlier_runs + 1)
                    header = [kept for kept in header if kept["event"] != "checkpoint"]
                damaged += sum(not apply_line(run, kept) for kept in header)
                header = []
        else:
            damaged += not apply_line(run, event)
    if any(event["event"] == "checkpoint" for event in header):  # it has resumed this run
        damaged += sum(not apply_line(run, kept) for kept in header)
    elif header:
        words = "a later start in this file ended before its first step, and is left out"
        run.notes.append(words)
    if was_cut:
        words = "the last line has no line end, so its last number may be cut: it is left out"
        run.notes.append(words)
    drop_scores_without_end(run)
    return run, damaged


def drop_scores_without_end(run: Run) -> None:
    """Remove the scores of a run of this trainer whose log does not say how the run ended: later
    lines may be missing, such as the score of the artifact."""
    if run.says_its_end and run.status == "unfinished" and run.results:
        run.results.clear()
        words = (
            'no last line says how the run ended (such as "finished"), so the log is cut, or the'
        )
        run.notes.append(f"{words} run goes on: no score in it counts")


def is_header(event: Event) -> bool:
    """Return whether a run prints such an event before its first step."""
    return event["event"] in ("made_of", "begin") or bool(
        {"dataset", "train_shards", "world_size", "model_params"} & event.keys()
    )


def is_progress(event: Event) -> bool:
    return event["event"] in ("step", "validation", "score")


def begins_another_run(header: Sequence[Event], run: Run) -> bool:
    """Return whether a header and the first progress after it are those of another run."""
    seeds = [event["seed"] for event in header if "seed" in event]
    if header[-1]["event"] == "score":
        return bool(seeds) and run.seed is not None and seeds[-1] != run.seed
    return header[-1]["step"] <= 1 <= run.last_step


def apply_event(run: Run, event: Event) -> None:
    """Add to the run what an event says. Raises an error if the event is damaged."""
    kind = event["event"]
    fields = FIELDS_BY_EVENT.get(kind, {})
    known = {k: v for k, v in event.items() if k not in ("event", "time", "partial_val")}
    if kind == "run":
        begin_in_jsonl(run, known.get("run_id"))
    set_fields(run, {fields[name]: known[name] for name in known if name in fields})
    if kind in ("config", "settings") and not run.results:
        named = known if kind == "config" else {k: known[k] for k in known if k not in fields}
        run.config |= {
            k: parse_value(v) for k, v in named.items() if isinstance(v, (str, int, float))
        }
    elif kind == "made_of":
        run.fingerprint = {k: str(v) for k, v in known.items()}
        script = run.fingerprint["script"]
        kept = run.scripts if run.last_step else []
        run.scripts = kept if script in kept[-1:] else [*kept, script]
    elif kind == "hardware":
        run.machine |= {k: v for k, v in known.items() if v}
    elif kind == "checkpoint" and "resumed_from" in event:  # steps after the checkpoint are dropped
        run.resumed_at.append(int(event["step"]) + 1)
        drop_steps_from(run, run.resumed_at[-1])
    elif kind == "score":
        name = event.get("name", "score")
        patterns = KINDS.items()
        kind = next(k for k, pattern in patterns if re.search(pattern, name, re.IGNORECASE))
        losses = float(event["val_loss"]), float(event["val_bpb"])
        digits = event.get("digits", 12)
        run.results.append(Result(kind, name, *losses, event.get("eval_time_ms"), digits))
    elif kind in ("step", "validation"):
        apply_step(run, event)
    elif kind == "warning":
        run.warnings.append(str(event["text"]))
    run.partial_val |= bool(event.get("partial_val"))


def set_fields(run: Run, values: dict[str, Any]) -> None:
    """Set attributes of a run; "" stands for None. Raises TypeError, before anything is set, if a
    value that must be a number is something else."""
    for name, value in values.items():
        if name in NUMBERS and not isinstance(value, (int, float)) and value not in ("", None):
            raise TypeError(f"{name} must be a number")
    for name, value in values.items():
        setattr(run, name, value if value != "" else None)


def begin_in_jsonl(run: Run, run_id: Any) -> None:
    """Forget what does not belong to the run that begins: the score and the end of the run that it
    resumes, or all of another run."""
    kept = {name: getattr(run, name) for name in KEPT}
    if run.config.get("run_id") not in (None, run_id):
        kept = {"path": run.path, "earlier_runs": run.earlier_runs + 1}
    vars(run).update(vars(Run(**kept)))


def apply_step(run: Run, event: Event) -> None:
    """Add a step or validation. Results before it were printed during training, so they do not
    count. If the step is not larger than the last one, the run was resumed there, or a new run
    starts."""
    step, last = int(event["step"]), run.last_step
    validated = event["event"] == "validation"
    kept = run.validations if validated else run.steps
    values = {name: event.get(name) for name in Line._fields}
    losses = ["val_loss", "val_bpb"] if validated else ["train_loss"]
    if validated and event.get("val_bpb") is None:  # another trainer's log
        losses.remove("val_bpb")
    values |= {name: float(event[name]) for name in losses}
    line = Line(**values | {"step": step})
    if step < last:
        drop_steps_from(run, step)
        run.earlier_runs += bool(run.results) and step <= 1
        vars(run).update(dict.fromkeys(MEASURED))
        run.resumed_at = [*run.resumed_at, step] if step > 1 else []
        run.scripts = run.scripts if step > 1 else run.scripts[-1:]
    if step != last:
        run.results.clear()
    if kept and kept[-1].step == step:  # the last line of a step counts
        kept.pop()
    kept.append(line)


def drop_steps_from(run: Run, step: int) -> None:
    """Remove the lines of a step and of all later steps."""
    for kept in (run.steps, run.validations):
        while kept and kept[-1].step >= step:
            kept.pop()


def derive_results(run: Run) -> None:
    """Set what follows from all lines of a run: the result that counts, times and sizes."""
    submitted = [result for result in run.results if result.kind in SUBMITTED]
    run.result = submitted[-1] if submitted else None
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
    run.conditions = find_conditions(run)


def find_conditions(run: Run) -> dict[str, Any]:
    """Return all that may change a result, except for the seed."""
    values: dict[str, Any] = {}
    for name, value in run.config.items():
        if name in DATA_FILES:
            values[name] = Path(str(value)).name
        elif not NOT_CONFIGURATION.fullmatch(name):
            values[name] = value
    if run.micro_steps is not None:  # the effect of GRAD_ACCUM_STEPS, which may be 0 (automatic)
        values.pop("grad_accum_steps", None)
    values |= {
        "code": run.scripts[-1][:12] if run.scripts else None,
        "code_bytes": None if run.scripts else run.code_bytes,
        **{name: getattr(run, name) for name in CONDITIONS},
        **run.machine,
        **{
            name: checksum(run.fingerprint, pattern)
            for name, pattern in FINGERPRINT_CONDITIONS.items()
        },
    }
    return {name: value for name, value in values.items() if value is not None}


def checksum(fingerprint: dict[str, str], pattern: str) -> str | None:
    """Return eight digits that stand for all files whose names match the pattern."""
    parts = {name: value for name, value in fingerprint.items() if re.fullmatch(pattern, name)}
    text = json.dumps(parts, sort_keys=True)
    shards = f"{len(parts)} shards, " if len(parts) > 1 else ""
    return shards + hashlib.sha256(text.encode()).hexdigest()[:8] if parts else None
