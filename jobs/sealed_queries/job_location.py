"""Where Spark keeps the checkpoints of one launch: in a folder of this host, or in the bucket.

Each launch that cannot prove that the one before has ended gets a new folder. A superseded driver
then writes where no other process reads. After a proven end the next launch goes on in the same
folder, with the plan of a batch that was begun: so Spark repeats exactly that batch.
"""

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.s3_store import S3Settings
from tidegate.checkpoints.slot_log import LogHead
from tidegate.checkpoints.store import CopyingStore, Store, map_in_threads
from tidegate.errors import TidegateError
from tidegate.jobs.spark.spark_session import is_submitted

from .batch_objects import QueryObjects, restore_files
from .checkpoint_files import (
    SINK_LOG,
    is_for_host,
    list_uncommitted_state,
    replace_schema_paths,
)
from .checkpoint_folder import BucketFile, BucketFolder, CheckpointFolder, HostFolder
from .errors import CHECKPOINT_TAKEN, REMOTE_CHECKPOINT
from .s3a_settings import build_s3a_settings
from .sink_restore import find_local_folder

_LAUNCH_FILE = "launch.json"
_OWNERS_FILE = "owners.json"
_OWNERS = TypeAdapter(list[ProcessIdentity])
_T = TypeVar("_T")
_OWNER_ENDS_WITHIN = 30.0  # seconds; a JVM ends itself when its Python is gone
_KEPT_FOLDERS = 3  # of one job on one host, and in the bucket
_STREAMING = "spark.sql.streaming"
_BUCKET_SETTINGS = {
    # A checksum file per file doubles the requests; S3 and its clients check the bytes themselves.
    f"{_STREAMING}.checkpoint.fileChecksum.enabled": "false",
    # Each batch is listed and sealed at once, and Spark's default of 100 makes long lists.
    f"{_STREAMING}.minBatchesToRetain": "20",
}

_ADOPTED_FILE = "_tidegate_adopted"
_S3 = re.compile(r"s3[an]?://")
_log = structlog.get_logger("tidegate.job")


class _Launch(BaseModel):
    """The newest launch on this host, and its folder."""

    token: int
    timeline: int
    folder: str
    in_bucket: bool = False
    uid: str  # of the job


@dataclass(frozen=True)
class JobLocation:
    """Where the queries of this launch keep their checkpoints.

    Attributes:
        folder: of this host, which knows whose launch it is; without `bucket` one folder per query
            is below it.
        manifest: the sealed batch from which the job goes on; None at the beginning.
        is_first: no batch was ever sealed.
        bucket: the folder of the bucket that has one folder per query below it.
    """

    folder: Path
    manifest: Manifest | None
    is_first: bool
    bucket: BucketFolder | None = None

    def get_folder(self, query: str) -> CheckpointFolder:
        """Return the folder of a query, which need not exist."""
        return self.bucket.enter(query) if self.bucket else HostFolder(self.folder / query)

    def prepare_query(self, store: Store, query: str) -> tuple[QueryObjects, Path | None]:
        """Make the checkpoint of a query ready, and return what the bucket holds of it.

        It deletes the state of batches that were not committed. If the query has no checkpoint
        here, it restores the newest sealed batch, except what makes the checkpoint whole: that is
        in a folder of this host, which is returned as well. The caller calls `publish_query` once
        the sink is restored, too: a launch that fails before leaves no checkpoint of the query, so
        that the next one restores both.

        Raises:
            PoisonError: an object of the checkpoint is damaged or missing.
        """
        folder = self.get_folder(query)
        is_there = folder.exists()
        if is_there:
            map_in_threads(folder.delete, list_uncommitted_state(folder))
        if self.manifest is None or self.get_sealed_batch(query) is None:
            return QueryObjects(store, query), None
        segments = self.manifest.segments
        restored = None if is_there else self.clear_part(query)
        if restored is not None:
            target = self.bucket and self.bucket.enter(query)
            restore_files(store, query, segments, restored, target)
        return QueryObjects.from_segments(store, query, segments), restored

    def clear_part(self, query: str) -> Path:
        """Return a folder of this host for a checkpoint that is not whole; it does not exist."""
        part = self.folder / f"{query}.part"
        shutil.rmtree(part, ignore_errors=True)
        return part

    def publish_query(self, query: str, part: Path) -> None:
        """Make the checkpoint of a query whole: rename its folder, or upload the rest of it."""
        replace_schema_paths(part, self.get_folder(query).address)
        if self.bucket is None:
            part.replace(self.folder / query)
            return
        files = {
            path: file
            for path, file in HostFolder(part).list_files().items()
            if isinstance(file, Path) and not path.startswith(f"{SINK_LOG}/")
        }
        self.bucket.enter(query).upload(files)
        shutil.rmtree(part)

    def give_up_query(self, query: str) -> None:
        """Delete the checkpoint of a query: the next launch restores it and its sink.

        For a query whose sink another process has written into. It must have ended.
        """
        shutil.rmtree(self.folder / query, ignore_errors=True)
        if self.bucket is not None:
            target = self.bucket.enter(query)
            target.store.delete_folder(target.prefix)

    def get_sealed_batch(self, query: str) -> int | None:
        """Return the newest sealed batch of a query; None without one."""
        notes = BatchNotes.from_manifest(self.manifest)
        found = notes.queries.get(query) if notes else None
        return found.batch if found else None

    def note_jvm(self, pid: int | None) -> None:
        """Note this process and its JVM, which must have ended before the next launch goes on here.

        Without a known JVM no later launch goes on in this folder.
        """
        owners = [ProcessIdentity.this_process(), ProcessIdentity.of_process(pid)] if pid else []
        _note_owners(self.folder, owners)


