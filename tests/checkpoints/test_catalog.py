"""Listing, resolving and comparing checkpoints, quickly and through forks, from a cache that may be
thrown away.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest
from tests.yardstick import slowness

from tidegate.checkpoints import slot_index
from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog, diff_checkpoints
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of four slots, so that a short history has several."""
    monkeypatch.setattr(slot_index, "SLOTS_PER_PAGE", 4)


def ids(catalog: CheckpointCatalog) -> list[str]:
    """What a listing shows."""
    return [str(row.id) for row in catalog.list_checkpoints()]


def test_checkpoints_are_listed_newest_first_on_every_store(store: Store, author: Author) -> None:
    """A listing shows every epoch with its numbers, also when some were sealed since the last one."""
    log = SlotLog(store, "p")
    catalog = CheckpointCatalog(log)
    assert catalog.list_checkpoints() == []
    manifests = author.extend(log, 6, with_files=True)
    assert ids(catalog) == [str(m.id) for m in reversed(manifests)]
    manifests += author.extend(log, 5)
    assert ids(catalog) == [str(m.id) for m in reversed(manifests)]
    row = catalog.list_checkpoints()[-1]
    assert (row.slot, row.read, row.released, row.files, row.tables, row.is_restorable) == (
        1,
        10,
        10,
        2,
        {"events": 10},
        True,
    )


def test_timelines_are_distinguished(log: SlotLog, author: Author) -> None:
    """The current lineage is the default; abandoned checkpoints are shown on request and marked."""
    old = author.extend(log, 6)
    log.fork(log.head(), old[1].id, request_id="r", who="ann", why="")
    catalog = CheckpointCatalog(log)
    assert ids(catalog) == [str(m.id) for m in reversed(old[:2])]
    new = author.extend(log, 3)
    assert ids(catalog) == [str(m.id) for m in reversed([*old[:2], *new])]
    everything = catalog.list_checkpoints(all_timelines=True)
    assert {row.id for row in everything if not row.on_lineage} == {str(m.id) for m in old[2:]}
    assert [row.kind for row in catalog.list_checkpoints(all_timelines=True, kinds=["fork"])] == [
        "fork"
    ]


def test_the_index_is_only_a_cache(log: SlotLog, author: Author) -> None:
    """Deleted or garbled, the pages never change what is listed."""
    author.extend(log, 10)
    catalog = CheckpointCatalog(log)
    before = catalog.list_checkpoints()
    for spoil in (lambda key: log.store.delete(key), lambda key: log.store.put(key, b"{nonsense")):
        for entry in list(log.store.list_objects(log.layout.index_prefix)):
            spoil(entry.key)
        assert CheckpointCatalog(log).list_checkpoints() == before


def test_slots_without_a_page_are_read_at_the_same_time(author: Author) -> None:
    """A listing of many epochs does not wait for one slot after the other."""
    bucket, together = MemoryBucket(), threading.Barrier(3)
    author.extend(SlotLog(MemoryStore(bucket), "p"), 4)

    newest = BucketLayout("p").slot_key(0, 4)  # is read before, to find the head

    def wait_for_others(request: StoreRequest) -> None:
        if request.verb == "get" and "/slots/" in request.key and request.key != newest:
            together.wait(timeout=10)

    log = SlotLog(MemoryStore(bucket, hook=wait_for_others), "p")
    assert len(CheckpointCatalog(log, workers=4).list_checkpoints()) == 4
    assert not together.broken


def test_slots_are_listed_after_hundreds_of_restores(log: SlotLog, author: Author) -> None:
    """The number of timelines is not bounded."""
    for number in range(300):
        log.fork(log.head(), None, request_id=f"r{number}", who="ann", why="")
    newest = author.seal(log)
    assert ids(CheckpointCatalog(log)) == [str(newest.id)]


def test_full_pages_spare_reading_slots(log: SlotLog, author: Author) -> None:
    """With its pages written, a listing reads no slot but the head."""
    author.extend(log, 8)
    CheckpointCatalog(log).list_checkpoints()
    read: list[str] = []
    bucket = log.store.bucket  # type: ignore[attr-defined]
    store = MemoryStore(
        bucket, hook=lambda request: read.append(request.key) if request.verb == "get" else None
    )
    assert len(CheckpointCatalog(SlotLog(store, "p")).list_checkpoints()) == 8
    assert {key for key in read if "/slots/" in key} == {log.layout.slot_key(0, 8)}


def test_names_resolve(log: SlotLog, author: Author) -> None:
    """latest, latest_healthy, pins, full ids and unique prefixes lead to a checkpoint."""
    one, two, three = author.extend(log, 3)
    catalog, roots = CheckpointCatalog(log), RootsFile(log.store, "p")
    roots.pin("golden", one.id, who="ann")
    roots.condemn_damaged(three.id, "test")
    assert catalog.resolve("latest") == three.id
    assert catalog.resolve("latest_healthy") == two.id
    assert (
        catalog.resolve("latest_healthy", find_illness=lambda c: None if c == one.id else "ill")
        == one.id
    )
    assert catalog.resolve("golden") == one.id
    assert catalog.resolve(str(two.id)) == two.id
    assert catalog.resolve(str(two.id)[:10]) == two.id
    assert catalog.read_manifest(two.id) == two
    rows = {row.id: row for row in catalog.list_checkpoints()}
    assert rows[str(one.id)].pins == ("golden",)
    assert not rows[str(three.id)].is_restorable


