"""Training started beside tokenize_docs.py: the same losses as with the finished set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.live import Live
from running import ROOT, SMALL_MODEL, wait_until

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
    while count == 30 and not (log.exists() and '"step": 3,' in log.read_text()):
        time.sleep(0.05)
    time.sleep(0.03 if count > 30 else 0)
    return encode(self, texts, threads)
tokenize_docs.BATCH_BYTES = 1
tokenize_docs.Tokenizer.encode = slow
dataset.run_tool(tokenize_docs.main)
"""
SETTINGS = {**SMALL_MODEL, "VOCAB_SIZE": 260, "ITERATIONS": 12, "VAL_LOSS_EVERY": 6}
SETTINGS |= {"DATA_STALL_SECONDS": 60, "RUN_ID": "r"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tool's arguments. A step takes 2,048 tokens: about seven documents or four shards."""
    path = tmp_path_factory.mktemp("documents") / "docs.jsonl"
    lines = [json.dumps({"text": f"{number}: " + "text " * 60}) for number in range(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n")
    return [str(path), "--bytes", "--shard-tokens", "500", "--num-val-docs", "5"]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_finished_set(tmp_path: Path, words: list[str], ranks: int) -> None:
    out, beside, after = tmp_path / "out", tmp_path / "beside", tmp_path / "after"
    settings = SETTINGS | {"DATA_PATH": out / "datasets" / "docs_byte260"}
    settings["TOKENIZER_PATH"] = out / "tokenizers" / "docs_byte260.json"
    code = SLOW.format(log=str(beside / "logs" / "r.jsonl"))
    command = [sys.executable, "-c", code, *words, "--out", str(out)]
    tool = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "data")})
    try:
        wait_until(lambda: list(out.glob("datasets/*/.producing")))
        first = Live(beside, ranks, **settings).finish()
        assert tool.wait(60) == 0
    finally:
        tool.kill()
    second = Live(after, ranks, **settings).finish()
    assert len(first.measurements()) > 12
    assert first.measurements() == second.measurements()
