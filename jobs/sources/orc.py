"""Reads ORC files as Arrow tables.

ORC keeps a `timestamp` as what a clock of the writer's zone showed. Spark means an instant by it,
and notes so at the column. For such a column the zone is read from the file: pyarrow has no
function for that. A timestamp of another writer stays without a zone, as in Parquet.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from .byte_streams import READ_BYTES, ScratchFile, StreamPart, decompress_snappy, open_compressed

_SPARK_TYPE = b"spark.sql.catalyst.type"
# Message of ORC -> field -> its number. Other fields are kept.
_MESSAGES: Final = {
    "PostScript": {"footer": 1, "codec": 2, "metadata": 5},
    "Footer": {"size": 2, "stripes": 3, "rows": 6},
    "Stripe": {"offset": 1, "index": 2, "data": 3, "footer": 4, "rows": 5},
    "StripeFooter": {"zone": 3},
}
_TYPES: Final = {"stripes": ".orc.Stripe", "zone": "string"}
"""Field -> its type, unless it is a number."""
_CODECS: Final = ("UNCOMPRESSED", "ZLIB", "SNAPPY", "LZO", "LZ4", "ZSTD")
_CHUNK_HEADER = 3  # bytes
_MOST_CHUNK: Final = 1 << 23
"""Bytes of which such a header can tell."""
_MOST_ROWS: Final = 128 << 10
"""Of one batch."""
# The header of a frame without checksums, with blocks of up to 4 MB; its last byte is its own sum.
_LZ4_FRAME = bytes.fromhex("04224d18607073")


def iterate_orc_tables(
    file: Any, chunk_bytes: int, note: Callable[[int, int], None] = lambda *_: None
) -> Iterator[pa.Table]:
    """Yield the rows of a file, about so many stored bytes at a time; at least one table.

    A column that Spark wrote as an instant is in UTC.

    Args:
        file: what can be read from any place.
        chunk_bytes: of rows.
        note: is given the number of the first row of each stripe, and where the stripe begins.

    Raises:
        OSError, ValueError: the file is damaged.
    """
    import pyarrow.orc as orc

    opened = orc.ORCFile(file)
    instants = [place for place, column in enumerate(opened.schema) if _is_instant(column)]
    zone = read_writer_zone(file) if instants else ""
    for row, offset in _list_stripes(file):
        note(row, offset)
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


def read_writer_zone(file: Any) -> str:
    """Return the time zone of a file's writer; UTC if it has no rows.

    Raises:
        ValueError: the part of the file that names it is damaged.
    """
    tail, footer = _read_footer(file)
    return _read_zone(file, footer.stripes[0], tail) if footer.stripes else "UTC"


def extract_stripes(file: Any, start: int, end: int) -> ScratchFile:
    """Return a file of the stripes that begin between two places of a file.

    Raises:
        OSError, LookupError, ValueError: the file is damaged.
    """
    tail, footer = _read_footer(file)
    whole, out = list(footer.stripes), ScratchFile()
    del footer.stripes[:]
    out.write(_read_range(file, 0, whole[0].offset))
    place = whole[0].offset
    for stripe in whole:
        if start <= stripe.offset < end:
            file.seek(stripe.offset)
            copied = StreamPart(file, _measure_stripe(stripe))
            while data := copied.read(READ_BYTES):
                out.write(data)
            stripe.offset = place
            place += _measure_stripe(stripe)
            footer.stripes.append(stripe)
    footer.rows, footer.size = sum(stripe.rows for stripe in footer.stripes), place
    packed = footer.SerializeToString()
    if tail.codec:  # a chunk that is as it is
        if len(packed) >= _MOST_CHUNK:
            raise ValueError("the footer is too large for one chunk")
        packed = (len(packed) << 1 | 1).to_bytes(_CHUNK_HEADER, "little") + packed
    tail.footer, tail.metadata = len(packed), 0
    end_of_file = tail.SerializeToString()
    out.write(packed + end_of_file + bytes([len(end_of_file)]))
    out.seek(0)
    return out


def _list_stripes(file: Any) -> list[tuple[int, int]]:
    """Return the first row of each stripe and its place; nothing if they cannot be read alone."""
    try:
        tail, footer = _read_footer(file)
        zones = {_read_zone(file, stripe, tail) for stripe in footer.stripes}
    except (LookupError, ValueError, OSError, zlib.error):
        return []  # it is compressed in a way that only pyarrow knows
    places = [stripe.offset for stripe in footer.stripes]
    # The rows of all stripes have the zone of the first one.
    if len(zones) > 1 or places != sorted(places):
        return []
    rows = accumulate((stripe.rows for stripe in footer.stripes), initial=0)
    return list(zip(rows, places, strict=False))


def _read_footer(file: Any) -> tuple[Any, Any]:
    """Return the messages at the end of a file: its postscript, and its footer.

    Raises:
        ValueError: they are damaged.
    """
    size = file.seek(0, io.SEEK_END)
    end = size - 1 - _read_range(file, size - 1, 1)[0]
    tail = _parse_message("PostScript", _read_range(file, end, size - 1 - end))
    packed = _read_range(file, end - tail.footer, tail.footer)
    return tail, _parse_message("Footer", _decompress_part(packed, tail))


def _read_zone(file: Any, stripe: Any, tail: Any) -> str:
    packed = _read_range(file, stripe.offset + stripe.index + stripe.data, stripe.footer)
    # Writers before the year 2015 did not note it.
    return str(_parse_message("StripeFooter", _decompress_part(packed, tail)).zone) or "UTC"


def _measure_stripe(stripe: Any) -> int:
    return int(stripe.index + stripe.data + stripe.footer)


def _read_range(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    return bytes(file.read(length))


def _parse_message(name: str, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _build_messages()[f"orc.{name}"].FromString(data)
    except DecodeError as error:
        raise ValueError(f"the {name} of the file is damaged") from error


@cache
def _build_messages() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    form = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orc.proto", package="orc")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number in fields.items():
            kind = _TYPES.get(field, "")
            own = message.field.add(name=field, number=number, label=form.LABEL_OPTIONAL)
            own.type = form.TYPE_STRING if kind else form.TYPE_UINT64
            if kind.startswith("."):
                own.type, own.type_name, own.label = form.TYPE_MESSAGE, kind, form.LABEL_REPEATED
    return dict(message_factory.GetMessages([file], descriptor_pool.DescriptorPool()))


def _decompress_part(data: bytes, tail: Any) -> bytes:
    """Return the bytes of a part of a file: a row of chunks, each compressed by itself or as is."""
    if not tail.codec:
        return data
    whole = b""
    while data:
        header = int.from_bytes(data[:_CHUNK_HEADER], "little")
        size, is_plain = _CHUNK_HEADER + (header >> 1), header & 1
        chunk, data = data[_CHUNK_HEADER:size], data[size:]
        whole += chunk if is_plain else _decompress_chunk(chunk, _CODECS[tail.codec])
    return whole


def _decompress_chunk(chunk: bytes, codec: str) -> bytes:
    if codec == "ZLIB":
        return zlib.decompress(chunk, -zlib.MAX_WBITS)
    if codec == "SNAPPY":
        return decompress_snappy(chunk)
    if codec == "LZ4":
        size = len(chunk).to_bytes(4, "little")
        chunk = _LZ4_FRAME + size + chunk + bytes(4)
    return bytes(open_compressed(codec.lower(), io.BytesIO(chunk)).read())
