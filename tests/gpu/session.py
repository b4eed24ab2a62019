"""Measure the trainer on a machine with 1 to 8 CUDA devices, in stages of under nine minutes each.

    python3 tests/gpu/session.py                      run the next stage that is not done
    python3 tests/gpu/session.py all                  run all stages that are not done
    python3 tests/gpu/session.py steps                run this stage again; `list` prints the names
    python3 tests/gpu/session.py report               write the tables of the README files

Settings come from the environment. The data is DATA_PATH and TOKENIZER_PATH, or what
`data/quickstart.py --prepare-only` has made.

Each stage writes <name>.json and <name>.log to the folder of --out. If a stage fails, it says so,
and the next call runs the next stage. If its time is not enough, it is "unfinished", and the next
call continues it. `report` writes between <!-- gpu:NAME --> and <!-- /gpu --> in
tests/gpu/README.md and in the README.md files below records/, or in the files of --into.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BENCH, TRAINER = ROOT / "tests" / "bench", ROOT / "train_gpt.py"
sys.path.append(str(BENCH))
steps = importlib.import_module("steps")
cli = steps.cli

VAL_TOKENS = steps.VAL_TOKENS + 1  # of the challenge's validation split; the first is not predicted
STAGE_SECONDS, BUDGET = 530, 510  # of a stage; for runs of steps.py that end by then
OFF = ["TORCH_COMPILE=0", "ATTENTION_BACKEND=flash"]  # ours without what makes its step fast
# Recipes for a faster step.
FAST_RECIPES = ["cast_once", "kv_one_product", "muon_one_bank", "add_compiled", "attention_probe"]
RANKS_RECIPES = ["exchange_shards"]  # for two ranks and more
MICRO_STEP_RECIPES = ["fewest_micro_steps"]  # for fewer than eight
OPERATOR_RECIPES = ["qkv_operator", "mlp_operator"]  # for CUDA
SLOW_RECIPES = ["max_autotune", "coordinate_descent"]  # they compile for minutes
NO_OVERLAP = {"TRAIN_PREFETCH": "0", "TRAIN_COPY_STREAM": "0"}
FACTS = """
import json, sys, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
versions = {"python": sys.version.split()[0], "torch": torch.__version__}
print(json.dumps({"devices": names, "cuda": torch.version.cuda, **versions}))
"""


class StageError(Exception):
    """Why a stage failed, in one line."""


class UnfinishedError(Exception):
    """The stage's time is over, and another call goes on."""


