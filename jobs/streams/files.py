"""What an epoch of dispatching writes: tables of streams, and the state that the next epoch starts from."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical import sha256_of_bytes
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import MoveOrder

__all__ = ["DispatchFiles"]


class DispatchFiles:
    """The attempt's own files, and the live segments as they change."""

    def __init__(self, store: Store, order: MoveOrder, segments: Sequence[FileRef]) -> None:
        self._store, self._order = store, order
        self.segments = list(segments)
        self.tables: dict[str, tuple[FileRef, ...]] = {}

    def live_segments(self, kind: str) -> list[FileRef]:
        """Live segments of a kind."""
        return [ref for ref in self.segments if ref.kind == kind]

    def drop_segments(self, kind: str) -> None:
        """The segments of a kind are not needed any more."""
        self.segments = [ref for ref in self.segments if ref.kind != kind]

    def write_table(self, name: str, rows: Any, time: str | None) -> None:
        """Write this epoch's rows of a table; `time` is the column whose least and greatest values its reference carries."""
        low, high = _compute_time_range(rows[time]) if time else (None, None)
        key = f"{self._order.prefix}/tables/{name}/{self._order.tag}/part-0.parquet"
        self.tables[name] = (self._write_parquet_file(key, f"table:{name}", rows, low, high, {}),)

    def write_segment(
        self, kind: str, rows: Any, low: int | None = None, high: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> FileRef:
        """Write a state segment."""
        key = f"{self._order.prefix}/state/{self._order.tag}/{kind.replace(':', '-')}.parquet"
        ref = self._write_parquet_file(key, kind, rows, low, high, extra or {})
        self.segments.append(ref)
        return ref

    def _write_parquet_file(self, key: str, kind: str, rows: Any, low: int | None, high: int | None, extra: Mapping[str, Any]) -> FileRef:
        buffer = io.BytesIO()
        pq.write_table(rows, buffer, compression="snappy")
        data = buffer.getvalue()
        self._store.put(key, data)
        return FileRef(
            key=key,
            rows=rows.num_rows,
            bytes=len(data),
            sha256=sha256_of_bytes(data),
            min_time=low,
            max_time=high,
            kind=kind,
            extra=dict(extra),
        )


def _compute_time_range(times: Any) -> tuple[int, int]:
    found = pc.min_max(times.cast(pa.int64()))
    return found["min"].as_py(), found["max"].as_py()
