"""Tests of the GPU tests: they run on the CPU, with a stand-in for CUDA (gpu/cuda_stand_in.py).

So a GPU test that fails by a mistake of its own is found without a GPU. The tests of the fast suite
run on the CPU even if the machine has a GPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import ROOT, byte_data, make_config, make_runtime, run_script

# The tests of the fast suite, which take about half a minute. The others take another minute.
FAST = "batches or no_loss and 1-2 or resumed or trace or time_limit or fused_mlp"
SKIPPED = {  # what the stand-in cannot check: words of the reason, and the number of tests
    "runs no kernels": 1,
    "makes too few steps": 1,
    "needs an H100 or H200": 2,
}


def run_gpu_tests(*options: str) -> dict[str, int]:
    """Run tests/gpu with the stand-in; return {outcome: number of tests}."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", "--stand-in"]
    done = subprocess.run(
        [*command, *options, str(ROOT / "tests/gpu")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = done.stdout.splitlines()
    found = {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", summary)}
    for line in lines:
        if skipped := re.match(r"SKIPPED \[(\d+)\] \S+ (.*)", line):
            [reason] = [words for words in SKIPPED if words in skipped[2]]
            assert int(skipped[1]) <= SKIPPED[reason]
    return found


def test_gpu_tests_pass_on_a_stand_in_for_cuda() -> None:
    """17 tests of batches, two of losses, and four that need a GPU, two of them only at the end."""
    found = run_gpu_tests("-k", FAST)
    assert (found["passed"], found["skipped"], found["deselected"]) == (19, 4, 8)


@pytest.mark.slow
def test_all_gpu_tests_pass_on_a_stand_in_for_cuda() -> None:
    assert run_gpu_tests()["passed"] == 27


def test_a_runtime_of_the_tests_is_on_the_cpu_unless_cuda_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank on CUDA reads LOCAL_RANK, so the helper must give it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert make_runtime(make_config()).device == torch.device("cpu")
    assert make_runtime(make_config(DEVICE="cuda"), rank=1).device == torch.device("cuda:0")


def test_scripts_of_the_tests_run_on_the_cpu_unless_cuda_is_asked_for(tmp_path: Path) -> None:
    trainer = ROOT / "train_gpt.py"
    data = byte_data(tmp_path / "data")
    shown = json.loads(run_script(trainer, tmp_path, "--print-config", **data).out)
    assert shown["device"] == {"value": "cpu", "source": "given"}
    shown = json.loads(run_script(trainer, tmp_path / "auto", "--print-config", DEVICE="auto").out)
    assert shown["device"]["value"] == "auto"
