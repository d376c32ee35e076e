"""Error catalogue of the bucket: stores, the log, checkpoints, the lease and requests."""

from __future__ import annotations

from typing import Final

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

BAD_CHECKPOINT_ID: Final = ErrorDefinition(
    "checkpoint.bad_id",
    ConfigurationError,
    "{text!r} is not a checkpoint id; ids look like t0-000123-ab12cd",
    advice="list the ids with: tidegate checkpoints list",
)
BAD_NAME: Final = ErrorDefinition(
    "layout.bad_name",
    ConfigurationError,
    "{text!r} cannot be a {what}: letters, digits and _.- only, starting with a letter or digit",
    advice="choose another {what}",
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
