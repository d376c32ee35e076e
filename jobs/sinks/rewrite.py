"""Data files in the place of others, in one snapshot: what compaction and the rewind of a merged file have in common.

New files lie at `<table>/merged/<bound>-<id>-<partition>.parquet`. They may only be committed by a snapshot whose sequence number
is not above the bound, and no catalog gives a table a sequence number twice. So a file that no snapshot names, with a bound
below the table's newest number, will never be named by one: it may be deleted, whoever sleeps.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.types import LongType

from tidegate.jobs.sinks.arrange import Values, described

__all__ = ["MERGED", "Held", "bound_of", "held", "new_stem", "put_files", "read_rows", "sequence_number"]

MERGED = "merged"
"""Folder of a table's merged files, beside Iceberg's own `metadata`."""
_LIFE = 1000  # commits that a table may take while files are written and brought in
_NAME = re.compile(rf"/{MERGED}/(\d{{12}})-[0-9a-f]{{12}}-[0-9a-f]{{16}}\.parquet\Z")


@dataclass(frozen=True, slots=True)
class Held:
    """A data file of main: its rows are of the slots `first` to `last`; None where Iceberg does not know."""

    file: DataFile
    first: int | None
    last: int | None

    @property
    def merged(self) -> bool:
        """Whether tidegate merged it."""
        return bound_of(self.file.file_path) is not None


def new_stem(metadata: TableMetadata) -> str:
    """Name, within the table's folder, of files that are about to be written."""
    return f"{MERGED}/{sequence_number(metadata) + _LIFE:012d}-{secrets.token_hex(6)}"


def sequence_number(metadata: TableMetadata) -> int:
    """Number of the table's newest snapshot, whether or not it is still there."""
    return metadata.next_sequence_number() - 1


def bound_of(path: str) -> int | None:
    """The newest sequence number by which a merged file may be committed; None for any other file."""
    found = _NAME.search(path)
    return int(found[1]) if found else None


def held(metadata: TableMetadata, files: FileIO) -> Iterator[Held]:
    """What main holds.

    Raises:
        ValueError: another engine deleted single rows, so that a file's rows are not the table's.
    """
    snapshot = metadata.current_snapshot()
    epoch = metadata.schema().find_field("_epoch").field_id
    for manifest in snapshot.manifests(files) if snapshot else []:
        if manifest.content is ManifestContent.DELETES:
            raise ValueError("another engine deleted single rows of it")
        for entry in manifest.fetch_manifest_entry(files, discard_deleted=True):
            yield Held(entry.data_file, _slot(entry.data_file.lower_bounds, epoch), _slot(entry.data_file.upper_bounds, epoch))


def _slot(bounds: Mapping[int, bytes] | None, field: int) -> int | None:
    found = (bounds or {}).get(field)
    return None if found is None else int(from_bytes(LongType(), found))


def read_rows(files: FileIO, file: DataFile) -> pa.Table:
    """The rows of a data file, with the columns it has."""
    with files.new_input(file.file_path).open() as stream:
        return pq.read_table(stream)


def put_files(
    commit: Transaction,
    files: FileIO,
    gone: Collection[DataFile],
    new: Mapping[str, Values],
    operation: Operation,
    properties: Mapping[str, str],
) -> None:
    """Stage a snapshot with the new files in the place of those that are gone.

    Args:
        commit: the table's transaction.
        files: opens the new ones.
        gone: files of main.
        new: address -> partition.
        operation: `REPLACE` if the rows are the same ones, so that whoever reads the table's commits passes it over.
        properties: stand in the snapshot.

    Raises:
        ValidationException: main does not have a file that should go, or a new one may not be committed any more.
    """
    if any((bound_of(path) or 0) <= sequence_number(commit.table_metadata) for path in new):
        raise ValidationException("the table has moved on too far since the files were written")
    producer = _Rewrite(Operation.OVERWRITE, commit, files, snapshot_properties=dict(properties))
    producer.said = operation
    for file in gone:
        producer.delete_data_file(file)
    for path, values in new.items():
        producer.append_data_file(described(files, commit.table_metadata, path, values))
    producer.commit()


class _Rewrite(_OverwriteFiles):
    """pyiceberg's overwrite by files. It knows no `replace`, and looks for the files by their partitions, which is not needed."""

    said: Operation

    def _summary(self, snapshot_properties: dict[str, str] | None = None) -> Summary:
        summary = super()._summary(snapshot_properties or {})
        return Summary(operation=self.said, **summary.additional_properties)

    def _build_delete_files_partition_predicate(self) -> None:
        for number in self._transaction.table_metadata.specs():
            self.partition_filters[number] = AlwaysTrue()
