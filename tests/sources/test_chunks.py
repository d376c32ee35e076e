"""Objects are decoded a chunk at a time, with the results of decoding them whole."""

from __future__ import annotations

import gzip
import io
import os
import resource
import tempfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.new_process import call_in_new_process
from tests.sources.encoded_objects import (
    AVRO_SYNC,
    BROKEN,
    CSV_PIECES,
    LINE,
    ROW,
    spec,
    use_chunks,
    write_typed,
)

from tidegate.errors import TransientError
from tidegate.jobs.sources import avro as avro_files
from tidegate.jobs.sources import byte_streams, object_decoding, text_chunks
from tidegate.jobs.sources.byte_streams import ScratchFile, open_compressed
from tidegate.jobs.sources.object_decoding import (
    BadObject,
    decode_to_parquet,
    describe_decoded_object,
    read_typed_object,
)


def decode(name: str, data: bytes, **more: Any) -> tuple[Any, Any]:
    """The rows or what is wrong, and what is known of the object before that."""
    source, out = spec(**more).sources["a"], io.BytesIO()
    bad = decode_to_parquet(name, io.BytesIO(data), source, out)
    described = describe_decoded_object(name, io.BytesIO(data), source)
    rows = bad or pq.read_table(out)
    if isinstance(described, BadObject):
        return rows, described
    found = (described[0].number, pq.read_schema(described[1]))
    assert not isinstance(rows, BadObject)
    assert found == (rows.num_rows, rows.schema)
    return rows, found


def read_csv_texts(data: bytes, size: int, *, header: bool) -> Any:
    """The values of CSV as texts, of bad rows the reason and the text; or the error."""
    source = spec(format="csv", parse={"header": header}).sources["a"]
    with pytest.MonkeyPatch.context() as patch:
        use_chunks(patch, size)
        try:
            found = [
                rows for _, rows in object_decoding._iterate_csv_texts(io.BytesIO(data), source)
            ]
            rows = pa.concat_tables(found).to_pylist()
        except ValueError as error:
            return str(error)
    return [(row["_why"], row["_text"]) if row["_why"] else row for row in rows]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(CSV_PIECES), max_size=30),
    start=st.sampled_from(["at,item,amount\n", '\ufeff"at","it\nem"\r\n', "\n\nat\n", ""]),
    size=st.integers(3, 40),
    header=st.booleans(),
)
def test_chunks_of_csv_have_the_rows_of_the_whole(
    pieces: list[str], start: str, size: int, header: bool
) -> None:
    """Values, numbers of rows, reasons and texts, whatever is quoted, broken or blank."""
    data = (start + "".join(pieces)).encode("utf-8", "surrogateescape")
    whole = read_csv_texts(data, 1 << 20, header=header)
    assert read_csv_texts(data, size, header=header) == whole


@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize(
    ("start", "item"), [("\ufeff", "a"), ("\n\n\ufeff", "\ufeffa"), ("\n", "a")]
)
def test_a_byte_order_mark_is_one_at_the_beginning_only(size: int, start: str, item: str) -> None:
    """Behind a blank line it is part of the first value."""
    data = f"{start}a,b,1\nbroken\n".encode()
    row, broken = read_csv_texts(data, size, header=False)
    assert (row["at"], row["item"]) == (item, "b")
    assert broken[1] == "broken"


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from([LINE, "", " ", "\r", "\ufeff{}", BROKEN, "x" * 50]), max_size=20
    ),
    size=st.integers(1, 40),
)
def test_chunks_of_lines_have_the_lines_of_the_whole(lines: list[str], size: int) -> None:
    """With or without a line break at the end."""
    data = "\n".join(lines).encode("utf-8", "surrogateescape")
    with pytest.MonkeyPatch.context() as patch:
        use_chunks(patch, size)
        found = list(text_chunks.iterate_line_chunks(io.BytesIO(data)))
    assert b"".join(chunk for _, chunk in found) == data
    assert all(data[start:].startswith(chunk) for start, chunk in found)
    assert all(chunk.endswith(b"\n") for _, chunk in found[:-1])


