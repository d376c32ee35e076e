"""Reads the output tables: one consistent cut over all of them, without a catalog.

`<pipeline>/iceberg/current.json` names the metadata files. Each holds exactly the slots up to the
pointer's, so an older cut consists of the rows whose `_epoch` is not above it.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import list_rows
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.time_units import format_instant

from .base_follower import read_stored_position
from .errors import EXPORT_FAILED, FILE_DAMAGED, NOT_PUBLISHED, TABLE_UNREADABLE, UNKNOWN_TABLE
from .lineage_position import CurrentLineage, FollowerPosition, PublishedCut, read_published_cut
from .output_tables import (
    SPLICE_COLUMN,
    build_table_schema,
    compute_current_positions,
    find_rewrite_starts,
    select_current_rows,
)
from .table_scan import Range, TableScan, select_in_ranges

EXPORT_FORMATS = (".parquet", ".csv", ".json")
# Iceberg returns files in any order; rows are sorted by those of these columns that a table has.
_SORT_COLUMNS = (
    "position",
    "_epoch",
    "window_start",
    "_source",
    "_partition",
    "_seq",
    "barrier_id",
)


@dataclass(frozen=True)
class RowSelection:
    """The rows and columns to read.

    Attributes:
        since: only rows of later slots; files of older ones are not opened.
        until: only rows of slots up to this one, with the positions that they have in the cut;
            files of later ones are not opened.
        at: the cut after this slot; None: all slots that are published.
        columns: None: all.
        spliced: whether rows that splice requests inserted are included. Without them, positions
            are those that the epochs gave.
        positions: only files that may have rows with these stored positions.
    """

    since: int = 0
    until: int | None = None
    at: int | None = None
    columns: tuple[str, ...] | None = None
    spliced: bool = True
    positions: Range | None = None

    def scan(self, table: TableScan, needed: Collection[str] = ()) -> Any:
        """Scan the selected rows; `needed` columns are added."""
        # Columns that only the order or the filter needs are dropped by the caller.
        columns = self.columns and {*self.columns, *needed}
        ends = [end for end in (self.until, self.at) if end is not None]
        slots = (self.since + 1 if self.since else None, min(ends, default=None))
        ranges: dict[str, list[Range]] = {} if slots == (None, None) else {"_epoch": [slots]}
        # Merges move rows, so that stored positions are not those that were asked for.
        if self.positions and SPLICE_COLUMN not in table.schema.names:
            ranges["position"] = [self.positions]
        return table.read(columns, ranges)

    def scan_inserted(self, table: TableScan, columns: Collection[str]) -> Any:
        """Scan columns of *all* inserted rows up to `at`, whatever `since` and `until` are.

        Older insertions move the positions of later rows.
        """
        return table.read(columns, {"_epoch": [(None, self.at)]}, with_value=SPLICE_COLUMN)


def read_table(
    spec: PipelineSpec,
    store: Store,
    name: str,
    *,
    current_only: bool = False,
    at: int | None = None,
    columns: tuple[str, ...] | None = None,
) -> Any:
    """Return rows of one output table; events come with their current positions.

    A table that never had a row is empty.

    Args:
        spec: the pipeline.
        store: its store.
        name: a table of the pipeline.
        current_only: return only the newest revision of each window result, without replaced
            sessions.
        at: the cut after this slot of the lineage that the tables show; by default the newest that
            every table shows.
        columns: only these; by default all.

    Raises:
        ConfigurationError: no such table, or the tables do not show that slot yet.
        TransientError: the store cannot be reached.
    """
    window = spec.windows.get(name) if current_only else None
    if not window:
        return scan_table(spec, store, name, RowSelection(at=at, columns=columns))
    # Choosing revisions needs columns that the caller may not have asked for.
    table = scan_table(spec, store, name, RowSelection(at=at))
    table = select_current_revisions(table, window)
    return table.select(list(columns)) if columns else table


def read_positions(
    spec: PipelineSpec, store: Store, name: str, start: int, end: int, columns: Collection[str]
) -> Any:
    """Return the rows ``start <= position < end`` of the events table or of a stream, in order.

    Positions are current ones, as in `read_table`. Files without such rows are not opened, unless
    splice requests were merged into the table.
    """
    within = (start, end - 1)
    selection = RowSelection(columns=tuple({*columns, "position"}), positions=within)
    return select_in_ranges(scan_table(spec, store, name, selection), {"position": [within]})


def describe_table(spec: PipelineSpec, store: Store, name: str) -> dict[str, Any]:
    """Return `address` and `rows` of a table; no data file is read.

    The rows are all that it stores: every revision, and rows that a merge replaced. The address is
    None, and there are 0 rows, before the table exists.
    """
    current = read_published_cut(store, spec.name)
    address = current.tables.get(name) if current else None
    if address is None:
        return {"address": None, "rows": 0}  # a table is created with its first row
    with translate_read_errors(spec, name):
        return {"address": address, "rows": TableScan(store, address).row_count}


def find_published_slot(spec: PipelineSpec, log: SlotLog) -> int:
    """Return the newest slot of the current lineage that the tables and every sink show for good.

    It is 0 while one of them has not stored a position. Slots after it must not be retired.
    """
    positions = _read_follower_positions(spec, log.store)
    lineage = CurrentLineage(log, log.head())
    return min(map(lineage.count_surely_kept_slots, positions))


def have_followers_rewound(spec: PipelineSpec, log: SlotLog) -> bool:
    """Return whether the tables and all sinks have stored a position on the current timeline.

    Then no publisher can apply a slot of an abandoned timeline any more.
    """
    positions = _read_follower_positions(spec, log.store)
    timeline = log.head().timeline
    return all(found is not None and found.timeline == timeline for found in positions)


def _read_follower_positions(spec: PipelineSpec, store: Store) -> list[FollowerPosition | None]:
    """Return the position of each follower; None for one that has not stored any."""
    current = read_published_cut(store, spec.name)
    sinks = [read_stored_position(store, spec.name, name) for name in spec.sinks]
    positions = [found.position if found else None for found in sinks]
    return [current.position if current else None, *positions]


def select_current_revisions(table: Any, window: WindowSpec) -> Any:
    """Return the newest revision of each result, without sessions that a later one replaces.

    With `revisions: delta` every revision is a part of the result, so all of them are current.
    """
    if window.revisions == "delta":
        return table
    order = table.select(["_epoch", "revision"]).to_pylist()
    # The identity of a result: keys and bounds, written as in `replaces`.
    spans = [
        f"{format_instant(start)}/{format_instant(end)}"
        for start, end in iterate_window_bounds(table)
    ]
    results = list(zip(*(table[c].to_pylist() for c in window.keys), spans, strict=True))
    # Of rows that are equally new the last one stays.
    ascending = sorted(range(len(order)), key=lambda row: tuple(order[row].values()))
    newest = {results[row]: row for row in ascending}
    # A session that grew names the sessions that it replaces by their bounds.
    gone = {
        (*result[:-1], name)
        for result, names in zip(results, table["replaces"].to_pylist(), strict=True)
        for name in names or ()
    }
    current = sorted(row for result, row in newest.items() if result not in gone)
    return table.take(pa.array(current, pa.int64()))


def export_table(table: Any, path: Path) -> None:
    """Write rows to a .parquet, .csv or .json file (one JSON object per line).

    An existing file is replaced. CSV holds lists as JSON texts, and bytes in hexadecimal.

    Raises:
        ConfigurationError: the ending is not supported, or the file cannot be written.
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
                endings = ", ".join(EXPORT_FORMATS)
                raise EXPORT_FAILED(path=path, cause=f"the ending must be one of {endings}")
    except OSError as error:
        raise EXPORT_FAILED(path=path, cause=error) from error


