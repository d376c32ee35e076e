"""The impact report.

What a merge will change, for whoever decides; the digest binds a decision to exactly this effect.

Computed from the same `MergePlan` that is merged. After the merge the digest is taken again, from
the files that were sealed, and the two must be equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from tidegate.jobs.sinks.row_positions import ARRIVAL_SLOT_COLUMN
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.splice.merge_plan import MergePlan, WindowChange
from tidegate.jobs.splice.stream_history import ARRIVAL_SLOT, StreamChange
from tidegate.jobs.streams.row_history import PROVENANCE_FIELDS
from tidegate.time_units import format_instant

# Changes listed one by one in text and on the page; the JSON has them all up to `_MAX_CHANGES`.
_SHOWN = 50
_MAX_CHANGES = 5000
_PROVENANCE_COLUMNS = ("_timeline", "_epoch")  # differ between a plan and its merge


class TableImpact(BaseModel):
    """What happens to one table.

    Attributes:
        added, changed, removed: rows for a reader of current results (events: rows).
        moved: rows that get another position and stay the same otherwise; of events they are not
            written again.
        unchanged: results whose rows were looked at and stay as they are.
        first, last: event time range, ISO 8601.
        changes: key, window, old and new values; the first ones.
    """

    model_config = ConfigDict(frozen=True)

    table: str
    added: int = 0
    changed: int = 0
    removed: int = 0
    moved: int = 0
    first: str | None = None
    last: str | None = None
    changes: list[dict[str, Any]] = []


class Impact(BaseModel):
    """The report.

    Attributes:
        digest: of every row that the merge would write; equal digests mean equal effects.
        already: (row, output) pairs of the request that were merged before.
        cost: rows read for it and rows that would be written; seconds it took to compute, which is
            what the merge takes.
    """

    model_config = ConfigDict(frozen=True)

    pipeline: str
    request: str
    rows: int
    already: int
    head: str | None
    tables: list[TableImpact]
    cost: dict[str, float]
    digest: str


def make_impact_report(spec: PipelineSpec, plan: MergePlan, seconds: float) -> Impact:
    """The report of a plan."""
    tables = [_summarize_window(spec, name, changes) for name, changes in plan.changes.items()]
    if plan.streams is not None:
        tables += [_summarize_stream(name, change) for name, change in plan.streams.changes.items()]
    if plan.events is not None:
        tables.insert(0, _summarize_events(spec, plan))
    written = sum(t.num_rows for t in _collect_written_tables(plan).values())
    return Impact(
        pipeline=spec.name,
        request=plan.request.id,
        rows=plan.rows.num_rows,
        already=plan.already,
        head=str(plan.head.checkpoint) if plan.head.checkpoint else None,
        tables=tables,
        cost={"rows_read": plan.rows_read, "rows_written": written, "seconds": round(seconds, 3)},
        digest=digest_plan(plan, plan.head.slot),
    )


def digest_plan(plan: MergePlan, upto: int) -> str:
    """Digest of the effect.

    On streams of that on the rows which had come by a slot, for they go on.
    """
    return digest_tables(_collect_written_tables(plan), upto if plan.streams is not None else None)


def parse_digest_slot(digest: str) -> int | None:
    """The slot up to which a digest tells the effect on streams."""
    slot = digest.partition("@")[2]
    return int(slot) if slot.isdigit() else None


def digest_tables(tables: Mapping[str, Any], upto: int | None = None) -> str:
    """SHA-256 over the rows of some tables, whatever their order, without what only the moment of the merge decides."""
    found = hashlib.sha256()
    for name in sorted(tables):
        if upto is not None and name == REJECTIONS:
            continue  # a log of what was refused; the streams tell the same
        table = tables[name].drop_columns(
            [c for c in _PROVENANCE_COLUMNS if c in tables[name].column_names]
        )
        if upto is not None and ARRIVAL_SLOT_COLUMN in table.column_names:
            table = table.filter(pc.less_equal(table[ARRIVAL_SLOT_COLUMN], upto))
            if table.num_rows == 0:
                continue
        columns = sorted(table.column_names)
        lines = sorted(
            json.dumps([row[c] for c in columns], default=str) for row in table.to_pylist()
        )
        for line in (name, *columns, *lines):
            found.update(line.encode())
            found.update(b"\n")
    return found.hexdigest() + ("" if upto is None else f"@{upto}")


def _collect_written_tables(plan: MergePlan) -> dict[str, Any]:
    events = {} if plan.events is None else {EVENTS: plan.events}
    return {**events, **{name: table for name, table in plan.tables.items() if table.num_rows}}


def _summarize_events(spec: PipelineSpec, plan: MergePlan) -> TableImpact:
    record, count = plan.head.record, plan.events.num_rows
    time = spec.event_time_column
    times = plan.events[time].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    behind = record.next_position - (plan.first_position or 0) if record else 0
    rows = (
        plan.events.slice(0, _MAX_CHANGES)
        .select([c for c in plan.events.column_names if c not in ("_late", "_splice")])
        .to_pylist()
    )
    changes = [{"behind_position": row.pop("position"), "old": None, "new": row} for row in rows]
    return TableImpact(
        table=EVENTS,
        added=count,
        moved=max(0, behind),
        first=format_instant(min(times)),
        last=format_instant(max(times)),
        changes=changes,
    )


def _summarize_stream(name: str, change: StreamChange) -> TableImpact:
    """Rows are compared by who they are; one that only stands elsewhere has moved."""
    old, new = (_index_by_id(table) for table in (change.old, change.rows))
    added = [who for who in new if who not in old]
    removed = [who for who in old if who not in new]
    changed = [who for who in new if who in old and new[who][1:] != old[who][1:]]
    moved = sum(
        who in old and new[who][1:] == old[who][1:] and new[who][0] != old[who][0] for who in new
    )
    times = [
        t
        for t in (*(new[w][1] for w in added + changed), *(old[w][1] for w in removed))
        if t is not None
    ]
    return TableImpact(
        table=name,
        added=len(added),
        changed=len(changed),
        removed=len(removed),
        moved=moved,
        first=format_instant(min(times)) if times else None,
        last=format_instant(max(times)) if times else None,
        changes=[
            {
                "id": who,
                "old": _format_stream_row(old.get(who)),
                "new": _format_stream_row(new.get(who)),
            }
            for who in (*added, *changed, *removed)
        ][:_MAX_CHANGES],
    )


def _index_by_id(table: Any) -> dict[str, tuple[Any, ...]]:
    """Row -> position, stamp, values."""
    values = table.drop_columns(
        [
            c
            for c in (*PROVENANCE_FIELDS, "position", "stream_time", ARRIVAL_SLOT)
            if c in table.column_names
        ]
    )
    places = (table["position"].to_pylist(), table["stream_time"].to_pylist())
    return dict(
        zip(table["_id"].to_pylist(), zip(*places, values.to_pylist(), strict=True), strict=True)
    )


def _format_stream_row(row: tuple[Any, ...] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    position, stamp, values = row
    return {"position": position, "stream_time": format_instant(stamp), **values}


def _summarize_window(
    spec: PipelineSpec, name: str, changes: Iterable[WindowChange]
) -> TableImpact:
    window, changes = spec.windows[name], list(changes)
    keys = window.keys
    return TableImpact(
        table=name,
        added=sum(c.old is None for c in changes),
        changed=sum(c.old is not None for c in changes),
        removed=sum(len(c.replaced) for c in changes),
        first=format_instant(min(c.start for c in changes)) if changes else None,
        last=format_instant(max(c.end for c in changes)) if changes else None,
        changes=[
            {
                "key": dict(zip(keys, c.key, strict=True)),
                "window_start": format_instant(c.start),
                "window_end": format_instant(c.end),
                "rows": c.rows,
                "revision": c.new["revision"],
                "old": {a: c.old[a] for a in window.aggregates} if c.old else None,
                "new": {a: c.new[a] for a in window.aggregates},
                "replaces": c.new["replaces"],
            }
            for c in changes[:_MAX_CHANGES]
        ],
    )
