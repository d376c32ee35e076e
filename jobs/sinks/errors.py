"""Error catalogue of the tables, the sinks, their compaction and their readers."""

from __future__ import annotations

from tidegate.errors import (
    ConfigurationError,
    ErrorDefinition,
    FencedError,
    PoisonError,
    TransientError,
)

_TABLES_LATER = "everything sealed; the tables catch up later"
_SINK_LATER = "everything sealed; the sink catches up later"
_SINK = "sink {sink} of {pipeline}"
_AHEAD = (
    " is at slot {slot} of timeline {timeline}, but the log ends at slot {head} of timeline"
    " {head_timeline}"
)


class LedgerMovedError(TransientError):
    """Another publisher moved the ledger. Nothing was applied; the caller starts again."""


# Followers: tables and sinks

CONTENDED = ErrorDefinition(
    "sink.contended", TransientError, "other publishers of {what} kept winning", retry_after=1.0
)
TABLE_FENCED = ErrorDefinition(
    "sink.fenced",
    FencedError,
    "table {table} of {pipeline}" + _AHEAD,
    kept="the tables; nothing was changed",
    advice="check that the store is the one these tables were made from",
)
SINK_FENCED = ErrorDefinition(
    "sink.fenced",
    FencedError,
    _SINK + _AHEAD,
    kept="everything in the sink; nothing was changed",
    advice="check that the store is the one this sink was filled from",
)
TABLE_OF_OTHER_PIPELINE = ErrorDefinition(
    "sink.other_pipeline",
    ConfigurationError,
    "the table {table} belongs to another pipeline (uid {owner}, not {uid})",
    kept="the tables; nothing was changed",
    advice="set outputs.namespace or outputs.catalog to one that no other pipeline uses",
)
SINK_OF_OTHER_PIPELINE = ErrorDefinition(
    "sink.other_pipeline",
    ConfigurationError,
    _SINK + " was filled by another pipeline (uid {owner}, not {uid})",
    kept="everything in the sink; nothing was changed",
    advice="give the sink another name and another target",
)
TARGET_TABLE_TAKEN = ErrorDefinition(
    "sink.table_taken",
    ConfigurationError,
    _SINK + " may not write to the table {table}: sink {owner_sink} of the pipeline with uid"
    " {owner} does",
    kept="everything in the table; nothing was changed",
    advice="give the sink a namespace of its own; if the other sink is gone, drop the table and its"
    " row in tidegate_tables",
)
FILE_MISSING = ErrorDefinition(
    "sink.file_missing",
    PoisonError,
    "a file of {pipeline}'s tables is gone: {cause}",
    kept="all other files",
    advice="look with: tidegate checkpoints verify {pipeline}",
)
CATALOG_DENIED = ErrorDefinition(
    "sink.catalog_denied",
    ConfigurationError,
    "the catalog {catalog} refuses {pipeline}: {cause}",
    kept=_TABLES_LATER,
    advice="set outputs.catalog_options (token or credential, as env:NAME) and the rights on the"
    " namespace",
)
TABLES_UNREACHABLE = ErrorDefinition(
    "sink.unavailable",
    TransientError,
    "the tables of {pipeline} cannot be reached: {cause}",
    kept=_TABLES_LATER,
    advice="check the store and the catalog; tidegate tries again by itself",
    retry_after=2.0,
)
OTHER_ROWS = ErrorDefinition(
    "sink.other_rows",
    PoisonError,
    "{address} has {rows} rows, not {expected}",
    kept="the sealed epochs; the table shows the ones before",
    advice="find out who wrote it; once it is moved away, the driver writes it again",
)
TABLE_MISFIT = ErrorDefinition(
    "sink.misfit",
    PoisonError,
    "a file of an epoch does not fit the table {table}: {cause}",
    kept="the sealed epochs; the table shows the ones before",
    advice="if the spec's columns changed, give the pipeline a new name or outputs.namespace",
)
SINK_MISFIT = ErrorDefinition(
    "sink.misfit",
    PoisonError,
    _SINK + ": {cause}",
    kept="the sealed epochs; the sink shows the ones before",
    advice="correct the table in PostgreSQL, or give the sink another namespace",
)
SINK_UNAVAILABLE = ErrorDefinition(
    "sink.unavailable",
    TransientError,
    _SINK + ": {cause}",
    kept=_SINK_LATER,
    advice="{remedy}; tidegate tries again by itself",
    retry_after=1.0,
)
SINK_REFUSED = ErrorDefinition(
    "sink.refused",
    ConfigurationError,
    _SINK + ": {cause}",
    kept="everything sealed",
    advice="correct {remedy}",
)
WEBHOOK_REFUSED = ErrorDefinition(
    "sink.webhook_refused",
    TransientError,
    _SINK + ": {cause}",
    kept=_SINK_LATER,
    advice="correct the receiver, or sinks.{sink}.url; tidegate tries again by itself",
    retry_after=30.0,
)
LEDGER_MOVED = ErrorDefinition(
    "sink.moved", LedgerMovedError, "the ledger of {sink} is at {position}, not {expected}"
)
PRODUCER_FENCED = ErrorDefinition(
    "sink.moved", LedgerMovedError, "another publisher took over sink {sink}"
)
EPOCH_RETIRED = ErrorDefinition(
    "sink.retired",
    PoisonError,
    _SINK + " needs slot {slot}, which was retired",
    kept="everything in the sink",
    advice="take the old rows from the tables (tidegate tables {pipeline} ...), and start the sink"
    " under another name with: start: head",
)
WAITS_FOR_TABLES = ErrorDefinition(
    "sink.waits_for_tables",
    TransientError,
    _SINK + " waits for the Iceberg tables, which do not show slot {slot} yet",
    retry_after=1.0,
)
MESSAGE_TOO_LARGE = ErrorDefinition(
    "sink.too_large",
    ConfigurationError,
    _SINK + ": a row is too large for a message: {cause}",
    kept="everything sealed; this sink stays where it is",
    advice="raise max.message.bytes of the topic and, in sinks.{sink}.options, max.request.size"
    " (exactly_once: message.max.bytes); or leave the column out of the schema",
)
NO_VARIABLE = ErrorDefinition(
    "sink.no_variable",
    ConfigurationError,
    "sinks.{sink}: the environment variable {variable} is not set",
    advice="set {variable} where the driver is started",
)
NO_CLIENT_LIBRARY = ErrorDefinition(
    "sink.no_driver",
    ConfigurationError,
    "{what} needs {package}, which is not installed",
    advice='install it: pip install "tidegate[{extra}]"',
)

