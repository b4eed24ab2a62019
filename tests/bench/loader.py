"""Measure how long the main thread waits for a batch: train_gpt.py against another loader.

    python3 tests/bench/loader.py PATH/train_gpt.py [--quick]
        compares it with the challenge's loader, which is taken from PATH/train_gpt.py
    python3 tests/bench/loader.py --documents [--quick]
        compares it with a loader of packed documents, as the last records have (document_loader.py)

It takes minutes; run nothing else on the machine. The two loaders are measured alternately, each
time in a new process, on the same tokens. If they yield different tokens, the program stops.

Between two batches, a core computes without the GIL for 20 ms; with --documents, a second
measurement computes for 120 ms. A batch has 65,536 tokens, with --documents 98,304. Rank 0 of 8
ranks is measured. The printed figures are medians over the repeats:

    median    the median wait for a batch, in ms
    p99       99 of 100 waits are shorter, in ms
    max       the longest wait, in ms
    boundary  the wait where a new shard begins, in ms: of the batch that crosses the boundary and
              the batch after it the longer wait is taken; this is the median over all boundaries
    memory    the peak memory of the process, in MiB
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
from running import import_script, write_shard  # noqa: E402

SPANS_PER_STEP, RANKS = 8, 8
MEGABYTE = bytes(1 << 20)
DOCUMENT_ROW = 2048  # tokens; a longer document is cut
BOS = 1  # the first token of each document
DOCUMENT_TOKENS = 850  # tokens per document


@dataclasses.dataclass(frozen=True)
class Job:
    """What one measurement reads: the shards, the ranks, and the size of a batch.

    The shards, repeated without end, are a stream of spans. Batch k of rank 0 is span k * ranks.
    """

    folder: str
    ranks: int
    steps: int
    seq_len: int
    step_tokens: int  # TRAIN_BATCH_TOKENS, over all ranks and micro-steps
    shard_tokens: int
    num_shards: int
    compute_ms: int = 20  # time of computation between two batches

    @property
    def span(self):
        """Return the number of tokens that a batch reads: one more than it has targets."""
        return self.step_tokens // SPANS_PER_STEP + 1

    @property
    def paths(self):
        numbers = range(self.num_shards)
        return [Path(self.folder, f"fineweb_train_{number:06d}.bin") for number in numbers]

    def boundaries(self):
        """Return the numbers of the batches at which the ranks continue in the next shard."""
        chunk = self.ranks * self.span
        ends = range(self.shard_tokens, (self.steps - 1) * chunk, self.shard_tokens)
        return [end // chunk for end in ends]

    def write_shards(self):
        """Write random tokens and wait until they are on the disk, so that pages are clean."""
        for number, path in enumerate(self.paths):
            generator = np.random.default_rng(number)
            tokens = generator.integers(2, 1024, self.shard_tokens, dtype=np.uint16)
            tokens[::DOCUMENT_TOKENS] = BOS
            write_shard(path, tokens)
        os.sync()


# === The loaders: context managers that return an iterator of (x, y), each (sequences, seq_len) ===
@contextlib.contextmanager
def open_pipeline(job, script):
    """Open the training pipeline of train_gpt.py, built as the trainer builds it."""
    trainer = import_script(script)
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
def open_challenge_loader(job, script):
    """Open the challenge's loader, called as its own script calls it.

    Without a GPU, a copy in memory stands for each upload.
    """
    loader = import_script(script).DistributedTokenLoader(
        f"{job.folder}/fineweb_train_*.bin", 0, job.ranks, torch.device("cpu")
    )
    step = job.step_tokens, job.seq_len, SPANS_PER_STEP // job.ranks
    yield ([part.clone() for part in loader.next_batch(*step)] for _ in itertools.count())


@contextlib.contextmanager
def open_document_loader(job, script):
    """Open the loader of packed documents; of its batches only x and y are compared."""
    paths = itertools.cycle(job.paths)
    loader = DocumentLoader(
        paths, rank=0, ranks=job.ranks, tokens=job.span - 1, max_tokens=job.seq_len
    )
    with contextlib.closing(loader):
        yield ([part.view(-1, job.seq_len) for part in batch[:2]] for batch in loader)


LOADERS = {
    "ours": open_pipeline,
    "challenge": open_challenge_loader,
    "documents": open_document_loader,
}


# === Measuring, in a process of its own for each loader ===
def compute(ms):
    """Keep a core busy for so many milliseconds, without the GIL."""
    end = time.perf_counter() + 1e-3 * ms
    while time.perf_counter() < end:
        hashlib.blake2b(MEGABYTE)


def measure_waits(open_loader, job, script):
    """Return the waits for batches 1, 2, ... in milliseconds."""
    waits = []
    with open_loader(job, script) as batches:
        next(batches)
        for _ in range(job.steps - 1):
            compute(job.compute_ms)
            asked = time.perf_counter()
            next(batches)
            waits.append(1e3 * (time.perf_counter() - asked))
    return waits


def checksum_batches(open_loader, job, script):
    """Return a checksum of (x, y) as int64 for each of the first batches.

    With the challenge's loader, the batches go beyond a boundary between shards. The loader of
    documents drops the rest of a shard, so its batches end before the first boundary.
    """
    drops_rest = job.seq_len == DOCUMENT_ROW
    count = job.boundaries()[0] + (-1 if drops_rest else 3)
    checksums = []
    with open_loader(job, script) as batches:
        for pair in itertools.islice(batches, count):
            data = b"".join(np.asarray(part, np.int64).tobytes() for part in pair)
            checksums.append(zlib.crc32(data))
    return checksums


def measure_and_check(name, job, script):
    """Measure the loader with this name, then read the tokens again; (figures, checksums)."""
    waits = measure_waits(LOADERS[name], job, script)
    memory = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    figures = summarize(waits, job) | {"memory": memory}
    return figures, checksum_batches(LOADERS[name], job, script)


# === Running the measurements, in the first process ===
def run_alternately(repeats, job, scripts):
    """Return {name of a loader: [figures of each repeat]}; exit if the tokens differ."""
    found = {name: [] for name in scripts}
    for _ in range(repeats):
        checksums = []
        for name, script in scripts.items():
            for path in job.paths:
                path.read_bytes()  # into the page cache
            with multiprocessing.get_context("spawn").Pool(1) as process:
                figures, sums = process.apply(measure_and_check, (name, job, script))
            found[name].append(figures)
            checksums.append(sums)
        if checksums[0] != checksums[1]:
            sys.exit("loader.py: the two loaders yield different tokens")
    return found


# === Reporting ===
def summarize(waits, job):
    """Return the figures that the docstring of this file lists, without `memory`."""
    waits = np.array(waits)
    crossings = [waits[k - 1 : k + 1].max() for k in job.boundaries()]
    return {
        "median": np.median(waits),
        "p99": np.percentile(waits, 99),
        "max": waits.max(),
        "boundary": np.median(crossings),
    }


def print_medians(found):
    """Print a line for each loader: the median of each figure over the repeats."""
    for name, runs in found.items():
        medians = {word: statistics.median(run[word] for run in runs) for word in runs[0]}
        words = [f"{word} {value:.4f}" for word, value in medians.items()]
        print(f"{name}, ms: {', '.join(words)}")


def plan_jobs(options, folder):
    """Return the Jobs of this call; with --documents there are two, with different compute_ms.

    For the challenge's loader, a shard has 48 steps. There are four shards, after which the first
    one is read again. For the loader of documents, a shard has 127 steps, as 100M tokens have.
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
    words = "the challenge's train_gpt.py: compare with its loader"
    parser.add_argument("script", type=Path, nargs="?", help=words)
    words = "compare with the loader of packed documents"
    parser.add_argument("--documents", action="store_true", help=words)
    words = "use small shards and one repeat, only to see that the program works"
    parser.add_argument("--quick", action="store_true", help=words)
    options = parser.parse_args()
    if options.documents == bool(options.script):
        parser.error("give either a script or --documents")
    if options.script and not options.script.is_file():
        parser.error(f"{options.script}: there is no such file")
    other = {"documents": None} if options.documents else {"challenge": options.script}
    scripts = {"ours": ROOT / "train_gpt.py", **other}
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as folder:
        jobs = plan_jobs(options, folder)
        print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        jobs[0].write_shards()
        for job in jobs:
            print(f"{job.compute_ms} ms of compute between batches")
            repeats = 1 if options.quick else 3
            print_medians(run_alternately(repeats, job, scripts))


if __name__ == "__main__":
    main()
