"""What several end-to-end tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser import browser_of_the_machine
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.errors import TransientError


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for the tests of a module."""
    with browser_of_the_machine() as browser:
        yield browser


@pytest.fixture(scope="session")
def jars() -> tuple[list[Path], list[Path]]:
    """Kafka's broker and Spark's connector.

    Without a registry that has them there is nothing to test.
    """
    try:
        return ensure_jars("kafka-broker", BROKER), spark_jars("spark-kafka", CONNECTOR)
    except TransientError as error:
        pytest.skip(f"no registry with Kafka's jars: {error.message}")


@pytest.fixture
def broker(jars: tuple[list[Path], list[Path]], tmp_path: Path) -> Iterator[KafkaServer]:
    """A broker of the test's own."""
    server = KafkaServer(jars[0], tmp_path / "broker")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(jars: tuple[list[Path], list[Path]], broker: KafkaServer) -> Iterator[KafkaClient]:
    """A client of that broker."""
    found = KafkaClient(jars[0], broker.servers)
    yield found
    found.close()
