"""What single values of an object cost: a text that is none, a time that no column holds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.rows.odd_columns import text_of
from tidegate.jobs.rules.declared_values import convert_rows

_MS = pa.timestamp("ms", "UTC")
_US = pa.timestamp("us", "UTC")


def convert(column: Any, kind: pa.DataType, declared: str = "x") -> tuple[list[Any], list[Any]]:
    """The values of one column, and what is wrong with its rows."""
    rows = pa.table({"x": column})
    (values,), reasons = convert_rows(rows, pa.schema([("x", kind)]), {declared})
    return values.to_pylist(), [None] * len(rows) if reasons is None else reasons.to_pylist()


def test_a_text_that_is_not_utf8_is_shown_as_far_as_it_is_one() -> None:
    """The others stay as they are, also one that has the character for a bad byte."""
    column = text_of(b"a", b"caf\xe9", None, "\ufffd".encode(), b"")
    assert convert(column, pa.string()) == (
        ["a", "caf\ufffd", None, "\ufffd", ""],
        [None, "x is not UTF-8", None, None, None],
    )


def test_a_column_that_is_not_declared_costs_no_row() -> None:
    """Its value is of no use to anyone."""
    assert convert(text_of(b"\xff"), pa.string(), declared="y") == (["\ufffd"], [None])


def test_a_nested_value_with_such_a_text_is_null() -> None:
    """At any depth."""
    inner = pa.StructArray.from_arrays([text_of(b"a", b"\xff", b"b")], ["s"])
    column = pa.ListArray.from_arrays([0, 1, 2, 3], inner)
    values, reasons = convert(column, column.type)
    assert values == [[{"s": "a"}], None, [{"s": "b"}]]
    assert reasons == [None, "x is not UTF-8", None]


@pytest.mark.parametrize(("unit", "most"), [("ms", 2**63 // 1000), ("s", 2**63 // 1_000_000)])
def test_a_time_beyond_microseconds_costs_its_row(unit: str, most: int) -> None:
    """The last one that fits is a value, in the past as well."""
    numbers = [0, most, most + 1, 10**17, None, -most, -most - 1]
    column = pa.array(numbers, pa.int64()).cast(pa.timestamp(unit, "UTC"))
    kind = pa.schema([("x", _US)])
    (values,), reasons = convert_rows(pa.table({"x": column}), kind, {"x"})
    factor = {"ms": 1_000, "s": 1_000_000}[unit]
    assert values.cast(pa.int64()).to_pylist() == [
        0, most * factor, None, None, None, -most * factor, None,
    ]  # fmt: skip
    bad = [number is not None and abs(number) > most for number in numbers]
    assert [reason is not None for reason in reasons.to_pylist()] == bad


def test_good_columns_have_no_reasons() -> None:
    """Not even a column of them."""
    rows = pa.table({"x": pa.array(["a", None]), "t": pa.array([1, None], _MS)})
    kinds = pa.schema([("x", pa.string()), ("t", _US)])
    assert convert_rows(rows, kinds, {"x", "t"})[1] is None
