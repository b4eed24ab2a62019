"""Reads training logs of the parameter-golf family: a Run for each run, and in words what could
not be read.

    read_logs(paths) -> Logs     files, FILE#2 for the second run of one, folders
    read_log(path) -> Logs       one file
    Logs.runs, Logs.problems     Run: settings, steps, validations, results in their order, sizes

Understood are text logs of the challenge's script and its descendants, of modded-nanogpt and of
nanoGPT: lines of `key:value`, `key: value` or `key=value`, times in ms, s or m, something in front
of each line (a time, [rank0]:, a level), the script's text anywhere, several runs one after the
other, a log that ends anywhere, UTF-8 and UTF-16. What a line says is decided in lines.py. Of our
<RUN_ID>.jsonl only what <RUN_ID>.txt does not print is read: all settings. A damaged file raises
nothing, and nothing that it contains is executed. The time is linear in the size of a file.
"""

import codecs
import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lines import ANSI as COLOURS
from lines import (
    SUBMITTED,
    Begin,
    Bytes,
    Event,
    Fact,
    Failure,
    Result,
    Setting,
    Step,
    Stop,
    Unreadable,
    Validation,
    events,
    typed,
    whole,
    without_prefix,
)
from scripts import scripts

MAX_BYTES = 64 << 20  # of one file
MAX_LINE = 1 << 12  # characters of one line
MAX_PROBLEMS = 20  # named of one file; the others are counted
LOG_SUFFIXES = {".txt", ".log"}
PROSE_SUFFIXES = {".md", ".rst", ".py", ".json"}  # they quote lines of logs
NUMBERS = ("world_size", "grad_accum_steps", "model_params", "train_shards", "val_tokens", "seed")
LINE = re.compile(rb"[^\n]{4,}")  # shorter ones say nothing


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
    """Milliseconds per step. Percentiles and maximum are of the means between two training lines,
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
    results: list[Result] = field(default_factory=list)  # all of them, in the order of the log
    sizes: Sizes = field(default_factory=Sizes)
    stopped_early: str | None = None  # the reason, such as wallclock_cap
    stop_step: int | None = None
    train_time_ms: float | None = None  # of the whole training
    val_total_ms: float | None = None
    eval_total_ms: float | None = None  # of all evaluation after training
    epochs: float | None = None
    input_wait_percent: float | None = None  # of training time
    input_wait_ms: float | None = None  # of the whole training
    peak_mib: int | None = None
    source: bytes | None = field(default=None, repr=False)  # the script's text in the log
    resumed_at: list[int] = field(default_factory=list)  # first step of each continuation
    resumed_from: int | None = None  # the checkpoint's step, as the log's last continuation says
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
        match = re.search(r"seed[_-]?(\d{1,9})", Path(self.path).name, re.IGNORECASE)
        return int(match[1]) if match else None

    @property
    def known_seed(self) -> int | None:
        return self.seed_in_name if self.seed is None else self.seed

    @property
    def last_step(self) -> int:
        lines = (*self.steps[-1:], *self.validations[-1:])
        return max([0, self.stop_step or 0, *(line.step for line in lines)])

    @property
    def final_validation(self) -> Validation | None:
        scored = [v for v in self.validations if (v.val_loss, v.val_bpb) != (None, None)]
        return scored[-1] if scored else None

    @property
    def complete(self) -> bool:
        """Was every step trained and validated, in a log whose last validation is its result?

        Logs of modded-nanogpt end so. The challenge's scripts, which print bits per byte or sizes,
        have their results behind the training.
        """
        last = self.final_validation
        if last is None or any(line.val_bpb is not None for line in self.validations):
            return False
        return last.step == last.last_step == self.last_step > 0 and self.sizes == Sizes()

    def step_times(self) -> StepTimes:
        """From the times of the training lines: a mean alone shows no stall."""
        single = sorted((line.step_ms, 1) for line in self.steps if line.step_ms is not None)
        if single:
            return step_times_of(single, sum(ms for ms, _ in single) / len(single))
        timed = [(0, 0.0)] if not self.resumed_at else []
        timed += [(s.step, s.train_time_ms) for s in self.steps if s.train_time_ms is not None]
        if len(timed) < 2:
            known = self.train_time_ms is not None and self.last_step and not self.resumed_at
            return StepTimes(self.train_time_ms / self.last_step if known else None)
        parts = sorted(
            ((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0]) for a, b in pairwise(timed) if b[0] > a[0]
        )
        last, ms = timed[-1]
        if self.train_time_ms is not None:
            last, ms = self.last_step, self.train_time_ms
        return step_times_of(parts, ms / last if last else None)

    def input_wait_per_step(self) -> float | None:
        """Milliseconds per step spent waiting for input."""
        mean = self.step_times().mean
        if self.input_wait_ms is not None and self.last_step and not self.resumed_at:
            return self.input_wait_ms / self.last_step
        if self.input_wait_percent is None or mean is None:
            return None
        return self.input_wait_percent / 100 * mean

    def crc_at(self) -> dict[int, str]:
        """data_crc of each logged step."""
        return {s.step: s.data_crc for s in self.steps if s.data_crc is not None}

    @property
    def empty(self) -> bool:
        known = self.steps or self.validations or self.results or self.error
        return not known and self.sizes == Sizes() and self.status == "unfinished"


def step_times_of(parts: list[tuple[float, int]], mean: float | None) -> StepTimes:
    """From the pace of each part and its steps, the fastest first."""
    count = sum(steps for _, steps in parts)
    if not count:
        return StepTimes(mean)
    middle, late = math.ceil(0.5 * count), math.ceil(0.99 * count)
    p50 = p99 = None
    seen = 0
    for pace, steps in parts:
        seen += steps
        p50 = pace if p50 is None and seen >= middle else p50
        p99 = pace if p99 is None and seen >= late else p99
    return StepTimes(mean, p50, p99, parts[-1][0])


@dataclass
class Logs:
    """The runs of a file, or of several, in order, and what could not be read."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> Logs:
    """Files, FILE#2 for the second run of one, folders of .txt and .log files, folders of
    ablate.py. Each run once. For a .jsonl its .txt is read."""
    result, distinct_runs = Logs(), {}
    for given in expanded(paths, result.problems):
        file, sign, number = given.rpartition("#")
        path, numbered = (given, False) if os.path.exists(given) or not sign else (file, True)
        path = path.removesuffix(".jsonl") + ".txt" if path.endswith(".jsonl") else path
        log = read_log(path)
        runs = [run for run in log.runs if number == str(run.number) or not numbered]
        distinct_runs |= {(os.path.realpath(path), run.number): run for run in runs}
        problems = [f"{path}: {problem}" for problem in log.problems]
        if log.runs and not runs:
            problems.append(f"{given}: no such run: {path} has {len(log.runs)}, from #1 on")
        result.problems += [problem for problem in problems if problem not in result.problems]
    result.runs = [*distinct_runs.values()]
    return result


