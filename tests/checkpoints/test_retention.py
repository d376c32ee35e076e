"""Retention and garbage collection.

What goes, what stays, and that nothing referenced is ever deleted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.checkpoints.conftest import Author
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.bucket_layout import CheckpointId, generate_attempt_id
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.checkpoints.slot_log import Sealed, SealUndecidedError, SlotLog, SlotTaken
from tidegate.checkpoints.store import PreconditionFailedError
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, PoisonError, TidegateError, TransientError

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate.checkpoints.store import ObjectInfo, Store

EAGER = RetentionPolicy(keep_last=2, keep_for=0, grace=0)
LATER = 1_760_000_000_000_000  # microseconds; after everything the author writes


def nothing() -> Iterable[str]:
    """No table catalog."""
    return ()


def retention(
    log: SlotLog,
    policy: RetentionPolicy = EAGER,
    external: Callable[[], Iterable[str]] = nothing,
    **options: Any,
) -> Retention:
    """Retention at a time when everything is old."""
    clock = ManualClock(wall_ticks=LATER)
    return Retention(log, policy, external=external, clock=clock, workers=1, **options)


def state(log: SlotLog) -> dict[int, str]:
    """What fills the slots of timeline 0."""
    return {
        row.slot: row.kind for row in CheckpointCatalog(log, workers=1).index.iterate_summaries(0)
    }


def test_old_checkpoints_become_stubs_and_their_files_go(store: Store, author: Author) -> None:
    """On every store.

    Beyond both bounds a checkpoint is retired, its slot stays as a stub, only its own files are
    deleted.
    """
    log = SlotLog(store, "p")
    manifests = author.extend(log, 5, with_files=True)
    report = Retention(
        log, EAGER, external=nothing, clock=ManualClock(wall_ticks=LATER + 10**15), workers=2
    ).run()
    assert report.retired == tuple(str(m.id) for m in manifests[:3])
    assert len(report.deleted) == 6
    assert state(log) == {1: "stub", 2: "stub", 3: "stub", 4: "epoch", 5: "epoch"}
    assert [verify_checkpoint(log, m.id).verdict for m in manifests] == [
        CheckpointVerdict.RETIRED
    ] * 3 + [CheckpointVerdict.HEALTHY] * 2
    assert RootsFile(store, "p").read().condemned == {}
    chain = [
        f.record.id
        for f in log.iterate_ancestors(log.head().checkpoint)
        if isinstance(f.record, Manifest | RetiredEpoch)
    ]
    assert chain == [m.id for m in reversed(manifests)]


def test_segments_that_live_on_stay(log: SlotLog, author: Author) -> None:
    """A segment written long ago and still part of the state is reachable from the newest manifest."""
    old = author.seal(log, with_files=True)
    for _ in range(4):
        author.seal(log, segments=old.segments)
    retention(log).run()
    assert log.store.stat(old.segments[0].key) is not None
    assert log.store.stat(old.files["events"][0].key) is None


def test_a_dry_run_says_the_same_and_does_nothing(log: SlotLog, author: Author) -> None:
    """The dry run's report equals the real one's, and the bucket is as before but for the index."""
    author.extend(log, 5, with_files=True)
    state(log)
    before = {e.key: e.etag for e in log.store.list_objects("")}
    dry = retention(log).run(dry_run=True)
    assert {e.key: e.etag for e in log.store.list_objects("")} == before
    real = retention(log).run()
    assert dry.model_copy(update={"dry_run": False}) == real


def test_bounds_by_count_and_age_must_both_be_passed(log: SlotLog, author: Author) -> None:
    """What is young stays although there are many.

    What is among the newest stays although it is old.
    """
    author.extend(log, 5)
    assert (
        retention(log, RetentionPolicy(keep_last=1, keep_for=10**9, grace=3600)).run().retired == ()
    )
    assert retention(log, RetentionPolicy(keep_last=5, keep_for=0, grace=3600)).run().retired == ()
    assert (
        len(retention(log, RetentionPolicy(keep_last=0, keep_for=0, grace=3600)).run().retired) == 4
    )  # never the head


def test_pins_claims_and_unpublished_slots_stay(log: SlotLog, author: Author) -> None:
    """Whatever the policy says, these are kept with their files.

    A claim only until its slot is filled.
    """
    manifests = author.extend(log, 6, with_files=True)
    pin_checkpoint(log, "golden", manifests[0].id, who="ann")
    roots = RootsFile(log.store, "p")
    roots.claim("open", manifests[1].id, timeline=0, slot=7, who="ann")
    roots.claim("void", manifests[2].id, timeline=0, slot=4, who="ann")
    report = retention(log, published_upto=lambda: 4).run()
    assert report.retired == (str(manifests[2].id), str(manifests[3].id))
    assert [verify_checkpoint(log, m.id).verdict for m in manifests] == [
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.RETIRED,
        CheckpointVerdict.RETIRED,
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.HEALTHY,
    ]


def test_a_restore_that_is_tried_again_elsewhere_keeps_both_claims(
    log: SlotLog, author: Author
) -> None:
    """The fork record of the first try may still arrive: what it names must not be retired."""
    manifests = author.extend(log, 6, with_files=True)
    roots = RootsFile(log.store, "p")
    for chosen in (manifests[1], manifests[2]):
        roots.claim("again", chosen.id, timeline=0, slot=7, who="ann")
    retired = retention(log, published_upto=lambda: 4).run().retired
    assert retired == (str(manifests[0].id), str(manifests[3].id))
    log.fork(log.head(), manifests[1].id, request_id="again", who="ann", why="", at=0)
    assert log.head().checkpoint == manifests[1].id
    retention(log, published_upto=lambda: 4).run()
    assert roots.read().claims == {}


def test_files_the_tables_still_reference_stay(log: SlotLog, author: Author) -> None:
    """A retired epoch's table files live on in a table's snapshot."""
    manifests = author.extend(log, 4, with_files=True)
    kept = [m.files["events"][0].key for m in manifests[:2]]
    retention(log, external=lambda: [log.store.uri(key) for key in kept]).run()
    assert all(log.store.stat(key) for key in kept)
    assert all(log.store.stat(m.segments[0].key) is None for m in manifests[:2])


@pytest.mark.parametrize(
    ("address", "stays"),
    [
        ("s3://bucket/{key}", True),
        ("s3a://bucket/{key}", True),
        ("s3a://other/{key}", False),
        ("file:///bucket/{key}", False),
    ],
)
def test_an_address_in_a_snapshot_means_the_same_object_in_each_form(
    memory: MemoryStore, author: Author, address: str, *, stays: bool
) -> None:
    """Spark writes `s3a:` where the store says `s3:`; addresses of other buckets keep nothing."""
    memory.url = "s3://bucket"
    log = SlotLog(memory, "p")
    key = author.extend(log, 3, with_files=True)[0].files["events"][0].key
    retention(log, external=lambda: [address.format(key=key)]).run()
    assert (memory.stat(key) is not None) is stays


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_path_in_a_snapshot_means_the_file_of_a_local_store(
    tmp_path: Path, author: Author, prefix: str
) -> None:
    """A table catalog writes a path with or without its scheme."""
    log = SlotLog(LocalStore(tmp_path), "p")
    key = author.extend(log, 3, with_files=True)[0].files["events"][0].key
    retention(log, external=lambda: [f"{prefix}{tmp_path}/{key}"]).run()
    assert log.store.stat(key) is not None


def test_an_undecided_attempt_is_never_touched(log: SlotLog, author: Author) -> None:
    """Files of an attempt for the next slot belong to someone who may only be asleep.

    A decided loser's are garbage.
    """
    author.extend(log, 2, with_files=True)
    sleeper, loser = (
        CheckpointId(0, 3, generate_attempt_id()),
        CheckpointId(0, 2, generate_attempt_id()),
    )
    kept, gone = author.file(log.store, sleeper).key, author.file(log.store, loser).key
    assert retention(log).run().deleted == (gone,)
    assert log.store.stat(kept) is not None
    manifest = author.manifest(log.head(), attempt=sleeper.attempt)
    assert isinstance(log.seal(manifest), Sealed)


class CountingStore(MemoryStore):
    """Counts requests by verb, and slots as one place; notes listings without a limit."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket, hook=self.count)
        self.asked = Counter[tuple[str, str]]()
        self.listed: list[str] = []

    def count(self, request: StoreRequest) -> None:
        """Count one request."""
        self.asked[request.verb, "slots" if "/slots/" in request.key else request.key] += 1

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """List as ever."""
        self.listed += [] if limit else [prefix]
        return super().list_objects(prefix, start_after=start_after, limit=limit)


