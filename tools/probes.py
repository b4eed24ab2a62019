"""What verify.py looks at inside a tiny run: functions that are called in its new processes.

What they use of an edited train_gpt.py: Trainer.train_step, .train, .export_and_score, .batches,
.groups, .parts, .config and .model, Validation.evaluate, BatchPlan.fill_xy, Clock.now_ms,
Runtime.all_reduce, seed_step, unpack, pack_and_write, log_score, write_results, mean_nats,
KEEP_FLOAT_MAX_NUMEL, "parts" of a checkpoint; logits, forward, dtype and blocks of the model.
"""

import json
import math
import os
import random
import sys
import threading
import time
import zlib
from collections import deque
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cli import write_shard
from tinyruns import VAL, VAL_ROWS, load, read_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

PROBES = 12  # weights with which a tensor must have had no effect before it is called unused
NEAR = 24  # first places of a row that are looked at, one after the other
DRAWN = 12  # other places, at random
CONTROLS = 3  # the first tokens: unknown, begin, end


def rank():
    return int(os.environ.get("RANK", 0))


def write_note(name, value):
    """For verify.py: notes/<name><rank>.json"""
    Path("notes").mkdir(exist_ok=True)
    Path("notes", f"{name}{rank()}.json").write_text(json.dumps(value))


def random_states():
    """A checksum of each generator's state: Python's, numpy's, torch's."""
    _, numbers, *place = np.random.get_state()
    states = random.getstate(), (numbers.tolist(), place), torch.get_rng_state().tolist()
    return [zlib.crc32(repr(state).encode()) for state in states]


def call_after(module, base, name, act):
    """From now on act(result, self, *arguments) follows a method of `base` and its subclasses, and
    may return another result. It follows twice where a method calls that of its base."""

    def extended(method):
        def call(*arguments, **named):
            result = method(*arguments, **named)
            other = act(result, *arguments)
            return result if other is None else other

        return call

    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        if issubclass(kind, base) and name in vars(kind):
            setattr(kind, name, extended(vars(kind)[name]))


# === Whole runs ===
def run_noted(script):
    """The same as `python script`, without the time for imports. Notes what it does."""
    lines = set()  # of the script, that were executed
    opened = set()  # files, from Python

    def trace(frame, *_):
        if frame.f_code.co_filename != str(script):
            return None
        lines.add(frame.f_lineno)
        return trace

    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            opened.add(os.path.abspath(os.fsdecode(arguments[0])))

    threading.settrace(trace)
    sys.settrace(trace)
    module = load(script)
    note_steps(module)
    export = module.Trainer.export_and_score
    module.Trainer.export_and_score = lambda run: [note_values(run), export(run)]
    sys.addaudithook(note)
    code = module.main([], os.environ)
    sys.settrace(None)
    write_note("lines", sorted(lines))
    write_note("opened", sorted(opened))
    return code


def hurry():
    """All clocks of Python run 1,000 times as fast."""

    def hurried(clock):
        start = clock()
        return lambda: start + 1000 * (clock() - start)

    for name in ("time", "monotonic", "perf_counter", "process_time"):
        for suffix in ("", "_ns"):
            setattr(time, name + suffix, hurried(getattr(time, name + suffix)))


def run_hurried(script):
    hurry()
    return run_noted(script)


def note_steps(module):
    """Notes what ranks must have alike after a step, what was stepped and drawn; what trains what,
    and the gradients that the first step gives to optimizers. Returns a list that grows when a
    step begins, as a real clock is ahead of what all ranks know."""
    step = module.Trainer.train_step
    seed_step = module.seed_step
    seeded = []
    trains = {}
    begun = []

    def seed_and_note(*arguments):
        seed_step(*arguments)
        seeded[:] = random_states()

    def train_step(run, *rest):
        is_first = not begun
        begun.append(run.step)
        before = random_states()
        names = {p: name for name, p in run.model.named_parameters()}
        gradients = {}
        stepped = []

        def note(optimizer, *_):
            own = [name for name, part in run.parts.items() if part is optimizer]
            name = own[0] if own else type(optimizer).__name__
            groups = optimizer.param_groups
            stepped.append((name, [float(group["lr"]) for group in groups]))
            for p in [p for group in groups for p in group["params"] if is_first and p in names]:
                trains[names[p]] = f"{name} trains {names[p]} {tuple(p.shape)}"
                if p.grad is not None:
                    gradients.setdefault(names[p], p.grad.detach().clone())

        hook = register_optimizer_step_pre_hook(note)
        step(run, *rest)
        hook.remove()
        after = random_states()
        if is_first:
            write_note("trains", trains)
            torch.save(gradients, f"notes/first{rank()}.pt")
        state = [*run.model.parameters(), *run.model.buffers()]
        crc = zlib.crc32(b"".join(t.detach().numpy().tobytes() for t in state))
        words = {"crc": crc, "stepped": stepped, "drawn": seeded != after, "before": before}
        with open(f"notes/steps{rank()}.jsonl", "a") as file:
            print(json.dumps(words | {"after": after}), file=file)

    module.seed_step = seed_and_note
    module.Trainer.train_step = train_step
    return begun


