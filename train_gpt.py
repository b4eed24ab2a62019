"""Train a small GPT for the parameter-golf challenge: the best bits per byte in 16,000,000 bytes.

On 8 GPUs (or 1, 2, 4):          torchrun --standalone --nproc_per_node=8 train_gpt.py
One process, on a GPU or a CPU:  python train_gpt.py
The settings; their values now:  python train_gpt.py --help | --print-config

One pipeline feeds training and validation: a thread reads tokens, a copy stream uploads them, the
compute stream trains on them. Overlap off is a setting of that same pipeline, not another loader.

CONFIG RUNTIME DATA MODEL OPTIMIZERS EXCHANGE EVALUATION ARTIFACT INSTRUMENTS TRAINING MAIN

To change        edit
a setting        a line in Config; BOUND, if it decides shapes or data
the schedule     lr_multiplier (priming steps call it, too)
the step line    Trainer.log_step: a `name:value` there is in the .jsonl as well
data's order     Shards.__init__ for that of shards, BatchPlan.rows for that of batches
what trains how  make_optimizers: what is 2-D in a block is Muon's, unless CONTROLS names it
"""

import copy
import difflib
import hashlib
import inspect
import io
import json
import math
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
import zipfile
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, NewType, get_args

try:
    import numpy as np
    import sentencepiece
    import torch
except ImportError as error:
    sys.exit(f"train_gpt.py: {error.name} is missing: python3 -m pip install -r requirements.txt")
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

# === CONFIG: a line `name: kind = default  # unit; meaning` is a setting; NAME=value sets it ===
Count = NewType("Count", int)  # kinds of settings: plain numbers when the script runs
Share = NewType("Share", float)
Amount = NewType("Amount", float)
Positive = NewType("Positive", float)
KINDS = {  # the type, the least value, the first one that is too large, and what to say
    int: (int, 0, 2**63, "a whole number from 0 on"),
    Count: (int, 1, 2**63, "a whole number from 1 on"),
    float: (float, -1e300, math.inf, "a number"),
    Share: (float, 0, 1, "0 or more, below 1"),
    Amount: (float, 0, math.inf, "0 or more"),
    Positive: (float, 1e-300, math.inf, "more than 0"),
}
# Parts of tensors' names; some are names of the challenge's other scripts.
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight"
CONTROLS += ",skip_weights"


