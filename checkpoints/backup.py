"""Copies a pipeline to another store while it may be running.

1. Read the documents that point to something, such as `roots.json` and the tables' pointers.
2. List the slots. What the pointers name is at most as new as these.
3. Copy `identity.json`, so that no other pipeline is copied over what follows, and then all other
   objects. An object that retention deletes meanwhile is left out: its slot holds a stub by then.
4. Copy the slots that were listed, oldest first, then the other documents. So every slot in the
   copy names only what is in it, also if this process ends before the last step.

The next run copies what is new. Nothing is deleted in the copy.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from .bucket_layout import BucketLayout
from .errors import BACKUP_OF_OTHER, BACKUP_ONTO_ITSELF
from .pipeline_identity import read_identity
from .record_models import FrozenModel
from .store import CopyingStore, NotFoundError, ObjectInfo, Store, map_in_threads

_WORKERS = 8
# What belongs to processes that run now, or is made again.
_LEFT_OUT = ("lease.json", "status.json", "requests/", "acks/", "index/", "logs/", "staging/")
_POINTER_NAMES = ("current.json", "versions.json", "catalog.json")  # below `iceberg/`


class BackupReport(FrozenModel):
    """What a backup did.

    Attributes:
        objects: that the copy needs.
        copied: how many of them were not in it yet.
        bytes: of those.
    """

    objects: int
    copied: int
    bytes: int


def copy_pipeline(source: Store, target: Store, pipeline: str) -> BackupReport:
    """Copy a pipeline, or what is new of it, into another store.

    Raises:
        ConfigurationError: the target is the source, or holds another pipeline of this name.
    """
    layout = BucketLayout(pipeline)
    if source.uri(layout.identity_key) == target.uri(layout.identity_key):
        raise BACKUP_ONTO_ITSELF(pipeline=pipeline, target=target.url)
    held = read_identity(target, pipeline)
    if held is not None and held != read_identity(source, pipeline):
        raise BACKUP_OF_OTHER(pipeline=pipeline, target=target.url, uid=held)
    pointers = {
        info.key: source.get(info.key).data
        for info in source.list_objects(layout.pipeline_prefix)
        if _is_pointer(layout, info.key)
    }
    slots = [*_list_slots(source, layout)]
    present = {info.key: info.size for info in target.list_objects(layout.pipeline_prefix)}
    files = [info for info in source.list_objects(layout.pipeline_prefix) if _is_file(layout, info)]
    new_files = [info for info in files if not _is_present(layout, info, present)]
    if layout.identity_key in pointers:
        target.put(layout.identity_key, pointers[layout.identity_key])
    copied = map_in_threads(
        lambda info: _copy_object(source, target, layout, info), new_files, _WORKERS
    )
    # A slot changes once, into a stub of another size.
    new_slots = [info for info in slots if present.get(info.key) != info.size]
    for info in new_slots:
        target.put(info.key, source.get(info.key).data)
    for key, data in pointers.items():
        if key != layout.identity_key:
            target.put(key, data)
    return BackupReport(
        objects=len(files) + len(slots) + len(pointers),
        copied=sum(copied) + len(new_slots) + len(pointers),
        bytes=sum(info.size for info in [*new_files, *new_slots])
        + sum(map(len, pointers.values())),
    )


def _is_pointer(layout: BucketLayout, key: str) -> bool:
    """Whether an object is a document that points to others and changes."""
    below = key.removeprefix(layout.pipeline_prefix)
    if below.startswith(_LEFT_OUT):
        return False
    folder, _, name = below.rpartition("/")
    is_table_pointer = folder.partition("/")[0] == "iceberg" and name in _POINTER_NAMES
    return folder in ("", "sinks") or is_table_pointer


def _is_file(layout: BucketLayout, info: ObjectInfo) -> bool:
    """Whether an object is neither left out, nor a pointer, nor a slot."""
    below = info.key.removeprefix(layout.pipeline_prefix)
    parts = below.split("/")
    is_slot = parts[0] == "timelines" and parts[2:3] == ["slots"]
    return not (is_slot or below.startswith(_LEFT_OUT) or _is_pointer(layout, info.key))


def _is_present(layout: BucketLayout, info: ObjectInfo, present: dict[str, int]) -> bool:
    """Whether the copy has the object; only files of attempts never change."""
    return layout.parse_attempt(info.key) is not None and present.get(info.key) == info.size


def _list_slots(source: Store, layout: BucketLayout) -> Iterator[ObjectInfo]:
    """The slots of all timelines, oldest first."""
    for timeline in sorted(map(int, source.list_folders(layout.timelines_prefix))):
        yield from reversed([*source.list_objects(layout.slots_prefix(timeline))])


def _copy_object(source: Store, target: Store, layout: BucketLayout, info: ObjectInfo) -> bool:
    """Copy an object; False if it was deleted meanwhile."""
    try:
        # Other objects may have changed since they were listed, and the server would refuse.
        never_changes = layout.parse_attempt(info.key) is not None
        if isinstance(source, CopyingStore) and isinstance(target, CopyingStore) and never_changes:
            target.copy_from(source, info.key, info.etag, info.key)
            return True
        with tempfile.TemporaryDirectory(prefix="tidegate-backup-") as folder:
            path = source.local_path(info.key)
            if path is None:
                path = Path(folder) / "object"
                source.download(info.key, path)
            target.upload(path, info.key)
    except (NotFoundError, FileNotFoundError):
        return False
    return True
