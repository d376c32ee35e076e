"""Merges into streams, compared with the model of streams after every step."""

from __future__ import annotations

import io
import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tests.oracle import stream_model
from tests.oracle.stream_model import MergeMode
from tests.splice.stream_rows import current
from tests.streams.attachments import attachment, attachments, spec_of
from tests.streams.support import World

from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.sinks.output_tables import (
    SPLICE_COLUMN,
)
from tidegate.jobs.splice.merge import MergeDecision, merge_request
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    create_from_late_rows,
)
from tidegate.jobs.streams.stream_state import SpliceRequestSink

STREAMS = ("a", "b", "c")


def seen(world: World, name: str) -> list[tuple[Any, ...]]:
    """Position, stamp, identity and value of its rows."""
    rows = current(world, name)
    times = rows["stream_time"].cast(pa.int64()).to_pylist()
    return list(
        zip(
            rows["position"].to_pylist(),
            times,
            rows["_id"].to_pylist(),
            rows["v"].to_pylist(),
            strict=True,
        )
    )


class Pair:
    """A pipeline and the model, given the same rows."""

    def __init__(self, drawn: list[Any]) -> None:
        self.drawn, self.world, self.reference = (
            drawn,
            World(spec_of(drawn, 10**6)),
            stream_model.World(),
        )
        for name in ("events", *STREAMS):
            self.reference.stream(name, buffered=name == "c")
        self.second, self.released = 0, 0
        self.known: set[str] = set()

    def rows(self, step: list[tuple[int, int]]) -> None:
        """One epoch; the model gets the events it released, and the frontier it reached."""
        rows = []
        for gap, value in step:
            self.second += gap
            rows.append((self.second, value))
        self.epoch(rows)

    def epoch(self, rows: list[tuple[int, int]]) -> None:
        """The same with the times of the rows given."""
        self.world.epoch(*rows)
        self._told()

    def _told(self) -> None:
        head = self.world.head()
        every = sorted(
            (r for r in self.world.bench.rows("events") if not r.get(SPLICE_COLUMN)),
            key=lambda r: r["position"],
        )
        events, self.released = every[self.released :], len(every)
        values = [({"v": r["v"], "t": r["t"]}, round(r["t"].timestamp() * 1e6)) for r in events]
        ids = [f"{r['_source']}/{r['_partition']}/{r['_seq']}" for r in events]
        frontier = head.decision["frontier_after"]
        self.reference.append("events", *values, now=head.recorded_now, ids=ids, frontier=frontier)

    def asked(self, verb: str, number: int) -> None:
        """Attach or detach."""
        name = f"n{number}"
        if number >= len(self.drawn) or (verb == "attach") == (name in self.known):
            return
        self.known.add(name)
        self.world.epoch(ask=((verb, name),))
        now = self.world.head().recorded_now
        if verb == "attach":
            self.reference.attach(attachment(number, self.drawn[number]), now)
        else:
            self.reference.detach(name)
        self.reference.advance(self.world.head().decision["frontier_after"], now)

    def merge(self, number: int) -> None:
        """Merge what an attachment has collected."""
        name = f"n{number}"
        state = self.world.state()
        known = state.attachments.get(name)
        found = state.requests.get(known.request_id(name)) if known else None
        if known is None or found is None or found.open or found.merged or not found.rows:
            return
        SpliceRequestSink(self.world.bench.clock).follow(self.world.bench.log)
        self._merged(known.request_id(name))
        self.reference.merge(name, self.world.head().recorded_now)

    def late(self, back: int, value: int) -> None:
        """A row that comes too late, and is merged into the events."""
        if self.second - back < 0:
            return
        self.epoch([(self.second - back, value)])
        late = [row for row in self.world.bench.rows("late") if row["output"] == "events"]
        bench = self.world.bench
        try:
            request = create_from_late_rows(
                bench.spec, bench.log, LateFilter(outputs=("events",)), RequestOptions("ann")
            )
            self._merged(request.id)
        except ConfigurationError as error:
            assert error.code in ("splice.no_rows", "splice.too_early")  # noqa: PT017
            return
        segment = next(
            s
            for s in self.world.head().segments
            if s.kind == SPLICE_KIND and s.extra["request"] == request.id
        )
        there = pq.read_table(io.BytesIO(bench.store.get(segment.key).data)).to_pylist()
        ids = {(r["_source"], r["_partition"], r["_seq"]) for r in there}
        rows = [r for r in late if (r["_source"], r["_partition"], r["_seq"]) in ids]
        named = [
            (
                f"{r['_source']}/{r['_partition']}/{r['_seq']}",
                round(r["t"].timestamp() * 1e6),
                {"v": r["v"], "t": r["t"]},
            )
            for r in rows
        ]
        self.reference.request(request.id, "events", named)
        self.reference.merge(request.id, self.world.head().recorded_now)

    def _merged(self, request: str) -> None:
        bench = self.world.bench
        before = {name: seen(self.world, name) for name in STREAMS}
        outcome = merge_request(bench.spec, bench.log, request, MergeDecision("ann"))
        assert outcome.actual == outcome.reported_digest
        rewrites = next(
            s.extra
            for s in self.world.head().segments
            if s.kind == SPLICE_KIND and s.extra["request"] == request
        ).get("rewrites", {})
        for name in STREAMS:
            kept = rewrites.get(name, len(before[name]))
            assert seen(self.world, name)[:kept] == before[name][:kept]
        self.world.driver()

    def compare(self) -> None:
        """Everything a reader sees."""
        for name in STREAMS:
            assert seen(self.world, name) == [
                (r.position, r.time, r.id, r.value["v"]) for r in self.reference.rows(name)
            ], name
        for name, request in self.world.state().requests.items():
            assert request.rows == len(self.reference.requests[request.attachment].rows), name


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("rows"),
            st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=4),
        ),
        st.tuples(st.sampled_from(["attach", "detach", "merge"]), st.integers(0, 3)),
        st.tuples(st.just("merge"), st.integers(0, 3)),
        st.tuples(st.just("late"), st.tuples(st.integers(1, 12), st.integers(0, 20))),
    ),
    min_size=3,
    max_size=10,
).map(
    lambda s: [
        ("attach", 0),
        ("rows", [(2, 5), (2, 7), (1, 11)]),
        s[0],
        ("attach", 1),
        ("attach", 2),
        *s[1:],
    ]
)


