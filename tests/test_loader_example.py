"""tools/loader_example.py takes only the loader: it trains another model on the challenge's
batches. Sizes that do not divide are an error of BatchPlan.train: see test_config.py."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from running import ROOT, run_script, write_split

EXAMPLE = ROOT / "tools" / "loader_example.py"
SEQ_LEN, STEP_TOKENS, STEPS = 64, 2048, 20  # micro-batches are steps there


def plain_losses(tokens: np.ndarray) -> list[float]:
    """The script's own model on the challenge's order of rows, written out."""
    text = EXAMPLE.read_text(encoding="utf-8")
    source = text[text.index("class Recurrent") : text.index("torch.manual_seed(0)")]
    namespace = {"nn": torch.nn, "config": SimpleNamespace(vocab_size=1024)}
    exec(compile(source, "model", "exec"), namespace)
    torch.manual_seed(0)
    model = namespace["Recurrent"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    span, losses = STEP_TOKENS // 8, []
    for step in range(STEPS):
        first = step * (span + 1)
        parts = tokens[first : first + span + 1].reshape(1, span + 1).astype(np.int64)
        x = torch.from_numpy(parts[:, :-1].reshape(-1, SEQ_LEN).copy())
        y = torch.from_numpy(parts[:, 1:].reshape(-1, SEQ_LEN).copy())
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_example_trains_another_model_on_the_challenges_batches(tmp_path: Path) -> None:
    assert "tools/loader_example.py" in (ROOT / "README.md").read_text(encoding="utf-8")
    tokens = np.random.default_rng(5).integers(0, 1024, 70_000)
    write_split(tmp_path, "train", tokens, [20_000, 9_000])
    done = run_script(EXAMPLE, tmp_path / "run", tmp_path)
    assert done.code == 0, done.err
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.out)]
    assert losses == [round(loss, 4) for loss in plain_losses(tokens)]
