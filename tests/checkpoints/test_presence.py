"""Presence by listing.

A few requests for many objects, and nothing condemned by a listing alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.verify import (
    CheckpointVerdict,
    ObjectProblem,
    list_object_sizes,
    verify_checkpoint,
)

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author

DATA = b"segment"


class Counting(MemoryStore):
    """A store that counts requests, and may refuse some of them."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket, hook=self.note)
        self.asked = Counter[str]()
        self.refused: set[str] = set()

    def note(self, request: StoreRequest) -> Fault | None:
        """One request."""
        self.asked[request.verb] += 1
        return (
            Fault.REFUSED if request.verb in self.refused and "/slots/" not in request.key else None
        )


@pytest.fixture
def store() -> Counting:
    """An empty one."""
    return Counting(MemoryBucket())


def sealed(store: Counting, author: Author, count: int, beside: int = 0) -> Manifest:
    """An epoch with so many live segments, each in a folder of its own, with garbage beside it."""
    segments = []
    for number in range(1, count + 1):
        folder = f"p/timelines/0/state/{number:06d}-abcdef{number:06d}"
        for other in range(beside):
            store.put(f"{folder}/garbage-{other}.parquet", b"x")
        store.put(f"{folder}/order.parquet", DATA)
        segments.append(
            FileRef(
                key=f"{folder}/order.parquet",
                rows=1,
                bytes=len(DATA),
                sha256="0" * 64,
                kind="order",
            )
        )
    log = SlotLog(store, "p")
    record = author.manifest(log.head()).model_copy(update={"segments": segments})
    log.seal(record)
    store.asked.clear()
    return record


def test_the_requests_do_not_grow_with_the_state(store: Counting, author: Author) -> None:
    """A hundred segments cost as many requests as twenty."""
    manifest = sealed(store, author, 100, beside=3)
    result = verify_checkpoint(SlotLog(store, "p"), manifest.id, checksums=False)
    assert (result.verdict, result.objects) == (CheckpointVerdict.HEALTHY, 101)
    assert (store.asked["head"], store.asked["list"]) == (0, 1)


def test_what_a_listing_does_not_show_is_asked_for(store: Counting, author: Author) -> None:
    """A missing segment and a short one are each condemned by an answer of their own."""
    manifest = sealed(store, author, 40)
    store.delete(manifest.segments[3].key)
    store.put(manifest.segments[7].key, b"cut")
    result = verify_checkpoint(SlotLog(store, "p"), manifest.id, checksums=False)
    assert [(f.key, f.problem) for f in result.findings] == [
        (manifest.segments[3].key, ObjectProblem.MISSING),
        (manifest.segments[7].key, ObjectProblem.SIZE),
    ]
    assert store.asked["head"] == 4  # damage is looked at twice


def test_a_listing_that_fails_condemns_nothing(store: Counting, author: Author) -> None:
    """Then each object is asked for; if that fails as well, nothing is known."""
    manifest = sealed(store, author, 40)
    store.refused = {"list"}
    assert (
        verify_checkpoint(SlotLog(store, "p"), manifest.id, checksums=False).verdict
        is CheckpointVerdict.HEALTHY
    )
    assert store.asked["head"] == 40
    store.refused = {"list", "head"}
    assert (
        verify_checkpoint(SlotLog(store, "p"), manifest.id, checksums=False).verdict
        is CheckpointVerdict.UNKNOWN
    )


def test_pages_that_show_little_are_not_turned(store: Counting) -> None:
    """Where live segments are rare among others, a page costs more than asking for each."""
    keys = [
        f"p/timelines/0/state/{number:06d}-abcdef/order.parquet" for number in range(0, 9000, 300)
    ]
    for number in range(9000):
        store.put(f"p/timelines/0/state/{number:06d}-abcdef/order.parquet", DATA)
    store.asked.clear()
    assert 0 < len(list_object_sizes(store, keys)) < 10
    assert store.asked["list"] == 1
