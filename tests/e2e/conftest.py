"""What several end-to-end tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.infra.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tidegate.jobs.spec.errors import TransientError


@pytest.fixture(scope="session")
def jars() -> tuple[list[Path], list[Path]]:
    """Kafka's broker and Spark's connector; without a registry that has them there is nothing to test."""
    try:
        return ensure_jars("kafka-broker", BROKER), spark_jars("spark-kafka", CONNECTOR)
    except TransientError as error:
        pytest.skip(f"no registry with Kafka's jars: {error.message}")
