"""Train a small model on a CPU: make the data, train, print the score and a sample of text.

    python3 data/quickstart.py                    on Python's own sources, without internet access
    DATA_PATH=data/datasets/novel_sp1024 python3 data/quickstart.py
                                                  on your own text: data/tokenize_docs.py makes
                                                  the data set
    python3 data/quickstart.py ITERATIONS=2000    with any setting of train_gpt.py
    python3 data/quickstart.py --ranks 2          in 2 processes (1, 2, 4 or 8)
    python3 data/quickstart.py --script mine.py   with an edited copy of train_gpt.py
    python3 data/quickstart.py --prepare-only     make the data, and print how to train

The score is in bits per byte of the validation text; lower is better. Python's sources are the
standard library of the Python that runs this program; each file is a document. Their data set is
made once for each version of Python, in data/datasets/ and data/tokenizers/.

Settings are given after the script or in the environment, as with train_gpt.py. The program sets
other defaults than train_gpt.py: sizes that suit a CPU, and RUN_ID (quickstart, quickstart-2, ...).
It uses two threads in total, so that the same command gives the same result on any number of cores.
Your settings take precedence.
"""

# Builds on tokenize_docs.py (makes the data set), on dataset.py, and on cli.py of tools/. It starts
# train_gpt.py and tools/sample.py as processes.

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

# python3 -P does not put the folder of the script on the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dataset
import tokenize_docs
from dataset import cli

DATASETS = dataset.DATA / "datasets"
VOCAB_SIZE = 1024
DATA_VERSION = 5  # of the data set of Python's sources: after a change, the data set is made again
VAL_BYTES = 225_000  # about 90,000 tokens
MAX_VAL_DOCUMENT_BYTES = 64_000  # a larger file would dominate the small validation split
MIN_CHARACTERS = 4_000_000  # that Python's sources must have
EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
EXCLUDED_FOLDERS |= {"__pycache__", "pydoc_data"}  # pydoc_data is one generated file of 0.5 MB

# There is no time limit, so that a run can be repeated exactly. The model is not compiled, because
# compiling would take longer than it saves.
DEFAULT_SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that keep cores busy while they wait slow down steps
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
    "MATRIX_LR": "0.01",  # the defaults are for batches that are 256 times as large
    "SCALAR_LR": "0.01",
    "TIED_EMBED_LR": "0.01",
    "MAX_WALLCLOCK_SECONDS": "0",
    "VAL_LOSS_EVERY": "125",
    "VAL_BATCH_SIZE": "16384",
    "TRAIN_LOG_EVERY": "50",
    "TORCH_COMPILE": "0",
}


# Lines of train_gpt.py that say little on a CPU, or that print_result says in words. They are left
# to the log file. If there is a GPU, some of them have other values and are printed.
LOG_ONLY = re.compile(
    r"(world_size:1 |sdp_backends:|attention_mode:|tie_embeddings:True |seed:|train_batch_tokens:"
    r"|train_io:.*copy_stream:False .*gpu_prefetch:0|val_io:.*copy_stream:False .*gpu_prefetch:0"
    r"|val_bpb:enabled |val_stage_time_ms:|timing_train_loop_ms:|input_wait total:"
    r"|peak memory allocated: 0 MiB|Serialized model|Code size: |Total submission size"
    r"|final_int8_zlib_roundtrip_exact )"
)
LEGEND = """\
how to read the lines below ({log} contains more of them):
  val_loss, val_bpb    the score on validation text, in nats per token and in bits per byte
  train_loss           the loss of one batch, which differs much between batches
  mean_loss            the mean of train_loss since the line before
  tok_s, eta           tokens per second, and the seconds that are left without the validations
  input_wait           which part of the time training has waited for data
  data_crc             a checksum of the tokens of the batch"""
PROMPT = "def "  # of the sample, after training on Python's sources
# A token of a validation takes about this part of the time of a training token.
VALIDATION_COST = 0.45


def read_sources(library: Path) -> dict[str, str]:
    """Return {text: path in the library} of the source files of Python's standard library.

    If several files have the same text, the first path is used. Empty files and the files in
    EXCLUDED_FOLDERS are left out.
    """
    names: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if text.strip() and not EXCLUDED_FOLDERS & set(name.parts):
            names.setdefault(text, name.as_posix())
    return names


