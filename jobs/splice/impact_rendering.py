"""The impact report as words and as one self-contained page with a picture, for whoever has to decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.jobs.spec.pipeline import EVENTS
from tidegate.jobs.splice.impact import Impact, TableImpact
from tidegate.time_units import format_instant

MAX_SHOWN_CHANGES = 30
"""Changes listed one by one for people; JSON has more."""
_WIDTH, _HEIGHT, _BARS = 760, 120, 60

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b2733}}
h1{{font-size:1.4rem}}h2{{font-size:1.1rem;margin-top:2rem}}table{{border-collapse:collapse;width:100%}}
th,td{{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #dde3ea;vertical-align:top}}td.n{{text-align:right}}
.added{{color:#1a7f4b}}.changed{{color:#9a5b00}}.removed{{color:#b3261e}}code{{background:#f2f5f8;padding:.1rem .3rem}}
svg{{width:100%;height:auto}}</style><h1>{title}</h1>{body}</html>
"""


def render_text(request: SpliceRequest, impact: Impact) -> str:
    """A few lines: who asks for what, and what would happen."""
    head = (
        f"splice request {impact.request} of {impact.pipeline}: {impact.rows:,} rows from"
        f" {request.origin.replace('_', ' ')}"
    )
    lines = [
        head
        + (f", asked for by {request.who}" if request.who else "")
        + (f": {request.why}" if request.why else "")
    ]
    if impact.already:
        lines.append(f"  merged before, left out: {impact.already:,}")
    lines += [f"  {_describe_table(table)}" for table in impact.tables] or [
        "  nothing is left to merge"
    ]
    cost = impact.cost
    lines.append(
        f"  cost: {cost['rows_read']:,.0f} rows read, {cost['rows_written']:,.0f} written, about"
        f" {cost['seconds']:.1f} s"
    )
    lines.append(f"  digest {impact.digest}")
    return "\n".join(lines)


def format_change(change: dict[str, Any]) -> str:
    """One changed result, or one changed row of a stream."""
    if "id" in change:
        return f"{change['id']}  {_format_difference(change)}"
    key = ", ".join(f"{k}={v}" for k, v in change["key"].items())
    old, new = change["old"], change["new"]
    values = [
        f"{n}: {v}" if old is None else f"{n}: {old[n]} -> {v}"
        for n, v in new.items()
        if old is None or old[n] != v
    ]
    place = " ".join(part for part in (key, change["window_start"]) if part)
    return f"{place}  {', '.join(values)}  (revision {change['revision']})"


def _format_difference(change: dict[str, Any]) -> str:
    """What is different between two versions of a row."""
    old, new = change["old"], change["new"]
    if old is None or new is None:
        word, row = ("added", new) if old is None else ("removed", old)
        return f"{word}: {', '.join(f'{n}: {v}' for n, v in row.items())}"
    return ", ".join(f"{n}: {old[n]} -> {v}" for n, v in new.items() if old[n] != v)


def select_listable_changes(table: TableImpact) -> list[dict[str, Any]]:
    """The changes that can be told one by one: results of windows and rows of streams."""
    return [change for change in table.changes if "window_start" in change or "id" in change]


def render_html(request: SpliceRequest, impact: Impact) -> str:
    """The page."""
    title = f"Splice request {impact.request} of {impact.pipeline}"
    who = (
        f"{request.origin.replace('_', ' ')}, asked for by {request.who} at"
        f" {format_instant(request.created_at)}"
    )
    body = [
        f"<p>{impact.rows:,} rows from"
        f" {escape(who)}{': ' + escape(request.why) if request.why else ''}</p>"
    ]
    body.append(_render_charts(impact))
    body.append(_render_summary(impact))
    body += [_render_changes(table) for table in impact.tables]
    body.append(
        f"<p>{escape(render_text(request, impact).splitlines()[-2].strip())}<br>digest"
        f" <code>{impact.digest}</code></p>"
    )
    return _PAGE.format(title=escape(title), body="\n".join(body))


