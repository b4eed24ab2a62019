"""A parameter-golf record: LeakyReLU^2, legal test-time training, Parallel Muon, overlapped input.

On 8 GPUs (or 1, 2, 4):          torchrun --standalone --nproc_per_node=8 train_gpt.py
One process, on a GPU or a CPU:  python train_gpt.py
The settings; their values now:  python train_gpt.py --help | --print-config

One pipeline feeds training, validation, sliding windows and test-time training: a thread reads
tokens, a copy stream uploads them, the compute stream works on them.

CONFIG RUNTIME DATA MODEL OPTIMIZERS AVERAGES EXCHANGE EVALUATION TEST-TIME-TRAINING ARTIFACT
TRAINING MAIN

To find                         look at
the banks, the model            GPT.__init__, GPT.matrices; Block is one layer
Parallel Muon                   ParallelMuon.step, BankShard
test-time training, the loop    score_and_learn; what is scored and trained on: WindowPlan
the export                      pack, quantize_int6; its order of tensors: unbanked
the schedule                    lr_multiplier, muon_momentum
"""

import difflib
import inspect
import io
import json
import lzma
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
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, NewType, get_args

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# === CONFIG: a line `name: kind = default  # unit; meaning` is a setting; NAME=value sets it ===
Count = NewType("Count", int)  # 1 or more; only an annotation
LEAST = {int: 0, Count: 1, float: -1e300}  # of a setting's kind; read_config demands it
CONTROLS = "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight"
CONTROLS += ",skip_weights,smear,dtg_gate,ve_layer_scales,ve_shared.scale,attn_gate,vr_lambda"
CAP_BYTES = 16_000_000  # of the script and the artifact together


@dataclass(frozen=True)
class Config:
    """The settings of a run, and their defaults: the published script's."""

    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder; of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # file; SentencePiece
    run_id: str = ""  # name; of logs/<RUN_ID>.txt and .jsonl; empty: a random one
    seed: int = 1337  # number; of the initial weights
    # validation and logs
    val_batch_size: Count = 524288  # tokens; a validation batch, over all ranks and micro-steps
    val_loss_every: int = 4000  # steps; between validations, from step 0 on; 0: only at the end
    val_tokens: int = 0  # tokens; validate on the first N only (never submit that); 0: all
    train_log_every: int = 500  # steps; between lines (steps 1-10 always); 0: none
    # length
    iterations: int = 20000  # steps; length of the run
    warmdown_iters: int = 3500  # steps; the last ones, over which the learning rate falls to 0
    warmup_steps: int = 20  # steps; priming, rolled back; not a learning-rate warm-up
    train_batch_tokens: Count = 786432  # tokens; an optimizer step, over all ranks
    train_seq_len: Count = 2048  # tokens; a row
    eval_seq_len: int = 2048  # tokens; a row of validation, a sliding window; 0: TRAIN_SEQ_LEN
    max_wallclock_seconds: float = 600.0  # seconds; cap on training; <=0: none, and runs repeat
    # model
    vocab_size: Count = 1024  # tokens; that of the tokenizer
    num_layers: Count = 11  # blocks; the first half feeds skips to the second
    model_dim: Count = 512  # channels; width of the residual stream
    num_heads: Count = 8  # heads; of queries
    num_kv_heads: Count = 4  # heads; of keys and values
    mlp_mult: float = 3.0  # times; MLP width over MODEL_DIM, rounded down
    mlp_fused_form: bool = True  # 0/1; the square as a product; 0: in float32; the same value
    tie_embeddings: bool = True  # 0/1; the output head is the token embedding
    rope_base: float = 10000.0  # number; base of the rotary wavelengths
    rope_dims: int = 16  # channels; of a head that rotate; 0: all
    logit_softcap: float = 30.0  # number; logits = cap * tanh(logits / cap)
    qk_gain_init: float = 1.5  # number; initial gain of each query head, after the rotation
    xsa_last_n: int = 4  # layers; the last N take the own value out of attention; 0: none
    ln_scale: bool = True  # 0/1; normed branch inputs of layer i times 1/sqrt(i + 1)
    bigram_vocab_size: int = 2048  # rows; of the table of hashed token pairs; 0: none
    bigram_dim: Count = 128  # channels; of that table
    ve_enabled: bool = True  # 0/1; a token embedding is added to the values
    ve_dim: Count = 128  # channels; of that embedding
    ve_layers: str = "9,10"  # layers; that use it, counted from 0
    gated_attention: bool = False  # 0/1; a sigmoid gate a head
    value_residual: bool = False  # 0/1; layer 0's values are mixed into the later layers'
    dtg_enabled: bool = False  # 0/1; a gate a token on what a block changes
    # optimizers
    embed_lr: float = 0.6  # rate; AdamW, the three embedding tables of an untied model
    head_lr: float = 0.008  # rate; AdamW without decay, untied head
    tied_embed_lr: float = 0.035  # rate; AdamW, the three embedding tables
    tied_embed_init_std: float = 0.005  # number; initial deviation of the tied embedding
    matrix_lr: float = 0.025  # rate; Muon, the banks
    scalar_lr: float = 0.025  # rate; AdamW, vectors, scalars and the two small projections
    muon_momentum: float = 0.99  # number; Muon, after its warm-up
    muon_backend_steps: Count = 5  # iterations; Newton-Schulz
    muon_momentum_warmup_start: float = 0.92  # number; Muon, at step 0
    muon_momentum_warmup_steps: int = 1500  # steps; linear ramp between the two
    muon_wd: float = 0.04  # rate; decoupled decay of the banks
    adam_wd: float = 0.04  # rate; decoupled decay of what AdamW trains, the head excepted
    beta1: float = 0.9  # number; Adam
    beta2: float = 0.95  # number; Adam
    adam_eps: float = 1e-8  # number; Adam
    grad_clip_norm: float = 0.3  # number; largest norm of a rank's own gradient; 0: off
    # averages and quantization
    ema_enabled: bool = True  # 0/1; the exponential mean of the weights is exported
    ema_decay: float = 0.997  # share; of that mean
    swa_enabled: bool = False  # 0/1; the mean of late snapshots is exported; of the EMA, if any
    swa_every: Count = 50  # steps; between them, below 0.2 of the learning rate
    lawa_enabled: bool = False  # 0/1; the mean of the last LAWA_K is exported, before SWA and EMA
    lawa_k: Count = 10  # snapshots; that are kept
    lawa_freq: Count = 100  # steps; between them
    qat_enabled: bool = False  # 0/1; the banks are trained through their six-bit values
    late_qat: bool = False  # 0/1; the same, from LATE_QAT_THRESHOLD on
    late_qat_threshold: float = 0.15  # share; of the learning rate, below which LATE_QAT begins
    control_tensor_name_patterns: str = CONTROLS  # names; large tensors stored in float32
    # evaluation
    eval_stride: int = 64  # tokens; between windows; 0: none slide; not 64: a second pass at 64
    ttt_enabled: bool = False  # 0/1; score-first test-time training, last
    ttt_lr: float = 0.002  # rate; SGD, at the first chunk; a half cosine to 0 at the last
    ttt_epochs: int = 3  # epochs; over each chunk
    ttt_momentum: float = 0.9  # share; SGD
    ttt_grad_clip: float = 1.0  # number; largest norm of the reduced gradient; 0: off
    ttt_chunk_tokens: Count = 32768  # tokens; scored, then trained on
    ttt_batch_seqs: Count = 32  # sequences; a rank and step
    ttt_freeze_blocks: int = 2  # blocks; whose vectors stay as they are; the banks always learn
    # overlap
    train_prefetch: bool = True  # 0/1; a thread reads the next batches ahead
    train_prefetch_queue: Count = 2  # batches; kept ready on the host
    train_copy_stream: bool = True  # 0/1; uploads run on a CUDA stream of their own
    val_prefetch: bool = True  # 0/1; as TRAIN_PREFETCH, in all evaluation
    val_prefetch_queue: Count = 2  # batches; as TRAIN_PREFETCH_QUEUE, in all evaluation
    val_copy_stream: bool = True  # 0/1; as TRAIN_COPY_STREAM, in all evaluation
    gpu_prefetch: Count = 2  # batches; in flight on the device; 2: double buffering, 1: on demand
    data_stall_seconds: float = 60.0  # seconds; a read that takes longer ends the run
    # device
    device: Literal["auto", "cuda", "cpu"] = "auto"  # device; auto: cuda where there is one
    torch_compile: Literal["auto", "0", "1"] = "auto"  # mode; auto: on with CUDA
    attention_backend: Literal["auto", "fa3", "cudnn", "flash", "math"] = "auto"  # name; fastest
    grad_accum_steps: int = 0  # micro-steps; of a step; 0: max(1, 8 / ranks); more save memory

    def micro_steps(self, world_size):  # SPANS_PER_STEP: 8, see DATA
        return self.grad_accum_steps or max(1, SPANS_PER_STEP // world_size)

    def for_evaluation(self):
        return replace(self, train_seq_len=self.eval_seq_len or self.train_seq_len)

    def value_embedding_layers(self):
        return [int(layer) for layer in self.ve_layers.split(",")] if self.ve_enabled else []


SETTINGS = {name.upper(): kind for name, kind in Config.__annotations__.items()}


def read_config(env):
    """(Config, faults): a fault for every wrong value and every misspelt name."""
    faults, values = [], {"run_id": str(uuid.uuid4())}
    for name in filter(env.get, SETTINGS):  # an empty value is none
        kind, text = SETTINGS[name], env[name]
        words = {"0": False, "1": True} if kind is bool else {word: word for word in get_args(kind)}
        try:
            value = words[text] if words else getattr(kind, "__supertype__", kind)(text)
            if kind in LEAST and not LEAST[kind] <= value < 2**63:
                raise ValueError
            values[name.lower()] = value
        except (KeyError, ValueError):
            number = "a number" if kind is float else f"a whole number from {LEAST.get(kind)} on"
            wanted = " or ".join(words) or number
            faults.append(f"{name}={text}: set {wanted}, see --help")
    not_meant = {"MODEL_DIR", "NUM_THREADS"}  # common names, a letter or two from ours
    for name in sorted(env.keys() - SETTINGS.keys() - not_meant):
        near = difflib.get_close_matches(name.upper(), SETTINGS, n=1, cutoff=0.85)
        if near:
            faults.append(f"{name}={env[name]}: no such setting: did you mean {near[0]}?")
    return Config(**values), faults


def find_faults(config, world_size, env):
    """All that is wrong with the settings and what they name: a line each, with the remedy."""
    checks = [*shape_checks(config, world_size), *recipe_checks(config)]
    checks += device_checks(config, env)
    faults = [f"{name.upper()}={getattr(config, name)}: {fix}" for bad, name, fix in checks if bad]
    for part in ("tokenizer", "train", "val"):
        try:
            check_part(config, part)
        except RunError as error:
            faults.append(str(error))
    return faults


def shape_checks(config, world_size):
    """(is it wrong?, setting, remedy) of batches and shapes."""
    batches, heads = world_size * config.micro_steps(world_size), config.num_heads
    longest = max(config.train_seq_len, config.eval_seq_len)
    rows, unit = batches * longest, math.lcm(8, batches) * config.train_seq_len
    uneven = 8 % batches and batches % 8  # so many micro-batches are neither parts of 8 nor n x 8
    fit = 8 // math.gcd(8, world_size)
    named = re.fullmatch(r"[\w.-]*\w[\w.-]*", config.run_id)
    return [
        (not named, "run_id", "it names files: set letters, digits, '.', '_', '-'"),
        (config.model_dim % (2 * heads), "model_dim", f"set a multiple of {2 * heads}"),
        (heads % config.num_kv_heads, "num_kv_heads", f"set a divisor of {heads}"),
        (config.vocab_size > 65536, "vocab_size", "shards hold uint16: set at most 65536"),
        (uneven, "grad_accum_steps", f"x {world_size} ranks divide 8 or are n x 8: set {fit}"),
        (config.train_batch_tokens % unit, "train_batch_tokens", f"set a multiple of {unit}"),
        (config.val_batch_size < rows, "val_batch_size", f"set at least {rows}"),
    ]


def recipe_checks(config):
    """(is it wrong?, setting, remedy) of what only this recipe has."""
    seq_len, stride, last = config.train_seq_len, config.eval_stride, config.num_layers - 1
    head_dim = config.model_dim // config.num_heads
    odd = config.rope_dims % 2 or config.rope_dims > head_dim
    listed = re.fullmatch(r"\d+(,\d+)*", config.ve_layers)
    beyond = listed and max(config.value_embedding_layers(), default=0) > last
    uneven = config.ttt_enabled and (stride == 0 or seq_len % stride)
    broken = config.ttt_enabled and config.ttt_chunk_tokens % seq_len
    checks = [
        (odd, "rope_dims", f"set an even number up to {head_dim}"),
        (config.bigram_vocab_size == 1, "bigram_vocab_size", "set 0 or 2"),
        (not listed, "ve_layers", "set layers, as 9,10"),
        (beyond, "ve_layers", f"the last layer is {last}: set {last}, or VE_ENABLED=0"),
        (uneven, "eval_stride", f"TTT: set a divisor of TRAIN_SEQ_LEN={seq_len}"),
        (broken, "ttt_chunk_tokens", f"set a multiple of TRAIN_SEQ_LEN={seq_len}"),
    ]
    shares = "beta1 beta2 muon_momentum muon_momentum_warmup_start ema_decay ttt_momentum"
    for name in shares.split():
        checks.append((not 0 <= getattr(config, name) < 1, name, "set 0 or more, below 1"))
    for name in ("rope_base", "logit_softcap", "adam_eps", "data_stall_seconds", "mlp_mult"):
        checks.append((getattr(config, name) <= 0, name, "set more than 0"))
    return checks


def device_checks(config, env):
    """(is it wrong?, setting, remedy) of the machine."""
    cuda = config.device != "cpu" and torch.cuda.is_available()
    wanted = config.device == "cuda" or config.device == "auto" and Path("/dev/nvidiactl").exists()
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    crowd = cuda and int(env.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()
    return [
        (
            wanted and not cuda,
            "device",
            f"no GPU for {build}: install a torch that fits the driver, or set cpu",
        ),
        (crowd, "device", "fewer than processes: see --nproc_per_node"),
    ]


def check_part(config, part):
    """RunError if a part of the data cannot be used."""
    if part == "tokenizer":
        ByteTable.of(config)
        return
    shards = Shards(config, part)
    longest = max(config.train_seq_len, config.eval_seq_len)
    tokens = min(shards.ends[-1], config.val_tokens or 2**63)
    if part == "val" and tokens <= longest:
        raise RunError(f"VAL_TOKENS={config.val_tokens}: too few for a row of {longest}: set 0")


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
    """All ranks end after the same step: (a signal's number, or what is wrong)."""


def nothing():
    """What is waited for where there is nothing to wait for."""


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
        self.micro_steps, self.signum = config.micro_steps(self.world_size), 0
        self.cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{env.get('LOCAL_RANK', 0)}" if self.cuda else "cpu")
        native = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        self.dtype = torch.bfloat16 if native else torch.float32  # of the activations
        # The host looks at a step's results so many steps later: then it need not wait for them.
        self.steps_late = 2 if self.cuda else 0

    def start(self, env):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.hear)
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
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

    def synchronize(self):
        """Synchronisation point: returns when the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def all_reduce(self, tensor):
        """Sums over the ranks, in place. Queued on CUDA; with gloo a synchronisation point."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def begin(self, collective, received, sent):
        """Begins a collective; the function that waits for it: on CUDA only its stream does.

        On one rank it is a copy.
        """
        if not dist.is_initialized():
            received.copy_(sent)
            return nothing
        return collective(received, sent, async_op=True).wait

    def broadcast(self, value):
        """Rank 0's value, on every rank. Synchronisation point: at a run's ends, for a log line."""
        box = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(box, device=self.device)
        return box[0]


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id, enabled=True):
        self.path, self.enabled = Path("logs", f"{run_id}.txt"), enabled
        when = time.strftime("%Y%m%d-%H%M%S")
        for path in (self.path, self.path.with_suffix(".jsonl")):
            if enabled and path.exists():  # an older run keeps what is its own
                path.rename(path.with_name(f"{path.stem}.{when}{path.suffix}"))

    def console(self, text):
        if self.enabled:
            tell(text)

    def line(self, text, event=None):
        """For people. As an event it is for tools, too: train_time:9ms is "train_time_ms": 9."""
        self.console(text)
        self.write(".txt", text)
        if event:
            # A number with its unit, of step:9/60 the 9; a checksum is no number.
            number = r"(?<!crc:)(-?[\d.]+(?:e[-+]?\d+)?|nan|inf)(ms|s|%|)(?=[\s/]|$)"
            values, suffixes = {}, {"": "", "ms": "_ms", "s": "_s", "%": "_percent"}
            for name, value, unit, word in re.findall(rf"(\w+):(?:{number}|(\S+))", text):
                suffix = suffixes[unit]
                values[name.removesuffix(suffix) + suffix] = word or float(value)
            self.event(event, **values)

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


