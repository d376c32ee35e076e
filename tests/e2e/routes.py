"""Three days of flights by three routes, each broken in the middle, end in the same windows.

``python -m tests.e2e.routes [--days 3]``, or ``make routes``. The same departures, in the order in
which they left:

* *objects*: a folder per airport; the driver is killed between moving and sealing, then its JVM.
* *landing*: a topic of a real Kafka broker, landed by `tidegate land` while it is written; the
    landing query is killed as soon as an object of its appears, and so is the driver that reads
    them.
* *kafka*: the same topic, a partition per airport, read by a Kafka source; the driver, its JVM and
    the broker are killed.

The lag is beyond the largest lateness, so nothing may be late. Each route's windows must be those
that DuckDB finds in the CSV file, and its events the departures, each once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.drivers import SIGKILLED, Piped, wait_for
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tests.servers.processes import kill_jvms
from tidegate.infra.flights import AIRPORTS, SCHEMA, FlightsFeed, read_flights
from tidegate.jobs.sources.kafka_source import TopicOffsets, open_topic_offsets
from tidegate.jobs.spec.source_options import KafkaOptions

START: Final = "2013-01-06"
TOPIC: Final = "flights"
CHUNKS: Final = 4
COLUMNS: Final = (
    "event_time",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "dep_delay",
    "distance",
)
END: Final = datetime(
    2014, 1, 1, tzinfo=UTC
)  # a last row of each airport, long after all others, closes their windows
TYPES: Final = (
    "event_time: timestamp, carrier: string, flight: long, tailnum: string, origin: string, dest:"
    " string, dep_delay: long, distance: long"
)
SPEC: Final = """\
apiVersion: tidegate/v1
name: flights_{name}
sources:
  flights:
    {source}
    schema: {{{types}}}
    event_time: event_time
    lag: 36h
coalesce: {{idle_timeout: never}}
release: {{mode: ordered}}
windows:
  per_airport:
    kind: tumbling
    size: 1h
    keys: [origin]
    aggregates: {{flights: count(*), minutes: sum(dep_delay), worst: max(dep_delay)}}
