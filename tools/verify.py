"""Prove an edit: does a changed train_gpt.py still do what a run promises?

    python3 tools/verify.py mine.py EMA_DECAY=0.9 ...    with the settings that turn your edit on

It runs the script at a tiny size on the CPU, on data that it makes, and compares the runs. It
prints a line for each property: `ok`, `note` (for you to judge) or `FAULT`. The exit code is 1 if
there is a fault or the script does not run, else 0.
"""

import json
import math
import signal
import sys
import tempfile
from pathlib import Path

import cli
import numpy as np
import torch
from probes import (
    add_shares,
    add_shares_alone,
    find_facts,
    look_inside,
    run_blind,
    run_clocked,
    run_first_step,
)
from probes import run_main as run_noted
from tinyruns import Lab, Run, call_main, find_script

CAP = 16_000_000  # bytes of script and artifact
SECONDS = 600  # of a run to a cap, by a clock that goes by steps
ROUNDING = 0.01  # nats: two ranks add in another order
RANDOM = 0.3  # nats: the same where ranks draw other random numbers, as for dropout
GRADIENT = 1e-4  # relative: right edits have 1e-6, wrong ones 0.01 and more
TWO = {"ranks": 2, "GRAD_ACCUM_STEPS": 1, "WARMUP_STEPS": 0}
MEANS = {  # what a fault means, and where to look
    "repeatable": "a result depends on more than SEED and step: on other random numbers, time, the "
    "order of a set, or checkpoints being written",
    "resume": "not in checkpoints: name it in Trainer.parts, a number in Trainer.state_dict, what "
    "logits need beside weights in a buffer; rows: a step must take its micro_steps batches",
    "priming": "a step changes what is in no part of Trainer.parts, so priming cannot put it back",
    "validation": "validations and log lines must leave weights, state and train mode as they were",
    "unseen": "training or the artifact depends on the validation split: the score is too good",
    "overlap": "results depend on when batches are read: see Pipeline and BatchPlan",
    "ranks": "a step and the score are means over all ranks' rows: divide own losses by the "
    "number of micro-batches, give batches equal numbers of targets, change gradients after "
    "all_reduce",
    "replicas": "what follows all_reduce must be the same on all ranks, random numbers too; and "
    "all ranks must make the same collective calls",
    "clock": "ranks' clocks differ: let a schedule go by exchange.elapsed_ms, which is the same on "
    "all ranks, or by steps; and no step may end after the cap",
    "model": "the edited script cannot be looked at: see above",
    "trained": "each weight needs one optimizer (see make_optimizers) and a gradient",
    "exported": "what is exported is not trained: an average that never moves (in bfloat16?), or "
    "one of the first weights",
    "look-ahead": "later tokens, or random numbers, change logits: the score is too good",
    "dtype": "a float32 tensor meets the activations: cast it with p.to(x.dtype)",
    "score": "what is scored is not what is stored, or not the mean over all rows in eval mode "
    "(--score-differs if it is so on purpose); if only the bits differ, bytes: see ByteTable",
    "bits": "bytes that are counted must be those of the targets that are scored: see ByteTable",
    "whole": "the model must be whole from __init__ on: what is made later is in no new model",
    "sum": "tokens are scored with what is learned from them, by the best of several scores, or by "
    "numbers that are no shares",
    "artifact": "no logit depends on it: leave it out of the artifact; or two parameters share "
    "memory, and it is stored twice",
    "bytes": f"script and artifact may have {CAP:,} bytes, all of which the log must count",
}


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


def alike(name, full, others):
    gaps = {run.name: differences(full, run) for run in others}
    fault = "; ".join(f"{other} differs: {gap}" for other, gap in gaps.items() if gap)
    return verdict(name, fault, f"{' and '.join(gaps)}: the same losses, score and weights")


def steps_of(run):
    """What each rank noted after each of its steps."""
    texts = [run.text(f"steps{rank}.jsonl") for rank in run.ranks]
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


def load_all(run, name):
    return [torch.load(run.folder / f"{name}{rank}.pt", weights_only=True) for rank in run.ranks]


