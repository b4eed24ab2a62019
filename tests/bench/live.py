"""Training while its shards are made, against making them first: wall time of whole commands, in one run.

    python3 tests/bench/live.py [--steps 100] [--repeats 3]

The text is the standard library's sources, the tokenizer is trained beforehand, the model is the quickstart's. The
producer is held to the rate (data/tokenize_docs.py --tokens-per-second) at which making the tokens takes as long as
training on them, so that overlap can win a factor of two at most; then it is left unthrottled and set against training
on ready shards. The arms take turns. Each command has one thread of its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL, TRAINER = str(ROOT / "data" / "tokenize_docs.py"), str(ROOT / "train_gpt.py")
STEP_TOKENS, SHARD_STEPS, VAL_DOCS, DOCUMENT_LINES = 2048 + 8, 8, 20, 40
SETTINGS = {
    "NUM_LAYERS": 4,
    "MODEL_DIM": 128,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "TRAIN_SEQ_LEN": 256,
    "WARMUP_STEPS": 0,
    "TRAIN_BATCH_TOKENS": 2048,
    "GRAD_ACCUM_STEPS": 1,
    "VAL_LOSS_EVERY": 0,
    "VAL_TOKENS": 5000,
    "DEVICE": "cpu",
    "VAL_BATCH_SIZE": 4096,
    "MAX_WALLCLOCK_SECONDS": 0,
    "OMP_NUM_THREADS": 1,
    "VOCAB_SIZE": 1024,
}


class Place:
    """A folder with documents, a tokenizer, and shards that were made beforehand."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.runs = folder, steps, 0
        self.documents = folder / "docs.jsonl"
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        with open(self.documents, "w", encoding="utf-8") as out:
            for module in modules:
                lines = module.read_text(encoding="utf-8", errors="replace").splitlines(
                    keepends=True
                )
                for first in range(
                    0, len(lines), DOCUMENT_LINES
                ):  # as the rate is held between documents
                    out.write(
                        json.dumps({"text": "".join(lines[first : first + DOCUMENT_LINES])}) + "\n"
                    )
        self.ready = folder / "ready"
        self.timed(
            [
                sys.executable,
                TOOL,
                str(self.documents),
                "--out",
                str(self.ready),
                "--vocab-size",
                "1024",
                "--num-val-docs",
                str(VAL_DOCS),
                "--shard-tokens",
                str(SHARD_STEPS * STEP_TOKENS),
            ]
        )
        [self.model] = (self.ready / "tokenizers").glob("*.model")
        [self.data] = (path for path in (self.ready / "datasets").iterdir() if path.is_dir())

    def environment(self, **more: object) -> dict[str, str]:
        settings = {**SETTINGS, "ITERATIONS": self.steps, **more}
        return {**os.environ, **{name: str(value) for name, value in settings.items()}}

    def timed(self, command: list[str], **more: object) -> float:
        """Seconds a command takes; one that fails ends the benchmark."""
        self.runs += 1
        work = self.folder / f"run{self.runs}"
        work.mkdir()
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=work, env=self.environment(**more), text=True, capture_output=True
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(
                f"live.py: {' '.join(command)} failed: {(done.stderr or done.stdout)[-1500:]}"
            )
        shutil.rmtree(work)
        return seconds

    def train(self) -> float:
        return self.timed([sys.executable, TRAINER], DATA_PATH=self.data, TOKENIZER_PATH=self.model)

    def make(self, rate: int, *command: str, live: bool = False) -> float:
        """Tokenises the tokens that training needs, at `rate` a second (0: as fast as it can)."""
        out = self.folder / "made"
        shutil.rmtree(out, ignore_errors=True)
        options = ["--live"] * live + (["--tokens-per-second", str(rate)] if rate else [])
        fixed = [
            "--out",
            str(out),
            "--model",
            str(self.model),
            "--num-val-docs",
            str(VAL_DOCS),
            "--shard-tokens",
            str(SHARD_STEPS * STEP_TOKENS),
        ]
        started = ["--", *command] if command else []
        return self.timed([sys.executable, TOOL, str(self.part), *fixed, *options, *started])

    def tokens(self) -> int:
        """Training tokens of the last make()."""
        return sum(
            (path.stat().st_size - 1024) // 2
            for path in (self.folder / "made").rglob("fineweb_train_*.bin")
        )

    def cut(self) -> None:
        """The first documents, with about as many tokens as the steps take; then as many steps as there are tokens."""
        need, have = 2.2 * self.steps * STEP_TOKENS, 0  # bytes: about 2.2 a token
        self.part = self.folder / "part.jsonl"
        with (
            open(self.documents, encoding="utf-8") as lines,
            open(self.part, "w", encoding="utf-8") as out,
        ):
            for number, line in enumerate(lines):
                if have < need or number <= VAL_DOCS:
                    out.write(line)
                    have += len(line) * (number >= VAL_DOCS)
        self.make(0)
        self.steps = self.tokens() // STEP_TOKENS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="of training (default: 100)")
    parser.add_argument("--repeats", type=int, default=3, help="of every arm (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.steps)
        place.cut()
        spare = place.make(0)  # what the tool takes besides waiting for its rate
        rate = round(place.tokens() / max(1.0, place.train() - spare))
        print(f"{place.steps} steps, {rate} tokens/s", flush=True)
        times: dict[str, list[float]] = {
            "make": [],
            "train": [],
            "live": [],
            "live, unthrottled": [],
        }
        for repeat in range(options.repeats):
            times["train"].append(place.train())
            times["make"].append(place.make(rate))
            times["live"].append(place.make(rate, sys.executable, TRAINER, live=True))
            times["live, unthrottled"].append(place.make(0, sys.executable, TRAINER, live=True))
            said = ", ".join(f"{arm} {seconds[-1]:.1f} s" for arm, seconds in times.items())
            print(f"repeat {repeat + 1}/{options.repeats}: {said}", flush=True)
        make, train, live, free = (statistics.median(times[arm]) for arm in times)
        first = SHARD_STEPS * STEP_TOKENS / rate
        print(
            f"\nmaking first, then training: {make + train:.1f} s; both at once: {live:.1f} s: "
            f"{(make + train) / live:.2f}x faster (to reach: 1.5)\n"
            f"both at once: {live:.1f} s (at most 1.1 max(make, train) + first shard: "
            f"{1.1 * max(make, train) + first:.1f} s)\n"
            f"unthrottled against ready shards: {free:.1f} s and {train:.1f} s "
            f"({100 * (free / train - 1):+.1f} %, to reach: +3)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
