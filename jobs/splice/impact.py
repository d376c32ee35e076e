"""The impact report: what a merge will change, for the person who decides.

The report and the merge use the same `MergePlan`. The digest of the report binds a decision to
exactly this effect: after the merge it is computed again from the files that were sealed, and both
must be equal.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.jobs.engine.arrow_tables import convert_to_ticks, list_rows
from tidegate.jobs.sinks.output_tables import ARRIVAL_SLOT_COLUMN, SPLICE_COLUMN
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS
from tidegate.jobs.streams.stream_rows import PROVENANCE_FIELDS
from tidegate.json_types import JsonObject
from tidegate.time_units import format_instant

from .merge_plan import MergePlan
from .stream_history import ARRIVAL_SLOT, StreamChange
from .window_merge import WindowChange

# A person reads the first changes; the counts cover all of them.
_MAX_CHANGES = 5000  # changes of a table that the JSON lists
_PROVENANCE_COLUMNS = ("_timeline", "_epoch")  # differ between a plan and its merge


class TableImpact(BaseModel):
    """What a merge does to one table.

    Attributes:
        table: name of the table.
        added, changed, removed: rows as a reader of current results sees them.
        moved: rows that only get another position; moved events are not written again.
        first, last: event time range of the changes, ISO 8601; None without changes.
        changes: the first 5,000 changes: window results with key, window, old and new values, rows
            of a stream with id, old and new, events with the position that they follow.
    """

    model_config = ConfigDict(frozen=True)

    table: str
    added: int = 0
    changed: int = 0
    removed: int = 0
    moved: int = 0
    first: str | None = None
    last: str | None = None
    changes: list[JsonObject] = []


class Impact(BaseModel):
    """The impact report of one request at one head of the log.

    Attributes:
        pipeline, request: names.
        rows: rows that would be merged.
        already: (row, output) pairs of the request that were merged before.
        head: the checkpoint at the head; None if it was retired.
        tables: what happens to each table.
        cost: `rows_read`, `rows_written` (that would be), and `seconds` for the plan; the merge
            takes about as long.
        digest: hash of every row that the merge would write.
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
    """Return the report of a plan that took `seconds` to compute."""
    tables = [_summarize_window(spec, name, changes) for name, changes in plan.changes.items()]
    if plan.streams is not None:
        tables += [_summarize_stream(name, change) for name, change in plan.streams.changes.items()]
    if plan.events is not None:
        # Events first: the other changes follow from them.
        tables.insert(0, _summarize_events(spec, plan))
    written = sum(t.num_rows for t in plan.tables.values())
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
    """Return the digest of all rows that the merge would write.

    Streams keep growing, so of a merge into streams only rows up to slot `upto` are hashed, and the
    slot is appended to the digest as ``@slot``.
    """
    return digest_tables(plan.tables, upto if plan.streams is not None else None)


def parse_digest_slot(digest: str) -> int | None:
    """Return the slot that a digest names; None for a digest without streams."""
    slot = digest.partition("@")[2]
    return int(slot) if slot.isdigit() else None


def digest_tables(tables: Mapping[str, Any], upto: int | None = None) -> str:
    """Return SHA-256 over the rows of tables, in any order and without their provenance.

    Args:
        tables: name -> rows.
        upto: of streams, only rows that arrived up to this slot; see `digest_plan`.
    """
    digest = hashlib.sha256()
    for name in sorted(tables):
        if upto is not None and name == REJECTIONS:
            continue  # rejections follow from the streams, but come at any time
        table = tables[name]
        # Rows that arrive after the report was made were not seen by who approved it.
        if upto is not None and ARRIVAL_SLOT_COLUMN in table.column_names:
            table = table.filter(pc.less_equal(table[ARRIVAL_SLOT_COLUMN], upto))
            if table.num_rows == 0:
                continue
        # Neither the order of columns nor of rows is part of an effect.
        columns = sorted(c for c in table.column_names if c not in _PROVENANCE_COLUMNS)
        lines = sorted(
            json.dumps([row[c] for c in columns], default=str) for row in list_rows(table)
        )
        for line in (name, *columns, *lines):
            digest.update(line.encode())
            digest.update(b"\n")
    return digest.hexdigest() + ("" if upto is None else f"@{upto}")


def _summarize_events(spec: PipelineSpec, plan: MergePlan) -> TableImpact:
    newest, time = plan.head.record, spec.event_time_column
    ticks = convert_to_ticks(plan.events[time]).to_pylist()
    moved = newest.next_position - (plan.first_position or 0) if newest else 0
    columns = [c for c in plan.events.column_names if c not in ("_late", SPLICE_COLUMN)]
    rows = list_rows(plan.events.slice(0, _MAX_CHANGES).select(columns))
    return TableImpact(
        table=EVENTS,
        added=plan.events.num_rows,
        moved=max(0, moved),
        **_format_time_range(ticks),
        changes=[{"behind_position": row.pop("position"), "old": None, "new": row} for row in rows],
    )


