"""Reads the rows of a cut as one DataFrame, cast to the declared schema.

Each row carries its position and the reason why it is bad, if it is.

The columns are those of `jobs.rows.slice_reading`; Spark computes only those that a plan asks for.

Objects are read in place where the store has them as files, else from copies in the scratch folder;
either way Spark's tasks see them under folders ``_m=../_p=../_o=..``, so that their place arrives
as partition columns, at no cost per row. Few rows are read in the driver and handed over as Arrow:
a third of the time of a scan that has to open every file anyway.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everyone knows

from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.errors import TransientError
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.rows.column_casts import arrow_to_spark_type, select_readable_columns
from tidegate.jobs.rows.slice_reading import (
    PLANNED,
    POSITION_COLUMNS,
    CutPart,
    NumberedPart,
    ensure_local_file,
    read_parts,
    read_similar_parts,
    unreadable_objects_error,
)
from tidegate.jobs.rules.declared_values import NOT_UTF8
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.kafka_source import OFFSET_COLUMN
from tidegate.jobs.sources.object_decoding import BAD_REASON
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.time_units import TICK_MAX

from .spark_session import SparkSessions
from .staging import Staging

SMALL_BYTES: Final = 64 << 20
"""So much of few rows is read in the driver for Spark."""


@dataclass(frozen=True)
class CutFrame:
    """A cut, staged and readable.

    Attributes:
        build: describes its rows to Spark; None when it has no parts.
        rows: rows of all kinds in it, as planned; ranges of Kafka may hold fewer.
        scratch: the folder with its files.
    """

    cut: Cut
    parts: tuple[CutPart, ...]
    build: Callable[[], DataFrame | None]
    rows: int
    scratch: Path

    @cached_property
    def bytes(self) -> int:
        """Bytes of the values of its rows as objects encode them, before compression."""
        return count_bytes(self.parts)

    @cached_property
    def frame(self) -> DataFrame | None:
        """Its rows; None when it has no parts. The first access starts Spark."""
        return self.build()

    def find_corruption(self) -> CorruptObjectsError | TransientError | None:
        """The error that names the objects whose pages cannot be read; None when all can.

        Reads every part. A copy of a Kafka range that cannot be read gives a TransientError.
        """
        bad = [part.key for part in self.parts if not _is_readable(part)]
        return unreadable_objects_error(bad) if bad else None


def open_cut(
    sessions: SparkSessions,
    spec: PipelineSpec,
    store: Store,
    cut: Cut,
    scratch: Path,
    staging: Staging,
) -> CutFrame:
    """Stage the objects of a cut below `scratch` and describe their rows.

    It copies objects that the store does not have as files. Ranges of Kafka are there already
    (see `KafkaStager`).

    Raises:
        TidegateError: the store does not give an object.
    """
    parts = _download_parts(store, cut, scratch)
    rows = sum(part.row_end - part.row_start for part in parts)
    small = sessions.is_small(rows) and count_bytes(parts) <= SMALL_BYTES

    def build_frame() -> DataFrame | None:
        session = sessions.session_for(rows)

        def read(
            columns: Any, chosen: list[NumberedPart], source: SourceSpec
        ) -> tuple[DataFrame, bool]:
            """Read objects that look alike."""
            if not small and not any(_has_far_times(part) for _, part in chosen):
                scanned = _scan_in_tasks(session, columns, chosen, scratch, staging)
                return _judge_texts(scanned, dict(columns), source), True
            table = read_parts(columns, chosen, source, to_nested_type)
            ddl = format_ddl(columns, POSITION_COLUMNS)
            has_reasons = table.column_names[-1] == BAD_REASON
            ddl += f", {BAD_REASON} string" if has_reasons else ""
            return arrow_to_frame(session, table, ddl), has_reasons

        frame = read_similar_parts(spec, cut, list(enumerate(parts)), read)
        # One task, and no shuffle anywhere behind it.
        return frame.coalesce(1) if frame is not None and small else frame

    return CutFrame(cut, parts, build_frame, rows, scratch)


def count_bytes(parts: Iterable[CutPart]) -> int:
    """Return the bytes of the values of parts, as their footers have them, before compression."""
    found = 0
    for part in parts:
        metadata: Any = pq.read_metadata(part.path)
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        size = sum(group.total_byte_size for group in groups)
        rows = part.row_end - part.row_start
        found += size if part.is_whole else size * rows // max(part.rows, 1)
    return found


def _download_parts(store: Store, cut: Cut, scratch: Path) -> tuple[CutPart, ...]:
    found = [(index, part) for index, piece in enumerate(cut.slices) for part in piece.parts]
    paths = map_in_threads(
        lambda item: ensure_local_file(store, item[1]["key"], scratch / "objects"), found, 8
    )
    return tuple(
        CutPart(
            member=index,
            path=path,
            columns=tuple(part["columns"].items()),
            **{name: part[name] for name in PLANNED},
        )
        for (index, part), path in zip(found, paths, strict=True)
    )


def _is_readable(part: CutPart) -> bool:
    try:
        pq.read_table(part.path)
    except (pa.ArrowException, OSError):
        return False
    return True


def format_ddl(columns: Any, places: Iterable[tuple[str, str, Any]]) -> str:
    """The schema of the rows of objects, for Spark."""
    read = [*select_readable_columns(columns), *((name, own) for name, own, _ in places)]
    return ", ".join(f"{quote_name(name)} {own}" for name, own in read)


def _scan_in_tasks(
    session: SparkSession,
    columns: Any,
    parts: list[NumberedPart],
    scratch: Path,
    staging: Staging,
) -> DataFrame:
    base = scratch / "cut"
    # Where tasks do not see the disk, this uploads.
    paths = map_in_threads(lambda item: staging.expose_file(_link_object(base, *item)), parts, 8)
    schema = format_ddl(columns, POSITION_COLUMNS[:3])
    frame = session.read.schema(schema).option("basePath", staging.address(base)).parquet(*paths)
    row = OFFSET_COLUMN if parts[0][1].has_row_numbers else "_metadata.row_index"
    # Not beside it: an object may have a column of this name that the spec does not declare.
    frame = frame.withColumn("_row", F.expr(row))
    for index, part in parts:
        # At most the first and the last object of a slice are in the cut in part.
        if not part.is_whole:
            frame = frame.where(
                f"_p <> {index} OR (_row >= {part.row_start}L AND _row < {part.row_end}L)"
            )
    return frame


def _has_far_times(part: CutPart) -> bool:
    """Whether an object may have times beyond microseconds, for which Spark's own reader fails."""
    coarse = {name for name, own in part.columns if own.startswith(("timestamp[ms", "timestamp[s"))}
    metadata: Any = pq.read_metadata(part.path) if coarse else None
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)] if coarse else []
    leaves = [group.column(n) for group in groups for n in range(group.num_columns)]
    found = [leaf.statistics for leaf in leaves if leaf.path_in_schema in coarse]
    most = TICK_MAX // 1000
    # `num_values` leaves out nulls; a column of nulls has no bounds.
    return any(
        one is None
        or (
            one.num_values and not (one.has_min_max and -most <= one.min_raw <= one.max_raw <= most)
        )
        for one in found
    )


