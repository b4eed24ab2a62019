"""tools/roofline.py: the bytes and kernels of a step, and what an edit adds to them."""

import re
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import roofline
import torch
from cli import ToolError
from kernels import Kernel, Step
from running import ROOT

TRAINER = ROOT / "train_gpt.py"
EDITED = "        return self.proj(x, scale)\n"  # the end of MLP.forward
# The limits for a step of train_gpt.py with two layers on one of 8 GPUs. A larger number means a
# slower step: if you change it, give the reason.
MOST_KERNELS, MOST_GB, MOST_MB = 192, 14.56, 2_440
RATES = dict(roofline.DEVICES["h100"])


def estimate(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, (ROOT / "tools/roofline.py", *arguments))]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def edited_trainer(folder: Path, line: str) -> Path:
    path = folder / "edited.py"
    path.write_text(TRAINER.read_text(encoding="utf-8").replace(EDITED, line))
    return path


def test_a_step_does_not_become_slower_and_an_added_operation_costs_bytes(tmp_path: Path) -> None:
    edited = edited_trainer(tmp_path, "        return self.proj(x.cumsum(-1), scale)\n")
    done = estimate(edited, "NUM_LAYERS=2", "--against", TRAINER, "NUM_LAYERS=2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    sums = [line.split()[1:] for line in lines if line.startswith("sum ")]
    total, more = ([float(word) for word in words] for words in sums)
    rows = {tuple(line.split()[:-4]): line.split()[-4:] for line in lines[: lines.index("")]}
    # q and k of two layers are 512 and 256 of the 1,024 channels of the product: each is read once
    # and written once. The two columns of norms and the rotations add 3 %.
    q_and_k_gb = 2 * 2 * 65536 * (512 + 256) * 2 / 1e9
    norms = float(rows["forward", "q", "k", "norms,", "rope"][1])
    assert q_and_k_gb < norms < 1.04 * q_and_k_gb
    # The loss reads one logit for each token, so its kernel is small. Newton-Schulz is compiled.
    assert ("forward", "softcap,", "loss") not in rows
    assert int(rows["step", "Muon"][0]) <= 82
    # The edit reads and writes the hidden values once more in each direction.
    assert more[1] > 2 * (2 * 2 * 65536 * 1024 / 1e9)
    assert any(re.match(r"backward +MLP  .*\+\d", line) for line in lines)
    assert total[0] - more[0] <= MOST_KERNELS
    assert total[1] - more[1] <= MOST_GB
    end = re.fullmatch(r".*: (\S+) ms \(\+\S+%\), [\d,]+ steps fewer in 600 s, (\S+) MB", lines[-1])
    assert end and float(end[1]) == more[3]
    micro_step = re.search(r"and (\S+) MB more during a micro-step", done.stdout)[1]
    assert int(micro_step.replace(",", "")) - int(end[2].replace(",", "")) <= MOST_MB


def test_flash_attention_3_need_not_be_installed() -> None:
    done = estimate(TRAINER, "NUM_LAYERS=1", "ATTENTION_BACKEND=fa3", "--ranks", "1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_that_is_not_one_graph_is_an_error_of_one_line(tmp_path: Path) -> None:
    edited = edited_trainer(tmp_path, f"        torch._dynamo.graph_break()\n{EDITED}")
    done = estimate(edited, "NUM_LAYERS=1")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {edited}: torch.compile fails: ") and "graph_break" in line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["NUM_LAYER=2"], 1, "NUM_LAYER=2: there is no such setting; did you mean NUM_LAYERS=2"),
        (["another.py"], 2, "another.py: give one file, followed by settings NAME=value"),
        (["--rate", "memory=fast"], 2, "fast must be a number >= 1e-09"),
        (["--rate", "speed=1"], 2, "speed=1: the name must be one of memory, products"),
    ],
)
def test_wrong_usage_is_an_error_of_one_line(arguments: list[str], code: int, words: str) -> None:
    done = estimate(TRAINER, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line


def test_another_torch_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ToolError, match=r"^torch 2\.9\.1: .* 2\.11\.0 to 2\.13\.x; install one"):
        kernels.pretend()


def test_a_kernel_takes_the_longer_of_bytes_and_flops() -> None:
    moving = Kernel("forward", "MLP", RATES["memory"] * RATES["streamed"])
    product = Kernel("forward", "MLP", 1, RATES["products"] * RATES["bfloat16"])
    reduced = Kernel("step", "all-reduce", RATES["link"], 0, "all-reduce")
    seconds = [roofline.estimate_seconds(kernel, RATES, 8) for kernel in (moving, product, reduced)]
    assert seconds == pytest.approx([1, 1, 1.75], abs=1e-5)
    assert roofline.estimate_seconds(reduced, RATES, 1) == 0
    # After a quarter of the run, a step has twice as much work.
    first, last = Step([moving]), Step([moving, product], begins=0.25)
    runs = [roofline.Run(["a.py"], steps, RATES, 8) for steps in ([first], [first, last])]
    assert [run.count for run in runs] == pytest.approx([600, 150 + 225], rel=1e-4)


def make_region(first: int, *dims: tuple[int, int]) -> kernels.Region:
    return kernels.Region(0, first, kernels.merge_dims(dims))


def test_each_element_of_a_buffer_counts_once() -> None:
    """The buffer has 8 rows of 1,024 elements; a head has 64 elements."""
    q = make_region(0, (1024, 8), (1, 512))
    left = make_region(0, (1024, 8), (64, 8), (1, 32))
    right = make_region(32, (1024, 8), (64, 8), (1, 32))
    k = make_region(512, (1024, 8), (1, 256))
    whole = make_region(0, (1, 8192))
    transposed = make_region(0, (1, 1024), (1024, 8))
    for regions, elements in [
        ([q], 8 * 512),
        ([left], 8 * 256),
        ([q, left, right], 8 * 512),
        ([left, right], 8 * 512),
        ([q, k], 8 * 768),
        ([q, whole], 8192),
        ([whole, transposed], 8192),
        ([make_region(0, (1, 512)), make_region(512, (1, 512))], 1024),
        ([kernels.Region(100, is_regular=False), q], 8 * 512 + 100),
    ]:
        assert kernels.count_elements(regions) == elements


def test_attention_is_faster_in_longer_sequences() -> None:
    flops = RATES["products"] * RATES["flash_forward"]
    seconds = [
        roofline.estimate_seconds(Kernel("forward", "attention", 1, flops, "flash", n), RATES, 8)
        for n in (512, 1024, 2048, 32768)
    ]
    # T / (T + 473), relative to 1,024 tokens
    assert seconds == pytest.approx([1.316, 1, 0.842, 0.694], abs=1e-3)


def test_the_slowest_rank_counts() -> None:
    short, long = [Kernel("step", "Muon", 1e9)], [Kernel("step", "Muon", 2e9)]
    step = Step(short, by_rank=[short, long, short])
    run = roofline.Run(["a.py"], [step], RATES, 8)
    assert run.tables[0].GB.sum() == 2


def test_the_smallest_number_of_micro_steps_that_fits_is_printed() -> None:
    for peak, words in ((1e9, ">= 1"), (60e9, ">= 2"), (140e9, ">= 4"), (1e12, ">= 32")):
        step = Step([Kernel("forward", "MLP", 1e9)], peak=peak, micro_steps=2)
        lines = roofline.summary_lines(step, roofline.make_table(step, RATES, 8), RATES)
        assert lines[-1].endswith(words)
