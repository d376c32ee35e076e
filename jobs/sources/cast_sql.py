"""DuckDB expressions that cast text to a declared type, or give null if it does not fit exactly."""

from __future__ import annotations

from typing import Final

from tidegate.jobs.spec.cast_rules import EXACT_BITS, build_text_pattern
from tidegate.jobs.spec.pipeline import SourceSpec

_DUCKDB_TYPES: Final = {"long": "bigint", "timestamp": "timestamptz", "binary": "blob"}
_TIME: Final = r"\d{2}:\d{2}(:\d{2}(\.\d+)?)?"
_ZONED_TIMESTAMP: Final = (
    rf"^\s*\d{{4}}-\d{{2}}-\d{{2}}[T ]{_TIME}(Z|z|[+-]\d{{2}}(:?\d{{2}})?)\s*$"
)
_NAIVE_TIMESTAMP: Final = rf"^\s*\d{{4}}-\d{{2}}-\d{{2}}([T ]{_TIME})?\s*$"
# Every cast is guarded by a pattern: DuckDB's own casts round, and accept forms that Spark refuses,
# while a value must mean the same in text and in Parquet (tidegate.jobs.spec.cast_rules).
_WHOLE_NUMBER: Final = r"^\s*[+-]?\d+\s*$"
_MICROS_PER_UNIT: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def build_cast_sql(column: str, kind: str, spec: SourceSpec) -> str:
    """Return an expression of type `kind` over a quoted column; null if its text does not fit."""
    if kind == "string":
        return column
    if kind == "binary":
        return f"TRY(from_base64({column}))"
    if kind == "timestamp":
        return _build_timestamp_sql(column, spec)
    return _build_plain_cast_sql(column, kind)


def build_complaint_sql(name: str, kind: str, spec: SourceSpec) -> str:
    """Return an expression that says why the text of a column does not fit its type."""
    complaint = f"""'{name} is no {kind}: ' || "{name}" """
    if kind != "timestamp" or spec.parse.timestamps != "iso" or spec.timezone is not None:
        return complaint
    no_zone = f"""'{name} has no time zone, and the source has no "timezone": ' || "{name}" """
    is_naive = _matches(f'"{name}"', _NAIVE_TIMESTAMP)
    return f"CASE WHEN {is_naive} THEN {no_zone} ELSE {complaint} END"


def _matches(column: str, pattern: str) -> str:
    return f"regexp_matches({column}, '{pattern}')"


def _build_timestamp_sql(column: str, spec: SourceSpec) -> str:
    if spec.parse.timestamps != "iso":
        per_unit = _MICROS_PER_UNIT[spec.parse.timestamps]
        micros = f"round(try_cast({column} AS DECIMAL(30, 6)) * {per_unit})"
        return f"TRY(make_timestamptz(CAST({micros} AS BIGINT)))"
    naive = "NULL"
    if spec.timezone is not None:
        naive = f"try_cast({column} AS TIMESTAMP) AT TIME ZONE '{spec.timezone}'"
    return (
        f"CASE WHEN {_matches(column, _ZONED_TIMESTAMP)} THEN try_cast({column} AS TIMESTAMPTZ)"
        f" WHEN {_matches(column, _NAIVE_TIMESTAMP)} THEN {naive} END"
    )


def _build_plain_cast_sql(column: str, kind: str) -> str:
    """Accept only the plain form of the type: DuckDB would round what has too many digits."""
    pattern = _WHOLE_NUMBER if kind in ("int", "long") else rf"^\s*({build_text_pattern(kind)})\s*$"
    cast = f"try_cast({column} AS {_DUCKDB_TYPES.get(kind, kind)})"
    if kind in EXACT_BITS:  # a float holds only so many bits of a whole number
        whole = _matches(column, _WHOLE_NUMBER)
        exact = f"abs(try_cast({column} AS HUGEINT)) <= {2 ** EXACT_BITS[kind]}"
        cast = f"CASE WHEN {whole} AND {exact} OR NOT {whole} AND isfinite({cast}) THEN {cast} END"
    return f"CASE WHEN {_matches(column, pattern)} THEN {cast} END"