def said_by(command):
    """A command's output, or "" where there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def facts():
    """What a result depends on besides the settings."""
    found = json.loads(said_by([sys.executable, "-c", FACTS]) or '{"devices": []}')
    driver = said_by(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    script = hashlib.sha256(TRAINER.read_bytes()).hexdigest()[:10]
    commit = said_by(["git", "rev-parse", "--short=10", "HEAD"]) or f"unknown, script {script}"
    changed = said_by(["git", "status", "--porcelain", "--untracked-files=no"])
    found |= {
        "driver": driver.split("\n")[0],
        "cpus": os.cpu_count(),
        "machine": os.uname().machine,
    }
    commit += "+changes" * bool(changed)
    return found | {"commit": commit, "date": time.strftime("%Y-%m-%d")}


def end(process):
    """It and all that it has started, which must not be left on the devices."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(45)  # torchrun takes up to 30 to end its processes
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Session:
    """The machine, the options, and the results so far."""

    def __init__(self, options):
        self.options, self.folder = options, options.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environ = dict(os.environ)
        if options.quick:
            tiny = {**steps.QUICK, "GRAD_ACCUM_STEPS": 1, "VAL_TOKENS": 2000}
            self.environ = {name: str(value) for name, value in tiny.items()} | self.environ
        self.stages = {f"tests {name}": partial(run_tests, file=name) for name in test_files()}
        self.stages |= {"steps": time_steps, "overlap": time_overlap}
        self.stages |= {"slow disk": partial(time_overlap, slow_ms=20), "input": trace_input}
        self.stages |= {"validation": time_validation, "loader": time_loader}
        self.stages["quality ours"] = partial(train, name="ours", script=TRAINER)
        if options.against:
            self.stages["quality other"] = partial(train, name="other", script=options.against)
        self.stages["recipes"] = time_recipes  # last: with many arms it takes many calls

    @cached_property
    def facts(self):
        return facts()

    @property
    def ranks(self):
        return self.options.ranks or max(1, len(self.facts["devices"]))

    def path(self, stage, suffix=".json"):
        return self.folder / (stage.replace(" ", "_") + suffix)

    def result(self, stage):
        path = self.path(stage)
        return json.loads(path.read_bytes()) if path.exists() else {}

    def next_stage(self):
        """The first that is neither done nor failed, or None."""
        status = {name: self.result(name).get("status") for name in self.stages}
        return next((n for n, s in status.items() if s not in ("done", "failed")), None)

    def run_stage(self, name):
        """Runs it and writes its result; True if it did not fail."""
        print(f"{name}: begins", flush=True)
        self.stage, self.started = name, time.monotonic()
        self.data, error = {}, ""
        try:
            self.stages[name](self)
            status = "done"
        except UnfinishedError:
            status = "unfinished"
        except Exception as problem:  # whatever it is, the next stage is worth its run
            status, error = "failed", f"{type(problem).__name__}: {problem}"
            if isinstance(problem, (StageError, steps.BenchError)):
                error = str(problem)
        seconds = round(time.monotonic() - self.started, 1)
        result = {"stage": name, "status": status, "error": error, "seconds": seconds}
        result |= {"quick": self.options.quick, "ranks": self.ranks}
        result |= {"facts": self.facts, "data": self.data}
        self.path(name).write_text(json.dumps(result, indent=1), encoding="utf-8")
        if status != "unfinished":
            self.path(name, ".part.json").unlink(missing_ok=True)
        print(f"{name}: {status} after {seconds:.0f} s{': ' * bool(error)}{error}", flush=True)
        return status != "failed"

    def left_s(self):
        return STAGE_SECONDS - (time.monotonic() - self.started)

    def run(self, words, environ=None, cwd=ROOT):
        """A Python command's (exit code, last line of its errors); the log has all of it."""
        command = [sys.executable, *map(str, words)]
        errors = self.path(self.stage, ".stderr")
        with open(self.path(self.stage, ".log"), "a") as log, open(errors, "w") as err:
            print("\n$", *command, file=log, flush=True)
            how = {"cwd": cwd, "env": environ or self.environ, "start_new_session": True}
            process = subprocess.Popen(command, stdout=log, stderr=err, **how)
            try:
                code = process.wait(max(1, self.left_s()))
            except subprocess.TimeoutExpired:
                code = -signal.SIGTERM
            finally:  # also where this process is told to end
                end(process)
            said = errors.read_text("utf-8", "replace")
            log.write(said)
        errors.unlink()
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return code, lines[-1] if lines else f"exit code {code}"

    def require(self, words, **how):
        """Runs a command that has to end well."""
        code, said = self.run(words, **how)
        if code == -signal.SIGTERM:
            raise StageError(f"over {STAGE_SECONDS} s: see {self.path(self.stage, '.log')}")
        if code:
            raise StageError(said)

    def launched(self, script):
        """The words that run a script on all devices."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [*launcher, script] if self.ranks > 1 else [script]


# === The stages: each fills session.data ===
def test_files():
    return sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


def run_tests(session, file):
    report = session.path(session.stage, ".xml")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    code, said = session.run([*words, ROOT / "tests" / "gpu" / file])
    if not report.exists():
        raise StageError(f"pytest did not end: {said}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    report.unlink()
    outcomes = [{part.tag for part in case} for case in cases]
    bad = [c.get("name") for c, o in zip(cases, outcomes, strict=True) if {"failure", "error"} & o]
    skipped = sum("skipped" in outcome for outcome in outcomes)
    session.data = {"passed": len(cases) - len(bad) - skipped, "failed": bad, "skipped": skipped}
    if bad or code not in (0, 5):  # 5: no tests
        raise StageError(f"{len(bad)} of {len(cases)} tests failed: {', '.join(bad[:3])}")


def in_turns(session, *words, data=()):
    """A call of steps.py, which goes on where the last one had no time left."""
    part, against = session.path(session.stage, ".part.json"), session.options.against
    before = part.read_bytes() if part.exists() else b""
    limit = session.left_s() - 10
    how = ["--json", part, "--budget", BUDGET, "--limit", limit, "--ranks", session.ranks]
    how += ["--quick", "--repeats", 2] if session.options.quick else ["--gate-steps", 100]
    how += ["--against", against] if against else []
    environ = session.environ | dict(data)
    code, said = session.run([BENCH / "steps.py", *words, *how], environ)
    session.data = json.loads(part.read_bytes()) if part.exists() else {}
    if code in (3, -signal.SIGTERM):
        if part.exists() and part.read_bytes() != before:
            raise UnfinishedError
        raise StageError(f"a run takes longer than a stage: {said}")
    if code:
        gate = steps.gate(session.data["gate"]) if "ours" in session.data.get("gate", {}) else []
        faults = [words for passed, words in gate if not passed]
        faults += [f"{arm}: {why}" for arm, why in session.data.get("failures", {}).items()]
        raise StageError("; ".join(faults) or said)


def time_steps(session):
    """Ours, and ours with each lever off; of torch 2.11 also its own way of reductions."""
    slow = ["TORCHINDUCTOR_MIX_ORDER_REDUCTION=1"]
    in_turns(session, "--vary", *OFF, *slow * session.facts["torch"].startswith("2.11."))


def time_recipes(session):
    """Ours, the recipes for a faster step together, and each alone."""
    fast = [*FAST_RECIPES]
    fast += RANKS_RECIPES * (session.ranks > 1) + MICRO_STEP_RECIPES * (session.ranks < 8)
    operators = OPERATOR_RECIPES * bool(session.facts["devices"])  # without CUDA they are eager
    arms = ["+".join(fast)] + ["+".join([*fast, *operators])] * bool(operators)
    arms += [*fast, *operators, *SLOW_RECIPES]
    if session.options.quick:
        arms = arms[:2]
    in_turns(session, *(word for arm in arms for word in ("--recipe", arm)))


def time_validation(session):
    """On as many tokens as the challenge's split has; where it is not, a small one is repeated."""
    words, data = ["--recipe", "val_resident", "--validation", "--repeats", 2], {}
    if session.options.quick:
        words += ["--passes", 1]
    elif not session.environ.get("DATA_PATH") and steps.CORPUS["DATA_PATH"].is_dir():
        folder = full_size(steps.CORPUS["DATA_PATH"])
        data = {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(steps.CORPUS["TOKENIZER_PATH"])}
    in_turns(session, *words, data=data)


