"""A moved pipeline goes on at its new address, with its tables; the origin is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.servers.minio import RealMinio
from tests.sinks.conftest import World, make_spec

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    RequestKind,
    read_desired_state,
    set_desired_state,
    submit_request,
)
from tidegate.checkpoints.lease import Lease, LeaseHeldError, LeaseObserver, LeaseView
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    ensure_identity,
    read_identity,
    refuse_copied_store,
)
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks import pipeline_move
from tidegate.jobs.sinks.iceberg_sink import IcebergSink
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.pipeline_move import move_pipeline

TABLES = ("events", "late")
ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)


@pytest.fixture
def origin(world: World) -> World:
    """Five epochs, of which two were retired; the tables lack the last one."""
    uid = ensure_identity(world.store, "p")
    world.seal(4, TABLES)
    world.sink(uid=uid).follow(world.log)
    world.retire(1)
    world.retire(2)
    world.seal(1, TABLES)
    return world


def make_target(origin: World, tmp_path: Path) -> World:
    """The place that the pipeline moves to, with nothing in it."""
    return World(LocalStore(tmp_path / "target"), tmp_path / "work", origin.spec)


def list_objects(world: World) -> dict[str, str]:
    """What is in a store, by key."""
    return {info.key: info.etag for info in world.store.list_objects("")}


def count_rows(sink: IcebergSink) -> list[dict[int, int]]:
    """Slot -> rows of each table."""
    tables = (sink.open_table(table).scan().to_arrow() for table in TABLES)
    return [dict(sorted(Counter(one["_epoch"].to_pylist()).items())) for one in tables]


def test_a_moved_pipeline_goes_on_with_its_tables(origin: World, tmp_path: Path) -> None:
    """Also rows of retired epochs, which only the tables have; sinks know it by its uid."""
    target = make_target(origin, tmp_path)
    uid = read_identity(origin.store, "p")
    move_pipeline(origin.spec, origin.log, target.store)
    assert ensure_identity(target.store, "p") == uid
    assert uid is not None
    sink = target.sink(uid=uid)
    assert sink.follow(target.log) == 1
    target.seal(2, TABLES)
    sink.follow(target.log)
    assert count_rows(sink) == [dict.fromkeys(range(1, 8), 2)] * 2
    cut = read_published_cut(target.store, "p")
    assert cut is not None
    assert cut.upto == 7
    assert all(place.startswith(target.store.uri("p/iceberg/")) for place in cut.tables.values())
    for table in TABLES:
        files = sink.open_table(table).inspect.files()["file_path"].to_pylist()
        assert [path for path in files if not path.startswith(target.store.uri("p/"))] == []


def test_a_restore_after_the_move_takes_rows_back(origin: World, tmp_path: Path) -> None:
    """To a checkpoint from before the move; the rebuilt tables follow."""
    target = make_target(origin, tmp_path)
    third = origin.log.read_slot(0, 3)
    assert third is not None
    move_pipeline(origin.spec, origin.log, target.store)
    uid = ensure_identity(target.store, "p")
    lease = Lease.acquire(target.store, "p", ProcessIdentity.this_process(), uid=uid)
    plan = plan_restore(target.log, third.record.id)  # type: ignore[union-attr]
    commit_restore(target.log, lease, plan, request_id="r", who="ann", why="")
    sink = target.sink(uid=uid)
    sink.follow(target.log)
    assert count_rows(sink) == [{1: 2, 2: 2, 3: 2}] * 2


@pytest.mark.minio
@pytest.mark.parametrize("origin_is_folder", [True, False], ids=["folder", "prefix"])
def test_a_pipeline_moves_into_a_bucket(
    world: World, tmp_path: Path, minio_environment: RealMinio, origin_is_folder: bool
) -> None:
    """From a folder, and from another prefix of the bucket; tables and restores go on there."""

    def open_prefix(name: str) -> Store:
        return open_store(f"s3://{minio_environment.bucket}/{tmp_path.name}/{name}")

    old = world if origin_is_folder else World(open_prefix("old"), tmp_path / "old")
    new = World(open_prefix("new"), tmp_path / "new")
    uid = ensure_identity(old.store, "p")
    third = old.seal(3, TABLES)
    old.seal(2, TABLES)
    old.sink(uid=uid).follow(old.log)
    old.retire(1)
    move_pipeline(old.spec, old.log, new.store)
    assert ensure_identity(new.store, "p") == uid
    new.seal(1, TABLES)
    sink = new.sink(uid=uid)
    sink.follow(new.log)
    assert count_rows(sink) == [dict.fromkeys(range(1, 7), 2)] * 2
    for table in TABLES:
        files = sink.open_table(table).inspect.files()["file_path"].to_pylist()
        assert [path for path in files if not path.startswith(new.store.uri("p/"))] == []
    with pytest.raises(ConfigurationError, match="is a copy of"):
        ensure_identity(old.store, "p")
    lease = Lease.acquire(new.store, "p", ProcessIdentity.this_process(), uid=uid)
    plan = plan_restore(new.log, third.id)
    commit_restore(new.log, lease, plan, request_id="r", who="ann", why="")
    sink.follow(new.log)
    assert count_rows(sink) == [{1: 2, 2: 2, 3: 2}] * 2


def test_the_origin_is_refused_afterwards(origin: World, tmp_path: Path) -> None:
    """It is a copy of what was moved; a second move has nothing to do there.

    No driver is wanted there, also if the move broke off before it said so.
    """
    target = make_target(origin, tmp_path)
    set_desired_state(origin.store, "p", DesiredState.RUN, who="ann")
    for _ in range(2):
        move_pipeline(origin.spec, origin.log, target.store)
        desired = read_desired_state(origin.store, "p")
        assert (desired.state, desired.who) == (DesiredState.STOPPED, "move")
        assert desired.why == f"moved to {target.store.url}"
        assert read_desired_state(target.store, "p").state is DesiredState.RUN
        set_desired_state(origin.store, "p", DesiredState.RUN, who="ann")
    with pytest.raises(ConfigurationError, match="is a copy of"):
        ensure_identity(origin.store, "p")
    with pytest.raises(ConfigurationError, match="is a copy of"):
        move_pipeline(origin.spec, origin.log, LocalStore(tmp_path / "third"))


def test_a_move_is_refused_while_a_driver_lives(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied; the driver goes on."""
    target = make_target(origin, tmp_path)
    lease = Lease.acquire(origin.store, "p", ELSEWHERE)
    look = LeaseObserver.observe

    def renew_and_look(observer: LeaseObserver) -> LeaseView | None:
        lease.renew()
        return look(observer)

    monkeypatch.setattr(LeaseObserver, "observe", renew_and_look)
    with pytest.raises(LeaseHeldError):
        move_pipeline(origin.spec, origin.log, target.store)
    assert list_objects(target) == {}
    lease.renew()


