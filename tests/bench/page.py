"""How long the Streams page takes with 50 streams and with 10,000 epochs: ``make bench-page``.

The goal is a second for each answer, on an idle machine. Printed are the least processor time of
several requests, of server and client together, and the least time on the wall. What the answers
ask of the store is counted by `tests/operators/test_page_costs.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.operators.history import History, drives
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.infra.minio_server import MinioServer, ensure_minio, provision_bucket
from tidegate.infra.provision import REGION, Credentials

STREAMS, EPOCHS = 50, 10_000


@dataclass(frozen=True, order=True)
class Cost:
    """Seconds of the processor, and on the wall, and bytes of the answer."""

    cpu: float
    wall: float
    size: int


def measure(url: str, times: int = 5, pause: float = 1.6) -> Cost:
    """Return the least of several requests; the pause lets the server forget its last look."""
    costs = []
    for _ in range(times):
        cpu, wall = time.process_time(), time.monotonic()
        with urllib.request.urlopen(url) as answer:
            body = answer.read()
        json.loads(body)
        costs.append(Cost(time.process_time() - cpu, time.monotonic() - wall, len(body)))
        time.sleep(pause)
    return min(costs)


def measure_streams(url: str) -> Iterator[tuple[str, Cost]]:
    """Measure the list of many live streams on a real MinIO, each looked at again."""
    store = open_store(url)
    names = [f"p{number:02}" for number in range(STREAMS)]
    for name in names:
        History(store, name).extend(2)
    keepers = [drives(store, name) for name in names[:3]]
    with served(app_of(FakeAirflowQueries(names, store))) as page:
        yield f"list of {STREAMS} streams", measure(f"{page}/api/streams")
        yield "one of them", measure(f"{page}/api/streams/p00.stream")
    for keeper in keepers:
        keeper.stop()


def measure_epochs() -> Iterator[tuple[str, Cost]]:
    """Measure one stream with a long history, in a store in memory."""
    store = MemoryStore()
    history = History(store, "long")
    first = history.extend(1)[0]
    for slot in range(2, EPOCHS + 1):
        changed = {"slot": slot, "attempt": generate_attempt_id()}
        changed |= {"created_at": first.created_at + slot * 1_000_000}
        copy = first.model_copy(update=changed)
        store.put(history.log.layout.slot_key(0, slot), copy.to_bytes())
    SlotIndex(history.log, workers=2).refresh()  # as drivers do it every few hundred epochs
    with served(app_of(FakeAirflowQueries(["long"], store))) as page:
        stream = f"{page}/api/streams/long.stream"
        yield f"stream with {EPOCHS:,} epochs", measure(stream, 3)
        yield "its newest checkpoints", measure(f"{stream}/checkpoints", 3, 0)
        yield "checkpoints 5,000 back", measure(f"{stream}/checkpoints?before=0-5000", 3, 0)
        yield "its first checkpoints", measure(f"{stream}/checkpoints?before=0-20", 3, 0)
        yield "its whole past in the charts", measure(f"{stream}?span=0", 3)


def main() -> None:
    """Measure and print."""
    sys.stdout.write("answer                          processor s   wall s       bytes   load\n")
    with TemporaryDirectory() as scratch:
        folder, app = Path(scratch), Credentials.generate("app")
        server = MinioServer(ensure_minio(print), folder / "data", folder / "minio.log")
        server.start()
        try:
            provision_bucket(server, "bench", app)
            keys = {"ACCESS_KEY": app.access_key, "SECRET_KEY": app.secret_key}
            keys |= {"REGION": REGION, "ENDPOINT": server.endpoint}
            os.environ.update({f"TIDEGATE_S3_{name}": value for name, value in keys.items()})
            for name, cost in (*measure_streams("s3://bench/page"), *measure_epochs()):
                times = f"{cost.cpu:11.2f} {cost.wall:8.2f} {cost.size:11,}"
                sys.stdout.write(f"{name:<31} {times} {os.getloadavg()[0]:6.1f}\n")
                sys.stdout.flush()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
