"""What the command-line tools share.

Parser                 wrong usage is one line, exit code 2
run(main)              a tool's main: a missing package or a refusal is one line, exit code 1
missing(package)       what to do about a package that is not installed
python_of_runs()       a Python that has what a run needs
cell, table, ranges    tables as text
"""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / ".venv" / "bin" / "python"  # as the README makes it


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}: --help lists the options\n")


def run(main: Callable[[], int]) -> int:
    """A tool's exit code. A package that is missing is one line."""
    try:
        return main()
    except ImportError as error:
        if not error.name:
            raise
        print(f"error: {missing(error.name)}", file=sys.stderr)
        return 1


def end_with_the_reader() -> None:
    """A reader that closes the pipe, as a pager does, ends the tool in silence. Not for a tool that
    has started other processes: it must live to end them."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def in_own(package: str) -> bool:
    """Does the project's own environment have this package?"""
    return any(ROOT.glob(f".venv/lib/python3*/site-packages/{package}"))


def python_of_runs() -> str:
    """This Python, or the project's own where only that one has what ablate.py and a run need."""
    lacking = [name for name in ("torch", "tqdm") if importlib.util.find_spec(name) is None]
    return str(OWN) if lacking and all(map(in_own, lacking)) else sys.executable


def missing(package: str, install: str = "", python: str = sys.executable) -> str:
    """What to do about a package that a Python lacks, in one line."""
    package = package.partition(".")[0]
    own = f"it with {OWN}, which has it, or " if in_own(package) else ""
    return f"{package} is missing: run {own}{python} -m pip install {install or package}"


def cell(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Aligned columns, two spaces apart: the first `left` to the left, numbers to the right;
    without empty columns."""
    kept = [c for c in range(len(head)) if c < left or any(row[c] != "-" for row in rows)]
    widths = {c: max(len(head[c]), *(len(row[c]) for row in rows)) for c in kept}
    return [
        "  ".join(
            row[c].ljust(widths[c]) if c < left else row[c].rjust(widths[c]) for c in kept
        ).rstrip()
        for row in (head, *rows)
    ]


def ranges(indices: Sequence[int]) -> str:
    """Numbers from 1, with ranges: 1-3, 5."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index:
            parts[-1][1] = index + 1
        else:
            parts.append([index + 1, index + 1])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
