"""What verify.py looks at inside a tiny run: functions that are called in its new processes.

What they use of an edited train_gpt.py: Trainer.train_step, .train, .export_and_score, .groups,
.config and .model, Validation.evaluate, BatchPlan.widen, Clock.now_ms, Runtime.all_reduce,
seed_step, unpack, pack_and_write, log_score, write_results, SMALL, "parts" of a checkpoint;
logits, forward and blocks of the model.
"""

import json
import math
import os
import random
import zlib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tinyruns import VAL, VAL_ROWS, bytes_of_targets, load, read_shard, write_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

PROBES = 12  # weights with which a tensor must have had no effect before it is called unused


def rank():
    return int(os.environ.get("RANK", 0))


def random_state():
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def call_after(module, base, name, act):
    """From now on act(result, self, *arguments) follows a method of `base` and its subclasses, and
    may return another result."""
    inside = 0

    def extend(method):
        def extended(*arguments, **named):
            nonlocal inside
            inside += 1  # a method may call that of its base
            try:
                result = method(*arguments, **named)
            finally:
                inside -= 1
            other = None if inside else act(result, *arguments)
            return result if other is None else other

        return extended

    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        if issubclass(kind, base) and name in vars(kind):
            setattr(kind, name, extend(vars(kind)[name]))


# === Whole runs ===
def run_main(script):
    """The same as `python script`, without the time for imports."""
    module = load(script)
    note_steps(module)
    return module.main([], os.environ)


def note_steps(module):
    """Writes steps<rank>.jsonl: what ranks must have alike after a step, and what was stepped.

    Writes first<rank>.pt: the gradients that the first step gives to optimizers."""
    step = module.Trainer.train_step
    seed_step = module.seed_step
    seeded = []
    optimizers = {}
    gradients = {}

    def seed_and_note(*arguments):
        seed_step(*arguments)
        seeded[:] = random_state()

    def train_step(run, *rest):
        first = not Path(f"first{rank()}.pt").exists()
        names = {p: name for name, p in run.model.named_parameters()}
        stepped = []

        def note(optimizer, *_):
            kind = type(optimizer).__name__
            number = sum(each.split()[0] == kind for each in optimizers.values()) + 1
            name = optimizers.setdefault(id(optimizer), f"{kind} {number}" if number > 1 else kind)
            groups = optimizer.param_groups
            stepped.append((name, [float(each["lr"]) for each in groups]))
            for p in [p for each in groups for p in each["params"] if first and p in names]:
                if p.grad is not None:
                    gradients.setdefault(names[p], p.grad.detach().clone())

        hook = register_optimizer_step_pre_hook(note)
        step(run, *rest)
        hook.remove()
        drawn = seeded != random_state()  # in this step
        if first:
            torch.save(gradients, f"first{rank()}.pt")
        state = [*run.model.parameters(), *run.model.buffers()]
        crc = zlib.crc32(b"".join(t.detach().numpy().tobytes() for t in state))
        with open(f"steps{rank()}.jsonl", "a") as file:
            print(json.dumps({"crc": crc, "drawn": drawn, "stepped": stepped}), file=file)

    module.seed_step = seed_and_note
    module.Trainer.train_step = train_step


def run_clocked(script, pace):
    """A step takes `pace` seconds, and longer on rank 1: a run to a cap is repeatable."""
    module = load(script)
    note_steps(module)
    step = module.Trainer.train_step
    done = 0

    def train_step(run, *rest):
        nonlocal done
        done += 1  # before the step, as a real clock is ahead of what all ranks know
        step(run, *rest)

    module.Trainer.train_step = train_step
    module.Clock.now_ms = lambda clock: 1e3 * pace * done * (1 + 0.3 * rank())
    return module.main([], os.environ)


