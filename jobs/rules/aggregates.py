"""Aggregates of windows, one `AggregateRule` each: every engine takes its expressions from there.

Partial over rows, merge over partials, final over the merged. Partials merge in any order to the
same result (first, last and collect carry the row's place), so epochs, segments and compaction may
group them as they like. Nulls are ignored as in SQL, except by ``count(*)``, first and last.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.jobs.spec.column_types import COLUMN_NAME, infer_argument_type
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.table_layout import ColumnTypes
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction

from .duck_frame import DuckFrame, Frame, get_column_types, group_rows, query_table
from .row_conditions import ROW_ORDER, end_reached_sql, quote_name, quote_text

_PLACE_SQL = f"named_struct({', '.join(repr(c) + ', ' + c for c in ROW_ORDER)})"
_KEPT_ROWS_COLUMN = "_rows"
"""State column with the rows themselves, shared by all ``sql(...)`` aggregates of a window."""
_WHOLE = ("int", "long")
_FLOATS = ("float", "double")
_EXACT_SUM = "decimal(38,0)"
_COMPARABLE = (*_WHOLE, "string", "date", "timestamp", "decimal")
# NaN is the greatest. The sign of a zero is that of any of them.
_ORDERABLE = (*_COMPARABLE, *_FLOATS)
_ANY = (*_ORDERABLE, "boolean", "binary")


@dataclass(frozen=True)
class AggregatePlan:
    """How one aggregate is computed; its partial state is in the state columns.

    Attributes:
        partial: state column -> expression over rows.
        merge: state column -> expression over state columns.
        final: expression over merged state columns.
        same_type: the merged sums are cast back to the types of their partials (they grow with
            every sum).
        overflow: condition over merged state columns: the result is null because its type does not
            hold it.
    """

    partial: dict[str, str]
    merge: dict[str, str]
    final: str
    same_type: bool = False
    overflow: str | None = None


@dataclass(frozen=True)
class AggregateRule:
    """One aggregate function.

    Attributes:
        plan: its expressions, of a prefix for state columns, the argument and the aggregate.
        result_type: the Arrow type of its column, of the type of its argument.
        recompute: SQL for `to_duckdb` over all rows of a window at once; None if that is not exact.
            ``{x}`` is the argument.
        native_types: declared types for which tests show that DuckDB gives Spark's results. The
            others are computed by Spark SQL.
    """

    plan: Callable[[str, str, Aggregate], AggregatePlan]
    result_type: Callable[[Any], Any]
    recompute: str | None = None
    native_types: tuple[str, ...] = ()


def _plan_sum(state: str, x: str, what: Aggregate) -> AggregatePlan:
    name = what.function.value
    final = state
    if what.function is AggregateFunction.COUNT:
        final = f"coalesce({state}, 0L)"
    return AggregatePlan({state: f"{name}({x})"}, {state: f"sum({state})"}, final, same_type=True)


def _plan_whole_sum(state: str, x: str) -> AggregatePlan:
    # Versions that know only the first column can read the state of every sum that `bigint` holds.
    over = f"{state}_over"

    def split(total: str) -> dict[str, str]:
        """Put an exact total into the column that holds it; the other one is null."""
        whole = f"try_cast({total} AS bigint)"
        rest = f"IF({whole} IS NULL, {total}, NULL)"
        return {state: whole, over: f"CAST({rest} AS {_EXACT_SUM})"}

    exact = f"coalesce({over}, CAST({state} AS {_EXACT_SUM}))"
    first = split(f"sum(CAST({x} AS decimal(20,0)))")
    return AggregatePlan(first, split(f"sum({exact})"), state, overflow=f"{over} IS NOT NULL")


def _plan_extreme(state: str, x: str, what: Aggregate) -> AggregatePlan:
    name = what.function.value
    return AggregatePlan({state: f"{name}({x})"}, {state: f"{name}({state})"}, state)


def _plan_average(state: str, x: str, _: Aggregate) -> AggregatePlan:
    # Averages cannot be merged; a sum and a count can.
    first = {f"{state}_sum": f"sum(CAST({x} AS double))", f"{state}_n": f"count({x})"}
    merge = {name: f"sum({name})" for name in first}
    final = f"IF({state}_n > 0, {state}_sum / {state}_n, NULL)"
    return AggregatePlan(first, merge, final, same_type=True)


def _plan_first_or_last(side: str, state: str, x: str, _: Aggregate) -> AggregatePlan:
    value = f"{state}_v"
    place = f"{state}_at"
    first = {
        # The struct keeps a null value apart from no value.
        value: f"{side}_by(named_struct('v', {x}), {_PLACE_SQL})",
        place: f"{side}({_PLACE_SQL})",
    }
    merge = {value: f"{side}_by({value}, {place})", place: f"{side}({place})"}
    return AggregatePlan(first, merge, f"{value}.v")


def _plan_approx_distinct(state: str, x: str, _: Aggregate) -> AggregatePlan:
    sketch = {state: f"hll_sketch_agg(CAST({x} AS string))"}
    final = f"coalesce(hll_sketch_estimate({state}), 0L)"
    return AggregatePlan(sketch, {state: f"hll_union_agg({state})"}, final)


def _plan_approx_quantile(state: str, x: str, what: Aggregate) -> AggregatePlan:
    # An empty sketch has no quantile.
    empty = f"coalesce(kll_sketch_get_n_double({state}), 0L) = 0"
    return AggregatePlan(
        {state: f"kll_sketch_agg_double(CAST({x} AS double))"},
        {state: f"kll_merge_agg_double({state})"},
        f"IF({empty}, NULL, kll_sketch_get_quantile_double({state}, {what.argument!r}D))",
    )


def _plan_distinct(state: str, x: str, _: Aggregate) -> AggregatePlan:
    merge = {state: f"array_distinct(flatten(collect_list({state})))"}
    final = f"CAST(coalesce(array_size({state}), 0) AS bigint)"
    return AggregatePlan({state: f"collect_set({x})"}, merge, final)


def _plan_collect(state: str, x: str, what: Aggregate) -> AggregatePlan:
    # ``sql(...)`` is computed over the rows themselves, which `Aggregation` names as `x`.
    keep = "true" if what.function is AggregateFunction.SQL else f"({x}) IS NOT NULL"
    item = _PLACE_SQL.replace(")", f", 'v', {x})")
    return AggregatePlan(
        {state: f"coalesce(collect_list({item}) FILTER (WHERE {keep}), array())"},
        {state: f"coalesce(flatten(collect_list({state})), array())"},
        f"transform(array_sort({state}), r -> r.v)",
    )


def _infer_sum_type(kind: Any) -> Any:
    if pa.types.is_decimal(kind):
        # Spark's rule for sums of decimals.
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.int64() if pa.types.is_integer(kind) else pa.float64()


def _infer_spark_sum(kind: str) -> str:
    """The type of Spark's sum of a declared type, or of one of DuckDB."""
    if match := re.fullmatch(r"(?i)decimal\((\d+),\s*(\d+)\)", kind):
        return f"decimal({min(38, int(match[1]) + 10)},{match[2]})"
    return "bigint" if kind.endswith("INT") or kind == "INTEGER" else "double"


