"""Compare training while its shards are made with making all shards first: wall time of commands.

    python3 tests/bench/live.py [--steps 100] [--repeats 3]

The text is the sources of the standard library, the tokenizer is trained beforehand, and the model
is that of the quickstart. The tool sets data/tokenize_docs.py --tokens-per-second so that making
the tokens takes as long as training on them: overlap can then be faster by a factor of two at most.
A further arm makes shards at full speed and is compared with training on complete shards. The arms
take turns. Each command uses one thread.
"""

import argparse
import importlib
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
sys.path += [str(ROOT / "data"), str(ROOT / "logs")]
import cli  # noqa: E402  (rooms are folders of scripts, not packages)

TOOL, TRAINER = str(ROOT / "data/tokenize_docs.py"), str(ROOT / "train_gpt.py")
STEP_TOKENS, SHARD_STEPS, VAL_DOCS, DOCUMENT_LINES = 2048 + 8, 8, 20, 40
CHANGED = {"WARMUP_STEPS": 0, "WARMDOWN_ITERS": 0, "VAL_LOSS_EVERY": 0, "VAL_TOKENS": 5000}
CHANGED |= {"VAL_BATCH_SIZE": 4096, "DEVICE": "cpu", "OMP_NUM_THREADS": 1, "RUN_ID": "live"}


class Place:
    """A folder with documents, a tokenizer, and shards that were made beforehand."""

    def __init__(self, folder, steps):
        """`steps` of training, or about as many: those that whole documents have tokens for."""
        self.folder, self.documents, self.steps = folder, folder / "docs.jsonl", steps
        need = 2.2 * steps * STEP_TOKENS  # bytes: about 2.2 a token
        with open(self.documents, "w", encoding="utf-8") as out:
            for number, document in enumerate(documents_of()):
                if need <= 0 and number > VAL_DOCS:
                    break
                out.write(document)
                need -= len(document) * (number >= VAL_DOCS)
        self.tokenizer = ["--vocab-size", "1024"]
        self.make("ready")
        [model] = (folder / "ready/tokenizers").glob("*.model")
        [data] = (path for path in (folder / "ready/datasets").iterdir() if path.is_dir())
        self.tokenizer = ["--model", str(model)]
        self.ready = {"DATA_PATH": data, "TOKENIZER_PATH": model}
        sizes = [path.stat().st_size for path in data.glob("fineweb_train_*.bin")]
        self.tokens = sum((size - 1024) // 2 for size in sizes)
        self.steps = self.tokens // STEP_TOKENS

    def timed(self, command, **paths):
        """Seconds a command takes; one that fails ends the benchmark."""
        work = Path(tempfile.mkdtemp(dir=self.folder))
        settings = importlib.import_module("quickstart").SETTINGS | CHANGED
        settings |= {"ITERATIONS": self.steps, **paths}
        env = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        started = time.perf_counter()
        done = subprocess.run(command, cwd=work, env=env, text=True, capture_output=True)
        seconds = time.perf_counter() - started
        if done.returncode:
            said = (done.stderr or done.stdout)[-1500:]
            sys.exit(f"live.py: {' '.join(command)} failed: {said}")
        shutil.rmtree(work)
        return seconds

    def train(self):
        return self.timed([sys.executable, TRAINER], **self.ready)

    def make(self, name="made", rate=0, live=False):
        """Tokenises all documents, `rate` tokens a second (0: as fast as it can); live: the
        training begins meanwhile."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, TOOL, str(self.documents), "--out", str(out), *self.tokenizer]
        command += ["--num-val-docs", str(VAL_DOCS)]
        command += ["--shard-tokens", str(SHARD_STEPS * STEP_TOKENS)]
        command += ["--tokens-per-second", str(rate)] if rate else []
        return self.timed(command + ["--live", "--", sys.executable, TRAINER] * live)


def documents_of():
    """Lines of JSON. Short documents, as the rate is held between them."""
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = module.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for first in range(0, len(lines), DOCUMENT_LINES):
            text = "".join(lines[first : first + DOCUMENT_LINES])
            yield json.dumps({"text": text}) + "\n"


def main():
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument("--steps", type=count, default=100, help="training steps (default: 100)")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each arm (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.steps)
        spare = place.make()  # what the tool takes besides waiting for its rate
        rate = round(place.tokens / max(1.0, place.train() - spare))
        print(f"{place.steps} steps, {rate} tokens/s", flush=True)
        arms = {
            "train": place.train,
            "make": lambda: place.make(rate=rate),
            "live": lambda: place.make(rate=rate, live=True),
            "live, unthrottled": lambda: place.make(live=True),
        }
        times = {arm: [] for arm in arms}
        for repeat in range(options.repeats):
            for arm, run in arms.items():
                times[arm].append(run())
            said = ", ".join(f"{arm} {seconds[-1]:.1f} s" for arm, seconds in times.items())
            print(f"repeat {repeat + 1}/{options.repeats}: {said}", flush=True)
    train, make, live, free = (statistics.median(times[arm]) for arm in arms)
    most = 1.1 * max(make, train) + SHARD_STEPS * STEP_TOKENS / rate
    print(
        f"\nmaking first, then training: {make + train:.1f} s; both at once: {live:.1f} s: "
        f"{(make + train) / live:.2f}x faster (to reach: 1.5)\n"
        f"both at once: {live:.1f} s (at most 1.1 max(make, train) + first shard: {most:.1f} s)\n"
        f"unthrottled against ready shards: {free:.1f} s and {train:.1f} s "
        f"({100 * (free / train - 1):+.1f} %, to reach: +3)"
    )


if __name__ == "__main__":
    main()
