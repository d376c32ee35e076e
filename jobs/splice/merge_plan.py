"""What a merge would do, computed in full before anybody decides.

The impact report and the merge are this one computation.

1. Which rows of the request still have to go where (a row merged before is left out, output by
  output).
2. Which results they touch; each must be purged, so that no driver will compute it again.
3. The rows that the pipeline accepted for those results, from events, late rows and former merges.
4. Proof: those rows alone must give exactly what is published; else the merge could not be exact
    and is refused.
5. The results with the request's rows, as new revisions; and the places of the rows in the events
  table.
6. Streams behind the events: what a merge does to them is computed by `restream`, as it is for a
    request into a stream itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.engine.result_comparison import values_differ
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.published_tables import select_current_revisions
from tidegate.jobs.sinks.row_positions import SPLICE_COLUMN
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.spec.window_specs import WindowKind
from tidegate.jobs.splice.insert_positions import find_anchor_positions, find_sections
from tidegate.jobs.splice.stream_history import format_rewritten_rows
from tidegate.jobs.splice.stream_merge import StreamEffect, StreamMerge
from tidegate.jobs.splice.tables_at_head import (
    MergedRows,
    Span,
    TablesAtHead,
    find_merge_segments,
    iterate_identities,
    join_spans,
    make_request_schema,
    read_data_file,
    read_merged_rows,
)
from tidegate.jobs.splice.window_recompute import (
    AffectedWindow,
    TouchingRow,
    WindowBounds,
    assign_windows,
    build_time_expression,
    find_affected_windows,
    is_purged,
    open_database,
    recompute_results,
    refuse_edge_windows,
    require_exact_aggregates,
)
from tidegate.time_units import TICK_MAX, TICK_MIN, format_instant

SET_ASIDE_REASONS = ("max_jump", "cti_violation")
"""Reasons for which a row went to no output at all, whatever output the late table names."""

UNREAD_REASON_PREFIXES = ("dead", "file")
"""Beginnings of the reasons of rows that no run ever read as rows."""


class TooEarlyError(ConfigurationError):
    """Rows whose windows are still alive, or whose place in the stream is not reached yet.

    A driver would compute them again.
    """


@dataclass(frozen=True, slots=True)
class WindowChange:
    """One window result: what readers have, and what they will have.

    Attributes:
        old: the published result with the same bounds; None if there is none.
        replaced: published sessions that become part of this one.
        rows: request rows in it.
    """

    key: tuple[Any, ...]
    start: int
    end: int
    old: dict[str, Any] | None
    new: dict[str, Any]
    replaced: tuple[dict[str, Any], ...]
    rows: int


@dataclass
class MergePlan:
    """The effect of one request at one head.

    Attributes:
        rows: the request's rows that have somewhere left to go, with `_outputs` cut down to that.
        already: (row, output) pairs of the request that were merged before.
        events: rows to insert, with the columns of the events table; None if there are none.
        first_position: current place of the first inserted row: positions before it stay as they
            are.
        changes: window -> results.
        tables: window or stream -> rows to write, without provenance.
        streams: what happens to the streams; None if nothing does.
        rows_read: rows that had to be read for it.
    """

    request: SpliceRequest
    head: LogHead
    rows: Any
    already: int = 0
    events: Any = None
    first_position: int | None = None
    changes: dict[str, list[WindowChange]] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    streams: StreamEffect | None = None
    rows_read: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is left to merge."""
        return int(self.rows.num_rows) == 0


def make_merge_plan(
    spec: PipelineSpec, log: SlotLog, request: SpliceRequest, head: LogHead | None = None
) -> MergePlan:
    """Compute the effect of a request. Reads only.

    Raises:
        TooEarlyError: some of its rows could still be taken by a running driver.
        ConfigurationError: a window cannot be recomputed exactly.
        PoisonError: the published results cannot be reproduced from the rows.
    """
    return _MergePlanner(spec, log, request, head or log.head()).plan()