def read_log(path: str | os.PathLike[str]) -> Logs:
    """One file. Never raises for what the file is or contains: its problems say it."""
    log = Logs()
    if Path(path).suffix.lower() in PROSE_SUFFIXES:
        log.problems.append("no log by its name: name the .txt or .log file of a run")
        return log
    try:
        data = read_file(Path(path))
    except (OSError, ValueError) as error:
        log.problems.append(f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return log
    Reader(log, os.fspath(path), as_utf8(data)).read()
    add_events(log, Path(path).with_suffix(".jsonl"))
    return log


# --- events of our own trainer ---


def add_events(log: Logs, path: Path) -> None:
    """What the .jsonl says that the text does not: all settings, the machine, how a run ended.
    Events of another seed's run are left out."""
    if not log.runs or path.suffix == path.with_suffix("").suffix:
        return
    try:
        text = read_file(path).decode("utf-8", "replace")
    except (OSError, ValueError):
        return
    if not text.endswith(("\n", "}")):
        log.problems.append(f"{path.name} breaks off in the middle of a line")
    parts = event_parts(text)
    if len(log.runs) == 1:  # a run that was resumed has several parts: the last one counts
        merged: dict[str, dict[str, Any]] = {}
        for part in parts:
            merged |= part
        parts = [merged]
    for run, part in zip(log.runs, parts, strict=False):
        add_part(run, part)


def event_parts(text: str) -> list[dict[str, dict[str, Any]]]:
    """The events config, hardware and end of each start of the trainer."""
    parts: list[dict[str, dict[str, Any]]] = []
    for line in text.splitlines():
        name = re.match(r'\{"event": "(config|hardware|end)"', line)
        if not name:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(line).items()
            plain = {k: v for k, v in fields if v is None or isinstance(v, (str, int, float))}
            if not parts or name[1] in parts[-1]:
                parts.append({})
            parts[-1][name[1]] = {k: v for k, v in plain.items() if k not in ("event", "time")}
    return parts


def add_part(run: Run, part: dict[str, dict[str, Any]]) -> None:
    settings, machine, end = (part.get(name, {}) for name in ("config", "hardware", "end"))
    if run.seed not in (None, settings.get("seed")):
        return
    run.config |= settings
    run.versions |= {k: str(machine[k]) for k in ("torch", "cuda", "python") if machine.get(k)}
    run.hardware |= {k: machine[k] for k in ("device", "cpus") if machine.get(k)}
    if end:
        run.status, run.error = str(end.get("status")), str(end.get("error") or "") or None


# --- files ---


def expanded(paths: Iterable[str | os.PathLike[str]], problems: list[str]) -> Iterator[str]:
    for given in paths:
        path = Path(given)
        if not path.exists() and os.path.isdir(os.fspath(given).rpartition("#")[0]):
            problems.append(f"{path}: a folder has no runs of its own: name a log in it")
        elif not path.is_dir():
            yield os.fspath(given)
        else:
            logs = logs_in(path) or ablation_logs(path)
            if not logs:
                problems.append(f"{path}: a folder without .txt or .log files: name the logs")
            yield from map(os.fspath, logs)


def logs_in(folder: Path) -> list[Path]:
    if (folder / "manifest.json").exists() and (folder / "runs").is_dir():
        return []  # report.txt quotes logs
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in LOG_SUFFIXES and path.name != "requirements.txt" and path.is_file()
    )