def write_atomic(path, data):
    """The file appears whole, or not at all and an older one stays. Returns what went wrong."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
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


def read_json(path):
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


# === DATA: from shards to batches, ahead of time ===
#  shard files --readinto--> host slot --copy--> device slot --widen--> x, y --> the model
#               reader thread (pinned uint16) copy stream (uint16)  compute stream (int64)
# Training, validation and windows, overlap on and off are settings of one Pipeline. On a CPU the
# reader widens, too, and the model works on the host slot.
#
# The order is the challenge's, made for 8 ranks. A step's tokens are 8 spans, one behind the other.
# In a span x is all but the last token and y all but the first, so its rows share one token more
# than they have. With rows of 4 tokens and spans of 2 rows, a span takes 9 tokens:
#    row 0: tokens 0-4   row 1: tokens 4-8   |   row 2: tokens 9-13   row 3: tokens 13-17   | ...
SPANS_PER_STEP = 8
HEADER_BYTES = 1024  # of a shard: 256 int32: magic number, version, number of tokens; then uint16
GET_DATA = "run `python3 data/quickstart.py`, or data/cached_challenge_fineweb.py"


class Shards:
    """A split's shards in the order of their names, as one endless stream of tokens."""

    def __init__(self, config, split):
        self.folder = Path(config.data_path).resolve()
        self.stall_seconds, self.vocab_size = config.data_stall_seconds, config.vocab_size
        self.paths, self.ends, self.promised = [], [0], 0  # ends[i]: tokens in the first i shards
        with suppress(AttributeError, TypeError, ValueError):  # a manifest of another kind
            for entry in read_json(self.folder / "../../manifest.json").get("datasets", []):
                if entry.get("name") == self.folder.name:
                    self.promised = int(entry.get("stats", {}).get(f"files_{split}", 0))
        for path in sorted(self.folder.glob(f"fineweb_{split}_*.bin")):
            self.add(path)
        wanted = max(1, self.promised) if split == "val" else 1
        if len(self.paths) < wanted:
            files = f"{len(self.paths)} of {wanted} or more fineweb_{split}_*.bin"
            raise RunError(f"DATA_PATH={config.data_path}: {files}: {GET_DATA}")

    def add(self, path):
        try:
            size = path.stat().st_size if path.is_file() else 0  # a pipe would be waited for
            magic, version, tokens = np.fromfile(path, "<i4", 3).tolist() if size else (0, 0, 0)
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: no shard: {first_line(error)}: move it away") from error
        if (magic, version, size) != (20240520, 1, HEADER_BYTES + 2 * tokens) or tokens < 1:
            begins = f"{magic}, {version}, {tokens} tokens in {size} bytes"
            raise RunError(f"{path}: no whole shard ({begins}): fetch it anew, or move it away")
        self.paths.append(path)
        self.ends.append(self.ends[-1] + tokens)

    def pieces(self, first, count):
        """Where the `count` tokens from `first` on are: (path, byte offset, bytes), ..."""
        while count:
            position = first % self.ends[-1]
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

    @classmethod
    def train(cls, config, runtime):
        """In micro-step m, rank r has part m * ranks + r of the step's rows."""
        seq_len, rank, ranks = config.train_seq_len, runtime.rank, runtime.world_size
        step_rows = config.train_batch_tokens // seq_len
        rows, span_rows = step_rows // (ranks * runtime.micro_steps), step_rows // SPANS_PER_STEP
        return cls(seq_len, span_rows, rank * rows, ranks * rows, rows, sys.maxsize)

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
        first = self.first_row + k * self.stride
        return range(first, min(first + self.batch_rows, self.end_row))

    def first_token(self, row):
        return row * self.seq_len + row // self.span_rows  # each span before it has one token more

    def tokens(self, rows):
        """(first token, tokens, spans) of consecutive rows: a part of a span, or some whole ones"""
        spans = max(1, len(rows) // self.span_rows)
        return self.first_token(rows.start), len(rows) * self.seq_len + spans, spans

    @property
    def most_tokens(self):
        """Of a batch: a slot has room for so many."""
        return self.tokens(range(self.batch_rows))[1]

    def widen(self, rows, tokens, x, y):
        """uint16 tokens of some rows -> int64 x and y (B, T), in numpy or torch."""
        filled, (_, count, spans) = len(rows), self.tokens(rows)
        by_span = tokens[:count].reshape(spans, -1)
        x[:filled].reshape(spans, -1)[:] = by_span[:, :-1]
        y[:filled].reshape(spans, -1)[:] = by_span[:, 1:]
        x[filled:], y[filled:] = 0, -100  # no targets; another shape would be compiled anew


def data_crc(plan, rows, tokens):
    """A checksum of rows and their numbers, whose sum over batches is equal for any ranks."""
    data, first, T = memoryview(tokens), plan.first_token(rows.start), plan.seq_len
    starts = {row: plan.first_token(row) - first for row in rows}
    return sum(zlib.crc32(data[i : i + T + 1], row) for row, i in starts.items()) & 0xFFFFFFFF


class Slot:
    """Room for one batch, made once: uint16 tokens as read, and int64 x and y made of them."""

    def __init__(self, plan, device, pinned=False):
        size = plan.most_tokens
        self.tokens = torch.empty(size, dtype=torch.uint16, device=device, pin_memory=pinned)
        self.x = torch.zeros(plan.batch_rows, plan.seq_len, dtype=torch.int64, device=device)
        self.y = torch.zeros_like(self.x)
        self.rows, self.digest = range(0), 0  # digest: data_crc, or the bytes the tokens stand for
        self.copied = self.widened = None  # events: its upload is over; its tokens have been read


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
        no_stream = "" if cuda else "(no_cuda)"
        queue = getattr(config, f"{split}_prefetch_queue") if prefetch else 0
        copy_stream = stream and cuda
        slots = (config.gpu_prefetch if queue else 1) if cuda else 0
        words = f"overlap:{queue > 0 or copy_stream} " if split == "val" else ""
        words += f"prefetch:{queue > 0} "
        words += f"copy_stream:{copy_stream}{no_stream if stream else ''} "
        words += f"prefetch_queue:{queue} gpu_prefetch:{slots}"
        return cls(queue, copy_stream, slots, words)


class Pipeline:
    """Iterates over this rank's batches of a split: slots with x, y (B, T), rows and digest.

    A batch is valid until the next one is asked for; a signal ends the iteration. The reader's
    thread fills the host slots that it is given: `queue` of them at the start, and one with each
    batch that is taken from it. So with a queue of 0 nothing is read ahead.
    """

    def __init__(self, shards, plan, overlap, runtime, digest=data_crc):
        self.shards, self.plan, self.runtime, self.digest = shards, plan, runtime, digest
        self.to_fill, self.filled = queue.SimpleQueue(), queue.SimpleQueue()  # host slots, in order
        for _ in range(overlap.queue):
            self.to_fill.put(Slot(plan, "cpu", runtime.cuda))
        self.in_use = Slot(plan, "cpu", runtime.cuda)  # of the batch that was taken last
        self.ring = DeviceRing(plan, overlap, runtime.device) if runtime.cuda else None
        self.num_done, self.bytes_read = 0, 0
        self.waits_ms = []  # for input, a batch: of the device, or without one of the host
        self.closed, self.error = threading.Event(), None  # what ends the reader; what ended it
        self.reading = "", math.inf  # where it reads, since when
        self.thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self.thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_done == self.plan.num_batches or self.runtime.signum:
            raise StopIteration
        self.num_done += 1
        if not self.ring:
            self._take()
            return self.in_use
        asked = self.ring.compute.record_event(torch.cuda.Event(enable_timing=True))
        if not self.ring.uploaded:
            self._take()
        batch = self.ring.hand_out(asked)
        # What has been read already goes up at once; this batch does not wait for a later one.
        # The last free slot is that of this batch.
        while len(self.ring.free) > 1 and not self.filled.empty():
            self._take()
        self.waits_ms += self.ring.settled_waits()
        return batch

    def _take(self):
        """Takes the next slot from the reader and gives back the last. On CUDA it goes up."""
        self.to_fill.put(self.in_use)
        start, limit = time.perf_counter(), self.shards.stall_seconds
        while True:
            with suppress(queue.Empty):
                self.in_use = self.filled.get(timeout=0.2)
                break
            who, (where, since) = f"rank {self.runtime.rank}: the reader", self.reading
            if self.runtime.signum or self.closed.is_set():
                raise StopIteration
            if self.error and self.filled.empty():  # good batches come first
                told = isinstance(self.error, RunError) or not where
                place = "" if told else f"{where}: "
                raise RunError(f"{who}: {place}{first_line(self.error)}") from self.error
            if time.monotonic() - since > limit:
                raise RunError(f"{who} waits for {where} over DATA_STALL_SECONDS={limit:g}")
        if self.ring:
            self.ring.upload(self.in_use)
        else:
            self.waits_ms.append(1e3 * (time.perf_counter() - start))

    def close(self):
        """Ends the reader, from any state within a second; a stuck one is left behind."""
        self.closed.set()
        self.to_fill.put(None)  # wakes it
        self.thread.join(0.5)
        if self.ring:
            self.ring.copy.synchronize()  # synchronisation point: no upload outlives its slots
            self.waits_ms += self.ring.settled_waits()

    # From here on: the reader's thread
    def _read_all(self):
        try:
            if self.runtime.cuda:
                torch.cuda.set_device(self.runtime.device)
            for k in range(self.plan.num_batches):
                slot, rows = self.to_fill.get(), self.plan.rows(k)
                if self.closed.is_set():
                    return
                if slot.copied:
                    slot.copied.synchronize()  # synchronisation point, of this thread only
                self._fill(slot, rows)
                self.filled.put(slot)
        except BaseException as error:  # whatever it is, or the main thread would wait for ever
            self.error = error

    def _fill(self, slot, rows):
        first, count, _ = self.plan.tokens(rows)
        tokens, ids = slot.tokens.numpy()[:count], self.shards.vocab_size
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
        if not self.ring:
            self.plan.widen(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * count


class DeviceRing:
    """Slots on the device, used in turn: the next batches upload while one is at work.

    A stream is a queue of work that runs on its own; only events order two. Who writes to a slot
    waits for who read it, and who reads it waits for who wrote it:
      `copied`, on the copy stream: then the compute stream may widen the tokens, and the reader
      may fill the host slot that they came from.
      `widened`, on the compute stream: then the copy stream may overwrite the tokens.
    x and y need no event: they are written and read on the compute stream alone, in its order.
    Each use has a new event. A wait for one that was never recorded, or long ago, would not wait.
    """

    def __init__(self, plan, overlap, device):
        self.plan, self.compute = plan, torch.cuda.current_stream(device)
        self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
        self.free = deque(Slot(plan, device) for _ in range(overlap.device_slots))
        for slot in self.free:
            slot.widened = self.compute.record_event()  # what used its memory before is over then
        self.uploaded = deque()  # slots; their copies may still be at work
        self.waits = deque()  # (asked, there): events around the compute stream's waits

    def upload(self, host):
        """Queues the copy of a host slot; waits for nothing."""
        slot = self.free.popleft()
        with torch.cuda.stream(self.copy):
            self.copy.wait_event(slot.widened)
            slot.tokens.copy_(host.tokens, non_blocking=True)
            slot.copied = host.copied = self.copy.record_event(torch.cuda.Event(blocking=True))
        slot.rows, slot.digest = host.rows, host.digest
        self.uploaded.append(slot)

    def hand_out(self, asked):
        """The batch that was uploaded first. The compute stream waits for it, the host does not."""
        slot = self.uploaded.popleft()
        self.compute.wait_event(slot.copied)
        there = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        self.waits.append((asked, there))
        self.plan.widen(slot.rows, slot.tokens, slot.x, slot.y)
        slot.widened = self.compute.record_event()
        self.free.append(slot)  # for the next tokens; x and y stay until it is handed out again
        return slot

    def settled_waits(self):
        """How long the device has waited for batches, in ms, as far as it has come."""
        while self.waits and self.waits[0][1].query():
            asked, there = self.waits.popleft()
            yield asked.elapsed_time(there)


# === MODEL: B sequences, T tokens, D channels ===
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

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Gate(nn.Linear):
    """The sigmoid of a linear map; at the start, of its bias."""

    def __init__(self, inputs, outputs, bias):
        super().__init__(inputs, outputs)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, bias)

    def forward(self, x):
        return torch.sigmoid(F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))


