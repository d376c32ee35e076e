"""Landing: a Structured Streaming query writes what any ``spark.readStream`` format brings into an append-only log of objects.

    <path>/_landing/<generation>.json    put-if-absent: which checkpoint folder writes this generation
    <path>/_landing/status.json          the newest batch, for people
    <path>/<generation>-<batch>.parquet  put-if-absent: one object per batch that had rows

Spark's own checkpoint says which offsets a batch holds; the bucket says which batches are landed. After a crash Spark runs the
last batch again under the same number, finds its object there, and goes on: once, whatever was killed when. Two things follow:

* A checkpoint folder that is lost would number its batches from 0 again, and all of them would look landed. So each generation
  belongs to one folder by a random id, and another folder is refused until somebody asks for a new generation, knowing that the
  origin may bring rows again.
* The origin must be able to repeat what it gave (files, Kafka, rate, Kinesis do). From a socket, what was read when the process
  died is lost; what was landed stays. Spark numbers a socket's lines from 0 again in every process, and would take the first ones
  for those of its checkpoint: so every process that lands a socket begins a generation, and a checkpoint, of its own.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq
import structlog

from tidegate.checkpoints.clock import SYSTEM_CLOCK
from tidegate.checkpoints.store import OutcomeUnknownError, PreconditionFailedError, Store
from tidegate.jobs.driver.metrics import LandingMetrics
from tidegate.jobs.sources.view import home_of
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.inputs import LandingOptions, environment_value
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Landing", "run_queries", "start_query"]

_log = structlog.get_logger("tidegate.landing")

_ID: Final = "tidegate-landing.json"  # in the checkpoint folder
_FORGETFUL: Final = ("socket",)  # formats whose offsets mean nothing to the next process
_TRIES: Final = 10  # of one create whose outcome is not known


class Landing:
    """The log that one source's landing query writes.

    Args:
        name: of the source.
        source: its spec, with a `landing` section.
        store: the pipeline's; the objects go there, unless the source has a full address of its own.
        checkpoint: Spark's checkpoint folder; on a disk that outlives the process.
        new_generation: begin a new one if the folder does not own the newest.
        metrics: told of every batch that is landed, and of every query that is started again.

    Raises:
        ConfigurationError: the newest generation belongs to another checkpoint folder.
    """

    def __init__(
        self,
        name: str,
        source: SourceSpec,
        store: Store,
        checkpoint: Path,
        *,
        new_generation: bool = False,
        metrics: LandingMetrics | None = None,
    ) -> None:
        self.name, self.checkpoint, self.metrics = name, checkpoint, metrics
        self._store, self._folder = home_of(name, source, store)
        checkpoint.mkdir(parents=True, exist_ok=True)
        forgetful = source.landing is not None and source.landing.format in _FORGETFUL
        self.generation = self._claim(new_generation, forgetful)
        self.spark_folder = checkpoint / (f"spark-{self.generation:04d}" if forgetful else "spark")
        self.landed = 0

    def land(self, batch: int, rows: bytes, count: int) -> bool:
        """Write a batch, unless it is there. Returns whether this call wrote it."""
        key = f"{self._folder}{self.generation:04d}-{batch:012d}.parquet"
        written = self._create(key, rows)
        if written:
            self.landed += count
            if self.metrics is not None:
                self.metrics.landed(count)
        else:
            _log.info("landed_before", source=self.name, batch=batch)
        status = {"generation": self.generation, "batch": batch, "rows": count, "landed": self.landed, "at": SYSTEM_CLOCK.ticks()}
        self._store.put(f"{self._folder}_landing/status.json", json.dumps(status).encode())
        return written

    def committed(self) -> int:
        """The newest batch that Spark's checkpoint knows to be done; -1 for none."""
        return max((int(file.name) for file in (self.spark_folder / "commits").glob("[0-9]*")), default=-1)

    def _create(self, key: str, data: bytes) -> bool:
        for _ in range(_TRIES):
            try:
                self._store.create(key, data)
            except PreconditionFailedError:
                return False
            except OutcomeUnknownError:
                continue  # the next try either writes it or finds it; which of the two does not matter
            return True
        self._store.create(key, data)
        return True

    def _claim(self, new_generation: bool, forgetful: bool) -> int:
        own = self._own_id()
        generation, owner = self._newest()
        if owner == own and not forgetful:
            return generation
        if owner not in (None, own) and not new_generation:
            raise ConfigurationError(
                f"source {self.name} was landed from another checkpoint folder than {self.checkpoint}: this one does not know "
                "what was landed already",
                code="landing.other_checkpoint",
                kept="everything landed so far",
                advice="give the old folder with --checkpoint; if it is lost: --new-generation (rows may then come again)",
            )
        body = json.dumps({"id": own, "at": SYSTEM_CLOCK.ticks()}).encode()
        self._store.create(f"{self._folder}_landing/{generation + 1:04d}.json", body)
        return generation + 1

    def _newest(self) -> tuple[int, str | None]:
        names = [e.key for e in self._store.list(f"{self._folder}_landing/") if e.key[-9:-5].isdigit()]
        if not names:
            return 0, None
        return int(names[-1][-9:-5]), str(json.loads(self._store.get(names[-1]).data)["id"])

    def _own_id(self) -> str:
        place = self.checkpoint / _ID
        if not place.exists():
            fresh = self.checkpoint / f"{_ID}.{secrets.token_hex(4)}"
            fresh.write_text(secrets.token_hex(16))
            fresh.rename(place)
        return place.read_text()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the checkpoint folder: two queries on one folder would undo each other's progress.

        Raises:
            ConfigurationError: another process holds it.
        """
        with (self.checkpoint / f"{_ID}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(
                    f"another process lands source {self.name} from {self.checkpoint}",
                    code="landing.busy",
                    kept="everything landed so far",
                    advice="one process per checkpoint folder: stop the other one first",
                ) from error
            yield


def start_query(session: SparkSession, spec: PipelineSpec, landing: Landing) -> StreamingQuery:
    """Start the query that lands; it runs until it is stopped or fails."""
    source = spec.sources[landing.name]
    options = source.landing
    assert options is not None  # noqa: S101 - asked for by the caller
    rows = _stream(session, options).selectExpr(*_columns(source, options))
    writer = rows.writeStream.queryName(f"landing {spec.name}.{landing.name}").foreachBatch(_writer(landing))
    writer = writer.option("checkpointLocation", str(landing.spark_folder))
    return writer.trigger(processingTime=f"{options.every // 1000} milliseconds").start()


def _stream(session: SparkSession, options: LandingOptions) -> DataFrame:
    reader = session.readStream.format(options.format)
    if options.read_as is not None:
        reader = reader.schema(options.read_as)
    for name, value in options.options.items():
        reader = reader.option(name, environment_value(f"landing.options.{name}", value, os.environ))
    return reader.load()


def _columns(source: SourceSpec, options: LandingOptions) -> list[str]:
    return [f"{options.columns.get(name, f'`{name}`')} AS `{name}`" for name in source.columns]


def _writer(landing: Landing) -> Any:
    def write(batch: DataFrame, number: int) -> None:
        table = batch.toArrow()
        if table.num_rows == 0:
            return
        sink = io.BytesIO()
        pq.write_table(table, sink, coerce_timestamps="us", allow_truncated_timestamps=True)
        landing.land(number, sink.getvalue(), table.num_rows)
        _log.info("landed", source=landing.name, batch=number, rows=table.num_rows)

    return write


def run_queries(start: Callable[[], StreamingQuery], landing: Landing, stop: Event, until_idle: float | None) -> Exception | None:
    """Run the query until it is stopped; one that failed is started again if it had finished a batch. The last failure, or None.

    Spark 4.1 does not survive the first batch after a crash between a batch and its commit: it runs and commits the batch, and
    then fails to report about it, because nobody asked Kafka for its newest offsets.

    Args:
        start: starts it.
        landing: its log.
        stop: set by whoever wants an end.
        until_idle: end after so many seconds without a row; None for never.
    """
    while True:
        begun, query = landing.committed(), start()
        quiet, seen = 0.0, -1
        while not stop.wait(0.5) and query.isActive and (until_idle is None or quiet < until_idle):
            quiet, seen = (quiet + 0.5, seen) if seen == landing.landed else (0.0, landing.landed)
        failed: Exception | None = query.exception()
        query.stop()
        if failed is None or stop.is_set() or landing.committed() == begun:
            return failed
        if landing.metrics is not None:
            landing.metrics.again()
        _log.warning("landing_again", source=landing.name, why=str(failed).strip().splitlines()[0][:400])
