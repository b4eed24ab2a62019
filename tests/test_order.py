"""Proves the order of tokens: every rank's batches equal a reference built from the rules alone, overlap on and off."""

import binascii
import contextlib
import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    byte_data,
    config_of,
    open_pipeline,
    run_trainer,
    train_gpt,
    write_split,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(120)

DISTINCT = np.random.default_rng(7).permutation(
    2**16
)  # no token occurs twice, so one that is misplaced is seen


def step_rows(stream: np.ndarray, batch_tokens: int, seq_len: int, step: int) -> np.ndarray:
    """The rows of an optimizer step, (rows, seq_len + 1): cut from 8 consecutive spans of an endless stream."""
    span = batch_tokens // 8 + 1
    endless = np.arange(step * 8 * span, (step + 1) * 8 * span) % len(stream)
    spans = stream[endless].reshape(8, span)
    x, y = (part.reshape(-1, seq_len) for part in (spans[:, :-1], spans[:, 1:]))
    return np.concatenate([x, y[:, -1:]], axis=1)


def rank_batches(
    rows: np.ndarray, rank: int, world_size: int, accumulation: int
) -> list[np.ndarray]:
    """The micro-steps of a rank: micro-step m takes the (m * world_size + rank)-th of equal parts of a step's rows."""
    parts = np.split(rows, world_size * accumulation)
    return [parts[m * world_size + rank] for m in range(accumulation)]


def row_crc(row: np.ndarray, number: int) -> int:
    return binascii.crc32(row.astype("<u2").tobytes(), number)


class TrainCase(NamedTuple):
    sizes: list[int]  # of the shards
    seq_len: int
    span_rows: int
    world_size: int
    accumulation: int  # 0: the default, max(1, 8 / ranks)
    steps: int
    queue: int

    @property
    def batch_tokens(self) -> int:
        return 8 * self.span_rows * self.seq_len


@st.composite
def train_cases(draw: st.DrawFn) -> TrainCase:
    world_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    span_rows = draw(st.integers(1, 4)) * (2 if world_size == 16 else 1)
    share = 8 * span_rows // world_size
    accumulation = draw(st.sampled_from([0, *(g for g in range(1, share + 1) if share % g == 0)]))
    return TrainCase(
        draw(st.lists(st.integers(1, 250), min_size=1, max_size=6)),
        draw(st.integers(1, 6)),
        span_rows,
        world_size,
        accumulation,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )


@pytest.mark.parametrize("prefetch", [1, 0])
@settings(deadline=None, max_examples=30)
@given(case=train_cases())
@example(case=TrainCase([1], 3, 2, 2, 0, 2, 1))  # one token, over and over
@example(case=TrainCase([5, 1, 7], 4, 1, 1, 1, 3, 2))  # a step longer than all shards, in one batch
@example(
    case=TrainCase([33, 33, 1, 200], 4, 2, 16, 0, 4, 2)
)  # several machines: two ranks share a span
@example(
    case=TrainCase([9 * 8], 2, 4, 4, 8, 3, 2)
)  # small memory; a step ends where the shard ends
@example(case=TrainCase([250] * 6, 6, 4, 8, 0, 4, 3))  # the challenge's own cut
def test_training_batches_equal_the_reference(prefetch: int, case: TrainCase) -> None:
    stream = DISTINCT[: sum(case.sizes)]
    accumulation = case.accumulation or max(1, 8 // case.world_size)
    with tempfile.TemporaryDirectory() as folder:
        write_split(Path(folder), "train", stream, case.sizes[:-1])
        config = config_of(
            DATA_PATH=folder,
            TRAIN_BATCH_TOKENS=case.batch_tokens,
            TRAIN_SEQ_LEN=case.seq_len,
            GRAD_ACCUM_STEPS=case.accumulation,
            TRAIN_PREFETCH=prefetch,
            TRAIN_PREFETCH_QUEUE=case.queue,
        )
        crc = 0
        for rank in range(case.world_size):
            with contextlib.closing(
                open_pipeline(config, runtime=train_gpt.Runtime(rank, case.world_size))
            ) as batches:
                for step in range(case.steps):
                    rows = step_rows(stream, case.batch_tokens, case.seq_len, step)
                    for expected in rank_batches(rows, rank, case.world_size, accumulation):
                        x, y, digest = next(batches)
                        np.testing.assert_array_equal(x, expected[:, :-1])
                        np.testing.assert_array_equal(y, expected[:, 1:])
                        crc += digest
    rows = [
        row
        for step in range(case.steps)
        for row in step_rows(stream, case.batch_tokens, case.seq_len, step)
    ]
    assert crc % 2**32 == sum(row_crc(row, number) for number, row in enumerate(rows)) % 2**32


def forward_only_batches(
    stream: np.ndarray, span: int, seq_len: int, rank: int, world_size: int
) -> Iterator[tuple]:
    """The challenge's loader: it only moves forward, a span for every rank at a time, and each rank keeps its own."""
    position = 0
    while True:
        spans = [
            stream[np.arange(position + r * span, position + (r + 1) * span) % len(stream)]
            for r in range(world_size)
        ]
        position += world_size * span
        yield spans[rank][:-1].reshape(-1, seq_len), spans[rank][1:].reshape(-1, seq_len)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_defaults_give_the_order_of_the_challenge(tmp_path: Path, world_size: int) -> None:
    stream = DISTINCT[:700]
    write_split(tmp_path, "train", stream, [100, 301])
    config = config_of(DATA_PATH=tmp_path, TRAIN_BATCH_TOKENS=8 * 24, TRAIN_SEQ_LEN=8)
    for rank in range(world_size):
        reference = forward_only_batches(stream, 25, 8, rank, world_size)
        with contextlib.closing(
            open_pipeline(config, runtime=train_gpt.Runtime(rank, world_size))
        ) as batches:
            for expected, (x, y, _) in zip(
                itertools.islice(reference, 5 * 8 // world_size), batches
            ):
                np.testing.assert_array_equal(x, expected[0])
                np.testing.assert_array_equal(y, expected[1])


def test_ranks_and_accumulation_do_not_change_the_rows_of_a_step(tmp_path: Path) -> None:
    write_split(tmp_path, "train", DISTINCT[:2000], [611, 5])
    for step, cut in itertools.product(
        (0, 2), [(1, 1), (1, 8), (3, 1), (8, 1), (2, 8), (16, 1), (16, 3), (1, 48)]
    ):
        world_size, accumulation = cut
        config = config_of(
            DATA_PATH=tmp_path,
            TRAIN_BATCH_TOKENS=48 * 4,
            TRAIN_SEQ_LEN=4,
            GRAD_ACCUM_STEPS=accumulation,
        )
        micro_steps: dict[tuple[int, int], np.ndarray] = {}
        for rank in range(world_size):
            with contextlib.closing(
                open_pipeline(config, runtime=train_gpt.Runtime(rank, world_size))
            ) as batches:
                for batch_number, (x, _, _) in zip(range((step + 1) * accumulation), batches):
                    micro_steps[batch_number % accumulation, rank] = x.numpy().copy()
        rows = np.concatenate([micro_steps[key] for key in sorted(micro_steps)])
        np.testing.assert_array_equal(
            rows, step_rows(DISTINCT[:2000], 48 * 4, 4, step)[:, :-1], err_msg=f"{cut}"
        )


def test_the_log_names_the_tokens_of_every_step_after_priming(tmp_path: Path) -> None:
    """Two ranks, started as users do: priming has not moved the stream, and data_crc is the sum over both."""
    data = byte_data(tmp_path / "data", train_tokens=5000)
    done = run_trainer(
        tmp_path,
        ranks=2,
        **{
            **SMALL_MODEL,
            **data,
            "ITERATIONS": 4,
            "WARMUP_STEPS": 1,
            "TRAIN_BATCH_TOKENS": 1024,
            "GRAD_ACCUM_STEPS": 2,
            "VAL_LOSS_EVERY": 0,
        },
    )
    assert done.code == 0, done.err
    stream = np.random.default_rng(5000).integers(1, 260, 5000)
    rows = np.concatenate([step_rows(stream, 1024, 32, step) for step in range(4)])
    crcs = np.cumsum([row_crc(row, number) for number, row in enumerate(rows)])[31::32] % 2**32
    assert done.values("data_crc") == [f"{crc:08x}" for crc in crcs]


# --- Validation -------------------------------------------------------------------------------------------------------


class ValCase(NamedTuple):
    sizes: list[int]  # of the shards
    seq_len: int
    world_size: int
    accumulation: int  # 0: the default
    batch_rows: int  # of one rank
    odd_tokens: float  # VAL_BATCH_SIZE beyond whole batches, as a share of the next row
    val_tokens: int  # 0: all

    @property
    def val_batch_size(self) -> int:
        parts = self.world_size * (self.accumulation or max(1, 8 // self.world_size))
        return parts * self.seq_len * self.batch_rows + math.floor(
            self.odd_tokens * parts * self.seq_len
        )


@st.composite
def val_cases(draw: st.DrawFn) -> ValCase:
    sizes = draw(
        st.lists(st.integers(1, 60), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1)
    )
    seq_len = draw(st.integers(1, min(6, sum(sizes) - 1)))
    val_tokens = draw(st.one_of(st.just(0), st.integers(seq_len + 1, sum(sizes) + 20)))
    return ValCase(
        sizes,
        seq_len,
        draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([0.0, 0.5, 0.99])),
        val_tokens,
    )


@pytest.mark.parametrize("prefetch", [1, 0])
@settings(deadline=None, max_examples=40)
@given(case=val_cases())
@example(case=ValCase([60, 60], 6, 3, 0, 4, 0.0, 0))  # ranks of 6, 7 and 6 rows in batches of 4
@example(case=ValCase([2], 1, 9, 0, 1, 0.0, 0))  # one row: eight ranks have none
@example(case=ValCase([50, 10], 5, 2, 1, 2, 0.5, 51))  # the cut falls on the end of a row
@example(case=ValCase([50, 10], 5, 2, 1, 2, 0.5, 500))  # more asked for than there is
def test_validation_predicts_every_token_once(prefetch: int, case: ValCase) -> None:
    stream = DISTINCT[: sum(case.sizes)]
    rows = (min(len(stream), case.val_tokens or len(stream)) - 1) // case.seq_len
    x = stream[: rows * case.seq_len].reshape(rows, case.seq_len)
    y = stream[1 : rows * case.seq_len + 1].reshape(rows, case.seq_len)
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        write_split(Path(folder), "val", stream, case.sizes[:-1])
        config = config_of(
            DATA_PATH=folder,
            TRAIN_SEQ_LEN=case.seq_len,
            GRAD_ACCUM_STEPS=case.accumulation,
            VAL_BATCH_SIZE=case.val_batch_size,
            VAL_TOKENS=case.val_tokens,
            VAL_PREFETCH=prefetch,
        )
        for rank in range(case.world_size):
            runtime = train_gpt.Runtime(rank, case.world_size)
            first, end = rows * rank // case.world_size, rows * (rank + 1) // case.world_size
            with contextlib.closing(
                open_pipeline(config, "val", runtime=runtime, digest=noted)
            ) as batches:
                for start in range(first, end, case.batch_rows):
                    part = slice(start, min(start + case.batch_rows, end))
                    given_x, given_y, tokens = next(batches)
                    count = len(x[part])
                    np.testing.assert_array_equal(given_x[:count], x[part])
                    np.testing.assert_array_equal(given_y[:count], y[part])
                    assert (given_x[count:] == 0).all() and (given_y[count:] == -100).all(), (
                        "rows to spare: no targets"
                    )
                    np.testing.assert_array_equal(tokens, [*x[part].ravel(), y[part][-1, -1]])
                    seen += given_y[given_y != -100].tolist()
                assert next(batches, None) is None
    assert seen == y.ravel().tolist()  # every target in order: each once, none twice


def noted(plan: train_gpt.BatchPlan, rows: range, tokens: np.ndarray) -> np.ndarray:
    """As the digest of a batch: the tokens that were read for it."""
    return tokens.copy()