class Lookup(nn.Module):
    """A narrow embedding table, a projection to `outputs` channels, and a scale."""

    def __init__(self, rows, width, outputs, std, scale):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.proj = Linear(width, outputs)
        self.scale = nn.Parameter(torch.tensor(scale))
        nn.init.normal_(self.embed.weight, std=std)
        nn.init.orthogonal_(self.proj.weight)

    def forward(self, ids):
        x = self.proj(self.embed(ids))
        return x * self.scale.to(x.dtype)


def bigram_ids(ids, rows):
    """A hash of each token (B, T) and the one before it; the first of a row has an id of its own.

    In int32, where the products may overflow: that is part of the hash.
    """
    ids = ids.int()
    hashed = (36313 * ids[:, 1:] ^ 27191 * ids[:, :-1]) % (rows - 1)
    return F.pad(hashed, (1, 0), value=rows - 1)


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, T, heads, channels)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


def without_own_value(y, v):
    """XSA: y (B, T, heads, channels) less its part along the own value; in float32.

    v (B, T, KV heads, channels): neighbouring query heads share a KV head.
    """
    own = F.normalize(v.float(), dim=-1).unsqueeze(3)
    grouped = y.float().unflatten(2, (v.size(2), -1))
    along = (grouped * own).sum(-1, keepdim=True)
    return (grouped - along * own).flatten(2, 3).to(y.dtype)


class Matrices(NamedTuple):
    """One layer's slices of the banks, in the dtype of the activations."""

    q: Any
    k: Any
    v: Any
    out: Any
    up: Any
    down: Any


class Attention(nn.Module):
    """Causal, grouped queries, rms norm on queries and keys, a gain a query head.

    Its matrices lie in the model's banks.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.head_dim = config.model_dim // config.num_heads
        self.xsa = layer >= config.num_layers - config.xsa_last_n
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        self.attn_gate = self.vr_lambda = None
        if config.gated_attention:
            self.attn_gate = Gate(config.model_dim, config.num_heads, 4.0)
        if config.value_residual and layer > 0:
            self.vr_lambda = nn.Parameter(torch.full((2,), 0.5))

    def heads(self, x, matrix):
        return F.linear(x, matrix).unflatten(-1, (-1, self.head_dim))  # (B, T, heads, head_dim)

    def rotated(self, x, rotary):
        """Normed, and the first channels of each head rotated."""
        x, width = rms_norm(x), 2 * rotary[0].size(-1)
        cos, sin = (part.to(x.dtype) for part in rotary)
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)

    def forward(self, x, matrices, rotary, value_embedding, first_v):
        """x (B, T, D); first_v: layer 0's values. Returns its own values, too."""
        q, k = self.heads(x, matrices.q), self.heads(x, matrices.k)
        v = (F.linear(x, matrices.v) + value_embedding).unflatten(-1, (-1, self.head_dim))
        if self.vr_lambda is not None:
            mix = self.vr_lambda.to(v.dtype)
            v = mix[0] * first_v + mix[1] * v
        q = self.rotated(q, rotary) * self.q_gain.to(q.dtype)[:, None]
        k = self.rotated(k, rotary)
        grouped = q.size(2) != k.size(2)
        by_head = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=grouped)
        y = y.transpose(1, 2)
        if self.xsa:
            y = without_own_value(y, v)
        if self.attn_gate:
            y = y * self.attn_gate(x).unsqueeze(-1)
        return F.linear(y.flatten(2), matrices.out), v


