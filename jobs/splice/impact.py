"""The impact report: what a merge will change, for whoever decides; the digest binds a decision to exactly this effect.

Computed from the same `Plan` that is merged. After the merge the digest is taken again, from the files that were sealed, and
the two must be equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.time import format_instant
from tidegate.jobs.splice.plan import Change, Plan

__all__ = ["Impact", "TableImpact", "effect_digest", "impact_of"]

_SHOWN = 50  # changes listed one by one in text and on the page; the JSON has them all up to `_LISTED`
_LISTED = 5000
_OWN = ("_timeline", "_epoch")  # differ between a plan and its merge


class TableImpact(BaseModel):
    """What happens to one table.

    Attributes:
        added, changed, removed: rows for a reader of current results (events: rows).
        moved: events only: rows that get another position, without being written again.
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
        cost: rows read for it and rows that would be written; seconds it took to compute, which is what the merge takes.
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


def impact_of(spec: PipelineSpec, plan: Plan, seconds: float) -> Impact:
    """The report of a plan."""
    tables = [_window(spec, name, changes) for name, changes in plan.changes.items()]
    if plan.events is not None:
        tables.insert(0, _events(spec, plan))
    written = sum(t.num_rows for t in _written(plan).values())
    return Impact(
        pipeline=spec.name,
        request=plan.request.id,
        rows=plan.rows.num_rows,
        already=plan.already,
        head=str(plan.head.checkpoint) if plan.head.checkpoint else None,
        tables=tables,
        cost={"rows_read": plan.rows_read, "rows_written": written, "seconds": round(seconds, 3)},
        digest=effect_digest(_written(plan)),
    )


def effect_digest(tables: Mapping[str, Any]) -> str:
    """SHA-256 over the rows of some tables, whatever their order, without what only the moment of the merge decides."""
    found = hashlib.sha256()
    for name in sorted(tables):
        table = tables[name].drop_columns([c for c in _OWN if c in tables[name].column_names])
        columns = sorted(table.column_names)
        lines = sorted(json.dumps([row[c] for c in columns], default=str) for row in table.to_pylist())
        for line in (name, *columns, *lines):
            found.update(line.encode())
            found.update(b"\n")
    return found.hexdigest()


def _written(plan: Plan) -> dict[str, Any]:
    events = {} if plan.events is None else {EVENTS: plan.events}
    return {**events, **{name: table for name, table in plan.tables.items() if table.num_rows}}


def _events(spec: PipelineSpec, plan: Plan) -> TableImpact:
    record, count = plan.head.record, plan.events.num_rows
    time = next(iter(spec.sources.values())).event_time
    times = plan.events[time].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
    behind = int(record.notes["next_position"]) - (plan.first_position or 0) if record else 0
    rows = (
        plan.events.slice(0, _LISTED).select([c for c in plan.events.column_names if c not in ("_late", "_splice")]).to_pylist()
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


def _window(spec: PipelineSpec, name: str, changes: Iterable[Change]) -> TableImpact:
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
            for c in changes[:_LISTED]
        ],
    )
