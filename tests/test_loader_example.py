"""The README of tools/ takes only the loader: it trains another model on the challenge's batches.
Sizes that do not divide are an error of BatchPlan.train: see test_config.py."""

import re
from pathlib import Path

import numpy as np
import torch
from running import ROOT, run_script, write_split
from torch import nn

SEQ_LEN, STEP_TOKENS, STEPS = 64, 2048, 20  # micro-batches are steps there


def plain_losses(tokens: np.ndarray) -> list[float]:
    """The same model on the challenge's order of rows, written out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1024, 64), nn.Linear(64, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    span, losses = STEP_TOKENS // 8, []
    for step in range(STEPS):
        first = step * (span + 1)
        parts = tokens[first : first + span + 1].reshape(1, span + 1).astype(np.int64)
        x = torch.from_numpy(parts[:, :-1].reshape(-1, SEQ_LEN).copy())
        y = torch.from_numpy(parts[:, 1:].reshape(-1, SEQ_LEN).copy())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_example_trains_another_model_on_the_challenges_batches(tmp_path: Path) -> None:
    readme = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    here = f"import sys\nsys.path.append({str(ROOT)!r})\nimport torch\ntorch.manual_seed(0)\n"
    script = tmp_path / "example.py"
    script.write_text(here + block.replace("data/datasets/mine", str(tmp_path)))
    tokens = np.random.default_rng(5).integers(0, 1024, 70_000)
    write_split(tmp_path, "train", tokens, [20_000, 9_000])
    done = run_script(script, tmp_path / "run")
    assert done.code == 0, done.err
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.out)]
    assert losses == [round(loss, 4) for loss in plain_losses(tokens)]