class Block(nn.Module):
    """Mixes the embedding x0 back in, then adds attention and MLP, each scaled by channel.

    The MLP is down(leaky_relu(up x)^2), of slope 0.5: a negative side keeps a quarter.
    """

    def __init__(self, config, layer):
        super().__init__()
        ones, self.fused_form = torch.ones(config.model_dim), config.mlp_fused_form
        self.branch_scale = (layer + 1) ** -0.5 if config.ln_scale else 1.0
        self.attn = Attention(config, layer)
        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
        self.dtg_gate = Gate(config.model_dim, 1, 2.0) if config.dtg_enabled else None

    def forward(self, x, x0, matrices, rotary, value_embedding, first_v):
        mix = self.resid_mix.to(x.dtype)
        start = mix[0] * x + mix[1] * x0
        branch = self.branch_scale * rms_norm(start)
        y, v = self.attn(branch, matrices, rotary, value_embedding, first_v)
        x = start + self.attn_scale.to(x.dtype) * y
        hidden = F.linear(self.branch_scale * rms_norm(x), matrices.up)
        hidden = F.leaky_relu(hidden, 0.5)
        # One value, rounded once: a product, or, as with autocast, a square in float32.
        hidden = hidden * hidden if self.fused_form else hidden.float().square().to(x.dtype)
        x = x + self.mlp_scale.to(x.dtype) * F.linear(hidden, matrices.down)
        if self.dtg_gate:
            x = start + self.dtg_gate(start.detach()) * (x - start)
        return x, v


def orthogonal(count, rows, columns):
    """(count, rows, columns), each slice orthogonal."""
    return torch.stack([nn.init.orthogonal_(torch.empty(rows, columns)) for _ in range(count)])


BANKS = "qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank"


def is_table(name):
    """An embedding table: trained in the dtype of the activations."""
    return name.endswith(("tok_emb.weight", ".embed.weight"))


class GPT(nn.Module):
    """A U-net of blocks. All layers' matrices lie in four banks (slices, rows, columns).

    The first half of the blocks push their outputs, the others add them back, last one first.
    Banks are float32, cast to `dtype` at use; embedding tables are in `dtype`.
    """

    def __init__(self, config, dtype):
        super().__init__()
        layers, D, tokens = config.num_layers, config.model_dim, config.vocab_size
        kv_dim = D // config.num_heads * config.num_kv_heads
        hidden_dim = int(config.mlp_mult * D)
        self.config, self.dtype = config, dtype
        self.ve_layers = config.value_embedding_layers()
        self.tok_emb = nn.Embedding(tokens, D)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        self.bigram = ve_shared = None
        if config.bigram_vocab_size:
            rows = config.bigram_vocab_size
            self.bigram = Lookup(rows, config.bigram_dim, D, std=0.0, scale=0.05)
        if self.ve_layers:
            ve_shared = Lookup(tokens, config.ve_dim, kv_dim, std=0.01, scale=0.1)
        # The order of attributes from here on is that of the artifact's tensors: the published one.
        self.smear = nn.ParameterDict({"gate": torch.zeros(D)})
        self.skip_weights = nn.Parameter(torch.ones(layers // 2, D))
        # The banks. A layer's slices: query i, output layers + i; key i, value layers + i; up i;
        # down i. Outputs and down-projections start at zero.
        outputs = torch.zeros(layers, D, D)
        self.qo_bank = nn.Parameter(torch.cat((orthogonal(layers, D, D), outputs)))
        self.kv_bank = nn.Parameter(orthogonal(2 * layers, kv_dim, D))
        self.mlp_up_bank = nn.Parameter(orthogonal(layers, hidden_dim, D))
        self.mlp_down_bank = nn.Parameter(torch.zeros(layers, D, hidden_dim))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(layers))
        self.ve_shared = ve_shared
        scales = (nn.Parameter(torch.ones(1)) for _ in self.ve_layers)
        self.ve_layer_scales = nn.ParameterList(scales)
        self.lm_head = None if config.tie_embeddings else Linear(D, tokens, zero=True)
        trained = config.qat_enabled or config.late_qat
        switch = torch.tensor(float(config.qat_enabled)) if trained else None
        # 0 or 1: to switch on a tensor costs no recompilation
        self.register_buffer("qat", switch, persistent=False)
        for name, p in self.named_parameters():  # all begin as values of `dtype`
            p.data = p.data.to(dtype) if is_table(name) else p.data.to(dtype).float()

    def banks(self):
        return [getattr(self, name) for name in BANKS]

    def matrices(self):
        """Each layer's, from the banks.

        A bank is unbound as a whole, so that backward writes its gradient once.
        """
        qo, kv, up, down = (self.trained(bank).to(self.dtype).unbind() for bank in self.banks())
        outputs, values = qo[len(up) :], kv[len(up) :]
        return [Matrices(*layer) for layer in zip(qo, kv, values, outputs, up, down, strict=False)]

    def trained(self, bank):
        """QAT, where something learns: the values of the export, the gradient of the bank."""
        if self.qat is None or not torch.is_grad_enabled():
            return bank
        raw = bank.detach()
        scale = int6_scale(raw.abs().amax(-1, keepdim=True)).float()
        return bank + self.qat * ((raw / scale).round() * scale - raw)

    def rotary(self, T, device):
        """cos and sin (T, 1, ROPE_DIMS / 2), float32; the base is stretched beyond 1024 tokens."""
        dims = self.config.rope_dims or self.config.model_dim // self.config.num_heads
        stretch = max(1.0, T / 1024) ** (dims / max(dims - 2, 1))
        exponents = -(torch.arange(0, dims, 2, device=device) / dims)
        frequencies = (self.config.rope_base * stretch) ** exponents
        angles = torch.arange(T, device=device)[:, None, None] * frequencies
        return angles.cos(), angles.sin()

    def embedded(self, ids):
        """Tokens (B, T) -> (B, T, D): with hashed pairs, and each mixed with the one before it."""
        x = self.tok_emb(ids)
        if self.bigram:
            x = x + self.bigram(bigram_ids(ids, self.config.bigram_vocab_size))
        x = rms_norm(x)
        gate = torch.sigmoid(self.smear["gate"].to(x.dtype))
        return (1 - gate) * x + gate * F.pad(x, (0, 0, 1, -1))

    def logits(self, ids):
        """Tokens (B, T) -> (B * T, vocabulary), float32."""
        x = x0 = self.embedded(ids)
        rotary = self.rotary(ids.size(1), ids.device)
        shared = self.ve_shared(ids) if self.ve_shared else None
        skips, half, first_v = [], len(self.skip_weights), None
        for i, (block, matrices) in enumerate(zip(self.blocks, self.matrices(), strict=True)):
            if i >= half and skips:
                x = x + self.skip_weights[i - half].to(x.dtype) * skips.pop()
            value_embedding = 0
            if i in self.ve_layers:
                scale = self.ve_layer_scales[self.ve_layers.index(i)]
                value_embedding = scale.to(x.dtype) * shared
            x, v = block(x, x0, matrices, rotary, value_embedding, first_v)
            if i == 0:
                first_v = v
            if i < half:
                skips.append(x)
        head, cap = self.lm_head or self.tok_emb, self.config.logit_softcap
        logits = F.linear(rms_norm(x), head.weight.to(self.dtype))
        return (cap * torch.tanh(logits / cap)).float().flatten(0, 1)

    def nats(self, x, y):
        """Of predicting each y from x, both (B, T); 0 where y = -100."""
        return F.cross_entropy(self.logits(x), y.flatten(), reduction="none").view(y.shape)

    def forward(self, x, y):
        """The mean loss in nats of predicting y from x, both (B, T); y = -100 is no target."""
        return F.cross_entropy(self.logits(x), y.flatten())


def attention_backends(config, runtime, log):
    """SDPA's backends that work here, {backend: name}, the fastest first: it takes one that can."""
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
        except Exception as error:  # whatever a library raises that is missing or does not fit
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
        result = compiled(*arguments)
        if result.requires_grad:
            result.backward()
        return compiled
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler's many kinds
        log.line(f"warning: torch.compile does not work here, so eager: {first_line(error)}")
        return function


# === OPTIMIZERS: Parallel Muon on the banks, AdamW on all else ===
# Gradients are of loss / ranks, so that sums over the ranks are means.
# reduce_scatter_single is the name from torch 2.13 on.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def newton_schulz(x, iterations):
    """(n, rows, cols) -> about the nearest semi-orthogonal matrices, in x's dtype.

    It does not converge: singular values end between about 0.7 and 1.2, which serves as well and
    takes fewer iterations (https://kellerjordan.github.io/posts/muon/).
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # (n, short side, short side)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class BankShard:
    """A bank for Muon: its slices are shared out to the ranks, after padding with zero slices.

    What travels, and this rank's momentum, are bfloat16 on CUDA; the bank is float32.
    """

    def __init__(self, bank, config, runtime):
        self.bank, self.config, self.runtime = bank, config, runtime
        share = math.ceil(len(bank) / runtime.world_size)
        dtype = torch.bfloat16 if runtime.cuda else torch.float32
        shape = share * runtime.world_size, *bank.shape[1:]
        self.padded = bank.new_zeros(shape, dtype=dtype)  # this rank's gradient of all slices
        self.updates = torch.zeros_like(self.padded)
        self.grad = torch.zeros_like(self.padded[:share])  # the ranks' sum of this rank's slices
        self.average = torch.zeros_like(self.grad)
        bank.grad = torch.zeros_like(bank)
        self.wait = nothing  # for the collective that was begun last

    def scatter(self):
        """Begins the reduce-scatter: this rank's slices of the summed gradient."""
        self.padded[: len(self.bank)] = self.bank.grad
        self.wait = self.runtime.begin(REDUCE_SCATTER, self.grad, self.padded)

    def orthogonalize(self, momentum):
        """This rank's slices of the update; begins the all-gather: all slices."""
        self.wait()
        self.average.mul_(momentum).add_(self.grad)
        nesterov = self.grad.add(self.average, alpha=momentum)
        self.sent = newton_schulz(nesterov, self.config.muon_backend_steps).contiguous()
        self.wait = self.runtime.begin(ALL_GATHER, self.updates, self.sent)

    def apply(self, lr):
        """Decays the bank and adds the update, scaled by sqrt(max(1, rows / cols))."""
        self.wait()
        scale = max(1.0, self.bank.size(-2) / self.bank.size(-1)) ** 0.5
        self.bank.mul_(1 - lr * self.config.muon_wd)
        self.bank.add_(self.updates[: len(self.bank)], alpha=-lr * scale)


class ParallelMuon:
    """Nesterov momentum, made orthogonal; every rank does its slices of each bank.

    Collectives run under compute: the reduce-scatters under AdamW and the banks before, a bank's
    all-gather under the next one's Newton-Schulz, because it is awaited behind that.
    """

    def __init__(self, banks, config, runtime):
        largest_first = sorted(banks, key=torch.numel, reverse=True)
        self.shards = [BankShard(bank, config, runtime) for bank in largest_first]

    def begin(self):
        for shard in self.shards:
            shard.scatter()

    def step(self, lr, momentum):
        before = None
        for shard in self.shards:
            shard.orthogonalize(momentum)
            if before:
                before.apply(lr)
            before = shard
        before.apply(lr)


def split_as(vector, params):
    """Views of a vector in the shapes of `params`."""
    parts = vector.split([p.numel() for p in params])
    return [part.view_as(p) for part, p in zip(parts, params, strict=True)]


class Flat:
    """Parameters of one dtype as views of one vector, and their gradients of another.

    `reduced` is the gradients and `extra` elements, which ride on their reduction.
    """

    def __init__(self, params, extra=0):
        self.values = torch.cat([p.detach().flatten() for p in params])
        self.reduced = self.values.new_zeros(len(self.values) + extra)
        self.gradients, self.extra = self.reduced.split([len(self.values), extra])
        views = split_as(self.values, params), split_as(self.gradients, params)
        for p, values, gradients in zip(params, *views, strict=True):
            p.data, p.grad = values, gradients

    def group(self, lr, weight_decay):
        """For AdamW: one parameter, the vector."""
        vector = nn.Parameter(self.values)
        vector.grad = self.gradients
        return {"params": [vector], "lr": lr, "base_lr": lr, "weight_decay": weight_decay}


class Optimizers:
    """Parallel Muon and AdamW; every parameter is in one of them."""

    def __init__(self, model, config, runtime, extra=0):
        self.config, self.runtime = config, runtime
        named = [(name, p) for name, p in model.named_parameters() if name not in BANKS]
        head = [p for name, p in named if name == "lm_head.weight"]
        tables = [p for name, p in named if is_table(name)]
        small = [p for name, p in named if name != "lm_head.weight" and not is_table(name)]
        self.small, self.tables = Flat(small, extra), Flat(tables)
        self.head = Flat(head) if head else None
        table_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
        groups = [self.tables.group(table_lr, config.adam_wd)]
        groups.append(self.small.group(config.scalar_lr, config.adam_wd))
        if self.head:
            groups.append(self.head.group(config.head_lr, 0.0))
        betas = config.beta1, config.beta2
        self.adam = torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, fused=True)
        self.muon = ParallelMuon(model.banks(), config, runtime)
        flats = [flat for flat in (self.small, self.tables, self.head) if flat]
        self.values = [bank.data for bank in model.banks()] + [flat.values for flat in flats]
        self.grads = [bank.grad for bank in model.banks()] + [flat.gradients for flat in flats]

    def zero_grad(self):
        torch._foreach_zero_(self.grads)

    def clip(self):
        """Each rank its own gradient, before the reduction: as published."""
        limit = self.config.grad_clip_norm / self.runtime.world_size
        if limit <= 0:
            return
        norm = torch.stack([grad.float().norm() for grad in self.grads]).norm()
        for grad in self.grads:
            grad.mul_((limit / (norm + 1e-7)).clamp(max=1.0))

    def reduce_tables(self):
        """The small parameters' gradients go with Exchange, the banks' with ParallelMuon."""
        for flat in (self.tables, self.head):
            if flat:
                self.runtime.all_reduce(flat.gradients)

    @torch.no_grad()
    def step(self, lr_scale, momentum):
        self.muon.begin()
        for group in self.adam.param_groups:
            group["lr"] = group["base_lr"] * lr_scale
        self.adam.step()
        self.muon.step(self.config.matrix_lr * lr_scale, momentum)

    def snapshot(self):
        return [values.clone() for values in self.values]

    def restore(self, snapshot):
        """Back to the weights of `snapshot`, as if no step had been taken."""
        torch._foreach_copy_(self.values, snapshot)
        torch._foreach_zero_([shard.average for shard in self.muon.shards])
        self.adam.state.clear()


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


