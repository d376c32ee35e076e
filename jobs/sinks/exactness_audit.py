"""Checks that every row is in exactly one table, and that windows equal a recomputation.

The check is independent of the decider and the movers: it reads the input objects with pyarrow and
the published tables as any reader would, and recomputes in DuckDB. What *exact* means:
`docs/semantics.md`, sections 9.1 and 9.8.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.row_counts import (
    COLUMNS_LEFT_OUT,
    DEAD_OBJECT_ROWS,
    DEAD_OBJECTS,
    NULLS_FILLED,
    RULE_DROPPED,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.arrow_tables import read_columns, read_parquet_object
from tidegate.jobs.engine.interfaces import join_seq
from tidegate.jobs.engine.manifest_writer import SPLICE_KIND
from tidegate.jobs.engine.replay import FLOAT_TOLERANCE
from tidegate.jobs.rules.declared_values import build_cast_sql
from tidegate.jobs.rules.duck_frame import open_database, query_table
from tidegate.jobs.rules.recomputation import (
    NEVER_READ_REASONS,
    SET_ASIDE_REASONS,
    build_recompute_columns,
    build_starts_sql,
)
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec, SourceSpec
from tidegate.jobs.spec.row_rules import FILTERED, RULE_QUARANTINED
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction, WindowKind, WindowSpec
from tidegate.time_units import TICK_MAX, TICK_MIN

from .output_tables import build_table_schema, make_request_schema

# Others are recomputed by splices only: their cost grows with the rows.
_CHECKED_FUNCTIONS = ("count", "sum", "avg", "min", "max")


@dataclass
class ExactnessReport:
    """The findings.

    Attributes:
        rows: source -> disposition -> rows, counted in the tables; `read` is counted in the input
            objects, for topics in the epochs. `rule_quarantined` is there only with such rows.
        problems: sentences; empty if the tables are exact.
        windows: window -> number of results compared.
        skipped: windows that DuckDB cannot recompute, with the reason.
        topics: sources that are not read again; their rows are only checked for duplicates.
        set_aside: source -> `dead_objects`, `dead_object_rows`, `nulls_filled` and
            `columns_left_out`, as the manifests count them; no table has the rows of dead objects.
        retired_upto: the newest checkpoint whose cut is not known any more, or that the next one
            is compared with; None if all epochs were compared.
    """

    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    windows: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    topics: list[str] = field(default_factory=list)
    set_aside: dict[str, dict[str, int]] = field(default_factory=dict)
    retired_upto: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether no problem was found; what is in `skipped` or `topics` was not compared."""
        return not self.problems


def audit_exactness(
    spec: PipelineSpec, store: Store, log: SlotLog, table: Callable[[str], pa.Table]
) -> ExactnessReport:
    """Compare input, tables and recomputation at the head of the log.

    Everything sealed must be published. No one knows which rows retired epochs have read, so behind
    retired epochs only rows that were read after the oldest manifest are compared, and windows that
    begin after all rows read before.

    Args:
        spec: the pipeline.
        store: the store with its input objects, as an `InputView` unless all are plain Parquet.
        log: its log.
        table: reads one published table (events, late rows, dead letters, windows in their current
            revision).

    Raises:
        NotFoundError: an input object is gone.
    """
    base, epochs = _list_comparable_epochs(log)
    found = ExactnessReport(
        topics=[name for name, source in spec.sources.items() if not _is_read_again(source)],
        retired_upto=None if base is None else str(base.id),
    )
    if not epochs:
        return found
    head = epochs[-1]
    names = (DEAD_OBJECTS, DEAD_OBJECT_ROWS, NULLS_FILLED, COLUMNS_LEFT_OUT)
    counts = {
        source: {name: own[name] for name in names if name in own}
        for source, own in head.counters.per_source.items()
    }
    found.set_aside = {source: own for source, own in counts.items() if own}
    with open_database() as db:
        db.register("input", _read_input_rows(spec, store, epochs))
        for name in (EVENTS, LATE, DEAD_LETTERS):
            db.register(name, table(name))
        audit = _Audit(db, spec, base, head, found)
        audit.register_merged_rows(_read_merged_rows(spec, store, head))
        audit.check_row_dispositions()
        for name in spec.windows:
            audit.check_window_results(name, table(name))
    return found


