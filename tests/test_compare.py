"""logs/compare.py and its picture: what differs, same data, A against B with its refusals, two
runs alone."""

import csv
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli
import compare
import numpy as np
import picture
import pytest
import significance
from configuration import conditions, seed_groups, telling, trace, written
from conftest import ROOT, TOKENS, Call, bpb_of, log_text, read_text
from runs import Run, read_logs

A, B = [2.0600, 2.0612, 2.0607], [2.0801, 2.0790, 2.0812]  # nats of three seeds


def write_log(path: Path, **changed: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(log_text(**{"nats": 2.05, "code": 48000} | changed))
    return path


def arm(folder: Path, name: str, results: list[float], **changed: Any) -> list[str]:
    return [
        str(write_log(folder / f"{name}_seed{seed}.log", seed=seed, nats=nats, **changed))
        for seed, nats in enumerate(results, 1)
    ]


def block(out: str, title: str) -> list[str]:
    """The lines below a title, to the next empty line."""
    return next(part for part in out.split("\n\n") if part.startswith(title)).splitlines()[1:]


def test_what_differs_comes_first_and_counts_runs(tmp_path: Path, call: Call) -> None:
    """Runs that differ in nothing but the seed are a group."""
    values, other = [2.05, 2.06, 2.07], {"matrix_lr": 0.02, "code": 48100}
    logs = arm(tmp_path, "a", values) + arm(tmp_path, "b", [2.04, 2.08], **other)
    code, out, err = call(compare.main, *logs)
    assert (code, err) == (0, "") and out.startswith("What differs in configuration")
    rows = [line.split(None, 1) for line in block(out, "What differs")]
    assert rows == [
        ["seed", "1: 1, 4 | 2: 2, 5 | 3: 3"],
        ["matrix_lr", "0.04: 1-3 | 0.02: 4-5"],
        ["code_bytes", "48000: 1-3 | 48100: 4-5"],
    ]
    group, (first, second) = significance.summary(values), block(out, "Groups")
    start = f"  runs 1-3: nats {group.mean:.5f} std {group.std:.5f}, bits per byte "
    assert first.startswith(start) and second.startswith("  runs 4-5")
    assert "Could not be read" not in out


def test_the_tables_hold_the_numbers_of_the_logs(tmp_path: Path, call: Call) -> None:
    write_log(tmp_path / "train_seed9.log", seed=3, nats=2.0601, code=302_114)
    code, out, _ = call(compare.main, tmp_path)
    head, row = block(out, "Time")
    times = ["43.50", "43.50", "43.50", "44.00", "599.9", "2.1"]
    assert row.split() == ["1", "train_seed9.log", "13,790", *times]
    names = ["#", "log", "steps", "ms/step", "p50", "p99", "max", "train s", "eval s"]
    assert re.split(r"  +", head) == names
    nats, bpb = "2.06010", f"{bpb_of(2.0601):.5f}"
    assert block(out, "Results")[1].split() == [
        *("1", "train_seed9.log", "2.0608", "2.0501", "1.2142", "1.21420", bpb, bpb, nats),
        *("302,114", "15,700,000", "16,002,114", "-2,114"),
    ]
    said = ["  1: its name says seed 9, its log 3", "  1: 2,114 bytes over the cap of 16,000,000"]
    assert block(out, "Remarks") == said
    assert code == 0


def test_a_run_of_a_file_is_named_as_the_tables_name_it(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "cp.txt"
    path.write_text("".join(log_text(seed=n, nats=2 + n / 100, code=48000) for n in (1, 2, 3, 4)))
    first, second, third, fourth, ninth = (f"{path}#{n}" for n in (1, 2, 3, 4, 9))
    code, out, _ = call(compare.main, path, "--a", first, second, "--b", fourth, third)
    rows = [row.split()[1] for row in block(out, "Runs")[1:]]
    assert code == 0 and rows == ["cp.txt", "cp.txt#2", "cp.txt#4", "cp.txt#3"], "each once"
    assert "A: 2 runs, submitted 2.01500" in out and "B: 2 runs, submitted 2.03500" in out
    code, out, _ = call(compare.main, "--a", first, second, ninth, "--b", third, fourth)
    assert code == 1 and f"refused: no run was read from {ninth}\n" in out
    assert block(out, "Could not")[0].endswith(f"{ninth}: no such run: {path} has 4, from #1 on")


# Two runs, and in what they differ that may change a result.
TELLING = {
    "seed, names of the run": ({"seed": 1, "run_id": "a"}, {"seed": 2, "run_id": "b"}, ""),
    "folders and files": ({"log_dir": "/a", "logfile": "a"}, {"log_dir": "/b", "logfile": "b"}, ""),
    "periods": ({"val_every": 1, "training_keep": 2}, {"val_every": 3, "training_keep": 4}, ""),
    "settings": ({}, {"matrix_lr": 0.02, "iterations": 9}, "matrix_lr iterations"),
    "where data lie": ({"data_path": "/a/x"}, {"data_path": "/b/x"}, ""),
    "other data": ({"data_path": "/a/x"}, {"data_path": "/a/y"}, "data_path"),
    "processes": ({"world": 1}, {"world": 8}, "world_size"),
    "the script's size": ({"code": 5}, {"code": 6}, "code_bytes"),
    "code": ({"script": "import os\ndef a(): 1"}, {"script": "import os\ndef b(): 1"}, "code"),
    "what one log alone tells": ({"odd": 1}, {}, ""),
}


@pytest.mark.parametrize("kind", TELLING)
def test_what_may_change_a_result(tmp_path: Path, kind: str) -> None:
    *made, names = TELLING[kind]
    texts = [log_text(**{"code": 9, "seed": seed} | fields) for seed, fields in enumerate(made)]
    runs = [read_text(tmp_path, text).runs[0] for text in texts]
    assert telling(runs) == names.split() and telling(runs, names.upper().split()) == []
    assert seed_groups(runs) == ([[0], [1]] if names else [[0, 1]])
    assert seed_groups(runs, names.split()) == [[0, 1]]


def test_a_condition_is_written_as_one_would_set_it() -> None:
    known = {"train_prefetch": True, "matrix_lr": 0.04, "gpus": 8, "model_params": 1000}
    known |= {"device": "H100", "train_io_copy_stream": "False(no_cuda)", "knob": None}
    text = "TRAIN_PREFETCH=1|MATRIX_LR=0.04|gpus 8|model_params 1,000|device H100|"
    text += "train_io_copy_stream False(no_cuda)|knob not known"
    assert "|".join(written(*pair) for pair in known.items()) == text
    run = Run("a.txt", config={"grad_accum_steps": 0})
    assert conditions(run) == run.config
    run.grad_accum_steps = 8
    assert conditions(run) == {"effective_grad_accum_steps": 8} and trace(run) is None


def test_same_data_is_judged_at_the_last_common_step(tmp_path: Path, call: Call) -> None:
    first = write_log(tmp_path / "1.log", crc=0xA0000000)
    second = write_log(tmp_path / "2.log", crc=0xA0000000, steps=13_800, seed=2)
    other = write_log(tmp_path / "3.log", crc=0xB0000000, seed=3)
    none = write_log(tmp_path / "4.log", seed=4)
    at = "data_crc at step 10000 (the last common one): a0002710: 1-2"
    for logs, answer in (
        ((first, second), f"Same data: yes, {at}\n"),
        ((first, second, other, none), f"Same data: NO, {at} | b0002710: 3; no data_crc: 4\n"),
        ((first, none), "not known (no common step with a data_crc; no data_crc: 2)\n"),
        ((none, write_log(tmp_path / "5.log")), "no data_crc: 1-2)\n"),
    ):
        assert answer in call(compare.main, *logs)[1]


def test_a_better_group_is_shown_with_its_test(tmp_path: Path, call: Call) -> None:
    """Groups are named by their logs, or by their folders."""
    a, b = arm(tmp_path / "a", "a", A), arm(tmp_path / "b", "b", B, matrix_lr=0.02)
    code, out, _ = call(compare.main, "--a", tmp_path / "a", "--b", tmp_path / "b")
    test, lines = significance.welch(A, B, margin=0.005), block(out, "A against B")
    shown = f"  A is better than B by more than 0.005 nats: p = {test.p:.2g} < 0.01; A is "
    assert code == 0 and out.startswith("A against B")
    assert lines[0].startswith(f"{shown}{test.difference:.5f} nats lower")
    group = significance.summary(A)
    assert lines[1] == f"  A: 3 runs, submitted {group.mean:.5f} nats, std {group.std:.5f}"
    code, out, _ = call(compare.main, "--a", *a, "--b", *b, "--margin", "0.019", "--alpha", "0.2")
    assert code == 0 and f"p = {significance.welch(A, B, margin=0.019).p:.2g}, not below 0.2" in out
    notes = [line for line in block(out, "A against B") if "note" in line]
    assert notes == ["  note: A and B differ in matrix_lr: which is better is tested, not why"]
    out = call(compare.main, "--a", *b, "--b", *a)[1]
    assert "not shown that A is better" in out and "nats higher" in out
    assert "no measurable difference" not in out
    same = arm(tmp_path, "same", [nats + 1e-5 for nats in A], matrix_lr=0.02)
    out = call(compare.main, "--a", *a, "--b", *same)[1]
    assert block(out, "A against B")[0].endswith("no measurable difference")


def edited(path: str | Path, change: Callable[[str], str]) -> str:
    Path(path).write_text(change(Path(path).read_text()))
    return str(path)


def test_groups_that_are_no_samples_are_refused(tmp_path: Path, call: Call) -> None:
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", B)
    mixed = [*a[:2], *arm(tmp_path, "m", [2.0607], matrix_lr=0.02)]
    copy, gone = str(write_log(tmp_path / "copy.log", nats=A[0])), str(tmp_path / "gone.log")
    [failed] = arm(tmp_path, "failed", [2.07])
    edited(failed, lambda log: log.split("step:10000/")[0] + "error: rank 2: no more shards\n")
    [diverged] = arm(tmp_path, "n", [math.nan])
    parts = arm(tmp_path, "p", B, partial=" partial_val:1")
    say = "name the runs of one, or say that it does not matter: --allow matrix_lr"
    for ours, theirs, reason in (
        (mixed, b, f"A mixes configurations: matrix_lr differ: {say}"),
        (a[:1], b, "A has 1 run: a test needs two per group at least, better three"),
        ([*a, copy], b, "A: copy.log repeats another run's seed and result: one run counts once"),
        (a, [*b, a[0]], "A and B share a run (equal to the digit): each run belongs to one of"),
        ([*a, failed], b, "A: failed_seed1.log failed: rank 2: no more shards"),
        ([*a, failed], b, "failed_seed1.log (failed, step 1000) has no result to compare: le"),
        ([a[0], a[2], gone], b, f"no run was read from {gone}"),
        (a, [*b, diverged], "n_seed1.log (finished, step 13790) has no result to compare"),
        (a, parts, "some runs were validated on a part of the split: run them again without"),
    ):
        code, out, _ = call(compare.main, "--a", *ours, "--b", *theirs)
        line = block(out, "A against B")[0]
        assert code == 1 and "Welch" not in out and line.startswith("  refused: ")
        assert reason in line
    _, _, err = call(compare.main, "--a", *mixed, "--b", *b, "--allow", "matrix_rl")
    assert err.endswith("matrix_rl: no run has this condition: did you mean matrix_lr?\n")
    code, out, _ = call(compare.main, "--a", *mixed, "--b", *b, "--allow", "MATRIX_LR")
    assert code == 0 and "note: --allow: the runs of a group may differ in MATRIX_LR" in out


def add_line(path: str | Path, line: str) -> None:
    edited(path, lambda log: f"{log}{line}\n")


def test_results_of_different_evaluations_are_compared(tmp_path: Path, call: Call) -> None:
    """A's decoded artifact is worse than B's, its sliding windows, which B has not, are better."""
    a, b = arm(tmp_path, "a", B), arm(tmp_path, "b", A)
    for path, nats in zip(a, A, strict=True):
        nats -= 0.0252
        add_line(path, f"final_sliding_window val_loss:{nats:.8f} val_bpb:{bpb_of(nats):.8f}")
    add_line(b[0], "final_ttt val_loss:9.0 val_bpb:5.0")
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)
    assert code == 0 and "A is better than B by more than 0.005 nats" in out
    assert "A is 0.02520 nats lower" in out
    assert "note: the logs show no difference in configuration between A and B" in out
    assert "note: b_seed1.log: its last result, final_ttt 5.0 (line 24), is taken for" in out
    assert "come from different evaluations (roundtrip, sliding)" in out


def test_nats_of_other_tokenizers_are_not_compared(tmp_path: Path, call: Call) -> None:
    """Also where no log tells its tokens: the bytes a token follow from the results."""
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", [3.39, 3.391, 3.392], factor=1.65)
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)  # as many tokens: another text
    assert code == 1 and "texts: a_seed2.log 151,080,362 bytes and b_seed1.log 249,282,598" in out
    for path in (*a, *b):
        edited(path, lambda log: log.replace(f" tokens:{TOKENS}", ""))
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)
    assert code == 0 and "note: tokenizers differ: compared in bits per byte" in out
    assert "A is better than B by more than 0.0018 bits per byte" in out
    code, out, _ = call(compare.main, "--a", *a, "--b", *b, "--margin", "0.5")
    assert code == 0 and "not shown that A is better than B by more than 0.5 bits per byte" in out