def split_documents(names: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return (validation documents, training documents), each shuffled.

    `names` is the result of read_sources. Raises ToolError if there is too little text.
    """
    total = sum(map(len, names))
    if total < MIN_CHARACTERS:
        raise cli.ToolError(
            f"{sys.executable}: its standard library has {total:,} characters of source files, but "
            f"at least {MIN_CHARACTERS:,} are needed; use a Python installation with its sources"
        )
    # The order depends only on the names: a file that is added or removed does not move another
    # file to the other split.
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


def prepare_data_set(library: Path) -> tokenize_docs.DataSet:
    """Make the data set of Python's sources unless it exists.

    Raises ToolError if a data set of the same name exists that quickstart.py did not make.
    """
    data_set = tokenize_docs.DataSet(
        DATASETS / f"quickstart_sp{VOCAB_SIZE}",
        dataset.DATA / "tokenizers" / f"quickstart_{VOCAB_SIZE}_bpe.model",
    )
    stamp_path = DATASETS / "quickstart.json"
    stamp = json.dumps({"python": sys.version, "version": DATA_VERSION}) + "\n"
    documents = DATASETS / "quickstart.jsonl"
    # Another quickstart may be making the same data set: wait until it is done.
    with dataset.locked(DATASETS, wait=True):
        exists = data_set.tokenizer.is_file() and list(data_set.folder.glob("fineweb_train_*.bin"))
        if exists and stamp_path.is_file() and stamp_path.read_text("utf-8") == stamp:
            return data_set
        export = dataset.read_export(data_set.folder) or {}
        inputs = export.get("settings", {}).get("inputs", [])
        made_by_quickstart = [Path(name).name for name, *_ in inputs] == [documents.name]
        if not made_by_quickstart and (
            data_set.tokenizer.exists() or list(data_set.folder.glob("*.bin"))
        ):
            raise cli.ToolError(
                f"{data_set.folder}: was not made by quickstart.py; move it and "
                f"{data_set.tokenizer} away, or set DATA_PATH to train on it"
            )
        print("making the data set, which takes about ten seconds", flush=True)
        stamp_path.unlink(missing_ok=True)
        shutil.rmtree(data_set.folder, ignore_errors=True)
        data_set.tokenizer.unlink(missing_ok=True)
        val, train = split_documents(read_sources(library))
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in [*val, *train]]
        dataset.write_atomic(documents, *lines)
        arguments = [str(documents), "--name", "quickstart", "--num-val-docs", str(len(val))]
        arguments += ["--vocab-size", str(VOCAB_SIZE), "--shard-tokens", "1000000"]
        tokenize_docs.make_data_set(tokenize_docs.parse_arguments(arguments))
        dataset.write_atomic(stamp_path, stamp.encode())
    return data_set


def find_data_settings() -> dict[str, str]:
    """Return DATA_PATH, TOKENIZER_PATH and VOCAB_SIZE for train_gpt.py.

    If the environment has no DATA_PATH, they are those of the data set of Python's sources, which
    is made unless it exists. Raises ToolError if DATA_PATH is not a data set, or if its tokenizer
    is not found.
    """
    data_path = os.environ.get("DATA_PATH")
    if data_path is None:
        data_set = prepare_data_set(Path(sysconfig.get_path("stdlib")))
        return {
            "DATA_PATH": str(data_set.folder),
            "TOKENIZER_PATH": str(data_set.tokenizer),
            "VOCAB_SIZE": str(VOCAB_SIZE),
        }
    check_data_path(data_path)
    recorded = dataset.find_recorded_tokenizer(Path(data_path))
    tokenizer = os.environ.get("TOKENIZER_PATH", str(recorded[1]) if recorded else "")
    if not tokenizer:
        raise cli.ToolError(
            f"DATA_PATH={data_path}: contains no tokenizer.sha256; "
            "set TOKENIZER_PATH to the tokenizer that made the shards"
        )
    if "TOKENIZER_PATH" not in os.environ and not os.path.lexists(tokenizer):
        raise cli.ToolError(
            f"DATA_PATH={data_path}: the tokenizer that made the shards is not at {tokenizer}; "
            "set TOKENIZER_PATH to where it is"
        )
    size = tokenize_docs.Tokenizer(Path(tokenizer)).vocab_size
    return {"DATA_PATH": data_path, "TOKENIZER_PATH": tokenizer, "VOCAB_SIZE": str(size)}


def check_data_path(data_path: str) -> None:
    """Raise ToolError unless DATA_PATH is a folder that has shards or is about to have them."""
    folder = Path(data_path)
    if data_path.endswith(".bin") and folder.is_file():
        raise cli.ToolError(
            f"DATA_PATH={data_path}: is a shard; set the folder of the shard: "
            f"DATA_PATH={folder.parent}"
        )
    if list(folder.glob("fineweb_*.bin")) or (folder / ".producing").exists():
        return
    if inside := sorted(folder.glob("*/fineweb_train_*.bin")):
        raise cli.ToolError(
            f"DATA_PATH={data_path}: contains folders with shards, but no shards; "
            f"set one of the folders, such as {inside[0].parent}"
        )
    tool = cli.format_command("data/tokenize_docs.py")
    text = shlex.quote(data_path) if data_path and folder.exists() else "FILE_OR_FOLDER"
    fault = "is not a folder with fineweb_*.bin"
    if not os.path.lexists(folder):
        fault = "there is no such folder"
    raise cli.ToolError(
        f"DATA_PATH={data_path}: {fault}; "
        f"{tool} {text} --name mine makes shards of text, and prints how to train on them"
    )


def training_environment(ranks: int, data: dict[str, str]) -> dict[str, str]:
    """Return the environment of train_gpt.py for `ranks` processes.

    `data` is the result of find_data_settings. Variables that the user has set take precedence.
    """
    threads = min(2, len(os.sched_getaffinity(0))) // ranks
    settings = {**DEFAULT_SETTINGS, **data, "OMP_NUM_THREADS": str(max(1, threads))}
    # With RESUME, train_gpt.py needs the RUN_ID of the run that is resumed.
    if "RUN_ID" not in os.environ and "RESUME" not in os.environ:
        settings["RUN_ID"] = reserve_run_id()
    environment = {**settings, **os.environ}
    steps = environment["ITERATIONS"]
    if steps.isdecimal():
        environment.setdefault("WARMDOWN_ITERS", str(int(steps) * 4 // 5))
    return environment


def reserve_run_id() -> str:
    """Return the first of quickstart, quickstart-2, ... that no run uses.

    The empty file logs/.<run id> reserves it, so that two processes never get the same one.
    """
    Path("logs").mkdir(exist_ok=True)
    run_id = "quickstart"
    for number in itertools.count(2):
        if not (Path("logs", f"{run_id}.txt").exists() or Path("checkpoints", run_id).exists()):
            with suppress(FileExistsError):
                Path("logs", f".{run_id}").touch(exist_ok=False)
                break
        run_id = f"quickstart-{number}"
    return run_id


def run_training(script: Path, ranks: int, env: dict[str, str], settings: list[str]) -> int:
    """Run train_gpt.py, or an edited copy of it, and return its exit code.

    `settings` are words like NAME=value. They are also in `env`; the script checks their names.
    Lines that LOG_ONLY matches are not printed.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(script), *settings]
    # PYTHONUNBUFFERED: an edited copy may print without flush, and its lines are wanted at once.
    unbuffered = {**env, "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(command, env=unbuffered, stdout=subprocess.PIPE)
    # A terminal sends Ctrl-C to the training process, too. That process then writes a checkpoint
    # and says how to resume the run, so this process only has to wait.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    print_lines(child)
    code = child.wait()
    was_killed = code < 0  # by signal number -code
    return 128 - code if was_killed else code


def print_lines(child: subprocess.Popen[bytes]) -> None:
    """Print what a process writes until it ends, except lines that LOG_ONLY matches."""
    descriptor = child.stdout.fileno()
    text = b""
    is_open = True
    while is_open:
        is_ready = bool(select.select([descriptor], [], [], 1.0)[0])
        if is_ready:
            data = os.read(descriptor, 1 << 16)
            is_open = data != b""
            text += data
        else:
            # A process that the script has started may keep the pipe open after the script's end.
            is_open = child.poll() is None
        *lines, text = text.split(b"\n") if is_open else [*text.splitlines(), b""]
        for line in lines:
            if not LOG_ONLY.match(line.decode("utf-8", "replace")):
                with suppress(OSError):  # if the console is closed, the text is lost, not the run
                    sys.stdout.buffer.write(line + b"\n")
                    sys.stdout.buffer.flush()


def read_events(log: Path) -> dict[str, dict[str, Any]]:
    """Return the last event of each kind in a run's .jsonl log, by the event's name.

    "before" is the validation before the first step.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in log.read_text("utf-8").splitlines():
        event = json.loads(line)
        found[event["event"]] = event
        if event["event"] == "validation" and event["step"] == 0:
            found["before"] = event
    return found


def choose_prompt(environment: dict[str, str]) -> str:
    """Return the beginning of a text that suits the data: of code, or of a validation document."""
    folder, tokenizer = Path(environment["DATA_PATH"]), Path(environment["TOKENIZER_PATH"])
    if folder == DATASETS / f"quickstart_sp{VOCAB_SIZE}":
        return PROMPT
    paths = dataset.shard_paths(folder, "val")
    if not paths:
        return ""
    with open(paths[0], "rb") as file:
        file.seek(dataset.HEADER_BYTES)
        tokens = array("H", file.read(2 * 20_000))
    codec = tokenize_docs.Tokenizer(tokenizer)
    prompt = ""
    for number, token in enumerate(tokens):
        if token == codec.bos_id:
            text = codec.decode(tokens[number + 1 : number + 40].tolist())
            words = text.strip().partition("\n")[0].split()[:4]
            prompt = max(prompt, " ".join(words)[:40].rstrip("\ufffd"), key=len)
    return prompt


def print_sample(log: Path, prompt: str) -> None:
    """Print a few lines of text with which the trained model continues a prompt."""
    command = [sys.executable, str(dataset.ROOT / "tools" / "sample.py"), str(log)]
    command += ["--prompt", prompt] if prompt else []
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        print(f"no sample could be made: {cli.one_line(done.stderr)}", file=sys.stderr)
        return
    begins = f" that begins with {prompt!r}" if prompt else ""
    print(
        f"a sample of the model's text{begins} "
        "(a small model learns spelling and form, but no meaning):"
    )
    for line in done.stdout.rstrip().splitlines()[:12]:
        print(f"    {line[:96]}")


def print_result(log: Path, longer_command: str) -> None:
    """Print bits per byte before and after training, the artifact's size, and what to try next."""
    found = read_events(log)
    after = found["score"]["val_bpb"]
    before = found.get("before", {}).get("val_bpb")
    first = f"{before:.4f} before training, " if before else ""
    artifact_bytes = found["artifact"]["artifact_bytes"]
    with_script_bytes = artifact_bytes + found["artifact"]["code_bytes"]
    print(
        f"bits per byte: {first}{after:.4f} after training\n"
        "lower is better; the challenge's baseline scores 1.2244 on FineWeb "
        "(10 minutes on 8 H100s)\n"
        f"artifact (the compressed model): {artifact_bytes:,} bytes, and {with_script_bytes:,} "
        "bytes with the script; the challenge's size limit is 16,000,000 bytes\n"
        f"log: {log}\nto train longer: {longer_command}",
        flush=True,
    )


def quickstart_command(settings: dict[str, str], script: Path, ranks: int) -> str:
    """Return the command of this program with settings in front, ready to be pasted."""
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    words.append(cli.format_command("data/quickstart.py"))
    if script != dataset.ROOT / "train_gpt.py":
        words.append(f"--script {shlex.quote(str(script))}")
    if ranks > 1:
        words.append(f"--ranks {ranks}")
    return " ".join(words)


def describe_validations(environment: dict[str, str]) -> str:
    """Return how many validations there will be, and how long they will take, in training steps.

    It is only "eta does not include validations" if this is not known: if validation shards are
    still being made, or if a setting has a wrong value, which train_gpt.py will report.
    """
    text = "eta does not include validations"
    names = ("ITERATIONS", "TRAIN_BATCH_TOKENS", "TRAIN_SEQ_LEN", "VAL_LOSS_EVERY", "VAL_TOKENS")
    words = [environment.get(name, "0") for name in names]
    paths = dataset.shard_paths(Path(environment["DATA_PATH"]), "val")
    is_growing = Path(environment["DATA_PATH"], ".producing").exists()
    if is_growing or not paths or not all(word.isdecimal() for word in words):
        return text
    steps, batch, row, every, limit = map(int, words)
    try:
        tokens = sum(map(dataset.count_shard_tokens, paths))
    except cli.ToolError:
        return text  # train_gpt.py reports the shard
    targets = max(0, min(tokens, limit or tokens) - 1)
    targets -= targets % max(1, row)  # only whole sequences are scored
    each = round(targets * VALIDATION_COST / max(1, batch))
    count = len({*range(0, steps, every), steps}) if every else 1
    text += (
        f": there are {count + 1} of them, the last one of the compressed model; each scores "
        f"{targets:,} of {tokens:,} tokens and takes about as long as {each:,} steps"
    )
    if each * (count + 1) > steps:
        quarter = steps / 4 * batch / VALIDATION_COST / (count + 1)  # of the time of the training
        part = max(1000, round(quarter, -3), row + 1)
        text += f"; VAL_TOKENS={part:.0f} would save most of that time, but score only a part"
    return text


def train(script: Path, ranks: int, settings: list[str]) -> int:
    """Train, print the result or how to continue, and return the exit code of the training.

    `settings` are words like NAME=value from the command line.
    """
    environment = training_environment(ranks, find_data_settings())
    print(
        f"training a small model for {environment['ITERATIONS']} steps on "
        f"{environment['DATA_PATH']}; with the default settings, 500 steps take about 90 seconds "
        "on two free cores",
        flush=True,
    )
    print(describe_validations(environment), flush=True)
    print(LEGEND.format(log=f"logs/{environment.get('RUN_ID', '<RUN_ID>')}.txt"), flush=True)
    code = run_training(script, ranks, environment, settings)
    run_id = environment.get("RUN_ID", "")
    log = Path("logs", f"{run_id}.jsonl")
    found = read_events(log) if log.is_file() else {}
    # The commands below repeat the user's settings: variables that the script has in its config.
    names = {"OMP_NUM_THREADS", *map(str.upper, found.get("config", {}))} - {"RUN_ID", "RESUME"}
    user_settings = {name: value for name, value in os.environ.items() if name in names}
    if code == 0 and not found:
        raise cli.ToolError(
            f"--script {script}: wrote no {log}; give an edited copy of train_gpt.py"
        )
    if code == 0:
        print_sample(log, choose_prompt(environment))
        longer = {**user_settings, "ITERATIONS": "2000"}
        print_result(log, quickstart_command(longer, script, ranks))
    elif found.get("end", {}).get("status") == "interrupted":
        resumed = {**user_settings, "RUN_ID": run_id, "RESUME": "auto"}
        print(f"to continue: {quickstart_command(resumed, script, ranks)}", file=sys.stderr)
    return code


def main() -> int:
    parser = cli.Parser(description=__doc__)
    add, script = parser.add_argument, dataset.ROOT / "train_gpt.py"
    text = "number of processes (default: 1)"
    add("--ranks", type=int, default=1, choices=(1, 2, 4, 8), help=text)
    text = "an edited copy of train_gpt.py (default: train_gpt.py)"
    add("--script", type=Path, default=script, help=text)
    text = "make the data, print how to train, and stop"
    add("--prepare-only", action="store_true", help=text)
    add("settings", nargs="*", metavar="NAME=value", help="settings of train_gpt.py")
    options = parser.parse_args()
    for word in options.settings:
        if not re.fullmatch(r"\w+=.*", word, re.DOTALL):
            parser.error(f"{word}: is not a setting; settings have the form NAME=value")
    os.environ |= dict(word.split("=", 1) for word in options.settings)
    # If settings come from a file with Windows line ends, each value ends with a carriage return.
    os.environ |= {name: text.rstrip("\r") for name, text in os.environ.items()}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command = f"{cli.format_command('data/quickstart.py')} --ranks {os.environ['WORLD_SIZE']}"
        raise cli.ToolError(f"quickstart.py starts torchrun itself; run {command}")
    if options.prepare_only:
        data = find_data_settings()
        folder, tokenizer = Path(data["DATA_PATH"]), Path(data["TOKENIZER_PATH"])
        print(dataset.training_commands(folder, tokenizer, data["VOCAB_SIZE"]))
        return 0
    if not options.script.is_file():
        fault = "is not a file" if options.script.exists() else "there is no such file"
        raise cli.ToolError(
            f"--script {options.script}: {fault}; give an edited copy of train_gpt.py"
        )
    return train(options.script, options.ranks, options.settings)


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again")
