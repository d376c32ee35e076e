"""Which window results a set of rows touches: for tumbling and sliding windows by their spans, for sessions by what they join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tidegate.jobs.reference.windows import spans_of
from tidegate.jobs.spec.time import TICK_MAX, format_instant, saturate_ticks
from tidegate.jobs.spec.windows import WindowKind, WindowSpec
from tidegate.jobs.splice.recompute import WindowBounds

__all__ = ["AffectedWindow", "TouchingRow", "assign_windows", "is_purged", "find_affected_windows"]


_NEW, _COUNTED = "new", "counted"
_SessionPart = tuple[int, int, dict[str, Any] | str]
"""Start, end, and a published session or what kind of row it is."""


@dataclass(frozen=True, slots=True)
class TouchingRow:
    """What of a row decides where it belongs."""

    key: tuple[Any, ...]
    start: int
    end: int


@dataclass
class AffectedWindow:
    """One result that changes.

    Attributes:
        standing: published results that it stands in the place of: itself, or the sessions that it joins.
        needed: rows of the request are new in it; else it only joins sessions that a run in time would not have parted.
    """

    bounds: WindowBounds
    published_results: list[dict[str, Any]] = field(default_factory=list)
    needed: bool = True

    @property
    def has_overlapping_sessions(self) -> bool:
        """Its standing sessions meet: a row came when the one beside it was purged, and made another."""
        ends = sorted((row["_ws"], row["_we"]) for row in self.published_results)
        return any(one[1] >= other[0] for one, other in pairwise(ends))

    @property
    def next_revision(self) -> int:
        """Of the next result."""
        return 1 + max((row["revision"] for row in self.published_results), default=-1)

    def find_same_bounds(self) -> dict[str, Any] | None:
        """The published result with the same bounds."""
        return next((r for r in self.published_results if (r["_ws"], r["_we"]) == (self.bounds.start, self.bounds.end)), None)

    def list_replaced(self) -> list[dict[str, Any]]:
        """Published results that this one takes the place of under other bounds."""
        own = self.find_same_bounds()
        return [row for row in self.published_results if row is not own]

    def format_replaced_spans(self) -> list[str]:
        """As in the column of that name."""
        bounds = sorted((row["_ws"], row["_we"]) for row in self.list_replaced())
        return [f"{format_instant(start)}/{format_instant(end)}" for start, end in bounds]


def assign_windows(window: WindowSpec, row: TouchingRow) -> list[tuple[int, int]]:
    """The windows that a row belongs to; of a session what the row alone would make."""
    if window.kind is WindowKind.SESSION:
        return [(row.start, saturate_ticks(row.end - 1 + (window.gap or 0)))]
    return spans_of(window, row.start, row.end)


def is_purged(window: WindowSpec, end: int, frontier: int) -> bool:
    """Whether F has passed a window's end and its lateness: only then nobody else computes it any more."""
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
    """The results that these rows touch, by end, start and key.

    Args:
        window: the window.
        rows: rows to merge.
        published: current results, with key columns, ``_ws``, ``_we`` and ``next_revision``.
        counted: rows of the request that the window has counted already, maybe in a session of their own.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in published:
        by_key.setdefault(tuple(result[key] for key in window.keys), []).append(dict(result))
    found = _find_affected_sessions(window, rows, counted, by_key) if window.kind is WindowKind.SESSION else _find_affected_spans(window, rows, by_key)
    return sorted(found, key=lambda t: (t.bounds.end, t.bounds.start, repr(t.bounds.key)))


def _find_affected_spans(
    window: WindowSpec, rows: Iterable[TouchingRow], published: Mapping[tuple[Any, ...], list[dict[str, Any]]]
) -> list[AffectedWindow]:
    wanted = {(row.key, *span) for row in rows for span in assign_windows(window, row)}
    standing: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for key, results in published.items():
        for result in results:
            standing.setdefault((key, result["_ws"], result["_we"]), []).append(result)
    return [AffectedWindow(WindowBounds(*bounds), standing.get(bounds, [])) for bounds in wanted]


def _find_affected_sessions(
    window: WindowSpec,
    rows: Iterable[TouchingRow],
    counted: Iterable[TouchingRow],
    published: Mapping[tuple[Any, ...], list[dict[str, Any]]],
) -> list[AffectedWindow]:
    """Rows and published sessions that meet, directly or through others, make one session."""
    by_key: dict[tuple[Any, ...], list[_SessionPart]] = {}
    for what, some in ((_NEW, rows), (_COUNTED, counted)):
        for row in some:
            by_key.setdefault(row.key, []).extend((*span, what) for span in assign_windows(window, row))
    found = []
    for key, spans in by_key.items():
        items = [*spans, *((r["_ws"], r["_we"], r) for r in published.get(key, []))]
        for group in _group_touching_parts(items, touching=window.session_touch == "merge"):
            bounds = WindowBounds(key, min(s for s, _, _ in group), max(e for _, e, _ in group))
            target = AffectedWindow(bounds, [r for _, _, r in group if isinstance(r, dict)], any(r == _NEW for _, _, r in group))
            if target.needed or (len(target.published_results) > 1 and any(r == _COUNTED for _, _, r in group)):
                found.append(target)
    return found


def _group_touching_parts(items: Iterable[_SessionPart], *, touching: bool) -> list[list[_SessionPart]]:
    groups: list[list[_SessionPart]] = []
    reach = 0
    for item in sorted(items, key=lambda i: i[:2]):
        if groups and (item[0] < reach or (touching and item[0] == reach)):
            groups[-1].append(item)
            reach = max(reach, item[1])
        else:
            groups.append([item])
            reach = item[1]
    return groups