def full_size(corpus):
    """A folder with a corpus's shards, its validation split repeated to VAL_TOKENS tokens."""
    folder = Path(tempfile.gettempdir(), "full_size_validation")  # for all calls of a stage
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in corpus.glob("fineweb_train_*.bin"):
        Path(folder, path.name).symlink_to(path)
    [shard] = corpus.glob("fineweb_val_*.bin")
    header, tokens = np.fromfile(shard, "<i4", 256), np.fromfile(shard, "<u2", offset=1024)
    header[2] = VAL_TOKENS
    repeated = np.resize(tokens, VAL_TOKENS)
    Path(folder, shard.name).write_bytes(header.tobytes() + repeated.tobytes())
    return folder


def time_overlap(session, slow_ms=0):
    found, few = session.path(session.stage, ".part.json"), ["--repeats", 2, "--steps", 3]
    words = few if session.options.quick else ["--steps", 40] if slow_ms else []
    words = [BENCH / "overlap.py", "--slow-ms", slow_ms, "--json", found, *words]
    session.require(words)
    session.data = json.loads(found.read_bytes())


def time_loader(session):
    found, against = session.path(session.stage, ".part.json"), session.options.against
    words = ["--quick"] if session.options.quick else []
    words += ["--challenge", against] if against else []
    session.require([BENCH / "loader.py", "--json", found, *words])
    loader = importlib.import_module("loader")
    runs = {tuple(k.split()): arms for k, arms in json.loads(found.read_bytes()).items()}
    job = loader.job_of(loader.parse(["--quick"] if session.options.quick else [])[1], "")
    arms = runs["warm", "compute"]
    session.data = {arm: [loader.figures(run, job) for run in arms[arm]] for arm in arms}


def trace_input(session):
    """What the device waits for input, and a picture, with overlap and without."""
    count = 6 if session.options.quick else 60
    run = {"ITERATIONS": count, "TRACE_STEPS": 4, "VAL_LOSS_EVERY": 0, "VAL_TOKENS": 40_000}
    for arm, switches in (("on", {}), ("off", NO_OVERLAP)):
        with tempfile.TemporaryDirectory() as folder:
            run_trainer(session, TRAINER, folder, run | switches)
            lines = Path(folder, "logs/run.jsonl").read_text("utf-8").splitlines()
            events = {event["event"]: event for event in map(json.loads, lines)}
            # The last line is of steps 11 on: behind those that were traced, and the first ones.
            session.data[arm] = {"percent": events["step"]["input_wait_percent"]}
            session.data[arm] |= {name: events["input"][name] for name in ("p99_ms", "max_ms")}
            picture = session.path(f"{session.stage}_{arm}", ".svg")
            trace = Path(folder, "logs/run.trace.json.gz")
            session.require([ROOT / "logs/trace.py", trace, "--picture", picture])


