"""Error catalogue of the driver, its landing process, backfills and the class archive."""

from __future__ import annotations

from tidegate.errors import (
    ConfigurationError,
    ErrorDefinition,
    FencedError,
    PoisonError,
    TransientError,
)

_EPOCH_LOST = "everything sealed; this epoch was not"
_LANDED = "everything landed so far"

UNEXPECTED = ErrorDefinition(
    "driver.unexpected",
    PoisonError,
    "{pipeline}: {kind}: {text}",
    kept=_EPOCH_LOST,
    advice="the traceback is in the driver's log; if it names no row of yours it is a defect of"
    " tidegate",
)
JVM_LOST = ErrorDefinition(
    "driver.jvm_lost",
    TransientError,
    "{pipeline}: Spark's {what} is gone ({text})",
    kept=_EPOCH_LOST,
    advice="the supervisor starts the driver again; by hand: the same command again",
    retry_after=1.0,
)
DISK_FULL = ErrorDefinition(
    "driver.disk_full",
    TransientError,
    "{pipeline}: no space left for scratch files ({detail})",
    kept="everything sealed; this epoch is done again",
    advice="make room on the disk of the scratch folder (--work) and of Spark's spark.local.dir;"
    " the driver goes on by itself",
    retry_after=2.0,
)
BACKGROUND_FAILED = ErrorDefinition(
    "driver.background_failed",
    TransientError,
    "{task} failed with {kind}: {text}",
    kept="everything sealed; epochs go on",
    advice="it is tried again by itself; if it stays, the traceback is in the driver's log",
)
UNWANTED = ErrorDefinition(
    "driver.unwanted",
    FencedError,
    "{pipeline} should be {state} (set by {who})",
    kept="everything sealed; nothing was started",
    advice="when it should run again: tidegate start {pipeline}",
)
OTHER_KIND = ErrorDefinition(
    "driver.other_kind",
    ConfigurationError,
    "{pipeline} is the name of a {found} in this store, and the spec is a {given}",
    kept="everything; nothing was started",
    advice="give the new one another name or another store",
)

CHECKPOINT_DAMAGED = ErrorDefinition(
    "checkpoint.damaged",
    PoisonError,
    "checkpoint {checkpoint} of {pipeline} is damaged: {problem} {key} {detail}",
    kept="all other checkpoints and the tables as they are",
    advice="go back to one that is whole: tidegate checkpoints restore {pipeline} latest_healthy"
    " (or let the driver do it: on_bad_checkpoint: fork)",
)
NO_WHOLE_CHECKPOINT = ErrorDefinition(
    "checkpoint.none_whole",
    PoisonError,
    "no checkpoint of {pipeline} is whole",
    kept="everything that is left in the bucket",
    advice="look at them: tidegate checkpoints verify {pipeline}; start a new pipeline under"
    " another name",
)

LANDING_REFUSED = ErrorDefinition(
    "landing.refused",
    ConfigurationError,
    "{source}: Spark cannot read this landing: {text}",
    kept=_LANDED,
    advice="correct landing.format, options, read_as or columns of the source",
)
LANDING_BAD_VALUE = ErrorDefinition(
    "landing.bad_value",
    PoisonError,
    "the landing query of {source} met a value that its expressions cannot take: {text}",
    kept=_LANDED + "; the batch was not written",
    advice="let the expression in landing.columns give null for such values (try_cast for CAST),"
    " and run it again",
)
LANDING_FAILED = ErrorDefinition(
    "landing.failed",
    TransientError,
    "the landing query of {source} failed: {text}",
    kept=_LANDED,
    advice="run it again: it goes on at its checkpoint",
)
LANDING_BUSY = ErrorDefinition(
    "landing.busy",
    ConfigurationError,
    "another process lands source {source} from {folder}",
    kept=_LANDED,
    advice="one process per checkpoint folder: stop the other one first",
)
STALE_LANDING_CHECKPOINT = ErrorDefinition(
    "landing.stale_checkpoint",
    ConfigurationError,
    "source {source}: the checkpoint folder {folder} went back: batch {batch} comes again, with"
    " other rows, and batch {newest} is landed already",
    kept=_LANDED + "; nothing of this batch was written",
    advice="give the folder as it was when it was last used; if that is lost, begin with"
    " --new-generation (docs/landing.md says what the origin gives then)",
)
LANDING_FENCED = ErrorDefinition(
    "landing.fenced",
    FencedError,
    "source {source}: another process began a generation behind {generation}",
    kept=_LANDED + "; nothing is written behind the new generation",
    advice="one process per source; this one has ended",
)
OTHER_LANDING_CHECKPOINT = ErrorDefinition(
    "landing.other_checkpoint",
    ConfigurationError,
    "source {source} was landed from another checkpoint folder than {folder}: this one does not"
    " know what was landed already",
    kept=_LANDED,
    advice="give the old folder with --checkpoint; if it is lost: --new-generation. The origin is"
    " then read from where its options begin: rows come again (files; Kafka with startingOffsets:"
    " earliest), or those since the last batch are missing (Kafka's latest, which is its default)",
)

BAD_BACKFILL_RANGE = ErrorDefinition(
    "backfill.range",
    ConfigurationError,
    "--{option}: {text!r} is not an instant with an offset from UTC",
    advice="2026-01-31T00:00:00Z",
)
NO_JAVA = ErrorDefinition(
    "warm.no_java",
    ConfigurationError,
    "no Java found",
    advice="install Java 17, or set JAVA_HOME",
)
CLASS_ARCHIVE_FAILED = ErrorDefinition(
    "warm.failed",
    TransientError,
    "the run that should make the class archive failed:\n{log}",
)
