"""The recipes for a faster step on a GPU: none of them changes what is learnt."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, Corpus, Finished, run_trainer
from steptime import OPERATORS, RECIPES, script_with, switched_on

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {**SMALL_MODEL, "MODEL_DIM": 128, "TRAIN_SEQ_LEN": 128, "DEVICE": "cuda"}
MODEL |= {"TRAIN_BATCH_TOKENS": 8 * 128 * 4, "VAL_BATCH_SIZE": 8 * 128 * 4, "WARMUP_STEPS": 2}
SLOW = {"max_autotune", "coordinate_descent"}  # they compile for minutes
FAST = tuple(name for name in RECIPES if name not in SLOW)
SETS = [*((name,) for name in FAST), FAST]


def run(folder: Path, corpus: Corpus, script: Path, **settings: object) -> Finished:
    done = run_trainer(folder, timeout=500, script=script, **{**MODEL, **corpus.env, **settings})
    assert done.code == 0, done.err
    assert "does not work here" not in done.text, "it would be another arm"
    return done


@pytest.fixture(scope="module")
def plain(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    done = run(folder, corpus, ROOT / "train_gpt.py", TORCH_COMPILE=1)
    return [float(value) for value in done.values("train_loss")]


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_a_recipe_changes_no_loss(
    tmp_path: Path, corpus: Corpus, plain: list[float], names: tuple[str, ...]
) -> None:
    done = run(tmp_path, corpus, script_with(*names), TORCH_COMPILE=1, **switched_on(names))
    found = [float(value) for value in done.values("train_loss")]
    operators = "+".join(name for name in OPERATORS if name in names)
    assert not operators or f"operators:{operators}\n" in done.text
    assert len(found) == len(plain) and abs(found[0] - plain[0]) < 1e-3
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 2e-2
