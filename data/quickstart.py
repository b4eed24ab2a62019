"""Train a small model on Python's own sources, without a network: make the data, train, score the
model in bits per byte, and let it write a few lines.

    python3 data/quickstart.py                    corpus, tokenizer, shards, training in one process
    python3 data/quickstart.py --ranks 2          the same in 2 processes (1, 2, 4 or 8)
    python3 data/quickstart.py --prepare-only     stop before training, and print what to set for it
    ITERATIONS=2000 python3 data/quickstart.py    with any setting of train_gpt.py

The corpus is the standard library of the Python that runs this script, one document per file. It is
built once, under data/datasets/ and data/tokenizers/. It is built again when Python, this script's
way to build it or one of the built files has changed.

The learning rates fall to 0 over the last four fifths of the steps; WARMDOWN_ITERS sets another
number of steps.

Each process gets as many threads as there are free cores for it when the script starts: more
threads than free cores make a step several times slower. OMP_NUM_THREADS sets another number.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import launching
import producer
import tokenize_docs

ROOT = Path(__file__).resolve().parent.parent
STAMP_NAME = "quickstart.json"
TRAINER_SAYS = "train_gpt.py: "  # before its last words, on stderr
GOES_ON = "RESUME=auto goes on"  # in those of a training that can be resumed
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",  # one generated file of half a megabyte
    "site-packages",
    "dist-packages",
    "__pycache__",
}

# About 75 s of training on 2 CPU cores. Its length does not depend on a clock, so that the same
# number of threads gives the same result. Compiling would take longer than it saves.
SETTINGS = {
    "RUN_ID": "quickstart",
    "SEED": "1337",
    "DATA_PATH": "./data/datasets/quickstart_sp1024",
    "TOKENIZER_PATH": "./data/tokenizers/quickstart_1024_bpe.model",
    "VOCAB_SIZE": "1024",
    "NUM_LAYERS": "4",
    "MODEL_DIM": "128",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "256",
    "TRAIN_BATCH_TOKENS": "2048",
    "GRAD_ACCUM_STEPS": "1",
    "ITERATIONS": "500",
    "WARMUP_STEPS": "0",
    "WARMDOWN_ITERS": "400",
    "MATRIX_LR": "0.01",  # the challenge's rates are for batches 256 times as large
    "SCALAR_LR": "0.01",
    "TIED_EMBED_LR": "0.01",
    "MAX_WALLCLOCK_SECONDS": "0",
    "VAL_LOSS_EVERY": "125",
    "VAL_BATCH_SIZE": "16384",
    "TRAIN_LOG_EVERY": "50",
    "TORCH_COMPILE": "0",
}


@dataclass(frozen=True)
class Recipe:
    """How the data set is made. After any change it is built again."""

    vocab_size: int = 1024
    shard_tokens: int = 1_000_000
    val_bytes: int = 450_000  # about 180,000 tokens, validated in 4 to 5 s on 2 CPU cores
    max_val_document_bytes: int = 64_000  # a large file in a small split would weigh too much
    min_bytes: int = 4_000_000
    seed: int = 1337
    version: int = 3  # to be raised when this script makes other data of the same sources


# === CORPUS, TOKENIZER, SHARDS ====================================================================


def read_sources(stdlib: Path) -> dict[str, bytes]:
    """The library's source files by relative name, tests and installed packages left out."""
    files = {path.relative_to(stdlib).as_posix(): path for path in sorted(stdlib.rglob("*.py"))}
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if not LEFT_OUT & set(name.split("/"))
    }


def split_documents(sources: dict[str, bytes], recipe: Recipe) -> tuple[list[str], list[str]]:
    """Validation and training documents, each shuffled.

    Raises DataError where there is not enough text.
    """
    names: dict[str, str] = {}  # text -> name: no text appears twice
    for name, content in sources.items():
        text = content.decode("utf-8", errors="ignore")
        if text.strip():
            names.setdefault(text, name)
    total = sum(map(len, names))
    if total < recipe.min_bytes:
        raise tokenize_docs.DataError(
            f"the library of {sys.executable} has {len(names)} source files of {total:,} "
            f"characters, {recipe.min_bytes:,} are needed; use a Python that has its sources"
        )
    # The order depends on name and seed only: a file that comes or goes does not move the others.
    ranked = sorted(
        names, key=lambda text: hashlib.sha256(f"{recipe.seed}/{names[text]}".encode()).digest()
    )
    val, size = [], 0
    for text in ranked:
        document_bytes = len(text.encode("utf-8"))
        if size < recipe.val_bytes and document_bytes <= recipe.max_val_document_bytes:
            val.append(text)
            size += document_bytes
    chosen = set(val)
    return val, [text for text in ranked if text not in chosen]


