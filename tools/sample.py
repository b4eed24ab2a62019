"""Print text that a trained model writes.

    python3 tools/sample.py                                 the newest run in logs/
    python3 tools/sample.py logs/quickstart.txt --prompt "def " --temperature 1.0 --seed 7

The model is the artifact of the run, logs/<RUN_ID>.int8.ptz. The script that builds the model is
the text at the beginning of the log. It is run as Python: use only logs that you trust.

Each token is drawn from the model's distribution over the 50 most likely tokens. --temperature 0
always takes the most likely token; a higher temperature takes unlikely tokens more often. The same
command with the same --seed prints the same text. The text ends after --length tokens, or when the
model ends the document. The model sees the last TRAIN_SEQ_LEN tokens.
"""

# This module builds on runs.py, which reads the logs, and on the script in the log.

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
from cli import Parser, ToolError, number, printable, run
from runs import Run, read_file, read_log

TOP_K = 50
MAX_BYTES = 1_000_000_000  # size limit of an artifact or a tokenizer


def find_run(log: Path | None) -> Run:
    """Return the run of a log. For a folder, or without `log` for logs/, take the newest run."""
    log = log or Path("logs")
    if log.is_dir():
        log = max(log.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=log)
    if log.is_dir():
        words = f"the folder {log.resolve()} contains no log (.jsonl)"
        raise ToolError(f"{words}; train first, or give the log of a run, wherever it is")
    for path in (log.with_suffix(suffix) for suffix in (".txt", ".jsonl")):
        if log.suffix not in (".txt", ".jsonl", ".log") or not path.is_file():
            needed = ".txt and the .jsonl of a run of train_gpt.py, with its .int8.ptz beside them"
            raise ToolError(
                f"{log} is no log with {path.name} beside it; sample.py needs the {needed}"
            )
    text = read_log(log.with_suffix(".txt"), events=False)  # the text log contains the script
    known = read_log(log.with_suffix(".jsonl"))
    if not (known.runs and text.runs and text.runs[0].source):
        why = [*known.problems, *text.problems, "the script in it is incomplete"][0]
        raise ToolError(f"{log}: {why}; give the .txt of a run of train_gpt.py beside its .jsonl")
    known.runs[0].source, known.runs[0].path = text.runs[0].source, text.runs[0].path
    return known.runs[0]


def load_model(log: Run) -> tuple[Any, Any]:
    """Return (model, config) of a run. The run's own script builds the model; it may be packed."""
    import torch

    torch.set_num_threads(1)  # on a busy machine, threads would wait for each other
    path = Path(log.path).with_suffix(".int8.ptz")
    data = read_file(path, MAX_BYTES)
    if log.model_bytes not in (None, len(data)):
        words = f"has {len(data):,} bytes, but the run's artifact has {log.model_bytes:,}"
        raise ToolError(f"{path} {words}; put the artifact of this run beside its log")
    script = types.ModuleType("sampled_script")
    script.__file__ = log.path
    sys.modules[script.__name__] = script  # dataclasses look up their module there
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        exec(compile(log.source, log.path, "exec"), script.__dict__)
        names = {field.name for field in dataclasses.fields(script.Config)} & log.config.keys()
        config = script.Config(**{name: log.config[name] for name in names})
        model = script.GPT(config, torch.bfloat16 if device == "cuda" else torch.float32)
        model.load_state_dict(script.unpack(data, model.state_dict()))
    except (Exception, SystemExit) as error:  # the script or a damaged file can raise anything
        raise ToolError(
            f"{log.path}: its script cannot build the model from {path}: {error!r}"
        ) from error
    return model.to(device).eval(), config


def load_codec(log: Run, path: Path) -> tuple[Callable, Callable, int]:
    """Return the functions encode and decode, and the id of BOS, of the run's tokenizer, which is a
    SentencePiece .model or a byte tokenizer in .json."""
    path = Path(os.environ.get("TOKENIZER_PATH", path))
    data = read_file(path, MAX_BYTES)
    if log.fingerprint.get("tokenizer") not in (None, hashlib.sha256(data).hexdigest()):
        raise ToolError(
            f"{path} is not the tokenizer of the run; set TOKENIZER_PATH to that tokenizer"
        )
    try:
        if path.suffix != ".json":
            import sentencepiece

            pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
            return pieces.encode, pieces.decode, pieces.bos_id()
        form = json.loads(data)
        offset = int(form["offset"] if "offset" in form else form["config"]["byte_offset"])
    except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
        raise ToolError(
            f"{path} is not a usable tokenizer; set TOKENIZER_PATH to the run's tokenizer"
        ) from error

    def decode(ids: list[int]) -> str:
        known = bytes(i - offset for i in ids if offset <= i < offset + 256)
        return known.decode("utf-8", "replace")

    def encode(text: str) -> list[int]:
        return [byte + offset for byte in text.encode()]

    return encode, decode, 1  # the id 1 is BOS


def generate(model: Any, tokens: list[int], config: Any, options: argparse.Namespace) -> list[int]:
    """Return the tokens, followed by those that the model writes until it begins a new document or
    has written options.length tokens."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.length):
        seen = torch.tensor([tokens[-config.train_seq_len :]], device=device)
        with torch.inference_mode():
            best = model.logits(seen)[0, -1].float().cpu().topk(min(TOP_K, config.vocab_size))
        probabilities = (best.values / max(options.temperature, 1e-6)).softmax(-1)
        token = int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])
        if token == tokens[0]:
            break
        tokens = [*tokens, token]
    return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "log",
        type=Path,
        nargs="?",
        help="logs/<RUN_ID>.txt or .jsonl (default: the newest run in logs/)",
    )
    add("--prompt", default="", help="text to continue (default: a new document)")
    add(
        "--length",
        type=number(int, 1),
        default=200,
        metavar="N",
        help="number of tokens (default: 200)",
    )
    add(
        "--temperature",
        type=number(float, 0),
        default=0.8,
        metavar="T",
        help="temperature (default: 0.8)",
    )
    add(
        "--seed", type=number(int, 0), default=1337, metavar="N", help="random seed (default: 1337)"
    )
    options = parser.parse_args(arguments)
    remedy = "give a log, such as logs/<RUN_ID>.txt (a prompt is given with --prompt)"
    if options.log is None:
        remedy = (
            f"sample.py looked in {Path('logs').resolve()}, as no log was given; start it in the "
            "folder in which you trained, or give the log"
        )
    parser.require([options.log or Path("logs")], remedy)
    log = find_run(options.log)
    model, config = load_model(log)
    encode, decode, bos = load_codec(log, Path(config.tokenizer_path))
    tokens = generate(model, [bos, *encode(options.prompt)], config, options)
    result, path = log.result, Path(log.path)
    score = f"val_bpb {result.val_bpb:.4f}" if result else f"no score ({log.status})"
    print(f"run {path.stem}, {score}, {path.with_suffix('.int8.ptz')}", file=sys.stderr)
    text = decode(tokens[1:]).expandtabs()
    print("\n".join(map(printable, text.split("\n"))))  # a model may write control characters
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
