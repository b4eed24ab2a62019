"""tools/roofline.py: what a step reads, writes and launches, and what an edit adds to it."""

import re
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import roofline
import torch
from cli import ToolError
from kernels import Cost, Kernel
from running import ROOT

SCRIPT = ROOT / "tools" / "roofline.py"
TRAINER = ROOT / "train_gpt.py"
# Of a step of train_gpt.py with two layers, on one of 8 GPUs. A larger number is a slower step:
# change it only with the reason.
MOST_KERNELS, MOST_GB, MOST_MB = 212, 15.08, 2_440


def estimate(*arguments: object) -> subprocess.CompletedProcess:
    """The tool as a user runs it."""
    command = [sys.executable, *map(str, (SCRIPT, *arguments))]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"[+-]?\d[\d,]*\.?\d*", line)]


def test_root_does_not_grow_and_an_added_operation_costs_bytes(tmp_path: Path) -> None:
    text = TRAINER.read_text(encoding="utf-8")
    line = "        return self.proj(x, scale)\n"
    assert line in text
    edited = tmp_path / "edited.py"
    edited.write_text(text.replace(line, "        return self.proj(x.cumsum(-1), scale)\n"))
    done = estimate(TRAINER, "NUM_LAYERS=2", "--against", edited, "NUM_LAYERS=2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    [total, more] = [numbers(line) for line in lines if line.startswith("sum ")]
    assert total[0] <= MOST_KERNELS
    assert total[1] <= MOST_GB
    [memory] = [numbers(line) for line in lines if line.startswith("memory: ")]
    assert memory[1] <= MOST_MB
    # The edit reads and writes the hidden values once more in each direction: train_gpt.py is less.
    hidden = 2 * 2 * 65536 * 1024 / 1e9
    assert more[1] < -2 * hidden
    assert any(re.match(r"backward +MLP  .*-\d", line) for line in lines)
    assert re.search(r"in 600 s: [\d,]+ steps more", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["NUM_LAYER=2"], 1, "NUM_LAYER=2: no such setting: did you mean NUM_LAYERS=2"),
        (["another.py"], 2, "another.py: write one file, then NAME=value"),
        (["--rate", "memory=fast"], 2, "memory=fast: write NAME=number"),
    ],
)
def test_says_in_one_line_what_is_wrong(arguments: list[str], code: int, said: str) -> None:
    done = estimate(TRAINER, *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line


def test_another_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ToolError, match=r"^torch 2\.9\.1: .* 2\.11 to 2\.13: install one"):
        kernels.pretend()


def table(*made: Kernel, **more: object) -> roofline.Table:
    cost = Cost(tokens=524_288, micro_steps=2, allowed=[1, 2, 4, 8], kernels=list(made), **more)
    return roofline.Table(cost, roofline.DEVICES["h100"], 8)


def test_a_kernel_takes_the_longer_of_bytes_and_flops() -> None:
    rates = roofline.DEVICES["h100"]
    moving = Kernel("forward", "MLP", rates["memory"] * rates["streamed"])
    product = Kernel("forward", "MLP", 1, rates["products"] * rates["bfloat16"])
    reduced = Kernel("step", "all-reduce", rates["link"], 0, "all-reduce")
    assert roofline.seconds_of(moving, rates, 8) == pytest.approx(1, abs=1e-5)
    assert roofline.seconds_of(product, rates, 8) == pytest.approx(1, abs=1e-5)
    assert roofline.seconds_of(reduced, rates, 8) == pytest.approx(1.75, abs=1e-5)
    assert roofline.seconds_of(reduced, rates, 1) == 0
    # A step has both micro-steps, and one exchange.
    assert table(moving, product, reduced).seconds == pytest.approx(2 * 2 + 1.75, abs=1e-4)


def test_steps_of_a_run_that_begins_to_loop() -> None:
    kernel = Kernel("step", "MLP", roofline.H100["memory"] * roofline.H100["streamed"])
    first, last = table(kernel), table(kernel, kernel, begins=0.25)
    assert roofline.steps_in_run([first]) == pytest.approx(600, rel=1e-4)
    assert roofline.steps_in_run([first, last]) == pytest.approx(150 + 225, rel=1e-4)


def test_says_the_smallest_number_of_micro_steps_that_fits() -> None:
    kernel = Kernel("forward", "MLP", 1e9)
    for peak, words in ((1e9, "=1 on"), (60e9, "=2 on"), (140e9, "=4 on"), (1e12, "no GRAD")):
        assert words in " ".join(table(kernel, peak=peak).words())
