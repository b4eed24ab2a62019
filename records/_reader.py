"""What check.py and package.py stand on:
the log tools of logs/, and files of a folder that nobody vouches for.
"""

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# The one place where a room reaches into another. A record is judged by what its logs say, and a
# second reader of the same logs would sooner or later read them differently. Taken back at once:
# logs/ has names (trace) of the library's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "logs"))
from compare import CAP_BYTES, byte_words, differences, seed_groups  # noqa: E402, F401
from read_log import Run, merge, read_log  # noqa: E402, F401
from stats import Group, Test, summary, welch  # noqa: E402, F401

del sys.path[0]

MAX_BYTES = 64 << 20  # read of one file
MAX_ENTRIES, MAX_DEPTH = 2_000, 4  # of a folder that is looked through
RULE = b"=" * 100


@dataclass
class Listing:
    """The files of a folder by their path inside it ('/' between), with their sizes;
    links are followed inside only.
    """

    root: str
    files: dict[str, int] = field(default_factory=dict)
    leaving: list[str] = field(default_factory=list)  # links to somewhere else
    odd: list[str] = field(default_factory=list)  # neither file, folder nor link: never opened
    problems: list[str] = field(default_factory=list)

    def path(self, name: str) -> str:
        return os.path.join(self.root, *name.split("/"))


def listing(folder: str | os.PathLike[str]) -> Listing:
    """What lies in a folder, without opening any of it.

    Raises nothing: what cannot be listed is in `problems`.
    """
    result = Listing(os.path.abspath(folder))
    todo, seen = [("", 0)], 0
    while todo:
        inside, depth = todo.pop()
        try:
            with os.scandir(os.path.join(result.root, inside)) as found:
                for entry in found:
                    seen += 1
                    if seen > MAX_ENTRIES:
                        result.problems.append(
                            f"more than {MAX_ENTRIES:,} files: the rest was not looked at"
                        )
                        return result
                    name = f"{inside}/{entry.name}" if inside else entry.name
                    if _note(result, entry, name) and not entry.name.startswith(".git"):
                        todo.append((name, depth + 1))
        except (OSError, ValueError) as error:
            result.problems.append(f"{inside or 'the folder'} cannot be listed: {_reason(error)}")
        deep = [name for name, level in todo if level > MAX_DEPTH]
        if deep:
            result.problems.append(
                f"{deep[0]} lies more than {MAX_DEPTH} folders deep: not looked at"
            )
            todo = [(name, level) for name, level in todo if level <= MAX_DEPTH]
    return result


def _note(result: Listing, entry: os.DirEntry[str], name: str) -> bool:
    """Puts an entry where it belongs; True for a folder to look into."""
    try:
        if entry.is_symlink():
            root = os.path.realpath(result.root)
            if os.path.commonpath([root, os.path.realpath(entry.path)]) != root:
                result.leaving.append(name)
                return False
            if entry.is_dir():
                # It is looked through under its own name; as a link it may be a circle.
                return False
        elif entry.is_dir():
            return True
        about = entry.stat()
    except (OSError, ValueError) as error:
        result.problems.append(f"{name} cannot be looked at: {_reason(error)}")
        return False
    if stat.S_ISREG(about.st_mode):
        result.files[name] = about.st_size
    else:
        result.odd.append(name)
    return False


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """A regular file of at most `most` bytes; else OSError or ValueError, in words.

    A pipe is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a file")
        if about.st_size > most:
            raise ValueError(f"{about.st_size:,} bytes: more than {most:,} are not read")
        return file.read(most)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


reason = _reason


def embedded_source(log: bytes, run: Run | None = None) -> bytes | None:
    """The script's text at the start of a text log, exactly; None: there is none.

    It ends before the first line of 100 '='. A script may hold such a line itself: then before the
    one that versions follow, or that makes the text agree with the hash that `run` has of it.
    """
    ends = list(_rules(log))
    for end in ends:
        if log.startswith(b"\n" + RULE + b"\nRunning Python ", end):
            return log[:end]
    known = run.source_sha256 if run else None
    return next(
        (log[:end] for end in ends if known in (None, hashlib.sha256(log[:end]).hexdigest())), None
    )


def _rules(log: bytes) -> Iterator[int]:
    at = log.find(b"\n" + RULE + b"\n")
    for _ in range(8):
        if at < 0:
            return
        yield at
        at = log.find(b"\n" + RULE + b"\n", at + 1)


def first_difference(first: bytes, second: bytes) -> tuple[int, str, str]:
    """The number of the first line, from 1, in which two texts differ, and both lines;
    0: the texts are equal.
    """
    a, b = first.split(b"\n"), second.split(b"\n")
    for number in range(1, max(len(a), len(b)) + 1):
        lines = [part[number - 1] if number <= len(part) else None for part in (a, b)]
        if lines[0] != lines[1]:
            return number, *(
                "(no such line)" if line is None else line.decode("utf-8", "replace").strip()[:80]
                for line in lines
            )
    return 0, "", ""