def test_a_sweep_reads_and_lists_what_is_retained_only(author: Author) -> None:
    """Neither old slots are listed nor every retained manifest is read, however many there are."""
    costs = []
    for epochs in (20, 60):
        store = CountingStore(MemoryBucket())
        log = SlotLog(store, "p")
        author.extend(log, 5, with_files=True)
        policy = RetentionPolicy(keep_last=epochs, keep_for=0, grace=0)
        author.extend(log, epochs)
        retention(log, policy).run()
        store.asked.clear()
        store.listed.clear()
        retention(SlotLog(store, "p"), policy).run()
        assert store.listed == ["p/timelines/0/state/", "p/timelines/0/tables/"]
        costs.append(store.asked)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("ends", [True, False])
def test_what_another_run_retires_meanwhile_keeps_its_childrens_files(
    author: Author, *, ends: bool
) -> None:
    """The sweep reads the oldest epoch that stays; if that is a stub by then, it reads the next.

    It does so too if the other run dies before the index says what it retired.
    """
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    old = author.seal(log, with_files=True)
    manifests = [author.seal(log, segments=old.segments) for _ in range(4)]
    oldest = log.layout.slot_key(0, manifests[0].slot)
    CheckpointCatalog(log, workers=1).list_checkpoints()
    reads: list[str] = []

    def retire(request: StoreRequest) -> None:
        if (request.verb, request.key) != ("get", oldest):
            return
        reads.append(request.key)
        assert len(reads) < 10, "the sweep reads the stub again and again"
        if len(reads) == 1:
            other = retention(log)
            other.run() if ends else other._retire_slot(manifests[0].id)

    sweeping = MemoryStore(bucket, hook=retire)
    retention(SlotLog(sweeping, "p"), RetentionPolicy(keep_last=4, keep_for=0, grace=0)).run()
    assert isinstance(log.open_checkpoint(manifests[0].id).record, RetiredEpoch)
    assert log.store.stat(old.segments[0].key) is not None


