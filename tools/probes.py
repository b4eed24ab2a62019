"""Look at a tiny run of verify.py from the inside. These functions are called in the new processes.

They use these parts of an edited train_gpt.py: Trainer.train_step, .train, .validate,
.export_and_score, .batches, .groups, .parts, .config, .runtime, .step and .model;
Validation.evaluate, BatchPlan.fill_xy, Clock.now_ms, Runtime.all_reduce, .compiles and
.micro_steps; warm_up, seed_step, unpack, pack_and_write, log_score, write_results, mean_nats,
KEEP_FLOAT_MAX_NUMEL, MIN_SCALE, "parts" of a checkpoint; and logits, forward, dtype and blocks of
the model.
This module builds on loading.py.
"""

import datetime
import inspect
import json
import logging
import math
import os
import random
import sys
import time
import zlib
from collections import deque
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cli import write_shard
from loading import VAL, VAL_ROWS, load, read_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TRIALS = 12  # find_unused tries so many sets of weights
FIRST_POSITIONS = 24  # find_sight tests so many positions at the beginning of a sequence
RANDOM_POSITIONS = 12  # find_sight tests so many further positions
FIT_NUMBERS = 100_000  # find_average uses about so many numbers of all weights
REAL_DATETIME = datetime.datetime
CONTROLS = 3  # the first token ids are control tokens: unknown, begin, end


def rank():
    return int(os.environ.get("RANK", 0))


def write_note(name, value):
    """Write a value for verify.py, to notes/<name><rank>.json."""
    Path("notes").mkdir(exist_ok=True)
    Path("notes", f"{name}{rank()}.json").write_text(json.dumps(value))


def random_states():
    """Return checksums of the states of Python's, numpy's and torch's random number generators."""
    _, numbers, *place = np.random.get_state()
    states = random.getstate(), (numbers.tolist(), place), torch.get_rng_state().tolist()
    return [zlib.crc32(repr(state).encode()) for state in states]


def tensor_bytes(t):
    """Return the bytes of a tensor of any dtype; numpy has no bfloat16."""
    return t.detach().flatten().view(torch.uint8).numpy().tobytes()


def model_checksum(model):
    state = [*model.parameters(), *model.buffers()]
    return zlib.crc32(b"".join(map(tensor_bytes, state)))


def call_after(module, base, name, act):
    """Make act(result, self, *arguments) follow each call of the method `name` of the class `base`
    and its subclasses. act may return another result. If a method calls that of its base class,
    act is called twice."""

    def extended(method):
        signature = inspect.signature(method)

        def call(*arguments, **named):
            result = method(*arguments, **named)
            given = signature.bind(*arguments, **named)  # some may have been given by name
            other = act(result, *given.args)
            return result if other is None else other

        return call

    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        if issubclass(kind, base) and name in vars(kind):
            setattr(kind, name, extended(vars(kind)[name]))


