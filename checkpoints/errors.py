"""Error catalogue of the bucket: stores, the log, checkpoints, the lease and requests."""

from __future__ import annotations

from typing import Final

from tidegate.errors import (
    ConfigurationError,
    ErrorDefinition,
    PoisonError,
    TransientError,
)

_SEALED: Final = "everything sealed so far"
_SEE_CHECKPOINTS: Final = "list the ids with: tidegate checkpoints list"

# Stores


class NotFoundError(PoisonError):
    """There is no such object, and the store is otherwise well: definite evidence."""


class PreconditionFailedError(TransientError):
    """A conditional write did not happen: another version is there. Read again before deciding."""


class OutcomeUnknownError(TransientError):
    """A write has no answer: it may have happened, or may still happen. Read before acting."""


class StoreUnavailableError(TransientError):
    """The store cannot be reached or is busy. This says nothing about any object."""


class StoreDeniedError(ConfigurationError):
    """The store refuses these credentials, or the bucket is missing.

    This says nothing about any object.
    """


OBJECT_NOT_FOUND: Final = ErrorDefinition(
    "store.not_found",
    NotFoundError,
    "{uri} does not exist",
    advice="check with: tidegate checkpoints verify",
)
PRECONDITION_FAILED: Final = ErrorDefinition(
    "store.precondition_failed",
    PreconditionFailedError,
    "{uri} was not written: expected {expected}, found {found}",
)
OUTCOME_UNKNOWN: Final = ErrorDefinition(
    "store.outcome_unknown",
    OutcomeUnknownError,
    "no answer to the write of {uri} ({cause})",
    retry_after=1.0,
)
STORE_UNAVAILABLE: Final = ErrorDefinition(
    "store.unavailable",
    StoreUnavailableError,
    "{uri} could not be reached ({cause})",
    kept=_SEALED,
    advice="check that the store runs and that the endpoint is right; tidegate tries again by"
    " itself",
    retry_after=2.0,
)
STORE_FULL: Final = ErrorDefinition(
    "store.full",
    StoreUnavailableError,
    "{uri} could not be written: the store's disk is full ({cause})",
    kept=_SEALED,
    advice="make room on that disk, or enlarge it; tidegate tries again by itself",
    retry_after=2.0,
)
BUCKET_DENIED: Final = ErrorDefinition(
    "store.denied",
    StoreDeniedError,
    "{location} refuses: {cause}",
    kept="everything in the bucket",
    advice="check TIDEGATE_S3_ENDPOINT, TIDEGATE_S3_ACCESS_KEY, TIDEGATE_S3_SECRET_KEY, the region"
    " and the bucket's name",
)
FOLDER_DENIED: Final = ErrorDefinition(
    "store.denied",
    ConfigurationError,
    "{path} cannot be used as a store: {cause}",
    advice="give a folder this user may write to",
)
NETWORK_FILE_SYSTEM: Final = ErrorDefinition(
    "store.network_file_system",
    ConfigurationError,
    "{path} lies on a network file system ({kind}), where conditional writes cannot be trusted",
    advice="use a local disk, or an S3 store: s3://bucket/prefix",
)
BAD_STORE_URL: Final = ErrorDefinition(
    "store.bad_url",
    ConfigurationError,
    "{url!r} is not the address of a store",
    advice="use s3://bucket/prefix, file:///path, or a plain path",
)
STORE_DISHONEST: Final = ErrorDefinition(
    "store.dishonest",
    ConfigurationError,
    "{url} does not keep its promises on conditional writes: {broken}",
    advice="use a server that honours If-None-Match and If-Match on PUT (AWS S3, MinIO,"
    " versitygw), or a local folder",
)

# Names, documents and records

BAD_NAME: Final = ErrorDefinition(
    "layout.bad_name",
    ConfigurationError,
    "{text!r} cannot be a {what}: letters, digits and _.- only, starting with a letter or digit",
    advice="choose another {what}",
)
BAD_CHECKPOINT_ID: Final = ErrorDefinition(
    "checkpoint.bad_id",
    ConfigurationError,
    "{text!r} is not a checkpoint id; ids look like t0-000123-ab12cd",
    advice=_SEE_CHECKPOINTS,
)
DOCUMENT_MALFORMED: Final = ErrorDefinition(
    "document.malformed",
    PoisonError,
    "{uri} is not a readable {kind}",
    advice="look at the object; it is small JSON",
)
DOCUMENT_CONTENDED: Final = ErrorDefinition(
    "document.contended", TransientError, "{uri} could not be changed", retry_after=2.0
)

# Requests to a driver

REQUEST_MALFORMED: Final = ErrorDefinition(
    "request.malformed",
    PoisonError,
    "{uri} is not a readable {kind}",
    advice="delete the object and ask again",
)
REQUEST_UNDECIDED: Final = ErrorDefinition(
    "request.undecided", TransientError, "{uri} could not be written", retry_after=2.0
)
