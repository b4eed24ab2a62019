"""The loader bench: every arm yields the tokens of rank 0, over shards and epochs, or the run ends.
Exposed time is what the next batch costs the main thread, and nothing else. Targets are the stated
ones.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, clean_environment, train_gpt, write_split

pytestmark = pytest.mark.timeout(300)

BENCH = ROOT / "tests" / "bench" / "loader.py"
SHARDS, SHARD_TOKENS, SEQ_LEN, SPAN = 3, 1500, 16, 129  # a batch: 8 rows and one token more
TOKENS = np.random.default_rng(5).integers(0, 1024, SHARDS * SHARD_TOKENS)
# Another script's loader, called as the challenge's is. It knows its tokens by the seed above.
OTHER_SCRIPT = """
import numpy as np, torch

class DistributedTokenLoader:
    def __init__(self, pattern, rank, world_size, device):
        files = sorted(__import__("glob").glob(pattern))
        self.tokens = np.concatenate([np.fromfile(f, "<u2", offset=1024) for f in files])
        self.rank, self.world_size, self.taken = rank, world_size, 0

    def next_batch(self, global_tokens, seq_len, grad_accum_steps):
        span = global_tokens // (self.world_size * grad_accum_steps) + 1
        at = self.taken + self.rank * span + np.arange(span)
        self.taken += span * self.world_size
        mine = torch.from_numpy(self.tokens[at % len(self.tokens)].astype("i8"))
        return mine[:-1].view(-1, seq_len), mine[1:].view(-1, seq_len)
"""


@pytest.fixture(scope="module")
def loader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loader_bench", BENCH)
    module = sys.modules["loader_bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.py"
    path.write_text(OTHER_SCRIPT)
    return path


def job_of(loader: ModuleType, folder: Path, ranks: int) -> object:
    """Batches of rank 0 that reach the second epoch."""
    steps = 2 * len(TOKENS) // (SPAN * ranks)
    return loader.Job(str(folder), ranks, steps, SEQ_LEN, 8 * (SPAN - 1), SHARD_TOKENS, SHARDS)


@pytest.mark.parametrize("ranks", [8, 1])
def test_every_arm_yields_the_tokens_of_rank_0(
    loader: ModuleType, tmp_path: Path, other: Path, ranks: int
) -> None:
    write_split(tmp_path, "train", TOKENS, [SHARD_TOKENS] * (SHARDS - 1))
    job = job_of(loader, tmp_path, ranks)
    for name, arm in loader.ARMS.items():
        script, seen = other if name == "challenge" else ROOT / "train_gpt.py", 0
        with arm(job, script) as batches:
            for k, (x, y) in enumerate(itertools.islice(batches, job.steps)):
                span = TOKENS[(k * ranks * SPAN + np.arange(SPAN)) % len(TOKENS)]
                np.testing.assert_array_equal(x, span[:-1].reshape(-1, SEQ_LEN), name)
                np.testing.assert_array_equal(y, span[1:].reshape(-1, SEQ_LEN), name)
                seen += 1
        assert seen == job.steps, name


def test_only_the_arm_unread_reads_nothing_ahead(
    loader: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_split(tmp_path, "train", TOKENS, [SHARD_TOKENS] * (SHARDS - 1))
    queues = []

    def pipeline(shards: object, plan: object, overlap: object, runtime: object) -> object:
        queues.append(overlap.queue)
        return train_gpt.Pipeline(shards, plan, overlap, runtime)

    noted = SimpleNamespace(**{**vars(train_gpt), "Pipeline": pipeline})
    monkeypatch.setattr(loader, "imported", lambda path: noted)
    for name in ("ours", "unread", "against"):
        with loader.ARMS[name](job_of(loader, tmp_path, 8), ""):
            pass
    assert queues == [2, 0, 2]


def test_boundaries_are_where_the_tokens_of_all_ranks_cross(
    loader: ModuleType, tmp_path: Path
) -> None:
    for ranks in (8, 2, 1):
        job = job_of(loader, tmp_path, ranks)
        shards = np.arange(job.steps * ranks * SPAN).reshape(job.steps, -1) // SHARD_TOKENS
        # `boundary` is the worse of a batch and the next: the last batch has no next.
        crossed = np.flatnonzero(shards[1:, -1] > shards[:-1, -1]) + 1
        assert sorted(set(job.boundaries())) == [k for k in crossed if k < job.steps - 1]


def test_exposed_time_is_that_of_the_next_batch_alone(
    loader: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the arm (3 s a batch) and the compute (50 s) move."""
    clock, job = [0.0], job_of(loader, tmp_path, 8)

    @contextmanager
    def slow(job: object, script: object) -> Iterator:
        def batches() -> Iterator[int]:
            while True:
                clock[0] += 3
                yield 0

        yield batches()

    def work(ms: float) -> None:
        clock[0] += ms / 1e3

    monkeypatch.setattr(loader.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loader, "work", work)
    run = loader.measure(slow, job, "", 50_000)
    assert run["waits_ms"] == [3000.0] * (job.steps - 1) and run["first_ms"] == 3000.0
    assert run["tokens_s"] == pytest.approx((SPAN - 1) / 53)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("median", 0.26, "at most 0.25 of challenge's"),
        ("p99", 0.021, "at most 0.02 of challenge's"),
        ("boundary", 0.011, "at most 0.01 of challenge's"),
        ("median", 1.11, "at most 1.1 of against's"),
    ],
)
def test_targets_are_the_stated_ones(
    loader: ModuleType, column: str, value: float, words: str
) -> None:
    ours = {"median": 0.25, "p99": 0.02, "boundary": 0.01}
    table = {"ours": ours, "challenge": dict.fromkeys(ours, 1.0), "against": ours}
    assert [reached for reached, _ in loader.verdicts(table)] == [True] * 6
    table |= {"ours": {**ours, column: value}, "against": dict.fromkeys(ours, 1.0)}
    missed = [line for reached, line in loader.verdicts(table) if not reached]
    assert any(line.startswith(column) and words in line for line in missed)


