"""What the Streams page shows, computed from what was read: no store, no Airflow, no clock.

The first half says whether a stream is well, and if not, why not. The second half takes charts out
of manifests; its times are milliseconds since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from math import ceil, log
from typing import Any, Final

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pipeline_overview import PipelineOverview, PipelineState
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.time_units import TICK_MAX, TICK_MIN

# An idle stream seals clock ticks far more often, so an older newest checkpoint means a hang.
OLD_CHECKPOINT_SECONDS: Final = 120.0
# Sealed epochs that the tables do not show yet; the driver itself waits at
# `outputs.max_unpublished`.
BACKLOG_EPOCHS: Final = 20
# If more sources are silent, the cause is not the sources.
_SILENT_SOURCES_SHOWN: Final = 3

_DRIVER_CONTINUES: Final = "a running driver goes on, but nothing new starts"
_STALE_DAG_TEXTS: Final = {
    "errors": (
        f"Airflow cannot read its DAG file at present (import errors): {_DRIVER_CONTINUES} until"
        " the file is corrected"
    ),
    "missing": (
        "Airflow does not find its DAG, though a run of it is active (is its spec broken, or"
        f" gone?): {_DRIVER_CONTINUES}"
    ),
}

_TONE_ORDER: Final = ("off", "good", "warn", "bad")
# By the page's words; every state that is not here is bad.
_TONE_OF_STATE: Final = {
    "running": "good",
    "finished": "good",
    "starting": "warn",
    "waiting": "warn",
    "draining": "warn",
    "recovering": "warn",
    "stopping": "warn",
    "stopped": "off",
    "new": "off",
}


def explain_state(overview: PipelineOverview) -> str:
    """Return why the pipeline is in its state; empty if the state needs no explanation."""
    desired, facts = overview.desired, overview.driver.facts
    reason = str(facts.get("why") or "")
    match overview.state:
        case PipelineState.RECOVERING:
            by = f", started by {desired.who}" if desired.who else ""
            return f"a restore is under way{by}"
        case PipelineState.WAITING | PipelineState.STARTING | PipelineState.DRAINING:
            return reason
        case PipelineState.FAILED:
            return str((facts.get("error") or {}).get("message", ""))
        case PipelineState.FINISHED:
            return reason or "all sources are done"
        case PipelineState.NEW:
            return "it was never started"
        case PipelineState.STOPPED:
            told = f"stopped by {desired.who}" if desired.who else ""
            return reason or (f"{told}: {desired.why}" if told and desired.why else told)
        case PipelineState.LOST:
            return "it should run, and no one drives it"
    return ""


# Milliseconds in which a driver that someone has asked for may appear: `start_timeout`.
_START_PATIENCE: Final = 180_000
_DRIVEN_STATES: Final = frozenset({"running", "waiting", "starting", "draining"})
_AT_REST_STATES: Final = frozenset({"down", "new", "stopped", "failed", "finished"})


def find_transition(row: Mapping[str, Any], now: int) -> dict[str, str]:
    """Return state and reason of a start or stop that a person has asked for; empty without one.

    A stream that has not followed yet is neither faulty nor stopped.

    Args:
        row: as for `diagnose_stream`.
        now: milliseconds since 1970.
    """
    desired = row.get("desired") or {}
    by = f" by {desired['who']}" if desired.get("who") else ""
    if row["state"] in _DRIVEN_STATES and by and desired["state"] == "stopped":
        return {"state": "stopping", "why": f"asked for{by}: the driver seals what it has read"}
    if row["state"] not in _AT_REST_STATES or row.get("paused"):
        return {}
    asked_at = desired.get("at", 0) if desired.get("state") == "run" else 0
    if row.get("runs"):
        asked_at = max(asked_at, row.get("run_since") or 0)
    # A driver that has reported since then was started, and has ended again.
    if (row.get("reported_at") or 0) < asked_at and now - asked_at < _START_PATIENCE:
        return {"state": "starting", "why": f"a driver is being started{by}"}
    return {}


def diagnose_stream(row: Mapping[str, Any], now: int) -> list[dict[str, str]]:
    """Return all problems of a stream, worst first, each with its tone; empty if it is well.

    Args:
        row: the summary as the page shows it.
        now: milliseconds since 1970.
    """
    problems = [{"tone": tone, "says": text} for tone, text in _find_problems(row, now)]
    return sorted(problems, key=lambda problem: -_TONE_ORDER.index(problem["tone"]))


def pick_worst_tone(state: str, problems: list[dict[str, str]]) -> str:
    """Return one tone for the whole stream; a stopped one is grey unless it has problems."""
    tones = [_TONE_OF_STATE.get(state, "bad"), *(problem["tone"] for problem in problems)]
    return max(tones, key=_TONE_ORDER.index)


def _find_problems(row: Mapping[str, Any], now: int) -> Iterator[tuple[str, str]]:
    state, tone = row["state"], _TONE_OF_STATE.get(row["state"], "bad")
    if row["why"] and tone in ("warn", "bad"):
        yield tone, row["why"]
    elif tone == "bad":
        yield tone, f"it is {state}"
    if state == "down" and row.get("paused"):
        yield "bad", "its DAG is paused in Airflow, so nothing starts it"
    if row.get("unread"):
        yield "warn", _STALE_DAG_TEXTS[row["unread"]]
    age = now - row["sealed_at"] if row.get("sealed_at") else 0  # milliseconds
    if state == "running" and age > OLD_CHECKPOINT_SECONDS * 1000:
        yield "warn", f"the newest checkpoint is {_format_duration(age // 1000)} old"
    if state != "waiting" and (row.get("unpublished") or 0) > BACKLOG_EPOCHS:
        yield "warn", f"{row['unpublished']} sealed epochs are not in the tables yet"
    silent = sorted((row.get("silent") or {}).items(), key=lambda item: -item[1])
    for source, seconds in silent[:_SILENT_SOURCES_SHOWN]:
        yield "warn", f"{source} has said nothing for {_format_duration(seconds)}"
    for source, seconds in sorted((row.get("stale") or {}).items()):
        wait = _format_duration(round(seconds))
        yield "warn", f"rows of {source} are seen {wait} after their arrival (p95), beyond the goal"
    notes = [*(row.get("warnings") or ()), row.get("trouble")]
    yield from (("warn", str(note)) for note in notes if note)
    yield from _find_quality_problems(row.get("quality"))


def _find_quality_problems(quality: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if not quality or quality.get("verdict") not in ("fail", "warn"):
        return
    failed = quality.get("failed") or []
    names = "; ".join(f"“{check.get('says') or check.get('id')}”" for check in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    tone = "bad" if quality["verdict"] == "fail" else "warn"
    yield tone, f"quality checks failed: {names}{more}" if names else "quality checks failed"


def _format_duration(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


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
    counts = {s: RowCounts.of_source(own) for s, own in counters.per_source.items()}
    every = RowCounts.add_up(counts.values())
    return {
        "id": str(manifest.id),
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "token": manifest.lease_token,
        "at": manifest.created_at // 1000,
        "frontier": to_milliseconds(manifest.frontier_after),
        "final": manifest.frontier_after == TICK_MAX,
        "holder": (manifest.frontier_holder or {}).get("member"),
        "members": {name: to_milliseconds(state["frontier"]) for name, state in inputs.items()},
        "statuses": {name: state["status"] for name, state in inputs.items()},
        "read": counters.read,
        "released": counters.released,
        "late": every.late_rows,
        "retained": counters.retained,
        "dead": counters.dead_lettered,
        "counts": every.to_record(),
        "sources": {
            source: {**counters.per_source[source], "late": own.late_rows}
            for source, own in counts.items()
        },
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


def list_open_barriers(manifest: Manifest, timeout: int | None) -> list[dict[str, Any]]:
    """Return the barriers open after this epoch: who has arrived, who is missing, and until when.

    Only the oldest one times out; the others wait for their turn (docs/semantics.md, section 3.5).

    Args:
        manifest: the newest epoch.
        timeout: ticks until the oldest one times out; None for never.
    """
    kept = (manifest.decider.get("barriers") or {}).get("open", ())
    return [
        {
            "id": state.id,
            "arrivals": {m: part["at"] // 1000 for m, part in barrier["arrivals"].items()},
            "missing": list(state.awaited),
            "opened": to_milliseconds(barrier["opened"]),
            "closes": (
                _find_barrier_deadline(manifest, barrier, timeout)
                if barrier is kept[0] and timeout is not None
                else None
            ),
        }
        for state, barrier in zip(manifest.open_barriers, kept, strict=True)
    ]


def _find_barrier_deadline(manifest: Manifest, barrier: Mapping[str, Any], timeout: int) -> int:
    """When it times out, by the wall clock, if no outage holds the pipeline's clock back."""
    clock = manifest.decider["clock"]
    last_closed = manifest.decider["barriers"].get("last_closed")
    since = max(barrier["opened"], last_closed or barrier["opened"])
    return int(manifest.created_at + since + timeout - clock) // 1000


def read_sketches(manifest: Manifest) -> LatenessSketches:
    """Return, per source, the lateness sketch of the rows that this epoch read."""
    return manifest.epoch_notes.sketches


def build_lateness_charts(epochs: Iterable[LatenessSketches]) -> dict[str, Any]:
    """Return per source a histogram of lateness and the advisor's curve, both in seconds.

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
