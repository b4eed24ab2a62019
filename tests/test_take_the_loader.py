"""Section DATA of train_gpt.py, copied into another script as README.md says, feeds that script's
training loop with the challenge's batches: the losses are those of a plain synchronous loader."""

import ast
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, write_split

pytestmark = pytest.mark.timeout(120)

SEQ_LEN, VOCABULARY = 16, 64
STEPS, ACCUMULATION = 5, 8
STEP_TOKENS = 8 * 2 * SEQ_LEN


def copied_section() -> dict[str, object]:
    """What a user pastes: the file's imports, three helpers, and the section between its rules."""
    text = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    nodes = ast.parse(text).body
    wanted = {"RunError", "first_line", "read_json"}
    parts = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
    parts += [node for node in nodes if getattr(node, "name", "") in wanted]
    script = "\n".join(ast.unparse(node) for node in parts)
    section = text[text.index("# === DATA") : text.index("# === MODEL")]
    namespace: dict[str, object] = {"SimpleNamespace": SimpleNamespace}
    exec(compile(f"{script}\n{section}", "another_script.py", "exec"), namespace)
    return namespace


def readme_lines() -> list[str]:
    """README's ten lines: those up to the loop, without the call at its end."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## Take only the loader.*?```python\n(.*?)```", readme, re.DOTALL)
    assert block
    return block[1].splitlines()


def plain_batches(tokens: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The challenge's order, written out: a span of rows and one token more a micro-step."""
    span = STEP_TOKENS // 8
    pairs = []
    for k in range(STEPS * ACCUMULATION):
        part = torch.tensor(tokens[k * (span + 1) : (k + 1) * (span + 1)].astype(np.int64))
        pairs.append((part[:-1].reshape(-1, SEQ_LEN), part[1:].reshape(-1, SEQ_LEN)))
    return pairs


def losses_of(batches: object) -> list[float]:
    """A training loop of somebody else's: it knows nothing of where x and y come from."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _, (x, y) in zip(range(STEPS * ACCUMULATION), batches, strict=False):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_section_alone_feeds_another_scripts_loop(tmp_path: Path) -> None:
    size = STEPS * ACCUMULATION * (STEP_TOKENS // 8 + 1)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, size)
    write_split(tmp_path, "train", tokens, [size // 3, size // 5])
    namespace = copied_section()
    namespace["args"] = SimpleNamespace(
        data_path=str(tmp_path),
        vocab_size=VOCABULARY,
        train_seq_len=SEQ_LEN,
        train_batch_tokens=STEP_TOKENS,
    )
    namespace.update(
        rank=0, world_size=1, grad_accum_steps=ACCUMULATION, device=torch.device("cpu")
    )
    lines = readme_lines()
    first_use = next(number for number, line in enumerate(lines) if "next(batches)" in line)
    exec("\n".join(lines[:first_use]), namespace)
    with closing(namespace["batches"]) as batches:
        found = losses_of((batch.x, batch.y) for batch in batches)
    assert found == losses_of(plain_batches(tokens))
    assert len(found) == STEPS * ACCUMULATION
