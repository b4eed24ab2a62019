"""Recipes of the records of 27 and 29 April 2026: each against a plain reference.

The references are written from what these records do, in words.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinyruns
import verify
from running import log_of, write_split
from tiny import config_of

pytestmark = pytest.mark.timeout(300)
Run = Callable[..., Any]


def module_of(run: Any) -> Any:
    return sys.modules[type(run).__module__]


def results(run: Any) -> tuple[Any, ...]:
    """Losses, score and artifact of a whole run."""
    run.train()
    run.export_and_score()
    losses = [event["train_loss"] for event in run.log.events if event["event"] == "step"]
    [score] = [event for event in run.log.events if event["event"] == "score"]
    return losses, score["val_loss"], score["val_bpb"], Path("final_model.int8.ptz").read_bytes()


def faults(found: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    assert {name for name, _, _ in found} >= {"resume", "ranks", "replicas", "trained"}
    return [(name, text) for name, kind, text in found if kind == "FAULT"]


# --- byte_sidecar -----------------------------------------------------------------------------


@pytest.fixture
def with_bytes(data: SimpleNamespace, tmp_path: Path) -> SimpleNamespace:
    """The same data, and the bytes of its validation tokens: 0 to 5, not those of the table."""
    folder = tmp_path / "with_bytes"
    shutil.copytree(data.folder, folder)
    numbers = np.random.default_rng(1).integers(0, 6, len(data.val))
    numbers[data.val < 4] = 0  # control tokens
    write_split(folder, "val_bytes", numbers, [])
    return SimpleNamespace(env={"DATA_PATH": str(folder)}, numbers=numbers, folder=folder)


@pytest.mark.parametrize("stride", [0, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_per_byte_have_the_bytes_beside_the_targets(
    stride: int, ranks: int, run_of: Run, with_bytes: SimpleNamespace
) -> None:
    names = ("byte_sidecar", "sliding_window") if stride else ("byte_sidecar",)
    settings = {"BYTE_SIDECAR": 1, "GRAD_ACCUM_STEPS": 8 // ranks} | with_bytes.env
    settings |= {"EVAL_STRIDE": stride} if stride else {}
    if ranks > 1:
        runs, together = run_of(names, ranks=ranks, **settings)
        scores = together.run(lambda rank: runs[rank].evaluate("x", runs[rank].scorer))
    else:
        runs = [run_of(names, **settings)]
        scores = [runs[0].evaluate("x", runs[0].scorer)]
    targets = (600 - 1) // 32 * 32
    in_bytes = with_bytes.numbers[1 : targets + 1].sum()
    for nats, bpb, _ in scores:
        assert bpb == pytest.approx(nats * targets / np.log(2) / in_bytes, rel=1e-12)
    made = module_of(runs[0]).made_of_run(runs[0])
    assert "fineweb_val_bytes_000000.bin" in made, "its checksum decides the score"


def test_rejects_bytes_of_other_tokens(
    script: Callable, data: SimpleNamespace, with_bytes: SimpleNamespace
) -> None:
    module = script("byte_sidecar")
    env = data.env | with_bytes.env | {"VOCAB_SIZE": 260, "DEVICE": "cpu", "BYTE_SIDECAR": 1}
    config = config_of(module, **env, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=2048)
    assert module.find_faults(config, {})[0] == []
    path = f"{with_bytes.folder.resolve()}/fineweb_val_bytes_*.bin"
    write_split(with_bytes.folder, "val_bytes", with_bytes.numbers[1:], [])
    wanted = f"{path}: shards end after [1999] tokens, the others [2000]: get the bytes of these"
    assert module.find_faults(config, {})[0] == [f"{wanted} shards"]
    write_split(with_bytes.folder, "val_bytes", np.roll(with_bytes.numbers, 1), [])
    runtime = module.Runtime(config, {})
    with pytest.raises(module.RunError, match=r"tokens 0 to 1984: [1-5] bytes for control token 1"):
        module.Validation(config, runtime, log_of(module), None)
    (with_bytes.folder / "fineweb_val_bytes_000000.bin").unlink()
    [fault] = module.find_faults(config, {})[0]
    assert "no fineweb_val_bytes_*.bin" in fault
    on_gpu = replace(config, val_bytecount_device="cuda")
    faults, _ = module.find_faults(on_gpu, {})
    assert "VAL_BYTECOUNT_DEVICE=cuda: set cpu, for BYTE_SIDECAR=1" in faults


def test_bytes_that_are_off_are_the_root_to_the_digit(run_of: Run) -> None:
    assert results(run_of(("byte_sidecar",))) == results(run_of())


@pytest.mark.slow
def test_verify_finds_no_fault_in_bytes_beside(
    script: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the table's bytes in the file, so that the score can be computed by hand."""
    make_data, with_validation = tinyruns.make_data, tinyruns.Lab.with_validation
    name = "fineweb_val_bytes_000000.bin"

    def with_bytes(folder: Path, *arguments: int) -> int:
        total = make_data(folder, *arguments)
        path = str(folder / "tiny.model")
        table = script().byte_table(path, Path(path).read_bytes())
        tokens = tinyruns.read_shard(folder / "fineweb_val_000000.bin")
        counts = np.zeros(len(tokens), int)
        for i, (x, y) in enumerate(zip(tokens[:-1], tokens[1:], strict=True), 1):
            counts[i] = table.bytes_of(np.array([[x]]), np.array([[y]]))
        tinyruns.write_shard(folder / name, counts)
        return total

    def with_part(lab: Any, part: slice) -> Path:
        folder = with_validation(lab, part)
        tinyruns.write_shard(folder / name, tinyruns.read_shard(folder / name)[part])
        return folder

    monkeypatch.setattr(tinyruns, "make_data", with_bytes)
    monkeypatch.setattr(tinyruns.Lab, "with_validation", with_part)
    file = script("byte_sidecar").__file__
    assert faults(list(verify.verdicts(file, {"BYTE_SIDECAR": 1}))) == []
