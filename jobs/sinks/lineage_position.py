"""Positions of followers on a timeline's lineage, and the pointer to one published cut.

The pointer `<pipeline>/iceberg/current.json` names one consistent cut over all tables by their
Iceberg metadata files. Readers start there and need no catalog. Publishers only move it forward on
a lineage. Whatever it names is exact, because a table's content is a function of its position in
the log: two publishers with separate catalogs name equal rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.shared_documents import parse_document
from tidegate.checkpoints.slot_log import LineageSegment, LogHead, SlotLog
from tidegate.checkpoints.store import NotFoundError, PreconditionFailedError, Store
from tidegate.json_types import JsonObject

_OPEN_END = 1 << 62  # the last slot of an open segment: more slots than any timeline has


@dataclass(frozen=True, slots=True, order=True)
class FollowerPosition:
    """A follower is done with slots 1 to `upto` of the lineage of `timeline`, each once.

    A sink with ``start: head`` skipped the first of them.
    """

    timeline: int
    upto: int


class CurrentLineage:
    """The lineage of the timeline of `head`, up to that head of the log."""

    def __init__(self, log: SlotLog, head: LogHead) -> None:
        self.timeline, self.slot, self._log = head.timeline, head.slot, log
        # A lineage never changes below a timeline's end, so what it shares is computed once.
        self._shared: dict[int, int] = {head.timeline: head.slot}

    def list_segments(self) -> list[LineageSegment]:
        """Return the segments of the current timeline's lineage, oldest first.

        No other epoch counts.
        """
        return self._log.lineage(self.timeline)

    def is_current(self) -> bool:
        """Read the log again and return whether no restore has ended this timeline."""
        return self._log.head().timeline == self.timeline

    def is_in_log(self, position: FollowerPosition) -> bool:
        """Return whether the log has this position's timeline and, on the current one, its slot."""
        return position.timeline < self.timeline or (
            position.timeline == self.timeline and position.upto <= self.slot
        )

    def last_shared_slot(self, position: FollowerPosition) -> int:
        """Return the last slot up to which a follower at this position is right on this lineage.

        Its later slots belong to an abandoned timeline.
        """
        timeline = position.timeline
        if timeline not in self._shared:
            self._shared[timeline] = count_shared_slots(
                self._log.lineage(timeline), self.list_segments()
            )
        return min(position.upto, self._shared[timeline])

    def count_applied_slots(self, position: FollowerPosition | None) -> int:
        """Return how many slots of this lineage a follower has; 0 without a valid position."""
        return self.last_shared_slot(position) if position and self.is_in_log(position) else 0

    def count_surely_kept_slots(self, position: FollowerPosition | None) -> int:
        """Return how many slots of this lineage a follower has whatever its publishers do next.

        One that sleeps may have read a timeline between the follower's and this one, and rewind the
        follower to it first.
        """
        if position is None or not self.is_in_log(position):
            return 0
        here = self._log.lineage(position.timeline)
        later = map(self._log.lineage, range(position.timeline + 1, self.timeline + 1))
        shared = (count_shared_slots(here, lineage) for lineage in later)
        return min(position.upto, *shared, self.slot)

    def count_missing_slots(self, position: FollowerPosition | None) -> int:
        """Return how many slots of this lineage a follower lacks."""
        return self.slot - self.count_applied_slots(position)

    def describe_mismatch(self, position: FollowerPosition) -> dict[str, int]:
        """Return the fields of an error about a position that is not in the log."""
        return {
            "slot": position.upto,
            "timeline": position.timeline,
            "head": self.slot,
            "head_timeline": self.timeline,
        }


def describe_restore(
    pipeline: str, uid: str, after: FollowerPosition, lineage: Sequence[LineageSegment]
) -> JsonObject:
    """Return what tells receivers which epochs count: those on the new timeline's lineage.

    See `docs/decisions/0053-rewind-notices-carry-the-lineage.md`.

    Args:
        pipeline: its name, or that of a job.
        uid: its identity.
        after: the new timeline, and the epoch from which it goes on.
        lineage: of that timeline.
    """
    segments = [{"timeline": o.timeline, "first": o.first, "last": o.last} for o in lineage]
    return {
        "pipeline": pipeline,
        "uid": uid,
        "timeline": after.timeline,
        "after_epoch": after.upto,
        "lineage": segments,
    }


