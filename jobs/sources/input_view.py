"""The pipeline's store as movers see it: every object of a source is Parquet.

Keys below the path of a source whose format needs decoding give the decoded object, under the ETag
of the original. A source with a full address has keys ``@<source>/...``. All other keys lead to the
pipeline's own store. So the engine, the movers, replay and the independent check know one kind of
object only. The decoded copies are a cache in the scratch folder and may vanish at any time. Where
Spark's tasks read the rows, they decode the originals, and there are no copies.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate.checkpoints.errors import OBJECT_NOT_FOUND
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import ObjectInfo, Store, StoredObject
from tidegate.errors import PoisonError, TidegateError
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

from .object_decoding import BadObject, decode_to_parquet, needs_decoding

if TYPE_CHECKING:
    from .object_inspection import Footer, InspectedObject

TaskInspector = Callable[
    [str, Sequence[ObjectInfo], Callable[[str], str]],
    "Sequence[InspectedObject | TidegateError]",
]
"""(source, its objects, key -> address) -> what each holds, or why the store did not give it."""
_Names = list[str]  # inside the class body the name `list_objects` is the method
STAGED_PREFIX: Final = "@kafka/"
"""Begins the names of offset ranges, which the mover fetches by itself."""
SMALL_OBJECT: Final = 1 << 20
"""Up to this size the driver does not read an object's footer if tasks can."""
_MAX_CACHE_BYTES = 4 << 30  # of decoded copies; the oldest are removed first


def resolve_source_folder(name: str, spec: SourceSpec) -> str:
    """Return the key prefix, in the view, of a source's objects."""
    return f"@{name}/" if _has_own_address(spec) else spec.path.strip("/") + "/"


def locate_source(name: str, spec: SourceSpec, store: Store) -> tuple[Store, str]:
    """Return the store in which a source's objects are and their key prefix, to write there.

    For a source with a full address the store is a new one, which the caller closes.
    """
    if _has_own_address(spec):
        return open_store(spec.path), ""
    return store, resolve_source_folder(name, spec)


def _has_own_address(spec: SourceSpec) -> bool:
    return "://" in spec.path or spec.path.startswith("/")


