"""What the tests of the record StepTime share: its script as a module, and a small run of it."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "records/track_non_record_16mb/2026-11-21_StepTime"
SCRIPT = RECORD / "train_gpt.py"
SMALL = {
    "NUM_LAYERS": 3,
    "MODEL_DIM": 32,
    "NUM_HEADS": 2,
    "NUM_KV_HEADS": 1,
    "TRAIN_SEQ_LEN": 16,
    "TRAIN_BATCH_TOKENS": 512,
    "GRAD_ACCUM_STEPS": 2,
    "VAL_BATCH_SIZE": 512,
    "WARMUP_STEPS": 1,
    "ITERATIONS": 4,
    "WARMDOWN_ITERS": 2,
    "MAX_WALLCLOCK_SECONDS": 0,
    "DEVICE": "cpu",
    "TORCH_COMPILE": 0,
}


@cache  # torch registers its operators once a process
def load_record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steptime_record", SCRIPT)
    module = sys.modules["steptime_record"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(**settings: Any) -> Any:
    """The record's Config of settings, as its script would read them."""
    config, faults, _ = load_record().read_config({k: str(v) for k, v in settings.items()})
    assert not faults, faults
    return config


def open_log() -> Any:
    """A log that writes no file: what was logged is in `lines`."""

    class Log(load_record().RunLog):
        def line(self, text: str, *more: Any, **named: Any) -> None:
            self.lines += text.splitlines()

    log = Log("steptime", enabled=False)
    log.lines = []
    return log