def _keep_type(kind: Any) -> Any:
    return kind


_ORDERED = "({x} order by _et, _so, _partition, _seq) filter (where _seq is not null)"
_RULES: dict[AggregateFunction, AggregateRule] = {
    # `_seq` is null only where a recomputation finds no row.
    AggregateFunction.COUNT: AggregateRule(_plan_sum, lambda _: pa.int64(), "count({x})", _ANY),
    AggregateFunction.SUM: AggregateRule(
        _plan_sum, _infer_sum_type, "bounded_sum(sum({x}))", (*_WHOLE, *_FLOATS, "decimal")
    ),
    AggregateFunction.AVG: AggregateRule(
        _plan_average, lambda _: pa.float64(), "avg(cast({x} as double))", (*_WHOLE, *_FLOATS)
    ),
    AggregateFunction.MIN: AggregateRule(_plan_extreme, _keep_type, "min({x})", _ORDERABLE),
    AggregateFunction.MAX: AggregateRule(_plan_extreme, _keep_type, "max({x})", _ORDERABLE),
    AggregateFunction.FIRST: AggregateRule(
        partial(_plan_first_or_last, "min"), _keep_type, f"first{_ORDERED}", _ANY
    ),
    AggregateFunction.LAST: AggregateRule(
        partial(_plan_first_or_last, "max"), _keep_type, f"last{_ORDERED}", _ANY
    ),
    AggregateFunction.DISTINCT: AggregateRule(
        _plan_distinct, lambda _: pa.int64(), "count(distinct {x})", _COMPARABLE
    ),
    AggregateFunction.COLLECT: AggregateRule(
        _plan_collect,
        pa.list_,
        f"coalesce(list{_ORDERED.replace('_seq is', '({x}) is')}, [])",
        _ANY,
    ),
    # Of other types the texts differ, or the doubles.
    AggregateFunction.APPROX_DISTINCT: AggregateRule(
        _plan_approx_distinct,
        lambda _: pa.int64(),
        native_types=(*_WHOLE, "string", "boolean"),
    ),
    AggregateFunction.APPROX_QUANTILE: AggregateRule(
        _plan_approx_quantile, lambda _: pa.float64(), native_types=(*_WHOLE, *_FLOATS)
    ),
    # Its language is Spark's own.
    AggregateFunction.SQL: AggregateRule(_plan_collect, _keep_type),
}


