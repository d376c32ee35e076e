"""Slices of a cut, and the order of the tasks that read them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.spark.agreement import SECOND, table_of
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows.batch_reading import read_in_batches
from tidegate.jobs.rows.cut_division import ReadUnit
from tidegate.jobs.rows.stored_partials import decode_table
from tidegate.jobs.rows.unit_reading import ReadOrder, UnitAnswer
from tidegate.jobs.sources.object_inspection import Footer, read_footer
from tidegate.time_units import TICK_MIN

WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "aggregates": {"n": "count(*)", "s": "sum(v)"},
}
FOLDERS = AttemptFolders(BucketLayout("p"), CheckpointId(0, 7, "abcdef"))


def slice_of(store: LocalStore, member: Member, rows: list[dict[str, Any]]) -> Slice:
    """A slice of one new object; without rows it is empty."""
    if not rows:
        return Slice(member, 0, 0)
    key = f"inbox/{member.source}/{member.partition}.parquet"
    path = store.local_path(key)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table_of(rows), path)
    data = path.read_bytes()
    footer = read_footer(len(data), lambda start, length: data[start : start + length])
    assert isinstance(footer, Footer)
    part = {
        "key": key,
        "etag": "e",
        "size": len(data),
        "ordinal": 0,
        "rows": len(rows),
        "row_start": 0,
        "row_end": len(rows),
        "columns": footer.columns,
    }
    return Slice(member, 0, join_seq(0, len(rows)), (part,))


def rows_at(*seconds: int) -> list[dict[str, Any]]:
    """Rows at these times."""
    return [{"t": s * SECOND, "k": "x", "n": 1, "v": 0.1} for s in seconds]


def order_of(spec: Any, store: LocalStore, frontier: int = TICK_MIN) -> ReadOrder:
    """What the units of a cut have in common; no row is late for the events."""
    return ReadOrder(spec, frontier, TICK_MIN, frontier, FOLDERS, store.url)


def read_all(order: ReadOrder, unit: ReadUnit) -> tuple[UnitAnswer, pa.Table | None]:
    """The answer of a unit that is read in batches, and the rows that are kept."""
    readings = list(read_in_batches(order, unit))
    kept = [reading.kept for reading in readings if reading.kept is not None]
    return readings[-1].answer, pa.concat_tables(kept) if kept else None


def describe(answer: UnitAnswer, kept: pa.Table | None) -> dict[str, Any]:
    """What an answer says, however its partial aggregates are sorted and its files divided."""
    found = {name: value for name, value in vars(answer).items() if name != "footers"}
    found["late"], found["dead"] = (replace(one, written=()) for one in (answer.late, answer.dead))
    found["partials"] = {
        name: sorted(map(repr, decode_table(packed).to_pylist()))
        for name, packed in answer.partials.items()
        if isinstance(packed, bytes)
    }
    found["slices"] = [asdict(one) for one in answer.slices]
    if answer.kept is not None:
        times = sorted(answer.kept.times), sorted(answer.kept.late_times)
        found["kept"] = answer.kept.rows, answer.kept.late, times
    return {**found, "rows of events": None if kept is None else kept.to_pylist()}
