"""Helpers that all tests share.

They hold the settings of a small model, write shards and tokenizers, run scripts as users do, and
build the parts of train_gpt.py (Config, Runtime, Pipeline, several simulated ranks) in one process.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sentencepiece

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "train_gpt.py"
SETTINGS = {f.name.upper() for f in dataclasses.fields(train_gpt.Config)}
# A function that calls the main of a tool and returns (exit code, output, errors).
Call = Callable[..., tuple[int, str, str]]
SMALL_MODEL = {
    "NUM_LAYERS": 2,
    "MODEL_DIM": 32,
    "NUM_HEADS": 2,
    "NUM_KV_HEADS": 1,
    "VOCAB_SIZE": 300,
    "TRAIN_SEQ_LEN": 32,
    "TRAIN_BATCH_TOKENS": 2048,
    "VAL_BATCH_SIZE": 4096,
    "GRAD_ACCUM_STEPS": 1,
    "WARMUP_STEPS": 0,
    "MAX_WALLCLOCK_SECONDS": 0,
    "ITERATIONS": 10,
    "WARMDOWN_ITERS": 5,
    "DEVICE": "cpu",
    "TORCH_COMPILE": 0,
}


def write_shard(path: Path, tokens: np.ndarray) -> Path:
    """Write a shard in the challenge's format: 256 little-endian int32, then uint16 tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return path


def write_split(folder: Path, split: str, tokens: np.ndarray, sizes: list[int]) -> None:
    """Write `tokens` as shards of the given sizes; one more shard takes the rest."""
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes))):
        if len(part):
            write_shard(folder / f"fineweb_{split}_{number:06d}.bin", part)


