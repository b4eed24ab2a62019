"""Tests of waits: for a device, for other ranks, for the disk. Each is reported, and each ends.

Only a GPU can hang in a kernel. Here a rank that sleeps stands in for the device or the rank that
does not answer; the timeouts are gloo's, which PyTorch sets by the same call as NCCL's.
"""

import errno
import os
import re
import signal
import time
from pathlib import Path

import pytest
from faults.live import Live, edit_each_step
from running import SMALL_MODEL, make_config, make_log, make_runtime, open_data
from running import train_gpt as tg

SOON = {"WAIT_SECONDS = 60.0": "WAIT_SECONDS = 1.0"}
SHORT_TIMEOUT = {
    "COLLECTIVE_TIMEOUT = timedelta(minutes=10)": "COLLECTIVE_TIMEOUT = timedelta(seconds=3)"
}


def test_a_rank_that_waits_says_for_what_with_the_stacks_of_its_threads(
    data: dict, tmp_path: Path
) -> None:
    """The run goes on: rank 1 was only slow."""
    slow = edit_each_step("if self.step == 3 and self.runtime.rank == 1: time.sleep(3.5)")
    run = Live(tmp_path, 2, SOON | slow, **data).finish()
    waits = re.findall(r"WARNING: rank 0 has been waiting for (\d+) s after step (\d+) ", run.err)
    assert len(waits) == 1 and int(waits[0][0]) >= 1 and waits[0][1] == "3"
    assert "for all ranks to join a sum; it goes on waiting" in run.err
    report = run.text.split("the stacks of its threads:\n")[1]
    assert "in all_reduce" in report and "in train_step" in report and "Thread 0x" in report
    assert run.events("end")[0]["status"] == "finished"


@pytest.mark.parametrize("where", ["pack", "save"])
def test_work_of_one_rank_may_take_longer_than_a_collective_of_training(
    data: dict, tmp_path: Path, where: str
) -> None:
    lines = {
        "pack": "        data, tensor_bytes, raw_bytes = pack(state, run.config)\n",
        "save": '        write_atomic(path, data, "step.tmp")\n    except',
    }
    indent = " " * 8
    slow = {lines[where]: f"{indent}time.sleep(6)\n{lines[where]}"}
    run = Live(tmp_path, 2, SHORT_TIMEOUT | slow, **data | {"ITERATIONS": 4})
    run.finish()


def test_a_collective_of_training_that_hangs_ends_the_run(data: dict, tmp_path: Path) -> None:
    slow = edit_each_step("if self.step == 3 and self.runtime.rank == 1: time.sleep(30)")
    start = time.monotonic()
    run = Live(tmp_path, 2, SHORT_TIMEOUT | slow, **data)
    run.wait_until(lambda: any("rank 0: " in line for line in run.error_lines))
    run.kill()
    assert time.monotonic() - start < 60 and len(run.events("step")) == 3


def test_the_watchdog_reports_a_wait_once_and_no_short_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tg, "WAIT_SECONDS", 1.5)
    watchdog = tg.Watchdog(rank=3)
    reports: list[str] = []
    watchdog.report = reports.append
    watchdog.step = 41
    watchdog.start()
    for _ in range(20):
        with watchdog.waiting("a short answer"):
            time.sleep(0.01)
    with watchdog.waiting("its device"):
        time.sleep(5)
    [report] = reports
    assert re.match(r"rank 3 has been waiting for \d s after step 41 for its device; ", report)


def test_a_deterministic_run_asks_pytorch_for_deterministic_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What PyTorch then does on a GPU is described in its documentation; here the switches."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert not tg.torch.are_deterministic_algorithms_enabled()
    make_runtime(make_config(DEVICE="cpu")).start(None)
    assert not tg.torch.are_deterministic_algorithms_enabled()
    try:
        make_runtime(make_config(DEVICE="cpu", DETERMINISTIC=1)).start(None)
        assert tg.torch.are_deterministic_algorithms_enabled()
        assert tg.torch._inductor.config.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        tg.torch.use_deterministic_algorithms(False)
        tg.torch._inductor.config.deterministic = False
        tg.torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_deterministic_run_has_the_same_digits_on_a_cpu(
    data: dict, tmp_path: Path, reference_run
) -> None:
    run = Live(tmp_path, **data | {"DETERMINISTIC": 1}).finish()
    assert run.measurements() == reference_run(0).measurements()
    assert run.artifact() == reference_run(0).artifact()


