"""Verifies that a checkpoint is whole.

Every object it needs exists with the recorded size and checksum, and the chain of hashes is intact.

Only definite evidence condemns: an object that is missing while the store lists and answers, a
wrong size, a wrong checksum, a record whose hash is not the one its successor names. Time-outs, 403
and 503, a file that this user may not read, and a record of a newer tidegate are evidence of
nothing, and make a result *unknown*. A record is judged by its own bytes,
so a later epoch that verifies by itself stays usable after a damaged one.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigurationError, PoisonError, TidegateError, TransientError

from .bucket_layout import CheckpointId
from .canonical_json import sha256_of_file
from .manifest import FileRef, Manifest, RetiredEpoch
from .pins import RootsFile
from .record_models import FrozenModel
from .slot_index import SlotIndex
from .slot_log import SlotContents, SlotLog
from .store import NotFoundError, Store, StoreDeniedError, map_in_threads

SCRUB_EVERY = 24 * 3_600_000_000  # ticks
_MOST_SHARES = 7  # a checkpoint that is kept for long is read again every week
VERIFY_WORKERS = 8
# 403, a record of a newer tidegate, and a local file that cannot be read are among them.
_NO_EVIDENCE = (TransientError, ConfigurationError, OSError)

DeepCheck = Callable[[Manifest], Sequence["VerificationFinding"]]
"""Re-reads the files of a manifest and recounts rows; made where Parquet can be read."""


class ObjectProblem(StrEnum):
    """What is wrong with one object."""

    MISSING = "missing"
    SIZE = "size"
    CHECKSUM = "checksum"
    # The next record names other bytes than lie in this slot, or the slot holds another checkpoint.
    CHAIN = "chain"
    UNREADABLE = "unreadable"  # the record in the slot cannot be read
    CONTENT = "content"  # found by the deep check
    UNKNOWN = "unknown"  # the store did not answer, or refused: evidence of nothing


class CheckpointVerdict(StrEnum):
    """The verdict on a checkpoint, from all findings."""

    HEALTHY = "healthy"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    RETIRED = "retired"


class VerificationFinding(FrozenModel):
    """One problem with one object."""

    key: str
    problem: ObjectProblem
    detail: str

    @property
    def is_definite(self) -> bool:
        """Whether it is evidence against the checkpoint."""
        return self.problem is not ObjectProblem.UNKNOWN


class Verification(FrozenModel):
    """The result for one checkpoint.

    Attributes:
        objects: objects that it needs, the record in the slot included; those not read too.
        bytes: of its files, as recorded.
        checksums: whether checksums were compared.
        deep: whether a deep check was asked for; it is left out if the files are not good.
    """

    checkpoint: str
    verdict: CheckpointVerdict
    findings: tuple[VerificationFinding, ...]
    objects: int = 1
    bytes: int = 0
    checksums: bool = False
    deep: bool = False

    @property
    def evidence(self) -> VerificationFinding | None:
        """The first finding that condemns the checkpoint; None if there is none."""
        return next((finding for finding in self.findings if finding.is_definite), None)


def verify_checkpoint(
    log: SlotLog,
    checkpoint: CheckpointId,
    *,
    checksums: bool = True,
    deep: DeepCheck | None = None,
    workers: int = VERIFY_WORKERS,
    known_good: set[str] | None = None,
) -> Verification:
    """Check one checkpoint; change nothing. Missing, damaged and unreachable objects are findings.

    Damage is looked at twice: retention may have retired the checkpoint and deleted its files
    while this process, perhaps asleep, looked for them. A stub is in the slot before a file goes.

    Listings show presence and size of many objects in a few requests. An object that a listing does
    not show as expected is asked for by itself, and only that answer condemns. What could not be
    found out is a finding of kind `unknown`, so that one such checkpoint does not end a scrub.

    Args:
        log: the pipeline's log.
        checkpoint: what to check.
        checksums: read every file and compare its checksum; otherwise check presence and size only.
        deep: also checks the rows in the files (`make_content_check`).
        workers: files that are read at the same time.
        known_good: keys of files that need not be read again; files found to be good are added.
    """
    known_good = set() if known_good is None else known_good
    result = _verify_once(log, checkpoint, checksums, deep, workers, known_good)
    if result.verdict is not CheckpointVerdict.DAMAGED:
        return result
    return _verify_once(log, checkpoint, checksums, deep, workers, known_good)


def _verify_once(
    log: SlotLog,
    checkpoint: CheckpointId,
    checksums: bool,
    deep: DeepCheck | None,
    workers: int,
    known_good: set[str],
) -> Verification:
    slots = _read_record_and_successor(log, checkpoint)
    if isinstance(slots, VerificationFinding):
        return _build_verification(checkpoint, [slots])
    filled, successor = slots
    key = log.layout.slot_key(checkpoint.timeline, checkpoint.slot)
    if filled is None:
        return _build_verification(checkpoint, [_confirm_missing(log.store, key)])
    if isinstance(filled.record, RetiredEpoch):
        return Verification(
            checkpoint=str(checkpoint), verdict=CheckpointVerdict.RETIRED, findings=()
        )
    if not isinstance(filled.record, Manifest) or filled.record.id != checkpoint:
        holds = filled.record.id if isinstance(filled.record, Manifest) else "a fork"
        found = _make_finding(key, ObjectProblem.CHAIN, f"holds {holds}")
        return _build_verification(checkpoint, [found])
    manifest, findings = filled.record, list[VerificationFinding]()
    if successor is not None and successor.record.parent_sha256 != filled.sha256:
        named = f"slot {successor.record.slot} names {successor.record.parent_sha256}"
        detail = f"has {filled.sha256}, but {named}"
        findings.append(_make_finding(key, ObjectProblem.CHAIN, detail))
    # A file may be named more than once, and is read once.
    files = [*{file.key: file for file in manifest.all_files()}.values()]
    unread = [file for file in files if file.key not in known_good]
    findings += _check_files(log.store, unread, checksums, workers)
    # Shared by a scrub: the next checkpoints name most of the same files.
    known_good |= {file.key for file in unread} - {finding.key for finding in findings}
    # Rows of files that are damaged or missing cannot be counted.
    if deep is not None and not findings:
        findings += deep(manifest)
    return _build_verification(
        checkpoint,
        findings,
        objects=1 + len(files),
        bytes=sum(file.bytes for file in files),
        checksums=checksums,
        deep=deep is not None,
    )


def scrub_checkpoints(
    log: SlotLog,
    checkpoints: Iterable[CheckpointId],
    *,
    checksums: bool = True,
    deep: DeepCheck | None = None,
    workers: int = VERIFY_WORKERS,
) -> Iterator[Verification]:
    """Verify checkpoints one at a time, so that the caller can show progress, stop and continue.

    A file that several checkpoints name is read once if it is good. Condemns nothing, see
    `condemn_if_damaged`.
    """
    known_good: set[str] = set()
    for checkpoint in checkpoints:
        yield verify_checkpoint(
            log, checkpoint, checksums=checksums, deep=deep, workers=workers, known_good=known_good
        )


def count_scrub_shares(retain_for: int) -> int:
    """Return in how many daily scrubs every checkpoint is read once: 1 to 7.

    Args:
        retain_for: ticks for which every checkpoint is kept. None may retire unread.
    """
    return max(1, min(_MOST_SHARES, retain_for // SCRUB_EVERY))


def select_for_scrub(log: SlotLog, shares: int, day: int) -> Iterator[CheckpointId]:
    """Yield the newest checkpoint, those pinned or claimed, and a share of the others.

    Condemned and retired checkpoints are left out; abandoned timelines are not.

    Args:
        log: the pipeline's log.
        shares: in how many days every checkpoint comes once, see `count_scrub_shares`.
        day: days since 1970, UTC, for driver and Airflow alike: the slots that leave the same rest
            when divided by `shares` are due.
    """
    roots, head = RootsFile(log.store, log.pipeline).read(), log.head()
    always = roots.protected_checkpoints | {str(head.checkpoint)}
    index = SlotIndex(log, workers=2)
    for timeline in range(head.timeline + 1):
        for row in index.iterate_retained(timeline):
            if row.kind != "epoch" or row.id is None or row.id in roots.condemned:
                continue
            if row.id in always or row.slot % shares == day % shares:
                yield CheckpointId.parse(row.id)


def is_scrub_due(log: SlotLog, now: int) -> bool:
    """Return whether the last scrub was noted a day or more ago, or never; `now` in ticks."""
    try:
        return now - int(log.store.get(_scrub_key(log)).data) >= SCRUB_EVERY
    except (NotFoundError, ValueError):
        return True


def note_scrub(log: SlotLog, now: int) -> None:
    """Note that a scrub ended at `now` (ticks), so that driver and Airflow do not both scrub."""
    log.store.put(_scrub_key(log), str(now).encode())


def _scrub_key(log: SlotLog) -> str:
    return log.layout.index_page_key("scrubbed")


def condemn_if_damaged(log: SlotLog, result: Verification) -> bool:
    """Record a damaged checkpoint in `roots.json`, so that it cannot be restored.

    Return whether it is damaged. Every other verdict changes nothing.
    """
    first = result.evidence
    if result.verdict is not CheckpointVerdict.DAMAGED or first is None:
        return False
    roots = RootsFile(log.store, log.pipeline)
    roots.condemn_damaged(
        CheckpointId.parse(result.checkpoint), f"{first.problem}: {first.key} {first.detail}"
    )
    return True


def condemn_with_ancestors(log: SlotLog, result: Verification) -> None:
    """Condemn a damaged checkpoint, and those before it that need one of its damaged files.

    Changes nothing if the verdict is another one.
    """
    if not condemn_if_damaged(log, result):
        return
    before = log.iterate_ancestors(CheckpointId.parse(result.checkpoint))
    for filled in islice(before, 1, None):
        record = filled.record
        if not isinstance(record, Manifest):
            return
        needed = {file.key for file in record.all_files()}
        findings = tuple(f for f in result.findings if f.is_definite and f.key in needed)
        if not findings:  # a segment lives in consecutive epochs
            return
        condemn_if_damaged(
            log, result.model_copy(update={"checkpoint": str(record.id), "findings": findings})
        )


def _read_record_and_successor(
    log: SlotLog, checkpoint: CheckpointId
) -> tuple[SlotContents | None, SlotContents | None] | VerificationFinding:
    """Read two slots; if one cannot be read, return what that says about the first."""
    key = log.layout.slot_key(checkpoint.timeline, checkpoint.slot)
    # A successor that cannot be parsed is not evidence against this record.
    problem, whose = ObjectProblem.UNREADABLE, ""
    try:
        filled = log.read_slot(checkpoint.timeline, checkpoint.slot)
        problem, whose = ObjectProblem.UNKNOWN, "its successor: "
        return filled, log.read_slot(checkpoint.timeline, checkpoint.slot + 1)
    except _NO_EVIDENCE as error:
        return _make_finding(key, ObjectProblem.UNKNOWN, _describe_error(error))
    except PoisonError as error:
        return _make_finding(key, problem, whose + error.message)


def _check_files(
    store: Store, files: list[FileRef], checksums: bool, workers: int
) -> list[VerificationFinding]:
    doubtful = files if checksums else _select_doubtful_files(store, files)
    findings = map_in_threads(lambda file: _check_file(store, file, checksums), doubtful, workers)
    return [found for found in findings if found]


def _describe_error(error: Exception) -> str:
    return error.message if isinstance(error, TidegateError) else str(error)


def _make_finding(key: str, problem: ObjectProblem, detail: str) -> VerificationFinding:
    return VerificationFinding(key=key, problem=problem, detail=detail)


def _select_doubtful_files(store: Store, files: list[FileRef]) -> list[FileRef]:
    """Files that no listing shows with the right size.

    A local store needs none: asking for a file's size costs no request.
    """
    listed = list_object_sizes(
        store, [file.key for file in files if store.local_path(file.key) is None]
    )
    return [file for file in files if listed.get(file.key) != file.bytes]


def _check_file(store: Store, file: FileRef, checksums: bool) -> VerificationFinding | None:
    try:
        # The size first: it costs one request, while the checksum reads the whole file.
        size = _read_object_size(store, file.key)
        if size is None:
            return _confirm_missing(store, file.key)
        if size != file.bytes:
            return _make_finding(
                file.key, ObjectProblem.SIZE, f"has {size} bytes instead of {file.bytes}"
            )
        found, expected = _read_digest(store, file) if checksums else ("", "")
    except (NotFoundError, FileNotFoundError):  # the latter: deleted since its size was read
        return _confirm_missing(store, file.key)
    except _NO_EVIDENCE as error:
        return _make_finding(file.key, ObjectProblem.UNKNOWN, _describe_error(error))
    if found != expected:
        return _make_finding(file.key, ObjectProblem.CHECKSUM, f"is {found} instead of {expected}")
    return None


def _read_digest(store: Store, file: FileRef) -> tuple[str, str]:
    """Return what identifies the bytes of an object, as they are and as they should be.

    Of a copy that the server has made, whose bytes no process has read, this is the ETag.
    """
    if file.sha256:
        return _compute_object_digest(store, file.key), file.sha256
    info = store.stat(file.key)
    return info.etag if info else "nothing", file.extra["etag"]


def _read_object_size(store: Store, key: str) -> int | None:
    path = store.local_path(key)
    if path is not None:  # the local store's `head` would read the whole file for its ETag
        return path.stat().st_size if path.is_file() else None
    found = store.stat(key)
    return None if found is None else found.size


def _compute_object_digest(store: Store, key: str) -> str:
    path = store.local_path(key)
    if path is not None and path.is_file():
        return sha256_of_file(path)
    with tempfile.TemporaryDirectory(prefix="tidegate-verify-") as folder:
        copy = Path(folder) / "object"
        store.download(key, copy)
        return sha256_of_file(copy)


def _confirm_missing(store: Store, key: str) -> VerificationFinding:
    """A 404 counts only while the store lists well and does not list the object either."""
    try:
        # A wrong answer of one server must not condemn a checkpoint, so a second request confirms
        # it.
        listed = any(entry.key == key for entry in store.list_objects(key, limit=1))
    except _NO_EVIDENCE as error:
        return _make_finding(
            key, ObjectProblem.UNKNOWN, f"not found, but listing fails: {_describe_error(error)}"
        )
    if listed:
        return _make_finding(key, ObjectProblem.UNKNOWN, "not found, but listed")
    return _make_finding(key, ObjectProblem.MISSING, "does not exist")


def _build_verification(
    checkpoint: CheckpointId, findings: list[VerificationFinding], **facts: Any
) -> Verification:
    verdict = CheckpointVerdict.UNKNOWN if findings else CheckpointVerdict.HEALTHY
    if any(finding.is_definite for finding in findings):
        verdict = CheckpointVerdict.DAMAGED
    return Verification(
        checkpoint=str(checkpoint), verdict=verdict, findings=tuple(findings), **facts
    )


# Presence and sizes of many objects at the price of a few listings.
#
# A checkpoint with a gigabyte of state names more than a hundred segments; asking for each by
# itself would make recovery grow with the state. Segments lie side by side below one `state/`
# prefix per timeline, so pages of it show them with their sizes.
#
# What a listing shows is there. What it does not show was not looked for, or was not seen: a
# listing condemns nothing; the caller asks for that object by itself.

_KEYS_PER_PAGE = 500  # keys in one request
# Wanted objects below which a page costs more than asking for each: a page of 500 takes a MinIO
# some 15 HEADs.
_MIN_WANTED_KEYS = 10


def list_object_sizes(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """Return key -> size of the objects that listings showed.

    A key can be missing although its object exists: where listing failed, or where single requests
    for the objects are cheaper.
    """
    found: dict[str, int] = {}
    for prefix, group in groupby(sorted(keys), key=_find_scan_prefix):
        try:
            for sizes in _scan_listing_pages(store, prefix, [*group]):
                found |= sizes
        except (TransientError, StoreDeniedError):
            return found
    return found


def _scan_listing_pages(store: Store, prefix: str, wanted: list[str]) -> Iterator[dict[str, int]]:
    """What each page shows of the wanted keys.

    Stops when pages show so few of them that they are not worth it.
    """
    while len(wanted) >= _MIN_WANTED_KEYS:
        # A listing starts after the key it is given, so it is given the key just before.
        page = {
            entry.key: entry.size
            for entry in store.list_objects(
                prefix, start_after=wanted[0][:-1], limit=_KEYS_PER_PAGE
            )
        }
        shown = {key: page[key] for key in wanted if key in page}
        yield shown
        # The listing has ended, or most of the page was not wanted: then single requests are
        # cheaper.
        if len(page) < _KEYS_PER_PAGE or len(shown) < _MIN_WANTED_KEYS:
            return
        end = max(page)
        wanted = [key for key in wanted if key > end]


def _find_scan_prefix(key: str) -> str:
    """The folder in which the attempts' folders lie side by side.

    `.../state/` or `.../tables/<table>/`.
    """
    head, found, _ = key.partition("/state/")
    return head + found if found else key.rsplit("/", 2)[0] + "/"
