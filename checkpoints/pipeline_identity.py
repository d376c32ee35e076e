"""A pipeline's identity: a random uid and the address of its store, written once.

The uid prevents that two buckets or two pipelines are taken for one. The address reveals a copy of
the store. The metadata of the tables in a copy still names the original's place, so a driver of the
copy would write into the original's tables.

`ProcessIdentity` identifies a process, so that another process on the same host can prove it dead.
"""

from __future__ import annotations

import os
import secrets
import socket
from functools import partial
from pathlib import Path

from pydantic import ConfigDict

from .bucket_layout import BucketLayout
from .errors import IDENTITY_MALFORMED, OUTCOME_UNKNOWN, STORE_COPIED
from .record_models import BucketRecord
from .shared_documents import create_record, read_document
from .store import Store


def read_identity(store: Store, pipeline: str) -> str | None:
    """Return the pipeline's uid, also in a copy of its store; None if it has never run.

    Raises:
        PoisonError: the object is not an identity.
    """
    found = _read_identity_record(store, pipeline)
    return found.uid if found else None


def refuse_copied_store(store: Store, pipeline: str) -> None:
    """Refuse to write for a pipeline whose store was copied from another address.

    Raises:
        ConfigurationError: the store is a copy.
    """
    found, here = _read_identity_record(store, pipeline), _locate_identity(store, pipeline)
    if found is not None and found.address not in (None, here):
        raise STORE_COPIED(pipeline=pipeline, here=here, origin=found.address)


def is_copied_store(store: Store, pipeline: str) -> bool:
    """Return whether the store was copied from another address, or the pipeline moved to one.

    Raises:
        PoisonError: the object is not an identity.
    """
    found = _read_identity_record(store, pipeline)
    return found is not None and found.address not in (None, _locate_identity(store, pipeline))


def claim_address(store: Store, pipeline: str) -> None:
    """Write the address into an identity from before addresses were, so that copies are refused.

    Raises:
        ConfigurationError: the store is a copy.
        PreconditionFailedError: another process changed the identity meanwhile.
    """
    refuse_copied_store(store, pipeline)
    key, malformed = (
        BucketLayout(pipeline).identity_key,
        partial(IDENTITY_MALFORMED, pipeline=pipeline),
    )
    found, etag = read_document(store, key, _IdentityRecord, malformed)
    if found is not None and found.address is None:
        store.compare_and_swap(key, _make_record(store, pipeline, found.uid).to_bytes(), etag)


def rewrite_identity(store: Store, pipeline: str) -> str:
    """Make a copied store a pipeline of its own: write a new uid and this address; return the uid.

    Processes that expect the old uid refuse the store from then on. The caller has checked that it
    is a copy.

    Raises:
        NotFoundError: the pipeline has no identity here.
        PreconditionFailedError: another process changed it meanwhile.
    """
    found, uid = store.get(BucketLayout(pipeline).identity_key), secrets.token_hex(16)
    # By ETag: of two processes that adopt a copy at once, one has to fail.
    store.compare_and_swap(found.key, _make_record(store, pipeline, uid).to_bytes(), found.etag)
    return uid


def is_at(store: Store, other: Store, pipeline: str) -> bool:
    """Return whether the identity in a store names another store as the pipeline's place."""
    found = _read_identity_record(store, pipeline)
    return found is not None and found.address == _locate_identity(other, pipeline)


def move_identity(source: Store, target: Store, pipeline: str) -> None:
    """Make a whole copy the pipeline, with the same uid, and the origin a copy of it.

    Drivers refuse the origin before they accept the target. If it was broken off in between, a
    second call finishes it.

    Raises:
        NotFoundError: the pipeline has no identity in one of them.
        PreconditionFailedError: another process changed an identity meanwhile.
    """
    moved = _make_record(target, pipeline, read_identity(source, pipeline) or "").to_bytes()
    for store in (source, target):
        found = store.get(BucketLayout(pipeline).identity_key)
        if found.data != moved:
            store.compare_and_swap(found.key, moved, found.etag)


