"""What several end-to-end tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.infra.kafka import BROKER, CONNECTOR, ensure_jars
from tidegate.jobs.spec.errors import TransientError


@pytest.fixture(scope="session")
def jars() -> tuple[list[Path], list[Path]]:
    """Kafka's broker and Spark's connector; without a registry that has them there is nothing to test."""
    try:
        return ensure_jars("kafka-broker", BROKER), ensure_jars("spark-kafka", CONNECTOR)
    except TransientError as error:
        pytest.skip(f"no registry with Kafka's jars: {error.message}")
