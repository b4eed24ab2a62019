"""The checksum of the training data (data_crc), computed again from the shards.

A step trains on 8 consecutive spans of the stream of tokens, each of TRAIN_BATCH_TOKENS / 8 tokens
and one more, cut into rows of TRAIN_SEQ_LEN tokens and one more. data_crc is the sum, modulo 2^32,
over all rows so far, of the crc32 of the row's tokens as bytes, begun with the row's number in the
run.
"""

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

MAGIC, VERSION, HEADER_BYTES, TOKEN_BYTES = 20240520, 1, 1024, 2
SPANS = 8  # of a step
CRC = 0xFFFFFFFF
# Of one checksum: some minutes.
MAX_DATA_BYTES, MAX_ROWS, MAX_BATCH = 40_000_000_000, 50_000_000, 1 << 26


class Shards:
    """The training shards of a folder as one endless stream.

    Raises ValueError for what is not a complete shard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.paths = sorted(Path(folder).glob("fineweb_train_*.bin"))
        if not self.paths:
            raise ValueError(f"{folder}: no fineweb_train_*.bin in it")
        self.counts = [_tokens(path) for path in self.paths]
        self.total = sum(self.counts)
        if self.total == 0:
            raise ValueError(f"{folder}: its shards hold no token")

    def read(self, start: int, count: int) -> bytes:
        """The bytes of `count` tokens from token `start` of the stream on."""
        parts, start = [], start % self.total
        while count:
            index, at = self._place(start)
            taken = min(count, self.counts[index] - at)
            with open(self.paths[index], "rb") as file:
                file.seek(HEADER_BYTES + TOKEN_BYTES * at)
                parts.append(file.read(TOKEN_BYTES * taken))
            if len(parts[-1]) != TOKEN_BYTES * taken:
                raise ValueError(f"{self.paths[index]}: became shorter while it was read")
            count, start = count - taken, (start + taken) % self.total
        return b"".join(parts)

    def _place(self, token: int) -> tuple[int, int]:
        for index, count in enumerate(self.counts):
            if token < count:
                return index, token
            token -= count
        raise ValueError("a token behind the last shard")


def _tokens(path: Path) -> int:
    with open(path, "rb") as file:
        header = file.read(12)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 12 or struct.unpack("<2i", header[:8]) != (MAGIC, VERSION):
        raise ValueError(f"{path}: not a shard (its header is another's)")
    count = struct.unpack("<i", header[8:])[0]
    if count < 0 or size != HEADER_BYTES + TOKEN_BYTES * count:
        raise ValueError(
            f"{path}: {size:,} bytes, but its header promises {count:,} tokens: incomplete"
        )
    return count


def data_crcs(
    shards: Shards, *, batch_tokens: int, seq_len: int, steps: Iterable[int]
) -> dict[int, str]:
    """data_crc (8 hex digits) at each of `steps`.

    ValueError: no such batch, a broken shard, more than is read.
    """
    wanted = set(steps)
    last = max(wanted, default=0)
    if seq_len < 1 or batch_tokens < 1 or batch_tokens % (SPANS * seq_len):
        raise ValueError(
            f"a batch of {batch_tokens:,} tokens is not {SPANS} spans of rows of {seq_len:,} tokens"
        )
    tokens = last * batch_tokens
    if (
        TOKEN_BYTES * tokens > MAX_DATA_BYTES
        or tokens // seq_len > MAX_ROWS
        or batch_tokens > MAX_BATCH
    ):
        raise ValueError(
            f"{last:,} steps of {batch_tokens:,} tokens in rows of {seq_len:,}: "
            "too much to read again"
        )
    span_rows = batch_tokens // SPANS // seq_len
    span_tokens = span_rows * seq_len + 1
    width, stride = TOKEN_BYTES * (seq_len + 1), TOKEN_BYTES * seq_len
    result, crc, row = {}, 0, 0
    for step in range(1, last + 1):
        for span in range((step - 1) * SPANS, step * SPANS):
            data = memoryview(shards.read(span * span_tokens, span_tokens))
            for start in range(0, span_rows * stride, stride):
                crc += zlib.crc32(data[start : start + width], row & CRC)
                row += 1
        crc &= CRC
        if step in wanted:
            result[step] = f"{crc:08x}"
    return result
