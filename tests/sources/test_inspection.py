"""Tests of what is known of an object before its rows are decoded."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.encoded_objects import WHOLE, spec

from tidegate.jobs.sources.object_decoding import decode_to_parquet
from tidegate.jobs.sources.object_inspection import describe_encoded_object, read_footer


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(WHOLE)),
    data=st.data(),
    added=st.sampled_from(["ignore", "dead_letter"]),
)
def test_an_inspected_object_is_described_as_its_copy(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, added: str
) -> None:
    """Rows, columns and faults, also of a damaged object, without casting any text."""
    kind, whole = WHOLE[name]
    other = bytearray(whole)
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=2)
    ):
        other[place] = byte
    source = spec(format=kind, evolution={"added": added}).sources["a"]
    out = tmp_path_factory.mktemp("copy") / "out.parquet"
    bad = decode_to_parquet(f"inbox/a/{name}", io.BytesIO(other), source, out)
    copy = out.read_bytes() if bad is None else b""
    wanted = bad or read_footer(len(copy), lambda start, length: copy[start : start + length])
    assert describe_encoded_object(f"inbox/a/{name}", io.BytesIO(other), source) == wanted
