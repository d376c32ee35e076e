"""Is a checkpoint whole? Presence, size and checksum of every object it needs, and its place in the chain.

Only definite evidence condemns: an object that is missing while the store lists and answers, a wrong size, a wrong checksum, a
record whose hash is not the one its successor names. Time-outs, 403 and 503 are evidence of nothing, and make a result *unknown*.
A record is judged by its own bytes, so a later epoch that verifies by itself stays usable after a damaged one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.canonical import sha256_of_file
from tidegate.checkpoints.layout import CheckpointId
from tidegate.checkpoints.log import Filled, SlotLog
from tidegate.checkpoints.manifest import FileRef, Manifest, Stub
from tidegate.checkpoints.presence import listed_sizes
from tidegate.checkpoints.roots import RootsFile
from tidegate.checkpoints.store import NotFoundError, Store, StoreDeniedError
from tidegate.jobs.spec.errors import PoisonError, TransientError

__all__ = ["Deep", "Finding", "Problem", "Verdict", "Verification", "condemn", "scrub", "verify"]

WORKERS = 8

Deep = Callable[[Manifest], Sequence["Finding"]]
"""Re-reads the segments of a manifest and recounts; belongs to whoever can read Parquet."""


class Problem(StrEnum):
    """What is wrong with one object."""

    MISSING = "missing"
    SIZE = "size"
    CHECKSUM = "checksum"
    CHAIN = "chain"  # the next record names other bytes than lie in this slot
    UNREADABLE = "unreadable"  # the record in the slot is no record
    CONTENT = "content"  # found by the deep check
    UNKNOWN = "unknown"  # the store did not answer, or refused: evidence of nothing


class Verdict(StrEnum):
    """What the findings add up to."""

    HEALTHY = "healthy"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    RETIRED = "retired"


class Finding(BaseModel):
    """One problem with one object."""

    model_config = ConfigDict(frozen=True)

    key: str
    problem: Problem
    detail: str


class Verification(BaseModel):
    """The result for one checkpoint."""

    model_config = ConfigDict(frozen=True)

    checkpoint: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    objects: int
    bytes: int
    checksums: bool
    deep: bool


def verify(
    log: SlotLog, checkpoint: CheckpointId, *, checksums: bool = True, deep: Deep | None = None, workers: int = WORKERS
) -> Verification:
    """Check one checkpoint. Without `checksums` only presence and size of the objects are looked at.

    Listings show both, in a few requests however many objects there are; what they do not show as it should be is asked for by
    itself, and only that answer condemns.

    Never raises for the state of the bucket: what could not be found out is a finding of kind `unknown`.
    """
    key = log.layout.slot(checkpoint.timeline, checkpoint.slot)
    try:
        filled = log.read(checkpoint.timeline, checkpoint.slot)
        successor = log.read(checkpoint.timeline, checkpoint.slot + 1)
    except (TransientError, StoreDeniedError) as error:
        return _result(checkpoint, [Finding(key=key, problem=Problem.UNKNOWN, detail=error.message)])
    except PoisonError as error:
        return _after_unreadable(log, checkpoint, key, error)
    if filled is None:
        return _result(checkpoint, [_missing(log.store, key)])
    if isinstance(filled.record, Stub):
        return _result(checkpoint, [], verdict=Verdict.RETIRED)
    return _verify_epoch(log, checkpoint, filled, successor, checksums, deep, workers)


def scrub(
    log: SlotLog, checkpoints: Iterable[CheckpointId], *, checksums: bool = True, deep: Deep | None = None, workers: int = WORKERS
) -> Iterator[Verification]:
    """Verify many checkpoints, one result at a time, so that the caller can show progress, stop, and go on later."""
    for checkpoint in checkpoints:
        yield verify(log, checkpoint, checksums=checksums, deep=deep, workers=workers)


def condemn(log: SlotLog, result: Verification) -> bool:
    """Note a damaged checkpoint in `roots.json`, so that nobody restores it. False, and nothing noted, for any other verdict."""
    if result.verdict is not Verdict.DAMAGED:
        return False
    first = next(f for f in result.findings if f.problem is not Problem.UNKNOWN)
    roots = RootsFile(log.store, log.pipeline)
    roots.condemn_damaged(CheckpointId.parse(result.checkpoint), f"{first.problem}: {first.key} {first.detail}")
    return True


def _verify_epoch(
    log: SlotLog,
    checkpoint: CheckpointId,
    filled: Filled,
    successor: Filled | None,
    checksums: bool,
    deep: Deep | None,
    workers: int,
) -> Verification:
    manifest = filled.record
    if not isinstance(manifest, Manifest) or manifest.id != checkpoint:
        detail = f"holds {manifest.id if isinstance(manifest, Manifest) else 'a fork'}"
        return _result(checkpoint, [Finding(key=filled.key, problem=Problem.CHAIN, detail=detail)])
    findings = [*_chain(filled, successor)]
    files = [*{file.key: file for file in manifest.all_files()}.values()]
    doubtful = files if checksums else _doubtful(log.store, files)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        findings += [found for found in pool.map(lambda file: _file(log.store, file, checksums), doubtful) if found]
    if deep is not None and not findings:
        findings += deep(manifest)
    size = sum(file.bytes for file in files)
    return _result(checkpoint, findings, objects=1 + len(files), size=size, checksums=checksums, deep=deep is not None)


def _after_unreadable(log: SlotLog, checkpoint: CheckpointId, key: str, error: PoisonError) -> Verification:
    """One of the two records cannot be parsed: find out which. A broken successor is no evidence against this one."""
    try:
        log.read(checkpoint.timeline, checkpoint.slot)
    except PoisonError:
        return _result(checkpoint, [Finding(key=key, problem=Problem.UNREADABLE, detail=error.message)])
    return _result(checkpoint, [Finding(key=key, problem=Problem.UNKNOWN, detail=f"its successor: {error.message}")])


def _chain(filled: Filled, successor: Filled | None) -> Iterator[Finding]:
    if successor is not None and successor.record.parent_sha256 != filled.sha256:
        detail = f"has {filled.sha256}, but slot {successor.record.slot} names {successor.record.parent_sha256}"
        yield Finding(key=filled.key, problem=Problem.CHAIN, detail=detail)


def _doubtful(store: Store, files: list[FileRef]) -> list[FileRef]:
    """Files that no listing shows with the right size. A local store needs none: asking for a file's size is no request."""
    listed = listed_sizes(store, [file.key for file in files if store.local_path(file.key) is None])
    return [file for file in files if listed.get(file.key) != file.bytes]


