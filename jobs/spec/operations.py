"""How a pipeline is operated, as opposed to what it computes.

The sections `outputs:`, `sinks:`, `checkpoint:`, `spark:`, `supervision:`, `quality:` and
`splice:`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tidegate.json_types import read_data_file
from tidegate.time_units import Duration, PositiveDuration

from .event_time_options import OmittedIfNone, OptionalDuration, SpecModel
from .table_layout import TableLayout
from .variables import VARIABLE

if TYPE_CHECKING:
    from .pipeline import PipelineSpec


class OutputSpec(SpecModel):
    """Where the tables go."""

    events: bool = True
    """Whether released rows are written to the events table.

    With ``false`` they are only counted; late rows can then not be merged back, because a merge
    needs the rows of their windows.
    """

    catalog: str | None = None
    """SQLAlchemy address of an Iceberg SQL catalog, or ``http(s)://`` address of an Iceberg
    REST catalog. The default needs no server: objects in the bucket, or a SQLite file in a
    local store.
    ``${NAME}`` is replaced by an environment variable of the driver, not in the stored spec.
    """
    catalog_options: dict[str, str] = {}
    """Options of a REST catalog, such as ``token``, ``credential`` or ``warehouse``.

    A value ``env:NAME`` is read from the environment.
    """
    namespace: str | None = None
    """Iceberg namespace; default: the pipeline's name."""
    publish_every: PositiveInt = 1
    """Number of sealed epochs that one table snapshot contains."""
    max_unpublished: PositiveInt = 50
    """Largest number of sealed epochs that the tables may lack.

    Beyond it the driver waits, and reports that it waits.
    """
    layout: dict[str, TableLayout] = {}
    """Table name and how its files are partitioned and sorted.

    By default files are written per epoch, with rows in the order of their release.
    """
    compact: bool = True
    """Whether maintenance merges small files of older epochs."""
    file_mb: Annotated[int, Field(gt=0, le=1024)] = 64
    """Size to which merged files grow, in MB of Parquet."""


class CheckpointSpec(SpecModel):
    """Epoch pace and what happens to bad checkpoints."""

    min_interval: Duration = 0
    """Shortest time between the starts of two epochs."""
    idle_interval: Duration = 1_000_000
    """How long the driver waits before it looks again when there was nothing to read."""
    idle_epochs: Literal["on_change", "always"] = "on_change"
    """Without new rows, seal an epoch only if a timer or a status changes something, or always.

    While a timer runs, that is once per `max_clock_step`, because an epoch keeps its time.
    """
    on_bad_checkpoint: Literal["stop", "fork"] = "stop"
    """What a driver does when the newest checkpoint is damaged: stop with an error, or go back
    to the newest intact one by a fork.
    """
    retain: PositiveInt = 1000
    """Number of completed checkpoints that stay restorable."""
    retain_for: Duration = 86_400_000_000
    """Checkpoints younger than this stay restorable as well, on any timeline."""
    maintain_every: OptionalDuration = 3_600_000_000
    """How often the driver retires checkpoints beyond both bounds and deletes unused objects.

    ``never`` leaves this to `tidegate gc` and Airflow.
    """
    max_clock_step: PositiveDuration = 10_000_000
    """The most that an outage counts for timers, and the most of their time that a restart may
    lose.
    """


# With one compiler Java reserves 48 MB for code, and ends when Spark has filled them.
QUICK_COMPILING: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""Options of a JVM that compiles lightly."""
_FIRST_HEAP: Final = "-Xms256m"
"""Java takes a 64th of the host's memory first, fills all of it before it looks for room, and gives
nothing back: a gigabyte on a host with 64. The JVM of a driver needs 60 MB and what passes through.
"""


class SparkSpec(SpecModel):
    """The Spark session of the driver."""

    master: str = "local[2]"
    """Spark master of a driver that is started as a process."""
    driver_memory: str = "2g"
    """Memory of the driver's JVM."""
    jvm: Literal["auto", "quick", "throughput"] = "auto"
    """How the driver's JVM compiles. ``quick`` compiles lightly: a new driver seals its first epoch
    sooner. ``throughput`` is faster where Spark SQL evaluates millions of rows in this JVM.

    ``auto`` is ``throughput`` for a driver that is started as a process with a local master, if
    Spark SQL evaluates rows of the pipeline; else ``quick``. Executors compile lightly as well if
    the driver is started as a process, Spark SQL evaluates no rows, and it is not ``throughput``.
    """
    staging: Literal["disk", "bucket"] = "disk"
    """Has no effect any more, and `validate` says so: reducers run in tasks, wherever these are."""
    conf: dict[str, str] = {}
    """Further Spark settings."""

    @property
    def uses_connect(self) -> bool:
        """Whether Spark is reached through Spark Connect."""
        return self.master.startswith("sc://")

    @property
    def jvm_options(self) -> str:
        """Options of the driver's JVM for `jvm`; empty for ``throughput``.

        ``auto`` has those of ``quick``; `spark_session.open_session` resolves it before. A new JVM
        spends most of its first minute compiling what a small epoch runs a few times.
        """
        return (
            "" if self.jvm == "throughput" else f"{QUICK_COMPILING} {_FIRST_HEAP} -XX:+UseSerialGC"
        )


