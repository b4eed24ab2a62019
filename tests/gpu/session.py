"""Measure the trainer on a machine with CUDA devices and write the table of tests/gpu/README.md.

    python3 tests/gpu/session.py --against CHALLENGE/train_gpt.py

The program first runs the tests of tests/gpu. Then it measures the step time of three variants: the
challenge's script, train_gpt.py, and train_gpt.py without overlap. The variants run alternately,
and each run is a new process (with more than one GPU, a torchrun with one process per GPU). Last,
it traces train_gpt.py with and without overlap, and reports in which share of the time the device
waits for input, and in which share of the uploads' time kernels are running.

Run nothing else on the machine. All variants get the same settings, which come from the
environment. The data is the one of DATA_PATH and TOKENIZER_PATH; without these, it is the data
that `data/quickstart.py --prepare-only` makes. The program uses tools/timeline.py to read traces.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import timeline  # noqa: E402

MARKED = re.compile(r"(<!-- gpu -->\n).*?(<!-- /gpu -->)", re.DOTALL)
SHAPE = {"VOCAB_SIZE": 1024, "NUM_LAYERS": 9, "MODEL_DIM": 512, "NUM_HEADS": 8, "NUM_KV_HEADS": 4}
SHAPE |= {"MLP_MULT": 2, "TIE_EMBEDDINGS": 1, "TRAIN_SEQ_LEN": 1024, "TRAIN_BATCH_TOKENS": 524_288}
SHAPE |= {"VAL_BATCH_SIZE": 524_288, "WARMUP_STEPS": 20, "SEED": 1337}
QUICK = {"NUM_LAYERS": 2, "MODEL_DIM": 32, "NUM_HEADS": 2, "NUM_KV_HEADS": 1, "TRAIN_SEQ_LEN": 32}
QUICK |= {"TRAIN_BATCH_TOKENS": 2048, "VAL_BATCH_SIZE": 4096, "WARMUP_STEPS": 2}
# Without a time limit, every script trains with the same learning rates, however fast it is.
FIXED = {"MAX_WALLCLOCK_SECONDS": 0, "WARMDOWN_ITERS": 0, "VAL_LOSS_EVERY": 0, "RUN_ID": "run"}
OFF = {f"{split}_{name}": 0 for split in ("TRAIN", "VAL") for name in ("PREFETCH", "COPY_STREAM")}
# Steps 1 to 10 are all logged. The measured time begins at the end of step 10.
START_STEP = 10
CORPUS = {"DATA_PATH": ROOT / "data/datasets/quickstart_sp1024"}
CORPUS |= {"TOKENIZER_PATH": ROOT / "data/tokenizers/quickstart_1024_bpe.model"}
STEP = re.compile(r"step:(\d+)/\d+ train_loss:(\S+) train_time:(\d+)ms")
FACTS = """
import json, sys, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"devices": names, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""


class SessionError(Exception):
    """An error that ends the session; its text is one line for the user."""


# --- runs ---