@dataclass(frozen=True)
class Config:
    """The settings of a run, and their defaults: the challenge's."""

    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder; of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # file; .model or byte .json
    run_id: str = ""  # name; of logs/<RUN_ID>.txt and .jsonl; empty: a random one
    seed: int = 1337  # number; of the initial weights
    # validation and logs
    val_batch_size: Count = 524288  # tokens; a validation batch, over all ranks and micro-steps
    val_loss_every: int = 1000  # steps; between validations, from step 0 on; 0: only at the end
    val_tokens: int = 0  # tokens; validate on the first N only (never submit that); 0: all
    val_progress_log_every: int = 0  # batches; between val_progress lines; 0: none
    train_log_every: int = 200  # steps; between lines (steps 1-10 always); 0: none
    # length
    iterations: int = 20000  # steps; length of the run
    warmdown_iters: int = 1200  # steps; the last ones, over which the learning rate falls to 0
    warmup_steps: int = 20  # steps; priming, rolled back; not a learning-rate warm-up
    train_batch_tokens: Count = 524288  # tokens; an optimizer step, over all ranks
    train_seq_len: Count = 1024  # tokens; a row
    max_wallclock_seconds: float = 600.0  # seconds; cap on training; <=0: none, and runs repeat
    # model
    vocab_size: Count = 1024  # tokens; that of the tokenizer
    num_layers: Count = 9  # blocks; the first half feeds skips to the second
    model_dim: Count = 512  # channels; width of the residual stream
    num_heads: Count = 8  # heads; of queries
    num_kv_heads: Count = 4  # heads; of keys and values
    mlp_mult: Count = 2  # times; MLP width over MODEL_DIM
    tie_embeddings: bool = True  # 0/1; the output head is the token embedding
    rope_base: Positive = 10000.0  # number; base of the rotary wavelengths
    logit_softcap: Positive = 30.0  # number; logits = cap * tanh(logits / cap)
    qk_gain_init: float = 1.5  # number; initial gain of each query head
    # optimizer
    embed_lr: Amount = 0.6  # rate; Adam, untied embedding
    head_lr: Amount = 0.008  # rate; Adam, untied head
    tied_embed_lr: Amount = 0.05  # rate; Adam, tied embedding
    tied_embed_init_std: Amount = 0.005  # number; initial deviation of the tied embedding
    matrix_lr: Amount = 0.04  # rate; Muon, matrices of the blocks
    scalar_lr: Amount = 0.04  # rate; Adam, vectors and scalars
    muon_momentum: Share = 0.95  # number; Muon, after its warm-up
    muon_backend_steps: Count = 5  # iterations; Newton-Schulz
    muon_momentum_warmup_start: Share = 0.85  # number; Muon, at step 0
    muon_momentum_warmup_steps: int = 500  # steps; linear ramp between the two
    beta1: Share = 0.9  # number; Adam
    beta2: Share = 0.95  # number; Adam
    adam_eps: Positive = 1e-8  # number; Adam
    grad_clip_norm: Amount = 0.0  # number; largest norm of the whole gradient; 0: off
    # artifact
    control_tensor_name_patterns: str = CONTROLS  # names; tensors of the blocks trained by Adam
    int8_keep_float_fp32_name_patterns: str = CONTROLS  # names; small tensors stored in float32
    # overlap and instruments
    train_prefetch: bool = True  # 0/1; a thread reads the next batches ahead
    train_prefetch_queue: Count = 2  # batches; kept ready on the host
    train_copy_stream: bool = True  # 0/1; uploads run on a CUDA stream of their own
    val_prefetch: bool = True  # 0/1; as TRAIN_PREFETCH, in validation
    val_prefetch_queue: Count = 2  # batches; as TRAIN_PREFETCH_QUEUE, in validation
    val_copy_stream: bool = True  # 0/1; as TRAIN_COPY_STREAM, in validation
    gpu_prefetch: Count = 2  # batches; in flight on the device; 2: double buffering, 1: on demand
    val_bytecount_device: Literal["cpu", "cuda"] = "cpu"  # device; that counts val_bpb's bytes
    data_stall_seconds: Positive = 60.0  # seconds; a read that takes longer ends the run
    training_timing_breakdown: bool = False  # 0/1; every phase timed alone, all overlap off
    training_timing_every: Count = 200  # steps; between its lines (steps 1-10 always)
    trace_steps: int = 0  # steps; traced with overlap on, to logs/<RUN_ID>.trace.json.gz; 0: none
    # checkpoints
    checkpoint_every: int = 0  # steps; between files in checkpoints/<RUN_ID>/; 0: only on a signal
    checkpoint_keep: Count = 3  # files; the newest that stay
    resume: str = ""  # auto or file; auto: the newest of RUN_ID, if any; empty: start anew
    # device
    device: Literal["auto", "cuda", "cpu"] = "auto"  # device; auto: cuda where there is one
    torch_compile: Literal["auto", "0", "1"] = "auto"  # mode; auto: on with CUDA
    attention_backend: Literal["auto", "fa3", "cudnn", "flash", "math"] = "auto"  # name; fastest
    grad_accum_steps: int = 0  # micro-steps; of a step; 0: max(1, 8 / ranks); more save memory

    def micro_steps(self, world_size):  # SPANS_PER_STEP: 8, see DATA
        return self.grad_accum_steps or max(1, SPANS_PER_STEP // world_size)

    def texts(self):
        return {name.upper(): str(value) for name, value in asdict(self).items()}


SETTINGS = {name.upper(): kind for name, kind in Config.__annotations__.items()}
# A checkpoint is bound to these: shapes and data. The others may change on RESUME.
BOUND = "DATA_PATH TOKENIZER_PATH SEED TRAIN_BATCH_TOKENS TRAIN_SEQ_LEN VOCAB_SIZE NUM_LAYERS "
BOUND += "NUM_HEADS NUM_KV_HEADS MODEL_DIM MLP_MULT TIE_EMBEDDINGS ROPE_BASE LOGIT_SOFTCAP"
# Other trainers' names for ours, and settings that only other scripts have: they cost a warning.
FOREIGN = {"LEARNING_RATE": "MATRIX_LR", "BATCH_SIZE": "TRAIN_BATCH_TOKENS", "N_EMBD": "MODEL_DIM"}
FOREIGN |= {"SEQ_LEN": "TRAIN_SEQ_LEN", "N_LAYERS": "NUM_LAYERS", "MAX_STEPS": "ITERATIONS"}
FOREIGN |= {"BLOCK_SIZE": "TRAIN_SEQ_LEN", "N_LAYER": "NUM_LAYERS", "MAX_ITERS": "ITERATIONS"}
FOREIGN |= {"LR": "MATRIX_LR", "N_HEAD": "NUM_HEADS", "D_MODEL": "MODEL_DIM"}
ELSEWHERE = r"(EMA|SWA|TTT|QAT|XSA|BIGRAM|VE|MTP|EVAL|GPTQ|LN|GATED)_\w+|(MUON|ADAM)_(WD|BETA2)"
ELSEWHERE += "|ROPE_DIMS|LATE_QAT|VALUE_RESIDUAL|WEIGHT_DECAY|VAL_RESIDENT|DATA_VERIFY"


def read_config(env):
    """(Config, faults, warnings): a fault for every wrong value and every misspelt name."""
    faults, warnings, patterns = [], [], env.get("CONTROL_TENSOR_NAME_PATTERNS") or CONTROLS
    values = {"run_id": str(uuid.uuid4()), "int8_keep_float_fp32_name_patterns": patterns}
    for name in filter(env.get, SETTINGS):  # an empty value is none
        kind, text = SETTINGS[name], env[name]
        words = {"0": False, "1": True} if kind is bool else {word: word for word in get_args(kind)}
        number, least, end, wanted = KINDS.get(kind, (str, 0, 0, " or ".join(words)))
        try:
            value = words[text] if words else number(text)
            if kind in KINDS and not least <= value < end:
                raise ValueError
            values[name.lower()] = value
        except (KeyError, ValueError):
            faults.append(f"{name}={text}: set {wanted}, see --help")
    not_meant = {"MODEL_DIR", "NUM_THREADS"}  # common names, a letter or two from ours
    for name in sorted(env.keys() - SETTINGS.keys() - not_meant):
        near = difflib.get_close_matches(name.upper(), SETTINGS, n=1, cutoff=0.85)
        if name in FOREIGN or re.fullmatch(ELSEWHERE, name):
            instead = f": set {FOREIGN[name]}" if name in FOREIGN else ""
            warnings.append(f"warning: {name} is no setting here{instead}")
        elif near:
            faults.append(f"{name}={env[name]}: no such setting: did you mean {near[0]}?")
    return Config(**values), faults, warnings


def find_faults(config, world_size, env):
    """All that is wrong with the settings and what they name: a line each, with the remedy."""
    heads, micro_batches = config.num_heads, world_size * config.micro_steps(world_size)  # a step's
    uneven = 8 % micro_batches and micro_batches % 8  # neither parts of 8 nor a multiple of it
    fit = 8 // math.gcd(8, world_size)
    least = micro_batches * config.train_seq_len  # tokens: a row for each
    unit = math.lcm(8, micro_batches) * config.train_seq_len
    both = config.trace_steps and config.training_timing_breakdown
    named = re.fullmatch(r"[\w.-]*\w[\w.-]*", config.run_id)
    cuda = config.device != "cpu" and torch.cuda.is_available()
    version = Path("/proc/driver/nvidia/version")
    driver = "unknown driver" if Path("/dev/nvidiactl").exists() else ""
    if version.exists():
        driver = first_line(version.read_text())
    lost = not cuda and (config.device == "cuda" or config.device == "auto" and driver)
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda}) and {driver or 'no driver'}"
    crowd = cuda and int(env.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()
    checks = [  # (is it wrong?, setting, remedy)
        (not named, "run_id", "it names files: set letters, digits, '.', '_', '-'"),
        (config.resume == "auto" and not env.get("RUN_ID"), "resume", "set RUN_ID, too"),
        (config.model_dim % (2 * heads), "model_dim", f"set a multiple of {2 * heads}"),
        (heads % config.num_kv_heads, "num_kv_heads", f"set a divisor of {heads}"),
        (config.vocab_size > 65536, "vocab_size", "shards hold uint16: set at most 65536"),
        (uneven, "grad_accum_steps", f"x {world_size} ranks must divide 8 or be n x 8: set {fit}"),
        (config.train_batch_tokens % unit, "train_batch_tokens", f"set a multiple of {unit}"),
        (config.val_batch_size < least, "val_batch_size", f"set at least {least}"),
        (both, "trace_steps", "nothing overlaps with TRAINING_TIMING_BREAKDOWN=1: set one"),
        (lost, "device", f"no GPU for {build}: install a torch that fits, or set cpu"),
        (crowd, "device", "fewer than processes: see --nproc_per_node"),
        (config.val_bytecount_device == "cuda" and not cuda, "val_bytecount_device", "set cpu"),
    ]
    faults = [f"{name.upper()}={getattr(config, name)}: {fix}" for bad, name, fix in checks if bad]
    return faults + read_data(config)[1]


def read_data(config):
    """({name: what of it must be alike on all ranks}, faults) of the data that settings name."""
    facts, faults = {}, []
    try:
        facts["the tokenizer"] = zlib.crc32(np.stack(ByteTable.of(config)).astype("<i4"))
    except RunError as error:
        faults.append(str(error))
    for split in "train", "val":
        try:
            shards = Shards(config, split)
            if not shards.growing:  # else on another machine there may be more of them by now
                facts[f"the {split} shards"] = np.diff(shards.ends).tolist()
            row = config.train_seq_len
            if split == "val" and shards.ends[-1] <= row:
                faults.append(f"TRAIN_SEQ_LEN={row}: validation has {shards.ends[-1]}: set less")
            elif split == "val" and 0 < config.val_tokens <= row:
                faults.append(f"VAL_TOKENS={config.val_tokens}: too few for a row: set 0")
        except RunError as error:
            faults.append(str(error))
    return facts, list(dict.fromkeys(faults))  # a folder that is not there is one fault


def print_help():
    line = r'(?m)^    (\w+): (.+?) = "?(.*?)"?  # ([^;]+); '
    source = inspect.getsource(Config).split('"""')[2].partition("    def ")[0]

    def shown(found):
        name, kind, default, unit = found.groups()
        default = {"True": "1", "False": "0", "CONTROLS": CONTROLS}.get(default, default)
        return f"  {name.upper()}={default}  ({kind}, {unit}) "

    tell(__doc__ + re.sub(line, shown, source))


# === RUNTIME: this process among its ranks, what it says, its files ===
class RunError(Exception):
    """A foreseeable failure, in one line: what, where, which value, what to do."""


class HaltError(Exception):
    """All ranks end after the same step: (a signal, NO_INPUT or what is wrong; on which rank)."""


NO_INPUT = 1000  # no signal has that number


def first_line(error):
    return (str(error).strip() or repr(error)).splitlines()[0]


def tell(text, stream="stdout"):
    """Prints. A console that is full, closed or gone costs its text and nothing else."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=getattr(sys, stream), flush=True)


class Runtime:
    """This process: rank, device, dtype of the activations, and the first signal that it heard."""

    def __init__(self, config, env):
        self.rank, self.world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.micro_steps = config.micro_steps(self.world_size)
        self.signum, self.problem = 0, ""  # why this rank wants to end: a signal, or NO_INPUT
        self.cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{env.get('LOCAL_RANK', 0)}" if self.cuda else "cpu")
        native = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        self.dtype = torch.bfloat16 if native else torch.float32  # of the activations
        self.hardware = torch.cuda.get_device_name(self.device) if self.cuda else os.uname().machine
        # The host looks at a step's results so many steps later: then it need not wait.
        self.steps_late = 2 if self.cuda else 0

    def start(self, env):
        """Signals, device, process group: from here on collectives work."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.hear)
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
            if torch.__version__.startswith("2.11."):  # 6 ms of 67 there: pytorch issue 179494
                os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
        if "RANK" in env:
            timeout = timedelta(minutes=5)  # bounds every wait for other ranks
            backend, device = ("nccl", self.device) if self.cuda else ("gloo", None)
            # torchrun has one store for all restarts: a prefix keeps dead addresses out of it.
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            ranks = {"rank": self.rank, "world_size": self.world_size, "store": store}
            dist.init_process_group(backend, timeout=timeout, device_id=device, **ranks)

    def hear(self, signum, frame):
        """Only noted: the next exchange tells all ranks, and they end after the same step."""
        self.signum = self.signum or signum
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends this process at once

    def fail(self, error):
        """This rank has no input: all ranks are told, as of a signal, and keep what they have."""
        self.signum, self.problem = NO_INPUT, str(error)

    def synchronize(self):
        """Synchronisation point: returns when the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def all_reduce(self, tensor):
        """Sums over the ranks, in place. Queued on CUDA; with gloo a synchronisation point."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value, rank=0):
        """A rank's value, on all of them. Synchronisation point: at a run's ends, for log lines."""
        box = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(box, rank, device=self.device)
        return box[0]

    def require_equal(self, facts):
        """RunError, on all ranks, where a fact {name: value} is not the same on all of them."""
        everyone = [facts] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(everyone, facts)
        for name in sorted(set().union(*everyone)):
            told = [(rank, theirs[name]) for rank, theirs in enumerate(everyone) if name in theirs]
            ranks = {str(value): rank for rank, value in told}
            if len(ranks) > 1:
                who = ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())
                raise RunError(f"ranks differ in {name}: {who}: make it the same on all")


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id, enabled=True, resumed=False):
        self.path, self.enabled = Path("logs", f"{run_id}.txt"), enabled
        when = time.strftime("%Y%m%d-%H%M%S")
        for path in (self.path, self.path.with_suffix(".jsonl"), Path("checkpoints", run_id)):
            if enabled and not resumed and path.exists():  # an older run keeps what is its own
                path.rename(path.with_name(f"{path.stem}.{when}{path.suffix}"))

    def console(self, text):
        if self.enabled:
            tell(text)

    def line(self, text, event=None, **values):
        """For people. As an event it is for tools, too: train_time:9ms is "train_time_ms": 9."""
        self.console(text)
        self.write(".txt", text)
        if event:
            # A number with its unit, of step:9/60 the 9; a checksum is no number.
            number = r"(?<!crc:)(-?[\d.]+(?:e[-+]?\d+)?|nan|inf)(ms|s|%|)(?=[\s/]|$)"
            words, suffixes = {}, {"": "", "ms": "_ms", "s": "_s", "%": "_percent"}
            for name, value, unit, word in re.findall(rf"(\w+):(?:{number}|(\S+))", text):
                suffix = suffixes[unit]
                words[name.removesuffix(suffix) + suffix] = word or float(value)
            self.event(event, **words | values)

    def event(self, name, **values):
        self.write(".jsonl", json.dumps({"event": name, "time": round(time.time(), 3), **values}))

    def write(self, suffix, text):
        try:
            if self.enabled:
                self.path.parent.mkdir(exist_ok=True)
                with open(self.path.with_suffix(suffix), "a", encoding="utf-8") as file:
                    print(text, file=file)
        except OSError as error:  # a full disk costs lines, not the run
            tell(f"warning: {self.path}: lines are lost: {error}", "stderr")


