"""What the tables of commit e3dab94 took, by its own names: each test says what should hold."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.sinks.conftest import World, make_spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

_FAR = 1_764_331_200_000_000_000  # ticks: beyond the year 9999


def test_core_c1(tmp_path: Path) -> None:
    """A time outside the years 1 to 9999 is published, and the epochs behind it."""

    def values(slot: int, rows: int) -> dict[str, list[object]]:
        times = pa.array([_FAR if slot == 1 else 0] * rows, pa.int64())
        return {"x": times.cast(pa.timestamp("us", "UTC"))}

    spec = make_spec({"t": "timestamp", "x": "timestamp"})
    world = World(LocalStore(tmp_path / "store"), tmp_path / "work", spec, values)
    world.seal(2)
    try:
        world.sink().follow(world.log)
    except (TidegateError, ValueError, OverflowError) as error:
        pytest.fail(f"the sink ended: {error}")
    found = read_table(world.spec, world.store, "events")
    assert found["x"].cast(pa.int64()).to_pylist() == [_FAR, _FAR, 0, 0]


def test_newcomer_8(world: World, tmp_path: Path) -> None:
    """A table of another pipeline as a source: the refusal of its folder says which path to give."""
    world.values = lambda slot, rows: {"carrier": [f"c{slot}"] * rows}
    sink = world.sink()
    world.seal(1)
    sink.follow(world.log)
    assert isinstance(world.store, LocalStore)
    catalog = f"sqlite:///{world.store.root}/.tidegate-store/catalog.sqlite"
    name = ".".join(sink.open_table("events").name())
    table = {"format": "iceberg", "catalog": catalog, "name": name}
    source = {
        "path": f"{world.store.root}/p/iceberg",
        "table": {**table, "catalog_options": {"name": "tidegate"}},
        "schema": {"t": "timestamp", "carrier": "string"},
        "event_time": "t",
        "lag": "1s",
    }
    reader = PipelineSpec.model_validate({"name": "q", "sources": {"events": source}})
    view = InputView(LocalStore(tmp_path / "other"), reader, tmp_path / "scratch")
    part = ObjectSource("events", reader.sources["events"], view, pipeline="q")
    with pytest.raises(ConfigurationError) as refused:
        part.plan(Member("events"), None, ReadLimits())
    assert "let it be a folder above all its files" in str(refused.value)
