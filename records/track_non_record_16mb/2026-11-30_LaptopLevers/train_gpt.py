# Made by tools/recipe.py from train_gpt.py and these recipes: leaky_relu2, xsa, ema, sliding_window, smear_gate, bigram_hash, muon_weight_decay, polar_express, parallel_residuals, partial_rope, layer_scale, two_lanes, skip_gates, attn_gate, loop, warmdown_share, muon_row_norm, documents
"""Train a small GPT on FineWeb in the style of nanoGPT, with data loading that overlaps computing.

While the model computes, a background thread reads the next batches from disk and a CUDA stream
copies them to the GPU, in training and in validation. The model is the baseline of the
parameter-golf challenge, whose goal was the fewest bits per byte with an artifact (the compressed
model) of at most 16,000,000 bytes.

On 8 GPUs (or 1, 2, 4):              torchrun --standalone --nproc_per_node=8 train_gpt.py
In one process, on a GPU or a CPU:   python3 train_gpt.py
With settings, as arguments:         python3 train_gpt.py ITERATIONS=100 SEED=7
or as environment variables:         ITERATIONS=100 SEED=7 python3 train_gpt.py
To list all settings:                python3 train_gpt.py --help
To print their values as JSON:       python3 train_gpt.py --print-config

What you change comes first: CONFIG MODEL OPTIMIZERS DATA EVALUATION ARTIFACT TRAINING.
Then comes MACHINERY: SETTINGS RUNTIME PIPELINE REDUCTION CHECKPOINTS INSTRUMENTS MAIN.

To change          edit
a setting          a line of Config. If a checkpoint can be resumed only with the same value, write
                   the setting's type as Fixed[...]
a layer            MLP, Attention, Block; GPT.logits runs them
a parameter        create it in the model; make_optimizers needs a rule that says what trains it.
                   For a second embedding, make two edits there: add its name beside
                   "tok_emb.weight" in the first `if`, and add a line for it to adam_groups
new state          make it an attribute of Trainer and add it to Trainer.parts (it needs state_dict
                   and load_state_dict), or add a value to Trainer.state_dict. Checkpoints hold
                   the state of rank 0, so it must be the same on all ranks
state for scoring  if training steps change a value that GPT.logits uses, for example the size of a
                   window, register the value as a buffer of the model. Checkpoints and the artifact
                   hold buffers. They do not hold plain attributes, so a run that is resumed after
                   its last step would score with the attribute's initial value
a training step    Trainer.train_step; it must consume micro_steps batches, because RESUME counts
                   on that
an average of the weights (EMA)
                   update it in Trainer.after_step, and let Trainer.scored_weights put it in the
                   place of the weights. Each validation and the export run inside that context
                   manager
the training loss  GPT.forward. The loss of a step is the mean over its micro-batches, so all
                   micro-batches must have the same number of targets. The score is computed from
                   GPT.logits, whatever GPT.forward returns
an optimizer       any one that steps without a closure; add it to Trainer.parts. Trainer.set_rates
                   sets its learning rate
a schedule         lr_multiplier; Trainer.set_rates for what else changes by step (a momentum, a
                   weight decay). Base a new schedule on progress(), because a run may end by time
which targets count
                   BatchPlan.fill_xy sets a target that does not count to -100, in training and in
                   the score; for the final score, WindowPlan.fill_xy does
how it is scored   Validation.score. To replace only the final score, assign your own Validation to
                   Trainer.scorer
what is stored     storage() chooses the type of each tensor. "not stored" leaves a tensor out of
                   the artifact, such as a head that is used in training only
how it is stored   add a line to QUANTIZERS (how to store and how to restore a tensor), and let
                   storage() choose it; the sizes in the log then include it
the step line      log_step: a value added there is printed and is in the .jsonl file
the order of data  Shards for the order of shards, BatchPlan.rows for the rows of a batch. Choose by
                   the number of the batch, never by progress(): the reader thread runs ahead of
                   the clock

Then check the edit: python3 tools/verify.py train_gpt.py NAME=value ...
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # Search this folder last, so that a file beside this script, say torch.py, hides no package.
    sys.path.append(sys.path.pop(0))
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"{__file__}: needs Python 3.10 or newer, this is {sys.version.split()[0]}")

import atexit
import copy
import difflib
import errno
import faulthandler
import fcntl
import hashlib
import inspect
import io
import json
import logging
import math
import queue
import random
import re
import resource
import signal
import subprocess
import threading
import time
import traceback
import uuid
import zipfile
import zlib
from bisect import bisect_right
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

try:
    # SOURCE is copied into the log, so it must be the text of the script that runs. It is read
    # before the slow imports, because somebody may edit the file during them.
    SOURCE = Path(__file__).read_bytes()
    import numpy as np
    import sentencepiece
    import torch
except ImportError as error:
    if {"--help", "-h"} & {*sys.argv}:  # help must not need packages
        # Print the docstring, and the source text of the section CONFIG.
        from_config = SOURCE.decode(errors="replace").partition("\n# === CONFIG")[2]
        print(__doc__ + from_config.partition("\n# === MODEL")[0])
        sys.exit(0)
    install = f"{sys.executable} -m pip install -r requirements.txt"
    sys.exit(
        f"{__file__}: {error}; activate the environment that README.md creates, or run {install}"
    )
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.utils.store import synchronize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

try:
    from torch.nn.attention.varlen import varlen_attn

    PACKED_OPTIONS = {*inspect.signature(varlen_attn).parameters}  # they depend on torch's version
except ImportError:  # an older torch
    PACKED_OPTIONS = set()


# === CONFIG: each line `name: type = default  # meaning` is a setting, given as NAME=value ===
class Range(NamedTuple):
    """The values that a numeric setting may have: minimum <= value < end."""

    minimum: float
    end: float
    wanted: str  # for error messages: what the value must be


# To the code these types are plain int and float; `parse_setting` checks the range.
NonNegativeInt = Annotated[int, Range(0, 2**63, "a whole number >= 0 and < 2^63")]
PositiveInt = Annotated[int, Range(1, 2**63, "a whole number >= 1 and < 2^63")]
NonNegativeFloat = Annotated[float, Range(0, math.inf, "a number >= 0")]
# Range includes its minimum, so 1e-300 stands for "more than 0".
PositiveFloat = Annotated[float, Range(1e-300, math.inf, "a number > 0")]
Fraction = Annotated[float, Range(0, 1, "a number >= 0 and < 1")]
VocabSize = Annotated[int, Range(1, 65_537, "1 to 65536, because shards hold 16 bits per token")]
# Fixed[int], which is Annotated[int, "fixed"], marks a setting that decides the model or the data.
# On RESUME, it must have the value with which the checkpoint was made. All other settings may
# change on RESUME.
Fixed = Annotated[TypeVar("Kind"), "fixed"]
# A tensor is a control tensor if its name contains one of these parts, as in the challenge's
# script: scales, gains and mixing weights. Adam trains a control tensor, even if it is a matrix.
# The artifact stores a control tensor as float32 if it has at most 65,536 numbers
# (KEEP_FLOAT_MAX_NUMEL, see ARTIFACT).
CONTROL_TENSOR_NAMES = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,"
    "skip_weights"
)


@dataclass(frozen=True)
class Config:
    """The settings of a run, and their defaults."""

    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder of the shards, fineweb_*.bin
    # If TOKENIZER_PATH is not given, the tokenizer that DATA_PATH/tokenizer.sha256 records is used.
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # .model or .json file
    run_id: str = ""  # the logs are logs/<RUN_ID>.txt and .jsonl; empty: a random name
    seed: Fixed[NonNegativeInt] = 1337  # seed of all random numbers
    # validation and logs
    val_batch_size: PositiveInt = 524288  # tokens per validation step, of all ranks together
    val_loss_every: NonNegativeInt = 1000  # steps between validations; 0: only at the end
    val_tokens: NonNegativeInt = 0  # score only the first N tokens (never submit that); 0: all
    val_progress_log_every: NonNegativeInt = 0  # batches between val_progress lines; 0: no lines
    eval_stride: NonNegativeInt = 0  # tokens between windows of the final score; 0: no windows
    train_log_every: NonNegativeInt = 200  # steps between log lines after step 10; 0: no lines
    # length of the run
    iterations: NonNegativeInt = 20000  # number of training steps
    warmdown_iters: NonNegativeInt = 1200  # steps at the end in which learning rates fall to 0
    warmdown_share: Fraction = 0.0  # last share of the run, in which rates fall; 0: WARMDOWN_ITERS
    min_lr: Fraction = 0.0  # least factor on learning rates, with WARMDOWN_SHARE
    # WARMUP_STEPS is not a learning-rate warm-up: everything that these steps change is restored.
    warmup_steps: NonNegativeInt = 20  # untimed steps before the run, which compile and allocate
    train_batch_tokens: Fixed[PositiveInt] = 524288  # tokens per step, of all ranks together
    train_seq_len: Fixed[PositiveInt] = 1024  # tokens per sequence
    doc_token: Fixed[NonNegativeInt] = 0  # token that begins documents, for attention; 0: no token
    doc_max: Fixed[NonNegativeInt] = 0  # longer documents are cut (tokens); 0: TRAIN_SEQ_LEN
    doc_ends: PositiveInt = 256  # room for segments per 98304 tokens, besides one for each row
    # With a time limit, learning rates follow the elapsed time, so no two runs are equal. Without
    # one, equal runs are bit-equal on a CPU, and on a GPU with DETERMINISTIC=1.
    max_wallclock_seconds: float = 600.0  # time limit of training (seconds); <=0: no limit
    # model
    vocab_size: Fixed[VocabSize] = 1024  # number of tokens of the tokenizer
    num_layers: Fixed[PositiveInt] = 9  # blocks; the first half feeds skip connections
    parallel_start: Fixed[int] = -1  # number (from 0) of the first parallel block; -1: none
    lanes_start: Fixed[int] = -1  # number (from 0) of the first block with two lanes; -1: none
    loop_start: Fixed[NonNegativeInt] = 3  # number (from 0) of the first block that runs again
    loop_end: Fixed[NonNegativeInt] = 5  # number (from 0) of the last block that runs again
    loop_count: Fixed[NonNegativeInt] = 0  # how many more times these blocks run; 0: never
    loop_from: Fraction = 0.35  # share of the run after which these blocks begin to run again
    model_dim: Fixed[PositiveInt] = 512  # channels of the residual stream
    num_heads: Fixed[PositiveInt] = 8  # attention heads of the queries
    num_kv_heads: Fixed[PositiveInt] = 4  # attention heads of the keys and values
    gate_window: Fixed[NonNegativeInt] = 0  # input channels that gate the heads; 0: no gates
    gate_scale: Fixed[PositiveFloat] = 0.5  # factor on the input of the sigmoid of each gate
    mlp_mult: Fixed[PositiveInt] = 2  # width of the MLP, in multiples of MODEL_DIM
    smear_gate: Fixed[bool] = False  # 1: mix each embedding with the one of the token before it
    smear_window: Fixed[NonNegativeInt] = 0  # channels that gate a token; 0: a gate per channel
    smear_bos: Fixed[NonNegativeInt] = 1  # token that begins documents and is not mixed
    layer_scale: Fixed[bool] = False  # 1: divide the inputs of layer i by sqrt(i + 1)
    skip_gates: Fixed[bool] = False  # 1: a gate per channel mixes skips in, instead of adding them
    tie_embeddings: Fixed[bool] = True  # 1: the output head is the token embedding
    leaky_slope: Fixed[Fraction] = 0.0  # slope of the MLP's leaky ReLU below 0; 0: ReLU
    xsa_last_n: Fixed[NonNegativeInt] = 0  # last blocks that remove each token's own value; 0: none
    rope_base: Fixed[PositiveFloat] = 10000.0  # base of the rotary wavelengths
    bigram_rows: Fixed[NonNegativeInt] = 0  # rows of the table of hashed token pairs; 0: no table
    bigram_dim: Fixed[PositiveInt] = 128  # channels of the table of hashed token pairs
    rope_dims: Fixed[NonNegativeInt] = 0  # channels of each head that are rotated; 0: all
    logit_softcap: Fixed[PositiveFloat] = 30.0  # logits = softcap * tanh(logits / softcap)
    qk_gain_init: float = 1.5  # initial gain of each query head
    # optimizers
    embed_lr: NonNegativeFloat = 0.6  # learning rate of an untied token embedding (Adam)
    head_lr: NonNegativeFloat = 0.008  # learning rate of an untied output head (Adam)
    tied_embed_lr: NonNegativeFloat = 0.05  # learning rate of a tied token embedding (Adam)
    tied_embed_init_std: NonNegativeFloat = 0.005  # initial standard deviation of a tied embedding
    matrix_lr: NonNegativeFloat = 0.04  # learning rate of the blocks' matrices (Muon)
    scalar_lr: NonNegativeFloat = 0.04  # learning rate of vectors and scalars (Adam)
    muon_momentum: Fraction = 0.95  # momentum of Muon after its ramp
    muon_wd: NonNegativeFloat = 0.0  # decoupled weight decay of the matrices (Muon)
    muon_row_norm: bool = False  # 1: divide rows of updates by their norm before Newton-Schulz
    muon_backend_steps: PositiveInt = 5  # Newton-Schulz iterations of Muon
    polar_express: bool = False  # 1: each of at most 5 iterations has its own coefficients
    muon_momentum_warmup_start: Fraction = 0.85  # momentum of Muon at step 0
    muon_momentum_warmup_steps: NonNegativeInt = 500  # steps of the ramp between the two momenta
    beta1: Fraction = 0.9  # decay of Adam's average of gradients
    beta2: Fraction = 0.95  # decay of Adam's average of squared gradients
    adam_eps: PositiveFloat = 1e-8  # Adam adds it to the denominator of its update
    grad_clip_norm: NonNegativeFloat = 0.0  # largest norm of the whole gradient; 0: no clipping
    ema_decay: Fixed[Fraction] = 0.0  # share of the average that each step keeps; 0: no average
    # artifact
    # A tensor whose name contains one of these parts is trained by Adam, even if it is a matrix.
    control_tensor_name_patterns: Fixed[str] = CONTROL_TENSOR_NAMES  # separated by commas
    # A small tensor whose name contains one of these parts is stored as float32 in the artifact.
    int8_keep_float_fp32_name_patterns: str = ""  # empty: those of CONTROL_TENSOR_NAME_PATTERNS
    # overlap
    train_prefetch: bool = True  # 1: a thread reads the next training batches ahead of time
    train_prefetch_queue: PositiveInt = 2  # training batches kept ready on the host
    train_copy_stream: bool = True  # 1: training batches are copied on a CUDA stream of their own
    val_prefetch: bool = True  # the same as TRAIN_PREFETCH, for validation
    val_prefetch_queue: PositiveInt = 2  # the same as TRAIN_PREFETCH_QUEUE, for validation
    val_copy_stream: bool = True  # the same as TRAIN_COPY_STREAM, for validation
    gpu_prefetch: PositiveInt = 2  # batches buffered on the GPU; 2: double buffering; 1: on demand
    val_bytecount_device: Literal["cpu", "cuda"] = "cpu"  # where the bytes for val_bpb are counted
    data_stall_seconds: PositiveFloat = 60.0  # a read that takes longer ends the run (seconds)
    # instruments
    training_timing_breakdown: bool = False  # 1: synchronize to time each phase; no overlap then
    training_timing_every: PositiveInt = 200  # steps between timing_breakdown lines after step 10
    trace_steps: NonNegativeInt = 0  # trace the first N steps to logs/<RUN_ID>.trace.json.gz
    # checkpoints
    checkpoint_every: NonNegativeInt = 0  # steps between checkpoints; 0: only after the last step
    checkpoint_keep: PositiveInt = 3  # newest checkpoints that stay in checkpoints/<RUN_ID>/
    resume: str = ""  # a checkpoint's path; auto: the newest one of RUN_ID; empty: start at step 1
    # device
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if there is a GPU
    torch_compile: Literal["auto", "0", "1"] = "auto"  # auto: compile on a GPU only
    attention_backend: Literal["auto", "fa3", "cudnn", "flash", "math"] = "auto"  # kernel of SDPA
    grad_accum_steps: NonNegativeInt = 0  # micro-steps per step on a rank; 0: max(1, 8 // ranks)
    deterministic: bool = False  # 1: equal runs are bit-equal on a GPU, too; steps are slower then

    def micro_steps(self, world_size):
        """Return the number of micro-steps (forward and backward passes) of a rank per step.

        By default, all ranks together make SPANS_PER_STEP (8, see DATA) micro-steps per step.
        """
        return self.grad_accum_steps or max(1, SPANS_PER_STEP // world_size)


# === MODEL; in shapes: B sequences, T tokens, D channels ===
# Parameters are created in the order of the challenge's script, so that a SEED gives the same
# initial weights. Parameters are float32, activations bfloat16 on a GPU. Where a parameter is
# combined with activations x, cast it with p.to(x.dtype); otherwise all that follows is float32.
def rms_norm(x):
    """Scale x (..., channels) to a root mean square of 1 over its channels."""
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """A linear layer with float32 weights (outputs, inputs), cast to the activations' dtype."""

    def __init__(self, inputs, outputs, zero=False):
        super().__init__(inputs, outputs, bias=False)
        if zero:
            nn.init.zeros_(self.weight)

    def forward(self, x, scale=None):
        """Return x (B, T, inputs) times the weight, as (B, T, outputs).

        `scale` (outputs,) scales the output. It is multiplied into the weight and not into the
        output: the gradient of `scale` is then computed from two matrices (outputs, inputs).
        Otherwise it would be computed from two activations (B, T, outputs), which are larger.
        """
        weight = self.weight if scale is None else scale[:, None] * self.weight
        return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    """Apply a rotary embedding (arXiv:2104.09864) to the first channels of each head.

    x (B, T, heads, head_dim); cos, sin (T, 1, width / 2). Channels from `width` on do not change.
    """
    width = 2 * cos.size(-1)
    left, right = x[..., :width].chunk(2, dim=-1)
    parts = left * cos + right * sin, right * cos - left * sin, x[..., width:]
    return torch.cat(parts, dim=-1)


def remove_own_value(y, v):
    """Return the output of attention without its component along each token's own value.

    y (B, T, heads, head_dim); v (B, T, kv_heads, head_dim). It computes in float32.
    """
    direction = F.normalize(v.float(), dim=-1).unsqueeze(3)  # (B, T, kv_heads, 1, head_dim)
    grouped = y.float().unflatten(2, (v.size(2), -1))  # neighbouring query heads share a value
    component = (grouped * direction).sum(-1, keepdim=True) * direction
    return (grouped - component).flatten(2, 3).to(y.dtype)


