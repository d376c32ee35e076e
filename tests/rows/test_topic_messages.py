"""Decoded messages: values, bad messages, tombstones, headers, keys; no broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from tests.rows.topic_messages import (
    COLUMNS,
    SENT,
    make_batch,
    proto,
    rows,
    spec_of,
    split_messages,
)
from tidegate.jobs.rows.json_messages import plan_messages
from tidegate.jobs.sources.kafka_client import MESSAGE_SCHEMA
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN


def test_messages() -> None:
    """Good ones have typed values with key, header and timestamp beside.

    Bad ones have a reason, their text, and no values.
    """
    good = '{"at": "2026-03-01T10:00:00+01:00", "n": 7, "price": 1.5}'
    found = rows(
        [
            good,
            "not json",
            '["at"]',
            None,
            '{"at": "2026-03-01T10:00:00", "n": 1}',
            '{"at": "2026-03-01T10:00:00Z", "n": 1.5}',
            '{"at": "2026-03-01T10:00:00Z", "x": 1}',
            '{"n": 1}',
        ],
    )
    assert (
        found[0]["n"],
        found[0]["who"],
        found[0]["origin"],
        str(found[0]["price"]),
        found[0]["_why"],
    ) == (
        7,
        "ann",
        "phone",
        "1.50",
        None,
    )
    assert [row["_why"] for row in found[1:]] == [
        "the message is not a JSON object",
        "the message is not a JSON object",
        "a tombstone: the message has no value",
        "at is no timestamp: 2026-03-01T10:00:00",
        "n is no long: 1.5",
        "not in the schema: x",
        None,
    ]
    assert found[1]["_text"] == "not json"
    assert found[3]["_text"] == "key ann"
    assert found[5]["n"] is None
    assert [row["_at"] for row in found] == list(range(8))


def test_one_pass_is_as_exact_as_two() -> None:
    """The last of two equal keys counts.

    What is not JSON by the letter is none; nested values are text; nulls are nulls.
    """
    at = '"at": "2026-03-01T10:00:00Z"'
    found = rows(
        [
            f'{{{at}, "n": 1, "n": 2}}',
            f'{{{at}, "n": 1, "n": "x"}}',
            f"{{{at}, 'n': 1}}",
            f'{{{at}, "n": NaN}}',
            f'{{{at}, "n": 01}}',
            f'{{{at}, "n": 1',
            f'{{{at}, "n": 1, "x": 2, "x": 3, "y": null}}',
            f'{{{at}, "n": null, "item": {{"a": [1, "b"]}}}}',
            "{}",
            "",
            "null",
            f"{{{at}}} trailing",
        ],
        schema={**COLUMNS, "item": "string"},
    )
    assert [(row["n"], row["_why"]) for row in found] == [
        (2, None),
        (None, "n is no long: x"),
        *[(None, "the message is not a JSON object")] * 4,
        (None, "not in the schema: x, y"),
        (None, None),
        (None, None),
        *[(None, "the message is not a JSON object")] * 2,
        (None, None),
    ]
    assert found[7]["item"] == '{"a":[1,"b"]}'


def test_the_bytes_of_a_registry_s_serializer_are_named() -> None:
    """A serializer of JSON Schema puts the byte 0 and the schema's id before the object."""
    framed = b'\x00\x00\x00\x01\x02{"at": "2026-03-01T10:00:00Z", "n": 1}'
    found = rows([framed, b"\x00\x00\x00"])
    said = (
        "the message is not a JSON object: it begins with the 5 bytes of a serializer that uses a"
    )
    assert (found[0]["_why"].partition(" schema registry, ")[::2]) == (
        said,
        "schema 258; payload: json reads JSON without them",
    )
    assert found[1]["_why"] == "the message is not a JSON object"


def test_options() -> None:
    """Unknown fields may be ignored, times may be numbers, names may have changed, tombstones may
    be rows.
    """
    found = rows(
        ['{"at": 1767225600500, "x": 1, "count": 3}', None],
        kafka={"tombstones": "row"},
        event_time="sent",
        parse={"timestamps": "ms"},
        evolution={"added": "ignore", "renamed": {"count": "n"}},
    )
    assert [row["_why"] for row in found] == [None, None]
    assert (found[0]["at"].timestamp(), found[0]["n"]) == (1767225600.5, 3)
    assert (found[1]["n"], found[1]["who"], found[1]["sent"].timestamp()) == (
        None,
        "ann",
        SENT.timestamp(),
    )