def _file(store: Store, file: FileRef, checksums: bool) -> Finding | None:
    try:
        size = _size(store, file.key)
        if size is None:
            return _missing(store, file.key)
        if size != file.bytes:
            return Finding(key=file.key, problem=Problem.SIZE, detail=f"has {size} bytes instead of {file.bytes}")
        digest = _digest(store, file.key) if checksums else file.sha256
    except NotFoundError:
        return _missing(store, file.key)
    except (TransientError, StoreDeniedError) as error:
        return Finding(key=file.key, problem=Problem.UNKNOWN, detail=error.message)
    if digest != file.sha256:
        return Finding(key=file.key, problem=Problem.CHECKSUM, detail=f"is {digest} instead of {file.sha256}")
    return None


def _size(store: Store, key: str) -> int | None:
    path = store.local_path(key)
    if path is not None:  # the local store's `head` would read the whole file for its ETag
        return path.stat().st_size if path.is_file() else None
    found = store.head(key)
    return None if found is None else found.size


def _digest(store: Store, key: str) -> str:
    path = store.local_path(key)
    if path is not None and path.is_file():
        return sha256_of_file(path)
    with tempfile.TemporaryDirectory(prefix="tidegate-verify-") as folder:
        copy = Path(folder) / "object"
        store.download(key, copy)
        return sha256_of_file(copy)


def _missing(store: Store, key: str) -> Finding:
    """A 404 counts only while the store lists well and does not list the object either."""
    try:
        listed = any(entry.key == key for entry in store.list(key, limit=1))
    except (TransientError, StoreDeniedError) as error:
        return Finding(key=key, problem=Problem.UNKNOWN, detail=f"not found, but listing fails: {error.message}")
    if listed:
        return Finding(key=key, problem=Problem.UNKNOWN, detail="not found, but listed")
    return Finding(key=key, problem=Problem.MISSING, detail="does not exist")


def _result(
    checkpoint: CheckpointId,
    findings: list[Finding],
    *,
    verdict: Verdict | None = None,
    objects: int = 1,
    size: int = 0,
    checksums: bool = False,
    deep: bool = False,
) -> Verification:
    return Verification(
        checkpoint=str(checkpoint),
        verdict=verdict or _verdict(findings),
        findings=tuple(findings),
        objects=objects,
        bytes=size,
        checksums=checksums,
        deep=deep,
    )


def _verdict(findings: list[Finding]) -> Verdict:
    if not findings:
        return Verdict.HEALTHY
    definite = any(finding.problem is not Problem.UNKNOWN for finding in findings)
    return Verdict.DAMAGED if definite else Verdict.UNKNOWN
