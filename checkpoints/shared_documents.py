"""Small JSON documents that several processes change: read, change, swap by ETag.

Every write raises the document's `revision`. Without it a document that went back to an old content
would have its old ETag again, and a swap that was held up on the network for minutes would still
fit (the ABA trap).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
)
from tidegate.errors import PoisonError, TransientError

_TRIES = 16  # each lost round means that somebody else got through


class SharedDocument(BaseModel):
    """Base of all documents changed by compare-and-swap."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    revision: int = 0

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        return canonical_bytes(self.model_dump(mode="json"))


D = TypeVar("D", bound=SharedDocument)


def read_document(store: Store, key: str, kind: type[D]) -> tuple[D | None, str]:
    """The document and its ETag; (None, "") where there is none."""
    try:
        found = store.get(key)
    except NotFoundError:
        return None, ""
    try:
        return kind.model_validate(parse_json(found.data)), found.etag
    except (ValueError, ValidationError) as error:
        raise PoisonError(
            f"{store.uri(key)} is not a readable {kind.__name__}",
            code="document.malformed",
            advice="look at the object; it is small JSON",
        ) from error


def change_document(store: Store, key: str, empty: D, step: Callable[[D], D]) -> D:
    """Apply `step` to the document until the result lies in the bucket, and return it.

    `step` may be called several times, must not change what it already changed, and may raise to
    refuse. Returning the document as it was means: nothing to do.

    Raises:
        TransientError: too many others were faster, or nobody answered.
    """
    for _ in range(_TRIES):
        before, etag = read_document(store, key, type(empty))
        after = step(before or empty)
        if after == before:
            return after
        after = after.model_copy(update={"revision": (before or empty).revision + 1})
        try:
            _ = (
                store.create(key, after.to_bytes())
                if before is None
                else store.compare_and_swap(key, after.to_bytes(), etag)
            )
        except (PreconditionFailedError, OutcomeUnknownError):
            # Read again: either it arrived, and the step finds nothing to do, or it is tried again.
            continue
        return after
    raise TransientError(
        f"{store.uri(key)} could not be changed", code="document.contended", retry_after=2.0
    )
