"""Error catalogue of jobs: what is wrong with a script, its queries or its checkpoints."""

from __future__ import annotations

from typing import Final

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_SEALED: Final = "every sealed batch"

NO_SCRIPT: Final = ErrorDefinition(
    "job.no_script",
    ConfigurationError,
    "{pipeline}: there is no script {app}",
    kept="everything; nothing was started",
    advice="give `app` relative to the working folder or to the folder of the YAML file",
)
NO_QUERY: Final = ErrorDefinition(
    "job.no_query",
    ConfigurationError,
    "{pipeline}: the script {app} ended and has started none of the queries {queries}",
    kept=_SEALED,
    advice="start every query with .queryName(...) and .start(), and list under `queries` only"
    " names that the script starts",
)
UNNAMED_QUERY: Final = ErrorDefinition(
    "job.unnamed_query",
    ConfigurationError,
    "{pipeline}: the script starts a streaming query without a name",
    kept=_SEALED + "; the query was not started",
    advice='give it a name that stays: .queryName("per_minute")',
)
BAD_QUERY_NAME: Final = ErrorDefinition(
    "job.bad_query_name",
    ConfigurationError,
    "{pipeline}: {query!r} cannot be the name of a sealed query",
    kept=_SEALED + "; the query was not started",
    advice="use letters, digits, - and _, at most 100",
)
QUERY_STARTED_TWICE: Final = ErrorDefinition(
    "job.query_twice",
    ConfigurationError,
    "{pipeline}: the script starts a second query with the name {query}",
    kept=_SEALED + "; the second query was not started",
    advice="give every query a name of its own; a query that has ended is started again by a new"
    " launch",
)
CONTINUOUS_QUERY: Final = ErrorDefinition(
    "job.no_batches",
    ConfigurationError,
    "{pipeline}: query {query} has the trigger {trigger}, which has no batches to seal",
    kept=_SEALED + "; the query was not started",
    advice="use processingTime or availableNow, or leave the query out of `queries`",
)
NOT_LOCAL: Final = ErrorDefinition(
    "job.not_local",
    ConfigurationError,
    "{pipeline}: the script's session runs on {master}, and executors elsewhere cannot write the"
    " checkpoint folder of this host",
    kept=_SEALED + "; no query was started",
    advice="run the script on a local master; `conf` in the job's YAML can set spark.master",
)
REMOTE_CHECKPOINT: Final = ErrorDefinition(
    "job.remote_checkpoint",
    ConfigurationError,
    "{pipeline}: query {query} has a checkpoint of its own at {location}, which this host cannot"
    " read",
    kept="that checkpoint; the query was not started",
    advice="copy it to a folder of this host and let the script name that folder for the first"
    " run, or remove the option if the query should begin from its sources' start",
)
CHECKPOINT_TAKEN: Final = ErrorDefinition(
    "job.checkpoint_taken",
    ConfigurationError,
    "{pipeline}: the checkpoint {location} of query {query} was adopted by {owner} already",
    kept="that checkpoint; the query was not started",
    advice="two jobs that go on from one checkpoint would write the same batches: give this query"
    " another checkpoint, or delete {marker} if that job is gone",
)
UNKNOWN_CHECKPOINT_FORMAT: Final = ErrorDefinition(
    "job.unknown_format",
    ConfigurationError,
    "{path} has the format {version}, which this tidegate cannot read",
    kept=_SEALED + "; this batch was not sealed",
    advice="use the Spark that docs/dependencies.md names",
)
OBJECT_DAMAGED: Final = ErrorDefinition(
    "job.object_damaged",
    PoisonError,
    "{uri} is not what the sealed batch says: its checksum differs",
    kept=_SEALED + " that does not name this object",
    advice="go back to a batch that is whole: tidegate checkpoints verify --all",
)
SLOT_TAKEN: Final = ErrorDefinition(
    "job.slot_taken",
    TransientError,
    "{pipeline}: another driver or a restore has filled the slot of batch {batch} of {query}",
    kept=_SEALED + "; this batch was not sealed",
    advice="the next launch goes on from the newest sealed batch",
    retry_after=1.0,
)
BATCH_STALLED: Final = ErrorDefinition(
    "job.batch_stalled",
    TransientError,
    "{pipeline}: batch {batch} of query {query} has run for {seconds:.0f} s",
    kept=_SEALED + "; this batch is repeated",
    advice="look at its sink and at Spark's tasks; the supervisor starts the job again",
)
SINK_RACED: Final = ErrorDefinition(
    "job.sink_raced",
    TransientError,
    "{pipeline}: another process wrote the same batch of query {query} into its file sink: {text}",
    kept=_SEALED,
    advice="a driver that was taken over is still ending; the next launch repeats the batch",
    retry_after=5.0,
)
SCRIPT_FAILED: Final = ErrorDefinition(
    "job.script_failed",
    PoisonError,
    "{pipeline}: {what} failed: {text}",
    kept=_SEALED,
    advice="correct the script or its data; the traceback is in the driver's log",
)
