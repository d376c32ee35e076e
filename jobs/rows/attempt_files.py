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
        time: the column whose least and greatest values, in ticks, the reference carries.
        extra: fields of the reference.
        footers: get the file's footer by its key.
    """
    key = f"{stem}-{uuid4().hex[:12]}.parquet"
    low, high = pc.min_max(rows[time].cast(pa.int64())).as_py().values() if time else (None, None)
    repeating: Any = _select_repeating_columns(rows)
    # As Spark writes them: what a query happens to know about nulls is not part of a table.
    rows = rows.cast(pa.schema(list(_make_type_nullable(pa.struct(list(rows.schema))))))
    with tempfile.TemporaryDirectory(prefix="tidegate-task-") as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(rows, path, compression="snappy", use_dictionary=repeating)
        stored = store.upload(path, key)
        if footers is not None:
            footers[key] = FileFooter.pack(pq.read_metadata(path), stored.size)
    return FileRef(
        key=key,
        rows=rows.num_rows,
        bytes=stored.size,
        sha256=stored.sha256,
        min_time=low,
        max_time=high,
        kind=kind,
        extra=extra,
    )


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
