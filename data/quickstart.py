"""Train a small model on a CPU: make the data, train, score the model in bits per byte, and let it
write a few lines.

    python3 data/quickstart.py                    Python's own sources, without a network
    DATA_PATH=data/datasets/novel_sp1024 python3 data/quickstart.py
                                                  your own text: data/tokenize_docs.py makes it
    python3 data/quickstart.py ITERATIONS=2000    with any setting of train_gpt.py
    python3 data/quickstart.py --ranks 2          the same in 2 processes (1, 2, 4 or 8)
    python3 data/quickstart.py --script mine.py   with an edited train_gpt.py
    python3 data/quickstart.py --prepare-only     stop before training, and print how to train

Python's sources are the standard library of the Python that runs this, a document per file. Their
data set is made once for each version of Python, under data/datasets/ and data/tokenizers/.
Settings stand after the script or in the environment, as with train_gpt.py. The script sets others
only where you set none: sizes for a CPU, RUN_ID (quickstart, quickstart-2, ...), and two threads in
all, so that the same command gives the same result on any number of cores.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not there with python3 -P
import dataset
import tokenize_docs
from dataset import cli

DATASETS = dataset.DATA / "datasets"
VOCAB_SIZE = 1024
VERSION = 5  # of the data set below: after a change it is made again
VAL_BYTES = 225_000  # about 90,000 tokens
MAX_VAL_DOCUMENT_BYTES = 64_000  # a large file in a small split would weigh too much
MIN_BYTES = 4_000_000
LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
LEFT_OUT |= {"__pycache__", "pydoc_data"}  # the latter is one generated file of half a megabyte

# No clock, so that a run can be repeated; no compiling, which would take longer than it saves.
SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that keep busy cores make steps much slower
    "SEED": "1337",
    "NUM_LAYERS": "4",
    "MODEL_DIM": "128",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "256",
    "TRAIN_BATCH_TOKENS": "2048",
    "GRAD_ACCUM_STEPS": "1",
    "ITERATIONS": "500",
    "WARMUP_STEPS": "0",
    "MATRIX_LR": "0.01",  # the challenge's rates are for batches 256 times as large
    "SCALAR_LR": "0.01",
    "TIED_EMBED_LR": "0.01",
    "MAX_WALLCLOCK_SECONDS": "0",
    "VAL_LOSS_EVERY": "125",
    "VAL_BATCH_SIZE": "16384",
    "TRAIN_LOG_EVERY": "50",
    "TORCH_COMPILE": "0",
}


def read_sources(library: Path) -> dict[str, str]:
    """The texts of the library's source files, each with its first name."""
    names: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if text.strip() and not LEFT_OUT & set(name.parts):
            names.setdefault(text, name.as_posix())
    return names


def split_documents(names: dict[str, str]) -> tuple[list[str], list[str]]:
    """Validation and training documents, each shuffled. Raises ToolError for too little text."""
    total = sum(map(len, names))
    if total < MIN_BYTES:
        fault = f"{total:,} characters of source files, {MIN_BYTES:,} are needed"
        raise cli.ToolError(f"{sys.executable}: {fault}: use a Python that has its sources")
    # The order depends on the name only: a file that comes or goes does not move the others.
    val: list[str] = []
    train: list[str] = []
    size = 0
    for text in sorted(names, key=lambda text: hashlib.sha256(names[text].encode()).digest()):
        document_bytes = len(text.encode("utf-8"))
        if size < VAL_BYTES and document_bytes <= MAX_VAL_DOCUMENT_BYTES:
            val.append(text)
            size += document_bytes
        else:
            train.append(text)
    return val, train


def prepare(library: Path) -> tokenize_docs.DataSet:
    """Makes the data set of Python's sources unless it is there."""
    made = tokenize_docs.DataSet(
        DATASETS / f"quickstart_sp{VOCAB_SIZE}",
        dataset.DATA / "tokenizers" / f"quickstart_{VOCAB_SIZE}_bpe.model",
    )
    stamp_path = DATASETS / "quickstart.json"
    stamp = json.dumps({"python": sys.version, "version": VERSION}) + "\n"
    documents = DATASETS / "quickstart.jsonl"
    with dataset.locked(DATASETS, wait=True):  # another quickstart may be making the same
        whole = made.tokenizer.is_file() and list(made.folder.glob("fineweb_train_*.bin"))
        if whole and stamp_path.is_file() and stamp_path.read_text("utf-8") == stamp:
            return made
        inputs = (dataset.read_export(made.folder) or {}).get("settings", {}).get("inputs", [])
        is_own = [Path(name).name for name, *_ in inputs] == [documents.name]
        if not is_own and (made.tokenizer.exists() or list(made.folder.glob("*.bin"))):
            remedy = f"move it and {made.tokenizer} away, or set DATA_PATH to train on it"
            raise cli.ToolError(f"{made.folder}: quickstart.py did not make this: {remedy}")
        print("making the data: about ten seconds", flush=True)
        stamp_path.unlink(missing_ok=True)
        shutil.rmtree(made.folder, ignore_errors=True)
        made.tokenizer.unlink(missing_ok=True)
        val, train = split_documents(read_sources(library))
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in [*val, *train]]
        dataset.write_atomic(documents, *lines)
        words = [str(documents), "--name", "quickstart", "--num-val-docs", str(len(val))]
        words += ["--vocab-size", str(VOCAB_SIZE), "--shard-tokens", "1000000"]
        tokenize_docs.make_data_set(tokenize_docs.parse_arguments(words))
        dataset.write_atomic(stamp_path, stamp.encode())
    return made


