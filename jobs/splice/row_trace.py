"""Trace an input row through all outputs, found by any of its fields (`tidegate row`).

The trace reads every place where the row can be; it does not conclude from counters or from the
frontier.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import list_splice_requests
from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import Row, RowView, list_rows, read_columns
from tidegate.jobs.engine.manifest_writer import ORDER_KIND
from tidegate.jobs.rules.duck_frame import DuckFrame, open_database, query_table
from tidegate.jobs.rules.recomputation import SET_ASIDE_REASONS, build_time_expression
from tidegate.jobs.sinks.output_tables import (
    IDENTITY_COLUMNS,
    SPLICE_COLUMN,
    RowIdentity,
    build_table_schema,
    iterate_identities,
    make_request_schema,
)
from tidegate.jobs.sinks.published_tables import RowSelection, iterate_window_bounds, scan_table
from tidegate.jobs.sinks.table_scan import Range, Ranges
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MAX, format_instant

from .errors import BAD_ROW_VALUE, TOO_MANY_ROWS, UNKNOWN_COLUMN
from .request_creation import resolve_request_state
from .tables_at_head import TablesAtHead, find_merge_segments
from .window_merge import list_touching_rows

_MAX_ROWS = 20  # rows traced at a time; a question about more rows is one for a query


@dataclass(frozen=True)
class RowLocation:
    """One place where the row is or was.

    Attributes:
        output: events, a window, late, dead_letters, or request.
        state: released, inserted (by a merge), late, "late, merged since", dead letter, counted,
            merged, missing, waits (for `events`: in the order buffer; for a window: without a
            result), edge; for a request its state.
        detail: position, reason, revision and so on.
    """

    output: str
    state: str
    detail: JsonObject = field(default_factory=dict)


class RowTrace(BaseModel):
    """One row and all places where it was found.

    Attributes:
        event_time: ISO 8601; None for a dead letter.
        arrived: ISO 8601, when the oldest object of the slice arrived with which the row was read;
            None of topics.
        read: the checkpoint that sealed that slice; None if it is retired.
        sealed: ISO 8601, when that was.
        values: the user's columns, times as text; of a dead letter its text as `row`.
        places: dead letters, late, requests, events, order buffer, then the windows.
    """

    source: str
    partition: str
    seq: int
    event_time: str | None
    arrived: str | None = None
    read: str | None = None
    sealed: str | None = None
    values: JsonObject
    places: list[RowLocation]


def trace_rows(spec: PipelineSpec, log: SlotLog, fields: Mapping[str, str]) -> list[RowTrace]:
    """Trace the rows whose columns have these values, sorted by identity; none if no row matches.

    A dead letter matches if its text contains the values.

    Args:
        spec: the pipeline.
        log: its log.
        fields: column (or `_source`, `_partition`, `_seq`) -> value as text.

    Raises:
        ConfigurationError: no field is given, a column does not exist, a value does not fit its
            column, or more than 20 rows match.
    """
    known = (*spec.columns, *IDENTITY_COLUMNS)
    unknown = [name for name in fields if name not in known]
    if unknown or not fields:
        columns = ", ".join(unknown) or "(none was given)"
        raise UNKNOWN_COLUMN(pipeline=spec.name, columns=columns, known=", ".join(known))
    return _RowTracer(TablesAtHead(spec, log), fields).trace_matching_rows()


class _RowTracer:
    """Reads all places where rows with these fields can be, and traces them."""

    def __init__(self, tables: TablesAtHead, fields: Mapping[str, str]) -> None:
        self._tables, self._spec, self._fields = tables, tables.spec, fields
        columns = [*self._spec.columns, *IDENTITY_COLUMNS]
        empty = build_table_schema(self._spec, EVENTS).empty_table().select(columns)
        types = DuckFrame.from_table(empty).types
        self._casts = {name: f"cast(? as {types[name]})" for name in fields}
        wanted = self._build_ranges()
        event_columns = [*columns, "position", "section", "_late", SPLICE_COLUMN, "_epoch"]
        late_columns = [*columns, "output", "reason", "lateness_us", "frontier", "_epoch"]
        self._events, self._late = (
            self._select_matching(tables.read_rows(table, names, ranges=wanted))
            for table, names in ((EVENTS, event_columns), (LATE, late_columns))
        )
        # Requests keep their own copy of the rows, so a row is found there even if its tables were
        # cut by a restore. All of it: a corrected row has other values than its dead letter.
        self._requested = [
            (request, read_columns(tables.log.store, [file], make_request_schema(self._spec)))
            for request in list_splice_requests(tables.log.store, self._spec.name)
            if request.origin != "attachment"
            for file in request.row_files()
        ]
        self._dead = self._match_dead_letters(
            {name: wanted[name] for name in IDENTITY_COLUMNS if name in wanted}
        )
        # Segments of the order buffer; some of their rows may have left.
        segments = [s for s in tables.head.segments if s.kind == ORDER_KIND]
        schema = empty.schema.append(pa.field("_section", pa.int64()))
        self._buffered = self._select_matching(read_columns(tables.log.store, segments, schema))

    def trace_matching_rows(self) -> list[RowTrace]:
        """Return every row that matches, with its places."""
        # Row -> its user columns, of a dead letter its text; and its event time in ticks, if any.
        rows: dict[RowIdentity, tuple[JsonObject, int | None]] = {}
        requested = [self._select_matching(table) for _, table in self._requested]
        for table in (self._events, self._late, *requested, self._buffered):
            for who, row in zip(iterate_identities(table), list_rows(table), strict=True):
                values = {name: row[name] for name in self._spec.columns}
                rows.setdefault(who, (values, row["_time"]))
        for who, row in self._dead.items():
            rows.setdefault(who, ({"row": row["row"]}, None))
        # Each row costs several scans below.
        if len(rows) > _MAX_ROWS:
            raise TOO_MANY_ROWS(pipeline=self._spec.name, count=len(rows), limit=_MAX_ROWS)
        return [self._trace_row(who, *rows[who]) for who in sorted(rows)]

    def _build_ranges(self) -> dict[str, list[Range]]:
        """Return the values of the fields for which files keep statistics."""
        ticks = [f"epoch_us({c})" if "TIMESTAMP" in c else c for c in self._casts.values()]
        try:
            with open_database() as db:
                query = f"select {', '.join(ticks)}"
                values = db.execute(query, [*self._fields.values()]).fetchall()[0]
        except Exception as error:
            text = get_first_line(error)
            raise BAD_ROW_VALUE(pipeline=self._spec.name, text=text) from error
        return _select_exact_ranges(self._fields, values)

    def _select_matching(self, table: Any) -> Any:
        """Return the rows of a table that have the values of all fields, with `_time` in ticks."""
        equal = " and ".join(f'"{name}" = {cast}' for name, cast in self._casts.items())
        query = f"select *, {build_time_expression(self._spec)} as _time from rows where {equal}"
        return query_table(table, query, [*self._fields.values()])

    def _match_dead_letters(self, wanted: Ranges) -> dict[RowIdentity, Row]:
        """Return dead letters whose text contains every value; their columns could not be read."""
        columns = ["reason", "detail", "object", "row", *IDENTITY_COLUMNS, "_epoch"]
        table = self._tables.read_rows(DEAD_LETTERS, columns, ranges=wanted)
        table = table.filter(pc.is_valid(table["row"]))

        def matches(row: RowView) -> bool:
            """Return whether the text of a dead letter has the value of every field."""
            return all(
                str(row[name]) == value if name in IDENTITY_COLUMNS else value in row["row"]
                for name, value in self._fields.items()
            )

        rows = zip(iterate_identities(table), list_rows(table), strict=True)
        return {who: row for who, row in rows if matches(row)}

    def _trace_row(self, who: RowIdentity, values: JsonObject, time: int | None) -> RowTrace:
        places = [
            *self._locate_in_dead_letters(who),
            *self._locate_in_late(who),
            *self._locate_in_requests(who),
            *self._locate_in_events(who),
            *self._locate_in_order_buffer(who, time or 0),
        ]
        if time is not None:
            for name in self._spec.windows:
                places += self._locate_in_window(name, who, values, time)
        source, partition, seq = who
        epoch, read = self._find_read_epoch(who), {}
        if epoch is not None:
            arrived = epoch.cut[f"{source}/{partition}"].get("arrived")
            read = {"read": str(epoch.id), "sealed": format_instant(epoch.created_at)}
            read |= {"arrived": format_instant(arrived)} if arrived else {}
        return RowTrace(
            source=source,
            partition=partition,
            seq=seq,
            event_time=None if time is None else format_instant(time),
            **read,
            values={
                name: value.isoformat() if hasattr(value, "isoformat") else value
                for name, value in values.items()
            },
            places=places,
        )

    def _locate_in_dead_letters(self, who: RowIdentity) -> Iterator[RowLocation]:
        if who in self._dead:
            dead = self._dead[who]
            detail = {name: dead[name] for name in ("reason", "detail", "object")}
            detail["epoch"] = dead["_epoch"]
            yield RowLocation(DEAD_LETTERS, "dead letter", detail)

    def _locate_in_late(self, who: RowIdentity) -> Iterator[RowLocation]:
        for late in _find_rows(self._late, who):
            # The late table is never rewritten, so a merged row is late there forever.
            is_merged = (who, late["output"]) in self._tables.merged.slots
            detail = {
                "output": late["output"],
                "reason": late["reason"],
                "lateness_s": (late["lateness_us"] or 0) / 1_000_000,
                "missed": late["frontier"],
                **self._describe_holder(late["_epoch"] - 1),
                "epoch": late["_epoch"],
                **self._describe_result(LATE, late["_epoch"]),
            }
            state = "late, merged since" if is_merged else "late"
            yield RowLocation(LATE, state, detail)

    def _find_read_epoch(self, who: RowIdentity) -> Manifest | None:
        """Return the epoch that read a row: the first whose slice ends behind it.

        If that one is retired, None: the first that is kept begins behind the row.
        """
        member = f"{who[0]}/{who[1]}"

        def is_read(slot: int) -> bool:
            epoch = self._tables.find_epoch(slot)
            return epoch is not None and epoch.cut.get(member, {}).get("end", -1) > who[2]

        slots = range(1, self._tables.head.slot + 1)
        epoch = self._tables.find_epoch(bisect_left(slots, True, key=is_read) + 1)
        piece = {} if epoch is None else epoch.cut.get(member, {})
        return epoch if piece.get("start", who[2] + 1) <= who[2] < piece["end"] else None

    def _describe_holder(self, slot: int) -> JsonObject:
        """Return which member held the frontier after a slot, and how far behind the others."""
        epoch = self._tables.find_epoch(slot)
        member = (epoch.frontier_holder or {}).get("member") if epoch else None
        if epoch is None or member is None:
            return {}
        inputs = epoch.decider.get("output", {}).get("inputs", {})
        others = [one["frontier"] for name, one in inputs.items() if name != member.split("/")[0]]
        ahead = min(others, default=TICK_MAX) - epoch.frontier_after
        return {"held_by": member} | (
            {"held_back_s": ahead / 1_000_000} if others and 0 <= ahead < TICK_MAX else {}
        )

    def _describe_result(self, output: str, epoch: int) -> JsonObject:
        """Return when an epoch was sealed, and when its rows came into the output's table."""
        sealed = self._tables.find_epoch(epoch)
        visible = self._tables.find_commit_time(output, epoch)
        times = {"sealed": sealed.created_at if sealed else None, "visible": visible}
        return {name: format_instant(time) for name, time in times.items() if time is not None}

    def _locate_in_order_buffer(self, who: RowIdentity, time: int) -> Iterator[RowLocation]:
        newest = self._tables.head.record
        for waiting in _find_rows(self._buffered, who):
            # A segment keeps rows that have left until its last row leaves.
            if newest is not None and (waiting["_section"], time) >= newest.release_after:
                detail = {"frontier": format_instant(newest.frontier_after)}
                yield RowLocation(EVENTS, "waits", detail | (newest.frontier_holder or {}))

    def _locate_in_requests(self, who: RowIdentity) -> Iterator[RowLocation]:
        head = self._tables.head
        segments = find_merge_segments(head)
        for request, table in self._requested:
            for requested in _find_rows(table, who):
                detail = {
                    "request": request.id,
                    "outputs": requested["_outputs"],
                    "who": request.who,
                    "why": request.why,
                }
                if request.id in segments:
                    detail["checkpoint"] = segments[request.id].extra["checkpoint"]
                state = resolve_request_state(self._tables.log, request, head)
                yield RowLocation("request", state, detail)

    def _locate_in_events(self, who: RowIdentity) -> Iterator[RowLocation]:
        for event in _find_rows(self._events, who):
            detail = {
                "section": event["section"],
                "epoch": event["_epoch"],
                "flagged_late": bool(event["_late"]),
                "position": self._find_position(who, event),
                "request": event[SPLICE_COLUMN],
                **self._describe_wait(who, event["_epoch"]),
                **self._describe_result(EVENTS, event["_epoch"]),
            }
            detail = {name: value for name, value in detail.items() if value is not None}
            yield RowLocation(EVENTS, "inserted" if event[SPLICE_COLUMN] else "released", detail)

    def _describe_wait(self, who: RowIdentity, slot: int) -> JsonObject:
        """Return how long a released row waited, and for whom; empty if it left at once."""
        read, released = self._find_read_epoch(who), self._tables.find_epoch(slot)
        if read is None or released is None or released.slot <= read.slot:
            return {}
        waited = (released.created_at - read.created_at) / 1_000_000
        return {"waited_s": waited, **self._describe_holder(slot - 1)}

    def _find_position(self, who: RowIdentity, event: RowView) -> int | None:
        """Return the current position of an event; None if its epoch is not published yet."""
        epoch, tables = event["_epoch"], self._tables
        if epoch > tables.published:
            return None
        if not find_merge_segments(tables.head):
            return int(event["position"])
        # The current position is computed by readers: merges move rows without rewriting them.
        columns = ("position", *IDENTITY_COLUMNS)
        selection = RowSelection(since=epoch - 1, until=epoch, columns=columns)
        table = scan_table(self._spec, tables.log.store, EVENTS, selection)
        return next((row["position"] for row in _find_rows(table, who)), None)

    def _locate_in_window(
        self, name: str, who: RowIdentity, values: JsonObject, time: int
    ) -> Iterator[RowLocation]:
        """Yield the results that contain the row, in every revision since it was counted."""
        merge_slot = self._tables.merged.slots.get((who, name))
        # Such a row was never offered to the window, or was refused by it.
        if merge_slot is None and (who in self._dead or self._is_late_for(name, who)):
            yield RowLocation(name, "missing", {"why": "late or never read; not merged"})
            return
        edge = self._describe_edge(who[0], values)
        if edge is not None:
            yield RowLocation(name, "edge", {"why": edge})
            return
        results = self._find_window_results(name, who, values, time)
        if merge_slot is not None:
            # Results before the merge have the same bounds, but not this row.
            results = [detail for detail in results if detail["epoch"] >= merge_slot]
        elif results:
            first = min(results, key=lambda result: result["epoch"])
            first |= self._describe_result(name, first["epoch"])
        else:
            yield RowLocation(name, "waits", {"why": "the window has no result yet"})
        for detail in results:
            yield RowLocation(name, "counted" if merge_slot is None else "merged", detail)

    def _describe_edge(self, name: str, values: JsonObject) -> str | None:
        """Return what an edge row of a source does to windows; None if it is not an edge."""
        source = self._spec.sources.get(name)
        if source is None or source.edges is None:
            return None
        return {
            source.edges.start: "counts in each window that closes until its end",
            source.edges.end: "ends what is open under its keys",
        }.get(str(values.get(source.edges.kind)))

    def _find_window_results(
        self, name: str, who: RowIdentity, values: JsonObject, time: int
    ) -> list[JsonObject]:
        window = self._spec.windows[name]
        is_session = window.kind is WindowKind.SESSION
        identity = dict(zip(IDENTITY_COLUMNS, who, strict=True))
        one = pa.Table.from_pylist([values | identity])
        touching = list_touching_rows(self._spec, name, one)[0]
        key, spans = touching.key, touching.spans
        wanted = _select_exact_ranges(window.keys, key)
        if is_session:  # it may extend far beyond the row
            wanted |= {"window_start": [(None, time)], "window_end": [(time + 1, None)]}
        elif spans:
            wanted["window_end"] = [(spans[0][0], spans[-1][1])]
        table = self._tables.read_rows(name, ranges=wanted)
        results = zip(list_rows(table), iterate_window_bounds(table), strict=True)
        return [
            {
                "window_start": format_instant(start),
                "revision": result["revision"],
                "epoch": result["_epoch"],
            }
            for result, (start, end) in results
            if tuple(result[k] for k in window.keys) == key
            and (start <= time < end if is_session else (start, end) in spans)
        ]

    def _is_late_for(self, name: str, who: RowIdentity) -> bool:
        return any(
            late["output"] == name or late["reason"] in SET_ASIDE_REASONS
            for late in _find_rows(self._late, who)
        )


def _select_exact_ranges(names: Iterable[str], values: Iterable[Any]) -> dict[str, list[Range]]:
    """Return the values of columns for which files keep statistics, as ranges."""
    return {
        name: [(value, value)]
        for name, value in zip(names, values, strict=True)
        if isinstance(value, int | str) and not isinstance(value, bool)
    }


def _find_rows(table: Any, who: RowIdentity) -> Iterator[Row]:
    """Yield the rows with this identity."""
    for number, other in enumerate(iterate_identities(table)):
        if other == who:
            yield list_rows(table.slice(number, 1))[0]
