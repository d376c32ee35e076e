"""Splits, sorts and writes the rows of a table's files, and describes the files for Iceberg.

A table's own metadata decides about partitions and order, not the spec: so rows always fit the
table as it is. `TableFollower.set_layout` brings the metadata in line with the spec.

The second half replaces data files in one snapshot, for compaction and for the rewind of a merged
file. New files are stored as `<table>/merged/<bound>-<id>-<partition>.parquet`. Only a snapshot
whose sequence number is at most the bound may commit them, and no catalog gives a table the same
sequence number twice. So a file that no snapshot names, with a bound below the table's newest
number, can never be committed and may be deleted, even if its writer is still running.

See `docs/decisions/0075-the-publisher-arranges-and-compacts-files.md`.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO, InputFile, InputStream
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.sorting import SortDirection
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    IcebergType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from tidegate.checkpoints.canonical_json import canonical_bytes, sha256_of_bytes
from tidegate.jobs.engine.arrow_tables import encode_parquet, get_column_or_nulls
from tidegate.jobs.engine.file_footers import FileFooter, find_footer
from tidegate.jobs.spec.table_layout import PartitionBy, PartitionTransform, SortBy, TableLayout

from .table_scan import match_columns

PartitionValues = tuple[Any, ...]
"""The partition of one file, in the order of the table's partition fields."""
PutFile = Callable[[str, bytes, int], str]
"""Stores a file of so many rows under a name, and returns its address."""

_BOUNDS_OF_COLUMN = TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX
_PARTITION, _SORT_ORDER = 3, 15  # positions of these fields in Iceberg's record of a data file
_NUMPY_TIME_UNITS = {
    PartitionTransform.YEAR: "Y",
    PartitionTransform.MONTH: "M",
    PartitionTransform.DAY: "D",
    PartitionTransform.HOUR: "h",
}


@dataclass(frozen=True)
class PhysicalLayout:
    """How a table's files are partitioned and their rows sorted; false if they are neither."""

    partitions: tuple[PartitionBy, ...] = ()
    order: tuple[SortBy, ...] = ()

    @classmethod
    def from_spec(cls, layout: TableLayout | None) -> PhysicalLayout:
        """Return the layout that a spec asks for."""
        return cls(layout.partition_fields, layout.sort_fields) if layout else cls()

    @classmethod
    def from_metadata(cls, metadata: TableMetadata) -> PhysicalLayout:
        """Return the layout that a table has.

        Raises:
            ValueError: the table uses a transform that tidegate does not support.
        """
        name = metadata.schema().find_column_name
        partitions = [
            _parse_partition(str(name(field.source_id)), str(field.transform))
            for field in metadata.spec().fields
        ]
        sorting = metadata.sort_order_by_id(metadata.default_sort_order_id)
        fields = sorting.fields if sorting else []
        order = [
            SortBy(str(name(field.source_id)), field.direction is SortDirection.DESC)
            for field in fields
        ]
        return cls(tuple(partitions), tuple(order))

    def __bool__(self) -> bool:
        return bool(self.partitions or self.order)

    @property
    def digest(self) -> str:
        """A short hash of the layout, used in the names of files arranged by it."""
        words = {
            "partitions": [str(p) for p in self.partitions],
            "order": [f"{s.column} {s.descending}" for s in self.order],
        }
        return sha256_of_bytes(canonical_bytes(words))[:8]


def _parse_partition(column: str, transform: str) -> PartitionBy:
    kind, _, width = transform.rstrip("]").partition("[")
    return PartitionBy(column, PartitionTransform(kind), int(width or 0))


def split_by_partition(
    rows: pa.Table, by: PhysicalLayout
) -> Iterator[tuple[PartitionValues, pa.Table]]:
    """Yield (partition, sorted rows) for each partition that has rows.

    Equal rows keep their order, so that a repetition gives the same files.
    """
    parts = [
        _encode_partition_values(get_column_or_nulls(rows, part.column, pa.int64()), part)
        for part in by.partitions
    ]
    # Partitions first, so that each is one contiguous run of rows.
    keys: dict[str, Any] = {f"p{n}": pa.array(codes) for n, (codes, _) in enumerate(parts)}
    directions = dict.fromkeys(keys, "ascending")
    for n, key in enumerate(by.order):
        keys[f"s{n}"] = get_column_or_nulls(rows, key.column, pa.int64())
        directions[f"s{n}"] = "descending" if key.descending else "ascending"
    if keys:
        indices = pc.sort_indices(pa.table(keys), sort_keys=list(directions.items()))
        rows = rows.take(indices)
        parts = [(codes[indices.to_numpy()], values) for codes, values in parts]
    no_codes = np.zeros((rows.num_rows, 1), np.int64)
    codes = np.stack([codes for codes, _ in parts], axis=1) if parts else no_codes
    # A part ends where any of its codes changes.
    changes = np.flatnonzero(np.any(codes[1:] != codes[:-1], axis=1)) + 1
    # Slices of one table: no row is copied for a partition.
    for start, end in pairwise([0, *changes.tolist(), rows.num_rows]):
        if end > start:
            values = tuple(values[codes[start, n]] for n, (_, values) in enumerate(parts))
            yield values, rows.slice(start, end - start)