def test_no_column_from_the_payload() -> None:
    """All may come from beside it; it has to be an object all the same."""
    beside: dict[str, Any] = {
        "schema": {"who": "string", "sent": "timestamp"},
        "event_time": "sent",
        "kafka": {"headers": {}},
    }
    found = rows(["{}", '{"x": 1}', "x"], **beside)
    assert [(row["who"], row["_why"]) for row in found] == [
        ("ann", None),
        (None, "not in the schema: x"),
        (None, "the message is not a JSON object"),
    ]


def test_odd_keys_and_headers() -> None:
    """What does not fit its column, or is not text, is a fault of its message and of no other."""
    good = '{"at": "2026-03-01T10:00:00Z"}'
    typed: dict[str, Any] = {"schema": {**COLUMNS, "origin": "long"}}
    assert [(row["origin"], row["_why"]) for row in rows([good], header=b"7", **typed)] == [
        (7, None)
    ]
    assert [row["_why"] for row in rows([good], header=b"x", **typed)] == ["origin is no long: x"]
    assert [row["_why"] for row in rows([good], header=b"\xff")] == ["origin is not UTF-8: 0xFF"]
    assert [row["_why"] for row in rows([good], key=b"a\xc3")] == ["who is not UTF-8: 0x61C3"]
    raw = rows([good], key=b"a\xc3", schema={**COLUMNS, "who": "binary"})
    assert [(bytes(row["who"]), row["_why"]) for row in raw] == [(b"a\xc3", None)]


def test_text_that_is_none() -> None:
    """Bytes that are not UTF-8 are reported, and shown as far as they are text.

    Also the key of a tombstone.
    """
    found = rows(
        [b'{"at": "2026-03-01T10:00:00Z", "n": 1, "who": "\xff"}', b"\xff", None],
        key=b"\xfe",
    )
    assert [row["_why"] for row in found] == [
        *["the message is not UTF-8"] * 2,
        "a tombstone: the message has no value",
    ]
    assert [row["_text"] for row in found] == [
        '{"at": "2026-03-01T10:00:00Z", "n": 1, "who": "\ufffd"}',
        "\ufffd",
        "key \ufffd",
    ]


def test_a_message_whose_own_time_no_column_holds() -> None:
    """It is a dead letter at its offset, and no plain message."""
    text = '{"at": "2026-03-01T10:00:00Z"}'
    found = rows([text], sent=None)
    assert [(row["at"], row["_why"]) for row in found] == [
        (None, "the timestamp of the message is more than a column holds")
    ]
    plan = plan_messages(spec_of(kafka={"headers": {}}))
    both = pa.Table.from_batches([make_batch([text], sent=sent) for sent in (SENT, None)])
    decoded, others = split_messages(both.combine_chunks().to_batches()[0], plan)
    assert (decoded["sent"].to_pylist(), others["timestamp"].to_pylist()) == ([SENT], [None])


def test_a_local_time_is_the_earlier_instant_or_none() -> None:
    """As in objects: one that occurs twice is the earlier of both, one that is skipped is none."""
    local = ["2024-10-27T02:30:00", "2024-03-31T02:30:00"]
    found = rows([f'{{"at": "{at}"}}' for at in local], timezone="Europe/Berlin")
    assert found[0]["at"].timestamp() == 1_729_989_000
    assert [row["_why"] for row in found] == [None, f"at is no timestamp: {local[1]}"]


def test_a_decimal_with_more_digits_than_its_column_is_a_bad_value() -> None:
    """As in objects: nothing is rounded. Zeros behind the last place are no digits."""
    at = '"at": "2026-03-01T10:00:00Z"'
    prices = ["1.505", '"1.505"', "1.50", '"1.500"', "12345.5", "-0.01", "1e2"]
    found = rows([f'{{{at}, "price": {price}}}' for price in prices])
    assert [row["_why"] or str(row["price"]) for row in found] == [
        "price is no decimal(6,2): 1.505",
        "price is no decimal(6,2): 1.505",
        "1.50",
        "1.50",
        "price is no decimal(6,2): 12345.5",
        "-0.01",
        "100.00",
    ]


def test_numbers_beyond_time() -> None:
    """A time in nanoseconds, where milliseconds are declared, is a bad value and no overflow."""
    found = rows(
        ['{"at": 1767225600500000000}', '{"at": 1767225600500}'],
        parse={"timestamps": "ms"},
    )
    assert [row["_why"] for row in found] == ["at is no timestamp: 1767225600500000000", None]


AT = bytes([0x0A, 0x06, 0x08, 0x80, 0xEA, 0x8E, 0xCD, 0x06])  # at: 1772336384 s
PROTO: dict[str, Any] = {
    "key": None,
    "headers": {},
    "timestamp": None,
    "payload": "protobuf",
    "message": "shop.Click",
}
PROTO_COLUMNS = {"at": "timestamp", "n": "long", "price": "decimal(6,2)", "kind": "string"}


