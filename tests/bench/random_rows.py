"""Measure what input costs the training thread where rows are drawn at random.

    python3 tests/bench/random_rows.py            takes a minute; run nothing else
    python3 tests/bench/random_rows.py --quick    small shards, only to see that it works

Rank 0 of 8, 48 rows of 2,048 tokens per rank and step, 80 shards, all cached. Two arms:

record  draws each row as the record of 2026-04-05 does, in the training thread: a shard by the rows
        that it has left, then that shard's next row in a random order. It makes int64 x and y.
ours    train_gpt.py with the recipe shuffled_order: spans of 48 rows in a random order, read ahead
        by the Pipeline's thread.

Both arms are in one process. A step asks one arm for its batch, then the other, and then leaves the
time of COMPUTE_MS to the reader. The figure is the time in the call that asks.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES = 1024
RANKS = 8
COMPUTE_MS = 20  # between batches
STEP_MS = 129  # of the record, on 8 H100s


def write_shards(folder, shards, tokens):
    """Shards of random tokens in the challenge's format."""
    random = np.random.default_rng(0)
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = 20240520, 1, tokens
    for number in range(shards):
        data = header.tobytes() + random.integers(0, 1024, tokens, "u2").tobytes()
        Path(folder, f"fineweb_train_{number:06d}.bin").write_bytes(data)


class RandomRows:
    """Rows as the record draws them: the same numbers of the same generator, in its order."""

    def __init__(self, folder, rows, seq_len):
        paths = sorted(Path(folder).glob("fineweb_train_*.bin"))[::RANKS]  # those of rank 0
        self.shards = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in paths]
        self.shape = rows, seq_len
        self.random = np.random.Generator(np.random.PCG64(0))  # the rank, not the run's seed
        self.starts = [self.shuffled(shard) for shard in self.shards]

    def shuffled(self, shard):
        """The first tokens of a shard's rows in a random order, from a random phase on."""
        seq_len = self.shape[1]
        phases = min(seq_len - 1, len(shard) - seq_len - 1) + 1
        phase = int(self.random.integers(phases)) if phases > 1 else 0
        count = (len(shard) - 1 - phase) // seq_len
        return (phase + seq_len * self.random.permutation(count)).tolist()

    def batch(self):
        left = np.array([len(starts) for starts in self.starts], np.float64)
        x = torch.empty(self.shape, dtype=torch.int64)
        y = torch.empty(self.shape, dtype=torch.int64)
        for row in range(len(x)):
            if left.sum() == 0:
                self.starts = [self.shuffled(shard) for shard in self.shards]
                left = np.array([len(starts) for starts in self.starts], np.float64)
            chosen = int(self.random.choice(len(left), p=left / left.sum()))
            first = self.starts[chosen].pop()
            left[chosen] -= 1
            tokens = self.shards[chosen][first : first + self.shape[1] + 1].astype(np.int64)
            x[row] = torch.from_numpy(tokens[:-1])
            y[row] = torch.from_numpy(tokens[1:])
        return x, y


def record(folder, rows, seq_len):
    loader = RandomRows(folder, rows, seq_len)
    while True:
        yield loader.batch()


def script_with_shuffled_order(folder):
    """The trainer with the recipe, as a module."""
    path = Path(folder, "shuffled.py")
    command = [sys.executable, ROOT / "tools" / "recipe.py", "apply", "shuffled_order"]
    subprocess.run([*command, "--to", path], check=True, stdout=subprocess.DEVNULL)
    spec = importlib.util.spec_from_file_location("shuffled", path)
    module = sys.modules["shuffled"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(folder, rows, seq_len):
    module = script_with_shuffled_order(folder)
    settings = {"SHUFFLE_SPANS": 1, "DATA_PATH": folder, "TRAIN_SEQ_LEN": seq_len}
    settings |= {"TRAIN_BATCH_TOKENS": RANKS * rows * seq_len, "DEVICE": "cpu"}
    words = [f"{name}={value}" for name, value in settings.items()]
    config, _, faults, _ = module.read_config(words, {})
    if faults:
        sys.exit(f"random_rows.py: {faults[0]}")
    device = torch.device("cpu")
    shards = module.ShuffledShards(config, "train")
    plan = module.BatchPlan.train(config, rank=0, ranks=RANKS)
    overlap = module.Overlap.of(config, "train", device)
    with closing(module.Pipeline(shards, plan, overlap, device)) as batches:
        for batch in batches:
            yield batch.x, batch.y


ARMS = {"record": record, "ours": ours}


def ask(batches):
    """The next batch, and the ms that the training thread spent on it."""
    start = time.perf_counter()
    x, y = next(batches)
    return x, y, 1e3 * (time.perf_counter() - start)


def measure(options, folder):
    """{arm: ms of each step after the first ten}"""
    shape = options.rows, options.seq_len
    arms = {name: arm(folder, *shape) for name, arm in ARMS.items()}
    ms = {name: [] for name in arms}
    for step in range(options.steps + 10):
        for name in list(arms)[:: 1 if step % 2 else -1]:
            x, y, spent = ask(arms[name])
            if step < 3 and not torch.equal(x[:, 1:], y[:, :-1]):
                sys.exit(f"random_rows.py: {name}: step {step}: y is not the token after x")
            if step >= 10:
                ms[name].append(spent)
            time.sleep(1e-3 * COMPUTE_MS)
    for batches in arms.values():
        batches.close()
    return ms


def report(ms):
    print(
        f"{'arm':8}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}{'% of ' + str(STEP_MS) + ' ms':>13}"
    )
    for name, values in ms.items():
        median, p99, most = np.median(values), np.percentile(values, 99), max(values)
        print(f"{name:8}{median:11.3f}{p99:9.3f}{most:9.3f}{100 * median / STEP_MS:13.2f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="measured steps (default: 300)")
    add("--quick", action="store_true", help="small shards, only to see that it works")
    options = parser.parse_args()
    options.rows, options.seq_len, shards, tokens = 48, 2048, 80, 1_000_000
    if options.quick:
        options.rows, options.seq_len, shards, tokens = 8, 64, 16, 20_000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="random-rows-") as folder:
        write_shards(folder, shards, tokens)
        shape = f"rank 0 of {RANKS}, {options.rows} rows of {options.seq_len}, {shards} shards"
        print(f"{shape}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        report(measure(options, folder))


if __name__ == "__main__":
    main()
