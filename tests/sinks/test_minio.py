"""The same on a real MinIO: the catalog in the work folder, metadata and data in the bucket."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pytest
from tests.servers.minio import CertifiedMinio
from tests.sinks.conftest import World
from tests.sinks.table_checks import is_table, once

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import require_honest_store
from tidegate.jobs.sinks.published_tables import list_referenced_files, read_table

pytestmark = pytest.mark.minio


@pytest.fixture
def bucket(minio_environment: object, tmp_path: Path) -> World:
    return World(open_store(f"s3://tidegate/{secrets.token_hex(4)}"), tmp_path)


def test_follow_restore_and_read(bucket: World) -> None:
    """Epochs are published, rewound after a restore, and read without the catalog."""
    sink = bucket.sink()
    target = bucket.seal(2, ("events", "hourly")).id
    sink.follow(bucket.log)
    bucket.seal(2, ("events", "late"))
    sink.follow(bucket.log)
    bucket.fork(target)
    bucket.seal(1)
    sink.follow(bucket.log)
    assert bucket.exact(sink)
    assert read_table(bucket.spec, bucket.store, "events")["_epoch"].to_pylist() == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_tls_with_a_private_ca(
    tls_minio: CertifiedMinio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CA that AWS_CA_BUNDLE names holds for the files of the tables as well.

    Published, read, looked through.
    """
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls_minio.ca))
    monkeypatch.setattr("tidegate.jobs.sinks.table_compaction._NEWEST_SLOTS_KEPT", 1)
    store = S3Store(tls_minio.settings())
    require_honest_store(store)  # waits until the server has started
    world = World(store, tmp_path)
    sink = world.sink()
    world.seal(3, ("events", "hourly"))
    assert sink.follow(world.log) == 3
    assert world.exact(sink)
    assert read_table(world.spec, store, "events")["_epoch"].to_pylist() == [1, 1, 2, 2, 3, 3]
    assert sum("/tables/events/" in file for file in list_referenced_files(world.spec, store)) == 3


def test_driver_on_another_host(bucket: World) -> None:
    """A driver with a work folder of its own takes the tables over where they stand."""
    bucket.seal(3, ("events", "hourly"))
    bucket.sink("one").follow(bucket.log)
    shutil.rmtree(bucket.workdir / "one")
    fresh = bucket.sink("two")
    assert fresh.lag(bucket.log) == 0
    bucket.seal(2)
    assert fresh.follow(bucket.log) == 2
    assert bucket.exact(fresh)


def test_two_hosts_with_catalogs_of_their_own(bucket: World) -> None:
    """Two drivers that know nothing of each other's catalog each hold exact tables, and readers
    never go back.
    """
    one, two = bucket.sink("one"), bucket.sink("two")
    bucket.seal(2)
    one.follow(bucket.log)
    two.follow(bucket.log)
    bucket.seal(2)
    two.follow(bucket.log)
    one.follow(bucket.log)
    assert bucket.exact(one)
    assert bucket.exact(two)
    assert read_table(bucket.spec, bucket.store, "events")["_epoch"].to_pylist() == [
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]


def test_race(bucket: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two publishers on one catalog, one overtaken between load and commit."""
    one, two = bucket.sink(), bucket.sink()
    bucket.seal(2)
    one.follow(bucket.log)
    two.follow(bucket.log)
    bucket.seal(1)
    once(monkeypatch, "append_slots", is_table("events"), lambda: two.follow(bucket.log))
    one.follow(bucket.log)
    assert bucket.exact(one)