def test_names_that_do_not_resolve_say_why(log: SlotLog, author: Author) -> None:
    """The caller can distinguish nothing, an ambiguity and a total loss."""
    catalog = CheckpointCatalog(log)
    with pytest.raises(ConfigurationError, match="nothing was sealed yet"):
        catalog.resolve("latest")
    manifests = author.extend(log, 3)
    with pytest.raises(ConfigurationError, match="it could be t0-000003"):
        catalog.resolve("t0")
    with pytest.raises(ConfigurationError, match="no such checkpoint or pin"):
        catalog.resolve("silver")
    for manifest in manifests:
        RootsFile(log.store, "p").condemn_damaged(manifest.id, "test")
    with pytest.raises(ConfigurationError, match="every checkpoint is damaged"):
        catalog.resolve("latest_healthy")


def test_two_checkpoints_differ_by_name(author: Author) -> None:
    """A diff names counters, positions, frontiers, state and tables.

    Equal checkpoints have none.
    """
    start = LogHead(0, 0, None, None, None)
    file = FileRef(key="k", rows=3, bytes=1, sha256="s", kind="order")
    left = author.manifest(
        start, decider={"frontiers": {"a": 1, "b": 2}}, cut={"a/0": {"end": 5}}, segments=[file]
    )
    right = author.manifest(
        start,
        decider={"frontiers": {"a": 1, "b": 9}},
        cut={"a/0": {"end": 8}, "c/0": {"end": 1}},
        counters=Counters(read=15, released=9, dropped={"cti_violation": 6}),
        files={"late": [file]},
        spec_digest="other",
    )
    found = diff_checkpoints(left, right)
    assert not found.same
    assert found.spec_changed
    assert found.counters == {"read": 5, "released": -1, "dropped.cti_violation": 6}
    assert {name: (pair.left, pair.right) for name, pair in found.positions.items()} == {
        "a/0": (5, 8),
        "c/0": (None, 1),
    }
    assert {name: (pair.left, pair.right) for name, pair in found.decider.items()} == {
        "frontiers.b": (2, 9)
    }
    assert (found.state["order"].left, found.state["order"].right) == (3, None)
    assert found.tables["late"].right == 3
    assert diff_checkpoints(left, left).same


def synthesise(real: SlotLog, author: Author, count: int) -> list[Manifest]:
    """A long history, chained as if sealed one by one.

    Into the real store go the index pages and the manifests after them.

    A listing never reads the older manifests: that is the point of the pages, and what the test
    then measures.
    """
    memory = SlotLog(MemoryStore(MemoryBucket()), "p")
    head, manifests = LogHead(0, 0, None, None, None), []
    for _ in range(count):
        manifest = author.manifest(head, decider={"frontiers": {str(n): n for n in range(10)}})
        data = manifest.to_bytes()
        etag = memory.store.put(memory.layout.slot_key(0, manifest.slot), data)
        head = LogHead(0, manifest.slot, manifest, sha256_of_bytes(data), etag)
        manifests.append(manifest)
    CheckpointCatalog(memory).index.refresh()
    for entry in memory.store.list_objects(memory.layout.index_prefix):
        real.store.put(entry.key, memory.store.get(entry.key).data)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda m: real.store.put(real.layout.slot_key(0, m.slot), m.to_bytes()),
                manifests[-100:],
            )
        )
    return manifests


@pytest.mark.minio
@pytest.mark.slow
def test_ten_thousand_checkpoints_are_listed_within_a_second(
    s3: S3Store, author: Author, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With index pages, 10,000 checkpoints are listed and the newest healthy one chosen in under a
    second on local MinIO.
    """
    monkeypatch.setattr(slot_index, "SLOTS_PER_PAGE", 500)
    manifests = synthesise(SlotLog(s3, "p"), author, 10_100)
    manifests += author.extend(SlotLog(s3, "p"), 20)
    RootsFile(s3, "p").condemn_damaged(manifests[-1].id, "test")
    catalog = CheckpointCatalog(SlotLog(s3, "p"))
    began = time.perf_counter()
    rows = catalog.list_checkpoints()
    listed = time.perf_counter() - began
    began = time.perf_counter()
    chosen = catalog.resolve(
        "latest_healthy", find_illness=lambda c: None if c.slot < 10_120 else "ill"
    )
    resolved = time.perf_counter() - began
    with capsys.disabled():
        print(  # noqa: T201
            f"\nlisted {len(rows)} checkpoints in {listed:.2f} s, newest healthy in"
            f" {resolved:.2f} s"
        )
    assert (len(rows), chosen) == (10_120, manifests[-2].id)
    assert resolved < slowness()


def test_prefixes_look_like_ids(log: SlotLog) -> None:
    """An empty log resolves no prefix."""
    with pytest.raises(ConfigurationError, match="no such"):
        CheckpointCatalog(log).resolve(str(CheckpointId(0, 1, "abcdef")))
