"""What a GPU would run in a step of an edited train_gpt.py, without a GPU: for roofline.py.

torch's compiler schedules both graphs of the model for a pretended H100, and says what each kernel
reads and writes. The rest of Trainer.train_step is called with tensors that have no memory.
"""

import ast
import contextlib
import gc
import importlib.util
import itertools
import logging
import os
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import cli
import numpy as np
import torch
import torch.nn.functional as F
from cli import ToolError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

SMALL = 8e6  # bytes: a smaller kernel of a graph casts weights or sums up their gradients
LAST = 1 - 1e-6  # share of a run that is over, at its last step
DOCUMENT = 900  # tokens of a mean document, for attention inside documents
VERSIONS = "2.11", "2.12", "2.13"  # of torch, for `pretend` and Graphs use its private names
FRAME = re.compile(r'File "(.+?)", line (\d+)')  # of a traceback
# FLOPs of operations that the compiler does not know, from their arguments
FLOPS = {
    "parameter_golf.fused_mlp.default": lambda x, up, *_: 4 * x.numel() * up.size(0),
    "parameter_golf.fused_mlp_gradient.default": lambda g, down, *_: 2 * g.numel() * down.size(1),
}
# Parts of a step are functions of the script. These have words: for products, and for the rest.
WORDS = {
    "GPT.logits": ("head products", "embedding, skips, norms"),
    "GPT.forward": ("loss", "softcap, loss"),
    "Block.forward": ("blocks", "residual mixes, norms"),
    "Attention.forward": ("q k v, output products", "q k norms, rope"),
    "MLP.forward": ("MLP products", "MLP"),
} | dict.fromkeys(("norm_heads", "rotate"), ("q k products", "q k norms, rope"))
HELPERS = "Linear.forward", "rms_norm"  # whoever calls them is meant


class Kernel(NamedTuple):
    side: str  # forward, backward, or step: the rest of it
    part: str
    bytes: float
    flops: float = 0.0
    kind: str = "bfloat16"  # of products; flash, cudnn or fa3; all-reduce


@dataclass
class Cost:
    """What a step of a script costs at one moment of its run, whatever the device."""

    tokens: int  # of a step, all ranks
    micro_steps: int
    allowed: list  # values of GRAD_ACCUM_STEPS
    begins: float = 0.0  # share of the run from which on steps are so
    held: int = 0  # bytes of weights, gradients, optimizers
    peak: int = 0  # bytes of a micro-step besides: mostly what the backward pass needs
    kernels: list = field(default_factory=list)
    unknown: set = field(default_factory=set)  # operations whose FLOPs are not known


# === What the compiler would make of the model ===
def pretend():
    """torch and its compiler believe that there is a GPU. All private names but those of Graphs."""
    if ".".join(torch.__version__.split(".")[:2]) not in VERSIONS:
        known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise ToolError(f"torch {torch.__version__}: it uses private names of {known}: install one")
    if importlib.util.find_spec("triton") is None:
        raise ToolError(cli.missing("triton"))
    device = types.SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
        max_threads_per_block=1024, L2_cache_size=50 << 20, gcnArchName="",
    )  # fmt: skip
    answers = {"get_device_properties": device, "get_device_capability": (9, 0), "device_count": 1}
    answers |= {"get_device_name": "H100", "current_device": 0, "is_bf16_supported": True}
    answers |= {"is_current_stream_capturing": False}
    for name, value in answers.items():  # before torch._dynamo, whose classes keep the functions
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.Tensor.__invert__ = lambda t: torch.bitwise_not(t)  # the plain ones ask for the device
    torch.Tensor.copy_ = lambda t, other, non_blocking=False: torch.ops.aten.copy_.default(t, other)
    sys.modules["torch.optim.adam"]._device_dtype_check_for_fused = lambda *_, **__: None
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._functorch import config as tracing
    from torch._inductor import config as compiling
    from torch._inductor import scheduler

    true = ConstantVariable.create(True)
    TensorVariable.method_attr_is_cuda = lambda *_: true
    tracing.force_non_lazy_backward_lowering = True
    compiling.force_disable_caches = True
    scheduler.has_triton = lambda *_: True
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def operation(name, schema, fake):
    made = torch.library.custom_op(
        f"roofline::{name}", lambda *_: None, mutates_args=(), schema=schema
    )
    made.register_fake(fake)
    return made


def like(q):
    """What attention makes of q: in memory (B, T, heads, head_dim), or (tokens, heads, head_dim)"""
    if q.ndim == 3:
        return q.new_empty(q.shape)
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)


