"""The fault matrix: each row injects a fault into a real run and checks what was promised for it."""

import json
import os
import random
import re
import signal
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL_MODEL, byte_data, write_split
from faults.live import Live, same_result
from test_growing import Producer

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
SETTINGS = {
    **{
        name: value for name, value in SMALL_MODEL.items() if name != "VOCAB_SIZE"
    },  # the data's own
    "ITERATIONS": 12,
    "TRAIN_LOG_EVERY": 1,
    "VAL_LOSS_EVERY": 6,
    "VAL_TOKENS": 2000,
    "VAL_BATCH_SIZE": 1024,
    "RUN_ID": "r",
}
TINY = {**SETTINGS, "NUM_LAYERS": 1, "MODEL_DIM": 16, "NUM_HEADS": 1, "VAL_LOSS_EVERY": 0}
RANDOM = random.Random(int(os.environ.get("FAULTS_SEED", "1")))
KILLED_AT = {rank: RANDOM.randrange(6, 12) for rank in (0, 1)}  # step; checkpoints are every 4
See = Callable[[str], None]


def row(fault: str, promise: str) -> pytest.MarkDecorator:
    return pytest.mark.row(fault, promise)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return byte_data(tmp_path_factory.mktemp("faults") / "data", train_tokens=30_000)


