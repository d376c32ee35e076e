"""What a pipe copies.

Position range, time range, keys and a predicate in SQL, on Arrow columns by DuckDB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.column_types import to_arrow_type
from tidegate.jobs.spec.stream_specs import PipeSpec
from tidegate.jobs.streams.reducers import FoldFailure


class PipeFilter:
    """Chooses the rows of one pipe.

    Raises:
        ConfigurationError: the predicate cannot be read, or names columns that are not there.
    """

    def __init__(self, name: str, pipe: PipeSpec, columns: Mapping[str, str]) -> None:
        self._pipe, self._columns = pipe, columns
        fields = {column: to_arrow_type(kind) for column, kind in columns.items()}
        empty = pa.schema(
            {**fields, "position": pa.int64(), "stream_time": pa.int64(), "_id": pa.string()}
        ).empty_table()
        try:
            self._build_row_mask(empty)
        except (duckdb.Error, pa.ArrowException) as error:
            raise ConfigurationError(
                f"pipes.{name}: {_first_error_line(error)}",
                code="pipe.bad_predicate",
                kept="nothing was started or changed",
                advice=(
                    f"'where' is SQL over {', '.join(columns)}, 'keys' values of the columns' types"
                ),
            ) from error

    def select_rows(self, rows: Any) -> tuple[dict[str, Any], FoldFailure | None]:
        """Destination -> chosen rows, with ``_position`` and ``_nth``.

        A predicate that fails on the data pauses the pipe.
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
        number = pa.array([0] * chosen.num_rows, pa.int64())
        sent = (
            chosen.select(list(self._columns))
            .append_column("_position", chosen["position"])
            .append_column("_nth", number)
        )
        return {self._pipe.to: sent}, None

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
    """Row by row, whether the predicate is true; unknown is not."""
    with duckdb.connect(config={"enable_external_access": "false"}) as session:
        session.execute("SET TimeZone = 'UTC'")
        session.register("origin", rows)
        found = session.sql(
            f"SELECT coalesce(CAST(({predicate}) AS BOOLEAN), false) AS chosen FROM origin"
        ).to_arrow_table()
    return found["chosen"]


def _first_error_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
