"""What an object holds, learnt from its Parquet footer alone: rows, physical columns, or why it cannot be read."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.jobs.spec.reasons import DeadReason

__all__ = ["BadObject", "Footer", "parse_footer", "read_footer"]

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8  # length of the footer (4 bytes, little endian) and the magic
_SMALLEST = 12  # magic, footer length, magic
_FIRST_READ = 64 << 10  # bytes from the end: holds the footer of any sane object, so one range request is enough

Ranged = Callable[[int, int], bytes]
"""(start, length) -> bytes."""


@dataclass(frozen=True, slots=True)
class BadObject:
    """Why an object cannot be read."""

    reason: DeadReason
    detail: str


@dataclass(frozen=True, slots=True)
class Footer:
    """Rows, and physical columns as arrow type texts."""

    rows: int
    columns: dict[str, str] = field(default_factory=dict)


def read_footer(size: int, ranged: Ranged) -> Footer | BadObject:
    """Read the footer of an object by ranges: one request, two when the footer is long."""
    if size == 0:
        return BadObject("empty_object", "the object has no bytes")
    if size <= _FIRST_READ:
        return parse_footer(ranged(0, size), size)
    tail = ranged(size - _FIRST_READ, _FIRST_READ)
    if tail[-4:] == _MAGIC:
        wanted = struct.unpack("<I", tail[-_TAIL:-4])[0] + _TAIL
        if len(tail) < wanted <= size:
            tail = ranged(size - wanted, wanted)
        return _parse(tail, size)
    return _without_end(ranged(0, 4), size)


def parse_footer(data: bytes, size: int) -> Footer | BadObject:
    """The footer of a whole object."""
    if not data:
        return BadObject("empty_object", "the object has no bytes")
    if data[:4] != _MAGIC or len(data) < _SMALLEST or data[-4:] != _MAGIC:
        return _without_end(data[:4], size)
    return _parse(data, size)


def _without_end(start: bytes, size: int) -> BadObject:
    if start == _ENCRYPTED:
        return BadObject("not_parquet", "the object is encrypted Parquet, which tidegate cannot read")
    if start != _MAGIC:
        return BadObject("not_parquet", f"the object begins with {start!r}, not with {_MAGIC!r}")
    return BadObject("truncated", f"the object begins as Parquet but ends without a footer after {size} bytes")


def _parse(tail: bytes, size: int) -> Footer | BadObject:
    import pyarrow.parquet as pq  # late: specs are validated without it

    try:
        # The metadata reader looks at the end of the file only; a tail alone is enough for it.
        metadata: Any = pq.read_metadata(io.BytesIO(_MAGIC + tail))
        schema = metadata.schema.to_arrow_schema()
    except Exception as error:  # pyarrow raises OSError, ArrowInvalid, ValueError and more for damage
        return BadObject("truncated", f"the footer cannot be read ({size} bytes): {str(error).splitlines()[0][:200]}")
    return Footer(int(metadata.num_rows), {f.name: str(f.type) for f in schema})
