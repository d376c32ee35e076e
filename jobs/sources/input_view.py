"""The pipeline's store as its movers see it.

Every object of a source is Parquet, wherever and however it lies.

Keys below the path of a source whose format needs decoding answer with the decoded object, under
the ETag of the original; a source at a full address of its own is reached through keys
``@<source>/...``. All other keys are passed through. So the engine, the movers, replay and the
independent check know one kind of object only. Decoded copies are a cache in the scratch folder:
nothing breaks when they vanish.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import (
    NotFoundError,
    ObjectInfo,
    Store,
    StoredObject,
    UploadedObject,
)
from tidegate.errors import PoisonError
from tidegate.jobs.sources.object_decoding import (
    decode_to_parquet,
    needs_decoding,
    parse_folder_values,
)
from tidegate.jobs.sources.parquet_footers import BadObject
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

_Names = list[str]  # inside the class body the name `list_objects` is the method
STAGED_PREFIX: Final = "@kafka/"
"""Begins the names of offset ranges, which the mover fetches by itself."""
_MAX_CACHE_BYTES: Final = 4 << 30  # of decoded copies; the oldest go first


def resolve_source_folder(name: str, spec: SourceSpec) -> str:
    """The key prefix, in the view, of a source's objects."""
    return f"@{name}/" if _has_own_address(spec) else spec.path.strip("/") + "/"


def locate_source(name: str, spec: SourceSpec, store: Store) -> tuple[Store, str]:
    """Where a source's objects really lie: a store and a key prefix in it.

    Without a view, for those who write them.
    """
    return (
        (open_store(spec.path), "")
        if _has_own_address(spec)
        else (store, resolve_source_folder(name, spec))
    )


def _has_own_address(spec: SourceSpec) -> bool:
    return "://" in spec.path or spec.path.startswith("/")


