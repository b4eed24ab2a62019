"""Ranks are one run or none: they end at once where settings or data differ.

What one knows all know, exactly, for 16 to 1,024 of them; their weights stay equal to the bit; a
rank that fails takes the others with it within seconds; machines need not share a disk.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    SMALL_MODEL,
    Corpus,
    byte_data,
    clean_environment,
    config_of,
    free_port,
    run_trainer,
    runtime_of,
    train_gpt,
)

pytestmark = pytest.mark.timeout(300)
AT_ONCE_S = 60  # idle: about one; a rank that waits for the others' timeout takes five minutes


class Rank(NamedTuple):
    """How a rank ended: its exit code, when (in seconds from the start), what it printed."""

    code: int
    seconds: float
    said: str


def place_of(rank: int) -> dict[str, int]:
    return {"RANK": rank, "LOCAL_RANK": rank}


def run_ranks(task: str, folder: Path, environments: list[dict[str, Any]]) -> list[Rank]:
    """The function `task` of this file in a process a rank, each with its own environment.

    They are forks of one fresh interpreter: so torch is imported once.
    """
    folder.mkdir(exist_ok=True)
    shared = {"WORLD_SIZE": len(environments), "MASTER_ADDR": "localhost"}
    shared |= {"MASTER_PORT": free_port(), "RUN_ID": "ranks"}
    ranks = [
        {name: str(value) for name, value in {**shared, **mine, **place_of(rank)}.items()}
        for rank, mine in enumerate(environments)
    ]
    done = subprocess.run(
        [sys.executable, __file__, task, json.dumps(ranks)],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    ends = json.loads(done.stdout)
    return [Rank(*end, (folder / f"said.{rank}").read_text()) for rank, end in enumerate(ends)]


def become_ranks(task: str, environments: list[dict[str, str]]) -> None:
    """In that interpreter: forks, and prints [exit code, seconds] of each rank."""
    if task != "whole_run":  # it trains: the first optimizer imports much, once for all
        torch.optim.Adam([torch.zeros(1)])
    start, ends = time.monotonic(), {}
    ranks = {fork(globals()[task], env): int(env["RANK"]) for env in environments}
    while len(ends) < len(ranks):
        process, status = os.wait()
        ends[ranks[process]] = os.waitstatus_to_exitcode(status), time.monotonic() - start
    print(json.dumps([ends[rank] for rank in range(len(ends))]))


def fork(task: Any, env: dict[str, str]) -> int:
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        os.environ.update(env)
        said = os.open(f"said.{env['RANK']}", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        code = task(env)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


# Tasks: what a rank does.


def whole_run(env: dict[str, str]) -> int:
    """As the script does it."""
    return train_gpt.main([], env)


def seeded_run(env: dict[str, str]) -> int:
    """An edit that draws from a rank's own generator before the model is made."""
    init = train_gpt.GPT.__init__

    def seeded(*arguments: Any) -> None:
        torch.manual_seed(int(env["RANK"]))
        init(*arguments)

    train_gpt.GPT.__init__ = seeded
    return train_gpt.main([], env)


