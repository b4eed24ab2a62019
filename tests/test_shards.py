"""Tests of shards.

The shards of a split, in the order of their numbers, are one endless stream of tokens. A truncated
or corrupt shard is refused before anything starts, with one line that has its path.
"""

import gzip
import json
import os
import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from running import (
    SMALL_MODEL,
    byte_data,
    make_config,
    make_log,
    make_runtime,
    run_trainer,
    train_gpt,
    write_shard,
)

TOKENS = np.arange(1, 201)  # a complete shard of 200 tokens has 1024 + 400 = 1424 bytes


def make_shard(count: int = 200, magic: int = 20240520, version: int = 1) -> bytes:
    header = struct.pack("<3i", magic, version, count).ljust(1024, b"\0")
    return header + TOKENS.astype("<u2").tobytes()


# {what is wrong: (content of the file, words that the message must have)}
DAMAGED = {
    "magic": (make_shard(magic=20240521), ["20240521", "1424 bytes"]),
    "version": (make_shard(version=2), ["20240520, 2", "1424 bytes"]),
    "cut_off": (make_shard()[:-1], ["20240520, 1, 200", "1423 bytes"]),
    "no_tokens": (make_shard(0)[:1024], ["20240520, 1, 0", "1024 bytes"]),
    "half_a_header": (make_shard()[:7], []),
    "empty": (b"", ["0 bytes"]),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_shard_is_refused_with_its_path(tmp_path: Path, name: str, split: str) -> None:
    content, words = DAMAGED[name]
    config = make_config(**byte_data(tmp_path), TRAIN_SEQ_LEN=32, RUN_ID="r")
    assert not any(str(tmp_path) in fault for fault in train_gpt.check_settings(config, {})[0])
    path = tmp_path / f"fineweb_{split}_000001.bin"
    path.write_bytes(content)
    [message] = [fault for fault in train_gpt.check_settings(config, {})[0] if str(path) in fault]
    for word in [*words, "truncated or corrupt shard", "download or make it again"]:
        assert word in message.replace(str(path), ""), message
    assert "\n" not in message


def find_faults(folder: Path) -> str:
    """Return the faults that the trainer finds in a data set, as one text."""
    settings = {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "byte.json", "VOCAB_SIZE": 260}
    faults, _ = train_gpt.check_settings(make_config(**settings, TRAIN_SEQ_LEN=32), {})
    assert all("\n" not in fault for fault in faults)
    return "; ".join(faults)


def test_a_shard_that_is_not_a_regular_file_gives_one_line(tmp_path: Path) -> None:
    byte_data(tmp_path)
    path = tmp_path / "fineweb_train_000001.bin"
    path.symlink_to("nowhere")
    assert f"{path} cannot be read: No such file" in find_faults(tmp_path)
    path.unlink()
    path.mkdir()
    assert str(path) in find_faults(tmp_path) and "directory" in find_faults(tmp_path)
    path.rmdir()
    os.mkfifo(path)  # reading it would wait for a writer
    assert f"{path} cannot be read: Illegal seek" in find_faults(tmp_path)
    path.unlink()
    for name, content in (("tokenizer.sha256", b""), ("tokenizer.sha256", b"\xff\xfe \x00")):
        (tmp_path / name).write_bytes(content)
        assert f"{tmp_path / name} must be one line as sha256sum prints it" in find_faults(tmp_path)


FOREIGN = {  # {kind: (content, words of the message)}
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid x",
        "a Git LFS pointer; run `git lfs",
    ),
    "html": (b"<!DOCTYPE html><html>", "an HTML page; download the file itself"),
    "tar": (b"a.bin".ljust(257, b"\0") + b"ustar\x0000", "a tar archive; unpack it"),
    "gzip": (gzip.compress(b"tokens"), "a file that gzip has packed; unpack it"),
    "zip": (b"PK\x03\x04\x14", "a zip archive; unpack it"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_known_kind_of_file_in_the_place_of_another_is_named(tmp_path: Path, kind: str) -> None:
    content, words = FOREIGN[kind]
    byte_data(tmp_path)
    paths = [tmp_path / name for name in ("fineweb_val_000000.bin", "byte.json")]
    for path in paths:
        path.write_bytes(content)
    for path in paths:
        assert f"{path} is {words}" in find_faults(tmp_path)


def test_a_shard_that_is_refused_is_closed(tmp_path: Path) -> None:
    """While a set grows, a shard that is not complete yet is opened again by every scan."""
    byte_data(tmp_path)
    (tmp_path / "fineweb_val_000000.bin").write_bytes(b"short")
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(train_gpt.RunError, match="truncated or corrupt"):
            train_gpt.open_shard(tmp_path / "fineweb_val_000000.bin")
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_start_opens_each_shard_once_and_reads_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards have 400 KB. Reading all of the challenge's 16 GB would take minutes."""
    data = byte_data(tmp_path, train_tokens=200_000, val_tokens=200_001)
    config = make_config(**{**SMALL_MODEL, **data, "RUN_ID": "r"})
    opened, read = Mock(wraps=os.open), Mock(wraps=os.pread)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("a batch is read"))
    faults, shards = train_gpt.check_settings(config, {})
    assert faults == [] and train_gpt.fingerprint(config, shards)
    train_gpt.Trainer(config, make_runtime(config), make_log(), shards)
    names = sorted(Path(call.args[0]).name for call in opened.call_args_list)
    assert names == ["fineweb_train_000000.bin", "fineweb_val_000000.bin"]
    assert [call.args[1] for call in read.call_args_list] == 4 * [65_536]


def test_files_with_other_names_are_ignored(tmp_path: Path) -> None:
    byte_data(tmp_path)
    names = "val_bytes_000000.bin", "train_000000 (copy).bin", "train_000003.bin.part"
    for name in names:
        write_shard(tmp_path / f"fineweb_{name}", TOKENS)
    assert find_faults(tmp_path) == ""


# {split and numbers of the shards: the number at which there is a gap}
NUMBERS = {"train 0 1 3": 3, "train 2": 2, "train 1 3": 3, "train 1 2 3": None, "val 1": 1}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_of_shards_must_not_have_a_gap(tmp_path: Path, numbers: str) -> None:
    """They begin at 0; those of training shards may begin at 1."""
    split, *each = numbers.split()
    paths = [tmp_path / f"fineweb_{split}_{int(number):06d}.bin" for number in each]
    for path in paths:
        write_shard(path, TOKENS)
    config, wrong_number = make_config(DATA_PATH=tmp_path), NUMBERS[numbers]
    if wrong_number is None:
        assert [s.path for s in train_gpt.Shards(config, split).shards] == paths
    else:
        path = f"{tmp_path}/fineweb_{split}_{wrong_number:06d}.bin"
        words = f"^{path}: the shard with number .* should come next; get that shard, or "
        with pytest.raises(train_gpt.RunError, match=words):
            train_gpt.Shards(config, split)


def write_export(folder: Path, complete: bool = True) -> dict:
    """Write the export.json that tokenize_docs.py would write for the shards in the folder."""
    shards: dict[str, dict] = {"train": {}, "val": {}}
    for path in sorted(folder.glob("fineweb_*.bin")):
        split = path.name.split("_")[1]
        entry = {"tokens": 0, "identity": train_gpt.open_shard(path).identity, "sha256": ""}
        shards[split][path.name] = entry
    export = {"complete": complete, "shards": shards}
    (folder / "export.json").write_text(json.dumps(export))
    return export


def zero_the_tokens(folder: Path) -> None:
    path = folder / "fineweb_train_000000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:1024] + bytes(len(data) - 1024))


# What happens to a data set -> (the change, the words that say it).
CHANGES = {
    "lost val": (
        lambda folder: (folder / "fineweb_val_000001.bin").unlink(),
        "fineweb_val_000001.bin: missing in the folder, 200 tokens",
    ),
    "lost train": (
        lambda folder: (folder / "fineweb_train_000001.bin").unlink(),
        "fineweb_train_000001.bin: missing in the folder, 200 tokens",
    ),
    "zeros": (zero_the_tokens, "fineweb_train_000000.bin: 9000 tokens, "),
    "added": (
        lambda folder: write_shard(folder / "fineweb_train_000002.bin", TOKENS),
        "fineweb_train_000002.bin: 200 tokens, ",
    ),
    "damaged list": (
        lambda folder: (folder / "export.json").write_text("{"),
        "export.json is damaged or was made by another program",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_shards_other_than_those_in_export_json_are_refused(tmp_path: Path, name: str) -> None:
    """A lost last shard, or one with other tokens, would give a wrong result without a word."""
    byte_data(tmp_path)
    for split in ("train", "val"):
        write_shard(tmp_path / f"fineweb_{split}_000001.bin", TOKENS)
    assert find_faults(tmp_path) == ""
    write_export(tmp_path)
    assert find_faults(tmp_path) == ""
    change, words = CHANGES[name]
    change(tmp_path)
    assert words in find_faults(tmp_path)


def test_an_interrupted_export_lists_the_shards_that_must_be_there(tmp_path: Path) -> None:
    byte_data(tmp_path)
    write_export(tmp_path, complete=False)
    write_shard(tmp_path / "fineweb_train_000001.bin", TOKENS)  # written, but not listed yet
    assert find_faults(tmp_path) == ""
    zero_the_tokens(tmp_path)
    assert "fineweb_train_000000.bin: 9000 tokens, " in find_faults(tmp_path)


def test_a_shard_of_both_sets_gives_a_warning(tmp_path: Path) -> None:
    """Then the model was trained on what is scored."""
    settings = byte_data(tmp_path) | {"RUN_ID": "r", "ITERATIONS": 1}
    (tmp_path / "fineweb_train_000001.bin").write_bytes(
        (tmp_path / "fineweb_val_000000.bin").read_bytes()
    )
    run = run_trainer(tmp_path / "run", **SMALL_MODEL | settings)
    assert run.code == 0, run.err
    assert "WARNING: fineweb_val_000000.bin is also a training shard (3000 tokens, " in run.out
