"""The transactional sink on a real broker.

What readers of committed messages see after crashes in and behind a commit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.servers.kafka import KafkaServer
from tests.sinks.conftest import UID, World, make_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TransientError
from tidegate.jobs.sinks import kafka_sink
from tidegate.jobs.sinks.kafka_sink import ExactlyOnceKafkaSink, KafkaMessage
from tidegate.jobs.spec.operations import KafkaSinkSpec

pytestmark = [pytest.mark.kafka, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def read(servers: str, topic: str, isolation: str) -> Counter[str]:
    """Checkpoint id -> messages, as far as a reader sees them."""
    own = {
        "group.id": f"reader-{isolation}",
        "isolation.level": isolation,
        "enable.partition.eof": True,
    }
    consumer = Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest", **own})
    partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    found: Counter[str] = Counter()
    ends: set[int] = set()
    while len(ends) < len(partitions):
        message = consumer.poll(60)
        assert message is not None, "a reader gets to the end"
        error = message.error()
        if error is None:
            epoch = dict(message.headers() or [])["tidegate-epoch"]
            assert isinstance(epoch, bytes)
            found[epoch.decode()] += 1
        else:
            assert error.code() == KafkaError._PARTITION_EOF, error
            ends.add(message.partition() or 0)
    consumer.close()
    return found


def follow(publisher: ExactlyOnceKafkaSink, log: SlotLog) -> None:
    """To the head.

    A broker that has just started does not know its coordinators; a driver tries again, and so do
    we.
    """
    deadline = time.monotonic() + 120
    while publisher.lag(log):
        try:
            publisher.follow(log)
        except TransientError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_each_epoch_once(jars: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    """Publishers die in the middle of a transaction and behind its commit, and take each other's
    place: no row is there twice.
    """
    broker = KafkaServer(jars[0], tmp_path / "broker")
    broker.start()
    given: dict[str, Any] = {
        "kind": "kafka",
        "servers": broker.servers,
        "topic": "out",
        "tables": ["events"],
    }
    of = World(
        LocalStore(tmp_path / "store"),
        tmp_path,
        make_spec(sinks={"out": given | {"delivery": "exactly_once"}}),
    )

    def publisher() -> ExactlyOnceKafkaSink:
        return ExactlyOnceKafkaSink(
            "out", KafkaSinkSpec.model_validate(given), of.spec, of.store, UID
        )

    def breaks_off(*_: object) -> Iterator[KafkaMessage]:
        yield KafkaMessage("out", None, "{}", [("tidegate-epoch", b"never committed")])
        dying._client._producer.flush(60)
        raise KeyboardInterrupt

    try:
        of.seal(3)
        dying, second = publisher(), publisher()
        with (
            patch.object(kafka_sink, "build_row_messages", breaks_off),
            pytest.raises(KeyboardInterrupt),
        ):
            follow(dying, of.log)
        follow(second, of.log)

        of.seal()
        with (
            patch.object(second, "move_position", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            follow(second, of.log)
        third = publisher()
        assert third.lag(of.log) == 1, "the copy does not know of the commit"
        assert third.follow(of.log) == 0, "the ledger does"

        for turn in (second, third, dying):  # each is fenced by the one before, or was
            of.seal()
            follow(turn, of.log)
        sealed = {
            str(filled.epoch.id): 2 for filled in of.log.epochs_between(0, 1, of.log.head().slot)
        }
        assert read(broker.servers, "out", "read_committed") == sealed
        assert read(broker.servers, "out", "read_uncommitted") == sealed | {"never committed": 1}
    finally:
        broker.stop()
