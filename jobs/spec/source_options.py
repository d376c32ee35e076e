"""How the objects of a source are found, read and allowed to change.

The options that only sources have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.event_time_options import (
    LatePolicy,
    OrderOptions,
    PunctuationOptions,
    SpecModel,
)
from tidegate.jobs.spec.window_specs import WindowKind, WindowSpec
from tidegate.time_units import Duration


class ParseOptions(SpecModel):
    """How text becomes values (formats `json` and `csv`, Kafka payloads)."""

    timestamps: Literal["iso", "s", "ms", "us"] = "iso"
    """ISO 8601 text, or a number of seconds, milliseconds or microseconds since 1970 in UTC."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """CSV: what stands between two values."""
    quote: Annotated[str, Field(min_length=1, max_length=1)] = '"'
    """CSV: what surrounds a value that holds a delimiter or a line break."""
    header: bool = True
    """CSV: the first line names the columns; without it they stand in the order of the schema."""
    null: str = ""
    """CSV: the text of an absent value."""


class EvolutionOptions(SpecModel):
    """What happens when an object's columns are not those of the schema.

    Wider declared types always take narrower physical ones; a narrower declared type takes the
    values that fit, and the rows of the others are dead letters.
    """

    added: Literal["dead_letter", "ignore"] = "dead_letter"
    """A column that the schema does not name.

    The object (in JSON lines: the row) is a dead letter, or it is left out.
    """
    missing: Literal["null", "dead_letter"] = "null"
    """A column of the schema that the object lacks reads as null, or makes the object a dead letter."""
    renamed: dict[str, str] = Field(default={})
    """Old name in objects -> name in the schema. An object with both is a dead letter."""


class DiscoveryOptions(SpecModel):
    """How objects are found."""

    order: Literal["keys", "arrival"] = "keys"
    """``keys``: keys grow in arrival order, and the newest is found by listing behind the last one.

    ``arrival``: any names;
    each object is entered once into a log of arrivals in the bucket, and read in the order of that
    log.
    """
    safety_listing: Annotated[Duration, Field(gt=0)] = 600_000_000
    """``arrival``: list everything at least this often.

    In between, objects behind the greatest key and those that the
    bucket's notifications name are found at once."""
    notifications: bool = True
    """``arrival`` on MinIO: listen to the bucket's notifications.

    Without them, or where the bucket has none, the safety
    listing finds late uploads."""


class KafkaOptions(SpecModel):
    """A Kafka topic as a source.

    Its partitions are the source's; offsets are the positions, and stand in the manifest only.
    """

    servers: str
    """``host:port``, comma separated."""
    topic: str
    payload: Literal["json", "avro", "protobuf"] = "json"
    """What a message's value is.

    A JSON object, an Avro record (needs Spark's avro package) or a Protobuf message.
    """
    schema_file: str | None = None
    """File with the writer's schema.

    Avro's JSON, or what ``protoc --include_imports --descriptor_set_out`` writes.
    """
    message: str | None = None
    """Protobuf: full name of the message, package included."""
    schema_id: int | None = None
    """Messages begin with a zero byte and this number, as schema registries have them written.

    Others are dead letters.
    """
    registry: str | None = None
    """Instead of a file.

    The address of a schema registry, or a folder of ``<number>.avsc`` or ``<number>.desc``.
    """
    registry_login: str | None = None
    """``user:password`` for the registry, written as ``env:NAME``."""
    on_unknown_schema: Literal["dead_letter", "wait"] = "dead_letter"
    """A message whose schema's number the registry does not know is a dead letter, or waited for.

    Nothing is read meanwhile. One
    whose schema cannot be used is a dead letter, or ends the driver."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a topic begins that no checkpoint knows.

    Partitions that are added to it later begin at their first message.
    """
    key: str | None = None
    """Column that takes the message's key, as text."""
    timestamp: str | None = None
    """Column of type `timestamp` that takes the message's timestamp."""
    headers: dict[str, str] = Field(default={})
    """Column -> header whose last value it takes, as text."""
    tombstones: Literal["dead_letter", "row"] = "dead_letter"
    """A message without a value.

    A dead letter, or a row with the key, timestamp and headers only, event time included.
    """
    on_gap: Literal["fail", "report"] = "fail"
    """Offsets that the topic no longer holds (retention).

    Stop and say which, or enter the range as a dead letter and go on.
    """
    options: dict[str, str] = Field(default={})
    """Settings of the Kafka client (``security.protocol``, ...).

    A value ``env:NAME`` is read from the environment. Messages of
    transactions are read when they are committed, unless ``isolation.level`` is
    ``read_uncommitted``.
    """