def write_partition_files(
    put: PutFile, stem: str, parts: Iterable[tuple[PartitionValues, pa.Table]]
) -> dict[str, PartitionValues]:
    """Write one file for each part, named after `stem` and its partition.

    Returns:
        Address -> partition.
    """
    written = {}
    for values, rows in parts:
        # Spark's and Arrow's own metadata would make equal rows different files.
        data = encode_parquet(rows.replace_schema_metadata(None))
        name = f"{stem}-{sha256_of_bytes(repr(values).encode())[:16]}.parquet"
        written[put(name, data, rows.num_rows)] = values
    return written


def describe_data_file(
    files: FileIO, metadata: TableMetadata, path: str, values: PartitionValues
) -> DataFile:
    """Return Iceberg's record of a Parquet file of the partition `values`.

    Bounds and sizes come from the file's footer.

    Raises:
        ValueError: the file's columns do not fit the table.
    """
    # pyiceberg would take the partition from the bounds, and refuses where those cannot tell, as
    # with buckets.
    footer = find_footer(path)
    if footer is not None:
        written = _WrittenFile(path, footer)
        files = cast(FileIO, SimpleNamespace(new_input=lambda _: written))
    plain = metadata.model_copy(
        update={"partition_specs": [PartitionSpec(spec_id=0)], "default_spec_id": 0}
    )
    try:
        found = parquet_file_to_data_file(files, plain, path)
    # pyiceberg makes Python values of the bounds: none is there beyond the year 9999, or for a text
    # that is not UTF-8. A file without bounds is only read more often.
    except (OverflowError, UnicodeDecodeError):
        found = parquet_file_to_data_file(files, _keep_few_bounds(plain), path)
    found[_PARTITION] = Record(*values)
    found[_SORT_ORDER] = metadata.default_sort_order_id or None
    found.spec_id = metadata.default_spec_id
    return found


class _WrittenFile(InputFile):
    """A data file whose footer is known, and all that is asked for."""

    def __init__(self, location: str, footer: FileFooter) -> None:
        super().__init__(location)
        self._footer = footer

    def __len__(self) -> int:
        return self._footer.size

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> InputStream:
        return io.BytesIO(self._footer.data)


def _keep_few_bounds(metadata: TableMetadata) -> TableMetadata:
    """Return metadata that asks for no bounds of columns whose bounds may be no Python values."""
    kinds = (DateType, TimestampType, TimestamptzType, StringType)
    names = [
        field.name for field in metadata.schema().fields if isinstance(field.field_type, kinds)
    ]
    counted = {f"{_BOUNDS_OF_COLUMN}.{name}": "counts" for name in names}
    return metadata.model_copy(update={"properties": {**metadata.properties, **counted}})


def _encode_partition_values(column: pa.ChunkedArray, part: PartitionBy) -> tuple[Any, list[Any]]:
    """Return a code for each row, and the partition value for each code; the last code is null."""
    plain = _to_iceberg_integers(column)
    if part.transform in _NUMPY_TIME_UNITS:
        nulls = plain.is_null().to_numpy()
        unit = "D" if pa.types.is_date(column.type) else "us"
        times = plain.fill_null(0).to_numpy().astype(f"datetime64[{unit}]")
        # Years, months, days or hours since 1970, rounded down for times before 1970 too.
        rounded = times.astype(f"datetime64[{_NUMPY_TIME_UNITS[part.transform]}]").astype(np.int64)
        plain = pa.chunked_array([pa.array(rounded, pa.int64(), mask=nulls)])
    encoded = plain.combine_chunks().dictionary_encode()
    value = _build_transform(part, encoded.dictionary.type)
    numbers: dict[Any, int] = {}  # many values share a bucket
    places = [
        numbers.setdefault(value(one), len(numbers)) for one in encoded.dictionary.to_pylist()
    ]
    codes = encoded.indices.fill_null(len(places)).to_numpy(zero_copy_only=False)
    return np.array([*places, len(numbers)], np.int64)[codes], [*numbers, None]


def _to_iceberg_integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert times and dates to the integers by which Iceberg counts them."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    if pa.types.is_date(column.type):
        return column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    return column


def _build_transform(part: PartitionBy, kind: pa.DataType) -> Callable[[Any], Any]:
    source: IcebergType = LongType()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        source = StringType()
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        source = BinaryType()
    elif pa.types.is_decimal(kind):
        source = DecimalType(kind.precision, kind.scale)
    if part.transform in (PartitionTransform.BUCKET, PartitionTransform.TRUNCATE):
        return parse_transform(part.iceberg_transform).transform(source)
    return lambda value: value


