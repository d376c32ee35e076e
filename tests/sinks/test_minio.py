"""The same on a real MinIO: catalog, metadata and data in the bucket."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from tests.servers.minio import CertifiedMinio
from tests.sinks.conftest import World
from tests.sinks.table_checks import is_table, once

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store_probe import require_honest_store
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sinks.table_maintenance import (
    CompactionResult,
    compact_tables,
    list_referenced_files,
)

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
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._NEWEST_SLOTS_KEPT", 1)
    store = S3Store(tls_minio.settings())
    require_honest_store(store)  # waits until the server has started
    world = World(store, tmp_path)
    sink = world.sink()
    world.seal(3, ("events", "hourly"))
    assert sink.follow(world.log) == 3
    assert world.exact(sink)
    assert read_table(world.spec, store, "events")["_epoch"].to_pylist() == [1, 1, 2, 2, 3, 3]
    assert sum("/tables/events/" in file for file in list_referenced_files(world.spec, store)) == 3


def test_drivers_share_the_catalog_of_the_bucket(
    bucket: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `outputs.catalog` two hosts publish into the same tables, and small files are merged.

    A table whose catalog entry is lost is found through the pointer.
    """
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._NEWEST_SLOTS_KEPT", 1)
    monkeypatch.setattr("tidegate.jobs.sinks.table_maintenance._MIN_FILES_PER_MERGE", 2)
    one, two = bucket.sink(), bucket.sink()
    for sink in (one, two, one, two):
        bucket.seal(1)
        assert sink.follow(bucket.log) == 1
    assert compact_tables(bucket.spec, bucket.store)["events"] == CompactionResult(4, 2)
    bucket.store.delete(bucket.layout.table_catalog_key("events"))
    bucket.seal(1)
    assert bucket.sink().follow(bucket.log) == 1
    assert bucket.exact(two)
    assert read_table(bucket.spec, bucket.store, "events").num_rows == 10


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