@pytest.mark.parametrize("breaks", ["copy_pipeline", "_rebuild_tables", "verify", "identity"])
def test_a_move_that_breaks_off_is_begun_again(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Behind any of its steps. At most one of the two places accepts a driver at any time."""
    target = make_target(origin, tmp_path)
    uid = read_identity(origin.store, "p")
    with monkeypatch.context() as patch:
        verify = _fail if breaks == "verify" else _do_nothing
        if breaks == "identity":
            patch.setattr(target.store, "compare_and_swap", _fail)
        elif breaks != "verify":
            step = getattr(pipeline_move, breaks)

            def break_behind(*given: object) -> None:
                step(*given)
                raise KeyboardInterrupt

            patch.setattr(pipeline_move, breaks, break_behind)
        with pytest.raises(KeyboardInterrupt):
            move_pipeline(origin.spec, origin.log, target.store, verify)
    with pytest.raises(ConfigurationError):
        refuse_copied_store(target.store, "p")
    if breaks != "identity":
        refuse_copied_store(origin.store, "p")
        origin.seal(1, TABLES)  # it may go on instead
    move_pipeline(origin.spec, origin.log, target.store)
    sink = target.sink(uid=ensure_identity(target.store, "p"))
    sink.follow(target.log)
    assert count_rows(sink) == [dict.fromkeys(range(1, target.log.head().slot + 1), 2)] * 2
    assert read_identity(target.store, "p") == uid
    with pytest.raises(ConfigurationError):
        refuse_copied_store(origin.store, "p")


def test_a_pipeline_without_an_address_is_moved(origin: World, tmp_path: Path) -> None:
    """Its identity is older than addresses. A move that breaks off leaves a copy that is refused."""
    target, key = make_target(origin, tmp_path), BucketLayout("p").identity_key
    identity = json.loads(origin.store.get(key).data)
    del identity["address"]
    origin.store.put(key, json.dumps(identity).encode())
    with pytest.raises(KeyboardInterrupt):
        move_pipeline(origin.spec, origin.log, target.store, _fail)
    with pytest.raises(ConfigurationError, match="is a copy of"):
        ensure_identity(target.store, "p")
    assert ensure_identity(origin.store, "p") == identity["uid"]
    move_pipeline(origin.spec, origin.log, target.store)
    assert ensure_identity(target.store, "p") == identity["uid"]


def test_of_two_moves_one_is_refused(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked before the other took the lease."""
    first, second = make_target(origin, tmp_path / "a"), make_target(origin, tmp_path / "b")
    look = pipeline_move._require_free_place

    def look_and_be_late(*given: object) -> None:
        look(*given)  # type: ignore[arg-type]
        monkeypatch.setattr(pipeline_move, "_require_free_place", look)
        move_pipeline(origin.spec, origin.log, first.store)

    monkeypatch.setattr(pipeline_move, "_require_free_place", look_and_be_late)
    with pytest.raises(ConfigurationError, match="is a copy of"):
        move_pipeline(origin.spec, origin.log, second.store)
    assert list_objects(second) == {}
    ensure_identity(first.store, "p")


def test_a_move_leaves_no_request_behind(origin: World, tmp_path: Path) -> None:
    """Also none that comes while it copies. Those that no driver would apply do not matter."""
    target = make_target(origin, tmp_path)
    submit_request(origin.store, "p", RequestKind.DRAIN, who="ann", token=0)
    submit_request(origin.store, "p", RequestKind.PIN, who="ann", name="old", ttl=-1.0)

    def ask() -> None:
        submit_request(origin.store, "p", RequestKind.PIN, who="ann", name="q", request_id="r")

    for verify in (ask, _do_nothing):
        with pytest.raises(ConfigurationError, match=r"requests \(pin\)"):
            move_pipeline(origin.spec, origin.log, target.store, verify)
        refuse_copied_store(origin.store, "p")
    origin.store.delete(BucketLayout("p").request_key("r"))
    move_pipeline(origin.spec, origin.log, target.store)


def _fail(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _do_nothing() -> None:
    pass


def test_nothing_at_the_target_is_overwritten(origin: World, tmp_path: Path) -> None:
    """Another pipeline of this name, one that runs there, or objects of someone else."""
    other, foreign = make_target(origin, tmp_path / "a"), make_target(origin, tmp_path / "b")
    ensure_identity(other.store, "p")
    foreign.store.put("p/notes.txt", b"mine")
    for place in (other, foreign, origin):
        before = list_objects(place)
        with pytest.raises(ConfigurationError):
            move_pipeline(origin.spec, origin.log, place.store)
        assert {
            key: tag for key, tag in list_objects(place).items() if "lease" not in key
        } == before
    refuse_copied_store(origin.store, "p")


def test_tables_of_a_shared_catalog_are_not_moved(origin: World, tmp_path: Path) -> None:
    """Its entries name the addresses of the origin."""
    target = make_target(origin, tmp_path)
    spec = make_spec(outputs={"catalog": "sqlite:////tmp/none.sqlite"})
    with pytest.raises(ConfigurationError, match="in a catalog of its own"):
        move_pipeline(spec, origin.log, target.store)
    assert list_objects(target) == {}