MERGED_FOLDER = "merged"
"""Folder of a table's merged files, next to Iceberg's `metadata`."""
# Commits that a table may take while merged files are written and committed.
_COMMITS_UNTIL_EXPIRY = 1000
_MERGED_FILE_NAME = re.compile(
    rf"/{MERGED_FOLDER}/(\d{{12}})-[0-9a-f]{{12}}-[0-9a-f]{{16}}\.parquet\Z"
)


@dataclass(frozen=True, slots=True)
class LiveDataFile:
    """A data file of main with rows of the slots `first` to `last`.

    Both are None if Iceberg has no bounds for the file.
    """

    file: DataFile
    first: int | None
    last: int | None

    @property
    def is_merged(self) -> bool:
        """Whether tidegate merged it."""
        return parse_commit_bound(self.file.file_path) is not None


def make_merged_stem(metadata: TableMetadata) -> str:
    """Return the start of the names, within the table's folder, of merged files to be written."""
    bound = get_newest_sequence_number(metadata) + _COMMITS_UNTIL_EXPIRY
    return f"{MERGED_FOLDER}/{bound:012d}-{secrets.token_hex(6)}"


def get_newest_sequence_number(metadata: TableMetadata) -> int:
    """Return the sequence number of the table's newest snapshot, even of an expired one."""
    return metadata.next_sequence_number() - 1


def parse_commit_bound(path: str) -> int | None:
    """Return the highest sequence number by which a merged file may be committed.

    None if the path is not that of a merged file.
    """
    found = _MERGED_FILE_NAME.search(path)
    return int(found[1]) if found else None


def list_live_files(metadata: TableMetadata, files: FileIO) -> Iterator[LiveDataFile]:
    """Yield the data files of main.

    Raises:
        ValueError: another engine deleted single rows, so that a file's rows are not the table's.
    """
    snapshot = metadata.current_snapshot()
    epoch = metadata.schema().find_field("_epoch").field_id
    for manifest in snapshot.manifests(files) if snapshot else []:
        if manifest.content is ManifestContent.DELETES:
            raise ValueError("another engine deleted single rows of it")
        for entry in manifest.fetch_manifest_entry(files, discard_deleted=True):
            yield LiveDataFile(
                entry.data_file,
                _decode_slot_bound(entry.data_file.lower_bounds, epoch),
                _decode_slot_bound(entry.data_file.upper_bounds, epoch),
            )


def _decode_slot_bound(bounds: Mapping[int, bytes] | None, field: int) -> int | None:
    found = (bounds or {}).get(field)
    return None if found is None else int(from_bytes(LongType(), found))


def read_file_rows(metadata: TableMetadata, files: FileIO, file: DataFile) -> pa.Table:
    """Return the rows of a data file, with those columns of the table that the file has."""
    ids = {field.name: field.field_id for field in metadata.schema().fields}
    with files.new_input(file.file_path).open() as stream:
        rows = pq.read_table(stream)
    names = match_columns(rows.schema, ids, metadata.properties)
    return rows.select(list(names)).rename_columns(list(names.values()))


def stage_file_replacement(
    commit: Transaction,
    files: FileIO,
    gone: Collection[DataFile],
    new: Mapping[str, PartitionValues],
    operation: Operation,
    properties: Mapping[str, str],
) -> None:
    """Stage a snapshot that replaces data files by new ones.

    Args:
        commit: the table's transaction.
        files: opens the new files.
        gone: the files of main to remove.
        new: address -> partition of the new files.
        operation: `REPLACE` if the rows are the same, so that incremental readers skip it.
        properties: added to the snapshot's summary.

    Raises:
        ValidationException: main lacks a file that should be removed, or a new file may not be
            committed any more.
    """
    if any(
        (parse_commit_bound(path) or 0) <= get_newest_sequence_number(commit.table_metadata)
        for path in new
    ):
        raise ValidationException("the table has moved on too far since the files were written")
    producer = _FileReplacement(
        Operation.OVERWRITE, commit, files, snapshot_properties=dict(properties)
    )
    producer.recorded_operation = operation
    for file in gone:
        producer.delete_data_file(file)
    for path, values in new.items():
        producer.append_data_file(describe_data_file(files, commit.table_metadata, path, values))
    producer.commit()


class _FileReplacement(_OverwriteFiles):
    """pyiceberg's overwrite by files, with the operation `replace` and without a search.

    pyiceberg would look for the removed files by their partitions; they are given here.
    """

    recorded_operation: Operation

    def _summary(self, snapshot_properties: dict[str, str] | None = None) -> Summary:
        summary = super()._summary(snapshot_properties or {})
        return Summary(operation=self.recorded_operation, **summary.additional_properties)

    def _build_delete_files_partition_predicate(self) -> None:
        for number in self._transaction.table_metadata.specs():
            self.partition_filters[number] = AlwaysTrue()
