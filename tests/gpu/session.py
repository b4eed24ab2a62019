"""Measure the trainer on a machine with CUDA devices and write the tables of tests/gpu/README.md.

    python3 tests/gpu/session.py --dry-run                            check, and list the parts
    python3 tests/gpu/session.py --against CHALLENGE/train_gpt.py     run all parts
    python3 tests/gpu/session.py --minutes 10                         at most 10 minutes per call

The session consists of parts. The result of a part is written when the part ends. If the session
is interrupted, or the minutes of a call are over, the same command continues it: finished parts are
skipped, and failed parts are tried again at the end. The parts are, in this order:

    tests      the tests of tests/gpu
    repeats    two equal runs as usual, and two with DETERMINISTIC=1: are their losses and final
               weights equal? The first run also shows the attention kernel and the peak memory
    estimate   what roofline.py estimates for the same settings
    times      the step time of the challenge's script, of train_gpt.py, and of train_gpt.py without
               overlap, measured alternately; each run is a new process (with more than one GPU, a
               torchrun with one process per GPU)
    traces     train_gpt.py with and without overlap: in which share of the time the device waits
               for input, and in which share of the uploads' time kernels are running
    recipes    the step time of each recipe under "A faster step" in records/recipes/README.md

Run nothing else on the machine. All variants get the same settings, which come from the
environment. The data is the one of DATA_PATH and TOKENIZER_PATH; without these, it is the data
that `data/quickstart.py --prepare-only` makes.

Exit code: 0 all parts are done, 1 something is missing or a part has failed, 2 wrong usage,
3 the minutes are over and parts are left.
"""

# This module uses tools/timeline.py (reads traces), and starts tools/recipe.py (makes the scripts
# with recipes), tools/roofline.py, and pytest as processes. It imports packages only when all have
# been found, so that it can report each one that is missing.

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

