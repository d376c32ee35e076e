"""Opens the store at an address, and puts a scratch store over it for dry runs."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import BAD_STORE_URL
from .local_store import LocalStore
from .store import FolderNames, ObjectInfo, Store, StoredObject


def open_store(
    url: str, environment: Mapping[str, str] = os.environ, *, read_only: bool = False
) -> Store:
    """Open `s3://bucket/prefix`, `file:///path` or a plain path, without a request to the server.

    Args:
        url: the address.
        environment: has the settings of S3.
        read_only: nothing will be written. A folder needs no more rights then, and is left as it
            is; otherwise a missing one is made.

    Raises:
        ConfigurationError: the address is none of these, or its folder cannot be used.
    """
    if "://" not in url:
        return LocalStore(url, read_only=read_only)
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        # Late: a local store needs none of its imports.
        from .s3_store import S3Settings, S3Store

        prefix = parts.path.strip("/")
        return S3Store(S3Settings.from_environment(parts.netloc, prefix, environment))
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return LocalStore(unquote(parts.path), read_only=read_only)
    raise BAD_STORE_URL(url=url)


class ScratchStore:
    """Objects of the scratch store hide those of the other store, which is never changed.

    Conditions of writes see the scratch store only: `create` also succeeds where the other store
    has an object, and `compare_and_swap` of that object fails. A delete lets it appear again.
    """

    def __init__(self, below: Store, scratch: Store) -> None:
        self._below, self._scratch = below, scratch
        self.url = f"{scratch.url} over {below.url}"
        self.create, self.compare_and_swap = scratch.create, scratch.compare_and_swap
        self.put, self.delete, self.upload = scratch.put, scratch.delete, scratch.upload

    def get(self, key: str) -> StoredObject:
        return self._store_holding(key).get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._store_holding(key).get_range(key, start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        return self._scratch.stat(key) or self._below.stat(key)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        both = {
            entry.key: entry
            for store in (self._below, self._scratch)
            for entry in store.list_objects(prefix, start_after=start_after)
        }
        return iter(sorted(both.values(), key=lambda entry: entry.key)[:limit])

    def list_folders(self, prefix: str) -> FolderNames:
        return sorted({*self._below.list_folders(prefix), *self._scratch.list_folders(prefix)})

    def download(self, key: str, path: Path) -> None:
        self._store_holding(key).download(key, path)

    def local_path(self, key: str) -> Path | None:
        return self._store_holding(key).local_path(key)

    def uri(self, key: str) -> str:
        return self._store_holding(key).uri(key)

    def close(self) -> None:
        self._scratch.close()
        self._below.close()

    def _store_holding(self, key: str) -> Store:
        # What the dry run has written hides the object below.
        return self._scratch if self._scratch.stat(key) is not None else self._below
