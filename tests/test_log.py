"""A disk that is full costs lines of the log, never the run."""

import json
import os
from pathlib import Path

import pytest
from running import train_gpt


def test_a_full_disk_costs_lines_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As long as it is full. The other file, elsewhere, has all."""
    monkeypatch.chdir(tmp_path)
    log = train_gpt.RunLog("r")
    assert log.open(is_new=True) == ""
    log.line("first")
    file = log.files[".txt"].fileno()
    there = os.dup(file)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file)
    for number in range(3):
        log.line(f"step:{number}")
        log.event("step", step=number)
    os.dup2(there, file)
    log.line("last")
    log.warn("said")
    said = capsys.readouterr()
    assert said.out == "first\nstep:0\nstep:1\nstep:2\nlast\nWARNING: said\n"
    assert said.err.count("WARNING: logs/r.txt lacks a line: No space left on device\n") == 3
    lines = log.path.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    text = log.path.read_text()
    assert text.startswith("first\n") and text.endswith("last\nWARNING: said\n")
