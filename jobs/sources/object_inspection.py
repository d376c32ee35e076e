"""Looks at the objects of a source before they are planned: rows, columns, or why they are bad."""

import io
import struct
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import pyarrow.parquet as pq

from tidegate.checkpoints.errors import OBJECT_NOT_FOUND
from tidegate.checkpoints.store import NotFoundError, ObjectInfo, Store, map_in_threads
from tidegate.errors import get_first_line
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.json_types import JsonObject, JsonView

from .errors import OBJECT_VANISHED
from .input_view import InputView
from .object_decoding import (
    BAD_REASON,
    BAD_TEXT,
    BadObject,
    describe_decoded_object,
    find_int96_columns,
)
from .table_versions import rewrite_reason

UNKNOWN_SIZE: Final = -1
"""The size of an entry of which only the key is known."""
BREAK_BYTES: Final = 4 << 20
READ_THREADS: Final = 4  # they wait for the store most of the time
_WHOLE_READ_BYTES = 256 << 10  # below, one GET is faster than a HEAD and a range
_MAX_CACHED_OBJECTS = 2048  # about 2.5 MB
_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8  # length of the footer (4 bytes, little endian) and the magic
_MIN_FILE_BYTES = 12  # magic, footer length, magic
_FIRST_READ_BYTES = 64 << 10  # from the end: holds most footers, so one request is enough
_INSTANT_TYPE = "timestamp[us, tz=UTC]"

ReadRange = Callable[[int, int], bytes]
"""(start, length) -> bytes."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What is known of an object.

    Attributes:
        rows: how many it has.
        columns: physical column -> Arrow type as text.
        breaks: rows at which several tasks may divide a large object, `BREAK_BYTES` apart or more:
            where row groups begin; of an object that has to be decoded, the first row as well.
        offsets: of an object that has to be decoded, where each of these rows begins.
    """

    rows: int
    columns: dict[str, str]
    breaks: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    def add_breaks(self, other: Self) -> Self:
        """Return the footer with the breaks that another one knows of the same object."""
        offsets = dict(zip(self.breaks, self.offsets, strict=False))
        offsets |= zip(other.breaks, other.offsets, strict=False)
        breaks = sorted({*self.breaks, *other.breaks})
        known = tuple(offsets[row] for row in breaks if row in offsets)
        return replace(self, breaks=tuple(breaks), offsets=known)

    def list_breaks(self, start: int, end: int) -> JsonObject:
        """Return the breaks of some rows as a plan has them; empty if there are none.

        Also those next to these rows if an object has to be decoded, and the first one.
        """
        if not self.offsets:
            inside = [row for row in self.breaks if start < row < end]
            return {"breaks": inside} if inside else {}
        first = max(bisect_right(self.breaks, start) - 1, 1)
        last = bisect_left(self.breaks, end)
        places = [0, *range(first, min(last + 1, len(self.breaks)))]
        return {
            "breaks": [self.breaks[place] for place in places],
            "offsets": [self.offsets[place] for place in places],
        }


@dataclass(frozen=True, slots=True)
class InspectedObject:
    """An object as it was when it was inspected; `modified` as in `ObjectInfo`.

    `etag` is empty if there was none to inspect: it was gone, or its name records a table rewrite.
    """

    key: str
    etag: str
    size: int
    content: Footer | BadObject
    modified: float | None = None


