"""A pipeline's identity: a random uid, put once. It guards against two buckets, or two pipelines, being taken for one."""

from __future__ import annotations

import secrets

from tidegate.checkpoints.canonical import canonical_bytes, parse_json
from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.store import NotFoundError, OutcomeUnknownError, PreconditionFailedError, Store
from tidegate.jobs.spec.errors import ConfigurationError, PoisonError

__all__ = ["ensure_identity", "read_identity", "require_identity"]

_TRIES = 5  # lost answers in a row before giving the store up as ill


def read_identity(store: Store, pipeline: str) -> str | None:
    """The pipeline's uid, or None where the pipeline has never run."""
    try:
        found = store.get(Layout(pipeline).identity)
    except NotFoundError:
        return None
    try:
        return str(parse_json(found.data)["uid"])
    except (ValueError, KeyError, TypeError) as error:
        raise PoisonError(f"{store.uri(found.key)} is not an identity", code="identity.malformed", pipeline=pipeline) from error


def ensure_identity(store: Store, pipeline: str, uid: str | None = None) -> str:
    """The pipeline's uid, put there if there is none yet. Of several first starters all get the same one."""
    wanted = uid or secrets.token_hex(16)
    for _ in range(_TRIES):
        found = read_identity(store, pipeline)
        if found is not None:
            return found
        try:
            store.create(Layout(pipeline).identity, canonical_bytes({"format_version": 1, "pipeline": pipeline, "uid": wanted}))
        except (PreconditionFailedError, OutcomeUnknownError):
            continue  # decided by what lies there
        return wanted
    raise OutcomeUnknownError.at(store.uri(Layout(pipeline).identity), "no answer several times in a row")


def require_identity(store: Store, pipeline: str, uid: str) -> None:
    """Refuse to go on when the bucket holds another pipeline than the caller's tables, ledger or spec name.

    Raises:
        ConfigurationError: the uids differ, or the bucket has none (it was wiped while something else survived).
    """
    found = read_identity(store, pipeline)
    if found != uid:
        raise ConfigurationError(
            f"{store.uri(Layout(pipeline).identity)} says {found or 'nothing'}, but {uid} was expected",
            code="identity.mismatch",
            pipeline=pipeline,
            kept="everything on both sides; nothing was changed",
            advice="point the pipeline at its own bucket, or give it a new name",
        )
