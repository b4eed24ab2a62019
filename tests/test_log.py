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
    log.enabled = True
    return log


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_for_people_and_events_for_tools(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    log, start = opened("lr.0.04"), time.time()
    shown = "two\nlines: \u2581\n"
    log.line(shown[:-1])
    log.event("step", step=3, loss=1.23456789)
    log.event("end", status="finished")
    assert capsys.readouterr() == (shown, "")
    assert (folder / "logs" / "lr.0.04.txt").read_text(encoding="utf-8") == shown
    step, end = events(folder / "logs" / "lr.0.04.jsonl")
    assert start - 1 < step.pop("time") <= end.pop("time") < time.time() + 1
    assert step == {"event": "step", "step": 3, "loss": 1.23456789}
    assert end == {"event": "end", "status": "finished"}


def test_other_ranks_write_nothing(folder: Path, capsys: pytest.CaptureFixture) -> None:
    log = train_gpt.RunLog("r")
    log.line("step:3")
    log.event("step", step=3)
    assert capsys.readouterr() == ("", "") and os.listdir(".") == []


def test_a_full_disk_costs_lines_and_not_the_run(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """As long as it is full. The other file, elsewhere, has all."""
    log, text = opened("r"), folder / "logs" / "r.txt"
    log.line("first")
    text.rename(folder / "first")
    text.symlink_to("/dev/full")
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    text.unlink()
    log.line("last")
    assert capsys.readouterr().out == "first\nstep:0\nstep:1\nstep:2\nlast\n"
    assert [event["step"] for event in events(text.with_suffix(".jsonl"))] == [0, 1, 2]
    assert text.read_text() == "last\n"
