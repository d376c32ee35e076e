"""Partial aggregates on their way from the tasks that fold rows to those who merge them.

They are part of a task's answer up to a size: Spark bounds what the tasks of a job send. Larger
ones go by way of the store, as objects of the attempt, which the driver deletes after the epoch.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import pyarrow as pa

from tidegate.checkpoints.bucket_layout import AttemptFolders
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.errors import TidegateError

RESULT_BYTES: Final = 16 << 20
"""All that the tasks of one job may send to the driver."""
SENT_BYTES: Final = 12 << 20
"""Partial aggregates among them, compressed."""
_SENT_ALONE: Final = 64 << 10


@dataclass(frozen=True)
class StoredTable:
    """A table in the store, as an Arrow stream.

    Attributes:
        key: of its object.
        rows: how many it has.
        bytes: its size.
    """

    key: str
    rows: int
    bytes: int


def store_table(
    store: Store, folders: AttemptFolders, name: str, number: int, packed: bytes
) -> StoredTable:
    """Put the partial aggregates of a window into the store.

    A task that runs twice writes other objects. `number` is that of the unit or bucket.
    """
    stem = folders.segment_stem(f"partials:{name}")
    key = f"{stem}-{number:05d}-{uuid4().hex[:12]}.arrow"
    store.put(key, packed)
    return StoredTable(key, decode_table(packed).num_rows, len(packed))


def send_table(
    store: Store, folders: AttemptFolders, name: str, number: int, rows: pa.Table
) -> bytes | StoredTable:
    """Return a small table as it is, and another one as an object of the store."""
    packed = encode_table(rows)
    if len(packed) <= _SENT_ALONE:
        return packed
    return store_table(store, folders, name, number, packed)


def delete_tables(store: Store, tables: Iterable[StoredTable]) -> None:
    """Delete tables, as `delete_objects` does."""
    delete_objects(store, [table.key for table in tables])


def delete_objects(store: Store, keys: Sequence[str]) -> None:
    """Delete objects; what a store that is away keeps of them, `gc` removes with the attempt."""
    with suppress(TidegateError):
        map_in_threads(store.delete, keys, 4)


def delete_left_tables(store: Store, folders: AttemptFolders, name: str) -> None:
    """Delete the tables of an attempt whose names begin so, which tasks of a failed job have put.

    A task that still runs elsewhere may put another one, which `gc` removes.
    """
    with suppress(TidegateError):
        found = list(store.list_objects(folders.segment_stem(f"partials:{name}")))
        delete_objects(store, [one.key for one in found])


def encode_table(table: pa.Table) -> bytes:
    """Return a table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def decode_table(packed: bytes) -> pa.Table:
    """The way back of `encode_table`."""
    return pa.ipc.open_stream(packed).read_all()
