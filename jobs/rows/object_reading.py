"""Opens objects in a task: as they were planned, and to say what a plan has to know of them.

Objects that are not read in place (`needs_decoding`) are decoded here, each time they are read,
into a file that is gone when its last reader is.
"""

import hashlib
import io
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from tidegate.checkpoints.errors import OBJECT_NOT_FOUND
from tidegate.checkpoints.local_store import find_file, translate_os_error
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import NotFoundError
from tidegate.errors import TidegateError
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.rules.worker_memory import require_room
from tidegate.jobs.sources.byte_streams import ScratchFile, copy_to_scratch
from tidegate.jobs.sources.errors import OBJECT_CHANGED
from tidegate.jobs.sources.object_decoding import (
    decode_to_parquet,
    needs_decoding,
    restore_framing,
)
from tidegate.jobs.sources.object_inspection import (
    InspectedObject,
    describe_encoded_object,
    read_footer,
)
from tidegate.jobs.sources.orc import extract_stripes
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.json_types import JsonObject, JsonView

from .attempt_files import open_task_store
from .cut_division import EXTENT, SHARED, group_by_size
from .slice_reading import LARGE_READ, PLANNED, CutPart, RowReader

RANGED_BYTES: Final = 32 << 20
"""Objects of a bucket that are larger are read in ranges, not held whole.

So are objects that several tasks share.
"""


class _RangeReader(io.RawIOBase):
    """Reads an object of a known size from any place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:  # a damaged object names such a place
            raise ValueError(f"there is no place {base + offset} in an object")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        left = max(self.size - self._position, 0)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        data = self.read_range(self._position, length)
        self._position += len(data)
        return data

    @abstractmethod
    def read_range(self, start: int, length: int) -> bytes:
        """Return bytes from a place on."""


class RangedObject(_RangeReader):
    """One version of an object, of which Arrow reads the ranges that it needs.

    Reading raises what `S3Store.get_version` raises.
    """

    def __init__(self, store: S3Store, key: str, etag: str, size: int) -> None:
        super().__init__(size)
        self._store, self._key, self._etag = store, key, etag

    def read_range(self, start: int, length: int) -> bytes:
        return self._store.get_version(self._key, self._etag, start, length)


class LocalFile(_RangeReader):
    """A file of a local store as it was when it was opened.

    Opening and reading raise what `LocalStore` raises: the object is not damaged because a disk
    does not answer.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(0)
        self._path = path
        self._failure: TidegateError | None = None
        self._file: BinaryIO = io.BytesIO()  # what `close` finds if there is no such file
        with self._translate_errors():
            self._file = path.open("rb")
        self._version = self._find_version()
        self.size = self._version[0]

    def read_range(self, start: int, length: int) -> bytes:
        with self._translate_errors():
            self._file.seek(start)
            return self._file.read(length)

    def check_reads(self) -> None:
        """Refuse what was read if a read has failed, or the file has been written meanwhile.

        Arrow's reader of ORC says of any error that the file is damaged.

        Raises:
            TidegateError: what the read raised, or that the file has been written.
        """
        if self._failure is not None:
            raise self._failure
        if self._find_version() != self._version:
            raise OBJECT_CHANGED(uri=self._path)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _find_version(self) -> tuple[int, int]:
        with self._translate_errors():
            stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise OBJECT_NOT_FOUND(uri=self._path) from error
        except OSError as error:
            self._failure = translate_os_error(self._path, error)
            raise self._failure from error


class _ObjectExtent(_RangeReader):
    """The header of an object and the bytes of some of its rows, as an object of their own.

    Args:
        file: the object.
        extent: `EXTENT` of a part.
    """

    def __init__(self, file: Any, extent: JsonView) -> None:
        super().__init__(extent["header"] + extent["end"] - extent["start"])
        self._file, self._header = file, extent["header"]
        self._left_out = extent["start"] - extent["header"]

    def read_range(self, start: int, length: int) -> bytes:
        if start < self._header:
            return _read_range(self._file, start, min(length, self._header - start))
        return _read_range(self._file, start + self._left_out, length)


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
            found = _describe_newest(one, unit.source)
        except TidegateError as error:
            answer.found.append(error)
            continue
        answer.read_bytes += found.size
        answer.found.append(found)
    return answer


def _describe_newest(one: FoundObject, source: SourceSpec) -> InspectedObject:
    is_encoded = needs_decoding(source, one.key)
    etag, size, file = _open_newest(one, source)
    with file:
        content = (
            describe_encoded_object(one.key, file, source)
            if is_encoded
            else read_footer(size, partial(_read_range, file), size)
        )
        if isinstance(file, LocalFile):  # its ETag and its rows were read one after the other
            file.check_reads()
    return InspectedObject(one.key, etag, size, content)


