"""Prove an edit: does a changed train_gpt.py still do what a run promises?

    python3 tools/verify.py mine.py EMA_DECAY=0.9 ...    with the settings that turn your edit on

It runs the script at a tiny size on the CPU, on data that it makes, and compares the runs. It
prints a line for each property: `ok`, `note` (for you to judge) or `FAULT`. The exit code is 1 if
there is a fault or the script does not run, else 0.
"""

import argparse
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import zlib
from pathlib import Path

import cli
import numpy as np
import torch
import torch.nn.functional as F
from tinyruns import VAL_ROWS, Lab, Run, call_main, find_script, load, read_shard, run_all

BACKWARD = slice(None, None, -1)
CAP = 16_000_000  # bytes of script and artifact
ROUNDING = 0.01  # nats: two ranks add in another order
RANDOM = 0.3  # nats: the same where ranks draw other random numbers, as for dropout
MEANS = {  # what a fault means, and where to look
    "repeatable": "a result depends on more than SEED and step: on other random numbers, time, "
    "or checkpoints being written",
    "resume": "not in checkpoints: make it an attribute of Trainer itself; rows: batches of a step",
    "priming": "a step changes what is in no attribute of Trainer, so priming cannot put it back",
    "validation": "validations and log lines must leave weights, state and train mode as they were",
    "unseen": "training depends on validation tokens: the score is too good",
    "overlap": "results depend on when batches are read: see Pipeline and BatchPlan",
    "ranks": "a step and the score are means over all ranks' rows; batches need equal targets",
    "replicas": "what follows all_reduce must be the same on all ranks, random numbers too",
    "model": "the edited script cannot be looked at: see above",
    "trained": "one optimizer must have it, and a gradient must reach it: see make_optimizers",
    "look-ahead": "later tokens, or random numbers, change logits: the score is too good",
    "score": "what is scored is not what is stored, or not the mean over all rows in eval mode "
    "(--score-differs if it is so on purpose); if only the bits differ, bytes: see ByteTable",
    "sum": "tokens are scored with what is learned from them, or by numbers that are no shares",
    "artifact": "stored twice, or no logit depends on it: leave it out of the artifact",
    "bytes": f"script and artifact may have {CAP:,} bytes",
}


# === Inside a new process ===
def run_main(script):
    """The same without the time for imports. Notes after each step what ranks must have alike."""
    module = load(script)
    step = module.Trainer.train_step
    seed_step = module.seed_step
    seeded = []

    def seed_and_note(*arguments):
        seed_step(*arguments)
        seeded[:] = random_state()

    def train_step(run, *rest):
        step(run, *rest)
        drawn = seeded != random_state()  # in this step
        weights = itertools.chain(run.model.parameters(), run.model.buffers())
        crc = zlib.crc32(b"".join(t.detach().numpy().tobytes() for t in weights))
        with open(f"steps{run.runtime.rank}.txt", "a") as file:
            print(f"{crc} {drawn}", file=file)

    module.seed_step = seed_and_note
    module.Trainer.train_step = train_step
    return module.main([], os.environ)


def random_state():
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def look_inside(script, look, full):
    """Writes facts.json: what look(module, run) finds with the artifact of `full` in the model."""
    module = load(script)

    @torch.no_grad()
    def train(run):
        begun = {name: p.clone() for name, p in run.model.named_parameters() if p.requires_grad}
        trained = torch.load(full / "final_model.pt", "cpu", weights_only=True)
        kinds = {name: torch.zeros_like(t) for name, t in trained.items()}  # without their values
        stored = module.unpack((full / "final_model.int8.ptz").read_bytes(), kinds)
        run.model.load_state_dict(stored, strict=False)
        facts = look(module, run, stored)
        both = begun.keys() & trained.keys()
        same = [name for name in both if torch.equal(begun[name], trained[name])]
        facts["untrained"] = sorted(name for name in same if begun[name].numel())
        held = [p for group in run.groups for p in group["params"]]
        twice = {name for name, p in run.model.named_parameters() if sum(p is q for q in held) > 1}
        facts["untrained"] += sorted(f"{name} (in two optimizers)" for name in twice)
        others = [p for p in held if not any(p is q for q in run.model.parameters())]
        words = "in an optimizer, but no nn.Parameter of the model"
        facts["untrained"] += [f"a tensor of shape {tuple(p.shape)} ({words})" for p in others]
        Path("facts.json").write_text(json.dumps(facts))
        os._exit(0)

    module.Trainer.train = train
    return module.main([], os.environ)