@pytest.mark.slow
def test_arms_take_turns_and_other_tokens_end_the_run(
    loader: ModuleType, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In this process, the order of the arms noted."""
    turns = []

    def ask(**order: object) -> dict:
        turns.append((order["arm"], bool(order["compute_ms"])))
        monkeypatch.setattr(loader, "print", lambda text: said.append(text), raising=False)
        said: list[str] = []
        loader.serve(order)
        monkeypatch.delattr(loader, "print")
        return json.loads(said[0])

    monkeypatch.setattr(loader, "ask", ask)
    command = ["loader.py", "--quick", "--compute-ms", "0.1", "--repeats", "2", "--challenge"]
    monkeypatch.setattr(sys, "argv", [*command, str(other), "--arms", "challenge", "limit"])
    loader.main()
    out = capsys.readouterr().out
    assert "the same tokens from all 3 arms" in out
    names = ["ours", "challenge", "limit"]
    assert [name for name, _ in turns] == [names[(i + i // 3) % 3] for i in range(12)]
    assert [compute for _, compute in turns] == [False, False, False, True, True, True] * 2
    tables = [
        line.split()[0] for line in out.splitlines() if line.split()[:1][0:] and line[0] != " "
    ]
    assert [word for word in tables if word in names] == names * 2
    other.write_text(OTHER_SCRIPT.replace("return mine[:-1]", "return mine[:-1].clamp(max=1000)"))
    with pytest.raises(SystemExit, match=r"challenge: batch \d+ has other tokens than that of"):
        loader.main()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "20"], "they reach no shard boundary: set 50 or more"),
        (["--challenge", "no/such.py"], "--challenge no/such.py: no such file"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], words: str) -> None:
    command = [sys.executable, BENCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_run_in_processes(tmp_path: Path, other: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, BENCH, "--quick", "--challenge", other, "--json", result]
    done = subprocess.run(
        [*command, "--arms", "challenge", "torch"],
        capture_output=True,
        text=True,
        timeout=280,
        env=clean_environment(TMPDIR=tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "the same tokens from all 3 arms" in done.stdout
    runs = json.loads(result.read_text())
    assert list(runs) == ["warm none", "warm compute"]
    for arms in runs.values():
        assert list(arms) == ["ours", "challenge", "torch"]
        assert all(len(run["waits_ms"]) == 39 for found in arms.values() for run in found)
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "other.py"}


@pytest.mark.slow
def test_an_arm_that_fails_is_one_line(tmp_path: Path, other: Path) -> None:
    other.write_text("raise OSError('no such disk')")
    command = [sys.executable, BENCH, "--quick", "--challenge", other, "--arms", "challenge"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert done.stderr == "loader.py: arm challenge failed: OSError: no such disk\n"
