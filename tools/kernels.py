"""Record what a GPU would run in a step of an edited train_gpt.py, without a GPU: for roofline.py.

A Trainer makes steps with tensors that have no memory (device meta). Its model is compiled: torch's
compiler schedules the forward and backward graphs for a pretended H100, and says what each kernel
reads and writes. This module uses private names of torch.
"""

import ast
import gc
import itertools
import math
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import cli
import numpy as np
import torch
import torch.nn.functional as F
from cli import ToolError
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

# A kernel that moves fewer bytes casts weights or sums up their gradients.
SMALL_KERNEL_BYTES = 8e6
MOMENTS = 100  # of a run, at which a step is recorded
DOCUMENT = 900  # tokens of a mean document, for attention inside documents
VERSIONS = "2.11.", "2.12.", "2.13."  # versions of torch that have the private names
FRAME = re.compile(r'File "(.+?)", line (\d+)')  # a line of a traceback
# {operation that the compiler does not know: its FLOPs, from its arguments}
FLOPS = {
    "parameter_golf.fused_mlp.default": lambda x, up, *_: 4 * x.numel() * up.size(0),
    "parameter_golf.fused_mlp_gradient.default": lambda g, down, *_: 2 * g.numel() * down.size(1),
}
# The parts of a step are functions of the script. These functions have other names in the table:
# (for matrix products, for the rest).
PART_NAMES = {
    "GPT.logits": ("head products", "embedding, skips, norms"),
    "GPT.forward": ("loss", "softcap, loss"),
    "Block.forward": ("blocks", "residual mixes, norms"),
    "Attention.forward": ("q k v, output products", "q k norms, rope"),
    "MLP.forward": ("MLP products", "MLP"),
} | dict.fromkeys(("norm_heads", "rotate"), ("q k products", "q k norms, rope"))
HELPERS = "Linear.forward", "rms_norm"  # their kernels count for the function that calls them


class Kernel(NamedTuple):
    """A kernel, or several that run as one."""

    side: str  # forward, backward, or step (the rest of a step)
    part: str
    bytes: float
    flops: float = 0.0
    kind: str = "bfloat16"  # dtype of a matrix product; flash, cudnn or fa3; all-reduce
    length: float = 0.0  # of the sequences or documents (tokens), for attention only


@dataclass
class Step:
    """What a step of a run, or a graph of the model, launches and holds."""

    kernels: list = field(default_factory=list)  # all kernels of rank 0
    # For each rank that has a different share of the optimizers' work: all of its kernels.
    by_rank: list = field(default_factory=list)
    graphs: list = field(default_factory=list)  # ids of the model's graphs, in the order they run
    peak: int = 0  # bytes that a micro-step needs, mostly for the backward pass
    held: int = 0  # bytes of weights, gradients, optimizers
    tokens: int = 0  # of a step, over all ranks
    micro_steps: int = 1
    begins: float = 0.0  # the share of the run after which steps are like this


# === The kernels that the compiler would make of the model ===
def pretend():
    """Make torch's compiler believe that there is a GPU, and compile a model without memory."""
    if not torch.__version__.startswith(VERSIONS):
        known = f"{VERSIONS[0]}0 to {VERSIONS[-1]}x"
        words = f"roofline.py needs torch {known}; install one of these versions"
        raise ToolError(f"torch {torch.__version__}: {words}")
    device = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="",
        L2_cache_size=50 << 20, regs_per_multiprocessor=65536,
    )  # fmt: skip
    # This must be done before torch._dynamo is imported, whose classes keep the functions.
    torch.cuda.get_device_properties = lambda *_: device
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.Tensor.__invert__ = lambda t: torch.bitwise_not(t)  # the original asks for the device
    torch.Tensor.copy_ = lambda t, other, non_blocking=False: torch.ops.aten.copy_.default(t, other)
    sys.modules["torch.optim.adam"]._device_dtype_check_for_fused = lambda *_, **__: None
    F.scaled_dot_product_attention = attend
    # ATTENTION_BACKEND=fa3 can be estimated where FlashAttention-3 is not installed.
    torch.nn.attention.activate_flash_attention_impl = lambda name: None
    variables = import_module("torch._dynamo.variables")
    true = variables.ConstantVariable.create(True)
    variables.TensorVariable.method_attr_is_cuda = lambda *_: true
    import_module("torch._inductor.compile_fx")
    torch._inductor.scheduler.has_triton = lambda *_: True
    torch._inductor.config.joint_custom_pre_pass = partial(move_graph, device="cpu")
    # On the device meta, losses would have no gradients, and the compiler would drop all work.
    resolve, keys = torch._ops.resolve_key, torch._C.DispatchKey
    on_cpu = {keys.AutogradMeta: keys.AutogradCPU}
    torch._ops.resolve_key = lambda op, key: resolve(op, on_cpu.get(key, key))


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    """Replace F.scaled_dot_product_attention, which would choose another operation without a
    GPU."""
    arguments = q, k, v, attn_mask, True, dropout_p, is_causal
    return torch.ops.aten._scaled_dot_product_cudnn_attention(*arguments)[0]


