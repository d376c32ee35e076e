"""Writes rows of sealed epochs as other files: arranged by a layout, or many files as one.

These functions are `RowWork`: on Spark a task calls them. They return which files they have
written, and the footers of these, so that a publisher can enter them into a table.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import load_file_io
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata

from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.jobs.engine.arrow_tables import conform_to_schema
from tidegate.jobs.engine.file_footers import FileFooter, note_footers

from .errors import OTHER_ROWS
from .iceberg_catalog import build_io_properties
from .published_tables import use_plain_types
from .table_files import (
    PartitionValues,
    PhysicalLayout,
    make_merged_stem,
    read_file_rows,
    split_by_partition,
    write_partition_files,
)

_BATCH_BYTES: Final = 64_000_000
"""Bytes of an epoch's files rearranged at a time; the names of rearranged files depend on it."""


@dataclass
class WrittenFiles:
    """Files that hold rows of sealed epochs.

    Attributes:
        partitions: key -> partition.
        footers: key -> footer.
    """

    partitions: dict[str, PartitionValues] = field(default_factory=dict)
    footers: dict[str, FileFooter] = field(default_factory=dict)

    def list_addresses(self, store: Store) -> dict[str, PartitionValues]:
        """Return address -> partition; this process knows the footers from then on."""
        note_footers(store, self.footers)
        return {store.uri(key): values for key, values in self.partitions.items()}


def rewrite_epoch_files(
    pipeline: str, keys: Sequence[str], stem: str, arrangement: PhysicalLayout, store: Store
) -> WrittenFiles:
    """Write the rows of an epoch's files again, by a layout.

    The keys of the new files follow from their content. A second publisher finds the files of the
    first one and keeps them.

    Args:
        pipeline: name, for errors.
        keys: of the files.
        stem: how the keys of the new files begin.
        arrangement: the layout.
        store: of the pipeline.

    Raises:
        PoisonError: a file of that name has another number of rows.
    """
    written = WrittenFiles()

    def put(key: str, data: bytes, rows: int) -> str:
        """Store a file, unless it is there already."""
        found = data
        try:
            store.create(key, data)
        except PreconditionFailedError:
            found = store.get(key).data
        footer = pq.read_metadata(io.BytesIO(found))
        if footer.num_rows != rows:
            raise OTHER_ROWS(
                pipeline=pipeline, address=store.uri(key), rows=footer.num_rows, expected=rows
            )
        written.footers[key] = FileFooter.pack(footer, len(found))
        return key

    for number, rows in enumerate(_read_row_batches(store, keys)):
        parts = split_by_partition(rows, arrangement)
        written.partitions |= write_partition_files(put, f"{stem}-{number:03d}", parts)
    return written


def _read_row_batches(store: Store, keys: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of files in batches of about `_BATCH_BYTES`."""
    batch: list[pa.Table] = []
    size = 0
    for key in keys:
        data = store.get(key).data
        batch.append(pq.read_table(io.BytesIO(data)))
        size += len(data)
        if size >= _BATCH_BYTES or key == keys[-1]:
            yield pa.concat_tables(batch, promote_options="permissive")
            batch, size = [], 0


def merge_data_files(
    metadata: TableMetadata,
    parts: Sequence[DataFile],
    folder: str,
    arrangement: PhysicalLayout,
    last: int | None,
    store: Store,
) -> WrittenFiles:
    """Write the rows of data files of a table as one file for each partition.

    Args:
        metadata: of the table.
        parts: the data files.
        folder: of the table, in the store.
        arrangement: the layout of the new files.
        last: rows of later slots are left out; None: all rows are kept.
        store: of the pipeline.

    Raises:
        pa.ArrowInvalid: a data file is damaged.
    """
    written = WrittenFiles()

    def put(key: str, data: bytes, _rows: int) -> str:
        """Store a file under a key that no other process writes."""
        store.create(key, data)
        footer: Any = pq.read_metadata(io.BytesIO(data))
        written.footers[key] = FileFooter.pack(footer, len(data))
        return key

    schema = use_plain_types(metadata.schema().as_arrow().empty_table()).schema
    schema = pa.schema([field.remove_metadata() for field in schema])
    files = load_file_io(build_io_properties(store))
    found = [conform_to_schema(read_file_rows(metadata, files, part), schema) for part in parts]
    rows = pa.concat_tables(found)
    # A mismatch means that the files are not those that Iceberg describes.
    assert rows.num_rows == sum(part.record_count for part in parts)  # noqa: S101
    if last is not None:
        rows = rows.filter(pc.less_equal(rows["_epoch"], last))
    # Made here: another attempt of the same task writes other files.
    stem = f"{folder}/{make_merged_stem(metadata)}"
    written.partitions = write_partition_files(put, stem, split_by_partition(rows, arrangement))
    return written
