"""From the physical columns of an object to the declared ones, and the verdict on each row's form, as Spark SQL."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame

from tidegate.jobs.sources.decode import WHY
from tidegate.jobs.spark.schema import (
    cast_never_fails,
    family_of,
    is_naive,
    is_nanos,
    quote,
    spark_of_arrow,
    spark_of_declared,
    unwrap,
)
from tidegate.jobs.spec.casts import EXACT_BITS, accepts, text_form
from tidegate.jobs.spec.pipeline import BarrierColumns, SourceSpec
from tidegate.jobs.spec.reasons import DeadReason
from tidegate.jobs.spec.time import TICK_MAX

__all__ = ["declared", "fitted", "physical_columns", "text"]


def physical_columns(columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Column -> Spark type to read; columns that no declared type can come from are left out (their rows are dead)."""
    known = [(name, spark_of_arrow(arrow), arrow) for name, arrow in columns]
    return [(name, "bigint" if is_nanos(arrow) else own) for name, own, arrow in known if own is not None]


def declared(raw: DataFrame, source: SourceSpec, physical: dict[str, str]) -> DataFrame:
    """Cast to the declared schema and judge each row's form."""
    casts = {name: _cast(quote(name), declared, physical.get(name), source.timezone) for name, declared in source.columns.items()}
    selected = [f"{cast} AS {quote(name)}" for name, cast in casts.items()]
    kind = _kind(source.barriers, casts)
    dead = _dead(source, physical, casts)
    detail = _detail(source, physical, casts)
    json = f"to_json(struct({', '.join(quote(n) for n, _ in physical_columns(physical.items()))}))"
    return raw.selectExpr(
        *selected,
        f"{casts[source.event_time]} AS _time",
        f"{_end(source, casts)} AS _end",
        f"{kind} AS _kind",
        f"{dead} AS _dead",
        f"{detail} AS _detail",
        f"{json} AS _json",
        "_m",
        "_p",
        "_o",
        "_row",
    )


def fitted(column: str, declared: str, arrow: str, timezone: str | None) -> tuple[str, str | None]:
    """A value of a physical type as the declared one, and the condition under which it does not fit; None: it always does."""
    cast = _cast(column, declared, arrow, timezone)
    lost = is_naive(arrow) and timezone is None and declared == "timestamp"
    return cast, f"{column} IS NOT NULL" if lost or spark_of_arrow(arrow) is None else _unfit(column, cast, arrow, declared)


def _cast(column: str, declared: str, arrow: str | None, timezone: str | None) -> str:
    target = spark_of_declared(declared)
    own = None if arrow is None else spark_of_arrow(arrow)
    if arrow is None or own is None:
        return f"CAST(NULL AS {target})"
    if declared == "timestamp":
        return _timestamp(column, arrow, timezone)
    if own == target:
        return column
    if not accepts(declared, family_of(arrow)):
        return f"CAST(NULL AS {target})"
    return f"{'CAST' if cast_never_fails(arrow, declared) else 'try_cast'}({column} AS {target})"


def _timestamp(column: str, arrow: str, timezone: str | None) -> str:
    """Only timestamps become timestamps: a number has no unit, and a text no agreed zone."""
    if not unwrap(arrow).startswith("timestamp") or (is_naive(arrow) and timezone is None):
        return "CAST(NULL AS timestamp)"
    value = f"timestamp_micros(({column} - pmod({column}, 1000L)) div 1000L)" if is_nanos(arrow) else column
    return f"to_utc_timestamp(CAST({value} AS timestamp), '{timezone}')" if is_naive(arrow) else value


def _end(source: SourceSpec, casts: dict[str, str]) -> str:
    """Exclusive end in ticks; a point event lasts one."""
    point = f"least(unix_micros({casts[source.event_time]}), {TICK_MAX - 1}L) + 1L"
    return point if source.end_time is None else f"coalesce(unix_micros({casts[source.end_time]}), {point})"


def _kind(barriers: BarrierColumns | None, casts: dict[str, str]) -> str:
    if barriers is None:
        return "'data'"
    column = casts[barriers.kind]
    types = ", ".join(text(t) for t in barriers.types)
    cases = [f"WHEN {column} IS NULL OR {column} = {text(barriers.data)} THEN 'data'"]
    if barriers.punctuation is not None:
        cases.append(f"WHEN {column} = {text(barriers.punctuation)} THEN 'punctuation'")
    if types:
        cases.append(f"WHEN {column} IN ({types}) THEN 'barrier'")
    return f"CASE {' '.join(cases)} END"