checkpoint: {{idle_interval: 100ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""

Window = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Outcome:
    """What came out of one route.

    Attributes:
        killed: what was ended with kill -9, in order.
        seconds: from the first process to the last.
        windows: (airport, start, flights, minutes of delay, worst delay).
        problems: sentences; none means that it is right.
    """

    route: str
    killed: tuple[str, ...]
    epochs: int
    seconds: float
    windows: frozenset[Window]
    problems: tuple[str, ...]

    def line(self) -> str:
        """A row of the table."""
        verdict = "; ".join(self.problems) or "equal to the batch query"
        return (
            f"| {self.route} | {', '.join(self.killed)} | {self.epochs} | {len(self.windows)} |"
            f" {verdict} | {self.seconds:.0f} |"
        )


TITLES: Final = "| route | killed | epochs | windows | result | seconds |\n" + "|---" * 6 + "|"


class Departures:
    """The rows, in order of arrival, and what must come of them."""

    def __init__(self, days: int) -> None:
        self.days = days

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every departure."""
        found: list[dict[str, Any]] = []
        for piece in FlightsFeed(START, self.days).objects():
            data = piece.table.filter(pa.compute.equal(piece.table["kind"], "data"))
            found += data.select(list(COLUMNS)).to_pylist()
        return found

    def ends(self) -> list[dict[str, Any]]:
        """The last row of each airport."""
        return [
            {**dict.fromkeys(COLUMNS), "event_time": END, "origin": airport} for airport in AIRPORTS
        ]

    def windows(self) -> frozenset[Window]:
        """By DuckDB from the CSV file."""
        flights = read_flights()
        day = pd.to_datetime(flights[["year", "month", "day"]])
        first = pd.Timestamp(START)
        with duckdb.connect() as db:
            db.execute("set timezone = 'UTC'")
            db.register(
                "flights", flights[(day >= first) & (day < first + timedelta(days=self.days))]
            )
            found = db.execute(
                """select origin, epoch_us(time_hour::timestamptz), count(*), sum(dep_delay)::bigint, max(dep_delay)
                from flights where dep_time is not null group by all"""
            ).fetchall()
        return frozenset(found)


def judge(
    route: str, pipeline: Piped, departures: Departures, killed: Sequence[str], seconds: float
) -> Outcome:
    """Compare what the tables hold with what must be there."""
    per_airport = pipeline.table("per_airport").to_pylist()
    windows = frozenset(
        (
            row["origin"],
            int(row["window_start"].timestamp()) * 1_000_000,
            row["flights"],
            row["minutes"],
            row["worst"],
        )
        for row in per_airport
    )
    problems = []
    if differing := windows ^ departures.windows():
        problems.append(f"{len(differing)} windows differ")
    released = Counter(_plain(row) for row in pipeline.table("events").to_pylist())
    if differing_rows := (released - Counter(map(_plain, departures.rows))) + (
        Counter(map(_plain, departures.rows)) - released
    ):
        problems.append(f"{differing_rows.total()} events differ")
    problems += [
        f"{rows} rows in {name}"
        for name in ("late", "dead_letters")
        if (rows := pipeline.table(name).num_rows)
    ]
    return Outcome(
        route, tuple(killed), pipeline.log().head().slot, seconds, windows, tuple(problems)
    )


def _plain(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in COLUMNS)


def slots(pipeline: Piped) -> int:
    """Epochs sealed so far."""
    return int(pipeline.log().head().slot)


def expect(code: int, wanted: int, pipeline: Piped) -> None:
    """Fail with the driver's log unless it ended as it should."""
    if code != wanted:
        raise AssertionError(f"exit code {code}, not {wanted}:\n{pipeline.log_text()}")


# The routes


def objects(folder: Path, departures: Departures) -> Outcome:
    """Folders of objects."""
    source = "path: inbox/flights/\n    partition_by: folder\n    limits: {objects: 8}"
    pipeline = Piped(folder, SPEC.format(name="objects", source=source, types=TYPES))
    schema = pa.schema([SCHEMA.field(name) for name in COLUMNS])
    for piece in FlightsFeed(START, departures.days).objects():
        target = pipeline.inbox / "inbox" / "flights" / piece.airport / Path(piece.key).name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = piece.table.filter(pa.compute.equal(piece.table["kind"], "data"))
        pq.write_table(data.select(list(COLUMNS)).cast(schema), target)
    for row in departures.ends():
        target = pipeline.inbox / "inbox" / "flights" / row["origin"] / "99999999T99.parquet"
        pq.write_table(pa.Table.from_pylist([row], schema=schema), target)
    begun = time.monotonic()
    expect(pipeline.run("move.done:2", "--until-idle", "2"), SIGKILLED, pipeline)
    driver = pipeline.start("", "--until-idle", "2")
    sealed = slots(pipeline)
    wait_for(lambda: slots(pipeline) > sealed, driver)
    driver.kill()  # it has no JVM: its windows and its release need none
    expect(driver.wait(240), SIGKILLED, pipeline)
    expect(pipeline.run("", "--until-idle", "2"), 0, pipeline)
    return judge("objects", pipeline, departures, ("driver", "driver"), time.monotonic() - begun)


def landing(
    folder: Path, departures: Departures, servers: str, jars: str, feed: Iterator[int]
) -> Outcome:
    """A topic, landed while it is written.

    `feed` writes the next chunk and says how many rows there are now.
    """
    fields = ", ".join(f"{name}: {_of_json(name)}" for name in COLUMNS)
    options = (
        f'{{kafka.bootstrap.servers: "{servers}", subscribe: {TOPIC}, startingOffsets: earliest}}'
    )
    source = (
        "path: inbox/landed/\n    limits: {objects: 1}\n    landing:\n      format: kafka\n     "
        f" every: 300ms\n      options: {options}\n      columns: {{{fields}}}"
    )
    pipeline = Piped(folder, SPEC.format(name="landing", source=source, types=TYPES))
    begun = time.monotonic()
    environment = {"TIDEGATE_SPARK_JARS": jars}
    next(feed)
    query = _land(pipeline, environment)
    wait_for(lambda: _landed(pipeline), query)
    query.kill()
    query.wait(30)
    query = _land(pipeline, environment)
    for rows in feed:
        wait_for(lambda rows=rows: _landed(pipeline) == rows, query)  # type: ignore[misc]
    query.terminate()
    expect(query.wait(120), 0, pipeline)
    expect(
        pipeline.run("move.done:2", "--until-idle", "2", environment=environment),
        SIGKILLED,
        pipeline,
    )
    expect(pipeline.run("", "--until-idle", "2", environment=environment), 0, pipeline)
    return judge(
        "landing", pipeline, departures, ("landing query", "driver"), time.monotonic() - begun
    )


def _of_json(name: str) -> str:
    kind = {
        "event_time": "timestamp",
        "flight": "bigint",
        "dep_delay": "bigint",
        "distance": "bigint",
    }.get(name, "string")
    return f"\"CAST(get_json_object(CAST(value AS string), '$.{name}') AS {kind})\""


def _land(pipeline: Piped, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    start = "from tidegate.jobs.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        start,
        "land",
        str(pipeline.spec_file),
        "flights",
        "--store",
        pipeline.store_url,
    ]
    command += ["--checkpoint", str(pipeline.folder / "landing")]
    return pipeline.spawn(command, environment)


def _landed(pipeline: Piped) -> int:
    return sum(
        int(pq.read_metadata(path).num_rows)
        for path in (pipeline.inbox / "inbox" / "landed").glob("*.parquet")
    )


def kafka(
    folder: Path, departures: Departures, broker: KafkaServer, jars: str, offsets: TopicOffsets
) -> Outcome:
    """The topic itself."""
    source = (
        f'kind: kafka\n    kafka: {{servers: "{broker.servers}", topic: {TOPIC}}}\n    limits:'
        " {rows: 150}"
    )
    pipeline = Piped(folder, SPEC.format(name="kafka", source=source, types=TYPES))
    begun = time.monotonic()
    environment = {"TIDEGATE_SPARK_JARS": jars}
    expect(pipeline.run("move.done:2", environment=environment), SIGKILLED, pipeline)
    driver = pipeline.start("", environment=environment)
    sealed = slots(pipeline)
    wait_for(lambda: slots(pipeline) > sealed, driver)
    kill_jvms(driver.pid)
    expect(driver.wait(240), 3, pipeline)
    driver = pipeline.start("", environment=environment)
    sealed = slots(pipeline)
    wait_for(lambda: slots(pipeline) > sealed, driver)
    broker.kill()
    wait_for(lambda: pipeline.said("transient"), driver)
    broker.start()
    wait_for(lambda: _caught_up(pipeline, offsets), driver)
    driver.terminate()
    expect(driver.wait(120), 0, pipeline)
    return judge(
        "kafka", pipeline, departures, ("driver", "JVM", "broker"), time.monotonic() - begun
    )


def _caught_up(pipeline: Piped, offsets: TopicOffsets) -> bool:
    record = pipeline.log().head().record
    read = (
        {}
        if record is None
        else {member.partition("/")[2]: part["end"] for member, part in record.cut.items()}
    )
    return read == {str(partition): end for partition, (_, end) in offsets.read_offsets().items()}


def _feed(client: KafkaClient, departures: Departures) -> Iterator[int]:
    """Write the topic in chunks; the ends come last, when all else was taken."""
    written = 0
    size = -(-len(departures.rows) // CHUNKS)
    chunks = [
        departures.rows[first : first + size] for first in range(0, len(departures.rows), size)
    ]
    for chunk in (*chunks, departures.ends()):
        for row in chunk:
            body = json.dumps({**row, "event_time": row["event_time"].isoformat()})
            client.send(TOPIC, AIRPORTS.index(row["origin"]), body)
        client.flush()
        written += len(chunk)
        yield written


def by_all_routes(work: Path, days: int) -> list[Outcome]:
    """Run them, one after the other."""
    departures = Departures(days)
    found = [objects(work / "objects", departures)]
    jars = (
        ensure_jars("kafka-broker", BROKER),
        ",".join(map(str, spark_jars("spark-kafka", CONNECTOR))),
    )
    broker = KafkaServer(jars[0], work / "broker")
    broker.start()
    client = KafkaClient(jars[0], broker.servers)
    try:
        client.topic(TOPIC, len(AIRPORTS))
        offsets = open_topic_offsets(KafkaOptions(servers=broker.servers, topic=TOPIC))
        found.append(
            landing(
                work / "landing", departures, broker.servers, jars[1], _feed(client, departures)
            )
        )
        found.append(kafka(work / "kafka", departures, broker, jars[1], offsets))
    finally:
        client.close()
        broker.stop()
    return found


def main() -> int:
    """The command line; exit code 1 if the routes differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=int, default=3)
    given = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-routes-") as work:
        outcomes = by_all_routes(Path(work), given.days)
    print(TITLES, *(outcome.line() for outcome in outcomes), sep="\n")  # noqa: T201 - a program for people
    return int(
        any(outcome.problems for outcome in outcomes)
        or len({outcome.windows for outcome in outcomes}) > 1
    )


if __name__ == "__main__":
    sys.exit(main())