def test_the_export_of_a_trace_is_not_training_time(data: dict, tmp_path: Path) -> None:
    line = "            profiler.export_chrome_trace(str(path))\n"
    edits = {line: f"            time.sleep(5)\n{line}"}
    settings = data | {"TRACE_STEPS": 3, "CHECKPOINT_EVERY": 0}
    run = Live(tmp_path, 0, edits, **settings).finish()
    assert "trace: logs/r.trace.json.gz" in run.text
    assert run.events("step")[-1]["train_time_ms"] < 5000


def test_a_signal_while_a_step_is_compiled_ends_with_the_usual_line(
    data: dict, tmp_path: Path
) -> None:
    """A signal to the process group also ends the compiler, whose error is not shown."""
    edits = edit_each_step(
        "if self.step == 6:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    import logging\n"
        "    logging.getLogger('torch._inductor').error('a page of traceback')\n"
        "    raise RuntimeError('the compiler was ended')"
    )
    run = Live(tmp_path, 0, edits, **data)
    assert run.wait_for_exit() == [130]
    assert "Traceback" not in run.err and "a page of traceback" not in run.err
    assert run.error_lines == [
        "interrupted in step 7, before it was complete; the newest checkpoint is of step 4; to "
        "resume: RUN_ID=r RESUME=auto <command>"
    ]
    assert run.status == ("interrupted", 130)
    assert "the compiler was ended" in run.text  # the log has the traceback
    assert Live(tmp_path, **data | {"RESUME": "auto"}).finish().resumed_steps() == [4]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_undo_the_new_one(
    data: dict, tmp_path: Path
) -> None:
    line = "            path.unlink()\n"
    edits = {line: "            raise OSError(16, 'Device or resource busy')\n"}
    run = Live(tmp_path, 0, edits, **data | {"CHECKPOINT_KEEP": 1}).finish()
    assert [event["step"] for event in run.events("checkpoint")] == [4, 8, 12, 16, 20]
    assert "could not be saved" not in run.text and run.checkpoint_steps() == [4, 8, 12, 16, 20]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_fsync_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Another error of fsync is an error."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "file"
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            tg.write_atomic(path, b"data", "file.tmp")
        assert list(tmp_path.iterdir()) == []
    else:
        tg.write_atomic(path, b"data", "file.tmp")
        assert path.read_bytes() == b"data" and list(tmp_path.iterdir()) == [path]


def test_the_last_line_names_only_a_resume_that_is_possible(data: dict, tmp_path: Path) -> None:
    """No checkpoint can be written, so there is nothing to resume from."""
    (tmp_path / "checkpoints/r/step.tmp").mkdir(parents=True)
    run = Live(tmp_path, **data | {"ITERATIONS": 100_000}).wait_for_line("step:5/")
    for pid in run.codes:
        os.kill(pid, signal.SIGTERM)
    assert run.wait_for_exit() == [143]
    [line] = run.error_lines
    assert re.fullmatch(r"interrupted after step \d+; no checkpoint was saved", line)


def test_a_checkpoint_is_serialized_once(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**{**SMALL_MODEL, **data, "RUN_ID": "r"})
    run = tg.Trainer(config, make_runtime(config), make_log(), open_data(config))
    run.initial_groups = []
    saved: list[object] = []
    places: list[object] = []
    save, load = tg.torch.save, tg.torch.load
    monkeypatch.setattr(tg.torch, "save", lambda value, file: (saved.append(1), save(value, file)))
    monkeypatch.setattr(
        tg.torch,
        "load",
        lambda file, place, **more: (places.append(place), load(file, place, **more)),
    )
    assert tg.checkpoint_bytes(tg.snapshot(run))
    assert saved == [1] and places == ["cpu"]
