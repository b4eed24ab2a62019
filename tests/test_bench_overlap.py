"""The overlap bench: all arms train the same, and it says so if one does not. It compares each arm
with overlap off; the bench of the instruments counts what they cost in the same model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL_MODEL, clean_environment

pytestmark = pytest.mark.timeout(300)
FOLDER = ROOT / "tests" / "bench"
ARMS = ["on", "off", "prefetch only", "copy stream only"]


def bench(*arguments: str, script: Path = FOLDER / "overlap.py") -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, script, *arguments],
        text=True,
        capture_output=True,
        timeout=280,
        env=clean_environment(**SMALL_MODEL, VAL_TOKENS=2000, PYTHONPATH=path),
    )


@pytest.mark.slow
def test_all_arms_train_the_same() -> None:
    said = bench("--check", "--steps", "8")
    assert said.returncode == 0, said.stderr
    *lines, verdict = said.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ARMS
    for line, prefetch, stream in zip(lines[::2], (1, 0, 1, 0), (1, 0, 0, 1), strict=True):
        assert line.count(f" prefetch:{bool(prefetch)} ") == 2, "training and validation"
        assert line.count("copy_stream:False(no_cuda)") == 2 * stream
    assert len(set(lines[1::2])) == 1
    assert verdict == "all arms agree to the last digit"


# Other tokens, or another model, in one arm.
SPOILT = """
import overlap

choose = overlap.Bench.choose
def spoilt(bench, arm):
    choose(bench, arm)
    if arm == ARM:
        CHANGE
overlap.Bench.choose = spoilt
overlap.sys.exit(overlap.main())
"""


@pytest.mark.parametrize(
    ("arm", "change"),
    [
        ("off", "bench.run.exchange.data_crc = lambda: 1"),
        ("prefetch only", "bench.run.model.softcap = 29.0"),
    ],
)
@pytest.mark.slow
def test_an_arm_that_trains_otherwise_is_found(tmp_path: Path, arm: str, change: str) -> None:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT.replace("ARM:", f"{arm!r}:").replace("CHANGE", change))
    said = bench("--check", "--steps", "2", script=script)
    assert said.returncode == 1 and f"{arm} differs from on" in said.stderr, said.stderr


@pytest.mark.slow
def test_the_arms_take_turns_and_are_held_against_off(tmp_path: Path) -> None:
    """A slow disk is waited for without overlap, also where a batch crosses two shards."""
    found = tmp_path / "found.json"
    said = bench("--repeats", "2", "--steps", "3", "--slow-ms", "5", "--json", str(found))
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    turns = [line.split("  step ")[0] for line in lines if line.startswith("repeat")]
    wanted = [f"repeat 1/2 {arm}" for arm in ARMS]
    wanted += [f"repeat 2/2 {arm}" for arm in (*ARMS[1:], ARMS[0])]
    assert [" ".join(turn.split()) for turn in turns] == wanted
    report = [line for line in lines if " against off " in line]
    assert len(report) == 4 * 3 and len(lines) == 1 + 2 * 4 + 4 * 4
    off = json.loads(found.read_text())["off"]
    assert min(off["idle"] + off["boundary"]) >= 5


def test_a_wrong_setting_is_one_error() -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "overlap.py", "--check", "--steps", "2"],
        text=True,
        capture_output=True,
        timeout=280,
        env=clean_environment(**{**SMALL_MODEL, "NUM_HEADS": 5}),
    )
    assert done.returncode == 2 and "MODEL_DIM" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_cost_of_instruments() -> None:
    """6 phases a step of one micro-step: input_wait, forward, backward, reduce, clip, optimizer."""
    said = bench("--blocks", "2", script=FOLDER / "instruments.py")
    assert said.returncode == 0, said.stderr
    off, trace = said.stdout.splitlines()
    assert off.startswith("off:   6 phases of ") and trace.startswith("trace: ")