def move_graph(graph, device):
    """Put the tensors of a graph on a device."""
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = on_device(node.meta["val"], device)
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": torch.device(device)}


def on_device(values, device):
    def move_one(t):
        with t.fake_mode:
            return FakeTensor(t.fake_mode, without_memory(t), torch.device(device))

    return tree_map_only(FakeTensor, move_one, values)


def without_memory(t):
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


class ScheduledError(Exception):
    """The kernels of a graph are known, so no code is needed for it."""


class Compiler:
    """A backend of torch.compile whose graphs add their kernels to a Recorder instead of
    running."""

    def __init__(self, path, recorder, attention, in_optimizer=False):
        """in_optimizer: the compiled function belongs to an optimizer, not to the model."""
        self.in_optimizer = in_optimizer
        self.path = path
        self.recorder = recorder
        self.attention_backend = attention
        self.names = defaultdict(list)  # {line of the script: names of its class and function}
        for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                for line in range(node.lineno, node.end_lineno + 1):
                    self.names[line].append(node.name)

    def __call__(self, graph, inputs):
        torch._inductor.scheduler.Scheduler.codegen = lambda scheduled: self.add(scheduled)
        compile_fx = torch._inductor.compile_fx
        schedule = partial(self.schedule, compile_fx.compile_fx_inner)
        return compile_fx.compile_fx(graph, inputs, inner_compile=schedule)

    def schedule(self, compile_graph, graph, inputs, **options):
        """Schedule a graph for the GPU. Return a function that is called instead of the graph."""
        self.side = "backward" if options.get("is_backward") else "forward"
        if self.in_optimizer:
            self.side = "step"
        found = self.found = Step()
        [outputs] = graph.graph.output_node().args
        outputs = [node and node.meta["val"] for node in outputs]
        move_graph(graph.graph, "cuda:0")
        try:
            compile_graph(graph, on_device(inputs, "cuda:0"), **options)
        except Exception:  # a ScheduledError, which the compiler wraps in another one
            if not found.kernels:
                raise

        def run(_):
            step = self.recorder.step
            step.kernels += found.kernels
            step.peak = max(step.peak, found.peak)
            step.graphs.append(id(found))
            return [None if t is None else without_memory(t) for t in outputs]

        run._boxed_call = True
        return run

    def add(self, scheduled):
        """Replace the code generation: record the kernels of the scheduled nodes."""
        graph, memory = torch._inductor.virtualized.V.graph, torch._inductor.memory
        nodes, outputs = scheduled.nodes, {*graph.get_output_names()}
        inputs = memory.get_freeable_input_buf(nodes, graph.graph_inputs.keys())
        memory.assign_memory_planning_info_for_scheduler_buffers(nodes, scheduled.name_to_buf)
        self.found.peak = memory.estimate_peak_memory_allocfree(nodes, inputs, outputs)[0]
        nothing = torch._inductor.scheduler.NopKernelSchedulerNode
        nodes = [node for node in nodes if not isinstance(node, nothing)]
        nodes = [n for n in nodes if not isinstance(n.node, torch._inductor.ir.MultiOutput)]
        self.found.kernels = [self.kernel(node) for node in nodes]
        raise ScheduledError

    def kernel(self, node):
        """Return the Kernel of a scheduled node."""
        if not node.is_extern():
            moved = moved_bytes(node)
            if self.in_optimizer:
                return Kernel(self.side, self.recorder.part, moved)
            origins = [fx for one in node.get_nodes() for fx in one.node.get_origins()]
            part = self.part(origins)[1] if moved > SMALL_KERNEL_BYTES else "casts, small sums"
            return Kernel(self.side, part, moved)
        moved = node.get_read_write_buffers_sizes()
        fx = node.node.get_origin_node() or next(iter(node.node.get_origins()))
        name = str(fx.target)
        arguments = [*fx.args, *fx.kwargs.values()]
        values = [getattr(argument, "meta", {}).get("val", argument) for argument in arguments]
        schema = getattr(fx.target, "_schema", None)  # a Triton kernel has no schema
        names = [argument.name for argument in schema.arguments] if schema else []
        named = dict(zip([*names[: len(fx.args)], *fx.kwargs], values, strict=False))
        if "query" in named:
            return self.attention(name, named)
        if name in FLOPS:
            flops = FLOPS[name](*values)
        elif name.startswith("aten."):
            flops = node.estimate_flops() or 0
        else:
            return Kernel(self.side, f"{name}: FLOPs unknown", moved)
        part = self.recorder.part if self.in_optimizer else self.part([fx])[0 if flops else 1]
        return Kernel(self.side, part, moved, flops, dtype_name(fx.meta["val"]))

    def attention(self, name, values):
        """Return the Kernel of flash attention. Its backward pass keeps dq in float32, and dk
        and dv of all query heads."""
        q, k = values["query"], values["key"]
        length = k.size(-2) if q.ndim == 4 else min(values["max_q"], DOCUMENT)
        keys = length
        if values.get("is_causal"):
            keys /= 2  # a query attends to half of the keys, on average
        kind = self.attention_backend
        if kind == "auto":
            kind = "cudnn" if "cudnn" in name else "flash"
        n, m = 2 * q.numel(), 2 * k.numel()
        if self.side == "forward":
            return Kernel(self.side, "attention", 2 * n + 2 * m, 4 * q.numel() * keys, kind, length)
        moved = 12 * n + 4 * m + 4 * n * (q.size(1) != k.size(1))
        return Kernel(self.side, "attention", moved, 10 * q.numel() * keys, kind, length)

    def part(self, origins):
        """Return the two names of the function of the script to which most of the operations
        belong."""
        found = Counter()
        for fx in origins:
            frames = FRAME.findall(fx.meta.get("stack_trace") or "")
            names = [".".join(self.names[int(line)]) for file, line in frames if file == self.path]
            found.update([name for name in names if name and name not in HELPERS][-1:])
        name = found.most_common(1)[0][0] if found else "others"
        return PART_NAMES.get(name, (f"{name} products", name))


