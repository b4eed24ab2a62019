"""Tests of training on a data set that is still being made.

While the file .producing is in the folder, more shards will come. They are added in the order of
their numbers, so the run gives the same digits as a run on the finished data set.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults.live import Live, assert_same_result
from reference import data_crc_of_steps
from running import SMALL_MODEL, byte_data, make_config, write_shard, write_split
from running import train_gpt as tg

STEP = 2048 + 8  # tokens that a step reads
SIZES = [3 * STEP + 600, 2 * STEP, 40, 2 * STEP + 7]  # tokens of four train shards
TOKENS = np.random.default_rng(11).integers(1, 260, sum(SIZES))
SETTINGS = {"VOCAB_SIZE": 260, "ITERATIONS": 10, "VAL_LOSS_EVERY": 0, "RUN_ID": "r"}
PRODUCERS: list["Producer"] = []  # the producers of the current test


@pytest.fixture(autouse=True)
def no_producer_outlives_its_test() -> Iterator[None]:
    yield
    while PRODUCERS:
        PRODUCERS.pop().stop()


class Producer:
    """A stand-in for the programs that make shards: it changes .producing all the time.

    `deliver` moves shards into `folder`. The folder `finished` has the complete data set.
    """

    def __init__(self, folder: Path, val_complete: bool = True) -> None:
        self.settings = {**SMALL_MODEL, **byte_data(folder), **SETTINGS}
        (folder / "fineweb_train_000000.bin").unlink()
        self.folder = folder
        self.finished = folder.parent / "finished" / folder.name
        shutil.copytree(folder, self.finished)
        write_split(self.finished, "train", TOKENS, SIZES[:-1])
        self.state = {"val_complete": val_complete, "bytes": 0}
        self.write_state()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.keep_writing)
        self.thread.start()
        PRODUCERS.append(self)

    def keep_writing(self) -> None:
        while not self.stopped.wait(0.1):
            self.write_state()

    def write_state(self) -> None:
        self.state["bytes"] += 1
        (self.folder / "state").write_text(json.dumps(self.state))
        (self.folder / "state").replace(self.folder / ".producing")

    def stop(self) -> None:
        """Stop changing .producing, as a producer that hangs would."""
        self.stopped.set()
        self.thread.join()

    def path(self, number: int) -> Path:
        return self.folder / f"fineweb_train_{number:06d}.bin"

    def deliver(self, *numbers: int) -> None:
        """Put the shards with these numbers into the folder."""
        for number in numbers:
            shutil.copy(self.finished / self.path(number).name, self.folder / "part")
            (self.folder / "part").replace(self.path(number))

    def finish(self) -> None:
        """Say that the data set is complete."""
        self.stop()
        (self.folder / ".producing").unlink()


def test_a_producer_that_hangs_ends_the_run_and_its_state_is_shown(tmp_path: Path) -> None:
    """The run first makes all the steps for which there are tokens."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    producer.state["error"] = "line 7: not JSON"
    settings = producer.settings | {"DATA_STALL_SECONDS": 1, "CHECKPOINT_EVERY": 1}
    run = Live(tmp_path / "run", **settings).wait_for_line("step:3/")
    producer.stop()
    assert run.wait_for_exit() == [1] and run.checkpoint_steps() == [1, 2, 3]
    [line] = run.error_lines
    assert (
        f"{producer.folder}/.producing: {{" in line
        and " DATA_STALL_SECONDS=1; check the disk" in line
    )
    assert '"error": "line 7: not JSON"}) for ' in line
    assert run.status == ("failed", 1)


