"""One source of a pipeline: where its rows lie, and which rows with which columns go on."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal
from zoneinfo import available_timezones

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from tidegate.errors import suggest_name
from tidegate.time_units import Instant

from .event_time_options import (
    CoalesceOptions,
    FrontierOptions,
    LatePolicy,
    OmittedIfEmpty,
    OmittedIfNone,
    OrderOptions,
    SpecModel,
)
from .row_rules import (
    RULE_DROPPED,
    RULE_FAILED,
    RULE_QUARANTINED,
    read_cast_type,
)
from .source_options import (
    DiscoveryOptions,
    EdgeColumns,
    EvolutionOptions,
    KafkaOptions,
    LandingOptions,
    ParseOptions,
    TableOptions,
)
from .window_specs import WindowKind, WindowSpec

_REASON_OF_SEVERITY = {
    "quarantine": RULE_QUARANTINED,
    "drop": RULE_DROPPED,
    "fail": RULE_FAILED,
}
_OTHER_STORES = {
    "s3a": "'s3a' (write s3://)",
    **dict.fromkeys(("gs", "gcs"), "Google Cloud Storage"),
    **dict.fromkeys(("abfs", "abfss", "az", "azure", "wasb", "wasbs", "adl"), "Azure storage"),
}
# Names become parts of keys, tables, DAG ids and metric labels: the pattern is what all of these
# accept.
_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,62}\Z")
_FLAT_TYPE = (
    r"(?:string|boolean|int|long|float|double|date|timestamp|binary|decimal\(\d{1,2},\s*\d{1,2}\))"
)
_NESTED_TYPE = re.compile(
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


def validate_column_type(value: str) -> str:
    """Return a type without nested ones.

    Raises:
        ValueError: it is not such a type; the message lists them.
    """
    if not re.fullmatch(_FLAT_TYPE, value):
        allowed = "string, boolean, int, long, float, double, date, timestamp, binary, decimal(p,s)"
        raise ValueError(f"unknown column type {value!r}; allowed: {allowed}")
    return value


def _validate_field_type(value: str) -> str:
    inner = value
    while (shorter := _NESTED_TYPE.sub("int", inner)) != inner:  # from the inside out
        inner = shorter
    validate_column_type(inner)
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

    objects: PositiveInt | None = None
    """Number of objects; without it 1,000 objects of any size."""
    bytes: PositiveInt | None = None
    """Size of the objects in the store.

    An object that begins beyond the limit waits for the next epoch.
    """
    rows: PositiveInt | None = None
    """Number of rows; an object may be read in several epochs."""


class RowRule(SpecModel):
    """A condition that every data row of a source has to meet."""

    predicate: str
    """Condition in Spark SQL over the columns of `select`, or else of `schema`.

    A row meets the rule only if it is true; null breaks the rule.
    """
    severity: Literal["warn", "drop", "quarantine", "fail"] = "warn"
    """What happens to a row that breaks the rule.

    ``warn`` counts it and lets it go on. ``drop`` counts it and keeps it nowhere. ``quarantine``
    sends it to the dead letters. ``fail`` stops the pipeline with an error that names the row.
    """

    @property
    def removal_reason(self) -> str | None:
        """What becomes of the rows that the rule removes; None if it only warns.

        Only `RULE_QUARANTINED` is the reason of a dead letter.
        """
        return _REASON_OF_SEVERITY.get(self.severity)


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
    where: OmittedIfNone[str] = None
    """Condition in Spark SQL over the columns of `schema`: data rows for which it is not true
    are counted as filtered, and kept nowhere.
    """
    select: OmittedIfEmpty[dict[str, str]] = {}
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
    rules: OmittedIfEmpty[dict[Name, RowRule]] = {}
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

    def _list_problems(self) -> Iterator[str]:
        yield from self._list_name_problems()
        yield from self._list_type_problems()
        yield from self._list_column_problems()
        yield from self._list_location_problems()
        yield from self._list_unknown_columns()
        if self.kafka is not None:
            yield from self._list_kafka_problems(self.kafka)
        if self.lag is None and self.punctuation is None and self.wall_clock is None:
            yield (
                "a source needs a 'lag' (or 'punctuation', or 'wall_clock'), or its frontier never"
                " moves"
            )

    def _list_name_problems(self) -> Iterator[str]:
        # The names become parts of SQL in two engines, and of JSON paths.
        names = [*self.columns, *self.select, *self.evolution.renamed]
        unusable = [name for name in names if re.search(r"""["'`\\\x00-\x1f]""", name)]
        if unusable:
            yield (
                "schema: column names cannot contain quotes, backslashes or control characters:"
                f" {', '.join(map(repr, unusable))}"
            )
        # Outputs add provenance columns such as `_source` and `_seq` to those of the user.
        reserved = [c for c in {**self.columns, **self.select} if c.startswith("_")]
        if reserved:
            yield f"column names starting with '_' are tidegate's own: {', '.join(reserved)}"

    def _list_type_problems(self) -> Iterator[str]:
        for name, kind in self.row_columns.items():
            try:
                validate_column_type(kind)
            except ValueError as error:
                fix = f": write cast({self.select[name]} as TYPE)" if self.select else ""
                yield f"{'select' if self.select else 'schema'}.{name}: {error}{fix}"
        nested = [name for name, kind in self.columns.items() if "<" in kind]
        if nested and (self.kafka or self.landing or self.format in ("json", "csv")):
            yield (
                f"schema: {', '.join(nested)}: JSON is read as text: declare string, and select"
                " from_json(...) or get_json_object(...)"
            )

    def _list_column_problems(self) -> Iterator[str]:
        columns = self.row_columns
        by_case = {name.lower(): name for name in self.columns}
        alike = [name for name in self.columns if by_case[name.lower()] != name]
        # DuckDB would give both columns the value of the first.
        for name in alike:
            yield (
                f"schema: {name} and {by_case[name.lower()]} differ in upper and lower case only,"
                " which cannot be told apart: declare one of them"
            )
        # Every field that names a column, so that one message form covers them all.
        wanted = {"event_time": self.event_time, "end_time": self.end_time}
        if self.barriers:
            wanted |= {"barriers.kind": self.barriers.kind, "barriers.id": self.barriers.id}
        if self.edges:
            wanted |= self.edges.named_columns(columns)
            if self.end_time is not None:
                yield "edges: a source has edge events or interval events (end_time), not both"
        for field, column in wanted.items():
            if column is not None and column not in columns:
                where = f"{'select' if self.select else 'schema'} ({', '.join(columns)})"
                hint = suggest_name(column, columns)
                yield f"{field}: column {column!r} is not in the {where}{hint}"
        # Ticks are computed from timestamps only: a number has no unit, and a text no agreed form.
        for field in ("event_time", "end_time"):
            column = wanted[field]
            if column is not None and columns[column] != "timestamp":
                yield (
                    f"{field}: column {column!r} must be a timestamp, not"
                    f" {columns[column]}{self._advise_timestamp(columns[column])}"
                )

    def _advise_timestamp(self, kind: str) -> str:
        """Say how a column of this type becomes a timestamp; empty if there is no one way."""
        if self.select:
            return "; cast it in 'select'"
        if kind in ("long", "double") and (self.kafka or self.format in ("json", "csv")):
            return "; declare timestamp, and parse: {timestamps: ms} for milliseconds (or s, us)"
        return ""

    @property
    def has_conditions(self) -> bool:
        """Whether `where` or rules judge the rows."""
        return self.where is not None or bool(self.rules)

    @property
    def row_columns(self) -> dict[str, str]:
        """Column name and type of the rows that go on: those of `select`, or else of `schema`."""
        kinds = {
            name: read_cast_type(sql) or self.columns.get(sql.strip(), "untyped")
            for name, sql in self.select.items()
        }
        # `decimal(6, 2)` and `decimal(6,2)` are one type.
        return {name: kind.replace(" ", "") for name, kind in (kinds or self.columns).items()}

    @property
    def width(self) -> int:
        """Columns that are read or selected, whichever are more."""
        return max(len(self.columns), len(self.row_columns))

    def _list_unknown_columns(self) -> Iterator[str]:
        named: dict[str, Iterable[str | None]] = {
            "evolution.renamed:": self.evolution.renamed.values()
        }
        if self.landing:
            named["landing.columns:"] = self.landing.columns
        if self.kafka:
            named["kafka: column"] = (self.kafka.key, self.kafka.timestamp, *self.kafka.headers)
        for field, columns in named.items():
            absent = [c for c in columns if c is not None and c not in self.columns]
            if absent:
                yield (
                    f"{field} {', '.join(absent)} is not in the schema ({', '.join(self.columns)})"
                )

    def _list_location_problems(self) -> Iterator[str]:
        if (self.kind == "kafka") != (self.kafka is not None):
            yield "kind: kafka and a 'kafka' section go together"
        # An empty path would read the whole bucket, tidegate's own folders included.
        if self.kind == "objects" and not self.path.strip("/"):
            yield "kind: objects needs a 'path'"
        scheme = self.path.partition("://")[0] if "://" in self.path else "file"
        if scheme not in ("s3", "file"):
            other = _OTHER_STORES.get(scheme, f"'{scheme}'")
            yield (
                f"path: {other} is not supported in this version; objects are in the store, in"
                " s3://bucket/prefix or in file:///folder"
            )
        is_plain = self.kind == "objects" and self.format == "parquet"
        is_plain = is_plain and self.partition_by == "source"
        # The landing writes one sequence of Parquet objects; their names carry the order that the
        # source reads them in.
        if self.landing is not None and not is_plain:
            yield "landing: writes Parquet objects of a source with one partition"
        if self.table is None:
            return
        # A table source takes its files from the table's own log. Options that find, group or end
        # loose objects would be ignored without a word, so they are refused.
        if not is_plain or self.landing or self.discovery.order != "keys" or self.bounded:
            yield (
                "table: its commits say what is read: no format, discovery, landing, partition_by"
                " or bounded beside it"
            )
        has_catalog = self.table.catalog is not None and self.table.name is not None
        if (self.table.format == "iceberg") != has_catalog:
            yield "table: iceberg needs 'catalog' and 'name'; delta takes neither"

    def _list_kafka_problems(self, kafka: KafkaOptions) -> Iterator[str]:
        if kafka.timestamp is not None and self.columns[kafka.timestamp] != "timestamp":
            yield f"kafka.timestamp: column {kafka.timestamp} must be a timestamp"
        # A tombstone has no payload, so its event time must come from what Kafka delivers with
        # it.
        beside = (kafka.timestamp, kafka.key, *kafka.headers)
        if kafka.tombstones == "row" and not self.select and self.event_time not in beside:
            yield (
                f"kafka.tombstones: row: a message without a value has no {self.event_time}; "
                "take the event time from outside the payload, as kafka.timestamp does"
            )
        # Avro and Protobuf cannot be read without the schema they were written with; two sources of
        # it could contradict each other.
        if kafka.payload != "json" and (kafka.schema_file is None) == (kafka.registry is None):
            yield (
                f"kafka.schema_file: payload {kafka.payload} needs the writer's schema, or a"
                " kafka.registry"
            )
        if (kafka.payload == "protobuf") != (kafka.message is not None):
            yield (
                "kafka.message: payload protobuf needs the name of its message, and no other does"
            )
        if kafka.registry is not None and (kafka.payload == "json" or kafka.schema_id is not None):
            yield (
                "kafka.registry: for Avro and Protobuf, by the number in each message; without a"
                " schema_id"
            )
        if self.bounded:
            yield "bounded: a topic has no end"