@pytest.fixture(scope="session")
def reference(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Live:
    """The run that nothing disturbs, on one rank."""
    run = Live(
        tmp_path_factory.mktemp("reference"),
        0,
        {"settled": True},
        **data,
        **SETTINGS,
        CHECKPOINT_EVERY=3,
        CHECKPOINT_KEEP=9,
    )
    assert run.end() == 0, run.err
    assert run.status == ("finished", 0) and run.checkpoints() == [3, 6, 9, 12]
    return run


def resume_by_its_last_line(run: Live) -> Live:
    """What people do: copy the last line of the console into a shell."""
    command = run.out.rstrip("\n").splitlines()[-1]
    assert "RESUME=auto" in command and "RUN_ID=" in command, command
    resumed = Live(run.folder, 0, {}, command=["bash", "-c", command])
    resumed.run_id = run.run_id
    assert resumed.end() == 0, resumed.err
    assert resumed.status == ("finished", 0)
    return resumed


def interrupted(run: Live, number: int, launched: bool) -> str:
    """Asserts how a signal ends a run; says where it was saved."""
    code, expected = run.end(), 128 + number
    assert code == (1 if launched else expected), run.err
    assert run.status == ("interrupted", expected)
    [saved] = run.checkpoints()[-1:]
    [line] = run.said
    assert line.endswith(f"train_gpt.py: interrupted after step {saved}"), line
    assert not launched or "an injected" not in run.err
    assert launched or "Traceback" not in run.err
    state = run.load(saved)
    assert state["step"] == saved and all(
        bool(tensor.isfinite().all()) for tensor in state["tensors"]
    )
    return f"exit {code}, saved at step {saved}"


def failed(run: Live, *words: str, code: int = 1, launched: bool = False) -> str:
    """Asserts that a run ended with one line that has these words and no traceback."""
    assert run.end() == code, run.out[-500:] + run.err
    lines = run.err.strip().splitlines() if code == 2 else run.said
    assert lines and all(word in " ".join(lines) for word in words), run.err[-2000:]
    assert launched or "Traceback" not in run.err, run.err
    assert launched or code == 2 or len(lines) == 1, lines
    assert not list(run.folder.rglob("*.tmp"))
    best = next((line for line in lines if words[0] in line), lines[-1])
    return best.split("train_gpt.py: ")[-1].strip().replace(str(run.folder), ".")


# Killed.


@pytest.mark.parametrize("rank", [0, 1])
@row("kill -9 of a rank of 2 ..", "restarts from the last checkpoint; same result")
def test_a_killed_rank(tmp_path: Path, data: dict, reference: Live, see: See, rank: int) -> None:
    last = (KILLED_AT[rank] - 1) // 4 * 4
    fault = {
        "kind": "kill",
        "place": "train",
        "call": KILLED_AT[rank],
        "rank": rank,
        "after": f"checkpoints/r/step_{last:08d}.pt",
        "settled": True,
    }
    run = Live(
        tmp_path, 2, fault, restarts=1, **data, **SETTINGS, CHECKPOINT_EVERY=4, RESUME="auto"
    )
    assert run.end() == 0, run.err[-3000:]
    assert (tmp_path / f"held.{rank}").exists() and run.status == ("finished", 0)
    assert run.resumed() == [last]
    see(
        f"killed in step {KILLED_AT[rank]}, resumed after {last}: {same_result(run, reference, exact=False)}"
    )


@row("kill -9 of the only process", "the same command goes on; same result")
def test_a_killed_process(tmp_path: Path, data: dict, reference: Live, see: See) -> None:
    fault = {"kind": "kill", "place": "train", "call": 10, "settled": True}
    settings = {**data, **SETTINGS, "CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    assert Live(tmp_path, 0, fault, **settings).end() == -signal.SIGKILL
    run = Live(tmp_path, 0, {}, **settings)
    assert run.end() == 0, run.err
    assert run.resumed() == [8] and "step:8/12 train_loss" not in run.out
    see(f"resumed after 8: {same_result(run, reference, exact=True)}")


@row("kill -9 in the middle of a save", "the older checkpoint loads; none is half written")
def test_killed_while_saving(tmp_path: Path, data: dict, reference: Live, see: See) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 2, "settled": True}
    settings = {**data, **SETTINGS, "CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    run = Live(tmp_path, 0, fault, **settings).held().send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert run.checkpoints() == [4] and run.load(4)["step"] == 4
    assert len(list((tmp_path / "checkpoints" / "r").iterdir())) == 2  # and the temporary
    run = Live(tmp_path, 0, {}, **settings)
    assert run.end() == 0, run.err
    assert run.resumed() == [4] and not list(tmp_path.rglob("*.tmp"))
    see(f"resumed after 4: {same_result(run, reference, exact=True)}")


@row("kill -9 while the artifact is written", "no half file of that name; the run can go on")
def test_killed_while_writing_the_artifact(
    tmp_path: Path, data: dict, reference: Live, see: See
) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 3}  # after a checkpoint and final_model.pt
    settings = {**data, **SETTINGS, "CHECKPOINT_EVERY": 12, "RESUME": "auto"}
    run = Live(tmp_path, 0, fault, **settings).held().send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert (tmp_path / "final_model.pt").exists() and not (
        tmp_path / "final_model.int8.ptz"
    ).exists()
    run = Live(tmp_path, 0, {}, **settings)
    assert run.end() == 0, run.err
    see(f"resumed after 12: {same_result(run, reference, exact=True)}")


# Told to stop.

SIGNALS = {  # fault; ranks; signal; to which rank (None: to what was started); is the resume command run?
    "SIGTERM in warm-up": ("train", 2, 0, signal.SIGTERM, None, True),
    "SIGINT in warm-up, to rank 1 of 2": ("train", 2, 2, signal.SIGINT, 1, False),
    "SIGTERM in a step": ("train", 9, 0, signal.SIGTERM, None, True),
    "SIGINT in a step": ("train", 9, 0, signal.SIGINT, None, True),
    "SIGTERM in a step, to the launcher": ("train", 9, 2, signal.SIGTERM, None, True),
    "SIGINT in a step, to the launcher": ("train", 9, 2, signal.SIGINT, None, False),
    "SIGTERM in a step, to rank 0 of 2": ("train", 9, 2, signal.SIGTERM, 0, False),
    "SIGTERM in a step, to rank 1 of 2": ("train", 9, 2, signal.SIGTERM, 1, False),
    "SIGTERM in validation": ("validation", 3, 0, signal.SIGTERM, None, True),
    "SIGINT in validation, to rank 1 of 2": ("validation", 3, 2, signal.SIGINT, 1, False),
    "SIGTERM in the export": ("export", 1, 0, signal.SIGTERM, None, True),
    "SIGTERM in the export, to rank 1 of 2": ("export", 1, 2, signal.SIGTERM, 1, False),
}


@pytest.mark.parametrize("case", SIGNALS)
@row("..", "saved; exit 143/130; last line resumes; same result")
def test_a_signal(tmp_path: Path, data: dict, reference: Live, see: See, case: str) -> None:
    place, call, ranks, number, target, resumes = SIGNALS[case]
    warm_up = 3 if "warm-up" in case else 0
    fault = {
        "kind": "hold",
        "place": place,
        "call": call + warm_up * (warm_up == 0),
        "rank": target or 0,
    }
    run = Live(tmp_path, ranks, fault, **data, **{**SETTINGS, "WARMUP_STEPS": warm_up})
    seen = interrupted(run.held(target or 0).send(number, target), number, ranks > 0)
    saved = run.checkpoints()[-1]
    expected = {"train": (0, 1) if warm_up else (8, 11), "validation": (6, 6), "export": (12, 12)}[
        place
    ]
    assert expected[0] <= saved <= expected[1]
    assert "RESUME=auto" in run.out.splitlines()[-1] and (
        "torchrun" in run.out.splitlines()[-1]
    ) == (ranks > 0)
    if resumes:
        resume_by_its_last_line(run)
        seen += f"; {same_result(run, reference, exact=ranks == 0)}"
    see(seen)


STARVED = {"": (0, None), ", to the launcher": (2, None), ", to rank 1 of 2": (2, 1)}


@pytest.mark.parametrize("case", STARVED)
@row("SIGTERM while waiting for data..", "saved within seconds; same result when resumed")
def test_a_signal_while_starved(tmp_path: Path, see: See, case: str) -> None:
    ranks, target = STARVED[case]
    producer = Producer(tmp_path / "data")
    producer.deliver()  # three steps
    settings = {**SETTINGS, **producer.settings, "DATA_STALL_SECONDS": 120}
    run = Live(tmp_path / "run", ranks, {}, **settings)
    run.until(
        lambda: "waiting for" in run.out and "step:3/12 train_loss" in run.out, tick=producer.tell
    )
    time.sleep(0.5)  # the main thread follows its reader: it waits too
    started = time.monotonic()
    seen = interrupted(run.send(signal.SIGTERM, target), signal.SIGTERM, ranks > 0)
    took = time.monotonic() - started
    assert run.checkpoints() == [3] and took < 30
    producer.deliver(3)
    producer.finish()
    resume_by_its_last_line(run)
    whole = Live(tmp_path / "whole", 0, {}, **{**settings, "DATA_PATH": producer.whole})
    assert whole.end() == 0, whole.err
    see(f"{seen} in {took:.1f} s; {same_result(run, whole, exact=ranks == 0)}")


@row("a second SIGTERM while saving", "the save goes on")
def test_a_second_signal(tmp_path: Path, data: dict, reference: Live, see: See) -> None:
    fault = {"kind": "hold", "place": "fsync", "call": 1, "deaf": True}
    run = Live(tmp_path, 0, fault, **data, **{**SETTINGS, "ITERATIONS": 100_000}).until_line(
        "step:3/"
    )
    run.send(signal.SIGTERM).held().send(signal.SIGTERM).send(signal.SIGINT)
    assert run.checkpoints() == [] and run.process.poll() is None
    see(interrupted(run.go(), signal.SIGTERM, launched=False))


# Disks.


@row("disk full under the checkpoint", "a warning; the run finishes")
def test_no_room_for_a_checkpoint(tmp_path: Path, data: dict, see: See) -> None:
    run = Live(tmp_path, 0, {}, file_limit=160_000, **data, **SETTINGS, CHECKPOINT_EVERY=6)
    assert run.end() == 0, run.err
    warnings = [
        line for line in run.out.splitlines() if line.startswith("warning: no checkpoint of step")
    ]
    assert len(warnings) == 2 and run.checkpoints() == [] and not list(tmp_path.rglob("*.tmp"))
    assert run.status == ("finished", 0) and "Traceback" not in run.err
    see(warnings[0])


@row("disk full under the log", "a warning; the run finishes")
def test_no_room_for_the_log(tmp_path: Path, data: dict, see: See) -> None:
    run = Live(tmp_path, 0, {}, file_limit=40_000, **data, **TINY)
    assert run.end() == 0, run.err
    assert re.findall(r"(?m)^warning: logs/r.txt: lines are lost: .*File too large", run.err)
    assert "Traceback" not in run.err
    assert len(run.err.splitlines()) == 1
    assert run.status == ("finished", 0) and "final_int8_zlib_roundtrip_exact" in run.out
    see(run.err.strip().splitlines()[0])


@row("disk full under the artifact", "one line; no half file")
def test_no_room_for_the_artifact(tmp_path: Path, data: dict, see: See) -> None:
    settings = {**SETTINGS, "MODEL_DIM": 64, "ITERATIONS": 2}
    run = Live(tmp_path, 0, {}, file_limit=200_000, **data, **settings)
    see(failed(run, "final_model", "File too large"))
    assert not list(tmp_path.glob("final_model*")) and run.status == ("failed", 1)


@pytest.mark.parametrize("ranks", [0, 2])
@row("no place for logs/, ranks ..", "one line, at once")
def test_no_place_for_the_log(tmp_path: Path, data: dict, see: See, ranks: int) -> None:
    (tmp_path / "logs").write_text("a file")
    see(
        failed(
            Live(tmp_path, ranks, {}, **data, **SETTINGS),
            "logs/r.txt",
            "cannot open",
            launched=ranks > 0,
        )
    )


@row("no place for checkpoints/", "a warning; the run finishes")
def test_no_place_for_checkpoints(tmp_path: Path, data: dict, see: See) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    run = Live(tmp_path, 0, {}, **data, **TINY, CHECKPOINT_EVERY=6)
    assert run.end() == 0, run.err
    warnings = [
        line for line in run.out.splitlines() if line.startswith("warning: no checkpoint of step")
    ]
    assert warnings and "Traceback" not in run.err
    see(warnings[0])


# Data.


def three_shards(folder: Path) -> dict[str, str]:
    settings = byte_data(folder)
    write_split(folder, "train", np.random.default_rng(5).integers(1, 260, 20_000), [7000, 7000])
    return settings


def truncate(path: Path) -> None:
    os.truncate(path, 3000)


def rewrite(path: Path) -> None:
    """Other tokens, the same size."""
    content = path.read_bytes()
    path.write_bytes(content[:1024] + content[1024:][::-1])
    os.utime(path, (1, 1))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), (1, 1))
    path.with_suffix(".new").replace(path)


