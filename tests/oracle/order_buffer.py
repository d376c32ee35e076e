"""Order-buffer segments of the oracle mover.

Rows that wait for their release, with their section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tests.oracle.rows import Row
from tests.oracle.tables import read_rows_of, user_schema, write_rows
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decision_types import Member, ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec

_HEAD = [("_section", pa.int64()), ("_tardy", pa.bool_()), ("_time", pa.int64()), ("_row_end", pa.int64()),
         ("_source", pa.string()), ("_partition", pa.string()), ("_seq", pa.int64())]  # fmt: skip


def save_buffer(
    store: Store, key: str, spec: PipelineSpec, rows: Sequence[tuple[int, Row, bool]]
) -> FileRef:
    """Write (section, row, whether it stood before a tardy barrier) as one segment."""
    entries = [_entry(*entry) for entry in rows]
    sections = [section for section, _, _ in rows]
    return write_rows(
        store,
        key,
        "order",
        pa.schema([*user_schema(spec), *_HEAD]),
        entries,
        [row.time for _, row, _ in rows],
        section_min=min(sections),
        section_max=max(sections),
    )


def load_buffer(store: Store, segments: Iterable[FileRef]) -> list[tuple[int, Row, bool]]:
    """All (section, row, tardy) in the segments, those included that have left already."""
    return [
        (entry["_section"], _row(entry), bool(entry.get("_tardy")))
        for segment in segments
        for entry in read_rows_of(store, segment)
    ]


def drop_released(segments: Iterable[FileRef], released: ReleaseMark) -> list[FileRef]:
    """The segments that still hold a row at or above the mark.

    Never rewritten: a part that left is skipped when read.
    """
    return [
        s
        for s in segments
        if s.max_time is not None and ReleaseMark(s.extra["section_max"], s.max_time) >= released
    ]


def _entry(section: int, row: Row, tardy: bool) -> dict[str, Any]:
    source, partition = row.member
    place = {"_source": source, "_partition": partition, "_seq": row.seq}
    return {
        **row.values,
        **place,
        "_section": section,
        "_tardy": tardy,
        "_time": row.time,
        "_row_end": row.end,
    }


def _row(entry: dict[str, Any]) -> Row:
    values = {name: value for name, value in entry.items() if not name.startswith("_")}
    return Row(
        Member(entry["_source"], entry["_partition"]),
        entry["_seq"],
        entry["_time"],
        entry["_row_end"],
        values,
    )
