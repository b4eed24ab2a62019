"""Tests of tests/gpu/session.py on a CPU, with scripts that print what a trainer prints."""

import json
import re
import shutil
import subprocess
import sys
import time
import venv
from collections import namedtuple
from pathlib import Path

import pytest
import session
from running import ROOT, Call, Corpus, clean_environment

# A stand-in for a trainer: it writes how it was called, prints step lines, and writes a trace. Like
# the challenge's script, it does not flush its output.
SCRIPT = """
import gzip, json, os, time
last, every = int(os.environ["ITERATIONS"]), int(os.environ.get("TRAIN_LOG_EVERY", 1))
off = os.environ.get("TRAIN_PREFETCH") == "0"
varies = os.environ.get("DETERMINISTIC") != "1"
with open(os.environ["NOTES"], "a") as notes:
    print(NAME, "off" if off else "on", os.environ.get("TRACE_STEPS", "-"), file=notes)
if NAME == "hangs":
    time.sleep(600)
print("sdp_backends:cudnn,flash,math chosen:cudnn")
losses = [7 - step / 100 for step in range(1, last + 1)]
for step, loss in enumerate(losses, 1):
    if step <= 10 or step % every == 0:
        took = step * (MS + off)
        print(f"step:{step}/{last} train_loss:{loss:.4f} train_time:{took}ms")
if every > 1:
    time.sleep(600)  # a validation, which the session does not wait for
os.makedirs("logs")
if varies:
    losses[20:] = [loss + os.getpid() / 1e9 for loss in losses[20:]]
with open("logs/run.jsonl", "w") as log:
    for loss in losses:
        event = {"event": "step", "train_loss": loss, "input_wait_percent": 9.0 if off else 0.5}
        print(json.dumps(event), file=log)
with open("final_model.pt", "w") as weights:
    print(losses, file=weights)
print("peak memory allocated: 8000 MiB reserved: 8200 MiB")
copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10, "dur": 10}
copy["args"] = {"bytes": 4096}
starts = [40] if off else [8, 9, 15]
kernels = [{"cat": "kernel", "name": "k", "ts": ts, "dur": 4} for ts in starts]
with gzip.open("logs/run.trace.json.gz", "wt") as file:
    json.dump({"traceEvents": [copy, *kernels]}, file)
"""
GPU = {"devices": ["NVIDIA H200"], "used_gb": [30.0], "capability": 9, "torch": "2", "cuda": "13"}
CPU = {"devices": [], "used_gb": [], "capability": None, "torch": "2", "cuda": None}


hash_weights, check_settings = session.hash_weights, session.CHECK_SETTINGS


def set_facts(monkeypatch: pytest.MonkeyPatch, facts: dict) -> None:
    """Let the session find this machine."""
    monkeypatch.setattr(session, "FACTS", f"print({json.dumps(facts)!r})")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, corpus: Corpus, tmp_path: Path) -> None:
    for name, value in clean_environment(**corpus.env, NOTES=tmp_path / "notes").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "hash_weights", Path.read_text)
    monkeypatch.setattr(session, "CHECK_SETTINGS", "print([])")
    set_facts(monkeypatch, CPU)


def script(folder: Path, name: str, ms: int) -> Path:
    (folder / f"{name}.py").write_text(f"NAME, MS = {name!r}, {ms}\n{SCRIPT}")
    return folder / f"{name}.py"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text("Before.\n<!-- gpu -->\nstale\n<!-- /gpu -->\nAfter.\n")
    return path


@pytest.fixture
def words(tmp_path: Path, page: Path) -> list[object]:
    """Return the options of a quick session whose trainer is the stand-in."""
    words = ["--ours", script(tmp_path, "mine", 4), "--into", page, "--out", tmp_path / "out"]
    return [*words, "--quick", "--repeats", 2]


def read_notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def read_rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]


def test_the_variants_are_measured_alternately_and_the_table_is_written(
    tmp_path: Path, call: Call, page: Path, words: list
) -> None:
    words += ["--against", script(tmp_path, "other", 8), "--only", "times", "traces"]
    code, out, err = call(session.main, *words)
    assert code == 0 and out == f"{page}: the tables are written\n", err
    turn = ["other on -", "mine on -", "mine off -"]
    assert read_notes(tmp_path) == 3 * turn + ["mine on 4", "mine off 4"]
    text = page.read_text()
    assert text.startswith("Before.\n<!-- gpu -->\n|") and text.endswith("<!-- /gpu -->\nAfter.\n")
    table = read_rows(text)
    assert table[0][3] == "loss at step 70" and table[2:] == [
        ["challenge", "8.00 (8.00 to 8.00)", "1.000", "6.3000", "-", "-"],
        ["ours", "4.00 (4.00 to 4.00)", "0.500", "6.3000", "0.50 %", "70.00 %"],
        ["ours, no overlap", "5.00 (5.00 to 5.00)", "0.625", "6.3000", "9.00 %", "0.00 %"],
    ]
    assert "CPU, torch 2, CUDA None, ranks 1, commit " in text
    assert text.splitlines()[-3].endswith(", tiny shapes.")