MODDED = """import torch
def f(): pass
{rule}
Running Python 3.12.7
step:0/1670 val_loss:10.8258 train_time:0ms step_avg:0.01ms
step:1500/1670 val_loss:3.3100 train_time:79000ms step_avg:52.67ms
step:1670/1670 val_loss:{loss} train_time:88000ms step_avg:52.69ms
peak memory allocated: 29000 MiB reserved: 30000 MiB
"""


def test_logs_of_modded_nanogpt_are_finished_runs(tmp_path: Path, call: Call) -> None:
    """Their result is the last validation. One that ends before its last step has none."""
    for path in ("a/3.2771", "a/3.2780", "a/3.2776", "b/3.2861", "b/3.2880", "b/3.2866"):
        log = write_log(tmp_path / f"{path}.txt")
        log.write_text(MODDED.format(rule="=" * 100, loss=path[2:]))
    command = ("--a", tmp_path / "a", "--b", tmp_path / "b")
    code, out, _ = call(compare.main, *command)
    assert code == 0 and "A is 0.00933 nats lower" in out and "52.69" in block(out, "Time")[1]
    edited(tmp_path / "a" / "3.2776.txt", lambda log: log.replace("1670/1670", "1600/1670"))
    code, out, _ = call(compare.main, *command)
    assert code == 1 and "3.2776.txt (unfinished, step 1600) has no result to compare" in out
    assert call(compare.main, *command, "--score", "validation")[0] == 0


