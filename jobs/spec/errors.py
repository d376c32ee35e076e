"""The errors of reading and checking a pipeline spec."""

from __future__ import annotations

from typing import Final

from tidegate.errors import load_catalogue

_NO_JOIN = "tidegate has no joins; join the tables that it writes"
_NO_DEDUPLICATION = (
    "tidegate removes no duplicates; a reducer can (docs/streams.md), or the reader of the table"
)
_CASE_WHEN = (
    "'where' of a source leaves rows out, and so can an aggregate:"
    " sum(case when CONDITION then x end)"
)

NO_TABLE_SINK: Final = (
    "tidegate writes Iceberg tables by itself, and no Delta tables; it can read both"
)

FOREIGN_FIELDS: Final = {
    "filter": ("where", _CASE_WHEN),
    "where": ("where", _CASE_WHEN),
    **dict.fromkeys(
        ("select", "transform", "with_column", "with_columns", "derived", "map"),
        ("select", "'select' of a source derives columns; aggregates take Spark SQL expressions"),
    ),
    **dict.fromkeys(("join", "joins", "lookup", "enrich"), ("", _NO_JOIN)),
    **dict.fromkeys(
        ("dedup", "deduplicate", "deduplication", "distinct", "drop_duplicates"),
        ("", _NO_DEDUPLICATION),
    ),
    "format": ("format", NO_TABLE_SINK),
    "from": ("from", f"only pipes and reducers have it, windows see all events; {_CASE_WHEN}"),
    "watermark": ("lag", "the frontier is the watermark; a source's 'lag' sets it"),
    "watermark_delay": ("lag", "write 'lag' at the source"),
    "allowed_lateness": ("lateness", "write 'lateness' at the window"),
    "group_by": ("keys", "write 'keys' at the window"),
    "topic": ("", "write kind: kafka and kafka: {servers: HOST:PORT, topic: NAME}"),
    "trigger": ("min_interval", "write checkpoint: {min_interval: 10s}"),
}
"""Field of another tool -> our field, and what to say where there is no such field."""

__getattr__ = load_catalogue(__name__)
