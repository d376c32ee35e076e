"""Live windows of the oracle mover and the segments they rest in.

A segment is a log of whole windows: the newest entry of a window (key, start, end) counts, an entry
marked gone removes it (a session that was merged into a larger one). A segment is dropped when
every window in it is purged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tests.oracle.rows import Row
from tests.oracle.tables import read_rows_of, user_schema, write_rows
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MAX

Key = tuple[Any, ...]


def normalize_key(values: Iterable[Any]) -> Key:
    """All NaN are one value of a key, and -0.0 is 0.0."""
    floats = (value if not isinstance(value, float) else value + 0.0 for value in values)
    return tuple(math.nan if value != value else value for value in floats)


@dataclass
class Live:
    """One window that is not purged.

    Attributes:
        rows: contributions, as far as a later firing needs them.
        revision: of the newest result; -1 before the first.
        replaceable: bounds of results that readers hold and that the next result replaces.
        changed: rows joined in this epoch.
        gone: merged into another window in this epoch.
        opened_at: least event time of the rows that opened it, for `fire_every`.
    """

    key: Key
    start: int
    end: int
    rows: list[Row] = field(default_factory=list)
    revision: int = -1
    replaceable: list[tuple[int, int]] = field(default_factory=list)
    changed: bool = False
    gone: bool = False
    opened_at: int | None = None

    @property
    def id(self) -> tuple[Key, int, int]:
        """What identifies it."""
        return self.key, self.start, self.end


_HEAD = [("_id", pa.int64()), ("_start", pa.int64()), ("_end", pa.int64()), ("_revision", pa.int64()), ("_opened", pa.int64()),
         ("_gone", pa.bool_()),
         ("_standing", pa.list_(pa.int64())), ("_time", pa.int64()), ("_row_end", pa.int64()),
         ("_source", pa.string()), ("_partition", pa.string()), ("_seq", pa.int64())]  # fmt: skip


def save_windows(
    store: Store,
    key: str,
    kind: str,
    spec: PipelineSpec,
    names: Sequence[str],
    windows: Iterable[Live],
) -> FileRef:
    """Write windows as one segment; `names` are the key columns."""
    entries: list[dict[str, Any]] = []
    ends: list[int] = []
    for number, window in enumerate(windows):
        entries.append(_head(number, window, names))
        entries.extend(_contribution(number, row) for row in window.rows)
        ends.append(window.end)
    schema = pa.schema([*user_schema(spec), *_HEAD])
    return write_rows(store, key, kind, schema, entries, ends)


def load_windows(
    store: Store, segments: Iterable[FileRef], names: Sequence[str]
) -> dict[tuple[Key, int, int], Live]:
    """The windows that the segments, oldest first, leave."""
    windows: dict[tuple[Key, int, int], Live] = {}
    for segment in segments:
        entries: dict[int, Live] = {}
        for row in read_rows_of(store, segment):
            if row["_start"] is None:
                entries[row["_id"]].rows.append(_row(row))
            else:
                entries[row["_id"]] = _live(row, names)
        windows.update({entry.id: entry for entry in entries.values()})
    return {id: window for id, window in windows.items() if not window.gone}


def _head(number: int, window: Live, names: Sequence[str]) -> dict[str, Any]:
    return {
        **dict(zip(names, window.key, strict=True)),
        "_id": number,
        "_start": window.start,
        "_end": window.end,
        "_revision": window.revision,
        "_gone": window.gone,
        "_opened": window.opened_at,
        "_standing": [bound for bounds in window.replaceable for bound in bounds],
    }


def _contribution(number: int, row: Row) -> dict[str, Any]:
    source, partition = row.member
    place = {
        "_source": source,
        "_partition": partition,
        "_seq": row.seq,
        "_time": row.time,
        "_row_end": min(row.end, TICK_MAX),
    }
    return {**row.values, **place, "_id": number}


def _live(row: dict[str, Any], names: Sequence[str]) -> Live:
    flat = row["_standing"]
    replaceable = list(zip(flat[::2], flat[1::2], strict=True))
    key = normalize_key(row[name] for name in names)
    return Live(
        key,
        row["_start"],
        row["_end"],
        [],
        row["_revision"],
        replaceable,
        gone=row["_gone"],
        opened_at=row.get("_opened"),
    )


def _row(row: dict[str, Any]) -> Row:
    values = {name: value for name, value in row.items() if not name.startswith("_")}
    return Row(
        Member(row["_source"], row["_partition"]),
        row["_seq"],
        row["_time"],
        row["_row_end"],
        values,
    )