class _MergePlanner:
    def __init__(
        self, spec: PipelineSpec, log: SlotLog, request: SpliceRequest, head: LogHead
    ) -> None:
        self.spec, self.log, self.request, self.head = spec, log, request, head
        self.tables = TablesAtHead(spec, log, head)
        self.time = spec.event_time_column
        self.merged: MergedRows = read_merged_rows(spec, log, head)
        if head.record is None or head.record.spec_digest != spec.digest():
            raise self._other_spec_error()
        if not spec.outputs.events:
            raise self._no_events_error()
        self.frontier = head.record.frontier_after
        self.rank = {name: number for number, name in enumerate(spec.sources)}
        self.schemas: dict[str, Any] = {}

    def plan(self) -> MergePlan:
        """The steps of the module."""
        if self.request.origin == "attachment":
            return self._plan_into_stream()
        rows, already = self._select_unmerged_rows()
        plan = MergePlan(self.request, self.head, rows, already)
        if plan.is_empty:
            return plan
        wanted = {name: self._rows_for_output(rows, name) for name in self.spec.windows}
        found = {
            name: self._find_changing_windows(name, mine, rows)
            for name, mine in wanted.items()
            if self._may_change(name, mine)
        }
        targets = {name: some for name, some in found.items() if some}
        self._load_accepted_rows(
            [(t.bounds.start, t.bounds.end) for some in targets.values() for t in some]
        )
        for name, some in targets.items():
            plan.changes[name] = self._compute_changes(name, wanted[name], some)
            plan.tables[name] = self._make_result_table(name, plan.changes[name])
        inserted = self._rows_for_output(rows, EVENTS)
        if inserted.num_rows:
            plan.events, plan.first_position = self._make_inserted_events(inserted)
            if (
                self.spec.streams and self.spec.release.mode is not ReleaseMode.PASS_THROUGH
            ):  # there they come with the next epoch
                self._add_stream_effect(
                    plan, self._start_stream_merge().merge_into_events(plan.events)
                )
        plan.rows_read = self.tables.rows_read
        return plan

    def _plan_into_stream(self) -> MergePlan:
        """A request that an attachment has collected."""
        restream = self._start_stream_merge()
        rows = restream.past.read_collected_rows(self.request.id)
        if self.request.id in find_merge_segments(self.head) or rows.num_rows == 0:
            return MergePlan(self.request, self.head, rows.slice(0, 0), rows.num_rows)
        plan = MergePlan(self.request, self.head, rows)
        self._add_stream_effect(
            plan, restream.merge_into_stream(self.request.destination, self.request.id)
        )
        plan.rows_read = self.tables.rows_read
        return plan

    def _start_stream_merge(self) -> StreamMerge:
        return StreamMerge(self.spec, self.log, self.head, self.tables)

    def _add_stream_effect(self, plan: MergePlan, effect: StreamEffect) -> None:
        plan.streams = effect
        plan.tables |= {
            name: format_rewritten_rows(change, plan.request.id)
            for name, change in effect.changes.items()
        }
        if effect.rejections is not None:
            plan.tables[REJECTIONS] = effect.rejections

    # 1. which rows

    def _select_unmerged_rows(self) -> tuple[Any, int]:
        """The request's rows with the outputs that they still miss."""
        files = [read_data_file(self.log, file) for file in self.request.row_files()]
        rows = pa.concat_tables(files, promote_options="permissive").select(
            make_request_schema(self.spec).names
        )
        outputs, already = [], 0
        for who, names in zip(iterate_identities(rows), rows["_outputs"].to_pylist(), strict=True):
            left = [
                name
                for name in names or ()
                if (who, name) not in self.merged.pairs and self._is_output(name)
            ]
            already += len(names or ()) - len(left)
            outputs.append(left)
        rows = rows.set_column(
            rows.column_names.index("_outputs"),
            "_outputs",
            pa.array(outputs, pa.list_(pa.string())),
        )
        return rows.filter(pc.greater(pc.list_value_length(rows["_outputs"]), 0)), already

    def _is_output(self, output: str) -> bool:
        return output == EVENTS or output in self.spec.windows

    def _rows_for_output(self, rows: Any, output: str) -> Any:
        return rows.filter(
            pa.array([output in names for names in rows["_outputs"].to_pylist()], pa.bool_())
        )

    # 2. which results

    def _may_change(self, name: str, mine: Any) -> bool:
        """A session may change by a row that it has counted: in time it would have joined two."""
        return bool(mine.num_rows) or self.spec.windows[name].kind is WindowKind.SESSION

    def _find_changing_windows(self, name: str, mine: Any, rows: Any) -> list[AffectedWindow]:
        refuse_edge_windows(self.spec, name)
        window = self.spec.windows[name]
        touching = self._to_touching_rows(name, mine)
        counted = self._to_touching_rows(name, rows) if window.kind is WindowKind.SESSION else []
        spans = [span for row in (*touching, *counted) for span in assign_windows(window, row)]
        if not spans:
            return []
        published = self._read_published_results(name, spans)
        found = find_affected_windows(window, touching, published, counted)
        found = [t for t in found if t.needed or is_purged(window, t.bounds.end, self.frontier)]
        if found:
            require_exact_aggregates(self.spec, name)
        alive = [t.bounds.end for t in found if not is_purged(window, t.bounds.end, self.frontier)]
        if alive:
            raise self._too_early_error(
                f"{len(alive)} results of window {name} are still open to a driver, up to"
                f" {format_instant(max(alive))}"
            )
        return found

    def _to_touching_rows(self, name: str, mine: Any) -> list[TouchingRow]:
        with open_database() as db:
            db.register("mine", mine)
            times = (
                f"{build_time_expression(self.spec)} as _et,"
                f" {build_time_expression(self.spec, 'end_time')} as _end"
            )
            pairs = db.execute(f"select {times} from mine").fetchall()
        keys = [mine[key].to_pylist() for key in self.spec.windows[name].keys]
        found = zip(*keys, strict=True) if keys else (() for _ in pairs)
        return [
            TouchingRow(tuple(k), t, t + 1 if e is None else e)
            for k, (t, e) in zip(found, pairs, strict=True)
        ]

    def _read_published_results(self, name: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """Current results around these spans."""
        window = self.spec.windows[name]
        if window.kind is WindowKind.SESSION:
            table = self.tables.read_rows(
                name, time="window_end", spans=[(min(s for s, _ in spans), TICK_MAX)]
            )
        else:
            table = self.tables.read_rows(
                name, time="window_start", spans=join_spans([(s, s + 1) for s, _ in spans])
            )
        self.schemas[name] = table.schema
        table = select_current_revisions(table, window)
        bounds = [table[c].cast(pa.int64()).to_pylist() for c in ("window_start", "window_end")]
        return [
            {**row, "_ws": s, "_we": e}
            for row, s, e in zip(table.to_pylist(), *bounds, strict=True)
        ]

    # 3. the rows behind them

    def _load_accepted_rows(self, spans: Sequence[Span]) -> None:
        """Everything the pipeline knows in these spans, each row once, as the relation `known`."""
        self.known = self.late = None
        if not spans:
            return
        intervals = any(source.end_time for source in self.spec.sources.values())
        reach = [(TICK_MIN, max(end for _, end in spans))] if intervals else join_spans(spans)
        columns = [*self.spec.columns, "_source", "_partition", "_seq"]
        events = self.tables.read_rows(
            EVENTS, [*columns, SPLICE_COLUMN], time=self.time, spans=reach
        )
        self.late = self.tables.read_rows(
            LATE, [*columns, "output", "reason"], time=self.time, spans=reach
        )
        parts = [
            events.filter(pc.is_null(events[SPLICE_COLUMN])).select(columns),
            self.late.select(columns),
            self.merged.rows.select(columns),
        ]
        self.known = pa.concat_tables(parts, promote_options="permissive")

    def _compute_changes(
        self, name: str, mine: Any, targets: Sequence[AffectedWindow]
    ) -> list[WindowChange]:
        window, schema = self.spec.windows[name], self.schemas[name]
        bounds = [t.bounds for t in targets]
        with open_database() as db:
            self._register_relations(db, name, mine)
            own = recompute_results(db, self.spec, name, "mine", bounds, schema)
            if window.revisions == "delta":
                new = own
            else:
                self._require_reproducible(db, name, targets)
                new = recompute_results(
                    db,
                    self.spec,
                    name,
                    "(from accepted union all by name from mine)",
                    bounds,
                    schema,
                )
        found = []
        for target, values, share in zip(targets, new, own, strict=True):
            result = {column: values[column] for column in window.aggregates}
            old = None if window.revisions == "delta" else target.find_same_bounds()
            if (
                old is None
                or any(values_differ(old[c], result[c]) for c in result)
                or target.list_replaced()
            ):
                b = target.bounds
                row = {
                    **result,
                    "revision": target.next_revision,
                    "replaces": self._format_replaces(window.kind, target),
                }
                found.append(
                    WindowChange(
                        b.key,
                        b.start,
                        b.end,
                        old,
                        row,
                        tuple(target.list_replaced()),
                        share["_rows"],
                    )
                )
        return found

    def _format_replaces(self, kind: WindowKind, target: AffectedWindow) -> list[str] | None:
        return target.format_replaced_spans() if kind is WindowKind.SESSION else None

    def _register_relations(self, db: Any, name: str, mine: Any) -> None:
        """The relations `accepted` and `mine`.

        What the window has counted, and what it is to count as well.
        """
        who = "_source, _partition, _seq"
        order = " ".join(f"when '{source}' then {number}" for source, number in self.rank.items())
        end = (
            f"coalesce({build_time_expression(self.spec, 'end_time')},"
            f" {build_time_expression(self.spec)} + 1)"
        )
        own = (
            f"{build_time_expression(self.spec)} as _et, {end} as _end, case _source {order} else"
            f" {len(self.rank)} end as _so"
        )
        db.register("known_rows", self.known)
        db.register("late_rows", self.late)
        db.register("merged_rows", self._rows_for_output(self.merged.rows, name))
        db.register("strangers", self._select_unread_rows())
        db.register("mine_rows", mine)
        aside = ", ".join(f"'{reason}'" for reason in SET_ASIDE_REASONS)
        db.execute(f"""create temp table accepted as
            with held as (
                select {who} from late_rows where output = '{name}' or reason in ({aside})
                union select {who} from strangers
                except select {who} from merged_rows)
            select distinct on ({who}) *, {own} from known_rows anti join held using ({who})""")
        db.execute(
            f"create temp table mine as select *, {own} from mine_rows anti join accepted using"
            f" ({who})"
        )

    def _select_unread_rows(self) -> Any:
        """Rows of former merges that no run ever judged (dead letters, rows of files).

        Not counted unless merged here.
        """
        rows = self.merged.rows
        return rows.filter(
            pc.match_substring_regex(
                pc.fill_null(rows["_reason"], ""), f"^({'|'.join(UNREAD_REASON_PREFIXES)})"
            )
        )

    # 4. the proof

    def _require_reproducible(self, db: Any, name: str, targets: Sequence[AffectedWindow]) -> None:
        """The rows alone give each published result, and there are no others in the spans of the targets."""
        schema, columns = self.schemas[name], list(self.spec.windows[name].aggregates)
        standing = [(target, result) for target in targets for result in target.published_results]
        bounds = [
            WindowBounds(t.bounds.key, result["_ws"], result["_we"]) for t, result in standing
        ]
        counted: dict[int, int] = {}
        again = recompute_results(db, self.spec, name, "accepted", bounds, schema)
        for (target, result), values, where in zip(standing, again, bounds, strict=True):
            wrong = [
                f"{c} is {result[c]}, not {values[c]}"
                for c in columns
                if values_differ(result[c], values[c])
            ]
            if wrong and not target.has_overlapping_sessions:
                raise self._not_reproduced_error(name, where, ", ".join(wrong))
            counted[id(target)] = counted.get(id(target), 0) + values["_rows"]
        whole = recompute_results(
            db, self.spec, name, "accepted", [t.bounds for t in targets], schema
        )
        for target, values in zip(targets, whole, strict=True):
            if (
                values["_rows"] != counted.get(id(target), 0)
                and not target.has_overlapping_sessions
            ):
                raise self._not_reproduced_error(
                    name,
                    target.bounds,
                    f"{values['_rows']} rows, {counted.get(id(target), 0)} in results",
                )

    # 5. the new rows

    def _make_result_table(self, name: str, changes: Sequence[WindowChange]) -> Any:
        window, schema = self.spec.windows[name], self.schemas[name]
        names = [n for n in schema.names if n not in ("_timeline", "_epoch")]
        columns: dict[str, list[Any]] = {n: [] for n in names}
        for change in changes:
            row = {**dict(zip(window.keys, change.key, strict=True)), **change.new}
            row |= {"window_start": change.start, "window_end": change.end}
            for n in names:
                columns[n].append(row.get(n))
        return pa.table(
            {n: _make_array(values, schema.field(n).type) for n, values in columns.items()}
        )

    def _make_inserted_events(self, rows: Any) -> tuple[Any, int]:
        """The rows as they will stand in the events table, in their order."""
        rows = self._sort_inserted_rows(rows)
        times = rows[self.time].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
        if self.spec.release.mode is ReleaseMode.PASS_THROUGH:
            record = self.head.record
            first = record.next_position if record else 0
            places, first_position = list(range(first, first + rows.num_rows)), first
            numbers = [record.section if record else 0] * rows.num_rows
        else:
            numbers = self._assign_sections(rows, times)
            marks = list(zip(numbers, times, strict=True))
            self._require_released(marks)
            places = find_anchor_positions(self.tables, self.time, marks)
            first_position = min(places) + 1
        fields = {
            "position": pa.array(places, pa.int64()),
            "section": pa.array(numbers, pa.int64()),
            "_late": pa.array([False] * rows.num_rows),
            "_source": rows["_source"],
            "_partition": rows["_partition"],
            "_seq": rows["_seq"],
            SPLICE_COLUMN: pa.array([self.request.id] * rows.num_rows, pa.string()),
        }
        user = {
            name: rows[name].cast(build_table_schema(self.spec, EVENTS).field(name).type)
            for name in self.spec.row_columns
        }
        return pa.table({**user, **fields}), first_position

    def _sort_inserted_rows(self, rows: Any) -> Any:
        rank = pa.array(
            [self.rank.get(s, len(self.rank)) for s in rows["_source"].to_pylist()], pa.int64()
        )
        order = [(n, "ascending") for n in (self.time, "_so", "_partition", "_seq")]
        return rows.append_column("_so", rank).sort_by(order).drop_columns(["_so"])

    def _assign_sections(self, rows: Any, times: Sequence[int]) -> list[int]:
        found = rows["_section"].to_pylist()
        unknown = [t for t, section in zip(times, found, strict=True) if section is None]
        guessed = iter(find_sections(self.tables, self.time, unknown) if unknown else ())
        return [next(guessed) if section is None else section for section in found]

    def _require_released(self, marks: Iterable[tuple[int, int]]) -> None:
        reached = (
            ReleaseMark(*self.head.record.release_after) if self.head.record else ReleaseMark(0, 0)
        )
        waiting = [mark for mark in marks if ReleaseMark(*mark) >= reached]
        if waiting:
            newest = format_instant(max(time for _, time in waiting))
            raise self._too_early_error(
                f"{len(waiting)} rows, up to {newest}, are not behind the newest released event"
            )

    # refusals

    def _too_early_error(self, why: str) -> TooEarlyError:
        return TooEarlyError(
            f"splice request {self.request.id} of {self.spec.name} cannot be merged yet: {why}",
            code="splice.too_early",
            pipeline=self.spec.name,
            kept="the request; nothing was merged",
            advice="merge it later: the message says what it waits for",
        )

    def _no_events_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.spec.name} keeps no events table (outputs.events: false): its windows cannot be"
            " computed again",
            code="splice.no_events",
            pipeline=self.spec.name,
            kept="the request; nothing was merged",
            advice=(
                "restore to before the rows came and run again, or compare with a batch over the"
                " input"
            ),
        )

    def _other_spec_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"the newest checkpoint of {self.spec.name} was sealed with another spec than the one"
            " given, or there is none",
            code="splice.other_spec",
            pipeline=self.spec.name,
            kept="everything; nothing was merged",
            advice=(
                "give the spec that the pipeline runs with; run it once if it never ran with"
                " this one"
            ),
        )

    def _not_reproduced_error(self, name: str, bounds: WindowBounds, what: str) -> PoisonError:
        key = dict(zip(self.spec.windows[name].keys, bounds.key, strict=True))
        return PoisonError(
            f"window {name} of {self.spec.name}, {key} {format_instant(bounds.start)}: "
            f"the published result does not follow from the rows that are kept ({what})",
            code="splice.not_reproducible",
            pipeline=self.spec.name,
            kept="everything; nothing was merged",
            advice=(
                "rows dropped or adjusted by policy, or taken by a part of their windows only, make"
                " this so; leave this window out with --output, or restore and run again"
            ),
        )


def _make_array(values: list[Any], kind: Any) -> Any:
    if pa.types.is_timestamp(kind) and all(v is None or isinstance(v, int) for v in values):
        return pa.array(values, pa.int64()).cast(kind)
    return pa.array(values, kind)