def write_atomic(path, data, stall_seconds=60.0):
    """The file appears whole, or not at all and an older one stays. Returns what went wrong."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    slow = threading.Timer(stall_seconds, tell, [f"waiting for the disk: {path}", "stderr"])
    slow.daemon = True
    slow.start()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return ""
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return f"{path}: cannot write {len(data)} bytes: {error.strerror}"
    finally:
        slow.cancel()


def read_json(path):
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


# === DATA: from shards to batches, ahead of time ===
#  shard files --readinto--> slot.read (pinned) --copy--> slot.tokens --widen--> slot.x, slot.y
#               reader thread      (uint16)   copy stream   (uint16) compute stream  (int64)
# Training and validation, overlap on and off are settings of one Pipeline. On a CPU there is no
# copy, and the reader widens, too.
#
# The order is the challenge's, made for 8 ranks. A step's tokens are 8 spans, one behind the other.
# In a span x is all but the last token and y all but the first, so its rows share one token more
# than they have. With rows of 4 tokens and spans of 2 rows, a span takes 9 tokens:
#    row 0: tokens 0-4   row 1: tokens 4-8   |   row 2: tokens 9-13   row 3: tokens 13-17   | ...
SPANS_PER_STEP = 8
HEADER_BYTES = 1024  # of a shard: 256 int32: magic number, version, number of tokens; then uint16
GET_DATA = "run `python3 data/quickstart.py --prepare-only`, or data/cached_challenge_fineweb.py"


class Shards:
    """A split's shards in the order of their names, as one endless stream of tokens.

    A set may still be made while it is read: its producer (data/producer.py) keeps .producing
    fresh, and its shards join in the order of their numbers, whenever they come.
    """

    def __init__(self, config, split, log=None):
        self.folder, self.log = Path(config.data_path).resolve(), log
        self.stall_seconds, self.vocab_size = config.data_stall_seconds, config.vocab_size
        self.paths, self.ends = [], [0]  # ends[i]: tokens in the first i shards
        producer = read_json(self.folder / ".producing") if split == "train" else {}
        self.growing = bool(producer) and "error" not in producer  # more shards will come
        self.promised = producer.get("shards_promised") or 0
        with suppress(AttributeError, TypeError, ValueError):  # a manifest of another kind
            for entry in read_json(self.folder / "../../manifest.json").get("datasets", []):
                if entry.get("name") == self.folder.name and not self.growing:
                    self.promised = int(entry.get("stats", {}).get(f"files_{split}", 0))
        for path in sorted(self.folder.glob(f"fineweb_{split}_*.bin")):
            if not self.growing or path == self.next_path():
                self.add(path)
        wanted = max(1, self.promised) if split == "val" else 1
        if not self.growing and len(self.paths) < wanted:
            files = f"{len(self.paths)} of {wanted} or more fineweb_{split}_*.bin"
            files = files if self.folder.is_dir() else "no such folder"
            raise RunError(f"DATA_PATH={config.data_path}: {files}: {GET_DATA}")

    def next_path(self):
        return self.folder / f"fineweb_train_{len(self.paths):06d}.bin"

    def add(self, path):
        try:
            size = path.stat().st_size if path.is_file() else 0  # a pipe would be waited for
            magic, version, tokens = np.fromfile(path, "<i4", 3).tolist() if size > 11 else [0] * 3
        except OSError as error:
            raise RunError(f"{path}: no shard: {first_line(error)}: move it away") from error
        if (magic, version, size) != (20240520, 1, HEADER_BYTES + 2 * tokens) or tokens < 1:
            begins = f"{magic}, {version}, {tokens} tokens in {size} bytes"
            raise RunError(f"{path}: no whole shard ({begins}): fetch it anew, or move it away")
        self.paths, self.ends = [*self.paths, path], [*self.ends, self.ends[-1] + tokens]

    def wait_for(self, token, told_to_stop):
        """Returns when `token` is on the disk, or when the set is complete without it."""
        progress, since = None, time.monotonic()  # a producer whose progress moves is at work
        while self.growing and token >= self.ends[-1] and not told_to_stop():
            said, path = read_json(self.folder / ".producing"), self.next_path()
            self.promised = said.get("shards_promised") or self.promised
            if said.get("progress") != progress:
                progress, since = said.get("progress"), time.monotonic()
            # All that were promised, or the producer has left and had promised no number.
            complete = len(self.paths) == self.promised or not (self.promised or said)
            if path.is_file():
                self.add(path)
            elif self.paths and complete:
                self.growing = False
            elif not said or "error" in said or time.monotonic() - since > self.stall_seconds:
                reason = said.get("error", "makes no progress" if said else "has left")
                raise RunError(f"{path} will not come: its producer {reason}")
            else:
                if self.log:
                    self.log.line(f"waiting for {path}: it is being made")
                    self.log.event("stall", shard=str(path))
                    self.log = None  # once is enough
                time.sleep(0.05)

    def pieces(self, first, count):
        """Where the `count` tokens from `first` on are: (path, byte offset, bytes), ..."""
        while count:
            position = first if self.growing else first % self.ends[-1]
            shard = bisect_right(self.ends, position) - 1
            here = min(count, self.ends[shard + 1] - position)
            yield self.paths[shard], HEADER_BYTES + 2 * (position - self.ends[shard]), 2 * here
            first, count = first + here, count - here


@dataclass(frozen=True)
class BatchPlan:
    """Which rows are batch k of this rank: arithmetic, so that timing can change nothing."""

    seq_len: int
    span_rows: int
    first_row: int  # of this rank's batch 0
    stride: int  # rows from one batch of this rank to its next
    batch_rows: int
    end_row: int
    first_batch: int = 0  # where to begin

    @classmethod
    def train(cls, config, runtime, step=0):
        """In micro-step m, rank r has part m * ranks + r of the step's rows."""
        seq_len, rank, ranks = config.train_seq_len, runtime.rank, runtime.world_size
        step_rows, first_batch = config.train_batch_tokens // seq_len, step * runtime.micro_steps
        rows, span_rows = step_rows // (ranks * runtime.micro_steps), step_rows // SPANS_PER_STEP
        first_row, stride = rank * rows, ranks * rows
        return cls(seq_len, span_rows, first_row, stride, rows, sys.maxsize, first_batch)

    @classmethod
    def val(cls, config, runtime, tokens):
        """The split is one span, of which every rank has one stretch."""
        seq_len, rank, ranks = config.train_seq_len, runtime.rank, runtime.world_size
        total = (min(tokens, config.val_tokens or tokens) - 1) // seq_len
        first, end = total * rank // ranks, total * (rank + 1) // ranks
        rows = min(config.val_batch_size // (ranks * runtime.micro_steps) // seq_len, end - first)
        return cls(seq_len, total, first, max(1, rows), max(1, rows), end)

    @property
    def num_batches(self):
        return math.ceil((self.end_row - self.first_row) / self.stride)

    def rows(self, k):
        """Consecutive ones: a part of a span, or some whole ones. Another order of batches is
        another `rows`, and RESUME follows it: it begins at another k."""
        first = self.first_row + k * self.stride
        return range(first, min(first + self.batch_rows, self.end_row))

    def first_token(self, row):
        return row * self.seq_len + row // self.span_rows  # each span before it has one token more

    def tokens(self, rows):
        """(first token, tokens, spans) of consecutive rows: a part of a span, or some whole ones"""
        spans = max(1, len(rows) // self.span_rows)
        return self.first_token(rows.start), len(rows) * self.seq_len + spans, spans

    def last_token_of_step(self, rows):
        step_rows = SPANS_PER_STEP * self.span_rows
        return self.first_token((rows.start // step_rows + 1) * step_rows) - 1

    def widen(self, rows, tokens, x, y):
        """uint16 tokens of some rows -> int64 x and y (B, T), in numpy or torch."""
        filled, (_, count, spans) = len(rows), self.tokens(rows)
        by_span = tokens[:count].reshape(spans, -1)  # several, where a rank has more than its 8th
        x[:filled].reshape(spans, -1)[:] = by_span[:, :-1]
        y[:filled].reshape(spans, -1)[:] = by_span[:, 1:]
        x[filled:], y[filled:] = 0, -100  # no targets; another shape would be compiled anew


def data_crc(plan, rows, tokens):
    """A checksum, whose sum over batches is equal for any ranks; crc32 begins at a row's number."""
    data, total, first = memoryview(tokens), 0, plan.first_token(rows.start)
    for row in rows:
        at = plan.first_token(row) - first
        total += zlib.crc32(data[at : at + plan.seq_len + 1], row)
    return total & 0xFFFFFFFF


class Overlap(NamedTuple):
    """What overlaps in a split: its settings, less what is ruled out here."""

    queue: int  # batches read ahead; 0: each is read when it is asked for
    copy_stream: bool
    device_slots: int  # 2: one uploads while one is in use; 1: uploaded on demand; 0: no CUDA
    words: str = ""  # for the log: what is on, or why not

    @classmethod
    def of(cls, config, split, cuda):
        prefetch = getattr(config, f"{split}_prefetch")
        stream = getattr(config, f"{split}_copy_stream")
        timing = "(timing_breakdown)" if config.training_timing_breakdown else ""
        no_stream = timing or ("" if cuda else "(no_cuda)")
        queue = getattr(config, f"{split}_prefetch_queue") if prefetch and not timing else 0
        copy_stream = stream and not no_stream
        slots = (config.gpu_prefetch if queue else 1) if cuda else 0
        words = f"overlap:{queue > 0 or copy_stream} " if split == "val" else ""
        words += f"prefetch:{queue > 0}{timing if prefetch else ''} "
        words += f"copy_stream:{copy_stream}{no_stream if stream else ''} prefetch_queue:{queue} "
        words += f"bytecount_device:{config.val_bytecount_device} " if split == "val" else ""
        return cls(queue, copy_stream, slots, f"{words}gpu_prefetch:{slots}")


class Slot:
    """Room for one batch, made once: its tokens where they are read and on the device, its x, y."""

    def __init__(self, plan, runtime):
        count, shape = plan.tokens(range(plan.batch_rows))[1], (plan.batch_rows, plan.seq_len)
        self.read = torch.empty(count, dtype=torch.uint16, pin_memory=runtime.cuda)
        self.tokens = self.read
        if runtime.cuda:
            self.tokens = torch.empty(count, dtype=torch.uint16, device=runtime.device)
        self.x = torch.zeros(shape, dtype=torch.int64, device=runtime.device)  # (B, T)
        self.y = torch.zeros_like(self.x)
        self.rows, self.digest = range(0), 0  # digest: data_crc, or the bytes the tokens stand for
        self.copied = self.widened = None  # events: its upload is over; its tokens have been read


class Pipeline:
    """Iterates over this rank's batches of a split: slots with x, y (B, T), rows and digest.

    A batch is valid until the next one is asked for; a signal ends the iteration. Slots go round:
    to_fill -> (the reader's thread) -> filled -> (the copy) -> uploaded -> in use -> to_fill.
    There are as many as are read and uploaded ahead, and the one in use. With none ahead there is
    just that one, and a batch is read and uploaded when it is asked for.

    A stream is a queue of work that runs on its own; only events order two. Who writes to a slot
    waits for who read it, and who reads it waits for who wrote it:
      `copied`, on the copy stream: then the compute stream may widen the tokens, and the reader
      may read the next ones over those that were copied.
      `widened`, on the compute stream: then the copy stream may overwrite the device's tokens.
    x and y need no event: they are written and read on the compute stream alone, in its order.
    (On a CPU the reader writes them, and the queues alone hand a slot over.)
    Each use records a new event: a wait for the one of an earlier use would be over at once.
    """

    def __init__(self, shards, plan, overlap, runtime, *, digest=data_crc, phase=nullcontext):
        self.shards, self.plan, self.runtime = shards, plan, runtime
        self.digest, self.phase = digest, phase
        self.to_fill, self.filled, self.uploaded = queue.SimpleQueue(), queue.SimpleQueue(), deque()
        self.uploads_ahead = max(0, overlap.device_slots - 1)
        for _ in range(overlap.queue + self.uploads_ahead):
            self.to_fill.put(Slot(plan, runtime))
        self.in_use = Slot(plan, runtime)
        if runtime.cuda:
            self.compute = torch.cuda.current_stream(runtime.device)
            self.copy = torch.cuda.Stream(runtime.device) if overlap.copy_stream else self.compute
            self.copy.wait_event(self.compute.record_event())  # for who had the slots' memory
        self.next_k, self.end_k, self.bytes_read = plan.first_batch, plan.num_batches, 0
        self.waits_ms, self.total_wait_ms = [], 0.0  # of the device for a batch, or else the host
        self.edges = deque()  # (asked, there): events around waits that may not be over
        self.closed, self.error = threading.Event(), None  # what ends the reader; what ended it
        self.reading = "", math.inf  # where it reads, since when
        self.thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self.thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_k == self.end_k or self.runtime.signum:
            raise StopIteration
        self.next_k += 1
        self.to_fill.put(self.in_use)  # that of the batch before; at first an empty one
        if self.runtime.cuda:
            asked = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        if not self.uploaded:
            self._upload(self._next_filled())
        self.in_use = self.uploaded.popleft()
        if self.runtime.cuda:
            self._widen(self.in_use, asked)
        # What has been read goes up at once; this batch does not wait for a later one.
        while len(self.uploaded) < self.uploads_ahead and not self.filled.empty():
            self._upload(self.filled.get())
        return self.in_use

    def _next_filled(self):
        """From the reader. Its error comes after the good batches; no wait is without a bound."""
        start = time.perf_counter()
        with self.phase("input_wait"):
            while True:
                try:
                    slot = self.filled.get(timeout=0.2)
                    break
                except queue.Empty:
                    self._check_reader()
        if not self.runtime.cuda:
            self._note_wait(1e3 * (time.perf_counter() - start))
        return slot

    def _check_reader(self):
        """Raises what ends the iteration: StopIteration after a signal, RunError of the reader."""
        who, limit = f"rank {self.runtime.rank}: the reader", self.shards.stall_seconds
        where, since = self.reading
        if self.runtime.signum or self.closed.is_set():
            raise StopIteration
        if self.error and self.filled.empty():
            place = "" if isinstance(self.error, RunError) or not where else f"{where}: "
            raise RunError(f"{who}: {place}{first_line(self.error)}") from self.error
        if time.monotonic() - since > limit:
            raise RunError(f"{who} waits for {where} over DATA_STALL_SECONDS={limit:g}")

    def _upload(self, slot):
        """Queues the copy to the device; waits for nothing."""
        if self.runtime.cuda:
            with self.phase("h2d"), torch.cuda.stream(self.copy):
                if slot.widened:
                    self.copy.wait_event(slot.widened)
                slot.tokens.copy_(slot.read, non_blocking=True)
                slot.copied = self.copy.record_event(torch.cuda.Event(blocking=True))
        self.uploaded.append(slot)

    def _widen(self, slot, asked):
        """The compute stream waits for the copy, the host does not; how long, it tells later."""
        self.compute.wait_event(slot.copied)
        there = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        self.edges.append((asked, there))
        self.plan.widen(slot.rows, slot.tokens, slot.x, slot.y)
        slot.widened = self.compute.record_event()
        self._measure_waits()

    def _measure_waits(self):
        while self.edges and self.edges[0][1].query():  # as far as the device has come
            asked, there = self.edges.popleft()
            self._note_wait(asked.elapsed_time(there))

    def _note_wait(self, ms):
        self.waits_ms.append(ms)
        self.total_wait_ms += ms

    def close(self):
        """Ends the reader, from any state within a second; a stuck one is left behind."""
        self.closed.set()
        self.to_fill.put(None)  # wakes it
        self.thread.join(0.5)
        if self.runtime.cuda:
            self.copy.synchronize()  # synchronisation point: no copy outlives its slots
            self._measure_waits()

    # From here on: the reader's thread
    def _read_all(self):
        try:
            if self.runtime.cuda:
                torch.cuda.set_device(self.runtime.device)
            for k in range(self.plan.first_batch, self.plan.num_batches):
                slot, rows = self.to_fill.get(), self.plan.rows(k)  # slot: None after close()
                # Up to the step's end: ranks wait for a shard here, and not for each other later
                self.shards.wait_for(self.plan.last_token_of_step(rows), self.closed.is_set)
                if self.closed.is_set():
                    return
                if slot.copied:
                    slot.copied.synchronize()  # synchronisation point, of this thread only
                with self.phase("disk_read"):
                    self._fill(slot, rows)
                self.filled.put(slot)
        except BaseException as error:  # whatever it is, or the main thread would wait for ever
            self.error = error

    def _fill(self, slot, rows):
        first, count, _ = self.plan.tokens(rows)
        tokens, ids = slot.read.numpy()[:count], self.shards.vocab_size
        data = memoryview(tokens).cast("B")
        for path, offset, left in self.shards.pieces(first, count):
            self.reading = f"{path} at byte {offset}", time.monotonic()
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                while left:
                    got = file.readinto(data[:left])
                    if not got:
                        raise EOFError(f"{path} ends {left} bytes early: it was changed")
                    data, left = data[got:], left - got
        self.reading = "", math.inf
        at = int((tokens >= ids).argmax())  # the first one that is, or 0
        if tokens[at] >= ids:  # the embedding lacks it; on a device that would end the context
            path, offset, _ = next(self.shards.pieces(first + at, 1))
            raise RunError(f"{path} at byte {offset}: token {tokens[at]}: VOCAB_SIZE={ids} is less")
        slot.rows, slot.digest = rows, self.digest(self.plan, rows, tokens)
        if not self.runtime.cuda:
            self.plan.widen(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * count


# === MODEL: the challenge's baseline; B sequences, T tokens, D channels ===
# The order of construction is the challenge's, so that a SEED gives its initial weights.
# Parameters are float32: `p.to(x.dtype)` where x uses one, or all behind it becomes float32.
def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Float32 weights (outputs, inputs), cast to the dtype of the activations where they are used.

    Not autocast: from torch 2.12 on that makes rms_norm, and so the residual stream, float32.
    """

    def __init__(self, inputs, outputs, zero=False):
        super().__init__(inputs, outputs, bias=False)
        if zero:
            nn.init.zeros_(self.weight)

    def forward(self, x, scale=None):
        """`scale` (outputs,) is of the output; on the weight it costs no pass over (B, T, D)."""
        weight = self.weight if scale is None else scale[:, None] * self.weight
        return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, T, heads, head_dim)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


class Attention(nn.Module):
    """Causal, grouped queries, rms norm on queries and keys, a gain a query head."""

    def __init__(self, config):
        super().__init__()
        D, self.head_dim = config.model_dim, config.model_dim // config.num_heads
        self.c_q = Linear(D, D)
        self.c_k = Linear(D, config.num_kv_heads * self.head_dim)
        self.c_v = Linear(D, config.num_kv_heads * self.head_dim)
        self.proj = Linear(D, D, zero=True)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))

    def forward(self, x, rotary, scale):
        q, k, v = (c(x).unflatten(-1, (-1, self.head_dim)) for c in (self.c_q, self.c_k, self.c_v))
        q = rotate(rms_norm(q), *rotary) * self.q_gain.to(q.dtype)[:, None]  # (B, T, heads, dim)
        k = rotate(rms_norm(k), *rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.proj(y.transpose(1, 2).flatten(2), scale)


class MLP(nn.Module):
    """proj(relu(fc x)^2) (arXiv:2109.08668)"""

    def __init__(self, config):
        super().__init__()
        self.fc = Linear(config.model_dim, config.mlp_mult * config.model_dim)
        self.proj = Linear(config.mlp_mult * config.model_dim, config.model_dim, zero=True)

    def forward(self, x, scale):
        x = F.relu(self.fc(x)).square()
        return self.proj(x, scale)


class Block(nn.Module):
    """Mixes the embedding x0 back in, then adds attention and MLP, each scaled by channel."""

    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = Attention(config), MLP(config)
        ones = torch.ones(config.model_dim)
        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, torch.zeros_like(ones))))

    def forward(self, x, x0, rotary):
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + self.attn(rms_norm(x), rotary, self.attn_scale)
        return x + self.mlp(rms_norm(x), self.mlp_scale)


class GPT(nn.Module):
    """The first half of the blocks push their outputs, the others add them back, last one first."""

    def __init__(self, config, dtype):
        super().__init__()
        D, self.dtype, self.softcap = config.model_dim, dtype, config.logit_softcap
        self.tok_emb = nn.Embedding(config.vocab_size, D)
        self.skip_weights = nn.Parameter(torch.ones(config.num_layers // 2, D))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lm_head = None if config.tie_embeddings else Linear(D, config.vocab_size, zero=True)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        head_dim = D // config.num_heads
        frequencies = config.rope_base ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(config.train_seq_len)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, 1, head_dim / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, y):
        """The mean loss in nats of predicting y from x, both (B, T); y = -100 is no target."""
        x = x0 = rms_norm(self.tok_emb(x).to(self.dtype))  # (B, T, D)
        rotary = self.cos.to(self.dtype), self.sin.to(self.dtype)
        skips, half = [], len(self.skip_weights)
        for i, block in enumerate(self.blocks):
            if i >= half and skips:
                x = x + self.skip_weights[i - half].to(x.dtype) * skips.pop()
            x = block(x, x0, rotary)
            if i < half:
                skips.append(x)
        head = self.lm_head or self.tok_emb
        logits = F.linear(rms_norm(x), head.weight.to(x.dtype))  # (B, T, vocabulary)
        logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def flops_per_token(self, config):
        """Of both passes: 6 a weight of a matrix (not resid_mix), and attention's causal half."""
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2 and len(p) > 2)
        attention = config.num_layers * config.train_seq_len * config.model_dim
        return 6 * (matrices + config.vocab_size * config.model_dim + attention)


def attention_backends(config, runtime, log):
    """SDPA's backends that work here, {backend: name}, the fastest first: it takes the first."""
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    every = {"fa3": flash, "cudnn": cudnn, "flash": flash, "math": SDPBackend.MATH}
    wanted = list(every) if config.attention_backend == "auto" else [config.attention_backend]
    shape, working = (1, config.num_heads, 128, config.model_dim // config.num_heads), {}
    q = torch.zeros(shape, device=runtime.device, dtype=runtime.dtype, requires_grad=True)
    for name in wanted:
        activated = False
        try:
            if name == "fa3":
                nn.attention.activate_flash_attention_impl("FA3")
                activated = True
            with sdpa_kernel(every[name]):
                F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
            working.setdefault(every[name], name)
        except Exception as error:  # whatever a missing library raises
            if runtime.cuda:
                log.console(f"attention: {name} does not work here: {first_line(error)}")
            if activated:
                nn.attention.restore_flash_attention_impl()
    if not working:
        raise RunError(f"ATTENTION_BACKEND={config.attention_backend}: fails here: set auto")
    return working


def try_compile(function, arguments, log):
    """`function` compiled; as it is, with a warning, where its forward or backward cannot be."""
    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(*arguments).backward()
        return compiled
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        log.line(f"warning: torch.compile does not work here, so eager: {first_line(error)}")
        return function


# === OPTIMIZERS: Muon on the blocks' matrices, Adam on all else ===
# `found_inf` is Exchange.skip (below), on the device: where it is 1, gradients are 0 and a step
# changes nothing. That is how torch's GradScaler leaves a step out without asking the device.
def newton_schulz(x, iterations, dtype):
    """(n, rows, cols) -> about the nearest semi-orthogonal matrices, in `dtype`.

    It does not converge: singular values end between about 0.7 and 1.2, which serves as well and
    takes fewer iterations (https://kellerjordan.github.io/posts/muon/).
    """
    tall = x.size(-2) > x.size(-1)
    x = (x.mT if tall else x).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # (n, short side, short side)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal. A group's matrices have one shape: they go in one batch.

    Each matrix is made orthogonal by one rank, and one all-reduce hands all updates to all ranks:
    so replicas stay equal to the bit, whatever the ranks' kernels do in the last one.
    """

    def __init__(self, groups, runtime, config):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.runtime, self.iterations = runtime, config.muon_backend_steps
        self.newton_schulz = newton_schulz  # Trainer compiles it
        self.dtype = torch.bfloat16 if runtime.cuda else torch.float32
        self.matrices = matrices = [p for group in self.param_groups for p in group["params"]]
        self.mine = set(matrices[runtime.rank :: runtime.world_size])
        size = sum(p.numel() for p in matrices)
        self.sums = torch.zeros(size, dtype=self.dtype, device=runtime.device)  # to all-reduce
        self.updates = torch.zeros(size, device=runtime.device)
        self.sum_of = dict(zip(matrices, split_as(self.sums, matrices), strict=True))
        self.update_of = dict(zip(matrices, split_as(self.updates, matrices), strict=True))
        for p in matrices:
            self.state[p]["average"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        self.sums.zero_()
        skip, momentum = self.found_inf > 0, self.param_groups[0]["momentum"]  # that of all groups
        averages = {p: self.state[p]["average"] for p in self.matrices}
        torch._foreach_mul_(list(averages.values()), torch.where(skip, 1.0, momentum))
        torch._foreach_add_(list(averages.values()), [p.grad for p in self.matrices])
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in self.mine]
            if mine:
                grads = torch.stack([p.grad for p in mine])  # (n, rows, cols)
                nesterov = grads.add_(torch.stack([averages[p] for p in mine]), alpha=momentum)
                update = self.newton_schulz(nesterov, self.iterations, self.dtype)
                torch._foreach_copy_([self.sum_of[p] for p in mine], update.unbind())
        self.runtime.all_reduce(self.sums)
        self.updates.copy_(self.sums).masked_fill_(skip, 0.0)
        for group in self.param_groups:
            updates = [self.update_of[p] for p in group["params"]]
            rows, cols = group["params"][0].shape
            rate = group["lr"] * max(1.0, rows / cols) ** 0.5
            torch._foreach_add_(group["params"], updates, alpha=-rate)


def split_as(vector, params):
    """Views of a vector in the shapes of `params`."""
    parts = vector.split([p.numel() for p in params])
    return [part.view_as(p) for part, p in zip(parts, params, strict=True)]


def is_named(name, patterns):
    return any(part in name for part in patterns.split(",") if part)


def make_optimizers(model, config, runtime):
    """(Adam, Muon). A group's `base_lr` is its rate before the schedule."""
    by_shape, small = defaultdict(list), [model.skip_weights]
    for name, p in model.blocks.named_parameters():
        control = p.ndim != 2 or is_named(name, config.control_tensor_name_patterns)
        (small if control else by_shape[p.shape]).append(p)
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    adam_groups = [{"params": [model.tok_emb.weight], "lr": embed_lr}]
    adam_groups.append({"params": small, "lr": config.scalar_lr})
    if not config.tie_embeddings:
        adam_groups.append({"params": [model.lm_head.weight], "lr": config.head_lr})
    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in by_shape.values()]
    betas = config.beta1, config.beta2
    adam = torch.optim.Adam(adam_groups, betas=betas, eps=config.adam_eps, fused=True)
    muon = Muon(muon_groups, runtime, config)
    groups = adam.param_groups + muon.param_groups
    for group in groups:
        group["base_lr"] = group["lr"]
    for name, p in model.named_parameters():
        times = sum(p is other for group in groups for other in group["params"])
        if times != 1:
            raise RunError(f"{name} is in {times} groups of make_optimizers: put it in one")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Linear):
            raise RunError(f"{name} is an nn.Linear, which fails in bfloat16: make it a Linear")
    return adam, muon


def lr_multiplier(config, step, elapsed_ms):
    """1, and at the end linearly down to 0: by steps or, in a capped run, by its clock.

    elapsed_ms: the training time of the `step` steps so far
    """
    if config.warmdown_iters == 0:
        return 1.0
    if config.max_wallclock_seconds <= 0:
        return min(1.0, max(0, config.iterations - step) / config.warmdown_iters)
    left_ms = max(0.0, 1e3 * config.max_wallclock_seconds - elapsed_ms)
    warmdown_ms = config.warmdown_iters * elapsed_ms / max(step, 1)
    return min(1.0, left_ms / max(warmdown_ms, 1e-9))


def muon_momentum(config, step):
    """A linear ramp up to MUON_MOMENTUM."""
    share = min(1.0, step / max(config.muon_momentum_warmup_steps, 1e-9))
    return (1 - share) * config.muon_momentum_warmup_start + share * config.muon_momentum


# === EXCHANGE: a step's one all-reduce of gradients, and all that ranks tell each other in it ===
class Message(NamedTuple):
    """What a rank tells. Sums with zeros, and of small whole numbers, are exact in float32."""

    steps: float  # how many its device is known to have done
    elapsed_ms: float  # the training time when it had
    wait_ms: float  # for input, so far
    signum: float  # of a signal that it heard, or NO_INPUT, or 0
    crc_low: float  # data_crc of the rows that it trained on: its lower 16 bits
    crc_high: float  # and its upper ones
    loss: float = 0.0  # its share of the mean loss, filled in on the device
    fault: float = 0.0  # 1: loss or gradient are not finite; filled in on the device


SIGNUM, LOSS, FAULT = (Message._fields.index(name) for name in ("signum", "loss", "fault"))


class Exchange:
    """All gradients are views of one vector, and behind them it has a table, a Message a rank.

    A rank writes in its row and leaves the others zero, so the sum over ranks is the whole table.
    The host reads it steps later, when it is surely there: nothing drains the device, and all ranks
    decide alike, for they read the same table at the same step. The device does not wait for them:
    after a table with a signal or a fault `skip` is 1, and no step changes anything any more.
    """

    def __init__(self, params, runtime, clock):
        self.params, self.runtime, self.clock = params, runtime, clock
        size, shape = sum(p.numel() for p in params), (runtime.world_size, len(Message._fields))
        self.vector = torch.zeros(size + math.prod(shape), device=runtime.device)
        self.gradients, table = self.vector.split([size, math.prod(shape)])
        self.table = table.view(shape)
        for p, part in zip(params, split_as(self.gradients, params), strict=True):
            p.grad = part
        self.skip = torch.zeros((), device=runtime.device)
        tables = runtime.steps_late + 2  # on their way at most
        self.sent = torch.zeros(tables, shape[1], pin_memory=runtime.cuda)
        self.received = torch.zeros(tables, *shape, pin_memory=runtime.cuda)
        self.unread = deque()  # (step, its table on the host, the event after which it is there)

    def begin(self, steps, elapsed_ms, data_crc):
        """The first step is `steps`; what was exchanged before is forgotten."""
        self.unread.clear()
        self.skip.zero_()
        self.taken = steps  # how many steps' tables have been read, and counted
        self.messages = [Message(steps, elapsed_ms, 0.0, 0, data_crc & 0xFFFF, data_crc >> 16)]
        self.done = steps, elapsed_ms  # what this rank's device has done, and when
        self.agreed = steps, elapsed_ms  # what rank 0's had, as far as all ranks have read of it
        self.first = steps, elapsed_ms  # `agreed` at the line of step 1, which may be a slow one

    def backward(self, loss):
        """Adds a loss's gradients to p.grad at once; loss.backward() adds them one by one."""
        # Kept: autograd's thread may hold them a moment longer than this one, at random, and then
        # the next forward needs more memory.
        self.kept = torch.autograd.grad(loss, self.params, materialize_grads=True)
        torch._foreach_add_([p.grad for p in self.params], self.kept)

    def all_reduce(self, step, message, loss):
        """Sums gradients and table, decides on `skip`, and sends the table to the host.

        No synchronisation point on CUDA: `read` is.
        """
        sent, received = self.sent[step % len(self.sent)], self.received[step % len(self.sent)]
        sent.copy_(torch.tensor(message))
        mine = self.table[self.runtime.rank]
        mine.copy_(sent, non_blocking=True)
        mine[LOSS] = loss
        mine[FAULT] = ~torch.isfinite(loss + self.gradients.sum())
        self.runtime.all_reduce(self.vector)
        ended = self.table[:, SIGNUM].sum() + self.table[:, FAULT].sum() > 0
        self.skip.masked_fill_(ended, 1.0)
        self.gradients.masked_fill_(self.skip > 0, 0.0)
        received.copy_(self.table, non_blocking=True)
        event = torch.cuda.Event(blocking=True) if self.runtime.cuda else None
        if event:
            event.record()
        self.unread.append((step, received, event))

    def read(self, before):
        """Reads the tables of all steps before `before`; HaltError at the first that did not count.

        The one synchronisation point of a step, and only where the host is that far ahead.
        """
        while self.unread and self.unread[0][0] < before:
            step, received, event = self.unread.popleft()
            if event:
                event.synchronize()
            messages = [Message(*values) for values in received.tolist()]
            for rank, message in enumerate(messages):
                if message.fault or message.signum:
                    fault = f"rank {rank}: step {step + 1}: loss or gradient not finite"
                    raise HaltError(int(message.signum) or fault, rank)
            self.messages, self.taken = messages, step + 1
            # Where the device is the faster one, later steps are done by now.
            later = sum(event.query() for _, _, event in self.unread if event)
            self.done = step + 1 + later, self.clock.now_ms()
            self.agreed = max(self.agreed, (messages[0].steps, messages[0].elapsed_ms))

    def elapsed_ms(self, step):
        """Training time of `step` steps: what all ranks know, and on at the pace since step 1."""
        (steps, ms), (first_steps, first_ms) = self.agreed, self.first
        pace_ms = (ms - first_ms) / (steps - first_steps) if steps > first_steps else 0.0
        return ms + pace_ms * (step - steps)

    def data_crc(self):
        total = sum(int(each.crc_low) + (int(each.crc_high) << 16) for each in self.messages)
        return total & 0xFFFFFFFF


# === EVALUATION ===
class ByteTable(NamedTuple):
    """What bits per byte need to know of each token id: arrays of numpy, or tensors."""

    base: Any  # UTF-8 bytes, without a leading space
    leading_space: Any  # is there one?
    boundary: Any  # control, unknown, unused: no bytes, and a space behind it does not count

    @classmethod
    def of(cls, config):
        """Of TOKENIZER_PATH; RunError if it does not fit."""
        path = config.tokenizer_path
        try:
            table = cls.load(path)
        except Exception as error:  # whatever a bad file raises
            why = "no model" if isinstance(error, RuntimeError) else first_line(error)
            raise RunError(f"TOKENIZER_PATH={path}: {why}: {GET_DATA}") from error
        size = len(table.base)
        if size != config.vocab_size:
            raise RunError(f"VOCAB_SIZE={config.vocab_size}: {path} has {size} tokens: set {size}")
        recorded = Path(config.data_path, "tokenizer.sha256")  # as sha256sum writes it, by data/
        if recorded.is_file():
            wanted, _, name = recorded.read_text(errors="replace").strip().partition("  ")
            if hashlib.sha256(Path(path).read_bytes()).hexdigest() != wanted:
                other = os.path.normpath(recorded.parent / name)
                raise RunError(f"TOKENIZER_PATH={path}: it did not make these shards: set {other}")
        return table

    @classmethod
    def load(cls, path):
        """Of a SentencePiece .model, or a byte tokenizer's .json, in either of its two forms."""
        if path.endswith(".json"):
            form = json.loads(Path(path).read_bytes())
            offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
            boundary = np.arange(256 + min(offset, 2**16)) < offset  # ids below are controls
            return cls(1 - boundary, np.zeros_like(boundary), boundary)
        model = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        ids = list(range(len(model)))
        pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]
        boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], 0)
        space = np.array([piece.startswith(" ") for piece in pieces]) & ~boundary
        size = np.where(model.is_byte(ids), 1, [len(piece.encode()) for piece in pieces] - space)
        return cls(size * ~boundary, space, boundary)

    def count(self, previous, target):
        """The bytes of the tokens `target`, each behind its `previous`."""
        spaces = self.leading_space[target] & ~self.boundary[previous]
        return self.base[target].sum() + spaces.sum()