@dataclass
class ObjectInspector:
    """Inspects objects of one source, and remembers the results.

    Args:
        source: its name.
        spec: its spec.
        store: where its objects are; an `InputView` unless all of them are plain Parquet.
        prefix: key prefix of its objects.
    """

    _source: str
    _spec: SourceSpec
    _store: Store
    _prefix: str

    def __post_init__(self) -> None:
        # By ETag and time, too: an object of the same name may have been replaced.
        self._known: OrderedDict[ObjectInfo, InspectedObject] = OrderedDict()

    def inspect_entries(self, entries: Sequence[ObjectInfo]) -> Iterator[InspectedObject]:
        """Yield the inspected objects in order.

        At most one batch is read ahead, because a row limit may end the cut early. An object of
        which only the key was known (`UNKNOWN_SIZE`) and that is gone has a `BadObject`.

        Raises:
            TransientError: the store cannot be reached, or another object vanished meanwhile.
        """
        remaining = iter(entries)
        while batch := list(islice(remaining, 4 * READ_THREADS)):
            found = map_in_threads(self._find_entry, batch, READ_THREADS)
            if isinstance(self._store, InputView):
                unknown = [one for one in found if isinstance(one, ObjectInfo)]
                self._store.describe_objects_in_tasks(self._source, unknown)
            yield from map_in_threads(self._read_entry, found, READ_THREADS)
            while len(self._known) > _MAX_CACHED_OBJECTS:
                self._known.popitem(last=False)

    def reopen_pinned_object(self, pinned: JsonView) -> InspectedObject:
        """Return the object whose beginning was consumed, as it was pinned.

        If it is gone or has another ETag, its content is a `BadObject`.
        """
        content: Footer | BadObject = restore_footer(pinned)
        head = self._store.stat(pinned["key"])
        if head is None or head.etag != pinned["etag"]:
            content = BadObject("changed_object", describe_change(pinned, head))
        return InspectedObject(pinned["key"], pinned["etag"], pinned["size"], content)

    def _find_entry(self, entry: ObjectInfo) -> InspectedObject | ObjectInfo:
        """Return the inspected object if it is known or needs no reading, else its description."""
        if self._spec.table is not None:
            reason = rewrite_reason(entry.key[len(self._prefix) :])
            if reason is not None:
                return InspectedObject(entry.key, "", 0, BadObject("table_rewritten", reason))
        if entry.size == UNKNOWN_SIZE:
            head = self._store.stat(entry.key)
            if head is None:
                detail = "the object is gone; it was there when it was found"
                return InspectedObject(entry.key, "", 0, BadObject("changed_object", detail))
            entry = head
        return self._known.get(entry, entry)

    def _read_entry(self, found: InspectedObject | ObjectInfo) -> InspectedObject:
        if isinstance(found, InspectedObject):
            return found
        read = self._known[found] = self._read_object(found)
        return read

    def _read_object(self, entry: ObjectInfo) -> InspectedObject:
        try:
            etag, size, content = self._read_footer(entry)
        except NotFoundError as error:
            raise OBJECT_VANISHED(uri=self._store.uri(entry.key), source=self._source) from error
        if isinstance(content, Footer):
            content = self._find_column_fault(content) or content
        return InspectedObject(entry.key, etag, size, content, entry.modified)

    def _read_footer(self, entry: ObjectInfo) -> tuple[str, int, Footer | BadObject]:
        """Return ETag, size and footer of an object as it is now."""
        if isinstance(self._store, InputView):
            decoded = self._store.inspect_object(self._source, entry.key)
            if decoded is not None:
                etag, size, found = decoded
                return etag, size, _describe_columns(found) if isinstance(found, Path) else found
        if entry.size <= _WHOLE_READ_BYTES:
            stored = self._store.get(entry.key)
            size = len(stored.data)
            data = stored.data
            content = read_footer(size, lambda start, length: data[start : start + length], size)
            return stored.etag, size, content
        head = self._store.stat(entry.key)
        if head is None:
            raise OBJECT_NOT_FOUND(uri=self._store.uri(entry.key))
        read_range = partial(self._store.get_range, entry.key)
        return head.etag, head.size, read_footer(head.size, read_range)

    def _find_column_fault(self, footer: Footer) -> BadObject | None:
        """Return why an object's columns do not fit the schema.

        By default an undeclared column is left out and a missing one reads as null, except the
        event time.
        """
        declared, columns = self._spec.columns, footer.columns
        unknown = [c for c in columns if c not in declared and c not in (BAD_TEXT, BAD_REASON)]
        if unknown and self._spec.evolution.added == "dead_letter":
            names = f"column {', '.join(unknown)} is not in the schema ({', '.join(declared)})"
            return BadObject("unknown_column", names, footer.rows)
        event_time = self._spec.event_time
        if event_time not in columns and not self._spec.select:
            detail = f"there is no column {event_time}, which is the event time"
            return BadObject("missing_column", detail, footer.rows)
        missing = [c for c in declared if c not in columns]
        if missing and self._spec.evolution.missing == "dead_letter":
            detail = f"there is no column {', '.join(missing)}"
            return BadObject("missing_column", detail, footer.rows)
        return None