def test_equal_runs_estimates_and_recipes_are_compared(
    tmp_path: Path, call: Call, page: Path, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply_recipe(options: object, command: list[str], *_: object) -> str:
        assert command[1:4] == [str(ROOT / "tools/recipe.py"), "apply", "muon_one_bank"]
        script(Path(command[-1]).parent, Path(command[-1]).stem, 2)
        return ""

    run_to_end = session.run_to_end

    def run(options: object, command: list[str], *more: object) -> str:
        is_recipe = command[1].endswith("recipe.py")
        return (apply_recipe if is_recipe else run_to_end)(options, command, *more)

    monkeypatch.setattr(session, "run_to_end", run)
    monkeypatch.setattr(session, "list_fast_recipes", lambda: {"muon_one_bank": {"A": "1"}})
    monkeypatch.setattr(session, "estimate_step", lambda *_: {"ms": 5.0, "memory_mb": 4194})
    code, _, err = call(session.main, *words, "--only", "times", "repeats", "estimate", "recipes")
    assert code == 0, err
    text = page.read_text()
    rows = {row[0]: row[1:] for row in read_rows(text)}
    assert rows["ms per step"] == ["5.0", "4.0", "0.80"]
    assert rows["peak memory allocated (MB)"] == ["4,194", "8,389", "2.00"]
    assert rows["as usual"][::2] == ["differ from step 21 on", "differ"]
    assert rows["DETERMINISTIC=1"] == ["equal", "0", "equal", "cudnn"]
    assert rows["muon_one_bank"] == ["2.00", "0.500", "6.3000"]
    assert "The attention kernel is cudnn; PyTorch may choose from cudnn,flash,math." in text


def test_an_interrupted_session_continues_and_repeats_no_part(
    tmp_path: Path, call: Call, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    words += ["--only", "times"]
    time_steps = session.time_steps
    begun = []

    def interrupted(*arguments: object) -> dict:
        begun.append(arguments)
        if len(begun) == 4:
            sys.exit(143)  # as after SIGTERM
        return time_steps(*arguments)

    monkeypatch.setattr(session, "time_steps", interrupted)
    assert call(session.main, *words)[0] == 143
    assert len(read_notes(tmp_path)) == 3
    monkeypatch.setattr(session, "time_steps", time_steps)
    code, _, err = call(session.main, *words)
    assert code == 0 and len(read_notes(tmp_path)) == 6, err
    assert call(session.main, *words)[0] == 0 and len(read_notes(tmp_path)) == 6, "all are done"
    code, _, err = call(session.main, *words, "--steps", 5)
    assert code == 1 and "holds results of another session (options differ)" in err
    assert "choose another folder with --out, or delete it" in err


def test_a_call_ends_before_a_part_that_would_take_longer(
    tmp_path: Path, call: Call, page: Path, words: list
) -> None:
    """A part of a tiny model is estimated to take 5 s, so only one begins in less than 5 s."""
    words += ["--only", "traces"]
    code, out, err = call(session.main, *words, "--minutes", 0.08)
    assert code == 3 and "1 parts are left; run the same command again" in err
    assert out == f"{tmp_path / 'out/report.md'}: what is known so far\n"
    assert "stale" in page.read_text() and read_notes(tmp_path) == ["mine on 4"]
    assert call(session.main, *words)[0] == 0
    assert read_notes(tmp_path) == ["mine on 4", "mine off 4"]


def test_a_part_that_does_not_fit_into_the_minutes_is_left_and_a_shorter_one_is_run(
    words: list, tmp_path: Path
) -> None:
    options = session.parse_options([*map(str, words), "--minutes", "1"])
    options.results = {}
    done = []
    parts = [
        session.Part(f"times: {name}", seconds, lambda name=name: done.append(name) or {"ms": 1.0})
        for name, seconds in (("first", 90.0), ("long", 90.0), ("short", 30.0))
    ]
    assert not session.run_parts(options, parts) and done == ["first", "short"]
    assert session.run_parts(options, parts) and done == ["first", "short", "long"]


def test_a_part_that_hangs_is_ended_with_the_call_and_tried_again_last(
    tmp_path: Path, call: Call, words: list
) -> None:
    words += ["--only", "times", "--against", script(tmp_path, "hangs", 1)]
    begun = time.monotonic()
    code, _, err = call(session.main, *words, "--minutes", 0.04)
    assert code == 3 and "the minutes of this call ended before it was done" in err
    assert time.monotonic() - begun < 30
    assert read_notes(tmp_path) == ["hangs on -"]
    assert call(session.main, *words, "--minutes", 0.08)[0] == 3
    assert read_notes(tmp_path)[:2] == ["hangs on -", "mine on -"]


def test_a_part_that_fails_does_not_end_the_session(
    tmp_path: Path, call: Call, page: Path, words: list
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('too large')")
    words += ["--only", "times", "--against", broken]
    code, _, err = call(session.main, *words)
    assert code == 1 and "the same command tries these parts again" in err
    text = page.read_text()
    assert "ended before step 70: ValueError: too large" in text
    assert {row[0]: row[1] for row in read_rows(text)}["challenge"] == "-"
    assert {row[0]: row[2] for row in read_rows(text)}["ours"] == "-"


def test_a_dry_run_lists_the_parts_and_everything_that_is_missing(
    tmp_path: Path, call: Call, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(session.main, *words, "--dry-run")
    assert (code, err) == (0, "") and not (tmp_path / "out").exists()
    assert "none has been measured" in out and "repeats: DETERMINISTIC=1, run 2\n" in out
    set_facts(monkeypatch, GPU)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2e9))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "gcc" else name)
    monkeypatch.setattr(session, "PACKAGES", {"no_package": "tests/requirements.txt"})
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "nowhere"))
    words.remove("--quick")
    code, out, err = call(session.main, *words, "--dry-run", "--ranks", 2)
    assert code == 1 and "parts and estimates of their minutes on 2 H100" in out
    expected = [
        "the package no_package is missing; run .* -m pip install -r .*tests/requirements.txt",
        "the program gcc is missing; torch.compile needs it; install gcc and g",
        "--ranks 2 is more than the 1 GPUs of this machine",
        "GPU 0: 30 GB of its memory are in use; end what runs on it",
        ".*: 2.0 GB of disk space are free, but 5 GB are needed",
        ".*/out: 2.0 GB of disk space are free, but 5 GB are needed",
        "DATA_PATH=.*nowhere does not exist; run `python3 data/quickstart.py --prepare-only`, or",
    ]
    lines = err.splitlines()
    assert len(lines) == len(expected)
    for pattern, line in zip(expected, lines, strict=True):
        assert re.match(f"error: {pattern}", line), line
    set_facts(monkeypatch, CPU)
    code, _, err = call(session.main, *words)
    assert code == 1 and "error: torch sees no GPU; use a machine with a GPU" in err
    assert not (tmp_path / "notes").exists()