def stamp(folder: Path, tokenizer: Path, wanted: dict) -> dict:
    """How the data was made, and the hash of every file of it that is there."""
    files = [
        path
        for path in (*folder.glob("*"), tokenizer)
        if path.is_file() and path.name != STAMP_NAME
    ]
    return {
        **wanted,
        "files": {path.name: tokenize_docs.sha256(path.read_bytes()) for path in files},
    }


def prepare(data: Path, stdlib: Path, recipe: Recipe = Recipe(), workers: int = 1) -> bool:
    """Build the data set under `data` from the sources in `stdlib`; False when it is there already.

    It is made in a temporary folder and moved into place when complete.
    """
    folder = data / "datasets" / f"quickstart_sp{recipe.vocab_size}"
    tokenizer = data / "tokenizers" / f"quickstart_{recipe.vocab_size}_bpe.model"
    sources = read_sources(stdlib)
    digests = "".join(
        f"{name} {tokenize_docs.sha256(content)}\n" for name, content in sources.items()
    )
    wanted = {
        "recipe": asdict(recipe),
        "python": sys.version,
        "sources": tokenize_docs.sha256(digests.encode()),
    }
    with contextlib.suppress(OSError, producer.DataError):  # if nothing complete is there
        if producer.read_json(folder / STAMP_NAME, "") == stamp(folder, tokenizer, wanted):
            print(f"data:      {folder} is up to date", flush=True)
            return False
    for path in (folder.parent, tokenizer.parent):
        path.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".quickstart-*"):
        if time.time() - left.stat().st_mtime > 3600:  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".quickstart-", dir=folder.parent))
    new, new_tokenizer = temporary / folder.name, temporary / tokenizer.name
    try:
        build(new, new_tokenizer, sources, recipe, workers)
        tokenize_docs.write_json(new / STAMP_NAME, stamp(new, new_tokenizer, wanted))
        os.replace(new_tokenizer, tokenizer)
        if folder.exists():
            os.rename(folder, temporary / "old")
        os.rename(new, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def build(
    folder: Path, tokenizer: Path, sources: dict[str, bytes], recipe: Recipe, workers: int
) -> None:
    """Write documents, tokenizer and shards, and print a line for each."""
    started = time.monotonic()
    val, train = split_documents(sources, recipe)
    documents = folder / "docs.jsonl"
    tokenize_docs.write_atomic(
        documents, *(json.dumps({"text": text}).encode() + b"\n" for text in [*val, *train])
    )
    print(
        f"corpus:    {len(val) + len(train)} documents, "
        f"{documents.stat().st_size / 1e6:.1f} MB of Python's sources "
        f"({time.monotonic() - started:.1f} s)",
        flush=True,
    )
    started = time.monotonic()
    source = tokenize_docs.Source((str(documents),), len(val))
    # Code needs its line ends and indentation, so nothing is normalised.
    tokenize_docs.write_atomic(
        tokenizer, tokenize_docs.train_tokenizer(source, recipe.vocab_size, "identity")
    )
    producer.record_tokenizer(folder, tokenizer)
    print(
        f"tokenizer: {recipe.vocab_size} pieces from the {len(train)} training documents "
        f"({time.monotonic() - started:.1f} s)",
        flush=True,
    )
    started = time.monotonic()
    state = tokenize_docs.new_state({})
    writer = tokenize_docs.ShardWriter(folder, state, recipe.shard_tokens, save=lambda state: None)
    tokenize_docs.export_documents(
        source, tokenizer, writer, workers=workers, progress=lambda document, tokens: None
    )
    print(
        f"shards:    {state['tokens']['train']:,} training tokens "
        f"in {len(state['shards']['train'])} files, {state['tokens']['val']:,} validation tokens "
        f"({time.monotonic() - started:.1f} s)",
        flush=True,
    )


# === TRAINING =====================================================================================


def busy_and_idle() -> tuple[int, int] | None:
    """Clock ticks of all cores together, (busy, idle); None if the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, waiting, *others = map(int, file.readline().split()[1:9])
        return user + nice + system + sum(others), idle + waiting
    return None


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by its container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores or 1)


def free_cores(seconds: float = 0.5) -> float:
    """How many cores are idle now."""
    cores, before = usable_cores(), busy_and_idle()
    if before is None:
        return max(0.0, cores - os.getloadavg()[0])
    time.sleep(seconds)
    busy, idle = (after - then for after, then in zip(busy_and_idle(), before, strict=True))
    return cores * idle / max(1, busy + idle)


def launch_environment(ranks: int, free: float, environment: dict[str, str]) -> dict[str, str]:
    """The whole environment of the training; what the user has set takes precedence.

    `free`: cores that are free for it.
    """
    settings = {**SETTINGS, "OMP_NUM_THREADS": str(max(1, round(free) // ranks))}
    steps = environment.get("ITERATIONS", "")
    if steps.isdecimal():  # else the learning rates of a short run would begin near 0
        settings["WARMDOWN_ITERS"] = str(int(steps) * 4 // 5)
    return {**settings, **environment}


def say_threads(ranks: int, free: float, environment: dict[str, str]) -> None:
    """How many threads training gets, and why."""
    threads = environment["OMP_NUM_THREADS"]
    why = f"{free:.1f} of {usable_cores()} cores are free; OMP_NUM_THREADS sets another number"
    if "OMP_NUM_THREADS" in os.environ:
        why = "OMP_NUM_THREADS is set"
    whose = "in each process" if ranks > 1 else "in one process"
    print(f"threads:   {threads} {whose} ({why})", flush=True)


def trainer_settings(environment: dict[str, str]) -> list[str]:
    """Names of the settings in the environment, as the trainer sees it.

    Where it refuses them, exits as it does.
    """
    answer = subprocess.run(
        [sys.executable, "train_gpt.py", "--print-config"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if answer.returncode:
        sys.exit(answer.returncode)
    return [
        name.upper()
        for name, entry in json.loads(answer.stdout).items()
        if entry["source"] == "environment"
    ]


def command_line(command: list[str], environment: dict[str, str], names: list[str]) -> str:
    """The command with its settings, ready to paste into a fresh shell."""
    shown = [
        name
        for name in dict.fromkeys([*SETTINGS, "OMP_NUM_THREADS", *names])
        if name in environment
    ]
    settings = " ".join(f"{name}={shlex.quote(environment[name])}" for name in shown)
    return f"cd {shlex.quote(str(ROOT))} && {settings} {shlex.join(command)}"


class Training:
    """A running training. What it writes to stderr is shown, without torchrun's own report."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        # In a session of its own torchrun gets Ctrl-C only from us, once: at a second signal it
        # would leave its workers behind.
        self.child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.report, self.interrupted = launching.Report(), threading.Event()
        self.goes_on = ""  # the trainer's word on how to resume it, which we say in our own words
        self.spoke = False  # the trainer said why it ended
        self.forwarder = threading.Thread(target=self.forward_errors, daemon=True)
        self.forwarder.start()

    def forward_errors(self) -> None:
        for line in self.child.stderr:
            for shown in self.report.shown(line):
                self.show(shown)
        for shown in self.report.rest():
            self.show(shown)

    def show(self, line: str) -> None:
        self.spoke = self.spoke or line.startswith(TRAINER_SAYS)
        if line.startswith(TRAINER_SAYS) and GOES_ON in line:
            self.goes_on = line.removeprefix(TRAINER_SAYS).strip()
        elif not self.interrupted.is_set():
            print(line, end="", file=sys.stderr, flush=True)

    def wait(self) -> int:
        """Its exit code once it has ended; 130 when we were interrupted."""
        try:
            code = self.child.wait()
        except KeyboardInterrupt:
            self.stop()
            code = 130
        self.forwarder.join(timeout=5)
        return code

    def stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.interrupted.set()
        print("\ninterrupted; waiting for the training to end", flush=True)
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=60)
        self.child.kill()


