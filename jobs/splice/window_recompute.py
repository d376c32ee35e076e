"""Window results computed from rows, in DuckDB.

What a run would have given in which these rows had come in time.

No partial state is needed, so a window can be recomputed however long ago it was purged. Aggregates
without an exact SQL meaning (sketches, ``sql(...)`` in Spark's dialect) are refused, not
approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import duckdb
import pyarrow as pa

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction, WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, format_instant, saturate_ticks

_INEXACT_FUNCTIONS = (
    AggregateFunction.APPROX_DISTINCT,
    AggregateFunction.APPROX_QUANTILE,
    AggregateFunction.SQL,
)
_ROW_ORDER = "_et, _so, _partition, _seq"


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """One result to compute: key values and ``[start, end)``."""

    key: tuple[Any, ...]
    start: int
    end: int


@cache
def _connect_once() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()  # once a process: starting one costs as much as a small merge


@contextmanager
def open_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """A session of a DuckDB in memory, on UTC; its tables and relations are its own."""
    with closing(_connect_once().cursor()) as db:
        db.execute("set timezone = 'UTC'")
        yield db


def require_exact_aggregates(spec: PipelineSpec, name: str) -> None:
    """Refuse a window whose results cannot be computed exactly here.

    Raises:
        ConfigurationError: naming the aggregate.
    """
    for column, what in spec.windows[name].aggregates.items():
        if what.function in _INEXACT_FUNCTIONS:
            raise ConfigurationError(
                f"window {name} of {spec.name} has {column}: {what}, which only a run on Spark"
                " computes",
                code="splice.inexact_aggregate",
                pipeline=spec.name,
                kept="everything; nothing was merged",
                advice=(
                    "merge into the other outputs (make the request with --output), or restore and"
                    " run the rows again"
                ),
            )


def refuse_edge_windows(spec: PipelineSpec, name: str) -> None:
    """Refuse a window over edge events.

    What a row changes there reaches over every window since its start.

    Raises:
        ConfigurationError: naming the source that has them.
    """
    source = next((source for source, own in spec.sources.items() if own.edges is not None), None)
    if source is not None:
        raise ConfigurationError(
            f"window {name} of {spec.name} is over edge events ({source}): nothing can be merged"
            " into it",
            code="splice.edges",
            pipeline=spec.name,
            kept="everything; nothing was merged",
            advice=(
                "merge into the other outputs (make the request with --output), or restore, and run"
                " again with a larger lag"
            ),
        )


def build_time_expression(spec: PipelineSpec, field: str = "event_time") -> str:
    """SQL for the event time (or the end time) of a row in ticks.

    Sources may call it differently.
    """
    columns = {name: getattr(source, field) for name, source in spec.sources.items()}
    distinct = set(columns.values())
    if len(distinct) == 1:
        only = distinct.pop()
        return f'epoch_us("{only}")' if only else "cast(null as bigint)"
    cases = " ".join(
        f"when '{name}' then epoch_us(\"{column}\")" for name, column in columns.items() if column
    )
    return f"case _source {cases} end"


def recompute_results(
    db: duckdb.DuckDBPyConnection,
    spec: PipelineSpec,
    name: str,
    rows: str,
    targets: Sequence[WindowBounds],
    schema: Any,
) -> list[dict[str, Any]]:
    """The aggregates of each target over the rows of the relation `rows`.

    Plus ``_rows``, how many contributed.

    Args:
        db: where the relation is.
        spec: the pipeline.
        name: the window.
        rows: a relation with the user's columns, identity, ``_et``, ``_end`` and ``_so``.
        targets: what to compute, in order.
        schema: types of the window's table.
    """
    window = spec.windows[name]
    fields = [schema.field(key) for key in window.keys]
    columns = {
        f"_k{i}": pa.array([t.key[i] for t in targets], f.type) for i, f in enumerate(fields)
    }
    places = {
        "_t": range(len(targets)),
        "_ts": [t.start for t in targets],
        "_te": [t.end for t in targets],
    }
    numbers = {k: pa.array(list(v), pa.int64()) for k, v in places.items()}
    db.register("targets", pa.table(columns | numbers))
    values = ", ".join(
        f'{_build_aggregate_expression(what)} as "{column}"'
        for column, what in window.aggregates.items()
    )
    query = f"""
        with goals as (select *, {_build_key_expression([f"_k{i}" for i in range(len(fields))])} as _key from targets),
        pairs as ({_build_pairs_query(window, rows)})
        select _t, count(_seq) as _rows, {values}
        from goals left join pairs using (_key, _ts) group by _t order by _t"""
    try:
        found = db.sql(query).to_arrow_table()
    except duckdb.Error as error:
        raise _foreign_expression_error(spec, name, error) from error
    return list(_cast_aggregates(found, window, schema).to_pylist())


def _build_pairs_query(window: WindowSpec, rows: str) -> str:
    """(row, start of a window that it belongs to).

    For sessions the start of the target that contains it.
    """
    quoted = [f'"{key}"' for key in window.keys]
    if window.kind is WindowKind.SESSION:
        return f"""select r.*, g._ts from (select *, {_build_key_expression(quoted)} as _key from {rows}) r
            asof join goals g on r._key = g._key and r._et >= g._ts where r._et < g._te"""
    size, period = window.size, window.period
    first, last = (
        f"{_build_floor_expression(f'_et - {size}', window)} + {period}",
        _build_floor_expression("_end - 1", window),
    )
    return (
        f"select *, {_build_key_expression(quoted)} as _key, unnest(generate_series({first},"
        f" {last}, {period})) as _ts from {rows}"
    )


def _build_floor_expression(ticks: str, window: WindowSpec) -> str:
    """The last window start at or before an instant, in whole numbers, also for negative times."""
    x = f"({ticks} - {window.offset})"
    return (
        f"({x} - (({x} % {window.period}) + {window.period}) % {window.period} + {window.offset})"
    )


def _build_key_expression(columns: Sequence[str]) -> str:
    """One text for all key columns; null is a key like any other."""
    parts = [f"coalesce('v' || cast({column} as varchar), 'n')" for column in columns]
    return " || chr(31) || ".join(parts) or "''"


def _build_aggregate_expression(what: Aggregate) -> str:
    x = what.expression
    match what.function:
        case AggregateFunction.COUNT:
            return "count(_seq)" if x == "*" else f"count({x})"
        case AggregateFunction.AVG:
            return f"avg(cast({x} as double))"
        case AggregateFunction.DISTINCT:
            return f"count(distinct {x})"
        case AggregateFunction.FIRST:
            return f"first({x} order by {_ROW_ORDER}) filter (where _seq is not null)"
        case AggregateFunction.LAST:
            return f"last({x} order by {_ROW_ORDER}) filter (where _seq is not null)"
        case AggregateFunction.COLLECT:
            return f"coalesce(list({x} order by {_ROW_ORDER}) filter (where ({x}) is not null), [])"
        case _:
            return f"{what.function.value}({x})"


def _cast_aggregates(found: Any, window: WindowSpec, schema: Any) -> Any:
    """Sums grow in DuckDB: back to the types of the table."""
    for place, name in enumerate(found.column_names):
        if name in window.aggregates and found.schema.field(name).type != schema.field(name).type:
            found = found.set_column(place, name, found[name].cast(schema.field(name).type))
    return found


def _foreign_expression_error(
    spec: PipelineSpec, name: str, error: Exception
) -> ConfigurationError:
    return ConfigurationError(
        f"window {name} of {spec.name} cannot be recomputed: {str(error).splitlines()[0]}",
        code="splice.foreign_expression",
        pipeline=spec.name,
        kept="everything; nothing was merged",
        advice=(
            "only expressions that Spark and DuckDB both know can be merged into; restore and run"
            " the rows again otherwise"
        ),
    )


# Which window results a set of rows touches: for tumbling and sliding windows by their spans, for
# sessions by what they join.

_NEW, _COUNTED = "new", "counted"
_SessionPart = tuple[int, int, dict[str, Any] | str]
"""Start, end, and a published session or what kind of row it is."""


@dataclass(frozen=True, slots=True)
class TouchingRow:
    """What of a row decides where it belongs."""

    key: tuple[Any, ...]
    start: int
    end: int


@dataclass
class AffectedWindow:
    """One result that changes.

    Attributes:
        standing: published results that it stands in the place of: itself, or the sessions that it
            joins.
        needed: rows of the request are new in it; else it only joins sessions that a run in time
            would not have parted.
    """

    bounds: WindowBounds
    published_results: list[dict[str, Any]] = field(default_factory=list)
    needed: bool = True

    @property
    def has_overlapping_sessions(self) -> bool:
        """Its standing sessions meet.

        A row came when the one beside it was purged, and made another.
        """
        ends = sorted((row["_ws"], row["_we"]) for row in self.published_results)
        return any(one[1] >= other[0] for one, other in pairwise(ends))

    @property
    def next_revision(self) -> int:
        """Of the next result."""
        return 1 + max((row["revision"] for row in self.published_results), default=-1)

    def find_same_bounds(self) -> dict[str, Any] | None:
        """The published result with the same bounds."""
        return next(
            (
                r
                for r in self.published_results
                if (r["_ws"], r["_we"]) == (self.bounds.start, self.bounds.end)
            ),
            None,
        )

    def list_replaced(self) -> list[dict[str, Any]]:
        """Published results that this one takes the place of under other bounds."""
        own = self.find_same_bounds()
        return [row for row in self.published_results if row is not own]

    def format_replaced_spans(self) -> list[str]:
        """As in the column of that name."""
        bounds = sorted((row["_ws"], row["_we"]) for row in self.list_replaced())
        return [f"{format_instant(start)}/{format_instant(end)}" for start, end in bounds]


def assign_windows(window: WindowSpec, row: TouchingRow) -> list[tuple[int, int]]:
    """The windows that a row belongs to; of a session what the row alone would make."""
    if window.kind is WindowKind.SESSION:
        return [(row.start, saturate_ticks(row.end - 1 + (window.gap or 0)))]
    return _list_window_spans(window, row.start, row.end)


def _list_window_spans(window: WindowSpec, start: int, end: int) -> list[tuple[int, int]]:
    """Return the tumbling or sliding windows that ``[start, end)`` overlaps, earliest first, clamped to int64."""
    size, slide = window.size or 0, window.period or 1
    # The least n with n * slide + offset + size > start.
    first = (start - size - window.offset) // slide + 1
    last = (end - 1 - window.offset) // slide
    starts = (n * slide + window.offset for n in range(first, last + 1))
    least = window.min_window_start
    return [
        (saturate_ticks(s), saturate_ticks(s + size)) for s in starts if least is None or s >= least
    ]


def is_purged(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether F has passed a window's end and its lateness.

    Only then nobody else computes it any more.
    """
    if window.lateness is None:
        return False
    if frontier == TICK_MAX:
        return True
    limit = saturate_ticks(end + window.lateness)
    return limit < frontier if window.closes_after_end else limit <= frontier