def failing_run(env: dict[str, str]) -> int:
    """Rank 1 raises in its fifth forward pass; to leave the group properly waits for the others."""
    forward, calls = train_gpt.GPT.forward, []

    def failing(model: train_gpt.GPT, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if env["RANK"] == "1" and len(calls) == 5:
            raise ValueError("an injected error")
        return forward(model, x, y)

    train_gpt.GPT.forward, dist.destroy_process_group = failing, lambda *_: time.sleep(1000)
    return train_gpt.main([], env)


def perturbed_run(env: dict[str, str]) -> int:
    """Trains with a Newton-Schulz whose last bits are this rank's own; prints the weights."""
    newton_schulz, changed = train_gpt.newton_schulz, []

    def perturbed(*arguments: Any) -> torch.Tensor:
        result = newton_schulz(*arguments)
        mine = result * (1 + int(env["RANK"]) * 2.0**-23)
        changed.append(int((mine != result).sum()))
        return mine

    train_gpt.newton_schulz = perturbed
    config = config_of(**{name: env[name] for name in env.keys() & train_gpt.SETTINGS.keys()})
    runtime = train_gpt.Runtime(config, env)
    runtime.start(env)
    run = train_gpt.Trainer(config, runtime, train_gpt.RunLog("r", enabled=False))
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train()
    after = list(run.model.parameters())
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert run.step == config.iterations and (sum(changed) > 0) == (runtime.rank > 0)
    print([zlib.crc32(p.detach().numpy().tobytes()) for p in after])
    return 0


# One run, or none.


@pytest.mark.parametrize("other", ["MATRIX_LR", "train shards", "val shards"])
@pytest.mark.row(
    "ranks with other settings or data: ..",
    "end at the start; the line names what differs, and ranks",
)
def test_ranks_that_differ_end_at_once_in_a_line(tmp_path: Path, other: str) -> None:
    """It names what differs, both values, and a rank of each."""
    data, folder = byte_data(tmp_path / "data"), tmp_path / "run"
    if other == "MATRIX_LR":
        theirs, values = {**data, other: 7}, ("0.04", "7.0")
    else:
        split = other.split()[0]
        theirs = byte_data(tmp_path / "theirs", **{f"{split}_tokens": 10_000})
        other = f"fineweb_{split}_000000.bin"
        values = ({"train": "9000", "val": "3000"}[split], "10000")
    ranks = run_ranks("whole_run", folder, [{**SMALL_MODEL, **d} for d in (data, theirs)])
    assert [rank.code for rank in ranks] == [1, 1]
    assert max(rank.seconds for rank in ranks) < AT_ONCE_S
    [line] = ranks[0].said.splitlines()
    assert other in line
    for rank, value in enumerate(values):
        assert re.search(rf"\b{value}\b[^:]* on rank {rank}\b", line), line
    assert not (folder / "logs").exists()


@pytest.mark.slow
@pytest.mark.row("ranks with other initial weights", "end before the first step")
def test_ranks_with_other_initial_weights_end_in_a_line(tmp_path: Path) -> None:
    """They would train apart, each on its part of the data."""
    settings = {**SMALL_MODEL, **byte_data(tmp_path / "data")}
    ranks = run_ranks("seeded_run", tmp_path / "run", [settings] * 2)
    assert [rank.code for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "ranks differ in the initial weights: " in rank.said and "step:1" not in rank.said


@pytest.mark.slow
def test_the_weights_of_all_ranks_are_equal_to_the_bit(tmp_path: Path) -> None:
    """After 60 steps, though no two ranks' kernels agree in the last one, nor do their clocks."""
    settings = {**SMALL_MODEL, **byte_data(tmp_path / "data"), "VAL_TOKENS": 400}
    settings |= {"TRAIN_SEQ_LEN": 8, "TRAIN_BATCH_TOKENS": 64, "ITERATIONS": 60}
    settings |= {"MAX_WALLCLOCK_SECONDS": 600, "WARMDOWN_ITERS": 10**7, "TRAIN_LOG_EVERY": 0}
    ranks = run_ranks("perturbed_run", tmp_path / "run", [settings] * 4)
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert len({rank.said.splitlines()[-1] for rank in ranks}) == 1


@pytest.mark.row("a rank fails", "leaves at once, waits for nobody")
def test_a_rank_that_fails_leaves_at_once_and_the_others_follow(tmp_path: Path) -> None:
    """Without a launcher that would end them. It waits for none of them: they may wait for it."""
    settings = {**SMALL_MODEL, **byte_data(tmp_path / "data"), "VAL_LOSS_EVERY": 0}
    ranks = run_ranks("failing_run", tmp_path / "run", [settings] * 4)
    assert [rank.code for rank in ranks] == [1] * 4
    assert max(rank.seconds for rank in ranks) < AT_ONCE_S
    assert "train_gpt.py: rank 1: ValueError: an injected error" in ranks[1].said
    assert "in failing" in ranks[1].said  # the traceback of what nobody foresaw
    for rank in (0, 2, 3):
        assert f"train_gpt.py: rank {rank}: " in ranks[rank].said
    end = json.loads((tmp_path / "run" / "logs" / "ranks.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "failed", 1)


# What ranks tell each other.


class Summed(train_gpt.Runtime):
    """A rank of many: its share is added to the total so far; so the last one has the sum."""

    total: torch.Tensor | float = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        Summed.total = Summed.total + tensor
        return tensor.copy_(Summed.total)


def exchange_of(ranks: int, **told: dict[int, float]) -> train_gpt.Exchange:
    """A step of `ranks` ranks, as the last one has it; told: fields of Message, {rank: value}."""
    config = config_of(DEVICE="cpu")
    Summed.total = 0.0
    for rank in range(ranks):
        runtime = Summed(config, {"RANK": rank, "WORLD_SIZE": ranks})
        model = torch.nn.ParameterList([torch.zeros(4)])
        [weight] = model.parameters()
        exchange = train_gpt.Exchange(model, runtime, train_gpt.Clock(runtime))
        exchange.begin(0, 0.0, 0)
        weight.grad += torch.arange(4) / ranks
        mine = {name: values.get(rank, 0) for name, values in told.items()}
        loss = torch.tensor(float(mine.pop("loss", 0.0)))
        exchange.done_here = mine["steps"], mine["elapsed_ms"]
        exchange.all_reduce(0, mine["wait_ms"], mine["crc"], loss)
    assert weight.grad.tolist() == [0, 1, 2, 3]
    return exchange


@pytest.mark.parametrize("ranks", [16, 64, 1024])
def test_what_ranks_agree_on_is_exact(ranks: int) -> None:
    """Though it is added up in float32: 32 bits of data_crc, steps and times of each rank."""
    crcs = {rank: (0x9E3779B1 * (rank + 1)) % 2**32 for rank in range(ranks)}
    waits, losses = ({rank: scale * (rank + 1) for rank in range(ranks)} for scale in (7, 0.5))
    exchange = exchange_of(
        ranks,
        crc=crcs,
        wait_ms=waits,
        loss=losses,
        steps={0: 19_999, 1: 20_000},
        elapsed_ms={0: 599_999.0, 1: 7.0},
    )
    exchange.read(1)
    assert exchange.data_crc() == sum(crcs.values()) % 2**32
    assert [row.wait_ms for row in exchange.messages] == list(waits.values())
    assert [row.loss for row in exchange.messages] == list(losses.values())
    assert exchange.elapsed_ms(19_999) == 599_999.0  # rank 0's, on all ranks


def test_a_signal_is_only_noted_and_nohup_is_respected() -> None:
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        runtime = runtime_of(config_of(DEVICE="cpu"))
        runtime.start({})
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert runtime.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# Machines.


def launch(folders: list[Path], env: dict[str, object]) -> list[str]:
    """A launcher with one rank in each folder; what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_id=two", "--rdzv_backend=c10d", "--local_addr=localhost"]
    command += [f"--rdzv_endpoint=localhost:{free_port()}", str(ROOT / "train_gpt.py")]
    env = clean_environment(**{**env, "DATA_PATH": "data", "TOKENIZER_PATH": "spm.model"})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(command, cwd=folder, env=env, **pipes) for folder in folders]
    outs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outs)[-3000:]
    return outs


@pytest.mark.slow
@pytest.mark.row("two machines that share no disk", "train as one")
def test_two_agents_that_share_no_disk(corpus: Corpus, tmp_path: Path) -> None:
    """Each with one rank, in a folder with data of its own: the run of one with two ranks.

    A second time they resume from rank 0's checkpoint alone.
    """
    env = {**SMALL_MODEL, "ITERATIONS": 12, "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 6}
    env |= {"CHECKPOINT_EVERY": 4, "RESUME": "auto", "RUN_ID": "nodes"}
    one = run_trainer(tmp_path / "one", ranks=2, **{**corpus.env, **env})
    assert one.code == 0, one.err[-2000:]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        shutil.copytree(corpus.folder, folder / "data")
        shutil.copy(corpus.tokenizer, folder / "spm.model")
    outs = launch(folders, env)
    [home] = [folder for folder in folders if (folder / "logs").exists()]  # rank 0's
    [other] = [folder for folder in folders if folder != home]
    log = outs[folders.index(home)]
    for word in ("data_crc", "train_loss", "val_loss", "val_bpb"):
        mine, theirs = (re.findall(rf" {word}:(\S+)", text) for text in (log, one.out))
        assert mine == theirs != []
    assert "final_int8_zlib_roundtrip_exact" in log
    os.remove(home / "final_model.int8.ptz")
    again = launch(folders, env)
    assert any(re.search(r"(?m)^resumed\b.*step:12\b", out) for out in again)
    events = [json.loads(line) for line in (home / "logs" / "nodes.jsonl").read_text().splitlines()]
    scores = [event["val_bpb"] for event in events if event["event"] == "score"]
    assert len(scores) == 2 and scores[0] == scores[1]
    assert sorted(path.name for path in other.iterdir()) == ["data", "spm.model"]


if __name__ == "__main__":
    become_ranks(sys.argv[1], json.loads(sys.argv[2]))
