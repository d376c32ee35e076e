"""Which Avro schemas tasks read; the others are left to Spark SQL."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rows.topic_inputs import topic_spec
from tidegate.jobs.rows.avro_records import is_readable_schema, plan_records

TIME = {"type": "long", "logicalType": "timestamp-millis"}
ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "A"}
INNER = {"type": "record", "name": "I", "fields": [{"name": "n", "type": "int"}]}
DECIMAL = {"type": "fixed", "logicalType": "decimal", "precision": 4, "scale": 2}


def make_record(*types: Any, **first: Any) -> dict[str, Any]:
    """A record of `t` and fields of these types; `first` are attributes of the first one."""
    fields = [{"name": f"f{place}", "type": kind} for place, kind in enumerate(types)]
    fields[0] |= first
    return {"type": "record", "name": "shop.R", "fields": [{"name": "t", "type": TIME}, *fields]}


@pytest.mark.parametrize(
    "record",
    [
        make_record("int", ["null", "string"], ENUM, "E"),
        make_record(["null", "long"], default=None, aliases=["y"], doc="z"),
        make_record("double", default=0.0),
        make_record(ENUM, default="B"),
        make_record(INNER, "shop.I"),
        make_record({**DECIMAL, "name": "D", "size": 2}, ["int", "string"]),
    ],
)
def test_ordinary_schemas_are_read(record: dict[str, Any]) -> None:
    """With their names, defaults and nested fields."""
    assert is_readable_schema(json.dumps(record).encode(), topic_spec("b:9092").sources["a"])


@pytest.mark.parametrize(
    "schema",
    [
        *(b"", b"[]", b'"string"', b"{", b'{"type": "record"}', b"\xff"),
        make_record("nonsense"),
        make_record("null"),
        make_record(["null"]),
        make_record(["int", "int"]),
        make_record(["null", "shop.R"]),
        make_record("int", name="T"),
        make_record("int", name="a-b"),
        make_record("int", default="7"),
        make_record("int", order="none"),
        make_record({"type": "int", "spark.sql.catalyst.type": "interval year"}),
        make_record({"type": "long", "logicalType": "time-micros"}),
        make_record({"type": "array", "items": TIME}),
        make_record({**DECIMAL, "name": "D", "size": 1}),
        make_record({**DECIMAL, "name": "D", "size": 2}, "shop.D"),
        make_record({**ENUM, "symbols": ["A", "a b"]}),
    ],
)
def test_schemas_out_of_the_ordinary_are_left_to_spark(schema: bytes | dict[str, Any]) -> None:
    """Spark might refuse them, or read other values."""
    text = schema if isinstance(schema, bytes) else json.dumps(schema).encode()
    assert plan_records(text) is None


def test_wanted_fields_have_types_that_become_their_columns() -> None:
    """A wanted field is nested, or of another type."""
    source = topic_spec("b:9092").sources["a"]
    for kind in (["int", "string"], {"type": "array", "items": "int"}, "bytes"):
        record = make_record(kind, name="n")
        assert plan_records(json.dumps(record).encode()) is not None
        assert not is_readable_schema(json.dumps(record).encode(), source)
