"""Rows of a stream by position, from the sealed epochs of the current lineage: what a backfill reads."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.store import Store
from tidegate.jobs.sinks.schemas import type_of
from tidegate.jobs.spec.errors import PoisonError
from tidegate.jobs.spec.streams import ORIGIN
from tidegate.jobs.streams.append import running_max

__all__ = ["META", "History", "LogHistory", "event_rows", "read_files"]

META = {"_id": pa.string(), "_via": pa.string(), "_origin": pa.string(), "_origin_id": pa.string()}
"""Whose row it is: identity, the attachment that sent it, the stream and the row it was made of."""


class History(Protocol):
    """Where old rows come from."""

    def rows(self, stream: str, columns: Mapping[str, str], start: int, end: int) -> Any:
        """Rows ``start <= position < end``: columns, ``position``, ``stream_time`` (int64 ticks), ``_id``; in order."""
        ...


class LogHistory:
    """Reads them from the files that the manifests name. One GET for each epoch back to the first row asked for."""

    def __init__(self, log: SlotLog, event_time: str) -> None:
        self._log = log
        self._event_time = event_time

    def rows(self, stream: str, columns: Mapping[str, str], start: int, end: int) -> Any:
        """The rows; retired epochs cannot be read.

        Raises:
            PoisonError: the rows are in epochs that were retired.
        """
        found = list(self._epochs(stream, start, end))[::-1]
        files = [file for epoch, _ in found for file in epoch.files.get(stream, [])]
        table = read_files(self._log.store, files)
        if table is None:
            return pa.table({}, schema=_schema(columns)) if start >= end else self._refuse(stream, start)
        rows = event_rows(table, columns, self._event_time, found[0][1]) if stream == ORIGIN else stream_rows(table, columns)
        first = rows["position"][0].as_py() if rows.num_rows else start
        if first > start:
            self._refuse(stream, start)
        return rows.slice(start - first, end - start)

    def _epochs(self, stream: str, start: int, end: int) -> Iterator[tuple[Manifest, int | None]]:
        """Epochs that may hold the rows, newest first, each with the stream's last time before it."""
        newer: Manifest | None = None
        for filled in self._log.iter_back(self._log.head().checkpoint):
            older = filled.record if isinstance(filled.record, Manifest) else None
            if newer is not None:
                first, last = _stood(older, stream)
                # A splice merged into ordered events has rows that stand between others and have no position of their own.
                if first < min(end, _stood(newer, stream)[0]):
                    yield newer, last
                if first <= start and (last is not None or first == 0):
                    return
            if older is None:
                return
            newer = older
        if newer is not None:
            yield newer, None

    def _refuse(self, stream: str, start: int) -> Any:
        raise PoisonError(
            f"row {start} of {stream} lies in an epoch that was retired",
            code="streams.retired",
            kept="everything sealed so far",
            advice="raise checkpoint.retain before attaching to an old stream, or attach with positions that are still there",
        )


def read_files(store: Store, files: list[FileRef]) -> Any | None:
    """All rows of Parquet files in the store; None without files."""
    tables = [pq.read_table(io.BytesIO(store.get(file.key).data), partitioning=None) for file in files]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def event_rows(table: Any, columns: Mapping[str, str], event_time: str, last: int | None) -> Any:
    """Rows of the events table as rows of a stream: identity from provenance, time the running maximum of event time."""
    table = table.sort_by("position")
    identity = pc.binary_join_element_wise(table["_source"], table["_partition"], table["_seq"].cast(pa.string()), "/")
    time = running_max(table[event_time].cast(pa.timestamp("us", "UTC")).cast(pa.int64()), last)
    values = {name: table[name].cast(type_of(kind)) for name, kind in columns.items()}
    return pa.table({**values, "position": table["position"], "stream_time": time, "_id": identity}, schema=_schema(columns))


def stream_rows(table: Any, columns: Mapping[str, str]) -> Any:
    """Rows of a stream's own table."""
    table = table.sort_by("position")
    time = table["stream_time"].cast(pa.int64())
    picked = {name: table[name] for name in (*columns, "position", "_id")}
    return pa.table({**picked, "stream_time": time}).select([f.name for f in _schema(columns)])


def _schema(columns: Mapping[str, str]) -> Any:
    fields = {name: type_of(kind) for name, kind in columns.items()}
    return pa.schema({**fields, "position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()})


def _stood(epoch: Manifest | None, stream: str) -> tuple[int, int | None]:
    """Next position and last time of a stream after an epoch; no time is known of epochs whose spec had no streams."""
    notes = epoch.notes if epoch else {}
    known = notes.get("streams", {}).get("streams", {}).get(stream)
    position = notes.get("next_position", 0) if stream == ORIGIN else (known or {}).get("next", 0)
    return position, known["last"] if known and known["next"] == position else None
