"""What a run writes about itself: lines for people, events for tools, each in a file of its own.

An older run of the same name keeps what is its own. A console or a disk that is full, closed or
gone costs the text that was for it, never the run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_MODEL, byte_data, clean_environment, config_of, train_gpt

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, where logs/ and checkpoints/ appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Lines and events.


def test_lines_are_for_people_and_events_for_tools(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    log, start = train_gpt.RunLog("r"), time.time()
    shown = "two\nlines: \u2581\n"
    log.line(shown[:-1])
    log.event("step", step=3, loss=1.23456789)
    log.event("end", status="finished")
    assert capsys.readouterr() == (shown, "")
    assert (folder / "logs" / "r.txt").read_text(encoding="utf-8") == shown
    step, end = events(folder / "logs" / "r.jsonl")
    assert start - 1 < step.pop("time") <= end.pop("time") < time.time() + 1
    assert step == {"event": "step", "step": 3, "loss": 1.23456789}
    assert end == {"event": "end", "status": "finished"}


def test_other_ranks_write_nothing(folder: Path, capsys: pytest.CaptureFixture) -> None:
    old = folder / "logs" / "r.txt"
    old.parent.mkdir()
    old.write_text("rank 0's")
    log = train_gpt.RunLog("r", enabled=False)
    log.line("step:3")
    log.event("step", step=3)
    assert capsys.readouterr() == ("", "")
    assert os.listdir("logs") == ["r.txt"] and old.read_text() == "rank 0's"


# Older runs.


def older_run(name: str) -> None:
    """Of that name, with another beside it."""
    for each in (name, "other"):
        Path("checkpoints", each).mkdir(parents=True)
        Path("checkpoints", each, "step_00000004.pt").write_text(f"{each} saved")
        Path("logs").mkdir(exist_ok=True)
        Path("logs", f"{each}.txt").write_text(f"{each} said\n")
        Path("logs", f"{each}.jsonl").write_text('{"event": "end"}\n')


@pytest.mark.parametrize("name", ["r", "lr.0.04"])
@pytest.mark.row("a new run under an old RUN_ID (..)", "log and events are moved aside")
def test_an_older_run_of_the_same_name_keeps_what_is_its_own(folder: Path, name: str) -> None:
    """Its text, its events, its checkpoints get another name; what RESUME=auto finds is new."""
    older_run(name)
    log = train_gpt.RunLog(name)
    log.line("new")
    log.event("run")
    text, tools = (folder / "logs" / f"{name}.{kind}" for kind in ("txt", "jsonl"))
    assert text.read_text() == "new\n" and [e["event"] for e in events(tools)] == ["run"]
    kept = {path.read_text(): path for path in folder.rglob("*.*") if path.is_file()}
    assert kept.keys() >= {f"{name} said\n", '{"event": "end"}\n', f"{name} saved"}
    assert kept[f"{name} said\n"].suffix == ".txt" and kept[f"{name} saved"].suffix == ".pt"
    assert not (folder / "checkpoints" / name).exists()
    assert train_gpt.find_checkpoint(config_of(RUN_ID=name, RESUME="auto")) is None
    for path, said in (("logs/other.txt", "other said\n"), ("logs/other.jsonl", None)):
        assert Path(path).exists() and said in (None, Path(path).read_text())
    assert Path("checkpoints/other/step_00000004.pt").read_text() == "other saved"


def test_a_resumed_run_goes_on_in_its_files(folder: Path) -> None:
    older_run("r")
    log = train_gpt.RunLog("r", resumed=True)
    log.line("resumed")
    log.event("run")
    assert (folder / "logs" / "r.txt").read_text() == "r said\nresumed\n"
    assert [event["event"] for event in events(folder / "logs" / "r.jsonl")] == ["end", "run"]
    assert (folder / "checkpoints" / "r" / "step_00000004.pt").exists()
    assert len(list(folder.rglob("*.*"))) == 6


@pytest.mark.row("words of files of others with control characters", "are escaped")
def test_words_of_others_cannot_move_the_cursor(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    log = train_gpt.RunLog("r")
    log.line("a\x1b[2Jb\x9bc\udcffd\te\n\u00e9")
    train_gpt.tell("\x07", "stderr")
    shown = "a\\x1b[2Jb\\x9bc\\xdcffd\te\n\u00e9\n"
    assert capsys.readouterr() == (shown, "\\x07\n")
    assert (folder / "logs" / "r.txt").read_text(encoding="utf-8") == shown


# Full and closed.


@pytest.mark.row("disk full under the log, for a while", "lines are lost, later ones are there")
def test_a_full_disk_costs_lines_and_is_a_warning(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """As long as it is full: later lines are there again. The other file, elsewhere, has all."""
    log, text = train_gpt.RunLog("r"), folder / "logs" / "r.txt"
    log.line("first")
    text.rename(folder / "first")
    text.symlink_to("/dev/full")
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    text.unlink()
    log.line("last")
    said = capsys.readouterr()
    assert said.out == "first\nstep:0\nstep:1\nstep:2\nlast\n"
    [warning] = set(said.err.splitlines())
    assert warning.startswith("warning: logs/r.txt: ") and "No space left" in warning
    assert [event["step"] for event in events(text.with_suffix(".jsonl"))] == [0, 1, 2]
    assert text.read_text() == "last\n"


@contextmanager
def console(kind: str) -> Iterator[int]:
    """A file descriptor, full or a closed pipe: nothing can be printed to it."""
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        os.close(reading)
    yield descriptor
    os.close(descriptor)


@pytest.mark.slow
def test_a_run_without_a_console_is_whole(folder: Path) -> None:
    """Its exit code, its files, and in its text what it would have said."""
    settings = {**SMALL_MODEL, **byte_data(folder / "data"), "RUN_ID": "r", "VAL_TOKENS": 400}
    settings |= {"ITERATIONS": 2, "VAL_LOSS_EVERY": 0}
    command, env = [sys.executable, str(ROOT / "train_gpt.py")], clean_environment(**settings)
    with console("closed pipe") as closed, console("full") as full:
        assert subprocess.run(command, env=env, stdout=closed, stderr=full).returncode == 0
    text = (folder / "logs" / "r.txt").read_text(encoding="utf-8")
    assert text.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact ")
    assert [f"\nstep:{step}/2 train_loss:" in text for step in (1, 2)] == [True, True]
    end = events(folder / "logs" / "r.jsonl")[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "finished", 0)
    assert (folder / "final_model.int8.ptz").exists()


@pytest.mark.parametrize("kind", ["full", "closed pipe", "closed", "none"])
def test_an_error_nobody_foresaw_ends_a_run_without_a_console(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With its exit code, and with the reason in the events and in the launcher's report."""

    def fail(*_: object) -> None:
        raise ValueError("an injected error")

    monkeypatch.setattr(train_gpt, "attention_backends", fail)
    monkeypatch.setattr(train_gpt.Runtime, "start", lambda *_: None)  # leaves our signals alone
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    settings = {**SMALL_MODEL, **byte_data(folder / "data"), "RUN_ID": "r"}
    config = config_of(**settings)
    with console(kind) as descriptor, monkeypatch.context() as patch:
        stream = None if kind == "none" else os.fdopen(os.dup(descriptor), "w", 1)
        if kind == "closed":
            stream.close()
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        code = train_gpt.execute(config, {})
    end = events(folder / "logs" / "r.jsonl")[-1]
    assert (code, end["event"], end["status"], end["exit_code"]) == (1, "end", "failed", 1)
    assert "an injected error" in end["error"]
    assert "an injected error" in (folder / "error.json").read_text()
