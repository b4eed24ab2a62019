"""Make tiny runs of an edited train_gpt.py on the CPU, for verify.py.

A `Lab` is a temporary folder with a small data set, and the settings that all runs share. A `Run`
is a run of the script in new processes, one for each rank, in a folder of its own. It then reads
the log and the other files that the run left. judge.py decides which runs are made; the functions
that a run calls in its processes are in probes.py.

This module uses cli.py (errors, shards), loading.py, and runs.py (which reads logs).
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

# A collective operation fails if a rank has waited for the other ranks for this number of seconds.
# So a deadlock is found after a minute.
RENDEZVOUS_SECONDS = 60
PROCESS_SECONDS = 3600  # a process that runs longer is ended
# The settings of all runs. A step has 16 sequences of 32 tokens: 4 micro-steps with 4 sequences
# each. The model has 5 layers: the outputs of the first two are added to the inputs of the next two
# by skip connections, so the order of these matters. The last layer has no skip connection.
TINY = {
    "ITERATIONS": 12, "WARMUP_STEPS": 3, "WARMDOWN_ITERS": 5, "MUON_MOMENTUM_WARMUP_STEPS": 6,
    "TRAIN_LOG_EVERY": 1, "VAL_LOSS_EVERY": 0, "MAX_WALLCLOCK_SECONDS": 0,
    "TRAIN_SEQ_LEN": 32, "TRAIN_BATCH_TOKENS": 512, "VAL_BATCH_SIZE": 512, "VOCAB_SIZE": 384,
    "NUM_LAYERS": 5, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "DEVICE": "cpu",
    "GRAD_ACCUM_STEPS": 4,
}  # fmt: skip
# Settings that the user cannot give, because verify.py sets them for each run.
SET_BY_VERIFY = {
    "DATA_PATH",
    "TOKENIZER_PATH",
    "RUN_ID",
    "RESUME",
    "CHECKPOINT_EVERY",
}
# With a time limit, learning rates depend on measured times, so no two runs would be equal.
SET_BY_VERIFY |= {"MAX_WALLCLOCK_SECONDS"}
# The environment variables that torchrun sets for each process. Run.start lists their values in
# the same order.
LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
MODEL = "tiny.model"  # the file name of the tokenizer


# === Data: shards and a tokenizer, made of the source code of a module that every Python has ===
def make_data(folder, seq_len, vocab_size):
    """Write one validation shard, two training shards and a SentencePiece tokenizer to a folder.

    Return the number of bytes of text in the validation shard. Raises ToolError if no tokenizer
    with `vocab_size` tokens can be made of the text.
    """
    words = Path(argparse.__file__).read_text("utf-8").split()
    # These characters are too rare to become tokens, so they are split into tokens of single bytes.
    words[:0] = ["東京", "🙂"]
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
    # With 12 steps, a run reads a little more tokens than both training shards have. So it also
    # begins to read the first shard again.
    write_shard(folder / "fineweb_train_000000.bin", tokens[end : end + 3000])
    write_shard(folder / "fineweb_train_000001.bin", tokens[end + 3000 : end + 6000])
    # To count the bytes of text, decode each document of the validation shard by itself, without
    # the token that begins it.
    begins = [i for i, token in enumerate(tokens[:end]) if token == begin] + [end]
    texts = [tokenizer.decode(tokens[i + 1 : j]) for i, j in itertools.pairwise(begins)]
    return sum(len(text.encode()) for text in texts)


# === Runs ===
def refuse_settings(given):
    """Raise ToolError if the user has given a setting that the runs must not have.

    given: {NAME: text} of the settings that the user has given.
    """
    for name in SET_BY_VERIFY & given.keys():
        raise ToolError(f"{name} cannot be set here: verify.py sets it for each run")
    if "VAL_TOKENS" in given:
        raise ToolError(
            "VAL_TOKENS cannot be set here: verify.py scores the whole validation split, which it "
            "makes; leave VAL_TOKENS out"
        )


def make_contexts():
    """Return two contexts of multiprocessing, "fork" and "forkserver".

    Processes of both contexts start fast, because they are copies of a process that has imported
    torch. Processes of one context differ from those of the other one as two processes of torchrun
    do: in the hash seed, which decides the order of sets of texts, and in the addresses of objects.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["sentencepiece", "torch._dynamo", "torch.profiler"])
    # If the user has set PYTHONHASHSEED, the server must not get it, because both contexts would
    # then have the same hash seed.
    seed = os.environ.pop("PYTHONHASHSEED", None)
    try:
        forkserver.ensure_running()
    finally:
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
    return multiprocessing.get_context("fork"), server


