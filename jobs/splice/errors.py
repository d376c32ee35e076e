"""Error catalogue of splice requests, merges and row traces."""

from __future__ import annotations

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_NOTHING_MERGED = "everything; nothing was merged"
_REQUEST_KEPT = "the request; nothing was merged"
_ROWS_KEPT = "the rows, where they are"
_REQUEST_UNCHANGED = "the request, as it was"
_CORRECT_ROWS = "correct them with --set COLUMN=VALUE or --mend FILE"


class TooEarlyError(ConfigurationError):
    """A driver could still take some of the rows, or change a result that they change."""


# Making requests

NO_SOURCE = ErrorDefinition(
    "splice.no_source",
    ConfigurationError,
    "{pipeline} has several sources: say which one the rows of {path} belong to",
    advice="--source with one of: {sources}",
)
WRONG_SOURCE = ErrorDefinition(
    "splice.wrong_source",
    ConfigurationError,
    "{pipeline} has no source {source}",
    advice="--source with one of: {sources}",
)
NO_EVENT_TIME = ErrorDefinition(
    "splice.no_event_time",
    ConfigurationError,
    "{count} rows have no event time, first: {first}",
    kept=_ROWS_KEPT,
    advice=_CORRECT_ROWS,
)
BAD_VALUE = ErrorDefinition(
    "splice.bad_value",
    ConfigurationError,
    "column {column}: {text}",
    kept=_ROWS_KEPT,
    advice=_CORRECT_ROWS,
)
NO_FILE = ErrorDefinition(
    "splice.no_file", ConfigurationError, "cannot read {path}: {text}", advice="check the path"
)
BAD_FILE = ErrorDefinition(
    "splice.bad_file",
    ConfigurationError,
    "{path} cannot be read as {kind}: {text}",
    advice="give a .parquet, .csv, .json or .jsonl file",
)
NO_ROWS = ErrorDefinition(
    "splice.no_rows",
    ConfigurationError,
    "{pipeline} has no such rows that were not merged or asked for already",
    advice="see: tidegate splice list {pipeline}; tidegate tables {pipeline} late",
)
NO_PART = ErrorDefinition(
    "splice.no_part",
    ConfigurationError,
    "the choice takes {share} of splice request {request} of {pipeline}",
    kept=_REQUEST_UNCHANGED,
    advice="choose some of its rows: --until TIME, --since TIME, --source NAME, --output NAME",
)
INDIVISIBLE = ErrorDefinition(
    "splice.indivisible",
    ConfigurationError,
    "splice request {request} of {pipeline} {why}",
    kept=_REQUEST_UNCHANGED,
    advice="see: tidegate splice list {pipeline}",
)

# Planning a merge

TOO_EARLY = ErrorDefinition(
    "splice.too_early",
    TooEarlyError,
    "splice request {request} of {pipeline} cannot be merged yet: {why}",
    kept=_REQUEST_KEPT,
    advice="merge it later: the message says what it waits for",
)
NO_EVENTS = ErrorDefinition(
    "splice.no_events",
    ConfigurationError,
    "{pipeline} keeps no events table (outputs.events: false): its windows cannot be computed"
    " again",
    kept=_REQUEST_KEPT,
    advice="restore to before the rows came and run again, or compare with a batch over the input",
)
OTHER_SPEC = ErrorDefinition(
    "splice.other_spec",
    ConfigurationError,
    "the newest checkpoint of {pipeline} was sealed with another spec than the one given, or there"
    " is none",
    kept=_NOTHING_MERGED,
    advice="give the spec that the pipeline runs with; run it once if it never ran with this one",
)
NOT_REPRODUCIBLE = ErrorDefinition(
    "splice.not_reproducible",
    PoisonError,
    "window {window} of {pipeline}, {key} {start}: the published result does not follow from the"
    " rows that are kept ({text})",
    kept=_NOTHING_MERGED,
    advice="rows dropped or adjusted by policy, or taken by a part of their windows only, make this"
    " so; leave this window out with --output, or restore and run again",
)
INEXACT_AGGREGATE = ErrorDefinition(
    "splice.inexact_aggregate",
    ConfigurationError,
    "window {window} of {pipeline} has {column}: {aggregate}, which only a run on Spark computes",
    kept=_NOTHING_MERGED,
    advice="merge into the other outputs (make the request with --output), or restore and run the"
    " rows again",
)
EDGE_WINDOW = ErrorDefinition(
    "splice.edges",
    ConfigurationError,
    "window {window} of {pipeline} is over edge events ({source}): nothing can be merged into it",
    kept=_NOTHING_MERGED,
    advice="merge into the other outputs (make the request with --output), or restore, and run"
    " again with a larger lag",
)
FOREIGN_EXPRESSION = ErrorDefinition(
    "splice.foreign_expression",
    ConfigurationError,
    "window {window} of {pipeline} cannot be recomputed: {text}",
    kept=_NOTHING_MERGED,
    advice="only expressions that Spark and DuckDB both know can be merged into; restore and run"
    " the rows again otherwise",
)
REDUCER_FAILS = ErrorDefinition(
    "splice.reducer_fails",
    PoisonError,
    "the merge would stop {attachment} at {row}: {text}",
    kept="everything as it was; the request is still open",
    advice="correct the reducer, or reject the request",
)
ATTACHED_TWICE = ErrorDefinition(
    "splice.attached_twice",
    ConfigurationError,
    "{attachment} of {pipeline} was detached and attached again: what it dispatched before cannot"
    " be computed again",
    kept=_REQUEST_KEPT,
    advice="give the attachment another name in the spec, or merge into the windows only:"
    " --output WINDOW",
)
INCOMPLETE = ErrorDefinition(
    "splice.incomplete",
    ConfigurationError,
    "splice request {request} of {pipeline} {why}",
    kept=_REQUEST_KEPT,
    advice="see: tidegate splice list {pipeline}",
)

# Merging

NOT_OPEN = ErrorDefinition(
    "splice.not_open",
    ConfigurationError,
    "splice request {request} of {pipeline} is {state} ({why})",
    kept=_NOTHING_MERGED,
    advice="make a new request from the same rows",
)
EFFECT_CHANGED = ErrorDefinition(
    "splice.effect_changed",
    ConfigurationError,
    "the effect of splice request {request} of {pipeline} is not the one that was approved: another"
    " merge or a restore came between",
    kept=_NOTHING_MERGED,
    advice="look at it again: tidegate splice show {pipeline} {request}",
)
CONTENDED = ErrorDefinition(
    "splice.contended",
    TransientError,
    "drivers of {pipeline} sealed first {attempts} times in a row",
    kept=_REQUEST_KEPT,
    advice="try again, or drain the driver first",
    retry_after=5.0,
)
UNEQUAL = ErrorDefinition(
    "splice.unequal",
    PoisonError,
    "the merge of splice request {request} of {pipeline} sealed other rows than its report said",
    kept="the checkpoint before the merge, which can be restored",
    advice="report this message; it is a defect of tidegate",
)

# Tracing rows

UNKNOWN_COLUMN = ErrorDefinition(
    "row.unknown_column",
    ConfigurationError,
    "{pipeline} has no column {columns}",
    advice="choose from: {known}",
)
TOO_MANY_ROWS = ErrorDefinition(
    "row.too_many",
    ConfigurationError,
    "{count} rows of {pipeline} match; only {limit} can be followed at a time",
    advice="give more fields, for example the event time",
)
BAD_ROW_VALUE = ErrorDefinition(
    "row.bad_value",
    ConfigurationError,
    "the values do not fit the columns: {text}",
    advice="times in ISO form, numbers plain",
)
