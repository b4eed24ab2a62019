"""What the tools that make shards share: messages of one line, files that appear complete or not
at all, the file .producing for training, and the record of the tokenizer.

A data set that is being made, or was left incomplete, has a file .producing in its folder.
The file means: more will come.

    {"command": "cd /home/me/golf && python3 data/tokenize_docs.py notes.txt", "pid": 4711,
     "progress": 123456789, "shards_promised": 80, "val_complete": true}

"progress" is a counter that changes at least every 2 seconds while the tool is alive: it counts
bytes or tokens, and one for each time that the file is written. "command" is the command that makes
the rest. "val_complete" says that tokenizer and validation split are complete.
"shards_promised" is the number of training shards of the complete set, null where nobody knows yet.
The tool that has made everything removes the file. Otherwise the file stays. A tool that ends early
by itself adds "error", which says why, such as "its producer was interrupted". A tool that was
killed leaves a counter that no longer changes.

Beside the shards lies tokenizer.sha256: the tokenizer that made them, in the form that
`sha256sum -c` reads, one line of 64 hexadecimal digits, two spaces and the path from there:

    5cbdde...  ../../tokenizers/mine_1024_bpe.model
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HEARTBEAT_SECONDS = 2.0
PROGRESS_NEWS_SECONDS = 0.25
# No work of the tools takes so long without any progress. After that the counter stops, so that
# training which waits for this tool ends.
MAX_SECONDS_WITHOUT_PROGRESS = 1800.0
MAX_ERROR_CHARACTERS = 300
PRODUCING = ".producing"
TOKENIZER_RECORD = "tokenizer.sha256"
TOKENIZER_RECORD_LINE = re.compile(r"([0-9a-f]{64})  ([^\0\n]+)\n?")
# With these, or with those that change the direction of writing, a file that somebody else wrote
# could write anywhere on the terminal.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


class DataError(Exception):
    """A fault the user can act on, in one line: what, where, which value, what to do."""


class StoppedEarlyError(Exception):
    """An end before the data set is complete that is not a fault.

    Its text continues "its producer ".
    """


# === COMMANDS =====================================================================================


class Parser(argparse.ArgumentParser):
    """Shows a tool's own text as its help, and says in one line what is wrong with the options."""

    def __init__(self, description: str, hint: str = "see --help") -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.hint = hint  # where no option is close to what was given

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        wanted = unknown[1].replace("_", "-") if unknown else ""
        options = self._option_string_actions.keys() - {"--help"}
        near = difflib.get_close_matches(wanted, sorted(options), n=1)
        remedy = self.hint if message.startswith("unrecognized") else "see --help"
        remedy = f"did you mean {near[0]}?" if near else remedy
        self.exit(2, f"error: {one_line(message)}; {remedy}\n")


def missing_package(error: ImportError) -> str:
    """One line on a package that is not there."""
    pip = shlex.join([sys.executable, "-m", "pip", "install", "-r", str(ROOT / "requirements.txt")])
    venv = ROOT / ".venv" / "bin" / "python"
    other = f"; or use {venv}" if venv.exists() and str(venv) != sys.executable else ""
    return f"error: {error}; install what is needed: {pip}{other}"


def escaped(text: str) -> str:
    """The text with escapes for control characters; line ends and tabs stay."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: object) -> str:
    """The text as one line."""
    return escaped(" ".join(str(text).split()))


class Console(io.TextIOWrapper):
    """Prints escapes in place of what cannot be shown (a path that is not UTF-8) and of control
    characters. If the console is full, closed or gone, only the text is lost.
    """

    def write(self, text: str) -> int:
        # Our own lines may begin or end with a carriage return: they are rewritten in place.
        begin = len(text) - len(text.lstrip("\r"))
        end = max(begin, len(text.rstrip("\r")))
        with suppress(OSError):
            super().write(text[:begin] + escaped(text[begin:end]) + text[end:])
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
    """The command that runs a script of the repository, ready to paste in the current folder.

    It names the Python that runs this tool: `python3` may be another one, without the packages.
    """
    here = Path.cwd()
    words = [Path(sys.executable), ROOT / script]
    return shlex.join(
        str(word.relative_to(here) if word.is_relative_to(here) else word) for word in words
    )


def command_again(script: str, words: list[str], *variables: str) -> str:
    """The command that runs a tool of data/ again, with these words and with the environment
    variables of these names. It can be pasted in any folder.
    """
    settings = [
        f"{name}={shlex.quote(os.environ[name])} " for name in variables if name in os.environ
    ]
    command = shlex.join([sys.executable, str(ROOT / script), *words])
    return f"cd {shlex.quote(os.getcwd())} && {''.join(settings)}{command}"


def to_train(folder: Path, tokenizer: Path, vocab_size: object) -> str:
    """The settings for the trainer, ready to paste."""
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


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, opened to be read. Raises DataError for a pipe, a device or a folder, which
    could be waited for, or read, without an end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if os.path.isdir(path):
        raise DataError(f"{path}: a folder; name a file in it")
    raise DataError(f"{path}: not a regular file; name another, or move it away")


def read_file(path: str | Path) -> bytes:
    with open_file(path) as handle:
        return handle.read()


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file.

    Raises DataError, with this remedy, for anything else.
    """
    try:
        value = json.loads(read_file(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({one_line(error)}); {remedy}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: damaged (not a JSON object); {remedy}")
    return value


def write_json(path: Path, value: dict[str, Any], *, sync: bool = True) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), sync=sync)