class InputView:
    """Implements `Store`; see the module."""

    def __init__(self, store: Store, spec: PipelineSpec, scratch: Path) -> None:
        self._below = store
        self.url = store.url
        self._folder = scratch / "decoded"
        objects = {
            name: source for name, source in spec.sources.items() if source.kind == "objects"
        }
        self._other = {
            f"@{name}/": open_store(source.path)
            for name, source in objects.items()
            if _has_own_address(source)
        }
        self._decoded = {
            resolve_source_folder(name, source): source
            for name, source in objects.items()
            if needs_decoding(source)
        }
        self._folders = {
            name: resolve_source_folder(name, source) for name, source in objects.items()
        }
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], tuple[Path | BadObject, int]] = OrderedDict()
        self._bytes = 0  # of all that are known

    def inspect_object(self, key: str) -> tuple[str, int, Path | BadObject] | None:
        """ETag, size and decoded copy of an object, or why there is none.

        None when the object needs no decoding.

        Raises:
            NotFoundError: there is no such object.
        """
        source = self._find_decoded_source(key)
        if source is None:
            return None
        store, own = self._resolve_key(key)
        head = store.stat(own)
        if head is None:
            raise NotFoundError.for_uri(self.uri(key))
        with self._lock:
            known = self._known.get((key, head.etag))
        if known is not None and (isinstance(known[0], BadObject) or known[0].exists()):
            return head.etag, head.size, known[0]
        found = store.get(own)
        return found.etag, len(found.data), self._decode_into_cache(key, found, source)

    def locate_source(self, name: str) -> tuple[Store, str]:
        """Where a source's objects really lie: a store and a prefix in it."""
        return self._resolve_key(self._folders[name])

    def _decode_into_cache(
        self, key: str, found: StoredObject, source: SourceSpec
    ) -> Path | BadObject:
        name = hashlib.sha256(f"{key}\n{found.etag}".encode()).hexdigest()[:40]
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f"{name}.{threading.get_ident()}.new"
        bad = decode_to_parquet(key, found.data, source, fresh)
        with self._lock:
            if bad is None:
                content: Path | BadObject = fresh.replace(self._folder / f"{name}.parquet")
                size = (self._folder / f"{name}.parquet").stat().st_size
            else:
                content, size = bad, 1
            self._bytes += size - self._known.get((key, found.etag), (content, 0))[1]
            self._known[key, found.etag] = content, size
            self._evict_oldest()
        return content

    def _evict_oldest(self) -> None:
        while len(self._known) > 1 and self._bytes > _MAX_CACHE_BYTES:
            _, (content, size) = self._known.popitem(last=False)
            self._bytes -= size
            if isinstance(content, Path):
                content.unlink(missing_ok=True)

    def _find_decoded_source(self, key: str) -> SourceSpec | None:
        found = next(
            (
                (folder, source)
                for folder, source in self._decoded.items()
                if key.startswith(folder)
            ),
            None,
        )
        if found is None:
            return None
        folder, source = found
        whole = (
            source.table is not None
            and not source.evolution.renamed
            and not parse_folder_values(key[len(folder) :])
        )
        return (
            None if whole else source
        )  # a table's file without values in its folders' names is read as it is

    def _resolve_key(self, key: str) -> tuple[Store, str]:
        for folder, store in self._other.items():
            if key.startswith(folder):
                return store, key[len(folder) :]
        return self._below, key

    def _get_decoded_copy(self, key: str) -> tuple[str, Path] | None:
        """ETag and decoded copy; None when the key needs no decoding."""
        found = self.inspect_object(key)
        if found is None:
            return None
        if isinstance(found[2], BadObject):
            raise PoisonError(
                f"{self.uri(key)} cannot be read: {found[2].detail}",
                code=f"object.{found[2].reason}",
                kept="the object, and everything sealed so far",
                advice=(
                    "the object was readable when it was planned: see who overwrites objects in"
                    " this folder"
                ),
            )
        return found[0], found[2]

    # Store

    def get(self, key: str) -> StoredObject:
        """The object, decoded if need be."""
        copy = self._get_decoded_copy(key)
        if copy is not None:
            return StoredObject(key, copy[1].read_bytes(), copy[0])
        store, own = self._resolve_key(key)
        return replace(store.get(own), key=key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """A part of it."""
        copy = self._get_decoded_copy(key)
        if copy is not None:
            with copy[1].open("rb") as file:
                file.seek(start)
                return file.read(length)
        store, own = self._resolve_key(key)
        return store.get_range(own, start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        """The original: its ETag is what a cut pins."""
        store, own = self._resolve_key(key)
        found = store.stat(own)
        return None if found is None else replace(found, key=key)

    def create(self, key: str, data: bytes) -> str:
        """Passed through."""
        return self._below.create(key, data)

    def compare_and_swap(self, key: str, data: bytes, etag: str) -> str:
        """Passed through."""
        return self._below.compare_and_swap(key, data, etag)

    def put(self, key: str, data: bytes) -> str:
        """Passed through."""
        return self._below.put(key, data)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """The originals."""
        store, own = self._resolve_key(prefix)
        cut = len(prefix) - len(own)
        after = start_after[cut:] if start_after is not None else None
        for entry in store.list_objects(own, start_after=after, limit=limit):
            yield replace(entry, key=prefix[:cut] + entry.key) if cut else entry

    def list_folders(self, prefix: str) -> _Names:
        """Of the originals."""
        store, own = self._resolve_key(prefix)
        return store.list_folders(own)

    def delete(self, key: str) -> None:
        """Passed through."""
        self._below.delete(key)

    def upload(self, path: Path, key: str) -> UploadedObject:
        """Passed through."""
        return self._below.upload(path, key)

    def download(self, key: str, path: Path) -> None:
        """A copy of the object, decoded if need be; it stays when the cache lets go of its own."""
        copy = self._get_decoded_copy(key)
        if copy is None:
            store, own = self._resolve_key(key)
            store.download(own, path)
            return
        try:
            os.link(copy[1], path)
        except OSError:  # another file system
            shutil.copyfile(copy[1], path)

    def local_path(self, key: str) -> Path | None:
        """None for decoded objects, whose copy the cache may let go of meanwhile, and for what is no object at all."""
        if self._find_decoded_source(key) is not None or key.startswith(STAGED_PREFIX):
            return None
        store, own = self._resolve_key(key)
        return store.local_path(own)

    def uri(self, key: str) -> str:
        """The original's address."""
        store, own = self._resolve_key(key)
        return store.uri(own)

    def close(self) -> None:
        """Let go of what was opened here; the store below is its owner's."""
        for store in self._other.values():
            store.close()
