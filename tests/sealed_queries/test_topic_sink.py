"""A job that writes to a topic of a real broker, and is restored."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from tests.e2e.kafka_marks import ON_A_BROKER
from tests.sealed_queries.apps import SCRIPTS, Clicks
from tests.sealed_queries.rig import KilledJob
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.checkpoints.batch_notes import BatchNotes, SinkRewind

pytestmark = ON_A_BROKER
_ROWS = 60  # of a file
_TOPIC = "clicks"


class Publish(Clicks):
    """Files to a topic whose readers can bear a batch twice."""

    name = "publish"
    queries: ClassVar[tuple[str, ...]] = ("published",)
    repeatable: ClassVar[tuple[str, ...]] = ("published",)
    servers: ClassVar[str] = ""

    @classmethod
    def prepare(cls, folder: Path, resources: ExitStack) -> None:
        """Start the broker and make the topic: it would have several partitions otherwise."""
        jars = ensure_jars("kafka-broker", BROKER)
        broker = KafkaServer(jars, folder)
        broker.start()
        resources.callback(broker.stop)
        with closing(KafkaClient(jars, broker.servers)) as client:
            client.topic(_TOPIC, 1)
        cls.servers = broker.servers

    @property
    def script(self) -> Path:
        return SCRIPTS / "files_to_topic.py"

    def arguments(self) -> list[str]:
        return [str(self.folder / "in"), self.servers, _TOPIC]

    def conf(self) -> dict[str, str]:
        return {"spark.jars": ",".join(map(str, spark_jars("spark-kafka", CONNECTOR)))}

    def outputs(self) -> dict[str, Any]:
        return {"messages": [one.value() for one in self.read_topic()]}

    def read_topic(self) -> list[Any]:
        """All messages of the topic, which has one partition."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "reader"})
        place = TopicPartition(_TOPIC, 0, 0)
        _, end = consumer.get_watermark_offsets(place, timeout=60)
        consumer.assign([place])
        found: list[Any] = []
        while len(found) < end:
            message = consumer.poll(60)
            assert message is not None
            assert message.error() is None, message.error()
            found.append(message)
        consumer.close()
        return found


def test_a_restore_is_announced_in_the_topic(tmp_path: Path) -> None:
    """The message of a pipeline's sink comes before the batches that come again."""
    with ExitStack() as resources:
        Publish.prepare(tmp_path / "broker", resources)
        job = resources.enter_context(closing(KilledJob(tmp_path / "job", {}, Publish, 3)))
        job.run_to_end_of_input()
        first = job.read_line()[0]
        plan = job.restore(first.id)
        job.run_to_end_of_input()
        notes = BatchNotes.from_manifest(job.read_line()[-1])
        messages = job.app.read_topic()  # type: ignore[attr-defined]
    (sink,) = plan.sinks
    assert (sink.rewind, sink.newest, sink.batch) == (SinkRewind.ANNOUNCE, 2, 0)
    assert sink.sink == f"kafka://{Publish.servers}/{_TOPIC}"
    assert notes is not None
    assert notes.queries["published"].batch == 2
    values = [one.value() for one in messages]
    at = values.index(None)
    assert (at, len(values)) == (3 * _ROWS, 5 * _ROWS + 1)
    assert sorted(values[at + 1 :]) == sorted(values[_ROWS:at])
    headers = dict(messages[at].headers())
    notice = json.loads(headers["tidegate-restore"])
    assert headers["tidegate-uid"].decode() == notice["uid"] == first.uid
    assert (notice["query"], notice["after_batch"]) == ("published", 0)
    assert (notice["timeline"], notice["after_epoch"]) == (1, 1)
    assert notice["lineage"] == [
        {"timeline": 0, "first": 1, "last": 1},
        {"timeline": 1, "first": 2, "last": None},
    ]