FOUND = (  # rows merged into an empty stream came with the merge, whatever comes later
    [
        (("a", "b"), "pipe", True, MergeMode.SPLICE),
        (("events", "b"), "pipe", True, MergeMode.SPLICE),
        (("b", "c"), "pipe", False, MergeMode.SPLICE),
        (("b", "c"), "totals", True, MergeMode.CONCAT),
    ],
    [
        *[
            ("attach", 0),
            ("rows", [(2, 5), (2, 7), (1, 11)]),
            ("late", (7, 9)),
            ("attach", 1),
            ("attach", 2),
            ("late", (9, 19)),
        ],
        *[
            ("merge", 0),
            ("detach", 0),
            ("merge", 1),
            ("merge", 3),
            ("rows", [(3, 9), (3, 13)]),
            ("merge", 2),
        ],
    ],
)


@example(*FOUND)
@settings(
    max_examples=int(os.environ.get("TIDEGATE_EXAMPLES", "10")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(attachments, steps)
def test_merges_do_to_a_pipeline_what_they_do_to_the_model(
    drawn: list[Any], steps: list[Any]
) -> None:
    """Random graphs.

    Rows, late rows, attaching, detaching and merges in any order; drivers go on after each merge.
    """
    pair = Pair(drawn)
    for what, argument in steps:
        match what:
            case "rows":
                pair.rows(argument)
            case "merge":
                pair.merge(argument)
            case "late":
                pair.late(*argument)
            case _:
                pair.asked(what, argument)
        pair.compare()
    pair.rows([(1, 3), (1, 9)])
    pair.compare()
