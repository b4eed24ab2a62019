"""What the tests of the record StepTime share: its script as a module, a small model."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "records/track_non_record_16mb/2026-11-21_StepTime"
SCRIPT = RECORD / "train_gpt.py"
SMALL = {
    "NUM_LAYERS": 2,
    "MODEL_DIM": 32,
    "NUM_HEADS": 2,
    "NUM_KV_HEADS": 1,
    "VOCAB_SIZE": 300,
    "TRAIN_SEQ_LEN": 32,
    "TRAIN_BATCH_TOKENS": 2048,
    "VAL_BATCH_SIZE": 4096,
    "GRAD_ACCUM_STEPS": 1,
    "WARMUP_STEPS": 0,
    "MAX_WALLCLOCK_SECONDS": 0,
    "ITERATIONS": 10,
    "WARMDOWN_ITERS": 5,
    "DEVICE": "cpu",
    "TORCH_COMPILE": 0,
}


def load_record(name: str = "steptime_record") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPT)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(text: str, word: str) -> list[float]:
    """The values of `word` in a log's lines, without those of the decoded artifact."""
    return [float(value) for value in re.findall(rf"^step:.* {word}:(\S+)", text, re.MULTILINE)]
