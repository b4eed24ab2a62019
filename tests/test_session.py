"""The session on a GPU machine, on a CPU with tiny shapes: a stage that fails says so and the next
one runs, one that has no time left goes on, and the report's tables are its results.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Corpus, clean_environment, config_of, train_gpt, write_split
from steptime import RECIPES
from test_bench_loader import OTHER_SCRIPT

pytestmark = pytest.mark.timeout(300)
sys.path.append(str(ROOT / "tests" / "gpu"))
import session  # noqa: E402  (tests/gpu is not a package)

TINY = {"VOCAB_SIZE": 300, "DEVICE": "cpu", "TORCH_COMPILE": 0, "GRAD_ACCUM_STEPS": 1}
TINY |= {"TRAIN_BATCH_TOKENS": 256, "VAL_BATCH_SIZE": 256, "VAL_TOKENS": 600}
MARKED = "Before.\n<!-- gpu:{} -->\nstale\n<!-- /gpu -->\nAfter.\n"


@pytest.fixture
def make(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A session with the given options, on the corpus."""
    for name, value in clean_environment(**corpus.env, **TINY).items():
        monkeypatch.setenv(name, value)

    def made(*arguments: object) -> session.Session:
        words = ["--quick", "--out", tmp_path / "results", *arguments]
        return session.Session(session.parse(list(map(str, words)))[1])

    return made


def filled(run: session.Session, folder: Path, name: str) -> list[list[str]]:
    """The report's table in a file with this marker: its rows, as cells."""
    page = folder / f"{name}.md"
    page.write_text(MARKED.format(name))
    run.options.into = [page]
    session.report(run)
    text = page.read_text()
    assert text.startswith("Before.\n<!--") and text.endswith("<!-- /gpu -->\nAfter.\n")
    assert "stale" not in text
    assert f"commit {run.facts['commit']}, {run.facts['date']}, tiny shapes" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return rows[:1] + rows[2:]


@pytest.mark.slow
def test_overlap_is_measured_and_reported(make: Callable, tmp_path: Path) -> None:
    run = make()
    assert run.run_stage("overlap"), run.result("overlap")
    found = run.result("overlap")["data"]
    head, *rows = filled(run, tmp_path, "overlap")
    assert [row[0] for row in rows] == ["on", "off", "prefetch only", "copy stream only"]
    for row in rows:
        least, most = min(found[row[0]]["step"]), max(found[row[0]]["step"])
        assert len(row) == len(head) and f"({least:.2f} to {most:.2f})" in row[1]


def test_a_stage_that_fails_says_so_and_the_next_one_runs(make: Callable, tmp_path: Path) -> None:
    run = make()

    def fails(run: session.Session) -> None:
        run.require(["-c", "import sys; sys.exit('no such kernel')"])

    def starts(run: session.Session) -> None:
        run.data = {"passed": 3, "failed": [], "skipped": 0}

    first, second, *_ = (f"tests {name}" for name in session.test_files())
    run.stages = {first: fails, second: starts}
    assert not run.run_stage(run.next_stage()) and run.run_stage(run.next_stage())
    assert run.next_stage() is None
    assert "no such kernel" in run.path(first, ".log").read_text()
    assert filled(run, tmp_path, "tests")[1:] == [["3", "0", "0"]]
    assert f"{first}: " in (tmp_path / "tests.md").read_text()
    assert "**failed**: no such kernel" in (tmp_path / "tests.md").read_text()


# A script with the contract's lines and nothing behind them, quick to end.
SCRIPT = """
import os
last, every = int(os.environ["ITERATIONS"]), int(os.environ["TRAIN_LOG_EVERY"])
for step in range(1, last + 1):
    if step <= 10 or step % every == 0:
        print(f"step:{step}/{last} train_loss:{7 - step / 100:.4f}")
"""


