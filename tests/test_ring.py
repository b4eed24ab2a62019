"""Proves by a model that no interleaving of copy and compute stream overwrites or reads a slot too early.

The real DeviceRing and Pipeline issue their work to stand-ins for CUDA's streams and events, which write down a program
for each stream; then every order in which a device could execute these programs is tried."""

import collections
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import config_of, open_pipeline, train_gpt, write_split
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.timeout(60)

SEQ_LEN, SPAN, BATCHES = (
    2,
    5,
    6,
)  # a batch is one span of two rows; token i of the stream is i, and so names its batch
CONFIG = dict(TRAIN_SEQ_LEN=SEQ_LEN, TRAIN_BATCH_TOKENS=8 * 2 * SEQ_LEN)


# --- The machine: CUDA's rules for streams and events -----------------------------------------------------------------


class Stream:
    def __init__(self, machine: "Machine") -> None:
        self.machine, self.program = (
            machine,
            [],
        )  # operations, each with its place in the host's program

    def issue(self, *operation: Any) -> tuple["Stream", int]:
        self.program.append((len(self.machine.host), operation))
        return self, len(self.program)

    def wait_event(self, event: "Event") -> None:
        """Waits for the latest record issued so far, never for a later one; with none, it passes at once."""
        if event.latest is not None and not self.machine.deaf(self, event):
            self.issue("wait", event.latest)

    def synchronize(self) -> None:
        self.machine.host.append(("observe", (self, len(self.program))))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.machine, False)
        event.record(self)
        return event


class Event:
    """A record is (stream, operations of it that have to be done)."""

    def __init__(self, machine: "Machine", timed: bool) -> None:
        self.machine, self.timed, self.frozen = machine, timed, False
        self.latest: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        if not self.frozen:
            self.latest = (stream or self.machine.current).issue("record")

    def query(self) -> bool:
        done = self.latest is None or self.machine.is_done(self.latest)
        if done and self.latest is not None:
            self.machine.host.append(("observe", self.latest))
        return done

    def synchronize(self) -> None:
        if self.latest is not None:
            self.machine.host.append(("observe", self.latest))

    def elapsed_time(self, end: "Event") -> float:
        if not (self.timed and end.timed and self.latest and end.latest):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 0.0


def address(tensor: torch.Tensor) -> int:
    """Of the whole buffer that the tensor is, or is a view of."""
    return tensor.untyped_storage().data_ptr()


class Machine(TorchFunctionMode):
    """Writes down what the host does and what it issues to each stream; tensor work is done at once as well."""

    def __init__(self, answers: Callable[[], bool]) -> None:
        super().__init__()
        self.host: list[tuple] = []
        self.compute, self.copy = Stream(self), Stream(self)
        self.current, self.answers = self.compute, answers
        self.deaf: Callable[[Stream, Event], bool] = lambda stream, event: False
        self.memory: dict[int, tuple] = {}  # address -> cell
        self.submitted = self.handed = 0
        self.compute.issue("old work")  # it uses the memory that the ring's slots are about to get

    def is_done(self, record: tuple[Stream, int]) -> bool:
        """What a query says: anything, but never no after a yes."""
        stream, count = record
        seen = any(
            op[0] == "observe" and op[1][0] is stream and op[1][1] >= count for op in self.host
        )
        return seen or self.answers()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def know(self, ring: train_gpt.DeviceRing) -> None:
        for number, slot in enumerate(ring.empty):
            for part in ("tokens", "x", "y"):
                self.memory[address(getattr(slot, part))] = (part, number)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__):
            to, source = args[0], args[-1]
            if (cell := self.memory.get(address(to))) and cell[0] == "tokens":
                self.current.issue("copy", cell, ("host", address(source)), self.submitted)
            elif cell and isinstance(source, torch.Tensor):  # a number fills rows to spare
                self.current.issue("widen", cell, self.memory[address(source)], self.handed)
        return func(*args, **(kwargs or {}))

    def use(self, number: int, batch: tuple) -> None:
        """Forward or backward of batch `number` reads its x and y."""
        self.compute.issue("use", [self.memory[address(part)] for part in batch[:2]], number)

    def faults(self) -> set[str]:
        return explore(
            self.host, [self.compute.program, self.copy.program], [self.compute, self.copy]
        )


