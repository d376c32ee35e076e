"""Small JSON documents that several processes change: read, change, swap by ETag.

Every write raises the document's `revision`. Otherwise a document that returned to an old content
would have its old ETag again, and a swap that the network delayed for minutes would still succeed
(the ABA problem).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from tidegate.json_types import JsonObject

from .canonical_json import parse_json
from .errors import DOCUMENT_CONTENDED, DOCUMENT_MALFORMED
from .record_models import BucketRecord
from .store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoredObject,
)

_CREATE_TRIES = 8  # lost answers in a row
_TRIES = 16  # in each lost round another process succeeded


class SharedDocument(BucketRecord):
    """Base of all documents changed by compare-and-swap."""

    format_version: int = 1
    revision: int = 0


D = TypeVar("D", bound=SharedDocument)
R = TypeVar("R", bound=BucketRecord)
T = TypeVar("T")
MakeError = Callable[..., Exception]


def parse_document(
    store: Store,
    stored: StoredObject,
    kind: str,
    build: Callable[[Any], T],
    malformed: MakeError = DOCUMENT_MALFORMED,
) -> T:
    """Return what `build` makes of the JSON in an object.

    Args:
        store: from which it was read.
        stored: the object.
        kind: what the error calls it.
        build: makes the result of the JSON.
        malformed: makes the error of an object that cannot be read from ``uri`` and ``kind``.

    Raises:
        PoisonError: it is damaged, or this version cannot read it.
    """
    try:
        return build(parse_json(stored.data))
    except (ValueError, KeyError, TypeError) as error:
        raise malformed(uri=store.uri(stored.key), kind=kind) from error


def read_document(
    store: Store,
    key: str,
    kind: type[R],
    malformed: MakeError = DOCUMENT_MALFORMED,
) -> tuple[R | None, str]:
    """Return a record and its ETag; (None, "") if there is none.

    Args:
        store: where it lies.
        key: of the record.
        kind: model of the record.
        malformed: as for `parse_document`.

    Raises:
        PoisonError: this version cannot read it.
    """
    try:
        stored = store.get(key)
    except NotFoundError:
        return None, ""
    return parse_document(store, stored, kind.__name__, kind.model_validate, malformed), stored.etag


def read_json_object(store: Store, key: str) -> JsonObject:
    """Return the JSON object under a key of a cache or a report; empty if missing or damaged."""
    try:
        found = parse_json(store.get(key).data)
    except (NotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def create_record(
    store: Store,
    key: str,
    record: R,
    undecided: MakeError,
    malformed: MakeError = DOCUMENT_MALFORMED,
) -> R:
    """Write a record under a new key; if there is one already, return that.

    A lost answer is tried again: the next try writes the record or finds it.

    Args:
        store: where to write it.
        key: of the record.
        record: the record.
        undecided: makes the error from ``uri`` if the store never answers.
        malformed: as for `parse_document`.
    """
    for _ in range(_CREATE_TRIES):
        try:
            store.create(key, record.to_bytes())
            return record
        except (PreconditionFailedError, OutcomeUnknownError):
            there, _ = read_document(store, key, type(record), malformed)
            if there is not None:
                return there
    raise undecided(uri=store.uri(key))


def change_document(store: Store, key: str, empty: D, step: Callable[[D], D]) -> D:
    """Apply `step` to the document until the result is in the bucket, and return the result.

    Nothing is written if `step` returns an equal document.

    Args:
        store: the store.
        key: key of the document.
        empty: the document to begin with, if there is none.
        step: returns the changed document, or the same one if there is nothing to do; it may raise
            to refuse. It is called again when another process was faster.

    Raises:
        TransientError: other processes were faster each time, or the store did not answer.
        PoisonError: this version cannot read the document.
    """
    for _ in range(_TRIES):
        before, etag = read_document(store, key, type(empty))
        after = step(before or empty)
        if after == before:
            return after
        # A raised revision gives a new ETag, so a delayed swap cannot succeed (ABA).
        after = after.model_copy(update={"revision": (before or empty).revision + 1})
        try:
            if before is None:
                store.create(key, after.to_bytes())
            else:
                store.compare_and_swap(key, after.to_bytes(), etag)
        except (PreconditionFailedError, OutcomeUnknownError):
            # If the write arrived, `step` now finds nothing to do; if not, it is tried again.
            continue
        return after
    raise DOCUMENT_CONTENDED(uri=store.uri(key))