def find_affected_windows(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    published: Sequence[Mapping[str, Any]],
    counted: Iterable[TouchingRow] = (),
) -> list[AffectedWindow]:
    """The results that these rows touch, by end, start and key.

    Args:
        window: the window.
        rows: rows to merge.
        published: current results, with key columns, ``_ws``, ``_we`` and ``next_revision``.
        counted: rows of the request that the window has counted already, maybe in a session of
            their own.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in published:
        by_key.setdefault(tuple(result[key] for key in window.keys), []).append(dict(result))
    found = (
        _find_affected_sessions(window, rows, counted, by_key)
        if window.kind is WindowKind.SESSION
        else _find_affected_spans(window, rows, by_key)
    )
    return sorted(found, key=lambda t: (t.bounds.end, t.bounds.start, repr(t.bounds.key)))


def _find_affected_spans(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    published: Mapping[tuple[Any, ...], list[dict[str, Any]]],
) -> list[AffectedWindow]:
    wanted = {(row.key, *span) for row in rows for span in assign_windows(window, row)}
    standing: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for key, results in published.items():
        for result in results:
            standing.setdefault((key, result["_ws"], result["_we"]), []).append(result)
    return [AffectedWindow(WindowBounds(*bounds), standing.get(bounds, [])) for bounds in wanted]


def _find_affected_sessions(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    counted: Iterable[TouchingRow],
    published: Mapping[tuple[Any, ...], list[dict[str, Any]]],
) -> list[AffectedWindow]:
    """Rows and published sessions that meet, directly or through others, make one session."""
    by_key: dict[tuple[Any, ...], list[_SessionPart]] = {}
    for what, some in ((_NEW, rows), (_COUNTED, counted)):
        for row in some:
            by_key.setdefault(row.key, []).extend(
                (*span, what) for span in assign_windows(window, row)
            )
    found = []
    for key, spans in by_key.items():
        items = [*spans, *((r["_ws"], r["_we"], r) for r in published.get(key, []))]
        for group in _group_touching_parts(items, touching=window.session_touch == "merge"):
            bounds = WindowBounds(key, min(s for s, _, _ in group), max(e for _, e, _ in group))
            target = AffectedWindow(
                bounds,
                [r for _, _, r in group if isinstance(r, dict)],
                any(r == _NEW for _, _, r in group),
            )
            if target.needed or (
                len(target.published_results) > 1 and any(r == _COUNTED for _, _, r in group)
            ):
                found.append(target)
    return found


def _group_touching_parts(
    items: Iterable[_SessionPart], *, touching: bool
) -> list[list[_SessionPart]]:
    groups: list[list[_SessionPart]] = []
    reach = 0
    for item in sorted(items, key=lambda i: i[:2]):
        if groups and (item[0] < reach or (touching and item[0] == reach)):
            groups[-1].append(item)
            reach = max(reach, item[1])
        else:
            groups.append([item])
            reach = item[1]
    return groups
