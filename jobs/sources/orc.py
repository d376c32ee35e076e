"""Reads ORC files as Arrow tables.

ORC keeps a `timestamp` as what a clock of the writer's zone showed. Spark means an instant by it,
and notes so at the column. For such a column the zone is read from the file: pyarrow has no
function for that. A timestamp of another writer stays without a zone, as in Parquet.
"""

import io
import re
import zlib
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from .byte_streams import open_compressed

_SPARK_TYPE = b"spark.sql.catalyst.type"
# Field numbers of ORC's messages.
_STRIPES_OF_FOOTER = 3
_OFFSET, _INDEX_SIZE, _DATA_SIZE, _FOOTER_SIZE = 1, 2, 3, 4  # of a stripe
_ZONE_OF_STRIPE = 3
_CHUNK_HEADER = 3  # bytes
_MOST_ROWS: Final = 128 << 10
"""Of one batch."""
# The header of a frame without checksums, with blocks of up to 4 MB; its last byte is its own sum.
_LZ4_FRAME = bytes.fromhex("04224d18607073")


def iterate_orc_tables(file: Any, chunk_bytes: int) -> Iterator[pa.Table]:
    """Yield the rows of a file, about so many stored bytes at a time; at least one table.

    A column that Spark wrote as an instant is in UTC.

    Raises:
        OSError, ValueError: the file is damaged.
    """
    import pyarrow.orc as orc

    opened = orc.ORCFile(file)
    instants = [place for place, column in enumerate(opened.schema) if _is_instant(column)]
    zone = read_writer_zone(file, opened) if instants else ""
    for batch in _iterate_batches(file, opened, chunk_bytes):
        rows = pa.Table.from_batches([batch])
        for place in instants:
            name = opened.schema.names[place]
            rows = rows.set_column(place, name, _to_instants(rows.column(place), zone))
        yield rows


def _iterate_batches(file: Any, opened: Any, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.dataset as ds

    names = opened.schema.names
    yield pa.RecordBatch.from_pylist([], opened.schema)
    if len(set(names)) < len(names) or not names:  # a dataset finds columns by name
        yield from map(opened.read_stripe, range(opened.nstripes))
    else:
        rows = max(min(chunk_bytes * opened.nrows // max(opened.content_length, 1), _MOST_ROWS), 1)
        fragment = ds.OrcFileFormat().make_fragment(file)
        # `ORCFile` itself can only read whole stripes.
        yield from fragment.to_batches(
            batch_size=rows, batch_readahead=0, fragment_readahead=0, use_threads=False
        )


def _is_instant(column: pa.Field) -> bool:
    noted = (column.metadata or {}).get(_SPARK_TYPE)
    is_naive = pa.types.is_timestamp(column.type) and column.type.tz is None
    return bool(is_naive and noted == b"timestamp")


def _to_instants(column: pa.ChunkedArray, zone: str) -> pa.ChunkedArray:
    # Java also knows zones such as GMT+08:00.
    name = re.sub(r"^(GMT|UTC)(?=[+-])", "", zone)
    # An hour that a clock shows twice is the first one, as for all times without a zone.
    found = pc.assume_timezone(column, name, ambiguous="earliest", nonexistent="earliest")
    return found.cast(pa.timestamp(column.type.unit, "UTC"))


def read_writer_zone(file: Any, opened: Any) -> str:
    """Return the time zone of a file's writer; UTC if it has no rows.

    Args:
        file: what can be read from any place.
        opened: the same, as pyarrow has opened it.

    Raises:
        ValueError: the part of the file that names it is damaged.
    """
    from google.protobuf.message import DecodeError

    try:
        return _find_zone(file, opened)
    except (DecodeError, IndexError, TypeError) as error:
        raise ValueError("the time zone of the writer cannot be read") from error


def _find_zone(file: Any, opened: Any) -> str:
    size = opened.file_footer_length
    end = file.seek(0, io.SEEK_END) - 1 - opened.file_postscript_length
    footer = _decompress_part(_read_range(file, end - size, size), opened.compression)
    stripes = _list_fields(footer, _STRIPES_OF_FOOTER)
    if not stripes:
        return "UTC"
    begin, index, values, size = (
        _list_fields(stripes[0], number)[0]
        for number in (_OFFSET, _INDEX_SIZE, _DATA_SIZE, _FOOTER_SIZE)
    )
    packed = _read_range(file, begin + index + values, size)
    stripe = _decompress_part(packed, opened.compression)
    # Writers before the year 2015 did not note it.
    zones = _list_fields(stripe, _ZONE_OF_STRIPE) or [b"UTC"]
    return bytes(zones[0]).decode()


def _read_range(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    return bytes(file.read(length))


def _list_fields(message: bytes, number: int) -> list[Any]:
    """Return the values of one field of a message: integers, or bytes."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    fields = UnknownFieldSet(Empty.FromString(message))
    return [field.data for field in fields if field.field_number == number]


def _decompress_part(data: bytes, codec: str) -> bytes:
    """Return the bytes of a part of a file: a row of chunks, each compressed by itself or as is."""
    if codec == "UNCOMPRESSED":
        return data
    whole = b""
    while data:
        header = int.from_bytes(data[:_CHUNK_HEADER], "little")
        size, is_plain = _CHUNK_HEADER + (header >> 1), header & 1
        chunk, data = data[_CHUNK_HEADER:size], data[size:]
        whole += chunk if is_plain else _decompress_chunk(chunk, codec)
    return whole


def _decompress_chunk(chunk: bytes, codec: str) -> bytes:
    if codec == "ZLIB":
        return zlib.decompress(chunk, -zlib.MAX_WBITS)
    if codec == "SNAPPY":
        return bytes(pa.decompress(chunk, _read_snappy_size(chunk), "snappy", asbytes=True))
    if codec == "LZ4":
        size = len(chunk).to_bytes(4, "little")
        chunk = _LZ4_FRAME + size + chunk + bytes(4)
    return bytes(open_compressed(codec.lower(), io.BytesIO(chunk)).read())


def _read_snappy_size(chunk: bytes) -> int:
    """Return the number at the beginning of a chunk, in seven bits a byte, the lowest first."""
    size = 0
    for place, byte in enumerate(chunk):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    return size
