"""Training started beside tokenize_docs.py: the same losses as with the finished set, and an error
that says what to do if no more shards come."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.live import Live
from running import ROOT, SMALL_MODEL

TOOL = ROOT / "data" / "tokenize_docs.py"
DOCUMENTS = 90
# One document at a time; from the 30th on, only after training has done its third step.
SLOW = """
import sys, time
from pathlib import Path
import dataset, tokenize_docs
log, encode, count = Path({log!r}), tokenize_docs.Tokenizer.encode, 0
def slow(self, texts, threads=1):
    global count
    count += 1
    while {wait} and count == 30 and not (log.exists() and '"step": 3,' in log.read_text()):
        time.sleep(0.05)
    time.sleep(0.03 if count > 30 else 0)
    return encode(self, texts, threads)
tokenize_docs.BATCH_BYTES = 1
tokenize_docs.Tokenizer.encode = slow
dataset.run_tool(tokenize_docs.main)
"""
SETTINGS = {
    **SMALL_MODEL,
    "VOCAB_SIZE": 260,
    "ITERATIONS": 12,
    "VAL_LOSS_EVERY": 6,
    "DATA_STALL_SECONDS": 60,
    "RUN_ID": "r",
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tool's arguments. A step takes 2,048 tokens: about seven documents or four shards."""
    path = tmp_path_factory.mktemp("documents") / "docs.jsonl"
    lines = [json.dumps({"text": f"{number}: " + "text " * 60}) for number in range(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n")
    return [str(path), "--bytes", "--shard-tokens", "500", "--num-val-docs", "5"]


def data_settings(out: Path) -> dict[str, Path]:
    return {
        "DATA_PATH": out / "datasets" / "docs_byte260",
        "TOKENIZER_PATH": out / "tokenizers" / "docs_byte260.json",
    }


def start_tool(words: list[str], out: Path, log: Path, wait: bool = True) -> subprocess.Popen:
    code = SLOW.format(log=str(log), wait=wait)
    tool = subprocess.Popen(
        [sys.executable, "-c", code, *words, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(TOOL.parent)},
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("datasets/*/.producing")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return tool


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_losses_are_those_of_the_finished_set(
    tmp_path: Path, words: list[str], ranks: int
) -> None:
    out, beside, after = tmp_path / "out", tmp_path / "beside", tmp_path / "after"
    tool = start_tool(words, out, beside / "logs" / "r.jsonl")
    try:
        first = Live(beside, ranks, **SETTINGS, **data_settings(out)).finish()
        assert tool.wait(60) == 0
    finally:
        tool.kill()
    second = Live(after, ranks, **SETTINGS, **data_settings(out)).finish()
    assert len(first.digits()) > 12
    assert first.digits() == second.digits()


@pytest.mark.slow
def test_a_tool_that_was_killed_is_named_and_can_continue(tmp_path: Path, words: list[str]) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    tool = start_tool(words, out, run / "never")
    producing = data_settings(out)["DATA_PATH"] / ".producing"
    while '"val_complete": true' not in producing.read_text():
        time.sleep(0.02)
    time.sleep(1)
    tool.send_signal(signal.SIGKILL)
    tool.wait()
    settings = {**SETTINGS, **data_settings(out), "DATA_STALL_SECONDS": 1}
    training = Live(run, **settings)
    assert training.end() == [1]
    (line,) = [line for line in training.said if ".producing" in line]
    command = json.loads(line[line.index("{") :])["command"]
    assert shlex.split(command)[:3] == ["cd", os.getcwd(), "&&"]
    again = [sys.executable, str(TOOL), *words, "--out", str(out)]
    subprocess.run(again, check=True)
    assert not producing.exists()
