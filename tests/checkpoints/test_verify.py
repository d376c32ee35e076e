"""Verification: what counts as evidence, what does not, and what a damaged checkpoint does to its
neighbours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints import verify
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.canonical_json import sha256_of_file
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, StoreDeniedError
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    ObjectProblem,
    VerificationFinding,
    condemn_if_damaged,
    count_scrub_shares,
    scrub_checkpoints,
    select_for_scrub,
    verify_checkpoint,
)

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author


def problems(log: SlotLog, checkpoint: CheckpointId, **options: bool) -> list[ObjectProblem]:
    """What verification finds."""
    return [finding.problem for finding in verify_checkpoint(log, checkpoint, **options).findings]  # type: ignore[arg-type]


def test_a_whole_checkpoint_is_healthy_on_every_store(store: Store, author: Author) -> None:
    """Manifest, segment and table file are all looked at, with their checksums."""
    log = SlotLog(store, "p")
    one, two = author.extend(log, 2, with_files=True)
    for manifest in (one, two):
        result = verify_checkpoint(log, manifest.id)
        assert (result.verdict, result.objects, result.checksums) == (
            CheckpointVerdict.HEALTHY,
            3,
            True,
        )
        assert not condemn_if_damaged(log, result)


def test_damage_is_named_and_condemned(log: SlotLog, author: Author) -> None:
    """A missing file, a short file and flipped bytes are each found, and keep the checkpoint from
    being restored.
    """
    manifests = author.extend(log, 3, with_files=True)
    first, second, third = (m.segments[0].key for m in manifests)
    log.store.delete(first)
    log.store.put(second, b"short")
    log.store.put(third, b"x" * len(log.store.get(third).data))
    for manifest, problem in zip(
        manifests, (ObjectProblem.MISSING, ObjectProblem.SIZE, ObjectProblem.CHECKSUM), strict=True
    ):
        result = verify_checkpoint(log, manifest.id)
        assert [f.problem for f in result.findings] == [problem]
        assert condemn_if_damaged(log, result)
    assert RootsFile(log.store, "p").read().condemned.keys() == {str(m.id) for m in manifests}
    assert problems(log, manifests[2].id, checksums=False) == []


@pytest.mark.parametrize("verb", ["head", "get", "list"])
def test_an_absent_store_is_evidence_of_nothing(verb: str, author: Author) -> None:
    """While requests fail, a checkpoint is unknown, never damaged, even if its file is really gone."""
    bucket = MemoryBucket()
    manifest = author.seal(SlotLog(MemoryStore(bucket), "p"), with_files=True)
    del bucket.objects[manifest.segments[0].key]

    def hook(request: StoreRequest) -> Fault | None:
        return Fault.REFUSED if request.verb == verb and "/slots/" not in request.key else None

    result = verify_checkpoint(SlotLog(MemoryStore(bucket, hook=hook), "p"), manifest.id)
    expected = (
        CheckpointVerdict.DAMAGED if verb == "get" else CheckpointVerdict.UNKNOWN
    )  # only head and list say what is present
    assert result.verdict is expected


def test_refused_credentials_are_evidence_of_nothing(log: SlotLog, author: Author) -> None:
    """403 makes a result unknown."""
    manifest = author.seal(log, with_files=True)

    class Denied(MemoryStore):
        def stat(self, key: str) -> None:
            raise StoreDeniedError("no", code="store.denied")

    result = verify_checkpoint(SlotLog(Denied(log.store.bucket), "p"), manifest.id)  # type: ignore[attr-defined]
    assert result.verdict is CheckpointVerdict.UNKNOWN
    assert not condemn_if_damaged(log, result)


def test_a_slot_that_cannot_be_reached_is_unknown(author: Author) -> None:
    """When the slot itself gives no answer, nothing is said about the checkpoint."""
    bucket = MemoryBucket()
    manifest = author.seal(SlotLog(MemoryStore(bucket), "p"))
    away = SlotLog(MemoryStore(bucket, hook=lambda request: Fault.REFUSED), "p")
    assert verify_checkpoint(away, manifest.id).verdict is CheckpointVerdict.UNKNOWN


def test_a_record_of_a_newer_format_does_not_end_a_scrub(log: SlotLog, author: Author) -> None:
    """It and its predecessor are unknown; the other checkpoints are read."""
    manifests = author.extend(log, 4)
    key = log.layout.slot_key(0, 3)
    record = json.loads(log.store.get(key).data)
    log.store.put(key, json.dumps(record | {"format_version": 9999}).encode())
    found = list(scrub_checkpoints(log, [m.id for m in manifests]))
    assert [result.verdict for result in found] == [
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.UNKNOWN,
        CheckpointVerdict.UNKNOWN,
        CheckpointVerdict.HEALTHY,
    ]
    assert "format 9999" in found[2].findings[0].detail


def test_a_local_file_that_cannot_be_read_does_not_end_a_scrub(
    tmp_path: Path, author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole, so its checkpoint is unknown; the other checkpoints are read."""
    log = SlotLog(LocalStore(tmp_path), "p")
    manifests = author.extend(log, 3, with_files=True)
    forbidden = tmp_path / manifests[1].segments[0].key

    def read(path: Path) -> str:
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return sha256_of_file(path)

    monkeypatch.setattr(verify, "sha256_of_file", read)
    found = list(scrub_checkpoints(log, [m.id for m in manifests]))
    assert [result.verdict for result in found] == [
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.UNKNOWN,
        CheckpointVerdict.HEALTHY,
    ]