class Validation:
    """Nats from the model, bytes from the tokens; counted once, by the reader's thread."""

    def __init__(self, config, runtime, log, phase):
        self.runtime, self.log, self.phase = runtime, log, phase
        self.shards, self.bytes = Shards(config, "val"), 0
        self.plan = BatchPlan.val(config, runtime, self.shards.ends[-1])
        self.tokens = self.plan.span_rows * self.plan.seq_len  # predicted, over all ranks
        self.partial = " partial_val:1" if config.val_tokens else ""
        self.overlap = Overlap.of(config, "val", runtime.cuda)
        self.log_every, self.byte_table = config.val_progress_log_every, ByteTable.of(config)
        self.on_device = config.val_bytecount_device == "cuda"
        if self.on_device:
            self.byte_table = ByteTable(*(torch.tensor(t, device="cuda") for t in self.byte_table))

    def count_bytes(self, plan, rows, tokens):
        """A batch's digest, by the reader: its bytes, the first time."""
        known = self.bytes or self.on_device
        return 0 if known else int(self.byte_table.count(tokens[:-1], tokens[1:]))

    def score(self, loss, batch, sums):
        """Adds a batch's nats and bytes to `sums`."""
        rows = len(batch.rows)
        with self.phase("forward"):
            sums[0] += loss(batch.x, batch.y).double() * (rows * self.plan.seq_len)
        if self.on_device and not self.bytes:
            sums[1] += self.byte_table.count(batch.x[:rows], batch.y[:rows])
        elif batch.digest:
            sums[1] += batch.digest

    @torch.no_grad()
    def evaluate(self, loss, scope):
        """(nats a token, bits a byte, ms) of the whole split; all ranks take part."""
        runtime, plan, phase = self.runtime, self.plan, self.phase
        runtime.synchronize()
        start = time.perf_counter()
        # nats, bytes, and the signals that each rank has heard
        sums = torch.zeros(2 + runtime.world_size, dtype=torch.float64, device=runtime.device)
        how = {"digest": self.count_bytes, "phase": phase}
        batches = Pipeline(self.shards, plan, self.overlap, runtime, **how)
        with closing(batches), phase("validate"):
            try:
                for done, batch in enumerate(batches, 1):
                    self.score(loss, batch, sums)
                    if is_due(self.log_every, done):  # a synchronisation point
                        seen = (batch.rows.stop - plan.first_row) * plan.seq_len
                        mean = f"partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}"
                        at = f"val_progress:{scope} batch {done}/{plan.num_batches}"
                        self.log.line(f"{at} {mean}")
            except RunError as error:  # of the reader
                runtime.fail(error)
        sums[2 + runtime.rank] = runtime.signum
        nats, counted, *signals = runtime.all_reduce(sums).tolist()  # a synchronisation point
        if any(signals):
            raise HaltError(int(max(signals)), signals.index(max(signals)))
        self.bytes, ms = self.bytes or int(counted), 1e3 * (time.perf_counter() - start)
        return nats / self.tokens, nats / math.log(2) / self.bytes, ms


