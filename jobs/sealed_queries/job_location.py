"""The folder in which Spark keeps the checkpoints of one launch of a job.

Each launch that cannot prove that the one before has ended gets a new folder. A superseded driver
then writes where no other process reads. After a proven end the next launch goes on in the same
folder, with the plan of a batch that was begun: so Spark repeats exactly that batch.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, TypeAdapter, ValidationError

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import LogHead
from tidegate.checkpoints.store import Store

from .batch_objects import QueryObjects, restore_files
from .checkpoint_files import delete_uncommitted_state

_LAUNCH_FILE = "launch.json"
_OWNERS_FILE = "owners.json"
_OWNERS = TypeAdapter(list[ProcessIdentity])
_OWNER_ENDS_WITHIN = 30.0  # seconds; a JVM ends itself when its Python is gone
_KEPT_FOLDERS = 3  # of one job on one host

_log = structlog.get_logger("tidegate.job")


class _Launch(BaseModel):
    """The newest launch on this host, and its folder."""

    token: int
    timeline: int
    folder: str


@dataclass(frozen=True)
class JobLocation:
    """Where the queries of this launch keep their checkpoints.

    Attributes:
        folder: one folder per query below it.
        manifest: the sealed batch from which the job goes on; None at the beginning.
        is_first: no batch was ever sealed.
    """

    folder: Path
    manifest: Manifest | None
    is_first: bool

    def prepare_query(self, store: Store, query: str) -> tuple[QueryObjects, Path | None]:
        """Make the checkpoint of a query ready, and return what the bucket holds of it.

        It deletes the state of batches that were not committed. If the query has no folder here, it
        restores the newest sealed batch into another folder, and returns that as well. The caller
        renames it once the sink is restored, too: a launch that fails before leaves no folder of
        the query, so that the next one restores both.

        Raises:
            PoisonError: an object of the checkpoint is damaged or missing.
        """
        folder = self.folder / query
        delete_uncommitted_state(folder)
        if self.manifest is None or self.get_sealed_batch(query)[0] is None:
            return QueryObjects(store, query), None
        segments = self.manifest.segments
        restored: Path | None = None
        if not folder.exists():
            restored = folder.with_name(f"{query}.part")
            shutil.rmtree(restored, ignore_errors=True)
            restore_files(store, query, segments, restored)
        return QueryObjects.from_segments(store, query, segments), restored

    def get_sealed_batch(self, query: str) -> tuple[int | None, int]:
        """Return the newest sealed batch of a query, and when it was sealed; None and 0 without."""
        notes = BatchNotes.from_manifest(self.manifest)
        if self.manifest is None or notes is None or query not in notes.queries:
            return None, 0
        at = notes.queries[query]
        return at.batch, at.sealed_at or self.manifest.created_at

    def note_jvm(self, pid: int | None) -> None:
        """Note this process and its JVM, which must have ended before the next launch goes on here.

        Without a known JVM no later launch goes on in this folder.
        """
        if pid is not None:
            owners = [ProcessIdentity.this_process(), ProcessIdentity.of_process(pid)]
            _replace_file(self.folder / _OWNERS_FILE, _OWNERS.dump_json(owners))


def open_location(home: Path, head: LogHead, token: int) -> JobLocation:
    """Return the location of this launch: a folder of its own, or that of the launch before.

    The launch goes on in the same folder if the launch before was the last holder of the lease, ran
    on this host and has ended, and nothing was restored since. That folder has the plan of a batch
    that was begun, so Spark repeats exactly the batch that sinks may have seen. The function waits
    up to 30 s for the end. Otherwise it makes a new folder, and deletes older ones except the
    newest two and those of live processes.

    Args:
        home: folder of the job on this host.
        head: of the job's log, after any restore; its record is the batch to go on from.
        token: of the lease, which this launch holds. It grows by one with every holder.
    """
    first = head.slot == 0 and head.timeline == 0
    last = _read_launch(home)
    if (
        last is not None
        and (last.token, last.timeline) == (token - 1, head.timeline)
        and _have_owners_ended(home / last.folder)
    ):
        location = JobLocation(home / last.folder, head.record, is_first=first)
        _log.info("continued_in_place", folder=str(location.folder))
    else:
        _delete_old_folders(home)
        now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        location = JobLocation(home / f"{now}-{token:06d}", head.record, is_first=first)
        location.folder.mkdir(parents=True)
        after = str(head.checkpoint or "nothing")
        _log.info("new_checkpoint_folder", folder=str(location.folder), after=after)
    launch = _Launch(token=token, timeline=head.timeline, folder=location.folder.name)
    _replace_file(home / _LAUNCH_FILE, launch.model_dump_json().encode())
    return location


def describe_location(location: JobLocation) -> str:
    """Return the location with its host, as manifests name it."""
    return f"{ProcessIdentity.this_process('here').host}:{location.folder}"


def find_jobs_home() -> Path:
    """Return the folder below which jobs keep their checkpoint folders.

    ``$TIDEGATE_HOME/jobs``, or ``~/.tidegate/jobs``.
    """
    home = os.environ.get("TIDEGATE_HOME") or Path.home() / ".tidegate"
    return Path(home).absolute() / "jobs"


def get_jvm_pid(session: Any) -> int | None:
    """Return the pid of the JVM that PySpark has started; None if it was started elsewhere."""
    process = getattr(session.sparkContext._gateway, "proc", None)
    return process.pid if process is not None else None


def _have_owners_ended(folder: Path) -> bool:
    """Return whether all processes that wrote here are proven dead, after some patience."""
    owners = _read_owners(folder)
    deadline = time.monotonic() + _OWNER_ENDS_WITHIN
    while not all(owner.is_proven_dead() for owner in owners):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return bool(owners)


def _read_owners(folder: Path) -> list[ProcessIdentity]:
    try:
        return _OWNERS.validate_json((folder / _OWNERS_FILE).read_bytes())
    except (OSError, ValidationError):
        return []


def _read_launch(home: Path) -> _Launch | None:
    try:
        return _Launch.model_validate_json((home / _LAUNCH_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _replace_file(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def _delete_old_folders(home: Path) -> None:
    """Delete all but the newest folders; one of a live process stays."""
    folders = sorted(path for path in home.iterdir() if path.is_dir()) if home.is_dir() else []
    for folder in folders[: -_KEPT_FOLDERS + 1]:
        if all(owner.is_proven_dead() for owner in _read_owners(folder)):
            shutil.rmtree(folder, ignore_errors=True)