def dtype_name(value):
    return str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else "bfloat16"


# === The bytes that a kernel moves ===
# torch's own count (get_read_write_buffer_accesses) takes the whole buffer for a kernel that was
# fused, even if the kernel reads only a slice of the buffer. So the elements are counted here.
SECTOR = 32  # bytes that a GPU reads at least, for one element
LONGEST_PERIOD = 1 << 22  # elements of a buffer that are marked one by one


class Region(NamedTuple):
    """The elements of a buffer that one access reads or writes."""

    numel: int
    first: int = 0  # position of the first element
    dims: tuple = ()  # (stride, count) of each dimension, the largest stride first
    is_regular: bool = True  # if not, only numel is known


def moved_bytes(node):
    """Return how many bytes a scheduled kernel reads and writes, each element of a buffer once."""
    graph = torch._inductor.virtualized.V.graph
    accesses = defaultdict(list)
    for access in (*node.read_writes.reads, *node.read_writes.writes):
        accesses[access.name].append(access)
    moved = 0
    for name, most in node.get_read_write_buffer_accesses(True, True).items():
        itemsize = graph.get_dtype(name).itemsize
        regions = make_regions(accesses[name], itemsize)
        moved += most if regions is None else min(most, itemsize * count_elements(regions))
    return moved


def make_regions(accesses, itemsize):
    """Return the Region of each access to a buffer. None: an access may be to the whole buffer."""
    dependencies = torch._inductor.dependencies
    accesses = [a for a in accesses if not isinstance(a, dependencies.WeakDep)]
    if not all(isinstance(access, dependencies.MemoryDep) for access in accesses):
        return None
    # torch.cat masks the reads of its inputs. An input that begins at position 32 is read at
    # Identity(d3 - 32), and ends where the next input begins.
    starts = defaultdict(set)
    for access in accesses:
        for variable, start in masked_variables(access.index).items():
            starts[variable, access.size].add(start)
    return [make_region(access, starts, itemsize) for access in accesses]