@pytest.mark.slow
def test_a_stage_goes_on_where_its_time_was_over(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.py"
    other.write_text(SCRIPT)
    run, states = make("--against", other), []
    run.stages = {"steps": lambda run: session.in_turns(run, "--ours", str(other))}
    monkeypatch.setattr(session, "BUDGET", 0)  # each call has time for one run
    while run.next_stage() and len(states) < 9:
        run.run_stage("steps")
        states.append(run.result("steps")["status"])
    assert states == ["unfinished"] * 5 + ["done"], run.result("steps")["error"]
    data = run.result("steps")["data"]
    assert {arm: len(runs) for arm, runs in data["runs"].items()} == {"other": 2, "ours": 2}
    head, *rows = filled(run, tmp_path, "steps")
    assert [row[0] for row in rows] == ["other", "ours"] and head[2] == "ratio to other"
    assert rows[0][2] == "1.000" and [row[-1] for row in rows] == ["2", "2"]
    assert [row[5] for row in rows] == ["same", "reference"]


def test_recipes_are_measured_together_and_alone_where_they_can_gain(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(session, "in_turns", lambda run, *words: called.append(words[1::2]))
    for ranks, devices in ((1, []), (1, ["H200"]), (8, ["H100"] * 8)):
        run = make("--ranks", ranks)
        run.options.quick = False
        run.facts = {"devices": devices}
        session.time_recipes(run)
    cpu, one, eight = called
    assert "qkv_operator" in one and "qkv_operator" in eight and "operator" not in str(cpu)
    assert "fewest_micro_steps" in one and "fewest_micro_steps" not in str(eight)
    assert "exchange_shards" in eight and "exchange_shards" not in str(one)
    alone = {name for arms in called for arm in arms for name in arm.split("+")}
    assert alone == {name for name in RECIPES if name != "val_resident"}
    recipe = session.steps.recipe
    for arms in called:
        several = [arm.split("+") for arm in arms if "+" in arm]
        assert {name for names in several for name in names} == alone.intersection(arms) - {
            *session.SLOW_RECIPES
        }
        for names in several:
            recipe.combined(recipe.root_text(), [recipe.load(name) for name in names])


def test_a_split_of_full_size_is_a_small_one_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_split(tmp_path / "small", "train", np.arange(40), [40])
    write_split(tmp_path / "small", "val", np.arange(30), [30])
    monkeypatch.setattr(session, "VAL_TOKENS", 70)
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path))
    for _ in range(2):  # a later call finds the folder of an earlier one
        folder = session.full_size(tmp_path / "small")
    shards = train_gpt.Shards(config_of(DATA_PATH=folder), "val")
    assert shards.ends == [0, 70] and train_gpt.Shards(config_of(DATA_PATH=folder), "train").paths
    tokens = np.fromfile(shards.paths[0], "<u2", offset=1024)
    np.testing.assert_array_equal(tokens, np.arange(70) % 30)


STOPPED = """
import sys
sys.path.append(sys.argv[1])
import session
wait = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
session.time_steps = lambda run: run.run(["-c", wait])
session.main(["steps", "--quick", "--out", sys.argv[2]])
"""


def test_told_to_end_it_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, ROOT / "tests" / "gpu", tmp_path]
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL)
    log, deadline, found = tmp_path / "steps.log", time.monotonic() + 60, None
    while not found and time.monotonic() < deadline:
        found = log.exists() and re.search(r"(?m)^(\d+)$", log.read_text())
        time.sleep(0.1)
    child = Path("/proc", found[1])
    assert child.exists()
    process.terminate()
    assert process.wait(60) == 143
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.exists()


@pytest.mark.parametrize(
    ("name", "into", "words"),
    [
        ("speed", True, r"gpu:speed: no such table: take one of tests, steps, "),
        ("steps", False, "results of --quick are for no README"),
    ],
)
def test_what_cannot_be_reported(
    make: Callable, tmp_path: Path, name: str, into: bool, words: str
) -> None:
    run = make()
    run.stages = {"steps": lambda run: None}
    run.run_stage("steps")
    page = tmp_path / "page.md"
    page.write_text(MARKED.format(name))
    run.options.into = [page] if into else []
    with pytest.raises(session.StageError, match=words):
        session.report(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage(tmp_path: Path, corpus: Corpus) -> None:
    """The command itself, one stage a call; on a CPU the tests of tests/gpu are skipped. The other
    script trains as ours does, and has the challenge's loader besides."""
    env, other = clean_environment(**corpus.env, **TINY), tmp_path / "other.py"
    other.write_text((ROOT / "train_gpt.py").read_text() + OTHER_SCRIPT)
    command = [sys.executable, ROOT / "tests/gpu/session.py", "--quick", "--out", tmp_path]
    command += ["--against", other, "--ranks", "2"]

    def call(*words: object) -> str:
        done = subprocess.run(
            [*command, *map(str, words)], env=env, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    names = re.findall(r"(?m)^(.+?) +to do$", call("list"))
    assert len(names) == 12
    for name in names:
        assert f"{name}: done" in call(), name
    assert "all stages are over" in call("all")
    page = tmp_path / "page.md"
    page.write_text("".join(MARKED.format(name) for name in session.TABLES))
    call("report", "--into", page)
    text = page.read_text()
    assert "Not measured" not in text and "**" not in text
    assert text.count(" ranks: 2, torch ") == text.count("tiny shapes") == len(names) - 1
    curves = json.loads((tmp_path / "quality_other.json").read_bytes())["data"]
    assert curves["ours"] == curves["other"] and len(curves["ours"]["losses"]) > 10
    for step, loss in curves["ours"]["losses"].items():
        assert f"| {step} | {loss:.4f} | {loss:.4f} |" in text
    [loader] = re.findall(r"(?m)^\| ours \|(?: [\d.]+ \([\d.]+ to [\d.]+\) \|){5} 1 \|$", text)
    found = json.loads((tmp_path / "loader.json").read_bytes())["data"]["ours"]
    least = min(run["median"] for run in found)
    assert f"({least:.3f} to " in loader
    for stage in ("steps", "validation", "recipes"):
        found = json.loads((tmp_path / f"{stage}.json").read_bytes())["data"]
        assert found["reference"] == "other" and found["runs"].keys() >= {"other", "ours"}
        assert found["identity"]["plan"][-1] == 2
    assert "world_size:2 " in (tmp_path / "quality_other.log").read_text()
