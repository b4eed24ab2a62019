"""How long is a step? Our trainer, variants of it and another script, from outside, on one device.

    python3 tests/bench/steps.py --against OTHER/train_gpt.py
        two scripts; the other one is the reference of all ratios
    python3 tests/bench/steps.py --vary ATTENTION_BACKEND=flash TORCH_COMPILE=0
        ours, and ours with each of these settings alone
    python3 tests/bench/steps.py --validation ...
        full validation passes instead of training steps
    python3 tests/bench/steps.py --quick ...
        tiny, also on a CPU: times mean nothing

Settings come from the environment; every script gets the same, spelt out, since defaults differ
between versions. Data: DATA_PATH and TOKENIZER_PATH, or what `data/quickstart.py --prepare-only`
has made. A process an arm and run. First every arm runs untimed: it fills the compile caches, and
gives the losses at steps 1-10 and later. Then come the repeats, in each of them every arm once.

A script is timed unedited. What scripts with one contract share is `step:<n>/<N> train_loss:` at
the edge of step n. So a driver runs the script as __main__ with a stdout that watches for that
line. At the lines that bound the window, and nowhere else, it waits for the device and reads the
clock; at the last one it ends the process. No other line falls inside the window: nothing is added
to what is timed. A validation is timed from the training line before it to its own line; the pass
before step 0, which compiles, is left out.

The gate, that all arms do the same mathematics: the first loss within 1e-3 of the reference, those
from step 100 on within seed noise, three standard deviations of the difference of two runs of
0.0007 bits per byte each (the challenge's records: 0.0005 to 0.0007), in nats a token of FineWeb.
"""

import argparse
import importlib
import json
import math
import os
import platform
import re
import resource
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "logs"))
stats = importlib.import_module("stats")


class BenchError(Exception):
    """A foreseeable failure; its text is one line."""


# === The driver: the script's process ===
class Mark(NamedTuple):
    """The line at which the clock is read."""

    kind: str  # train or val
    step: int


LINE = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+)(?:.* data_crc:(\w+))?")


class Recorder:
    """A stdout that reads the clock, the device idle, at the lines of `marks`,
    and calls `finish` with all it has seen after the last."""

    def __init__(self, out, marks, synchronize, clock, finish):
        self.out, self.left, self.pending = out, list(marks), ""
        self.synchronize, self.clock, self.finish = synchronize, clock, finish
        self.seen = {"times": [], "losses": {"train": {}, "val": {}}, "crcs": {}, "val_tokens": ""}

    def write(self, text):
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.out.write(line + "\n")
            self.heed(line)
        return len(text)

    def heed(self, line):
        if line.startswith("val_loader:"):
            self.seen["val_tokens"] = re.search(r"tokens:(\d+)", line)[1]
        found = LINE.match(line)
        if not found:
            return
        mark = Mark(found[2], int(found[1]))
        if mark in self.left:
            self.synchronize()
            self.seen["times"].append([*mark, self.clock()])
            self.left.remove(mark)
        self.seen["losses"][mark.kind][mark.step] = float(found[3])
        if found[4]:
            self.seen["crcs"][mark.step] = found[4]
        if not self.left:
            self.finish(self.seen)

    def flush(self):
        self.out.flush()

    def __getattr__(self, name):
        return getattr(self.out, name)


