"""A run is never lost. Each test puts one fault into a real run and looks for what was promised:
how it ends, what it says, what is on the disk, and that what goes on from there is the run that
nothing has disturbed. At the end there is a table of all of them."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL_MODEL, byte_data, write_split

from faults.live import DRIVER, Live, assert_same_result

pytestmark = pytest.mark.timeout(400)
slow = pytest.mark.slow
SHORT = {"ITERATIONS": 12, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 6, "VAL_TOKENS": 2000}
SHORT |= {"VAL_BATCH_SIZE": 1024, "RUN_ID": "r"}
Ended = Callable[[Live], None]


def row(fault: str, promise: str) -> pytest.MarkDecorator:
    """`..` in the fault stands for the test's parameters."""
    return pytest.mark.row(fault, promise)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings of a run of 12 steps, validated before, in the middle and at the end."""
    folder = tmp_path_factory.mktemp("faults") / "data"
    return {**SMALL_MODEL, **byte_data(folder, train_tokens=30_000), **SHORT}


@pytest.fixture(scope="module")
def reference(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """The run that nothing disturbs, on one rank."""
    saved = {"CHECKPOINT_EVERY": 3, "CHECKPOINT_KEEP": 9}
    run = Live(tmp_path_factory.mktemp("reference"), 0, {"settled": True}, **data | saved).finish()
    assert run.checkpoints() == [3, 6, 9, 12]
    return run


def failed(run: Live, *words: str, launched: bool = False) -> str:
    """Asserts that a run ended with one line that has these words; returns it."""
    codes = run.end()
    assert set(codes) == {1}, f"{codes} {run.out[-500:]} {run.err[-2000:]}"
    line = next((line for line in run.said if words[0] in line), "")
    assert all(word in line for word in words), run.err[-3000:]
    if len(codes) == 1 and not launched:
        assert run.said == [line] and "Traceback" not in run.err
    assert run.status == ("failed", 1)
    assert not list(run.folder.rglob("*.tmp"))
    return line


# Killed. With RESUME=auto in it the same command is for the start and for going on.


@slow
@pytest.mark.parametrize("rank", [0, 1])
@row("kill -9 of rank .. of 2, torchrun --max-restarts", "goes on from the last checkpoint")
def test_a_killed_rank_is_restarted(
    tmp_path: Path, data: dict, reference: Live, ended: Ended, rank: int
) -> None:
    fault = {"kind": "kill", "place": "train", "call": 11, "rank": rank, "settled": True}
    settings = data | {"CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    run = Live(tmp_path, 2, fault, restarts=1, **settings).until_held(rank).finish()
    [step] = run.resumed()
    assert step == 8 or (rank == 1 and step in (9, 10)), "rank 0 may save what it has when it ends"
    assert_same_result(run, reference, exact=False)
    ended(run)


@row("kill -9 of rank 1 of 2", "the others end by themselves")
def test_a_killed_rank_ends_the_others(tmp_path: Path, data: dict, ended: Ended) -> None:
    fault = {"kind": "kill", "place": "train", "call": 5, "rank": 1}
    run = Live(tmp_path, 2, fault, **data).until_held(1)
    assert run.end() == [1, -signal.SIGKILL]
    assert run.status == ("failed", 1) and run.said
    assert run.took < 60, "long before the process group's timeout"
    ended(run)


@row("kill -9 of the only process", "the same command goes on from the last checkpoint")
def test_a_killed_process(tmp_path: Path, data: dict, reference: Live, ended: Ended) -> None:
    fault = {"kind": "kill", "place": "train", "call": 10, "settled": True}
    settings = data | {"CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    killed = Live(tmp_path, 0, fault, **settings)
    assert killed.end() == [-signal.SIGKILL]
    run = Live(tmp_path, 0, **settings).finish()
    assert run.resumed() == [8]
    assert_same_result(run, reference, exact=True)
    ended(run)


@row("kill -9 in the middle of a save", "the older checkpoint is whole, and goes on")
def test_killed_while_saving(tmp_path: Path, data: dict, reference: Live, ended: Ended) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 2, "settled": True}
    settings = data | {"CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    run = Live(tmp_path, 0, fault, **settings).until_held().send(signal.SIGKILL)
    assert run.end() == [-signal.SIGKILL]
    assert run.checkpoints() == [4]
    run = Live(tmp_path, 0, **settings).finish()
    assert run.resumed() == [4]
    assert_same_result(run, reference, exact=True)
    ended(run)


@row("kill -9 while the artifact is written", "no half file of that name; goes on")
def test_killed_while_exporting(tmp_path: Path, data: dict, reference: Live, ended: Ended) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 2, "settled": True}  # behind a checkpoint
    settings = data | {"CHECKPOINT_EVERY": 12, "RESUME": "auto"}
    run = Live(tmp_path, 0, fault, **settings).until_held().send(signal.SIGKILL)
    assert run.end() == [-signal.SIGKILL]
    assert run.checkpoints() == [12] and not (tmp_path / "final_model.int8.ptz").exists()
    run = Live(tmp_path, 0, **settings).finish()
    assert run.resumed() == [12]
    assert_same_result(run, reference, exact=True)
    ended(run)


# Told to stop

# Where, at which call; of how many ranks; which of them is told (None: all); the signal
SIGNALS = {
    "SIGTERM in warm-up": ("train", 2, 0, None, signal.SIGTERM),
    "Ctrl-C in warm-up, rank 1 of 2 alone": ("train", 2, 2, 1, signal.SIGINT),
    "Ctrl-C in a step": ("train", 9, 0, None, signal.SIGINT),
    "SIGHUP in a step": ("train", 9, 0, None, signal.SIGHUP),
    "SIGTERM in a step, 2 ranks": ("train", 9, 2, None, signal.SIGTERM),
    "SIGTERM in a step, rank 0 of 2 alone": ("train", 9, 2, 0, signal.SIGTERM),
    "Ctrl-C in a step, rank 1 of 2 alone": ("train", 9, 2, 1, signal.SIGINT),
    "SIGTERM in the first validation": ("validation", 1, 0, None, signal.SIGTERM),
    "Ctrl-C in validation, rank 1 of 2 alone": ("validation", 3, 2, 1, signal.SIGINT),
    "Ctrl-C in the export": ("export", 1, 0, None, signal.SIGINT),
    "SIGTERM in the export, rank 1 of 2 alone": ("export", 1, 2, 1, signal.SIGTERM),
}
SAVED = {"warm-up": {0}, "a step": {8, 9}, "first": {0}, "validation": {6}, "export": {12}}


def interrupted(run: Live, number: int, codes: list[int]) -> int:
    """Asserts how a signal ends a run; the step that it was saved at."""
    assert run.end() == codes, run.err
    assert run.status == ("interrupted", 128 + number)
    [saved] = run.checkpoints()
    line = f"interrupted after step {saved}: this command with RUN_ID=r RESUME=auto goes on"
    assert run.said == [f"train_gpt.py: {line}"]
    assert run.load(saved)["step"] == saved
    return saved


@pytest.mark.parametrize("case", SIGNALS)
@row("..", "all ranks end after one step, saved; exit 128 + signal; goes on")
def test_a_signal(tmp_path: Path, data: dict, reference: Live, ended: Ended, case: str) -> None:
    place, call, ranks, rank, number = SIGNALS[case]
    settings = data | {"WARMUP_STEPS": 3 if "warm-up" in case else 0}
    fault = {"kind": "hold", "place": place, "call": call, "rank": rank or 0}
    run = Live(tmp_path, ranks, fault, **settings).until_held(rank or 0).send(number, rank)
    step = interrupted(run, number, [128 + number] * max(1, ranks))
    assert step in next(steps for words, steps in SAVED.items() if words in case)
    if step in (6, 9, 12):
        assert run.load(step)["data_crc"] == reference.load(step)["data_crc"]
    ended(run)
    validated = [event["step"] for event in run.events("validation")]
    assert step not in validated or place != "validation", "half a validation is none"
    assert not run.events("score")
    again = Live(tmp_path, ranks, **settings | {"RESUME": "auto"}).finish()
    assert again.resumed() == [step]
    assert_same_result(again, reference, exact=ranks == 0)


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@row(".. to torchrun with 2 ranks", "saved; torchrun itself says 1; goes on")
def test_a_signal_to_torchrun(
    tmp_path: Path, data: dict, reference: Live, ended: Ended, number: int
) -> None:
    fault = {"kind": "hold", "place": "train", "call": 9}
    run = Live(tmp_path, 2, fault, restarts=0, **data).until_held().send(number)
    step = interrupted(run, number, [1])
    assert step in SAVED["a step"]
    ended(run)
    again = Live(tmp_path, 2, **data | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference, exact=False)


@row("SIGTERM while all ranks wait for a shard that is being made", "saved; goes on")
def test_a_signal_while_starved(tmp_path: Path, data: dict, reference: Live, ended: Ended) -> None:
    """The shard is cut in two, and the second half comes when the run has been ended."""
    settings = data | {"DATA_STALL_SECONDS": 120, "DATA_PATH": tmp_path / "data"}
    shutil.copytree(data["DATA_PATH"], tmp_path / "data")
    first = tmp_path / "data" / "fineweb_train_000000.bin"
    tokens = np.fromfile(first, "<u2")[512:]
    write_split(tmp_path / "data", "train", tokens, [3 * 2056 + 100])
    second = tmp_path / "data" / "fineweb_train_000001.bin"
    second.rename(tmp_path / "second")
    producing = tmp_path / "data" / ".producing"
    progress = itertools.count()

    def is_starved() -> bool:
        """Looks, and moves the counter that says that the producer lives."""
        state = {"progress": next(progress), "val_complete": True}
        (tmp_path / "state").write_text(json.dumps(state))
        (tmp_path / "state").replace(producing)
        return "waiting for" in run.out and "step:3/" in run.out

    producing.write_text('{"progress": -1, "val_complete": true}')
    run = Live(tmp_path / "run", 2, **settings)
    run.until(is_starved)
    assert interrupted(run.send(signal.SIGTERM), signal.SIGTERM, [143, 143]) == 3
    assert run.took < 30
    ended(run)
    (tmp_path / "second").rename(second)
    producing.unlink()
    again = Live(tmp_path / "run", 2, **settings | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference, exact=False)


@row("the disk hangs in the last save", "a 2nd Ctrl-C, a second later, ends it")
def test_a_second_ctrl_c(tmp_path: Path, data: dict, ended: Ended) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 2, "deaf": True, "settled": True}
    settings = data | {"ITERATIONS": 100_000, "VAL_LOSS_EVERY": 0}
    run = Live(tmp_path, 0, fault, **settings | {"CHECKPOINT_EVERY": 2, "CHECKPOINT_KEEP": 9})
    run.until_held().send(signal.SIGTERM)
    time.sleep(0.5)
    assert not run.poll(), "SIGTERM alone leaves it the time to write"
    while not run.poll():  # as often as a person would
        run.send(signal.SIGINT)
        time.sleep(0.5)
    assert run.end() == [-signal.SIGINT]
    assert run.checkpoints() == [2], "what was whole is whole"
    ended(run)


@row("Ctrl-C twice within a second, as torchrun hands it on", "counts once: saved; goes on")
def test_a_ctrl_c_that_comes_twice(tmp_path: Path, data: dict, ended: Ended) -> None:
    fault = {"kind": "hold", "place": "train", "call": 9, "deaf": True}
    run = Live(tmp_path, 0, fault, **data).until_held().send(signal.SIGINT)
    time.sleep(0.1)
    run.send(signal.SIGINT).go()
    interrupted(run, signal.SIGINT, [130])
    ended(run)


@row("a slow disk at the last save", "all ranks wait for it; the last line says how to go on")
def test_a_slow_disk_at_the_last_save(tmp_path: Path, data: dict, ended: Ended) -> None:
    fault = {"kind": "slow", "place": "fsync", "call": 1, "seconds": 6}
    settings = data | {"ITERATIONS": 100_000, "VAL_LOSS_EVERY": 0}
    run = Live(tmp_path, 2, fault, **settings).until_line("step:3/").send(signal.SIGTERM)
    saved = interrupted(run, signal.SIGTERM, [143, 143])
    assert run.took > 5 and saved
    assert run.err.splitlines()[-1].endswith("RUN_ID=r RESUME=auto goes on")
    ended(run)


@slow
@row("SIGHUP under nohup", "the run goes on to its end")
def test_a_terminal_that_closes_under_nohup(tmp_path: Path, data: dict, ended: Ended) -> None:
    command = f"trap '' HUP; exec {sys.executable} {DRIVER}"
    fault = {"kind": "hold", "place": "train", "call": 9}
    run = Live(tmp_path, 0, fault, shell=command, **data).until_held().send(signal.SIGHUP)
    run.go()
    assert run.end() == [0] and run.status == ("finished", 0)
    ended(run)


CONSOLES = {"full": "/dev/full", "gone": "a pipe that nobody reads"}


@pytest.mark.parametrize("console", CONSOLES)
@row("stdout and stderr are ..", "the log goes on, the run finishes; exit 0")
def test_a_console_that_takes_nothing(
    tmp_path: Path, data: dict, reference: Live, ended: Ended, console: str
) -> None:
    exec_it = f"exec {sys.executable} {DRIVER}"
    full = f"{exec_it} > /dev/full 2>&1"
    command = full if console == "full" else f"{{ {exec_it}; }} 2>&1 | head -3"
    run = Live(tmp_path, 0, shell=f"set -o pipefail; {command}", **data)
    assert run.end() == [0]
    assert run.status == ("finished", 0)
    assert "final_int8_zlib_roundtrip_exact" in run.log
    assert_same_result(run, reference, exact=True)
    ended(run)


# Disks. A limit on the size of files stands for a full one: writing fails in the same places.


@row("disk full under a checkpoint", "a warning; the run finishes")
def test_no_room_for_a_checkpoint(tmp_path: Path, data: dict, ended: Ended) -> None:
    run = Live(tmp_path, 0, file_limit=200_000, **data | {"CHECKPOINT_EVERY": 6}).finish()
    warnings = re.findall("^warning: no checkpoint: .*", run.log, re.MULTILINE)
    assert len(warnings) >= 1 and "File too large" in warnings[0]
    assert not list(tmp_path.rglob("*.pt.*")) and run.checkpoints() == []
    assert not list(tmp_path.rglob("*.tmp"))
    ended(run)


@row("disk full under the log", "a warning; the run finishes, and says it all on the console")
def test_no_room_for_the_log(tmp_path: Path, data: dict, ended: Ended) -> None:
    settings = data | {"NUM_LAYERS": 1, "MODEL_DIM": 16, "NUM_HEADS": 1}
    run = Live(tmp_path, 0, file_limit=60_000, **settings)
    assert run.end() == [0], run.err
    assert re.search(r"(?m)^warning: logs/r.txt: lines are lost: .*File too large$", run.err)
    assert "final_int8_zlib_roundtrip_exact" in run.out
    ended(run)


@row("no place for logs/ (a file of that name)", "a warning; the run finishes")
def test_no_place_for_the_log(tmp_path: Path, data: dict, ended: Ended) -> None:
    (tmp_path / "logs").write_text("a file")
    run = Live(tmp_path, 0, **data)
    assert run.end() == [0], run.err
    assert "warning: logs/r.txt: lines are lost: " in run.err and "Traceback" not in run.err
    assert "final_int8_zlib_roundtrip_exact" in run.out
    ended(run)


@row("no place for checkpoints/ (a file of that name)", "a warning; the run finishes")
def test_no_place_for_checkpoints(tmp_path: Path, data: dict, ended: Ended) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    run = Live(tmp_path, 0, {"settled": True}, **data | {"CHECKPOINT_EVERY": 6}).finish()
    assert run.log.count("warning: no checkpoint: checkpoints/r/step_000000") == 2
    ended(run)


@row("disk full under the artifact", "the score is printed, one line says what is missing; exit 1")
def test_no_room_for_the_artifact(tmp_path: Path, data: dict, ended: Ended) -> None:
    settings = data | {"MODEL_DIM": 128, "NUM_HEADS": 2, "ITERATIONS": 2}
    run = Live(tmp_path, 2, file_limit=250_000, **settings)
    assert run.end() == [1, 1]
    assert re.search(r"^final_int8_zlib_roundtrip_exact val_loss:\d", run.out, re.MULTILINE)
    [line] = run.said
    for name in ("final_model.int8.ptz", "final_model.pt"):
        assert re.search(rf"{name}: cannot write \d+ bytes: File too large", line)
    assert not list(tmp_path.glob("final_model*")) and run.status == ("failed", 1)
    ended(run)


@row("no place for the artifact (a folder of that name)", "likewise; the last state is saved")
def test_no_place_for_the_artifact(
    tmp_path: Path, data: dict, reference: Live, ended: Ended
) -> None:
    (tmp_path / "final_model.int8.ptz").mkdir()
    run = Live(tmp_path, 0, **data)
    failed(run, "final_model.int8.ptz: cannot write")
    assert "final_int8_zlib_roundtrip_exact" in run.out and run.checkpoints() == [12]
    ended(run)
    (tmp_path / "final_model.int8.ptz").rmdir()
    again = Live(tmp_path, 0, **data | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference, exact=True)


# Data


def endless(data: dict, folder: Path) -> dict[str, object]:
    """Settings of a run without an end on three shards of its own."""
    shutil.copytree(str(data["DATA_PATH"]), folder)
    tokens = np.random.default_rng(5).integers(1, 260, 20_000)
    write_split(folder, "train", tokens, [7000, 7000])
    return data | {"DATA_PATH": folder, "ITERATIONS": 100_000, "VAL_LOSS_EVERY": 0}


def rewritten(path: Path) -> None:
    """Other tokens, as many as before."""
    path.write_bytes(path.read_bytes()[:1024] + bytes([7, 0]) * 7000)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SHARD_FAULTS = {
    "truncated": lambda path: os.truncate(path, 3000),
    "deleted": Path.unlink,
    "rewritten": rewritten,
    "a pipe": piped,
}


@pytest.mark.parametrize("ranks", [0, 2], ids=["1 rank", "2 ranks"])
@pytest.mark.parametrize("case", SHARD_FAULTS)
@row("a shard is changed during the run: ..", "saved; a line names file, byte and rank")
def test_a_shard_changes(tmp_path: Path, data: dict, ended: Ended, case: str, ranks: int) -> None:
    run = Live(tmp_path, ranks, **endless(data, tmp_path / "data")).until_line("step:2/")
    SHARD_FAULTS[case](tmp_path / "data" / "fineweb_train_000001.bin")
    line = failed(run, ": the reader", "/data/fineweb_train_000001.bin", " at byte ")
    assert re.match(r"train_gpt.py: rank \d: the reader", line)
    [saved] = run.checkpoints()
    assert saved >= 2 and line.endswith(": this command with RUN_ID=r RESUME=auto goes on")
    ended(run)


@pytest.mark.parametrize("case", ["truncated", "replaced"])
@row("the validation shard is .. during the run", "saved; a line names file, byte and rank")
def test_the_validation_shard_changes(tmp_path: Path, data: dict, ended: Ended, case: str) -> None:
    """Else nats of one split would be divided by bytes of another."""
    settings = endless(data, tmp_path / "data") | {"VAL_LOSS_EVERY": 20}
    run = Live(tmp_path, 2, **settings).until_line("step:1/")
    path = tmp_path / "data" / "fineweb_val_000000.bin"
    if case == "truncated":
        os.truncate(path, 1024 + 2 * 1500)  # of 2,000 tokens
    else:
        shutil.copy(path, tmp_path / "other")
        (tmp_path / "other").replace(path)  # the same size; it is another file
    line = failed(run, ": the reader", "/data/fineweb_val_000000.bin", " at byte ", "was changed")
    assert len(run.checkpoints()) == 1 and line.endswith(
        ": this command with RUN_ID=r RESUME=auto goes on"
    )
    ended(run)


@row("a read that never ends", "DATA_STALL_SECONDS, saved; a line names file, byte and rank")
def test_a_read_that_never_ends(tmp_path: Path, data: dict, ended: Ended) -> None:
    settings = endless(data, tmp_path / "data") | {"DATA_STALL_SECONDS": 1}
    run = Live(tmp_path, 0, {"kind": "hang", "place": "read", "call": 6}, **settings)
    words = "/data/fineweb_train_000001.bin at byte ", "DATA_STALL_SECONDS=1"
    failed(run, "rank 0: the reader waits for ", *words)
    ended(run)


# Numbers


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 1)], ids=["1 rank", "rank 1 of 2"])
@row("a loss that is not finite: ..", "all end there; rank and step are named; last good state")
def test_a_loss_that_is_not_finite(
    tmp_path: Path, data: dict, reference: Live, ended: Ended, ranks: int, rank: int
) -> None:
    fault = {"kind": "nan", "place": "train", "call": 7, "rank": rank}
    run = Live(tmp_path, ranks, fault, **data).until_held(rank)
    assert run.end() == [1] * max(1, ranks)
    [line] = run.said
    assert line.startswith(f"train_gpt.py: rank {rank}: step 7: loss or gradient not finite")
    assert "lower the learning rates and start anew" in line
    assert run.status == ("nonfinite", 1) and run.checkpoints() == [6]
    mine, theirs = run.load(6), reference.load(6)
    assert (mine["step"], mine["data_crc"]) == (6, theirs["data_crc"])
    for name, tensor in theirs["held"]["model"].items():
        error = np.abs(tensor.numpy() - mine["held"]["model"][name].numpy()).max()
        assert error <= (1e-4 if ranks else 0), name
    steps = [run.notes(each)["train"] for each in range(max(1, ranks))]
    assert set(steps) == {7}, "no rank went further"
    ended(run)


@row("weights that are not finite", "noticed at the next log line; not saved; exit 1")
def test_weights_that_are_not_finite(tmp_path: Path, data: dict, ended: Ended) -> None:
    """The last loss was finite, so only the weights show it. It is no state to go on from."""
    rates = {"MATRIX_LR": 1e38, "SCALAR_LR": 1e38, "VAL_LOSS_EVERY": 0, "ITERATIONS": 4}
    settings = data | {"CHECKPOINT_EVERY": 3, "CHECKPOINT_KEEP": 9}
    Live(tmp_path, 0, {"settled": True}, **settings | {"ITERATIONS": 3}).finish()
    run = Live(tmp_path, 0, **settings | rates | {"RESUME": "auto"})
    assert run.end() == [1] and run.status == ("nonfinite", 1)
    assert "step 4: the weights are not finite" in run.said[0] and run.checkpoints() == [3]
    ended(run)


# Ranks


@pytest.mark.parametrize("place", ["a step", "the last validation", "the export"])
@row("an error that nobody foresaw in ..", "the state before it is saved, the same command goes on")
def test_an_error_that_nobody_foresaw(
    tmp_path: Path, data: dict, reference: Live, ended: Ended, place: str
) -> None:
    calls = {"a step": ("train", 6), "the last validation": ("validation", 5), "the export": 1}
    name, call = calls[place] if place != "the export" else ("export", 1)
    run = Live(tmp_path, 0, {"kind": "raise", "place": name, "call": call}, **data)
    assert run.end() == [1] and run.status == ("failed", 1)
    assert "ValueError: an injected error" in run.said[-1]
    assert "this command with RUN_ID=r RESUME=auto goes on" in run.err
    assert run.checkpoints() == [5 if place == "a step" else 12]
    ended(run)
    again = Live(tmp_path, 0, **data | {"RESUME": "auto"}).finish()
    assert_same_result(again, reference, exact=True)


@row("rank 1 of 2 raises an error", "the job ends within seconds; the error is shown")
def test_a_rank_that_raises(tmp_path: Path, data: dict, ended: Ended) -> None:
    fault = {"kind": "raise", "place": "train", "call": 5, "rank": 1}
    run = Live(tmp_path, 2, fault, **data).until_held(1)
    assert run.end() == [1, 1] and run.checkpoints() == [4]
    assert "train_gpt.py: rank 1: ValueError: an injected error" in run.said
    assert run.took < 60 and run.status == ("failed", 1)
    ended(run)


@slow
@pytest.mark.parametrize("place", ["train", "validation", "export"])
@row("rank 1 of 2 hangs: .. (timeout 15 s, by default 5 min)", "the process group's timeout")
def test_a_rank_that_hangs(tmp_path: Path, data: dict, ended: Ended, place: str) -> None:
    fault = {"kind": "hang", "place": place, "call": 1, "rank": 1, "timeout_s": 15}
    run = Live(tmp_path, 2, fault, **data | {"VAL_LOSS_EVERY": 0}).until_held(1)
    run.until(lambda: run.said)
    os.kill(run.pids[1], signal.SIGKILL)  # as the launcher does when the first rank has ended
    assert run.end() == [1, -signal.SIGKILL]
    assert run.status == ("failed", 1)
    assert run.said[0].startswith("train_gpt.py: rank 0: ")
    ended(run)
