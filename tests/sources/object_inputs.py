"""Objects in a bucket, and all slices of them."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import ReadLimits, SourceSpec

ME = Member("a")
COLUMNS = {"t": "timestamp", "n": "long"}


def parquet(rows: int, **columns: pa.Array) -> bytes:
    """A Parquet object."""
    times = pa.array(range(rows), pa.timestamp("us", tz="UTC"))
    table = pa.table(columns or {"t": times, "n": pa.array(range(rows), pa.int64())})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def spec(**more: Any) -> SourceSpec:
    """A source of times and numbers."""
    return SourceSpec.model_validate(
        {"path": "inbox/a", "schema": COLUMNS, "event_time": "t", "lag": "1s", **more}
    )


def inbox(*sizes: int) -> dict[str, bytes]:
    """Objects with so many rows each."""
    return {f"inbox/a/{i:03d}.parquet": parquet(rows) for i, rows in enumerate(sizes)}


def all_slices(
    src: ObjectSource, limits: ReadLimits, resume: dict[str, Any] | None = None
) -> list[Slice]:
    """Plan until nothing is left."""
    slices: list[Slice] = []
    while True:
        part = src.plan(ME, resume, limits)
        if part.is_empty:
            return slices
        slices.append(part)
        resume = part.resume


def rows_of(slices: list[Slice]) -> list[tuple[str, int]]:
    """The rows that slices name, as (three digits of the key, row)."""
    return [
        (p["key"][-11:-8], row)
        for s in slices
        for p in s.parts
        for row in range(p["row_start"], p["row_end"])
    ]
