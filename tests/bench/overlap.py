"""Measure overlap on, off and in part, in one process: milliseconds per step, how long the device
(without CUDA: the host) waits for input, also at shard boundaries, and the time of a validation.

    python3 tests/bench/overlap.py
        the configuration of the baseline, on CUDA, with synthetic shards
    python3 tests/bench/overlap.py --slow-ms 20
        as from a slow disk: every read takes 20 ms longer
    python3 tests/bench/overlap.py --check
        only correctness: all arms have the same losses and data_crc

One model is compiled once, and all arms train it in turn, in another order in each repeat. So
neither compilation nor a machine that becomes slower or faster favours an arm. Every setting of
train_gpt.py is taken from the environment, DATA_PATH too.
"""

import argparse
import contextlib
import copy
import dataclasses
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "logs")]
names = ("cli", "significance", "train_gpt")
cli, significance, train_gpt = map(importlib.import_module, names)

FIGURES = {"step": "a step", "idle": "idle a step", "boundary": "at a boundary"}
FIGURES |= {"val": "a validation"}
WARM_STEPS = 3  # of an arm, before it is timed
ARMS = {  # prefetch, copy stream
    "on": (True, True),
    "off": (False, False),
    "prefetch only": (True, False),
    "copy stream only": (False, True),
}


