"""Prints what tests/faults has seen as a table: fault, promise, how long it took, was it kept."""

from collections.abc import Callable, Iterator

import pytest

from faults.live import Live


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(fault, promise): a row of the table of faults")


@pytest.fixture
def ended(
    record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> Callable[[Live], None]:
    """To be told which run has shown it: the time from its fault to its end goes to the table."""
    fault, promise = request.node.get_closest_marker("row").args
    name = getattr(request.node, "callspec", None)
    record_property("fault", fault.replace("..", name.id if name else ".."))
    record_property("promise", promise)
    return lambda run: record_property("seconds", run.took)


def rows(stats: dict[str, list]) -> Iterator[tuple[str, ...]]:
    for outcome in ("passed", "failed"):
        for report in stats.get(outcome, []):
            noted = dict(getattr(report, "user_properties", []))
            if "fault" in noted and report.when == "call":
                seconds = f"{noted['seconds']:.1f} s" if "seconds" in noted else "-"
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
