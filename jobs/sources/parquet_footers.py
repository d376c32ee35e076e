"""What an object holds, learnt from its Parquet footer alone.

Rows, physical columns, or why it cannot be read.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.jobs.spec.row_reasons import DeadLetterReason

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8  # length of the footer (4 bytes, little endian) and the magic
_MIN_FILE_BYTES = 12  # magic, footer length, magic
_FIRST_READ_BYTES = (
    64 << 10
)  # bytes from the end: holds the footer of any sane object, so one range request is enough

_INSTANT_TYPE: Final = "timestamp[us, tz=UTC]"

ReadRange = Callable[[int, int], bytes]
"""(start, length) -> bytes."""


@dataclass(frozen=True, slots=True)
class BadObject:
    """Why an object cannot be read."""

    reason: DeadLetterReason
    detail: str


@dataclass(frozen=True, slots=True)
class Footer:
    """Rows, and physical columns as arrow type texts."""

    rows: int
    columns: dict[str, str] = field(default_factory=dict)


def open_parquet_file(source: Path | io.BytesIO) -> pq.ParquetFile:
    """An object whose INT96 times come as microseconds.

    They reach further than nanoseconds in 64 bits.
    """
    import pyarrow.parquet as pq  # late: specs are validated without it

    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def read_parquet_table(source: Path | io.BytesIO, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of an object in the types that `Footer.columns` names.

    INT96 has no word about time zones; whoever writes it (older Spark, Hive, Impala) means an
    instant, as UTC.
    """
    import pyarrow as pa

    file = open_parquet_file(source)
    rows = file.read(columns=None if columns is None else list(columns))
    instants = _find_int96_columns(file.metadata) & set(rows.column_names)
    kinds = {name: pa.timestamp("us", "UTC") for name in instants}
    return (
        rows.cast(pa.schema([pa.field(f.name, kinds.get(f.name, f.type)) for f in rows.schema]))
        if instants
        else rows
    )


def _find_int96_columns(metadata: Any) -> set[str]:
    """Top columns that hold the old times of twelve bytes."""
    leaves = (metadata.schema.column(n) for n in range(metadata.num_columns))
    return {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}


def read_footer(size: int, ranged: ReadRange) -> Footer | BadObject:
    """Read the footer of an object by ranges: one request, two when the footer is long."""
    if size == 0:
        return BadObject("empty_object", "the object has no bytes")
    if size <= _FIRST_READ_BYTES:
        return parse_footer(ranged(0, size), size)
    tail = ranged(size - _FIRST_READ_BYTES, _FIRST_READ_BYTES)
    if tail[-4:] == _MAGIC:
        wanted = struct.unpack("<I", tail[-_TAIL_BYTES:-4])[0] + _TAIL_BYTES
        if len(tail) < wanted <= size:
            tail = ranged(size - wanted, wanted)
        return _parse_metadata(tail, size)
    return _describe_missing_footer(ranged(0, 4), size)


def parse_footer(data: bytes, size: int) -> Footer | BadObject:
    """The footer of a whole object."""
    if not data:
        return BadObject("empty_object", "the object has no bytes")
    if data[:4] != _MAGIC or len(data) < _MIN_FILE_BYTES or data[-4:] != _MAGIC:
        return _describe_missing_footer(data[:4], size)
    return _parse_metadata(data, size)


def _describe_missing_footer(start: bytes, size: int) -> BadObject:
    if start == _ENCRYPTED:
        return BadObject(
            "not_parquet", "the object is encrypted Parquet, which tidegate cannot read"
        )
    if start != _MAGIC:
        return BadObject("not_parquet", f"the object begins with {start!r}, not with {_MAGIC!r}")
    return BadObject(
        "truncated", f"the object begins as Parquet but ends without a footer after {size} bytes"
    )


def _parse_metadata(tail: bytes, size: int) -> Footer | BadObject:
    import pyarrow.parquet as pq  # late: specs are validated without it

    try:
        # The metadata reader looks at the end of the file only; a tail alone is enough for it.
        metadata: Any = pq.read_metadata(io.BytesIO(_MAGIC + tail))
        schema = metadata.schema.to_arrow_schema()
    except (
        Exception
    ) as error:  # pyarrow raises OSError, ArrowInvalid, ValueError and more for damage
        return BadObject(
            "truncated",
            f"the footer cannot be read ({size} bytes): {str(error).splitlines()[0][:200]}",
        )
    instants = _find_int96_columns(metadata)
    return Footer(
        int(metadata.num_rows),
        {f.name: _INSTANT_TYPE if f.name in instants else str(f.type) for f in schema},
    )
