"""Prove an edit: does a changed train_gpt.py still do what a run promises?

    python3 tools/verify.py mine.py EMA_DECAY=0.9 ...    with the settings that turn your edit on

It runs the script at a tiny size on the CPU, on data that it makes, and compares the runs. It
prints a line for each property: `ok`, `note` (for you to judge) or `FAULT`. The exit code is 1 if
there is a fault or the script does not run, else 0.
"""

import json
import math
import re
import signal
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
import numpy as np
import probes
import torch
from tinyruns import MODEL, TINY, Lab, Run, call_main, find_script

SECONDS = 600  # of a run to a cap, by a clock that goes by steps
ROUNDING = 0.01  # nats: two ranks add in another order
RANDOM = 0.3  # nats: the same where ranks draw other random numbers, as for dropout
GRADIENT = 1e-4  # relative: right edits have 1e-6, wrong ones 0.01 and more
LATE = 1e-3  # nats of a whole score
GAP = 0.65  # of a tensor's norm: one bit per weight, at best, has 0.60
TWO = {"ranks": 2, "GRAD_ACCUM_STEPS": 1, "WARMUP_STEPS": 0}
# {property: what a fault of it means, and where to look}
LINES = Path(__file__).with_name("hints.txt").read_text("utf-8").splitlines()
HINTS = dict(line.split(": ", 1) for line in LINES)


def verdict(name, fault, good):
    return name, "FAULT" if fault else "ok", fault or good


# === Comparisons of runs ===
def differences(a, b, nats=0.0, with_score=True):
    """What of two runs differs, in words: by more than `nats`, or, if that is 0, in any bit."""
    if a.error or b.error:
        return a.error or b.error
    steps = sorted(a.steps.keys() & b.steps.keys())
    if 1 in steps if "RESUME" in b.env else not steps:
        return "it has no step lines, or did not resume"
    rows = [step for step in steps if a.steps[step][1] != b.steps[step][1]]
    gaps = {step: abs(a.steps[step][0] - b.steps[step][0]) for step in steps}
    apart = [step for step in steps if not gaps[step] <= nats]
    score = max(abs(x - y) for x, y in zip(a.scores, b.scores, strict=True))
    words = [f"the rows of step {rows[0]}"] if rows else []
    words += [f"losses from step {apart[0]} on, by up to {max(gaps.values()):.2g}"] if apart else []
    words += [f"score by {score:.2g}"] if with_score and not score <= nats else []
    if nats == 0:
        words += ["artifact"] if a.artifact != b.artifact else []
        words += weight_differences(a.weights, b.weights)
    return ", ".join(words)


def weight_differences(a, b):
    if {name: t.shape for name, t in a.items()} != {name: t.shape for name, t in b.items()}:
        return ["names or shapes of weights"]
    most = max((a[name].double() - b[name].double()).norm(math.inf).item() for name in a)
    return [f"weights by up to {most:.2g}"] if most else []


def alike(name, full, others, again=None):
    """again: a run that is the same as `full`; values of the Trainer that differ are named"""
    gaps = {run.name: differences(full, run) for run in others}
    fault = "; ".join(
        f"{run.name} differs: {gaps[run.name]}{other_values(full, again, run)}"
        for run in others
        if gaps[run.name]
    )
    return verdict(name, fault, f"{', '.join(gaps)}: the same losses, score and weights")


def other_values(full, again, run):
    """Which values of Trainer and model a run ends with that differ from those of `full`, and do
    not differ between two equal runs, as times do."""
    if again is None:
        return ""
    ours, twin, theirs = (note_of(each, "values") for each in (full, again, run))
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    names = [name for name in names if ours[name] == twin.get(name)]
    words = [f"{name} ({theirs[name]} for {ours[name]})" for name in sorted(names, reverse=True)]
    return f", and in the end {cli.some(words, 3)}" if words else ""


