"""Tests of tests/gpu/session.py on a CPU, with scripts that print what a trainer prints."""

from pathlib import Path

import pytest
import session
from running import Call, Corpus, clean_environment

# A stand-in for a trainer: it writes how it was called, prints step lines, and writes a trace.
SCRIPT = """
import gzip, json, os, time
last, every = int(os.environ["ITERATIONS"]), int(os.environ.get("TRAIN_LOG_EVERY", 1))
off = os.environ.get("TRAIN_PREFETCH") == "0"
with open(os.environ["NOTES"], "a") as notes:
    print(NAME, "off" if off else "on", os.environ.get("TRACE_STEPS", "-"), file=notes)
for step in range(1, last + 1):
    if step <= 10 or step % every == 0:
        took = step * (MS + off)
        print(f"step:{step}/{last} train_loss:{7 - step / 100:.4f} train_time:{took}ms", flush=True)
if every > 1:
    time.sleep(600)  # a validation, which the session does not wait for
os.makedirs("logs")
with open("logs/run.jsonl", "w") as log:
    print(json.dumps({"event": "step", "input_wait_percent": 9.0 if off else 0.5}), file=log)
copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10, "dur": 10}
copy["args"] = {"bytes": 4096}
starts = [40] if off else [8, 9, 15]
kernels = [{"cat": "kernel", "name": "k", "ts": ts, "dur": 4} for ts in starts]
with gzip.open("logs/run.trace.json.gz", "wt") as file:
    json.dump({"traceEvents": [copy, *kernels]}, file)
"""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, corpus: Corpus, tmp_path: Path) -> None:
    for name, value in clean_environment(**corpus.env, NOTES=tmp_path / "notes").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "run_tests", lambda: "3 passed, 0 failed, 1 skipped")
    monkeypatch.setattr(session, "FACTS", 'print(\'{"devices": [], "torch": "2", "cuda": null}\')')


def script(folder: Path, name: str, ms: int) -> Path:
    (folder / f"{name}.py").write_text(f"NAME, MS = {name!r}, {ms}\n{SCRIPT}")
    return folder / f"{name}.py"


def test_the_variants_are_measured_alternately_and_the_table_is_written(
    tmp_path: Path, call: Call
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- gpu -->\nstale\n<!-- /gpu -->\nAfter.\n")
    words = ["--against", script(tmp_path, "other", 8), "--ours", script(tmp_path, "mine", 4)]
    code, out, err = call(session.main, *words, "--into", page, "--repeats", 2, "--quick")
    assert code == 0 and out == f"{page}: the table is written\n", err
    turn = ["other on -", "mine on -", "mine off -"]
    assert (tmp_path / "notes").read_text().splitlines() == 3 * turn + ["mine on 4", "mine off 4"]
    text = page.read_text()
    assert text.startswith("Before.\n<!-- gpu -->\n|") and text.endswith("<!-- /gpu -->\nAfter.\n")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    assert table[0][3] == "loss at step 70" and table[2:] == [
        ["challenge", "8.00 (8.00 to 8.00)", "1.000", "6.3000", "-", "-"],
        ["ours", "4.00 (4.00 to 4.00)", "0.500", "6.3000", "0.50 %", "70.00 %"],
        ["ours, no overlap", "5.00 (5.00 to 5.00)", "0.625", "6.3000", "9.00 %", "0.00 %"],
    ]
    assert "CPU, torch 2, CUDA None, ranks 1, commit " in text
    assert ", tiny shapes. tests/gpu: 3 passed, 0 failed, 1 skipped.\n" in text


@pytest.mark.slow
def test_the_trainer_is_measured(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VOCAB_SIZE": 300, "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, str(value))
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu -->\n<!-- /gpu -->\n")
    words = ["--quick", "--repeats", 1, "--steps", 4, "--into", page, "--ranks", 1]
    code, _, err = call(session.main, *words)
    assert code == 0 and page.read_text().count("| ours") == 2, err
