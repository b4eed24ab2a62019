"""Proves on a GPU that overlap hands out the shards' tokens while the device stalls, and changes no loss."""

import contextlib
import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    SMALL_MODEL,
    Corpus,
    Finished,
    config_of,
    open_pipeline,
    run_trainer,
    train_gpt,
    write_split,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQ_LEN, ROWS = 64, 32  # of a batch: one span
SPAN = SEQ_LEN * ROWS + 1
STALL_CYCLES = (
    300_000_000  # 0.15 s or more at 2 GHz: uploads of a few kilobytes are long done by then
)


def stalled_batches(folder: Path, depth: int, copy_stream: int) -> tuple[np.ndarray, np.ndarray]:
    """The x and y of 12 batches as they are on the device after backward, which four times begins with a stall.

    Where the host runs ahead, the uploads of the batches that follow are issued while the compute stream stands."""
    write_split(
        folder, "train", np.random.default_rng(3).permutation(2**16)[: 20 * SPAN], [3 * SPAN + 100]
    )
    config = config_of(
        DATA_PATH=folder,
        TRAIN_SEQ_LEN=SEQ_LEN,
        TRAIN_BATCH_TOKENS=8 * SEQ_LEN * ROWS,
        GPU_PREFETCH=depth,
        TRAIN_COPY_STREAM=copy_stream,
        TRAIN_PREFETCH_QUEUE=4,
    )
    runtime = train_gpt.Runtime()
    runtime.device = torch.device("cuda", torch.cuda.current_device())
    weights = torch.ones(2**16, device=runtime.device, requires_grad=True)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with contextlib.closing(open_pipeline(config, runtime=runtime)) as batches:
        for number in range(12):
            if number % 3 == 0:
                torch.cuda._sleep(STALL_CYCLES)
            x, y, _ = next(batches)
            (weights[x] * weights[y]).sum().backward()  # its backward reads x and y
            seen.append((x.clone(), y.clone()))
        torch.cuda.synchronize()
    return tuple(np.stack([pair[i].cpu().numpy() for pair in seen]) for i in (0, 1))


def assert_tokens_of_the_shards(x: np.ndarray, y: np.ndarray) -> None:
    spans = np.random.default_rng(3).permutation(2**16)[: 12 * SPAN].reshape(12, SPAN)
    np.testing.assert_array_equal(x.reshape(12, -1), spans[:, :-1])
    np.testing.assert_array_equal(y.reshape(12, -1), spans[:, 1:])


