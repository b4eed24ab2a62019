"""What the programs of data/ share: where data sets are, and how their files are written and read.

A data set is a folder of shards (fineweb_{train,val}_*.bin, binary files of token ids) with a few
small files beside the shards. Every file appears under its final name only when it is complete.

.producing in the folder means that more shards will come. It holds one line of JSON: the "command"
that makes the rest, a "count" that changes after each part of the work, "val_complete" (true when
all validation shards exist), and after a failure an "error".

tokenizer.sha256 holds the checksum and the path of the tokenizer that made the shards, in the
format of sha256sum. export.json lists the shards of a data set that tokenize_docs.py made:

    {"complete": true, "shards": {"val": {"fineweb_val_000000.bin": {"tokens": 90000,
     "identity": "90000 tokens, 1c291ca3", "sha256": "..."}}, "train": {...}}, ...}

This module builds on cli.py of tools/ and on the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

# Links are not resolved: data/ may be a link to another disk, and tools/ is beside the link.
DATA = Path(os.path.abspath(__file__)).parent
ROOT = DATA.parent
if not (ROOT / "tools" / "cli.py").is_file():
    sys.exit(
        f"error: {ROOT}/tools/cli.py does not exist; run this program from its repository, "
        "as python3 data/..."
    )
sys.path.append(str(ROOT / "tools"))
import cli  # noqa: E402  (of tools/)

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024
IDENTITY_BYTES = 65_536  # at the beginning and at the end of a shard; the identity covers them
TOKENIZER_RECORD = "tokenizer.sha256"
EXPORT_FILE = "export.json"
# How compressed files begin, and how the name of such a file must end.
PACKED_FILES = {b"\x1f\x8b\x08": ".gz", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
PACKED_FILES |= {b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)}
ENTRY_KEYS = {"tokens", "identity", "sha256"}  # of a shard in export.json


def run_tool(main: Callable[[], int | None], interrupted: str = "") -> NoReturn:
    """Run a program's `main` and exit with its exit code, or with 2 after a one-line error.

    `interrupted` is printed after Ctrl-C.
    """
    sys.exit(cli.run(main, refused=2, interrupted=interrupted))


def training_commands(folder: Path, tokenizer: Path, vocab_size: object) -> str:
    """Return the commands that train on a data set, as text that can be pasted into a shell."""
    data = f"DATA_PATH={shlex.quote(os.path.abspath(folder))}"
    more = f"TOKENIZER_PATH={shlex.quote(os.path.abspath(tokenizer))} VOCAB_SIZE={vocab_size}"
    return (
        "to train the challenge's model on a GPU:\n"
        f"  {data} {more} {cli.format_command('train_gpt.py')}\n"
        "to train a small model on a CPU:\n"
        f"  {data} {cli.format_command('data/quickstart.py')}"
    )


def write_atomic(path: Path, *chunks: Any) -> None:
    """Write the chunks to a file that appears complete or not at all; raise ToolError if it fails.

    `chunks` are bytes or arrays. Missing folders are created.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()  # frees the space if the disk is full
        raise cli.ToolError(
            f"{path}: cannot be written ({error.strerror}); free disk space or choose another "
            "folder, then run the same command again to continue"
        ) from None


