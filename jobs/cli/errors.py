"""Error catalogue of the command line."""

from __future__ import annotations

from typing import Final

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

UNEXPECTED: Final = ErrorDefinition(
    "cli.unexpected",
    PoisonError,
    "{kind}: {text}",
    advice="this is a defect of tidegate; run again with TIDEGATE_DEBUG=1 for the traceback and"
    " report it",
)
NO_STORE: Final = ErrorDefinition(
    "cli.no_store",
    ConfigurationError,
    "there is no store at {folder}",
    advice="name one with --store or TIDEGATE_STORE, or run a pipeline here first: tidegate run"
    " SPEC.yaml",
)
STACK_DOWN: Final = ErrorDefinition(
    "cli.stack_down",
    TransientError,
    "the stack in {home} is down",
    kept="its data and addresses",
    advice="tidegate up",
)
UNKNOWN_PIPELINE: Final = ErrorDefinition(
    "cli.unknown_pipeline",
    ConfigurationError,
    "no pipeline {name!r} in {store}{suggestion}",
    advice="known: {known}",
)
NO_PIPELINE_YET: Final = ErrorDefinition(
    "cli.unknown_pipeline",
    ConfigurationError,
    "no pipeline {name!r} in {store}",
    advice="nothing ran here yet: tidegate run SPEC.yaml",
)
UNKNOWN_SPEC: Final = ErrorDefinition(
    "cli.unknown_spec",
    ConfigurationError,
    "no spec for {name!r} in {folders}",
    advice="give the path of its YAML file{specs}",
)
CANNOT_WRITE: Final = ErrorDefinition(
    "cli.out", ConfigurationError, "cannot write {file}: {reason}", advice="choose another file"
)
UNKNOWN_FORMAT: Final = ErrorDefinition(
    "cli.format", ConfigurationError, "{address}: which format?", advice="--format {formats}"
)
UNREADABLE_OBJECT: Final = ErrorDefinition(
    "cli.format", ConfigurationError, "{address} cannot be read as {format}: {reason}"
)
NO_FILE: Final = ErrorDefinition(
    "cli.no_file", ConfigurationError, "there is no file of a known format at {address}"
)
NO_EVENT_TIME: Final = ErrorDefinition(
    "cli.no_event_time",
    ConfigurationError,
    "no column of {folder} holds the time of its events: {columns}",
    advice="name one with --event-time; text like 2026-03-01T12:00:00Z and numbers of seconds,"
    " milliseconds or microseconds since 1970 can be read",
)
FILE_EXISTS: Final = ErrorDefinition(
    "cli.exists",
    ConfigurationError,
    "{file} exists already",
    kept="the file as it is",
    advice="{advice}",
)
WHICH_SOURCE: Final = ErrorDefinition(
    "cli.which_source",
    ConfigurationError,
    "{file} lies in no folder with the name of a source of {pipeline}",
    kept="nothing was copied",
    advice="name one with --source: {sources}",
)
BAD_FIELD: Final = ErrorDefinition(
    "cli.bad_field",
    ConfigurationError,
    "{text!r} is not FIELD=VALUE",
    advice="write for example flight=1545",
)
BAD_CONDITION: Final = ErrorDefinition(
    "cli.bad_condition",
    ConfigurationError,
    "the condition on table {table} cannot be read: {cause}",
    advice="write it over these columns: {columns}",
)
BAD_TIME: Final = ErrorDefinition(
    "cli.bad_time",
    ConfigurationError,
    "{text!r} is not a time",
    advice="write 2013-01-06T12:00:00Z",
)
UNKNOWN_PIN: Final = ErrorDefinition(
    "cli.unknown_pin",
    ConfigurationError,
    "{pipeline} has no pin {name!r}",
    advice="there are: {pins}",
)
NO_LOG: Final = ErrorDefinition(
    "cli.no_log",
    ConfigurationError,
    "{pipeline} has no driver log{attempt}",
    advice="{available}",
)
STILL_RUNNING: Final = ErrorDefinition(
    "cli.still_running",
    TransientError,
    "the driver of {pipeline} has not ended within {seconds:g} s",
    kept="the request; the driver ends after its current epoch",
    advice="look again: tidegate status {pipeline}",
)
RESTORING: Final = ErrorDefinition(
    "cli.restoring",
    ConfigurationError,
    "{who} restores {pipeline}",
    kept="the restore, which sets the desired state when it ends",
    advice="wait for its end: tidegate status {pipeline}",
)
NO_ANSWER: Final = ErrorDefinition(
    "cli.no_answer",
    TransientError,
    "no driver of {pipeline} has answered within {seconds:g} s",
    kept="the request; the next driver applies it unless it has expired by then",
    advice="check whether one runs: tidegate status {pipeline}",
)
REFUSED: Final = ErrorDefinition(
    "cli.refused", ConfigurationError, "{kind} was {outcome}: {detail}"
)
NO_LANDING: Final = ErrorDefinition(
    "landing.none",
    ConfigurationError,
    "{pipeline} has no source {source!r} with a 'landing' section",
    advice="its sources: {sources}",
)
NO_END: Final = ErrorDefinition(
    "cli.no_end",
    ConfigurationError,
    "{pipeline} reads topics, which have no end: {sources}",
    kept="nothing was started",
    advice="use --until-idle SECONDS instead of --until-end",
)
NOT_FOR_JOBS: Final = ErrorDefinition(
    "cli.not_for_jobs",
    ConfigurationError,
    "{pipeline} is a job: its script says when it ends, and it has no standby",
    kept="nothing was started",
    advice="leave out --until-idle, --until-end, --epochs and --standby",
)
NO_EPOCH: Final = ErrorDefinition(
    "replay.no_epoch",
    ConfigurationError,
    "{pipeline} has no epoch {epoch}; the newest is {newest}",
    advice="see: tidegate checkpoints list {pipeline}",
)
SLOT_IS_MERGE: Final = ErrorDefinition(
    "replay.merge",
    ConfigurationError,
    "slot {slot} of {pipeline} is not an epoch of a run but the merge of a splice request",
    advice="choose another one with --epoch; `tidegate splice list` shows what a merge did",
)
BAD_CORRECTIONS: Final = ErrorDefinition(
    "splice.bad_mend",
    ConfigurationError,
    "{path} cannot be read as corrected rows: {reason!r}",
    advice='write one JSON object per line: {{"_source": "a", "_partition": "0", "_seq": 7,'
    ' "amount": "1.50"}}',
)
NO_SEALED_SPEC: Final = ErrorDefinition(
    "results.no_spec",
    ConfigurationError,
    "{pipeline} has sealed nothing yet, or its spec was not kept",
    advice="results appear with the first checkpoint",
)
