"""Where is my row?

One input row through all outputs, by any of its fields; nothing is guessed, every place is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import list_splice_requests
from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks.published_tables import scan_table
from tidegate.jobs.sinks.row_positions import SPLICE_COLUMN
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowKind
from tidegate.jobs.splice.merge_plan import SET_ASIDE_REASONS
from tidegate.jobs.splice.request_creation import resolve_request_state
from tidegate.jobs.splice.tables_at_head import (
    RowIdentity,
    TablesAtHead,
    find_merge_segments,
    iterate_identities,
    read_data_file,
    read_merged_rows,
)
from tidegate.jobs.splice.window_recompute import (
    TouchingRow,
    assign_windows,
    build_time_expression,
    open_database,
)
from tidegate.time_units import format_instant

_MAX_ROWS = 20  # rows followed at a time: more are no row but a query
_IDENTITY_COLUMNS = ("_source", "_partition", "_seq")


class RowLocation(BaseModel):
    """One place where the row stands or stood.

    Attributes:
        output: events, a window, late, dead_letters, or request.
        state: released, inserted, late, dead letter, counted, merged, waits, edge.
        detail: position, reason, revision and so on.
    """

    output: str
    state: str
    detail: dict[str, Any] = {}


class RowTrace(BaseModel):
    """One row and all its places."""

    source: str
    partition: str
    seq: int
    event_time: str | None
    values: dict[str, Any]
    places: list[RowLocation]


def trace_rows(spec: PipelineSpec, log: SlotLog, fields: Mapping[str, str]) -> list[RowTrace]:
    """Follow the rows whose columns have these values.

    Args:
        spec: the pipeline.
        log: its log.
        fields: column (or `_source`, `_partition`, `_seq`) -> value as text.

    Raises:
        ConfigurationError: no such column; more rows than anybody can look at.
    """
    unknown = [
        name for name in fields if name not in spec.columns and name not in _IDENTITY_COLUMNS
    ]
    if unknown or not fields:
        raise ConfigurationError(
            f"{spec.name} has no column {', '.join(unknown) or '(none was given)'}",
            code="row.unknown_column",
            pipeline=spec.name,
            advice=f"choose from: {', '.join((*spec.columns, *_IDENTITY_COLUMNS))}",
        )
    return _RowTracer(spec, log).trace_matching_rows(fields)


class _RowTracer:
    def __init__(self, spec: PipelineSpec, log: SlotLog) -> None:
        self.spec, self.log, self.head = spec, log, log.head()
        self.tables = TablesAtHead(spec, log, self.head)
        self.merged = read_merged_rows(spec, log, self.head)

    def trace_matching_rows(self, fields: Mapping[str, str]) -> list[RowTrace]:
        """All rows that match, each with its places."""
        user = [*self.spec.columns, *_IDENTITY_COLUMNS]
        events = self._select_matching(
            self.tables.read_rows(
                EVENTS, [*user, "position", "section", "_late", SPLICE_COLUMN, "_epoch"]
            ),
            fields,
        )
        late = self._select_matching(
            self.tables.read_rows(
                LATE, [*user, "output", "reason", "lateness_us", "frontier", "_epoch"]
            ),
            fields,
        )
        asked = {
            request.id: (request, [read_data_file(self.log, f) for f in request.row_files()])
            for request in self._list_row_requests()
        }
        found: dict[RowIdentity, dict[str, Any]] = {}
        tables = [
            events,
            late,
            *(self._select_matching(t, fields) for _, some in asked.values() for t in some),
        ]
        for table in tables:
            for who, row in zip(iterate_identities(table), table.to_pylist(), strict=True):
                found.setdefault(who, {name: row[name] for name in self.spec.columns})
        dead = self._match_dead_rows(fields)
        for who, row in dead.items():
            found.setdefault(who, {"row": row["row"]})
        if len(found) > _MAX_ROWS:
            raise ConfigurationError(
                f"{len(found)} rows of {self.spec.name} match; only {_MAX_ROWS} can be followed at"
                " a time",
                code="row.too_many",
                pipeline=self.spec.name,
                advice="give more fields, for example the event time",
            )
        return [
            self._trace_row(who, values, events, late, dead, asked)
            for who, values in sorted(found.items())
        ]

    def _list_row_requests(self) -> list[Any]:
        return [
            request
            for request in list_splice_requests(self.log.store, self.spec.name)
            if request.origin != "attachment"
        ]

    def _select_matching(self, table: Any, fields: Mapping[str, str]) -> Any:
        with open_database() as db:
            db.register("rows", table)
            kinds = {name: kind for name, kind, *_ in db.execute("describe rows").fetchall()}
            same = " and ".join(f'"{name}" = cast(? as {kinds[name]})' for name in fields)
            try:
                return db.sql(
                    f"select * from rows where {same}", params=list(fields.values())
                ).to_arrow_table()
            except Exception as error:
                raise ConfigurationError(
                    f"the values do not fit the columns: {str(error).splitlines()[0]}",
                    code="row.bad_value",
                    pipeline=self.spec.name,
                    advice="times in ISO form, numbers plain",
                ) from error

    def _match_dead_rows(self, fields: Mapping[str, str]) -> dict[RowIdentity, dict[str, Any]]:
        """Dead rows are kept as text: they match when every value stands in it."""
        table = self.tables.read_rows(
            DEAD_LETTERS, ["reason", "detail", "object", "row", *_IDENTITY_COLUMNS, "_epoch"]
        )
        table = table.filter(pc.is_valid(table["row"]))
        rows = zip(iterate_identities(table), table.to_pylist(), strict=True)
        plain = {name: value for name, value in fields.items() if name not in _IDENTITY_COLUMNS}
        own = {name: value for name, value in fields.items() if name in _IDENTITY_COLUMNS}
        return {
            who: row
            for who, row in rows
            if all(value in row["row"] for value in plain.values())
            and all(str(row[n]) == v for n, v in own.items())
        }

    def _trace_row(
        self,
        who: RowIdentity,
        values: dict[str, Any],
        events: Any,
        late: Any,
        dead: Any,
        asked: Any,
    ) -> RowTrace:
        places = [
            *self._locate_in_dead_letters(who, dead),
            *self._locate_in_late(who, late),
            *self._locate_in_requests(who, asked),
        ]
        places += self._locate_in_events(who, events)
        ticks = self._compute_ticks(who, values)
        if ticks is not None:
            places += [
                place
                for name in self.spec.windows
                for place in self._locate_in_window(name, who, values, ticks, late, dead)
            ]
        plain = {
            name: value.isoformat() if hasattr(value, "isoformat") else value
            for name, value in values.items()
        }
        time = format_instant(ticks[0]) if ticks else None
        return RowTrace(
            source=who[0],
            partition=who[1],
            seq=who[2],
            event_time=time,
            values=plain,
            places=places,
        )

    def _compute_ticks(self, who: RowIdentity, values: dict[str, Any]) -> tuple[int, int] | None:
        if "row" in values and "row" not in self.spec.columns:
            return None
        with open_database() as db:
            db.register("one", pa.Table.from_pylist([{**values, "_source": who[0]}]))
            start, end = db.execute(
                f"select {build_time_expression(self.spec)},"
                f" {build_time_expression(self.spec, 'end_time')} from one"
            ).fetchall()[0]
        return (start, start + 1 if end is None else end)

    def _locate_in_dead_letters(
        self, who: RowIdentity, dead: Mapping[RowIdentity, dict[str, Any]]
    ) -> list[RowLocation]:
        if who not in dead:
            return []
        row = dead[who]
        facts = {
            "reason": row["reason"],
            "detail": row["detail"],
            "object": row["object"],
            "epoch": row["_epoch"],
        }
        return [RowLocation(output=DEAD_LETTERS, state="dead letter", detail=facts)]

    def _locate_in_late(self, who: RowIdentity, late: Any) -> list[RowLocation]:
        found = []
        for other, row in zip(iterate_identities(late), late.to_pylist(), strict=True):
            if other == who:
                state = (
                    "late, merged since" if (who, row["output"]) in self.merged.pairs else "late"
                )
                facts = {
                    "output": row["output"],
                    "reason": row["reason"],
                    "lateness_s": (row["lateness_us"] or 0) / 1_000_000,
                }
                found.append(
                    RowLocation(
                        output=LATE,
                        state=state,
                        detail={**facts, "missed": row["frontier"], "epoch": row["_epoch"]},
                    )
                )
        return found

    def _locate_in_requests(self, who: RowIdentity, asked: Mapping[str, Any]) -> list[RowLocation]:
        found = []
        segments = find_merge_segments(self.head)
        for request, tables in asked.values():
            outputs = [
                o
                for t in tables
                for other, o in zip(iterate_identities(t), t["_outputs"].to_pylist(), strict=True)
                if other == who
            ]
            for names in outputs:
                facts = {
                    "request": request.id,
                    "outputs": names,
                    "who": request.who,
                    "why": request.why,
                }
                if request.id in segments:
                    facts["checkpoint"] = segments[request.id].extra["checkpoint"]
                found.append(
                    RowLocation(
                        output="request",
                        state=resolve_request_state(self.log, request, self.head),
                        detail=facts,
                    )
                )
        return found

    def _locate_in_events(self, who: RowIdentity, events: Any) -> list[RowLocation]:
        found = []
        for other, row in zip(iterate_identities(events), events.to_pylist(), strict=True):
            if other == who:
                facts = {
                    "section": row["section"],
                    "epoch": row["_epoch"],
                    "flagged_late": bool(row["_late"]),
                }
                facts |= {"position": self._find_position(who, row), "request": row[SPLICE_COLUMN]}
                state = "inserted" if row[SPLICE_COLUMN] else "released"
                found.append(
                    RowLocation(
                        output=EVENTS,
                        state=state,
                        detail={k: v for k, v in facts.items() if v is not None},
                    )
                )
        return found

    def _find_position(self, who: RowIdentity, row: Mapping[str, Any]) -> int | None:
        """The current one, from the published table.

        Of a row that is not published yet it is not known.
        """
        columns = ("position", *_IDENTITY_COLUMNS)
        table = scan_table(
            self.spec, self.log.store, EVENTS, columns=columns, since=row["_epoch"] - 1
        )
        return next(
            (
                p
                for p, other in zip(
                    table["position"].to_pylist(), iterate_identities(table), strict=True
                )
                if other == who
            ),
            None,
        )

    def _locate_in_window(
        self,
        name: str,
        who: RowIdentity,
        values: dict[str, Any],
        ticks: tuple[int, int],
        late: Any,
        dead: Any,
    ) -> list[RowLocation]:
        """The results that the row is counted in, in every revision since."""
        merged = (who, name) in self.merged.pairs
        if not merged and (who in dead or self._is_late_for(name, who, late)):
            return [
                RowLocation(
                    output=name, state="missing", detail={"why": "late or never read; not merged"}
                )
            ]
        edges = self.spec.sources[who[0]].edges if who[0] in self.spec.sources else None
        if edges is not None and values.get(edges.kind) in (edges.start, edges.end):
            why = {
                edges.start: "counts in each window that closes until its end",
                edges.end: "ends what is open under its keys",
            }
            return [RowLocation(output=name, state="edge", detail={"why": why[values[edges.kind]]})]
        window = self.spec.windows[name]
        key = tuple(who[0] if k == "_source" else values.get(k) for k in window.keys)
        wanted = assign_windows(window, TouchingRow(key, *ticks))
        table = self.tables.read_rows(
            name, time="window_end", spans=[(wanted[0][0], wanted[-1][1] + 1)] if wanted else []
        )
        if window.kind is WindowKind.SESSION:
            table = self.tables.read_rows(name)
        bounds = [table[c].cast(pa.int64()).to_pylist() for c in ("window_start", "window_end")]
        found = []
        for row, start, end in zip(table.to_pylist(), *bounds, strict=True):
            inside = (
                start <= ticks[0] < end
                if window.kind is WindowKind.SESSION
                else (start, end) in wanted
            )
            if inside and tuple(row[k] for k in window.keys) == key:
                facts = {
                    "window_start": format_instant(start),
                    "revision": row["revision"],
                    "epoch": row["_epoch"],
                }
                found.append(
                    RowLocation(output=name, state="merged" if merged else "counted", detail=facts)
                )
        waiting = RowLocation(
            output=name, state="waits", detail={"why": "the window has no result yet"}
        )
        return self._keep_since_merge(name, who, found) if merged else found or [waiting]

    def _keep_since_merge(
        self, name: str, who: RowIdentity, found: list[RowLocation]
    ) -> list[RowLocation]:
        """Of a merged row only the revisions from its merge on."""
        for segment in find_merge_segments(self.head).values():
            if "stream" in segment.extra:
                continue
            rows = read_data_file(self.log, segment)
            for other, outputs in zip(
                iterate_identities(rows), rows["_outputs"].to_pylist(), strict=True
            ):
                if other == who and name in (outputs or ()):
                    slot = int(str(segment.extra["checkpoint"]).split("-")[1])
                    return [place for place in found if place.detail["epoch"] >= slot]
        return found

    def _is_late_for(self, name: str, who: RowIdentity, late: Any) -> bool:
        rows = zip(
            iterate_identities(late),
            late["output"].to_pylist(),
            late["reason"].to_pylist(),
            strict=True,
        )
        return any(
            other == who and (output == name or reason in SET_ASIDE_REASONS)
            for other, output, reason in rows
        )
