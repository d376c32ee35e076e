"""Aggregates over the kept rows of a window, exact and one value at a time.

Nulls are ignored, as in SQL, except by ``count(*)`` and by first and last, which give the value of
the earliest and latest row whatever it is. Rows come in (event_time, source order, partition, seq)
order, so folds are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.window_specs import Aggregate, AggregateFunction
from tidegate.time_units import TICK_MAX, TICK_MIN


def aggregate(what: Aggregate, values: Sequence[Any]) -> Any:
    """The aggregate of a column's values in window order (for ``count(*)``.

    Anything, one per row).
    """
    if what.function is AggregateFunction.COUNT and what.expression == "*":
        return len(values)
    present = [v for v in values if v is not None]
    match what.function:
        case AggregateFunction.COUNT:
            return len(present)
        case AggregateFunction.FIRST:
            return values[0] if values else None
        case AggregateFunction.LAST:
            return values[-1] if values else None
        case AggregateFunction.DISTINCT | AggregateFunction.APPROX_DISTINCT:
            return len(set(present))
        case AggregateFunction.COLLECT:
            return present
    return _number(what, present)


def _number(what: Aggregate, present: Sequence[Any]) -> Any:
    if not present:
        return None
    match what.function:
        case AggregateFunction.SUM:
            if isinstance(present[0], float):
                return math.fsum(present)
            total = sum(present)
            is_lost = isinstance(total, int) and not TICK_MIN <= total <= TICK_MAX
            return None if is_lost else total
        case AggregateFunction.AVG:
            return math.fsum(present) / len(present)
        case AggregateFunction.MIN:
            return min(present)
        case AggregateFunction.MAX:
            return max(present)
        case AggregateFunction.APPROX_QUANTILE:
            rank = math.ceil((what.argument or 0.0) * len(present))
            return float(sorted(present)[max(rank, 1) - 1])
    raise ConfigurationError(
        f"the oracle mover has no {what.function.value}(...)",
        code="reference.no_sql",
        advice="run this pipeline on Spark",
    )
