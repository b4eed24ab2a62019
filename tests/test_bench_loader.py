"""The loader bench does the same work in every arm, measures what it says, and judges by the stated targets."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, clean_environment, write_split

pytestmark = pytest.mark.timeout(180)

BENCH = ROOT / "tests" / "bench" / "loader.py"
spec = importlib.util.spec_from_file_location("loader_bench", BENCH)
loader = sys.modules["loader_bench"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loader)

PLAIN_ARMS = [name for name, arm in loader.ARMS.items() if arm.needs == "torch"]
SHARDS, SHARD_TOKENS, SEQ_LEN, SPAN = 3, 1500, 16, 129  # a batch: 8 rows and one token more


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 1024, SHARDS * SHARD_TOKENS)


@pytest.fixture(params=[8, 2, 1])
def job(request: pytest.FixtureRequest, tmp_path: Path, tokens: np.ndarray) -> loader.Job:
    """Batches of rank 0 that reach the second epoch."""
    write_split(tmp_path, "train", tokens, [SHARD_TOKENS] * (SHARDS - 1))
    steps = 2 * SHARDS * SHARD_TOKENS // (SPAN * request.param)
    return loader.Job(
        str(tmp_path), request.param, steps, SEQ_LEN, 8 * (SPAN - 1), SHARD_TOKENS, SHARDS
    )


@pytest.mark.parametrize("name", PLAIN_ARMS)
def test_an_arm_yields_the_tokens_of_rank_0(name: str, job: loader.Job, tokens: np.ndarray) -> None:
    arm, seen = loader.ARMS[name](job), 0
    for k, (x, y) in enumerate(itertools.islice(arm, job.steps)):
        span = tokens[np.arange(k * job.ranks * SPAN, k * job.ranks * SPAN + SPAN) % len(tokens)]
        np.testing.assert_array_equal(x, span[:-1].reshape(-1, SEQ_LEN))
        np.testing.assert_array_equal(y, span[1:].reshape(-1, SEQ_LEN))
        seen += 1
    arm.close()
    assert seen == job.steps


def test_boundaries_are_where_the_tokens_of_all_ranks_cross(job: loader.Job) -> None:
    shards = np.arange(job.steps * job.ranks * SPAN) // SHARD_TOKENS
    steps = shards.reshape(job.steps, -1)
    before = np.concatenate([[0], steps[:-1, -1]])
    assert sorted(set(job.boundaries())) == np.flatnonzero(steps[:, -1] > before).tolist()


def test_other_tokens_in_an_arm_end_the_run() -> None:
    same = {loader.OURS: [1, 2, 3], "torch-0": [1, 2, 3]}
    loader.check_tokens(same, 8)
    with pytest.raises(
        loader.BenchError, match=r"arm torch-1, rank 0 of 8: batch 2 has other tokens than ours"
    ):
        loader.check_tokens({**same, "torch-1": [1, 2, 4]}, 8)


def test_exposed_time_is_that_of_the_next_batch_alone(
    job: loader.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the arm (3 s a batch) and the compute (50 s) move."""
    clock = [0.0]

    class Slow(loader.Arm):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            for _ in range(self.job.steps):
                clock[0] += 3
                yield 0, 0

    def work(units: int) -> None:
        clock[0] += units

    monkeypatch.setattr(loader.time, "perf_counter", lambda: clock[0])
    monkeypatch.setitem(loader.WORK, "compute", work)
    run = loader.measure(Slow, job, "compute", 50)
    assert run["waits_ms"] == [3000.0] * (job.steps - 1)
    assert (run["first_ms"], run["step_ms"], run["tokens_s"]) == (
        3000.0,
        53_000.0,
        pytest.approx((SPAN - 1) / 53),
    )


