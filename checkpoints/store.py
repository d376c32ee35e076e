"""The interface between tidegate and the bucket, and a probe of what a store really does.

Every store guarantees, and a driver probes when it starts:

* `create` and `compare_and_swap` are atomic. Of any number of racing writers exactly one succeeds,
  and a reader sees the old or the new bytes, never a mixture.
* An acknowledged write is durable, and every later `get`, `stat` and `list_objects` sees it.
* `PreconditionFailedError` means that the write did not happen. `OutcomeUnknownError` means that
  the client does not know; the write may even happen later.

Conditional deletes and copies are not used, because MinIO ignores their condition. A request
without an answer has no guarantee.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from .errors import STORE_DISHONEST

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
    `ValueError` for what is not a key. `put`, `delete` and `upload` may raise
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
        ValueError: it would.
    """
    if (
        not key
        or key.startswith("/")
        or "\\" in key
        or any(part in ("", ".", "..") for part in key.split("/"))
    ):
        raise ValueError(f"not a key: {key!r}")
    return key


# The start-up probe: which conditional writes a store really honours. A driver refuses to run on a
# store that only claims to honour them.


_PROBES = 3  # until the store counts as one that breaks its promises


def probe_store(store: Store) -> list[str]:
    """Try each conditional write once, on a new key; return the promises that the store broke."""
    key = f"tidegate-probe/{secrets.token_hex(8)}"
    first, second = f"first {secrets.token_hex(8)}".encode(), b"second"
    kept: dict[str, bool] = {}
    try:
        stale = store.create(key, first)
    except OutcomeUnknownError:
        store.delete(key)  # on other errors nothing was written
        raise
    try:
        kept["refuses_second_create"] = _is_write_refused(lambda: store.create(key, second))
        kept["swaps"] = not _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
        found = store.get(key).data, [entry.key for entry in store.list_objects(key)]
        kept["reads_own_writes"] = found == (second, [key])
        kept["refuses_stale_swap"] = _is_write_refused(
            lambda: store.compare_and_swap(key, b"third", stale)
        )
        store.delete(key)
        kept["refuses_swap_of_missing"] = (
            _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
            and store.stat(key) is None
        )
    finally:
        store.delete(key)
    return [promise for promise, is_kept in kept.items() if not is_kept]


def require_honest_store(store: Store) -> None:
    """Probe the store, up to three times: a repeated or late request may have disturbed a probe.

    Raises:
        ConfigurationError: it does not keep every promise.
    """
    for _ in range(_PROBES):
        broken = probe_store(store)
        if not broken:
            return
    raise STORE_DISHONEST(url=store.url, broken=", ".join(broken))


def _is_write_refused(write: Callable[[], str]) -> bool:
    try:
        write()
    except PreconditionFailedError:
        return True
    return False


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