MARKED = re.compile(r"(<!-- gpu -->\n).*?(<!-- /gpu -->)", re.DOTALL)
KINDS = "tests", "repeats", "estimate", "times", "traces", "recipes"
SHAPE = {"VOCAB_SIZE": 1024, "NUM_LAYERS": 9, "MODEL_DIM": 512, "NUM_HEADS": 8, "NUM_KV_HEADS": 4}
SHAPE |= {"MLP_MULT": 2, "TIE_EMBEDDINGS": 1, "TRAIN_SEQ_LEN": 1024, "TRAIN_BATCH_TOKENS": 524_288}
SHAPE |= {"VAL_BATCH_SIZE": 524_288, "WARMUP_STEPS": 20, "SEED": 1337}
QUICK = {"NUM_LAYERS": 2, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "TRAIN_SEQ_LEN": 32}
QUICK |= {"TRAIN_BATCH_TOKENS": 2048, "VAL_BATCH_SIZE": 4096, "WARMUP_STEPS": 2}
# Without a time limit, every script trains with the same learning rates, however fast it is.
FIXED = {"MAX_WALLCLOCK_SECONDS": 0, "WARMDOWN_ITERS": 0, "VAL_LOSS_EVERY": 0, "RUN_ID": "run"}
# The challenge's script does not flush its output. Without this, its last step line would arrive
# only at the end of the run, after a whole validation.
FIXED |= {"PYTHONUNBUFFERED": 1}
OFF = {f"{split}_{name}": 0 for split in ("TRAIN", "VAL") for name in ("PREFETCH", "COPY_STREAM")}
FEW_VAL_TOKENS = 40_000  # where only training is looked at, a short validation is enough
# Steps 1 to 10 are all logged. The measured time begins at the end of step 10.
START_STEP = 10
RECIPE_RUNS = 2  # timed runs of each recipe
CORPUS = {"DATA_PATH": ROOT / "data/datasets/quickstart_sp1024"}
CORPUS |= {"TOKENIZER_PATH": ROOT / "data/tokenizers/quickstart_1024_bpe.model"}
STEP = re.compile(r"step:(\d+)/\d+ train_loss:(\S+) train_time:(\d+)ms")
ATTENTION = re.compile(r"^sdp_backends:(\S+) chosen:(\S+)$", re.MULTILINE)
MEMORY = re.compile(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB$", re.MULTILINE)
ESTIMATED_MS = re.compile(r"^a step: ([\d.]+) ms", re.MULTILINE)
ESTIMATED_MEMORY = re.compile(r"^memory: ([\d,]+) MB of .*, and ([\d,]+) MB more", re.MULTILINE)
# {name of a test part: expression for pytest -k}
TEST_PARTS = {
    "batches": "equal_the_shards",
    "runs": "not equal_the_shards and not recipe",
    "recipes": "recipe",
}
# {package: the file of requirements that contains it}
PACKAGES = dict.fromkeys(("torch", "numpy", "sentencepiece"), "requirements.txt")
PACKAGES |= dict.fromkeys(("pytest", "pytest_timeout", "pandas"), "tests/requirements.txt")
# {program: why it is needed}
PROGRAMS = {
    "git": "tools/recipe.py merges recipes with it",
    "gcc": "torch.compile needs it; install gcc and g++",
}
DISK_GB = 5.0  # for the compilers' caches and the results
MEMORY_USED_GB = 2.0  # a GPU on which more is in use is running something else
FACTS = """
import json, torch
cuda = torch.cuda.is_available()
gpus = range(torch.cuda.device_count()) if cuda else []
print(json.dumps({
    "devices": [torch.cuda.get_device_name(i) for i in gpus],
    "used_gb": [(lambda m: (m[1] - m[0]) / 1e9)(torch.cuda.mem_get_info(i)) for i in gpus],
    "capability": torch.cuda.get_device_capability()[0] if cuda else None,
    "torch": torch.__version__, "cuda": torch.version.cuda,
}))
"""


CHECK_SETTINGS = """
import json, os, train_gpt
config, _, faults, _ = train_gpt.read_config(["DEVICE=cpu", "RUN_ID="], os.environ)
print(json.dumps(faults + train_gpt.check_settings(config, os.environ)[0]))
"""


class SessionError(Exception):
    """An error that ends a part; its text is one line for the user."""


class TimeIsOverError(SessionError):
    """The minutes of this call ended while the part was running."""


@dataclass
class Part:
    """A piece of the session whose result is kept."""

    name: str  # its kind, which is one of KINDS, and what it does
    seconds: float  # estimate of its duration
    work: Callable[[], dict[str, Any]]  # returns the result, or raises SessionError


# --- processes ---


def make_environment(quick: bool, settings: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a run."""
    data = {name: Path(os.environ.get(name) or path).resolve() for name, path in CORPUS.items()}
    values = {**SHAPE, **(QUICK if quick else {}), **os.environ, **FIXED, **data, **settings}
    return {name: str(value) for name, value in values.items()}


def launch_command(script: Path, ranks: int) -> list[str]:
    """Return the command that runs a script, with torchrun if there is more than one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), str(script.resolve())]


def end_run(process: subprocess.Popen) -> None:
    """End a run with all processes that it has started, so that none stays on a device."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(45)  # torchrun takes up to 30 s to end its processes
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def start_run(
    options: argparse.Namespace, command: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen]:
    """Start a command in `folder`, and end it when the block ends or the minutes are over.

    Its standard output is a pipe; its errors are in the file "stderr" of the folder. Raises
    TimeIsOverError, after the block, if the minutes were over.
    """
    seconds_left = max(0.0, options.deadline - time.monotonic())
    how = {"cwd": folder, "env": environment, "text": True, "start_new_session": True}
    with open(folder / "stderr", "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **how)
    timer = None
    is_over = threading.Event()
    if seconds_left < threading.TIMEOUT_MAX:
        timer = threading.Timer(seconds_left, lambda: (is_over.set(), end_run(process)))
        timer.start()
    try:
        yield process
    except SessionError:
        if not is_over.is_set():
            raise
    finally:
        if timer:
            timer.cancel()
        end_run(process)
        process.stdout.close()
    if is_over.is_set():
        raise TimeIsOverError("the minutes of this call ended before it was done")


def last_error(folder: Path, process: subprocess.Popen) -> str:
    """Return the last line that a run has printed to its standard error, or its exit code."""
    process.wait()
    lines = (folder / "stderr").read_text("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {process.returncode}"


def run_to_end(
    options: argparse.Namespace, command: list[str], folder: Path, environment: dict[str, str]
) -> str:
    """Run a command to its end and return its output; SessionError if it fails."""
    with start_run(options, command, folder, environment) as process:
        printed = process.stdout.read()
        if process.wait():
            raise SessionError(f"{' '.join(command[:4])}: {last_error(folder, process)}")
    return printed


# --- the work of the parts ---


def run_tests(options: argparse.Namespace, expression: str) -> dict[str, Any]:
    """Run tests of tests/gpu; return {"counts": {outcome: number}, "failed": names of tests}."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-k", expression, str(ROOT / "tests/gpu")]
    with (
        tempfile.TemporaryDirectory() as folder,
        start_run(options, command, Path(folder), dict(os.environ)) as process,
    ):
        printed = process.stdout.read()
        if process.wait() not in (0, 1):  # 1: some tests failed, which is a result
            print(printed, file=sys.stderr)
            code = process.returncode
            raise SessionError(f"pytest ended with exit code {code}; its output is above")
    print(printed, file=sys.stderr)
    summary = printed.splitlines()[-1]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", summary)}
    wanted = ("passed", "failed", "skipped", "error", "errors")
    failed = re.findall(r"(?m)^(?:FAILED|ERROR) \S+::(\S+)", printed)
    return {"counts": {name: counts[name] for name in wanted if name in counts}, "failed": failed}


