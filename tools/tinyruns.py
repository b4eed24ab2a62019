"""Tiny runs of an edited train_gpt.py on the CPU, for verify.py: data, processes, results."""

import argparse
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import numpy as np
import sentencepiece
import torch
from cli import ToolError, fault_of_script_name
from runs import read_log

STILL = 60  # seconds in which all ranks of a run use no processor: they wait for each other
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
VAL = "fineweb_val_000000.bin"
MODEL = "tiny.model"
PRELOADED = "numpy", "sentencepiece", "torch", "torch._dynamo", "torch.profiler"


# === Data: a text that every Python has, a SentencePiece model of it, shards ===
def make_data(folder, seq_len, vocab_size):
    """Writes shards and tokenizer; returns the bytes of text that the validation targets are."""
    words = Path(argparse.__file__).read_text("utf-8").split()
    words[:0] = ["東京", "🙂"]  # of several bytes: too rare for the tokenizer; "ë" and "ä" are not
    documents = [" ".join(["Zoë läuft", *words[i : i + 28]]) for i in range(0, len(words), 28)]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents), model_writer=model, vocab_size=vocab_size,
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise ToolError(f"VOCAB_SIZE={vocab_size}: no tokenizer of this size: set 512") from error
    Path(folder, MODEL).write_bytes(model.getvalue())
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    begin = tokenizer.bos_id()
    tokens = [id for document in documents for id in [begin, *tokenizer.encode(document)]]
    end = VAL_ROWS * seq_len + 1
    tokens *= 1 + (end + 6000) // len(tokens)
    write_shard(folder / VAL, tokens[:end])
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


