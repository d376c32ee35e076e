"""Spark's checkpoints in the bucket: the server copies them at a seal, a restore and an adoption."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.sealed_queries.conftest import JobBench
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint, read_tree
from tests.servers.memory_store import MemoryStore, StoreRequest
from tidegate.checkpoints.batch_notes import BatchReport, SinkRewind
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.verify import CheckpointVerdict, verify_checkpoint
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.sealed_queries import batch_objects, job_location
from tidegate.jobs.sealed_queries.batch_objects import QueryObjects, restore_files
from tidegate.jobs.sealed_queries.batch_sealer import SealedQuery
from tidegate.jobs.sealed_queries.checkpoint_files import select_restoring_files
from tidegate.jobs.sealed_queries.checkpoint_folder import BucketFolder
from tidegate.jobs.sealed_queries.job_location import (
    JobLocation,
    adopt_checkpoint,
    delete_old_launches,
    open_location,
    set_bucket_access,
)
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts
from tidegate.jobs.spec.operations import JARS, add_bucket_jars

_LAUNCHES = "clicks/launches/"


class BucketQuery:
    """A query whose Spark writes into the bucket of a bench."""

    def __init__(self, bench: JobBench, partitions: int = 2, store: str = "hdfs") -> None:
        self.bench = bench
        self.made = FakeCheckpoint(bench.folder / "spark", partitions, store)
        self.folder = BucketFolder(bench.store, f"{_LAUNCHES}1/q/")
        objects = QueryObjects(bench.store, "q")
        self.sealed = SealedQuery("q", self.folder, objects, SinkRewind.REPEAT, WriterFacts())

    def commit(self, batch: int, *, snapshot: bool = False) -> None:
        """Let Spark commit a batch."""
        self.made.commit(batch, snapshot)
        self.write()

    def write(self) -> None:
        """Write into the bucket what the fake has written into its folder."""
        objects = self.bench.store.bucket.objects
        for path, data in read_tree(self.made.folder).items():
            objects.setdefault(f"{self.folder.prefix}{path}", data)

    def seal(self, batches: range) -> list[Manifest]:
        """Let Spark commit batches, and seal each."""
        for batch in batches:
            self.commit(batch)
            assert self.bench.sealer.seal(self.sealed, batch, BatchReport())
        return self.bench.sealed


def _list_tree(folder: BucketFolder) -> dict[str, bytes]:
    return {path: folder.read(path) for path in folder.list_files()}


def _watch(store: MemoryStore) -> list[StoreRequest]:
    """Note the requests from now on, without those of the lease."""
    requests: list[StoreRequest] = []

    def note(request: StoreRequest) -> None:
        if "lease" not in request.key:
            requests.append(request)

    store.hook = note
    return requests


def _restore(bench: JobBench, manifest: Manifest, launch: int) -> tuple[JobLocation, Path]:
    bucket = BucketFolder(bench.store, f"{_LAUNCHES}{launch}/")
    location = JobLocation(bench.folder / str(launch), manifest, is_first=False, bucket=bucket)
    _, part = location.prepare_query(bench.store, "q")
    assert part is not None
    return location, part


@pytest.mark.parametrize("partitions", [1, 200])
def test_a_batch_costs_a_copy_per_new_file_and_four_requests(
    bench: JobBench, partitions: int
) -> None:
    """No byte of state passes through the driver: it lists, reads the offsets, and fills the slot."""
    query = BucketQuery(bench, partitions)
    query.seal(range(3))
    query.commit(3)
    requests = _watch(bench.store)
    assert bench.sealer.seal(query.sealed, 3, BatchReport())
    verbs = Counter(request.verb for request in requests)
    # Of each partition a delta and its checksum; offsets, commit and the source's log.
    assert verbs == {"list": 1, "get": 2, "copy": 2 * partitions + 3, "create": 1}
    read = {request.key for request in requests if request.verb == "get"}
    assert read == {f"{query.folder.prefix}offsets/3"}


@pytest.mark.parametrize("store", ["hdfs", "rocksdb", "changelog"])
def test_a_slot_restores_its_batch_by_copies(bench: JobBench, store: str) -> None:
    """Exactly the objects of the batch, into the folder of another launch."""
    query = BucketQuery(bench, store=store)
    query.seal(range(5))
    wanted = {
        path: query.folder.read(path)
        for path in select_restoring_files(query.folder, 2)
        if "SSTs" not in path
    }
    # Spark cleans its own folder, and a later batch begins.
    for key in list(bench.store.bucket.objects):
        if key.startswith(query.folder.prefix):
            bench.store.delete(key)
    requests = _watch(bench.store)
    location, part = _restore(bench, bench.sealed[2], 2)
    folder = location.bucket and location.bucket.enter("q")
    assert folder is not None
    read = {request.key for request in requests if request.verb == "get"}
    assert all(key.endswith("q/metadata") for key in read)
    assert not folder.exists()
    location.publish_query("q", part)
    assert folder.exists()
    assert {path: data for path, data in _list_tree(folder).items() if path in wanted} == wanted
    offsets = {path for path in folder.list_files() if path.startswith("offsets")}
    assert offsets == {"offsets/1", "offsets/2"}


def test_ssts_that_spark_still_keeps_are_taken_without_reading_snapshots(bench: JobBench) -> None:
    """Which of them a snapshot needs is written inside it, a request per partition."""
    query = BucketQuery(bench, partitions=1, store="rocksdb")
    query.seal(range(2))
    query.commit(2)
    requests = _watch(bench.store)
    paths = select_restoring_files(query.folder, 2)
    assert not [request for request in requests if request.key.endswith(".zip")]
    assert len([path for path in paths if "SSTs" in path]) == 3
    assert len([path for path in paths if path.endswith(".zip")]) == 1


def test_a_restore_that_broke_off_is_repeated(bench: JobBench) -> None:
    """Without `metadata`, which comes last, a checkpoint counts as absent."""
    query = BucketQuery(bench)
    query.seal(range(2))
    location, _ = _restore(bench, bench.sealed[0], 2)
    assert location.bucket is not None
    assert location.bucket.enter("q").list_files()
    again, part = _restore(bench, bench.sealed[0], 2)
    again.publish_query("q", part)
    _, nothing = again.prepare_query(bench.store, "q")
    assert nothing is None


def test_a_file_that_spark_deletes_meanwhile_is_not_sealed(bench: JobBench) -> None:
    """As on a host: nothing is sealed that cannot be restored."""
    query = BucketQuery(bench)
    query.commit(0)
    doomed = f"{query.folder.prefix}state/0/1/1.delta"

    def delete(request: StoreRequest) -> None:
        if request.verb == "copy":
            bench.store.bucket.objects.pop(doomed, None)

    bench.store.hook = delete
    assert not bench.sealer.seal(query.sealed, 0, BatchReport())
    assert bench.sealed == []


def test_another_version_of_an_object_is_damage(bench: JobBench) -> None:
    """Its ETag is that of the seal, or nothing is restored."""
    query = BucketQuery(bench)
    (manifest,) = query.seal(range(1))
    assert verify_checkpoint(bench.log, manifest.id).verdict is CheckpointVerdict.HEALTHY
    ref = next(ref for ref in manifest.segments if ref.key.endswith("1.delta"))
    size = len(bench.store.get(ref.key).data)
    bench.store.put(ref.key, b"x" * size)
    verified = verify_checkpoint(bench.log, manifest.id, checksums=True)
    assert verified.verdict is CheckpointVerdict.DAMAGED
    with pytest.raises(PoisonError, match=r"1\.delta"):
        _restore(bench, manifest, 2)
    with pytest.raises(PoisonError, match=r"1\.delta"):
        restore_files(bench.store, "q", manifest.segments, bench.folder / "here")


def test_the_log_of_a_file_sink_is_restored_on_the_host(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its large entries, which are objects of their own; Spark's checkpoint has no use for it."""
    monkeypatch.setattr(batch_objects, "LARGE_FILE", 1000)
    query, log = BucketQuery(bench), bench.folder / "out" / "_spark_metadata"
    log.mkdir(parents=True)
    (log / "0.compact").write_text("v1\n" + "x" * 2000)
    query.sealed.sink_log = log
    (manifest,) = query.seal(range(1))
    location, part = _restore(bench, manifest, 2)
    assert (part / "_sink/0.compact").read_bytes() == (log / "0.compact").read_bytes()
    location.publish_query("q", part)
    assert not [path for path in location.get_folder("q").list_files() if "_sink" in path]


