"""Train a small GPT for the parameter-golf challenge: the lowest bits per byte in 16,000,000 bytes.

On 8 GPUs (or 1, 2, 4):          torchrun --standalone --nproc_per_node=8 train_gpt.py
One process, on a GPU or a CPU:  python3 train_gpt.py
Settings, in front of it:        ITERATIONS=100 python3 train_gpt.py
All settings; their values now:  python3 train_gpt.py --help | --print-config

Data loading runs while the device computes: a thread reads tokens, a copy stream uploads them, the
compute stream trains on them. One Pipeline class does this for training and validation.

What you change comes first: CONFIG MODEL OPTIMIZERS DATA EVALUATION ARTIFACT TRAINING.
Then comes MACHINERY: EXCHANGE RUNTIME CHECKPOINTS INSTRUMENTS SETTINGS MAIN.

To change          edit
a setting          a line in Config; Fixed[...] if it decides the model or data
a parameter        create it in the model; make_optimizers says which optimizer trains it
new state          an attribute of Trainer, made whole in __init__: modules, optimizers, tensors,
                   numbers, also in lists and dicts, are saved in checkpoints and restored
a step             Trainer.train_step; it must take micro_steps batches, for RESUME
the training loss  GPT.forward; the score is computed from GPT.logits, whatever forward does
an optimizer       any that steps without a closure, an attribute of Trainer; stepped and scheduled
a schedule         lr_multiplier, times base_lr; a new one by progress(): the clock ends runs
what is scored     BatchPlan.widen, of both splits: a target of -100 counts nowhere
how it is stored   storage() chooses the type, pack() then calls quantize()
the step line      log_step: a value added there is in the .jsonl file, too
the order of data  Shards for shards, BatchPlan.rows for batches

Then prove the edit: python3 tools/verify.py train_gpt.py NAME=value ...
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
import random
import re
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
from collections import defaultdict, deque, namedtuple
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the slow imports in silence
try:
    SOURCE = Path(__file__).read_bytes()  # before the slow imports: the text that really runs
    import numpy as np
    import sentencepiece
    import torch
except ImportError as error:
    remedy = f"{sys.executable} -m pip install -r requirements.txt"
    if error.name in sys.stdlib_module_names:
        remedy = f"a file in {sys.path[0]} has the name of Python's {error.name}: rename it"
    sys.exit(f"{__file__}: {error}: {remedy}")
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

# === CONFIG: each line `name: type = default  # unit; meaning` is a setting; NAME=value sets it ===
# Each type names its least value, the first one that is too large, and what to say of others.
NonNegativeInt = Annotated[int, (0, 2**63, "a whole number from 0 on")]
PositiveInt = Annotated[int, (1, 2**63, "a whole number from 1 on")]
NonNegativeFloat = Annotated[float, (0, math.inf, "a number >= 0")]
PositiveFloat = Annotated[float, (1e-300, math.inf, "a number > 0")]
Fraction = Annotated[float, (0, 1, "a number >= 0, < 1")]
# Fixed[int] is Annotated[int, "fixed"]. It marks a setting that decides the model or data: RESUME
# needs the checkpoint's value of it. All other settings may change on RESUME.
Fixed = Annotated[TypeVar("Kind"), "fixed"]
# Tensors with one of these in their names: trained by Adam; if small, stored in float32.
CONTROLS = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)
SPANS_PER_STEP = 8  # as the challenge's order of data has them, see DATA


@dataclass(frozen=True)
class Config:
    """The settings of a run, and their defaults."""

    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder; holds fineweb_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # file; .model or .json
    run_id: str = ""  # name; logs/<RUN_ID>.txt and .jsonl are the log; empty: a random name
    seed: Fixed[NonNegativeInt] = 1337  # number; start of all random numbers
    # validation and logs
    val_batch_size: PositiveInt = 524288  # tokens; of ranks x micro-steps validation batches
    val_loss_every: NonNegativeInt = 1000  # steps; between validations; 0: only at the end
    val_tokens: NonNegativeInt = 0  # tokens; validate on the first N (never submit that); 0: all
    val_progress_log_every: NonNegativeInt = 0  # batches; between val_progress lines; 0: none
    train_log_every: NonNegativeInt = 200  # steps; between lines after step 10; 0: none after it
    # length
    iterations: NonNegativeInt = 20000  # steps; length of the run
    warmdown_iters: NonNegativeInt = 1200  # steps; before the cap (or ITERATIONS), rates fall to 0
    warmup_steps: NonNegativeInt = 20  # steps; priming: compiles and allocates, changes nothing
    train_batch_tokens: Fixed[PositiveInt] = 524288  # tokens; per step, all ranks
    train_seq_len: Fixed[PositiveInt] = 1024  # tokens; per row
    max_wallclock_seconds: float = 600.0  # seconds; cap on training; <=0: no cap, repeatable runs
    # model
    vocab_size: Fixed[PositiveInt] = 1024  # tokens; that of the tokenizer
    num_layers: Fixed[PositiveInt] = 9  # blocks; the first half feeds skips to the second
    model_dim: Fixed[PositiveInt] = 512  # channels; width of the residual stream
    num_heads: Fixed[PositiveInt] = 8  # heads; of queries
    num_kv_heads: Fixed[PositiveInt] = 4  # heads; of keys and values
    mlp_mult: Fixed[PositiveInt] = 2  # times; MLP width over MODEL_DIM
    tie_embeddings: Fixed[bool] = True  # 0/1; the output head is the token embedding
    rope_base: Fixed[PositiveFloat] = 10000.0  # number; base of the rotary wavelengths
    logit_softcap: Fixed[PositiveFloat] = 30.0  # number; logits = cap * tanh(logits / cap)
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
    control_tensor_name_patterns: Fixed[str] = CONTROLS  # names; in blocks, trained by Adam
    int8_keep_float_fp32_name_patterns: str = ""  # names; stored in float32; empty: the controls
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
    checkpoint_every: NonNegativeInt = 0  # steps; between checkpoints; 0: only after the last step
    checkpoint_keep: PositiveInt = 3  # files; the newest that stay in checkpoints/<RUN_ID>/
    resume: str = ""  # auto or file; auto: the newest checkpoint of RUN_ID; empty: from step 1
    # device
    device: Literal["auto", "cuda", "cpu"] = "auto"  # device; auto: cuda where there is one
    torch_compile: Literal["auto", "0", "1"] = "auto"  # mode; auto: on with CUDA
    attention_backend: Literal["auto", "fa3", "cudnn", "flash", "math"] = "auto"  # name; of SDPA
    grad_accum_steps: NonNegativeInt = 0  # micro-steps; per step; 0: max(1, 8 // ranks)

    def micro_steps(self, world_size):
        return self.grad_accum_steps or max(1, SPANS_PER_STEP // world_size)


# === MODEL; in shapes: B sequences, T tokens, D channels ===
# The order of construction is the challenge's, so that a SEED gives the same initial weights.
# Parameters are float32. Where one meets activations x, cast it with p.to(x.dtype), or all after
# it becomes float32.
def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Float32 weights (outputs, inputs), cast to the activations' dtype where they are used."""

    def __init__(self, inputs, outputs, zero=False):
        super().__init__(inputs, outputs, bias=False)
        if zero:
            nn.init.zeros_(self.weight)

    def forward(self, x, scale=None):
        """`scale` (outputs,) scales the output, by way of the weight, which has fewer numbers."""
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
        """x (B, T, D); rotary (cos, sin), see GPT.logits; scale (D,) -> (B, T, D)"""
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
        head = self.tok_emb if self.lm_head is None else self.lm_head
        logits = F.linear(rms_norm(x), head.weight.to(x.dtype))  # (B, T, vocabulary)
        return (self.softcap * torch.tanh(logits / self.softcap)).float()

    def forward(self, x, y):
        """The training loss: the mean nats of y after x, both (B, T); y = -100 is not a target."""
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())


# === OPTIMIZERS: Muon trains the blocks' matrices, Adam all else ===
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

    def __init__(self, groups, runtime, config):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.runtime = runtime
        self.iterations = config.muon_backend_steps
        self.newton_schulz = newton_schulz  # Trainer compiles it
        self.dtype = torch.bfloat16 if runtime.cuda else torch.float32
        self.matrices = [p for group in self.param_groups for p in group["params"]]
        self.share = set(self.matrices[runtime.rank :: runtime.world_size])  # this rank's
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
        """Updates momentum and weights."""
        self.reduced.zero_()
        momentum = self.param_groups[0]["momentum"]  # the same in all groups
        buffers = {p: self.state[p]["momentum_buffer"] for p in self.matrices}
        torch._foreach_mul_(list(buffers.values()), momentum)
        torch._foreach_add_(list(buffers.values()), [p.grad for p in self.matrices])
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p in self.share]
            if matrices:
                grads = torch.stack([p.grad for p in matrices])  # (n, rows, cols)
                nesterov = grads.add_(torch.stack([buffers[p] for p in matrices]), alpha=momentum)
                update = self.newton_schulz(nesterov, self.iterations, self.dtype)
                torch._foreach_copy_([self.reduced_of[p] for p in matrices], update.unbind())
        self.runtime.all_reduce(self.reduced)
        self.updates.copy_(self.reduced)
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


