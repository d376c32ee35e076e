"""Retires old checkpoints and deletes files nobody needs, beside a live driver and beside restores.

1. **Retire**, decided inside one compare-and-swap of `roots.json`: condemn what the policy lets go. Kept whatever the policy
   says: the head, what is pinned or claimed, unpublished slots of the current lineage, and abandoned slots until the followers
   have left them.
2. Put a stub into each condemned slot (swap by ETag). Slots are never deleted.
3. **Mark**: note the newest filled slot of every timeline *first*, then collect every file named by any manifest that is left,
   and everything the tables' own snapshots reference (asked for after step 1 found out what is published). The folders of the
   attempts that are left stay whole: a follower may just have put a file of its own there, which no snapshot names yet.
4. **Sweep** files of attempts whose slot is at or below the noted one and that are not marked. An attempt of a later slot may
   still be sealed by somebody who is asleep; it is never touched. A manifest sealed after the mark names only files of its own
   attempt, of its parent (marked: a head is never retired), or of a claimed checkpoint (marked: claims are never condemned).
5. Take the entries of step 1 out again.

The grace time is a courtesy to people who look at files, not part of the argument. A crash after any step is mended by the next
run. A slot that cannot be read stops the run before anything is deleted: what it names is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.index import SlotIndex, Summary
from tidegate.checkpoints.layout import CheckpointId
from tidegate.checkpoints.log import Head, SlotLog
from tidegate.checkpoints.manifest import Manifest, Stub
from tidegate.checkpoints.roots import Roots, RootsFile
from tidegate.checkpoints.store import Entry, PreconditionFailedError
from tidegate.jobs.spec.errors import PoisonError

__all__ = ["Policy", "Retention", "StorageReport", "SweepReport"]

HOUR = 3600.0  # seconds


class Policy(BaseModel):
    """What to keep. A checkpoint goes only when it is beyond *both* bounds.

    Attributes:
        keep_last: newest checkpoints of the current lineage that always stay.
        keep_for: seconds for which every checkpoint, on any timeline, stays.
        grace: seconds for which an unreferenced file stays.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_last: int = 50
    keep_for: float = 24 * HOUR
    grace: float = HOUR


class SweepReport(BaseModel):
    """What a run did, or with `dry_run` would do."""

    model_config = ConfigDict(frozen=True)

    dry_run: bool
    retired: tuple[str, ...]
    deleted: tuple[str, ...]
    deleted_bytes: int
    kept_by_grace: int


class StorageReport(BaseModel):
    """What lies in the bucket, by kind (slots, state, tables, index, requests, acks, quality, other)."""

    model_config = ConfigDict(frozen=True)

    objects: dict[str, int]
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Marked:
    """The outcome of the mark phase: bounds per timeline, every key and every attempt's folder that must stay."""

    bounds: dict[int, int]
    keys: frozenset[str]
    attempts: frozenset[CheckpointId] = frozenset()