def _read_range(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    return bytes(file.read(length))


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
    if needs_decoding(source, part["key"]):
        return make_part(index, part, _decode_part(part, uri, source))
    if "://" in uri:
        is_shared = part.get(SHARED, False)
        version = _open_version(uri, part["etag"], part["size"], is_shared=is_shared)
        return make_part(index, part, version)
    is_odd = find_file(Path(uri)) != Path(uri)  # Arrow opens no such name
    return make_part(index, part, _open_local(part, uri) if is_odd else Path(uri))


def count_read_bytes(part: JsonView, source: SourceSpec, *, is_open: bool) -> int:
    """Return how many bytes of an object are read for its rows in a cut.

    `is_open` says whether it was opened for the rows before them.
    """
    if EXTENT in part:
        return 0 if is_open else _ObjectExtent(None, part[EXTENT]).size
    is_ranged = part.get(SHARED, False) or part["size"] > RANGED_BYTES
    if needs_decoding(source, part["key"]) or not is_ranged:
        return 0 if is_open else int(part["size"])
    rows: int = part["row_end"] - part["row_start"]
    return int(part["size"]) * rows // int(part["rows"])


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
    skipped = part[EXTENT]["row"] if EXTENT in part else 0
    return CutPart(
        member=index, path=path, columns=columns, reader=reader, skipped=skipped, **planned
    )


def _decode_part(part: JsonObject, uri: str, source: SourceSpec) -> ScratchFile:
    key, columns = part["key"], part["columns"]
    source, out = restore_framing(source, part), ScratchFile()
    with _open_planned(part, uri, source) as file:
        own = _open_extent(file, part, source) if _is_share(part) else file
        bad = decode_to_parquet(key, own, source, out, columns)
        if isinstance(file, LocalFile):
            file.check_reads()
        # The plan could count its rows, so it has changed since, or its values are damaged.
        if bad is not None:
            raise CorruptObjectsError.for_keys([key])
    return out


def _is_share(part: JsonView) -> bool:
    """Whether not all of an object is decoded."""
    return EXTENT in part and _ObjectExtent(None, part[EXTENT]).size < part["size"]


def _open_extent(file: Any, part: JsonObject, source: SourceSpec) -> io.IOBase:
    if source.format != "orc":
        return _ObjectExtent(file, part[EXTENT])
    try:
        return extract_stripes(file, part[EXTENT]["start"], part[EXTENT]["end"])
    except (OSError, LookupError, ValueError) as error:
        if isinstance(file, LocalFile):
            file.check_reads()
        raise CorruptObjectsError.for_keys([part["key"]]) from error


def _open_planned(part: JsonObject, uri: str, source: SourceSpec) -> Any:
    """Open an object that is to be decoded."""
    if "://" not in uri:
        return _open_local(part, uri)
    is_shared = _is_share(part)
    version = _open_version(uri, part["etag"], part["size"], is_shared=is_shared)
    return version if is_shared else _open_for_decoding(version, source)


def _open_local(part: JsonView, uri: str) -> LocalFile:
    try:
        return LocalFile(find_file(Path(uri)))
    except NotFoundError as error:
        raise CorruptObjectsError.for_keys([part["key"]]) from error


def _open_newest(found: FoundObject, source: SourceSpec) -> tuple[str, int, Any]:
    """Return the ETag and the size of an object as it is now, and a file of it."""
    if "://" not in found.uri:
        file = LocalFile(find_file(Path(found.uri)))
        etag = hashlib.file_digest(file, "sha256").hexdigest()  # its ETag in a local store
        return etag, file.size, file
    store, key = _locate_object(found.uri)
    if found.size <= RANGED_BYTES:
        stored = store.get(key)
        return stored.etag, len(stored.data), io.BytesIO(stored.data)
    head = store.stat(key)
    if head is None:
        raise OBJECT_NOT_FOUND(uri=found.uri)
    version = _open_version(found.uri, head.etag, head.size)
    return head.etag, head.size, _open_for_decoding(version, source)


def _open_version(uri: str, etag: str, size: int, *, is_shared: bool = False) -> io.IOBase:
    """Open one version of an object: its bytes, or if they are many what reads ranges of them."""
    store, key = _locate_object(uri)
    if is_shared or size > RANGED_BYTES:
        return RangedObject(store, key, etag, size)
    if size >= LARGE_READ:
        require_room(size)
    return io.BytesIO(store.get_version(key, etag))


def _open_for_decoding(file: io.IOBase, source: SourceSpec) -> io.IOBase:
    """Return what can be decoded: ORC is read in many small pieces, so it is fetched first."""
    if source.format == "orc" and isinstance(file, RangedObject):
        return copy_to_scratch(file)
    return file


def _locate_object(uri: str) -> tuple[S3Store, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    store = open_task_store(f"s3://{bucket}")
    assert isinstance(store, S3Store)  # noqa: S101 - by its address
    return store, key
