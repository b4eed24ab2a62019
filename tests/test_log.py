"""What a run writes about itself: lines for people, events for tools, each in a file of its own.

A console or a disk that is full, closed or gone costs the text that was for it, never the run.
"""

import json
import os
from pathlib import Path

import pytest
from running import train_gpt


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, where logs/ appears."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["logs", "logs/r.jsonl", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_said_before_the_run(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to("/nowhere/at/all")
    problem = train_gpt.RunLog("r").begin()
    assert problem.startswith(name.split("/")[0]) and "\n" not in problem
    assert problem.endswith(": use a folder that can be written")
    assert not [path for path in folder.rglob("*") if "r.txt" in path.name]


def test_a_full_disk_costs_lines_not_the_run(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """As long as it is full. The other file, elsewhere, has all."""
    log = train_gpt.RunLog("r")
    assert log.begin() == ""
    log.line("first")
    file = log.files[".txt"].fileno()
    there = os.dup(file)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file)
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    os.dup2(there, file)
    log.line("last")
    log.warn("once")
    log.warn("once")
    said = capsys.readouterr()
    assert said.out == "first\nstep:0\nstep:1\nstep:2\nlast\nWARNING: once\n"
    assert said.err.count("WARNING: logs/r.txt lacks a line: No space left on device\n") == 3
    lines = log.path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    text = log.path.read_text()
    assert text.startswith("first\n") and text.endswith("last\nWARNING: once\n")
