"""A store that reads through to another store and writes to a scratch store, for dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidegate.checkpoints.store import FolderNames, ObjectInfo, Store, StoredObject, UploadedObject


class ScratchStore:
    """Objects of the scratch store hide those of the other store, which is never changed."""

    def __init__(self, below: Store, scratch: Store) -> None:
        self._below, self._scratch = below, scratch
        self.url = f"{scratch.url} over {below.url}"

    def get(self, key: str) -> StoredObject:
        return self._store_holding(key).get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._store_holding(key).get_range(key, start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        return self._scratch.stat(key) or self._below.stat(key)

    def create(self, key: str, data: bytes) -> str:
        """Create in the scratch store, even if the other store has the object."""
        return self._scratch.create(key, data)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        return self._scratch.compare_and_swap(key, data, etag)

    def put(self, key: str, data: bytes) -> str:
        return self._scratch.put(key, data)

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

    def delete(self, key: str) -> None:
        self._scratch.delete(key)

    def upload(self, path: Path, key: str) -> UploadedObject:
        return self._scratch.upload(path, key)

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
        return self._scratch if self._scratch.stat(key) is not None else self._below
