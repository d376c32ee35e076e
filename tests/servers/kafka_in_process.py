"""A broker inside librdkafka, for tests of what reads a topic without a JVM."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Producer

_ANSWER_SECONDS = 60.0


class KafkaInProcess:
    """It listens on a free port of 127.0.0.1 while this object lives; topics have four partitions."""

    def __init__(self) -> None:
        settings = {"test.mock.num.brokers": 1, "log_level": 0, "bootstrap.servers": "none:1"}
        self._producer = Producer(settings)
        (broker,) = self._producer.list_topics(timeout=_ANSWER_SECONDS).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def send(
        self,
        topic: str,
        partition: int,
        values: Sequence[bytes | None],
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Append messages with these headers to a partition."""
        for number, value in enumerate(values):
            self._producer.produce(
                topic, value, key=f"key {number}", partition=partition, headers=list(headers)
            )
        assert self._producer.flush(_ANSWER_SECONDS) == 0
