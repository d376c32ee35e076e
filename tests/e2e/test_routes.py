"""The three routes of `routes`, as a test: `make kafka` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.routes import by_all_routes

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(
        "ignore:unclosed <socket:ResourceWarning"
    ),  # py4j leaves them to the garbage collector
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.usefixtures("jars")
def test_three_routes_one_result(tmp_path: Path) -> None:
    """Flights by objects, by landing and by Kafka, each killed in the middle.

    Windows and events are those of the batch.
    """
    outcomes = by_all_routes(tmp_path, days=2)
    assert [(outcome.route, outcome.problems) for outcome in outcomes] == [
        ("objects", ()),
        ("landing", ()),
        ("kafka", ()),
    ]
    assert len({outcome.windows for outcome in outcomes}) == 1