def train_tokenizer(path: Path, texts: list[str], **options: object) -> Path:
    """Train a SentencePiece model on the texts and write it to `path`.

    It has the challenge's control tokens. Unless `options` change this, it has a piece for each
    byte and does not normalize texts.
    """
    common = {"model_type": "bpe", "vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2}
    common |= {"byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False}
    common |= {"normalization_rule_name": "identity"}
    common |= {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, **common | options
        )
    return path


@dataclasses.dataclass
class Corpus:
    """The data of a test: a folder of shards, the tokenizer's file, and the validation tokens."""

    folder: Path
    tokenizer: Path
    val: np.ndarray

    @property
    def env(self) -> dict[str, str]:
        return {"DATA_PATH": str(self.folder), "TOKENIZER_PATH": str(self.tokenizer)}


class Run:
    """What a script that has ended printed and logged in `folder`, and its exit code."""

    def __init__(self, folder: Path, run_id: str = "*", code: int | None = None) -> None:
        self.folder = folder
        self.run_id = run_id
        self.code = code

    def read(self, name: str) -> str:
        """Return the text of the first file that matches, or an empty text."""
        paths = list(self.folder.glob(name))
        return paths[0].read_text(encoding="utf-8", errors="replace") if paths else ""

    @property
    def out(self) -> str:
        return self.read("out")

    @property
    def err(self) -> str:
        return self.read("err")

    @property
    def log_path(self) -> Path:
        return next(self.folder.glob(f"logs/{self.run_id}.txt"))

    @property
    def text(self) -> str:
        """The text log without the source of the script at its head."""
        return self.read(f"logs/{self.run_id}.txt").split("=" * 100 + "\n", 2)[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name in the .jsonl log, in order."""
        lines = self.read(f"logs/{self.run_id}.jsonl").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def values(self, word: str) -> list[str]:
        """Return every value of `word:` in the lines that begin with step: or final_, in order."""
        lines = [line for line in self.text.splitlines() if line.startswith(("step:", "final_"))]
        return [match for line in lines for match in re.findall(rf"(?:^| ){word}:(\S+)", line)]


def clean_environment(**settings: object) -> dict[str, str]:
    """Return this process' environment without trainer settings and ranks, plus `settings`.

    Scripts run on the CPU even if the machine has a GPU, unless `settings` contain a DEVICE.
    """
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in SETTINGS | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    }
    fixed = {"OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
    return {**env, **fixed, **{k: str(v) for k, v in settings.items()}}


@functools.cache
def server() -> subprocess.Popen:
    """Return the process that forks scripts (server.py), started on the first call."""
    started = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("server.py"))],
        text=True,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(lambda: [started.stdin.close(), started.wait()])
    return started


def ask_server(**request: object) -> int | None:
    """Send a request to server.py and return its answer."""
    server().stdin.write(json.dumps(request) + "\n")
    server().stdin.flush()
    return json.loads(server().stdout.readline())


def start_script(script: Path, folder: Path, *arguments: object, **settings: object) -> int:
    """Start a script in `folder` and return its pid; it prints to the files "out" and "err"."""
    folder.mkdir(parents=True, exist_ok=True)
    return ask_server(
        script=str(script),
        arguments=[str(argument) for argument in arguments],
        folder=str(folder),
        environment=clean_environment(**settings),
    )


def run_script(script: Path, folder: Path, *arguments: object, **settings: object) -> Run:
    """Run a script to its end, as `python3 script arguments` would."""
    pid = start_script(script, folder, *arguments, **settings)
    deadline = time.monotonic() + 240
    while (code := ask_server(pid=pid)) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return Run(folder, code=code)


def torchrun(script: Path, ranks: int, *more: str) -> list[str]:
    """Return the command that runs a script on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", *more]
    return [*command, str(script)]


def run_trainer(
    folder: Path,
    *,
    ranks: int = 0,
    script: Path = TRAINER,
    wrapper: Path | None = None,
    timeout: float = 240,
    **settings: object,
) -> Run:
    """Run the script in `folder` as users do: with python for ranks=0, else with torchrun.

    wrapper: for ranks=0, a program that prepares its process and then runs the script
    """
    folder.mkdir(parents=True, exist_ok=True)
    scripts = [str(wrapper), str(script)] if wrapper else [str(script)]
    command = torchrun(script, ranks) if ranks else [sys.executable, *scripts]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        how = {"cwd": folder, "env": clean_environment(**settings), "timeout": timeout}
        done = subprocess.run(command, stdout=out, stderr=err, **how)
    return Run(folder, code=done.returncode)


def import_script(path: Path) -> ModuleType:
    """Import a script as a module with the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def start_process(command: list[object], **options: Any) -> subprocess.Popen[str]:
    """Start a command in a new session, with pipes for its output."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Processes of a background job ignore SIGINT, and a child would inherit this.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipes["start_new_session"] = True
    return subprocess.Popen([*map(str, command)], **pipes | options)


def call_tool(main: Callable[[], int | None], *arguments: object) -> tuple[int | None, str]:
    """Call the main of a program of data/; return (its exit code, what it printed)."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        code = main()
    return code, printed.getvalue()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition is true; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


def free_port() -> int:
    """Return a TCP port on which nothing listens at the moment."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def make_config(trainer: Any = train_gpt, /, **settings: object) -> train_gpt.Config:
    """Return the Config that a script would read from these settings, given in capitals.

    The device is the CPU even if the machine has a GPU, unless `settings` contain a DEVICE.
    """
    values = {"DEVICE": "cpu", **settings}
    config, _, faults, _ = trainer.read_config([], {k: str(v) for k, v in values.items()})
    assert not faults, faults
    return config


def byte_data(folder: Path, train_tokens: int = 9000, val_tokens: int = 3000) -> dict[str, str]:
    """Write a byte tokenizer and one shard per split; return the settings that use them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "byte.json").write_text('{"kind": "byte", "offset": 4}', encoding="utf-8")
    for split, count in (("train", train_tokens), ("val", val_tokens)):
        write_split(folder, split, np.random.default_rng(count).integers(1, 260, count), [])
    return {
        "DATA_PATH": str(folder),
        "TOKENIZER_PATH": str(folder / "byte.json"),
        "VOCAB_SIZE": "260",
    }


def make_runtime(
    config: train_gpt.Config, rank: int = 0, world_size: int = 1, trainer: Any = train_gpt
) -> train_gpt.Runtime:
    """Return the Runtime of a rank, without signal handlers and without a process group.

    All ranks are on one machine and, if `config` asks for a GPU, use the first one: tests simulate
    several ranks on one device.
    """
    launched = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    return trainer.Runtime(config, launched)


def open_pipeline(
    config: train_gpt.Config, split: str = "train", step: int = 0, **replaced: Any
) -> train_gpt.Pipeline:
    """Open the pipeline of a split as the trainer builds it; `replaced` are other arguments."""
    runtime = replaced.pop("runtime", None) or make_runtime(config)
    shards = replaced.pop("shards", None) or train_gpt.Shards(config, split)
    if split == "train":
        plan = train_gpt.BatchPlan.train(config, runtime.rank, runtime.world_size, step)
    else:
        plan = train_gpt.BatchPlan.val(config, shards.ends[-1], runtime.rank, runtime.world_size)
    overlap = replaced.pop("overlap", None) or train_gpt.Overlap.from_config(
        config, split, runtime.device
    )
    return train_gpt.Pipeline(shards, plan, overlap, runtime.device, **replaced)


class Command:
    """An object whose pickle, when it is loaded, makes a folder: a stand-in for an attack."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple]:
        return os.mkdir, (str(self.path),)


# For small tensors a second thread gains nothing, and it slows other processes down.
train_gpt.torch.set_num_threads(1)


class SimulatedRanks:
    """Ranks that are threads of this process; their collective calls meet at a barrier.

    Before `run` is called, the ranks' Trainers are made one after the other, in one thread. In that
    phase, a collective call returns what it would return if all ranks had the same value.
    """

    def __init__(self, config: train_gpt.Config, count: int, trainer: Any = train_gpt) -> None:
        self.runtimes = [make_runtime(config, rank, count, trainer) for rank in range(count)]
        self.barrier, self.given = threading.Barrier(count), [None] * count
        self.running = False
        self.sums = [0] * count  # the number of all_reduce calls of each rank
        for runtime in self.runtimes:
            runtime.all_reduce = partial(self.all_reduce, runtime.rank)
            runtime.broadcast = partial(self.broadcast, runtime.rank)
            runtime.gather = partial(self.gather, runtime.rank)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, once every rank has given its value."""
        self.given[rank] = value
        self.barrier.wait(60)
        everyone = list(self.given)
        self.barrier.wait(60)
        return everyone

    def all_reduce(self, rank: int, tensor: train_gpt.torch.Tensor) -> train_gpt.torch.Tensor:
        self.sums[rank] += 1
        return tensor.copy_(sum(self.exchange(rank, tensor.clone())))

    def broadcast(self, rank: int, value: Any, source: int = 0) -> Any:
        return self.exchange(rank, value)[source] if self.running else value

    def gather(self, rank: int, value: Any) -> list[Any]:
        return self.exchange(rank, value) if self.running else [value] * len(self.runtimes)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` on all ranks; return each result, or the HaltError that it raised."""

        def attempt(rank: int) -> Any:
            try:
                return work(rank)
            except train_gpt.HaltError as halt:
                return halt
            except Exception:
                self.barrier.abort()  # else the other ranks would wait
                raise

        self.running = True
        with ThreadPoolExecutor(len(self.runtimes)) as pool:
            return list(pool.map(attempt, range(len(self.runtimes))))


def open_data(config: train_gpt.Config) -> train_gpt.Data:
    """Open the shards and the tokenizer of a run with these settings."""
    shards = (train_gpt.Shards(config, split) for split in ("train", "val"))
    return train_gpt.Data(*shards, *train_gpt.read_tokenizer(config))


def make_log(module: ModuleType = train_gpt) -> train_gpt.RunLog:
    """Return a RunLog that writes no file and collects its `lines` and `events` in lists."""
    log = module.RunLog("r")
    log.lines = []
    log.events = []
    log.line = lambda text: log.lines.extend(text.splitlines())
    log.event = lambda name, **values: log.events.append({"event": name, **values})
    return log
