"""What the tests of the recipes for a faster step share: scripts with recipes, a small run."""

import importlib
import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "records"))
recipe = importlib.import_module("recipe")
OPERATORS = "qkv_operator", "mlp_operator"
RECIPES = (
    *OPERATORS,
    "add_compiled",
    "attention_probe",
    "cast_once",
    "coordinate_descent",
    "exchange_shards",
    "fewest_micro_steps",
    "kv_one_product",
    "max_autotune",
    "muon_one_bank",
    "val_resident",
)
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


@cache
def text_with(*names: str) -> str:
    """train_gpt.py with these recipes."""
    return recipe.combined(recipe.root_text(), [recipe.load(name) for name in names])


@cache
def script_with(*names: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="recipes-"))
    path = folder / "train_gpt.py"
    path.write_text(text_with(*names), encoding="utf-8")
    return path


@cache  # torch registers an operator once in a process: load both operators together
def load(*names: str) -> ModuleType:
    """That script as a module."""
    name = "train_gpt_with_" + "_and_".join(names)
    spec = importlib.util.spec_from_file_location(name, script_with(*names))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def switched_on(names: tuple[str, ...]) -> dict[str, str]:
    """The settings that switch recipes on, as their headers give them."""
    return {
        setting: on for name in names for setting, (_, on) in recipe.load(name).settings.items()
    }


def config_of(module: ModuleType, **settings: Any) -> Any:
    """A Config of settings, as the script would read them."""
    config, faults = module.read_config({k: str(v) for k, v in settings.items()})
    assert not faults, faults
    return config


def open_log(module: ModuleType) -> Any:
    """A log that writes no file: what was logged is in `lines`."""

    class Log(module.RunLog):
        def line(self, text: str, *more: Any, **named: Any) -> None:
            self.lines += text.splitlines()

    log = Log("steptime", enabled=False)
    log.lines = []
    return log
