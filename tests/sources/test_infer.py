"""A schema proposed from one object: what it proposes takes that object's rows as they are."""

from __future__ import annotations

import gzip
import io
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from tests.sources.encoded_objects import ROWS, WHOLE, csv, lines, read

from tidegate.jobs.sources.schema_inference import ColumnSample, sample_columns


def infer_columns(key: str, data: bytes, form: str) -> dict[str, str]:
    """The declared type of each column; one that a spec cannot declare becomes ``string``."""
    return {name: one.kind or "string" for name, one in sample_columns(key, data, form).items()}


SCHEMA = {"at": "timestamp", "item": "string", "amount": "long"}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_what_is_proposed_takes_the_object(tmp_path: Path, name: str) -> None:
    """In every format and compression: the source that gets the proposal reads all rows."""
    form, data = WHOLE[name]
    found = infer_columns(name, data, form)
    assert found == SCHEMA | ({"amount": "int"} if form == "avro" else {})
    rows, _ = read({name: data}, tmp_path, format=form, schema=found)
    assert [row.bad for row in rows] == [None, None, None]


def test_texts_are_taken_for_no_more_than_they_are() -> None:
    """Leading zeros, numbers in quotes, mixed values and nothing at all are text.

    A whole number among fractions is one.
    """
    rows = [
        {
            "zip": "01234",
            "n": 1,
            "x": 1,
            "flag": True,
            "day": "2026-03-01",
            "mixed": 1,
            "none": None,
            "deep": {"a": 1},
        },
        {
            "zip": "5",
            "n": None,
            "x": 1.5,
            "flag": False,
            "day": "2026-03-02",
            "mixed": "a",
            "none": None,
            "deep": [1],
        },
    ]
    wanted = {
        "zip": "string",
        "n": "long",
        "x": "double",
        "flag": "boolean",
        "day": "date",
        "mixed": "string",
    }
    assert infer_columns("1.json.gz", gzip.compress(lines(*rows)), "json") == wanted | {
        "none": "string",
        "deep": "string",
    }
    text = b"\xef\xbb\xbfzip,n,x\n01234,1,1\n5,2,1.5\n"
    assert infer_columns("1.csv", text, "csv") == {"zip": "string", "n": "long", "x": "double"}
    assert infer_columns("1.csv", csv(*(f"{r['at']},,1" for r in ROWS)), "csv") == SCHEMA


@pytest.mark.parametrize("form", ["parquet", "orc"])
def test_typed_columns_keep_their_types(form: str) -> None:
    """As far as a spec has them."""
    columns = {
        "small": pa.array([1], pa.int16()),
        "price": pa.array([Decimal("1.50")], pa.decimal128(6, 2)),
        "ratio": pa.array([0.5], pa.float32()),
        "tags": pa.array([["a"]]),
    }
    sink = io.BytesIO()
    (pq if form == "parquet" else orc).write_table(pa.table(columns), sink)
    found = infer_columns("1", sink.getvalue(), form)
    assert found == {"small": "int", "price": "decimal(6,2)", "ratio": "float", "tags": "string"}


def test_a_column_without_values_holds_no_times() -> None:
    """A text column of Parquet may be empty. It stays text, and other columns are tried."""
    empty = ColumnSample("string", [])
    assert empty.keep_times() is empty


def test_no_object() -> None:
    """Bytes that are something else are said to be."""
    with pytest.raises(ValueError, match="no row"):
        infer_columns("1.csv", b"", "csv")
    with pytest.raises(ValueError, match="no JSON object"):
        infer_columns("1.json", b"[1]", "json")


def test_only_a_few_lines_may_be_no_objects() -> None:
    """The last line of a JSON array is an object, but a driver could read no other line."""
    array = b"[\n" + b",\n".join(b'{"a": %d}' % n for n in range(9)) + b"\n]\n"
    with pytest.raises(ValueError, match=r"no JSON object: b'\['"):
        infer_columns("1.json", array, "json")
    good = b'{"a": 1}\n' * 9
    assert infer_columns("1.json", good + b'{"a"\n', "json") == {"a": "long"}
    with pytest.raises(ValueError, match=r"no JSON object: b'\{\"a\"'"):
        infer_columns("1.json", good[9:] + b'{"a"\n', "json")
