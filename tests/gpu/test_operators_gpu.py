"""The operators of the recipes on a GPU: values and gradients, as in Triton's interpreter."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

pytestmark = [
    pytest.mark.timeout(520),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_operators_values_and_gradients() -> None:
    """Of which the tests are in a file that a GPU and the interpreter share."""
    command = [sys.executable, "-m", "pytest", "-q", "steptime_operators.py"]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
