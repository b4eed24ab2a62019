"""Tests of the pipeline's CUDA streams, on a simulation of CUDA.

On CUDA, a batch is copied from a host slot to a device slot and converted for the model, by streams
that run asynchronously. Here the trainer's own Pipeline uses a stand-in for CUDA, which executes
its work late, in random orders that CUDA allows. No batch may ever be wrong, and each wait that
orders the streams must be needed. A batch that is ready must be uploaded at once, and waits for
input must be measured correctly.
"""

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import make_config, make_runtime, open_pipeline, train_gpt, write_split

SEQ_LEN, SPAN, BATCHES = 2, 5, 12  # a batch is a span of two sequences; token i is i
CONFIG = {"TRAIN_SEQ_LEN": SEQ_LEN, "TRAIN_BATCH_TOKENS": 8 * 2 * SEQ_LEN}


# --- CUDA's rules ---------------------------------------------------------------------------------


class Stream:
    """A stand-in for torch.cuda.Stream.

    It executes its work in order, at any time after the work was issued. A wait blocks it until a
    record of another stream is done. `clock` is the time at which the work would be done on a
    machine where only copies and the model's work take time.
    """

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.work, self.done, self.clock = machine, [], 0, 0.0
        machine.streams.append(self)

    def issue(self, do: Callable[[], None], needs: tuple | None = None, ms: float = 0.0) -> None:
        with self.machine.lock:
            self.work.append((do, needs, ms, self.machine.clocks[threading.get_ident()]))
            self.machine.proceed()

    def step(self) -> bool:
        """Execute the next piece of work if nothing blocks it; return whether it was executed."""
        if self.done == len(self.work):
            return False
        do, needs, ms, issued = self.work[self.done]
        if not is_done(needs):
            return False
        self.clock = max(self.clock, issued, needs[2].clock if needs else 0.0) + ms
        self.done += 1
        do()
        return True

    def wait_event(self, event: "Event") -> None:
        """Wait for the last record of an event; an event without a record is not waited for."""
        if not self.machine.leaves_out(self, event):
            self.issue(lambda: None, needs=event.record)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.machine)
        with self.machine.lock:
            event.record = self, len(self.work) + 1, event
            event.after_conversion = self.machine.conversions > 0
            self.issue(lambda: setattr(event, "clock", self.clock))
        return event

    def synchronize(self) -> None:
        if self.machine.without != "copied before the slots go":
            self.machine.force((self, len(self.work), None))


class Event:
    """A stand-in for torch.cuda.Event.

    A record is (stream, number of its pieces of work that must be done, event).
    """

    def __init__(self, machine: "Machine", enable_timing: bool = False) -> None:
        self.machine, self.timed = machine, enable_timing
        self.record, self.clock, self.after_conversion = None, 0.0, False

    def query(self) -> bool:
        with self.machine.lock:
            self.machine.proceed()
            return is_done(self.record)

    def synchronize(self) -> None:
        if self.machine.without != "copied before refill":
            self.machine.force(self.record)

    def elapsed_time(self, end: "Event") -> float:
        assert self.timed and end.timed and is_done(self.record) and is_done(end.record)
        assert self.record and end.record
        return end.clock - self.clock


def is_done(record: tuple | None) -> bool:
    return record is None or record[0].done >= record[1]


