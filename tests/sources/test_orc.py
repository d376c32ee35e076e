"""Tests of reading ORC files and the zone of their writer."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.orc as orc
import pytest
from tests.sources.encoded_objects import START, orc_of_spark

from tidegate.jobs.sources.object_decoding import read_typed_object
from tidegate.jobs.sources.orc import read_writer_zone


@pytest.mark.parametrize("codec", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_the_zone_of_a_writer_of_orc_is_found_in_every_codec(codec: str) -> None:
    """The parts of a file that name it are compressed as its rows are."""
    sink = io.BytesIO()
    orc.write_table(pa.table({"long_name" * 30: [START] * 9}), sink, compression=codec)
    file = orc.ORCFile(io.BytesIO(sink.getvalue()))
    assert file.compression == codec.upper()
    assert read_writer_zone(sink, file) == "GMT"


def test_an_orc_file_of_spark_without_rows_has_instants_too() -> None:
    """It has no part that names a zone."""
    assert str(read_typed_object(orc_of_spark(b"PRC"), "orc")["at"].type) == "timestamp[ns, tz=UTC]"
