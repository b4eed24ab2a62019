"""Overlap on, off and in part, in one run: milliseconds a step, the device's idle time, and validation.

    python3 tests/bench/overlap.py                     the baseline's configuration, on CUDA; synthetic shards
    python3 tests/bench/overlap.py --repeats 5 --steps 100
    python3 tests/bench/overlap.py --check             correctness alone: every arm has the same losses and data_crc

One model, compiled once, is trained by all arms in turn (rotated order in each repeat), so that neither the machine's
drift nor compilation favours one. Every setting of train_gpt.py is taken from the environment, DATA_PATH too.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt  # noqa: E402  (the repository's root is not a package)

ARMS = {
    "on": (1, 1),
    "off": (0, 0),
    "prefetch only": (1, 0),
    "copy stream only": (0, 1),
}  # prefetch, copy stream
WARM_STEPS = 3  # of an arm, before it is timed
# Student's t, 97.5 %, for 1, 2, 3 ... degrees of freedom; the normal distribution's beyond.
T_QUANTILES = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
SHARD_TOKENS, SHARDS, VAL_TOKENS = 25_000_000, 3, 8_388_609


def synthetic_data(
    folder: Path, vocab_size: int, shard_tokens: int, val_tokens: int
) -> dict[str, str]:
    """Random tokens in the challenge's format and a byte tokenizer of `vocab_size`; the settings that use them."""
    generator = np.random.default_rng(0)
    for split, counts in (("train", [shard_tokens] * SHARDS), ("val", [val_tokens])):
        for number, count in enumerate(counts):
            header = np.zeros(256, dtype="<i4")
            header[:3] = 20240520, 1, count
            tokens = generator.integers(0, vocab_size, count, dtype=np.uint16)
            path = folder / f"fineweb_{split}_{number:06d}.bin"
            path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    (folder / "byte.json").write_text(f'{{"kind": "byte", "offset": {vocab_size - 256}}}')
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "byte.json")}


class Bench:
    """One model and its optimizers, trained under any of the arms."""

    def __init__(self, config: train_gpt.Config) -> None:
        self.runtime = train_gpt.Runtime()
        self.runtime.start(config, {})
        quiet = SimpleNamespace(
            line=lambda text: None,
            console=lambda text: None,
            say=lambda *_, **__: None,
            event=lambda *_, **__: None,
        )
        self.config, self.run = config, train_gpt.Run(config, self.runtime, quiet)
        self.start = self.run.optimizers.snapshot()

    def choose(self, arm: str) -> None:
        """Sets the overlap of training and validation; the model and its compiled form stay."""
        prefetch, stream = map(bool, ARMS[arm])
        config = dataclasses.replace(
            self.config,
            train_prefetch=prefetch,
            val_prefetch=prefetch,
            train_copy_stream=stream,
            val_copy_stream=stream,
        )
        self.run.overlap = train_gpt.Overlap.of(config, "train", self.runtime.cuda)
        self.run.validation.overlap = train_gpt.Overlap.of(config, "val", self.runtime.cuda)

    def train(self, steps: int) -> tuple[float, float, int, list[float]]:
        """(ms a step, device idle ms a step, data_crc, losses) of `steps` steps after WARM_STEPS from token 0."""
        crc, losses, foretell = 0, [], itertools.repeat(None)
        with contextlib.closing(self.run.batches()) as batches:
            for step in range(WARM_STEPS + steps):
                if step == WARM_STEPS:
                    self.runtime.synchronize()
                    batches.stage.ask()
                    idle_ms, started = batches.stage.wait_ms, time.perf_counter()
                crc = train_gpt.train_step(self.run, batches, step, 0.0, crc, foretell)
                if step >= 2:
                    losses.append(self.run.control.read(step - 2).train_loss)
            self.runtime.synchronize()
            spent_ms = 1e3 * (time.perf_counter() - started)
            batches.stage.ask()
            return spent_ms / steps, (batches.stage.wait_ms - idle_ms) / steps, crc, losses

    def validate(self) -> tuple[float, float]:
        """(milliseconds, bits per byte) of one validation."""
        _, val_bpb, val_ms = self.run.validation.evaluate(
            self.run.loss_of, "bench", False, train_gpt.Spans()
        )
        return val_ms, val_bpb

    def restart(self) -> None:
        self.run.optimizers.restore(self.start)


