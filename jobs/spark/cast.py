"""From the physical columns of an object to the declared ones, and the verdict on each row's form, as Spark SQL."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame

from tidegate.jobs.sources.decode import BAD_REASON
from tidegate.jobs.spark.schema import (
    cast_never_fails,
    classify_arrow_type,
    is_naive_timestamp,
    is_nanosecond_timestamp,
    quote_name,
    arrow_to_spark_type,
    declared_to_spark_type,
    unwrap_dictionary,
)
from tidegate.jobs.spec.casts import EXACT_BITS, accepts_family, build_text_pattern
from tidegate.jobs.spec.pipeline import BarrierColumns, SourceSpec
from tidegate.jobs.spec.reasons import DeadLetterReason
from tidegate.jobs.spec.time import TICK_MAX

__all__ = ["cast_to_declared", "cast_with_check_sql", "select_readable_columns", "quote_text"]


def select_readable_columns(columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Column -> Spark type to read; columns that no declared type can come from are left out (their rows are dead)."""
    known = [(name, arrow_to_spark_type(arrow), arrow) for name, arrow in columns]
    return [(name, "bigint" if is_nanosecond_timestamp(arrow) else own) for name, own, arrow in known if own is not None]


def cast_to_declared(raw: DataFrame, source: SourceSpec, physical: dict[str, str]) -> DataFrame:
    """Cast to the declared schema and judge each row's form."""
    casts = {name: _cast_column_sql(quote_name(name), declared, physical.get(name), source.timezone) for name, declared in source.columns.items()}
    selected = [f"{cast} AS {quote_name(name)}" for name, cast in casts.items()]
    kind = _row_kind_sql(source.barriers, casts)
    dead = _dead_reason_sql(source, physical, casts)
    detail = _dead_detail_sql(source, physical, casts)
    json = f"to_json(struct({', '.join(quote_name(n) for n, _ in select_readable_columns(physical.items()))}))"
    return raw.selectExpr(
        *selected,
        f"{casts[source.event_time]} AS _time",
        f"{_end_ticks_sql(source, casts)} AS _end",
        f"{kind} AS _kind",
        f"{dead} AS _dead",
        f"{detail} AS _detail",
        f"{json} AS _json",
        "_m",
        "_p",
        "_o",
        "_row",
    )


def cast_with_check_sql(column: str, declared: str, arrow: str, timezone: str | None) -> tuple[str, str | None]:
    """A value of a physical type as the declared one, and the condition under which it does not fit; None: it always does."""
    cast = _cast_column_sql(column, declared, arrow, timezone)
    lost = is_naive_timestamp(arrow) and timezone is None and declared == "timestamp"
    return cast, f"{column} IS NOT NULL" if lost or arrow_to_spark_type(arrow) is None else _unfit_value_sql(column, cast, arrow, declared)


def _cast_column_sql(column: str, declared: str, arrow: str | None, timezone: str | None) -> str:
    target = declared_to_spark_type(declared)
    own = None if arrow is None else arrow_to_spark_type(arrow)
    if arrow is None or own is None:
        return f"CAST(NULL AS {target})"
    if declared == "timestamp":
        return _cast_timestamp_sql(column, arrow, timezone)
    if own == target:
        return column
    if not accepts_family(declared, classify_arrow_type(arrow)):
        return f"CAST(NULL AS {target})"
    return f"{'CAST' if cast_never_fails(arrow, declared) else 'try_cast'}({column} AS {target})"


def _cast_timestamp_sql(column: str, arrow: str, timezone: str | None) -> str:
    """Only timestamps become timestamps: a number has no unit, and a text no agreed zone."""
    if not unwrap_dictionary(arrow).startswith("timestamp") or (is_naive_timestamp(arrow) and timezone is None):
        return "CAST(NULL AS timestamp)"
    value = f"timestamp_micros(({column} - pmod({column}, 1000L)) div 1000L)" if is_nanosecond_timestamp(arrow) else column
    return f"to_utc_timestamp(CAST({value} AS timestamp), '{timezone}')" if is_naive_timestamp(arrow) else value


def _end_ticks_sql(source: SourceSpec, casts: dict[str, str]) -> str:
    """Exclusive end in ticks; a point event lasts one."""
    point = f"least(unix_micros({casts[source.event_time]}), {TICK_MAX - 1}L) + 1L"
    return point if source.end_time is None else f"coalesce(unix_micros({casts[source.end_time]}), {point})"


