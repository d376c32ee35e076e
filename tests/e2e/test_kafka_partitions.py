"""A hundred partitions of a real topic.

Each a member with its own frontier and its own back-pressure, each offset once.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.e2e.drivers import SIGKILLED, Piped, wait_for
from tests.e2e.kafka_marks import ON_A_BROKER
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.manifest import Manifest

pytestmark = ON_A_BROKER

PARTITIONS = 100
QUIET, AHEAD = 42, 7
"""One partition has a single row and falls silent; one is an hour ahead of all others."""
START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = """\
apiVersion: tidegate/v1
name: wide
sources:
  web:
    kind: kafka
    kafka: {{servers: "{servers}", topic: wide}}
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 1s
    limits: {{rows: 5}}
coalesce: {{idle_timeout: never}}
release: {{mode: pass_through, max_ahead: 10m}}
windows:
  per_second: {{kind: tumbling, size: 1s, aggregates: {{n: count(*), total: sum(n)}}}}
checkpoint: {{idle_interval: 100ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""


def rows_of(partition: int) -> list[datetime]:
    """Event times of a partition's rows, in order."""
    if partition == QUIET:
        return [START]
    first = START + timedelta(hours=1) if partition == AHEAD else START
    return [first + timedelta(seconds=n) for n in range(12)]


def send(client: KafkaClient, partition: int, number: int, at: datetime) -> None:
    """A row."""
    client.send(
        "wide", partition, json.dumps({"at": at.isoformat(), "n": 1000 * partition + number})
    )


def epochs(pipeline: Piped) -> list[Manifest]:
    """The sealed epochs that read something."""
    log = pipeline.log()
    found = [filled.epoch for filled in log.epochs_between(0, 1, log.head().slot)]
    return [
        epoch
        for epoch in found
        if any(piece["end"] > piece["start"] for piece in epoch.cut.values())
    ]


def took(epoch: Manifest, partition: int) -> int:
    """Offsets of a partition that an epoch read."""
    piece = epoch.cut[f"web/{partition}"]
    return int(piece["end"]) - int(piece["start"])


def frontiers(epoch: Manifest) -> dict[str, datetime]:
    """Frontier of each member that has one."""
    inputs = epoch.decider["sources"]["web"]["inputs"]
    ticks = {
        name: known["frontier"] for name, known in inputs.items() if known["frontier"] is not None
    }
    return {name: datetime.fromtimestamp(at / 1e6, UTC) for name, at in ticks.items()}


def status_of(pipeline: Piped) -> tuple[str, int]:
    """Who holds the frontier, and how many members there are, as the driver tells it."""
    status = read_status(pipeline.store(), "wide")
    return (
        ("", 0)
        if status is None
        else (
            (status.body.get("holder") or {}).get("member", ""),
            len(status.body.get("members", ())),
        )
    )


def test_a_hundred_partitions(jars: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    """All are members.

    The silent one holds the frontier, and is named; one far ahead waits alone; a kill repeats no
    offset.
    """
    broker = KafkaServer(jars[0], tmp_path / "broker")
    broker.start()
    client = KafkaClient(jars[0], broker.servers)
    client.topic("wide", PARTITIONS)
    expected = {(p, n): at for p in range(PARTITIONS) for n, at in enumerate(rows_of(p))}
    for (partition, number), at in expected.items():
        send(client, partition, number, at)
    client.flush()

    pipeline = Piped(tmp_path / "p", SPEC.format(servers=broker.servers))
    environment = {"TIDEGATE_SPARK_JARS": ",".join(map(str, jars[1]))}
    assert pipeline.run("move.done:2", environment=environment) == SIGKILLED, pipeline.log_text()
    assert len(epochs(pipeline)) == 1, "the second epoch was moved and not sealed"

    driver = pipeline.start("", environment=environment)
    try:
        wait_for(
            lambda: (
                sum(piece["end"] for piece in epochs(pipeline)[-1].cut.values()) == len(expected)
            ),
            driver,
        )
        read = epochs(pipeline)
        assert len(read[-1].cut) == PARTITIONS
        assert [took(epoch, 0) for epoch in read] == [
            5,
            5,
            2,
            0,
            0,
        ], "five rows of a partition at a time"
        assert [took(epoch, AHEAD) for epoch in read] == [
            5,
            0,
            0,
            5,
            2,
        ], "the one ahead waits until the others have been read"
        second = timedelta(seconds=1)  # of lag
        assert frontiers(read[-1]) == {
            f"web/{p}": rows_of(p)[-1] - second for p in range(PARTITIONS)
        }
        assert read[-1].decision["frontier_after"] == int((START - second).timestamp() * 1e6)
        wait_for(lambda: status_of(pipeline) == (f"web/{QUIET}", PARTITIONS), driver)

        send(client, QUIET, 1, START + timedelta(hours=1))
        client.flush()
        wait_for(
            lambda: took(epochs(pipeline)[-1], QUIET) == 1 and len(epochs(pipeline)) > len(read),
            driver,
        )
        last = epochs(pipeline)[-1].decision
        assert last["holder"]["member"] == "web/0"
        assert last["frontier_after"] == int((START + 10 * second).timestamp() * 1e6)
        driver.terminate()
        assert driver.wait(180) == 0, pipeline.log_text()
    finally:
        driver.kill()
        driver.wait(30)
        client.close()
        broker.stop()

    events = [
        (int(row["_partition"]), row["_seq"], row["n"])
        for row in pipeline.table("events").to_pylist()
    ]
    sent = [*expected, (QUIET, 1)]
    assert sorted(events) == sorted((p, n, 1000 * p + n) for p, n in sent), "each offset once"
    windows = {row["window_start"]: row["n"] for row in pipeline.table("per_second").to_pylist()}
    assert windows == {START + n * second: PARTITIONS - 2 + (n == 0) for n in range(10)}
