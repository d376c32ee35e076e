"""Merges that race a driver on a real store.

Both seal, no one undoes the other, and at the end all is as if in time.

The driver seals a given number of epochs, so that a merge that loses to all of them still comes to
its end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any
from uuid import uuid4

import pytest
from tests.engine.harness import SECOND
from tests.servers.minio import RealMinio
from tests.splice.stream_rows import V, current, values
from tests.streams.support import World, streams_spec

from tidegate.checkpoints.open_store import open_store
from tidegate.jobs.splice.merge import MergeDecision, merge_request
from tidegate.jobs.splice.request_creation import LateFilter, RequestOptions, create_from_late_rows

pytestmark = pytest.mark.minio

_PACE = 0.5  # seconds between two epochs of the driver: about what small ones take with Spark
_EPOCHS = 10


@contextmanager
def driving(world: World) -> Iterator[None]:
    """A driver that reads a row and seals an epoch, some times."""
    failed = list[BaseException]()

    def drive() -> None:
        try:
            for second in range(100, 100 + _EPOCHS):
                world.feed((second, 1))
                world.bench.clock.advance(1.0)
                world.engine.run_epoch()
                time.sleep(_PACE)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert failed == []


def test_merges_race_a_driver(minio_environment: RealMinio) -> None:
    """Three requests of late rows, merged while epochs are sealed.

    Events, sums and their sums are those of a run in time.
    """
    fold = {
        "from": "events",
        "to": "sums",
        "function": "tests.streams.folds:plain",
        "initial": 0,
        "inherit": True,
    }
    graph: dict[str, Any] = {"sum": fold, "again": {**fold, "from": "sums", "to": "more"}}
    spec = streams_spec(streams={"sums": V, "more": V}, reducers=graph)
    world = World(spec, store=open_store(f"s3://{minio_environment.bucket}/race-{uuid4().hex[:8]}"))
    for rows in ([(10, 1)], [(20, 2), (30, 3)], [(40, 4)], [(5, 5), (15, 6)], [(35, 7), (25, 8)]):
        world.epoch(*rows)
    log = world.bench.log
    bounds: list[int | None] = [None, 10 * SECOND, 30 * SECOND, None]
    requests = [
        create_from_late_rows(
            spec, log, LateFilter(since=since, until=until), RequestOptions("ann")
        ).id
        for since, until in pairwise(bounds)
    ]
    with driving(world):
        outcomes = [
            merge_request(spec, log, request, MergeDecision("ann"))
            for request in reversed(requests)
        ]
    assert all(outcome.actual == outcome.reported_digest for outcome in outcomes)
    sys.stdout.write(
        f"lost slots: {[o.lost for o in outcomes]}, seconds:"
        f" {[round(o.seconds, 2) for o in outcomes]}\n"
    )
    world.feed((1000, 1))
    while not world.engine.run_epoch().sealed:  # it has lost its slot to the last merge
        pass
    epochs = world.bench.epochs()
    assert sum("splice" in e.notes for e in epochs) == 3
    assert "splice" not in epochs[-1].notes, "the driver goes on above the merges"
    events = sorted(world.rows("events"), key=lambda row: row["t"])
    times, sums = [row["t"] for row in events], list(accumulate(row["v"] for row in events))
    assert current(world, "sums")["stream_time"].to_pylist() == times
    assert values(world, "sums") == sums
    assert values(world, "more") == list(accumulate(sums))
    assert current(world, "more")["position"].to_pylist() == list(range(len(sums)))
