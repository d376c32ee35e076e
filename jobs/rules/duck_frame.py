"""Rows in DuckDB with the methods of a Spark DataFrame that the row rules use.

The rules are written once, in Spark SQL. A `DuckFrame` runs them in DuckDB, in this process and
without a JVM. It renders the few forms in which the two dialects differ. A frame computes nothing
until `toArrow`.
"""

import atexit
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, reduce
from itertools import count
from threading import Lock
from typing import Any, Final, Self

import duckdb
import numpy as np

from tidegate.json_types import read_data_file

from .sketch_states import register_sketches
from .worker_memory import get_worker_memory

Frame = Any
"""A DataFrame of Spark or a `DuckFrame`."""

ENGINE_ERRORS: Final = (duckdb.Error,)
"""What DuckDB raises for rows or expressions that it cannot compute."""
MEMORY_ERRORS: Final = (MemoryError, duckdb.OutOfMemoryException)
"""What a worker without memory raises: its own look (`OutOfRoomError`), Arrow, Python or DuckDB."""

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`]|``)*`")
_HELD = re.compile("\0(\\d+)\0")
_DIALECT = read_data_file(__package__, "duckdb.toml")
_REWRITES = [(re.compile(pattern), text) for pattern, text in _DIALECT["rewrites"]]


# Texts with the numbers of an epoch never return, so few are kept.
@lru_cache(512)
def to_duckdb(sql: str) -> str:
    r"""Render Spark SQL of the row rules in DuckDB's dialect.

    >>> to_duckdb("5L - `a b` div 2L")
    '5::BIGINT - "a b" // 2::BIGINT'
    >>> to_duckdb(r"array('x', 'it\'s')[_m]")
    "list_value('x', 'it''s')[_m + 1]"
    """
    held: list[str] = []

    def hold(match: re.Match[str]) -> str:
        """Put a quoted text aside, in DuckDB's quotes."""
        inner = match[0][1:-1]
        quote = '"' if match[0][0] == "`" else "'"
        plain = inner.replace("``", "`") if quote == '"' else re.sub(r"\\(.)", r"\1", inner)
        held.append(quote + plain.replace(quote, quote * 2) + quote)
        return f"\0{len(held) - 1}\0"

    sql = _QUOTED.sub(hold, sql)
    if "struct(" in sql:
        sql = _render_structs(sql, held)
    for pattern, text in _REWRITES:
        sql = pattern.sub(text, sql)
    return _HELD.sub(lambda match: held[int(match[1])], sql)


def _render_structs(sql: str, held: list[str]) -> str:
    """``named_struct('a', x)`` as ``struct_pack(a := x)``; no other texts may be beside it."""
    named = re.sub(
        "\0(\\d+)\0, ",
        lambda match: (
            f'"{name[1:-1]}" := ' if (name := held[int(match[1])]).startswith("'") else match[0]
        ),
        sql,
    )
    return named.replace("named_struct(", "struct_pack(")


class _Purpose(Enum):
    """What an engine is for."""

    QUERIES = "queries of the product"
    FRAMES = "the rules of rows"
    EXPRESSIONS = "SQL of a spec as it is written"


def _start_engine(purpose: _Purpose) -> duckdb.DuckDBPyConnection:
    engine = duckdb.connect()
    # DuckDB shows and casts times in the session's zone, by default the host's.
    engine.execute("SET GLOBAL TimeZone = 'UTC'")
    if purpose is not _Purpose.QUERIES:
        # One thread: sums of doubles depend on their order, and a replay must find the same.
        # Outputs run beside each other.
        if purpose is _Purpose.FRAMES and get_worker_memory() is not None:
            # Sums of doubles that spill have other last digits.
            engine.execute("SET temp_directory = ''")
        engine.execute("SET threads = 1; SET enable_external_access = false")
    if purpose is _Purpose.EXPRESSIONS:
        return engine  # macros would give it functions that DuckDB does not have
    register_sketches(engine)
    for macro in _DIALECT["macros"]:
        engine.execute(f"CREATE MACRO {macro}")
    return engine


# DuckDB 2.0.0 keeps up to 0.9 kB for each session until its engine ends, so an engine ends after
# about 1 MB.
_SESSIONS_PER_ENGINE = 1_000


