"""Tiny runs of an edited train_gpt.py on the CPU, for verify.py: their data, processes and results.

This module builds on cli.py (errors, shards), loading.py and runs.py (reads the logs).
"""

import argparse
import ctypes
import difflib
import faulthandler
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
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch._dynamo
import torch.distributed as dist
import torch.profiler
from cli import ToolError, write_shard
from loading import VAL, VAL_ROWS, call_main, read_shard
from runs import read_log

RENDEZVOUS_SECONDS = 60  # how long a rank waits for the other ranks
PROCESS_SECONDS = 3600  # after that, a process is ended
# A step has 16 sequences, 4 in each of 4 micro-steps. Of 5 layers, two are the sources of skip
# connections, so their order matters; two receive one, and the last one receives none.
TINY = {
    "ITERATIONS": 12, "WARMUP_STEPS": 3, "WARMDOWN_ITERS": 5, "MUON_MOMENTUM_WARMUP_STEPS": 6,
    "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 0, "MAX_WALLCLOCK_SECONDS": 0,
    "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 512, "VAL_BATCH_SIZE": 512, "VOCAB_SIZE": 384,
    "NUM_LAYERS": 5, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "DEVICE": "cpu",
    "GRAD_ACCUM_STEPS": 4,
}  # fmt: skip
SET_BY_VERIFY = {
    "DATA_PATH",
    "TOKENIZER_PATH",
    "RUN_ID",
    "RESUME",
    "CHECKPOINT_EVERY",
}
SET_BY_VERIFY |= {"MAX_WALLCLOCK_SECONDS"}  # runs with a time limit do not repeat exactly
# What torchrun sets in the environment, in the order in which Run.start fills it.
LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
MODEL = "tiny.model"


# === Data: shards and a SentencePiece model of a text that every Python has ===
def make_data(folder, seq_len, vocab_size):
    """Write shards and a tokenizer. Return the number of bytes of the validation text."""
    words = Path(argparse.__file__).read_text("utf-8").split()
    words[:0] = ["東京", "🙂"]  # too rare for the tokenizer, so they become byte tokens
    documents = [" ".join(["Zoë läuft", *words[i : i + 28]]) for i in range(0, len(words), 28)]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents), model_writer=model, vocab_size=vocab_size,
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise ToolError(
            f"VOCAB_SIZE={vocab_size}: the text is no good for a tokenizer of this size; try 384"
        ) from error
    Path(folder, MODEL).write_bytes(model.getvalue())
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    begin = tokenizer.bos_id()
    tokens = [id for document in documents for id in [begin, *tokenizer.encode(document)]]
    end = VAL_ROWS * seq_len + 1
    tokens *= 1 + (end + 6000) // len(tokens)
    write_shard(folder / VAL, tokens[:end])
    # A run reads a little more than both shards, so it starts again from the first one.
    write_shard(folder / "fineweb_train_000000.bin", tokens[end : end + 3000])
    write_shard(folder / "fineweb_train_000001.bin", tokens[end + 3000 : end + 6000])
    begins = [i for i, token in enumerate(tokens[:end]) if token == begin] + [end]
    texts = [tokenizer.decode(tokens[i + 1 : j]) for i, j in itertools.pairwise(begins)]
    return sum(len(text.encode()) for text in texts)


# === Runs ===
def refuse_settings(given):
    """Raise ToolError if a setting is given that the runs must not have."""
    for name in SET_BY_VERIFY & given.keys():
        raise ToolError(f"{name} cannot be set here: verify.py sets it for each run")
    if "VAL_TOKENS" in given:
        raise ToolError(
            "VAL_TOKENS cannot be set here: verify.py scores the whole validation split, which it "
            "makes; leave VAL_TOKENS out"
        )


