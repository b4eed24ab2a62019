"""Measure how long a step takes: our trainer, variants of it, other scripts, on the same devices.

    python3 tests/bench/steps.py --against OTHER/train_gpt.py
        two scripts; all ratios are relative to the other one
    python3 tests/bench/steps.py --vary ATTENTION_BACKEND=flash TORCH_COMPILE=0
        ours, and ours with each of these settings alone
    python3 tests/bench/steps.py --arm PATH/train_gpt.py OPERATORS=qkv --arm ...
        and further scripts, each with its own settings
    python3 tests/bench/steps.py --recipe cast_once --recipe cast_once+muon_one_bank FOLD_ONCE=0
        ours with recipes of records/recipes, switched on by the settings that their headers name
    python3 tests/bench/steps.py --validation ...
        full validation passes instead of training steps
    python3 tests/bench/steps.py --quick ...
        tiny, also on a CPU, only to see that it works: the times mean nothing

Settings come from the environment. Every script gets all of them with their values, since defaults
differ between versions. The data is DATA_PATH and TOKENIZER_PATH, or what `data/quickstart.py
--prepare-only` has made. Each run has a process of its own, or with --ranks one process per GPU.
First every arm runs once untimed: this run fills the compile caches, and gives the losses of steps
1-10 and of later steps. Then each repeat runs every arm once. With --json FILE --budget SECONDS the
tool stops in time with exit code 3, and the same command continues from there.

Scripts are timed unedited. All that they must share is the log line `step:<n>/<N> train_loss:` at
the end of step n. A driver runs the script as __main__ and watches its stdout for this line. At the
two lines that bound the timed window, and nowhere else, the driver waits for the device and reads
the clock; at the last one it ends the process. So nothing is added to what is timed. A validation
is timed from the training line before it to its own line. The validation before step 0, which
compiles, is left out.

The gate checks that all arms compute the same mathematics. The first loss must be within 1e-3 of
ours. Losses from step 100 on must be within the noise of seeds: three standard deviations of the
difference between two runs of 0.0007 bits per byte each (the challenge's records have 0.0005 to
0.0007), in nats per token of FineWeb.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER, TRAINER = ROOT / "tests" / "bench" / "driver.py", ROOT / "train_gpt.py"
sys.path += [str(ROOT / "logs"), str(ROOT / "records"), str(DRIVER.parent)]
driver, significance = importlib.import_module("driver"), importlib.import_module("significance")
cli, recipe = importlib.import_module("cli"), importlib.import_module("recipe")
Mark = driver.Mark


class BenchError(Exception):
    """A foreseeable failure; its text is one line."""


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


def with_recipes(script, names, folder):
    """(a script with these recipes, the NAME=VALUE that switch them on)"""
    try:
        recipes = [recipe.load(name) for name in names]
        text = recipe.combined(script.read_text("utf-8"), recipes)
    except recipe.RecipeError as error:
        raise BenchError(f"--recipe {'+'.join(names)}: {error}") from error
    path = Path(tempfile.mkdtemp(dir=folder), "train_gpt.py")
    path.write_text(text, encoding="utf-8")
    switches = [f"{name}={on}" for each in recipes for name, (_, on) in each.settings.items()]
    return path, switches


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
        self.environ = settings_of(os.environ, options.quick)
        self.arms = {}  # name -> (script, settings)
        for name, path in (("other", options.against), ("ours", options.ours)):
            if path:
                self.add(name, path, [])
        for word in options.vary:
            self.add(word, options.ours, [word])
        for path, *words in options.arm:
            name = Path(path).resolve().parent.name.split("_")[-1]  # a record's folder has a date
            self.add(" ".join([name, *words]), Path(path), words)
        for names, *words in options.recipe:
            path, switches = with_recipes(options.ours, names.split("+"), folder)
            self.add(" ".join([names, *words]), path, [*switches, *words])
        self.gate, self.runs = {}, {}  # an arm's result of its untimed run, of its timed ones
        self.failures = {}  # why an arm cannot be run
        self.started, self.longest = time.monotonic(), 0.0  # seconds of a run
        self.identity = self.identify()
        if options.json and options.json.exists():
            self.go_on(json.loads(options.json.read_bytes()))

    @property
    def reference(self):
        """The arm that the others are measured by."""
        return "other" if "other" in self.arms.keys() - self.failures.keys() else "ours"

    def add(self, name, path, words):
        """An arm; of its script a copy, so that an edit meanwhile changes nothing."""
        if name in self.arms:
            raise BenchError(f"arm {name} is there twice: leave one out")
        folder = self.folder / f"arm{len(self.arms)}"
        folder.mkdir()
        settings = dict(word.partition("=")[::2] for word in words)
        self.arms[name] = shutil.copy(path, folder / path.name), settings

    def identify(self):
        """What must be the same where runs of several calls are set side by side."""
        texts = {name: Path(script).read_bytes() for name, (script, _) in self.arms.items()}
        hashes = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
        hashes = {name: [text, self.arms[name][1]] for name, text in hashes.items()}
        named = {name: self.environ.get(name) for name in (*SHAPE, *CORPUS)}
        plan = [self.options.steps, self.options.passes, self.options.gate_steps]
        return {"scripts": hashes, "settings": named, "plan": [*plan, self.options.ranks]}

    def go_on(self, kept):
        for what in self.identity:
            if kept["identity"][what] != self.identity[what]:
                path = self.options.json
                raise BenchError(f"{path} is of other {what}: move it away, or name another file")
        self.gate, self.runs, self.failures = kept["gate"], kept["runs"], kept["failures"]
        self.longest = kept["longest"]

    def keep(self):
        """All that was found, as --json has it."""
        tokens = self.environ["TRAIN_BATCH_TOKENS"]
        if self.options.validation:
            tokens = next(iter(self.gate.values()), {}).get("val_tokens")
        kept = {"identity": self.identity, "reference": self.reference, "tokens": tokens}
        kept |= {"gate": self.gate, "runs": self.runs, "failures": self.failures}
        if self.options.json:
            driver.write_whole(self.options.json, kept | {"longest": self.longest})

    def execute(self, name, settings, marks):
        """One run, in processes of its own."""
        (script, varied), self.count = self.arms[name], self.count + 1
        folder, ranks = self.folder / f"run{self.count}", self.options.ranks
        folder.mkdir()
        result, started = folder / "result.json", time.monotonic()
        order = {"script": str(script), "marks": marks, "result": str(result)}
        env = self.environ | {key: str(value) for key, value in settings.items()} | varied
        command = [sys.executable, str(DRIVER), json.dumps(order)]
        if ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command[1:1] = launcher
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = subprocess.Popen(
                command, cwd=folder, env=env, start_new_session=True, **pipes
            )
            try:
                # Rank 0 ends at its last mark. The others would wait for it.
                while process.poll() is None and not result.exists():
                    if time.monotonic() - started > self.options.limit:
                        raise BenchError(f"ran for {self.options.limit:g} s: raise --limit")
                    time.sleep(0.05)
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
                process.wait()
                for path in folder.glob("*.pid"):  # the ranks, or they would load the devices on
                    with suppress(ProcessLookupError):
                        os.kill(int(path.stem), signal.SIGKILL)
        self.longest = max(self.longest, time.monotonic() - started)
        if not result.exists():
            said = (folder / "stderr").read_text("utf-8", "replace").split("\n")
            last = next((line for line in reversed(said) if line.strip()), "it said nothing")
            raise BenchError(f"ended with code {process.returncode}: {last.strip()}")
        return json.loads(result.read_bytes())

    def attempt(self, name, repeat):
        """A run; an arm that cannot be run is noted, BenchError if ours cannot."""
        try:
            plan = untimed(self.options) if repeat < 0 else timed(self.options)
            result = self.execute(name, *plan)
            if result["warnings"]:  # of a compiler or a kernel that does not work: another arm
                raise BenchError(result["warnings"][0])
        except BenchError as error:
            if name == "ours":
                raise BenchError(f"arm {name}: {error}") from error
            print(f"arm {name}: FAILED: {error}", flush=True)
            self.failures[name] = str(error)
            return
        if repeat < 0:
            self.gate[name] = result
            return
        result["ms"] = measured_ms(result, self.options)
        self.runs.setdefault(name, []).append(result)
        which = f"repeat {repeat + 1}/{self.options.repeats} {name}"
        print(f"{which:40} {result['ms']:10.3f} ms", flush=True)

    def conduct(self):
        """Every arm untimed, then once in each repeat, in the same order. False: no time left.

        A call makes at least one run, so that enough calls come to the end.
        """
        for repeat in range(-1, self.options.repeats):
            if repeat == 0 and not self.runs:
                self.longest = 0.0  # of runs that compile nothing any more
            for name in self.arms:
                done = name in self.gate if repeat < 0 else len(self.runs.get(name, [])) > repeat
                if done or name in self.failures:
                    continue
                ends_s = time.monotonic() - self.started + self.longest
                if self.count and ends_s > self.options.budget:
                    return False
                self.attempt(name, repeat)
                self.keep()
            if repeat < 0:
                check_work(self.gate)
        self.gate, self.runs = (
            {name: kept[name] for name in self.arms if name not in self.failures}
            for kept in (self.gate, self.runs)
        )
        return True


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
VAL_TOKENS, VAL_BYTES = 62_021_632, 151_080_362  # predicted in the challenge's validation split
NATS_A_BPB = math.log(2) * VAL_BYTES / VAL_TOKENS
LATER_TOLERANCE = 3 * math.sqrt(2) * SEED_NOISE_BPB * NATS_A_BPB


def losses_of(result):
    kinds = result["losses"].values()
    return {int(step): loss for losses in kinds for step, loss in losses.items()}


def gate(results):
    """(passed, a line) an arm: its losses against ours."""
    ours = losses_of(results["ours"])
    for name, result in results.items():
        theirs, faults = losses_of(result), []
        for step, loss in ours.items():
            early, late = step <= 1, step >= JUDGED_FROM
            limit = FIRST_TOLERANCE if early else LATER_TOLERANCE if late else math.inf
            difference = theirs.get(step, math.nan) - loss
            if not abs(difference) <= limit:  # nor nan
                faults.append(f"step {step}: {difference:+.4f} nats, at most {limit:.4f}")
        if name != "ours":
            yield not faults, f"{name}: " + ("; ".join(faults) or "the losses of ours")


def compared(first, second):
    """In words: the second against the first, pairs by repeat, with a 95 % interval."""
    test = significance.paired(first, second)
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
    verdicts = list(gate(bench.gate))
    for passed, words in verdicts:
        print("PASS" if passed else "FAIL", words)
    return all(passed for passed, _ in verdicts)


def parse():
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = cli.number(int, 1)
    parser.add_argument("--against", type=Path, help="another script to compare with")
    parser.add_argument(
        "--ours", type=Path, default=TRAINER, help="our script (default: train_gpt.py)"
    )
    words = "settings, each of which makes an arm"
    parser.add_argument("--vary", nargs="+", default=[], metavar="NAME=VALUE", help=words)
    repeated = {"nargs": "+", "action": "append", "default": [], "metavar": "WORD"}
    parser.add_argument("--arm", help="an arm: PATH NAME=VALUE ...", **repeated)
    parser.add_argument("--recipe", help="an arm: RECIPE+RECIPE NAME=VALUE ...", **repeated)
    parser.add_argument(
        "--ranks", type=count, default=1, help="processes per run, one per GPU (default: 1)"
    )
    parser.add_argument(
        "--validation", action="store_true", help="time validation passes instead of steps"
    )
    parser.add_argument("--repeats", type=count, default=3, help="timed runs per arm (default: 3)")
    parser.add_argument("--steps", type=count, help="timed steps per run (default: 60; --quick: 4)")
    parser.add_argument(
        "--passes", type=count, default=3, help="timed validations per run (default: 3)"
    )
    parser.add_argument(
        "--gate-steps", type=int, help="steps of the untimed run (default: 200; --quick: 24)"
    )
    parser.add_argument(
        "--limit", type=float, default=1800, help="seconds that a run may take (default: 1800)"
    )
    parser.add_argument(
        "--json", type=Path, help="keep all runs in this file, and continue from it"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds that this command may take"
    )
    parser.add_argument("--quick", action="store_true", help="tiny, only to see that it works")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 60)
    options.gate_steps = options.gate_steps or (24 if options.quick else 200)
    for name, least in {"repeats": 2, "steps": 1, "passes": 1, "gate_steps": 22}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: set at least {least}")
    scripts = [options.ours, options.against, *(Path(words[0]) for words in options.arm)]
    for path in filter(None, scripts):
        if not path.is_file():
            parser.error(f"{path}: no such file: name a train_gpt.py")
    return options


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the run that is on ends, too
    with tempfile.TemporaryDirectory(prefix="steps-bench-") as folder:
        try:
            bench = Bench(options, Path(folder))
            if not bench.conduct():
                print("no time left: the same command goes on from here")
                return 3
        except BenchError as error:
            print(f"steps.py: {error}", file=sys.stderr)
            return 1
        passed = report(bench)
    return 0 if passed and not bench.failures else 1


if __name__ == "__main__":
    sys.exit(main())