@pytest.mark.parametrize("moment", ["its list is read", "the oldest epoch is read"])
def test_an_epoch_sealed_while_its_parent_retires_keeps_its_files(
    moment: str, author: Author
) -> None:
    """The sweep lists the epochs again if the head or the epoch that it reads was retired since.

    The soak found it (seeds 634 and 1099511633142): nothing in the list needed the files any more.
    """
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    old = author.seal(log, with_files=True)
    author.seal(log, segments=old.segments)
    head = author.seal(log, segments=old.segments)
    CheckpointCatalog(log, workers=1).list_checkpoints()
    page = log.layout.index_page_key("t0-0000000")
    key = page if moment == "its list is read" else log.layout.slot_key(0, head.slot)
    newest = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
    reads = []

    def seal_and_retire(request: StoreRequest) -> None:
        if (request.verb, request.key) != ("get", key) or not is_old_retired():
            return
        reads.append(request)
        if key == page and len(reads) == 1:
            return  # the page is read first to note what was retired
        sweeping.hook = None
        author.seal(log, segments=old.segments)
        retention(log, newest).run()

    def is_old_retired() -> bool:
        return isinstance(log.open_checkpoint(old.id).record, RetiredEpoch)

    sweeping = MemoryStore(bucket, hook=seal_and_retire)
    retention(SlotLog(sweeping, "p"), newest).run()
    assert reads
    assert isinstance(log.open_checkpoint(head.id).record, RetiredEpoch)
    assert log.store.stat(old.segments[0].key) is not None


def test_young_garbage_is_spared_for_a_while(store: Store, author: Author) -> None:
    """The grace time keeps what was just written, where the store knows when that was."""
    log = SlotLog(store, "p")
    author.seal(log, with_files=True)
    author.file(store, CheckpointId(0, 1, generate_attempt_id()))
    report = Retention(
        log, RetentionPolicy(keep_last=1, keep_for=0, grace=3600), external=nothing, workers=1
    ).run()
    expected = (0, 1) if isinstance(store, MemoryStore) else (1, 0)  # memory knows no times
    assert (report.kept_by_grace, len(report.deleted)) == expected


