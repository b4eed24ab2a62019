"""Fixtures of the recipes' tests: scripts with recipes as modules, tiny data, and Trainers."""

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

RUN_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """Return a function that imports train_gpt.py with the named recipes, made only once."""
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
    """Write documents of random bytes, each after a token 1, as train shards and a val shard."""
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
def make_run(
    script: Callable, data: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that makes a Trainer of train_gpt.py with some recipes.

    The Trainer is started as main() does it, but writes no log. For more than one rank, the
    function returns (a list of Trainers, their SimulatedRanks).
    """
    monkeypatch.chdir(tmp_path)

    def make(names: tuple[str, ...] = (), ranks: int = 1, **settings: object) -> Any:
        module = script(*names)
        # Without this, no tensor of so small a model would be quantized.
        monkeypatch.setattr(module, "KEEP_FLOAT_MAX_NUMEL", 500)
        env = SETTINGS | data.env | {"RUN_ID": f"r{next(RUN_NUMBERS)}"} | settings
        config = make_config(module, **env)
        simulated = SimulatedRanks(config, ranks, module) if ranks > 1 else None
        runtimes = simulated.runtimes if simulated else [make_runtime(config, trainer=module)]
        runs = []
        for runtime in runtimes:  # one after the other, because they share one random generator
            faults, data_of_run = module.check_settings(config, {"WORLD_SIZE": "1"})
            assert not faults, faults
            run = module.Trainer(config, runtime, make_log(module), data_of_run)
            run.attention_backends = module.attention_backends(config, runtime)
            run.log.open = lambda is_new: ""  # opens no file and reports no problem
            module.restore_or_start(run, {}, [])
            runs.append(run)
        return (runs, simulated) if simulated else runs[0]

    return make
