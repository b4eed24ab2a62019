"""Where a log holds the text of the script that wrote it: `scripts(data)` gives begin and end.

Nothing of it is executed. The time is linear in the size of the log.
"""

import re
from collections.abc import Iterator

MAX_LINES_IN_FRONT = 200  # comments, strings and empty lines in front of the first import

# The first line of a script: an import or a docstring; where a log begins, or behind a rule, any
# comment or string.
SCRIPT_START = re.compile(
    rb"^(?:import [\w.]+(?: as \w+)?(?:, ?[\w., ]+)?[ \t]*(?:#[^\n]*)?$|"
    rb"from [\w.]+ import [\w(]|#!/|[rR]?\"\"\"|[rR]?''')|"
    rb"(?:\A|^={20,}[ \t]*\n)\s*(?P<text>[rRuU]?[#\"'])",
    re.MULTILINE,
)
DEFINITION = re.compile(rb"^(?:def|class) \w", re.MULTILINE)
# Behind the challenge's scripts come a rule and the versions; behind others the log's first lines.
VERSIONS_BEHIND = re.compile(rb"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
LOG_BEHIND = re.compile(
    rb"^(?:={20,}[ \t]*$|logs/[^\n]{1,300}\.txt[ \t]*$|val_bpb:enabled |Running Python |"
    rb"Hyperparameters:[ \t]*$|run_id:\S|seed:\d|model_params:\d|step:\d{1,9}/\d)",
    re.MULTILINE,
)


class Search:
    """The next match of an expression, for places that only grow: no part of the data is searched
    twice."""

    def __init__(self, expression: re.Pattern[bytes], data: bytes) -> None:
        self.expression, self.data = expression, data
        self.match, self.searched = None, -1

    def behind(self, place: int) -> "re.Match[bytes] | None":
        known = self.searched >= 0 and (self.match is None or self.match.start() >= place)
        if not known:
            self.match, self.searched = self.expression.search(self.data, place), place
        return self.match


def scripts(data: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each script's text in a log; the end is that of the log where nothing
    follows the script."""
    versions, definitions = Search(VERSIONS_BEHIND, data), Search(DEFINITION, data)
    lines_behind, at = Search(LOG_BEHIND, data), 0
    while start := SCRIPT_START.search(data, at):
        begin = start.start("text") if start["text"] else first_line(data, start.start(), at)
        end = versions.behind(begin)
        if end is None:
            definition = definitions.behind(begin)
            if definition is None:
                return
            end = lines_behind.behind(definition.end())
        at = end.start() if end else len(data)
        yield begin, at


def first_line(data: bytes, begin: int, least: int) -> int:
    """Where the comments, strings and empty lines in front of an import begin."""
    for _ in range(MAX_LINES_IN_FRONT):
        if begin <= least:
            break
        line = data.rfind(b"\n", 0, begin - 1) + 1
        if line < least or data[line : line + 1] not in (b"#", b'"', b"'", b"\n"):
            break
        begin = line
    return begin
