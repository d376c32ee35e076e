"""Every error that Airflow's side of tidegate raises; see `tidegate.errors.ErrorDefinition`.

Not here are errors whose class depends on the case: what a driver or a child process reported
itself (`child_processes.rebuild_error`), ``driver.exit_N``, and ``recover.unfit`` for a store that
does not answer (`recover_and_pin.choose_checkpoint`).
"""

from __future__ import annotations

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError


class DriverLostError(TransientError):
    """The driver vanished several times in a row without a new checkpoint.

    Airflow tries again, with its own back-off.
    """


class QualityFailedError(PoisonError):
    """Expectations failed: the stream goes on, and a person has to look.

    Trying again would find the same rows.
    """


NO_STORE = ErrorDefinition(
    "airflow.no_store",
    ConfigurationError,
    "no store: TIDEGATE_STORE is not set for Airflow's processes",
    advice=(
        "set TIDEGATE_STORE=s3://bucket (and TIDEGATE_S3_*), or name a connection:"
        " build_dags(..., conn_id=...)"
    ),
)
BAD_CONNECTION = ErrorDefinition(
    "airflow.bad_connection",
    ConfigurationError,
    "the connection {conn_id!r} has no 'store' in its extra",
    advice='set extra to {{"store": "s3://bucket", "endpoint": "https://..."}}',
)
NO_CONNECTION = ErrorDefinition(
    "airflow.no_connection",
    ConfigurationError,
    "Airflow has no connection {conn_id!r}, which the DAG names as its pipeline's store",
    advice="make it in Airflow (Admin > Connections), or correct conn_id in build_dags(...)",
)
COMMAND_CRASHED = ErrorDefinition(
    "airflow.command_crashed", TransientError, "tidegate {command} ended with code {code}: {last}"
)
SUBMIT_MODE = ErrorDefinition(
    "airflow.submit_mode",
    ConfigurationError,
    "{master} with deploy mode cluster: a standalone master takes no Python driver",
    advice="set deploy-mode to client in the extra of the connection {conn_id!r}",
)
SUBMIT_UPLOAD = ErrorDefinition(
    "airflow.submit_upload",
    ConfigurationError,
    "{pipeline}: in cluster mode, drivers on Kubernetes fetch their program from the address in"
    " {setting}, which is not set",
    advice=(
        "set it in supervision.submit.conf, and spark.kubernetes.container.image (docs/clusters.md)"
    ),
)
NO_KUBERNETES = ErrorDefinition(
    "airflow.no_kubernetes",
    ConfigurationError,
    "spark-submit to Kubernetes needs a package that is not here: {error}",
    advice="install apache-airflow-providers-cncf-kubernetes with Airflow",
)
NO_SPARK_SUBMIT = ErrorDefinition(
    "airflow.no_spark_submit",
    ConfigurationError,
    "there is no {program} on this worker",
    advice="install Spark, or pyspark with Airflow",
)
DRIVER_LOST = ErrorDefinition(
    "airflow.driver_lost",
    DriverLostError,
    "{why}; launched {launches} times without a new checkpoint",
    kept="everything sealed so far",
    advice="read the driver's log: {log}",
)
BUCKET_WIPED = ErrorDefinition(
    "airflow.bucket_wiped",
    ConfigurationError,
    "the bucket no longer knows {pipeline}, which this run has seen running: {change}",
    kept="what is left in the bucket; no driver was started",
    advice=(
        "restore the bucket or point Airflow at the right one; to begin from nothing, start a new"
        " run"
    ),
)
STOP_DURING_RESTORE = ErrorDefinition(
    "stop.during_restore",
    ConfigurationError,
    "{pipeline} is being restored by {who}, and starts again at the end of the restore",
    kept="the restore, which goes on",
    advice="stop the pipeline when the restore has ended",
)
SPEC_INVALID = ErrorDefinition(
    "spec.invalid",
    ConfigurationError,
    "{findings}",
    kept="every other pipeline of the folder",
    advice="correct the file: tidegate validate FILE",
)
SPEC_NAME_TAKEN = ErrorDefinition(
    "spec.name_taken",
    ConfigurationError,
    "{path}:1: name: {name!r} is taken by {taken_by}; names are unique in a folder",
)
SWEEP_UNREADABLE = ErrorDefinition(
    "sweep.unreadable",
    PoisonError,
    "the sweep could not judge {names}: {findings}",
    kept="every other pipeline, which was started where it had to be",
    advice="see each with: tidegate status PIPELINE",
)
BACKFILL_RANGE = ErrorDefinition(
    "backfill.range",
    ConfigurationError,
    "a run by hand needs a range",
    advice="fill in start and end",
)
BACKFILL_DIFFERENT = ErrorDefinition(
    "backfill.different",
    PoisonError,
    "stream and batch differ between {start} and {end}",
    kept="the stream's tables, as they are",
    advice="see {key} in the bucket; rows that came too late are in the late table",
)
BACKFILL_CRASHED = ErrorDefinition(
    "backfill.crashed", TransientError, "the batch run ended with code {code}: {last}"
)
MAINTAIN_CRASHED = ErrorDefinition(
    "maintain.crashed", TransientError, "the retention ended with code {code}: {last}"
)
MAINTAIN_DAMAGED = ErrorDefinition(
    "maintain.damaged",
    PoisonError,
    "{count} checkpoint(s) of {pipeline} are damaged: {names}",
    kept="all others; the damaged ones are condemned, so that they cannot be restored",
    advice=(
        "find out what happened to the objects; see: tidegate checkpoints verify {pipeline} --all"
    ),
)
QUALITY_CRASHED = ErrorDefinition(
    "quality.crashed", TransientError, "the checks ended with code {code}: {last}"
)
QUALITY_FAILED = ErrorDefinition(
    "quality.failed",
    QualityFailedError,
    "{count} critical expectation(s) failed: {names}",
    kept="the stream runs on; nothing was rolled back",
    advice="see the Data Docs: {url}",
)
RESTORE_NOT_APPROVED = ErrorDefinition(
    "recover.not_approved",
    ConfigurationError,
    "the restore is not approved: {reason}",
    kept="the running stream, untouched",
    advice="start {dag_id} again and let another person than {requester} approve",
)
NO_EPOCH_AFTER_RESTORE = ErrorDefinition(
    "recover.no_epoch",
    TransientError,
    "restored, but no epoch was sealed within {seconds:.0f} s",
    kept="the restore is done and stays",
    advice="see the run of {stream_dag} and the driver's log",
)
CHECKPOINT_UNFIT = ErrorDefinition(
    "recover.unfit",
    PoisonError,
    "{checkpoint} is {verdict}: {findings}",
    kept="the running stream, untouched",
    advice="choose another checkpoint: tidegate checkpoints list",
)
PIN_WITHOUT_NAME = ErrorDefinition(
    "pin.no_name", ConfigurationError, "a pin needs a name", advice="start it with a name"
)
ABORT_UNANSWERED = ErrorDefinition(
    "barrier.unanswered",
    TransientError,
    "no driver of {pipeline} has answered for {seconds:.0f} s: barrier {barrier} is still open",
    kept="the request, which the next driver applies within a day",
    advice="see whether the stream runs: tidegate status {pipeline}",
)
ABORT_REFUSED = ErrorDefinition(
    "barrier.refused",
    ConfigurationError,
    "the request to abort barrier {barrier} of {pipeline} is {outcome}: {detail}",
    kept="the barrier, as it is",
    advice="see which barriers are open on the Streams page",
)
MERGE_NOT_APPROVED = ErrorDefinition(
    "splice.not_approved",
    ConfigurationError,
    "the merge is not approved: {reason}",
    kept="the request; nothing was merged",
    advice="start {dag_id} again with this request and let another person approve",
)
PAGE_BUSY = ErrorDefinition(
    "page.busy",
    TransientError,
    "other requests are being answered at present: {what}",
    advice="the page asks again by itself",
)
RESULTS_CRASHED = ErrorDefinition(
    "page.no_answer",
    TransientError,
    "the tables of {pipeline} could not be read within {seconds:.0f} s",
    kept="the tables, untouched",
    advice="ask again, or read them on the command line: tidegate tables {pipeline}",
)
NO_STREAM = ErrorDefinition(
    "page.no_stream",
    ConfigurationError,
    "there is no stream {dag_id!r}",
    advice="see the list of streams",
)