def open_location(
    home: Path, uid: str, head: LogHead, token: int, launches: BucketFolder | None = None
) -> JobLocation:
    """Return the location of this launch: a folder of its own, or that of the launch before.

    The launch goes on in the same folder if the launch before was the last holder of the lease, ran
    on this host and has ended, and nothing was restored since. That folder has the plan of a batch
    that was begun, so Spark repeats exactly the batch that sinks may have seen. The function waits
    up to 30 s for the end. Otherwise it makes a new folder, and deletes older ones except the
    newest two and those of live processes.

    Args:
        home: folder of the job on this host.
        uid: identity of the job: one of the same name in another store has the same folder.
        head: of the job's log, after any restore; its record is the batch to go on from.
        token: of the lease, which this launch holds. It grows by one with every holder.
        launches: where the checkpoints of all launches are in the bucket; None: on this host.
    """
    last = _read_file(home / _LAUNCH_FILE, TypeAdapter(_Launch))
    goes_on = (
        last is not None
        and (last.token, last.timeline) == (token - 1, head.timeline)
        and last.in_bucket == (launches is not None)
        and last.uid == uid
        and _have_owners_ended(home / last.folder)
    )
    now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    name = last.folder if last is not None and goes_on else f"{now}-{token:06d}"
    location = JobLocation(
        home / name,
        head.record,
        is_first=head.slot == 0 and head.timeline == 0,
        bucket=launches and launches.enter(name),
    )
    if goes_on:
        _log.info("continued_in_place", folder=describe_location(location))
    else:
        _delete_old_folders(home)
        if launches is not None:
            # In a thread: a large state has many objects, and the script need not wait for them.
            threading.Thread(target=delete_old_launches, args=(launches,), daemon=True).start()
        location.folder.mkdir(parents=True)
        after = str(head.checkpoint or "nothing")
        _log.info("new_checkpoint_folder", folder=describe_location(location), after=after)
    # Before others can find the folder; the JVM is added before it runs a query. Otherwise the next
    # launch would take the dead owners of the launch before for those of this one.
    _note_owners(location.folder, [ProcessIdentity.this_process()])
    launch = _Launch(
        token=token,
        timeline=head.timeline,
        folder=name,
        in_bucket=launches is not None,
        uid=uid,
    )
    _replace_file(home / _LAUNCH_FILE, launch.model_dump_json().encode())
    return location


def describe_location(location: JobLocation) -> str:
    """Return the location as manifests name it: in the bucket, or on which host."""
    if location.bucket is not None:
        return location.bucket.address
    return f"{ProcessIdentity.this_process('here').host}:{location.folder}"


