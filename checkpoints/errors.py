"""Error catalogue of the bucket: stores, the log, checkpoints, the lease and requests."""

from __future__ import annotations

from typing import Final

from tidegate.errors import (
    ConfigurationError,
    ErrorDefinition,
    FencedError,
    PoisonError,
    TransientError,
)

_SEALED: Final = "everything sealed so far"
_SEE_CHECKPOINTS: Final = "list the ids with: tidegate checkpoints list"

# Stores


class NotFoundError(PoisonError):
    """There is no such object, and the store answers: definite evidence."""


class PreconditionFailedError(TransientError):
    """A conditional write did not happen: another version or no object is there.

    Read again before deciding.
    """


class OutcomeUnknownError(TransientError):
    """A write has no answer: it may have happened, or may still happen. Read before acting."""


class StoreUnavailableError(TransientError):
    """The store cannot be reached or is busy. This says nothing about any object."""


class StoreDeniedError(ConfigurationError):
    """The bucket is missing, refuses the request or its credentials, or the clocks differ too much.

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
KEYS_EXPIRED: Final = ErrorDefinition(
    "store.keys_expired",
    StoreDeniedError,
    "{location} refuses: the keys have expired ({cause})",
    kept="everything in the bucket",
    advice="renew TIDEGATE_S3_ACCESS_KEY and TIDEGATE_S3_SECRET_KEY, or the role's session, and"
    " start again",
)
CLOCK_SKEWED: Final = ErrorDefinition(
    "store.clock_skewed",
    StoreDeniedError,
    "{location} refuses: the clocks of this host and of the store differ too much ({cause})",
    kept="everything in the bucket",
    advice="set the clock of this host, for example with NTP, and start again",
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

RECORD_MALFORMED: Final = ErrorDefinition(
    "manifest.malformed",
    PoisonError,
    "{where} is not a readable record: {cause}",
    kept="all other checkpoints",
    advice="look at it with: tidegate checkpoints verify; then restore an earlier one",
)
RECORD_OF_NEWER_FORMAT: Final = ErrorDefinition(
    "manifest.newer_format",
    ConfigurationError,
    "{where} was written in format {version}; this tidegate reads up to {newest}",
    kept="the checkpoint, untouched",
    advice="run the tidegate version that wrote it, or a newer one",
)
BAD_TRANSITION: Final = ErrorDefinition(
    "checkpoint.bad_transition",
    PoisonError,
    "checkpoint {checkpoint} cannot go from {before} to {after}",
)

# The log


class SealUndecidedError(OutcomeUnknownError):
    """The store gave no answer within the budget; what fills the slot decides the attempt."""


UNKNOWN_CHECKPOINT: Final = ErrorDefinition(
    "checkpoint.unknown",
    ConfigurationError,
    "{checkpoint} is not a completed checkpoint of {pipeline}",
    advice="see: tidegate checkpoints list",
)
AMBIGUOUS_CHECKPOINT: Final = ErrorDefinition(
    "checkpoint.unknown",
    ConfigurationError,
    "{text!r} does not name a checkpoint of {pipeline}: {why}",
    advice="see: tidegate checkpoints list",
)
NO_MANIFEST: Final = ErrorDefinition(
    "log.no_manifest",
    PoisonError,
    "{key} holds no manifest but a {kind}",
    advice="retired checkpoints cannot be opened; choose one of: tidegate checkpoints list",
)
RECORD_MISPLACED: Final = ErrorDefinition(
    "log.misplaced",
    PoisonError,
    "{uri} holds the record of slot {slot} of timeline {timeline}",
    advice="objects were copied by hand; restore the bucket from a backup",
)
COUNTERS_NOT_CONSERVED: Final = ErrorDefinition(
    "manifest.not_conserved",
    PoisonError,
    "epoch {checkpoint} read {read} rows but accounts for {accounted}",
    kept="the previous checkpoint; this epoch was not sealed",
    advice="report this with the manifest in the message; it is a defect of tidegate",
)
SEAL_UNDECIDED: Final = ErrorDefinition(
    "log.seal_undecided",
    SealUndecidedError,
    "{uri} gave no answer for {seconds:.0f} s; whether the epoch is sealed is not known",
    kept="all files of the attempt; the slot decides",
    advice="check the store; the next driver goes on from whatever fills the slot",
    retry_after=5.0,
)

# The lease


class LeaseHeldError(FencedError):
    """Another process drives the pipeline and renews the lease, or the wait for it was ended."""


class LeaseLostError(FencedError):
    """This process held the lease and no longer does: it was taken, is gone, or was released."""


LEASE_HELD: Final = ErrorDefinition(
    "lease.held",
    LeaseHeldError,
    "{pipeline} is driven by {holder}",
    kept="the running stream, untouched",
    advice="stop it first: tidegate stop {pipeline}; or start a standby: --standby",
)
LEASE_LOST: Final = ErrorDefinition(
    "lease.lost",
    LeaseLostError,
    "the lease of {pipeline} (token {token}) is no longer held here: {why}",
    kept="everything sealed; this driver stops",
    advice="nothing to do if another driver is meant to run; see: tidegate status",
)
LEASE_MALFORMED: Final = ErrorDefinition("lease.malformed", PoisonError, "{uri} is not a lease")
LEASE_OF_OTHER_PIPELINE: Final = ErrorDefinition(
    "identity.mismatch",
    ConfigurationError,
    "the lease of {pipeline} belongs to the pipeline with uid {found}, not {uid}",
    kept="everything on both sides; nothing was changed",
    advice="point the pipeline at its own bucket, or give it a new name",
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
RESTORE_GAP: Final = ErrorDefinition(
    "restore.gap",
    ConfigurationError,
    "{checkpoint} of {pipeline} cannot be restored: slot {slot}, which lies between the current"
    " timeline and it, was retired",
    kept="everything; nothing was restored",
    advice="choose an older checkpoint: tidegate checkpoints list {pipeline} --all",
)
RESTORE_SINK: Final = ErrorDefinition(
    "restore.sink",
    ConfigurationError,
    "{pipeline} cannot be restored: nothing takes the batches up to {newest} out of the sink of"
    " query {query} ({sink})",
    kept="everything; nothing was restored",
    advice="register a function with tidegate.job.on_restore in the script, or list the query under"
    " `repeatable` if its sink may get a batch twice, and let the job seal one more batch",
)
