"""Training may start while tokenize_docs.py makes shards; this does not change the losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.live import Live
from running import ROOT, SMALL_MODEL, wait_until

DOCUMENTS = 90
# A slow tokenize_docs.py: it encodes one document at a time, and it encodes the 30th and later
# documents only after training has done its third step.
SLOW_TOOL = """
import sys, time
from pathlib import Path
import dataset, tokenize_docs
log, encode, count = Path({log!r}), tokenize_docs.Tokenizer.encode, 0
def encode_slowly(self, texts, threads=1):
    global count
    count += 1
    while count == 30 and not (log.exists() and '"step": 3,' in log.read_text()):
        time.sleep(0.05)
    time.sleep(0.03 if count > 30 else 0)
    return encode(self, texts, threads)
tokenize_docs.BATCH_BYTES = 1
tokenize_docs.Tokenizer.encode = encode_slowly
dataset.run_tool(tokenize_docs.main)
"""
SETTINGS = {**SMALL_MODEL, "VOCAB_SIZE": 260, "ITERATIONS": 12, "VAL_LOSS_EVERY": 6}
SETTINGS |= {"DATA_STALL_SECONDS": 60, "RUN_ID": "r"}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return arguments of tokenize_docs.py.

    A training step uses 2,048 tokens, which are about seven documents or four shards.
    """
    path = tmp_path_factory.mktemp("documents") / "docs.jsonl"
    lines = [json.dumps({"text": f"{number}: " + "text " * 60}) for number in range(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n")
    return [str(path), "--bytes", "--shard-tokens", "500", "--num-val-docs", "5"]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_equal_those_of_the_complete_data_set(
    tmp_path: Path, arguments: list[str], ranks: int
) -> None:
    out, beside, after = tmp_path / "out", tmp_path / "beside", tmp_path / "after"
    settings = SETTINGS | {"DATA_PATH": out / "datasets" / "docs_byte260"}
    settings["TOKENIZER_PATH"] = out / "tokenizers" / "docs_byte260.json"
    code = SLOW_TOOL.format(log=str(beside / "logs" / "r.jsonl"))
    command = [sys.executable, "-c", code, *arguments, "--out", str(out)]
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
