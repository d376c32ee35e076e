"""What a value has to be to become a value of its declared type: the rule of all formats.

It fits if the conversion loses nothing; else its row is a dead letter (docs/semantics.md, "Never
silent"). Texts are cast by DuckDB, also those of corrections and of the exactness check. Of typed
columns, whose types the mover casts (`tidegate.jobs.rows.column_casts`), single values may be wrong
all the same: a text that is not UTF-8, and a time beyond microseconds.
"""

from collections.abc import Collection
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.spec.column_types import DUCKDB_TYPES
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.row_rules import EXACT_BITS, build_text_pattern

NOT_UTF8 = "is not UTF-8"
_BEYOND = "is a time that no column holds"

# Values of typed columns.


def convert_rows(rows: pa.Table, schema: pa.Schema, declared: Collection[str]) -> tuple[Any, Any]:
    """Convert the columns of some rows.

    Args:
        rows: as an object has them.
        schema: the columns to return, with the types that they should have.
        declared: the columns whose values make a row bad.

    Returns:
        The columns, and what is wrong with each row; None if nothing is wrong with any.
    """
    columns, reasons = [], None
    for field in schema:
        values, is_bad, complaint = _convert_column(rows[field.name], field.type)
        columns.append(values)
        if is_bad is not None and field.name in declared:
            own = pc.if_else(is_bad, f"{field.name} {complaint}", pa.scalar(None, pa.string()))
            reasons = own if reasons is None else pc.coalesce(reasons, own)
    return columns, reasons


def _convert_column(column: Any, kind: pa.DataType) -> tuple[Any, Any, str]:
    """Return values of a type, which of them are not what was written, and why."""
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(column.type):
        return *_convert_times(column, kind), _BEYOND
    values = column.cast(kind)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return *(
            _replace_bad_bytes(values) if kind == pa.string() else _drop_invalid(values)
        ), NOT_UTF8
    return values, None, ""


def _convert_times(column: Any, kind: pa.DataType) -> tuple[Any, Any]:
    try:
        return column.cast(kind), None
    except pa.ArrowInvalid:
        values = column.cast(kind, safe=False)
    # A number that has overflowed does not come back.
    is_bad = pc.fill_null(pc.not_equal(values.cast(column.type, safe=False), column), False)
    return pc.if_else(is_bad, pa.scalar(None, kind), values), is_bad


def _replace_bad_bytes(column: Any) -> tuple[Any, Any]:
    """Replace bytes that are no text by the character for them."""
    raw = column.cast(pa.binary())
    texts = [None if one is None else one.decode("utf-8", "replace") for one in raw.to_pylist()]
    values = pa.chunked_array([pa.array(texts, pa.string())])
    return values, pc.fill_null(pc.not_equal(values.cast(pa.binary()), raw), False)


def _drop_invalid(column: Any) -> tuple[Any, Any]:
    """Make nested values null that hold a text which is none."""
    is_bad = pa.array([not _is_valid(column.slice(row, 1)) for row in range(len(column))])
    good = pc.if_else(is_bad, None, pa.array(range(len(column))))
    return column.take(good), is_bad


def _is_valid(column: Any) -> bool:
    try:
        pa.array(column.to_pylist(), column.type)
    except UnicodeDecodeError:
        return False
    return True


# DuckDB expressions that cast text to a declared type, or give null if it does not fit exactly.

_TIME = r"\d{2}:\d{2}(:\d{2}(\.\d+)?)?"
_ZONED_TIMESTAMP = rf"^\s*\d{{4}}-\d{{2}}-\d{{2}}[T ]{_TIME}(Z|z|[+-]\d{{2}}(:?\d{{2}})?)\s*$"
_NAIVE_TIMESTAMP = rf"^\s*\d{{4}}-\d{{2}}-\d{{2}}([T ]{_TIME})?\s*$"
# Every cast is guarded by a pattern: DuckDB's own casts round, and accept forms that Spark refuses,
# while a value must mean the same in text and in Parquet (tidegate.jobs.spec.row_rules).
_WHOLE_NUMBER = r"^\s*[+-]?\d+\s*$"
TICKS_PER_UNIT: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def build_cast_sql(column: str, kind: str, spec: SourceSpec) -> str:
    """Return DuckDB SQL of type `kind` over a quoted column; null if its text does not fit."""
    if kind == "string":
        return column
    if kind == "binary":
        return f"TRY(from_base64({column}))"
    if kind == "timestamp":
        return _build_timestamp_sql(column, spec)
    return build_plain_cast_sql(column, kind)


def build_complaint_sql(name: str, kind: str, spec: SourceSpec) -> str:
    """Return DuckDB SQL that says why a text does not fit; `name` is the column without quotes."""
    complaint = f"""'{name} is no {kind}: ' || "{name}" """
    if kind != "timestamp" or spec.parse.timestamps != "iso":
        return complaint
    is_naive = _matches(f'"{name}"', _NAIVE_TIMESTAMP)
    if spec.timezone is None:
        why = f"""'{name} has no time zone, and the source has no "timezone": ' || "{name}" """
    else:
        is_naive += f' AND try_cast("{name}" AS TIMESTAMP) IS NOT NULL'
        why = f"""'{name} is a local time that {spec.timezone} skips: ' || "{name}" """
    return f"CASE WHEN {is_naive} THEN {why} ELSE {complaint} END"


def _matches(column: str, pattern: str) -> str:
    return f"regexp_matches({column}, '{pattern}')"


def _build_timestamp_sql(column: str, spec: SourceSpec) -> str:
    if spec.parse.timestamps != "iso":
        per_unit = TICKS_PER_UNIT[spec.parse.timestamps]
        micros = f"round(try_cast({column} AS DECIMAL(30, 6)) * {per_unit})"
        return f"TRY(make_timestamptz(CAST({micros} AS BIGINT)))"
    naive = "NULL"
    if spec.timezone is not None:
        naive = f"TRY(local_instant(try_cast({column} AS TIMESTAMP), '{spec.timezone}'))"
    return (
        f"CASE WHEN {_matches(column, _ZONED_TIMESTAMP)} THEN try_cast({column} AS TIMESTAMPTZ)"
        f" WHEN {_matches(column, _NAIVE_TIMESTAMP)} THEN {naive} END"
    )


def build_plain_cast_sql(column: str, kind: str) -> str:
    """Accept only the plain form of the type: DuckDB would round what has too many digits."""
    pattern = _WHOLE_NUMBER if kind in ("int", "long") else rf"^\s*({build_text_pattern(kind)})\s*$"
    cast = f"try_cast({column} AS {DUCKDB_TYPES.get(kind, kind)})"
    if kind in EXACT_BITS:  # a float holds only so many bits of a whole number
        whole = _matches(column, _WHOLE_NUMBER)
        exact = f"abs(try_cast({column} AS HUGEINT)) <= {2 ** EXACT_BITS[kind]}"
        cast = f"CASE WHEN {whole} AND {exact} OR NOT {whole} AND isfinite({cast}) THEN {cast} END"
    return f"CASE WHEN {_matches(column, pattern)} THEN {cast} END"