class TableOptions(SpecModel):
    """A lakehouse table at `path` as a source.

    Each of its commits brings the files that it added, once and in order.
    """

    format: Literal["delta", "iceberg"]
    """Delta is read from its own log; Iceberg needs its catalog."""
    on_rewrite: Literal["fail", "skip"] = "fail"
    """A commit that takes rows away or changes them.

    Stop and say which, or enter it as a dead letter and go on behind it.
    Compaction is no such commit: it moves rows, and brings none."""
    start: Literal["earliest", "current"] = "earliest"
    """Where a new source begins.

    With the oldest version that the table still has, or with all that the newest one holds, which
    takes no part in what was deleted or changed before."""
    name: str | None = None
    """Iceberg: ``namespace.table``."""
    catalog: str | None = None
    """Iceberg: address of a REST catalog (``http``), or SQLAlchemy address of an SQL catalog."""
    catalog_options: dict[str, str] = Field(default={})
    """Iceberg: what else its catalog needs: ``name`` (of an SQL catalog), ``token``, ...

    ``env:NAME`` reads the environment.
    """


class LandingOptions(SpecModel):
    """Any format of ``spark.readStream`` as the origin of a source's objects, which ``tidegate land`` writes."""

    format: str
    """``rate``, ``json``, ``socket``, ``kinesis``, ....

    Whatever the session has a connector for.
    """
    options: dict[str, str] = Field(default={})
    """Of the reader. A value ``env:NAME`` is read from the environment."""
    columns: dict[str, str] = Field(default={})
    """Column of the schema -> Spark SQL over the stream's columns.

    By default the column of the same name.
    """
    read_as: str | None = None
    """The stream's own schema as DDL, for formats that need to be told (files)."""
    every: Annotated[Duration, Field(gt=0)] = 5_000_000
    """How often what has come is written as one object."""


def resolve_environment_value(field: str, value: str, environment: Mapping[str, str]) -> str:
    """A setting as it is, or, written ``env:NAME``, as the environment has it.

    Secrets never stand in a spec.

    Raises:
        ConfigurationError: the variable is not set.
    """
    variable = value.removeprefix("env:")
    if variable == value:
        return value
    if variable in environment:
        return environment[variable]
    raise ConfigurationError(
        f"{field}: the environment variable {variable} is not set",
        code="spec.no_secret",
        kept="nothing was started or changed",
        advice=f"set {variable} where the driver runs",
    )


# Edge events: rows that begin and end something that lasts (semantics.md section 1, shapes; section
# 4.3).


class EdgeColumns(SpecModel):
    """Which rows of a source are edges, and which start and end belong together.

    A start edge opens: it counts from its event time on in every window that closes, without an
    end, until the first end edge of its keys behind it in its partition closes it, at that row's
    event time. A row of any other kind is an ordinary row.
    """

    kind: str
    """Column that tells start edges from end edges."""
    start: str = "start"
    end: str = "end"
    keys: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        AfterValidator(lambda keys: tuple(dict.fromkeys(keys))),
    ]
    """Columns that a start and its end have in common."""

    def named_columns(self, schema: Mapping[str, str]) -> dict[str, str]:
        """The columns that are named here, by field.

        Raises:
            ValueError: what tells starts from ends is no text.
        """
        if schema.get(self.kind, "string") != "string":
            raise ValueError(
                f"edges.kind: column {self.kind!r} must be a string, not {schema[self.kind]}"
            )
        return {"edges.kind": self.kind, **{f"edges.keys: {key}": key for key in self.keys}}


def list_edge_conflicts(
    edges: Mapping[str, EdgeColumns],
    punctuations: Mapping[str, PunctuationOptions | None],
    release: OrderOptions,
    windows: Mapping[str, WindowSpec],
) -> Iterator[str]:
    """What cannot be beside edge events, each in a sentence.

    `edges` are those of the sources that have any.
    """
    if not edges:
        return
    for name, columns in edges.items():
        if columns.start == columns.end:
            yield f"sources.{name}.edges: start and end are both {columns.start!r}"
        punctuation = punctuations[name]
        if punctuation is not None and punctuation.on_violation == "adjust":
            yield (
                f"sources.{name}.punctuation.on_violation: an edge is not adjusted: choose error or"
                " drop"
            )
    if release.on_late is LatePolicy.ADJUST:
        yield "release.on_late: an edge is not adjusted: choose another policy"
    for name, window in windows.items():
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
        yield "results are final when they are told: lateness must be 0 and late_unit event"
    if window.emit != "close" or window.fire_every is not None or window.zero_rows:
        yield (
            "results are told when the window closes: emit must be close, without fire_every and"
            " zero_rows"
        )
    if window.on_late is LatePolicy.ADJUST:
        yield "an edge is not adjusted: choose another on_late"
