"""The impact report as text and as one self-contained HTML page, for the person who decides."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.splice.impact import Impact, TableImpact
from tidegate.time_units import format_instant

MAX_SHOWN_CHANGES = 30
"""Changes of a table that the text and the page list; the JSON has more."""
_WIDTH, _HEIGHT, _BARS = 760, 120, 60  # of one bar chart
_GAP = 10  # between two charts

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}}
body{{color:#1b2733}}h1{{font-size:1.4rem}}h2{{font-size:1.1rem;margin-top:2rem}}
table{{border-collapse:collapse;width:100%}}td.n{{text-align:right}}
th,td{{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #dde3ea;vertical-align:top}}
.added{{color:#1a7f4b}}.changed{{color:#9a5b00}}.removed{{color:#b3261e}}
code{{background:#f2f5f8;padding:.1rem .3rem}}svg{{width:100%;height:auto}}
</style><h1>{title}</h1>{body}</html>
"""


def render_text(request: SpliceRequest, impact: Impact) -> str:
    """Return a few lines: who asks for what, and what would change."""
    origin = request.origin.replace("_", " ")
    lines = [
        f"splice request {impact.request} of {impact.pipeline}: {impact.rows:,} rows from {origin}"
        + (f", asked for by {request.who}" if request.who else "")
        + (f": {request.why}" if request.why else "")
    ]
    if impact.already:
        lines.append(f"  merged before, left out: {impact.already:,}")
    lines += [f"  {_describe_table(table)}" for table in impact.tables] or [
        "  nothing is left to merge"
    ]
    return "\n".join([*lines, f"  {_describe_cost(impact)}", f"  digest {impact.digest}"])


def _describe_cost(impact: Impact) -> str:
    cost = impact.cost
    return (
        f"cost: {cost['rows_read']:,.0f} rows read, {cost['rows_written']:,.0f} written, about"
        f" {cost['seconds']:.1f} s"
    )


def format_change(change: dict[str, Any]) -> str:
    """Return one line for a changed window result, or for a changed row of a stream."""
    if "id" in change:
        return f"{change['id']}  {_format_difference(change)}"
    key = ", ".join(f"{k}={v}" for k, v in change["key"].items())
    old, new = change["old"], change["new"]
    values = [
        f"{n}: {v}" if old is None else f"{n}: {old[n]} -> {v}"
        for n, v in new.items()
        if old is None or old[n] != v
    ]
    window = " ".join(part for part in (key, change["window_start"]) if part)
    return f"{window}  {', '.join(values)}  (revision {change['revision']})"


def _format_difference(change: dict[str, Any]) -> str:
    """Describe the difference between two versions of a row of a stream."""
    old, new = change["old"], change["new"]
    if old is None or new is None:
        word, row = ("added", new) if old is None else ("removed", old)
        return f"{word}: {', '.join(f'{n}: {v}' for n, v in row.items())}"
    return ", ".join(f"{n}: {old[n]} -> {v}" for n, v in new.items() if old[n] != v)


def select_listable_changes(table: TableImpact) -> list[dict[str, Any]]:
    """Return the changes to list one by one: window results and rows of streams, but no events."""
    return [change for change in table.changes if "window_start" in change or "id" in change]


def render_html(request: SpliceRequest, impact: Impact) -> str:
    """Return the report as an HTML page with bar charts of the changes over event time."""
    title = f"Splice request {impact.request} of {impact.pipeline}"
    origin, asked_at = request.origin.replace("_", " "), format_instant(request.created_at)
    who = escape(f"{origin}, asked for by {request.who} at {asked_at}")
    why = f": {escape(request.why)}" if request.why else ""
    body = [
        f"<p>{impact.rows:,} rows from {who}{why}</p>",
        _render_charts(impact),
        _render_summary(impact),
        *(_render_changes(table) for table in impact.tables),
        f"<p>{escape(_describe_cost(impact))}<br>digest <code>{impact.digest}</code></p>",
    ]
    return _PAGE.format(title=escape(title), body="\n".join(body))


def _describe_table(table: TableImpact) -> str:
    counts = (table.added, "added"), (table.changed, "changed"), (table.removed, "removed")
    parts = [f"{count:,} {word}" for count, word in counts if count]
    again = ", none is written again" if table.table == EVENTS else ""
    moved = f"; {table.moved:,} rows behind them move{again}" if table.moved else ""
    where = f", {table.first} to {table.last}" if table.first else ""
    return f"{table.table}: {', '.join(parts) or 'nothing changes'}{where}{moved}"


