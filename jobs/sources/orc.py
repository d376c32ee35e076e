"""Reads ORC files as Arrow tables.

ORC keeps a `timestamp` as what a clock of the writer's zone showed. Spark means an instant by it,
and notes so at the column. For such a column the zone is read from the file: pyarrow has no
function for that. A timestamp of another writer stays without a zone, as in Parquet.
"""

import io
import re
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .avro import decompress_stream

_SPARK_TYPE = b"spark.sql.catalyst.type"
# Field numbers of ORC's messages.
_STRIPES_OF_FOOTER = 3
_OFFSET, _INDEX_SIZE, _DATA_SIZE, _FOOTER_SIZE = 1, 2, 3, 4  # of a stripe
_ZONE_OF_STRIPE = 3
_CHUNK_HEADER = 3  # bytes
# The header of a frame without checksums, with blocks of up to 4 MB; its last byte is its own sum.
_LZ4_FRAME = bytes.fromhex("04224d18607073")


def read_orc_file(data: bytes) -> pa.Table:
    """Return the rows of a file; a column that Spark wrote as an instant is in UTC.

    Broken data raises an error of Arrow, before its zone is asked for.
    """
    import pyarrow.orc as orc

    file = orc.ORCFile(io.BytesIO(data))
    rows = file.read()
    for place, column in enumerate(file.schema):
        if _is_instant(column):
            zone = read_writer_zone(data, file)
            values = _to_instants(rows[column.name], zone)
            rows = rows.set_column(place, column.name, values)
    return rows


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


def read_writer_zone(data: bytes, file: Any) -> str:
    """Return the time zone of a file's writer; UTC if it has no rows.

    Args:
        data: the whole file.
        file: the same, as pyarrow has opened it.
    """
    end = len(data) - 1 - file.file_postscript_length
    footer = _decompress_chunks(data[end - file.file_footer_length : end], file.compression)
    stripes = _list_fields(footer, _STRIPES_OF_FOOTER)
    if not stripes:
        return "UTC"
    begin, index, values, size = (
        _list_fields(stripes[0], number)[0]
        for number in (_OFFSET, _INDEX_SIZE, _DATA_SIZE, _FOOTER_SIZE)
    )
    begin += index + values
    stripe = _decompress_chunks(data[begin : begin + size], file.compression)
    # Writers before the year 2015 did not note it.
    zones = _list_fields(stripe, _ZONE_OF_STRIPE) or [b"UTC"]
    return bytes(zones[0]).decode()


def _list_fields(message: bytes, number: int) -> list[Any]:
    """Return the values of one field of a message: integers, or bytes."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    fields = UnknownFieldSet(Empty.FromString(message))
    return [field.data for field in fields if field.field_number == number]


def _decompress_chunks(data: bytes, codec: str) -> bytes:
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
        return decompress_stream("lz4", _LZ4_FRAME + size + chunk + bytes(4))
    return decompress_stream(codec.lower(), chunk)


def _read_snappy_size(chunk: bytes) -> int:
    """Return the number at the beginning of a chunk, in seven bits a byte, the lowest first."""
    size = 0
    for place, byte in enumerate(chunk):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    return size
