"""What the tools that make shards share:
faults in one line, files that appear whole, word of the work and of the tokenizer to training.

While a tool adds shards to a data set's folder, the file .producing in it says so,
and training waits for what is to come:

    {"pid": 4711, "time": 1732175924.2, "shards_promised": 80, "progress": 123456789}

"time" (Unix seconds) is when this was written, every 5 s and as soon as there is progress: where it
is 30 s old, the tool has died. "shards_promised" counts the training shards of the complete set,
null where nobody knows yet. "progress" (bytes or tokens) grows as long as the work advances. The
file goes away when the set is complete. Where the work ended before that, it stays and has one key
more: "error", which goes on after "the producer ".

Beside the shards lies tokenizer.sha256: the tokenizer they were made with, as `sha256sum -c` reads
it, one line of 64 hexadecimal digits, two spaces and the path from there:

    5cbdde...  ../../tokenizers/mine_1024_bpe.model
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np

HEARTBEAT_SECONDS = 5.0
PROGRESS_NEWS_SECONDS = 0.25
MAX_ERROR_CHARACTERS = 300
TOKENIZER_RECORD = "tokenizer.sha256"


class DataError(Exception):
    """A fault the user can act on, in one line: what, where, which value, what to do."""


class StoppedEarlyError(Exception):
    """An end before the data set is complete that is no fault.

    Its text goes on after "the producer ".
    """


# === COMMANDS =====================================================================================


class Parser(argparse.ArgumentParser):
    """Shows a tool's own text as its help, and says in one line what is wrong with the options."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def missing_package(error: ImportError) -> str:
    """One line on a package that is not there."""
    root = Path(__file__).resolve().parent.parent
    pip = shlex.join([sys.executable, "-m", "pip", "install", "-r", str(root / "requirements.txt")])
    venv = root / ".venv" / "bin" / "python"
    other = f"; or use {venv}" if venv.exists() and str(venv) != sys.executable else ""
    return f"error: {error}; install what is needed: {pip}{other}"


class Console(io.TextIOWrapper):
    """Prints with escapes what cannot be shown (a path that is not UTF-8); where it is full, closed
    or gone, its text is lost and nothing else.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Run a tool's main and exit."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)  # None where it is closed
        buffer = stream.buffer if stream else io.FileIO(os.devnull, "w")
        lines = bool(stream) and stream.line_buffering
        encoding = stream.encoding if stream else "ascii"
        console = Console(buffer, encoding, "backslashreplace", line_buffering=lines)
        setattr(sys, name, console)
    sys.exit(main())


def command_of(script: str) -> str:
    """A script of the repository and the Python that runs this one, to be pasted here.

    A `python3` of the path may be another one, without the packages.
    """
    root = Path(__file__).resolve().parent.parent
    here = Path.cwd()
    words = [Path(sys.executable), root / script]
    return shlex.join(
        str(word.relative_to(here) if word.is_relative_to(here) else word) for word in words
    )


def to_train(folder: Path, tokenizer: Path, vocab_size: object) -> str:
    """The settings for the trainer, to be pasted."""
    paths = f"DATA_PATH={shlex.quote(str(folder))} TOKENIZER_PATH={shlex.quote(str(tokenizer))}"
    return f"to train: {paths} VOCAB_SIZE={vocab_size}"


def before_what() -> str:
    """The commands to put these settings before."""
    return (
        f"          before {command_of('train_gpt.py')}, whose default sizes are for GPUs; "
        f"on a CPU before {command_of('data/quickstart.py')}, whose model is small"
    )


# === FILES ========================================================================================


def write_atomic(path: Path, *chunks: bytes | np.ndarray, sync: bool = True) -> str:
    """Write a file that appears complete or not at all; returns its SHA-256 in hexadecimal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as handle:
            for chunk in chunks:
                handle.write(chunk)
                digest.update(chunk)
            handle.flush()
            if sync:
                os.fsync(handle.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def write_json(path: Path, value: dict[str, Any], *, sync: bool = True) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), sync=sync)


# === WORD TO TRAINING =============================================================================


def record_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Note in a data set's folder which tokenizer made it: one of the folder tokenizers/."""
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    line = f"{digest}  ../../tokenizers/{tokenizer.name}\n"
    write_atomic(folder / TOKENIZER_RECORD, os.fsencode(line))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other producer out of a data set's folder.

    The lock ends with its process, however that ends.
    Raises DataError where another one is at work there.
    """
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a+") as handle:  # which a child does not inherit
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # of another kind: a file system without locks
                if isinstance(error, BlockingIOError):
                    raise DataError(
                        f"{folder}: another process is making shards in it ({path} is locked); "
                        "wait for its end, or end it"
                    ) from None
            if not is_open_at(handle.fileno(), path):
                # Who had the lock before us has removed the file:
                # whoever comes next would lock another.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class Producer:
    """Keeps <folder>/.producing fresh while the work in its `with` block lasts,
    and tells there how it ended.
    """

    def __init__(self, folder: Path, *, shards_promised: int | None = None) -> None:
        self.path, self.shards_promised, self.progress = folder / ".producing", shards_promised, 0
        self.news, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.keep_fresh, name="producing", daemon=True)

    def advance(self, amount: int) -> None:
        """Note that so many more bytes or tokens are done.

        For one thread; it takes a microsecond.
        """
        if amount:
            self.progress += amount
            self.news.set()

    def write(self, **more: str) -> None:
        # Not synced to disk: what a dead machine leaves behind is out of date in any case.
        write_json(
            self.path,
            {
                "pid": os.getpid(),
                "time": time.time(),
                "shards_promised": self.shards_promised,
                "progress": self.progress,
                **more,
            },
            sync=False,
        )

    def keep_fresh(self) -> None:
        while not self.over.wait(PROGRESS_NEWS_SECONDS):
            self.news.wait(max(0, HEARTBEAT_SECONDS - PROGRESS_NEWS_SECONDS))
            self.news.clear()
            with suppress(OSError):  # a full disk ends the work itself, with its own message
                self.write()

    def __enter__(self) -> Producer:
        self.write()
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.over.set()
        self.news.set()
        self.thread.join()
        made = sum(1 for _ in self.path.parent.glob("fineweb_train_*.bin"))
        if error is None and made < (self.shards_promised or 0):
            error = StoppedEarlyError(f"left after {made} of {self.shards_promised} shards")
        if error is None:
            self.path.unlink(missing_ok=True)
            return
        with suppress(OSError):
            self.write(error=last_words(error))


def last_words(error: BaseException) -> str:
    """How a producer ended, as one line that goes on after "the producer "."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    if not isinstance(error, (StoppedEarlyError, DataError)):
        text = f"{type(error).__name__}: {text}"
    words = text if isinstance(error, StoppedEarlyError) else f"failed: {text}"
    if len(words) <= MAX_ERROR_CHARACTERS:
        return words
    return words[: MAX_ERROR_CHARACTERS - 3] + "..."