def test_the_wait_for_input_is_compared_too(tmp_path: Path, call: Call) -> None:
    """And everything is there for other programs: as JSON, and one line per run."""
    a, b = arm(tmp_path, "a", A), arm(tmp_path, "b", A, ms=43.6)
    waits = (2.52, 2.61, 2.53, 152.47, 150.71, 152.09)
    for path, wait in zip(a + b, waits, strict=True):
        on = wait < 9
        io = f"train_io:prefetch:{on} copy_stream:False(no_cuda) prefetch_queue:{2 * on}\nseed:"
        edited(path, lambda log, io=io: log.replace("seed:", io, 1))
        add_line(path, f"input_wait total:{13_790 * wait}ms share:0.1% max:9ms epochs:0.5")
    code, out, _ = call(compare.main, "--a", *a, "--b", *b)
    assert code == 0 and "A and B differ in train_prefetch: which is better" in out
    assert "; A and B have the same mean (95 % interval of the difference -" in out
    low, high = significance.welch(waits[:3], waits[3:]).low, 151.4
    start = "  input_wait: A 2.55 ms per step, B 151.76 (95 % interval of B - A"
    line = block(out, "A against B")[1]
    assert line.startswith(f"{start} {low:+.2f} to +{high}") and line.endswith(" ms)")
    report = json.loads(call(compare.main, "--a", *a, "--b", *b, "--json")[1])
    assert [run["input_wait_ms_per_step"] for run in report["runs"]] == pytest.approx(waits)
    assert report["groups"] == [[0, 1, 2], [3, 4, 5]] and report["equal_conditions"] == 18
    assert report["comparison"]["input_wait"]["low"] == low
    rows = list(csv.DictReader(call(compare.main, *a, *b, "--csv")[1].splitlines()))
    assert [row["train_prefetch"] for row in rows] == ["True"] * 3 + ["False"] * 3
    assert [float(row["val_loss"]) for row in rows] == A + A


