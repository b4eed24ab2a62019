"""A split is its whole shards in the order of their numbers, one endless stream of tokens.

A truncated or corrupt one is refused before anything starts, in a line that names it.
"""

import struct
from pathlib import Path

import numpy as np
import pytest
from running import byte_data, config_of, train_gpt, write_shard, write_split

TOKENS = np.arange(1, 201)  # 200 tokens: a whole file of them has 1024 + 400 = 1424 bytes


def shard_bytes(
    count: int = 200, magic: int = 20240520, version: int = 1, order: str = "<"
) -> bytes:
    header = struct.pack(f"{order}3i", magic, version, count).ljust(1024, b"\0")
    return header + TOKENS.astype("<u2").tobytes()


# What is wrong -> (the file, the words that say it).
DAMAGED = {
    "magic": (shard_bytes(magic=20240521), ["20240521", "1424 bytes"]),
    "version": (shard_bytes(version=2), ["20240520, 2", "1424 bytes"]),
    "big_endian": (shard_bytes(order=">"), ["1424 bytes"]),
    "cut_off": (shard_bytes()[:-1], ["200 tokens", "1423 bytes"]),
    "too_long": (shard_bytes() + b"\0\0", ["200 tokens", "1426 bytes"]),
    "no_tokens": (shard_bytes(0)[:1024], ["0 tokens", "1024 bytes"]),
    "half_a_header": (shard_bytes()[:7], []),
    "empty": (b"", ["0 bytes"]),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_shard_is_refused_and_named(tmp_path: Path, name: str, split: str) -> None:
    content, words = DAMAGED[name]
    config = config_of(**byte_data(tmp_path), TRAIN_SEQ_LEN=32, RUN_ID="r")
    assert not any(str(tmp_path) in fault for fault in train_gpt.find_faults(config, {}))
    path = tmp_path / f"fineweb_{split}_000001.bin"
    path.write_bytes(content)
    [said] = [fault for fault in train_gpt.find_faults(config, {}) if str(path) in fault]
    for word in [*words, "truncated, or no shard", "get it again, or make it"]:
        assert word in said.replace(str(path), ""), said
    assert "\n" not in said


@pytest.mark.parametrize("sizes", [[1], [5, 1, 7], [3, 9]])
def test_the_stream_has_no_end(tmp_path: Path, sizes: list[int]) -> None:
    """Any stretch of it is there, in pieces that lie in one file, round and round the shards."""
    stream = np.arange(1, sum(sizes) + 1).astype("<u2")
    write_split(tmp_path, "train", stream, sizes[:-1])
    (tmp_path / "fineweb_train_000003.bin.part").write_bytes(b"an unfinished download")
    write_shard(tmp_path / "fineweb_val_000000.bin", TOKENS)
    shards = train_gpt.Shards(config_of(DATA_PATH=tmp_path), "train")
    for first, count in np.ndindex(2 * len(stream) + 2, 3 * len(stream)):
        read = b"".join(
            path.read_bytes()[offset : offset + size]
            for path, offset, size in shards.pieces(first, count)
        )
        expected = stream[(first + np.arange(count)) % len(stream)]
        assert read == expected.tobytes()


def test_missing_data_is_one_fault_with_the_command_that_gets_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(train_gpt.RunError, match=rf"DATA_PATH={folder}: no fineweb_\*.bin"):
            train_gpt.Shards(config_of(DATA_PATH=folder), "val")