def find_jobs_home() -> Path:
    """Return the folder below which jobs keep their checkpoint folders.

    ``$TIDEGATE_HOME/jobs``, or ``~/.tidegate/jobs``.
    """
    home = os.environ.get("TIDEGATE_HOME") or Path.home() / ".tidegate"
    return Path(home).absolute() / "jobs"


def get_jvm_pid(session: Any) -> int | None:
    """Return the pid of the JVM of this driver; None if it was started elsewhere."""
    if is_submitted():
        return os.getppid()
    process = getattr(session.sparkContext._gateway, "proc", None)
    return process.pid if process is not None else None


def set_bucket_access(session: Any, address: str, own: Mapping[str, str]) -> None:
    """Let queries that start in a session from now on keep their checkpoints at an address.

    S3A's settings are those of this bucket alone: the script may use other buckets in another way.
    They reach Spark as settings of the session, never as arguments of a process.

    Args:
        session: PySpark's.
        address: ``s3a://bucket/...``.
        own: settings of the job, which win.
    """
    bucket = urlsplit(address).netloc
    access = build_s3a_settings(S3Settings.from_environment(bucket))
    here = {
        key.replace("fs.s3a.", f"fs.s3a.bucket.{bucket}.", 1): value
        for key, value in access.items()
    }
    for key, value in {**here, **_BUCKET_SETTINGS}.items():
        if key not in own:
            session.conf.set(key, value)


def _have_owners_ended(folder: Path) -> bool:
    """Return whether all processes that wrote here are proven dead, after some patience."""
    owners = _read_owners(folder)
    deadline = time.monotonic() + _OWNER_ENDS_WITHIN
    while not all(owner.is_proven_dead() for owner in owners):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return bool(owners)


def _note_owners(folder: Path, owners: list[ProcessIdentity]) -> None:
    _replace_file(folder / _OWNERS_FILE, _OWNERS.dump_json(owners))


def _read_owners(folder: Path) -> list[ProcessIdentity]:
    return _read_file(folder / _OWNERS_FILE, _OWNERS) or []


def _read_file(path: Path, kind: TypeAdapter[_T]) -> _T | None:
    """Return what a file of a launch says; None if it is not there, or not whole."""
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _replace_file(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def _delete_old_folders(home: Path) -> None:
    """Delete all but the newest folders; one of a live process stays."""
    found = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    folders = sorted(found, key=lambda path: _get_token(path.name))
    for folder in folders[: -_KEPT_FOLDERS + 1]:
        if all(owner.is_proven_dead() for owner in _read_owners(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _get_token(folder: str) -> str:
    """The end of a folder's name, which grows from launch to launch; clocks may go back."""
    return folder.rpartition("-")[2]


def delete_old_launches(launches: BucketFolder) -> None:
    """Delete the checkpoints of all launches in the bucket but the newest.

    What a store that does not answer keeps, the next launch deletes.
    """
    with contextlib.suppress(TidegateError):
        names = launches.store.list_folders(launches.prefix)
        for name in sorted(names, key=_get_token)[: -_KEPT_FOLDERS + 1]:
            launches.store.delete_folder(launches.enter(name).prefix)


# Takes over the checkpoint that a script had before it became a job.


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
        raise CHECKPOINT_TAKEN(
            pipeline=pipeline,
            query=query,
            location=old.address,
            owner=taken,
            marker=f"{old.address}/{_ADOPTED_FILE}",
        )
    left_out = {_ADOPTED_FILE, *list_uncommitted_state(old)}
    files = {path: file for path, file in old.list_files().items() if path not in left_out}
    # Not whole until it is published: a crash must not leave a part of a checkpoint.
    part = location.clear_part(query)
    part.mkdir(parents=True)

    def adopt_file(path: str) -> None:
        """Copy one file within the bucket, or into the part on this host."""
        file, target = files[path], part / path
        if location.bucket is not None and isinstance(file, BucketFile) and not is_for_host(path):
            location.bucket.enter(query).copy_file(path, file)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(file, Path):
            shutil.copyfile(file, target)
        else:
            target.write_bytes(old.read(path))

    map_in_threads(adopt_file, files)
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