def test_a_record_that_was_changed_is_found_through_its_successor(
    log: SlotLog, author: Author
) -> None:
    """The successor names the hash of the original bytes; the successor itself stays healthy."""
    one, two, three = author.extend(log, 3)
    log.store.put(log.layout.slot_key(0, 2), two.model_copy(update={"driver": "forger"}).to_bytes())
    assert [verify_checkpoint(log, m.id).verdict for m in (one, two, three)] == [
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.DAMAGED,
        CheckpointVerdict.HEALTHY,
    ]
    assert problems(log, two.id) == [ObjectProblem.CHAIN]


def test_garbage_in_a_slot_does_not_condemn_its_neighbours(log: SlotLog, author: Author) -> None:
    """A record that cannot be read is damaged.

    What follows it verifies by itself, and what precedes it is not condemned.
    """
    one, two, three = author.extend(log, 3)
    log.store.put(log.layout.slot_key(0, 2), b"{")
    assert problems(log, two.id) == [ObjectProblem.UNREADABLE]
    assert verify_checkpoint(log, three.id).verdict is CheckpointVerdict.HEALTHY
    assert verify_checkpoint(log, one.id).verdict is CheckpointVerdict.UNKNOWN


def test_checkpoints_that_never_were(log: SlotLog, author: Author) -> None:
    """An empty slot is missing, another attempt's slot is not this checkpoint, a stub is retired."""
    one = author.seal(log)
    assert problems(log, CheckpointId(0, 5, one.attempt)) == [ObjectProblem.MISSING]
    assert problems(log, CheckpointId(0, 1, "ffffffffffff")) == [ObjectProblem.CHAIN]
    filled = log.read_slot(0, 1)
    assert filled is not None
    stub = RetiredEpoch(
        timeline=0,
        slot=1,
        attempt=one.attempt,
        parent=None,
        parent_sha256=None,
        original_sha256="0",
        created_at=0,
        retired_at=0,
    )
    log.store.put(filled.key, stub.to_bytes())
    assert verify_checkpoint(log, one.id).verdict is CheckpointVerdict.RETIRED


