"""A topic of a real broker as a source.

Exact offsets through kills, bad messages, gaps, new partitions, a broker that dies.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drivers import SIGKILLED, Piped, wait_for
from tests.e2e.kafka_marks import ON_A_BROKER
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.kafka_source import KafkaSource, TopicOffsets, open_topic_offsets
from tidegate.jobs.spec.pipeline import ReadLimits
from tidegate.jobs.spec.source_options import KafkaOptions

pytestmark = ON_A_BROKER

START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: clicks
sources:
  web:
    kind: kafka
    kafka:
      servers: {servers}
      topic: clicks
      key: who
      {headers}
    schema: {{at: timestamp, item: string, amount: long, who: string, origin: string}}
    event_time: at
    lag: 1h
    limits: {{rows: 12}}
coalesce: {{idle_timeout: never}}
release: {{mode: pass_through}}
windows:
  per_minute: {{kind: tumbling, size: 1m, keys: [item], aggregates: {{n: count(*), total: sum(amount)}}, lateness: 2m}}
checkpoint: {{idle_interval: 100ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""


def message(number: int) -> str:
    """The payload of a click."""
    return json.dumps(
        {
            "at": (START + timedelta(seconds=number)).isoformat(),
            "item": "ab"[number % 2],
            "amount": number,
        }
    )


def produce(client: KafkaClient, numbers: range, partitions: int = 3) -> None:
    """Clicks, spread over the partitions."""
    for n in numbers:
        client.send(
            "clicks", n % partitions, message(n), key=f"user {n}", headers={"from": "phone"}
        )
    client.flush()


def cut_of(pipeline: Piped) -> dict[str, Any]:
    """Member -> slice of the newest epoch."""
    record = pipeline.log().head().record
    return {} if record is None else record.cut


def caught_up(pipeline: Piped, offsets: TopicOffsets) -> bool:
    """Whether everything the broker holds is in a sealed epoch."""
    read = {member.partition("/")[2]: part["end"] for member, part in cut_of(pipeline).items()}
    return read == {str(partition): end for partition, (_, end) in offsets.read_offsets().items()}


def seen(pipeline: Piped) -> list[tuple[str, int, int]]:
    """(partition, offset, amount) of every released event."""
    rows = pipeline.table("events").to_pylist()
    return sorted((row["_partition"], row["_seq"], row["amount"]) for row in rows)


@pytest.mark.parametrize(("headers", "origin"), [("headers: {origin: from}", "phone"), ("", None)])
def test_every_offset_once(
    jars: tuple[list[Path], list[Path]],
    broker: KafkaServer,
    client: KafkaClient,
    tmp_path: Path,
    headers: str,
    origin: str | None,
) -> None:
    """Drivers killed in the middle of an epoch and a broker killed in the middle of the stream
    change nothing: each offset once.

    Messages that cannot be read are dead letters at their own offset; a transaction's marker is not a
    row; partitions that are added later are read from their beginning; offsets that retention took
    are named, not stepped over.
    """
    offsets = open_topic_offsets(KafkaOptions(servers=broker.servers, topic="clicks"))
    with pytest.raises(TransientError, match="there is no topic clicks"):
        offsets.read_offsets()
    client.topic("clicks", 3)
    produce(client, range(90))
    client.send("clicks", 0, "not json", key="x")
    client.send("clicks", 1, None, key="gone")
    client.send("clicks", 2, json.dumps({"at": "soon", "item": "a"}))
    client.flush()
    client.send("clicks", 0, message(90), transactional=True)
    client.send("clicks", 0, message(93))
    client.flush()
    wanted = {0: (0, 34), 1: (0, 31), 2: (0, 31)}
    deadline = (
        time.monotonic() + 30
    )  # the marker of the transaction comes when the broker is ready for it
    while (found := dict(offsets.read_offsets())) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == wanted
    pipeline = Piped(tmp_path / "p", SPEC.format(servers=broker.servers, headers=headers))
    environment = {"TIDEGATE_SPARK_JARS": ",".join(map(str, jars[1]))}
    assert pipeline.run("move.done:2", "--until-idle", "3", environment=environment) == SIGKILLED, (
        pipeline.log_text()
    )

    driver = pipeline.start("", environment=environment)
    wait_for(lambda: len(cut_of(pipeline)) == 3, driver)
    broker.kill()
    wait_for(lambda: pipeline.said("transient"), driver)
    broker.start()
    client.grow("clicks", 4)
    produce(client, range(100, 140), 4)
    wait_for(lambda: len(cut_of(pipeline)) == 4, driver)
    wait_for(lambda: caught_up(pipeline, offsets), driver)
    driver.terminate()
    assert driver.wait(120) == 0, pipeline.log_text()

    good = (
        {(n % 3, n) for n in range(90)} | {(0, 90), (0, 93)} | {(n % 4, n) for n in range(100, 140)}
    )
    assert [(int(p), amount) for p, _, amount in seen(pipeline)] == sorted(
        good, key=lambda pair: pair
    )
    assert {row["who"] for row in pipeline.table("events").to_pylist() if row["amount"] == 7} == {
        "user 7"
    }
    assert {
        row["origin"] for row in pipeline.table("events").to_pylist() if row["amount"] < 90
    } == {origin}
    places = [(p, seq) for p, seq, _ in seen(pipeline)]
    marker = {("0", 32), ("0", 33)} - set(places)  # the broker may write it after the next message
    assert len(marker) == 1, "the marker of the transaction is no row"
    dead = sorted(
        (row["_partition"], row["_seq"], row["detail"].split(":")[0])
        for row in pipeline.table("dead_letters").to_pylist()
    )
    assert dead == [
        ("0", 30, "the message is not a JSON object"),
        ("1", 30, "a tombstone"),
        ("2", 30, "at is no timestamp"),
    ]

    client.forget("clicks", 0, before=20)
    source = KafkaSource("web", pipeline.spec.sources["web"], offsets)
    source.list_members()
    assert source.plan(Member("web", "0"), {"offset": 20}, ReadLimits()).start == 20
    with pytest.raises(PoisonError, match="offsets 19 to 19 of clicks partition 0 are gone"):
        source.plan(Member("web", "0"), {"offset": 19}, ReadLimits())