def write_json(path: Path, value: object) -> None:
    """Write a value as one line of JSON, atomically."""
    write_atomic(path, json.dumps(value).encode() + b"\n")


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, or "" if the path is not a file."""
    if not os.path.isfile(path):
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def identify(head: bytes) -> tuple[str, str]:
    """Say what a file is that is no shard, no tokenizer and no text, by its first 512 bytes.

    Returns (kind, sentence): the kind is "html", "archive", "packed", "lfs", "empty" or "pdf", and
    the sentence says what the file is and what to do. Both are "" for any other file.
    """
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:15].lower()
    if not head:
        return "empty", "is empty; restore the file"
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "lfs", (
            "is a pointer of Git LFS, not the file itself; "
            "run git lfs pull in its repository, or download the file"
        )
    if start.startswith((b"<!doctype html", b"<html")):
        return "html", (
            "is a page of HTML, such as a server sends in place of a file; "
            "download the file again from its direct link"
        )
    if head.startswith(b"PK\3\4"):
        return "archive", "is a ZIP archive; unpack it, and give the files that are in it"
    if head.startswith(b"%PDF-"):
        return "pdf", "is a PDF file; extract its text, for example with pdftotext"
    for magic, suffix in PACKED_FILES.items():
        if head.startswith(magic):
            remedy = f"decompress it, or let its name end in {suffix}"
            return "packed", f"is a compressed file; {remedy}"
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")  # compares a checksum
        return "archive", "is a tar archive; unpack it with tar -xf, and give the files in it"
    return "", ""


def read_head(path: str | Path) -> bytes:
    """Return the first bytes of a file that `identify` needs."""
    with open(path, "rb") as file:
        return file.read(512)


def count_shard_tokens(path: Path) -> int:
    """Return the number of tokens in a shard.

    Raises ToolError if the file cannot be read, has another header, or has another size than its
    header says.
    """
    try:
        with open(path, "rb") as file:
            magic, version, tokens = (int.from_bytes(file.read(4), "little") for _ in range(3))
            size = os.fstat(file.fileno()).st_size
            file.seek(0)
            head = file.read(512)
    except OSError as error:
        exists = os.path.lexists(path)
        fault = f"cannot be read ({error.strerror})" if exists else "is missing"
        raise cli.ToolError(f"{path}: {fault}; restore the file") from None
    is_shard = magic == SHARD_MAGIC and version == SHARD_VERSION
    if not is_shard or size != HEADER_BYTES + 2 * tokens:
        what_it_is = "" if is_shard else identify(head)[1]
        fault = f"is truncated or not a shard ({size:,} bytes); restore the file"
        raise cli.ToolError(f"{path}: {what_it_is or fault}")
    return tokens


def describe_shard(path: Path, whole: bool = True) -> dict[str, Any]:
    """Return a shard's entry for export.json: its tokens, its identity and its SHA-256.

    The identity is the one that the trainer computes: the number of tokens, and a checksum of the
    first and the last 64 KiB. With whole=False only these ends are read, and "sha256" is "".
    """
    tokens = count_shard_tokens(path)
    with open(path, "rb") as file:
        checksum = zlib.crc32(file.read(IDENTITY_BYTES))
        file.seek(max(0, path.stat().st_size - IDENTITY_BYTES))
        checksum = zlib.crc32(file.read(IDENTITY_BYTES), checksum)
    identity = f"{tokens} tokens, {checksum:08x}"
    return {"tokens": tokens, "identity": identity, "sha256": file_sha256(path) if whole else ""}


def check_shard(path: Path, entry: dict[str, Any], whole: bool = False) -> None:
    """Raise ToolError if a shard differs from its entry in export.json.

    With whole=False only the two ends of the shard are read and compared.
    """
    found = describe_shard(path, whole)
    for key in ENTRY_KEYS:
        was_read = found[key] != ""
        if was_read and found[key] != entry[key]:
            raise cli.ToolError(f"{path}: its content differs from export.json; restore the file")


def shard_paths(folder: Path, split: str) -> list[Path]:
    """Return the files whose names are those of shards of a split, in order.

    `split` is "train", "val" or "val_bytes". Only digits may follow it in the name, so
    fineweb_val_bytes_000000.bin is not a shard of "val".
    """
    name = re.compile(rf"fineweb_{split}_\d+\.bin")
    return sorted(path for path in folder.glob("fineweb_*.bin") if name.fullmatch(path.name))


def require_shards(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split in order.

    Raises ToolError if there are none, if a number is missing, or if the data set is not complete.
    """
    found = shard_paths(folder, split)
    if not found:
        fault = f"contains no fineweb_{split}_*.bin" if folder.is_dir() else "is not a folder"
        raise cli.ToolError(
            f"{folder}: {fault}; give the folder of a data set, such as data/datasets/NAME"
        )
    if (folder / ".producing").exists():
        raise cli.ToolError(
            f"{folder}: the data set is not complete (.producing exists); wait until it is complete"
        )
    for number, path in enumerate(found):
        if path.name != f"fineweb_{split}_{number:06d}.bin":
            raise cli.ToolError(
                f"{path}: the next shard must have the number {number:06d}; "
                "restore the missing shard, or move this file away"
            )
    return found