# `keys` is how many a query attends to, on average.
attention = operation(
    "attention",
    "(Tensor q, Tensor k, Tensor v, float keys, str kind) -> (Tensor, Tensor)",
    lambda q, *_: (like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)),
)
attention_backward = operation(
    "attention_backward",
    "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor y, Tensor sums, float keys, str kind)"
    " -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v, *_: (like(q), like(k), like(v)),
)


def save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


attention.register_autograd(
    lambda ctx, g, _: (*attention_backward(g, *ctx.saved_tensors, *ctx.options), None, None),
    setup_context=save_for_backward,
)


def attention_kernel(side, values):
    """Flash attention: backward keeps dq in float32, and dk and dv of all query heads."""
    *tensors, keys, kind = values
    q, k = tensors[:2] if side == "forward" else tensors[1:3]
    n, m = 2 * q.numel(), 2 * k.numel()
    if side == "forward":
        return Kernel(side, "attention", 2 * n + 2 * m, 4 * q.numel() * keys, kind)
    moved = 12 * n + 4 * m + 4 * n * (q.size(1) != k.size(1))
    return Kernel(side, "attention", moved, 10 * q.numel() * keys, kind)


def replace_attention():
    """Attention and rms_norm become one operation each: for a CPU, torch would choose others."""
    from torch.nn.attention import varlen

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
        return attention(q, k, v, k.size(-2) / (2 if is_causal else 1), "cudnn")[0]

    def attend_documents(q, k, v, _, __, longest, *___, **____):
        return attention(q, k, v, min(longest, DOCUMENT) / 2, "flash")[0]

    def rms_norm(x, shape, weight=None, eps=None):
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]

    attend_documents.__wrapped__ = varlen.varlen_attn  # for its signature
    varlen.varlen_attn = attend_documents
    F.scaled_dot_product_attention = attend
    F.rms_norm = rms_norm


class KnownError(Exception):
    """A graph is known, and need not run."""


class Graphs:
    """A backend of torch.compile: adds the kernels of both graphs to a Cost."""

    def __init__(self, cost, path):
        self.cost, self.path = cost, path
        self.function_at = {}  # {line of the script: name}
        for top in ast.parse(Path(path).read_text("utf-8")).body:
            for node in (top, *getattr(top, "body", ())):
                if isinstance(node, ast.FunctionDef):
                    name = node.name if node is top else f"{top.name}.{node.name}"
                    lines = range(node.lineno, node.end_lineno + 1)
                    self.function_at |= dict.fromkeys(lines, name)

    def __call__(self, graph, inputs):
        from torch._inductor import compile_fx, scheduler

        scheduler.Scheduler.codegen = lambda scheduled: self.add(scheduled)
        self.compile = compile_fx.compile_fx_inner
        return compile_fx.compile_fx(graph, inputs, inner_compile=self.schedule)

    def schedule(self, graph, inputs, **options):
        """Moves a graph to the GPU and schedules it. Returns what runs instead: nothing."""
        self.side = "backward" if options.get("is_backward") else "forward"
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(on_gpu, node.meta["val"])
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": torch.device("cuda:0")}
        known = len(self.cost.kernels)
        try:
            self.compile(graph, [on_gpu(t) for t in inputs], **options)
        except Exception:  # KnownError, in whatever the compiler wraps it
            if len(self.cost.kernels) == known:
                raise

        def answer(_):
            raise KnownError

        answer._boxed_call = True
        return answer

    def add(self, scheduled):
        """Takes the place of the code generation."""
        from torch._inductor import ir, memory, scheduler
        from torch._inductor.virtualized import V

        inputs = memory.get_freeable_input_buf(scheduled.nodes, V.graph.graph_inputs.keys())
        memory.assign_memory_planning_info_for_scheduler_buffers(
            scheduled.nodes, scheduled.name_to_buf
        )
        outputs = {*V.graph.get_output_names()}
        peak = memory.estimate_peak_memory_allocfree(scheduled.nodes, inputs, outputs)[0]
        self.cost.peak = max(self.cost.peak, peak)
        for node in scheduled.nodes:
            skipped = isinstance(node, scheduler.NopKernelSchedulerNode)
            if not skipped and not isinstance(node.node, ir.MultiOutput):
                self.cost.kernels.append(self.kernel(node))
        raise KnownError

    def kernel(self, node):
        moved = node.get_read_write_buffers_sizes()
        if not node.is_extern():
            origins = [fx for one in node.get_nodes() for fx in one.node.get_origins()]
            part = self.part(origins, False) if moved > SMALL else "casts, small sums"
            return Kernel(self.side, part, moved)
        fx = node.node.get_origin_node() or next(iter(node.node.get_origins()))
        name, value = str(fx.target), fx.meta["val"]
        arguments = [getattr(arg, "meta", {}).get("val", arg) for arg in fx.args]
        if name.startswith("roofline."):
            return attention_kernel(self.side, arguments)
        if name in FLOPS:
            flops = FLOPS[name](*arguments)
        else:
            flops = node.estimate_flops() or 0
            self.cost.unknown |= set() if name.startswith("aten.") else {name}
        return Kernel(self.side, self.part([fx], flops > 0), moved, flops, type_of(value))

    def part(self, origins, products):
        """The function of the script in which most of these operations stand, in words."""
        found = Counter()
        for fx in origins:
            frames = FRAME.findall(fx.meta.get("stack_trace") or "")
            lines = [int(line) for file, line in frames if file == self.path]
            names = [self.function_at.get(line) for line in lines]
            names = [name for name in names if name and name not in HELPERS]
            found.update(names[-1:])
        name = found.most_common(1)[0][0] if found else "others"
        return WORDS.get(name, (f"{name} products", name))[0 if products else 1]