# Readers, compaction, and copies of a store

COMPACTION_UNAVAILABLE = ErrorDefinition(
    "compaction.unavailable",
    TransientError,
    "the tables of {pipeline} cannot be compacted now: {cause}",
    kept="the tables",
    advice="check the store and the catalog; the next maintenance tries again",
    retry_after=60.0,
)
NOT_PUBLISHED = ErrorDefinition(
    "tables.not_published",
    ConfigurationError,
    "the tables of {pipeline} show slots up to {published}, not {slot} yet",
    advice="wait until the epoch is published, or ask for an older one",
)
UNKNOWN_TABLE = ErrorDefinition(
    "tables.unknown",
    ConfigurationError,
    "{pipeline} has no table {table!r}",
    advice="choose one of: {tables}",
)
TABLE_UNREADABLE = ErrorDefinition(
    "tables.unavailable",
    TransientError,
    "table {table} of {pipeline} cannot be read: {cause}",
    advice="check the store and try again",
    retry_after=2.0,
)
EXPORT_FAILED = ErrorDefinition(
    "tables.export",
    ConfigurationError,
    "cannot write {path}: {cause}",
    advice="choose another file with --out",
)
NOT_A_COPY = ErrorDefinition(
    "identity.not_adopted",
    ConfigurationError,
    "{store} is not a copy",
    kept="nothing to adopt",
    advice="run it as it is",
)
COPY_LACKS_ROWS = ErrorDefinition(
    "identity.not_adopted",
    ConfigurationError,
    "epochs of {pipeline} were retired: their rows are in the original's tables only, whose"
    " metadata names absolute addresses",
    kept="the copy, which every reading command can read",
    advice="move the copy to the original's address",
)
