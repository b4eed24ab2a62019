"""Proves that a run goes on from a checkpoint as if nothing had been: to the bit, on other ranks, or not at all."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, byte_data, train_gpt
from faults.live import Live, same_result

pytestmark = pytest.mark.timeout(300)
SETTINGS = {
    **{
        name: value for name, value in SMALL_MODEL.items() if name != "VOCAB_SIZE"
    },  # the data's own
    "ITERATIONS": 12,
    "TRAIN_LOG_EVERY": 1,
    "VAL_LOSS_EVERY": 6,
    "VAL_TOKENS": 2000,
    "VAL_BATCH_SIZE": 1024,
    "CHECKPOINT_EVERY": 3,
    "CHECKPOINT_KEEP": 9,
    "RUN_ID": "r",
}
SETTLED = {"settled": True}  # the disk is never busy: every checkpoint is written


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return byte_data(tmp_path_factory.mktemp("checkpoint") / "data", train_tokens=30_000)


@pytest.fixture(scope="session")
def reference(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Live:
    """12 steps without interruption, on one rank, with a checkpoint every 3."""
    run = Live(tmp_path_factory.mktemp("uninterrupted"), 0, SETTLED, **data, **SETTINGS)
    assert run.end() == 0, run.err
    assert run.checkpoints() == [3, 6, 9, 12]
    return run


def go_on(before: Live, folder: Path, step: int, ranks: int = 0, **settings: object) -> Live:
    """A copy of a run as it was when it saved `step`, resumed by RESUME=auto."""
    shutil.copytree(before.folder, folder)
    for path in folder.glob("checkpoints/*/step_*.pt"):
        if int(path.stem.split("_")[1]) > step:
            path.unlink()
    run = Live(folder, ranks, SETTLED, **{**settings, "RESUME": "auto"})
    assert run.end() == 0, run.err[-3000:]
    assert run.resumed()[-1] == step
    return run


def assert_same_state(mine: dict, theirs: dict) -> None:
    """All of a checkpoint to the bit, but for the clocks."""
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - {"train_ms", "val_ms"}:
        if name == "history":  # step, loss and bits per byte of each validation; then its time
            assert [entry[:3] for entry in mine[name]] == [entry[:3] for entry in theirs[name]]
        elif name in ("tensors", "rng"):
            assert all(torch.equal(a, b) for a, b in zip(mine[name], theirs[name], strict=True)), (
                name
            )
        else:
            assert mine[name] == theirs[name], name


def test_resumed_twice_is_uninterrupted_to_the_bit(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    once = go_on(reference, tmp_path / "once", 3, **data, **SETTINGS)
    twice = go_on(once, tmp_path / "twice", 9, **data, **SETTINGS)
    for run in (once, twice):
        same_result(run, reference, exact=True)
        assert_same_state(run.load(12), reference.load(12))
    assert_same_state(once.load(6), reference.load(6))
    clocks = [run.load(step)["train_ms"] for run, step in ((reference, 3), (once, 9), (twice, 12))]
    assert 0 < clocks[0] < clocks[1] < clocks[2]
    assert [entry[0] for entry in twice.load(12)["history"]] == [
        0,
        6,
    ]  # validations before step 12's own


def test_a_resumed_run_goes_on_in_its_log(tmp_path: Path, data: dict, reference: Live) -> None:
    before = reference.text("logs/r.txt")
    run = go_on(reference, tmp_path / "more", 6, **data, **SETTINGS)
    assert (
        run.text("logs/r.txt").startswith(before)
        and "resumed" in run.text("logs/r.txt")[len(before) :]
    )
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["r.jsonl", "r.txt"]
    assert len(run.events("end")) == 2 and "step:6/12 train_loss" not in run.out
    trained = [event["step"] for event in run.events("step")]
    assert trained == [*range(1, 13), *range(7, 13)]


def test_other_numbers_of_ranks_go_on(tmp_path: Path, data: dict, reference: Live) -> None:
    """1 rank, then 2, then 4, then 1 again: the rows of every step are the same, losses to rounding."""
    settings = {**data, **SETTINGS}
    two = go_on(reference, tmp_path / "two", 3, ranks=2, **settings)
    four = go_on(two, tmp_path / "four", 6, ranks=4, **settings)
    one = go_on(four, tmp_path / "one", 9, **settings)
    for run in (two, four, one):
        same_result(run, reference, exact=False)
        assert run.load(12)["data_crc"] == reference.load(12)["data_crc"]


@pytest.mark.slow
def test_eight_ranks_go_on(tmp_path: Path, data: dict, reference: Live) -> None:
    run = go_on(reference, tmp_path / "eight", 6, ranks=8, **data, **SETTINGS)
    same_result(run, reference, exact=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(
            TRAIN_PREFETCH=0,
            TRAIN_COPY_STREAM=0,
            GPU_PREFETCH=1,
            VAL_PREFETCH=0,
            VAL_PREFETCH_QUEUE=1,
        ),
        dict(
            TRAIN_PREFETCH_QUEUE=8,
            DATA_VERIFY=1,
            CHECKPOINT_EVERY=5,
            CHECKPOINT_KEEP=1,
            VAL_PROGRESS_LOG_EVERY=1,
            DATA_STALL_SECONDS=7,
        ),
        dict(GRAD_ACCUM_STEPS=4),
    ],
    ids=str,
)
def test_settings_that_may_differ(
    tmp_path: Path, data: dict, reference: Live, settings: dict
) -> None:
    run = go_on(reference, tmp_path / "other", 6, **data, **{**SETTINGS, **settings})
    same_result(run, reference, exact="GRAD_ACCUM_STEPS" not in settings)


def test_the_position_is_that_of_the_last_batch_trained_on(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    """Eight batches wait in the queue while a checkpoint is taken; none of them counts."""
    deep = {**data, **SETTINGS, "TRAIN_PREFETCH_QUEUE": 8}
    first = Live(tmp_path / "deep", 0, SETTLED, **deep)
    assert first.end() == 0, first.err
    for step in (3, 6, 9, 12):
        assert_same_state(first.load(step), reference.load(step))
    same_result(go_on(first, tmp_path / "on", 6, **deep), reference, exact=True)


OTHER = {  # of every setting that decides the mathematics, another value
    "SEED": 7,
    "ITERATIONS": 13,
    "WARMDOWN_ITERS": 6,
    "WARMUP_STEPS": 1,
    "TRAIN_BATCH_TOKENS": 1024,
    "TRAIN_SEQ_LEN": 16,
    "MAX_WALLCLOCK_SECONDS": 99,
    "NUM_LAYERS": 1,
    "MODEL_DIM": 64,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "MLP_MULT": 3,
    "TIE_EMBEDDINGS": 0,
    "ROPE_BASE": 5000,
    "LOGIT_SOFTCAP": 20,
    "QK_GAIN_INIT": 1.25,
    "EMBED_LR": 0.5,
    "HEAD_LR": 0.01,
    "TIED_EMBED_LR": 0.06,
    "TIED_EMBED_INIT_STD": 0.01,
    "MATRIX_LR": 0.03,
    "SCALAR_LR": 0.03,
    "MUON_MOMENTUM": 0.9,
    "MUON_BACKEND_STEPS": 4,
    "MUON_MOMENTUM_WARMUP_START": 0.8,
    "MUON_MOMENTUM_WARMUP_STEPS": 400,
    "BETA1": 0.8,
    "BETA2": 0.9,
    "ADAM_EPS": 1e-7,
    "GRAD_CLIP_NORM": 1,
    "CONTROL_TENSOR_NAME_PATTERNS": "q_gain",
}


def test_every_field_that_differs_is_named(tmp_path: Path, data: dict, reference: Live) -> None:
    path = reference.folder / "checkpoints" / "r" / "step_00000003.pt"
    shutil.copytree(data["DATA_PATH"], tmp_path / "elsewhere")
    shutil.copy(data["TOKENIZER_PATH"], tmp_path / "other.json")
    other = {
        **OTHER,
        "DATA_PATH": tmp_path / "elsewhere",
        "TOKENIZER_PATH": tmp_path / "other.json",
    }
    run = Live(tmp_path / "run", 0, {}, **{**data, **SETTINGS, **other, "RESUME": path})
    assert run.end() == 1
    [line] = run.said
    unnamed = [name for name in other if not re.search(rf"\b{name}=", line)]
    assert unnamed == [], line
    assert (
        "SEED=1337, not 7" in line
        and "NUM_LAYERS=2, not 1" in line
        and "ITERATIONS=12, not 13" in line
    )


def test_only_fields_that_differ_are_named(tmp_path: Path, data: dict, reference: Live) -> None:
    path = reference.folder / "checkpoints" / "r" / "step_00000003.pt"
    run = Live(tmp_path, 0, {}, **{**data, **SETTINGS, "BETA2": 0.9, "RESUME": path})
    assert run.end() == 1
    [line] = run.said
    assert re.findall(r"\b([A-Z0-9_]+)=\S+, not ", line) == ["BETA2"]


def test_the_list_of_what_decides_the_mathematics_is_whole() -> None:
    """A setting added to the trainer has to be put on one side or the other here."""
    may_differ = {
        "RUN_ID",
        "VAL_BATCH_SIZE",
        "VAL_LOSS_EVERY",
        "VAL_TOKENS",
        "VAL_PROGRESS_LOG_EVERY",
        "TRAIN_LOG_EVERY",
        "TRAIN_PREFETCH",
        "TRAIN_PREFETCH_QUEUE",
        "TRAIN_COPY_STREAM",
        "VAL_PREFETCH",
        "VAL_PREFETCH_QUEUE",
        "VAL_COPY_STREAM",
        "GPU_PREFETCH",
        "VAL_BYTECOUNT_DEVICE",
        "TRAINING_TIMING_BREAKDOWN",
        "TRAINING_TIMING_EVERY",
        "TRACE_STEPS",
        "DATA_VERIFY",
        "DATA_STALL_SECONDS",
        "CHECKPOINT_EVERY",
        "CHECKPOINT_KEEP",
        "RESUME",
        "DEVICE",
        "TORCH_COMPILE",
        "GRAD_ACCUM_STEPS",
        "ATTENTION_BACKEND",
        "VAL_RESIDENT",
    }
    names = {name.upper() for name in train_gpt.Config.__dataclass_fields__}
    bound = {
        *OTHER,
        "DATA_PATH",
        "TOKENIZER_PATH",
        "VOCAB_SIZE",
        "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS",
    }
    assert names - may_differ == bound


def test_the_newest_stay(tmp_path: Path, data: dict) -> None:
    settings = {
        **data,
        **SETTINGS,
        "ITERATIONS": 7,
        "CHECKPOINT_EVERY": 1,
        "CHECKPOINT_KEEP": 2,
        "VAL_LOSS_EVERY": 0,
    }
    run = Live(tmp_path, 0, SETTLED, **settings)
    assert run.end() == 0, run.err
    assert run.checkpoints() == [6, 7]
    written = run.events("checkpoint")
    assert [event["step"] for event in written] == list(range(1, 8))
    assert written[-1]["path"] == "checkpoints/r/step_00000007.pt" and written[-1]["write_ms"] > 0


def test_training_does_not_wait_for_a_busy_disk(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    """The first checkpoint's fsync takes until the last step is over; the ones that came due meanwhile are left out."""
    fault = {"kind": "hold", "place": "fsync", "call": 1}
    run = Live(tmp_path, 0, fault, **data, **SETTINGS).until_line("step:12/12 val_loss")
    assert run.checkpoints() == []
    run.until_line("warning: no checkpoint of step 12").go()
    assert run.end() == 0, run.err
    skipped = re.findall(r"^warning: no checkpoint of step (\d+): .*busy", run.out, re.MULTILINE)
    assert skipped == ["6", "9", "12"] and run.checkpoints() == [3]
    same_result(run, reference, exact=True)


def test_the_log_readme_documents_checkpoints(reference: Live) -> None:
    text = (ROOT / "logs" / "README.md").read_text(encoding="utf-8")
    [fields] = re.findall(r"^\| `checkpoint` \| (.*?) \|", text, re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", fields))
    for event in reference.events("checkpoint"):
        assert event.keys() - {"event", "time"} <= documented
    assert {"resumed_from", "path", "write_ms", "step"} <= documented
    assert "nonfinite" in text.split("| `end` |")[1].splitlines()[0]
