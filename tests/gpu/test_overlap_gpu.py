"""Tests of overlap on a GPU.

Every batch is read back after its backward pass and must be what the shards hold, also while the
device is stalled and the host runs ahead. Overlap must not change a loss, and computation and
copies must not wait for each other longer than necessary. Traces and the time limit are checked
against the device's own clock. Recipes for a faster step must not change a loss.

With the option --stand-in (conftest.py), all tests run on a CPU, up to the point from which on they
check what only a GPU has. tests/test_gpu_tests.py does this in the fast suite.
"""

import gzip
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import cuda_stand_in
import numpy as np
import pytest
import recipe
import torch
from running import (
    SMALL_MODEL,
    Corpus,
    Run,
    make_config,
    make_runtime,
    open_pipeline,
    run_trainer,
    train_gpt,
    write_split,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQ_LEN, ROWS, BATCHES = 64, 32, 12  # a batch has ROWS sequences, which are one span
SPAN = SEQ_LEN * ROWS + 1
TOKENS = np.random.default_rng(3).permutation(2**16)[: 20 * SPAN]
STAND_IN = cuda_stand_in.is_installed()
STALL_CYCLES = 300_000_000  # 0.15 s or more, much longer than an upload of a few kilobytes takes


def read_back_batches(
    folder: Path, split: str, stalls: bool, **settings: object
) -> list[np.ndarray]:
    """Return x and y of the first batches, as they are on the device after their backward pass.

    x and y have the shape (BATCHES, ROWS, SEQ_LEN). With `stalls`, the compute stream is stalled at
    every third batch, so that the host issues the uploads of the next batches meanwhile.
    """
    for name in ("train", "val"):
        write_split(folder, name, TOKENS, [3 * SPAN + 100])
    config = make_config(
        DATA_PATH=folder,
        VOCAB_SIZE=2**16,
        TRAIN_SEQ_LEN=SEQ_LEN,
        TRAIN_BATCH_TOKENS=8 * SEQ_LEN * ROWS,
        VAL_BATCH_SIZE=8 * SEQ_LEN * ROWS,
        DEVICE="cuda",
        **settings,
    )
    runtime = make_runtime(config)
    weights = torch.ones(2**16, device=runtime.device, requires_grad=True)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with closing(open_pipeline(config, split, runtime=runtime)) as batches:
        for number in range(BATCHES):
            if stalls and number % 3 == 0:
                torch.cuda._sleep(STALL_CYCLES)
            batch = next(batches)
            (weights[batch.x] * weights[batch.y]).sum().backward()  # its backward reads x and y
            seen.append((batch.x.clone(), batch.y.clone()))
        torch.cuda.synchronize()
    return [np.stack([pair[i].cpu().numpy() for pair in seen]) for i in (0, 1)]


def assert_equal_to_shards(found: list[np.ndarray], split: str = "train") -> None:
    # The validation set is one span: the last target of a batch is the first input of the next.
    step = SPAN if split == "train" else SPAN - 1
    spans = np.stack([TOKENS[k * step : k * step + SPAN] for k in range(BATCHES)])
    np.testing.assert_array_equal(found[0].reshape(BATCHES, -1), spans[:, :-1])
    np.testing.assert_array_equal(found[1].reshape(BATCHES, -1), spans[:, 1:])


@pytest.mark.parametrize("stalls", [False, True], ids=["running", "stalled"])
@pytest.mark.parametrize("copy_stream", [1, 0])
@pytest.mark.parametrize("prefetch, depth", [(0, 1), (1, 1), (1, 2), (1, 3)])
def test_batches_after_their_backward_pass_equal_the_shards(
    tmp_path: Path, prefetch: int, depth: int, copy_stream: int, stalls: bool
) -> None:
    settings = {"GPU_PREFETCH": depth, "TRAIN_PREFETCH_QUEUE": 4, "TRAIN_PREFETCH": prefetch}
    settings["TRAIN_COPY_STREAM"] = copy_stream
    assert_equal_to_shards(read_back_batches(tmp_path, "train", stalls, **settings))


def test_validation_batches_equal_the_shards(tmp_path: Path) -> None:
    found = read_back_batches(tmp_path, "val", stalls=True, VAL_PREFETCH_QUEUE=4)
    assert_equal_to_shards(found, "val")


# === The script ===
MODEL = {
    **SMALL_MODEL,
    "MODEL_DIM": 128,
    "TRAIN_SEQ_LEN": 128,
    "TRAIN_BATCH_TOKENS": 8 * 128 * 4,
    "VAL_BATCH_SIZE": 8 * 128 * 4,
    "GRAD_ACCUM_STEPS": 2,
    "WARMUP_STEPS": 2,
    "DEVICE": "cuda",
}
OFF = {f"{split}_{name}": 0 for split in ("TRAIN", "VAL") for name in ("PREFETCH", "COPY_STREAM")}


def run(folder: Path, corpus: Corpus, **settings: object) -> Run:
    wrapper = Path(cuda_stand_in.__file__) if STAND_IN else None
    given = {**MODEL, **corpus.env, **settings}
    done = run_trainer(folder, wrapper=wrapper, timeout=500, **given)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def without_overlap(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("off"), corpus, **OFF)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("copy_stream", [1, 0])
def test_overlap_changes_no_loss(
    tmp_path: Path, corpus: Corpus, without_overlap: Run, copy_stream: int, depth: int
) -> None:
    """A batch that was overwritten too early would change the losses from step 2 on.

    The remaining differences come from the order in which sums are computed.
    """
    streams = {"TRAIN_COPY_STREAM": copy_stream, "VAL_COPY_STREAM": copy_stream}
    done = run(tmp_path, corpus, GPU_PREFETCH=depth, **streams)
    assert f"train_io:prefetch:True copy_stream:{bool(copy_stream)}" in done.text
    assert "train_io:prefetch:False copy_stream:False" in without_overlap.text
    assert len(done.values("data_crc")) == MODEL["ITERATIONS"]
    assert done.values("data_crc") == without_overlap.values("data_crc")
    for word, count in (("train_loss", MODEL["ITERATIONS"]), ("val_loss", 4)):
        on, off = (np.array(log.values(word), float) for log in (done, without_overlap))
        assert len(on) == count and on[0] != on[-1]
        np.testing.assert_allclose(on[:2], off[:2], atol=1e-3, rtol=0)
        np.testing.assert_allclose(on, off, atol=2e-2, rtol=0)


def test_a_trace_shows_uploads_and_kernels_on_different_streams(
    tmp_path: Path, corpus: Corpus
) -> None:
    """The trace has the phases of the main thread and of the reader's thread.

    The log says how long the device waited. That is never 0, because the wait is measured between
    two events, which are never at the same time.
    """
    text = run(tmp_path, corpus, TRACE_STEPS=4).text
    words = r"(?m)^input_wait total:([\d.]+)ms share:([\d.]+)%.* read_bytes:(\d+)"
    total, percent, read = map(float, re.search(words, text).groups())
    assert total > 0 and 0 < percent < 100
    all_bytes = 2 * (MODEL["TRAIN_BATCH_TOKENS"] + train_gpt.SPANS_PER_STEP)
    assert 10 * all_bytes <= read <= 14 * all_bytes
    [path] = (tmp_path / "logs").glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"disk_read", "input_wait", "h2d", "forward", "backward", "optimizer"} <= named
    if STAND_IN:
        pytest.skip("the rest of the test needs a GPU: the stand-in runs no kernels")
    kernels = {event["tid"] for event in events if event.get("cat") == "kernel"}
    step_bytes = 2 * (MODEL["TRAIN_BATCH_TOKENS"] // 2 + 4)  # a micro-step has 4 spans
    uploads = [
        event
        for event in events
        if event.get("cat") == "gpu_memcpy" and event["args"].get("bytes") == step_bytes
    ]
    assert 6 <= len(uploads) <= 10, "two uploads per step"
    assert not {event["tid"] for event in uploads} & kernels


def test_a_resumed_run_continues_with_the_same_batches(
    tmp_path: Path, corpus: Corpus, without_overlap: Run
) -> None:
    """The losses differ only by the order in which sums are computed."""
    run(tmp_path / "first", corpus, CHECKPOINT_EVERY=5, RUN_ID="r")
    path = tmp_path / "first" / "checkpoints" / "r" / "step_00000005.pt"
    done = run(tmp_path / "second", corpus, RESUME=path)
    assert done.values("data_crc") == without_overlap.values("data_crc")[5:]
    found, uninterrupted = (
        np.array(log.values("train_loss"), float) for log in (done, without_overlap)
    )
    np.testing.assert_allclose(found, uninterrupted[5:], atol=2e-2, rtol=0)
    assert abs(uninterrupted[0] - uninterrupted[5]) > 0.1, (
        "a run that started again would differ here"
    )


def test_the_time_limit_is_kept_by_the_devices_clock(tmp_path: Path, corpus: Corpus) -> None:
    """The time of validations does not count."""
    settings = {"ITERATIONS": 100_000, "MAX_WALLCLOCK_SECONDS": 4, "VAL_TOKENS": 2000}
    text = run(tmp_path, corpus, VAL_LOSS_EVERY=25, **settings).text
    found = re.search(r"^stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/", text, re.M)
    ms, step = map(int, found.groups())
    if STAND_IN:
        pytest.skip("the rest of the test needs a GPU: a CPU makes too few steps in this time")
    assert step > 50 and 4000 - 10 * ms / step <= ms <= 4000 + 3 * ms / step


# === Recipes for a faster step ===
# max_autotune and coordinate_descent are left out, because they compile for minutes.
FAST = "add_compiled", "fewest_micro_steps", "fused_mlp", "muon_one_bank"
COMPILED = {"TORCH_COMPILE": 0 if STAND_IN else 1, "GRAD_ACCUM_STEPS": 1}


@pytest.fixture(scope="module")
def compiled(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("compiled"), corpus, **COMPILED)


def recipes_to_test() -> list[Any]:
    """Return each recipe alone and all together; those with fused_mlp are skipped on most GPUs."""
    has_gpu = torch.cuda.is_available()
    lacks_kernel = has_gpu and torch.cuda.get_device_capability()[0] != 9
    skip = pytest.mark.skipif(lacks_kernel, reason="fused_mlp needs an H100 or H200")
    return [
        pytest.param(names, marks=[skip] if "fused_mlp" in names else [], id="+".join(names))
        for names in (*((name,) for name in FAST), FAST)
    ]


@pytest.mark.parametrize("names", recipes_to_test())
def test_a_recipe_for_a_faster_step_changes_no_loss(
    tmp_path: Path, corpus: Corpus, compiled: Run, names: tuple[str, ...]
) -> None:
    script = tmp_path / "with_recipes.py"
    assert recipe.main(["apply", *names, "--to", str(script)]) == 0
    on = COMPILED | {name.upper(): 1 for name in names}
    done = run(tmp_path, corpus, script=script, **on)
    found, plain = (np.array(log.values("train_loss"), float) for log in (done, compiled))
    np.testing.assert_allclose(found[:1], plain[:1], atol=1e-3, rtol=0)
    np.testing.assert_allclose(found, plain, atol=2e-2, rtol=0)
