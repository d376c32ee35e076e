"""Where is my row? One input row through all outputs, by any of its fields; nothing is guessed, every place is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.splices import listing
from tidegate.jobs.sinks.positions import SPLICED
from tidegate.jobs.sinks.tables import read_table
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.time import format_instant
from tidegate.jobs.spec.windows import WindowKind
from tidegate.jobs.splice.base import Tables, read_file
from tidegate.jobs.splice.plan import ASIDE
from tidegate.jobs.splice.recompute import database, time_expression
from tidegate.jobs.splice.requests import state_of
from tidegate.jobs.splice.standing import Identity, identities, merged_at, segments_of
from tidegate.jobs.splice.targets import TouchingRow, bounds_of

__all__ = ["Place", "RowTrace", "trace"]

_MOST = 20  # rows followed at a time: more are no row but a query
_WHO = ("_source", "_partition", "_seq")


class Place(BaseModel):
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
    places: list[Place]


def trace(spec: PipelineSpec, log: SlotLog, fields: Mapping[str, str]) -> list[RowTrace]:
    """Follow the rows whose columns have these values.

    Args:
        spec: the pipeline.
        log: its log.
        fields: column (or `_source`, `_partition`, `_seq`) -> value as text.

    Raises:
        ConfigurationError: no such column; more rows than anybody can look at.
    """
    unknown = [name for name in fields if name not in spec.columns and name not in _WHO]
    if unknown or not fields:
        raise ConfigurationError(
            f"{spec.name} has no column {', '.join(unknown) or '(none was given)'}",
            code="row.unknown_column",
            pipeline=spec.name,
            advice=f"choose from: {', '.join((*spec.columns, *_WHO))}",
        )
    return _Tracer(spec, log).follow(fields)


class _Tracer:
    def __init__(self, spec: PipelineSpec, log: SlotLog) -> None:
        self.spec, self.log, self.head = spec, log, log.head()
        self.tables = Tables(spec, log, self.head)
        self.merged = merged_at(spec, log, self.head)
        self.time = next(iter(spec.sources.values())).event_time

    def follow(self, fields: Mapping[str, str]) -> list[RowTrace]:
        """All rows that match, each with its places."""
        user = [*self.spec.columns, *_WHO]
        events = self._matching(self.tables.rows(EVENTS, [*user, "position", "section", "_late", SPLICED, "_epoch"]), fields)
        late = self._matching(self.tables.rows(LATE, [*user, "output", "reason", "lateness_us", "frontier", "_epoch"]), fields)
        asked = {request.id: (request, [read_file(self.log, f) for f in request.files()]) for request in self._requests()}
        found: dict[Identity, dict[str, Any]] = {}
        tables = [events, late, *(self._matching(t, fields) for _, some in asked.values() for t in some)]
        for table in tables:
            for who, row in zip(identities(table), table.to_pylist(), strict=True):
                found.setdefault(who, {name: row[name] for name in self.spec.columns})
        dead = self._dead(fields)
        for who, row in dead.items():
            found.setdefault(who, {"row": row["row"]})
        if len(found) > _MOST:
            raise ConfigurationError(
                f"{len(found)} rows of {self.spec.name} match; only {_MOST} can be followed at a time",
                code="row.too_many",
                pipeline=self.spec.name,
                advice="give more fields, for example the event time",
            )
        return [self._one(who, values, events, late, dead, asked) for who, values in sorted(found.items())]

    def _requests(self) -> list[Any]:
        return [request for request in listing(self.log.store, self.spec.name) if request.origin != "attachment"]

    def _matching(self, table: Any, fields: Mapping[str, str]) -> Any:
        with database() as db:
            db.register("rows", table)
            kinds = {name: kind for name, kind, *_ in db.execute("describe rows").fetchall()}
            same = " and ".join(f'"{name}" = cast(? as {kinds[name]})' for name in fields)
            try:
                return db.sql(f"select * from rows where {same}", params=list(fields.values())).to_arrow_table()
            except Exception as error:
                raise ConfigurationError(
                    f"the values do not fit the columns: {str(error).splitlines()[0]}",
                    code="row.bad_value",
                    pipeline=self.spec.name,
                    advice="times in ISO form, numbers plain",
                ) from error

    def _dead(self, fields: Mapping[str, str]) -> dict[Identity, dict[str, Any]]:
        """Dead rows are kept as text: they match when every value stands in it."""
        table = self.tables.rows(DEAD_LETTERS, ["reason", "detail", "object", "row", *_WHO, "_epoch"])
        table = table.filter(pc.is_valid(table["row"]))
        rows = zip(identities(table), table.to_pylist(), strict=True)
        plain = {name: value for name, value in fields.items() if name not in _WHO}
        own = {name: value for name, value in fields.items() if name in _WHO}
        return {
            who: row
            for who, row in rows
            if all(value in row["row"] for value in plain.values()) and all(str(row[n]) == v for n, v in own.items())
        }

    def _one(self, who: Identity, values: dict[str, Any], events: Any, late: Any, dead: Any, asked: Any) -> RowTrace:
        places = [*self._dead_places(who, dead), *self._late_places(who, late), *self._request_places(who, asked)]
        places += self._event_places(who, events)
        ticks = self._ticks(who, values)
        if ticks is not None:
            places += [place for name in self.spec.windows for place in self._window_places(name, who, values, ticks, late, dead)]
        plain = {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in values.items()}
        time = format_instant(ticks[0]) if ticks else None
        return RowTrace(source=who[0], partition=who[1], seq=who[2], event_time=time, values=plain, places=places)

    def _ticks(self, who: Identity, values: dict[str, Any]) -> tuple[int, int] | None:
        if "row" in values and "row" not in self.spec.columns:
            return None
        with database() as db:
            db.register("one", pa.Table.from_pylist([{**values, "_source": who[0]}]))
            start, end = db.execute(
                f"select {time_expression(self.spec)}, {time_expression(self.spec, 'end_time')} from one"
            ).fetchall()[0]
        return (start, start + 1 if end is None else end)

    def _dead_places(self, who: Identity, dead: Mapping[Identity, dict[str, Any]]) -> list[Place]:
        if who not in dead:
            return []
        row = dead[who]
        facts = {"reason": row["reason"], "detail": row["detail"], "object": row["object"], "epoch": row["_epoch"]}
        return [Place(output=DEAD_LETTERS, state="dead letter", detail=facts)]

    def _late_places(self, who: Identity, late: Any) -> list[Place]:
        found = []
        for other, row in zip(identities(late), late.to_pylist(), strict=True):
            if other == who:
                state = "late, merged since" if (who, row["output"]) in self.merged.pairs else "late"
                facts = {"output": row["output"], "reason": row["reason"], "lateness_s": (row["lateness_us"] or 0) / 1_000_000}
                found.append(Place(output=LATE, state=state, detail={**facts, "missed": row["frontier"], "epoch": row["_epoch"]}))
        return found

    def _request_places(self, who: Identity, asked: Mapping[str, Any]) -> list[Place]:
        found = []
        segments = segments_of(self.head)
        for request, tables in asked.values():
            outputs = [
                o for t in tables for other, o in zip(identities(t), t["_outputs"].to_pylist(), strict=True) if other == who
            ]
            for names in outputs:
                facts = {"request": request.id, "outputs": names, "who": request.who, "why": request.why}
                if request.id in segments:
                    facts["checkpoint"] = segments[request.id].extra["checkpoint"]
                found.append(Place(output="request", state=state_of(self.log, request, self.head), detail=facts))
        return found

    def _event_places(self, who: Identity, events: Any) -> list[Place]:
        found = []
        for other, row in zip(identities(events), events.to_pylist(), strict=True):
            if other == who:
                facts = {"section": row["section"], "epoch": row["_epoch"], "flagged_late": bool(row["_late"])}
                facts |= {"position": self._position(who, row), "request": row[SPLICED]}
                state = "inserted" if row[SPLICED] else "released"
                found.append(Place(output=EVENTS, state=state, detail={k: v for k, v in facts.items() if v is not None}))
        return found

    def _position(self, who: Identity, row: Mapping[str, Any]) -> int | None:
        """The current one, from the published table; of a row that is not published yet it is not known."""
        columns = ("position", *_WHO)
        table = read_table(self.spec, self.log.store, EVENTS, columns=columns, since=row["_epoch"] - 1)
        return next((p for p, other in zip(table["position"].to_pylist(), identities(table), strict=True) if other == who), None)

    def _window_places(
        self, name: str, who: Identity, values: dict[str, Any], ticks: tuple[int, int], late: Any, dead: Any
    ) -> list[Place]:
        """The results that the row is counted in, in every revision since."""
        merged = (who, name) in self.merged.pairs
        if not merged and (who in dead or self._late_for(name, who, late)):
            return [Place(output=name, state="missing", detail={"why": "late or never read; not merged"})]
        edges = self.spec.sources[who[0]].edges if who[0] in self.spec.sources else None
        if edges is not None and values.get(edges.kind) in (edges.start, edges.end):
            why = {edges.start: "counts in each window that closes until its end", edges.end: "ends what is open under its keys"}
            return [Place(output=name, state="edge", detail={"why": why[values[edges.kind]]})]
        window = self.spec.windows[name]
        key = tuple(who[0] if k == "_source" else values.get(k) for k in window.keys)
        wanted = bounds_of(window, TouchingRow(key, *ticks))
        table = self.tables.rows(name, time="window_end", spans=[(wanted[0][0], wanted[-1][1] + 1)] if wanted else [])
        if window.kind is WindowKind.SESSION:
            table = self.tables.rows(name)
        bounds = [table[c].cast(pa.int64()).to_pylist() for c in ("window_start", "window_end")]
        found = []
        for row, start, end in zip(table.to_pylist(), *bounds, strict=True):
            inside = start <= ticks[0] < end if window.kind is WindowKind.SESSION else (start, end) in wanted
            if inside and tuple(row[k] for k in window.keys) == key:
                facts = {"window_start": format_instant(start), "revision": row["revision"], "epoch": row["_epoch"]}
                found.append(Place(output=name, state="merged" if merged else "counted", detail=facts))
        waiting = Place(output=name, state="waits", detail={"why": "the window has no result yet"})
        return self._since_merge(name, who, found) if merged else found or [waiting]

    def _since_merge(self, name: str, who: Identity, found: list[Place]) -> list[Place]:
        """Of a merged row only the revisions from its merge on."""
        for segment in segments_of(self.head).values():
            if "stream" in segment.extra:
                continue
            rows = read_file(self.log, segment)
            for other, outputs in zip(identities(rows), rows["_outputs"].to_pylist(), strict=True):
                if other == who and name in (outputs or ()):
                    slot = int(str(segment.extra["checkpoint"]).split("-")[1])
                    return [place for place in found if place.detail["epoch"] >= slot]
        return found

    def _late_for(self, name: str, who: Identity, late: Any) -> bool:
        rows = zip(identities(late), late["output"].to_pylist(), late["reason"].to_pylist(), strict=True)
        return any(other == who and (output == name or reason in ASIDE) for other, output, reason in rows)
