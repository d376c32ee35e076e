"""Each aggregate as three Spark SQL expressions: partial over rows, merge over partials, final over the merged.

Partials merge in any order to the same result (first, last and collect carry the row's place), so epochs, segments and
compaction may group them as they like. Nulls are ignored as in SQL, except by ``count(*)``, first and last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.jobs.spark.schema import quote
from tidegate.jobs.spec.windows import Aggregate, AggregateFunction

__all__ = ["KEPT_ROWS", "Plan", "plan_of"]

_PLACE: Final = "struct(_et, _so, _partition, _seq)"
KEPT_ROWS: Final = "_rows"
"""State column with the rows themselves, shared by all ``sql(...)`` aggregates of a window."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one aggregate is computed; the names of its state columns stand for its partial state.

    Attributes:
        partial: state column -> expression over rows.
        merge: state column -> expression over state columns.
        final: expression over merged state columns.
        same_type: the merged sum is cast back to the type of its partial (decimals grow with every sum).
    """

    partial: dict[str, str]
    merge: dict[str, str]
    final: str
    same_type: bool = False


def plan_of(what: Aggregate, index: int, columns: list[str]) -> Plan:
    """The expressions of the `index`-th aggregate of a window; `columns` are the row's, for ``sql(...)``."""
    state, x = f"_s{index}", what.expression
    match what.function:
        case AggregateFunction.COUNT:
            return Plan({state: f"count({x})"}, {state: f"sum({state})"}, f"coalesce({state}, 0L)", same_type=True)
        case AggregateFunction.SUM:
            return Plan({state: f"sum({x})"}, {state: f"sum({state})"}, state, same_type=True)
        case AggregateFunction.AVG:
            return _avg(state, x)
        case AggregateFunction.MIN | AggregateFunction.MAX:
            name = what.function.value
            return Plan({state: f"{name}({x})"}, {state: f"{name}({state})"}, state)
        case AggregateFunction.FIRST | AggregateFunction.LAST:
            return _edge(state, x, "min" if what.function is AggregateFunction.FIRST else "max")
        case AggregateFunction.APPROX_DISTINCT:
            sketch = {state: f"hll_sketch_agg(CAST({x} AS string))"}
            return Plan(sketch, {state: f"hll_union_agg({state})"}, f"coalesce(hll_sketch_estimate({state}), 0L)")
        case AggregateFunction.APPROX_QUANTILE:
            return _quantile(state, x, what.argument or 0.5)
        case AggregateFunction.DISTINCT:
            merge = {state: f"array_distinct(flatten(collect_list({state})))"}
            return Plan({state: f"collect_set({x})"}, merge, f"CAST(coalesce(size({state}), 0) AS bigint)")
        case AggregateFunction.COLLECT:
            return _collect(state, f"struct(_et, _so, _partition, _seq, {x} AS v)", f"({x}) IS NOT NULL")
        case AggregateFunction.SQL:
            row = ", ".join(quote(c) for c in (*columns, "_source"))
            return _collect(KEPT_ROWS, f"struct(_et, _so, _partition, _seq, struct({row}) AS v)", "true")


def _avg(state: str, x: str) -> Plan:
    partial = {f"{state}_sum": f"sum(CAST({x} AS double))", f"{state}_n": f"count({x})"}
    merge = {name: f"sum({name})" for name in partial}
    return Plan(partial, merge, f"IF({state}_n > 0, {state}_sum / {state}_n, NULL)")


def _edge(state: str, x: str, side: str) -> Plan:
    value, place = f"{state}_v", f"{state}_at"
    partial = {value: f"{side}_by(struct({x} AS v), {_PLACE})", place: f"{side}({_PLACE})"}
    merge = {value: f"{side}_by({value}, {place})", place: f"{side}({place})"}
    return Plan(partial, merge, f"{value}.v")


def _quantile(state: str, x: str, q: float) -> Plan:
    empty = f"coalesce(kll_sketch_get_n_double({state}), 0L) = 0"
    return Plan(
        {state: f"kll_sketch_agg_double(CAST({x} AS double))"},
        {state: f"kll_merge_agg_double({state})"},
        f"IF({empty}, NULL, kll_sketch_get_quantile_double({state}, {q!r}D))",
    )


def _collect(state: str, item: str, keep: str) -> Plan:
    return Plan(
        {state: f"collect_list({item}) FILTER (WHERE {keep})"},
        {state: f"flatten(collect_list({state}))"},
        f"transform(array_sort({state}), row -> row.v)",
    )
