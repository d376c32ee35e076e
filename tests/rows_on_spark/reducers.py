"""A reducer of the pipeline with streams: its module has to travel to the workers."""

from __future__ import annotations

from typing import Any


def count_rows(state: int, event: Any, index: int) -> tuple[int, list[dict[str, int]]]:
    """Count the rows of a key."""
    return state + 1, [{"key": event["key"], "n": state + 1}]
