"""Where a follower stands.

A position on the lineage of a timeline, and whether that is also a position of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.slot_log import LineageSegment, LogHead, SlotLog
from tidegate.checkpoints.store import NotFoundError, PreconditionFailedError, Store

_OPEN_END = 1 << 62  # an open stretch: more slots than any timeline has


@dataclass(frozen=True, slots=True)
class FollowerPosition:
    """What a table holds: slots 1 to `upto` of the lineage of `timeline`, each once."""

    timeline: int
    upto: int


class CurrentLineage:
    """The lineage of the current timeline, up to the head of the log."""

    def __init__(self, log: SlotLog, head: LogHead) -> None:
        self.timeline = head.timeline
        self.slot = head.slot
        self._lineage: Callable[[int], list[LineageSegment]] = log.lineage
        self._head: Callable[[], LogHead] = log.head
        self._shared: dict[int, int] = {head.timeline: head.slot}

    def list_segments(self) -> list[LineageSegment]:
        """Where the epochs of the current timeline's history lie, oldest first.

        No other epoch counts.
        """
        return self._lineage(self.timeline)

    def is_current(self) -> bool:
        """Whether no restore has ended this timeline; asks the log again."""
        return self._head().timeline == self.timeline

    def is_in_log(self, mark: FollowerPosition) -> bool:
        """Whether the log has this timeline, and for its current one this slot."""
        return mark.timeline < self.timeline or (
            mark.timeline == self.timeline and mark.upto <= self.slot
        )

    def last_shared_slot(self, mark: FollowerPosition) -> int:
        """How far a table with this mark is right on this lineage.

        Slots after that are of an abandoned one.
        """
        if mark.timeline not in self._shared:
            self._shared[mark.timeline] = count_shared_slots(
                self._lineage(mark.timeline), self._lineage(self.timeline)
            )
        return min(mark.upto, self._shared[mark.timeline])


def count_shared_slots(left: Sequence[LineageSegment], right: Sequence[LineageSegment]) -> int:
    """The number of slots at which two lineages are the same, counted from the first."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one.timeline != other.timeline:
            break
        ends = [_OPEN_END if s.last is None else s.last for s in (one, other)]
        shared = max(shared, min(ends))
        if ends[0] != ends[1]:
            break
    return shared


# `<pipeline>/iceberg/current.json`: one consistent cut over all tables, by the names of their
# Iceberg metadata files.
#
# Readers start here and need no catalog. Whoever publishes moves it forward; it never goes back on
# a lineage, and whatever it names is exact, because a table's content is a function of its mark on
# the log alone: also two publishers with catalogs of their own name equal rows.


@dataclass(frozen=True, slots=True)
class PublishedCut:
    """One cut over all tables.

    Attributes:
        upto: every table holds slots 1 to `upto` of the lineage of `timeline`, and nothing else.
        tables: table -> address of its Iceberg metadata file; tables that never had a row may be
            missing.
    """

    uid: str
    timeline: int
    upto: int
    tables: dict[str, str] = field(default_factory=dict)


def build_cut_key(pipeline: str) -> str:
    """Key of the pointer."""
    return f"{pipeline}/iceberg/current.json"


def read_published_cut(store: Store, pipeline: str) -> PublishedCut | None:
    """The newest published cut, or None before the first."""
    found = _read_cut_with_etag(store, pipeline)
    return found[0] if found else None


def advance_published_cut(store: Store, pipeline: str, new: PublishedCut) -> None:
    """Move the pointer forward, unless somebody has moved it at least as far."""
    while True:
        found = _read_cut_with_etag(store, pipeline)
        try:
            if found is None:
                store.create(build_cut_key(pipeline), canonical_bytes(asdict(new)))
            elif found[0] != new and not _is_ahead(found[0], new):
                store.compare_and_swap(
                    build_cut_key(pipeline), canonical_bytes(asdict(new)), found[1]
                )
            return
        except PreconditionFailedError:
            continue


def replace_table_location(store: Store, pipeline: str, table: str, old: str, new: str) -> bool:
    """Name another metadata file with the same rows, if the pointer still names the one it was made from."""
    while True:
        found = _read_cut_with_etag(store, pipeline)
        if found is None or found[0].tables.get(table) != old:
            return False
        moved = replace(found[0], tables=found[0].tables | {table: new})
        try:
            store.compare_and_swap(
                build_cut_key(pipeline), canonical_bytes(asdict(moved)), found[1]
            )
        except PreconditionFailedError:
            continue
        return True


def _is_ahead(there: PublishedCut, new: PublishedCut) -> bool:
    return there.uid == new.uid and (there.timeline, there.upto) > (new.timeline, new.upto)


def _read_cut_with_etag(store: Store, pipeline: str) -> tuple[PublishedCut, str] | None:
    try:
        stored = store.get(build_cut_key(pipeline))
    except NotFoundError:
        return None
    raw: dict[str, Any] = parse_json(stored.data)
    return PublishedCut(**raw), stored.etag
