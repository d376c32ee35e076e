"""From the arrival of a row to its place in the Iceberg table of events: ``make bench-latency``.

``python -m tests.bench.latency [--minutes 3] [RUN ...]``, a run being ``minio:10000``: the rows'
source, and rows per second.

A process of its own feeds ten objects a second (or as many batches of messages), each row with the
time just before its object was sent. A driver of its own passes the rows on, with its store on a
real MinIO. Meanwhile this process asks for the table's entry in the catalog, and notes when each
snapshot is there for readers. The rows are read from the table afterwards. A rate is sustained if
the rows that have arrived and are not visible do not become more: on average of the last third of
the run at most what comes in half a second more than on average of the second third.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.meter import cpu_seconds
from tests.bench.rounds import require
from tests.e2e.drivers import Piped, wait_for
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tests.servers.minio import running
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import NotFoundError
from tidegate.jobs.sinks.published_tables import read_table

_RUNS: Final = ("minio:10000", "minio:1000", "minio:50000", "kafka:10000")
_PARTITIONS: Final = 4
_PER_SECOND: Final = 10  # objects or batches
_LOOK: Final = 0.02  # seconds between two looks at the catalog
_START: Final = 10.0  # seconds of the first rows
_SPEC: Final = """\
apiVersion: tidegate/v1
name: latency
sources:
  rows:
    {source}
    schema: {{at: timestamp, n: long}}
    event_time: at
    lag: 1s
