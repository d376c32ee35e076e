"""Streams whose rows outlive the epochs they came from: `make matrices` prints the table."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.manual_clock import ManualClock
from tests.streams.support import World, streams_spec
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.published_tables import (
    find_published_slot,
    have_followers_rewound,
    read_table,
)
from tidegate.jobs.sinks.table_maintenance import list_referenced_files

_PIPE = {"from": "events", "to": "d", "rows_per_epoch": 100}
_FOLD = {**_PIPE, "function": "tests.streams.folds:totals", "initial": 0, "keys": ["v"]}
_ASKED = {"attach": "on_request"}
_SUMS = {"d": {"schema": {"v": "long"}}}
# What hangs on the events, and what a person asks for in the middle.
STREAMS: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    "pipe from the start": ({"streams": {"d": {}}, "pipes": {"p": _PIPE}}, ()),
    "pipe attached later": (
        {"streams": {"d": {}}, "pipes": {"p": {**_PIPE, **_ASKED}}},
        (("attach", "p"),),
    ),
    "backfill row by row": (
        {"streams": {"d": {}}, "pipes": {"p": {**_PIPE, **_ASKED, "rows_per_epoch": 1}}},
        (("attach", "p"),),
    ),
    "backfill of a stream": (
        {
            "streams": {"copy": {}, "d": {}},
            "pipes": {
                "p": {**_PIPE, "to": "copy"},
                "q": {**_PIPE, **_ASKED, "from": "copy", "rows_per_epoch": 2},
            },
        },
        (("attach", "q"),),
    ),
    "reducer with states": ({"streams": _SUMS, "reducers": {"r": _FOLD}}, ()),
    "reducer attached again": (
        {"streams": _SUMS, "reducers": {"r": {**_FOLD, "rows_per_epoch": 2}}},
        (("detach", "r"), ("attach", "r")),
    ),
    "buffer of two writers": (
        {
            "streams": {"d": {"buffer": True}},
            "pipes": {
                "p": {**_PIPE, "where": "v % 2 = 0", "inherit": True},
                "q": {**_PIPE, **_ASKED, "where": "v % 2 = 1", "inherit": True},
            },
        },
        (("attach", "q"),),
    ),
}
# After which of the scenario's steps retention runs.
RETENTION: dict[str, frozenset[str]] = {
    "before the request": frozenset({"before"}),
    "during the backfill": frozenset({"during"}),
    "at the end": frozenset({"after"}),
    "after every epoch": frozenset({"before", "during", "after", "epoch"}),
    "before a restore": frozenset({"restored", "before", "during"}),
}


class PublishedStreams:
    """A pipeline with streams, its tables in a local store, and retention that keeps one epoch."""

    def __init__(self, folder: Path, stream: str, retention: frozenset[str]) -> None:
        fields, self.asked = STREAMS[stream]
        self.spec = streams_spec(release={"mode": "pass_through"}, **fields)
        self.store = LocalStore(folder)
        self.world = World(self.spec, store=self.store)
        self.sink = IcebergSink(self.spec, self.store, "0" * 32)
        self.retention = retention
        self.retired = 0

    def run_epoch(self, *rows: tuple[float, int], ask: tuple[tuple[str, str], ...] = ()) -> None:
        """Seal an epoch, publish it, and retire what went before if it is time."""
        self.world.epoch(*rows, ask=ask)
        self.sink.follow(self.world.bench.log)
        self.reach("epoch")

    def reach(self, step: str) -> None:
        """Run the driver's own retention if it belongs here; the next driver goes on."""
        if step not in self.retention:
            return
        log = self.world.bench.log
        self.retired += len(
            Retention(
                log,
                RetentionPolicy(keep_last=1, keep_for=0, grace=0),
                external=lambda: list_referenced_files(self.spec, self.store),
                published_upto=lambda: find_published_slot(self.spec, log),
                rewound=lambda: have_followers_rewound(self.spec, log),
                clock=ManualClock(wall_ticks=2_000_000_000_000_000),
            )
            .run()
            .retired
        )
        self.world.driver()

    def restore(self, checkpoint: CheckpointId) -> None:
        """Go back; a new driver reads the rows behind it again."""
        log = self.world.bench.log
        log.fork(log.head(), checkpoint, request_id="q", who="ann", why="", at=0)
        self.world.driver()

    def read_rows(self) -> list[tuple[Any, ...]]:
        """Rows of the last stream as a reader of its table sees them."""
        rows = read_table(self.spec, self.store, "d").sort_by("position").to_pylist()
        return [(row["v"], row["position"], row["_origin_id"], row["_via"]) for row in rows]


def play(folder: Path, stream: str, retention: frozenset[str]) -> PublishedStreams:
    """Rows, a request in the middle, more rows; with `restored` a way back to the first of them."""
    played = PublishedStreams(folder, stream, retention)
    for value in range(1, 5):
        played.run_epoch((value, value))
    pinned = played.world.bench.log.head().checkpoint
    assert pinned is not None
    pin_checkpoint(played.world.bench.log, "gold", pinned, who="ann")
    for value in range(5, 8):
        played.run_epoch((value, value))
    played.reach("before")
    for request in played.asked:
        played.run_epoch(ask=(request,))
    played.run_epoch((8, 8))
    played.run_epoch((9, 9))
    played.reach("during")
    for _ in range(10):
        played.run_epoch()
    if "restored" in retention:
        played.restore(pinned)
        played.run_epoch()
        for request in played.asked:
            played.run_epoch(ask=(request,))
        for _ in range(10):
            played.run_epoch()
    played.reach("after")
    played.run_epoch((10, 10))
    return played


@cache
def read_without_retention(folder: Path, stream: str, *, restored: bool) -> list[tuple[Any, ...]]:
    """Return the rows of a pipeline in which no epoch is ever retired."""
    steps = frozenset({"restored"}) if restored else frozenset()
    return play(folder / f"{stream} {restored}", stream, steps).read_rows()


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("retention", RETENTION)
def test_a_stream_has_the_same_rows(
    retention: str, stream: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whichever epochs were retired while it was written, backfilled or restored."""
    played = play(tmp_path / "store", stream, RETENTION[retention])
    assert played.retired
    restored = "restored" in RETENTION[retention]
    rows = read_without_retention(tmp_path_factory.getbasetemp(), stream, restored=restored)
    assert len(rows) >= 5
    assert played.read_rows() == rows