def ablation_logs(folder: Path) -> list[Path]:
    """The logs below a folder of ablate.py: runs/<RUN_ID>/logs/<RUN_ID>.txt, else what the run
    printed."""
    folder = folder / "runs" if (folder / "runs").is_dir() else folder
    logs: list[Path] = []
    for work in sorted(path for path in folder.iterdir() if path.is_dir()):
        own = [path for path in work.glob("logs/*") if path.suffix in LOG_SUFFIXES]
        printed = work / "output.txt"
        logs += sorted(own) or ([printed] if printed.is_file() else [])
    return logs


def read_file(path: Path) -> bytes:
    """The file's bytes. A pipe is refused unopened."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    if about.st_size > MAX_BYTES:
        raise ValueError(f"{about.st_size:,} bytes: name a log of {MAX_BYTES:,} at most")
    return path.read_bytes()


def as_utf8(data: bytes) -> bytes:
    """Without a byte-order mark; UTF-16, as PowerShell's > writes it, is converted; carriage
    returns are made plain."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    elif data[1:200:2].count(0) > len(data[1:200:2]) * 0.9 > 9:
        data = data.decode("utf-16-le", "replace").encode("utf-8", "replace")
    return data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")


# --- from events to runs ---


class Reader:
    """A file's lines into its runs, one line at a time."""

    def __init__(self, log: Logs, path: str, data: bytes) -> None:
        self.log, self.run, self.opened = log, Run(path), set()
        self.data, self.position = data, 0
        self.counted, self.line_number = 0, 1  # lines up to a position that only grows
        self.problem_count = 0
        self.previous, self.traceback = "", False
        self.in_block = False  # the indented settings under `Hyperparameters:`
        self.take = {
            Step: self.take_step,
            Validation: self.take_validation,
            Result: self.take_result,
            Bytes: lambda event: add_size(self.run.sizes, event),
            Setting: self.take_setting,
            Fact: self.take_fact,
            Begin: self.take_begin,
            Stop: self.take_stop,
            Failure: self.take_failure,
            Unreadable: lambda event: self.problem(event.reason),
        }

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
        for match in LINE.finditer(self.data, at, end):
            self.position, stop = match.span()
            raw = self.data[self.position : min(stop, self.position + MAX_LINE)]
            text = COLOURS.sub("", raw.decode("utf-8", "replace")).rstrip()
            if text == self.previous:
                continue
            self.previous = text
            for event in events(without_prefix(text), cut=stop == len(self.data)):
                self.take[type(event)](event)

    def finish(self) -> None:
        self.close()
        log = self.log
        if self.problem_count > MAX_PROBLEMS:
            log.problems.append(f"{self.problem_count - MAX_PROBLEMS} more lines like these")
        log.runs = joined(log.runs)
        for number, run in enumerate(log.runs, 1):
            run.number = number
        if not log.runs:
            log.problems.append("no training log: no line of one was found")

    def line(self) -> int:
        self.line_number += self.data.count(b"\n", self.counted, self.position)
        self.counted = self.position
        return self.line_number

    def problem(self, reason: str) -> None:
        self.problem_count += 1
        if self.problem_count <= MAX_PROBLEMS:
            self.log.problems.append(f"line {self.line()}: {reason}")

    def open(self, kind: str) -> None:
        """A line that begins a run: a new one if this run has had such a line, or has trained."""
        if kind in self.opened or self.run.steps or self.run.validations or self.run.results:
            self.close()
        self.opened.add(kind)

    def close(self) -> None:
        run = self.run
        settle(run)
        if not run.empty or run.config and not self.log.runs and run.seed is not None:
            self.log.runs.append(run)
        self.run, self.opened = Run(run.path), set()
        self.traceback = self.in_block = False

    # --- one method for each kind of event ---

    def take_begin(self, event: Begin) -> None:
        self.open(event.what)
        self.in_block = self.in_block or event.what == "block"

    def take_failure(self, event: Failure) -> None:
        if event.what == "traceback":
            self.traceback = True
        elif event.what == "error":
            self.run.error = event.message
        elif self.traceback:
            self.run.error, self.traceback = event.message, False

    def take_step(self, event: Step) -> None:
        self.rewind(event.step)
        append_step(self.run.steps, event)

    def take_validation(self, event: Validation) -> None:
        self.rewind(event.step)
        self.run.partial_val |= event.partial
        append_step(self.run.validations, replace(event, line=self.line()))

    def rewind(self, step: int) -> None:
        """A step number that goes back: from the start it is another run, else the run went on
        from there."""
        run = self.run
        if step >= last_line(run):
            return
        if step <= 1 or run.results:
            self.close()
            return
        drop_from(run, step)
        run.resumed_at.append(step)

    def take_result(self, event: Result) -> None:
        self.run.partial_val |= event.partial
        self.run.results.append(replace(event, line=self.line()))

    def take_stop(self, event: Stop) -> None:
        run = self.run
        run.stopped_early = event.reason
        run.train_time_ms = (
            event.train_time_ms if event.train_time_ms is not None else run.train_time_ms
        )
        run.stop_step = event.step if event.step is not None else run.stop_step

    @property
    def trained(self) -> bool:
        run = self.run
        return bool(run.steps or run.results) or run.sizes != Sizes()

    def take_fact(self, event: Fact) -> None:
        if event.name == "dataset" and self.run.results:
            self.open("data")  # the header of a run whose beginning is not there
        run = self.run
        if event.name.startswith("versions."):
            run.versions[event.name.removeprefix("versions.")] = event.value
        elif event.name == "device":
            run.hardware.setdefault("device", event.value)
            run.hardware["gpus"] = run.hardware.get("gpus", 0) + 1
        elif event.name == "resumed_from" and (run.steps or run.validations):
            # The same file went on without a new beginning.
            drop_from(run, event.value + 1)
            run.resumed_at.append(event.value + 1)
        elif event.name not in ("dataset", "train_shards", "val_tokens") or not self.trained:
            setattr(run, event.name, event.value)

    def take_setting(self, event: Setting) -> None:
        """Settings stand in front of the first step."""
        run, name, value = self.run, event.name, event.value
        in_words = " " in value and not (self.in_block and event.indented)
        if self.trained or in_words or value == "" and not self.in_block:
            return
        if name in NUMBERS:
            number = whole(value)
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
        run.config[name] = typed(value)