def test_data_that_do_not_fit_the_settings_are_found_before_the_first_part(
    tmp_path: Path, call: Call, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are those of the trainer."""
    monkeypatch.setattr(session, "CHECK_SETTINGS", check_settings)
    monkeypatch.setenv("VOCAB_SIZE", "1000")
    monkeypatch.setenv("VAL_TOKENS", "5")
    code, out, err = call(session.main, *words, "--dry-run")
    assert code == 1 and "repeats: " in out
    assert re.search(r"error: VOCAB_SIZE=1000 does not fit \S+, which has \d+ tokens; set ", err)
    assert "error: VAL_TOKENS=5 must be 0 (all tokens) or greater than TRAIN_SEQ_LEN" in err


def test_missing_packages_are_reported_by_one_line_each(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    program = ROOT / "tests/gpu/session.py"
    done = subprocess.run([python, program, "--quick"], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    install = f"{python} -m pip install -r {ROOT / 'tests/requirements.txt'}"
    assert f"error: the package pytest is missing; run {install}\n" in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def test_fused_mlp_is_left_out_on_other_gpus_than_an_h100(
    call: Call, words: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"add_compiled", "coordinate_descent", "fewest_micro_steps", "fused_mlp"}
    listed |= {"max_autotune", "muon_one_bank"}
    for facts, recipes in (
        (GPU | {"used_gb": [0.1]}, listed),
        (GPU | {"used_gb": [0.1], "capability": 8}, listed - {"fused_mlp"}),
    ):
        set_facts(monkeypatch, facts)
        code, out, err = call(session.main, *words, "--dry-run")
        assert code == 0 and set(re.findall(r"recipes: (\w+)", out)) == recipes, err
    assert session.list_fast_recipes()["fused_mlp"] == {"FUSED_MLP": "1"}


def test_counts_and_names_of_tests_are_read_from_pytest(words: list) -> None:
    options = session.parse_options([*map(str, words)])
    expressions = " or ".join(f"({expression})" for expression in session.TEST_PARTS.values())
    found = session.run_tests(options, f"({expressions}) and equal_the_shards")
    assert sum(found["counts"].values()) == 17, "they are skipped if there is no GPU"
    assert found["failed"] == []


@pytest.mark.slow
def test_the_trainer_is_measured(
    tmp_path: Path, call: Call, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "hash_weights", hash_weights)
    for name, value in {"VOCAB_SIZE": 300, "DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, str(value))
    recipes = {"muon_one_bank": {"MUON_ONE_BANK": "1"}}
    monkeypatch.setattr(session, "list_fast_recipes", lambda: recipes)
    monkeypatch.setattr(session, "RECIPE_RUNS", 1)
    set_facts(monkeypatch, CPU)
    words = ["--quick", "--repeats", 1, "--steps", 4, "--into", page, "--ranks", 1]
    words += ["--out", tmp_path / "out", "--only", *session.KINDS[1:]]
    code, _, err = call(session.main, *words)
    rows = {row[0]: row[1:] for row in read_rows(page.read_text())}
    assert code == 0 and {"ours", "ours, no overlap", "muon_one_bank"} <= rows.keys(), err
    assert rows["DETERMINISTIC=1"] == rows["as usual"] == ["equal", "0", "equal", "flash"]
    assert float(rows["ms per step"][0]) > 0 and float(rows["muon_one_bank"][0]) > 0
