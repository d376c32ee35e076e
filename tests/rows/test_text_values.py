"""Texts as values of the declared types, as Spark SQL casts them."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import pytest

from tests.rows.topic_messages import rows

MOMENT = datetime(2026, 3, 1, 10, tzinfo=UTC)
DAY = date(2026, 3, 1)


def cast(declared: str, text: str, **more: Any) -> Any:
    """The value of a field that is read by itself; the reason if it does not fit."""
    schema = {"at": "timestamp", "v": declared}
    kafka: dict[str, Any] = {"key": None, "headers": {}, "timestamp": "at"}
    message = json.dumps({"v": text})
    (row,) = rows([message], one_by_one=True, kafka=kafka, schema=schema, **more)
    return row["v"] if row["_why"] is None else row["_why"]


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        *(
            ("long", " +007\t", 7),
            ("long", "-" + "0" * 5000 + "1", -1),
            ("int", "-2147483648", -(2**31)),
            ("float", "1e39", float("inf")),
        ),
        *(("double", "1.5d", 1.5), ("double", " -Infinity ", float("-inf")), ("double", ".5", 0.5)),
        *(("boolean", "Yes", True), ("boolean", " f", False), ("binary", "AP 8=", b"\0\xff")),
        *(("decimal(6,2)", "1.500", Decimal("1.50")), ("decimal(6,2)", "1e3", Decimal("1000.00"))),
        *(
            ("date", "2026-3-1", DAY),
            ("date", "2026-03-01 x", DAY),
            ("date", "2026", date(2026, 1, 1)),
        ),
        *(
            ("timestamp", "2026-03-01T10:00:00Z", MOMENT),
            ("timestamp", "2026-3-1 12:0:0 +02", MOMENT),
            ("timestamp", "2026-03-01T12:00:00UTC+02:00 ", MOMENT),
            ("timestamp", "2026-03-01T08:00:00 GMT-02", MOMENT),
        ),
    ],
)
def test_a_text_that_fits(declared: str, text: str, value: Any) -> None:
    """In each form that Spark SQL takes."""
    assert cast(declared, text) == value


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        *(("long", "2.0"), ("int", "2147483648"), ("long", "9" * 5000), ("long", "٧")),
        *(("double", "x"), ("double", "0x1p3"), ("boolean", "2"), ("binary", "A"), ("binary", "é")),
        *(("decimal(6,2)", "1.505"), ("decimal(6,2)", "1e1000000000"), ("decimal(6,2)", "10000")),
        *(("date", "2026-02-30"), ("date", "9999999-01-01"), ("date", "2026-03 x"), ("date", "26")),
        *(("timestamp", "2026-03-01T10:00:00"), ("timestamp", "2026-03-01T24:00:00Z")),
        *(("timestamp", "2026-03-01T10:00Z"), ("timestamp", "999999-01-01T00:00:00Z")),
        *(("timestamp", "2026-03-01T10:00:00+18:01"), ("timestamp", "10:00:00")),
    ],
)
def test_a_text_that_does_not_fit(declared: str, text: str) -> None:
    """Its message is a dead letter, whatever the text is."""
    assert cast(declared, text) == f"v is no {declared}: {text}"


@pytest.mark.parametrize(
    ("text", "unit", "ticks"),
    [
        *(("1.0000005", "s", 1_000_001), ("1e3", "ms", 1_000_000), ("-1", "us", -1)),
        *(("9" * 20, "s", None), ("2026-03-01", "ms", None)),
    ],
)
def test_numbers_of_a_unit(text: str, unit: str, ticks: int | None) -> None:
    """They are rounded to ticks."""
    found = cast("timestamp", text, parse={"timestamps": unit})
    if ticks is None:
        assert found == f"v is no timestamp: {text}"
        return
    assert round(found.timestamp() * 1_000_000) == ticks


@pytest.mark.parametrize("declared", ["double", "decimal(6,2)", "long"])
def test_a_long_number_with_a_strange_end_is_read_in_linear_time(declared: str) -> None:
    """Each step back of a pattern would try all digits again: minutes for this one."""
    assert "no" in str(cast(declared, "1" * 200_000 + "x"))


def test_a_message_that_is_cut_off_is_read_in_linear_time() -> None:
    """JSON within JSON, as of a log: each escaped quote would look for its end again."""
    text = '{"a": "' + '{\\"k\\":[1]}' * 20_000
    (row,) = rows([text], one_by_one=True)
    assert row["_why"] == "the message is not a JSON object"


def test_no_error_of_a_decoder_stops_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task would be tried again, and fail again, at the same message."""
    limit = sys.getrecursionlimit()

    def fail(*_: Any) -> Any:
        raise InvalidOperation("never seen before")

    monkeypatch.setattr("tidegate.jobs.rows.odd_messages.cast_text", fail)
    (row,) = rows(['{"n": "1"}'], one_by_one=True)
    assert row["_why"] == "the message cannot be read: never seen before"
    assert sys.getrecursionlimit() == limit
