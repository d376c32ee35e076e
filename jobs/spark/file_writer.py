"""Tables and state segments on their way into the store: local Parquet files first, then uploads.

Few rows come to the driver as Arrow and are one file; many are written by Spark's tasks, into the
scratch folder as they see it. Rows, times and counts are taken from what was written, so that they
cannot disagree with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store
from tidegate.jobs.rules.duck_frame import Frame
from tidegate.json_types import JsonObject

from .staging import Staging

FETCH_ROWS: Final = 100_000
"""Results of up to this many rows are written by the driver.

Below a second of Arrow, and one file instead of several.
"""

_SAMPLE_ROWS: Final = 10_000


def collect_to_driver(frame: Frame) -> pa.Table:
    """The rows of a small result, from one task.

    For few rows a shuffle costs more than all the work.
    """
    return frame.coalesce(1).toArrow()


@dataclass(frozen=True)
class WrittenFiles:
    """One table's or segment's files: `paths` here, and `refs` in the store, in one order."""

    refs: tuple[FileRef, ...] = ()
    paths: tuple[Path, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(ref.rows for ref in self.refs)

    @property
    def bytes(self) -> int:
        """Bytes in all files."""
        return sum(ref.bytes for ref in self.refs)

    def read_columns(self, columns: list[str]) -> pa.Table | None:
        """Some columns of what was written; None when nothing was."""
        if not self.paths:
            return None
        return pa.concat_tables(
            pq.read_table(path, columns=columns, partitioning=None) for path in self.paths
        )


def combine_written_files(pieces: Iterable[WrittenFiles]) -> WrittenFiles:
    """Several writings as one."""
    found = list(pieces)
    return WrittenFiles(
        tuple(ref for piece in found for ref in piece.refs),
        tuple(path for piece in found for path in piece.paths),
    )


@dataclass
class FileWriter:
    """Writes one attempt's files, those of tasks by way of its `staging`.

    Safe to use from several threads.
    """

    _store: Store
    _folders: AttemptFolders
    _scratch: Path
    staging: Staging
    _numbers: Iterator[int] = field(default_factory=count)

    def write_table(
        self, name: str, rows: pa.Table | DataFrame | Iterator[pa.Table], time: str | None
    ) -> WrittenFiles:
        """Write rows of an output table; no file without rows, one for each of several tables.

        `time` is the column whose least and greatest values, in ticks, each reference carries.
        """
        return self._write_and_upload(
            f"{self._folders.table_prefix(name)}part", f"table:{name}", rows, time, {}
        )

    def write_segment(
        self,
        kind: str,
        rows: pa.Table | DataFrame,
        time: str | None,
        extra: JsonObject | None = None,
    ) -> WrittenFiles:
        """Write rows of state as segments: none without rows, several if tasks write many.

        Each reference carries `extra`, and the least and greatest values of the column `time`.
        """
        return self._write_and_upload(
            self._folders.segment_stem(kind), kind, rows, time, extra or {}
        )

    def write_scratch_files(self, rows: pa.Table | DataFrame) -> tuple[Path, ...]:
        """Write rows for this epoch only.

        Files on the scratch disk, none of them when there are no rows.
        """
        return tuple(self._write_local_files(rows))

    def _write_and_upload(
        self, stem: str, kind: str, rows: Any, time: str | None, extra: JsonObject
    ) -> WrittenFiles:
        files = self._write_local_files(rows)
        named = [(path, f"{stem}-{next(self._numbers):05d}.parquet") for path in files]
        refs = [_describe_file(path, key, kind, time, extra) for path, key in named]
        # Uploads wait for the network, not for a core.
        with ThreadPoolExecutor(4) as pool:
            sums = list(pool.map(lambda item: self._store.upload(*item), named))
        refs = [
            ref.model_copy(update={"sha256": put.sha256, "bytes": put.size})
            for ref, put in zip(refs, sums, strict=True)
        ]
        return WrittenFiles(tuple(refs), tuple(files))

    def _write_local_files(self, rows: pa.Table | DataFrame | Iterator[pa.Table]) -> list[Path]:
        if isinstance(rows, pa.Table):
            return self._write_by_driver(rows)
        if isinstance(rows, Iterator):
            with ThreadPoolExecutor(2) as pool:
                return [path for paths in pool.map(self._write_by_driver, rows) for path in paths]
        return self._write_by_tasks(rows)

    def _write_by_driver(self, rows: pa.Table) -> list[Path]:
        if rows.num_rows == 0:
            return []
        path = self._scratch / f"{uuid4().hex}.parquet"
        repeating: Any = _select_repeating_columns(rows)
        rows = rows.cast(_make_columns_nullable(rows.schema))
        pq.write_table(rows, path, compression="snappy", use_dictionary=repeating)
        return [path]

    def _write_by_tasks(self, rows: DataFrame) -> list[Path]:
        parts = self.staging.write_rows(rows, self._scratch / uuid4().hex)
        sizes = {path: pq.read_metadata(path).num_rows for path in parts}
        filled = [path for path in parts if sizes[path]]
        # The number of shuffle partitions must not multiply small objects.
        if len(filled) > 1 and sum(sizes.values()) <= FETCH_ROWS:
            return self._write_by_driver(
                pa.concat_tables(pq.read_table(path, partitioning=None) for path in filled)
            )
        return filled


def _select_repeating_columns(rows: pa.Table) -> list[str] | bool:
    """Return the columns that get a dictionary; for others Arrow builds one and gives it up.

    True for few rows, and for lists and structs, whose columns in the file have other names.
    """
    if rows.num_rows < _SAMPLE_ROWS or any(map(pa.types.is_nested, rows.schema.types)):
        return True
    sample = rows.slice(0, _SAMPLE_ROWS)
    return [
        name
        for name in rows.column_names
        if pc.count_distinct(sample[name]).as_py() <= _SAMPLE_ROWS // 2
    ]


def _make_columns_nullable(schema: pa.Schema) -> pa.Schema:
    """Every column optional, as Spark writes them.

    What a query happens to know about nulls is not part of a table.
    """
    return pa.schema(list(_make_type_nullable(pa.struct(list(schema)))))


def _make_type_nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_make_type_nullable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(own.name, _make_type_nullable(own.type)) for own in kind])
    return kind


def _describe_file(path: Path, key: str, kind: str, time: str | None, extra: JsonObject) -> FileRef:
    footer = pq.read_metadata(path)
    low, high = _read_time_bounds(path, footer, time) if time else (None, None)
    return FileRef(
        key=key,
        rows=footer.num_rows,
        # The upload reads the file anyway, and fills these in.
        bytes=0,
        sha256="",
        min_time=low,
        max_time=high,
        kind=kind,
        extra=extra,
    )


def _read_time_bounds(path: Path, footer: Any, time: str) -> tuple[int | None, int | None]:
    place = next(i for i in range(len(footer.schema)) if footer.schema.column(i).path == time)
    found = [footer.row_group(i).column(place).statistics for i in range(footer.num_row_groups)]
    # Arrow and Spark leave out the statistics of a row group whose times are all null.
    if all(s is not None and s.has_min_max for s in found):
        return min(s.min_raw for s in found), max(s.max_raw for s in found)
    ends = pc.min_max(pq.read_table(path, columns=[time], partitioning=None)[time].cast(pa.int64()))
    return ends["min"].as_py(), ends["max"].as_py()
