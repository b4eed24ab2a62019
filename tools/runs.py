"""Reads training logs of the parameter-golf family: a Run for each log, and in words what could
not be read.

A run of our trainer is read from the events in its .jsonl: its figures are exact. The .txt beside
it adds only what the events do not say. Text logs of the challenge's script and its descendants and
of modded-nanogpt are read line by line (lines.py). If a file holds several runs, the last one is
read. A damaged file raises nothing, and nothing that it contains is executed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lines
from lines import SUBMITTED, Event, Fact, Result, Step, Validation

MAX_LINE = 1 << 12  # characters of one line
LOG_SUFFIXES = {".txt", ".log"}
# They quote lines of logs, or lie beside them.
NO_LOGS = {".md", ".rst", ".py", ".json", ".ptz", ".gz", ".pt", ".png", ".svg"}
# Said by the text of our logs alone.
HEADER = ("source", "model_params", "dataset", "train_shards", "val_tokens", "grad_accum_steps")
VERSIONS = re.compile(r"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
# The first line of a script: an import, a comment or a string.
START = re.compile(r"^(?:import \w|from [\w.]+ import |#|[rRuU]?[\"'])", re.MULTILINE)
CUT = re.compile(r"[:=][ ]?\d*\.?\d{0,3}\Z")  # the end of a log that ends inside a number


@dataclass(slots=True)
class Sizes:
    """as the log states them; the last statement counts."""

    code: int | None = None  # the script as it is
    packed_code: int | None = None  # as compressed for the artifact, where a log knows both
    artifact: int | None = None  # the compressed model
    total: int | None = None  # what is held against the cap


@dataclass
class Run:
    """What one run left in a log. None, or an empty collection: the log does not say."""

    path: str
    number: int = 1  # of the runs in its file, from 1; the last one is read
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings: lower-case name, typed value
    made_of: dict[str, str] = field(default_factory=dict)  # script, tokenizer, shards: checksums
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
    results: list[Result] = field(default_factory=list)  # all of them, in the order of the log
    sizes: Sizes = field(default_factory=Sizes)
    train_time_ms: float | None = None  # of the whole training
    val_total_ms: float | None = None
    eval_total_ms: float | None = None  # of all evaluation after training
    input_wait_ms: float | None = None  # of the whole training
    source: bytes | None = field(default=None, repr=False)  # the script's text in the log
    resumed_at: list[int] = field(default_factory=list)  # first step of each continuation
    partial_val: bool = False  # scored on a part of the validation split
    status: str = "unfinished"  # finished, failed, interrupted, unfinished
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
        match = re.search(r"seed[_-]?(\d{1,9})", Path(self.path).name, re.IGNORECASE)
        return int(match[1]) if match else None

    @property
    def known_seed(self) -> int | None:
        return self.seed_in_name if self.seed is None else self.seed

    @property
    def last_step(self) -> int:
        last = (*self.steps[-1:], *self.validations[-1:])
        return max([0, *(line.step for line in last)])

    @property
    def final_validation(self) -> Validation | None:
        scored = [v for v in self.validations if (v.val_loss, v.val_bpb) != (None, None)]
        return scored[-1] if scored else None

    @property
    def complete(self) -> bool:
        """Is the validation of the last step the result, as in a log of modded-nanogpt?"""
        last = self.final_validation
        if last is None or any(line.val_bpb is not None for line in self.validations):
            return False
        return last.step == last.last_step == self.last_step > 0 and self.sizes == Sizes()

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

    @property
    def empty(self) -> bool:
        known = self.steps or self.validations or self.results or self.error
        return not known and self.sizes == Sizes() and self.status == "unfinished"


@dataclass
class Logs:
    """The runs of some logs in order, and what could not be read."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> Logs:
    """Files and folders of logs. Each run once: a .txt and the .jsonl beside it are one log."""
    result, distinct_runs = Logs(), {}
    for path in expanded(paths, result.problems):
        text = path.with_suffix(".txt")
        path = text if path.suffix == ".jsonl" and text.exists() else path
        log = read_log(path)
        distinct_runs |= {os.path.realpath(path): run for run in log.runs}
        result.problems += [f"{path}: {problem}" for problem in log.problems]
    result.runs = [*distinct_runs.values()]
    return result