# === ARTIFACT: the challenge's format; int8 with a scale a row, then zlib ===
QUANT_FORMAT = "int8_clean_per_row_v1"


def quantize(t):
    """Floats -> (int8 of the same shape, scale): float16 (rows,) of a matrix, else a float32."""
    t, matrix = t.float(), t.ndim == 2
    clip = t.abs().quantile(0.9999984, dim=1 if matrix else None, keepdim=True)
    scale = (clip / 127).clamp(1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
    q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
    return q, scale[:, 0].half() if matrix else scale.view(())


def torch_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def torch_load(data):
    """What torch.save wrote. Nothing in it is executed, and it takes no more memory than bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        unpacked = sum(part.file_size for part in file.infolist())
        pickles = [file.read(name) for name in file.namelist() if unpacked <= len(data)]
    if not pickles or any(b"\nbytearray\n" in pickle for pickle in pickles):
        raise ValueError("it asks for more memory than it has bytes")
    return torch.load(io.BytesIO(data), "cpu", weights_only=True)


def pack(state, config):
    """(the artifact, bytes of its tensors, bytes before zlib) of a state dict on the CPU"""
    quantized, scales, dtypes, kept, meta, originals = {}, {}, {}, {}, {}, {}
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        if not t.is_floating_point():
            kept[name] = t
        elif t.numel() > 65_536:
            (quantized[name], scales[name]), dtypes[name] = quantize(t), dtype
            if t.ndim == 2:
                meta[name] = {"scheme": "per_row", "axis": 0}
        elif is_named(name, config.int8_keep_float_fp32_name_patterns):
            kept[name] = t.float()
        else:
            kept[name], originals[name] = t.half(), dtype
    file = {"__quant_format__": QUANT_FORMAT, "quantized": quantized, "scales": scales}
    file |= {"dtypes": dtypes, "passthrough": kept, "qmeta": meta}
    raw = torch_bytes(file | {"passthrough_orig_dtypes": originals})
    payload = sum(t.nbytes for part in (quantized, scales, kept) for t in part.values())
    return zlib.compress(raw, 9), payload, len(raw)


def unpack(data, expected):
    """The state dict in an artifact, ours or the challenge's; RunError if it does not fit."""
    try:
        stream, limit = zlib.decompressobj(), 8 * sum(t.numel() for t in expected.values()) + 2**20
        raw = stream.decompress(data, limit)
        if not stream.eof:
            raise ValueError("it is cut short, or unpacks to too much")
        file = torch_load(raw)
        if file["__quant_format__"] != QUANT_FORMAT:
            raise ValueError("it has another format")
        state = {**file["passthrough"], **file["quantized"]}
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in expected.items()}:
            raise ValueError("its tensors are those of another model")
        for name, q in file["quantized"].items():
            scale = file["scales"][name]
            if scale.shape not in ((), q.shape[:1]):
                raise ValueError(f"the scale of {name} has another shape")
            state[name] = q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
        return {name: state[name].to(t.dtype) for name, t in expected.items()}
    except Exception as error:  # whatever a bad file raises
        raise RunError(f"no artifact of this model: {first_line(error)}") from error