def time_steps(
    options: argparse.Namespace, script: Path, settings: dict[str, Any]
) -> dict[str, float]:
    """Run a script; return its {"ms": time of a step, "loss": of the last step} by its log lines.

    The run is ended after its last step, because its validation and export are not measured.
    """
    last = START_STEP + options.steps
    run = {"ITERATIONS": last, "TRAIN_LOG_EVERY": last, **settings}
    lines: dict[int, tuple[float, float]] = {}
    command = launch_command(script, options.ranks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = make_environment(options.quick, run)
        with start_run(options, command, folder, environment) as process:
            for line in process.stdout:
                if step := STEP.match(line):
                    lines[int(step[1])] = float(step[3]), float(step[2])
                if last in lines:
                    break
            if last not in lines or START_STEP not in lines:
                why = last_error(folder, process)
                raise SessionError(f"{script}: the run ended before step {last}: {why}")
    ms = (lines[last][0] - lines[START_STEP][0]) / options.steps
    return {"ms": ms, "loss": lines[last][1]}


def time_recipe(options: argparse.Namespace, name: str, settings: dict[str, str]) -> dict[str, Any]:
    """Apply a recipe and time its steps, as `time_steps` does."""
    script = options.out / "scripts" / f"{name}.py"
    script.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "tools/recipe.py"), "apply", name, "--to", str(script)]
    script.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_to_end(options, command, Path(folder), dict(os.environ))
    return time_steps(options, script, settings)


