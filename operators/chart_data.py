"""What the page draws, taken out of manifests: plain data, times in milliseconds since 1970.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log
from typing import Any, Final

from tidegate.checkpoints.manifest import Manifest
from tidegate.time_units import TICK_MAX, TICK_MIN

_TICKS_PER_SECOND: Final = 1_000_000  # ticks
# Bounds of the histogram's bars, in seconds: words that people use for lateness.
_BAR_BOUNDS: Final = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)
_LATE_SHARE_TARGETS: Final = (0.01, 0.001)  # shares of late rows people ask for


def to_milliseconds(ticks: Any) -> int | None:
    """Milliseconds, or None for no instant and for both infinities."""
    return ticks // 1000 if isinstance(ticks, int) and TICK_MIN < ticks < TICK_MAX else None


def build_epoch_point(manifest: Manifest) -> dict[str, Any]:
    """One epoch in the charts."""
    inputs, counters = manifest.decider.get("output", {}).get("inputs", {}), manifest.counters
    return {
        "id": str(manifest.id),
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "at": manifest.created_at // 1000,
        "frontier": to_milliseconds(manifest.frontier_after),
        "final": manifest.frontier_after == TICK_MAX,
        "holder": (manifest.frontier_holder or {}).get("member"),
        "members": {name: to_milliseconds(state["frontier"]) for name, state in inputs.items()},
        "statuses": {name: state["status"] for name, state in inputs.items()},
        "read": counters.read,
        "released": counters.released,
        "late": counters.late,
        "retained": counters.retained,
        "dead": counters.dead_lettered,
        "sources": counters.per_source,
        "seconds": round(sum(manifest.timings.values()), 3),
        "steps": manifest.timings,
        "barriers": [_describe_barrier(b, str(manifest.id)) for b in manifest.barriers],
    }


def _describe_barrier(row: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """One closed barrier.

    Its times are on the pipeline's clock, which is the wall clock of the driver.
    """
    opened, closed = int(row.get("opened") or 0), int(row.get("closed") or 0)
    arrivals = {member: part[0] // 1000 for member, part in (row.get("participants") or {}).items()}
    return {
        **{name: row.get(name) for name in ("id", "outcome", "homogeneous", "section")},
        **{name: list(row.get(name) or ()) for name in ("types", "missing", "tardy", "ended")},
        "arrivals": arrivals,
        "opened": opened // 1000,
        "at": closed // 1000,
        "waited": (closed - opened) / 1e6,
        "checkpoint": checkpoint,
    }


def list_open_barriers(manifest: Manifest) -> list[dict[str, Any]]:
    """Barriers that are open after this epoch: who has arrived, since when they wait."""
    found = []
    for barrier in (manifest.decider.get("barriers") or {}).get("open") or []:
        arrivals = {
            member: part["at"] // 1000 for member, part in (barrier.get("arrivals") or {}).items()
        }
        found.append(
            {
                "id": barrier.get("id"),
                "arrivals": arrivals,
                "opened": to_milliseconds(barrier.get("opened")),
            }
        )
    return found


LatenessSketches = Mapping[str, Mapping[str, Any]]


def read_sketches(manifest: Manifest) -> LatenessSketches:
    """Source -> lateness sketch of the rows this epoch read."""
    return manifest.epoch_notes.sketches


def build_lateness_charts(epochs: Iterable[LatenessSketches]) -> dict[str, Any]:
    """Histogram of lateness per source, and the advisor's curve.

    Share of rows that would be late at each lag.

    A bucket `i > 0` of a sketch holds rows that came up to `gamma ** (i - 1)` ticks behind the
    newest row of their partition, bucket 0 those in order.
    """
    rows: dict[str, dict[float, int]] = {}
    for sketches in epochs:
        for source, sketch in sketches.items():
            own = rows.setdefault(source, {})
            for bucket, count in sketch["buckets"].items():
                behind = (
                    0.0
                    if int(bucket) <= 0
                    else sketch["gamma"] ** (int(bucket) - 1) / _TICKS_PER_SECOND
                )
                own[behind] = own.get(behind, 0) + count
    return {
        "bars": list(_BAR_BOUNDS),
        "sources": {source: _build_lateness_histogram(own) for source, own in sorted(rows.items())},
    }


def _build_lateness_histogram(rows: Mapping[float, int]) -> dict[str, Any]:
    total = sum(rows.values())
    bars = [0] * (len(_BAR_BOUNDS) + 1)
    for behind, count in rows.items():
        if behind > 0:
            bars[
                next(
                    (i for i, bound in enumerate(_BAR_BOUNDS) if behind <= bound), len(_BAR_BOUNDS)
                )
            ] += count
    return {
        "rows": total,
        "in_order": rows.get(0.0, 0),
        "bars": bars,
        "curve": _build_lag_curve(rows, total),
        "targets": _find_target_lags(rows, total),
    }


def _build_lag_curve(rows: Mapping[float, int], total: int) -> list[tuple[float, float]]:
    """(lag in seconds, share of late rows), at most a few dozen points.

    Neighbours closer than 15 % are joined.
    """
    left, last, found = total, None, []
    for behind, count in sorted(rows.items()):
        left -= count
        place = 0 if behind <= 0 else ceil(log(max(behind, 1e-6)) / log(1.15))
        if place == last:
            found.pop()
        found.append((round(behind, 3), round(left / total, 6)))
        last = place
    return found


def _find_target_lags(rows: Mapping[float, int], total: int) -> list[dict[str, float]]:
    """The least lag that leaves at most so many rows late."""
    found = []
    for share in _LATE_SHARE_TARGETS:
        late, lag = 0, 0.0
        for behind, count in sorted(rows.items(), reverse=True):
            if late + count > share * total:
                lag = behind
                break
            late += count
        found.append({"share": share, "lag": round(lag, 3)})
    return found