def list_edge_conflicts(
    sources: Mapping[str, SourceSpec], release: OrderOptions, windows: Mapping[str, WindowSpec]
) -> Iterator[str]:
    """Return which options cannot be combined with edge events, a sentence each."""
    with_edges = {name: one for name, one in sources.items() if one.edges is not None}
    for name, source in with_edges.items():
        # Every edge would then open a state and none would end it.
        if source.edges is not None and source.edges.start == source.edges.end:
            yield f"sources.{name}.edges: start and end are both {source.edges.start!r}"
        # An adjusted row gets another event time: the state would begin or end at a time that no
        # input row has.
        if source.punctuation is not None and source.punctuation.on_violation == "adjust":
            yield (
                f"sources.{name}.punctuation.on_violation: an edge is not adjusted: choose error or"
                " drop"
            )
    if with_edges and release.on_late is LatePolicy.ADJUST:
        yield "release.on_late: an edge is not adjusted: choose another policy"
    for name, window in windows.items() if with_edges else ():
        yield from (
            f"windows.{name}: over edge events {reason}"
            for reason in _list_edge_window_conflicts(window)
        )


def _list_edge_window_conflicts(window: WindowSpec) -> Iterator[str]:
    """A window tells each result once, when it closes.

    So a late end edge changes nothing that readers hold.
    """
    if window.kind is WindowKind.SESSION:
        yield "a session would never end: take a tumbling or sliding window"
    if window.lateness != 0 or window.late_unit != "event":
        yield "results are final when they are written: lateness must be 0 and late_unit event"
    if window.emit != "close" or window.fire_every is not None or window.zero_rows:
        yield (
            "results are written when the window closes: emit must be close, without fire_every and"
            " zero_rows"
        )
    if window.on_late is LatePolicy.ADJUST:
        yield "an edge is not adjusted: choose another on_late"