def text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _bad_columns(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> list[tuple[str, str]]:
    """(column, condition under which its value is bad)."""
    bad = []
    for name, declared in source.columns.items():
        arrow = physical.get(name)
        naive = declared == "timestamp" and arrow is not None and is_naive(arrow)
        if arrow is None or naive:
            continue
        condition = "true" if spark_of_arrow(arrow) is None else _unfit(quote(name), casts[name], arrow, declared)
        if condition is not None:
            bad.append((name, condition))
    return bad


def _unfit(column: str, cast: str, arrow: str, declared: str) -> str | None:
    """The condition under which a value does not fit; None where every value does, or time zones decide."""
    if cast_never_fails(arrow, declared) or (declared == "timestamp" and unwrap(arrow).startswith("timestamp")):
        return None
    return f"{column} IS NOT NULL AND ({cast} IS NULL{_misfit(column, cast, arrow, declared)})"


def _misfit(column: str, cast: str, arrow: str, declared: str) -> str:
    """What besides a cast that fails makes a value unfit: `try_cast` cuts, rounds and trims without a word."""
    family, form = family_of(arrow), text_form(declared)
    if not accepts(declared, family):
        return ""
    if family == "string" and form is not None:
        whole = text(rf"\A(?:{form})\z")
        return f" OR NOT {column} RLIKE {whole}"
    exact = declared in ("int", "long") or declared.startswith("decimal")
    if exact and family in ("float", "decimal"):
        return f" OR CAST({cast} AS {spark_of_arrow(arrow)}) <> {column}" if family == "float" else f" OR {cast} <> {column}"
    if family == "int" and declared in EXACT_BITS:
        return f" OR abs(CAST({column} AS decimal(20,0))) > {2 ** EXACT_BITS[declared]}L"
    return ""


def _dead(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    naive = [
        f"{quote(name)} IS NOT NULL"
        for name, declared in source.columns.items()
        if declared == "timestamp" and source.timezone is None and name in physical and is_naive(physical[name])
    ]
    bad = [condition for _, condition in _bad_columns(source, physical, casts)]
    if source.barriers is not None:
        bad.append(f"{_kind(source.barriers, casts)} IS NULL")
    if WHY in physical:  # a decoded object: what it says of a row comes first
        bad.append(f"{WHY} IS NOT NULL")
    cases: list[tuple[DeadReason, str]] = [
        ("bad_value", " OR ".join(bad)),
        ("naive_time", " OR ".join(naive)),
        *_dead_times(source, casts),
    ]
    return "CASE " + " ".join(f"WHEN {condition} THEN '{reason}'" for reason, condition in cases if condition) + " END"


def _dead_times(source: SourceSpec, casts: dict[str, str]) -> list[tuple[DeadReason, str]]:
    """Faults of the event time; a barrier row needs none."""
    time, data = casts[source.event_time], f"{_kind(source.barriers, casts)} = 'data'"
    cases: list[tuple[DeadReason, str]] = [("no_event_time", f"{time} IS NULL AND {data}")]
    if source.barriers is not None:
        cases.append(("bad_value", f"{time} IS NULL AND {_kind(source.barriers, casts)} = 'punctuation'"))
    if source.min_event_time is not None:
        cases.append(("before_min_event_time", f"{data} AND {time} < timestamp_micros({source.min_event_time}L)"))
    if source.end_time is not None:
        cases.append(("bad_value", f"{data} AND {casts[source.end_time]} <= {time}"))
    return cases


def _detail(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    """Names the column to blame, as far as one is to blame."""
    cases = [
        f"WHEN {condition} THEN {text(f'{name} is {physical[name]}, declared {source.columns[name]}')}"
        for name, condition in _bad_columns(source, physical, casts)
    ]
    cases = [*([f"WHEN {WHY} IS NOT NULL THEN {WHY}"] if WHY in physical else []), *cases]
    return f"CASE {' '.join(cases)} ELSE {text(source.event_time)} END" if cases else text(source.event_time)