# === Whole runs ===
def run_with_notes(script):
    """Do the same as `python script`, and write notes on what the run does."""
    opened = set()  # files that Python code opened

    def note_opened(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            opened.add(os.path.abspath(os.fsdecode(arguments[0])))

    module = load(script)
    note_steps(module)
    sums = record_sums(module)
    export = module.Trainer.export_and_score
    module.Trainer.export_and_score = lambda run: [note_values(run), export(run)]
    sys.addaudithook(note_opened)
    code = module.main([], os.environ)
    sys.settrace(None)  # see tinyruns.trace_lines
    write_note("opened", sorted(opened))
    write_note("counted", sums[1:3])
    return code


def speed_up_clocks():
    """Make the clocks of Python's `time` and datetime.now() run 1,000 times as fast. What converts
    the time by itself (time.localtime() without an argument) or measures other things
    (resource.getrusage) is as before."""

    def sped_up(clock, *arguments):
        start = clock(*arguments)
        return lambda: start + 1000 * (clock(*arguments) - start)

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        for suffix in ("", "_ns"):
            setattr(time, name + suffix, sped_up(getattr(time, name + suffix)))
    clocks = [getattr(time, name) for name in dir(time) if name.startswith("CLOCK_")]
    for name in ("clock_gettime", "clock_gettime_ns"):
        by_clock = {clock: sped_up(getattr(time, name), clock) for clock in clocks}
        setattr(time, name, lambda clock, by_clock=by_clock: by_clock[clock]())
    datetime.datetime = FastDatetime


class DatetimeKind(type):
    """Lets isinstance(t, datetime) be true for times that were made without FastDatetime."""

    def __instancecheck__(cls, value):
        return isinstance(value, REAL_DATETIME)


class FastDatetime(datetime.datetime, metaclass=DatetimeKind):
    """A datetime whose now() and utcnow() follow time.time(), which may be replaced."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def run_with_fast_clock(script):
    speed_up_clocks()
    return run_with_notes(script)


def note_steps(module):
    """Write a note after each step: a checksum of the weights, which optimizers stepped with which
    rates, and whether random numbers were drawn. After the first step, also write which optimizer
    trains which parameter, and the gradients that the optimizers got. Return a list to which each
    step is added when it begins."""
    step = module.Trainer.train_step
    seed_step = module.seed_step
    seeded_states = []
    trains = {}
    begun = []

    def seed_and_note(*arguments, **named):
        seed_step(*arguments, **named)
        seeded_states[:] = random_states()

    def train_step(run, *rest):
        is_first = not begun
        begun.append(run.step)
        before = random_states()
        names = {p: name for name, p in run.model.named_parameters()}
        gradients = {}
        stepped = []

        def note_optimizer(optimizer, *_):
            part_names = [name for name, part in run.parts.items() if part is optimizer]
            name = part_names[0] if part_names else type(optimizer).__name__
            groups = optimizer.param_groups
            stepped.append((name, [float(group["lr"]) for group in groups]))
            for p in [p for group in groups for p in group["params"] if is_first and p in names]:
                trains[names[p]] = name, tuple(p.shape)
                if p.grad is not None:
                    gradients.setdefault(names[p], p.grad.detach().clone())

        hook = register_optimizer_step_pre_hook(note_optimizer)
        generators = GeneratorSeeker()
        # Modes change how a compiled model is traced.
        with nullcontext() if run.runtime.compiles else generators:
            step(run, *rest)
        hook.remove()
        after = random_states()
        if is_first:
            write_note("trains", trains)
            torch.save(gradients, f"notes/first{rank()}.pt")
        # Without seed_step, nothing is known of the three generators.
        drawn = [a != b for a, b in zip(seeded_states or after, after, strict=True)]
        drawn[2] = drawn[2] or generators.found
        note = {
            "crc": model_checksum(run.model),
            "stepped": stepped,
            "drawn": drawn,
            "before": before,
            "after": after,
        }
        with open(f"notes/steps{rank()}.jsonl", "a") as file:
            print(json.dumps(note), file=file)

    module.seed_step = seed_and_note
    module.Trainer.train_step = train_step
    return begun


class GeneratorSeeker(TorchFunctionMode):
    """Notes whether a function of torch gets a torch.Generator. random_states() does not show what
    an edit's own generator draws."""

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found = self.found or has_generator(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def has_generator(args, kwargs):
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def note_values(run):
    """Write a note {attribute: the end of its text} of plain values and of collections: of the
    Trainer, of the objects that it holds, and of the modules of the model."""
    things = {"Trainer": run}
    things |= {f"Trainer.{name}": thing for name, thing in vars(run).items() if name != "config"}
    things |= {f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()}
    kinds = bool, int, float, str, type(None), list, tuple, dict, set, deque
    values = {}
    for owner, thing in things.items():
        for name, value in getattr(thing, "__dict__", {}).items():
            text = repr(value) if isinstance(value, kinds) else "tensor("
            # Internals of modules and optimizers, and what a reader waited for last, may differ.
            is_other = name.startswith("_") or name in ("defaults", "reading")
            if not is_other and "tensor(" not in text:
                values[f"{owner}.{name}"] = text[-60:]
    write_note("values", values)


def run_with_step_clock(script, pace):
    """Run with a clock that advances by `pace` seconds with each step, and faster on rank 1. So a
    run with a time limit is repeatable. Other clocks of rank 1 are far ahead, which shows if the
    script uses them."""
    if rank():
        speed_up_clocks()
    module = load(script)
    begun = note_steps(module)
    module.Clock.now_ms = lambda clock: 1e3 * pace * len(begun) * (1 + 0.3 * rank())
    return module.main([], os.environ)


def run_first_step(script):
    """Make step 1 without random numbers of torch, and write a note of its gradients."""
    module = load(script)
    note_steps(module)
    step = module.Trainer.train_step

    def first_step(run, *rest):
        try:
            with WithoutRandomNumbers():
                step(run, *rest)
        except NotImplementedError as error:
            write_note("not-replaced", str(error))
        os._exit(0)

    module.Trainer.train_step = first_step
    return module.main([], os.environ)


class WithoutRandomNumbers(TorchDispatchMode):
    """Replace each random number by a constant, so that no result depends on shapes or ranks.
    Raises NotImplementedError for an operation whose numbers it cannot replace."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        out = func(*args, **kwargs)
        if torch.equal(torch.get_rng_state(), state) and not has_generator(args, kwargs):
            return out  # for example attention without dropout
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "bernoulli":  # the mean, so that dropout does nothing
            # Only bernoulli(probabilities) and bernoulli_() have no p.
            is_in_place = func.overloadpacket.__name__ == "bernoulli_"
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if is_in_place else args[0])
            return out.copy_(torch.as_tensor(p))
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        constants = {"rand": 0.5, "rand_like": 0.5, "uniform": 0.5, "randn": 0.0, "randn_like": 0.0}
        constants |= {"normal": 0.0, "normal_functional": 0.0}
        if name in constants:
            return out.fill_(constants[name])
        raise NotImplementedError(name)


def run_counting_reads(script):
    """Write a note {line: the steps in which the line made the host read a value that a device
    computes}. On a GPU, the host would wait there."""
    F.one_hot = make_one_hot(F.one_hot)
    module = load(script)
    mode = ReadCounter(script)
    begin, step = module.Trainer.__init__, module.Trainer.train_step

    def make(run, *arguments):
        with mode, DeviceMarks():  # optimizers may create numbers on the host
            begin(run, *arguments)

    def train_step(run, *rest):
        mode.step += 1
        with mode, DeviceMarks():
            step(run, *rest)

    def end(run):
        write_note("reads", {line: sorted(steps) for line, steps in mode.reads.items()})
        write_note("uncounted", sorted(mode.uncounted))
        os._exit(0)

    module.Trainer.__init__ = make
    module.Trainer.train_step = train_step
    module.Trainer.export_and_score = end
    return module.main([], os.environ)


def make_one_hot(one_hot):
    """Return the same function as torch's one_hot. With a number of classes, torch's function reads
    its argument on a CPU, to check it, but not on a GPU; the returned one never does."""

    def one_hot_without_check(tensor, num_classes=-1):
        if num_classes < 0:
            return one_hot(tensor)
        return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()

    return one_hot_without_check


class ReadCounter(TorchDispatchMode):
    """Notes in which lines of the script values of tensors are read in a step.

    What is computed only from new tensors without a device, for example from torch.rand(1), is on
    the host on a GPU, too. Such tensors are marked, and reading them does not count; see
    `DeviceMarks`."""

    OPERATIONS = {
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
        "unique_consecutive", "equal", "bincount",
    }  # fmt: skip

    def __init__(self, script):
        super().__init__()
        self.script = str(script)
        self.step = 0
        self.reads = {}
        self.uncounted = set()  # lines that read below a function that asks for the kind of device
        # On a CPU these are no operations.
        names = "tolist", "numpy", "cpu", "to"
        self.methods = {name: getattr(torch.Tensor, name) for name in names}
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, self.counting(method))

    def restore(self):
        """Set the methods of torch.Tensor that were replaced."""
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, method)

    def counting(self, method):
        def read(tensor, *arguments, **named):
            is_active = torch.utils._python_dispatch._get_current_dispatch_mode() is self
            # x.to(device) is not counted, because on a GPU it may be a copy to the device.
            texts = [value for value in (*arguments, *named.values()) if isinstance(value, str)]
            reads = method is not self.methods["to"] or "cpu" in texts
            if is_active and reads and not hasattr(tensor, "made_on_host"):
                self.note()
            return method(tensor, *arguments, **named)

        return read

    def note(self):
        line, depends_on_device = script_line(self.script)
        if self.step and depends_on_device:
            self.uncounted.add(line)
        elif self.step:
            self.reads.setdefault(line, set()).add(self.step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        name = func.overloadpacket.__name__
        on_host = name == "lift_fresh" or all(hasattr(t, "made_on_host") for t in given)
        has_mask = name in ("index", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        # x[mask] = 0 is not such a read: a number of the host is filled in where the mask is true.
        fills = name == "index_put_" and args[2].numel() == 1 and hasattr(args[2], "made_on_host")
        counts_trues = has_mask and not fills
        if not on_host and (counts_trues or name in self.OPERATIONS):
            self.note()
        for t in tree_leaves(out):
            if torch.is_tensor(t):
                if on_host:
                    t.made_on_host = True
                elif hasattr(t, "made_on_host"):  # a device's value was written into it
                    del t.made_on_host
        return out


class DeviceMarks(TorchFunctionMode):
    """Removes the mark made_on_host from new tensors for which the script names a device, such as
    torch.rand((), device=x.device). ReadCounter cannot see whether a device was named."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = not any(torch.is_tensor(value) for value in args)
        names_device = isinstance((kwargs or {}).get("device"), torch.device)
        if is_new and names_device and hasattr(out, "made_on_host"):
            del out.made_on_host
        return out


class CompileCounter:
    """Replaces torch.compile: nothing is compiled, but what would be is noted."""

    def __init__(self, script):
        self.script = str(script)
        self.place = ""  # what the run does; empty: something that may compile
        self.found = []  # [(place, line of the script, why it is compiled again)]
        self.reasons = []
        self.compile = torch.compile
        torch.compile = self.replacement
        torch._logging.set_logs(recompiles=True)
        handler = logging.Handler()
        handler.emit = lambda record: self.reasons.append(record.getMessage())
        logging.getLogger("torch._dynamo.guards.__recompiles").addHandler(handler)

    def replacement(self, model=None, **named):
        kept = {name: named[name] for name in named.keys() & {"fullgraph", "dynamic", "disable"}}
        return self.compile(model, backend=self.backend, **kept)

    def backend(self, graph, _):
        line, depends_on_device = script_line(self.script)
        if self.place and not depends_on_device:
            self.found.append((self.place, line, self.reasons[-1] if self.reasons else ""))
        self.reasons.clear()
        return graph.forward


def script_line(script):
    """Return the number of the script's line that is being executed, 0 if there is none; and
    whether a function that asks for the kind of device has called it, so that on a GPU another one
    may be called. train_step and the methods of the whole model are not meant: they may name a
    device for another reason, such as torch.autocast("cuda")."""
    line = 0
    depends_on_device = False
    frame = sys._getframe()
    while frame and frame.f_code.co_name not in ("train", "warm_up"):
        code = frame.f_code
        if code.co_filename == script:
            line = line or frame.f_lineno
            asks = {"is_cuda", "is_cpu", "cuda"} & {*code.co_names} or {"cuda", "cpu"} & texts(code)
            is_of_model = hasattr(frame.f_locals.get("self"), "logits")
            if asks and code.co_name != "train_step" and not is_of_model:
                depends_on_device = True
        frame = frame.f_back
    return line, depends_on_device


def texts(code):
    return {each for each in code.co_consts if isinstance(each, str)}


def run_compiled(script):
    """Train and validate with a CompileCounter, and write a note of what is compiled after the
    warm-up. Only the first validation may compile, and without a warm-up the first step."""
    counter = CompileCounter(script)
    module = load(script)
    begun = []  # what the run has done

    def within(method, name):
        def call(run, *arguments):
            again = name in begun  # the first of a kind may compile
            begun.append(name)
            counter.place = name.format(run.step + 1) if again else ""
            method(run, *arguments)
            counter.place = ""

        return call

    def end(_):
        write_note("compiled", counter.found)
        os._exit(0)

    kind = module.Trainer
    warm_up = module.warm_up
    # What the warm-up compiles is what it is for.
    module.warm_up = lambda run: [warm_up(run), counter.found.clear()]
    kind.train_step = within(kind.train_step, "step {}")
    kind.validate = within(kind.validate, "a validation")
    kind.export_and_score = end
    return module.main([], os.environ)


def run_with_opposite_results(script):
    """Run with validations that report the opposite. No weight may depend on them."""
    module = load(script)

    def opposite(result, *_):
        loss, bpb, *rest = result
        return (100 - loss, 100 - bpb, *rest) if loss < 50 else result

    call_after(module, module.Validation, "evaluate", opposite)
    return module.main([], os.environ)


# === The model with a run's artifact ===
def look_inside(script, look, full):
    """Load the artifact of the run in folder `full` into the model, and write a note with the facts
    that look(module, run, stored) returns."""
    module = load(script)

    @torch.no_grad()
    def train(run):
        begun = {name: p.clone() for name, p in run.model.named_parameters() if p.requires_grad}
        exported = torch.load(full / "final_model.pt", "cpu", weights_only=True)
        shapes = {name: torch.zeros_like(t) for name, t in exported.items()}
        try:
            stored = module.unpack((full / "final_model.int8.ptz").read_bytes(), shapes)
        except Exception as error:
            write_note("facts", {"unpack": repr(error)[:200]})
            os._exit(0)
        present = {name: t for name, t in stored.items() if not is_left_out(t)}
        foreign = sorted(run.model.load_state_dict(present, strict=False).unexpected_keys)
        least = getattr(module, "MIN_SCALE", 0.0)
        facts = {"foreign": foreign, "gaps": find_gaps(present, exported, least)}
        facts["shifts"] = find_shifts(present, exported)
        files = sorted((full / "checkpoints" / full.name).glob("step_*.pt"))
        after = [torch.load(file, "cpu", weights_only=True)["parts"]["model"] for file in files]
        facts |= find_untrained(run, begun, after[-1], exported)
        facts |= find_average([begun, *after], exported)
        facts |= find_score_loss(run, after)
        # Training losses may need a tensor that the artifact leaves out. It has its trained values.
        run.model.load_state_dict(after[-1] | exported, strict=False)
        run.model.load_state_dict(present, strict=False)
        facts |= look(module, run, stored)
        write_note("facts", facts)
        os._exit(0)

    module.Trainer.train = train
    return module.main([], os.environ)


def is_left_out(t):
    """Return whether a tensor of unpack() was not stored, in which case all its numbers are nan."""
    return t.is_floating_point() and t.numel() > 0 and bool(t.isnan().all())


def find_gaps(stored, exported, least=0.0):
    """Return {name: the distance of a stored tensor from the exported one, relative to its norm}.

    Differences up to least / 2 are rounding of the format and do not count: after a few steps with
    low learning rates, weights may be as small as that.
    """
    gaps = {}
    for name, t in exported.items():
        size = t.double().norm().item()
        if size and name in stored and stored[name].shape == t.shape:
            apart = (stored[name].double() - t.double()).abs() - least / 2
            gaps[name] = apart.clamp(min=0.0).norm().item() / size
    return gaps


def find_shifts(stored, exported):
    """Return {name: how much of the stored matrix's error is the same everywhere}: 1 if all numbers
    are shifted by the same amount, about 0 if they are rounded.

    What an error has in common with the weights themselves, for example if small weights are stored
    as 0, is no shift. Nothing can be said of a row whose weights are closer together than the
    stored levels: rounding may then move all of them in the same direction."""
    shifts = {}
    for name, t in exported.items():
        if t.ndim < 2 or t.numel() < 500 or name not in stored or stored[name].shape != t.shape:
            continue
        weights = t.double().flatten()
        error = stored[name].double().flatten() - weights
        size = error.square().mean().sqrt()
        if size > 1e-4 * weights.square().mean().sqrt():
            spread = weights - weights.mean()
            shift = error.mean()
            width = spread.square().mean().sqrt()
            if weights.mean().abs() <= 2 * width:
                # The error of a weight of 0. If all weights are far from 0, it is too uncertain.
                slope = (error * spread).sum() / spread.square().sum().clamp(min=1e-30)
                shift = shift - slope * weights.mean()
            # Without the largest errors, which are those of clipped weights.
            low, high = np.quantile(error.numpy(), (0.05, 0.95))
            level = max(float(high - low) / 0.9, float(size))
            in_rows = t.double().flatten(0, -2).std(-1, correction=0).median()
            shifts[name] = float(shift.abs() / size) if in_rows > 0.5 * level else 0.0
    return shifts


def find_average(states, exported):
    """Return the share that each of the `states` (the initial weights, and those after each step)
    has in the exported weights, by least squares; and the rest that this does not explain, relative
    to the way that training went."""
    names = [name for name in states[0] if all(name in each for each in (*states, exported))]
    names = [name for name in names if len({each[name].shape for each in states}) == 1]
    names = [name for name in names if exported[name].shape == states[0][name].shape]
    if not names:
        return {}
    columns = []
    for each in (*states, exported):
        column = torch.cat([each[name].detach().double().flatten() for name in names])
        columns.append(column[:: 1 + len(column) // FIT_NUMBERS])
    *columns, wanted = columns
    # Steps at a rate of 0 leave equal weights. Only the last of equal ones gets a share.
    last_equal = []
    for column in columns:
        equal = [i for i, other in enumerate(columns) if torch.equal(column, other)]
        last_equal.append(equal[-1] if equal else len(last_equal))  # none are equal with a nan
    different = sorted({*last_equal})
    matrix = torch.stack([columns[i] for i in different], 1)
    way = float((columns[-1] - columns[0]).norm())
    solution = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution
    rest = float((matrix @ solution - wanted[:, None]).norm()) / max(way, 1e-30)
    shares = dict(zip(different, solution.flatten().tolist(), strict=True))
    average = [shares.get(i, 0.0) for i in range(len(columns))]
    return {"average": average, "last_equal": last_equal, "rest": rest}


def find_score_loss(run, after):
    """Return losses of the sequences of the last training step that follow from the logits, in eval
    mode and with the weights from before that step: with the buffers from before the step, and, if
    they differ, with those from after it, because a step may set a buffer before it uses it. after:
    the state after each step."""
    buffers = {name: after[-1][name] for name, _ in run.model.named_buffers() if name in after[-1]}
    states = [after[-2], after[-2] | buffers]
    losses = []
    try:
        run.step = len(after) - 1
        run.model.eval()
        with closing(run.batches()) as batches:
            pairs = [(b.x.clone(), b.y.clone()) for b in islice(batches, run.runtime.micro_steps)]
        for state in states if buffers else states[:1]:
            run.model.load_state_dict(state)
            nats = []
            for x, y in pairs:
                logits = run.model.logits(x.clone()).float().flatten(0, 1)
                nats.append(float(F.cross_entropy(logits, y.flatten())))
            losses.append(sum(nats) / len(nats))
        return {"score_losses": losses}
    except Exception:  # the edited functions may have other arguments
        return {}
    finally:
        run.step = 0


def find_untrained(run, begun, trained, exported):
    """Return the names of weights that training does not change, and of weights that training
    changes but that are exported with their initial values."""
    names = [name for name in begun if name in exported and begun[name].numel()]
    unchanged = [name for name in names if torch.equal(begun[name], exported[name])]
    kept = [
        name for name in unchanged if not torch.equal(begun[name], trained.get(name, begun[name]))
    ]
    held = [p for group in run.groups for p in group["params"]]  # by the optimizers
    times = {name: sum(p is q for q in held) for name, p in run.model.named_parameters()}
    no_one = "no torch.optim.Optimizer of Trainer.parts has it"
    untrained = []
    for name in unchanged:
        if name not in kept:
            untrained.append(name if times[name] else f"{name} ({no_one})")
    untrained += sorted(f"{name} (in two optimizers)" for name, n in times.items() if n > 1)
    # A module beside the model, which is saved as a part of its own, may be trained, too.
    saved = tree_leaves([part.state_dict() for part in run.parts.values()])
    places = {t.data_ptr() for t in saved if torch.is_tensor(t)}
    others = [p for p in held if p.data_ptr() not in places]
    words = "in an optimizer, but no nn.Parameter of the model or of another part"
    untrained += [f"a tensor of shape {tuple(p.shape)} ({words})" for p in others]
    return {"untrained": untrained, "kept": kept}


def find_facts(module, run, stored, length):
    """Return the facts that verify.py judges in model_verdicts and score_verdicts."""
    model = run.model
    model.eval()
    tokens = val_tokens(run)
    x, y = tokens[:-1].view(VAL_ROWS, -1), tokens[1:].view(VAL_ROWS, -1)
    logits = torch.cat([model.logits(row[None].clone()) for row in x])
    nats = F.cross_entropy(logits.flatten(0, 1).double(), y.flatten()).item()
    present = {name: t for name, t in stored.items() if not is_left_out(t)}
    facts = {"nats": nats, "targets": y.numel(), "tensors": len(present)}
    sums = record_sums(module)
    score_artifact(module, run, stored)
    facts["counted"] = sums[1:3]
    facts |= find_wide(module, run, stored)
    facts["batch"] = compare_losses(run)
    model.eval()
    torch.manual_seed(0)
    randomize(model)
    try:
        longer = type(model)(replace(run.config, train_seq_len=length), model.dtype).eval()
        longer.load_state_dict(present, strict=False)
        randomize(longer)
        rows = tokens.repeat(1 + 2 * length // len(tokens))[: 2 * length].view(2, length)
        facts["sight"] = find_sight(longer, rows, run.config.vocab_size)
    except Exception as error:  # the edited model may be built in another way
        sight = find_sight(model, x[:2], run.config.vocab_size)
        facts["sight"] = sight | {"short": repr(error)[:200]}
    facts |= find_unused(model, x, present, run.config.vocab_size)
    return facts


def val_path(run):
    return Path(run.config.data_path, VAL)


def val_tokens(run):
    return torch.from_numpy(read_shard(val_path(run)).astype(np.int64))


def randomize(model):
    """Add noise to all parameters: zeros would hide what depends on what."""
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.3)


def score_artifact(module, run, stored):
    """Return the run's own final score, in mean nats, of an artifact that holds `stored`."""
    found = []
    names = run.model.state_dict().keys() & stored.keys()
    module.seed_step(0, 0)
    module.pack_and_write = lambda *_: b""
    module.unpack = lambda *_: {name: stored[name].clone() for name in names}
    module.log_score = lambda _, loss, *more: found.append(loss)
    module.write_results = lambda *_: None
    run.export_and_score()
    return found[0]


def record_sums(module):
    """Return a list that always holds the sums of the last evaluation: nats, bytes, targets, ..."""
    sums = []

    def note(_, _runtime, tensor):
        if tensor.dtype == torch.float64 and tensor.numel() > 3:
            sums[:] = tensor.tolist()

    call_after(module, module.Runtime, "all_reduce", note)
    return sums


def compare_losses(run):
    """Return the numbers of targets of some training sequences, the training loss of all of them
    together, and the mean of the training losses of each one."""
    try:
        with closing(run.batches()) as batches:
            copies = [(batch.x.clone(), batch.y.clone()) for batch in islice(batches, 4)]
        x, y = map(torch.cat, zip(*copies, strict=True))
        run.model.train()
        with WithoutRandomNumbers():
            losses = [float(run.model(x[i : i + 1], y[i : i + 1])) for i in range(len(x))]
            loss = float(run.model(x, y))
    except Exception:  # forward may have other arguments
        return {}
    return {"targets": (y >= 0).sum(1).tolist(), "loss": loss, "mean": sum(losses) / len(losses)}


def find_wide(module, run, stored):
    """Run the model in bfloat16. Return the blocks whose output is float32, and the dtype of the
    score; or a text that says why the model did not run."""
    x = val_tokens(run)[None, : run.config.train_seq_len]
    wide = []

    def note(number, out):
        out = out[0] if isinstance(out, tuple) else out
        if torch.is_tensor(out) and out.dtype == torch.float32:
            wide.append(number)

    try:
        model = type(run.model)(run.config, torch.bfloat16).eval()
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda _, __, out, number=number: note(number, out))
        nats = module.mean_nats(model, x.clone(), x.clone())
    except Exception as error:  # the model may have no blocks, or may need CUDA
        return {"wide": repr(error)[:200]}
    return {"wide": {"blocks": sorted({*wide}), "score": str(nats.dtype)}}


def find_sight(model, x, vocab_size):
    """Return which positions of two sequences, counted through both, have logits that change with
    later tokens ("leaks"), and which have logits that do not depend on their own token ("ignored");
    or "random", if equal calls return different logits. x: (2, length)"""
    length = x.size(1)
    last = 2 * length - 1
    positions = {*range(FIRST_POSITIONS), length // 2, length - 2, length - 1, length, last - 1}
    positions |= {*torch.randint(last, (RANDOM_POSITIONS,)).tolist()}
    positions &= {*range(last)}  # sequences may be shorter than FIRST_POSITIONS
    plain = model.logits(x.clone()).flatten(0, 1)
    if not torch.equal(model.logits(x.clone()).flatten(0, 1), plain):
        return {"leaks": [], "ignored": [], "length": length, "random": True}
    # With other tokens, attention inside documents multiplies matrices of other shapes, so that
    # sums are rounded differently.
    rounding = 1e-5 * max(1.0, plain.abs().max().item())
    leaks = []
    ignored = []
    for position in sorted(positions):
        changed = x.flatten().clone()
        changed[position + 1 :] = torch.randint(vocab_size, (last - position,))
        gap = model.logits(changed.view_as(x)).flatten(0, 1)[: position + 1] - plain[: position + 1]
        if not gap.abs().max() < rounding:  # true for nan, too
            leaks.append(position)
        changed = x.flatten().clone()
        changed[position] = (changed[position] + 1) % vocab_size
        if torch.equal(model.logits(changed.view_as(x)).flatten(0, 1)[position], plain[position]):
            ignored.append(position)
    return {"leaks": leaks, "ignored": ignored, "length": length}


def find_unused(model, x, stored, vocab_size):
    """Return the names of tensors that are stored twice, or that have no effect on logits.

    With one set of weights, routing may never choose a tensor, so several sets are tried."""
    state = model.state_dict()
    addresses = set()
    twice = []
    names = []
    for name in [name for name in stored if name in state and state[name].numel()]:
        if state[name].is_floating_point():
            (twice if state[name].data_ptr() in addresses else names).append(name)
            addresses.add(state[name].data_ptr())
    for trial in range(TRIALS):
        tokens = x[:2] if trial == 0 else torch.randint(vocab_size, x.shape)
        plain = model.logits(tokens.clone())
        for name in names.copy():
            was = state[name].clone()
            state[name].copy_(torch.randn_like(was))
            if not torch.equal(model.logits(tokens.clone()), plain):
                names.remove(name)
            state[name].copy_(was)
        if not names:
            break
        randomize(model)
    return {"twice": twice, "unused": names}


# === Tests of the final score: the validation split is changed, targets are hidden ===
def find_late(module, run, stored):
    """Return pairs [n, by how much the nats of the first n targets change with later tokens]. The
    later tokens occur nowhere before, and their targets are hidden."""
    tokens = read_shard(val_path(run))
    draw = np.random.default_rng(0).choice
    sums = record_sums(module)
    late = []
    found = []

    def hide(_, _plan, _rows, _tokens, _x, y):
        y[np.isin(np.asarray(y), late)] = -100

    call_after(module, module.BatchPlan, "fill_xy", hide)
    for end in [1 + len(tokens) * part // 8 for part in (1, 3, 5, 7)]:
        late[:] = {*range(CONTROLS, run.config.vocab_size)} - {*tokens[:end].tolist()}
        seen = []
        for _ in range(2 if late else 0):
            write_shard(val_path(run), np.append(tokens[:end], draw(late, len(tokens) - end)))
            score_artifact(module, run, stored)
            seen.append(sums[:3])
        # A score that does not take its targets from fill_xy() cannot be tested in this way.
        if seen and all(each and each[2] < end for each in seen):
            found.append([end - 1, abs(seen[0][0] - seen[1][0])])
    return {"late": found}


class TargetChooser:
    """Hides targets of the validation split from the score.

    choice: which ones are scored: the "first" or the "last" one alone, "others": all but the last,
    or "all".
    """

    def __init__(self, module):
        self.choice = "all"
        self.batches = set()  # the first sequence of each scored batch
        self.chosen = set()  # values of the first or last target, as the score sees it
        call_after(module, module.BatchPlan, "fill_xy", self.hide)

    def hide(self, _, _plan, rows, _tokens, _x, y):
        self.batches.add(rows.start)
        targets = y.reshape(-1)  # a view
        places = np.flatnonzero(np.asarray(targets) >= 0)
        if self.choice == "first":
            chosen = places[:1] if rows.start == min(self.batches) else places[:0]
        else:
            chosen = places[-1:] if rows.start == max(self.batches) else places[:0]
        self.chosen.update(targets[chosen].tolist())
        if self.choice == "others":
            targets[chosen] = -100
        elif self.choice != "all":
            targets[np.setdiff1d(places, chosen)] = -100


def sum_shares(module, run, stored):
    """Return three sums of probabilities: those of all values of the last target and of the first
    target, each when it is the only target scored, and those of the last target when all others
    are scored, too. A scorer that predicts a token only from earlier tokens gives its values
    probabilities that add up to 1, whatever its method. A sum is nan if the score needs more
    targets or has another order."""
    tokens = read_shard(val_path(run))
    sums = record_sums(module)
    chooser = TargetChooser(module)
    score_artifact(module, run, stored)  # fills chooser.batches

    def find_nats(choice, place, token):
        """Return the nats of the targets of this choice if the token at `place` is replaced."""
        changed = tokens.copy()
        changed[place] = token
        write_shard(val_path(run), changed)
        chooser.choice = choice
        chooser.chosen.clear()
        sums[:] = [math.nan]
        try:
            loss = score_artifact(module, run, stored)
        except ZeroDivisionError:
            return math.inf  # the token has no bytes, so the score has none
        except Exception:
            return math.nan
        if token not in chooser.chosen or (choice != "all" and chooser.chosen != {token}):
            return math.nan
        return loss if choice in ("first", "last") else sums[0]

    def add_shares(choice, place, known=0.0):
        total = 0.0
        for token in range(run.config.vocab_size):
            # A wrong scorer may gain so much that its probability is too large for a float.
            total += math.exp(min(known - find_nats(choice, place, token), 100.0))
            if not total <= 2:
                break  # the fault is proved, or the sum is nan
        return total

    others = find_nats("others", -1, int(tokens[-1]))
    shares = [add_shares("last", -1), add_shares("first", 1), add_shares("all", -1, others)]
    return {"shares": shares}