# === AVERAGES: of the weights over the run; one of them is exported ===
class Averages:
    """In float32. LAWA's, else SWA's (of the EMA, if there is one), else the EMA is the result."""

    def __init__(self, config, values, log):
        self.config, self.values, self.log = config, values, log
        self.ema = self.copies(values) if config.ema_enabled else []
        self.swa, self.swa_count = [], 0
        self.lawa = deque(maxlen=config.lawa_k)

    @staticmethod
    def copies(tensors):
        return [t.float().clone() for t in tensors]

    def update(self, step, lr_scale):
        """After each step; `lr_scale` was the step's."""
        config = self.config
        for mean, value in zip(self.ema, self.values, strict=False):
            mean.lerp_(value.float(), 1 - config.ema_decay)
        if config.swa_enabled and lr_scale < 0.2 and step % config.swa_every == 0:
            self.update_swa(step)
        if config.lawa_enabled and step % config.lawa_freq == 0:
            self.lawa.append(self.copies(self.values))

    def update_swa(self, step):
        source = self.ema or self.values
        if not self.swa:
            self.log.line(f"swa:start step:{step}")
            self.swa = self.copies(source)
        self.swa_count += 1
        for mean, value in zip(self.swa, source, strict=True):
            mean.lerp_(value.float(), 1 / self.swa_count)

    def apply(self):
        """The result becomes the weights. Returns what to log, or nothing if there is none."""
        if len(self.lawa) > 1:
            mean = [sum(tensors) / len(self.lawa) for tensors in zip(*self.lawa, strict=True)]
            words = f"lawa:applying LAWA averaging k={len(self.lawa)}"
        elif self.swa:
            mean, words = self.swa, f"swa:applying SWA weights n={self.swa_count}"
        elif self.ema:
            mean, words = self.ema, "ema:applying EMA weights"
        else:
            return ""
        for value, new in zip(self.values, mean, strict=True):
            value.copy_(new)
        return words


# === EXCHANGE: what ranks tell each other, behind a step's small gradients ===
class Row(NamedTuple):
    """What a rank tells. Sums with zeros, and of small whole numbers, are exact in float32."""

    steps: float  # how many its device is known to have done
    elapsed_ms: float  # the training time when it had
    wait_ms: float  # for input, so far
    signum: float  # of a signal that it heard, or 0
    crc_low: float  # data_crc of the rows that it trained on: its lower 16 bits
    crc_high: float  # and its upper ones
    loss: float = 0.0  # its share of the mean loss, filled in on the device
    fault: float = 0.0  # 1: loss or gradient are not finite; filled in on the device


LOSS, FAULT = (Row._fields.index(name) for name in ("loss", "fault"))


class Exchange:
    """Behind the gradients of the small parameters lies a table, a Row a rank.

    A rank fills in its row and leaves the others zero, so the sum over ranks is the whole table.
    The host reads it steps later, when it is surely there: nothing drains the device, and all ranks
    decide alike, for they read the same table at the same step.
    """

    def __init__(self, flat, runtime, clock):
        self.flat, self.runtime, self.clock = flat, runtime, clock
        shape = runtime.world_size, len(Row._fields)
        self.table = flat.extra.view(shape)
        tables = runtime.steps_late + 2  # on their way at most
        self.sent = torch.zeros(tables, shape[1], pin_memory=runtime.cuda)
        self.received = torch.zeros(tables, *shape, pin_memory=runtime.cuda)
        self.unread = deque()  # (step, its table on the host, the event after which it is there)

    @staticmethod
    def room(runtime):
        """Elements that the table takes."""
        return runtime.world_size * len(Row._fields)

    def begin(self):
        """The next step is the first; what was exchanged before is forgotten."""
        self.unread.clear()
        self.taken = 0
        self.rows = [Row(0, 0.0, 0.0, 0, 0, 0)]  # the table that was read last
        self.done = 0, 0.0  # what this rank's device has done, and when
        self.agreed = 0, 0.0  # what rank 0's had, as far as all ranks have read of it
        self.first = 0, 0.0  # the same after the first step, which may be a slow one

    def all_reduce(self, step, row, loss):
        """Sums gradients and table. No synchronisation point on CUDA: `read` is."""
        sent, received = self.sent[step % len(self.sent)], self.received[step % len(self.sent)]
        sent.copy_(torch.tensor(row))
        self.table.zero_()
        mine = self.table[self.runtime.rank]
        mine.copy_(sent, non_blocking=True)
        mine[LOSS] = loss
        mine[FAULT] = ~torch.isfinite(loss + self.flat.gradients.sum())
        self.runtime.all_reduce(self.flat.reduced)
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
            rows = [Row(*values) for values in received.tolist()]
            for rank, row in enumerate(rows):
                if row.fault or row.signum:
                    fault = f"rank {rank}: step {step + 1}: loss or gradient not finite"
                    raise HaltError(int(row.signum) or fault)
            self.rows, self.taken = rows, step + 1
            # Where the device is the faster one, later steps are done as well by now.
            later = sum(event.query() for _, _, event in self.unread if event)
            self.done = step + 1 + later, self.clock.now_ms()
            self.agreed = max(self.agreed, (rows[0].steps, rows[0].elapsed_ms))

    def elapsed_ms(self, step):
        """Training time of `step` steps: what all ranks know, carried on at the pace since then."""
        (steps, ms), (first_steps, first_ms) = self.agreed, self.first
        pace_ms = (ms - first_ms) / (steps - first_steps) if steps > first_steps else 0.0
        return ms + pace_ms * (step - steps)

    def data_crc(self):
        total = sum(int(row.crc_low) + (int(row.crc_high) << 16) for row in self.rows)
        return total & 0xFFFFFFFF


