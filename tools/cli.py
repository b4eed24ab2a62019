"""Functions that the programs of tools/ and data/ share: options, errors of one line, tables as
text.

This module builds on the standard library only, so that a missing package can be reported.
"""

import argparse
import errno
import os
import re
import shlex
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

if sys.version_info < (3, 10):  # noqa: UP036 - older versions cannot run the rest
    version = sys.version.split()[0]
    sys.exit(f"error: {sys.executable} is Python {version}; use Python 3.10 or newer")

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"  # the README says how to create it
VENV_PYTHON = VENV / "bin" / "python"


class ToolError(Exception):
    """An error that is shown to the user: one line that says what is wrong and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the line ends of the description, and whose errors are one line."""

    def __init__(self, **more: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; --help lists the options\n")

    def require(self, paths: Iterable[Path | str | None], remedy: str) -> None:
        """End the program as for a wrong option if a file or folder that it will read does not
        exist. None stands for an option that was not given."""
        for path in paths:
            if path is not None and not os.path.exists(path):
                self.exit(2, f"error: {one_line(path)}: no such file; {one_line(remedy)}\n")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the most similar of the names; empty if none is
    similar."""
    by_lower = {known.lower(): known for known in names}
    similar = get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[similar[0]]}?" if similar else ""


def number(kind: type, lowest: float, highest: float = 2**63 - 1) -> Callable[[str], Any]:
    """Return the type of an option that is a number of this kind, from `lowest` to `highest`."""
    limits = f"from {lowest:g} to {highest}" if highest < 2**63 - 1 else f">= {lowest:g}"
    wanted = f"a whole number {limits}" if kind is int else f"a number {limits}, such as 0.5"

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if lowest <= kind(text) <= highest:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text} must be {wanted}")

    return parse


def plot_path(text: str) -> Path:
    """The type of an option for the file to which a plot is written."""
    if not text.lower().endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .svg")
    return Path(text)


def run(main: Callable[[], int | None], refused: int = 1, interrupted: str = "") -> int | None:
    """Call a program's main function and return its exit code. A ToolError, and an OSError about a
    file or a full disk, is printed as one line, and the exit code is `refused`.

    If `interrupted` is given, Ctrl-C prints this text and ends the process immediately, even if
    threads are still running.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Text may contain bytes of a path that are not UTF-8.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
        return code
    except ToolError as error:
        # There is more than one line if the error shows a part of a file.
        lines = map(printable, str(error).splitlines())
        text = "\n".join(lines)
        print(f"error: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        if not interrupted:
            return 130
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)
    except BrokenPipeError:
        os._exit(141)  # as after SIGPIPE: the reader of the output, such as head, has closed it
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full:
            remedy = "free disk space, or write to another disk"
        elif error.filename is None:
            raise  # only the traceback says which file it is about, if it is about a file
        else:
            remedy = "give another file or folder"
        where = f"{one_line(error.filename)}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror}; {remedy}", file=sys.stderr)
    return refused


def report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception that nothing caught, for example while a program is imported. A missing
    package is one line; Ctrl-C prints nothing."""
    if isinstance(error, ImportError) and error.name:
        print(f"error: {missing_package(error.name)}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = report_uncaught


def missing_package(package: str) -> str:
    """Return one line that says how to install a package that this Python lacks."""
    package = package.partition(".")[0]
    requirement = package
    for path in (ROOT / "requirements.txt", ROOT / "tools" / "requirements.txt"):
        if re.search(rf"^{package}==", path.read_text("utf-8"), re.MULTILINE):
            requirement = f"-r {shlex.quote(str(path))}"
    # The Python of the README's environment is suggested if it exists and is not running this.
    other = ""
    if VENV_PYTHON.exists() and not os.path.samefile(sys.prefix, VENV):
        other = f"this program with {VENV_PYTHON}, or "
    return f"{package} is missing; run {other}{sys.executable} -m pip install {requirement}"


def format_command(script: str) -> str:
    """Return a command that runs a script of the repository from the current folder. It contains
    the path of the running Python: `python3` may be another one, without the packages."""
    folder = Path.cwd()
    words = []
    for path in (Path(sys.executable), ROOT / script):
        words.append(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
    return shlex.join(words)


def write_shard(path: Path, tokens: Iterable[int]) -> None:
    """Write a small shard of tokens: a header of 256 int32 numbers, then the tokens as uint16."""
    content = array("H", tokens)
    header = array("i", [20240520, 1, len(content), *[0] * 253])
    path.write_bytes(header.tobytes() + content.tobytes())


def shard_identity(path: Path) -> str:
    """Return what train_gpt.py logs of a shard: its number of tokens, and a checksum of its first
    and its last 64 KiB."""
    with open(path, "rb") as file:
        start = file.read(1 << 16)
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        checksum = zlib.crc32(file.read(1 << 16), zlib.crc32(start))
    return f"{int.from_bytes(start[8:12], 'little')} tokens, {checksum:08x}"


def progress(what: str, total: int) -> Any:
    """Return a tqdm progress bar that is updated every 10 seconds."""
    from huggingface_hub.utils import tqdm  # slow to import

    return tqdm(desc=what, total=total, unit_scale=True, mininterval=10, delay=10, leave=False)


def printable(text: str) -> str:
    """Return a text without control characters and lone surrogates, which is safe to print."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in text)


def one_line(text: object) -> str:
    """Return a text as one line that is safe to print."""
    return printable(" ".join(str(text).split()))


def format_cell(value: Any, form: str = "") -> str:
    """Return a cell of a table; None becomes "-"."""
    return "-" if value is None else format(value, form)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are two spaces apart. The first two columns are
    aligned to the left, the others to the right. Columns without values are left out."""
    columns = [[name, *cells] for name, *cells in zip(head, *rows, strict=True)]
    columns = [cells for cells in columns if {*cells[1:]} != {"-"}]
    for number, cells in enumerate(columns):
        align = str.ljust if number < 2 else str.rjust
        width = max(map(len, cells))
        columns[number] = [align(text, width) for text in cells]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def format_numbers(indices: Sequence[int]) -> str:
    """Return indices, which count from 0, as a list of numbers that count from 1: "1, 2, 5"."""
    return ", ".join(str(index + 1) for index in sorted(indices))


def join_some(names: Sequence[Any], most: int = 6, sign: str = ", ") -> str:
    """Return the first `most` names, and how many more there are: "a, b and 4 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return sign.join(map(str, names[:most])) + more
