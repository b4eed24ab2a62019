"""Proves that any number of ranks trains on the same rows: by arithmetic up to 1,024, and with two machines' agents."""

import binascii
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SMALL_MODEL,
    Corpus,
    clean_environment,
    config_of,
    free_port,
    run_trainer,
    train_gpt,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import step_rows

pytestmark = pytest.mark.timeout(300)
SEQ_LEN = 4
STREAM = np.random.default_rng(2).integers(0, 2**16, 60_000).astype("<u2")


def rows_of(plan: train_gpt.BatchPlan, k: int) -> list[tuple[int, np.ndarray]]:
    """(number of the row in the run, its seq_len + 1 tokens) of batch k, as the reader cuts them."""
    rows = plan.rows(k)
    first, count = plan.tokens(rows)
    tokens = STREAM[np.arange(first, first + count) % len(STREAM)]
    x, y = np.empty((2, len(rows), plan.seq_len), np.int64)
    train_gpt.widen(tokens, x, y, plan.segments(rows))
    return list(zip(rows, np.concatenate([x, y[:, -1:]], axis=1)))


def crc_of(plan: train_gpt.BatchPlan, k: int) -> int:
    first, count = plan.tokens(plan.rows(k))
    tokens = np.ascontiguousarray(STREAM[np.arange(first, first + count) % len(STREAM)])
    return train_gpt.data_crc(plan, plan.rows(k), tokens)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([16, 64, 1024]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.integers(0, 30),
)
def test_the_rows_of_a_step_do_not_depend_on_the_ranks(
    ranks: int, accumulation: int, share: int, step: int
) -> None:
    """Each row once, in some rank's micro-step, with the tokens that 8 spans give; the checksums add up to the same."""
    rows = ranks * accumulation * share
    batch_tokens = rows * SEQ_LEN
    config = config_of(
        TRAIN_BATCH_TOKENS=batch_tokens, TRAIN_SEQ_LEN=SEQ_LEN, GRAD_ACCUM_STEPS=accumulation
    )
    plans = [train_gpt.BatchPlan.train(config, rank, ranks) for rank in range(ranks)]
    batches = [(plan, step * accumulation + m) for m in range(accumulation) for plan in plans]
    found = [row for plan, k in batches for row in rows_of(plan, k)]
    assert [number for number, _ in found] == list(
        range(step * rows, (step + 1) * rows)
    )  # micro-step by micro-step
    expected = step_rows(STREAM, batch_tokens, SEQ_LEN, step)
    assert np.array_equal(np.stack([tokens for _, tokens in found]), expected)
    crc = sum(
        binascii.crc32(row.tobytes(), step * rows + i)
        for i, row in enumerate(expected.astype("<u2"))
    )
    assert sum(crc_of(plan, k) for plan, k in batches) % 2**32 == crc % 2**32
    alone = train_gpt.BatchPlan.train(
        config_of(TRAIN_BATCH_TOKENS=batch_tokens, TRAIN_SEQ_LEN=SEQ_LEN, GRAD_ACCUM_STEPS=1), 0, 1
    )
    assert crc_of(alone, step) == crc % 2**32


@pytest.mark.parametrize("before", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("after", [1, 2, 4, 8, 1024])
def test_a_resumed_run_of_other_ranks_goes_on_at_the_next_row(before: int, after: int) -> None:
    """Steps 0-2 by `before` ranks, 3-4 by `after` ranks: all rows of five steps in order, none twice."""
    rows = 2048
    numbers = []
    for ranks, steps in ((before, range(3)), (after, range(3, 5))):
        config = config_of(TRAIN_BATCH_TOKENS=rows * SEQ_LEN, TRAIN_SEQ_LEN=SEQ_LEN)
        parts = config.accumulation(ranks)
        plans = [train_gpt.BatchPlan.train(config, rank, ranks) for rank in range(ranks)]
        batches = [step * parts + m for step in steps for m in range(parts)]
        numbers += [row for k in batches for plan in plans for row in plan.rows(k)]
    assert numbers == list(range(5 * rows))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([16, 64, 1024]), st.integers(1, 5000), st.integers(1, 8))
