"""Offset ranges of a cut, fetched and decoded once into local Parquet.

From there on they are objects. Survey, release and windows read columns of typed values, instead of
fetching and parsing every message once for each of them.
"""

import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from pyspark.sql import DataFrame

from tidegate.errors import get_first_line
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rows.json_messages import PARTITION, get_kafka_options, plan_plain_messages
from tidegate.jobs.sources.kafka_client import RangeReader, translate_settings
from tidegate.jobs.sources.kafka_source import (
    OFFSET_COLUMN,
    build_consumer_settings,
    build_range_schema,
    open_schema_registry,
)
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.json_types import JsonObject

from .cut_reader import arrow_to_frame
from .errors import (
    MESSAGES_UNREADABLE,
    WORKER_LOST,
)
from .json_decoding import MESSAGE_DDL, write_batches
from .kafka_payloads import UNKNOWN_SCHEMA, decode_messages, require_schemas
from .spark_session import (
    SPARK_ERRORS,
    SparkSessions,
    detect_lost_executors,
    extract_cause,
    runs_on_one_host,
)
from .staging import Staging

_log = structlog.get_logger("tidegate.driver")


@dataclass(eq=False, repr=False)
class KafkaStager:
    """Fetches the offset ranges of cuts and decodes the messages into typed Parquet files.

    The driver's own client fetches them, and keeps its connections.
    """

    _sessions: SparkSessions
    _spec: PipelineSpec
    _staging: Staging
    _readers: dict[str, RangeReader] = field(default_factory=dict)

    def stage_ranges(self, cut: Cut, folder: Path) -> None:
        """Write each part of a slice, which is a range of one partition, as a file in `folder`.

        Its name is the part's key with ``~`` for ``/``. Tasks write through `staging`, which also
        works without a shared disk.

        Raises:
            TransientError: the brokers, the registry or a worker failed, the planned messages were
                removed, or a schema is not registered yet and the source waits for it.
            ConfigurationError: the brokers refuse this client, or a registered schema cannot be
                used, and such messages are not dead letters.
            PoisonError: Spark could not read the messages for another reason.
        """
        ranges: dict[str, list[JsonObject]] = {}
        for piece in cut.slices:
            parts = [part for part in piece.parts if "kafka" in part]
            ranges.setdefault(piece.member.source, []).extend(parts)
        for source, parts in ranges.items():
            if parts:
                self._stage_source(source, parts, folder)

    def close(self) -> None:
        """Close the client's connections."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _stage_source(self, name: str, parts: list[JsonObject], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        source = self._spec.sources[name]
        fetched = Path(mkdtemp(prefix="kafka-", dir=folder))
        try:
            files = group_by_partition(self._decode_ranges(name, parts, fetched))
            for part in parts:
                own = files.get(part["kafka"]["partition"], [])
                _store_part_file(name, source, part, own, folder)
        except BaseException as error:
            # The next attempt opens a new client: this one may hold addresses of dead brokers.
            if name in self._readers:
                self._readers.pop(name).close()
            if isinstance(error, SPARK_ERRORS):
                raise (
                    detect_lost_executors(f"source {name}", error, WORKER_LOST)
                    or MESSAGES_UNREADABLE(source=name, cause=extract_cause(error))
                ) from error
            if isinstance(error, pa.ArrowInvalid):  # such as a time that no column can hold
                raise MESSAGES_UNREADABLE(source=name, cause=get_first_line(error)) from error
            raise
        finally:
            self._staging.discard(fetched)
            shutil.rmtree(fetched, ignore_errors=True)

    def _decode_ranges(self, name: str, parts: list[JsonObject], folder: Path) -> list[Path]:
        """Fetch ranges and decode them; return the files, of which some may have no row."""
        source = self._spec.sources[name]
        kafka = get_kafka_options(source)
        schemas = open_schema_registry(kafka)
        rows = sum(part["kafka"]["to"] - part["kafka"]["from"] for part in parts)
        self._fetch_messages(name, parts, folder)

        def decode(place: str) -> list[Path]:
            """Decode the messages with the schemas known so far."""
            found = sorted(folder.glob("plain-*.parquet"))
            is_here = runs_on_one_host(self._spec.spark)
            rest = _read_others(self._sessions, folder, rows, is_here=is_here)
            if rest is not None:
                known = schemas.known if schemas is not None else None
                decoded = decode_messages(rest, source, known)
                found += self._staging.write_rows(decoded, folder / place)
            return found

        found = decode("first")
        if schemas is None:
            return found
        strangers = _find_unknown_schemas(found)
        # The range is decoded once more for the first appearance of a schema.
        if schemas.fetch_missing(set(strangers)):
            found = decode("again")
            strangers = _find_unknown_schemas(found)
        require_schemas(name, kafka, strangers)
        return found

    def _fetch_messages(self, name: str, parts: list[JsonObject], folder: Path) -> None:
        """Write the messages into the folder, as `write_batches` does."""
        source, ranges = self._spec.sources[name], [part["kafka"] for part in parts]
        places = {one["partition"]: (one["from"], one["to"]) for one in ranges}
        with closing(self._open_reader(name).read_ranges(places)) as batches:
            write_batches(batches, plan_plain_messages(source), folder)

    def _open_reader(self, name: str) -> RangeReader:
        """The driver's own client of a source."""
        if name not in self._readers:
            kafka = get_kafka_options(self._spec.sources[name])
            settings = translate_settings(build_consumer_settings(kafka))
            self._readers[name] = RangeReader(name, kafka, settings)
        return self._readers[name]