class Machine:
    """The simulated device.

    `eager` is the probability that a stream proceeds when it may; `without` names a wait that is
    left out.
    """

    def __init__(self, seed: int = 0, eager: float = 0.5, without: str = "") -> None:
        self.random, self.eager, self.without = random.Random(seed), eager, without
        self.lock, self.streams = threading.RLock(), []
        self.clocks = collections.defaultdict(float)  # the clocks of the host's threads
        self.bias = self.random.random()  # how often the first stream proceeds before the other
        self.copy_ms = 0.0
        self.uploads = self.conversions = 0
        self.pinned, self.device_memory, self.read_at = [], [], []
        self.current = self.compute = Stream(self)
        self.compute.work.append((self.trash, None, 0.0, 0.0))

    def trash(self) -> None:
        """Overwrite device memory, as earlier work that used the same memory would."""
        for tensor in self.device_memory:
            tensor.numpy()[:] = 9999

    def proceed(self) -> None:
        while self.random.random() < self.eager:
            self.step()

    def step(self) -> bool:
        first = int(self.random.random() < self.bias)
        return self.streams[first].step() or self.streams[1 - first].step()

    def force(self, record: tuple | None) -> None:
        """Let the host wait until the record is done."""
        with self.lock:
            while not is_done(record):
                assert self.step(), "the host waits for ever"
            if record and record[2]:
                self.reach(record[2].clock)

    def reach(self, clock: float) -> None:
        """Set the clock of the calling thread to at least this time."""
        thread = threading.get_ident()
        self.clocks[thread] = max(self.clocks[thread], clock)

    def leaves_out(self, stream: Stream, event: Event) -> bool:
        """Return whether this wait is the one that the test leaves out."""
        if stream is self.compute:
            return self.without == "copied before convert"
        which = "converted before copy" if event.after_conversion else "free memory before copy"
        return self.without == which

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    @contextlib.contextmanager
    def in_place_of_cuda(self) -> Iterator["Machine"]:
        """Replace the parts of torch.cuda that the pipeline uses."""
        copy, fill_xy, empty = torch.Tensor.copy_, train_gpt.BatchPlan.fill_xy, torch.empty

        def late_copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
            assert non_blocking and any(source is tensor for tensor in self.pinned)
            self.reach(self.read_at[self.uploads])
            self.uploads += 1
            self.current.issue(lambda: copy(to, source), ms=self.copy_ms)

        def late_fill_xy(*args: Any) -> None:
            self.conversions += 1
            self.current.issue(lambda: fill_xy(*args))

        def recorded_empty(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            (self.pinned if pin_memory else self.device_memory).append(empty(*args, **more))
            return (self.pinned if pin_memory else self.device_memory)[-1]

        other = Stream(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", lambda *_, **__: other)
            patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
            patch.setattr(torch.cuda, "stream", self.on)
            patch.setattr(torch.cuda, "set_device", lambda *_: None)
            patch.setattr(
                torch.cuda, "Event", lambda enable_timing=False, **_: Event(self, enable_timing)
            )
            patch.setattr(torch, "empty", recorded_empty)
            patch.setattr(torch.Tensor, "copy_", late_copy)
            patch.setattr(train_gpt.BatchPlan, "fill_xy", late_fill_xy)
            yield self


# --- The pipeline on the simulated device ---------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_split(path, "train", np.arange(40 * SPAN), [33])
    return path


class Run:
    """A pipeline on the simulated device, and a model that uses its batches.

    `wrong` counts the wrong batches.
    """

    def __init__(self, machine: Machine, folder: Path, overlap: tuple, **settings: object) -> None:
        config = make_config(DATA_PATH=folder, **CONFIG, **settings)
        self.machine, self.overlap = machine, train_gpt.Overlap(*overlap)
        self.num_read = self.handed = self.wrong = 0
        self.host = threading.get_ident()
        self.use_ms = self.read_ms = 0.0
        self.gate, self.gate_at = (
            threading.Event(),
            BATCHES * 2,
        )  # the reader stops before this batch
        runtime = make_runtime(config)
        runtime.cuda = True
        self.pipeline = open_pipeline(
            config, runtime=runtime, overlap=self.overlap, summarize=self.summarize
        )

    def summarize(self, plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> int:
        if self.num_read >= self.gate_at:
            assert self.gate.wait(20)
        self.machine.reach(self.machine.clocks[self.host])  # the reader had no free slot before
        self.machine.clocks[threading.get_ident()] += self.read_ms
        self.machine.read_at.append(self.machine.clocks[threading.get_ident()])
        self.num_read += 1
        return rows.start

    def let_read(self) -> None:
        """Wait until the reader has no free slot left."""
        while self.num_read < self.machine.uploads + self.overlap.queue:
            assert self.pipeline.thread.is_alive()
            time.sleep(0.0005)
        time.sleep(0.002)

    def use(self) -> None:
        """Take the next batch, and issue the model's work on it."""
        batch, number = next(self.pipeline), self.handed
        expected = SPAN * number + np.arange(4)
        self.wrong += (batch.rows, batch.summary) != (range(2 * number, 2 * number + 2), 2 * number)
        self.handed += 1

        def work() -> None:
            x, y = batch.x.numpy().ravel(), batch.y.numpy().ravel()
            self.wrong += not (np.array_equal(x, expected) and np.array_equal(y, expected + 1))

        self.machine.compute.issue(work, ms=self.use_ms)

    def close(self) -> int:
        """How many copies were still to come when the slots went."""
        self.pipeline.close()
        return sum(len(stream.work) - stream.done for stream in self.machine.streams[1:])


def count_wrong(folder: Path, overlap: tuple, seed: int, without: str = "") -> int:
    """Return the number of faults of a run in which host, reader and streams race each other."""
    eager = (0.0, 0.1, 0.6, 0.9)[seed % 4]
    with Machine(seed, eager, without).in_place_of_cuda() as machine:
        run = Run(machine, folder, overlap)
        try:
            for _ in range(BATCHES):
                if machine.random.random() < 0.5:
                    run.let_read()
                run.use()
        finally:
            left = run.close()
        machine.force((machine.compute, len(machine.compute.work), None))
        return run.wrong + left


@pytest.mark.parametrize("copy_stream", [True, False])
@pytest.mark.parametrize("device_slots", [1, 2, 3])
@pytest.mark.parametrize("queue", [0, 1, 2, 3])
def test_no_batch_is_wrong(folder: Path, queue: int, device_slots: int, copy_stream: bool) -> None:
    overlap = queue, copy_stream, device_slots
    assert [count_wrong(folder, overlap, seed) for seed in range(12)] == [0] * 12


@pytest.mark.parametrize("device_slots", [1, 2, 3])
@pytest.mark.parametrize(
    "wait",
    [
        "copied before convert",  # else old tokens are converted
        "converted before copy",  # else tokens are overwritten before they are converted
        "free memory before copy",  # the same for earlier users of the memory
        "copied before refill",  # else the reader overwrites tokens during their upload
        "copied before the slots go",  # else a copy uses memory that was freed
    ],
)
def test_each_wait_is_needed(folder: Path, wait: str, device_slots: int) -> None:
    assert any(count_wrong(folder, (2, True, device_slots), seed, wait) for seed in range(200))


@pytest.mark.parametrize("device_slots", [1, 2, 3])
def test_a_batch_never_waits_for_a_later_one(folder: Path, device_slots: int) -> None:
    with Machine().in_place_of_cuda() as machine:
        run = Run(machine, folder, (2, True, device_slots))
        run.gate_at = 3  # the fourth batch is not read until the gate opens
        start = time.monotonic()
        for _ in range(3):
            run.use()
        assert time.monotonic() - start < 10 and run.handed == 3
        run.gate.set()
        run.use()
        run.close()
        assert not run.wrong


@pytest.mark.parametrize(
    "overlap,times_ms,first,later",
    [
        ((3, True, 2), (0, 3, 5), 3, 0),  # the copy is hidden behind the model's work
        ((3, True, 2), (0, 5, 3), 5, 2),  # the copy is longer than the model's work by 2 ms
        ((3, False, 1), (0, 3, 5), 3, 3),  # copies and the model's work run one after the other
        ((0, True, 1), (6, 3, 1), 9, 8),  # the host waits for the disk, the device for the host
        ((0, True, 1), (6, 3, 9), 9, 0),
    ],
)
def test_the_waits_of_the_device_for_input_are_measured(
    folder: Path, overlap: tuple, times_ms: tuple, first: float, later: float
) -> None:
    """`times_ms` are those of a read, a copy and the model's work; the waits are calculated."""
    with Machine().in_place_of_cuda() as machine:
        run = Run(machine, folder, overlap)
        run.read_ms, machine.copy_ms, run.use_ms = times_ms
        for _ in range(6):
            run.let_read()
            run.use()
        machine.compute.synchronize()
        run.close()
    assert run.pipeline.total_wait_ms == first + 5 * later
