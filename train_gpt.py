"""Train a small GPT for the parameter-golf challenge: the lowest bits per byte in 16,000,000 bytes.

On 8 GPUs (or 1, 2, 4):          torchrun --standalone --nproc_per_node=8 train_gpt.py
One process, on a GPU or a CPU:  python3 train_gpt.py
Settings, after or in front:     python3 train_gpt.py ITERATIONS=100 SEED=7
All settings; their values now:  python3 train_gpt.py --help | --print-config

Data loading runs while the device computes: a thread reads tokens, a copy stream uploads them, the
compute stream trains on them. One Pipeline class does this for training and validation.

What you change comes first: CONFIG MODEL OPTIMIZERS DATA EVALUATION ARTIFACT TRAINING.
Then comes MACHINERY: PIPELINE EXCHANGE RUNTIME CHECKPOINTS INSTRUMENTS SETTINGS MAIN.

To change          edit
a setting          a line in Config; Fixed[...] if it decides the model or data
a parameter        create it in the model; make_optimizers needs a rule for its kind
new state          an attribute of Trainer, made whole in __init__: modules, optimizers, tensors,
                   numbers, also in lists and dicts, are saved in checkpoints and restored; the
                   state of rank 0 is saved for all, so tensors must be the same on all ranks
a step             Trainer.train_step; it must take micro_steps batches, for RESUME
an average         Trainer.after_step, which is called when all optimizers have stepped
the training loss  GPT.forward; a step's loss is the mean over micro-batches, so each needs as many
                   targets; the score is computed from GPT.logits, whatever forward does
an optimizer       any that steps without a closure, an attribute of Trainer; stepped and scheduled
a schedule         lr_multiplier, times base_lr; a new one by progress(): the clock ends runs
what is scored     BatchPlan.widen, of both splits: a target of -100 counts nowhere
how it is stored   storage() chooses the type, pack() then calls quantize()
the step line      log_step: a value added there is in the .jsonl file, too
the order of data  Shards for shards, BatchPlan.rows for batches; by the number of the step, never
                   by progress(), because the reader is ahead of the clock

Then prove the edit: python3 tools/verify.py train_gpt.py NAME=value ...
"""

import difflib
import errno
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
from collections import defaultdict, deque
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

try:
    SOURCE = Path(__file__).read_bytes()  # before the slow imports: the text that really runs
    import numpy as np
    import sentencepiece
    import torch
except ImportError as error:
    sys.exit(f"{__file__}: {error}: {sys.executable} -m pip install -r requirements.txt")
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

# === CONFIG: each line `name: type = default  # unit; meaning` is a setting; NAME=value sets it ===
# Each type names its least value, the first one that is too large, and what to say of others.
NonNegativeInt = Annotated[int, (0, 2**63, "a whole number from 0 on")]
PositiveInt = Annotated[int, (1, 2**63, "a whole number from 1 on")]
NonNegativeFloat = Annotated[float, (0, math.inf, "a number >= 0")]
PositiveFloat = Annotated[float, (1e-300, math.inf, "a number > 0")]
Fraction = Annotated[float, (0, 1, "a number >= 0, < 1")]
VocabSize = Annotated[int, (1, 65_537, "1 to 65536: shards hold 16 bits per token")]
# Fixed[int] is Annotated[int, "fixed"]. It marks a setting that decides the model or data: RESUME
# needs the checkpoint's value of it. All other settings may change on RESUME.
Fixed = Annotated[TypeVar("Kind"), "fixed"]
# Tensors with one of these in their names: trained by Adam; if small, stored in float32.
CONTROLS = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)


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
    vocab_size: Fixed[VocabSize] = 1024  # tokens; that of the tokenizer
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
        x = self.tok_emb(tokens).to(self.dtype)  # (B, T, D)
        x = x0 = rms_norm(x)
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
        buffers = {p: self.state[p]["momentum_buffer"] for p in self.matrices}
        momenta = [group["momentum"] for group in self.param_groups for _ in group["params"]]
        torch._foreach_mul_(list(buffers.values()), momenta)
        torch._foreach_add_(list(buffers.values()), [p.grad for p in self.matrices])
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p in self.share]
            if matrices:
                nesterov = torch.stack([p.grad for p in matrices])  # (n, rows, cols)
                momentum = torch.stack([buffers[p] for p in matrices])
                nesterov.add_(momentum, alpha=group["momentum"])
                update = self.newton_schulz(nesterov, self.iterations, self.dtype)
                torch._foreach_copy_([self.reduced_of[p] for p in matrices], update.unbind())
        self.runtime.all_reduce(self.reduced)
        self.updates.copy_(self.reduced)
        for group in self.param_groups:
            updates = [self.update_of[p] for p in group["params"]]
            rows, cols = group["params"][0].shape
            rate = group["lr"] * max(1.0, rows / cols) ** 0.5  # as in Keller Jordan's Muon
            torch._foreach_add_(group["params"], updates, alpha=-rate)


def make_optimizers(model, config, runtime):
    """(Adam, Muon). Each kind of parameter has a rule here; none is trained by default."""
    matrices = defaultdict(list)  # {shape: matrices of the blocks}
    vectors = []
    for name, p in model.named_parameters():
        if name in ("tok_emb.weight", "lm_head.weight"):
            continue  # they have groups of their own
        control = is_named(name, config.control_tensor_name_patterns)
        if p.ndim < 2 or control or name == "skip_weights":
            vectors.append(p)
        elif p.ndim == 2 and name.startswith("blocks."):
            matrices[p.shape].append(p)
        else:
            rule = "no rule in make_optimizers says what trains it: add one there"
            raise RunError(f"{name}, shape {tuple(p.shape)}: {rule}")
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    adam_groups = [
        {"params": [model.tok_emb.weight], "lr": embed_lr},
        {"params": vectors, "lr": config.scalar_lr},
    ]
    if not config.tie_embeddings:
        adam_groups.append({"params": [model.lm_head.weight], "lr": config.head_lr})
    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in matrices.values()]
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


# === DATA: which rows form a batch ===
# The challenge's order of data: a step's tokens are 8 spans, one after the other. In a span,
# x is all but the last token and y all but the first; both are cut into rows. With TRAIN_SEQ_LEN=4
# and two rows in a span, row 0 has tokens 0 to 4, row 1 has 4 to 8, and row 2, of the next span,
# 9 to 13: a span of n targets takes n + 1 tokens.
SPANS_PER_STEP = 8


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
    def train(cls, config, rank=0, ranks=1, step=0):
        """In micro-step m, rank r has part m * ranks + r of a step: part of a span, or spans."""
        tokens, seq_len = config.train_batch_tokens, config.train_seq_len
        micro_steps = config.micro_steps(ranks)
        micro_batches = ranks * micro_steps
        if SPANS_PER_STEP % micro_batches and micro_batches % SPANS_PER_STEP:
            rule = f"times {ranks} ranks must divide 8 or be a multiple"
            more = f"set 8, and TRAIN_BATCH_TOKENS a multiple of {8 * ranks * seq_len}"
            raise RunError(f"GRAD_ACCUM_STEPS={micro_steps}: {rule}: {more}")
        unit = seq_len * math.lcm(SPANS_PER_STEP, micro_batches)
        if tokens % unit:
            raise RunError(f"TRAIN_BATCH_TOKENS={tokens}: set a multiple of {unit}")
        step_rows = tokens // seq_len
        batch_rows = step_rows // micro_batches
        return cls(
            seq_len=seq_len,
            span_rows=step_rows // SPANS_PER_STEP,
            first_row=rank * batch_rows,
            stride=ranks * batch_rows,
            batch_rows=batch_rows,
            end_row=sys.maxsize,
            first_batch=step * micro_steps,
        )

    @classmethod
    def val(cls, config, tokens, rank=0, ranks=1):
        """The split, `tokens` long, is one span; every rank has one stretch of its rows."""
        seq_len = config.train_seq_len
        tokens = min(tokens, config.val_tokens or tokens)
        span_rows = (tokens - 1) // seq_len
        if span_rows < 1:
            raise RunError(f"TRAIN_SEQ_LEN={seq_len}: validation has {tokens} tokens: set less")
        first = span_rows * rank // ranks
        end = span_rows * (rank + 1) // ranks
        batch_tokens = config.val_batch_size // (ranks * config.micro_steps(ranks))
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
    unknown: Any  # what the tokenizer has no token for: its bytes are lost

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
        tokens = self.shards.ends[-1]
        self.plan = BatchPlan.val(config, tokens, runtime.rank, runtime.world_size)
        self.targets = self.plan.span_rows * self.plan.seq_len  # over all ranks, if all are scored
        self.partial = {"partial_val": 1} if config.val_tokens else {}  # for the log
        self.overlap = Overlap.of(config, "val", runtime.device)
        self.log_every = config.val_progress_log_every
        self.mean_nats = mean_nats  # Trainer compiles it
        self.byte_table, self.tokenizer = read_tokenizer(config)
        self.device_table = None
        if config.val_bytecount_device == "cuda":
            self.device_table = ByteTable(*(torch.tensor(t).cuda() for t in self.byte_table))
        self.unknown = 0  # targets of the last evaluation, of this rank, then of all
        if not self.device_table:
            self.find_bytes(BatchPlan.val(config, tokens))

    def find_bytes(self, plan):
        """Reads the split until a target has bytes: the first batch. RunError if none has."""
        for k in range(plan.num_batches):
            rows = plan.rows(k)
            first, length, _ = plan.tokens(rows)
            tokens = np.empty(length, np.uint16)
            self.shards.read(first, tokens)
            if min(self.summarize(plan, rows, tokens)) > 0:
                return
        raise RunError(f"{self.shards.folder}: no target of the validation split has bytes")

    def summarize(self, plan, rows, tokens):
        """(targets, bytes) of a batch, in the reader's thread: exactly what `widen` scores."""
        x = np.zeros((len(rows), plan.seq_len), np.int64)
        y = np.zeros_like(x)
        plan.widen(rows, tokens, x, y)
        in_bytes = 0 if self.device_table else int(self.byte_table.bytes_of(x, y))
        scored = y[y >= 0]
        self.unknown += int(self.byte_table.unknown[scored].sum())
        return len(scored), in_bytes

    def score(self, model, batch, sums):
        """Adds a batch's nats, bytes and targets to `sums`."""
        nats = 0.0
        targets, in_bytes = batch.summary
        if targets:  # the mean of none is nan
            with self.phase("forward"):
                nats = self.mean_nats(model, batch.x, batch.y).double() * targets
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
        self.unknown = 0
        # nats, bytes, targets; unknown targets; how many ranks have heard a signal
        sums = torch.zeros(5, dtype=torch.float64, device=runtime.device)
        hooks = {"summarize": self.summarize, "phase": self.phase}
        batches = Pipeline(self.shards, self.plan, self.overlap, runtime.device, **hooks)
        with closing(batches), self.phase("validate"):
            for done, batch in enumerate(batches, 1):
                if runtime.signum:
                    break
                self.score(model, batch, sums)
                if is_due(self.log_every, done):  # a synchronisation point
                    log_progress(self, scope, done, *sums.tolist()[:3])
        sums[3] = self.unknown
        sums[4] = runtime.signum > 0
        nats, in_bytes, targets, unknown, signals = runtime.all_reduce(
            sums
        ).tolist()  # synchronises
        if signals:
            raise HaltError
        if not in_bytes:
            raise RunError(f"{scope}: {targets:.0f} targets with {in_bytes:.0f} bytes: no score")
        self.unknown = int(unknown)
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


