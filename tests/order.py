"""The order of tokens by the challenge's rules, without a line of the trainer:
what tests compare its batches and its data_crc with."""

import binascii

import numpy as np


def step_rows(stream: np.ndarray, batch_tokens: int, seq_len: int, step: int) -> np.ndarray:
    """The rows of an optimizer step (rows, seq_len + 1): cut from 8 consecutive spans
    of the endless stream."""
    span = batch_tokens // 8 + 1
    endless = np.arange(step * 8 * span, (step + 1) * 8 * span) % len(stream)
    spans = stream[endless].reshape(8, span)
    x, y = (part.reshape(-1, seq_len) for part in (spans[:, :-1], spans[:, 1:]))
    return np.concatenate([x, y[:, -1:]], axis=1)


def rank_batches(rows: np.ndarray, rank: int, ranks: int, micro_steps: int) -> list[np.ndarray]:
    """In micro-step m a rank takes the (m * ranks + rank)-th of equal parts of a step's rows."""
    parts = np.split(rows, ranks * micro_steps)
    return [parts[m * ranks + rank] for m in range(micro_steps)]


def crc_of(stream: np.ndarray, batch_tokens: int, seq_len: int, steps: int) -> int:
    """The data_crc of a run's first `steps` steps."""
    rows = [row for step in range(steps) for row in step_rows(stream, batch_tokens, seq_len, step)]
    texts = [row.astype("<u2").tobytes() for row in rows]
    return sum(binascii.crc32(text, number) for number, text in enumerate(texts)) % 2**32