@pytest.mark.parametrize("source", ["restore", "adoption"])
def test_schemas_are_found_in_the_new_place(
    bench: JobBench, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark notes their absolute paths, and the old place may be deleted."""
    path, old = "state/0/_metadata/v2/0", "s3a://other/checkpoints/q"
    query = BucketQuery(bench)
    query.made.put(path, f'v2\n{{"schemaFilePath":"{old}/state/0/_stateSchema/default/0_a"}}')
    query.commit(0)
    if source == "restore":
        location, part = _restore(bench, query.seal(range(1))[0], 2)
        location.publish_query("q", part)
    else:
        other = MemoryStore()
        other.bucket.objects.update(read_tree(query.made.folder))
        monkeypatch.setattr(job_location, "open_store", lambda _: other)
        bucket = BucketFolder(bench.store, f"{_LAUNCHES}2/")
        location = JobLocation(bench.folder / "2", None, is_first=True, bucket=bucket)
        adopt_checkpoint(location, "q", old, "clicks", "uid")
    folder = location.get_folder("q")
    assert f'"{folder.address}/state/0/_stateSchema/default/0_a"' in folder.read(path).decode()


def test_a_job_moves_from_its_host_into_the_bucket_and_back(bench: JobBench) -> None:
    """Packs are unpacked on the way in; objects of their own are downloaded on the way out."""
    query, made = bench.query("q")
    made.commit(0)
    assert bench.sealer.seal(query, 0, BatchReport())
    wanted = read_tree(made.folder)
    location, part = _restore(bench, bench.sealed[0], 1)
    location.publish_query("q", part)
    moved = BucketQuery(bench)
    assert _list_tree(moved.folder) == wanted
    moved.made.commit(0)
    moved.sealed.objects = QueryObjects.from_segments(bench.store, "q", bench.sealed[0].segments)
    moved.commit(1)
    assert bench.make_sealer().seal(moved.sealed, 1, BatchReport())
    restore_files(bench.store, "q", bench.sealed[1].segments, bench.folder / "back")
    assert read_tree(bench.folder / "back") == _list_tree(moved.folder)


def test_a_launch_in_the_bucket_goes_on_like_one_of_the_host(
    bench: JobBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a proven end in place; not in the folder of a host, and not beside unknown executors."""
    monkeypatch.setattr(job_location, "_OWNER_ENDS_WITHIN", 0.0)
    launches, home = BucketFolder(bench.store, _LAUNCHES), tmp_path / "home"
    with subprocess.Popen(["true"]) as process:
        ended = ProcessIdentity.of_process(process.pid)
    owners = job_location._OWNERS.dump_json([ended])

    def open_next(token: int, *, bucket: BucketFolder | None = launches) -> JobLocation:
        return open_location(home, "uid", bench.log.head(), token, bucket)

    first = open_next(1)
    (first.folder / job_location._OWNERS_FILE).write_bytes(owners)
    second = open_next(2)
    assert second.get_folder("q").address == first.get_folder("q").address
    assert first.get_folder("q").address.endswith(f"{first.folder.name}/q")
    second.note_jvm(None)  # its executors are elsewhere
    third = open_next(3)
    assert third.folder != second.folder
    (third.folder / job_location._OWNERS_FILE).write_bytes(owners)
    assert open_next(4, bucket=None).folder != third.folder


def test_a_bad_state_is_deleted_before_a_batch_is_repeated(bench: JobBench) -> None:
    """The plan of the batch stays, so that Spark repeats exactly that batch."""
    query = BucketQuery(bench)
    query.commit(0)
    query.made.plan(1)
    query.made.write_state(2)
    query.write()
    bucket = BucketFolder(bench.store, f"{_LAUNCHES}1/")
    location = JobLocation(bench.folder / "1", None, is_first=False, bucket=bucket)
    location.prepare_query(bench.store, "q")
    paths = query.folder.list_files()
    assert not [path for path in paths if path.endswith("2.delta")]
    assert "offsets/1" in paths


def test_old_launches_are_deleted_in_the_bucket(bench: JobBench) -> None:
    """The newest two beside the present one stay, by their tokens: clocks of hosts differ."""
    for name in ("20300101T000000-000001", *(f"20260101T00000{n}-00000{n}" for n in (2, 3, 4))):
        bench.store.put(f"{_LAUNCHES}{name}/q/metadata", b"{}")
        bench.store.bucket.objects[f"{_LAUNCHES}{name}/q/state/"] = b""  # S3A's marker of a folder
    delete_old_launches(BucketFolder(bench.store, _LAUNCHES))
    assert [name[-1] for name in bench.store.list_folders(_LAUNCHES)] == ["3", "4"]


def test_a_checkpoint_of_the_script_in_a_bucket_is_adopted_once(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By copies, without what a batch has left that was not committed."""
    made, other_bucket, given = FakeCheckpoint(bench.folder / "own"), MemoryStore(), list[str]()
    made.commit(0)
    made.write_state(2)
    other_bucket.bucket.objects.update(read_tree(made.folder))

    def open_other(url: str) -> MemoryStore:
        given.append(url)
        return other_bucket

    monkeypatch.setattr(job_location, "open_store", open_other)
    bucket = BucketFolder(bench.store, f"{_LAUNCHES}2/")
    location = JobLocation(bench.folder / "2", None, is_first=True, bucket=bucket)
    requests = _watch(bench.store)
    adopt_checkpoint(location, "q", "s3a://other/checkpoints/q", "clicks", "uid")
    assert given == ["s3://other/checkpoints/q"]
    paths = bucket.enter("q").list_files()
    assert {"metadata", "offsets/0", "commits/0", "state/0/1/1.delta"} <= paths.keys()
    assert not [path for path in paths if path.endswith("2.delta") or "adopted" in path]
    assert {request.key for request in requests if request.verb == "put"} == {
        f"{bucket.prefix}q/metadata"
    }
    other = JobLocation(bench.folder / "3", None, is_first=True, bucket=bucket.enter("3"))
    with pytest.raises(ConfigurationError, match="adopted by clicks uid already"):
        adopt_checkpoint(other, "q", "s3a://other/checkpoints/q", "others", "uid")


def test_the_jars_of_s3a_join_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, also if the script asks for its session again; a script that brings them is left alone."""
    monkeypatch.delenv("TIDEGATE_SPARK_JARS", raising=False)
    added = add_bucket_jars({"spark.jars.packages": "a:b:1"})
    assert added["spark.jars.packages"].startswith(f"a:b:1,{JARS['s3a'][0]},")
    assert add_bucket_jars(added) == {}
    monkeypatch.setenv("TIDEGATE_SPARK_JARS", "/jars/hadoop-aws.jar")
    assert add_bucket_jars({"spark.jars": "/jars/a.jar"}) == {
        "spark.jars": "/jars/a.jar,/jars/hadoop-aws.jar"
    }


def test_only_the_bucket_of_the_store_gets_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may read other buckets with other keys, and settings of the job win."""
    monkeypatch.setenv("TIDEGATE_S3_ACCESS_KEY", "who")
    monkeypatch.setenv("TIDEGATE_S3_SECRET_KEY", "what")
    session, retain = MagicMock(), "spark.sql.streaming.minBatchesToRetain"
    set_bucket_access(session, "s3a://lake/clicks/launches/1/q", {retain: "7"})
    found = dict(call.args for call in session.conf.set.call_args_list)
    assert found["fs.s3a.bucket.lake.access.key"] == "who"
    assert not [key for key in found if key.startswith("fs.s3a.") and ".bucket.lake." not in key]
    assert retain not in found
