"""Shared by the bucket side's tests.

An author of manifests, stores of every kind, and a real MinIO started once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.manual_clock import ManualClock
from tests.servers.memory_store import Fault, MemoryBucket, MemoryStore, StoreRequest
from tests.servers.minio import RealMinio

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import Clock
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.slot_log import LogHead, Sealed, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import TidegateError


class Author:
    """Writes manifests and whole histories, with real files behind them."""

    def manifest(self, head: LogHead, **over: Any) -> Manifest:
        """The next epoch after a head: ten rows read and released, unless `over` says otherwise."""
        read = 10 + (head.record.counters.read if head.record else 0)
        fields: dict[str, Any] = {
            "pipeline": "p",
            "uid": "u",
            "spec_digest": "s",
            "code_version": "1",
            "timeline": head.timeline,
            "slot": head.next_slot,
            "parent": str(head.checkpoint) if head.checkpoint else None,
            "parent_sha256": head.sha256,
            "attempt": generate_attempt_id(),
            "lease_token": 1,
            "driver": "d",
            "recorded_now": 1_000_000 * head.next_slot,
            "counters": Counters(read=read, released=read),
            "created_at": 1_750_000_000_000_000 + 1_000_000 * head.next_slot,
        }
        return Manifest(**(fields | over))

    def file(
        self,
        store: Store,
        checkpoint: CheckpointId,
        data: bytes = b"rows",
        *,
        table: str | None = "events",
    ) -> FileRef:
        """Put a data file of an attempt into the store; a state segment when `table` is None."""
        layout = BucketLayout("p")
        folder = (
            layout.table_prefix(table, checkpoint) if table else layout.state_prefix(checkpoint)
        )
        key = f"{folder}part-0.parquet"
        store.put(key, data)
        kind = f"table:{table}" if table else "order"
        return FileRef(key=key, rows=10, bytes=len(data), sha256=sha256_of_bytes(data), kind=kind)

    def seal(self, log: SlotLog, *, with_files: bool = False, **over: Any) -> Manifest:
        """Seal one epoch at the head, with one table file and one segment of its own if
        `with_files`.
        """
        manifest = self.manifest(log.head(), **over)
        if with_files:
            data = str(manifest.id).encode()
            segment = self.file(log.store, manifest.id, data, table=None)
            table = {"events": [self.file(log.store, manifest.id, data)]}
            manifest = manifest.model_copy(update={"segments": [segment], "files": table})
        assert isinstance(log.seal(manifest), Sealed)
        return manifest

    def extend(self, log: SlotLog, count: int, *, with_files: bool = False) -> list[Manifest]:
        """Seal several epochs in a row."""
        return [self.seal(log, with_files=with_files) for _ in range(count)]


# Full length: short strings would leave most requests without a fault. Zeros are the simplest
# script, so failures still shrink.
SCRIPT = st.binary(min_size=160, max_size=160)
RACE = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
FAULTS = [
    *Fault,
    *Fault,
    "deliver",
    "deliver",
    "crash before",
    "crash after",
]  # crashes are rarer: they end an actor


class Crash(BaseException):
    """kill -9 of one actor."""


@dataclass
class Stage:
    """Runs actors one request at a time, as the bytes say; zeros, and the end of the bytes, mean.

    No fault, first actor.

    Each actor is a thread, but only one runs at a time: it stops at every request and at every
    sleep, and the next byte says who goes on; another byte says what happens to the request.
    """

    script: bytes
    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    clock: ManualClock = field(default_factory=ManualClock)
    after_each: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._bytes: Iterator[int] = iter(self.script)
        self._rate = (
            next(self._bytes, 0) % 64
        )  # of 256 requests: calm scripts let long errands end, stormy ones rarely
        self._back = threading.Semaphore(0)
        self._waiting: dict[
            str, tuple[threading.Semaphore, float]
        ] = {}  # actor -> its turn, not before
        self._threads: list[threading.Thread] = []
        self.surprises: list[BaseException] = []

    def actor(self, name: str, body: Callable[[MemoryStore, Clock], None]) -> None:
        """Add an actor; it does nothing before `play`."""
        turn = threading.Semaphore(0)
        stage = self

        class OwnClock(ManualClock):
            def monotonic(self) -> float:
                return stage.clock.monotonic()

            def sleep(self, seconds: float) -> None:
                stage._pause(name, turn, stage.clock.monotonic() + seconds)

        def hook(request: StoreRequest) -> Fault | None:
            stage._pause(name, turn, 0.0)
            return stage._fate(request)

        def run() -> None:
            turn.acquire()
            try:
                body(MemoryStore(stage.bucket, name=name, hook=hook), OwnClock())
            except (Crash, TidegateError):
                pass  # an actor may die or give up at any time
            except BaseException as error:
                stage.surprises.append(error)
            stage._back.release()

        self._waiting[name] = (turn, 0.0)
        self._threads.append(threading.Thread(target=run, daemon=True))

    def play(self) -> None:
        """Run everyone to the end, then let every held write arrive."""
        for thread in self._threads:
            thread.start()
        while self._waiting:
            self._next()
            self.after_each()
        while self.bucket.held:
            self.bucket.deliver_held()
        for thread in self._threads:
            thread.join()
        if self.surprises:
            raise self.surprises[0]

    def _next(self) -> None:
        awake = [
            name for name, (_, since) in self._waiting.items() if since <= self.clock.monotonic()
        ]
        if not awake:
            earliest = min(since for _, since in self._waiting.values())
            self.clock.advance(earliest - self.clock.monotonic() + 1e-6)
            return
        name = awake[next(self._bytes, 0) % len(awake)]
        turn, _ = self._waiting.pop(name)
        turn.release()
        self._back.acquire()

    def _pause(self, name: str, turn: threading.Semaphore, until: float) -> None:
        self._waiting[name] = (turn, until)
        self._back.release()
        turn.acquire()

    def _fate(self, request: StoreRequest) -> Fault | None:
        number = next(self._bytes, 0)
        fault = FAULTS[number % len(FAULTS)] if number >= 256 - self._rate else None
        if fault == "deliver":
            if self.bucket.held:
                self.bucket.deliver_held(number % len(self.bucket.held))
            return None
        if fault == "crash before":
            raise Crash
        if fault == "crash after":
            if request.is_write:
                self.bucket.held.append(request)
            raise Crash
        return (
            fault
            if isinstance(fault, Fault) and (request.is_write or fault is Fault.REFUSED)
            else None
        )


class Ledger(MemoryBucket):
    """A bucket that refuses to see a filled slot change, except to a stub if `stubs`."""

    def __init__(self, *, stubs: bool = False) -> None:
        super().__init__()
        self._stubs = stubs

    def apply(self, request: StoreRequest) -> str:
        there = self.objects.get(request.key)
        etag = super().apply(request)
        retired = (
            self._stubs and request.verb == "swap" and b'"kind":"stub"' in (request.data or b"")
        )
        assert "/slots/" not in request.key or there is None or retired, "a filled slot changed"
        return etag


@pytest.fixture(scope="session")
def author() -> Author:
    return Author()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def log(memory: MemoryStore, clock: ManualClock) -> SlotLog:
    return SlotLog(memory, "p", clock=clock)


@pytest.fixture
def minio(real_minio: RealMinio) -> S3Settings:
    """The settings of the bucket of this test session."""
    return real_minio.settings()


@pytest.fixture
def s3(minio: S3Settings) -> Iterator[S3Store]:
    """A store with a prefix of its own in the bucket of this session."""
    store = S3Store(minio.model_copy(update={"prefix": f"test-{generate_attempt_id()}"}))
    yield store
    store.close()


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.minio)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store in turn."""
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    found: Store = request.getfixturevalue("s3")
    return found