def note_of(run, name, rank=0):
    """What a rank noted under this name, see probes.write_note; {} where it came not so far."""
    with suppress(ValueError):
        return json.loads(run.text(f"notes/{name}{rank}.json"))
    return {}


def steps_of(run):
    """What each rank noted after each of its steps."""
    texts = [run.text(f"notes/steps{rank}.jsonl") for rank in run.ranks]
    lines = [[line for line in text.splitlines() if line.endswith("}")] for text in texts]
    return [[*map(json.loads, each)] for each in lines]


def apart_after(run):
    """After which step two ranks have other weights, or end; in words."""
    mine, theirs = ([each["crc"] for each in steps] for steps in steps_of(run))
    pairs = enumerate(zip(mine, theirs, strict=False), 1)
    apart = [step for step, (a, b) in pairs if a != b]
    if apart:
        more = f"; then: {run.error}" if run.error else ""
        return f"the weights of two ranks differ after step {apart[0]}{more}"
    if run.error:
        return f"a run of two ranks ends: {run.error}"
    return "" if len(mine) == len(theirs) else f"steps of two ranks: {len(mine)}, {len(theirs)}"


def gradient_gaps(ones, twos):
    """{name: relative difference} of gradients, where it is not rounding; the largest first."""
    total = math.sqrt(sum(float(grad.norm()) ** 2 for grad in ones.values()))
    gaps = {}
    for name in ones.keys() & twos.keys():
        if ones[name].shape == twos[name].shape:
            gap = float((ones[name] - twos[name]).norm())
            size = max(float(ones[name].norm()), 1e-30)
            if not (gap <= GRADIENT * size or gap <= 1e-6 * total):  # also where it is nan
                gaps[name] = gap / size
    return dict(sorted(gaps.items(), key=lambda pair: -pair[1]))


# === The runs ===
def first_runs(lab, base):
    """{name: Run} of those that need no other, the longest first"""
    noted = probes.run_noted
    every = {"CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": lab.steps + 1}
    often = {"VAL_LOSS_EVERY": 1, "TRAIN_LOG_EVERY": 0}
    other = lab.with_validation("other", shuffle)
    runs = [
        Run(lab, "two-ranks", noted, **TWO, **every),
        Run(lab, "full", noted, **every),
        Run(lab, "again", noted, context=1),
        Run(lab, "fast-clock", probes.run_hurried),
        Run(lab, "not-primed", noted, WARMUP_STEPS=0),
        Run(lab, "validated-each-step", noted, **often),
        Run(lab, "other-validation", noted, DATA_PATH=other),
        Run(lab, "blind", probes.run_blind, **often),
        Run(lab, "not-read-ahead", noted, TRAIN_PREFETCH=0, VAL_PREFETCH=0),
    ]
    for name in lab.given:
        runs.append(Run(lab, f"without-{name}", call_main, **{name: TINY.get(name)}))
    if base:
        runs.append(Run(lab, "base", call_main, script=base))
    return {run.name: run for run in runs}


def shuffle(tokens):
    """Other tokens in all places but those where documents begin."""
    random = np.random.default_rng(0)
    return np.where(tokens < 3, tokens, random.integers(3, tokens.max() + 1, len(tokens)))