# === Verdicts: (property, "ok", "note" or "FAULT", text) ===
def verify(lab, base, quick, score_differs):
    if base and find_script(base).read_bytes() == lab.script.read_bytes():
        base = None
    every = {"CHECKPOINT_EVERY": 1, "CHECKPOINT_KEEP": lab.steps + 1}
    full = Run(lab, "full", run_noted, **every)
    again = Run(lab, "again", run_noted, context=1)
    alone = Run(lab, "not-primed", run_noted, WARMUP_STEPS=0)
    two = Run(lab, "two-ranks", run_noted, **TWO, **every)
    often = Run(lab, "validated-each-step", run_noted, VAL_LOSS_EVERY=1, TRAIN_LOG_EVERY=0)
    other = Run(lab, "other-validation", run_noted, DATA_PATH=lab.with_validation("other", shuffle))
    blind = Run(lab, "blind", run_blind, VAL_LOSS_EVERY=1, TRAIN_LOG_EVERY=0)
    ahead = Run(lab, "not-read-ahead", run_noted, TRAIN_PREFETCH=0, VAL_PREFETCH=0)
    bare = Run(lab, "base", call_main, script=find_script(base)) if base else None
    runs = [two, full, again, alone, often, other, blind]
    runs += [] if quick else [ahead]
    runs += [bare] if base else []
    print("tiny runs, seconds for train_gpt.py, minutes with larger sizes:", end="")
    lab.run_all(runs)
    for run in runs:
        run.read()
    if full.error:
        print()
        raise cli.ToolError(f"{lab.script} does not run at a tiny size: {full.error}")
    late = late_runs(lab, full, two, quick, score_differs)
    repeatable = alike("repeatable", full, [again])
    if "FAULT" not in repeatable:  # else no run can be compared with another
        lab.run_all(late.values())
    print()
    yield repeatable
    if "FAULT" in repeatable:
        return
    yield alike("priming", full, [alone])
    yield alike("validation", full, [often])
    yield unseen_verdict(full, other, often, blind)
    if not quick:
        yield alike("overlap", full, [ahead])
    yield from two_rank_verdicts(lab, alone, two, score_differs)
    yield from late_verdicts(lab, full, two, late)
    if base:
        yield "effect", "note", effect(base, bare, full)


def shuffle(tokens):
    """Other tokens in all places but those where documents begin."""
    random = np.random.default_rng(0)
    return np.where(tokens < 3, tokens, random.integers(3, tokens.max() + 1, len(tokens)))


def unseen_verdict(full, other, often, blind):
    tokens = differences(full, other, with_score=False)
    results = differences(often, blind, with_score=False)
    faults = [f"with other validation tokens: {tokens}"] if tokens else []
    faults += [f"where each validation says the opposite: {results}"] if results else []
    good = "neither tokens nor results of validation change weights or artifact"
    return verdict("unseen", "; ".join(faults), good)


def effect(base, bare, full):
    what = "" if bare.error else f"against {Path(base).name} the edit changes "
    none = "nothing on one rank, bit for bit: is its setting given here (not in the environment), "
    none += "and large enough for 3 layers of 32 channels? is it about speed alone?"
    return f"{what}{differences(bare, full) or none}"


def two_rank_verdicts(lab, alone, two, score_differs):
    fault = apart_after(two)
    yield verdict("replicas", fault, "both ranks have the same weights after each step")
    drawn = any(each["drawn"] for steps in steps_of(alone) for each in steps[:1])
    kind, words = gradient_words(lab, alone, two, drawn)
    nats = RANDOM if drawn or kind == "note" else ROUNDING
    # With --score-differs without the score: a rank may learn from what it has scored.
    gap = "" if two.error else differences(alone, two, nats, with_score=not score_differs)
    if score_differs and not (alone.error or two.error):
        gap = ", ".join(filter(None, (gap, score_gap(alone, two))))
    good = f"two are as one within {nats} nats{', scores left out' if score_differs else ''}"
    if kind == "FAULT" or gap:
        text = "; ".join(each for each in (words, gap and f"two ranks differ: {gap}") if each)
        yield "ranks", "FAULT", text
    else:
        yield "ranks", kind, words or good
    yield optimizer_verdict(alone)


def score_gap(one, two):
    """What scores of one and of two ranks have alike, whatever a rank learns from its share."""
    (one_nats, one_bits), (two_nats, two_bits) = one.scores, two.scores
    if abs(one_nats / one_bits * two_bits / two_nats - 1) > 1e-6:
        return "in the score bytes per target, so not all targets or bytes are added up"
    half_or_double = any(abs(two_nats / one_nats / factor - 1) < 0.1 for factor in (0.5, 2))
    return f"score {one_nats:.4f}, {two_nats:.4f} nats: is it summed?" if half_or_double else ""


