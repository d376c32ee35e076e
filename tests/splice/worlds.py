"""Random streams whose rows come late, and the results of a run in which they had come in time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tests.engine.harness import SECOND, Bench, row, spec_of

from tidegate.jobs.sinks.output_tables import RowIdentity, compute_current_positions
from tidegate.jobs.sinks.published_tables import select_current_revisions
from tidegate.jobs.spec.pipeline import PipelineSpec

AGGREGATES = {
    "n": "count(*)", "s": "sum(v)", "low": "min(v)", "high": "max(v)", "mean": "avg(v)", "kinds": "distinct(v)",
    "first": "first(v)", "last": "last(v)", "all": "collect(v)",
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "tumbling", "size": "10s", "keys": ["_source"], "aggregates": AGGREGATES},
    "slow": {
        "kind": "tumbling",
        "size": "20s",
        "offset": "3s",
        "lateness": "15s",
        "aggregates": {"n": "count(v)", "s": "sum(v)"},
    },
    "visits": {"kind": "session", "gap": "4s", "aggregates": AGGREGATES},
}

CRASH_POINTS = (
    "merge.start",
    "merge.planned",
    "merge.written",
    "merge.seal",
    "merge.sealed",
    "merge.noted",
)
"""Where a test may end a merge, in order; it is committed after ``merge.seal``."""


def world(windows: Iterable[str] = tuple(WINDOWS), **more: Any) -> Bench:
    """A pipeline with two sources and some windows."""
    return Bench(spec_of(windows={name: WINDOWS[name] for name in windows}, **more))


def play(bench: Bench, epochs: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> None:
    """Epochs by source and rows.

    Then two more, far ahead, so that everything before is closed and purged.
    """
    engine = bench.engine()
    far = [{"t": 10_000 * SECOND, "v": 0, "kind": "data", "n": None}]
    for rows in [*epochs, dict.fromkeys(bench.sources, far)]:
        for name, new in rows.items():
            bench.sources[name].append(*new)
        bench.clock.advance(1.0)
        engine.run_epoch()


def table(bench: Bench, name: str) -> Any:
    """A table over all sealed epochs."""
    parts = [
        pq.read_table(io.BytesIO(bench.store.get(file.key).data))
        for e in bench.epochs()
        for file in e.files.get(name, [])
        if file.rows
    ]
    return pa.concat_tables(parts, promote_options="permissive") if parts else None


def results(bench: Bench, name: str) -> list[dict[str, Any]]:
    """What readers of current results see, without revisions."""
    found = table(bench, name)
    if found is None:
        return []
    rows = select_current_revisions(found, bench.spec.windows[name]).to_pylist()
    plain = [
        {k: v for k, v in row.items() if k not in ("revision", "replaces", "_timeline", "_epoch")}
        for row in rows
    ]
    return sorted(plain, key=lambda row: repr((row["window_start"], row.get("_source"))))


def stream(bench: Bench) -> list[tuple[int, int, RowIdentity]]:
    """The events as (position, time, identity), in their current order."""
    found = table(bench, "events")
    if found is None:
        return []
    if "_splice" in found.column_names:
        found = compute_current_positions(
            found, found.filter(pa.compute.is_valid(found["_splice"])), "t"
        )
    times = found["t"].cast(pa.int64()).to_pylist()
    rows = zip(
        found["position"].to_pylist(),
        times,
        *(found[c].to_pylist() for c in ("_source", "_partition", "_seq")),
        strict=True,
    )
    return sorted(
        (position, time, (source, partition, seq))
        for position, time, source, partition, seq in rows
    )


def in_time(spec: PipelineSpec, epochs: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> Bench:
    """The same rows in a run in which each source sends all of them at once, in order of event
    time.
    """
    bench = Bench(spec)
    whole = {
        name: sorted((r for rows in epochs for r in rows.get(name, [])), key=lambda r: r["t"])
        for name in bench.sources
    }
    play(bench, [whole])
    return bench


def late_identities(bench: Bench) -> list[RowIdentity]:
    """Late rows, each once, in order."""
    return sorted({(r["_source"], r["_partition"], r["_seq"]) for r in bench.rows("late")})


Epochs = list[dict[str, list[dict[str, Any]]]]
LATE_ONES: Epochs = [
    {"a": [row(1, 1), row(5, 2)], "b": [row(2, 3)]},
    {"a": [row(40, 4)], "b": [row(41, 5)]},
    {"a": [row(3, 6), row(12, 7), row(44, 8)], "b": [row(9, 9), row(45, 10), row(12, 11)]},
]
