"""The ``sinks:`` section.

Followers of the log besides the Iceberg tables (design.md section 2, step 6).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.jobs.spec.event_time_options import SpecModel
from tidegate.time_units import Duration


class _SinkSpec(SpecModel):
    tables: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Output tables to follow; default: all of them."""


class _StandardSinkSpec(_SinkSpec):
    start: Literal["beginning", "head"] = "beginning"
    """Where a new sink begins: with the first epoch, or with the next one that is sealed."""


class PostgresSinkSpec(_SinkSpec):
    """Transactional: an epoch's rows and the ledger that says so are one transaction."""

    kind: Literal["postgres"]
    url: str = Field(pattern=r"^(postgres(ql)?://|\$\{)")
    """``postgresql://user@host/database``.

    ``${NAME}`` stands for an environment variable of the driver: keep passwords there.
    """
    namespace: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_]{0,62}$")
    """The schema in the database; default: the pipeline's name."""
    windows: Literal["append", "upsert"] = "append"
    """Window tables: every revision is a row, or one row per result, the newest revision of it."""


class FilesSinkSpec(_StandardSinkSpec):
    """At least once.

    A file per epoch and table, named after the epoch, so that a repetition overwrites itself.
    """

    kind: Literal["files"]
    path: str
    """A folder or ``s3://bucket/prefix``."""
    format: Literal["parquet", "jsonl"] = "parquet"


class WebhookSinkSpec(_StandardSinkSpec):
    """At least once.

    POST requests whose id names pipeline, epoch, table and part; repetitions carry the same id.
    """

    kind: Literal["webhook"]
    url: str = Field(pattern=r"^(https?://|\$\{)")
    """Where to send; ``${NAME}`` stands for an environment variable of the driver."""
    rows: Annotated[int, Field(gt=0)] = 1000
    """Rows in one request, at most."""
    timeout: Annotated[Duration, Field(gt=0)] = 10_000_000
    """How long to wait for an answer."""


class KafkaSinkSpec(_StandardSinkSpec):
    """A message per row, with the epoch's checkpoint id in the header ``tidegate-epoch``."""

    kind: Literal["kafka"]
    servers: str
    """``host:port``, comma separated."""
    topic: str
    """``{table}`` stands for the table's name."""
    delivery: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """``exactly_once``.

    An epoch is a transaction, for readers of committed messages; ``pip install "tidegate[kafka]"``.
    """
    options: dict[str, str] = Field(default={})
    """Settings of the Kafka client: Java's names, with `exactly_once` librdkafka's.

    ``env:NAME`` is read from the environment.
    """


SinkSpec = Annotated[
    PostgresSinkSpec | FilesSinkSpec | WebhookSinkSpec | KafkaSinkSpec, Field(discriminator="kind")
]