def _is_read_again(source: SourceSpec) -> bool:
    """Whether input is compared: Kafka may have deleted it, and only Spark selects from it."""
    return source.kafka is None and not source.select


def _list_comparable_epochs(log: SlotLog) -> tuple[Manifest | None, list[Manifest]]:
    """Return the epoch to begin after, None for the beginning, and the epochs behind it."""
    epochs: list[Manifest] = []
    for filled in log.iterate_ancestors(log.head().checkpoint):
        if not isinstance(filled.record, Manifest):
            return epochs[-1], epochs[-2::-1]
        epochs.append(filled.record)
    return None, epochs[::-1]


def _read_input_rows(spec: PipelineSpec, store: Store, epochs: Iterable[Manifest]) -> pa.Table:
    """Return every data row of every consumed object, with its provenance.

    See `_is_read_again`.
    """
    tables: dict[str, pa.Table] = {}
    rows = []
    for epoch in epochs:
        for member, cut in epoch.cut.items():
            name, _, partition = member.partition("/")
            source = spec.sources[name]
            for part in cut["parts"] if _is_read_again(source) else ():
                key, begin, end = part["key"], part["row_start"], part["row_end"]
                if key not in tables:
                    tables[key] = read_parquet_object(store, key)
                chunk = _cast_to_declared_types(source, tables[key].slice(begin, end - begin))
                place = name, partition, part["ordinal"], begin
                rows.append(_add_provenance_columns(source, *place, chunk))
    return pa.concat_tables(rows or [_build_empty_input(spec)], promote_options="permissive")


def _build_empty_input(spec: PipelineSpec) -> pa.Table:
    events = build_table_schema(spec, EVENTS)
    own = [
        pa.field(name, events.field(name).type)
        for name in (*spec.columns, "_source", "_partition", "_seq")
    ]
    return pa.schema([*own, pa.field("_time", pa.int64())]).empty_table()


def _cast_to_declared_types(spec: SourceSpec, chunk: pa.Table) -> pa.Table:
    """Cast texts value by value, and put naive times into the source's zone.

    A value that cannot be cast becomes null; its row is a dead letter.
    """
    # Undeclared columns are not part of a row.
    chunk = chunk.select([name for name in chunk.column_names if name in spec.columns])
    for place, (name, kind) in enumerate(zip(chunk.schema.names, chunk.schema.types, strict=True)):
        if pa.types.is_timestamp(kind) and kind.tz is None and spec.columns[name] == "timestamp":
            zoned = pc.assume_timezone(
                chunk[name], spec.timezone or "UTC", ambiguous="earliest", nonexistent="earliest"
            )
            chunk = chunk.set_column(place, name, zoned.cast(pa.timestamp("us", tz="UTC")))
    texts = [
        n
        for n in chunk.column_names
        if pa.types.is_string(chunk[n].type) and spec.columns[n] not in ("string", "binary")
    ]
    if not texts:
        return chunk
    names = [f'"{name}"' for name in texts]
    casts = ", ".join(
        f"{build_cast_sql(quoted, spec.columns[name], spec)} as {quoted}"
        for name, quoted in zip(texts, names, strict=True)
    )
    return query_table(chunk, f"select * replace ({casts}) from rows")


def _add_provenance_columns(
    spec: SourceSpec, source: str, partition: str, ordinal: int, begin: int, chunk: pa.Table
) -> pa.Table:
    first = join_seq(ordinal, begin)
    times = chunk.column(spec.event_time).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    columns = {
        "_time": times,
        "_source": pa.repeat(source, chunk.num_rows),
        "_partition": pa.repeat(partition, chunk.num_rows),
        "_seq": pa.array(range(first, first + chunk.num_rows), pa.int64()),
    }
    for name, values in columns.items():
        chunk = chunk.append_column(name, values)
    if spec.barriers is None:
        return chunk
    # A row of no kind is a data row; barriers and punctuation are not rows of the input.
    kinds = chunk.column(spec.barriers.kind).cast(pa.string())
    return chunk.filter(pc.fill_null(pc.equal(kinds, spec.barriers.data), True))


