"""Messages that Arrow parses in bulk: their places, and which are odd."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from tests.rows.topic_messages import SENT, spec_of, split_messages
from tidegate.jobs.rows.json_messages import (
    PARTITION,
    PlainMessages,
    parse_objects,
    plan_messages,
)
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN

_SCHEMA: Final = pa.schema(
    {
        "n": pa.int64(),
        "x": pa.float64(),
        "s": pa.string(),
        "d": pa.decimal128(6, 2),
        "wide": pa.decimal128(38, 20),
    }
)


def _parse(messages: list[Any], *, ignore_others: bool = False) -> list[Any]:
    values = pa.array([m.encode() if isinstance(m, str) else m for m in messages], pa.binary())
    plan = PlainMessages(_SCHEMA, _SCHEMA, {}, {}, None, ignore_others, None, True)
    found: list[Any] = parse_objects(values, plan).to_pylist()
    return found


def test_objects_keep_their_places_beside_odd_ones() -> None:
    """Only a small group around an odd object is left out."""
    messages: list[str | None] = [f'{{"n": {place}, "s": "{{"}}' for place in range(1_000)]
    messages[3], messages[7], messages[500] = None, "", '{"n": "500"}'
    found = _parse(messages)
    left = [place for place, row in enumerate(found) if row is None]
    assert {3, 7, 500} <= set(left)
    assert len(left) <= 2 + 64
    assert all(row["n"] == place for place, row in enumerate(found) if row is not None)


def test_plain_values_are_parsed() -> None:
    """Strings, nulls, escapes, numbers and what is missing."""
    found = _parse(
        ['{ "n": -7, "x": 1e3,\n "s": "\\u0041\\n\U0001f30a" }', '{"n": null, "d": 1.5}']
    )
    assert [(row["n"], row["x"], row["s"]) for row in found] == [
        (-7, 1000.0, "A\n\U0001f30a"),
        (None, None, None),
    ]
    assert str(found[1]["d"]) == "1.50"


@pytest.mark.parametrize(
    "message",
    [
        '{"n": 1, "n": 2}',
        '{"n": 1}{"n": 2}',
        '{"n": 1} {"n": 2}',
        '{"n": 1} ',
        ' {"n": 1}',
        '{"n": 1.0}',
        '{"n": 9223372036854775808}',
        '{"n": "1"}',
        '{"x": -0}',
        '{"x": 1e999}',
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 0.' + "1" * 1_000 + "}",
        '{"s": "\\udc00"}',
        '{"s": "\\ud800"}',
        '{"s": {}}',
        '{"s": 1}',
        b'{"s": "\xff"}',
        b'{"s": "\xed\xa0\x80"}',
        '{"d": 1.505}',
        '{"d": 99999}',
        '{"d": "1.5"}',
        '{"d": 1e999}',
        '{"wide": 0.12345678901234567891}',
        '{"wide": 12345678901234567890123}',
        '{"y": 1}',
        '{"n": 1}\0}',
        "{'n': 1}",
        "[{}]",
        "{",
    ],
)
def test_an_odd_message_is_left_out(message: str | bytes) -> None:
    """Whatever Arrow might read in another way."""
    assert _parse([message]) == [None]


@pytest.mark.parametrize("value", ["NaN", "-Inf", "[" * 1_001 + "]" * 1_001, "1" * 1_001])
def test_odd_values_of_ignored_fields_are_left_out(value: str) -> None:
    """The message is bad for them."""
    found = _parse(['{"y": [1, {"z": 2}], "n": 1}', f'{{"y": {value}}}'], ignore_others=True)
    assert [row and row["n"] for row in found] == [1, None]


def test_an_ignored_name_that_is_too_long_is_left_out() -> None:
    """The message is bad for it."""
    found = _parse([f'{{"{"y" * size}": 1, "n": 1}}' for size in (10, 50_001)], ignore_others=True)
    assert [row and row["n"] for row in found] == [1, None]


@pytest.mark.parametrize("literal", ["0.01", "-7.10", "1e3", "100e-2", "-0", "1.5000", "9999.99"])
def test_a_decimal_has_the_digits_of_its_number(literal: str) -> None:
    """Although it comes by way of a double."""
    (row,) = _parse([f'{{"d": {literal}}}'])
    assert row["d"] == Decimal(literal)


def test_surplus_objects_do_not_make_up_for_lost_ones() -> None:
    """As many objects as messages are not enough if a message ends the input."""
    found = _parse(['{"n": 1}{"n": 2}{"n": 3}', '{"n": 4}\0}', '{"n": 5}'])
    assert [row and row["n"] for row in found] == [None, None, 5]


def test_plain_messages_become_rows_with_their_envelope() -> None:
    """Times, a renamed field, the key, the timestamp and the offset; the others are handed back."""
    source = spec_of(
        kafka={"headers": {}},
        schema={"at": "timestamp", "n": "long", "who": "string", "sent": "timestamp"},
        evolution={"renamed": {"m": "n"}},
    )
    plan = plan_messages(source)
    values = ['{"at":"2026-03-01T12:00:00+02:00","m":7}', '{"at":"2026-03-01T12:00","n":8}']
    batch = pa.record_batch(
        {
            "key": [b"ann", b"bob"],
            "value": [value.encode() for value in values],
            "partition": pa.array([3, 3], pa.int32()),
            "offset": [(1 << 32) + 5, (1 << 32) + 6],
            "timestamp": pa.array([SENT, SENT]),
        }
    )
    rows, odd = split_messages(batch, plan)
    at = datetime(2026, 3, 1, 10, tzinfo=UTC)
    places = {OFFSET_COLUMN: 5, PARTITION: 3, "_why": None, "_text": None}
    assert rows.to_pylist() == [{"at": at, "n": 7, "who": "ann", "sent": SENT, **places}]
    assert odd["value"].to_pylist() == [values[1].encode()]
    broken = batch.set_column(0, "key", pa.array([b"\xff", b"bob"]))
    assert split_messages(broken, plan)[1].num_rows == 2


@pytest.mark.parametrize(
    ("kind", "plain", "odd"),
    [
        ("int", b"7", b"2147483648"),
        ("long", b"7", b"9" * 25),
        ("decimal(6,2)", b"1.50", b"99999999"),
        ("date", b"2026-03-01", b"2026-02-30"),
        ("timestamp", b"2026-03-01T10:00:00Z", b"2026-02-30T00:00:00Z"),
    ],
)
@pytest.mark.parametrize("place", [{"key": "v", "headers": {}}, {"headers": {"v": "from"}}])
def test_an_odd_key_or_header_leaves_few_messages_out(
    place: dict[str, Any], kind: str, plain: bytes, odd: bytes
) -> None:
    """Arrow refuses the whole column for it."""
    kafka = {"key": None, "timestamp": None, **place}
    columns = {"at": "timestamp", "n": "long", "v": kind}
    plan = plan_messages(spec_of(kafka=kafka, schema=columns))
    texts = [plain] * 1_000
    texts[700] = odd
    headers = [[{"key": "from", "value": text}] for text in texts]
    batch = pa.record_batch(
        {
            "key": pa.array(texts, pa.binary()),
            "value": [b'{"n": %d}' % offset for offset in range(1_000)],
            "partition": pa.array([0] * 1_000, pa.int32()),
            "offset": [*range(1_000)],
            "headers": pa.array(headers, MESSAGE_SCHEMA.field("headers").type),
        }
    )
    parsed, left = split_messages(batch, plan)
    rows = parsed.to_pylist()
    assert {row["v"] for row in rows} == {rows[0]["v"]} != {None}
    assert [row["n"] for row in rows] == [row[OFFSET_COLUMN] for row in rows]
    others = left["offset"].to_pylist()
    assert 700 in others
    assert len(others) <= 64
    assert sorted([*others, *(row["n"] for row in rows)]) == [*range(1_000)]


@pytest.mark.parametrize("kind", ["float", "binary"])
def test_a_topic_with_other_kinds_of_columns_is_read_one_by_one(kind: str) -> None:
    """Their values are cast from texts."""
    plain: dict[str, Any] = {"kafka": {"headers": {}, "key": None, "timestamp": None}}
    schema = {"at": "timestamp", "x": kind}
    assert not plan_messages(spec_of(**plain, schema=schema)).is_plain
    assert plan_messages(spec_of(**plain, schema={"at": "timestamp"})).is_plain