def run_blind(script):
    """Validations tell the run the opposite: nothing may be chosen by them."""
    module = load(script)

    def opposite(result, *_):
        loss, bpb, *rest = result
        return 100 - loss, 100 - bpb, *rest

    call_after(module, module.Validation, "evaluate", opposite)
    return module.main([], os.environ)


def run_first_step(script):
    """Ends after step 1. Writes losses<rank>.pt: what the gradients of all losses that the model
    returned are on average, and how many targets the mean of each cross-entropy had."""
    module = load(script)
    step = module.Trainer.train_step
    cross_entropy = F.cross_entropy
    counts = defaultdict(set)  # of targets, by size of the batch
    means = {}
    losses = 0

    def count(logits, target, *rest, **named):
        if named.get("reduction", "mean") == "mean" and not target.is_floating_point():
            counts[target.numel()].add(int((target != -100).sum()))
        return cross_entropy(logits, target, *rest, **named)

    def note(model, _, loss):
        nonlocal losses
        if not (torch.is_tensor(loss) and loss.ndim == 0 and loss.requires_grad):
            return
        losses += 1
        params = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
        options = {"retain_graph": True, "materialize_grads": True}
        grads = torch.autograd.grad(loss, params.values(), **options)
        for name, grad in zip(params, grads, strict=True):
            means[name] = means.get(name, 0) + grad

    def train_step(run, *rest):
        F.cross_entropy = count
        hook = run.model.register_forward_hook(note)
        step(run, *rest)
        hook.remove()
        found = {name: grad / losses for name, grad in means.items()}
        torch.save((found, {size: [*each] for size, each in counts.items()}), f"losses{rank()}.pt")
        os._exit(0)

    module.Trainer.train_step = train_step
    return module.main([], os.environ)


# === The model with a run's artifact ===
def look_inside(script, look, full):
    """Writes facts.json: what look(module, run, stored) finds with the artifact of `full` in the
    model, and which weights are not trained."""
    module = load(script)

    @torch.no_grad()
    def train(run):
        begun = {name: p.clone() for name, p in run.model.named_parameters() if p.requires_grad}
        exported = torch.load(full / "final_model.pt", "cpu", weights_only=True)
        kinds = {name: torch.zeros_like(t) for name, t in exported.items()}  # without their values
        stored = module.unpack((full / "final_model.int8.ptz").read_bytes(), kinds)
        foreign = sorted(run.model.load_state_dict(stored, strict=False).unexpected_keys)
        facts = look(module, run, stored)
        last = max((full / "checkpoints" / full.name).glob("step_*.pt"))
        trained = torch.load(last, "cpu", weights_only=True)["parts"]["model"]
        facts |= find_untrained(run, begun, trained, exported) | {"foreign": foreign}
        Path("facts.json").write_text(json.dumps(facts))
        os._exit(0)

    module.Trainer.train = train
    return module.main([], os.environ)


def find_untrained(run, begun, trained, exported):
    """Names of weights that training leaves alone, and of those of which only the export does."""
    both = [name for name in begun if name in exported and begun[name].numel()]
    same = [name for name in both if torch.equal(begun[name], exported[name])]
    kept = [name for name in same if not torch.equal(begun[name], trained.get(name, begun[name]))]
    untrained = [name for name in same if name not in kept]
    held = [p for group in run.groups for p in group["params"]]
    twice = {name for name, p in run.model.named_parameters() if sum(p is q for q in held) > 1}
    untrained += [f"{name} (in two optimizers)" for name in sorted(twice)]
    others = [p for p in held if not any(p is q for q in run.model.parameters())]
    words = "in an optimizer, but no nn.Parameter of the model"
    untrained += [f"a tensor of shape {tuple(p.shape)} ({words})" for p in others]
    return {"untrained": untrained, "kept": kept}