# === INSTRUMENTS: the clock, TRACE_STEPS and TRAINING_TIMING_BREAKDOWN ===
class Clock:
    """Training time in ms. Its edges are synchronisation points: the device's work is done."""

    def __init__(self, runtime):
        self.runtime, self.total_ms = runtime, 0.0
        self.since = math.inf  # it stands

    def now_ms(self):
        return self.total_ms + 1e3 * max(0.0, time.perf_counter() - self.since)

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.runtime.synchronize()
        self.total_ms, self.since = self.now_ms(), math.inf


class Phases:
    """`with phase("forward"):` names a phase for torch.profiler, or times it alone."""

    def __init__(self, config, runtime, log):
        self.config, self.runtime, self.log = config, runtime, log
        self.ms, self.profiler = defaultdict(float), None

    def __call__(self, name):
        if self.config.training_timing_breakdown:
            return self.alone(name)
        return record_function(name) if self.profiler else nullcontext()

    @contextmanager
    def alone(self, name):
        """Two synchronisation points around a phase; what they wait for is counted as "sync"."""
        start = self.synchronized_ms()
        yield
        self.ms[name] += self.synchronized_ms() - start
        if name == "validate":  # its own phases are no step's
            self.ms = defaultdict(float, validate=self.ms[name])

    def synchronized_ms(self):
        start = time.perf_counter()
        self.runtime.synchronize()
        end = time.perf_counter()
        self.ms["sync"] += 1e3 * (end - start)
        return 1e3 * end

    def begin_trace(self):
        """From here on, on rank 0: what runs when on all threads and streams, overlap on."""
        steps, options = self.config.trace_steps, {}
        if steps == 0 or self.runtime.rank > 0:
            return
        with suppress(AttributeError, TypeError):  # private names: else a trace without the reader
            private = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            options = {"experimental_config": private}
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
        options |= {"schedule": schedule, "on_trace_ready": self.write_trace}
        self.profiler = torch.profiler.profile(**options)
        self.profiler.start()
        self.profiler.step()  # past the warm-up

    def write_trace(self, profiler):
        path, self.profiler = self.log.path.with_suffix(".trace.json.gz"), None
        try:
            profiler.export_chrome_trace(str(path))
            self.log.line(f"trace: {path}")
        except (OSError, RuntimeError) as error:
            self.log.line(f"warning: no trace: {first_line(error)}")

    def end_step(self, step):
        if self.profiler:
            self.profiler.step()
        ms, self.ms, count = self.ms, defaultdict(float), self.runtime.micro_steps
        often = step <= 10 or step % self.config.training_timing_every == 0
        if not (self.config.training_timing_breakdown and often):
            return
        names = "input_wait", "h2d", "forward", "backward"
        read, upload, forward, backward = (ms[name] / count for name in names)
        self.log.line(
            f"timing_breakdown step:{step} micro_steps:{count} batch_cpu_ms:{read:.2f} "
            f"batch_h2d_ms:{upload:.2f} forward_ms:{forward:.2f} backward_ms:{backward:.2f} "
            f"grad_clip_ms:{ms['grad_clip']:.2f} optimizer_ms:{ms['optimizer']:.2f} "
            f"val_ms:{ms['validate']:.2f} explicit_sync_ms:{ms['sync']:.2f} "
            "(per_optimizer_step; forward/backward/batch averaged over micro_steps; "
            f"grad_accum_steps={count}) reduce_ms:{ms['reduce']:.2f}"
        )


# === TRAINING ===
FINAL = "final_int8_zlib_roundtrip"
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312}  # dense bfloat16, data sheets