def bytes_of_targets(folder, x, y):
    """The bytes of text of each target y after x, both arrays of tokens of these shards."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(Path(folder, MODEL)))
    ids = range(len(tokenizer))
    texts = [tokenizer.id_to_piece(id).replace("\u2581", " ") for id in ids]
    silent = np.array([tokenizer.is_control(id) or tokenizer.is_unknown(id) for id in ids])
    sizes = [1 if tokenizer.is_byte(id) else len(texts[id].encode()) for id in ids]
    sizes = np.where(silent, 0, sizes)
    spaces = np.array([text.startswith(" ") for text in texts]) & ~silent
    return sizes[y] - (spaces[y] & silent[x])  # no space stands at the beginning of a text


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
        self.contexts = two_contexts()

    def prepare(self, given):
        """Asks the script for its settings, and makes the data for them."""
        asked = Run(self, "settings", call_main, ["--print-config"])
        self.run_all([asked], quiet=True)
        if asked.error:
            raise ToolError(f"{self.script} does not start: {asked.error}")
        printed = asked.output()
        try:
            printed = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
            config = {name.upper(): pair["value"] for name, pair in printed.items()}
        except (ValueError, TypeError, LookupError) as error:
            words = "no edited copy of today's train_gpt.py: its --print-config is another"
            raise ToolError(f"{self.script}: {words}") from error
        for name in given:
            if name not in config:
                raise ToolError(f"{name}: {self.script} has no such setting: see --print-config")
        self.steps = config["ITERATIONS"]
        if self.steps < 6:
            raise ToolError(f"ITERATIONS={self.steps}: set at least 6")
        self.seq_len = config["TRAIN_SEQ_LEN"]
        self.val_bytes = make_data(self.folder, self.seq_len, config["VOCAB_SIZE"])
        tiny = {name: self.env[name] for name in {*TINY, *given} & config.keys()}
        self.env = {name: value for name, value in self.env.items() if name not in config} | tiny
        self.env |= {"DATA_PATH": str(self.folder), "TOKENIZER_PATH": f"{self.folder}/{MODEL}"}
        self.env["OMP_NUM_THREADS"] = "1"

    def with_validation(self, name, change):
        """A new folder with the same data, and change(tokens) of the validation split."""
        folder = self.folder / f"data-{name}"
        folder.mkdir()
        for path in self.folder.glob("fineweb_*.bin"):
            shutil.copy(path, folder)
        shutil.copy(self.folder / MODEL, folder)
        write_shard(folder / VAL, change(read_shard(folder / VAL)))
        return folder

    def run_all(self, runs, quiet=False):
        """Runs them, as many at once as there are cores, and at least two. Prints the name of each
        that ends."""
        waiting = deque(runs)
        started = []
        try:
            while waiting or started:
                while waiting and len(started) < max(2, os.cpu_count() or 1):
                    started.append(waiting.popleft())
                    started[-1].start()
                time.sleep(0.05)
                for run in [run for run in started if run.is_over()]:
                    started.remove(run)
                    print("" if quiet else f" {run.name}", end="", flush=True)
        finally:
            for run in started:
                run.kill()


def find_script(name):
    path = Path(name).resolve()
    if not path.is_file():
        raise ToolError(f"{name}: no file of this name: name an edited copy of train_gpt.py")
    if fault := fault_of_script_name(path.name):
        raise ToolError(f"{name}: {fault}")
    if "class Trainer" not in path.read_text("utf-8", "replace"):
        raise ToolError(f"{name}: no class Trainer: name an edited train_gpt.py, not a packed one")
    return path


class Run:
    """A run of a script in a folder of its own, and what it left there."""

    def __init__(self, lab, name, act, *more, script=None, ranks=1, context=0, **settings):
        """act(script, *more) is called in new processes, with the settings in their environment:
        rank 0 by lab.contexts[context], rank 1 by the other one."""
        self.name = name
        self.folder = lab.folder / name
        self.folder.mkdir()
        settings = {key: str(value) for key, value in settings.items()}
        self.env = lab.env | settings | {"RUN_ID": name}
        self.work = self.folder, act, script or lab.script, *more
        self.ranks = range(ranks)
        self.contexts = [lab.contexts[(context + rank) % 2] for rank in self.ranks]
        self.processes = []
        self.error = ""

    def start(self):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        count = len(self.ranks)
        for rank, context in enumerate(self.contexts):
            values = map(str, (rank, count, rank, "localhost", port))
            env = self.env | (dict(zip(LAUNCHER, values, strict=True)) if count > 1 else {})
            process = context.Process(target=work, args=(rank, env, *self.work))
            process.start()
            self.processes.append(process)

    def is_over(self):
        """Has it ended? The first failure of a rank ends the others."""
        codes = [process.exitcode for process in self.processes]
        still = [self.text(f"still{rank}.txt") for rank in self.ranks if codes[rank] is None]
        if any(codes):
            ends = [self.output(rank).split("\n")[-1] for rank in self.ranks if codes[rank]]
            # Where a rank fails, the others fail, too, because they lose it.
            lost = "gloo", "another rank"
            said = max(ends, key=lambda end: (bool(end) and not any(w in end for w in lost), end))
            lines = re.findall(rf'File "{self.work[2]}", line (\d+)', self.output())
            self.error = (said or f"exit code {codes}") + (f" (line {lines[-1]})" if lines else "")
        elif still and all(still):
            ended = [f"rank {rank} has ended" for rank in self.ranks if codes[rank] == 0]
            self.error = f"nothing is computed for {STILL} s: {'; '.join(still + ended)}"
        if self.error:
            self.kill()
        return None not in codes or bool(self.error)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def text(self, name):
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace").strip()
        return ""

    def output(self, rank=0):
        return self.text(f"output{rank}.txt")

    def read(self):
        """Reads its losses, checksums of rows, score, artifact and weights."""
        try:
            [self.log] = read_log(self.folder / "logs" / f"{self.name}.jsonl").runs
            self.steps = {s.step: (s.train_loss, s.data_crc) for s in self.log.steps}
            self.scores = self.log.result.val_loss, self.log.result.val_bpb
            self.artifact = (self.folder / "final_model.int8.ptz").read_bytes()
            self.weights = torch.load(self.folder / "final_model.pt", "cpu", weights_only=True)
        except (OSError, AttributeError, ValueError) as error:
            self.error = self.error or f"its log or files are not the trainer's: {error!r}"


# === Processes ===
def two_contexts():
    """Two processes that have imported torch and fork others for ranks: this one, and
    multiprocessing's server. They differ as two processes of torchrun do: in the order of sets of
    text, and in the addresses of objects."""
    contexts = [multiprocessing.get_context(kind) for kind in ("fork", "forkserver")]
    contexts[1].set_forkserver_preload(list(PRELOADED))
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with mock.patch.dict(os.environ, PYTHONHASHSEED=other):
        forkserver.ensure_running()
    for name in PRELOADED:
        importlib.import_module(name)
    return contexts


# === Inside a new process ===
def work(rank, env, folder, act, script, *more):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # verify.py hears it
    os.chdir(folder)
    output = os.open(f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    random.seed()  # as in a process that was not forked
    np.random.seed()
    threading.Thread(target=watch, args=(rank, str(script)), daemon=True).start()
    code = 1
    try:
        code = act(script, *more)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def watch(rank, script):
    """While this process uses no processor for STILL seconds, still<rank>.txt says where it is.
    Where verify.py was killed, it ends."""
    path, parent = Path(f"still{rank}.txt"), os.getppid()
    used, since = 0.0, time.monotonic()
    while True:
        time.sleep(1)
        if os.getppid() != parent:
            os._exit(1)
        if time.process_time() - used > 1:
            used, since = time.process_time(), time.monotonic()
            path.unlink(missing_ok=True)
        elif time.monotonic() - since > STILL and not path.exists():
            path.write_text(f"rank {rank} {where_is_it(script)}")


def where_is_it(script):
    """What the main thread waits for, and the functions of the script that have called it."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    calls = [frame.name for frame in frames if "/distributed/" in frame.filename]
    ours = [frame for frame in frames if frame.filename == script]
    ours = [frame for frame in ours if frame.name not in ("main", "execute", *calls, "gather")]
    lines = [f"{frame.name} (line {frame.lineno})" for frame in reversed(ours[-3:])]
    call = next((f"waits for {name}" for name in calls if name != "wrapper"), "stands")
    return f"{call} in {', called by '.join(lines)}"


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
