"""Write shards of the challenge's sizes that need little disk space.

Compute from the files what a run must report: its scores, and the checksum of what it trains on.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from running import write_shard, write_split

SHARD = 100_000_000  # tokens of a training shard
# Tokens that are written into the first shard, at the end of the last one, and wherever else the
# first steps read. All other tokens are zeros, in a sparse file, which takes no space on the disk.
WRITTEN = 8_000_000
WRITTEN_AT_END = 1_000_000
WRITTEN_STEPS = 4
SPANS_PER_STEP = 8
# For each kind of data: vocabulary size, training shards, tokens of the validation set, tokens of a
# validation shard, and whether there is a file of bytes per validation token. The published
# validation sets have one shard, and caseops has five of this size. Here all have several, because
# a fault may appear from the second shard on.
KINDS = {
    "sp1024": (1024, 80, 62_021_846, 40_000_000, False),
    "sp8192": (8192, 128, 40_541_000, 30_000_000, False),
    "caseops": (8192, 80, 47_853_343, 10_000_000, True),
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
    vocabulary, _, _, _, has_file = KINDS[kind]
    return np.where(tokens >= vocabulary - 256, 1 + tokens % 7 if has_file else 1, 0)


def write_data(kind: str, folder: Path, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write the shards of a kind of data; return the settings that read them.

    `settings` are those of the script that will read them. They decide where the first steps read.
    """
    vocabulary, shards, count, size, has_file = KINDS[kind]
    tokens = make_tokens(vocabulary, count, count - 1)
    cuts = [*range(0, count, size)]
    write_split(folder, "val", tokens, [size] * (len(cuts) - 1))
    if has_file:
        write_split(folder, "val_bytes", byte_counts(kind, tokens), [size] * (len(cuts) - 1))
    for number in range(shards):
        path = write_shard(folder / f"fineweb_train_{number:06d}.bin", tokens[:0])
        with path.open("r+b") as file:
            file.seek(8)
            file.write(np.int32(SHARD).tobytes())
            file.truncate(1024 + 2 * SHARD)
    written = make_tokens(vocabulary, WRITTEN, count - 1)
    write_tokens(folder, 0, written)
    write_tokens(folder, shards * SHARD - WRITTEN_AT_END, written[-WRITTEN_AT_END:])
    if settings and settings.get("shuffle_spans"):
        for number in range(WRITTEN_STEPS * SPANS_PER_STEP):
            first, length = find_span(kind, settings, number)
            write_tokens(
                folder, first, make_tokens(vocabulary, length + number, count - 1)[number:]
            )
    (folder / "byte.json").write_text(f'{{"kind": "byte", "offset": {vocabulary - 256}}}')
    names = {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json"}
    return names | {"VOCAB_SIZE": vocabulary, "DEVICE": "cpu"}


def write_tokens(folder: Path, first: int, tokens: np.ndarray) -> None:
    """Overwrite the tokens of the training shards from token number `first` on."""
    while len(tokens):
        number, place = divmod(first, SHARD)
        part = tokens[: SHARD - place]
        with (folder / f"fineweb_train_{number:06d}.bin").open("r+b") as file:
            file.seek(1024 + 2 * place)
            file.write(part.astype("<u2").tobytes())
        first, tokens = first + len(part), tokens[len(part) :]


def read_tokens(kind: str, folder: Path, first: int, count: int) -> np.ndarray:
    """Return tokens of the training shards. After the last token, the first one follows."""
    parts = []
    while count:
        number, place = divmod(first % (KINDS[kind][1] * SHARD), SHARD)
        length = min(count, SHARD - place)
        path = folder / f"fineweb_train_{number:06d}.bin"
        parts.append(np.fromfile(path, "<u2", length, offset=1024 + 2 * place))
        first, count = first + length, count - length
    return np.concatenate(parts)


def find_span(kind: str, settings: dict[str, Any], number: int) -> tuple[int, int]:
    """Return (first token, number of tokens) of a span of the endless stream of training tokens.

    `settings` are those of the script, with names in lower case. With shuffle_spans, the whole
    spans of the data set come in an order that the seed and the number of the epoch determine.
    """
    length = settings["train_batch_tokens"] // SPANS_PER_STEP + 1
    if settings.get("shuffle_spans"):
        spans = KINDS[kind][1] * SHARD // length
        epoch, number = divmod(number, spans)
        number = int(np.random.default_rng([settings["seed"], epoch]).permutation(spans)[number])
    return number * length, length


def wrapping_step(kind: str, settings: dict[str, Any]) -> int:
    """Return the number of a step, from 0, that reads over the end of the training tokens."""
    tokens = KINDS[kind][1] * SHARD
    length = settings["train_batch_tokens"] // SPANS_PER_STEP + 1
    last_span = tokens // length - 1 if settings.get("shuffle_spans") else tokens // length
    return last_span // SPANS_PER_STEP


def expected_crc(kind: str, folder: Path, settings: dict[str, Any], steps: range) -> int:
    """Return the data_crc of some steps: the sum of the checksums of all their sequences.

    The checksum of a sequence is the crc32 of its tokens and of the token that follows. It begins
    with the number of the sequence in the stream.
    """
    row = settings["train_seq_len"]
    if settings.get("doc_token"):
        row = settings["train_batch_tokens"] // SPANS_PER_STEP  # the sequences of a span are joined
    total = 0
    for span in range(steps.start * SPANS_PER_STEP, steps.stop * SPANS_PER_STEP):
        first, length = find_span(kind, settings, span)
        tokens = read_tokens(kind, folder, first, length)
        rows = (length - 1) // row
        for number in range(rows):
            content = tokens[number * row : (number + 1) * row + 1].tobytes()
            total += zlib.crc32(content, span * rows + number)
    return total % 2**32


def read_validation_tokens(folder: Path) -> np.ndarray:
    """Return the tokens of all validation shards."""
    paths = sorted(folder.glob("fineweb_val_[0-9]*.bin"))
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def expected_score(kind: str, folder: Path, row: int, count: int = 0) -> tuple[float, float]:
    """Return the score (nats per token, bits per byte) that the model of stand_in.py must get.

    It is the score of all targets that fill sequences of `row` tokens. With `count`, only the first
    `count` tokens of the validation set are used.
    """
    tokens = read_validation_tokens(folder)[: count or None].astype(np.int64)
    used = (len(tokens) - 1) // row * row
    inputs, targets = tokens[:used], tokens[1 : used + 1]
    total = float((1 + (3 * inputs + targets) % 16 / 16).sum())
    return total / used, total / math.log(2) / int(byte_counts(kind, targets).sum())