def masked_variables(index):
    """Return {variable: start} for each Identity(variable - start) of an index."""
    found = {}
    for identity in index.atoms(torch.utils._sympy.functions.Identity):
        [argument] = identity.args
        for variable in argument.free_symbols:
            start = variable - argument
            if start.is_Integer:
                found[variable] = int(start)
    return found


def make_region(access, starts, itemsize):
    """Return the Region of a MemoryDep.

    starts: {(masked variable, sizes): all positions at which an input of a torch.cat begins}
    """
    index = access.index.replace(torch.utils._sympy.functions.Identity, lambda x: x).expand()
    masked = masked_variables(access.index)
    first = 0
    dims = []
    total = 1
    for variable, size in zip(access.var_names, access.size, strict=True):
        begin, end = 0, int(size)
        if variable in masked:
            begin = masked[variable]
            end = min([start for start in starts[variable, access.size] if start > begin] + [end])
        stride, count = index.coeff(variable), end - begin
        total *= count
        index -= stride * variable
        if not stride.is_Integer:  # variables that are multiplied with each other
            return Region(total, is_regular=False)
        if stride != 0 and count > 1:
            first += int(stride) * (begin if stride > 0 else end - 1)
            dims.append((abs(int(stride)), count))
        else:
            first += int(stride) * begin
    index = index.expand()
    dims = merge_dims(dims)
    if index.is_Integer:
        return Region(math.prod(count for _, count in dims), first + int(index), dims)
    gathered = math.prod(int(size) for size in access.size)
    if not index.free_symbols & {*access.var_names}:  # a gather, at positions from a tensor
        stride, run = dims[-1] if dims else (0, 1)
        if stride != 1:
            run = 1
        gathered = gathered // run * max(run, SECTOR // itemsize)
    return Region(gathered, is_regular=False)  # or an index with a division


def merge_dims(dims):
    """Return the dimensions sorted by stride, those that continue each other as one."""
    merged = []
    for stride, count in sorted(dims, reverse=True):
        if merged and merged[-1][0] == stride * count:
            merged[-1] = (stride, merged[-1][1] * count)
        else:
            merged.append((stride, count))
    return tuple(merged)


def count_elements(regions):
    """Return the number of different elements in the regions of a buffer. If the overlap of regions
    is not known, this is an upper bound."""
    irregular = sum(region.numel for region in regions if not region.is_regular)
    regular = {(region.first, region.dims) for region in regions if region.is_regular}
    counts = [sum(math.prod(count for _, count in dims) for _, dims in regular)]
    # Regions that overlap repeat with the same period, such as the length of a row. Try each
    # stride, and the whole buffer.
    periods = {stride for _, dims in regular for stride, _ in dims}
    for first, dims in regular:
        periods.add(first + 1 + sum(stride * (count - 1) for stride, count in dims))
    for period in periods:
        if period <= LONGEST_PERIOD:
            counts.append(count_periodic(regular, period))
    return irregular + min(count for count in counts if count is not None)


