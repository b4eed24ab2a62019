"""Write shards of the challenge's sizes that need little disk space, and compute their scores."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from running import write_shard

SHARD = 100_000_000  # tokens of a training shard
# Tokens that are written into the first shard. All other tokens are zeros, in a sparse file, which
# takes no space on the disk.
WRITTEN = 8_000_000
# For each kind of data: vocabulary size, training shards, tokens of the validation set, and
# whether there is a file of bytes per validation token.
KINDS = {
    "sp1024": (1024, 80, 62_021_846, False),
    "sp8192": (8192, 128, 40_541_000, False),
    "caseops": (8192, 80, 47_853_343, True),
}
# Lengths of the 50,000 validation documents of the record of 2026-04-29, sorted by length: pairs
# "number of the document, its tokens", taken from the record's log, which has the shortest and the
# longest document of each batch.
LENGTHS = """
0 27, 64 83, 576 107, 2495 143, 5056 181, 9983 252, 14975 335, 20031 442, 25023 568, 30016 724,
35008 937, 39999 1260, 42879 1544, 44992 1872, 46976 2495, 47935 3089, 48831 4283, 49407 6095,
49727 9229, 49855 13079, 49984 30339, 49999 97114
"""


def make_tokens(vocabulary: int, count: int, total: int) -> np.ndarray:
    """Return `count` random tokens, of which about half stand for bytes.

    A 1 begins each document. The documents have the lengths of the record's log, in a random order,
    and together `total` tokens.
    """
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
    """Return the number of bytes of each token.

    The last 256 tokens of the vocabulary are bytes, and the tokens below them have no bytes. Data
    with a file of bytes has 1 to 7 bytes per byte token.
    """
    vocabulary, _, _, has_file = KINDS[kind]
    return np.where(tokens >= vocabulary - 256, 1 + tokens % 7 if has_file else 1, 0)


def write_data(kind: str, folder: Path) -> dict[str, Any]:
    """Write the shards of a kind of data; return the settings that read them."""
    vocabulary, shards, count, has_file = KINDS[kind]
    tokens = make_tokens(vocabulary, count, count - 1)
    write_shard(folder / "fineweb_val_000000.bin", tokens)
    if has_file:
        write_shard(folder / "fineweb_val_bytes_000000.bin", byte_counts(kind, tokens))
    for number in range(shards):
        written = make_tokens(vocabulary, WRITTEN, count - 1) if number == 0 else tokens[:0]
        path = write_shard(folder / f"fineweb_train_{number:06d}.bin", written)
        with path.open("r+b") as file:
            file.seek(8)
            file.write(np.int32(SHARD).tobytes())
            file.truncate(1024 + 2 * SHARD)
    (folder / "byte.json").write_text(f'{{"kind": "byte", "offset": {vocabulary - 256}}}')
    names = {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json"}
    return names | {"VOCAB_SIZE": vocabulary, "DEVICE": "cpu"}


def expected_score(kind: str, folder: Path, row: int, count: int = 0) -> tuple[float, float]:
    """Return the score (nats per token, bits per byte) that the stand-in model must get.

    It is the score of all targets that fill sequences of `row` tokens. With `count`, only the first
    `count` tokens of the validation set are used.
    """
    tokens = np.fromfile(folder / "fineweb_val_000000.bin", "<u2", offset=1024)[: count or None]
    targets = tokens[1 : 1 + (len(tokens) - 1) // row * row]
    nats = float((1 + (targets % 16) / 16).sum())
    return nats / len(targets), nats / math.log(2) / int(byte_counts(kind, targets).sum())
