"""The same rows as objects of several formats."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from tests.oracle.objects import ObjectReader
from tests.oracle.rows import RawRow
from tests.servers.memory_store import MemoryBucket, MemoryStore

from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources import object_decoding, text_chunks
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

START = datetime(2026, 3, 1, tzinfo=UTC)
AVRO_SYNC = struct.pack(">QQ", 1, 2)
TICK = int(START.timestamp() * 1_000_000)
SCHEMA = {"at": "timestamp", "item": "string", "amount": "long"}
ROWS = [
    {"at": (START + timedelta(seconds=n)).isoformat(), "item": "ab"[n % 2], "amount": n}
    for n in range(3)
]


LINE = '{"at": "2026-03-01T00:00:00Z", "item": "é", "amount": 1, "x%d": 0}'
ROW = '2026-03-01T00:00:00Z,"b,\nc",5\n'
BROKEN = "\udcff"
CSV_PIECES = [
    '"',
    '""',
    '"x"',
    '"a,"b',
    ",",
    ",",
    "\n",
    "\n",
    "\r\n",
    "\r",
    "é",
    "\ufeff",
    BROKEN,
    ROW,
]


def spec(**more: Any) -> PipelineSpec:
    """A pipeline with one source `a` below inbox/a."""
    source = {"path": "inbox/a", "schema": SCHEMA, "event_time": "at", "lag": "1s", **more}
    return PipelineSpec.model_validate({"name": "p", "sources": {"a": source}})


def view(
    objects: dict[str, bytes], folder: Path, **more: Any
) -> tuple[InputView, ObjectSource, PipelineSpec]:
    """The objects as a source sees them."""
    pipeline = spec(**more)
    seen = InputView(
        MemoryStore(MemoryBucket({f"inbox/a/{k}": v for k, v in objects.items()})), pipeline, folder
    )
    return seen, ObjectSource("a", pipeline.sources["a"], seen), pipeline


def read(objects: dict[str, bytes], folder: Path, **more: Any) -> tuple[list[RawRow], Slice]:
    """All rows of the objects, as the oracle mover gets them, and the slice they were planned
    in.
    """
    seen, source, pipeline = view(objects, folder, **more)
    part = source.plan(Member("a"), None, ReadLimits())
    return list(ObjectReader(seen, pipeline.sources["a"]).rows(part)), part


def lines(*rows: Any) -> bytes:
    """JSON lines."""
    return "".join(
        (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows
    ).encode()


def csv(*rows: str) -> bytes:
    """CSV with a header."""
    return "\n".join(["at,item,amount", *rows, ""]).encode()


def avro(rows: list[dict[str, Any]], *, codec: str = "null") -> bytes:
    """An Avro container: at (timestamp-micros), item (null or string), amount (int)."""
    schema = {
        "type": "record",
        "name": "r",
        "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "item", "type": ["null", "string"]},
            {"name": "amount", "type": "int"},
        ],
    }

    def number(n: int) -> bytes:
        n = (n << 1) ^ (n >> 63)
        out = b""
        while n > 0x7F:
            out += bytes([n & 0x7F | 0x80])
            n >>= 7
        return out + bytes([n])

    def text(value: bytes) -> bytes:
        return number(len(value)) + value

    meta = {"avro.schema": json.dumps(schema).encode(), "avro.codec": codec.encode()}
    head = (
        b"Obj\x01"
        + number(len(meta))
        + b"".join(text(k.encode()) + text(v) for k, v in meta.items())
        + number(0)
    )
    body = b"".join(
        number(TICK + n * 1_000_000)
        + (number(1) + text(row["item"].encode()) if row["item"] else number(0))
        + number(row["amount"])
        for n, row in enumerate(rows)
    )
    if codec == "deflate":
        squeeze = zlib.compressobj(wbits=-15)
        body = squeeze.compress(body) + squeeze.flush()
    if codec == "xz":
        body = lzma.compress(body)
    if codec == "bzip2":
        body = bz2.compress(body)
    if codec == "zstandard":
        body = squeezed("zstd", body)
    if codec == "snappy":
        body = pa.compress(body, codec="snappy", asbytes=True) + struct.pack(">I", zlib.crc32(body))
    return head + AVRO_SYNC + number(len(rows)) + text(body) + AVRO_SYNC


def parquet(**columns: Any) -> bytes:
    """A Parquet object of the good rows; a column given as None is left out."""
    times = pa.array([START + timedelta(seconds=n) for n in range(3)], pa.timestamp("us", "UTC"))
    whole = {
        "at": times,
        "item": pa.array(["a", "b", "a"]),
        "amount": pa.array([0, 1, 2]),
        **columns,
    }
    sink = io.BytesIO()
    pq.write_table(pa.table({n: c for n, c in whole.items() if c is not None}), sink)
    return sink.getvalue()


def squeezed(codec: str, data: bytes) -> bytes:
    """Compressed by Arrow."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())


