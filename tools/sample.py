"""Print text that a trained model writes.

    python3 tools/sample.py                                 the newest run in logs/
    python3 tools/sample.py logs/quickstart.txt --prompt "def " --temperature 1.0 --seed 7

The model is the run's artifact, logs/<RUN_ID>.int8.ptz. The script that builds it is the text at
the beginning of the log, which is run as Python: use only logs that you trust.

Each token is drawn from the model's distribution among the 50 most likely ones: --temperature 0
takes the most likely one, a higher temperature takes unlikely ones more often. The same command
with the same --seed prints the same text. Text ends after --length tokens, or when the model ends
the document. The model sees the last TRAIN_SEQ_LEN tokens.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
from cli import Parser, ToolError, number, plain, run
from runs import Run, read_file, read_log

TOP_K = 50
MAX_BYTES = 1_000_000_000  # of an artifact or a tokenizer


def run_of(log: Path | None) -> Run:
    """What the log says, or the newest one in a folder: logs/, if none is named."""
    log = log or Path("logs")
    if log.is_dir():
        log = max(log.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=log)
    if not log.is_file():
        raise ToolError(f"{log}: no such file: train first, or name a log; text needs --prompt")
    text = read_log(log.with_suffix(".txt"), events=False)  # has the script
    known = read_log(log.with_suffix(".jsonl"))
    if not (known.runs and text.runs and text.runs[0].source):
        why = [*known.problems, *text.problems, "its script's text is not whole"][0]
        raise ToolError(f"{log}: {why}: name the .txt of a run of train_gpt.py, with its .jsonl")
    known.runs[0].source, known.runs[0].path = text.runs[0].source, text.runs[0].path
    return known.runs[0]


def load(log: Run) -> tuple[Any, Any]:
    """(model, config) of a run, made by its own script, also if that is packed."""
    import torch

    torch.set_num_threads(1)  # on a busy machine threads would wait for each other
    path = Path(log.path).with_suffix(".int8.ptz")
    data = read_file(path, MAX_BYTES)
    script = types.ModuleType("sampled_script")
    script.__file__ = log.path
    sys.modules[script.__name__] = script  # dataclasses look for it there
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        exec(compile(log.source, log.path, "exec"), script.__dict__)
        names = {field.name for field in dataclasses.fields(script.Config)} & log.config.keys()
        config = script.Config(**{name: log.config[name] for name in names})
        model = script.GPT(config, torch.bfloat16 if device == "cuda" else torch.float32)
        model.load_state_dict(script.unpack(data, model.state_dict()))
    except (Exception, SystemExit) as error:  # whatever the script or a damaged file raises
        raise ToolError(f"{log.path}: its script does not build {path}: {error!r}") from error
    return model.to(device).eval(), config


def coder_of(log: Run, path: Path) -> tuple[Callable, Callable, int]:
    """encode, decode and BOS of the run's tokenizer: a SentencePiece .model or a byte .json."""
    path = Path(os.environ.get("TOKENIZER_PATH", path))
    data = read_file(path, MAX_BYTES)
    if log.made_of.get("tokenizer") not in (None, hashlib.sha256(data).hexdigest()):
        raise ToolError(f"{path}: not the run's tokenizer: set TOKENIZER_PATH")
    try:
        if path.suffix != ".json":
            import sentencepiece

            pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
            return pieces.encode, pieces.decode, pieces.bos_id()
        form = json.loads(data)
        offset = int(form["offset"] if "offset" in form else form["config"]["byte_offset"])
    except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
        raise ToolError(f"{path}: no usable tokenizer: set TOKENIZER_PATH") from error

    def decode(ids: list[int]) -> str:
        known = bytes(i - offset for i in ids if offset <= i < offset + 256)
        return known.decode("utf-8", "replace")

    return lambda text: [byte + offset for byte in text.encode()], decode, 1  # its BOS


def write(model: Any, tokens: list[int], config: Any, options: argparse.Namespace) -> list[int]:
    """The tokens with those that the model writes after them, until it begins a new document."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.length):
        seen = torch.tensor([tokens[-config.train_seq_len :]], device=device)
        with torch.inference_mode():
            best = model.logits(seen)[0, -1].float().cpu().topk(min(TOP_K, config.vocab_size))
        chances = (best.values / max(options.temperature, 1e-6)).softmax(-1)
        token = int(best.indices[torch.multinomial(chances, 1, generator=generator)])
        if token == tokens[0]:
            break
        tokens = [*tokens, token]
    return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("log", type=Path, nargs="?", help="logs/<RUN_ID>.txt or .jsonl (default: the newest one)")
    add("--prompt", default="", help="text to continue (default: a new document)")
    add("--length", type=number(int, 1), default=200, metavar="N", help="tokens (default: 200)")
    add("--temperature", type=number(float, 0), default=0.8, metavar="T", help="default: 0.8")
    add("--seed", type=number(int, 0), default=1337, metavar="N", help="default: 1337")
    options = parser.parse_args(arguments)
    log = run_of(options.log)
    model, config = load(log)
    encode, decode, bos = coder_of(log, Path(config.tokenizer_path))
    tokens = write(model, [bos, *encode(options.prompt)], config, options)
    result, path = log.result, Path(log.path)
    score = f"val_bpb {result.val_bpb:.4f}" if result else f"no score ({log.status})"
    print(f"run {path.stem}, {score}, {path.with_suffix('.int8.ptz')}", file=sys.stderr)
    text = decode(tokens[1:]).expandtabs()
    print("\n".join(map(plain, text.split("\n"))))  # a model may write anything
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
