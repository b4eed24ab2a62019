"""Training reads a set of shards while it is made: while .producing is in the folder, more come.

They join in the order of their numbers, so the run is that of the finished set, to the digit.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.live import Live, assert_same_result
from order import crc_of
from running import SMALL_MODEL, byte_data, config_of, write_shard, write_split
from running import train_gpt as tg

STEP = 2048 + 8  # tokens
SIZES = [3 * STEP + 600, 2 * STEP, 40, 2 * STEP + 7]  # of four train shards; the third is small
TOKENS = np.random.default_rng(11).integers(1, 260, sum(SIZES))
SETTINGS = {"VOCAB_SIZE": 260, "ITERATIONS": 10, "VAL_LOSS_EVERY": 0, "RUN_ID": "r"}
PRODUCERS: list["Producer"] = []  # of a test


@pytest.fixture(autouse=True)
def no_producer_outlives_its_test() -> Iterator[None]:
    yield
    while PRODUCERS:
        PRODUCERS.pop().stand_still()


class Producer:
    """Makes the shards of `folder`; its .producing changes all the time, as that of data/ does."""

    def __init__(self, folder: Path, val_complete: bool = True) -> None:
        self.settings = {**SMALL_MODEL, **byte_data(folder), **SETTINGS}
        (folder / "fineweb_train_000000.bin").unlink()
        self.folder = folder
        self.finished = folder.parent / "finished" / folder.name
        shutil.copytree(folder, self.finished)
        write_split(self.finished, "train", TOKENS, SIZES[:-1])
        self.state = {"val_complete": val_complete, "bytes": 0}
        self.tell()
        self.still = threading.Event()
        self.thread = threading.Thread(target=self.live)
        self.thread.start()
        PRODUCERS.append(self)

    def live(self) -> None:
        while not self.still.wait(0.1):
            self.tell()

    def tell(self) -> None:
        self.state["bytes"] += 1
        (self.folder / "state").write_text(json.dumps(self.state))
        (self.folder / "state").replace(self.folder / ".producing")

    def stand_still(self) -> None:
        self.still.set()
        self.thread.join()

    def path(self, number: int) -> Path:
        return self.folder / f"fineweb_train_{number:06d}.bin"

    def deliver(self, *numbers: int) -> None:
        for number in numbers:
            shutil.copy(self.finished / self.path(number).name, self.folder / "part")
            (self.folder / "part").replace(self.path(number))

    def finish(self) -> None:
        self.stand_still()
        (self.folder / ".producing").unlink()


# Whole runs


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_growing_set_trains_as_the_finished_one(tmp_path: Path, ranks: int) -> None:
    """It comes shard by shard, the third before the second, and after longer than
    DATA_STALL_SECONDS; then it is read from its start."""
    producer = Producer(tmp_path / "data")
    finished = producer.settings | {"DATA_PATH": producer.finished}
    finished = Live(tmp_path / "finished_run", ranks, **finished).finish()
    assert finished.events("step")[-1]["data_crc"] == f"{crc_of(TOKENS, 2048, 32, 10):08x}"
    run = Live(tmp_path / "run", ranks, **producer.settings, DATA_STALL_SECONDS=1)
    producer.deliver(0)
    run.until_line("step:3/")
    time.sleep(2)  # it waits, and says so at the end
    producer.deliver(2, 1, 3)
    producer.finish()
    run.finish()
    assert_same_result(run, finished)
    assert run.events("input")[0]["total_ms"] > 1500, "waiting for a shard is input wait"
    [made_of] = run.events("made_of")
    assert made_of["growing"] and "fineweb_train_000003.bin" not in made_of


def test_a_producer_that_stands_still_ends_the_run_and_is_shown(tmp_path: Path) -> None:
    """With what its file says, after the steps that its shards are enough for."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    producer.state["error"] = "line 7: not JSON"
    settings = producer.settings | {"DATA_STALL_SECONDS": 1, "CHECKPOINT_EVERY": 1}
    run = Live(tmp_path / "run", **settings).until_line("step:3/")
    producer.stand_still()
    assert run.end() == [1] and run.checkpoints() == [1, 2, 3]
    [line] = run.said
    assert f"{producer.folder}/.producing: not changed for DATA_STALL_SECONDS=1: {{" in line
    assert '"error": "line 7: not JSON"' in line and run.status == ("failed", 1)


def test_a_shard_that_is_made_again_differently_is_refused_when_it_joins(tmp_path: Path) -> None:
    """RESUME compares the shards that are there at the start, and each later one with the
    checkpoint's."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0, 1, 2, 3)
    settings = producer.settings | {"ITERATIONS": 6, "CHECKPOINT_EVERY": 3, "RESUME": "auto"}
    run = Live(tmp_path / "run", **settings).finish()
    run.checkpoint(6).unlink()
    for number in (1, 2, 3):
        producer.path(number).unlink()
    run = Live(run.folder, **settings | {"ITERATIONS": 7})
    content = bytearray((producer.finished / producer.path(1).name).read_bytes())
    content[-2] ^= 1
    run.until_line("resumed: step:3")
    producer.path(1).write_bytes(content)
    assert run.end() == [1]
    assert f"the checkpoint had {2 * STEP} tokens, " in run.said[0]
    assert str(producer.path(1)) in run.said[0]


def test_a_rank_waits_for_all_tokens_of_a_step(tmp_path: Path) -> None:
    """Of step 4, those of rank 0 have come, but not those of rank 3: if rank 0 trained on them, it
    would wait for rank 3 in a collective, which cannot say what is missing."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    config = config_of(**producer.settings | {"GRAD_ACCUM_STEPS": 1})
    plan = tg.BatchPlan.train(config, rank=0, ranks=4, step=3)
    last_here = plan.first_token(plan.rows(3).stop)
    assert last_here < SIZES[0] <= plan.last_token_of_step(plan.rows(3))
    cpu = torch.device("cpu")
    overlap = tg.Overlap.of(config, "train", cpu)
    with closing(tg.Pipeline(tg.Shards(config, "train"), plan, overlap, cpu)) as batches:
        time.sleep(0.5)
        assert batches.filled.empty()
        producer.deliver(1)
        assert next(batches).rows == plan.rows(3)


def test_validation_waits_for_val_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training shards may still be missing, all of them; half a validation split is never used."""
    producer = Producer(tmp_path / "data", val_complete=False)
    config = config_of(**producer.settings, DATA_STALL_SECONDS=0.6)
    timer = threading.Timer(1.0, producer.state.update, [{"val_complete": True}])
    timer.start()
    start = time.monotonic()
    assert tg.Shards(config, "val").ends == [0, 3000]
    assert time.monotonic() - start > 0.9
    late = write_shard(tmp_path / "late" / "fineweb_val_000001.bin", TOKENS[:50])
    producing = tg.Shards.producing

    def deliver_and_look(shards: tg.Shards) -> str:
        """The last shard has come just before val_complete is read."""
        if shards.shards and late.exists():
            late.rename(producer.folder / late.name)
        return producing(shards)

    monkeypatch.setattr(tg.Shards, "producing", deliver_and_look)
    assert tg.Shards(config, "val").ends == [0, 3000, 3050]
    monkeypatch.undo()
    producer.state["val_complete"] = False
    producer.stand_still()
    producer.tell()
    with pytest.raises(tg.RunError, match=r"\.producing: not changed .*val_complete"):
        tg.Shards(config, "val")
