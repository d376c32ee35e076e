"""The pipeline spec: the content of a YAML file under ``dags/pipelines/``, as frozen models.

The same models are the Python API: ``PipelineSpec(name="flights", sources={...}, ...)`` equals the
YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal, Self
from zoneinfo import available_timezones

from pydantic import AfterValidator, Field, field_validator, model_validator

from tidegate.jobs.spec.event_time_options import (
    NEVER,
    BarrierOptions,
    CoalesceOptions,
    FrontierOptions,
    OptionalDuration,
    OrderOptions,
    ReleaseMode,
    SpecModel,
)
from tidegate.jobs.spec.operations import QualitySpec, SpliceSpec
from tidegate.jobs.spec.presets import apply_preset
from tidegate.jobs.spec.row_rules import RowRule, read_cast_type
from tidegate.jobs.spec.sinks import SinkSpec
from tidegate.jobs.spec.source_options import (
    DiscoveryOptions,
    EdgeColumns,
    EvolutionOptions,
    KafkaOptions,
    LandingOptions,
    ParseOptions,
    TableOptions,
    list_edge_conflicts,
)
from tidegate.jobs.spec.stream_specs import (
    REJECTIONS,
    PipeSpec,
    ReducerSpec,
    StreamGraph,
    StreamSpec,
)
from tidegate.jobs.spec.table_layout import (
    LAYOUT_COLUMNS,
    WINDOW_COLUMNS,
    TableLayout,
    list_layout_problems,
)
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import Duration, Instant

# A spec without the field is read as this version, so that a later version can tell old files
# apart.
API_VERSION: Final = "tidegate/v1"
EVENTS: Final = "events"
LATE: Final = "late"
BARRIERS: Final = "barriers"
BUILT: Final = "built"
CHECKPOINTS: Final = "checkpoints"
DEAD_LETTERS: Final = "dead_letters"
EVENT_TIME: Final = "_event_time"
"""Column of the event time if sources keep it in different ones (`event_time_column`)."""
NON_DATA_SECTIONS: Final = {"description", "quality", "supervision", "spark", "sinks", "splice"}
# Of `outputs`: they decide in which files rows are, not which rows there are, so a change of them
# needs no new state.
_NON_DATA_OUTPUT_FIELDS: Final = {
    "layout",
    "compact",
    "file_mb",
}  # of `outputs`: where rows lie, not which there are
RESERVED_TABLES: Final = frozenset({EVENTS, LATE, BUILT, BARRIERS, CHECKPOINTS, DEAD_LETTERS})

_OTHER_STORES: Final = {
    "s3a": "'s3a' (write s3://)",
    **dict.fromkeys(("gs", "gcs"), "Google Cloud Storage"),
    **dict.fromkeys(("abfs", "abfss", "az", "azure", "wasb", "wasbs", "adl"), "Azure storage"),
}
# Names become parts of keys, tables, DAG ids and metric labels: the pattern is what all of these
# accept.
_NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")
_FLAT_TYPE: Final = (
    r"(?:string|boolean|int|long|float|double|date|timestamp|binary|decimal\(\d{1,2},\s*\d{1,2}\))"
)
_NESTED_TYPE: Final = re.compile(
    rf"array<{_FLAT_TYPE}>|struct<\w+:\s*{_FLAT_TYPE}(?:,\s*\w+:\s*{_FLAT_TYPE})*>"
)


def _validate_name(value: str) -> str:
    if not _NAME_PATTERN.match(value):
        raise ValueError(
            "names are lower case letters, digits and underscores, starting with a letter; got"
            f" {value!r}"
        )
    return value


def _validate_source_name(value: str) -> str:
    if not re.match(r"[A-Za-z][A-Za-z0-9_\-]{0,62}\Z", value):
        raise ValueError(
            f"source names are letters, digits, '_' and '-', starting with a letter; got {value!r}"
        )
    return value


def _validate_column_type(value: str) -> str:
    if not re.fullmatch(_FLAT_TYPE, value):
        allowed = "string, boolean, int, long, float, double, date, timestamp, binary, decimal(p,s)"
        raise ValueError(f"unknown column type {value!r}; allowed: {allowed}")
    return value


def _validate_field_type(value: str) -> str:
    inner = value
    while (shorter := _NESTED_TYPE.sub("int", inner)) != inner:  # from the inside out
        inner = shorter
    _validate_column_type(inner)
    return value


Name = Annotated[str, AfterValidator(_validate_name)]
SourceName = Annotated[str, AfterValidator(_validate_source_name)]
FieldType = Annotated[str, AfterValidator(_validate_field_type)]


class BarrierColumns(SpecModel):
    """How to distinguish barrier events and punctuation rows from a source's data rows.

    A row whose ``kind`` column equals ``data`` (or is null) is data; ``punctuation`` names the
    value of punctuation rows; any value listed in ``types`` is a barrier of that type. A row with
    another value is a dead letter.
    """

    kind: str
    """Column that tells data rows from barriers and punctuation."""
    data: str = "data"
    """Value of `kind` that marks data rows; null marks them too."""
    types: tuple[str, ...] = ()
    """Values of `kind` that mark barriers, one per barrier type."""
    id: str | None = None
    """Integer column with the barrier's id; needed for identity `id`."""
    punctuation: str | None = None
    """Value of `kind` that marks punctuation rows."""