SHARD_FAULTS = {
    "truncated": truncate,
    "deleted": Path.unlink,
    "rewritten in place": rewrite,
    "replaced": replace,
}


@pytest.mark.parametrize("case", SHARD_FAULTS)
@row("during the run a shard is ..", "one line names file and byte")
def test_a_shard_changes(tmp_path: Path, see: See, case: str) -> None:
    settings = {
        **SETTINGS,
        **three_shards(tmp_path / "data"),
        "ITERATIONS": 100_000,
        "VAL_LOSS_EVERY": 0,
    }
    run = Live(tmp_path, 0, {}, **settings).until_line("step:2/")
    SHARD_FAULTS[case](tmp_path / "data" / "fineweb_train_000001.bin")
    see(failed(run, "rank 0: the train reader", "data/fineweb_train_000001.bin", "at byte"))
    assert run.status == ("failed", 1)


@row("a shard of 2 ranks is deleted", "every rank ends; the file is named")
def test_a_shard_vanishes_under_two_ranks(tmp_path: Path, see: See) -> None:
    settings = {
        **SETTINGS,
        **three_shards(tmp_path / "data"),
        "ITERATIONS": 100_000,
        "VAL_LOSS_EVERY": 0,
    }
    run = Live(tmp_path, 2, {}, **settings).until_line("step:2/")
    (tmp_path / "data" / "fineweb_train_000001.bin").unlink()
    see(failed(run, "the train reader", "data/fineweb_train_000001.bin", launched=True))