def infer_result_type(aggregate: Aggregate, kind: Any) -> Any:
    """Return the Arrow type of an aggregate over values of a type."""
    return _RULES[aggregate.function].result_type(kind)


def build_recompute_sql(aggregate: Aggregate) -> str | None:
    """Return SQL for `to_duckdb` that computes an aggregate from all rows of a window at once.

    None if it is not an exact function of the rows, or of another language.
    """
    text = _RULES[aggregate.function].recompute
    x = "_seq" if aggregate.expression == "*" else aggregate.expression
    return None if text is None else text.format(x=x)


def explain_spark_aggregate(aggregate: Aggregate, columns: ColumnTypes) -> str | None:
    """Why an aggregate needs Spark SQL; None if DuckDB is proven to give the same."""
    rule = _RULES[aggregate.function]
    if not rule.native_types:
        return f"{aggregate.function.value} is Spark's own"
    if aggregate.expression == "*":
        return None
    kind = infer_argument_type(aggregate, columns)
    if kind is None:
        return f"{aggregate}: an expression that is not proven equal in DuckDB"
    return None if kind.partition("(")[0] in rule.native_types else f"{aggregate} over {kind}"


def list_spark_arguments(spec: PipelineSpec) -> dict[str, str]:
    """Column -> the argument of an aggregate that Spark SQL has to compute, as Spark SQL.

    Rows are folded by DuckDB then. ``sql(...)`` has no argument: its state are the rows.
    """
    found = {}
    for place, window in enumerate(spec.windows.values()):
        for index, what in enumerate(window.aggregates.values()):
            if what.function is not AggregateFunction.SQL and explain_spark_aggregate(
                what, spec.columns
            ):
                value = f"(\n{_select_argument_sql(what, spec.columns)}\n)"
                kind = _infer_fold_type(what, spec.columns)
                found[f"_a{place}_{index}"] = f"CAST({value} AS {kind})" if kind else value
    return found


def _infer_fold_type(what: Aggregate, columns: ColumnTypes) -> str | None:
    """The type to which the function casts its argument itself; None if it takes any."""
    if what.function is AggregateFunction.APPROX_DISTINCT:
        return "string"
    is_text = what.function is AggregateFunction.SUM and infer_argument_type(what, columns)
    casts = what.function in (AggregateFunction.AVG, AggregateFunction.APPROX_QUANTILE)
    return "double" if casts or is_text else None


def _select_argument_sql(what: Aggregate, columns: ColumnTypes) -> str:
    match = COLUMN_NAME.fullmatch(what.expression)
    if match and (match[1] or match[2]) in columns:
        return quote_name(match[1] or match[2])
    return what.expression


def plan_aggregate(
    what: Aggregate, index: int, columns: ColumnTypes, argument: str | None = None
) -> AggregatePlan:
    """The expressions of the `index`-th aggregate of a window.

    Args:
        what: the aggregate.
        index: its place; names its state columns.
        columns: the row's columns with their declared types.
        argument: the column with its argument, if that is computed already.
    """
    state = f"_s{index}"
    x = argument or _select_argument_sql(what, columns)
    if what.function is AggregateFunction.SQL:
        state = _KEPT_ROWS_COLUMN
        fields = (f"{quote_text(c)}, {quote_name(c)}" for c in (*columns, "_source"))
        x = f"named_struct({', '.join(fields)})"
    plan = _RULES[what.function].plan(state, x, what)
    kind = infer_argument_type(what, columns) if what.function is AggregateFunction.SUM else None
    if kind in _WHOLE:
        return _plan_whole_sum(state, x)
    if kind is not None:
        plan.partial[state] = f"CAST({plan.partial[state]} AS {_infer_spark_sum(kind)})"
    return plan


