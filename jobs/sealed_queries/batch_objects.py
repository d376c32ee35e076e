"""The objects in the bucket that hold the files of one query's checkpoint.

Of a checkpoint on this host, the small files of a batch go into one pack, a tar file, and each
larger file is an object of its own. So a batch costs few requests, however many partitions the
state has. Of a checkpoint in the bucket, the server copies each file. A file is stored once: later
batches that need it name the same object.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.checkpoints.canonical_json import sha256_of_bytes, sha256_of_file
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import CopyingStore, ObjectInfo, Store, map_in_threads

from .checkpoint_files import is_for_host
from .checkpoint_folder import BucketFile, BucketFolder, CheckpointFile
from .errors import OBJECT_DAMAGED

LARGE_FILE = 1 << 20  # bytes; from here on an object of its own
MOST_PACKS = 64  # that a batch names for one query; then files of the oldest are packed again
_PATH = "path"  # in `FileRef.extra` of a file that is an object of its own
_ETAG = "etag"


def get_object_kind(query: str) -> str:
    """Return the kind of a query's objects in `Manifest.segments`."""
    return f"checkpoint:{query}"


@dataclass
class QueryObjects:
    """What the bucket holds of one query's checkpoint.

    Args:
        store: the bucket.
        query: its name.
        known: path in the checkpoint -> the object that holds the file.
    """

    _bucket: Store
    _query: str
    _known: dict[str, FileRef] = field(default_factory=dict)

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
        final = {
            path: ref
            for path, ref in known.items()
            if any(part[:1].isdigit() or part == "SSTs" for part in path.split("/")[-2:])
        }
        return cls(store, query, final)

    def store_files(
        self, files: Mapping[str, CheckpointFile], prefix: str, batch: int
    ) -> list[FileRef]:
        """Store the files that the bucket lacks, and return the objects that hold all of them.

        Args:
            files: path in the checkpoint -> file.
            prefix: of the keys that the attempt may write.
            batch: it is in the key of the pack: a batch that is given up and the one after it may
                be of one attempt, and later slots name the files of both.

        Raises:
            FileNotFoundError: Spark has deleted one of them.
        """
        # The manifest stays small, and a large pack is not kept for one file.
        needed = (self._known[path] for path in files if path in self._known)
        packs = sorted({ref.key for ref in needed if _PATH not in ref.extra})
        gone = packs[: -MOST_PACKS // 2] if len(packs) >= MOST_PACKS else []
        self._known = {path: ref for path, ref in self._known.items() if ref.key not in gone}
        new = {path: file for path, file in files.items() if path not in self._known}
        small = {
            path: file
            for path, file in new.items()
            if isinstance(file, Path) and file.stat().st_size < LARGE_FILE
        }
        own = f"{prefix}{self._query}/"

        def store_alone(path: str) -> None:
            """Store a file as an object. It is known at once: a retry does not send it again."""
            self._known[path] = self._store(new[path], f"{own}{path}", path)

        map_in_threads(store_alone, [path for path in new if isinstance(new[path], BucketFile)])
        # One after the other, so that an outage cuts off one only.
        for path, file in new.items():
            if isinstance(file, Path) and path not in small:
                store_alone(path)
        if small:
            with tempfile.TemporaryDirectory(prefix="tidegate-pack-") as folder:
                pack = Path(folder) / "pack.tar"
                with tarfile.open(pack, "w") as archive:
                    for path, file in sorted(small.items()):
                        archive.add(file, arcname=path, recursive=False)
                ref = self._store(pack, f"{own}pack-{batch}.tar", files=len(small))
            self._known |= dict.fromkeys(small, ref)
        self._known = {path: self._known[path] for path in files}
        return [*{ref.key: ref for ref in self._known.values()}.values()]

    def _store(
        self, file: CheckpointFile, key: str, path: str | None = None, files: int = 1
    ) -> FileRef:
        """Store an object; `path` is that of the file which it is, None for a pack of `files`."""
        if isinstance(file, Path):
            stored = self._bucket.upload(file, key)
            size, digest, etag = stored.size, stored.sha256, stored.etag
        else:
            assert isinstance(self._bucket, CopyingStore)  # noqa: S101 - the checkpoint is in it
            # No process has read the bytes: the ETag stands for them.
            size, digest, etag = file.info.size, "", file.copy_to(self._bucket, key)
        return FileRef(
            key=key,
            rows=files,
            bytes=size,
            sha256=digest,
            kind=get_object_kind(self._query),
            extra={_ETAG: etag, **({_PATH: path} if path else {})},
        )


def select_objects(segments: Sequence[FileRef], query: str) -> list[FileRef]:
    """Return the objects of one query among those that a slot names."""
    return [ref for ref in segments if ref.kind == get_object_kind(query)]


def restore_files(
    store: Store,
    query: str,
    segments: Sequence[FileRef],
    folder: Path,
    bucket: BucketFolder | None = None,
) -> None:
    """Write the checkpoint of a query, as a slot has sealed it, into a new folder.

    Args:
        store: the bucket.
        query: its name.
        segments: of the slot.
        folder: of this host.
        bucket: if given, the server copies there what are objects of their own. Only the contents
            of packs and what is for this host come into `folder`; `BucketFolder.upload` takes them
            along, except for the log of a file sink.

    Raises:
        PoisonError: an object is damaged or missing.
        FileExistsError: the folder exists.
    """
    folder.mkdir(parents=True)
    objects = select_objects(segments, query)
    single = {ref.extra[_PATH]: ref for ref in objects if _PATH in ref.extra}
    # Packs may hold the same file, so they come one by one, and before what is newer than they are.
    # The pack of `metadata` is the first and has the newest form of what a start wrote again.
    for ref in reversed(objects):
        if _PATH not in ref.extra:
            with _open_pack(store, ref) as pack:
                pack.extractall(folder, filter="data")

    def restore_object(path: str) -> None:
        """Bring one object to where it belongs."""
        ref, target = single[path], folder / path
        if bucket is None or is_for_host(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            _restore_file(store, ref, target)
        else:
            info = ObjectInfo(ref.key, ref.bytes, ref.extra[_ETAG], None)
            try:
                bucket.copy_file(path, BucketFile(bucket.store, info))
            except FileNotFoundError as error:
                raise OBJECT_DAMAGED(uri=error) from error
            target.unlink(missing_ok=True)  # an older one of a pack

    # Several at once: one connection does not fill the network, and checksums take about as long as
    # the transfer.
    map_in_threads(restore_object, single)


def _restore_file(store: Store, ref: FileRef, target: Path) -> None:
    store.download(ref.key, target)
    if ref.sha256:
        is_sealed = sha256_of_file(target) == ref.sha256
    else:  # no process had read it: the ETag tells whether it is the version that was sealed
        info = store.stat(ref.key)
        is_sealed = info is not None and info.etag == ref.extra[_ETAG]
    if not is_sealed:
        raise OBJECT_DAMAGED(uri=store.uri(ref.key))


def _open_pack(store: Store, ref: FileRef) -> tarfile.TarFile:
    data = store.get(ref.key).data
    if sha256_of_bytes(data) != ref.sha256:
        raise OBJECT_DAMAGED(uri=store.uri(ref.key))
    return tarfile.open(fileobj=io.BytesIO(data))