def late_runs(lab, runs, score_differs):
    """{name: Run} of those that need the checkpoints and the artifact of others"""
    full, two = runs["full"], runs["two-ranks"]
    late = []
    if not two.error:
        end = {"ITERATIONS": 2 * lab.steps, "MAX_WALLCLOCK_SECONDS": SECONDS}
        late.append(Run(lab, "clock", probes.run_clocked, SECONDS / lab.steps, **TWO | end))
    if score_differs:
        short = lab.with_validation("short", lambda tokens: tokens[: 3 * lab.seq_len + 1])
        whole = lab.with_validation("whole", lambda tokens: tokens)
        look = probes.look_inside
        late.append(Run(lab, "sum", look, probes.add_shares, full.folder, DATA_PATH=short))
        late.append(Run(lab, "scorer", look, probes.find_late, full.folder, DATA_PATH=whole))
    look = partial(probes.find_facts, length=lab.own_seq_len)
    late.append(Run(lab, "model", probes.look_inside, look, full.folder))
    points = lab.steps // 3 | 1, 5 * lab.steps // 6, lab.steps  # an odd one, too
    if not two.error:
        file = f"{two.folder}/checkpoints/{two.name}/step_{points[0]:08d}.pt"
        late.append(Run(lab, f"two-from-step-{points[0]}", probes.run_noted, **TWO, RESUME=file))
    for step in points:
        file = f"{full.folder}/checkpoints/full/step_{step:08d}.pt"
        late.append(Run(lab, f"from-step-{step}", probes.run_noted, RESUME=file))
    return {run.name: run for run in late}


# === Verdicts: (property, "ok", "note" or "FAULT", text) ===
def verify(lab, base, score_differs):
    runs = first_runs(lab, base)
    print("tiny runs, seconds for train_gpt.py, minutes with larger sizes:", end="")
    lab.run_all(runs.values())
    for run in runs.values():
        run.read()
    full, again = runs["full"], runs["again"]
    if full.error:
        print()
        raise cli.ToolError(f"{lab.script} does not run at a tiny size: {full.error}")
    repeatable = alike("repeatable", full, [again])
    if "FAULT" not in repeatable:  # else no run can be compared with another
        runs |= late_runs(lab, runs, score_differs)
        lab.run_all([run for run in runs.values() if not run.processes])
    print()
    yield repeatable
    if "FAULT" in repeatable:
        return
    yield alike("time", full, [runs["fast-clock"]])
    yield random_verdict(steps_of(full)[0])
    yield alike("priming", full, [runs["not-primed"]], again)
    yield alike("validation", full, [runs["validated-each-step"]])
    yield unseen_verdict(runs)
    yield alike("overlap", full, [runs["not-read-ahead"]])
    facts = note_of(runs["model"], "facts")
    yield from two_rank_verdicts(runs, facts.get("batch"), score_differs)
    yield resume_verdict(lab, runs)
    yield from clock_verdicts(lab, runs)
    if "batch" in facts:
        yield from model_verdicts(facts)
        yield from score_verdicts(lab, full, facts, score_differs)
    else:
        lost = facts.get("unpack") and f"the artifact alone does not load: {facts['unpack']}"
        yield "model", "FAULT", lost or runs["model"].error or "no facts"
    if score_differs:
        yield sum_verdict(runs["sum"])
        yield scorer_verdict(runs["scorer"])
    yield from setting_verdicts(full, runs)
    yield from file_verdicts(lab, full)
    if base:
        yield from edit_verdicts(lab, base, runs)


def random_verdict(steps):
    """Are the generators in other states after each step?"""
    same = []
    for i, kind in enumerate(("Python's", "numpy's", "torch's")):
        is_used = steps[0]["before"][i] != steps[0]["after"][i]
        if is_used and len({step["after"][i] for step in steps}) == 1:
            same.append(kind)
    fault = same and f"{' and '.join(same)} generator is in the same state after each step"
    return verdict("random", fault, "random numbers move on with each step")


def unseen_verdict(runs):
    tokens = differences(runs["full"], runs["other-validation"], with_score=False)
    results = differences(runs["validated-each-step"], runs["blind"], with_score=False)
    faults = [f"with other validation tokens: {tokens}"] if tokens else []
    faults += [f"where each validation says the opposite: {results}"] if results else []
    good = "neither tokens nor results of validation change weights or artifact"
    return verdict("unseen", "; ".join(faults), good)