def ensure_identity(store: Store, pipeline: str) -> str:
    """Return the pipeline's uid; write one if there is none yet.

    Processes that start at the same time get the same uid.

    Raises:
        ConfigurationError: the store is a copy of another one.
        PoisonError: the object is not an identity.
        OutcomeUnknownError: the store gave no answer several times in a row.
    """
    refuse_copied_store(store, pipeline)
    found = _read_identity_record(store, pipeline) or create_record(
        store,
        BucketLayout(pipeline).identity_key,
        _make_record(store, pipeline, secrets.token_hex(16)),
        partial(OUTCOME_UNKNOWN, cause="no answer several times in a row"),
        partial(IDENTITY_MALFORMED, pipeline=pipeline),
    )
    return found.uid


class _IdentityRecord(BucketRecord):
    model_config = ConfigDict(extra="ignore")

    format_version: int = 1
    pipeline: str = ""
    uid: str
    address: str | None = None  # None: written before addresses were


def _read_identity_record(store: Store, pipeline: str) -> _IdentityRecord | None:
    key = BucketLayout(pipeline).identity_key
    # Never guessed: with a wrong uid a driver would write into the tables of another pipeline.
    malformed = partial(IDENTITY_MALFORMED, pipeline=pipeline)
    return read_document(store, key, _IdentityRecord, malformed)[0]


def _make_record(store: Store, pipeline: str, uid: str) -> _IdentityRecord:
    address = _locate_identity(store, pipeline)
    return _IdentityRecord(pipeline=pipeline, uid=uid, address=address)


def _locate_identity(store: Store, pipeline: str) -> str:
    return store.uri(BucketLayout(pipeline).identity_key)


class ProcessIdentity(BucketRecord):
    """One process of one boot of one host.

    Attributes:
        driver: name of the driver, random unless given.
        boot: the kernel's boot id; after a reboot a pid means nothing.
        namespace: the pid namespace; containers share the boot id, but not the pids.
        start_ticks: start of the process in clock ticks since boot; the kernel reuses pids. 0 if it
            cannot be read.
    """

    driver: str
    host: str
    boot: str
    namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def this_process(cls, driver: str | None = None) -> ProcessIdentity:
        """Describe the calling process; `driver` is a random name unless given."""
        return cls.of_process(os.getpid(), driver)

    @classmethod
    def of_process(cls, pid: int, driver: str | None = None) -> ProcessIdentity:
        """Describe a process of this host and pid namespace."""
        return cls(
            driver=driver or secrets.token_hex(6),
            host=socket.gethostname(),
            boot=read_boot_id(),
            namespace=_read_pid_namespace(),
            pid=pid,
            start_ticks=_read_start_ticks(pid) or 0,
        )

    def is_proven_dead(self) -> bool:
        """Return whether this process certainly no longer runs; False if that is not known.

        Only a process of this host, boot and pid namespace can be proven dead; a zombie is dead.
        """
        here = (self.host, self.boot, self.namespace) == (
            socket.gethostname(),
            read_boot_id(),
            _read_pid_namespace(),
        )
        if not here or not self.boot or not self.namespace:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user runs a process with this pid: compare the start
        ticks = _read_start_ticks(self.pid)
        return ticks is not None and ticks != self.start_ticks


def read_boot_id() -> str:
    """Return the id of this boot of the host; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: no process can be proven dead


def _read_pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read_start_ticks(pid: int) -> int | None:
    """Return the start of a live process; -1 for a zombie, None if it cannot be read."""
    try:
        state, ticks = read_process_stat(pid)
    except OSError:
        return None
    return -1 if state in "ZX" else ticks


def read_process_stat(pid: int) -> tuple[str, int]:
    """Return the state of a process, a letter, and its start in clock ticks since boot.

    It is a zombie, ``Z``, when its last thread has ended. A killed process whose first thread has
    ended may hold files and ports for a moment longer, and is said to run.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    # The second field is the command in parentheses, which may itself contain parentheses.
    fields = text.rpartition(")")[2].split()
    state, threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    return "R" if state == "Z" and threads > 1 else state, start_ticks
