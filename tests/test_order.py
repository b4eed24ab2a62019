"""Which tokens are batch k of a rank: those that the challenge's rules name, for any number of
ranks and of micro-steps, in validation, and for another model. No token occurs twice here."""

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
    return make_config(DATA_PATH=folder, VOCAB_SIZE=2**16, **more)


# Sizes of the shards in tokens, seq_len, rows of a span, ranks, micro-steps (0: default), steps.
TRAIN_CASES = [
    ([1], 3, 2, 2, 0, 2),  # one token, over and over
    ([5, 1, 7], 4, 1, 1, 1, 3),  # a batch longer than all shards
    ([33, 33, 1, 200], 4, 2, 16, 0, 3),  # two ranks share a span
    ([9 * 8], 2, 4, 4, 4, 3),  # a step ends where the shards end
    ([31, 250, 2], 5, 6, 2, 8, 2),  # micro-batches are parts of a span
    ([250] * 6, 6, 4, 8, 0, 4),  # the challenge's own cut
]


@pytest.mark.parametrize("case", TRAIN_CASES)
def test_every_batch_of_every_rank_is_that_of_the_rules(tmp_path: Path, case: tuple) -> None:
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


# Sizes of the shards, seq_len, ranks, micro-steps, rows of a rank's batch, VAL_BATCH_SIZE beyond
# whole batches as a share of the next row, VAL_TOKENS (0: all).
VAL_CASES = [
    ([60, 60], 6, 3, 0, 4, 0.0, 0),  # ranks of 6, 7 and 6 rows, batches of 4
    ([2], 1, 9, 0, 1, 0.0, 0),  # one row: eight ranks have none
    ([50, 10], 5, 2, 1, 2, 0.5, 51),  # the cut falls on the end of a row
    ([50, 10], 5, 2, 1, 2, 0.5, 500),  # more asked for than there is
]


@pytest.mark.parametrize("case", VAL_CASES)
def test_validation_predicts_every_token_once(tmp_path: Path, case: tuple) -> None:
    """In batches of one shape: a rank's last one has rows to spare, without targets."""
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
    here = f"import sys\nsys.path.append({str(ROOT)!r})\nimport torch\ntorch.manual_seed(0)\n"
    script = tmp_path / "example.py"
    script.write_text(here + block.replace("data/datasets/mine", str(tmp_path)))
    write_split(tmp_path, "train", np.arange(70_000) % 50, [20_000, 9_000])
    done = run_script(script, tmp_path / "run")
    assert done.code == 0, done.err
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.out)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
