"""The errors of the engine; see `tidegate.errors.ErrorDefinition`."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_EPOCH_KEPT = "everything sealed so far; nothing of this epoch was sealed"
_CORRUPT = "object.corrupt"


class CorruptObjectsError(PoisonError):
    """Data pages of objects cannot be read, although their footers can.

    The engine ends the epoch with a `TransientError`. Its next plan has dead letters instead.

    Attributes:
        keys: keys of the objects.
    """

    keys: tuple[str, ...] = ()

    @classmethod
    def for_keys(cls, keys: Sequence[str]) -> CorruptObjectsError:
        """Return the error for these objects."""
        error = PAGES_CORRUPT(keys=", ".join(keys))
        error.keys = tuple(keys)
        return error


class BrokenRuleError(PoisonError):
    """A row breaks a rule of severity ``fail``; the engine says in which epoch."""


RULE_FAILED = ErrorDefinition(
    "row.rule_failed",
    BrokenRuleError,
    "row {row} of {where} breaks rule {rule} of source {source} ({predicate}): {sample}",
    kept=_EPOCH_KEPT,
    advice="correct the row at its origin, or give the rule the severity quarantine",
)
EPOCH_BREAKS_RULE = ErrorDefinition(
    RULE_FAILED.code,
    PoisonError,
    "epoch {epoch} of {pipeline}: {detail}",
    kept=_EPOCH_KEPT,
    advice=RULE_FAILED.advice,
)
PAGES_CORRUPT = ErrorDefinition(
    _CORRUPT,
    CorruptObjectsError,
    "the data pages of {keys} cannot be read, although the footer can",
    kept="the object, and everything sealed before it",
    advice="replace the object, or move it out of the source's folder",
)
EPOCH_HAS_CORRUPT_OBJECTS = ErrorDefinition(
    _CORRUPT,
    TransientError,
    "epoch {epoch} of {pipeline}: {detail}",
    kept=_EPOCH_KEPT,
    advice="the epoch is planned again by itself, with dead letters for these objects (or ends,"
    " with on_bad: fail)",
)
SOURCE_CHANGED = ErrorDefinition(
    "source.changed",
    TransientError,
    "epoch {epoch} of {pipeline}: {key} of source {member} changed while it was read: {detail}",
    kept=_EPOCH_KEPT,
    advice="the epoch is planned again by itself; write each object once, under a key of its own",
    retry_after=1.0,
)
ROWS_NOT_CONSERVED = ErrorDefinition(
    "epoch.not_conserved",
    PoisonError,
    "epoch {epoch} of {pipeline}: rows do not add up: {counters}",
    kept="the previous checkpoint; this epoch was not sealed",
    advice="report this message; it is a defect of tidegate",
)
NO_OWN_SPEC = ErrorDefinition(
    "replay.no_spec",
    ConfigurationError,
    "the spec that sealed {checkpoint} of {pipeline} (digest {digest}) was not kept, or this"
    " version cannot read it",
    advice="give the file of that spec instead of the present one, or replay a newer epoch",
)
WHATIF_UNKNOWN_SOURCE = ErrorDefinition(
    "whatif.unknown_source",
    ConfigurationError,
    "{pipeline} has no source {source!r}",
    advice="its sources: {sources}",
)
WHATIF_BAD_OPTION = ErrorDefinition(
    "whatif.bad_option",
    ConfigurationError,
    "{option} {text!r} cannot be read",
    advice="write --lag SOURCE=2m, --idle 5m, --idle SOURCE=5m or --idle never",
)
WHATIF_NO_SURVEY = ErrorDefinition(
    "whatif.no_survey",
    ConfigurationError,
    "{pipeline} has no epoch that can be decided again: manifests have the survey that this needs"
    " since format 2, and retired epochs have nothing",
    advice="let the pipeline seal some epochs with this version, then ask again",
)
WHATIF_RETIRED = ErrorDefinition(
    "whatif.retired",
    ConfigurationError,
    "epoch {slot} of {pipeline} is retired, or an older version sealed it without the survey",
    advice="the oldest epoch that can be decided again is {oldest}: --since {oldest}",
)
SINK_UNEXPECTED = ErrorDefinition(
    "sink.unexpected",
    PoisonError,
    "publishing failed with {kind}: {detail}",
    kept="everything sealed; the tables show the epochs before",
    advice="start the driver again: publishing goes on from the log; if it fails again, report"
    " this message",
)
UNKNOWN_FAULT_POINT = ErrorDefinition(
    "faults.unknown",
    ConfigurationError,
    "no fault point {point!r} (n-th: {nth})",
    advice="TIDEGATE_FAULT=POINT:N with POINT one of {points}",
)
