"""What does a batch cost? The trainer's pipeline beside the loaders one could take instead, on the same tokens.

    python3 tests/bench/loader.py                                 all of it: ten minutes; let nothing else run
    python3 tests/bench/loader.py --ranks 8 --loads none compute  what the targets are about: three minutes
    python3 tests/bench/loader.py --quick                         small shards, to see that it works: times mean nothing

Arms: ours (the training pipeline on the CPU, data_crc on); challenge (a synchronous loader that works as the
challenge's own does); torch-0, -1, -2 (a DataLoader over mapped shards, with so many workers); mosaicml-streaming and
litdata where they are installed; limit (one readinto of the same bytes into one buffer, nothing else).
Each arm has a process of its own in each repeat; the processes take turns, in another order for each condition and
repeat, so that what the machine does meanwhile hits all alike. Two arms that yield different tokens end the run.

Exposed time: what the main thread spends in next(batches). A step is one micro-step of 65,536 tokens a rank. The
first batch is counted apart. Figures are medians over the repeats (of each run's median, p99, maximum, boundary).
`boundary`: at each boundary the worse of two steps, the one whose tokens, of all ranks, cross into the next shard and
the one after; of a run's boundaries the median. A shard holds 3,125,000 tokens a rank: a boundary every 48 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES, TOKEN_BYTES, SPANS_A_STEP = 1024, 2, 8
ANSWER_SECONDS = 300  # the longest an arm may take for one condition
CACHES, LOADS = ("warm", "cold"), ("none", "compute", "hungry")
LOAD_WORDS = {
    "none": "no compute",
    "compute": "{ms:g} ms of GIL-free compute a step",
    "hungry": "{ms:g} ms of pure Python a step (it holds the GIL)",
}


class BenchError(Exception):
    """A foreseeable failure; its text is one line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Whose batches, of which shards. Batch k of rank 0 is span k * ranks of the stream, which never ends."""

    folder: str
    ranks: int
    steps: int
    seq_len: int
    step_tokens: int  # over all ranks and micro-steps: TRAIN_BATCH_TOKENS
    shard_tokens: int
    num_shards: int

    @property
    def span(self) -> int:
        """Tokens of a batch, with the one more to predict."""
        return self.step_tokens // SPANS_A_STEP + 1

    @property
    def paths(self) -> list[Path]:
        return [
            Path(self.folder, f"fineweb_train_{number:06d}.bin")
            for number in range(self.num_shards)
        ]

    @property
    def used_bytes(self) -> int:
        return self.steps * self.span * TOKEN_BYTES

    def pieces(self, k: int) -> Iterator[tuple[int, int, int]]:
        """Where batch k lies: (shard, first token within it, tokens)."""
        return self.stretch(k * self.ranks * self.span, self.span)

    def stretch(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        while count:
            shard, begin = divmod(first % (self.shard_tokens * self.num_shards), self.shard_tokens)
            taken = min(count, self.shard_tokens - begin)
            yield shard, begin, taken
            first, count = first + taken, count - taken

    def boundaries(self) -> list[int]:
        """The batches at which the tokens of all ranks go on in the next shard."""
        chunk = self.ranks * self.span
        return [
            end // chunk for end in range(self.shard_tokens, self.steps * chunk, self.shard_tokens)
        ]

    def write(self) -> None:
        """Random tokens, on the disk for certain: only clean pages can be evicted."""
        Path(self.folder).mkdir(parents=True)
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, self.shard_tokens
        for number, path in enumerate(self.paths):
            tokens = np.random.default_rng(number).integers(
                0, 1024, self.shard_tokens, dtype=np.uint16
            )
            with open(path, "wb") as file:
                file.write(header.tobytes() + tokens.astype("<u2").tobytes())
        sync_files(self.folder)


# --- The arms: `iter` gives (x, y), each (rows, seq_len); close() ends what was started -------------------------------


class Arm:
    """A loader. mapped: it maps its files, so that the bytes it reads from the page cache cannot be counted."""

    needs, mapped = "torch", False

    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        raise NotImplementedError

    def close(self) -> None:
        pass

    @classmethod
    def convert(cls, job: Job) -> None:
        """Writes the tokens in the arm's own format, where it has one."""

    @classmethod
    def folder(cls, job: Job) -> str:
        """The files it reads."""
        return job.folder


