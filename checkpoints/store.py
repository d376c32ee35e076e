"""The one small interface between tidegate and the place where its truth lies, and the errors of that place.

Guarantees every store gives (checked at start-up by `probe`):

* `create` and `compare_and_swap` are atomic: of any number of racers exactly one wins, and a reader
  sees old or new bytes, never a mixture.
* What was acknowledged is durable and visible to every later `get`, `stat` and `list_objects`.
* `PreconditionFailedError` means *did not commit*; `OutcomeUnknownError` means *do not know*, and
  the effect may still come.

Not promised: conditional deletes or copies (MinIO ignores the condition), or anything about a
request that is still under way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from tidegate.errors import ConfigurationError, PoisonError, TransientError

_FolderNames = list[str]  # inside the class body the name `list_objects` is the method


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object with its bytes."""

    key: str
    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object without its bytes.

    Attributes:
        etag: empty where a listing would have to read the object to know it (local store); `stat`
            always knows.
        modified: seconds since 1970 as the store reports it, for display and grace times only.
    """

    key: str
    size: int
    etag: str
    modified: float | None


@dataclass(frozen=True, slots=True)
class UploadedObject:
    """What an upload stored; `sha256` was taken while the bytes were read."""

    key: str
    etag: str
    size: int
    sha256: str


class NotFoundError(PoisonError):
    """There is no such object, and the store is otherwise well: definite evidence."""

    @classmethod
    def for_uri(cls, uri: str) -> NotFoundError:
        """The error for one address."""
        return cls(
            f"{uri} does not exist",
            code="store.not_found",
            advice="check with: tidegate checkpoints verify",
        )


class PreconditionFailedError(TransientError):
    """The conditional write did not commit: somebody else's object is there.

    Read again before deciding.
    """

    @classmethod
    def for_uri(cls, uri: str, expected: str, found: str) -> PreconditionFailedError:
        """The error for one address, with both sides."""
        return cls(
            f"{uri} was not written: expected {expected}, found {found}",
            code="store.precondition_failed",
        )


class OutcomeUnknownError(TransientError):
    """The answer to a write was lost: it may have happened, or may still happen.

    Read back and compare before acting.
    """

    @classmethod
    def for_uri(cls, uri: str, cause: str) -> OutcomeUnknownError:
        """The error for one address."""
        return cls(
            f"no answer to the write of {uri} ({cause})",
            code="store.outcome_unknown",
            retry_after=1.0,
        )


class StoreUnavailableError(TransientError):
    """The store cannot be reached or says it is busy. Says nothing about any object."""

    @classmethod
    def for_uri(cls, uri: str, cause: str) -> StoreUnavailableError:
        """The error for one address."""
        return cls(
            f"{uri} could not be reached ({cause})",
            code="store.unavailable",
            kept="everything sealed so far",
            advice=(
                "check that the store runs and that the endpoint is right; tidegate tries again by"
                " itself"
            ),
            retry_after=2.0,
        )

    @classmethod
    def for_full_disk(cls, uri: str, cause: str) -> StoreUnavailableError:
        """The error for one address on a disk without room."""
        return cls(
            f"{uri} could not be written: the store's disk is full ({cause})",
            code="store.full",
            kept="everything sealed so far",
            advice="make room on that disk, or enlarge it; tidegate tries again by itself",
            retry_after=2.0,
        )


class StoreDeniedError(ConfigurationError):
    """The store refuses these credentials, or the bucket is missing.

    Says nothing about any object.
    """


class Store(Protocol):
    """A flat space of keys. All keys are relative to `url`.

    Every method may raise `StoreUnavailableError` (try again later) or `StoreDeniedError` (a person
    has to act). Implementations are safe to use from several threads.
    """

    url: str

    def get(self, key: str) -> StoredObject:
        """Read one object. Raises NotFoundError when there is none."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object, shorter when the object ends first.

        Raises NotFoundError when there is none.
        """
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object, or None when there is none."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Write a new object and return its ETag.

        Raises:
            PreconditionFailedError: an object is there already; nothing was written by this call,
                unless an earlier call with an unknown outcome was this very object. Compare the
                content.
            OutcomeUnknownError: it may have been written, or may be written later.
        """
        ...

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace exactly the version `etag` and return the new ETag.

        Raises:
            PreconditionFailedError: another version, or no object at all.
            OutcomeUnknownError: it may have been replaced, or may be replaced later.
        """
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write without any condition; the last writer wins."""
        ...

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and sorts after `start_after`, in key order (by code point)."""
        ...

    def list_folders(self, prefix: str) -> _FolderNames:
        """Names of the folders directly under `prefix` (which ends with a slash or is empty), sorted, without slashes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; silent when there is none. Never conditional."""
        ...

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Store a file durably under a key nobody else writes (an attempt's own folder)."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file.

        Raises NotFoundError when there is none; the file is complete or absent.
        """
        ...

    def local_path(self, key: str) -> Path | None:
        """Where the object lies (or would lie) as a plain file; None where a copy is needed."""
        ...

    def uri(self, key: str) -> str:
        """The address a table catalog records: `s3://bucket/key`, or an absolute path."""
        ...

    def close(self) -> None:
        """Let go of connections. The store must not be used afterwards."""
        ...


