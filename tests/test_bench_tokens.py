"""The benches of making tokens run to their end: live.py, training while shards are made, and
tokenizing.py, whose arms yield the same tokens.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def bench(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "bench" / name, *arguments],
        text=True,
        capture_output=True,
        timeout=880,
        env=clean_environment(TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=folder.parent / "inductor"),
    )


def test_training_while_shards_are_made(tmp_path: Path) -> None:
    said = bench(tmp_path, "live.py", "--steps", "12", "--repeats", "1")
    assert said.returncode == 0, said.stderr
    assert "making first, then training: " in said.stdout and list(tmp_path.iterdir()) == []


def test_the_arms_of_tokenizing_yield_the_same_tokens(tmp_path: Path) -> None:
    said = bench(tmp_path, "tokenizing.py", "--megabytes", "0.4", "--repeats", "1")
    assert "target: at least 80 % in each arm: " in said.stdout, said.stderr  # reached or missed
    assert said.returncode in (0, 1) and list(tmp_path.iterdir()) == []
