"""What the tests share: the trainer as a module, shards of known tokens, a small corpus,
the script run as users do."""

import argparse
import ast
import configparser
import dataclasses
import inspect
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Rooms are no packages. Appended: logs/trace.py must not hide the standard library's trace.
sys.path += [str(ROOT / "logs"), str(ROOT / "records")]
from runs import Logs, read_log  # noqa: E402

import train_gpt  # noqa: E402  (the repository's root is not a package)

pytest_plugins = ["promises"]
SETTINGS = {f.name.upper() for f in dataclasses.fields(train_gpt.Config)}
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
    """A shard in the challenge's format: 256 little-endian int32 words,
    then the tokens as uint16."""
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


@dataclasses.dataclass
class Corpus:
    folder: Path
    tokenizer: Path
    train: np.ndarray
    val: np.ndarray
    val_text_bytes: int

    @property
    def env(self) -> dict[str, str]:
        return {"DATA_PATH": str(self.folder), "TOKENIZER_PATH": str(self.tokenizer)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Real text (modules of the standard library), a 300-piece tokenizer,
    three uneven train shards, one val shard."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        line
        for module in (argparse, ast, configparser, shutil)
        for line in inspect.getsource(module).lower().splitlines()
        if line.strip()
    ]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spm"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    documents = ["\n".join(lines[i : i + 20]) for i in range(0, len(lines), 20)]
    ids = [[1, *model.encode(document)] for document in documents]
    val_count = len(ids) // 10
    val = np.concatenate(ids[:val_count])
    train = np.concatenate(ids[val_count:])
    write_split(folder / "data", "val", val, [])
    write_split(folder / "data", "train", train, [len(train) // 5, len(train) // 3])
    text_bytes = sum(len(document.encode("utf-8")) for document in documents[:val_count])
    return Corpus(folder / "data", folder / "spm.model", train, val, text_bytes)


@dataclasses.dataclass
class Finished:
    """A run of the script: what it printed, what it logged, how it ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def text(self) -> str:
        """The text log without the script's source."""
        return self.log_path.read_text(encoding="utf-8").split("=" * 100 + "\n", 2)[-1]

    @property
    def log_path(self) -> Path:
        return next(path for path in (self.folder / "logs").glob("*.txt"))

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


def run_trainer(
    folder: Path,
    *,
    ranks: int = 0,
    args: tuple[str, ...] = (),
    timeout: float = 240,
    script: Path | None = None,
    **settings: object,
) -> Finished:
    """Runs the script in `folder` by subprocess: plain python for ranks=0,
    else under torch.distributed.run."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = (
        [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{free_port()}",
        ]
        if ranks
        else []
    )
    command = [sys.executable, *launcher, str(script or ROOT / "train_gpt.py"), *args]
    done = subprocess.run(
        command,
        cwd=folder,
        text=True,
        env=clean_environment(**settings),
        capture_output=True,
        timeout=timeout,
    )
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def heed_interrupts() -> None:
    """For a child's start: what a background job starts ignores SIGINT, and Python keeps that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def config_of(**settings: object) -> train_gpt.Config:
    """A Config from environment-style names, as the script would read it;
    raises on values of a wrong type."""
    config, faults = train_gpt.read_config({k: str(v) for k, v in settings.items()})
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


def runtime_of(
    config: train_gpt.Config, rank: int = 0, world_size: int = 1, trainer: Any = train_gpt
) -> train_gpt.Runtime:
    """A rank's Runtime, without signals and a process group. `trainer`: whose, the script's or an
    edited one's."""
    return trainer.Runtime(config, {"RANK": str(rank), "WORLD_SIZE": str(world_size)})


def open_pipeline(
    config: train_gpt.Config, split: str = "train", step: int = 0, **replaced: Any
) -> train_gpt.Pipeline:
    """The pipeline of a split as the trainer builds it; `replaced`: some of its arguments."""
    runtime = replaced.pop("runtime", None) or runtime_of(config)
    shards = replaced.pop("shards", None) or train_gpt.open_shards(config, split)
    if split == "train":
        plan = train_gpt.BatchPlan.train(config, runtime, step)
    else:
        plan = train_gpt.BatchPlan.val(config, runtime, shards.ends[-1])
    overlap = replaced.pop("overlap", None) or train_gpt.Overlap.of(config, split, runtime.cuda)
    return train_gpt.Pipeline(shards, plan, overlap, runtime, **replaced)


# For small tensors a second thread only waits, and slows other processes down.
train_gpt.torch.set_num_threads(1)


class Recorder(train_gpt.RunLog):
    """A log that writes no file: what was logged is in `lines` and `events`."""

    def __init__(self) -> None:
        super().__init__("recorder", enabled=False)
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []

    def line(self, text: str, *more: Any, **named: Any) -> None:
        self.lines += text.splitlines()
        super().line(text, *more, **named)

    def event(self, name: str, **values: Any) -> None:
        self.events.append({"event": name, **values})


class SimulatedRanks:
    """Ranks that are threads of this process: their sums and broadcasts meet at a barrier."""

    def __init__(self, config: train_gpt.Config, count: int, trainer: Any = train_gpt) -> None:
        self.runtimes = [runtime_of(config, rank, count, trainer) for rank in range(count)]
        self.barrier, self.given = threading.Barrier(count), [None] * count
        self.sums = [0] * count  # how often each rank has reduced
        for runtime in self.runtimes:
            runtime.all_reduce = partial(self.all_reduce, runtime.rank)
            runtime.broadcast = partial(self.broadcast, runtime.rank)

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
        return self.gathered(rank, value)[source]

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

        with ThreadPoolExecutor(len(self.runtimes)) as pool:
            return list(pool.map(attempt, range(len(self.runtimes))))


# What the logs of the tools' tests are made of.

Call = Callable[..., tuple[int, str, str]]
RULE = "=" * 100
TOKENS, BYTES = 62_021_632, 151_080_362  # of the challenge's validation split
HEADER = (
    "tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04 "
    "train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 "
    "max_wallclock_seconds:600.000"
)
LOGGED = {"script": "", "smi": "", "world": 8, "steps": 13_790, "ms": 43.5, "crc": 0}
LOGGED |= {"partial": "", "eval_ms": 2100, "artifact": 15_700_000, "factor": 1.0}


def bpb_of(nats: float, factor: float = 1.0) -> float:
    return nats / math.log(2) * TOKENS / (BYTES * factor)


def log_text(seed: int = 1, nats: float = 1.9, **changed: Any) -> str:
    """A log as the challenge's script writes it. Of `changed`, what is neither in LOGGED nor the
    bytes of `code` and `total` are words of its header."""
    one = SimpleNamespace(**{name: changed.pop(name, value) for name, value in LOGGED.items()})
    code = changed.pop("code", len(one.script.encode()))
    total = changed.pop("total", one.artifact + code)
    words = dict(word.split(":") for word in HEADER.split()) | changed
    lines = [f"{one.script}\n{RULE}\nRunning Python 3.12.3 (main, x)"] if one.script else []
    lines += [f"Running PyTorch 2.9.1+cu128\n{one.smi}\n{RULE}"] if one.smi else []
    lines += [
        "train_loader:dataset:fineweb10B_sp1024 train_shards:80",
        f"val_loader:shards pattern=./data/fineweb_val_*.bin tokens:{TOKENS}{one.partial}",
        f"model_params:17059912\nworld_size:{one.world} grad_accum_steps:1",
        " ".join(f"{name}:{value}" for name, value in words.items()),
        f"seed:{seed}",
    ]
    for k in (1, 10, 1000, 10_000, one.steps):
        took, before = f"train_time:{k * one.ms:.0f}ms", nats - 0.01 + 9 / k * (k < one.steps)
        crc = f" data_crc:{one.crc + k:08x}" if one.crc else ""
        lines += [
            f"step:{k}/20000 train_loss:{nats + 9 / k:.4f} {took} step_avg:{one.ms:.2f}ms{crc}",
            f"step:{k}/20000 val_loss:{before:.4f} val_bpb:{bpb_of(before, one.factor):.4f} {took}",
        ]
    bpb = bpb_of(nats, one.factor)
    lines += [
        f"stopping_early: wallclock_cap {took} step:{one.steps}/20000",
        f"Serialized model: 67000000 bytes\nCode size: {code} bytes",
        f"Serialized model int8+zlib: {one.artifact} bytes",
        f"Total submission size int8+zlib: {total} bytes",
        f"final_int8_zlib_roundtrip val_loss:{nats:.4f} val_bpb:{bpb:.4f} "
        f"eval_time:{one.eval_ms}ms{one.partial}",
        f"final_int8_zlib_roundtrip_exact val_loss:{nats:.8f} val_bpb:{bpb:.8f}{one.partial}\n",
    ]
    return "\n".join(lines)


def read_text(folder: Path, text: str | bytes, name: str = "train.log") -> Logs:
    """What is read from a log with this text."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return read_log(folder / name)


# A record of three runs, and its folder.

SCRIPT = (
    '"""A trainer."""\nimport os\nimport torch\n\n\ndef main():\n    print(torch, os)\n\n\nmain()\n'
)
SMI = "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |\n" + "\n".join(
    f"|   {n}  NVIDIA H100 80GB HBM3    On  |   00000000:19:00.0 Off | 0 |" for n in range(8)
)
NAME = "2026-04-01_WiderMLP"
ARTIFACT = 15_700_000


def record_log(**changed: Any) -> str:
    """A log with its script and machine, as it would be of 8 H100s; each seed has its own times."""
    ms = 43.5 + (changed.get("seed", 1) - 1) % 97 * 1e-4
    return log_text(**{"script": SCRIPT, "smi": SMI, "ms": ms} | changed)


# What a record is made of, beside words of its logs. `changed`: keys of submission.json, None: left
# out; `first`: other words in the log of seed 1; `each`: a change of every log; `files`: more of
# them, or others; `moved`: one that lies elsewhere.
MADE_OF = {
    "results": {1: 1.9000, 42: 1.9010, 1337: 1.9005}, "script": SCRIPT, "changed": {},
    "readme": "# Wider MLP\n" + "What was done, and how it was run. " * 5,
    "first": ("", ""), "each": str, "files": {}, "moved": (),
}  # fmt: skip


def make_record(folder: Path, **log: Any) -> Path:
    """A record that is in order, save for what is named."""
    one = SimpleNamespace(**{name: log.pop(name, value) for name, value in MADE_OF.items()})
    submitted = submission_of(one.results, one.script, log) | one.changed
    given = {name: value for name, value in submitted.items() if value is not None}
    made = {"train_gpt.py": one.script, "README.md": one.readme}
    made["submission.json"] = json.dumps(given)
    for seed, nats in one.results.items():
        text = record_log(seed=seed, nats=nats, **{"script": one.script, **log})
        made[f"train_seed{seed}.log"] = one.each(text)
    old, new = one.first
    assert not old or old in made["train_seed1.log"]
    made |= {"train_seed1.log": made["train_seed1.log"].replace(old, new)} if old else {}
    for name, text in (made | one.files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if one.moved:
        (folder / one.moved[0]).rename(folder / one.moved[1])
    return folder


def submission_of(results: dict[int, float], script: str, log: dict[str, Any]) -> dict[str, Any]:
    loss, factor, code = fmean(results.values()), log.get("factor", 1.0), len(script.encode())
    each = {str(seed): {"val_loss": n, "val_bpb": bpb_of(n, factor)} for seed, n in results.items()}
    return {
        "name": "Wider MLP", "author": "Ada", "github_id": "ada", "date": "2026-04-01",
        "track": "10min_16mb", "seeds": list(results), "seed_results": each,
        "val_loss": round(loss, 8), "val_bpb": round(bpb_of(loss, factor), 8),
        "bytes_total": log.get("artifact", ARTIFACT) + code, "bytes_code": code,
    }  # fmt: skip


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A tool's main, called with arguments: its exit code, what it printed, its errors."""

    def run(main: Callable[..., int], *arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