def pack(state, config):
    """(artifact, bytes of its tensors, bytes before compression) of a state dict on the CPU"""
    file = {"__quant_format__": QUANT_FORMAT, "quantized": {}, "scales": {}, "dtypes": {}}
    file |= {"passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        kind = storage(name, t, config)
        if kind == "int8":
            q, scale = quantize(t)
            file["quantized"][name] = q
            file["scales"][name] = scale
            file["dtypes"][name] = dtype
            if t.ndim == 2:
                file["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        elif kind == "float16":
            file["passthrough"][name] = t.half()
            file["passthrough_orig_dtypes"][name] = dtype
        else:
            file["passthrough"][name] = t.float() if kind == "float32" else t
    raw = torch_bytes(file)
    parts = [*file["quantized"].values(), *file["scales"].values(), *file["passthrough"].values()]
    return zlib.compress(raw, 9), sum(t.nbytes for t in parts), len(raw)


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
        self.overlap = Overlap.of(config, "train", runtime.device)
        self.validation = Validation(config, runtime, log, self.phase)
        self.scorer = self.validation  # makes the final score
        self.val_ms = 0.0  # time of all validations
        self.logged = 0, 0.0, 0.0  # step, ms and input wait at the last step line
        self.saved = -1, False  # step and `over` of the last checkpoint
        self.over = False  # is training done? It is in the checkpoint, see resume
        self.begin(step=0, data_crc=0)
        if config.torch_compile == "1" or (config.torch_compile == "auto" and runtime.cuda):
            self.model.compile(dynamic=False)
            self.validation.mean_nats = torch.compile(mean_nats, dynamic=False)
            self.muon.newton_schulz = torch.compile(newton_schulz, dynamic=False)

    @property
    def optimizers(self):
        """Every optimizer that the Trainer holds, also in lists and dicts, once."""
        parts = {id(part): part for part in flatten(vars(self)).values()}.values()
        return [part for part in parts if isinstance(part, torch.optim.Optimizer)]

    @property
    def groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def begin(self, step, data_crc):
        """Continues after `step` steps: 0, or those before priming or in a checkpoint."""
        self.step = step
        # The checksum of this rank's rows. Rank 0 carries that of all rows before `step`.
        self.crc = data_crc if self.runtime.rank == 0 else 0
        self.exchange.begin(step, self.clock.total_ms)

    def batches(self):
        runtime = self.runtime
        plan = BatchPlan.train(self.config, runtime.rank, runtime.world_size, self.step)
        return Pipeline(self.shards, plan, self.overlap, runtime.device, phase=self.phase)

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
            self.crc = (self.crc + batch.summary) & 0xFFFFFFFF
        with phase("reduce"):
            exchange.all_reduce(self.step, loss_sum)
        with phase("grad_clip"):
            if config.grad_clip_norm > 0:
                norm = exchange.gradients.norm() + 1e-6
                exchange.gradients.mul_((config.grad_clip_norm / norm).clamp(max=1.0))
        with phase("optimizer"):
            self.set_rates()
            for optimizer in self.optimizers:
                optimizer.step()
            self.after_step()
        self.step += 1

    def set_rates(self):
        """The schedules: what the groups of the optimizers use in the next step."""
        config = self.config
        for group in self.muon.param_groups:
            group["momentum"] = muon_momentum(config, self.step)
        scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
        for group in self.groups:
            group["lr"] = scale * group["base_lr"]

    def after_step(self):
        """Called when all optimizers have stepped: the place for an average of the weights."""

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
                # Messages of some steps ago: the device has later work, so it never idles.
                self.exchange.read(self.step - self.runtime.steps_late)
                if self.exchange.signals:
                    raise HaltError
                # A step that would end after the cap is not begun.
                next_ms = self.exchange.elapsed_ms(self.step + 1)
                is_late = 0 < 1e3 * config.max_wallclock_seconds < next_ms
                self.over = is_late or self.step >= config.iterations
                if self.over:
                    break
                if is_due(config.val_loss_every, self.step):
                    self.validate()
                self.train_step(batches)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    log_step(self, batches)
                if is_due(config.checkpoint_every, self.step) and self.step < config.iterations:
                    save(self)
                self.phase.end_step(self.step)
            if self.step > self.logged[0]:
                log_step(self, batches)
            save(self)
            self.validate()  # it starts the clock again
            clock.stop()
        if self.phase.profiler:
            self.phase.profiler.stop()  # the run was shorter
        log_end(self, batches, begun_ms)

    def evaluate(self, scope, validation=None):
        """(nats per token, bits per byte, ms) of the model as it is now"""
        self.model.eval()
        result = (validation or self.validation).evaluate(self.model, scope)
        self.model.train()
        return result

    def validate(self):
        self.exchange.read(self.step)
        self.clock.stop()
        check_shards(self)
        loss, bpb, ms = self.evaluate(f"step_{self.step}")
        self.val_ms += ms
        log_validation(self, loss, bpb, ms)
        self.clock.start()

    def export_and_score(self):
        """Rank 0 packs the artifact, all ranks score it, and only then rank 0 writes files."""
        state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
        data = None
        if self.runtime.rank == 0:
            model = torch_bytes(state)
            data, *sizes = pack(state, self.config)
            log_sizes(self.log, state, len(model), len(data), *sizes)
        data = self.runtime.broadcast(data)
        stored = unpack(data, state)
        self.model.load_state_dict(stored)
        try:
            loss, bpb, ms = self.evaluate(FINAL, self.scorer)
        finally:
            self.model.load_state_dict(state)  # a checkpoint holds the trained weights
        log_score(self, loss, bpb, ms)
        if self.runtime.rank == 0:
            write_results(self.log, data, model)
        if not math.isfinite(loss):
            lost = [name for name, t in stored.items() if not t.isfinite().all()]
            cause = f"{lost[0]} has numbers too large for the artifact: " if lost else ""
            raise RunError(f"the score is {loss}: {cause}lower the learning rates")


# ===== MACHINERY: keeps a run fast, safe and measurable; an experiment need not change it =====
# === PIPELINE: from shards to batches, ahead of time ===
# A step waits for its batch unless that is already on the device. So a thread reads later batches
# and a stream uploads them during compute, and a step waits for input only where input is slower.
#
#  shard files --readinto--> slot.host (pinned) --copy--> slot.tokens --widen--> slot.x, slot.y
#               reader thread      (uint16)   copy stream   (uint16) compute stream  (int64)
# On a CPU there is no copy, and the reader widens, too.
HEADER_BYTES = 1024  # of a shard: 256 int32 (magic, version, tokens, ...); then uint16 tokens
END_BYTES = 65_536  # at each end of a shard: its identity is their checksum
POLL_SECONDS = 0.05  # between two looks at what another thread or program makes
GET_DATA = "set the folder that cached_challenge_fineweb.py or tokenize_docs.py in data/ prints"


class Shard(NamedTuple):
    """An open shard. What is later renamed or linked over its path is not read."""

    path: Path
    descriptor: int
    version: tuple  # see version_of
    tokens: int
    identity: str  # "tokens, checksum of the first and last 64 KiB"


def version_of(stat):
    """What changes if a file is replaced or written to."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def open_shard(path, version):
    """The shard at `path`, opened and read once for each version; RunError if it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        version = version_of(os.fstat(descriptor))
        size = version[2]
        start = os.pread(descriptor, END_BYTES, 0)
        end = os.pread(descriptor, END_BYTES, max(0, size - END_BYTES))
    except OSError as error:
        raise RunError(f"{path}: {first_line(error)}: get this shard again") from error
    header = start[:12].ljust(12, b"\0")  # shorter in a truncated file
    magic, number, tokens = np.frombuffer(header, "<i4").tolist()
    if (magic, number, size) != (20240520, 1, HEADER_BYTES + 2 * tokens) or tokens < 1:
        begins = f"begins with {magic}, {number}, {tokens}; {size} bytes"
        raise RunError(f"{path}: truncated or corrupt shard ({begins}): download or make it again")
    identity = f"{tokens} tokens, {zlib.crc32(end, zlib.crc32(start)):08x}"
    return Shard(path, descriptor, version, tokens, identity)


class Shards:
    """The shards of a split in the order of their numbers, as one endless stream of tokens.

    While .producing is in the folder, more shards will come. Who makes them rewrites that file
    every few seconds and removes it at the end.
    Raises RunError for a folder without shards, a missing number, a truncated or corrupt file, and
    for shards that are not those of a complete export.json beside them.
    """

    def __init__(self, config, split):
        self.folder = Path(os.path.realpath(config.data_path))  # a link is followed once
        self.split = split
        self.stall_seconds = config.data_stall_seconds
        self.vocab_size = config.vocab_size
        self.shards = []
        self.ends = [0]  # ends[i]: tokens in the first i shards
        self.expected = {}  # {name: identity} in the checkpoint of a growing set
        self.reading = ""  # where the reader waits for the disk
        self.add_all()
        self.grew = self.growing  # then ranks may have got different shards, see check_shards
        if split == "val":
            self.wait_while(lambda: '"val_complete": true' not in self.producing())
            self.add_all()  # those that have come since the last look
            self.growing = False

    def producing(self):
        """What is in .producing; empty if there is no such file."""
        with suppress(FileNotFoundError):
            return Path(self.folder, ".producing").read_text(errors="replace") or "empty"
        return ""

    def add_all(self):
        self.growing = self.producing() != ""
        name = re.compile(rf"fineweb_{self.split}_\d+\.bin")
        found = sorted(path for path in self.folder.glob("*.bin") if name.fullmatch(path.name))
        if not found and not self.growing:
            raise RunError(f"DATA_PATH={self.folder}: no fineweb_{self.split}_*.bin: {GET_DATA}")
        # Of training, numbers may begin at 1; not while more will come: 1 may come before 0.
        may_begin_at_1 = self.split == "train" and not self.growing
        first = int(may_begin_at_1 and found[0].stem.endswith("_000001"))
        for path in found[len(self.shards) :]:
            number = f"{first + len(self.shards):06d}"
            if path.name == f"fineweb_{self.split}_{number}.bin":
                self.add(open_shard(path, version_of(path.stat())))
            elif not self.growing:
                raise RunError(f"{path}: expected number {number} next: get it, or move this")
        if not self.growing:
            self.compare_with_export()

    def add(self, shard):
        was = self.expected.get(shard.path.name, shard.identity)
        if was != shard.identity:
            now = f"it has {shard.identity}, the checkpoint had {was}"
            raise RunError(f"{shard.path}: {now}: restore that")
        # New lists: another thread may be reading the old ones.
        self.ends = [*self.ends, self.ends[-1] + shard.tokens]
        self.shards = [*self.shards, shard]

    def compare_with_export(self):
        """tokenize_docs.py lists in export.json what it has made; older ones list tokens alone."""
        listed = {}
        with suppress(OSError, ValueError, LookupError, TypeError):  # made by something else
            export = json.loads(Path(self.folder, "export.json").read_bytes())
            listed = export["shards"][self.split] if export["complete"] else {}
        here = self.identities() if listed else {}
        for name in sorted(here.keys() | listed):
            entry = listed.get(name, "no such shard")
            wanted = entry["identity"] if isinstance(entry, dict) else f"{entry} tokens"
            found = here.get(name, "missing")
            if not found.startswith(wanted):
                remedy = "restore it, or make the set again under another name"
                raise RunError(f"{self.folder}/{name}: {found}; export.json: {wanted}: {remedy}")

    def identities(self):
        """{name: identity} of all shards"""
        return {shard.path.name: shard.identity for shard in self.shards}

    def changed(self):
        """The paths of shards that were written to since they were opened."""
        versions = {shard: version_of(os.fstat(shard.descriptor)) for shard in self.shards}
        return [str(shard.path) for shard, now in versions.items() if now != shard.version]

    def wait_while(self, is_missing):
        """Waits for what a growing set does not have yet. RunError if nobody makes it."""
        seen = ""
        waited = 0.0
        while self.growing and is_missing():
            state = self.producing()
            waited = waited + POLL_SECONDS if state == seen else 0.0
            seen = state
            if waited > self.stall_seconds:
                after = f"not changed for DATA_STALL_SECONDS={self.stall_seconds:g}"
                raise RunError(f"{self.folder}/.producing: {after}: {state}")
            time.sleep(POLL_SECONDS)
            self.add_all()

    def pieces(self, first, length):
        """Yields where the `length` tokens from `first` on are: (shard, byte offset, bytes)."""
        while length:
            position = first if self.growing else first % self.ends[-1]  # wraps around
            number = bisect_right(self.ends, position) - 1
            here = min(length, self.ends[number + 1] - position)
            yield self.shards[number], HEADER_BYTES + 2 * (position - self.ends[number]), 2 * here
            first += here
            length -= here

    def read(self, first, array):
        """Fills a uint16 array with the tokens from number `first` on. RunError if it cannot."""
        data = memoryview(array).cast("B")
        for shard, offset, left in self.pieces(first, len(array)):
            where = self.reading = f"{shard.path} at byte {offset}"
            try:
                while left:
                    got = os.preadv(shard.descriptor, [data[:left]], offset)
                    if not got:
                        raise OSError(f"it ends {left} bytes early")
                    data = data[got:]
                    offset += got
                    left -= got
            except OSError as error:
                raise RunError(f"{where}: {first_line(error)}") from error
        self.reading = ""
        largest = array.max()
        if largest >= self.vocab_size:  # its lookup would end a process on CUDA
            words = "not below VOCAB_SIZE: set the shards' tokenizer"
            raise RunError(f"up to {where}: token {largest}: {words}")


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
    return total & 0xFFFFFFFF


class Overlap(NamedTuple):
    """What overlaps in a split: what its settings ask for and this device and mode allow."""

    queue: int  # batches read ahead; 0: each is read when it is asked for
    copy_stream: bool
    device_slots: int  # 2: one uploads while one is in use; 1: uploaded on demand; 0: no CUDA

    @classmethod
    def of(cls, config, split, device):
        cuda = device.type == "cuda"
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

    def __init__(self, plan, device, cuda):
        length = plan.tokens(range(plan.batch_rows))[1]
        self.host = torch.empty(length, dtype=torch.uint16, pin_memory=cuda)
        self.tokens = self.host
        if cuda:
            self.tokens = torch.empty(length, dtype=torch.uint16, device=device)
        self.x = torch.zeros(plan.batch_rows, plan.seq_len, dtype=torch.int64, device=device)
        self.y = torch.zeros_like(self.x)  # (B, T)
        self.rows = range(0)
        self.summary = None  # what `summarize` has computed of it
        self.copied = None  # event: its upload is over
        self.widened = None  # event: its tokens on the device have been read


class Pipeline:
    """Iterates over this rank's batches of a split: slots with x, y (B, T), rows and summary.

    A batch is valid until the next one is asked for. Slots go round:
    to_fill -> (the reader's thread) -> filled -> (the copy) -> uploaded -> in use -> to_fill.
    There are as many as are read and uploaded ahead, plus the one in use. An error of the reader
    goes the same way, so it is raised after the last good batch.

    A CUDA stream is a queue of work that runs on its own; only events order two of them. Work
    that overwrites waits for the last read, work that reads waits for the last write:
      `copied`, on the copy stream: then the compute stream may widen the tokens, and the reader
      may read the next ones over those that were copied.
      `widened`, on the compute stream: then the copy stream may overwrite the device's tokens.
    x and y need no event: they are written and read on the compute stream alone, in its order.
    Each use records a new event, because a wait for an old event returns at once.
    """

    def __init__(
        self, shards, plan, overlap, device, *, summarize=summarize_rows, phase=nullcontext
    ):
        self.shards = shards
        self.plan = plan
        self.device = device
        self.cuda = overlap.device_slots > 0
        self.summarize = summarize
        self.phase = phase
        self.to_fill = queue.SimpleQueue()
        self.filled = queue.SimpleQueue()
        self.uploaded = deque()
        self.uploads_ahead = max(0, overlap.device_slots - 1)
        for _ in range(overlap.queue + self.uploads_ahead):
            self.to_fill.put(Slot(plan, device, self.cuda))
        self.in_use = Slot(plan, device, self.cuda)
        if self.cuda:
            self.compute = torch.cuda.current_stream(device)
            self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
            # Queued kernels may still use the memory that the slots have just been given.
            self.copy.wait_event(self.compute.record_event())
        self.batches_left = plan.num_batches - plan.first_batch
        self.bytes_read = 0
        self.total_wait_ms = 0.0  # that the device (on a CPU, the host) has waited for batches
        self.wait_events = deque()  # (asked, there): events around each wait, not all reached yet
        self.closed = threading.Event()  # ends the reader
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
        if self.cuda:
            asked = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        if not self.uploaded:
            self._upload(self._next_filled())
        self.in_use = self.uploaded.popleft()
        if isinstance(self.in_use, BaseException):
            self.uploaded.append(self.in_use)  # who asks again is answered again
            raise self.in_use
        if self.cuda:
            self._widen(self.in_use, asked)
        # Upload what has been read already, but do not wait here for a later batch.
        while len(self.uploaded) < self.uploads_ahead and not self.filled.empty():
            self._upload(self.filled.get())
        return self.in_use

    def _next_filled(self):
        start = time.perf_counter()
        with self.phase("input_wait"):
            slot = self._wait_for_reader()
        if not self.cuda:
            self.total_wait_ms += 1e3 * (time.perf_counter() - start)
        return slot

    def _wait_for_reader(self):
        """RunError if a read takes too long. A suspended process counts no polls."""
        place = ""
        waited = 0.0
        while True:
            with suppress(queue.Empty):
                return self.filled.get(timeout=POLL_SECONDS)
            same = place == self.shards.reading != ""
            waited = waited + POLL_SECONDS if same else 0.0
            place = self.shards.reading
            if waited > self.shards.stall_seconds:
                limit = f"DATA_STALL_SECONDS={self.shards.stall_seconds:g}"
                raise RunError(f"{place}: no answer for {limit}")

    def _upload(self, slot):
        """Queues the copy to the device, if there is one; waits for nothing."""
        if self.cuda and isinstance(slot, Slot):
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
        if self.cuda:
            self.copy.synchronize()  # synchronisation point: no copy outlives its slots
            self._measure_waits()

    # From here on: the reader's thread
    def _read_all(self):
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            for k in range(self.plan.first_batch, self.plan.num_batches):
                slot = self.to_fill.get()  # None after close()
                rows = self.plan.rows(k)
                # For the whole step: a rank that trained on its part alone would then wait for the
                # others in a collective, which cannot say what is missing.
                last = self.plan.last_token_of_step(rows)
                self.shards.wait_while(
                    lambda last=last: last >= self.shards.ends[-1] and not self.closed.is_set()
                )
                if self.closed.is_set():
                    return
                if slot.copied:
                    slot.copied.synchronize()  # synchronisation point, of this thread only
                with self.phase("disk_read"):
                    self._fill(slot, rows)
                self.filled.put(slot)
        except BaseException as error:  # any error, or the main thread would wait forever
            self.filled.put(error)

    def _fill(self, slot, rows):
        first, length, _ = self.plan.tokens(rows)
        tokens = slot.host.numpy()[:length]
        self.shards.read(first, tokens)
        slot.rows = rows
        slot.summary = self.summarize(self.plan, rows, tokens)
        if not self.cuda:
            self.plan.widen(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * length


# === EXCHANGE: a step's one all-reduce of gradients, and what comes with it ===
# Each collective costs a start and makes all ranks wait for the slowest one. So a step has one (and
# one in Muon), and what the host needs to know in each step comes with the gradients.
class Exchange:
    """All gradients are views of one vector; `numbers` (5,) are behind them and summed with them.

    steps, ms  rank 0's: the last step that its device is known to have finished, and when
    signals    how many ranks have heard a signal
    loss       the mean loss: each rank adds its share
    fault      filled in after the sum: 1 if the loss or a gradient is not finite

    The host reads them some steps later, when they are surely there: nothing drains the device, and
    all ranks decide alike, because they read the same numbers at the same step. So after a signal
    all end after the same step, up to three steps later.
    """

    def __init__(self, model, runtime, clock):
        # An empty tensor (skip_weights of one layer) has no gradient.
        self.params = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self.runtime = runtime
        self.clock = clock
        size = sum(p.numel() for p in self.params)
        self.vector = torch.zeros(size + 5, device=runtime.device)
        self.gradients, self.numbers = self.vector.split([size, 5])
        for p, part in split_as(self.gradients, self.params).items():
            p.grad = part
        copies = runtime.steps_late + 2, 5  # one more than can be unread
        self.sent = torch.zeros(copies, pin_memory=runtime.cuda)
        self.received = torch.zeros(copies, pin_memory=runtime.cuda)
        self.unread = deque()  # (step, its numbers on the host, event: they are there, own loss)

    def begin(self, step, elapsed_ms):
        """Restarts at `step` with an empty history."""
        self.unread.clear()
        self.loss = 0.0  # the training loss of the last step that was read
        self.signals = 0
        self.done_here = step, elapsed_ms  # as (steps, ms), but of this rank
        self.agreed = step, elapsed_ms  # rank 0's, as all ranks have read it
        self.pace_start = 0, 0.0  # `agreed` after step 1, which may be slow; 0 after RESUME

    def backward(self, loss):
        """Adds a loss's gradients to p.grad at once; loss.backward() would add them one by one."""
        # Keep them: freed at a random moment by autograd's thread, they would raise peak memory.
        self.kept = torch.autograd.grad(loss, self.params, materialize_grads=True)
        torch._foreach_add_([p.grad for p in self.params], self.kept)

    def all_reduce(self, step, loss):
        """Sums gradients and numbers, and sends the numbers to the host.

        No synchronisation point on CUDA: `read` is.
        """
        steps, ms = self.done_here if self.runtime.rank == 0 else (0, 0.0)
        sent = self.sent[step % len(self.sent)]
        received = self.received[step % len(self.received)]
        sent.copy_(torch.tensor([steps, ms, self.runtime.signum > 0, 0.0, 0.0]))
        self.numbers.copy_(sent, non_blocking=True)
        self.numbers[3] = loss
        self.runtime.all_reduce(self.vector)
        self.numbers[4] = ~torch.isfinite(self.vector.sum())
        received.copy_(self.numbers, non_blocking=True)
        event = torch.cuda.Event(blocking=True) if self.runtime.cuda else None
        if event:
            event.record()
        self.unread.append((step, received, event, loss))

    def read(self, before):
        """Reads the numbers of all steps before `before`; RunError where one is not finite.

        The one synchronisation point of a step, and only where the host is that far ahead.
        """
        while self.unread and self.unread[0][0] < before:
            step, received, event, own_loss = self.unread.popleft()
            if event:
                event.synchronize()
            steps, ms, self.signals, self.loss, fault = received.tolist()
            if fault:  # all ranks read it at this step, so they may meet once more
                losses = self.runtime.gather(float(own_loss))
                ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
                what = f"the loss of rank {ranks[0]}" if ranks else "the gradient"
                raise RunError(f"step {step + 1}: {what} is not finite: lower the learning rates")
            # Steps whose events have been reached are done, too, though they are unread.
            later = sum(event.query() for _, _, event, _ in self.unread if event)
            self.done_here = step + 1 + later, self.clock.now_ms()
            self.agreed = max(self.agreed, (steps, ms))

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


def split_as(vector, params):
    """{p: its part of a vector, as a view of p's shape}"""
    parts = vector.split([p.numel() for p in params])
    return {p: part.view_as(p) for p, part in zip(params, parts, strict=True)}


# === RUNTIME: this process among its ranks, what it says, its files ===
class RunError(Exception):
    """A foreseeable failure, in one line: what, where, which value, what to do."""


class LostRankError(RunError):
    """Another rank has ended."""

    def __init__(self, error):
        cause = "another rank has ended, or ranks make different collective calls"
        super().__init__(f"{cause} ({first_line(error)})")


class HaltError(Exception):
    """A rank has heard a signal: all ranks stop at this step."""


def first_line(error):
    text = getattr(error, "strerror", None) or str(error)
    return (text.strip() or repr(error)).splitlines()[0]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def tell(text, stream="stdout"):
    """Prints. A closed console costs the text alone."""
    with suppress(OSError):
        # One write: under torchrun two ranks' lines would run together.
        print(text + "\n", end="", file=getattr(sys, stream), flush=True)


@contextmanager
def collective():
    """Around calls of torch.distributed: its errors mean that ranks do not meet."""
    try:
        yield
    except RuntimeError as error:
        # NCCL has a type for them. Gloo has none: its texts begin with a place in its source.
        if isinstance(error, dist.DistError) or str(error).startswith("["):
            raise LostRankError(error) from error
        raise


def meet(env, told):
    """(the store of the ranks, what each of them has told). RunError if they do not meet.

    The store is there before a device is touched, so it can say what is wrong with one.
    """
    rank = int(env["RANK"])
    timeout = timedelta(minutes=5)
    try:
        store = next(dist.rendezvous("env://", timeout=timeout))[0]
        # torchrun's store outlives a restart: the prefix hides what dead processes have said.
        store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        store.set(f"told {rank}", json.dumps(told))
        ranks = range(int(env["WORLD_SIZE"]))
        every = [json.loads(store.get(f"told {each}")) for each in ranks]
        store.set(f"heard {rank}", "")
        if rank == 0:  # its process may hold the store, and may end now
            store.wait([f"heard {each}" for each in ranks])
        return store, every
    except (ValueError, dist.DistError) as error:
        reason = f"{first_line(error)}: start it with torchrun, or `unset RANK`"
        raise RunError(f"RANK={rank}: {reason}") from error


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

    def start(self, store):
        """Device, process group, signals: from here on collectives work."""
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        if store:
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                timeout=timedelta(minutes=5),  # of every wait for other ranks
                device_id=self.device if self.cuda else None,
                rank=self.rank,
                world_size=self.world_size,
                store=store,
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

    @collective()
    def all_reduce(self, tensor):
        """Sums over the ranks, in place. Queued on CUDA; with gloo a synchronisation point."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor

    @collective()
    def broadcast(self, value, source=0):
        """The value of rank `source`, on all ranks. A synchronisation point."""
        box = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(box, source, device=self.device)
        return box[0]

    @collective()
    def gather(self, value):
        """The values of all ranks, on all ranks. A synchronisation point."""
        values = [value] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(values, value)
        return values


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id=""):
        self.path = Path("logs", f"{run_id}.txt")
        self.files = {}  # {suffix: open file}, once the run has begun, on rank 0
        self.warned = set()

    def begin(self):
        """Opens what the run will write: a refused start leaves no trace. Returns what fails."""
        try:
            for folder in (self.path.parent, Path("checkpoints", self.path.stem)):
                folder.mkdir(parents=True, exist_ok=True)
            files = {}
            for suffix in (".txt", ".jsonl"):
                file = os.open(
                    self.path.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND
                )
                files[suffix] = os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace")
            fcntl.flock(files[".txt"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"{self.path}: another run writes it: wait until it ends, or set another RUN_ID"
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system without locks
                return f"{error.filename}: {first_line(error)}: use a folder that can be written"
        self.files = files
        return ""

    def line(self, text):
        """For people: the console and the .txt."""
        if self.files:
            tell(text)
        self.write(".txt", text)

    def warn(self, text):
        """A line, once."""
        if text not in self.warned:
            self.warned.add(text)
            self.line(f"WARNING: {text}")

    def event(self, name, **values):
        """For tools: a line of JSON in the .jsonl."""
        self.write(".jsonl", json.dumps({"event": name, "time": round(time.time(), 3), **values}))

    def end(self, status, code, problem="", trace=""):
        """How the run has ended. The console hears of failures by `main`."""
        self.write(".txt", f"{trace}{status}{': ' * bool(problem)}{problem}")
        self.event("end", status=status, exit_code=code, error=problem, traceback=trace)
        if self.files and status != "failed":
            tell(f"{status}: see {self.path}")
            if problem:  # last: it says how to continue
                tell(f"train_gpt.py: {problem}", "stderr")

    def write(self, suffix, text):
        if not self.files:
            return
        try:
            print(text, file=self.files[suffix], flush=True)
        except OSError as error:  # it costs lines, not the run
            tell(f"WARNING: {self.path} lacks a line: {first_line(error)}", "stderr")


def write_atomic(path, data, own=""):
    """Writes under a temporary name, with `own` in it, and renames when complete; RunError."""
    temporary = path.with_name(f"{path.stem}{own}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # of a full disk
        raise RunError(f"{path}: {first_line(error)}") from error


def write_results(log, artifact, model):
    """The artifact beside the log, and both files in this folder, as far as they can be written."""
    folder = os.open(".", os.O_RDONLY)
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(folder, fcntl.LOCK_EX)  # so that both final files are of one run
    written = 0
    names = log.path.with_suffix(".int8.ptz"), Path("final_model.int8.ptz"), Path("final_model.pt")
    for path, data in zip(names, (artifact, artifact, model), strict=True):
        try:
            write_atomic(path, data, f".{log.path.stem}")
            written += 1
        except RunError as error:
            log.warn(str(error))
    os.close(folder)
    if not written:
        raise RunError("no artifact could be written: make room, then RESUME=auto scores again")


def read_tokenizer(config):
    """(ByteTable, sha256) of TOKENIZER_PATH; RunError if it does not fit the shards."""
    path = config.tokenizer_path
    try:
        data = Path(path).read_bytes()
        table = byte_table(path, data)
    except RunError:
        raise
    except Exception as error:
        reason = first_line(error) if isinstance(error, OSError) else "no known kind of tokenizer"
        raise RunError(f"TOKENIZER_PATH={path}: {reason}: set that of the shards") from error
    size = len(table.base)
    if size != config.vocab_size:
        raise RunError(f"VOCAB_SIZE={config.vocab_size}: {path} has {size} tokens: set {size}")
    recorded, made_by = recorded_tokenizer(config)
    if recorded not in ("", sha256(data)):
        raise RunError(f"TOKENIZER_PATH={path}: did not make the shards: set or restore {made_by}")
    return table, sha256(data)


def recorded_tokenizer(config):
    """(sha256, file) of the tokenizer that made the shards; empty if DATA_PATH does not say it."""
    path = Path(config.data_path, "tokenizer.sha256")  # data/ writes it as sha256sum would
    if path.exists():
        digest, _, name = os.fsdecode(path.read_bytes()).strip().partition("  ")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise RunError(f"{path}: not a line of sha256sum: write it with sha256sum")
        return digest, f"{path.parent}/{name}"
    with suppress(OSError, ValueError, LookupError, TypeError):
        export = json.loads(Path(config.data_path, "export.json").read_bytes())
        return export["tokenizer_sha256"], f"that of {config.data_path}/export.json"
    return "", ""


def byte_table(path, data):
    """The ByteTable of a SentencePiece .model, or of a byte tokenizer's .json in either form."""
    if path.endswith(".json"):
        form = json.loads(data)
        offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
        boundary = np.arange(256 + offset) < offset  # lower ids are controls
        none = np.zeros_like(boundary)
        return ByteTable(np.where(boundary, 0, 1), none, boundary, none)
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = model.encode(" ", out_type=str) + model.encode("a b", out_type=str)
    of_spaces = {*model.encode(" "), *model.encode("a b")} - {*model.encode("ab")}
    if "<0xE2>" in pieces or model.unk_id() in of_spaces:
        # A space would be three byte pieces, or unknown: bits per byte would be wrong.
        raise RunError(f"TOKENIZER_PATH={path}: it has no piece for one space: use another")
    ids = list(range(len(model)))
    pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]  # its space
    unknown = np.array(model.is_unknown(ids))
    boundary = np.any([model.is_control(ids), unknown, model.is_unused(ids)], 0)
    leading_space = np.array([piece.startswith(" ") for piece in pieces]) & ~boundary
    length = np.array([len(piece.encode()) for piece in pieces]) - leading_space
    base = np.where(boundary, 0, np.where(model.is_byte(ids), 1, length))
    return ByteTable(base, leading_space, boundary, unknown)


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


def is_due(every, step):
    return every > 0 and step % every == 0


def is_named(name, patterns):
    """Does a tensor's name contain one of the comma-separated patterns?"""
    return any(part in name for part in patterns.split(",") if part)


# === CHECKPOINTS: all that a run needs to continue, and what it is made of ===
def made_of(config, train, val, tokenizer):
    """{name: text} of script, tokenizer, shards and settings: they decide the result."""
    settings = {name.upper(): str(value) for name, value in asdict(config).items()}
    for name in ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "RESUME"):
        del settings[name]
    files = {"script": sha256(SOURCE), "tokenizer": tokenizer}
    if train.growing:
        files["growing"] = "more shards will come"
    return files | val.identities() | train.identities() | settings


def made_of_run(run):
    """What a checkpoint must agree with: also the kinds of optimizers."""
    validation = run.validation
    made = made_of(run.config, run.shards, validation.shards, validation.tokenizer)
    return made | {"optimizers": ", ".join(type(each).__qualname__ for each in run.optimizers)}


def differences(here, there, common=False):
    """["name: ... here, ... there"] for two dicts, or only of the names that both have."""
    names = here.keys() & there.keys() if common else here.keys() | there.keys()
    return [
        f"{name}: {here.get(name, 'missing')} here, {there.get(name, 'missing')} there"
        for name in sorted(names)
        if here.get(name) != there.get(name)
    ]


def check_shards(run):
    """Names shards that were written to; compares those of ranks in a growing set. Collective."""
    shards = (run.validation.shards, run.shards)
    changed = [path for each in shards for path in each.changed()]
    told = run.runtime.gather((changed, run.shards.identities() if run.shards.grew else {}))
    for rank, (paths, identities) in enumerate(told):
        for path in paths:
            run.log.warn(f"{path} was written to while this run reads it: it may mix two versions")
        for text in differences(identities, told[0][1], common=True):
            raise RunError(f"rank {rank} has other shards than rank 0: {text}: copy rank 0's")


# What the Trainer holds, except for its tools, is its state. A place is, for example,
# adam.param_groups[0]['lr']. Numbers and texts that training has not changed since the Trainer was
# made, such as betas, come from the settings of this run, also after RESUME; all else is restored.
def held(run):
    """{attribute: value} of all that training may change."""
    tools = Config, Runtime, RunLog, Clock, Phases, Exchange, Shards, Overlap, Validation
    return {
        name: value
        for name, value in vars(run).items()
        if name != "initial" and not isinstance(value, tools)
    }


def map_leaves(change, part, place=""):
    """A copy of nested lists, tuples and dicts with change(place, leaf) for each leaf."""
    if isinstance(part, dict):
        return {name: map_leaves(change, part[name], inside(place, name)) for name in part}
    if type(part) in (list, tuple):
        copies = [map_leaves(change, each, inside(place, i)) for i, each in enumerate(part)]
        return type(part)(copies)
    return change(place, part)


def inside(place, name):
    if isinstance(name, str) and "[" not in place:
        return f"{place}.{name}".lstrip(".")
    return f"{place}[{name!r}]"


def state_of(place, part):
    """A copy of a leaf of the Trainer; RunError for what a checkpoint cannot hold."""
    if hasattr(part, "load_state_dict"):
        return map_leaves(state_of, part.state_dict(), place)
    if torch.is_tensor(part):
        return part.detach().clone()
    if type(part) in (type(None), bool, int, float, str):
        return part
    try:
        return torch.load(io.BytesIO(torch_bytes(part)), weights_only=True)
    except Exception as error:  # whatever pickle or torch.load raises
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        rule = "torch.load(weights_only=True) must be able to read it, or it needs load_state_dict"
        raise RunError(f"{place} is a {kind}: {rule}") from error


def flatten(state):
    """{place: leaf} of a copied state"""
    leaves_at = {}
    map_leaves(leaves_at.__setitem__, state)
    return leaves_at


def numbers_of(state):
    return {place: leaf for place, leaf in flatten(state).items() if not torch.is_tensor(leaf)}


def check_equal(run, state):
    """RunError if a tensor is not the same on all ranks: rank 0's is saved for all. Collective."""
    sums = {
        place: zlib.crc32(leaf.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for place, leaf in flatten(state).items()
        if torch.is_tensor(leaf)
    }
    told = run.runtime.gather(sums)
    for rank, sums in enumerate(told):
        differ = [text.split(":")[0] for text in differences(sums, told[0])]
        if differ:
            rule = "what the Trainer holds must be the same on all ranks, or not be held by it"
            more = f" and {len(differ) - 1} more tensors" if len(differ) > 1 else ""
            raise RunError(f"{differ[0]}{more}: other values on rank {rank} than on rank 0: {rule}")


def load(part, saved):
    """Puts a saved state into a part of a run. Objects and tensors keep their identity."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(saved)
        return part
    if torch.is_tensor(part):
        if part.shape != saved.shape:
            raise ValueError(f"{tuple(saved.shape)} is the shape of a {tuple(part.shape)} tensor")
        part.detach().copy_(saved)
        return part
    if type(part) in (list, tuple):
        return type(part)([load(*pair) for pair in zip(part, saved, strict=True)])
    if isinstance(part, dict):
        if differ := part.keys() ^ saved.keys():
            raise ValueError(f"it differs in {', '.join(map(str, differ))}")
        part.update({name: load(part[name], saved[name]) for name in part})
        return part
    return saved


def snapshot(run):
    """A copy of all that a run needs to continue. A synchronisation point. RunError for what
    cannot be saved, and after a loss that is not finite."""
    state = map_leaves(state_of, held(run))
    run.runtime.synchronize()
    run.exchange.read(run.step)
    return {
        "held": state,
        "initial": run.initial,
        "made_of": made_of_run(run),
        "step": run.step,
        "train_ms": run.clock.now_ms(),
        "data_crc": sum(run.runtime.gather(run.crc)) & 0xFFFFFFFF,
    }


def restore(run, state):
    """Continues from a snapshot. RunError if the Trainer holds other things."""
    try:
        vars(run).update(load(held(run), state["held"]))
    except Exception as error:  # whatever a load_state_dict raises
        reason = " ".join(str(error).split())
        raise RunError(f"Trainer must hold its state from __init__ on: {reason}") from error
    run.clock.total_ms = state["train_ms"]
    run.begin(state["step"], state["data_crc"])


def save(run):
    """Rank 0 writes checkpoints/<RUN_ID>/step_<8 digits>.pt. The last CHECKPOINT_KEEP stay."""
    if run.saved == (run.step, run.over):
        return
    run.saved = run.step, run.over
    run.clock.stop()  # writing is not training time
    state = snapshot(run)
    check_shards(run)
    check_equal(run, state["held"])
    try:
        if run.runtime.rank == 0:
            path = Path("checkpoints", run.config.run_id, f"step_{run.step:08d}.pt")
            write_atomic(path, torch_bytes(state))
            run.log.event("checkpoint", step=run.step, path=str(path))
            for old in checkpoint_files(run.config.run_id)[run.config.checkpoint_keep :]:
                old.unlink()
    except (RunError, OSError) as error:  # a full disk costs a checkpoint, not the run
        run.log.line(f"WARNING: {error}")
    run.clock.start()


def checkpoint_files(run_id):
    """The checkpoints of a run in this folder, the newest first. Copies of other names stay."""
    files = Path("checkpoints", run_id).glob("step_*.pt")
    own = (path for path in files if re.fullmatch(r"step_\d{8}\.pt", path.name))
    return sorted(own, reverse=True)


def find_checkpoint(config, runtime):
    """(state, its path and host) of what RESUME means; state is None if there is none. Collective.

    Machines may have different files: the newest is taken, and sent by the first rank that has it.
    """
    if not config.resume:
        return None, ""
    auto = config.resume == "auto"
    files = checkpoint_files(config.run_id) if auto else [Path(config.resume)]
    path = files[0] if files else None
    data = path.read_bytes() if path and path.exists() else b""
    step = int(path.stem.removeprefix("step_")) if auto and data else 0
    told = runtime.gather((step, sha256(data), os.uname().nodename, bool(data)))
    newest = max(told, key=lambda each: (each[3], each[0]))  # the first of equal ones
    step, checksum, host, exists = newest
    if auto and not exists:
        return None, ""
    path, data = runtime.broadcast((path, data), told.index(newest))
    where = f"{path} of {host}"
    for other_step, other_checksum, other_host, _ in told:
        if other_step == step > 0 and other_checksum != checksum:
            where = f"{path} of {host}; {other_host} has another one of this step"
    try:
        if zipfile.ZipFile(io.BytesIO(data)).testzip():  # torch.load ignores checksums
            raise ValueError("its checksum is wrong")
        state = torch.load(io.BytesIO(data), "cpu", weights_only=True)
        if "held" not in state:  # torch.load also reads other files, such as weights
            raise ValueError("it is no checkpoint")
    except Exception as error:  # whatever a bad file raises
        reason = first_line(error) if data else "no such file"
        remedy = "set another step_<n>.pt and another RUN_ID"
        raise RunError(f"RESUME={where} does not load: {reason}: {remedy}") from error
    return state, where


def resume(run, state, where):
    """Restores a checkpoint of the same data, shapes and seed; returns what else differs."""
    here, there = made_of_run(run), state["made_of"]
    may_differ = {"script"} | SETTINGS.keys() - FIXED
    differ = differences(here, there, common="growing" in there)
    forbidden = [text for text in differ if text.split(":")[0] not in may_differ]
    missing = flatten(map_leaves(state_of, held(run))).keys() - flatten(state["held"]).keys()
    forbidden += [f"{place}: missing there" for place in sorted(missing)]
    if forbidden:
        remedy = "restore that, or leave out RESUME and set another RUN_ID"
        raise RunError(f"RESUME={where} is of other things: {'; '.join(forbidden[:5])}: {remedy}")
    run.shards.expected = there
    own, was, now = run.initial, state["initial"], numbers_of(state["held"])
    kept = {place: own[place] for place in own.keys() & was if was[place] == now.get(place)}
    saved = map_leaves(lambda place, leaf: kept.get(place, leaf), state["held"])
    restore(run, {**state, "held": saved})
    length = "ITERATIONS", "MAX_WALLCLOCK_SECONDS"
    run.over = run.over and all(here[name] == there[name] for name in length)
    return [f"RESUME continues with another {text}" for text in differ]


@torch.no_grad()
def prime(run):
    """Steps off the clock, which compile and allocate; then everything is put back."""
    run.set_rates()  # what the schedules return must fit into a checkpoint
    before = snapshot(run)
    if not run.config.warmup_steps:
        return
    with closing(run.batches()) as batches:
        for done in range(1, run.config.warmup_steps + 1):
            run.train_step(batches)
            run.exchange.read(run.step)
            run.log.line(f"warmup_step:{done}/{run.config.warmup_steps}")
    snapshot(run)  # what steps have made can be saved: better known now than at the end
    if run.runtime.cuda or run.config.torch_compile == "1":  # a validation's graph, too
        slot = Slot(run.validation.plan, run.runtime.device, run.runtime.cuda)
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


def log_start(run, given):
    """The beginning of a log: the script, versions, what the challenge's parsers read, events."""
    config, log, runtime = run.config, run.log, run.runtime
    rule = "=" * 100
    smi = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    log.write(".txt", f"{SOURCE.decode()}\n{rule}\n{versions}\n{smi}\n{rule}")
    facts = {
        "model_params": sum(p.numel() for p in run.model.parameters()),
        "dataset": Path(config.data_path).absolute().name,
        "train_shards": len(run.shards.shards),
        "val_tokens": run.validation.targets,
        "world_size": runtime.world_size,
        "micro_steps": runtime.micro_steps,
        **run.validation.partial,
    }

    def words(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    val = run.validation.overlap
    kind = "byte" if config.tokenizer_path.endswith(".json") else "sentencepiece"
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    head_lr = 0.0 if config.tie_embeddings else config.head_lr
    log.line(
        f"{log.path}\nsettings: {' '.join(f'{name}={text}' for name, text in given.items())}\n"
        f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{facts['dataset']} train_shards:{facts['train_shards']}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"{as_words({'tokens': run.validation.targets, **run.validation.partial})}\n"
        f"model_params:{facts['model_params']}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{runtime.micro_steps}\n"
        f"sdp_backends:{','.join(attention_backends(config))}\n"
        f"attention_mode:gqa {words('num_heads num_kv_heads')}\n"
        f"{words('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{words('matrix_lr scalar_lr')}\n"
        f"{words('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{words('seed')}\n"
        f"train_io:{run.overlap.words()}\n"
        f"val_io:overlap:{val.queue > 0 or val.copy_stream} {val.words()} "
        f"bytecount_device:{config.val_bytecount_device}"
    )
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            params = group["params"]
            log.line(
                f"optimizer:{type(optimizer).__name__} lr:{group['base_lr']:g} "
                f"tensors:{len(params)} numbers:{sum(p.numel() for p in params)}"
            )
    if not recorded_tokenizer(config)[0]:
        risk = "another tokenizer of this size would give a wrong val_bpb"
        log.warn(f"no tokenizer.sha256 in DATA_PATH: {risk}: prove it with data/audit.py")
    val_shards = {*run.validation.shards.identities().values()}
    for same in val_shards & {*run.shards.identities().values()}:
        log.warn(f"a validation shard is a training shard, too: {same}")
    log.event("run", run_id=log.path.stem, argv=sys.argv, settings=given, **facts)
    log.event("config", **asdict(config))
    log.event("made_of", **made_of_run(run))
    device = torch.cuda.get_device_name() if runtime.cuda else os.uname().machine
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    log.event(
        "hardware", device=device, cpus=os.cpu_count(), **versions, python=sys.version.split()[0]
    )


def log_step(run, batches):
    """A line, with rates since the last one. Synchronisation point: its time must be true."""
    config = run.config
    step = run.step
    run.runtime.synchronize()
    run.exchange.read(step)
    told = run.runtime.gather((run.clock.now_ms(), batches.total_wait_ms, run.crc))
    times, waits, crcs = zip(*told, strict=True)
    ms, wait_ms = times[0], max(waits)
    run.exchange.agree(step, ms)
    if run.shards.grew:
        check_shards(run)
    last_step, last_ms, last_wait_ms = run.logged
    run.logged = step, ms, wait_ms
    tok_s = 1e3 * (step - last_step) * config.train_batch_tokens / (ms - last_ms)
    share = progress(config, step, ms)
    values = {
        "train_loss": run.exchange.loss,
        "train_time_ms": ms,
        "step_avg_ms": ms / step,
        "tok_s": tok_s,
        "input_wait_percent": 100 * (wait_ms - last_wait_ms) / (ms - last_ms),
        "data_crc": f"{sum(crcs) & 0xFFFFFFFF:08x}",
        "eta_s": 1e-3 * ms * (1.0 - share) / share,
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
    if not math.isfinite(loss):
        run.log.warn(f"the validation of step {step} is {loss}")
    values |= {"val_loss": loss, "val_bpb": bpb, "val_stage_time_ms": val_ms}
    run.log.event("validation", step=step, **values)


def log_progress(validation, scope, done, nats, _bytes, seen):
    validation.log.line(
        f"val_progress:{scope} batch {done}/{validation.plan.num_batches} "
        f"partial_mean_loss:{nats / max(seen, 1):.4f} tokens_seen:{seen:.0f}"
    )


def log_score(run, loss, bpb, ms):
    partial = run.validation.partial
    values = {"eval_time_ms": ms, **partial}
    exact = f"{FINAL}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f} {as_words(partial)}"
    run.log.line(f"{FINAL} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {as_words(values)}")
    run.log.line(exact.rstrip())
    if unknown := run.scorer.unknown:
        run.log.warn(f"{unknown} targets are unknown to the tokenizer: their bytes are not counted")
        values["unknown_targets"] = unknown
    run.log.event("score", step=run.step, val_loss=loss, val_bpb=bpb, **values)


def log_end(run, batches, begun_ms):
    """What training and its input have cost since `begun_ms`, its start or RESUME."""
    ms = run.clock.total_ms
    total_ms = max(run.runtime.gather(batches.total_wait_ms))
    percent = 100 * total_ms / max(ms - begun_ms, 1e-9)
    if run.step < run.config.iterations:
        ended = f"train_time:{ms:.0f}ms step:{run.step}/{run.config.iterations}"
        run.log.line(f"stopping_early: wallclock_cap {ended}")
    epochs = run.step * (run.config.train_batch_tokens + SPANS_PER_STEP) / run.shards.ends[-1]
    run.log.line(
        f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{run.val_ms:.0f}ms\n"
        f"input_wait total:{total_ms:.3f}ms share:{percent:.3f}% read_bytes:{batches.bytes_read} "
        f"epochs:{epochs:.3f}\n"
        f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
        f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB"
    )
    values = {"total_ms": total_ms, "share_percent": percent, "epochs": epochs}
    values |= {"timing_train_loop_ms": ms, "timing_val_total_ms": run.val_ms}
    run.log.event("input", read_bytes=batches.bytes_read, **values)


def log_sizes(log, state, model_bytes, artifact_bytes, payload, raw):
    """The challenge's lines on sizes."""
    code_bytes = len(SOURCE)
    total = artifact_bytes + code_bytes
    ratio = sum(t.nbytes for t in state.values()) / payload
    log.line(
        f"Serialized model: {model_bytes} bytes\nCode size: {code_bytes} bytes\n"
        f"Total submission size: {model_bytes + code_bytes} bytes\n"
        f"Serialized model int8+zlib: {artifact_bytes} bytes "
        f"(payload:{payload} raw_torch:{raw} payload_ratio:{ratio:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes"
    )
    log.event("artifact", artifact_bytes=artifact_bytes, code_bytes=code_bytes)
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


def is_nearly(name, setting):
    """Do two names differ in one place, by one or two letters?"""
    start = len(os.path.commonprefix((name, setting)))
    end = len(os.path.commonprefix((name[start:][::-1], setting[start:][::-1])))
    return max(len(name), len(setting)) - start - end <= 2


def read_config(arguments, env):
    """(Config, {NAME: text} of the settings that were given, faults, warnings).

    An argument NAME=value wins over the environment, and its name must be a setting's. The
    environment has names of other programs, so one that is nearly a setting's is a warning.
    """
    given = {name: env[name].strip("\r") for name in SETTINGS if name in env}
    faults = []
    for word in (word for word in arguments if word != "--print-config"):
        name, equals, text = word.partition("=")
        if equals and name in SETTINGS:
            given[name] = text
        else:
            near = difflib.get_close_matches(name.upper(), SETTINGS, 1, cutoff=0.5)
            advice = f"did you mean {near[0]}=value" if near else "set NAME=value, see --help"
            faults.append(f"{word}: no such setting: {advice}")
    values = {}
    for name, text in given.items():
        try:
            values[name.lower()] = parse(SETTINGS[name], text)
        except ValueError as wanted:
            faults.append(f"{name}={text}: set {wanted}, see --help")
    warnings = [
        f"{name} in the environment is no setting; {setting} is"
        for name in sorted(env.keys() - SETTINGS.keys())
        for setting in SETTINGS
        if is_nearly(name.upper(), setting) and setting not in env
    ]
    return Config(**values), given, faults, warnings


def find_faults(config, env):
    """(a line for each thing that is wrong with the settings or what they name, {} or what the run
    is made of)"""
    heads, run_id = config.num_heads, config.run_id
    step = 2 * heads  # of MODEL_DIM
    log = Path("logs", f"{run_id}.txt")
    is_name = re.fullmatch(r"(\w[\w.-]*)?", run_id) and len(os.fsencode(run_id)) <= 100
    kept = checkpoint_files(run_id) if is_name else []
    taken = is_name and not config.resume and (log.exists() or kept)
    has_later = (
        config.resume not in ("", "auto") and kept and kept[0].name > Path(config.resume).name
    )
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    no_gpu = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: set cpu"
    hidden = config.device == "auto" and "CUDA_VISIBLE_DEVICES" not in env
    unused = not gpus and (hidden and Path("/dev/nvidiactl").exists() or config.device == "cuda")
    few = 0 < gpus < int(env.get("LOCAL_WORLD_SIZE", 1))
    rules = (  # setting, is it wrong?, the remedy
        ("MODEL_DIM", config.model_dim % step, f"NUM_HEADS={heads}: set a multiple of {step}"),
        ("NUM_KV_HEADS", heads % config.num_kv_heads, f"set a divisor of NUM_HEADS={heads}"),
        ("RUN_ID", not is_name, "set letters, digits, '_', then also '.', '-': at most 100 bytes"),
        ("RUN_ID", taken, f"{log} or its checkpoints exist: set another RUN_ID, or RESUME=auto"),
        ("RESUME", config.resume == "auto" and not run_id, "set RUN_ID, too"),
        ("RESUME", has_later, f"RUN_ID={run_id} has later ones: set another RUN_ID"),
        ("DEVICE", unused, no_gpu),
        ("DEVICE", few, f"{gpus} GPUs are fewer than processes: see --nproc_per_node"),
        ("VAL_BYTECOUNT_DEVICE", config.val_bytecount_device == "cuda" and not gpus, no_gpu),
    )
    faults = [f"{name}={getattr(config, name.lower())}: {fix}" for name, bad, fix in rules if bad]
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (env.get(name) or "1") not in ("0", "1") and "RANK" not in env:
            faults.append(f"{name}={env[name]}: start it with torchrun, one task for each machine")
    parts = []
    plan = partial(BatchPlan.train, ranks=int(env.get("WORLD_SIZE", 1)))
    for make in plan, partial(Shards, split="train"), partial(Shards, split="val"), read_tokenizer:
        try:
            parts.append(make(config))
        except RunError as error:
            faults.append(str(error))
        except OSError as error:  # of a dangling link, a folder, a file that cannot be read
            faults.append(f"{error.filename}: {first_line(error)}: set it right")
    if faults:
        return list(dict.fromkeys(faults)), {}
    _, train, val, (_, tokenizer) = parts
    return [], made_of(config, train, val, tokenizer)


def compare_ranks(told):
    """RunError if a rank has faults, or is made of other things than rank 0."""
    lines = told[0][0] + [
        f"rank {rank}: {text}"
        for rank, (faults, _) in enumerate(told)
        for text in faults
        if text not in told[0][0]
    ]
    if lines:
        raise RunError("\n  ".join(["nothing started, wrong settings:", *lines]))
    first = told[0][1]
    for rank, (_, made) in enumerate(told):
        differ = "; ".join(differences(made, first, "growing" in made.keys() | first.keys())[:5])
        if differ:
            raise RunError(f"rank {rank} is not as rank 0: {differ}: copy rank 0's")


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
        except Exception as error:  # it is not installed, or the GPU is another one
            if wanted == "fa3":
                raise RunError(f"ATTENTION_BACKEND=fa3: {first_line(error)}: set auto") from error
    return every if wanted == "auto" else {wanted: every[wanted]}


def begin(run, state, where, given, warnings):
    """Restores the checkpoint, if there is one, and begins the log."""
    log = run.log
    for group in run.groups:
        group["base_lr"] = group["lr"]  # before the schedule
    run.initial = numbers_of(map_leaves(state_of, held(run)))
    if state:
        warnings += resume(run, state, where)
    elif run.config.resume:
        warnings.append(f"RESUME: {run.config.run_id} has no checkpoint: step 1 is next")
    has_log = log.path.exists()
    problem = run.runtime.broadcast(log.begin() if run.runtime.rank == 0 else "")
    if problem:
        raise RunError(problem)
    if not (run.over and has_log):  # that log has the settings
        log_start(run, given)
    for warning in warnings:
        log.warn(warning)
    if run.over:
        log.line(f"no step is left: packs and scores {where}")
    elif state:
        log.line(f"resumed: step:{run.step} resumed_from:{where}")
        log.event("checkpoint", step=run.step, resumed_from=where)


def execute(config, env, store, log, given_and_warnings):
    """Runs it; the exit code, the same on all ranks."""
    runtime = Runtime(config, env)
    runtime.start(store)
    run_id = runtime.broadcast(config.run_id or str(uuid.uuid4()))
    config = replace(config, run_id=run_id)
    log.path = Path("logs", f"{run_id}.txt")
    state, where = find_checkpoint(config, runtime)
    code, status, problem = 0, "finished", ""
    backends = attention_backends(config)
    torch.compiler.config.cache_key_tag = ",".join(backends)  # its cache must tell them apart
    with sdpa_kernel(list(backends.values()), set_priority=True):
        run = Trainer(config, runtime, log)
        begin(run, state, where, *given_and_warnings)
        try:
            if not run.over:
                run.train()
            run.export_and_score()
        except HaltError:
            save(run)
            # All wait here for the disk, or torchrun would end rank 0.
            code, status = 128 + max(runtime.gather(runtime.signum)), "interrupted"
            again = f"RUN_ID={run_id} RESUME=auto <command>"
            problem = f"interrupted after step {run.step}; to resume: {again}"
    log.end(status, code, problem)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def fail(error, log, rank, code):
    """Says why a run has failed, in its log and on the console; returns the exit code."""
    trace = "".join(traceback.format_exception(error))
    said = f"train_gpt.py: rank {rank}: {error}" if isinstance(error, RunError) else trace.rstrip()
    if isinstance(error, SystemExit):  # sys.exit(), in an edit
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        said = trace = "" if code == error.code else str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, said, trace = 130, "interrupted", ""
    elif isinstance(error, RunError) and not error.__cause__:
        trace = ""
    log.end("failed", code, first_line(error), trace)
    if rank != "0" or isinstance(error, LostRankError):
        # Rank 0, or the rank that has the cause, says it first; torchrun then ends this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    if said:
        tell(said, "stderr")
    return code


def main(arguments, env):
    """The exit code: 0 done, 1 failed, 2 nothing started, 128 + n ended by signal n."""
    if arguments in (["--help"], ["-h"]):
        tell(f"{__doc__}\n{inspect.getsource(Config)}")
        return 0
    env = {name: text for name, text in env.items() if text or name in SETTINGS}
    if "RANK" not in env:  # alone
        env |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    log = RunLog()
    code = 2
    try:
        config, given, faults, warnings = read_config(arguments, env)
        if "--print-config" in arguments and not faults:
            pairs = {name: {"value": v, "source": "default"} for name, v in vars(config).items()}
            for name in given:
                pairs[name.lower()]["source"] = "given"
            tell(json.dumps(pairs, indent=1))
            return 0
        more, made = find_faults(config, env)
        told = faults + more, made
        store, told = meet(env, told) if "RANK" in env else (None, [told])
        compare_ranks(told)
        code = 1
        try:
            code = execute(config, env, store, log, (given, warnings))
        except (MemoryError, torch.OutOfMemoryError) as error:
            micro_steps = 2 * config.micro_steps(int(env["WORLD_SIZE"]))
            remedy = f"set GRAD_ACCUM_STEPS={micro_steps}, or a smaller MODEL_DIM"
            raise RunError(f"out of memory: {first_line(error)}: {remedy}") from error
        except dist.DistError as error:
            raise LostRankError(error) from error
    except BaseException as error:
        code = fail(error, log, env.get("RANK", "0"), code)
    return code


if __name__ == "__main__":
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # a path may have any bytes
    exit_status = main(sys.argv[1:], os.environ)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_status)  # the interpreter's own exit aborts now and then, in gloo
