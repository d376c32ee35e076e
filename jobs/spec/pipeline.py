"""The pipeline spec: what a YAML file under ``dags/pipelines/`` says, as one set of frozen models.

The same models are the Python API: ``PipelineSpec(name="flights", sources={...}, ...)`` equals the
YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tidegate.jobs.spec.event_time_options import (
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
    STREAM_COLUMNS,
    SYSTEM_COLUMNS,
    WINDOW_COLUMNS,
    TableLayout,
    list_layout_problems,
)
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import Duration

API_VERSION: Final = "tidegate/v1"
EVENTS: Final = "events"
LATE: Final = "late"
BARRIERS: Final = "barriers"
BUILT: Final = "built"
CHECKPOINTS: Final = "checkpoints"
DEAD_LETTERS: Final = "dead_letters"
NON_DATA_SECTIONS: Final = {"description", "quality", "supervision", "spark", "sinks", "splice"}
_NON_DATA_OUTPUT_FIELDS: Final = {
    "layout",
    "compact",
    "file_mb",
}  # of `outputs`: where rows lie, not which there are
RESERVED_TABLES: Final = frozenset({EVENTS, LATE, BUILT, BARRIERS, CHECKPOINTS, DEAD_LETTERS})

_NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")
_COLUMN_TYPE_PATTERN: Final = re.compile(
    r"(string|boolean|int|long|float|double|date|timestamp|binary|decimal\(\d{1,2},\s*\d{1,2}\))\Z"
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
    if not _COLUMN_TYPE_PATTERN.match(value):
        allowed = "string, boolean, int, long, float, double, date, timestamp, binary, decimal(p,s)"
        raise ValueError(f"unknown column type {value!r}; allowed: {allowed}")
    return value


Name = Annotated[str, AfterValidator(_validate_name)]
SourceName = Annotated[str, AfterValidator(_validate_source_name)]
ColumnType = Annotated[str, AfterValidator(_validate_column_type)]


class BarrierColumns(SpecModel):
    """Where barrier events and punctuation rows stand among a source's rows.

    A row whose ``kind`` column equals ``data`` (or is null) is data; ``punctuation`` names the
    value of punctuation rows; any value listed in ``types`` is a barrier of that type.
    """

    kind: str
    """Column that tells data rows from barriers and punctuation."""
    data: str = "data"
    types: tuple[str, ...] = ()
    id: str | None = None
    """Integer column with the barrier's id; needed for identity `id`."""
    punctuation: str | None = None


class ReadLimits(SpecModel):
    """The most that one epoch takes from one partition of a source."""

    objects: Annotated[int, Field(gt=0)] | None = None
    """Without it 1,000 of any size."""
    bytes: Annotated[int, Field(gt=0)] | None = None
    """Of objects as they lie in the store: none is begun beyond."""
    rows: Annotated[int, Field(gt=0)] | None = None


