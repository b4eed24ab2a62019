"""Tiny runs of an edited train_gpt.py on the CPU, for verify.py: data, processes, results."""

import argparse
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import time
import traceback
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from cli import ToolError, fault_of_script_name

SECONDS = 300  # a run that takes longer is ended
VAL_ROWS = 41  # odd: the last batch is short
TINY = {  # a step has 8 spans of 2 rows; the last of 3 layers has no skip connection
    "ITERATIONS": 12, "WARMUP_STEPS": 3, "WARMDOWN_ITERS": 5, "MUON_MOMENTUM_WARMUP_STEPS": 6,
    "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 0, "MAX_WALLCLOCK_SECONDS": 0,
    "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 512, "VAL_BATCH_SIZE": 512, "VOCAB_SIZE": 512,
    "NUM_LAYERS": 3, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "DEVICE": "cpu",
}  # fmt: skip
OURS = {"DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "RESUME", "CHECKPOINT_EVERY", "VAL_TOKENS"}
OURS |= {"MAX_WALLCLOCK_SECONDS"}  # runs that end by the clock cannot be equal
LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
PRELOADED = "numpy", "sentencepiece", "torch", "torch._dynamo", "torch.profiler"


# === Data: a text that every Python has, a SentencePiece model of it, shards ===
def make_data(folder, seq_len, vocab_size):
    """Writes shards and tokenizer; returns the bytes of text that the validation targets are."""
    words = Path(argparse.__file__).read_text("utf-8").split()
    words[:0] = ["Zoë", "läuft", "über", "東京", "🙂"]  # characters of several bytes
    documents = [" ".join(words[i : i + 30]) for i in range(0, len(words), 30)]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents), model_writer=model, vocab_size=vocab_size,
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise ToolError(f"VOCAB_SIZE={vocab_size}: no tokenizer of this size: set 512") from error
    Path(folder, "tiny.model").write_bytes(model.getvalue())
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    begin = tokenizer.bos_id()
    tokens = [id for document in documents for id in [begin, *tokenizer.encode(document)]]
    end = VAL_ROWS * seq_len + 1
    tokens *= 1 + (end + 6000) // len(tokens)
    write_shard(folder / "fineweb_val_000000.bin", tokens[:end])
    # A run reads a little more than both, so that it starts from the first one again.
    write_shard(folder / "fineweb_train_000000.bin", tokens[end : end + 3000])
    write_shard(folder / "fineweb_train_000001.bin", tokens[end + 3000 : end + 6000])
    begins = [i for i, token in enumerate(tokens[:end]) if token == begin] + [end]
    texts = [tokenizer.decode(tokens[i + 1 : j]) for i, j in itertools.pairwise(begins)]
    return sum(len(text.encode()) for text in texts)


def write_shard(path, tokens):
    header = np.array([20240520, 1, len(tokens)] + 253 * [0], "<i4").tobytes()
    path.write_bytes(header + np.array(tokens, "<u2").tobytes())


def read_shard(path):
    return np.fromfile(path, "<u2", offset=1024)


# === Runs ===
class Lab:
    """A temporary folder with data, a script, and the settings that all its runs share."""

    def __init__(self, folder, script, given):
        self.folder = folder
        self.script = find_script(script)
        for name in OURS & given.keys():
            raise ToolError(f"{name} cannot be given: each run has its own")
        tiny = {name: str(value) for name, value in (TINY | given).items()}
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        self.env = env | tiny
        asked = Run(self, "settings", call_main, ["--print-config"])
        run_all([asked])
        if asked.error:
            raise ToolError(f"{script} does not start: {asked.error}")
        printed = asked.output()
        try:
            printed = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
            config = {name.upper(): pair["value"] for name, pair in printed.items()}
        except (ValueError, TypeError, LookupError) as error:
            words = "no edited copy of today's train_gpt.py: its --print-config is another"
            raise ToolError(f"{script}: {words}") from error
        for name in given:
            if name not in config:
                raise ToolError(f"{name}: {script} has no such setting: see its --print-config")
        self.steps = config["ITERATIONS"]
        if self.steps < 6:
            raise ToolError(f"ITERATIONS={self.steps}: set at least 6")
        self.seq_len = config["TRAIN_SEQ_LEN"]
        self.val_bytes = make_data(folder, self.seq_len, config["VOCAB_SIZE"])
        self.env = {name: value for name, value in env.items() if name not in config}
        self.env |= {name: value for name, value in tiny.items() if name in config}
        self.env |= {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "tiny.model")}
        self.env["OMP_NUM_THREADS"] = "1"

    def with_validation(self, part):
        """A new folder with the same data, but only a part of the validation tokens."""
        folder = self.folder / f"data-{part}"
        folder.mkdir()
        for path in self.folder.glob("fineweb_*.bin"):
            shutil.copy(path, folder)
        val = folder / "fineweb_val_000000.bin"
        write_shard(val, read_shard(val)[part])
        return folder


