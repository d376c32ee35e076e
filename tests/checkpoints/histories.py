"""Long histories, and what a piece of work costs on one: requests, bytes and memory.

The retired epochs are written as the stubs and index pages that retention leaves behind. The last
epochs are sealed by the real engine.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

from sortedcontainers import SortedDict
from tests.engine.harness import SECOND, Bench, row, spec_of
from tests.oracle.memory_source import MemorySource
from tests.servers.memory_store import MemoryBucket, MemoryStore, StoreRequest, compute_etag

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.slot_index import SLOTS_PER_PAGE, SlotIndex, SlotSummary
from tidegate.checkpoints.slot_log import SlotContents, SlotLog
from tidegate.checkpoints.store import ObjectInfo, StoredObject

T = TypeVar("T")

_ATTEMPT = "aaaaaaaaaaaa"
_SHA256 = "a" * 64


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work cost.

    Attributes:
        requests: number of requests to the store, by verb.
        sent: bytes of all writes.
        received: bytes of all reads.
        memory: peak of the memory that Python held, bytes.
    """

    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    memory: int = 0

    @property
    def count(self) -> int:
        """Requests of all kinds."""
        return self.requests.total()


class CountingStore(MemoryStore):
    """A store whose keys are sorted at all times, so that a listing costs what it returns."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket, hook=self._count)
        self.requests: Counter[str] = Counter()
        self.sent = self.received = 0

    def _count(self, request: StoreRequest) -> None:
        self.requests[request.verb] += 1
        self.sent += len(request.data or b"")

    def get(self, key: str) -> StoredObject:
        """Read one object. Raises NotFoundError when there is none."""
        stored = super().get(key)
        self.received += len(stored.data)
        return stored

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects under `prefix` in key order; a request for each thousand, as S3 does."""
        self._begin_read("list", prefix)
        objects: SortedDict[str, bytes] = self.bucket.objects
        keys = objects.irange(max(prefix, start_after or ""), prefix + "\U0010ffff")
        listed = 0
        for key in keys:
            if key == start_after:
                continue
            if listed == limit:
                return
            if listed and listed % 1000 == 0:
                self._begin_read("list", prefix)
            listed += 1
            self.received += 300  # what S3 answers for one key, about
            yield ObjectInfo(key, len(objects[key]), compute_etag(objects[key]), None)


@dataclass
class History:
    """A pipeline with many retired epochs and some that are not.

    Attributes:
        bench: makes engines at the head, on a store that counts.
        recent: manifests of the epochs that are not retired.
    """

    bench: Bench
    recent: list[Manifest]

    @property
    def store(self) -> CountingStore:
        """The store of `bench`."""
        store = self.bench.store
        assert isinstance(store, CountingStore)
        return store

    def open_log(self) -> SlotLog:
        """A log that has read nothing yet, as a new process has."""
        return SlotLog(self.store, "p", clock=self.bench.clock)

    def measure(self, work: Callable[[History], object]) -> Cost:
        """Do the work twice; the run with less memory counts."""
        return min((self.measure_once(work) for _ in range(2)), key=lambda cost: cost.memory)

    def measure_once(self, work: Callable[[History], object]) -> Cost:
        """Do the work once, under a tracer that makes its time meaningless.

        The caller's thread reads, because how many threads parse at once is chance, and each needs
        memory. The tracer is never stopped: Python 3.11 frees its tables under threads of libraries
        that allocate meanwhile, and crashes. Tests call this in a process of its own.
        """
        store = self.store
        store.requests, store.sent, store.received = Counter(), 0, 0
        gc.collect()
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with patch("tidegate.checkpoints.store.ThreadPoolExecutor", CallerExecutor):
            work(self)
        memory = tracemalloc.get_traced_memory()[1] - before
        return Cost(store.requests, store.sent, store.received, memory)


class CallerExecutor(Executor):
    """An executor that starts no thread: each call is made when it is submitted."""

    def __init__(self, _threads: int) -> None:
        """Take the number of threads, as a pool does; it has no effect."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Make the call; return a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def make_history(retired: int, recent: int = 50, *, members: int = 1, rows: int = 1) -> History:
    """Write a history.

    Args:
        retired: epochs that retention has turned into stubs, a multiple of `SLOTS_PER_PAGE`.
        recent: epochs that the engine seals after them.
        members: partitions of each of the two sources.
        rows: rows that each partition has for each of the recent epochs.
    """
    bucket = MemoryBucket(objects=SortedDict())
    fields = spec_of().model_dump(mode="json", by_alias=True, exclude_unset=True)
    for source in fields["sources"].values():
        source["partition_by"] = "folder"
    history = History(Bench(spec_of(**fields), CountingStore(bucket)), [])
    partitions = [f"{number:05d}" for number in range(members)]
    for name in history.bench.sources:
        history.bench.sources[name] = MemorySource(name, dict.fromkeys(partitions, ()))
    seal_next(history, rows)
    if retired:
        _move_behind_stubs(history, retired)
    for _ in range(recent - 1):
        seal_next(history, rows)
    return history


def seal_next(history: History, rows: int = 1) -> None:
    """Let a new driver read `rows` rows of each partition and seal them."""
    bench = history.bench
    bench.clock.advance(1.0)
    second = bench.clock.wall_ticks() / SECOND
    for source in bench.sources.values():
        for member in source.list_members():
            source.append(*(row(second) for _ in range(rows)), partition=member.partition)
    report = bench.engine().run_epoch()
    assert report.manifest is not None
    history.recent.append(report.manifest)


def _write_stubs(store: MemoryStore, retired: int) -> None:
    layout = BucketLayout("p")
    stub = RetiredEpoch(
        timeline=0,
        slot=1,
        attempt=_ATTEMPT,
        parent=None,
        parent_sha256=None,
        original_sha256=_SHA256,
        created_at=1,
        retired_at=2,
    )
    summary = SlotSummary.from_slot(SlotContents(stub, _SHA256, "", ""))
    stored = canonical_bytes(stub.model_dump(mode="json"))
    as_row = canonical_bytes(summary.model_dump(mode="json", exclude_defaults=True)).decode()
    for page in range(retired // SLOTS_PER_PAGE):
        slots = range(page * SLOTS_PER_PAGE + 1, (page + 1) * SLOTS_PER_PAGE + 1)
        rows = [
            as_row.replace('"slot":1', f'"slot":{slot}').replace(
                str(stub.id), str(CheckpointId(0, slot, _ATTEMPT))
            )
            for slot in slots
        ]
        store.put(layout.index_page_key(f"t0-{page:07d}"), f"[{','.join(rows)}]".encode())
        for slot in slots:
            record = stored.replace(b'"slot":1', f'"slot":{slot}'.encode())
            store.put(layout.slot_key(0, slot), record)


def _move_behind_stubs(history: History, retired: int) -> None:
    """Give the first epoch the slot after the last stub, as if the driver had sealed it there."""
    (first,) = history.recent
    layout = BucketLayout("p")
    _write_stubs(MemoryStore(history.store.bucket), retired)
    moved = first.model_copy(
        update={
            "slot": retired + 1,
            "parent": str(CheckpointId(0, retired, _ATTEMPT)),
            "parent_sha256": _SHA256,
            "attempt": generate_attempt_id(),
        }
    )
    history.store.put(layout.slot_key(0, retired + 1), moved.to_bytes())
    history.recent[0] = moved


def refresh_index(history: History) -> None:
    """What a driver does every few hundred epochs, and soon after each start."""
    SlotIndex(history.open_log(), workers=2).refresh()