def test_validation_is_tiled_once(ranks: int, rows: int, batch_rows: int) -> None:
    """Also where there are fewer rows than ranks, and some have none."""
    config = config_of(
        TRAIN_BATCH_TOKENS=8 * ranks * SEQ_LEN,
        TRAIN_SEQ_LEN=SEQ_LEN,
        GRAD_ACCUM_STEPS=1,
        VAL_BATCH_SIZE=batch_rows * ranks * SEQ_LEN,
    )
    plans = [
        train_gpt.BatchPlan.val(config, rows * SEQ_LEN + 1, rank, ranks) for rank in range(ranks)
    ]
    assert [
        row for plan in plans for k in range(plan.num_batches()) for row in plan.rows(k)
    ] == list(range(rows))
    assert all(len(plan.rows(k)) <= batch_rows for plan in plans for k in range(plan.num_batches()))


class Reduced(train_gpt.Runtime):
    """A rank of many: its share of the reduction is added to `total`; the last one gets the sum."""

    total = torch.zeros(1)

    def all_reduce(self, tensor: torch.Tensor, *_: str) -> torch.Tensor:
        Reduced.total = Reduced.total + tensor
        return tensor.copy_(Reduced.total)


@pytest.mark.parametrize("ranks", [16, 64, 1024])
def test_what_the_ranks_agree_on_is_exact(ranks: int) -> None:
    """Checksums of 32 bits, a signal at one rank, a loss that is not finite at another: added up in float32."""
    Reduced.total, crcs = (
        torch.zeros(1),
        [(0x9E3779B1 * (rank + 1)) % 2**32 for rank in range(ranks)],
    )
    for rank in range(ranks):
        runtime = Reduced(rank, ranks)
        runtime.signum = 15 if rank in (3, ranks - 1) else 0
        reduced = torch.zeros(
            4 + train_gpt.Control.FIELDS + 2 * ranks
        )  # four gradients, and the vector
        flat = SimpleNamespace(
            reduced=reduced,
            grads=reduced[:4],
            tail=reduced[4:],
            halted=torch.tensor(False),
            reduce=lambda rt, reduced=reduced: rt.all_reduce(reduced, "reduction"),
        )
        control = train_gpt.Control(flat, runtime)
        loss = torch.tensor(float("nan") if rank == 5 else 1.0 / ranks)
        clock = train_gpt.Clock(runtime)
        clock.total_ms = 1000.0
        control.agree(0, loss, clock=clock, wait_ms=float(rank), data_crc=crcs[rank])
    said = control.read(0)
    assert said.data_crc == sum(crcs) % 2**32
    assert said.elapsed_ms == 1000.0 and said.wait_ms == [float(rank) for rank in range(ranks)]
    assert [rank for rank, bad in enumerate(said.bad) if bad] == [5]
    assert said.stop > 0 and bool(flat.halted)


class Mark:
    """An event of a device that is behind the host: `at` is the device's time in ms when it got there."""

    device_ms = 0.0

    def __init__(self) -> None:
        self.record()

    def record(self) -> None:
        self.at = Mark.device_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Mark") -> float:
        return other.at - self.at


def test_time_is_the_devices_not_that_of_the_host_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_gpt, "recorded", Mark)
    Mark.device_ms = 10_000.0
    runtime = SimpleNamespace(
        cuda=False,
        world_size=1,
        rank=0,
        signum=0,
        synchronize=lambda: 0.0,
        waiting=lambda place: contextlib.nullcontext(),
    )
    vector = torch.zeros(4 + train_gpt.Control.FIELDS + 2)
    flat = SimpleNamespace(
        grads=vector[:4], tail=vector[4:], halted=torch.tensor(False), reduce=lambda rt: None
    )
    control, clock = train_gpt.Control(flat, runtime), train_gpt.Clock(runtime)
    runtime.cuda, control.events = True, [Mark() for _ in range(4)]
    clock.start()
    clock.total_ms = 500.0  # of an earlier start
    for step in range(8):
        Mark.device_ms += 40.0  # the host needs next to nothing
        control.agree(step, torch.tensor(1.0), clock=clock, wait_ms=0.0, data_crc=0)
        expected = (
            500.0 if step < 2 else 500.0 + 40 * (step - 1)
        )  # where step - 2 ended: the last one known to be done
        assert control.read(step).elapsed_ms == expected