def trace_run(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, float | None]:
    """Trace a run of train_gpt.py and return two shares in percent.

    wait: the share of the training time in which the device waits for input.
    under: the share of the uploads' time in which kernels are running; None without uploads.
    """
    import timeline

    run = {"ITERATIONS": 30 if options.quick else 60, "TRACE_STEPS": 4}
    run |= {"VAL_TOKENS": FEW_VAL_TOKENS}
    command = launch_command(options.ours, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        run_to_end(options, command, Path(folder), make_environment(options.quick, run | settings))
        found = {event["event"]: event for event in read_events(Path(folder))}
        [path] = Path(folder, "logs").glob("*.trace.json.gz")
        spans = timeline.read_spans(path)
    kernels = timeline.merge_spans(spans["kernels"] + spans["NCCL"])
    uploads = timeline.merge_spans(spans["copy"])
    covered = timeline.total_ms(timeline.intersect_spans(uploads, kernels))
    under = 100 * covered / timeline.total_ms(uploads) if uploads else None
    # The wait is taken from the last line, whose steps come after the traced ones.
    return {"wait": found["step"]["input_wait_percent"], "under": under}


def repeat_run(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Run train_gpt.py to its end; return its losses, a checksum of its weights, the attention
    kernel (the allowed ones and the chosen one) and its peak memory in MiB."""
    last = START_STEP + options.steps
    run = {"ITERATIONS": last, "TRAIN_LOG_EVERY": 1, "VAL_TOKENS": FEW_VAL_TOKENS, **settings}
    command = launch_command(options.ours, options.ranks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = run_to_end(options, command, folder, make_environment(options.quick, run))
        events = read_events(folder)
        weights = hash_weights(folder / "final_model.pt")
    attention, memory = ATTENTION.search(text), MEMORY.search(text)
    if not attention or not memory:
        raise SessionError(f"{options.ours}: its log has no line on attention or on peak memory")
    return {
        "losses": [event["train_loss"] for event in events if event["event"] == "step"],
        "weights": weights,
        "attention": attention.groups(),
        "memory": [int(memory[1]), int(memory[2])],
    }


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the .jsonl log of the run in `folder`."""
    return [
        json.loads(line) for line in (folder / "logs/run.jsonl").read_text("utf-8").splitlines()
    ]


def hash_weights(path: Path) -> str:
    """Return a checksum of all tensors of a state dict: equal if and only if all bits are equal."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(torch.load(path, map_location="cpu", weights_only=True).items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def find_rates(facts: dict[str, Any]) -> str:
    """Return the name that roofline.py has for the first GPU (a CPU: h100), or an empty text."""
    if not facts["devices"]:
        return "h100"
    name = facts["devices"][0].lower().replace(" ", "")
    known = ("h100", "h200", "b200", "a100", "rtx4090")
    return next((device for device in known if device in name), "")


def estimate_step(options: argparse.Namespace, device: str) -> dict[str, float]:
    """Return what roofline.py estimates: the time of a step in ms, and the peak memory in MB.

    It gets the settings of the runs, and the attention kernel that the first run has used.
    """
    environment = make_environment(options.quick, {})
    settings = {name: environment[name] for name in SHAPE}
    first = options.results.get("repeats: as usual, run 1", {}).get("result", {})
    if first.get("attention", ("", ""))[1] in ("flash", "cudnn", "fa3"):
        settings["ATTENTION_BACKEND"] = first["attention"][1]
    command = [sys.executable, str(ROOT / "tools/roofline.py"), str(options.ours.resolve())]
    command += [f"{name}={value}" for name, value in settings.items()]
    command += ["--device", device, "--ranks", str(options.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        # It pretends that there is a GPU. It has been tested only where there is none.
        without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        printed = run_to_end(options, command, Path(folder), without_gpu)
    held, more = (int(n.replace(",", "")) for n in ESTIMATED_MEMORY.search(printed).groups())
    return {"ms": float(ESTIMATED_MS.search(printed)[1]), "memory_mb": held + more}


# --- the plan ---


def list_fast_recipes() -> dict[str, dict[str, str]]:
    """Return {recipe: its settings} of the table "A faster step" in records/recipes/README.md."""
    page = (ROOT / "records/recipes/README.md").read_text("utf-8")
    section = page.split("\n## A faster step\n", 1)[1].split("\n## ", 1)[0]
    recipes = {}
    for name, cell in re.findall(r"(?m)^\| \[(\w+)\]\(\w+\.diff\) ([^|]*)\|", section):
        recipes[name] = dict(re.findall(r"`(\w+)=(\S+)`", cell))
    return recipes


class Plan:
    """The parts of a session, with estimates of their durations on H100s.

    No estimate has been measured. They assume 0.3 s per step on one GPU, and a minute to compile.
    """

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.options = options
        self.facts = facts
        steps = START_STEP + options.steps + SHAPE["WARMUP_STEPS"]
        self.run_seconds = 5.0 if options.quick else 40 + steps * 0.3 / options.ranks
        self.compile_seconds = 0.0 if options.quick else 60.0
        self.tune_seconds = 0.0 if options.quick else 600.0
        self.parts: list[Part] = []

    def add(
        self, kind: str, name: str, seconds: float, work: Callable[..., Any], *given: Any
    ) -> None:
        """Add a part, if its kind is wanted. Its work is work(options, *given)."""
        if kind in self.options.only:
            do = partial(work, self.options, *given)
            self.parts.append(Part(f"{kind}: {name}", seconds, do))

    def add_all(self) -> None:
        """Add the parts in the order of the module's docstring."""
        for (name, expression), minutes in zip(TEST_PARTS.items(), (1, 4, 8), strict=True):
            seconds = 60.0 * minutes if self.facts["devices"] else 10.0  # all are skipped then
            self.add("tests", name, seconds, run_tests, expression)
        self.add_repeats()
        if device := find_rates(self.facts):
            seconds = 20.0 if self.options.quick else 120.0
            self.add("estimate", f"roofline.py for {device}", seconds, estimate_step, device)
        self.add_times()
        for name, settings in (("ours", {}), ("ours, no overlap", OFF)):
            self.add("traces", name, self.run_seconds + 10, trace_run, settings)
        self.add_recipes()

    def add_repeats(self) -> None:
        for name, settings in (("as usual", {}), ("DETERMINISTIC=1", {"DETERMINISTIC": 1})):
            for run in (1, 2):
                compiling = self.compile_seconds if run == 1 else 0.0
                seconds = self.run_seconds + compiling + 10  # it also validates and packs
                self.add("repeats", f"{name}, run {run}", seconds, repeat_run, settings)

    def add_times(self) -> None:
        for run in range(self.options.repeats + 1):  # run 0 only fills the compilers' caches
            for name, (script, settings) in list_variants(self.options).items():
                seconds = self.run_seconds + (self.compile_seconds if run == 0 else 0.0)
                self.add("times", f"{name}, run {run}", seconds, time_steps, script, settings)

    def add_recipes(self) -> None:
        for name, settings in list_fast_recipes().items():
            if name == "fused_mlp" and self.facts["devices"] and self.facts["capability"] != 9:
                continue  # its kernel needs an H100 or H200
            tunes = name in ("max_autotune", "coordinate_descent")
            compiling = self.tune_seconds if tunes else self.compile_seconds
            for run in range(RECIPE_RUNS + 1):
                seconds = self.run_seconds + (compiling if run == 0 else 0.0)
                self.add("recipes", f"{name}, run {run}", seconds, time_recipe, name, settings)


def list_variants(options: argparse.Namespace) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return {name: (script, settings)} of the variants whose step times are measured."""
    against = {"challenge": (options.against, {})} if options.against else {}
    return against | {"ours": (options.ours, {}), "ours, no overlap": (options.ours, OFF)}


def find_missing(options: argparse.Namespace, facts: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each thing that the session needs and this machine does not have."""
    yield from find_missing_software()
    yield from find_wrong_gpus(options, facts)
    needed = DISK_GB / 10 if options.quick else DISK_GB
    for folder in (Path(tempfile.gettempdir()), options.out):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free / 1e9
        if free < needed:
            yield f"{folder}: {free:.1f} GB of disk space are free, but {needed:g} GB are needed"
    yield from find_missing_data(make_environment(options.quick, {}))


def find_missing_software() -> Iterator[str]:
    for package, file in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            install = f"{sys.executable} -m pip install -r {ROOT / file}"
            yield f"the package {package} is missing; run {install}"
    for program, why in PROGRAMS.items():
        if not shutil.which(program):
            yield f"the program {program} is missing; {why}"


def find_wrong_gpus(options: argparse.Namespace, facts: dict[str, Any]) -> Iterator[str]:
    gpus = facts["devices"]
    if not gpus and not options.quick:
        yield "torch sees no GPU; use a machine with a GPU, or try the program with --quick"
    if gpus and options.ranks > len(gpus):
        yield f"--ranks {options.ranks} is more than the {len(gpus)} GPUs of this machine"
    for number, used in enumerate(facts["used_gb"]):
        if used > MEMORY_USED_GB:
            yield f"GPU {number}: {used:.0f} GB of its memory are in use; end what runs on it"


def find_missing_data(environment: dict[str, str]) -> Iterator[str]:
    """Yield a line for each fault of the data. environment: that of a run"""
    remedy = "run `python3 data/quickstart.py --prepare-only`, or set DATA_PATH and TOKENIZER_PATH"
    for name in CORPUS:
        if not Path(environment[name]).exists():
            yield f"{name}={environment[name]} does not exist; {remedy}"
            return
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        return
    # The trainer itself checks that shards, tokenizer and settings fit each other.
    command = [sys.executable, "-c", CHECK_SETTINGS]
    checked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if checked.returncode:
        yield f"the data could not be checked: {checked.stderr.strip().splitlines()[-1]}"
        return
    for fault in json.loads(checked.stdout):
        yield f"{fault}; or {remedy}"


def print_plan(options: argparse.Namespace, parts: list[Part]) -> None:
    """Print the parts and their estimated durations."""
    where = "of the tiny model" if options.quick else f"on {options.ranks} H100"
    print(f"These are the parts and estimates of their minutes {where}; none has been measured.")
    left = 0.0
    for part in parts:
        is_done = "result" in options.results.get(part.name, {})
        left += 0.0 if is_done else part.seconds
        print(f"{part.seconds / 60:6.1f}  {part.name}{' (done)' if is_done else ''}")
    print(f"{left / 60:6.1f}  minutes are left in total")


# --- running the parts ---


def result_path(options: argparse.Namespace, part: str) -> Path:
    """Return the path of the file that holds the result of a part."""
    return options.out / "parts" / f"{re.sub(r'[^a-zA-Z0-9_.=]+', '-', part)}.json"


def write_file(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, if the program is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def describe_inputs(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what all parts of a session have in common: devices, scripts and settings."""
    environment = make_environment(options.quick, {})
    scripts = [path for path in (options.ours, options.against) if path]
    return {
        "machine": {name: facts.get(name) for name in ("devices", "torch", "cuda")},
        "scripts": [hashlib.sha256(path.read_bytes()).hexdigest() for path in scripts],
        "settings": {name: environment[name] for name in (*SHAPE, *CORPUS)},
        "options": [options.ranks, options.repeats, options.steps, options.quick],
    }


def read_results(options: argparse.Namespace, inputs: dict[str, Any]) -> dict[str, dict]:
    """Return {part: what its file holds} of an earlier call. SessionError if they do not fit."""
    path = options.out / "session.json"
    if path.exists() and (earlier := json.loads(path.read_text("utf-8"))) != inputs:
        names = ", ".join(name for name in inputs if earlier.get(name) != inputs[name])
        raise SessionError(
            f"{options.out} holds results of another session ({names} differ); choose another "
            "folder with --out, or delete it"
        )
    found = map(json.loads, (p.read_text("utf-8") for p in options.out.glob("parts/*.json")))
    return {result["part"]: result for result in found}


def run_parts(options: argparse.Namespace, parts: list[Part]) -> bool:
    """Run the parts that have no result; return whether all were run before the minutes ended.

    A part that would end too late is left to a later call. The first part of a call begins in any
    case, so that each call makes progress.
    """
    results = options.results
    unfinished = [part for part in parts if "result" not in results.get(part.name, {})]
    unfinished.sort(key=lambda part: part.name in results)  # those that have failed come last
    is_first = True
    are_left = False
    for part in unfinished:
        begun = time.monotonic()
        if not is_first and begun + part.seconds > options.deadline:
            are_left = True
            continue
        outcome: dict[str, Any] = {"part": part.name}
        try:
            outcome["result"] = part.work()
        except TimeIsOverError as error:
            are_left = True
            if not is_first:
                continue
            # Another call would not give it more time. In the next call, other parts come first.
            outcome["error"] = str(error)
        except SessionError as error:
            outcome["error"] = str(error)
        is_first = False
        outcome["seconds"] = time.monotonic() - begun
        write_file(result_path(options, part.name), json.dumps(outcome, indent=1))
        results[part.name] = outcome
        shown = outcome.get("error") or describe_result(outcome["result"])
        print(f"{part.name}: {shown}", file=sys.stderr, flush=True)
    return not are_left


def describe_result(result: dict[str, Any]) -> str:
    """Return a short text for the console."""
    if "loss" in result:
        return f"{result['ms']:.3f} ms, loss {result['loss']:.4f}"
    return json.dumps({name: value for name, value in result.items() if name != "losses"})


# --- the report ---


def read_output(*command: str) -> str:
    """Return what a command prints, or an empty text if the command fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def make_table(head: str, rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, and an empty line. head: the titles, separated by |"""
    titles = head.split("|")
    table = [titles, ["---"] * len(titles), *rows]
    return [*(f"| {' | '.join(row)} |" for row in table), ""]


def describe_origin(options: argparse.Namespace, facts: dict[str, Any]) -> str:
    """Return a sentence on everything besides the settings that the result depends on."""
    changed = "+changes" if read_output("git", "status", "--porcelain", "-uno") else ""
    devices = f"{len(facts['devices'])} x {facts['devices'][0]}" if facts["devices"] else "CPU"
    words = [devices, f"torch {facts['torch']}", f"CUDA {facts['cuda']}", f"ranks {options.ranks}"]
    words += [f"commit {read_output('git', 'rev-parse', '--short=10', 'HEAD')}{changed}"]
    words += [time.strftime("%Y-%m-%d"), *["tiny shapes"] * options.quick]
    return f"{', '.join(words)}."


class Report:
    """The tables of a session, from the results of its parts."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.options = options
        self.facts = facts

    def result(self, part: str) -> dict[str, Any] | None:
        """Return the result of a part, or None if the part has none."""
        return self.options.results.get(part, {}).get("result")

    def timed_runs(self, kind: str, name: str, count: int) -> list[dict[str, float]]:
        """Return the results of the timed runs of a variant, without run 0."""
        runs = (self.result(f"{kind}: {name}, run {run}") for run in range(1, count + 1))
        return [run for run in runs if run]

    def median(self, kind: str, name: str, count: int) -> float | None:
        """Return the median time of a step in ms, or None without results."""
        runs = self.timed_runs(kind, name, count)
        return statistics.median(run["ms"] for run in runs) if runs else None

    def lines(self) -> list[str]:
        """Return all lines: a table for each kind of part, and what they depend on."""
        writers = {
            "times": self.times,
            "estimate": self.estimate,
            "repeats": self.repeats,
            "recipes": self.recipes,
            "tests": self.tests,
        }
        lines = []
        known = {name.partition(":")[0] for name in self.options.results}
        for kind, write in writers.items():
            if kind in known.union(self.options.only):
                lines += write()
        for name, outcome in self.options.results.items():
            if "error" in outcome:
                lines.append(f"- {name} has failed: {outcome['error']}")
        return [*lines, describe_origin(self.options, self.facts)]

    def times(self) -> list[str]:
        options = self.options
        medians = {
            name: self.median("times", name, options.repeats) for name in list_variants(options)
        }
        first = next(iter(medians.values()))
        rows = []
        for name, median in medians.items():
            row = [name, *["-"] * 5]
            if median:
                runs = self.timed_runs("times", name, options.repeats)
                all_ms = [run["ms"] for run in runs]
                row[1] = f"{median:.2f} ({min(all_ms):.2f} to {max(all_ms):.2f})"
                row[2] = f"{median / first:.3f}" if first else "-"
                row[3] = f"{runs[0]['loss']:.4f}"
            shares = self.result(f"traces: {name}") or {}
            row[4:] = [
                "-" if shares.get(key) is None else f"{shares[key]:.2f} %"
                for key in ("wait", "under")
            ]
            rows.append(row)
        head = f"script|ms per step|ratio to the first|loss at step {START_STEP + options.steps}"
        return make_table(f"{head}|device waits for input|uploads under kernels", rows)

    def estimate(self) -> list[str]:
        device = find_rates(self.facts)
        estimated = self.result(f"estimate: roofline.py for {device}") or {}
        run = self.result("repeats: as usual, run 1")
        measured_ms = self.median("times", "ours", self.options.repeats)
        # The trainer counts in MiB, roofline.py in MB.
        measured_mb = run["memory"][0] * 2**20 / 1e6 if run else None
        rows = []
        for name, estimate, measured, digits in (
            ("ms per step", estimated.get("ms"), measured_ms, 1),
            ("peak memory allocated (MB)", estimated.get("memory_mb"), measured_mb, 0),
        ):
            values = ["-" if v is None else f"{v:,.{digits}f}" for v in (estimate, measured)]
            ratio = f"{measured / estimate:.2f}" if estimate and measured else "-"
            rows.append([name, *values, ratio])
        what = device or f"no rates for {self.facts['devices'][0]}"
        return make_table(f"ours|estimated by roofline.py ({what})|measured|ratio", rows)

    def repeats(self) -> list[str]:
        rows = []
        lines = []
        for name in ("as usual", "DETERMINISTIC=1"):
            runs = [self.result(f"repeats: {name}, run {run}") for run in (1, 2)]
            if all(runs):
                rows.append([name, *compare_runs(*runs), runs[0]["attention"][1]])
            else:
                rows.append([name, *["-"] * 4])
        run = self.result("repeats: as usual, run 1")
        if run:
            allowed, chosen = run["attention"]
            lines = [f"The attention kernel is {chosen}; PyTorch may choose from {allowed}.", ""]
        head = "two equal runs|losses|largest difference of a loss|final weights|attention kernel"
        return [*make_table(head, rows), *lines]

    def recipes(self) -> list[str]:
        ours = self.median("times", "ours", self.options.repeats)
        rows = []
        for name in list_fast_recipes():
            runs = self.timed_runs("recipes", name, RECIPE_RUNS)
            row = [name, "-", "-", "-"]
            if runs:
                median = statistics.median(run["ms"] for run in runs)
                ratio = f"{median / ours:.3f}" if ours else "-"
                row = [name, f"{median:.2f}", ratio, f"{runs[0]['loss']:.4f}"]
            rows.append(row)
        loss = f"loss at step {START_STEP + self.options.steps}"
        return make_table(f"recipe|ms per step|ratio to ours|{loss}", rows)

    def tests(self) -> list[str]:
        counts: dict[str, int] = {}
        failed = []
        for name in TEST_PARTS:
            result = self.result(f"tests: {name}") or {"counts": {}, "failed": []}
            failed += result["failed"]
            for outcome, count in result["counts"].items():
                counts[outcome] = counts.get(outcome, 0) + count
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        lines = [f"- {name} has failed" for name in failed]
        return [f"tests/gpu: {summary or 'not run'}.", "", *lines, *[""] * bool(lines)]


def compare_runs(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return whether the losses of two runs are equal, their largest difference, and whether their
    weights are equal, as texts."""
    pairs = list(zip(one["losses"], other["losses"], strict=True))
    different = [step for step, (left, right) in enumerate(pairs, 1) if left != right]
    losses = f"differ from step {different[0]} on" if different else "equal"
    largest = max(abs(left - right) for left, right in pairs)
    weights = "equal" if one["weights"] == other["weights"] else "differ"
    return [losses, f"{largest:.2g}", weights]


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="check what is needed and list the parts, then end")
    add("--against", type=Path, help="the challenge's train_gpt.py, to be measured, too")
    add(
        "--ours",
        type=Path,
        default=ROOT / "train_gpt.py",
        help="the trainer to measure (default: train_gpt.py of this repository)",
    )
    add("--ranks", type=int, help="processes per run (default: one per GPU)")
    add("--repeats", type=int, default=5, help="timed runs of each script (default: 5)")
    add("--steps", type=int, default=60, help="timed steps of each run (default: 60)")
    add("--minutes", type=float, help="time limit of this call in minutes (default: none)")
    add("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of parts (default: all)")
    add(
        "--out",
        type=Path,
        default=ROOT / "logs/gpu_session",
        help="folder of the results of the parts (default: logs/gpu_session)",
    )
    add(
        "--into",
        type=Path,
        default=ROOT / "tests/gpu/README.md",
        help="file whose tables are replaced when all parts are done",
    )
    add(
        "--quick",
        action="store_true",
        help="use a tiny model, also on a CPU, only to see that the program works",
    )
    options = parser.parse_args(arguments)
    for path in filter(None, (options.against, options.ours, options.into)):
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
    if not MARKED.search(options.into.read_text("utf-8")):
        parser.error(f"{options.into} must have the lines <!-- gpu --> and <!-- /gpu -->")
    minutes = float("inf") if options.minutes is None else options.minutes
    options.deadline = time.monotonic() + 60 * minutes
    options.out = options.out.resolve()
    return options


def run_session(options: argparse.Namespace) -> int:
    """Check, run and report; return the exit code."""
    facts = {"devices": [], "used_gb": [], "capability": None, "torch": None, "cuda": None}
    facts |= json.loads(read_output(sys.executable, "-c", FACTS) or "{}")
    options.ranks = options.ranks or max(1, len(facts["devices"]))
    inputs = describe_inputs(options, facts)
    missing = list(find_missing(options, facts))
    options.results = read_results(options, inputs)
    plan = Plan(options, facts)
    plan.add_all()
    parts = plan.parts
    if options.dry_run:
        print_plan(options, parts)
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    if missing or options.dry_run:
        return 1 if missing else 0
    write_file(options.out / "session.json", json.dumps(inputs, indent=1))
    is_complete = run_parts(options, parts)
    text = "\n".join(Report(options, facts).lines())
    write_file(options.out / "report.md", f"{text}\n")
    if not is_complete:
        print(f"{options.out / 'report.md'}: what is known so far")
        left = [part for part in parts if "result" not in options.results.get(part.name, {})]
        print(f"{len(left)} parts are left; run the same command again", file=sys.stderr)
        return 3
    page = options.into.read_text("utf-8")
    options.into.write_text(MARKED.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page), "utf-8")
    print(f"{options.into}: the tables are written")
    failed = [part.name for part in parts if "error" in options.results[part.name]]
    if failed:
        again = "the same command tries these parts again"
        print(f"error: failed: {', '.join(failed)}; {again}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    sys.path.insert(0, str(ROOT / "tools"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit also ends the current run
    try:
        return run_session(options)
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