def last_line(run: Run) -> int:
    """The step of the last training line or validation; -1: there is none."""
    return max([-1, *(s.step for s in run.steps[-1:]), *(v.step for v in run.validations[-1:])])


def drop_from(run: Run, step: int) -> None:
    """Takes back the lines of a step and of all behind it."""
    for lines in (run.steps, run.validations):
        while lines and lines[-1].step >= step:
            lines.pop()


def append_step(lines: list[Any], line: Event) -> None:
    """The last line of a step counts."""
    if lines and lines[-1].step == line.step:
        lines.pop()
    lines.append(line)


def add_size(sizes: Sizes, event: Bytes) -> None:
    if event.what == "raw_total":
        # A total without a codec that is no smaller than the model is of the raw model.
        if sizes.model is None or event.count < sizes.model:
            sizes.total = event.count
    elif event.what == "artifact_total":
        sizes.total = event.count if sizes.total is None else sizes.total
    else:
        setattr(sizes, event.what, event.count)


def settle(run: Run) -> None:
    """What follows from the lines once a run is complete."""
    lines = [x for x in (*run.steps[-1:], *run.validations[-1:]) if x.train_time_ms is not None]
    if run.train_time_ms is None and lines:
        run.train_time_ms = max(lines, key=lambda line: line.step).train_time_ms
    times = {s.step: s.train_time_ms for s in run.steps} | {run.last_step: run.train_time_ms}
    run.validations = [
        line
        if line.train_time_ms or times.get(line.step) is None
        else replace(line, train_time_ms=times[line.step])
        for line in run.validations
    ]
    sizes = run.sizes
    if sizes.artifact is None and None not in (sizes.total, sizes.code):
        sizes.artifact = sizes.total - sizes.code
    tied = run.config.get("tie_embeddings") is True and "vocab_size" not in run.config
    if tied and "embed_lr" in run.config:
        # The header prints the rate in effect: with tied embeddings TIED_EMBED_LR, no HEAD_LR.
        run.config["tied_embed_lr"] = run.config.pop("embed_lr")
        run.config.pop("head_lr", None)
    if run.status == "unfinished" and run.error:
        run.status = "interrupted" if "nterrupt" in run.error else "failed"
    has_result = any(result.kind in SUBMITTED for result in run.results)
    scored = run.status == "failed" and run.sizes.total is not None
    if (has_result or run.complete) and (run.status == "unfinished" or scored):
        run.status = "finished"


