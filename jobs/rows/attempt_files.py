"""Files of an attempt: written on the local disk, then uploaded and described."""

import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.executor_keys import choose_task_keys
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.open_store import ScratchStore, open_store
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.file_footers import FileFooter
from tidegate.json_types import JsonObject

_SAMPLE_ROWS: Final = 10_000
_SCRATCH_ADDRESS: Final = re.compile("(?P<scratch>.+?) over (?P<below>(?:s3|file)://.+)")


def write_parquet_file(rows: pa.Table, path: Path) -> None:
    """Write rows as one Parquet file."""
    repeating: Any = _select_repeating_columns(rows)
    # As Spark writes them: what a query happens to know about nulls is not part of a table.
    rows = rows.cast(pa.schema(list(_make_type_nullable(pa.struct(list(rows.schema))))))
    pq.write_table(rows, path, compression="snappy", use_dictionary=repeating)


def store_file(
    store: Store, path: Path, key: str, kind: str, time: str | None, extra: JsonObject
) -> FileRef:
    """Upload a Parquet file and describe it.

    Args:
        store: where it goes.
        path: the local file.
        key: which no other process writes.
        kind: what it holds.
        time: the column whose least and greatest values, in ticks, the reference carries.
        extra: fields of the reference.
    """
    footer, stored = pq.read_metadata(path), store.upload(path, key)
    low, high = _read_time_bounds(path, footer, time) if time else (None, None)
    return FileRef(
        key=key,
        rows=footer.num_rows,
        bytes=stored.size,
        sha256=stored.sha256,
        min_time=low,
        max_time=high,
        kind=kind,
        extra=extra,
    )


def store_task_rows(
    url: str,
    rows: pa.Table,
    stem: str,
    kind: str,
    time: str | None,
    extra: JsonObject,
    footers: dict[str, FileFooter] | None = None,
) -> FileRef:
    """As `store_rows`, in a task; `url` is the address of the pipeline's store."""
    return store_rows(open_task_store(url), rows, stem, kind, time, extra, footers)


def store_rows(
    store: Store,
    rows: pa.Table,
    stem: str,
    kind: str,
    time: str | None,
    extra: JsonObject,
    footers: dict[str, FileFooter] | None = None,
) -> FileRef:
    """Write rows as a file under a random name, and describe it.

    A task that runs twice writes two files; only one of them is named by the manifest.

    Args:
        store: where the file goes.
        rows: at least one.
        stem: how its key begins.
        kind: what it holds.
        time: as in `store_file`.
        extra: fields of the reference.
        footers: get the file's footer by its key.
    """
    key = f"{stem}-{uuid4().hex[:12]}.parquet"
    with tempfile.TemporaryDirectory(prefix="tidegate-task-") as folder:
        path = Path(folder) / "rows.parquet"
        write_parquet_file(rows, path)
        found = store_file(store, path, key, kind, time, extra)
        if footers is not None:
            footers[key] = FileFooter.pack(pq.read_metadata(path), found.bytes)
        return found


@cache
def open_task_store(url: str) -> Store:
    """The store at an address, one for this process.

    Its keys come from the environment: those of the executor, or else those of the driver.

    A replay's address is that of a `ScratchStore`, which has two of them.
    """
    if over := _SCRATCH_ADDRESS.fullmatch(url):
        below = open_task_store(over["below"])
        return ScratchStore(below, open_task_store(over["scratch"]))
    # The address of a folder is not quoted.
    return open_store(url.removeprefix("file://"), choose_task_keys(os.environ))


def _select_repeating_columns(rows: pa.Table) -> list[str] | bool:
    """Return the columns that get a dictionary; for others Arrow builds one and gives it up.

    Rows at even distances are looked at: the first ones of several sources have the same times and
    numbers. True for few rows, and for lists and structs, whose columns in the file have other
    names.
    """
    if rows.num_rows < _SAMPLE_ROWS or any(map(pa.types.is_nested, rows.schema.types)):
        return True
    places = np.linspace(0, rows.num_rows - 1, _SAMPLE_ROWS, dtype=np.int64)
    sample = rows.take(pa.array(places))
    return [
        name
        for name in rows.column_names
        if pc.count_distinct(sample[name]).as_py() <= _SAMPLE_ROWS // 2
    ]


def _make_type_nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_make_type_nullable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(own.name, _make_type_nullable(own.type)) for own in kind])
    return kind


def _read_time_bounds(path: Path, footer: Any, time: str) -> tuple[int | None, int | None]:
    place = next(i for i in range(len(footer.schema)) if footer.schema.column(i).path == time)
    found = [footer.row_group(i).column(place).statistics for i in range(footer.num_row_groups)]
    # Arrow and Spark leave out the statistics of a row group whose times are all null.
    if all(s is not None and s.has_min_max for s in found):
        return min(s.min_raw for s in found), max(s.max_raw for s in found)
    ends = pc.min_max(pq.read_table(path, columns=[time], partitioning=None)[time].cast(pa.int64()))
    return ends["min"].as_py(), ends["max"].as_py()
