"""Values of each physical type, cast to each declared type by DuckDB and by Spark SQL."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.spark.agreement import spec_of
from tidegate.jobs.rows.column_casts import (
    cast_never_fails,
    cast_with_check_sql,
    is_cast_proven,
    select_readable_columns,
)
from tidegate.jobs.rows.slice_reading import POSITION_COLUMNS, CutPart, read_parts
from tidegate.jobs.rules.duck_frame import DuckFrame
from tidegate.jobs.rules.row_conditions import quote_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FLOATS = [
    *(None, 0.0, -0.0, 1.0, -1.5, 0.1, 0.125, 4.35, 9999.995, 123456789012.345, 1e15 + 0.3),
    *(2.0**24 + 1, 2.0**31, -(2.0**31), 2.0**53, 2.0**53 + 2, 2.0**63, -(2.0**63), 1e19, 1e37),
    *(1e38, 1e300, 1e-300, math.nan, math.inf, -math.inf),
]
TEXTS = [
    *(
        "",
        "0",
        "1",
        "-1",
        "+1",
        "007",
        "-0",
        "true",
        "False",
        "TRUE",
        "t",
        "yes",
        " 1",
        "1 ",
        "1\n",
    ),
    *("1.5", "1.0", "5.", ".5", "-.5", "+.5e1", "1e3", "1E-3", "1e400", "-1e400", "1e-400", "1e39"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808"),
    *(
        "2020-01-01",
        "2020-02-30",
        "2020-1-1",
        "0000-01-01",
        "9999-12-31",
        "0001-01-01",
        "x",
        "\u00fc",
    ),
    *("NaN", "Infinity", "inf", "1.23", "1.230", "12345678901234567890.12", "0.001", "99999.99"),
    *("1_000", "0x10", "1,5", "\uff11", "\n1", "3.4028236e38", "16777217", "0.1", "0" * 40 + "1"),
    *("123456789" * 5, "9" * 38, "1e", "e1", ".", "-", "\\x41"),
]
MICROS = [0, -1, 1_700_000_000_123_456, 253_402_300_799_999_999, -62_135_596_800_000_000]
VALUES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [True, False],
    pa.int8(): [0, 1, -1, 127, -128],
    pa.int16(): [0, 1, -1, 32767],
    pa.int32(): [0, 1, -1, 2**31 - 1, -(2**31), 2**24, 2**24 + 1, 99_999, 10_000],
    pa.int64(): [0, 5, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 10_000, 9999],
    pa.uint8(): [0, 255],
    pa.uint16(): [0, 65_535],
    pa.uint32(): [0, 2**32 - 1, 2**24 + 1],
    pa.uint64(): [0, 1, 2**63, 2**64 - 1, 2**53 + 1],
    pa.float32(): [
        0.0,
        -0.0,
        1.0,
        -1.5,
        0.125,
        2.0**24,
        2.0**31,
        2.0**63,
        1e38,
        math.nan,
        math.inf,
    ],
    pa.float64(): FLOATS,
    pa.decimal128(6, 2): [*map(Decimal, ("0.00", "1.00", "-1.50", "0.10", "9999.99", "-9999.99"))],
    pa.decimal128(38, 0): [
        *map(Decimal, ("0", "-5", "2147483648", "9223372036854775808", "9" * 38))
    ],
    pa.decimal128(38, 18): [*map(Decimal, ("0", "1.5", "0.000000000000000001", "123456.78", "1"))],
    pa.string(): TEXTS,
    pa.large_string(): ["1", "x"],
    pa.dictionary(pa.int32(), pa.string()): ["1", "x", "2020-01-01"],
    pa.binary(): [b"", b"x", b"1"],
    pa.date32(): [0, -1, 19_000, -719_162, 2_932_896],
    pa.timestamp("us", "UTC"): MICROS,
    pa.timestamp("us"): MICROS,
    pa.timestamp("ms", "UTC"): [0, -1, 1_700_000_000_123],
    pa.timestamp("ns", "UTC"): [0, -1, 1_700_000_000_123_456_789],
}
DECLARED = [
    *("string", "boolean", "int", "long", "float", "double", "date", "timestamp", "binary"),
    *("decimal(6,2)", "decimal(38,0)", "decimal(38,18)", "decimal(20,3)"),
]


# Few values, for tests of whole movers.

_NUMBERS = [1.0, 1.5, -2.0, 3e9, 2.0**60, 2.0**63, 0.1, 0.125, math.nan, math.inf]
_ODD: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), _NUMBERS),
    (pa.int64(), [1, 2**24 + 1, 2**53 + 1, 2**53 + 2, 2**31, -(2**40)]),
    (pa.decimal128(12, 2), [Decimal("1.00"), Decimal("1.50"), Decimal("123456789.25")]),
    (
        pa.string(),
        ["1", "1.5", " 2 ", "+3", "1d", "true", "yes", "2020-01-02", "2020-1-2", "1e3", ""],
    ),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date(2020, 1, 2)]),
    (pa.timestamp("us", "UTC"), [datetime(2020, 1, 2, 3, 4, tzinfo=UTC)]),
]
ODD_SCHEMA = {
    "t": "timestamp",
    "s": "string",
    "b": "boolean",
    "i": "int",
    "l": "long",
    "f": "float",
    "d": "double",
    "y": "date",
    "x": "binary",
    "m": "decimal(6,2)",
    "n": "decimal(20,4)",
    "w": "decimal(38,0)",
}


def list_odd_objects() -> Iterator[tuple[pa.DataType, str, pa.Table]]:
    """A type, a column, and rows whose only value is that column, of that type."""
    for kind, values in _ODD:
        for name in list(ODD_SCHEMA)[1:]:
            if (kind, name) == (pa.float64(), "w"):
                continue  # Java writes some doubles with digits of its own
            times = pa.array([1_000_000] * len(values), pa.int64())
            own = pa.array(values, kind)
            yield kind, name, pa.table({"t": times.cast(pa.timestamp("us", "UTC")), name: own})


# All values, for the engines.


def read_values() -> tuple[dict[str, str], pa.Table]:
    """Column -> Arrow type, and the values as an object's rows are read; nulls fill them up."""
    size = max(map(len, VALUES.values())) + 1
    columns = {
        f"c{n}": pa.array([*values, *[None] * (size - len(values))], kind)
        for n, (kind, values) in enumerate(VALUES.items())
    }
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data)
    kinds = {name: str(column.type) for name, column in columns.items()}
    part = CutPart(0, "k", "e", 0, size, 0, size, data, tuple(kinds.items()))
    return kinds, read_parts(part.columns, [(0, part)], spec_of({"a": {}}).sources["a"])