# === WORD TO TRAINING =============================================================================


def record_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Note in a data set's folder which tokenizer of the folder tokenizers/ made it."""
    digest = hashlib.sha256(read_file(tokenizer)).hexdigest()
    line = f"{digest}  ../../tokenizers/{tokenizer.name}\n"
    write_atomic(folder / TOKENIZER_RECORD, os.fsencode(line))


def recorded_tokenizer(folder: Path) -> tuple[str, str]:
    """(SHA-256, path) of the tokenizer that made a data set's shards, empty if that is not
    recorded. Raises DataError if the record is damaged.
    """
    path = folder / TOKENIZER_RECORD
    try:
        text = read_file(path).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return "", ""
    if found := TOKENIZER_RECORD_LINE.fullmatch(text):
        return found[1], found[2]
    raise DataError(
        f"{path}: {text[:40]!r} is not a line that sha256sum writes; "
        "run the command that made this data set again: it writes the file anew"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep all other producers out of a data set's folder.

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
                        "wait until it has ended, or end it"
                    ) from None
            if not is_open_at(handle.fileno(), path):
                # The process that had the lock has removed the file:
                # the next process would lock another file.
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
    """Keeps <folder>/.producing fresh during the work in its `with` block.

    If that makes the complete set, the file is removed; else it tells how the work ended.
    """

    def __init__(self, folder: Path, command: str, *, shards_promised: int | None = None) -> None:
        """`command`: makes the rest of the set if this work ends early."""
        self.path, self.command = folder / PRODUCING, command
        self.shards_promised, self.val_complete = shards_promised, False
        self.done, self.writes, self.lock = 0, 0, threading.Lock()
        self.news, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.keep_fresh, name="producing", daemon=True)

    def advance(self, amount: int) -> None:
        """Note that so many more bytes or tokens are done.

        For one thread; it takes a microsecond.
        """
        if amount:
            self.done += amount
            self.news.set()

    def complete_val(self) -> None:
        """Note that tokenizer and validation split are complete: training may begin."""
        self.val_complete = True
        self.write()

    def write(self, **more: str) -> None:
        with self.lock:  # two threads would write to one temporary file
            self.writes += 1
            state = {
                "command": self.command,
                "pid": os.getpid(),
                "progress": self.done + self.writes,
                "shards_promised": self.shards_promised,
                "val_complete": self.val_complete,
            }
            # Not synced to disk: after a crash of the machine it is out of date in any case.
            write_json(self.path, state | more, sync=False)

    def keep_fresh(self) -> None:
        done, since = self.done, time.monotonic()
        while not self.over.wait(PROGRESS_NEWS_SECONDS):
            self.news.wait(max(0, HEARTBEAT_SECONDS - PROGRESS_NEWS_SECONDS))
            self.news.clear()
            if self.done != done:
                done, since = self.done, time.monotonic()
            if time.monotonic() - since > MAX_SECONDS_WITHOUT_PROGRESS:
                continue
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
    """How a producer ended, in one line."""
    text = one_line(error)
    if isinstance(error, KeyboardInterrupt):
        text = "was interrupted"
    elif isinstance(error, DataError):
        text = f"failed: {text}"
    elif not isinstance(error, StoppedEarlyError):
        text = f"failed: {type(error).__name__}: {text}"
    words = f"its producer {text}"
    if len(words) <= MAX_ERROR_CHARACTERS:
        return words
    return words[: MAX_ERROR_CHARACTERS - 3] + "..."
