"""Streams of bytes that are read in pieces: parts of objects, compressed data, scratch files.

No stream here holds more than a piece in memory, whatever the size of its object.
"""

import bz2
import gzip
import io
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from socket import gethostname
from typing import Any, Final, Protocol

import pyarrow as pa

from .errors import SCRATCH_UNWRITABLE

READ_BYTES: Final = 4 << 20
"""Read at once of an object."""
_SNAPPY_LENGTH: Final = 5  # bytes of a length at most
_MOST_SNAPPY: Final = 22
"""A byte of snappy holds fewer bytes: three of them repeat at most 64."""


class ByteStream(Protocol):
    """What bytes are read from, one piece after the other."""

    def read(self, size: int = -1, /) -> bytes:
        """Return so many bytes, or all; fewer only at the end."""
        ...


class StreamPart(io.RawIOBase):
    """The next bytes of a stream, which stays open.

    Args:
        stream: read from where it is.
        size: of the part; None: all that is left.
    """

    def __init__(self, stream: ByteStream, size: int | None = None) -> None:
        super().__init__()
        self._stream, self.left = stream, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer) if self.left is None else min(len(buffer), self.left)
        data = self._stream.read(wanted)
        buffer[: len(data)] = data
        if self.left is not None:
            self.left -= len(data)
        return len(data)


class ScratchFile(io.RawIOBase):
    """A file in the temporary folder that has no name, so that it is gone when its last user is.

    Raises:
        TransientError: it cannot be written, such as on a full disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: Any = io.BytesIO()  # what `close` finds if there can be no file
        with _name_folder():
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        return int(self._file.readinto(buffer))

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        with _name_folder():
            while left:
                left = left[self._file.write(left) :]
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _name_folder() -> Iterator[None]:
    """Say where a scratch file cannot be written."""
    try:
        yield
    except OSError as error:
        folder = tempfile.gettempdir()
        raise SCRATCH_UNWRITABLE(folder=folder, host=gethostname(), cause=error) from error


class _InflatedStream(io.RawIOBase):
    """What a raw deflate stream holds."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__()
        self._stream, self._inflater = stream, zlib.decompressobj(-zlib.MAX_WBITS)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        inflater, packed = self._inflater, self._inflater.unconsumed_tail
        # Without input, too: zlib holds what the last buffer had no room for.
        while not (data := inflater.decompress(packed, len(buffer))) and not inflater.eof:
            packed = inflater.unconsumed_tail or self._stream.read(io.DEFAULT_BUFFER_SIZE)
            if not packed:
                raise EOFError("the compressed data ends too early")
        buffer[: len(data)] = data
        return len(data)


def _open_by_arrow(codec: str, stream: Any) -> ByteStream:
    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec)  # type: ignore[no-any-return]


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream),
    "deflate": lambda stream: io.BufferedReader(_InflatedStream(stream)),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": partial(_open_by_arrow, "zstd"),
    "lz4": partial(_open_by_arrow, "lz4"),
}
_CODECS_BY_ENDING = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".lz4": "lz4",
}


def find_codec(key: str) -> str | None:
    """Return how an object is compressed, by the ending of its key; None if it is not."""
    return next(
        (codec for ending, codec in _CODECS_BY_ENDING.items() if key.endswith(ending)), None
    )


def open_compressed(codec: str | None, stream: ByteStream) -> ByteStream:
    """Return the stream of what is in a stream, which stays open.

    Broken data raises OSError, EOFError, ValueError, `zlib.error` or `lzma.LZMAError`.
    """
    buffered = io.BufferedReader(StreamPart(stream), READ_BYTES)
    return buffered if codec is None else _OPENERS[codec](buffered)


def decompress_snappy(data: bytes) -> bytes:
    """Return what a block of raw snappy holds, whose length comes first.

    Raises:
        OSError, ValueError: the block is damaged.
    """
    size = 0
    for place, byte in enumerate(data[:_SNAPPY_LENGTH]):  # seven bits a byte, the lowest first
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    # Arrow reserves what a damaged length asks for before it looks at the block.
    if size > len(data) * _MOST_SNAPPY:
        raise ValueError(f"{len(data)} bytes of snappy cannot hold {size} bytes")
    return bytes(pa.decompress(data, size, "snappy", asbytes=True))


def copy_to_scratch(stream: ByteStream) -> ScratchFile:
    """Return a copy that can be read from any place.

    Raises:
        TransientError: it cannot be written.
    """
    copy = ScratchFile()
    while data := stream.read(READ_BYTES):
        copy.write(data)
    copy.seek(0)
    return copy
