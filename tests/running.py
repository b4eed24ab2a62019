"""What tests share: a small model, shards, train_gpt.py run as users do, several ranks."""

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
Call = Callable[..., tuple[int, str, str]]  # a tool's main: exit code, output, errors
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
    """In the challenge's format: 256 little-endian int32 words, then the tokens as uint16."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return path


def write_split(folder: Path, split: str, tokens: np.ndarray, sizes: list[int]) -> None:
    """`tokens` as shards of the given sizes (the last one takes the rest)."""
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes))):
        if len(part):
            write_shard(folder / f"fineweb_{split}_{number:06d}.bin", part)


def train_tokenizer(path: Path, texts: list[str], **options: object) -> Path:
    """A SentencePiece model with the challenge's control tokens and, unless `options` say other, a
    piece for each byte, of texts that stay as they are."""
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
    folder: Path
    tokenizer: Path
    val: np.ndarray

    @property
    def env(self) -> dict[str, str]:
        return {"DATA_PATH": str(self.folder), "TOKENIZER_PATH": str(self.tokenizer)}


class Run:
    """What a script printed and logged in `folder`, and its exit code, once it has ended."""

    def __init__(self, folder: Path, run_id: str = "*", code: int | None = None) -> None:
        self.folder = folder
        self.run_id = run_id
        self.code = code

    def read(self, name: str) -> str:
        """The text of a file; empty, if there is none."""
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
        """The text log without the script's source."""
        return self.read(f"logs/{self.run_id}.txt").split("=" * 100 + "\n", 2)[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.read(f"logs/{self.run_id}.jsonl").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def values(self, word: str) -> list[str]:
        """Every value of `word:` in the lines that begin with step: or final_, in order."""
        lines = [line for line in self.text.splitlines() if line.startswith(("step:", "final_"))]
        return [match for line in lines for match in re.findall(rf"(?:^| ){word}:(\S+)", line)]


def clean_environment(**settings: object) -> dict[str, str]:
    """This process' environment without trainer settings and ranks, plus `settings`."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in SETTINGS | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    }
    return {**env, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in settings.items()}}


@functools.cache
def server() -> subprocess.Popen:
    """The process that forks scripts, see server.py."""
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
    server().stdin.write(json.dumps(request) + "\n")
    server().stdin.flush()
    return json.loads(server().stdout.readline())


def start_script(script: Path, folder: Path, *arguments: object, **settings: object) -> int:
    """Starts it in `folder`, where "out" and "err" are what it prints; returns its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    return ask_server(
        script=str(script),
        arguments=[str(argument) for argument in arguments],
        folder=str(folder),
        environment=clean_environment(**settings),
    )


def run_script(script: Path, folder: Path, *arguments: object, **settings: object) -> Run:
    """Runs it to its end, as `python3 script arguments`."""
    pid = start_script(script, folder, *arguments, **settings)
    deadline = time.monotonic() + 240
    while (code := ask_server(pid=pid)) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return Run(folder, code=code)


def torchrun(script: Path, ranks: int, *more: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", *more]
    return [*command, str(script)]


def run_trainer(
    folder: Path,
    *,
    ranks: int = 0,
    script: Path = TRAINER,
    timeout: float = 240,
    **settings: object,
) -> Run:
    """Runs the script in `folder` as users do: by Python for ranks=0, else by torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    command = torchrun(script, ranks) if ranks else [sys.executable, str(script)]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        how = {"cwd": folder, "env": clean_environment(**settings), "timeout": timeout}
        done = subprocess.run(command, stdout=out, stderr=err, **how)
    return Run(folder, code=done.returncode)


def import_script(path: Path) -> ModuleType:
    """A script as a module, which has the name of its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def start_process(command: list[object], **options: Any) -> subprocess.Popen[str]:
    """In a session of its own, with pipes for what it prints."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # What a background job starts ignores SIGINT, and Python keeps that.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipes["start_new_session"] = True
    return subprocess.Popen([*map(str, command)], **pipes | options)


def call_tool(main: Callable[[], int | None], *arguments: object) -> tuple[int | None, str]:
    """Calls the main of a program of data/; (its exit code, what it printed)"""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        code = main()
    return code, said.getvalue()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def make_config(trainer: Any = train_gpt, /, **settings: object) -> train_gpt.Config:
    """A Config of settings in capitals, as the script (or an edited one) would read them."""
    config, _, faults, _ = trainer.read_config([], {k: str(v) for k, v in settings.items()})
    assert not faults, faults
    return config


def byte_data(folder: Path, train_tokens: int = 9000, val_tokens: int = 3000) -> dict[str, str]:
    """A byte tokenizer, one shard of each split in `folder`, and the settings that use them."""
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
    """A rank's Runtime, without signals and a process group."""
    return trainer.Runtime(config, {"RANK": str(rank), "WORLD_SIZE": str(world_size)})


def open_pipeline(
    config: train_gpt.Config, split: str = "train", step: int = 0, **replaced: Any
) -> train_gpt.Pipeline:
    """The pipeline of a split as the trainer builds it; `replaced`: some of its arguments."""
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
    """Pickled, it makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple]:
        return os.mkdir, (str(self.path),)


# For small tensors a second thread only waits, and slows other processes down.
train_gpt.torch.set_num_threads(1)


class SimulatedRanks:
    """Ranks that are threads of this process: their sums and broadcasts meet at a barrier.

    Before `run`, Trainers are made one after the other, each with its own equal weights.
    """

    def __init__(self, config: train_gpt.Config, count: int, trainer: Any = train_gpt) -> None:
        self.runtimes = [make_runtime(config, rank, count, trainer) for rank in range(count)]
        self.barrier, self.given = threading.Barrier(count), [None] * count
        self.running = False
        self.sums = [0] * count  # how often each rank has reduced
        for runtime in self.runtimes:
            runtime.all_reduce = partial(self.all_reduce, runtime.rank)
            runtime.broadcast = partial(self.broadcast, runtime.rank)
            runtime.gather = partial(self.gather, runtime.rank)

    def gathered(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait(60)
        everyone = list(self.given)
        self.barrier.wait(60)
        return everyone

    def all_reduce(self, rank: int, tensor: train_gpt.torch.Tensor) -> train_gpt.torch.Tensor:
        self.sums[rank] += 1
        return tensor.copy_(sum(self.gathered(rank, tensor.clone())))

    def broadcast(self, rank: int, value: Any, source: int = 0) -> Any:
        return self.gathered(rank, value)[source] if self.running else value

    def gather(self, rank: int, value: Any) -> list[Any]:
        return self.gathered(rank, value) if self.running else [value] * len(self.runtimes)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns, or the HaltError that it raises, on every rank."""

        def attempt(rank: int) -> Any:
            try:
                return work(rank)
            except train_gpt.HaltError as halt:
                return halt
            except Exception:
                self.barrier.abort()  # or the others would wait
                raise

        self.running = True
        with ThreadPoolExecutor(len(self.runtimes)) as pool:
            return list(pool.map(attempt, range(len(self.runtimes))))


def open_data(config: train_gpt.Config) -> train_gpt.Data:
    """What a run with these settings reads."""
    shards = (train_gpt.Shards(config, split) for split in ("train", "val"))
    return train_gpt.Data(*shards, *train_gpt.read_tokenizer(config))


def make_log(module: ModuleType = train_gpt) -> train_gpt.RunLog:
    """A log that writes no file: what was logged is in `lines` and `events`."""
    log = module.RunLog("r")
    log.lines = []
    log.events = []
    log.line = lambda text: log.lines.extend(text.splitlines())
    log.event = lambda name, **values: log.events.append({"event": name, **values})
    return log