def run_trainer(session, script, folder, settings):
    """A whole run on all devices, of the same shape and data as in steps.py."""
    environ = steps.settings_of(session.environ, session.options.quick)
    environ |= {name: str(value) for name, value in settings.items()}
    session.require(session.launched(script), environ=environ, cwd=folder)


def train(session, name, script):
    """As many steps as fit for the slowest script; the same seed, batches and rates for all."""
    runs = session.result("steps").get("data", {}).get("runs", {})
    slowest = max(
        (run["ms"] for name in ("ours", "other") for run in runs.get(name, [])), default=0
    )
    count = 24 if session.options.quick else min(20_000, int(330_000 / slowest)) if slowest else 500
    run = {
        "ITERATIONS": count,
        "WARMDOWN_ITERS": count // 5,
        "TRAIN_LOG_EVERY": max(1, count // 10),
    }
    with tempfile.TemporaryDirectory() as folder:
        run_trainer(session, script, folder, run | {"VAL_LOSS_EVERY": 0})
    text = session.path(session.stage, ".log").read_text("utf-8").rpartition("\n$ ")[2]
    losses = re.findall(r"(?m)^step:(\d+)/\d+ train_loss:(\S+)", text)
    scores = re.findall(r"(?m)^final_int8_zlib_roundtrip_exact val_loss:\S+ val_bpb:(\S+)", text)
    if not losses or not scores:
        raise StageError("its log has no losses, or no score")
    found = {"losses": {step: float(loss) for step, loss in losses}, "val_bpb": float(scores[-1])}
    ours = session.result("quality ours").get("data", {}) if name == "other" else {}
    session.data = ours | {name: found}


# === The report: tables from results ===
def markdown(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def spread(values, digits=2):
    """The median, and the least and the most."""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def steps_table(data):
    runs, reference = data["runs"], data["reference"]
    verdicts = {words.partition(":")[0]: ok for ok, words in steps.gate(data["gate"])}
    base = statistics.median(run["ms"] for run in runs[reference])
    rows = []
    for arm, found in runs.items():
        times = [run["ms"] for run in found]
        middle = statistics.median(times)
        gate = {None: "reference", True: "same", False: "DIFFERENT"}[verdicts.get(arm)]
        figures = f"{middle / base:.3f}", f"{1e3 * int(data['tokens']) / middle:,.0f}"
        memory = max(run["peak_mib"] for run in found)
        rows.append([arm, spread(times), *figures, f"{memory:,}", gate, len(times)])
    rows += [[arm, f"failed: {why}", *[""] * 5] for arm, why in data["failures"].items()]
    head = ["arm", "ms", f"ratio to {reference}", "tokens/s", "peak MiB", "losses", "repeats"]
    return markdown(head, rows)


def overlap_table(data):
    rows = []
    for arm, found in data.items():
        rows.append([arm, *(spread(found[name]) for name in found), len(found["step"])])
    figures = ["a step, ms", "of it waiting for input", "at a boundary of shards, ms"]
    return markdown(["overlap", *figures, "a validation, ms", "repeats"], rows)


def loader_table(data):
    columns = {"median": 3, "p99": 2, "boundary": 2, "rate": 1, "memory_mb": 1}  # and digits
    rows = []
    for arm, found in data.items():
        figures = (spread([run[name] for run in found], columns[name]) for name in columns)
        rows.append([arm, *figures, len(found)])
    head = ["loader", "median ms", "p99 ms", "boundary ms", "M tokens/s", "MB", "repeats"]
    return markdown(head, rows)


def input_table(data):
    words = ["percent", "p99_ms", "max_ms"]
    rows = [[arm, *(f"{event[word]:g}" for word in words)] for arm, event in data.items()]
    share = "waiting for input from step 11 on, %"
    return markdown(["overlap", share, "p99 of all steps, ms", "worst step, ms"], rows)


def tests_table(data):
    return markdown(
        ["passed", "failed", "skipped"], [[data["passed"], len(data["failed"]), data["skipped"]]]
    )


def quality_table(data):
    rows = []
    for step in next(iter(data.values()))["losses"]:
        losses = (found["losses"].get(step, math.nan) for found in data.values())
        rows.append([step, *(f"{loss:.4f}" for loss in losses)])
    rows.append(["val_bpb, int8", *(f"{found['val_bpb']:.4f}" for found in data.values())])
    return markdown(["train loss at step", *data], rows)


TABLES = {  # marker -> (stages, the table of one's data)
    "tests": ([f"tests {name}" for name in test_files()], tests_table),
    "steps": (["steps"], steps_table),
    "recipes": (["recipes"], steps_table),
    "overlap": (["overlap", "slow disk"], overlap_table),
    "validation": (["validation"], steps_table),
    "loader": (["loader"], loader_table),
    "input": (["input"], input_table),
    "quality": (["quality ours", "quality other"], quality_table),
}


def origin(result):
    """Where, with what and when; a stage that failed says so here."""
    known = result["facts"]
    devices = known["devices"]
    machine = f"{len(devices)} x {devices[0]}" if devices else f"CPU {known['machine']}"
    driver = f" driver {known['driver']}," if known.get("driver") else ""
    words = f"{result['stage']}: {machine},{driver} ranks: {result['ranks']}, "
    words += f"torch {known.get('torch')}"
    words += f" (CUDA {known.get('cuda')}), commit {known['commit']}, {known['date']}"
    words += ", tiny shapes: times mean nothing" * result["quick"]
    return words + (f". **{result['status']}**: {result['error']}" * (result["status"] != "done"))


def text_of(session, name):
    """What stands between a pair of markers."""
    if name not in TABLES:
        raise StageError(f"gpu:{name}: no such table: take one of {', '.join(TABLES)}")
    names, table = TABLES[name]
    found, parts = [session.result(stage) for stage in names], []
    if name == "quality" and found[1].get("data"):
        found = found[1:]  # which has both curves
    for result in filter(None, found):
        usable = result["data"] and result["status"] != "unfinished"
        lines = list(table(result["data"])) + [""] if usable else []
        parts.append("\n".join([*lines, origin(result)]))
    return "\n\n".join(parts) or "Not measured on a GPU yet."


def report(session):
    """Fills the tables; the files that were changed."""
    files = session.options.into
    if not files:
        results = [session.result(stage) for stage in session.stages]
        if any(result.get("quick") for result in results):
            raise StageError("results of --quick are for no README: name files with --into")
        files = [ROOT / "tests/gpu/README.md", *ROOT.glob("records/**/README.md")]
    pattern = r"(<!-- gpu:([\w-]+) -->\n).*?(<!-- /gpu -->)"
    for path in files:
        old = path.read_text("utf-8")
        new = re.sub(
            pattern,
            lambda found: f"{found[1]}{text_of(session, found[2])}\n{found[3]}",
            old,
            flags=re.DOTALL,
        )
        if new != old:
            path.write_text(new, "utf-8")
            print(f"{path}: tables written")


def parse(arguments):
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "next, all, list, report, or the name of a stage (default: next)"
    parser.add_argument("what", nargs="?", default="next", help=words)
    words = "the challenge's train_gpt.py, which is measured in turns with ours"
    parser.add_argument("--against", type=Path, help=words)
    words = "processes per run (default: one per GPU)"
    parser.add_argument("--ranks", type=int, default=0, help=words)
    words = "folder for the results (default: tests/gpu/results)"
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "gpu" / "results", help=words)
    words = "files in which `report` writes"
    parser.add_argument("--into", type=Path, nargs="+", default=[], help=words)
    words = "tiny shapes, also on a CPU, only to see that it works"
    parser.add_argument("--quick", action="store_true", help=words)
    options = parser.parse_args(arguments)
    for path in filter(None, [options.against, *options.into]):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    options.against = options.against and options.against.resolve()
    options.out = options.out.resolve()
    return parser, options


def main(arguments):
    parser, options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Torch 2.11 alone needs it: 6 ms of 67 (pytorch issue 179494). Set 1 to measure the difference.
    os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
    session, what = Session(options), options.what
    if what == "report":
        try:
            report(session)
        except StageError as error:
            print(f"session.py: {error}", file=sys.stderr)
            return 1
        return 0
    if what == "list":
        for name in session.stages:
            print(f"{name:32} {session.result(name).get('status', 'to do')}")
        return 0
    if what in session.stages:
        session.path(what, ".part.json").unlink(missing_ok=True)
        return 0 if session.run_stage(what) else 1
    if what not in ("next", "all"):
        parser.error(f"{what}: set next, all, list, report, or one of {', '.join(session.stages)}")
    good, name = True, session.next_stage()
    while name:
        good = session.run_stage(name) and good
        name = session.next_stage()
        if what == "next":
            break
    print(f"next: {name}" if name else "all stages are over: session.py report")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
