"""The objects in the bucket that hold the files of one query's checkpoint.

Small files of a batch go into one pack, a tar file; each larger file is an object of its own. So a
batch costs few requests, however many partitions the state has. A file is stored once: later
batches that need it name the same object.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from tidegate.checkpoints.canonical_json import sha256_of_bytes, sha256_of_file
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import Store

from .errors import OBJECT_DAMAGED

LARGE_FILE: Final = 1 << 20  # bytes; from here on an object of its own
MOST_PACKS: Final = (
    64  # that a batch names for one query; then files of the oldest are packed again
)
_DOWNLOADS = 8  # at once
_PATH = "path"  # in `FileRef.extra` of a large file


def get_object_kind(query: str) -> str:
    """Return the kind of a query's objects in `Manifest.segments`."""
    return f"checkpoint:{query}"


class QueryObjects:
    """What the bucket holds of one query's checkpoint.

    Args:
        store: the bucket.
        query: its name.
        known: path in the checkpoint -> the object that holds the file.
    """

    def __init__(
        self, store: Store, query: str, known: Mapping[str, FileRef] | None = None
    ) -> None:
        self._store, self._query = store, query
        self._known = dict(known or {})

    @classmethod
    def from_segments(cls, store: Store, query: str, segments: Sequence[FileRef]) -> QueryObjects:
        """Read from the packs of a sealed batch which files they hold.

        It fetches each pack. Files that a new start of the query may rewrite do not count.

        Raises:
            PoisonError: a pack is damaged or missing.
        """
        known: dict[str, FileRef] = {}
        for ref in select_objects(segments, query):
            if _PATH in ref.extra:
                known[ref.extra[_PATH]] = ref
            else:
                with _open_pack(store, ref) as pack:
                    known |= dict.fromkeys(pack.getnames(), ref)
        # These have no version in their names, and a new start of the query may rewrite them.
        return cls(store, query, {path: ref for path, ref in known.items() if _is_final(path)})

    def store_files(self, files: Mapping[str, Path], prefix: str) -> list[FileRef]:
        """Store the files that the bucket lacks, and return the objects that hold all of them.

        Args:
            files: path in the checkpoint -> file.
            prefix: of the keys that the attempt may write.

        Raises:
            FileNotFoundError: Spark has deleted one of them.
        """
        self._forget_oldest_packs(files)
        new = {path: file for path, file in files.items() if path not in self._known}
        small: dict[str, Path] = {}
        for path, file in new.items():
            if file.stat().st_size < LARGE_FILE:
                small[path] = file
            else:
                self._known[path] = self._upload(file, f"{prefix}{self._query}/{path}", 1, path)
        if small:
            with tempfile.TemporaryDirectory(prefix="tidegate-pack-") as folder:
                pack = Path(folder) / "pack.tar"
                with tarfile.open(pack, "w") as archive:
                    for path, file in sorted(small.items()):
                        archive.add(file, arcname=path, recursive=False)
                ref = self._upload(pack, f"{prefix}{self._query}/pack.tar", len(small))
            self._known |= dict.fromkeys(small, ref)
        self._known = {path: self._known[path] for path in files}
        return [*{ref.key: ref for ref in self._known.values()}.values()]

    def _upload(self, file: Path, key: str, files: int, path: str | None = None) -> FileRef:
        stored = self._store.upload(file, key)
        return FileRef(
            key=key,
            rows=files,
            bytes=stored.size,
            sha256=stored.sha256,
            kind=get_object_kind(self._query),
            extra={"etag": stored.etag, **({_PATH: path} if path else {})},
        )

    def _forget_oldest_packs(self, files: Mapping[str, Path]) -> None:
        """Let the files of the older half be packed again once too many packs are needed.

        The manifest stays small, and a large pack is not kept for one file.
        """
        needed = (self._known[path] for path in files if path in self._known)
        packs = sorted({ref.key for ref in needed if _PATH not in ref.extra})
        gone = packs[: -MOST_PACKS // 2] if len(packs) >= MOST_PACKS else []
        self._known = {path: ref for path, ref in self._known.items() if ref.key not in gone}


def select_objects(segments: Sequence[FileRef], query: str) -> list[FileRef]:
    """Return the objects of one query among those that a slot names."""
    return [ref for ref in segments if ref.kind == get_object_kind(query)]


def restore_files(store: Store, query: str, segments: Sequence[FileRef], folder: Path) -> None:
    """Write the checkpoint of a query, as a slot has sealed it, into a new folder.

    Raises:
        PoisonError: an object is damaged or missing.
        FileExistsError: the folder exists.
    """
    folder.mkdir(parents=True)
    objects = select_objects(segments, query)
    # Several large files at once: one connection does not fill the network, and checksums take
    # about as long as the transfer. Packs may hold the same file, so they come one by one.
    files = [(ref, folder / ref.extra[_PATH]) for ref in objects if _PATH in ref.extra]
    # Before any thread: `tarfile` fails if another thread makes the same folder at the same time.
    for _, target in files:
        target.parent.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(_DOWNLOADS)
    try:
        large = [pool.submit(_restore_file, store, ref, target) for ref, target in files]
        # The pack of `metadata` comes first and has the newest form of what a start wrote again.
        for ref in reversed(objects):
            if _PATH not in ref.extra:
                with _open_pack(store, ref) as pack:
                    pack.extractall(folder, filter="data")
        for download in as_completed(large):
            download.result()
    finally:
        # After an error the files that wait would only delay it.
        pool.shutdown(cancel_futures=True)


def _restore_file(store: Store, ref: FileRef, target: Path) -> None:
    store.download(ref.key, target)
    if sha256_of_file(target) != ref.sha256:
        raise OBJECT_DAMAGED(uri=store.uri(ref.key))


def _open_pack(store: Store, ref: FileRef) -> tarfile.TarFile:
    data = store.get(ref.key).data
    if sha256_of_bytes(data) != ref.sha256:
        raise OBJECT_DAMAGED(uri=store.uri(ref.key))
    return tarfile.open(fileobj=io.BytesIO(data))


def _is_final(path: str) -> bool:
    return any(part[:1].isdigit() or part == "SSTs" for part in path.split("/")[-2:])