class ReadLimits(SpecModel):
    """The most that one epoch takes from one partition of a source."""

    objects: Annotated[int, Field(gt=0)] | None = None
    """Number of objects; without it 1,000 objects of any size."""
    bytes: Annotated[int, Field(gt=0)] | None = None
    """Size of the objects in the store.

    An object that begins beyond the limit waits for the next epoch.
    """
    rows: Annotated[int, Field(gt=0)] | None = None
    """Number of rows; an object may be read in several epochs."""


class SourceSpec(FrontierOptions):
    """One source: where its rows lie, what they look like and how its frontier follows them."""

    kind: Literal["objects", "kafka"] = "objects"
    """Objects in a bucket or folder, or a Kafka topic."""
    kafka: KafkaOptions | None = None
    """The topic; required for, and only allowed with, `kind: kafka`."""
    path: str = ""
    """Folder of the objects, relative to the store, or a full ``s3://`` or ``file://`` address."""
    format: Literal["parquet", "json", "csv", "avro", "orc"] = "parquet"
    """Format of the objects.

    ``json`` means one JSON object per line. Text may be compressed; the key then ends in ``.gz``,
    ``.bz2``, ``.xz``, ``.zst`` or ``.lz4``.
    """
    parse: ParseOptions = ParseOptions()
    """How text becomes values."""
    evolution: EvolutionOptions = EvolutionOptions()
    """What happens when an object has other columns than `schema`."""
    discovery: DiscoveryOptions = DiscoveryOptions()
    """How new objects are found."""
    table: TableOptions | None = None
    """Read the files of a Delta or Iceberg table instead of loose objects."""
    landing: LandingOptions | None = None
    """The stream from which `tidegate land` writes the objects of this source."""
    partition_by: Literal["source", "folder"] = "source"
    """One partition for the whole source, or one per folder directly below `path`."""
    columns: dict[str, FieldType] = Field(alias="schema", min_length=1)
    """Column name and type. What happens to objects with other columns: see `evolution`.

    With `select` also ``struct<name: type, ...>`` and ``array<type>``, as the objects have them.
    """
    # These are left out when empty, so that specs without them keep their digest.
    where: str | None = Field(default=None, exclude_if=lambda where: where is None)
    """Condition in Spark SQL over the columns of `schema`: data rows for which it is not true
    are counted as filtered, and kept nowhere.
    """
    select: dict[str, str] = Field(default={}, exclude_if=lambda select: not select)
    """Column name and Spark SQL over the columns of `schema`: the columns of the rows that go on.

    Each is a column of `schema`, or a cast: ``cast(payload.amount as double)``. Without `select`
    the columns are those of `schema`. Every other field names columns of `select`.
    """
    event_time: str
    """The timestamp column that is the event time."""
    end_time: str | None = None
    """Interval events: the timestamp column of the end, which is exclusive."""
    timezone: str | None = None
    """Time zone of timestamps that carry none. Without it such timestamps are bad values."""
    min_event_time: Instant | None = None
    """Rows before this instant are dead letters. Written as ISO 8601 text."""
    rules: dict[Name, RowRule] = Field(default={}, exclude_if=lambda rules: not rules)
    """Rule name and condition. The rules are checked in this order, after `schema`, `where` and
    `select`, and before everything else.
    """
    barriers: BarrierColumns | None = None
    """How barrier rows and punctuation rows are recognised."""
    edges: EdgeColumns | None = None
    """Edge events: how rows that begin and end a lasting state are recognised."""
    coalesce: CoalesceOptions = CoalesceOptions(joins="hold")
    """How this source's partitions join into its frontier."""
    limits: ReadLimits = ReadLimits()
    """The most that one epoch reads from one partition."""
    bounded: bool = False
    """The source has an end: an object named ``_DONE`` in its folder, after all objects before
    it were read.
    """
    on_bad: Literal["dead_letter", "fail"] = "dead_letter"
    """Unreadable objects and rows go to the dead-letter table, or stop the pipeline with an
    error that names them.
    """

    @model_validator(mode="before")
    @classmethod
    def _keep_topics_strict(cls, value: Any) -> Any:
        # Only objects say in a footer which columns they have, so that those left out are counted.
        if not isinstance(value, dict) or value.get("kind") != "kafka":
            return value
        own = value.get("evolution", {})
        strict = {"evolution": {"added": "dead_letter", **own}} if isinstance(own, dict) else {}
        return {**value, **strict}

    @field_validator("timezone")
    @classmethod
    def _require_known_zone(cls, zone: str | None) -> str | None:
        if zone is not None and zone not in available_timezones():
            raise ValueError(f"{zone!r} is not the name of a time zone, such as Europe/Berlin")
        return zone

    @model_validator(mode="after")
    def _require_plain_names(self) -> Self:
        # The names become parts of SQL in two engines, and of JSON paths.
        names = [*self.columns, *self.select, *self.evolution.renamed]
        unusable = [name for name in names if re.search(r"""["'`\\\x00-\x1f]""", name)]
        if unusable:
            raise ValueError(
                "schema: column names cannot contain quotes, backslashes or control characters:"
                f" {', '.join(map(repr, unusable))}"
            )
        return self

    @model_validator(mode="after")
    def _require_valid_columns(self) -> Self:
        # Every field that names a column is collected first, so that one message form covers them
        # all.
        columns = self.row_columns
        self._require_typed_columns(columns)
        wanted = {"event_time": self.event_time, "end_time": self.end_time}
        if self.barriers:
            wanted |= {"barriers.kind": self.barriers.kind, "barriers.id": self.barriers.id}
        if self.edges:
            wanted |= self.edges.named_columns(columns)
            if self.end_time is not None:
                raise ValueError(
                    "edges: a source has edge events or interval events (end_time), not both"
                )
        for field, column in wanted.items():
            if column is not None and column not in columns:
                raise ValueError(
                    f"{field}: column {column!r} is not in the"
                    f" {'select' if self.select else 'schema'} ({', '.join(columns)})"
                )
        # Ticks are computed from timestamps only: a number has no unit, and a text no agreed form.
        for field in ("event_time", "end_time"):
            column = wanted[field]
            if column is not None and columns[column] != "timestamp":
                raise ValueError(
                    f"{field}: column {column!r} must be a timestamp, not {columns[column]}"
                )
        self._require_location()
        strangers = [new for new in self.evolution.renamed.values() if new not in self.columns]
        if strangers:
            raise ValueError(
                f"evolution.renamed: {', '.join(strangers)} is not in the schema"
                f" ({', '.join(self.columns)})"
            )
        # Outputs add provenance columns such as `_source` and `_seq` to those of the user.
        reserved = [c for c in {**self.columns, **self.select} if c.startswith("_")]
        if reserved:
            raise ValueError(
                f"column names starting with '_' are tidegate's own: {', '.join(reserved)}"
            )
        return self

    def _require_typed_columns(self, columns: dict[str, str]) -> None:
        """Require flat types for the columns of the rows, and none that the source cannot have."""
        for name, kind in columns.items():
            try:
                _validate_column_type(kind)
            except ValueError as error:
                fix = f": write cast({self.select[name]} as TYPE)" if self.select else ""
                where = f"select.{name}" if self.select else f"schema.{name}"
                raise ValueError(f"{where}: {error}{fix}") from None
        nested = [name for name, kind in self.columns.items() if "<" in kind]
        if nested and (self.kafka or self.landing or self.format in ("json", "csv")):
            raise ValueError(
                f"schema: {', '.join(nested)}: JSON is read as text: declare string, and select"
                " from_json(...) or get_json_object(...)"
            )

    @property
    def has_conditions(self) -> bool:
        """Whether `where` or rules judge the rows."""
        return self.where is not None or bool(self.rules)

    @property
    def row_columns(self) -> dict[str, str]:
        """Column name and type of the rows that go on: those of `select`, or else of `schema`."""
        if not self.select:
            return self.columns
        return {
            name: read_cast_type(sql) or self.columns.get(sql.strip(), "untyped")
            for name, sql in self.select.items()
        }

    def _require_location(self) -> None:
        if (self.kind == "kafka") != (self.kafka is not None):
            raise ValueError("kind: kafka and a 'kafka' section go together")
        # An empty path would read the whole bucket, tidegate's own folders included.
        if self.kind == "objects" and not self.path.strip("/"):
            raise ValueError("kind: objects needs a 'path'")
        scheme = self.path.partition("://")[0] if "://" in self.path else "file"
        if scheme not in ("s3", "file"):
            other = _OTHER_STORES.get(scheme, f"'{scheme}'")
            raise ValueError(
                f"path: {other} is not supported in this version; objects are in the store, in"
                " s3://bucket/prefix or in file:///folder"
            )
        self._require_landing_options()
        self._require_table_options()
        if self.kafka is None:
            return
        taken = [
            c for c in (self.kafka.key, self.kafka.timestamp, *self.kafka.headers) if c is not None
        ]
        absent = [c for c in taken if c not in self.columns]
        if absent:
            raise ValueError(
                f"kafka: column {', '.join(absent)} is not in the schema"
                f" ({', '.join(self.columns)})"
            )
        self._require_kafka_columns(self.kafka)
        self._require_kafka_schema(self.kafka)
        if self.bounded:
            raise ValueError("bounded: a topic has no end")

    def _require_kafka_columns(self, kafka: KafkaOptions) -> None:
        if kafka.timestamp is not None and self.columns[kafka.timestamp] != "timestamp":
            raise ValueError(f"kafka.timestamp: column {kafka.timestamp} must be a timestamp")
        # A tombstone has no payload, so its event time must come from what Kafka delivers with
        # it.
        if (
            kafka.tombstones == "row"
            and not self.select
            and self.event_time
            not in (
                kafka.timestamp,
                kafka.key,
                *kafka.headers,
            )
        ):
            raise ValueError(
                f"kafka.tombstones: row: a message without a value has no {self.event_time}; "
                "take the event time from outside the payload, as kafka.timestamp does"
            )

    @staticmethod
    def _require_kafka_schema(kafka: KafkaOptions) -> None:
        # Avro and Protobuf cannot be read without the schema they were written with; two sources of
        # it could contradict each other.
        if kafka.payload != "json" and (kafka.schema_file is None) == (kafka.registry is None):
            raise ValueError(
                f"kafka.schema_file: payload {kafka.payload} needs the writer's schema, or a"
                " kafka.registry"
            )
        if (kafka.payload == "protobuf") != (kafka.message is not None):
            raise ValueError(
                "kafka.message: payload protobuf needs the name of its message, and no other does"
            )
        if kafka.registry is not None and (kafka.payload == "json" or kafka.schema_id is not None):
            raise ValueError(
                "kafka.registry: for Avro and Protobuf, by the number in each message; without a"
                " schema_id"
            )

    def _require_table_options(self) -> None:
        if self.table is None:
            return
        # A table source takes its files from the table's own log. Options that find, group or end
        # loose objects would be ignored without a word, so they are refused.
        plain = (
            self.kind == "objects"
            and self.format == "parquet"
            and self.landing is None
            and self.discovery.order == "keys"
        )
        if not plain or self.partition_by != "source" or self.bounded:
            raise ValueError(
                "table: its commits say what is read: no format, discovery, landing, partition_by"
                " or bounded beside it"
            )
        if (self.table.format == "iceberg") != (
            self.table.catalog is not None and self.table.name is not None
        ):
            raise ValueError("table: iceberg needs 'catalog' and 'name'; delta takes neither")

    def _require_landing_options(self) -> None:
        if self.landing is None:
            return
        # The landing writes one sequence of Parquet objects; their names carry the order that the
        # source reads them in.
        if self.kind != "objects" or self.format != "parquet" or self.partition_by != "source":
            raise ValueError("landing: writes Parquet objects of a source with one partition")
        strangers = [c for c in self.landing.columns if c not in self.columns]
        if strangers:
            raise ValueError(
                f"landing.columns: {', '.join(strangers)} is not in the schema"
                f" ({', '.join(self.columns)})"
            )

    @model_validator(mode="after")
    def _require_frontier(self) -> Self:
        explicit = self.punctuation is not None
        if self.lag is None and not explicit and self.wall_clock is None:
            raise ValueError(
                "a source needs a 'lag' (or 'punctuation', or 'wall_clock'), or its frontier never"
                " moves"
            )
        return self


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
    ``${NAME}`` is replaced by an environment variable of the driver: keep passwords there.
    """
    catalog_options: dict[str, str] = Field(default={})
    """Options of a REST catalog, such as ``token``, ``credential`` or ``warehouse``.

    A value ``env:NAME`` is read from the environment.
    """
    namespace: str | None = None
    """Iceberg namespace; default: the pipeline's name."""
    publish_every: Annotated[int, Field(gt=0)] = 1
    """Number of sealed epochs that one table snapshot contains."""
    max_unpublished: Annotated[int, Field(gt=0)] = 50
    """Largest number of sealed epochs that the tables may lack.

    Beyond it the driver waits, and reports that it waits.
    """
    layout: dict[str, TableLayout] = Field(default={})
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
    """Without new rows, seal an epoch only if a timer or a status changes something, or always."""
    on_bad_checkpoint: Literal["stop", "fork"] = "stop"
    """What a driver does when the newest checkpoint is damaged: stop with an error, or go back
    to the newest intact one by a fork.
    """
    retain: Annotated[int, Field(gt=0)] = 1000
    """Number of completed checkpoints that stay restorable."""
    retain_for: Duration = 86_400_000_000
    """Checkpoints younger than this stay restorable as well, on any timeline."""
    maintain_every: OptionalDuration = 3_600_000_000
    """How often the driver retires checkpoints beyond both bounds and deletes unused objects.

    ``never`` leaves this to `tidegate gc` and Airflow.
    """
    max_clock_step: Annotated[Duration, Field(gt=0)] = 10_000_000
    """The most that an outage counts for timers, and the most of their time that a restart may
    lose.
    """


