"""Finds mistakes of a spec that only its use would show.

They are in columns, types and functions of expressions, in functions of reducers, and in the length
of windows.

DuckDB judges expressions on a table without rows, and judges Spark SQL after a translation by
sqlglot. What the translation does not cover is not a mistake: Spark judges it before the lease is
taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from tidegate.errors import ConfigurationError, suggest_name
from tidegate.jobs.spec.column_types import DUCKDB_TYPES
from tidegate.jobs.spec.errors import SPEC_INVALID
from tidegate.jobs.spec.loader import Location
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction

_NUMERIC_ONLY = {
    AggregateFunction.SUM,
    AggregateFunction.AVG,
    AggregateFunction.APPROX_QUANTILE,
}
_NOT_NUMBERS = ("VARCHAR", "BOOLEAN", "TIMESTAMP", "DATE", "BLOB")
# Keys of sqlglot's classes, and names of functions that it does not know.
_UNREPEATABLE = frozenset(
    {"rand", "randn", "uuid", "shuffle", "currenttimestamp", "currentdate", "currenttime", "now"}
    | {"localtimestamp", "monotonically_increasing_id", "spark_partition_id", "input_file_name"}
)
_ROW_COLUMNS = {"_source": "string", "_partition": "string", "_seq": "long"}
_STREAM_COLUMNS = {"position": "long", "stream_time": "timestamp", "_id": "string"}
_LONGEST_SPAN = 400_000 * 86_400_000_000
"""In ticks: with times of years of four digits, no sum leaves int64."""
_SPAN_TOO_LONG = "must be at most 400,000 days: windows end in years of four digits"


@dataclass(frozen=True)
class SqlField:
    """An expression of a spec.

    Attributes:
        place: path of its field in the spec.
        sql: the expression.
        columns: those that it may name, with their types.
        is_spark: it is Spark SQL, otherwise DuckDB's.
        refused: beginnings of the names of types that it must not have.
        is_condition: it is a condition.
        is_per_row: its value depends on the row alone: of `where`, `select` or a row rule.
    """

    place: Location
    sql: str
    columns: Mapping[str, str]
    is_spark: bool = False
    refused: tuple[str, ...] = ()
    is_condition: bool = False
    is_per_row: bool = False


def find_mistakes(spec: PipelineSpec) -> tuple[list[tuple[Location, str]], list[SqlField]]:
    """Return the mistakes with their fields, and the expressions that only Spark can judge."""
    mistakes = [(place, _SPAN_TOO_LONG) for place in _list_long_spans(spec)]
    unjudged = []
    for field in _list_expressions(spec):
        try:
            if not _judge_field(field):
                unjudged.append(field)
        except ValueError as error:
            mistakes.append((field.place, str(error)))
    for name, reducer in spec.reducers.items():
        if reducer.function is None:
            continue
        # The import brings Arrow, which few specs need here.
        from tidegate.jobs.streams.reducers import load_fold_function

        try:
            load_fold_function(reducer.function)
        except ConfigurationError as error:
            mistakes.append((("reducers", name, "function"), error.message))
    return mistakes, unjudged


def _list_long_spans(spec: PipelineSpec) -> Iterator[Location]:
    for name, window in spec.windows.items():
        for field in ("size", "slide", "gap"):
            if (getattr(window, field) or 0) > _LONGEST_SPAN:
                yield ("windows", name, field)


def require_no_mistakes(spec: PipelineSpec) -> list[SqlField]:
    """Return the expressions that only Spark can judge.

    Raises:
        ConfigurationError: the spec has mistakes; the message lists all.
    """
    mistakes, unjudged = find_mistakes(spec)
    if mistakes:
        raise _build_error(spec, mistakes)
    return unjudged


def judge_with_spark(session: Any, spec: PipelineSpec, fields: list[SqlField]) -> None:
    """Let Spark analyse expressions over a table without rows.

    Types that `SqlField.refused` names are not looked for.

    Raises:
        ConfigurationError: it cannot; the message lists its reasons.
    """
    from pyspark.errors import PySparkException

    mistakes = []
    for field in fields:
        ddl = ", ".join(f"`{name}` {kind}" for name, kind in field.columns.items())
        try:
            # A comment ends with its line.
            sql = f"NOT (\n{field.sql}\n)" if field.is_condition else field.sql
            _ = session.createDataFrame([], ddl).selectExpr(sql).schema
        except PySparkException as error:
            mistakes.append((field.place, str(error).partition("\n")[0]))
    if mistakes:
        raise _build_error(spec, mistakes)


def _build_error(spec: PipelineSpec, mistakes: list[tuple[Location, str]]) -> ConfigurationError:
    findings = [f"{'.'.join(map(str, place))}: {message}" for place, message in mistakes]
    where = f"the spec of {spec.name}"
    return SPEC_INVALID(pipeline=spec.name, findings="\n".join(findings), where=where)


def _list_expressions(spec: PipelineSpec) -> Iterator[SqlField]:
    for name, source in spec.sources.items():
        yield from _list_row_expressions(("sources", name), source)
    row = {**spec.columns, **_ROW_COLUMNS}
    for name, window in spec.windows.items():
        for column, one in window.aggregates.items():
            place = ("windows", name, "aggregates", column)
            yield from _list_aggregate(one, SqlField(place, one.expression, row, is_spark=True))
    streams = spec.stream_graph.columns
    for name, pipe in spec.pipes.items():
        if pipe.where is not None:
            columns = {**streams[pipe.origin], **_STREAM_COLUMNS}
            yield SqlField(("pipes", name, "where"), f"NOT ({pipe.where})", columns)
    for name, reducer in spec.reducers.items():
        columns = {**streams[reducer.origin], **_STREAM_COLUMNS}
        for column, one in reducer.aggregates.items():
            place = ("reducers", name, "aggregates", column)
            yield from _list_aggregate(one, SqlField(place, one.expression, columns))


def _list_row_expressions(place: Location, source: SourceSpec) -> Iterator[SqlField]:
    conditions: dict[Location, tuple[str, Mapping[str, str]]] = {
        ("rules", name, "predicate"): (rule.predicate, source.row_columns)
        for name, rule in source.rules.items()
    }
    if source.where is not None:
        conditions["where",] = (source.where, source.columns)
    for field, (sql, columns) in conditions.items():
        yield SqlField(
            (*place, *field), sql, columns, is_spark=True, is_condition=True, is_per_row=True
        )
    for name, sql in source.select.items():
        field = (*place, "select", name)
        yield SqlField(field, sql, source.columns, is_spark=True, is_per_row=True)


def _list_aggregate(one: Aggregate, field: SqlField) -> Iterator[SqlField]:
    if one.expression != "*":
        refused = _NOT_NUMBERS if one.function in _NUMERIC_ONLY else ()
        yield SqlField(field.place, field.sql, field.columns, field.is_spark, refused)


def _judge_field(field: SqlField) -> bool:
    """Return whether the expression could be judged.

    Raises:
        ValueError: it is wrong.
    """
    sql = _translate_spark(field) if field.is_spark else field.sql
    if sql is None:
        return False
    columns = ", ".join(f'"{name}" {_name_type(kind)}' for name, kind in field.columns.items())
    with duckdb.connect() as db:
        db.execute(f"CREATE TABLE rows ({columns})")
        try:
            # The expression is the user's own, over a table without rows.
            (kind,) = db.sql(f"SELECT ({sql}) FROM rows").types  # noqa: S608
        except duckdb.Error as error:
            if field.is_spark:
                return False
            raise ValueError(str(error).partition("\n")[0]) from error
    if str(kind).startswith(field.refused or ("-",)):
        raise ValueError(f"{field.sql} is of type {_name_spark_type(kind)}, not a number")
    if field.is_condition and str(kind) != "BOOLEAN":
        raise ValueError(f"{field.sql} is of type {_name_spark_type(kind)}, not a condition")
    return True


def _name_type(declared: str) -> str:
    if "<" not in declared:
        return DUCKDB_TYPES.get(declared, declared)
    from sqlglot import exp

    return exp.DataType.build(declared, dialect="spark").sql("duckdb")


def _name_spark_type(kind: object) -> str:
    """Name a type of DuckDB as specs do."""
    from sqlglot import exp

    return exp.DataType.build(str(kind), dialect="duckdb").sql("spark").lower()


def _translate_spark(field: SqlField) -> str | None:
    """Return Spark SQL in DuckDB's dialect; None if the translator cannot read it.

    Raises:
        ValueError: it names a column that is not there, or does not depend on the row alone.
    """
    if field.sql in field.columns:
        return f'"{field.sql}"'
    # The import takes half a second, which most starts of a driver need not wait for.
    import sqlglot
    from sqlglot import exp

    try:
        tree, *more = sqlglot.parse(field.sql, read="spark")
    except sqlglot.errors.SqlglotError as error:
        if field.is_per_row:
            raise ValueError(f"{field.sql} is not Spark SQL") from error
        return None
    if tree is None or more:
        raise ValueError(f"{field.sql} is not one expression")
    if field.is_per_row:
        _require_per_row(tree)
    bound = {p.name for one in tree.find_all(exp.Lambda) for p in one.expressions}
    known = {name.lower() for name in (*field.columns, *bound)}
    for column in tree.find_all(exp.Column):
        if not column.table and column.name.lower() not in known:
            hint = suggest_name(column.name, field.columns)
            listed = ", ".join(name for name in field.columns if not name.startswith("_"))
            raise ValueError(f"no column {column.name!r}{hint}; there are {listed}")
    return tree.sql(dialect="duckdb")


def _require_per_row(tree: Any) -> None:
    """Refuse what looks at more than the row, or answers differently when it is asked again."""
    from sqlglot import exp

    if tree.find(exp.AggFunc, exp.Window, exp.Query, exp.UDTF, exp.Explode, exp.Alias, exp.Star):
        raise ValueError(
            "an expression over a row cannot have aggregates, window functions, queries or names"
        )
    functions = tree.find_all(exp.Func)
    called = {(f.name if isinstance(f, exp.Anonymous) else f.key).lower() for f in functions}
    if changing := sorted(called & _UNREPEATABLE):
        raise ValueError(f"{', '.join(changing)}: a replay has to get the same answer again")
