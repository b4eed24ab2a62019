"""Measure what a batch costs: the trainer's pipeline and other loaders, on the same tokens.

    python3 tests/bench/loader.py --challenge PATH/train_gpt.py
        compare with the challenge's own loader in that script; takes minutes; run nothing else
    python3 tests/bench/loader.py --against PATH/train_gpt.py
        compare with another version of this trainer
    python3 tests/bench/loader.py --quick
        small shards, only to see that it works: the times mean nothing

Arms: ours (with data_crc, as in every run, on the CPU); unread (ours with TRAIN_PREFETCH=0); torch
(a DataLoader over memory-mapped shards, with two workers); limit (one readinto of the same bytes
and nothing else). In each repeat each arm has a new process. The arms take turns, in another order
each time, so that other load on the machine affects all arms alike. If two arms yield different
tokens, the tool stops.

Exposed time is the time that the main thread spends in next(batches). It is measured without
compute between batches (none), and with compute that leaves the GIL free (compute). Throughput is
measured without compute. A batch has 65,536 tokens; the first batch is reported separately. Figures
are medians over the repeats. `boundary` is the median over the shard boundaries of a run: at each
boundary the longer wait of two batches, the one that crosses it and the next one. Memory is the
peak above what the process used before.
"""

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES, SPANS_PER_STEP = 1024, 8
MEGABYTE = bytes(1 << 20)
sys.path.append(str(ROOT / "logs"))
import cli  # noqa: E402  (rooms are folders of scripts, not packages)


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

    @property
    def span(self):
        """Tokens of a batch, with the one more to predict."""
        return self.step_tokens // SPANS_PER_STEP + 1

    @property
    def paths(self):
        numbers = range(self.num_shards)
        return [Path(self.folder, f"fineweb_train_{number:06d}.bin") for number in numbers]

    def pieces(self, k):
        """Where batch k lies: (shard, first token in it, tokens), ..."""
        first, count = k * self.ranks * self.span, self.span
        while count:
            shard, begin = divmod(first % (self.shard_tokens * self.num_shards), self.shard_tokens)
            taken = min(count, self.shard_tokens - begin)
            yield shard, begin, taken
            first, count = first + taken, count - taken

    def boundaries(self):
        """The batches at which the tokens of all ranks go on in the next shard."""
        chunk = self.ranks * self.span
        ends = range(self.shard_tokens, (self.steps - 1) * chunk, self.shard_tokens)
        return [end // chunk for end in ends]

    def write(self):
        """Random tokens, on the disk for certain: only clean pages can be evicted."""
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, self.shard_tokens
        for number, path in enumerate(self.paths):
            generator = np.random.default_rng(number)
            tokens = generator.integers(0, 1024, self.shard_tokens, dtype=np.uint16)
            with open(path, "wb") as file:
                file.write(header.tobytes() + tokens.astype("<u2").tobytes())
                os.fsync(file.fileno())


# === The arms: context managers over a loader, which give (x, y), each (rows, seq_len) ===
def imported(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location("measured", path)
    module = sys.modules["measured"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def ours(job, script, **settings):
    """The training pipeline, built as the trainer builds it."""
    trainer = imported(script)
    settings |= {"TRAIN_BATCH_TOKENS": job.step_tokens, "TRAIN_SEQ_LEN": job.seq_len}
    settings |= {"DATA_PATH": job.folder, "DEVICE": "cpu"}
    config, *_ = trainer.read_config({name: str(value) for name, value in settings.items()})
    runtime = trainer.Runtime(config, {"RANK": "0", "WORLD_SIZE": str(job.ranks)})
    shards, plan = trainer.Shards(config, "train"), trainer.BatchPlan.train(config, runtime)
    overlap = trainer.Overlap.of(config, "train", False)
    with contextlib.closing(trainer.Pipeline(shards, plan, overlap, runtime)) as batches:
        yield ((batch.x, batch.y) for batch in batches)


@contextlib.contextmanager
def challenge(job, script):
    """The challenge's loader, as its own loop calls it; its uploads are copies here."""
    loader = imported(script).DistributedTokenLoader(
        f"{job.folder}/fineweb_train_*.bin", 0, job.ranks, sys.modules["torch"].device("cpu")
    )
    step = job.step_tokens, job.seq_len, SPANS_PER_STEP // job.ranks
    yield ([part.clone() for part in loader.next_batch(*step)] for _ in itertools.count())


class Mapped:
    """A data set for torch: item k is batch k, from mapped shards, opened where they are used."""

    def __init__(self, job):
        self.job, self.maps = job, None

    def __len__(self):
        return self.job.steps

    def __getitem__(self, k):
        if self.maps is None:
            self.maps = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in self.job.paths]
        parts = [self.maps[shard][begin : begin + n] for shard, begin, n in self.job.pieces(k)]
        tokens = np.concatenate(parts).astype(np.int64)
        return tokens[:-1].reshape(-1, self.job.seq_len), tokens[1:].reshape(-1, self.job.seq_len)


@contextlib.contextmanager
def torch_loader(job, script):
    from torch.utils.data import DataLoader, default_convert

    loader = DataLoader(Mapped(job), batch_size=None, num_workers=2, collate_fn=default_convert)
    yield iter(loader)


@contextlib.contextmanager
def limit(job, script):
    """No int64, no checksum, nothing ahead."""
    tokens = np.zeros(job.span, dtype=np.uint16)
    x, y = (part.reshape(-1, job.seq_len) for part in (tokens[:-1], tokens[1:]))

    def read(k):
        done = 0
        for shard, begin, count in job.pieces(k):
            files[shard].seek(HEADER_BYTES + 2 * begin)
            files[shard].readinto(memoryview(tokens[done : done + count]).cast("B"))
            done += count
        return x, y

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb", buffering=0)) for path in job.paths]
        yield map(read, range(job.steps))


@contextlib.contextmanager
def unread(job, script):
    with ours(job, script, TRAIN_PREFETCH=0) as batches:
        yield batches


ARMS = {"ours": ours, "unread": unread, "against": ours, "challenge": challenge}
ARMS |= {"torch": torch_loader, "limit": limit}


# === Measuring: in the arm's process ===
def memory_mb(field):
    """A line of this process' memory report, and what its workers hold for themselves."""
    pids = {"self": ("status", [field])}
    for worker in multiprocessing.active_children():
        pids[str(worker.pid)] = "smaps_rollup", ["Private_Clean", "Private_Dirty"]
    kilobytes = 0
    for pid, (file, wanted) in pids.items():
        with contextlib.suppress(OSError):  # no Linux, or it has ended
            for line in Path("/proc", pid, file).read_text().splitlines():
                kilobytes += int(line.split()[1]) if line.split(":")[0] in wanted else 0
    return kilobytes / 1e3


def bytes_from_storage():
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def work(ms):
    """Keeps a core busy without the GIL."""
    end = time.perf_counter() + 1e-3 * ms
    while time.perf_counter() < end:
        hashlib.blake2b(MEGABYTE)


def measure(arm, job, script, compute_ms):
    """One run over job.steps batches."""
    waits = []
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mb, fetched, started = memory_mb("VmRSS"), bytes_from_storage(), time.perf_counter()
    with arm(job, script) as batches:
        next(batches)
        first = time.perf_counter()
        for _ in range(job.steps - 1):
            if compute_ms:
                work(compute_ms)
            asked = time.perf_counter()
            next(batches)
            waits.append(1e3 * (time.perf_counter() - asked))
        seconds, peak_mb = time.perf_counter() - first, memory_mb("VmHWM")
    figures = {"first_ms": 1e3 * (first - started), "waits_ms": waits}
    figures |= {"tokens_s": (job.steps - 1) * (job.span - 1) / seconds}
    return figures | {
        "memory_mb": peak_mb - before_mb,
        "fetched": (bytes_from_storage() - fetched) / (2 * job.span * job.steps),
    }


def checksums(arm, job, script):
    """Of x and y of batches beyond a boundary, as int64."""
    sums, count = [], job.boundaries()[0] + 3
    with arm(job, script) as batches:
        for pair in itertools.islice(batches, count):
            sums.append(zlib.crc32(b"".join(np.asarray(part, np.int64).tobytes() for part in pair)))
    return sums


def serve(order):
    """One arm, measured and then checked; the answer is the last line."""
    import torch

    torch.set_num_threads(1)
    arm, job, script = ARMS[order["arm"]], Job(**order["job"]), order["script"]
    imported(script) if script else None  # by every arm: memory begins behind it
    answer = measure(arm, job, script, order["compute_ms"])
    if order["check"]:
        answer["checksums"] = checksums(arm, job, script)
    print("\n" + json.dumps(answer))


# === Conducting: in the first process ===
def ask(**order):
    """What an arm's own process answers; it ends the bench where it fails."""
    command = [sys.executable, __file__, "--serve", json.dumps(order)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        sys.exit(f"loader.py: arm {order['arm']} failed: {said[-1][:300]}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare_cache(job, cold):
    """Every shard into the page cache, or out of it."""
    for path in job.paths:
        with open(path, "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while not cold and file.read(1 << 22):
                pass


def require_same_tokens(checksums_of):
    """`checksums_of`: an arm's name -> its batches' checksums."""
    first = next(iter(checksums_of))
    for name, sums in checksums_of.items():
        if sums != checksums_of[first]:
            batch = [a == b for a, b in zip(sums, checksums_of[first], strict=True)].index(False)
            sys.exit(f"loader.py: {name}: batch {batch} has other tokens than that of {first}")


def conduct(options, job, scripts):
    """{(cache, compute): {arm: [run, ...]}}, the arms in turns."""
    caches = ("warm", "cold") if options.cold else ("warm",)
    runs, names, turn = {}, list(scripts), 0
    for repeat in range(options.repeats):
        seen = {}
        for condition in itertools.product(caches, ("none", "compute")):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                prepare_cache(job, condition[0] == "cold")
                ms = options.compute_ms * (condition[1] == "compute")
                order = {"job": dataclasses.asdict(job), "script": str(scripts[name])}
                check = repeat == 0 and name not in seen
                found = ask(arm=name, compute_ms=ms, check=check, **order)
                seen.setdefault(name, found.get("checksums"))
                arms = runs.setdefault(condition, {name: [] for name in names})
                arms[name].append(found)
            turn += 1
        if repeat == 0:
            require_same_tokens(seen)
            print(f"the same tokens from all {len(names)} arms, across a shard boundary")
        print(f"repeat {repeat + 1} of {options.repeats} done", file=sys.stderr)
    return runs


# === Reporting ===
COLUMNS = {"median": "median ms", "p99": "p99 ms", "max": "max ms", "boundary": "boundary ms"}
COLUMNS |= {"first_ms": "first ms", "rate": "M tokens/s", "memory_mb": "memory MB"}
COLUMNS |= {"fetched": "from storage"}
# At most these parts of the challenge's exposed time, with compute; of another version's all of it.
TARGETS = {"challenge": {"median": 1 / 4, "p99": 1 / 50, "boundary": 1 / 100}}
TARGETS["against"] = dict.fromkeys(("median", "p99", "boundary"), 1.1)


def figures(run, job):
    waits = np.array(run["waits_ms"])  # of batches 1, 2, ...
    crossings = [waits[k - 1 : k + 1].max() for k in job.boundaries()]
    out = {"median": np.median(waits), "p99": np.percentile(waits, 99), "max": waits.max()}
    out |= {"boundary": np.median(crossings), "rate": run["tokens_s"] / 1e6}
    return out | {name: run[name] for name in COLUMNS if name in run}


def summarise(runs, job):
    """{condition: {arm: {column: its median over the repeats}}}"""
    tables = {}
    for condition, arms in runs.items():
        for name, repeats in arms.items():
            found = [figures(run, job) for run in repeats]
            row = {column: statistics.median(f[column] for f in found) for column in COLUMNS}
            tables.setdefault(condition, {})[name] = row
    return tables


def verdicts(table):
    """(reached, a line) of each target, from the table of (warm, compute)."""
    for other, targets in TARGETS.items():
        for column, part in targets.items() if other in table else ():
            mine, most = table["ours"][column], part * table[other][column]
            line = f"{column} {mine:.4f} ms, at most {part:g} of {other}'s: {most:.4f}"
            yield bool(mine <= most), line


def report(tables):
    for (cache, load), table in tables.items():
        print(f"\n{cache} page cache, compute between batches: {load}")
        print(f"{'arm':10}" + "".join(f"{heading:>13}" for heading in COLUMNS.values()))
        for name, row in table.items():
            print(f"{name:10}" + "".join(f"{row[column]:13.4f}" for column in COLUMNS))
    for reached, line in verdicts(tables["warm", "compute"]):
        print("PASS" if reached else "FAIL", line)


def parse(arguments=None):
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument("--challenge", type=Path, help="a script that has the challenge's loader")
    parser.add_argument("--against", type=Path, help="another version of this trainer")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="compare ours with these (default: all)"
    )
    parser.add_argument(
        "--repeats", type=count, default=0, help="runs of each arm (default: 3; --quick: 1)"
    )
    parser.add_argument(
        "--steps", type=count, default=0, help="batches per run (default: 160; --quick: 40)"
    )
    words = "number of ranks; rank 0 is measured (default: 8)"
    parser.add_argument("--ranks", type=int, default=8, choices=[1, 2, 4, 8], help=words)
    words = "compute time between batches (default: 20)"
    parser.add_argument("--compute-ms", type=float, default=20, help=words)
    parser.add_argument(
        "--cold", action="store_true", help="also measure reads from storage (Linux)"
    )
    parser.add_argument("--json", type=Path, help="write all runs with all waits to this file")
    parser.add_argument(
        "--quick", action="store_true", help="small shards, only to see that it works"
    )
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.steps = options.steps or (40 if options.quick else 160)
    return parser, options


def job_of(options, folder):
    """48 steps a shard; four shards, then they begin anew."""
    seq_len, step, shard = (16, 8192, 12_500) if options.quick else (1024, 524_288, 3_125_000)
    return Job(folder, options.ranks, options.steps, seq_len, step, options.ranks * shard, 4)


def main():
    parser, options = parse()
    if options.serve:
        serve(options.serve)
        return
    if not job_of(options, "").boundaries():
        parser.error(f"--steps {options.steps}: they reach no shard boundary: set 50 or more")
    given = {"against": options.against, "challenge": options.challenge}
    for name, path in given.items():
        if path and not path.is_file():
            parser.error(f"--{name} {path}: no such file")
    scripts = {name: given.get(name, ROOT / "train_gpt.py") for name in ARMS}
    wanted = {"ours", *(options.arms or ARMS)}
    scripts = {name: path for name, path in scripts.items() if path and name in wanted}
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as folder:
        job = job_of(options, folder)
        print(
            f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}; rank 0 of {job.ranks}, batches of {job.span - 1} "
            f"tokens; {job.steps} steps, {options.repeats} repeats"
        )
        job.write()
        runs = conduct(options, job, scripts)
        report(summarise(runs, job))
        if options.json:
            named = {" ".join(condition): arms for condition, arms in runs.items()}
            options.json.write_text(json.dumps(named), encoding="utf-8")


if __name__ == "__main__":
    main()