def on_gpu(value):
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with value.fake_mode:
        sizes = value.size(), value.stride()
        bare = torch.empty_strided(*sizes, dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, bare, torch.device("cuda:0"))


def type_of(value):
    return str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else "bfloat16"


# === The rest of a step ===
class Watch(TorchDispatchMode):
    """Counts operations on tensors without memory (device meta)."""

    def __init__(self):
        super().__init__()
        self.kernels, self.part = [], ""
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self.enter)
        optimizer.register_optimizer_step_post_hook(self.leave)

    def enter(self, optimizer, *_):
        self.part = type(optimizer).__name__

    def leave(self, *_):
        self.part = "after the optimizers"

    def add(self, moved, flops=0, kind="", part=""):
        self.kernels.append(Kernel("step", part or self.part, moved, flops, kind))

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = {key: v for key, v in (kwargs or {}).items() if key != "pin_memory"}
        name, arguments = func._schema.name.split("::")[-1], func._schema.arguments
        writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        if name == "_local_scalar_dense" or name.startswith("_fused"):
            out = None if name.startswith("_fused") else 0.0
        elif name == "copy_" and args[0].device.type == "cpu":  # from the device
            return args[0]
        else:
            out = func(*args, **kwargs)
        views = any(a.alias_info for a in func._schema.returns) and not any(writes)
        if views or name.startswith(("empty", "new_empty", "_unsafe_view", "lift")):
            return out
        values = [*args, *(kwargs.get(a.name) for a in arguments[len(args) :])]
        only = name in ("copy_", "zero_", "fill_", "_foreach_copy_")
        moved = 0 if any(writes) else size_of(out)
        for value, is_written in zip(values, writes, strict=True):
            moved += size_of(value) * (2 if is_written and not only else 1)
        count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
        if moved:
            self.add(moved, count(*args, **kwargs, out_val=out), type_of(out))
        return out


def size_of(value):
    """Bytes on the device"""
    found = [t for t in tree_leaves(value) if torch.is_tensor(t) and t.device.type == "meta"]
    return sum(t.numel() * t.element_size() for t in found)


