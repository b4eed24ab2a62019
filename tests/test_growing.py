"""Training reads a set of shards while it is made. They join in the order of their numbers, so the
run is the one of the complete set. A producer is alive while its progress moves, by the trainer's
own clock; one that leaves early or fails ends the run in one line that names the command that goes
on: at the start, or after the steps that its shards are enough for.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    ROOT,
    SMALL_MODEL,
    Finished,
    byte_data,
    clean_environment,
    config_of,
    open_pipeline,
    run_trainer,
    runtime_of,
    train_gpt,
    write_split,
)
from order import crc_of

pytestmark = pytest.mark.timeout(240)

STEP = 2048 + 8  # tokens
SIZES = [3 * STEP + 600, 2 * STEP, 40, 2 * STEP + 7]  # of four train shards; the third is small
TOKENS = np.random.default_rng(11).integers(1, 260, sum(SIZES))
RUN = {
    **SMALL_MODEL,
    "VOCAB_SIZE": 260,
    "ITERATIONS": 10,
    "WARMUP_STEPS": 1,
    "VAL_LOSS_EVERY": 0,
    "VAL_TOKENS": 2000,
}


PRODUCERS: list["Producer"] = []  # of a test


@pytest.fixture(autouse=True)
def no_producer_outlives_its_test() -> Iterator[None]:
    """Its thread would go on to open files."""
    yield
    while PRODUCERS:
        producer = PRODUCERS.pop()
        producer.dead.set()
        producer.thread.join()


class Producer:
    """Brings shards into `folder`; .producing tells of it, as data/producer.py says."""

    def __init__(self, folder: Path, promised: int | None = len(SIZES)) -> None:
        self.settings = {**RUN, **byte_data(folder)}
        (folder / "fineweb_train_000000.bin").unlink()
        self.whole = folder.parent / f"{folder.name}_whole"
        shutil.copytree(folder, self.whole)
        write_split(self.whole, "train", TOKENS, SIZES[:-1])
        self.folder, self.promised, self.delivered = folder, promised, 0
        self.more, self.dead = {}, threading.Event()
        self.counter = itertools.count()
        self.tell()
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()
        PRODUCERS.append(self)

    def live(self) -> None:
        """Its counter moves, also while it makes no shard."""
        while not self.dead.wait(0.1):
            with suppress(FileNotFoundError):  # the test is over, and its folder gone
                self.tell()

    def die(self, **more: object) -> None:
        """Its counter stays where it is."""
        self.dead.set()
        self.tell(**more)

    def tell(self, **more: object) -> None:
        self.more |= more
        state = {"shards_promised": self.promised, "progress": next(self.counter)}
        state |= {"val_complete": True, "command": "make the rest", **self.more}
        if (self.folder / "left").exists():
            return
        temporary = self.folder / f".producing.{threading.get_ident()}"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.folder / ".producing")

    def path(self, number: int) -> Path:
        return self.folder / f"fineweb_train_{number:06d}.bin"

    def deliver(self, number: int) -> None:
        shutil.copy(self.whole / self.path(number).name, self.folder / "part")
        (self.folder / "part").replace(self.path(number))
        self.delivered += 1
        self.tell()

    def complete(self) -> None:
        self.dead.set()
        (self.folder / "left").touch()
        time.sleep(0.2)
        (self.folder / ".producing").unlink()


# --- The whole run --------------------------------------------------------------------------------


class Trainer:
    """The script at work in `folder`, while the test does something else."""

    def __init__(self, folder: Path, ranks: int, settings: dict) -> None:
        self.folder, self.runs = folder, []
        self.thread = threading.Thread(
            target=lambda: self.runs.append(run_trainer(folder, ranks=ranks, **settings))
        )
        self.thread.start()

    def until_logged(self, words: str) -> None:
        """A line that begins so. Or until it has ended, which the test finds out."""
        paths = self.folder / "logs"
        while self.thread.is_alive() and not any(
            f"\n{words}" in path.read_text() for path in paths.glob("*.txt")
        ):
            time.sleep(0.02)

    def finished(self) -> Finished:
        self.thread.join()
        return self.runs[0]


def losses(run: Finished) -> list[float]:
    return [float(value) for value in run.values("train_loss") + run.values("val_loss")]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run on the complete set."""
    folder = tmp_path_factory.mktemp("complete")
    producer = Producer(folder / "data" / "datasets" / "set")
    run = run_trainer(folder / "run", **{**producer.settings, "DATA_PATH": producer.whole})
    assert run.code == 0, run.err
    return run


def test_the_order_is_that_of_the_complete_set(complete: Finished) -> None:
    assert complete.values("data_crc")[-1] == f"{crc_of(TOKENS, 2048, 32, 10):08x}"