class SparkSpec(SpecModel):
    """The Spark session of the driver."""

    master: str = "local[2]"
    """Spark master of a driver that is started as a process."""
    driver_memory: str = "2g"
    """Memory of the driver's JVM."""
    jvm: Literal["quick", "throughput"] = "throughput"
    """``quick`` compiles lightly: a new driver seals its first epoch several times sooner, and
    epochs of few rows stay fast. ``throughput`` suits millions of rows per epoch.
    """
    staging: Literal["disk", "bucket"] = "disk"
    """How rows reach tasks on other hosts and come back: over a disk that driver and executors
    share at one path, or through the bucket. A local master ignores it.
    """
    conf: dict[str, str] = Field(default={})
    """Further Spark settings."""

    @property
    def jvm_options(self) -> str:
        """Options of the driver's JVM for `jvm`; empty for ``throughput``.

        A new JVM spends most of its first minute compiling what a small epoch runs a few times.
        """
        return "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" if self.jvm == "quick" else ""


class SubmitSpec(SpecModel):
    """How spark-submit launches the driver.

    Master and deploy mode are in the Airflow connection.
    """

    conn_id: str = "spark_default"
    """Airflow connection that names master and deploy mode."""
    py_files: tuple[str, ...] = ()
    """Paths, as the worker sees them, of Python packages for the driver; tidegate's wheel where
    it is not installed.
    """
    conf: dict[str, str] = Field(default={})
    """Further Spark settings of the submission."""


