"""Tests of the pipeline and its reader thread.

The reader reads the right batches ahead of time, and nothing more. If a file is broken, the good
batches before that come first, and then an error of one line. Every wait has a limit, and so has
close().
"""

import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from running import make_config, make_runtime, open_pipeline, train_gpt, write_split

SEQ_LEN, SPAN = 16, 33  # tokens; a training batch is one span: two sequences and one more token
HEADER_BYTES = 1024
TOKENS = np.random.default_rng(11).permutation(2**16)[: 40 * SPAN]
VAL_BATCHES = 10  # the validation set has 20 sequences, which are the first 321 tokens
SETTINGS = {"TRAIN_BATCH_TOKENS": 8 * 2 * SEQ_LEN, "VAL_BATCH_SIZE": 8 * 2 * SEQ_LEN}
SETTINGS |= {"TRAIN_SEQ_LEN": SEQ_LEN, "VOCAB_SIZE": 2**16}
MODES = [("train", 1), ("train", 0), ("val", 1), ("val", 0)]  # split, prefetch


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Assert that no thread outlives its test."""
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive(), f"the thread {thread.name} is still running"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_split(tmp_path, "train", TOKENS, [])
    write_split(tmp_path, "val", TOKENS[: 20 * SEQ_LEN + 1], [])
    return tmp_path


def make_pipeline(
    folder: Path, split: str = "train", prefetch: int = 1, **options: object
) -> train_gpt.Pipeline:
    """Open a pipeline; `options` are settings in capitals and arguments of open_pipeline."""
    settings = {name: options.pop(name) for name in list(options) if name.isupper()}
    settings = {**SETTINGS, "DATA_PATH": folder, f"{split.upper()}_PREFETCH": prefetch, **settings}
    return open_pipeline(make_config(**settings), split, **options)


def first_token(split: str, number: int) -> int:
    """Return the position at which batch `number` begins in the split."""
    return number * (SPAN if split == "train" else 2 * SEQ_LEN)


def assert_batch(split: str, number: int, batch: train_gpt.Slot) -> None:
    """Assert that x and y are those of batch `number`."""
    rows = np.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) + first_token(split, number)
    np.testing.assert_array_equal(batch.x, TOKENS[rows % len(TOKENS)])
    np.testing.assert_array_equal(batch.y, TOKENS[(rows + 1) % len(TOKENS)])


class Reads:
    """A `summarize` function that counts the batches that were read."""

    def __init__(self) -> None:
        self.count, self.thread_id = 0, 0

    def __call__(self, plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> int:
        self.thread_id = threading.get_native_id()
        self.count += 1
        return self.count

    def wait_for(self, count: int) -> None:
        """Wait until `count` batches were read; fail if more are read."""
        deadline = time.monotonic() + 20
        while self.count < count:
            assert time.monotonic() < deadline, f"{self.count} of {count} batches were read"
            time.sleep(0.001)
        time.sleep(0.02)
        assert self.count == count

    def num_bytes(self) -> int:
        """Return the number of bytes that the reader thread read, as the kernel counts them."""
        text = Path(f"/proc/self/task/{self.thread_id}/io").read_text()
        return int(re.search(r"rchar: (\d+)", text)[1])


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_the_reader_is_ahead_by_the_length_of_the_queue(data: Path, split: str, depth: int) -> None:
    """Given enough time, the reader is never less ahead, and it is never more ahead.

    Batches that are read ahead do not overwrite the batch that was handed out last.
    """
    name, reads = f"{split.upper()}_PREFETCH_QUEUE", Reads()
    settings = {name: max(depth, 1), "summarize": reads}
    with closing(make_pipeline(data, split, int(depth > 0), **settings)) as batches:
        reads.wait_for(depth)
        for number in range(VAL_BATCHES):
            batch = next(batches)
            ahead = number + 1 + depth
            reads.wait_for(ahead if split == "train" else min(ahead, VAL_BATCHES))
            assert_batch(split, number, batch)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (7, 8), (5, 16)])
def test_a_rank_reads_only_the_tokens_that_it_uses(tmp_path: Path, rank: int, ranks: int) -> None:
    write_split(tmp_path, "train", TOKENS, [50, 3, 400])
    reads, runtime = Reads(), make_runtime(make_config(**SETTINGS), rank, ranks)
    with closing(make_pipeline(tmp_path, prefetch=0, runtime=runtime, summarize=reads)) as batches:
        next(batches)
        before, tokens = reads.num_bytes(), 0
        for batch in itertools.islice(batches, 10):
            tokens += batch.x.numel() + 1
        assert reads.num_bytes() - before == 2 * tokens
        assert batches.bytes_read == 2 * tokens * 11 // 10


def break_reads(monkeypatch: pytest.MonkeyPatch, shard: train_gpt.Shard, act: Callable) -> None:
    """Call `act` before each read of the shard, to simulate a disk that breaks or hangs."""
    read = os.preadv

    def preadv(descriptor: int, *arguments: object) -> int:
        if descriptor == shard.descriptor:
            act()
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(("split", "prefetch"), MODES)
def test_the_error_comes_after_the_good_batches(
    tmp_path: Path, split: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In validation, neighbouring batches share a token.
    good = first_token(split, 4) + (split == "val")
    write_split(tmp_path, split, TOKENS[: 20 * SEQ_LEN + 1], [good])
    config = make_config(DATA_PATH=tmp_path, VOCAB_SIZE=2**16, TRAIN_SEQ_LEN=SEQ_LEN)
    shards = train_gpt.Shards(config, split)
    broken = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    break_reads(monkeypatch, shards.shards[1], broken)
    with closing(make_pipeline(tmp_path, split, prefetch, shards=shards)) as batches:
        for number in range(4):
            assert_batch(split, number, next(batches))
        for _ in range(2):  # asking again gives the same error
            with pytest.raises(train_gpt.RunError, match="Input/output error") as caught:
                next(batches)
            assert f"{shards.shards[1].path} at byte {HEADER_BYTES}" in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("split", "prefetch"), MODES)
def test_a_file_that_replaces_an_open_shard_is_not_read(
    tmp_path: Path, split: str, prefetch: int
) -> None:
    """A link to the folder may also be changed: the run keeps the files that it opened."""
    write_split(tmp_path / "old", split, TOKENS, [100])
    write_split(tmp_path / "new", split, TOKENS[::-1], [100])
    (tmp_path / "data").symlink_to("old")
    with closing(make_pipeline(tmp_path / "data", split, prefetch)) as batches:
        (tmp_path / "data").unlink()
        (tmp_path / "data").symlink_to("new")
        for number in (0, 1):
            name = f"fineweb_{split}_{number:06d}.bin"
            (tmp_path / "new" / name).replace(tmp_path / "old" / name)
        for number in range(12):
            assert_batch(split, number, next(batches))


@pytest.fixture
def hanging_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., train_gpt.Pipeline]]:
    """Give a function that opens a pipeline whose disk hangs after two batches."""
    back = threading.Event()

    def make(prefetch: int = 1, **options: object) -> train_gpt.Pipeline:
        write_split(tmp_path, "train", TOKENS, [2 * SPAN])
        stall = options.get("DATA_STALL_SECONDS", 30)
        config = make_config(DATA_PATH=tmp_path, VOCAB_SIZE=2**16, DATA_STALL_SECONDS=stall)
        shards = train_gpt.Shards(config, "train")
        break_reads(monkeypatch, shards.shards[1], back.wait)
        return make_pipeline(tmp_path, prefetch=prefetch, shards=shards, **options)

    yield make
    back.set()


@pytest.mark.parametrize("prefetch", [1, 0])
def test_a_read_that_hangs_is_an_error_after_the_good_batches(
    hanging_pipeline: Callable[..., train_gpt.Pipeline], prefetch: int
) -> None:
    """close() stops waiting for the hanging read after half a second."""
    batches = hanging_pipeline(prefetch, DATA_STALL_SECONDS=0.4)
    for number in range(2):
        assert_batch("train", number, next(batches))
    path = batches.shards.shards[1].path
    words = f"{path} at byte 1024: the disk did not answer for DATA_STALL_SECONDS=0.4"
    with pytest.raises(train_gpt.RunError, match=words):
        next(batches)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 2.5 and batches.thread.is_alive()


def test_slow_work_on_tokens_is_not_a_stall(data: Path) -> None:
    """The machine may be busy, or an edit of `summarize` may be slow."""
    options = {"DATA_STALL_SECONDS": 0.2, "summarize": lambda *_: time.sleep(0.8)}
    with closing(make_pipeline(data, **options)) as batches:
        for number in range(2):
            assert_batch("train", number, next(batches))


def test_time_in_which_the_process_was_suspended_is_not_a_stall(
    hanging_pipeline: Callable[..., train_gpt.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGSTOP halts a job for a minute, its clock goes on, but its reads do not."""
    batches = hanging_pipeline(DATA_STALL_SECONDS=2.0)
    take_batches(batches, 2)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60 * (clock() - start > 0.5))
    start = clock()
    with pytest.raises(train_gpt.RunError, match="the disk did not answer"):
        next(batches)
    assert clock() - start >= 2.0
    batches.close()


