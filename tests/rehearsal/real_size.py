"""Shards of the challenge's sizes that take little room, and the scores that runs must find."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from running import write_shard

SHARD = 100_000_000  # tokens of a training shard
WRITTEN = 8_000_000  # of the first one; all others are zeros, which take no room on a disk
# Of each kind: vocabulary, training shards, tokens of the validation split, with a file of bytes?
KINDS = {
    "sp1024": (1024, 80, 62_021_846, False),
    "sp8192": (8192, 128, 40_541_000, False),
    "caseops": (8192, 80, 47_853_343, True),
}
# Of the 50,000 validation documents of the record of 2026-04-29, the shortest first: (number of the
# document, its tokens). Its log has the shortest and the longest of each batch.
LENGTHS = """
0 27, 64 83, 576 107, 2495 143, 5056 181, 9983 252, 14975 335, 20031 442, 25023 568, 30016 724,
35008 937, 39999 1260, 42879 1544, 44992 1872, 46976 2495, 47935 3089, 48831 4283, 49407 6095,
49727 9229, 49855 13079, 49984 30339, 49999 97114
"""


def stream(vocabulary: int, count: int, total: int) -> np.ndarray:
    """`count` random tokens, of which about half are bytes; a 1 begins each document. Lengths are
    as in the record's log, in a random order, `total` tokens together."""
    number, length = np.array([pair.split() for pair in LENGTHS.split(",")], dtype=int).T
    lengths = np.exp(np.interp(np.arange(50_000), number, np.log(length))).round().astype(int)
    lengths[20_000:40_000] += (total - lengths.sum()) // 20_000
    lengths[30_000] += total - lengths.sum()
    random = np.random.default_rng(count)
    begins = np.cumsum([0, *random.permutation(lengths)])
    tokens = random.integers(vocabulary - 512, vocabulary, count, dtype=np.uint16)
    tokens[begins[begins < count - 1]] = 1
    return tokens


def byte_counts(kind: str, tokens: np.ndarray) -> np.ndarray:
    """The bytes of tokens: the last 256 are bytes, those below are controls. A file has others."""
    vocabulary, _, _, has_file = KINDS[kind]
    return np.where(tokens >= vocabulary - 256, 1 + tokens % 7 if has_file else 1, 0)


def make(kind: str, folder: Path) -> dict[str, Any]:
    """Writes the shards of a kind of data; returns the settings that read them."""
    vocabulary, shards, count, has_file = KINDS[kind]
    tokens = stream(vocabulary, count, count - 1)
    write_shard(folder / "fineweb_val_000000.bin", tokens)
    if has_file:
        write_shard(folder / "fineweb_val_bytes_000000.bin", byte_counts(kind, tokens))
    for number in range(shards):
        written = stream(vocabulary, WRITTEN, count - 1) if number == 0 else tokens[:0]
        path = write_shard(folder / f"fineweb_train_{number:06d}.bin", written)
        with path.open("r+b") as file:
            file.seek(8)
            file.write(np.int32(SHARD).tobytes())
            file.truncate(1024 + 2 * SHARD)
    (folder / "byte.json").write_text(f'{{"kind": "byte", "offset": {vocabulary - 256}}}')
    names = {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json"}
    return names | {"VOCAB_SIZE": vocabulary, "DEVICE": "cpu"}


def score(kind: str, folder: Path, row: int, count: int = 0) -> tuple[float, float]:
    """(nats per token, bits per byte) of all targets that fill rows of so many tokens. count: of
    the first tokens of the split; 0: of all"""
    tokens = np.fromfile(folder / "fineweb_val_000000.bin", "<u2", offset=1024)[: count or None]
    targets = tokens[1 : 1 + (len(tokens) - 1) // row * row]
    nats = float((1 + (targets % 16) / 16).sum())
    return nats / len(targets), nats / math.log(2) / int(byte_counts(kind, targets).sum())