class SourceSpec(FrontierOptions):
    """One source: where its rows lie, what they look like and how its frontier follows them."""

    kind: Literal["objects", "kafka"] = "objects"
    kafka: KafkaOptions | None = None
    path: str = ""
    """Folder of objects in arrival order, relative to the store, or a full ``s3://`` / ``file://`` address."""
    format: Literal["parquet", "json", "csv", "avro", "orc"] = "parquet"
    """``json`` is one JSON object a line.

    Text may be compressed: by ``.gz``, ``.bz2``, ``.zst`` or ``.lz4`` at the key's end.
    """
    parse: ParseOptions = ParseOptions()
    evolution: EvolutionOptions = EvolutionOptions()
    discovery: DiscoveryOptions = DiscoveryOptions()
    table: TableOptions | None = None
    """The objects are the files of a Delta or Iceberg table."""
    landing: LandingOptions | None = None
    """Where the objects come from, if `tidegate land` writes them."""
    partition_by: Literal["source", "folder"] = "source"
    """One partition for the whole source, or one per folder directly below `path`."""
    columns: dict[str, ColumnType] = Field(alias="schema", min_length=1)
    """Column -> type. A column not listed here makes its object a dead letter."""
    event_time: str
    """The timestamp column that is the event time."""
    end_time: str | None = None
    """Interval events: the timestamp column of the (exclusive) end."""
    timezone: str | None = None
    """Zone of naive timestamps; without it they are bad input."""
    min_event_time: int | None = None
    """Rows before this instant (ISO text in YAML) are bad input."""
    barriers: BarrierColumns | None = None
    edges: EdgeColumns | None = None
    """Edge events: rows that begin and end something that lasts."""
    coalesce: CoalesceOptions = CoalesceOptions(joins="hold")
    """How this source's partitions join into its frontier."""
    limits: ReadLimits = ReadLimits()
    bounded: bool = False
    """The source ends when an object named ``_DONE`` stands in its folder and all before it was read."""
    on_bad: Literal["dead_letter", "fail"] = "dead_letter"
    """Unreadable objects and rows.

    Keep them in the dead-letter table, or stop the pipeline naming them.
    """

    @field_validator("min_event_time", mode="before")
    @classmethod
    def _parse_min_event_time(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return round(aware.timestamp() * 1_000_000)
        return value

    @model_validator(mode="after")
    def _require_valid_columns(self) -> Self:
        wanted = {"event_time": self.event_time, "end_time": self.end_time}
        if self.barriers:
            wanted |= {"barriers.kind": self.barriers.kind, "barriers.id": self.barriers.id}
        if self.edges:
            wanted |= self.edges.named_columns(self.columns)
            if self.end_time is not None:
                raise ValueError(
                    "edges: a source has edge events or interval events (end_time), not both"
                )
        for field, column in wanted.items():
            if column is not None and column not in self.columns:
                raise ValueError(
                    f"{field}: column {column!r} is not in the schema ({', '.join(self.columns)})"
                )
        for field in ("event_time", "end_time"):
            column = wanted[field]
            if column is not None and self.columns[column] != "timestamp":
                raise ValueError(
                    f"{field}: column {column!r} must be a timestamp, not {self.columns[column]}"
                )
        self._require_location()
        strangers = [new for new in self.evolution.renamed.values() if new not in self.columns]
        if strangers:
            raise ValueError(
                f"evolution.renamed: {', '.join(strangers)} is not in the schema"
                f" ({', '.join(self.columns)})"
            )
        reserved = [c for c in self.columns if c.startswith("_")]
        if reserved:
            raise ValueError(
                f"column names starting with '_' are tidegate's own: {', '.join(reserved)}"
            )
        return self

    def _require_location(self) -> None:
        if (self.kind == "kafka") != (self.kafka is not None):
            raise ValueError("kind: kafka and a 'kafka' section go together")
        if self.kind == "objects" and not self.path.strip("/"):
            raise ValueError("kind: objects needs a 'path'")
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
        if kafka.tombstones == "row" and self.event_time not in (
            kafka.timestamp,
            kafka.key,
            *kafka.headers,
        ):
            raise ValueError(
                f"kafka.tombstones: row: a message without a value has no {self.event_time}; "
                "take the event time from beside it, as kafka.timestamp does"
            )

    @staticmethod
    def _require_kafka_schema(kafka: KafkaOptions) -> None:
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
    """Whether rows that leave are written to the events table.

    ``false`` only counts them: for pipelines that want
    windows and late rows alone. Late rows can then not be merged back, as that takes the rows of
    their windows.
    """

    catalog: str | None = None
    """SQLAlchemy address of an Iceberg SQL catalog, or ``http(s)://`` address of an Iceberg REST catalog; default: a SQLite file
    beside the local store or in the work folder."""
    catalog_options: dict[str, str] = Field(default={})
    """Of a REST catalog: ``token``, ``credential``, ``warehouse``, ...

    A value ``env:NAME`` is read from the environment.
    """
    namespace: str | None = None
    """Iceberg namespace; default: the pipeline's name."""
    publish_every: Annotated[int, Field(gt=0)] = 1
    """Sealed epochs gathered into one table snapshot."""
    max_unpublished: Annotated[int, Field(gt=0)] = 50
    """The driver waits, and says so, when more sealed epochs than this are not in the tables."""
    layout: dict[str, TableLayout] = Field(default={})
    """Table -> how its files are partitioned and sorted; default.

    Files per epoch, rows as they left.
    """
    compact: bool = True
    """Whether maintenance merges small files of older epochs.

    On an S3 store it needs a ``catalog`` that all publishers share.
    """
    file_mb: Annotated[int, Field(gt=0, le=1024)] = 64
    """Size that merged files grow to, in MB of Parquet."""


class CheckpointSpec(SpecModel):
    """Epoch pace and what happens to bad checkpoints."""

    min_interval: Duration = 0
    """At least this long between the starts of two epochs."""
    idle_interval: Duration = 1_000_000
    """How long to wait before looking again when there was nothing to read."""
    idle_epochs: Literal["on_change", "always"] = "on_change"
    """Without rows, seal an epoch only if the decision changes something (a timer, a status), or always."""
    on_bad_checkpoint: Literal["stop", "fork"] = "stop"
    retain: Annotated[int, Field(gt=0)] = 1000
    """Completed checkpoints kept restorable."""
    retain_for: Duration = 86_400_000_000
    """Checkpoints younger than this stay as well, on any timeline."""
    maintain_every: OptionalDuration = 3_600_000_000
    """How often the driver retires what is beyond both bounds and deletes what nothing needs.

    ``never`` leaves it to others.
    """
    max_clock_step: Annotated[Duration, Field(gt=0)] = 10_000_000
    """The most the pipeline clock advances in one epoch, so that an outage expires nothing by itself."""


class SparkSpec(SpecModel):
    """The Spark session of the driver."""

    master: str = "local[2]"
    driver_memory: str = "2g"
    jvm: Literal["quick", "throughput"] = "throughput"
    """``quick`` compiles lightly.

    A new driver seals its first epoch several times sooner, and epochs of few rows stay fast;
    ``throughput`` is for pipelines with millions of rows an epoch."""
    staging: Literal["disk", "bucket"] = "disk"
    """How rows get to tasks on other hosts and back.

    Over a disk that driver and executors share at one path, or through the
    bucket. Without meaning for a local master."""
    conf: dict[str, str] = Field(default={})


class SubmitSpec(SpecModel):
    """How spark-submit launches the driver.

    Master and deploy mode stand in the Airflow connection.
    """

    conn_id: str = "spark_default"
    py_files: tuple[str, ...] = ()
    """Paths of what Python needs in the driver, as the worker sees them.

    Tidegate's wheel, where it is not installed.
    """
    conf: dict[str, str] = Field(default={})


class SupervisionSpec(SpecModel):
    """What Airflow does with the stream."""

    recover_to: Literal["latest", "latest_healthy"] = "latest"
    stall_after: Duration = 120_000_000
    """No finished step for this long counts as stalled."""
    start_timeout: Annotated[Duration, Field(gt=0)] = 180_000_000
    """A driver that has not taken the lease this long after its launch counts as stalled.

    Longer than a cluster's queue.
    """
    silent_after: OptionalDuration = 3_600_000_000
    """A source that says nothing for this long is named on the page and in the status.

    ``never`` for those that may.
    """
    rotate_after: OptionalDuration = 86_400_000_000
    """The stream's Airflow run is followed by another after this time, which adopts the driver.

    ``never`` keeps one run.
    """
    backfill: str | None = None
    """Cron of the comparison with a batch run over the period before; only by hand without it."""
    announce: Annotated[Duration, Field(gt=0)] | None = None
    """Closed periods of this length become partitions of the windows' Airflow assets, for DAGs of your own."""
    submit: SubmitSpec | None = None
    """Launch by spark-submit, through an Airflow connection.

    Without it the driver is a process on the worker's host.
    """
    approval: bool = False
    """A restore asked for in Airflow waits for the approval of another person, who sees the impact report."""
    approvers: tuple[str, ...] = ()
    """User ids who may approve.

    Everybody who may see the task, but for whoever asked, when empty.
    """
    approval_timeout: OptionalDuration = 86_400_000_000
    """An unanswered request fails after this time."""
    retries: Annotated[int, Field(ge=0)] = 5
    retry_delay: Duration = 5_000_000
    sweep: str = "*/5 * * * *"
    """Cron of the sweep that brings back what should run."""
    maintain: str = "30 3 * * *"
    """Cron of retention, scrub and index."""
    owner: str = "tidegate"


class PipelineSpec(SpecModel):
    """One pipeline, as in a YAML file under ``dags/pipelines/``."""

    api_version: Literal["tidegate/v1"] = Field(default=API_VERSION, alias="apiVersion")
    name: Name
    description: str = ""
    preset: Literal[
        "tidegate", "nscldaq", "streaminsight", "hazelcast", "flink", "pipet", "wire"
    ] = "tidegate"
    """Whose defaults the options take; see presets.py."""
    sources: dict[SourceName, SourceSpec] = Field(min_length=1)
    coalesce: CoalesceOptions = CoalesceOptions()
    """How the sources' frontiers join into the output frontier."""
    release: OrderOptions = OrderOptions()
    barriers: BarrierOptions = BarrierOptions()
    windows: dict[Name, WindowSpec] = Field(default={})
    streams: dict[Name, StreamSpec] = Field(default={})
    """Streams that pipes and reducers write to; `events` is there by itself."""
    pipes: dict[Name, PipeSpec] = Field(default={})
    reducers: dict[Name, ReducerSpec] = Field(default={})
    outputs: OutputSpec = OutputSpec()
    sinks: dict[Name, SinkSpec] = Field(default={})
    """Followers of the log besides the Iceberg tables: PostgreSQL, files, a webhook."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    spark: SparkSpec = SparkSpec()
    supervision: SupervisionSpec = SupervisionSpec()
    quality: QualitySpec = QualitySpec()
    """Limits and severities of the quality suites; see expectations/."""
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
        schemas = {json.dumps(s.columns, sort_keys=True) for s in self.sources.values()}
        if len(schemas) > 1:
            raise ValueError(
                "all sources of a pipeline share one schema: the same columns with the same types"
            )
        columns = next(iter(self.sources.values())).columns
        for name, window in self.windows.items():
            missing = [k for k in window.keys if k not in columns and k != "_source"]
            if missing:
                raise ValueError(
                    f"windows.{name}.keys: no column {', '.join(missing)} in the schema (or"
                    " '_source')"
                )
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
        for name, sink in self.sinks.items():
            unknown = sorted(set(sink.tables or ()) - set(self.table_names))
            if unknown:
                raise ValueError(
                    f"sinks.{name}.tables: no table {', '.join(unknown)}; there are"
                    f" {', '.join(self.table_names)}"
                )
        for name, source in self.sources.items():
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
        _ = self.stream_graph
        return self

    @model_validator(mode="after")
    def _require_events_output(self) -> Self:
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
            user[name] = {**self.stream_graph.columns[name], **STREAM_COLUMNS}
        return {
            table: {**user.get(table, {}), **SYSTEM_COLUMNS.get(table, {})}
            for table in self.table_names
        }

    @property
    def stream_graph(self) -> StreamGraph:
        """Streams in order, with their columns, readers and writers."""
        return StreamGraph.build(self.columns, self.streams, self.pipes, self.reducers)

    @property
    def columns(self) -> dict[str, str]:
        """The one schema that all sources share."""
        return next(iter(self.sources.values())).columns

    @property
    def barrier_timeout(self) -> int | None:
        """Ticks until an open barrier times out: its own, else four build windows, else never."""
        if self.barriers.timeout is not None:
            return self.barriers.timeout
        window = self.release.build_window
        return None if window is None else 4 * window

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of all output tables."""
        streams = (*self.streams, REJECTIONS) if self.streams else ()
        built = (BUILT,) if self.release.glom is not None else ()
        return (EVENTS, LATE, *built, *self.windows, *streams, BARRIERS, CHECKPOINTS, DEAD_LETTERS)

    def digest(self) -> str:
        """sha256 of all that rows depend on: stands in every manifest.

        Limits, supervision and Spark's settings do not count.
        """
        beside: Any = {**dict.fromkeys(NON_DATA_SECTIONS, True), "outputs": _NON_DATA_OUTPUT_FIELDS}
        fields = self.model_dump(mode="json", by_alias=True, exclude=beside)
        return hashlib.sha256(
            json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def canonical_json(self) -> str:
        """Canonical JSON of the spec with the preset applied."""
        return json.dumps(
            self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":")
        )