def to_json_lines(table: Any) -> str:
    """Return rows as JSON, one object per line.

    Times are in ISO form, bytes in hexadecimal; non-finite numbers are "NaN" or "Infinity".
    """
    return "".join(to_json_line(row) + "\n" for row in list_rows(table))


def to_json_line(row: dict[str, Any]) -> str:
    """Return one row as in `to_json_lines`, without the end of the line."""
    try:
        return json.dumps(row, default=_to_json_text, allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity, which Python writes and reads by default
        written = json.dumps(row, default=_to_json_text)
        return json.dumps(json.loads(written, parse_constant=str))


def scan_table(spec: PipelineSpec, store: Store, name: str, selection: RowSelection) -> Any:
    """Return the selected rows of all revisions, in order; raises as `read_table` does."""
    if name not in spec.table_names:
        raise UNKNOWN_TABLE(pipeline=spec.name, table=name, tables=", ".join(spec.table_names))
    current = read_published_cut(store, spec.name) or PublishedCut()
    if selection.at is not None and selection.at > current.upto:
        raise NOT_PUBLISHED(pipeline=spec.name, published=current.upto, slot=selection.at)
    # A table is created with its first row.
    rows = build_table_schema(spec, name).empty_table()
    if location := current.tables.get(name):
        with translate_read_errors(spec, name):
            rows = _scan_existing_table(spec, TableScan(store, location), name, selection)
    return rows.select(list(selection.columns)) if selection.columns else rows


def _scan_existing_table(
    spec: PipelineSpec, table: TableScan, name: str, selection: RowSelection
) -> Any:
    # A table has this column from its first merge on.
    merged = SPLICE_COLUMN in table.schema.names
    if merged and name == EVENTS:
        return _scan_merged_events(spec, table, selection)
    if merged and name in spec.streams:
        return _scan_merged_stream(table, selection)
    rows = selection.scan(table)
    order = [(column, "ascending") for column in _SORT_COLUMNS if column in rows.column_names]
    return rows.sort_by(order) if order else rows


def _scan_merged_events(spec: PipelineSpec, table: TableScan, selection: RowSelection) -> Any:
    """Return rows of an events table into which rows were merged."""
    time = spec.event_time_column
    order = {"position", SPLICE_COLUMN, "_source", "_partition", "_seq", "_epoch", time}
    rows = selection.scan(table, order)
    if not selection.spliced:
        rows = rows.filter(pc.is_null(rows[SPLICE_COLUMN]))
        return rows.drop_columns([SPLICE_COLUMN]).sort_by("position")
    if spec.release.mode is ReleaseMode.PASS_THROUGH:
        return rows.sort_by("position")  # merged rows were appended: stored positions are current
    return compute_current_positions(rows, selection.scan_inserted(table, order), time)


def _scan_merged_stream(table: TableScan, selection: RowSelection) -> Any:
    """Return rows of a stream that merges rewrote in part."""
    rows = selection.scan(table, ("position", "_id", "_epoch", SPLICE_COLUMN))
    if not selection.spliced:
        return rows.filter(pc.is_null(rows[SPLICE_COLUMN])).sort_by("position")
    # All rewrites, also older ones: a rewrite hides every older row behind its start.
    rewritten = selection.scan_inserted(table, ("position", "_epoch"))
    return select_current_rows(rows, find_rewrite_starts(rewritten))


@contextmanager
def translate_read_errors(spec: PipelineSpec, name: str) -> Iterator[None]:
    """Raise a TransientError for failures of the store while a table is read.

    A damaged file is a PoisonError.
    """
    try:
        yield
    except pa.ArrowInvalid as error:
        raise FILE_DAMAGED(pipeline=spec.name, cause=get_first_line(error)) from error
    except OSError as error:
        raise TABLE_UNREADABLE(
            pipeline=spec.name, table=name, cause=get_first_line(error)
        ) from error


def use_plain_types(table: Any) -> Any:
    """Return the table without Arrow's large types.

    pyiceberg uses them if there is no file to take the types from.
    """
    return table.cast(
        pa.schema([field.with_type(_to_plain_type(field.type)) for field in table.schema])
    )


def _to_plain_type(kind: Any) -> Any:
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_to_plain_type(kind.value_type))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