def gradient_words(lab, alone, two, drawn):
    """Compares what optimizers get in step 1: (FAULT, note or ok; of what, and why it differs)."""
    try:
        ones, (twos, *others) = load_all(alone, "first")[0], load_all(two, "first")
    except OSError:  # they did not come so far
        return "ok", ""
    if others and gradient_gaps(twos, others[0]):  # each rank has its own: an optimizer adds them
        twos = {name: grad + others[0].get(name, 0) for name, grad in twos.items()}
    gaps = {} if drawn else gradient_gaps(ones, twos)
    if not gaps and not drawn:
        return "ok", ""
    uneven, of_losses = look_at_losses(lab)
    means = "a batch's loss is a mean over its own targets, {} to {}: those of few weigh more"
    means = means.format(*uneven) if uneven else ""
    if not gaps:
        return ("note" if uneven else "ok"), means
    name, more = next(iter(gaps)), f" (and of {len(gaps) - 1} more)" * (len(gaps) > 1)
    words = f"in step 1 the gradient of {name}{more} differs by {gaps[name]:.2g} of its size "
    words += "between one rank with 8 micro-steps and two with 1"
    if uneven:
        return "FAULT", f"{words}: {means}"
    same_rows = not two.error and alone.steps[1][1] == two.steps[1][1]
    if same_rows and of_losses and not any(map(gradient_gaps, (ones, twos), of_losses)):
        why = "of larger batches GPT.forward returns another mean loss. Right for a balance of "
        return "note", f"{words}: {why}experts; else it counts rows or targets wrongly"
    return "FAULT", words


def look_at_losses(lab):
    """([fewest, most] targets of batches of one size, if they differ; for one rank and for two:
    the mean gradient of all losses that the model returns in step 1)."""
    runs = Run(lab, "one-step", run_first_step, WARMUP_STEPS=0)
    runs = runs, Run(lab, "one-step-of-two", run_first_step, **TWO)
    lab.run_all(runs)
    print()
    try:
        found = [load_all(run, "losses") for run in runs]
    except OSError:
        return [], []
    counts = [count for run in found for _, sizes in run for count in sizes.values()]
    uneven = next(([min(each), max(each)] for each in counts if len(each) > 1), [])
    ranks = [[gradients for gradients, _ in run] for run in found]
    return uneven, [{n: sum(g[n] for g in each) / len(each) for n in each[0]} for each in ranks]


def optimizer_verdict(alone):
    """Does each optimizer take each step?"""
    steps = steps_of(alone)[0]
    names = [name for each in steps for name, _ in each["stepped"]]
    counts = {name: names.count(name) for name in names}
    odd = [f"{name} {count} of {len(steps)}" for name, count in counts.items()]
    if {*counts.values()} == {len(steps)}:
        return "steps", "ok", f"{' and '.join(counts)} take each step"
    lost = "each step sets gradients to 0, so those between are lost unless something keeps them"
    return "steps", "note", f"an optimizer leaves out steps: {', '.join(odd)}; {lost}"


# === Verdicts that need the checkpoints and the artifact of `full` ===
def late_runs(lab, full, two, quick, score_differs):
    points = lab.steps // 3 | 1, 5 * lab.steps // 6, lab.steps  # an odd one, too
    runs = {}
    if not (quick or two.error):  # the longest first
        end = {"ITERATIONS": 2 * lab.steps, "MAX_WALLCLOCK_SECONDS": SECONDS}
        pace = SECONDS / lab.steps
        runs["clock"] = Run(lab, "clock", run_clocked, pace, **TWO | end)
    if score_differs:
        for name, look in (("sum", add_shares), ("alone", add_shares_alone)):
            short = lab.with_validation(name, lambda tokens: tokens[: 3 * lab.seq_len + 1])
            runs[name] = Run(lab, name, look_inside, look, full.folder, DATA_PATH=short)
    if not two.error:
        file = f"{two.folder}/checkpoints/{two.name}/step_{points[0]:08d}.pt"
        runs["two"] = Run(lab, f"two-from-step-{points[0]}", run_noted, **TWO, RESUME=file)
    runs["model"] = Run(lab, "model", look_inside, find_facts, full.folder)
    for step in points:
        file = f"{full.folder}/checkpoints/full/step_{step:08d}.pt"
        runs[step] = Run(lab, f"from-step-{step}", run_noted, RESUME=file)
    return runs


