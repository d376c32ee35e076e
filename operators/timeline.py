"""Events in the life of a stream, read from its bucket: drivers, specs, merges and verdicts.

Restores and pins are part of what the page asks for every few seconds (`StreamView.detail`), and
runs of DAGs are in Airflow's database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.splice_requests import SpliceRequest

_DRIVERS_SHOWN: Final = 20


class EpochFacts(NamedTuple):
    """What an epoch records about the driver that sealed it; `at` in milliseconds since 1970."""

    checkpoint: str
    slot: int
    at: int
    token: int
    spec_digest: str

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> EpochFacts:
        """Read the facts of one epoch."""
        at, token = manifest.created_at // 1000, manifest.lease_token
        return cls(str(manifest.id), manifest.slot, at, token, manifest.spec_digest)


def list_driver_events(
    newest: EpochFacts | None, read_epoch: Callable[[int], EpochFacts | None]
) -> Iterator[dict[str, Any]]:
    """Yield each driver's first epoch, newest first, and whether it came with another spec.

    At most 20 drivers, and none before a retired epoch.

    Lease tokens only grow along a lineage, so a search by halves finds the first epoch of each.

    Args:
        newest: the newest epoch; None before the first.
        read_epoch: returns the epoch in a slot of the lineage; None if it is retired.
    """
    for _ in range(_DRIVERS_SHOWN):
        if newest is None:
            return
        first, before = _find_first_epoch(newest, read_epoch)
        event = {"at": first.at, "checkpoint": first.checkpoint}
        if before is None:
            yield {**event, "kind": "driver", "says": f"the driver with token {first.token} began"}
            return
        gap = (first.at - before.at) / 1000
        says = f"the driver with token {first.token} took over from {before.token}"
        yield {**event, "kind": "driver", "says": f"{says}, {gap:.0f} s after the last checkpoint"}
        if first.spec_digest != before.spec_digest:
            digests = f"{before.spec_digest[:8]} to {first.spec_digest[:8]}"
            yield {**event, "kind": "spec", "says": f"the spec changed from {digests}"}
        newest = before


def _find_first_epoch(
    newest: EpochFacts, read_epoch: Callable[[int], EpochFacts | None]
) -> tuple[EpochFacts, EpochFacts | None]:
    """The first epoch of the driver that sealed `newest`, and the one before it if it is kept."""
    low, first, before = 0, newest, None
    while first.slot - low > 1:
        middle = (low + first.slot) // 2
        found = read_epoch(middle)
        if found is not None and found.token == newest.token:
            first = found
        else:
            low, before = middle, found
    return first, before


def list_merge_events(requests: Iterable[SpliceRequest]) -> Iterator[dict[str, Any]]:
    """Yield what people did with splice requests."""
    for request in requests:
        for line in request.trail:
            yield {
                "at": line["at"] // 1000,
                "kind": "merge",
                "who": line.get("who"),
                "says": f"{line['what']}: {request.row_count} rows, splice request {request.id}",
                "why": line.get("because"),
                "checkpoint": line.get("checkpoint"),
            }


def list_verdict_events(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the quality runs whose verdict differs from that of the run before, oldest first.

    The oldest run is always there.

    Args:
        runs: of `quality/history.json`, newest first.
    """
    verdict = None
    for run in reversed(runs):
        if run["verdict"] != verdict:
            yield {
                "at": int(datetime.fromisoformat(run["at"]).timestamp() * 1000),
                "kind": "verdict",
                "says": f"the quality checks say: {run['verdict']}",
                "why": ", ".join(run.get("failed") or ()) or None,
                "checkpoint": run.get("checkpoint"),
            }
        verdict = run["verdict"]