def make_contexts():
    """Return two contexts of multiprocessing. Their processes have torch imported already, but they
    differ in the hash seed (so in the order of sets of text) and in the addresses of objects, as
    two processes of torchrun do."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["sentencepiece", "torch._dynamo", "torch.profiler"])
    seed = os.environ.pop("PYTHONHASHSEED", None)  # the server would have the seed of this process
    try:
        forkserver.ensure_running()
    finally:
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
    return multiprocessing.get_context("fork"), server


class Lab:
    """A temporary folder with data, a script, and the settings that all runs share."""

    def __init__(self, folder, script, given):
        self.folder = folder
        self.script = Path(script).resolve()
        self.given = given
        self.watched = frozenset()  # lines of the script; runs note which of them are executed
        refuse_settings(given)
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        self.env = {name: value for name, value in env.items() if name not in TINY} | given
        self.contexts = make_contexts()
        asked = Run(self, "settings", call_main, ["--print-config"])
        self.run_all([asked])
        if asked.error:
            raise ToolError(f"{self.script} does not start: {asked.error}")
        printed = asked.output()
        try:
            printed = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
            own = {name.upper(): pair["value"] for name, pair in printed.items()}
        except (ValueError, TypeError, LookupError) as error:
            words = (
                "its --print-config has another form; use an edited copy of today's train_gpt.py"
            )
            raise ToolError(f"{self.script}: {words}") from error
        for name in self.given:
            if name not in own:
                similar = difflib.get_close_matches(name.upper(), own, 1, cutoff=0.65)
                advice = f"did you mean {similar[0]}?" if similar else ""
                advice = advice or "--print-config lists its settings"
                raise ToolError(f"{name}: {self.script} has no such setting; {advice}")
        config = TINY | {name: own[name] for name in self.given}
        self.steps = config["ITERATIONS"]
        if self.steps < 6:
            raise ToolError(f"ITERATIONS={self.steps} must be at least 6")
        self.seq_len = config["TRAIN_SEQ_LEN"]
        self.own_seq_len = own["TRAIN_SEQ_LEN"]
        self.val_batch_size = config["VAL_BATCH_SIZE"]
        self.data = folder / "data"
        self.data.mkdir()
        self.val_bytes = make_data(self.data, self.seq_len, config["VOCAB_SIZE"])
        self.env = {name: value for name, value in self.env.items() if name not in own}
        tiny = TINY | self.given
        self.env |= {name: str(tiny[name]) for name in tiny if name in own}
        self.env |= {"DATA_PATH": str(self.data), "TOKENIZER_PATH": f"{self.data}/{MODEL}"}
        self.env["OMP_NUM_THREADS"] = "1"

    def with_validation(self, name, change):
        """Return a new folder with the same data, except that the validation tokens are
        change(tokens)."""
        folder = Path(shutil.copytree(self.data, f"{self.data}-{name}"))
        write_shard(folder / VAL, change(read_shard(folder / VAL)))
        return folder

    def run_all(self, runs, done=None, total=0):
        """Run them, as many at a time as there are cores, and at least two. If `done` is given, the
        number of runs before these, print for each run that ends how many of `total` have ended."""
        waiting = deque(runs)
        started = []
        try:
            while waiting or started:
                while waiting and len(started) < max(2, os.cpu_count() or 1):
                    started.append(waiting.popleft())
                    started[-1].start()
                time.sleep(0.05)
                for run in [run for run in started if run.has_ended()]:
                    started.remove(run)
                    if done is not None:
                        done += 1
                        print(f" {run.name} ({done} of {total})", end="", flush=True)
        finally:
            for run in started:
                run.kill()


class Run:
    """A run of a script in a new folder, and what it left there."""

    def __init__(self, lab, name, act, *more, script=None, ranks=1, context=0, **settings):
        """Prepare to call act(script, *more) in new processes, with the settings in the
        environment. A setting with the value None is left out of it. context: 0 (fork) or 1 (fork
        server), the context that starts rank 0; rank 1 is started by the other one."""
        self.name = name
        self.folder = lab.folder / name
        self.folder.mkdir()
        env = lab.env | settings | {"RUN_ID": name}
        self.env = {key: str(value) for key, value in env.items() if value is not None}
        self.script = script or lab.script
        watched = lab.watched if script is None else frozenset()
        self.work = self.folder, watched, act, self.script, *more
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
            process = context.Process(target=run_process, args=(rank, env, *self.work))
            process.start()
            self.processes.append(process)

    def has_ended(self):
        """Return whether the run has ended. If a rank fails, its other ranks are ended."""
        if not any(process.exitcode for process in self.processes):
            return all(process.exitcode == 0 for process in self.processes)
        for process in self.processes:
            process.join(15)  # the other ranks have time to print their reasons, too
        self.kill()
        places = "; ".join(f"rank {rank} {self.find_place(rank)}" for rank in self.ranks)
        cause = choose_cause(self.output(rank).split("\n")[-1] for rank in self.ranks)
        self.error = f"{cause or 'it ended and printed nothing'} ({places})"
        return True

    def find_place(self, rank):
        """Return in words where in the script a rank failed or was stuck."""
        pattern = rf'File "{re.escape(str(self.script))}", line (\d+), in (\S+)'
        frames = re.findall(pattern, self.output(rank))
        innermost_two = frames[:-3:-1]
        words = [f"{name}, line {line}" for line, name in innermost_two]
        return f"in {', called by '.join(words)}" if words else "has ended"

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def text(self, name):
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace").strip()
        return ""

    def tensors(self, name):
        """Return the tensors in a file of the run."""
        return torch.load(self.folder / name, "cpu", weights_only=True)

    def output(self, rank=0):
        return self.text(f"output{rank}.txt")

    def read(self):
        """Read the losses, the checksums of the data, the score, the artifact and the weights."""
        try:
            [self.log] = read_log(self.folder / "logs" / f"{self.name}.jsonl").runs
            self.steps = {s.step: (s.train_loss, s.data_crc) for s in self.log.steps}
            self.scores = self.log.result.val_loss, self.log.result.val_bpb
            self.artifact = (self.folder / "final_model.int8.ptz").read_bytes()
            self.weights = self.tensors("final_model.pt")
        except (OSError, AttributeError, ValueError) as error:
            self.error = self.error or f"its log or files are not those of the trainer: {error!r}"


def choose_cause(last_lines):
    """Return which of the last lines that the ranks printed says the cause best. If one rank
    fails, the others lose the connection and fail, too, with an error of gloo. If both ranks wait
    for each other, the one that times out first explains most."""
    lines = [line for line in last_lines if line]
    own = [line for line in lines if "gloo" not in line and "another rank" not in line]
    timeouts = [line for line in lines if "Timed out" in line]
    return [*own, *timeouts, *lines, ""][0]


# === Inside a new process ===
def run_process(rank, env, folder, watched, act, script, *more):
    """Call act(script, *more) as a rank of a run, with its output in a file, and exit. watched: see
    `trace_lines`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # verify.py handles it
    os.chdir(folder)
    output = os.open(f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    random.seed()  # a forked process would have the parent's random state
    np.random.seed()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with verify.py
    faulthandler.dump_traceback_later(PROCESS_SECONDS, exit=True)
    keep_short_timeout()
    if watched:
        trace_lines(script, watched, f"lines{rank}.txt")
    code = 1
    try:
        code = act(script, *more)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def keep_short_timeout():
    """Let all collectives of this process end after RENDEZVOUS_SECONDS, whatever the script asks
    for. It asks for an hour while one rank packs or saves, and for ten minutes after that."""
    start, change = dist.init_process_group, dist.distributed_c10d._set_pg_timeout
    short = timedelta(seconds=RENDEZVOUS_SECONDS)
    dist.init_process_group = lambda *given, **named: start(*given, **named | {"timeout": short})
    dist.distributed_c10d._set_pg_timeout = lambda _, *group, **named: change(
        short, *group, **named
    )


def trace_lines(script, watched, path):
    """Write the numbers of those `watched` lines of the script that are executed to a file. Each is
    written at once, because a run may end at any place. Only functions with watched lines that were
    not executed so far are traced, because that is slow."""
    left = {}  # {code: its watched lines that were not executed}

    def trace(frame, event, _):
        code = frame.f_code
        if event == "call":
            if code.co_filename != str(script):
                return None
            if code not in left:
                left[code] = {number for _, _, number in code.co_lines()} & watched
        elif frame.f_lineno in left[code]:
            left[code].remove(frame.f_lineno)
            with open(path, "a") as file:
                print(frame.f_lineno, file=file)
        return trace if left[code] else None

    threading.settrace(trace)
    sys.settrace(trace)
