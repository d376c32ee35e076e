"""Marks of tests that run drivers against a real Kafka broker."""

from __future__ import annotations

import pytest

ON_A_BROKER = [
    pytest.mark.kafka,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(
        "ignore:unclosed <socket:ResourceWarning"
    ),  # py4j leaves them to the garbage collector
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
