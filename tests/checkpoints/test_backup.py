"""Backups: what is in a copy, whatever happened to the pipeline or the process meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.backup import copy_pipeline
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pins import RootsFile, pin_checkpoint
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    ensure_identity,
    refuse_copied_store,
)
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, TransientError

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author


def make_target(source: Store, tmp_path: Path) -> Store:
    """Another place in a store of the same kind."""
    if isinstance(source, S3Store):
        prefix = f"{source.settings.prefix}-copy"
        return S3Store(source.settings.model_copy(update={"prefix": prefix}))
    if isinstance(source, MemoryStore):
        return MemoryStore(name="copy")
    return LocalStore(tmp_path / "copy")


def judge(target: Store) -> list[CheckpointVerdict]:
    """The verdicts on the checkpoints of a copy, the newest first."""
    copy = SlotLog(target, "p")
    rows = CheckpointCatalog(copy, workers=1).list_checkpoints()
    found = [copy.read_slot(row.timeline, row.slot) for row in rows]
    return [verify_checkpoint(copy, one.record.id).verdict for one in found if one is not None]  # type: ignore[union-attr]


def test_a_copy_has_every_checkpoint_and_the_next_run_adds_what_is_new(
    store: Store, author: Author, tmp_path: Path
) -> None:
    """On each kind of store, with pins and other timelines; no driver writes for the copy."""
    log, target = SlotLog(store, "p"), make_target(store, tmp_path)
    uid = ensure_identity(store, "p")
    first, *_ = author.extend(log, 3, with_files=True)
    pin_checkpoint(log, "good", first.id, who="ann")
    report = copy_pipeline(store, target, "p")
    assert report.copied == report.objects == 3 + 6 + 2  # slots, files, identity and pins
    assert judge(target) == [CheckpointVerdict.HEALTHY] * 3
    assert "good" in RootsFile(target, "p").read().pins
    lease = Lease.acquire(store, "p", ProcessIdentity.this_process(), uid=uid)
    plan = plan_restore(log, first.id)
    commit_restore(log, lease, plan, request_id="r", who="ann", why="")
    lease.release()
    author.seal(log, with_files=True)
    again = copy_pipeline(store, target, "p")
    assert again.copied == 2 + 2 + 2  # the fork and an epoch, its files, the documents
    assert judge(target) == [CheckpointVerdict.HEALTHY] * 2
    assert SlotLog(target, "p").head().checkpoint == log.head().checkpoint
    assert target.stat("p/lease.json") is None
    with pytest.raises(ConfigurationError, match="is a copy of"):
        refuse_copied_store(target, "p")


def test_a_pipeline_that_goes_on_meanwhile_leaves_a_whole_copy(
    author: Author, tmp_path: Path
) -> None:
    """An epoch is sealed and two are retired, with their files, while files are copied."""
    bucket, target = MemoryBucket(), LocalStore(tmp_path / "copy")
    quiet = SlotLog(MemoryStore(bucket), "p")
    author.extend(quiet, 4, with_files=True)
    calm, lock = [True], threading.Lock()  # files are copied by several threads

    def go_on(request: StoreRequest) -> None:
        if request.verb != "get" or not request.key.endswith(".parquet"):
            return
        with lock:
            if not calm:
                return
            calm.clear()
            author.seal(quiet, with_files=True)
            policy = RetentionPolicy(keep_last=3, keep_for=0, grace=0)
            later = ManualClock(wall_ticks=1_760_000_000_000_000)
            Retention(quiet, policy, external=list, clock=later, workers=1).run()

    copy_pipeline(MemoryStore(bucket, hook=go_on), target, "p")
    assert calm == []
    assert judge(target) == [CheckpointVerdict.HEALTHY] * 2
    assert SlotLog(target, "p").head().slot == 4


@pytest.mark.parametrize("writes", range(0, 12, 2))
def test_a_backup_that_ends_halfway_names_nothing_that_is_missing(
    author: Author, writes: int
) -> None:
    """The checkpoints that are in the copy are whole, and the next run completes it.

    From the first write on it is a copy of this pipeline, and another one is refused.
    """
    source, bucket, left = MemoryStore(), MemoryBucket(), [writes]
    other = MemoryStore(name="other")
    ensure_identity(other, "p")
    ensure_identity(source, "p")
    author.extend(SlotLog(source, "p"), 3, with_files=True)

    lock = threading.Lock()  # files are copied by several threads

    def end(request: StoreRequest) -> Fault | None:
        if request.verb not in ("put", "copy"):
            return None
        with lock:
            left[0] -= 1
            return Fault.REFUSED if left[0] < 0 else None

    target = MemoryStore(bucket, name="copy", hook=end)
    if writes < 10:
        with pytest.raises(TransientError):
            copy_pipeline(source, target, "p")
    calm = MemoryStore(bucket, name="copy")
    if 0 < writes < 10:
        with pytest.raises(ConfigurationError, match="holds"):
            copy_pipeline(other, calm, "p")
    assert set(judge(calm)) <= {CheckpointVerdict.HEALTHY}
    copy_pipeline(source, calm, "p")
    assert judge(calm) == [CheckpointVerdict.HEALTHY] * 3


def test_a_copy_of_another_pipeline_and_the_origin_are_not_written_to(author: Author) -> None:
    """A name that is used twice, or a target that is the source, is refused."""
    source, target = MemoryStore(), MemoryStore(name="copy")
    ensure_identity(source, "p")
    author.seal(SlotLog(source, "p"))
    with pytest.raises(ConfigurationError, match="nothing to copy"):
        copy_pipeline(source, source, "p")
    uid = ensure_identity(target, "p")
    with pytest.raises(ConfigurationError, match=uid):
        copy_pipeline(source, target, "p")
    assert len(target.bucket.objects) == 1
