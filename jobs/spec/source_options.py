"""Options that only sources have: how their objects are found, read and allowed to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidegate.time_units import PositiveDuration

from .errors import SECRET_MISSING
from .event_time_options import SpecModel
from .variables import replace_variables


class ParseOptions(SpecModel):
    """How text becomes values (formats `json` and `csv`, Kafka payloads)."""

    timestamps: Literal["iso", "s", "ms", "us"] = "iso"
    """ISO 8601 text, or a number of seconds, milliseconds or microseconds since 1970 in UTC."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """CSV: the separator between two values."""
    quote: Annotated[str, Field(min_length=1, max_length=1)] = '"'
    """CSV: what surrounds a value that holds a delimiter or a line break."""
    header: bool = True
    """CSV: the first line names the columns; without it they are in the order of the schema."""
    null: str = ""
    """CSV: the text of an absent value."""


class EvolutionOptions(SpecModel):
    """What happens when an object's columns are not those of the schema.

    Wider declared types always take narrower physical ones; a narrower declared type takes the
    values that fit, and the rows of the others are dead letters.
    """

    added: Literal["dead_letter", "ignore"] = "ignore"
    """A column that the schema does not list is left out and reported, or makes the object (in
    JSON lines and topics: the row) a dead letter. In topics the default is ``dead_letter``.
    """
    missing: Literal["null", "dead_letter"] = "null"
    """A schema column that the object lacks is read as null and reported, or makes the object a
    dead letter.
    """
    renamed: dict[str, str] = {}
    """Name in the objects and name in the schema. An object with both names is a dead letter."""


class DiscoveryOptions(SpecModel):
    """How objects are found."""

    order: Literal["keys", "arrival"] = "keys"
    """``keys``: keys grow in arrival order; new objects are found by listing after the last key.

    ``arrival``: keys are arbitrary; each object is entered once into an arrival log in the bucket
    and is read in the order of that log.
    """
    safety_listing: PositiveDuration = 600_000_000
    """``arrival``: list everything at least this often.

    Between listings, objects after the greatest key and objects named by bucket notifications are
    found at once. ``keys``: how often the newest keys are listed again, to count objects that
    appeared behind the last one read and were skipped.
    """
    notifications: bool = True
    """``arrival`` on MinIO: listen to the bucket's notifications.

    Without them the safety listing finds late uploads.
    """


class KafkaOptions(SpecModel):
    """A Kafka topic as a source.

    Its partitions are the source's; offsets are the positions, and only the manifest keeps them.
    """

    servers: str
    """Brokers as ``host:port``, separated by commas."""
    topic: str
    """Name of the topic."""
    payload: Literal["json", "avro", "protobuf"] = "json"
    """Format of a message's value: a JSON object, an Avro record or a Protobuf message."""
    schema_file: str | None = None
    """File with the writer's schema: Avro's JSON, or what ``protoc --include_imports
    --descriptor_set_out`` writes.
    """
    message: str | None = None
    """Protobuf: full name of the message, package included."""
    schema_id: int | None = None
    """Messages begin with a zero byte and this number, as schema registries write them.

    Other messages are dead letters.
    """
    registry: str | None = None
    """Address of a schema registry, or a folder of ``<number>.avsc`` or ``<number>.desc``
    files; replaces `schema_file`.
    """
    registry_login: str | None = None
    """``user:password`` for the registry, written as ``env:NAME``."""
    on_unknown_schema: Literal["dead_letter", "wait"] = "dead_letter"
    """A message with a schema number that the registry does not have becomes a dead letter, or
    the source waits and reads nothing. A message whose schema cannot be used becomes a dead
    letter, or ends the driver.
    """
    start: Literal["earliest", "latest"] = "earliest"
    """Where a topic without a checkpoint begins.

    Partitions that are added later begin at their first message.
    """
    key: str | None = None
    """Column that takes the message's key, as text."""
    timestamp: str | None = None
    """Column of type `timestamp` that takes the message's timestamp."""
    headers: dict[str, str] = {}
    """Column -> header whose last value it takes, as text."""
    tombstones: Literal["dead_letter", "row"] = "dead_letter"
    """A message without a value becomes a dead letter, or a row with key, timestamp and headers
    only, event time included.
    """
    on_gap: Literal["fail", "report"] = "fail"
    """Offsets that retention has removed from the topic: stop and name them, or record the
    range as a dead letter and continue.
    """
    options: dict[str, str] = {}
    """Settings of the Kafka client, such as ``security.protocol``.

    A value ``env:NAME`` is read from the environment. Only committed messages of transactions are
    read, unless ``isolation.level`` is ``read_uncommitted``.
    """