def note_values(run):
    """Notes {place: end of its text} of plain values, and of collections of them: of the Trainer,
    of what it has, and of the modules."""
    things = {"Trainer": run}
    things |= {f"Trainer.{name}": thing for name, thing in vars(run).items() if name != "config"}
    things |= {f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()}
    kinds = bool, int, float, str, type(None), list, tuple, dict, set, deque
    values = {}
    for place, thing in things.items():
        for name, value in getattr(thing, "__dict__", {}).items():
            text = repr(value) if isinstance(value, kinds) else "tensor("
            # Of a module, an optimizer, the shards: what a reader waited for last may differ.
            is_other = name.startswith("_") or name in ("defaults", "reading")
            if not is_other and "tensor(" not in text:
                values[f"{place}.{name}"] = text[-60:]
    write_note("values", values)


def run_clocked(script, pace):
    """A step takes `pace` seconds, and longer on rank 1: a run to a cap is repeatable. Who looks at
    another clock finds that rank 1's is far ahead."""
    if rank():
        hurry()
    module = load(script)
    begun = note_steps(module)
    module.Clock.now_ms = lambda clock: 1e3 * pace * len(begun) * (1 + 0.3 * rank())
    return module.main([], os.environ)


def run_blind(script):
    """Validations tell the run the opposite: nothing may be chosen by them."""
    module = load(script)

    def opposite(result, *_):
        loss, bpb, *rest = result
        return (100 - loss, 100 - bpb, *rest) if loss < 50 else result

    call_after(module, module.Validation, "evaluate", opposite)
    return module.main([], os.environ)


# === The model with a run's artifact ===
def look_inside(script, look, full):
    """Notes the facts that look(module, run, stored) finds with the artifact of `full` in the
    model."""
    module = load(script)

    @torch.no_grad()
    def train(run):
        begun = {name: p.clone() for name, p in run.model.named_parameters() if p.requires_grad}
        exported = torch.load(full / "final_model.pt", "cpu", weights_only=True)
        kinds = {name: torch.zeros_like(t) for name, t in exported.items()}  # without their values
        try:
            stored = module.unpack((full / "final_model.int8.ptz").read_bytes(), kinds)
        except Exception as error:
            write_note("facts", {"unpack": repr(error)[:200]})
            os._exit(0)
        foreign = sorted(run.model.load_state_dict(stored, strict=False).unexpected_keys)
        least = getattr(module, "MIN_SCALE", 0.0)
        facts = {"foreign": foreign, "gaps": find_gaps(stored, exported, least)}
        last = max((full / "checkpoints" / full.name).glob("step_*.pt"))
        trained = torch.load(last, "cpu", weights_only=True)["parts"]["model"]
        facts |= find_untrained(run, begun, trained, exported)
        facts |= look(module, run, stored)
        write_note("facts", facts)
        os._exit(0)

    module.Trainer.train = train
    return module.main([], os.environ)


def find_gaps(stored, exported, least=0.0):
    """{name: how far a stored tensor is from the exported one, relative to its norm}

    Half a step of the least scale is the format's rounding: of low rates, weights are as small.
    """
    gaps = {}
    for name, t in exported.items():
        size = t.double().norm().item()
        if size and name in stored and stored[name].shape == t.shape:
            apart = (stored[name].double() - t.double()).abs() - least / 2
            gaps[name] = apart.clamp(min=0.0).norm().item() / size
    return gaps


