"""Measure how long the main thread waits for a batch, with this trainer's pipeline and with another
loader, on the same tokens.

    python3 tests/bench/loader.py PATH/train_gpt.py [--quick]
        against the challenge's loader, which PATH/train_gpt.py has
    python3 tests/bench/loader.py --documents [--quick]
        against a loader of packed documents, as the last records have (document_loader.py)

Takes minutes; run nothing else. In each repeat each loader has a new process, in turns. If the two
yield different tokens, the tool stops. Between two batches a core computes without the GIL, for
20 ms, with --documents also for 120 ms. A batch has 65,536 tokens, with --documents 98,304; rank 0
of 8 is measured. Figures are medians over the repeats. `boundary` is the median over the shard
boundaries of a run: at each boundary the longer wait of two batches, the one that crosses it and
the next one. `memory` is the peak of the process in MiB.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np  # noqa: E402
import torch  # noqa: E402
from document_loader import DocumentLoader  # noqa: E402
from running import imported, write_shard  # noqa: E402

SPANS_PER_STEP, RANKS = 8, 8
MEGABYTE = bytes(1 << 20)
DOCUMENT_ROW = 2048  # tokens; a longer document is cut
BOS, DOCUMENT_TOKENS = 1, 850  # of each document the first token, and its length


@dataclasses.dataclass(frozen=True)
class Job:
    """Whose batches, of which shards: batch k of rank 0 is span k * ranks of an endless stream."""

    folder: str
    ranks: int
    steps: int
    seq_len: int
    step_tokens: int  # TRAIN_BATCH_TOKENS, over all ranks and micro-steps
    shard_tokens: int
    num_shards: int
    compute_ms: int = 20  # between two batches

    @property
    def span(self):
        """Tokens of a batch, with the one more to predict."""
        return self.step_tokens // SPANS_PER_STEP + 1

    @property
    def paths(self):
        numbers = range(self.num_shards)
        return [Path(self.folder, f"fineweb_train_{number:06d}.bin") for number in numbers]

    def boundaries(self):
        """The batches at which the tokens of all ranks continue in the next shard."""
        chunk = self.ranks * self.span
        ends = range(self.shard_tokens, (self.steps - 1) * chunk, self.shard_tokens)
        return [end // chunk for end in ends]

    def write(self):
        """Random tokens, on the disk for certain: only clean pages can be evicted."""
        for number, path in enumerate(self.paths):
            generator = np.random.default_rng(number)
            tokens = generator.integers(2, 1024, self.shard_tokens, dtype=np.uint16)
            tokens[::DOCUMENT_TOKENS] = BOS
            write_shard(path, tokens)
        os.sync()


# === The arms: context managers over a loader, which give (x, y), each (rows, seq_len) ===
@contextlib.contextmanager
def ours(job, script):
    """The training pipeline, built as the trainer builds it."""
    trainer = imported(script)
    settings = {"TRAIN_BATCH_TOKENS": job.step_tokens, "TRAIN_SEQ_LEN": job.seq_len}
    settings |= {"DATA_PATH": job.folder, "DEVICE": "cpu"}
    config, *_ = trainer.read_config([f"{name}={value}" for name, value in settings.items()], {})
    device = torch.device("cpu")
    shards = trainer.Shards(config, "train")
    plan = trainer.BatchPlan.train(config, rank=0, ranks=job.ranks)
    overlap = trainer.Overlap.from_config(config, "train", device)
    with contextlib.closing(trainer.Pipeline(shards, plan, overlap, device)) as batches:
        yield ((batch.x, batch.y) for batch in batches)


@contextlib.contextmanager
def challenge(job, script):
    """The challenge's loader, as its own loop calls it; its uploads are copies here."""
    loader = imported(script).DistributedTokenLoader(
        f"{job.folder}/fineweb_train_*.bin", 0, job.ranks, torch.device("cpu")
    )
    step = job.step_tokens, job.seq_len, SPANS_PER_STEP // job.ranks
    yield ([part.clone() for part in loader.next_batch(*step)] for _ in itertools.count())


@contextlib.contextmanager
def documents(job, script):
    """The loader of packed documents; only x and y are compared."""
    paths = itertools.cycle(job.paths)
    loader = DocumentLoader(
        paths, rank=0, ranks=job.ranks, tokens=job.span - 1, max_tokens=job.seq_len
    )
    with contextlib.closing(loader):
        yield ([part.view(-1, job.seq_len) for part in batch[:2]] for batch in loader)