def _read_merged_rows(spec: PipelineSpec, store: Store, head: Manifest) -> pa.Table:
    """Return the rows of all splice requests that were merged into events and windows."""
    # Rows of streams have other columns.
    files = [f for f in head.segments if f.kind == SPLICE_KIND and "stream" not in f.extra]
    # A merge before a column was added does not have it.
    return read_columns(store, files, make_request_schema(spec))


@dataclass
class _Audit:
    """The comparison of one input with its tables, in a database that has both."""

    db: duckdb.DuckDBPyConnection
    spec: PipelineSpec
    base: Manifest | None
    head: Manifest
    found: ExactnessReport

    def register_merged_rows(self, requested: pa.Table) -> None:
        """Create the relation `merged`, with a row for each output that a row was merged into."""
        self.db.register("requested", requested)
        self.db.execute(
            f"""create temp table merged as
            select * exclude (_outputs, _section),
                epoch_us("{self.spec.event_time_column}") as _time,
                unnest(_outputs) as _output,
                regexp_matches(_reason, '{NEVER_READ_REASONS}') as _stranger
            from requested"""
        )

    def check_row_dispositions(self) -> None:
        """Check that every row of the input is in exactly one place, and no other row is."""
        self._register_places()
        self._count_rows_by_source()
        twice = self._query_count(
            "select count(*) from (select 1 from all_places group by _source, _partition, _seq"
            " having count(*) > 1)"
        )
        if twice:
            self.found.problems.append(f"{twice} rows are in more than one place")
        topics = ", ".join(f"'{name}'" for name in self.found.topics) or "''"
        foreign = self._query_count(
            f"""select count(*) from places anti join input using (_source, _partition, _seq)
            where _partition not like 'file:%' and _source not in ({topics})"""
        )
        if foreign:
            self.found.problems.append(f"{foreign} rows in the tables were never read")
        self._check_missing_rows()
        gaps = self._query_count(
            "select count(*) from (select position - row_number() over (order by position) + 1 as d"
            f" from {EVENTS}) where d <> 0"
        )
        if gaps:
            self.found.problems.append(
                f"positions of the events table are not contiguous from 0 ({gaps} off)"
            )

    def _register_places(self) -> None:
        """Create `all_places`, the disposition of every row, and `places`, of those after `base`.

        A merged row is not late or dead any more.
        """
        self.db.execute(
            "create temp table inserted as select _source, _partition, _seq from merged where"
            f" _output = '{EVENTS}'"
        )
        row = "(_source, _partition, _seq)"
        cut = self.base.cut if self.base else {}
        members = [member.partition("/") for member in cut]
        before = {
            "_source": pa.array([source for source, _, _ in members], pa.string()),
            "_partition": pa.array([partition for _, _, partition in members], pa.string()),
            "_end": pa.array([part["end"] for part in cut.values()], pa.int64()),
        }
        self.db.register("before", pa.table(before))
        self.db.execute(f"""create temp table all_places as
            select _source, _partition, _seq, 'released' as place from {EVENTS}
            union all select _source, _partition, _seq, 'late' from {LATE}
                anti join inserted using {row} where output = 'events' and reason <> 'flagged'
            union all select _source, _partition, _seq,
                if(reason = '{RULE_QUARANTINED}', reason, 'dead_lettered') from {DEAD_LETTERS}
                anti join inserted using {row} where "row" is not null""")
        self.db.execute("""create temp table places as select all_places.* from all_places
            left join before using (_source, _partition) where _end is null or _seq >= _end""")

    def _count_rows_by_source(self) -> None:
        rows, per_source = self.found.rows, self.head.counters.per_source
        read = "select _source, count(*) from input group by 1 order by 1"
        for source, count in self.db.execute(read).fetchall():
            rows[source] = {"read": count, "released": 0, "late": 0, "dead_lettered": 0}
        places = "select _source, place, count(*) from places group by 1, 2"
        for source, place, count in self.db.execute(places).fetchall():
            rows.setdefault(source, {"read": 0})[place] = count
        for name in self.found.topics:
            rows.setdefault(name, {})["read"] = per_source.get(name, {}).get("read", 0)
        for name, own in per_source.items():
            if own.get(FILTERED):
                rows.setdefault(name, {"read": 0})[FILTERED] = own[FILTERED]

    def _check_missing_rows(self) -> None:
        missing = self._query_count(
            "select count(*) from input anti join places using (_source, _partition, _seq)"
        )
        counters, before = self.head.counters, self.base.counters if self.base else Counters()
        # Without an events table released rows are only counted. Rejected rows are in the late
        # table.
        only_counted = 0 if self.spec.outputs.events else counters.released - before.released
        dropped = sum(counters.dropped.values()) - sum(before.dropped.values())
        dropped += counters.filtered - before.filtered
        # Of the rows that wait now, and of those that were released since, some may have waited
        # before.
        most = dropped + only_counted + counters.retained
        least = max(dropped, most - before.retained)
        # Rows that wait or were dropped are not counted by source, so topics cannot be left out
        # here.
        if not least <= missing <= most and not self.found.topics:
            expected = f"{least}" if least == most else f"{least} to {most}"
            self.found.problems.append(
                f"{missing} rows are in no table, but {expected} are retained, dropped or only"
                " counted"
            )

    def check_window_results(self, name: str, actual: pa.Table) -> None:
        """Compare the results of a window with a recomputation, or say why that is not done."""
        why = self._explain_skip(name)
        if why is not None:
            self.found.skipped[name] = why
            return
        window = self.spec.windows[name]
        # Windows that are open have no result yet, or an early one.
        frontier = self.head.frontier_after
        closed = "true" if frontier >= TICK_MAX else f"window_start + {window.size} <= {frontier}"
        newest = max(self.base.newest_times.values(), default=TICK_MIN) if self.base else TICK_MIN
        later = f"window_start > {newest}"
        keys = "".join(f'"{key}", ' for key in window.keys)
        aggregates = ", ".join(build_recompute_columns(window))
        self.db.register("actual_window", actual)
        provenance = "(_source, _partition, _seq)"
        self.db.execute(
            f"""create or replace temp table accepted as
            select * from input
                anti join (
                    from {LATE} anti join (from merged where _output = '{name}') using {provenance}
                    where output = '{name}' or reason in {SET_ASIDE_REASONS}
                ) using {provenance}
                anti join (from {DEAD_LETTERS} where "row" is not null) using {provenance}
                union all by name select * exclude (_output, _reason, _stranger)
                    from merged where _stranger and _output = '{name}'"""
        )
        self.db.execute(
            f"""create or replace temp table expected as
            with joined as ({_build_window_assignment_sql(self.spec, window, frontier)})
            select {keys}window_start, {aggregates} from joined
            group by {keys}window_start having {closed} and {later}"""
        )
        self.db.execute(f"""create or replace temp table published as
            select * from (
                select * replace (epoch_us(window_start) as window_start) from actual_window
            ) where {later}""")
        self.found.windows[name] = self._query_count("select count(*) from expected")
        difference = self._query_count(_build_difference_sql(window))
        if difference:
            self.found.problems.append(
                f"{difference} results of window {name} differ from a recomputation over the"
                " accepted rows"
            )

    def _explain_skip(self, name: str) -> str | None:
        """Return why a window cannot be recomputed here; None if it can be."""
        window, sources = self.spec.windows[name], self.spec.sources.values()

        def has_counted(*counts: str) -> bool:
            """Return whether any source has such rows."""
            per_source = self.head.counters.per_source.values()
            return any(own.get(count) for own in per_source for count in counts)

        if self.base is not None and any(s.end_time is not None or s.edges for s in sources):
            return "rows of retired epochs may last into it"
        if has_counted(RULE_DROPPED, FILTERED):
            return "rules or where have left out rows, which no table has"
        violations = {s.punctuation.on_violation for s in sources if s.punctuation}
        if (
            "adjust" in violations
            or window.on_late is LatePolicy.ADJUST
            or has_counted(f"dropped:{name}", "dropped:events:cti_violation")
        ):
            return "rows were dropped or adjusted, which no table says"
        if self.found.topics:
            return "it counts rows of topics or of select, which are not read again"
        if window.kind is not WindowKind.TUMBLING or any(
            a.function.value not in _CHECKED_FUNCTIONS for a in window.aggregates.values()
        ):
            return "only tumbling windows with count, sum, avg, min and max are recomputed here"
        return None

    def _query_count(self, sql: str) -> int:
        # All of it: DuckDB refuses other work while a result is open.
        rows = self.db.execute(sql).fetchall()
        return int(rows[0][0]) if rows else 0


