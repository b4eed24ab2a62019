"""A run goes on from a checkpoint as if nothing had been: to the bit on the same number of ranks,
on any other with the same data. What decides shapes and data is held fast, all else may change and
takes effect. Training does not wait for the disk, and the newest files stay. What cannot be gone on
from is refused in one line, and nothing of an older run is overwritten."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL_MODEL, byte_data, config_of, train_gpt
from faults.live import Live, assert_same_result

pytestmark = pytest.mark.timeout(300)
SHORT = {"ITERATIONS": 12, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 6, "VAL_TOKENS": 2000}
SHORT |= {"CHECKPOINT_EVERY": 3, "CHECKPOINT_KEEP": 9, "RUN_ID": "r"}
SETTLED = {"settled": True}  # the disk is never busy: every checkpoint is written
BOUND = {  # what decides shapes and data, and another value of it
    "SEED": 7,
    "TRAIN_BATCH_TOKENS": 4096,
    "TRAIN_SEQ_LEN": 16,
    "NUM_LAYERS": 1,
    "MODEL_DIM": 64,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "MLP_MULT": 3,
    "TIE_EMBEDDINGS": 0,
    "ROPE_BASE": 5000,
    "LOGIT_SOFTCAP": 20,
    "CONTROL_TENSOR_NAME_PATTERNS": "q_gain,resid_mix",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings of a run of 12 steps with a checkpoint every 3."""
    folder = tmp_path_factory.mktemp("checkpoint") / "data"
    return {**SMALL_MODEL, **byte_data(folder, train_tokens=30_000), **SHORT}