def find_script(name):
    path = Path(name).resolve()
    if not path.is_file():
        raise ToolError(f"{name}: no file of this name: name an edited copy of train_gpt.py")
    if fault := fault_of_script_name(path.name):
        raise ToolError(f"{name}: {fault}")
    try:
        text = path.read_text("utf-8")
        compile(text, name, "exec")
    except (SyntaxError, ValueError) as error:
        raise ToolError(f"{name}: line {getattr(error, 'lineno', 1)}: {error}") from error
    if "class Trainer" not in text:
        raise ToolError(f"{name}: no class Trainer: name an edited train_gpt.py, not a packed one")
    return path


class Run:
    """A run of a script in a folder of its own, and what it left there."""

    def __init__(self, lab, name, act, *more, script=None, ranks=1, **settings):
        """act(script, *more) is called in a new process, with the settings in its environment."""
        self.name = name
        self.folder = lab.folder / name
        self.folder.mkdir()
        settings = {key: str(value) for key, value in settings.items()}
        self.env = lab.env | settings | {"RUN_ID": name}
        self.processes = []
        self.work = self.folder, act, script or lab.script, *more
        self.ranks = ranks
        self.error = ""

    def start(self):
        """Starts it. A server of new processes has imported torch once for all of them."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.until = time.monotonic() + SECONDS
        with socket.socket() as server:
            server.bind(("localhost", 0))
            port = server.getsockname()[1]
        for rank in range(self.ranks):
            values = map(str, (rank, self.ranks, rank, "localhost", port))
            env = self.env | (dict(zip(LAUNCHER, values, strict=True)) if self.ranks > 1 else {})
            process = context.Process(target=work, args=(rank, env, *self.work), daemon=True)
            process.start()
            self.processes.append(process)

    def is_over(self):
        """Has it ended? The first failure of a rank ends the others."""
        codes = [process.exitcode for process in self.processes]
        late = time.monotonic() > self.until
        if any(codes) or late:
            self.kill()
            ends = [(self.output(rank).split("\n") or [""])[-1] for rank in range(self.ranks)]
            # Where a rank fails, the others fail, too, in gloo.
            said = max(ends, key=lambda end: ("Error" in end and "gloo" not in end, end))
            lines = re.findall(rf'File "{self.work[2]}", line (\d+)', self.output())
            said += f" (line {lines[-1]})" if lines else ""
            self.error = f"no end in {SECONDS} s: {said}" if late else said or f"exit code {codes}"
        return late or None not in codes or bool(self.error)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def output(self, rank=0):
        path = self.folder / f"output{rank}.txt"
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def read(self):
        """Reads its losses, checksums of rows, score, artifact and weights."""
        try:
            log = (self.folder / "logs" / f"{self.name}.jsonl").read_text()
            events = [json.loads(line) for line in log.splitlines()]
            steps = [event for event in events if event["event"] == "step"]
            self.steps = {each["step"]: (each["train_loss"], each["data_crc"]) for each in steps}
            self.score = next(event for event in events if event["event"] == "score")
            self.artifact = (self.folder / "final_model.int8.ptz").read_bytes()
            self.weights = torch.load(self.folder / "final_model.pt", "cpu", weights_only=True)
        except (OSError, LookupError, ValueError, StopIteration) as error:
            self.error = self.error or f"its log or files are not the trainer's: {error!r}"


def run_all(runs):
    """Runs them, as many at once as there are cores; leaves no process."""
    waiting = deque(runs)
    started = []
    try:
        while waiting or started:
            while waiting and len(started) < max(2, os.cpu_count() or 1):
                started.append(waiting.popleft())
                started[-1].start()
            wait([process.sentinel for run in started for process in run.processes], timeout=1)
            started = [run for run in started if not run.is_over()]
    finally:
        for run in started:
            run.kill()


# === Inside a new process ===
def work(rank, env, folder, act, *arguments):
    os.chdir(folder)
    output = os.open(f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    code = 1
    try:
        code = act(*arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def load(script):
    sys.path[0] = str(script.parent)
    sys.argv = [str(script)]
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SMALL = 500  # numbers: the matrices of a tiny model are quantized, too
    return module


def call_main(script, arguments=()):
    return load(script).main(list(arguments), os.environ)
