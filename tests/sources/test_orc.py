"""Tests of reading ORC files and the zone of their writer."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.orc as orc
import pytest
from tests.sources.encoded_objects import START, orc_of_spark

from tidegate.jobs.sources.object_decoding import read_typed_object
from tidegate.jobs.sources.orc import extract_stripes, iterate_orc_tables, read_writer_zone


def list_stripes(file: io.BytesIO) -> list[tuple[int, int]]:
    """The first row of each stripe, and where it begins."""
    found: list[tuple[int, int]] = []
    for _ in iterate_orc_tables(file, 1 << 20, lambda *place: found.append(place)):
        pass
    return found


@pytest.mark.parametrize("codec", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_the_zone_of_a_writer_of_orc_is_found_in_every_codec(codec: str) -> None:
    """The parts of a file that name it are compressed as its rows are."""
    sink = io.BytesIO()
    orc.write_table(pa.table({"long_name" * 30: [START] * 9}), sink, compression=codec)
    file = orc.ORCFile(io.BytesIO(sink.getvalue()))
    assert file.compression == codec.upper()
    assert read_writer_zone(sink) == "GMT"


def test_an_orc_file_of_spark_without_rows_has_instants_too() -> None:
    """It has no part that names a zone."""
    assert str(read_typed_object(orc_of_spark(b"PRC"), "orc")["at"].type) == "timestamp[ns, tz=UTC]"


@pytest.mark.parametrize("codec", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_some_stripes_of_a_file_are_a_file(codec: str) -> None:
    """With their rows, in every codec; a damaged footer is refused."""
    dice = random.Random(1)
    numbers = [dice.getrandbits(60) for _ in range(40_000)]
    rows = pa.table({"n": numbers, "texts": [[f"{n}", None] for n in numbers]})
    sink = io.BytesIO()
    orc.write_table(rows, sink, compression=codec, stripe_size=1000, batch_size=4000)
    places = list_stripes(sink)
    assert len(places) > 5
    (first, start), (last, end) = places[2], places[4]
    with extract_stripes(sink, start, end) as found:
        assert pa.concat_tables(iterate_orc_tables(found, 50_000)) == rows.slice(
            first, last - first
        )
        assert read_writer_zone(found) == "GMT"
    data = sink.getvalue()
    with pytest.raises(ValueError, match="damaged"):
        extract_stripes(io.BytesIO(data[:-20] + b"\xff" * 10 + data[-10:]), start, end)


def test_stripes_of_several_zones_are_read_together() -> None:
    """All of their rows have the zone of the first one."""
    sink = io.BytesIO()
    rows = pa.table({"at": [START] * 400, "item": [f"{n}" * 9 for n in range(400)]})
    orc.write_table(rows, sink, compression="uncompressed", stripe_size=1000, batch_size=40)
    assert len(list_stripes(sink)) > 2
    assert list_stripes(io.BytesIO(sink.getvalue().replace(b"GMT", b"PRC", 1))) == []