def written(write: Callable[[pa.Table, io.BytesIO], object]) -> bytes:
    """The good rows, by a writer of a typed format."""
    sink = io.BytesIO()
    write(pq.read_table(io.BytesIO(parquet())), sink)
    return sink.getvalue()


WHOLE: dict[str, tuple[str, bytes]] = {
    "1.json": ("json", lines(*ROWS)),
    "1.json.gz": ("json", gzip.compress(lines(*ROWS), mtime=0)),
    "1.json.bz2": ("json", bz2.compress(lines(*ROWS))),
    "1.json.xz": ("json", lzma.compress(lines(*ROWS))),
    "1.json.zst": ("json", squeezed("zstd", lines(*ROWS))),
    "1.json.lz4": ("json", squeezed("lz4", lines(*ROWS))),
    "1.csv": ("csv", csv(*(f'{r["at"]},"{r["item"]}",{r["amount"]}' for r in ROWS))),
    "1.avro": ("avro", avro(ROWS)),
    "2.avro": ("avro", avro(ROWS, codec="deflate")),
    "3.avro": ("avro", avro(ROWS, codec="snappy")),
    "1.orc": ("orc", written(orc.write_table)),
    "1.parquet": ("parquet", written(pq.write_table)),
}


def orc_of_spark(zone: bytes, *times: datetime) -> bytes:
    """An ORC file as Spark writes it, in a zone whose name has three letters, as Arrow's GMT."""
    noted = {"spark.sql.catalyst.type": "timestamp"}
    names = [pa.field("at", pa.timestamp("us"), metadata=noted), pa.field("item", pa.string())]
    rows = pa.table([[*times], ["a"] * len(times)], schema=pa.schema(names))
    sink = io.BytesIO()
    orc.write_table(rows, sink, compression="uncompressed")
    return sink.getvalue().replace(b"GMT", zone)


def write_typed(name: str) -> tuple[bytes, str]:
    """An object of 200 rows in several blocks, stripes or row groups, and its format."""
    rows = [{"at": START, "item": f"{n}" + "a" * (n % 50), "amount": n} for n in range(200)]
    form, _, codec = name.partition("-")
    if form == "avro":
        first, *others = (avro(rows[n : n + 40], codec=codec) for n in range(0, 200, 40))
        blocks = (one[one.index(AVRO_SYNC) + len(AVRO_SYNC) :] for one in others)
        return first + b"".join(blocks), form
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    if form == "orc":
        orc.write_table(table, sink, stripe_size=1000, batch_size=40)
    else:
        pq.write_table(table, sink, row_group_size=40)
    return sink.getvalue(), form


def use_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Decode so many bytes at a time."""
    monkeypatch.setattr(text_chunks, "CHUNK_BYTES", size)
    monkeypatch.setattr(object_decoding, "CHUNK_BYTES", size)
