"""Prints the fault matrix: a row a test that says what its fault and its promise are."""

from collections.abc import Callable, Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(fault, promise): a row of the fault matrix")


@pytest.fixture
def see(
    record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> Callable[[str], None]:
    """Notes what was seen, for the table."""
    row = request.node.get_closest_marker("row")
    for name, text in zip(("fault", "promise"), row.args):
        record_property(
            name, text.replace("..", request.node.callspec.id) if ".." in text else text
        )
    return lambda text: record_property("seen", text)


def rows(stats: dict[str, list]) -> Iterator[tuple[str, ...]]:
    """(fault, promise, seen, ok) of the reports that have a row."""
    for outcome in ("passed", "failed"):
        for report in stats.get(outcome, []):
            noted = dict(getattr(report, "user_properties", []))
            if "fault" in noted:
                seen = noted.get("seen") or str(report.longreprtext).strip().splitlines()[-1]
                yield noted["fault"], noted["promise"], seen, "yes" if outcome == "passed" else "NO"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = sorted(rows(terminalreporter.stats))
    if not found:
        return
    table = [("fault", "promise", "seen", "ok"), *found]
    widths = [min(64, max(len(row[column]) for row in table)) for column in range(4)]
    terminalreporter.section("fault matrix")
    for row in table:
        terminalreporter.write_line(
            " | ".join(cell[:64].ljust(width) for cell, width in zip(row, widths)).rstrip()
        )
    kept = sum(row[3] == "yes" for row in found)
    terminalreporter.write_line(f"{kept} of {len(found)} promises kept")