def explore(host: list[tuple], programs: list[list[tuple]], streams: list[Stream]) -> set[str]:
    """What goes wrong in any order of execution.

    A stream executes in order, what the host has issued, and nothing behind a wait whose record was not executed; the
    host passes "observe" after that record only. Records, passable waits and issuing touch no memory: they are taken
    at once, which forbids no order of the operations that do."""
    place = {id(stream): 1 + i for i, stream in enumerate(streams)}
    found: set[str] = set()

    def passable(at: tuple[int, ...], record: tuple[Stream, int]) -> bool:
        return at[place[id(record[0])]] >= record[1]

    def silent(at: tuple[int, ...]) -> tuple[int, ...]:
        """Takes all steps that touch no memory."""
        for i, program in enumerate([host, *programs]):
            while at[i] < len(program):
                op = program[at[i]] if i == 0 else program[at[i]][1]
                issued = i == 0 or program[at[i]][0] <= at[0]
                if not issued or op[0] not in ("issue", "record", "observe", "wait"):
                    break
                if op[0] in ("observe", "wait") and not passable(at, op[1]):
                    break
                return silent((*at[:i], at[i] + 1, *at[i + 1 :]))
        return at

    start = (silent((0, 0, 0)), frozenset())
    pending, seen = [start], {start}
    while pending:
        at, memory = pending.pop()
        moved = False
        for i, program in enumerate([host, *programs]):
            if at[i] == len(program) or i and program[at[i]][0] > at[0]:
                continue
            op = program[at[i]] if i == 0 else program[at[i]][1]
            if op[0] in ("observe", "wait", "record"):
                continue
            moved = True
            cells = dict(memory)
            found |= execute(op, cells)
            state = silent((*at[:i], at[i] + 1, *at[i + 1 :])), frozenset(cells.items())
            if state not in seen:
                seen.add(state)
                pending.append(state)
        if not moved and at != (len(host), *map(len, programs)):
            found.add("it waits for ever")
        if len(found) > 3:
            break
    return found


def execute(op: tuple, cells: dict[tuple, Any]) -> set[str]:
    """One operation on the cells (cell -> number of the batch in it); returns what is wrong with it."""
    kind, faults = op[0], set()
    if kind == "old work":
        faults = {
            f"{cell} was overwritten before the work that was using its memory"
            for cell in cells
            if cell[0] == "tokens"
        }
    elif kind == "load":  # the host puts a batch into a host slot
        cells[op[1]] = op[2]
    elif kind == "recycle":  # the reader may now write to it at any moment
        cells[op[1]] = "refilled"
    elif kind == "copy":
        _, to, source, number = op
        if cells.get(source) != number:
            faults = {f"copy {number} read batch {cells.get(source)} from a host slot"}
        cells[to] = number
    elif kind == "widen":
        _, to, source, number = op
        if cells.get(source) != number:
            faults = {f"the widening of batch {number} read batch {cells.get(source)}"}
        cells[to] = number
    elif kind == "use":
        faults = {
            f"batch {op[2]} was used, its memory held batch {cells.get(cell)}"
            for cell in op[1]
            if cells.get(cell) != op[2]
        }
    return faults


# --- The ring on the machine ------------------------------------------------------------------------------------------


class Ring(train_gpt.DeviceRing):
    """The real ring, which also tells the machine what becomes of the host's slots."""

    machine: Machine

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.machine.know(self)

    def submit(self, slot: train_gpt.Slot) -> None:
        self.machine.host.append(
            ("load", ("host", address(slot.tokens)), int(slot.tokens.numpy()[0]) // SPAN)
        )
        super().submit(slot)
        self.machine.submitted += 1

    def hand_out(self) -> train_gpt.Slot:
        slot = super().hand_out()
        self.machine.handed += 1
        return slot

    def recycle(self, block: bool) -> train_gpt.Slot | None:
        if slot := super().recycle(block):
            self.machine.host.append(("recycle", ("host", address(slot.tokens))))
        return slot


@contextlib.contextmanager
def machine_of(answers: Callable[[], bool], ring: type[Ring] = Ring) -> Iterator[Machine]:
    """A machine in the place of CUDA; `answers`: what queries say."""
    with pytest.MonkeyPatch.context() as patch, Machine(answers) as machine:
        patch.setattr(torch.cuda, "Stream", lambda device=None, **_: machine.copy)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: machine.current)
        patch.setattr(torch.cuda, "stream", machine.on)
        patch.setattr(
            torch.cuda, "Event", lambda enable_timing=False, **_: Event(machine, enable_timing)
        )
        patch.setattr(ring, "machine", machine, raising=False)
        patch.setattr(train_gpt, "DeviceRing", ring)
        yield machine


