"""What the commands of tools/ and data/ share: options, errors of one line, tables as text."""

import argparse
import os
import re
import shlex
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

if sys.version_info < (3, 10):  # noqa: UP036 - what follows does not run there
    version = sys.version.split()[0]
    sys.exit(f"error: {sys.executable} is Python {version}: use Python 3.10 or newer")

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"  # as the README makes it
OWN = VENV / "bin" / "python"


class ToolError(Exception):
    """What is wrong, for people: one line, with the remedy."""


class Parser(argparse.ArgumentParser):
    """Its help shows a description with its line ends; wrong usage is one line."""

    def __init__(self, **more: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}: --help lists the options\n")


def number(kind: type, lowest: float, highest: float = 2**63 - 1) -> Callable[[str], Any]:
    """The type of an option that is a number of this kind, from `lowest` to `highest`."""
    limits = f"from {lowest:g} to {highest}" if highest < 2**63 - 1 else f"from {lowest:g} on"
    wanted = f"a whole number {limits}" if kind is int else f"a number {limits}, such as 0.5"

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if lowest <= kind(text) <= highest:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text}: write {wanted}")

    return parse


def picture(text: str) -> Path:
    """The type of an option that names a picture to be written."""
    if not text.lower().endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{text}: name a file that ends in .png or .svg")
    return Path(text)


def run(main: Callable[[], int | None], refused: int = 1, interrupted: str = "") -> int | None:
    """A command's exit code, `refused` if it cannot do its work. What goes wrong is one line.

    interrupted: what to say after Ctrl-C; the process then ends at once, whatever its threads do
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
    try:
        code = main()
        sys.stdout.flush()
        return code
    except ToolError as error:
        lines = map(plain, str(error).splitlines())  # one, unless it shows a part of a file
        text = "\n".join(lines)
        print(f"error: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        if not interrupted:
            return 130
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        sys.stdout.flush()
        os._exit(130)
    except BrokenPipeError:
        os._exit(141)  # what reads the output, such as head, has enough: as of SIGPIPE
    except OSError as error:
        where = one_line(error.filename or "system")
        print(f"error: {where}: {error.strerror or error}: name another one", file=sys.stderr)
    return refused


def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends a tool while it is imported: a missing package is one line, Ctrl-C none."""
    if isinstance(error, ImportError) and error.name:
        print(f"error: {missing(error.name)}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say


def missing(package: str) -> str:
    """What to do about a package that this Python lacks, in one line."""
    package = package.partition(".")[0]
    given = package
    for path in (ROOT / "requirements.txt", ROOT / "tools" / "requirements.txt"):
        if re.search(rf"^{package}==", path.read_text("utf-8"), re.MULTILINE):
            given = f"-r {shlex.quote(str(path))}"
    # No other Python where there is no environment of the README's, or this one belongs to it.
    own = "" if not OWN.exists() or os.path.samefile(sys.prefix, VENV) else f"it with {OWN}, or "
    return f"{package} is missing: run {own}{sys.executable} -m pip install {given}"


def command_of(script: str) -> str:
    """The command that runs a script of the repository in the current folder, ready to paste. It
    names the Python that runs this: `python3` may be another one, without the packages."""
    here = Path.cwd()
    words = [Path(sys.executable), ROOT / script]
    return shlex.join(str(w.relative_to(here) if w.is_relative_to(here) else w) for w in words)


def write_shard(path: Path, tokens: Iterable[int]) -> None:
    """A small shard for a tool's own runs: 256 numbers of 32 bits, then tokens of 16 bits."""
    content = array("H", tokens)
    header = array("i", [20240520, 1, len(content), *[0] * 253])
    path.write_bytes(header.tobytes() + content.tobytes())


def progress(what: str, total: int) -> Any:
    """tqdm's bar of long work, which it shows anew every 10 seconds."""
    from huggingface_hub.utils import tqdm  # slow to import

    return tqdm(desc=what, total=total, unit_scale=True, mininterval=10, delay=10, leave=False)


def plain(text: str) -> str:
    """Others' text without control characters for the terminal and without lone surrogates."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in text)


def one_line(text: object) -> str:
    """A text as one line, as `plain` shows it."""
    return plain(" ".join(str(text).split()))


def cell(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces apart: the first two to the left, numbers to the right; without
    empty columns."""
    columns = [[name, *cells] for name, *cells in zip(head, *rows, strict=True)]
    kept = [cells for cells in columns if {*cells[1:]} != {"-"}]
    for place, cells in enumerate(kept):
        align = str.ljust if place < 2 else str.rjust
        width = max(map(len, cells))
        kept[place] = [align(cell, width) for cell in cells]
    return ["  ".join(row).rstrip() for row in zip(*kept, strict=True)]


def counted(indices: Sequence[int]) -> str:
    """Indices from 0 as people count: 1, 2, 5."""
    return ", ".join(str(index + 1) for index in sorted(indices))


def some(names: Sequence[Any], most: int = 6, sign: str = ", ") -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return sign.join(map(str, names[:most])) + more
