"""Decide which runs verify.py makes, compare them, and yield the verdicts.

A verdict is a tuple (property, kind, text). The kind is "ok", "FAULT" or "note". A note is about
something that the user has to judge. tools/README.md lists the properties.

tinyruns.py runs the script in new processes. In these processes, functions of probes.py observe the
run from the inside and write what they find to files in the run's folder. This module reads the
files. Three words for weights have a fixed meaning here:

initial     the weights before the first step
exported    the weights that the run packs into the artifact after its last step. They may be an
            average of the weights after several steps
stored      the weights that `unpack` returns from the artifact: the exported ones, quantized
"""

import json
import math
import re
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import cli
import numpy as np
import probes
import torch
from loading import call_main
from tinyruns import MODEL, TINY, Lab, Run

# The time limit of the run "clock", in seconds. Its clock does not measure time: it advances by a
# fixed number of seconds with each step. So the run needs much less time than this limit.
TIME_LIMIT = 600
# The losses of one rank and of two ranks may differ by at most this many nats. They are not bitwise
# equal, because two ranks add gradients in another order than one rank.
ROUNDING = 0.01
# The same limit, in nats, if steps draw random numbers, for example for dropout: two ranks draw
# other numbers than one rank. It is also the limit if `gradient_words` returns a note.
RANDOM = 0.3
# The largest allowed difference of a gradient between one rank and two, relative to its norm.
# Correct edits have differences of about 1e-6, wrong ones of 0.01 and more.
GRADIENT = 1e-4
# If later tokens change, the sum of the losses of all targets before them may change by at most
# this many nats.
LATE = 1e-3
# The largest allowed distance of a stored tensor from the exported one, relative to the exported
# tensor's norm. If only one bit per weight is stored, the distance is at best 0.60.
GAP = 0.65
# The largest allowed shift of a stored matrix: the mean of its errors, divided by their root mean
# square. Rounding has less than 0.1. See `probes.find_shifts`.
SHIFT = 0.5
# A share in an average of weights that is smaller than this is taken for an error of rounding.
SHARE = 1e-3
# The exported weights are taken for an average only if a weighted sum of the weights after each
# step differs from them by at most this. The difference is relative to the distance between the
# initial weights and those after the last step.
REST = 0.01
# The training loss and the loss that follows from the logits count as equal if they differ by at
# most this, relative to the loss.
SAME_LOSS = 1e-3
# The arguments of a run of two ranks. A step has one micro-step on each rank; in most runs of one
# rank, it has several.
TWO = {"ranks": 2, "GRAD_ACCUM_STEPS": 1, "WARMUP_STEPS": 0}


def verdict(name, fault, good):
    """Return the verdict on the property `name`.

    fault: the text of the FAULT; empty if there is none. good: the text of the verdict "ok".
    """
    if fault:
        return name, "FAULT", fault
    return name, "ok", good


# === Comparisons of runs ===
def differences(a, b, nats=0.0, with_score=True):
    """Return a text that lists what differs between the runs `a` and `b`; empty if nothing does.

    nats: losses and scores may differ by at most this. If it is 0, the artifacts and the exported
    weights must be equal, too. with_score: False if the scores may be different. The data and the
    losses of a step are compared if both runs have the step: a resumed run `b` has only the last
    ones. If one of the runs has failed, its error is returned.
    """
    if a.error or b.error:
        return a.error or b.error
    steps = sorted(a.steps.keys() & b.steps.keys())
    if "RESUME" in b.env:
        # A run that is resumed after the last step has no steps of its own. That is no error.
        if 1 in steps:
            return "it did not resume"
    elif not steps:
        return "it has no step lines"
    other_data = [step for step in steps if a.steps[step][1] != b.steps[step][1]]
    gaps = {step: abs(a.steps[step][0] - b.steps[step][0]) for step in steps}
    # `not x <= nats` is true if x is larger than nats, and also if x is nan.
    other_losses = [step for step in steps if not gaps[step] <= nats]
    score_gap = max(abs(x - y) for x, y in zip(a.scores, b.scores, strict=True))
    words = []
    if other_data:
        words.append(f"the data of step {other_data[0]}")
    if other_losses:
        words.append(f"losses from step {other_losses[0]} on, by up to {max(gaps.values()):.2g}")
    if with_score and not score_gap <= nats:
        words.append(f"score by {score_gap:.2g}")
    if nats == 0:
        if a.artifact != b.artifact:
            words.append("artifact")
        words += weight_differences(a.weights, b.weights)
    return ", ".join(words)


def weight_differences(a, b):
    # Return a list with one text that says how the exported weights of two runs differ, for
    # `differences`. The list is empty if all numbers are equal; two nan count as equal.
    # a, b: {name: tensor}
    if {name: t.shape for name, t in a.items()} != {name: t.shape for name, t in b.items()}:
        return ["names or shapes of weights"]
    gaps = []
    for name, t in a.items():
        x, y = t.double(), b[name].double()
        is_other = ~torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)
        if is_other.any():
            # If one of two numbers is nan, so is their difference. It counts as infinite.
            gaps.append((x - y)[is_other].abs().nan_to_num(nan=math.inf).max().item())
    return [f"weights by up to {max(gaps):.2g}"] if gaps else []


def judge_equal(name, full, others, again=None):
    """Return the verdict on the property `name`: all runs in `others` must have the same data,
    losses, scores, artifact and weights as the run `full`, bit by bit.

    again: a repetition of `full`. If it is given, the text of a fault also lists attributes of
    Trainer and model that have other values at the end of a run. They help to find the state that
    was not saved or not restored.
    """
    gaps = {run.name: differences(full, run) for run in others}
    faults = []
    for run in others:
        if gaps[run.name]:
            values = other_values(full, again, run)
            faults.append(f"{run.name} differs: {gaps[run.name]}{values}")
    return verdict(
        name, "; ".join(faults), f"{', '.join(gaps)}: the same losses, score and weights"
    )


def other_values(full, again, run):
    """Return a text that lists the attributes of Trainer and model that have another value at the
    end of `run` than at the end of `full`; empty if there are none, or if `again` is None.

    again: a repetition of `full`. An attribute that differs between these two, such as a measured
    time, is left out, because it differs between any two runs.
    """
    if again is None:
        return ""
    expected, repeated, found = (read_note(each, "values") for each in (full, again, run))
    names = [name for name in expected if name in found and expected[name] != found[name]]
    names = [name for name in names if expected[name] == repeated.get(name)]
    words = []
    for name in sorted(names, reverse=True):
        words.append(f"{name} ({found[name]} instead of {expected[name]})")
    return f", and at the end {cli.join_some(words, 3)}" if words else ""