def test_a_file_from_the_future_is_young(tmp_path: Path, author: Author) -> None:
    """The clock of the store may be ahead of that of the run; what it has just written stays."""
    log = SlotLog(LocalStore(tmp_path), "p")
    author.seal(log, with_files=True)
    spare = author.file(log.store, CheckpointId(0, 1, generate_attempt_id()))
    os.utime(tmp_path / spare.key, (LATER / 1_000_000 + 60,) * 2)
    for grace, spared in ((1, 1), (0, 1)):
        policy = RetentionPolicy(keep_last=1, keep_for=0, grace=grace)
        assert retention(log, policy).run().kept_by_grace == spared
    os.utime(tmp_path / spare.key, (LATER / 1_000_000 - 60,) * 2)
    for grace, spared in ((61, 1), (60, 0)):
        policy = RetentionPolicy(keep_last=1, keep_for=0, grace=grace)
        assert retention(log, policy).run().kept_by_grace == spared


def test_abandoned_timelines_are_kept_until_they_are_old(log: SlotLog, author: Author) -> None:
    """What a restore left behind stays restorable for `keep_for`, then goes.

    The fork record stays.
    """
    old = author.extend(log, 4, with_files=True)
    log.fork(log.head(), old[1].id, request_id="r", who="ann", why="")
    author.extend(log, 3, with_files=True)
    assert (
        retention(log, RetentionPolicy(keep_last=1, keep_for=10**9, grace=3600)).run().deleted == ()
    )
    retention(log).run()
    assert state(log) == {1: "stub", 2: "stub", 3: "stub", 4: "stub", 5: "fork"}
    assert SlotLog(log.store, "p").head().slot == 5


def test_what_does_not_lead_to_a_pinned_abandoned_epoch_goes(log: SlotLog, author: Author) -> None:
    """Epochs of the timeline before it, behind the fork, are worth nothing to it."""
    old = author.extend(log, 4, with_files=True)
    log.fork(log.head(), old[0].id, request_id="r", who="ann", why="")
    pinned = author.extend(log, 2, with_files=True)[-1]
    pin_checkpoint(log, "kept", pinned.id, who="ann")
    log.fork(log.head(), old[0].id, request_id="s", who="ann", why="")
    author.extend(log, 3, with_files=True)
    retention(log).run()
    assert state(log) == {1: "stub", 2: "stub", 3: "stub", 4: "stub", 5: "fork"}


def test_the_target_of_a_fresh_restore_is_the_head(log: SlotLog, author: Author) -> None:
    """Before anything is sealed after a restore, its target is never retired."""
    old = author.extend(log, 5, with_files=True)
    log.fork(log.head(), old[0].id, request_id="r", who="ann", why="")
    retention(log, RetentionPolicy(keep_last=0, keep_for=0, grace=0)).run()
    assert SlotLog(log.store, "p").head().record == old[0]
    assert verify_checkpoint(log, old[0].id).verdict is CheckpointVerdict.HEALTHY


def test_a_missing_slot_stops_the_sweep(log: SlotLog, author: Author) -> None:
    """When a manifest is gone no one knows what it named, so nothing is deleted."""
    author.extend(log, 4, with_files=True)
    log.store.delete(log.layout.slot_key(0, 3))
    before = {e.key for e in log.store.list_objects("") if e.key.endswith(".parquet")}
    with pytest.raises(PoisonError, match="slot 3 of timeline 0 is missing"):
        retention(log).run()
    assert {e.key for e in log.store.list_objects("") if e.key.endswith(".parquet")} == before