def own_command(settings: dict[str, str], ranks: int) -> str:
    """This script's command with settings in front, ready to paste."""
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    words.append(producer.command_of("data/quickstart.py"))
    if ranks > 1:
        words.append(f"--ranks {ranks}")
    return " ".join(words)


def report(log: Path, artifact: Path, following: str) -> None:
    """Three lines: bits per byte before and after, the artifact's size,
    the log and the command to try next.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [
        re.findall(pattern, text, re.MULTILINE)
        for pattern in (
            r"^step:0/\d+ val_loss:\S+ val_bpb:([\d.]+)",
            r"^final_int8_zlib_roundtrip_exact val_loss:\S+ val_bpb:([\d.]+)",
            r"^Total submission size int8\+zlib: (\d+) bytes",
        )
    ]
    before, after, total = (float(values[-1]) if values else float("nan") for values in found)
    gain = (
        f"{before:.4f} before training, {after:.4f} after ({100 * (1 - after / before):.1f} % less)"
    )
    if not found[0]:  # VAL_LOSS_EVERY=0
        gain = f"{after:.4f} after training"
    print(
        f"bits per byte: {gain}\n"
        f"artifact: {artifact.name}, {artifact.stat().st_size:,} bytes, "
        f"{total:,.0f} with the script, of 16,000,000\n"
        f"log: {log}; next: {following}, or edit the command printed above"
    )


def say_end(code: int, training: Training, again: str, log: Path, has_log: bool) -> None:
    """Why a training ended early, on stderr, as the last line.

    `again`: the command that goes on.
    """
    if training.goes_on:
        short = f"this command with RUN_ID={log.stem} RESUME=auto"
        print(training.goes_on.replace(short, again), file=sys.stderr)
    elif code == 130:
        print("interrupted before the training could save anything", file=sys.stderr)
    elif training.report.unsaid() or not training.spoke:  # else it has said why
        why = training.report.unsaid()
        words = f"the training ended with exit code {code}" + (f" ({why})" if why else "")
        words += f"; its log is {log}" if has_log else "; it wrote no log"
        print(f"error: {words}", file=sys.stderr)


def modified(path: Path) -> int:
    """When a file was written last, in nanoseconds; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.is_file() else 0