TEXTS: dict[str, bytes] = {
    "1.json": "\n".join([*(LINE % (n % 25) for n in range(60)), "no object", BROKEN, ""]).encode(
        "utf-8", "surrogateescape"
    ),
    "1.csv": ("at,item,extra\n" + "2026-03-01T00:00:00Z,é,\nbroken\n" + ROW * 30).encode(),
    "2.csv": b"at,at\n" + ROW.encode() * 30,
}


@pytest.mark.parametrize("name", [*TEXTS, "1.json.gz", "1.csv.gz", "cut.json.gz"])
@pytest.mark.parametrize("added", ["ignore", "dead_letter"])
def test_chunks_of_a_text_are_cast_as_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, added: str
) -> None:
    """Also what is decided about the whole object: undeclared fields, a bad header, a cut end."""
    plain = name.removesuffix(".gz").replace("cut", "1")
    data = TEXTS[plain] if plain == name else gzip.compress(TEXTS[plain])
    if name.startswith("cut"):
        data = data[:-20]
    options = {"format": plain.rpartition(".")[2], "evolution": {"added": added}}
    whole = decode(name, data, **options)
    use_chunks(monkeypatch, 500)
    assert decode(name, data, **options) == whole
    assert isinstance(whole[0], BadObject) == (name in ("2.csv", "cut.json.gz"))


@pytest.mark.parametrize("chunk", [40, 700])
@pytest.mark.parametrize(
    "name", [*(f"avro-{codec}" for codec in sorted(avro_files._CODECS)), "orc", "parquet"]
)
def test_chunks_of_typed_rows_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    """Small blocks of Avro are joined; large ones are read as streams, but for snappy."""
    data, form = write_typed(name)
    whole = read_typed_object(data, form)
    assert whole["amount"].to_pylist() == [*range(200)]
    use_chunks(monkeypatch, chunk)
    monkeypatch.setattr(avro_files, "_ROWS_AT_ONCE", 10)
    tables = list(object_decoding._iterate_typed_tables(io.BytesIO(data), form))
    assert pa.concat_tables(tables).equals(whole)
    assert max(table.num_rows for table in tables) <= 40
    decoded, _ = decode(f"1.{form}", data, format=form, evolution={"renamed": {"old": "item"}})
    assert decoded["item"].equals(whole["item"])
    if form == "avro":  # its last block does not end with the marker
        assert isinstance(decode("1.avro", data[:-1] + b"x", format=form)[0], BadObject)


