"""Where a log holds the text of the script that wrote it: `scripts(text)` gives begin and end.

The challenge's scripts and modded-nanogpt print it in front of a rule and the versions. Nothing of
it is executed.
"""

import re
from collections.abc import Iterator

VERSIONS = re.compile(r"^={20,}[ \t]*\n(?=(?:[^\n]*\n){0,3}Running Py)", re.MULTILINE)
# The first line of a script: an import, a comment or a string.
START = re.compile(r"^(?:import \w|from [\w.]+ import |#|[rRuU]?[\"'])", re.MULTILINE)


def scripts(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each script's text in a log."""
    at = 0
    for versions in VERSIONS.finditer(text):
        if start := START.search(text, at, versions.start()):
            yield start.start(), versions.start()
        at = versions.end()
