"""Retires old checkpoints and deletes unneeded files, while drivers and restores may be running.

1. **Retire**, decided inside one compare-and-swap of `roots.json`: condemn what the policy lets go.
  Kept whatever the policy says: the head, what is pinned or claimed, unpublished slots of the
  current lineage, abandoned slots until the followers have left them, and all abandoned slots that
  lead to an abandoned one that stays.
2. Put a stub into each condemned slot (swap by ETag). Slots are never deleted.
3. **Mark**: note the newest filled slot of every timeline *first*, then collect every file named by
    any manifest that is left, and everything the tables' own snapshots reference (asked for after
    step 1 found out what is published). The folders of the attempts that are left stay whole: a
    follower may just have put a file of its own there, which no snapshot names yet. So only the
    oldest manifest of each stretch is read: it names all that later ones need from before.
4. **Sweep** files of attempts whose slot is at or below the noted one and that are not marked. An
  attempt of a later slot may still be sealed by a suspended process; it is never touched. A
  manifest sealed after the mark names only files of its own attempt, of its parent (marked: a head
  is never retired), or of a claimed checkpoint (marked: claims are never condemned).
5. Take the entries of step 1 out again.

The grace time is a courtesy to people who look at files, not part of the argument. A crash after
any step is repaired by the next run. A slot that cannot be read stops the run before anything is
deleted: what it names is not known.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain

from .bucket_layout import CheckpointId
from .errors import SLOT_MISSING
from .host_clock import SYSTEM_CLOCK, Clock
from .manifest import Manifest, RetiredEpoch
from .pins import Roots, RootsFile
from .record_models import FrozenModel
from .slot_index import SlotIndex, SlotSummary
from .slot_log import LineageSegment, LogHead, SlotLog
from .store import ObjectInfo, PreconditionFailedError, map_in_threads


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep. A checkpoint goes only when it is beyond *both* bounds.

    Attributes:
        keep_last: newest checkpoints of the current lineage that always stay.
        keep_for: seconds for which every checkpoint, on any timeline, stays.
        grace: seconds for which an unreferenced file stays after it was written.
    """

    keep_last: int
    keep_for: float
    grace: float


class SweepReport(FrozenModel):
    """What a run did, or with `dry_run` would do.

    Attributes:
        retired: checkpoint ids, with those that an earlier run had only condemned.
        deleted: keys of the files.
        kept_by_grace: number of unneeded files that are too young to be deleted.
    """

    dry_run: bool
    retired: tuple[str, ...]
    deleted: tuple[str, ...]
    deleted_bytes: int
    kept_by_grace: int


class StorageReport(FrozenModel):
    """What the bucket holds of a pipeline by kind, such as slots, state, tables, requests and acks.

    Attributes:
        objects: kind -> number of objects.
        bytes: kind -> bytes.
    """

    objects: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _MarkedFiles:
    """The outcome of the mark phase.

    Bounds per timeline, every key and every attempt's folder that must stay.
    """

    bounds: dict[int, int]
    keys: frozenset[str]
    attempts: frozenset[CheckpointId] = frozenset()


