"""The rows of a cut as one DataFrame, cast to the declared schema, each with its place and its verdict.

Columns besides the user's: ``_m`` (index of the member's slice in the cut), ``_object`` (index into `CutFrame.parts`),
``_source``, ``_partition``, ``_seq``, ``_so`` (place of the source in the spec), ``_et`` (event time in ticks),
``_kind`` (data, barrier, punctuation), ``_dead`` (reason of a dead letter, else null) and ``_detail``. Spark computes only
those that a plan asks for.

Objects are read in place where the store has them as files, else from copies in the scratch folder; either way Spark sees
them under folders ``_m=../_p=../_o=..``, so that their place arrives as partition columns, at no cost per row. Few rows are
read in the driver and handed over as Arrow: a third of the time of a scan that has to open every file anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everybody knows

from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.interfaces import Cut
from tidegate.jobs.spark.schema import cast_never_fails, is_naive, is_nanos, quote, spark_of_arrow, spark_of_declared, unwrap
from tidegate.jobs.spec.errors import PoisonError
from tidegate.jobs.spec.pipeline import BarrierColumns, PipelineSpec, SourceSpec

__all__ = ["SMALL_ROWS", "CutFrame", "Part", "Sessions", "local_copy", "open_cut", "unreadable"]

SMALL_ROWS: Final = 20_000
"""Up to this many rows the driver reads objects itself; `createDataFrame` wins below, a parallel scan above."""
_PLACE: Final = (("_m", "int", pa.int32()), ("_p", "int", pa.int32()), ("_o", "bigint", pa.int64()), ("_row", "bigint", pa.int64()))


@dataclass(frozen=True, slots=True)
class Part:
    """One object of a cut.

    Attributes:
        member: index of its slice in the cut.
        path: the object as a file.
        columns: physical column -> Arrow type text, as planned.
    """

    member: int
    key: str
    etag: str
    ordinal: int
    rows: int
    row_start: int
    row_end: int
    path: Path
    columns: tuple[tuple[str, str], ...]

    @property
    def whole(self) -> bool:
        """Whether every row of the object is in the cut."""
        return self.row_start == 0 and self.row_end == self.rows


@dataclass(frozen=True, slots=True)
class CutFrame:
    """A cut, staged and readable.

    Attributes:
        frame: its rows; None when there are none.
        rows: rows of all kinds in it.
    """

    cut: Cut
    parts: tuple[Part, ...]
    frame: DataFrame | None
    rows: int

    def blame(self) -> PoisonError | None:
        """The error that names the objects whose pages cannot be read; None when all can. Reads every part."""
        bad = [part.key for part in self.parts if not _readable(part)]
        return unreadable(bad) if bad else None


@dataclass(frozen=True, slots=True)
class Sessions:
    """Two sessions of one Spark: interpreted for few rows, compiling for many."""

    quick: SparkSession
    full: SparkSession

    def of(self, rows: int) -> SparkSession:
        """The session for so many rows."""
        return self.quick if rows <= SMALL_ROWS else self.full


def open_cut(sessions: Sessions, spec: PipelineSpec, store: Store, cut: Cut, scratch: Path) -> CutFrame:
    """Stage the objects of a cut below `scratch` and describe their rows. Runs no Spark job."""
    parts = _parts(store, cut, scratch)
    rows = sum(part.row_end - part.row_start for part in parts)
    session = sessions.of(rows)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, part in enumerate(parts):
        source = spec.sources[cut.slices[part.member].member.source]
        traits = (source.event_time, source.timezone, source.min_event_time, source.barriers)
        groups.setdefault((part.columns, *traits), []).append(index)
    frames = []
    for (columns, *_), indexes in groups.items():
        chosen = [(index, parts[index]) for index in indexes]
        raw = _in_driver(session, columns, chosen) if rows <= SMALL_ROWS else _scan(session, columns, chosen, scratch)
        source = spec.sources[cut.slices[parts[indexes[0]].member].member.source]
        frames.append(_declared(raw, source, dict(columns)))
    frame = reduce(DataFrame.unionAll, frames) if frames else None
    if frame is not None and rows <= SMALL_ROWS:
        frame = frame.coalesce(1)  # one task, and no shuffle anywhere behind it
    return CutFrame(cut, parts, None if frame is None else _placed(frame, spec, cut), rows)


def local_copy(store: Store, key: str, folder: Path) -> Path:
    """The object as a file: in place where the store can, else downloaded once into `folder`."""
    path = store.local_path(key)
    if path is not None:
        return path
    copy = folder / key.replace("/", "~")
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        store.download(key, copy)
    return copy


def _parts(store: Store, cut: Cut, scratch: Path) -> tuple[Part, ...]:
    found = [(index, part) for index, piece in enumerate(cut.slices) for part in piece.parts]
    with ThreadPoolExecutor(8) as pool:  # a download waits for the network, not for a core
        paths = list(pool.map(lambda item: local_copy(store, item[1]["key"], scratch / "objects"), found))
    return tuple(
        Part(
            index,
            part["key"],
            part["etag"],
            part["ordinal"],
            part["rows"],
            part["row_start"],
            part["row_end"],
            path,
            tuple(part["columns"].items()),
        )
        for (index, part), path in zip(found, paths, strict=True)
    )


def _readable(part: Part) -> bool:
    try:
        pq.read_table(part.path)
    except (pa.ArrowException, OSError):
        return False
    return True


def unreadable(keys: Sequence[str]) -> PoisonError:
    """The error for objects whose pages are corrupt."""
    return PoisonError(
        f"the data pages of {', '.join(keys)} cannot be read, although the footer can",
        code="object.corrupt",
        kept="the object, and everything sealed before it",
        advice="replace the object, or move it out of the source's folder",
    )


def _physical(columns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Column -> Spark type to read; columns that no declared type can come from are left out (their rows are dead)."""
    known = [(name, spark_of_arrow(arrow), arrow) for name, arrow in columns]
    return [(name, "bigint" if is_nanos(arrow) else own) for name, own, arrow in known if own is not None]