@pytest.fixture(scope="module")
def reference(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """It, without interruption, on one rank, with batches in the queue at each checkpoint."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = Live(folder, 0, SETTLED, **data, TRAIN_PREFETCH_QUEUE=8).finish()
    assert run.checkpoints() == [3, 6, 9, 12]
    return run


def copied(before: Live, folder: Path, step: int) -> Path:
    """A run's folder as it was when it had saved `step`."""
    shutil.copytree(before.folder, folder)
    for later in [number for number in before.checkpoints() if number > step]:
        (folder / before.checkpoint(later).relative_to(before.folder)).unlink()
    return folder


def go_on(before: Live, folder: Path, step: int, ranks: int = 0, **settings: object) -> Live:
    """Resumed by RESUME=auto, to the end."""
    settings |= {"RESUME": "auto"}
    run = Live(copied(before, folder, step), ranks, SETTLED, **settings).finish()
    assert run.resumed()[-1] == step
    return run


def refusal(folder: Path, ranks: int = 0, **settings: object) -> str:
    """The one line of a run that is refused."""
    run = Live(folder, ranks, **settings)
    assert run.end() == [1] * max(1, ranks)
    assert ranks or len(run.said) == 1 and "Traceback" not in run.err
    return re.sub("^train_gpt.py: (rank 0: )?", "", run.said[0])


def numbers_of(state: object) -> list[object]:
    """The leaves of a checkpoint in order, tensors as lists."""
    if isinstance(state, torch.Tensor):
        return [state.tolist()]
    if isinstance(state, dict):
        return [leaf for name in state for leaf in (name, *numbers_of(state[name]))]
    if isinstance(state, list):
        return [leaf for part in state for leaf in numbers_of(part)]
    return [state]


def assert_same_state(mine: dict, theirs: dict) -> None:
    """All of a checkpoint to the bit, but for clocks and settings."""
    assert mine.keys() == theirs.keys()
    mine, theirs = ({**state, **state["held"]} for state in (mine, theirs))
    for name in mine.keys() - {"train_ms", "val_ms", "logged", "settings", "held"}:
        assert numbers_of(mine[name]) == numbers_of(theirs[name]), name


# Going on


def test_resumed_twice_is_uninterrupted_to_the_bit(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    """With overlap as well as without it: the position is that of the last batch trained on."""
    off = {"TRAIN_PREFETCH": 0, "VAL_PREFETCH": 0, "WARMUP_STEPS": 2}
    once = go_on(reference, tmp_path / "once", 3, **data | off)
    twice = go_on(once, tmp_path / "twice", 9, **data)
    for run in (once, twice):
        assert_same_result(run, reference, exact=True)
        assert_same_state(run.load(12), reference.load(12))
    assert_same_state(once.load(6), reference.load(6))
    clocks = [run.load(step)["train_ms"] for run, step in ((reference, 3), (once, 9), (twice, 12))]
    assert 0 < clocks[0] < clocks[1] < clocks[2], "training time goes on, too"


def test_a_resumed_run_goes_on_in_its_log(tmp_path: Path, data: dict, reference: Live) -> None:
    before = reference.text("logs/r.txt")
    run = go_on(reference, tmp_path / "more", 6, **data)
    text = run.text("logs/r.txt")
    assert text.startswith(before)
    assert "\nresumed: step:6 resumed_from:checkpoints/r/step_00000006.pt" in text[len(before) :]
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["r.jsonl", "r.txt"]
    trained = [event["step"] for event in run.events("step")]
    assert trained == [*range(1, 13), *range(7, 13)]


@pytest.mark.row("1 rank, then 2, then 4, then 1 again", "the same rows in every step")
def test_other_numbers_of_ranks_go_on(tmp_path: Path, data: dict, reference: Live) -> None:
    """1 rank, then 2, then 4, then 1 again: the same rows in every step, losses to rounding."""
    settings = data | {"GRAD_ACCUM_STEPS": 0}
    two = go_on(reference, tmp_path / "two", 3, ranks=2, **settings)
    four = go_on(two, tmp_path / "four", 6, ranks=4, **settings)
    one = go_on(four, tmp_path / "one", 9, **settings)
    for run in (two, four, one):
        assert_same_result(run, reference, exact=False)
        assert run.load(12)["data_crc"] == reference.load(12)["data_crc"]


@pytest.mark.slow
def test_eight_ranks_go_on(tmp_path: Path, data: dict, reference: Live) -> None:
    run = go_on(reference, tmp_path / "eight", 6, ranks=8, **data)
    assert_same_result(run, reference, exact=False)


def test_what_is_not_bound_may_change_and_takes_effect(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    """Without a rate a tensor stays what it was in the checkpoint; the others move on."""
    new = {"MATRIX_LR": 0.0, "SCALAR_LR": 0.0, "ITERATIONS": 10, "CHECKPOINT_EVERY": 5}
    run = go_on(reference, tmp_path / "other", 6, **data | new)
    [line] = [line for line in run.log.splitlines() if line.startswith("resumed: step:6")]
    changed = dict(re.findall(r"(\w+) was (\S+), is", line))
    said = {"MATRIX_LR": "0.04", "SCALAR_LR": "0.04", "ITERATIONS": "12", "CHECKPOINT_EVERY": "3"}
    assert changed == said | {"TRAIN_PREFETCH_QUEUE": "8"}
    assert "MATRIX_LR was 0.04, is 0.0" in line
    before, after = reference.load(6)["held"]["model"], run.load(10)["held"]["model"]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"tok_emb.weight"}


# Saving


def test_the_newest_files_stay(tmp_path: Path, data: dict) -> None:
    settings = data | {"ITERATIONS": 5, "CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": 2}
    run = Live(tmp_path, 0, SETTLED, **settings).finish()
    assert run.checkpoints() == [4, 5]
    written = run.events("checkpoint")
    assert [event["step"] for event in written] == [1, 2, 3, 4, 5]
    assert written[-1]["path"] == "checkpoints/r/step_00000005.pt"


@pytest.mark.row("a disk slower than training", "training does not wait; a warning")
def test_training_does_not_wait_for_a_busy_disk(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    """The first file takes until the last step is over; those that come due meanwhile are not
    begun, but for the last one, which comes after it. The run's end waits for both."""
    fault = {"kind": "hold", "place": "fsync", "call": 1}
    run = Live(tmp_path, 0, fault, **data).until_line("step:12/12 val_loss")
    assert run.checkpoints() == []
    run.until_line("final_int8_zlib_roundtrip_exact").go().finish()
    skipped = re.findall(r"^warning: no checkpoint of step (\d+): .*busy", run.out, re.MULTILINE)
    assert (skipped, run.checkpoints()) == (["6", "9", "12"], [3, 12]), (
        "the last one comes after it"
    )
    assert_same_result(run, reference, exact=True)


@pytest.mark.row("a new run under an old RUN_ID", "the old one's checkpoints are moved aside")
def test_a_new_run_leaves_the_old_checkpoints_alone(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    folder = copied(reference, tmp_path / "run", 12)
    run = Live(folder, 0, SETTLED, **data | {"ITERATIONS": 3}).finish()
    assert run.checkpoints() == [3]
    [aside] = [path for path in (folder / "checkpoints").iterdir() if path.name != "r"]
    assert aside.name.startswith("r.")
    assert len(list(aside.glob("step_*.pt"))) == 4


# What cannot be gone on from


@pytest.mark.row(
    "RESUME with other shapes or data", "refused by name; nothing is written to the old log"
)
def test_what_is_bound_is_refused_field_by_field(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    old = reference.text("logs/r.txt"), reference.text("logs/r.jsonl")
    folder = copied(reference, tmp_path / "run", 12)
    elsewhere = byte_data(tmp_path / "elsewhere")
    other = elsewhere | BOUND | {"TOKENIZER_PATH": tmp_path / "other.json", "VOCAB_SIZE": 270}
    other["TOKENIZER_PATH"].write_text('{"kind": "byte", "offset": 14}')
    line = refusal(folder, **data | other | {"RESUME": "auto"})
    assert line.startswith("RESUME=checkpoints/r/step_00000012.pt: of another configuration: ")
    named = dict(re.findall(r"(\w+) was (\S+), is", line))
    theirs = {**train_gpt.Config().as_text(), **config_of(**data).as_text()}
    assert named == {name: theirs[name] for name in other}
    assert "SEED was 1337, is 7" in line
    state = torch.load(folder / "checkpoints/r/step_00000012.pt", weights_only=True)
    del state["settings"]["SEED"]  # a setting that the checkpoint's script did not have
    with pytest.raises(train_gpt.RunError, match="SEED was , is 1337: start anew"):
        train_gpt.find_changes(config_of(**data), Path("x"), state)
    assert (folder / "logs" / "r.txt").read_text() == old[0]
    assert (folder / "logs" / "r.jsonl").read_text() == old[1]


def test_data_that_has_moved_is_the_same(tmp_path: Path, data: dict, reference: Live) -> None:
    """Another machine has another path to it, however long; its last part is compared."""
    folder = tmp_path / ("long" * 50) / "data"
    shutil.copytree(str(data["DATA_PATH"]), folder)
    moved = {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "byte.json")}
    there = go_on(reference, tmp_path / "there", 6, **data | moved)
    go_on(there, tmp_path / "back", 9, **data)


@pytest.mark.row(
    "RESUME where the shards so far are others", "refused by name; one after them may come"
)
def test_the_shards_so_far_are_bound(tmp_path: Path, data: dict, reference: Live) -> None:
    folder = tmp_path / Path(data["DATA_PATH"]).name
    shutil.copytree(str(data["DATA_PATH"]), folder)
    path = reference.folder / "checkpoints" / "r" / "step_00000006.pt"
    config = config_of(**data | {"DATA_PATH": folder, "RESUME": path})
    first = folder / "fineweb_train_000000.bin"
    shutil.copy(first, folder / "fineweb_train_000009.bin")
    train_gpt.find_checkpoint(config)
    tokens = first.read_bytes()
    first.write_bytes(tokens[:-2] + b"\7\1")  # as many tokens as before
    with pytest.raises(train_gpt.RunError, match="is .fineweb_train_000000.bin, 30000"):
        train_gpt.find_checkpoint(config)
    first.write_bytes(tokens)
    shutil.copy(first, folder / "fineweb_train_00000.bin")
    with pytest.raises(
        train_gpt.RunError, match=r"\(fineweb_train_000000.bin, .*is \(fineweb_train_00000.bin, "
    ):
        train_gpt.find_checkpoint(config)


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.row(
    "the newest checkpoints are damaged: ..", "RESUME=auto takes the one before, with a line"
)
def test_auto_takes_the_newest_that_is_whole(
    tmp_path: Path, data: dict, reference: Live, damaged: int
) -> None:
    folder = copied(reference, tmp_path / "run", 12)
    names = [f"step_{step:08d}.pt" for step in (12, 9)[:damaged]]
    for name in names:
        path = folder / "checkpoints" / "r" / name
        path.write_bytes(path.read_bytes()[:20_000])
    run = Live(folder, 0, SETTLED, **data | {"RESUME": "auto"}).finish()
    assert run.resumed() == [12 - 3 * damaged]
    lines = [line for line in run.err.splitlines() if line.startswith("warning: ")]
    for line, name in zip(lines, names, strict=True):
        assert line == f"warning: checkpoints/r/{name} is damaged: taking the one before"
    assert_same_result(run, reference, exact=True)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, data: dict, ranks: int) -> None:
    line = refusal(tmp_path, ranks, **data | {"RESUME": "gone.pt"})
    assert "RESUME=gone.pt: no checkpoint: " in line and "No such file" in line
    assert not (tmp_path / "logs").exists()


class Command:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("executed"),)


POISON = {"runs a command": {"settings": {}, "step": Command()}, "has no settings": {"step": 1}}


@pytest.mark.parametrize("case", POISON)
@pytest.mark.row("a checkpoint from others that ..", "refused; nothing is executed")
def test_a_file_from_others_is_refused_and_nothing_executed(
    tmp_path: Path, data: dict, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """tests/test_artifact.py has more of them: both are loaded in one way."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "poison.pt"
    torch.save(POISON[case], path)
    with pytest.raises(train_gpt.RunError, match=f"RESUME={path}: no checkpoint: .+") as error:
        train_gpt.find_checkpoint(config_of(**data, RESUME=path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("part", ["model", "adam", "muon", "step"])
@pytest.mark.row("a checkpoint without ..", "refused in one line")
def test_a_checkpoint_of_another_script_is_refused(
    tmp_path: Path, data: dict, reference: Live, part: str
) -> None:
    state = reference.load(12)
    del (state if part == "step" else state["held"])[part]
    torch.save(state, tmp_path / "other.pt")
    line = refusal(tmp_path / "run", **data | {"RESUME": tmp_path / "other.pt"})
    assert line.startswith(f"RESUME={tmp_path}/other.pt: ")
    words = {"step": "no checkpoint: it holds weights alone", "model": "of another script"}
    assert words.get(part, f"this Trainer differs in {part}") in line


def test_a_finished_run_can_be_extended(tmp_path: Path, data: dict, reference: Live) -> None:
    """Without CHECKPOINT_EVERY, too: RESUME=auto keeps the last state. It says what it found."""
    settings = data | {"CHECKPOINT_EVERY": 0, "RESUME": "auto", "WARMDOWN_ITERS": 0}
    short = Live(tmp_path / "run", 0, SETTLED, **settings | {"ITERATIONS": 6}).finish()
    assert "RESUME=auto: no checkpoint of RUN_ID=r: starting anew" in short.log
    assert short.checkpoints() == [6]
    whole = Live(tmp_path / "whole", 0, SETTLED, **settings).finish()
    longer = Live(tmp_path / "run", 0, SETTLED, **settings).finish()
    assert longer.resumed() == [6]
    assert_same_result(longer, whole, exact=True)
    shorter = Live(tmp_path / "run", 0, SETTLED, **settings | {"ITERATIONS": 3}).finish()
    assert "ITERATIONS=3 is reached: raise it to go on" in shorter.log
    assert shorter.resumed() == [6, 12]


TAMPERED = {
    "no adam": lambda state: state["held"].pop("adam"),
    "adam of other shapes": lambda state: state["held"]["adam"]["state"][0].update(
        exp_avg=torch.ones(3)
    ),
    "step is a text": lambda state: state.update(step="12"),
    "step below 0": lambda state: state.update(step=-1),
    "time is nan": lambda state: state.update(train_ms=float("nan")),
    "held is a list": lambda state: state.update(held=[]),
    "a number for a model": lambda state: state["held"].update(muon=3),
    "model is a number": lambda state: state["held"].update(model=5),
    "a text for a number": lambda state: state["held"].update(val_ms="abc"),
    "muon without momentum": lambda state: state["held"]["muon"].update(state={}),
}


@pytest.mark.parametrize("case", TAMPERED)
@pytest.mark.row("the newest checkpoint cannot be restored: ..", "RESUME=auto takes the one before")
def test_auto_passes_over_what_cannot_be_restored(
    tmp_path: Path, data: dict, reference: Live, case: str
) -> None:
    folder = copied(reference, tmp_path / "run", 12)
    path = folder / "checkpoints" / "r" / "step_00000012.pt"
    state = torch.load(path, weights_only=True)
    TAMPERED[case](state)
    torch.save(state, path)
    (path.parent / "step_00000011.pt").mkdir()
    (path.parent / "step_baseline.pt").write_text("mine")
    run = Live(folder, 0, SETTLED, **data | {"RESUME": "auto"}).finish()
    assert run.resumed() == [9] and "Traceback" not in run.err
    assert (path.parent / "step_baseline.pt").read_text() == "mine"
    assert_same_result(run, reference, exact=True)


@pytest.mark.row("two runs of one RUN_ID at once", "the second is refused in a line")
def test_a_second_run_of_the_same_name_is_refused(
    tmp_path: Path, data: dict, reference: Live
) -> None:
    fault = {"kind": "hold", "place": "train", "call": 5, "settled": True}
    first = Live(tmp_path, 0, fault, **data).until_held()
    second = Live(tmp_path, 0, **data)
    assert second.end() == [1]
    assert "logs/r.txt is in use by a run: set another RUN_ID" in second.err
    first.go().finish()
    assert_same_result(first, reference, exact=True)
    assert first.checkpoints() == [3, 6, 9, 12]
