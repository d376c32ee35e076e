"""Error catalogue of the sources: objects, lakehouse tables, Kafka and its schema registry."""

from __future__ import annotations

from typing import Final

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_SEALED: Final = "everything sealed so far"
_NOTHING_STARTED: Final = "nothing was started or changed"

# Any source

CHANGED_WHILE_READ: Final = ErrorDefinition(
    "source.changed",
    TransientError,
    "source {source}: {what} while it was read",
    kept="everything sealed so far; nothing of this epoch was sealed",
    advice="the epoch is planned again by itself",
    retry_after=1.0,
)

# Objects

OBJECT_VANISHED: Final = ErrorDefinition(
    "source.vanished",
    TransientError,
    "{uri} vanished while source {source} looked at it",
    kept=_SEALED,
    advice="objects of a source must stay; the cut is planned again without it",
    retry_after=1.0,
)

# Lakehouse tables

TABLE_REWRITTEN: Final = ErrorDefinition(
    "table.rewritten",
    PoisonError,
    "source {source}: version {version} of {table} ({operation}) removed or changed rows",
    kept=_SEALED,
    advice="set table.on_rewrite: skip to continue after it, with a dead letter that names it; or"
    " read the table under a new source name",
)
TABLE_GAP: Final = ErrorDefinition(
    "table.gap",
    PoisonError,
    "source {source}: {table} has forgotten what came after version {version} ({detail})",
    kept=_SEALED,
    advice="keep a table's history for longer than its reader may be away; read the table again"
    " under a new source name",
)
TABLE_UNSUPPORTED: Final = ErrorDefinition(
    "table.unsupported",
    ConfigurationError,
    "source {source}: {table} {what}",
    kept=_SEALED,
    advice="rewrite the table without it, or land it with Spark's own connector (see"
    " docs/landing.md)",
)
TABLE_ABSENT: Final = ErrorDefinition(
    "table.absent",
    TransientError,
    "source {source}: there is no {format} table at {table} ({detail})",
    kept=_SEALED,
    advice="create the table, or correct path and table; tidegate looks again",
    retry_after=5.0,
)
TABLE_UNAVAILABLE: Final = ErrorDefinition(
    "table.unavailable",
    TransientError,
    "source {source}: {table}: {what} ({detail})",
    kept=_SEALED,
    advice="check the catalog and the store; tidegate tries again by itself",
    retry_after=2.0,
)
TABLE_CATALOG_DENIED: Final = ErrorDefinition(
    "table.catalog_denied",
    ConfigurationError,
    "source {source}: the catalog {catalog} refuses it: {detail}",
    kept=_SEALED,
    advice="set table.catalog_options (token or credential, as env:NAME) and the right to read the"
    " table",
)

# Kafka

KAFKA_UNAVAILABLE: Final = ErrorDefinition(
    "kafka.unavailable",
    TransientError,
    "Kafka at {servers} could not be reached ({detail})",
    kept=_SEALED,
    advice="check that the brokers run and that their advertised addresses can be reached from"
    " here; tidegate tries again",
    retry_after=2.0,
)
KAFKA_CERTIFICATE: Final = ErrorDefinition(
    "kafka.unavailable",
    TransientError,
    "Kafka at {servers} could not be reached (its certificate: {detail}; nothing was sent)",
    kept=_SEALED,
    advice="renew it, or name its CA in ssl.truststore.*; tidegate tries again",
    retry_after=2.0,
)
KAFKA_NO_TOPIC: Final = ErrorDefinition(
    "kafka.no_topic",
    TransientError,
    "there is no topic {topic} at {servers}",
    kept=_SEALED,
    advice="create the topic, or correct kafka.topic; tidegate looks again",
    retry_after=5.0,
)
KAFKA_DENIED: Final = ErrorDefinition(
    "kafka.denied",
    ConfigurationError,
    "Kafka at {servers} refuses this client: {detail}",
    kept=_SEALED,
    advice="check kafka.options and the rights on the topic: describe and read",
)
KAFKA_NO_CLIENT: Final = ErrorDefinition(
    "kafka.no_client",
    ConfigurationError,
    "the driver's JVM has no Kafka client",
    kept=_NOTHING_STARTED,
    advice="leave spark.jars and spark.jars.packages out of spark.conf, or name"
    " spark-sql-kafka-0-10 there",
)
KAFKA_NO_JVM: Final = ErrorDefinition(
    "kafka.no_jvm",
    ConfigurationError,
    "a Kafka source needs a Spark session with a JVM of its own; Spark Connect has none",
    kept=_NOTHING_STARTED,
    advice="use a spark.master other than sc://, or land the topic (see docs/landing.md)",
)
KAFKA_OTHER_TOPIC: Final = ErrorDefinition(
    "kafka.truncated",
    PoisonError,
    "{topic} partition {partition} {evidence}: it is not the topic that source {source} read",
    kept=_SEALED,
    advice="was the topic deleted and created again? Give the source another name to read it from"
    " its beginning",
)
KAFKA_GAP: Final = ErrorDefinition(
    "kafka.gap",
    PoisonError,
    "offsets {first} to {last} of {topic} partition {partition} are gone before source {source}"
    " read them (retention)",
    kept=_SEALED,
    advice="set kafka.on_gap: report to continue after the gap; a dead letter then names it",
)

# Schema registry

NO_SCHEMA_FOLDER: Final = ErrorDefinition(
    "kafka.no_registry", ConfigurationError, "kafka.registry: there is no folder {folder}"
)
REGISTRY_DENIED: Final = ErrorDefinition(
    "kafka.registry_denied",
    ConfigurationError,
    "the registry {address} refuses to tell schema {number} ({status})",
    kept=_SEALED,
    advice="set kafka.registry_login to env:NAME, with user:password in that variable",
)
REGISTRY_UNAVAILABLE: Final = ErrorDefinition(
    "kafka.registry",
    TransientError,
    "the schema registry {address} could not be reached ({detail})",
    kept=_SEALED,
    advice="check kafka.registry and that the registry runs; tidegate tries again",
    retry_after=2.0,
)