release: {{mode: pass_through}}
checkpoint: {{idle_interval: 20ms}}
spark: {{driver_memory: 2g}}
"""


def _send_objects(url: str) -> Callable[[int, int, int], None]:
    store = open_store(url)

    def send(number: int, now: int, size: int) -> None:
        """Put one object."""
        at = pa.array(np.full(size, now), pa.timestamp("us", "UTC"))
        out = io.BytesIO()
        pq.write_table(pa.table({"at": at, "n": np.arange(size)}), out)
        store.put(f"inbox/rows/{number:09d}.parquet", out.getvalue())

    return send


def _send_messages(place: str) -> Callable[[int, int, int], None]:
    from confluent_kafka import Producer

    servers, _, topic = place.partition("/")
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})

    def send(number: int, now: int, size: int) -> None:
        """Produce one batch to all partitions, and wait until the broker has it."""
        for n in range(size):
            producer.produce(topic, f'{{"at":{now},"n":{n}}}', partition=n % _PARTITIONS)
        producer.flush()

    return send


def feed(place: str, rate: int, seconds: float) -> tuple[float, float]:
    """Send rows at an even rate; the processor time, and by how much it fell behind at most.

    `place` is the address of a store, or ``SERVERS/TOPIC``.
    """
    send = _send_objects(place) if place.startswith("s3:") else _send_messages(place)
    begun, cpu, behind = time.monotonic(), time.process_time(), 0.0
    for number in range(int(seconds * _PER_SECOND)):
        rest = begun + number / _PER_SECOND - time.monotonic()
        behind = max(behind, -rest)
        time.sleep(max(rest, 0.0))
        send(number, time.time_ns() // 1_000, rate // _PER_SECOND)
    return time.process_time() - cpu, behind


class _Watch:
    """When each slot became visible, and the memory that the driver then had.

    Attributes:
        seen: ascending pairs of slot and time in microseconds.
        memory: resident bytes of the driver at each of them.
    """

    def __init__(self, url: str, driver: psutil.Process) -> None:
        self.seen: list[tuple[int, int]] = []
        self.memory: list[int] = []
        self._driver = driver
        self._store, self._ended = open_store(url), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        key, etag = BucketLayout("latency").table_catalog_key("events"), ""
        while not self._ended.wait(_LOOK):
            try:
                entry = self._store.get(key)
            except NotFoundError:
                continue
            if entry.etag != etag:
                etag, now = entry.etag, time.time_ns() // 1_000
                self.memory.append(self._driver.memory_info().rss)
                location = json.loads(entry.data)["metadata_location"]
                stored = self._store.get(location.removeprefix(self._store.uri("")))
                metadata = json.loads(stored.data)
                newest = metadata.get("current-snapshot-id")
                for snapshot in metadata.get("snapshots", ()):
                    if snapshot["snapshot-id"] == newest:
                        self.seen.append((int(snapshot["summary"]["tidegate.upto"]), now))


def judge(arrived: Any, visible: Any, rate: int) -> str:
    """Percentiles of the latency, and whether the rate was sustained; times in microseconds."""
    latency = (visible - arrived) / 1e6
    first = latency[arrived < arrived.min() + _START * 1e6]
    begun, ended = arrived.min(), arrived.max()
    moments = np.linspace(begun, ended, 301)[100:]
    waiting = np.searchsorted(np.sort(arrived), moments, "right") - np.searchsorted(
        np.sort(visible), moments, "right"
    )
    middle, last = waiting[:100].mean(), waiting[100:].mean()
    verdict = "sustained" if last <= middle + rate / 2 else "NOT sustained"
    p50, p99 = np.percentile(latency, (50, 99))
    tenths = np.array_split(latency[np.argsort(arrived)], 10)
    course = ", ".join("{:.2f}/{:.2f}".format(*np.percentile(tenth, (50, 99))) for tenth in tenths)
    return (
        f"p50 {p50:.2f} s, p99 {p99:.2f} s (of each tenth of the run: {course} s), max"
        f" {latency.max():.2f} s; rows of the first"
        f" {_START:.0f} s: max {first.max():.2f} s; not visible on average: {middle:,.0f} rows in"
        f" the second third, {last:,.0f} in the last: {verdict}"
    )


def _play(origin: str, rate: int, minutes: float, folder: Path, broker: KafkaServer | None) -> str:
    """One run with a driver of its own; what it found, in one line."""
    url, source = f"s3://tidegate/{origin}-{rate}", "path: inbox/rows/"
    place, environment = url, {}
    if broker is not None:
        place = f"{broker.servers}/{origin}-{rate}"
        kafka = f"{{servers: '{broker.servers}', topic: {origin}-{rate}}}"
        source = f"kind: kafka\n    kafka: {kafka}\n    parse: {{timestamps: us}}"
        jars = spark_jars("spark-kafka", CONNECTOR)
        environment["TIDEGATE_SPARK_JARS"] = ",".join(map(str, jars))
    pipeline = Piped(folder / f"{origin}-{rate}", _SPEC.format(source=source), url)
    driver = pipeline.start(environment=environment)
    rows = int(60 * minutes * _PER_SECOND) * (rate // _PER_SECOND)
    try:
        wait_for(lambda: pipeline.store().stat("latency/status.json"), driver)
        process = psutil.Process(driver.pid)
        before = cpu_seconds(process)
        spawn = multiprocessing.get_context("spawn")
        with _Watch(url, process) as watch, ProcessPoolExecutor(1, mp_context=spawn) as pool:
            fed, behind = pool.submit(feed, place, rate, 60 * minutes).result()
            wait_for(lambda: _count_read(pipeline) >= rows, driver)
            newest = pipeline.log().head().slot
            wait_for(lambda: watch.seen and watch.seen[-1][0] >= newest, driver)
        cpu = cpu_seconds(process) - before
    finally:
        driver.terminate()
        driver.wait(timeout=300)
    found = read_table(pipeline.spec, pipeline.store(), "events", columns=("at", "_epoch"))
    require(found.num_rows == rows, f"{found.num_rows:,} of {rows:,} rows are in the table")
    slots, times = np.array(watch.seen).T
    visible = times[np.searchsorted(slots, found["_epoch"].to_numpy())]
    told = judge(found["at"].cast(pa.int64()).to_numpy(), visible, rate)
    tenths = np.array_split(np.array(watch.memory) / 1e6, 10)
    memory = ", ".join(f"{np.median(tenth):.0f}" for tenth in tenths)
    return (
        f"{told}; generator {fed / (60 * minutes):.2f} cores, at most {behind:.2f} s behind; driver"
        f" {1e6 * cpu / rows:.1f} s of processor time per 1 M rows, {newest} epochs,"
        f" {memory} MB resident (median of each tenth)"
    )


def _count_read(pipeline: Piped) -> int:
    record = pipeline.log().head().record
    return 0 if record is None else record.counters.read


@contextmanager
def _running_broker(folder: Path, topics: list[str]) -> Iterator[KafkaServer | None]:
    """A broker with these topics; None if there is no topic."""
    if not topics:
        yield None
        return
    jars = ensure_jars("kafka-broker", BROKER)
    server = KafkaServer(jars, folder)
    server.start()
    try:
        client = KafkaClient(jars, server.servers)
        for topic in topics:
            client.topic(topic, _PARTITIONS)
        client.close()
        yield server
    finally:
        server.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=_RUNS, help="minio:RATE or kafka:RATE")
    parser.add_argument("--minutes", type=float, default=3.0)
    given = parser.parse_args()
    runs = [(origin, int(rate)) for origin, _, rate in (run.partition(":") for run in given.runs)]
    topics = [f"{origin}-{rate}" for origin, rate in runs if origin == "kafka"]
    with TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        folder = Path(scratch)
        with running(folder / "minio") as minio, _running_broker(folder / "kafka", topics) as kafka:
            os.environ.update(minio.environment())
            for origin, rate in runs:
                broker = kafka if origin == "kafka" else None
                told = _play(origin, rate, given.minutes, folder, broker)
                load = os.getloadavg()[0]
                print(
                    f"{origin}, {rate:,} rows/s, {given.minutes:g} min, load {load:.1f}: {told}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
