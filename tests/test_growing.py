"""Proves that training reads a set of shards while it is made: the same run as on the complete set, and clear ends."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    ROOT,
    SMALL_MODEL,
    byte_data,
    clean_environment,
    config_of,
    free_port,
    open_pipeline,
    run_trainer,
)
from conftest import train_gpt, write_split

pytestmark = pytest.mark.timeout(180)
STEP = 2048 + 8  # tokens
SIZES = [3 * STEP + 100, 2 * STEP, 40, 2 * STEP + 7]  # of four train shards; the third is small
TOKENS = np.random.default_rng(11).integers(1, 260, sum(SIZES))
RUN = {
    **SMALL_MODEL,
    "VOCAB_SIZE": 260,
    "ITERATIONS": 12,
    "VAL_LOSS_EVERY": 0,
    "VAL_TOKENS": 2000,
    "DATA_STALL_SECONDS": 30,
}


class Producer:
    """Shards appear in `folder` when deliver() is called; .producing tells of it, as data/producer.py's does."""

    def __init__(self, folder: Path, promised: int | None = len(SIZES)) -> None:
        self.settings = byte_data(folder)
        (folder / "fineweb_train_000000.bin").unlink()
        self.whole = folder.parent / f"{folder.name}_whole"
        write_split(self.whole, "train", TOKENS, SIZES[:-1])
        shutil.copytree(folder, self.whole, dirs_exist_ok=True)
        self.folder, self.promised, self.delivered = folder, promised, 0
        self.tell()

    def tell(self, **more: object) -> None:
        """The sign of life, with the number of shards as its progress."""
        state = {
            "pid": os.getpid(),
            "time": time.time(),
            "shards_promised": self.promised,
            "progress": self.delivered,
        }
        temporary = self.folder / ".producing.tmp"
        temporary.write_text(json.dumps(state | more))
        temporary.replace(self.folder / ".producing")

    def deliver(self, count: int = 1) -> None:
        for _ in range(count):
            name = f"fineweb_train_{self.delivered:06d}.bin"
            shutil.copy(self.whole / name, self.folder / "part")
            (self.folder / "part").replace(self.folder / name)
            self.delivered += 1
            self.tell()

    def finish(self) -> None:
        (self.folder / ".producing").unlink()


def start_trainer(folder: Path, ranks: int, **settings: object) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = (
        [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
        ]
        if ranks
        else []
    )
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train_gpt.py")],
        cwd=folder,
        text=True,
        env=clean_environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def log_of(folder: Path) -> str:
    texts = [path.read_text() for path in (folder / "logs").glob("*.txt")]
    return texts[0].split("=" * 100 + "\n", 2)[-1] if texts else ""


