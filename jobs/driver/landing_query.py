"""The landing query: Structured Streaming writes any ``spark.readStream`` format as objects.

The objects form the log of `landing_log`. The origin must be able to repeat its rows, as files,
Kafka, rate and Kinesis can. From a socket, rows that were read but not landed are lost when the
process dies. Spark also numbers a socket's lines from 0 in every process and would mistake them for
those of its checkpoint. So every process that lands a socket begins a new generation with a new
checkpoint.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq
import structlog

from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.driver.errors import LANDING_BAD_VALUE, LANDING_FAILED, LANDING_REFUSED
from tidegate.jobs.driver.landing_log import LandingLog
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import LandingOptions, resolve_environment_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = structlog.get_logger("tidegate.landing")

_STATUS_INTERVAL: Final = 10.0  # seconds between two writes of status.json
_POLL_INTERVAL: Final = 0.5  # seconds
_FILE_FORMATS: Final = ("avro", "csv", "json", "orc", "parquet", "text")
# Formats whose first batch would be all there is. A batch passes through the driver's memory.
_BATCH_BOUNDS: Final = {
    "kafka": ("maxOffsetsPerTrigger", "200000"),
    **dict.fromkeys(_FILE_FORMATS, ("maxFilesPerTrigger", "100")),
}
_DATA_ERROR: Final = re.compile(r"SQLSTATE: 22")  # SQL's class for errors in the data


def start_landing_query(
    session: SparkSession, spec: PipelineSpec, landing: LandingLog
) -> StreamingQuery:
    """Start and return the landing query of a source.

    Raises:
        ConfigurationError: Spark does not understand the landing's options or expressions, or an
            option names an environment variable that is not set.
    """
    from pyspark.errors import AnalysisException, IllegalArgumentException

    source = spec.sources[landing.name]
    options = source.landing
    assert options is not None  # noqa: S101 - the caller lands only sources with a landing
    try:
        rows = _load_landing_stream(session, options).selectExpr(
            *_make_select_expressions(source, options)
        )
    except (AnalysisException, IllegalArgumentException) as error:
        text = str(error).strip().splitlines()[0][:400]
        raise LANDING_REFUSED(source=f"{spec.name}.{landing.name}", text=text) from error
    writer = rows.writeStream.queryName(f"landing {spec.name}.{landing.name}")
    writer = writer.foreachBatch(_make_batch_writer(landing))
    writer = writer.option("checkpointLocation", str(landing.spark_folder))
    return writer.trigger(processingTime=f"{options.every // 1000} milliseconds").start()


def _load_landing_stream(session: SparkSession, options: LandingOptions) -> DataFrame:
    reader = session.readStream.format(options.format)
    if options.read_as is not None:
        reader = reader.schema(options.read_as)
    for name, value in bound_batch_size(options).items():
        reader = reader.option(
            name, resolve_environment_value(f"landing.options.{name}", value, os.environ)
        )
    return reader.load()


def bound_batch_size(options: LandingOptions) -> Mapping[str, str]:
    """Return the reader's options, with a bound on the size of a batch unless they have one."""
    name, bound = _BATCH_BOUNDS.get(options.format, ("", ""))
    # Spark does not distinguish the case of option names.
    if not name or name.lower() in map(str.lower, options.options):
        return options.options
    return {name: bound, **options.options}


def _make_select_expressions(source: SourceSpec, options: LandingOptions) -> list[str]:
    return [f"{options.columns.get(name, f'`{name}`')} AS `{name}`" for name in source.columns]


def _make_batch_writer(landing: LandingLog) -> Any:
    def write_batch(batch: DataFrame, number: int) -> None:
        """Land one batch; Spark calls this again with the same number after a crash."""
        # An empty batch writes no object, but Spark commits its number: numbers may have gaps.
        table = batch.toArrow()
        if table.num_rows == 0:
            return
        sink = io.BytesIO()
        pq.write_table(table, sink, coerce_timestamps="us", allow_truncated_timestamps=True)
        try:
            landing.land_batch(number, sink.getvalue(), table.num_rows)
        except TidegateError as error:
            landing.failure = error  # Spark passes on the text of this error only
            raise
        _log.info("landed", source=landing.name, batch=number, rows=table.num_rows)

    return write_batch


def run_landing_query(
    start: Callable[[], StreamingQuery], landing: LandingLog, stop: Event, until_idle: float | None
) -> TidegateError | None:
    """Run the query until it is stopped, idle or failed; return its last failure, or None.

    A query that fails with a transient error after it has finished a batch is started again. This
    is needed after a crash between a batch and its commit: Spark 4.1 runs and commits the batch
    again, and then fails when it reports progress, because it did not ask Kafka for its newest
    offsets.

    Args:
        start: starts the query.
        landing: its log.
        stop: set when the landing should end.
        until_idle: end after this many seconds without a row; None: never.
    """
    while True:
        batch_before, landing.failure = landing.newest_committed_batch(), None
        query = start()
        _watch_query(query, landing, stop, until_idle)
        failure: Exception | None = query.exception()
        query.stop()
        if failure is None:
            return None
        error = classify_query_failure(landing, failure)
        # A query that fails without progress would fail again in the same way.
        finished_batch = landing.newest_committed_batch() != batch_before
        if stop.is_set() or not finished_batch or not isinstance(error, TransientError):
            return error
        if landing.metrics is not None:
            landing.metrics.record_restart()
        _log.warning("landing_again", source=landing.name, why=error.message)


def _watch_query(
    query: StreamingQuery, landing: LandingLog, stop: Event, until_idle: float | None
) -> None:
    """Write the status now and then until the query ends, is stopped, or has been idle."""
    quiet, landed, since_status = 0.0, -1, _STATUS_INTERVAL
    while not stop.wait(_POLL_INTERVAL) and query.isActive:
        if until_idle is not None and quiet >= until_idle:
            return
        quiet = quiet + _POLL_INTERVAL if landed == landing.landed else 0.0
        landed = landing.landed
        since_status += _POLL_INTERVAL
        if since_status >= _STATUS_INTERVAL:
            landing.report_status("running")
            since_status = 0.0


def classify_query_failure(landing: LandingLog, error: Exception) -> TidegateError:
    """Return the error to report for a query that failed: the log's, the data's, or Spark's."""
    if landing.failure is not None:
        return landing.failure
    text = str(error).strip()
    lines = text.splitlines() or [repr(error)]
    line = next((line for line in lines if "SQLSTATE" in line), lines[0])[:400]
    definition = LANDING_BAD_VALUE if _DATA_ERROR.search(text) else LANDING_FAILED
    return definition(source=landing.name, text=line)