class Ours(Arm):
    """The training pipeline, built as the trainer builds it, for the CPU."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import train_gpt as t

        settings = dict(
            DATA_PATH=job.folder,
            DEVICE="cpu",
            TRAIN_BATCH_TOKENS=job.step_tokens,
            TRAIN_SEQ_LEN=job.seq_len,
        )
        config, faults = t.Config.from_environment(
            {name: str(value) for name, value in settings.items()}
        )
        if faults:
            raise BenchError("; ".join(faults))
        source = SimpleNamespace(
            cfg=config,
            rt=t.Runtime(rank=0, world_size=job.ranks),
            log=None,
            verify=t.Verify(False, None),
            shards=t.Shards(config.data_path, "train"),
            plan=t.BatchPlan.train(config, 0, job.ranks),
            overlap=t.Overlap.of(config, "train", False),
        )
        self.batches = t.Pipeline(source, "train", t.data_crc)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return (batch[:2] for batch in self.batches)

    def close(self) -> None:
        self.batches.close()


class Challenge(Arm):
    """Synchronous: the whole shard in memory; a step takes the tokens of all ranks from the stream, cuts this rank's
    span out, makes it int64, and copies x and y (on a GPU: their uploads, 8 bytes a token each)."""

    def load(self, number: int) -> None:
        import torch

        self.number = number % self.job.num_shards
        path = self.job.paths[self.number]
        self.tokens = torch.from_numpy(np.fromfile(path, dtype="<u2", offset=HEADER_BYTES))
        self.position = 0

    def take(self, count: int) -> Any:
        import torch

        parts = []
        while count:
            if self.position == len(self.tokens):
                self.load(self.number + 1)
            part = self.tokens[self.position : self.position + count]
            self.position, count = self.position + len(part), count - len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        import torch

        self.load(0)
        while True:
            mine = self.take(self.job.ranks * self.job.span)[: self.job.span].to(torch.int64)
            yield tuple(
                part.reshape(-1, self.job.seq_len).clone() for part in (mine[:-1], mine[1:])
            )


class Limit(Arm):
    """The same bytes into one buffer, again and again: no int64, no checksum, nothing ahead."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        job, tokens = self.job, np.zeros(self.job.span, dtype=np.uint16)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "rb", buffering=0)) for path in job.paths]
            for k in range(job.steps):
                done = 0
                for shard, begin, count in job.pieces(k):
                    files[shard].seek(HEADER_BYTES + TOKEN_BYTES * begin)
                    files[shard].readinto(memoryview(tokens[done : done + count]).cast("B"))
                    done += count
                yield tokens[:-1].reshape(-1, job.seq_len), tokens[1:].reshape(-1, job.seq_len)


class Mapped:
    """A data set for torch: item k is batch k, from mapped shards, opened where they are used."""

    def __init__(self, job: Job) -> None:
        self.job, self.maps = job, None

    def __len__(self) -> int:
        return self.job.steps

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        if self.maps is None:
            self.maps = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in self.job.paths]
        return rows_of(
            np.concatenate(
                [
                    self.maps[shard][begin : begin + count]
                    for shard, begin, count in self.job.pieces(k)
                ]
            ),
            self.job,
        )


class Stored:
    """A data set for torch: batch k is item k * ranks of another library's data set, opened where it is used."""

    def __init__(
        self, job: Job, opened: Callable[[Job], Any], tokens_of: Callable[[Any], np.ndarray]
    ) -> None:
        self.job, self.opened, self.tokens_of, self.items = job, opened, tokens_of, None

    def __len__(self) -> int:
        return self.job.steps

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        if self.items is None:
            self.items = self.opened(self.job)
        return rows_of(self.tokens_of(self.items[k * self.job.ranks]), self.job)


def rows_of(tokens: np.ndarray, job: Job) -> tuple[Any, Any]:
    """x and y of a span."""
    import torch

    wide = torch.from_numpy(tokens.astype(np.int64))
    return wide[:-1].view(-1, job.seq_len), wide[1:].view(-1, job.seq_len)


