"""Print text that a trained model writes.

    python3 logs/sample.py --prompt "def "
    python3 logs/sample.py --prompt "Once" --length 400 --temperature 1.0 --seed 7
    python3 logs/sample.py --file checkpoints/mine/step_00000500.pt --temperature 0
    # a model of an edited script whose log is not here
    python3 logs/sample.py --script mine.py --log logs/mine.txt

--file is an artifact (default: final_model.int8.ptz) or a checkpoint. The run's log,
logs/<RUN_ID>.txt, begins with the text of the training script. That script builds the model, or
train_gpt.py does if there is no log. The script must have read_config, unpack and GPT with
logits(tokens). The settings are those of the checkpoint, or of the log's .jsonl. The text of a log
is run as Python: use only logs that you trust.

Each token is drawn from the model's distribution: --temperature 0 takes the most likely one, a
higher temperature takes unlikely ones more often, and --top-k K draws only among the K most likely
ones. The same command with the same --seed prints the same text. Text ends after --length tokens,
or when the model ends the document. The model sees the last TRAIN_SEQ_LEN tokens.
"""

import argparse
import hashlib
import json
import os
import re
import stat
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli import Parser, missing, number

ROOT = Path(__file__).resolve().parent.parent
try:
    import sentencepiece
    import torch
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {missing(error.name, f'-r {ROOT}/requirements.txt')}")

RULE = "\n" + "=" * 100 + "\n"
NEEDED = "read_config", "unpack", "GPT"
BYTE_BOS = 1
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class SampleError(Exception):
    """What is wrong, in one line, with the remedy."""


def one_line(text: object) -> str:
    return printable(" ".join(str(text).split()))


def printable(text: str) -> str:
    """A model may write anything: control characters do not reach the terminal."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def read_file(path: Path) -> bytes:
    """The content of a regular file; a pipe or a device would be read without an end."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SampleError(f"{path}: not a regular file: name another one")
            return file.read()
    except OSError as error:
        raise SampleError(f"{path}: {error.strerror}: name another file") from error


# --- The run: its file, its log, its script ---


def events(log: Path) -> Iterator[dict[str, Any]]:
    """Those of a run's .jsonl; none where there is no such file."""
    path = log.with_suffix(".jsonl")
    for line in read_file(path).splitlines() if path.is_file() else []:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # the last one, if the run was killed
            continue
        if isinstance(event, dict):
            yield event