def data_settings() -> dict[str, str]:
    """DATA_PATH, TOKENIZER_PATH and VOCAB_SIZE, of Python's sources if DATA_PATH is not set."""
    own = os.environ.get("DATA_PATH")
    if own is None:
        made = prepare(Path(sysconfig.get_path("stdlib")))
        settings = {"DATA_PATH": str(made.folder), "TOKENIZER_PATH": str(made.tokenizer)}
        return {**settings, "VOCAB_SIZE": str(VOCAB_SIZE)}
    folder = Path(own)
    if own.endswith(".bin") and folder.is_file():
        raise cli.ToolError(f"DATA_PATH={own}: a shard; set its folder: DATA_PATH={folder.parent}")
    if not list(folder.glob("fineweb_*.bin")) and not (folder / ".producing").exists():
        if inside := sorted(folder.glob("*/fineweb_train_*.bin")):
            raise cli.ToolError(f"DATA_PATH={own}: set a folder in it, such as {inside[0].parent}")
        tool = cli.command_of("data/tokenize_docs.py")
        text = shlex.quote(own) if own and folder.exists() else "FILE_OR_FOLDER"
        remedy = f"{tool} {text} --name mine makes shards of text, and prints what to set"
        raise cli.ToolError(f"DATA_PATH={own}: not a folder with fineweb_*.bin; {remedy}")
    recorded = dataset.find_recorded_tokenizer(folder)
    tokenizer = os.environ.get("TOKENIZER_PATH", str(recorded[1]) if recorded else "")
    if not tokenizer:
        raise cli.ToolError(f"DATA_PATH={own}: no tokenizer.sha256 in it; set TOKENIZER_PATH")
    if "TOKENIZER_PATH" not in os.environ and not os.path.lexists(tokenizer):
        fault = f"its tokenizer is not at {tokenizer}"
        raise cli.ToolError(f"DATA_PATH={own}: {fault}; set TOKENIZER_PATH to where it is")
    size = tokenize_docs.Tokenizer(Path(tokenizer)).vocab_size
    return {"DATA_PATH": own, "TOKENIZER_PATH": tokenizer, "VOCAB_SIZE": str(size)}


