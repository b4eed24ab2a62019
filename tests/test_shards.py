"""A split is its whole shards in the order of their names, one endless stream of tokens.
What is no whole shard is refused before anything starts, in a line that names it.
"""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import byte_data, config_of, train_gpt, write_shard, write_split

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


def test_whole_shards_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, count in ((2, 7), (0, 200), (1, 1), (10, 3)):
        write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", TOKENS[:count])
    (tmp_path / "fineweb_train_000003.bin.part").write_bytes(b"a download that is under way")
    write_shard(tmp_path / "fineweb_val_000000.bin", TOKENS)
    shards = train_gpt.Shards(config_of(DATA_PATH=tmp_path), "train")
    assert [int(path.stem[-6:]) for path in shards.paths] == [0, 1, 2, 10]
    assert shards.ends == [0, 200, 201, 208, 211]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.row("a damaged shard (..)", "refused by name")
def test_a_damaged_shard_is_refused_and_named(tmp_path: Path, name: str, split: str) -> None:
    content, words = DAMAGED[name]
    config = config_of(**byte_data(tmp_path), TRAIN_SEQ_LEN=32)
    assert not any("DATA_PATH" in fault for fault in train_gpt.find_faults(config, 1, {}))
    path = tmp_path / f"fineweb_{split}_000007.bin"
    path.write_bytes(content)
    [said] = [fault for fault in train_gpt.find_faults(config, 1, {}) if str(path) in fault]
    for word in [*words, "move it away"]:
        assert word in said.replace(str(path), ""), said
    assert "\n" not in said


@pytest.mark.timeout(30)  # else it would be waited for
@pytest.mark.parametrize("kind", ["pipe", "folder", "dead link"])
@pytest.mark.row("a .. in the place of a shard, at the start", "refused at once")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "fineweb_val_000000.bin"
    makers = {"pipe": os.mkfifo, "folder": os.mkdir}
    makers.get(kind, lambda path: path.symlink_to("nowhere"))(path)
    with pytest.raises(train_gpt.RunError, match="fineweb_val_000000.bin: no (whole )?shard"):
        train_gpt.Shards(config_of(DATA_PATH=tmp_path), "val")


@pytest.mark.parametrize("sizes", [[1], [5, 1, 7], [3, 9]])
def test_the_stream_has_no_end(tmp_path: Path, sizes: list[int]) -> None:
    """Any stretch of it is there, in pieces that lie in one file, round and round the shards."""
    stream = np.arange(1, sum(sizes) + 1).astype("<u2")
    write_split(tmp_path, "train", stream, sizes[:-1])
    shards = train_gpt.Shards(config_of(DATA_PATH=tmp_path), "train")
    for first, count in np.ndindex(2 * len(stream) + 2, 3 * len(stream)):
        read = b"".join(
            path.read_bytes()[offset : offset + size]
            for path, offset, size in shards.pieces(first, count)
        )
        expected = stream[(first + np.arange(count)) % len(stream)]
        assert read == expected.tobytes()


def test_a_split_without_a_shard_is_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        with pytest.raises(train_gpt.RunError, match=f"DATA_PATH=.*no fineweb_{split}_"):
            train_gpt.Shards(config_of(DATA_PATH=tmp_path), split)
