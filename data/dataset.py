"""What the tools that make shards share: the folder of a data set and its files, which appear
complete or not at all.

While .producing is in the folder, more shards will come. It holds one line of JSON: the "command"
that makes the rest, a "count" that changes after each part of the work, "val_complete", and after a
failure an "error".

tokenizer.sha256 beside the shards names the tokenizer that made them, in the form of sha256sum.
export.json lists the shards of a set that was made here:

    {"complete": true, "shards": {"val": {"fineweb_val_000000.bin": {"tokens": 90000,
     "identity": "90000 tokens, 1c291ca3", "sha256": "..."}}, "train": {...}}, ...}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

# Links stay as they are: data/ may be on another disk, and tools/ lies beside the link.
DATA = Path(os.path.abspath(__file__)).parent
ROOT = DATA.parent
if not (ROOT / "tools" / "cli.py").is_file():
    sys.exit(f"error: {ROOT}: no tools/cli.py: run this from the repository, as python3 data/...")
sys.path.append(str(ROOT / "tools"))
import cli  # noqa: E402  (of tools/)

SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024
IDENTITY_BYTES = 65_536  # at the beginning and at the end of a shard
TOKENIZER_RECORD = "tokenizer.sha256"
EXPORT, KEYS = "export.json", {"tokens", "identity", "sha256"}


def run_tool(main: Callable[[], int | None], interrupted: str = "") -> NoReturn:
    """Runs a tool's main and exits; errors are one line. interrupted: what to say after Ctrl-C"""
    sys.exit(cli.run(main, refused=2, interrupted=interrupted))


def how_to_train(folder: Path, tokenizer: Path, vocab_size: object) -> str:
    """The commands that train on a data set, ready to paste."""
    data = f"DATA_PATH={shlex.quote(os.path.abspath(folder))}"
    more = f"TOKENIZER_PATH={shlex.quote(os.path.abspath(tokenizer))} VOCAB_SIZE={vocab_size}"
    return (
        "to train the challenge's model on a GPU, or a small one on a CPU:\n"
        f"  {data} {more} {cli.command_of('train_gpt.py')}\n"
        f"  {data} {cli.command_of('data/quickstart.py')}"
    )


def write_atomic(path: Path, *chunks: Any) -> None:
    """Writes a file that appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()  # of a full disk
        remedy = "make room there, or name another folder; the same command continues"
        raise cli.ToolError(f"{path}: {error.strerror}; {remedy}") from None


def write_json(path: Path, value: object) -> None:
    write_atomic(path, json.dumps(value).encode() + b"\n")


def sha256_of(path: str | Path) -> str:
    """In hexadecimal; empty if there is no such file."""
    if not os.path.isfile(path):
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def shard_tokens(path: Path) -> int:
    """How many tokens a shard has. Raises ToolError for a file that is not a whole shard."""
    try:
        with open(path, "rb") as file:
            words = [int.from_bytes(file.read(4), "little") for _ in range(3)]
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        fault = f"not readable ({error.strerror})" if os.path.lexists(path) else "missing"
        raise cli.ToolError(f"{path}: {fault}: restore it") from None
    if words[:2] != [SHARD_MAGIC, SHARD_VERSION] or size != HEADER_BYTES + 2 * words[2]:
        raise cli.ToolError(f"{path}: truncated, or no shard ({size:,} bytes): restore it")
    return words[2]


def entry_of(path: Path, whole: bool = True) -> dict[str, Any]:
    """A shard's entry in export.json, with the identity that the trainer gives it; unless the whole
    file is read, "sha256" is empty.
    """
    tokens = shard_tokens(path)
    with open(path, "rb") as file:
        checksum = zlib.crc32(file.read(IDENTITY_BYTES))
        file.seek(max(0, path.stat().st_size - IDENTITY_BYTES))
        checksum = zlib.crc32(file.read(IDENTITY_BYTES), checksum)
    identity = f"{tokens} tokens, {checksum:08x}"
    return {"tokens": tokens, "identity": identity, "sha256": sha256_of(path) if whole else ""}


def check_shard(path: Path, entry: dict[str, Any], whole: bool = False) -> None:
    """Raises ToolError if a shard (its ends, or the whole file) differs from its entry."""
    here = entry_of(path, whole)
    if any(here[key] not in ("", entry[key]) for key in KEYS):
        raise cli.ToolError(f"{path}: its content is not what was written: restore it")


def shard_paths(folder: Path, split: str) -> list[Path]:
    """The files with the name of a split's shard, in order. A name has digits only:
    fineweb_val_bytes_000000.bin is no shard of "val".
    """
    name = re.compile(rf"fineweb_{split}_\d+\.bin")
    return sorted(path for path in folder.glob("fineweb_*.bin") if name.fullmatch(path.name))


def shards_of(folder: Path, split: str) -> list[Path]:
    """A split's shards in order. Raises ToolError unless all of them are there."""
    found = shard_paths(folder, split)
    if not found:
        fault = f"no fineweb_{split}_*.bin" if folder.is_dir() else "no such folder"
        raise cli.ToolError(f"{folder}: {fault}: give a data set's folder, data/datasets/...")
    if (folder / ".producing").exists():
        raise cli.ToolError(f"{folder}: .producing is there: wait until the set is complete")
    for number, path in enumerate(found):
        if path.name != f"fineweb_{split}_{number:06d}.bin":
            raise cli.ToolError(
                f"{path}: expected number {number:06d} next: get it, or move this away"
            )
    return found