class TorchLoader(Arm):
    """torch's DataLoader, in order, whole batches from the data set, two ahead for each worker."""

    mapped, workers = True, 0

    def dataset(self) -> Any:
        return Mapped(self.job)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        from torch.utils.data import DataLoader

        return iter(DataLoader(self.dataset(), batch_size=None, num_workers=self.workers))


class TorchLoader1(TorchLoader):
    workers = 1


class TorchLoader2(TorchLoader):
    workers = 2


def spans_of(job: Job) -> Iterator[np.ndarray]:
    """All spans up to the last one used, of all ranks, in the order of the stream."""
    shards = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in job.paths]
    for number in range(job.steps * job.ranks):
        yield np.concatenate(
            [
                shards[shard][begin : begin + count]
                for shard, begin, count in job.stretch(number * job.span, job.span)
            ]
        )


class Mosaic(TorchLoader):
    """mosaicml-streaming over local MDS files, an item a span: fewer and larger items than is usual, to its favour."""

    needs = "streaming"

    @classmethod
    def folder(cls, job: Job) -> str:
        return job.folder + "-mds"

    @classmethod
    def convert(cls, job: Job) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=cls.folder(job), columns={"tokens": "bytes"}) as writer:
            for span in spans_of(job):
                writer.write({"tokens": span.tobytes()})

    @classmethod
    def opened(cls, job: Job) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(local=cls.folder(job), shuffle=False, batch_size=1)

    def dataset(self) -> Any:
        return Stored(self.job, self.opened, mosaic_tokens)


def mosaic_tokens(item: dict[str, bytes]) -> np.ndarray:
    return np.frombuffer(item["tokens"], "<u2")


class Lit(TorchLoader):
    """litdata over local chunks, an item a span."""

    needs = "litdata"

    @classmethod
    def folder(cls, job: Job) -> str:
        return job.folder + "-litdata"

    @classmethod
    def convert(cls, job: Job) -> None:
        import litdata

        litdata.optimize(
            fn=np.copy,
            inputs=list(spans_of(job)),
            output_dir=cls.folder(job),
            chunk_bytes="64MB",
            num_workers=1,
            keep_data_ordered=True,
            verbose=False,
        )

    @classmethod
    def opened(cls, job: Job) -> Any:
        import litdata

        return litdata.StreamingDataset(cls.folder(job), shuffle=False)

    def dataset(self) -> Any:
        return Stored(self.job, self.opened, np.asarray)


OURS, CHALLENGE, LIMIT = "ours", "challenge", "limit"
ARMS: dict[str, type[Arm]] = {
    OURS: Ours,
    CHALLENGE: Challenge,
    "torch-0": TorchLoader,
    "torch-1": TorchLoader1,
    "torch-2": TorchLoader2,
    "mosaicml-streaming": Mosaic,
    "litdata": Lit,
    LIMIT: Limit,
}


# --- Measuring: in the arm's process ----------------------------------------------------------------------------------


def compute(units: int) -> None:
    """A megabyte hashed each: a core works, the GIL is free."""
    for _ in range(units):
        hashlib.blake2b(MEGABYTE)


def hungry(units: int) -> None:
    """A thousand additions each: the GIL is held."""
    total = 0
    for number in range(1000 * units):
        total += number


MEGABYTE = bytes(1 << 20)
WORK: dict[str, Callable[[int], None]] = {
    "none": lambda units: None,
    "compute": compute,
    "hungry": hungry,
}


def calibrated(work: Callable[[int], None], ms: float) -> int:
    """How many units take `ms`."""

    def once(units: int) -> float:
        started = time.perf_counter()
        work(units)
        return 1e3 * (time.perf_counter() - started) / units

    return max(1, round(ms / min(once(20) for _ in range(5))))


def status_mb(pid: int | str, file: str, *fields: str) -> float:
    """The sum of some lines of a process' memory report; 0 where there is none (no Linux, or it has ended)."""
    with contextlib.suppress(OSError):
        lines = Path("/proc", str(pid), file).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in fields) / 1000
    return 0.0


