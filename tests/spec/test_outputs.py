from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.jobs.spec.pipeline import PipelineSpec

SOURCE = {
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