def count_periodic(regions, period):
    """Return the number of different elements in the regions, each of which has the same positions
    in each period. None: a region is not like that."""
    marks = {}  # {position of the periods: for each position in a period, whether it is accessed}
    for first, dims in regions:
        outer = []
        positions = np.array([first % period])
        for stride, count in dims:
            if stride >= period:
                if stride % period:
                    return None
                outer.append((stride, count))
                continue
            inside = min(count, period // stride)
            if count > inside:
                if period % stride or count % inside:
                    return None
                outer.append((period, count // inside))
            positions = np.add.outer(positions, stride * np.arange(inside)).ravel()
        if positions.max() >= period:
            return None
        key = first // period, merge_dims(outer)
        marks.setdefault(key, np.zeros(period, dtype=bool))[positions] = True
    return sum(
        int(marked.sum()) * math.prod(count for _, count in outer)
        for (_, outer), marked in marks.items()
    )


# === The rest of a step, outside the compiled model ===
class Recorder(TorchDispatchMode):
    """Add the operations on tensors without memory to a Step."""

    def __init__(self):
        super().__init__()
        self.step = Step()
        self.part = ""  # of the step, for the table
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self.enter)
        optimizer.register_optimizer_step_post_hook(self.leave)

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def enter(self, optimizer, *_):
        self.part = type(optimizer).__name__

    def leave(self, *_):
        self.part = "after the optimizers"

    def all_reduce(self, tensor):
        self.step.kernels.append(
            Kernel("step", "all-reduce", device_bytes(tensor), 0, "all-reduce")
        )
        return tensor

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = {key: v for key, v in (kwargs or {}).items() if key != "pin_memory"}
        name, arguments = func._schema.name.split("::")[-1], func._schema.arguments
        writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        if name == "copy_" and args[0].device.type == "cpu":  # a copy from the device to the host
            return args[0]
        out = func(*args, **kwargs)
        views = any(a.alias_info for a in func._schema.returns) and not any(writes)
        if views or name.startswith(("empty", "new_empty", "_unsafe_view")):
            return out
        values = [*args, *(kwargs.get(a.name) for a in arguments[len(args) :])]
        only_writes = name in ("copy_", "zero_", "fill_", "_foreach_copy_")
        moved = 0 if any(writes) else device_bytes(out)
        for value, is_written in zip(values, writes, strict=True):
            moved += device_bytes(value) * (2 if is_written and not only_writes else 1)
        count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
        if moved:
            flops = count(*args, **kwargs, out_val=out)
            self.step.kernels.append(Kernel("step", self.part, moved, flops, dtype_name(out)))
        return out


def device_bytes(value):
    """Return the number of bytes of all tensors in `value` that are on the device."""
    found = [t for t in tree_leaves(value) if torch.is_tensor(t) and t.device.type == "meta"]
    return sum(t.numel() * t.element_size() for t in found)


def make_data(script, config, folder):
    """Return Data of shards in which each token begins a document."""
    tokens = [1] * (64 * config.train_seq_len + 1)
    for split in ("train", "val"):
        cli.write_shard(Path(folder, f"fineweb_{split}_000000.bin"), tokens)
    config = replace(config, data_path=folder)
    return script.Data(script.Shards(config, "train"), script.Shards(config, "val"), None, "")


def make_trainer(script, config, ranks, rank, data):
    """Return the Trainer of a rank, without memory. Call it inside a Recorder."""
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        environment = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
        runtime = script.Runtime(config, environment)
        runtime.rank = rank  # a Runtime with another RANK would wait for rank 0
        runtime.device, runtime.compiles = torch.device("meta"), False
        run = script.Trainer(config, runtime, script.RunLog("roofline"), data)
    runtime.cuda = False  # from here on, the Trainer waits for no GPU
    return run


def make_run(script, config, ranks, folder):
    """Return the Trainer of rank 0, without memory, the optimizers of all ranks whose work differs,
    and the Recorder of their steps."""
    recorder = Recorder()
    data = make_data(script, config, folder)
    runs = {}  # {shapes of the matrices that a rank orthogonalizes: Trainer of the first such rank}
    with recorder:
        for rank in range(ranks):
            run = make_trainer(script, config, ranks, rank, data)
            run.runtime.all_reduce = recorder.all_reduce
            runs.setdefault(orthogonalized_shapes(run), run)
    torch._inductor.config.max_autotune = False  # autotuning would run kernels
    torch._dynamo.config.recompile_limit = 1 << 16  # ranks have matrices of different shapes
    compile_with = partial(Compiler, script.__file__, recorder, config.attention_backend)
    for run in runs.values():
        for optimizer in run.optimizers:
            if hasattr(optimizer, "newton_schulz"):
                optimizer.newton_schulz = torch.compile(
                    optimizer.newton_schulz,
                    backend=compile_with(in_optimizer=True),
                    dynamic=False,
                    fullgraph=True,
                )
    run = next(iter(runs.values()))
    run.model.compile(backend=compile_with(), dynamic=False, fullgraph=True)
    return run, [other.parts for other in runs.values()], recorder


def orthogonalized_shapes(run):
    """Return the shapes of the matrices that the rank of a Trainer orthogonalizes, in order."""
    return tuple(
        tuple(p.shape)
        for optimizer in run.optimizers
        for p in getattr(optimizer, "matrices", ())
        if p in getattr(optimizer, "own_matrices", ())
    )


def record_step(run, recorder, batches, share, parts):
    """Return the Step that a run makes when this share of it is done, with these parts of the
    Trainer."""
    run.clock.total_ms = share * 1e3 * max(0.0, run.config.max_wallclock_seconds)
    run.clock.since = 0.0  # the clock runs
    run.set_position(int(share * run.config.iterations), 0)
    run.parts = parts
    recorder.part = "gradients"
    step = recorder.step = Step(begins=float(share))
    with recorder:
        run.train_step(batches)
    return step


def record_steps(run, parts_by_rank, recorder, plan):
    """Return the first Step of a run, and each later one whose graphs differ from those of the Step
    before."""
    x = torch.empty(plan.batch_rows, plan.seq_len, dtype=torch.int64, device="meta")
    batches = itertools.repeat(SimpleNamespace(x=x, y=x, summary=0))
    steps = []
    for rank in range(len(parts_by_rank)):  # optimizers allocate their state in their first step
        record_step(run, recorder, batches, 0.0, parts_by_rank[rank])
    for share in np.arange(MOMENTS) / MOMENTS:
        step = record_step(run, recorder, batches, share, parts_by_rank[0])
        if not steps or step.graphs != steps[-1].graphs:
            others = [record_step(run, recorder, batches, share, p) for p in parts_by_rank[1:]]
            step.by_rank = [step.kernels, *(other.kernels for other in others)]
            steps.append(step)
    run.parts = parts_by_rank[0]
    del parts_by_rank[1:]  # what one device holds is counted below
    run.scorer = run.validation  # frees tensors that only the final score needs
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "meta"]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    for step in steps:
        step.held = sum(sizes.values())
        step.tokens = run.config.train_batch_tokens
        step.micro_steps = run.runtime.micro_steps
    return steps


def record(path, settings, ranks):
    """Return the Steps of a script with these settings. Raises ToolError if the script cannot be
    compiled or its settings are wrong."""
    pretend()
    path = str(Path(path).resolve())
    spec = spec_from_file_location("script", path)
    script = sys.modules["script"] = module_from_spec(spec)
    spec.loader.exec_module(script)
    if not hasattr(script, "BatchPlan"):
        raise ToolError(f"{path}: it has no BatchPlan; give an edited copy of today's train_gpt.py")
    config, _, faults, _ = script.read_config([*settings, "DEVICE=cuda"], {})
    if config.attention_backend == "math":
        faults.append(
            "ATTENTION_BACKEND=math: the speed of this backend is not known; set it to auto"
        )
    if faults:
        raise ToolError(f"{path}: {'; '.join(faults)}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            run, parts_by_rank, recorder = make_run(script, config, ranks, folder)
            plan = script.BatchPlan.train(config, 0, ranks)
            return record_steps(run, parts_by_rank, recorder, plan)
    except script.RunError as error:
        raise ToolError(f"{path}: {error}") from error
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ToolError(f"{path}: torch.compile fails: {cli.one_line(error)[:300]}") from error
