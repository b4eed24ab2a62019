"""Train a small GPT for the parameter-golf challenge: the lowest bits per byte in 16,000,000 bytes.

On 8 GPUs (or 1, 2, 4):          torchrun --standalone --nproc_per_node=8 train_gpt.py
One process, on a GPU or a CPU:  python3 train_gpt.py
All settings; their values now:  python3 train_gpt.py --help | --print-config

Settings are environment variables in front of the command: ITERATIONS=100 python3 train_gpt.py

Data loading always runs while the device computes: a thread reads tokens, a copy stream uploads
them, the compute stream trains on them. One Pipeline class does this for training and validation;
settings turn overlap off; there is no second loader.

What you change comes first: CONFIG MODEL OPTIMIZERS DATA EVALUATION ARTIFACT TRAINING.
Then comes MACHINERY, which an experiment need not change: EXCHANGE RUNTIME CHECKPOINTS
INSTRUMENTS SETTINGS MAIN.

To change          edit
a setting          a line in Config; Bound[...] if it decides shapes or data
a parameter        create it in the model, and add it to one group in make_optimizers
new state          an attribute of Trainer: modules, optimizers, tensors and numbers that it holds,
                   also in lists and dicts, are saved in checkpoints and restored
a step             the end of Trainer.train_step: multiply what you change by exchange.counts
an optimizer       an attribute of Trainer; it is stepped and scheduled with the others
a schedule         lr_multiplier; progress() is the share of the run that is over
what is scored     BatchPlan.widen: a target of -100 is ignored, in nats and in bytes
how it is stored   storage() chooses the type, quantize() makes the numbers
the step line      log_step: a value added there is in the .jsonl file, too
the order of data  Shards for shards, BatchPlan.rows for batches
"""

import copy
import difflib
import fcntl
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
import stat
import subprocess
import sys
import threading
import time
import traceback
import uuid
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeVar, get_args, get_origin

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

# === CONFIG: each line `name: type = default  # unit; meaning` is a setting; NAME=value sets it ===
# The types say which values a setting may have. At run time they are plain int and float.
NonNegativeInt = NewType("NonNegativeInt", int)
PositiveInt = NewType("PositiveInt", int)
NonNegativeFloat = NewType("NonNegativeFloat", float)
PositiveFloat = NewType("PositiveFloat", float)
Fraction = NewType("Fraction", float)  # 0 or more, below 1
# Bound[type] marks a setting that decides shapes or data: RESUME needs the checkpoint's value of
# it. All other settings may change on RESUME.
Bound = Annotated[TypeVar("Kind"), "bound"]
# A block's tensor whose name contains one of these is trained by Adam and, if small, stored in
# float32. Some of the names occur only in the challenge's other scripts.
CONTROLS = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)
SPANS_PER_STEP = 8  # the challenge's order of data is made for 8 ranks, see DATA


@dataclass(frozen=True)
class Config:
    """The settings of a run, and their defaults: the challenge's."""

    # data
    data_path: Bound[str] = "./data/datasets/fineweb10B_sp1024"  # folder; of fineweb_*.bin
    tokenizer_path: Bound[str] = "./data/tokenizers/fineweb_1024_bpe.model"  # file; .model or .json
    run_id: str = ""  # name; of logs/<RUN_ID>.txt and .jsonl; empty: a random one
    seed: Bound[NonNegativeInt] = 1337  # number; of the initial weights
    # validation and logs
    val_batch_size: PositiveInt = 524288  # tokens; per validation batch, all ranks and micro-steps
    val_loss_every: NonNegativeInt = 1000  # steps; between validations; 0: only at the end
    val_tokens: NonNegativeInt = 0  # tokens; validate on the first N (never submit that); 0: all
    val_progress_log_every: NonNegativeInt = 0  # batches; between val_progress lines; 0: none
    train_log_every: NonNegativeInt = 200  # steps; between lines after step 10; 0: no more lines
    # length
    iterations: NonNegativeInt = 20000  # steps; length of the run
    warmdown_iters: NonNegativeInt = 1200  # steps; before the cap (or ITERATIONS), rates fall to 0
    warmup_steps: NonNegativeInt = 20  # steps; priming: compiles and allocates, changes nothing
    train_batch_tokens: Bound[PositiveInt] = 524288  # tokens; per step: 8 spans of whole rows
    train_seq_len: Bound[PositiveInt] = 1024  # tokens; per row
    max_wallclock_seconds: float = 600.0  # seconds; cap on training; <=0: none: runs are repeatable
    # model
    vocab_size: Bound[PositiveInt] = 1024  # tokens; that of the tokenizer
    num_layers: Bound[PositiveInt] = 9  # blocks; the first half feeds skips to the second
    model_dim: Bound[PositiveInt] = 512  # channels; width of the residual stream
    num_heads: Bound[PositiveInt] = 8  # heads; of queries
    num_kv_heads: Bound[PositiveInt] = 4  # heads; of keys and values
    mlp_mult: Bound[PositiveInt] = 2  # times; MLP width over MODEL_DIM
    tie_embeddings: Bound[bool] = True  # 0/1; the output head is the token embedding
    rope_base: Bound[PositiveFloat] = 10000.0  # number; base of the rotary wavelengths
    logit_softcap: Bound[PositiveFloat] = 30.0  # number; logits = cap * tanh(logits / cap)
    qk_gain_init: float = 1.5  # number; initial gain of each query head
    # optimizer
    embed_lr: NonNegativeFloat = 0.6  # rate; Adam, untied embedding
    head_lr: NonNegativeFloat = 0.008  # rate; Adam, untied head
    tied_embed_lr: NonNegativeFloat = 0.05  # rate; Adam, tied embedding
    tied_embed_init_std: NonNegativeFloat = 0.005  # number; initial deviation of tied embedding
    matrix_lr: NonNegativeFloat = 0.04  # rate; Muon, matrices of the blocks
    scalar_lr: NonNegativeFloat = 0.04  # rate; Adam, vectors and scalars
    muon_momentum: Fraction = 0.95  # number; Muon, after its warm-up
    muon_backend_steps: PositiveInt = 5  # iterations; Newton-Schulz
    muon_momentum_warmup_start: Fraction = 0.85  # number; Muon, at step 0
    muon_momentum_warmup_steps: NonNegativeInt = 500  # steps; linear ramp between the two
    beta1: Fraction = 0.9  # number; Adam
    beta2: Fraction = 0.95  # number; Adam
    adam_eps: PositiveFloat = 1e-8  # number; Adam
    grad_clip_norm: NonNegativeFloat = 0.0  # number; largest norm of the whole gradient; 0: off
    # artifact
    control_tensor_name_patterns: Bound[str] = CONTROLS  # names; in blocks, trained by Adam
    int8_keep_float_fp32_name_patterns: str = CONTROLS  # names; small tensors stored in float32
    # overlap and instruments
    train_prefetch: bool = True  # 0/1; a thread reads the next batches ahead
    train_prefetch_queue: PositiveInt = 2  # batches; kept ready on the host
    train_copy_stream: bool = True  # 0/1; uploads run on a CUDA stream of their own
    val_prefetch: bool = True  # 0/1; as TRAIN_PREFETCH, in validation
    val_prefetch_queue: PositiveInt = 2  # batches; as TRAIN_PREFETCH_QUEUE, in validation
    val_copy_stream: bool = True  # 0/1; as TRAIN_COPY_STREAM, in validation
    gpu_prefetch: PositiveInt = 2  # batches; on the device; 2: double buffering, 1: on demand
    val_bytecount_device: Literal["cpu", "cuda"] = "cpu"  # device; that counts val_bpb's bytes
    data_stall_seconds: PositiveFloat = 60.0  # seconds; a read that takes longer ends the run
    training_timing_breakdown: bool = False  # 0/1; every phase timed alone, all overlap off
    training_timing_every: PositiveInt = 200  # steps; between its lines (steps 1-10 always)
    trace_steps: NonNegativeInt = 0  # steps; traced to logs/<RUN_ID>.trace.json.gz; 0: none
    # checkpoints
    checkpoint_every: NonNegativeInt = 0  # steps; between checkpoints; 0: only on a signal
    checkpoint_keep: PositiveInt = 3  # files; the newest that stay in checkpoints/<RUN_ID>/
    resume: str = ""  # auto or file; auto: the newest checkpoint of RUN_ID; empty: start anew
    # device
    device: Literal["auto", "cuda", "cpu"] = "auto"  # device; auto: cuda where there is one
    torch_compile: Literal["auto", "0", "1"] = "auto"  # mode; auto: on with CUDA
    attention_backend: Literal["auto", "fa3", "cudnn", "flash", "math"] = "auto"  # name; of SDPA
    grad_accum_steps: NonNegativeInt = 0  # micro-steps; per step; 0: max(1, 8 / ranks)

    def micro_steps(self, world_size):
        return self.grad_accum_steps or max(1, SPANS_PER_STEP // world_size)

    def as_text(self):
        """{NAME: value as text}"""
        return {name.upper(): str(value) for name, value in asdict(self).items()}


# === MODEL: the challenge's baseline; B sequences, T tokens, D channels ===
# The order of construction is the challenge's, so that a SEED gives the same initial weights.
# Parameters are float32. Where one meets activations x, cast it with p.to(x.dtype), or everything
# after it becomes float32.
def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Float32 weights (outputs, inputs), cast to the dtype of the activations where they are used.

    No autocast: since torch 2.12, rms_norm and so the residual stream would be float32.
    """

    def __init__(self, inputs, outputs, zero=False):
        super().__init__(inputs, outputs, bias=False)
        if zero:
            nn.init.zeros_(self.weight)

    def forward(self, x, scale=None):
        """`scale` (outputs,) scales the output. It multiplies the weight, which is smaller."""
        weight = self.weight if scale is None else scale[:, None] * self.weight
        return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    """Rotary embedding, arXiv:2104.09864. x (B, T, heads, head_dim); cos, sin (T, 1, head_dim/2)"""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped queries, rms norm on queries and keys, a gain per head."""

    def __init__(self, config):
        super().__init__()
        D = config.model_dim
        self.head_dim = D // config.num_heads
        self.c_q = Linear(D, D)
        self.c_k = Linear(D, config.num_kv_heads * self.head_dim)
        self.c_v = Linear(D, config.num_kv_heads * self.head_dim)
        self.proj = Linear(D, D, zero=True)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))

    def forward(self, x, rotary, scale):
        q = self.c_q(x).unflatten(-1, (-1, self.head_dim))  # (B, T, heads, head_dim)
        k = self.c_k(x).unflatten(-1, (-1, self.head_dim))  # (B, T, kv_heads, head_dim)
        v = self.c_v(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(rms_norm(q), *rotary) * self.q_gain.to(q.dtype)[:, None]  # (heads, 1)
        k = rotate(rms_norm(k), *rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head_dim)
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.proj(y.transpose(1, 2).flatten(2), scale)  # (B, T, D)


class MLP(nn.Module):
    """proj(relu(fc(x))^2), arXiv:2109.08668"""

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
        self.attn = Attention(config)
        self.mlp = MLP(config)
        ones = torch.ones(config.model_dim)
        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, torch.zeros_like(ones))))  # (2, D)

    def forward(self, x, x0, rotary):
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + self.attn(rms_norm(x), rotary, self.attn_scale)
        return x + self.mlp(rms_norm(x), self.mlp_scale)


