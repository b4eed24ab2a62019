"""Scripts with recipes as modules, and Trainers of them on tiny data."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipe
from running import SimulatedRanks, import_script, make_config, make_log, make_runtime, write_split
from running import train_gpt as tg
from tiny import SETTINGS

NUMBERS = itertools.count()  # of runs


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    folder = tmp_path_factory.mktemp("scripts")
    made: dict[tuple[str, ...], ModuleType] = {(): tg}

    def make(*names: str) -> ModuleType:
        if names not in made:
            path = folder / f"with_{'_'.join(names)}.py"
            assert recipe.main(["apply", *names, "--to", str(path)]) == 0
            made[names] = import_script(path)
        return made[names]

    return make


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Documents of bytes, each after a 1, in three training shards."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "byte.json").write_text('{"kind": "byte", "offset": 4}', encoding="utf-8")
    random = np.random.default_rng(0)
    texts = [random.integers(4, 260, random.integers(5, 90)) for _ in range(900)]
    tokens = np.concatenate([np.r_[1, text] for text in texts])
    write_split(folder, "val", tokens[:2000], [])
    write_split(folder, "train", tokens[2000:], [9000, 14_000])
    env = {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "byte.json")}
    return SimpleNamespace(env=env, train=tokens[2000:], val=tokens[:2000], folder=folder)


@pytest.fixture
def run_of(
    script: Callable, data: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes a Trainer of the root with some recipes, begun as its main does it, without files of a
    log; more than one rank: (a list of Trainers, the SimulatedRanks that they are)"""
    monkeypatch.chdir(tmp_path)

    def make(names: tuple[str, ...] = (), ranks: int = 1, **settings: object) -> Any:
        module = script(*names)
        monkeypatch.setattr(
            module, "KEEP_FLOAT_MAX_NUMEL", 500
        )  # in so small a model tensors are quantized, too
        env = SETTINGS | data.env | {"RUN_ID": f"r{next(NUMBERS)}"} | settings
        config = make_config(module, **env)
        together = SimulatedRanks(config, ranks, module) if ranks > 1 else None
        runtimes = together.runtimes if together else [make_runtime(config, trainer=module)]
        runs = []
        for runtime in runtimes:  # one after the other: random numbers are of the process
            faults, data_of_run = module.check_settings(config, {"WORLD_SIZE": "1"})
            assert not faults, faults
            run = module.Trainer(config, runtime, make_log(module), data_of_run)
            run.log.open = lambda is_new: ""  # it opens nothing, and says so
            module.restore_or_start(run, {}, [])
            runs.append(run)
        return (runs, together) if together else runs[0]

    return make