def reset_peak_memory() -> None:
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """This process' peak resident memory since the reset, and what its workers hold for themselves."""
    own = status_mb("self", "status", "VmHWM")
    if not own:
        import resource

        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1e6 if sys.platform == "darwin" else 1e3
        )
    return own + sum(
        status_mb(worker.pid, "smaps_rollup", "Private_Clean", "Private_Dirty")
        for worker in multiprocessing.active_children()
    )


def io_bytes(field: str) -> int:
    """rchar: read by calls; read_bytes: fetched from storage. Of this process and its workers that have ended."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    return 0


def measure(arm_class: type[Arm], job: Job, load: str, units: int) -> dict[str, Any]:
    """One run over job.steps batches."""
    work, waits = WORK[load], []
    reset_peak_memory()
    called, fetched, started = io_bytes("rchar"), io_bytes("read_bytes"), time.perf_counter()
    with contextlib.closing(arm_class(job)) as arm:
        batches = iter(arm)
        batch = next(batches)
        first = time.perf_counter()
        for _ in range(job.steps - 1):
            work(units)
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(1e3 * (time.perf_counter() - asked))
        seconds = time.perf_counter() - first
        peak_mb = peak_memory_mb()
    del arm, batches, batch
    gc.collect()
    return dict(
        first_ms=1e3 * (first - started),
        waits_ms=waits,
        step_ms=1e3 * seconds / (job.steps - 1),
        tokens_s=(job.steps - 1) * (job.span - 1) / seconds,
        peak_mb=peak_mb,
        called_bytes=io_bytes("rchar") - called,
        fetched_bytes=io_bytes("read_bytes") - fetched,
    )


def checksums(arm_class: type[Arm], job: Job, count: int) -> list[int]:
    """Of x and y of the first batches, as int64."""
    sums = []
    with contextlib.closing(arm_class(job)) as arm:
        for _, (x, y) in zip(range(count), arm):
            sums.append(
                zlib.crc32(
                    np.ascontiguousarray(y, np.int64), zlib.crc32(np.ascontiguousarray(x, np.int64))
                )
            )
    gc.collect()
    return sums


def serve(name: str) -> None:
    """An arm's process: an order a line on stdin, an answer a line on stdout, which nothing else may write to."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    import train_gpt  # noqa: F401  (by every arm: the same memory before the start)
    import torch.utils.data  # noqa: F401

    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        job, do = Job(**order.pop("job")), order.pop("do")
        if do == "convert":
            answer = ARMS[name].convert(job)
        else:
            answer = (measure if do == "measure" else checksums)(ARMS[name], job, **order)
        print(json.dumps(answer), file=answers)


# --- Conducting: in the first process ---------------------------------------------------------------------------------