def training_environment(ranks: int, data: dict[str, str]) -> dict[str, str]:
    """The environment of train_gpt.py; what the user has set takes precedence."""
    threads = min(2, len(os.sched_getaffinity(0))) // ranks
    settings = {**SETTINGS, **data, "OMP_NUM_THREADS": str(max(1, threads))}
    if not os.environ.keys() & {"RUN_ID", "RESUME"}:  # which needs the RUN_ID of its run
        settings["RUN_ID"] = free_run_id()
    result = {**settings, **os.environ}
    steps = result["ITERATIONS"]
    if steps.isdecimal():
        result.setdefault("WARMDOWN_ITERS", str(int(steps) * 4 // 5))
    return result


def free_run_id() -> str:
    """The first of quickstart, quickstart-2, ... that no run has. An empty file reserves it."""
    Path("logs").mkdir(exist_ok=True)
    name = "quickstart"
    for number in itertools.count(2):
        if not (Path("logs", f"{name}.txt").exists() or Path("checkpoints", name).exists()):
            with suppress(FileExistsError):
                Path("logs", f".{name}").touch(exist_ok=False)
                break
        name = f"quickstart-{number}"
    return name


def run_training(script: Path, ranks: int, env: dict[str, str], words: list[str]) -> int:
    """The exit code of train_gpt.py, or of an edited one. `words`: settings, which it checks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script), *words]
    child = subprocess.Popen(command, env=env)
    # A terminal's Ctrl-C reaches the training itself; it ends with a checkpoint and says how to
    # resume it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


def events(log: Path) -> dict[str, dict[str, Any]]:
    """The last event of each kind in a run's log, and the first validation."""
    found: dict[str, dict[str, Any]] = {}
    for line in log.read_text("utf-8").splitlines():
        event = json.loads(line)
        found[event["event"]] = event
        if event["event"] == "validation" and event["step"] == 0:
            found["before"] = event
    return found


def write_sample(log: Path) -> None:
    """Prints a few lines that the model writes."""
    command = [sys.executable, str(dataset.ROOT / "tools" / "sample.py"), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        print(f"no sample: {cli.one_line(done.stderr)}", file=sys.stderr)
        return
    print("a sample (a model this small learns spelling and form, no meaning):")
    for line in done.stdout.rstrip().splitlines()[:12]:
        print(f"    {line[:96]}")


def report(log: Path, again: str) -> None:
    """Bits per byte before and after, the artifact's size, and the command to try next."""
    found = events(log)
    after = found["score"]["val_bpb"]
    before = found.get("before", {}).get("val_bpb")
    first = f"{before:.4f} before training, " if before else ""
    artifact, code = (found["artifact"][f"{name}_bytes"] for name in ("artifact", "code"))
    print(
        f"bits per byte: {first}{after:.4f} after\n"
        "lower is better: the challenge's model, on its text, has 1.2244 (10 minutes on 8 H100s)\n"
        f"artifact: {artifact:,} bytes, {artifact + code:,} with the script, of 16,000,000\n"
        f"log: {log}\nnext: {again}",
        flush=True,
    )


def own_command(settings: dict[str, str], script: Path, ranks: int) -> str:
    """This script's command with settings in front, ready to paste."""
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    words.append(cli.command_of("data/quickstart.py"))
    if script != dataset.ROOT / "train_gpt.py":
        words.append(f"--script {shlex.quote(str(script))}")
    return " ".join(words + ([f"--ranks {ranks}"] if ranks > 1 else []))


def train(script: Path, ranks: int, words: list[str]) -> int:
    environment = training_environment(ranks, data_settings())
    what = f"{environment['ITERATIONS']} steps of a small model on {environment['DATA_PATH']}"
    print(f"training {what}: 500 steps take about 90 seconds on two free cores", flush=True)
    print("eta leaves out validations: each takes about as long as 30 steps", flush=True)
    code = run_training(script, ranks, environment, words)
    run_id = environment.get("RUN_ID", "")
    log = Path("logs", f"{run_id}.jsonl")
    found = events(log) if log.is_file() else {}
    known = {"OMP_NUM_THREADS", *map(str.upper, found.get("config", {}))} - {"RUN_ID", "RESUME"}
    again = {name: text for name, text in os.environ.items() if name in known}
    if code == 0 and not found:
        raise cli.ToolError(f"--script {script}: wrote no {log}: name an edited train_gpt.py")
    if code == 0:
        write_sample(log)
        report(log, own_command({**again, "ITERATIONS": "2000"}, script, ranks))
    elif found.get("end", {}).get("status") == "interrupted":
        command = own_command({**again, "RUN_ID": run_id, "RESUME": "auto"}, script, ranks)
        print(f"to continue: {command}", file=sys.stderr)
    return code


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add, script = parser.add_argument, dataset.ROOT / "train_gpt.py"
    add("--ranks", type=int, default=1, choices=(1, 2, 4, 8), help="processes (default: 1)")
    add("--script", type=Path, default=script, help="an edited train_gpt.py")
    add("--prepare-only", action="store_true", help="make the data, and print how to train")
    add("settings", nargs="*", metavar="NAME=value", help="settings of train_gpt.py")
    options = parser.parse_args()
    if wrong := [word for word in options.settings if not re.fullmatch(r"\w+=.*", word, re.DOTALL)]:
        parser.error(f"{wrong[0]}: no setting, which is NAME=value")
    os.environ |= dict(word.split("=", 1) for word in options.settings)
    # A file with Windows line ends leaves a carriage return at the end of each value.
    os.environ |= {name: text.rstrip("\r") for name, text in os.environ.items()}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command = f"{cli.command_of('data/quickstart.py')} --ranks {os.environ['WORLD_SIZE']}"
        raise cli.ToolError(f"quickstart.py starts torchrun itself; run {command}")
    if options.prepare_only:
        data = data_settings()
        paths = Path(data["DATA_PATH"]), Path(data["TOKENIZER_PATH"])
        print(dataset.training_commands(*paths, data["VOCAB_SIZE"]))
        return 0
    if not options.script.is_file():
        raise cli.ToolError(f"--script {options.script}: there is no such file")
    return train(options.script, options.ranks, options.settings)


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again")