class Lab:
    """A temporary folder with a data set, the script, and the environment that all runs share.

    steps, seq_len, val_batch_size: ITERATIONS, TRAIN_SEQ_LEN and VAL_BATCH_SIZE of the runs.
    own_seq_len: the TRAIN_SEQ_LEN that the script has without the tiny settings. val_bytes: the
    number of bytes of text in the validation shard.
    """

    def __init__(self, folder, script, given):
        # folder: an empty folder (a Path). given: {NAME: text} of the settings that the user gave.
        # Raises ToolError if the script does not start or a setting is wrong.
        self.folder = folder
        self.script = Path(script).resolve()
        self.given = given
        # Numbers of lines of the script. Runs write down which of these lines they execute.
        self.watched = frozenset()
        refuse_settings(given)
        # This environment is only for the first run, which prints the settings of the script.
        # Without the tiny settings, it prints the script's own TRAIN_SEQ_LEN.
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
        # `own` has the values as the script has parsed them; `given` has them as texts.
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
        # The environment of all further runs: no setting of the user's environment reaches them,
        # only those that the user has given as arguments. A setting of TINY that the script does
        # not have is left out.
        self.env = {name: value for name, value in self.env.items() if name not in own}
        tiny = TINY | self.given
        self.env |= {name: str(tiny[name]) for name in tiny if name in own}
        self.env |= {"DATA_PATH": str(self.data), "TOKENIZER_PATH": f"{self.data}/{MODEL}"}
        self.env["OMP_NUM_THREADS"] = "1"

    def with_validation(self, name, change):
        """Return the path of a new folder with a copy of the data set, in which change(tokens)
        replaces the tokens of the validation shard. name: the end of the folder's name."""
        folder = Path(shutil.copytree(self.data, f"{self.data}-{name}"))
        write_shard(folder / VAL, change(read_shard(folder / VAL)))
        return folder

    def run_all(self, runs, done=None, total=0):
        """Start all runs, and wait until they have ended.

        As many runs as the machine has cores run at the same time, but at least two. done: the
        number of runs that have ended before. If it is given, the name of each run that ends is
        printed, and how many of `total` runs have ended. If there is an exception, for example
        after Ctrl-C, all runs are killed.
        """
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
    """A run of the script in a folder of its own, and the files that it left there.

    error: why the run failed; empty if it did not. If it is empty after `read`, these attributes
    are set:
    log          the log, as runs.read_log returns it
    steps        {step: (training loss in nats, checksum of the step's data)} of the logged steps
    scores       (nats per token, bits per byte) of the final score
    artifact     the bytes of final_model.int8.ptz
    weights      {name: tensor} of the exported weights, final_model.pt
    """

    def __init__(self, lab, name, act, *more, script=None, ranks=1, context=0, **settings):
        """Prepare to call act(script, *more) in new processes, one for each rank.

        act: a function of probes.py, or call_main. script: None stands for the lab's script.
        settings: they replace or complete the lab's settings, and are in the environment of the
        processes; a setting with the value None is left out. context: 0 if rank 0 is started by
        fork and rank 1 by the fork server, 1 if it is the other way round; see `make_contexts`.
        """
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
        # Start one process for each rank. If there are several, set the variables that torchrun
        # sets. For this, first find a free port, at which the ranks will connect.
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
        """Return True if the run has ended. If a rank has failed, end the other ranks, and set
        `error` to the reason and to the place in the script of each rank."""
        if not any(process.exitcode for process in self.processes):
            return all(process.exitcode == 0 for process in self.processes)
        for process in self.processes:
            process.join(15)  # seconds in which the other ranks can print why they fail, too
        self.kill()
        places = "; ".join(f"rank {rank} {self.find_place(rank)}" for rank in self.ranks)
        cause = choose_cause(self.output(rank).split("\n")[-1] for rank in self.ranks)
        self.error = f"{cause or 'it ended and printed nothing'} ({places})"
        return True

    def find_place(self, rank):
        """Return a text that says in which function and line of the script a rank failed or was
        stuck, and which function of the script has called that function. Both are taken from the
        traceback in the rank's output."""
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
        # Return the text of a file in the run's folder, without white space at both ends. Return an
        # empty text if there is no such file.
        with suppress(FileNotFoundError):
            return (self.folder / name).read_text(errors="replace").strip()
        return ""

    def tensors(self, name):
        """Return {name: tensor} of a file in the run's folder. Raises OSError if there is none."""
        return torch.load(self.folder / name, "cpu", weights_only=True)

    def output(self, rank=0):
        # Return all that a rank has printed.
        return self.text(f"output{rank}.txt")

    def read(self):
        """Read the log, the artifact and the weights, and set the attributes that the class lists.

        If a file is missing or is not as expected, set `error`, unless the run has failed anyway.
        """
        try:
            [self.log] = read_log(self.folder / "logs" / f"{self.name}.jsonl").runs
            self.steps = {s.step: (s.train_loss, s.data_crc) for s in self.log.steps}
            self.scores = self.log.result.val_loss, self.log.result.val_bpb
            self.artifact = (self.folder / "final_model.int8.ptz").read_bytes()
            self.weights = self.tensors("final_model.pt")
        except (OSError, AttributeError, ValueError) as error:
            self.error = self.error or f"its log or files are not those of the trainer: {error!r}"