def make_environment(quick: bool, settings: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a run; SessionError if the data does not exist."""
    data = {name: Path(os.environ.get(name) or path).resolve() for name, path in CORPUS.items()}
    for name, path in data.items():
        if not path.exists():
            remedy = "run `python3 data/quickstart.py --prepare-only`, or set both paths"
            raise SessionError(f"{name}={path} does not exist; {remedy}")
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


def time_steps(
    options: argparse.Namespace, script: Path, settings: dict[str, Any]
) -> tuple[float, float]:
    """Run a script; return (milliseconds per step, loss of the last step) from its log lines."""
    last = START_STEP + options.steps
    run = {"ITERATIONS": last, "TRAIN_LOG_EVERY": last, **settings}
    lines: dict[int, tuple[float, float]] = {}
    how = {"env": make_environment(options.quick, run), "text": True, "start_new_session": True}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "stderr"), "w+") as errors:
        pipes = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(launch_command(script, options.ranks), **pipes, **how)
        try:
            for line in process.stdout:
                if step := STEP.match(line):
                    lines[int(step[1])] = float(step[3]), float(step[2])
                if last in lines:  # the validation and the export after it are not measured
                    break
        finally:
            end_run(process)
        if last not in lines or START_STEP not in lines:
            errors.seek(0)
            printed = errors.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise SessionError(f"{script}: the run ended before step {last}: {printed[-1].strip()}")
    return (lines[last][0] - lines[START_STEP][0]) / options.steps, lines[last][1]


def trace_run(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, float | None]:
    """Trace a run of train_gpt.py and return two shares in percent.

    wait: the share of the training time in which the device waits for input.
    under: the share of the uploads' time in which kernels are running; None without uploads.
    """
    run = {"ITERATIONS": 30 if options.quick else 60, "TRACE_STEPS": 4, "VAL_TOKENS": 40_000}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            launch_command(options.ours, options.ranks),
            cwd=folder,
            env=make_environment(options.quick, run | settings),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SessionError(f"{options.ours}: {done.stderr.strip().splitlines()[-1]}")
        events = Path(folder, "logs/run.jsonl").read_text("utf-8").splitlines()
        found = {event["event"]: event for event in map(json.loads, events)}
        [path] = Path(folder, "logs").glob("*.trace.json.gz")
        spans = timeline.read_spans(path)
    kernels = timeline.merge_spans(spans["kernels"] + spans["NCCL"])
    uploads = timeline.merge_spans(spans["copy"])
    covered = timeline.total_ms(timeline.intersect_spans(uploads, kernels))
    under = 100 * covered / timeline.total_ms(uploads) if uploads else None
    # The wait is taken from the last line, whose steps come after the traced ones.
    return {"wait": found["step"]["input_wait_percent"], "under": under}


def run_tests() -> str:
    """Run the tests of tests/gpu and return pytest's summary; SessionError if pytest breaks."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/gpu"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    if done.returncode not in (0, 1):  # 1: some tests failed, which is a result
        raise SessionError(f"pytest ended with exit code {done.returncode}; its output is above")
    return done.stdout.splitlines()[-1].split(" in ")[0]


# --- the table ---


def read_output(*command: str) -> str:
    """Return what a command prints, or an empty text if the command fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_origin(options: argparse.Namespace, facts: dict[str, Any], tests: str) -> str:
    """Return a sentence on everything besides the settings that the result depends on."""
    changed = "+changes" if read_output("git", "status", "--porcelain", "-uno") else ""
    devices = f"{len(facts['devices'])} x {facts['devices'][0]}" if facts["devices"] else "CPU"
    words = [devices, f"torch {facts['torch']}", f"CUDA {facts['cuda']}", f"ranks {options.ranks}"]
    words += [f"commit {read_output('git', 'rev-parse', '--short=10', 'HEAD')}{changed}"]
    words += [time.strftime("%Y-%m-%d"), *["tiny shapes"] * options.quick]
    return f"{', '.join(words)}. tests/gpu: {tests}."


def measure_variants(options: argparse.Namespace) -> list[str]:
    """Measure all variants alternately; return the lines of the table."""
    against = {"challenge": (options.against, {})} if options.against else {}
    variants = against | {"ours": (options.ours, {}), "ours, no overlap": (options.ours, OFF)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for repeat in range(-1, options.repeats):
        for name, (script, settings) in variants.items():
            ms, loss = time_steps(options, script, settings)
            if repeat >= 0:  # the runs before that only fill the caches of the compilers
                times[name].append((ms, loss))
            print(f"{name}: {ms:.3f} ms, loss {loss:.4f}", file=sys.stderr, flush=True)
    ours = [name for name in variants if name != "challenge"]
    traces = {name: trace_run(options, variants[name][1]) for name in ours}
    medians = {name: statistics.median(ms for ms, _ in found) for name, found in times.items()}
    first = next(iter(medians.values()))
    head = f"script|ms per step|ratio to the first|loss at step {START_STEP + options.steps}"
    head += "|device waits for input|uploads under kernels"
    table = [head.split("|"), ["---"] * 6]
    for name, found in times.items():
        all_ms = [ms for ms, _ in found]
        spread = f"{medians[name]:.2f} ({min(all_ms):.2f} to {max(all_ms):.2f})"
        traced = traces.get(name, {"wait": None, "under": None})
        shares = ["-" if value is None else f"{value:.2f} %" for value in traced.values()]
        table.append([name, spread, f"{medians[name] / first:.3f}", f"{found[0][1]:.4f}", *shares])
    return [f"| {' | '.join(row)} |" for row in table]


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
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
    add(
        "--into",
        type=Path,
        default=ROOT / "tests/gpu/README.md",
        help="file whose table is replaced",
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
    return options


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit also ends the current run
    try:
        facts = json.loads(read_output(sys.executable, "-c", FACTS) or '{"devices": []}')
        options.ranks = options.ranks or max(1, len(facts["devices"]))
        tests = run_tests()
        table = "\n".join([*measure_variants(options), "", describe_origin(options, facts, tests)])
    except SessionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = options.into.read_text("utf-8")
    options.into.write_text(MARKED.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text), "utf-8")
    print(f"{options.into}: the table is written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
