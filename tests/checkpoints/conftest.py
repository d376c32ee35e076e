"""Shared by the bucket side's tests: an author of manifests, stores of every kind, and a real MinIO started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tidegate.checkpoints.canonical import sha256_of_bytes
from tidegate.checkpoints.clock import ManualClock
from tidegate.checkpoints.layout import CheckpointId, Layout, new_attempt
from tidegate.checkpoints.local import LocalStore
from tidegate.checkpoints.log import Head, Sealed, SlotLog
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.memory import MemoryStore
from tidegate.checkpoints.s3 import S3Settings, S3Store
from tidegate.checkpoints.store import Store


class Author:
    """Writes manifests and whole histories, with real files behind them."""

    def manifest(self, head: Head, **over: Any) -> Manifest:
        """The next epoch after a head: ten rows read and released, unless told otherwise."""
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
            "attempt": new_attempt(),
            "lease_token": 1,
            "driver": "d",
            "recorded_now": 1_000_000 * head.next_slot,
            "counters": Counters(read=read, released=read),
            "created_at": 1_750_000_000_000_000 + 1_000_000 * head.next_slot,
        }
        return Manifest(**(fields | over))

    def file(self, store: Store, checkpoint: CheckpointId, data: bytes = b"rows", *, table: str | None = "events") -> FileRef:
        """Put a data file of an attempt into the store; a state segment when `table` is None."""
        layout = Layout("p")
        folder = layout.table(table, checkpoint) if table else layout.state(checkpoint)
        key = f"{folder}part-0.parquet"
        store.put(key, data)
        kind = f"table:{table}" if table else "order"
        return FileRef(key=key, rows=10, bytes=len(data), sha256=sha256_of_bytes(data), kind=kind)

    def seal(self, log: SlotLog, *, files: bool = False, **over: Any) -> Manifest:
        """Seal one epoch at the head, with one table file and one segment of its own if `files`."""
        manifest = self.manifest(log.head(), **over)
        if files:
            data = str(manifest.id).encode()
            segment = self.file(log.store, manifest.id, data, table=None)
            table = {"events": [self.file(log.store, manifest.id, data)]}
            manifest = manifest.model_copy(update={"segments": [segment], "files": table})
        assert isinstance(log.seal(manifest), Sealed)
        return manifest

    def extend(self, log: SlotLog, count: int, *, files: bool = False) -> list[Manifest]:
        """Seal several epochs in a row."""
        return [self.seal(log, files=files) for _ in range(count)]


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


@pytest.fixture(scope="session")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    """A MinIO of this test session; the settings of its one bucket."""
    from tidegate.infra.minio import Credentials, MinioServer, provision
    from tidegate.infra.minio_build import ensure_minio

    folder = tmp_path_factory.mktemp("minio")
    server = MinioServer(ensure_minio(lambda line: None), folder / "data", folder / "minio.log")
    server.start()
    try:
        app = Credentials.random("app")
        provision(server, "tidegate", app)
        secret = SecretStr(app.secret_key)
        yield S3Settings(bucket="tidegate", endpoint=server.endpoint, access_key=app.access_key, secret_key=secret)
    finally:
        server.stop()


@pytest.fixture
def s3(minio: S3Settings) -> Iterator[S3Store]:
    """A store with a prefix of its own in the bucket of this session."""
    store = S3Store(minio.model_copy(update={"prefix": f"test-{new_attempt()}"}))
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