def test_what_retention_condemned_cannot_be_pinned_in_between(log: SlotLog, author: Author) -> None:
    """Between the condemnation and the stub a pin is refused.

    After the stub it is refused by the slot.
    """
    manifests = author.extend(log, 3)
    roots = RootsFile(log.store, "p")
    roots.condemn_retired(lambda seen: ({str(manifests[0].id)}, set()))
    with pytest.raises(ConfigurationError, match="retired"):
        pin_checkpoint(log, "late", manifests[0].id, who="ann")
    retention(log, RetentionPolicy(keep_last=2, keep_for=0, grace=3600)).run()
    with pytest.raises(PoisonError, match="stub"):
        pin_checkpoint(log, "late", manifests[0].id, who="ann")
    assert roots.read().pins == {}


def test_a_run_that_died_is_finished_by_the_next(log: SlotLog, author: Author) -> None:
    """Condemned and half stubbed, the next run goes on where the last one ended."""
    manifests = author.extend(log, 4, with_files=True)
    RootsFile(log.store, "p").condemn_retired(
        lambda seen: ({str(m.id) for m in manifests[:2]}, set())
    )
    report = retention(log).run()
    assert report.retired == tuple(str(m.id) for m in manifests[:2])
    assert RootsFile(log.store, "p").read().condemned == {}
    assert retention(log).run().retired == ()


def test_a_retirement_is_noted_although_others_write_the_page(author: Author) -> None:
    """A reader adds a new epoch to the page while retention corrects it: both changes stay."""
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    manifests = author.extend(log, 4)
    pin_checkpoint(log, "first", manifests[0].id, who="ann")
    CheckpointCatalog(log, workers=1).list_checkpoints()
    page = log.layout.index_page_key("t0-0000000")

    def read_in_between(request: StoreRequest) -> None:
        if (request.verb, request.key) == ("swap", page):
            retiring.hook = None
            author.seal(log)
            CheckpointCatalog(log, workers=1).list_checkpoints()

    retiring = MemoryStore(bucket, hook=read_in_between)
    retention(SlotLog(retiring, "p")).run()
    assert state(log) == {1: "epoch", 2: "stub", 3: "epoch", 4: "epoch", 5: "epoch"}


def test_a_delayed_page_does_not_bring_a_retired_epoch_back(log: SlotLog, author: Author) -> None:
    """A page that was written before the stub, and arrives after it, is refused."""
    manifests = author.extend(log, 3)
    listed = CheckpointCatalog(log, workers=1)
    listed.list_checkpoints()
    key = log.layout.index_page_key("t0-0000000")
    delayed = log.store.get(key).data
    log.store.delete(key)
    retention(log)._retire_slot(manifests[0].id)
    listed.index.note_retired([manifests[0].id])
    with pytest.raises(PreconditionFailedError):
        log.store.create(key, delayed)
    assert state(log) == {1: "stub", 2: "epoch", 3: "epoch"}


def test_a_retired_epoch_is_noted_on_a_page_with_a_lost_slot(log: SlotLog, author: Author) -> None:
    """The slot that is lost is looked for again each time; the retired one is not offered."""
    manifests = author.extend(log, 4)
    listed = CheckpointCatalog(log, workers=1)
    listed.list_checkpoints()
    log.store.delete(log.layout.slot_key(0, 3))
    retention(log)._retire_slot(manifests[0].id)
    listed.index.note_retired([manifests[0].id, manifests[2].id])
    assert state(log) == {1: "stub", 2: "epoch", 3: "missing", 4: "epoch"}


