"""A lakehouse table in a folder, and a pipeline that reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

ME = Member("lake")
START = datetime(2026, 3, 1, tzinfo=UTC)


def rows(*numbers: int) -> pa.Table:
    """Rows with these numbers."""
    stamps = pa.array([START + timedelta(seconds=n) for n in numbers], pa.timestamp("us", tz="UTC"))
    return pa.table(
        {"at": stamps, "n": pa.array(numbers, pa.int64()), "shop": [f"s {n % 2}" for n in numbers]}
    )


class Lake:
    """A table in a folder, and a pipeline that reads it."""

    def __init__(self, folder: Path, **table: Any) -> None:
        self.path = folder / "lake"
        self.store = LocalStore(folder / "store")
        self.spec = PipelineSpec.model_validate(
            {
                "name": "p",
                "sources": {
                    "lake": {
                        "path": str(self.path),
                        "table": table,
                        "schema": {"at": "timestamp", "n": "long", "shop": "string"},
                        "event_time": "at",
                        "lag": "1s",
                    }
                },
            }
        )
        self.view = InputView(self.store, self.spec, folder / "scratch")

    def source(self) -> ObjectSource:
        """A reader that knows nothing yet."""
        return ObjectSource("lake", self.spec.sources["lake"], self.view, pipeline="p")

    def read(
        self, resume: dict[str, Any] | None = None
    ) -> tuple[list[list[int]], list[str], dict[str, Any]]:
        """The numbers of each file behind a place, what is dead, and the place behind them."""
        part = self.source().plan(ME, resume, ReadLimits())
        tables = [pq.read_table(pa.BufferReader(self.view.get(p["key"]).data)) for p in part.parts]
        for p, table in zip(part.parts, tables, strict=True):
            assert p["columns"].keys() >= {"at", "n", "shop"}
            assert table["shop"].to_pylist() == [f"s {n % 2}" for n in table["n"].to_pylist()]
        return (
            [sorted(t["n"].to_pylist()) for t in tables],
            [d.detail for d in part.dead],
            dict(part.resume),
        )