class _RenewedEngine:
    """A DuckDB in memory that is replaced after a number of sessions; for several threads.

    Open sessions keep the DuckDB that they began with.
    """

    def __init__(self, purpose: _Purpose) -> None:
        self._purpose = purpose
        self._lock = Lock()
        self._engine: duckdb.DuckDBPyConnection | None = None
        self._sessions = 0

    def open_session(self) -> duckdb.DuckDBPyConnection:
        """Return a new session."""
        with self._lock:
            if self._engine is None or self._sessions == _SESSIONS_PER_ENGINE:
                self._engine = _start_engine(self._purpose)
                self._sessions = 0
            self._sessions += 1
            session = self._engine.cursor()
            memory = get_worker_memory()
            if memory is not None and self._purpose is _Purpose.FRAMES:
                session.execute(f"SET memory_limit = '{memory.count_room()}B'")
            return session

    def drop_engine(self) -> None:
        """Let the next session begin with a new engine."""
        with self._lock:
            self._engine = None


_ENGINES = {purpose: _RenewedEngine(purpose) for purpose in _Purpose}
# DuckDB's binding complains about functions in Python that outlive the interpreter.
for _engine in _ENGINES.values():
    atexit.register(_engine.drop_engine)


@contextmanager
def open_database(*, for_frames: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a session of a DuckDB in memory, on UTC.

    Temporary tables and registered relations are its own; other tables do not outlive the session
    reliably. Starting an engine costs as much as a small query, so many sessions share one, and
    those for frames another one, with a single thread and no access to files.
    """
    purpose = _Purpose.FRAMES if for_frames else _Purpose.QUERIES
    with closing(_ENGINES[purpose].open_session()) as session:
        yield session


def query_rows(rows: Any, query: str) -> list[tuple[Any, ...]]:
    """Return the result of a query in DuckDB SQL over an Arrow table, which it calls `rows`."""
    with open_database() as session:
        session.register("rows", rows)
        return session.execute(query).fetchall()


def query_table(rows: Any, query: str, values: Any = None, *, for_frames: bool = False) -> Any:
    """Return the result as an Arrow table; `values` are for the parameters of the query.

    `for_frames` as in `open_database`.
    """
    purpose = _Purpose.FRAMES if for_frames else _Purpose.QUERIES
    if rows.num_rows == 0 and not values:
        return _query_no_rows(purpose, rows.schema, query)
    return _compute_table(purpose, {"rows": rows}, query, values)


# Each look at an object asks for its columns in this way, and planning takes milliseconds.
@lru_cache(64)
def _query_no_rows(purpose: _Purpose, schema: Any, query: str) -> Any:
    return _compute_table(purpose, {"rows": schema.empty_table()}, query)


def _compute_table(
    purpose: _Purpose, tables: Mapping[str, Any], query: str, values: Any = None
) -> Any:
    with closing(_ENGINES[purpose].open_session()) as session:
        for name, table in tables.items():
            session.register(name, table)
        return session.sql(query, params=values).to_arrow_table()


def compute_columns(rows: Any, expressions: str) -> Any:
    """Return a table of SQL expressions over an Arrow table, which come from a validated spec.

    They are in DuckDB's own dialect, and read no file of the driver's machine.

    Raises:
        duckdb.Error: an expression fails over the rows.
    """
    query = f"SELECT {expressions} FROM origin"
    return _compute_table(_Purpose.EXPRESSIONS, {"origin": rows}, query)


def select_rows(table: Any, where: str) -> Any:
    """Return the rows of an Arrow table that meet a condition in DuckDB SQL, in their order.

    Raises:
        duckdb.Error: DuckDB cannot read the condition.
    """
    # Only row numbers come out of DuckDB, so that all values keep their types.
    numbered = table.append_column("_row_number", [np.arange(table.num_rows)])
    query = f"select _row_number from numbered where ({where}) order by 1"
    with open_database() as session:
        session.register("numbered", numbered)
        return table.take(session.execute(query).fetchnumpy()["_row_number"])


_NUMBERS = count()


@dataclass(eq=False, repr=False)
class DuckFrame:
    """Rows of Arrow tables; see the module. Not changed by any method.

    Args:
        query: DuckDB SQL.
        tables: name in the query -> Arrow table or dataset.
    """

    _query: str
    _tables: Mapping[str, Any]

    @classmethod
    def from_table(cls, table: Any) -> Self:
        """Return the rows of an Arrow table or dataset."""
        name = f"_table_{next(_NUMBERS)}"
        return cls(f"SELECT * FROM {name}", {name: table})

    def selectExpr(self, *columns: str) -> Self:  # noqa: N802 - Spark's name
        """Return these columns, given as Spark SQL."""
        return self._select(", ".join(map(to_duckdb, columns)))

    def where(self, condition: str) -> Self:
        """Return the rows that meet a condition in Spark SQL."""
        return self._select("*", f"WHERE {to_duckdb(condition)}")

    def drop(self, *names: str) -> Self:
        """Return the rows without some columns, all of which they must have."""
        return self._select(f"* EXCLUDE ({', '.join(names)})")

    def group(self, keys: list[str], values: Mapping[str, str]) -> Self:
        """Return a row per group of `keys`; see `group_rows`."""
        columns = [*keys, *(f"{to_duckdb(sql)} AS {name}" for name, sql in values.items())]
        return self._select(", ".join(columns), f"GROUP BY {', '.join(keys)}" if keys else "")

    def join_left(self, other: Self, keys: list[str]) -> Self:
        """Return the rows with the other columns of `other` where the keys are the same.

        Null keys are equal.
        """
        return self._join("LEFT", other, keys, f"l.*, r.* EXCLUDE ({', '.join(keys)})")

    def join_anti(self, other: Self, keys: list[str]) -> Self:
        """Return the rows whose keys no row of `other` has; null keys are equal."""
        return self._join("ANTI", other, keys, "*")

    def _join(self, kind: str, other: Self, keys: list[str], columns: str) -> Self:
        same = " AND ".join(f"l.{key} IS NOT DISTINCT FROM r.{key}" for key in keys)
        both = f"({self._query}) l {kind} JOIN ({other._query}) r ON {same}"
        return type(self)(f"SELECT {columns} FROM {both}", {**self._tables, **other._tables})

    def limit(self, rows: int) -> Self:
        """Return at most so many rows."""
        return self._select("*", f"LIMIT {rows}")

    def unionByName(self, other: Self, **_: bool) -> Self:  # noqa: N802 - Spark's name
        """Return the rows of both; a column that one lacks is null."""
        both = f"({self._query}) UNION ALL BY NAME ({other._query})"
        return type(self)(both, {**self._tables, **other._tables})

    def toArrow(self) -> Any:  # noqa: N802 - Spark's name
        """Compute the rows, and return them as an Arrow table.

        Raises:
            duckdb.Error: DuckDB cannot compute them.
        """
        return _compute_table(_Purpose.FRAMES, self._tables, self._query)

    @cached_property
    def types(self) -> dict[str, str]:
        """Column -> its type in DuckDB's words."""
        query = self._query
        schemas = list[Any]()
        for number, (name, table) in enumerate(self._tables.items()):
            query = re.sub(rf"FROM {name}\b", f"FROM _origin_{number}", query)
            schemas.append(table.schema)
        return dict(_describe_query(query, tuple(schemas)))

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.types)

    def _select(self, columns: str, rest: str = "") -> Self:
        return type(self)(f"SELECT {columns} FROM ({self._query}) {rest}", self._tables)


