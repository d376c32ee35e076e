"""A pipeline's identity: a random uid, put once.

It guards against two buckets, or two pipelines, being taken for one.

It says where it lies, too: in a copy of the store it still names the original's place, and so does
the metadata of the tables. Who drives a copy as if it were the original would write into the
original's tables.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.errors import OUTCOME_UNKNOWN
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
)
from tidegate.errors import ConfigurationError, PoisonError

_TRIES = 5  # lost answers in a row before giving the store up as ill


def read_identity(store: Store, pipeline: str) -> str | None:
    """The pipeline's uid, or None where the pipeline has never run.

    Also in a copy, which may be looked at.
    """
    found = _read_identity_record(store, pipeline)
    return found.uid if found else None


def refuse_copied_store(store: Store, pipeline: str) -> None:
    """Refuse to write for a pipeline whose store was copied from elsewhere.

    Nothing to refuse before it has run.

    Raises:
        ConfigurationError: it is a copy.
    """
    found = _read_identity_record(store, pipeline)
    if found is not None and found.address not in (None, _locate_identity(store, pipeline)):
        raise ConfigurationError(
            f"{_locate_identity(store, pipeline)} is a copy of {found.address}: driven from here,"
            f" {pipeline} would write into the tables of the original",
            code="identity.copied",
            pipeline=pipeline,
            kept="both; nothing was changed",
            advice=(
                "put the copy back in the place it came from, or make it a pipeline of its own: "
                f"tidegate checkpoints adopt {pipeline}"
            ),
        )


def rewrite_identity(store: Store, pipeline: str) -> str:
    """Give a copy a uid and an address of its own.

    Whoever knew the old uid refuses it from now on.
    """
    found, uid = store.get(BucketLayout(pipeline).identity_key), secrets.token_hex(16)
    store.compare_and_swap(found.key, _encode_identity(store, pipeline, uid), found.etag)
    return uid


def ensure_identity(store: Store, pipeline: str, uid: str | None = None) -> str:
    """The pipeline's uid, put there if there is none yet.

    Of several first starters all get the same one.

    Raises:
        ConfigurationError: the store is a copy of another one.
    """
    refuse_copied_store(store, pipeline)
    wanted = uid or secrets.token_hex(16)
    for _ in range(_TRIES):
        found = read_identity(store, pipeline)
        if found is not None:
            return found
        try:
            store.create(
                BucketLayout(pipeline).identity_key, _encode_identity(store, pipeline, wanted)
            )
        except (PreconditionFailedError, OutcomeUnknownError):
            continue  # decided by what lies there
        return wanted
    raise OUTCOME_UNKNOWN(
        uri=store.uri(BucketLayout(pipeline).identity_key), cause="no answer several times in a row"
    )


def require_identity(store: Store, pipeline: str, uid: str) -> None:
    """Refuse to continue if the bucket holds another pipeline than the tables, ledger or spec.

    Raises:
        ConfigurationError: the uids differ, or the bucket has none (it was wiped while something
            else survived).
    """
    found = read_identity(store, pipeline)
    if found != uid:
        raise ConfigurationError(
            f"{store.uri(BucketLayout(pipeline).identity_key)} says {found or 'nothing'}, but {uid}"
            " was expected",
            code="identity.mismatch",
            pipeline=pipeline,
            kept="everything on both sides; nothing was changed",
            advice="point the pipeline at its own bucket, or give it a new name",
        )


class _IdentityRecord(NamedTuple):
    uid: str
    address: str | None  # None: written before addresses were


def _read_identity_record(store: Store, pipeline: str) -> _IdentityRecord | None:
    try:
        found = store.get(BucketLayout(pipeline).identity_key)
    except NotFoundError:
        return None
    try:
        said = parse_json(found.data)
        return _IdentityRecord(str(said["uid"]), said.get("address"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PoisonError(
            f"{store.uri(found.key)} is not an identity",
            code="identity.malformed",
            pipeline=pipeline,
        ) from error


def _encode_identity(store: Store, pipeline: str, uid: str) -> bytes:
    return canonical_bytes(
        {
            "format_version": 1,
            "pipeline": pipeline,
            "uid": uid,
            "address": _locate_identity(store, pipeline),
        }
    )


def _locate_identity(store: Store, pipeline: str) -> str:
    return store.uri(BucketLayout(pipeline).identity_key)