ARMS = {"ours": ours, "challenge": challenge, "documents": documents}


# === Measuring: in the arm's process ===
def work(ms):
    """Keeps a core busy without the GIL."""
    end = time.perf_counter() + 1e-3 * ms
    while time.perf_counter() < end:
        hashlib.blake2b(MEGABYTE)


def measure(arm, job, script):
    """The waits for batches 1, 2, ... in milliseconds."""
    waits = []
    with arm(job, script) as batches:
        next(batches)
        for _ in range(job.steps - 1):
            work(job.compute_ms)
            asked = time.perf_counter()
            next(batches)
            waits.append(1e3 * (time.perf_counter() - asked))
    return waits


def checksums(arm, job, script):
    """Of x and y as int64: the challenge's loader beyond a boundary, the one of documents until
    its first, where it drops the rest of a shard."""
    dropped = job.seq_len == DOCUMENT_ROW
    sums, count = [], job.boundaries()[0] + (-1 if dropped else 3)
    with arm(job, script) as batches:
        for pair in itertools.islice(batches, count):
            sums.append(zlib.crc32(b"".join(np.asarray(part, np.int64).tobytes() for part in pair)))
    return sums


def answer(name, job, script):
    """One arm, measured and then checked: (figures, checksums)"""
    waits = measure(ARMS[name], job, script)
    memory = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return figures(waits, job) | {"memory": memory}, checksums(ARMS[name], job, script)


# === Conducting: in the first process ===
def conduct(repeats, job, scripts):
    """{arm: [figures, ...]}"""
    found = {name: [] for name in scripts}
    for _ in range(repeats):
        seen = []
        for name, script in scripts.items():
            for path in job.paths:
                path.read_bytes()  # into the page cache
            with multiprocessing.get_context("spawn").Pool(1) as process:
                measured, sums = process.apply(answer, (name, job, script))
            found[name].append(measured)
            seen.append(sums)
        if seen[0] != seen[1]:
            sys.exit("loader.py: the two loaders yield different tokens")
    return found


# === Reporting ===
def figures(waits, job):
    waits = np.array(waits)
    crossings = [waits[k - 1 : k + 1].max() for k in job.boundaries()]
    return {
        "median": np.median(waits),
        "p99": np.percentile(waits, 99),
        "max": waits.max(),
        "boundary": np.median(crossings),
    }


def report(found):
    for name, runs in found.items():
        medians = [f"{word} {statistics.median(run[word] for run in runs):.4f}" for word in runs[0]]
        print(f"{name}, ms: {', '.join(medians)}")


def jobs_of(options, folder):
    """Against the challenge: 48 steps a shard; four shards, then the first again.

    Against documents: 127 steps a shard, as in 100M tokens, at two speeds.
    """
    quick = options.quick
    if options.documents:
        span = 4 * DOCUMENT_ROW if quick else 98_304
        shard = (20 if quick else 127) * RANKS * (span + 1) + span
        steps = 50 if quick else 400
        job = Job(folder, RANKS, steps, DOCUMENT_ROW, RANKS * span, shard, 3)
        return [dataclasses.replace(job, compute_ms=ms) for ms in ([2] if quick else [20, 120])]
    seq_len, step, shard = (16, 8192, 12_500) if quick else (1024, 524_288, 3_125_000)
    return [Job(folder, RANKS, 60 if quick else 160, seq_len, step, RANKS * shard, 4)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "a script that has the challenge's loader"
    parser.add_argument("script", type=Path, nargs="?", help=words)
    words = "against the loader of packed documents"
    parser.add_argument("--documents", action="store_true", help=words)
    words = "small shards, one repeat, only to see that it works"
    parser.add_argument("--quick", action="store_true", help=words)
    options = parser.parse_args()
    if options.documents == bool(options.script):
        parser.error("name a script, or --documents")
    if options.script and not options.script.is_file():
        parser.error(f"{options.script}: no such file")
    other = {"documents": None} if options.documents else {"challenge": options.script}
    scripts = {"ours": ROOT / "train_gpt.py", **other}
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as folder:
        jobs = jobs_of(options, folder)
        print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        jobs[0].write()
        for job in jobs:
            print(f"{job.compute_ms} ms of compute between batches")
            report(conduct(1 if options.quick else 3, job, scripts))


if __name__ == "__main__":
    main()