def late_verdicts(lab, full, two, late):
    resumed = [run for run in late.values() if "RESUME" in run.env]
    for run in resumed:
        run.read()
    gaps = {run.name: differences(two if run is late.get("two") else full, run) for run in resumed}
    fault = "; ".join(f"{name} differs: {gap}" for name, gap in gaps.items() if gap)
    yield verdict("resume", fault, f"{', '.join(gaps)}: the same losses, score and weights")
    if "clock" in late:
        yield clock_verdict(lab, late["clock"])
    facts = facts_of(late["model"])
    if facts:
        yield from model_verdicts(facts)
        yield from score_verdicts(lab, full, facts, score_differs="sum" in late)
    else:
        yield verdict("model", late["model"].error or "no facts", "")
    if "sum" in late:
        yield sum_verdict(late["sum"], late["alone"])


def facts_of(run):
    return json.loads(run.text("facts.json") or "{}")


def clock_verdict(lab, run):
    """A run to a cap, in which time goes by steps and faster on rank 1."""
    mine, theirs = ([each["stepped"] for each in steps] for steps in steps_of(run))
    if run.error and not mine:
        return "clock", "note", f"a run to MAX_WALLCLOCK_SECONDS does not start: {run.error}"
    pairs = enumerate(zip(mine, theirs, strict=False), 1)
    apart = next((f"rates of two ranks differ at step {i}" for i, (a, b) in pairs if a != b), "")
    if fault := apart or apart_after(run):
        return "clock", "FAULT", f"in a run to MAX_WALLCLOCK_SECONDS {fault}"
    if len(mine) > lab.steps:
        return "clock", "FAULT", f"{len(mine)} steps in time for {lab.steps}: the cap is not kept"
    rates = {}  # of each optimizer's first group, in each step
    for name, groups in [pair for step in mine for pair in step]:
        rates.setdefault(name, []).append(groups[0])
    words = []
    for name, each in rates.items():
        largest = max(map(abs, each)) or 1.0
        each[:] = [each[i * (len(each) - 1) // 4] / largest for i in range(5)]
        words.append(f"{name} {' '.join(f'{rate:.3g}' for rate in each)}")
    text = f"rates at 0, 25, 50, 75, 100 % of the time, over the largest: {', '.join(words)}; "
    odd = abs(len(mine) - lab.steps) > 1 or any(
        each[-1] > 0.5 or not each[2] for each in rates.values()
    )
    return "clock", "note" if odd else "ok", f"{text}{len(mine)} steps in time for {lab.steps}"


def model_verdicts(facts):
    yield verdict("trained", cli.some(facts["untrained"]), "training changes every weight")
    if facts["kept"]:
        words = "training changes them, but what is exported has their first values"
        yield "exported", "FAULT", f"{cli.some(facts['kept'])}: {words}"
    if facts["foreign"]:
        words = "in the artifact, but not in a model that is made anew"
        yield "whole", "FAULT", f"{cli.some(facts['foreign'])}: {words}"
    seen = facts["leaks"]
    fault = f"logits of {len(seen)} positions change with later tokens, first {seen[:1]}"
    yield verdict("look-ahead", seen and fault, "no logit depends on later tokens")
    wide = facts["wide"]
    if isinstance(wide, str):
        yield "dtype", "note", f"in bfloat16 it does not run on a CPU: {wide}"
    else:
        fault = "the score is computed in bfloat16" if "bfloat16" in wide["score"] else ""
        if wide["blocks"]:
            fault = f"blocks {cli.some(wide['blocks'])} return float32"
        words = "with bfloat16 activations"
        good = f"{words} all blocks return bfloat16, and the score is float32"
        yield verdict("dtype", fault and f"{words} {fault}", good)
    unused = facts["unused"]
    size = f"{len(unused)} tensors, about {sum(unused.values())} bytes"
    fault = unused and f"{cli.some([*unused])}: {size}"
    yield verdict("artifact", fault, f"logits depend on each of {facts['tensors']} tensors")


def score_verdicts(lab, full, facts, score_differs):
    bits = facts["targets"] / math.log(2)
    hand = facts["nats"], facts["nats"] * bits / lab.val_bytes
    printed = full.scores
    seen = "printed {:.6f} nats {:.6f} bpb, by hand {:.6f} {:.6f}".format(*printed, *hand)
    if score_differs:
        fault = bytes_fault(lab, facts)
        if fault:
            yield "bits", "FAULT", fault
        counted = printed[0] / math.log(2) / printed[1]
        right = lab.val_bytes / facts["targets"]
        left = "left to you: is each token scored once, is so much plausible?"
        yield "score", "note", f"{seen}; {counted:.4f} bytes per target, in all {right:.4f}; {left}"
    elif not facts["foreign"]:  # else there is no model to compute it with
        equal = np.allclose(hand, printed, rtol=0, atol=2e-5)  # one sum, added in another order
        yield verdict("score", "" if equal else seen, seen)
    yield "average", "note", average_words(full, facts)
    code, model = len(lab.script.read_bytes()), len(full.artifact)
    seen = f"script {code:,} + tiny artifact {model:,} of {CAP:,}: weigh a real run's artifact"
    kind = "FAULT" if code + model > CAP else "note"
    logged = full.log.code_bytes or 0, full.log.model_bytes or 0
    if logged[0] < code or logged[1] < model:
        kind = "FAULT"
        seen = f"the log has {logged[0]:,} + {logged[1]:,}, the files {code:,} + {model:,}"
    yield "bytes", kind, seen


def bytes_fault(lab, facts):
    """Are more bytes counted than the scored targets can have? Each that is left out has one."""
    if not facts["counted"]:
        return ""
    (counted, targets), (given, silent, most) = facts["counted"], facts["given"]
    if targets > facts["targets"]:
        return f"{targets:.0f} targets are counted, and the split has {facts['targets']}"
    most = min(lab.val_bytes, most - max(0, given - targets - silent))
    words = (
        f"{counted:.0f} bytes are counted for {targets:.0f} targets that have at most {most:.0f}"
    )
    return words if targets <= given and counted > most + 0.5 else ""


def average_words(full, facts):
    """What differs between training and score, for weights that should be the same."""
    validations = [line.val_loss for line in full.log.validations]
    score, last = full.scores[0], validations[-1] if validations else math.nan
    words = f"score {score:.4f}, last validation of the trained weights {last:.4f}"
    if facts["losses"]:
        loud, quiet, plain = facts["losses"]
        words += f"; loss of the same rows in train mode {loud:.4f}, in eval mode {quiet:.4f}, "
        words += f"of the logits {plain:.4f}"
    return words


def sum_verdict(among_all, scored_alone):
    facts = facts_of(among_all) | facts_of(scored_alone)
    if "sum" not in facts or "alone" not in facts:
        return verdict("sum", among_all.error or scored_alone.error or "no facts", "")
    total, alone = facts["sum"], facts["alone"]
    seen = f"the score gives all values of the last token {total:.6f} together"
    if alone > 1 + 2e-4:  # nan where it needs more targets
        seen += f", and {alone:.6f} where it is scored alone"
    off = not abs(total - 1) < 2e-4 or alone > 1 + 2e-4
    return verdict("sum", seen if off else "", seen)


def verdicts(script, settings, base=None, quick=False, score_differs=False):
    """Yields (property, "ok", "note" or "FAULT", text); ToolError for one that does not run."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        lab = Lab(Path(folder), script, settings)
        lab.prepare(settings)
        yield from verify(lab, base, quick, score_differs)


def main(arguments):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    quick = "leave out the runs that read no batch ahead and that end by the clock"
    parser.add_argument("--quick", action="store_true", help=quick)
    differs = "the score is on purpose not that of plain rows (windows, test-time training)"
    parser.add_argument("--score-differs", action="store_true", help=differs)
    base = "say what changes against this script (default: train_gpt.py)"
    parser.add_argument("--base", metavar="FILE", default=cli.ROOT / "train_gpt.py", help=base)
    options = vars(parser.parse_intermixed_args(arguments))
    script = options.pop("script")
    settings = {}
    for pair in options.pop("settings"):
        name, equals, text = pair.partition("=")
        if not equals or name in settings:
            parser.error(f"{pair}: settings are NAME=value, each once, after the script")
        settings[name] = text
    return cli.run(lambda: prove(script, settings, **options))


def prove(script, settings, **options):
    """Prints the verdicts; returns the exit code."""
    faults = 0
    for name, kind, text in verdicts(script, settings, **options):
        print(f"{kind:5} {name:10} {text}", flush=True)
        if kind == "FAULT":
            faults += 1
            print(f"{'':16} {MEANS[name]}", flush=True)
    print(f"faults: {faults}")
    return int(faults > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
