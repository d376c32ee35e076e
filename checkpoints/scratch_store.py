"""A store that reads through to another and writes to a scratch of its own.

For replays and dry runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tidegate.checkpoints.store import ObjectInfo, Store, StoredObject, UploadedObject

_FolderNames = list[str]  # inside the class body the name `list_objects` is the method


class ScratchStore:
    """Own objects hide those below; nothing below is ever changed."""

    def __init__(self, below: Store, scratch: Store) -> None:
        self._below, self._scratch = below, scratch
        self.url = f"{scratch.url} over {below.url}"

    def get(self, key: str) -> StoredObject:
        """Own object first."""
        return self._store_holding(key).get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Own object first."""
        return self._store_holding(key).get_range(key, start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        """Own object first."""
        return self._scratch.stat(key) or self._below.stat(key)

    def create(self, key: str, data: bytes) -> str:
        """Into the scratch; an object below does not stand in the way."""
        return self._scratch.create(key, data)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """In the scratch."""
        return self._scratch.compare_and_swap(key, data, etag)

    def put(self, key: str, data: bytes) -> str:
        """Into the scratch."""
        return self._scratch.put(key, data)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """Both, in key order; own objects hide those below."""
        both = {
            entry.key: entry for entry in self._below.list_objects(prefix, start_after=start_after)
        }
        both |= {
            entry.key: entry
            for entry in self._scratch.list_objects(prefix, start_after=start_after)
        }
        return iter(sorted(both.values(), key=lambda entry: entry.key)[:limit])

    def list_folders(self, prefix: str) -> _FolderNames:
        """Of both."""
        return sorted({*self._below.list_folders(prefix), *self._scratch.list_folders(prefix)})

    def delete(self, key: str) -> None:
        """From the scratch only."""
        self._scratch.delete(key)

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Into the scratch."""
        return self._scratch.upload(path, key)

    def download(self, key: str, path: Path) -> None:
        """Own object first."""
        self._store_holding(key).download(key, path)

    def local_path(self, key: str) -> Path | None:
        """Own object first."""
        return self._store_holding(key).local_path(key)

    def uri(self, key: str) -> str:
        """Own object first."""
        return self._store_holding(key).uri(key)

    def close(self) -> None:
        """Close both."""
        self._scratch.close()
        self._below.close()

    def _store_holding(self, key: str) -> Store:
        return self._scratch if self._scratch.stat(key) is not None else self._below
