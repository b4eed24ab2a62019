"""Proves that the pipeline reads what it hands out and no more, and ends any fault, hang or close in bounded time."""

import builtins
import contextlib
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import config_of, open_pipeline, train_gpt, write_split

pytestmark = pytest.mark.timeout(30)

SEQ_LEN, SPAN = 16, 33  # tokens; a batch is two rows and one token more, in training a span
BATCH_BYTES, HEADER_BYTES = 2 * SPAN, 1024
TOKENS = np.random.default_rng(11).permutation(2**16)[: 40 * SPAN]
VAL_BATCHES = 10  # 20 rows; the first 321 tokens of TOKENS
SETTINGS = dict(
    TRAIN_BATCH_TOKENS=8 * 2 * SEQ_LEN, TRAIN_SEQ_LEN=SEQ_LEN, VAL_BATCH_SIZE=8 * 2 * SEQ_LEN
)
MODES = [("train", 1), ("train", 0), ("val", 1), ("val", 0)]  # split, prefetch


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One shard of either split."""
    write_split(tmp_path, "train", TOKENS, [])
    write_split(tmp_path, "val", TOKENS[: 20 * SEQ_LEN + 1], [])
    return tmp_path


def shard(folder: Path, split: str, number: int = 0) -> Path:
    return folder / f"fineweb_{split}_{number:06d}.bin"


def pipeline_of(
    folder: Path,
    split: str = "train",
    prefetch: int = 1,
    *,
    settings: dict | None = None,
    **options: object,
) -> train_gpt.Pipeline:
    names = {f"{split.upper()}_PREFETCH": prefetch, **(settings or {})}
    return open_pipeline(config_of(DATA_PATH=folder, **SETTINGS, **names), split, **options)


def first_token(split: str, number: int) -> int:
    """Where batch `number` begins in the split."""
    return number * (SPAN if split == "train" else 2 * SEQ_LEN)


def assert_batch(split: str, number: int, batch: tuple) -> None:
    first = first_token(split, number)
    rows = np.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) + first
    np.testing.assert_array_equal(batch[0], TOKENS[rows % len(TOKENS)])
    np.testing.assert_array_equal(batch[1], TOKENS[(rows + 1) % len(TOKENS)])


ReadInto = Callable[[io.FileIO, Callable[..., int], memoryview], int]


def serve(monkeypatch: pytest.MonkeyPatch, readinto: ReadInto) -> None:
    """Shards are read through `readinto`(file, the file's own readinto, buffer)."""

    class Served(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:
            return readinto(self, super().readinto, buffer)

    def opened(path: Path, mode: str = "r", buffering: int = -1, **more: object) -> io.IOBase:
        return builtins.open(path, mode, buffering, **more) if buffering else Served(path, mode)

    monkeypatch.setattr(train_gpt, "open", opened, raising=False)


def settle(pipeline: train_gpt.Pipeline, num_bytes: int) -> None:
    """Returns once the reader has read `num_bytes` and rests: its thread waits for another one, or has ended."""
    deadline = time.monotonic() + 10
    while True:
        frame = sys._current_frames().get(pipeline.thread.ident)
        resting = not pipeline.thread.is_alive() or (
            pipeline.free.empty() and frame and frame.f_code.co_name == "_read_all"
        )  # it waits for a slot
        if resting and pipeline.bytes_read >= num_bytes:
            return
        assert time.monotonic() < deadline, f"{pipeline.bytes_read} bytes read, and not at rest"
        time.sleep(0.001)


# --- A reader that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split,prefetch", MODES)
@pytest.mark.parametrize("fails_at", [0, 4, VAL_BATCHES - 1])
def test_the_error_comes_after_the_good_batches_and_at_every_later_call(
    data: Path, monkeypatch: pytest.MonkeyPatch, split: str, prefetch: int, fails_at: int
) -> None:
    offset, broken = (
        HEADER_BYTES + 2 * first_token(split, fails_at),
        OSError(5, "Input/output error"),
    )

    def readinto(file: io.FileIO, real: Callable[..., int], buffer: memoryview) -> int:
        if file.tell() == offset:
            raise broken
        return real(buffer)

    serve(monkeypatch, readinto)
    with contextlib.closing(
        pipeline_of(data, split, prefetch, runtime=train_gpt.Runtime(rank=0))
    ) as batches:
        for number in range(fails_at):
            assert_batch(split, number, next(batches))
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(train_gpt.RunError) as caught:
                next(batches)
            assert time.monotonic() - started < 2
            assert caught.value.__cause__ is broken
            for word in (
                "rank 0",
                split,
                str(shard(data, split)),
                f"byte {offset}",
                "Input/output error",
            ):
                assert word in str(caught.value), word
            assert "\n" not in str(caught.value)
        batches.thread.join(2)
        assert not batches.thread.is_alive()


def test_the_error_names_the_rank_and_the_shard_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_split(
        tmp_path, "train", TOKENS, [2 * SPAN + 10, 20]
    )  # rank 2's first span lies in all three shards

    def readinto(file: io.FileIO, real: Callable[..., int], buffer: memoryview) -> int:
        if file.name == str(shard(tmp_path, "train", 2)):
            raise OSError(5, "Input/output error")
        return real(buffer)

    serve(monkeypatch, readinto)
    with contextlib.closing(pipeline_of(tmp_path, runtime=train_gpt.Runtime(2, 4))) as batches:
        with pytest.raises(
            train_gpt.RunError, match="rank 2.*train.*_000002.bin at byte 1024.*Input/output error"
        ):
            next(batches)


@pytest.mark.parametrize("split,prefetch", MODES)
def test_what_fails_in_the_digest_is_an_error_too(data: Path, split: str, prefetch: int) -> None:
    broken = ValueError("a token out of the table")

    def digest(plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> int:
        if tokens[0] == TOKENS[first_token(split, 2)]:
            raise broken
        return 7

    with contextlib.closing(pipeline_of(data, split, prefetch, digest=digest)) as batches:
        assert [next(batches)[2], next(batches)[2]] == [7, 7]
        with pytest.raises(train_gpt.RunError, match="a token out of the table") as caught:
            next(batches)
        assert caught.value.__cause__ is broken


@pytest.mark.parametrize("split,prefetch", MODES)
def test_a_file_that_has_shrunk_is_named_with_the_byte_where_it_ends(
    data: Path, split: str, prefetch: int
) -> None:
    shards = train_gpt.Shards(str(data), split)
    end = HEADER_BYTES + 2 * first_token(split, 3) + 21  # inside a span, and inside a token
    os.truncate(shards.paths[0], end)
    shards.stamps[0] = train_gpt.stamp(shards.paths[0])  # or the first read would find it changed
    with contextlib.closing(pipeline_of(data, split, prefetch, shards=shards)) as batches:
        for number in range(3):
            assert_batch(split, number, next(batches))
        for _ in range(2):
            with pytest.raises(train_gpt.RunError, match=f"byte {end}") as caught:
                next(batches)
            assert str(shards.paths[0]) in str(caught.value) and isinstance(
                caught.value.__cause__, EOFError
            )


@pytest.mark.parametrize("change", ["rewritten", "longer", "shorter"])
def test_a_shard_that_has_changed_ends_the_run(tmp_path: Path, change: str) -> None:
    """Also where no byte that is read differs: who knows which tokens the next read would bring?"""
    write_split(tmp_path, "train", TOKENS, [len(TOKENS)])
    shards = train_gpt.Shards(str(tmp_path), "train")
    [path] = shards.paths
    with contextlib.closing(pipeline_of(tmp_path, shards=shards, prefetch=0)) as batches:
        assert_batch("train", 0, next(batches))
        size, mtime_ns = train_gpt.stamp(path)
        os.truncate(path, size + {"rewritten": 0, "longer": 2, "shorter": -2}[change])
        os.utime(path, ns=(mtime_ns, mtime_ns + (change == "rewritten")))
        with pytest.raises(
            train_gpt.RunError, match=f"{path} at byte .*changed since this run began"
        ):
            next(batches)


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    write_split(tmp_path, "train", TOKENS, [3 * SPAN])
    shards = train_gpt.Shards(str(tmp_path), "train")
    shards.paths[1].unlink()
    with contextlib.closing(pipeline_of(tmp_path, shards=shards)) as batches:
        for number in range(3):
            assert_batch("train", number, next(batches))
        with pytest.raises(train_gpt.RunError, match="_000001.bin at byte 1024.*No such file"):
            next(batches)


# --- A reader that hangs ----------------------------------------------------------------------------------------------


@pytest.fixture
def hang() -> Iterator[Callable[[Path], None]]:
    """Makes a shard one whose opening hangs, as on dead network storage: a FIFO that nobody writes to."""
    hanging: list[Path] = []

    def replace(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)
        hanging.append(path)

    before = set(threading.enumerate())
    yield replace
    for thread, path in itertools.product(set(threading.enumerate()) - before, hanging):
        deadline = time.monotonic() + 5
        while thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # no reader yet, or no more
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            thread.join(0.01)


@pytest.mark.parametrize("prefetch", [1, 0])
@pytest.mark.parametrize("good", [0, 2, 7])  # batches before the shard that hangs
def test_a_hanging_read_becomes_an_error_that_names_it(
    tmp_path: Path, hang: Callable[[Path], None], prefetch: int, good: int
) -> None:
    """The reader may hang as early as it asks the kernel to read ahead; what it has read by then is handed out."""
    write_split(tmp_path, "train", TOKENS, [good * SPAN] if good else [])
    shards = train_gpt.Shards(str(tmp_path), "train")
    hang(shards.paths[-1])
    with contextlib.closing(
        pipeline_of(tmp_path, prefetch=prefetch, shards=shards, stall_seconds=0.4)
    ) as batches:
        handed = 0
        with pytest.raises(train_gpt.RunError) as caught:
            for number, batch in enumerate(batches):
                assert_batch("train", number, batch)
                handed += 1
        assert good - 1 - batches.overlap.queue <= handed <= good
        for again in (False, True):
            if again:
                with pytest.raises(train_gpt.RunError) as caught:
                    next(batches)
            said = re.match(
                r"rank 0: .*train.* (\S+) at byte (\d+) .*DATA_STALL_SECONDS=0.4", str(caught.value)
            )
            assert said and said.group(1) == str(shards.paths[-1]), str(caught.value)
            begins = good * BATCH_BYTES  # the shard, within the stream
            assert (
                handed * BATCH_BYTES
                <= begins + int(said.group(2)) - HEADER_BYTES
                <= begins + 2 * BATCH_BYTES
            )
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefetch", [1, 0])
def test_the_deadline_runs_inside_a_read_only(data: Path, prefetch: int) -> None:
    """Work on the tokens that takes longer than DATA_STALL_SECONDS is no fault of the storage."""

    def digest(plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> int:
        time.sleep(0.7 if rows.start == 0 else 0)
        return 0

    with contextlib.closing(
        pipeline_of(data, prefetch=prefetch, digest=digest, stall_seconds=0.3)
    ) as batches:
        for number in range(3):
            assert_batch("train", number, next(batches))


# --- Close, from any state --------------------------------------------------------------------------------------------


def used(batches: train_gpt.Pipeline, count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


def failed(batches: train_gpt.Pipeline) -> None:
    os.truncate(batches.shards.paths[0], HEADER_BYTES)
    with pytest.raises(train_gpt.RunError):
        used(batches, 10)


STATES: dict[str, Callable[[train_gpt.Pipeline], None]] = {
    "never used": lambda batches: None,
    "full queue": lambda batches: settle(batches, 2 * BATCH_BYTES if batches.overlap.queue else 0),
    "in use": functools.partial(used, count=3),
    "after an error": failed,
    "exhausted": functools.partial(used, count=VAL_BATCHES),
    "closed": lambda batches: batches.close(),
}


@pytest.mark.parametrize("split,prefetch", MODES)
@pytest.mark.parametrize("state", STATES)
def test_close_ends_the_reader_from_any_state(
    data: Path, split: str, prefetch: int, state: str
) -> None:
    threads = threading.active_count()
    batches = pipeline_of(data, split, prefetch)
    STATES[state](batches)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 1 and threading.active_count() == threads
    batches.close()
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("split,prefetch", MODES)
def test_close_leaves_a_hanging_read_behind_within_a_second(
    data: Path, monkeypatch: pytest.MonkeyPatch, split: str, prefetch: int
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def readinto(file: io.FileIO, real: Callable[..., int], buffer: memoryview) -> int:
        reading.set()
        assert go_on.wait(20)
        return real(buffer)

    serve(monkeypatch, readinto)
    threads, batches = (
        threading.active_count(),
        pipeline_of(data, split, prefetch, stall_seconds=0.1),
    )
    if not prefetch:
        with pytest.raises(train_gpt.RunError, match="DATA_STALL_SECONDS"):
            next(batches)
    assert reading.wait(10)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 1
    go_on.set()
    batches.thread.join(5)
    assert threading.active_count() == threads
    batches.close()


# --- What is read, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
def test_without_prefetch_nothing_is_read_before_it_is_asked_for(
    data: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    reads: list[int] = []
    serve(monkeypatch, lambda file, real, buffer: reads.append(file.tell()) or real(buffer))
    with contextlib.closing(pipeline_of(data, split, prefetch=0)) as batches:
        settle(batches, 0)
        assert batches.bytes_read == 0 and not reads
        for number in range(VAL_BATCHES):
            assert_batch(split, number, next(batches))
            settle(batches, (number + 1) * BATCH_BYTES)
            assert batches.bytes_read == (number + 1) * BATCH_BYTES
            assert (
                reads[-1] == HEADER_BYTES + 2 * first_token(split, number)
                and len(reads) == number + 1
            )


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_with_prefetch_the_depth_of_the_queue_is_kept_ready(data: Path, depth: int) -> None:
    with contextlib.closing(pipeline_of(data, settings={"TRAIN_PREFETCH_QUEUE": depth})) as batches:
        for number in range(12):
            settle(batches, (number + depth) * BATCH_BYTES)
            assert batches.bytes_read == (number + depth) * BATCH_BYTES
            assert_batch("train", number, next(batches))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_batch_stays_intact_until_the_next_call(data: Path, depth: int) -> None:
    """All the reader may read ahead has been read, so every other slot was refilled, before the batch is compared."""
    with contextlib.closing(pipeline_of(data, settings={"TRAIN_PREFETCH_QUEUE": depth})) as batches:
        for number in range(3 * (depth + 1)):
            batch = next(batches)
            settle(batches, (number + 1 + depth) * BATCH_BYTES)
            assert_batch("train", number, batch)


@pytest.mark.parametrize("split,prefetch", MODES)
def test_short_reads_are_continued(
    data: Path, monkeypatch: pytest.MonkeyPatch, split: str, prefetch: int
) -> None:
    serve(monkeypatch, lambda file, real, buffer: real(buffer[:3]))
    with contextlib.closing(pipeline_of(data, split, prefetch)) as batches:
        for number, batch in zip(range(VAL_BATCHES), batches):
            assert_batch(split, number, batch)
        assert batches.bytes_read >= VAL_BATCHES * BATCH_BYTES


@pytest.mark.parametrize("rank,world_size", [(0, 1), (1, 2), (7, 8), (5, 16)])
def test_a_rank_reads_the_bytes_it_uses_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int
) -> None:
    write_split(tmp_path, "train", TOKENS, [50, 3, 400])
    counted: list[int] = []

    def readinto(file: io.FileIO, real: Callable[..., int], buffer: memoryview) -> int:
        counted.append(real(buffer))
        return counted[-1]

    serve(monkeypatch, readinto)
    runtime = train_gpt.Runtime(rank, world_size)
    with contextlib.closing(pipeline_of(tmp_path, prefetch=0, runtime=runtime)) as batches:
        tokens = sum(x.numel() + 1 for x, _, _ in itertools.islice(batches, 20))
        settle(batches, 2 * tokens)
        assert batches.bytes_read == sum(counted) == 2 * tokens


STREAM = """
import contextlib, resource, sys
sys.path.insert(0, sys.argv[1])
from conftest import config_of, open_pipeline
for folder in sys.argv[2:]:
    config = config_of(DATA_PATH=folder, TRAIN_BATCH_TOKENS=2**21, TRAIN_SEQ_LEN=1024)
    with contextlib.closing(open_pipeline(config)) as batches:
        while batches.bytes_read < 2 * batches.shards.total: next(batches)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def test_memory_does_not_grow_with_the_shards(tmp_path: Path) -> None:
    """A whole shard of 4 MB, then one of 400 MB (holes, no disk), are streamed by one process."""
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder, num_tokens in zip(folders, (2_000_000, 200_000_000)):
        write_split(folder, "train", np.zeros(1), [])
        path = shard(folder, "train")
        with open(path, "r+b") as file:
            file.write(np.array([20240520, 1, num_tokens], dtype="<i4").tobytes())
        os.truncate(path, HEADER_BYTES + 2 * num_tokens)
    command = [sys.executable, "-c", STREAM, str(Path(__file__).parent), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 50e6


# --- Switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_combination_of_switches_gives_the_same_batches(tmp_path: Path, split: str) -> None:
    write_split(
        tmp_path, split, TOKENS[: 20 * SEQ_LEN + 1], [50, 3, 200]
    )  # the training stream begins again, too

    def batches_of(settings: dict[str, int]) -> list[tuple[list, list, int]]:
        config = config_of(
            DATA_PATH=tmp_path, **{**SETTINGS, "VAL_BATCH_SIZE": 8 * 3 * SEQ_LEN}, **settings
        )
        with contextlib.closing(open_pipeline(config, split)) as batches:
            return [
                (x.tolist(), y.tolist(), digest) for x, y, digest in itertools.islice(batches, 12)
            ]

    names = [f"{split.upper()}_{name}" for name in ("PREFETCH", "PREFETCH_QUEUE", "COPY_STREAM")]
    default = batches_of({})
    assert len(default) == (12 if split == "train" else 7)  # 20 rows by 3
    for prefetch, depth, stream, slots in itertools.product((0, 1), (1, 2, 4), (0, 1), (1, 2, 3)):
        settings = {**dict(zip(names, (prefetch, depth, stream))), "GPU_PREFETCH": slots}
        assert batches_of(settings) == default, settings


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    "prefetch,stream,slots,cuda,words",
    [
        (1, 1, 2, True, "prefetch:True copy_stream:True prefetch_queue:3"),
        (1, 0, 3, True, "prefetch:True copy_stream:False prefetch_queue:3"),
        (0, 1, 2, True, "prefetch:False copy_stream:True prefetch_queue:0(prefetch_off)"),
        (0, 0, 1, True, "prefetch:False copy_stream:False prefetch_queue:0(prefetch_off)"),
        (1, 1, 2, False, "prefetch:True copy_stream:False(no_cuda) prefetch_queue:3"),
        (0, 0, 2, False, "prefetch:False copy_stream:False prefetch_queue:0(prefetch_off)"),
    ],
)
def test_the_switches_in_effect_are_logged_with_their_reasons(
    split: str, prefetch: int, stream: int, slots: int, cuda: bool, words: str
) -> None:
    upper = split.upper()
    config = config_of(
        **{
            f"{upper}_PREFETCH": prefetch,
            f"{upper}_PREFETCH_QUEUE": 3,
            f"{upper}_COPY_STREAM": stream,
            "GPU_PREFETCH": slots,
        }
    )
    overlap = train_gpt.Overlap.of(config, split, cuda)
    effective = (slots if prefetch else 1) if cuda else 0
    assert (overlap.queue, overlap.copy_stream, overlap.device_slots) == (
        3 * prefetch,
        stream and cuda,
        effective,
    )
    reason = "(no_cuda)" if not cuda else "(prefetch_off)" if effective != slots else ""
    if split == "val":
        words = (
            f"overlap:{bool(prefetch or stream and cuda)} {words} bytecount_device:cpu resident:0"
        )
    assert overlap.words == f"{words} gpu_prefetch:{effective}{reason}"


@pytest.mark.parametrize("prefetch", [1, 0])
@pytest.mark.parametrize(
    "rows,world_size,batches_of_rank_0", [(20, 1, 10), (21, 1, 11), (1, 1, 1), (1, 3, 0)]
)
def test_a_validation_ends(
    tmp_path: Path, prefetch: int, rows: int, world_size: int, batches_of_rank_0: int
) -> None:
    write_split(tmp_path, "val", TOKENS[: rows * SEQ_LEN + 1], [])
    settings = {"VAL_BATCH_SIZE": 2 * SEQ_LEN * world_size * (8 // world_size)}
    runtime = train_gpt.Runtime(0, world_size)
    config = config_of(**{**SETTINGS, "DATA_PATH": tmp_path, "VAL_PREFETCH": prefetch, **settings})
    with contextlib.closing(open_pipeline(config, "val", runtime=runtime)) as batches:
        assert len(list(batches)) == batches_of_rank_0
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)
        batches.thread.join(5)
        assert not batches.thread.is_alive()