# === EVALUATION ===
class ByteTable(NamedTuple):
    """What bits per byte need to know of each token id: arrays of numpy."""

    base: Any  # UTF-8 bytes, without a leading space
    leading_space: Any  # is there one?
    boundary: Any  # control, unknown, unused: no bytes, and a space behind it does not count

    @classmethod
    def of(cls, config):
        """Of TOKENIZER_PATH; RunError if it does not fit."""
        path, size = config.tokenizer_path, config.vocab_size
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=path)
        except Exception as error:  # whatever a missing or a damaged file raises
            problem = f"TOKENIZER_PATH={path}: {first_line(error)}: {GET_DATA}"
            raise RunError(problem) from error
        if len(model) != size:
            tokens = len(model)
            raise RunError(f"VOCAB_SIZE={size}: {path} has {tokens} tokens: set {tokens}")
        ids = list(range(size))
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

    def __init__(self, config, runtime):
        self.runtime, self.shards, self.bytes = runtime, Shards(config, "val"), 0
        self.plan = BatchPlan.val(config, runtime, self.shards.ends[-1])
        self.tokens = self.plan.span_rows * self.plan.seq_len  # predicted, over all ranks
        self.partial = " partial_val:1" if config.val_tokens else ""
        self.overlap = Overlap.of(config, "val", runtime.cuda)
        self.byte_table = ByteTable.of(config)

    def count_bytes(self, plan, rows, tokens):
        """A batch's digest, by the reader: its bytes, the first time."""
        return 0 if self.bytes else int(self.byte_table.count(tokens[:-1], tokens[1:]))

    @torch.no_grad()
    def evaluate(self, loss):
        """(nats a token, bits a byte, ms) of the whole split; all ranks take part."""
        runtime, plan = self.runtime, self.plan
        runtime.synchronize()
        start = time.perf_counter()
        # nats, bytes, and the signals that each rank has heard
        sums = torch.zeros(2 + runtime.world_size, dtype=torch.float64, device=runtime.device)
        pipeline = Pipeline(self.shards, plan, self.overlap, runtime, self.count_bytes)
        with closing(pipeline) as batches:
            for batch in batches:
                tokens = len(batch.rows) * plan.seq_len
                sums[0] += loss(batch.x, batch.y).double() * tokens
                sums[1] += batch.digest
        nats, counted = agreed_sums(runtime, sums)
        self.bytes, ms = self.bytes or int(counted), 1e3 * (time.perf_counter() - start)
        return nats / self.tokens, nats / math.log(2) / self.bytes, ms


def agreed_sums(runtime, sums):
    """Over all ranks, as numbers; HaltError where one has heard a signal. Synchronisation point.

    sums: what to add up, then an element a rank for its signal
    """
    count, total = len(sums) - runtime.world_size, sums.clone()
    total[count + runtime.rank] = runtime.signum
    total = runtime.all_reduce(total).tolist()
    if any(total[count:]):
        raise HaltError(int(max(total[count:])))
    return total[:count]


def is_due(every, step):
    return every > 0 and step % every == 0


# === TEST-TIME-TRAINING: sliding windows, and training on what they have scored ===
SCORED_ROWS = 32  # windows of a forward pass


class Chunk(NamedTuple):
    """Windows to score, and then sequences to train on; this rank's part."""

    scored: list  # ranges of rows, a batch each
    trained: list  # (range of rows, their share of the step's sequences), a step each


def rank_part(rows, rank, ranks):
    return rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]


class WindowPlan:
    """Which windows are batch k of this rank: arithmetic, like BatchPlan.

    Row j is a window: seq_len + 1 tokens from token j * stride on; past the end of the split the
    stream begins again, and nothing there counts. Every target is scored with as much before it as
    a window has: of a window count the last `stride` targets, of the first one all. Windows cut
    by the end score some targets again: as published. With seq_len 8, stride 4 and 18 targets:
        row 0: targets 0-7   row 1: 8-11   row 2: 12-15   row 3: 14-17   row 4: 16-17

    A chunk scores the windows whose first counted target lies in it. Then, unless it is the last
    one, it trains on rows that stand seq_len apart: all their targets are just those scored.
    """

    def __init__(self, config, runtime, targets, stride, chunk_tokens=0):
        self.seq_len, self.stride, self.targets = config.train_seq_len, stride, targets
        self.rank, self.world_size = runtime.rank, runtime.world_size
        self.windows, size = range(math.ceil(targets / stride)), chunk_tokens or targets
        self.chunks = []
        starts = range(0, targets, size)
        cuts = [bisect_left(self.windows, start, key=self.first_target) for start in starts]
        for start, first, end in zip(starts, cuts, [*cuts[1:], None], strict=True):
            steps = []
            if end is not None:
                rows = range(start // stride, (start + size) // stride, self.seq_len // stride)
                steps = self.steps(rows, config.ttt_batch_seqs) * config.ttt_epochs
            self.chunks.append(Chunk(self.batches(self.windows[first:end]), steps))
        every = [rows for chunk in self.chunks for rows in chunk.scored]
        self.scored_rows = max(map(len, every), default=1)
        self.in_order = []
        for chunk in self.chunks:
            self.in_order += chunk.scored + [rows for rows, _ in chunk.trained if rows]
        self.batch_rows = max(map(len, self.in_order), default=1)
        self.num_batches = len(self.in_order)
        self.most_tokens = self.batch_rows * self.seq_len + 1

    def first_target(self, row):
        return row * self.stride + self.counted(row, 1)[0]

    def batches(self, windows):
        """This rank's windows of a chunk."""
        mine = rank_part(windows, self.rank, self.world_size)
        return [mine[i : i + SCORED_ROWS] for i in range(0, len(mine), SCORED_ROWS)]

    def steps(self, sequences, size):
        """An epoch: steps of up to `size` sequences a rank.

        Every rank takes every step, if with nothing, so that none waits for ever. With its share
        as the weight of its mean, the sum over ranks is the mean over the step's sequences.
        """
        ranks = range(self.world_size)
        parts = [rank_part(sequences, rank, self.world_size) for rank in ranks]
        steps = []
        for i in range(0, max(map(len, parts)), size):
            batches = [part[i : i + size] for part in parts]
            mine = batches[self.rank]
            steps.append((mine, len(mine) / sum(map(len, batches))))
        return steps

    def counted(self, row, step):
        """(first, end) of a row's targets that count; rows `step` apart have the others."""
        end = min(self.seq_len, self.targets - row * self.stride)
        return max(end - step * self.stride, 0) if row else 0, end

    def num_counted(self, rows):
        return sum(end - first for first, end in (self.counted(row, rows.step) for row in rows))

    def rows(self, k):
        return self.in_order[k]

    def tokens(self, rows):
        """(first token, tokens, spans) of a batch's rows."""
        count = (rows[-1] - rows[0]) * self.stride + self.seq_len + 1
        return rows[0] * self.stride, count, 1

    def widen(self, rows, tokens, x, y):
        """uint16 tokens of some rows -> int64 x and y (B, T); y = -100 where nothing counts."""
        tokens, x, y = (torch.as_tensor(part) for part in (tokens, x, y))
        windows = tokens.unfold(0, self.seq_len + 1, rows.step * self.stride)[: len(rows)]
        x[: len(rows)], y[: len(rows)] = windows[:, :-1], windows[:, 1:]
        x[len(rows) :], y[len(rows) :] = 0, -100
        for targets, row in zip(y, rows, strict=False):
            first, end = self.counted(row, rows.step)
            targets[:first], targets[end:] = -100, -100


def window_bytes(byte_table):
    """The pipeline's digest of windows: the bytes of a batch's targets that count."""

    def count(plan, rows, tokens):
        total = 0
        for row in rows:
            at = (row - rows[0]) * plan.stride
            first, end = (at + edge for edge in plan.counted(row, rows.step))
            total += int(byte_table.count(tokens[first:end], tokens[first + 1 : end + 1]))
        return total

    return count


class Learner:
    """Test-time training: SGD on targets that have been scored; momentum persists over chunks."""

    def __init__(self, trainer, plan):
        self.trainer, self.config = trainer, trainer.config
        self.last_chunk = max(len(plan.chunks) - 1, 1)
        frozen = tuple(f"blocks.{i}." for i in range(self.config.ttt_freeze_blocks))
        for name, p in trainer.model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        self.params = [p for p in trainer.model.parameters() if p.requires_grad]
        self.sgd = torch.optim.SGD(self.params, lr=0.0, momentum=self.config.ttt_momentum)

    def step(self, batches, rows, share, chunk):
        """One step on this rank's rows, of which it may have none."""
        trainer, config = self.trainer, self.config
        trainer.optimizers.zero_grad()
        for batch in islice(batches, 1 if rows else 0):  # none after a signal
            loss = trainer.loss(batch.x[: len(rows)], batch.y[: len(rows)])
            (loss * share).backward()
        for gradients in trainer.optimizers.grads:
            trainer.runtime.all_reduce(gradients)
        if config.ttt_grad_clip > 0:
            nn.utils.clip_grad_norm_(self.params, config.ttt_grad_clip)
        cosine = math.cos(math.pi * chunk / self.last_chunk)
        self.sgd.param_groups[0]["lr"] = config.ttt_lr * 0.5 * (1 + cosine)
        self.sgd.step()

    def describe(self, plan):
        config, learning = self.config, sum(p.numel() for p in self.params)
        total = sum(p.numel() for p in self.trainer.model.parameters())
        self.trainer.log.line(
            f"ttt_sliding:start chunks={len(plan.chunks)} chunk_tokens={config.ttt_chunk_tokens} "
            f"total_windows={len(plan.windows)} stride={plan.stride} ttt_lr={config.ttt_lr} "
            f"ttt_epochs={config.ttt_epochs} freeze_blocks={config.ttt_freeze_blocks}\n"
            f"ttt_sliding:params unfrozen={learning} frozen={total - learning}"
        )


def score_and_learn(trainer, plan, learner=None):
    """(nats a target, bits a byte, ms) of sliding windows: each chunk is scored as a whole.

    Legal: a learner trains only on targets whose score is recorded already, so no score comes from
    weights that have seen its target. All ranks take part.
    """
    validation, runtime, start = trainer.validation, trainer.runtime, time.perf_counter()
    # nats, bytes, targets, and the signals that each rank has heard
    sums = torch.zeros(3 + runtime.world_size, dtype=torch.float64, device=runtime.device)
    digest, last = window_bytes(validation.byte_table), len(plan.chunks) - 1
    pipeline = Pipeline(validation.shards, plan, validation.overlap, runtime, digest)
    with closing(pipeline) as batches:
        for number, chunk in enumerate(plan.chunks):
            for batch in islice(batches, len(chunk.scored)):  # fewer after a signal
                score(trainer, plan, batch, sums)
            nats, size, targets = agreed_sums(runtime, sums)  # a synchronisation point
            means = nats / targets, nats / math.log(2) / size
            if learner:
                for rows, share in chunk.trained:
                    learner.step(batches, rows, share, number)
                if number % 10 == 0 or number == last:
                    seconds = time.perf_counter() - start
                    eta_s = seconds * (plan.num_batches / max(batches.num_done, 1) - 1)
                    trainer.log.line(
                        f"  ttt_chunk [{number + 1}/{last + 1}] bpb={means[1]:.6f} "
                        f"time={seconds:.1f}s eta:{eta_s:.0f}s"
                    )
    return *means, 1e3 * (time.perf_counter() - start)


def score(trainer, plan, batch, sums):
    """Adds a batch of windows to the sums; all batches have one size, as another is compiled."""
    with torch.no_grad():
        nats = trainer.nats(batch.x[: plan.scored_rows], batch.y[: plan.scored_rows])
    sums[0] += nats.sum(dtype=torch.float64)
    sums[1] += batch.digest
    sums[2] += plan.num_counted(batch.rows)


# === ARTIFACT: the published format; banks in six bits, tables in eight, the rest in float16 ===
# A slice's name in the artifact, by bank: of its first half of slices, and of the second.
SLICES = {
    "qo_bank": ("attn.c_q", "attn.proj"),
    "kv_bank": ("attn.c_k", "attn.c_v"),
    "mlp_up_bank": ("mlp.fc",),
    "mlp_down_bank": ("mlp.proj",),
}


def is_named(name, patterns):
    return any(part in name for part in patterns.split(",") if part)


def quantize(t):
    """Floats -> (int8 of the same shape, scale): float16 (rows,) of a matrix, else a float32."""
    t, matrix = t.float(), t.ndim == 2
    clip = t.abs().quantile(0.9999984, dim=1 if matrix else None, keepdim=True)
    scale = (clip / 127).clamp(1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
    q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
    return q, scale[:, 0].half() if matrix else scale.view(())


def int6_scale(clip):
    """The step of a row, float16. Its floor fits the record under the cap, and ruins short runs."""
    return (clip / 31).clamp(min=1 / 31).half()


def quantize_int6(t):
    """Matrix -> (int8 codes of -31 .. 31, float16 steps of its rows): the best of five clips."""
    t, least, best = t.float(), math.inf, None
    shares = torch.tensor([0.999, 0.9995, 0.9999, 0.99999, 1.0])
    for clip in torch.quantile(t.abs(), shares, dim=1):
        scale = int6_scale(clip)
        q = (t / scale.float()[:, None]).round().clamp(-31, 31).to(torch.int8)
        error = (t - dequantize(q, scale)).square().mean().item()
        if error < least:
            least, best = error, (q, scale)
    return best


def dequantize(q, scale):
    return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))