class SubmitSpec(SpecModel):
    """How spark-submit launches the driver.

    Master and deploy mode are in the Airflow connection.
    """

    conn_id: str = "spark_default"
    """Airflow connection that names master and deploy mode."""
    py_files: tuple[str, ...] = ()
    """Paths, as the worker sees them, of Python packages for the driver; tidegate's two wheels
    where it is not installed.
    """
    conf: dict[str, str] = {}
    """Further Spark settings of the submission."""


Reference = Annotated[str, Field(pattern=r"^env:[A-Za-z_]\w*$")]
"""A secret as ``env:NAME``, never itself."""


class AlertSpec(SpecModel):
    """Who gets a message when an incident of the pipeline begins, and when it is over.

    The driver and Airflow's sweep send it, so both need the variables.
    """

    slack: Reference | None = None
    """Address of an incoming webhook of Slack, as ``env:NAME``."""
    pagerduty: Reference | None = None
    """Routing key of an Events API v2 integration of PagerDuty, as ``env:NAME``."""
    pagerduty_url: str = "https://events.pagerduty.com/v2/enqueue"
    """Where events of PagerDuty go; another one in the EU."""
    alertmanager: Reference | None = None
    """Address of an Alertmanager, without ``/api/v2``, as ``env:NAME``."""
    severity: Literal["critical", "warning"] = "critical"
    """``warning`` announces critical incidents as warnings too, for pipelines that may wait."""
    page: str | None = None
    """Address of Airflow, such as ``https://airflow.example.org``: messages link the page."""

    @property
    def receivers(self) -> dict[str, str]:
        """The receivers that are given, each with the variable of its address or key."""
        receivers = {
            "slack": self.slack,
            "pagerduty": self.pagerduty,
            "alertmanager": self.alertmanager,
        }
        return {name: reference for name, reference in receivers.items() if reference}


class SupervisionSpec(SpecModel):
    """What Airflow does with the stream."""

    recover_to: Literal["latest", "latest_healthy"] = "latest"
    """Where a relaunched driver starts: at the newest checkpoint, or at the newest one that
    quality checks did not reject.
    """
    stall_after: Duration = 120_000_000
    """A driver whose step takes this long, and longer than it may, counts as stalled."""
    start_timeout: PositiveDuration = 180_000_000
    """A driver that has not taken the lease this long after its launch counts as stalled.

    Choose more than a cluster's queue takes.
    """
    silent_after: OptionalDuration = 3_600_000_000
    """A source without a row for this long is named on the page and in `tidegate status`.

    ``never`` for sources that may be silent.
    """
    freshness: PositiveDuration | None = None
    """Goal: 95 of 100 epochs show their rows in all sinks this long after the rows' objects
    arrived. Sources that miss it are named on the page, in `tidegate status` and by an alert.
    """
    rotate_after: OptionalDuration = 86_400_000_000
    """After this time a new Airflow run follows the stream's run and adopts the driver.

    ``never`` keeps one run.
    """
    backfill: str | None = None
    """Cron expression of the comparison with a batch run over the period before.

    Without it the comparison runs only by hand.
    """
    announce: PositiveDuration | None = None
    """Closed periods of this length become partitions of the windows' Airflow assets, for DAGs
    of your own.
    """
    submit: SubmitSpec | None = None
    """Launch the driver by spark-submit through an Airflow connection.

    Without it the driver is a process on the worker's host.
    """
    deploy: Literal["ask", "auto"] = "ask"
    """A changed spec waits for ``tidegate deploy``; or the next driver that starts deploys it, if
    its plan refuses nothing.
    """
    standby: bool = False
    """A second driver waits, with Spark warm, and takes over when the first is lost.

    It needs as much memory as the first.
    """
    approval: bool = False
    """A restore that is requested in Airflow waits for the approval of another person, who sees
    the impact report.
    """
    approvers: tuple[str, ...] = ()
    """User ids that may approve.

    If empty, every user who can see the task may approve, except the one who asked.
    """
    approval_timeout: OptionalDuration = 86_400_000_000
    """An unanswered request fails after this time."""
    retries: NonNegativeInt = 5
    """How often a failed driver is relaunched before the task fails."""
    retry_delay: Duration = 5_000_000
    """Delay before each relaunch."""
    sweep: str = "*/5 * * * *"
    """Cron expression of the sweep that restarts streams which should run and do not."""
    maintain: str = "30 3 * * *"
    """Cron expression of retention, scrub and index maintenance."""
    owner: str = "tidegate"
    """Owner of the Airflow DAGs and of the incidents that are announced."""
    alerts: OmittedIfNone[AlertSpec] = None
    """Who gets messages about incidents. Without it none are sent."""


