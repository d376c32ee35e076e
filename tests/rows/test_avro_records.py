"""Avro messages that are read many at a time: each has the value that it has by itself."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.rows.avro_inputs import AT, NUMBERED, RICH, TIME, VALUES, encode, make_schema
from tests.rows.topic_messages import make_batch, rows, spec_of
from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.arrow_tables import list_rows
from tidegate.jobs.rows.avro_messages import make_avro_decoder
from tidegate.jobs.rows.avro_records import parse_avro_schema
from tidegate.jobs.rows.json_messages import get_kafka_options, join_messages, plan_messages
from tidegate.jobs.rows.message_schemas import split_header
from tidegate.jobs.rows.odd_messages import decode_payloads

ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "A"}
INNER = {"type": "record", "name": "I", "fields": [{"name": "n", "type": "int"}]}
DECIMAL = {"type": "fixed", "logicalType": "decimal", "precision": 4, "scale": 2}


def make_record(*types: Any, **first: Any) -> dict[str, Any]:
    """A record of `t` and fields of these types; `first` are attributes of the first one."""
    fields = [{"name": f"f{place}", "type": kind} for place, kind in enumerate(types)]
    fields[0] |= first
    return {"type": "record", "name": "shop.R", "fields": [{"name": "t", "type": TIME}, *fields]}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (make_record("int", ["null", "string"], ENUM, "E"), "int"),
        (make_record(["null", "long"], default=None, aliases=["y"], doc="z"), "long"),
        (make_record("double", default=0.0), "double"),
        (make_record(ENUM, default="B"), "string"),
        (make_record(INNER, "shop.I"), "nested"),
        (make_record({**DECIMAL, "name": "D", "size": 2}, ["int", "string"]), "decimal(4,2)"),
        (make_record("null"), "null"),
        (make_record(["null", "shop.R"]), "nested"),
        (make_record({"type": "long", "logicalType": "time-micros"}), "long"),
        (make_record({"type": "array", "items": TIME}), "nested"),
        (make_record({"type": "array", "items": {**INNER, "fields": []}}), "nested"),
        (make_record(["int", "string"], name="n"), "nested"),
        (make_record({"type": "array", "items": "int"}, name="n"), "nested"),
        (make_record("bytes", name="n"), "bytes"),
    ],
)
def test_a_field_has_the_kind_of_its_type(record: dict[str, Any], kind: str) -> None:
    """Whatever name or default it has, also if its record contains itself."""
    fields = parse_avro_schema(json.dumps(record).encode())
    assert [field.kind for field in fields[:2]] == ["instant", kind]


@pytest.mark.parametrize(
    "schema", [b"", b"[]", b'"string"', b"{", b'{"type": "record"}', b"\xff", make_schema(a="odd")]
)
def test_what_is_no_schema_is_refused(schema: bytes) -> None:
    """Its messages say why."""
    with pytest.raises(ConfigurationError) as refused:
        parse_avro_schema(schema)
    assert refused.value.code == "kafka.bad_schema"


def nest_unions(depth: int) -> Any:
    """A list in a union, in a list, and so on."""
    kind: Any = "int"
    for _ in range(depth):
        kind = {"type": "array", "items": ["null", "string", kind]}
    return kind


def test_nested_unions_are_made_once_each() -> None:
    """The readers of a schema take time as it has types, not twice for each union around them."""
    [_, field] = parse_avro_schema(json.dumps(make_record(nest_unions(60))).encode())
    assert field.kind == "nested"


def test_a_schema_that_is_too_deep_is_refused() -> None:
    """It ends no driver, and every Python refuses the same one."""
    with pytest.raises(ConfigurationError, match="200 levels") as refused:
        parse_avro_schema(json.dumps(make_record(nest_unions(100))).encode())
    assert refused.value.code == "kafka.bad_schema"


def compare(messages: list[bytes], schemas: dict[int, bytes], **own: Any) -> int:
    """Read messages in both ways; return how many are read with others."""
    own["kafka"] = {"key": None, **NUMBERED}
    alone = rows(messages, schemas, one_by_one=True, **own)
    source = spec_of(**own)
    plan, plain = plan_messages(source), 0
    decode = make_avro_decoder(source, keeps_texts=True)
    for place, (message, row) in enumerate(zip(messages, alone, strict=True)):
        batch = make_batch([message])
        decoded = decode_payloads(
            batch["value"],
            plan,
            source,
            lambda value: decode(*split_header(value, schemas, get_kafka_options(source))),
        )
        found, _ = join_messages(batch, decoded, plan)
        for one in list_rows(found):
            assert repr({**one, "_at": place}) == repr(row), message
            plain += 1
    return plain


@pytest.mark.parametrize(
    ("declared", "least"),
    [
        *(("int", 5), ("long", 8), ("float", 1), ("double", 6), ("boolean", 1), ("string", 15)),
        *(("binary", 2), ("date", 2), ("timestamp", 3), ("decimal(6,2)", 6), ("decimal(4,1)", 2)),
    ],
)
def test_values_are_those_of_single_messages(declared: str, least: int) -> None:
    """Of each type in a column of each type."""
    schemas = dict(enumerate(dict.fromkeys(make_schema(v=kind) for kind, _ in VALUES)))
    numbers = {schema: number for number, schema in schemas.items()}
    messages = []
    for kind, value in VALUES:
        schema = make_schema(v=kind)
        messages.append(b"\0" + numbers[schema].to_bytes(4, "big") + encode(schema, v=value))
    assert compare(messages, schemas, schema={"at": "timestamp", "v": declared}) >= least


def test_numbers_are_times_with_a_unit() -> None:
    """And else they are not; the schema's own times have their unit."""
    values = [("long", AT), ("int", AT), (TIME, AT * 1000), ("long", 2**62)]
    schemas = {number: make_schema(v=kind) for number, (kind, _) in enumerate(values)}
    messages = [
        b"\0\0\0\0" + bytes([number]) + encode(schemas[number], v=value)
        for number, (_, value) in enumerate(values)
    ]
    own: dict[str, Any] = {"schema": {"at": "timestamp", "v": "timestamp"}}
    assert compare(messages, schemas, parse={"timestamps": "s"}, **own) == 3
    assert compare(messages, schemas, **own) == 1


def test_damaged_messages_are_bad_in_both_ways() -> None:
    """A message is cut, has other bytes or more of them; nested fields are passed over."""
    draw = random.Random(5)
    good = encode(
        RICH, n=300, e="SELL", s="aé", many=[1, -70], by={"k": "v"}, b=True, inner={"x": 5}
    )
    bodies = [good, good + b"more", *(good[:end] for end in range(1, len(good)))]
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 2)):
            data[draw.randrange(len(data))] = draw.choice([0, 1, 2, 3, 4, 127, 128, 255])
        bodies.append(bytes(data))
    columns = {"at": "timestamp", "n": "long", "e": "string", "s": "string", "b": "boolean"}
    messages = [b"\0\0\0\0\7" + body for body in bodies]
    assert compare(messages, {7: RICH}, schema=columns) > 60