def _build_window_assignment_sql(spec: PipelineSpec, window: WindowSpec, frontier: int) -> str:
    """Select accepted rows with the start of each window that they are in.

    Only rows that last (with an end time or edges) can be in several windows.
    """
    starts = build_starts_sql(window)
    if all(source.end_time is None and source.edges is None for source in spec.sources.values()):
        return f"""select *, {starts} as window_start
            from (select *, _time as _et, _time + 1 as _end from accepted)"""
    stops = " ".join(
        f"when '{name}' then {_build_row_end_sql(source)}" for name, source in spec.sources.items()
    )
    until = str(frontier) if frontier < TICK_MAX else "(select max(_time) + 1 from accepted)"
    return f"""with paired as (select *, case _source {stops} end as _stop from accepted)
        select *, {starts} as window_start from (
            select *, _time as _et, least(coalesce(_stop, {until}), {TICK_MAX}) as _end from paired)
        where _time < _end"""


def _build_row_end_sql(source: SourceSpec) -> str:
    """Return the end of a row.

    A start edge ends at the next end edge, and is null if there is none yet; an end edge has no
    duration.
    """
    if source.end_time is not None:
        return f'coalesce(epoch_us("{source.end_time}"), _time + 1)'
    if source.edges is None:
        return "_time + 1"
    keys = ", ".join(f'"{key}"' for key in source.edges.keys)
    values = [value.replace("'", "''") for value in (source.edges.start, source.edges.end)]
    start, end = (f"\"{source.edges.kind}\" = '{value}'" for value in values)
    behind = (
        f"partition by _source, _partition, {keys} order by _seq rows between 1 following and"
        " unbounded following"
    )
    found = f"first_value(case when {end} then _time end ignore nulls) over ({behind})"
    return f"case when {end} then _time when {start} then {found} else _time + 1 end"


def _build_difference_sql(window: WindowSpec) -> str:
    """Count the rows of either side without an equal partner; averages may differ by rounding."""
    same = " and ".join(
        f'e."{k}" is not distinct from p."{k}"' for k in (*window.keys, "window_start")
    )
    unequal = " or ".join(
        _build_inequality_sql(f'"{column}"', a) for column, a in window.aggregates.items()
    )
    return f"""select count(*) from expected e full join published p on {same}
        where e.window_start is null or p.window_start is null or {unequal}"""


def _build_inequality_sql(column: str, aggregate: Aggregate) -> str:
    if aggregate.function in (AggregateFunction.AVG, AggregateFunction.SUM):
        return (
            f"(e.{column} is null) <> (p.{column} is null) or "
            f"abs(e.{column} - p.{column}) > {FLOAT_TOLERANCE} * greatest(1, abs(e.{column}))"
        )
    return f"e.{column} is distinct from p.{column}"