def _format_time_range(ticks: Sequence[int]) -> JsonObject:
    if not ticks:
        return {}
    return {"first": format_instant(min(ticks)), "last": format_instant(max(ticks))}


def _summarize_stream(name: str, change: StreamChange) -> TableImpact:
    """Compare rows by `_id`; a row that only has another position has moved."""
    old, new = _index_by_id(change.old), _index_by_id(change.rows)
    added = [who for who in new if who not in old]
    removed = [who for who in old if who not in new]
    kept = [(who, old[who], new[who]) for who in new if who in old]
    changed = [who for who, before, after in kept if before[1:] != after[1:]]
    moved = [who for who, before, after in kept if before[1:] == after[1:] and before != after]
    stamps = [*(new[who][1] for who in added + changed), *(old[who][1] for who in removed)]
    return TableImpact(
        table=name,
        added=len(added),
        changed=len(changed),
        removed=len(removed),
        moved=len(moved),
        **_format_time_range([stamp for stamp in stamps if stamp is not None]),
        changes=[
            {
                "id": who,
                "old": _format_stream_row(old.get(who)),
                "new": _format_stream_row(new.get(who)),
            }
            for who in (*added, *changed, *removed)[:_MAX_CHANGES]
        ],
    )


def _index_by_id(rows: Any) -> dict[str, tuple[Any, ...]]:
    """Return `_id` -> position, stamp and values."""
    other = (*PROVENANCE_FIELDS, "position", "stream_time", ARRIVAL_SLOT)
    values = list_rows(rows.drop_columns([c for c in other if c in rows.column_names]))
    positions, stamps = rows["position"].to_pylist(), rows["stream_time"].to_pylist()
    facts = zip(positions, stamps, values, strict=True)
    return dict(zip(rows["_id"].to_pylist(), facts, strict=True))


def _format_stream_row(row: tuple[Any, ...] | None) -> JsonObject | None:
    if row is None:
        return None
    position, stamp, values = row
    return {"position": position, "stream_time": format_instant(stamp), **values}


def _summarize_window(
    spec: PipelineSpec, name: str, changes: Sequence[WindowChange]
) -> TableImpact:
    window = spec.windows[name]
    return TableImpact(
        table=name,
        added=sum(c.old is None for c in changes),
        changed=sum(c.old is not None for c in changes),
        removed=sum(c.replaced for c in changes),
        **_format_time_range([tick for c in changes for tick in (c.at.start, c.at.end)]),
        changes=[
            {
                "key": dict(zip(window.keys, c.at.key, strict=True)),
                "window_start": format_instant(c.at.start),
                "window_end": format_instant(c.at.end),
                "rows": c.rows,
                "revision": c.new["revision"],
                "old": {a: c.old[a] for a in window.aggregates} if c.old else None,
                "new": {a: c.new[a] for a in window.aggregates},
                "replaces": c.new["replaces"],
            }
            for c in changes[:_MAX_CHANGES]
        ],
    )


# The report as a web page.

MAX_SHOWN_CHANGES = 30
"""Changes of a table that the page and a text list; the JSON has more."""
_BARS = 60  # of one bar chart


def render_html(request: SpliceRequest, impact: Impact) -> str:
    """Return the report as an HTML page with bar charts of the changes over event time.

    It lists at most `MAX_SHOWN_CHANGES` changes of each table.
    """
    # Only this page needs the library.
    import jinja2

    page = (resources.files("tidegate.jobs.splice") / "impact.html").read_text("utf-8")
    template = jinja2.Environment(autoescape=True).from_string(page)
    # One time axis for all charts, so that they can be compared.
    changes = {table.table: _list_change_times(table) for table in impact.tables}
    times = [time for found in changes.values() for time, _ in found]
    low, high = (min(times), max(times)) if times else ("", "")
    return template.render(
        request=request,
        impact=impact,
        asked_at=format_instant(request.created_at),
        charts={n: _count_by_bar(found, low, high) for n, found in changes.items() if times},
        low=low,
        high=high,
        most_shown=MAX_SHOWN_CHANGES,
    )


def _list_change_times(table: TableImpact) -> list[tuple[str, bool]]:
    """Return the time of each change, and whether it replaces something."""
    return [
        (str(c.get("window_start") or _find_row_time(c["new"] or c["old"])), c["old"] is not None)
        for c in table.changes
    ]


def _find_row_time(row: dict[str, Any]) -> str:
    if "stream_time" in row:
        return str(row["stream_time"])
    return next(
        str(v.isoformat()).replace("+00:00", "Z") for v in row.values() if hasattr(v, "isoformat")
    )


def _count_by_bar(changes: Sequence[tuple[str, bool]], low: str, high: str) -> list[list[int]]:
    """Return, for each bar, how many changes add a row and how many replace one."""
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (low, high))
    # At least one second, for changes that all lie at one instant.
    width = max(end - begin, 1.0)
    counts = [[0, 0] for _ in range(_BARS)]
    for text, is_replaced in changes:
        share = (datetime.fromisoformat(text).timestamp() - begin) / width
        counts[int(share * (_BARS - 1))][is_replaced] += 1
    return counts