def find_facts(module, run, stored):
    model = run.model
    model.eval()
    tokens = torch.from_numpy(read_shard(val_path(run)).astype(np.int64))
    x, y = tokens[:-1].view(VAL_ROWS, -1), tokens[1:].view(VAL_ROWS, -1)
    logits = torch.cat([model.logits(row[None].clone()) for row in x])
    nats = F.cross_entropy(logits.flatten(0, 1).double(), y.flatten()).item()
    facts = {"nats": nats, "targets": y.numel(), "tensors": len(stored)}
    facts |= count_bytes(module, run, stored)
    facts["wide"] = find_wide_blocks(module, run, x[:2])
    torch.manual_seed(0)
    shake(model)
    facts["leaks"] = find_leaks(model, x[:2], run.config.vocab_size)
    facts["unused"] = find_unused(model, x, stored, run.config.vocab_size)
    model.load_state_dict(stored, strict=False)
    facts["losses"] = compare_losses(model, x[:16], y[:16])
    return facts


def score(module, run, stored):
    """The run's own final score, (nats, bits per byte, ms), of an artifact that holds `stored`."""
    found = []
    module.pack_and_write = lambda *_: b""
    names = run.model.state_dict().keys() & stored.keys()
    module.unpack = lambda *_: {name: stored[name].clone() for name in names}
    module.log_score = lambda _, *result: found.append(result)
    module.write_results = lambda *_: None
    run.export_and_score()
    return found[-1]


def val_path(run):
    return Path(run.config.data_path, VAL)


def shake(model):
    for p in model.parameters():  # zeros would hide what depends on what
        p.add_(torch.randn_like(p), alpha=0.3)


def count_bytes(module, run, stored):
    """What the final score counts, and what widen() gave it: targets, those without text, bytes."""
    given = {}

    def count(_, _plan, rows, _tokens, x, y):
        xs, ys = (np.asarray(t)[: len(rows)] for t in (x, y))
        sizes = bytes_of_targets(run.config.data_path, xs[ys >= 0], ys[ys >= 0])
        given[rows.start] = [len(sizes), int((sizes == 0).sum()), int(sizes.sum())]

    call_after(module, module.BatchPlan, "widen", count)
    sums = note_sums(module)
    score(module, run, stored)
    run.model.eval()
    return {"counted": sums[1:3], "given": np.sum([*given.values()], 0).tolist()}


def note_sums(module):
    """A list that always has the sums of the last evaluation: nats, bytes, targets, ..."""
    sums = []

    def note(_, _runtime, tensor):
        if tensor.dtype == torch.float64 and tensor.numel() > 3:
            sums[:] = tensor.tolist()

    call_after(module, module.Runtime, "all_reduce", note)
    return sums


def find_wide_blocks(module, run, x):
    """Where activations are bfloat16: the blocks whose output is not, and the type of the score. A
    text says why it did not run."""
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
    except Exception as error:  # of a model of another kind, or one that needs CUDA
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return {"blocks": sorted({*wide}), "score": str(nats.dtype)}