def check_key(key: str) -> str:
    """Refuse keys that would leave the store or mean different things in different stores."""
    if (
        not key
        or key.startswith("/")
        or "\\" in key
        or any(part in ("", ".", "..") for part in key.split("/"))
    ):
        raise ValueError(f"not a key: {key!r}")
    return key


# Ask a store, at start-up, which conditional writes it really honours; refuse to run on one that
# lies.


class ProbeResult(BaseModel):
    """What was observed; every field has to be true."""

    model_config = ConfigDict(frozen=True)

    url: str
    creates: bool
    refuses_second_create: bool
    swaps: bool
    refuses_stale_swap: bool
    refuses_swap_of_missing: bool
    reads_own_writes: bool

    @property
    def broken_promises(self) -> list[str]:
        """The promises this store does not keep."""
        return [name for name, kept in self.model_dump(exclude={"url"}).items() if not kept]

    @property
    def is_honest(self) -> bool:
        """Whether every promise was kept."""
        return not self.broken_promises


def probe_store(store: Store) -> ProbeResult:
    """Try each conditional write once, on a key of its own, and remove it."""
    key = f"tidegate-probe/{secrets.token_hex(8)}"
    first, second = b"first " + secrets.token_bytes(8).hex().encode(), b"second"
    try:
        stale = store.create(key, first)
    except OutcomeUnknownError:
        store.delete(
            key
        )  # only then may there be something to remove: a store that is away is reported at once
        raise
    try:
        refuses_second = _is_write_refused(lambda: store.create(key, second))
        swapped = not _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
        reads = store.get(key).data == second and [e.key for e in store.list_objects(key)] == [key]
        refuses_stale = _is_write_refused(lambda: store.compare_and_swap(key, b"third", stale))
        store.delete(key)
        refuses_missing = (
            _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
            and store.stat(key) is None
        )
    finally:
        store.delete(key)
    return ProbeResult(
        url=store.url,
        creates=True,
        refuses_second_create=refuses_second,
        swaps=swapped,
        refuses_stale_swap=refuses_stale,
        refuses_swap_of_missing=refuses_missing,
        reads_own_writes=reads,
    )


def require_honest_store(store: Store) -> ProbeResult:
    """Probe the store.

    Raises:
        ConfigurationError: it does not keep every promise.
    """
    result = probe_store(store)
    if not result.is_honest:
        raise ConfigurationError(
            f"{store.url} does not keep its promises on conditional writes:"
            f" {', '.join(result.broken_promises)}",
            code="store.dishonest",
            advice=(
                "use a server that honours If-None-Match and If-Match on PUT (AWS S3, MinIO,"
                " versitygw), or a local folder"
            ),
        )
    return result


def _is_write_refused(write: Callable[[], str]) -> bool:
    try:
        write()
    except PreconditionFailedError:
        return True
    return False
