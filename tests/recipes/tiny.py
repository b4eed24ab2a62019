"""Trainers of a script with recipes, begun as its main does it, without files of a log."""

from types import ModuleType
from typing import Any

from running import SimulatedRanks, log_of, runtime_of


def config_of(module: ModuleType, **settings: object) -> Any:
    """A Config of the script, which may have more settings than the root."""
    given = [f"{name}={value}" for name, value in settings.items()]
    config, _, faults, _ = module.read_config(given, {})
    assert not faults, faults
    return config


def trainers(module: ModuleType, ranks: int, **settings: object) -> tuple[list[Any], Any]:
    """(a Trainer for each rank, the SimulatedRanks that they are; None for one rank)"""
    config = config_of(module, **settings)
    together = SimulatedRanks(config, ranks, module) if ranks > 1 else None
    runtimes = together.runtimes if together else [runtime_of(config, trainer=module)]
    runs = []
    for runtime in runtimes:  # one after the other: random numbers are of the process
        run = module.Trainer(config, runtime, log_of(module))
        run.log.begin = str  # it opens nothing, and says so
        module.begin(run, None, "", {}, [])
        runs.append(run)
    return runs, together