def _describe_table(table: TableImpact) -> str:
    parts = [
        f"{count:,} {word}"
        for count, word in (
            (table.added, "added"),
            (table.changed, "changed"),
            (table.removed, "removed"),
        )
        if count
    ]
    again = ", none is written again" if table.table == EVENTS else ""
    moved = f"; {table.moved:,} rows behind them move{again}" if table.moved else ""
    where = f", {table.first} to {table.last}" if table.first else ""
    return f"{table.table}: {', '.join(parts) or 'nothing changes'}{where}{moved}"


def _render_summary(impact: Impact) -> str:
    head = "<tr><th>table<th>added<th>changed<th>removed<th>moved<th>from<th>to</tr>"
    rows = (
        f'<tr><td>{escape(t.table)}<td class="n added">{t.added:,}<td class="n'
        f' changed">{t.changed:,}<td class="n removed">{t.removed:,}<td'
        f' class="n">{t.moved:,}<td>{t.first or ""}<td>{t.last or ""}</tr>'
        for t in impact.tables
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _render_changes(table: TableImpact) -> str:
    shown = select_listable_changes(table)[:MAX_SHOWN_CHANGES]
    if not shown:
        return ""
    if "id" in shown[0]:
        items = "".join(
            f"<li><code>{escape(c['id'])}</code> {escape(_format_difference(c))}" for c in shown
        )
        more = table.added + table.changed + table.removed - len(shown)
        return f"<h2>{escape(table.table)}</h2><ul>{items}</ul>" + (
            f"<p>and {more:,} more</p>" if more > 0 else ""
        )
    rows = "".join(_render_window_change(change) for change in shown)
    more = table.added + table.changed - len(shown)
    rest = f"<p>and {more:,} more</p>" if more > 0 else ""
    return f"<h2>{escape(table.table)}</h2><table><tr><th>key<th>window<th>old<th>new<th>rows</tr>{rows}</table>{rest}"


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
    """Where in time the changes lie: one bar chart per table, over the same axis."""
    starts = {t.table: _list_change_times(t) for t in impact.tables}
    every = [s for found in starts.values() for s, _ in found]
    if not every:
        return ""
    low, high = min(every), max(every)
    charts = [
        _render_table_chart(name, found, low, high, n)
        for n, (name, found) in enumerate(starts.items())
    ]
    height = len(charts) * (_HEIGHT + 10) + 20
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
    """(time, whether something is replaced) of each change."""
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


def _render_table_chart(
    name: str, found: Sequence[tuple[str, bool]], low: str, high: str, number: int
) -> str:
    from datetime import datetime

    begin, end = datetime.fromisoformat(low).timestamp(), datetime.fromisoformat(high).timestamp()
    width = max(end - begin, 1.0)
    counts = [[0, 0] for _ in range(_BARS)]
    for text, changed in found:
        place = int((datetime.fromisoformat(text).timestamp() - begin) / width * (_BARS - 1))
        counts[place][changed] += 1
    base, most = (number + 1) * (_HEIGHT + 10) - 10, max(sum(pair) for pair in counts) or 1
    step = _WIDTH / _BARS
    bars = "".join(
        _render_bar(n * step, base, step, pair, most) for n, pair in enumerate(counts) if sum(pair)
    )
    line = f'<line x1="0" x2="{_WIDTH}" y1="{base}" y2="{base}" stroke="#9aa7b4"/>'
    return (
        f'{bars}{line}<text x="0" y="{base - _HEIGHT + 12}" fill="#51606e">{escape(name)}: at most'
        f" {most:,} in a bar</text>"
    )


def _render_bar(x: float, base: int, step: float, pair: Iterable[int], most: int) -> str:
    parts, y = [], float(base)
    for count, colour in zip(pair, ("#1a7f4b", "#d08a1d"), strict=True):
        height = count / most * (_HEIGHT - 20)
        y -= height
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{height:.1f}"'
            f' fill="{colour}"/>'
            if count
            else ""
        )
    return "".join(parts)
