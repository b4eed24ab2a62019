"""The table of faults: what was broken, what was promised, how long it took, was it kept.

A test with the mark `row(fault, promise)` is a row of it. tests/faults breaks whole runs; what
breaks a part alone is tested beside that part. `python -m pytest -m row tests` shows all of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(fault, promise): a row of the table of faults")


@pytest.fixture(autouse=True)
def noted(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> None:
    """What a row says. `..` stands for the test's parameters."""
    mark = request.node.get_closest_marker("row")
    if mark:
        fault, promise = mark.args
        name = getattr(request.node, "callspec", None)
        record_property("fault", fault.replace("..", name.id if name else ".."))
        record_property("promise", promise)


@pytest.fixture
def ended(record_property: Callable[[str, object], None]) -> Callable[[Any], None]:
    """To be told which run has shown it: the time from its fault to its end goes to the table."""
    return lambda run: record_property("seconds", run.took)


def rows(stats: dict[str, list]) -> Iterator[tuple[str, ...]]:
    for outcome in ("passed", "failed"):
        for report in stats.get(outcome, []):
            noted = dict(getattr(report, "user_properties", []))
            if "fault" in noted and report.when == "call":
                seconds = f"{noted.get('seconds', report.duration):.1f} s"
                kept = "yes" if outcome == "passed" else "NO"
                yield noted["fault"], noted["promise"], seconds, kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = list(rows(terminalreporter.stats))
    if not found:
        return
    table = [("fault", "promise", "it took", "kept"), *found]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    terminalreporter.section("faults")
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line(" | ".join(cells).rstrip())
    kept = sum(row[3] == "yes" for row in found)
    terminalreporter.write_line(f"{kept} of {len(found)} promises kept")