def until(condition: Callable[[], object], trainer: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert trainer is None or trainer.poll() is None, trainer.stdout.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def words(text: str) -> list[str]:
    """What has to be equal in two runs."""
    return re.findall(r"(?:train_loss|val_loss|val_bpb|data_crc):\S+", text)


@pytest.mark.parametrize("ranks,promised", [(0, len(SIZES)), (2, None)])
def test_a_growing_set_trains_as_the_complete_one(
    tmp_path: Path, ranks: int, promised: int | None
) -> None:
    """Shards come one by one, each only once training waits for it; it goes round the set, and the run is the same."""
    producer = Producer(tmp_path / "data", promised)
    settings = {**producer.settings, **RUN}
    trainer = start_trainer(tmp_path / "run", ranks, **settings)
    for number in range(len(SIZES)):
        until(
            lambda: (
                f"waiting for {producer.folder}/fineweb_train_{number:06d}.bin"
                in log_of(tmp_path / "run")
                or number == 2
            ),
            trainer,
        )  # the small one is passed by: the step needs the one behind it
        if number == 3:
            time.sleep(1)
        producer.deliver()
    if promised is None:
        until(lambda: f"fineweb_train_{len(SIZES):06d}.bin" in log_of(tmp_path / "run"), trainer)
    producer.finish()
    out, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, out[-3000:]
    complete = run_trainer(
        tmp_path / "complete", ranks=ranks, **{**settings, "DATA_PATH": producer.whole}
    )
    assert (
        complete.code == 0
        and words(log_of(tmp_path / "run")) == words(complete.text)
        and words(complete.text)
    )
    text = log_of(tmp_path / "run")
    assert f"train_shards: 0 of {promised or '?'} so far: their producer is at work" in text
    assert "begins a second epoch" in text
    [waited] = re.findall(r"^host_wait total_ms:([\d.]+)", text, re.MULTILINE)
    assert float(waited) > 300, "waiting for a shard is input wait"
    events = [
        json.loads(line)
        for path in (tmp_path / "run" / "logs").glob("*.jsonl")
        for line in path.open()
    ]
    assert [Path(e["shard"]).name for e in events if e["event"] == "stall"][:2] == [
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
    ]


@pytest.mark.parametrize("ranks", [0, 2])
def test_training_while_tokenising_is_training_afterwards(tmp_path: Path, ranks: int) -> None:
    """The tool makes shards and starts the trainer; the same run on the finished shards gives the same losses."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "docs.jsonl", "w", encoding="utf-8") as out:
        for number in range(120):
            out.write(
                json.dumps(
                    {"text": f"Document {number}: " + f"{number * 7919 % 1009} words, " * 30}
                )
                + "\n"
            )
    launcher = (
        [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
        ]
        if ranks
        else []
    )
    settings = {key: value for key, value in RUN.items() if key != "VOCAB_SIZE"} | {
        "ITERATIONS": 18
    }
    command = [
        sys.executable,
        str(ROOT / "data" / "tokenize_docs.py"),
        str(tmp_path / "docs.jsonl"),
        "--bytes",
        "--out",
        str(tmp_path / "out"),
        "--num-val-docs",
        "20",
        "--shard-tokens",
        "5000",
        "--live",
        "--tokens-per-second",
        "2000",
        "--",
        sys.executable,
        *launcher,
        str(ROOT / "train_gpt.py"),
    ]
    live = subprocess.run(
        command,
        cwd=tmp_path / "run",
        env=clean_environment(**settings),
        text=True,
        timeout=150,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert live.returncode == 0, live.stdout[-3000:]
    [data] = (path for path in (tmp_path / "out" / "datasets").iterdir() if path.is_dir())
    [tokenizer] = (tmp_path / "out" / "tokenizers").iterdir()
    after = run_trainer(
        tmp_path / "after",
        ranks=ranks,
        DATA_PATH=data,
        TOKENIZER_PATH=tokenizer,
        VOCAB_SIZE=260,
        **settings,
    )
    assert (
        after.code == 0
        and words(log_of(tmp_path / "run")) == words(after.text)
        and words(after.text)
    )
    assert "their producer is at work" in log_of(tmp_path / "run") and "so far" not in after.text


def test_ranks_wait_for_the_shard_with_the_last_token_of_the_step(tmp_path: Path) -> None:
    """Rank 0 of 4 reads only the step's first quarter, and yet waits until its last token is there."""
    producer = Producer(tmp_path / "data")
    producer.deliver()
    config = config_of(**{**producer.settings, **RUN})
    plans = [train_gpt.BatchPlan.train(config, rank, 4) for rank in range(4)]
    for k in range(9):
        assert {plan.last_token(plan.rows(k)) for plan in plans} == {(k + 1) * STEP - 1}
    shards = train_gpt.Shards(config.data_path, "train")
    with contextlib.closing(
        open_pipeline(config, runtime=train_gpt.Runtime(0, 4), shards=shards, log=Quiet())
    ) as batches:
        assert shards.growing
        for _ in range(3):
            next(batches)  # whole in shard 0, which has 100 tokens of the fourth step
        with pytest.raises(train_gpt.queue.Empty):
            batches.ready.get(timeout=0.5)
        producer.deliver()
        next(batches)


FAILURES = {
    "error": (
        lambda p: p.tell(error="failed: docs.jsonl, line 7: not JSON"),
        "failed: docs.jsonl, line 7: not JSON",
    ),
    "died": (lambda p: p.tell(time=time.time() - 31), "has died"),
    "still": (lambda p: None, "stands still"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_producer_that_fails_ends_the_run_after_the_good_batches(
    tmp_path: Path, case: str
) -> None:
    fail, said = FAILURES[case]
    producer = Producer(tmp_path / "data")
    producer.deliver()
    trainer = start_trainer(
        tmp_path / "run",
        0,
        **{**producer.settings, **RUN, "DATA_STALL_SECONDS": 1 if case == "still" else 30},
    )
    until(lambda: "waiting for" in log_of(tmp_path / "run") or trainer.poll() is not None)
    fail(producer)
    out, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 1 and "Traceback" not in out
    missing = f"{producer.folder}/fineweb_train_000001.bin will not come: its producer {said}"
    [line] = [line for line in out.splitlines() if line.startswith("train_gpt.py: ")]
    assert missing in line
    assert [word for word in re.findall(r"^step:(\d+)", out, re.MULTILINE)] == ["1", "2", "3"]


def test_a_producer_that_advances_slowly_is_waited_for(tmp_path: Path) -> None:
    """Longer than DATA_STALL_SECONDS, as it makes progress."""
    producer = Producer(tmp_path / "data")
    shards = train_gpt.Shards(str(producer.folder), "train")
    done: list[object] = []

    runtime = train_gpt.Runtime(stall_seconds=0.3)
    runtime.log = Quiet()

    def wait() -> None:
        shards.await_token(0, SimpleNamespace(closed=False, rt=runtime))
        done.append(None)

    thread = threading.Thread(target=wait)
    thread.start()
    for progress in range(8):
        producer.tell(progress=progress)
        time.sleep(0.1)
    assert not done and thread.is_alive()
    producer.deliver()
    thread.join(10)
    assert done and shards.paths and shards.ends == [0, SIZES[0]]


class Quiet:
    def say(self, *_: object, **__: object) -> None:
        pass


@pytest.mark.parametrize("state", ["none", "stale", "failed"])
def test_without_a_live_producer_nothing_is_waited_for(tmp_path: Path, state: str) -> None:
    """The run trains on what is there, in circles, and says how many shards it has of how many."""
    producer = Producer(tmp_path / "data" / "datasets" / "made")
    producer.deliver(2)
    manifest = {
        "datasets": [
            {"name": "other"},
            {"name": "made", "stats": {"files_train": 4, "files_val": 1}},
        ]
    }
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    {
        "none": producer.finish,
        "stale": lambda: producer.tell(time=time.time() - 31),
        "failed": lambda: producer.tell(error="failed"),
    }[state]()
    run = run_trainer(tmp_path / "run", **{**producer.settings, **RUN})
    assert run.code == 0, run.err
    assert "WARNING: train_shards: 2 of 4, and nothing brings the others" in run.text
    assert "begins a second epoch" in run.text and "waiting for" not in run.text


def test_an_incomplete_val_split_is_refused(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data" / "datasets" / "made")
    producer.deliver()
    manifest = {"datasets": [{"name": "made", "stats": {"files_train": 4, "files_val": 2}}]}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    [fault] = config_of(**{**producer.settings, **RUN}).problems(1)
    assert "1 of 2 val shards" in fault and fault.startswith("DATA_PATH=")


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", '{"datasets": 1}', '{"datasets": [{"name": "made"}]}', "{"]
)
def test_a_manifest_of_another_kind_harms_nothing(tmp_path: Path, manifest: str) -> None:
    producer = Producer(tmp_path / "data" / "datasets" / "made")
    producer.deliver()
    (tmp_path / "data" / "manifest.json").write_text(manifest)
    assert config_of(**{**producer.settings, **RUN}).problems(1) == []


def test_a_damaged_shard_is_named_when_it_appears(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "data")
    producer.deliver()
    (producer.folder / "fineweb_train_000001.bin").write_bytes(b"half a shard")
    shards = train_gpt.Shards(str(producer.folder), "none")
    shards.growing = True
    with pytest.raises(train_gpt.RunError, match="fineweb_train_000001.bin.*no whole shard"):
        shards.await_token(10 * STEP, SimpleNamespace(closed=False))