@row("a shard is truncated before the start", "exit 2; the file is named")
def test_a_truncated_shard_at_the_start(tmp_path: Path, see: See) -> None:
    settings = three_shards(tmp_path / "data")
    truncate(tmp_path / "data" / "fineweb_train_000001.bin")
    see(
        failed(
            Live(tmp_path, 0, {}, **{**SETTINGS, **settings}),
            "fineweb_train_000001.bin",
            "3000 bytes",
            code=2,
        )
    )


@row("a read that never ends (a FIFO)", "ends with stacks, file, offset, rank")
def test_a_read_that_never_ends(tmp_path: Path, see: See) -> None:
    settings = {
        **SETTINGS,
        **three_shards(tmp_path / "data"),
        "ITERATIONS": 100_000,
        "VAL_LOSS_EVERY": 0,
    }
    os.mkfifo(tmp_path / "data" / "pipe")
    run = Live(tmp_path, 0, {}, **settings, DATA_STALL_SECONDS=1).until_line("step:2/")
    (tmp_path / "data" / "pipe").replace(tmp_path / "data" / "fineweb_train_000001.bin")
    see(
        failed(
            run,
            "rank 0: the train reader",
            "data/fineweb_train_000001.bin",
            "at byte",
            "DATA_STALL_SECONDS=1",
        )
    )
    assert (
        run.err.count("(most recent call first)") >= 3 and "in _open" in run.err
    )  # main, watch, reader
    assert run.status == ("failed", 1)


