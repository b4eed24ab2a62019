"""What a run writes about itself: lines for people, events for tools, each in a file of its own.

A console or a disk that is full, closed or gone costs the text that was for it, never the run.
"""

import json
import os
import time
from pathlib import Path

import pytest
from running import train_gpt


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, where logs/ appears."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(run_id: str) -> train_gpt.RunLog:
    log = train_gpt.RunLog(run_id)
    assert log.begin() == ""
    return log


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_for_people_and_events_for_tools(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    log, start = opened("lr.0.04"), time.time()
    shown = "two\nlines: \u2581\n"
    log.line(shown[:-1])
    log.warn("of one thing")
    log.warn("of one thing")
    log.event("step", step=3, loss=1.23456789)
    log.end("finished", 0)
    shown += "WARNING: of one thing\n"
    assert capsys.readouterr() == (shown + "finished: see logs/lr.0.04.txt\n", "")
    text = (folder / "logs" / "lr.0.04.txt").read_text(encoding="utf-8")
    assert text == shown + "finished\n"
    step, end = events(folder / "logs" / "lr.0.04.jsonl")
    assert start - 1 < step.pop("time") <= end.pop("time") < time.time() + 1
    assert step == {"event": "step", "step": 3, "loss": 1.23456789}
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "finished", 0)


@pytest.mark.parametrize("name", ["logs", "logs/r.jsonl", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_said_before_the_run(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("/nowhere/at/all")
    problem = train_gpt.RunLog("r").begin()
    assert problem.startswith(name.split("/")[0]) and "\n" not in problem
    assert problem.endswith(": use a folder that can be written")
    assert not [path for path in folder.rglob("*") if "r.txt" in path.name]


def test_a_full_disk_costs_lines_and_not_the_run(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """As long as it is full. The other file, elsewhere, has all."""
    log = opened("r")
    log.line("first")
    file = log.files[".txt"].fileno()
    there = os.dup(file)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file)
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    os.dup2(there, file)
    log.line("last")
    said = capsys.readouterr()
    assert said.out == "first\nstep:0\nstep:1\nstep:2\nlast\n"
    assert said.err.count("WARNING: logs/r.txt lacks a line: No space left on device\n") == 3
    assert [event["step"] for event in events(log.path.with_suffix(".jsonl"))] == [0, 1, 2]
    text = log.path.read_text()
    assert text.startswith("first\n") and text.endswith("last\n")