FIGURES = dict(
    median=1.0,
    p99=2.0,
    max=9.0,
    boundary=8.0,
    step_ms=20.0,
    tokens_s=400.0,
    first_ms=5.0,
    memory_mb=50.0,
    read=8.0,
    fetched=8.0,
)
REACHED = dict(
    FIGURES, median=0.25, p99=0.04, max=0.5, boundary=0.08, tokens_s=800.0, memory_mb=10.0, read=1.1
)
CONDITIONS = {
    loader.Condition(8, cache, load): dict(ours=REACHED, challenge=FIGURES, limit=FIGURES)
    for cache in loader.CACHES
    for load in loader.LOADS
}


def missed(**figures: float) -> list[str]:
    """The targets missed where `ours` has these figures in all conditions."""
    tables = {
        condition: {**table, "ours": {**REACHED, **figures}}
        for condition, table in CONDITIONS.items()
    }
    return [words for reached, words in loader.targets(tables, used_bytes=10**12) if not reached]


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("median", 0.2501, "median 0.250 ms, at most 1/4 of challenge"),
        ("p99", 0.0401, "p99 0.040 ms, at most 1/50 of challenge"),
        ("boundary", 0.0801, "boundary 0.080 ms, at most 1/100 of challenge"),
        ("max", 9.0, "max 9.000 ms, lower than the best other, challenge"),
        ("tokens_s", 799.0, "799 M tokens/s, at least twice challenge"),
        ("tokens_s", 299.0, "299 M tokens/s, at least 300 M tokens/s"),
        ("memory_mb", 10.1, "memory 10.1 MB above limit, at most 10"),
        ("read", 1.101, "read 1.10 of the bytes used, at most 1.10"),
    ],
)
def test_targets_are_the_stated_ones(figure: str, value: float, words: str) -> None:
    assert missed() == []
    found = missed(**{figure: value})
    assert any(words in line for line in found), found


@pytest.mark.slow
def test_quick_run_measures_every_arm_in_every_condition(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable,
            BENCH,
            "--quick",
            "--steps",
            "30",
            "--ranks",
            "8",
            "--arms",
            *PLAIN_ARMS,
            "--json",
            result,
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env=clean_environment(TMPDIR=tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert f"tokens: the same from all {len(PLAIN_ARMS)} arms" in done.stdout
    caches = loader.CACHES if hasattr(loader.os, "posix_fadvise") else ("warm",)
    tables = len(caches) * len(loader.LOADS)
    headings = [line for line in done.stdout.splitlines() if line.startswith("arm  ")]
    for heading, _ in loader.COLUMNS.values():
        times = tables if heading == loader.COLUMNS["memory_mb"][0] else 2 * tables
        assert sum(heading in line for line in headings) == times, heading
    rows = [
        line.split()[0]
        for line in done.stdout.splitlines()
        if line.split()[:1] and line.split()[0] in PLAIN_ARMS
    ]
    assert rows == PLAIN_ARMS * 2 * tables
    runs = json.loads(result.read_text())["runs"]
    assert {(r["arm"], r["ranks"], r["cache"], r["load"]) for r in runs} == set(
        itertools.product(PLAIN_ARMS, (8,), caches, loader.LOADS)
    )
    assert all(len(r["waits_ms"]) == 29 and min(r["waits_ms"]) > 0 for r in runs)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "20"], "they reach no shard boundary: set at least 48"),
        (["--json", "no/such/folder/result"], "no such folder: no/such/folder"),
        (["--repeats", "-1"], "set more than 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1]


def test_a_fault_in_an_arm_is_one_line(tmp_path: Path) -> None:
    job = loader.Job(str(tmp_path), 8, 9, SEQ_LEN, 8 * (SPAN - 1), SHARD_TOKENS, SHARDS)
    with loader.workers_of([loader.LIMIT]) as workers:
        with pytest.raises(
            loader.BenchError, match="arm limit ended with code 1: FileNotFoundError: .*000000.bin"
        ):
            workers[loader.LIMIT].ask("check", dataclasses.replace(job), count=1)
