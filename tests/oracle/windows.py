"""The life of one window output in one epoch.

Assign, judge, join, emit, purge (semantics.md section 5).

`WindowFold` gets the live windows and the epoch's rows, and gives results, late rows and the
windows that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.oracle.aggregates import aggregate
from tests.oracle.rows import Row, adjusted
from tests.oracle.window_state import Key, Live, normalize_key
from tests.oracle.zero_rows import Gaps
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.window_specs import AggregateFunction, WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN, format_instant, saturate_ticks

Span = tuple[int, int]
Order = Callable[[Row], tuple[Any, ...]]


def spans_of(window: WindowSpec, start: int, end: int) -> list[Span]:
    """Tumbling and sliding windows that ``[start, end)`` overlaps, earliest first, clamped to
    int64.
    """
    size, slide = window.size or 0, window.period or 1
    first = (
        start - size - window.offset
    ) // slide + 1  # least n with n * slide + offset + size > start
    last = (end - 1 - window.offset) // slide
    starts = (n * slide + window.offset for n in range(first, last + 1))
    least = window.min_window_start
    return [
        (saturate_ticks(s), saturate_ticks(s + size)) for s in starts if least is None or s >= least
    ]


@dataclass
class WindowFold:
    """One epoch of one window output.

    Attributes:
        window: its spec.
        live: live windows by (key, start, end), changed in place.
        before: F before the epoch.
        after: F after it.
        order: the order of rows inside a window.
        time_columns: source -> column that `on_late: adjust` moves.
        gaps: empty windows to come, by key, for `zero_rows`; changed in place.
        late: rows that are late for this output.
        expired: (row, window) pairs that came after the purge of the window; a row may still count
            in others.
        touched: windows whose state changed in this epoch, those that are gone included.
        opened: tumbling and sliding windows that this epoch's rows opened.
        overflowed: results that lack a sum which `long` does not hold.
    """

    window: WindowSpec
    live: dict[tuple[Key, int, int], Live]
    before: int
    after: int
    order: Order
    time_columns: Mapping[str, str]
    gaps: dict[Key, Gaps] = field(default_factory=dict)
    late: list[Row] = field(default_factory=list)
    expired: list[Row] = field(default_factory=list)
    touched: dict[tuple[Key, int, int], Live] = field(default_factory=dict)
    opened: set[tuple[Key, int, int]] = field(default_factory=set)
    overflowed: int = 0

    def __post_init__(self) -> None:
        self.live = {id: w for id, w in self.live.items() if not self.purged(w.end, self.before)}

    def take(self, rows: Iterable[Row]) -> None:
        """Let the epoch's rows join, or be late."""
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(self.key_of(row), []).append(row)
        for key, group in by_key.items():
            if self.window.kind is WindowKind.SESSION:
                self._take_sessions(key, group)
            else:
                self._take_spans(key, group)

    def hold(self, edge: Row, until: int | None) -> None:
        """Let an edge count.

        An ended one in all its windows, an open one in those that close now and begin before
        `until`.
        """
        start = max(
            edge.time, self.before - (self.window.size or 0)
        )  # earlier windows were counted with it
        end = edge.end if until is None else until
        spans = spans_of(self.window, start, end) if start < end else []
        due = [span for span in spans if until is None or self.closed(span[1], self.after)]
        self._join(self.key_of(edge), edge, due)

    def key_of(self, row: Row) -> Key:
        """Values of the key columns; null is a key like any other."""
        return normalize_key(
            row.member.source if k == "_source" else row.values.get(k) for k in self.window.keys
        )

    def closed(self, end: int, frontier: int) -> bool:
        """Whether F has passed a window's end."""
        if frontier == TICK_MAX:
            return True
        return end < frontier if self.window.closes_after_end else end <= frontier

    def purged(self, end: int, frontier: int) -> bool:
        """Whether F has passed a window's end and its lateness."""
        return self.window.lateness is not None and self.closed(
            end + self.window.lateness, frontier
        )

    def emit(self) -> list[dict[str, Any]]:
        """Results of the epoch, at most one for a window. Purged windows leave `live`."""
        if self.window.zero_rows:
            self._fill()
        due = [w for w in self.live.values() if self._due(w)]
        results = [
            self._result(w) for w in sorted(due, key=lambda w: (w.end, w.start, repr(w.key)))
        ]
        self.live = {id: w for id, w in self.live.items() if not self.purged(w.end, self.after)}
        return results

    # tumbling and sliding

    def _take_spans(self, key: Key, rows: Sequence[Row]) -> None:
        for row in rows:
            spans = spans_of(self.window, row.time, row.end)
            if not spans:
                # Between two windows, or before min_window_start: no window, nothing to be late
                # for.
                continue
            self.expired += [row for _, end in spans if self.purged(end, self.before)]
            if not self._late_for(row, spans):
                self._join(key, row, spans)
            elif self.window.on_late is LatePolicy.ADJUST and row.end > self.before:
                moved = adjusted(row, self.before, self.time_columns[row.member.source])
                self._join(key, moved, spans_of(self.window, moved.time, moved.end))
            else:
                self.late.append(row)

    def _late_for(self, row: Row, spans: Sequence[Span]) -> bool:
        if self.window.late_unit == "event":
            return row.time < self.before
        ends = (
            [spans[0][1]] if self.window.late_unit == "first_window" else [end for _, end in spans]
        )
        return all(self.purged(end, self.before) for end in ends)

    def _join(self, key: Key, row: Row, spans: Iterable[Span]) -> None:
        for start, end in spans:
            if not self.purged(end, self.before):
                fresh = (key, start, end) not in self.live
                window = self.live.setdefault((key, start, end), Live(key, start, end))
                if fresh or window.id in self.opened:
                    self._opens(window, row.time)
                window.rows.append(row)
                self._touch(window)

    def _opens(self, window: Live, time: int) -> None:
        self.opened.add(window.id)
        window.opened_at = time if window.opened_at is None else min(window.opened_at, time)

    def _fill(self) -> None:
        """Make windows without rows of the gaps that F has passed."""
        size, period = self.window.size or 0, self.window.period or 1
        for key, start, _ in sorted(
            (w.id for w in self.live.values() if w.changed), key=lambda id: id[1]
        ):
            self.gaps.setdefault(key, Gaps(start, start)).reach(start, period)
        for key, gaps in self.gaps.items():
            for start in gaps.passed(
                period, lambda s: self.closed(saturate_ticks(s + size), self.after)
            ):
                self.live.setdefault(
                    (key, start, saturate_ticks(start + size)),
                    Live(key, start, saturate_ticks(start + size)),
                )

    # sessions

    def _take_sessions(self, key: Key, rows: Sequence[Row]) -> None:
        accepted = []
        for row in rows:
            if not self._late_alone(row):
                accepted.append(row)
            elif self.window.on_late is LatePolicy.ADJUST and row.end > self.before:
                accepted.append(adjusted(row, self.before, self.time_columns[row.member.source]))
            else:
                self.late.append(row)
        open_sessions = [w for w in self.live.values() if w.key == key]
        items: list[Live | Row] = [*open_sessions, *accepted]
        for group in self._components(items):
            self._settle(key, group)

    def _late_alone(self, row: Row) -> bool:
        """Judge a row before it meets other sessions."""
        if self.window.session_late == "event":
            return (
                self.window.lateness is not None and row.time + self.window.lateness < self.before
            )
        return self.window.session_late == "own" and self.purged(self._reach(row)[1], self.before)

    def _reach(self, item: Live | Row) -> Span:
        if isinstance(item, Live):
            return item.start, item.end
        return item.time, saturate_ticks(item.end - 1 + (self.window.gap or 0))

    def _components(self, items: list[Live | Row]) -> list[list[Live | Row]]:
        """Groups of sessions and rows that meet, directly or through others."""
        groups: list[list[Live | Row]] = []
        reach = TICK_MIN
        touching = self.window.session_touch == "merge"
        for item in sorted(items, key=self._reach):
            start, end = self._reach(item)
            if groups and (start < reach or (touching and start == reach)):
                groups[-1].append(item)
                reach = max(reach, end)
            else:
                groups.append([item])
                reach = end
        return groups

    def _settle(self, key: Key, group: list[Live | Row]) -> None:
        """Make one session of a group, or late rows."""
        sessions = [item for item in group if isinstance(item, Live)]
        rows = [item for item in group if isinstance(item, Row)]
        if not rows:
            return
        start, end = min(self._reach(i)[0] for i in group), max(self._reach(i)[1] for i in group)
        if self.purged(end, self.before):
            self.late.extend(rows)
            return
        opened = [s.opened_at for s in sessions if s.opened_at is not None] or [
            row.time for row in rows
        ]
        merged = Live(key, start, end, opened_at=min(opened))
        for session in sessions:
            merged.rows += session.rows
            merged.revision = max(merged.revision, session.revision)
            merged.replaceable += session.replaceable
            session.rows, session.gone = [], True
            self.touched[session.id] = self.live.pop(session.id)
        merged.rows += rows
        self.live[merged.id] = merged
        self._touch(merged)

    def _touch(self, window: Live) -> None:
        window.changed = True
        self.touched[window.id] = window

    # results

    def _due(self, window: Live) -> bool:
        own = (window.start, window.end)
        match self.window.emit:
            case "each_epoch":
                return window.changed
            case "complete":
                return True
            case _:
                # A session that grew past F after its result waits for its new end, and is then due
                # under new bounds.
                if not self.closed(window.end, self.after):
                    return self._between(window)
                again = self.window.fire_every is not None and not self.closed(
                    window.end, self.before
                )
                return window.changed or again or own not in window.replaceable

    def _between(self, window: Live) -> bool:
        """Whether F passed a multiple of `fire_every` that lies behind the rows that opened the
        window.
        """
        every = self.window.fire_every
        if every is None or window.opened_at is None:
            return False
        first, newest = (window.opened_at // every + 1) * every, (self.after - 1) // every * every
        return first <= newest and (newest >= self.before or window.revision < 0)

    def _result(self, window: Live) -> dict[str, Any]:
        rows = sorted(window.rows, key=self.order)
        own = (window.start, window.end)
        window.revision += 1
        result = {
            **dict(zip(self.window.keys, window.key, strict=True)),
            "window_start": window.start,
            "window_end": window.end,
            "revision": window.revision,
            "replaces": self._replaces(window),
            **{
                name: aggregate(what, _column(rows, what.expression))
                for name, what in self.window.aggregates.items()
            },
        }
        # A sum of any numbers is one.
        self.overflowed += any(
            what.function is AggregateFunction.SUM
            and result[name] is None
            and any(value is not None for value in _column(rows, what.expression))
            for name, what in self.window.aggregates.items()
        )
        window.replaceable = [own]
        if self.window.revisions == "delta":
            window.rows = []
        self.touched[window.id] = window
        return result

    def _replaces(self, window: Live) -> list[str] | None:
        if self.window.kind is not WindowKind.SESSION:
            return None
        others = sorted(
            {bounds for bounds in window.replaceable if bounds != (window.start, window.end)}
        )
        return [f"{format_instant(start)}/{format_instant(end)}" for start, end in others]


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    if name == "_source":
        return [row.member.source for row in rows]
    return [row.values.get(name) for row in rows]