def two_rank_verdicts(runs, batch, score_differs):
    alone, two = runs["not-primed"], runs["two-ranks"]
    fault = apart_after(two)
    yield verdict("replicas", fault, "both ranks have the same weights after each step")
    drawn = any(each["drawn"] for steps in steps_of(alone) for each in steps[:1])
    kind, words = gradient_words(alone, two, drawn, batch)
    nats = RANDOM if drawn or kind == "note" else ROUNDING
    gap = "" if two.error else differences(alone, two, nats, with_score=False)
    if not (two.error or gap):
        # A rank may learn from what it has scored: with --score-differs scores are similar.
        gap = score_gap(alone.scores, two.scores, 1.0 if score_differs else nats)
    if kind == "FAULT" or gap:
        text = "; ".join(each for each in (words, gap and f"two ranks differ: {gap}") if each)
        yield "ranks", "FAULT", text
    else:
        yield "ranks", kind, words or f"two are as one within {nats} nats"
    yield optimizer_verdict(steps_of(alone)[0])


def score_gap(one, two, nats):
    """Compares (nats, bits per byte) of one rank and of two that were trained alike."""
    where = "and training is the same: see BatchPlan.val and Validation"
    if abs(one[0] / one[1] * two[1] / two[0] - 1) > 1e-6:
        return f"in the score bytes per target, {where}"
    is_far = abs(one[0] - two[0]) > nats
    return f"score {one[0]:.4f}, {two[0]:.4f} nats, {where}" if is_far else ""


def gradient_words(alone, two, drawn, batch):
    """Compares what optimizers get in step 1: (FAULT, note or ok; of what, and why it differs)."""
    try:
        paths = alone.folder / "notes/first0.pt", two.folder / "notes/first0.pt"
        paths += (two.folder / "notes/first1.pt",)
        ones, twos, others = (torch.load(path, weights_only=True) for path in paths)
    except OSError:  # they did not come so far
        return "ok", ""
    if gradient_gaps(twos, others):  # each rank has its own: an optimizer adds them
        twos = {name: grad + others.get(name, 0) for name, grad in twos.items()}
    gaps = {} if drawn else gradient_gaps(ones, twos)
    is_mean = not batch or abs(batch["loss"] - batch["mean"]) <= 1e-5 * abs(batch["loss"])
    means = ""
    if not is_mean and len({*batch["targets"]}) > 1:
        counts = f"{min(batch['targets'])} to {max(batch['targets'])} targets"
        means = f"a batch's loss is no mean of its rows', which have {counts}"
    if not gaps:
        return "note" if means else "ok", means
    name, more = next(iter(gaps)), f" (and of {len(gaps) - 1} more)" * (len(gaps) > 1)
    words = f"in step 1 the gradient of {name}{more} differs by {gaps[name]:.2g} of its size "
    words += "between one rank with 8 micro-steps and two with 1"
    if is_mean or means or two.error or alone.steps[1][1] != two.steps[1][1]:
        return "FAULT", f"{words}: {means}".removesuffix(": ")
    why = "of larger batches GPT.forward returns another mean loss. Right for a balance of "
    return "note", f"{words}: {why}experts; else it counts rows or targets wrongly"


def optimizer_verdict(steps):
    """Does each optimizer take each step?"""
    names = [name for each in steps for name, _ in each["stepped"]]
    counts = {name: names.count(name) for name in names}
    if {*counts.values()} == {len(steps)}:
        return "steps", "ok", f"{' and '.join(counts)} take each step"
    odd = ", ".join(f"{name} {count}" for name, count in counts.items())
    why = "Trainer steps each optimizer of Trainer.parts once, and each step sets gradients to 0"
    return "steps", "note", f"of {len(steps)} steps optimizers take {odd}: {why}"