def make_optimizers(model, config, runtime):
    """(Adam, Muon). Muon trains the matrices of the blocks, Adam all else."""
    by_shape = defaultdict(list)
    others = []
    for name, p in model.named_parameters():
        control = p.ndim != 2 or is_named(name, config.control_tensor_name_patterns)
        if name.startswith("blocks.") and not control:
            by_shape[p.shape].append(p)
        elif name not in ("tok_emb.weight", "lm_head.weight"):
            others.append(p)
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    adam_groups = [
        {"params": [model.tok_emb.weight], "lr": embed_lr},
        {"params": others, "lr": config.scalar_lr},
    ]
    if not config.tie_embeddings:
        adam_groups.append({"params": [model.lm_head.weight], "lr": config.head_lr})
    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in by_shape.values()]
    betas = config.beta1, config.beta2
    adam = torch.optim.Adam(adam_groups, betas=betas, eps=config.adam_eps, fused=True)
    return adam, Muon(muon_groups, runtime, config)


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
        steps_left = max(0, config.iterations - step)
    else:  # the challenge's rule: by the clock alone, at the mean pace so far
        left_ms = max(0.0, 1e3 * config.max_wallclock_seconds - elapsed_ms)
        steps_left = left_ms * max(step, 1) / max(elapsed_ms, 1e-9)
    return min(1.0, steps_left / config.warmdown_iters)


def muon_momentum(config, step):
    """A linear ramp up to MUON_MOMENTUM."""
    share = min(1.0, step / max(config.muon_momentum_warmup_steps, 1e-9))
    return (1 - share) * config.muon_momentum_warmup_start + share * config.muon_momentum


# === DATA: from shards to batches, ahead of time ===
# A step waits for its batch unless that is already on the device. So a thread reads later batches
# and a stream uploads them during compute, and a step waits for input only where input is slower.
#
#  shard files --readinto--> slot.host (pinned) --copy--> slot.tokens --widen--> slot.x, slot.y
#               reader thread      (uint16)   copy stream   (uint16) compute stream  (int64)
# On a CPU there is no copy, and the reader widens, too.
#
# The challenge's order of data: a step's tokens are 8 spans, one after the other. In a span,
# x is all but the last token and y all but the first; both are cut into rows. With TRAIN_SEQ_LEN=4
# and two rows in a span, row 0 has tokens 0 to 4, row 1 has 4 to 8, and row 2, of the next span,
# 9 to 13: a span of n targets takes n + 1 tokens.
HEADER_BYTES = 1024  # of a shard: 256 int32 (magic, version, tokens, ...); then uint16 tokens
GET_DATA = "set the folder that cached_challenge_fineweb.py or tokenize_docs.py in data/ prints"