def find_leaks(model, x, vocab_size):
    """The positions whose logits change with later tokens, also with those of later rows."""
    plain = model.logits(x.clone()).flatten(0, 1)
    # Attention inside documents multiplies other shapes with other tokens: sums round otherwise.
    rounding = 1e-5 * max(1.0, plain.abs().max().item())
    leaks = []
    for end in range(1, x.numel(), max(1, x.numel() // 64)):
        changed = x.flatten().clone()
        changed[end:] = torch.randint(vocab_size, (x.numel() - end,))
        gap = model.logits(changed.view_as(x)).flatten(0, 1)[:end] - plain[:end]
        if not gap.abs().max() < rounding:  # also where it is nan
            leaks.append(end - 1)
    return leaks


def find_unused(model, x, stored, vocab_size):
    """{name: about how many bytes} of what is stored twice, or without an effect on logits.

    Routing may never choose a tensor by one set of weights, so it is tried with several."""
    state = model.state_dict()
    places = set()
    twice = []
    names = []
    for name in [name for name in stored if name in state and state[name].numel()]:
        if state[name].is_floating_point():
            (twice if state[name].data_ptr() in places else names).append(name)
            places.add(state[name].data_ptr())  # a tensor of two names is stored twice
    for trial in range(PROBES):
        tokens = x[:2] if trial == 0 else torch.randint(vocab_size, x.shape)
        plain = model.logits(tokens.clone())
        names = [name for name in names if has_no_effect(model, state[name], tokens, plain)]
        if not names:
            break
        shake(model)
    size = {name: len(zlib.compress(stored[name].half().numpy().tobytes())) for name in stored}
    return {name: size[name] for name in twice + names}


def has_no_effect(model, t, tokens, plain):
    was = t.clone()
    t.copy_(torch.randn_like(t))
    same = torch.equal(model.logits(tokens.clone()), plain)
    t.copy_(was)
    return same


def compare_losses(model, x, y):
    """The loss of some rows: in train mode (a mean of 16), in eval mode, and of the logits."""
    try:
        state = {name: t.clone() for name, t in model.state_dict().items()}
        plain = F.cross_entropy(model.logits(x.clone()).flatten(0, 1), y.flatten()).item()
        quiet = float(model(x.clone(), y.clone()))
        model.train()
        loud = [float(model(x.clone(), y.clone())) for _ in range(16)]
        model.load_state_dict(state)
    except Exception:  # a forward with other arguments
        return []
    return [sum(loud) / len(loud), quiet, plain]


# === What the score gives to all values of one token, added up ===
# Who predicts a token from those before it gives its values shares of 1 together, whatever the
# method. Each value is a whole evaluation, so both questions have a run of their own.
class LastToken:
    """The final score of validation splits that differ in their last token alone."""

    def __init__(self, module, run, stored):
        self.module = module
        self.run = run
        self.stored = stored
        self.tokens = read_shard(val_path(run))
        self.every = range(run.config.vocab_size)
        self.mark = min({*self.every} - {*self.tokens[:-1].tolist()})  # it stands nowhere else
        self.batches = set()  # the first rows of those that are scored
        self.hidden = None  # a token that is no target
        self.alone = False  # is the last token the only target?
        self.sums = note_sums(module)
        call_after(module, module.BatchPlan, "widen", self.hide)

    def hide(self, _, *call):
        _plan, rows, _tokens, _x, y = call  # of widen()
        self.batches.add(rows.start)
        if self.alone:
            places = np.flatnonzero(np.asarray(y).reshape(-1) >= 0)
            y.reshape(-1)[places[: len(places) - (rows.start == max(self.batches))]] = -100
        if self.hidden is not None:
            y[y == self.hidden] = -100

    def nats_with(self, token):
        """The nats of all targets where the last one is `token`."""
        write_shard(val_path(self.run), np.append(self.tokens[:-1], token))
        mean = score(self.module, self.run, self.stored)[0]
        targets = len(self.tokens) - 1 - (self.hidden is not None)
        return mean * (self.sums[2] if self.sums else targets)  # of the score that was returned


def add_shares(module, run, stored):
    """Of the last token among all targets."""
    last = LastToken(module, run, stored)
    totals = np.array([last.nats_with(token) for token in last.every])
    last.hidden = last.mark
    return {"sum": float(np.exp(last.nats_with(last.mark) - totals).sum())}


def add_shares_alone(module, run, stored):
    """Of the last token as the only target, of values that have text: the choice of the best of
    several scores cannot hide behind other targets. nan for a score that needs more targets."""
    last = LastToken(module, run, stored)
    last.nats_with(last.mark)  # finds the batches
    last.alone = True
    before = np.full(len(last.every), last.tokens[-2])
    sizes = bytes_of_targets(run.config.data_path, before, np.array(last.every))
    total = math.nan
    with suppress(Exception):
        total = sum(math.exp(-last.nats_with(token)) for token in np.flatnonzero(sizes))
    return {"alone": total}