def cuda_in_use():
    """torch.cuda, once the script has begun to use it; else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_initialized() else None


def synchronize():
    if cuda := cuda_in_use():
        cuda.synchronize()


def hardware():
    """The device, and the peak of memory: of the allocator on CUDA, else of the process."""
    if cuda := cuda_in_use():
        return {"device": cuda.get_device_name(), "peak_mib": cuda.max_memory_allocated() >> 20}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # on Linux
    return {"device": platform.machine(), "peak_mib": peak}


def drive(order):
    """Runs a script as `python script` does; at its last mark the result is written."""

    def finish(seen):
        Path(order["result"]).write_text(json.dumps(seen | hardware()), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # what follows, a validation and an export, is not asked for

    marks = [Mark(*mark) for mark in order["marks"]]
    sys.stdout = Recorder(sys.stdout, marks, synchronize, time.perf_counter, finish)
    sys.argv, sys.path[0] = [order["script"]], str(Path(order["script"]).parent)
    sys.path.remove(str(ROOT / "logs"))
    runpy.run_path(order["script"], run_name="__main__")
    print(f"the script ended before its lines {order['marks']}", file=sys.stderr)
    return 1


# === The runs ===
SHAPE = {"VOCAB_SIZE": 1024, "NUM_LAYERS": 9, "MODEL_DIM": 512, "NUM_HEADS": 8, "NUM_KV_HEADS": 4}
SHAPE |= {"MLP_MULT": 2, "TIE_EMBEDDINGS": 1, "TRAIN_SEQ_LEN": 1024, "TRAIN_BATCH_TOKENS": 524_288}
SHAPE |= {"VAL_BATCH_SIZE": 524_288, "WARMUP_STEPS": 20, "SEED": 1337}
QUICK = {"NUM_LAYERS": 2, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "TRAIN_SEQ_LEN": 32}
QUICK |= {"TRAIN_BATCH_TOKENS": 2048, "VAL_BATCH_SIZE": 4096, "WARMUP_STEPS": 2}
# No cap and no warm-down: the same rates in every arm, however fast it is.
FIXED = {"MAX_WALLCLOCK_SECONDS": 0, "WARMDOWN_ITERS": 0, "RUN_ID": "run"}
# Not for all scripts, or not while time is taken.
LEFT_OUT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RESUME", "CHECKPOINT_EVERY"}
LEFT_OUT |= {"VAL_TOKENS", "TRACE_STEPS", "TRAINING_TIMING_BREAKDOWN"}
CORPUS = {"DATA_PATH": ROOT / "data/datasets/quickstart_sp1024"}
CORPUS |= {"TOKENIZER_PATH": ROOT / "data/tokenizers/quickstart_1024_bpe.model"}


def settings_of(environ, quick):
    """The environment of every arm's process."""
    given = [name for name in CORPUS if environ.get(name)]
    if len(given) == 1:
        raise BenchError(f"{given[0]} is set alone: set DATA_PATH and TOKENIZER_PATH, or neither")
    data = {name: Path(environ.get(name) or path).resolve() for name, path in CORPUS.items()}
    for name, path in data.items():
        if not path.exists():
            remedy = "run `python3 data/quickstart.py --prepare-only`, or set both"
            raise BenchError(f"{name}={path}: not there: {remedy}")
    kept = {name: value for name, value in environ.items() if name not in LEFT_OUT}
    settings = {**SHAPE, **(QUICK if quick else {}), **kept, **FIXED, **data}
    return {name: str(value) for name, value in settings.items()}