def count_shared_slots(left: Sequence[LineageSegment], right: Sequence[LineageSegment]) -> int:
    """Return the number of leading slots that two lineages share; 1 << 62 if they share all."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one.timeline != other.timeline:
            break
        # Where one of them left this timeline earlier, both go on with other timelines.
        shared = max(shared, min(_OPEN_END if s.last is None else s.last for s in (one, other)))
    return shared


@dataclass(frozen=True)
class PublishedCut:
    """One cut over all tables.

    Attributes:
        uid: of the pipeline that published it; another one if the store was copied.
        timeline: the timeline of `upto`.
        upto: every table holds exactly slots 1 to `upto` of the lineage of `timeline`.
        tables: table -> address of its Iceberg metadata file. Tables that never had a row may be
            missing.
    """

    uid: str = ""
    timeline: int = 0
    upto: int = 0
    tables: dict[str, str] = field(default_factory=dict)

    @property
    def position(self) -> FollowerPosition:
        """The position of all tables."""
        return FollowerPosition(self.timeline, self.upto)


def read_published_cut(store: Store, pipeline: str) -> PublishedCut | None:
    """Return the newest published cut, or None before the first."""
    found = _read_cut_with_etag(store, pipeline)
    return found[0] if found else None


def count_table_rows(store: Store, pipeline: str, address: str) -> int | None:
    """Return the rows of the table whose metadata are at `address`, without pyiceberg.

    None if the metadata are not in the store, as with a catalog that has its own place.
    """
    _, inside, name = address.rpartition(f"/{pipeline}/iceberg/")
    try:
        metadata = parse_json(store.get(f"{inside[1:]}{name}").data)
    except (NotFoundError, ValueError):
        return None
    snapshots = {one["snapshot-id"]: one["summary"] for one in metadata.get("snapshots", [])}
    current = snapshots.get(metadata.get("current-snapshot-id"), {})
    return int(current.get("total-records", 0))


def advance_published_cut(store: Store, pipeline: str, new: PublishedCut) -> None:
    """Move the pointer to `new`, unless another publisher has moved it further.

    Tables that `new` lacks stay in it. A pointer with another uid is replaced in any case.
    """

    def advance(there: PublishedCut | None) -> PublishedCut | None:
        """Return the new cut unless the one that is there is as new."""
        # A new timeline is ahead even with fewer slots: a restore took the others back. A pointer
        # with another uid was copied with the store and is overwritten.
        if there is None or there.uid != new.uid:
            return new
        if (there.timeline, there.upto) > (new.timeline, new.upto):
            return None
        # The table of a window that has left the spec stays, and what it names is in use.
        kept = replace(new, tables=there.tables | new.tables)
        return None if there == kept else kept

    _change_cut(store, pipeline, advance)


def replace_table_location(store: Store, pipeline: str, table: str, old: str, new: str) -> bool:
    """Name another metadata file with the same rows, if the pointer still names `old`.

    Returns:
        Whether the pointer was moved.
    """

    def relocate(there: PublishedCut | None) -> PublishedCut | None:
        """Return the cut with the new address, if it has the old one."""
        if there is None or there.tables.get(table) != old:
            return None
        return replace(there, tables=there.tables | {table: new})

    return _change_cut(store, pipeline, relocate)


def _change_cut(
    store: Store, pipeline: str, change: Callable[[PublishedCut | None], PublishedCut | None]
) -> bool:
    """Swap the pointer for what `change` returns; False if that is None, nothing to do."""
    key = BucketLayout(pipeline).published_cut_key
    while True:
        there, etag = _read_cut_with_etag(store, pipeline) or (None, "")
        new = change(there)
        if new is None:
            return False
        try:
            if there is None:
                store.create(key, canonical_bytes(asdict(new)))
            else:
                store.compare_and_swap(key, canonical_bytes(asdict(new)), etag)
        except PreconditionFailedError:
            continue
        return True


def _read_cut_with_etag(store: Store, pipeline: str) -> tuple[PublishedCut, str] | None:
    try:
        stored = store.get(BucketLayout(pipeline).published_cut_key)
    except NotFoundError:
        return None
    cut = parse_document(store, stored, "pointer to the tables", lambda raw: PublishedCut(**raw))
    return cut, stored.etag
