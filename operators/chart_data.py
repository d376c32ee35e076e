"""What the page draws, taken out of manifests: plain data, times in milliseconds since 1970.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import ceil, log
from typing import Any, Final

from tidegate.checkpoints.manifest import Manifest
from tidegate.time_units import TICK_MAX, TICK_MIN

_TICKS_PER_SECOND: Final = 1_000_000
# Upper bounds of the histogram's bars, in seconds: durations that people use for lateness.
_BAR_BOUNDS: Final = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)
_LATE_SHARE_TARGETS: Final = (0.01, 0.001)

LatenessSketches = Mapping[str, Mapping[str, Any]]


def to_milliseconds(ticks: Any) -> int | None:
    """Return milliseconds; None if `ticks` is not an instant, or an infinity."""
    return ticks // 1000 if isinstance(ticks, int) and TICK_MIN < ticks < TICK_MAX else None


def build_epoch_point(manifest: Manifest) -> dict[str, Any]:
    """Return one epoch as the charts show it."""
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
    """One closed barrier; its times are by the wall clock of the driver."""
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
    """Return the barriers open after this epoch: who has arrived, and since when they wait."""
    return [
        {
            "id": barrier.get("id"),
            "arrivals": {
                member: part["at"] // 1000
                for member, part in (barrier.get("arrivals") or {}).items()
            },
            "opened": to_milliseconds(barrier.get("opened")),
        }
        for barrier in (manifest.decider.get("barriers") or {}).get("open") or []
    ]


def read_sketches(manifest: Manifest) -> LatenessSketches:
    """Return, per source, the lateness sketch of the rows that this epoch read."""
    return manifest.epoch_notes.sketches


def build_lateness_charts(epochs: Iterable[LatenessSketches]) -> dict[str, Any]:
    """Return per source a histogram of lateness and the advisor's curve.

    The curve is the share of rows that would be late at each lag. A bucket `i > 0` of a sketch
    counts rows that came up to `gamma ** (i - 1)` ticks behind the newest row of their partition;
    bucket 0 counts the rows in order.
    """
    rows: dict[str, dict[float, int]] = {}
    for sketches in epochs:
        for source, sketch in sketches.items():
            counts = rows.setdefault(source, {})
            for bucket, count in sketch["buckets"].items():
                exponent = int(bucket) - 1
                ticks_behind = sketch["gamma"] ** exponent if exponent >= 0 else 0.0
                behind = ticks_behind / _TICKS_PER_SECOND
                counts[behind] = counts.get(behind, 0) + count
    return {
        "bars": list(_BAR_BOUNDS),
        "sources": {source: _build_histogram(counts) for source, counts in sorted(rows.items())},
    }


def _build_histogram(counts: Mapping[float, int]) -> dict[str, Any]:
    """Of rows by seconds behind; the last bar has no upper bound."""
    total = sum(counts.values())
    bars = [0] * (len(_BAR_BOUNDS) + 1)
    for behind, count in counts.items():
        if behind > 0:
            bars[bisect_left(_BAR_BOUNDS, behind)] += count
    return {
        "rows": total,
        "in_order": counts.get(0.0, 0),
        "bars": bars,
        "curve": _build_lag_curve(counts, total),
        "targets": _find_target_lags(counts, total),
    }


def _build_lag_curve(counts: Mapping[float, int], total: int) -> list[tuple[float, float]]:
    """(lag in seconds, share of late rows) at a few dozen points.

    Points closer than 15 % are joined: more of them would not be seen.
    """
    late, last_step = total, None
    points: list[tuple[float, float]] = []
    for behind, count in sorted(counts.items()):
        late -= count
        step = 0 if behind <= 0 else ceil(log(max(behind, 1e-6)) / log(1.15))
        if step == last_step:
            points.pop()
        points.append((round(behind, 3), round(late / total, 6)))
        last_step = step
    return points


def _find_target_lags(counts: Mapping[float, int], total: int) -> list[dict[str, float]]:
    """For each target, the least lag that leaves at most that share of the rows late."""
    targets = []
    for share in _LATE_SHARE_TARGETS:
        late, lag = 0, 0.0
        for behind, count in sorted(counts.items(), reverse=True):
            if late + count > share * total:
                lag = behind
                break
            late += count
        targets.append({"share": share, "lag": round(lag, 3)})
    return targets
