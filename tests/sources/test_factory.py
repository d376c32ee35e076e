"""The sources of a pipeline together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tests.sources.object_inputs import parquet, spec

from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.factory import PipelineSources
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import Footer, InspectedObject
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[InputView, PipelineSources]]:
    """Two sources with an object each, and their view of the store."""
    pipeline = PipelineSpec.model_validate(
        {"name": "p", "sources": {name: spec(path=f"inbox/{name}") for name in "ab"}}
    )
    store = LocalStore(tmp_path)
    for name in "ab":
        store.put(f"inbox/{name}/1.parquet", parquet(3))
    view = InputView(store, pipeline, tmp_path / "scratch")
    sources = PipelineSources(pipeline, view)
    yield view, sources
    sources.close()


def test_sources_are_planned_side_by_side(pair: tuple[InputView, PipelineSources]) -> None:
    """Neither takes what tasks have found of the objects of the other."""
    view, sources = pair
    both = Barrier(2)

    def inspect(source: str, entries: Sequence[Any], _: Any) -> list[InspectedObject]:
        both.wait(60)
        rows = {"a": 5, "b": 7}[source]
        columns = {"t": "timestamp[us, tz=UTC]", "n": "int64"}
        return [
            InspectedObject(one.key, one.etag, one.size, Footer(rows, columns)) for one in entries
        ]

    view.let_tasks_inspect(inspect)
    found = sources.map_side_by_side(
        lambda source: source.plan(Member(source.name), None, ReadLimits()), sources.all
    )
    rows = [(part.member.source, [own["rows"] for own in part.parts]) for part in found]
    assert rows == [("a", [5]), ("b", [7])]


def test_an_error_of_one_source_waits_for_the_others(
    pair: tuple[InputView, PipelineSources],
) -> None:
    """The next plan must not meet a thread of this one."""
    _, sources = pair
    both, ended = Barrier(2), list[str]()

    def fail(name: str) -> None:
        both.wait(60)
        if name == "a":
            raise ValueError(name)
        ended.append(name)

    with pytest.raises(ValueError, match="a"):
        sources.map_side_by_side(fail, ["a", "b"])
    assert ended == ["b"]