def joined(runs: list[Run]) -> list[Run]:
    """One run are: a console and a log in one file, a run and its continuation, a run and an
    evaluation started behind it."""
    result: list[Run] = []
    for run in runs:
        old = result[-1] if result else Run(run.path)
        same_seed = run.seed in (None, old.seed)
        if old.steps and same_steps(old, run) and old.seed == run.seed:
            result[-1] = run if run.source or not old.source else old  # the console has no source
        elif run.resumed_from is not None and (old.steps or old.validations) and same_seed:
            result[-1] = continued(old, run)
        elif old.steps and not (run.steps or run.validations) and same_seed:
            old.results += run.results
            old.status = run.status
        else:
            if run.resumed_from is not None and not run.resumed_at:
                run.resumed_at.append(run.resumed_from + 1)
            result.append(run)
    return result


def same_steps(first: Run, second: Run) -> bool:
    return len(first.steps) == len(second.steps) and all(
        (a.step, a.train_loss, a.train_time_ms) == (b.step, b.train_loss, b.train_time_ms)
        for a, b in zip(first.steps, second.steps, strict=True)
    )


def same_step(before: list[Validation], behind: list[Validation]) -> bool:
    return before[-1].step >= behind[0].step


def continued(old: Run, run: Run) -> Run:
    """A run that went on from a checkpoint: what it was before, up to there, and what it is now."""
    step = run.resumed_from + 1
    drop_from(old, step)
    while run.validations and old.validations and same_step(old.validations, run.validations):
        old.validations.pop()  # validated again before it went on
    old.steps += run.steps
    old.validations += run.validations
    old.results += run.results
    run.steps, run.validations, run.results = old.steps, old.validations, old.results
    old.resumed_at += [step, *run.resumed_at]
    run.resumed_at = old.resumed_at
    run.config = old.config | run.config
    run.source = run.source or old.source
    run.dataset, run.train_shards = run.dataset or old.dataset, run.train_shards or old.train_shards
    run.val_tokens = run.val_tokens or old.val_tokens
    run.seed = old.seed if run.seed is None else run.seed
    return run