def list_casts(kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(column, declared type) where a value may not fit."""
    for name, arrow in kinds.items():
        for declared in DECLARED:
            if not cast_never_fails(arrow, declared):
                yield name, declared


def show_cast(column: str, arrow: str, declared: str) -> str:
    """The value; null if it does not fit."""
    value, unfit = cast_with_check_sql(quote_name(column), declared, arrow, None)
    return value if unfit is None else f"IF({unfit}, NULL, {value})"


def prove_casts(session: SparkSession) -> tuple[set[str], set[str], list[str]]:
    """(proven, left to Spark SQL, differences) of the casts."""
    kinds, table = read_values()
    names, proven, left = dict[str, str](), set[str](), set[str]()
    chosen = ["_row"]
    for column, declared in list_casts(kinds):
        name = f"{kinds[column]} to {declared}"
        if not is_cast_proven(kinds[column], declared, None):
            left.add(name)
            continue
        proven.add(name)
        names[f"v{len(names)}"] = name
        chosen.append(f"{show_cast(column, kinds[column], declared)} AS v{len(names) - 1}")
    read = [*select_readable_columns(kinds.items()), *((n, own) for n, own, _ in POSITION_COLUMNS)]
    ddl = ", ".join(f"{quote_name(name)} {own}" for name, own in read)
    frames = DuckFrame.from_table(table), session.createDataFrame(table, ddl).coalesce(1)
    mine, theirs = (list_values(frame.selectExpr(*chosen).toArrow()) for frame in frames)
    wrong = [
        f"{names[v]} of row {row}: DuckDB {a!r}, Spark {b!r}"
        for v in names
        for row, (a, b) in enumerate(zip(mine[v], theirs[v], strict=True))
        if not is_equal(a, b)
    ]
    return proven, left, wrong


def list_values(rows: pa.Table) -> dict[str, list[Any]]:
    """Column -> values in order; dates as days, because Python has no year 0."""
    sorted_rows = rows.sort_by("_row")
    columns = zip(sorted_rows.column_names, sorted_rows.columns, strict=True)
    return {
        name: (own.cast(pa.int32()) if pa.types.is_date32(own.type) else own).to_pylist()
        for name, own in columns
    }


def is_equal(one: Any, other: Any) -> bool:
    """The same value of the same type, with the same sign."""
    return type(one) is type(other) and repr(one) == repr(other)