@pytest.mark.parametrize("copy_stream", [1, 0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stalled_device_gets_the_tokens_of_the_shards(
    tmp_path: Path, depth: int, copy_stream: int
) -> None:
    assert_tokens_of_the_shards(*stalled_batches(tmp_path, depth, copy_stream))


class Careless(train_gpt.DeviceRing):
    """Does not wait until a slot has been read: waiting for an event that was never recorded passes at once."""

    def submit(self, slot: train_gpt.Slot) -> None:
        self.empty[0].free = torch.cuda.Event()
        super().submit(slot)


def test_the_stall_shows_a_slot_that_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the wait for `free`, an upload overtakes the stalled reading of its slot."""
    monkeypatch.setattr(train_gpt, "DeviceRing", Careless)
    with pytest.raises(AssertionError):
        assert_tokens_of_the_shards(*stalled_batches(tmp_path, 2, 1))


# --- The script -------------------------------------------------------------------------------------------------------

MODEL = {
    **SMALL_MODEL,
    "MODEL_DIM": 128,
    "NUM_HEADS": 2,
    "NUM_KV_HEADS": 1,
    "TRAIN_SEQ_LEN": 128,
    "DEVICE": "cuda",
    "TRAIN_BATCH_TOKENS": 8 * 128 * 4,
    "VAL_BATCH_SIZE": 8 * 128 * 4,
    "WARMUP_STEPS": 2,
    "ITERATIONS": 10,
    "TORCH_COMPILE": 0,
    "GRAD_ACCUM_STEPS": 2,
}
OFF = {
    "TRAIN_PREFETCH": 0,
    "TRAIN_COPY_STREAM": 0,
    "VAL_PREFETCH": 0,
    "VAL_COPY_STREAM": 0,
    "GPU_PREFETCH": 1,
}


def run(folder: Path, corpus: Corpus, **switches: int) -> Finished:
    done = run_trainer(folder, **{**MODEL, **corpus.env, **switches})
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def without_overlap(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("off"), corpus, **OFF)


@pytest.mark.parametrize("copy_stream,depth", list(itertools.product([1, 0], [1, 2, 3])))
def test_overlap_changes_no_loss(
    tmp_path: Path, corpus: Corpus, without_overlap: Finished, copy_stream: int, depth: int
) -> None:
    """Batches read late or overwritten show from step 2 on; what remains is the order of sums on the device."""
    done = run(
        tmp_path,
        corpus,
        GPU_PREFETCH=depth,
        TRAIN_COPY_STREAM=copy_stream,
        VAL_COPY_STREAM=copy_stream,
    )
    assert f"train_io:prefetch:True copy_stream:{bool(copy_stream)}" in done.text
    assert "train_io:prefetch:False copy_stream:False" in without_overlap.text
    assert len(done.values("data_crc")) == 10 and done.values("data_crc") == without_overlap.values(
        "data_crc"
    )
    losses, expected = (
        [float(loss) for loss in log.values("train_loss")] for log in (done, without_overlap)
    )
    assert len(losses) == 10 and losses[0] != losses[-1]
    assert abs(losses[1] - expected[1]) <= 1e-3
    np.testing.assert_allclose(losses, expected, atol=2e-2, rtol=0)
    val_losses, expected = (
        [float(loss) for loss in log.values("val_loss")] for log in (done, without_overlap)
    )
    np.testing.assert_allclose(val_losses, expected, atol=2e-2, rtol=0)


# --- The instruments --------------------------------------------------------------------------------------------------


def test_every_batch_is_verified_after_its_backward_pass(tmp_path: Path, corpus: Corpus) -> None:
    done = run(tmp_path, corpus, DATA_VERIFY=1)
    assert "batches, unchanged in use" in done.text


def test_a_trace_shows_the_streams_by_the_devices_clock(tmp_path: Path, corpus: Corpus) -> None:
    run(tmp_path, corpus, TRACE_STEPS=4)
    [path] = (tmp_path / "logs").glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found = {(tracks[e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert {
        ("copy stream", "h2d"),
        ("compute stream", "forward"),
        ("compute stream", "backward"),
        ("compute stream", "optimizer"),
        ("main thread", "input_wait"),
        ("train reader", "disk_read"),
        ("compute stream", "validate"),
    } <= found
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == "backward"
    )
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), (
        "the device does one after the other"
    )
    assert min(e["dur"] for e in events if e["ph"] == "X") >= 0


def test_the_report_counts_what_was_uploaded_and_how_long_the_device_waited(
    tmp_path: Path, corpus: Corpus
) -> None:
    done = run(tmp_path, corpus)
    report = dict(
        re.findall(r"(\w+):([\d.]+)", re.search(r"^input_bytes (.*)$", done.text, re.MULTILINE)[1])
    )
    step_bytes = 2 * (MODEL["TRAIN_BATCH_TOKENS"] + 8)
    assert (
        10 * step_bytes <= int(report["copied"]) <= 14 * step_bytes
        and float(report["copy_gb_s"]) > 0
    )
    assert re.search(r"^device_wait total_ms:[\d.]+ percent:[\d.]+", done.text, re.MULTILINE)


def test_the_cap_is_kept_by_the_devices_clock(tmp_path: Path, corpus: Corpus) -> None:
    """Also where validations come between: events of before one are behind the clock's new edge."""
    done = run(
        tmp_path,
        corpus,
        ITERATIONS=100_000,
        MAX_WALLCLOCK_SECONDS=4,
        VAL_LOSS_EVERY=25,
        VAL_TOKENS=2000,
    )
    ms, step = map(
        int,
        re.search(
            r"^stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/",
            done.text,
            re.MULTILINE,
        ).groups(),
    )
    assert step > 50 and 4000 - 10 * ms / step <= ms <= 4000 + 3 * ms / step