def log_of(path: Path) -> Path | None:
    """The log of the run that wrote a file: of a checkpoint by its folder, of an artifact by its
    size, the newest one; None if there is none here.
    """
    if path.suffix == ".pt":
        log = Path("logs", f"{path.absolute().parent.name}.txt")
        return log if log.is_file() else None
    logs = sorted(Path("logs").glob("*.jsonl"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in (path.with_suffix(".txt") for path in logs):
        if path.stat().st_size in artifact_sizes(log):
            return log
    return None


def artifact_sizes(log: Path) -> list[int]:
    """Bytes of the artifacts that a run has written."""
    return [event["artifact_bytes"] for event in events(log) if "artifact_bytes" in event]


def load_script(path: Path | None, log: Path | None) -> types.ModuleType:
    """The script as a module: the one named, or that of the log, or the repository's."""
    text = ""
    if path is None and log and log.is_file():
        text, rule, _ = read_file(log).decode("utf-8", "replace").partition(RULE)
        text = text if rule and "class GPT" in text else ""
    if not text:
        path = path or ROOT / "train_gpt.py"
        text = read_file(path).decode("utf-8", "replace")
    name = str(path or log)
    module = types.ModuleType("sampled_script")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses look for it there
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise SampleError(f"{name}: cannot be run: {type(error).__name__}: {error}") from error
    lacking = [word for word in NEEDED if not hasattr(module, word)]
    if not lacking and not hasattr(module.GPT, "logits"):
        lacking = ["GPT.logits"]
    if lacking:
        raise SampleError(f"{name}: has no {lacking[0]}: name another script with --script")
    return module


def config_of(script: types.ModuleType, settings: dict[str, Any]) -> Any:
    """The script's Config from settings by name, as text or as values."""
    flags = {True: "1", False: "0", "True": "1", "False": "0", None: ""}
    texts = {
        name.upper(): flags[value] if isinstance(value, (bool, str)) and value in flags else value
        for name, value in settings.items()
        if value is not None
    }
    config, faults, *_ = script.read_config({name: str(value) for name, value in texts.items()})
    if faults:
        raise SampleError(f"the settings are not those of this script: {faults[0]}: use --script")
    return config


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What the trainer saved. Nothing in it is executed."""
    read_file(path)
    try:
        state = torch.load(path, "cpu", weights_only=True)
        if "settings" not in state:  # final_model.pt
            raise ValueError("weights alone: --file final_model.int8.ptz has them, too")
        state["settings"].items()
        weights = state["model"] if "model" in state else state["held"]["model"]
        return {"settings": state["settings"], "weights": weights}
    except Exception as error:  # whatever a bad file raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = kind + one_line(error)[:200]
        raise SampleError(f"{path}: not a checkpoint ({reason}): name another file") from error


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """(model, config) of the file."""
    path, log = options.file, options.log or log_of(options.file)
    saved = load_checkpoint(path) if path.suffix == ".pt" else None
    sizes = artifact_sizes(options.log) if options.log and not saved else []
    if sizes and path.stat().st_size not in sizes:
        size = path.stat().st_size
        raise SampleError(
            f"{path}: {size} bytes, {options.log} wrote {sizes[-1]}: name its own log"
        )
    settings = saved["settings"] if saved else None
    for event in events(log) if log and not saved else []:
        if event.get("event") == "config":
            settings = {name: value for name, value in event.items() if name not in ("event", "t")}
    if settings is None:
        raise SampleError(
            f"{path}: its run's log is not here: name it with --log logs/<RUN_ID>.txt"
        )
    script = load_script(options.script, log)
    config = config_of(script, settings)
    cuda = torch.cuda.is_available()
    model = script.GPT(config, torch.bfloat16 if cuda else torch.float32)
    try:
        weights = saved["weights"] if saved else script.unpack(read_file(path), model.state_dict())
        model.load_state_dict(weights)
    except SampleError:
        raise
    except Exception as error:  # of another model, or damaged
        raise SampleError(
            f"{path}: does not fit the script: {error}: name another --script"
        ) from error
    return model.to("cuda" if cuda else "cpu").eval(), config


# --- Text and tokens ---


class Tokenizer:
    """A SentencePiece .model, or a byte tokenizer's .json."""

    def __init__(self, path: Path) -> None:
        data = read_file(path)
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.model, self.offset, self.bos = None, 0, BYTE_BOS
        try:
            if path.suffix == ".json":
                form = json.loads(data)
                self.offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
            else:
                self.model = sentencepiece.SentencePieceProcessor(model_proto=data)
                self.bos = self.model.bos_id()
            self.size = self.model.get_piece_size() if self.model else self.offset + 256
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise SampleError(f"{path}: not a tokenizer: name one with --tokenizer") from error

    def encode(self, text: str) -> list[int]:
        """BOS and the tokens of a document that begins so."""
        if self.model:
            return [self.bos, *self.model.encode(text)]
        return [self.bos, *(byte + self.offset for byte in text.encode("utf-8", "replace"))]

    def decode(self, ids: list[int]) -> str:
        if self.model:
            return self.model.decode(ids)
        data = bytes(i - self.offset for i in ids if self.offset <= i < self.offset + 256)
        return data.decode("utf-8", "replace")


def where_it_ran(path: Path) -> Path:
    """A path of a run's settings: runs are started here, or in the repository's folder."""
    return path if path.exists() else ROOT / path


def tokenizer_of(config: Any, named: Path | None) -> Tokenizer:
    """The run's tokenizer, or the one named. SampleError for one that is not the model's."""
    path = named or where_it_ran(Path(config.tokenizer_path))
    tokenizer = Tokenizer(path)
    recorded = where_it_ran(Path(config.data_path)) / "tokenizer.sha256"
    fault = ""
    if tokenizer.size != config.vocab_size:
        fault = f"it has {tokenizer.size} tokens, the model {config.vocab_size}"
    elif recorded.is_file() and tokenizer.sha256 not in recorded.read_text(errors="replace"):
        fault = f"{recorded} names another tokenizer"
    if fault:
        raise SampleError(f"{path}: {fault}: name the model's own with --tokenizer")
    return tokenizer


# --- Drawing ---


def draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token, from its logits (vocabulary,)."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.inference_mode()
def write(
    model: Any, tokens: list[int], row: int, bos: int, options: argparse.Namespace
) -> list[int]:
    """The tokens with those that the model writes behind them, until it begins a new document."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(options.seed)
    tokens = list(tokens)
    for _ in range(options.length):
        seen = torch.tensor([tokens[-row:]], device=device)
        logits = model.logits(seen)[0, -1].float().cpu()
        token = draw(logits, options.temperature, options.top_k, generator)
        if token == bos:
            break
        tokens.append(token)
    return tokens


# --- Command line ---


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompt", default="", help="text to continue (default: a new document)")
    artifact = Path("final_model.int8.ptz")
    add("--file", type=Path, default=artifact, help="artifact or checkpoint (default: %(default)s)")
    add("--log", type=Path, help="the run's log (default: found in logs/)")
    add("--script", type=Path, help="script that trained the model (default: that of the log)")
    add("--tokenizer", type=Path, help="tokenizer of the model (default: that of the run)")
    length = "tokens to write (default: 200)"
    add("--length", type=number(int, 1), default=200, metavar="N", help=length)
    heat = "0: the most likely token (default: 0.8)"
    add("--temperature", type=number(float, 0), default=0.8, metavar="T", help=heat)
    top = "draw among the K most likely tokens; 0: among all (default: 50)"
    add("--top-k", type=number(int, 0), default=50, metavar="K", help=top)
    seed = "seed of the random draws (default: 1337)"
    add("--seed", type=number(int, 0), default=1337, metavar="N", help=seed)
    return parser.parse_args(arguments)


def check_files(options: argparse.Namespace) -> None:
    """SampleError for a --file or a --log that is none; a log may be named by its .jsonl."""
    path, log = options.file, options.log
    if path.is_dir():
        inside = sorted(path.glob("step_*.pt")) or ["an artifact or a checkpoint"]
        raise SampleError(f"{path}: a folder: name a file with --file, such as {inside[-1]}")
    if path.suffix in (".txt", ".jsonl"):
        raise SampleError(f"{path}: a log, no model: name it with --log, and its model with --file")
    if not path.exists():
        raise SampleError(f"{path}: no such file: train first, or name one with --file")
    if log:
        options.log = log.with_suffix(".txt") if log.suffix == ".jsonl" else log
        if not (options.log.is_file() or options.log.with_suffix(".jsonl").is_file()):
            raise SampleError(f"{log}: no such log: name logs/<RUN_ID>.txt")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        check_files(options)
        model, config = load_model(options)
        tokenizer = tokenizer_of(config, options.tokenizer)
        tokens = tokenizer.encode(options.prompt)
        tokens = write(model, tokens, config.train_seq_len, tokenizer.bos, options)
    except SampleError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not options.log and options.file.suffix != ".pt":  # each run replaces the artifact
        print(f"{options.file}: the model of {log_of(options.file)}", file=sys.stderr)
    text = printable(tokenizer.decode(tokens[1:]))
    sys.stdout.reconfigure(errors="backslashreplace")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