def norm_heads(x, gain):
    """Return rms_norm(x) * gain for x (..., heads, head_dim) and gain (heads,).

    With r = 1 / (root mean square of a head's numbers), it computes x * (r * gain), where
    r * gain is one factor per token and head. The form (x * r) * gain would store x * r, and read
    it again in the backward pass of the gain: 2.3 GB of memory traffic per step on each of 8 GPUs.
    """
    x_float = x.float()
    epsilon = torch.finfo(torch.float32).eps  # F.rms_norm uses the same one
    factor = (x_float.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gain[:, None]
    return (x_float * factor).to(x.dtype)


DOC_ENDS_TOKENS = 98_304  # DOC_ENDS is per so many tokens: a micro-batch of the stack caseops


class Segments:
    """Finds the segments of rows, which attention keeps apart: documents, cut every DOC_MAX tokens.

    They are found on the device, as a vector of edges of fixed length. So only one graph is
    compiled, and the host waits for nothing. The reader thread checks that the length is enough.
    """

    def __init__(self, config):
        self.token = config.doc_token
        self.longest = config.doc_max or config.train_seq_len  # tokens of the longest segment
        self.seq_len = config.train_seq_len
        self.limit = config.doc_ends
        # (segments + 1,) where segments begin and the last one ends, in a batch's flattened tokens.
        self.edges = None

    def positions(self, tokens):
        """Return for each token how many tokens of its segment are before it; tokens (B, T)."""
        column = torch.arange(tokens.size(1), device=tokens.device)
        document_start = torch.where(tokens == self.token, column, 0).cummax(1).values
        return (column - document_start) % self.longest

    def room(self, rows, length):
        """Return (segments that a batch has at least, further segments that `find` has room for).

        rows, length: the shape of the batch
        """
        least = rows if length > self.seq_len else rows * -(-length // self.longest)  # rounded up
        tokens = rows * length
        units = max(1, (tokens + DOC_ENDS_TOKENS // 2) // DOC_ENDS_TOKENS)  # rounded
        return least, self.limit * units

    def find(self, tokens, cos, sin, dtype):
        """Find the segments of a batch, for `attend`. Return its (cos, sin), both (B, T, 1, ...).

        If there is no room for all segments, cos and therefore all logits are nan, so that no logit
        is computed with wrong segments.
        """
        positions = self.positions(tokens)
        starts = (positions == 0).flatten()
        size = sum(self.room(*tokens.shape)) + 1
        edges = torch.nonzero_static(starts, size=size, fill_value=-1)[:, 0]  # begins with 0
        # Edges that are not used become the number of tokens: empty segments at the end.
        self.edges = edges.where(edges >= 0, starts.numel()).int()
        has_room = edges[-1] < 0
        cos = torch.where(has_room, cos[positions], torch.nan)
        return cos.to(dtype), sin[positions].to(dtype)

    def attend(self, q, k, v):
        """Return causal attention inside the segments that `find` found; see Attention.attend."""
        rows = q.size(0)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B * T, heads, head_dim)
        attend = attend_packed if q.is_cuda else attend_one_by_one
        y = attend(q, k, v, self.edges, self.longest)
        return y.unflatten(0, (rows, -1)).transpose(1, 2)

    def needed_doc_ends(self, plan, rows, tokens):
        """Return the smallest DOC_ENDS with which there is room for all segments of a batch.

        It runs in the reader thread.
        """
        x = np.zeros((plan.batch_rows, plan.seq_len), np.int64)
        plan.fill_xy(rows, tokens, x, np.zeros_like(x))
        least, room = self.room(*x.shape)
        further_segments = int((self.positions(torch.from_numpy(x)) == 0).sum()) - least
        return math.ceil(further_segments * self.limit / room)

    def check(self, plan, rows, tokens):
        """Raise RunError if a batch has more segments than `find` has room for."""
        needed = self.needed_doc_ends(plan, rows, tokens)
        if needed > self.limit:
            raise RunError(
                f"DOC_ENDS={self.limit} is too small: rows {rows.start} to {rows.stop - 1}, which "
                f"are one micro-batch, need {needed}; set DOC_ENDS={2 * needed}"
            )


def attend_packed(q, k, v, edges, longest):
    """Return causal attention inside segments, in the shape of q.

    q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim). edges (segments + 1,): where
    segments begin; longest: tokens of the longest segment
    """
    options = {"window_size": (-1, 0)}  # causal
    if "enable_gqa" in PACKED_OPTIONS:
        options["enable_gqa"] = q.size(1) != k.size(1)
    else:  # torch 2.11 has no such option, so give it as many heads of keys and values as of q
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    return varlen_attn(q, k, v, edges, edges, longest, longest, **options)


def attend_one_by_one(q, k, v, edges, longest):
    """Return what attend_packed does, on a CPU, for which torch has no such kernel."""
    grouped = q.size(1) != k.size(1)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
    lengths = edges.diff().tolist()
    parts = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (q, k, v)), strict=True)
    outputs = [attend(*part) for part in parts if part[0].numel()]  # (1, heads, tokens, head_dim)
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


class Attention(nn.Module):
    """Causal attention with grouped queries, rms norm of queries and keys, and a gain per head."""

    xsa = False  # True: remove each token's own value; GPT sets it

    segments = None  # with DOC_TOKEN, the Segments of the model; GPT sets it

    def __init__(self, config):
        super().__init__()
        D = config.model_dim
        self.head_dim = D // config.num_heads
        self.c_q = Linear(D, D)
        self.c_k = Linear(D, config.num_kv_heads * self.head_dim)
        self.c_v = Linear(D, config.num_kv_heads * self.head_dim)
        self.proj = Linear(D, D, zero=True)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        self.input_scale = 1.0  # GPT sets it
        # A gate of zeros multiplies its head by sigmoid(0) = 0.5.
        gate = torch.zeros(config.num_heads, config.gate_window)
        self.gate = nn.Parameter(gate) if config.gate_window else None
        self.gate_scale = config.gate_scale

    def forward(self, x, rotary, scale):
        """Map x (B, T, D) to (B, T, D).

        rotary: (cos, sin) of GPT.logits. scale (D,): a factor for each output channel.
        """
        x = x * self.input_scale
        # There are three weights, because Muon orthogonalizes each one by itself. They are used in
        # one product, which reads x once.
        weights = self.c_q.weight, self.c_k.weight, self.c_v.weight
        qkv = F.linear(x, torch.cat(weights).to(x.dtype))  # (B, T, channels of q, k and v)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # (B, T, heads of q, k and v, head_dim)
        head_counts = [len(weight) // self.head_dim for weight in weights]
        q, k, v = qkv.split(head_counts, dim=-2)  # (B, T, heads or kv_heads, head_dim)
        q = rotate(norm_heads(q, self.q_gain), *rotary)
        k = rotate(rms_norm(k), *rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, head_dim)
        y = self.attend(q, k, v)
        if self.gate is not None:
            gate = F.linear(x[..., : self.gate.size(1)], self.gate.to(x.dtype))  # (B, T, heads)
            y = y * (self.gate_scale * gate).sigmoid().mT[..., None]
        y = y.transpose(1, 2)
        if self.xsa:
            y = remove_own_value(y, v.transpose(1, 2))
        return self.proj(y.flatten(2), scale)  # (B, T, D)

    def attend(self, q, k, v):
        """Return causal attention, in the shape of q.

        q (B, heads, T, head_dim); k, v (B, kv_heads, T, head_dim)
        """
        if self.segments:
            return self.segments.attend(q, k, v)
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class MLP(nn.Module):
    """proj(leaky_relu(fc(x))^2). With LEAKY_SLOPE=0 it is relu^2, arXiv:2109.08668"""

    def __init__(self, config):
        super().__init__()
        self.slope = config.leaky_slope
        self.fc = Linear(config.model_dim, config.mlp_mult * config.model_dim)
        self.proj = Linear(config.mlp_mult * config.model_dim, config.model_dim, zero=True)
        self.input_scale = 1.0  # GPT sets it

    def forward(self, x, scale):
        x = x * self.input_scale
        x = F.leaky_relu(self.fc(x), self.slope).square()
        return self.proj(x, scale)


class Block(nn.Module):
    """A block: mixes the embedding x0 back in, then adds attention and MLP, scaled per channel."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        ones = torch.ones(config.model_dim)
        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, torch.zeros_like(ones))))  # (2, D)
        self.parallel = False  # True: attention and MLP read the same input; GPT sets it
        self.lanes = None  # (6,) factors of forward_two_lanes; GPT creates them

    def forward_two_lanes(self, x, second_lane, x0, rotary):
        """Return both lanes after this block; x is the first lane, all are (B, T, D).

        Attention reads the first lane and the MLP reads the second one. Their outputs are added to
        both lanes. Each lane has three factors in self.lanes: for itself, attention and MLP.
        """
        mix = self.resid_mix.to(x.dtype)
        attention = self.attn(rms_norm(mix[0] * x + mix[1] * x0), rotary, self.attn_scale)
        hidden = self.mlp(rms_norm(second_lane), self.mlp_scale)
        first, second = self.lanes.to(x.dtype).view(2, 3)
        x = first[0] * x + first[1] * attention + first[2] * hidden
        second_lane = second[0] * second_lane + second[1] * attention + second[2] * hidden
        return x, second_lane

    def forward(self, x, x0, rotary):
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        if self.parallel:
            normed = rms_norm(x)
            attention = self.attn(normed, rotary, self.attn_scale)
            return x + attention + self.mlp(normed, self.mlp_scale)
        x = x + self.attn(rms_norm(x), rotary, self.attn_scale)
        return x + self.mlp(rms_norm(x), self.mlp_scale)


def list_visits(config):
    """Return the numbers of the blocks in the order in which a looping model runs them."""
    start, end = config.loop_start, config.loop_end + 1
    numbers = list(range(config.num_layers))
    return numbers[:end] + config.loop_count * numbers[start:end] + numbers[end:]


class GPT(nn.Module):
    """A GPT with skip connections as in a U-Net.

    The outputs of the first half of the blocks are added to the inputs of the second half, the last
    output first. With SKIP_GATES, they are mixed by gates instead.
    """

    def __init__(self, config, dtype):
        super().__init__()
        D = config.model_dim
        self.dtype = dtype  # of the activations
        self.softcap = config.logit_softcap
        self.tok_emb = nn.Embedding(config.vocab_size, D)
        # True if blocks run again, as in a trained model. A Trainer first sets it to False.
        self.looping = config.loop_count > 0
        self.visits = list_visits(config)
        self.skip_weights = nn.Parameter(torch.ones(len(self.visits) // 2, D))
        # Gates of zeros mix half of both, because sigmoid(0) is 0.5.
        gates = nn.Parameter(torch.zeros_like(self.skip_weights))
        self.skip_gates = gates if config.skip_gates else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        for block in self.blocks[max(0, config.num_layers - config.xsa_last_n) :]:
            block.attn.xsa = True
        channels = config.smear_window or D
        self.smear = nn.Parameter(torch.zeros(channels)) if config.smear_gate else None
        has_window = config.smear_gate and config.smear_window
        self.smear_scale = nn.Parameter(torch.zeros(())) if has_window else None
        self.smear_bos = config.smear_bos
        for number, block in enumerate(self.blocks):
            block.parallel = 0 <= config.parallel_start <= number
        for number, block in enumerate(self.blocks):
            scale = 1 / math.sqrt(number + 1) if config.layer_scale else 1.0
            block.attn.input_scale = block.mlp.input_scale = scale
        if config.lanes_start >= 0:
            for block in self.blocks[config.lanes_start :]:
                block.lanes = nn.Parameter(torch.tensor(2 * [1.1, 1.0, 1.0]))
        self.segments = Segments(config) if config.doc_token else None
        for block in self.blocks:
            block.attn.segments = self.segments
        self.lm_head = None if config.tie_embeddings else Linear(D, config.vocab_size, zero=True)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        self.bigram = None
        if config.bigram_rows == 1:
            raise RunError(
                "BIGRAM_ROWS=1 leaves no row for pairs, because the last row is for first tokens; "
                "set BIGRAM_ROWS=0 or at least 2"
            )
        if config.bigram_rows:
            self.bigram = nn.Embedding(config.bigram_rows, config.bigram_dim)
            self.bigram_proj = Linear(config.bigram_dim, D)
            self.bigram_scale = nn.Parameter(torch.tensor(0.05))
            nn.init.zeros_(self.bigram.weight)
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim == 2:
                    # The challenge's initial weights are rounded to bfloat16. (Its embedding
                    # stays bfloat16; here all weights are float32 from now on.)
                    p.copy_(p.bfloat16())
        head_dim = D // config.num_heads
        # The angles are exact. The challenge's script computes them in bfloat16, which rounds the
        # angles and all positions above 256.
        dims = config.rope_dims or head_dim
        if dims % 2 or dims > head_dim:
            raise RunError(
                f"ROPE_DIMS={dims} must be an even number up to {head_dim}, or 0 for all channels"
            )
        frequencies = config.rope_base ** -(torch.arange(0, dims, 2) / dims)
        angles = torch.arange(config.train_seq_len)[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, 1, dims / 2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def logits(self, tokens):
        """Return float32 logits (B, T, vocabulary) of tokens (B, T); T is at most TRAIN_SEQ_LEN."""
        T = tokens.size(1)
        x = self.tok_emb(tokens).to(self.dtype)  # (B, T, D)
        if self.smear_scale is not None:  # with SMEAR_WINDOW, before the norm
            gate = (x[..., : len(self.smear)] @ self.smear.to(x.dtype)).sigmoid()  # (B, T)
            gate = self.smear_scale.to(x.dtype) * gate * (tokens != self.smear_bos)
            before = F.pad(x, (0, 0, 1, -1))  # of the token before; zeros for the first token
            x = x + gate[..., None] * before
        if self.bigram:
            # A hash selects the row of each pair of tokens. The last row is for the first token of
            # a sequence, which has no token before it.
            last_row = self.bigram.num_embeddings - 1
            rows = (36313 * tokens[:, 1:] ^ 27191 * tokens[:, :-1]) % last_row  # (B, T - 1)
            pairs = self.bigram(F.pad(rows, (1, 0), value=last_row)).to(x.dtype)
            x = x + self.bigram_proj(pairs) * self.bigram_scale.to(x.dtype)
        x = x0 = rms_norm(x)
        if self.smear is not None and self.smear_scale is None:
            gate = torch.sigmoid(self.smear) * (tokens != self.smear_bos)[..., None]  # (B, T, D)
            before = F.pad(x, (0, 0, 1, -1))  # of the token before; zeros for the first token
            x = x0 = x + gate.to(x.dtype) * (before - x)
        rotary = self.cos[:T].to(self.dtype), self.sin[:T].to(self.dtype)
        second_lane = None  # it begins at LANES_START
        if self.segments:  # T may then be larger than TRAIN_SEQ_LEN, but no segment is
            rotary = self.segments.find(tokens, self.cos, self.sin, self.dtype)
        skips = []
        blocks = [self.blocks[number] for number in self.visits] if self.looping else self.blocks
        half = len(blocks) // 2  # without loops, the last rows of skip_weights are not used
        for i, block in enumerate(blocks):
            has_two_lanes = i >= half and block.lanes is not None
            if has_two_lanes and second_lane is None:
                second_lane = x  # without the skip connection, which enters the first lane only
            if i >= half and skips:  # with an odd number of blocks, the last one gets no skip
                skip = self.skip_weights[i - half].to(x.dtype) * skips.pop()
                if self.skip_gates is None:
                    x = x + skip
                else:
                    x = torch.lerp(skip, x, self.skip_gates[i - half].to(x.dtype).sigmoid())
            if has_two_lanes:
                x, second_lane = block.forward_two_lanes(x, second_lane, x0, rotary)
                continue
            x = block(x, x0, rotary)
            if i < half:
                skips.append(x)
        if second_lane is not None:
            x = (x + second_lane) / 2
        head = self.tok_emb if self.lm_head is None else self.lm_head
        x = rms_norm(x)
        logits = F.linear(x, head.weight.to(x.dtype))  # (B, T, vocabulary)
        return (self.softcap * torch.tanh(logits / self.softcap)).float()

    def forward(self, x, y):
        """Return the training loss: the mean cross-entropy in nats of the targets y (B, T), given
        the inputs x (B, T).

        A target of -100 is ignored.
        """
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())


# === OPTIMIZERS: Muon trains the blocks' matrices, Adam everything else ===
# Coefficients (a, b, c) of newton_schulz, whose iterations compute a x + b gram x + c gram gram x.
# Keller Jordan's are the same in all iterations. Polar Express has other ones in each iteration;
# after five iterations, singular values are between about 0.86 and 1.14.
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),)
POLAR_EXPRESS = (
    (8.156554525, -22.48329293, 15.87876992),
    (4.042929935, -2.808917466, 0.5000178451),
    (3.891667802, -2.772484153, 0.5060648179),
    (3.285753658, -2.368129493, 0.4644902423),
    (2.346541326, -1.709782838, 0.4232355117),
)


def newton_schulz(x, iterations, dtype, row_norm=False):
    """Return approximately the nearest semi-orthogonal matrices to x (n, rows, cols), in `dtype`.

    iterations: the coefficients (a, b, c) of each iteration. With those of Keller Jordan,
    the singular values of the result are between about 0.7 and 1.2
    (https://kellerjordan.github.io/posts/muon/).
    """
    if row_norm:  # MuonEq-R
        x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-7)
    tall = x.size(-2) > x.size(-1)
    x = (x.mT if tall else x).to(dtype)  # (n, short side, long side)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in iterations:
        gram = x @ x.mT  # (n, short side, short side)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalized.

    All matrices of a parameter group have one shape, so they are processed as a batch. Each matrix
    is orthogonalized by one rank only, and one all-reduce then gives all updates to all ranks. So
    the replicas stay bitwise equal, even if the ranks' kernels differ in the last bit.
    """

    def __init__(self, groups, runtime, config):
        super().__init__(groups, {"momentum": config.muon_momentum})
        self.runtime = runtime
        steps = config.muon_backend_steps
        self.iterations = POLAR_EXPRESS[:steps] if config.polar_express else steps * KELLER_JORDAN
        self.weight_decay = config.muon_wd
        self.row_norm = config.muon_row_norm
        self.newton_schulz = newton_schulz  # Trainer compiles it
        self.dtype = torch.bfloat16 if runtime.cuda else torch.float32
        self.matrices = [p for group in self.param_groups for p in group["params"]]
        # Which rank orthogonalizes which matrices: lay the costs of all matrices (numel * shorter
        # side) end to end on a line, and cut the line into world_size equal parts. A matrix belongs
        # to the rank in whose part its last unit of cost lies, the one with the number end - 1.
        # So all ranks have about the same cost. And as make_optimizers puts matrices of one shape
        # side by side, a rank's matrices have few shapes, and form few batches.
        costs = [p.numel() * min(p.shape) for p in self.matrices]
        ends = list(accumulate(costs))
        owners = [runtime.world_size * (end - 1) // ends[-1] for end in ends]
        pairs = zip(self.matrices, owners, strict=True)
        self.own_matrices = {p for p, owner in pairs if owner == runtime.rank}
        size = sum(p.numel() for p in self.matrices)
        # Two flat buffers hold the updates of all matrices. `reduced` has the dtype of the
        # all-reduce: a rank writes its own updates there, and the all-reduce adds those of the
        # other ranks. `updates` is a copy in float32, to be added to the weights.
        self.reduced = torch.zeros(size, dtype=self.dtype, device=runtime.device)
        self.reduced_views = views_like(self.reduced, self.matrices)
        self.updates = torch.zeros(size, device=runtime.device)
        self.update_views = views_like(self.updates, self.matrices)
        for p in self.matrices:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        """Update the momentum buffers and the weights."""
        self.reduced.zero_()
        buffers = {p: self.state[p]["momentum_buffer"] for p in self.matrices}
        factors = [group["momentum"] for group in self.param_groups for _ in group["params"]]
        torch._foreach_mul_(list(buffers.values()), factors)
        torch._foreach_add_(list(buffers.values()), [p.grad for p in self.matrices])
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p in self.own_matrices]
            if matrices:
                gradients = torch.stack([p.grad for p in matrices])  # (n, rows, cols)
                momenta = torch.stack([buffers[p] for p in matrices])
                nesterov = gradients.add_(momenta, alpha=group["momentum"])
                update = self.newton_schulz(nesterov, self.iterations, self.dtype, self.row_norm)
                torch._foreach_copy_([self.reduced_views[p] for p in matrices], update.unbind())
        self.runtime.all_reduce(self.reduced)
        self.updates.copy_(self.reduced)
        for group in self.param_groups:
            updates = [self.update_views[p] for p in group["params"]]
            rows, cols = group["params"][0].shape
            rate = group["lr"] * max(1.0, rows / cols) ** 0.5  # as in Keller Jordan's Muon
            if self.weight_decay:
                torch._foreach_mul_(group["params"], 1.0 - group["lr"] * self.weight_decay)
            torch._foreach_add_(group["params"], updates, alpha=-rate)


def make_optimizers(model, config, runtime):
    """Return (Adam, Muon), which together train all parameters that need a gradient.

    Raises RunError for a parameter of a kind for which there is no rule here.
    """
    matrices = defaultdict(list)  # {shape: the blocks' matrices of this shape}
    vectors = []
    for name, p in model.named_parameters():
        own_group = "tok_emb.weight", "lm_head.weight", "bigram.weight"
        if name in own_group or not p.requires_grad:
            continue  # it has a group of its own below, or it is frozen
        control = matches_any(name, config.control_tensor_name_patterns)
        # skip_weights is a matrix, but not of a block: Adam trains it whatever the patterns are.
        control = control or name == "skip_gates"
        control = control or name.endswith(".attn.gate")
        if p.ndim < 2 or control or name == "skip_weights":
            vectors.append(p)
        elif p.ndim == 2 and name.startswith(("blocks.", "bigram_proj.")):
            matrices[p.shape].append(p)
        else:
            raise RunError(
                f"the parameter {name} of shape {tuple(p.shape)} would not be trained; "
                "add a rule for it to make_optimizers"
            )
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    adam_groups = [
        {"params": [model.tok_emb.weight], "lr": embed_lr},
        {"params": vectors, "lr": config.scalar_lr},
    ]
    if not config.tie_embeddings:
        adam_groups.append({"params": [model.lm_head.weight], "lr": config.head_lr})
    if model.bigram:
        adam_groups.append({"params": [model.bigram.weight], "lr": embed_lr})
    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in matrices.values()]
    betas = config.beta1, config.beta2
    adam = torch.optim.Adam(adam_groups, betas=betas, eps=config.adam_eps, fused=True)
    return adam, Muon(muon_groups, runtime, config)


def time_limit_ms(config):
    """Return the time limit of training in ms; infinity if there is none."""
    limit = config.max_wallclock_seconds
    return 1e3 * limit if limit > 0 else math.inf


def progress(config, step, elapsed_ms):
    """Return the share of the run that is done, 0 to 1: of its steps or of its time limit,
    whichever is larger."""
    by_steps = step / max(config.iterations, 1)
    by_time = elapsed_ms / time_limit_ms(config)
    return min(1.0, max(by_steps, by_time))


def lr_multiplier(config, step, elapsed_ms):
    """Return the factor on all learning rates: 1, then a linear fall to 0 over the last
    WARMDOWN_ITERS steps, or to MIN_LR over the last WARMDOWN_SHARE of the run.

    elapsed_ms: the training time of the first `step` steps. With a time limit, the number of
    steps that are left is estimated from it, and ITERATIONS plays no role, as in the challenge's
    script.
    """
    if config.warmdown_share > 0:
        left = 1.0 - progress(config, step, elapsed_ms)
        return max(min(1.0, left / config.warmdown_share), config.min_lr)
    if config.warmdown_iters == 0:
        return 1.0
    if time_limit_ms(config) == math.inf:
        steps_left = max(0, config.iterations - step)
    else:  # the challenge's rule: the time that is left, divided by the mean time of a step
        left_ms = max(0.0, time_limit_ms(config) - elapsed_ms)
        steps_left = left_ms * max(step, 1) / max(elapsed_ms, 1e-9)
    return min(1.0, steps_left / config.warmdown_iters)


def muon_momentum(config, step):
    """Return Muon's momentum at `step`: a linear ramp up to MUON_MOMENTUM."""
    steps = config.muon_momentum_warmup_steps
    share = min(1.0, step / steps) if steps > 0 else 1.0
    return (1 - share) * config.muon_momentum_warmup_start + share * config.muon_momentum


# === DATA: which rows form a batch ===
# A row is one training sequence: TRAIN_SEQ_LEN inputs x and as many targets y, the same tokens one
# place later. The order of data is the challenge's. A step uses 8 consecutive stretches of tokens,
# called spans, one for each of 8 GPUs. In a span, x is all tokens but the last and y is all tokens
# but the first; both are cut into rows. An example with TRAIN_SEQ_LEN=4 and two rows per span:
#
#   token   0   1   2   3   4   5   6   7   8 | 9  10  11  12  13  14  15  16  17 | 18 ...
#           row 0: x 0-3, y 1-4               | row 2: x 9-12, y 10-13
#                           row 1: x 4-7, y 5-8                 row 3: x 13-16, y 14-17
#           span 0                            | span 1                            | span 2
#
# So a span with n targets takes n + 1 tokens. 1, 2, 4 or 8 GPUs share the 8 spans of a step.
SPANS_PER_STEP = 8


def tokens_per_step(config):
    """Return the number of tokens that a step takes: its targets, and one more for each span."""
    return config.train_batch_tokens + SPANS_PER_STEP


@dataclass(frozen=True)
class BatchPlan:
    """Computes which rows form batch k of this rank.

    The result depends on nothing but k and these numbers, so timing cannot change what a run trains
    on, and a resumed run needs only the number of its next batch.
    """

    seq_len: int  # tokens of a row
    span_rows: int  # rows of a span
    first_row: int  # number of the first row of this rank's batch 0
    stride: int  # rows between the beginnings of two consecutive batches of this rank
    batch_rows: int  # rows of a batch
    end_row: int  # this rank's rows end before this one
    first_batch: int = 0  # the batch to begin with

    @classmethod
    def train(cls, config, rank=0, ranks=1, step=0):
        """Return the plan of a rank's training batches, beginning after `step` steps.

        The rows of a step are divided into ranks * micro_steps equal shares. In micro-step m, rank
        r has share m * ranks + r. A share lies inside one span or consists of whole spans. Raises
        RunError where the settings do not allow that.
        """
        tokens, seq_len = config.train_batch_tokens, config.train_seq_len
        micro_steps = config.micro_steps(ranks)
        micro_batches = ranks * micro_steps
        if SPANS_PER_STEP % micro_batches and micro_batches % SPANS_PER_STEP:
            raise RunError(
                f"GRAD_ACCUM_STEPS={micro_steps} times {ranks} ranks must divide 8 or be a "
                "multiple of 8; try GRAD_ACCUM_STEPS=8"
            )
        unit = seq_len * math.lcm(SPANS_PER_STEP, micro_batches)
        if tokens % unit:
            near = nearest_multiple(tokens, unit)
            raise RunError(f"TRAIN_BATCH_TOKENS={tokens} must be a multiple of {unit}; try {near}")
        step_rows = tokens // seq_len
        batch_rows = step_rows // micro_batches
        if config.doc_token:
            # A document may go on in the next row. So the rows of a span are joined into one row,
            # or the rows of a batch, if a batch is less than a span.
            joined = min(step_rows // SPANS_PER_STEP, batch_rows)
            seq_len *= joined
            step_rows //= joined
            batch_rows //= joined
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
    def val(cls, config, num_tokens, rank=0, ranks=1):
        """Return the plan of a rank's validation batches.

        The validation set is one single span, and each rank scores a consecutive part of its rows.
        num_tokens: the number of tokens of the validation set. Raises RunError if it has no row.
        """
        seq_len = config.train_seq_len
        limit = config.val_tokens or num_tokens
        num_targets = min(num_tokens, limit) - 1  # the first token is no target
        span_rows = num_targets // seq_len
        # VAL_TOKENS was checked before, so here the validation set itself is too short.
        if span_rows < 1:
            raise RunError(
                f"TRAIN_SEQ_LEN={seq_len} is too long for the validation set, which has "
                f"{num_tokens} tokens; try {num_tokens - 1}"
            )
        first = span_rows * rank // ranks
        end = span_rows * (rank + 1) // ranks
        # A rank's share of VAL_BATCH_SIZE is cut into micro_steps batches, as in the challenge's
        # script. So by default, validation needs no more memory than training.
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
        """Return the range of row numbers of batch k: a part of one span or some whole spans.

        To change the order of the data, change this method. RESUME works with any order, because it
        only starts at another k.
        """
        first = self.first_row + k * self.stride
        return range(first, min(first + self.batch_rows, self.end_row))

    def first_token(self, row):
        """Return the number of the first token of a row."""
        return row * self.seq_len + row // self.span_rows  # each earlier span has one extra token

    def extent(self, rows):
        """Return (first token, number of tokens, number of spans) of a range of rows."""
        spans = max(1, len(rows) // self.span_rows)  # the rows may be a part of one span
        return self.first_token(rows.start), len(rows) * self.seq_len + spans, spans

    def fill_xy(self, rows, tokens, x, y):
        """Convert the uint16 tokens of some rows to int64 inputs x and targets y, both (B, T).

        tokens, x and y are NumPy arrays or tensors; x and y are written in place. This method also
        decides what is scored: a target of -100 is neither trained on nor scored.
        """
        filled = len(rows)
        _, length, spans = self.extent(rows)
        by_span = tokens[:length].reshape(spans, -1)  # a part of one span, or whole spans
        # Views of x and y, with a line for each span. What is written to them is in x and y.
        x_by_span = x[:filled].reshape(spans, -1)
        y_by_span = y[:filled].reshape(spans, -1)
        x_by_span[:] = by_span[:, :-1]
        y_by_span[:] = by_span[:, 1:]
        # Pad a short last batch, because a batch of another shape would be compiled again.
        x[filled:] = 0
        y[filled:] = -100


@dataclass(frozen=True)
class WindowPlan(BatchPlan):
    """A plan whose rows are windows that overlap. Row r begins at token r * shift.

    Row 0 scores all its targets, each later row its last `shift` targets. Together they score each
    target of the plain rows once.
    """

    shift: int = 0  # tokens between the beginnings of two consecutive windows

    @classmethod
    def val(cls, config, num_tokens, rank=0, ranks=1):
        """Return the plan of a rank's windows, with as many windows per batch as BatchPlan.val has
        rows. Raises RunError if EVAL_STRIDE does not fit."""
        plain = BatchPlan.val(config, num_tokens, rank, ranks)
        shift = config.eval_stride
        if plain.seq_len % shift:
            raise RunError(
                f"EVAL_STRIDE={shift} must be a divisor of TRAIN_SEQ_LEN={plain.seq_len}, or 0"
            )
        num_windows = 1 + (plain.span_rows - 1) * plain.seq_len // shift
        first = num_windows * rank // ranks
        end = num_windows * (rank + 1) // ranks
        return cls(**asdict(plain) | {"first_row": first, "end_row": end, "shift": shift})

    def first_token(self, row):
        return row * self.shift

    def extent(self, rows):
        length = (len(rows) - 1) * self.shift + self.seq_len + 1
        return self.first_token(rows.start), length, 1

    def fill_xy(self, rows, tokens, x, y):
        """Fill x and y as BatchPlan.fill_xy does; targets of an earlier window become -100."""
        filled = len(rows)
        used = torch.as_tensor(tokens)[: self.extent(rows)[1]]
        windows = used.unfold(0, self.seq_len + 1, self.shift)  # (filled, T + 1)
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        x[:filled] = windows[:, :-1]
        y[:filled] = windows[:, 1:]
        first = 1 if rows.start == 0 else 0  # the first window scores all its targets
        y[first:filled, : -self.shift] = -100
        x[filled:] = 0
        y[filled:] = -100


# === EVALUATION: bits per byte ===
# The loss per token depends on the tokenizer, because longer tokens are harder to predict. The loss
# per byte of text does not, so scores with different tokenizers can be compared:
# bits per byte = (sum of the nats of all targets) / ln 2 / (number of bytes that they stand for).
def mean_nats(model, x, y):
    """Return the mean cross-entropy in nats of the targets y (B, T), given the inputs x (B, T).

    The score uses this function and not GPT.forward, so an edit of the training loss does not
    change the score.
    """
    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())


class Validation:
    """Scores the validation set with the same double-buffered pipeline as training uses.

    While the model computes, the reader thread reads the next batches and counts their targets and
    bytes on the CPU. phase: a function; `with phase("forward"):` names or times a block of code,
    see Phases.
    """

    def __init__(self, config, runtime, log, phase, data):
        self.runtime = runtime
        self.log = log
        self.phase = phase
        self.shards = data.val
        self.byte_table = data.byte_table
        num_tokens = self.shards.ends[-1]
        self.plan = BatchPlan.val(config, num_tokens, runtime.rank, runtime.world_size)
        # Number of targets of all ranks, if fill_xy excludes none.
        self.targets = self.plan.span_rows * self.plan.seq_len
        # Log lines contain this if VAL_TOKENS leaves out a part of the validation set.
        self.partial = {"partial_val": 1} if 0 < config.val_tokens < num_tokens else {}
        self.overlap = Overlap.from_config(config, "val", runtime.device)
        self.log_every = config.val_progress_log_every
        self.mean_nats = mean_nats  # Trainer compiles it
        # How often the unknown token is a target (log_score warns about it): on this rank during an
        # evaluation, on all ranks after it.
        self.unknown = 0
        self.device_table = None  # the byte table on the GPU, with VAL_BYTECOUNT_DEVICE=cuda
        if config.val_bytecount_device == "cuda":
            self.device_table = ByteTable(*(torch.tensor(t).cuda() for t in self.byte_table))

    def batches(self):
        """Return a new Pipeline of this rank's validation batches."""
        return Pipeline(
            self.shards,
            self.plan,
            self.overlap,
            self.runtime.device,
            summarize=self.summarize,
            phase=self.phase,
        )

    def summarize(self, plan, rows, tokens):
        """Return (targets, bytes) of a batch: exactly of those targets that `fill_xy` scores.

        It also adds to self.unknown. Pipeline calls it in the reader thread. With
        VAL_BYTECOUNT_DEVICE=cuda, bytes is 0 here.
        """
        x = np.zeros((len(rows), plan.seq_len), np.int64)
        y = np.zeros_like(x)
        plan.fill_xy(rows, tokens, x, y)
        num_bytes = 0 if self.device_table is not None else int(self.byte_table.count_bytes(x, y))
        scored = y[y >= 0]
        self.unknown += int(self.byte_table.unknown[scored].sum())
        return len(scored), num_bytes

    def score(self, model, batch, sums):
        """Add the nats, bytes and targets of a batch to sums[0], sums[1] and sums[2]."""
        nats = 0.0
        targets, num_bytes = batch.summary
        if targets:  # without a target, the mean would be nan
            with self.phase("forward"):
                nats = self.mean_nats(model, batch.x, batch.y).double() * targets
        if self.device_table is not None:
            num_bytes = self.device_table.count_bytes(batch.x, batch.y)
        sums[0] += nats
        sums[1] += num_bytes
        sums[2] += targets

    @torch.no_grad()
    def evaluate(self, model, scope):
        """Return (nats per token, bits per byte, milliseconds) of the whole validation set.

        Collective: all ranks must call it. scope: the name of this evaluation in val_progress
        lines. Raises HaltError on all ranks if one of them has received a signal.
        """
        runtime = self.runtime
        runtime.synchronize()  # synchronization point
        start = time.perf_counter()
        model.eval()
        self.unknown = 0
        # Nats, bytes and targets; unknown targets; the number of ranks that received a signal.
        sums = torch.zeros(5, dtype=torch.float64, device=runtime.device)
        what = f"for the score of {self.targets} validation tokens"
        with (
            closing(self.batches()) as batches,
            self.phase("validate"),
            warn_if_slow(self.log.line, what, seconds=3),
        ):
            for done, batch in enumerate(batches, 1):
                if runtime.signum:
                    break
                self.score(model, batch, sums)
                if is_due(self.log_every, done):
                    nats, _, seen, *_ = sums.tolist()  # synchronization point
                    self.log.line(
                        f"val_progress:{scope} batch {done}/{self.plan.num_batches} "
                        f"partial_mean_loss:{nats / max(seen, 1):.4f} tokens_seen:{seen:.0f}"
                    )
        sums[3] = self.unknown
        sums[4] = runtime.signum > 0
        with warn_if_slow(self.log.line, "for the scores of all ranks"):
            runtime.all_reduce(sums)
            nats, num_bytes, targets, unknown, signals = sums.tolist()  # synchronization point
        model.train()
        if signals:
            raise HaltError
        self.unknown = int(unknown)
        ms = 1e3 * (time.perf_counter() - start)
        return nats / targets, nats / math.log(2) / num_bytes, ms


class SlidingWindows(Validation):
    """Makes the final score with windows that begin every EVAL_STRIDE tokens."""

    def __init__(self, run):
        super().__init__(run.config, run.runtime, run.log, run.phase, run.data)
        self.stride = run.config.eval_stride
        num_tokens = self.shards.ends[-1]
        rank, ranks = self.runtime.rank, self.runtime.world_size
        self.plan = WindowPlan.val(run.config, num_tokens, rank, ranks)

    def evaluate(self, model, scope):
        """Log how the score is made, then return what Validation.evaluate returns."""
        self.log.line(f"final score: sliding windows, eval_stride:{self.stride}")
        return super().evaluate(model, scope)


# === ARTIFACT: the challenge's format: int8 with a scale per row, compressed by zlib ===
QUANT_FORMAT = "int8_clean_per_row_v1"
# The lines of the final score begin with this label. Parsers of the challenge's logs look for it.
FINAL_LABEL = "final_int8_zlib_roundtrip"
KEEP_FLOAT_MAX_NUMEL = 65_536  # a tensor of at most so many numbers is not quantized
CLIP_QUANTILE = 0.9999984  # absolute values above this quantile of their row are clipped
LEVELS = 127  # quantized values are integers in [-LEVELS, LEVELS]; int8 holds at most 127
# The smallest scale, kept as in the challenge so that artifacts are comparable. With a scale of
# 1/127, level 127 stands for 1.0, so a row of smaller weights does not use all levels. To use all
# levels, set 2.0**-14, the smallest normal float16 number.
MIN_SCALE = 1 / 127


def storage(name, t, config):
    """Return how to store a tensor: a key of QUANTIZERS, "float32", "float16", "as it is" (for
    non-floats), or "not stored"."""
    if not t.is_floating_point():
        return "as it is"
    if t.numel() > KEEP_FLOAT_MAX_NUMEL:
        return "int8"
    kept = config.int8_keep_float_fp32_name_patterns or config.control_tensor_name_patterns
    return "float32" if matches_any(name, kept) else "float16"


def quantize(t, levels=LEVELS, min_scale=MIN_SCALE):
    """Return (int8 tensor of t's shape, scale).

    The scale of a matrix (rows, columns) is float16 (rows,), and that of a vector is a float32
    scalar. If an edit adds a tensor of n matrices (n, rows, columns), its scale is float16
    (n, rows).
    """
    t = t.float()
    by_row = t.ndim >= 2
    clip = t.abs().quantile(CLIP_QUANTILE, dim=-1, keepdim=True)
    if by_row:
        scale = (clip / levels).clamp(min_scale)
    else:
        scale = torch.where(clip > 0, clip / levels, 1.0)
    q = (t.clamp(-clip, clip) / scale).round().clamp(-levels, levels).to(torch.int8)
    scale = scale.squeeze(-1)
    return q, scale.half() if by_row else scale


def dequantize(q, scale):
    """Return the float32 tensor that `quantize` stored as q and scale."""
    ones = [1] * (q.ndim - scale.ndim)
    return q.float() * scale.float().view(*scale.shape, *ones)  # (rows, columns) * (rows, 1)


# {type: (a function that returns the integers and the scale of a tensor, its inverse)}
QUANTIZERS = {"int8": (quantize, dequantize)}


def pack(state, config):
    """Return (artifact, bytes of its tensors, bytes before compression) of a CPU state dict."""
    file = {"__quant_format__": QUANT_FORMAT, "quantized": {}, "scales": {}, "dtypes": {}}
    file |= {"passthrough": {}, "qmeta": {}, "passthrough_orig_dtypes": {}}
    # These are all keys of the challenge's format. "not_stored" and "quantizers" are ours: they are
    # added only if an edit needs them.
    for name, t in state.items():
        dtype = str(t.dtype).removeprefix("torch.")
        kind = storage(name, t, config)
        if kind == "not stored":
            file.setdefault("not_stored", []).append(name)
        elif kind in QUANTIZERS:
            quantizer, _ = QUANTIZERS[kind]
            q, scale = quantizer(t)
            file["quantized"][name] = q
            file["scales"][name] = scale
            file["dtypes"][name] = dtype
            if kind != "int8":
                file.setdefault("quantizers", {})[name] = kind
            if t.ndim == 2:
                file["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        elif kind == "float16":
            file["passthrough"][name] = t.half()
            file["passthrough_orig_dtypes"][name] = dtype
        else:
            file["passthrough"][name] = t.float() if kind == "float32" else t
    raw = torch_bytes(file)
    tensor_bytes = sum(value.nbytes for _, value in iter_leaves(file) if torch.is_tensor(value))
    return zlib.compress(raw, 9), tensor_bytes, len(raw)


def unpack(data, expected):
    """Return the state dict in an artifact, with the dtypes of the state dict `expected`.

    It also reads artifacts of the challenge's script. A tensor that was not stored becomes nan, so
    that a score that uses it becomes nan, too.
    """
    file = torch.load(io.BytesIO(zlib.decompress(data)), "cpu", weights_only=True)
    state = dict(file["passthrough"])
    kinds = file.get("quantizers", {})
    for name, q in file["quantized"].items():
        _, restore_tensor = QUANTIZERS[kinds.get(name, "int8")]
        state[name] = restore_tensor(q, file["scales"][name])
    for name in file.get("not_stored", []):
        state[name] = torch.full(expected[name].shape, math.nan)
    return {name: state[name].to(t.dtype) for name, t in expected.items()}


# === TRAINING ===
# The functions with a parameter `run` (a Trainer) that are called here, such as warm_up, log_step
# and save_checkpoint, are defined in MACHINERY. They save, log and wait. None of them changes the
# weights for good: warm_up restores them.
class Trainer:
    """A run: the model and all that trains it. Every rank has one, in the same state."""

    def __init__(self, config, runtime, log, data):
        self.config = config
        self.runtime = runtime
        self.log = log
        self.clock = Clock(runtime)
        self.phase = Phases(config, runtime, log, self.clock)
        torch.manual_seed(config.seed)
        self.model = GPT(config, runtime.dtype)
        # All ranks take rank 0's initial weights, so the replicas begin equal.
        self.model.load_state_dict(runtime.broadcast(self.model.state_dict()))
        self.model.to(runtime.device)
        self.reducer = GradientReducer(self.model, runtime, self.clock)
        self.adam, self.muon = make_optimizers(self.model, config, runtime)
        # Checkpoints hold the state of these parts, by name. "run" is this Trainer itself, whose
        # state_dict is below. train_step steps the parts that are optimizers, and set_rates sets
        # their learning rates.
        # Add your own parts here.
        self.parts = {"model": self.model, "adam": self.adam, "muon": self.muon, "run": self}
        self.average = None  # a model whose weights are the average
        if config.ema_decay:
            self.average = self.parts["average"] = copy.deepcopy(self.model)
        self.data = data
        self.shards = data.train
        self.overlap = Overlap.from_config(config, "train", runtime.device)
        self.validation = Validation(config, runtime, log, self.phase, data)
        self.scorer = self.validation  # makes the final score; test-time training replaces it
        if config.eval_stride:
            self.scorer = SlidingWindows(self)
        self.val_ms = 0.0  # time of all validations
        self.looping = False  # True if blocks run again in training by now; checkpoints hold it
        self.last_logged = 0, 0.0, 0.0  # step, ms and input wait at the last step line
        # A copy of the optimizers' parameter groups from before the first step, with names in place
        # of parameters; restore_or_start fills it. RESUME needs it, see `apply_settings`.
        self.initial_groups = []
        # {name: torch's constant} of the attention kernels that may be used, for the log. `execute`
        # has computed the same. It is computed again here, so that tools and tests can make a
        # Trainer from the four arguments of this method.
        self.attention_backends = attention_backends(config, runtime)
        # True if no step is left. Checkpoints hold it, see `resume`.
        self.finished_training = False
        self.set_position(step=0, data_crc=0)
        if runtime.compiles:
            compile_parts(self)
            self.scorer.mean_nats = self.validation.mean_nats

    @property
    def optimizers(self):
        return [part for part in self.parts.values() if isinstance(part, torch.optim.Optimizer)]

    @property
    def groups(self):
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self):
        """Return the Trainer's own part of a checkpoint. `snapshot` adds step, time and checksum.

        Checkpoints have the key "over" for finished_training, so that older ones can be loaded.
        """
        return {"over": self.finished_training, "val_ms": self.val_ms, "looping": self.looping}

    def load_state_dict(self, state):
        """Set the attributes that `state_dict` returned, also those that you have added there."""
        numbers = dict(state)
        self.finished_training = numbers.pop("over")
        vars(self).update(numbers)

    def set_position(self, step, data_crc):
        """Set the number of steps done so far, and forget measurements of earlier steps.

        It is called at the start (with 0), after a checkpoint was loaded, and after the warm-up,
        which sets the number back. data_crc: the checksum of all rows before `step`. Rank 0
        begins with it, the other ranks with 0: each rank adds the checksums of its own rows, and a
        log line shows the sum over all ranks.
        """
        self.step = step
        self.crc = data_crc if self.runtime.rank == 0 else 0
        self.reducer.reset(step, self.clock.total_ms)

    def batches(self):
        """Return a new Pipeline of this rank's training batches from the current step on."""
        runtime = self.runtime
        plan = BatchPlan.train(self.config, runtime.rank, runtime.world_size, self.step)
        return Pipeline(self.shards, plan, self.overlap, runtime.device, phase=self.phase)

    @torch.no_grad()  # gradients are recorded in the forward pass alone
    def train_step(self, batches):
        """Queue the work of one step. On CUDA the host waits for nothing but its batches."""
        config = self.config
        reducer = self.reducer
        phase = self.phase
        self.runtime.watchdog.step = self.step
        micro_batches = self.runtime.micro_steps * self.runtime.world_size
        seed_step(config.seed, self.step * self.runtime.world_size + self.runtime.rank)
        # The vector holds all gradients (reducer.gradients), to which each micro-step adds, and
        # five numbers that travel with them, such as the loss (see GradientReducer).
        self.begin_to_loop()
        reducer.vector.zero_()
        loss_sum = 0.0
        for batch in islice(batches, self.runtime.micro_steps):
            with phase("forward"), torch.enable_grad():
                # Divided, so that the losses of all micro-batches add up to the mean loss.
                loss = self.model(batch.x, batch.y) / micro_batches
            with phase("backward"):
                reducer.backward(loss)
            loss_sum += loss.detach()
            # In training, a batch's summary is what the function `checksum` has returned.
            self.crc = (self.crc + batch.summary) & 0xFFFFFFFF
        with phase("reduce"):
            reducer.all_reduce(self.step, loss_sum)
        with phase("grad_clip"):
            if config.grad_clip_norm > 0:
                norm = reducer.gradients.norm() + 1e-6
                reducer.gradients.mul_((config.grad_clip_norm / norm).clamp(max=1.0))
        with phase("optimizer"):
            self.set_rates()
            for optimizer in self.optimizers:
                optimizer.step()
            self.after_step()
        self.step += 1

    def set_rates(self):
        """Set what the schedules decide for the next step, in all groups of all optimizers."""
        config = self.config
        # float(): an edited schedule may return a NumPy number, which a checkpoint cannot hold.
        for group in self.muon.param_groups:
            group["momentum"] = float(muon_momentum(config, self.step))
        # The clocks of ranks differ. reducer.elapsed_ms is the same on all ranks.
        scale = float(lr_multiplier(config, self.step, self.reducer.elapsed_ms(self.step)))
        for group in self.groups:
            # restore_or_start has noted the rates that the settings gave. A Trainer that is used
            # without it, as by tools/roofline.py, notes them here.
            base_lr = group.setdefault("base_lr", group["lr"])
            group["lr"] = scale * base_lr

    def after_step(self):
        """Update the average of the weights. It is called after all optimizers have stepped."""
        if self.average:
            means = [*self.average.parameters()]
            weights = [*self.model.parameters()]
            torch._foreach_lerp_(means, weights, 1 - self.config.ema_decay)

    @contextmanager
    def scored_weights(self):
        """Context manager of each validation and of the export: the model has the average."""
        self.swap_average()
        try:
            yield
        finally:
            # This also happens after a signal in a validation, because the checkpoint that follows
            # must hold the trained weights.
            self.swap_average()

    @torch.no_grad()
    def swap_average(self):
        """Exchange the weights of the model with their average."""
        if self.average:
            for p, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                weights = p.clone()
                p.copy_(mean)
                mean.copy_(weights)

    def begin_to_loop(self):
        """Let the model loop when the share LOOP_FROM of the run is done. It then goes on to loop,
        even if a later estimate of the share is smaller."""
        config = self.config
        share = progress(config, self.step, self.reducer.elapsed_ms(self.step))
        if config.loop_count and not self.looping and share >= config.loop_from:
            self.looping = True
            self.log.line(f"loop: from step {self.step + 1} on: {self.model.visits}")
        self.model.looping = self.looping

    def train(self):
        """Train: run steps, and from time to time log a line, validate and save a checkpoint."""
        config = self.config
        clock = self.clock
        warm_up(self)
        begun_ms = clock.total_ms
        self.last_logged = self.step, begun_ms, 0.0
        with closing(self.batches()) as batches:
            self.phase.begin_trace()
            clock.start()
            while True:
                # The host reads a step's loss, signals and time some steps later, while the device
                # already has later work. So the device never idles.
                self.reducer.read(self.step - self.runtime.read_delay_steps)
                if self.reducer.signals:  # a rank has received a signal
                    raise HaltError
                # A step that would end after the time limit is not begun. Its end is estimated, in
                # the same way on all ranks.
                next_ms = self.reducer.elapsed_ms(self.step + 1)
                is_late = next_ms > time_limit_ms(config)
                self.finished_training = is_late or self.step >= config.iterations
                if self.finished_training:
                    break
                has_waited = wait_for_tokens(self, batches)
                if has_waited:
                    continue  # waiting took time, so the time limit may be reached now
                if is_due(config.val_loss_every, self.step):
                    self.validate()
                self.train_step(batches)
                if self.step <= 10 or is_due(config.train_log_every, self.step):
                    log_step(self, batches)
                if is_due(config.checkpoint_every, self.step) and self.step < config.iterations:
                    save_checkpoint(self)
                self.phase.end_step(self.step)
            if self.step > self.last_logged[0]:
                log_step(self, batches)
            save_checkpoint(self)
            self.validate()
            clock.stop()  # validate has started it again
        if self.phase.profiler:
            self.phase.profiler.stop()  # the run had fewer than TRACE_STEPS steps
        log_end(self, batches, begun_ms)

    def validate(self):
        """Stop the training clock, score the validation set, and log the result."""
        # Wait for all steps so far. If a loss is not finite, the run ends here, and nothing is
        # scored.
        self.model.looping = self.looping
        self.reducer.read(self.step)
        self.clock.stop()
        with self.scored_weights():
            loss, bpb, ms = self.validation.evaluate(self.model, f"step_{self.step}")
        self.val_ms += ms
        log_validation(self, loss, bpb, ms)
        self.clock.start()

    def export_and_score(self):
        """Pack the model, and score what the artifact holds.

        Rank 0 packs it and writes it beside the log; all ranks score it. Raises RunError if the
        score is not finite.
        """
        self.model.looping = self.config.loop_count > 0  # even if training ended before
        with self.runtime.long_wait(), self.scored_weights():
            state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
            data = pack_and_write(self, state)
            stored = unpack(data, state)
            self.model.load_state_dict(stored)
            try:
                loss, bpb, ms = self.scorer.evaluate(self.model, FINAL_LABEL)
            finally:
                self.model.load_state_dict(state)  # a checkpoint must hold the trained weights
        log_score(self, loss, bpb, ms)
        write_results(self, state, data)
        if not math.isfinite(loss):
            raise RunError(f"the score is {loss}, which is not finite{self.explain_nan(stored)}")

    def explain_nan(self, stored):
        """Return a text that says why a score is not finite, and what to do.

        stored: the state dict in the artifact, in which tensors that were not stored are nan
        """
        reason = ""
        for name, t in stored.items():
            if not t.isfinite().all():
                if storage(name, t, self.config) == "not stored":
                    return (
                        f" ({name} is not stored in the artifact, and the score uses it); let "
                        "`storage` store it, or do not use it in GPT.logits"
                    )
                reason = reason or f" ({name} has numbers too large for the artifact)"
        return f"{reason}; lower the learning rates"


# ===== MACHINERY: keeps a run fast, safe and measurable; an experiment need not change it =====
# === SETTINGS: reading, checking, help ===
# Nested Annotated types are flat: Fixed[PositiveInt] is Annotated[int, Range(...), "fixed"]. So
# get_args(kind) contains both the Range and "fixed".
SETTINGS = {name.upper(): kind for name, kind in Config.__annotations__.items()}
FIXED = {name for name, kind in SETTINGS.items() if "fixed" in get_args(kind)}


def parse_setting(kind, text):
    """Return the value that `text` gives to a setting.

    kind: the setting's annotation in Config. Raises ValueError, whose text says what the value
    must be.
    """
    notes = []
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
    if kind is str:
        return text
    if kind is bool:
        return parse_choice({"0": False, "1": True}, text)
    if get_origin(kind) is Literal:
        return parse_choice({word: word for word in get_args(kind)}, text)
    # Without a Range, every number is allowed except infinity and nan.
    allowed = Range(-1e308, math.inf, "a whole number" if kind is int else "a number")
    for note in notes:
        if isinstance(note, Range):
            allowed = note
    with suppress(ValueError):
        value = kind(text)
        if allowed.minimum <= value < allowed.end:  # false for nan
            return value
    raise ValueError(allowed.wanted)


def parse_choice(values, text):
    """Return values[text]. Raises ValueError, whose text lists the words that are allowed."""
    if text not in values:
        raise ValueError(" or ".join(values))
    return values[text]


def is_typo_of(name, setting):
    """Return True if two names differ at one place by at most two letters.

    That is: if their common start and their common end are removed, neither has more than two
    letters left. Examples are ITERATION and ITERATIONS, MATRIX_LR and MATIRX_LR.
    """
    common_start = len(os.path.commonprefix((name, setting)))
    rests = name[common_start:], setting[common_start:]
    backwards = [rest[::-1] for rest in rests]
    common_end = len(os.path.commonprefix(backwards))
    left = max(map(len, rests)) - common_end
    return left <= 2


def read_config(arguments, env):
    """Return (Config, {NAME: text} of the given settings, faults, warnings).

    An argument NAME=value wins over the environment, and NAME must be a setting. The environment
    also contains variables of other programs. So an unknown name there is never a fault; it gives
    a warning if it looks like a misspelt setting.
    """
    # A file of settings that was written on Windows has "\r" at its line ends.
    given = {name: env[name].strip("\r") for name in SETTINGS if name in env}
    faults = []
    for word in arguments:
        if word == "--print-config":
            continue
        name, equals, text = word.partition("=")
        if equals and name in SETTINGS:
            given[name] = text
            continue
        similar = difflib.get_close_matches(name.upper(), SETTINGS, 1, cutoff=0.65)
        if similar:
            faults.append(
                f"{word}: there is no such setting; did you mean {similar[0]}={text or 'value'}?"
            )
        else:
            faults.append(f"{word}: there is no such setting; --help lists all settings")
    values = {}
    for name, text in given.items():
        try:
            values[name.lower()] = parse_setting(SETTINGS[name], text)
        except ValueError as error:  # its text says what the value must be
            faults.append(f"{name}={text} must be {error}; --help explains the setting")
    config = Config(**values)
    if "TOKENIZER_PATH" not in given:
        config = replace(config, tokenizer_path=default_tokenizer(config))
    return config, given, faults, typo_warnings(env) + schedule_warnings(config)


def typo_warnings(env):
    """Return a warning for each environment variable that looks like a misspelt setting."""
    return [
        f"{name} in the environment is not a setting and was ignored; did you mean {setting}?"
        for name in sorted(env.keys() - SETTINGS.keys())
        for setting in SETTINGS
        if is_typo_of(name.upper(), setting) and setting not in env
    ]


def schedule_warnings(config):
    """Return a warning if the run is shorter than the fall of its learning rates."""
    share = config.iterations / max(config.warmdown_iters, 1)
    if config.max_wallclock_seconds <= 0 and 0 < share < 1 and not config.warmdown_share:
        return [
            f"ITERATIONS={config.iterations} is below WARMDOWN_ITERS={config.warmdown_iters}, so "
            f"learning rates begin at {100 * share:.2g} % of their values"
        ]
    return []


# === RUNTIME: this rank and its collectives, the log, the files ===
MAX_TOKENIZER_BYTES = 100_000_000  # a larger file is not a tokenizer
# A process that waits in a collective for longer than this ends. Ten minutes are NCCL's default. A
# process that dies is noticed by torchrun at once; the timeout is only for a process that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
LONG_TIMEOUT = timedelta(hours=1)  # the same while ranks wait for work of one rank, see long_wait
WAIT_SECONDS = 60.0  # the watchdog reports a wait that takes longer
LONG_WAIT_SECONDS = 600.0  # the same while ranks wait for work of one rank


class RunError(Exception):
    """A foreseeable failure. Its text says in one line what is wrong, where, and what to do."""


class HaltError(Exception):
    """A rank has received a signal. All ranks stop at this step; `execute` saves a checkpoint."""


class InterruptedStepError(RunError):
    """A signal has ended a step before it was complete, for example while it was compiled."""

    def __init__(self, text, signum):
        super().__init__(text)
        self.signum = signum


def is_out_of_memory(error):
    """Return True if memory of the host or of the device is exhausted."""
    types = MemoryError, torch.OutOfMemoryError
    # PyTorch has no type of its own for memory of the host.
    return isinstance(error, types) or "DefaultCPUAllocator: can't allocate" in str(error)


def first_line(error):
    """Return the first line of an error's text. For an OSError, leave out errno and file name."""
    text = getattr(error, "strerror", None) or str(error)
    return (text.strip() or repr(error)).splitlines()[0]


def print_line(text, stream="stdout"):
    """Print a line. If the console is closed, the line is lost, but the run goes on."""
    with suppress(OSError):
        # Text and line end are one write. Otherwise, under torchrun, lines of two ranks would be
        # mixed.
        print(text + "\n", end="", file=getattr(sys, stream), flush=True)


@contextmanager
def warn_if_slow(print_text, what, seconds=10):
    """Surround a wait. If it takes longer than `seconds`, print once what is waited for.

    print_text: a function that prints a line, such as print_line or RunLog.line
    """
    timer = threading.Timer(seconds, print_text, [f"waiting: {what}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_file(path, max_bytes):
    """Return the bytes of a file.

    Raises OSError if it cannot be read, is not a regular file (reading a pipe would block), or is
    larger than `max_bytes`.
    """
    size = os.stat(path).st_size
    if not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is a folder or a device, not a file", str(path))
    if size > max_bytes:
        text = f"it has {size} bytes, but at most {max_bytes} are expected"
        raise OSError(errno.EFBIG, text, str(path))
    return Path(path).read_bytes()


# Files that are often found in the place of a shard or a tokenizer: (where their mark is, the mark,
# what such a file is, what to do).
FOREIGN_FILES = [
    (0, b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` in its repository"),
    (0, b"<", "an HTML page", "download the file itself"),
    (257, b"ustar", "a tar archive", "unpack it"),
    (0, b"\x1f\x8b", "a file that gzip has packed", "unpack it"),
    (0, b"PK\x03\x04", "a zip archive", "unpack it"),
]


def identify_foreign_file(data):
    """Return (what a file with this content is, what to do), or None if it is of no known kind."""
    for position, mark, what, remedy in FOREIGN_FILES:
        if data[position:].startswith(mark):
            return what, remedy
    return None


def rendezvous(env, value):
    """Connect the processes that torchrun has started, and let each send a value to all others.

    value: what this rank sends; JSON must be able to hold it. Return (the ranks' store, the list of
    all ranks' values). No device is used.
    """
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    store = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))[0]
    # torchrun's store may outlive a restart. The prefix hides what ended processes have sent.
    store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    print_on_rank_0 = print_line if rank == 0 else lambda text: None
    with warn_if_slow(print_on_rank_0, "for all ranks to start and open their data"):
        # torchelastic's `synchronize` sends each rank's value to all ranks.
        by_rank = synchronize(store, json.dumps(value).encode(), rank, world_size, "start")
    return store, [json.loads(data) for data in by_rank]


class Runtime:
    """This process: its rank, its device, the activations' dtype, and the signal it received.

    env: the environment, in which `main` has set RANK, WORLD_SIZE and LOCAL_RANK.
    """

    def __init__(self, config, env):
        self.config = config
        self.rank = int(env.get("RANK", 0))
        self.world_size = int(env.get("WORLD_SIZE", 1))
        self.micro_steps = config.micro_steps(self.world_size)
        self.signum = 0  # number of the first signal that this rank received; 0: none
        self.cuda = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{env['LOCAL_RANK']}" if self.cuda else "cpu")
        has_bfloat16 = self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        self.dtype = torch.bfloat16 if has_bfloat16 else torch.float32  # of the activations
        # The host reads the numbers of a step (its loss, for example) this many steps later, so
        # that it never waits for the device.
        self.read_delay_steps = 2 if self.cuda else 0
        self.compiles = {"0": False, "1": True, "auto": self.cuda}[config.torch_compile]
        # torchrun is the parent of this process. The watchdog notices when it is gone.
        launcher_pid = os.getppid() if env.get("TORCHELASTIC_RUN_ID") else 0
        self.watchdog = Watchdog(self.rank, launcher_pid)

    def start(self, store):
        """Set up the device, the process group and signal handlers. From here on, collectives work.

        store: the ranks' store of `rendezvous`; None if this process runs alone
        """
        if self.config.deterministic:
            use_deterministic_kernels()
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        if store:
            dist.init_process_group(
                "nccl" if self.cuda else "gloo",
                timeout=COLLECTIVE_TIMEOUT,
                device_id=self.device if self.cuda else None,
                rank=self.rank,
                world_size=self.world_size,
                store=store,
            )
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup sets SIGHUP to SIG_IGN
                signal.signal(number, self.on_signal)
        self.watchdog.start()

    def on_signal(self, signum, frame):
        """Note a signal. The next reduction tells all ranks, and they end after the same step."""
        self.signum = self.signum or signum
        # The signal also ends the compilers that torch.compile has started. PyTorch would log their
        # tracebacks, which only follow from the signal, so let libraries log nothing from now on.
        logging.disable(logging.CRITICAL)
        # Without torchrun, a second Ctrl-C ends the process immediately. Under torchrun, every rank
        # receives one Ctrl-C twice, so a second SIGINT must not end the process there.
        if signum == signal.SIGINT and not dist.is_initialized():
            signal.signal(signum, signal.SIG_DFL)

    def synchronize(self):
        """Wait until the device has done all its work. A synchronization point."""
        if self.cuda:
            with self.watchdog.waiting("its device to finish the queued work"):
                torch.cuda.synchronize()

    def all_reduce(self, tensor):
        """Sum a tensor over the ranks, in place. With NCCL the work is queued on the device; with
        gloo it is a synchronization point."""
        if dist.is_initialized():
            with self.watchdog.waiting("all ranks to join a sum"):
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value, source=0):
        """Return rank `source`'s value on all ranks. A synchronization point."""
        box = [value]
        if dist.is_initialized():
            with self.watchdog.waiting(f"a value from rank {source}"):
                dist.broadcast_object_list(box, source, device=self.device)
        return box[0]

    def gather(self, value):
        """Return the list of all ranks' values on all ranks. A synchronization point."""
        values = [value] * self.world_size
        if dist.is_initialized():
            with self.watchdog.waiting("values from all ranks"):
                dist.all_gather_object(values, value)
        return values

    @contextmanager
    def long_wait(self):
        """Context manager of work of one rank for which the others wait for minutes, as in packing.

        Collectives that begin inside may take LONG_TIMEOUT, and the watchdog reports later. End the
        block with a collective of all ranks. Then the ranks without work wait inside the block,
        with the long timeout.
        """
        set_collective_timeout(LONG_TIMEOUT)
        self.watchdog.limit = LONG_WAIT_SECONDS
        try:
            yield
        finally:
            self.watchdog.limit = WAIT_SECONDS
            set_collective_timeout(COLLECTIVE_TIMEOUT)


def set_collective_timeout(timeout):
    """Set the timeout of the collectives that begin from now on, if there is a process group."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timeout)


def use_deterministic_kernels():
    """Let PyTorch use only kernels that give the same bits in every run, for DETERMINISTIC=1.

    Otherwise, on CUDA, three kinds of kernels differ in the last bit: the backward passes of
    attention by cuDNN and FlashAttention, the gradient of the embedding (it adds atomically), and
    compiled reductions, whose block sizes depend on timings.
    """
    # cuBLAS reads this variable at its first use. PyTorch requires it for deterministic kernels.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Every buffer is written before it is read, so PyTorch need not fill new ones.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch._inductor.config.deterministic = True


class Watchdog:
    """Looks every second for a wait that takes too long, and for the end of torchrun.

    It reports once if this rank waits longer than WAIT_SECONDS for its device or for other ranks. A
    device or a collective that hangs would otherwise stay unnoticed until the collective's timeout.
    The report is one line on the console. The line also goes to rank 0's log if this process can
    write it, with the stacks of all threads of this process. The wait goes on: it may be a slow
    machine.

    If torchrun was killed (kill -9), its processes would train on without it. So this process then
    sends SIGTERM to itself, as torchrun would have done.
    """

    def __init__(self, rank, launcher=0):
        self.rank = rank
        self.launcher = launcher  # process number of torchrun; 0: this process runs without it
        self.what = ""  # what this rank is waiting for; empty: it is not waiting
        self.since = 0.0  # time.monotonic() when the wait began
        self.step = 0  # number of steps that this rank has queued; the Trainer sets it
        self.limit = WAIT_SECONDS  # a wait that takes longer is reported
        # A function that takes the report; RunLog.write_wait replaces it when there is a log.
        self.report = lambda text: print_line(f"WARNING: {text}", "stderr")
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self):
        self.thread.start()

    @contextmanager
    def waiting(self, what):
        """Surround a wait. what: what this rank waits for, for the report"""
        outer = self.what, self.since
        self.what, self.since = what, time.monotonic()
        try:
            yield
        finally:
            self.what, self.since = outer

    def _watch(self):
        reported = 0.0  # the beginning of the wait that was reported last
        while True:
            time.sleep(1)
            if self.launcher and os.getppid() != self.launcher:
                self.launcher = 0
                print_line(f"rank {self.rank} ends, because torchrun was killed", "stderr")
                os.kill(os.getpid(), signal.SIGTERM)
            what, since = self.what, self.since
            waited_seconds = time.monotonic() - since
            if what and since != reported and waited_seconds > self.limit:
                reported = since
                self.report(
                    f"rank {self.rank} has been waiting for {waited_seconds:.0f} s after step "
                    f"{self.step} for {what}; it goes on waiting"
                )


def compile_parts(run):
    """Compile the model, the score and Newton-Schulz. RunError if torch.compile does not work."""
    try:
        # Compile a small function first: a missing C compiler is found before the log is opened.
        torch.compile(torch.neg)(torch.zeros(1, device=run.runtime.device))
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
        raise RunError(
            f"torch.compile fails: {first_line(error)}; install gcc and g++, set TMPDIR to a "
            "folder whose programs may be executed, or set TORCH_COMPILE=0"
        ) from error
    run.model.compile(dynamic=False)
    run.validation.mean_nats = torch.compile(mean_nats, dynamic=False)
    for optimizer in run.optimizers:
        if isinstance(optimizer, Muon):
            optimizer.newton_schulz = torch.compile(newton_schulz, dynamic=False)


class RunLog:
    """Rank 0's log: the console, logs/<RUN_ID>.txt for people, logs/<RUN_ID>.jsonl for tools."""

    def __init__(self, run_id=""):
        self.path = Path("logs", f"{run_id}.txt")
        self.files = {}  # {suffix: open file}; empty on other ranks and before the run begins
        self.is_open = False  # True on every rank as soon as rank 0 has opened the log

    def open(self, is_new):
        """Open the files that the run will write. Return the text of an error; "" if there is none.

        It is called when nothing else can prevent the start, so a refused start leaves no files.
        """
        try:
            for folder in (self.path.parent, Path("checkpoints", self.path.stem)):
                check_writable(folder, f"{self.path.stem}.tmp")
            files = {}
            # The .txt comes last: it reserves the RUN_ID, which must not happen if the .jsonl
            # cannot be opened.
            for suffix in (".jsonl", ".txt"):
                path = self.path.with_suffix(suffix)
                if is_new and suffix == ".txt":
                    # Of two starts at the same moment, the file system lets one create the file.
                    path.touch(exist_ok=False)
                files[suffix] = path.open("a", encoding="utf-8", errors="backslashreplace")
                if path.read_bytes()[-1:] not in (b"", b"\n"):
                    # The last line is incomplete: a run was killed while it wrote the line.
                    files[suffix].write("\n")
        except OSError as error:
            return (
                f"{error.filename or self.path}: {first_line(error)}; start in a folder that can "
                "be written, or set another RUN_ID"
            )
        try:
            fcntl.flock(files[".txt"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return (
                f"{self.path} is being written by another run; wait until that run ends, or set "
                "another RUN_ID"
            )
        except OSError:
            pass  # a file system without locks: the run does without the lock
        self.files = files
        return ""

    def line(self, text):
        """Write a line for people, to the console and the .txt file."""
        if self.files:
            print_line(text)
        self.write(".txt", text)

    def warn(self, text):
        """Write a warning for people."""
        self.line(f"WARNING: {text}")

    def event(self, name, **values):
        """Write a line of JSON for tools, to the .jsonl file."""
        self.write(".jsonl", json.dumps({"event": name, "time": round(time.time(), 3), **values}))

    def write_end(self, status, code, problem="", trace=""):
        """Write how the run has ended, and print it, except for failures: `report_failure` prints
        those."""
        self.write(".txt", f"{trace}{status}: {problem}" if problem else status)
        self.event("end", status=status, exit_code=code, error=problem, traceback=trace)
        if self.files and status != "failed":
            where = f"see {self.path}" if self.path.exists() else f"{self.path} was removed"
            print_line(f"{status}: {where}")
            if problem:  # it comes last on the screen, because it says how to continue
                print_line(f"train_gpt.py: {problem}", "stderr")

    def write_rank_failure(self, rank, problem, trace):
        """Write the failure of another rank into rank 0's log.

        The rank that has failed calls it, because rank 0 may hang in a collective until torchrun
        kills it. It does nothing if rank 0's log is not on this machine, or already has its end.
        """
        events = self.path.with_suffix(".jsonl")
        text = events.read_text() if self.is_open and events.exists() else ""
        if text and '"event": "end"' not in text.splitlines()[-1]:
            self.files = {".txt": self.path.open("a"), ".jsonl": events.open("a")}
            self.write(".txt", f"{trace}rank {rank} failed: {problem}")
            self.event("rank_failed", rank=int(rank), error=problem, traceback=trace)

    def write_wait(self, text):
        """Write the watchdog's report: a line on the console, and a line with the stacks of all
        threads of this process in the .txt file, if that is on this machine."""
        print_line(f"WARNING: {text}", "stderr")
        if self.is_open and self.path.exists():
            with suppress(OSError), self.path.open("a") as file:
                print(f"WARNING: {text}; the stacks of its threads:", file=file, flush=True)
                faulthandler.dump_traceback(file)

    def write(self, suffix, text):
        """Write a line to a file. If that fails, the line is lost, but the run goes on."""
        if not self.files:
            return
        try:
            print(text, file=self.files[suffix], flush=True)
        except OSError as error:
            print_line(
                f"WARNING: a line could not be written to {self.path.with_suffix(suffix)}: "
                f"{first_line(error)}",
                "stderr",
            )


def check_writable(folder, name):
    """Write a file `name` in a folder as write_atomic does, and remove it. Raises OSError."""
    write_atomic(Path(folder, name), b"", f"{name}.new")
    Path(folder, name).unlink(missing_ok=True)


def write_atomic(path, data, temporary_name):
    """Write bytes to a temporary file in the same folder, and rename it when it is complete.

    So `path` never holds an incomplete file. Raises OSError.
    """
    temporary = path.with_name(temporary_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            sync_to_disk(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # if the disk is full, this makes room again
        raise


def sync_to_disk(file):
    """Wait until a file is on the disk, where the file system can say that. Raises OSError."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        # Some network file systems do not implement fsync. The file is written nevertheless.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def pack_and_write(run, state):
    """Return the artifact on all ranks; rank 0 packs it and writes logs/<RUN_ID>.int8.ptz.

    state: the state dict on the CPU. Collective.
    """
    log = run.log
    if run.runtime.rank > 0:
        return run.runtime.broadcast(None)
    with warn_if_slow(log.line, "for the artifact to be packed"):
        data, tensor_bytes, raw_bytes = pack(state, run.config)
    try_to_write(log, log.path.with_suffix(".int8.ptz"), data)
    model_bytes, code_bytes = len(torch_bytes(state)), len(SOURCE)
    total = len(data) + code_bytes
    ratio = sum(t.nbytes for t in state.values()) / tensor_bytes
    # These are the challenge's lines. The first "Total submission size" is that of the model before
    # compression.
    log.line(
        f"Serialized model: {model_bytes} bytes\nCode size: {code_bytes} bytes\n"
        f"Total submission size: {model_bytes + code_bytes} bytes\n"
        f"Serialized model int8+zlib: {len(data)} bytes "
        f"(payload:{tensor_bytes} raw_torch:{raw_bytes} payload_ratio:{ratio:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes"
    )
    log.event("artifact", artifact_bytes=len(data), code_bytes=code_bytes)
    if total > 16_000_000:
        log.warn(f"artifact and script have {total} bytes; the size limit is 16,000,000")
    return run.runtime.broadcast(data)


def write_results(run, state, data):
    """Write final_model.pt and final_model.int8.ptz on rank 0, after the score is in the log.

    Raises RunError if neither of them nor logs/<RUN_ID>.int8.ptz could be written.
    """
    if run.runtime.rank > 0:
        return
    has_artifact = try_to_write(run.log, Path("final_model.int8.ptz"), data)
    has_weights = try_to_write(run.log, Path("final_model.pt"), torch_bytes(state))
    has_copy = run.log.path.with_suffix(".int8.ptz").is_file()
    if not (has_artifact or has_weights or has_copy):
        raise RunError(
            "no artifact could be written (the warnings say why); make room for it, and resume the "
            f"run, which then only packs and scores; {describe_checkpoints(run)}"
        )


def try_to_write(log, path, data):
    """Write a file and return True; if that fails, log a warning and return False."""
    try:
        write_atomic(path, data, f"{path.stem}.{log.path.stem}.tmp")
    except OSError as error:
        log.warn(f"{path} could not be written: {first_line(error)}")
        return False
    return True


class ByteTable(NamedTuple):
    """What bits per byte need to know of each token: NumPy arrays or tensors (vocabulary,)."""

    base: Any  # number of UTF-8 bytes, without a leading space
    leading_space: Any  # True if the token begins with a space
    # True for control, unknown and unused tokens. They stand for no bytes, and a leading space of
    # the token that follows is not counted.
    boundary: Any
    unknown: Any  # True for the token that replaces unknown text, whose bytes are lost

    def count_bytes(self, x, y):
        """Return the number of bytes of the targets y that follow x, both (B, T).

        A target of -100 counts 0 bytes.
        """
        scored = y >= 0
        target = y * scored  # 0, a valid index, where there is no target
        spaces = self.leading_space[target] & ~self.boundary[x]
        return ((self.base[target] + spaces) * scored).sum()


def read_tokenizer(config):
    """Return (ByteTable, sha256) of TOKENIZER_PATH; RunError if it does not fit the shards."""
    path = config.tokenizer_path
    try:
        data = read_file(path, MAX_TOKENIZER_BYTES)
        table = byte_table(path, data)
    except RunError:
        raise
    except OSError as error:
        raise RunError(
            f"TOKENIZER_PATH={path} cannot be read ({first_line(error)}); set the tokenizer that "
            "made the shards"
        ) from error
    except Exception as error:  # whatever sentencepiece or json raise for another kind of file
        what, remedy = identify_foreign_file(data) or (
            "neither a SentencePiece model (.model) nor a byte tokenizer (.json)",
            "set the tokenizer that made the shards",
        )
        raise RunError(f"TOKENIZER_PATH={path} is {what}; {remedy}") from error
    size = len(table.base)
    if size != config.vocab_size:
        raise RunError(
            f"VOCAB_SIZE={config.vocab_size} does not fit {path}, which has {size} tokens; "
            f"set VOCAB_SIZE={size}"
        )
    digest = hashlib.sha256(data).hexdigest()
    recorded_digest, recorded_path = recorded_tokenizer(config)
    if recorded_digest not in ("", digest):
        raise RunError(
            f"TOKENIZER_PATH={path} is not the tokenizer that made the shards; set or restore "
            f"{recorded_path}"
        )
    return table, digest


def default_tokenizer(config):
    """Return the TOKENIZER_PATH of a run that does not set it: the tokenizer that DATA_PATH's
    tokenizer.sha256 records, if that file exists, or else the default of Config."""
    with suppress(OSError, RunError):  # `read_tokenizer` will raise the same error
        _, path = recorded_tokenizer(config)
        if path and os.path.isfile(path):
            # The path begins with DATA_PATH/../../tokenizers. Shorten it for the log.
            return os.path.relpath(os.path.realpath(path))
    return config.tokenizer_path


def recorded_tokenizer(config):
    """Return (sha256, path) of the tokenizer that made the shards, as DATA_PATH/tokenizer.sha256
    says; both are empty if there is no such file."""
    path = Path(config.data_path, "tokenizer.sha256")  # programs of data/ write it like sha256sum
    try:
        line = os.fsdecode(read_file(path, MAX_TOKENIZER_BYTES)).strip()
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    found = re.fullmatch(r"([0-9a-f]{64})(?: [ *])?(.*)", line)
    if not found:
        raise RunError(
            f"{path} must be one line as sha256sum prints it; restore the file, or make or "
            "download the data set again"
        )
    return found[1], f"{path.parent}/{found[2]}"


def byte_table(path, data):
    """Return the ByteTable of a SentencePiece .model file or of a byte tokenizer's .json file.

    A byte tokenizer is {"kind": "byte", "offset": n} or, as the challenge writes it,
    {"config": {"byte_offset": n}}: token n + b is byte b. data: the bytes of the file. Raises
    RunError for a SentencePiece model that has no piece for a single space: such a model would give
    wrong bits per byte.
    """
    if path.endswith(".json"):
        description = json.loads(data)
        if "offset" in description:
            offset = description["offset"]
        else:
            offset = description["config"]["byte_offset"]
        boundary = np.arange(256 + offset) < offset  # lower ids are control tokens
        base = np.where(boundary, 0, 1)
        all_false = np.zeros_like(boundary)
        return ByteTable(base, leading_space=all_false, boundary=boundary, unknown=all_false)
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    if not has_space_piece(model):
        raise RunError(
            f"TOKENIZER_PATH={path} has no piece for a single space, so bits per byte would be "
            "wrong; use another tokenizer"
        )
    ids = list(range(len(model)))
    pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]
    unknown = np.array(model.is_unknown(ids))
    boundary = np.any([model.is_control(ids), unknown, model.is_unused(ids)], 0)
    leading_space = np.array([piece.startswith(" ") for piece in pieces]) & ~boundary
    length = np.array([len(piece.encode()) for piece in pieces]) - leading_space
    base = np.where(boundary, 0, np.where(model.is_byte(ids), 1, length))
    return ByteTable(base, leading_space, boundary, unknown)


def has_space_piece(model):
    """Return True if a SentencePiece model has a piece for a single space.

    SentencePiece writes a space as U+2581. Without a piece for it, it encodes a space as the bytes
    E2 96 81 or as the unknown token.
    """
    # A space is encoded alone and between letters. The letters' own tokens are left out, because a
    # letter may be unknown, too.
    alone = {*model.encode(" ")}
    letters = {*model.encode("ab")}
    between_letters = {*model.encode("a b")} - letters
    ids = alone | between_letters
    is_unknown = model.unk_id() in ids
    is_split_into_bytes = "<0xE2>" in model.id_to_piece([*ids])
    return not is_unknown and not is_split_into_bytes


def seed_step(seed, number):
    """Seed all random number generators for a step of a rank.

    So random numbers of an edit (for example dropout) depend on SEED, step and rank alone, and a
    resumed run draws the same ones. number: differs for each pair of step and rank.
    """
    seed += 1_000_003 * (number + 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def torch_bytes(value):
    """Return the bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def nearest_multiple(value, unit):
    """Return the multiple of `unit` that is nearest to `value`, but at least `unit`."""
    return max(1, round(value / unit)) * unit


def is_due(every, step):
    """Return True at each `every`-th step; 0: never."""
    return every > 0 and step % every == 0


def matches_any(name, patterns):
    """Return True if a tensor's name contains one of the comma-separated patterns."""
    return any(part in name for part in patterns.split(",") if part)


# === PIPELINE: from shards to batches, ahead of time ===
# A step waits for its batch unless the batch is already on the device. So a thread reads later
# batches, and a CUDA stream copies them to the device, while the model computes. A step then waits
# for input only if input is slower than computing.
#
#  shard files --read--> slot.host (pinned) --copy--> slot.tokens --convert--> slot.x, slot.y
#           reader thread     (uint16)    copy stream   (uint16)  compute stream   (int64)
#
# On a CPU there is no copy, and the reader thread converts, too.
HEADER_BYTES = 1024  # of a shard: 256 int32 (magic, version, tokens, zeros); uint16 tokens follow
# Two more files may be in a folder of shards: export.json, the list of the shards that
# data/tokenize_docs.py writes, and .producing, while shards are still being made. If one of them is
# larger than its limit here, it is something else, and is not read.
MAX_EXPORT_BYTES = 100_000_000
MAX_PRODUCING_BYTES = 65_536
END_BYTES = 65_536  # Shard.identity has the checksum of the first and the last END_BYTES of a shard
POLL_SECONDS = 0.05  # between two looks at something that another thread or program produces


def data_hint():
    """Return what to do about a DATA_PATH without data: which data sets are here, and which program
    gets the challenge's data."""
    first_shards = sorted(Path("data/datasets").glob("*/fineweb_val_000000.bin"))
    present = "".join(f"set DATA_PATH={path.parent}, or " for path in first_shards[:5])
    return (
        f"{present}get data/datasets/fineweb10B_sp1024 with "
        "`python3 data/cached_challenge_fineweb.py --variant sp1024`"
    )


class Shard(NamedTuple):
    """An open shard file. If its path is renamed or replaced later, the open file is still read."""

    path: Path
    descriptor: int
    tokens: int
    identity: str  # "<n> tokens, <checksum of the first and last 64 KiB>"


def open_shard(path):
    """Open the shard at `path`. Raises RunError if the file is not a complete shard."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    except OSError as error:
        raise RunError(f"{path} cannot be read: {first_line(error)}") from error
    try:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, END_BYTES, 0)
        end = os.pread(descriptor, END_BYTES, max(0, size - END_BYTES))
        tokens = count_tokens(path, start, size)
    except OSError as error:
        os.close(descriptor)
        raise RunError(f"{path} cannot be read: {first_line(error)}") from error
    except RunError:
        # If the data set is still being made (see Shards), an incomplete file is opened again and
        # again. Each time would leak a descriptor.
        os.close(descriptor)
        raise
    identity = f"{tokens} tokens, {zlib.crc32(end, zlib.crc32(start)):08x}"
    return Shard(path, descriptor, tokens, identity)


def count_tokens(path, start, size):
    """Return the number of tokens in a shard; RunError if its header or its size is wrong.

    start: the first bytes of the file; size: its number of bytes
    """
    header = start[:12].ljust(12, b"\0")  # it is shorter in a truncated file
    magic, version, tokens = np.frombuffer(header, "<i4").tolist()
    if (magic, version, size) == (20240520, 1, HEADER_BYTES + 2 * tokens) and tokens > 0:
        return tokens
    what, remedy = identify_foreign_file(start) or (
        f"a truncated or corrupt shard (it begins with {magic}, {version}, {tokens} and has {size} "
        "bytes)",
        "download or make it again",
    )
    raise RunError(f"{path} is {what}; {remedy}")


class Shards:
    """The shards of the training or validation set, in the order of their numbers.

    They form one endless stream of tokens: after the last shard comes the first one again.

    A data set is growing while the file .producing is in its folder: then more shards will come.
    The program that makes them rewrites that file every few seconds and removes it at the end. Each
    rank scans the folder: first here, later in a thread that `sync_new_shards` starts. That
    function also publishes the shards that all ranks have found. The reader thread reads published
    shards only.

    Raises RunError for a folder without shards, a missing number, a truncated or corrupt file.
    """

    def __init__(self, config, split):
        self.folder = Path(os.path.realpath(config.data_path))  # a symlink may change later
        self.split = split  # "train" or "val"
        self.stall_seconds = config.data_stall_seconds
        self.vocab_size = config.vocab_size
        self.segments = Segments(config) if config.doc_token else None
        self.shards = []  # open shards that this rank has found
        # What this rank's last scan has found. Empty: the set is complete. Otherwise a text that
        # says why more shards are expected: the content of .producing, or the error of an
        # incomplete shard.
        self.pending = ""
        self.ends = [0]  # ends[i]: number of tokens in the first i published shards
        # True if more shards will be published. At first it follows from this rank's `pending`;
        # sync_new_shards then makes it the same on all ranks: true if any rank expects more.
        self.growing = False
        self.scanner = threading.Thread()  # the scan in progress; at first, one that does not run
        self.stall_timer = StallTimer(self.stall_seconds)
        self.scan()
        self.growing = self.pending != ""
        with warn_if_slow(print_line, f"for the validation shards of {self.folder}"):
            while split == "val" and not self._is_validation_complete():
                if self.stall_timer.expired(self.pending):
                    raise self.stalled(f"no new shard (last state: {self.pending})")
                time.sleep(POLL_SECONDS)
                self.scan()
        if split == "val" or not self.growing:
            self.publish(len(self.shards), growing=False)
        if split == "val":
            self._compare_with_export()
            # Make a plan only to raise RunError if the whole set (without VAL_TOKENS) has no row.
            BatchPlan.val(replace(config, val_tokens=0), self.ends[-1])

    def _is_validation_complete(self):
        """Return True if all validation shards are there, even if more training shards will come.

        The programs of data/ write "val_complete": true into .producing.
        """
        return not self.pending or '"val_complete": true' in self.pending

    def scan(self):
        """Open the shards that have appeared. Set `pending`.

        While the set is growing, an error only means that a shard is not complete yet.
        """
        path = Path(self.folder, ".producing")
        pending = ""
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                text = read_file(path, MAX_PRODUCING_BYTES).decode(errors="replace")
                pending = f"{path}: {''.join(filter(str.isprintable, text))}"
            self._open_new(is_complete=not pending)
            if not pending:
                self._compare_with_export()
        except (OSError, RunError) as error:
            # `growing` is known from earlier scans, `pending` from this scan.
            is_growing = self.growing or pending
            if not is_growing:
                raise
            pending = str(error)
        self.pending = pending

    def _open_new(self, is_complete):
        """Open all shards that continue the numbers of the open ones. RunError in a complete set if
        there is no shard, a number is missing, or a file cannot be opened."""
        if not self.folder.is_dir():
            raise RunError(f"DATA_PATH={self.folder} is not a folder; {data_hint()}")
        name = re.compile(rf"fineweb_{self.split}_\d+\.bin")
        present = {path for path in self.folder.iterdir() if name.fullmatch(path.name)}
        # An open shard stays in the list, even if its file has been removed.
        found = sorted(present | {shard.path for shard in self.shards})
        if is_complete and not found:
            raise RunError(
                f"DATA_PATH={self.folder} has no fineweb_{self.split}_*.bin; {data_hint()}"
            )
        # Numbers of training shards may begin at 1. While the set is growing, they begin at 0,
        # because shard 1 may appear before shard 0.
        may_begin_at_1 = self.split == "train" and is_complete
        first = 1 if may_begin_at_1 and found[0].stem.endswith("_000001") else 0
        new = []
        for path in found[len(self.shards) :]:  # the open shards have the lowest numbers
            next_number = first + len(self.shards) + len(new)
            number = f"{next_number:06d}"
            if path.name == f"fineweb_{self.split}_{number}.bin":
                new.append(path)
            elif is_complete:  # while the set is growing, a later scan will find the shards between
                raise RunError(
                    f"{path}: the shard with number {number} should come next; get that shard, or "
                    "move this one elsewhere"
                )
        if not self.growing:  # this is the first scan; later ones run only in a growing set
            # Opening 1,000 shards one after the other takes minutes on a slow disk.
            with ThreadPoolExecutor(16) as pool:
                self.shards += pool.map(open_shard, new)
            return
        # One after the other, so that the shards before a bad one are kept.
        for path in new:
            # If opening hangs, sync_new_shards shows this text in its error. Otherwise `scan`
            # overwrites it.
            self.pending = f"{path} is not open yet"
            self.shards.append(open_shard(path))

    def _compare_with_export(self):
        """Raise RunError if export.json is in the folder and lists other shards.

        data/tokenize_docs.py writes it, with the identity of each shard. It shows if the last shard
        is missing, or if a shard has other tokens. Its entry "complete" is false while documents
        are being tokenized, and after an interruption. Then there may be more shards than it lists.
        """
        path = Path(self.folder, "export.json")
        try:
            export = json.loads(read_file(path, MAX_EXPORT_BYTES))
            entries = export["shards"][self.split]
            listed = {name: entry["identity"] for name, entry in entries.items()}
            is_complete = export["complete"]
        except FileNotFoundError:
            return
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} is damaged or was made by another program ({error!r}); restore it, or "
                "make the data set again under another name"
            ) from error
        found = self.identities()
        if not is_complete:
            found = {name: identity for name, identity in found.items() if name in listed}
        unequal = differences(found, listed)
        if unequal:
            texts = describe_differences(unequal, "in the folder", "in export.json")
            raise RunError(
                f"{self.folder} is not what its export.json lists: {texts}; restore the shards, or "
                "make the data set again under another name"
            )

    def identities(self):
        """Return {file name: identity} of all shards that this rank has found."""
        return {shard.path.name: shard.identity for shard in self.shards}

    def stalled(self, what):
        """Return the RunError that says what did not happen for DATA_STALL_SECONDS."""
        return RunError(
            f"{what} for DATA_STALL_SECONDS={self.stall_seconds:g}; check the disk and the program "
            "that makes shards, or set a larger DATA_STALL_SECONDS"
        )

    def publish(self, count, growing):
        """Let the reader thread use the first `count` shards. growing: True if more will come."""
        self.ends = [0, *accumulate(shard.tokens for shard in self.shards[:count])]
        self.growing = growing

    def has(self, end):
        """Return True if all tokens before number `end` can be read."""
        return not self.growing or end <= self.ends[-1]

    def pieces(self, first, length):
        """Yield where the `length` tokens from number `first` on are: (shard, byte offset, number
        of bytes) for each shard that contains some of them."""
        while length:
            position = first if self.growing else first % self.ends[-1]  # wraps around
            number = bisect_right(self.ends, position) - 1
            count = min(length, self.ends[number + 1] - position)
            yield self.shards[number], HEADER_BYTES + 2 * (position - self.ends[number]), 2 * count
            first += count
            length -= count

    def read(self, first, array, note_place=lambda place: None):
        """Fill a uint16 array with the tokens from number `first` on.

        note_place: is called with the file and offset before each read. Raises RunError if a file
        cannot be read, or has a token outside the vocabulary.
        """
        data = memoryview(array).cast("B")
        for shard, offset, bytes_left in self.pieces(first, len(array)):
            place = f"{shard.path} at byte {offset}"
            note_place(place)
            try:
                while bytes_left:
                    count = os.preadv(shard.descriptor, [data[:bytes_left]], offset)
                    if not count:
                        raise OSError(f"the file ends {bytes_left} bytes too early")
                    data = data[count:]
                    offset += count
                    bytes_left -= count
            except OSError as error:
                raise RunError(
                    f"{place}: {first_line(error)}; check the disk or restore the file, and resume"
                ) from error
        if array.max() >= self.vocab_size:  # looking it up would end the process on CUDA
            index = int(array.argmax())
            shard, offset, _ = next(self.pieces(first + index, 1))
            raise RunError(
                f"{shard.path} at byte {offset} has the token {array[index]}, but VOCAB_SIZE is "
                f"{self.vocab_size}; set the tokenizer that made the shards and its VOCAB_SIZE"
            )


@dataclass
class StallTimer:
    """Tells if something has stayed as it is for too long.

    If more than 5 seconds pass between two calls, the process was suspended (by SIGSTOP, or with
    the whole computer), and that time does not count.
    """

    seconds: float
    waited: float = 0.0
    state: Any = None
    last_call: float = field(default_factory=time.monotonic)

    def expired(self, state):
        """Return True if `state` was the same in all calls of the last `seconds`."""
        now = time.monotonic()
        passed = now - self.last_call
        self.last_call = now
        if state != self.state:
            self.waited = 0.0
        elif passed < 5.0:
            self.waited += passed
        self.state = state
        return self.waited > self.seconds


def sync_new_shards(run):
    """Scan the folder of the training set once on all ranks, and publish the shards that all have.

    Collective. Return rank 0's training time in ms, the same on all ranks: wait_for_tokens needs it
    for the time limit. Raises RunError if a rank has waited too long or has another shard than
    rank 0, and HaltError after a signal.
    """
    shards = run.shards
    if shards.growing:
        # A thread scans, because the disk may not answer.
        if not shards.scanner.is_alive():
            shards.scanner = threading.Thread(target=shards.scan, daemon=True)
            shards.scanner.start()
        shards.scanner.join(POLL_SECONDS)
    has_stalled = shards.stall_timer.expired((shards.pending, len(shards.shards)))
    own = (
        shards.pending,
        shards.identities(),
        has_stalled,
        run.runtime.signum > 0,
        run.clock.now_ms(),
    )
    pending, found, stalled, signals, times = zip(*run.runtime.gather(own), strict=True)
    # Ranks see new shards at different times, so a shard that a rank lacks is no error yet. After a
    # timeout it is one, unless that rank still expects shards. check_ranks_agree raises it.
    ranks = range(len(found))
    may_lack_shards = set(ranks)
    if any(stalled):
        may_lack_shards = {rank for rank in ranks if pending[rank]}
    check_ranks_agree(found, may_lack_shards)
    for rank in ranks:
        if pending[rank] and stalled[rank]:
            raise shards.stalled(f"rank {rank}: no new shard (last state: {pending[rank]})")
    counts = [len(names) for names in found]
    shards.publish(min(counts), growing=any(pending) or min(counts) < max(counts))
    if any(signals):
        raise HaltError
    return times[0]


def wait_for_tokens(run, batches):
    """Wait until all ranks have the tokens of the next step, or the time limit is reached.

    Return True if there was a wait. Collective while the set is growing: all ranks publish the same
    shards in `sync_new_shards`, so all ranks decide alike here.

    If the tokens of the next step are there, but those of the step after it are not, the function
    scans for new shards once and does not wait. So the reader thread, which reads ahead, gets new
    shards before it needs them.
    """
    shards = run.shards
    step_tokens = tokens_per_step(run.config)
    end = (run.step + 1) * step_tokens  # of the next step
    end_of_later_step = end + step_tokens
    if shards.has(end_of_later_step):
        return False  # no scan is needed yet
    start = time.perf_counter()
    shards.stall_timer = StallTimer(shards.stall_seconds)
    with warn_if_slow(run.log.line, f"for more training shards in {shards.folder}"):
        train_ms = sync_new_shards(run)
        must_wait = not shards.has(end)
        while not shards.has(end) and train_ms <= time_limit_ms(run.config):
            time.sleep(POLL_SECONDS)
            train_ms = sync_new_shards(run)
    # The wait counts as training time, so let all ranks continue from the same new time.
    run.reducer.pace.set_exact(run.step, train_ms)
    batches.total_wait_ms += 1e3 * (time.perf_counter() - start)
    return must_wait


def checksum(plan, rows, tokens):
    """Return the checksum of the rows of a batch, modulo 2^32.

    It is a sum over rows, so the total over all batches of a step does not depend on the number of
    ranks. The number of a row is the start value of its crc32, so the same tokens in another row
    have another checksum.
    """
    data = memoryview(tokens)
    first = plan.first_token(rows.start)
    total = 0
    for row in rows:
        start = plan.first_token(row) - first
        total += zlib.crc32(data[start : start + plan.seq_len + 1], row)
    return total & 0xFFFFFFFF


class Overlap(NamedTuple):
    """What overlaps in training or validation: what the settings ask for and the device allows."""

    queue: int  # batches read ahead on the host; 0: each batch is read when it is asked for
    copy_stream: bool  # True: copies run on a CUDA stream of their own
    # Batches on the device. 2: one is copied while another is in use. 1: copied on demand. 0: no
    # CUDA.
    device_slots: int

    @classmethod
    def from_config(cls, config, split, device):
        """Return the Overlap of a split, "train" or "val"."""
        cuda = device.type == "cuda"
        timing = config.training_timing_breakdown
        prefetch = getattr(config, f"{split}_prefetch") and not timing
        copy_stream = getattr(config, f"{split}_copy_stream") and cuda and not timing
        queue_size = getattr(config, f"{split}_prefetch_queue") if prefetch else 0
        slots = config.gpu_prefetch if prefetch else 1
        return cls(queue_size, copy_stream, slots if cuda else 0)

    def describe(self):
        """Return the words that the log's header shows."""
        switches = f"prefetch:{self.queue > 0} copy_stream:{self.copy_stream}"
        return f"{switches} prefetch_queue:{self.queue} gpu_prefetch:{self.device_slots}"


class Slot:
    """Buffers for one batch, allocated once: its tokens on the host and on the device, and x, y."""

    def __init__(self, plan, device, cuda):
        length = plan.extent(range(plan.batch_rows))[1]
        self.host = torch.empty(length, dtype=torch.uint16, pin_memory=cuda)
        self.tokens = self.host
        if cuda:
            self.tokens = torch.empty(length, dtype=torch.uint16, device=device)
        self.x = torch.zeros(plan.batch_rows, plan.seq_len, dtype=torch.int64, device=device)
        self.y = torch.zeros_like(self.x)  # (B, T)
        self.rows = range(0)
        self.summary = None  # what `summarize` returned for the batch; in training, its checksum
        self.copied = None  # CUDA event: the tokens have been copied to the device
        self.converted = None  # CUDA event: the tokens on the device have been converted to x and y


class Pipeline:
    """Iterates over this rank's batches, which are slots with x, y (B, T), rows and summary.

    A batch is valid until the next one is asked for. Slots circulate:
    to_fill -> (reader thread) -> filled -> (copy) -> uploaded -> in use -> to_fill.
    The number of slots is the sum of the batches that are read ahead, those that are copied ahead,
    and the one in use. An error of the reader thread passes through the same queues as a slot, so
    it is raised after the last good batch.

    A CUDA stream is a queue of work that runs independently of other streams; only events order
    them. Whatever overwrites a buffer must wait for its last reader, and whatever reads a buffer
    must wait for its last writer:
      `copied` is recorded on the copy stream. The compute stream waits for it before it converts
      the tokens. The reader thread waits for it before it overwrites the host's tokens.
      `converted` is recorded on the compute stream. The copy stream waits for it before it
      overwrites the device's tokens.
    x and y need no event: they are written and read on the compute stream only, in its order.
    Each use of a slot must record new events: events of an earlier use have been reached long ago,
    so waiting for them would protect nothing.
    """

    def __init__(self, shards, plan, overlap, device, *, summarize=checksum, phase=nullcontext):
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
        # Without reading ahead, to_fill is empty here. Then __next__ gives the reader thread the
        # only slot, so each batch is read when it is asked for.
        for _ in range(overlap.queue + self.uploads_ahead):
            self.to_fill.put(Slot(plan, device, self.cuda))
        self.in_use = Slot(plan, device, self.cuda)
        if self.cuda:
            self.compute = torch.cuda.current_stream(device)
            self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
            # Kernels that are queued may still use the memory that the slots have just been given.
            self.copy.wait_event(self.compute.record_event())
        self.batches_left = plan.num_batches - plan.first_batch
        self.bytes_read = 0
        # Time that the device (without CUDA: the host) has waited for batches, in ms.
        self.total_wait_ms = 0.0
        # Pairs of CUDA events around each wait: (the batch is asked for, it has arrived).
        self.wait_events = deque()
        # What the reader thread is waiting for: a place in a file, or tokens that are still to be
        # published. Empty if it waits for neither. Only the reader thread sets it.
        self.reading = ""
        self.closed = threading.Event()  # tells the reader thread to end
        self.thread = threading.Thread(target=self._read_all, name="reader", daemon=True)
        self.thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.batches_left:
            raise StopIteration
        self.batches_left -= 1
        self.to_fill.put(self.in_use)  # the slot of the previous batch; at first, an unused slot
        asked = None
        if self.cuda:
            asked = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        if not self.uploaded:
            self._upload(self._next_filled())
        slot_or_error = self.uploaded.popleft()
        if isinstance(slot_or_error, BaseException):
            self.uploaded.append(slot_or_error)  # whoever asks again gets the same error
            raise slot_or_error
        self.in_use = slot_or_error
        if self.cuda:
            self._convert(self.in_use, asked)
        # Copy batches that have been read already, but do not wait here for a later batch.
        while len(self.uploaded) < self.uploads_ahead and not self.filled.empty():
            self._upload(self.filled.get())
        return self.in_use

    def _next_filled(self):
        """Wait for the next slot from the reader thread, or for its error, and return it.

        Raises RunError if a read takes too long.
        """
        start = time.perf_counter()
        stall_timer = StallTimer(self.shards.stall_seconds)
        slot_or_error = None
        with self.phase("input_wait"):
            while slot_or_error is None:
                reading = self.reading
                with suppress(queue.Empty):
                    slot_or_error = self.filled.get(timeout=POLL_SECONDS)
                expired = stall_timer.expired(reading)
                # If `reading` is empty, the reader thread computes or waits for the device.
                if slot_or_error is None and expired and reading:
                    raise self.shards.stalled(f"{reading}: the disk did not answer")
        if not self.cuda:
            self.total_wait_ms += 1e3 * (time.perf_counter() - start)
        return slot_or_error

    def _upload(self, slot_or_error):
        """Queue the copy of a slot's tokens to the device. The host does not wait for it.

        Without CUDA there is nothing to copy, and an error of the reader thread is only passed on.
        """
        if self.cuda and isinstance(slot_or_error, Slot):
            slot = slot_or_error
            with self.phase("h2d"), torch.cuda.stream(self.copy):
                if slot.converted:
                    self.copy.wait_event(slot.converted)
                slot.tokens.copy_(slot.host, non_blocking=True)
                slot.copied = self.copy.record_event(torch.cuda.Event(blocking=True))
        self.uploaded.append(slot_or_error)

    def _convert(self, slot, asked):
        """Queue the conversion of a slot's tokens to x and y, after their copy.

        The compute stream waits for the copy; the host does not. asked: an event that the compute
        stream reaches when it asks for the batch. It reaches the event `arrived` after the copy.
        The time between the two is the time that the device has waited for input.
        """
        self.compute.wait_event(slot.copied)
        arrived = self.compute.record_event(torch.cuda.Event(enable_timing=True))
        self.wait_events.append((asked, arrived))
        self.plan.fill_xy(slot.rows, slot.tokens, slot.x, slot.y)
        slot.converted = self.compute.record_event()
        self._measure_waits()

    def _measure_waits(self):
        """Add the waits whose events have been reached to total_wait_ms."""
        while self.wait_events and self.wait_events[0][1].query():
            asked, arrived = self.wait_events.popleft()
            self.total_wait_ms += asked.elapsed_time(arrived)

    def close(self):
        """End the reader thread. If it is stuck in a read, leave it alone after half a second."""
        self.closed.set()
        self.to_fill.put(None)  # wakes the reader thread
        self.thread.join(0.5)
        if self.cuda:
            self.copy.synchronize()  # synchronization point: no copy may outlive its slots
            self._measure_waits()

    # The methods below run in the reader thread.
    def _read_all(self):
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            for k in range(self.plan.first_batch, self.plan.num_batches):
                slot = self.to_fill.get()
                if slot is None:  # `close` wakes this thread with it
                    return
                if slot.copied:
                    # Synchronization point, of this thread only. The host's tokens are overwritten
                    # after it.
                    slot.copied.synchronize()
                rows = self.plan.rows(k)
                first, length, _ = self.plan.extent(rows)
                self._wait_until_published(first + length)
                if self.closed.is_set():
                    return
                with self.phase("disk_read"):
                    self._fill(slot, rows, first, length)
                self.filled.put(slot)
        except BaseException as error:  # any error, or the main thread would wait forever
            self.filled.put(error)

    def _set_reading(self, place):
        self.reading = place

    def _wait_until_published(self, end):
        """Wait until all tokens before number `end` are published, or the pipeline is closed."""
        self._set_reading(f"{self.shards.folder} at token {end - 1}")
        while not (self.shards.has(end) or self.closed.is_set()):
            time.sleep(POLL_SECONDS)
        self._set_reading("")

    def _fill(self, slot, rows, first, length):
        """Read the tokens of some rows into a slot, and summarize them."""
        tokens = slot.host.numpy()[:length]
        self.shards.read(first, tokens, self._set_reading)
        self._set_reading("")
        # A DocumentPlan (recipe document_ttt) is not checked: a model gets its batches in windows.
        if self.shards.segments and isinstance(self.plan, BatchPlan):
            self.shards.segments.check(self.plan, rows, tokens)
        slot.rows = rows
        slot.summary = self.summarize(self.plan, rows, tokens)
        if not self.cuda:
            self.plan.fill_xy(rows, tokens, slot.x.numpy(), slot.y.numpy())
        self.bytes_read += 2 * length


# === REDUCTION: a step's one all-reduce of gradients, and the numbers that travel with it ===
# A collective makes all ranks wait for the slowest rank. So a step has one collective here, and one
# in Muon.
class Pace:
    """Estimates the training time of each step, with the same result on all ranks.

    Learning rates and the time limit depend on the training time. All ranks must use the same time,
    or their replicas would differ. And the host must not wait for its device to find out when a
    step has ended. So all ranks extrapolate from measurements of rank 0 that they read some steps
    late. An example on CUDA, with 43 ms per step:

    - Step 100 is queued. Rank 0's host sees that its device has finished step 98, at 4231 ms.
    - Step 101 is queued. Rank 0 sends (98, 4231) along with the gradients of this step.
    - Step 103 is queued. All ranks have now read what was sent in step 101 (`note`). Since the end
      of step 1, at 60 ms, a step has taken (4231 - 60) / (98 - 1) = 43 ms, so all ranks expect step
      104 to end at ms_at(104) = 4231 + 6 * 43 = 4489 ms.
    """

    def __init__(self, step, ms):
        self._known = step, ms  # the latest step whose time all ranks know, and that time
        # Where measuring begins: the time per step is the mean since this step and its time.
        # log_step sets it after step 1, which may be slow. Before that, and in a resumed run, it is
        # step 0 at 0 ms.
        self._start = 0, 0.0

    def note(self, step, ms):
        """Take a measurement of rank 0 that all ranks have just read. An old one has no effect."""
        self._known = max(self._known, (step, ms))

    def set_exact(self, step, ms):
        """Take the time of a step that all ranks have agreed on, in place of any estimate."""
        self._known = step, ms

    def start_at(self, step, ms):
        """Compute the time per step from here on."""
        self._start = step, ms

    def ms_at(self, step):
        """Return the training time in ms of `step` steps: the known time, plus the mean time per
        step for each step since then."""
        steps, ms = self._known
        first_steps, first_ms = self._start
        step_ms = (ms - first_ms) / (steps - first_steps) if steps > first_steps else 0.0
        return ms + step_ms * (step - steps)


class GradientReducer:
    """Sums the gradients of all ranks, and five numbers with them, in one all-reduce per step.

    All gradients are views of one vector. The five `numbers` follow them in the same vector:

    steps, ms  rank 0's measurement for Pace: a step that its device has finished, and when
    signals    the number of ranks that have received a signal
    loss       the mean loss: each rank adds its share
    fault      set after the sum: 1 if the loss or a gradient is not finite

    The host reads the numbers some steps later, when they have certainly arrived. So nothing waits
    for the device, and all ranks decide alike, because they read the same numbers at the same step.
    After a signal, all ranks end after the same step, up to three steps later.
    """

    def __init__(self, model, runtime, clock):
        # An empty tensor (skip_weights of a model with one layer) has no gradient.
        self.params = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self.runtime = runtime
        self.clock = clock
        size = sum(p.numel() for p in self.params)
        self.vector = torch.zeros(size + 5, device=runtime.device)
        self.gradients, self.numbers = self.vector.split([size, 5])
        for p, part in views_like(self.gradients, self.params).items():
            p.grad = part
        # At most read_delay_steps + 1 steps are queued and not read yet, and each needs its own
        # row. One more row is a reserve.
        shape = (runtime.read_delay_steps + 2, 5)
        self.sent = torch.zeros(shape, pin_memory=runtime.cuda)
        self.received = torch.zeros(shape, pin_memory=runtime.cuda)
        # For each step that was not read: (step, its row of `received`, CUDA event that is reached
        # when the row has arrived, this rank's loss).
        self.unread = deque()

    def reset(self, step, elapsed_ms):
        """Continue at `step` with an empty history."""
        self.unread.clear()
        self.losses = []  # mean losses that were read since the last log line
        self.signals = 0.0
        self.measured = step, elapsed_ms  # a step that this rank's device has finished, and when
        self.pace = Pace(step, elapsed_ms)

    def backward(self, loss):
        """Add the gradients of a loss to all p.grad at once, in fewer kernels than loss.backward(),
        which adds them one by one."""
        gradients = torch.autograd.grad(loss, self.params, materialize_grads=True)
        torch._foreach_add_([p.grad for p in self.params], gradients)

    def all_reduce(self, step, loss):
        """Sum gradients and numbers over the ranks, and send the numbers to the host.

        On CUDA the host waits for nothing here; `read` is the synchronization point.
        """
        steps, ms = self.measured if self.runtime.rank == 0 else (0, 0.0)
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
        """Read the numbers of all steps before step number `before`.

        It is the only synchronization point of a step, and it waits only if the host is that far
        ahead of the device. Raises RunError if the loss or gradient of a step is not finite.
        """
        while self.unread and self.unread[0][0] < before:
            step, received, event, own_loss = self.unread.popleft()
            if event:
                with self.runtime.watchdog.waiting(f"its device to finish step {step + 1}"):
                    event.synchronize()
            steps, ms, self.signals, loss, fault = received.tolist()
            self.losses.append(loss)
            if fault:
                self._raise_not_finite(step, own_loss)
            # now_ms() is the host's time at this moment. The step that belongs to it is the last
            # one that the device has finished by now. That may be a later step than this one, so
            # count the events of later steps that have been reached.
            later_events = [later_event for _, _, later_event, _ in self.unread if later_event]
            finished_later = sum(later_event.query() for later_event in later_events)
            self.measured = step + 1 + finished_later, self.clock.now_ms()
            self.pace.note(steps, ms)

    def _raise_not_finite(self, step, own_loss):
        """Raise the RunError that says where the loss or gradient of a step is not finite.

        Collective: all ranks read the fault at the same step, so they can gather their losses.
        """
        losses = self.runtime.gather(float(own_loss))
        ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        what = f"the loss of rank {ranks[0]}" if ranks else "the gradient"
        raise RunError(
            f"step {step + 1}: {what} is not finite; lower the learning rates, or, if an edit "
            "makes batches without targets, leave at least one target in each micro-batch"
        )

    def elapsed_ms(self, step):
        """Return the training time of `step` steps in ms, the same on all ranks; see Pace."""
        return self.pace.ms_at(step)


def views_like(vector, params):
    """Return {p: its part of `vector`, as a view in p's shape} for consecutive parts."""
    parts = vector.split([p.numel() for p in params])
    return {p: part.view_as(p) for p, part in zip(params, parts, strict=True)}


# === CHECKPOINTS: all that a run needs to continue, and the fingerprint of its inputs ===
class Data(NamedTuple):
    """What a run reads, opened once."""

    train: Shards
    val: Shards
    byte_table: ByteTable
    tokenizer: str  # sha256 of its file


def fingerprint(config, data, parts=None):
    """Return {name: text} of what decides the result of a run: script, tokenizer, torch version,
    shards, settings, and the types of Trainer.parts. It must be the same on all ranks. `resume`
    compares it with the checkpoint's, where some entries may differ."""
    settings = {name.upper(): str(value) for name, value in asdict(config).items()}
    for name in ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "RESUME"):
        del settings[name]
    files = {"script": hashlib.sha256(SOURCE).hexdigest(), "tokenizer": data.tokenizer}
    files["torch"] = str(torch.__version__)  # str, because it is a subclass that JSON may refuse
    if data.train.pending:
        files["growing"] = "more shards will come"
    kinds = {f"Trainer.parts {name}": type(part).__name__ for name, part in (parts or {}).items()}
    return files | data.val.identities() | data.train.identities() | settings | kinds


def differences(own, other, own_may_lack=False, other_may_lack=False):
    """Return {name: (own value, other value)} where two fingerprints (or similar dicts) differ.

    own_may_lack, other_may_lack: True if the data set of that side is growing, so that it may lack
    training shards that the other side has.
    """
    found = {}
    for name in sorted((own.keys() | other.keys()) - {"growing"}):
        values = own.get(name, "missing"), other.get(name, "missing")
        is_missing = (own_may_lack and name not in own) or (other_may_lack and name not in other)
        will_come = is_missing and name.startswith("fineweb_train_")
        if values[0] != values[1] and not will_come:
            found[name] = values
    return found


def describe_differences(found, own, other):
    """Return a text of up to five differences. own, other: the places, such as "on rank 1"."""
    texts = [f"{name}: {mine} {own}, {theirs} {other}" for name, (mine, theirs) in found.items()]
    return "; ".join(texts[:5])


def check_ranks_agree(by_rank, may_lack_shards=frozenset()):
    """Raise RunError if the fingerprint of a rank differs from rank 0's.

    by_rank: a dict per rank. may_lack_shards: the ranks that may still lack training shards.
    """
    for rank, own in enumerate(by_rank):
        found = differences(own, by_rank[0], rank in may_lack_shards, 0 in may_lack_shards)
        if found:
            raise RunError(
                f"rank {rank} differs from rank 0: "
                f"{describe_differences(found, f'on rank {rank}', 'on rank 0')}; give all machines "
                "rank 0's files and settings"
            )


def iter_leaves(value, place=""):
    """Yield (place, leaf) for all leaves of nested dicts, lists, tuples and modules.

    place: the keys that lead to the leaf, such as "model.blocks.0.attn_scale".
    """
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in items:
            yield from iter_leaves(part, f"{place}.{name}".lstrip("."))
    else:
        yield place, value


def check_parts(run, parts):
    """Raise RunError if the Trainer has state that no checkpoint would hold.

    parts: the state dicts of Trainer.parts. It finds, in the Trainer's attributes and in dicts,
    lists and modules there:
    - a tensor that shares memory with no saved tensor, such as `self.average = weights.clone()`. A
      view of a saved tensor is saved with it, so memory is compared and not the objects;
    - an object with a state_dict that is not one of the parts, such as a further optimizer.
    It does not find a tensor inside another kind of object, such as an attribute of your own class
    without a state_dict. The reducer's vector is not state: each step fills it anew.
    """
    saved = [t for _, t in iter_leaves(parts) if torch.is_tensor(t)]
    memory = {t.untyped_storage().data_ptr() for t in [run.reducer.vector, *saved]}
    for place, value in iter_leaves(vars(run)):
        if torch.is_tensor(value):
            is_saved = value.untyped_storage().data_ptr() in memory
        elif hasattr(value, "state_dict") and not isinstance(value, type):
            # (A class that is kept as an attribute has the method, too, but no state.)
            is_saved = any(value is part for part in run.parts.values())
        else:
            is_saved = True
        if not is_saved:
            raise RunError(
                f"Trainer.{place} would not be saved in checkpoints; create it in "
                "Trainer.__init__ and add it to Trainer.parts or to Trainer.state_dict; if no step "
                "needs the value of an earlier step, make it a local variable"
            )


def snapshot(run):
    """Return all that a run needs to continue, as a dict. Collective; a synchronization point.

    Raises RunError if a tensor is not the same on all ranks, or a loss was not finite.
    """
    runtime = run.runtime
    runtime.synchronize()
    run.reducer.read(run.step)
    parts = {name: part.state_dict() for name, part in run.parts.items()}
    sums = {
        place: zlib.crc32(t.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for place, t in iter_leaves(parts)
        if torch.is_tensor(t)
    }
    by_rank = runtime.gather(sums)
    for rank, sums_of_rank in enumerate(by_rank):
        found = differences(sums_of_rank, by_rank[0])
        if found:
            raise RunError(
                f"{next(iter(found))} has other values on rank {rank} than on rank 0; make it the "
                "same on all ranks, because a checkpoint holds rank 0's values for all"
            )
    # Do not rename these keys: existing checkpoints have them. "first_groups" is initial_groups,
    # and "made_of" is the fingerprint.
    return {
        "parts": parts,
        "first_groups": run.initial_groups,
        "made_of": fingerprint(run.config, run.data, run.parts),
        "step": run.step,
        "train_ms": run.clock.now_ms(),
        "data_crc": sum(runtime.gather(run.crc)) & 0xFFFFFFFF,
    }


def checkpoint_bytes(state):
    """Return the bytes of a checkpoint file. RunError if RESUME could not load it."""
    data, error = save_and_load(state)
    if not error:
        return data
    for name, part in state["parts"].items():  # find the part that is the reason
        _, part_error = save_and_load(part)
        if part_error:
            # Torch's text says in its last part which type it does not load.
            reason = first_line(str(part_error).rpartition("WeightsUnpickler error: ")[2])
            raise RunError(
                f'Trainer.parts["{name}"] contains what a checkpoint cannot hold: {reason}; let '
                "its state_dict return tensors, numbers, texts, lists and dicts only"
            ) from part_error
    raise error


def save_and_load(value):
    """Return (the bytes that torch.save writes, the error of loading them to the CPU or None).

    Raises MemoryError or torch.OutOfMemoryError.
    """
    try:
        data = torch_bytes(value)
        torch.load(io.BytesIO(data), "cpu", weights_only=True)
    except Exception as error:  # whatever pickle or torch.load raises
        if is_out_of_memory(error):
            raise
        return b"", error
    return data, None


def restore(run, state):
    """Let the run continue from a snapshot."""
    for name, part in run.parts.items():
        part.load_state_dict(state["parts"][name])
    run.clock.total_ms = state["train_ms"]
    run.set_position(state["step"], state["data_crc"])


def save_checkpoint(run):
    """Write checkpoints/<RUN_ID>/step_<8 digits>.pt on rank 0, and keep the newest CHECKPOINT_KEEP.

    A full disk or memory costs a checkpoint, not the run. All ranks wait until the file is written.
    Collective. The time does not count as training time.
    """
    run.clock.stop()
    state = snapshot(run)
    with run.runtime.long_wait():
        if run.runtime.rank == 0:
            write_snapshot(run, state)
        run.runtime.broadcast(None)  # synchronization point: rank 0 has written the file
    run.clock.start()


def write_snapshot(run, state):
    """Write a snapshot on rank 0. If that fails for want of space or memory, log a warning."""
    path = Path("checkpoints", run.config.run_id, f"step_{run.step:08d}.pt")
    try:
        with warn_if_slow(run.log.line, f"for {path} to be written"):
            write_checkpoint(path, checkpoint_bytes(state), run.config.checkpoint_keep)
    except Exception as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        run.log.warn(f"{path} could not be saved: {first_line(error)}")
    else:
        run.log.event("checkpoint", step=run.step, path=str(path))


def write_checkpoint(path, data, keep):
    """Write a checkpoint file and remove all but the newest `keep`. Raises OSError.

    If the disk is full, it keeps only the newest of the existing checkpoints and tries again,
    because the state of now matters more than old ones.
    """
    run_id = path.parent.name
    try:
        write_atomic(path, data, "step.tmp")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remove_files(checkpoint_files(run_id)[1:])  # all but the newest
        write_atomic(path, data, "step.tmp")
    remove_files(checkpoint_files(run_id)[keep:])


def remove_files(paths):
    """Remove files. One that cannot be removed, or has been removed already, is left as it is."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def checkpoint_files(run_id):
    """Return the checkpoint files of a run, the newest first. Files with other names (your copies)
    are not among them."""
    return sorted(Path("checkpoints", run_id).glob(f"step_{8 * '[0-9]'}.pt"), reverse=True)


def describe_checkpoints(run):
    """Return a text that says from where rank 0's run can be resumed, and how."""
    kept = checkpoint_files(run.config.run_id)
    if not kept:
        return "no checkpoint was saved"
    command = f"to resume: RUN_ID={run.config.run_id} RESUME=auto <command>"
    newest = checkpoint_step(kept[0])
    return (
        command if newest == run.step else f"the newest checkpoint is of step {newest}; {command}"
    )


def checkpoint_step(path):
    """Return the step in the name of a checkpoint file."""
    return int(path.stem.removeprefix("step_"))


def find_checkpoint(config, runtime):
    """Return (state, its path and host) of the checkpoint that RESUME asks for, or (None, "") if
    there is none to continue from. Collective.

    Machines may have different files. RESUME=auto takes the newest checkpoint of all machines; a
    path is taken from the first rank that has the file. The rank sends it to all ranks.
    """
    if not config.resume:
        return None, ""
    kept = checkpoint_files(config.run_id)
    newest_here = checkpoint_step(kept[0]) if kept else -1
    newest = max(runtime.gather(newest_here))
    if config.resume == "auto":
        if newest < 0:
            return None, ""
        path = kept[0] if kept else Path()  # a rank without checkpoints does not use its path
        is_here = newest_here == newest
    else:
        path = Path(config.resume)
        is_here = path.exists()
    is_on_rank = runtime.gather(is_here)
    # If no rank has the file, rank 0 tries to read it, and send_file raises the error.
    sender = is_on_rank.index(True) if True in is_on_rank else 0
    data, where = send_file(path, sender, runtime)
    state = read_checkpoint(data, where, runtime.device)
    if newest > state["step"]:
        raise RunError(
            f"RESUME={where} is of step {state['step']}, but RUN_ID={config.run_id} already has a "
            f"checkpoint of step {newest}; set another RUN_ID"
        )
    return state, where


def send_file(path, sender, runtime):
    """Return (bytes, path and host) of rank `sender`'s file on all ranks. Collective.

    Raises RunError if the file is empty or cannot be read.
    """
    data = b""
    if runtime.rank == sender:
        with suppress(OSError, RunError):
            data = read_file(path, sys.maxsize)
    where, size = runtime.broadcast((f"{path} of {os.uname().nodename}", len(data)), sender)
    if not size:
        raise RunError(f"RESUME={where} is empty or cannot be read; set the path of a checkpoint")
    # The file is sent as a sum to which all other ranks add zeros. A broadcast of Python objects
    # would hold the file in memory three times.
    content = bytearray(data) if data else bytearray(size)
    received = torch.frombuffer(content, dtype=torch.uint8).to(runtime.device)
    runtime.all_reduce(received)
    return data or received.cpu().numpy().tobytes(), where


def read_checkpoint(data, where, device):
    """Return the snapshot in the bytes of a checkpoint file.

    Tensors of rank 0's GPU are loaded to this rank's. where: the file, for the text of RunError,
    which is raised for damaged and foreign files.
    """
    try:
        if zipfile.ZipFile(io.BytesIO(data)).testzip():  # torch.load ignores checksums
            raise ValueError("its checksum is wrong")
        state = torch.load(io.BytesIO(data), {"cuda:0": str(device)}, weights_only=True)
    except Exception as error:  # whatever a damaged file raises
        # Only the first sentence of torch's message: a later one may suggest to load the file in a
        # way that executes what it contains.
        reason = first_line(error).partition(". ")[0]
        raise RunError(
            f"RESUME={where} does not load: {reason}; set RESUME to an older step_<n>.pt, and "
            "set a new RUN_ID, because a RUN_ID continues from its newest checkpoint only"
        ) from error
    names = {"parts", "first_groups", "made_of", "step", "train_ms", "data_crc"}
    if not isinstance(state, dict) or state.keys() != names:
        raise RunError(
            f"RESUME={where} is not a checkpoint of this version of the script; resume with the "
            "script that made the checkpoint; the log of that run begins with a copy of the script"
        )
    return state


def resume(run, state, where):
    """Restore a checkpoint, and return a warning for each thing in which this run differs.

    Data, shapes, seed and all other settings marked Fixed must be the checkpoint's; RunError if
    not. where: the checkpoint's path and host.
    """
    own, saved = fingerprint(run.config, run.data, run.parts), state["made_of"]
    found = differences(own, saved, "growing" in own, "growing" in saved)
    may_differ = {"script", "torch"} | (SETTINGS.keys() - FIXED)
    forbidden = {name: values for name, values in found.items() if name not in may_differ}
    places = "in this run", "in the checkpoint"
    reasons = []
    if forbidden:
        reasons.append(describe_differences(forbidden, *places))
    if "growing" in own and "growing" not in saved:
        # This run could get shards that the checkpoint's run did not have.
        reasons.append("the checkpoint's data set was complete, but this one is still being made")
    own_groups, saved_groups = run.initial_groups, state["first_groups"]
    if [group["params"] for group in own_groups] != [group["params"] for group in saved_groups]:
        reasons.append("the optimizers train other parameters than before, or in another order")
    if reasons:
        raise RunError(
            f"RESUME={where} does not match this run: {'; '.join(reasons)}; use the data and the "
            "settings of the checkpoint again, or leave out RESUME and set another RUN_ID"
        )
    try:
        restore(run, state)
    except Exception as error:  # whatever a load_state_dict raises
        reason = " ".join(str(error).split())
        raise RunError(
            f"RESUME={where} does not fit this script's Trainer.parts: {reason}; resume with the "
            "script that made the checkpoint; the log of that run begins with a copy of the script"
        ) from error
    for group, initial, saved_initial in zip(run.groups, own_groups, saved_groups, strict=True):
        apply_settings(group, initial, saved_initial)
    # A finished run goes on if its length was changed.
    length = "ITERATIONS", "MAX_WALLCLOCK_SECONDS"
    same_length = all(own[name] == saved[name] for name in length)
    run.finished_training = run.finished_training and same_length
    return [
        f"RESUME continues with another {describe_differences({name: values}, *places)}"
        for name, values in found.items()
    ]


def apply_settings(group, initial, saved_initial):
    """Apply this run's settings to a parameter group that was loaded from a checkpoint.

    A value that training did not change, such as betas, comes from this run's settings. A value
    that training did change, such as a momentum on its ramp, stays the checkpoint's.
    initial, saved_initial: the group when it was made, in this run and in the checkpoint's.
    """
    for name, value in initial.items():
        unchanged_by_training = group.get(name) == saved_initial.get(name)
        if name != "params" and unchanged_by_training:
            group[name] = value


def check_validation(run):
    """Raise RunError on all ranks if DOC_ENDS is too small for a batch of the validation set.

    The text says what DOC_ENDS is needed for all batches of all ranks. It reads the validation set
    once, which takes a second or two. Collective.
    """
    validation = run.validation
    shards = copy.copy(validation.shards)
    shards.segments = None  # otherwise the reader thread would end at the first of such batches
    needed_doc_ends = validation.shards.segments.needed_doc_ends
    batches = Pipeline(
        shards,
        validation.plan,
        validation.overlap,
        run.runtime.device,
        summarize=needed_doc_ends,
    )
    with closing(batches):
        most = max((batch.summary for batch in batches), default=0)
    most = max(run.runtime.gather(most))
    if most > run.config.doc_ends:
        raise RunError(
            f"DOC_ENDS={run.config.doc_ends} is too small: batches of the validation set need "
            f"{most}; set DOC_ENDS={most} or more"
        )


@torch.no_grad()
def score_first_batch(run):
    """Score batches until some bytes of text are counted, usually one batch. Collective.

    So a validation set that cannot be scored is refused before training. This also compiles the
    score, and allocates its memory.
    """
    if run.config.doc_token:
        check_validation(run)
    sums = torch.zeros(3, dtype=torch.float64, device=run.runtime.device)  # nats, bytes, targets
    run.model.eval()
    with closing(run.validation.batches()) as batches:
        for batch in batches:
            run.validation.score(run.model, batch, sums)
            if sums[1] > 0:  # synchronization point
                break
    run.model.train()
    if not any(run.runtime.gather(sums[1].item() > 0)):
        raise RunError(
            f"{run.validation.shards.folder}: no target of the validation set stands for a byte of "
            "text, so bits per byte cannot be computed; check the shards and the tokenizer"
        )
    # Read one batch of run.scorer, too, to find errors of reading. It is not scored, because a
    # scorer with test-time training would train the model.
    with closing(run.scorer.batches()) as batches:
        next(batches, None)


@torch.no_grad()
def warm_up(run):
    """Run WARMUP_STEPS steps to compile and allocate, then restore everything they changed.

    They are not a learning-rate warm-up, and their time does not count. Before and after them, it
    is tested that a checkpoint can be made and holds all state. Collective.
    """
    config = run.config
    steps = config.warmup_steps
    # This call is collective, so it is made even if this rank's set is complete.
    sync_new_shards(run)
    if run.shards.growing:
        # Do not wait for tokens that the run itself will not use.
        steps = min(steps, config.iterations - run.step)
    score_first_batch(run)
    state = snapshot(run)
    check_parts(run, state["parts"])
    checkpoint_bytes(state)  # raises RunError now rather than after the last step
    before = copy.deepcopy(state)
    try:
        with closing(run.batches()) as batches:
            for done in range(1, steps + 1):
                wait_for_tokens(run, batches)
                # The second step loops, so that both graphs are compiled before the run. A run that
                # is resumed while it loops needs only the one with loops.
                run.looping = run.looping or (config.loop_count > 0 and done % 2 == 0)
                run.train_step(batches)
                run.reducer.read(run.step)
                if run.reducer.signals:
                    raise HaltError
                run.log.line(f"warmup_step:{done}/{steps}")
        after = snapshot(run)  # the same tests for the state that steps have created
        check_parts(run, after["parts"])
        checkpoint_bytes(after)
    finally:  # also after a signal, because a checkpoint follows
        restore(run, before)


# === INSTRUMENTS: log lines, the clock, TRACE_STEPS and TRAINING_TIMING_BREAKDOWN ===
# How a value looks in a log line. The key, which contains the unit, is its name in the .jsonl file.
FORMATS = {
    "train_loss": "train_loss:{:.4f}",
    "train_time_ms": "train_time:{:.0f}ms",
    "step_avg_ms": "step_avg:{:.2f}ms",
    "tok_s": "tok_s:{:.0f}",
    "input_wait_percent": "input_wait:{:.2f}%",
    "eta_s": "eta:{:.0f}s",
    "mean_loss": "mean_loss:{:.4f}",
    "eval_time_ms": "eval_time:{:.0f}ms",
}


def format_fields(values):
    """Return the words of a log line: {"step_avg_ms": 41.3} gives "step_avg:41.30ms"."""
    return " ".join(FORMATS.get(name, name + ":{}").format(value) for name, value in values.items())


def log_start(run, given):
    """Write the beginning of a log: the script, versions, settings, and what tools need to know."""
    config, log, runtime = run.config, run.log, run.runtime
    rule = "=" * 100
    smi = ""
    with suppress(OSError, subprocess.SubprocessError):
        smi = subprocess.run(["nvidia-smi"], capture_output=True, timeout=30).stdout
        smi = smi.decode(errors="backslashreplace")
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
    source = SOURCE.decode(errors="backslashreplace")
    log.write(".txt", f"{source}\n{rule}\n{versions}\n{smi}\n{rule}")
    facts = {
        "model_params": sum(p.numel() for p in run.model.parameters()),
        "dataset": Path(config.data_path).absolute().name,
        "train_shards": len(run.shards.shards),
        "val_tokens": run.validation.targets,
        "world_size": runtime.world_size,
        "micro_steps": runtime.micro_steps,
        **run.validation.partial,
    }
    log_header(run, given, facts)
    if not recorded_tokenizer(config)[0]:
        log.warn(
            "DATA_PATH has no tokenizer.sha256, so a wrong tokenizer of the same size would go "
            "unnoticed and val_bpb would be wrong; data/audit.py can prove that it is right"
        )
    train_identities = {*run.shards.identities().values()}
    for name, identity in run.validation.shards.identities().items():
        if identity in train_identities:
            log.warn(
                f"{name} is also a training shard ({identity}), so the score would be too good; "
                "make the data set again"
            )
    if config.doc_token:
        log_documents(run)
    log.event("run", run_id=log.path.stem, argv=sys.argv, settings=given, **facts)
    log.event("config", **asdict(config))
    log.event("made_of", **fingerprint(config, run.data, run.parts))
    device = torch.cuda.get_device_name() if runtime.cuda else os.uname().machine
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    log.event("hardware", device=device, cpus=os.cpu_count(), cuda=torch.version.cuda, **versions)


def log_documents(run):
    """Log which kernel computes attention inside documents. Warn if shards have no DOC_TOKEN."""
    config = run.config
    log = run.log
    kernel = "SDPA, one document after the other"
    if run.runtime.cuda:
        has_fa3 = "fa3" in run.attention_backends
        kernel = "FlashAttention-3" if has_fa3 else "FlashAttention-2; 3 is faster on an H100"
    log.line(f"documents: attention by {kernel}")
    for shards in run.shards, run.validation.shards:
        tokens = np.empty(min(config.train_batch_tokens, shards.ends[-1]), np.uint16)
        if not len(tokens):  # a growing set may have no shard yet
            continue
        shards.read(0, tokens)
        if config.doc_token not in tokens:
            log.warn(
                f"DOC_TOKEN={config.doc_token} is not among the first {len(tokens)} tokens of "
                f"fineweb_{shards.split}_*.bin; set the token that begins documents"
            )


def log_header(run, given, facts):
    """Write the lines that parsers of the challenge's logs read."""
    config = run.config

    def show(names):
        return " ".join(f"{name}:{getattr(config, name)}" for name in names.split())

    val = run.validation.overlap
    attention = chosen_attention(run, run.attention_backends)  # RunError if none is possible
    if config.doc_token and run.runtime.cuda:
        attention = "varlen_attn"
    kind = "byte" if config.tokenizer_path.endswith(".json") else "sentencepiece"
    embed_lr = config.tied_embed_lr if config.tie_embeddings else config.embed_lr
    head_lr = 0.0 if config.tie_embeddings else config.head_lr
    run.log.line(
        f"{run.log.path}\nsettings: {' '.join(f'{name}={text}' for name, text in given.items())}\n"
        f"val_bpb:enabled tokenizer_kind={kind} tokenizer_path={config.tokenizer_path}\n"
        f"train_loader:dataset:{facts['dataset']} train_shards:{facts['train_shards']}\n"
        f"val_loader:shards pattern={config.data_path}/fineweb_val_*.bin "
        f"{format_fields({'tokens': run.validation.targets, **run.validation.partial})}\n"
        f"model_params:{facts['model_params']}\n"
        f"world_size:{facts['world_size']} grad_accum_steps:{facts['micro_steps']}\n"
        f"sdp_backends:{','.join(run.attention_backends)} "
        f"chosen:{attention}\n"
        f"attention_mode:gqa {show('num_heads num_kv_heads')}\n"
        f"{show('tie_embeddings')} embed_lr:{embed_lr} head_lr:{head_lr} "
        f"{show('matrix_lr scalar_lr')}\n"
        f"{show('train_batch_tokens train_seq_len iterations warmup_steps')} "
        f"max_wallclock_seconds:{config.max_wallclock_seconds:.3f}\n{show('seed')}\n"
        f"train_io:{run.overlap.describe()}\n"
        f"val_io:overlap:{val.queue > 0 or val.copy_stream} {val.describe()} "
        f"bytecount_device:{config.val_bytecount_device}"
    )


def log_step(run, batches):
    """Write the line of a step, with rates since the last line.

    Collective; a synchronization point, because its time must be that of finished work.
    """
    config = run.config
    step = run.step
    run.runtime.synchronize()
    run.reducer.read(step)
    by_rank = run.runtime.gather((run.clock.now_ms(), batches.total_wait_ms, run.crc))
    times, waits, crcs = zip(*by_rank, strict=True)
    ms, wait_ms = times[0], max(waits)
    run.reducer.pace.set_exact(step, ms)
    if step == 1:
        run.reducer.pace.start_at(step, ms)
    last_step, last_ms, last_wait_ms = run.last_logged
    run.last_logged = step, ms, wait_ms
    tok_s = 1e3 * (step - last_step) * config.train_batch_tokens / (ms - last_ms)
    share = progress(config, step, ms)
    losses = run.reducer.losses  # those of the steps since the last line
    values = {
        "train_loss": losses[-1],
        "train_time_ms": ms,
        "step_avg_ms": ms / step,
        "tok_s": tok_s,
        "input_wait_percent": 100 * (wait_ms - last_wait_ms) / (ms - last_ms),
        "data_crc": f"{sum(crcs) & 0xFFFFFFFF:08x}",
        "eta_s": 1e-3 * ms * (1.0 - share) / share,
        "mean_loss": sum(losses) / len(losses),
    }
    losses.clear()
    run.log.line(f"step:{step}/{config.iterations} {format_fields(values)}")
    run.log.event("step", step=step, **values)


def log_validation(run, loss, bpb, val_ms):
    """Write the lines of a validation. loss: nats per token; bpb: bits per byte"""
    step = run.step
    ms = run.clock.total_ms
    values = {"train_time_ms": ms, "step_avg_ms": ms / max(step, 1), **run.validation.partial}
    at = f"step:{step}/{run.config.iterations}"
    run.log.line(
        f"{at} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {format_fields(values)}\n"
        f"val_stage_time_ms:{val_ms:.0f}ms {at}"
    )
    values |= {"val_loss": loss, "val_bpb": bpb, "val_stage_time_ms": val_ms}
    run.log.event("validation", step=step, **values)


def log_score(run, loss, bpb, ms):
    """Write the lines of the final score. loss: nats per token; bpb: bits per byte"""
    partial = run.validation.partial
    values = {"eval_time_ms": ms, **partial}
    exact = f"{FINAL_LABEL}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}"
    exact = f"{exact} {format_fields(partial)}".rstrip()
    run.log.line(
        f"{FINAL_LABEL} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {format_fields(values)}\n{exact}"
    )
    if unknown := run.scorer.unknown:
        run.log.warn(
            f"{unknown} targets of the validation set are unknown to the tokenizer; the bytes of "
            "their text are not counted"
        )
        values["unknown_targets"] = unknown
    run.log.event("score", step=run.step, val_loss=loss, val_bpb=bpb, **values)


def log_end(run, batches, begun_ms):
    """Write what training and its input have cost.

    begun_ms: the training time at the start or at RESUME; input is measured from there on.
    """
    ms = run.clock.total_ms
    wait_ms = max(run.runtime.gather(batches.total_wait_ms))
    percent = 100 * wait_ms / max(ms - begun_ms, 1e-9)
    if run.step < run.config.iterations:
        ended = f"train_time:{ms:.0f}ms step:{run.step}/{run.config.iterations}"
        run.log.line(f"stopping_early: wallclock_cap {ended}")
    tokens = run.step * tokens_per_step(run.config)
    epochs = tokens / max(1, run.shards.ends[-1])  # a growing set may have no shard yet
    run.log.line(
        f"timing_train_loop_ms:{ms:.0f}ms timing_val_total_ms:{run.val_ms:.0f}ms\n"
        f"input_wait total:{wait_ms:.3f}ms share:{percent:.3f}% read_bytes:{batches.bytes_read} "
        f"epochs:{epochs:.3f}\n"
        f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
        f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB"
    )
    input_values = {
        "total_ms": wait_ms,
        "share_percent": percent,
        "read_bytes": batches.bytes_read,
    }
    run_values = {"epochs": epochs, "timing_train_loop_ms": ms, "timing_val_total_ms": run.val_ms}
    run.log.event("input", **input_values, **run_values)


@dataclass
class Clock:
    """Counts training time in ms. start and stop are synchronization points, so that the time is
    that of finished work."""

    runtime: Runtime
    total_ms: float = 0.0  # up to the last stop
    since: float = math.inf  # time.perf_counter() at the last start; inf: the clock is stopped

    def now_ms(self):
        """Return the training time so far."""
        return self.total_ms + 1e3 * max(0.0, time.perf_counter() - self.since)

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.runtime.synchronize()
        self.total_ms = self.now_ms()
        self.since = math.inf


@dataclass
class Phases:
    """`with phase("forward"):` names a phase for TRACE_STEPS, or times it for
    TRAINING_TIMING_BREAKDOWN; with neither, it does nothing."""

    config: Config
    runtime: Runtime
    log: RunLog
    clock: Any  # the Trainer's Clock
    profiler: Any = None  # a torch.profiler.profile while the traced steps run on rank 0
    traced_steps: int = 0
    ms: dict = field(default_factory=partial(defaultdict, float))  # {phase: time in this step}

    def __call__(self, name):
        if self.config.training_timing_breakdown:
            return self.timed(name)
        return record_function(name) if self.profiler else nullcontext()

    @contextmanager
    def timed(self, name):
        """Time a phase between two synchronization points. ms["sync"] adds up the waiting at
        these two points."""
        start = self.synchronized_ms()
        yield
        self.ms[name] += self.synchronized_ms() - start
        if name == "validate":
            # Keep only the time of the validation. All other times so far are of phases inside it,
            # because it comes before the training of its step. So forward_ms is that of training.
            self.ms = defaultdict(float, validate=self.ms[name])

    def synchronized_ms(self):
        """Return the time in ms after all work of the device. A synchronization point."""
        start = time.perf_counter()
        self.runtime.synchronize()
        end = time.perf_counter()
        self.ms["sync"] += 1e3 * (end - start)
        return 1e3 * end

    def begin_trace(self):
        """Begin to trace on rank 0 what runs on all threads and streams. Overlap stays on."""
        self.ms.clear()  # it contains the times of the warm-up
        steps = self.config.trace_steps
        if steps == 0 or self.runtime.rank > 0:
            return
        all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self.write_trace,
            experimental_config=all_threads,
        )
        self.profiler.start()
        self.profiler.step()  # ends the profiler's own warm-up

    def write_trace(self, profiler):
        """Write the trace. If that fails, the trace is lost, but the run goes on."""
        path = self.log.path.with_suffix(".trace.json.gz")
        self.profiler = None
        try:
            profiler.export_chrome_trace(str(path))
            self.log.line(f"trace: {path}")
        except OSError as error:
            self.log.warn(f"the trace {path} could not be written: {first_line(error)}")

    def end_step(self, step):
        """End a step of the trace, or write its timing_breakdown line."""
        if self.profiler:
            self.traced_steps += 1
            is_last = self.traced_steps == self.config.trace_steps
            if is_last:
                self.clock.stop()  # the export, which follows, is not training time
            self.profiler.step()
            if is_last:
                self.clock.start()
        ms = self.ms
        self.ms = defaultdict(float)
        count = self.runtime.micro_steps
        has_line = step <= 10 or step % self.config.training_timing_every == 0
        if not (self.config.training_timing_breakdown and has_line):
            return
        # Parsers know this form, which participants of the challenge proposed. batch, forward and
        # backward are per micro-step, the others per step.
        self.log.line(
            f"timing_breakdown step:{step} micro_steps:{count} "
            f"batch_cpu_ms:{ms['input_wait'] / count:.2f} batch_h2d_ms:{ms['h2d'] / count:.2f} "
            f"forward_ms:{ms['forward'] / count:.2f} backward_ms:{ms['backward'] / count:.2f} "
            f"grad_clip_ms:{ms['grad_clip']:.2f} optimizer_ms:{ms['optimizer']:.2f} "
            f"val_ms:{ms['validate']:.2f} explicit_sync_ms:{ms['sync']:.2f} "
            "(per_optimizer_step; forward/backward/batch averaged over micro_steps; "
            f"grad_accum_steps={count}) reduce_ms:{ms['reduce']:.2f}"
        )


# === MAIN: the checks before the start, then the run ===
def check_settings(config, env):
    """Return ([], Data), or (the faults, None).

    A fault is a line of text that says what is wrong with a setting, or with a file that a setting
    names, and what to do.
    """
    faults = []
    for check in (find_wrong_model_settings, find_wrong_run_settings, find_wrong_device_settings):
        for name, text in check(config, env):
            faults.append(f"{name}={getattr(config, name.lower())} {text}")
    opened = []
    # A plan is made here only to find its errors.
    make_plan = partial(BatchPlan.train, ranks=int(env.get("WORLD_SIZE", 1)))
    open_train = partial(Shards, split="train")
    open_val = partial(Shards, split="val")
    for make in make_plan, open_train, open_val, read_tokenizer:
        try:
            opened.append(make(config))
        except (RunError, OSError) as error:  # the text of an OSError contains the file's name
            faults.append(str(error))
    if faults:
        return list(dict.fromkeys(faults)), None
    _, train, val, (table, tokenizer) = opened
    return [], Data(train, val, table, tokenizer)


def find_wrong_launch(env):
    """Return a list with the fault of the way in which the processes were started, if there is one.

    Either a launcher's variables are incomplete, or srun or mpirun has started several processes
    that do not know of each other. Each of those would train alone on the same data.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    values = [env.get(name, "") for name in names]
    if values[0]:
        is_complete = all(value.isdecimal() for value in values)
        if not is_complete or int(values[0]) >= int(values[1]):
            texts = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            return [
                f"{texts}: all three must be whole numbers, and RANK must be less than WORLD_SIZE; "
                "start the script with torchrun, which sets them, or `unset RANK`"
            ]
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = env.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1 and not env.get("RANK"):
            return [
                f"{tasks} processes were started without torchrun ({name}={tasks}), and each would "
                "train alone; start one torchrun per machine instead (one task per machine, with "
                "--nproc_per_node=<its number of GPUs>)"
            ]
    return []


def find_wrong_model_settings(config, env):
    """Yield (setting, what is wrong and what to do) for settings of the model and its training."""
    heads = config.num_heads
    seq_len = config.train_seq_len
    if config.model_dim % (2 * heads):
        near = nearest_multiple(config.model_dim, 2 * heads)
        yield "MODEL_DIM", f"must be a multiple of {2 * heads} (2 x NUM_HEADS); try {near}"
    first_block = config.loop_start
    last_block = config.num_layers - 1
    if config.loop_count and not first_block <= config.loop_end <= last_block:
        yield "LOOP_END", f"must be {first_block} to {last_block} (LOOP_START to the last block)"
    if heads % config.num_kv_heads:
        near = math.gcd(heads, config.num_kv_heads)
        yield "NUM_KV_HEADS", f"must be a divisor of NUM_HEADS={heads}; try {near}"
    second_half = config.num_layers // 2  # number of its first block
    in_second_half = second_half <= config.lanes_start < config.num_layers
    if config.lanes_start != -1 and not in_second_half:
        yield "LANES_START", f"must be -1 or {second_half} to {config.num_layers - 1}"
    if 0 < config.val_tokens <= seq_len:
        yield "VAL_TOKENS", f"must be 0 (all tokens) or greater than TRAIN_SEQ_LEN={seq_len}"
    if config.polar_express and config.muon_backend_steps > len(POLAR_EXPRESS):
        yield "MUON_BACKEND_STEPS", f"must be at most {len(POLAR_EXPRESS)} with POLAR_EXPRESS=1"
    if config.doc_max > seq_len:
        yield "DOC_MAX", f"must be 0 to {seq_len} (TRAIN_SEQ_LEN)"


def find_wrong_run_settings(config, env):
    """Yield (setting, what is wrong and what to do) for the run's name and its checkpoints."""
    run_id = config.run_id
    is_valid = re.fullmatch(r"(\w[\w.-]*)?", run_id) and len(os.fsencode(run_id)) <= 100
    if not is_valid:
        yield (
            "RUN_ID",
            "must consist of letters, digits, '_', '.' and '-', must not begin with '.' or '-', "
            "and may have at most 100 bytes",
        )
    elif run_id and not config.resume:
        log = Path("logs", f"{run_id}.txt")
        if os.path.lexists(log) or checkpoint_files(run_id):
            yield (
                "RUN_ID",
                f"already has a log or checkpoints ({log}); set another RUN_ID, or set RESUME=auto "
                "to continue that run",
            )
    if config.resume == "auto" and not run_id:
        yield "RESUME", "needs a RUN_ID: the one of the run to continue"


def find_wrong_device_settings(config, env):
    """Yield (setting, what is wrong and what to do) for what this machine cannot do."""
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    no_gpu = f"is not possible: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
    if config.attention_backend == "cudnn" and not gpus:
        yield "ATTENTION_BACKEND", "needs a GPU; set ATTENTION_BACKEND=auto"
    if config.device == "cuda" and not gpus:
        yield "DEVICE", f"{no_gpu}; set DEVICE=cpu to run on the CPU"
    has_driver = Path("/dev/nvidiactl").exists()
    if config.device == "auto" and not gpus and has_driver and "CUDA_VISIBLE_DEVICES" not in env:
        # There is a GPU that torch cannot use. Eight GPUs must not stay idle in silence.
        yield (
            "DEVICE",
            f"{no_gpu}, but there is a driver; check that nvidia-smi works and that the driver "
            "fits this CUDA version, or set DEVICE=cpu to run on the CPU",
        )
    processes = int(env.get("LOCAL_WORLD_SIZE", 1))
    if 0 < gpus < processes:
        yield (
            "DEVICE",
            f"is not possible: this machine has {gpus} GPUs for {processes} processes; start at "
            "most as many processes per machine (--nproc_per_node) as it has GPUs",
        )
    if config.val_bytecount_device == "cuda" and not gpus:
        yield "VAL_BYTECOUNT_DEVICE", f"{no_gpu}; set VAL_BYTECOUNT_DEVICE=cpu"
    if config.doc_token and gpus and "window_size" not in PACKED_OPTIONS:
        yield (
            "DOC_TOKEN",
            f"needs an attention kernel that torch {torch.__version__} does not have; install "
            "torch 2.11 to 2.13",
        )
    if config.doc_token and gpus and config.attention_backend in ("cudnn", "math"):
        yield (
            "ATTENTION_BACKEND",
            "does not work with DOC_TOKEN; set ATTENTION_BACKEND=auto, flash or fa3",
        )


def raise_on_faults(by_rank, warnings):
    """Raise RunError if a rank has faults, or if the fingerprints of the ranks differ.

    by_rank: (faults, fingerprint) of each rank. The text also contains the warnings, because a
    warning of a misspelt name may be the reason for a fault.
    """
    rank_0_faults = by_rank[0][0]
    lines = list(rank_0_faults)
    for rank, (faults, _) in enumerate(by_rank):
        lines += [f"rank {rank}: {text}" for text in faults if text not in rank_0_faults]
    if lines:
        title = "not started, because of these settings:"
        # A value may contain line ends, which would hide where a fault begins.
        texts = [text.replace("\n", "\\n") for text in lines + warnings]
        raise RunError("\n  ".join([title, *texts]))
    fingerprints = [of_rank for _, of_rank in by_rank]
    growing = {rank for rank, of_rank in enumerate(fingerprints) if "growing" in of_rank}
    check_ranks_agree(fingerprints, growing)


def attention_backends(config, runtime):
    """Return {name: backend} of the kernels that SDPA may use, in the order in which it tries them.

    ATTENTION_BACKEND=auto takes PyTorch's own order for this device, with FlashAttention-3 first if
    it is installed. Raises RunError if ATTENTION_BACKEND=fa3 is not possible.
    """
    wanted = config.attention_backend
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
    }
    order = sdpa_order(runtime)
    names = sorted(backends, key=lambda name: order.index(backends[name]))
    if not runtime.cuda:
        names.remove("cudnn")
    if wanted in ("auto", "fa3"):
        try:
            nn.attention.activate_flash_attention_impl("FA3")
            # From now on, SDPBackend.FLASH_ATTENTION runs FA3.
            backends["fa3"] = backends.pop("flash")
            names = ["fa3", *(name for name in names if name != "flash")]
        except Exception as error:  # FA3 is not installed or does not support this GPU
            if wanted == "fa3":
                raise RunError(
                    f"ATTENTION_BACKEND=fa3 is not possible: {first_line(error)}; set "
                    "ATTENTION_BACKEND=auto"
                ) from error
    if wanted != "auto":
        names = [wanted]
    return {name: backends[name] for name in names}


def sdpa_order(runtime):
    """Return PyTorch's own list of SDPA backends, the first choice first.

    The first attention call of a process on a GPU sets PyTorch's order for that GPU, and overwrites
    any order that was set before. So the function lets PyTorch choose once. (Source: priority_order
    in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. It prefers cuDNN on an H100 with cuDNN
    9.15.1 or newer.)
    """
    if runtime.cuda:
        x = torch.empty(1, 1, 8, 8, dtype=runtime.dtype, device=runtime.device)
        torch._fused_sdp_choice(x, x, x)
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


def chosen_attention(run, backends):
    """Return the name of the kernel that SDPA chooses for the shapes of the model, in training.

    It must be called inside of `with sdpa_kernel(...)`, see `execute`. backends: the result of
    `attention_backends`. Raises RunError if none of them supports the shapes.
    """
    config = run.config
    plan = BatchPlan.train(config, run.runtime.rank, run.runtime.world_size)
    head_dim = config.model_dim // config.num_heads
    shape = plan.batch_rows, config.num_heads, config.train_seq_len, head_dim
    kv_shape = plan.batch_rows, config.num_kv_heads, config.train_seq_len, head_dim
    kind = {"dtype": run.runtime.dtype, "device": run.runtime.device, "requires_grad": True}
    q, k, v = (torch.empty(size, **kind) for size in (shape, kv_shape, kv_shape))
    grouped = config.num_heads != config.num_kv_heads
    try:
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
    except RuntimeError as error:
        raise RunError(
            f"ATTENTION_BACKEND={config.attention_backend} does not support {head_dim} channels "
            f"per head in {run.runtime.dtype}; set ATTENTION_BACKEND=auto"
        ) from error
    return next(name for name, backend in backends.items() if backend == SDPBackend(choice))


def restore_or_start(run, given, warnings):
    """Restore the checkpoint that RESUME asks for, if there is one, and open the log. Collective.

    given: {NAME: text} of the settings that were given; warnings: lines for the log
    """
    log = run.log
    state, where = find_checkpoint(run.config, run.runtime)
    for group in run.groups:
        group.setdefault("base_lr", group["lr"])  # set_rates multiplies it by the schedule
    # An optimizer's state dict knows parameters by their position only, so remember their names.
    names = {p: name for name, p in run.model.named_parameters()}
    run.initial_groups = [
        {**group, "params": [names.get(p) for p in group["params"]]} for group in run.groups
    ]
    if state:
        warnings += resume(run, state, where)
    elif run.config.resume:
        warnings.append(
            f"RESUME=auto found no checkpoint of RUN_ID={run.config.run_id}; the run begins at "
            "step 1"
        )
    has_log = log.path.exists()
    problem = log.open(is_new=not run.config.resume) if run.runtime.rank == 0 else ""
    problem = run.runtime.broadcast(problem)
    if problem:
        raise RunError(problem)
    log.is_open = True
    # A run that only packs and scores again keeps the header of its log, which has the settings of
    # the training.
    if not (run.finished_training and has_log):
        log_start(run, given)
    for warning in warnings:
        log.warn(warning)
    if run.finished_training:
        log.line(f"training is complete: packing and scoring {where}")
    elif state:
        log.line(f"resumed: step:{run.step} resumed_from:{where}")
        log.event("checkpoint", step=run.step, resumed_from=where)


def execute(config, env, store, log, data, given_and_warnings):
    """Train, pack and score. Return the exit code, the same on all ranks."""
    runtime = Runtime(config, env)
    runtime.start(store)
    # All ranks use rank 0's random RUN_ID, and its RESUME, which may be another path on another
    # machine.
    run_id, resume_from = runtime.broadcast((config.run_id or str(uuid.uuid4()), config.resume))
    config = replace(config, run_id=run_id, resume=resume_from)
    log.path = Path("logs", f"{run_id}.txt")
    code, status, problem = 0, "finished", ""
    backends = attention_backends(config, runtime)  # it must come before any use of SDPA
    # The compiler's cache must not mix code for different attention kernels.
    torch.compiler.config.cache_key_tag = ",".join(backends)
    with sdpa_kernel(list(backends.values()), set_priority=True):
        run = Trainer(config, runtime, log, data)
        runtime.watchdog.report = log.write_wait
        restore_or_start(run, *given_and_warnings)
        try:
            if not run.finished_training:
                run.train()
            run.export_and_score()
        except HaltError:
            # All ranks wait in save_checkpoint until rank 0 has written the file. If one ended
            # earlier, torchrun would end rank 0.
            save_checkpoint(run)
            problem = f"interrupted after step {run.step}; {describe_checkpoints(run)}"
            code, status = 128 + max(runtime.gather(runtime.signum)), "interrupted"
        except Exception as error:
            # A signal to all processes also ends the compilers that this process has started. So
            # an unknown error after a signal is taken for a consequence of the signal.
            if not runtime.signum or isinstance(error, RunError):
                raise
            raise InterruptedStepError(
                f"interrupted in step {run.step + 1}, before it was complete; "
                f"{describe_checkpoints(run)}",
                runtime.signum,
            ) from error
    log.write_end(status, code, problem)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def report_failure(error, log, rank, code):
    """Say why a run has failed, and return the exit code.

    rank: this rank, as text. code: the exit code that is returned unless a signal ended the run;
    it is 2 if training has not started, and 1 if it has. What is said where:
                                        console of this rank   rank 0's log
      RunError                          its text               its text, and the cause's traceback
      signal during a step              one line               one line and the traceback
      Ctrl-C before Runtime.start       one line               nothing: it is not open yet
      out of memory, lost connection,
      no permission                     one line               one line and the traceback
      any other error                   the traceback          one line and the traceback

    Rank 0 writes its own log. Another rank writes its failure into rank 0's log (if it can), but
    two seconds later: if all ranks fail for the same reason, rank 0 says it first.
    """
    status = "failed"
    trace = "".join(traceback.format_exception(error))
    problem = first_line(traceback.format_exception_only(error)[-1])
    # Errors of gloo have no type of their own.
    is_gloo = re.match(r"\[(enforce fail at )?\S*/gloo/\S+:\d+\]", str(error))
    known = RunError, KeyboardInterrupt, dist.DistError, PermissionError
    is_known = isinstance(error, known) or is_gloo or is_out_of_memory(error)
    if isinstance(error, RunError):
        problem = str(error)
        trace = trace if error.__cause__ else ""
        if isinstance(error, InterruptedStepError):
            code, status = 128 + error.signum, "interrupted"
    elif isinstance(error, KeyboardInterrupt):
        code, trace = 130, ""
    elif is_out_of_memory(error):
        problem = (
            f"out of memory: {first_line(error)}; set a larger GRAD_ACCUM_STEPS or a smaller "
            "MODEL_DIM"
        )
    if rank == "0":
        log.write_end(status, code, first_line(problem), trace)
        if status == "interrupted":
            return code  # the log has printed it
    else:
        # torchrun sends SIGTERM when rank 0 has failed. on_signal would only note it; from here on
        # it ends this process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
        log.write_rank_failure(rank, first_line(problem), trace)
    print_line(f"train_gpt.py: rank {rank}: {problem}" if is_known else trace.rstrip(), "stderr")
    return code


def print_config(config, given, faults, warnings):
    """Print all settings as JSON, with "given" or "default" as their source; RunError on faults."""
    raise_on_faults([(faults, {})], warnings)
    for warning in warnings:
        print_line(f"WARNING: {warning}", "stderr")
    values = {
        name: {"value": value, "source": "given" if name.upper() in given else "default"}
        for name, value in vars(config).items()
    }
    print_line(json.dumps(values, indent=1))


def main(arguments, env):
    """Return the exit code: 0 done, 1 failed, 2 not started, 128 + n ended by signal n."""
    if {"--help", "-h"} & {*arguments}:
        print_line(f"{__doc__}\n{inspect.getsource(Config)}")
        return 0
    log = RunLog()
    code = 2
    try:
        config, given, faults, warnings = read_config(arguments, env)
        launch_faults = find_wrong_launch(env)
        faults += launch_faults
        has_launcher = bool(env.get("RANK")) and not launch_faults
        if not has_launcher:
            env = {**env, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if "--print-config" in arguments:
            print_config(config, given, faults, warnings)
            return 0
        more_faults, data = check_settings(config, env)
        # Where read_config could not read a value, it has used the default. What check_settings
        # says of such a default would mislead, so drop it. A fault begins with "NAME=".
        wrong = {fault.partition("=")[0] for fault in faults}
        faults += [fault for fault in more_faults if fault.partition("=")[0] not in wrong]
        own_fingerprint = fingerprint(config, data) if data else {}
        own = faults, own_fingerprint
        store, by_rank = rendezvous(env, own) if has_launcher else (None, [own])
        raise_on_faults(by_rank, warnings)
        code = 1  # if execute raises an error
        code = execute(config, env, store, log, data, (given, warnings))
    except (Exception, KeyboardInterrupt) as error:
        code = report_failure(error, log, env.get("RANK", "0"), code)
    return code


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # the stream is None, or a notebook's
            stream.reconfigure(errors="backslashreplace")  # a path may contain any bytes
    with suppress(OSError, ValueError):
        # Each shard stays open, so allow as many open files as possible.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    exit_status = main(sys.argv[1:], os.environ)
    if hasattr(sys, "ps1"):  # in a notebook the process must go on, so end the script only
        sys.exit(exit_status)
    # End without waiting for threads, because one may be stuck in a disk read. os._exit skips the
    # exit functions and the flush, so both come first.
    atexit._run_exitfuncs()
    with suppress(OSError):
        print(end="", flush=True)
    os._exit(exit_status)
