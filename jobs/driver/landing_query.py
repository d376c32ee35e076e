"""Landing: a Structured Streaming query writes what any ``spark.readStream`` format brings into a log of objects (`landing_log`).

The origin must be able to repeat what it gave (files, Kafka, rate, Kinesis do). From a socket, what
was read when the process died is lost; what was landed stays. Spark numbers a socket's lines from 0
again in every process, and would take the first ones for those of its checkpoint: so every process
that lands a socket begins a generation, and a checkpoint, of its own.
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

from tidegate.errors import ConfigurationError, PoisonError, TidegateError, TransientError
from tidegate.jobs.driver.landing_log import LandingLog
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import LandingOptions, resolve_environment_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = structlog.get_logger("tidegate.landing")

_STATUS_INTERVAL: Final = 10.0  # seconds between two words for `tidegate status`
_FILE_BOUNDS: Final = dict.fromkeys(
    ("avro", "csv", "json", "orc", "parquet", "text"), ("maxFilesPerTrigger", "100")
)
_BATCH_BOUNDS: Final = {"kafka": ("maxOffsetsPerTrigger", "200000"), **_FILE_BOUNDS}
"""Of formats that would bring all there is in their first batch.

A batch passes through the driver's memory, as one object.
"""
_DATA_ERROR: Final = re.compile(r"SQLSTATE: 22")  # SQL's class of errors that are in the data


def start_landing_query(
    session: SparkSession, spec: PipelineSpec, landing: LandingLog
) -> StreamingQuery:
    """Start the query that lands; it runs until it is stopped or fails.

    Raises:
        ConfigurationError: Spark does not understand the landing's options or expressions.
    """
    from pyspark.errors import AnalysisException, IllegalArgumentException

    source = spec.sources[landing.name]
    options = source.landing
    assert options is not None  # noqa: S101 - asked for by the caller
    try:
        rows = _load_landing_stream(session, options).selectExpr(
            *_make_select_expressions(source, options)
        )
    except (AnalysisException, IllegalArgumentException) as error:
        raise ConfigurationError(
            f"{spec.name}.{landing.name}: Spark cannot read this landing:"
            f" {str(error).strip().splitlines()[0][:400]}",
            code="landing.refused",
            kept="everything landed so far",
            advice="mend landing.format, options, read_as or columns of the source",
        ) from error
    writer = rows.writeStream.queryName(f"landing {spec.name}.{landing.name}").foreachBatch(
        _make_batch_writer(landing)
    )
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
    """The reader's options, and a bound on what one batch takes, unless they have one."""
    name, most = _BATCH_BOUNDS.get(options.format, ("", ""))
    given = {own.lower() for own in options.options}
    return options.options if not name or name.lower() in given else {name: most, **options.options}


def _make_select_expressions(source: SourceSpec, options: LandingOptions) -> list[str]:
    return [f"{options.columns.get(name, f'`{name}`')} AS `{name}`" for name in source.columns]


def _make_batch_writer(landing: LandingLog) -> Any:
    def write_batch(batch: DataFrame, number: int) -> None:
        table = batch.toArrow()
        if table.num_rows == 0:
            return
        sink = io.BytesIO()
        pq.write_table(table, sink, coerce_timestamps="us", allow_truncated_timestamps=True)
        try:
            landing.land_batch(number, sink.getvalue(), table.num_rows)
        except TidegateError as error:  # Spark would hand on its text only
            landing.failure = error
            raise
        _log.info("landed", source=landing.name, batch=number, rows=table.num_rows)

    return write_batch


def run_landing_query(
    start: Callable[[], StreamingQuery], landing: LandingLog, stop: Event, until_idle: float | None
) -> TidegateError | None:
    """Run the query until it is stopped.

    One that failed is started again if it had finished a batch. The last failure, or None.

    Spark 4.1 does not survive the first batch after a crash between a batch and its commit: it runs
    and commits the batch, and then fails to report about it, because nobody asked Kafka for its
    newest offsets.

    Args:
        start: starts it.
        landing: its log.
        stop: set by whoever wants an end.
        until_idle: end after so many seconds without a row; None for never.
    """
    while True:
        begun, landing.failure = landing.newest_committed_batch(), None
        query = start()
        _watch_query(query, landing, stop, until_idle)
        failed: Exception | None = query.exception()
        query.stop()
        if failed is None:
            return None
        error = classify_query_failure(landing, failed)
        if (
            stop.is_set()
            or landing.newest_committed_batch() == begun
            or not isinstance(error, TransientError)
        ):
            return error
        if landing.metrics is not None:
            landing.metrics.record_restart()
        _log.warning("landing_again", source=landing.name, why=error.message)


def _watch_query(
    query: StreamingQuery, landing: LandingLog, stop: Event, until_idle: float | None
) -> None:
    """Until the query ends, or should; with a word for `tidegate status` now and then."""
    quiet, seen, unheard = 0.0, -1, _STATUS_INTERVAL
    while not stop.wait(0.5) and query.isActive and (until_idle is None or quiet < until_idle):
        quiet, seen = (quiet + 0.5, seen) if seen == landing.landed else (0.0, landing.landed)
        unheard += 0.5
        if unheard >= _STATUS_INTERVAL:
            landing.report_status("running")
            unheard = 0.0


def classify_query_failure(landing: LandingLog, error: Exception) -> TidegateError:
    """A query's failure in our words: whose it is, and what to do."""
    if landing.failure is not None:
        return landing.failure
    said = str(error).strip()
    line = next(
        (line for line in said.splitlines() if "SQLSTATE" in line),
        said.splitlines()[0] if said else repr(error),
    )[:400]
    if _DATA_ERROR.search(said):
        return PoisonError(
            f"the landing query of {landing.name} met a value that its expressions cannot take:"
            f" {line}",
            code="landing.bad_value",
            kept="everything landed so far; the batch was not written",
            advice=(
                "let the expression in landing.columns give null for such values (try_cast for"
                " CAST), and run it again"
            ),
        )
    return TransientError(
        f"the landing query of {landing.name} failed: {line}",
        code="landing.failed",
        kept="everything landed so far",
        advice="run it again: it goes on at its checkpoint",
    )