def test_two_runs_alone_get_one_sentence_and_a_command(tmp_path: Path, call: Call) -> None:
    """The command has a Python with what runs need, and trains as long; test_ablate.py runs one."""
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    cap, steps = ["--seconds", "600"], ["--steps", "13790"]
    for gone, length in ("none", cap), ("max_wallclock_seconds", steps), ("stopping_early", steps):
        write_log(logs[0], nats=2.05, ms=43, train_prefetch=True)
        write_log(logs[1], nats=2.06, ms=45, train_prefetch=False)
        for log in logs:
            edited(log, lambda text, gone=gone: text.replace(gone, "_"))
        out = call(compare.main, *logs)[1]
        python, tool, *arguments = shlex.split(out.partition("as they were: ")[2])
        assert python == cli.python_of_runs()
        assert arguments[:-1] == ["--vary", "TRAIN_PREFETCH=1,0", *length, "--seeds", "3", "--"]
        paths = [Path(path).resolve() for path in (tool, arguments[-1])]
        assert paths == [ROOT / "logs" / "ablate.py", ROOT / "train_gpt.py"]
    assert "run 2 is 0.00592 bits per byte higher than run 1; it takes 2.00 ms per step more" in out
    assert "not known: no input_wait in these logs\n" in out
    for path, wait in ((logs[0], 0.43), (logs[1], 1.8)):
        add_line(path, f"input_wait total:{13_790 * wait}ms share:1% max:9ms epochs:0.5")
    out = call(compare.main, *logs)[1]
    assert "waiting for input is +1.37 ms of that" in out
    edited(logs[1], lambda log: log.replace(f" tokens:{TOKENS}", " tokens:9999"))
    assert "Two runs: other validation texts: 1.log 24,357 bytes" in call(compare.main, *logs)[1]
    out = call(compare.main, *logs, write_log(tmp_path / "c.log"))[1]
    assert "Two runs" not in out and "decides" not in out


