"""The recipes for a faster step on a GPU: none of them changes what is learnt."""

from pathlib import Path

import pytest
import recipe
import torch
from running import ROOT, SMALL_MODEL, Corpus, run_trainer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {**SMALL_MODEL, "MODEL_DIM": 128, "TRAIN_SEQ_LEN": 128, "DEVICE": "cuda"}
MODEL |= {"TRAIN_BATCH_TOKENS": 8 * 128 * 4, "VAL_BATCH_SIZE": 8 * 128 * 4, "WARMUP_STEPS": 2}
# max_autotune and coordinate_descent compile for minutes.
FAST = "add_compiled", "fewest_micro_steps", "fused_mlp", "muon_one_bank"


def losses(folder: Path, corpus: Corpus, script: Path, **settings: object) -> list[float]:
    given = {**MODEL, **corpus.env, "TORCH_COMPILE": 1, **settings}
    done = run_trainer(folder, timeout=500, script=script, **given)
    assert done.code == 0, done.err
    return [float(value) for value in done.values("train_loss")]


@pytest.fixture(scope="module")
def plain(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("plain"), corpus, ROOT / "train_gpt.py")


@pytest.mark.parametrize("names", [*((name,) for name in FAST), FAST], ids="+".join)
def test_a_recipe_changes_no_loss(
    tmp_path: Path, corpus: Corpus, plain: list[float], names: tuple[str, ...]
) -> None:
    script = tmp_path / "with_recipes.py"
    assert recipe.main(["apply", *names, "--to", str(script)]) == 0
    found = losses(tmp_path, corpus, script, **{name.upper(): 1 for name in names})
    assert len(found) == len(plain) and abs(found[0] - plain[0]) < 1e-3
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 2e-2