def read_note(run, name, rank=0):
    """Return the value that a rank of the run wrote with probes.write_note under this name.

    Return {} if there is no such file, for example because the run failed before that.
    """
    with suppress(ValueError):
        return json.loads(run.text(f"notes/{name}{rank}.json"))
    return {}


def read_step_notes(run):
    """Return, for each rank, a list with what probes.note_steps wrote after each step."""
    texts = [run.text(f"notes/steps{rank}.jsonl") for rank in run.ranks]
    # If the process was killed while it wrote the last line, the line does not end with "}". It is
    # left out.
    lines = [[line for line in text.splitlines() if line.endswith("}")] for text in texts]
    return [[*map(json.loads, each)] for each in lines]


def replica_fault(run):
    """Return a text that says what is wrong with a run of two ranks; empty if nothing is.

    It is a fault if the two ranks have different weights after a step, if they take different
    numbers of steps, or if the run fails.
    """
    first, second = ([step["crc"] for step in steps] for steps in read_step_notes(run))
    for step, (a, b) in enumerate(zip(first, second, strict=False), 1):
        if a != b:
            more = f"; then: {run.error}" if run.error else ""
            return f"the weights of two ranks differ after step {step}{more}"
    if run.error:
        return f"a run of two ranks ends: {run.error}"
    if len(first) != len(second):
        return f"two ranks took different numbers of steps: {len(first)} and {len(second)}"
    return ""


def gradient_gaps(ones, twos):
    """Return {name: relative difference} of the gradients that differ by more than rounding errors.
    The largest difference comes first.

    ones, twos: {name of a parameter: its gradient}. A relative difference is the norm of the
    difference, divided by the norm of the gradient in `ones`. Parameters that only one of the two
    dicts has, or that have different shapes, are left out.
    """
    total = math.sqrt(sum(float(grad.norm()) ** 2 for grad in ones.values()))
    gaps = {}
    for name in ones.keys() & twos.keys():
        if ones[name].shape == twos[name].shape:
            gap = float((ones[name] - twos[name]).norm())
            size = max(float(ones[name].norm()), 1e-30)
            # The second limit is for gradients near 0, which consist of rounding errors. The
            # condition is true if the gap is above both limits, and also if it is nan.
            if not (gap <= GRADIENT * size or gap <= 1e-6 * total):
                gaps[name] = gap / size
    return dict(sorted(gaps.items(), key=lambda pair: -pair[1]))


# === The runs ===
def first_runs(lab, base):
    """Return {name: Run} of the runs that need no files of other runs.

    Runs start in this order. The run that takes the longest is the first one, so that the others
    can run beside it. base: the path of the unedited script; None: there is no run of it.
    """
    noted = probes.run_with_notes
    # Save a checkpoint after each step, and keep all of them.
    every = {"CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": lab.steps + 1}
    # Validate after each step, and write fewer log lines than the other runs.
    often = {"VAL_LOSS_EVERY": 1, "TRAIN_LOG_EVERY": 0}
    compiles = {"TORCH_COMPILE": 1, "VAL_LOSS_EVERY": 4, "GRAD_ACCUM_STEPS": 1}
    other = lab.with_validation("other", shuffle)
    # Most runs are compared with the run "full". The name of a run says in what it differs.
    runs = [
        Run(lab, "two-ranks", noted, **TWO, **every),
        Run(lab, "full", noted, **every),
        # The process has another hash seed than that of "full"; see `make_contexts`.
        Run(lab, "again", noted, context=1),
        Run(lab, "fast-clock", probes.run_with_fast_clock),
        Run(lab, "no-warm-up", noted, WARMUP_STEPS=0),
        Run(lab, "validated-each-step", noted, **often),
        Run(lab, "other-validation", noted, DATA_PATH=other),
        Run(lab, "opposite-results", probes.run_with_opposite_results, **often),
        Run(lab, "not-read-ahead", noted, TRAIN_PREFETCH=0, VAL_PREFETCH=0),
        Run(lab, "reads", probes.run_counting_reads, WARMUP_STEPS=0, GRAD_ACCUM_STEPS=1),
        Run(lab, "compiled", probes.run_compiled, **compiles),
    ]
    for name in lab.given:
        # In this run, a setting that the user gave has the value that it would have otherwise: that
        # of TINY or, if it is None here, the script's default.
        runs.append(Run(lab, f"without-{name}", call_main, **{name: TINY.get(name)}))
    if base:
        runs.append(Run(lab, "base", noted, script=base))
    return {run.name: run for run in runs}


def shuffle(tokens):
    """Return a copy of an array of tokens in which random tokens replace all but control tokens.

    One of the control tokens begins each document, so the documents keep their lengths.
    """
    random = np.random.default_rng(0)
    return np.where(tokens < 3, tokens, random.integers(3, tokens.max() + 1, len(tokens)))


def repeat_end(tokens, seq_len):
    """Return the first three sequences of `tokens`, with a changed end: the last eight tokens are
    the same as the eight before them.

    A scorer may have a cache that says which token came after one or more earlier tokens. Because
    of the repetition, the cache has an entry for the last target.
    """
    tokens = tokens[: 3 * seq_len + 1].copy()
    place = len(tokens) - 8
    # Choose eight tokens that are all of one document, so none of them is a control token.
    while place > 8 and min(tokens[place - 8 : place]) < probes.CONTROLS:
        place -= 1
    tokens[-16:] = [*tokens[place - 8 : place]] * 2
    return tokens


# The smallest number of runs that late_runs() returns if two ranks can run. `verify` prints the
# total number of runs before it knows how many there are.
LATE_RUNS = 6


