"""The sources of a pipeline together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
from tests.sources.object_inputs import parquet, spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits

COLUMNS = {"t": "timestamp[us, tz=UTC]", "n": "int64"}
OBJECTS = 20  # more than are inspected at a time


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[InputView, PipelineSources]]:
    """Two sources of the same objects, and their view of the store."""
    pipeline = PipelineSpec.model_validate(
        {"name": "p", "sources": {name: spec(path="inbox/both") for name in "ab"}}
    )
    store = LocalStore(tmp_path)
    for number in range(OBJECTS):
        store.put(f"inbox/both/{number:02d}.parquet", parquet(3))
    view = InputView(store, pipeline, tmp_path / "scratch")
    sources = PipelineSources(pipeline, view)
    yield view, sources
    sources.close()


def test_sources_are_planned_side_by_side(pair: tuple[InputView, PipelineSources]) -> None:
    """Neither takes what tasks have found for the other, also of the same object."""
    view, sources = pair
    both = Barrier(2)

    def inspect(source: str, entries: Sequence[Any], _: Any) -> list[InspectedObject]:
        both.wait(60)
        footer = Footer({"a": 5, "b": 7}[source], COLUMNS)
        return [InspectedObject(one.key, one.etag, one.size, footer) for one in entries]

    view.let_tasks_inspect(inspect)
    found = sources.map_side_by_side(
        lambda source: source.plan(Member(source.name), None, ReadLimits()), sources.all
    )
    rows = [(part.member.source, {own["rows"] for own in part.parts}) for part in found]
    assert rows == [("a", {5}), ("b", {7})]
    assert [len(part.parts) for part in found] == [OBJECTS, OBJECTS]


def test_an_error_of_one_source_waits_for_the_others(
    pair: tuple[InputView, PipelineSources],
) -> None:
    """The next plan must not meet a thread of this one."""
    _, sources = pair
    failed, may_end, raised = Event(), Event(), Event()

    def run(name: str) -> None:
        if name == "a":
            failed.set()
            raise ValueError(name)
        assert may_end.wait(60)

    def plan() -> None:
        with pytest.raises(ValueError, match="a"):
            sources.map_side_by_side(run, ["a", "b"])
        raised.set()

    planner = Thread(target=plan)
    planner.start()
    assert failed.wait(60)
    assert not raised.wait(0.2)
    may_end.set()
    planner.join(60)
    assert raised.is_set()
