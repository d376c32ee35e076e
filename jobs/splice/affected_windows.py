"""Find the window results that a set of rows changes.

For tumbling and sliding windows these are the windows that contain a row. For sessions they are the
sessions that the rows make, join or extend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.jobs.splice.window_recompute import WindowBounds
from tidegate.time_units import TICK_MAX, format_instant, saturate_ticks

_NEW, _COUNTED = "new", "counted"
_SessionPart = tuple[int, int, dict[str, Any] | str]
"""Start, end, and either a published session, or `_NEW` or `_COUNTED` for a row."""


@dataclass(frozen=True, slots=True)
class TouchingRow:
    """What decides to which windows a row belongs: its key and its interval in ticks."""

    key: tuple[Any, ...]
    start: int
    end: int


@dataclass
class AffectedWindow:
    """One result that a merge changes.

    Attributes:
        bounds: its key and its span after the merge.
        published_results: the results that it takes the place of: the one with the same bounds, or
            the sessions that it joins.
        has_new_rows: it contains rows of the request that were not counted before. Otherwise it
            only joins sessions which a run in time would have joined.
    """

    bounds: WindowBounds
    published_results: list[dict[str, Any]] = field(default_factory=list)
    has_new_rows: bool = True

    @property
    def has_overlapping_sessions(self) -> bool:
        """Two published sessions overlap: a row came when its session had been purged."""
        spans = sorted((row["_ws"], row["_we"]) for row in self.published_results)
        return any(first[1] >= second[0] for first, second in pairwise(spans))

    @property
    def next_revision(self) -> int:
        """Revision of the result that the merge writes."""
        return 1 + max((row["revision"] for row in self.published_results), default=-1)

    def find_same_bounds(self) -> dict[str, Any] | None:
        """Return the published result with the same bounds, if there is one."""
        bounds = (self.bounds.start, self.bounds.end)
        return next((r for r in self.published_results if (r["_ws"], r["_we"]) == bounds), None)

    def list_replaced(self) -> list[dict[str, Any]]:
        """Return the published results with other bounds."""
        same = self.find_same_bounds()
        return [row for row in self.published_results if row is not same]

    def format_replaced_spans(self) -> list[str]:
        """Return the spans of `list_replaced` as the column ``replaces`` has them."""
        spans = sorted((row["_ws"], row["_we"]) for row in self.list_replaced())
        return [f"{format_instant(start)}/{format_instant(end)}" for start, end in spans]


def assign_windows(window: WindowSpec, row: TouchingRow) -> list[tuple[int, int]]:
    """Return the windows that a row belongs to; of sessions, the one that the row alone makes."""
    if window.kind is WindowKind.SESSION:
        return [(row.start, saturate_ticks(row.end - 1 + (window.gap or 0)))]
    return _list_window_spans(window, row.start, row.end)


def _list_window_spans(window: WindowSpec, start: int, end: int) -> list[tuple[int, int]]:
    """Return the tumbling or sliding windows that ``[start, end)`` overlaps, earliest first."""
    size, slide = window.size or 0, window.period or 1
    # The least n with n * slide + offset + size > start.
    first = (start - size - window.offset) // slide + 1
    last = (end - 1 - window.offset) // slide
    starts = (n * slide + window.offset for n in range(first, last + 1))
    least = window.min_window_start
    return [
        (saturate_ticks(s), saturate_ticks(s + size)) for s in starts if least is None or s >= least
    ]


def is_purged(window: WindowSpec, end: int, frontier: int) -> bool:
    """Return whether the frontier has passed a window's end and its lateness.

    From then on no driver computes the window, so a merge may write it.
    """
    if window.lateness is None:
        return False
    if frontier == TICK_MAX:
        return True
    limit = saturate_ticks(end + window.lateness)
    return limit < frontier if window.closes_after_end else limit <= frontier


def find_affected_windows(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    published: Sequence[Mapping[str, Any]],
    counted: Iterable[TouchingRow] = (),
) -> list[AffectedWindow]:
    """Return the results that rows change, by end, start and key.

    Args:
        window: the window.
        rows: rows to merge.
        published: current results, with key columns, ``_ws``, ``_we`` and ``revision``.
        counted: rows of the request that the window has counted already, perhaps in a session of
            their own.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in published:
        by_key.setdefault(tuple(result[key] for key in window.keys), []).append(dict(result))
    affected = (
        _find_affected_sessions(window, rows, counted, by_key)
        if window.kind is WindowKind.SESSION
        else _find_affected_spans(window, rows, by_key)
    )
    return sorted(affected, key=lambda t: (t.bounds.end, t.bounds.start, repr(t.bounds.key)))


def _find_affected_spans(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    published: Mapping[tuple[Any, ...], list[dict[str, Any]]],
) -> list[AffectedWindow]:
    by_bounds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for key, results in published.items():
        for result in results:
            by_bounds.setdefault((key, result["_ws"], result["_we"]), []).append(result)
    affected = {(row.key, *span) for row in rows for span in assign_windows(window, row)}
    return [AffectedWindow(WindowBounds(*bounds), by_bounds.get(bounds, [])) for bounds in affected]


def _find_affected_sessions(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    counted: Iterable[TouchingRow],
    published: Mapping[tuple[Any, ...], list[dict[str, Any]]],
) -> list[AffectedWindow]:
    """Rows and published sessions that touch, directly or through others, make one session."""
    by_key: dict[tuple[Any, ...], list[_SessionPart]] = {}
    for what, touching in ((_NEW, rows), (_COUNTED, counted)):
        for row in touching:
            spans = assign_windows(window, row)
            by_key.setdefault(row.key, []).extend((*span, what) for span in spans)
    affected = []
    for key, spans_of_rows in by_key.items():
        parts = [*spans_of_rows, *((r["_ws"], r["_we"], r) for r in published.get(key, []))]
        for group in _group_touching_parts(parts, merge_touching=window.session_touch == "merge"):
            contents = [content for _, _, content in group]
            sessions = [content for content in contents if isinstance(content, dict)]
            start, end = min(s for s, _, _ in group), max(e for _, e, _ in group)
            # A row that was counted late, in a session of its own, may join two sessions.
            joins_sessions = len(sessions) > 1 and _COUNTED in contents
            if _NEW in contents or joins_sessions:
                bounds = WindowBounds(key, start, end)
                affected.append(AffectedWindow(bounds, sessions, _NEW in contents))
    return affected


def _group_touching_parts(
    parts: Iterable[_SessionPart], *, merge_touching: bool
) -> list[list[_SessionPart]]:
    """Group the parts that overlap; with `merge_touching` also those that only touch."""
    groups: list[list[_SessionPart]] = []
    reach = 0
    for part in sorted(parts, key=lambda p: p[:2]):
        if groups and (part[0] < reach or (merge_touching and part[0] == reach)):
            groups[-1].append(part)
            reach = max(reach, part[1])
        else:
            groups.append([part])
            reach = part[1]
    return groups