def test_scans_open_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    shards = tg.Shards(make_config(**producer.settings), "train")
    opened: list[str] = []
    real_open = os.open

    def record(path: Path, *arguments: int) -> int:
        opened.append(Path(path).name)
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", record)
    for number in (1, 2):
        producer.deliver(number)
        for _ in range(3):
            shards.scan()
    assert [name for name in opened if name.startswith("fineweb_")] == [
        f"fineweb_train_{number:06d}.bin" for number in (1, 2)
    ]
    assert len(shards.shards) == 3


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_signal_is_received_during_a_wait_for_shards(
    tmp_path: Path, ranks: int, steps: int
) -> None:
    """In training, or already in the warm-up steps. All ranks end soon, with a checkpoint."""
    producer = Producer(tmp_path / "data")
    producer.deliver(*([0] if steps else []))
    settings = producer.settings | {"WARMUP_STEPS": 1}
    run = Live(tmp_path / "run", ranks, **settings)
    run.wait_until(lambda: steps <= len(run.events("step")) and run.events("made_of"))
    time.sleep(1)
    start = time.monotonic()
    for pid in run.codes:
        os.kill(pid, signal.SIGTERM)
    assert run.wait_for_exit() == [143] * max(1, ranks) and time.monotonic() - start < 20
    assert run.checkpoint_steps() == [steps]
    assert run.error_lines[0].startswith(f"interrupted after step {steps}")
    finished = settings | {"DATA_PATH": producer.finished}
    again = Live(tmp_path / "run", ranks, **finished | {"RESUME": "auto"}).finish()
    assert_same_result(again, Live(tmp_path / "whole", ranks, **finished).finish())


def two_machines(tmp_path: Path) -> tuple[Producer, Producer]:
    """Return two producers of the same data set in two folders, each with the first shard."""
    producers = Producer(tmp_path / "a" / "data"), Producer(tmp_path / "b" / "data")
    for producer in producers:
        producer.deliver(0)
    return producers


def test_a_machine_that_gets_its_shards_late_trains_on_the_same_data(tmp_path: Path) -> None:
    """The wait is longer than DATA_STALL_SECONDS.

    The second machine learns that the data set is complete before it gets the shards, and it gets
    them in another order.
    """
    first, second = two_machines(tmp_path)
    settings = first.settings | {"DATA_STALL_SECONDS": 4}
    run = Live(tmp_path / "run", 2, other={"DATA_PATH": second.folder}, **settings)
    run.wait_for_line("step:3/")
    time.sleep(5)
    first.deliver(2, 1, 3)
    first.finish()
    second.finish()
    time.sleep(1)
    second.deliver(3, 2)
    time.sleep(0.5)
    second.deliver(1)
    run.finish()
    uninterrupted = Live(tmp_path / "whole", 2, **settings | {"DATA_PATH": first.finished}).finish()
    assert (
        uninterrupted.events("step")[-1]["data_crc"]
        == f"{data_crc_of_steps(TOKENS, 2048, 32, 10):08x}"
    )
    assert_same_result(run, uninterrupted)
    assert run.events("input")[0]["total_ms"] > 4500, "waiting for a shard is input wait"
    [made_of] = run.events("made_of")
    assert made_of["growing"] and "fineweb_train_000003.bin" not in made_of


@pytest.mark.parametrize("fault", ["one fewer", "another one"])
def test_machines_whose_data_sets_end_differently_end_with_one_line(
    tmp_path: Path, fault: str
) -> None:
    """Otherwise they would train on different tokens from there on."""
    first, second = two_machines(tmp_path)
    settings = first.settings | {"DATA_STALL_SECONDS": 1}
    run = Live(tmp_path / "run", 2, other={"DATA_PATH": second.folder}, **settings)
    run.wait_for_line("step:3/")
    if fault == "another one":
        write_shard(second.path(1), TOKENS[::-1][: SIZES[1]])
    first.deliver(1)
    first.finish()
    second.finish()
    assert run.wait_for_exit() == [1, 1] and "Traceback" not in run.err
    name = first.path(1).name
    said = (
        f"{name}: missing on rank 1, {SIZES[1]} tokens, " if fault == "one fewer" else f"{name}: "
    )
    assert all(f"rank 1 differs from rank 0: {said}" in line for line in run.error_lines), (
        run.error_lines
    )
    assert len(run.error_lines) == 2


