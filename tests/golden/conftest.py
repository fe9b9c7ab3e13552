"""Prints at the end of the run what became of the recorded cases."""

from collections import Counter
from typing import Any

import pytest

TITLES = {
    "matched": "matched",
    "differs": "differ on purpose (each asserts our own value)",
    "absent": "belong to methods that don't exist here",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in TITLES}
    unexplained: list[str] = []
    for report in terminalreporter.getreports("passed"):
        for key, value in report.user_properties:
            if key == "golden" and report.when == "call":
                counts[value[0]][value[1]] += 1
    for report in terminalreporter.getreports("failed"):
        if "golden_case" in report.nodeid:
            unexplained.append(report.nodeid)
    total = sum(counter.total() for counter in counts.values()) + len(unexplained)
    if not total:
        return
    terminalreporter.section("golden cases of verl and TRL")
    terminalreporter.line(f"{total} cases")
    for kind, title in TITLES.items():
        terminalreporter.line(f"{counts[kind].total():5d} {title}")
        for reason, number in sorted(counts[kind].items(), key=lambda item: (-item[1], item[0])):
            if reason:
                terminalreporter.line(f"      {number:4d}  {reason}")
    terminalreporter.line(f"{len(unexplained):5d} unexplained (failed)")


@pytest.fixture
def record_outcome(request: pytest.FixtureRequest):
    """Return a function that files a case's outcome for the summary."""

    def record(outcome: Any) -> None:
        request.node.user_properties.append(("golden", (outcome.kind, outcome.reason)))

    return record