def expanded(paths: Iterable[str | os.PathLike[str]], problems: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
        elif logs := logs_in(path):
            yield from logs
        else:
            problems.append(f"{path}: a folder without .txt or .log files: name the logs")


def logs_in(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file()]
    logs = [p for p in files if p.suffix in LOG_SUFFIXES and p.name != "requirements.txt"]
    alone = [p for p in files if p.suffix == ".jsonl" and p.with_suffix(".txt") not in logs]
    return sorted(logs + [p for p in alone if p.with_suffix(".log") not in logs])


def read_log(path: str | os.PathLike[str], events: bool = True) -> Logs:
    """One file; the .jsonl beside it counts if `events`. Raises nothing: its problems say it."""
    log, path = Logs(), Path(path)
    if path.suffix.lower() in NO_LOGS:
        log.problems.append("no log by its name: name the .txt or .log file of a run")
        return log
    beside = path.with_suffix(".jsonl")
    try:
        text = "" if path == beside else text_of(read_file(path))
        logged = read_file(beside) if events and beside.is_file() or path == beside else b""
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    last = text[text.rfind("\n") + 1 :]
    if CUT.search(last):
        text = text.removesuffix(last)
        log.problems.append("the last line is cut off")
    run = Reader(os.fspath(path)).read(text)
    if run.number > 1 and not logged:
        log.problems.append(f"it has {run.number} runs: the last one is read")
    if logged:
        run = run_of_events(run, path, logged, log.problems)
    if run.empty:
        log.problems.append("no training log: no step and no result is in it")
    else:
        log.runs.append(run)
    return log


def read_file(path: Path) -> bytes:
    """The file's bytes. A pipe is refused unopened."""
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    return path.read_bytes()


def text_of(data: bytes) -> str:
    """Carriage returns are made plain. A byte that is not UTF-8 comes back when the text is encoded
    in the same way."""
    text = data.decode("utf-8", "surrogateescape")
    return text.replace("\r\n", "\n").replace("\r", "\n")


# --- our own trainer: events ---


def run_of_events(said: Run, path: Path, data: bytes, problems: list[str]) -> Run:
    """The run that a .jsonl describes; what `said`, the text beside it, alone tells is kept."""
    events, broken = [], 0
    for line in data.decode("utf-8", "replace").splitlines():
        try:
            event = json.loads(line)
            events.append({name: value for name, value in event.items() if name != "time"})
        except (ValueError, RecursionError, AttributeError):
            broken += 1
    run = Run(os.fspath(path), config=dict(said.config))
    for name in HEADER:
        setattr(run, name, getattr(said, name))
    try:
        take_events(run, events)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problems.append(f"{path.stem}.jsonl: an event of another form: {error!r}")
        return said
    if broken:
        damaged = f"{broken} damaged line{'s' * (broken > 1)} left out"
        problems.append(f"{path.stem}.jsonl: {damaged}")
    settle(run)
    told = [result.val_bpb for result in said.results if result.kind in SUBMITTED]
    if told and run.results and abs(told[-1] - run.results[-1].val_bpb) > 1e-4:
        scores = f"its score {run.results[-1].val_bpb:.5f} counts, the text has {told[-1]:.5f}"
        problems.append(f"{path.stem}.jsonl is not of the same run as the text: {scores}")
    return run


def take_events(run: Run, events: Iterable[dict[str, Any]]) -> None:
    """What a run's events say. After a resume, what came after its checkpoint is dropped."""
    known: dict[str, dict[str, Any]] = {}
    for event in events:
        name = event.pop("event")
        if name == "step":
            append_step(run.steps, step_of(event))
        elif name == "validation":
            append_step(run.validations, validation_of(event))
        elif "resumed_from" in event:
            first = int(event["step"]) + 1
            drop_from(run, first)
            run.resumed_at.append(first)
        elif name == "run":  # started, perhaps once more
            known = {"config": known.get("config", {}), "run": event}
        else:
            known[name] = {**known.get(name, {}), **event}
    config, machine, end = (known.get(name, {}) for name in ("config", "hardware", "end"))
    values = {k: v for k, v in config.items() if isinstance(v, (str, int, float))}
    typed = {k: lines.typed(v) if isinstance(v, str) else v for k, v in values.items()}  # "0": 0
    run.config = typed or run.config
    run.seed, run.world_size = config.get("seed"), machine.get("world_size")
    run.made_of = {name: str(value) for name, value in known.get("made_of", {}).items()}
    run.versions = {k: str(machine[k]) for k in ("torch", "cuda", "python") if machine.get(k)}
    run.hardware = {k: machine[k] for k in ("device", "cpus") if machine.get(k)}
    run.status = str(end.get("status", "unfinished"))
    run.error = str(end.get("error") or "") or None
    if score := known.get("score"):
        losses = float(score["val_loss"]), float(score["val_bpb"])
        partial = bool(score.get("partial_val"))
        run.results = [
            Result("roundtrip", "score", *losses, score.get("eval_time_ms"), partial=partial)
        ]
    if size := known.get("artifact"):
        total = size["artifact_bytes"] + size["code_bytes"]
        run.sizes = Sizes(size["code_bytes"], None, size["artifact_bytes"], total)
    if cost := known.get("input"):
        run.train_time_ms, run.input_wait_ms = cost["timing_train_loop_ms"], cost["total_ms"]
        run.val_total_ms = cost["timing_val_total_ms"]
    run.partial_val = any(scored.partial for scored in (*run.validations, *run.results))


def step_of(event: dict[str, Any]) -> Step:
    return Step(
        int(event["step"]),
        float(event["train_loss"]),
        event.get("train_time_ms"),
        event.get("data_crc"),
        step_avg_ms=event.get("step_avg_ms"),
    )


def validation_of(event: dict[str, Any]) -> Validation:
    losses = float(event["val_loss"]), float(event["val_bpb"])
    partial = bool(event.get("partial_val"))
    return Validation(int(event["step"]), *losses, event.get("train_time_ms"), partial=partial)


# --- text: from the lines' events to a run ---


def scripts_in(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each script's text, which stands in front of a rule and the versions in the
    logs of the challenge's scripts and of modded-nanogpt. Nothing of it is executed."""
    at = 0
    for versions in VERSIONS.finditer(text):
        if start := START.search(text, at, versions.start()):
            yield start.start(), versions.start()
        at = versions.end()


def events_of(text: str) -> Iterator[tuple[int, Event]]:
    """The events of a log, each with the number of its line. The text of a script is one event."""
    at = 0
    for begin, end in [*scripts_in(text), (len(text), len(text))]:
        first = 1 + text.count("\n", 0, at)
        for number, line in enumerate(text[at:begin].splitlines(), first):
            for event in lines.events(line[:MAX_LINE].rstrip()):
                yield number, event
        if begin < end:
            yield first, Fact("source", text[begin:end])
        at = end


class Reader:
    """The events of a text log into its last run."""

    def __init__(self, path: str) -> None:
        self.run = Run(path)
        self.earlier: Run | None = None  # the run before this one

    def read(self, text: str) -> Run:
        for number, event in events_of(text):
            if isinstance(event, Step):
                self.rewind(event.step)
                append_step(self.run.steps, event)
            elif isinstance(event, Validation):
                self.rewind(event.step)
                append_step(self.run.validations, replace(event, line=number))
                self.run.partial_val |= event.partial
            elif isinstance(event, Result):
                self.run.results.append(replace(event, line=number))
                self.run.partial_val |= event.partial
            elif event.name in ("begin", "source", "dataset"):
                self.begin()
            if isinstance(event, Fact):
                take_fact(self.run, event.name, event.value)
        run, evaluated = self.run, self.earlier
        if evaluated and not (run.steps or run.validations):
            evaluated.results += run.results
            run = evaluated
        settle(run)
        if run.complete or any(result.kind in SUBMITTED for result in run.results):
            run.status = "finished"
        return run

    def begin(self) -> None:
        """Another run, if this one has trained."""
        run = self.run
        if run.steps or run.validations:
            self.earlier = run
            self.run = Run(run.path, run.number + 1)

    def rewind(self, step: int) -> None:
        """A step number that goes back: from the start it is another run, else the run was resumed
        there. Results before a step were printed while training."""
        last = last_line(self.run)
        if step < last and step <= 1:
            self.begin()
        elif step < last:
            drop_from(self.run, step)
            self.run.resumed_at.append(step)
        if step != last:
            self.run.results.clear()


def take_fact(run: Run, name: str, value: Any) -> None:
    kind, _, part = name.partition(".")
    if kind == "source":  # printing added one line end to the script's own
        run.source = value.removesuffix("\n").encode("utf-8", "surrogateescape")
    elif kind in ("python", "torch"):
        run.versions[kind] = value
    elif kind == "bytes":
        setattr(run.sizes, part, value)
    elif kind == "config":
        if not (run.steps or run.results):  # settings stand in front of the first step
            run.config[part] = value
    elif kind == "device":
        run.hardware["device"] = value
        run.hardware["gpus"] = run.hardware.get("gpus", 0) + 1
    elif kind == "resumed":
        run.resumed_at.append(value + 1)
    elif kind == "eval_total_s":
        run.eval_total_ms = 1e3 * value
    elif kind != "begin":
        setattr(run, name, value)


def last_line(run: Run) -> int:
    """The step of the last training line or validation; -1: there is none."""
    return max([-1, *(s.step for s in run.steps[-1:]), *(v.step for v in run.validations[-1:])])


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
    """What follows from the lines once a run is complete."""
    timed = [x for x in (*run.steps[-1:], *run.validations[-1:]) if x.train_time_ms is not None]
    if run.train_time_ms is None and timed:
        run.train_time_ms = max(timed, key=lambda line: line.step).train_time_ms
    if run.config.get("tie_embeddings") is True and "tied_embed_lr" not in run.config:
        # A text log prints the rate in effect.
        run.config["tied_embed_lr"] = run.config.pop("embed_lr", None)
        run.config.pop("head_lr", None)
    sizes = run.sizes
    if sizes.artifact is None and None not in (sizes.total, sizes.code):
        sizes.artifact = sizes.total - sizes.code
