"""What a driver says about itself, for people and for Airflow. The last writer wins; nothing here is trusted for data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tidegate.checkpoints.canonical import canonical_bytes, parse_json
from tidegate.checkpoints.layout import BucketLayout
from tidegate.checkpoints.store import NotFoundError, Store

__all__ = ["DriverStatus", "read_status", "count_waiting_messages", "write_status"]


class DriverStatus(BaseModel):
    """One report.

    Attributes:
        token: lease token of the driver that wrote it; a report with another token than the lease's is somebody's last words.
        step: the step it is in.
        at: its wall clock, microseconds UTC, for display.
        body: whatever else it says (frontiers, lag, error, probe result, rates).
    """

    model_config = ConfigDict(frozen=True)

    format_version: int = 1
    token: int
    driver: str
    step: str
    at: int
    body: dict[str, Any] = Field(default_factory=dict)


def write_status(store: Store, pipeline: str, status: DriverStatus) -> None:
    """Overwrite the report."""
    store.put(BucketLayout(pipeline).status_key, canonical_bytes(status.model_dump(mode="json")))


def count_waiting_messages(body: Mapping[str, Any]) -> dict[str, int]:
    """Messages that a driver has not planned to read yet, by source; only of sources that are behind."""
    found: dict[str, int] = {}
    for member, count in (body.get("lag") or {}).items():
        source = member.partition("/")[0]
        found[source] = found.get(source, 0) + int(count)
    return {source: count for source, count in found.items() if count}


def read_status(store: Store, pipeline: str, *, token: int | None = None) -> DriverStatus | None:
    """The report, or None if there is none, if it cannot be read, or if it is not by the driver with `token`."""
    try:
        status = DriverStatus.model_validate(parse_json(store.get(BucketLayout(pipeline).status_key).data))
    except (NotFoundError, ValueError):
        return None
    return status if token is None or status.token == token else None
