"""The errors of the decider: input that breaks what its source promised."""

from __future__ import annotations

from tidegate.errors import ErrorDefinition, PoisonError

UNKNOWN_SOURCE = ErrorDefinition(
    "eventtime.unknown_source",
    PoisonError,
    "the survey names {member}, a source that the spec does not have",
)
ROWS_AFTER_END = ErrorDefinition(
    "eventtime.signal_after_done",
    PoisonError,
    "{member} has ended, but there are rows of it after its end",
    kept="everything sealed so far, and the rows in their source",
    advice="`_DONE` or `tidegate run --until-end` ended it; restore the checkpoint before its end,"
    " or read the source under a new pipeline's name",
)
SIGNAL_AFTER_END = ErrorDefinition(
    "eventtime.signal_after_done", PoisonError, "{member} is done but sent {signal} ({detail})"
)
PUNCTUATION_REGRESSED = ErrorDefinition(
    "eventtime.punctuation_regress",
    PoisonError,
    "punctuation of {member} went back {times} times in this epoch",
)
FRONTIER_REGRESSED = ErrorDefinition(
    "eventtime.frontier_regress",
    PoisonError,
    "the frontier of {member} is not monotonically increasing: {value} after {before}",
)
BARRIER_WITHOUT_ID = ErrorDefinition(
    "eventtime.barrier_without_id",
    PoisonError,
    "a barrier row of {member} at position {seq} has no id",
)