class Shards:
    """The shards of a split in the order of their numbers, as one endless stream of tokens.

    While .producing is in the folder, more shards will come. Who makes them rewrites that file
    every few seconds and removes it at the end.
    Raises RunError for a folder without shards, a missing number and a truncated or corrupt file.
    """

    def __init__(self, config, split):
        self.folder = Path(config.data_path).absolute()
        self.split = split
        self.stall_seconds = config.data_stall_seconds
        self.vocab_size = config.vocab_size
        self.paths = []
        self.ends = [0]  # ends[i]: tokens in the first i shards
        self.identities = {}  # {name: "tokens, checksum"} of each shard
        self.expected = {}  # {name: what it was in the checkpoint}
        self.add_all()
        if split == "val":
            self.wait_while(lambda: '"val_complete": true' not in (self.producing() or ""))
            self.add_all()  # those that have come since the last look
            self.growing = False

    def producing(self):
        """What is in .producing; None if there is no such file."""
        with suppress(OSError):
            return Path(self.folder, ".producing").read_text()
        return None

    def add_all(self):
        self.growing = self.producing() is not None
        found = sorted(self.folder.glob(f"fineweb_{self.split}_*.bin"))
        if not found and not self.growing:
            kind = f"{self.split}_*" if any(self.folder.glob("fineweb_*.bin")) else "*"
            raise RunError(f"DATA_PATH={self.folder}: no fineweb_{kind}.bin: {GET_DATA}")
        # Numbers begin at 0 or 1; at 0 while more will come, because 1 may come before 0.
        first = int(not self.growing and found[0].stem.endswith("_000001"))
        for path in found[len(self.paths) :]:
            number = f"{first + len(self.paths):06d}"
            if path.name == f"fineweb_{self.split}_{number}.bin":
                self.add(path)
            elif not self.growing:
                raise RunError(f"{path}: expected number {number} next: get it, or move this")

    def wait_while(self, is_missing):
        """Waits for what a growing set does not have yet. RunError if nobody makes it."""
        seen = ""
        since = time.monotonic()
        while self.growing and is_missing():
            state = self.producing()
            if state != seen:
                seen = state
                since = time.monotonic()
            if time.monotonic() - since > self.stall_seconds:
                after = f"not changed for DATA_STALL_SECONDS={self.stall_seconds:g}"
                raise RunError(f"{self.folder}/.producing: {after}: {state}")
            time.sleep(0.05)
            self.add_all()

    def add(self, path):
        tokens, identity = identify_shard(path)
        was = self.expected.get(path.name, identity)
        if was != identity:
            raise RunError(f"{path}: the checkpoint had {was}, this has {identity}: restore it")
        self.identities[path.name] = identity
        # New lists: another thread may be reading the old ones.
        self.ends = [*self.ends, self.ends[-1] + tokens]
        self.paths = [*self.paths, path]

    def wait_for(self, token, told_to_stop):
        """Returns when `token` is on disk; in a complete set it always is."""
        self.wait_while(lambda: token >= self.ends[-1] and not told_to_stop())

    def pieces(self, first, length):
        """Yields where the `length` tokens from `first` on are: (path, byte offset, bytes)."""
        while length:
            position = first if self.growing else first % self.ends[-1]  # wraps around
            shard = bisect_right(self.ends, position) - 1
            here = min(length, self.ends[shard + 1] - position)
            yield self.paths[shard], HEADER_BYTES + 2 * (position - self.ends[shard]), 2 * here
            first += here
            length -= here


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
        """In micro-step m, rank r has part m * ranks + r of a step: part of a span, or spans."""
        tokens, seq_len = config.train_batch_tokens, config.train_seq_len
        ranks = runtime.world_size
        micro_batches = ranks * runtime.micro_steps
        if SPANS_PER_STEP % micro_batches and micro_batches % SPANS_PER_STEP:
            rule = f"times {ranks} ranks must divide 8 or be a multiple"
            more = f"set 8, and TRAIN_BATCH_TOKENS a multiple of {8 * ranks * seq_len}"
            raise RunError(f"GRAD_ACCUM_STEPS={runtime.micro_steps}: {rule}: {more}")
        unit = seq_len * math.lcm(SPANS_PER_STEP, micro_batches)
        if tokens % unit:
            raise RunError(f"TRAIN_BATCH_TOKENS={tokens}: set a multiple of {unit}")
        step_rows = tokens // seq_len
        batch_rows = step_rows // micro_batches
        return cls(
            seq_len=seq_len,
            span_rows=step_rows // SPANS_PER_STEP,
            first_row=runtime.rank * batch_rows,
            stride=ranks * batch_rows,
            batch_rows=batch_rows,
            end_row=sys.maxsize,
            first_batch=step * runtime.micro_steps,
        )

    @classmethod
    def val(cls, config, runtime, tokens):
        """The split, `tokens` long, is one span; every rank has one stretch of its rows."""
        seq_len = config.train_seq_len
        tokens = min(tokens, config.val_tokens or tokens)
        span_rows = (tokens - 1) // seq_len
        if span_rows < 1:
            raise RunError(f"TRAIN_SEQ_LEN={seq_len}: validation has {tokens} tokens: set less")
        first = span_rows * runtime.rank // runtime.world_size
        end = span_rows * (runtime.rank + 1) // runtime.world_size
        batch_tokens = config.val_batch_size // (runtime.world_size * runtime.micro_steps)
        batch_rows = max(1, min(batch_tokens // seq_len, end - first))
        return cls(
            seq_len=seq_len,
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
        """(first token, length in tokens, number of spans) of a range that `rows` returned"""
        spans = max(1, len(rows) // self.span_rows)
        return self.first_token(rows.start), len(rows) * self.seq_len + spans, spans

    def last_token_of_step(self, rows):
        """Of training. (All of a validation split is there before it is used.)"""
        step_rows = SPANS_PER_STEP * self.span_rows
        return self.first_token((rows.start // step_rows + 1) * step_rows) - 1

    def widen(self, rows, tokens, x, y):
        """Writes the uint16 tokens of some rows into int64 x and y (B, T), in numpy or torch.

        It decides what is scored: a target y of -100 counts nowhere.
        """
        filled = len(rows)
        _, length, spans = self.tokens(rows)
        by_span = tokens[:length].reshape(spans, -1)  # a part of one span, or whole spans
        x[:filled].reshape(spans, -1)[:] = by_span[:, :-1]  # a view: x itself is written
        y[:filled].reshape(spans, -1)[:] = by_span[:, 1:]
        x[filled:] = 0  # pads a short last batch: another shape would be compiled again
        y[filled:] = -100


class Summary(NamedTuple):
    """What the reader's thread has computed of a batch, for the host."""

    data_crc: int = 0  # training: a checksum of its rows
    targets: int = 0  # validation: how many targets are scored,
    bytes: int = 0  # and how many bytes of text they are


def summarize_rows(plan, rows, tokens):
    """A checksum of rows. Summed over batches it does not depend on the number of ranks.

    The row's number is the start value of its crc32, so that the order of rows matters, too.
    """
    data = memoryview(tokens)
    first = plan.first_token(rows.start)
    total = 0
    for row in rows:
        start = plan.first_token(row) - first
        total += zlib.crc32(data[start : start + plan.seq_len + 1], row)
    return Summary(data_crc=total & 0xFFFFFFFF)


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

    def words(self):
        """What is in effect, for the log."""
        switches = f"prefetch:{self.queue > 0} copy_stream:{self.copy_stream}"
        return f"{switches} prefetch_queue:{self.queue} gpu_prefetch:{self.device_slots}"


class Slot:
    """Room for one batch, made once: its tokens on the host and on the device, and x, y."""

    def __init__(self, plan, runtime):
        length = plan.tokens(range(plan.batch_rows))[1]
        shape = (plan.batch_rows, plan.seq_len)
        self.host = torch.empty(length, dtype=torch.uint16, pin_memory=runtime.cuda)
        self.tokens = self.host
        if runtime.cuda:
            self.tokens = torch.empty(length, dtype=torch.uint16, device=runtime.device)
        self.x = torch.zeros(shape, dtype=torch.int64, device=runtime.device)  # (B, T)
        self.y = torch.zeros_like(self.x)
        self.rows = range(0)
        self.summary = Summary()
        self.copied = None  # event: its upload is over
        self.widened = None  # event: its tokens on the device have been read


class Pipeline:
    """Iterates over this rank's batches of a split: slots with x, y (B, T), rows and summary.

    A batch is valid until the next one is asked for. Slots go round:
    to_fill -> (the reader's thread) -> filled -> (the copy) -> uploaded -> in use -> to_fill.
    There are as many as are read and uploaded ahead, plus the one in use.

    A CUDA stream is a queue of work that runs on its own; only events order two of them. Work
    that overwrites waits for the last read, work that reads waits for the last write:
      `copied`, on the copy stream: then the compute stream may widen the tokens, and the reader
      may read the next ones over those that were copied.
      `widened`, on the compute stream: then the copy stream may overwrite the device's tokens.
    x and y need no event: they are written and read on the compute stream alone, in its order.
    Each use records a new event, because a wait for an old event returns at once.
    """

    def __init__(
        self, shards, plan, overlap, runtime, *, summarize=summarize_rows, phase=nullcontext
    ):
        self.shards = shards
        self.plan = plan
        self.runtime = runtime
        self.summarize = summarize
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
            # Queued kernels may still use the memory that the slots have just been given.
            self.copy.wait_event(self.compute.record_event())
        self.batches_left = plan.num_batches - plan.first_batch
        self.bytes_read = 0
        self.total_wait_ms = 0.0  # that the device (on a CPU, the host) has waited for batches
        self.wait_events = deque()  # (asked, there): events around each wait, not all reached yet
        self.closed = threading.Event()  # ends the reader
        self.error = None  # what ended the reader
        self.reading = "no file", math.inf  # where the reader reads, since when
        self.thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self.thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.batches_left:
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
            self.total_wait_ms += 1e3 * (time.perf_counter() - start)
        return slot

    def _check_reader(self):
        """RunError if the reader has failed or reads for too long."""
        where, since = self.reading
        if self.error and self.filled.empty():
            raise RunError(f"the reader, at {where}: {first_line(self.error)}") from self.error
        limit = self.shards.stall_seconds
        if time.monotonic() - since > limit:
            raise RunError(f"the reader, at {where}: no answer for DATA_STALL_SECONDS={limit:g}")

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
        while self.wait_events and self.wait_events[0][1].query():
            asked, there = self.wait_events.popleft()
            self.total_wait_ms += asked.elapsed_time(there)

    def close(self):
        """Ends the reader; one that is stuck in a read is left alone after half a second."""
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
                # For the whole step: a rank that trained on its part alone would then wait for the
                # others in a collective, which cannot say what is missing.
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
        first, length, _ = self.plan.tokens(rows)
        tokens = slot.host.numpy()[:length]
        data = memoryview(tokens).cast("B")
        for path, offset, left in self.shards.pieces(first, length):
            self.reading = f"{path} at byte {offset}", time.monotonic()
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                while left:
                    got = file.readinto(data[:left])
                    if not got:
                        raise EOFError(f"it ends {left} bytes early")
                    data = data[got:]
                    left -= got
        if tokens.max() >= self.shards.vocab_size:  # its lookup would end a process on CUDA
            raise RunError(f"token {tokens.max()}: not below VOCAB_SIZE: set the shards' tokenizer")
        self.reading = "no file", math.inf
        slot.rows = rows
        slot.summary = self.summarize(self.plan, rows, tokens)
        if not self.runtime.cuda:
            self.plan.widen(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * length


# === EVALUATION: bits per byte; nats come from the logits, bytes from the tokens ===
# Loss per token depends on the tokenizer: longer tokens are harder to predict. Divided by the bytes
# of the text, scores of all tokenizers can be compared.
def mean_nats(model, x, y):
    """The score of a batch, whatever the training loss is: mean nats of y after x, both (B, T)."""
    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())


class ByteTable(NamedTuple):
    """What bits per byte need to know of each token: numpy arrays or tensors (vocabulary,)."""

    base: Any  # UTF-8 bytes, without a leading space
    leading_space: Any  # is there one?
    boundary: Any  # control, unknown, unused: no bytes, and a space after it does not count

    @classmethod
    def load(cls, path, data):
        """The table of a SentencePiece .model, or of a byte tokenizer's .json in either form."""
        if path.endswith(".json"):
            form = json.loads(data)
            offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
            boundary = np.arange(256 + offset) < offset  # lower ids are controls
            return cls(np.where(boundary, 0, 1), np.zeros_like(boundary), boundary)
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        ids = list(range(len(model)))
        pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]  # its space
        boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], 0)
        leading_space = np.array([piece.startswith(" ") for piece in pieces]) & ~boundary
        length = np.array([len(piece.encode()) for piece in pieces]) - leading_space
        base = np.where(boundary, 0, np.where(model.is_byte(ids), 1, length))
        return cls(base, leading_space, boundary)

    def bytes_of(self, x, y):
        """The bytes of the targets y, each after its x, both (B, T); 0 for y = -100."""
        scored = y >= 0
        target = y * scored  # 0, a valid index, where there is no target
        spaces = self.leading_space[target] & ~self.boundary[x]
        return ((self.base[target] + spaces) * scored).sum()


class Validation:
    """Scores the validation split. The reader's thread finds targets and bytes of each batch."""

    def __init__(self, config, runtime, log, phase):
        self.runtime = runtime
        self.log = log
        self.phase = phase
        self.shards = Shards(config, "val")
        self.plan = BatchPlan.val(config, runtime, self.shards.ends[-1])
        self.targets = self.plan.span_rows * self.plan.seq_len  # over all ranks, if all are scored
        self.partial = {"partial_val": 1} if config.val_tokens else {}  # for the log
        self.overlap = Overlap.of(config, "val", runtime.cuda)
        self.log_every = config.val_progress_log_every
        self.mean_nats = mean_nats  # Trainer compiles it
        self.byte_table, self.tokenizer = read_tokenizer(config)
        self.device_table = None
        if config.val_bytecount_device == "cuda":
            self.device_table = ByteTable(*(torch.tensor(t).cuda() for t in self.byte_table))

    def summarize(self, plan, rows, tokens):
        """Targets and bytes of a batch, in the reader's thread: exactly what `widen` scores."""
        x = np.zeros((len(rows), plan.seq_len), np.int64)
        y = np.zeros_like(x)
        plan.widen(rows, tokens, x, y)
        in_bytes = 0 if self.device_table else int(self.byte_table.bytes_of(x, y))
        return Summary(targets=int((y >= 0).sum()), bytes=in_bytes)

    def score(self, model, batch, sums):
        """Adds a batch's nats, bytes and targets to `sums`."""
        nats = 0.0
        targets = batch.summary.targets
        if targets:  # the mean of none is nan
            with self.phase("forward"):
                nats = self.mean_nats(model, batch.x, batch.y).double() * targets
        in_bytes = batch.summary.bytes
        if self.device_table:
            in_bytes = self.device_table.bytes_of(batch.x, batch.y)
        sums[0] += nats
        sums[1] += in_bytes
        sums[2] += targets

    @torch.no_grad()
    def evaluate(self, model, scope):
        """(nats per token, bits per byte, ms) of the whole split; all ranks take part.

        Raises HaltError after a signal.
        """
        runtime = self.runtime
        runtime.synchronize()  # a synchronisation point
        start = time.perf_counter()
        # nats, bytes, targets, and how many ranks have heard a signal
        sums = torch.zeros(4, dtype=torch.float64, device=runtime.device)
        hooks = {"summarize": self.summarize, "phase": self.phase}
        batches = Pipeline(self.shards, self.plan, self.overlap, runtime, **hooks)
        with closing(batches), self.phase("validate"):
            for done, batch in enumerate(batches, 1):
                if runtime.signum:
                    break
                self.score(model, batch, sums)
                if is_due(self.log_every, done):  # a synchronisation point
                    nats, _, seen, _ = sums.tolist()
                    self.log.line(
                        f"val_progress:{scope} batch {done}/{self.plan.num_batches} "
                        f"partial_mean_loss:{nats / max(seen, 1):.4f} tokens_seen:{seen:.0f}"
                    )
        sums[3] = runtime.signum > 0
        nats, in_bytes, targets, signals = runtime.all_reduce(sums).tolist()  # synchronises
        if signals:
            raise HaltError(runtime.broadcast(runtime.signum) or signal.SIGTERM)
        ms = 1e3 * (time.perf_counter() - start)
        return nats / targets, nats / math.log(2) / in_bytes, ms


# === ARTIFACT: the challenge's format: int8 with a scale per row, then zlib ===
QUANT_FORMAT = "int8_clean_per_row_v1"
FINAL = "final_int8_zlib_roundtrip"  # its log line, for parsers
CAP = 16_000_000  # bytes of script and artifact
SMALL = 65_536  # numbers; a tensor of at most so many is not quantized
CLIP_QUANTILE = 0.9999984  # of a row's absolute values: a larger one is clipped
LEVELS = 127  # quantized numbers are whole, from -LEVELS to LEVELS; int8 has no larger one
# The challenge's: rows of weights below 1 use fewer levels. 2.0**-14, float16's least, uses all.
LEAST_SCALE = 1 / 127


def storage(name, t, config):
    """How a tensor is stored: "int8", "float32", "float16", or "as it is" if it is not a float."""
    if not t.is_floating_point():
        return "as it is"
    if t.numel() > SMALL:
        return "int8"
    kept = config.int8_keep_float_fp32_name_patterns or config.control_tensor_name_patterns
    return "float32" if is_named(name, kept) else "float16"


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


# An artifact; the bytes of its tensors and before compression; how tensors are stored, in words.
Packed = namedtuple("Packed", "data payload raw stored")


def pack(state, config):
    """Quantizes, serializes and compresses a state dict on the CPU."""
    file = {"__quant_format__": QUANT_FORMAT, "quantized": {}, "scales": {}, "dtypes": {}}
    file |= {"passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
    tensors_of_kind = dict.fromkeys(("int8", "float16", "float32"), 0)
    errors = []
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        kind = storage(name, t, config)
        tensors_of_kind[kind] = tensors_of_kind.get(kind, 0) + 1
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
            file["passthrough"][name] = t.float() if kind == "float32" else t
    raw = torch_bytes(file)
    parts = [*file["quantized"].values(), *file["scales"].values(), *file["passthrough"].values()]
    words = ", ".join(f"{number} {kind}" for kind, number in tensors_of_kind.items())
    stored = f"stored: {words}, mean error {100 * np.mean(errors or [0.0]):.1f} %"
    return Packed(zlib.compress(raw, 9), sum(t.nbytes for t in parts), len(raw), stored)


def unpack(data, expected):
    """The state dict in an artifact, ours or the challenge's, with the types of `expected`."""
    file = torch.load(io.BytesIO(zlib.decompress(data)), "cpu", weights_only=True)
    state = dict(file["passthrough"])
    for name, q in file["quantized"].items():
        state[name] = dequantize(q, file["scales"][name])
    return {name: state[name].to(t.dtype) for name, t in expected.items()}


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
        self.model = GPT(config, runtime.dtype)
        self.model.load_state_dict(runtime.broadcast(self.model.state_dict()))  # equal replicas
        self.model.to(runtime.device)
        self.exchange = Exchange(self.model, runtime, self.clock)
        self.adam, self.muon = make_optimizers(self.model, config, runtime)
        self.shards = Shards(config, "train")
        self.overlap = Overlap.of(config, "train", runtime.cuda)
        self.validation = Validation(config, runtime, log, self.phase)
        self.val_ms = 0.0  # time of all validations
        self.logged = 0, 0.0, 0.0  # step, ms and input wait at the last step line
        self.saved = -1  # the step of the last checkpoint
        self.begin(step=0, data_crc=0)
        if config.torch_compile == "1" or (config.torch_compile == "auto" and runtime.cuda):
            self.model.compile(dynamic=False)
            self.validation.mean_nats = torch.compile(mean_nats, dynamic=False)
            self.muon.newton_schulz = torch.compile(newton_schulz, dynamic=False)

    @property
    def optimizers(self):
        """Every optimizer that the Trainer holds, also in lists and dicts."""
        parts = tree_leaves(vars(self))
        return [part for part in parts if isinstance(part, torch.optim.Optimizer)]

    @property
    def groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def begin(self, step, data_crc):
        """Continues after `step` steps: 0, or those before priming or in a checkpoint."""
        self.step = step
        # The checksum of this rank's rows. Rank 0 carries that of all rows before `step`.
        self.crc = data_crc if self.runtime.rank == 0 else 0
        self.exchange.begin(step, self.clock.total_ms, data_crc)

    def batches(self):
        plan = BatchPlan.train(self.config, self.runtime, self.step)
        return Pipeline(self.shards, plan, self.overlap, self.runtime, phase=self.phase)

    @torch.no_grad()  # gradients are recorded in the forward pass alone
    def train_step(self, batches):
        """Queues one step. On CUDA the host waits for nothing but input, in `batches`."""
        config = self.config
        exchange = self.exchange
        phase = self.phase
        micro_batches = self.runtime.micro_steps * self.runtime.world_size
        seed_step(config.seed, self.step * self.runtime.world_size + self.runtime.rank)
        exchange.vector.zero_()
        loss_sum = 0.0
        for batch in islice(batches, self.runtime.micro_steps):
            with phase("forward"), torch.enable_grad():
                loss = self.model(batch.x, batch.y) / micro_batches  # their sum is the mean
            with phase("backward"):
                exchange.backward(loss)
            loss_sum += loss.detach()
            self.crc = (self.crc + batch.summary.data_crc) & 0xFFFFFFFF
        with phase("reduce"):
            exchange.all_reduce(self.step, batches.total_wait_ms, self.crc, loss_sum)
        with phase("grad_clip"):
            if config.grad_clip_norm > 0:
                norm = exchange.gradients.norm() + 1e-6
                exchange.gradients.mul_((config.grad_clip_norm / norm).clamp(max=1.0))
        with phase("optimizer"):
            scale = lr_multiplier(config, self.step, exchange.elapsed_ms(self.step))
            for group in self.muon.param_groups:
                group["momentum"] = muon_momentum(config, self.step)
            for group in self.groups:
                group["lr"] = scale * group["base_lr"]
            for optimizer in self.optimizers:
                optimizer.step()
        # Whatever else a step changes belongs here, for example an average of the weights.
        self.step += 1

    def train(self):
        """The run: steps, and from time to time a line, a validation, a checkpoint."""
        config = self.config
        clock = self.clock
        for group in self.groups:
            group["base_lr"] = group["lr"]  # before the schedule
        prime(self)
        begun_ms = clock.total_ms
        self.logged = self.step, begun_ms, 0.0
        with closing(self.batches()) as batches:
            self.phase.begin_trace()
            clock.start()
            while True:
                # Messages of some steps ago: the device has later work, so it never idles.
                self.exchange.read(self.step - self.runtime.steps_late)
                if self.exchange.signum:
                    raise HaltError(self.exchange.signum)
                if is_over(config, self.step, self.exchange.elapsed_ms(self.step + 1)):
                    break
                if is_due(config.val_loss_every, self.step):
                    self.validate()
                self.train_step(batches)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    log_step(self)
                if is_due(config.checkpoint_every, self.step):
                    save(self)
                self.phase.end_step(self.step)
            if self.step > self.logged[0]:
                log_step(self)
            save(self)
            self.validate()  # it starts the clock again
            clock.stop()
        if self.phase.profiler:
            self.phase.profiler.stop()  # the run was shorter
        log_end(self, batches, begun_ms)

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

    def export_and_score(self):
        """Rank 0 packs the artifact, all ranks score it, and only then rank 0 writes files."""
        state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
        model = torch_bytes(state)
        if self.runtime.broadcast(sha256(model)) != sha256(model):
            cause = "what follows all_reduce must be the same on all ranks, random numbers too"
            raise RunError(f"the weights differ from rank 0's: {cause}")
        data = None
        if self.runtime.rank == 0:
            packed = pack(state, self.config)
            data = packed.data
            log_sizes(self.log, state, len(model), packed)
        data = self.runtime.broadcast(data)
        self.model.load_state_dict(unpack(data, state))
        try:
            loss, bpb, ms = self.evaluate(FINAL)
        finally:
            self.model.load_state_dict(state)  # a checkpoint holds the trained weights
        log_score(self, loss, bpb, ms)
        if self.runtime.rank == 0:
            write_atomic(self.log.path.with_suffix(".int8.ptz"), data)
            write_atomic(Path("final_model.int8.ptz"), data)
            write_atomic(Path("final_model.pt"), model)
        if not math.isfinite(loss):
            raise RunError(f"the score is {loss}: lower the learning rates")


def is_due(every, step):
    return every > 0 and step % every == 0


def is_over(config, step, next_ms):
    """Does a run end after `step` steps? A step that would end after the cap is not begun."""
    return step >= config.iterations or 0 < 1e3 * config.max_wallclock_seconds < next_ms


# ===== MACHINERY: keeps a run fast, safe and measurable; an experiment need not change it =====
# === EXCHANGE: a step's one all-reduce of gradients, and all that ranks tell each other in it ===
# Each collective costs a start and makes all ranks wait for the slowest one. So a step has one (and
# one in Muon), and what the host needs to know comes with the gradients.
class Message(NamedTuple):
    """What a rank tells the others. Float32 is exact here: each entry is added to zeros only."""

    steps: float  # how many its device is known to have finished
    elapsed_ms: float  # the training time at that step
    wait_ms: float  # for input, so far
    signum: float  # of a signal that it heard, or 0
    crc_low: float  # data_crc of the rows that it trained on: its lower 16 bits
    crc_high: float  # and its upper ones
    loss: float = 0.0  # its share of the mean loss, filled in on the device
    fault: float = 0.0  # 1: loss or gradient are not finite; filled in on the device


LOSS, FAULT = -2, -1  # their places in a Message


class Exchange:
    """All gradients are views of one vector. Its end is a table with one Message per rank.

    A rank writes its own row and leaves the others zero, so the sum over ranks is the whole table.
    The host reads it some steps later, when it is surely there: nothing drains the device, and all
    ranks decide alike, because they read the same table at the same step. So after a signal all
    end after the same step, up to three steps later.

    Clocks, each (steps, ms of training time):
      done_here   the last step that this rank's device is known to have finished
      agreed      rank 0's `done_here`, as all ranks have read it; the schedule depends on it
      pace_start  `agreed` after step 1, which may be slow; (0, 0.0) after RESUME
    """

    def __init__(self, model, runtime, clock):
        # An empty tensor (skip_weights of one layer) has no gradient.
        self.params = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self.runtime = runtime
        self.clock = clock
        size = sum(p.numel() for p in self.params)
        shape = runtime.world_size, len(Message._fields)
        self.vector = torch.zeros(size + math.prod(shape), device=runtime.device)
        self.gradients = self.vector[:size]
        self.table = self.vector[size:].view(shape)
        for p, part in split_as(self.gradients, self.params).items():
            p.grad = part
        tables = runtime.steps_late + 2  # one more than can be unread
        self.sent = torch.zeros(tables, shape[1], pin_memory=runtime.cuda)
        self.received = torch.zeros(tables, *shape, pin_memory=runtime.cuda)
        self.unread = deque()  # (step, its table on the host, the event after which it is there)

    def begin(self, step, elapsed_ms, data_crc):
        """Restarts at `step` with an empty history."""
        self.unread.clear()
        self.signum = 0  # of any rank, once all have read it
        self.messages = [Message(step, elapsed_ms, wait_ms=0.0, signum=0.0, **crc_parts(data_crc))]
        self.done_here = self.agreed = step, elapsed_ms
        self.pace_start = 0, 0.0

    def backward(self, loss):
        """Adds a loss's gradients to p.grad at once; loss.backward() would add them one by one."""
        # Keep them: freed at a random moment by autograd's thread, they would raise peak memory.
        self.kept = torch.autograd.grad(loss, self.params, materialize_grads=True)
        torch._foreach_add_([p.grad for p in self.params], self.kept)

    def all_reduce(self, step, wait_ms, crc, loss):
        """Sums gradients and table, and sends the table to the host.

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
        received.copy_(self.table, non_blocking=True)
        event = torch.cuda.Event(blocking=True) if self.runtime.cuda else None
        if event:
            event.record()
        self.unread.append((step, received, event))

    def read(self, before):
        """Reads the tables of all steps before `before`; RunError where one is not finite.

        The one synchronisation point of a step, and only where the host is that far ahead.
        """
        while self.unread and self.unread[0][0] < before:
            step, received, event = self.unread.popleft()
            if event:
                event.synchronize()
            self.messages = [Message(*values) for values in received.tolist()]
            for rank, message in enumerate(self.messages):
                self.signum = self.signum or int(message.signum)
                if message.fault:
                    where = f"step {step + 1}: loss or gradient of rank {rank}"
                    raise RunError(f"{where} is not finite: lower the learning rates")
            # Steps whose events have been reached are done, too, though their tables are unread.
            later = sum(event.query() for _, _, event in self.unread if event)
            self.done_here = step + 1 + later, self.clock.now_ms()
            self.agreed = max(self.agreed, self.messages[0][:2])

    def agree(self, step, ms):
        """Notes the exact time of `step`, which a log line has just told all ranks."""
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

    def mean_loss(self):
        """The training loss of the last step that was read; 0 before the first one."""
        return sum(message.loss for message in self.messages)

    def longest_wait_ms(self):
        """The longest input wait of any rank, in ms."""
        return max(message.wait_ms for message in self.messages)

    def data_crc(self):
        total = sum(int(each.crc_low) + (int(each.crc_high) << 16) for each in self.messages)
        return total & 0xFFFFFFFF


def crc_parts(crc):
    return {"crc_low": crc & 0xFFFF, "crc_high": crc >> 16}


# === RUNTIME: this process among its ranks, what it says, its files ===
class RunError(Exception):
    """A foreseeable failure, in one line: what, where, which value, what to do."""


class LostRankError(RunError):
    """Another rank has ended."""


class HaltError(Exception):
    """Stops all ranks at one step. Its argument: a signal's number."""


def first_line(error):
    text = getattr(error, "strerror", None) or str(error)
    return (text.strip() or repr(error)).splitlines()[0]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def as_problem(error, runtime):
    """A foreseeable error as a RunError with its remedy; all others as they are."""
    text = first_line(error)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return RunError(f"torch.compile failed: {text}: set TORCH_COMPILE=0")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        more = f"GRAD_ACCUM_STEPS={2 * runtime.micro_steps}"
        return RunError(f"out of memory: {text}: set {more}, or a smaller MODEL_DIM")
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return LostRankError("another rank has ended, or ranks make different collective calls")
    return error


def tell(text, stream="stdout"):
    """Prints. A closed console costs the text alone."""
    with suppress(OSError):
        # One write: under torchrun two ranks' lines would run together.
        print(text + "\n", end="", file=getattr(sys, stream), flush=True)


class Runtime:
    """This process: rank, device, dtype of the activations, and the first signal that it heard."""

    def __init__(self, config, env):
        self.rank = int(env.get("RANK", 0))
        self.world_size = int(env.get("WORLD_SIZE", 1))
        self.micro_steps = config.micro_steps(self.world_size)
        self.signum = 0  # of the first signal that this rank heard
        self.cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{env.get('LOCAL_RANK', 0)}" if self.cuda else "cpu")
        native = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        self.dtype = torch.bfloat16 if native else torch.float32  # of the activations
        # The host reads results this many steps late, so that it never waits for the device.
        self.steps_late = 2 if self.cuda else 0

    def start(self, env):
        """Device, process group, signals: from here on collectives work."""
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        if "RANK" in env:
            timeout = timedelta(minutes=5)  # of every wait for other ranks
            # torchrun's store outlives a restart: the prefix hides addresses of dead processes.
            try:
                store = next(dist.rendezvous("env://", timeout=timeout))[0]
            except (ValueError, dist.DistError) as error:
                reason = f"{first_line(error)}: start it with torchrun, or `unset RANK`"
                raise RunError(f"RANK={self.rank}: {reason}") from error
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                timeout=timeout,
                device_id=self.device if self.cuda else None,
                rank=self.rank,
                world_size=self.world_size,
                store=dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store),
            )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets SIGHUP
                signal.signal(number, self.hear)

    def hear(self, signum, frame):
        """Notes a signal. The next exchange tells all ranks: they end after the same step."""
        self.signum = self.signum or signum
        # Alone, a second Ctrl-C ends it at once. With torchrun each rank hears every one twice.
        if not dist.is_initialized():
            signal.signal(signum, signal.SIG_DFL)

    def synchronize(self):
        """Synchronisation point: returns when the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def all_reduce(self, tensor):
        """Sums over the ranks, in place. Queued on CUDA; with gloo a synchronisation point."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value):
        """Rank 0's value, on all ranks. A synchronisation point."""
        box = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(box, device=self.device)
        return box[0]


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id):
        self.path = Path("logs", f"{run_id}.txt")
        self.enabled = False

    def begin(self):
        """Starts to write: a refused start leaves no trace. RunError if another run writes."""
        try:
            self.path.parent.mkdir(exist_ok=True)
            lock = os.open(self.path, os.O_CREAT)  # open to the end
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some file systems have no locks
            if isinstance(error, BlockingIOError):
                raise RunError(f"{self.path}: another run uses it: set another RUN_ID") from error
        self.enabled = True

    def line(self, text):
        """For people: the console and the .txt."""
        if self.enabled:
            tell(text)
        self.write(".txt", text)

    def event(self, name, **values):
        """For tools: a line of JSON in the .jsonl."""
        self.write(".jsonl", json.dumps({"event": name, "time": round(time.time(), 3), **values}))

    def write(self, suffix, text):
        if not self.enabled:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            with open(self.path.with_suffix(suffix), "a", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as error:  # it costs lines, not the run
            tell(f"WARNING: {self.path} lacks a line: {first_line(error)}", "stderr")


def write_atomic(path, data):
    """Writes under a temporary name and renames when complete. RunError if that fails."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()  # of a full disk
        raise RunError(f"{path}: {first_line(error)}: mend that") from error


def identify_shard(path):
    """(tokens, "tokens, checksum") of a shard. The checksum is of 16 blocks spread over it."""
    block_bytes = 65_536
    size = path.stat().st_size
    checksum = 0
    with open(path, "rb") as file:
        header = file.read(12).ljust(12, b"\0")  # shorter in a truncated file
        for start in np.linspace(0, max(0, size - block_bytes), 16, dtype=np.int64):
            file.seek(start)
            checksum = zlib.crc32(file.read(block_bytes), checksum)
    magic, version, tokens = np.frombuffer(header, "<i4").tolist()
    if (magic, version, size) != (20240520, 1, HEADER_BYTES + 2 * tokens) or tokens < 1:
        begins = f"{magic}, {version}, {tokens} tokens in {size} bytes"
        raise RunError(f"{path}: truncated, or no shard ({begins}): get it again, or make it")
    return tokens, f"{tokens} tokens, {checksum:08x}"


def read_tokenizer(config):
    """(ByteTable, sha256) of TOKENIZER_PATH; RunError if it does not fit the shards."""
    path = config.tokenizer_path
    try:
        data = Path(path).read_bytes()
        table = ByteTable.load(path, data)
    except Exception as error:
        reason = first_line(error) if isinstance(error, OSError) else "no known kind of tokenizer"
        raise RunError(f"TOKENIZER_PATH={path}: {reason}: set that of the shards") from error
    size = len(table.base)
    if size != config.vocab_size:
        raise RunError(f"VOCAB_SIZE={config.vocab_size}: {path} has {size} tokens: set {size}")
    recorded = Path(config.data_path, "tokenizer.sha256")  # data/ writes it as sha256sum would
    if recorded.is_file() and sha256(data) not in recorded.read_text():
        made_by = f"{recorded.parent}/{recorded.read_text().split()[-1]}"
        raise RunError(f"TOKENIZER_PATH={path}: did not make the shards: set or restore {made_by}")
    return table, sha256(data)


def seed_step(seed, number):
    """Random numbers of an edit (dropout) depend on SEED, step and rank alone: RESUME is exact."""
    seed += 1_000_003 * (number + 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def torch_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


# === CHECKPOINTS: all that a run needs to continue, and what it is made of ===
def made_of(run):
    """{name: text} of script, tokenizer, shards and settings: they decide the result."""
    settings = {name.upper(): str(value) for name, value in asdict(run.config).items()}
    for name in ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "RESUME"):
        del settings[name]
    files = {"script": sha256(SOURCE), "tokenizer": run.validation.tokenizer}
    if run.shards.growing:
        files["growing"] = "more shards will come"
    return files | run.validation.shards.identities | run.shards.identities | settings


def differences(here, there):
    """["name: ... here, ... there"] for two `made_of`; of a growing set, only what both have."""
    names = here.keys() | there.keys()
    if "growing" in names:
        names = here.keys() & there.keys()
    return [
        f"{name}: {here.get(name, 'missing')} here, {there.get(name, 'missing')} there"
        for name in sorted(names)
        if here.get(name) != there.get(name)
    ]


def held(run):
    """{attribute: value} of all that training may change."""
    tools = Config, Runtime, RunLog, Clock, Phases, Exchange, Shards, Overlap, Validation
    return {name: value for name, value in vars(run).items() if not isinstance(value, tools)}


def state_of(place, part):
    """A copy of a part of a run; RunError for what cannot be saved."""
    if hasattr(part, "load_state_dict"):
        return copy.deepcopy(part.state_dict())
    if torch.is_tensor(part):
        return part.detach().clone()
    if type(part) in (type(None), bool, int, float, str):
        return part
    what = f"Trainer{keystr(place)} is a {type(part).__name__}"
    raise RunError(f"{what}: checkpoints need its state_dict and load_state_dict")


def with_state(part, saved):
    """A part of a run with its saved state. Objects and tensors keep their identity."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(saved)
        return part
    if torch.is_tensor(part):
        if part.shape != saved.shape:
            raise ValueError(f"{tuple(saved.shape)} is the shape of a {tuple(part.shape)} tensor")
        part.detach().copy_(saved)
        return part
    return saved


def snapshot(run):
    """A copy of all that a run needs to continue. A synchronisation point. RunError for what
    cannot be saved, and after a loss that is not finite."""
    state = tree_map_with_path(state_of, held(run))
    run.runtime.synchronize()
    run.exchange.read(run.step)
    return {
        "held": state,
        "made_of": made_of(run),
        "step": run.step,
        "train_ms": run.clock.now_ms(),
        "data_crc": run.exchange.data_crc(),
    }


def restore(run, state):
    """Continues from a snapshot."""
    differ = held(run).keys() ^ state["held"].keys()
    try:
        if differ:
            raise ValueError(f"it differs in {', '.join(sorted(differ))}")
        vars(run).update(tree_map(with_state, held(run), state["held"]))
    except ValueError as error:
        raise RunError(f"Trainer must hold its state from __init__ on: {error}") from error
    run.clock.total_ms = state["train_ms"]
    run.begin(state["step"], state["data_crc"])


def save(run):
    """Rank 0 writes checkpoints/<RUN_ID>/step_<8 digits>.pt. The last CHECKPOINT_KEEP stay."""
    path = checkpoint_path(run.config.run_id, run.step)
    if run.saved == run.step and path.exists():
        return
    run.saved = run.step
    run.clock.stop()  # writing is not training time
    state = snapshot(run)
    try:
        if run.runtime.rank == 0:
            write_atomic(path, torch_bytes(state))
            run.log.event("checkpoint", step=run.step, path=str(path))
            for old in checkpoint_files(run.config.run_id)[run.config.checkpoint_keep :]:
                old.unlink()
    except (RunError, OSError) as error:  # a full disk costs a checkpoint, not the run
        run.log.line(f"WARNING: {error}")
    run.clock.start()


def checkpoint_path(run_id, step):
    return Path("checkpoints", run_id, f"step_{step:08d}.pt")


def checkpoint_files(run_id):
    """The checkpoints of a run, the newest first."""
    return sorted(Path("checkpoints", run_id).glob("step_*.pt"), reverse=True)


def read_checkpoint(config):
    """(path, state) of what RESUME means, or None. RunError if that is not a checkpoint."""
    files = checkpoint_files(config.run_id)
    auto = config.resume == "auto"
    if not config.resume or (auto and not files):
        return None
    path = files[0] if auto else Path(config.resume)
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load ignores checksums
            raise ValueError
        state = torch.load(path, "cpu", weights_only=True)
        state["made_of"], state["held"]  # torch.load also reads other files, such as weights
    except Exception as error:  # whatever a bad file raises
        reason = "damaged, or not a checkpoint" if path.is_file() else first_line(error)
        remedy = "remove it" if auto else "set auto, or a step_<n>.pt"
        raise RunError(f"RESUME={path}: {reason}: {remedy}") from error
    if not auto and any(other.name > path.name for other in files):
        raise RunError(f"RESUME={path}: RUN_ID={config.run_id} has later ones: set another RUN_ID")
    return path, state


def halt(run, signum):
    """All ranks have ended after the same step. (exit code, status, problem)"""
    save(run)
    run.runtime.broadcast("saved")  # all wait for the disk, or torchrun would end rank 0
    resume = f"RUN_ID={run.config.run_id} RESUME=auto <command>"
    return 128 + signum, "interrupted", f"interrupted after step {run.step}; to resume: {resume}"


@torch.no_grad()
def prime(run):
    """Steps off the clock, which compile and allocate; then everything is put back."""
    before = snapshot(run)
    if not run.config.warmup_steps:
        return
    with closing(run.batches()) as batches:
        for done in range(1, run.config.warmup_steps + 1):
            run.train_step(batches)
            run.exchange.read(run.step)
            run.log.line(f"warmup_step:{done}/{run.config.warmup_steps}")
    if run.runtime.cuda or run.config.torch_compile == "1":  # a validation's graph, too
        slot = Slot(run.validation.plan, run.runtime)
        run.model.eval()
        run.validation.mean_nats(run.model, slot.x, slot.y)
        run.model.train()
    restore(run, before)


# === INSTRUMENTS: log lines, the clock, TRACE_STEPS and TRAINING_TIMING_BREAKDOWN ===
# How a value looks in a log line. Its name, with the unit, is that of the .jsonl.
FORMATS = {
    "train_loss": "train_loss:{:.4f}",
    "train_time_ms": "train_time:{:.0f}ms",
    "step_avg_ms": "step_avg:{:.2f}ms",
    "tok_s": "tok_s:{:.0f}",
    "input_wait_percent": "input_wait:{:.2f}%",
    "eta_s": "eta:{:.0f}s",
    "eval_time_ms": "eval_time:{:.0f}ms",
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
    wait_ms = exchange.longest_wait_ms()
    last_step, last_ms, last_wait_ms = run.logged
    run.logged = step, ms, wait_ms
    tok_s = 1e3 * (step - last_step) * config.train_batch_tokens / (ms - last_ms)
    share_left = 1.0 - progress(config, step, ms)
    values = {
        "train_loss": exchange.mean_loss(),
        "train_time_ms": ms,
        "step_avg_ms": ms / step,
        "tok_s": tok_s,
        "input_wait_percent": 100 * (wait_ms - last_wait_ms) / (ms - last_ms),
        "data_crc": f"{exchange.data_crc():08x}",
        "eta_s": 1e-3 * ms * share_left / (1.0 - share_left),
    }
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
    run.log.event("score", step=run.step, val_loss=loss, val_bpb=bpb, **values)


def log_end(run, batches, begun_ms):
    """What training and its input have cost since `begun_ms`, its start or RESUME."""
    ms = run.clock.total_ms
    total_ms = max(batches.total_wait_ms, run.exchange.longest_wait_ms())
    percent = 100 * total_ms / max(ms - begun_ms, 1e-9)
    if run.step < run.config.iterations:
        ended = f"train_time:{ms:.0f}ms step:{run.step}/{run.config.iterations}"
        run.log.line(f"stopping_early: wallclock_cap {ended}")
    epochs = run.step * (run.config.train_batch_tokens + SPANS_PER_STEP) / run.shards.ends[-1]
    run.log.line(
        f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{run.val_ms:.0f}ms\n"
        f"input_wait total:{total_ms:.3f}ms share:{percent:.3f}% read_bytes:{batches.bytes_read} "
        f"epochs:{epochs:.3f}\n"
        f"input cost {percent:.2f} % of training\n"
        f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
        f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB"
    )
    first, last = lr_multiplier(run.config, 0, 0.0), lr_multiplier(run.config, run.step, ms)
    if run.config.warmdown_iters and (first < 1.0 or last > 0.1):
        rates = f"rates went from {first:.2f} to {last:.2f} of those set"
        run.log.line(f"WARNING: {rates}: see WARMDOWN_ITERS")
    values = {"total_ms": total_ms, "share_percent": percent, "epochs": epochs}
    values |= {"timing_train_loop_ms": ms, "timing_val_total_ms": run.val_ms}
    run.log.event("input", read_bytes=batches.bytes_read, **values)


def log_sizes(log, state, model_bytes, packed):
    """The challenge's lines on sizes, and ours on how tensors are stored."""
    code_bytes = len(SOURCE)
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
        """Two synchronisation points around a phase; "sync" is what both have waited for."""
        start = self.synchronized_ms()
        yield
        self.ms[name] += self.synchronized_ms() - start
        if name == "validate":  # its phases belong to no step
            self.ms = defaultdict(float, validate=self.ms[name])

    def synchronized_ms(self):
        start = time.perf_counter()
        self.runtime.synchronize()
        end = time.perf_counter()
        self.ms["sync"] += 1e3 * (end - start)
        return 1e3 * end

    def begin_trace(self):
        """From here on, on rank 0: what runs when on all threads and streams, overlap on."""
        self.ms.clear()  # of priming
        steps = self.config.trace_steps
        if steps == 0 or self.runtime.rank > 0:
            return
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
        profiler.export_chrome_trace(str(path))
        self.log.line(f"trace: {path}")

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
SETTINGS = {name.upper(): kind for name, kind in Config.__annotations__.items()}
FIXED = {name for name, kind in SETTINGS.items() if "fixed" in get_args(kind)}
KNOWN = SETTINGS.keys() | {"MODEL_DIR", "NUM_THREADS", "SHLVL"}  # or not meant


def parse(kind, text):
    """The value of a setting's text; ValueError says what is wanted."""
    kind, *notes = get_args(kind) if get_origin(kind) is Annotated else [kind]
    if kind is str:
        return text
    if kind in (int, float):
        anything = -math.inf, math.inf, "a number" if kind is float else "a whole number"
        least, end, wanted = next((note for note in notes if note != "fixed"), anything)
        with suppress(ValueError):
            value = kind(text)
            if least <= value < end:
                return value
        raise ValueError(wanted)
    words = {"0": False, "1": True} if kind is bool else {word: word for word in get_args(kind)}
    if text not in words:
        raise ValueError(" or ".join(words))
    return words[text]


def given_settings(env):
    """{NAME: text} of the settings in the environment"""
    return {name: env[name].strip("\r") for name in SETTINGS if name in env}


def read_config(env):
    """(Config, faults): a fault for every wrong value, and for a name that is nearly a setting."""
    faults = []
    values = {}
    for name, text in given_settings(env).items():
        try:
            values[name.lower()] = parse(SETTINGS[name], text)
        except ValueError as wanted:
            faults.append(f"{name}={text}: set {wanted}, see --help")
    for name in sorted(env.keys() - KNOWN):
        for near in difflib.get_close_matches(name.upper(), SETTINGS, n=1, cutoff=0.85):
            faults.append(f"{name}={env[name]}: no such setting: did you mean {near}?")
    return Config(**values), faults


def find_faults(config, env):
    """A line for each thing that is wrong with the settings or what they name."""
    faults = []
    for name, is_wrong, remedy in rules(config, env):
        if is_wrong:
            faults.append(f"{name}={getattr(config, name.lower())}: {remedy}")
    ranks = int(env.get("WORLD_SIZE", 1))
    place = SimpleNamespace(rank=0, world_size=ranks, micro_steps=config.micro_steps(ranks))
    plan = partial(BatchPlan.train, runtime=place)
    for make in plan, read_tokenizer, partial(Shards, split="train"), partial(Shards, split="val"):
        try:
            make(config)
        except RunError as error:
            faults.append(str(error))
    return list(dict.fromkeys(faults))


def rules(config, env):
    """(setting, is it wrong?, the remedy)"""
    heads = config.num_heads
    step = 2 * heads  # of MODEL_DIM
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = 0  # bytes: float32 weights, gradients and two moments
    with suppress(Exception), torch.device("meta"):  # sizes may be wrong, an edit may need values
        need = 16 * sum(p.numel() for p in GPT(config, torch.float32).parameters())
    large = f"needs {need >> 30} GiB, there are {memory >> 30}: lower it, or NUM_LAYERS"
    log = Path("logs", f"{config.run_id}.txt")
    name = re.fullmatch(r"(\w[\w.-]{0,99})?", config.run_id)
    taken = name and not config.resume and (log.exists() or checkpoint_files(config.run_id))
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    blind = config.device == "cuda" or (config.device == "auto" and Path("/dev/nvidiactl").exists())
    few = 0 < gpus < int(env.get("LOCAL_WORLD_SIZE", 1))
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    return (
        ("MODEL_DIM", need > memory and not gpus, large),
        ("MODEL_DIM", config.model_dim % step, f"NUM_HEADS={heads}: set a multiple of {step}"),
        ("NUM_KV_HEADS", heads % config.num_kv_heads, f"set a divisor of NUM_HEADS={heads}"),
        ("RUN_ID", not name, "set letters or digits, then also '.', '_', '-', at most 100"),
        ("RUN_ID", not os.access(".", os.W_OK), "you cannot write in this folder: use another"),
        ("RUN_ID", taken, f"{log} or its checkpoints exist: set another RUN_ID, or RESUME=auto"),
        ("RESUME", config.resume == "auto" and not env.get("RUN_ID"), "set RUN_ID, too"),
        ("DEVICE", blind and not gpus, f"no GPU for {build}: install another, or set cpu"),
        ("DEVICE", few, f"{gpus} GPUs are fewer than processes: see --nproc_per_node"),
        ("VAL_BYTECOUNT_DEVICE", config.val_bytecount_device == "cuda" and not gpus, "set cpu"),
    )


# === MAIN ===
def attention_backends(config):
    """{name: backend} of those to use, fastest first; SDPA takes the first that fits."""
    wanted = config.attention_backend
    flash = SDPBackend.FLASH_ATTENTION
    every = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": flash, "math": SDPBackend.MATH}
    if wanted in ("auto", "fa3"):
        try:
            nn.attention.activate_flash_attention_impl("FA3")
            every = {"fa3": every.pop("flash")} | every
        except Exception as error:
            if wanted == "fa3":
                raise RunError(f"ATTENTION_BACKEND=fa3: {first_line(error)}: set auto") from error
    return every if wanted == "auto" else {wanted: every[wanted]}


def log_source(log, settings):
    """The beginning of a log: script, versions, settings."""
    rule = "=" * 100
    smi = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    log.write(".txt", f"{SOURCE.decode()}\n{rule}\n{versions}\n{smi}\n{rule}")
    log.line(str(log.path))
    log.line(f"settings: {' '.join(f'{name}={text}' for name, text in settings.items())}")
    log.event("run", run_id=log.path.stem, argv=sys.argv, settings=settings)


def numbers_of(pid):
    """The names of numbers in a process's first environment, without CUDA's and Python's."""
    number = r"(?:^|\0)(?!CUDA|NCCL|OMP|PYTHON|TORCHI)([A-Z]\w*)=-?[\d.]+(?:e-?\d+)?(?=\0)"
    return {*re.findall(number, Path(f"/proc/{pid}/environ").read_text(errors="replace"))}


def log_header(run, backends):
    """Settings, in the challenge's lines."""
    config = run.config
    log = run.log
    runtime = run.runtime

    def words(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    val = run.validation.overlap
    kind = "byte" if config.tokenizer_path.endswith(".json") else "sentencepiece"
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    head_lr = 0.0 if config.tie_embeddings else config.head_lr
    log.line(
        f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{run.shards.folder.name} train_shards:{len(run.shards.paths)}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"{as_words({'tokens': run.validation.targets, **run.validation.partial})}\n"
        f"model_params:{sum(p.numel() for p in run.model.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{runtime.micro_steps}\n"
        f"sdp_backends:{backends}\nattention_mode:gqa {words('num_heads num_kv_heads')}\n"
        f"{words('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{words('matrix_lr scalar_lr')}\n"
        f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{words('seed')}\n"
        f"train_io:{run.overlap.words()}\n"
        f"val_io:overlap:{val.queue > 0 or val.copy_stream} {val.words()} "
        f"bytecount_device:{config.val_bytecount_device}"
    )
    if not Path(config.data_path, "tokenizer.sha256").is_file():
        log.line("WARNING: no tokenizer.sha256 in DATA_PATH: prove val_bpb with data/audit.py")
    for same in {*run.shards.identities.values()} & {*run.validation.shards.identities.values()}:
        log.line(f"WARNING: a validation shard is a training shard, too: {same}")
    with suppress(OSError):  # EMA_DECAY=0.9 in front of the command: its shell does not have it
        command = os.getppid() if "RANK" in os.environ else os.getpid()  # torchrun, or this one
        for name in sorted(numbers_of(command) - numbers_of(os.getsid(os.getppid())) - KNOWN):
            log.line(f"WARNING: {name} is not a setting of this script: see --help")
    log.event("config", **asdict(config))
    log.event("made_of", **made_of(run))
    device = torch.cuda.get_device_name() if runtime.cuda else os.uname().machine
    machine = {"device": device, "cpus": os.cpu_count(), "world_size": runtime.world_size}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    log.event("hardware", **machine, **versions, python=sys.version.split()[0])


def resume(run, checkpoint):
    """Restores a checkpoint. Rates and betas stay this run's; what steps have changed does not."""
    path, state = checkpoint
    may_differ = {"script"} | SETTINGS.keys() - FIXED
    differ = differences(made_of(run), state["made_of"])
    differ = [text for text in differ if text.split(":")[0] not in may_differ]
    if differ:
        remedy = "restore that, or leave out RESUME and set another RUN_ID"
        raise RunError(f"RESUME={path} is of other things: {'; '.join(differ)}: {remedy}")
    run.shards.expected = state["made_of"]
    own = [group["made_with"] for group in run.groups]
    try:
        restore(run, state)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise RunError(f"RESUME={path}: {reason}: mend the script, or set a new RUN_ID") from error
    for group, mine in zip(run.groups, own, strict=True):
        was = group["made_with"]
        changed = {name for name in was if name != "lr" and group[name] != was[name]}
        group.update({name: mine[name] for name in mine.keys() - changed}, made_with=mine)


def log_resume(run, checkpoint, trained):
    if not checkpoint:
        if run.config.resume:
            run.log.line(f"WARNING: RESUME: {run.config.run_id} has no checkpoint: step 1 is next")
        return
    path, state = checkpoint
    for text in differences(made_of(run), state["made_of"]):
        run.log.line(f"WARNING: RESUME continues with another {text}")
    if trained:
        run.log.line(f"no step is left: packs and scores {path}")
        return
    run.log.line(f"resumed: step:{run.step} resumed_from:{path}")
    run.log.event("checkpoint", step=run.step, resumed_from=str(path))


def run_to_the_end(config, runtime, log, checkpoint, settings):
    """(exit code, status, problem): all ranks come to the same end."""
    backends = attention_backends(config)
    names = ",".join(backends)
    torch.compiler.config.cache_key_tag = names  # or its cache would not tell them apart
    with sdpa_kernel(list(backends.values()), set_priority=True):
        run = Trainer(config, runtime, log)
        for group in run.groups:
            group["made_with"] = {name: group[name] for name in group if name != "params"}
        differ = differences(made_of(run), runtime.broadcast(made_of(run)))
        if differ:
            raise RunError(f"not the same as rank 0: {'; '.join(differ)}: copy rank 0's")
        if checkpoint:
            resume(run, checkpoint)
        trained = run.step > 0 and is_over(config, run.step, run.exchange.elapsed_ms(run.step + 1))
        has_log = log.path.exists()
        if runtime.rank == 0:
            log.begin()
        if not (trained and has_log):  # that log has the settings
            log_source(log, settings)
            log_header(run, names)
        log_resume(run, checkpoint, trained)
        try:
            if not trained:
                run.train()
            run.export_and_score()
        except HaltError as end:
            return halt(run, *end.args)
    return 0, "finished", ""


def execute(config, env):
    """Runs it; the exit code, the same on all ranks."""
    runtime = Runtime(config, env)
    runtime.start(env)
    checkpoint = read_checkpoint(config) if runtime.rank == 0 else None
    run_id, checkpoint = runtime.broadcast((config.run_id or str(uuid.uuid4()), checkpoint))
    config = replace(config, run_id=run_id)
    log = RunLog(run_id)
    settings = given_settings(env)
    try:
        code, status, problem = run_to_the_end(config, runtime, log, checkpoint, settings)
    except Exception as error:
        problem = as_problem(error, runtime)
        log.event("end", status="failed", exit_code=1, error=first_line(problem))
        raise problem from (None if problem is error else error)
    log.event("end", status=status, exit_code=code, error=problem)
    if runtime.rank == 0:
        tell(f"{status}: see {log.path}")
        if problem:  # last: it says how to continue
            tell(f"train_gpt.py: {problem}", "stderr")
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def main(arguments, env):
    """The exit code: 0 done, 1 failed, 2 wrong settings, 128 + n ended by signal n."""
    if arguments in (["--help"], ["-h"]):
        tell(f"{__doc__}\n{inspect.getsource(Config)}")
        return 0
    env = env if "RANK" in env else {**env, "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # alone
    config, faults = read_config(env)
    how = "settings go in front: ITERATIONS=100 python3 train_gpt.py"
    faults += [f"{word}: {how}" for word in arguments if word != "--print-config"]
    if arguments == ["--print-config"]:
        pairs = {name: {"value": v, "source": "default"} for name, v in vars(config).items()}
        for name in given_settings(env):
            pairs[name.lower()]["source"] = "environment"
        tell(json.dumps(pairs, indent=1))
        if not faults:
            return 0
    else:
        faults += find_faults(config, env)
    if not faults:
        return execute(config, env)
    if env.get("LOCAL_RANK", "0") == "0":
        lines = "\n  ".join(["nothing started, wrong settings:", *faults])
        tell(f"train_gpt.py: {lines}", "stderr")
    else:
        time.sleep(30)  # torchrun ends all at the first exit: that of the rank that speaks
    return 2


if __name__ == "__main__":
    exit_code = 1
    rank = os.environ.get("RANK", "0")
    try:
        exit_code = main(sys.argv[1:], os.environ)
    except BaseException as error:
        if rank != "0" or isinstance(error, LostRankError):
            # Rank 0, or the rank that has the cause, says it first; torchrun then ends this one.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        if isinstance(error, RunError):
            tell(f"train_gpt.py: rank {rank}: {error}", "stderr")
        else:
            traceback.print_exc()
    os._exit(exit_code)  # the interpreter's own exit aborts now and then, in gloo