class InputView:
    """Implements `Store` on the pipeline's store, which the caller closes."""

    def __init__(self, store: Store, spec: PipelineSpec, scratch: Path) -> None:
        self._store = store
        self.url = store.url
        # Sources are never written to, so keys to write are the pipeline's own.
        self.create, self.compare_and_swap = store.create, store.compare_and_swap
        self.put, self.delete, self.upload = store.put, store.delete, store.upload
        self._cache_folder = scratch / "decoded"
        sources = {name: s for name, s in spec.sources.items() if s.kind == "objects"}
        self._folders = {name: resolve_source_folder(name, s) for name, s in sources.items()}
        self._other_stores = {
            self._folders[name]: open_store(source.path, read_only=True)
            for name, source in sources.items()
            if _has_own_address(source)
        }
        self._sources = {self._folders[name]: source for name, source in sources.items()}
        self._task_inspector: TaskInspector | None = None
        # Source -> what tasks have found of its objects and nothing has asked for yet.
        self._inspected: dict[str, dict[str, InspectedObject | TidegateError]] = {
            name: {} for name in sources
        }
        self._lock = threading.Lock()
        # (key, ETag) -> decoded copy and its size, oldest first.
        self._cache: OrderedDict[tuple[str, str], tuple[Path | BadObject, int]] = OrderedDict()
        self._cached_bytes = 0

    def let_tasks_inspect(self, inspect: TaskInspector | None) -> None:
        """Let Spark's tasks inspect objects that are not read in place; without, this process does.

        Tasks decode such objects by themselves, each time they read them.
        """
        self._task_inspector = inspect

    def describe_objects_in_tasks(self, source: str, entries: Sequence[ObjectInfo]) -> None:
        """Inspect those of some objects of a source that need decoding, if tasks are to do it.

        They do it of small ones as well: to read a footer alone takes as long as to read all.
        `inspect_object` returns what they have found, once. Several sources may ask at a time.
        """
        wanted = [
            one
            for one in entries
            if one.size <= SMALL_OBJECT or self._find_decoded_source(one.key) is not None
        ]
        self._inspected[source] = {}
        if wanted and self._task_inspector is not None:
            found = self._task_inspector(source, wanted, self.uri)
            keys = (one.key for one in wanted)
            self._inspected[source] = dict(zip(keys, found, strict=True))

    def inspect_object(
        self, source: str, key: str
    ) -> tuple[str, int, Path | Footer | BadObject] | None:
        """Return ETag and size of the original, and what it holds or why it cannot be decoded.

        It is an object of this source. Tasks say what it holds, or a decoded copy does, which the
        cache may remove later. None if the object needs no decoding, and tasks have not inspected
        it.

        Raises:
            NotFoundError: there is no such object.
            TransientError: the store does not give it.
        """
        found = self._inspected[source].pop(key, None)
        if isinstance(found, TidegateError):
            raise found
        if found is not None:
            return found.etag, found.size, found.content
        return self._decode_object(key)

    def _decode_object(self, key: str) -> tuple[str, int, Path | BadObject] | None:
        source = self._find_decoded_source(key)
        if source is None:
            return None
        store, original_key = self._resolve_key(key)
        head = store.stat(original_key)
        if head is None:
            raise OBJECT_NOT_FOUND(uri=self.uri(key))
        with self._lock:
            content, _ = self._cache.get((key, head.etag), (None, 0))
        if isinstance(content, BadObject) or (content is not None and content.exists()):
            return head.etag, head.size, content
        # Read with its own ETag: the object may have been replaced since `stat`.
        original = store.get(original_key)
        return original.etag, len(original.data), self._decode_into_cache(key, original, source)

    def locate_source(self, name: str) -> tuple[Store, str]:
        """Return the store in which the objects of a source are, and their key prefix in it."""
        return self._resolve_key(self._folders[name])

    def _decode_into_cache(
        self, key: str, original: StoredObject, source: SourceSpec
    ) -> Path | BadObject:
        name = hashlib.sha256(f"{key}\n{original.etag}".encode()).hexdigest()[:40]
        self._cache_folder.mkdir(parents=True, exist_ok=True)
        copy = self._cache_folder / f"{name}.parquet"
        # Several threads may decode the same object; each writes a file of its own.
        fresh = self._cache_folder / f"{name}.{threading.get_ident()}.new"
        bad = decode_to_parquet(key, io.BytesIO(original.data), source, fresh)
        with self._lock:
            if bad is None:
                fresh.replace(copy)
            content: Path | BadObject = copy if bad is None else bad
            size = 1 if bad is not None else copy.stat().st_size
            self._cached_bytes += size - self._cache.get((key, original.etag), (content, 0))[1]
            self._cache[key, original.etag] = content, size
            while len(self._cache) > 1 and self._cached_bytes > _MAX_CACHE_BYTES:
                _, (oldest, size) = self._cache.popitem(last=False)
                self._cached_bytes -= size
                if isinstance(oldest, Path):
                    oldest.unlink(missing_ok=True)
        return content

    def _find_decoded_source(self, key: str) -> SourceSpec | None:
        for folder, source in self._sources.items():
            if key.startswith(folder) and needs_decoding(source, key[len(folder) :]):
                return source
        return None

    def _resolve_key(self, key: str) -> tuple[Store, str]:
        """Return the store that has the original of a key, and the key there."""
        for folder, store in self._other_stores.items():
            if key.startswith(folder):
                return store, key[len(folder) :]
        return self._store, key

    def _get_decoded_copy(self, key: str) -> tuple[str, Path] | None:
        """Return ETag and decoded copy; None if the key needs no decoding."""
        decoded = self._decode_object(key)
        if decoded is None:
            return None
        etag, _, content = decoded
        if isinstance(content, BadObject):
            # Not in the catalogue: the code names the reason of the dead letter.
            raise PoisonError(
                f"{self.uri(key)} cannot be read: {content.detail}",
                code=f"object.{content.reason}",
                kept="the object, and everything sealed so far",
                advice="the object was readable when it was planned: see who overwrites objects in"
                " this folder",
            )
        return etag, content

    # Reading

    def get(self, key: str) -> StoredObject:
        """Return the object, decoded if need be, under the ETag of the original.

        Raises:
            PoisonError: it cannot be decoded; `get_range` and `download` raise it as well.
        """
        if copy := self._get_decoded_copy(key):
            return StoredObject(key, copy[1].read_bytes(), copy[0])
        store, original_key = self._resolve_key(key)
        return replace(store.get(original_key), key=key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of the object, decoded if need be."""
        if copy := self._get_decoded_copy(key):
            with copy[1].open("rb") as file:
                file.seek(start)
                return file.read(length)
        store, original_key = self._resolve_key(key)
        return store.get_range(original_key, start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        """Describe the original, whose ETag a cut pins; a decoded object has another size."""
        store, original_key = self._resolve_key(key)
        info = store.stat(original_key)
        return None if info is None else replace(info, key=key)

    def list_objects(
        self, prefix: str, *, start_after: str | None = None, limit: int | None = None
    ) -> Iterator[ObjectInfo]:
        """List the originals."""
        store, original_prefix = self._resolve_key(prefix)
        cut = len(prefix) - len(original_prefix)
        after = start_after[cut:] if start_after is not None else None
        for entry in store.list_objects(original_prefix, start_after=after, limit=limit):
            yield replace(entry, key=prefix[:cut] + entry.key) if cut else entry

    def list_folders(self, prefix: str) -> _Names:
        """List the folders of the originals."""
        store, original_prefix = self._resolve_key(prefix)
        return store.list_folders(original_prefix)

    def download(self, key: str, path: Path) -> None:
        """Write the object to `path`, decoded if need be; it stays when the cache is cleared."""
        copy = self._get_decoded_copy(key)
        if copy is None:
            store, original_key = self._resolve_key(key)
            store.download(original_key, path)
            return
        try:
            os.link(copy[1], path)
        except OSError:  # another file system
            shutil.copyfile(copy[1], path)

    def local_path(self, key: str) -> Path | None:
        """Return the object's own file, if it has one.

        None for decoded objects too, whose copy the cache may remove while it is read.
        """
        if self._find_decoded_source(key) is not None or key.startswith(STAGED_PREFIX):
            return None
        store, original_key = self._resolve_key(key)
        return store.local_path(original_key)

    def uri(self, key: str) -> str:
        """Return the address of the object as its source stores it, not of a decoded copy."""
        store, original_key = self._resolve_key(key)
        return store.uri(original_key)

    def close(self) -> None:
        """Close the stores that this view opened."""
        for store in self._other_stores.values():
            store.close()