def test_protobuf() -> None:
    """Values of messages, defaults of what they leave out, and what is wrong with those that are
    damaged or do not fit.
    """
    found = rows(
        [AT + b"\x10\x0d\x1a\x031.5\x20\x01", AT, AT[:-1], b"\x10\x02", AT + b"\x1a\x01x", None],
        {0: proto()},
        kafka={**PROTO, "schema_file": "shop.desc"},
        schema=PROTO_COLUMNS,
    )
    at = datetime.fromtimestamp(1772336384, UTC)
    assert [(r["n"], str(r["price"]), r["kind"]) for r in found[:1]] == [(-7, "1.50", "SELL")]
    assert found[0]["at"].timestamp() == at.timestamp()
    assert (found[1]["n"], found[1]["kind"], found[1]["_why"]) == (
        None,
        None,
        "price is no decimal(6,2): ",
    )
    assert [r["_why"] for r in found[2:]] == [
        "the message is no shop.Click",
        "price is no decimal(6,2): ",
        "price is no decimal(6,2): x",
        "a tombstone: the message has no value",
    ]
    assert found[2]["_text"] == "0x" + AT[:-1].hex().upper()


def test_protobuf_by_number() -> None:
    """With a registry the first bytes name schema and message.

    Other numbers and other messages are distinguished.
    """
    good = AT + b"\x1a\x011"
    found = rows(
        [
            b"\0\0\0\0\x07\x02\x02" + good,
            b"\0\0\0\0\x07\x00" + good,
            b"\0\0\0\0\x08\x02\x02" + good,
            good,
        ],
        {7: proto(), 8: None},
        kafka={**PROTO, "registry": "http://127.0.0.1:9"},
        schema=PROTO_COLUMNS,
    )
    assert [r["_why"] for r in found] == [
        None,
        "the message is not a shop.Click, but another one of its schema",
        "the message was written with schema 8, which the registry does not know",
        "the message does not begin with the number of a schema",
    ]
    assert str(found[0]["price"]) == "1.00"


TEXTS = [
    *(
        "",
        "7",
        " 7",
        "-7",
        "+7",
        "007",
        "1.50",
        "1.555",
        "1e3",
        "-0",
        "-0.0",
        "NaN",
        "true",
        "True",
    ),
    *("x", "é", "2147483648", "9" * 40, "2026-03-01", "2026-02-30", "2026-03-01T10:00:00Z"),
    *("1" * 30, "0." + "1" * 30),
    *("2026-03-01 10:00:00.5+01:30", "2026-03-01T10:00:00", "1767225600", "٧"),
]


@pytest.mark.parametrize("stamps", ["iso", "s"])
@pytest.mark.parametrize(
    "kind",
    [
        "string",
        "binary",
        "int",
        "long",
        "double",
        "boolean",
        "date",
        "timestamp",
        "decimal(6,2)",
        "decimal(38,20)",
    ],
)
def test_keys_and_headers_of_all_types(kind: str, stamps: str) -> None:
    """Those in plain form are read many at a time, with the values that they have by themselves."""
    source: dict[str, Any] = {
        "kafka": {"key": None, "headers": {"v": "from"}, "timestamp": "at"},
        "schema": {"at": "timestamp", "n": "long", "v": kind},
        "parse": {"timestamps": stamps},
    }
    texts = [*(text.encode() for text in TEXTS), b"\xff"]
    found = [rows(['{"n": 1}'], header=text, **source)[0] for text in texts]
    alone = rows(['{"n": 1}'] * len(texts), header=texts, one_by_one=True, **source)
    for text, one, other in zip(texts, found, alone, strict=True):
        assert repr({**one, OFFSET_COLUMN: 0}) == repr({**other, OFFSET_COLUMN: 0}), text


def test_the_last_header_counts() -> None:
    """Of each message; another may have none."""
    source = spec_of(kafka={"key": None})
    plan = plan_messages(source)
    headers = [
        [("from", b"a"), ("x", b"b"), ("from", b"c")],
        [],
        None,
        [("from", None)],
        [("x", b"")],
    ]
    batch = pa.RecordBatch.from_pylist(
        [
            {
                "key": None,
                "value": b'{"at": "2026-03-01T10:00:00Z"}',
                "partition": 0,
                "offset": place,
                "timestamp": SENT,
                "headers": own and [{"key": key, "value": value} for key, value in own],
            }
            for place, own in enumerate(headers)
        ],
        MESSAGE_SCHEMA,
    )
    found, others = split_messages(batch, plan)
    assert not others.num_rows
    assert found["origin"].to_pylist() == ["c", None, None, None, None]