class Trainer:
    """A run: the model and all that trains it, the same on every rank."""

    def __init__(self, config, runtime, log):
        self.config, self.runtime, self.log = config, runtime, log
        self.clock, self.phase = Clock(runtime), Phases(config, runtime, log)
        torch.manual_seed(config.seed)
        self.model = GPT(config, runtime.dtype).to(runtime.device)
        self.adam, self.muon = self.optimizers = make_optimizers(self.model, config, runtime)
        self.exchange = Exchange(list(self.model.parameters()), runtime, self.clock)
        for optimizer in self.optimizers:
            optimizer.found_inf, optimizer.grad_scale = self.exchange.skip, None
        self.shards = Shards(config, "train", log)
        self.overlap = Overlap.of(config, "train", runtime.cuda)
        self.validation, self.val_ms = Validation(config, runtime, log, self.phase), 0.0
        self.writer = threading.Thread()  # of a checkpoint; this one never starts
        self.final = None  # the snapshot that is exported
        self.begin(step=0, data_crc=0)
        self.loss = self.model  # x, y -> mean nats
        if config.torch_compile == "1" or config.torch_compile == "auto" and runtime.cuda:
            slot = Slot(BatchPlan.train(config, runtime), runtime)
            self.loss = try_compile(self.model, (slot.x, slot.y), log)
            if self.loss is not self.model:  # the compiler works
                self.muon.newton_schulz = torch.compile(newton_schulz, dynamic=False)

    def begin(self, step, data_crc):
        """Goes on after `step`."""
        self.step = step
        self.crc = data_crc if self.runtime.rank == 0 else 0  # of this rank; rank 0's begins there
        self.exchange.begin(step, self.clock.total_ms, data_crc)

    def batches(self):
        plan = BatchPlan.train(self.config, self.runtime, self.step)
        return Pipeline(self.shards, plan, self.overlap, self.runtime, phase=self.phase)

    def train_step(self, batches):
        """Issues one step. Nothing here waits for the device, and only `batches` for input."""
        exchange, phase, loss_sum = self.exchange, self.phase, 0.0
        parts = self.runtime.micro_steps * self.runtime.world_size
        exchange.vector.zero_()
        try:
            for batch in islice(batches, self.runtime.micro_steps):  # fewer after a signal
                with phase("forward"):
                    loss = self.loss(batch.x, batch.y) / parts
                with phase("backward"):
                    exchange.backward(loss)
                loss_sum += loss.detach()
                self.crc = (self.crc + batch.digest) & 0xFFFFFFFF
        except RunError as error:  # of the reader
            self.runtime.fail(error)
        with phase("reduce"):
            crc = self.crc & 0xFFFF, self.crc >> 16
            message = Message(*exchange.done, batches.total_wait_ms, self.runtime.signum, *crc)
            exchange.all_reduce(self.step, message, loss_sum)
        with phase("grad_clip"):
            if self.config.grad_clip_norm > 0:
                norm = exchange.gradients.norm() + 1e-6
                exchange.gradients.mul_((self.config.grad_clip_norm / norm).clamp(max=1.0))
        with phase("optimizer"):
            scale = lr_multiplier(self.config, self.step, exchange.elapsed_ms(self.step))
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = scale * group["base_lr"]
                    group["momentum"] = muon_momentum(self.config, self.step)  # Adam ignores it
                optimizer.step()
        self.step += 1

    def warm_up(self):
        """Priming steps, off the clock: all is allocated and compiled then. None of them counts."""
        step, crc, steps = self.step, self.exchange.data_crc(), self.config.warmup_steps
        self.exchange.skip.fill_(1)  # no step changes anything
        try:
            with closing(self.batches()) as batches:
                for done in range(1, steps + 1):
                    self.train_step(batches)
                    self.exchange.read(self.step)
                    self.log.line(f"warmup_step:{done}/{steps}")
        finally:
            self.begin(step, crc)  # also where a signal ends them

    def train(self):
        """The run: steps, and once in a while a line, a validation, a checkpoint."""
        config, clock = self.config, self.clock
        self.warm_up()
        self.logged = self.step, clock.total_ms, 0.0  # step, ms and wait of the last line
        with closing(self.batches()) as batches:
            self.phase.begin_trace()
            clock.start()
            while True:
                # The tables of some steps ago: the device has gone on, so nothing waits for it.
                self.exchange.read(self.step - self.runtime.steps_late)
                next_ms = self.exchange.elapsed_ms(self.step + 1)
                capped = 0 < 1e3 * config.max_wallclock_seconds < next_ms
                last = capped or self.step >= config.iterations
                if last and self.step > self.logged[0]:
                    self.log_step()
                if last or is_due(config.val_loss_every, self.step):
                    self.validate()
                if last:
                    break
                step_tokens = config.train_batch_tokens + SPANS_PER_STEP
                if self.step == self.shards.ends[-1] // step_tokens and not self.shards.growing:
                    self.log.line(f"WARNING: step {self.step + 1} begins the shards anew")
                self.train_step(batches)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    self.log_step()
                if is_due(config.checkpoint_every, self.step):
                    self.checkpoint()
                self.phase.end_step(self.step)
            clock.stop()
        if self.phase.profiler:
            self.phase.profiler.stop()  # the run was shorter than TRACE_STEPS
        if capped:
            at = f"train_time:{clock.total_ms:.0f}ms step:{self.step}/{config.iterations}"
            self.log.line(f"stopping_early: wallclock_cap {at}")
        self.report(batches)

    def evaluate(self, scope):
        self.model.eval()
        result = self.validation.evaluate(self.loss, scope)
        self.model.train()
        return result

    def validate(self):
        self.exchange.read(self.step)
        self.clock.stop()
        ms, at = self.clock.total_ms, f"step:{self.step}/{self.config.iterations}"
        loss, bpb, val_ms = self.evaluate(f"step_{self.step}")
        self.val_ms += val_ms
        self.log.line(
            f"{at} val_loss:{loss:.4f} val_bpb:{bpb:.4f} train_time:{ms:.0f}ms "
            f"step_avg:{ms / max(self.step, 1):.2f}ms{self.validation.partial}\n"
            f"val_stage_time_ms:{val_ms:.0f}ms {at}",
            event="validation",
            val_loss=loss,
            val_bpb=bpb,
        )
        self.clock.start()

    def log_step(self):
        """A line, with rates since the last one. Synchronisation point: its time must be true."""
        config, exchange, step = self.config, self.exchange, self.step
        self.runtime.synchronize()
        exchange.read(step)
        ms = self.runtime.broadcast(self.clock.now_ms())
        exchange.agreed = step, ms
        if step == 1:
            exchange.first = exchange.agreed
        now = step, ms, max(message.wait_ms for message in exchange.messages)
        steps, span_ms, wait_ms = np.subtract(now, self.logged)  # since the last line
        self.logged = now
        tok_s = 1e3 * steps * config.train_batch_tokens / span_ms
        left_ms = (config.iterations - step) * ms / step
        if config.max_wallclock_seconds > 0:
            left_ms = min(left_ms, 1e3 * config.max_wallclock_seconds - ms)
        loss = sum(message.loss for message in exchange.messages)
        line = (
            f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{ms:.0f}ms "
            f"step_avg:{ms / step:.2f}ms tok_s:{tok_s:.0f} "
            f"input_wait:{100 * wait_ms / span_ms:.2f}% data_crc:{exchange.data_crc():08x} "
            f"eta:{max(0.0, left_ms / 1e3):.0f}s"
        )
        for gpu, peak in PEAK_TFLOPS.items():
            if gpu in self.runtime.hardware:
                flops = tok_s / self.runtime.world_size * self.model.flops_per_token(config)
                line += f" mfu:{100 * 1e-12 * flops / peak:.1f}%"
        self.log.line(line, "step", train_loss=loss)  # unrounded

    def report(self, batches):
        """What the run has cost, and what its input has: a line and a sentence."""
        ms, micro_steps = self.clock.total_ms, self.runtime.micro_steps
        waits = np.reshape(batches.waits_ms or [0.0] * micro_steps, (-1, micro_steps)).sum(1)
        percent, advice = 100 * waits.sum() / max(ms, 1e-9), "overlap settings do not matter here"
        if percent >= 0.5:
            more = "raise TRAIN_PREFETCH_QUEUE, or move DATA_PATH to a faster disk"
            advice = more if self.overlap.queue else "nothing overlaps: set TRAIN_PREFETCH=1"
        step_tokens = self.config.train_batch_tokens + SPANS_PER_STEP
        epochs = self.step * step_tokens / self.shards.ends[-1]
        peaks = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20]
        if not self.runtime.cuda:
            peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10] * 2  # on Linux
        self.log.line(
            f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{self.val_ms:.0f}ms\n"
            f"input_wait total:{waits.sum():.3f}ms share:{percent:.3f}% "
            f"p99:{np.percentile(waits, 99):.3f}ms max:{waits.max():.3f}ms "
            f"worst_step:{self.step - len(waits) + waits.argmax() + 1} "
            f"read_bytes:{batches.bytes_read} epochs:{epochs:.3f}\n"
            f"input cost {percent:.2f} % of training: {advice}\n"
            f"peak memory allocated: {peaks[0]} MiB reserved: {peaks[1]} MiB",
            event="input",
        )

    def snapshot(self):
        """All there is to go on from, as a copy; training draws no random numbers. Synchronises."""
        parts = {"model": self.model, "adam": self.adam, "muon": self.muon}
        state = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        self.runtime.synchronize()
        self.exchange.read(self.step)
        state |= {"settings": self.config.texts(), "step": self.step, "val_ms": self.val_ms}
        state |= {"train_ms": self.clock.now_ms(), "data_crc": self.exchange.data_crc()}
        return state | {"shards": [path.name for path in self.shards.paths]}

    def restore(self, state):
        """Goes on from a snapshot. Rates and the like are this run's."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in ((self.adam, state["adam"]), (self.muon, state["muon"])):
            mine = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict(saved | mine)
        self.clock.total_ms, self.val_ms = state["train_ms"], state["val_ms"]
        self.begin(state["step"], state["data_crc"])

    def checkpoint(self):
        """A thread writes it: training does not wait for the disk."""
        state = self.snapshot()
        if self.writer.is_alive():
            self.log.line(f"warning: no checkpoint of step {self.step}: the disk is still busy")
        elif self.runtime.rank == 0:
            self.writer = threading.Thread(target=self.save, args=[state], daemon=True)
            self.writer.start()

    def save(self, state):
        """step_<n>.pt; the last CHECKPOINT_KEEP stay. True: it is on the disk."""
        path = Path("checkpoints", self.config.run_id, f"step_{state['step']:08d}.pt")
        # Its copies to the host are on another stream: the device goes on training.
        with torch.cuda.stream(torch.cuda.Stream() if self.runtime.cuda else None):
            finite = all(tensor.isfinite().all() for tensor in state["model"].values())
            data = torch_bytes(state)
        problem = self.write(path, data) if finite else "weights are not finite"
        if problem:
            self.log.line(f"warning: no checkpoint: {problem}")
            return False
        for old in checkpoints(self.config.run_id)[self.config.checkpoint_keep :]:
            old.unlink(missing_ok=True)
        self.log.event("checkpoint", step=state["step"], path=str(path))
        return True

    def write(self, path, data):
        return write_atomic(path, data, self.config.data_stall_seconds)

    def halt(self, reason, rank=0):
        """All ranks have left the same step: (exit code, status, problem); the state is saved."""
        if self.writer.is_alive():
            self.writer.join()
        self.step = self.exchange.taken
        saved = self.runtime.rank == 0 and self.save(self.final or self.snapshot())
        saved = self.runtime.broadcast(saved)  # the others wait for the disk, too
        again = ""
        if saved:
            again = f": this command with RUN_ID={self.config.run_id} RESUME=auto goes on"
        if isinstance(reason, str):
            return 1, "nonfinite", f"{reason}: lower the learning rates{again}"
        if reason == NO_INPUT:
            return 1, "failed", self.runtime.broadcast(self.runtime.problem, rank) + again
        return 128 + reason, "interrupted", f"interrupted after step {self.step}{again}"

    def export_and_score(self, code_bytes):
        """Rank 0 writes the artifact; every rank scores its part of the split with those bytes.

        Returns what is missing at the end: a full disk costs files, not the score.
        """
        self.final, problems, data = self.snapshot(), [], None
        state = {name: t.cpu() for name, t in self.final["model"].items()}
        model, tag, partial = torch_bytes(state), FINAL, self.validation.partial
        if self.runtime.rank == 0:
            data, payload, raw = pack(state, self.config)
            problems.append(self.write(Path("final_model.int8.ptz"), data))
            total, ratio = len(data) + code_bytes, sum(t.nbytes for t in state.values()) / payload
            self.log.line(
                f"Serialized model: {len(model)} bytes\nCode size: {code_bytes} bytes\n"
                f"Total submission size: {len(model) + code_bytes} bytes\n"
                f"Serialized model int8+zlib: {len(data)} bytes "
                f"(payload:{payload} raw_torch:{raw} payload_ratio:{ratio:.2f}x)\n"
                f"Total submission size int8+zlib: {total} bytes"
            )
            self.log.event("artifact", artifact_bytes=len(data), code_bytes=code_bytes)
            if total > 16_000_000:
                self.log.line(f"WARNING: {total} bytes, the cap is 16000000")
        self.model.load_state_dict(unpack(self.runtime.broadcast(data), state))
        loss, bpb, ms = self.evaluate(tag)
        if self.runtime.rank == 0:
            problems.append(self.write(Path("final_model.pt"), model))
        self.log.line(
            f"{tag} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{ms:.0f}ms{partial}\n"
            f"{tag}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}{partial}",
            event="score",
        )
        if not math.isfinite(loss):
            problems.append(f"the score is {loss}: lower the learning rates")
            self.final = None  # no state to go on from
        return "; ".join(filter(None, problems))


def is_due(every, step):
    return every > 0 and step % every == 0


# === MAIN ===
def checkpoints(run_id):
    """The files of a run, the newest first."""
    return sorted(Path("checkpoints", run_id).glob("step_????????.pt"), reverse=True)


def find_checkpoint(config):
    """(path, state, what has changed since) of what RESUME means, or None."""
    paths = checkpoints(config.run_id) if config.resume == "auto" else [Path(config.resume)]
    for path in paths if config.resume else []:
        try:
            state = torch_load(path.read_bytes())
            texts = [*state["settings"].values(), *state["shards"]]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("its settings are not texts")
        except Exception as error:  # whatever a bad file raises
            if config.resume != "auto":
                why = f"no checkpoint: {first_line(error)}: set auto, or a step_<n>.pt"
                raise RunError(f"RESUME={path}: {why}") from error
            tell(f"warning: {path} is damaged: taking the one before", "stderr")
            continue
        return path, state, find_changes(config, path, state)
    return None


def find_changes(config, path, state):
    """What has changed since a checkpoint; RunError where that decides shapes or data."""
    theirs, changed = state["settings"], {}
    for name, mine in config.texts().items():
        same = Path(mine).name == Path(theirs.get(name, "")).name  # of paths only the name
        if not same and name not in ("RUN_ID", "RESUME"):
            changed[name] = f"{name} was {theirs.get(name)}, is {mine}"
    bound = [change for name, change in changed.items() if name in BOUND.split()]
    if bound:
        bound = "; ".join(bound)
        raise RunError(f"RESUME={path}: of another configuration: {bound}: set that again")
    shards = [shard.name for shard in Shards(config, "train").paths]
    for mine, other in zip(shards, state["shards"], strict=False):  # more may have come since
        if mine != other:
            raise RunError(f"RESUME={path}: of other shards: {other} is {mine} now: restore them")
    with torch.device("meta"):
        model = GPT(config, torch.float32).state_dict()
    saved = state.get("model", {})
    same = {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in model.items()}
    if not same or not {"adam", "muon", "step"} <= state.keys():
        raise RunError(f"RESUME={path}: of another script: its tensors are not this model's")
    return "; ".join(changed.values())


def log_source(log, warnings):
    """What a log begins with, as the challenge's do: the script's text and the versions."""
    source, rule = Path(__file__).read_text("utf-8"), "=" * 100
    smi = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    log.write(".txt", f"{source}\n{rule}\n{versions}\n{smi}\n{rule}")
    log.line("\n".join([str(log.path), *warnings]))


def log_header(run, backends):
    """Settings, in the challenge's lines."""
    config, log, runtime, shards, val = run.config, run.log, run.runtime, run.shards, run.validation

    def words(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    kind = "byte" if config.tokenizer_path.endswith(".json") else "sentencepiece"
    tied = config.tie_embeddings
    embed_lr, head_lr = (config.tied_embed_lr, 0.0) if tied else (config.embed_lr, config.head_lr)
    log.line(
        f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{shards.folder.name} train_shards:{len(shards.paths)}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"tokens:{val.tokens}{val.partial}\n"
        f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{runtime.micro_steps}\n"
        f"sdp_backends:{backends}\nattention_mode:gqa {words('num_heads num_kv_heads')}\n"
        f"{words('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{words('matrix_lr scalar_lr')}\n"
        f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{words('seed')}\n"
        f"train_io:{run.overlap.words}\nval_io:{val.overlap.words}"
    )
    if len(shards.paths) < shards.promised:
        state = "the others are being made" if shards.growing else "WARNING: no more will come"
        log.line(f"train_shards: {len(shards.paths)} of {shards.promised}: {state}")
    log.event("run", run_id=config.run_id, argv=sys.argv)
    log.event("config", **asdict(config))
    machine = {"device": runtime.hardware, "cpus": os.cpu_count(), "world_size": runtime.world_size}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    log.event("hardware", **machine, **versions, python=sys.version.split()[0])


def run_to_the_end(config, runtime, log, found):
    """(exit code, status, problem): all ranks come to the same end."""
    backends = attention_backends(config, runtime, log)
    names = ",".join(backends.values())
    torch.compiler.config.cache_key_tag = names  # its cache goes by that
    with sdpa_kernel(list(backends), set_priority=True):
        run = Trainer(config, runtime, log)
        log_header(run, names)
        if found:
            path, state, changed = found
            run.restore(state)
            log.line(f"resumed: step:{run.step} resumed_from:{path} {changed}", "checkpoint")
        try:
            run.train()
            problem = run.export_and_score(Path(__file__).stat().st_size)
        except HaltError as halt:
            return run.halt(*halt.args)
    if run.writer.is_alive():
        run.writer.join()
    problem = runtime.broadcast(problem)  # rank 0's, and the others wait for its disk
    if problem and runtime.rank == 0 and run.final:
        run.save(run.final)
    return (1, "failed", problem) if problem else (0, "finished", "")


def execute(config, env, warnings):
    """Runs it; the exit code. What is foreseeable ends in one line."""
    runtime, log = Runtime(config, env), None
    together = False  # have all ranks come to the same end?
    code, status, problem = 1, "failed", ""
    try:
        runtime.start(env)
        own = {"DATA_PATH": "", "TOKENIZER_PATH": "", "RUN_ID": ""}  # a machine's, a rank's own
        runtime.require_equal(config.texts() | own | read_data(config)[0])
        found = find_checkpoint(config) if runtime.rank == 0 else None
        run_id, found = runtime.broadcast((config.run_id, found))
        log = RunLog(run_id, runtime.rank == 0, found)
        log_source(log, warnings)
        code, status, problem = run_to_the_end(replace(config, run_id=run_id), runtime, log, found)
        together = True
    except RunError as error:
        problem = str(error)
    except torch.OutOfMemoryError:
        steps, free = runtime.micro_steps, torch.cuda.mem_get_info()[0] >> 20
        problem = f"GRAD_ACCUM_STEPS={steps}: out of memory, {free} MiB free: set {2 * steps}"
    except Exception as error:  # nobody foresaw it, or another rank has gone
        tell(traceback.format_exc(), "stderr")
        problem = f"{type(error).__name__}: {first_line(error)}"
    if log:
        log.event("end", status=status, exit_code=code, error=problem)
        log.console(f"{status}: see {log.path}")
    if problem and (runtime.rank == 0 or not together):  # last: it says how to go on
        alone = runtime.world_size > 1 and not together and not problem.startswith("rank")
        complain(f"rank {runtime.rank}: {problem}" if alone else problem)
    if together and dist.is_initialized():  # else others may sit in a collective: NCCL would wait
        dist.destroy_process_group()
    return code


def complain(problem):
    """On stderr, and in the report that torchrun makes of a failed rank."""
    tell(f"train_gpt.py: {problem}", "stderr")
    try:
        raise RunError(problem)  # it has to be at work to be recorded
    except RunError as error:
        with suppress(OSError, ValueError):
            get_error_handler().record_exception(error)


def main(arguments, env):
    """The exit code: 0 done, 1 failed, 2 wrong settings, 128 + n ended by signal n."""
    if arguments in (["--help"], ["-h"]):
        print_help()
        return 0
    config, faults, warnings = read_config(env)
    faults += [f"{word}: unknown, see --help" for word in arguments if word != "--print-config"]
    if arguments and not faults:
        given = {name.lower(): "environment" for name in filter(env.get, SETTINGS)}
        pairs = {
            k: {"value": v, "source": given.get(k, "default")} for k, v in vars(config).items()
        }
        tell(json.dumps(pairs, indent=1))
        return 0
    faults += find_faults(config, int(env.get("WORLD_SIZE", 1)), env)
    if not faults:
        return execute(config, env, warnings)
    if env.get("LOCAL_RANK", "0") == "0":
        complain("\n  ".join(["nothing started, wrong settings:", *faults]))
    else:
        time.sleep(30)  # torchrun ends all at the first exit: that of the rank that speaks
    return 2


if __name__ == "__main__":
    exit_code = main(sys.argv[1:], os.environ)
    os._exit(exit_code)  # the interpreter's own exit aborts now and then, in gloo's threads (2.13)