class SupervisionSpec(SpecModel):
    """What Airflow does with the stream."""

    recover_to: Literal["latest", "latest_healthy"] = "latest"
    """Where a relaunched driver starts: at the newest checkpoint, or at the newest one that
    quality checks did not reject.
    """
    stall_after: Duration = 120_000_000
    """A driver whose step takes this long, and longer than it may, counts as stalled."""
    start_timeout: Annotated[Duration, Field(gt=0)] = 180_000_000
    """A driver that has not taken the lease this long after its launch counts as stalled.

    Choose more than a cluster's queue takes.
    """
    silent_after: OptionalDuration = 3_600_000_000
    """A source without a row for this long is named on the page and in `tidegate status`.

    ``never`` for sources that may be silent.
    """
    freshness: Annotated[Duration, Field(gt=0)] | None = None
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
    announce: Annotated[Duration, Field(gt=0)] | None = None
    """Closed periods of this length become partitions of the windows' Airflow assets, for DAGs
    of your own.
    """
    submit: SubmitSpec | None = None
    """Launch the driver by spark-submit through an Airflow connection.

    Without it the driver is a process on the worker's host.
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
    retries: Annotated[int, Field(ge=0)] = 5
    """How often a failed driver is relaunched before the task fails."""
    retry_delay: Duration = 5_000_000
    """Delay before each relaunch."""
    sweep: str = "*/5 * * * *"
    """Cron expression of the sweep that restarts streams which should run and do not."""
    maintain: str = "30 3 * * *"
    """Cron expression of retention, scrub and index maintenance."""
    owner: str = "tidegate"
    """Owner of the Airflow DAGs."""


class PipelineSpec(SpecModel):
    """One pipeline, as in a YAML file under ``dags/pipelines/``."""

    api_version: Literal["tidegate/v1"] = Field(default=API_VERSION, alias="apiVersion")
    """Version of this format."""
    name: Name
    """Name of the pipeline; it prefixes keys, tables and DAG ids."""
    description: str = ""
    """Free text for people."""
    preset: Literal[
        "tidegate", "nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"
    ] = "tidegate"
    """System whose defaults the options take; see docs/presets.md."""
    sources: dict[SourceName, SourceSpec] = Field(min_length=1)
    """Source name and source. Event time is coalesced over all sources."""
    coalesce: CoalesceOptions = CoalesceOptions()
    """How the sources' frontiers join into the output frontier."""
    release: OrderOptions = OrderOptions()
    """When rows leave to the events table, and what happens to late ones."""
    barriers: BarrierOptions = BarrierOptions()
    """How barriers of several sources are paired and aligned."""
    windows: dict[Name, WindowSpec] = Field(default={})
    """Window name and window; each window is a table."""
    streams: dict[Name, StreamSpec] = Field(default={})
    """Streams that pipes and reducers write to. The stream `events` always exists."""
    pipes: dict[Name, PipeSpec] = Field(default={})
    """Pipe name and pipe: copies rows of one stream to another."""
    reducers: dict[Name, ReducerSpec] = Field(default={})
    """Reducer name and reducer: folds rows of a stream into new rows."""
    outputs: OutputSpec = OutputSpec()
    """Which tables are written, and where."""
    sinks: dict[Name, SinkSpec] = Field(default={})
    """Receivers besides the Iceberg tables: PostgreSQL, Kafka, files, a webhook."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Pace of epochs, retention, and what happens to damaged checkpoints."""
    spark: SparkSpec = SparkSpec()
    """Settings of the driver's Spark session."""
    supervision: SupervisionSpec = SupervisionSpec()
    """What Airflow does with the pipeline."""
    quality: QualitySpec = QualitySpec()
    """Limits and severities of the quality checks."""
    splice: SpliceSpec = SpliceSpec()
    """When late rows are offered for a merge in Airflow."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset_defaults(cls, value: Any) -> Any:
        return apply_preset(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _require_consistent_sections(self) -> Self:
        clash = RESERVED_TABLES & set(self.windows)
        if clash:
            raise ValueError(f"window names {', '.join(sorted(clash))} are reserved for tables")
        # The events and late tables hold the rows of all sources.
        schemas = {json.dumps(s.row_columns, sort_keys=True) for s in self.sources.values()}
        if len(schemas) > 1:
            raise ValueError(
                "all sources of a pipeline share one schema: the same columns with the same types;"
                " a source with other columns needs a 'select'"
            )
        columns = self.columns
        for name, window in self.windows.items():
            missing = [k for k in window.keys if k not in columns and k != "_source"]
            if missing:
                raise ValueError(
                    f"windows.{name}.keys: no column {', '.join(missing)} in the schema (or"
                    " '_source')"
                )
            # These are the other columns of a window's table.
            taken = set(window.aggregates) & {
                *window.keys,
                "window_start",
                "window_end",
                "revision",
                "replaces",
            }
            if taken:
                raise ValueError(
                    f"windows.{name}.aggregates: names already taken: {', '.join(sorted(taken))}"
                )
        # A misspelt table would otherwise be delivered never, without an error.
        for name, sink in self.sinks.items():
            unknown = sorted(set(sink.tables or ()) - set(self.table_names))
            if unknown:
                raise ValueError(
                    f"sinks.{name}.tables: no table {', '.join(unknown)}; there are"
                    f" {', '.join(self.table_names)}"
                )
        for name, source in self.sources.items():
            # A source that imports its own frontier, or one that does not exist, would hold the
            # output frontier without end.
            imported = source.punctuation.import_from if source.punctuation else None
            if imported is not None and (imported not in self.sources or imported == name):
                raise ValueError(
                    f"sources.{name}.punctuation.import_from: no other source named {imported!r}"
                )
        return self

    @model_validator(mode="after")
    def _refuse_edge_conflicts(self) -> Self:
        edges = {
            name: source.edges for name, source in self.sources.items() if source.edges is not None
        }
        punctuations = {name: self.sources[name].punctuation for name in edges}
        for problem in list_edge_conflicts(edges, punctuations, self.release, self.windows):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _require_valid_streams(self) -> Self:
        clash = (RESERVED_TABLES | {REJECTIONS} | set(self.windows)) & set(self.streams)
        if clash:
            raise ValueError(
                f"stream names {', '.join(sorted(clash))} are taken by tables or windows"
            )
        for stream in self.streams.values():
            for kind in stream.columns.values():
                _validate_column_type(kind)
        # Building the graph raises for unknown names, cycles and columns that do not fit.
        _ = self.stream_graph
        return self

    @model_validator(mode="after")
    def _require_events_output(self) -> Self:
        # Without the events table the order buffer would be state that no output shows.
        if not self.outputs.events and self.release.mode is not ReleaseMode.PASS_THROUGH:
            raise ValueError(
                "outputs.events: false leaves nothing to put in order; it needs release.mode:"
                " pass_through"
            )
        if not self.outputs.events and (self.pipes or self.reducers):
            raise ValueError("outputs.events: false leaves pipes and reducers nothing to read")
        return self

    @model_validator(mode="after")
    def _refuse_layout_problems(self) -> Self:
        for problem in (
            list_layout_problems(self.outputs.layout, self._layout_columns())
            if self.outputs.layout
            else ()
        ):
            raise ValueError(problem)
        return self

    def _layout_columns(self) -> dict[str, dict[str, str]]:
        """Table -> column -> type, as far as files can be arranged by it."""
        user: dict[str, dict[str, str]] = dict.fromkeys((EVENTS, LATE), self.columns)
        for name, window in self.windows.items():
            user[name] = {
                key: self.columns.get(key, "string") for key in window.keys
            } | WINDOW_COLUMNS
        for name in self.streams:
            user[name] = {**self.stream_graph.columns[name], **LAYOUT_COLUMNS["<stream>"]}
        return {
            table: {**user.get(table, {}), **LAYOUT_COLUMNS.get(table, {})}
            for table in self.table_names
        }

    @property
    def stream_graph(self) -> StreamGraph:
        """The streams in the order in which rows are dispatched, with columns and attachments."""
        return StreamGraph.build(self.columns, self.streams, self.pipes, self.reducers)

    @property
    def columns(self) -> dict[str, str]:
        """The one schema that the rows of all sources share, behind `select`."""
        return next(iter(self.sources.values())).row_columns

    @property
    def event_time_column(self) -> str:
        """The column of the events and late tables that holds the event time of every row.

        Sources may keep it in different columns of the shared schema. Then the tables have one
        more column, `_event_time`, because files, streams and merges need one name for all rows.
        """
        names = {source.event_time for source in self.sources.values()}
        return names.pop() if len(names) == 1 else EVENT_TIME

    @property
    def row_columns(self) -> dict[str, str]:
        """Columns of the events and late tables: the schema, and `_event_time` if needed."""
        added = {EVENT_TIME: "timestamp"} if self.event_time_column == EVENT_TIME else {}
        return {**self.columns, **added}

    @property
    def barrier_timeout(self) -> int | None:
        """Ticks until an open barrier times out; None for never.

        It is `barriers.timeout`, and without that four times `release.build_window`.
        """
        if self.barriers.timeout is not None:
            return None if self.barriers.timeout == NEVER else self.barriers.timeout
        # The factor is NSCLDAQ's (docs/semantics.md, section 2).
        window = self.release.build_window
        return None if window is None else 4 * window

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of all output tables; `events` is one even if `outputs.events` is off."""
        streams = (*self.streams, REJECTIONS) if self.streams else ()
        built = (BUILT,) if self.release.glom is not None else ()
        return (EVENTS, LATE, *built, *self.windows, *streams, BARRIERS, CHECKPOINTS, DEAD_LETTERS)

    def digest(self) -> str:
        """Return the SHA-256, in hex, of all options on which rows depend; every manifest names it.

        `NON_DATA_SECTIONS` and the arrangement of table files do not count. All others do, also
        those that change no row, such as `checkpoint` and the read limits of sources.
        """
        # Sections that no row depends on are left out: otherwise raising a limit or a timeout would
        # look like a change of the data, and would be checked against the state.
        beside: Any = {**dict.fromkeys(NON_DATA_SECTIONS, True), "outputs": _NON_DATA_OUTPUT_FIELDS}
        fields = self.model_dump(mode="json", by_alias=True, exclude=beside)
        # Without an order, so that specs in the order of the alphabet keep their digest.
        orders = {path: names for path, names in self.orders.items() if names != sorted(names)}
        return hashlib.sha256(
            json.dumps(
                [fields, orders] if orders else fields, sort_keys=True, separators=(",", ":")
            ).encode()
        ).hexdigest()

    @property
    def orders(self) -> dict[str, list[str]]:
        """Dotted field -> its names, for the mappings whose order decides something.

        Sources (rows of one time), rules (which one removes a row), pipes and reducers (rows of one
        stream); and aggregates, whose partial results are numbered in segments.
        """
        return {
            "sources": list(self.sources),
            "pipes": list(self.pipes),
            "reducers": list(self.reducers),
            **{f"sources.{name}.rules": list(one.rules) for name, one in self.sources.items()},
            **{f"windows.{n}.aggregates": list(one.aggregates) for n, one in self.windows.items()},
        }

    def canonical_json(self) -> str:
        """Return the JSON of the spec with preset and defaults applied, names in their order.

        Secrets in it are not masked (`mask_secrets`).
        """
        return json.dumps(self.model_dump(mode="json", by_alias=True), separators=(",", ":"))
