"""The pages of the slot index: what a look reads, what a page holds, and how a bad one is mended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.manual_clock import ManualClock
from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest

from tidegate.checkpoints import slot_index
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.checkpoints.slot_log import LogHead, SlotLog

if TYPE_CHECKING:
    from tests.checkpoints.conftest import Author

LATER = 1_760_000_000_000_000  # microseconds; after everything the author writes
small_pages = pytest.mark.usefixtures("pages_of_four")


@pytest.fixture
def pages_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of four slots, so that a short history has several."""
    monkeypatch.setattr(slot_index, "SLOTS_PER_PAGE", 4)


class Reader:
    """A new process that reads the index, and notes which objects it reads."""

    def __init__(self, bucket: MemoryBucket) -> None:
        self._read: list[str] = []
        log = SlotLog(MemoryStore(bucket, hook=self._note), "p")
        self.index, self.catalog = SlotIndex(log, workers=1), CheckpointCatalog(log, workers=1)

    def _note(self, request: StoreRequest) -> None:
        self._read.extend([request.key] if request.verb == "get" else [])

    @property
    def pages(self) -> list[str]:
        """Names of the objects below `index/` that it has read."""
        return sorted({key.split("/")[-1] for key in self._read if "/index/" in key})

    @property
    def slots(self) -> set[str]:
        """Keys of the slots that it has read."""
        return {key for key in self._read if "/slots/" in key}


@pytest.fixture
def bucket(memory: MemoryStore) -> MemoryBucket:
    return memory.bucket


@small_pages
def test_a_page_that_cannot_be_read_is_written_again(
    log: SlotLog, bucket: MemoryBucket, author: Author
) -> None:
    """Only the first look after the damage has to read the slots of the page."""
    author.extend(log, 8)
    Reader(bucket).catalog.list_checkpoints()
    log.store.put(log.layout.index_page_key("t0-0000000"), b"{nonsense")
    first, second = Reader(bucket), Reader(bucket)
    assert len(first.catalog.list_checkpoints()) == len(second.catalog.list_checkpoints()) == 8
    assert first.slots == {log.layout.slot_key(0, slot) for slot in (1, 2, 3, 4, 8)}
    assert second.slots == {log.layout.slot_key(0, 8)}


@small_pages
@pytest.mark.parametrize(("epochs", "pages"), [(0, 0), (1, 1), (7, 2), (8, 2), (9, 3)])
def test_a_listing_reads_the_pages_that_hold_slots(
    log: SlotLog, bucket: MemoryBucket, author: Author, epochs: int, pages: int
) -> None:
    """No page behind the newest slot is asked for, and none of a pipeline without any."""
    author.extend(log, epochs)
    reader = Reader(bucket)
    assert len([*reader.index.iterate_summaries(0)]) == epochs
    assert reader.pages == [f"t0-{page:07d}.json" for page in range(pages)]