def overlap_of(depth: int, copy_stream: bool = True) -> train_gpt.Overlap:
    return train_gpt.Overlap.of(
        config_of(GPU_PREFETCH=depth, TRAIN_COPY_STREAM=int(copy_stream)), "train", True
    )


class Host:
    """Host slots, as the pipeline makes and the reader fills them, and a ring."""

    def __init__(self, overlap: train_gpt.Overlap, ring: type[Ring], host_slots: int) -> None:
        self.plan = train_gpt.BatchPlan.train(config_of(**CONFIG), 0, 1)
        self.ring = ring(self.plan, overlap, torch.device("cpu"), train_gpt.Spans())
        self.free: collections.deque[train_gpt.Slot] = collections.deque()
        for _ in range(host_slots):
            self.free.append(train_gpt.Slot(self.plan, torch.device("cpu")))
            self.free[-1].begun, self.free[-1].copied = (
                torch.cuda.Event(enable_timing=True) for _ in "bc"
            )

    def submit(self, number: int) -> None:
        while self.ring.pending and (done := self.ring.recycle(block=not self.free)):
            self.free.append(done)
        slot, rows = self.free.popleft(), self.plan.rows(number)
        first, slot.size = self.plan.tokens(rows)
        slot.rows, slot.segments, slot.digest = len(rows), self.plan.segments(rows), number
        slot.tokens.numpy()[: slot.size] = np.arange(first, first + slot.size)
        self.ring.submit(slot)

    def hand_out(self) -> tuple:
        slot = self.ring.hand_out()
        return slot.x, slot.y, slot.digest


def faults_of(
    overlap: train_gpt.Overlap,
    ahead: Sequence[int],
    answers: Callable[[], bool],
    *,
    ring: type[Ring] = Ring,
    deaf: Callable[[Stream, Event], bool] | None = None,
) -> set[str]:
    """Runs a ring; `ahead`: how many copies are issued beyond the batches handed out, before each call."""
    with machine_of(answers, ring) as machine:
        machine.deaf = deaf or machine.deaf
        host, submitted = Host(overlap, ring, overlap.device_slots + 1), 0
        batches: list[tuple] = []
        for number, lead in enumerate(ahead):
            while submitted < min(len(ahead), number + lead):
                host.submit(submitted)
                submitted += 1
            if number >= overlap.device_slots:  # the last moment at which x and y may be used
                machine.use(number - overlap.device_slots, batches[number - overlap.device_slots])
            host.ring.ask()
            batches.append(host.hand_out())
            machine.use(number, batches[-1])
        host.ring.close()
    assert machine.handed == len(ahead)
    return machine.faults()


def chance(seed: int) -> Callable[[], bool]:
    draw = random.Random(seed)
    return lambda: draw.random() < 0.5


ANSWERS = {"never": lambda: False, "always": lambda: True}


