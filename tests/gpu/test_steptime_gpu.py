"""The StepTime record on a GPU: its operators and its other levers do not change what is learnt."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, Corpus, Finished, run_trainer

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

[SCRIPT] = (ROOT / "records").glob("track_*/*_StepTime/train_gpt.py")
OPERATORS = {"QKV_OPERATOR": 1, "MLP_OPERATOR": 1}
MODEL = {**SMALL_MODEL, "MODEL_DIM": 128, "TRAIN_SEQ_LEN": 128, "DEVICE": "cuda"}
MODEL |= {"TRAIN_BATCH_TOKENS": 8 * 128 * 4, "VAL_BATCH_SIZE": 8 * 128 * 4, "WARMUP_STEPS": 2}
LEVERS = ["CAST_ONCE", "FOLD_ONCE", "ADD_COMPILED", "MUON_ONE_BANK", "VAL_RESIDENT"]


def run(folder: Path, corpus: Corpus, **settings: object) -> Finished:
    done = run_trainer(folder, timeout=500, script=SCRIPT, **{**MODEL, **corpus.env, **settings})
    assert done.code == 0, done.err
    assert "does not work here" not in done.text, "it would be another arm"
    return done


@pytest.fixture(scope="module")
def plain(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    done = run(tmp_path_factory.mktemp("plain"), corpus, TORCH_COMPILE=1)
    return [float(value) for value in done.values("train_loss")]


@pytest.mark.parametrize("lever", ["operators", *LEVERS])
def test_a_lever_changes_no_loss(
    tmp_path: Path, corpus: Corpus, plain: list[float], lever: str
) -> None:
    settings = OPERATORS if lever == "operators" else {lever: 1}
    done = run(tmp_path, corpus, TORCH_COMPILE=1, **settings)
    found = [float(value) for value in done.values("train_loss")]
    assert lever != "operators" or "operators:qkv+mlp" in done.text
    assert len(found) == len(plain) and abs(found[0] - plain[0]) < 1e-3
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 2e-2