def _read_others(
    sessions: SparkSessions, folder: Path, rows: int, *, is_here: bool
) -> DataFrame | None:
    """The messages that `write_batches` left to Spark; None if there are none.

    `is_here` says whether tasks see the folder.
    """
    files = sorted(map(str, folder.glob("other-*.parquet")))
    if not files:
        return None
    session = sessions.session_for(rows)
    if is_here and not sessions.is_small(rows):
        return session.read.parquet(*files)
    return arrow_to_frame(session, pa.concat_tables(map(pq.read_table, files)), MESSAGE_DDL)


def group_by_partition(files: list[Path]) -> dict[int, list[Path]]:
    """Return partition -> the files of its range; those without a row are left out.

    Spark may decode messages of several partitions in one task. A file with them is divided.
    """
    found: dict[int, list[Path]] = {}
    for file in files:
        partitions = pc.unique(pq.read_table(file, columns=[PARTITION])[PARTITION]).to_pylist()
        for partition in partitions:
            own = file
            if len(partitions) > 1:
                own = file.with_name(f"{file.stem}-{partition}.parquet")
                pq.write_table(pq.read_table(file, filters=[(PARTITION, "=", partition)]), own)
            found.setdefault(partition, []).append(own)
    return found


def _find_unknown_schemas(fetched: list[Path]) -> dict[int, str]:
    """Numbers of schemas that are not known, and where the first message of each is."""
    found: dict[int, str] = {}
    for partition, files in sorted(group_by_partition(fetched).items()):
        for file in files:
            rows = pq.read_table(file, columns=[UNKNOWN_SCHEMA, OFFSET_COLUMN])
            unknown = rows.filter(pc.is_valid(rows[UNKNOWN_SCHEMA]))
            for number, place in zip(
                unknown[UNKNOWN_SCHEMA].to_pylist(), unknown[OFFSET_COLUMN].to_pylist(), strict=True
            ):
                found.setdefault(number, f"partition {partition}, offset {place}")
    return found


def _store_part_file(
    name: str, source: SourceSpec, part: JsonObject, files: list[Path], folder: Path
) -> None:
    """The part's rows as one file; an empty one when compaction left nothing."""
    target = folder / part["key"].replace("/", "~")
    if len(files) == 1:
        files[0].replace(target)
    else:
        # Plain messages and others are in files of their own.
        tables = [build_range_schema(source).empty_table(), *map(pq.read_table, files)]
        rows = pa.concat_tables(tables, promote_options="default")
        pq.write_table(rows.sort_by(OFFSET_COLUMN), target)
    # Offsets are not contiguous in compacted topics and behind transactions. It is logged, not
    # refused.
    missing = part["kafka"]["to"] - part["kafka"]["from"] - pq.read_metadata(target).num_rows
    if missing:
        _log.info(
            "offsets_missing",
            source=name,
            why="compacted, or markers of transactions",
            offsets=missing,
            **part["kafka"],
        )
