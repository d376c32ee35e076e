"""The part of a merge plan that concerns windows: which results change, and to what.

For each window the plan finds the affected results, gathers the rows that the pipeline had accepted
for them, proves that these rows give exactly what is published, and only then computes the results
with the request's rows (`docs/decisions/0042-a-merge-recomputes-windows-from-rows.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import Row, RowView, list_rows
from tidegate.jobs.engine.replay import values_differ
from tidegate.jobs.rules.aggregates import build_recompute_sql
from tidegate.jobs.rules.duck_frame import open_database, query_rows, to_duckdb
from tidegate.jobs.rules.recomputation import (
    NEVER_READ_REASONS,
    SET_ASIDE_REASONS,
    WindowBounds,
    build_time_expression,
    recompute_results,
)
from tidegate.jobs.rules.row_conditions import (
    first_window_start_sql,
    is_window_purged,
    last_window_start_sql,
)
from tidegate.jobs.sinks.output_tables import IDENTITY_COLUMNS, SPLICE_COLUMN
from tidegate.jobs.sinks.published_tables import iterate_window_bounds, select_current_revisions
from tidegate.jobs.sinks.table_scan import Ranges
from tidegate.jobs.spec.pipeline import EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import format_instant

from .errors import EDGE_WINDOW, FOREIGN_EXPRESSION, INEXACT_AGGREGATE, NOT_REPRODUCIBLE, TOO_EARLY
from .tables_at_head import Span, TablesAtHead, join_spans, select_rows_for_output

_Key = tuple[Any, ...]  # of a window: values of its key columns, or with its bounds


@dataclass(frozen=True, slots=True)
class WindowChange:
    """One window result before and after the merge.

    Attributes:
        at: its key and its span.
        old: the published result with the same bounds; None if there is none, or if revisions are
            `delta`.
        new: aggregates, revision and ``replaces`` of the result that the merge writes.
        replaced: how many published sessions become part of this one.
        rows: rows of the request in it.
    """

    at: WindowBounds
    old: Row | None
    new: Row
    replaced: int
    rows: int


def compute_window_changes(
    tables: TablesAtHead, request_id: str, rows: Any
) -> dict[str, tuple[list[WindowChange], Any]]:
    """Return window -> results that change, and the rows to write, which lack provenance.

    Windows that contain none of the request's rows are left out.

    Args:
        tables: the tables at the head of the log.
        request_id: the request, for errors.
        rows: the request's rows, with the outputs that they still miss in ``_outputs``.

    Raises:
        TooEarlyError: a driver can still change one of the results.
        ConfigurationError: a window cannot be recomputed exactly.
        PoisonError: the published results cannot be reproduced from the rows.
    """
    merges = [_WindowMerge(tables, request_id, name, rows) for name in tables.spec.windows]
    merges = [merge for merge in merges if merge.affected]
    if not merges:
        return {}
    bounds = [target.bounds for merge in merges for target in merge.affected]
    known, late = _read_known_rows(tables, [(b.start, b.end) for b in bounds])
    return {merge.name: merge.compute_changes(known, late) for merge in merges}


def _read_known_rows(tables: TablesAtHead, spans: Sequence[Span]) -> tuple[Any, Any]:
    """Return all rows that the pipeline knows in these spans, and the late ones among them."""
    spec = tables.spec
    has_intervals = any(source.end_time for source in spec.sources.values())
    # An interval may begin long before a window that it reaches into.
    wanted = [(None, max(end for _, end in spans) - 1)] if has_intervals else join_spans(spans)
    columns = [*spec.columns, *IDENTITY_COLUMNS]
    events, late = (
        tables.read_rows(table, [*columns, *more], {spec.event_time_column: wanted})
        for table, more in ((EVENTS, [SPLICE_COLUMN]), (LATE, ["output", "reason"]))
    )
    # Merged events are taken from the merges: they may have gone into a part of the outputs.
    events = events.filter(pc.is_null(events[SPLICE_COLUMN]))
    parts = [table.select(columns) for table in (events, late, tables.merged.rows)]
    return pa.concat_tables(parts, promote_options="permissive"), late


class _WindowMerge:
    """Computes the results of one window that a request changes.

    Attributes:
        name: the window.
        affected: the results that change.
    """

    def __init__(self, tables: TablesAtHead, request_id: str, name: str, rows: Any) -> None:
        self._spec, self._tables, self._request_id = tables.spec, tables, request_id
        self.name, self._window = name, tables.spec.windows[name]
        self._names = {"pipeline": self._spec.name, "window": name}  # in errors
        self._is_session = self._window.kind is WindowKind.SESSION
        self._chosen = select_rows_for_output(rows, name)
        self._schema: Any = None
        self.affected = self._find_affected(rows)

    def compute_changes(self, known: Any, late: Any) -> tuple[list[WindowChange], Any]:
        """Return the results that change, and the rows to write.

        Args:
            known: all rows that the pipeline knows around these results.
            late: the late ones among them.
        """
        with open_database() as db:
            self._register_relations(db, known, late)
            changes = self._compute_results(db)
        rows = [
            {
                **dict(zip(self._window.keys, change.at.key, strict=True)),
                **change.new,
                "window_start": change.at.start,
                "window_end": change.at.end,
            }
            for change in changes
        ]
        # Arrow takes ticks for times.
        types = [(f.name, f.type) for f in self._schema if f.name not in ("_timeline", "_epoch")]
        return changes, pa.Table.from_pylist(rows, pa.schema(types))

    # Which results are affected

    def _find_affected(self, rows: Any) -> list[AffectedWindow]:
        """Return the results of the window that change.

        All rows of the request count: a session may change by a row that it has counted late. In
        time, the row would have joined two sessions.
        """
        if not self._chosen.num_rows and not self._is_session:
            return []
        # Over edge events a row changes every window since its start edge.
        for source, source_spec in self._spec.sources.items():
            if source_spec.edges is not None:
                raise EDGE_WINDOW(**self._names, source=source)
        touching = list_touching_rows(self._spec, self.name, self._chosen)
        counted = list_touching_rows(self._spec, self.name, rows) if self._is_session else []
        spans = [span for row in (*touching, *counted) for span in row.spans]
        if not spans:
            return []
        published = self._read_published_results(spans)
        affected, open_ends = [], []
        for target in find_affected_windows(self._window, touching, published, counted):
            end, frontier = target.bounds.end, self._tables.newest.frontier_after
            if is_window_purged(self._window, end, frontier):
                affected.append(target)
            elif target.has_new_rows:
                open_ends.append(end)
        if affected or open_ends:
            self._require_exact_aggregates()
        if open_ends:
            raise TOO_EARLY(
                pipeline=self._spec.name,
                request=self._request_id,
                why=f"{len(open_ends)} results of window {self.name} are still open to a driver, up"
                f" to {format_instant(max(open_ends))}",
            )
        return affected

    def _require_exact_aggregates(self) -> None:
        """Refuse a window whose results cannot be computed exactly here, naming the aggregate."""
        for column, aggregate in self._window.aggregates.items():
            if build_recompute_sql(aggregate) is None:
                raise INEXACT_AGGREGATE(**self._names, column=column, aggregate=aggregate)

    def _read_published_results(self, spans: Sequence[Span]) -> list[Row]:
        """Return the current results around these spans, with their bounds in ticks."""
        wanted: Ranges = (
            {"window_end": [(min(start for start, _ in spans), None)]}
            if self._is_session
            else {"window_start": join_spans([(s, s + 1) for s, _ in spans])}
        )
        table = self._tables.read_rows(self.name, ranges=wanted)
        self._schema = table.schema
        table = select_current_revisions(table, self._window)
        results = zip(list_rows(table), iterate_window_bounds(table), strict=True)
        return [{**row, "_ws": start, "_we": end} for row, (start, end) in results]

    # The rows behind the results

    def _register_relations(self, db: duckdb.DuckDBPyConnection, known: Any, late: Any) -> None:
        """Create the relations `accepted` and `chosen`.

        `accepted` has the rows that the window has counted, each once: all known rows except those
        that were late for this window or never read, unless a merge brought them into it. `chosen`
        has the request's rows that are not among them.
        """
        time = build_time_expression(self._spec)
        ranks = " ".join(f"when '{s}' then {number}" for number, s in enumerate(self._spec.sources))
        derived = (
            f"{time} as _et, coalesce({build_time_expression(self._spec, 'end_time')}, {time} + 1)"
            f" as _end, case _source {ranks} else {len(self._spec.sources)} end as _so"
        )
        db.register("known_rows", known)
        db.register("late_rows", late)
        db.register("merged_rows", self._tables.merged.rows)
        db.register("chosen_rows", self._chosen)
        identity = ", ".join(IDENTITY_COLUMNS)
        db.execute(f"""create temp table accepted as
            with held as (
                select {identity} from late_rows
                    where output = '{self.name}' or reason in {SET_ASIDE_REASONS}
                union select {identity} from merged_rows
                    where regexp_matches(_reason, '{NEVER_READ_REASONS}')
                except select {identity} from merged_rows
                    where list_contains(_outputs, '{self.name}'))
            select distinct on ({identity}) *, {derived}
            from known_rows anti join held using ({identity})""")
        db.execute(
            f"create temp table chosen as select *, {derived} from chosen_rows"
            f" anti join accepted using ({identity})"
        )

    # The results

    def _compute_results(self, db: duckdb.DuckDBPyConnection) -> list[WindowChange]:
        bounds = [target.bounds for target in self.affected]
        # Counts the request's rows in each result; of `delta` windows these values are the result.
        added = self._recompute(db, "chosen", bounds)
        is_delta = self._window.revisions == "delta"
        if is_delta:
            results = added
        else:
            self._require_reproducible(db)
            everything = "(from accepted union all by name from chosen)"
            results = self._recompute(db, everything, bounds)
        changes = []
        for target, result, share in zip(self.affected, results, added, strict=True):
            values = {column: result[column] for column in self._window.aggregates}
            old, replaced = target.split_by_bounds()
            if is_delta:
                old = None  # each revision holds only what it adds
            # The row is in the window, but changes none of its aggregates: no revision is written.
            if old and not replaced and not any(values_differ(old[c], values[c]) for c in values):
                continue
            new = {
                **values,
                "revision": 1 + max((r["revision"] for r in target.published_results), default=-1),
                # As the sessions name themselves (`select_current_revisions`).
                "replaces": [f"{format_instant(s)}/{format_instant(e)}" for s, e in replaced]
                if self._is_session
                else None,
            }
            rows = share["_rows"]
            changes.append(WindowChange(target.bounds, old, new, len(replaced), rows))
        return changes

    def _require_reproducible(self, db: duckdb.DuckDBPyConnection) -> None:
        """Prove that the accepted rows give each published result, and that no row is left over.

        Overlapping sessions are exempt: a row came when its session had been purged, so these
        results do not follow from the rows.
        """
        touch = self._window.session_touch == "merge"
        targets = [t for t in self.affected if not t.has_overlapping_sessions(merge_touching=touch)]
        published = [(n, r) for n, target in enumerate(targets) for r in target.published_results]
        bounds = [WindowBounds(targets[n].bounds.key, r["_ws"], r["_we"]) for n, r in published]
        counted = [0] * len(targets)
        again = self._recompute(db, "accepted", bounds)
        for (number, result), values, at in zip(published, again, bounds, strict=True):
            wrong = [
                f"{c} is {result[c]}, not {values[c]}"
                for c in self._window.aggregates
                if values_differ(result[c], values[c])
            ]
            if wrong:
                self._refuse(at, ", ".join(wrong))
            counted[number] += values["_rows"]
        # Each result on its own can be right while a row between two sessions is in none of them.
        whole = self._recompute(db, "accepted", [target.bounds for target in targets])
        for target, values, rows in zip(targets, whole, counted, strict=True):
            if values["_rows"] != rows:
                self._refuse(target.bounds, f"{values['_rows']} rows, {rows} in results")

    def _recompute(
        self, db: duckdb.DuckDBPyConnection, rows: str, targets: Sequence[WindowBounds]
    ) -> list[Row]:
        try:
            return recompute_results(db, self._window, rows, targets, self._schema)
        # The expressions are the user's, written for Spark SQL; DuckDB knows most of them.
        except duckdb.Error as error:
            raise FOREIGN_EXPRESSION(**self._names, text=get_first_line(error)) from error

    def _refuse(self, bounds: WindowBounds, text: str) -> NoReturn:
        key = dict(zip(self._window.keys, bounds.key, strict=True))
        start = format_instant(bounds.start)
        raise NOT_REPRODUCIBLE(**self._names, key=key, start=start, text=text)


# Which results change. Of tumbling and sliding windows, those that contain a row; of sessions,
# those that the rows make, join or extend.

_NEW, _COUNTED = "new", "counted"
_SessionPart = tuple[int, int, Row | str]
"""Start, end, and either a published session, or `_NEW` or `_COUNTED` for a row."""


@dataclass(frozen=True, slots=True)
class TouchingRow:
    """The key of a row, and the windows it belongs to, in ticks."""

    key: _Key
    spans: tuple[Span, ...]


def list_touching_rows(spec: PipelineSpec, name: str, rows: Any) -> list[TouchingRow]:
    """Return for each row its key, and the windows it belongs to, earliest first.

    Of sessions it is the one that the row alone makes.
    """
    window = spec.windows[name]
    start, end = (build_time_expression(spec, f) for f in ("event_time", "end_time"))
    if window.kind is WindowKind.SESSION:
        first, last, size = "_et", "_et", f"_end - 1L + {window.gap}L - _et"
    else:
        first, last = first_window_start_sql(window), last_window_start_sql(window)
        size = f"{window.size}L"
    query = f"""select {", ".join(map(to_duckdb, (first, last, size)))} from
        (select {start} as _et, coalesce({end}, {start} + 1) as _end from rows)"""
    found = query_rows(rows, query)
    columns = [rows[key].to_pylist() for key in window.keys]
    keys = zip(*columns, strict=True) if columns else (() for _ in found)
    return [
        TouchingRow(key, tuple((s, s + size) for s in range(first, last + 1, window.period or 1)))
        for key, (first, last, size) in zip(keys, found, strict=True)
    ]


@dataclass
class AffectedWindow:
    """One result that a merge changes.

    Attributes:
        bounds: its key and its span after the merge.
        published_results: the results that it takes the place of: the one with the same bounds, or
            the sessions that it joins.
        has_new_rows: it contains rows of the request that were not counted before. Otherwise it
            only joins sessions which a run in time would have joined.
    """

    bounds: WindowBounds
    published_results: list[Row]
    has_new_rows: bool = True

    def has_overlapping_sessions(self, *, merge_touching: bool) -> bool:
        """Whether two published sessions overlap, or touch where touching ones are one session.

        Then a row came when its session had been purged.
        """
        sessions = [(row["_ws"], row["_we"], row) for row in self.published_results]
        groups = _group_touching_parts(sessions, merge_touching=merge_touching)
        return len(groups) < len(sessions)

    def split_by_bounds(self) -> tuple[Row | None, list[Span]]:
        """Return the published result with the same bounds, if any, and the spans of the others."""
        bounds = (self.bounds.start, self.bounds.end)
        spans = [(row["_ws"], row["_we"]) for row in self.published_results]
        same = self.published_results[spans.index(bounds)] if bounds in spans else None
        return same, sorted(span for span in spans if span != bounds)


def find_affected_windows(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    published: Sequence[RowView],
    counted: Iterable[TouchingRow] = (),
) -> list[AffectedWindow]:
    """Return the results that rows may change, sorted by end, start and key.

    Args:
        window: the window.
        rows: rows to merge.
        published: current results, with key columns, ``_ws``, ``_we`` and ``revision``.
        counted: rows of the request that the window has counted already, perhaps in a session of
            their own.
    """
    if window.kind is WindowKind.SESSION:
        by_key = _group_results(published, window.keys)
        affected = _find_affected_sessions(window, rows, counted, by_key)
    else:
        by_bounds = _group_results(published, (*window.keys, "_ws", "_we"))
        affected = [
            AffectedWindow(WindowBounds(key, *span), by_bounds.get((*key, *span), []))
            for key, span in {(row.key, span) for row in rows for span in row.spans}
        ]
    return sorted(affected, key=lambda t: (t.bounds.end, t.bounds.start, repr(t.bounds.key)))


def _group_results(published: Iterable[RowView], columns: Iterable[str]) -> dict[_Key, list[Row]]:
    groups: dict[_Key, list[Row]] = {}
    for result in published:
        groups.setdefault(tuple(result[c] for c in columns), []).append(dict(result))
    return groups


def _find_affected_sessions(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    counted: Iterable[TouchingRow],
    published: Mapping[_Key, list[Row]],
) -> list[AffectedWindow]:
    """Rows and published sessions that touch, directly or through others, make one session."""
    by_key: dict[_Key, list[_SessionPart]] = {}
    for what, touching in ((_NEW, rows), (_COUNTED, counted)):
        for row in touching:
            by_key.setdefault(row.key, []).extend((*span, what) for span in row.spans)
    affected = []
    for key, spans_of_rows in by_key.items():
        parts = [*spans_of_rows, *((r["_ws"], r["_we"], r) for r in published.get(key, []))]
        for group in _group_touching_parts(parts, merge_touching=window.session_touch == "merge"):
            contents = [content for _, _, content in group]
            sessions = [content for content in contents if isinstance(content, dict)]
            start, end = min(s for s, _, _ in group), max(e for _, e, _ in group)
            # A row that was counted late, in a session of its own, may join two sessions.
            joins_sessions = len(sessions) > 1 and _COUNTED in contents
            if _NEW in contents or joins_sessions:
                bounds = WindowBounds(key, start, end)
                affected.append(AffectedWindow(bounds, sessions, _NEW in contents))
    return affected


def _group_touching_parts(
    parts: Iterable[_SessionPart], *, merge_touching: bool
) -> list[list[_SessionPart]]:
    """Group the parts that overlap; with `merge_touching` also those that only touch."""
    groups: list[list[_SessionPart]] = []
    reach = 0
    for part in sorted(parts, key=lambda p: p[:2]):
        if groups and (part[0] < reach or (merge_touching and part[0] == reach)):
            groups[-1].append(part)
            reach = max(reach, part[1])
        else:
            groups.append([part])
            reach = part[1]
    return groups