@pytest.mark.parametrize("growing", [0, 1])
def test_a_data_set_may_be_complete_on_one_machine_first(tmp_path: Path, growing: int) -> None:
    """Otherwise one rank alone would make a collective call, and wait for ever."""
    producers = two_machines(tmp_path)
    for producer in producers:
        producer.deliver(1, 2, 3)
    producers[1 - growing].finish()
    other = {"DATA_PATH": producers[1].folder}
    settings = producers[0].settings | {"ITERATIONS": 7}  # there are enough tokens for 7 steps
    assert Live(tmp_path / "run", 2, other=other, **settings).finish()


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_link_to_nothing_is_a_shard_that_will_come(tmp_path: Path, ranks: int) -> None:
    """A cache may make the link before the file. If the file never comes, the run ends."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    settings = producer.settings | {"DATA_STALL_SECONDS": 2}
    producer.path(1).symlink_to("later")
    run = Live(tmp_path / "run", ranks, **settings).wait_for_line("step:3/")
    time.sleep(0.5)
    shutil.copy(producer.finished / producer.path(1).name, producer.folder / "part")
    (producer.folder / "part").replace(producer.folder / "later")
    run.wait_for_line("step:5/")
    producer.path(2).symlink_to("nowhere")
    assert set(run.wait_for_exit()) == {1} and "Traceback" not in run.err
    assert f"{producer.path(2)} cannot be read: No such file or directory" in run.error_lines[0]
    assert run.error_lines[0].find(") for DATA_STALL_SECONDS=2; check the disk") > 0


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_signal_is_received_while_a_disk_does_not_answer(tmp_path: Path, ranks: int) -> None:
    """On the last rank, opening the second shard never ends."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    read = "        start = os.pread(descriptor, END_BYTES, 0)\n"
    hangs = f"os.environ.get('RANK', '0') == '{max(0, ranks - 1)}' and 'train_000001' in str(path)"
    edit = {read: f"        if {hangs}:\n            time.sleep(99)\n{read}"}
    run = Live(tmp_path / "run", ranks, edit, **producer.settings).wait_for_line("step:3/")
    producer.deliver(1)
    time.sleep(1)
    for pid in run.codes:
        os.kill(pid, signal.SIGTERM)
    assert set(run.wait_for_exit()) == {143} and run.checkpoint_steps() == [3]


def test_a_shard_that_opens_slowly_is_added_once(tmp_path: Path) -> None:
    """The readers of the warm-up steps and of the run could both open it."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    read = "        start = os.pread(descriptor, END_BYTES, 0)\n"
    edit = {read: f"        time.sleep(1.5 * ('train_000001' in str(path)))\n{read}"}
    settings = producer.settings | {"WARMUP_STEPS": 2}
    run = Live(tmp_path / "run", 0, edit, **settings).wait_for_line("warmup_step:1/")
    producer.deliver(1)
    run.wait_for_line("step:4/")
    producer.deliver(2, 3)
    producer.finish()
    uninterrupted = Live(tmp_path / "whole", **settings | {"DATA_PATH": producer.finished}).finish()
    assert run.finish().losses() == uninterrupted.losses()


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_shard_may_be_removed_once_it_is_open(tmp_path: Path, ranks: int) -> None:
    """The run keeps the file open, and later shards keep their places."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    run = Live(tmp_path / "run", ranks, **producer.settings).wait_for_line("step:3/")
    producer.path(0).unlink()
    producer.deliver(1, 2, 3)
    producer.finish()
    finished = producer.settings | {"DATA_PATH": producer.finished}
    assert_same_result(run.finish(), Live(tmp_path / "whole", ranks, **finished).finish())


