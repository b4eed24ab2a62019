"""Measure what the instruments cost per step: switched off, and while a trace is recorded.

    python3 tests/bench/instruments.py

Settings of train_gpt.py come from the environment. By default the model is a small one.

Switched off: the tool counts the phases of one step, times one phase alone, and divides the product
by the time of a step. Trace: blocks of steps run with and without the profiler, in turns in one
process; the figure is the median of the paired differences. Writing the trace file is not included.
"""

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import threading
import time
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
overlap = importlib.import_module("overlap")
cli, train_gpt = overlap.cli, overlap.train_gpt

SMALL = {"NUM_LAYERS": 4, "MODEL_DIM": 128, "NUM_HEADS": 4, "NUM_KV_HEADS": 2}
SMALL |= {"TRAIN_SEQ_LEN": 256, "TRAIN_BATCH_TOKENS": 2048, "GRAD_ACCUM_STEPS": 1}
BLOCK = 5  # steps timed at a time


class Counted(train_gpt.Phases):
    """Counts the phases of the thread that trains; the reader's cost the step nothing."""

    calls = 0

    def __call__(self, name):
        self.calls += threading.current_thread() is threading.main_thread()
        return super().__call__(name)


def block_ms(bench, batches):
    """Milliseconds a step of some steps."""
    bench.runtime.synchronize()
    started = time.perf_counter()
    for _ in range(BLOCK):
        bench.run.train_step(batches)
        bench.run.phase.end_step(bench.run.step)
    bench.run.exchange.read(bench.run.step)
    bench.runtime.synchronize()
    return 1e3 * (time.perf_counter() - started) / BLOCK


def off_cost_us(phases):
    """Microseconds of one phase that is neither traced nor timed."""

    def phase():
        with phases("forward"):
            pass

    return min(timeit.repeat(phase, number=100_000, repeat=5)) * 10


def main():
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument("--blocks", type=count, default=12, help="pairs of blocks (default: 12)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = {name: str(value) for name, value in {**SMALL, "TRACE_STEPS": BLOCK}.items()}
        config = overlap.configure(folder, small, 600_000, 40_000)
        bench, times = overlap.Bench(config), {"off": [], "trace": []}
        run, log = bench.run, train_gpt.RunLog("bench", enabled=False)
        run.phase = phases = Counted(config, bench.runtime, log)
        phases.write_trace = lambda profiler: setattr(phases, "profiler", None)
        with contextlib.closing(run.batches()) as batches:
            block_ms(bench, batches)
            before = phases.calls
            block_ms(bench, batches)
            calls = (phases.calls - before) / BLOCK
            for pair in range(options.blocks):
                for name in ("off", "trace") if pair % 2 else ("trace", "off"):
                    if name == "trace":
                        phases.begin_trace()  # it ends with the block
                    times[name].append(block_ms(bench, batches))
        step_ms, each_us = statistics.median(times["off"]), off_cost_us(phases)
        pairs = zip(times["off"], times["trace"], strict=True)
        extra_ms = statistics.median(traced - plain for plain, traced in pairs)
        print(
            f"off:   {calls:g} phases of {each_us:.2f} us in a step of {step_ms:.1f} ms "
            f"({calls * each_us / 10 / step_ms:.4f} %)\n"
            f"trace: {1e3 * extra_ms:+.0f} us a step ({100 * extra_ms / step_ms:+.2f} %), "
            f"median of {options.blocks} pairs"
        )


if __name__ == "__main__":
    main()
