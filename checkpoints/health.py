"""Which checkpoints the quality runs found healthy, for `recover_to: latest_healthy`. Light: no pandas, no GX."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.checkpoints.canonical import parse_json
from tidegate.checkpoints.layout import CheckpointId, BucketLayout
from tidegate.checkpoints.store import NotFoundError, Store

__all__ = ["build_health_check"]


def build_health_check(store: Store, pipeline: str) -> Callable[[CheckpointId], bool]:
    """A judge of checkpoints, from the history of quality runs as it is now.

    A run looks at everything up to its checkpoint. So a run without a critical failure speaks for that checkpoint and
    all before it on its timeline; a failing one speaks against all that no such run speaks for, later ones included.
    Where nobody ever checked, nothing is held against a checkpoint.
    """
    well: dict[int, int] = {}
    ill: dict[int, int] = {}
    for checkpoint, verdict in _read_quality_runs(store, pipeline):
        noted = ill if verdict == "fail" else well
        noted[checkpoint.timeline] = max(noted.get(checkpoint.timeline, 0), checkpoint.slot)

    def is_healthy(checkpoint: CheckpointId) -> bool:
        spoken_for = well.get(checkpoint.timeline, 0)
        return checkpoint.slot <= spoken_for or ill.get(checkpoint.timeline, 0) <= spoken_for

    return is_healthy


def _read_quality_runs(store: Store, pipeline: str) -> list[tuple[CheckpointId, str]]:
    try:
        runs = parse_json(store.get(f"{BucketLayout(pipeline).quality_prefix}history.json").data)["runs"]
    except (NotFoundError, ValueError, KeyError):
        return []
    return [(CheckpointId.parse(run["checkpoint"]), run["verdict"]) for run in runs if run["checkpoint"]]