def read_export(folder: Path) -> dict[str, Any] | None:
    """Return the content of export.json, or None if there is no such file.

    Raises ToolError if the file is damaged.
    """
    path = folder / EXPORT_FILE
    if not os.path.lexists(path):
        return None
    try:
        export = json.loads(path.read_bytes())
        entries = [*export["shards"]["val"].values(), *export["shards"]["train"].values()]
        has_all_keys = all(entry.keys() >= ENTRY_KEYS for entry in entries)
        if not has_all_keys or not isinstance(export["complete"], bool):
            raise ValueError("not what tokenize_docs.py writes")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise cli.ToolError(
            f"{path}: is damaged ({error!r}); "
            "restore it, or make the data set again with another --name"
        ) from None
    return export


def relative_path(folder: Path, path: Path) -> str:
    """Return the path of a file as `sha256sum -c` needs it in `folder`, which may be a link."""
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def record_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Write tokenizer.sha256, which records the tokenizer that made the shards of a folder."""
    line = f"{file_sha256(tokenizer)}  {relative_path(folder, tokenizer)}\n"
    write_atomic(folder / TOKENIZER_RECORD, os.fsencode(line))


def find_recorded_tokenizer(folder: Path) -> tuple[str, Path] | None:
    """Return (SHA-256, path) of the tokenizer that made the shards of a folder.

    Returns None if the folder has no tokenizer.sha256. If the data set was copied elsewhere, the
    tokenizer is also looked for beside the shards and in data/tokenizers. If it is in no place, the
    path is the recorded one. Raises ToolError if tokenizer.sha256 is damaged.
    """
    record = folder / TOKENIZER_RECORD
    if not record.is_file():
        return None
    line = os.fsdecode(record.read_bytes()).rstrip("\r\n")
    found = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)  # sha256sum --binary writes the "*"
    if not found:
        raise cli.ToolError(
            f"{record}: must be one line in the format of sha256sum; write it again with sha256sum"
        )
    digest, name = found.groups()
    # Links are resolved only if the recorded path is wrong without resolving them.
    unresolved = Path(os.path.normpath(folder / name))
    recorded = Path(os.path.normpath(folder.resolve() / name))
    in_data = DATA / "tokenizers" / recorded.name
    beside_shards = folder / recorded.name
    for path in (unresolved, in_data, recorded, beside_shards):
        if file_sha256(path) == digest:
            return digest, path
    return digest, recorded


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keep other programs out of a folder during a `with` block.

    If another program has locked the folder, wait for it, or raise ToolError with wait=False. An
    empty folder is removed at the end.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise cli.ToolError(
            f"{error.filename}: is not a folder; "
            "if it is a link to another disk, mount the disk or remove the link"
        ) from None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, folder, wait)
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            folder.rmdir()  # succeeds only if the folder is empty


def lock(descriptor: int, folder: Path, wait: bool) -> None:
    """Lock a folder that is open as `descriptor`.

    Some file systems have no locks, such as NFS with the option nolock, Lustre without the option
    flock, and some drives of cloud services. There the work goes on without a lock, as in the
    trainer, after a note. Raises ToolError if another program has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise cli.ToolError(
            f"{folder}: another process is making this data set; wait until it ends"
        ) from None
    except OSError as error:
        print(
            f"note: {folder}: the file system has no locks ({error.strerror}), so the work goes on "
            "without a lock; do not make the same data set in another process at the same time",
            flush=True,
        )


class ProducingFile:
    """Keeps the file .producing in a folder during a `with` block.

    While the file is there, the trainer knows that more shards will come. `update` changes the
    file, so that the trainer sees that the work goes on. After an error the file stays, with the
    error in it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".producing"
        again = shlex.join([sys.executable, *sys.argv])
        command = f"cd {shlex.quote(os.getcwd())} && {again}"
        self.state = {"command": command, "count": 0, "val_complete": False}

    def update(self, **changes: object) -> None:
        """Write the file anew with a higher "count" and the given changes of its values."""
        self.state |= {**changes, "count": self.state["count"] + 1}
        write_json(self.path, self.state)

    def __enter__(self) -> ProducingFile:
        self.update()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.path.unlink()
        else:
            self.update(error=cli.one_line(error) or type(error).__name__)
