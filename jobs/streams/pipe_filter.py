"""Selects the rows that a pipe copies, on Arrow columns with DuckDB.

A pipe selects by position range, time range, key values and an SQL predicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.spec.stream_specs import PipeSpec
from tidegate.jobs.streams.errors import BAD_PREDICATE
from tidegate.jobs.streams.reducers import FoldFailure


class PipeFilter:
    """Selects the rows of one pipe.

    Raises:
        ConfigurationError: the predicate cannot be read, or names columns that do not exist.
    """

    def __init__(self, name: str, pipe: PipeSpec, columns: Mapping[str, str]) -> None:
        self._pipe, self._columns = pipe, columns
        fields = {column: to_arrow_type(kind) for column, kind in columns.items()}
        empty = pa.schema(
            {**fields, "position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()}
        ).empty_table()
        try:
            # Over no rows: a predicate that cannot be read must end the start, not an epoch.
            self._build_row_mask(empty)
        except (duckdb.Error, pa.ArrowException) as error:
            raise BAD_PREDICATE(
                pipe=name, cause=_first_error_line(error), columns=", ".join(columns)
            ) from error

    def select_rows(self, rows: Any) -> tuple[dict[str, Any], FoldFailure | None]:
        """Return destination -> selected rows, with ``_position`` and ``_nth``.

        If the predicate fails on the data, no row is selected, and the failure names the first row
        of the batch: the caller pauses the pipe there.
        """
        try:
            chosen = rows.filter(self._build_row_mask(rows))
        except (duckdb.Error, pa.ArrowException) as error:
            first = rows.slice(0, 1).to_pylist()[0]
            return {}, FoldFailure(
                first["position"],
                first["_id"],
                f"in the batch from here on: {_first_error_line(error)}",
            )
        sent = chosen.select(list(self._columns)).append_column("_position", chosen["position"])
        nth = pa.array([0] * chosen.num_rows, pa.int64())  # a pipe sends each row at most once
        return {self._pipe.to: sent.append_column("_nth", nth)}, None

    def _build_row_mask(self, rows: Any) -> Any:
        pipe = self._pipe
        mask = _mask_range(rows["position"], *pipe.positions)
        mask = pc.and_(mask, _mask_range(rows["stream_time"], *pipe.times))
        for column, values in pipe.keys.items():
            mask = pc.and_(
                mask, pc.is_in(rows[column], pa.array(values, to_arrow_type(self._columns[column])))
            )
        if pipe.where is not None:
            mask = pc.and_(mask, _mask_predicate(pipe.where, rows))
        return mask


def _mask_range(column: Any, low: int | None, high: int | None) -> Any:
    mask = pc.is_valid(column)
    if low is not None:
        mask = pc.and_(mask, pc.greater_equal(column, low))
    return mask if high is None else pc.and_(mask, pc.less(column, high))


def _mask_predicate(predicate: str, rows: Any) -> Any:
    """Return for each row whether the predicate is true; null counts as false."""
    # Without external access the user's SQL cannot read files of the driver's machine.
    with duckdb.connect(config={"enable_external_access": "false"}) as session:
        session.execute("SET TimeZone = 'UTC'")
        session.register("origin", rows)
        select = f"SELECT coalesce(CAST(({predicate}) AS BOOLEAN), false) AS chosen FROM origin"  # noqa: S608 - from a validated spec
        return session.sql(select).to_arrow_table()["chosen"]


def _first_error_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
