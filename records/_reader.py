"""What check.py and package.py stand on: the log reader, and the files of anybody's folder."""

import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

# The one place where this room reaches into another: what a log says is read in one way only, and
# tested in one way. Taken back at once, since logs/ has names (trace) of the library's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "logs"))
from launch import Parser, missing  # noqa: E402, F401
from read_log import Run, read_log  # noqa: E402, F401
from stats import welch  # noqa: E402, F401

del sys.path[0]

MAX_BYTES = 64 << 20  # read of one file
MAX_ENTRIES = 2_000  # of a folder that is looked through


@dataclass
class Folder:
    """The files below a folder by their path in it ('/' between), with their sizes."""

    root: Path
    files: dict[str, int] = field(default_factory=dict)
    leaving: list[str] = field(default_factory=list)  # links to outside, never followed
    problems: list[str] = field(default_factory=list)

    def read(self, name: str, most: int = MAX_BYTES) -> bytes:
        return read_bytes(self.root / name, most)


def list_folder(path: str | os.PathLike[str]) -> Folder:
    """What lies in a folder, hidden files left out, without opening any of it."""
    folder = Folder(Path(os.path.abspath(path)))
    root, seen = os.path.realpath(path), 0

    def note(error: OSError) -> None:
        folder.problems.append(f"{error.filename}: cannot be listed: {reason(error)}")

    for inside, folders, names in os.walk(folder.root, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted([*names, *folders]):
            seen += 1
            full = os.path.join(inside, name)
            shown = os.path.relpath(full, folder.root).replace(os.sep, "/")
            if os.path.islink(full) and not (os.path.realpath(full) + os.sep).startswith(
                root + os.sep
            ):
                folder.leaving.append(shown)
            elif os.path.isfile(full) and not name.startswith("."):
                folder.files[shown] = os.path.getsize(full)
        if seen > MAX_ENTRIES:
            folder.problems.append(f"more than {MAX_ENTRIES:,} files: the rest was not looked at")
            break
    return folder


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """A regular file of at most `most` bytes; else OSError or ValueError, in words."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    if about.st_size > most:
        raise ValueError(f"{about.st_size:,} bytes: more than {most:,} are not read")
    return Path(path).read_bytes()


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def first_difference(first: bytes, second: bytes) -> tuple[int, str, str]:
    """The number of the first line, from 1, in which two texts differ, and both lines.

    0: they are equal, line ends and empty lines at the end aside.
    """
    a, b = ([line.rstrip() for line in text.rstrip().split(b"\n")] for text in (first, second))
    for number in range(max(len(a), len(b))):
        lines = [part[number] if number < len(part) else None for part in (a, b)]
        if lines[0] != lines[1]:
            strip = lines[0] is None or lines[1] is None or lines[0].strip() != lines[1].strip()
            here, there = (
                "(no such line)"
                if line is None
                else (line.strip() if strip else line).decode("utf-8", "replace")[:80]
                for line in lines
            )
            return number + 1, here, there
    return 0, "", ""
