"""Proves that the overlap benchmark's arms train the same, and that it would say so if they did not."""

import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_MODEL, clean_environment

pytestmark = pytest.mark.timeout(180)
SETTINGS = {**SMALL_MODEL, "VOCAB_SIZE": 300, "VAL_TOKENS": 20_000}


def bench(
    *arguments: str, script: str | None = None, **settings: object
) -> subprocess.CompletedProcess:
    command = [sys.executable, script or str(ROOT / "tests" / "bench" / "overlap.py"), *arguments]
    return subprocess.run(
        command, text=True, capture_output=True, timeout=170, env=clean_environment(**settings)
    )


def test_all_arms_train_the_same() -> None:
    said = bench("--check", "--steps", "8", **SETTINGS)
    assert said.returncode == 0, said.stderr
    *arms, verdict = said.stdout.splitlines()
    assert len(arms) == 4 and verdict == "all arms agree to the last digit"
    assert len({line[17:] for line in arms}) == 1


def test_an_arm_that_trains_on_other_tokens_is_found(tmp_path) -> None:
    source = (ROOT / "tests" / "bench" / "overlap.py").read_text(encoding="utf-8")
    line = '        self.run.overlap = train_gpt.Overlap.of(config, "train", self.runtime.cuda)\n'
    assert source.count(line) == 1
    spoil = "        self.run.plan = self.run.plan._replace(first_row=int(not prefetch))\n"
    script = tmp_path / "overlap.py"
    script.write_text(
        source.replace(line, line + spoil).replace(
            "Path(__file__).resolve().parents[2]", f"{str(ROOT)!r}"
        )
    )
    said = bench("--check", "--steps", "4", script=str(script), **SETTINGS)
    assert said.returncode == 1 and "off differs from on" in said.stderr


def test_the_table_and_its_sentences() -> None:
    said = bench(
        "--repeats", "2", "--steps", "3", DATA_STALL_SECONDS=60, **{**SETTINGS, "VAL_TOKENS": 2000}
    )
    assert said.returncode == 0, said.stderr
    table = said.stdout.split("\n\n")[1].splitlines()
    assert [line[:17].strip() for line in table[1:5]] == [
        "on",
        "off",
        "prefetch only",
        "copy stream only",
    ]
    assert (
        sum(
            " against off, " in line and ("faster" in line or "no measurable difference" in line)
            for line in table[5:]
        )
        == 6
    )


def test_a_wrong_setting_is_one_error() -> None:
    said = bench("--check", NUM_HEADS=5, **{k: v for k, v in SETTINGS.items() if k != "NUM_HEADS"})
    assert said.returncode == 2 and "MODEL_DIM" in said.stderr and "Traceback" not in said.stderr
