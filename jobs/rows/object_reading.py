"""Opens objects in a task: as they were planned, and to say what a plan has to know of them.

Objects that are not read in place (`needs_decoding`) are decoded here, each time they are read.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.errors import OBJECT_NOT_FOUND
from tidegate.checkpoints.local_store import find_file
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import StoredObject
from tidegate.errors import TidegateError
from tidegate.jobs.rules.worker_memory import require_room
from tidegate.jobs.sources.object_decoding import BadObject, decode_to_parquet, needs_decoding
from tidegate.jobs.sources.object_inspection import (
    Footer,
    InspectedObject,
    describe_encoded_object,
    read_footer,
)
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.json_types import JsonObject, JsonView

from .attempt_files import open_task_store
from .cut_division import group_by_size
from .slice_reading import LARGE_READ, PLANNED, CutPart, RowReader, unreadable_objects_error

RANGED_BYTES: Final = 32 << 20
"""Parquet objects of a bucket that are larger are read in ranges, not held whole.

So are those that several tasks divide.
"""


class RangedObject(io.RawIOBase):
    """One version of an object, of which Arrow reads the ranges that it needs.

    Reading raises what `S3Store.get_version` raises.
    """

    def __init__(self, store: S3Store, key: str, etag: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._etag, self._size = store, key, etag, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        data = self._store.get_version(self._key, self._etag, self._position, length)
        self._position += len(data)
        return data


@dataclass(frozen=True)
class FoundObject:
    """An object that a plan asks for: its key, its address (`Store.uri`) and its bytes."""

    key: str
    uri: str
    size: int


@dataclass(frozen=True)
class InspectionUnit:
    """The objects of one source that one task inspects."""

    number: int
    source: SourceSpec
    objects: tuple[FoundObject, ...]


@dataclass
class InspectionAnswer:
    """What a task says of its objects: each one, or why the store did not give it."""

    number: int
    found: list[InspectedObject | TidegateError]
    rows: int = 0
    read_bytes: int = 0


def divide_objects(source: SourceSpec, objects: Sequence[FoundObject]) -> list[InspectionUnit]:
    """Return the units of some objects, in their order."""
    groups = group_by_size([float(one.size) for one in objects])
    return [
        InspectionUnit(number, source, tuple(objects[i] for i in group))
        for number, group in enumerate(groups)
    ]


def describe_unit(unit: InspectionUnit) -> InspectionAnswer:
    """Say of each object of a unit how many rows it has, and which columns."""
    answer = InspectionAnswer(unit.number, [])
    for one in unit.objects:
        try:
            stored = _fetch_object(one)
        except TidegateError as error:
            answer.found.append(error)
            continue
        size = len(stored.data)
        answer.read_bytes += size
        content = _describe_object(one.key, stored.data, unit.source)
        answer.found.append(InspectedObject(one.key, stored.etag, size, content))
    return answer


def _describe_object(key: str, data: bytes, source: SourceSpec) -> Footer | BadObject:
    if needs_decoding(source, key):
        return describe_encoded_object(key, data, source)
    return read_footer(len(data), lambda start, length: data[start : start + length], len(data))


def open_part(index: int, part: JsonObject, uri: str, source: SourceSpec) -> CutPart:
    """One object of a slice: in place if it is a plain file or large, else fetched as planned.

    Args:
        index: of the slice.
        part: the object, as planned.
        uri: its address.
        source: whose object it is.

    Raises:
        CorruptObjectsError: it cannot be decoded.
        TransientError: the store does not answer, or the object has changed.
    """
    path: Path | io.BytesIO = Path(uri)
    if "://" in uri:
        store, key = _locate_object(uri)
        if _is_read_in_ranges(part, source):
            return make_part(index, part, RangedObject(store, key, part["etag"], part["size"]))
        if part["size"] >= LARGE_READ:
            require_room(part["size"])
        path = io.BytesIO(store.get_version(key, part["etag"]))
    elif (file := find_file(Path(uri))) != path:  # Arrow opens no such name
        path = io.BytesIO(file.read_bytes())
    if needs_decoding(source, part["key"]):
        path = _decode_part(part["key"], path, source)
    return make_part(index, part, path)


def count_read_bytes(part: JsonView, source: SourceSpec, *, is_open: bool) -> int:
    """Return how many bytes of an object are read for its rows in a cut.

    `is_open` says whether it was opened for the rows before them.
    """
    if not _is_read_in_ranges(part, source):
        return 0 if is_open else int(part["size"])
    rows: int = part["row_end"] - part["row_start"]
    return int(part["size"]) * rows // int(part["rows"])


def _is_read_in_ranges(part: JsonView, source: SourceSpec) -> bool:
    """Whether of an object in a bucket only the row groups are read that have rows of a cut."""
    rows: int = part["row_end"] - part["row_start"]
    is_share = "breaks" in part and rows < part["rows"]
    is_large: bool = part["size"] > RANGED_BYTES
    return (is_share or is_large) and not needs_decoding(source, part["key"])


def make_part(
    index: int,
    part: JsonObject,
    path: Path | io.IOBase | pa.Table,
    reader: RowReader | None = None,
) -> CutPart:
    """A part of the slice with this index, with what holds its rows."""
    if reader is None and not isinstance(path, pa.Table):
        reader = RowReader(path)
    planned: dict[str, Any] = {name: part[name] for name in PLANNED}
    columns = tuple(part["columns"].items())
    return CutPart(member=index, path=path, columns=columns, reader=reader, **planned)


def _decode_part(key: str, original: Path | io.BytesIO, source: SourceSpec) -> io.BytesIO:
    try:
        data = original.read_bytes() if isinstance(original, Path) else original.getvalue()
    except OSError as error:
        raise unreadable_objects_error([key]) from error
    out = io.BytesIO()
    # The plan could count its rows, so it has changed since, or its values are damaged.
    if isinstance(decode_to_parquet(key, data, source, out), BadObject):
        raise unreadable_objects_error([key])
    return out


def _fetch_object(found: FoundObject) -> StoredObject:
    if "://" in found.uri:
        store, key = _locate_object(found.uri)
        return store.get(key)
    try:
        data = find_file(Path(found.uri)).read_bytes()
    except FileNotFoundError as error:
        raise OBJECT_NOT_FOUND(uri=found.uri) from error
    return StoredObject(found.key, data, sha256_of_bytes(data))  # its ETag in a local store


def _locate_object(uri: str) -> tuple[S3Store, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    store = open_task_store(f"s3://{bucket}")
    assert isinstance(store, S3Store)  # noqa: S101 - by its address
    return store, key