def find_untrained(run, begun, trained, exported):
    """Names of weights that training leaves alone, and of those of which only the export does."""
    both = [name for name in begun if name in exported and begun[name].numel()]
    same = [name for name in both if torch.equal(begun[name], exported[name])]
    kept = [name for name in same if not torch.equal(begun[name], trained.get(name, begun[name]))]
    held = [p for group in run.groups for p in group["params"]]
    times = {name: sum(p is q for q in held) for name, p in run.model.named_parameters()}
    no_one = "no torch.optim.Optimizer of Trainer.parts has it"
    untrained = [name if times[name] else f"{name} ({no_one})" for name in same if name not in kept]
    untrained += sorted(f"{name} (in two optimizers)" for name, n in times.items() if n > 1)
    others = [p for p in held if not any(p is q for q in run.model.parameters())]
    words = "in an optimizer, but no nn.Parameter of the model"
    untrained += [f"a tensor of shape {tuple(p.shape)} ({words})" for p in others]
    return {"untrained": untrained, "kept": kept}


def find_facts(module, run, stored, length):
    model = run.model
    model.eval()
    tokens = val_tokens(run)
    x, y = tokens[:-1].view(VAL_ROWS, -1), tokens[1:].view(VAL_ROWS, -1)
    logits = torch.cat([model.logits(row[None].clone()) for row in x])
    nats = F.cross_entropy(logits.flatten(0, 1).double(), y.flatten()).item()
    facts = {"nats": nats, "targets": y.numel(), "tensors": len(stored)}
    sums = note_sums(module)
    score(module, run, stored)
    facts["counted"] = sums[1:3]
    facts |= find_wide(module, run, stored)
    facts["batch"] = compare_losses(run)
    model.eval()
    torch.manual_seed(0)
    shake(model)
    try:
        longer = type(model)(replace(run.config, train_seq_len=length), model.dtype).eval()
        longer.load_state_dict(stored, strict=False)
        shake(longer)
        rows = tokens.repeat(1 + 2 * length // len(tokens))[: 2 * length].view(2, length)
        facts["sight"] = find_sight(longer, rows)
    except Exception as error:  # of a model that is made in another way
        facts["sight"] = find_sight(model, x[:2]) | {"short": repr(error)[:200]}
    facts["unused"] = find_unused(model, x, stored, run.config.vocab_size)
    return facts


def val_path(run):
    return Path(run.config.data_path, VAL)


def val_tokens(run):
    return torch.from_numpy(read_shard(val_path(run)).astype(np.int64))


def shake(model):
    for p in model.parameters():  # zeros would hide what depends on what
        p.add_(torch.randn_like(p), alpha=0.3)


def score(module, run, stored):
    """The mean nats of the run's own final score of an artifact that holds `stored`."""
    found = []
    names = run.model.state_dict().keys() & stored.keys()
    module.seed_step(0, 0)
    module.pack_and_write = lambda *_: b""
    module.unpack = lambda *_: {name: stored[name].clone() for name in names}
    module.log_score = lambda _, loss, *more: found.append(loss)
    module.write_results = lambda *_: None
    run.export_and_score()
    return found[0]


def note_sums(module):
    """A list that always has the sums of the last evaluation: nats, bytes, targets, ..."""
    sums = []

    def note(_, _runtime, tensor):
        if tensor.dtype == torch.float64 and tensor.numel() > 3:
            sums[:] = tensor.tolist()

    call_after(module, module.Runtime, "all_reduce", note)
    return sums


def compare_losses(run):
    """Of some rows of training: how many targets they have, the training loss of all of them, and
    the mean of their own training losses."""
    try:
        with closing(run.batches()) as batches:
            copies = [(batch.x.clone(), batch.y.clone()) for batch in islice(batches, 4)]
        x, y = map(torch.cat, zip(*copies, strict=True))
        run.model.train()
        rows = [float(run.model(x[i : i + 1], y[i : i + 1])) for i in range(len(x))]
        loss = float(run.model(x, y))
    except Exception:  # a forward with other arguments
        return {}
    return {"targets": (y >= 0).sum(1).tolist(), "loss": loss, "mean": sum(rows) / len(rows)}


def find_wide(module, run, stored):
    """Where activations are bfloat16: the blocks whose output is not, and the type of the score. A
    text says why it did not run."""
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
    except Exception as error:  # of a model of another kind, or one that needs CUDA
        return {"wide": repr(error)[:200]}
    return {"wide": {"blocks": sorted({*wide}), "score": str(nats.dtype)}}


def find_sight(model, x):
    """In two rows: places whose logits change with later tokens, also with those of the next row;
    and places whose logits do not change with the token that stands there."""
    length = x.size(1)
    last = 2 * length - 1
    places = {*range(NEAR), length // 2, length - 2, length - 1, length, last - 1}
    places |= {*torch.randint(last, (DRAWN,)).tolist()}
    plain = model.logits(x.clone()).flatten(0, 1)
    # Attention inside documents multiplies other shapes with other tokens: sums round otherwise.
    rounding = 1e-5 * max(1.0, plain.abs().max().item())
    leaks = []
    blind = []
    for place in sorted(places):
        changed = x.flatten().clone()
        changed[place + 1 :] = torch.randint(plain.size(-1), (last - place,))
        gap = model.logits(changed.view_as(x)).flatten(0, 1)[: place + 1] - plain[: place + 1]
        if not gap.abs().max() < rounding:  # also where it is nan
            leaks.append(place)
        changed = x.flatten().clone()
        changed[place] = (changed[place] + 1) % plain.size(-1)
        if torch.equal(model.logits(changed.view_as(x)).flatten(0, 1)[place], plain[place]):
            blind.append(place)
    return {"leaks": leaks, "blind": blind, "length": length}


def find_unused(model, x, stored, vocab_size):
    """Names of what is stored twice, or without an effect on logits.

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
        for name in names.copy():
            was = state[name].clone()
            state[name].copy_(torch.randn_like(was))
            if not torch.equal(model.logits(tokens.clone()), plain):
                names.remove(name)
            state[name].copy_(was)
        if not names:
            break
        shake(model)
    return twice + names


# === Questions to the final score: splits that are changed, targets that are hidden ===
def find_late(module, run, stored):
    """[n, by how much] the nats of the first n targets change with the tokens after them, whose
    targets are hidden: these tokens stand nowhere before."""
    tokens = read_shard(val_path(run))
    draw = np.random.default_rng(0).choice
    sums = note_sums(module)
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
            score(module, run, stored)
            seen.append(sums[:3])
        # A score that does not take its targets from widen() cannot be asked.
        if seen and all(each and each[2] < end for each in seen):
            found.append([end - 1, abs(seen[0][0] - seen[1][0])])
    return {"late": found}


def add_shares(module, run, stored):
    """Of the last target, and of the first one, where no other is scored: the sum of what all its
    values get. Who predicts a token from those before it gives its values shares of 1 together,
    whatever the method. nan for a score that needs more targets, or has another order."""
    tokens = read_shard(val_path(run))
    batches = set()  # the first rows of those that are scored
    left = set()  # the targets that are not hidden
    place = 0

    def hide(_, _plan, rows, _tokens, _x, y):
        batches.add(rows.start)
        targets = y.reshape(-1)  # a view
        places = np.flatnonzero(np.asarray(targets) >= 0)
        batch, kept = (min(batches), places[:1]) if place > 0 else (max(batches), places[-1:])
        if place:
            kept = kept[: rows.start == batch]
            left.update(targets[kept].tolist())
            targets[np.setdiff1d(places, kept)] = -100

    call_after(module, module.BatchPlan, "fill_xy", hide)
    score(module, run, stored)  # finds the batches
    sums = []
    for place in (-1, 1):
        shares = []
        for token in range(run.config.vocab_size):
            changed = tokens.copy()
            changed[place] = token
            write_shard(val_path(run), changed)
            left.clear()
            try:
                shares.append(math.exp(-score(module, run, stored)))
            except ZeroDivisionError:
                continue  # of a token without bytes
            except Exception:
                shares.append(math.nan)
            if left != {token}:
                shares.append(math.nan)
            if sum(shares) > 2:
                break  # it is proved
        sums.append(sum(shares))
    return {"shares": sums}
