"""Observe tiny runs of an edited train_gpt.py from the inside, for verify.py.

verify.py runs the script in new processes. In each of them, it calls one of these functions, which
loads the script, replaces some of its methods by methods that also write down what happens, and
then starts the run. The functions whose names begin with `run_` make a whole run, or its beginning.
`look_inside` does not train: it examines the model and the artifact of a run that has ended.

What these functions find is written to files in the folder notes/ of the run (see `write_note`),
which judge.py reads. (These files have nothing to do with the word `note` that verify.py prints.)

The functions use the following names of an edited train_gpt.py, so an edit should keep them:

Trainer             train_step, train, validate, export_and_score, batches, groups, parts, config,
                    runtime, step, model
Validation          evaluate
BatchPlan           fill_xy
Clock               now_ms
Runtime             all_reduce, compiles, micro_steps
the model           logits, forward, dtype, blocks, and a constructor with config and dtype
functions           main, warm_up, seed_step, unpack, pack_and_write, log_score, write_results,
                    mean_nats, report_failure (see loading.py)
constants           KEEP_FLOAT_MAX_NUMEL (see loading.py), MIN_SCALE
a checkpoint        its key "parts"
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

TRIALS = 12  # the largest number of sets of weights that find_unused tries
FIRST_POSITIONS = 24  # find_sight tests this many positions at the beginning of a sequence
RANDOM_POSITIONS = 12  # find_sight tests at most this many further positions, at random places
FIT_NUMBERS = 100_000  # find_average uses at most this many numbers of the weights
REAL_DATETIME = datetime.datetime  # the class, before speed_up_clocks replaces it
# Number of control tokens. Their ids are the first ones: 0 stands for unknown text, 1 begins a
# document, and 2 ends one.
CONTROLS = 3


def rank():
    # Return the rank of this process.
    return int(os.environ.get("RANK", 0))


def write_note(name, value):
    """Write a value to the file notes/<name><rank>.json in the run's folder, for judge.py.

    value: what JSON can hold.
    """
    Path("notes").mkdir(exist_ok=True)
    Path("notes", f"{name}{rank()}.json").write_text(json.dumps(value))


def random_states():
    """Return a list of three checksums: of the states of the random number generators of Python, of
    NumPy and of torch."""
    _, numbers, *place = np.random.get_state()
    states = random.getstate(), (numbers.tolist(), place), torch.get_rng_state().tolist()
    return [zlib.crc32(repr(state).encode()) for state in states]


def tensor_bytes(t):
    """Return the bytes of a tensor of any dtype.

    The tensor is viewed as uint8 before it becomes a NumPy array, because NumPy has no bfloat16.
    """
    return t.detach().flatten().view(torch.uint8).numpy().tobytes()


def model_checksum(model):
    # Return a checksum of all parameters and buffers.
    state = [*model.parameters(), *model.buffers()]
    return zlib.crc32(b"".join(map(tensor_bytes, state)))


def call_after(module, base, name, act):
    """Change the method `name` of the class `base` and of its subclasses in a module: after each
    call of the method, act(result, self, *arguments) is called.

    act: a function. If it returns something other than None, the caller of the method gets that
    instead of `result`. If a method of a subclass calls the same method of its base class, act is
    called twice.
    """

    def extended(method):
        signature = inspect.signature(method)

        def call(*arguments, **named):
            result = method(*arguments, **named)
            # `given.args` contains also those arguments that were given by name.
            given = signature.bind(*arguments, **named)
            other = act(result, *given.args)
            return result if other is None else other

        return call

    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        if issubclass(kind, base) and name in vars(kind):
            setattr(kind, name, extended(vars(kind)[name]))


# === Whole runs ===
def run_with_notes(script):
    """Run the script as `python3 script` does, and write down what the run does. Return the exit
    code.

    The files in notes/ are those of `note_steps` and `note_values`, and these two:
    opened     the paths of the files that Python code has opened since the script was loaded
    counted    [number of bytes, number of targets] of the final score; [] if they are not known
    """
    opened = set()

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
    sys.settrace(None)  # the run has ended, so end the tracing that tinyruns.trace_lines began
    write_note("opened", sorted(opened))
    write_note("counted", sums[1:3])
    return code


def speed_up_clocks():
    """Make the clocks of Python's module `time`, and datetime.now(), run 1,000 times as fast.

    A function that reads the time in C is as before, for example time.localtime() without an
    argument. So is a function of another module, for example resource.getrusage().
    """

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
    """The metaclass of FastDatetime. It lets isinstance(t, datetime.datetime) be true also for an
    object t of the real class datetime, after FastDatetime has replaced that class."""

    def __instancecheck__(cls, value):
        return isinstance(value, REAL_DATETIME)


class FastDatetime(datetime.datetime, metaclass=DatetimeKind):
    """A datetime whose now() and utcnow() call time.time(), which `speed_up_clocks` has replaced.

    The real methods read the time in C.
    """

    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


def run_with_fast_clock(script):
    # Do the same as run_with_notes, with clocks that run 1,000 times as fast.
    speed_up_clocks()
    return run_with_notes(script)


def note_steps(module):
    """Change Trainer.train_step so that it writes down what each step does. Return a list to which
    the Trainer's attribute `step` is added when a step begins.

    The steps of the warm-up are written down, too. After each step, a line is added to the file
    notes/steps<rank>.jsonl, with these keys:
    crc              checksum of the weights and buffers after the step
    stepped          [[name of an optimizer, its learning rates], ...] of the optimizers that have
                     stepped; there is one learning rate for each parameter group
    drawn            three bools, for the generators of Python, NumPy and torch: True if the step
                     has drawn random numbers from it. That of torch is also True if a function of
                     torch has got another torch.Generator
    before, after    what `random_states` returns before and after the step

    After the first step, two more files are written:
    notes/trains<rank>.json    {name of a parameter: (the optimizer that trains it, its shape)}
    notes/first<rank>.pt       {name of a parameter: the gradient that its optimizer got}
    """
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
        # A mode, such as `generators`, would change how torch.compile traces the model. So a run
        # that compiles has no mode.
        with nullcontext() if run.runtime.compiles else generators:
            step(run, *rest)
        hook.remove()
        after = random_states()
        if is_first:
            write_note("trains", trains)
            torch.save(gradients, f"notes/first{rank()}.pt")
        # `seeded_states` are the states after seed_step has set them at the beginning of the step.
        # If the script does not call seed_step, it is not known whether numbers were drawn. Then
        # `drawn` is False.
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
    """A mode whose attribute `found` says whether a function of torch was called with a
    torch.Generator as an argument.

    An edit may have a generator of its own. `random_states` does not show whether numbers are drawn
    from it.
    """

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found = self.found or has_generator(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def has_generator(args, kwargs):
    # Return True if one of the arguments of a call is a torch.Generator.
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def note_values(run):
    """Write the file notes/values<rank>.json with {name of an attribute: its value as text}.

    It has attributes of the Trainer, of the objects that the Trainer holds, and of the modules of
    the model. Only numbers, texts, None and collections without tensors are written. Of a long text
    only the last 60 characters are written.
    """
    things = {"Trainer": run}
    things |= {f"Trainer.{name}": thing for name, thing in vars(run).items() if name != "config"}
    things |= {f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()}
    kinds = bool, int, float, str, type(None), list, tuple, dict, set, deque
    values = {}
    for owner, thing in things.items():
        for name, value in getattr(thing, "__dict__", {}).items():
            # A value of another kind gets the text "tensor(", so that it is left out below.
            text = repr(value) if isinstance(value, kinds) else "tensor("
            # These differ between runs although nothing is wrong: internals of modules and
            # optimizers, and Pipeline.reading, which says what the reader thread waits for.
            is_other = name.startswith("_") or name in ("defaults", "reading")
            if not is_other and "tensor(" not in text:
                values[f"{owner}.{name}"] = text[-60:]
    write_note("values", values)


def run_with_step_clock(script, pace):
    """Run the script with a training clock that advances by `pace` seconds with each step. Return
    the exit code.

    So a run with a time limit is repeatable. On rank 1 the training clock is 30 % faster, and all
    other clocks are 1,000 times as fast. So if a script computes learning rates from the clock of
    each rank, the two ranks have different learning rates.
    """
    if rank():
        speed_up_clocks()
    module = load(script)
    begun = note_steps(module)
    module.Clock.now_ms = lambda clock: 1e3 * pace * len(begun) * (1 + 0.3 * rank())
    return module.main([], os.environ)


def run_first_step(script):
    """Run the script up to the end of step 1, with constants in place of random numbers of torch.

    `note_steps` writes the gradients of the step. If the random numbers of an operation cannot be
    replaced, its name is written to notes/not-replaced<rank>.json.
    """
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
    """A mode that replaces random numbers of torch by constants: numbers from a uniform
    distribution by 0.5, those from a normal distribution by 0. Dropout does nothing.

    With random numbers, the sequences of a batch would get other numbers if the batch had another
    size or were on another rank. Raises NotImplementedError, with the name of the operation, if it
    cannot replace the random numbers of an operation.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        out = func(*args, **kwargs)
        if torch.equal(torch.get_rng_state(), state) and not has_generator(args, kwargs):
            return out  # it has drawn no numbers, for example attention without dropout
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "bernoulli":
            # Replace each number by its mean, which is the probability p. Dropout divides by this
            # probability, so it does nothing then. If no argument is p, then p is the tensor in
            # bernoulli(probabilities), and 0.5 in bernoulli_().
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
    """Train, and write down in which lines of the script the host reads a value that the device
    computes. On a GPU, the host would wait there.

    The run ends after training. The files in notes/ are these:
    reads        {number of a line: list of the steps in which the line made the host read a value}
    uncounted    lines whose reads are not counted; see `script_line`
    """
    F.one_hot = make_one_hot(F.one_hot)
    module = load(script)
    mode = ReadCounter(script)
    begin, step = module.Trainer.__init__, module.Trainer.train_step

    def make(run, *arguments):
        # The mode must see how tensors are created that would be on the host even in a run on a
        # GPU, so that it can mark them. Optimizers may create such tensors here.
        with mode, DeviceMarks():
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
    """Return a function that returns the same as torch's function `one_hot`.

    If the number of classes is given, torch's function checks its argument on a CPU. To do so, it
    reads the argument, which it does not do on a GPU. The returned function never reads it, so that
    no read is counted.
    """

    def one_hot_without_check(tensor, num_classes=-1):
        if num_classes < 0:
            return one_hot(tensor)
        return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()

    return one_hot_without_check