Severity = Literal["warn", "critical", "off"]
Ratio = Annotated[float, Field(ge=0, le=1)]


class QualityLimits(SpecModel):
    """Numbers that the suites compare with. A suite names them as ``{limit: late_ratio}``."""

    late_ratio: Ratio = 0.10
    """Rows of a source that were late for at least one output, as a share of the rows read from
    it: the limit of a warning.
    """
    late_share: Ratio = 0.10
    """Rows late for an output as a share of the rows offered to it."""
    dropped_ratio: Ratio = 0.10
    """Rows dropped for an output as a share of the rows read from the source."""
    stream_rejections: Ratio = 0.10
    """Rows that a stream rejected, as a share of the rows that the pipeline read."""
    late_ratio_critical: Ratio = 0.50
    """The same share: the limit of a critical finding."""
    late_ratio_rise: Ratio = 0.10
    """How far the late ratio of the recent epochs may exceed that of all epochs before."""
    lateness_p99: Duration = 86_400_000_000
    """99 % of a source's recent late rows missed the frontier by at most this."""
    lateness_lags: PositiveFloat = 100
    """Largest lateness of a source's recent late rows, as a multiple of its lag."""
    barriers_complete: Ratio = 0.95
    """Least share of closed barriers that were complete."""
    barriers_missed: Ratio = 0.05
    """Largest share of closed barriers that a member missed."""
    barriers_tardy: Ratio = 0.05
    """Largest share of closed barriers to which a member came after they had closed."""
    barrier_waited_p99: Duration = 600_000_000
    """99 % of the barriers closed within this time after their first arrival."""
    barrier_complete_p99: Duration = 600_000_000
    """The same of the barriers that closed complete."""
    barrier_held_p99: Duration = 600_000_000
    """At 99 % of the barriers at which a member came last, the others waited at most this long
    for it alone.
    """
    checkpoint_age: Duration = 300_000_000
    """A pipeline that should run has sealed an epoch within this time."""
    seal_p95: Duration = 5_000_000
    """95 % of the seals took at most this long."""
    aborted_attempts: NonNegativeInt = 3
    """Largest number of attempts that failed before a recent epoch was sealed."""
    state_bytes: NonNegativeInt = 10_737_418_240
    """Largest size of the state that a recent checkpoint names, which a restore reads."""
    freshness: PositiveDuration | None = None
    """95 % of the recent epochs were sealed within this time after the arrival of their oldest
    object. Without it `supervision.freshness` counts.
    """
    unpublished: NonNegativeInt | None = None
    """Largest number of sealed epochs that the tables may lack. By default half of
    `outputs.max_unpublished`, at which the driver waits.
    """
    dead_ratio: Ratio = 0.01
    """Dead letters as a share of the rows read."""
    dead_ratio_critical: Ratio = 0.50
    """Dead letters and rows that a rule quarantined, as a share of the rows read: the limit of a
    critical finding.
    """
    dead_objects: NonNegativeInt = 0
    """Largest number of objects that could not be read."""
    rule_ratio: Ratio = 0.01
    """Rows that broke a rule of their source, as a share of the rows read from it."""
    changed_columns: NonNegativeInt = 0
    """Largest number of recent rows whose object lacks a declared column or has another one."""
    batch_time: PositiveFloat = 1
    """Jobs: 95 % of the recent batches of a query took at most this share of the interval of its
    trigger.
    """
    batch_dropped: Ratio = 0.01
    """Jobs: rows of a query that the watermark dropped, as a share of the rows that it read."""
    state_growth: PositiveFloat = 2
    """Jobs: size of a query's state in the newer half of its recent batches, as a multiple of that
    in the older half.
    """
    watermark_still: NonNegativeInt = 5
    """Jobs: largest number of batches that read rows while the watermark stayed where it was."""
    backlog_rising: NonNegativeInt = 5
    """Jobs: largest number of batches in a row after each of which more messages were waiting."""