def test_it_names_a_python_that_has_what_runs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "in_own", lambda name: name == "torch")
    assert cli.python_of_runs() == sys.executable
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.python_of_runs() == str(cli.OWN)


# Arguments, the exit code, words of the error.
FAULTS = """
 | 2 | name a log
--a x | 2 | belong together
x --plto y.png | 2 | unrecognized arguments: --plto y.png: --help lists
x --plot y.gif | 2 | .png or .svg
--a x --b y --alpha 2 | 2 | between 0 and 1
x --margin nan | 2 | nan: write a number from 0 on, such as 0.5
x --margin 0.1 | 2 | --margin does nothing without --a: give both
x --json y.json | 2 | write > y.json after the command
--a x,y --b z | 2 | x,y: no such log: write spaces between logs
none.log | 1 | error: none.log: cannot be read: No such file or directory
"""


@pytest.mark.parametrize("row", FAULTS.strip("\n").splitlines())
def test_what_cannot_be_done_is_one_line(call: Call, row: str) -> None:
    arguments, code, reason = row.split(" | ")
    status, out, err = call(compare.main, *arguments.split())
    assert status == int(code) and reason in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(("package", "has"), [("scipy", ""), ("pandas", "pandas")])
def test_a_missing_package_is_one_line(tmp_path: Path, package: str, has: str) -> None:
    """With the command that brings it, and with the project's own Python, where that one has it."""
    logs = arm(tmp_path, "a", A)
    shutil.copytree(ROOT / "logs", tmp_path / "logs", ignore=shutil.ignore_patterns("*cache*"))
    (tmp_path / ".venv/lib/python3.99/site-packages" / has).mkdir(parents=True)
    start = f"import sys; sys.modules[{package!r}] = None; sys.path.insert(0, 'logs')"
    start += "; import cli, compare; sys.exit(cli.run(compare.main))"
    options = ["--csv"] if package == "pandas" else ["--plot", "out.png"]
    command = [sys.executable, "-c", start, *logs, *options]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and not (tmp_path / "out.png").exists()
    own = f"it with {tmp_path}/.venv/bin/python, which has it, or " if has else ""
    remedy = f"{package} is missing: run {own}{sys.executable} -m pip install "
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert remedy in done.stderr
    assert done.stdout.startswith("What differs") == (package != "pandas"), "the table stands"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    figures: list[Any] = []
    monkeypatch.setattr(picture, "save", lambda figure, path: figures.append(figure))
    return figures


