"""A look at a long history costs no more requests and no more memory than at a short one."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest
from tests.checkpoints.conftest import Author
from tests.servers.memory_store import MemoryBucket, MemoryStore

from tidegate.checkpoints import slot_index
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.host_clock import ManualClock
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.checkpoints.slot_index import SLOTS_PER_PAGE, SlotIndex
from tidegate.checkpoints.slot_log import LogHead, SlotLog

SHORT, LONG = 4, 60  # pages
RECENT = 600  # epochs that are not retired


def make_history(pages: int, author: Author) -> MemoryBucket:
    """A bucket with complete index pages: stubs, and at the end epochs with their manifests."""
    bucket = MemoryBucket()
    log = SlotLog(MemoryStore(bucket), "p")
    slots = pages * SLOTS_PER_PAGE - 10
    stub = '{{"created_at":1,"id":"t0-{0:06d}-aaaaaaaaaaaa","kind":"stub","parent":null,"sha256":"{1}","slot":{0},"timeline":0}}'
    head = LogHead(0, slots - RECENT, None, None, None)
    recent = {}
    for _ in range(RECENT):
        manifest = author.manifest(head, parent=None)
        etag = log.store.put(log.layout.slot_key(0, manifest.slot), manifest.to_bytes())
        recent[manifest.slot] = slot_index.SlotSummary._from_manifest(manifest, "a" * 64)
        head = LogHead(0, manifest.slot, manifest, "a" * 64, etag)
    for page in range(pages):
        numbers = range(page * SLOTS_PER_PAGE + 1, min(slots, (page + 1) * SLOTS_PER_PAGE) + 1)
        rows = [
            canonical_bytes(recent[n].model_dump(mode="json", exclude_defaults=True)).decode()
            if n in recent
            else stub.format(n, "a" * 64)
            for n in numbers
        ]
        log.store.put(log.layout.index_page_key(f"t0-{page:07d}"), f"[{','.join(rows)}]".encode())
    return bucket


def refresh(log: SlotLog) -> None:
    """What a driver does every few hundred epochs, and soon after each start."""
    SlotIndex(log, workers=2).refresh()


def retire(log: SlotLog) -> None:
    """What a driver does every hour, when nothing is to be retired."""
    clock = ManualClock(wall_ticks=1_760_000_000_000_000)
    policy = RetentionPolicy(keep_last=RECENT, keep_for=0)
    assert not Retention(log, policy, external=tuple, clock=clock, workers=2).run().retired


def plan(log: SlotLog) -> None:
    """What the page shows before a restore is asked for."""
    row = next(iter(SlotIndex(log).iterate_newest_first(0)))
    target = CheckpointCatalog(log).resolve(str(row.id))
    assert plan_restore(log, target).epochs_rewound == 0


def resolve_prefix(log: SlotLog) -> None:
    """What a short id on the command line means, when several checkpoints have it."""
    with pytest.raises(Exception, match="it could be"):
        CheckpointCatalog(log, workers=2).resolve("t0")


def measure(work: Callable[[SlotLog], None], bucket: MemoryBucket) -> tuple[Counter[str], int]:
    """Requests by verb, and the peak of memory in bytes."""
    requests = Counter[str]()

    def count(request: object) -> None:
        requests[str(request.verb)] += 1  # type: ignore[attr-defined]

    log = SlotLog(MemoryStore(bucket, hook=count), "p")
    tracemalloc.start()
    try:
        work(log)
        return requests, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("work", [refresh, retire, plan, resolve_prefix])
def test_history_does_not_add_to_the_cost(work: Callable[[SlotLog], None], author: Author) -> None:
    """Fifteen times the history costs the same requests and about the same memory.

    The first run may read all of it once, page by page, to note what is retired.
    """
    costs = []
    for pages in (SHORT, LONG):
        bucket = make_history(pages, author)
        first = measure(work, bucket)
        costs.append((first, measure(work, bucket)))
    (short_first, short), (long_first, long) = costs
    assert short[0] == long[0]
    assert long[1] < 1.3 * short[1]
    assert long_first[1] < 2 * short_first[1]