class TableOptions(SpecModel):
    """A lakehouse table at `path` as a source.

    Each of its commits brings the files that it added, once and in order.
    """

    format: Literal["delta", "iceberg"]
    """Format of the table. Delta is read from its log; Iceberg needs its catalog."""
    on_rewrite: Literal["fail", "skip"] = "fail"
    """A commit that removes or changes rows: stop and name it, or record it as a dead letter
    and continue after it. Compaction is not such a commit.
    """
    start: Literal["earliest", "current"] = "earliest"
    """Where a new source begins: at the oldest version that the table still has, or with the
    content of the newest version.
    """
    name: str | None = None
    """Iceberg: ``namespace.table``."""
    catalog: str | None = None
    """Iceberg: address of a REST catalog (``http``), or SQLAlchemy address of an SQL catalog.

    ``${NAME}`` is replaced by an environment variable of the driver, not in the stored spec.
    """
    catalog_options: dict[str, str] = {}
    """Iceberg: further options of the catalog, such as ``name`` (SQL catalog) or ``token``.

    A value ``env:NAME`` is read from the environment.
    """


class LandingOptions(SpecModel):
    """The stream, of any ``spark.readStream`` format, that `tidegate land` writes as objects."""

    format: str
    """Format of ``spark.readStream``: ``rate``, ``json``, ``socket``, ``kinesis`` or any other
    that the session has a connector for.
    """
    options: dict[str, str] = {}
    """Options of the reader. A value ``env:NAME`` is read from the environment."""
    columns: dict[str, str] = {}
    """Column of the schema and a Spark SQL expression over the stream's columns.

    By default the column of the same name is taken.
    """
    read_as: str | None = None
    """The stream's schema as DDL, for formats that need it (files)."""
    every: PositiveDuration = 5_000_000
    """How often the rows that have arrived are written as one object."""


def resolve_environment_value(field: str, value: str, environment: Mapping[str, str]) -> str:
    """Return a setting; for ``env:NAME`` return that variable of the environment.

    So a spec need not contain secrets. `field` names the setting in the error.

    Raises:
        ConfigurationError: the variable is not set.
    """
    # Specs are stored in the bucket and shown on the page, so they name the variable only.
    variable = value.removeprefix("env:")
    if variable == value:
        return value
    if variable in environment:
        return environment[variable]
    raise SECRET_MISSING(field=field, variable=variable)


def resolve_environment_values(
    field: str, settings: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return settings by their names below `field`, as `resolve_environment_value` does each."""
    return {
        name: resolve_environment_value(f"{field}.{name}", value, environment)
        for name, value in settings.items()
    }


def resolve_address(field: str, address: str, environment: Mapping[str, str]) -> str:
    """Replace the variables of an address (`replace_variables`).

    Raises:
        ConfigurationError: a variable is not set.
    """
    text, missing = replace_variables(address, environment)
    if missing:
        raise SECRET_MISSING(field=field, variable=missing[0])
    return text


# Edge events: rows that begin and end a lasting state (docs/semantics.md, section 4.3).


class EdgeColumns(SpecModel):
    """Which rows of a source are edges, and which start and end belong together.

    A start edge opens: it counts from its event time on in every window that closes, without an
    end, until the first end edge of its keys behind it in its partition closes it, at that row's
    event time. A row of any other kind is an ordinary row.
    """

    kind: str
    """Column that tells start edges from end edges."""
    start: str = "start"
    """Value of `kind` that marks start edges."""
    end: str = "end"
    """Value of `kind` that marks end edges."""
    keys: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        AfterValidator(lambda keys: tuple(dict.fromkeys(keys))),
    ]
    """Columns in which a start edge and its end edge agree."""

    def named_columns(self, schema: Mapping[str, str]) -> dict[str, str]:
        """Return field -> column for the columns that are named here.

        Raises:
            ValueError: the column that distinguishes starts from ends is not text. A column that
                `schema` lacks is accepted here.
        """
        # A missing column is reported with all others by the caller; here it counts as text.
        if schema.get(self.kind, "string") != "string":
            raise ValueError(
                f"edges.kind: column {self.kind!r} must be a string, not {schema[self.kind]}"
            )
        return {"edges.kind": self.kind, **{f"edges.keys: {key}": key for key in self.keys}}
