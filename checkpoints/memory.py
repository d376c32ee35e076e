"""A store in memory, with a fault script: what the tests and the simulation run on.

A `MemoryBucket` holds the objects; each driver gets a `MemoryStore` of its own on it, with its own hook. The hook sees every
request before it takes effect and answers with a `Fault` (or None). A late or duplicated write waits in `bucket.held` until
the script delivers it, and is then judged by its condition as the bucket stands at that moment: as a real network would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from tidegate.checkpoints.canonical import sha256_of_bytes
from tidegate.checkpoints.store import (
    Entry,
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StoredObject,
    StoreUnavailableError,
    Written,
    check_key,
)

__all__ = ["Fault", "MemoryBucket", "MemoryStore", "Request"]

_Names = list[str]


class Fault(Enum):
    """What may happen to one request."""

    REFUSED = auto()  # never reached the store; the caller knows (reads and writes)
    NO_EFFECT = auto()  # lost on the way; the caller does not know (writes)
    LOST_ANSWER = auto()  # took effect; the caller does not know (writes)
    LATE = auto()  # held back, to be delivered by the script; the caller does not know (writes)
    TWICE = auto()  # took effect and answered; a copy of it is held back (writes)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the hook sees it."""

    verb: str
    key: str
    data: bytes | None = None
    etag: str | None = None  # of a swap

    @property
    def writes(self) -> bool:
        """Whether the request would change the bucket."""
        return self.verb in {"create", "swap", "put", "delete"}


Hook = Callable[[Request], Fault | None]


@dataclass
class MemoryBucket:
    """The objects, and the writes that are still on their way."""

    objects: dict[str, bytes] = field(default_factory=dict)
    held: list[Request] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def apply(self, request: Request) -> str:
        """Let a write take effect as the bucket stands now."""
        key, data = request.key, request.data or b""
        with self.lock:
            there = self.objects.get(key)
            if request.verb == "delete":
                self.objects.pop(key, None)
                return ""
            if request.verb == "create" and there is not None:
                raise PreconditionFailedError.at(key, "nothing", etag_of(there))
            if request.verb == "swap" and (there is None or etag_of(there) != request.etag):
                raise PreconditionFailedError.at(key, str(request.etag), etag_of(there) if there is not None else "nothing")
            self.objects[key] = data
            return etag_of(data)

    def deliver(self, number: int = 0) -> bool:
        """Let a held write arrive. True when it took effect, False when its condition no longer held."""
        with self.lock:
            request = self.held.pop(number)
            try:
                self.apply(request)
            except PreconditionFailedError:
                return False
            return True


class MemoryStore:
    """One client's view of a bucket in memory."""

    def __init__(self, bucket: MemoryBucket | None = None, *, name: str = "test", hook: Hook | None = None) -> None:
        self.bucket = bucket if bucket is not None else MemoryBucket()
        self.hook = hook
        self.url = f"memory://{name}"

    def get(self, key: str) -> StoredObject:
        """Read one object. Raises NotFoundError when there is none."""
        self._read("get", key)
        with self.bucket.lock:
            data = self.bucket.objects.get(key)
        if data is None:
            raise NotFoundError.at(self.uri(key))
        return StoredObject(key, data, etag_of(data))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object."""
        return self.get(key).data[start : start + length]

    def head(self, key: str) -> Entry | None:
        """Describe one object, or None when there is none."""
        self._read("head", key)
        with self.bucket.lock:
            data = self.bucket.objects.get(key)
        return None if data is None else Entry(key, len(data), etag_of(data), None)

    def create(self, key: str, data: bytes) -> str:
        """Write a new object."""
        return self._write(Request("create", check_key(key), bytes(data)))

    def swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace exactly one version."""
        return self._write(Request("swap", check_key(key), bytes(data), etag))

    def put(self, key: str, data: bytes) -> str:
        """Write without any condition."""
        return self._write(Request("put", check_key(key), bytes(data)))

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none."""
        self._write(Request("delete", check_key(key)))

    def list(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> Iterator[Entry]:
        """Objects under `prefix` in key order, as they stand when the listing starts."""
        self._read("list", prefix)
        with self.bucket.lock:
            keys = sorted(k for k in self.bucket.objects if k.startswith(prefix) and k > (start_after or ""))[:limit]
            found = [Entry(k, len(self.bucket.objects[k]), etag_of(self.bucket.objects[k]), None) for k in keys]
        return iter(found)

    def list_folders(self, prefix: str) -> _Names:
        """Folder names directly under `prefix`."""
        self._read("list", prefix)
        with self.bucket.lock:
            rest = [k[len(prefix) :] for k in self.bucket.objects if k.startswith(prefix)]
        return sorted({r.split("/", 1)[0] for r in rest if "/" in r})

    def upload(self, path: Path, key: str) -> Written:
        """Store a file."""
        data = path.read_bytes()
        return Written(key, self.put(key, data), len(data), sha256_of_bytes(data))

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file."""
        path.write_bytes(self.get(key).data)

    def local_path(self, key: str) -> Path | None:
        """Memory has no files."""
        return None

    def uri(self, key: str) -> str:
        """`memory://name/key`."""
        return f"{self.url}/{key}"

    def close(self) -> None:
        """Nothing to let go of."""

    def _fault(self, request: Request) -> Fault | None:
        return self.hook(request) if self.hook else None

    def _read(self, verb: str, key: str) -> None:
        if self._fault(Request(verb, key)) is not None:
            raise StoreUnavailableError.at(self.uri(key), "fault script")

    def _write(self, request: Request) -> str:
        fault = self._fault(request)
        if fault is None:
            return self.bucket.apply(request)
        if fault is Fault.REFUSED:
            raise StoreUnavailableError.at(self.uri(request.key), "fault script")
        if fault is Fault.TWICE:
            etag = self.bucket.apply(request)
            self.bucket.held.append(request)
            return etag
        if fault is Fault.LATE:
            self.bucket.held.append(request)
        elif fault is Fault.LOST_ANSWER:
            self._apply_silently(request)
        raise OutcomeUnknownError.at(self.uri(request.key), fault.name)

    def _apply_silently(self, request: Request) -> None:
        with suppress(PreconditionFailedError):  # the refusal is the answer that got lost
            self.bucket.apply(request)


def etag_of(data: bytes) -> str:
    """Content decides the ETag, as in S3: equal bytes have equal ETags."""
    return sha256_of_bytes(data)[:32]