class QualitySpec(SpecModel):
    """What the quality checks of a pipeline compare with, and how seriously they take it."""

    limits: QualityLimits = QualityLimits()
    """Numbers that the checks compare with."""
    severity: dict[str, Severity] = {}
    """Check id and ``warn``, ``critical`` or ``off``; overrides the suite's severity."""
    owner: str | None = None
    """Who looks after the checks whose suite names no owner; without it `supervision.owner`."""
    suites: str | None = None
    """Folder of your own suites (``*.yaml``), in the folder of the spec or relative to the
    working folder.

    A file with the name of a built-in suite replaces it.
    """
    release_epochs: PositiveInt = 500
    """Number of newest epochs whose released events are checked; the events table is the only
    one that is never small.
    """
    # Over a pipeline's whole life a ratio hardly moves, so a fault of today would stay below every
    # limit.
    recent: PositiveInt = 20
    """Number of newest epochs that count as recent. Most checks judge these."""
    recent_time: PositiveDuration | None = None
    """Instead of `recent`: epochs sealed within this time are recent."""


# The `splice:` section of a pipeline: when late rows are offered for a merge, by themselves.


class SpliceSpec(SpecModel):
    """What `<p>.splice` does in Airflow; the command line does not use it."""

    offer_rows: PositiveInt | None = None
    """Number of late rows that makes a request and asks for an approval.

    Without it requests are made only when a person starts the DAG.
    """
    offer_at: str = "0 6 * * *"
    """Cron expression of the check for late rows."""
    approvers: tuple[str, ...] = ()
    """Users who may approve.

    By default every user who can answer in Airflow may approve, except the one who asked.
    """
    patience: Duration = 86_400_000_000
    """How long a request waits for an answer.

    After that the run ends without a merge, and the request stays open.
    """


# Followers of the log besides the Iceberg tables (docs/architecture.md, section 2).


class _SinkSpec(SpecModel):
    tables: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Output tables that the sink receives. By default all of them."""

    @property
    def addresses(self) -> dict[str, str]:
        """Field -> address in which variables are replaced."""
        return {name: getattr(self, name) for name in ("url", "path") if hasattr(self, name)}


class _StandardSinkSpec(_SinkSpec):
    start: Literal["beginning", "head"] = "beginning"
    """Where a new sink begins: at the first epoch, or at the next epoch that is sealed."""


class PostgresSinkSpec(_SinkSpec):
    """Transactional: an epoch's rows and the ledger that says so are one transaction."""

    kind: Literal["postgres"]
    """Kind of the sink."""
    url: str = Field(pattern=r"^(postgres(ql)?://|\$\{)")
    """``postgresql://user@host/database``.

    ``${NAME}`` is replaced by an environment variable of the driver, not in the stored spec.
    """
    namespace: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_]{0,62}$")
    """Schema in the database; by default the pipeline's name."""
    windows: Literal["append", "upsert"] = "append"
    """Window tables: a row per revision, or a row per result with its newest revision."""


