"""The checksum of the training data (data_crc), computed again from the shards.

A step trains on 8 consecutive spans of the stream of tokens, each of TRAIN_BATCH_TOKENS / 8 tokens
and one more, cut into rows of TRAIN_SEQ_LEN tokens and one more. data_crc is the sum, modulo 2^32,
over all rows so far, of the crc32 of the row's tokens as bytes, begun with the row's number in the
run.
"""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER_BYTES, TOKEN_BYTES = 20240520, 1, 1024, 2
SPANS = 8  # of a step
MAX_TOKENS = 20_000_000_000  # of one checksum: some minutes


class Shards:
    """The training shards of a folder as one endless stream.

    Raises ValueError for what is not a complete shard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        paths = sorted(Path(folder).glob("fineweb_train_*.bin"))
        if not paths:
            raise ValueError(f"{folder}: no fineweb_train_*.bin in it: name a data set's folder")
        self.parts = [mapped(path) for path in paths]
        self.ends = np.cumsum([len(part) for part in self.parts])

    def read(self, start: int, count: int) -> bytes:
        """The bytes of `count` tokens from token `start` of the stream on."""
        found, start = [], start % self.ends[-1]
        while count:
            index = int(np.searchsorted(self.ends, start, side="right"))
            at = start - self.ends[index] + len(self.parts[index])
            found.append(self.parts[index][at : at + count].tobytes())
            taken = len(found[-1]) // TOKEN_BYTES
            count, start = count - taken, (start + taken) % self.ends[-1]
        return b"".join(found)


def mapped(path: Path) -> np.ndarray:
    """A shard's tokens, on the disk."""
    header = np.fromfile(path, dtype="<i4", count=3)
    if len(header) < 3 or tuple(header[:2]) != (MAGIC, VERSION):
        raise ValueError(f"{path}: not a shard (its header is another's): leave it out of --data")
    size, count = path.stat().st_size, int(header[2])
    if count < 1 or size != HEADER_BYTES + TOKEN_BYTES * count:
        raise ValueError(
            f"{path}: {size:,} bytes, but its header promises {count:,} tokens: download it again"
        )
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def data_crcs(
    shards: Shards, *, batch_tokens: int, seq_len: int, steps: Iterable[int]
) -> dict[int, str]:
    """data_crc (8 hex digits) at each of `steps`. ValueError: no such batch, or too many steps."""
    wanted = set(steps)
    last = max(wanted, default=0)
    if seq_len < 1 or batch_tokens < 1 or batch_tokens % (SPANS * seq_len):
        raise ValueError(
            f"a batch of {batch_tokens:,} tokens is not {SPANS} spans of rows of {seq_len:,} tokens"
        )
    if last * batch_tokens > MAX_TOKENS:
        raise ValueError(f"{last:,} steps of {batch_tokens:,} tokens: too much to read again")
    span_rows = batch_tokens // SPANS // seq_len
    span_tokens = span_rows * seq_len + 1
    stride, width = TOKEN_BYTES * seq_len, TOKEN_BYTES * (seq_len + 1)
    result, crc, row = {}, 0, 0
    for step in range(1, last + 1):
        for span in range((step - 1) * SPANS, step * SPANS):
            data = memoryview(shards.read(span * span_tokens, span_tokens))
            for start in range(0, span_rows * stride, stride):
                crc += zlib.crc32(data[start : start + width], row & 0xFFFFFFFF)
                row += 1
        if step in wanted:
            result[step] = f"{crc & 0xFFFFFFFF:08x}"
    return result