def iterate_window_bounds(table: Any) -> Iterator[tuple[int, int]]:
    """Return start and end of each row's window in ticks, to be read once."""
    ends = (table[name].cast(pa.int64()).to_pylist() for name in ("window_start", "window_end"))
    return zip(*ends, strict=True)


def flatten_for_csv(table: Any, *, hex_prefix: str = "") -> Any:
    """Convert lists to JSON texts and bytes to hexadecimal ones, because CSV has neither."""
    for i, field in enumerate(table.schema):
        is_binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
        if is_binary or pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            texts = [
                None
                if value is None
                else hex_prefix + value.hex()
                if is_binary
                else json.dumps(value, default=_to_json_text)
                for value in table.column(i).to_pylist()
            ]
            table = table.set_column(i, field.name, pa.array(texts, pa.string()))
    return table


def quote_formulas(table: pa.Table) -> pa.Table:
    """Put an apostrophe before texts that a spreadsheet takes for formulas.

    These begin with an equals sign, a plus, a minus, an `@`, a tab or a carriage return.

    >>> quote_formulas(pa.table({"a": ["=1+1", "plain", None]}))["a"].to_pylist()
    ["'=1+1", 'plain', None]
    """
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            texts = table[field.name]
            formulas = pc.match_substring_regex(texts, r"^[=+\-@\t\r]")
            disarmed = pc.binary_join_element_wise("'", texts, "")
            table = table.set_column(place, field.name, pc.if_else(formulas, disarmed, texts))
    return table


def _to_json_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