def _judge_texts(frame: DataFrame, columns: dict[str, str], source: SourceSpec) -> DataFrame:
    """Say in `BAD_REASON` which rows have a text that is not UTF-8, as `convert_rows` does."""
    kinds = {name: arrow_to_spark_type(columns[name]) for name in columns if name in source.columns}
    texts = [name for name, own in kinds.items() if own == "string"]
    cases = [
        f"CASE WHEN NOT is_valid_utf8({quote_name(name)})"
        f" THEN {quote_text(f'{name} {NOT_UTF8}')} END"
        for name in texts
    ]
    known = BAD_REASON if BAD_REASON in columns else "CAST(NULL AS string)"
    frame = frame.withColumn(BAD_REASON, F.expr(f"coalesce({', '.join([known, *cases])}, NULL)"))
    repaired = {name: F.expr(f"make_valid_utf8({quote_name(name)})") for name in texts}
    return frame.withColumns(repaired) if texts else frame


def _link_object(base: Path, index: int, part: CutPart) -> Path:
    # A link gives the object a path that names its place; nothing is copied.
    folder = base / f"_m={part.member}" / f"_p={index}" / f"_o={part.ordinal}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "rows.parquet"
    if not link.is_symlink():
        assert isinstance(part.path, Path)  # noqa: S101 - `_download_parts` made it
        link.symlink_to(part.path.resolve())
    return link


def to_nested_type(own: str) -> pa.DataType:
    """The Arrow type that `createDataFrame` takes for a nested type."""
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import DataType

    return to_arrow_type(DataType.fromDDL(own), timestamp_utc=True)


def arrow_to_frame(session: SparkSession, table: pa.Table, schema: str | None = None) -> DataFrame:
    """An Arrow table as a DataFrame, in one chunk.

    Spark takes an empty record batch for the end and loses what follows.
    """
    return session.createDataFrame(table.combine_chunks(), schema)