def slice_names(bank, slices):
    """The artifact's names of a bank's slices, in the bank's order."""
    parts = SLICES[bank]
    layers = range(slices // len(parts))
    return [f"blocks.{layer}.{part}.weight" for part in parts for layer in layers]


def unbanked(state):
    """A state dict with matrices in the place of banks, in the published order: it packs best.

    Bank by bank, and in each layer by layer.
    """
    result = {}
    for name, t in state.items():
        if name in SLICES:
            named = dict(zip(slice_names(name, len(t)), t, strict=True))
            result |= {key: named[key] for key in sorted(named, key=layer_of)}
        else:
            result[name] = t
    return result


def layer_of(name):
    return int(name.split(".")[1])


def pack(state, config):
    """The artifact of a state dict on the CPU: torch.save of {"w": tensors, "m": how}, as xz."""
    tensors, how = {}, {}
    for name, t in unbanked(state).items():
        floating = t.is_floating_point()
        if not floating or t.numel() <= 65_536:
            tensors[name], how[name] = t.half() if floating else t, "passthrough"
        elif is_named(name, config.control_tensor_name_patterns):
            tensors[name], how[name] = t.float().clone(), "passthrough"
        else:
            six = is_named(name, ".mlp.,.attn.,.proj.")
            q, scale = quantize_int6(t) if six else quantize(t)
            tensors[name + ".q"], tensors[name + ".scale"] = q, scale
            how[name] = {"type": "int6" if six else "int8"}
    return lzma.compress(torch_bytes({"w": tensors, "m": how}), preset=6)


def unpack(data, expected):
    """The state dict in an artifact, ours or the published; RunError if it does not fit."""
    try:
        limit = 8 * sum(t.numel() for t in expected.values()) + 2**20
        stream = lzma.LZMADecompressor(memlimit=1 << 28)
        raw = stream.decompress(data, limit)
        if not stream.eof:
            raise ValueError("it is cut short, or unpacks to too much")
        tensors, state = torch.load(io.BytesIO(raw), "cpu", weights_only=True)["w"], {}
        for name, t in unbanked(expected).items():
            if name in tensors:
                state[name] = tensors[name]
            else:
                state[name] = dequantize(tensors[name + ".q"], tensors[name + ".scale"])
            if state[name].shape != t.shape:
                raise ValueError(f"{name} has the shape {tuple(state[name].shape)}")
        for bank in SLICES:
            names = slice_names(bank, len(expected[bank]))
            state[bank] = torch.stack([state.pop(name) for name in names])
        return {name: state[name].to(t.dtype) for name, t in expected.items()}
    except Exception as error:  # whatever a damaged file raises
        raise RunError(f"no artifact of this model: {first_line(error)}") from error


def torch_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


# === TRAINING ===
class Clock:
    """Training time in ms. Its edges are synchronisation points: the device's work is done."""

    def __init__(self, runtime):
        self.runtime, self.total_ms, self.since = runtime, 0.0, math.inf

    def now_ms(self):
        return self.total_ms + 1e3 * max(0.0, time.perf_counter() - self.since)

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.runtime.synchronize()
        self.total_ms, self.since = self.now_ms(), math.inf


class Trainer:
    """A run: the model and all that trains it, the same on every rank."""

    def __init__(self, config, runtime, log):
        self.config, self.runtime, self.log, self.clock = config, runtime, log, Clock(runtime)
        torch.manual_seed(config.seed)
        self.model = GPT(config, runtime.dtype).to(runtime.device)
        for p in self.model.parameters():  # rank 0's, on all
            runtime.all_reduce(p.data.mul_(runtime.rank == 0))
        room = Exchange.room(runtime)
        self.optimizers = Optimizers(self.model, config, runtime, room)
        self.exchange = Exchange(self.optimizers.small, runtime, self.clock)
        self.averages = Averages(config, self.optimizers.values, log)
        self.shards = Shards(config, "train")
        self.plan = BatchPlan.train(config, runtime)
        self.overlap = Overlap.of(config, "train", runtime.cuda)
        self.validation, self.val_ms = Validation(config.for_evaluation(), runtime), 0.0
        self.step = self.crc = 0  # crc: the data_crc of this rank
        self.qat = config.qat_enabled
        self.exchange.begin()
        self.loss, self.nats = self.model, self.model.nats  # x, y -> mean nats, or all of them
        if config.torch_compile == "1" or config.torch_compile == "auto" and runtime.cuda:
            shape = self.plan.batch_rows, self.plan.seq_len
            x = torch.zeros(shape, dtype=torch.int64, device=runtime.device)
            self.loss = try_compile(self.model, (x, x), log)
            if self.loss is not self.model:  # else one warning is enough
                self.nats = torch.compile(self.model.nats, dynamic=False)

    def batches(self):
        return Pipeline(self.shards, self.plan, self.overlap, self.runtime)

    def train_step(self, batches, lr_scale):
        """Issues one step. Nothing here waits for the device, and only `batches` for input."""
        optimizers, runtime, loss_sum = self.optimizers, self.runtime, 0.0
        parts = runtime.micro_steps * runtime.world_size
        optimizers.zero_grad()
        for batch in islice(batches, runtime.micro_steps):  # fewer after a signal
            loss = self.loss(batch.x, batch.y) / parts
            loss.backward()
            loss_sum += loss.detach()
            self.crc = (self.crc + batch.digest) & 0xFFFFFFFF
        optimizers.clip()
        optimizers.reduce_tables()
        crc, wait_ms = (self.crc & 0xFFFF, self.crc >> 16), sum(batches.waits_ms)
        row = Row(*self.exchange.done, wait_ms, runtime.signum, *crc)
        self.exchange.all_reduce(self.step, row, loss_sum)
        optimizers.step(lr_scale, muon_momentum(self.config, self.step))
        self.step += 1

    def warm_up(self):
        """Priming steps, off the clock: all is allocated and compiled then. They are undone."""
        before, steps = self.optimizers.snapshot(), self.config.warmup_steps
        try:
            with closing(self.batches()) as batches:
                for done in range(1, steps + 1):
                    self.train_step(batches, 1.0)
                    self.exchange.read(self.step)
                    self.log.line(f"warmup_step:{done}/{steps}")
        finally:  # also where a signal ends them
            self.optimizers.restore(before)
            self.step = self.crc = 0
            self.exchange.begin()

    def lr_scale(self):
        return lr_multiplier(self.config, self.step, self.exchange.elapsed_ms(self.step))

    def late_qat(self, lr_scale):
        """Switches QAT on where the learning rate has fallen far enough."""
        if self.config.late_qat and not self.qat and lr_scale < self.config.late_qat_threshold:
            self.model.qat.fill_(1.0)
            self.qat = True
            self.log.line(f"late_qat:enabled step:{self.step} scale:{lr_scale:.4f}")

    def is_capped(self):
        """Would the next step end behind the cap?"""
        next_ms = self.exchange.elapsed_ms(self.step + 1)
        return 0 < 1e3 * self.config.max_wallclock_seconds < next_ms

    def train(self):
        """The run: steps, and once in a while a line, a validation."""
        config, clock = self.config, self.clock
        self.warm_up()
        self.logged = 0, 0.0, 0.0  # step, ms and wait of the last line
        with closing(self.batches()) as batches:
            clock.start()
            while True:
                # All that ranks know of each other is older than what the device is at work on.
                self.exchange.read(self.step - self.runtime.steps_late)
                capped = self.is_capped()
                last = capped or self.step >= config.iterations
                if last and self.step > self.logged[0]:
                    self.log_step()
                if last or is_due(config.val_loss_every, self.step):
                    self.validate()
                if last:
                    break
                step_tokens = config.train_batch_tokens + SPANS_PER_STEP
                if self.step == self.shards.ends[-1] // step_tokens:
                    self.log.line(f"WARNING: step {self.step + 1} begins the shards anew")
                lr_scale = self.lr_scale()
                self.late_qat(lr_scale)
                self.train_step(batches, lr_scale)
                self.averages.update(self.step, lr_scale)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    self.log_step()
            clock.stop()
        if capped:
            ms = f"train_time:{clock.total_ms:.0f}ms"
            self.log.line(
                f"stopping_early: wallclock_cap {ms} step:{self.step}/{config.iterations}"
            )
        self.report(batches)

    def validate(self):
        self.exchange.read(self.step)
        self.clock.stop()
        ms, at = self.clock.total_ms, f"step:{self.step}/{self.config.iterations}"
        loss, bpb, val_ms = self.validation.evaluate(self.loss)
        self.val_ms += val_ms
        self.log.line(
            f"{at} val_loss:{loss:.4f} val_bpb:{bpb:.4f} train_time:{ms:.0f}ms "
            f"step_avg:{ms / max(self.step, 1):.2f}ms{self.validation.partial}\n"
            f"val_stage_time_ms:{val_ms:.0f}ms {at}",
            event="validation",
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
        now = step, ms, max(row.wait_ms for row in exchange.rows)
        (steps, since_ms, wait_ms), self.logged = np.subtract(now, self.logged), now
        tok_s = 1e3 * steps * config.train_batch_tokens / since_ms
        left_ms = (config.iterations - step) * ms / step
        if config.max_wallclock_seconds > 0:
            left_ms = min(left_ms, max(0.0, 1e3 * config.max_wallclock_seconds - ms))
        loss = sum(row.loss for row in exchange.rows)
        self.log.line(
            f"step:{step}/{config.iterations} train_loss:{loss:.4f} train_time:{ms:.0f}ms "
            f"step_avg:{ms / step:.2f}ms tok_s:{tok_s:.0f} "
            f"input_wait:{100 * wait_ms / since_ms:.2f}% "
            f"data_crc:{exchange.data_crc():08x} eta:{left_ms / 1e3:.0f}s",
            event="step",
        )

    def report(self, batches):
        """What the run has cost, and what its input has: a line and a sentence."""
        ms, micro_steps = self.clock.total_ms, self.runtime.micro_steps
        waits = np.reshape(batches.waits_ms or [0.0] * micro_steps, (-1, micro_steps)).sum(1)
        percent, advice = 100 * waits.sum() / max(ms, 1e-9), "overlap settings do not matter here"
        if percent >= 0.5:
            more = "raise TRAIN_PREFETCH_QUEUE, or move DATA_PATH to a faster disk"
            advice = more if self.overlap.queue else "nothing overlaps: set TRAIN_PREFETCH=1"
        tokens = self.step * (self.config.train_batch_tokens + SPANS_PER_STEP)
        peaks = [torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20]
        if not self.runtime.cuda:
            peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10] * 2  # on Linux
        self.log.line(
            f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{self.val_ms:.0f}ms\n"
            f"input_wait total:{waits.sum():.3f}ms share:{percent:.3f}% "
            f"read_bytes:{batches.bytes_read} epochs:{tokens / self.shards.ends[-1]:.3f}\n"
            f"input cost {percent:.2f} % of training: {advice}\n"
            f"peak memory allocated: {peaks[0]} MiB reserved: {peaks[1]} MiB",
            event="input",
        )

    def score(self, label, scored, words="", also=()):
        """Logs a result; under its own and the names in `also` to eight places."""
        loss, bpb, ms = scored
        partial, lines = self.validation.partial, []
        for name in also:
            lines.append(f"\n{name} val_loss:{loss:.8f} val_bpb:{bpb:.8f}{partial}")
        self.log.line(
            f"{label} val_loss:{loss:.4f} val_bpb:{bpb:.4f}{words} eval_time:{ms:.0f}ms{partial}"
            + "".join(lines),
            event="score",
        )
        return loss

    def export_and_score(self, code_bytes):
        """Rank 0 writes the artifact; every rank scores its part of the split with those bytes.

        Returns what is missing at the end: a full disk costs files, not the score.
        """
        problems, data, model = [], None, self.model
        averaged = self.averages.apply()
        if averaged:
            self.log.line(averaged)
            self.score("DIAGNOSTIC post_ema", self.validation.evaluate(self.loss))
        model.qat = None  # from here on all weights are those of the export
        if self.runtime.rank == 0:
            data, problems = self.export(code_bytes)
        model.load_state_dict(unpack(self.runtime.broadcast(data), model.state_dict()))
        label = "final_int6_roundtrip"
        scored = self.validation.evaluate(self.loss)
        loss = self.score(label, scored, also=[f"{label}_exact"])
        self.score_windows()
        if self.config.ttt_enabled:
            loss = self.learn_and_score()
        problems.append("" if math.isfinite(loss) else f"the score is {loss}")
        return "; ".join(filter(None, problems))

    def export(self, code_bytes):
        """Rank 0 alone: (the artifact, what is wrong)."""
        state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
        model, data = torch_bytes(state), pack(state, self.config)
        problems = [write_atomic(Path("final_model.int6.ptz"), data)]
        problems.append(write_atomic(Path("final_model.pt"), model))
        total = len(data) + code_bytes
        self.log.line(
            f"Serialized model: {len(model)} bytes\nCode size: {code_bytes} bytes\n"
            f"Serialized model int6+lzma: {len(data)} bytes\n"
            f"Total submission size int6+lzma: {total} bytes"
        )
        self.log.event("artifact", artifact_bytes=len(data), code_bytes=code_bytes)
        if total > CAP_BYTES:
            problems.append(
                f"artifact {len(data)} + code {code_bytes} = {total} bytes, {total - CAP_BYTES} "
                f"over the cap of {CAP_BYTES}: pack the script"
            )
        return data, problems

    def score_windows(self):
        """Sliding evaluation, by EVAL_STRIDE, and by 64 where that is another."""
        config, targets = self.config.for_evaluation(), self.validation.tokens
        for stride in dict.fromkeys((config.eval_stride, 64) if config.eval_stride else ()):
            if stride < config.train_seq_len:
                plan = WindowPlan(config, self.runtime, targets, stride)
                label = "final_int6_sliding_window"
                label += "_s64" if stride != config.eval_stride else ""
                also = f"{label}_exact", "final_int8_zlib_roundtrip_exact"
                self.score(label, score_and_learn(self, plan), f" stride:{stride}", also)

    def learn_and_score(self):
        """Legal test-time training."""
        config, targets = self.config, self.validation.tokens
        chunk_tokens = config.ttt_chunk_tokens
        plan = WindowPlan(config, self.runtime, targets, config.eval_stride, chunk_tokens)
        learner = Learner(self, plan)
        learner.describe(plan)
        loss, bpb, ms = scored = score_and_learn(self, plan, learner)
        seconds = f"elapsed={ms / 1e3:.1f}s"
        self.log.line(f"ttt_sliding:done val_loss={loss:.6f} val_bpb={bpb:.6f} {seconds}")
        return self.score("legal_ttt", scored, also=["legal_ttt_exact"])


# === MAIN ===
NAME = "train_gpt.py"


def log_source(log):
    """What a log begins with, as the challenge's do: the script's text and the versions."""
    smi, rule, source = "", "=" * 100, Path(__file__).read_text("utf-8")
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    log.write(".txt", f"{source}\n{rule}\n{versions}\n{smi}\n{rule}")
    log.line(str(log.path))


def log_header(run, backends):
    """The settings that matter, in the challenge's lines."""
    config, log, runtime, shards, val = run.config, run.log, run.runtime, run.shards, run.validation

    def words(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    tied = config.tie_embeddings
    xsa_layers = [i for i, block in enumerate(run.model.blocks) if block.attn.xsa]
    embed_lr, head_lr = (config.tied_embed_lr, 0.0) if tied else (config.embed_lr, config.head_lr)
    log.line(
        f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{shards.folder.name} train_shards:{len(shards.paths)}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"tokens:{val.tokens}{val.partial}\n"
        f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
        f"XSA:last_{config.xsa_last_n} active_layers:{xsa_layers}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{runtime.micro_steps}\n"
        f"sdp_backends:{backends}\nattention_mode:gqa {words('num_heads num_kv_heads')}\n"
        f"{words('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{words('matrix_lr scalar_lr')}\n"
        f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{words('seed')}\n"
        f"train_io:{run.overlap.words}\nval_io:{val.overlap.words}"
    )
    if len(shards.paths) < shards.promised:
        log.line(f"WARNING: train_shards: {len(shards.paths)} of {shards.promised}")
    log.event("config", **asdict(config), world_size=runtime.world_size)


def run_to_the_end(config, runtime, log):
    """(exit code, status, problem): all ranks come to the same end."""
    backends = attention_backends(config, runtime, log)
    with sdpa_kernel(list(backends), set_priority=True):
        run = Trainer(config, runtime, log)
        log_header(run, ",".join(backends.values()))
        try:
            run.train()
            problem = run.export_and_score(Path(__file__).stat().st_size)
        except HaltError as halt:
            return ended(run, halt.args[0])
    problem = runtime.broadcast(problem)  # rank 0's
    return (1, "failed", problem) if problem else (0, "finished", "")


def ended(run, reason):
    """All ranks have left the same step: (exit code, status, problem)."""
    if isinstance(reason, str):
        return 1, "nonfinite", f"{reason}: lower the learning rates"
    return 128 + reason, "interrupted", f"interrupted after step {run.exchange.taken}"


def execute(config, env):
    """Runs it; the exit code. What is foreseeable ends in one line."""
    runtime, log, together = Runtime(config, env), None, False
    code, status, problem = 1, "failed", ""
    try:
        runtime.start(env)
        config = replace(config, run_id=runtime.broadcast(config.run_id))
        log = RunLog(config.run_id, runtime.rank == 0)
        log_source(log)
        code, status, problem = run_to_the_end(config, runtime, log)
        together = True
    except RunError as error:
        problem = str(error)
    except torch.OutOfMemoryError:
        steps, free = runtime.micro_steps, torch.cuda.mem_get_info()[0] >> 20
        problem = f"GRAD_ACCUM_STEPS={steps}: out of memory, {free} MiB free: set {2 * steps}"
    except Exception as error:  # that nobody foresaw, or another rank that has gone
        tell(traceback.format_exc(), "stderr")
        problem = f"{type(error).__name__}: {first_line(error)}"
    if problem and (runtime.rank == 0 or not together):
        alone = not together and not problem.startswith("rank")
        tell(f"{NAME}: rank {runtime.rank}: {problem}" if alone else f"{NAME}: {problem}", "stderr")
    if log:
        log.event("end", status=status, exit_code=code, error=problem)
        log.console(f"{status}: see {log.path}")
    if together and dist.is_initialized():  # else others may sit in a collective: NCCL would wait
        dist.destroy_process_group()
    return code


def main(arguments, env):
    """The exit code: 0 done, 1 failed, 2 wrong settings, 128 + n ended by signal n."""
    if arguments in (["--help"], ["-h"]):
        print_help()
        return 0
    config, faults = read_config(env)
    faults += [f"{word}: unknown, see --help" for word in arguments if word != "--print-config"]
    if arguments and not faults:
        tell(json.dumps(asdict(config), indent=1))
        return 0
    faults += find_faults(config, int(env.get("WORLD_SIZE", 1)), env)
    if not faults:
        return execute(config, env)
    if env.get("LOCAL_RANK", "0") == "0":
        tell("\n  ".join([f"{NAME}: nothing started, wrong settings:", *faults]), "stderr")
    else:
        time.sleep(30)  # torchrun ends all at the first exit: that of the rank that speaks
    return 2


if __name__ == "__main__":
    exit_code = main(sys.argv[1:], os.environ)
    os._exit(exit_code)  # the interpreter's own exit aborts now and then, in gloo's threads (2.13)