def late_runs(lab, runs, score_differs):
    """Return {name: Run} of the runs for which the first runs must have ended, because they need
    the results of these: checkpoints, the artifact, or whether steps draw random numbers.

    runs: {name: Run} of the first runs.
    """
    full, two = runs["full"], runs["two-ranks"]
    late = []
    # Only random numbers of torch can be replaced by constants; see `gradient_words`.
    if find_drawn(runs["no-warm-up"]) == ["torch"] and not two.error:
        late.append(Run(lab, "first-step", probes.run_first_step, WARMUP_STEPS=0))
        late.append(Run(lab, "first-step-of-two", probes.run_first_step, **TWO))
    if not two.error:
        # The time limit is reached after lab.steps steps, half of ITERATIONS.
        end = {"ITERATIONS": 2 * lab.steps, "MAX_WALLCLOCK_SECONDS": TIME_LIMIT}
        late.append(
            Run(lab, "clock", probes.run_with_step_clock, TIME_LIMIT / lab.steps, **TWO | end)
        )
    if score_differs:
        short = lab.with_validation("short", lambda tokens: repeat_end(tokens, lab.seq_len))
        whole = lab.with_validation("whole", lambda tokens: tokens)
        look = probes.look_inside
        # With a smaller VAL_BATCH_SIZE, the three sequences are more than one batch. Otherwise a
        # scorer that learns from a batch, and uses what it has learned in the next one, would not
        # be tested.
        settings = {"DATA_PATH": short, "VAL_BATCH_SIZE": lab.val_batch_size // 2}
        late.append(Run(lab, "sum", look, probes.sum_shares, full.folder, **settings))
        late.append(Run(lab, "scorer", look, probes.find_late, full.folder, DATA_PATH=whole))
    find_facts = partial(probes.find_facts, length=lab.own_seq_len)
    late.append(Run(lab, "model", probes.look_inside, find_facts, full.folder))
    # The steps after which runs are resumed. `| 1` makes the first one odd, because an edit may do
    # something in every second step only.
    points = lab.steps // 3 | 1, 5 * lab.steps // 6, lab.steps
    if not two.error:
        file = f"{two.folder}/checkpoints/{two.name}/step_{points[0]:08d}.pt"
        late.append(
            Run(lab, f"two-from-step-{points[0]}", probes.run_with_notes, **TWO, RESUME=file)
        )
    for step in points:
        file = f"{full.folder}/checkpoints/full/step_{step:08d}.pt"
        late.append(Run(lab, f"from-step-{step}", probes.run_with_notes, RESUME=file))
    return {run.name: run for run in late}


# === Verdicts: tuples (property, kind, text); the kind is "ok", "note" or "FAULT" ===
def verify(lab, base, score_differs):
    """Make all runs and yield the verdicts.

    The arguments `base` and `score_differs` are those of `verdicts`. If a repetition of the run
    "full" has other results, only the verdict "repeatable" is yielded. Raises ToolError if the
    script does not run.
    """
    changed = changed_lines(lab.script, base) if base else {}
    lab.watched = frozenset(changed)  # runs write down which of these lines they execute
    runs = first_runs(lab, base)
    print("tiny training runs (seconds for train_gpt.py, minutes for larger settings), ", end="")
    print("finished so far:", end="")
    lab.run_all(runs.values(), done=0, total=len(runs) + LATE_RUNS + 2 * score_differs)
    for name in runs.keys() - {"reads", "compiled"}:
        # The two runs that are left out end after training, so they have no score to read.
        runs[name].read()
    full, again = runs["full"], runs["again"]
    if full.error:
        print()
        raise cli.ToolError(f"{lab.script} does not run at a tiny size: {full.error}")
    repeatable = judge_equal("repeatable", full, [again])
    if "FAULT" not in repeatable:
        # If a repetition has other results, a difference between two runs says nothing, so no
        # further runs are made.
        late = late_runs(lab, runs, score_differs)
        lab.run_all(late.values(), done=len(runs), total=len(runs) + len(late))
        runs |= late
    print()
    yield repeatable
    if "FAULT" in repeatable:
        return
    yield judge_equal("time", full, [runs["fast-clock"]])
    yield random_verdict(read_step_notes(full)[0])
    yield judge_equal("warm-up", full, [runs["no-warm-up"]], again)
    yield judge_equal("validation", full, [runs["validated-each-step"]])
    yield unseen_verdict(runs)
    yield judge_equal("overlap", full, [runs["not-read-ahead"]])
    facts = read_note(runs["model"], "facts")
    yield from two_rank_verdicts(runs, facts.get("batch"), score_differs)
    yield resume_verdict(lab, runs)
    yield from clock_verdicts(lab, runs)
    yield from model_verdicts(lab, runs, facts, score_differs)
    yield from speed_verdicts(lab, runs)
    yield from setting_verdicts(full, runs)
    yield from file_verdicts(lab, full)
    yield from trains_verdicts(runs, base)
    if base:
        yield from edit_verdicts(base, runs, changed)


def why_no_facts(run, facts):
    """Return a text that says why the run "model" has written no facts about the model."""
    if facts.get("unpack"):
        return f"the artifact alone does not load: {facts['unpack']}"
    return run.error or "no facts"


def random_verdict(steps):
    """Return the verdict on whether the random number generators advance from step to step.

    If a generator is seeded with the same number in each step, it has the same state after each
    step, and each step draws the same random numbers. A generator whose state the first step does
    not change is not judged. steps: what probes.note_steps wrote after each step.
    """
    same = []
    for i, kind in enumerate(("Python's", "numpy's", "torch's")):
        is_used = steps[0]["before"][i] != steps[0]["after"][i]
        if is_used and len({step["after"][i] for step in steps}) == 1:
            same.append(kind)
    fault = same and f"{' and '.join(same)} generator has the same state after each step"
    return verdict("random", fault, "random number generators advance with each step")


def unseen_verdict(runs):
    # Return the verdict on whether training uses the validation set. Weights and artifact must stay
    # the same if the validation set has other tokens, and if validations return other results.
    tokens = differences(runs["full"], runs["other-validation"], with_score=False)
    results = differences(runs["validated-each-step"], runs["opposite-results"], with_score=False)
    faults = [f"with other validation tokens: {tokens}"] if tokens else []
    faults += [f"if each validation reports the opposite: {results}"] if results else []
    good = "neither tokens nor results of validations change weights or artifact"
    return verdict("unseen", "; ".join(faults), good)


def two_rank_verdicts(runs, batch, score_differs):
    """Yield the verdicts on the properties "replicas", "ranks" and "steps".

    They compare a run of one rank that has several micro-steps per step with a run of two ranks
    that have one micro-step each. batch: what probes.compare_losses found; None if it found
    nothing.
    """
    alone, two = runs["no-warm-up"], runs["two-ranks"]
    fault = replica_fault(two)
    yield verdict("replicas", fault, "both ranks have the same weights after each step")
    if alone.error:
        # The verdict on "warm-up" is about the same run, and is a FAULT because of this error.
        text = f"two ranks were not compared with one: the run no-warm-up ends: {alone.error}"
        yield "ranks", "note", text
        return
    drawn = find_drawn(alone)
    kind, words = gradient_words(runs, drawn, batch)
    nats = RANDOM if drawn or kind == "note" else ROUNDING
    gap = "" if two.error else differences(alone, two, nats, with_score=False)
    if not (two.error or gap):
        # With --score-differs, a rank may train on what it has scored. Each of two ranks scores
        # only a part of the validation set, so they learn something else than one rank does, and
        # the scores are only similar.
        gap = score_gap(alone, two, 1.0 if score_differs else nats)
    if kind == "FAULT" or gap:
        texts = [words] if words else []
        texts += [f"two ranks differ: {gap}"] if gap else []
        yield "ranks", "FAULT", "; ".join(texts)
    elif two.error:
        text = f"two ranks were not compared with one: the run of two ranks ends: {two.error}"
        yield "ranks", "note", "; ".join([words, text] if words else [text])
    else:
        text = f"two ranks train like one (within {nats} nats)"
        if why := why_no_gradients(runs, drawn):
            text += f"; the gradients of step 1 were not compared, because {why}"
        yield "ranks", kind, words or text
    yield optimizer_verdict(read_step_notes(alone)[0])


def score_gap(alone, two, nats):
    """Return a text that says how the final scores of one rank and of two ranks differ; empty if
    they do not. Both runs must have trained alike.

    nats: the scores may differ by at most this.
    """
    where = "although training is the same: see BatchPlan.val and Validation"
    # For each run [number of bytes, number of targets]; {} if they are not known.
    counts = [read_note(run, "counted") for run in (alone, two)]
    if all(counts) and counts[0][1] != counts[1][1]:
        one, both = (f"{count[1]:.0f}" for count in counts)
        return f"the final score counts {one} targets on one rank, and {both} on two, {where}"
    (nats1, bpb1), (nats2, bpb2) = alone.scores, two.scores
    if abs(nats1 / bpb1 * bpb2 / nats2 - 1) > 1e-6:
        return f"the scores have different bytes per target, {where}"
    if abs(nats1 - nats2) > nats:
        return f"the scores are {nats1:.4f} and {nats2:.4f} nats, {where}"
    return ""


def find_drawn(run):
    """Return the list of the generators from which a step of the run draws random numbers: "Python"
    for Python's module random, "numpy", or "torch"."""
    kinds = "Python", "numpy", "torch"
    drawn = [step["drawn"] for steps in read_step_notes(run) for step in steps]
    return [kind for kind, *each in zip(kinds, *drawn, strict=False) if any(each)]


def first_gradients(alone, two):
    """Return the gradients that the optimizers get in step 1, as two dicts {name of a parameter:
    gradient}: those of the run of one rank, and those of the run of two ranks.

    Raises OSError if a run has not completed step 1.
    """
    ones, twos = (run.tensors("notes/first0.pt") for run in (alone, two))
    others = two.tensors("notes/first1.pt")
    # After the all-reduce of gradients, both ranks usually have the same ones. If a gradient still
    # differs, it was not part of the all-reduce, and its optimizer sums it over the ranks later. So
    # the sum is what must be compared.
    for name in gradient_gaps(twos, others):
        twos[name] = twos[name] + others[name]
    return ones, twos


def why_no_gradients(runs, drawn):
    """Return a text that says why the gradients of one rank and of two ranks cannot be compared;
    empty if they can.

    drawn: the generators from which steps draw random numbers; see `find_drawn`.
    """
    if not drawn:
        return ""
    if drawn != ["torch"]:
        return f"steps draw random numbers of {' and '.join(drawn)}"
    pair = runs.get("first-step"), runs.get("first-step-of-two")
    for run in [run for run in pair if run]:
        if operation := read_note(run, "not-replaced"):
            return f"verify.py cannot replace the random numbers of {operation} by constants"
        if run.error:
            return f"the run {run.name} ends: {run.error}"
    try:
        is_finite = all(grad.isfinite().all() for grad in first_gradients(*pair)[0].values())
    except (OSError, AttributeError):
        return "the runs in which random numbers are constants have none"
    return "" if is_finite else "without random numbers they are not finite"


def gradient_words(runs, drawn, batch):
    """Compare the gradients that optimizers get in step 1 of one rank and of two ranks.

    Return (kind, text): "FAULT", "note" or "ok", and which gradients differ and why. Two ranks draw
    other random numbers than one rank. If steps draw random numbers of torch, two further runs are
    compared, in which constants replace these numbers. If steps draw random numbers of Python or
    NumPy, gradients are not compared. drawn, batch: see `find_drawn` and `two_rank_verdicts`.
    """
    alone, two = runs["no-warm-up"], runs["two-ranks"]
    same_rows = not two.error and alone.steps[1][1] == two.steps[1][1]
    gaps = {}
    with suppress(OSError):  # a run ended before step 1
        if not drawn:
            gaps = gradient_gaps(*first_gradients(alone, two))
        elif "first-step" in runs:
            ones, twos = first_gradients(runs["first-step"], runs["first-step-of-two"])
            if all(grad.isfinite().all() for grad in ones.values()):
                gaps = gradient_gaps(ones, twos)
    # is_mean: the training loss of several sequences together is the mean of the losses that they
    # have one by one. If sequences have different numbers of targets, a loss that weighs all
    # targets the same is no such mean. The loss of a step is the mean over its micro-batches, so it
    # then depends on which sequences are in one micro-batch.
    is_mean = not batch or abs(batch["loss"] - batch["mean"]) <= 1e-5 * abs(batch["loss"])
    means = ""
    if not is_mean and len({*batch["targets"]}) > 1:
        counts = f"{min(batch['targets'])} to {max(batch['targets'])} targets"
        means = f"a batch's loss is not the mean over its sequences, which have {counts}"
    if not gaps:
        return "note" if means else "ok", means
    name, more = next(iter(gaps)), f" (and of {len(gaps) - 1} more)" * (len(gaps) > 1)
    words = f"in step 1 the gradient of {name}{more} differs by {gaps[name]:.2g} of its size "
    words += "between one rank with several micro-steps and two with 1"
    if is_mean or means or not same_rows:
        return "FAULT", f"{words}: {means}".removesuffix(": ")
    why = "GPT.forward returns another mean loss for larger batches. This is correct for a loss "
    why += "that balances experts; otherwise, sequences or targets are counted wrongly"
    return "note", f"{words}: {why}"


def optimizer_verdict(steps):
    """Return the verdict on whether each optimizer takes each step.

    steps: what probes.note_steps wrote after each step.
    """
    names = [name for each in steps for name, _ in each["stepped"]]
    counts = {name: names.count(name) for name in names}
    if {*counts.values()} == {len(steps)}:
        return "steps", "ok", f"{' and '.join(counts)} take each step"
    numbers = ", ".join(f"{name} {count}" for name, count in counts.items())
    why = "Trainer steps each optimizer of Trainer.parts once, and each step sets gradients to 0"
    return (
        "steps",
        "note",
        f"in {len(steps)} steps the optimizers step this often: {numbers}: {why}",
    )


def resume_verdict(lab, runs):
    # Return the verdict on whether all resumed runs end like the run that was not interrupted.
    resumed = [run for run in runs.values() if "RESUME" in run.env]
    faults = []
    for run in resumed:
        run.read()
        if len(run.ranks) == 1:
            _, kind, text = judge_equal("resume", runs["full"], [run], runs["again"])
        else:
            _, kind, text = judge_equal("resume", runs["two-ranks"], [run])
        if kind == "FAULT":
            faults.append(text)
    # A run that is resumed after the last step takes no steps. It only packs and scores.
    if len(faults) == 1 and faults[0].startswith(f"from-step-{lab.steps} "):
        words = "only the run resumed after the last step differs, so a training step sets "
        faults.append(words + "something that logits use: make it a buffer")
    names = ", ".join(run.name for run in resumed)
    return verdict("resume", "; ".join(faults), f"{names}: the same losses, score and weights")


def clock_verdicts(lab, runs):
    """Yield the verdict on learning rates and on the time limit.

    In the run "full", no learning rate may be below 0. The run "clock" has a time limit and two
    ranks. Its clock advances with each step, and on rank 1 faster than on rank 0. Nevertheless both
    ranks must have the same learning rates and the same weights, and the time limit must be kept.
    If two ranks cannot run, there is no run "clock"; a verdict is then yielded only for a fault of
    the run "full".
    """
    steps = read_step_notes(runs["full"])[0]
    run = runs.get("clock")
    if run is None:
        if below := negative_rates(steps):
            yield "clock", "FAULT", below
        return
    if below := negative_rates(steps):
        yield "clock", "FAULT", f"in a run without a time limit {below}"
        return
    first, second = ([step["stepped"] for step in steps] for steps in read_step_notes(run))
    if run.error and not first:
        text = f"a run with MAX_WALLCLOCK_SECONDS does not start: {run.error}"
        yield "clock", "note", text
        return
    fault = "" if first else "there is no step"
    for step, (a, b) in enumerate(zip(first, second, strict=False), 1):
        if a != b:
            fault = f"the rates of two ranks differ at step {step}"
            break
    fault = fault or replica_fault(run) or negative_rates(read_step_notes(run)[0])
    count = f"{len(first)} steps in the time of {lab.steps}"
    if not fault and len(first) > lab.steps:
        fault = f"there are {count}: the time limit is not kept"
    if fault:
        yield "clock", "FAULT", f"in a run with MAX_WALLCLOCK_SECONDS {fault}"
        return
    words = []
    # The verdict is a note if the run has another length than expected, if learning rates do not
    # fall to half or less, or if they are 0 in the middle of the run.
    is_odd = abs(len(first) - lab.steps) > 1
    for name in dict(first[0]):
        # The learning rates of the optimizer's first parameter group, relative to the largest one:
        # first of all steps, then of five steps that are evenly spaced.
        rates = [dict(step)[name][0] for step in first if name in dict(step)]
        rates = [rates[i * (len(rates) - 1) // 4] / (max(rates) or 1.0) for i in range(5)]
        words.append(f"{name} {' '.join(f'{rate:.3g}' for rate in rates)}")
        is_odd = is_odd or rates[-1] > 0.5 or not rates[2]
    text = "learning rates at 0, 25, 50, 75 and 100 % of the time, relative to the largest: "
    text += f"{', '.join(words)}; {count}"
    yield "clock", "note" if is_odd else "ok", text


def negative_rates(steps):
    # Return a text that says which optimizers have a learning rate below 0 in one of the steps;
    # empty if there is none.
    below = {name for step in steps for name, rates in step["stepped"] if min(rates) < 0}
    return f"learning rates of {', '.join(sorted(below))} fall below 0" if below else ""


def model_verdicts(lab, runs, facts, score_differs):
    """Yield the verdicts on the weights, the logits, the artifact and the score.

    facts: what the run "model" wrote (see probes.look_inside and probes.find_facts); {} if it wrote
    nothing.
    """
    if "batch" in facts:
        yield from weight_verdicts(facts)
        yield from loss_verdicts(runs["full"], facts)
        yield from sight_verdicts(facts["sight"])
        yield from artifact_verdicts(facts, score_differs)
        yield from score_verdicts(lab, runs["full"], facts, score_differs)
    else:
        yield "model", "FAULT", why_no_facts(runs["model"], facts)
    if score_differs:
        yield sum_verdict(runs["sum"])
        yield scorer_verdict(runs["scorer"])


def weight_verdicts(facts):
    """Yield the verdicts on the weights that were trained, exported and stored.

    They are the properties "trained", "exported", "whole", "stored" and "average".
    """
    yield verdict("trained", cli.join_some(facts["untrained"]), "training changes every weight")
    if facts["kept"]:
        words = "training changes these weights, but they are exported with their initial values"
        yield "exported", "FAULT", f"{cli.join_some(facts['kept'])}: {words}"
    if facts["foreign"]:
        words = "in the artifact, but not in a newly built model"
        yield "whole", "FAULT", f"{cli.join_some(facts['foreign'])}: {words}"
    name, gap = max(facts["gaps"].items(), key=lambda pair: pair[1], default=("none", 0.0))
    text = f"stored tensors differ from the exported ones by up to {gap:.2g} of their norm: {name}"
    fault = "" if gap <= GAP else text
    shifted, shift = max(facts["shifts"].items(), key=lambda pair: pair[1], default=("none", 0.0))
    if not fault and shift > SHIFT:
        fault = f"the stored numbers of {shifted} are shifted: the mean of their errors is "
        fault += f"{shift:.2g} of the errors' root mean square, where rounding has less than 0.1"
    yield verdict("stored", fault, text)
    if facts.get("rest", 1.0) <= REST:
        yield average_verdict(facts["average"], facts.get("last_equal"))


def average_verdict(shares, last_equal=None):
    """Return the verdict on the exported weights as an average of the weights after each step.

    shares: shares[0] is the share of the initial weights in the average, and shares[i] is the share
    of the weights after step i. last_equal: a step with a learning rate of 0 leaves the weights as
    they were, so weights may be equal after several steps. last_equal[i] is the last step after
    which the weights are the same as after step i. The share of all these equal weights together is
    shares[last_equal[i]], and their other shares are 0. None: no weights are equal.
    """
    last_equal = last_equal or [*range(len(shares))]
    total = sum(shares)
    places = ["the initial weights", *(f"step {i}" for i in range(1, len(shares)))]
    pairs = zip(places, shares, strict=True)
    used = {place: share for place, share in pairs if abs(share) > SHARE}
    if [*used] == places[-1:] and abs(total - 1) <= 5 * SHARE:
        return "average", "ok", "the exported weights are those after the last step"
    text = "the exported weights consist of those of "
    text += cli.join_some([f"{place} ({share:.1%})" for place, share in used.items()], 24)
    if abs(total - 1) > 5 * SHARE:
        return "average", "FAULT", f"{text}; the shares add up to {total:.4f}"
    words = odd_shares(shares, used, last_equal)
    return "average", "note" if words else "ok", "; ".join([text, *words])


def odd_shares(shares, used, last_equal):
    """Return a list of texts that say what is unusual in the shares of an average; empty if nothing
    is, or if they are the shares of a moving average.

    shares, last_equal: see `average_verdict`. used: {"the initial weights" or "step i": share} of
    those that have a share.
    """
    words = []
    last = len(shares) - 1
    if any(is_moving_average(shares, start, last_equal) for start in range(last)):
        return words
    if f"step {last}" not in used:
        words.append(
            "the weights after the last step have no share: does the average take the weights "
            "before the optimizers have stepped?"
        )
    if "the initial weights" in used:
        words.append("do the initial weights belong to it?")
    if len({*last_equal}) < len(shares):
        return words  # a share that several steps have together may be larger than the others
    for place, share in used.items():
        others = [each for name, each in used.items() if name != place]
        if len(others) >= 3 and max(others) - min(others) < SHARE < abs(share - others[0]):
            words.append(f"is the share of {place} intended? All others are equal")
    return words


def is_moving_average(shares, start, last_equal):
    """Return True if these are the shares of an exponential moving average that began as a copy of
    the weights after `start` steps.

    shares, last_equal: see `average_verdict`. The decay of the average is computed from the share
    of the last weights.
    """
    last = len(shares) - 1
    equal_steps = last - min(i for i, place in enumerate(last_equal) if place == last)
    # If the weights after the last n steps are equal, they have the share 1 - decay ** n together.
    decay = max(0.0, 1 - shares[-1]) ** (1 / (1 + equal_steps))
    wanted = [0.0] * start + [decay ** (last - start)]
    wanted += [(1 - decay) * decay ** (last - step) for step in range(start + 1, last + 1)]
    merged = [0.0] * len(shares)
    for place, share in zip(last_equal, wanted, strict=True):
        merged[place] += share
    return all(abs(a - b) < SHARE for a, b in zip(shares, merged, strict=True))


def loss_verdicts(full, facts):
    """Yield the verdict on the training loss of the last step. It should be equal to the loss that
    follows from the logits of the same sequences, with the same weights and in eval mode.

    If probes.find_score_loss could not compute the second loss, nothing is yielded. If it found two
    losses, the one that is nearer to the training loss is compared.
    """
    if not facts.get("score_losses"):
        return
    step = max(full.steps)
    trained = full.steps[step][0]
    scored = min(facts["score_losses"], key=lambda loss: abs(loss - trained))
    text = f"with the same weights, the sequences of step {step} have the training loss "
    text += f"{trained:.5g} and the score's loss {scored:.5g}"
    if abs(trained - scored) <= SAME_LOSS * scored:
        yield "loss", "ok", text
        return
    why = "this is right for dropout, an added loss, smoothed or hidden targets; otherwise, logits "
    why += "are computed in another way, inputs hold targets, or the loss is divided wrongly"
    yield "loss", "note", f"{text}: {why}"


def artifact_verdicts(facts, score_differs):
    # Yield the verdicts on "dtype" and "artifact". With --score-differs, a tensor without an effect
    # on the logits is only a note, because the scorer may use it in another way.
    yield dtype_verdict(facts["wide"])
    faults = []
    if facts["unused"] and score_differs:
        words = "please judge: does the score use it?"
        yield "artifact", "note", f"no logit depends on {cli.join_some(facts['unused'])}; {words}"
        if not facts["twice"]:
            return
    elif facts["unused"]:
        faults.append(f"no logit depends on {cli.join_some(facts['unused'])}")
    if facts["twice"]:
        words = "the same memory as another tensor, so it is stored twice"
        faults.append(f"{cli.join_some(facts['twice'])}: {words}")
    good = f"logits depend on each of the {facts['tensors']} stored tensors"
    yield verdict("artifact", "; ".join(faults), good)


def sight_verdicts(sight):
    """Yield the verdicts on which tokens the logits depend on: "own-token" and "look-ahead".

    sight: what probes.find_sight returned. Usually it was found in sequences of the script's own
    TRAIN_SEQ_LEN. If that was not possible, sight["short"] says why.
    """
    where = f"of two sequences of {sight['length']} tokens"
    if sight.get("random"):
        yield (
            "look-ahead",
            "FAULT",
            "two equal calls of logits return different values in eval mode",
        )
        return
    ignored = cli.join_some(sight["ignored"])
    fault = ignored and f"logits do not depend on their own token at positions {ignored} {where}"
    yield verdict("own-token", fault, "logits depend on the token at their own position")
    leaks = cli.join_some(sight["leaks"])
    fault = leaks and f"logits change with later tokens at positions {leaks} {where}"
    good = f"no logit depends on later tokens, in sequences of {sight['length']}"
    yield verdict("look-ahead", fault, good)
    if "short" in sight:
        yield "look-ahead", "note", f"longer sequences were not checked: {sight['short']}"


def dtype_verdict(wide):
    # Return the verdict on whether the model keeps its activations in bfloat16.
    # wide: what probes.find_wide found, or the text of the error with which the model failed
    if isinstance(wide, str):
        # If the error is about dtypes, the model combines tensors of different dtypes. Any other
        # error is no fault, because the model may need CUDA. A TypeError is about the arguments of
        # a function, one of which may be called dtype.
        is_mixed = "dtype" in wide or "scalar type" in wide
        is_mixed = is_mixed and not wide.startswith("TypeError")
        text = f"the model does not run in bfloat16: {wide}"
        return "dtype", "FAULT" if is_mixed else "note", text
    faults = ["the score is computed in bfloat16"] if "bfloat16" in wide["score"] else []
    if wide["blocks"]:
        faults.append(f"blocks {cli.join_some(wide['blocks'])} return float32")
    words = "with bfloat16 activations"
    good = f"{words} all blocks return bfloat16, and the score is float32"
    return verdict("dtype", faults and f"{words} {', and '.join(faults)}", good)


def score_verdicts(lab, full, facts, score_differs):
    """Yield the verdicts on "targets", "score" and "bytes".

    They compare the printed score with the one that follows from the logits, and the sizes in the
    log with those of the files. With score_differs, the two scores may differ, so the verdict on
    "score" is a note, and the number of scored targets is checked instead.
    """
    bits = facts["targets"] / math.log(2)
    computed = facts["nats"], facts["nats"] * bits / lab.val_bytes
    printed = full.scores
    text = "printed {:.6f} nats {:.6f} bpb, computed here {:.6f} nats {:.6f} bpb"
    text = text.format(*printed, *computed)
    if score_differs:
        if fault := target_fault(lab, facts):
            yield "targets", "FAULT", fault
        counted = printed[0] / math.log(2) / printed[1]
        actual = lab.val_bytes / facts["targets"]
        sizes = f"{counted:.4f} bytes per scored target, {actual:.4f} in the whole split"
        left = "please judge: is each token scored once, and is the difference plausible?"
        yield "score", "note", f"{text}; {sizes}; {left}"
    elif not facts["foreign"]:
        # (If the model has no place for some of the stored tensors, the computed score means
        # nothing.) The scores differ slightly, because they are sums in another order.
        equal = np.allclose(computed, printed, rtol=0, atol=2e-5)
        yield verdict("score", "" if equal else text, text)
    code, model = len(lab.script.read_bytes()), len(full.artifact)
    logged_code, logged_model = full.log.code_bytes or 0, full.log.model_bytes or 0
    fault = ""
    if logged_code < code or logged_model < model:
        fault = f"the log has {logged_code:,} + {logged_model:,} bytes, "
        fault += f"the files have {code:,} + {model:,}"
    yield verdict("bytes", fault, "the log counts all bytes of script and artifact")


def target_fault(lab, facts):
    """Return a text that says what is wrong with the numbers of scored targets and bytes; empty if
    nothing is.

    It is a fault if targets are missing, except for those of one last sequence, or if more bytes
    are counted than the validation split has. Nothing is checked if the numbers are not known,
    because the scorer does not sum them as Validation.evaluate does.
    """
    if not facts["counted"]:
        return ""
    counted, targets = facts["counted"]
    if not facts["targets"] - lab.seq_len <= targets <= facts["targets"]:
        return f"{targets:.0f} of {facts['targets']} targets are counted"
    if counted > lab.val_bytes + 0.5:  # 0.5 allows for errors of rounding
        return f"{counted:.0f} bytes are counted, but the split has {lab.val_bytes}"
    return ""


def sum_verdict(run):
    # Return the verdict on the three sums of probabilities that probes.sum_shares computes in the
    # run "sum". None of them may be larger than 1. A sum of nan could not be computed.
    sums = read_note(run, "facts").get("shares", [])
    cases = "the last target alone", "the first target alone"
    cases += ("the last target if all others are scored, too",)
    # A run that failed has no sums, so `sums` may be empty.
    pairs = [*zip(cases, sums, strict=False)]
    found = [f"{total:.6f} for {case}" for case, total in pairs if math.isfinite(total)]
    left_out = [case for case, total in pairs if not math.isfinite(total)]
    if not found:
        return "sum", "note", run.error or "a target cannot be scored alone"
    text = f"the probabilities of all values add up to {', to '.join(found)}"
    if left_out:
        text += f"; this sum could not be computed for {' and for '.join(left_out)}"
    # 2e-4 allows for errors of rounding.
    return verdict("sum", text if any(each > 1 + 2e-4 for each in sums) else "", text)


def scorer_verdict(run):
    # Return the verdict on whether losses change with tokens that follow their targets. See
    # probes.find_late, which the run "scorer" calls.
    found = read_note(run, "facts").get("late", [])
    if run.error or not found:
        why = "at none of the four positions the later tokens could be replaced and not scored"
        return "scorer", "note", run.error or why
    late = [f"those of the first {n} by {gap:.2g}" for n, gap in found if not gap <= LATE]
    fault = late and f"losses change with the tokens after the targets: {', '.join(late)}"
    counts = ", ".join(str(n) for n, _ in found)
    good = f"the losses of the first {counts} targets do not change with later tokens"
    return verdict("scorer", fault, good)


def setting_verdicts(full, runs):
    """Yield a note on those of the user's settings that made no difference at all: a run without
    the setting has the same results as the run `full`, bit by bit."""
    without = [run for name, run in runs.items() if name.startswith("without-")]
    same = [run.name.removeprefix("without-") for run in without if not differences(full, run)]
    if same:
        words = "made no difference, not in a single bit: is it the default, or only about speed?"
        yield "settings", "note", f"{', '.join(same)}: {words}"


def file_verdicts(lab, run):
    """Yield a note on files that the run opened, or left in its folder, and that a run of an
    unedited script would not open or leave."""
    # `known` is a pattern that matches the files of every run.
    script, data, own = (re.escape(str(path)) for path in (lab.script, lab.data, run.folder))
    known = rf".*\.pyc?(\.\d+)?$|{script}$|{data}[-\w]*/"
    known += rf"(fineweb_\w+\.bin|{MODEL}|tokenizer.sha256|\.producing)$"
    known += rf"|{own}/(notes/|checkpoints/|logs/({run.name}|write)\.|output0|lines0|final_model\.)"
    # Files of Python and of the system are left out. The temporary folder of the runs may be inside
    # a folder of the system, for example in /dev/shm, but its files are not left out.
    systems = f"{sys.prefix}/", f"{sys.base_prefix}/", "/proc/", "/sys/", "/dev/", "/etc/"
    files = {str(path) for path in run.folder.rglob("*") if path.is_file()}
    files |= {
        path
        for path in read_note(run, "opened")
        if path.startswith(f"{run.folder.parent}/") or not path.startswith(systems)
    }
    files = [path for path in files if not re.match(known, path)]
    if files:
        names = sorted(path.removeprefix(f"{run.folder}/") for path in files)
        words = "a usual run does not open or leave these files; is that intended?"
        yield "files", "note", f"{cli.join_some(names)}: {words}"


def trains_verdicts(runs, base):
    """Yield the verdict that says which optimizer trains which parameter.

    If there is a base, and some parameters are new or another optimizer trains them in the base,
    the verdict is a note on these parameters. Otherwise it is "ok" and lists all matrices.
    """
    trains = {name: (by, tuple(shape)) for name, (by, shape) in trained_by(runs["full"]).items()}
    before = trained_by(runs["base"]) if base else {}
    new = {name: pair for name, pair in trains.items() if pair[0] != before.get(name, [0])[0]}
    if before and new:
        yield "trains", "note", f"other than in {base.name}, {group_names(new)}"
    elif trains:
        matrices = {name: pair for name, pair in trains.items() if len(pair[1]) > 1}
        yield "trains", "ok", group_names(matrices)


def trained_by(run):
    """Return {name of a parameter: [the optimizer that trains it, its shape]} of a run."""
    return read_note(run, "trains")


def group_names(trains):
    """Return a text that says which optimizer trains which parameters.

    Parameters whose names differ only in numbers, such as the number of a block, are listed once.
    trains: {name of a parameter: (the optimizer that trains it, its shape)}
    """
    counts = Counter((by, re.sub(r"\d+", "*", name), shape) for name, (by, shape) in trains.items())
    words = []
    for optimizer in dict.fromkeys(by for by, _, _ in counts):
        parts = []
        for (by, name, shape), count in counts.items():
            if by == optimizer:
                times = f", {count} times" if count > 1 else ""
                parts.append(f"{name} ({' x '.join(map(str, shape))}{times})")
        words.append(f"{optimizer} trains {', '.join(parts)}")
    return "; ".join(words)


def speed_verdicts(lab, runs):
    """Yield the verdicts on what makes steps slow on a GPU. "reads": in a step, the host reads a
    value that the GPU computes. "compiles": torch.compile compiles again after the warm-up."""
    lines = source_lines(lab.script)

    def quote(number):
        return f"line {number} `{lines[int(number) - 1].strip()}`" if int(number) else "a library"

    run = runs["reads"]
    reads = read_note(run, "reads")
    left_out = ""
    if uncounted := read_note(run, "uncounted"):
        left_out = "; not counted, because a function that asks for the kind of device is called: "
        left_out += cli.join_some([quote(line) for line in uncounted], 4)
    if run.error:
        yield "reads", "note", f"a run that counts values that the host reads ends: {run.error}"
    elif reads:
        words = [f"{quote(line)} (in {len(steps)} steps)" for line, steps in reads.items()]
        why = "the host reads a value that the device computes, and on a GPU it waits there"
        yield "reads", "note", f"{why}: {cli.join_some(words, 4)}{left_out}"
    else:
        good = "in no step the host reads a value that the device computes"
        yield "reads", "ok", f"{good}{left_out}"
    run = runs["compiled"]
    found = read_note(run, "compiled")
    if run.error:
        yield "compiles", "note", f"a run with TORCH_COMPILE=1 ends: {run.error}"
    elif found:
        places = [*dict.fromkeys(place for place, _, _ in found)]
        _, line, reason = found[0]
        guard = re.search(r"failure\(s\):\s*- (?:\d+/\d+: )?(.*)", reason)
        why = f", because this does not hold: {guard[1].partition(' (HINT')[0]}" if guard else ""
        text = f"torch.compile compiles again in {cli.join_some(places)}, "
        text += f"first for {quote(line)}{cli.one_line(why)}"
        yield "compiles", "note", text
    else:
        good = "after the warm-up, nothing is compiled except by the first validation"
        yield "compiles", "ok", good


def edit_verdicts(base, runs, changed):
    """Yield notes on what the edit changes, and on lines of the edit that no run executed.

    base: the path of the unedited script, which the run "base" has run. changed: the lines of the
    edit; see `changed_lines`.
    """
    unedited = runs["base"]
    if unedited.error:
        text = unedited.error
    else:
        text = f"against {base.name} the edit changes "
        none = "nothing on one rank, not in a single bit: is its setting given here (not in the "
        none += (
            "environment), and large enough for 5 layers of 32 channels? is it only about speed?"
        )
        text += differences(unedited, runs["full"]) or none
    yield "effect", "note", text
    texts = [run.text(f"lines{rank}.txt") for run in runs.values() for rank in run.ranks]
    missed = changed.keys() - {int(number) for text in texts for number in text.split()}
    if missed:
        words = [f"{number} `{changed[number].strip()}`" for number in sorted(missed)]
        yield "lines", "note", f"no run executed these lines of the edit: {cli.join_some(words, 4)}"


def changed_lines(script, base):
    """Return {number: text} of the lines of the script that contain code and that are no lines of
    `base`. script, base: paths"""
    source = script.read_text("utf-8")
    known = {*source_lines(base)}
    can_run = code_lines(compile(source, "", "exec", dont_inherit=True))
    lines = enumerate(source_lines(script), 1)
    return {number: line for number, line in lines if number in can_run and line not in known}


def source_lines(script):
    """Return the list of the lines of a script. Element i is the line that Python calls line i + 1.

    str.splitlines would be wrong here, because it also ends a line at a form feed.
    """
    return script.read_text("utf-8").split("\n")


def code_lines(code):
    """Return the numbers of all lines that can be executed in a code object and in the functions
    and classes inside it."""
    inner = [code_lines(each) for each in code.co_consts if hasattr(each, "co_lines")]
    return {number for _, _, number in code.co_lines() if number}.union(*inner)


def verdicts(script, settings, base=None, score_differs=False):
    """Run the script with these settings, and yield the verdicts: tuples (property, kind, text).

    The kind is "ok", "note" or "FAULT". settings: {NAME: text}, which turn the edit on. base: the
    script with which the edit is compared; None, or a file that is equal to the script: it is not
    compared. score_differs: True if the score is, on purpose, not computed from the logits of plain
    sequences alone. Raises ToolError if the script does not run.
    """
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        lab = Lab(Path(folder), script, settings)
        base = base and Path(base).resolve()
        if base and base.read_bytes() == lab.script.read_bytes():
            base = None
        yield from verify(lab, base, score_differs)
