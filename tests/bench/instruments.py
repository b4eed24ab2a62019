"""What the instruments cost a step: switched off, and in a trace.

    python3 tests/bench/instruments.py          settings of train_gpt.py from the environment; a small model by default

Off: the calls of one step are counted in a real step, each kind is timed alone, and their sum is set against the step.
A trace: steps with and without it, interleaved in one process, and the median of the paired differences.
"""

import argparse
import collections
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))
from overlap import Bench, synthetic_data, train_gpt  # noqa: E402  (the benchmarks are scripts, not a package)

SMALL = {
    "NUM_LAYERS": "4",
    "MODEL_DIM": "128",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "256",
    "TRAIN_BATCH_TOKENS": "2048",
    "GRAD_ACCUM_STEPS": "1",
    "VAL_TOKENS": "20000",
    "MAX_WALLCLOCK_SECONDS": "0",
}
BLOCK = 5  # steps timed at a time


class Counting(train_gpt.Spans):
    """Counts the calls, by kind."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __call__(self, name: str, track: str = "") -> contextlib.AbstractContextManager:
        self.calls["phase"] += 1
        return self.nothing

    def instant(self, name: str, track: str) -> None:
        self.calls["instant"] += 1

    def handed(self, pipeline: object) -> None:
        self.calls["handed"] += 1

    def step_done(self, step: int) -> None:
        self.calls["step_done"] += 1


def steps(bench: Bench, batches: train_gpt.Pipeline, first: int, count: int) -> float:
    """Milliseconds a step of `count` steps."""
    bench.runtime.synchronize()
    started = time.perf_counter()
    for step in range(first, first + count):
        train_gpt.train_step(bench.run, batches, step, 0.0, 0, itertools.repeat(None))
        batches.spans.step_done(step + 1)
    bench.runtime.synchronize()
    return 1e3 * (time.perf_counter() - started) / count


def off_cost_us(calls: dict[str, float]) -> float:
    """Microseconds a step for these calls of the switched-off instruments."""
    spans, number = train_gpt.Spans(), 200_000

    def phase() -> None:
        with spans("forward"):
            pass

    kinds = {
        "phase": phase,
        "instant": lambda: spans.instant("x", "y"),
        "handed": lambda: spans.handed(None),
        "step_done": lambda: spans.step_done(1),
    }
    each = {
        kind: min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6
        for kind, call in kinds.items()
    }
    return sum(count * each[kind] for kind, count in calls.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=12, help=f"of {BLOCK} steps, with and without a trace (12)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**SMALL, **os.environ, "TRACE_STEPS": str(BLOCK * options.blocks)}
        if "DATA_PATH" not in environ:
            tokens = 8 * BLOCK * options.blocks * int(environ["TRAIN_BATCH_TOKENS"])
            environ |= synthetic_data(
                Path(folder), int(environ.get("VOCAB_SIZE", 1024)), tokens, 40_000
            )
        config, faults = train_gpt.Config.from_environment(environ)
        if faults := faults + config.problems(1):
            print("instruments.py: settings are wrong:", *faults, sep="\n  ", file=sys.stderr)
            return 2
        bench, counting = Bench(config), Counting()
        with contextlib.closing(bench.run.batches(counting)) as batches:
            steps(bench, batches, 0, BLOCK)
            counting.calls.clear()
            steps(bench, batches, BLOCK, BLOCK)
        calls = {kind: count / BLOCK for kind, count in counting.calls.items()}
        log = SimpleNamespace(path=Path(folder, "t.txt"), line=print)
        trace = train_gpt.Trace(config, bench.runtime, log)
        times: dict[str, list[float]] = {"off": [], "trace": []}
        with (
            contextlib.closing(bench.run.batches()) as plain,
            contextlib.closing(bench.run.batches(trace)) as traced,
        ):
            for block in range(options.blocks):
                arms = [("off", plain), ("trace", traced)]
                for name, batches in arms[::-1] if block % 2 else arms:
                    times[name].append(steps(bench, batches, BLOCK * block, BLOCK))
        step_ms, cost_us = statistics.median(times["off"]), off_cost_us(calls)
        extra = statistics.median(b - a for a, b in zip(times["off"], times["trace"]))
        kinds = ", ".join(f"{count:g} {kind}" for kind, count in sorted(calls.items()))
        print(
            f"off:   {cost_us:.1f} us of {step_ms:.1f} ms a step ({cost_us / 10 / step_ms:.4f} %): {kinds}\n"
            f"trace: {1e3 * extra:+.0f} us a step ({100 * extra / step_ms:+.2f} %), median of {options.blocks} "
            f"pairs; {len(trace.events)} events"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