def describe_encoded_object(key: str, file: Any, spec: SourceSpec) -> Footer | BadObject:
    """Return the rows and columns of an object's decoded copy, or why there is none."""
    found = describe_decoded_object(key, file, spec)
    if isinstance(found, BadObject):
        return found
    counted, columns = found
    # Either has the number of rows, and the file with the columns has none.
    described = replace(_describe_columns(columns), rows=counted.number)
    if isinstance(described, BadObject) or len(counted.breaks) < 2:
        return described
    breaks, offsets = tuple(counted.breaks), tuple(counted.offsets)
    return replace(described, breaks=breaks, offsets=offsets)


def restore_footer(planned: JsonView) -> Footer:
    """Return what a plan knows of an object. Of older plans `offsets` may be missing."""
    breaks, offsets = (tuple(planned.get(name, ())) for name in ("breaks", "offsets"))
    return Footer(planned["rows"], planned["columns"], breaks, offsets)


def describe_change(pinned: JsonView, head: ObjectInfo | None) -> str:
    """Return how a pinned object differs from what is there now."""
    now = "it is gone" if head is None else f"its ETag is {head.etag}"
    return f"the object was pinned with ETag {pinned['etag']}, now {now}"


# Parquet footers: the rows and columns of an object, or why it cannot be read.


def read_footer(
    size: int, read_range: ReadRange, first: int = _FIRST_READ_BYTES
) -> Footer | BadObject:
    """Read the footer of an object by ranges: one request, or two if the footer is long.

    The first request is for the last `first` bytes; if that is all, the start is checked too.
    """
    if size == 0:
        return BadObject("empty_object", "the object has no bytes")
    length = min(size, first)
    tail = read_range(size - length, length)
    start = tail[:4] if length == size else None
    if size >= _MIN_FILE_BYTES and tail[-4:] == _MAGIC and start in (None, _MAGIC):
        wanted = struct.unpack("<I", tail[-_TAIL_BYTES:-4])[0] + _TAIL_BYTES
        if len(tail) < wanted <= size:
            tail = read_range(size - wanted, wanted)
        return _parse_metadata(tail, size)
    return _describe_missing_footer(start or read_range(0, 4), size)


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
    try:
        # The metadata reader looks only at both ends of the file, so a tail is enough for it.
        return _describe_columns(io.BytesIO(_MAGIC + tail), size)
    except Exception as error:  # pyarrow raises OSError, ArrowInvalid, ValueError and more here
        detail = f"the footer cannot be read ({size} bytes): {get_first_line(error)[:200]}"
        return BadObject("truncated", detail)


def _describe_columns(file: Path | io.BytesIO, size: int = 0) -> Footer | BadObject:
    """Return rows and columns, and the breaks of an object of so many bytes."""
    metadata: Any = pq.read_metadata(file)
    instants, schema = find_int96_columns(metadata), metadata.schema.to_arrow_schema()
    twice = sorted(name for name, number in Counter(schema.names).items() if number > 1)
    if twice:
        detail = f"more than one column has the name {', '.join(twice)}"
        return BadObject("unknown_column", detail, int(metadata.num_rows))
    columns = {f.name: _INSTANT_TYPE if f.name in instants else str(f.type) for f in schema}
    return Footer(int(metadata.num_rows), columns, tuple(_find_breaks(metadata, size)))


def _find_breaks(metadata: Any, size: int) -> Iterator[int]:
    row = last = 0
    for number in range(metadata.num_row_groups if size > BREAK_BYTES else 0):
        if row > last and (row - last) * size >= BREAK_BYTES * metadata.num_rows:
            yield row
            last = row
        row += metadata.row_group(number).num_rows