@pytest.mark.parametrize(
    "ranks,promised", [(0, len(SIZES)), pytest.param(2, None, marks=pytest.mark.slow)]
)
def test_a_growing_set_trains_as_the_complete_one(
    tmp_path: Path, complete: Finished, ranks: int, promised: int | None
) -> None:
    """It comes shard by shard, and then goes round. Two ranks are not told how many it has."""
    producer = Producer(tmp_path / "data", promised)
    trainer = Trainer(tmp_path / "run", ranks, producer.settings)
    trainer.until_logged("waiting for ")
    producer.deliver(0)
    trainer.until_logged("step:3/")
    time.sleep(0.5)  # it waits, and says so at the end
    for number in (2, 1, 3):
        producer.deliver(number)
    producer.complete()
    run = trainer.finished()
    assert run.code == 0, run.err
    assert run.values("data_crc") == complete.values("data_crc")
    assert losses(run) == pytest.approx(losses(complete), abs=0 if ranks == 0 else 2e-4)
    assert re.search(rf"^waiting for .*{producer.path(0)}", run.text, re.MULTILINE)
    [waited] = re.findall(r"^input_wait total\w*:([\d.]+)", run.text, re.MULTILINE)
    assert float(waited) > 300, "waiting for a shard is input wait"


@pytest.mark.slow
@pytest.mark.row("a producer that leaves early, whole run", "one line")
def test_a_producer_that_leaves_early_ends_the_run_in_one_line(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    settings = {**producer.settings, "DATA_STALL_SECONDS": 2}
    trainer = Trainer(tmp_path / "run", 0, settings)
    trainer.until_logged("waiting for ")
    producer.die()
    run = trainer.finished()
    assert "Traceback" not in run.err
    [line] = [line for line in run.err.splitlines() if "incomplete" in line]
    assert run.code == 1 and "its producer has left, fineweb_train_000001.bin is missing" in line
    assert "to go on: make the rest" in line and line.endswith("RESUME=auto goes on")
    assert line.startswith("train_gpt.py: ") and line.count("rank 0") == 1, line
    assert re.findall(r"^step:(\d+)", run.out, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.slow
def test_training_while_documents_are_tokenised_is_training_afterwards(tmp_path: Path) -> None:
    """The tool makes shards and starts the trainer, on two ranks."""
    with open(tmp_path / "docs.jsonl", "w", encoding="utf-8") as out:
        for number in range(120):
            text = f"Document {number}: " + f"{number * 7919 % 1009} words, " * 30
            out.write(json.dumps({"text": text}) + "\n")
    (tmp_path / "run").mkdir()
    settings = {name: value for name, value in RUN.items() if name != "VOCAB_SIZE"}
    tool = f"{ROOT}/data/tokenize_docs.py {tmp_path}/docs.jsonl --bytes --out {tmp_path}/out "
    tool += "--num-val-docs 20 --shard-tokens 5000 --live --tokens-per-second 1000 -- "
    trainer = "-m torch.distributed.run --standalone --nproc_per_node=2"
    live = subprocess.run(
        [sys.executable, *tool.split(), sys.executable, *trainer.split(), ROOT / "train_gpt.py"],
        cwd=tmp_path / "run",
        env=clean_environment(**settings),
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert live.returncode == 0, live.stderr
    [data] = (tmp_path / "out" / "datasets").glob("*/")
    [tokenizer] = (tmp_path / "out" / "tokenizers").iterdir()
    paths = {"DATA_PATH": data, "TOKENIZER_PATH": tokenizer, "VOCAB_SIZE": 260}
    if (data / ".producing").exists():  # training has ended first: the command there goes on
        command = json.loads((data / ".producing").read_text())["command"]
        subprocess.run(command.replace(" 1000", " 100000"), shell=True, check=True, timeout=100)
    afterwards = run_trainer(tmp_path / "afterwards", ranks=2, **settings, **paths)
    run = Finished(0, live.stdout, live.stderr, tmp_path / "run")
    assert run.values("data_crc") == afterwards.values("data_crc") != []
    assert losses(run) == losses(afterwards)
    before, after = (re.search(r"train_shards:(\d+)", r.text)[1] for r in (run, afterwards))
    assert int(before) < int(after), "the set was complete when training began"


# --- The reader -----------------------------------------------------------------------------------


def shards_of(producer: Producer, **settings: object) -> train_gpt.Shards:
    return train_gpt.open_shards(config_of(**{**producer.settings, **settings}), "train")


def waiter(shards: train_gpt.Shards, token: int) -> threading.Thread:
    """A thread that lives until the token is there."""
    thread = threading.Thread(target=shards.wait_for, args=[token, lambda: False])
    thread.start()
    return thread


def test_shards_join_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    producer.deliver(2)
    producer.deliver(0)
    shards = shards_of(producer)
    waiting = waiter(shards, sum(SIZES[:3]))  # the first token of shard 3
    producer.deliver(3)
    time.sleep(0.3)
    assert waiting.is_alive() and shards.ends == [0, SIZES[0]]
    producer.deliver(1)
    waiting.join(20)
    assert not waiting.is_alive() and shards.ends == [0, *np.cumsum(SIZES)]
    assert shards.paths == [producer.path(number) for number in range(4)]


def test_ranks_wait_for_the_last_token_of_a_step(tmp_path: Path) -> None:
    """Rank 0 of 4 has the first quarter of a step: were it to go on, it would wait for the others
    in a collective, which says less."""
    producer = Producer(tmp_path / "data")
    producer.deliver(0)  # three steps, and the first quarter of the fourth
    config = config_of(**producer.settings)
    runtime, read = runtime_of(config, 0, 4), []

    def digest(plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> None:
        read.append(rows)

    with closing(open_pipeline(config, runtime=runtime, digest=digest)) as batches:
        for _ in range(3):
            next(batches)
        time.sleep(0.3)
        assert len(read) == 3
        producer.deliver(1)
        assert next(batches).rows == range(3 * 64, 3 * 64 + 16)


FAILURES = {
    "leaves": (lambda producer: producer.die(), "its producer has left"),
    "fails": (lambda producer: producer.die(error="failed: line 7: not JSON"), "line 7: not JSON"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.row("a producer ends: ..", "an error behind the good batches")
def test_the_end_of_a_producer_comes_after_the_good_batches(tmp_path: Path, case: str) -> None:
    fail, said = FAILURES[case]
    producer = Producer(tmp_path / "data")
    producer.deliver(0)
    stall = 0.5 if case == "leaves" else 100
    config = config_of(**producer.settings, DATA_STALL_SECONDS=stall)
    with closing(open_pipeline(config)) as batches:
        for _ in range(3):
            next(batches)
        fail(producer)
        start = time.monotonic()
        words = f"the set is incomplete: .*{said}, fineweb_train_000001.bin is missing"
        with pytest.raises(train_gpt.RunError, match=words):
            next(batches)
        assert time.monotonic() - start < 50


def test_a_producer_that_advances_slowly_is_waited_for(tmp_path: Path) -> None:
    """For longer than DATA_STALL_SECONDS, as its progress moves."""
    producer = Producer(tmp_path / "data")
    shards = shards_of(producer, DATA_STALL_SECONDS=1)
    waiting = waiter(shards, 0)
    time.sleep(1.5)
    assert waiting.is_alive()
    producer.deliver(0)
    waiting.join(20)
    assert shards.ends == [0, SIZES[0]]


@pytest.mark.slow
@pytest.mark.row("an incomplete set at the start (..)", "refused before step 1")
@pytest.mark.parametrize("error", ["", "failed: no network"])
def test_an_incomplete_set_is_refused_before_the_first_step(tmp_path: Path, error: str) -> None:
    """Though its shards are enough for all steps."""
    producer = Producer(tmp_path / "data")
    for number in range(3):
        producer.deliver(number)
    producer.die(**{"error": error} if error else {})
    settings = {**producer.settings, "DATA_STALL_SECONDS": 1, "ITERATIONS": 2}
    run = run_trainer(tmp_path / "run", **settings)
    assert run.code == 1 and not re.search(r"^(warmup_)?step:", run.out, re.MULTILINE)
    assert "the set is incomplete" in run.err and "to go on: make the rest" in run.err
    producer.complete()
    assert run_trainer(tmp_path / "run", **settings).code == 0, "as it is: nothing is missing"


def test_validation_that_is_still_being_made_is_waited_for(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    producer.tell(val_complete=False)
    config = config_of(**producer.settings, DATA_STALL_SECONDS=0.5)
    threading.Timer(1.0, producer.tell, kwargs={"val_complete": True}).start()
    start = time.monotonic()
    assert train_gpt.open_shards(config, "val").ends[-1] > 0
    assert time.monotonic() - start > 0.9
    producer.die(val_complete=False)
    with pytest.raises(train_gpt.RunError, match="a validation shard is missing"):
        train_gpt.open_shards(config, "val")


def test_a_damaged_shard_is_named_when_it_appears(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    shards = shards_of(producer)
    producer.path(0).write_bytes(b"half a shard")
    with pytest.raises(train_gpt.RunError, match="fineweb_train_000000.bin: no"):
        shards.wait_for(0, lambda: False)


def test_close_ends_the_wait_for_a_shard(tmp_path: Path) -> None:
    config = config_of(**Producer(tmp_path / "data").settings)
    batches = open_pipeline(config)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 1
    batches.thread.join(5)
    assert not batches.thread.is_alive()