@pytest.mark.parametrize("copy_stream", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_interleaving_breaks_the_ring(depth: int, copy_stream: bool) -> None:
    """For every way to run ahead within the depth, and for queries that say never, always, or anything."""
    leads = list(itertools.product(range(1, depth + 1), repeat=4))
    for number, lead in enumerate(leads):
        for answers in (*ANSWERS.values(), chance(number)):
            faults = faults_of(overlap_of(depth, copy_stream), [*lead, depth, depth], answers)
            assert not faults, (lead, faults)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_copy_beyond_the_depth_is_refused(depth: int) -> None:
    with machine_of(ANSWERS["never"]) as machine:
        host = Host(overlap_of(depth), Ring, depth + 2)
        for number in range(depth):
            host.submit(number)
        programs = len(machine.copy.program), len(machine.compute.program)
        with pytest.raises(RuntimeError, match="beyond the ring"):
            host.submit(depth)
        assert (len(machine.copy.program), len(machine.compute.program)) == programs
        host.ring.ask()
        x, _, digest = host.hand_out()
        assert digest == 0 and x.ravel().tolist() == [0, 1, 2, 3]
        host.submit(depth)  # and is accepted once the slot has been read


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_x_and_y_live_until_the_depth_th_later_call(depth: int) -> None:
    with machine_of(ANSWERS["never"]):
        host, batches = Host(overlap_of(depth), Ring, depth + 1), []
        for number in range(3 * depth):
            host.submit(number)
            host.ring.ask()
            batches.append(host.hand_out())
            for age, (x, y, _) in enumerate(reversed(batches[-depth:])):
                assert x.ravel().tolist() == [SPAN * (number - age) + i for i in range(4)]
                assert y.ravel().tolist() == [SPAN * (number - age) + i for i in range(1, 5)]
        addresses = [(x.data_ptr(), y.data_ptr()) for x, y, _ in batches]
    assert (
        addresses == addresses[:depth] * 3
        and len({a for pair in addresses for a in pair}) == 2 * depth
    )


# --- The model bites: rings with one thing missing --------------------------------------------------------------------


class NoConstructionRecord(Ring):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for slot in self.empty:
            slot.free.latest = None


class BeyondTheDepth(Ring):
    """Copies are issued before the read of the slot was recorded: the wait finds the record before that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all_slots = list(self.empty)

    def submit(self, slot: train_gpt.Slot) -> None:
        self.empty.insert(0, self.all_slots[self.machine.submitted % len(self.all_slots)])
        super().submit(slot)


class FreeBeforeTheRead(Ring):
    def hand_out(self) -> train_gpt.Slot:
        event = self.full[0].free
        event.record(self.compute)
        event.frozen = True
        slot = super().hand_out()
        event.frozen = False
        return slot


class ReadyBeforeTheCopy(Ring):
    def submit(self, slot: train_gpt.Slot) -> None:
        event = self.empty[0].ready
        event.record(self.copy)
        event.frozen = True
        super().submit(slot)
        event.frozen = False


class CopiedBeforeTheCopy(Ring):
    def submit(self, slot: train_gpt.Slot) -> None:
        slot.copied.record(self.copy)
        slot.copied.frozen = True
        super().submit(slot)
        slot.copied.frozen = False


class RecycledAtOnce(Ring):
    def recycle(self, block: bool) -> train_gpt.Slot:
        slot = self.pending.pop(0)
        self.machine.host.append(("recycle", ("host", address(slot.tokens))))
        return slot


class OneXAndY(Ring):
    """All slots share the x and y of the first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for slot in self.empty:
            slot.x, slot.y = self.empty[0].x, self.empty[0].y


def no_wait_of(name: str) -> Callable[[Stream, Event], bool]:
    """On the copy stream the ring waits for `free` only, on the compute stream for `ready` only."""
    return lambda stream, event: stream is getattr(stream.machine, name)


BROKEN = {
    "no wait for free": dict(deaf=no_wait_of("copy")),
    "no wait for ready": dict(deaf=no_wait_of("compute")),
    "no record at construction": dict(ring=NoConstructionRecord),
    "stale record of free": dict(ring=BeyondTheDepth, beyond=1),
    "free before the read": dict(ring=FreeBeforeTheRead),
    "ready before the copy": dict(ring=ReadyBeforeTheCopy),
    "copied before the copy": dict(ring=CopiedBeforeTheCopy),
    "recycled at once": dict(ring=RecycledAtOnce),
}
TOLD = {
    "no wait for free": "the widening of batch",
    "no wait for ready": "the widening of batch",
    "no record at construction": "before the work that was using its memory",
    "stale record of free": "the widening of batch",
    "free before the read": "the widening of batch",
    "ready before the copy": "the widening of batch",
    "copied before the copy": "from a host slot",
    "recycled at once": "from a host slot",
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_what_is_broken(name: str, depth: int) -> None:
    broken = dict(BROKEN[name])
    lead = [depth + broken.pop("beyond", 0)] * BATCHES
    faults = faults_of(overlap_of(depth), lead, ANSWERS["always"], **broken)
    assert any(TOLD[name] in fault for fault in faults), faults


@pytest.mark.parametrize("depth", [2, 3])
def test_the_model_finds_x_and_y_that_are_overwritten(depth: int) -> None:
    faults = faults_of(overlap_of(depth), [1] * BATCHES, ANSWERS["never"], ring=OneXAndY)
    assert any("was used" in fault for fault in faults), faults


def test_the_model_finds_a_wait_for_ever() -> None:
    with machine_of(ANSWERS["never"]) as machine:
        machine.copy.issue("wait", (machine.compute, 10))
    assert machine.faults() == {"it waits for ever"}


# --- The pipeline on the machine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_split(path, "train", np.arange(40 * SPAN), [33])
    return path


@pytest.mark.parametrize("copy_stream", [1, 0])
@pytest.mark.parametrize("prefetch,depth", [(1, 1), (1, 2), (1, 3), (0, 2)])
@pytest.mark.parametrize("queue", [1, 3])
def test_no_interleaving_breaks_the_pipeline(
    folder: Path, copy_stream: int, prefetch: int, depth: int, queue: int
) -> None:
    config = config_of(
        DATA_PATH=folder,
        **CONFIG,
        TRAIN_PREFETCH=prefetch,
        TRAIN_COPY_STREAM=copy_stream,
        GPU_PREFETCH=depth,
        TRAIN_PREFETCH_QUEUE=queue,
    )
    overlap = train_gpt.Overlap.of(config, "train", True)
    for answers in (*ANSWERS.values(), chance(1), chance(2)):
        with machine_of(answers) as machine:
            batches: list[tuple] = []
            with contextlib.closing(open_pipeline(config, overlap=overlap)) as pipeline:
                for number in range(BATCHES + depth):
                    if number >= overlap.device_slots:
                        machine.use(
                            number - overlap.device_slots, batches[number - overlap.device_slots]
                        )
                    batches.append(next(pipeline))
                    machine.use(number, batches[-1])
                    np.testing.assert_array_equal(
                        batches[-1][0].ravel(), SPAN * number + np.arange(4)
                    )
                    np.testing.assert_array_equal(
                        batches[-1][1].ravel(), SPAN * number + np.arange(1, 5)
                    )
        assert len([op for _, op in machine.compute.program if op[0] == "widen"]) == 2 * (
            BATCHES + depth
        )
        assert not machine.faults()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_copies_of_batches_that_are_ready_are_issued_ahead(folder: Path, depth: int) -> None:
    """While batch k is in use, the copies of the depth - 1 batches after it have been issued."""
    config = config_of(DATA_PATH=folder, **CONFIG, GPU_PREFETCH=depth, TRAIN_PREFETCH_QUEUE=3)
    with machine_of(ANSWERS["always"]) as machine:
        overlap = train_gpt.Overlap.of(config, "train", True)
        with contextlib.closing(open_pipeline(config, overlap=overlap)) as pipeline:
            for number in range(BATCHES):
                while pipeline.ready.qsize() < 3:
                    assert pipeline.thread.is_alive()
                    time.sleep(0.001)
                next(pipeline)
                assert machine.handed == number + 1 and machine.submitted == number + depth
            assert pipeline.late_copies == (BATCHES - 1 if depth == 1 else 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_error_comes_after_the_good_batches_and_again(tmp_path: Path, depth: int) -> None:
    write_split(tmp_path, "train", np.arange(4 * SPAN), [])
    shards = train_gpt.Shards(str(tmp_path), "train")
    with open(shards.paths[0], "r+b") as file:
        file.truncate(1024 + 2 * 3 * SPAN)
    shards.stamps[0] = train_gpt.stamp(shards.paths[0])
    with machine_of(ANSWERS["always"]):
        with contextlib.closing(
            open_pipeline(
                config_of(DATA_PATH=tmp_path, **CONFIG), shards=shards, overlap=overlap_of(depth)
            )
        ) as pipeline:
            assert [next(pipeline)[0][0, 0].item() for _ in range(3)] == [0, SPAN, 2 * SPAN]
            for _ in range(3):
                with pytest.raises(train_gpt.RunError, match="EOFError"):
                    next(pipeline)


@pytest.mark.parametrize("depth", [1, 3])
def test_close_waits_for_the_copies(folder: Path, depth: int) -> None:
    config = config_of(DATA_PATH=folder, **CONFIG)
    for used in (0, 1, BATCHES):
        with machine_of(ANSWERS["never"]) as machine:
            pipeline = open_pipeline(config, overlap=overlap_of(depth))
            for _ in range(used):
                next(pipeline)
            pipeline.close()
            pipeline.close()
        assert machine.host[-1] == ("observe", (machine.copy, len(machine.copy.program)))


# --- Validation that stays on the device ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_resident_validation_is_uploaded_once_and_read_the_same(
    tmp_path: Path, depth: int
) -> None:
    """24 rows by 2: twelve uploads, then none; nothing is overwritten too early in the pass that uploads."""
    token = np.arange(SEQ_LEN * 24 + 1)
    write_split(
        tmp_path, "val", SPAN * (token // 4) + token % 4, [17]
    )  # four tokens a batch, which they name
    config = config_of(
        DATA_PATH=tmp_path,
        TRAIN_SEQ_LEN=SEQ_LEN,
        VAL_BATCH_SIZE=2 * SEQ_LEN,
        GRAD_ACCUM_STEPS=1,
        GPU_PREFETCH=depth,
        VAL_RESIDENT=1,
    )
    overlap, passes = train_gpt.Overlap.of(config, "val", True), []
    assert overlap.resident and overlap.words.count("resident:1") == 1
    assert not train_gpt.Overlap.of(config, "train", True).resident
    with machine_of(chance(depth)) as machine:
        with contextlib.closing(open_pipeline(config, "val", overlap=overlap)) as pipeline:
            for number in range(3):
                batches = []
                for k, (x, y, _) in enumerate(
                    pipeline.again(train_gpt.Spans()) if number else pipeline
                ):
                    if number == 0:
                        machine.use(k, (x, y))
                    batches.append((x.tolist(), y.tolist()))
                passes.append(batches)
                if number == 0:
                    assert not machine.faults()
        assert machine.submitted == 12 and len(passes[0]) == 12
    assert passes[0] == passes[1] == passes[2]
    assert [x[0][0] for x, _ in passes[0]] == [SPAN * k for k in range(12)]


def test_resident_validations_score_what_others_do(tmp_path: Path) -> None:
    """The last batch has rows to spare: they count neither as tokens nor as bytes."""
    write_split(tmp_path, "val", np.arange(4, 4 + SEQ_LEN * 23 + 1), [])
    (tmp_path / "byte.json").write_text('{"kind": "byte", "offset": 4}')
    config = config_of(
        DATA_PATH=tmp_path,
        TOKENIZER_PATH=tmp_path / "byte.json",
        TRAIN_SEQ_LEN=SEQ_LEN,
        VOCAB_SIZE=260,
        VAL_BATCH_SIZE=4 * SEQ_LEN,
        GRAD_ACCUM_STEPS=1,
        VAL_RESIDENT=1,
    )
    log, scores = train_gpt.RunLog("r", False), {}

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.shape == y.shape == (4, SEQ_LEN)  # one shape: nothing is compiled twice
        return y[y >= 0].float().mean()

    for resident in (False, True):
        with machine_of(ANSWERS["always"]) as machine:
            validation = train_gpt.Validation(
                config, train_gpt.Runtime(), log, train_gpt.Verify(True, log)
            )
            overlap = train_gpt.Overlap.of(config, "val", True)
            validation.overlap = overlap if resident else overlap._replace(resident=False)
            scores[resident] = [
                validation.evaluate(loss_of, f"step_{number}", False, train_gpt.Spans())[:2]
                for number in range(3)
            ]
            assert machine.submitted == (6 if resident else 18)
            assert validation.bytes == 23 * SEQ_LEN
    mean = 4 + (23 * SEQ_LEN + 1) / 2
    assert (
        scores[True]
        == scores[False]
        == [(pytest.approx(mean), pytest.approx(mean / np.log(2)))] * 3
    )
