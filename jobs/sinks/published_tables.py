"""The output tables as a reader sees them: one consistent cut over all of them, without a catalog.

`<pipeline>/iceberg/current.json` names the metadata files; each holds exactly the slots up to the
pointer's, so an older cut is the rows whose `_epoch` is not above it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyiceberg.table import ALWAYS_TRUE, StaticTable

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sinks.base_follower import read_stored_position
from tidegate.jobs.sinks.iceberg_catalog import build_io_properties
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    PublishedCut,
    read_published_cut,
)
from tidegate.jobs.sinks.output_tables import build_table_schema
from tidegate.jobs.sinks.row_positions import (
    SPLICE_COLUMN,
    compute_current_positions,
    find_rewrite_starts,
    select_current_rows,
)
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import format_instant

EXPORT_FORMATS = (".parquet", ".csv", ".json")
_SORT_COLUMNS = (
    "position",
    "_epoch",
    "window_start",
    "_source",
    "_partition",
    "_seq",
    "barrier_id",
)  # files come in no order


def read_table(
    spec: PipelineSpec,
    store: Store,
    name: str,
    *,
    current_only: bool = False,
    at: int | None = None,
    since: int = 0,
    columns: tuple[str, ...] | None = None,
    spliced: bool = True,
) -> Any:
    """Rows of one output table.

    A table that never had a row is empty. Events come with their current positions.

    Args:
        spec: the pipeline.
        store: its store.
        name: a table of the pipeline.
        current_only: of a window's results only the newest revision of each, without replaced
            sessions.
        at: the cut after this slot of the current lineage; default: the newest that every table
            shows.
        since: only rows of later slots than this one; files of older ones are not opened.
        columns: only these; default: all.
        spliced: with the events that splice requests inserted; without them positions are those
            that the epochs gave.

    Raises:
        ConfigurationError: no such table, or the tables do not show that slot yet.
        TransientError: the store cannot be reached.
    """
    _require_table(spec, name)
    current = read_published_cut(store, spec.name) or PublishedCut("", 0, 0)
    if at is not None and at > current.upto:
        raise ConfigurationError(
            f"the tables of {spec.name} show slots up to {current.upto}, not {at} yet",
            code="tables.not_published",
            pipeline=spec.name,
            advice="wait until the epoch is published, or ask for an older one",
        )
    window = spec.windows.get(name)
    wanted = None if current_only and window else columns
    table = _scan_table(spec, store, name, current, (since, at), wanted, spliced)
    if current_only and window:
        table = select_current_revisions(table, window)
    return table.select(list(columns)) if columns else table


def find_published_slot(spec: PipelineSpec, log: SlotLog) -> int:
    """The newest position of the current lineage that the tables and every sink show.

    Slots after it must not be retired.
    """
    marks = _read_follower_positions(spec, log.store)
    way = CurrentLineage(log, log.head())
    return min(
        way.last_shared_slot(mark) if mark is not None and way.is_in_log(mark) else 0
        for mark in marks
    )


def have_followers_rewound(spec: PipelineSpec, log: SlotLog) -> bool:
    """Whether tables and sinks stand on the current timeline.

    Then no publisher can apply a slot of an abandoned one any more.
    """
    marks = _read_follower_positions(spec, log.store)
    timeline = log.head().timeline
    return all(mark is not None and mark.timeline == timeline for mark in marks)


def _read_follower_positions(spec: PipelineSpec, store: Store) -> list[FollowerPosition | None]:
    """How far each follower says it is; None for one that never said so."""
    current = read_published_cut(store, spec.name)
    sinks = [read_stored_position(store, spec.name, name) for name in spec.sinks]
    return [
        FollowerPosition(current.timeline, current.upto) if current else None,
        *(found.position if found else None for found in sinks),
    ]


def list_referenced_files(spec: PipelineSpec, store: Store) -> set[str]:
    """Addresses of every data file that a snapshot of the published tables still names.

    GC must keep them.

    Raises:
        TransientError: something could not be read; the answer would not be complete.
    """
    current = read_published_cut(store, spec.name) or PublishedCut("", 0, 0)
    found: set[str] = set()
    for name, location in current.tables.items():
        with translate_read_errors(spec, name):
            table = StaticTable.from_metadata(location, build_io_properties(store))
            manifests = {
                m.manifest_path: m for s in table.metadata.snapshots for m in s.manifests(table.io)
            }
            found |= {
                e.data_file.file_path
                for m in manifests.values()
                for e in m.fetch_manifest_entry(table.io)
            }
    return found


def select_current_revisions(table: Any, window: WindowSpec) -> Any:
    """The newest revision of each result, without sessions that a later one replaces.

    With `revisions: delta` every revision carries a part of its own, so all of them are current.
    """
    if window.revisions == "delta" or table.num_rows == 0:
        return table
    newest: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    order = zip(table["_epoch"].to_pylist(), table["revision"].to_pylist(), strict=True)
    results = list(_list_result_keys(table, window))
    for row, (result, (epoch, revision)) in enumerate(zip(results, order, strict=True)):
        newest[result] = max(newest.get(result, (-1, -1, -1)), (epoch, revision, row))
    gone = {
        (*result[:-1], name)
        for result, names in zip(results, table["replaces"].to_pylist(), strict=True)
        for name in names or ()
    }
    return table.take(
        pa.array(
            sorted(row for result, (_, _, row) in newest.items() if result not in gone), pa.int64()
        )
    )


def export_table(table: Any, path: Path) -> None:
    """Write rows to a .parquet, .csv or .json file (one JSON object per line).

    Lists stand in CSV as JSON texts.

    Raises:
        ConfigurationError: another ending, or the file cannot be written.
    """
    try:
        match path.suffix:
            case ".parquet":
                pq.write_table(table, path)
            case ".csv":
                pyarrow.csv.write_csv(flatten_for_csv(table), path)
            case ".json":
                path.write_text(to_json_lines(table))
            case _:
                raise _export_error(path, f"the ending must be one of {', '.join(EXPORT_FORMATS)}")
    except OSError as error:
        raise _export_error(path, str(error)) from error


def to_json_lines(table: Any) -> str:
    """Rows as JSON, one object per line.

    Times in ISO form, bytes in hexadecimal, what is no number as "NaN" or "Infinity".
    """
    return "".join(_to_json_line(row) + "\n" for row in table.to_pylist())


def _to_json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=_to_json_text, allow_nan=False)
    except ValueError:  # JSON has no word for them
        return json.dumps(_stringify_non_finite(row), default=_to_json_text)


def _stringify_non_finite(value: Any) -> Any:
    """With texts instead of floats that are no numbers."""
    if isinstance(value, dict):
        return {name: _stringify_non_finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_stringify_non_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _require_table(spec: PipelineSpec, name: str) -> None:
    if name not in spec.table_names:
        raise ConfigurationError(
            f"{spec.name} has no table {name!r}",
            code="tables.unknown",
            pipeline=spec.name,
            advice=f"choose one of: {', '.join(spec.table_names)}",
        )


def _scan_table(
    spec: PipelineSpec,
    store: Store,
    name: str,
    current: PublishedCut,
    slots: tuple[int, int | None],
    columns: tuple[str, ...] | None,
    spliced: bool,
) -> Any:
    location = current.tables.get(name)
    if location is None:
        empty = build_table_schema(spec, name).empty_table()
        return empty.select(list(columns)) if columns else empty
    since, at = slots
    bounds = [f"_epoch > {since}"] * (since > 0) + [f"_epoch <= {at}"] * (at is not None)
    rows = " and ".join(bounds) or ALWAYS_TRUE
    with translate_read_errors(spec, name):
        table = StaticTable.from_metadata(location, build_io_properties(store))
        if name == EVENTS and SPLICE_COLUMN in {field.name for field in table.schema().fields}:
            return _scan_merged_events(spec, table, bounds, at, columns, spliced)
        if name in spec.streams and SPLICE_COLUMN in {
            field.name for field in table.schema().fields
        }:
            return _scan_merged_stream(table, bounds, at, columns, spliced)
        found = table.scan(row_filter=rows, selected_fields=columns or ("*",)).to_arrow()
    plain = use_plain_types(found)
    order = [(c, "ascending") for c in _SORT_COLUMNS if c in plain.column_names]
    return plain.sort_by(order) if order else plain


def _scan_merged_events(
    spec: PipelineSpec,
    table: StaticTable,
    bounds: list[str],
    at: int | None,
    columns: tuple[str, ...] | None,
    spliced: bool,
) -> Any:
    """Rows of an events table into which something was merged."""
    time = next(iter(spec.sources.values())).event_time
    order = {"position", SPLICE_COLUMN, "_source", "_partition", "_seq", "_epoch", time}
    wanted = ("*",) if columns is None else tuple({*columns, *order})
    rows = (
        " and ".join([*bounds, *([] if spliced else [f"{SPLICE_COLUMN} is null"])]) or ALWAYS_TRUE
    )
    found = use_plain_types(table.scan(row_filter=rows, selected_fields=wanted).to_arrow())
    if not spliced or spec.release.mode is ReleaseMode.PASS_THROUGH:
        return (found if spliced else found.drop_columns([SPLICE_COLUMN])).sort_by("position")
    merged = " and ".join(
        [f"{SPLICE_COLUMN} is not null", *([] if at is None else [f"_epoch <= {at}"])]
    )
    inserted = use_plain_types(
        table.scan(row_filter=merged, selected_fields=tuple(order)).to_arrow()
    )
    return compute_current_positions(found, inserted, time)


def _scan_merged_stream(
    table: StaticTable,
    bounds: list[str],
    at: int | None,
    columns: tuple[str, ...] | None,
    spliced: bool,
) -> Any:
    """Rows of a stream that merges wrote anew in part."""
    own = {"position", "_id", "_epoch"}
    wanted = ("*",) if columns is None else tuple({*columns, *own})
    rows = (
        " and ".join([*bounds, *([] if spliced else [f"{SPLICE_COLUMN} is null"])]) or ALWAYS_TRUE
    )
    found = use_plain_types(table.scan(row_filter=rows, selected_fields=wanted).to_arrow())
    if not spliced:
        return found.sort_by("position")
    merged = " and ".join(
        [f"{SPLICE_COLUMN} is not null", *([] if at is None else [f"_epoch <= {at}"])]
    )
    return select_current_rows(
        found,
        find_rewrite_starts(
            table.scan(row_filter=merged, selected_fields=("position", "_epoch")).to_arrow()
        ),
    )


@contextmanager
def translate_read_errors(spec: PipelineSpec, name: str) -> Iterator[None]:
    """What goes wrong while a table is read is the store's fault, and may pass."""
    try:
        yield
    except OSError as error:
        raise TransientError(
            f"table {name} of {spec.name} cannot be read: {str(error).splitlines()[0]}",
            code="tables.unavailable",
            pipeline=spec.name,
            advice="check the store and try again",
            retry_after=2.0,
        ) from error