def _row_kind_sql(barriers: BarrierColumns | None, casts: dict[str, str]) -> str:
    if barriers is None:
        return "'data'"
    column = casts[barriers.kind]
    types = ", ".join(quote_text(t) for t in barriers.types)
    cases = [f"WHEN {column} IS NULL OR {column} = {quote_text(barriers.data)} THEN 'data'"]
    if barriers.punctuation is not None:
        cases.append(f"WHEN {column} = {quote_text(barriers.punctuation)} THEN 'punctuation'")
    if types:
        cases.append(f"WHEN {column} IN ({types}) THEN 'barrier'")
    return f"CASE {' '.join(cases)} END"


def quote_text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _list_bad_columns(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> list[tuple[str, str]]:
    """(column, condition under which its value is bad)."""
    bad = []
    for name, declared in source.columns.items():
        arrow = physical.get(name)
        naive = declared == "timestamp" and arrow is not None and is_naive_timestamp(arrow)
        if arrow is None or naive:
            continue
        condition = "true" if arrow_to_spark_type(arrow) is None else _unfit_value_sql(quote_name(name), casts[name], arrow, declared)
        if condition is not None:
            bad.append((name, condition))
    return bad


def _unfit_value_sql(column: str, cast: str, arrow: str, declared: str) -> str | None:
    """The condition under which a value does not fit; None where every value does, or time zones decide."""
    if cast_never_fails(arrow, declared) or (declared == "timestamp" and unwrap_dictionary(arrow).startswith("timestamp")):
        return None
    return f"{column} IS NOT NULL AND ({cast} IS NULL{_lossy_cast_sql(column, cast, arrow, declared)})"


def _lossy_cast_sql(column: str, cast: str, arrow: str, declared: str) -> str:
    """What besides a cast that fails makes a value unfit: `try_cast` cuts, rounds and trims without a word."""
    family, form = classify_arrow_type(arrow), build_text_pattern(declared)
    if not accepts_family(declared, family):
        return ""
    if family == "string" and form is not None:
        whole = quote_text(rf"\A(?:{form})\z")
        return f" OR NOT {column} RLIKE {whole}"
    exact = declared in ("int", "long") or declared.startswith("decimal")
    if exact and family in ("float", "decimal"):
        return f" OR CAST({cast} AS {arrow_to_spark_type(arrow)}) <> {column}" if family == "float" else f" OR {cast} <> {column}"
    if family == "int" and declared in EXACT_BITS:
        return f" OR abs(CAST({column} AS decimal(20,0))) > {2 ** EXACT_BITS[declared]}L"
    return ""


def _dead_reason_sql(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    naive = [
        f"{quote_name(name)} IS NOT NULL"
        for name, declared in source.columns.items()
        if declared == "timestamp" and source.timezone is None and name in physical and is_naive_timestamp(physical[name])
    ]
    bad = [condition for _, condition in _list_bad_columns(source, physical, casts)]
    if source.barriers is not None:
        bad.append(f"{_row_kind_sql(source.barriers, casts)} IS NULL")
    if BAD_REASON in physical:  # a decoded object: what it says of a row comes first
        bad.append(f"{BAD_REASON} IS NOT NULL")
    cases: list[tuple[DeadLetterReason, str]] = [
        ("bad_value", " OR ".join(bad)),
        ("naive_time", " OR ".join(naive)),
        *_list_time_faults(source, casts),
    ]
    return "CASE " + " ".join(f"WHEN {condition} THEN '{reason}'" for reason, condition in cases if condition) + " END"


def _list_time_faults(source: SourceSpec, casts: dict[str, str]) -> list[tuple[DeadLetterReason, str]]:
    """Faults of the event time; a barrier row needs none."""
    time, data = casts[source.event_time], f"{_row_kind_sql(source.barriers, casts)} = 'data'"
    cases: list[tuple[DeadLetterReason, str]] = [("no_event_time", f"{time} IS NULL AND {data}")]
    if source.barriers is not None:
        cases.append(("bad_value", f"{time} IS NULL AND {_row_kind_sql(source.barriers, casts)} = 'punctuation'"))
    if source.min_event_time is not None:
        cases.append(("before_min_event_time", f"{data} AND {time} < timestamp_micros({source.min_event_time}L)"))
    if source.end_time is not None:
        cases.append(("bad_value", f"{data} AND {casts[source.end_time]} <= {time}"))
    return cases


def _dead_detail_sql(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    """Names the column to blame, as far as one is to blame."""
    cases = [
        f"WHEN {condition} THEN {quote_text(f'{name} is {physical[name]}, declared {source.columns[name]}')}"
        for name, condition in _list_bad_columns(source, physical, casts)
    ]
    cases = [*([f"WHEN {BAD_REASON} IS NOT NULL THEN {BAD_REASON}"] if BAD_REASON in physical else []), *cases]
    return f"CASE {' '.join(cases)} ELSE {quote_text(source.event_time)} END" if cases else quote_text(source.event_time)
