"""The errors of the Spark mover and of reading topics with Spark."""

from __future__ import annotations

from tidegate.errors import ConfigurationError, ErrorDefinition, PoisonError, TransientError

_SEALED_KEPT = "everything sealed so far"
_NOTHING_DONE = "everything; nothing was read or written"
_MESSAGE_KEPT = "everything sealed so far; the message stays in its topic"

# Spark and its hosts

SPARK_FAILED = ErrorDefinition(
    "spark.failed",
    PoisonError,
    "Spark could not compute this epoch: {cause}",
    kept="everything sealed before this epoch",
    advice="check the spec's expressions against the rows",
)
MESSAGES_UNREADABLE = ErrorDefinition(
    "spark.failed",
    PoisonError,
    "source {source}: Spark could not read its messages: {cause}",
    kept=_SEALED_KEPT,
    advice="correct what the message names; if it names nothing of yours, it is a defect",
)
EXECUTORS_LOST = ErrorDefinition(
    "spark.executors_lost",
    TransientError,
    "{what}: Spark lost the executors of this epoch ({sign})",
    kept="everything sealed; this epoch is done again",
    advice="tidegate tries again; if it goes on, look at the executors' memory and hosts",
    retry_after=1.0,
)
WORKER_LOST = ErrorDefinition(
    "spark.worker_lost",
    TransientError,
    "{what}: Spark lost a worker that read messages ({sign})",
    kept="everything sealed so far",
    advice="tidegate tries again; check the memory of the machine",
)
REDUCER_FAILED = ErrorDefinition(
    "spark.fold_failed",
    PoisonError,
    "Spark could not run a reducer: {cause}",
    kept="everything sealed before this epoch",
    advice="the reducer's module has to be importable where Spark's tasks run",
)
STAGING_NEEDS_S3 = ErrorDefinition(
    "spark.no_bucket",
    ConfigurationError,
    "{pipeline}: spark.staging: bucket needs a store in S3, and the store is {url}",
    advice="name the bucket by --store s3://..., or set spark.staging: disk",
)
BUCKET_UNREADABLE = ErrorDefinition(
    "spark.no_bucket",
    ConfigurationError,
    "{pipeline}: Spark's tasks cannot read the bucket: {cause}",
    kept=_NOTHING_DONE,
    advice="Spark needs hadoop-aws (docs/clusters.md, Clusters), and its hosts have to reach the"
    " bucket's endpoint",
)
NO_SHARED_DISK = ErrorDefinition(
    "spark.no_shared_disk",
    ConfigurationError,
    "{pipeline}: Spark does not see the driver's scratch folder {folder}",
    kept=_NOTHING_DONE,
    advice="set spark.staging: bucket; or set the driver's TMPDIR to a folder that all hosts of the"
    " cluster share at one path, and fs.defaultFS to file:///",
)

# Rows that a policy refuses

LATE_ROW = ErrorDefinition(
    "row.late",
    PoisonError,
    "{source}/{partition} row {seq}: event time {time} is late for {output} (frontier {frontier}),"
    " and on_late is error",
    kept=_SEALED_KEPT,
    advice="choose another on_late policy, or correct the source",
)
PUNCTUATION_REGRESSED = ErrorDefinition(
    "punctuation.regress",
    PoisonError,
    "{member} row {seq}: punctuation went back from {before} to {after}",
    kept=_SEALED_KEPT,
    advice="correct the source, or set punctuation.regress: ignore",
)

# Messages of topics and their schemas

AVRO_NOT_A_RECORD = ErrorDefinition(
    "kafka.bad_schema", ConfigurationError, "no Avro record schema: {schema!r}: {error}"
)
AVRO_REFUSED = ErrorDefinition(
    "kafka.bad_schema", ConfigurationError, "Spark cannot read the Avro schema: {cause}"
)
SCHEMA_FILE_UNREADABLE = ErrorDefinition(
    "kafka.bad_schema", ConfigurationError, "kafka.schema_file {file} cannot be read: {cause}"
)
NOT_A_DESCRIPTOR_SET = ErrorDefinition(
    "kafka.bad_schema", ConfigurationError, "the Protobuf schema is not a descriptor set"
)
PROTOBUF_UNUSABLE = ErrorDefinition(
    "kafka.bad_schema", ConfigurationError, "the Protobuf schema cannot be used: {error}"
)
NO_SUCH_MESSAGE = ErrorDefinition(
    "kafka.bad_schema",
    ConfigurationError,
    "the Protobuf schema has no message {message} of its own",
    advice="give kafka.message the full name, package included; messages inside others cannot be"
    " named",
)
REGISTERED_SCHEMA_UNUSABLE = ErrorDefinition(
    "kafka.bad_schema",
    ConfigurationError,
    "source {source}: schema {number} of {registry} cannot be used ({place})",
    kept=_MESSAGE_KEPT,
    advice="set kafka.on_unknown_schema: dead_letter to go on: the dead letters say what is wrong"
    " with the schema",
)
SCHEMA_NOT_REGISTERED = ErrorDefinition(
    "kafka.unknown_schema",
    TransientError,
    "source {source}: schema {number} is not known to the registry {registry} ({place})",
    kept=_MESSAGE_KEPT,
    advice="register the schema, and the driver goes on by itself; or set kafka.on_unknown_schema:"
    " dead_letter",
    retry_after=5.0,
)
COPY_UNREADABLE = ErrorDefinition(
    "kafka.copy_unreadable",
    TransientError,
    "the driver's copy of {key} cannot be read",
    kept="everything sealed so far; the messages stay in their topic",
    advice="it is fetched again by itself; if that does not help, look at the disk of the driver's"
    " scratch folder",
    retry_after=1.0,
)