def _ddl(columns: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{quote(name)} {own}" for name, own in columns)


def _scan(session: SparkSession, columns: Any, parts: list[tuple[int, Part]], scratch: Path) -> DataFrame:
    base = scratch / "cut"
    paths = [_link(base, index, part) for index, part in parts]
    schema = _ddl([*_physical(columns), *((name, own) for name, own, _ in _PLACE[:3])])
    frame = session.read.schema(schema).option("basePath", str(base)).parquet(*paths)
    frame = frame.withColumn("_row", F.expr("_metadata.row_index"))
    for index, part in parts:
        if not part.whole:
            frame = frame.where(f"_p <> {index} OR (_row >= {part.row_start}L AND _row < {part.row_end}L)")
    return frame


def _link(base: Path, index: int, part: Part) -> str:
    folder = base / f"_m={part.member}" / f"_p={index}" / f"_o={part.ordinal}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "rows.parquet"
    if not link.is_symlink():
        link.symlink_to(part.path.resolve())
    return str(link)


def _in_driver(session: SparkSession, columns: Any, parts: list[tuple[int, Part]]) -> DataFrame:
    physical = _physical(columns)
    fields = [pa.field(name, _handed_over(own, dict(columns)[name])) for name, own in physical]
    schema = pa.schema([*fields, *(pa.field(name, arrow) for name, _, arrow in _PLACE)])
    table = pa.concat_tables([_read_part(index, part, schema) for index, part in parts])
    return session.createDataFrame(table, schema=_ddl([*physical, *((name, own) for name, own, _ in _PLACE)]))


def _handed_over(own: str, arrow: str) -> pa.DataType:
    """The Arrow type that `createDataFrame` takes for a Spark type."""
    if is_nanos(arrow):
        return pa.int64()
    if own.startswith("timestamp"):
        return pa.timestamp("us", None if own == "timestamp_ntz" else "UTC")
    if own.startswith("decimal"):
        precision, scale = own[8:-1].split(",")
        return pa.decimal128(int(precision), int(scale))
    kinds = {"boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64()}
    rest = {"float": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32()}
    return {**kinds, **rest}[own]


def _read_part(index: int, part: Part, schema: pa.Schema) -> pa.Table:
    names = schema.names[: -len(_PLACE)]
    try:
        rows = pq.ParquetFile(part.path).read(columns=names).slice(part.row_start, part.row_end - part.row_start)
    except (pa.ArrowException, OSError) as error:
        raise unreadable([part.key]) from error
    size = rows.num_rows
    place = [pa.repeat(pa.scalar(v, t), size) for v, (_, _, t) in zip((part.member, index, part.ordinal), _PLACE[:3], strict=True)]
    numbers = pa.array(range(part.row_start, part.row_start + size), pa.int64())
    return pa.table([*(rows[name].cast(schema.field(name).type) for name in names), *place, numbers], schema=schema)


def _declared(raw: DataFrame, source: SourceSpec, physical: dict[str, str]) -> DataFrame:
    """Cast to the declared schema and judge each row's form."""
    casts = {name: _cast(name, declared, physical.get(name), source.timezone) for name, declared in source.columns.items()}
    selected = [f"{cast} AS {quote(name)}" for name, cast in casts.items()]
    kind = _kind(source.barriers, casts)
    dead = _dead(source, physical, casts)
    detail = _detail(source, physical, casts)
    json = f"to_json(struct({', '.join(quote(n) for n, _ in _physical(physical.items()))}))"
    return raw.selectExpr(
        *selected, f"{casts[source.event_time]} AS _time", f"{_end(source, casts)} AS _end", f"{kind} AS _kind", f"{dead} AS _dead", f"{detail} AS _detail", f"{json} AS _json", "_m", "_p", "_o", "_row"
    )


def _cast(name: str, declared: str, arrow: str | None, timezone: str | None) -> str:
    target = spark_of_declared(declared)
    own = None if arrow is None else spark_of_arrow(arrow)
    if arrow is None or own is None:
        return f"CAST(NULL AS {target})"
    column = quote(name)
    if declared == "timestamp":
        return _timestamp(column, arrow, timezone)
    if own == target:
        return column
    return f"{'CAST' if cast_never_fails(arrow, declared) else 'try_cast'}({column} AS {target})"


def _timestamp(column: str, arrow: str, timezone: str | None) -> str:
    """Only timestamps become timestamps: a number has no unit, and a text no agreed zone."""
    if not unwrap(arrow).startswith("timestamp") or (is_naive(arrow) and timezone is None):
        return "CAST(NULL AS timestamp)"
    value = f"timestamp_micros(({column} - pmod({column}, 1000L)) div 1000L)" if is_nanos(arrow) else column
    return f"to_utc_timestamp(CAST({value} AS timestamp), '{timezone}')" if is_naive(arrow) else value


def _end(source: SourceSpec, casts: dict[str, str]) -> str:
    """Exclusive end in ticks; a point event lasts one."""
    point = f"unix_micros({casts[source.event_time]}) + 1L"
    return point if source.end_time is None else f"coalesce(unix_micros({casts[source.end_time]}), {point})"


def _kind(barriers: BarrierColumns | None, casts: dict[str, str]) -> str:
    if barriers is None:
        return "'data'"
    column = casts[barriers.kind]
    types = ", ".join(_text(t) for t in barriers.types)
    cases = [f"WHEN {column} IS NULL OR {column} = {_text(barriers.data)} THEN 'data'"]
    if barriers.punctuation is not None:
        cases.append(f"WHEN {column} = {_text(barriers.punctuation)} THEN 'punctuation'")
    if types:
        cases.append(f"WHEN {column} IN ({types}) THEN 'barrier'")
    return f"CASE {' '.join(cases)} END"


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _bad_columns(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> list[tuple[str, str]]:
    """(column, condition under which its value is bad)."""
    bad = []
    for name, declared in source.columns.items():
        arrow = physical.get(name)
        naive = declared == "timestamp" and arrow is not None and is_naive(arrow)
        if arrow is None or naive or cast_never_fails(arrow, declared):
            continue
        if spark_of_arrow(arrow) is None:
            bad.append((name, "true"))
        elif not (declared == "timestamp" and unwrap(arrow).startswith("timestamp")):
            bad.append((name, f"{quote(name)} IS NOT NULL AND {casts[name]} IS NULL"))
    return bad


def _dead(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    naive = [
        f"{quote(name)} IS NOT NULL"
        for name, declared in source.columns.items()
        if declared == "timestamp" and source.timezone is None and name in physical and is_naive(physical[name])
    ]
    bad = [condition for _, condition in _bad_columns(source, physical, casts)]
    if source.barriers is not None:
        bad.append(f"{_kind(source.barriers, casts)} IS NULL")
    cases = [("bad_value", " OR ".join(bad)), ("naive_time", " OR ".join(naive)), *_dead_times(source, casts)]
    return "CASE " + " ".join(f"WHEN {condition} THEN '{reason}'" for reason, condition in cases if condition) + " END"


def _dead_times(source: SourceSpec, casts: dict[str, str]) -> list[tuple[str, str]]:
    """Faults of the event time; a barrier row needs none."""
    time, data = casts[source.event_time], f"{_kind(source.barriers, casts)} = 'data'"
    cases = [("no_event_time", f"{time} IS NULL AND {data}")]
    if source.barriers is not None:
        cases.append(("bad_value", f"{time} IS NULL AND {_kind(source.barriers, casts)} = 'punctuation'"))
    if source.min_event_time is not None:
        cases.append(("before_min_event_time", f"{data} AND {time} < timestamp_micros({source.min_event_time}L)"))
    if source.end_time is not None:
        cases.append(("bad_value", f"{data} AND {casts[source.end_time]} <= {time}"))
    return cases


def _detail(source: SourceSpec, physical: dict[str, str], casts: dict[str, str]) -> str:
    """Names the column to blame, as far as one is to blame."""
    cases = [
        f"WHEN {condition} THEN {_text(f'{name} is {physical[name]}, declared {source.columns[name]}')}"
        for name, condition in _bad_columns(source, physical, casts)
    ]
    return f"CASE {' '.join(cases)} ELSE {_text(source.event_time)} END" if cases else _text(source.event_time)


def _placed(frame: DataFrame, spec: PipelineSpec, cut: Cut) -> DataFrame:
    """Add provenance: the member's names from literals, the position from ordinal and row."""
    order = {name: place for place, name in enumerate(spec.sources)}
    members = [piece.member for piece in cut.slices]
    sources = ", ".join(_text(m.source) for m in members)
    partitions = ", ".join(_text(m.partition) for m in members)
    places = ", ".join(str(order[m.source]) for m in members)
    columns = [quote(name) for name in spec.columns]
    return frame.selectExpr(
        *columns,
        f"array({sources})[_m] AS _source",
        f"array({partitions})[_m] AS _partition",
        "shiftleft(_o, 32) + _row AS _seq",
        f"array({places})[_m] AS _so",
        "unix_micros(_time) AS _et",
        "_time",
        "_end",
        "_kind",
        "_dead",
        "_detail",
        "_json",
        "_m",
        "_p",
    )