class FilesSinkSpec(_StandardSinkSpec):
    """At least once.

    One or more files per epoch and table, named after the epoch, so that a repetition overwrites
    itself. Only files that an object in ``_epochs/`` names count.
    """

    kind: Literal["files"]
    """Kind of the sink."""
    path: str
    """A folder or ``s3://bucket/prefix``.

    A relative folder is in the pipeline's store, as the folders of sources are.
    """
    format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files."""


class WebhookSinkSpec(_StandardSinkSpec):
    """At least once.

    POST requests whose id names pipeline, sink, epoch, table and part; repetitions carry the same
    id, in the header ``Idempotency-Key``.
    """

    kind: Literal["webhook"]
    """Kind of the sink."""
    url: str = Field(pattern=r"^(https?://|\$\{)")
    """Address that receives the rows; ``${NAME}`` is replaced by an environment variable of the
    driver.
    """
    rows: PositiveInt = 1000
    """Largest number of rows in one request."""
    timeout: PositiveDuration = 10_000_000
    """How long the sink waits for an answer."""


class KafkaSinkSpec(_StandardSinkSpec):
    """A message per row, with the epoch's checkpoint id in the header ``tidegate-epoch``.

    It needs ``pip install "tidegate[kafka]"``.
    """

    kind: Literal["kafka"]
    """Kind of the sink."""
    servers: str
    """Brokers as ``host:port``, separated by commas."""
    topic: str
    """Name of the topic; ``{table}`` is replaced by the table's name."""
    delivery: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """With ``exactly_once`` an epoch is one transaction, for readers of committed messages."""
    options: dict[str, str] = {}
    """Settings of the Kafka client, librdkafka, as for [topics](kafka.md#options-of-the-client).

    A value ``env:NAME`` is read from the environment.
    """


SinkSpec = Annotated[
    PostgresSinkSpec | FilesSinkSpec | WebhookSinkSpec | KafkaSinkSpec, Field(discriminator="kind")
]


JARS = read_data_file(__package__, "jars.toml")
"""The jars that a pipeline or job needs in addition to those of Spark."""
_JAR_LISTS = ("spark.jars", "spark.jars.packages", "spark.jars.excludes")


def read_sink_variables(spec: PipelineSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of the environment that sinks need.

    That is what their addresses and options name, what PostgreSQL's client looks for, and the
    authorities that this process trusts.
    """
    named = {"SSL_CERT_FILE", "SSL_CERT_DIR"} if spec.sinks else set[str]()
    if any(sink.kind == "postgres" for sink in spec.sinks.values()):
        named |= {name for name in environment if name.startswith("PG")}
    for sink in spec.sinks.values():
        for address in sink.addresses.values():
            named |= {found["name"] for found in VARIABLE.finditer(address)}
        for value in sink.options.values() if isinstance(sink, KafkaSinkSpec) else ():
            if value.startswith("env:"):
                named.add(value.removeprefix("env:"))
    return {name: text for name, text in environment.items() if name in named}


def add_connector_jars(spec: PipelineSpec) -> SparkSpec:
    """Return the Spark settings with the jars that sources and sinks need.

    Settings that name jars themselves are returned unchanged.
    """
    wanted, left_out = _select_kafka_packages(spec)
    if not wanted or {"spark.jars", "spark.jars.packages"} & set(spec.spark.conf):
        return spec.spark
    jars = build_jar_settings(wanted, left_out)
    return spec.spark.model_copy(update={"conf": {**jars, **spec.spark.conf}})


def build_jar_settings(wanted: Sequence[str], left_out: Sequence[str]) -> dict[str, str]:
    """Return the settings with which Spark fetches packages.

    ``TIDEGATE_SPARK_JARS`` (comma-separated files) replaces packages where no registry can be
    reached.
    """
    if files := os.environ.get("TIDEGATE_SPARK_JARS"):
        return {"spark.jars": files}
    return {"spark.jars.packages": ",".join(wanted), "spark.jars.excludes": ",".join(left_out)}


def add_bucket_jars(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that add the jars of S3A to those of a job, which uses a bucket.

    Empty if the job names hadoop-aws itself, or has these jars already.
    """
    given = {key: str(options.get(key) or "") for key in _JAR_LISTS}
    if any("hadoop-aws" in jars for jars in given.values()):
        return {}
    ours = build_jar_settings(JARS["s3a"], JARS["s3a_excludes"])
    return {key: ",".join(filter(None, (given[key], jars))) for key, jars in ours.items()}


def _select_kafka_packages(spec: PipelineSpec) -> tuple[list[str], list[str]]:
    """Packages for topics that Spark lands, and what is not to come with them.

    Python tasks read the topics of sources and write those of sinks.
    """
    landed = any(
        source.landing is not None and source.landing.format == "kafka"
        for source in spec.sources.values()
    )
    return (JARS["kafka"], JARS["kafka_excludes"]) if landed else ([], [])