def write_sample(environment: dict[str, str]) -> None:
    """Print a few lines of text that the model writes."""
    script = ROOT / "logs" / "sample.py"
    command = [sys.executable, str(script), "--file", "final_model.int8.ptz", "--length", "120"]
    command += ["--log", f"logs/{environment['RUN_ID']}.txt", "--prompt", "def "]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        print(f"no sample: {producer.one_line(done.stderr)}", file=sys.stderr)
        return
    print("sample:")
    for line in done.stdout.rstrip().splitlines()[:12]:
        print(f"    {line}", flush=True)


def train(ranks: int, free: float) -> int:
    environment = launch_environment(ranks, free, dict(os.environ))
    command = [
        sys.executable,
        *f"-m torch.distributed.run --standalone --nproc_per_node={ranks} train_gpt.py".split(),
    ]
    names = trainer_settings(environment)
    say_threads(ranks, free, environment)
    print(f"training:  {command_line(command, environment, names)}", flush=True)
    log = ROOT / "logs" / f"{environment['RUN_ID']}.txt"
    before = modified(log)
    training = Training(command, environment)
    code = training.wait()
    mine = {
        name: os.environ[name]
        for name in names
        if os.environ.get(name, SETTINGS.get(name)) != SETTINGS.get(name)
    }
    if code == 0:
        following = own_command({**mine, "ITERATIONS": "2000"}, ranks)
        write_sample(environment)
        report(log, ROOT / "final_model.int8.ptz", following)
        return 0
    # With as many threads as before: another number adds up in another order.
    threads = {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
    again = own_command({**mine, **threads, "RESUME": "auto"}, ranks)
    has_log = modified(log) not in (0, before)  # else it is an earlier run's
    say_end(code, training, again, log, has_log)
    return code


def main() -> int:
    own = producer.command_of("data/quickstart.py")
    parser = producer.Parser(__doc__, f"settings go in front: ITERATIONS=100 {own}")
    ranks = "processes (default: 1)"
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4, 8), help=ranks)
    prepare_only = "build the data, print what to set, and stop before training"
    parser.add_argument("--prepare-only", action="store_true", help=prepare_only)
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks = os.environ.get("WORLD_SIZE", "2")
        sys.exit(f"error: torchrun is started by this tool: {own} --ranks {ranks}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if not options.prepare_only and importlib.util.find_spec("torch") is None:
        sys.exit(producer.missing_package(ImportError("No module named 'torch'")))
    try:
        free = 0.0 if options.prepare_only else free_cores()  # before there is work of our own
        prepare(
            ROOT / "data", Path(sysconfig.get_path("stdlib")), workers=min(4, os.cpu_count() or 1)
        )
        if not options.prepare_only:
            return train(options.ranks, free)
        paths = [ROOT / SETTINGS[name] for name in ("DATA_PATH", "TOKENIZER_PATH")]
        print(producer.to_train(*paths, SETTINGS["VOCAB_SIZE"]))
        print(producer.before_what())
        return 0
    except (tokenize_docs.DataError, OSError) as error:
        print(f"error: {producer.one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    producer.run_tool(main)