class Retention:
    """Retention and garbage collection of one pipeline.

    Args:
        log: the pipeline's log.
        policy: what to keep.
        external: asked for the addresses (`Store.uri`) of files that a table catalog's snapshots still reference. There is no
            default: forgetting it would delete the tables.
        published_upto: asked for the newest position of the current lineage that every follower has applied; None where
            nothing follows the log.
        rewound: asked whether every follower stands on the current timeline. Until then the slots of abandoned timelines stay:
            a publisher that does not know of the restore yet may be about to apply one of them. None where nothing follows.
    """

    def __init__(
        self,
        log: SlotLog,
        policy: Policy | None = None,
        *,
        external: Callable[[], Iterable[str]],
        published_upto: Callable[[], int] | None = None,
        rewound: Callable[[], bool] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        workers: int = 8,
    ) -> None:
        self._log, self._store = log, log.store
        self._policy = policy or Policy()
        self._external = external
        self._published_upto = published_upto
        self._rewound = rewound
        self._clock = clock
        self._workers = workers
        self._index = SlotIndex(log, workers=workers)
        self._roots = RootsFile(log.store, log.pipeline, clock)

    def run(self, *, dry_run: bool = False) -> SweepReport:
        """Steps 1 to 5; with `dry_run` only say what they would do."""
        if dry_run:
            roots = self._roots.read()
            going = self._decide(roots)[0] - roots.kept
            return self._sweep(self._mark(going), sorted(going), dry_run=True)
        going = self._roots.condemn_retired(self._decide).retiring
        stubs = [CheckpointId.parse(name) for name in sorted(going)]
        for checkpoint in stubs:
            self._put_stub(checkpoint)
        self._index.note_stubs(stubs)
        report = self._sweep(self._mark(frozenset()), sorted(going), dry_run=False)
        if going:
            self._roots.acquit(going)
        return report

    def storage(self) -> StorageReport:
        """Count what lies in the bucket."""
        objects: dict[str, int] = {}
        size: dict[str, int] = {}
        for entry in self._store.list(self._log.layout.root):
            kind = self._kind(entry.key)
            objects[kind] = objects.get(kind, 0) + 1
            size[kind] = size.get(kind, 0) + entry.size
        return StorageReport(objects=objects, bytes=size)

    def _decide(self, roots: Roots) -> tuple[set[str], set[str]]:
        """Step 1. Claims are judged before the head is read: a restore that won meanwhile is then the head."""
        void = {request for request, claim in roots.claims.items() if self._log.read(claim.timeline, claim.slot) is not None}
        head = self._log.head()
        published = head.slot if self._published_upto is None else self._published_upto()
        kept = {str(head.checkpoint)} | {row.id for row in self._newest(head)[: self._policy.keep_last]}
        rewound = self._rewound is None or self._rewound()
        young = self._clock.ticks() - int(self._policy.keep_for * 1_000_000)
        lineage = self._log.lineage(head.timeline)
        going: set[str] = set()
        for row in self._all_rows(head):
            on_lineage = any(s.timeline == row.timeline and s.holds(row.slot) for s in lineage)
            done_with = row.slot <= published if on_lineage else rewound
            if row.kind == "epoch" and row.id and row.id not in kept and row.created_at < young and done_with:
                going.add(row.id)
        return going, void

    def _newest(self, head: Head) -> list[Summary]:
        """Retained epochs of the current lineage, newest first."""
        lineage = self._log.lineage(head.timeline)
        rows = [row for row in self._all_rows(head) if row.kind == "epoch"]
        on = [row for row in rows if any(s.timeline == row.timeline and s.holds(row.slot) for s in lineage)]
        return sorted(on, key=lambda row: row.slot, reverse=True)

    def _all_rows(self, head: Head) -> Iterator[Summary]:
        for timeline in range(head.timeline + 1):
            yield from self._index.rows(timeline)

    def _put_stub(self, checkpoint: CheckpointId) -> None:
        """Step 2. Repeatable: a slot that holds the stub already stays as it is."""
        filled = self._log.read(checkpoint.timeline, checkpoint.slot)
        if filled is None or not isinstance(filled.record, Manifest) or filled.record.id != checkpoint:
            return
        manifest = filled.record
        stub = Stub(
            timeline=manifest.timeline,
            slot=manifest.slot,
            attempt=manifest.attempt,
            parent=manifest.parent,
            parent_sha256=manifest.parent_sha256,
            original_sha256=filled.sha256,
            created_at=manifest.created_at,
            retired_at=self._clock.ticks(),
        )
        try:
            self._store.swap(filled.key, stub.to_bytes(), filled.etag)
        except PreconditionFailedError:
            return  # another retention run was faster

    def _mark(self, leaving: Iterable[str]) -> _Marked:
        """Step 3. Bounds first: what is sealed later is above them."""
        head = self._log.head()
        bounds: dict[int, int] = {}
        for timeline in range(head.timeline + 1):
            newest = self._log.newest(timeline)
            if newest is not None:
                bounds[timeline] = newest.record.slot
        gone = set(leaving)
        staying = [row for row in self._all_rows(head) if row.kind in ("epoch", "missing") and row.id not in gone]
        with ThreadPoolExecutor(self._workers) as pool:
            keys = set[str]().union(*pool.map(self._needed, staying))
        attempts = frozenset(CheckpointId.parse(row.id) for row in staying if row.id)
        return _Marked(bounds, frozenset(keys | set(self._keys_of(self._external()))), attempts)

    def _needed(self, row: Summary) -> set[str]:
        filled = self._log.read(row.timeline, row.slot)
        if filled is None:
            raise self._unknown(row)
        return {file.key for file in filled.record.all_files()} if isinstance(filled.record, Manifest) else set()

    def _unknown(self, row: Summary) -> PoisonError:
        return PoisonError(
            f"slot {row.slot} of timeline {row.timeline} is missing, so it is not known which files it needs",
            code="retention.missing_slot",
            pipeline=self._log.pipeline,
            kept="all files; nothing was deleted",
            advice="restore the object from a backup, or remove the timeline by hand",
        )

    def _keys_of(self, uris: Iterable[str]) -> Iterator[str]:
        """Addresses of a table catalog, as keys; `file:` and `s3a:` forms mean the same object."""
        base = self._store.uri("")
        for uri in uris:
            plain = uri.removeprefix("file://").replace("s3a://", "s3://", 1)
            if plain.startswith(base):
                yield plain[len(base) :].lstrip("/")

    def _sweep(self, marked: _Marked, retired: list[str], *, dry_run: bool) -> SweepReport:
        """Step 4."""
        deleted: list[Entry] = []
        young = 0
        for entry in self._garbage(marked):
            if self._is_young(entry):
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

    def _garbage(self, marked: _Marked) -> Iterator[Entry]:
        for timeline, bound in marked.bounds.items():
            for entry in self._store.list(self._log.layout.timeline(timeline)):
                attempt = self._log.layout.attempt_of(entry.key)
                if attempt is None or attempt.slot > bound or attempt in marked.attempts or entry.key in marked.keys:
                    continue
                yield entry

    def _is_young(self, entry: Entry) -> bool:
        return entry.modified is not None and self._clock.ticks() / 1_000_000 - entry.modified < self._policy.grace

    def _kind(self, key: str) -> str:
        parts = key.split("/")
        kind = parts[3] if len(parts) > 4 and parts[1] == "timelines" else parts[1]
        return kind if kind in {"slots", "state", "tables", "index", "requests", "acks", "quality"} else "other"
