"""Settings of a short run, and that run without a fault."""

from collections.abc import Callable
from pathlib import Path

import pytest
from running import SMALL_MODEL, byte_data

from faults.live import Live

SHORT = {"ITERATIONS": 20, "VAL_LOSS_EVERY": 10, "RUN_ID": "r", "CHECKPOINT_EVERY": 4}
SHORT |= {"CHECKPOINT_KEEP": 9, "VAL_BATCH_SIZE": 1024}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """20 steps with a checkpoint every 4, validated before, in the middle and at the end."""
    folder = tmp_path_factory.mktemp("faults") / "data"
    return {**SMALL_MODEL, **byte_data(folder, train_tokens=50_000, val_tokens=2000), **SHORT}


@pytest.fixture(scope="session")
def whole(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Live]:
    """The run without a fault, on so many ranks."""
    done: dict[int, Live] = {}

    def run(ranks: int) -> Live:
        if ranks not in done:
            folder: Path = tmp_path_factory.mktemp(f"whole_{ranks}")
            done[ranks] = Live(folder, ranks, **data).finish()
        return done[ranks]

    return run
