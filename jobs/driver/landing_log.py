"""The landing query, and the append-only log of objects that it writes.

Structured Streaming writes any ``spark.readStream`` format as objects. The origin must be able to
repeat its rows, as files, Kafka, rate and Kinesis can. From a socket, rows that were read but not
landed are lost when the process dies. Spark also numbers a socket's lines from 0 in every process
and would mistake them for those of its checkpoint. So every process that lands a socket begins a
new generation with a new checkpoint.

Keys:

    <path>/<generation>-<batch>.parquet  one object per batch that had rows; put-if-absent
    <path>/_landing/<generation>.json    the note of a generation: its owner and its newest batch;
                                         put-if-absent, then swapped
    <path>/_landing/status.json          the status of the process, for people

Spark's checkpoint says which offsets a batch holds; the bucket says which batches are landed. A
batch is written in two steps: first its number, with a digest of the offsets that Spark wrote down
for it, goes into the note; then its object is created. After a crash Spark runs the last batch
again under the same number and finds its object: each batch lands once, whenever a process was
killed. Three rules follow from this protocol
(`docs/decisions/0081-a-landing-batch-is-recorded-before-it-is-written.md`):

* Only the newest batch may come again, and only with the same offsets. Anything else means that the
  checkpoint folder went back (a backup, a lost file): its batches would have old numbers and other
  rows, and would seem to be landed. It is refused.
* Another folder would number its batches from 0, so it is refused as well. A random id in the
  folder names the owner of a generation, until an operator asks for a new generation.
* A process that begins a generation closes the one before: its note cannot be swapped any more, and
  a batch that is noted but not written gets an empty object. So no object ever appears before keys
  that may have been read.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import structlog

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.shared_documents import (
    SharedDocument,
    change_document,
    read_document,
    read_json_object,
)
from tidegate.checkpoints.store import OutcomeUnknownError, PreconditionFailedError, Store
from tidegate.errors import TidegateError, TransientError, get_first_line
from tidegate.jobs.engine.interfaces import read_faults_from_environment
from tidegate.jobs.sources.input_view import locate_source
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.jobs.spec.source_options import LandingOptions, resolve_environment_value
from tidegate.json_types import JsonObject

from .errors import (
    LANDING_BAD_VALUE,
    LANDING_BUSY,
    LANDING_FAILED,
    LANDING_FENCED,
    LANDING_REFUSED,
    OTHER_LANDING_CHECKPOINT,
    STALE_LANDING_CHECKPOINT,
)
from .otel_metrics import LandingMetrics

_log = structlog.get_logger("tidegate.landing")

_ID_FILE = "tidegate-landing.json"  # in the checkpoint folder
_FORMATS_WITHOUT_OFFSETS = ("socket",)  # each process numbers their rows from 0
_WRITE_ATTEMPTS = 10  # for a write whose outcome is unknown
_STATUS_KEY = "_landing/status.json"


class _GenerationNote(SharedDocument):
    """The document of a generation.

    Attributes:
        id: of the checkpoint folder that owns the generation.
        batch: the newest batch that was begun; -1 before the first.
        offsets: digest of the offsets that Spark wrote down for that batch.
        closed: a newer generation has begun, or is about to begin.
    """

    id: str = ""
    batch: int = -1
    offsets: str = ""
    closed: bool = False


class LandingLog:
    """The log that one source's landing query writes.

    Args:
        name: of the source.
        source: its spec, with a `landing` section.
        store: the pipeline's store; the objects go there unless the source's path is a full URL.
        checkpoint: Spark's checkpoint folder, on a disk that outlives the process.
        new_generation: begin a new generation if the folder does not own the newest one. Sockets
            always begin one.
        metrics: counts the batches, and the queries that are started again.

    Attributes:
        generation: the generation that this process writes.
        spark_folder: the part of the checkpoint folder that Spark uses.
        landed: rows that this process wrote.
        failure: why the last batch could not be written. The landing query sets it, because Spark
            loses this error.

    Raises:
        ConfigurationError: the newest generation belongs to another checkpoint folder.
        TransientError: the store does not answer.
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
        # One fault point is between the object and Spark's commit.
        self._source, self._faults = source, read_faults_from_environment()
        self._store, self._folder = locate_source(name, source, store)
        checkpoint.mkdir(parents=True, exist_ok=True)
        landing = source.landing
        per_process = landing is not None and landing.format in _FORMATS_WITHOUT_OFFSETS
        self.generation, self._note = self._claim_generation(new_generation, per_process)
        # Such a format counts from 0 in every process, so each needs a checkpoint of its own.
        folder = f"spark-{self.generation:04d}" if per_process else "spark"
        self.spark_folder = checkpoint / folder
        self.landed = 0
        self.failure: TidegateError | None = None
        self._newest: JsonObject = {"batch": None, "rows": None, "landed_at": None}

    def land_batch(self, batch: int, rows: bytes, count: int) -> bool:
        """Write a batch unless it is landed already; return whether this call wrote it.

        Args:
            batch: Spark's number of it.
            rows: a Parquet object.
            count: how many rows it has.

        Raises:
            ConfigurationError: the checkpoint folder is older than what was landed.
            FencedError: another process began a new generation.
            TransientError: the store does not answer; the batch may be written.
        """
        self._note_batch(batch)
        written = self._create_object(self._batch_key(self.generation, batch), rows)
        if written:
            self.landed += count
            if self.metrics is not None:
                self.metrics.record_batch(count)
        else:
            _log.info("landed_before", source=self.name, batch=batch)
        self._newest = {"batch": batch, "rows": count, "landed_at": SYSTEM_CLOCK.wall_ticks()}
        self._faults.reach("land.written")
        return written

    def newest_committed_batch(self) -> int:
        """Return the newest batch that Spark has committed; -1 for none."""
        return max(
            (int(file.name) for file in (self.spark_folder / "commits").glob("[0-9]*")), default=-1
        )

    def report_status(self, state: str, why: str | None = None) -> None:
        """Write ``status.json`` for `tidegate status`.

        A store that does not answer is only logged; one that refuses raises ConfigurationError.
        """
        body = {
            "state": state,
            "why": why,
            "generation": self.generation,
            "landed": self.landed,
            **self._newest,
            "at": SYSTEM_CLOCK.wall_ticks(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            self._store.put(self._folder + _STATUS_KEY, json.dumps(body).encode())
        except TransientError as error:
            # The document is for people only: no batch depends on it.
            _log.warning("status_not_written", source=self.name, why=error.message)

    @contextmanager
    def lock_folder(self) -> Iterator[None]:
        """Lock the checkpoint folder: two queries on one folder would undo each other's progress.

        Raises:
            ConfigurationError: another process holds it.
        """
        with (self.checkpoint / f"{_ID_FILE}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise LANDING_BUSY(source=self.name, folder=self.checkpoint) from error
            yield

    # Batches

    def _note_batch(self, batch: int) -> None:
        """Put a batch into the note, unless it is the newest one and comes again."""
        offsets = self._digest_offsets(batch)
        if batch < self._note.batch or (
            batch == self._note.batch and offsets != self._note.offsets
        ):
            raise STALE_LANDING_CHECKPOINT(
                source=self.name, folder=self.checkpoint, batch=batch, newest=self._note.batch
            )
        # Before the object: a process that closes this generation then knows which batch may still
        # arrive.
        if batch > self._note.batch:
            self._change_note(batch=batch, offsets=offsets)

    def _digest_offsets(self, batch: int) -> str:
        """Return a digest of the offsets that Spark wrote down before it ran the batch."""
        file = self.spark_folder / "offsets" / str(batch)
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""

    def _change_note(self, **change: Any) -> None:
        def apply_change(found: _GenerationNote) -> _GenerationNote:
            changed = found.model_copy(update=change)
            # Equal: the write arrived, and only its answer was lost.
            if found not in (changed, self._note):
                raise LANDING_FENCED(source=self.name, generation=self.generation)
            return changed

        key = self._note_key(self.generation)
        self._note = change_document(self._store, key, _GenerationNote(), apply_change)

    def _create_object(self, key: str, data: bytes) -> bool:
        """Create an object; return False if it exists."""
        for _ in range(_WRITE_ATTEMPTS):
            try:
                self._store.create(key, data)
            except PreconditionFailedError:
                return False
            except OutcomeUnknownError:
                continue  # the next try writes the object or finds it; both are fine
            return True
        self._store.create(key, data)
        return True

    def _batch_key(self, generation: int, batch: int) -> str:
        return f"{self._folder}{generation:04d}-{batch:012d}.parquet"

    # Generations

    def _note_key(self, generation: int) -> str:
        return f"{self._folder}_landing/{generation:04d}.json"

    def _claim_generation(
        self, new_generation: bool, per_process: bool
    ) -> tuple[int, _GenerationNote]:
        """Return the generation to write, and its note."""
        folder_id, newest = self._read_or_create_id(), self._find_last_generation()
        if newest:
            note, _ = read_document(self._store, self._note_key(newest), _GenerationNote)
            is_owner = note is not None and note.id == folder_id and not note.closed
            # The usual case: the process goes on where it, or the one before it, has stopped.
            if note is not None and is_owner and not per_process:
                return newest, note
            if not is_owner and not new_generation and not per_process:
                raise OTHER_LANDING_CHECKPOINT(source=self.name, folder=self.checkpoint)
            self._close_generation(newest)
        note = _GenerationNote(id=folder_id)
        self._store.create(self._note_key(newest + 1), note.to_bytes())
        return newest + 1, note

    def _close_generation(self, generation: int) -> None:
        """End a generation: no further batch can be noted, and the noted one gets an object."""
        note = change_document(
            self._store,
            self._note_key(generation),
            _GenerationNote(),
            lambda found: found.model_copy(update={"closed": True}),
        )
        # The batch that was noted last may be on its way. If its object is not there yet, an empty
        # one takes the key, and what arrives later is refused.
        if note.batch >= 0:
            self._create_object(
                self._batch_key(generation, note.batch), _make_empty_object(self._source)
            )

    def _find_last_generation(self) -> int:
        names = (entry.key[-9:-5] for entry in self._store.list_objects(f"{self._folder}_landing/"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _read_or_create_id(self) -> str:
        file = self.checkpoint / _ID_FILE
        if not file.exists():
            # Renamed, so that a crash never leaves half an id.
            fresh = self.checkpoint / f"{_ID_FILE}.{secrets.token_hex(4)}"
            fresh.write_text(secrets.token_hex(16))
            fresh.rename(file)
        return file.read_text()


def read_landing_status(name: str, source: SourceSpec, store: Store) -> JsonObject | None:
    """Return the last status of the process that lands a source; None if none can be read.

    It has the fields of `LandingLog.report_status`, with times in ticks.
    """
    home, folder = locate_source(name, source, store)
    return read_json_object(home, folder + _STATUS_KEY) or None


def _make_empty_object(source: SourceSpec) -> bytes:
    """Return a Parquet object with the source's columns and no rows."""
    import pyarrow as pa

    from tidegate.jobs.engine.arrow_tables import to_arrow_type

    sink = io.BytesIO()
    schema = pa.schema({name: to_arrow_type(kind) for name, kind in source.columns.items()})
    pq.write_table(schema.empty_table(), sink)
    return sink.getvalue()


if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STATUS_INTERVAL = 10.0  # seconds between two writes of status.json
_POLL_INTERVAL = 0.5  # seconds
_FILE_FORMATS = ("avro", "csv", "json", "orc", "parquet", "text")
# Formats whose first batch would be all there is. A batch passes through the driver's memory.
_BATCH_BOUNDS = {
    "kafka": ("maxOffsetsPerTrigger", "200000"),
    **dict.fromkeys(_FILE_FORMATS, ("maxFilesPerTrigger", "100")),
}
_DATA_ERROR = re.compile(r"SQLSTATE: 22")  # SQL's class for errors in the data


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
        expressions = [
            f"{options.columns.get(name, f'`{name}`')} AS `{name}`" for name in source.columns
        ]
        reader = session.readStream.format(options.format)
        if options.read_as is not None:
            reader = reader.schema(options.read_as)
        for name, value in bound_batch_size(options).items():
            reader = reader.option(
                name, resolve_environment_value(f"landing.options.{name}", value, os.environ)
            )
        rows = reader.load().selectExpr(*expressions)
    except (AnalysisException, IllegalArgumentException) as error:
        text = get_first_line(error)
        raise LANDING_REFUSED(source=f"{spec.name}.{landing.name}", text=text) from error
    writer = rows.writeStream.queryName(f"landing {spec.name}.{landing.name}")
    writer = writer.foreachBatch(_make_batch_writer(landing))
    writer = writer.option("checkpointLocation", str(landing.spark_folder))
    return writer.trigger(processingTime=f"{options.every // 1000} milliseconds").start()


def bound_batch_size(options: LandingOptions) -> Mapping[str, str]:
    """Return the reader's options, with a bound on the size of a batch unless they have one."""
    name, bound = _BATCH_BOUNDS.get(options.format, ("", ""))
    # Spark does not distinguish the case of option names.
    if not name or name.lower() in map(str.lower, options.options):
        return options.options
    return {name: bound, **options.options}


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