def choose_cause(last_lines):
    """Return the line that says best why a run has failed; empty if there is none.

    last_lines: the last line that each rank has printed. If one rank fails, the other ranks lose
    the connection to it and fail, too. Their lines are about gloo or about another rank, so a line
    without these words is preferred. If all ranks wait for each other, all lines are of that kind.
    Then a line that says that a rank has timed out is preferred.
    """
    lines = [line for line in last_lines if line]
    own = [line for line in lines if "gloo" not in line and "another rank" not in line]
    timeouts = [line for line in lines if "Timed out" in line]
    return [*own, *timeouts, *lines, ""][0]


# === Inside a new process ===
def run_process(rank, env, folder, watched, act, script, *more):
    """Call act(script, *more) as a rank of a run, and exit with the exit code that it returns. If
    it raises an error, print the traceback and exit with 1.

    folder: the run's folder, which becomes the current folder. What the rank prints is written to
    output<rank>.txt there. env: the whole environment. watched: lines of the script. The numbers of
    those that are executed are written to lines<rank>.txt; see `trace_lines`.
    """
    # Ctrl-C in a terminal reaches this process, too. verify.py then kills it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(folder)
    output = os.open(f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    # A forked process has the random state of its parent. Two processes of torchrun have different
    # states.
    random.seed()
    np.random.seed()
    # 1 is PR_SET_PDEATHSIG: the kernel kills this process when its parent process ends. The parent
    # is verify.py or the fork server, which ends with verify.py.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
    """Give all collective operations of this process a timeout of RENDEZVOUS_SECONDS.

    The script itself sets longer timeouts: an hour while one rank packs or saves, and ten minutes
    otherwise. The functions of torch.distributed with which it does so are replaced.
    """
    start, change = dist.init_process_group, dist.distributed_c10d._set_pg_timeout
    short = timedelta(seconds=RENDEZVOUS_SECONDS)
    dist.init_process_group = lambda *given, **named: start(*given, **named | {"timeout": short})
    dist.distributed_c10d._set_pg_timeout = lambda _, *group, **named: change(
        short, *group, **named
    )


def trace_lines(script, watched, path):
    """Write the numbers of the watched lines that are executed to a file, from now on.

    watched: numbers of lines of the script. path: the file. A number is written when its line is
    first executed, and not at the end of the run, because a run may end at any place.
    """
    left = {}  # {code object of a function: its watched lines that were not executed so far}

    def trace(frame, event, _):
        # Python calls `trace` when a function is called (the event is "call"). If `trace` returns
        # itself, Python also calls it for each line of the function; if it returns None, Python
        # does not. Tracing is slow, so only those functions of the script are traced that have
        # watched lines which were not executed so far.
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