# Numbers.


def last_good_state(run: Live, reference: Live, step: int, exact: bool) -> None:
    mine, theirs = run.load(step), reference.load(step)
    assert mine["step"] == step and mine["data_crc"] == theirs["data_crc"]
    for a, b in zip(mine["tensors"], theirs["tensors"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if exact else 1e-4)


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 1)])
@row("a loss is NaN on ..", "all stop at that step; last good state saved")
def test_a_loss_that_is_not_a_number(
    tmp_path: Path, data: dict, reference: Live, see: See, ranks: int, rank: int
) -> None:
    fault = {"kind": "nan", "place": "train", "call": 7, "rank": rank}
    run = Live(tmp_path, ranks, fault, **data, **SETTINGS)
    seen = failed(run, f"rank {rank}: step 7: ", "not finite", launched=ranks > 0)
    assert run.status == ("nonfinite", 1) and run.checkpoints() == [6]
    last_good_state(run, reference, 6, exact=ranks == 0)
    steps = {json.loads(run.text(f"calls.{each}"))["train"] for each in range(max(1, ranks))}
    assert len(steps) == 1 and steps.pop() <= 9  # no rank went further than another, nor far
    assert "RESUME=auto" not in run.out
    see(seen)


# Ranks.


@row("rank 1 of 2 raises an error", "the job ends within 10 s; the error is shown")
def test_a_rank_that_raises(tmp_path: Path, data: dict, see: See) -> None:
    fault = {"kind": "raise", "place": "train", "call": 5, "rank": 1}
    run = Live(tmp_path, 2, fault, **data, **SETTINGS).held(1)
    started = time.monotonic()
    assert run.end() == 1
    took = time.monotonic() - started
    assert (
        took < 10
        and "ValueError: an injected error" in run.err
        and "rank 1" in run.err.replace("rank1", "rank 1")
    )
    assert run.status == ("failed", 1)
    see(f"ended after {took:.1f} s, with the error's traceback")


@pytest.mark.parametrize("place", ["train", "validation", "export"])
@row("rank 1 of 2 hangs: ..", "ends at the group's timeout; rank 1 is named")
def test_a_rank_that_hangs(tmp_path: Path, data: dict, see: See, place: str) -> None:
    fault = {"kind": "hang", "place": place, "call": 1, "rank": 1, "wait_s": 12}
    run = Live(tmp_path, 2, fault, **data, **TINY)
    assert run.end() == 1
    assert (tmp_path / "held.1").exists()
    [line] = [line for line in run.said if "rank 0" in line]
    assert "rank 1" in line, line
    see(line.split("train_gpt.py: ")[1])


# Files of others.


class Command:
    """A pickle that runs a shell command when it is loaded."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch executed",)


class Flood:
    """A pickle of a few bytes that fills memory, by a call that weights_only allows."""

    def __reduce__(self) -> tuple:
        return bytearray, (1 << 30,)


def zip_bomb(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(200 << 20))
    return path.read_bytes()


def saved(value: object, path: Path) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


@pytest.fixture(scope="session")
def tiny(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A run of the smallest model, with its artifact and its checkpoint of step 2."""
    run = Live(
        tmp_path_factory.mktemp("tiny"),
        0,
        {},
        **data,
        **{**TINY, "ITERATIONS": 2},
        CHECKPOINT_EVERY=2,
    )
    assert run.end() == 0, run.err
    return run


def poisoned_artifact(case: str, run: Live, path: Path) -> bytes:
    whole = zlib.decompress((run.folder / "final_model.int8.ptz").read_bytes())
    path.write_bytes(whole)
    file = torch.load(path, weights_only=True)
    if case == "its pickle runs a command":
        return zlib.compress(saved({**file, "more": Command()}, path))
    if case == "a zlib bomb of 200 MB":
        return zlib.compress(bytes(200 << 20), 9)
    if case == "a zip bomb inside":
        return zlib.compress(zip_bomb(path), 9)
    if case == "its pickle fills memory":
        return zlib.compress(saved({**file, "more": Flood()}, path))
    name, tensor = file["passthrough"].popitem()
    if case == "wrong shapes":
        file["passthrough"][name] = torch.cat([tensor, tensor])
    return zlib.compress(saved(file, path))


def refused(run: Live, *words: str) -> str:
    """One line, nothing executed, no gigabytes taken."""
    seen = failed(run, *words)
    assert not (run.folder / "executed").exists()
    assert (
        "MemoryError" not in seen and "weights_only` set to `False`" not in run.err
    )  # no advice to load it unsafely
    return seen