def resume_verdict(lab, runs):
    resumed = [run for run in runs.values() if "RESUME" in run.env]
    faults = []
    for run in resumed:
        run.read()
        pair = (runs["full"], runs["again"]) if len(run.ranks) == 1 else (runs["two-ranks"], None)
        _, kind, text = alike("resume", pair[0], [run], pair[1])
        faults += [text] if kind == "FAULT" else []
    if len(faults) == 1 and faults[0].startswith(f"from-step-{lab.steps} "):
        faults.append("after the last step alone, so a step sets what logits use: make it a buffer")
    names = ", ".join(run.name for run in resumed)
    return verdict("resume", "; ".join(faults), f"{names}: the same losses, score and weights")


def clock_verdicts(lab, runs):
    """Of a run to a cap, in which time goes by steps and faster on rank 1. No rate may be < 0."""
    steps = steps_of(runs["full"])[0]
    run = runs.get("clock")
    if run is None:
        if below := negative_rates(steps):
            yield "clock", "FAULT", below
        return
    mine, theirs = ([each["stepped"] for each in steps] for steps in steps_of(run))
    if run.error and not mine:
        yield "clock", "note", f"a run to MAX_WALLCLOCK_SECONDS does not start: {run.error}"
        return
    pairs = enumerate(zip(mine, theirs, strict=False), 1)
    apart = next((f"rates of two ranks differ at step {i}" for i, (a, b) in pairs if a != b), "")
    late = f"{len(mine)} steps in time for {lab.steps}"
    fault = apart or apart_after(run) or negative_rates(steps + steps_of(run)[0])
    if fault or len(mine) > lab.steps:
        text = fault or f"{late}: the cap is not kept"
        yield "clock", "FAULT", f"in a run to MAX_WALLCLOCK_SECONDS {text}"
        return
    words = []
    is_odd = abs(len(mine) - lab.steps) > 1
    for name in dict(mine[0]):
        rates = [dict(step)[name][0] for step in mine if name in dict(step)]  # of the first group
        rates = [rates[i * (len(rates) - 1) // 4] / (max(rates) or 1.0) for i in range(5)]
        words.append(f"{name} {' '.join(f'{rate:.3g}' for rate in rates)}")
        is_odd = is_odd or rates[-1] > 0.5 or not rates[2]
    text = f"rates at 0, 25, 50, 75, 100 % of the time, over the largest: {', '.join(words)}; "
    yield "clock", "note" if is_odd else "ok", text + late


def negative_rates(steps):
    below = {name for step in steps for name, rates in step["stepped"] if min(rates) < 0}
    return f"rates of {', '.join(sorted(below))} fall below 0" if below else ""


def model_verdicts(facts):
    yield verdict("trained", cli.some(facts["untrained"]), "training changes every weight")
    if facts["kept"]:
        words = "training changes them, but what is exported has their first values"
        yield "exported", "FAULT", f"{cli.some(facts['kept'])}: {words}"
    if facts["foreign"]:
        words = "in the artifact, but not in a model that is made anew"
        yield "whole", "FAULT", f"{cli.some(facts['foreign'])}: {words}"
    name, gap = max(facts["gaps"].items(), key=lambda pair: pair[1], default=("none", 0.0))
    seen = f"tensors differ from the exported ones by up to {gap:.2g} of their norm: {name}"
    yield verdict("stored", "" if gap <= GAP else seen, seen)
    yield from sight_verdicts(facts["sight"])
    yield dtype_verdict(facts["wide"])
    good = f"logits depend on each of {facts['tensors']} tensors"
    yield verdict("artifact", cli.some(facts["unused"]), good)


def sight_verdicts(sight):
    """What logits depend on, in rows of the script's own length."""
    rows = f"of two rows of {sight['length']} tokens"
    blind = cli.some(sight["blind"])
    fault = blind and f"logits do not depend on the token there, at {blind} {rows}"
    yield verdict("own-token", fault, "logits depend on the token at their place")
    leaks = cli.some(sight["leaks"])
    fault = leaks and f"logits change with later tokens, at {leaks} {rows}"
    good = f"no logit depends on later tokens, in rows of {sight['length']}"
    yield verdict("look-ahead", fault, good)
    if "short" in sight:
        yield "look-ahead", "note", f"longer rows were not looked at: {sight['short']}"


def dtype_verdict(wide):
    if isinstance(wide, str):
        is_mixed = "dtype" in wide or "scalar type" in wide  # else it may need CUDA
        return "dtype", "FAULT" if is_mixed else "note", f"in bfloat16 it does not run: {wide}"
    fault = "the score is computed in bfloat16" if "bfloat16" in wide["score"] else ""
    if wide["blocks"]:
        fault = f"blocks {cli.some(wide['blocks'])} return float32"
    words = "with bfloat16 activations"
    good = f"{words} all blocks return bfloat16, and the score is float32"
    return verdict("dtype", fault and f"{words} {fault}", good)


def score_verdicts(lab, full, facts, score_differs):
    bits = facts["targets"] / math.log(2)
    hand = facts["nats"], facts["nats"] * bits / lab.val_bytes
    printed = full.scores
    seen = "printed {:.6f} nats {:.6f} bpb, by hand {:.6f} {:.6f}".format(*printed, *hand)
    if score_differs:
        if fault := target_fault(lab, facts):
            yield "targets", "FAULT", fault
        counted = printed[0] / math.log(2) / printed[1]
        right = lab.val_bytes / facts["targets"]
        left = "left to you: is each token scored once, is so much plausible?"
        yield "score", "note", f"{seen}; {counted:.4f} bytes per target, in all {right:.4f}; {left}"
    elif not facts["foreign"]:  # else there is no model to compute it with
        equal = np.allclose(hand, printed, rtol=0, atol=2e-5)  # one sum, added in another order
        yield verdict("score", "" if equal else seen, seen)
    code, model = len(lab.script.read_bytes()), len(full.artifact)
    logged = full.log.code_bytes or 0, full.log.model_bytes or 0
    fault = f"the log has {logged[0]:,} + {logged[1]:,}, the files {code:,} + {model:,}"
    is_less = logged[0] < code or logged[1] < model
    yield verdict("bytes", is_less and fault, "the log counts all of script and artifact")


def target_fault(lab, facts):
    """Are all targets counted (but for a last row), and no more bytes than the split has?"""
    if not facts["counted"]:
        return ""
    counted, targets = facts["counted"]
    if not facts["targets"] - lab.seq_len <= targets <= facts["targets"]:
        return f"{targets:.0f} of {facts['targets']} targets are counted"
    is_more = counted > lab.val_bytes + 0.5
    return f"{counted:.0f} bytes are counted, and the split has {lab.val_bytes}" if is_more else ""


def sum_verdict(run):
    sums = note_of(run, "facts").get("shares", [])
    if not any(math.isfinite(each) for each in sums):
        return "sum", "note", run.error or "a target cannot be scored alone"
    seen = "all values of a target get {:.6f} of the last, {:.6f} of the first".format(*sums)
    return verdict("sum", seen if max(sums) > 1 + 2e-4 else "", seen)


def scorer_verdict(run):
    found = note_of(run, "facts").get("late", [])
    late = [f"of the first {n} by {gap:.2g}" for n, gap in found if not gap <= LATE]
    fault = late and f"nats change with the tokens after them: {', '.join(late)}"
    good = f"nats of the first {', '.join(str(n) for n, _ in found) or 'none'} targets: the same"
    return verdict("scorer", fault, f"{good}, whatever comes after them")


def setting_verdicts(full, runs):
    """Which of the given settings could be left out?"""
    without = [run for name, run in runs.items() if name.startswith("without-")]
    same = [run.name.removeprefix("without-") for run in without if not differences(full, run)]
    if same:
        words = "without it all is equal, bit for bit: a default, or about speed?"
        yield "settings", "note", f"{', '.join(same)}: {words}"


def file_verdicts(lab, run):
    """Which files has it opened or left that are not those of every run?"""
    known = rf"({sys.prefix}|{sys.base_prefix}|/proc|/sys|/dev|/etc)/|.*\.pyc?(\.\d+)?$"
    known += rf"|{lab.script}$|{lab.data}[-\w]*/"
    known += rf"(fineweb_\w+\.bin|{MODEL}|tokenizer.sha256|\.producing)$"
    known += rf"|{run.folder}/(notes/|checkpoints/|logs/({run.name}|write)\.|output0|final_model\.)"
    files = {str(path) for path in run.folder.rglob("*") if path.is_file()}
    files = [path for path in {*files, *note_of(run, "opened")} if not re.match(known, path)]
    if files:
        names = sorted(path.removeprefix(f"{run.folder}/") for path in files)
        words = "files that no other run has: may it read or leave them?"
        yield "files", "note", f"{cli.some(names)}: {words}"


def edit_verdicts(lab, base, runs):
    """What the edit changes, what trains parameters that the base lacks, and lines of the edit that
    no run executed."""
    bare = runs["base"]
    what = "" if bare.error else f"against {base.name} the edit changes "
    none = "nothing on one rank, bit for bit: is its setting given here (not in the environment), "
    none += "and large enough for 3 layers of 32 channels? is it about speed alone?"
    yield "effect", "note", f"{what}{differences(bare, runs['full']) or none}"
    trains = note_of(runs["full"], "trains")
    new = [] if bare.error else [trains[name] for name in trains if name not in bare.weights]
    if new:
        yield "trains", "note", cli.some(new, sign="; ")
    source = lab.script.read_text("utf-8")
    lines = source.splitlines()
    known = {*base.read_text("utf-8").splitlines()}
    changed = {number for number, line in enumerate(lines, 1) if line not in known}
    noted = [note_of(run, "lines", rank) for run in runs.values() for rank in run.ranks]
    missed = (changed & code_lines(compile(source, "", "exec"))).difference(*noted)
    if missed:
        words = [f"{number} `{lines[number - 1].strip()}`" for number in sorted(missed)]
        yield "lines", "note", f"of the edit that no run executed: {cli.some(words, 4)}"


def code_lines(code):
    """The numbers of lines with something to execute."""
    inner = [code_lines(each) for each in code.co_consts if hasattr(each, "co_lines")]
    return {number for _, _, number in code.co_lines() if number}.union(*inner)


def verdicts(script, settings, base=None, score_differs=False):
    """Yields (property, "ok", "note" or "FAULT", text); ToolError for one that does not run."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        lab = Lab(Path(folder), script, settings)
        base = base and find_script(base)
        if base and base.read_bytes() == lab.script.read_bytes():
            base = None
        yield from verify(lab, base, score_differs)


def main(arguments):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    differs = "the score is on purpose not that of plain rows (windows, test-time training)"
    parser.add_argument("--score-differs", action="store_true", help=differs)
    base = "say what changes against this script (default: train_gpt.py)"
    parser.add_argument("--base", metavar="FILE", default=cli.ROOT / "train_gpt.py", help=base)
    options = parser.parse_intermixed_args(arguments)
    settings = {}
    for pair in options.settings:
        name, equals, text = pair.partition("=")
        if not equals or name in settings:
            parser.error(f"{pair}: settings are NAME=value, each once, after the script")
        settings[name] = text
    return cli.run(lambda: prove(options.script, settings, options.base, options.score_differs))


def prove(script, settings, base, score_differs):
    """Prints the verdicts; returns the exit code."""
    faults = 0
    for name, kind, text in verdicts(script, settings, base, score_differs):
        print(f"{kind:5} {name:10} {text}", flush=True)
        if kind == "FAULT":
            faults += 1
            print(f"{'':16} {HINTS[name]}", flush=True)
    print(f"faults: {faults}")
    return int(faults > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
