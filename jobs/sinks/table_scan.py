"""Reads the data files of an Iceberg table, chosen by the statistics in its manifests.

Commands and the Streams page wait for it. So it decodes Iceberg's metadata with fastavro: pyiceberg
takes a second of processor time to import, and milliseconds per data file. Only a table in which
another engine has deleted single rows is left to pyiceberg.
"""

import gzip
import io
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fastavro import reader as read_avro
from pyarrow.fs import FileSystem, LocalFileSystem, S3FileSystem

from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.jobs.engine.arrow_tables import (
    TIMESTAMP_UTC,
    Row,
    RowView,
    conform_to_schema,
    convert_to_ticks,
    to_arrow_type,
)
from tidegate.json_types import JsonObject

Range = tuple[Any, Any]
"""Least and greatest value, both inclusive; None: no bound. Times are ticks."""
Ranges = Mapping[str, Sequence[Range]]
"""Column, of integers, times or texts -> ranges, one of which its value is in."""

_READERS = 8
# What a scan needs of a manifest; other fields of its records are not decoded.
_ENTRY_FIELDS = {
    *("status", "data_file", "manifest_path", "content", "file_path"),
    *("record_count", "null_value_counts", "lower_bounds", "upper_bounds", "key", "value"),
}
_DataFile = RowView  # a record of a manifest, with these fields
_FIELD_ID = b"PARQUET:field_id"
_DELETED = 2  # the status of an entry whose file has left the table
# Types that only other engines give a column; tidegate's own have the names of a spec.
_OTHER_TYPES = {
    "timestamptz": TIMESTAMP_UTC,
    "timestamp": pa.timestamp("us"),
    "timestamptz_ns": pa.timestamp("ns", tz="UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "time": pa.time64("us"),
    "uuid": pa.binary(),
    "unknown": pa.null(),
}


class TableScan:
    """The current snapshot of one table.

    Attributes:
        schema: the table's columns.
    """

    def __init__(self, store: Store, address: str) -> None:
        """Read the table's metadata.

        Raises:
            OSError: a file of the table cannot be read; so do the other methods.
        """
        self._store, self._address, self._opener = store, address, _StoreFiles(store)
        with self._opener.open(address) as opened:
            data = opened.read()
        # Catalogs of Java may compress it, and say so in the name.
        packed = address.endswith(".gz.metadata.json")
        self._metadata = parse_json(gzip.decompress(data) if packed else data)
        current = self._metadata["current-schema-id"]
        fields = next(s for s in self._metadata["schemas"] if s["schema-id"] == current)["fields"]
        self._ids: dict[str, int] = {field["name"]: field["id"] for field in fields}
        self.schema = pa.schema([(field["name"], _to_arrow(field["type"])) for field in fields])
        self._decoders = {field.name: _get_decoder(field.type) for field in self.schema}

    @property
    def row_count(self) -> int:
        """All rows that the table stores: every revision, and rows that a merge replaced."""
        current = self._snapshot["summary"] if self._snapshot else {}
        return int(current.get("total-records", 0))

    def find_commit_time(self, slot: int) -> int | None:
        """Return when a slot of the newest timeline was committed, in ticks.

        None if the snapshot is expired, as those are that no tag names.
        """
        for one in reversed(self._metadata["snapshots"]):
            summary = one["summary"]
            if int(summary.get("tidegate.from", slot + 1)) <= slot <= int(summary["tidegate.upto"]):
                return int(one["timestamp-ms"]) * 1000
        return None

    def read(
        self,
        columns: Collection[str] | None = None,
        ranges: Ranges | None = None,
        *,
        with_value: str | None = None,
    ) -> pa.Table:
        """Return the rows within the ranges of every column, in no fixed order.

        Files whose statistics exclude such rows are not opened.

        Args:
            columns: what to read; columns that the table does not have are left out. Default: all.
            ranges: of columns that the table has.
            with_value: only rows in which this column is not null.
        """
        ranges = ranges or {}
        kept = [f for f in self.schema if columns is None or f.name in columns]
        needed = {f.name for f in kept} | ranges.keys() | ({with_value} if with_value else set())
        schema = pa.schema([field for field in self.schema if field.name in needed])

        def select(rows: pa.Table) -> pa.Table:
            """Return the rows asked for of one file."""
            rows = select_in_ranges(rows, ranges)
            return rows.filter(pc.is_valid(rows[with_value])) if with_value else rows

        has_row_deletes = any(manifest.get("content") for manifest in self._manifests)
        if has_row_deletes:
            return select(self._read_with_pyiceberg(schema)).select([f.name for f in kept])
        known = ranges.keys() <= self._ids.keys()
        chosen = [
            f for f in self._iterate_files() if known and self._may_have_rows(f, ranges, with_value)
        ]
        read = partial(self._read_rows, schema=schema, select=select)
        parts = map_in_threads(read, chosen, _READERS)
        rows = pa.concat_tables([schema.empty_table(), *parts])
        return rows.select([field.name for field in kept])

    @property
    def _snapshot(self) -> JsonObject | None:
        current, known = self._metadata.get("current-snapshot-id"), self._metadata["snapshots"]
        return next((one for one in known if one["snapshot-id"] == current), None)

    @cached_property
    def _manifests(self) -> list[Row]:
        snapshot = self._snapshot
        return list(self._opener.read_records(snapshot["manifest-list"])) if snapshot else []

    def _iterate_files(self) -> Iterator[_DataFile]:
        for manifest in self._manifests:
            for entry in self._opener.read_records(manifest["manifest_path"]):
                if entry["status"] != _DELETED:
                    yield entry["data_file"]

    def _may_have_rows(self, file: _DataFile, ranges: Ranges, with_value: str | None) -> bool:
        if with_value and (
            _find_statistic(file, "null_value_counts", self._ids[with_value])
            == file["record_count"]
        ):
            return False
        for name, bounds in ranges.items():
            decode = self._decoders[name]
            lower = _find_statistic(file, "lower_bounds", self._ids[name])
            upper = _find_statistic(file, "upper_bounds", self._ids[name])
            if decode is None or lower is None or upper is None:
                continue
            least, greatest = decode(lower), decode(upper)
            if not any(
                (low is None or low <= greatest) and (high is None or high >= least)
                for low, high in bounds
            ):
                return False
        return True

    def _read_rows(self, file: _DataFile, schema: pa.Schema, select: Any) -> pa.Table:
        with self._opener.open(file["file_path"]) as opened:
            parquet = pq.ParquetFile(opened, pre_buffer=True)
            properties = self._metadata.get("properties", {})
            names = match_columns(parquet.schema_arrow, self._ids, properties)
            names = {own: name for own, name in names.items() if name in schema.names}
            rows = parquet.read(list(names), use_threads=False).rename_columns(names)
        return select(conform_to_schema(rows, schema))

    def _read_with_pyiceberg(self, schema: pa.Schema) -> pa.Table:
        from pyiceberg.table import StaticTable

        from .iceberg_catalog import build_io_properties

        table = StaticTable.from_metadata(self._address, build_io_properties(self._store))
        return table.scan(selected_fields=tuple(schema.names)).to_arrow().cast(schema)


def match_columns(
    file: pa.Schema, ids: Mapping[str, int], properties: Mapping[str, str]
) -> dict[str, str]:
    """Return column of a data file -> name that the table gives it now.

    A column keeps its id when an engine renames it. Files of tidegate have no ids: the table's name
    mapping knows all names that an id ever had.

    Args:
        file: the schema of the file.
        ids: column -> id of the table's schema.
        properties: those of the table.
    """
    own: Mapping[str, Any] = {
        f.name: f.metadata[_FIELD_ID] for f in file if f.metadata and _FIELD_ID in f.metadata
    }
    if not own:
        mapping = json.loads(properties.get("schema.name-mapping.default", "[]"))
        own = {name: one.get("field-id", -1) for one in mapping for name in one["names"]} or ids
    names = {number: name for name, number in ids.items()}
    return {name: names[int(own[name])] for name in file.names if int(own.get(name, -1)) in names}


def select_in_ranges(rows: pa.Table, ranges: Ranges) -> pa.Table:
    """Return the rows whose values are within the ranges of every column."""
    for name, bounds in ranges.items():
        # A file or table of before the column was added has no value to match.
        found = _mask_in_ranges(rows[name], bounds) if name in rows.column_names else None
        rows = rows.slice(0, 0) if found is None else rows.filter(found)
    return rows


def _mask_in_ranges(column: Any, bounds: Sequence[Range]) -> Any:
    if pa.types.is_timestamp(column.type):
        column = convert_to_ticks(column)
    found = pa.chunked_array([pa.nulls(len(column), pa.bool_())]).fill_null(False)
    for low, high in bounds:
        mask = pc.is_valid(column)
        for compare, bound in ((pc.greater_equal, low), (pc.less_equal, high)):
            if bound is not None:
                mask = pc.and_kleene(mask, compare(column, pa.scalar(bound, column.type)))
        found = pc.or_kleene(found, mask)
    return found


@dataclass
class _StoreFiles:
    """Opens files of a store, and others that its keys reach, by their addresses."""

    _store: Store

    @cached_property
    def _s3(self) -> FileSystem:
        """Arrow's client, made with the settings of the store's."""
        ca = os.environ.get("AWS_CA_BUNDLE")
        options: dict[str, Any] = {"tls_ca_file_path": ca} if ca else {}
        if isinstance(self._store, S3Store):
            settings = self._store.settings
            access_key, secret_key, session_token = settings.reveal_keys()
            options |= {
                "endpoint_override": settings.endpoint,
                "region": settings.region,
                "access_key": access_key,
                "secret_key": secret_key,
                "session_token": session_token,
                "connect_timeout": settings.connect_timeout,
                "request_timeout": settings.read_timeout,
            }
        return S3FileSystem(**options)

    def open(self, address: str) -> Any:
        """Open a file for random access."""
        # Catalogs of Java write addresses with other schemes.
        scheme, found, path = re.sub("^s3[an]://", "s3://", address).partition("://")
        if not found or scheme == "file":
            files, path = LocalFileSystem(), path if found else address.removeprefix("file:")
        elif scheme == "s3":
            files = self._s3
        else:  # a catalog may have its tables in another cloud
            files, path = FileSystem.from_uri(address)
        return files.open_input_file(path)

    def read_records(self, address: str) -> Iterator[Row]:
        """Yield the records of an Avro file of Iceberg, with the fields that a scan needs."""
        with self.open(address) as opened:
            data = io.BytesIO(opened.read())
        written = json.dumps(read_avro(data).writer_schema)
        schema = json.loads(written, object_hook=_keep_needed_fields)
        data.seek(0)
        records: Any = read_avro(data, schema)
        yield from records


def _keep_needed_fields(schema: JsonObject) -> JsonObject:
    """Return a schema of Avro, if it is that of a record with the fields that a scan needs."""
    fields = [field for field in schema.get("fields", ()) if field["name"] in _ENTRY_FIELDS]
    return {**schema, "fields": fields} if fields else schema


def _find_statistic(file: _DataFile, name: str, column: int) -> Any:
    """Return a count or an encoded bound of a column; None if the file has none."""
    pairs = file[name] or ()
    return next((pair["value"] for pair in pairs if pair["key"] == column), None)


def _get_decoder(kind: pa.DataType) -> Any:
    """Return what decodes a bound of a column; None for types that are not compared."""
    # Nanoseconds are not counted in ticks.
    if pa.types.is_integer(kind) or kind in (TIMESTAMP_UTC, pa.timestamp("us")):
        return partial(int.from_bytes, byteorder="little", signed=True)
    # Bounds of texts are cut, upper ones to a text that is greater.
    return partial(str, encoding="utf-8") if pa.types.is_string(kind) else None


def _to_arrow(kind: Any) -> pa.DataType:
    """Return the Arrow type of a type in Iceberg's JSON."""
    if isinstance(kind, str):
        if kind.startswith("fixed"):
            return pa.binary()
        return _OTHER_TYPES[kind] if kind in _OTHER_TYPES else to_arrow_type(kind)
    if kind["type"] == "list":
        return pa.list_(_to_arrow(kind["element"]))
    if kind["type"] == "map":
        return pa.map_(_to_arrow(kind["key"]), _to_arrow(kind["value"]))
    return pa.struct([(field["name"], _to_arrow(field["type"])) for field in kind["fields"]])
