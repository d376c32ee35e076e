"""The windows of the event-at-a-time model.

One row, one pane, one rule at a time (semantics.md section 5).

Written apart from the mover's windows on purpose: the two are compared with each other. Nothing
here is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.aggregates import aggregate
from tests.oracle.rows import Row
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN, format_instant


@dataclass
class Pane:
    """One live window of one key. `told` holds the bounds under which readers know it."""

    key: tuple[Any, ...]
    start: int
    end: int
    rows: list[Row] = field(default_factory=list)
    revision: int = -1
    told: set[tuple[int, int]] = field(default_factory=set)
    dirty: bool = False
    opened: int = 0  # least time of the rows that opened it
    new: bool = True  # opened in this epoch


@dataclass
class ModelEdge:
    """Something that lasts: from its start edge on, up to `end` when that is known."""

    key: tuple[Any, ...]
    row: Row
    end: int | None = None


class ModelWindow:
    """One window output.

    Args:
        window: its spec.
        order: order of rows inside a pane.
        time_columns: source -> column of the event time, for `adjust`.
    """

    def __init__(
        self, window: WindowSpec, order: Callable[[Row], Any], time_columns: Mapping[str, str]
    ) -> None:
        self.window = window
        self.order = order
        self.time_columns = time_columns
        self.panes: list[Pane] = []
        self.starts: dict[
            tuple[Any, ...], set[int]
        ] = {}  # zero rows: every start of a key that had a row
        self.zeroed: dict[tuple[Any, ...], set[int]] = {}  # and every start that got a zero row
        self.before = TICK_MIN
        self.expired = 0  # (row, window) pairs that came after the purge

    def epoch(
        self,
        rows: list[Row],
        before: int,
        after: int,
        edges: Sequence[ModelEdge] = (),
        newest: int = TICK_MIN,
    ) -> tuple[list[dict[str, Any]], list[Row]]:
        """Judge and join the rows against F `before`, then emit and purge at F `after`.

        Returns results and late rows.

        `newest` is the largest time read of any member: when all input has ended, open edges count
        up to there.
        """
        self.before = before
        if self.window.kind == "session":
            late = self._sessions(rows, before)
        else:
            late = [row for row in rows if not self._assign(row, before)]
        for edge in edges:
            self._last(edge, before, after, newest)
        if self.window.zero_rows:
            self._zero(after)
        results = [self._result(pane) for pane in self.panes if self._fires(pane, after)]
        self.panes = [
            pane for pane in self.panes if not self._over(pane.end + self._lateness, after)
        ]
        for pane in self.panes:
            pane.dirty = pane.new = False
        return results, late

    @property
    def _lateness(self) -> int:
        return 2**80 if self.window.lateness is None else self.window.lateness

    def _over(self, end: int, frontier: int) -> bool:
        if frontier == TICK_MAX:
            return end < 2**79  # +inf is past every time, but not past an infinite lateness
        return end < frontier or (end == frontier and not self.window.closes_after_end)

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(
            row.member.source if name == "_source" else row.values[name]
            for name in self.window.keys
        )

    # tumbling and sliding

    def _bounds(self, row: Row) -> Iterator[tuple[int, int]]:
        size, slide = self.window.size or 0, self.window.period or 1
        start = row.time - (row.time - self.window.offset) % slide
        while start + size > row.time:
            start -= slide
        start += slide
        while start < row.end:
            if start + size > row.time and (
                self.window.min_window_start is None or start >= self.window.min_window_start
            ):
                yield max(start, TICK_MIN), min(start + size, TICK_MAX)
            start += slide

    def _assign(self, row: Row, before: int) -> bool:
        """Put a row into its windows; False if it is late for this output."""
        bounds = list(self._bounds(row))
        dead = [self._over(end + self._lateness, before) for _, end in bounds]
        self.expired += sum(dead)
        if bounds and self._is_late(row, dead, before):
            if self.window.on_late != "adjust" or row.end <= before:
                return False
            row = replace(
                row,
                time=before,
                values={**row.values, self.time_columns[row.member.source]: before},
            )
        for start, end in self._bounds(row):
            if not self._over(end + self._lateness, before):
                pane = self._pane(self._key(row), start, end)
                if pane.new:
                    pane.opened = min([row.time, *((pane.opened,) if pane.rows else ())])
                pane.rows.append(row)
                pane.dirty = True
        return True

    def _last(self, edge: ModelEdge, before: int, after: int, newest: int) -> None:
        """An edge is in every window that closes now and that it overlaps."""
        end = newest + 1 if after == TICK_MAX else after
        if edge.end is not None:
            end = min(end, edge.end)
        for start, close in self._bounds(replace(edge.row, end=end)) if edge.row.time < end else ():
            if self._over(close, after) and not self._over(close, before):
                pane = self._pane(self._key(edge.row), start, close)
                pane.rows.append(edge.row)
                pane.dirty = True

    def _is_late(self, row: Row, dead: list[bool], before: int) -> bool:
        match self.window.late_unit:
            case "event":
                return row.time < before
            case "first_window":
                return dead[0]
            case _:
                return all(dead)

    def _pane(self, key: tuple[Any, ...], start: int, end: int) -> Pane:
        for pane in self.panes:
            if (pane.key, pane.start, pane.end) == (key, start, end):
                return pane
        self.panes.append(Pane(key, start, end))
        return self.panes[-1]

    def _zero(self, after: int) -> None:
        size, slide = self.window.size or 0, self.window.period or 1
        for pane in self.panes:
            self.starts.setdefault(pane.key, set()).add(pane.start)
        for key, starts in self.starts.items():
            done = self.zeroed.setdefault(key, set())
            for start in range(min(starts), max(starts), slide):
                if start not in starts and start not in done and self._over(start + size, after):
                    done.add(start)
                    self._pane(key, start, start + size)

    # sessions

    def _sessions(self, rows: list[Row], before: int) -> list[Row]:
        """Let each row join the live session it meets or open one, again and again until nothing
        changes; the rest is late.
        """
        waiting, late = [], []
        for row in rows:
            if not self._late_alone(row, before):
                waiting.append(row)
            elif self.window.on_late == "adjust" and row.end > before:
                waiting.append(
                    replace(
                        row,
                        time=before,
                        values={**row.values, self.time_columns[row.member.source]: before},
                    )
                )
            else:
                late.append(row)
        moved = True
        while moved:
            moved = False
            for row in list(waiting):
                if self._join(row, before):
                    waiting.remove(row)
                    moved = True
        return late + waiting

    def _late_alone(self, row: Row, before: int) -> bool:
        match self.window.session_late:
            case "event":
                return row.time + self._lateness < before
            case "own":
                return self._over(row.end - 1 + (self.window.gap or 0) + self._lateness, before)
            case _:
                return False

    def _join(self, row: Row, before: int) -> bool:
        key, start, end = (
            self._key(row),
            row.time,
            min(row.end - 1 + (self.window.gap or 0), TICK_MAX),
        )
        met = [pane for pane in self.panes if pane.key == key and self._meet(pane, start, end)]
        if not met and self._over(end + self._lateness, before):
            return False
        merged = Pane(
            key,
            min([start, *(p.start for p in met)]),
            max([end, *(p.end for p in met)]),
            [row],
            dirty=True,
        )
        old = [p.opened for p in met if not p.new]
        merged.opened, merged.new = min(old or [row.time, *(p.opened for p in met)]), not old
        for pane in met:
            merged.rows += pane.rows
            merged.revision = max(merged.revision, pane.revision)
            merged.told |= pane.told
            self.panes.remove(pane)
        self.panes.append(merged)
        return True

    def _meet(self, pane: Pane, start: int, end: int) -> bool:
        if self.window.session_touch == "merge":
            return pane.start <= end and start <= pane.end
        return pane.start < end and start < pane.end

    # results

    def _fires(self, pane: Pane, after: int) -> bool:
        if self.window.emit == "complete":
            return True
        if self.window.emit == "each_epoch":
            return pane.dirty
        if self.window.fire_every and not self._over(pane.end, after):
            return self._passes_between(pane, self.before, after, self.window.fire_every)
        if self.window.fire_every and not self._over(pane.end, self.before):
            return True
        untold = (pane.start, pane.end) not in pane.told  # new, or a session that has grown since
        return self._over(pane.end, after) and (pane.dirty or untold)

    @staticmethod
    def _passes_between(pane: Pane, before: int, after: int, every: int) -> bool:
        """F passes a multiple behind the opening rows.

        One it had passed when the window opened counts as passed now.
        """
        first = pane.opened - pane.opened % every + every
        newest = after - 1 - (after - 1) % every
        return newest >= first and (newest >= before or pane.revision < 0)

    def _result(self, pane: Pane) -> dict[str, Any]:
        pane.revision += 1
        rows = sorted(pane.rows, key=self.order)
        replaced = sorted(pane.told - {(pane.start, pane.end)})
        result = dict(zip(self.window.keys, pane.key, strict=True)) | {
            "window_start": pane.start,
            "window_end": pane.end,
            "revision": pane.revision,
            "replaces": (
                [f"{format_instant(s)}/{format_instant(e)}" for s, e in replaced]
                if self.window.kind == "session"
                else None
            ),
        }
        for name, what in self.window.aggregates.items():
            column = what.expression
            values = [
                row.member.source if column == "_source" else row.values.get(column) for row in rows
            ]
            result[name] = aggregate(what, values)
        pane.told = {(pane.start, pane.end)}
        if self.window.revisions == "delta":
            pane.rows = []
        return result
