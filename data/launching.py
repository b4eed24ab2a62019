"""What torchrun prints when a process ends is left out of a command's error lines.

    torchrun ... 2>&1 >/dev/null | python3 data/launching.py

torchrun ends with 40 to 60 lines about itself if one of its processes fails or is told to stop.
They come after the trainer's own last line, which says what to do.
"""

from __future__ import annotations

import os
import re
import sys

# Lines of torchrun's own logger, such as
# E1123 01:48:17.083000 8426 torch/distributed/elastic/multiprocessing/api.py:1002] failed ...
LOGGED = re.compile(
    r"\[?[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ .*\btorch/distributed/(elastic|run|launcher)"
)
# Its notice that each process has one thread, which comes first where OMP_NUM_THREADS is not set.
NOTICE = re.compile(r"(\*{30,}|Setting OMP_NUM_THREADS environment variable .*)?$")
TRACEBACK = "Traceback (most recent call last):"
RUNPY_FRAME = re.compile(r'  File "(<frozen runpy>|.*/runpy\.py)", line ')
TORCHRUN_FRAME = re.compile(
    r'  File ".*/(torch/distributed/(run|elastic/.*|launcher/.*)\.py|bin/torchrun)", line '
)
RANK = re.compile(r"\s+rank +: (\d+)")
EXIT_CODE = re.compile(r"\s+exitcode +: (-?\d+)")
ERROR = re.compile(r"[\w.]*(Error|Exception)\b.*:? ")


def starts_torchrun(words: list[str]) -> bool:
    """Does this command start torchrun?"""
    return os.path.basename(words[0]) == "torchrun" or "torch.distributed.run" in words


class Report:
    """Separates torchrun's own lines from those of its processes."""

    def __init__(self) -> None:
        self.hidden: list[str] = []
        self.undecided: list[str] = []  # the first lines of a traceback: whose is it?
        self.ending = False  # torchrun's own traceback has begun: all that follows is its own
        self.anything_shown = False

    def shown(self, line: str) -> list[str]:
        """The lines to show, now that this one has come."""
        is_notice = not self.anything_shown and NOTICE.match(line)
        if self.ending or is_notice or LOGGED.match(line):
            self.hidden.append(line)
            return []
        if self.undecided or line.startswith(TRACEBACK):
            self.undecided.append(line)
            return self.decide(line)
        return self.note([line])

    def decide(self, line: str) -> list[str]:
        """What to show of a traceback whose newest line is this one."""
        if line.startswith((TRACEBACK, "    ")) or RUNPY_FRAME.match(line):
            return []
        lines, self.undecided = self.undecided, []
        if TORCHRUN_FRAME.match(line):
            self.ending = True
            self.hidden += lines
            return []
        return self.note(lines)

    def note(self, lines: list[str]) -> list[str]:
        self.anything_shown = True
        return lines

    def rest(self) -> list[str]:
        """What is left to show when no more lines will come."""
        lines, self.undecided = self.undecided, []
        return self.note(lines) if lines else []

    def unsaid(self) -> str:
        """Why torchrun ended, in words, if none of its processes could say so; else empty."""
        cause = self.cause()
        killed = re.search(r"exit code -\d", cause)
        return cause if killed or not self.anything_shown else ""

    def cause(self) -> str:
        """Why torchrun ended, in words, from what was left out; empty if it does not say."""
        roots = [i for i, line in enumerate(self.hidden) if line.startswith("Root Cause")]
        text = "".join(self.hidden[roots[-1] :] if roots else [])
        rank, code = RANK.search(text), EXIT_CODE.search(text)
        if rank and code:
            return f"rank {rank[1]} ended with exit code {code[1]}"
        errors = [line.strip() for line in self.hidden if ERROR.match(line)]
        return errors[-1] if errors else ""


def main() -> None:
    """Copies standard input to standard error, without torchrun's own lines."""
    report = Report()
    for line in sys.stdin:
        for shown in report.shown(line):
            print(shown, end="", file=sys.stderr, flush=True)
    for shown in report.rest():
        print(shown, end="", file=sys.stderr, flush=True)
    if report.unsaid():
        print(f"torchrun: {report.unsaid()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("error: launching.py takes no arguments: it filters torchrun's standard error")
    sys.stdin.reconfigure(errors="backslashreplace")
    main()