def test_a_wait_for_the_device_is_bounded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device waits for may be other ranks."""
    runtime, seen = train_gpt.Runtime(), []
    runtime.device = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda: seen.append((runtime.place, runtime.since))
    )
    runtime.synchronize()
    runtime.all_reduce(torch.zeros(1), "validation")
    assert [place for place, _ in seen] == ["device", "validation"]
    assert all(since <= time.perf_counter() for _, since in seen) and runtime.since == float("inf")


def test_how_long_a_rank_waits_for_others() -> None:
    """Five minutes where they meet for the first time; then as long as for data, or twenty steps; briefly once told."""
    runtime = train_gpt.Runtime(stall_seconds=45)
    with runtime.waiting("validation"):
        runtime.longest_s = 2.0
        assert runtime._limit_s() == 300
    assert runtime.since == float("inf")
    with runtime.waiting("validation"):
        assert runtime._limit_s() == 45 + 60
        runtime.longest_s = 70.0
        assert runtime._limit_s() == 20 * 70
    with runtime.waiting("export"):
        assert runtime._limit_s() == 300
        runtime.signum = 15
        assert runtime._limit_s() == 5 + 2 * 70


@pytest.mark.slow
def test_two_agents_that_share_no_disk(corpus: Corpus, tmp_path: Path) -> None:
    """Two launchers with one rank each, folders and data of their own: the run of one launcher with two ranks."""
    env = {
        **SMALL_MODEL,
        "ITERATIONS": 12,
        "TRAIN_LOG_EVERY": 1,
        "VAL_LOSS_EVERY": 6,
        "CHECKPOINT_EVERY": 4,
        "RESUME": "auto",
        "RUN_ID": "nodes",
    }
    one = run_trainer(tmp_path / "one", ranks=2, **{**corpus.env, **env})
    assert one.code == 0, one.err[-2000:]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        shutil.copytree(corpus.folder, folder / "data")
        shutil.copy(corpus.tokenizer, folder / "spm.model")

    def launch() -> list[str]:
        endpoint = f"localhost:{free_port()}"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--rdzv_id=two",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={endpoint}",
            "--local_addr=localhost",
            str(ROOT / "train_gpt.py"),
        ]
        nodes = [
            subprocess.Popen(
                command,
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=clean_environment(
                    **{**env, "DATA_PATH": "data", "TOKENIZER_PATH": "spm.model"}
                ),
            )
            for folder in folders
        ]
        outs = [node.communicate(timeout=240)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(outs)[-3000:]
        return outs

    outs = launch()
    [home] = [
        folder for folder in folders if (folder / "logs").exists()
    ]  # rank 0's; the other wrote nothing
    [other] = [folder for folder in folders if folder != home]
    assert sorted(path.name for path in other.iterdir()) == ["data", "spm.model"]

    def values(text: str, *words: str) -> list[str]:
        return re.findall(rf"(?:^| )(?:{'|'.join(words)}):(\S+)", text, re.MULTILINE)

    mine, theirs = outs[folders.index(home)], one.out
    assert values(mine, "data_crc") == values(theirs, "data_crc") != []
    assert values(mine, "train_loss", "val_loss", "val_bpb") == values(
        theirs, "train_loss", "val_loss", "val_bpb"
    )
    assert "final_int8_zlib_roundtrip_exact" in mine
    # Each scores its half of the split from rank 0's bytes: a second time, resumed from rank 0's checkpoint alone.
    os.remove(home / "final_model.int8.ptz")
    again = launch()
    assert any(re.search(r"(?m)^resumed\b.*step:12\b", out) for out in again)
    last = [json.loads(line) for line in (home / "logs" / "nodes.jsonl").read_text().splitlines()]
    scores = [event["val_bpb"] for event in last if event["event"] == "score"]
    assert len(scores) == 2 and scores[0] == scores[1]
    assert sorted(path.name for path in other.iterdir()) == ["data", "spm.model"]
