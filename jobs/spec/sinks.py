"""The ``sinks:`` section.

Followers of the log besides the Iceberg tables (docs/architecture.md, section 2).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.jobs.spec.event_time_options import SpecModel
from tidegate.time_units import Duration


class _SinkSpec(SpecModel):
    tables: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Output tables that the sink receives. By default all of them."""


class _StandardSinkSpec(_SinkSpec):
    start: Literal["beginning", "head"] = "beginning"
    """Where a new sink begins: at the first epoch, or at the next epoch that is sealed."""


class PostgresSinkSpec(_SinkSpec):
    """Transactional: an epoch's rows and the ledger that says so are one transaction."""

    kind: Literal["postgres"]
    """Kind of the sink."""
    url: str = Field(pattern=r"^(postgres(ql)?://|\$\{)")
    """``postgresql://user@host/database``.

    ``${NAME}`` is replaced by an environment variable of the driver: keep passwords there.
    """
    namespace: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_]{0,62}$")
    """Schema in the database; by default the pipeline's name."""
    windows: Literal["append", "upsert"] = "append"
    """Window tables: a row per revision, or a row per result with its newest revision."""


class FilesSinkSpec(_StandardSinkSpec):
    """At least once.

    One or more files per epoch and table, named after the epoch, so that a repetition overwrites
    itself. Only files that an object in ``_epochs/`` names count.
    """

    kind: Literal["files"]
    """Kind of the sink."""
    path: str
    """A folder or ``s3://bucket/prefix``.

    A relative folder is in the pipeline's store, as the folders of sources are.
    """
    format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files."""


class WebhookSinkSpec(_StandardSinkSpec):
    """At least once.

    POST requests whose id names pipeline, sink, epoch, table and part; repetitions carry the same
    id, in the header ``Idempotency-Key``.
    """

    kind: Literal["webhook"]
    """Kind of the sink."""
    url: str = Field(pattern=r"^(https?://|\$\{)")
    """Address that receives the rows; ``${NAME}`` is replaced by an environment variable of the
    driver.
    """
    rows: Annotated[int, Field(gt=0)] = 1000
    """Largest number of rows in one request."""
    timeout: Annotated[Duration, Field(gt=0)] = 10_000_000
    """How long the sink waits for an answer."""


class KafkaSinkSpec(_StandardSinkSpec):
    """A message per row, with the epoch's checkpoint id in the header ``tidegate-epoch``."""

    kind: Literal["kafka"]
    """Kind of the sink."""
    servers: str
    """Brokers as ``host:port``, separated by commas."""
    topic: str
    """Name of the topic; ``{table}`` is replaced by the table's name."""
    delivery: Literal["at_least_once", "exactly_once"] = "at_least_once"
    """With ``exactly_once`` an epoch is one transaction, for readers of committed messages;
    this needs ``pip install "tidegate[kafka]"``.
    """
    options: dict[str, str] = Field(default={})
    """Settings of the Kafka client: Java's names, with `exactly_once` librdkafka's.

    A value ``env:NAME`` is read from the environment.
    """


SinkSpec = Annotated[
    PostgresSinkSpec | FilesSinkSpec | WebhookSinkSpec | KafkaSinkSpec, Field(discriminator="kind")
]