@dataclass
class Retention:
    """Retention and garbage collection of one pipeline.

    Attributes:
        log: the pipeline's log.
        policy: what to keep.
        external: returns the addresses (`Store.uri`) of files that snapshots of a table catalog
            still reference. It has no default, because without it the tables would be deleted.
        published_upto: returns the newest slot of the current lineage that every follower has
            applied; None if the pipeline has no followers.
        rewound: returns whether every follower is on the current timeline. Until then the slots of
            abandoned timelines stay, because a publisher that has not read the restore yet may
            apply one of them. None if the pipeline has no followers.
        clock: gives the time that ages are measured against.
        workers: slots that are read at the same time.
    """

    log: SlotLog
    policy: RetentionPolicy
    _: KW_ONLY
    external: Callable[[], Iterable[str]]
    published_upto: Callable[[], int] | None = None
    rewound: Callable[[], bool] | None = None
    clock: Clock = SYSTEM_CLOCK
    workers: int = 8

    def __post_init__(self) -> None:
        self._store = self.log.store
        self._index = SlotIndex(self.log, workers=self.workers)
        self._roots = RootsFile(self._store, self.log.pipeline, self.clock)

    def run(self, *, dry_run: bool = False) -> SweepReport:
        """Run steps 1 to 5; with `dry_run`, only report what they would do.

        A dry run writes pages of the slot index, and deletes nothing.

        Raises:
            PoisonError: a slot is missing or cannot be read. No file was deleted.
        """
        if dry_run:
            roots = self._roots.read()
            going = self._select_expired(roots)[0] - roots.protected_checkpoints
            return self._sweep_unmarked(self._mark_needed_files(going), sorted(going), dry_run=True)
        # First condemned, then retired: a restore or a pin that comes in between is refused instead
        # of losing its checkpoint.
        going = self._roots.condemn_retired(self._select_expired).retiring_checkpoints
        stubs = [CheckpointId.parse(name) for name in sorted(going)]
        for checkpoint in stubs:
            self._retire_slot(checkpoint)
        self._index.note_retired(stubs)
        report = self._sweep_unmarked(
            self._mark_needed_files(frozenset()), sorted(going), dry_run=False
        )
        # The stubs are in place, so the log itself refuses these checkpoints from now on.
        if going:
            self._roots.clear_condemned(going)
        return report

    def storage_report(self) -> StorageReport:
        """Count all objects of the pipeline in the bucket; lists them all."""
        objects, size = Counter[str](), Counter[str]()
        for entry in self._store.list_objects(self.log.layout.pipeline_prefix):
            parts = entry.key.split("/")
            # Below a timeline the kind is the third folder, elsewhere the first.
            kind = parts[3] if len(parts) > 4 and parts[1] == "timelines" else parts[1]
            kind = kind if len(parts) > 2 else "control documents"
            objects[kind] += 1
            size[kind] += entry.size
        return StorageReport(objects=objects, bytes=size)

    def _select_expired(self, roots: Roots) -> tuple[set[str], set[str]]:
        """Step 1.

        Claims are judged before the head is read: a restore that won meanwhile is then the head.
        """
        void = {
            request
            for request, claim in roots.claims.items()
            if self.log.read_slot(claim.timeline, claim.slot) is not None
        }
        head = self.log.head()
        # Without followers nothing waits for a slot.
        published = head.slot if self.published_upto is None else self.published_upto()
        rewound = self.rewound is None or self.rewound()
        lineage = self.log.lineage(head.timeline)
        on_lineage = (
            row.id
            for row in self._retained_summaries(head)
            if row.kind == "epoch"
            and row.id is not None
            and any(part.covers(row.timeline, row.slot) for part in lineage)
        )
        kept = {str(head.checkpoint), *deque(on_lineage, maxlen=self.policy.keep_last)}
        kept |= roots.without_claims(void).protected_checkpoints
        going: set[str] = set()
        abandoned: list[SlotSummary] = []
        newest_kept = self._find_newly_abandoned()
        for row in self._retained_summaries(head):
            if row.kind != "epoch" or row.id is None:
                continue
            # Either bound is enough to stay.
            stays = row.id in kept or self._is_young(row.created_at)
            if any(part.covers(row.timeline, row.slot) for part in lineage):
                if not stays and row.slot <= published:
                    going.add(row.id)
            elif stays:
                newest_kept[row.timeline] = max(row.slot, newest_kept.get(row.timeline, 0))
            elif rewound:
                abandoned.append(row)
        return going | self._select_needless(abandoned, newest_kept), void

    def _find_newly_abandoned(self) -> dict[int, int]:
        """Return the last epoch of each timeline that a young restore has left.

        After a mistaken restore, people can go back there for as long as a young checkpoint stays.
        """
        return {
            fork.timeline: fork.slot - 1
            for fork in self.log.list_forks()
            if self._is_young(fork.at)
        }

    def _select_needless(
        self, abandoned: list[SlotSummary], newest_kept: dict[int, int]
    ) -> set[str]:
        """Return those of `abandoned` that do not lead to an abandoned epoch that stays.

        A restore of an abandoned checkpoint applies every epoch again that leads to it. So one
        that stays is worth nothing without all that lead to it.
        """
        ways = [
            LineageSegment(part.timeline, part.first, min(slot, part.last or slot))
            for timeline, slot in newest_kept.items()
            for part in self.log.lineage(timeline)
        ]
        return {
            row.id
            for row in abandoned
            if row.id is not None and not any(way.covers(row.timeline, row.slot) for way in ways)
        }

    def _is_young(self, at: int) -> bool:
        return at >= self.clock.wall_ticks() - int(self.policy.keep_for * 1_000_000)

    def _retained_summaries(self, head: LogHead) -> Iterator[SlotSummary]:
        for timeline in range(head.timeline + 1):
            yield from self._index.iterate_retained(timeline)

    def _retire_slot(self, checkpoint: CheckpointId) -> None:
        """Step 2. Repeatable: a slot that holds the stub already stays as it is."""
        filled = self.log.read_slot(checkpoint.timeline, checkpoint.slot)
        if (
            filled is None
            or not isinstance(filled.record, Manifest)
            or filled.record.id != checkpoint
        ):
            return
        manifest = filled.record
        kept = {"timeline", "slot", "attempt", "parent", "parent_sha256", "created_at"}
        stub = RetiredEpoch(
            **manifest.model_dump(include=kept),
            original_sha256=filled.sha256,
            retired_at=self.clock.wall_ticks(),
        )
        try:
            self._store.compare_and_swap(filled.key, stub.to_bytes(), filled.etag)
        except PreconditionFailedError:
            return  # another retention run was faster

    def _mark_needed_files(self, leaving: Iterable[str]) -> _MarkedFiles:
        """Step 3. Bounds first: what is sealed later is above them."""
        head = self.log.head()
        bounds: dict[int, int] = {}
        for timeline in range(head.timeline + 1):
            # A driver may seal while this runs: its files are above the bound and are not looked
            # at.
            newest = self.log.newest_record(timeline)
            if newest is not None:
                bounds[timeline] = newest.record.slot
        staying, keys = self._collect_needed_keys(frozenset(leaving))
        attempts = frozenset(CheckpointId.parse(row.id) for row in staying if row.id)
        return _MarkedFiles(
            bounds, frozenset(keys | set(self._catalog_keys(self.external()))), attempts
        )

    def _collect_needed_keys(self, leaving: frozenset[str]) -> tuple[list[SlotSummary], set[str]]:
        """Return the epochs that stay, and the files outside their attempts' folders they need.

        An epoch names files of its own attempt and of its parent only. So what a stretch of epochs
        needs from before it, its oldest epoch names already, and the others are not read.
        """
        while True:
            head = self.log.head()
            staying = [
                row
                for row in self._retained_summaries(head)
                if row.kind in ("epoch", "missing") and row.id not in leaving
            ]
            ids = {row.id for row in staying}
            if self._is_outdated(head, ids):
                continue
            oldest = [row for row in staying if row.id is None or row.parent not in ids]
            keys_of = map_in_threads(self._keys_needed_by, oldest, self.workers)
            named = [*zip(oldest, keys_of, strict=True)]
            retired = [CheckpointId.parse(row.id) for row, keys in named if keys is None and row.id]
            if not retired:
                return staying, set[str]().union(*(keys or () for _, keys in named))
            # Another run has retired them since. Their stubs do not name what their children need,
            # and a child may have been sealed after the list was made: it is made again.
            self._index.note_retired(retired)

    def _is_outdated(self, head: LogHead, listed: set[str | None]) -> bool:
        """Return whether epochs may need files that no listed epoch names.

        A later epoch needs what the head needed when the list began, or what the target of a
        restore did. Another run may have retired either before its page was read.
        """
        now = self.log.head()
        moved = now.checkpoint != head.checkpoint
        return now.timeline != head.timeline or (moved and str(head.checkpoint) not in listed)

    def _keys_needed_by(self, row: SlotSummary) -> set[str] | None:
        """Return the files that the epoch of a slot names; None if it was retired meanwhile."""
        filled = self.log.read_slot(row.timeline, row.slot)
        if filled is None:
            raise SLOT_MISSING(pipeline=self.log.pipeline, slot=row.slot, timeline=row.timeline)
        if not isinstance(filled.record, Manifest):
            return None
        return {file.key for file in filled.record.all_files()}

    def _catalog_keys(self, uris: Iterable[str]) -> Iterator[str]:
        """Addresses of a table catalog, as keys; `file:` and `s3a:` forms mean the same object."""
        base = self._store.uri("")
        for uri in uris:
            # Other addresses belong to other buckets, where nothing is deleted.
            plain = uri.removeprefix("file://").replace("s3a://", "s3://", 1)
            if plain.startswith(base):
                yield plain[len(base) :].lstrip("/")

    def _sweep_unmarked(
        self, marked: _MarkedFiles, retired: list[str], *, dry_run: bool
    ) -> SweepReport:
        """Step 4."""
        deleted: list[ObjectInfo] = []
        young, now = 0, self.clock.wall_ticks() / 1_000_000
        for entry in self._unmarked_entries(marked):
            if entry.modified is not None and now - entry.modified < self.policy.grace:
                young += 1
                continue
            if not dry_run:
                self._store.delete(entry.key)
            deleted.append(entry)
        return SweepReport(
            dry_run=dry_run,
            retired=tuple(retired),
            deleted=tuple(entry.key for entry in deleted),
            deleted_bytes=sum(entry.size for entry in deleted),
            kept_by_grace=young,
        )

    def _unmarked_entries(self, marked: _MarkedFiles) -> Iterator[ObjectInfo]:
        for timeline, bound in marked.bounds.items():
            # Not the whole timeline: there is a slot, or its stub, for every epoch ever sealed.
            prefixes = self.log.layout.attempt_prefixes(timeline)
            for entry in chain.from_iterable(map(self._store.list_objects, prefixes)):
                attempt = self.log.layout.parse_attempt(entry.key)
                if (
                    attempt is None
                    or attempt.slot > bound
                    or attempt in marked.attempts
                    or entry.key in marked.keys
                ):
                    continue
                yield entry
