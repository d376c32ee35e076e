"""Reads Parquet footers: the rows and columns of an object, or why it cannot be read."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import get_first_line
from tidegate.jobs.spec.table_layout import DeadLetterReason

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8  # length of the footer (4 bytes, little endian) and the magic
_MIN_FILE_BYTES = 12  # magic, footer length, magic
_FIRST_READ_BYTES = 64 << 10  # from the end: holds most footers, so that one request is enough

_INSTANT_TYPE: Final = "timestamp[us, tz=UTC]"

ReadRange = Callable[[int, int], bytes]
"""(start, length) -> bytes."""


@dataclass(frozen=True, slots=True)
class BadObject:
    """Why an object cannot be read: the reason of its dead letter, with details.

    Attributes:
        rows: its number of rows; None if it is not known.
    """

    reason: DeadLetterReason
    detail: str
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Footer:
    """The number of rows, and physical column -> Arrow type as text."""

    rows: int
    columns: dict[str, str] = field(default_factory=dict)


def open_parquet_file(source: Path | io.BytesIO) -> pq.ParquetFile:
    """Open a file so that INT96 times come as microseconds, which have the larger range."""
    import pyarrow.parquet as pq  # late: specs are validated without it

    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def read_parquet_table(source: Path | io.BytesIO, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of an object in the types that `Footer.columns` names.

    INT96 does not say whether it is an instant. Its writers (older Spark, Hive, Impala) mean one,
    in UTC. `columns` are those to read; by default all.
    """
    import pyarrow as pa

    file = open_parquet_file(source)
    rows = file.read(columns=None if columns is None else list(columns))
    instants = _find_int96_columns(file.metadata) & set(rows.column_names)
    if not instants:
        return rows
    instant = pa.timestamp("us", "UTC")
    fields = [pa.field(f.name, instant if f.name in instants else f.type) for f in rows.schema]
    return rows.cast(pa.schema(fields))


def _find_int96_columns(metadata: Any) -> set[str]:
    """Return the top-level columns with the old timestamps of twelve bytes."""
    leaves = (metadata.schema.column(n) for n in range(metadata.num_columns))
    return {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}


def read_footer(size: int, read_range: ReadRange) -> Footer | BadObject:
    """Read the footer of an object by ranges: one request, or two if the footer is long."""
    if size == 0:
        return BadObject("empty_object", "the object has no bytes")
    if size <= _FIRST_READ_BYTES:
        return parse_footer(read_range(0, size), size)
    tail = read_range(size - _FIRST_READ_BYTES, _FIRST_READ_BYTES)
    if tail[-4:] == _MAGIC:
        wanted = struct.unpack("<I", tail[-_TAIL_BYTES:-4])[0] + _TAIL_BYTES
        if len(tail) < wanted <= size:
            tail = read_range(size - wanted, wanted)
        return _parse_metadata(tail, size)
    return _describe_missing_footer(read_range(0, 4), size)


def parse_footer(data: bytes, size: int) -> Footer | BadObject:
    """Return the footer of an object whose bytes are all here, `size` in number."""
    if not data:
        return BadObject("empty_object", "the object has no bytes")
    if data[:4] != _MAGIC or len(data) < _MIN_FILE_BYTES or data[-4:] != _MAGIC:
        return _describe_missing_footer(data[:4], size)
    return _parse_metadata(data, size)


def _describe_missing_footer(start: bytes, size: int) -> BadObject:
    if start == _ENCRYPTED:
        detail = "the object is encrypted Parquet, which tidegate cannot read"
        return BadObject("not_parquet", detail)
    if start != _MAGIC:
        return BadObject("not_parquet", f"the object begins with {start!r}, not with {_MAGIC!r}")
    return BadObject(
        "truncated", f"the object begins as Parquet but ends without a footer after {size} bytes"
    )


def _parse_metadata(tail: bytes, size: int) -> Footer | BadObject:
    import pyarrow.parquet as pq  # late: specs are validated without it

    try:
        # The metadata reader looks only at both ends of the file, so a tail is enough for it.
        metadata: Any = pq.read_metadata(io.BytesIO(_MAGIC + tail))
        schema = metadata.schema.to_arrow_schema()
    except Exception as error:  # pyarrow raises OSError, ArrowInvalid, ValueError and more here
        detail = f"the footer cannot be read ({size} bytes): {get_first_line(error)[:200]}"
        return BadObject("truncated", detail)
    instants = _find_int96_columns(metadata)
    columns = {f.name: _INSTANT_TYPE if f.name in instants else str(f.type) for f in schema}
    return Footer(int(metadata.num_rows), columns)