def read_export(folder: Path) -> dict[str, Any] | None:
    """The content of export.json; None without that file. Raises ToolError if it is damaged."""
    path = folder / EXPORT
    if not os.path.lexists(path):
        return None
    try:
        export = json.loads(path.read_bytes())
        entries = [*export["shards"]["val"].values(), *export["shards"]["train"].values()]
        known = all(entry.keys() >= KEYS for entry in entries)
        if not known or not isinstance(export["complete"], bool):
            raise ValueError("not what tokenize_docs.py writes")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "restore it, or make the set again under another --name"
        raise cli.ToolError(f"{path}: damaged ({error!r}): {remedy}") from None
    return export


def path_from(folder: Path, path: Path) -> str:
    """A file's name as sha256sum -c needs it in a folder, which may be a link."""
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def record_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Notes beside the shards which tokenizer made them."""
    line = f"{sha256_of(tokenizer)}  {path_from(folder, tokenizer)}\n"
    write_atomic(folder / TOKENIZER_RECORD, os.fsencode(line))


def recorded_tokenizer(folder: Path) -> tuple[str, Path] | None:
    """(SHA-256, path) of the tokenizer that made the shards; None if that is not recorded. For a
    set that was copied elsewhere it is looked for beside the shards and in data/tokenizers, too.
    """
    record = folder / TOKENIZER_RECORD
    if not record.is_file():
        return None
    digest, _, name = os.fsdecode(record.read_bytes()).rstrip("\n").partition("  ")
    if len(digest) != 64 or not name:
        raise cli.ToolError(f"{record}: not a line of sha256sum: write it with sha256sum")
    # Links are followed only where the name is wrong without that.
    plain, noted = (Path(os.path.normpath(f / name)) for f in (folder, folder.resolve()))
    places = [plain, DATA / "tokenizers" / noted.name, noted, folder / noted.name]
    return digest, next((path for path in places if sha256_of(path) == digest), noted)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keeps other tools out of a folder. If one is at work there, waits or raises ToolError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        fault = "no folder; if it is a link, its disk is not there: mount that, or remove the link"
        raise cli.ToolError(f"{error.filename}: {fault}") from None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError:
        raise cli.ToolError(f"{folder}: another process makes it now; wait until it ends") from None
    finally:
        os.close(descriptor)
        with suppress(OSError):
            folder.rmdir()  # if nothing was made


class Producing:
    """The file .producing, during the work of a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".producing"
        again = shlex.join([sys.executable, *sys.argv])
        command = f"cd {shlex.quote(os.getcwd())} && {again}"
        self.state = {"command": command, "count": 0, "val_complete": False}

    def touch(self, **news: object) -> None:
        self.state |= {**news, "count": self.state["count"] + 1}
        write_json(self.path, self.state)

    def __enter__(self) -> Producing:
        self.touch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.path.unlink()
        else:
            self.touch(error=cli.one_line(error) or type(error).__name__)
