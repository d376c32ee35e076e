"""What the Streams page costs with many pipelines and with a long history.

Asserted is the least processor time of several requests, of server and client together: on an idle
machine that is what a person waits, give or take; on a shared one the wall clock says nothing, and
the processor's is judged by a yardstick. Both are printed with `-s`.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

from tests.operators.history import History, drives
from tests.operators.pages import FakeAirflowQueries, app_of, served
from tests.servers.memory_store import MemoryStore
from tests.servers.minio import RealMinio
from tests.yardstick import slowness
from tidegate.checkpoints.bucket_layout import generate_attempt_id
from tidegate.checkpoints.open_store import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True, order=True)
class Cost:
    """Seconds of the processor, and on the wall."""

    cpu: float
    wall: float


def _best(url: str, times: int = 5, pause: float = 1.6) -> tuple[Cost, Any]:
    """The least of several requests, and the last answer.

    The pause lets the server forget its last look.
    """
    costs, found = [], None
    for _ in range(times):
        cpu, wall = time.process_time(), time.monotonic()
        with urllib.request.urlopen(url) as answer:
            found = json.load(answer)
        costs.append(Cost(round(time.process_time() - cpu, 3), round(time.monotonic() - wall, 3)))
        time.sleep(pause)
    return min(costs), found


def test_fifty_pipelines_in_a_second(minio_environment: RealMinio) -> None:
    """The list of fifty live streams on a real MinIO, every one looked at again, in under a second."""
    store = open_store(f"s3://{minio_environment.bucket}/page-speed")
    names = [f"p{number:02}" for number in range(50)]
    for name in names:
        History(store, name).extend(2)
    keepers = [drives(store, name) for name in names[:3]]
    with served(app_of(FakeAirflowQueries(names, store))) as url:
        many, found = _best(f"{url}/api/streams")
        one, _ = _best(f"{url}/api/streams/p00.stream")
        slow = slowness()
    for keeper in keepers:
        keeper.stop()
    sys.stdout.write(f"\nlist of 50: {many}, one stream: {one}, slowness {slow:.1f}\n")
    assert len(found["streams"]) == 50
    assert many.cpu < slow
    assert one.cpu < slow / 2


def test_ten_thousand_checkpoints() -> None:
    """First page, a deep page, all of the history on one chart.

    None takes longer than a person waits.
    """
    store = MemoryStore()
    history = History(store, "long")
    first = history.extend(1)[0]
    for slot in range(2, 10_001):
        copy = first.model_copy(
            update={
                "slot": slot,
                "attempt": generate_attempt_id(),
                "created_at": first.created_at + slot * 1_000_000,
            }
        )
        store.put(history.log.layout.slot_key(0, slot), copy.to_bytes())
    with served(app_of(FakeAirflowQueries(["long"], store))) as url:
        stream = f"{url}/api/streams/long.stream"
        costs = {
            "newest checkpoints": _best(f"{stream}/checkpoints", 3, 0)[0],
            "checkpoints 5,000 back": _best(f"{stream}/checkpoints?before=0-5000", 3, 0)[0],
            "the first ones": _best(f"{stream}/checkpoints?before=0-20", 3, 0)[0],
            "the stream": _best(stream, 3)[0],
            "its whole past": _best(f"{stream}?span=0", 3)[0],
        }
        slow = slowness()
    sys.stdout.write(
        "\n"
        + "".join(f"{name}: {cost}\n" for name, cost in costs.items())
        + f"slowness {slow:.1f}\n"
    )
    assert max(costs.values()).cpu < slow