class SlowEvent:
    """A stand-in for a CUDA event: the device reaches it late."""

    def synchronize(self) -> None:
        time.sleep(1.5)


def test_a_reader_that_waits_for_the_device_is_not_a_disk_that_hangs(data: Path) -> None:
    """A device may stand still for minutes, for example behind a collective of a slow rank."""
    with closing(make_pipeline(data, DATA_STALL_SECONDS=0.3)) as batches:
        first = next(batches)
        assert_batch("train", 0, first)
        first.copied = SlowEvent()  # the reader waits for it before it fills this slot again
        for number in range(1, 6):
            assert_batch("train", number, next(batches))


def take_batches(batches: train_gpt.Pipeline, count: int = 3) -> None:
    for _ in itertools.islice(batches, count):
        pass


def break_the_file(batches: train_gpt.Pipeline) -> None:
    os.truncate(batches.shards.shards[0].path, HEADER_BYTES + 21)
    with pytest.raises(train_gpt.RunError):
        take_batches(batches, 10)


STATES = {
    "new": lambda batches: None,
    "in use": take_batches,
    "at its end": lambda batches: take_batches(batches, VAL_BATCHES),
    "after an error": break_the_file,
}


@pytest.mark.parametrize(("split", "prefetch"), MODES)
@pytest.mark.parametrize("state", STATES)
def test_close_ends_the_reader_at_once(data: Path, split: str, prefetch: int, state: str) -> None:
    batches = make_pipeline(data, split, prefetch)
    STATES[state](batches)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 1 and not batches.thread.is_alive()
    batches.close()