def untimed(options):
    """(settings, marks) of the run that gives losses; a validation's: the pass before step 0."""
    if options.validation:
        return {"ITERATIONS": 1, "VAL_LOSS_EVERY": 1, "TRAIN_LOG_EVERY": 1}, [Mark("val", 0)]
    last = options.gate_steps // 2 * 2
    settings = {"ITERATIONS": last, "VAL_LOSS_EVERY": 0, "TRAIN_LOG_EVERY": last // 2}
    return settings, [Mark("train", last)]


def timed(options):
    """(settings, marks) of a run whose window is timed: from step 10, the last that is logged."""
    if options.validation:
        settings = {"ITERATIONS": options.passes, "VAL_LOSS_EVERY": 1, "TRAIN_LOG_EVERY": 1}
        passes = range(1, options.passes + 1)
        return settings, [Mark(kind, step) for step in passes for kind in ("train", "val")]
    last = 10 + options.steps
    settings = {"ITERATIONS": last, "VAL_LOSS_EVERY": 0, "TRAIN_LOG_EVERY": last}
    return settings, [Mark("train", 10), Mark("train", last)]


def measured_ms(result, options):
    """Of a step, or of a validation (the median of a run's passes)."""
    at = {Mark(kind, step): 1e3 * seconds for kind, step, seconds in result["times"]}
    if not options.validation:
        return (at[Mark("train", 10 + options.steps)] - at[Mark("train", 10)]) / options.steps
    passes = range(1, options.passes + 1)
    return statistics.median(at[Mark("val", k)] - at[Mark("train", k)] for k in passes)


class Bench:
    """The arms, the environment of their runs, and what they gave."""

    def __init__(self, options, folder):
        self.options, self.folder, self.count = options, folder, 0
        self.environ, self.failed = settings_of(os.environ, options.quick), False
        self.arms = {}  # name -> (script, settings)
        for name, path in (("other", options.against), ("ours", options.ours)):
            if path:  # a copy: an edit meanwhile changes nothing
                (folder / name).mkdir()
                self.arms[name] = shutil.copy(path, folder / name / path.name), {}
        for word in options.vary:
            name, _, value = word.partition("=")
            self.arms[word] = self.arms["ours"][0], {name: value}
        self.reference = "other" if options.against else "ours"
        self.gate, self.runs = {}, {}  # an arm's result of its untimed run, of its timed ones

    def execute(self, name, settings, marks):
        """One run in a process of its own."""
        (script, varied), self.count = self.arms[name], self.count + 1
        folder = self.folder / f"run{self.count}"
        folder.mkdir()
        order = {"script": str(script), "marks": marks, "result": str(folder / "result.json")}
        env = self.environ | {key: str(value) for key, value in settings.items()} | varied
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            command = [sys.executable, __file__, "--drive", json.dumps(order)]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen(
                command, cwd=folder, env=env, start_new_session=True, **pipes
            )
            try:
                code = process.wait(self.options.limit)
            except subprocess.TimeoutExpired:
                raise BenchError(f"ran for {self.options.limit:g} s: raise --limit") from None
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
                process.wait()
        if not Path(order["result"]).exists():
            said = (folder / "stderr").read_text("utf-8", "replace").split("\n")
            last = next((line for line in reversed(said) if line.strip()), "it said nothing")
            raise BenchError(f"ended with code {code}: {last.strip()}")
        return json.loads(Path(order["result"]).read_bytes())

    def attempt(self, name, plan):
        """None, and a line, if a variant cannot be run; BenchError if a script cannot."""
        try:
            return self.execute(name, *plan)
        except BenchError as error:
            if name in ("ours", "other"):
                raise BenchError(f"arm {name}: {error}") from error
            print(f"arm {name}: FAILED: {error}", flush=True)
            self.failed = True
            del self.arms[name]
            return None

    def conduct(self):
        """Every arm untimed, then once in each repeat, in the same order."""
        for name in list(self.arms):
            if result := self.attempt(name, untimed(self.options)):
                self.gate[name] = result
        check_work(self.gate)
        for repeat in range(self.options.repeats):
            for name in list(self.arms):
                if result := self.attempt(name, timed(self.options)):
                    result["ms"] = measured_ms(result, self.options)
                    self.runs.setdefault(name, []).append(result)
                    which = f"repeat {repeat + 1}/{self.options.repeats} {name}"
                    print(f"{which:40} {result['ms']:10.3f} ms", flush=True)
        self.runs = {name: self.runs[name] for name in self.arms}


def check_work(results):
    """BenchError unless all arms have the same tokens, as far as they say so."""
    for what, key in (("validation tokens", "val_tokens"), ("training tokens (data_crc)", "crcs")):
        found = {name: result[key] for name, result in results.items() if result[key]}
        first = next(iter(found), "")
        for name in found:
            if found[name] != found[first]:
                raise BenchError(f"arm {name}: other {what} than {first}")


# === The gate and the report ===
FIRST_TOLERANCE, SEED_NOISE_BPB, JUDGED_FROM = 1e-3, 0.0007, 100
NATS_A_BPB = math.log(2) * stats.PUBLISHED["sp1024"][1] / stats.PUBLISHED["sp1024"][0]
LATER_TOLERANCE = 3 * math.sqrt(2) * SEED_NOISE_BPB * NATS_A_BPB


def losses_of(result):
    kinds = result["losses"].values()
    return {int(step): loss for losses in kinds for step, loss in losses.items()}


def gate(results, reference):
    """(passed, a line) an arm: its losses against those of `reference`."""
    theirs = losses_of(results[reference])
    for name, result in results.items():
        ours, faults = losses_of(result), []
        for step, loss in theirs.items():
            early, late = step <= 1, step >= JUDGED_FROM
            limit = FIRST_TOLERANCE if early else LATER_TOLERANCE if late else math.inf
            difference = ours.get(step, math.nan) - loss
            if not abs(difference) <= limit:  # nor nan
                faults.append(f"step {step}: {difference:+.4f} nats, at most {limit:.4f}")
        if name != reference:
            yield not faults, f"{name}: " + ("; ".join(faults) or f"the losses of {reference}")


def compared(first, second):
    """In words: the second against the first, pairs by repeat, with a 95 % interval."""
    test = stats.paired(first, second)
    words = f"{test.difference:+.3f} ms, {test.low:+.3f} to {test.high:+.3f}"
    if test.low <= 0 <= test.high:
        return f"no measurable difference ({words})"
    which, share = "faster" if test.difference < 0 else "slower", statistics.mean(first)
    return f"{100 * abs(test.difference) / share:.2f} % {which} ({words})"


def table(bench):
    """An arm a line; the throughput is of training tokens, or of those of validation."""
    base = statistics.median(run["ms"] for run in bench.runs[bench.reference])
    yield f"{'arm':28} {'ms':>10} {'ratio':>7} {'tokens/s':>10} {'peak MiB':>9}  repeats"
    for name, found in bench.runs.items():
        ms, peak = (statistics.median(run[key] for run in found) for key in ("ms", "peak_mib"))
        training, validation = bench.environ["TRAIN_BATCH_TOKENS"], found[0]["val_tokens"]
        tokens = int(validation if bench.options.validation else training)
        each = " ".join(f"{run['ms']:.3f}" for run in found)
        rate = 1e3 * tokens / ms
        yield f"{name:28} {ms:10.3f} {ms / base:7.3f} {rate:10.0f} {peak:9.0f}  {each}"


def loss_table(results):
    steps = sorted(set().union(*map(losses_of, results.values())))
    yield f"{'loss at step':28}" + "".join(f"{step:8}" for step in steps)
    for name, result in results.items():
        losses = losses_of(result)
        yield f"{name:28}" + "".join(f"{losses.get(step, math.nan):8.4f}" for step in steps)


def report(bench):
    """Prints all of it; True if every arm passed the gate."""
    what = "a validation" if bench.options.validation else "a training step"
    print(f"\n{bench.runs['ours'][0]['device']}, {platform.platform()}; {what}")
    print(*table(bench), sep="\n")
    times = {name: [run["ms"] for run in runs] for name, runs in bench.runs.items()}
    for reference in dict.fromkeys((bench.reference, "ours")):
        for name in times:
            if name not in (reference, "other"):
                words = compared(times[reference], times[name])
                print(f"{name} against {reference}: {words}")
    print("", *loss_table(bench.gate), sep="\n")
    verdicts = list(gate(bench.gate, bench.reference))
    for passed, words in verdicts:
        print("PASS" if passed else "FAIL", words)
    return all(passed for passed, _ in verdicts)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another script")
    parser.add_argument("--ours", type=Path, default=ROOT / "train_gpt.py", help="ours")
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE", help="an arm each")
    parser.add_argument("--validation", action="store_true", help="time validation passes")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of an arm (3)")
    parser.add_argument("--steps", type=int, help="timed steps of a run (60; --quick: 4)")
    parser.add_argument("--passes", type=int, default=3, help="timed validations of a run (3)")
    parser.add_argument("--gate-steps", type=int, help="of the untimed run (200; --quick: 24)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds, of a run (1800)")
    parser.add_argument("--json", type=Path, help="a file for every run")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    parser.add_argument("--drive", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 60)
    options.gate_steps = options.gate_steps or (24 if options.quick else 200)
    for name, least in {"repeats": 2, "steps": 1, "passes": 1, "gate_steps": 22}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: set at least {least}")
    for path in filter(None, (options.ours, options.against)):
        if not path.is_file():
            parser.error(f"{path}: no such file: name a train_gpt.py")
    return options


def main():
    options = parse()
    if options.drive:
        return drive(options.drive)
    with tempfile.TemporaryDirectory(prefix="steps-bench-") as folder:
        try:
            bench = Bench(options, Path(folder))
            bench.conduct()
        except BenchError as error:
            print(f"steps.py: {error}", file=sys.stderr)
            return 1
        passed = report(bench)
        if options.json:
            found = {"gate": bench.gate, "runs": bench.runs}
            options.json.write_text(json.dumps(found), encoding="utf-8")
    return 0 if passed and not bench.failed else 1


if __name__ == "__main__":
    sys.exit(main())