class GPT(nn.Module):
    """Skip connections: first-half outputs are added to second-half inputs, last one first."""

    def __init__(self, config, dtype):
        super().__init__()
        D = config.model_dim
        self.dtype = dtype  # of the activations
        self.softcap = config.logit_softcap
        self.tok_emb = nn.Embedding(config.vocab_size, D)
        self.skip_weights = nn.Parameter(torch.ones(config.num_layers // 2, D))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lm_head = None if config.tie_embeddings else Linear(D, config.vocab_size, zero=True)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim == 2:
                    p.copy_(p.bfloat16())  # rounded once, as in the challenge's script
        head_dim = D // config.num_heads
        frequencies = config.rope_base ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(config.train_seq_len)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, 1, head_dim / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def logits(self, tokens):
        """(B, T) tokens, T up to TRAIN_SEQ_LEN -> (B, T, vocabulary), float32."""
        T = tokens.size(1)
        x = x0 = rms_norm(self.tok_emb(tokens).to(self.dtype))  # (B, T, D)
        rotary = self.cos[:T].to(self.dtype), self.sin[:T].to(self.dtype)
        skips = []
        half = len(self.skip_weights)
        for i, block in enumerate(self.blocks):
            if i >= half and skips:  # with an odd number of blocks, the last has none
                x = x + self.skip_weights[i - half].to(x.dtype) * skips.pop()
            x = block(x, x0, rotary)
            if i < half:
                skips.append(x)
        head = self.lm_head or self.tok_emb
        logits = F.linear(rms_norm(x), head.weight.to(x.dtype))  # (B, T, vocabulary)
        return (self.softcap * torch.tanh(logits / self.softcap)).float()

    def forward(self, x, y):
        """The mean loss in nats of predicting y from x, both (B, T); y = -100 is no target."""
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())

    def flops_per_token(self, config):
        """Forward and backward: 6 per weight of blocks and head, 6 T D per block for attention."""
        blocks = list(self.blocks)
        layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
        weights = sum(layer.weight.numel() for layer in layers)
        attention = len(blocks) * config.train_seq_len * config.model_dim
        return 6 * (weights + config.vocab_size * config.model_dim + attention)


# === OPTIMIZERS: Muon trains the blocks' matrices, Adam all else ===
# Some steps must not count: priming steps, and steps after a signal or a fault. A tensor on the
# device, `exchange.counts`, is 1.0 in a step that counts, else 0.0: multiply every change by it.
# Adam's fused kernel gets 1 - counts as `found_inf`, and changes nothing if that is 1.
def newton_schulz(x, iterations, dtype):
    """Approximates the semi-orthogonal matrices nearest to x (n, rows, cols), in `dtype`.

    It does not converge: singular values end between about 0.7 and 1.2, which serves as well and
    takes fewer iterations (https://kellerjordan.github.io/posts/muon/).
    """
    tall = x.size(-2) > x.size(-1)
    x = (x.mT if tall else x).to(dtype)  # (n, short side, long side)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # (n, short side, short side)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum. A group's matrices have one shape and form a batch.

    Each matrix is made orthogonal by one rank, and one all-reduce gives all updates to all ranks.
    So replicas stay bitwise equal, even if the ranks' kernels differ in the last bit.
    """

    def __init__(self, groups, runtime, config, counts):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.runtime = runtime
        self.counts = counts
        self.iterations = config.muon_backend_steps
        self.newton_schulz = newton_schulz  # Trainer compiles it
        self.dtype = torch.bfloat16 if runtime.cuda else torch.float32
        self.matrices = [p for group in self.param_groups for p in group["params"]]
        self.mine = set(self.matrices[runtime.rank :: runtime.world_size])  # its share
        size = sum(p.numel() for p in self.matrices)
        # A vector of all updates for the all-reduce, and a float32 copy to add to the weights.
        self.reduced = torch.zeros(size, dtype=self.dtype, device=runtime.device)
        self.updates = torch.zeros(size, device=runtime.device)
        self.reduced_of = split_as(self.reduced, self.matrices)
        self.update_of = split_as(self.updates, self.matrices)
        for p in self.matrices:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        """Updates momentum and weights if the step counts."""
        self.reduced.zero_()
        momentum = self.param_groups[0]["momentum"]  # the same in all groups
        decay = torch.where(self.counts > 0, momentum, 1.0)  # 1.0: grads are 0, buffers stay
        buffers = {p: self.state[p]["momentum_buffer"] for p in self.matrices}
        torch._foreach_mul_(list(buffers.values()), decay)
        torch._foreach_add_(list(buffers.values()), [p.grad for p in self.matrices])
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in self.mine]
            if mine:
                grads = torch.stack([p.grad for p in mine])  # (n, rows, cols)
                nesterov = grads.add_(torch.stack([buffers[p] for p in mine]), alpha=momentum)
                update = self.newton_schulz(nesterov, self.iterations, self.dtype)
                torch._foreach_copy_([self.reduced_of[p] for p in mine], update.unbind())
        self.runtime.all_reduce(self.reduced)
        self.updates.copy_(self.reduced).masked_fill_(self.counts == 0, 0.0)
        for group in self.param_groups:
            updates = [self.update_of[p] for p in group["params"]]
            rows, cols = group["params"][0].shape
            rate = group["lr"] * max(1.0, rows / cols) ** 0.5  # as in Keller Jordan's Muon
            torch._foreach_add_(group["params"], updates, alpha=-rate)


def split_as(vector, params):
    """{p: its part of a vector, as a view of p's shape}"""
    parts = vector.split([p.numel() for p in params])
    return {p: part.view_as(p) for p, part in zip(params, parts, strict=True)}


def is_named(name, patterns):
    """Does a tensor's name contain one of the comma-separated patterns?"""
    return any(part in name for part in patterns.split(",") if part)


def make_optimizers(model, config, runtime, counts):
    """(Adam, Muon). check_optimizers refuses a parameter in none of their groups, or in two."""
    controls = [model.skip_weights]
    by_shape = defaultdict(list)
    for name, p in model.blocks.named_parameters():
        if p.ndim != 2 or is_named(name, config.control_tensor_name_patterns):
            controls.append(p)
        else:
            by_shape[p.shape].append(p)
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    adam_groups = [
        {"params": [model.tok_emb.weight], "lr": embed_lr},
        {"params": controls, "lr": config.scalar_lr},
    ]
    if not config.tie_embeddings:
        adam_groups.append({"params": [model.lm_head.weight], "lr": config.head_lr})
    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in by_shape.values()]
    betas = config.beta1, config.beta2
    adam = torch.optim.Adam(adam_groups, betas=betas, eps=config.adam_eps, fused=True)
    return adam, Muon(muon_groups, runtime, config, counts)


def progress(config, step, elapsed_ms):
    """The share of the run that is over, 0 to 1: by steps or by time, whichever is larger."""
    share = step / max(config.iterations, 1)
    if config.max_wallclock_seconds > 0:
        share = max(share, elapsed_ms / (1e3 * config.max_wallclock_seconds))
    return min(1.0, share)


def lr_multiplier(config, step, elapsed_ms):
    """The factor on all rates: 1, then a linear fall to 0 over the last WARMDOWN_ITERS steps.

    elapsed_ms: the training time of the `step` steps so far
    """
    if config.warmdown_iters == 0:
        return 1.0
    if config.max_wallclock_seconds <= 0:
        steps_left = (1.0 - progress(config, step, elapsed_ms)) * config.iterations
    else:  # the challenge's rule: by the clock alone, at the mean pace so far
        left_ms = max(0.0, 1e3 * config.max_wallclock_seconds - elapsed_ms)
        steps_left = left_ms * max(step, 1) / max(elapsed_ms, 1e-9)
    return min(1.0, steps_left / config.warmdown_iters)


def muon_momentum(config, step):
    """A linear ramp up to MUON_MOMENTUM."""
    share = min(1.0, step / max(config.muon_momentum_warmup_steps, 1e-9))
    return (1 - share) * config.muon_momentum_warmup_start + share * config.muon_momentum


# === DATA: from shards to batches, ahead of time ===
#  shard files --readinto--> slot.host (pinned) --copy--> slot.tokens --widen--> slot.x, slot.y
#               reader thread      (uint16)   copy stream   (uint16) compute stream  (int64)
# On a CPU there is no copy, and the reader widens, too.
#
# The order of data is the challenge's. A step's tokens are 8 spans, one after the other. In a span,
# x is all but the last token and y all but the first; both are cut into rows. So a span of n
# targets takes n + 1 tokens from the shards, and neighbouring rows of a span share one token.
# With rows of 4 tokens and spans of 2 rows, a span takes 9 tokens:
#    row 0: tokens 0-4   row 1: tokens 4-8   |   row 2: tokens 9-13   row 3: tokens 13-17   | ...
HEADER_BYTES = 1024  # of a shard: 256 int32 (magic, version, tokens, ...); then uint16 tokens
GET_DATA = "run `python3 data/quickstart.py --prepare-only`, or data/cached_challenge_fineweb.py"


class Shards:
    """The shards of a split in the order of their names, as one endless stream of tokens.

    Raises RunError for a folder without shards and for a file that is no whole shard.
    """

    growing = False  # will more shards come? see GrowingShards

    def __init__(self, config, split):
        self.folder = Path(config.data_path).absolute()
        self.split = split
        self.stall_seconds = config.data_stall_seconds
        self.vocab_size = config.vocab_size
        self.paths = []
        self.ends = [0]  # ends[i]: tokens in the first i shards
        self.stamps = {}  # of each file when it was added: a changed file is refused
        self.identities = []  # "name, tokens, checksum" of each shard: what ranks and runs compare
        self.add_all()
        if not self.paths and not self.growing:
            missing = f"no fineweb_{split}_*.bin" if self.folder.is_dir() else "no such folder"
            home = Path(__file__).resolve().parent
            if self.folder.is_file() or any(self.folder.glob("*/fineweb_*.bin")):
                missing = "set the folder that holds the shards"
            elif self.folder != Path(home, config.data_path):
                missing += f" in {Path.cwd()}: cd {home}"
            raise RunError(f"DATA_PATH={config.data_path}: {missing}: {GET_DATA}")

    def add_all(self):
        for path in sorted(self.folder.glob(f"fineweb_{self.split}_*.bin")):
            if path not in self.stamps:
                self.add(path)

    def add(self, path):
        try:
            with open_regular(path) as file:
                self.stamps[path] = stamp(file)
                beginning = file.read(HEADER_BYTES + 2**16)
        except OSError as error:
            raise RunError(f"{path}: no shard: {first_line(error)}: move it away") from error
        size = self.stamps[path][0]
        magic, version, tokens = np.frombuffer(beginning[:12].ljust(12, b"\0"), "<i4").tolist()
        if (magic, version, size) != (20240520, 1, HEADER_BYTES + 2 * tokens) or tokens < 1:
            begins = f"{magic}, {version}, {tokens} tokens in {size} bytes"
            raise RunError(f"{path}: no whole shard ({begins}): fetch it anew, or move it away")
        self.identities.append(f"{path.name}, {tokens} tokens, {zlib.crc32(beginning):08x}")
        self.ends = [*self.ends, self.ends[-1] + tokens]
        self.paths = [*self.paths, path]

    def wait_for(self, token, told_to_stop):
        """Waits until `token` is on disk. In a complete set it always is; see GrowingShards."""

    def pieces(self, first, count):
        """Yields where the `count` tokens from `first` on are: (path, byte offset, bytes)."""
        while count:
            position = first if self.growing else first % self.ends[-1]  # wraps around
            shard = bisect_right(self.ends, position) - 1
            here = min(count, self.ends[shard + 1] - position)
            yield self.paths[shard], HEADER_BYTES + 2 * (position - self.ends[shard]), 2 * here
            first += here
            count -= here


@dataclass(frozen=True)
class BatchPlan:
    """Computes which rows form batch k of this rank. Timing cannot change that."""

    seq_len: int
    span_rows: int
    first_row: int  # of this rank's batch 0
    stride: int  # rows from one batch of this rank to its next
    batch_rows: int
    end_row: int  # exclusive
    first_batch: int = 0  # the k to begin with

    @classmethod
    def train(cls, config, runtime, step=0):
        """In micro-step m, rank r has part m * ranks + r of the step's rows."""
        tokens, seq_len = config.train_batch_tokens, config.train_seq_len
        micro_batches = runtime.world_size * runtime.micro_steps
        fault = batch_tokens_fault(tokens, seq_len, micro_batches)
        if fault:
            raise RunError(f"TRAIN_BATCH_TOKENS={tokens}: {fault}")
        step_rows = tokens // seq_len
        batch_rows = step_rows // micro_batches
        return cls(
            seq_len=seq_len,
            span_rows=step_rows // SPANS_PER_STEP,
            first_row=runtime.rank * batch_rows,
            stride=runtime.world_size * batch_rows,
            batch_rows=batch_rows,
            end_row=sys.maxsize,
            first_batch=step * runtime.micro_steps,
        )

    @classmethod
    def val(cls, config, runtime, tokens):
        """The split, `tokens` long, is one span; every rank has one stretch of its rows."""
        span_rows = (min(tokens, config.val_tokens or tokens) - 1) // config.train_seq_len
        first = span_rows * runtime.rank // runtime.world_size
        end = span_rows * (runtime.rank + 1) // runtime.world_size
        batch_tokens = config.val_batch_size // (runtime.world_size * runtime.micro_steps)
        batch_rows = max(1, min(batch_tokens // config.train_seq_len, end - first))
        return cls(
            seq_len=config.train_seq_len,
            span_rows=span_rows,
            first_row=first,
            stride=batch_rows,
            batch_rows=batch_rows,
            end_row=end,
        )

    @property
    def num_batches(self):
        return math.ceil((self.end_row - self.first_row) / self.stride)

    def rows(self, k):
        """The row numbers of batch k: consecutive ones, a part of a span or some whole spans.

        To change the order, change this. RESUME works with any order: it starts at another k.
        """
        first = self.first_row + k * self.stride
        return range(first, min(first + self.batch_rows, self.end_row))

    def first_token(self, row):
        return row * self.seq_len + row // self.span_rows  # each earlier span has one extra token

    def tokens(self, rows):
        """(first token, number of tokens, number of spans) of a range that `rows` returned"""
        spans = max(1, len(rows) // self.span_rows)
        return self.first_token(rows.start), len(rows) * self.seq_len + spans, spans

    def last_token_of_step(self, rows):
        step_rows = SPANS_PER_STEP * self.span_rows
        return self.first_token((rows.start // step_rows + 1) * step_rows) - 1

    def widen(self, rows, tokens, x, y):
        """Writes the uint16 tokens of some rows into int64 x and y (B, T), in numpy or torch.

        It decides what is scored: a target y of -100 counts nowhere.
        """
        filled = len(rows)
        _, count, spans = self.tokens(rows)
        by_span = tokens[:count].reshape(spans, -1)  # a part of one span, or whole spans
        x[:filled].reshape(spans, -1)[:] = by_span[:, :-1]
        y[:filled].reshape(spans, -1)[:] = by_span[:, 1:]
        x[filled:] = 0  # pads a short last batch: a new shape would be compiled anew
        y[filled:] = -100


def data_crc(plan, rows, tokens):
    """A checksum of rows. Summed over batches it does not depend on the number of ranks.

    The row's number is the start value of its crc32, so that the order of rows counts, too.
    """
    data = memoryview(tokens)
    first = plan.first_token(rows.start)
    total = 0
    for row in rows:
        start = plan.first_token(row) - first
        total += zlib.crc32(data[start : start + plan.seq_len + 1], row)
    return total & 0xFFFFFFFF


class Overlap(NamedTuple):
    """What overlaps in a split: what its settings ask for and this device and mode allow."""

    queue: int  # batches read ahead; 0: each is read when it is asked for
    copy_stream: bool
    device_slots: int  # 2: one uploads while one is in use; 1: uploaded on demand; 0: no CUDA

    @classmethod
    def of(cls, config, split, cuda):
        timing = config.training_timing_breakdown
        prefetch = getattr(config, f"{split}_prefetch") and not timing
        copy_stream = getattr(config, f"{split}_copy_stream") and cuda and not timing
        queue_size = getattr(config, f"{split}_prefetch_queue") if prefetch else 0
        slots = config.gpu_prefetch if prefetch else 1
        return cls(queue_size, copy_stream, slots if cuda else 0)


class Slot:
    """Room for one batch, made once: its tokens on the host and on the device, and x, y."""

    def __init__(self, plan, runtime):
        count = plan.tokens(range(plan.batch_rows))[1]
        shape = (plan.batch_rows, plan.seq_len)
        self.host = torch.empty(count, dtype=torch.uint16, pin_memory=runtime.cuda)
        self.tokens = self.host
        if runtime.cuda:
            self.tokens = torch.empty(count, dtype=torch.uint16, device=runtime.device)
        self.x = torch.zeros(shape, dtype=torch.int64, device=runtime.device)  # (B, T)
        self.y = torch.zeros_like(self.x)
        self.rows = range(0)
        self.digest = 0  # what `digest` made of its tokens: data_crc, or Counts of a validation
        self.copied = None  # event: its upload is over
        self.widened = None  # event: its tokens on the device have been read


class Pipeline:
    """Iterates over this rank's batches of a split: slots with x, y (B, T), rows and digest.

    A batch is valid until the next one is asked for; a signal ends the iteration. Slots go round:
    to_fill -> (the reader's thread) -> filled -> (the copy) -> uploaded -> in use -> to_fill.
    There are as many as are read and uploaded ahead, plus the one in use. With none ahead there is
    just that one, and a batch is read and uploaded when it is asked for.

    A CUDA stream is a queue of work that runs on its own; only events order two of them. Work
    that overwrites waits for the last read, work that reads waits for the last write:
      `copied`, on the copy stream: then the compute stream may widen the tokens, and the reader
      may read the next ones over those that were copied.
      `widened`, on the compute stream: then the copy stream may overwrite the device's tokens.
    x and y need no event: they are written and read on the compute stream alone, in its order.
    (On a CPU the reader writes them, and the queues alone hand a slot over.)
    Each use records a new event: a wait for the event of an earlier use would be over at once.
    """

    def __init__(self, shards, plan, overlap, runtime, *, digest=data_crc, phase=nullcontext):
        self.shards = shards
        self.plan = plan
        self.runtime = runtime
        self.digest = digest
        self.phase = phase
        self.to_fill = queue.SimpleQueue()
        self.filled = queue.SimpleQueue()
        self.uploaded = deque()
        self.uploads_ahead = max(0, overlap.device_slots - 1)
        for _ in range(overlap.queue + self.uploads_ahead):
            self.to_fill.put(Slot(plan, runtime))
        self.in_use = Slot(plan, runtime)
        if runtime.cuda:
            self.compute = torch.cuda.current_stream(runtime.device)
            self.copy = torch.cuda.Stream(runtime.device) if overlap.copy_stream else self.compute
            # Kernels queued earlier may still use the memory that the allocator gave the slots.
            self.copy.wait_event(self.compute.record_event())
        self.batches_left = plan.num_batches - plan.first_batch
        self.bytes_read = 0
        self.waits_ms = []  # per batch: how long the device (on a CPU, the host) waited for it
        self.total_wait_ms = 0.0
        self.wait_events = deque()  # (asked, there): events around each wait, not all reached yet
        self.closed = threading.Event()  # ends the reader
        self.error = None  # what ended the reader
        self.reading = "", math.inf  # where the reader reads, since when
        self.thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self.thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.batches_left or self.runtime.signum:
            raise StopIteration
        self.batches_left -= 1
        self.to_fill.put(self.in_use)  # the previous batch's; at first an unused one
        asked = None
        if self.runtime.cuda:
            asked = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        if not self.uploaded:
            self._upload(self._next_filled())
        self.in_use = self.uploaded.popleft()
        if self.runtime.cuda:
            self._widen(self.in_use, asked)
        # Upload what has been read already, but do not wait here for a later batch.
        while len(self.uploaded) < self.uploads_ahead and not self.filled.empty():
            self._upload(self.filled.get())
        return self.in_use

    def _next_filled(self):
        """Returns the next filled slot. The reader's error is raised after its last good batch."""
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
        """Raises StopIteration after a signal or close(), InputError if the reader fails."""
        if self.runtime.signum or self.closed.is_set():
            raise StopIteration
        reader = f"rank {self.runtime.rank}: the reader"
        where, since = self.reading
        if self.error and self.filled.empty():
            place = "" if isinstance(self.error, RunError) or not where else f"{where}: "
            raise InputError(f"{reader}: {place}{first_line(self.error)}") from self.error
        limit = self.shards.stall_seconds
        if time.monotonic() - since > limit:
            raise InputError(f"{reader} waits for {where} over DATA_STALL_SECONDS={limit:g}")

    def _upload(self, slot):
        """Queues the copy to the device, if there is one; waits for nothing."""
        if self.runtime.cuda:
            with self.phase("h2d"), torch.cuda.stream(self.copy):
                if slot.widened:
                    self.copy.wait_event(slot.widened)
                slot.tokens.copy_(slot.host, non_blocking=True)
                slot.copied = self.copy.record_event(torch.cuda.Event(blocking=True))
        self.uploaded.append(slot)

    def _widen(self, slot, asked):
        """The compute stream waits for the copy, the host does not. The events time the wait."""
        self.compute.wait_event(slot.copied)
        there = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        self.wait_events.append((asked, there))
        self.plan.widen(slot.rows, slot.tokens, slot.x, slot.y)
        slot.widened = self.compute.record_event()
        self._measure_waits()

    def _measure_waits(self):
        while self.wait_events and self.wait_events[0][1].query():  # True: it is over
            asked, there = self.wait_events.popleft()
            self._note_wait(asked.elapsed_time(there))

    def _note_wait(self, ms):
        self.waits_ms.append(ms)
        self.total_wait_ms += ms

    def close(self):
        """Ends the reader within a second, or leaves a stuck one behind."""
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
                slot = self.to_fill.get()  # None after close()
                rows = self.plan.rows(k)
                # Wait for the step's last token, so that all ranks wait for a shard here
                # and none waits in a collective.
                self.shards.wait_for(self.plan.last_token_of_step(rows), self.closed.is_set)
                if self.closed.is_set():
                    return
                if slot.copied:
                    slot.copied.synchronize()  # synchronisation point, of this thread only
                with self.phase("disk_read"):
                    self._fill(slot, rows)
                self.filled.put(slot)
        except BaseException as error:  # any error, or the main thread would wait forever
            self.error = error

    def _fill(self, slot, rows):
        first, count, _ = self.plan.tokens(rows)
        tokens = slot.host.numpy()[:count]
        data = memoryview(tokens).cast("B")
        for path, offset, left in self.shards.pieces(first, count):
            self.reading = f"{path} at byte {offset}", time.monotonic()
            with open_regular(path) as file:
                if stamp(file) != self.shards.stamps[path]:
                    raise RunError(f"{path} at byte {offset}: it was changed during the run")
                file.seek(offset)
                while left:
                    got = file.readinto(data[:left])
                    if not got:
                        raise EOFError(f"{path} ends {left} bytes early: it was changed")
                    data = data[got:]
                    left -= got
        self.reading = "", math.inf
        vocab_size = self.shards.vocab_size
        outside = tokens >= vocab_size
        if outside.any():  # such an index would make a CUDA context unusable
            position = int(outside.argmax())
            path, offset, _ = next(self.shards.pieces(first + position, 1))
            token = tokens[position]
            raise RunError(f"{path} at byte {offset}: token {token}: VOCAB_SIZE={vocab_size}")
        slot.rows = rows
        slot.digest = self.digest(self.plan, rows, tokens)
        if not self.runtime.cuda:
            self.plan.widen(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * count


# === EVALUATION: bits per byte; nats come from the model, bytes from the tokens ===
class ByteTable(NamedTuple):
    """What bits per byte need to know of each token: numpy arrays or tensors (vocabulary,)."""

    base: Any  # UTF-8 bytes, without a leading space
    leading_space: Any  # is there one?
    boundary: Any  # control, unknown, unused: no bytes, and a space after it does not count

    @classmethod
    def of(cls, config):
        """The table of TOKENIZER_PATH; RunError if that does not fit the shards."""
        path = config.tokenizer_path
        try:
            with open_regular(path) as file:
                data = file.read()
            table = cls.load(path, data)
        except Exception as error:  # whatever a bad file raises
            reason = "no SentencePiece model" if type(error) is RuntimeError else first_line(error)
            raise RunError(f"TOKENIZER_PATH={path}: {reason}: {GET_DATA}") from error
        size = len(table.base)
        if size != config.vocab_size:
            raise RunError(f"VOCAB_SIZE={config.vocab_size}: {path} has {size} tokens: set {size}")
        recorded = Path(config.data_path, "tokenizer.sha256")  # data/ writes it as sha256sum would
        if recorded.is_file():
            wanted, _, name = recorded.read_text(errors="replace").strip().partition("  ")
            made_by = os.path.normpath(recorded.parent / name)
            if not re.fullmatch("[0-9a-f]{64}", wanted) or not name:
                raise RunError(f"{recorded}: not what sha256sum writes: make the shards anew")
            if hashlib.sha256(data).hexdigest() != wanted:
                remedy = f"set {made_by}" if Path(made_by).is_file() else f"{made_by} is missing"
                raise RunError(f"TOKENIZER_PATH={path}: it did not make these shards: {remedy}")
        return table

    @classmethod
    def load(cls, path, data):
        """The table of a SentencePiece .model, or of a byte tokenizer's .json in either form."""
        if path.endswith(".json"):
            form = json.loads(data)
            offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
            boundary = np.arange(256 + min(offset, 2**16)) < offset  # lower ids are controls
            return cls(1 - boundary, np.zeros_like(boundary), boundary)
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        ids = list(range(len(model)))
        pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]  # its space
        boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], 0)
        space = np.array([piece.startswith(" ") for piece in pieces]) & ~boundary
        size = np.where(model.is_byte(ids), 1, [len(piece.encode()) for piece in pieces] - space)
        return cls(size * ~boundary, space, boundary)

    def count(self, x, y):
        """The bytes of the targets y, each after its x, both (B, T); y = -100 counts nothing."""
        scored = y >= 0
        target = y * scored  # 0, a valid index, where there is no target
        spaces = self.leading_space[target] & ~self.boundary[x]
        return ((self.base[target] + spaces) * scored).sum()


class Counts(NamedTuple):
    """What the reader's thread counts in one batch of a validation."""

    targets: int
    bytes: int


class Validation:
    """Scores the validation split; every validation counts its targets and bytes anew."""

    def __init__(self, config, runtime, log, phase):
        self.runtime = runtime
        self.log = log
        self.phase = phase
        self.shards = open_shards(config, "val")
        self.plan = BatchPlan.val(config, runtime, self.shards.ends[-1])
        self.targets = self.plan.span_rows * self.plan.seq_len  # over all ranks, if all are scored
        self.partial = {"partial_val": 1} if config.val_tokens else {}  # for the log
        self.overlap = Overlap.of(config, "val", runtime.cuda)
        self.log_every = config.val_progress_log_every
        self.byte_table = ByteTable.of(config)
        self.device_table = None
        if config.val_bytecount_device == "cuda":
            self.device_table = ByteTable(*(torch.tensor(t).cuda() for t in self.byte_table))

    def count(self, plan, rows, tokens):
        """Counts of a batch, in the reader's thread: of exactly what `widen` marks as scored."""
        x = np.zeros((len(rows), plan.seq_len), np.int64)
        y = np.zeros_like(x)
        plan.widen(rows, tokens, x, y)
        in_bytes = 0 if self.device_table else int(self.byte_table.count(x, y))
        return Counts(targets=int((y >= 0).sum()), bytes=in_bytes)

    def score(self, loss, batch, sums):
        """Adds a batch's nats, bytes and targets to `sums`. `loss` is a function, see evaluate."""
        nats = 0.0
        if batch.digest.targets:  # the mean of none is nan
            with self.phase("forward"):
                nats = loss(batch.x, batch.y).double() * batch.digest.targets
        in_bytes = batch.digest.bytes
        if self.device_table:
            in_bytes = self.device_table.count(batch.x, batch.y)
        sums[0] += nats
        sums[1] += in_bytes
        sums[2] += batch.digest.targets

    @torch.no_grad()
    def evaluate(self, loss, scope):
        """(nats per token, bits per byte, ms) of the whole split; all ranks take part.

        loss: (x, y), both (B, T), -> mean nats per target. Raises HaltError after a signal.
        """
        runtime = self.runtime
        runtime.synchronize()  # a synchronisation point
        start = time.perf_counter()
        # nats, bytes, targets, and the signal of each rank
        sums = torch.zeros(3 + runtime.world_size, dtype=torch.float64, device=runtime.device)
        batches = Pipeline(
            self.shards, self.plan, self.overlap, runtime, digest=self.count, phase=self.phase
        )
        with closing(batches), self.phase("validate"):
            try:
                for done, batch in enumerate(batches, 1):
                    self.score(loss, batch, sums)
                    if is_due(self.log_every, done):  # a synchronisation point
                        nats, _, seen = sums[:3].tolist()
                        self.log.line(
                            f"val_progress:{scope} batch {done}/{self.plan.num_batches} "
                            f"partial_mean_loss:{nats / max(seen, 1):.4f} tokens_seen:{seen:.0f}"
                        )
            except InputError as error:
                runtime.fail(error)
        sums[3 + runtime.rank] = runtime.signum
        nats, in_bytes, targets, *signals = runtime.all_reduce(sums).tolist()  # synchronises
        if any(signals):
            raise HaltError(int(max(signals)), signals.index(max(signals)))
        if not targets or not in_bytes:
            raise RunError(f"validation scores {targets:.0f} targets of {in_bytes:.0f} bytes")
        ms = 1e3 * (time.perf_counter() - start)
        return nats / targets, nats / math.log(2) / in_bytes, ms


# === ARTIFACT: the challenge's format: int8 with a scale per row, then zlib ===
QUANT_FORMAT = "int8_clean_per_row_v1"
FINAL = "final_int8_zlib_roundtrip"  # its log line; parsers of the challenge look for it
CAP = 16_000_000  # bytes of script and artifact
SMALL = 65_536  # numbers; a tensor of at most so many is not quantized, as in the challenge
CLIP_QUANTILE = 0.9999984  # of a row's absolute values: a larger one is clipped
LEVELS = 127  # quantized numbers are whole, from -LEVELS to LEVELS
# The least scale of a row is the challenge's: steps of at least 1/127. So a row whose largest
# weight is below 1 uses fewer levels; one near 0.01 uses only -1, 0 and 1. If you make weights
# smaller (weight decay) or use fewer levels, lower it: with 2.0**-14 small rows keep their levels.
LEAST_SCALE = 1 / 127


def storage(name, t, config):
    """How a tensor is stored: "int8", "float32", "float16", or "as it is" if it is no float."""
    if not t.is_floating_point():
        return "as it is"
    if t.numel() > SMALL:
        return "int8"
    return "float32" if is_named(name, config.int8_keep_float_fp32_name_patterns) else "float16"


def quantize(t, levels=LEVELS, least_scale=LEAST_SCALE):
    """Returns (int8 of t's shape, scale): a float16 (rows,) for a matrix, else a float32 scalar."""
    t = t.float()
    matrix = t.ndim == 2
    clip = t.abs().quantile(CLIP_QUANTILE, dim=1 if matrix else None, keepdim=True)
    if matrix:
        scale = (clip / levels).clamp(least_scale)
    else:
        scale = torch.where(clip > 0, clip / levels, 1.0)
    q = (t.clamp(-clip, clip) / scale).round().clamp(-levels, levels).to(torch.int8)
    return q, scale[:, 0].half() if matrix else scale.view(())


def dequantize(q, scale):
    return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))  # (rows, 1) * matrix


class Packed(NamedTuple):
    """An artifact, and what the log says of it."""

    data: bytes
    payload: int  # bytes of its tensors
    raw: int  # bytes before compression
    stored: str  # how its tensors are stored, in words


def pack(state, config):
    """Quantizes, serializes and compresses a state dict on the CPU."""
    file = {"__quant_format__": QUANT_FORMAT, "quantized": {}, "scales": {}, "dtypes": {}}
    file |= {"passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
    count = dict.fromkeys(("int8", "float16", "float32"), 0)
    errors = []
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        kind = storage(name, t, config)
        count[kind] = count.get(kind, 0) + 1
        if kind == "int8":
            q, scale = quantize(t)
            file["quantized"][name] = q
            file["scales"][name] = scale
            file["dtypes"][name] = dtype
            if t.ndim == 2:
                file["qmeta"][name] = {"scheme": "per_row", "axis": 0}
            error = (dequantize(q, scale) - t).norm() / t.norm().clamp(min=1e-30)
            errors.append(float(error))
        elif kind == "float16":
            file["passthrough"][name] = t.half()
            file["passthrough_orig_dtypes"][name] = dtype
        else:
            file["passthrough"][name] = {"float32": t.float(), "as it is": t}[kind]
    raw = torch_bytes(file)
    parts = [*file["quantized"].values(), *file["scales"].values(), *file["passthrough"].values()]
    words = ", ".join(f"{number} {kind}" for kind, number in count.items())
    stored = f"stored: {words}, mean error {100 * np.mean(errors or [0.0]):.1f} %"
    return Packed(zlib.compress(raw, 9), sum(t.nbytes for t in parts), len(raw), stored)


def shapes(state):
    return {name: t.shape for name, t in state.items()}


def unpack(data, expected):
    """The state dict in an artifact, ours or the challenge's; RunError if it does not fit."""
    try:
        file = torch.load(io.BytesIO(zlib.decompress(data)), "cpu", weights_only=True)
        if file["__quant_format__"] != QUANT_FORMAT:
            raise ValueError("it has another format")
        state = dict(file["passthrough"])
        for name, q in file["quantized"].items():
            state[name] = dequantize(q, file["scales"][name])
        if shapes(state) != shapes(expected):
            raise ValueError("its tensors are those of another model")
        return {name: state[name].to(t.dtype) for name, t in expected.items()}
    except Exception as error:  # whatever a bad file raises
        raise RunError(f"no artifact of this model: {first_line(error)}") from error


# === TRAINING ===
class Trainer:
    """A run: the model and all that trains it, the same on every rank."""

    def __init__(self, config, runtime, log):
        self.config = config
        self.runtime = runtime
        self.log = log
        self.clock = Clock(runtime)
        self.phase = Phases(config, runtime, log)
        torch.manual_seed(config.seed)
        self.model = GPT(config, runtime.dtype).to(runtime.device)
        self.exchange = Exchange(self.model, runtime, self.clock)
        self.adam, self.muon = make_optimizers(self.model, config, runtime, self.exchange.counts)
        self.shards = open_shards(config, "train", log)
        self.overlap = Overlap.of(config, "train", runtime.cuda)
        self.validation = Validation(config, runtime, log, self.phase)
        self.checkpoints = Checkpoints(config, runtime, log)
        self.val_ms = 0.0  # time of all validations
        self.logged = 0, 0.0, 0.0  # step, ms and input wait of the last step line
        self.begin(step=0, data_crc=0)
        check_optimizers(self)
        if config.torch_compile == "1" or (config.torch_compile == "auto" and runtime.cuda):
            self.model.compile(dynamic=False)
            self.muon.newton_schulz = torch.compile(newton_schulz, dynamic=False)

    @property
    def optimizers(self):
        """Every optimizer that the Trainer holds, also in lists and dicts."""
        return [part for part in held_parts(self) if isinstance(part, torch.optim.Optimizer)]

    def begin(self, step, data_crc):
        """Continues after `step` steps: 0, or those before priming or in a checkpoint."""
        self.step = step
        # The checksum of this rank's rows; rank 0's also carries that of the rows before `step`.
        self.crc = data_crc if self.runtime.rank == 0 else 0
        self.exchange.begin(step, self.clock.total_ms, data_crc)

    def batches(self):
        plan = BatchPlan.train(self.config, self.runtime, self.step)
        return Pipeline(self.shards, plan, self.overlap, self.runtime, phase=self.phase)

    @torch.no_grad()  # only the forward pass records what the gradients need
    def train_step(self, batches):
        """Queues one step. On CUDA the host waits for nothing but input, in `batches`."""
        config = self.config
        exchange = self.exchange
        phase = self.phase
        micro_batches = self.runtime.micro_steps * self.runtime.world_size
        seed_step(config, self.runtime, self.step)
        exchange.vector.zero_()
        loss_sum = 0.0
        try:
            for batch in islice(batches, self.runtime.micro_steps):  # fewer after a signal
                with phase("forward"), torch.enable_grad():
                    loss = self.model(batch.x, batch.y) / micro_batches  # their sum is the mean
                with phase("backward"):
                    exchange.backward(loss)
                loss_sum += loss.detach()
                self.crc = (self.crc + batch.digest) & 0xFFFFFFFF
        except InputError as error:
            self.runtime.fail(error)
        with phase("reduce"):
            exchange.all_reduce(self.step, batches.total_wait_ms, self.crc, loss_sum)
        with phase("grad_clip"):
            if config.grad_clip_norm > 0:
                norm = exchange.gradients.norm() + 1e-6
                exchange.gradients.mul_((config.grad_clip_norm / norm).clamp(max=1.0))
        self.checkpoints.state_is_whole = False  # half a step must not be saved
        with phase("optimizer"):
            scale = lr_multiplier(config, self.step, exchange.elapsed_ms(self.step))
            for group in self.muon.param_groups:
                group["momentum"] = muon_momentum(config, self.step)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = scale * group["base_lr"]
                optimizer.step()
        # Whatever else a step changes belongs here, for example an average of the weights. Priming
        # steps and steps after a signal must change nothing, so multiply by exchange.counts:
        #     average.lerp_(weight, (1 - decay) * exchange.counts)
        self.step += 1
        self.checkpoints.state_is_whole = True

    def train(self):
        """The run: steps, and from time to time a line, a validation, a checkpoint."""
        config = self.config
        clock = self.clock
        prime(self)
        begun_ms = clock.total_ms
        self.logged = self.step, begun_ms, 0.0
        with closing(self.batches()) as batches:
            self.phase.begin_trace()
            clock.start()
            while True:
                # Read messages of some steps ago: the device has later work, so it never idles.
                self.exchange.read(self.step - self.runtime.steps_late)
                # A step that would end after the cap is not begun.
                next_ms = self.exchange.elapsed_ms(self.step + 1)
                capped = 0 < 1e3 * config.max_wallclock_seconds < next_ms
                if capped or self.step >= config.iterations:
                    break
                if is_due(config.val_loss_every, self.step):
                    self.validate()
                warn_of_new_epoch(self)
                self.train_step(batches)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    log_step(self)
                if is_due(config.checkpoint_every, self.step):
                    self.checkpoints.save_in_background(snapshot(self))
                self.phase.end_step(self.step)
            if self.step > self.logged[0]:
                log_step(self)
            clock.stop()
            self.checkpoints.keep_final(snapshot(self))
            self.validate()
            clock.stop()
        if self.phase.profiler:
            self.phase.profiler.stop()  # the run was shorter than TRACE_STEPS
        if capped:
            ended = f"train_time:{clock.total_ms:.0f}ms step:{self.step}/{config.iterations}"
            self.log.line(f"stopping_early: wallclock_cap {ended}")
        log_input(self, batches, begun_ms)

    def evaluate(self, scope):
        """(nats per token, bits per byte, ms) of the model as it is now"""
        self.model.eval()
        result = self.validation.evaluate(self.model, scope)
        self.model.train()
        return result

    def validate(self):
        self.exchange.read(self.step)
        self.clock.stop()
        loss, bpb, ms = self.evaluate(f"step_{self.step}")
        self.val_ms += ms
        log_validation(self, loss, bpb, ms)
        self.clock.start()

    def export_and_score(self, code_bytes):
        """Rank 0 packs the artifact, all ranks score it, and only then rank 0 writes files.

        Returns what went wrong, or "": a full disk costs files, not the score.
        """
        state = {name: t.cpu() for name, t in self.checkpoints.final["held"]["model"].items()}
        model = torch_bytes(state)
        data = None
        if self.runtime.rank == 0:
            packed = pack(state, self.config)
            data = packed.data
            log_sizes(self.log, state, len(model), packed, code_bytes)
        data = self.runtime.broadcast(data)
        self.model.load_state_dict(unpack(data, state))
        loss, bpb, ms = self.evaluate(FINAL)
        log_score(self, loss, bpb, ms)
        problems = []
        if self.runtime.rank == 0:
            problems.append(write_atomic(Path("final_model.int8.ptz"), data))
            problems.append(write_atomic(Path("final_model.pt"), model))
        if not math.isfinite(loss):
            problems.append(f"the score is {loss}: lower the learning rates and start anew")
        problems.append(find_score_fault(self))
        return "; ".join(filter(None, problems))


def is_due(every, step):
    return every > 0 and step % every == 0


# ===== MACHINERY: keeps a run fast, safe and measurable; an experiment need not change it =====
# === EXCHANGE: a step's one all-reduce of gradients, and all that ranks tell each other in it ===
class Message(NamedTuple):
    """What a rank tells the others. Float32 is exact here: each entry is added to zeros only."""

    steps: float  # how many its device is known to have finished
    elapsed_ms: float  # the training time at that step
    wait_ms: float  # for input, so far
    signum: float  # of a signal that it heard, or NO_INPUT, or 0
    crc_low: float  # data_crc of the rows that it trained on: its lower 16 bits
    crc_high: float  # and its upper ones
    loss: float = 0.0  # its share of the mean loss, filled in on the device
    fault: float = 0.0  # 1: loss or gradient are not finite; filled in on the device


SIGNUM = Message._fields.index("signum")
LOSS = Message._fields.index("loss")
FAULT = Message._fields.index("fault")


class Exchange:
    """All gradients are views of one vector; behind them lies a table with one Message per rank.

    A rank writes its own row and leaves the others zero, so the sum over ranks is the whole table.
    The host reads it some steps later, when it is surely there: nothing drains the device, and all
    ranks decide alike, because they read the same table at the same step. The device decides for
    itself: after a table with a signal or a fault `counts` is 0, and no step changes anything.

    Clocks, each (steps, ms of training time):
      done_here   what this rank's device has done, as far as this host knows; it tells the others
      agreed      what rank 0 had done, as all ranks have read it; the schedule goes by it
      pace_start  `agreed` after step 1, which may be slow; the pace is measured from there
    """

    def __init__(self, model, runtime, clock):
        # An empty tensor (skip_weights of one layer) has no gradient.
        named = {name: p for name, p in model.named_parameters() if p.numel()}
        for name, p in named.items():
            if not p.requires_grad or p.dtype != torch.float32:
                advice = "cast it in GPT.logits, or make it a buffer"
                raise RunError(f"{name} is not float32, or is not trained: {advice}")
        self.names = list(named)
        self.params = list(named.values())
        self.runtime = runtime
        self.clock = clock
        size = sum(p.numel() for p in self.params)
        shape = runtime.world_size, len(Message._fields)
        self.vector = torch.zeros(size + math.prod(shape), device=runtime.device)
        self.gradients = self.vector[:size]
        self.table = self.vector[size:].view(shape)
        for p, part in split_as(self.gradients, self.params).items():
            p.grad = part
        self.counts = torch.ones((), device=runtime.device)  # 1.0, or 0.0: this step must not count
        self.found_inf = torch.zeros((), device=runtime.device)  # 1 - counts, for fused optimizers
        tables = runtime.steps_late + 2  # on their way at most
        self.sent = torch.zeros(tables, shape[1], pin_memory=runtime.cuda)
        self.received = torch.zeros(tables, *shape, pin_memory=runtime.cuda)
        self.unread = deque()  # (step, its table on the host, the event after which it is there)

    def begin(self, step, elapsed_ms, data_crc):
        """Goes on after `step`; what was exchanged before is forgotten."""
        self.unread.clear()
        self.set_counts(True)
        self.counted = step  # steps whose tables have been read, and counted
        self.messages = [Message(step, elapsed_ms, wait_ms=0.0, signum=0.0, **crc_parts(data_crc))]
        self.done_here = self.agreed = self.pace_start = step, elapsed_ms

    def set_counts(self, value):
        self.counts.fill_(float(value))
        self.found_inf.fill_(float(not value))

    def backward(self, loss):
        """Adds a loss's gradients to p.grad at once; loss.backward() would add them one by one.

        Raises RunError for a parameter without a gradient.
        """
        # Keep them: freed at a random moment by autograd's thread, they would raise peak memory.
        self.kept = torch.autograd.grad(loss, self.params, allow_unused=True)
        if any(part is None for part in self.kept):  # `in` would compare tensors: 20 us for each
            name = self.names[self.kept.index(None)]
            raise RunError(f"{name} has no gradient: use it in GPT.logits, or remove it")
        torch._foreach_add_([p.grad for p in self.params], self.kept)

    def all_reduce(self, step, wait_ms, crc, loss):
        """Sums gradients and table, decides on `counts`, and sends the table to the host.

        No synchronisation point on CUDA: `read` is.
        """
        steps, elapsed_ms = self.done_here
        message = Message(steps, elapsed_ms, wait_ms, self.runtime.signum, **crc_parts(crc))
        sent = self.sent[step % len(self.sent)]
        received = self.received[step % len(self.received)]
        sent.copy_(torch.tensor(message))
        mine = self.table[self.runtime.rank]
        mine.copy_(sent, non_blocking=True)
        mine[LOSS] = loss
        mine[FAULT] = ~torch.isfinite(loss + self.gradients.sum())
        self.runtime.all_reduce(self.vector)
        ended = self.table[:, SIGNUM].sum() + self.table[:, FAULT].sum() > 0
        self.counts.masked_fill_(ended, 0.0)
        self.found_inf.masked_fill_(ended, 1.0)
        self.gradients.masked_fill_(self.found_inf > 0, 0.0)
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
                if message.signum:
                    raise HaltError(int(message.signum), rank)
                if message.fault:
                    raise HaltError(f"rank {rank}: step {step + 1}: loss or gradient not finite")
            self.messages = messages
            self.counted = step + 1
            # Steps whose events have been reached are done, too, though their tables are unread.
            later = sum(event.query() for _, _, event in self.unread if event)
            self.done_here = step + 1 + later, self.clock.now_ms()
            self.agreed = max(self.agreed, (messages[0].steps, messages[0].elapsed_ms))

    def agree(self, step, ms):
        """A log line has told all ranks the time of `step`."""
        self.agreed = step, ms
        if step == 1:
            self.pace_start = self.agreed

    def elapsed_ms(self, step):
        """Training time of `step` steps: the last one that all ranks know, plus the steps since
        then at the pace since step 1."""
        steps, ms = self.agreed
        first_steps, first_ms = self.pace_start
        pace_ms = (ms - first_ms) / (steps - first_steps) if steps > first_steps else 0.0
        return ms + pace_ms * (step - steps)

    def loss(self):
        return sum(message.loss for message in self.messages)

    def wait_ms(self):
        """That of the rank that has waited longest for input."""
        return max(message.wait_ms for message in self.messages)

    def data_crc(self):
        total = sum(int(each.crc_low) + (int(each.crc_high) << 16) for each in self.messages)
        return total & 0xFFFFFFFF


def crc_parts(crc):
    return {"crc_low": crc & 0xFFFF, "crc_high": crc >> 16}


def seed_step(config, runtime, step):
    """Random numbers of an edit (dropout) are the same after RESUME."""
    torch.manual_seed(config.seed + 1_000_003 * (step * runtime.world_size + runtime.rank + 1))


# === RUNTIME: this process among its ranks, what it says, its files ===
class RunError(Exception):
    """A foreseeable failure, in one line: what, where, which value, what to do."""


class InputError(RunError):
    """A rank has no more input."""


class HaltError(Exception):
    """All ranks end after the same step: (a signal's number, NO_INPUT or a text; of which rank)."""


NO_INPUT = 1000  # no signal has that number
CONTROL_CHARACTER = re.compile("[\0-\b\v-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text):
    """Escapes what could move a terminal's cursor or break its encoding."""
    return CONTROL_CHARACTER.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def first_line(error):
    text = getattr(error, "strerror", None) or str(error)
    return (text.strip() or repr(error)).splitlines()[0]


def tell(text, stream="stdout"):
    """Prints. A full or closed console costs the text and nothing else."""
    with suppress(OSError, ValueError, AttributeError):
        # One write: under torchrun's python -u two ranks' lines would run together.
        print(printable(text) + "\n", end="", file=getattr(sys, stream), flush=True)


class Runtime:
    """This process: rank, device, dtype of the activations, and the first signal that it heard."""

    def __init__(self, config, env):
        self.rank = int(env.get("RANK", 0))
        self.world_size = int(env.get("WORLD_SIZE", 1))
        self.micro_steps = config.micro_steps(self.world_size)
        self.signum = 0  # why this rank wants to end: a signal, or NO_INPUT
        self.problem = ""  # in words, for NO_INPUT
        self.ctrl_c = False  # has one been heard?
        self.cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{env.get('LOCAL_RANK', 0)}" if self.cuda else "cpu")
        native = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        self.dtype = torch.bfloat16 if native else torch.float32  # of the activations
        self.hardware = torch.cuda.get_device_name(self.device) if self.cuda else os.uname().machine
        # The host reads results this many steps late, so that it never waits for the device.
        self.steps_late = 2 if self.cuda else 0

    def start(self, env):
        """Signals, device, process group: from here on collectives work."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup a hang-up stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.hear)
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        if "RANK" in env:
            timeout = timedelta(minutes=5)  # of every wait for other ranks
            # torchrun's store outlives a restart: a prefix hides addresses of dead processes.
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                timeout=timeout,
                device_id=self.device if self.cuda else None,
                rank=self.rank,
                world_size=self.world_size,
                store=store,
            )

    def hear(self, signum, frame):
        """Notes a signal. The next exchange tells all ranks: they end after the same step."""
        self.signum = self.signum or signum
        if signum == signal.SIGINT and not self.ctrl_c:
            self.ctrl_c = True
            # torchrun repeats a terminal's Ctrl-C at once. A later one ends this process.
            signal.signal(signal.SIGALRM, lambda *_: signal.signal(signum, signal.SIG_DFL))
            signal.setitimer(signal.ITIMER_REAL, 1.0)

    def fail(self, error):
        """Notes that this rank has no input: as after a signal, all ranks save and end."""
        self.signum = NO_INPUT
        self.problem = str(error)

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
        """Raises RunError on all ranks if a fact {name: value} differs between them."""
        everyone = [facts] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(everyone, facts)  # a synchronisation point
        for name in sorted(set().union(*everyone)):
            ranks = {
                str(theirs[name]): rank for rank, theirs in enumerate(everyone) if name in theirs
            }
            if len(ranks) > 1:
                who = ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())
                raise RunError(f"ranks differ in {name}: {who}: make it the same on all")


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id, enabled=True, resumed=False):
        self.path = Path("logs", f"{run_id}.txt")
        self.enabled = enabled
        self.complained = False
        self.lock = None  # the open log: held for the life of the process
        if not enabled:
            return
        files = self.path, self.path.with_suffix(".jsonl"), Path("checkpoints", run_id)
        older = [path for path in files if path.exists() and not resumed]
        self.hold()
        for path in older:
            set_aside(path)
        if self.path in older:
            self.hold()

    def hold(self):
        """No other run of this RUN_ID may begin while this one lives."""
        in_use = RunError(f"{self.path} is in use by a run: set another RUN_ID")
        try:
            self.path.parent.mkdir(exist_ok=True)
            lock = self.path.open("a", encoding="utf-8")
        except OSError:
            return  # `write` says so
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use from None
        except OSError as error:
            tell(f"warning: {self.path} cannot be locked: {first_line(error)}", "stderr")
        if stamp(lock)[2] != self.path.stat().st_ino:  # it was just moved aside
            raise in_use
        self.lock = lock

    def console(self, text):
        if self.enabled:
            tell(text)

    def line(self, text):
        """For people: the console and the .txt."""
        self.console(text)
        self.write(".txt", printable(text))

    def event(self, name, **values):
        """For tools: a line of JSON in the .jsonl."""
        self.write(".jsonl", json.dumps({"event": name, "time": round(time.time(), 3), **values}))

    def write(self, suffix, text):
        try:
            if self.enabled:
                self.path.parent.mkdir(exist_ok=True)
                with open(self.path.with_suffix(suffix), "a", encoding="utf-8") as file:
                    print(text, file=file)
        except OSError as error:  # a full disk costs lines, not the run
            if not self.complained:
                tell(f"warning: {self.path}: lines are lost: {first_line(error)}", "stderr")
            self.complained = True


def set_aside(path):
    """Gives what an older run has written a free name, and returns that."""
    when = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{path.stem}.{when}{again}{path.suffix}" for again in ("", *range(2, 99)))
    aside = next(free for free in map(path.with_name, names) if not free.exists())
    try:
        path.rename(aside)
    except OSError as error:
        raise RunError(f"{path}: {first_line(error)}: set another RUN_ID") from error
    return aside


def write_atomic(path, data):
    """Writes under a temporary name and renames when complete. Returns what went wrong, or ""."""
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
            temporary.unlink()
        return f"{path}: cannot write {len(data)} bytes: {first_line(error)}"


def open_regular(path):
    """A file opened for reading; OSError for a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("no regular file")
    return open(path, "rb", buffering=0)


def stamp(file):
    """(size, time of change, inode) of an open file"""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


def torch_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


# .producing in a data folder means that more shards will come. Its producer (data/producer.py)
# moves the counter in it while it lives, and removes it when the set is complete.
class GrowingShards(Shards):
    """Training shards that join in the order of their numbers, as they appear."""

    growing = True  # until the set is complete

    def __init__(self, config, split, log=None):
        self.log = log
        super().__init__(config, split)

    def next_path(self):
        return self.folder / f"fineweb_{self.split}_{len(self.paths):06d}.bin"

    def add_all(self):
        while self.next_path().is_file():
            self.add(self.next_path())

    def wait_for(self, token, told_to_stop):
        """Returns when `token` is on the disk, or when the set is complete without it."""
        watch = ProducerWatch(self.folder, self.stall_seconds)
        while self.growing and token >= self.ends[-1] and not told_to_stop():
            at_work = watch.look(self.next_path().name)
            self.add_all()
            if not at_work:
                super().add_all()
                if not self.paths:
                    raise RunError(f"{self.folder}: complete without a training shard: {GET_DATA}")
                self.growing = False
            elif token >= self.ends[-1]:
                if self.log:
                    self.log.line(f"waiting for {self.next_path()}: it is being made")
                    self.log.event("stall", shard=str(self.next_path()))
                    self.log = None
                time.sleep(0.05)

    def wait_for_producer(self, told_to_stop):
        """Returns when the producer lives, or has completed the set."""
        watch = ProducerWatch(self.folder, self.stall_seconds)
        while watch.look(self.next_path().name) and watch.moves < 2 and not told_to_stop():
            time.sleep(0.05)


class ProducerWatch:
    """Looks at .producing: is its producer at work?"""

    def __init__(self, folder, stall_seconds):
        self.folder = folder
        self.stall_seconds = stall_seconds
        self.progress = None
        self.moves = 0  # how often the counter was seen to move
        self.since = time.monotonic()  # when it was last seen to move

    def look(self, waiting_for):
        """False when the set is complete; RunError when its producer has failed or left."""
        state = read_producing(self.folder)
        if not state:
            return False
        if state["progress"] != self.progress:
            self.progress = state["progress"]
            self.moves += 1
            self.since = time.monotonic()
        reason = state.get("error")
        if not reason and time.monotonic() - self.since > self.stall_seconds:
            reason = "its producer has left"
        if reason:
            command = state.get("command") or "start its producer again"
            raise RunError(
                f"{self.folder}: the set is incomplete: {reason}, "
                f"{waiting_for} is missing: to go on: {command}"
            )
        return True


def read_producing(folder):
    """What .producing says; {} if there is none."""
    path = folder / ".producing"
    try:
        with open_regular(path) as file:
            return {"progress": None, **json.loads(file.read())}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: no JSON of a producer: {first_line(error)}: remove it") from error


def open_shards(config, split, log=None):
    """The shards of a split; a validation split that is still being made is waited for."""
    folder = Path(config.data_path)
    producing = read_producing(folder)
    if split == "train":
        return GrowingShards(config, split, log) if producing else Shards(config, split)
    watch = ProducerWatch(folder, config.data_stall_seconds)
    while not producing.get("val_complete") and watch.look("a validation shard"):
        producing = read_producing(folder)
        time.sleep(0.05)
    return Shards(config, split)


# === CHECKPOINTS: what a run goes on from ===
def held_parts(run):
    """All that a run's attributes hold, also in lists and dicts."""
    waiting = list(vars(run).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        else:
            yield value


def held_state(run):
    """{attribute: a copy} of all that training may change: whatever has a state_dict, tensors and
    numbers, also in lists and dicts. RunError for what cannot be saved."""
    tools = Config, Runtime, RunLog, Clock, Phases, Exchange, Shards, Overlap, Validation
    return {
        name: copy_state(value, f"Trainer.{name}")
        for name, value in vars(run).items()
        if not isinstance(value, (*tools, Checkpoints))
    }


def copy_state(value, name):
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return copy.deepcopy(value.state_dict())
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_state(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_state(part, f"{name}[{i}]") for i, part in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if inspect.isroutine(value) or inspect.isclass(value):
        return None
    kind = type(value).__name__
    raise RunError(f"{name} is a {kind}: checkpoints need its state_dict and load_state_dict")


def restore_state(mine, saved, name):
    """Returns the attribute with `saved` restored into it. Objects keep their identity."""
    if isinstance(mine, torch.optim.Optimizer):
        saved = saved | {"param_groups": mine.state_dict()["param_groups"]}  # this run's rates
    if hasattr(mine, "state_dict"):
        had = {p: set(state) for p, state in getattr(mine, "state", {}).items()}
        mine.load_state_dict(saved)
        check_state(mine, had, name)
        return mine
    if torch.is_tensor(mine):
        if mine.shape != saved.shape:
            raise ValueError(f"{name} has another shape")
        mine.detach().copy_(saved)
        return mine
    if isinstance(mine, dict) and mine.keys() == saved.keys():
        return {key: restore_state(mine[key], saved[key], f"{name}[{key!r}]") for key in mine}
    if isinstance(mine, (list, tuple)) and len(mine) == len(saved):
        pairs = enumerate(zip(mine, saved, strict=True))
        return type(mine)([restore_state(*pair, f"{name}[{i}]") for i, pair in pairs])
    if isinstance(mine, (int, float)) and not isinstance(saved, (int, float)):
        raise ValueError(f"{name} is no number")
    return mine if inspect.isroutine(mine) else saved


def check_state(part, had, name):
    """ValueError where what an optimizer has loaded does not fit: torch checks neither."""
    if any(names - part.state.get(p, {}).keys() for p, names in had.items()):
        raise ValueError(f"{name} lacks a part of its state")
    for p, state in getattr(part, "state", {}).items():
        if any(t.ndim and t.shape != p.shape for t in state.values() if torch.is_tensor(t)):
            raise ValueError(f"{name} holds a tensor of another shape")


def state_by_name(value, name=""):
    """(name, tensor or number) of all in a copied state, but for the rates of optimizers"""
    if isinstance(value, dict):
        parts = [(key, part) for key, part in value.items() if key != "param_groups"]
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        yield name, value
        return
    for key, part in parts:
        yield from state_by_name(part, f"{name}.{key}" if name else str(key))


def is_same(before, after):
    """Is a part of a copied state unchanged? `before` is None for what was made since."""
    if not torch.is_tensor(after):
        return before == after
    if before is None:  # an optimizer makes its state in its first step: it must still be zero
        return not after.any()
    return torch.equal(before, after)


def require_unchanged(before, after):
    """RunError if two copied states differ: then something ignores Exchange.counts."""
    old = dict(state_by_name(before))
    for name, value in state_by_name(after):
        if not is_same(old.get(name), value):
            advice = "multiply what a step changes by exchange.counts, see the end of train_step"
            raise RunError(f"Trainer.{name} was changed by a step that does not count: {advice}")


def snapshot(run):
    """All there is to go on from, as a copy. A synchronisation point; HaltError after a fault."""
    held = held_state(run)
    run.runtime.synchronize()
    run.exchange.read(run.step)
    return {
        "held": held,
        "settings": run.config.as_text(),
        "shards": list(run.shards.identities),
        "step": run.step,
        "train_ms": run.clock.now_ms(),
        "data_crc": run.exchange.data_crc(),
    }


def restore(run, state):
    """Goes on from a snapshot. Rates and the like are this run's."""
    held = state["held"]
    names = held_state(run).keys()
    if names != held.keys():
        other = ", ".join(sorted(names ^ held.keys()))
        raise RunError(f"the checkpoint is of another script: this Trainer differs in {other}")
    for name, saved in held.items():
        setattr(run, name, restore_state(getattr(run, name), saved, name))
    run.clock.total_ms = state["train_ms"]
    run.begin(state["step"], state["data_crc"])


class Checkpoints:
    """checkpoints/<RUN_ID>/step_<8 digits>.pt, written by rank 0."""

    def __init__(self, config, runtime, log):
        self.config = config
        self.runtime = runtime
        self.log = log
        self.writer = None  # the thread that writes one
        self.begun = -1  # the step of the last one
        self.final = None  # the snapshot after the last step: what is exported
        self.state_is_whole = True  # False while optimizers change the weights
        self.how_to_go_on = f"this command with RUN_ID={config.run_id} RESUME=auto goes on"

    def save_in_background(self, state, after_another=False):
        """A thread writes it: training does not wait for the disk."""
        busy = self.writer and self.writer.is_alive()
        if busy and not after_another:
            self.log.line(f"warning: no checkpoint of step {state['step']}: the disk is still busy")
        elif self.runtime.rank == 0:
            self.begun = state["step"]
            work = [self.writer, state]
            self.writer = threading.Thread(target=self.save_after, args=work, daemon=True)
            self.writer.start()

    def save_after(self, before, state):
        if before:
            before.join()
        self.save(state)

    def keep_final(self, state):
        """After the last step, before the last validation: from here on training is not lost."""
        self.final = state
        wanted = self.config.checkpoint_every or self.config.resume
        if wanted and self.begun != state["step"]:
            self.save_in_background(state, after_another=True)

    def wait(self):
        if self.writer:
            self.writer.join()

    def save(self, state):
        """True: it is on the disk. The last CHECKPOINT_KEEP stay."""
        folder = Path("checkpoints", self.config.run_id)
        path = folder / f"step_{state['step']:08d}.pt"
        # The copies to the host are on a stream of this device: the compute stream goes on.
        own = torch.cuda.Stream(self.runtime.device) if self.runtime.cuda else None
        with torch.cuda.stream(own):  # None on a CPU: no effect
            finite = are_finite(state["held"]["model"].values())
            data = torch_bytes(state)
        problem = write_atomic(path, data) if finite else "weights are not finite"
        if problem:
            self.log.line(f"warning: no checkpoint: {problem}")
            return False
        for old in checkpoint_files(self.config.run_id)[self.config.checkpoint_keep :]:
            if old != path:
                old.unlink(missing_ok=True)
        for left in folder.glob("step_*.tmp"):  # of a save that was killed
            left.unlink(missing_ok=True)
        self.log.event("checkpoint", step=state["step"], path=str(path))
        return True


def checkpoint_files(run_id):
    """The checkpoints of a run, the newest first."""
    paths = Path("checkpoints", run_id).glob("step_" + 8 * "[0-9]" + ".pt")
    return sorted(filter(Path.is_file, paths), reverse=True)


def find_checkpoint(config, older_than=None):
    """(path, state, what has changed since) of what RESUME means, or None.

    RESUME=auto passes over files that are no checkpoint. RunError where settings or shards differ.
    """
    if not config.resume:
        return None
    paths = checkpoint_files(config.run_id) if config.resume == "auto" else [Path(config.resume)]
    for path in paths:
        if older_than and path >= older_than:
            continue
        try:
            with open_regular(path) as file:
                state = torch.load(file, "cpu", weights_only=True)
            if "step" not in state:
                raise ValueError("it holds weights alone")
            if state["step"] < 0 or not 0 <= state["train_ms"] < math.inf:
                raise ValueError("its step or its time is impossible")
            return path, state, find_changes(config, path, state)
        except RunError:
            raise
        except Exception as error:  # whatever a bad file raises
            if config.resume != "auto":
                reason = f"no checkpoint: {first_line(error)}: set auto, or a step_<n>.pt"
                raise RunError(f"RESUME={path}: {reason}") from error
            tell(f"warning: {path} is damaged: taking the one before", "stderr")
    return None


def find_changes(config, path, state):
    """What has changed since a checkpoint; RunError where that decides shapes or data."""
    theirs = state["settings"]
    changes = []
    bound = []
    for name, mine in config.as_text().items():
        was = theirs.get(name, "")
        same = Path(mine).name == Path(was).name  # of paths only the name
        if not same and name not in ("RUN_ID", "RESUME"):
            changes.append(f"{name} was {was}, is {mine}")
            if name in BOUND:
                how = f"set {name}={was}" if name in theirs else "start anew"
                bound.append(f"{changes[-1]}: {how}")
    if bound:
        raise RunError(f"RESUME={path}: of another configuration: {'; '.join(bound)}")
    changes += find_shard_changes(config, path, state)
    with torch.device("meta"):
        model = GPT(config, torch.float32).state_dict()
    if shapes(state["held"].get("model", {})) != shapes(model):
        raise RunError(f"RESUME={path}: of another script: its tensors are not this model's")
    return "; ".join(changes)


def find_shard_changes(config, path, state):
    """What has joined; RunError unless the checkpoint's shards are the first ones here."""
    shards = open_shards(config, "train")
    mine = shards.identities
    for number, other in enumerate(state["shards"]):
        here = mine[number] if number < len(mine) else "nothing"
        if here == "nothing" and shards.growing:
            break  # it will be made again, and is the same then
        if here != other:
            raise RunError(f"RESUME={path}: of other shards: ({other}) is ({here}) now: restore it")
    seen = sum(int(text.split(", ")[1].split()[0]) for text in state["shards"])
    more = len(mine) - len(state["shards"])
    if more > 0 and state["step"] * step_tokens(config) > seen:
        return [f"{more} shards joined after a whole epoch: the order of data is another now"]
    return []


def halt(run, reason, rank=0):
    """All ranks have left the same step: saves its state. (exit code, status, problem)"""
    run.clock.stop()  # what the disk takes is no training time
    checkpoints = run.checkpoints
    checkpoints.wait()
    run.step = run.exchange.counted
    saved = run.runtime.rank == 0 and checkpoints.save(checkpoints.final or snapshot(run))
    saved = run.runtime.broadcast(saved)  # the others wait for the disk, too
    if isinstance(reason, str):
        problem = f"{reason}: lower the learning rates and start anew"
        if saved:
            problem += f"; the state before it is kept (step {run.step}), but may be spoilt already"
        return 1, "nonfinite", problem
    goes_on = f": {checkpoints.how_to_go_on}" if saved else ""
    if reason == NO_INPUT:
        return 1, "failed", run.runtime.broadcast(run.runtime.problem, rank) + goes_on
    return 128 + reason, "interrupted", f"interrupted after step {run.step}{goes_on}"


def rescue(run):
    """Saves a checkpoint after an unexpected exception, if this rank can do it alone."""
    checkpoints = run.checkpoints
    checkpoints.wait()  # for one that is being written, or the exit would cut it off
    if run.runtime.rank != 0 or not (checkpoints.final or checkpoints.state_is_whole):
        return
    try:
        if checkpoints.save(checkpoints.final or snapshot(run)):
            tell(f"a checkpoint is kept: {checkpoints.how_to_go_on}", "stderr")
    except Exception as error:  # the device may be gone
        tell(f"warning: no checkpoint: {first_line(error)}", "stderr")


@torch.no_grad()
def prime(run):
    """Priming steps, off the clock: they compile and allocate, and must change nothing.

    This is checked, because an edit may forget `counts`. Weights are halved meanwhile (exactly),
    so that an average of the weights would move, too.
    """
    if run.shards.growing:
        run.shards.wait_for_producer(lambda: run.runtime.signum)
    step = run.step
    crc = run.exchange.data_crc()
    before = held_state(run)
    buffers = {name: t.clone() for name, t in run.model.named_buffers()}
    if not run.config.warmup_steps:
        return
    run.exchange.set_counts(False)
    weights = list(run.model.parameters())
    torch._foreach_mul_(weights, 0.5)
    try:
        with closing(run.batches()) as batches:
            for done in range(1, run.config.warmup_steps + 1):
                run.train_step(batches)
                run.exchange.read(run.step)
                run.log.line(f"warmup_step:{done}/{run.config.warmup_steps}")
        if run.runtime.cuda or run.config.torch_compile == "1":  # a validation's graph, too
            slot = Slot(run.validation.plan, run.runtime)
            run.model.eval()
            run.model(slot.x, slot.y)
            run.model.train()
    finally:
        torch._foreach_mul_(weights, 2.0)
        run.begin(step, crc)
    require_unchanged(before, held_state(run))
    require_unchanged(buffers, dict(run.model.named_buffers()))  # not in checkpoints


def check_optimizers(run):
    """Notes each group's `base_lr`, its rate before the schedule. RunError for a parameter that is
    in no group or in two, and for an optimizer that would fail later."""
    groups = []
    for optimizer in run.optimizers:
        name = type(optimizer).__name__
        if optimizer.defaults.get("fused"):
            # torch's GradScaler leaves a step out in the same way, without asking the device
            optimizer.found_inf = run.exchange.found_inf
            optimizer.grad_scale = None
        elif not hasattr(optimizer, "counts"):
            advice = "give it fused=True if it has that, or see counts in class Muon"
            raise RunError(f"{name} cannot leave out a step that must not count: {advice}")
        groups += optimizer.param_groups
    for group in groups:
        group["base_lr"] = group["lr"]
    for name, p in run.model.named_parameters():
        times = sum(p is other for group in groups for other in group["params"])
        if times != 1:
            raise RunError(f"{name} is in {times} groups of make_optimizers: put it in one")
    check_layers(run.model)


def check_layers(model):
    """RunError for a layer that fails later, or that no optimizer sees."""
    known = {*model.modules(), *model.parameters()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Linear):
            raise RunError(f"{name} is an nn.Linear, which fails in bfloat16: make it a Linear")
        for part in held_parts(module):
            if isinstance(part, (nn.Module, nn.Parameter)) and part not in known:
                kind = type(part).__name__
                raise RunError(f"GPT.{name} hides a {kind} from training: use nn.ModuleList")


# === INSTRUMENTS: log lines, the clock, TRACE_STEPS and TRAINING_TIMING_BREAKDOWN ===
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312}  # dense bfloat16
# How a value looks in a log line. Its name, with the unit, is that of the .jsonl.
FORMATS = {
    "train_loss": "train_loss:{:.4f}",
    "train_time_ms": "train_time:{:.0f}ms",
    "step_avg_ms": "step_avg:{:.2f}ms",
    "tok_s": "tok_s:{:.0f}",
    "input_wait_percent": "input_wait:{:.2f}%",
    "eta_s": "eta:{:.0f}s",
    "eval_time_ms": "eval_time:{:.0f}ms",
    "mfu_percent": "mfu:{:.1f}%",
    "total_ms": "total:{:.3f}ms",
    "share_percent": "share:{:.3f}%",
    "p99_ms": "p99:{:.3f}ms",
    "max_ms": "max:{:.3f}ms",
    "epochs": "epochs:{:.3f}",
}


def as_words(values):
    """{"step_avg_ms": 41.3} -> "step_avg:41.30ms", the words of a log line"""
    return " ".join(FORMATS.get(name, name + ":{}").format(value) for name, value in values.items())


def log_step(run):
    """A line, with rates since the last one. Synchronisation point: its time must be true."""
    config = run.config
    exchange = run.exchange
    step = run.step
    run.runtime.synchronize()
    exchange.read(step)
    ms = run.runtime.broadcast(run.clock.now_ms())
    exchange.agree(step, ms)
    if not are_finite(exchange.params):  # alike on all ranks
        raise HaltError(f"step {step}: the weights are not finite, or far too large")
    wait_ms = exchange.wait_ms()
    last_step, last_ms, last_wait_ms = run.logged
    run.logged = step, ms, wait_ms
    tok_s = 1e3 * (step - last_step) * config.train_batch_tokens / (ms - last_ms)
    share_left = 1.0 - progress(config, step, ms)
    values = {
        "train_loss": exchange.loss(),
        "train_time_ms": ms,
        "step_avg_ms": ms / step,
        "tok_s": tok_s,
        "input_wait_percent": 100 * (wait_ms - last_wait_ms) / (ms - last_ms),
        "data_crc": f"{exchange.data_crc():08x}",
        "eta_s": 1e-3 * ms * share_left / (1.0 - share_left),
    }
    for gpu, peak in PEAK_TFLOPS.items():
        if gpu in run.runtime.hardware:
            flops = tok_s / run.runtime.world_size * run.model.flops_per_token(config)
            values["mfu_percent"] = 100 * 1e-12 * flops / peak
    run.log.line(f"step:{step}/{config.iterations} {as_words(values)}")
    run.log.event("step", step=step, **values)


def log_validation(run, loss, bpb, val_ms):
    step = run.step
    ms = run.clock.total_ms
    values = {"train_time_ms": ms, "step_avg_ms": ms / max(step, 1), **run.validation.partial}
    at = f"step:{step}/{run.config.iterations}"
    run.log.line(
        f"{at} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {as_words(values)}\n"
        f"val_stage_time_ms:{val_ms:.0f}ms {at}"
    )
    values |= {"val_loss": loss, "val_bpb": bpb, "val_stage_time_ms": val_ms}
    run.log.event("validation", step=step, **values)


def log_score(run, loss, bpb, ms):
    partial = run.validation.partial
    values = {"eval_time_ms": ms, **partial}
    exact = f"{FINAL}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f} {as_words(partial)}"
    run.log.line(f"{FINAL} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {as_words(values)}")
    run.log.line(exact.rstrip())
    run.log.event("score", val_loss=loss, val_bpb=bpb, **values)


@torch.no_grad()
def find_score_fault(run):
    """Returns why an edit's score is not bits per byte, or "". Tests a row of validation."""
    val = run.validation
    with closing(Pipeline(val.shards, val.plan, val.overlap, run.runtime)) as batches:
        batch = next(batches, None)
    if batch is None or (batch.y[0] < 0).all():
        return ""
    x, y = batch.x[:1], batch.y[:1]
    if ((y[:, :-1] != x[:, 1:]) & (y[:, :-1] >= 0)).any():
        return "BatchPlan.widen has a target that is not the next token"
    model = copy.deepcopy(run.model).eval()  # the run's stays in training mode
    for p in model.parameters():  # zeros would hide a fault
        p.add_(torch.randn_like(p), alpha=0.1)
    logits = model.logits(x)
    wanted = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    loss = model.forward(x, y)  # eager: this shape would be compiled anew
    if not (torch.is_tensor(loss) and loss.ndim == 0 and math.isclose(loss, wanted, rel_tol=1e-5)):
        advice = "put what only training needs under `if self.training:`"
        return f"in eval mode GPT.forward gives {first_line(loss)}, not the mean {wanted}: {advice}"
    end = x.size(1) // 2 | 1  # odd, or it might be the end of a window of attention
    x[:, end:] = (x[:, end:] + 1) % run.config.vocab_size
    if not torch.allclose(logits[:, :end], model.logits(x)[:, :end], rtol=1e-2, atol=1e-2):
        return "logits of a position depend on later tokens: hide them, as is_causal does"
    return ""


def are_finite(tensors):
    """Synchronises. False also for numbers whose squares overflow: their run is lost, too."""
    floats = [t for t in tensors if t.is_floating_point()]
    return bool(torch.stack(torch._foreach_norm(floats)).isfinite().all())


def warn_of_new_epoch(run):
    if run.step == run.shards.ends[-1] // step_tokens(run.config) and not run.shards.growing:
        run.log.line(f"WARNING: step {run.step + 1} begins the shards anew")


def input_advice(run, percent):
    if run.config.training_timing_breakdown:
        return "overlap is off for the breakdown: this is the most that overlap can hide"
    if percent < 0.5:
        return "overlap settings do not matter here"
    if not run.overlap.queue:
        return "nothing overlaps: set TRAIN_PREFETCH=1"
    return "raise TRAIN_PREFETCH_QUEUE, free the CPU, or move DATA_PATH to a faster disk"


def log_input(run, batches, begun_ms):
    """What the run and its input have cost since its start or RESUME, at `begun_ms`."""
    ms = run.clock.total_ms
    micro_steps = run.runtime.micro_steps
    waits = np.reshape(batches.waits_ms or [0.0] * micro_steps, (-1, micro_steps)).sum(1)
    total_ms = max(float(waits.sum()), run.exchange.wait_ms())  # of the slowest rank
    percent = 100 * total_ms / max(ms - begun_ms, 1e-9)
    values = {
        "total_ms": total_ms,
        "share_percent": percent,
        "p99_ms": float(np.percentile(waits, 99)),
        "max_ms": float(waits.max()),
        "slowest": int(run.step - len(waits) + waits.argmax() + 1),
        "read_bytes": batches.bytes_read,
        "epochs": run.step * step_tokens(run.config) / max(run.shards.ends[-1], 1),
    }
    allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # KiB on Linux
    if run.runtime.cuda:
        allocated = torch.cuda.max_memory_allocated() >> 20
        reserved = torch.cuda.max_memory_reserved() >> 20
    run.log.line(
        f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{run.val_ms:.0f}ms\n"
        f"input_wait {as_words(values)}\n"
        f"input cost {percent:.2f} % of training: {input_advice(run, percent)}\n"
        f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB"
    )
    run.log.event("input", timing_train_loop_ms=ms, timing_val_total_ms=run.val_ms, **values)


def log_sizes(log, state, model_bytes, packed, code_bytes):
    """The challenge's lines on sizes, and ours on how tensors are stored."""
    total = len(packed.data) + code_bytes
    ratio = sum(t.nbytes for t in state.values()) / packed.payload
    log.line(
        f"{packed.stored}\n"
        f"Serialized model: {model_bytes} bytes\nCode size: {code_bytes} bytes\n"
        f"Total submission size: {model_bytes + code_bytes} bytes\n"
        f"Serialized model int8+zlib: {len(packed.data)} bytes "
        f"(payload:{packed.payload} raw_torch:{packed.raw} payload_ratio:{ratio:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes"
    )
    log.event("artifact", artifact_bytes=len(packed.data), code_bytes=code_bytes)
    if total > CAP:
        log.line(f"WARNING: {total} bytes, the cap is {CAP}")


class Clock:
    """Training time in ms. Its edges are synchronisation points: the device's work is done."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.total_ms = 0.0
        self.since = math.inf  # not running

    def now_ms(self):
        return self.total_ms + 1e3 * max(0.0, time.perf_counter() - self.since)

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.runtime.synchronize()
        self.total_ms = self.now_ms()
        self.since = math.inf


class Phases:
    """`with phase("forward"):` names a phase for torch.profiler, or times it alone."""

    def __init__(self, config, runtime, log):
        self.config = config
        self.runtime = runtime
        self.log = log
        self.ms = defaultdict(float)
        self.profiler = None

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
        steps = self.config.trace_steps
        if steps == 0 or self.runtime.rank > 0:
            return
        threads = None
        with suppress(AttributeError, TypeError):  # private names: else a trace without the reader
            threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self.write_trace,
            experimental_config=threads,
        )
        self.profiler.start()
        self.profiler.step()  # past the warm-up

    def write_trace(self, profiler):
        path = self.log.path.with_suffix(".trace.json.gz")
        self.profiler = None
        try:
            profiler.export_chrome_trace(str(path))
            self.log.line(f"trace: {path}")
        except (OSError, RuntimeError) as error:
            self.log.line(f"warning: no trace: {first_line(error)}")

    def end_step(self, step):
        if self.profiler:
            self.profiler.step()
        ms = self.ms
        self.ms = defaultdict(float)
        count = self.runtime.micro_steps
        often = step <= 10 or step % self.config.training_timing_every == 0
        if not (self.config.training_timing_breakdown and often):
            return
        self.log.line(
            f"timing_breakdown step:{step} micro_steps:{count} "
            f"batch_cpu_ms:{ms['input_wait'] / count:.2f} batch_h2d_ms:{ms['h2d'] / count:.2f} "
            f"forward_ms:{ms['forward'] / count:.2f} backward_ms:{ms['backward'] / count:.2f} "
            f"grad_clip_ms:{ms['grad_clip']:.2f} optimizer_ms:{ms['optimizer']:.2f} "
            f"val_ms:{ms['validate']:.2f} explicit_sync_ms:{ms['sync']:.2f} "
            "(per_optimizer_step; forward/backward/batch averaged over micro_steps; "
            f"grad_accum_steps={count}) reduce_ms:{ms['reduce']:.2f}"
        )


# === SETTINGS: reading, checking, help ===
KINDS = {name.upper(): kind for name, kind in Config.__annotations__.items()}
BOUND = {name for name, kind in KINDS.items() if get_origin(kind) is Annotated}
SETTINGS = {name: get_args(kind)[0] if name in BOUND else kind for name, kind in KINDS.items()}
RANGES = {  # the type, the least value, the first one that is too large, and what to say
    NonNegativeInt: (int, 0, 2**63, "a whole number from 0 on"),
    int: (int, -(2**63), 2**63, "a whole number"),
    PositiveInt: (int, 1, 2**63, "a whole number from 1 on"),
    float: (float, -1e300, math.inf, "a number"),
    Fraction: (float, 0, 1, "a number >= 0, < 1"),
    NonNegativeFloat: (float, 0, math.inf, "a number >= 0"),
    PositiveFloat: (float, 1e-300, math.inf, "a number > 0"),
}
PATTERNS = "CONTROL_TENSOR_NAME_PATTERNS", "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"
# Names from other trainers and recipes: without an error, they would be ignored.
FOREIGN = """
    ADD_COMPILED ARTIFACT_CODEC ATTENTION_PROBE BATCH_SIZE BLOCK_ORDER BLOCK_SIZE CAST_ONCE
    CHECKPOINT COMPILE COORDINATE_DESCENT DEPTH DROPOUT DTYPE D_MODEL EPOCHS EXCHANGE_SHARDS
    FEWEST_MICRO_STEPS FOLD_ONCE GRADIENT_ACCUMULATION_STEPS ITERS KV_ONE_PRODUCT LATE_QAT LAYERS
    LEAKY_SLOPE LEARNING_RATE LOG_INTERVAL LR MAX_AUTOTUNE MAX_ITERS MAX_LR MAX_STEPS
    MICRO_BATCH_SIZE MIN_LR MLP_OPERATOR MOMENTUM NUM_EPOCHS NUM_STEPS N_CTX N_EMBD N_HEAD N_LAYER
    PREFETCH QKV_OPERATOR ROPE_DIMS ROW_START_TOKEN SHUFFLE_SPANS VALUE_RESIDUAL WEIGHT_DECAY WIDTH
"""
FOREIGN_PREFIXES = (
    "ADAM_ BIGRAM_ EMA_ EVAL_ GATED_ GPTQ_ INT6_ LN_ MTP_ MUON_ QAT_ SHORT_ SMEAR_ SWA_ TRAIN_ "
    "TTT_ VAL_ VE_ WARMUP_ XSA_"
)
NOT_MEANT = {"MODEL_DIR", "NUM_THREADS"}  # common names, a letter or two from ours
LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"


def config_faults():
    """Yields the lines of Config that are no valid setting."""
    if LEVELS > 127:
        yield f"LEVELS={LEVELS}: int8 holds at most 127"
    for name, value in vars(Config).items():
        kind = SETTINGS.get(name.upper())  # None: it has no type
        known = kind in (str, bool, *RANGES) or get_origin(kind) is Literal
        is_line = not (name.startswith("_") or inspect.isroutine(value))
        if is_line and not (known and name == name.lower()):
            yield f"Config.{name}: write `name: type = default`, in small letters, a type of CONFIG"


def parse(kind, text):
    """The value of a setting's text; ValueError says what is wanted."""
    if kind is str:
        return text
    if kind in RANGES:
        number, least, end, wanted = RANGES[kind]
        with suppress(ValueError):
            value = number(text)
            if least <= value < end:
                return value
        raise ValueError(wanted)
    words = {"0": False, "1": True} if kind is bool else {word: word for word in get_args(kind)}
    if text not in words:
        raise ValueError(" or ".join(words))
    return words[text]


def given_settings(env):
    """{NAME: text} of the settings in the environment. Empty ones are left out, except patterns."""
    names = [name for name in SETTINGS if env.get(name) or (name in PATTERNS and name in env)]
    return {name: env[name].strip("\r") for name in names}


def read_config(env):
    """(Config, faults): a fault for every wrong value and every name that is no setting."""
    for fault in config_faults():
        sys.exit(f"train_gpt.py: {fault}")
    faults = []
    values = {"run_id": str(uuid.uuid4())}
    for name, text in given_settings(env).items():
        try:
            values[name.lower()] = parse(SETTINGS[name], text)
        except ValueError as wanted:
            faults.append(f"{name}={text}: set {wanted}, see --help")
    controls, kept = (name.lower() for name in PATTERNS)
    if controls in values:  # the second follows the first, unless it is set
        values.setdefault(kept, values[controls])
    for name in sorted(env.keys() - SETTINGS.keys() - NOT_MEANT):
        upper = name.upper()
        near = nearest_setting(upper)
        if near:
            faults.append(f"{name}={env[name]}: no such setting: did you mean {near}?")
        elif upper in FOREIGN.split() or upper.startswith(tuple(FOREIGN_PREFIXES.split())):
            faults.append(f"{name}={env[name]}: no setting here: unset it, see --help")
    return Config(**values), faults


def nearest_setting(name):
    """The setting that a misspelt or shortened name means, or ""."""
    close = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.85)
    if close or name in FOREIGN.split() or "_" not in name:
        return "".join(close)
    return next((setting for setting in SETTINGS if f"_{name}_" in f"_{setting}_"), "")


def launcher_faults(env):
    """A launcher's variables come together or not at all: some may be left over in a shell."""
    given = " ".join(name for name in LAUNCHER if name in env)
    missing = " ".join(name for name in LAUNCHER if name not in env)
    remedy = f"start with torchrun, or `unset {given}`"
    if not given:
        return []
    if missing:
        return [f"{given} without {missing}: {remedy}"]
    names = LAUNCHER[:3]
    are_numbers = all(env[name].isdecimal() for name in names)
    if are_numbers and int(env["RANK"]) < int(env["WORLD_SIZE"]):
        return []
    words = " ".join(f"{name}={env[name]}" for name in names)
    return [f"{words}: no such rank: {remedy}"]


def step_tokens(config):
    """What a step takes from the shards: a span has one more than it has targets."""
    return config.train_batch_tokens + SPANS_PER_STEP


def batch_tokens_fault(batch_tokens, seq_len, micro_batches):
    """The rule that TRAIN_BATCH_TOKENS breaks, or "". micro_batches: ranks x micro-steps"""
    unit = math.lcm(SPANS_PER_STEP, micro_batches) * seq_len
    if batch_tokens % unit == 0:
        return ""
    rule = f"a step is {SPANS_PER_STEP} spans of whole rows of {seq_len}"
    if micro_batches not in (1, 2, 4, 8):
        rule += f", cut for {micro_batches} micro-batches"
    return f"{rule}: set a multiple of {unit}"


def find_faults(config, world_size, env):
    """All that is wrong with the settings and what they name: a line each, with the remedy."""
    found = [*model_faults(config, env), *batch_faults(config, world_size)]
    found += machine_faults(config, env)
    faults = [f"{name.upper()}={getattr(config, name)}: {text}" for name, text in found]
    try:
        data_facts(config)
    except RunError as error:
        faults += str(error).splitlines()
    return faults


def model_faults(config, env):
    """(setting, what is wrong and the remedy), of the setting that the user gave."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    dim, unit = config.model_dim, 2 * heads
    if dim % unit and "NUM_HEADS" in env and "MODEL_DIM" not in env:
        reason = f"MODEL_DIM={dim} is no multiple of {unit}"
        yield "num_heads", f"{reason}: set a divisor of {dim // 2}"
    elif dim % unit:
        yield "model_dim", f"2 x NUM_HEADS must divide it: set a multiple of {unit}"
    if heads % kv_heads and "NUM_HEADS" in env and "NUM_KV_HEADS" not in env:
        reason = f"NUM_KV_HEADS={kv_heads} does not divide it"
        yield "num_heads", f"{reason}: set a multiple of {kv_heads}"
    elif heads % kv_heads:
        yield "num_kv_heads", f"set a divisor of NUM_HEADS={heads}"
    with torch.device("meta"):
        block = nn.ModuleList([Block(config)])
    controls = config.control_tensor_name_patterns
    if all(p.ndim != 2 or is_named(name, controls) for name, p in block.named_parameters()):
        yield "control_tensor_name_patterns", "no matrix is left for Muon: name fewer"
    if config.vocab_size > 65536:
        yield "vocab_size", "shards hold uint16: set at most 65536"


def batch_faults(config, world_size):
    """(setting, what is wrong and the remedy)"""
    micro_steps = config.micro_steps(world_size)
    micro_batches = world_size * micro_steps
    if SPANS_PER_STEP % micro_batches and micro_batches % SPANS_PER_STEP:
        micro_steps = SPANS_PER_STEP // math.gcd(SPANS_PER_STEP, world_size)
        micro_batches = world_size * micro_steps
        rule = f"x {world_size} ranks must divide 8 or be a multiple of 8"
        yield "grad_accum_steps", f"{rule}: set {micro_steps}"
    fault = batch_tokens_fault(config.train_batch_tokens, config.train_seq_len, micro_batches)
    if fault:
        yield "train_batch_tokens", fault
    least = micro_batches * config.train_seq_len  # a row for each
    if config.val_batch_size < least:
        yield "val_batch_size", f"set at least {least}"
    if 0 < config.val_tokens <= config.train_seq_len:
        yield "val_tokens", f"a row has {config.train_seq_len}: set 0, or more than that"


def machine_faults(config, env):
    """(setting, what is wrong and the remedy)"""
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", config.run_id) or len(config.run_id) > 200:
        yield "run_id", "it names files: set up to 200 letters, digits, '.', '_', '-'"
    if config.resume == "auto" and not env.get("RUN_ID"):
        yield "resume", "set RUN_ID, too"
    if config.trace_steps and config.training_timing_breakdown:
        yield "trace_steps", "nothing overlaps with TRAINING_TIMING_BREAKDOWN=1: set one"
    has_cuda = config.device != "cpu" and torch.cuda.is_available()
    has_driver = any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia"))
    if not has_cuda and (config.device == "cuda" or (config.device == "auto" and has_driver)):
        build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        yield "device", f"no GPU for {build}: install a torch that fits, or set DEVICE=cpu"
    if has_cuda and int(env.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        yield "device", "fewer GPUs than processes: see --nproc_per_node"
    if config.val_bytecount_device == "cuda" and not has_cuda:
        yield "val_bytecount_device", "there is no GPU: set cpu"


def data_facts(config):
    """{name: what of the data and the script must be alike on all ranks}; RunError lists faults."""
    facts = {"train_gpt.py": f"crc {zlib.crc32(Path(__file__).read_bytes()):08x}"}
    faults = []
    try:
        table = ByteTable.of(config)
        facts["the tokenizer"] = f"crc {zlib.crc32(np.stack(table).astype('<i4')):08x}"
    except RunError as error:
        faults.append(str(error))
    row = config.train_seq_len
    for split in "train", "val":
        try:
            shards = open_shards(config, split)
        except RunError as error:
            faults.append(str(error))
            continue
        facts |= {text.rsplit(", ", 2)[0]: text for text in shards.identities}
        if not shards.growing:  # else on another machine there may be more of them by now
            facts[f"the number of {split} shards"] = len(shards.paths)
        if split == "val" and shards.ends[-1] <= row:
            faults.append(f"TRAIN_SEQ_LEN={row}: validation has {shards.ends[-1]} tokens: set less")
    if faults:
        raise RunError("\n".join(dict.fromkeys(faults)))  # a missing folder is one fault
    return facts


def describe_overlap(config, split, overlap, cuda):
    """What is in effect, for the log, and why a switch is not."""
    timing = "(timing_breakdown)" if config.training_timing_breakdown else ""
    no_prefetch = timing if getattr(config, f"{split}_prefetch") else ""
    no_stream = timing or ("" if cuda else "(no_cuda)")
    if not getattr(config, f"{split}_copy_stream"):
        no_stream = ""
    prefetch = overlap.queue > 0
    text = f"prefetch:{prefetch}{no_prefetch} copy_stream:{overlap.copy_stream}{no_stream}"
    text += f" prefetch_queue:{overlap.queue}"
    if split == "val":
        text = f"overlap:{prefetch or overlap.copy_stream} {text}"
        text += f" bytecount_device:{config.val_bytecount_device}"
    return f"{text} gpu_prefetch:{overlap.device_slots}"


# === MAIN ===
def attention_backends(config, runtime, log):
    """{backend: name} of those that work here, fastest first; SDPA takes the first that fits."""
    flash = SDPBackend.FLASH_ATTENTION
    cudnn = SDPBackend.CUDNN_ATTENTION
    every = {"fa3": flash, "cudnn": cudnn, "flash": flash, "math": SDPBackend.MATH}
    wanted = list(every) if config.attention_backend == "auto" else [config.attention_backend]
    shape = 1, config.num_heads, 128, config.model_dim // config.num_heads
    q = torch.zeros(shape, device=runtime.device, dtype=runtime.dtype, requires_grad=True)
    working = {}
    reason = ""
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
            reason = first_line(error)
            if runtime.cuda:
                log.console(f"attention: {name} does not work here: {reason}")
            if activated:
                nn.attention.restore_flash_attention_impl()
    if not working:
        raise RunError(f"ATTENTION_BACKEND={config.attention_backend}: {reason}: set auto")
    return working


def log_source(log):
    """The script's text and the versions: so the challenge's logs begin."""
    source = Path(__file__).read_text("utf-8")
    rule = "=" * 100
    smi = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    log.write(".txt", f"{source}\n{rule}\n{versions}\n{smi}\n{rule}")
    log.line(str(log.path))


def log_header(run, backends):
    """Settings, in the challenge's lines."""
    config = run.config
    log = run.log
    runtime = run.runtime
    shards = run.shards

    def words(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    train_io = describe_overlap(config, "train", run.overlap, runtime.cuda)
    val_io = describe_overlap(config, "val", run.validation.overlap, runtime.cuda)
    kind = "byte" if config.tokenizer_path.endswith(".json") else "sentencepiece"
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    head_lr = 0.0 if config.tie_embeddings else config.head_lr
    log.line(
        f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{shards.folder.name} train_shards:{len(shards.paths)}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"{as_words({'tokens': run.validation.targets, **run.validation.partial})}\n"
        f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{runtime.micro_steps}\n"
        f"sdp_backends:{backends}\nattention_mode:gqa {words('num_heads num_kv_heads')}\n"
        f"{words('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{words('matrix_lr scalar_lr')}\n"
        f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{words('seed')}\n"
        f"train_io:{train_io}\nval_io:{val_io}"
    )
    if shards.growing:
        log.line(f"train_shards: {len(shards.paths)} so far: the others are being made")
    if config.max_wallclock_seconds <= 0 and config.warmdown_iters > config.iterations:
        share = config.iterations / config.warmdown_iters
        log.line(f"WARNING: WARMDOWN_ITERS is above ITERATIONS: rates begin at {share:.1%}")
    log.event("run", run_id=config.run_id, argv=sys.argv)
    log.event("config", **asdict(config))
    machine = {"device": runtime.hardware, "cpus": os.cpu_count(), "world_size": runtime.world_size}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    log.event("hardware", **machine, **versions, python=sys.version.split()[0])


def resume(run, checkpoint):
    """Restores a checkpoint; RESUME=auto goes on to the one before if it cannot be restored."""
    while checkpoint:
        path, state, changes = checkpoint
        try:
            restore(run, state)
        except Exception as error:  # alike on all ranks
            if run.config.resume != "auto":
                raise RunError(f"RESUME={path}: {first_line(error)}: start anew") from error
            run.log.line(f"warning: {path} cannot be restored: {first_line(error)}")
            older = find_checkpoint(run.config, path) if run.runtime.rank == 0 else None
            checkpoint = run.runtime.broadcast(older)
            continue
        most = run.config.iterations
        beyond = f" ITERATIONS={most} is reached: raise it to go on" if run.step >= most else ""
        run.log.line(f"resumed: step:{run.step} resumed_from:{path}{beyond} {changes}")
        run.log.event("checkpoint", step=run.step, resumed_from=str(path))
        if run.runtime.rank == 0 and run.config.resume != "auto":
            set_aside_later(run)
        return
    raise RunError("RESUME=auto: no checkpoint can be restored: set another RUN_ID to start anew")


def set_aside_later(run):
    """After RESUME=<file>, later checkpoints of this RUN_ID are another run's, not for `auto`."""
    for path in checkpoint_files(run.config.run_id):
        if int(path.stem.removeprefix("step_")) > run.step:
            run.log.line(f"{path} is of another run: it is {set_aside(path).name} now")


def run_to_the_end(config, runtime, log, checkpoint):
    """(exit code, status, problem): all ranks come to the same end."""
    backends = attention_backends(config, runtime, log)
    names = ",".join(backends.values())
    torch.compiler.config.cache_key_tag = names  # its cache goes by that
    with sdpa_kernel(list(backends), set_priority=True):
        run = Trainer(config, runtime, log)
        weights = torch.cat([p.detach().flatten() for p in run.model.parameters()]).cpu()
        runtime.require_equal({"the initial weights": zlib.crc32(weights.numpy())})
        log_header(run, names)
        if checkpoint:
            resume(run, checkpoint)
        elif config.resume:
            log.line(f"RESUME=auto: no checkpoint of RUN_ID={config.run_id}: starting anew")
        fault = find_score_fault(run)
        if fault:
            raise RunError(fault)
        start = run.step
        try:
            run.train()
            problem = run.export_and_score(Path(__file__).stat().st_size)
        except HaltError as end:
            return halt(run, *end.args)
        except Exception:
            if run.step > start:
                rescue(run)
            raise
    run.checkpoints.wait()
    problem = runtime.broadcast(problem)  # rank 0's, and the others wait for its disk
    if problem and runtime.rank == 0:
        run.checkpoints.save(run.checkpoints.final)
    return (1, "failed", problem) if problem else (0, "finished", "")


def execute(config, env):
    """Runs it; the exit code. What is foreseeable ends in one line."""
    runtime = Runtime(config, env)
    log = None
    together = False  # have all ranks come to the same end?
    code = 1
    status = "failed"
    try:
        runtime.start(env)
        own = {"DATA_PATH": "", "TOKENIZER_PATH": "", "RUN_ID": ""}  # these may differ
        runtime.require_equal(config.as_text() | own | data_facts(config))
        checkpoint = find_checkpoint(config) if runtime.rank == 0 else None
        run_id, checkpoint = runtime.broadcast((config.run_id, checkpoint))
        # Another run's checkpoint begins a new run: what has its name is kept under another one.
        own = checkpoint and Path(checkpoint[0]).resolve().parent.name == run_id
        log = RunLog(run_id, runtime.rank == 0, resumed=bool(own))
        log_source(log)
        config = replace(config, run_id=run_id)
        code, status, problem = run_to_the_end(config, runtime, log, checkpoint)
        together = True
    except RunError as error:
        problem = str(error)
    except torch.OutOfMemoryError:
        steps = runtime.micro_steps
        free = torch.cuda.mem_get_info()[0] >> 20
        problem = f"GRAD_ACCUM_STEPS={steps}: out of memory, {free} MiB free: set {2 * steps}"
    except Exception as error:  # nobody foresaw it, or another rank has gone
        problem = f"{type(error).__name__}: {first_line(error)}"
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            problem = f"torch.compile fails: {first_line(error)}: set TORCH_COMPILE=0"
        else:
            tell(traceback.format_exc(), "stderr")
    if log:
        log.event("end", status=status, exit_code=code, error=problem)
        log.console(status if log.complained else f"{status}: see {log.path}")
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
        raise RunError(problem)  # record_exception wants an exception that is being handled
    except RunError as error:
        with suppress(OSError, ValueError):
            get_error_handler().record_exception(error)


def main(arguments, env):
    """The exit code: 0 done, 1 failed, 2 wrong settings, 128 + n ended by signal n."""
    if arguments in (["--help"], ["-h"]):
        tell(f"{__doc__}\n{inspect.getsource(Config)}")
        return 0
    config, faults = read_config(env)
    how = "settings go in front: ITERATIONS=100 python3 train_gpt.py"
    faults += [f"{word}: {how}" for word in arguments if word != "--print-config"]
    wrong_launch = launcher_faults(env)
    faults += wrong_launch
    if arguments == ["--print-config"]:
        pairs = {name: {"value": v, "source": "default"} for name, v in vars(config).items()}
        for name in given_settings(env):
            pairs[name.lower()]["source"] = "environment"
        tell(json.dumps(pairs, indent=1))
        if not faults:
            return 0
    elif not wrong_launch:
        faults += find_faults(config, int(env.get("WORLD_SIZE", 1)), env)
    if not faults:
        return execute(config, env)
    if env.get("LOCAL_RANK", "0") == "0":
        complain("\n  ".join(["nothing started, wrong settings:", *faults]))
    else:
        time.sleep(30)  # torchrun ends all at the first exit: that of the rank that speaks
    return 2


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:], os.environ)
    except KeyboardInterrupt:
        tell("train_gpt.py: interrupted before the start", "stderr")
        exit_code = 130
    os._exit(exit_code)  # the interpreter's own exit aborts now and then, in gloo