@small_pages
@pytest.mark.parametrize("last", [None, 1, 4, 5, 8, 9, 12, 99])
@pytest.mark.parametrize("first", [1, 3, 4, 5, 8, 9])
def test_a_listing_begins_and_ends_where_it_is_told_to(
    log: SlotLog, bucket: MemoryBucket, author: Author, first: int, last: int | None
) -> None:
    """Both ends belong to it, wherever on a page they are, and no other page is read."""
    author.extend(log, 10)
    reader = Reader(bucket)
    slots = [row.slot for row in reader.index.iterate_summaries(0, first=first, last=last)]
    assert slots == list(range(first, min(last or 10, 10) + 1))
    assert reader.pages == [f"t0-{page:07d}.json" for page in sorted({(s - 1) // 4 for s in slots})]


@small_pages
@pytest.mark.parametrize(("last", "pages"), [(4, [0]), (5, [0, 1]), (8, [0, 1]), (9, [0, 1, 2])])
def test_going_back_from_an_old_slot_reads_no_newer_page(
    log: SlotLog, bucket: MemoryBucket, author: Author, last: int, pages: list[int]
) -> None:
    """A search for a checkpoint of long ago costs nothing for what was sealed since."""
    author.extend(log, 13)
    reader = Reader(bucket)
    slots = [row.slot for row in reader.index.iterate_newest_first(0, last)]
    assert slots == list(range(last, 0, -1))
    assert reader.pages == [f"t0-{page:07d}.json" for page in pages]


@small_pages
@pytest.mark.parametrize(
    ("epochs", "kept", "left_out"),
    [(9, 1, 2), (8, 1, 1), (7, 1, 1), (9, 4, 1), (9, 5, 1), (9, 6, 0), (3, 1, 0), (14, 9, 1)],
)
def test_pages_of_stubs_are_left_out_once_they_are_known(
    log: SlotLog, bucket: MemoryBucket, author: Author, epochs: int, kept: int, left_out: int
) -> None:
    """After a listing has found that a page has only stubs, no further listing reads it.

    A page is left out as a whole, and each epoch that is not retired is still listed.
    """
    author.extend(log, epochs)
    policy = RetentionPolicy(keep_last=kept, keep_for=0, grace=0)
    clock = ManualClock(wall_ticks=LATER)
    Retention(log, policy, external=tuple, clock=clock, workers=1).run()
    for _ in range(3):
        reader = Reader(bucket)
        rows = [*reader.index.iterate_retained(0)]
        assert [row.slot for row in rows if row.kind == "epoch"] == [*range(epochs + 1)][-kept:]
    assert [row.slot for row in rows] == list(range(4 * left_out + 1, epochs + 1))
    pages = range(left_out, (epochs + 3) // 4)
    assert reader.pages == [*(f"t0-{page:07d}.json" for page in pages), "t0-retired.json"]


@small_pages
def test_a_refresh_writes_all_pages_that_are_missing(
    log: SlotLog, bucket: MemoryBucket, author: Author
) -> None:
    """It goes back from the newest page until it meets one that needs nothing, and ends there."""
    author.extend(log, 12)
    Reader(bucket).index.refresh()
    assert len([key for key in bucket.objects if "/index/" in key]) == 3
    author.extend(log, 1)
    reader = Reader(bucket)
    reader.index.refresh()
    assert reader.pages == ["t0-0000002.json", "t0-0000003.json"]


@small_pages
def test_what_changes_without_a_new_slot_is_not_on_a_page(
    log: SlotLog, bucket: MemoryBucket, author: Author
) -> None:
    """Pins, condemnations and lineage come from elsewhere; on a page they would be outdated."""
    first, _ = author.extend(log, 2)
    RootsFile(log.store, "p").pin("gold", first.id, who="ann")
    Reader(bucket).catalog.list_checkpoints()
    rows = json.loads(bucket.objects[log.layout.index_page_key("t0-0000000")])
    assert len(rows) == 2
    assert not {"pins", "condemned", "on_lineage", "gap"} & {name for row in rows for name in row}


def test_the_pages_of_an_earlier_version_fit(
    log: SlotLog, bucket: MemoryBucket, author: Author
) -> None:
    """Every version puts 500 slots on a page, so that no slot is listed twice or left out.

    A count that a page does not have is 0.
    """
    head = LogHead(0, 0, None, None, None)
    for first, last in ((1, 500), (501, 1000)):
        rows = [
            {"kind": "stub", "timeline": 0, "slot": slot, "id": None, "parent": None, "sha256": "",
             "created_at": 0}
            for slot in range(first, last + 1)
        ]  # fmt: skip
        key = log.layout.index_page_key(f"t0-{(first - 1) // 500:07d}")
        bucket.objects[key] = canonical_bytes(rows)
    for slot in (501, 1001):
        log.seal(author.manifest(head, slot=slot))
    listed = [*Reader(bucket).index.iterate_summaries(0)]
    assert [row.slot for row in listed] == list(range(1, 1002))
    assert {(row.read, row.released, row.late, row.retained) for row in listed[:500]} == {
        (0, 0, 0, 0)
    }