def test_a_run_whose_note_fails_is_finished_by_the_next(
    log: SlotLog, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the index says what was retired, the condemnations stay."""
    manifests = author.extend(log, 4)
    with monkeypatch.context() as broken:
        broken.setattr(SlotIndex, "_write_if_unchanged", lambda *_: False)
        with pytest.raises(TransientError, match="could not be changed"):
            retention(log).run()
    roots = RootsFile(log.store, "p")
    assert roots.read().retiring_checkpoints == {str(m.id) for m in manifests[:2]}
    retention(log).run()
    assert roots.read().condemned == {}
    assert state(log) == {1: "stub", 2: "stub", 3: "epoch", 4: "epoch"}


def test_storage_is_reported_by_kind(log: SlotLog, author: Author) -> None:
    """Objects and bytes are counted by what they are, on whatever timeline they lie."""
    first, _ = author.extend(log, 2, with_files=True)
    log.fork(log.head(), first.id, request_id="r", who="ann", why="")
    author.seal(log, with_files=True)
    RootsFile(log.store, "p").condemn_damaged(CheckpointId(0, 1, "abcdef"), "x")
    for _ in range(2):
        submit_request(log.store, "p", RequestKind.DRAIN, who="ann", token=1)
    CheckpointCatalog(log, workers=1).index.refresh()
    report = retention(log).storage_report()
    assert report.objects == {
        "slots": 4,
        "state": 3,
        "tables": 3,
        "requests": 2,
        "index": 2,
        "control documents": 1,
    }
    sizes = Counter[str]()
    for entry in log.store.list_objects("p/"):
        sizes["state" if "/state/" in entry.key else "others"] += entry.size
    assert report.bytes["state"] == sizes["state"]
    assert sum(report.bytes.values()) == sizes.total()


@pytest.mark.parametrize("name", ["notes", "0/notes", "0/slots/notes", "0/old/a/b"])
def test_what_somebody_else_put_into_the_bucket_is_counted_too(log: SlotLog, name: str) -> None:
    """The report adds up to what the bucket holds, whoever wrote it and wherever it lies."""
    log.store.put(f"{log.layout.pipeline_prefix}timelines/{name}", b"four")
    report = retention(log).storage_report()
    assert (sum(report.objects.values()), sum(report.bytes.values())) == (1, 4)


def test_a_stub_is_as_good_as_its_epoch_for_a_sleeper(log: SlotLog, author: Author) -> None:
    """A rival of a retired slot loses to the stub."""
    head = log.head()
    author.extend(log, 4)
    retention(log).run()
    outcome = log.seal(author.manifest(head))
    assert isinstance(outcome, SlotTaken)
    assert isinstance(outcome.other, RetiredEpoch)


@pytest.mark.parametrize("deletes_slots", [False, True])
def test_a_stalled_put_of_a_retired_slot_arrives_too_late(
    author: Author, *, deletes_slots: bool
) -> None:
    """The scenario of SlateDB's RFC 0026: a create-if-absent PUT stalls, the same record number is
    written by another driver and collected, and the PUT then succeeds falsely.

    Here a collected slot is a stub, so the condition of the PUT fails. With `deletes_slots` the
    test does what such a collector would do, and the PUT succeeds.
    """
    bucket, deleted = MemoryBucket(), []

    def stall(request: StoreRequest) -> Fault | None:
        return Fault.LATE if request.verb == "create" and "/slots/" in request.key else None

    stalled = MemoryStore(bucket, hook=stall)
    sleeper = SlotLog(stalled, "p", clock=ManualClock(), seal_budget=0.0)
    late = author.manifest(sleeper.head())
    with pytest.raises(SealUndecidedError):
        sleeper.seal(late)
    watched = MemoryStore(
        bucket, hook=lambda r: deleted.append(r.key) if r.verb == "delete" else None
    )
    log = SlotLog(watched, "p")
    manifests = author.extend(log, 5, with_files=True)
    retention(log).run()
    assert deleted
    assert not [key for key in deleted if "/slots/" in key]
    if deletes_slots:
        watched.delete(log.layout.slot_key(0, 1))
    assert bucket.deliver_held() is deletes_slots
    stalled.hook = None
    assert isinstance(sleeper.seal(late), Sealed if deletes_slots else SlotTaken)
    assert SlotLog(watched, "p").head().record == manifests[-1]


def test_a_refused_store_ends_the_run_before_anything_is_deleted(author: Author) -> None:
    """When manifests cannot be read, the mark is incomplete and the sweep does not start."""
    bucket = MemoryBucket()
    author.extend(SlotLog(MemoryStore(bucket), "p"), 4, with_files=True)
    retention(
        SlotLog(MemoryStore(bucket), "p"), RetentionPolicy(keep_last=9, keep_for=86_400, grace=3600)
    ).run()
    before = set(bucket.objects)
    away = MemoryStore(
        bucket,
        hook=lambda request: (
            Fault.REFUSED if request.verb == "get" and "/slots/" in request.key else None
        ),
    )
    with pytest.raises(TidegateError):
        retention(SlotLog(away, "p")).run()
    assert {key for key in before if key.endswith(".parquet")} <= set(bucket.objects)
