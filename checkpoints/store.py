"""The interface between tidegate and the bucket.

Every store guarantees, and a driver probes when it starts (`store_probe.py`):

* `create` and `compare_and_swap` are atomic. Of any number of racing writers exactly one succeeds,
  and a reader sees the old or the new bytes, never a mixture.
* An acknowledged write is durable, and every later `get`, `stat` and `list_objects` sees it.
* `PreconditionFailedError` means that the write did not happen. `OutcomeUnknownError` means that
  the client does not know; the write may even happen later.

Conditional deletes and copies are not used, because MinIO ignores their condition. A request
without an answer has no guarantee.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from .errors import KEY_REFUSED

# The errors are part of the interface, so that callers import them from here.
from .errors import NotFoundError as NotFoundError
from .errors import OutcomeUnknownError as OutcomeUnknownError
from .errors import PreconditionFailedError as PreconditionFailedError
from .errors import StoreDeniedError as StoreDeniedError
from .errors import StoreUnavailableError as StoreUnavailableError

T = TypeVar("T")
R = TypeVar("R")
FolderNames = list[str]  # in the class bodies of stores, mypy takes `list` for a method


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object with its bytes.

    Attributes:
        age: seconds since it was written, by the clock of the store alone; None if the store has no
            clock of its own, or does not say.
    """

    key: str
    data: bytes
    etag: str
    age: float | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object without its bytes.

    Attributes:
        etag: empty in listings of the local store, which would have to read the object; `stat`
            always returns it.
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


class Store(Protocol):
    """A flat space of keys, relative to `url`.

    Every method that reads or writes may raise `StoreUnavailableError` (try again later) or a
    `ConfigurationError` (a person has to act; a bucket raises `StoreDeniedError`), and a
    `KeyRefusedError` for what is not a key. `put`, `delete` and `upload` may raise
    `OutcomeUnknownError`. Implementations are safe to use from several threads.
    """

    url: str

    def get(self, key: str) -> StoredObject:
        """Read one object; raises NotFoundError if there is none."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of one object, shorter if the object ends first.

        `start` lies in the object and `length` is at least 1; a bucket refuses other ranges.

        Raises:
            NotFoundError: there is no such object.
        """

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe one object, or return None if there is none."""

    def create(self, key: str, data: bytes) -> str:
        """Write a new object and return its ETag.

        Raises:
            PreconditionFailedError: there is an object already, and this call wrote nothing. An
                earlier call with an unknown outcome may have written it: compare the content.
            OutcomeUnknownError: the object may have been written, or may be written later.
        """

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """Replace exactly the version `etag` and return the new ETag.

        Raises:
            PreconditionFailedError: there is another version, or no object.
            OutcomeUnknownError: the object may have been replaced, or may be replaced later.
        """

    def put(self, key: str, data: bytes) -> str:
        """Write without a condition and return the ETag; the last writer wins."""

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """List objects whose keys begin with `prefix`, in key order (by code point).

        Args:
            prefix: any beginning of keys, or empty.
            start_after: a key; only later ones are listed.
            limit: list at most this many.
        """

    def list_folders(self, prefix: str) -> FolderNames:
        """Return the sorted names of the folders directly under `prefix`, without slashes.

        `prefix` is empty or ends with a slash.
        """

    def delete(self, key: str) -> None:
        """Remove an object if it exists, without a condition."""

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Store a file durably under a key that no other process writes."""

    def download(self, key: str, path: Path) -> None:
        """Copy an object into a file, which is then complete or absent.

        Raises:
            NotFoundError: there is no such object.
        """

    def local_path(self, key: str) -> Path | None:
        """Return the path of the object as a plain file, also if it does not exist.

        None where a copy is needed.
        """

    def uri(self, key: str) -> str:
        """Return the address for table catalogs: `s3://bucket/key`, or an absolute path."""

    def close(self) -> None:
        """Close the connections; the store must not be used afterwards."""


@runtime_checkable
class CopyingStore(Store, Protocol):
    """A store that copies its objects by itself, and deletes many at once, as a bucket does."""

    def copy_from(self, source: Store, source_key: str, etag: str, key: str) -> str:
        """Copy one version of an object, and return the ETag of the copy.

        The bytes do not pass through this process. A repetition does no harm.

        Args:
            source: this store, or another bucket of the same server.
            source_key: the object in `source`.
            etag: its version.
            key: of the copy, which no other process writes.

        Raises:
            NotFoundError: there is no such object.
            PreconditionFailedError: the object has another version.
        """

    def delete_folder(self, prefix: str) -> None:
        """Remove all objects whose keys begin with `prefix`, which ends with a slash.

        Also those that other clients have put there as markers of folders, which are never listed.
        """


def check_key(key: str) -> str:
    """Return `key`, unless it would leave the store or mean something else in another store.

    Raises:
        KeyRefusedError: it would.
    """
    if (
        not key
        or key.startswith("/")
        or "\\" in key
        or any(part in ("", ".", "..") for part in key.split("/"))
    ):
        raise KEY_REFUSED(key=repr(key))
    return key


def map_in_threads(call: Callable[[T], R], items: Iterable[T], threads: int = 16) -> list[R]:
    """Return the results of calls that wait for the store, or for a disk, in the items' order.

    If `threads` is 1, the caller's thread makes them. After an error those that wait are not begun.
    """
    if threads <= 1 or (isinstance(items, Sequence) and len(items) < 2):
        return [call(item) for item in items]
    pool = ThreadPoolExecutor(threads)
    try:
        return [future.result() for future in [pool.submit(call, item) for item in items]]
    finally:
        pool.shutdown(cancel_futures=True)