# A pipeline asks for the same few types in every epoch, and planning takes milliseconds.
@lru_cache(512)
def _describe_query(query: str, schemas: tuple[Any, ...]) -> tuple[tuple[str, str], ...]:
    """Return columns and types of a query over ``_origin_0``, ``_origin_1`` and so on."""
    tables = {f"_origin_{n}": schema.empty_table() for n, schema in enumerate(schemas)}
    described = DuckFrame(f"DESCRIBE {query}", tables).toArrow()
    names, kinds = (described[c].to_pylist() for c in ("column_name", "column_type"))
    return tuple(zip(names, kinds, strict=True))


def group_rows(frame: Frame, keys: list[str], values: Mapping[str, str]) -> Frame:
    """Return a row per group of `keys` with `values`: column -> aggregates in Spark SQL.

    Without keys it is one row, also of no rows.
    """
    if isinstance(frame, DuckFrame):
        return frame.group(keys, values)
    from pyspark.sql import functions as F  # noqa: N812

    return frame.groupBy(*keys).agg(*(F.expr(sql).alias(name) for name, sql in values.items()))


def combine_frames(*found: Frame | None) -> Frame | None:
    """Return the rows of the frames that are there, columns by name; None without a frame.

    A column that one of them lacks is null.
    """
    frames = [frame for frame in found if frame is not None]
    if not frames:
        return None
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)


def get_column_types(frame: Frame) -> dict[str, str]:
    """Column -> type in the words of the frame's engine."""
    if isinstance(frame, DuckFrame):
        return frame.types
    return {field.name: field.dataType.simpleString() for field in frame.schema}
