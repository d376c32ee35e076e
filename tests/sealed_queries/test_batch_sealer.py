"""A committed batch of a query becomes a slot that restores it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint, read_tree
from tests.servers.memory_store import Fault, MemoryStore, StoreRequest
from tidegate.checkpoints.batch_notes import BatchNotes, BatchReport, SinkRewind, SourceProgress
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.store import map_in_threads
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.sealed_queries import batch_objects
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects, restore_files, select_objects
from tidegate.jobs.sealed_queries.batch_sealer import read_progress
from tidegate.jobs.sealed_queries.checkpoint_files import select_restoring_files
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts

_REPORT = BatchReport(
    rows=3, sources=(SourceProgress(name="FileStreamSource[in]", rows=3),), sink="ForeachBatchSink"
)


def _seal(bench: JobBench, batches: int, name: str = "q", partitions: int = 2) -> FakeCheckpoint:
    query, made = bench.query(name, partitions=partitions)
    for batch in range(batches):
        made.commit(batch)
        assert bench.sealer.seal(query, batch, _REPORT)
    return made


def _restore(bench: JobBench, manifest: Manifest, query: str = "q") -> dict[str, bytes]:
    target = bench.folder / f"restored-{manifest.slot}-{query}"
    restore_files(bench.store, query, manifest.segments, target)
    return read_tree(target)


def test_a_slot_restores_its_batch_byte_for_byte(bench: JobBench) -> None:
    """Every file that belongs to it, and none of a later batch."""
    made = _seal(bench, 5)
    for batch in (0, 2, 4):
        wanted = {name: made.host.read(name) for name in select_restoring_files(made.host, batch)}
        found = _restore(bench, bench.sealed[batch])
        assert {name: found[name] for name in wanted} == wanted
        offsets = {name for name in found if name.startswith("offsets")}
        assert max(int(name.removeprefix("offsets/")) for name in offsets) == batch


def test_a_script_may_go_to_another_folder(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes a relative path where the script was when the query started."""
    monkeypatch.chdir(bench.folder)
    query, made = bench.query("q")
    query = replace(query, facts=WriterFacts(path="out"))
    log = bench.folder / "out" / "_spark_metadata" / "0"
    log.parent.mkdir(parents=True)
    log.write_text("v1")
    monkeypatch.chdir("/")
    made.commit(0)
    assert bench.sealer.seal(query, 0, _REPORT)
    assert _restore(bench, bench.sealed[0])["_sink/0"] == b"v1"


def test_a_slot_restores_all_queries_of_the_job(bench: JobBench) -> None:
    """Each where it was when the slot was filled."""
    first, made = bench.query("first")
    second, other = bench.query("second")
    for batch in range(2):
        made.commit(batch)
        bench.sealer.seal(first, batch, _REPORT)
    other.commit(0)
    bench.sealer.seal(second, 0, _REPORT)
    made.commit(2)
    bench.sealer.seal(first, 2, _REPORT)
    notes = BatchNotes.from_manifest(bench.sealed[2])
    assert notes is not None
    assert {name: at.batch for name, at in notes.queries.items()} == {"first": 1, "second": 0}
    assert "offsets/1" in _restore(bench, bench.sealed[2], "first")
    assert "offsets/0" in _restore(bench, bench.sealed[2], "second")
    assert bench.sealed[3].cut["second/0"] == bench.sealed[2].cut["second/0"]


def test_a_batch_costs_two_requests_however_many_partitions(bench: JobBench) -> None:
    """One pack and one slot. The manifest grows with the packs that are needed, not the files."""
    _seal(bench, 3, partitions=200)
    query, made = bench.query("wide", partitions=200)
    made.commit(0)
    bench.sealer.seal(query, 0, _REPORT)
    requests: list[StoreRequest] = []
    bench.store.hook = requests.append
    made.commit(1)
    bench.sealer.seal(query, 1, _REPORT)
    wanted = [request for request in requests if "lease" not in request.key]
    assert [request.verb for request in wanted] == ["put", "create"]
    assert len(wanted[1].data or b"") < 6_000


