"""Measure how much of SentencePiece's own speed tokenize_docs.py keeps, although it also reads,
checks, hashes and writes.

    python3 tests/bench/tokenizing.py                    takes about a minute; run nothing else
    python3 tests/bench/tokenizing.py --megabytes 2      only to see that it works

The text is the sources of the Python that runs this tool. They are shuffled and cut at line ends
into documents of about 3,000 characters, the average of FineWeb. All arms use the same tokenizer,
text and number of threads:

    alone   one call that encodes all documents, which are a list in memory,
            with SentencePiece's own threads
    tool    the export, from the .jsonl file to shards that are synced to disk
            (with as many threads as --workers says)
    live    the same in small shards, with the file .producing, and with a rate limit
            that is never reached

In each repeat each arm has a new process. It is timed from the loaded tokenizer to the end of the
work. The arms take turns, in another order in each repeat. If two arms yield different tokens, the
tool stops. A ratio is the median over the repeats of an arm's throughput divided by that of `alone`
in the same repeat. The exit code is 1 if a ratio is below the target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "logs")]
import cli  # noqa: E402  (rooms are folders of scripts, not packages)
import producer  # noqa: E402
import tokenize_docs  # noqa: E402

TARGET = 0.80
ARMS = ("alone", "tool", "live")
DOCUMENT_CHARACTERS, NUM_VAL_DOCS, VOCAB_SIZE = 3000, 100, 1024


def documents_of(num_bytes: int) -> list[str]:
    """Different documents of Python's own sources, num_bytes of them where there are so many."""
    texts: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            piece = ""
            for line in path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True):
                piece += line
                if len(piece) >= DOCUMENT_CHARACTERS:
                    texts[piece] = None
                    piece = ""
    documents = list(texts)
    random.Random(0).shuffle(documents)
    total = 0
    for count, document in enumerate(documents, 1):
        total += len(document.encode("utf-8"))
        if total >= num_bytes:
            return documents[:count]
    return documents


def digest_of(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def run_alone(folder: Path, threads: int) -> tuple[float, str]:
    """Seconds and what the tokens are."""
    lines = (folder / "docs.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    processor = tokenize_docs.Tokenizer(folder / "bpe.model").processor
    begin = time.perf_counter()
    ids = processor.encode(texts, num_threads=threads, add_bos=True, out_type="numpy")
    seconds = time.perf_counter() - begin
    return seconds, digest_of(np.concatenate(ids))


def run_tool(folder: Path, threads: int, live: bool) -> tuple[float, str]:
    """Seconds and what the tokens are."""
    out = Path(tempfile.mkdtemp(dir=folder))
    words = [
        str(folder / "docs.jsonl"),
        "--out",
        str(out),
        "--model",
        str(folder / "bpe.model"),
        "--workers",
        str(threads),
        "--num-val-docs",
        str(NUM_VAL_DOCS),
    ]
    options = tokenize_docs.parse_arguments(
        [*words, *["--live", "--tokens-per-second", "1000000000"] * live]
    )
    source = tokenize_docs.Source(tuple(options.files), options.num_val_docs)
    ((label, recipe),) = tokenize_docs.recipes(options).items()
    begin = time.perf_counter()
    tokenize_docs.run_export(source, options, label, recipe, command=tokenize_docs.Command([]))
    seconds = time.perf_counter() - begin
    shards = sorted(out.rglob("fineweb_val_*.bin")) + sorted(out.rglob("fineweb_train_*.bin"))
    header_bytes = 4 * tokenize_docs.SHARD_HEADER_WORDS
    tokens = np.concatenate([np.fromfile(path, "<u2", offset=header_bytes) for path in shards])
    shutil.rmtree(out)
    return seconds, digest_of(tokens)


def measure(folder: Path, arm: str, threads: int) -> tuple[float, str]:
    """One arm in a process of its own."""
    words = [
        sys.executable,
        __file__,
        "--arm",
        arm,
        "--folder",
        str(folder),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"error: {arm}: {done.stderr.strip() or done.stdout.strip()}")
    seconds, digest = json.loads(done.stdout.splitlines()[-1])
    return seconds, digest


def prepare(folder: Path, megabytes: float) -> float:
    """Write the documents and their tokenizer; returns how many MB of text they are."""
    documents = documents_of(int(megabytes * 1e6))
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    producer.write_atomic(folder / "docs.jsonl", lines.encode())
    source = tokenize_docs.Source((str(folder / "docs.jsonl"),), NUM_VAL_DOCS)
    model = tokenize_docs.train_tokenizer(source, VOCAB_SIZE, "identity", sample_bytes=2_000_000)
    producer.write_atomic(folder / "bpe.model", model)
    return sum(len(document.encode("utf-8")) for document in documents) / 1e6


def compare(folder: Path, megabytes: float, threads: int, repeats: int) -> dict[str, float]:
    """Prints the figures; returns the arms' ratios."""
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    digests = set()
    for repeat in range(repeats):
        for arm in (*ARMS[repeat % len(ARMS) :], *ARMS[: repeat % len(ARMS)]):
            seconds, digest = measure(folder, arm, threads)
            rates[arm].append(megabytes / seconds)
            digests.add(digest)
            if len(digests) > 1:
                sys.exit(f"error: {arm}: other tokens than the arms before")
    ratios = {
        arm: statistics.median(map(float.__truediv__, rates[arm], rates["alone"])) for arm in ARMS
    }
    print(
        f"{megabytes:.1f} MB of text, {threads} threads, {repeats} repeats of {len(ARMS)} arms "
        f"in turn, {VOCAB_SIZE} pieces, Python {sys.version.split()[0]}, "
        f"sentencepiece {tokenize_docs.sentencepiece.__version__}"
    )
    for arm in ARMS:
        each = ", ".join(f"{rate:.2f}" for rate in rates[arm])
        print(
            f"{arm:6} {statistics.median(rates[arm]):6.2f} MB/s  ({each})  "
            f"{100 * ratios[arm]:5.1f} % of alone"
        )
    return ratios


def main() -> int:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument(
        "--megabytes",
        type=cli.number(float, 0.1),
        default=20,
        help="size of the text (default: 20)",
    )
    words = "threads of each arm (default: one per core)"
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1, help=words)
    parser.add_argument("--repeats", type=count, default=3, help="runs of each arm (default: 3)")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm == "alone":
        print(json.dumps(run_alone(options.folder, options.threads)))
        return 0
    if options.arm:
        print(json.dumps(run_tool(options.folder, options.threads, options.arm == "live")))
        return 0
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as folder:
        megabytes = prepare(Path(folder), options.megabytes)
        ratios = compare(Path(folder), megabytes, options.threads, options.repeats)
    verdict = "reached" if min(ratios.values()) >= TARGET else "missed"
    print(f"target: at least {100 * TARGET:.0f} % in each arm: {verdict}")
    return 0 if verdict == "reached" else 1


if __name__ == "__main__":
    sys.exit(main())
