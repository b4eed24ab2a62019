"""What the tools that make shards share: errors of one line, files that appear complete or not at
all, the folder of a data set, and the file .producing in it.

While .producing is in the folder, more shards will come. It holds one line of JSON:

    {"command": "cd /home/me/golf && python3 data/tokenize_docs.py notes", "count": 41,
     "val_complete": true}

"command" makes the rest of the set. "count" changes each time that the tool writes the file, which
is after each part of its work. "val_complete" says that the validation shards are there. The tool
removes the file when the set is complete. A tool that fails leaves it, and adds "error".

tokenizer.sha256 beside the shards names the tokenizer that made them, in the form of sha256sum.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024
TOKENIZER_RECORD = "tokenizer.sha256"


class DataError(Exception):
    """A fault that the user can act on, in one line: what, where, which value, what to do."""


class Parser(argparse.ArgumentParser):
    """Shows a tool's docstring as its help, and wrong options as one line."""

    def __init__(self, description: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; see --help\n")


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 on")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def one_line(text: object) -> str:
    """The text as one line, with escapes for control characters."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Runs a tool's main and exits; errors are one line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
    try:
        sys.exit(main())
    except DataError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = error.filename or "system"
        print(f"error: {one_line(where)}: {error.strerror}; name another", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues where it stopped", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)  # without waiting for threads, which may wait for a network


def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while a tool is imported ends it without a traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = end


def missing_package(error: ImportError) -> str:
    packages = shlex.quote(str(ROOT / "requirements.txt"))
    return f"error: {error}; run {sys.executable} -m pip install -r {packages}"


def command_of(script: str) -> str:
    """The command that runs a script of the repository in the current folder, ready to paste. It
    names the Python that runs this: `python3` may be another one, without the packages.
    """
    here = Path.cwd()
    words = [Path(sys.executable), ROOT / script]
    return shlex.join(str(w.relative_to(here) if w.is_relative_to(here) else w) for w in words)


def how_to_train(folder: Path, tokenizer: Path, vocab_size: object) -> str:
    """The commands that train on a data set, ready to paste."""
    data = f"DATA_PATH={shlex.quote(str(folder.resolve()))}"
    more = f"TOKENIZER_PATH={shlex.quote(str(tokenizer.resolve()))} VOCAB_SIZE={vocab_size}"
    return (
        "to train the challenge's model on a GPU, or a small one on a CPU:\n"
        f"  {data} {more} {command_of('train_gpt.py')}\n"
        f"  {data} {command_of('data/quickstart.py')}"
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
        raise DataError(f"{path}: {error.strerror}; {remedy}") from None


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
    """How many tokens a shard has. Raises DataError for a file that is not a whole shard."""
    with open(path, "rb") as file:
        words = [int.from_bytes(file.read(4), "little") for _ in range(3)]
    size = path.stat().st_size
    if words[:2] != [SHARD_MAGIC, SHARD_VERSION] or size != HEADER_BYTES + 2 * words[2]:
        raise DataError(f"{path}: no whole shard ({size:,} bytes): make or download it again")
    return words[2]


def shards_of(folder: Path, split: str) -> list[Path]:
    """A split's shards in order. Raises DataError unless all of them are there."""
    found = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    if not found:
        fault = f"no fineweb_{split}_*.bin" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {fault}; give a data set's folder, data/datasets/...")
    if (folder / ".producing").exists():
        raise DataError(f"{folder}: .producing is there: wait until the set is complete")
    first = int(found[0].stem.endswith("_000001"))  # numbers begin at 0 or 1
    for number, path in enumerate(found, first):
        if path.name != f"fineweb_{split}_{number:06d}.bin":
            raise DataError(f"{path}: expected number {number:06d} next; get it, or move this")
    return found


def record_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Notes beside the shards which tokenizer made them."""
    line = f"{sha256_of(tokenizer)}  {os.path.relpath(tokenizer, folder)}\n"
    write_atomic(folder / TOKENIZER_RECORD, os.fsencode(line))


def recorded_tokenizer(folder: Path) -> tuple[str, Path] | None:
    """(SHA-256, path) of the tokenizer that made the shards; None if that is not recorded."""
    record = folder / TOKENIZER_RECORD
    if not record.is_file():
        return None
    digest, _, name = os.fsdecode(record.read_bytes()).rstrip("\n").partition("  ")
    if len(digest) != 64 or not name:
        raise DataError(f"{record}: not a line of sha256sum; make the data set again")
    return digest, Path(os.path.normpath(folder / name))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other tools out of a data set's folder. Raises DataError if one is at work there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"{folder}: another process makes it now; wait until it ends") from None
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
            self.touch(error=one_line(error) or type(error).__name__)