def test_a_large_file_is_stored_once_as_itself(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later batches name the same object."""
    monkeypatch.setattr(batch_objects, "LARGE_FILE", 1000)
    query, made = bench.query("q", partitions=1)
    made.commit(0)
    made.put("state/0/0/1.delta", "x" * 2000)
    bench.sealer.seal(query, 0, _REPORT)
    made.commit(1)
    bench.sealer.seal(query, 1, _REPORT)
    keys = [ref.key for ref in bench.sealed[1].segments if ref.extra.get("path")]
    assert len(keys) == 1
    assert keys[0].endswith("q/state/0/0/1.delta")
    assert keys[0] in {ref.key for ref in bench.sealed[0].segments}
    assert _restore(bench, bench.sealed[1])["state/0/0/1.delta"] == b"x" * 2000


def test_what_went_up_before_an_outage_is_not_sent_again(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch with a large state might never get all of it through."""
    monkeypatch.setattr(batch_objects, "LARGE_FILE", 1)
    query, made = bench.query("q")
    made.commit(0)
    sent: list[str] = []

    def refuse_fourth(request: StoreRequest) -> Fault | None:
        """Break off once."""
        sent.extend([request.key] if "/q/" in request.key else [])
        return Fault.REFUSED if len(sent) == 4 else None

    bench.store.hook = refuse_fourth
    with pytest.raises(TransientError):
        bench.sealer.seal(query, 0, _REPORT)
    assert bench.sealer.seal(query, 0, _REPORT)
    assert len(sent) == len({*sent}) + 1


def test_a_lost_store_ends_a_restore_at_once(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of a thousand files would wait for the store, one after the other."""
    monkeypatch.setattr(batch_objects, "LARGE_FILE", 1)
    monkeypatch.setattr(batch_objects, "map_in_threads", partial(map_in_threads, threads=1))
    _seal(bench, 1, partitions=50)
    asked: list[str] = []

    def refuse(request: StoreRequest) -> Fault:
        asked.append(request.key)
        threading.Event().wait(0.01)  # a store that is away answers late
        return Fault.REFUSED

    bench.store.hook = refuse
    with pytest.raises(TransientError):
        _restore(bench, bench.sealed[0])
    assert len(asked) < 25


def test_old_packs_are_packed_again(bench: JobBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query whose state is never compacted names a bounded number of objects."""
    monkeypatch.setattr(batch_objects, "MOST_PACKS", 8)
    made = _seal(bench, 30)
    assert max(len(manifest.segments) for manifest in bench.sealed) <= 8
    found = _restore(bench, bench.sealed[-1])
    for name in select_restoring_files(made.host, 29):
        assert found[name] == made.host.read(name)


def test_retention_keeps_what_the_kept_batches_need(bench: JobBench) -> None:
    """Objects of retired batches stay as long as a kept one names them; the others go."""
    query, made = bench.query("q", partitions=1)
    for batch in range(12):
        made.commit(batch, snapshot=batch == 6)
        if batch == 6:
            made.put("sources/0/6.compact", "files up to 6")
        bench.sealer.seal(query, batch, _REPORT)
    policy = RetentionPolicy(keep_last=3, keep_for=0, grace=0)
    report = Retention(bench.log, policy, external=list).run()
    assert len(report.retired) == 9
    assert report.deleted
    for manifest in bench.sealed[-3:]:
        verified = verify_checkpoint(bench.log, manifest.id)
        assert verified.verdict is CheckpointVerdict.HEALTHY, verified.findings
        assert f"offsets/{manifest.slot - 1}" in _restore(bench, manifest)
    query.objects = QueryObjects.from_segments(bench.store, "q", bench.sealed[-1].segments)
    made.commit(12)
    assert bench.make_sealer().seal(query, 12, _REPORT)


def test_a_new_launch_stores_nothing_twice(bench: JobBench) -> None:
    """It reads from the packs what the bucket holds; only files without a version go again."""
    made = _seal(bench, 3)
    query, _ = bench.query("q")
    query.objects = QueryObjects.from_segments(bench.store, "q", bench.sealed[-1].segments)
    made.commit(3)
    bench.make_sealer().seal(query, 3, _REPORT)
    pack = _list_pack(bench.store, bench.sealed[-1])
    assert "state/0/0/4.delta" in pack
    assert not any(name.endswith(("3.delta", "2.delta", "offsets/2")) for name in pack)


def test_a_rewritten_file_is_restored_as_it_was_last(bench: JobBench) -> None:
    """Spark may write files without a version again at a start; an older pack holds them as well."""
    _seal(bench, 2)
    query, made = bench.query("q")
    query.objects = QueryObjects.from_segments(bench.store, "q", bench.sealed[-1].segments)
    made.put("state/0/_metadata/metadata", "v2")
    made.commit(2)
    bench.make_sealer().seal(query, 2, _REPORT)
    assert _restore(bench, bench.sealed[-1])["state/0/_metadata/metadata"] == b"v2"


def _list_pack(store: MemoryStore, manifest: Manifest) -> list[str]:
    prefix = f"{manifest.slot:06d}-{manifest.attempt}"
    own = [ref for ref in manifest.segments if prefix in ref.key]
    assert len(own) == 1
    with batch_objects._open_pack(store, own[0]) as pack:
        return pack.getnames()


def test_a_batch_whose_files_are_gone_is_not_sealed(bench: JobBench) -> None:
    """Spark cleans after a hundred batches. Nothing is sealed that cannot be restored."""
    query, made = bench.query("q")
    made.commit(0)
    made.commit(1)
    (made.folder / "offsets/0").unlink()
    assert not bench.sealer.seal(query, 0, _REPORT)
    assert bench.sealed == []
    assert query.sealed == 0
    made.commit(2)
    assert bench.sealer.seal(query, 2, _REPORT)
    assert bench.sealed[0].slot == 1


def test_a_batch_given_up_while_its_pack_went_up_leaves_the_next_ones_whole(
    bench: JobBench,
) -> None:
    """Spark deletes its plan meanwhile. No later pack takes the key that later slots name."""
    query, made = bench.query("q", partitions=12)
    for batch in range(4):
        made.commit(batch)

    def purge_plan(request: StoreRequest) -> Fault | None:
        """Delete the plan of the batch as soon as its pack goes up."""
        if request.key.endswith(".tar") and request.is_write:
            (made.folder / "offsets/0").unlink(missing_ok=True)
        return None

    bench.store.hook = purge_plan
    assert not bench.sealer.seal(query, 0, _REPORT)
    bench.store.hook = None
    for batch in (1, 2, 3):
        assert bench.sealer.seal(query, batch, _REPORT)
    for manifest, batch in zip(bench.sealed, (1, 2, 3), strict=True):
        assert verify_checkpoint(bench.log, manifest.id).verdict is CheckpointVerdict.HEALTHY
        wanted = {name: made.host.read(name) for name in select_restoring_files(made.host, batch)}
        found = _restore(bench, manifest)
        assert {name: found[name] for name in wanted} == wanted


def test_retention_keeps_what_a_batch_that_was_given_up_has_stored(bench: JobBench) -> None:
    """The next batch needs it, and is sealed by the same attempt."""
    query, made = bench.query("q")
    for batch in range(4):
        made.commit(batch)
    assert bench.sealer.seal(query, 0, _REPORT)

    def purge_plan(request: StoreRequest) -> Fault | None:
        """Delete the plan of the batch as soon as its pack goes up."""
        if request.key.endswith(".tar") and request.is_write:
            (made.folder / "offsets/1").unlink(missing_ok=True)
        return None

    bench.store.hook = purge_plan
    assert not bench.sealer.seal(query, 1, _REPORT)
    bench.store.hook = None
    for batch in (2, 3):
        assert bench.sealer.seal(query, batch, _REPORT)
    policy = RetentionPolicy(keep_last=10, keep_for=0, grace=0)
    Retention(bench.log, policy, external=list).run()
    for manifest in bench.sealed:
        assert verify_checkpoint(bench.log, manifest.id).verdict is CheckpointVerdict.HEALTHY


def test_a_lost_answer_seals_once(bench: JobBench) -> None:
    """The slot is asked, as for an epoch."""
    query, made = bench.query("q")
    made.commit(0)
    faults = iter([None, Fault.LOST_ANSWER])
    bench.store.hook = lambda request: next(faults, None) if request.is_write else None
    assert bench.sealer.seal(query, 0, _REPORT)
    assert bench.log.head().slot == 1


def test_a_batch_is_repeated_with_the_same_attempt_after_an_outage(bench: JobBench) -> None:
    """Files of an attempt that no slot names would be swept, while a later slot needs them."""
    query, made = bench.query("q")
    made.commit(0)
    down = {"slots"}
    bench.store.hook = lambda request: Fault.REFUSED if "/slots/" in request.key and down else None
    bench.sealer.log._seal_budget = 0.0
    with pytest.raises(TransientError):
        bench.sealer.seal(query, 0, _REPORT)
    down.clear()
    assert bench.sealer.seal(query, 0, _REPORT)
    manifest = bench.sealed[0]
    assert all(manifest.attempt in ref.key for ref in manifest.segments)


def test_a_slot_of_another_driver_ends_the_launch(bench: JobBench) -> None:
    """Its Spark has gone on from another history than the log."""
    query, made = bench.query("q")
    behind = bench.make_sealer()
    made.commit(0)
    bench.sealer.seal(query, 0, _REPORT)
    with pytest.raises(TransientError, match="has filled the slot"):
        behind.seal(replace(query, objects=QueryObjects(bench.store, "q")), 0, _REPORT)


def test_without_the_lease_nothing_is_sealed(bench: JobBench) -> None:
    """The driver that took over has a folder of its own."""
    query, made = bench.query("q")
    made.commit(0)
    bench.lease.release()
    with pytest.raises(FencedError):
        bench.sealer.seal(query, 0, _REPORT)
    assert bench.log.head().slot == 0


def test_a_damaged_object_restores_nothing(bench: JobBench) -> None:
    """The checksum of the slot decides."""
    _seal(bench, 1)
    key = select_objects(bench.sealed[0].segments, "q")[0].key
    bench.store.put(key, b"something else")
    with pytest.raises(PoisonError, match="checksum"):
        _restore(bench, bench.sealed[0])
    verified = verify_checkpoint(bench.log, bench.sealed[0].id)
    assert verified.verdict is CheckpointVerdict.DAMAGED


def test_a_restore_goes_on_after_the_chosen_batch(bench: JobBench) -> None:
    """On a new timeline; the old one stays as it was."""
    _seal(bench, 4)
    target = bench.sealed[1].id
    plan = plan_restore(bench.log, target)
    assert [(one.query, one.newest, one.batch) for one in plan.sinks] == [("q", 3, 1)]
    commit_restore(bench.log, bench.lease, plan, request_id="r", who="w", why="y")
    sealer = bench.make_sealer()
    assert sealer.head.record is not None
    assert sealer.head.record.id == target
    query, made = bench.query("again")
    made.commit(0)
    sealer.seal(query, 0, _REPORT)
    assert str(bench.sealed[-1].id).startswith("t1-000003-")
    assert bench.log.open_checkpoint(bench.sealed[3].id).epoch == bench.sealed[3]


def test_a_restore_that_a_sink_cannot_follow_is_refused(bench: JobBench) -> None:
    """Before anything happens: to an older batch, and to the beginning."""
    query, made = bench.query("q", SinkRewind.REFUSED)
    for batch in range(2):
        made.commit(batch)
        bench.sealer.seal(query, batch, _REPORT)
    for target in (bench.sealed[0].id, None):
        plan = plan_restore(bench.log, target)
        with pytest.raises(ConfigurationError, match="sink of query q"):
            commit_restore(bench.log, bench.lease, plan, request_id="r", who="w", why="y")
    assert bench.log.head().timeline == 0


def test_what_spark_reports_is_in_the_slot(bench: JobBench) -> None:
    """Rows, watermark, state, dropped rows and the time of each phase."""
    progress = {
        "batchId": 0,
        "durationMs": {"addBatch": 800, "triggerExecution": 1000},
        "eventTime": {"watermark": "2026-01-01T00:11:49.000Z"},
        "stateOperators": [
            {"numRowsTotal": 10, "memoryUsedBytes": 5056, "numRowsDroppedByWatermark": 2}
        ],
        "sources": [{"description": "FileStreamSource[in]", "numInputRows": 20}],
        "sink": {"description": "ForeachBatchSink"},
    }
    query, made = bench.query("q")
    made.commit(0)
    bench.sealer.seal(query, 0, read_progress(progress))
    manifest = bench.sealed[0]
    notes = BatchNotes.from_manifest(manifest)
    assert notes is not None
    at = notes.queries["q"]
    assert (at.rows, at.dropped, at.state_rows, at.state_bytes) == (20, 2, 10, 5056)
    assert at.watermark == manifest.frontier_after == 1_767_226_309_000_000
    assert manifest.timings == {"addBatch": 0.8, "triggerExecution": 1.0}
    assert manifest.cut["q/0"] == {
        "source": "FileStreamSource[in]",
        "start": None,
        "end": '{"logOffset": 0}',
    }
    assert CheckpointId.parse(str(manifest.id)) == manifest.id


def test_a_batch_without_a_report_is_sealed_all_the_same(bench: JobBench, tmp_path: Path) -> None:
    """The driver may have died between the commit and the report."""
    query, made = bench.query("q")
    made.commit(0)
    assert bench.sealer.seal(query, 0, BatchReport())
    assert bench.sealed[0].counters.read == 0
    assert bench.sealed[0].cut["q/0"]["end"] == '{"logOffset": 0}'