def three_arms(folder: Path) -> list[str]:
    logs = arm(folder, "lr1", A, matrix_lr=0.01) + arm(folder, "lr2", B, matrix_lr=0.02)
    return logs + arm(folder, "lr3", [2.07, 2.071, 2.069], matrix_lr=0.03)


def test_a_picture_shows_each_arm(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """It has a title; each arm has a colour and a line of the legend."""
    assert call(compare.main, *three_arms(tmp_path), "--plot", "x.svg")[0] == 0
    figure = drawn[0]
    curves, dots = figure.axes
    assert figure.get_suptitle() == "MATRIX_LR: 3 arms, 3 seeds each"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["MATRIX_LR=0.01", "MATRIX_LR=0.02", "MATRIX_LR=0.03"]
    assert len(curves.lines) == 3 == len({line.get_color() for line in curves.lines})
    assert [len(line.get_xdata()) for line in curves.lines] == [5, 5, 5]
    mean = sum(bpb_of(nats - 0.01) for nats in A) / 3
    assert curves.lines[0].get_ydata()[-1] == pytest.approx(mean, abs=1e-4), "the seeds' mean"
    assert len(curves.collections) == 3, "a band an arm"
    assert curves.get_xlabel() == "training step" and "bits per byte" in curves.get_ylabel()
    assert "mean of" not in curves.get_ylabel(), "nothing is smoothed"
    [[_, place]] = dots.containers[0].lines[0].get_xydata()
    assert place == pytest.approx(sum(map(bpb_of, A)) / 3) and not dots.patches, "no bar"
    assert [len(row.get_offsets()) for row in dots.collections[::2]] == [3, 3, 3], "a dot per seed"
    options = ("--plot", "x.png", "--x", "seconds", "--title", "Mine")
    assert call(compare.main, *three_arms(tmp_path), *options)[0] == 0
    assert drawn[1].axes[0].get_xlabel() == "training time, seconds"
    assert drawn[1].get_suptitle() == "Mine"
    assert drawn[1].axes[0].lines[0].get_xdata()[-1] == pytest.approx(599.9, abs=0.1)


def test_each_run_has_its_own_points(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """Seeds whose lines are at other times meet on one grid, between the points that both have; a
    shorter arm is in the range of y; two points are no curve."""
    logs = [
        write_log(tmp_path / f"{name}_seed{seed}.log", seed=seed, nats=nats, ms=ms, matrix_lr=lr)
        for name, lr, nats in (("a", 0.1, 2.05), ("b", 0.2, 2.4))
        for seed, ms in ((1, 43.5), (2, 47.0))
    ]
    for path in logs[2:]:
        edited(path, lambda log: re.sub(r"(?m)^step:13790/.*\n", "", log))
    assert call(compare.main, *logs, "--plot", "x.png", "--x", "seconds")[0] == 0
    curves = drawn[0].axes[0]
    for line, end in zip(curves.lines, (599.9, 435.0), strict=True):
        x, y = line.get_xydata().T
        assert len(x) >= 5 and x[-1] == pytest.approx(end, abs=0.1) and (x == sorted(x)).all()
        assert (y == y).all() and curves.get_ylim()[0] < y[-1] < curves.get_ylim()[1]
    for path in logs:
        edited(path, lambda log: re.sub(r"(?m)^step:(1|10|1000)/.*\n", "", log))
    assert call(compare.main, *logs, "--plot", "x.png")[0] == 0
    [dots] = drawn[1].axes
    assert "95 % interval" in dots.get_title()
    for path in logs:
        edited(path, lambda log: log.split("final_")[0])
    code, _, err = call(compare.main, *logs, "--plot", "x.png")
    assert code == 1 and "no run has a result, or 3 points of a curve" in err and len(drawn) == 2


def test_the_picture_says_what_must_be_known(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """Parts of the split, other data, runs that are left out; the wait where arms differ in it."""
    a, b = arm(tmp_path, "a", A, partial=" partial_val:1"), arm(tmp_path, "b", B, matrix_lr=0.2)
    for path, wait in [(path, 1) for path in a] + [(path, 9) for path in b]:
        add_line(path, f"input_wait total:{13_790 * wait}ms share:1% slowest:1 epochs:0.5")
    edited(b[0], lambda log: log.split("step:13790/")[0])
    for path in b:
        edited(path, lambda log: log.replace("fineweb10B_sp1024", "mine"))
    assert call(compare.main, *a, *b, "--plot", "x.png")[0] == 0
    assert drawn[0].legends[0].get_title().get_text() == (
        "Note: 1 unfinished run left out; 3 of 5 runs were validated on a part of the split; "
        "the runs have different data: fineweb10B_sp1024, mine"
    )
    wait = drawn[0].axes[2]
    assert wait.get_ylabel() == "waiting for input, ms per step"
    means = [bar.lines[0].get_ydata()[0] for bar in wait.containers]
    assert means == pytest.approx([1, 9]) and len(wait.texts) == 2
    assert call(compare.main, *a, *b, "--plot", "x.png", "--panels", "wait")[0] == 0
    assert len(drawn[1].axes) == 1


def test_a_loss_of_each_step_is_averaged(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    steps = [f"step:{n}/1000 train_loss:{4 + n % 2}" for n in range(1, 1001)]
    (tmp_path / "x.txt").write_text("\n".join(["seed:1", *steps, ""]))
    assert call(compare.main, tmp_path / "x.txt", "--plot", "x.png")[0] == 0
    y = drawn[0].axes[0].lines[0].get_ydata()
    assert len(y) == picture.MANY and max(abs(y[1:-1] - 4.5)) < 0.11


def test_the_range_of_y_shows_how_a_curve_ends() -> None:
    """Without the fall of the first steps; also where most lines are of the first ten."""
    mean = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1.5, 1, 2])
    curve = picture.Curve(np.array([*range(1, 11), 60.0]), mean, 0 * mean)
    low, high = picture.limits([curve])
    assert 0.5 < low < 1 and 4 <= high < 5


def test_runs_whose_logs_tell_no_difference_are_arms_by_their_names() -> None:
    """A seed that is there twice is no seed of one arm: this record's logs do not tell how slow its
    disk was."""
    folder = ROOT / "records/track_non_record_16mb/2026-11-22_OverlapAblation"
    runs = read_logs([folder]).runs
    arms = seed_groups(runs)
    assert [len(arm) for arm in arms] == [3] * 6
    waits = [significance.summary([runs[i].input_wait_per_step() for i in arm]) for arm in arms]
    assert [round(wait.mean, 1) for wait in waits] == [151.8, 2.6, 0.0, 1.4, 1.0, 0.0]


def test_arms_are_named_by_their_logs(tmp_path: Path, drawn: list[Any], call: Call) -> None:
    """Where they differ in more than settings. Folders tell them apart; training losses of two
    tokenizers are not drawn together. Long names are broken between words."""
    logs = [
        write_log(tmp_path / f"f{n}" / "train.log", iterations=n, code=n, nats=2 + n, factor=1 + n)
        for n in (1, 2)
    ]
    for path in logs:
        edited(path, lambda log: re.sub(r"(?m)^step:.* val_loss.*\n", "", log))
    assert call(compare.main, *logs, "--plot", "x.png")[0] == 0
    assert len(drawn[0].axes) == 1 and len(drawn[0].axes[0].containers) == 2
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["f1/train", "f2/train"]
    lines = picture.wrapped("a_name_that_" + "is_much_too_long_" * 8).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 44 and lines[0].endswith("_")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_written_whole(tmp_path: Path, call: Call, suffix: str) -> None:
    logs = three_arms(tmp_path)
    code, _, err = call(compare.main, *logs, "--plot", tmp_path / f"out{suffix}")
    data = (tmp_path / f"out{suffix}").read_bytes()
    assert (code, err) == (0, "") and data.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(data) > 20_000
    assert [path.name for path in tmp_path.iterdir() if path.suffix == suffix] == [f"out{suffix}"]
    code, _, err = call(compare.main, *logs, "--plot", tmp_path / "none" / f"out{suffix}")
    assert code == 1 and err.startswith("error: --plot ") and len(err.splitlines()) == 1