def test_no_step_is_begun_after_the_time_limit(tmp_path: Path) -> None:
    """The time of a wait for shards counts."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    settings = producer.settings | {"MAX_WALLCLOCK_SECONDS": 4}
    run = Live(tmp_path / "run", 2, **settings).wait_for_line("step:3/")
    time.sleep(5)
    producer.deliver(1, 2, 3)
    producer.finish()
    assert run.finish().events("step")[-1]["step"] == 3 and "stopping_early" in run.text


def test_a_finished_set_may_not_lack_a_shard_of_the_checkpoint(tmp_path: Path) -> None:
    """If a copy to another machine is incomplete, the run would go on with other batches."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0, 1, 2, 3)
    settings = producer.settings | {"CHECKPOINT_EVERY": 5, "RESUME": "auto"}
    Live(tmp_path / "run", **settings | {"ITERATIONS": 5}).finish()
    producer.path(3).unlink()
    producer.finish()
    run = Live(tmp_path / "run", **settings)
    assert (
        run.wait_for_exit() == [1]
        and f"{producer.path(3).name}: missing in this run" in run.error_lines[0]
    )
    producer = Producer(tmp_path / "again")  # this set is not complete yet: the shard may come
    producer.deliver(0, 1, 2)
    run = Live(tmp_path / "run", **settings | {"DATA_PATH": producer.folder})
    run.wait_for_line("resumed: step:5")
    producer.deliver(3)
    producer.finish()
    run.finish()
    assert run.events("step")[-1]["data_crc"] == f"{data_crc_of_steps(TOKENS, 2048, 32, 10):08x}"


def test_validation_waits_for_val_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training shards may still be missing; an incomplete validation set is never used."""
    producer = Producer(tmp_path / "data", val_complete=False)
    config = make_config(**producer.settings, DATA_STALL_SECONDS=0.6)
    timer = threading.Timer(1.0, producer.state.update, [{"val_complete": True}])
    timer.start()
    start = time.monotonic()
    assert tg.Shards(config, "val").ends == [0, 3000]
    assert time.monotonic() - start > 0.9
    late = write_shard(tmp_path / "late" / "fineweb_val_000001.bin", TOKENS[:50])
    read_file = tg.read_file

    def deliver_and_read(*given: object) -> bytes:
        """Deliver the last shard just before val_complete is read."""
        late.rename(producer.folder / late.name)
        return read_file(*given)

    monkeypatch.setattr(tg, "read_file", deliver_and_read)
    assert tg.Shards(config, "val").ends == [0, 3000, 3050]
    monkeypatch.undo()
    producer.state["val_complete"] = False
    producer.stop()
    producer.write_state()
    with pytest.raises(tg.RunError, match=r"\.producing: .*val_complete.*\) for"):
        tg.Shards(config, "val")


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_time_limit_ends_a_wait_for_shards(tmp_path: Path, ranks: int) -> None:
    """The producer goes on, but too slowly."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    settings = producer.settings | {"MAX_WALLCLOCK_SECONDS": 4, "ITERATIONS": 100_000}
    run = Live(tmp_path / "run", ranks, **settings).finish()
    assert len(run.events("step")) == 3
    assert "stopping_early: wallclock_cap" in run.text
    assert 4000 <= run.events("validation")[-1]["train_time_ms"] < 6000


def test_warm_up_does_not_wait_for_tokens_that_the_run_does_not_use(tmp_path: Path) -> None:
    """The first shard has the tokens of three steps, and there are three steps."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    settings = producer.settings | {"WARMUP_STEPS": 5, "ITERATIONS": 3}
    run = Live(tmp_path / "run", **settings).finish()
    assert run.text.count("warmup_step:") == 3 and len(run.events("step")) == 3


def test_a_run_without_a_step_needs_no_shard(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    run = Live(tmp_path / "run", **producer.settings | {"ITERATIONS": 0}).finish()
    assert run.events("input")[0]["epochs"] == 0


def test_data_stall_seconds_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a slow disk takes longer than the time between two looks."""
    timer = tg.StallTimer(1.0)
    start = time.monotonic()
    while not timer.expired("the same"):
        time.sleep(0.3)
    assert 1.0 < time.monotonic() - start < 3.0
