"""What the tests of the record StepTime share: where it is, and its script as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from conftest import ROOT

RECORD = ROOT / "records/track_non_record_16mb/2026-11-21_StepTime"
SCRIPT = RECORD / "train_gpt.py"


def load_record(name: str = "steptime_record", script: Path = SCRIPT) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, script)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
