"""A store in memory with a fault script, for tests and the simulation.

A `MemoryBucket` holds the objects; each driver gets a `MemoryStore` of its own on it, with its own
hook. The hook sees every request before it takes effect and answers with a `Fault` (or None). A
late or duplicated write waits in `bucket.held` until the script delivers it, and is then judged by
its condition as the bucket is at that moment: as a real network would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.errors import (
    OBJECT_NOT_FOUND,
    OUTCOME_UNKNOWN,
    PRECONDITION_FAILED,
    STORE_UNAVAILABLE,
)
from tidegate.checkpoints.store import (
    ObjectInfo,
    PreconditionFailedError,
    Store,
    StoredObject,
    UploadedObject,
    check_key,
)

_FolderNames = list[str]


class Fault(Enum):
    """What may happen to one request."""

    REFUSED = auto()  # never reached the store; the caller knows (reads and writes)
    NO_EFFECT = auto()  # lost on the way; the caller does not know (writes)
    LOST_ANSWER = auto()  # took effect; the caller does not know (writes)
    LATE = auto()  # held back, to be delivered by the script; the caller does not know (writes)
    TWICE = auto()  # took effect and answered; a copy of it is held back (writes)


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One request as the hook sees it."""

    verb: str
    key: str
    data: bytes | None = None
    etag: str | None = None  # of a swap

    @property
    def is_write(self) -> bool:
        """Whether the request would change the bucket."""
        return self.verb in {"create", "swap", "put", "delete"}


FaultHook = Callable[[StoreRequest], Fault | None]


@dataclass
class MemoryBucket:
    """The objects, and the writes that are still on their way."""

    objects: dict[str, bytes] = field(default_factory=dict)
    held: list[StoreRequest] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def apply(self, request: StoreRequest) -> str:
        """Let a write take effect as the bucket is now."""
        key, data = request.key, request.data or b""
        with self.lock:
            there = self.objects.get(key)
            if request.verb == "delete":
                self.objects.pop(key, None)
                return ""
            if request.verb == "create" and there is not None:
                raise PRECONDITION_FAILED(uri=key, expected="nothing", found=compute_etag(there))
            if request.verb == "swap" and (there is None or compute_etag(there) != request.etag):
                raise PRECONDITION_FAILED(
                    uri=key,
                    expected=str(request.etag),
                    found=compute_etag(there) if there is not None else "nothing",
                )
            self.objects[key] = data
            return compute_etag(data)

    def deliver_held(self, number: int = 0) -> bool:
        """Let a held write arrive.

        True when it took effect, False when its condition no longer held.
        """
        with self.lock:
            request = self.held.pop(number)
            try:
                self.apply(request)
            except PreconditionFailedError:
                return False
            return True


class MemoryStore:
    """One client's view of a bucket in memory."""

    def __init__(
        self,
        bucket: MemoryBucket | None = None,
        *,
        name: str = "test",
        hook: FaultHook | None = None,
    ) -> None:
        self.bucket = bucket if bucket is not None else MemoryBucket()
        self.hook = hook
        self.url = f"memory://{name}"

    def get(self, key: str) -> StoredObject:
        """Read one object. Raises NotFoundError when there is none."""
        self._begin_read("get", key)
        with self.bucket.lock:
            data = self.bucket.objects.get(key)
        if data is None:
            raise OBJECT_NOT_FOUND(uri=self.uri(key))
        return StoredObject(key, data, compute_etag(data))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object."""
        return self.get(key).data[start : start + length]

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object, or None when there is none."""
        self._begin_read("head", key)
        with self.bucket.lock:
            data = self.bucket.objects.get(key)
        return None if data is None else ObjectInfo(key, len(data), compute_etag(data), None)

    def create(self, key: str, data: bytes) -> str:
        """Write a new object."""
        return self._send_write(StoreRequest("create", check_key(key), bytes(data)))

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace exactly one version."""
        return self._send_write(StoreRequest("swap", check_key(key), bytes(data), etag))

    def put(self, key: str, data: bytes) -> str:
        """Write without any condition."""
        return self._send_write(StoreRequest("put", check_key(key), bytes(data)))

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none."""
        self._send_write(StoreRequest("delete", check_key(key)))

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects under `prefix` in key order, as they are when the listing starts."""
        self._begin_read("list", prefix)
        with self.bucket.lock:
            keys = sorted(
                k for k in self.bucket.objects if k.startswith(prefix) and k > (start_after or "")
            )[:limit]
            found = [
                ObjectInfo(
                    k, len(self.bucket.objects[k]), compute_etag(self.bucket.objects[k]), None
                )
                for k in keys
            ]
        return iter(found)

    def list_folders(self, prefix: str) -> _FolderNames:
        """Folder names directly under `prefix`."""
        self._begin_read("list", prefix)
        with self.bucket.lock:
            rest = [k[len(prefix) :] for k in self.bucket.objects if k.startswith(prefix)]
        return sorted({r.split("/", 1)[0] for r in rest if "/" in r})

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Store a file."""
        data = path.read_bytes()
        return UploadedObject(key, self.put(key, data), len(data), sha256_of_bytes(data))

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file."""
        path.write_bytes(self.get(key).data)

    def copy_from(self, source: Store, source_key: str, etag: str, key: str) -> str:
        """Copy one version of an object; the hook sees the verb "copy"."""
        self._begin_read("copy", key)
        with self.bucket.lock:
            data = getattr(source, "bucket", self.bucket).objects.get(source_key)
            if data is None:
                raise OBJECT_NOT_FOUND(uri=source.uri(source_key))
            if compute_etag(data) != etag:
                raise PRECONDITION_FAILED(uri=key, expected=etag, found=compute_etag(data))
            return self.bucket.apply(StoreRequest("put", check_key(key), data))

    def delete_folder(self, prefix: str) -> None:
        """Remove objects, each by a request that the hook sees."""
        with self.bucket.lock:
            keys = [key for key in self.bucket.objects if key.startswith(prefix)]
        for key in keys:
            self._send_write(StoreRequest("delete", key))

    def local_path(self, key: str) -> Path | None:
        """Memory has no files."""
        return None

    def uri(self, key: str) -> str:
        """`memory://name/key`."""
        return f"{self.url}/{key}"

    def close(self) -> None:
        """Nothing to let go of."""

    def _ask_hook(self, request: StoreRequest) -> Fault | None:
        return self.hook(request) if self.hook else None

    def _begin_read(self, verb: str, key: str) -> None:
        if self._ask_hook(StoreRequest(verb, key)) is not None:
            raise STORE_UNAVAILABLE(uri=self.uri(key), cause="fault script")

    def _send_write(self, request: StoreRequest) -> str:
        fault = self._ask_hook(request)
        if fault is None:
            return self.bucket.apply(request)
        if fault is Fault.REFUSED:
            raise STORE_UNAVAILABLE(uri=self.uri(request.key), cause="fault script")
        if fault is Fault.TWICE:
            etag = self.bucket.apply(request)
            self.bucket.held.append(request)
            return etag
        if fault is Fault.LATE:
            self.bucket.held.append(request)
        elif fault is Fault.LOST_ANSWER:
            self._apply_ignoring_refusal(request)
        raise OUTCOME_UNKNOWN(uri=self.uri(request.key), cause=fault.name)

    def _apply_ignoring_refusal(self, request: StoreRequest) -> None:
        with suppress(PreconditionFailedError):  # the refusal is the answer that got lost
            self.bucket.apply(request)


def compute_etag(data: bytes) -> str:
    """Content decides the ETag, as in S3: equal bytes have equal ETags."""
    return sha256_of_bytes(data)[:32]