def synthetic_data(folder, vocab_size, train_tokens, val_tokens):
    """Random tokens in three train shards and one of validation, a byte tokenizer; as settings."""
    generator = np.random.default_rng(0)
    for split, counts in (("train", [train_tokens // 3 + 1] * 3), ("val", [val_tokens])):
        for number, count in enumerate(counts):
            header = np.zeros(256, dtype="<i4")
            header[:3] = 20240520, 1, count
            tokens = generator.integers(0, vocab_size, count, dtype=np.uint16)
            path = folder / f"fineweb_{split}_{number:06d}.bin"
            path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    (folder / "byte.json").write_text(f'{{"kind": "byte", "offset": {vocab_size - 256}}}')
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "byte.json")}


def slow_disk(ms):
    """From here on every batch takes so much longer to read."""
    fill = train_gpt.Pipeline._fill

    def fill_slowly(pipeline, slot, rows):
        time.sleep(1e-3 * ms)
        fill(pipeline, slot, rows)

    train_gpt.Pipeline._fill = fill_slowly


def configure(folder, defaults, train_tokens, val_tokens):
    """The Config of the environment, with shards of our own unless it names some."""
    env = {"MAX_WALLCLOCK_SECONDS": "0", **defaults, **os.environ}
    if "DATA_PATH" not in env:
        vocab_size = int(env.get("VOCAB_SIZE", 1024))
        env |= synthetic_data(Path(folder), vocab_size, train_tokens, val_tokens)
    config, faults = train_gpt.read_config(env)
    faults += train_gpt.find_faults(config, 1, env)
    if faults:
        print("wrong settings:", *faults, sep="\n  ", file=sys.stderr)
        sys.exit(2)
    return config


class Bench:
    """One model and its optimizers, trained under any of the arms."""

    def __init__(self, config):
        runtime = train_gpt.Runtime(config, {})
        runtime.start({})
        self.config, self.runtime, self.attention = config, runtime, contextlib.ExitStack()
        log = train_gpt.RunLog("bench", enabled=False)
        backends = list(train_gpt.attention_backends(config, runtime, log))  # as a run has them
        self.attention.enter_context(train_gpt.sdpa_kernel(backends, set_priority=True))
        self.run = train_gpt.Trainer(config, runtime, log)
        self.start = train_gpt.snapshot(self.run)

    def choose(self, arm):
        """Sets the overlap of training and validation; the model and its compiled form stay."""
        names = "prefetch", "copy_stream"
        switches = {
            f"{split}_{name}": value
            for split in ("train", "val")
            for name, value in zip(names, ARMS[arm], strict=True)
        }
        config = self.arm = dataclasses.replace(self.config, **switches)
        self.run.overlap = train_gpt.Overlap.of(config, "train", self.runtime.cuda)
        self.run.validation.overlap = train_gpt.Overlap.of(config, "val", self.runtime.cuda)

    def train(self, steps):
        """(ms a step, waits for input a batch, data_crc, losses) of `steps` steps from token 0."""
        run, losses = self.run, []
        run.begin(step=0, data_crc=0)
        with contextlib.closing(run.batches()) as batches:
            for step in range(WARM_STEPS + steps):
                if step == WARM_STEPS:
                    self.runtime.synchronize()
                    started = time.perf_counter()
                run.train_step(batches)
                if step >= 2:  # as training does: two steps late
                    run.exchange.read(step - 1)
                    losses.append(sum(row.loss for row in run.exchange.messages))
            self.runtime.synchronize()
            spent_ms = 1e3 * (time.perf_counter() - started)
            run.exchange.read(run.step)
        return spent_ms / steps, batches.waits_ms, run.exchange.data_crc(), losses

    def waits(self, waits_ms):
        """Of the steps that are timed: (ms a step, the worst at a boundary of shards).

        At a boundary: the batch whose tokens, of all ranks, cross it, or the next one.
        """
        run, begin = self.run, WARM_STEPS * self.runtime.micro_steps
        plan, at_boundary = train_gpt.BatchPlan.train(self.config, self.runtime), [0.0]
        for k in range(begin, len(waits_ms)):
            first, count, _ = plan.tokens(plan.rows(k))
            if len(list(run.shards.pieces(first, count))) > 1:
                at_boundary.append(max(waits_ms[k : k + 2]))
        steps = len(waits_ms) / self.runtime.micro_steps - WARM_STEPS
        return sum(waits_ms[begin:]) / steps, max(at_boundary)

    def validate(self):
        """(milliseconds, bits per byte) of one validation."""
        _, val_bpb, val_ms = self.run.evaluate("bench")
        return val_ms, val_bpb


def check(bench, steps):
    """Every arm from the same weights: the same tokens, losses and score.
    Exactly on the CPU, closely on CUDA."""
    seen = {}
    for arm in ARMS:
        bench.choose(arm)
        bench.run.adam.state.clear()  # before its first step it has none
        train_gpt.restore(bench.run, copy.deepcopy(bench.start))  # else it would be trained on
        _, _, crc, losses = bench.train(steps)
        seen[arm] = crc, [*losses, bench.validate()[1]]
        config, cuda = bench.arm, bench.runtime.cuda
        words = [
            train_gpt.describe_overlap(config, split, part.overlap, cuda)
            for split, part in (("train", bench.run), ("val", bench.run.validation))
        ]
        print(f"{arm}: {words[0]}; validation {words[1]}")
        print(f"  data_crc {crc:08x}  last loss {losses[-1]:.6f}  val_bpb {seen[arm][1][-1]:.6f}")
    near = 2e-2 if bench.runtime.cuda else 0.0
    for arm, (crc, values) in seen.items():
        off = max(abs(a - b) for a, b in zip(values, seen["on"][1], strict=True))
        if crc != seen["on"][0] or not off <= near:
            print(f"overlap.py: {arm} differs from on: overlap changes training", file=sys.stderr)
            return 1
    print("all arms agree" + (f" within {near}" if near else " to the last digit"))
    return 0


def measure(bench, repeats, steps):
    """Per arm what each repeat gave, arms in turns: {"step": [ms, ...], "idle": ...}"""
    out = {arm: {name: [] for name in FIGURES} for arm in ARMS}
    names = list(ARMS)
    bench.train(steps)  # compiles and warms up; not counted
    bench.validate()
    for repeat in range(repeats):
        shift = repeat % len(names)
        for arm in names[shift:] + names[:shift]:
            bench.choose(arm)
            step_ms, waits_ms, _, _ = bench.train(steps)
            found = step_ms, *bench.waits(waits_ms), bench.validate()[0]
            values = dict(zip(FIGURES, found, strict=True))
            for name, value in values.items():
                out[arm][name].append(value)
            said = ", ".join(f"{name} {value:.3f} ms" for name, value in values.items())
            print(f"repeat {repeat + 1}/{repeats} {arm:17} {said}", flush=True)
    return out


def report(found):
    for name, what in FIGURES.items():
        for arm, values in found.items():
            line = f"{what:13} {arm:17} {statistics.median(values[name]):10.3f} ms"
            if arm != "off":
                test = significance.paired(found["off"][name], values[name])
                line += f"  against off {test.difference:+.3f}, {test.low:+.3f} to {test.high:+.3f}"
                line += "  no measurable difference" * (test.low <= 0 <= test.high)
            print(line)


def main():
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument(
        "--repeats", type=count, default=3, help="runs of each arm, 2 or more (default: 3)"
    )
    parser.add_argument("--steps", type=count, default=60, help="timed steps per run (default: 60)")
    parser.add_argument("--slow-ms", type=float, default=0, help="delay of each read (default: 0)")
    parser.add_argument("--check", action="store_true", help="compare losses and time nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.repeats < 2 or options.steps < 1:
        parser.error("--repeats must be at least 2, --steps at least 1")
    with tempfile.TemporaryDirectory() as folder:
        batch = int(os.environ.get("TRAIN_BATCH_TOKENS", 524_288))
        val_tokens = 40_000 if options.check else 8_388_609
        config = configure(folder, {}, min(75_000_000, 3 * options.steps * batch), val_tokens)
        bench = Bench(config)
        if options.check:
            return check(bench, options.steps)
        if not bench.runtime.cuda:
            print("no CUDA device: times of the CPU, where only prefetch exists", flush=True)
        slow_disk(options.slow_ms)
        found = measure(bench, options.repeats, options.steps)
        report(found)
        if options.json:
            options.json.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