def test_the_deep_check_has_the_last_word(log: SlotLog, author: Author) -> None:
    """A recount that finds less than the manifest says condemns.

    It is not asked about files that are broken already.
    """
    manifest = author.seal(log, with_files=True)
    asked: list[Manifest] = []

    def recount(seen: Manifest) -> list[VerificationFinding]:
        asked.append(seen)
        return [
            VerificationFinding(
                key=seen.segments[0].key,
                problem=ObjectProblem.CONTENT,
                detail="9 rows instead of 10",
            )
        ]

    result = verify_checkpoint(log, manifest.id, deep=recount)
    assert (result.verdict, result.deep) == (CheckpointVerdict.DAMAGED, True)
    log.store.delete(manifest.segments[0].key)
    verify_checkpoint(log, manifest.id, deep=recount)
    # Twice by the first call, which looks at damage again, and not by the second.
    assert asked == [manifest, manifest]


DAY = 24 * 3_600_000_000


@pytest.mark.parametrize(("retain_for", "shares"), [(0, 1), (DAY, 1), (3 * DAY, 3), (30 * DAY, 7)])
def test_every_checkpoint_is_read_before_it_may_retire(
    log: SlotLog, author: Author, retain_for: int, shares: int
) -> None:
    """The newest and the pinned ones each day, the others once in the days that they are kept."""
    manifests = author.extend(log, 20)
    pinned, newest = str(manifests[3].id), str(manifests[-1].id)
    pin_checkpoint(log, "keep", manifests[3].id, who="ann")
    assert count_scrub_shares(retain_for) == shares
    days = [{str(c) for c in select_for_scrub(log, shares, day)} for day in range(shares)]
    assert set.union(*days) == {str(m.id) for m in manifests}
    assert all({newest, pinned} <= day for day in days)
    assert max(map(len, days)) <= 2 + 20 // shares + 1


def test_a_scrub_reads_a_file_once(log: SlotLog, author: Author) -> None:
    """A segment lives for many epochs, and each of their manifests names it."""
    old = author.seal(log, with_files=True)
    manifests = [old, *(author.seal(log, segments=old.segments) for _ in range(5))]
    read: list[tuple[str, str]] = []
    bucket = log.store.bucket  # type: ignore[attr-defined]
    store = MemoryStore(bucket, hook=lambda request: read.append((request.verb, request.key)))
    found = list(scrub_checkpoints(SlotLog(store, "p"), [m.id for m in manifests]))
    assert {result.verdict for result in found} == {CheckpointVerdict.HEALTHY}
    asked = [request for request in read if request[1] == old.segments[0].key]
    assert asked
    assert len(asked) == len(set(asked))


def test_a_checkpoint_that_retires_while_it_is_read_is_not_damaged(
    log: SlotLog, author: Author
) -> None:
    """Its files are gone because its slot holds a stub by now; a start and a scrub look again."""
    author.extend(log, 3, with_files=True)
    first = next(iter(select_for_scrub(log, 1, 0)))
    bucket = log.store.bucket  # type: ignore[attr-defined]

    def retire(request: StoreRequest) -> None:
        if request.key.endswith(".parquet"):
            store.hook = None
            clock = ManualClock(wall_ticks=2_000_000_000_000_000)
            policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
            Retention(SlotLog(store, "p"), policy, external=tuple, clock=clock).run()

    store = MemoryStore(bucket, hook=retire)
    result = verify_checkpoint(SlotLog(store, "p"), first, checksums=False)
    assert result.verdict is CheckpointVerdict.RETIRED


def test_a_scrub_goes_on_after_damage(log: SlotLog, author: Author) -> None:
    """One result per checkpoint, in the order asked for."""
    manifests = author.extend(log, 3, with_files=True)
    log.store.delete(manifests[1].segments[0].key)
    verdicts = [result.verdict for result in scrub_checkpoints(log, [m.id for m in manifests])]
    assert verdicts == [
        CheckpointVerdict.HEALTHY,
        CheckpointVerdict.DAMAGED,
        CheckpointVerdict.HEALTHY,
    ]