def _select_key_sql(key: str, kind: str | None) -> str:
    """A key column. Of doubles all NaN are one key, and -0.0 is 0.0, as Spark SQL groups them."""
    name = quote_name(key)
    if kind not in _FLOATS:
        return name
    return f"IF(isnan({name}), CAST('NaN' AS {kind}), {name} + CAST(0 AS {kind}))"


class Aggregation:
    """The expressions of one window's aggregates, and what they make of rows.

    Attributes:
        name, window: of the window: its name and its spec.
        keys: names of the key columns in state, in the order of the spec.
        key_columns: the key columns of a row under these names, as SQL.
        group_columns: names of the state columns that identify a window's result.
        bucket_columns: those from which the bucket of a row of state follows.
        plans: output column -> its plan.
        partials: state column -> expression over rows.
        merges: state column -> expression over state columns.
        segment_extra: what a segment of partial aggregates says about its state columns: whose
            they are.
        overflow: condition over merged state: the result lacks a sum that does not fit its column;
            None if none can be so large.

    Args:
        spec: the pipeline.
        name: of the window.
        is_evaluated: the rows have the columns of `list_spark_arguments`.
    """

    def __init__(self, spec: PipelineSpec, name: str, *, is_evaluated: bool = False) -> None:
        self.name = name
        self.window = spec.windows[name]
        place = list(spec.windows).index(name)
        arguments = list_spark_arguments(spec) if is_evaluated else {}
        self.keys = [f"_k{i}" for i in range(len(self.window.keys))]
        self.key_columns = [
            f"{_select_key_sql(key, spec.columns.get(key))} AS _k{i}"
            for i, key in enumerate(self.window.keys)
        ]
        self.group_columns = ["_ws", "_we", *self.keys]
        # Sessions move, and what fills gaps is looked for by key.
        is_by_key = self.window.is_folded_by_parts or self.window.zero_rows
        self.bucket_columns = self.keys if is_by_key else self.group_columns
        self.plans: dict[str, AggregatePlan] = {}
        # The sums of arguments whose types only the rows have.
        self._open_sums: dict[str, str] = {}
        for i, (output, what) in enumerate(self.window.aggregates.items()):
            column = f"_a{place}_{i}"
            given = column if column in arguments else None
            self.plans[output] = plan_aggregate(what, i, spec.columns, given)
            is_sum = what.function is AggregateFunction.SUM
            if given and is_sum and infer_argument_type(what, spec.columns) is None:
                self._open_sums[f"_s{i}"] = column
        self.partials = {k: v for plan in self.plans.values() for k, v in plan.partial.items()}
        self.merges = {k: v for plan in self.plans.values() for k, v in plan.merge.items()}
        self.segment_extra = {"aggregates": list(self.plans)}
        overflows = [plan.overflow for plan in self.plans.values() if plan.overflow]
        self.overflow = " OR ".join(overflows) or None

    def rename_states(self, rows: Frame, names: list[str]) -> Frame:
        """Give state columns that another spec or version wrote their places.

        Args:
            rows: rows of state. Older versions wrote no sums that `bigint` does not hold.
            names: the aggregates in the order of that spec.
        """
        known = rows.columns
        if names == list(self.plans) and self.partials.keys() <= set(known):
            return rows
        states = []
        for output, plan in self.plans.items():
            for state in plan.partial:
                old = re.sub(r"^_s[0-9]+", f"_s{names.index(output)}", state)
                value = old if old in known else f"CAST(NULL AS {_EXACT_SUM})"
                states.append(f"{value} AS {state}")
        others = [column for column in known if not re.match(r"_s[0-9]|_rows$", column)]
        return rows.selectExpr(*others, *dict.fromkeys(states))

    def fold_rows(self, rows: Frame) -> Frame:
        """One row per window and key of rows with `_ws` and `_we`: their partial aggregates."""
        keyed = rows.selectExpr("*", *self.key_columns)
        return group_rows(keyed, self.group_columns, self.select_partials(rows))

    def select_partials(self, rows: Frame) -> dict[str, str]:
        """State column -> expression over these rows: sums have the types that Spark gives them."""
        if not self._open_sums:
            return self.partials
        types = get_column_types(rows)
        sums = {
            state: f"CAST(sum({column}) AS {_infer_spark_sum(types[column])})"
            for state, column in self._open_sums.items()
        }
        return {**self.partials, **sums}

    def merge_states(self, rows: Frame, keys: list[str], marks: Mapping[str, str]) -> Frame:
        """One row per group of `keys` of rows of state, with `marks`: column -> aggregate.

        The states of `sum` and `count` keep their types, because a decimal is widened with every
        sum.
        """
        types = get_column_types(rows)
        merged = group_rows(rows, keys, {**marks, **self.merges})
        sums = {name for plan in self.plans.values() if plan.same_type for name in plan.partial}
        states = [
            f"CAST({name} AS {types[name]}) AS {name}" if name in sums else name
            for name in self.partials
        ]
        return merged.selectExpr(*keys, *marks, *states)

    def merge_same_windows(self, folds: Frame) -> Frame:
        """One row per window and key of what `fold_rows` has made of several parts."""
        return self.merge_states(folds, self.group_columns, {})

    @staticmethod
    def select_marks(before: int, slot: int, *, epochs: int) -> list[str]:
        """Return the marks of windows with `_we` that so many epochs touched, up to this one."""
        update = f"CAST({end_reached_sql('_we', before)} AS int)"
        return [
            f"1 - {update} AS _on",
            f"{update} AS _up",
            f"{epochs} AS _n",
            f"{slot}L AS _epoch",
        ]

    def merge_partials(
        self, rows: Frame, *, flags: dict[str, str], use: str | None = None
    ) -> Frame:
        """Merge partial rows of the same window and key into one.

        Only those that `use` (SQL; None: all) selects count for the aggregates, all count for the
        marks and for `flags`: further columns -> aggregates.
        """
        # Aggregates ignore nulls, so a partial that does not count is a null.
        if use is not None:
            states = ", ".join(f"IF({use}, {name}, NULL) AS {name}" for name in self.partials)
            rows = rows.selectExpr(f"* REPLACE ({states})")
        marks = {
            "_on": "max(_on)",
            "_up": "CAST(sum(_up) AS int)",
            "_n": "CAST(sum(_n) AS int)",
            # The epoch of the window's first row: `complete` counts its revisions from there.
            "_epoch": "min(_epoch)",
            **flags,
        }
        return self.merge_states(rows, self.group_columns, marks)

    @property
    def sql_aggregates(self) -> dict[str, str]:
        """Output column -> expression of the aggregates that are Spark SQL of the user's own."""
        return {
            output: what.expression
            for output, what in self.window.aggregates.items()
            if what.function is AggregateFunction.SQL
        }

    def build_results(
        self, merged: Frame, revision: str, provenance: list[str], sql_values: Any = None
    ) -> Frame:
        """Result rows as readers see them; `_overflow` beside them says that one lacks a sum.

        There is no such column where no sum can be too large.

        Args:
            merged: the merged state.
            revision: SQL over it.
            provenance: further columns as SQL.
            sql_values: a table of `sql_aggregates`, each as `_sql_` and the output's name, beside
                the group columns; None if there are none.
        """
        sql = self.sql_aggregates
        if sql_values is not None:
            merged = merged.join_left(DuckFrame.from_table(sql_values), self.group_columns)
        values = [
            f"{'_sql_' + output if output in sql else plan.final} AS {quote_name(output)}"
            for output, plan in self.plans.items()
        ]
        own = [
            "timestamp_micros(_ws) AS window_start",
            "timestamp_micros(_we) AS window_end",
            f"CAST({revision} AS int) AS revision",
        ]
        keys = [f"_k{i} AS {quote_name(key)}" for i, key in enumerate(self.window.keys)]
        replaces = (
            "_replaces AS replaces"
            if "_replaces" in merged.columns
            else "CAST(NULL AS array<string>) AS replaces"
        )
        overflow = [f"({self.overflow}) AS _overflow"] if self.overflow else []
        return merged.selectExpr(*keys, *own, replaces, *values, *provenance, *overflow)

    def select_kept_rows(self, merged: Any) -> Any:
        """The rows of which `sql_aggregates` are computed, in order, beside the group columns.

        `merged` is an Arrow table of merged state.
        """
        groups = ", ".join(self.group_columns)
        row = f"SELECT {groups}, unnest(list_sort({_KEPT_ROWS_COLUMN})) AS _row FROM rows"
        query = f"SELECT {groups}, unnest(_row.v) FROM ({row})"
        return query_table(merged, query, for_frames=True)
