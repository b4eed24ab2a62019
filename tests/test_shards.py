"""Proves that damaged and foreign shards are named with what is wrong, all in one error, and whole ones are taken."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL_MODEL, byte_data, config_of, train_gpt, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

TOKENS = np.arange(1, 201)  # 200 tokens: a whole file of them has 1024 + 400 = 1424 bytes


def shard_bytes(
    count: int = 200, magic: int = 20240520, version: int = 1, order: str = "<"
) -> bytes:
    return (
        struct.pack(f"{order}3i", magic, version, count).ljust(1024, b"\0")
        + TOKENS.astype("<u2").tobytes()
    )


# File name -> (its bytes, the words that tell what is wrong with it).
DAMAGED = {
    "magic": (shard_bytes(magic=20240521), ["magic", "20240521", "20240520"]),
    "big_endian": (shard_bytes(order=">"), ["magic", "20240520"]),
    "version": (shard_bytes(version=2), ["version 2"]),
    "count_too_big": (shard_bytes(201), ["1424 bytes", "201 tokens", "1426"]),
    "count_huge": (shard_bytes(2**31 - 1), ["1424 bytes", "2147483647 tokens"]),
    "count_too_small": (shard_bytes(199), ["1424 bytes", "199 tokens", "1422"]),
    "count_negative": (shard_bytes(-200), ["1424 bytes", "-200 tokens"]),
    "count_zero": (shard_bytes(0), ["1424 bytes", "(0 tokens"]),
    "one_byte_short": (shard_bytes()[:-1], ["1423 bytes", "1424", "200 tokens"]),
    "one_byte_long": (shard_bytes() + b"\0", ["1425 bytes", "1424", "200 tokens"]),
    "header_only": (shard_bytes()[:1024], ["1024 bytes", "200 tokens"]),
    "header_of_nothing": (shard_bytes(0)[:1024], ["1024 bytes", "0 tokens"]),
    "half_a_header": (shard_bytes()[:500], ["500 bytes"]),
    "empty": (b"", ["0 bytes"]),
}


def data_config(folder: Path, **more: object) -> train_gpt.Config:
    return config_of(**{**SMALL_MODEL, **byte_data(folder), **more})


def test_whole_shards_are_accepted(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    write_shard(tmp_path / "fineweb_train_000001.bin", TOKENS)
    write_shard(tmp_path / "fineweb_train_000002.bin", np.array([259]))
    (tmp_path / "fineweb_train_000003.bin.part").write_bytes(b"a download that is under way")
    assert config.problems(1) == []
    shards = train_gpt.Shards(str(tmp_path), "train")
    assert [path.name for path in shards.paths] == [f"fineweb_train_{n:06d}.bin" for n in range(3)]
    assert shards.ends == [0, 9000, 9200, 9201] and shards.total == 9201
    assert train_gpt.shard_tokens(shards.paths[1]) == 200


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_shard_is_refused_and_named(tmp_path: Path, name: str) -> None:
    content, words = DAMAGED[name]
    path = tmp_path / f"fineweb_val_{name}.bin"
    path.write_bytes(content)
    with pytest.raises(train_gpt.RunError) as caught:
        train_gpt.shard_tokens(path)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said
    for word in [*words, "delete it"]:
        assert word in said.replace(str(path), ""), said
    with pytest.raises(train_gpt.RunError):
        train_gpt.Shards(str(tmp_path), "val")


def test_all_damaged_shards_of_both_splits_are_listed_at_once(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    expected = []
    for number, (name, (content, words)) in enumerate(DAMAGED.items()):
        path = tmp_path / f"fineweb_{('train', 'val')[number % 2]}_{name}.bin"
        path.write_bytes(content)
        expected.append((path, words))
    faults = config.problems(1)
    assert len(faults) == len(DAMAGED)
    for path, words in expected:
        [fault] = [fault for fault in faults if str(path) in fault]
        assert all(word in fault.replace(str(path), "") for word in words) and "\n" not in fault


@settings(deadline=None, max_examples=60)
@given(size=st.integers(0, 1600))
def test_a_file_of_any_other_size_is_refused(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fineweb_val_size.bin"
    path.write_bytes(shard_bytes().ljust(size, b"\0")[:size])
    if size == 1424:
        assert train_gpt.shard_tokens(path) == 200
        return
    with pytest.raises(train_gpt.RunError, match=f" {size} bytes"):
        train_gpt.shard_tokens(path)


# --- Tokens of another vocabulary -------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("position", [0, 32_767, 100_000 - 32_768, 99_999])
def test_a_token_out_of_the_vocabulary_is_found_in_the_first_and_the_last_block(
    tmp_path: Path, split: str, position: int
) -> None:
    config = data_config(tmp_path)
    tokens = np.full(100_000, 259)
    path = write_shard(tmp_path / f"fineweb_{split}_000007.bin", tokens)
    assert config.problems(1) == []
    tokens[position] = 260
    write_shard(path, tokens)
    [fault] = config.problems(1)
    assert fault.startswith("VOCAB_SIZE=260: ") and str(path) in fault and "token 260" in fault


def test_the_largest_token_of_a_foreign_shard_is_reported(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    write_shard(tmp_path / "fineweb_train_000007.bin", np.array([300, 65_535, 5]))
    [fault] = config.problems(1)
    assert "token 65535" in fault


# --- What cannot be read ----------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_named_with_its_reason(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    (tmp_path / "fineweb_train_000008.bin").mkdir()
    (tmp_path / "fineweb_val_000009.bin").symlink_to(tmp_path / "moved_away.bin")
    folder, link = sorted(config.problems(1))
    assert "fineweb_train_000008.bin" in folder and "Is a directory" in folder
    assert "fineweb_val_000009.bin" in link and "No such file" in link


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_shard_without_permission_is_named(tmp_path: Path) -> None:
    config = data_config(tmp_path)
    path = write_shard(tmp_path / "fineweb_train_000008.bin", TOKENS)
    path.chmod(0)
    [fault] = config.problems(1)
    assert str(path) in fault and "Permission denied" in fault
