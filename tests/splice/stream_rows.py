"""What readers see of streams after a merge."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tests.streams.support import World

from tidegate.jobs.sinks.output_tables import (
    SPLICE_COLUMN,
    find_rewrite_starts,
    select_current_rows,
)

V = {"schema": {"v": "long"}}


def current(world: World, name: str) -> Any:
    """A stream as readers see it."""
    parts = [
        pq.read_table(io.BytesIO(world.bench.store.get(file.key).data))
        for epoch in world.bench.epochs()
        for file in epoch.files.get(name, [])
    ]
    if not parts:
        return pa.table({"position": [], "stream_time": [], "_id": [], "v": []})
    rows = pa.concat_tables(parts, promote_options="permissive")
    starts = (
        find_rewrite_starts(rows.filter(pc.is_valid(rows[SPLICE_COLUMN])))
        if SPLICE_COLUMN in rows.column_names
        else {}
    )
    return select_current_rows(rows, starts)


def values(world: World, name: str) -> list[int]:
    """Column v as readers see it."""
    return list(current(world, name)["v"].to_pylist())