class Steps:
    """A Trainer without memory, whose step is counted at any moment of a run."""

    def __init__(self, script, config, ranks, folder):
        self.config, self.watch, self.shape = config, Watch(), ()
        runtime = script.Runtime(config, {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"})
        runtime.device, runtime.compiles = torch.device("meta"), False
        runtime.all_reduce = self.all_reduce
        with self.watch:
            log = script.RunLog("roofline")
            self.run = script.Trainer(config, runtime, log, make_data(script, config, folder))
        plan = script.BatchPlan.train(config, 0, ranks)
        x = torch.empty(plan.batch_rows, plan.seq_len, dtype=torch.int64, device="meta")
        self.batch = types.SimpleNamespace(x=x, y=x, summary=0)
        self.run.model.forward = self.forward
        self.first = self.run.state_dict()
        self.count(0.0)  # makes what optimizers make in the first step

    def all_reduce(self, tensor):
        self.watch.add(size_of(tensor), kind="all-reduce", part="all-reduce")
        return tensor

    def forward(self, x, y):
        self.shape = x.shape
        return torch.empty((), device="meta")

    def count(self, share):
        """What a step differs in when this share of the run is over: shapes, modules' switches."""
        run, config = self.run, self.config
        run.clock.total_ms = share * 1e3 * max(0.0, config.max_wallclock_seconds)
        run.clock.since = 0.0  # it runs
        run.load_state_dict(self.first)
        run.restart(int(share * config.iterations), 0)
        self.watch.kernels, self.watch.part = [], "gradients"
        with self.watch:
            run.train_step(itertools.repeat(self.batch))
        modules = run.model.named_modules()
        switches = [(n, k, v) for n, m in modules for k, v in vars(m).items() if type(v) is bool]
        return self.shape, switches

    def begin_of_last(self):
        """The share of the run from which on steps are as the last one; 0: all are."""
        last, low, high = self.count(LAST), 0.0, 1.0
        if self.count(low) == last:
            return 0.0
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (low, middle) if self.count(middle) == last else (middle, high)
        return high


def make_data(script, config, folder):
    """What a run reads: shards of short documents, which begin with token 1."""
    vocab = config.vocab_size
    tokens = np.arange(64 * config.train_seq_len + 1) % vocab
    tokens[::2] = min(1, vocab - 1)
    header = np.array([20240520, 1, len(tokens)] + 253 * [0], "<i4").tobytes()
    for split in ("train", "val"):
        path = Path(folder, f"fineweb_{split}_000000.bin")
        path.write_bytes(header + tokens.astype("<u2").tobytes())
    config = replace(config, data_path=str(folder))
    table = script.ByteTable(np.ones(vocab, int), *np.zeros((3, vocab), bool))
    return script.Data(script.Shards(config, "train"), script.Shards(config, "val"), table, "")


def record(path, settings, ranks, last):
    """The Cost of a script's first step; of its last one, or None if that is as the first."""
    pretend()
    replace_attention()
    path = str(Path(path).resolve())
    script = load(path)
    config, _, faults, _ = script.read_config([*settings, "DEVICE=cuda"], {})
    if config.attention_backend == "math":
        faults.append("ATTENTION_BACKEND=math: nothing is known about its speed: set auto")
    if faults:
        raise ToolError(f"{path}: {'; '.join(faults)}")
    try:
        return cost_of(script, config, ranks, last, path)
    except script.RunError as error:
        raise ToolError(f"{path}: {error}") from error
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ToolError(f"{path}: torch.compile fails: {cli.one_line(error)[:300]}") from error


def load(path):
    spec = importlib.util.spec_from_file_location("script", path)
    script = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    needed = "read_config", "Runtime", "RunLog", "Trainer", "BatchPlan", "Shards", "Data"
    if lacking := [name for name in needed if not hasattr(script, name)]:
        raise ToolError(f"{path}: no edited copy of today's train_gpt.py: it has no {lacking[0]}")
    return script


def cost_of(script, config, ranks, last, path):
    allowed = [n for n in range(1, 129) if is_allowed(script, config, n, ranks)]
    cost = Cost(config.train_batch_tokens, config.micro_steps(ranks), allowed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "Event", lambda **_: types.SimpleNamespace(record=lambda: None)),
            (torch.autograd, "grad", lambda _, ts, **__: [torch.empty_like(t) for t in ts]),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        steps = Steps(script, config, ranks, folder)
        if last:
            cost.begins = steps.begin_of_last()
            if not cost.begins:
                return None
        steps.count(LAST if last else 0.0)
    cost.held = held_by(steps.run)
    add_graphs(cost, steps, path)
    if config.attention_backend != "auto":
        kinds = dict.fromkeys(("flash", "cudnn"), config.attention_backend)
        cost.kernels = [k._replace(kind=kinds.get(k.kind, k.kind)) for k in cost.kernels]
    cost.kernels += steps.watch.kernels
    return cost


def is_allowed(script, config, count, ranks):
    try:
        return bool(script.BatchPlan.train(replace(config, grad_accum_steps=count), 0, ranks))
    except script.RunError:
        return False


def held_by(run):
    """Bytes of all tensors without memory but those of the final score"""
    run.scorer = run.validation
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "meta"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def add_graphs(cost, steps, path):
    del steps.run.model.forward  # what has counted the calls
    model = steps.run.model.to_empty(device="cpu")
    x = torch.zeros(steps.shape, dtype=torch.int64)
    torch._inductor.config.max_autotune = False  # it would run kernels
    graphs = Graphs(cost, path)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KnownError):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch.compile(model, backend=graphs, dynamic=False, fullgraph=True)(x, x)