def use_plain_types(table: Any) -> Any:
    """The table without large types.

    Pyiceberg answers with them where there is no file to learn from; readers need not know.
    """
    return table.cast(
        pa.schema([field.with_type(_to_plain_type(field.type)) for field in table.schema])
    )


def _to_plain_type(kind: Any) -> Any:
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_to_plain_type(kind.value_type))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


def _list_result_keys(table: Any, window: WindowSpec) -> Iterator[tuple[Any, ...]]:
    """What each row is a result of: its keys and its bounds, written as in `replaces`."""
    bounds = zip(*(_to_tick_list(table[c]) for c in ("window_start", "window_end")), strict=True)
    keys = (
        zip(*(table[c].to_pylist() for c in window.keys), strict=True)
        if window.keys
        else [()] * table.num_rows
    )
    for key, (start, end) in zip(keys, bounds, strict=True):
        yield (*key, f"{format_instant(start)}/{format_instant(end)}")


def _to_tick_list(column: Any) -> list[int]:
    return list(column.cast(pa.int64()).to_pylist())


def flatten_for_csv(table: Any, *, hex_prefix: str = "") -> Any:
    """Lists and bytes as texts: CSV has neither."""
    for i, field in enumerate(table.schema):
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            texts = [
                None if v is None else json.dumps(v, default=_to_json_text)
                for v in table.column(i).to_pylist()
            ]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
        elif pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            texts = [
                None if v is None else hex_prefix + v.hex() for v in table.column(i).to_pylist()
            ]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table


def _to_json_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _export_error(path: Path, cause: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write {path}: {cause}",
        code="tables.export",
        advice="choose another file with --out",
    )