def check(bench: Bench, steps: int) -> int:
    """Every arm from the same weights: the same tokens, losses and score. Exactly on the CPU, closely on CUDA."""
    seen = {}
    for arm in ARMS:
        bench.choose(arm)
        bench.restart()
        _, _, crc, losses = bench.train(steps)
        seen[arm] = crc, [*losses, bench.validate()[1]]
        print(
            f"{arm:17} data_crc {crc:08x}  last loss {losses[-1]:.6f}  val_bpb {seen[arm][1][-1]:.6f}"
        )
    crc, reference = seen["on"]
    near = 2e-2 if bench.runtime.cuda else 0.0
    for arm, (other_crc, values) in seen.items():
        if other_crc != crc or any(
            abs(a - b) > near for a, b in zip(values, reference, strict=True)
        ):
            print(
                f"overlap.py: {arm} differs from on: overlap must not change what is trained",
                file=sys.stderr,
            )
            return 1
    print("all arms agree" + (" to the last digit" if not near else f" within {near}"))
    return 0


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval)."""
    freedom = len(values) - 1
    t = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def measure(bench: Bench, repeats: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Per arm: ms a step, idle ms a step and validation ms of every repeat, the arms interleaved."""
    names = list(ARMS)
    out: dict[str, dict[str, list[float]]] = {
        arm: {"step": [], "idle": [], "val": []} for arm in names
    }
    bench.choose("on")
    bench.train(steps)  # compiles and warms up; not counted
    bench.validate()
    for repeat in range(repeats):
        for arm in names[repeat % len(names) :] + names[: repeat % len(names)]:
            bench.choose(arm)
            step_ms, idle_ms, _, _ = bench.train(steps)
            val_ms, _ = bench.validate()
            for name, value in (("step", step_ms), ("idle", idle_ms), ("val", val_ms)):
                out[arm][name].append(value)
            print(
                f"repeat {repeat + 1}/{repeats} {arm:17} {step_ms:8.3f} ms a step, idle {idle_ms:.3f}, "
                f"validation {val_ms:.1f} ms",
                flush=True,
            )
    return out


def report(found: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{'arm':17} {'ms a step':>20} {'idle ms a step':>20} {'validation ms':>22}")
    for arm, values in found.items():
        cells = [
            "{:.3f} ± {:.3f}".format(*interval(values[name])) for name in ("step", "idle", "val")
        ]
        print(f"{arm:17} {cells[0]:>20} {cells[1]:>20} {cells[2]:>22}")
    for name, what in (("step", "a step"), ("val", "a validation")):
        for arm in [arm for arm in found if arm != "off"]:
            gains = [off - this for off, this in zip(found["off"][name], found[arm][name])]
            mean, half = interval(gains)
            share = 100 * mean / statistics.mean(found["off"][name])
            said = (
                f"{mean:+.3f} ± {half:.3f} ms ({share:+.2f} %) faster"
                if abs(mean) > half
                else f"no measurable difference ({mean:+.3f} ± {half:.3f} ms)"
            )
            print(f"{arm} against off, {what}: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of every arm (default: 3, at least 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="timed steps of an arm in a repeat (default: 60)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare losses and data_crc of the arms, time nothing"
    )
    options = parser.parse_args()
    if options.repeats < 2 or options.steps < 1:
        parser.error("--repeats must be at least 2, --steps at least 1")
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ)
        vocab = int(environ.get("VOCAB_SIZE", 1024))
        if "DATA_PATH" not in environ:
            sizes = (
                (3 * options.steps * int(environ.get("TRAIN_BATCH_TOKENS", 1)), 40_000)
                if options.check
                else (SHARD_TOKENS, VAL_TOKENS)
            )
            environ |= synthetic_data(Path(folder), vocab, *sizes)
        environ = {"MAX_WALLCLOCK_SECONDS": "0", **environ}
        config, faults = train_gpt.Config.from_environment(environ)
        faults += config.problems(1)
        if faults:
            print("overlap.py: settings are wrong:", *faults, sep="\n  ", file=sys.stderr)
            return 2
        bench = Bench(config)
        if options.check:
            return check(bench, options.steps)
        if not bench.runtime.cuda:
            print(
                "overlap.py: no CUDA device here: these are times of the CPU, where only prefetch exists",
                flush=True,
            )
        report(measure(bench, options.repeats, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