def find_facts(module, run, stored):
    model = run.model
    model.eval()
    tokens = torch.from_numpy(read_shard(val_path(run)).astype(np.int64))
    x, y = tokens[:-1].view(VAL_ROWS, -1), tokens[1:].view(VAL_ROWS, -1)
    logits = torch.cat([model.logits(row[None]) for row in x])
    nats = F.cross_entropy(logits.flatten(0, 1).double(), y.flatten()).item()
    torch.manual_seed(0)
    for p in model.parameters():  # zeros would hide what depends on what
        p.add_(torch.randn_like(p), alpha=0.3)
    leaks = find_leaks(model, x[:2], run.config.vocab_size)
    unused = find_unused(model, x[:2], stored)
    sizes = {"targets": y.numel(), "tensors": len(stored)}
    return {"nats": nats, "leaks": leaks, "unused": unused, **sizes}


def val_path(run):
    return Path(run.config.data_path, "fineweb_val_000000.bin")


def find_leaks(model, x, vocab_size):
    """The positions whose logits change with later tokens, also with those of later rows."""
    plain = model.logits(x).flatten(0, 1)
    leaks = []
    for end in range(1, x.numel(), max(1, x.numel() // 64)):
        changed = x.flatten().clone()
        changed[end:] = torch.randint(vocab_size, (x.numel() - end,))
        gap = model.logits(changed.view_as(x)).flatten(0, 1)[:end] - plain[:end]
        if not gap.abs().max() < 1e-5:  # also where it is nan
            leaks.append(end - 1)
    return leaks


def find_unused(model, x, stored):
    """{name: about how many bytes} of what is stored twice, or without an effect on logits."""
    unused = {}
    places = set()
    plain = model.logits(x)
    for name, t in model.state_dict().items():
        if name in stored and t.is_floating_point() and t.numel():
            was = t.clone()
            t.copy_(torch.randn_like(t))
            if torch.equal(model.logits(x), plain) or t.data_ptr() in places:
                unused[name] = len(zlib.compress(stored[name].half().numpy().tobytes()))
            t.copy_(was)
            places.add(t.data_ptr())  # a tensor of two names is stored twice
    return unused


def add_shares(module, run, stored):
    """What the score gives to all values of the validation's last token, added up.

    Who predicts the token from those before it gives it shares of 1, whatever the method.
    """
    widen = module.BatchPlan.widen
    path = val_path(run)
    targets = {}
    hidden = -1

    def widen_and_count(plan, rows, tokens, x, y):
        widen(plan, rows, tokens, x, y)
        y[y == hidden] = -100
        targets[rows.start] = int((y >= 0).sum())

    def nats_with(token):
        with open(path, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(np.uint16(token).tobytes())
        run.model.load_state_dict(stored, strict=False)
        return run.evaluate(module.FINAL)[0] * sum(targets.values())

    module.BatchPlan.widen = widen_and_count
    every = range(run.config.vocab_size)
    totals = np.array([nats_with(token) for token in every])
    hidden = min({*every} - {*read_shard(path)[:-1].tolist()})
    return {"sum": float(np.exp(nats_with(hidden) - totals).sum())}


# === Verdicts: (property, "ok", "note" or "FAULT", text) ===
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
    score = max(abs(a.score[name] - b.score[name]) for name in ("val_loss", "val_bpb"))
    words = [f"the rows of step {rows[0]}"] if rows else []
    words += [f"losses from step {apart[0]} on, by up to {max(gaps.values()):.2g}"] if apart else []
    words += [f"score by {score:.2g}"] if with_score and not score <= nats else []
    if nats == 0:
        words += ["artifact"] if with_score and a.artifact != b.artifact else []
        words += weight_differences(a.weights, b.weights)
    return ", ".join(words)


def weight_differences(a, b):
    if {name: t.shape for name, t in a.items()} != {name: t.shape for name, t in b.items()}:
        return ["names or shapes of weights"]
    most = max((a[name].double() - b[name].double()).norm(math.inf).item() for name in a)
    return [f"weights by up to {most:.2g}"] if most else []


def verdict(name, fault, good):
    return name, "FAULT" if fault else "ok", fault or good


def alike(name, full, others):
    gaps = {run.name: differences(full, run) for run in others}
    fault = "; ".join(f"{other} differs: {gap}" for other, gap in gaps.items() if gap)
    return verdict(name, fault, f"{' and '.join(gaps)}: the same losses, score and weights")


def verify(lab, base, quick, score_differs):
    if base and find_script(base).read_bytes() == lab.script.read_bytes():
        base = None
    full = Run(lab, "full", run_main, CHECKPOINT_EVERY=1, CHECKPOINT_KEEP=lab.steps + 1)
    again = Run(lab, "again", run_main)
    alone = Run(lab, "not-primed", run_main, WARMUP_STEPS=0)
    two = Run(lab, "two-ranks", run_main, ranks=2, GRAD_ACCUM_STEPS=1, WARMUP_STEPS=0)
    often = Run(lab, "validated-each-step", run_main, VAL_LOSS_EVERY=1, TRAIN_LOG_EVERY=0)
    other = Run(lab, "other-validation", run_main, DATA_PATH=lab.with_validation(BACKWARD))
    runs = [two, full, again, alone, often, other]
    if not quick:
        runs.append(Run(lab, "not-read-ahead", run_main, TRAIN_PREFETCH=0, VAL_PREFETCH=0))
    if base:
        runs.append(Run(lab, "base", call_main, script=find_script(base)))
    print("tiny runs: 20 seconds for train_gpt.py, minutes with larger sizes", flush=True)
    run_all(runs)
    for run in runs:
        run.read()
    if full.error:
        raise cli.ToolError(f"{lab.script} does not run at a tiny size: {full.error}")
    repeatable = alike("repeatable", full, [again])
    yield repeatable
    if "FAULT" in repeatable:
        return  # no run can be compared with another
    yield alike("priming", full, [alone])
    yield alike("validation", full, [often])
    seen = differences(full, other, with_score=False)
    fault = seen and f"with other validation tokens: {seen}"
    yield verdict("unseen", fault, "validation tokens do not change what is trained")
    if not quick:
        yield alike("overlap", full, runs[6:7])
    yield from two_rank_verdicts(alone, two, score_differs)
    yield from late_verdicts(lab, full, score_differs)
    if base:
        what = "" if runs[-1].error else f"against {Path(base).name} the edit changes "
        none = (
            "nothing, bit for bit: is its setting given here (not in the environment), and large "
        )
        none += "enough for 3 layers of 32 channels? is it about speed alone?"
        yield "effect", "note", f"{what}{differences(runs[-1], full) or none}"


def two_rank_verdicts(alone, two, score_differs):
    sums = [path.read_text().splitlines() for path in sorted(two.folder.glob("steps?.txt"))]
    apart = [step for step, pair in enumerate(zip(*sums, strict=False), 1) if len({*pair}) > 1]
    fault = f"the weights of two ranks differ after step {apart[0]}" if apart else ""
    fault = fault if len(sums) == 2 else "two ranks did not run"
    yield verdict("replicas", fault, "both ranks have the same weights after each step")
    drawn = sums and sums[0][0].endswith("True")
    nats = RANDOM if drawn else ROUNDING
    # With --score-differs without the score: a rank may learn from what it has scored.
    gap = differences(alone, two, nats, with_score=not score_differs)
    what = f"two are as one within {nats} nats{', scores left out' if score_differs else ''}"
    yield verdict("ranks", gap and f"two ranks differ: {gap}", what)


def late_verdicts(lab, full, score_differs):
    """Those that need the checkpoints and the artifact of `full`."""
    points = lab.steps // 3, 5 * lab.steps // 6, lab.steps
    files = [f"{full.folder}/checkpoints/full/step_{step:08d}.pt" for step in points]
    pairs = zip(points, files, strict=True)
    resumed = [Run(lab, f"from-step-{step}", run_main, RESUME=file) for step, file in pairs]
    model = Run(lab, "model", look_inside, find_facts, full.folder)
    inside = [model]
    if score_differs:
        short = lab.with_validation(slice(3 * lab.seq_len + 1))
        inside.append(Run(lab, "sum", look_inside, add_shares, full.folder, DATA_PATH=short))
    run_all([*inside, *resumed])
    for run in resumed:
        run.read()
    yield alike("resume", full, resumed)
    for run in inside:
        path = run.folder / "facts.json"
        facts = json.loads(path.read_text()) if path.exists() else {}
        if not facts:
            yield verdict("model", run.error or "no facts", "")
        elif run is model:
            yield from model_verdicts(lab, full, facts, score_differs)
        else:
            total = facts["sum"]
            seen = f"the score gives all values of the last token {total:.6f} together"
            yield verdict("sum", "" if abs(total - 1) < 2e-4 else seen, seen)


def model_verdicts(lab, full, facts, score_differs):
    yield verdict("trained", ", ".join(facts["untrained"]), "training changes every weight")
    seen = facts["leaks"]
    fault = f"logits of {len(seen)} positions change with later tokens, first {seen[:1]}"
    yield verdict("look-ahead", seen and fault, "no logit depends on later tokens")
    unused = facts["unused"]
    size = f"{len(unused)} tensors, about {sum(unused.values())} bytes"
    fault = unused and f"{', '.join([*unused][:4])}: {size}"
    yield verdict("artifact", fault, f"logits depend on each of {facts['tensors']} tensors")
    bits = facts["targets"] / math.log(2)
    hand = facts["nats"], facts["nats"] * bits / lab.val_bytes
    printed = full.score["val_loss"], full.score["val_bpb"]
    seen = "printed {:.6f} nats {:.6f} bpb, by hand {:.6f} {:.6f}".format(*printed, *hand)
    if score_differs:
        counted = printed[0] / math.log(2) / printed[1]
        right = lab.val_bytes / facts["targets"]
        left = "left to you: is each token scored once, is so much plausible?"
        yield "score", "note", f"{seen}; {counted:.4f} bytes per target, in all {right:.4f}; {left}"
    else:
        equal = np.allclose(hand, printed, rtol=0, atol=2e-5)  # one sum, added in another order
        yield verdict("score", "" if equal else seen, seen)
    code, model = len(lab.script.read_bytes()), len(full.artifact)
    kind = "FAULT" if code + model > CAP else "note"
    seen = f"script {code:,} + tiny artifact {model:,} of {CAP:,}: weigh a real run's artifact"
    yield "bytes", kind, seen


def verdicts(script, settings, base=None, quick=False, score_differs=False):
    """Yields (property, "ok", "note" or "FAULT", text); cli.ToolError for one that does not run."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        yield from verify(Lab(Path(folder), script, settings), base, quick, score_differs)


def main(arguments):
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    quick = "leave out the run that reads no batch ahead"
    parser.add_argument("--quick", action="store_true", help=quick)
    differs = "the score is on purpose not that of plain rows (windows, test-time training)"
    parser.add_argument("--score-differs", action="store_true", help=differs)
    base = "say what changes against this script (default: train_gpt.py)"
    parser.add_argument("--base", metavar="FILE", default=cli.ROOT / "train_gpt.py", help=base)
    options = vars(parser.parse_intermixed_args(arguments))
    script = options.pop("script")
    settings = {}
    for pair in options.pop("settings"):
        name, equals, settings[name] = pair.partition("=")
        if not equals:
            parser.error(f"{pair}: settings are NAME=value")
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
