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

from tidegate.jobs.sinks.arrange import PartitionValues, describe_data_file

__all__ = ["MERGED_FOLDER", "LiveDataFile", "parse_commit_bound", "list_live_files", "make_merged_stem", "stage_file_replacement", "read_file_rows", "get_newest_sequence_number"]

MERGED_FOLDER = "merged"
"""Folder of a table's merged files, beside Iceberg's own `metadata`."""
_COMMITS_UNTIL_EXPIRY = 1000  # commits that a table may take while files are written and brought in
_MERGED_FILE_NAME = re.compile(rf"/{MERGED_FOLDER}/(\d{{12}})-[0-9a-f]{{12}}-[0-9a-f]{{16}}\.parquet\Z")


@dataclass(frozen=True, slots=True)
class LiveDataFile:
    """A data file of main: its rows are of the slots `first` to `last`; None where Iceberg does not know."""

    file: DataFile
    first: int | None
    last: int | None

    @property
    def is_merged(self) -> bool:
        """Whether tidegate merged it."""
        return parse_commit_bound(self.file.file_path) is not None


def make_merged_stem(metadata: TableMetadata) -> str:
    """Name, within the table's folder, of files that are about to be written."""
    return f"{MERGED_FOLDER}/{get_newest_sequence_number(metadata) + _COMMITS_UNTIL_EXPIRY:012d}-{secrets.token_hex(6)}"


def get_newest_sequence_number(metadata: TableMetadata) -> int:
    """Number of the table's newest snapshot, whether or not it is still there."""
    return metadata.next_sequence_number() - 1


def parse_commit_bound(path: str) -> int | None:
    """The newest sequence number by which a merged file may be committed; None for any other file."""
    found = _MERGED_FILE_NAME.search(path)
    return int(found[1]) if found else None


def list_live_files(metadata: TableMetadata, files: FileIO) -> Iterator[LiveDataFile]:
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
            yield LiveDataFile(entry.data_file, _decode_slot_bound(entry.data_file.lower_bounds, epoch), _decode_slot_bound(entry.data_file.upper_bounds, epoch))


def _decode_slot_bound(bounds: Mapping[int, bytes] | None, field: int) -> int | None:
    found = (bounds or {}).get(field)
    return None if found is None else int(from_bytes(LongType(), found))


def read_file_rows(files: FileIO, file: DataFile) -> pa.Table:
    """The rows of a data file, with the columns it has."""
    with files.new_input(file.file_path).open() as stream:
        return pq.read_table(stream)


def stage_file_replacement(
    commit: Transaction,
    files: FileIO,
    gone: Collection[DataFile],
    new: Mapping[str, PartitionValues],
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
    if any((parse_commit_bound(path) or 0) <= get_newest_sequence_number(commit.table_metadata) for path in new):
        raise ValidationException("the table has moved on too far since the files were written")
    producer = _FileReplacement(Operation.OVERWRITE, commit, files, snapshot_properties=dict(properties))
    producer.recorded_operation = operation
    for file in gone:
        producer.delete_data_file(file)
    for path, values in new.items():
        producer.append_data_file(describe_data_file(files, commit.table_metadata, path, values))
    producer.commit()


class _FileReplacement(_OverwriteFiles):
    """pyiceberg's overwrite by files. It knows no `replace`, and looks for the files by their partitions, which is not needed."""

    recorded_operation: Operation

    def _summary(self, snapshot_properties: dict[str, str] | None = None) -> Summary:
        summary = super()._summary(snapshot_properties or {})
        return Summary(operation=self.recorded_operation, **summary.additional_properties)

    def _build_delete_files_partition_predicate(self) -> None:
        for number in self._transaction.table_metadata.specs():
            self.partition_filters[number] = AlwaysTrue()