POISON = (
    "its pickle runs a command",
    "a zlib bomb of 200 MB",
    "a zip bomb inside",
    "its pickle fills memory",
    "wrong shapes",
    "missing names",
)


@pytest.mark.parametrize("case", POISON)
@row("poisoned artifact: ..", "refused in one line; nothing executed")
def test_a_poisoned_artifact(tmp_path: Path, data: dict, tiny: Live, see: See, case: str) -> None:
    (tmp_path / "poison").write_bytes(poisoned_artifact(case, tiny, tmp_path / "made"))
    run = Live(tmp_path, 0, {"artifact": "poison"}, **data, **{**TINY, "ITERATIONS": 2})
    see(refused(run, "the artifact cannot be loaded: "))


def poisoned_checkpoint(case: str, run: Live, path: Path) -> bytes:
    state = run.load(2)
    if case == "its pickle runs a command":
        return saved({**state, "history": Command()}, path)
    if case == "a zip bomb of 200 MB":
        return zip_bomb(path)
    if case == "its pickle fills memory":
        return saved({**state, "history": Flood()}, path)
    if case == "wrong shapes":
        return saved(
            {**state, "tensors": [torch.stack([tensor, tensor]) for tensor in state["tensors"]]},
            path,
        )
    if case == "missing names":
        return saved({name: state[name] for name in ("config", "tensors")}, path)
    return {"cut short": saved(state, path)[:20_000], "no checkpoint": b"tokens" * 1000}[case]


@pytest.mark.parametrize(
    "case",
    [
        "its pickle runs a command",
        "a zip bomb of 200 MB",
        "its pickle fills memory",
        "wrong shapes",
        "missing names",
        "cut short",
        "no checkpoint",
    ],
)
@row("poisoned checkpoint: ..", "refused in one line; nothing executed")
def test_a_poisoned_checkpoint(tmp_path: Path, data: dict, tiny: Live, see: See, case: str) -> None:
    (tmp_path / "poison.pt").write_bytes(poisoned_checkpoint(case, tiny, tmp_path / "made"))
    run = Live(tmp_path, 0, {}, **data, **{**TINY, "ITERATIONS": 2}, RESUME="poison.pt")
    see(refused(run, "RESUME=poison.pt: "))


# Resuming what cannot be resumed.


@row("a checkpoint of another configuration", "refused; every field that differs is named")
def test_another_configuration(tmp_path: Path, data: dict, tiny: Live, see: See) -> None:
    path = tiny.folder / "checkpoints" / "r" / "step_00000002.pt"
    other = {**TINY, "ITERATIONS": 3, "SEED": 7, "MATRIX_LR": 0.5, "TIE_EMBEDDINGS": 0}
    run = Live(tmp_path, 0, {}, **data, **other, RESUME=path)
    see(
        failed(
            run,
            "another configuration",
            "ITERATIONS=2, not 3",
            "SEED=1337, not 7",
            "MATRIX_LR=0.04, not 0.5",
            "TIE_EMBEDDINGS=1, not 0",
        )
    )


@pytest.mark.parametrize("ranks", [0, 2])
@row("RESUME names no file, ranks ..", "one line with the path")
def test_a_missing_checkpoint(tmp_path: Path, data: dict, see: See, ranks: int) -> None:
    run = Live(tmp_path, ranks, {}, **data, **SETTINGS, RESUME="gone.pt")
    see(failed(run, "RESUME=gone.pt", "No such file", launched=ranks > 0))


@row("RESUME=auto without RUN_ID", "exit 2 before anything starts")
def test_resume_of_which_run(tmp_path: Path, data: dict, see: See) -> None:
    settings = {name: value for name, value in {**data, **SETTINGS}.items() if name != "RUN_ID"}
    see(failed(Live(tmp_path, 0, {}, **settings, RESUME="auto"), "RESUME=auto", "RUN_ID", code=2))
    assert not (tmp_path / "logs").exists()


@row("RESUME=auto, and no checkpoint", "starts anew; same result")
def test_nothing_to_resume(tmp_path: Path, data: dict, reference: Live, see: See) -> None:
    run = Live(tmp_path, 0, {}, **data, **SETTINGS, RESUME="auto")
    assert run.end() == 0, run.err
    assert run.resumed() == []
    see(same_result(run, reference, exact=True))