class Worker:
    """An arm's process, from here."""

    def __init__(self, name: str, log: IO[bytes]) -> None:
        self.name, self.log = name, log
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.answer()

    def ask(self, do: str, job: Job, **order: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({"do": do, "job": dataclasses.asdict(job), **order}),
                file=self.process.stdin,
                flush=True,
            )
        return self.answer()

    def answer(self) -> Any:
        timer = threading.Timer(ANSWER_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            said = self.log.read().decode(errors="replace").strip().splitlines() or [
                "it said nothing"
            ]
            raise BenchError(f"arm {self.name} ended with code {code}: {said[-1][:200]}")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def workers_of(names: Iterable[str]) -> Iterator[dict[str, Worker]]:
    """A process an arm, started one after the other."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names:
            worker = Worker(name, stack.enter_context(tempfile.TemporaryFile()))
            workers[name] = stack.enter_context(contextlib.closing(worker))
        yield workers


def files_of(folder: str) -> list[Path]:
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def sync_files(folder: str) -> None:
    for path in files_of(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def prepare_cache(folder: str, cache: str) -> None:
    """Every file of the folder into the page cache, or out of it."""
    for path in files_of(folder):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 22):
                    pass


class Condition(NamedTuple):
    ranks: int
    cache: str
    load: str


def check_tokens(sums: dict[str, list[int]], ranks: int) -> None:
    """BenchError unless all arms yielded the same."""
    for name, found in sums.items():
        for k, (theirs, other) in enumerate(zip(sums[OURS], found, strict=True)):
            if theirs != other:
                raise BenchError(
                    f"arm {name}, rank 0 of {ranks}: batch {k} has other tokens than {OURS}: "
                    "the arms do not do the same work"
                )


def prepare(workers: dict[str, Worker], jobs: Iterable[Job]) -> None:
    """Writes the shards, in the arms' own formats too; BenchError where arms then yield different tokens."""
    for job in jobs:
        job.write()
        for name, worker in workers.items():
            worker.ask("convert", job)
            sync_files(ARMS[name].folder(job))
        count = min(job.steps, job.boundaries()[0] + 3)
        check_tokens(
            {name: worker.ask("check", job, count=count) for name, worker in workers.items()},
            job.ranks,
        )
    print(f"tokens: the same from all {len(workers)} arms, x and y, across a shard boundary")


def conduct(options: argparse.Namespace, names: list[str], folder: str) -> dict[str, Any]:
    """All runs: {"runs": [{arm, repeat, condition, measured}], "units": {load: n}, ...}."""
    jobs = {ranks: job_of(options, ranks, folder) for ranks in options.ranks}
    units = {
        load: calibrated(WORK[load], options.compute_ms) if load != "none" else 0
        for load in options.loads
    }
    conditions = [
        Condition(*one) for one in itertools.product(options.ranks, options.caches, options.loads)
    ]
    runs = []
    for repeat in range(options.repeats):
        with workers_of(names) as workers:
            if not repeat:
                prepare(workers, jobs.values())
            for turn, condition in enumerate(conditions):
                job, shift = jobs[condition.ranks], (repeat + turn) % len(names)
                for name in names[shift:] + names[:shift]:
                    prepare_cache(ARMS[name].folder(job), condition.cache)
                    measured = workers[name].ask(
                        "measure", job, load=condition.load, units=units[condition.load]
                    )
                    runs.append(dict(arm=name, repeat=repeat, **condition._asdict(), **measured))
        print(f"repeat {repeat + 1} of {options.repeats} done", file=sys.stderr)
    runs.sort(key=lambda run: names.index(run["arm"]))  # stable: as the tables list them
    return dict(
        jobs={ranks: dataclasses.asdict(job) for ranks, job in jobs.items()}, units=units, runs=runs
    )


# --- Reporting --------------------------------------------------------------------------------------------------------

EXPOSED = ("median", "p99", "max", "boundary")
COLUMNS = {  # name -> (heading, decimals)
    "median": ("exposed median ms", 3),
    "p99": ("p99 ms", 3),
    "max": ("max ms", 3),
    "boundary": ("boundary ms", 3),
    "step_ms": ("step ms", 2),
    "tokens_s": ("M tokens/s", 0),
    "first_ms": ("first batch ms", 2),
    "memory_mb": ("memory MB", 1),
    "read": ("read/used", 2),
}


def run_figures(run: dict[str, Any], job: Job) -> dict[str, float]:
    """Of one run."""
    waits = np.array(run["waits_ms"])  # of batches 1, 2, ...
    crossings = [waits[max(k - 1, 0) : k + 1].max() for k in job.boundaries()]
    read = run["fetched_bytes"] if run["cache"] == "cold" else run["called_bytes"]
    if run["cache"] == "warm" and ARMS[run["arm"]].mapped or not run["called_bytes"]:
        read = float("nan")
    return dict(
        median=float(np.median(waits)),
        p99=float(np.percentile(waits, 99)),
        max=float(waits.max()),
        boundary=float(np.median(crossings)),
        step_ms=run["step_ms"],
        first_ms=run["first_ms"],
        tokens_s=run["tokens_s"] / 1e6,
        memory_mb=run["peak_mb"],
        read=read / job.used_bytes,
        fetched=run["fetched_bytes"] / job.used_bytes,
    )


Table = dict[str, dict[str, float]]  # arm -> figure -> value


def summarise(result: dict[str, Any]) -> dict[Condition, Table]:
    """Medians over the repeats. M tokens/s are those of the run without compute; memory is above the limit's."""
    runs: dict[Condition, dict[str, list[dict[str, float]]]] = {}
    for run in result["runs"]:
        job = Job(**result["jobs"][run["ranks"]])
        arms = runs.setdefault(Condition(run["ranks"], run["cache"], run["load"]), {})
        arms.setdefault(run["arm"], []).append(run_figures(run, job))
    tables = {
        condition: {
            arm: {key: statistics.median(f[key] for f in figures) for key in figures[0]}
            for arm, figures in arms.items()
        }
        for condition, arms in runs.items()
    }
    for condition, table in tables.items():
        free, base = tables.get(condition._replace(load="none"), {}), table[LIMIT]["memory_mb"]
        for arm, row in table.items():
            row["memory_mb"] -= base
            row["tokens_s"] = free[arm]["tokens_s"] if free else float("nan")
    return tables


def ratios(table: Table) -> Table:
    """Of each arm to the challenge's loader: how many times its time, throughput, bytes."""
    return {
        arm: {
            key: row[key] / table[CHALLENGE][key] if table[CHALLENGE][key] else float("nan")
            for key in COLUMNS
            if key != "memory_mb"
        }
        for arm, row in table.items()
    }


def shown(table: Table, form: Callable[[str, float], str]) -> str:
    """The table's columns, those that its rows have; form(column, value): a cell."""
    columns = {key: heading for key, (heading, _) in COLUMNS.items() if key in table[OURS]}
    lines = [
        f"{'arm':<19}"
        + "".join(f"{heading:>{max(9, len(heading) + 2)}}" for heading in columns.values())
    ]
    for arm, row in table.items():
        cells = (
            (form(key, row[key]) if row[key] == row[key] else "-", heading)
            for key, heading in columns.items()
        )
        lines.append(
            f"{arm:<19}" + "".join(f"{cell:>{max(9, len(heading) + 2)}}" for cell, heading in cells)
        )
    return "\n".join(lines)


def as_figure(key: str, value: float) -> str:
    decimals = COLUMNS[key][1]
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


def as_ratio(key: str, value: float) -> str:
    return f"{value:.3g}"


def targets(tables: dict[Condition, Table], used_bytes: int) -> Iterator[tuple[bool, str]]:
    """(reached, which, with its figures) of every target that these conditions can tell about: rank 0 of 8."""
    for condition, table in tables.items():
        ours, base, where = table[OURS], table[CHALLENGE], f"{condition.cache}, {condition.load}"
        if condition.ranks != 8:
            continue
        if condition.load == "none" and condition.cache == "warm":
            for least, words in (
                (300, "300 M tokens/s"),
                (2 * base["tokens_s"], f"twice {CHALLENGE}"),
            ):
                rate = ours["tokens_s"]
                yield (
                    rate >= least,
                    f"{where}: {rate:.0f} M tokens/s, at least {words}: {least:.0f}",
                )
        yield (
            ours["memory_mb"] <= 10,
            f"{where}: memory {ours['memory_mb']:.1f} MB above {LIMIT}, at most 10",
        )
        if condition.cache == "cold" and not np.isnan(ours["read"]):
            most = 1.1 + 16e6 / used_bytes
            yield (
                ours["read"] <= most,
                f"{where}: read {ours['read']:.2f} of the bytes used, at most {most:.2f}",
            )
        if condition.load != "compute":
            continue
        for key, part in (("median", 4), ("p99", 50), ("boundary", 100)):
            most = base[key] / part
            yield (
                ours[key] <= most,
                f"{where}: {key} {ours[key]:.3f} ms, at most 1/{part} of {CHALLENGE}: {most:.3f}",
            )
        for key in EXPOSED:
            best, arm = min(
                (row[key], arm) for arm, row in table.items() if arm not in (OURS, LIMIT)
            )
            yield (
                ours[key] < best,
                f"{where}: {key} {ours[key]:.3f} ms, lower than the best other, {arm}: {best:.3f}",
            )


def evidence(tables: dict[Condition, Table]) -> Iterator[str]:
    """What shows that warm was warm and cold was cold: the bytes fetched from storage."""
    for cache, call, words in (("warm", max, "at most"), ("cold", min, "at least")):
        shares = [
            row["fetched"]
            for condition, table in tables.items()
            if condition.cache == cache
            for row in table.values()
        ]
        if shares and Path("/proc/self/io").exists():
            wrong = cache == "cold" and min(shares) < 0.9
            yield (
                f"{cache} cache: {words} {call(shares):.2f} of the bytes used came from storage, in every arm"
                + ": NOT COLD: set TMPDIR to a folder on a disk" * wrong
            )


def report(result: dict[str, Any], compute_ms: float, judged: bool) -> None:
    tables = summarise(result)
    for condition, table in tables.items():
        words = LOAD_WORDS[condition.load].format(ms=compute_ms)
        print(
            f"\n== rank 0 of {condition.ranks}, {condition.cache} page cache, {words}\n{shown(table, as_figure)}"
        )
        print(f"-- as a multiple of {CHALLENGE}'s\n{shown(ratios(table), as_ratio)}")
    print(
        "\nM tokens/s: without compute; memory: peak, above the limit arm's; read/used: warm, by read calls "
        "(-: mapped); cold, from storage"
    )
    print("\n".join(evidence(tables)))
    used_bytes = Job(**next(iter(result["jobs"].values()))).used_bytes
    for reached, words in targets(tables, used_bytes) if judged else ():
        print(f"{'PASS' if reached else 'FAIL'} {words}")


# --- The command ------------------------------------------------------------------------------------------------------


def job_of(options: argparse.Namespace, ranks: int, folder: str) -> Job:
    """48 steps a shard, and as many shards as the steps reach, but at most four: then they begin again."""
    seq_len, step_tokens, a_rank = (
        (16, 8192, 12_500) if options.quick else (1024, 524_288, 3_125_000)
    )
    return Job(
        str(Path(folder, f"ranks{ranks}")),
        ranks,
        options.steps,
        seq_len,
        step_tokens,
        ranks * a_rank,
        4,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=0, help="runs of each arm and condition (3; --quick: 1)"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="batches a run (160: three boundaries; --quick: 40)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[8, 1],
        choices=[8, 4, 2, 1],
        help="rank 0 of so many (8 1)",
    )
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        choices=list(ARMS),
        help=f"{OURS}, {CHALLENGE} and {LIMIT} always run",
    )
    parser.add_argument(
        "--compute-ms", type=float, default=0, help="compute a step (20; --quick: 1)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every run, with every wait, to a file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shards and few steps: to see that it works"
    )
    parser.add_argument("--serve", choices=list(ARMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, plain, quick in (("repeats", 3, 1), ("steps", 160, 40), ("compute_ms", 20.0, 1.0)):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: set more than 0")
        setattr(options, name, getattr(options, name) or (quick if options.quick else plain))
    if not job_of(options, 8, "").boundaries():
        least = 13 if options.quick else 48
        parser.error(f"--steps {options.steps}: they reach no shard boundary: set at least {least}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: no such folder: {options.json.parent}")
    return options


def chosen_arms(options: argparse.Namespace) -> list[str]:
    names = []
    for name, arm in ARMS.items():
        if name not in options.arms and name not in (OURS, CHALLENGE, LIMIT):
            continue
        if importlib.util.find_spec(arm.needs):
            names.append(name)
        else:
            print(f"arm {name}: skipped: no module {arm.needs}: pip install {name}")
    return names


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> int:
    options = parse()
    if options.serve:
        serve(options.serve)
        return 0
    if not hasattr(os, "posix_fadvise") and "cold" in options.caches:
        print("cold cache: skipped: this system has no posix_fadvise")
        options.caches = ["warm"]
    folder = tempfile.mkdtemp(prefix="loader-bench-")
    try:
        names = chosen_arms(options)
        print(
            f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}; {options.steps} steps, {options.repeats} repeats"
        )
        result = conduct(options, names, folder)
        report(result, options.compute_ms, judged=not options.quick)
        if options.json:
            write_atomic(options.json, json.dumps(result))
    except (BenchError, OSError) as error:
        print(f"loader bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
