from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.jobs.spec.pipeline import PipelineSpec

SOURCE: dict[str, Any] = {
    "path": "inbox",
    "schema": {"t": "timestamp", "v": "double"},
    "event_time": "t",
    "lag": "1s",
}


def spec(**more: Any) -> PipelineSpec:
    """A pipeline without events."""
    return PipelineSpec.model_validate(
        {"name": "p", "sources": {"a": SOURCE}, "outputs": {"events": False}, **more}
    )


def test_events_can_be_left_out_where_nothing_is_put_in_order() -> None:
    """Windows and late rows alone are a pipeline; the events table stays, empty."""
    assert "events" in spec(release={"mode": "pass_through"}).table_names


def test_what_needs_events_refuses_to_go_without() -> None:
    """An ordered output that is not written would be a buffer for nothing."""
    with pytest.raises(ValidationError, match="nothing to put in order"):
        spec()


@pytest.mark.parametrize(
    ("columns", "window", "taken"),
    [
        ({"Output": "string"}, {}, "schema: .*: Output"),
        ({"position": "string"}, {}, "schema: .*: position"),
        ({"Revision": "string"}, {"keys": ["Revision"]}, "windows.w.keys: .*: Revision"),
        ({}, {"aggregates": {"n": "count(*)", "N": "sum(v)"}}, "aggregates: .*: N"),
        ({}, {"keys": ["v"], "aggregates": {"V": "count(*)"}}, "aggregates: .*: V"),
    ],
)
def test_names_of_a_table_differ_in_more_than_case(
    columns: dict[str, str], window: dict[str, Any], taken: str
) -> None:
    """Neither DuckDB nor catalogs tell them apart."""
    base = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    source = {**SOURCE, "schema": {**SOURCE["schema"], **columns}}
    with pytest.raises(ValidationError, match=taken):
        spec(sources={"a": source}, outputs={}, windows={"w": {**base, **window}})