class ReadCounter(TorchDispatchMode):
    """A mode that records in which lines of the script, and in which steps, the host reads values
    of tensors.

    In this run all tensors are on the CPU, so the mode must find out which of them would be on a
    GPU. If a tensor is created without a device, as by torch.rand(1), it is on the host even in a
    run on a GPU. So is what is computed only from such tensors. These tensors get the attribute
    made_on_host, and reading them does not count. See also `DeviceMarks`.

    step         number of the current step; 0: training has not begun, so no reads are counted
    reads        {number of a line: set of the steps in which it made the host read a value}
    uncounted    set of lines whose reads are not counted; see `script_line`
    """

    # Operations for which the host reads a value of a tensor. Many of them have a result whose
    # size depends on the values.
    OPERATIONS = {
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
        "unique_consecutive", "equal", "bincount",
    }  # fmt: skip

    def __init__(self, script):
        super().__init__()
        self.script = str(script)
        self.step = 0
        self.reads = {}
        self.uncounted = set()
        # __torch_dispatch__ does not see that these methods read a tensor on a CPU, so they are
        # replaced by methods that count.
        names = "tolist", "numpy", "cpu", "to"
        self.methods = {name: getattr(torch.Tensor, name) for name in names}
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, self.counting(method))

    def restore(self):
        """Give torch.Tensor its own methods again."""
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, method)

    def counting(self, method):
        # Return a method that does the same as a method of torch.Tensor, and counts the call as a
        # read if this mode is active.
        def read(tensor, *arguments, **named):
            is_active = torch.utils._python_dispatch._get_current_dispatch_mode() is self
            # x.to("cpu") is counted. x.to(device) is not: on a GPU it may be a copy to the device,
            # for which the host does not wait.
            texts = [value for value in (*arguments, *named.values()) if isinstance(value, str)]
            reads = method is not self.methods["to"] or "cpu" in texts
            if is_active and reads and not hasattr(tensor, "made_on_host"):
                self.note()
            return method(tensor, *arguments, **named)

        return read

    def note(self):
        # Record a read in the line of the script that is being executed.
        line, depends_on_device = script_line(self.script)
        if self.step and depends_on_device:
            self.uncounted.add(line)
        elif self.step:
            self.reads.setdefault(line, set()).add(self.step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        name = func.overloadpacket.__name__
        # on_host: the result would be on the host even in a run on a GPU. That is so if all inputs
        # would be there, or if there are no inputs. lift_fresh is the last operation of
        # torch.tensor; its input has no mark.
        on_host = name == "lift_fresh" or all(hasattr(t, "made_on_host") for t in given)
        # x[mask] has as many rows as the mask has true values, so the host must count them.
        has_mask = name in ("index", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        # For x[mask] = 0, nothing must be counted: where the mask is true, the device fills in a
        # number of the host.
        fills = name == "index_put_" and args[2].numel() == 1 and hasattr(args[2], "made_on_host")
        counts_trues = has_mask and not fills
        if not on_host and (counts_trues or name in self.OPERATIONS):
            self.note()
        for t in tree_leaves(out):
            if torch.is_tensor(t):
                if on_host:
                    t.made_on_host = True
                elif hasattr(t, "made_on_host"):
                    # The operation has written a value of the device into the tensor.
                    del t.made_on_host
        return out


class DeviceMarks(TorchFunctionMode):
    """A mode that removes the mark made_on_host from a new tensor if the script has given a
    torch.device for it, as in torch.rand((), device=x.device).

    ReadCounter has set the mark, because it cannot see whether a device was given.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = not any(torch.is_tensor(value) for value in args)
        names_device = isinstance((kwargs or {}).get("device"), torch.device)
        if is_new and names_device and hasattr(out, "made_on_host"):
            del out.made_on_host
        return out


class CompileCounter:
    """Replaces torch.compile. A function is traced as by torch.compile, but no code is generated.
    What would be compiled is recorded.

    place: what the run is doing, such as "step 5". While it is empty, compiling is allowed and is
    not recorded. found: list of (place, number of a line of the script, why it is compiled again).
    The reason is a message of torch; it is empty if there is none.
    """

    def __init__(self, script):
        self.script = str(script)
        self.place = ""
        self.found = []
        self.reasons = []  # what torch has logged about recompiling since `backend` was last called
        self.compile = torch.compile
        torch.compile = self.replacement
        torch._logging.set_logs(recompiles=True)
        handler = logging.Handler()
        handler.emit = lambda record: self.reasons.append(record.getMessage())
        logging.getLogger("torch._dynamo.guards.__recompiles").addHandler(handler)

    def replacement(self, model=None, **named):
        # What the script calls as torch.compile. Arguments that decide what is traced are kept.
        kept = {name: named[name] for name in named.keys() & {"fullgraph", "dynamic", "disable"}}
        return self.compile(model, backend=self.backend, **kept)

    def backend(self, graph, _):
        # torch.compile calls this function with each graph that it has traced. It returns the
        # function that executes the graph, here without compiling it.
        line, depends_on_device = script_line(self.script)
        if self.place and not depends_on_device:
            self.found.append((self.place, line, self.reasons[-1] if self.reasons else ""))
        self.reasons.clear()
        return graph.forward


def script_line(script):
    """Return (the number of the line of the script that is being executed, depends_on_device).

    The number is 0 if train() or warm_up() has called no other function of the script.
    depends_on_device is True if one of the called functions asks for the kind of device, for
    example by `x.is_cuda`. On a GPU, such a function may call something else, so it is not known
    whether the line would be executed. train_step and the methods of the whole model are left out:
    they may contain the name of a device for another reason, such as torch.autocast("cuda").
    """
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
    # Return the texts that a code object contains as constants.
    return {each for each in code.co_consts if isinstance(each, str)}


def run_compiled(script):
    """Train and validate, and write to notes/compiled<rank>.json what torch.compile would compile
    after the warm-up: the list `found` of a CompileCounter. The run ends after training.

    The first step and the first validation may compile. If there is a warm-up, the first step is a
    step of the warm-up.
    """
    counter = CompileCounter(script)
    module = load(script)
    begun = []  # for each step and validation so far, the name that `within` has got

    def within(method, name):
        # Return a method that does the same, and sets counter.place while it runs. The method's
        # first call may compile, so the place is empty then. name: such as "step {}", where {}
        # stands for the number of the step
        def call(run, *arguments):
            again = name in begun
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
    # The warm-up is there to compile, so forget what it has compiled.
    module.warm_up = lambda run: [warm_up(run), counter.found.clear()]
    kind.train_step = within(kind.train_step, "step {}")
    kind.validate = within(kind.validate, "a validation")
    kind.export_and_score = end
    return module.main([], os.environ)


def run_with_opposite_results(script):
    """Run the script with validations that return a low loss where the loss is high, and the other
    way round. Return the exit code. No weight may depend on the results of validations."""
    module = load(script)

    def opposite(result, *_):
        # This function may be called twice for a validation; see `call_after`. A loss of 50 nats or
        # more has already been replaced.
        loss, bpb, *rest = result
        return (100 - loss, 100 - bpb, *rest) if loss < 50 else result

    call_after(module, module.Validation, "evaluate", opposite)
    return module.main([], os.environ)


# === The model with a run's artifact ===
def look_inside(script, look, full):
    """Load the artifact of another run into the model, examine weights and artifact, and end.

    full: the folder of the other run, which has saved a checkpoint after each step. The dict of all
    that was found is written to notes/facts<rank>.json. Its entries are
    - "foreign": names of the tensors in the artifact that the model does not have;
    - "gaps" and "shifts": see `find_gaps` and `find_shifts`;
    - what find_untrained, find_average and find_score_loss return;
    - what look(module, run, stored) returns. look: a function. module: the script. run: its
      Trainer, which has not trained. stored: {name: tensor} as `unpack` returns it.

    If `unpack` fails, the dict is {"unpack": the error as text}.
    """
    module = load(script)

    @torch.no_grad()
    def train(run):
        # The initial weights, those that the other run has exported, and those in its artifact.
        begun = {name: p.clone() for name, p in run.model.named_parameters() if p.requires_grad}
        exported = torch.load(full / "final_model.pt", "cpu", weights_only=True)
        # unpack() needs shapes and dtypes. It gets zeros, so that it cannot return the weights
        # without reading them from the artifact.
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
        # find_facts computes training losses, for which the model may need a tensor that the
        # artifact leaves out. Such a tensor keeps the value that it had after the last step.
        run.model.load_state_dict(after[-1] | exported, strict=False)
        run.model.load_state_dict(present, strict=False)
        facts |= look(module, run, stored)
        write_note("facts", facts)
        os._exit(0)

    module.Trainer.train = train
    return module.main([], os.environ)


def is_left_out(t):
    """Return True if a tensor that unpack() returns was not stored in the artifact. All its numbers
    are nan then."""
    return t.is_floating_point() and t.numel() > 0 and bool(t.isnan().all())


def find_gaps(stored, exported, least=0.0):
    """Return {name: norm of (stored tensor - exported tensor), divided by the exported one's norm}.

    stored, exported: {name: tensor}. least: the smallest distance that two values of a quantized
    tensor can have. Rounding changes each number by up to least / 2, so this much of each
    difference does not count: after a few steps with low learning rates, the weights themselves may
    be as small as that.
    """
    gaps = {}
    for name, t in exported.items():
        size = t.double().norm().item()
        if size and name in stored and stored[name].shape == t.shape:
            apart = (stored[name].double() - t.double()).abs() - least / 2
            gaps[name] = apart.clamp(min=0.0).norm().item() / size
    return gaps


def find_shifts(stored, exported):
    """Return {name: the shift of a stored matrix}: 1 if packing has shifted all its numbers by the
    same amount, and about 0 if it has only rounded them.

    stored, exported: {name: tensor}. The error of a matrix is the stored minus the exported matrix.
    Its shift is the mean of the error, divided by the error's root mean square. Matrices with fewer
    than 500 numbers and matrices with a tiny error are left out.

    An error that depends on the weights is no shift, for example if small weights are stored as 0.
    So the part of the error that is a linear function of the weights is subtracted first.

    If the weights in a row are closer together than two values that can be stored, rounding may
    move all of them in the same direction. This looks like a shift, so the result is 0 if the
    weights in most rows are that close together.
    """
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
                # Fit a straight line to the error as a function of the weight, and take its value
                # at a weight of 0. If all weights are far from 0, this value is too uncertain, and
                # the mean of the error is used.
                slope = (error * spread).sum() / spread.square().sum().clamp(min=1e-30)
                shift = shift - slope * weights.mean()
            # Estimate the distance of two values that can be stored: rounding errors are spread
            # evenly over this distance. The largest and the smallest 5 % of the errors are left
            # out, because they may be those of clipped weights.
            low, high = np.quantile(error.numpy(), (0.05, 0.95))
            level = max(float(high - low) / 0.9, float(size))
            in_rows = t.double().flatten(0, -2).std(-1, correction=0).median()
            shifts[name] = float(shift.abs() / size) if in_rows > 0.5 * level else 0.0
    return shifts


def find_average(states, exported):
    """Find the weighted sum of the states that is nearest to the exported weights (least squares).
    If these are an average of the weights after several steps, its factors are found.

    states: the initial weights and the weights after each step, each as {name: tensor}. Return a
    dict, which is empty if there are no weights to compare:
    average       the factor of each state in the sum
    last_equal    for each state, the index of the last state that is equal to it. Of equal states,
                  only the last one has a factor; that of the other ones is 0
    rest          distance between the sum and the exported weights, divided by the distance between
                  the first and the last state
    """
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
    # A step with a learning rate of 0 does not change the weights, so states may be equal.
    last_equal = []
    for column in columns:
        equal = [i for i, other in enumerate(columns) if torch.equal(column, other)]
        # If a state contains nan, it is not even equal to itself.
        last_equal.append(equal[-1] if equal else len(last_equal))
    different = sorted({*last_equal})
    matrix = torch.stack([columns[i] for i in different], 1)
    way = float((columns[-1] - columns[0]).norm())
    solution = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution
    rest = float((matrix @ solution - wanted[:, None]).norm()) / max(way, 1e-30)
    shares = dict(zip(different, solution.flatten().tolist(), strict=True))
    average = [shares.get(i, 0.0) for i in range(len(columns))]
    return {"average": average, "last_equal": last_equal, "rest": rest}


def find_score_loss(run, after):
    """Compute the loss of the sequences of the last training step from the logits, in eval mode and
    with the weights from before that step. Return {"score_losses": list of losses}.

    If the model has buffers in its state, there are two losses: with the buffers from before the
    step, and with those from after it, because a step may set a buffer before it uses it. Return {}
    if the losses cannot be computed. after: the model's state after each step.
    """
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
    except Exception:  # for example because `logits` has other arguments in an edited script
        return {}
    finally:
        run.step = 0


def find_untrained(run, begun, trained, exported):
    """Find weights that are not trained, or not trained in the usual way. Return a dict of lists:
    untrained    texts: the names of weights that training does not change, of weights that are in
                 two optimizers, and a description of each tensor that an optimizer trains although
                 it belongs to no part of the Trainer
    kept         names of weights that training changes, but that are exported with their initial
                 values

    begun, trained, exported: {name: tensor} of the initial weights, of those after the last step,
    and of the exported ones.
    """
    names = [name for name in begun if name in exported and begun[name].numel()]
    unchanged = [name for name in names if torch.equal(begun[name], exported[name])]
    kept = [
        name for name in unchanged if not torch.equal(begun[name], trained.get(name, begun[name]))
    ]
    held = [p for group in run.groups for p in group["params"]]  # all that the optimizers train
    # {name of a parameter: how often it is in an optimizer}
    times = {name: sum(p is q for q in held) for name, p in run.model.named_parameters()}
    no_one = "no torch.optim.Optimizer of Trainer.parts has it"
    untrained = []
    for name in unchanged:
        if name not in kept:
            untrained.append(name if times[name] else f"{name} ({no_one})")
    untrained += sorted(f"{name} (in two optimizers)" for name, n in times.items() if n > 1)
    # A part of the Trainer other than the model may be a module with parameters of its own, and an
    # optimizer may train these. A tensor belongs to a part if the part's state_dict has it.
    saved = tree_leaves([part.state_dict() for part in run.parts.values()])
    places = {t.data_ptr() for t in saved if torch.is_tensor(t)}
    others = [p for p in held if p.data_ptr() not in places]
    words = "in an optimizer, but no nn.Parameter of the model or of another part"
    untrained += [f"a tensor of shape {tuple(p.shape)} ({words})" for p in others]
    return {"untrained": untrained, "kept": kept}


def find_facts(module, run, stored, length):
    """Return a dict of what judge.model_verdicts judges: the logits, the score, and on what they
    depend. It is a `look` function; see `look_inside`.

    length: the script's own TRAIN_SEQ_LEN, which is longer than the tiny sequences of the runs.
    These are the keys:
    nats        mean loss in nats of all targets of the validation set, computed from the logits
    targets     number of targets of the validation set
    tensors     number of tensors that are stored in the artifact
    counted     [number of bytes, number of targets] of the script's own score
    wide        see `find_wide`
    batch       see `compare_losses`
    sight       see `find_sight`. If it was not possible to build a model for sequences of `length`
                tokens, tiny sequences were examined, and sight["short"] says why
    twice, unused    see `find_unused`
    """
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
    facts |= find_wide(module, run)
    facts["batch"] = compare_losses(run)
    model.eval()
    torch.manual_seed(0)
    # The weights are random from here on.
    randomize(model)
    try:
        longer = type(model)(replace(run.config, train_seq_len=length), model.dtype).eval()
        longer.load_state_dict(present, strict=False)
        randomize(longer)
        rows = tokens.repeat(1 + 2 * length // len(tokens))[: 2 * length].view(2, length)
        facts["sight"] = find_sight(longer, rows, run.config.vocab_size)
    except Exception as error:  # for example because the edited model has another constructor
        sight = find_sight(model, x[:2], run.config.vocab_size)
        facts["sight"] = sight | {"short": repr(error)[:200]}
    facts |= find_unused(model, x, present, run.config.vocab_size)
    return facts


def val_path(run):
    # Return the path of the validation shard.
    return Path(run.config.data_path, VAL)


def val_tokens(run):
    # Return all tokens of the validation shard, as an int64 tensor.
    return torch.from_numpy(read_shard(val_path(run)).astype(np.int64))


def randomize(model):
    """Add random numbers to all parameters.

    Some parameters are 0, for example the initial weights of an output projection. With them, the
    logits would not depend on tokens or tensors on which they depend otherwise.
    """
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.3)


def score_artifact(module, run, stored):
    """Let the run compute its own final score of a model with the weights `stored`.

    Return the score in nats per target. The functions that export_and_score calls are replaced: it
    packs nothing, gets `stored` in place of an unpacked artifact, logs no score and writes no
    files.
    """
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
    """Return a list that is updated by each evaluation. After it, the list has the sums over all
    ranks of nats, bytes and targets (and more). Before the first evaluation it is empty."""
    sums = []

    def note(_, _runtime, tensor):
        # A float64 tensor with more than three numbers is that of Validation.evaluate.
        if tensor.dtype == torch.float64 and tensor.numel() > 3:
            sums[:] = tensor.tolist()

    call_after(module, module.Runtime, "all_reduce", note)
    return sums


def compare_losses(run):
    """Compare the training loss of several sequences in one batch with the losses of each of them
    alone. Return a dict, which is empty if the losses cannot be computed:
    targets    list of the number of targets in each sequence
    loss       training loss of all sequences in one batch
    mean       mean of the training losses of each sequence alone
    """
    try:
        with closing(run.batches()) as batches:
            copies = [(batch.x.clone(), batch.y.clone()) for batch in islice(batches, 4)]
        x, y = map(torch.cat, zip(*copies, strict=True))
        run.model.train()
        with WithoutRandomNumbers():
            losses = [float(run.model(x[i : i + 1], y[i : i + 1])) for i in range(len(x))]
            loss = float(run.model(x, y))
    except Exception:  # for example because `forward` has other arguments in an edited script
        return {}
    return {"targets": (y >= 0).sum(1).tolist(), "loss": loss, "mean": sum(losses) / len(losses)}


def find_wide(module, run):
    """Build a new model whose activations are bfloat16, and run it.

    Return {"wide": {"blocks": numbers of the blocks whose output is float32, "score": name of the
    dtype of the score}}. If the model does not run, return {"wide": the error as text}.
    """
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
    except Exception as error:  # for example because the model has no blocks, or needs CUDA
        return {"wide": repr(error)[:200]}
    return {"wide": {"blocks": sorted({*wide}), "score": str(nats.dtype)}}


def find_sight(model, x, vocab_size):
    """Find out on which tokens the logits depend.

    x (2, length): two sequences. A position is the index of a token in both sequences, one after
    the other, so from 0 to 2 * length - 1. Only some positions are tested. Return a dict:
    leaks      each position p with this property: if all tokens after p are changed, a logit at p
               or before p changes
    ignored    positions whose logits do not depend on their own token
    length     number of tokens of a sequence
    random     True if two equal calls return different logits, in which case nothing is tested;
               otherwise, the dict does not have this key
    """
    length = x.size(1)
    last = 2 * length - 1
    positions = {*range(FIRST_POSITIONS), length // 2, length - 2, length - 1, length, last - 1}
    positions |= {*torch.randint(last, (RANDOM_POSITIONS,)).tolist()}
    positions &= {*range(last)}  # if sequences are short, some of these positions do not exist
    plain = model.logits(x.clone()).flatten(0, 1)
    if not torch.equal(model.logits(x.clone()).flatten(0, 1), plain):
        return {"leaks": [], "ignored": [], "length": length, "random": True}
    # In an edit with attention inside documents only, other tokens may mean documents of other
    # lengths, and so matrices of other shapes. Then sums are rounded differently. This is no leak.
    rounding = 1e-5 * max(1.0, plain.abs().max().item())
    leaks = []
    ignored = []
    for position in sorted(positions):
        changed = x.flatten().clone()
        changed[position + 1 :] = torch.randint(vocab_size, (last - position,))
        gap = model.logits(changed.view_as(x)).flatten(0, 1)[: position + 1] - plain[: position + 1]
        # The condition is also true if the gap is nan.
        if not gap.abs().max() < rounding:
            leaks.append(position)
        changed = x.flatten().clone()
        changed[position] = (changed[position] + 1) % vocab_size
        if torch.equal(model.logits(changed.view_as(x)).flatten(0, 1)[position], plain[position]):
            ignored.append(position)
    return {"leaks": leaks, "ignored": ignored, "length": length}


def find_unused(model, x, stored, vocab_size):
    """Find tensors of the artifact that need not be stored. Return a dict of two lists of names:
    twice     tensors of the model that share memory with another tensor, so both are stored
    unused    tensors that have no effect on the logits. Tensors of integers are not tested

    stored: {name: tensor} of the artifact. A mixture of experts may use an expert for no token.
    With other weights and tokens it may use the expert, so up to TRIALS sets of weights are tried.
    """
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


# === Tests of the final score: they change the validation shard and leave out targets ===
# A target that is set to -100 is not scored. The tests are `look` functions; see `look_inside`.
def find_late(module, run, stored):
    """Find out whether the losses of targets change with the tokens that follow them.

    Return {"late": list of [n, change]}. n: number of targets that are scored, from the first one
    on. change: difference between the sums of their losses, in nats, with two different choices of
    all later tokens. There are up to four n. All later tokens have token ids that do not occur
    before, so that they can be recognized; they are inputs, but they are not scored as targets.
    """
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
        # If more targets were scored, the scorer does not take its targets from fill_xy(). Then it
        # cannot be tested in this way.
        if seen and all(each and each[2] < end for each in seen):
            found.append([end - 1, abs(seen[0][0] - seen[1][0])])
    return {"late": found}


class TargetChooser:
    """Chooses which targets of the validation set are scored. The other ones are set to -100.

    The attribute `choice` says which ones are scored: "first": only the first one of the validation
    set, "last": only the last one, "others": all but the last one, "all": all.
    """

    def __init__(self, module):
        self.choice = "all"
        self.batches = set()  # for each batch so far, the number of its first sequence
        # Values of the first target (if that is the choice) or of the last target, as fill_xy has
        # set them. There should be one value.
        self.chosen = set()
        call_after(module, module.BatchPlan, "fill_xy", self.hide)

    def hide(self, _, _plan, rows, _tokens, _x, y):
        # fill_xy has just written the targets of the sequences `rows` into y; see `call_after`.
        # Places without a target are -100.
        self.batches.add(rows.start)
        targets = y.reshape(-1)  # a view, so y changes with it
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
    """Return {"shares": [s1, s2, s3]}, three sums of probabilities.

    Each sum is over all token ids that one target could have. The probabilities are those that the
    scorer gives to the target:
    s1    the last target of the validation set, if it is the only target that is scored
    s2    the first target, if it is the only target that is scored
    s3    the last target, if all other targets are scored, too

    If a scorer predicts a token only from earlier tokens, each sum is 1, whatever its method is.
    (s1 and s2 may be a little smaller, because token ids without bytes are left out.) If the scorer
    also uses the token itself, a sum may be larger than 1. A sum is nan if it cannot be computed,
    for example because the scorer needs more targets or scores them in another order. A sum that
    exceeds 2 is not computed further.
    """
    tokens = read_shard(val_path(run))
    sums = record_sums(module)
    chooser = TargetChooser(module)
    score_artifact(module, run, stored)  # fills chooser.batches

    def find_nats(choice, place, token):
        """Return the sum of the losses, in nats, of the targets of this choice if `token` replaces
        the token at `place`. choice: see TargetChooser.

        Return infinity if the scored targets have no bytes, and nan if the score fails or has other
        targets than the chosen ones.
        """
        changed = tokens.copy()
        changed[place] = token
        write_shard(val_path(run), changed)
        chooser.choice = choice
        chooser.chosen.clear()
        sums[:] = [math.nan]
        try:
            loss = score_artifact(module, run, stored)
        except ZeroDivisionError:
            return math.inf  # bits per byte cannot be computed for a token without bytes
        except Exception:
            return math.nan
        if token not in chooser.chosen or (choice != "all" and chooser.chosen != {token}):
            return math.nan
        # A score is a mean. With one target, it is the loss of this target.
        return loss if choice in ("first", "last") else sums[0]  # sums[0]: nats of all targets

    def add_shares(choice, place, known=0.0):
        # Return the sum of the probabilities of all token ids at `place`.
        # known: nats of those targets of this choice that are not the target at `place`
        total = 0.0
        for token in range(run.config.vocab_size):
            # known - find_nats(...) is minus the loss of the target at `place`. A wrong scorer may
            # make it so large that exp() would raise an error.
            total += math.exp(min(known - find_nats(choice, place, token), 100.0))
            if not total <= 2:
                break  # the sum is too large already, or it is nan
        return total

    others = find_nats("others", -1, int(tokens[-1]))
    shares = [add_shares("last", -1), add_shares("first", 1), add_shares("all", -1, others)]
    return {"shares": shares}
