"""Takes over the checkpoint that a script had before it became a job."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import structlog

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import CopyingStore

from .checkpoint_files import is_for_host, list_uncommitted_state
from .checkpoint_folder import BucketFolder, CheckpointFolder, HostFolder
from .errors import CHECKPOINT_TAKEN, REMOTE_CHECKPOINT
from .job_location import JobLocation
from .sink_restore import find_local_folder

_ADOPTED_FILE = "_tidegate_adopted"
_S3 = re.compile(r"s3[an]?://")

_log = structlog.get_logger("tidegate.job")


def adopt_checkpoint(
    location: JobLocation, query: str, given: str, pipeline: str, uid: str
) -> None:
    """Make the query's checkpoint of this launch from the one that the script names.

    Nothing happens if there is none, or if this launch has a checkpoint of the query already. In a
    bucket the server copies the objects.

    Args:
        location: of this launch.
        query: its name.
        given: the script's checkpoint location.
        pipeline: name of the job.
        uid: identity of the job.

    Raises:
        ConfigurationError: it cannot be read from here, or another job has adopted it.
    """
    old = _find_folder(given, location)
    if old is None:
        target = location.get_folder(query).address
        raise REMOTE_CHECKPOINT(pipeline=pipeline, query=query, location=given, target=target)
    if not old.exists() or location.get_folder(query).exists():
        return
    owner = f"{pipeline} {uid}"
    if (taken := old.claim(_ADOPTED_FILE, owner)) != owner:
        marker = f"{old.address}/{_ADOPTED_FILE}"
        fields = {"query": query, "location": old.address, "owner": taken, "marker": marker}
        raise CHECKPOINT_TAKEN(pipeline=pipeline, **fields)
    left_out = {_ADOPTED_FILE, *list_uncommitted_state(old)}
    files = {path: file for path, file in old.list_files().items() if path not in left_out}
    # Not whole until it is published: a crash must not leave a part of a checkpoint.
    part = location.clear_part(query)
    part.mkdir(parents=True)
    for path, file in files.items():
        if isinstance(file, Path):
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part / path)
    if location.bucket is not None and isinstance(old, BucketFolder):
        here = [path for path in files if is_for_host(path)]
        for path in here:
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(old.read(path))
            del files[path]
        location.bucket.enter(query).copy_files(files)
    location.publish_query(query, part)
    _log.info("checkpoint_adopted", query=query, given=old.address)


def _find_folder(given: str, location: JobLocation) -> CheckpointFolder | None:
    """Return the folder that an address of Hadoop means; None if it cannot be copied from here."""
    local = find_local_folder(given)
    if local is not None:
        return HostFolder(local)
    if location.bucket is not None and _S3.match(given):
        store = open_store(_S3.sub("s3://", given, count=1))
        return BucketFolder(store, "") if isinstance(store, CopyingStore) else None
    return None