@pytest.mark.parametrize(
    ("columns", "rows", "most"), [(1, 150_000, 128 << 10), (64, 20_000, 1 << 14)]
)
def test_few_rows_of_avro_are_held_as_objects(columns: int, rows: int, most: int) -> None:
    """Each takes some hundred bytes, also if it has one byte in the file."""
    fields = [{"name": f"c{n}", "type": "int"} for n in range(columns)]
    out, body = io.BytesIO(), bytes(rows * columns)
    record = fastavro.parse_schema({"type": "record", "name": "r", "fields": fields})
    fastavro.writer(out, record, [], sync_marker=AVRO_SYNC)
    for number in (rows, len(body)):
        fastavro.schemaless_writer(out, "long", number)
    out.write(body + AVRO_SYNC)
    out.seek(0)
    sizes = [table.num_rows for table in avro_files.iterate_avro_tables(out, 4 << 20)]
    assert sum(sizes) == rows
    assert max(sizes) <= most


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize("pattern", [b"\0", b"ab", bytes(range(256)), os.urandom(8192)])
def test_deflated_data_is_read_to_its_end(pattern: bytes, level: int) -> None:
    """Also what zlib still holds when all of the input is consumed; cut data is refused."""
    for size in [n * io.DEFAULT_BUFFER_SIZE + more for n in range(1, 4) for more in range(-2, 3)]:
        data = (pattern * (size // len(pattern) + 1))[:size]
        squeeze = zlib.compressobj(level, wbits=-15)
        packed = squeeze.compress(data) + squeeze.flush()
        assert open_compressed("deflate", io.BytesIO(packed)).read() == data
        with pytest.raises(EOFError):
            open_compressed("deflate", io.BytesIO(packed[:-1])).read()


def measure_memory(name: str, chunk: int) -> list[int]:
    """Decode and describe an object of 60 chunks.

    Returns:
        What Arrow held at each chunk that was written, and at last Python's maximum; in bytes.
    """
    held = list[int]()
    write = pq.ParquetWriter.write_table

    def write_counted(self: Any, table: pa.Table) -> None:
        held.append(pa.total_allocated_bytes() - before)
        write(self, table)

    form = name.split(".")[1]
    row = {"json": (LINE % 1).replace("1", "1" + " " * 1000), "csv": f"2026-03-01,{'b' * 1000},5"}[
        form
    ]
    rows = ["at,item,amount"] * (form == "csv") + [row] * (60 * chunk // len(row))
    data = "\n".join(rows).encode()
    source = spec(format=form).sources["a"]
    with pytest.MonkeyPatch.context() as patched, ScratchFile() as file, ScratchFile() as out:
        use_chunks(patched, chunk)
        patched.setattr(byte_streams, "READ_BYTES", chunk)
        patched.setattr(pq.ParquetWriter, "write_table", write_counted)
        file.write(gzip.compress(data, 1) if name.endswith("gz") else data)
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        bad = decode_to_parquet(name, file, source, out)
        found = describe_decoded_object(name, file, source)
        peak = tracemalloc.get_traced_memory()[1]
        assert bad is None
        assert not isinstance(found, BadObject)
        assert pq.read_metadata(out).num_rows == found[0].number == len(rows) - (form == "csv")
    return [*held, peak]


@pytest.mark.parametrize("name", ["1.json", "1.csv.gz"])
def test_what_is_held_does_not_grow_with_the_object(name: str) -> None:
    """Python and Arrow hold some chunks of an object of 60, to decode and to describe it."""
    chunk = 64 << 10
    held = call_in_new_process(measure_memory, name, chunk)
    assert len(held) > 61
    assert max(held) < 15 * chunk


def test_a_line_that_is_too_long_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CSV it costs the object, because a quote that is never closed looks like that."""
    monkeypatch.setattr(text_chunks, "MOST_ROW_BYTES", 2000)
    use_chunks(monkeypatch, 100)
    line = (LINE % 1).encode()
    data = b"\n".join([line, line[:-1] + b" " * 3000 + b"}", line, b"x" * 5000])
    rows, _ = decode("1.json", data, format="json")
    assert rows["amount"].to_pylist() == [1, None, 1, None]
    assert rows["_text"].to_pylist()[1].endswith("... has more than 2000 bytes")
    bad, _ = decode("1.csv", b'at,item\n1,"' + b"x\n" * 5000, format="csv")
    assert "a row has more than 2000 bytes" in bad.detail


def test_a_disk_without_room_is_no_fault_of_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder; nothing is left there."""
    source, data = (
        spec(format="csv").sources["a"],
        b"at,item\n" + os.urandom(100_000).hex().encode(),
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = ScratchFile()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(TransientError) as failed:
            decode_to_parquet("1.csv", io.BytesIO(data), source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.code == "source.no_scratch"
    assert str(tmp_path) in failed.value.message
    assert not os.listdir(tmp_path)


def test_a_scratch_file_is_gone_with_its_last_reader() -> None:
    """Also if the process ends without closing it: it never has a name."""
    out = ScratchFile()
    number = out._file.fileno()
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{number}")
    out.write(b"abc")
    del out
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
