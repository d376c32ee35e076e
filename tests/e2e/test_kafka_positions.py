"""Where a topic is read, on a real broker.

Transactions, chosen beginnings, retention and other topics between two runs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.e2e.drivers import Piped, wait_for
from tests.e2e.kafka_marks import ON_A_BROKER
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.jobs.sources.kafka_source import open_topic_offsets
from tidegate.jobs.spec.source_options import KafkaOptions

pytestmark = ON_A_BROKER

START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: positions
sources:
  web:
    kind: kafka
    kafka: {{servers: "{servers}", topic: clicks{more}}}
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 1h
coalesce: {{idle_timeout: never}}
release: {{mode: pass_through}}
checkpoint: {{idle_interval: 100ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""


def message(n: int) -> str:
    """The payload of a click."""
    return json.dumps({"at": (START + timedelta(seconds=n)).isoformat(), "n": n})


def produce(client: KafkaClient, numbers: range, partition: int = 0) -> None:
    """Clicks."""
    for n in numbers:
        client.send("clicks", partition, message(n))
    client.flush()


def events(pipeline: Piped) -> list[int]:
    """The numbers that came out."""
    return sorted(row["n"] for row in pipeline.table("events").to_pylist())


def sealed(pipeline: Piped) -> int:
    """How far partition 0 is sealed."""
    record = pipeline.log().head().record
    return -1 if record is None else int(record.cut["web/0"]["end"])


def test_transactions(
    jars: tuple[list[Path], list[Path]], broker: KafkaServer, client: KafkaClient, tmp_path: Path
) -> None:
    """What was taken back is not an event, and nothing is read behind a transaction that is open.

    When it is committed, all is.
    """
    client.topic("clicks", 1)
    produce(client, range(1))
    client.transaction("back", "clicks", [message(n) for n in (10, 11)]).abortTransaction()
    produce(client, range(1, 2))
    undecided = client.transaction("open", "clicks", [message(2)])
    produce(client, range(3, 4))
    offsets = open_topic_offsets(KafkaOptions(servers=broker.servers, topic="clicks"))
    assert (offsets.read_offsets(), offsets.read_offsets(settled=False)) == (
        {0: (0, 5)},
        {0: (0, 7)},
    )

    pipeline = Piped(tmp_path / "p", SPEC.format(servers=broker.servers, more=""))
    environment = {"TIDEGATE_SPARK_JARS": ",".join(map(str, jars[1]))}
    assert pipeline.run("", "--until-idle", "3", environment=environment) == 0, pipeline.log_text()
    assert (sealed(pipeline), events(pipeline)) == (5, [0, 1])
    driver = pipeline.start("", environment=environment)
    undecided.commitTransaction()
    wait_for(lambda: sealed(pipeline) == 8, driver)
    driver.terminate()
    assert driver.wait(120) == 0, pipeline.log_text()
    assert events(pipeline) == [0, 1, 2, 3]


def test_positions_between_runs(
    jars: tuple[list[Path], list[Path]], broker: KafkaServer, client: KafkaClient, tmp_path: Path
) -> None:
    """A chosen end is kept, added partitions are read whole, retention is named or stops, another
    topic of the name stops.
    """
    environment = {"TIDEGATE_SPARK_JARS": ",".join(map(str, jars[1]))}
    client.topic("clicks", 1)
    produce(client, range(5))
    pipeline = Piped(tmp_path / "p", SPEC.format(servers=broker.servers, more=", start: latest"))

    def run() -> int:
        return pipeline.run("", "--until-idle", "3", environment=environment)

    assert run() == 0, pipeline.log_text()
    assert (sealed(pipeline), events(pipeline)) == (5, [])
    produce(client, range(5, 15))
    client.grow("clicks", 2)
    produce(client, range(100, 103), partition=1)
    assert run() == 0, pipeline.log_text()
    assert events(pipeline) == [*range(5, 15), *range(100, 103)]

    produce(client, range(15, 20))
    client.forget("clicks", 0, before=18)
    assert run() == 1, pipeline.log_text()
    assert "offsets 15 to 17 of clicks partition 0 are gone" in pipeline.log_text()
    assert events(pipeline)[-1] == 102
    pipeline.change_spec(
        SPEC.format(servers=broker.servers, more=", start: latest, on_gap: report")
    )
    assert run() == 0, pipeline.log_text()
    assert events(pipeline) == [*range(5, 15), 18, 19, *range(100, 103)]
    (gap,) = pipeline.table("dead_letters").to_pylist()
    assert (gap["_seq"], gap["reason"], gap["detail"]) == (
        15,
        "missing_offsets",
        "offsets 15 to 17 were removed by retention before they were read",
    )

    client.drop("clicks")
    client.topic("clicks", 2)
    produce(client, range(1000, 1040))
    assert run() == 1, pipeline.log_text()
    assert "it is not the topic that source web read" in pipeline.log_text()
    assert events(pipeline)[-1] == 102
