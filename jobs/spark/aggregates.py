"""Each aggregate as three Spark SQL expressions.

Partial over rows, merge over partials, final over the merged.

Partials merge in any order to the same result (first, last and collect carry the row's place), so
epochs, segments and compaction may group them as they like. Nulls are ignored as in SQL, except by
``count(*)``, first and last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from tidegate.jobs.spark.column_casts import quote_name
from tidegate.jobs.spark.sql_conditions import end_reached_sql, opaque_literal
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction

_ROW_ORDER_SQL: Final = "struct(_et, _so, _partition, _seq)"
_KEPT_ROWS_COLUMN: Final = "_rows"
"""State column with the rows themselves, shared by all ``sql(...)`` aggregates of a window."""


@dataclass(frozen=True, slots=True)
class AggregatePlan:
    """How one aggregate is computed; the names of its state columns stand for its partial state.

    Attributes:
        partial: state column -> expression over rows.
        merge: state column -> expression over state columns.
        final: expression over merged state columns.
        same_type: the merged sum is cast back to the type of its partial (decimals grow with every
            sum).
    """

    partial: dict[str, str]
    merge: dict[str, str]
    final: str
    same_type: bool = False


def plan_aggregate(what: Aggregate, index: int, columns: list[str]) -> AggregatePlan:
    """The expressions of the `index`-th aggregate of a window.

    `columns` are the row's, for ``sql(...)``.
    """
    state, x, name = f"_s{index}", what.expression, what.function.value
    match what.function:
        case AggregateFunction.COUNT:
            return AggregatePlan(
                {state: f"count({x})"},
                {state: f"sum({state})"},
                f"coalesce({state}, 0L)",
                same_type=True,
            )
        case AggregateFunction.SUM:
            return AggregatePlan(
                {state: f"sum({x})"}, {state: f"sum({state})"}, state, same_type=True
            )
        case AggregateFunction.MIN | AggregateFunction.MAX:
            return AggregatePlan({state: f"{name}({x})"}, {state: f"{name}({state})"}, state)
        case AggregateFunction.AVG:
            return _plan_average(state, x)
        case AggregateFunction.FIRST | AggregateFunction.LAST:
            return _plan_first_or_last(
                state, x, "min" if what.function is AggregateFunction.FIRST else "max"
            )
        case AggregateFunction.APPROX_DISTINCT | AggregateFunction.APPROX_QUANTILE:
            return _plan_sketch(state, x, what.argument)
        case _:
            return _plan_list_aggregate(state, what, columns)


def _plan_list_aggregate(state: str, what: Aggregate, columns: list[str]) -> AggregatePlan:
    x = what.expression
    if what.function is AggregateFunction.DISTINCT:
        merge = {state: f"array_distinct(flatten(collect_list({state})))"}
        return AggregatePlan(
            {state: f"collect_set({x})"}, merge, f"CAST(coalesce(array_size({state}), 0) AS bigint)"
        )
    if what.function is AggregateFunction.COLLECT:
        return _plan_collect(
            state, f"struct(_et, _so, _partition, _seq, {x} AS v)", f"({x}) IS NOT NULL"
        )
    row = ", ".join(quote_name(c) for c in (*columns, "_source"))
    return _plan_collect(
        _KEPT_ROWS_COLUMN, f"struct(_et, _so, _partition, _seq, struct({row}) AS v)", "true"
    )


def _plan_average(state: str, x: str) -> AggregatePlan:
    # Averages cannot be merged; a sum and a count can.
    partial = {f"{state}_sum": f"sum(CAST({x} AS double))", f"{state}_n": f"count({x})"}
    merge = {name: f"sum({name})" for name in partial}
    return AggregatePlan(partial, merge, f"IF({state}_n > 0, {state}_sum / {state}_n, NULL)")


def _plan_first_or_last(state: str, x: str, side: str) -> AggregatePlan:
    value, place = f"{state}_v", f"{state}_at"
    partial = {
        # The struct keeps a null value apart from no value.
        value: f"{side}_by(struct({x} AS v), {_ROW_ORDER_SQL})",
        place: f"{side}({_ROW_ORDER_SQL})",
    }
    merge = {value: f"{side}_by({value}, {place})", place: f"{side}({place})"}
    return AggregatePlan(partial, merge, f"{value}.v")


def _plan_sketch(state: str, x: str, q: float | None) -> AggregatePlan:
    if q is None:
        sketch = {state: f"hll_sketch_agg(CAST({x} AS string))"}
        return AggregatePlan(
            sketch,
            {state: f"hll_union_agg({state})"},
            f"coalesce(hll_sketch_estimate({state}), 0L)",
        )
    # An empty sketch has no quantile.
    empty = f"coalesce(kll_sketch_get_n_double({state}), 0L) = 0"
    return AggregatePlan(
        {state: f"kll_sketch_agg_double(CAST({x} AS double))"},
        {state: f"kll_merge_agg_double({state})"},
        f"IF({empty}, NULL, kll_sketch_get_quantile_double({state}, {q!r}D))",
    )


def _plan_collect(state: str, item: str, keep: str) -> AggregatePlan:
    return AggregatePlan(
        {state: f"collect_list({item}) FILTER (WHERE {keep})"},
        {state: f"flatten(collect_list({state}))"},
        f"transform(array_sort({state}), row -> row.v)",
    )


class Aggregation:
    """The Spark SQL of one window's aggregates."""

    def __init__(self, spec: PipelineSpec, name: str) -> None:
        self.window = spec.windows[name]
        self.keys = [f"_k{i}" for i in range(len(self.window.keys))]
        self.plans: dict[str, AggregatePlan] = {
            output: plan_aggregate(what, i, list(spec.columns))
            for i, (output, what) in enumerate(self.window.aggregates.items())
        }
        self.partials = {k: v for plan in self.plans.values() for k, v in plan.partial.items()}
        self.merges = {k: v for plan in self.plans.values() for k, v in plan.merge.items()}

    @property
    def group_columns(self) -> list[str]:
        """What identifies a window's result."""
        return ["_ws", "_we", *self.keys]

    @property
    def key_columns(self) -> list[str]:
        """The key columns of a row under the names they have in state."""
        return [
            f"{quote_name(key)} AS {name}"
            for name, key in zip(self.keys, self.window.keys, strict=True)
        ]

    def cast_states(self, types: dict[str, str]) -> list[str]:
        """Return the SQL of the state columns after a merge.

        The states of `sum` and `count` are cast to `types`, the types of the partials, because
        Spark widens a decimal with every sum. Other states are selected as they are.
        """
        casts = {name for plan in self.plans.values() if plan.same_type for name in plan.partial}
        return [
            f"CAST({name} AS {types[name]}) AS {name}" if name in casts else name
            for name in self.partials
        ]

    def aggregate_rows(self, rows: DataFrame, before: int, slot: int) -> DataFrame:
        """One row per window and key of these rows."""
        touched = (
            rows.selectExpr("*", *self.key_columns)
            .groupBy(*self.group_columns)
            .agg(*(F.expr(v).alias(k) for k, v in self.partials.items()))
        )
        update = f"CAST({end_reached_sql('_we', before)} AS int)"
        marks = [
            f"1 - {update} AS _on",
            f"{update} AS _up",
            "1 AS _n",
            f"{opaque_literal(slot, '_we')} AS _epoch",
        ]
        return touched.selectExpr(*self.group_columns, *marks, *self.partials)

    def merge_partials(
        self, rows: DataFrame, *, flags: dict[str, str], use: str | None = None
    ) -> DataFrame:
        """Merge partial rows.

        Only those that `use` selects count for the aggregates, all count for the flags.
        """
        types = {field.name: field.dataType.simpleString() for field in rows.schema}
        # Aggregates ignore nulls, so a partial that does not count is a null.
        if use is not None:
            state = [f"IF({use}, {name}, NULL) AS {name}" for name in self.partials]
            rows = rows.selectExpr(*(c for c in rows.columns if c not in self.partials), *state)
        marks = {
            "_on": "max(_on)",
            "_up": "CAST(sum(_up) AS int)",
            "_n": "CAST(sum(_n) AS int)",
            # The epoch of the window's first row: `complete` counts its revisions from there.
            "_epoch": "min(_epoch)",
            **flags,
        }
        merged = rows.groupBy(*self.group_columns).agg(
            *(F.expr(v).alias(k) for k, v in {**marks, **self.merges}.items())
        )
        return merged.selectExpr(*self.group_columns, *marks, *self.cast_states(types))

    def build_results(self, merged: DataFrame, revision: str, provenance: list[str]) -> DataFrame:
        """Result rows as readers see them."""
        sql = {
            o: a for o, a in self.window.aggregates.items() if a.function is AggregateFunction.SQL
        }
        if sql:
            merged = self._add_sql_aggregates(merged, sql)
        values = [
            f"{'_sql_' + output if output in sql else plan.final} AS {quote_name(output)}"
            for output, plan in self.plans.items()
        ]
        own = [
            "timestamp_micros(_ws) AS window_start",
            "timestamp_micros(_we) AS window_end",
            f"CAST({revision} AS int) AS revision",
        ]
        keys = [
            f"{name} AS {quote_name(key)}"
            for name, key in zip(self.keys, self.window.keys, strict=True)
        ]
        replaces = (
            "_replaces AS replaces"
            if "_replaces" in merged.columns
            else "CAST(NULL AS array<string>) AS replaces"
        )
        return merged.selectExpr(*keys, *own, replaces, *values, *provenance)

    def _add_sql_aggregates(self, merged: DataFrame, sql: dict[str, Any]) -> DataFrame:
        """Any SQL aggregate: over the kept rows, laid out again."""
        rows = merged.selectExpr(
            *self.group_columns, f"explode(array_sort({_KEPT_ROWS_COLUMN})) AS _row"
        ).selectExpr(*self.group_columns, "_row.v.*")
        found = rows.groupBy(*self.group_columns).agg(
            *(F.expr(a.expression).alias(f"_sql_{o}") for o, a in sql.items())
        )
        renamed = found.selectExpr(
            *(f"{c} AS _j{c}" for c in self.group_columns), *(f"_sql_{o}" for o in sql)
        )
        # `<=>` joins null keys as well.
        same = reduce(lambda a, b: a & b, (F.expr(f"{c} <=> _j{c}") for c in self.group_columns))
        return merged.join(renamed, same, "left")
