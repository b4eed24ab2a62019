"""Which tokens are batch k of a rank: always those that the challenge's rules name, for any number
of ranks and of micro-steps, after a resume at another number of ranks, and in validation.
Another order is another BatchPlan.rows, and a resumed run follows it.

No token occurs twice in these streams, so one that is misplaced is seen.
"""

import itertools
import tempfile
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from order import crc_of, rank_batches, step_rows
from running import config_of, open_pipeline, runtime_of, train_gpt, write_split

pytestmark = pytest.mark.timeout(120)

DISTINCT = np.random.default_rng(7).permutation(2**16)
# Ranks and micro-steps: one, the defaults, small memory, large memory, several machines.
CUTS = [(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (2, 1), (1, 24), (4, 4), (16, 1), (16, 3)]


def config_at(folder: str | Path, **more: object) -> train_gpt.Config:
    return config_of(DATA_PATH=folder, VOCAB_SIZE=2**16, **more)


def assert_rows(batch: train_gpt.Slot, expected: np.ndarray) -> None:
    """That the batch is these rows (rows, seq_len + 1)."""
    np.testing.assert_array_equal(batch.x, expected[:, :-1])
    np.testing.assert_array_equal(batch.y, expected[:, 1:])


class TrainCase(NamedTuple):
    sizes: list[int]  # of the shards, in tokens
    seq_len: int
    span_rows: int
    ranks: int
    micro_steps: int  # 0: the default
    steps: int

    @property
    def batch_tokens(self) -> int:
        return 8 * self.span_rows * self.seq_len


@pytest.mark.parametrize(
    "case",
    [
        TrainCase([1], 3, 2, 2, 0, 2),  # one token, over and over
        TrainCase([5, 1, 7], 4, 1, 1, 1, 3),  # a batch longer than all shards
        TrainCase([33, 33, 1, 200], 4, 2, 16, 0, 3),  # two ranks share a span
        TrainCase([9 * 8], 2, 4, 4, 4, 3),  # a step ends where the shards end
        TrainCase([31, 250, 2], 5, 6, 2, 8, 2),  # micro-batches are parts of a span
        TrainCase([250] * 6, 6, 4, 8, 0, 4),  # the challenge's own cut
    ],
)
def test_every_batch_of_every_rank_is_that_of_the_rules(case: TrainCase) -> None:
    stream, crc = DISTINCT[: sum(case.sizes)], 0
    micro_steps = case.micro_steps or max(1, 8 // case.ranks)
    with tempfile.TemporaryDirectory() as folder:
        write_split(Path(folder), "train", stream, case.sizes[:-1])
        config = config_at(
            folder,
            TRAIN_BATCH_TOKENS=case.batch_tokens,
            TRAIN_SEQ_LEN=case.seq_len,
            GRAD_ACCUM_STEPS=case.micro_steps,
        )
        for rank in range(case.ranks):
            with closing(
                open_pipeline(config, runtime=runtime_of(config, rank, case.ranks))
            ) as batches:
                for step in range(case.steps):
                    rows = step_rows(stream, case.batch_tokens, case.seq_len, step)
                    for expected in rank_batches(rows, rank, case.ranks, micro_steps):
                        batch = next(batches)
                        assert_rows(batch, expected)
                        crc += batch.summary
    assert crc % 2**32 == crc_of(stream, case.batch_tokens, case.seq_len, case.steps)


def test_a_run_continues_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each step is done by other ranks, and data_crc is that of a run that nothing interrupted."""
    stream, crc = DISTINCT[:1500], 0
    write_split(tmp_path, "train", stream, [611, 5])
    for step, (ranks, micro_steps) in enumerate(CUTS):
        config = config_at(
            tmp_path,
            TRAIN_BATCH_TOKENS=48 * 4,
            TRAIN_SEQ_LEN=4,
            GRAD_ACCUM_STEPS=micro_steps,
        )
        expected = step_rows(stream, 48 * 4, 4, step)
        for rank in range(ranks):
            runtime = runtime_of(config, rank, ranks)
            with closing(open_pipeline(config, runtime=runtime, step=step)) as batches:
                for rows in rank_batches(expected, rank, ranks, micro_steps):
                    batch = next(batches)
                    assert_rows(batch, rows)
                    crc += batch.summary
    assert crc % 2**32 == crc_of(stream, 48 * 4, 4, len(CUTS))


class Swapped(train_gpt.BatchPlan):
    """Another order: of two batches the second comes first."""

    def rows(self, k: int) -> range:
        return super().rows(k ^ 1)


def test_another_order_is_decided_in_one_place_and_resumed(tmp_path: Path) -> None:
    write_split(tmp_path, "train", DISTINCT[:700], [])
    config = config_at(tmp_path, TRAIN_BATCH_TOKENS=8 * 8, TRAIN_SEQ_LEN=4, GRAD_ACCUM_STEPS=2)
    shards, device = train_gpt.Shards(config, "train"), torch.device("cpu")

    def batches_from(kind: type[train_gpt.BatchPlan], step: int, steps: int) -> list[tuple]:
        """Of rank 1 of 4, two a step."""
        plan = kind.train(config, 1, 4, step)
        overlap = train_gpt.Overlap.of(config, "train", device)
        with closing(train_gpt.Pipeline(shards, plan, overlap, device)) as batches:
            return [
                (batch.x.tolist(), batch.y.tolist(), batch.summary)
                for batch in itertools.islice(batches, 2 * steps)
            ]

    plain, swapped = batches_from(train_gpt.BatchPlan, 0, 4), batches_from(Swapped, 0, 4)
    assert swapped == [plain[k ^ 1] for k in range(8)] != plain
    assert batches_from(Swapped, 0, 1) + batches_from(Swapped, 1, 3) == swapped


class ValCase(NamedTuple):
    sizes: list[int]  # of the shards, in tokens
    seq_len: int
    ranks: int
    micro_steps: int  # 0: the default
    batch_rows: int  # of one rank
    spare: float  # VAL_BATCH_SIZE beyond whole batches, as a share of the next row
    val_tokens: int  # 0: all

    @property
    def val_batch_size(self) -> int:
        parts = self.ranks * (self.micro_steps or max(1, 8 // self.ranks))
        return int(parts * self.seq_len * (self.batch_rows + self.spare))


@pytest.mark.parametrize(
    "case",
    [
        ValCase([60, 60], 6, 3, 0, 4, 0.0, 0),  # ranks of 6, 7 and 6 rows, batches of 4
        ValCase([2], 1, 9, 0, 1, 0.0, 0),  # one row: eight ranks have none
        ValCase([50, 10], 5, 2, 1, 2, 0.5, 51),  # the cut falls on the end of a row
        ValCase([50, 10], 5, 2, 1, 2, 0.5, 500),  # more asked for than there is
    ],
)
def test_validation_predicts_every_token_once(case: ValCase) -> None:
    """In batches of one shape: a rank's last one has rows to spare, without targets."""
    stream, seen = DISTINCT[: sum(case.sizes)], []
    count = (min(len(stream), case.val_tokens or len(stream)) - 1) // case.seq_len
    x = stream[: count * case.seq_len].reshape(count, case.seq_len)
    y = stream[1 : count * case.seq_len + 1].reshape(count, case.seq_len)
    with tempfile.TemporaryDirectory() as folder:
        write_split(Path(folder), "val", stream, case.sizes[:-1])
        config = config_at(
            folder,
            TRAIN_SEQ_LEN=case.seq_len,
            GRAD_ACCUM_STEPS=case.micro_steps,
            VAL_BATCH_SIZE=case.val_batch_size,
            VAL_TOKENS=case.val_tokens,
        )
        for rank in range(case.ranks):
            runtime = runtime_of(config, rank, case.ranks)
            first, end = count * rank // case.ranks, count * (rank + 1) // case.ranks
            with closing(
                open_pipeline(config, "val", runtime=runtime, summarize=read_tokens)
            ) as batches:
                shape = min(case.batch_rows, end - first), case.seq_len
                for start in range(first, end, case.batch_rows):
                    part = slice(start, min(start + case.batch_rows, end))
                    batch, filled = next(batches), part.stop - part.start
                    assert batch.x.shape == batch.y.shape == shape
                    np.testing.assert_array_equal(batch.x[:filled], x[part])
                    np.testing.assert_array_equal(batch.y[:filled], y[part])
                    assert (batch.x[filled:] == 0).all() and (batch.y[filled:] == -100).all()
                    assert batch.summary == [*x[part].ravel(), y[part][-1, -1]]
                    seen += batch.y[batch.y != -100].tolist()
                assert next(batches, None) is None
    assert seen == y.ravel().tolist()


def read_tokens(plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> list[int]:
    """As the summary of a batch: the tokens that were read for it."""
    return tokens.tolist()
