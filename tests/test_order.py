"""Tests of the order of tokens.

The batches of every rank are those of the challenge's rules, for any number of ranks and of
micro-steps, in training and in validation. The example with another model trains. In these tests,
all tokens differ, so that an error in the order shows.
"""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from reference import data_crc_of_steps, rank_batches, step_rows
from running import (
    ROOT,
    make_config,
    make_runtime,
    open_pipeline,
    run_script,
    train_gpt,
    write_split,
)

DISTINCT = np.random.default_rng(7).permutation(2**16)


def config_for(folder: str | Path, **more: object) -> train_gpt.Config:
    """Return a Config for the DISTINCT tokens in a folder."""
    return make_config(DATA_PATH=folder, VOCAB_SIZE=2**16, **more)


# Tokens of each shard, seq_len, sequences per span, ranks, micro-steps (0: default), steps.
TRAIN_CASES = [
    ([1], 3, 2, 2, 0, 2),  # a single token is repeated
    ([5, 1, 7], 4, 1, 1, 1, 3),  # a batch has more tokens than all shards
    ([33, 33, 1, 200], 4, 2, 16, 0, 3),  # two ranks share a span
    ([9 * 8], 2, 4, 4, 4, 3),  # a step ends where the shards end
    ([31, 250, 2], 5, 6, 2, 8, 2),  # micro-batches are parts of a span
    ([250] * 6, 6, 4, 8, 0, 4),  # as the challenge splits a step over 8 ranks
]


@pytest.mark.parametrize("case", TRAIN_CASES)
def test_every_batch_of_every_rank_follows_the_rules(tmp_path: Path, case: tuple) -> None:
    sizes, seq_len, span_rows, ranks, parts, steps = case
    stream, step_tokens, crc = DISTINCT[: sum(sizes)], 8 * span_rows * seq_len, 0
    write_split(tmp_path, "train", stream, sizes[:-1])
    shape = {"TRAIN_BATCH_TOKENS": step_tokens, "TRAIN_SEQ_LEN": seq_len}
    config = config_for(tmp_path, **shape, GRAD_ACCUM_STEPS=parts)
    for rank in range(ranks):
        runtime = make_runtime(config, rank, ranks)
        with closing(open_pipeline(config, runtime=runtime)) as batches:
            for step in range(steps):
                rows = step_rows(stream, step_tokens, seq_len, step)
                for expected in rank_batches(rows, rank, ranks, parts or max(1, 8 // ranks)):
                    batch = next(batches)
                    np.testing.assert_array_equal(batch.x, expected[:, :-1])
                    np.testing.assert_array_equal(batch.y, expected[:, 1:])
                    crc += batch.summary
    assert crc % 2**32 == data_crc_of_steps(stream, step_tokens, seq_len, steps)


# Tokens of each shard, seq_len, ranks, micro-steps (0: default), sequences in a rank's batch, part
# of a further sequence in VAL_BATCH_SIZE, VAL_TOKENS (0: all).
VAL_CASES = [
    ([60, 60], 6, 3, 0, 4, 0.0, 0),  # the ranks have 6, 7 and 6 sequences, in batches of 4
    ([2], 1, 9, 0, 1, 0.0, 0),  # one sequence: eight ranks have none
    ([50, 10], 5, 2, 1, 2, 0.5, 51),  # VAL_TOKENS ends at the end of a sequence
    ([50, 10], 5, 2, 1, 2, 0.5, 500),  # VAL_TOKENS is more than there are
]


@pytest.mark.parametrize("case", VAL_CASES)
def test_validation_predicts_every_token_once(tmp_path: Path, case: tuple) -> None:
    """All batches of a rank have one shape; the last one may have rows without targets."""
    sizes, seq_len, ranks, micro_steps, batch_rows, spare, val_tokens = case
    stream, seen = DISTINCT[: sum(sizes)], []
    count = (min(len(stream), val_tokens or len(stream)) - 1) // seq_len
    x, y = (stream[i : i + count * seq_len].reshape(count, seq_len) for i in (0, 1))
    write_split(tmp_path, "val", stream, sizes[:-1])
    parts = ranks * (micro_steps or max(1, 8 // ranks))
    length = {"VAL_BATCH_SIZE": int(parts * seq_len * (batch_rows + spare))}
    length |= {"VAL_TOKENS": val_tokens, "TRAIN_SEQ_LEN": seq_len}
    config = config_for(tmp_path, **length, GRAD_ACCUM_STEPS=micro_steps)
    for rank in range(ranks):
        more = {
            "runtime": make_runtime(config, rank, ranks),
            "summarize": lambda plan, rows, tokens: tokens.tolist(),
        }
        first, end = count * rank // ranks, count * (rank + 1) // ranks
        with closing(open_pipeline(config, "val", **more)) as batches:
            for start in range(first, end, batch_rows):
                part = slice(start, min(start + batch_rows, end))
                batch, filled = next(batches), part.stop - part.start
                assert batch.x.shape == batch.y.shape == (min(batch_rows, end - first), seq_len)
                np.testing.assert_array_equal(batch.x[:filled], x[part])
                np.testing.assert_array_equal(batch.y[:filled], y[part])
                assert (batch.x[filled:] == 0).all() and (batch.y[filled:] == -100).all()
                assert batch.summary == [*x[part].ravel(), y[part][-1, -1]]
                seen += batch.y[batch.y != -100].tolist()
            assert next(batches, None) is None
    assert seen == y.ravel().tolist()


def test_the_example_trains_another_model(tmp_path: Path) -> None:
    readme = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    head = f"import sys\nsys.path.append({str(ROOT)!r})\nimport torch\ntorch.manual_seed(0)\n"
    script = tmp_path / "example.py"
    script.write_text(head + block.replace("data/datasets/mine", str(tmp_path)))
    write_split(tmp_path, "train", np.arange(70_000) % 50, [20_000, 9_000])
    done = run_script(script, tmp_path / "run")
    assert done.code == 0, done.err
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.out)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