def _render_summary(impact: Impact) -> str:
    head = "<tr><th>table<th>added<th>changed<th>removed<th>moved<th>from<th>to</tr>"
    rows = (
        f'<tr><td>{escape(t.table)}<td class="n added">{t.added:,}<td class="n changed">'
        f'{t.changed:,}<td class="n removed">{t.removed:,}<td class="n">{t.moved:,}'
        f"<td>{t.first or ''}<td>{t.last or ''}</tr>"
        for t in impact.tables
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _render_changes(table: TableImpact) -> str:
    shown = select_listable_changes(table)[:MAX_SHOWN_CHANGES]
    if not shown:
        return ""
    if "id" in shown[0]:
        total = table.added + table.changed + table.removed
        items = (
            f"<li><code>{escape(c['id'])}</code> {escape(_format_difference(c))}" for c in shown
        )
        listing = f"<ul>{''.join(items)}</ul>"
    else:
        total = table.added + table.changed
        head = "<tr><th>key<th>window<th>old<th>new<th>rows</tr>"
        listing = f"<table>{head}{''.join(map(_render_window_change, shown))}</table>"
    more = total - len(shown)
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    return f"<h2>{escape(table.table)}</h2>{listing}{rest}"


def _render_window_change(change: dict[str, Any]) -> str:
    key = ", ".join(f"{k}={v}" for k, v in change["key"].items())
    values = [
        ", ".join(f"{n}: {v}" for n, v in side.items()) if side else ""
        for side in (change["old"], change["new"])
    ]
    old, new = map(escape, values)
    kind = "changed" if change["old"] else "added"
    return (
        f'<tr><td>{escape(key)}<td>{change["window_start"]}<td>{old}<td class="{kind}">{new}<td'
        f' class="n">{change["rows"]}</tr>'
    )


def _render_charts(impact: Impact) -> str:
    """Render one bar chart per table, all over the same time axis."""
    changes = {t.table: _list_change_times(t) for t in impact.tables}
    times = [time for found in changes.values() for time, _ in found]
    if not times:
        return ""
    low, high = min(times), max(times)
    charts = [
        _render_chart(name, _count_by_bar(found, low, high), (number + 1) * (_HEIGHT + _GAP) - _GAP)
        for number, (name, found) in enumerate(changes.items())
    ]
    height = len(charts) * (_HEIGHT + _GAP) + 20
    axis = (
        f'<text x="0" y="{height - 4}">{low}</text><text x="{_WIDTH}" y="{height - 4}"'
        f' text-anchor="end">{high}</text>'
    )
    label = "where in event time the changes lie"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" font-size="11" role="img"'
        f' aria-label="{label}">{"".join(charts)}{axis}</svg>'
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


def _count_by_bar(
    changes: Sequence[tuple[str, bool]], low: str, high: str
) -> list[tuple[int, int]]:
    """Return, for each bar, how many changes add a row and how many replace one."""
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (low, high))
    width = max(end - begin, 1.0)
    counts = [[0, 0] for _ in range(_BARS)]
    for text, is_replaced in changes:
        share = (datetime.fromisoformat(text).timestamp() - begin) / width
        counts[int(share * (_BARS - 1))][is_replaced] += 1
    return [(added, replaced) for added, replaced in counts]


def _render_chart(name: str, counts: Sequence[tuple[int, int]], base: int) -> str:
    """Render one chart whose bars begin at the height `base`."""
    most = max(map(sum, counts)) or 1
    step = _WIDTH / _BARS
    bars = [
        _render_bar(number * step, base, step, count, most)
        for number, count in enumerate(counts)
        if sum(count)
    ]
    return (
        f'{"".join(bars)}<line x1="0" x2="{_WIDTH}" y1="{base}" y2="{base}" stroke="#9aa7b4"/>'
        f'<text x="0" y="{base - _HEIGHT + 12}" fill="#51606e">{escape(name)}: at most'
        f" {most:,} in a bar</text>"
    )


def _render_bar(x: float, base: int, step: float, count: tuple[int, int], most: int) -> str:
    """Render one bar, with the rows that replace others on top of those that are added."""
    parts, y = [], float(base)
    for rows, colour in zip(count, ("#1a7f4b", "#d08a1d"), strict=True):
        height = rows / most * (_HEIGHT - 20)
        y -= height
        if rows:
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{height:.1f}"'
                f' fill="{colour}"/>'
            )
    return "".join(parts)
