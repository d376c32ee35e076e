"""What the Streams page shows, computed from what was read: no store, no Airflow, no clock.

The first part says whether a stream is well, and if not, why not. The others take charts out of
manifests, draw the pipeline as a graph, and list the events of the timeline. Times are milliseconds
since 1970.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import ceil, log
from typing import Any

from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.deployed_specs import Deploy, DeployedDocument
from tidegate.checkpoints.illness_record import is_verdict_stale
from tidegate.checkpoints.incidents import BACKLOG_EPOCHS
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.pipeline_overview import (
    DriverOverview,
    PipelineOverview,
    PipelineState,
    name_worst,
    needs_person,
)
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.checkpoints.splice_requests import SpliceRequest
from tidegate.jobs.advise.lag_advice import TARGET_SHARES, LatenessCurve, merge_sketches
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec
from tidegate.jobs.spec.row_rules import RULE_QUARANTINED
from tidegate.jobs.spec.source_spec import SourceSpec
from tidegate.jobs.spec.stream_specs import REJECTIONS, PipeSpec
from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import TICK_MAX, TICK_MIN

# An idle stream seals clock ticks far more often, so an older newest checkpoint means a hang.
OLD_CHECKPOINT_SECONDS = 120.0

_DRIVER_CONTINUES = "a running driver goes on, but nothing new starts"
_STALE_DAG_TEXTS = {
    "errors": (
        f"Airflow cannot read its DAG file at present (import errors): {_DRIVER_CONTINUES} until"
        " the file is corrected"
    ),
    "missing": (
        "Airflow does not find its DAG, though a run of it is active (is its spec broken, or"
        f" gone?): {_DRIVER_CONTINUES}"
    ),
}

_TONE_ORDER = ("off", "good", "warn", "bad")
# By the page's words; every state that is not here is bad.
_TONE_OF_STATE = {
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
            by = f"stopped by {desired.who}" if desired.who else ""
            return reason or (f"{by}: {desired.why}" if by and desired.why else by)
        case PipelineState.LOST:
            return "it should run, and no one drives it"
    return ""


# Milliseconds in which a driver that someone has asked for may appear: `start_timeout`.
_START_PATIENCE = 180_000
_DRIVEN_STATES = frozenset({"running", "waiting", "starting", "draining"})
_AT_REST_STATES = frozenset({"down", "new", "stopped", "failed", "finished"})


def find_transition(row: JsonView, now: int) -> dict[str, str]:
    """Return state and reason of a start or stop that is under way; empty without one.

    A stream that has not followed yet what a person has asked for is neither faulty nor stopped,
    nor is one whose driver Airflow replaces.

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
    return _find_replacement(row, now)


def _find_replacement(row: JsonView, now: int) -> dict[str, str]:
    """State and reason while a run of the stream is about to replace its driver; else empty."""
    wanted = (row.get("desired") or {}).get("state") == "run" and row.get("runs")
    if not wanted or row.get("unread") or row["state"] not in ("down", "failed"):
        return {}
    error = row.get("error") or {}
    # Airflow tries again only what is known to pass.
    if row["state"] == "failed" and (not error.get("class") or needs_person(error)):
        return {}
    if now - (row.get("reported_at") or 0) >= _START_PATIENCE:
        return {}
    ended = f"failed ({error['message']})" if error.get("message") else "is gone"
    return {"state": "starting", "why": f"its driver {ended}: Airflow is replacing the driver"}


def diagnose_stream(row: JsonView, now: int) -> list[dict[str, str]]:
    """Return all problems of a stream, worst first, each with its tone; empty if it is well.

    Args:
        row: the summary as the page shows it.
        now: milliseconds since 1970.
    """
    found = dict.fromkeys(_find_problems(row, now))  # a trouble may also be why it waits
    problems = [{"tone": tone, "says": text} for tone, text in found]
    return sorted(problems, key=lambda problem: -_TONE_ORDER.index(problem["tone"]))


def pick_worst_tone(state: str, problems: list[dict[str, str]]) -> str:
    """Return one tone for the whole stream; a stopped one is grey unless it has problems."""
    tones = [_TONE_OF_STATE.get(state, "bad"), *(problem["tone"] for problem in problems)]
    return max(tones, key=_TONE_ORDER.index)


def _find_problems(row: JsonView, now: int) -> Iterator[tuple[str, str]]:
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
    # A job seals nothing while it has nothing to do, and ends itself when it stands still.
    if state == "running" and age > OLD_CHECKPOINT_SECONDS * 1000 and not row.get("queries"):
        yield "warn", f"the newest checkpoint is {_format_duration(age // 1000)} old"
    if state != "waiting" and (row.get("unpublished") or 0) > BACKLOG_EPOCHS:
        yield "warn", f"{row['unpublished']} sealed epochs are not in the tables yet"
    if silent := row.get("silent"):
        names, longest = _name_worst_sources(silent)
        has = "has" if len(silent) == 1 else "have"
        sources = "source" if len(silent) == 1 else "sources"
        yield "warn", f"{sources} {names} {has} said nothing for {longest}"
    if stale := row.get("stale"):
        names, longest = _name_worst_sources(stale)
        up_to = "" if len(stale) == 1 else "up to "
        seen = f"seen {up_to}{longest} after their arrival (p95), beyond the goal"
        yield "warn", f"rows of {names} are {seen}"
    notes = [*(row.get("warnings") or ()), row.get("trouble")]
    yield from (("warn", str(note)) for note in notes if note)
    yield from _find_quality_problems(row, now)


def _name_worst_sources(waits: Mapping[str, float]) -> tuple[str, str]:
    """The sources that wait longest, and the longest wait: one line for one cause."""
    return name_worst(waits), _format_duration(round(max(waits.values())))


def _find_quality_problems(row: JsonView, now: int) -> Iterator[tuple[str, str]]:
    quality, sealed_at = row.get("quality"), row.get("sealed_at") or 0
    if not quality:
        since = row.get("run_since")  # when Airflow's run of the stream began
        if since and is_verdict_stale(since / 1000, sealed_at / 1000):
            yield "warn", "the quality checks have never run, so no one knows how its rows are"
        return
    checked_at = read_instant(quality.get("at"))
    if checked_at is None or is_verdict_stale(
        checked_at / 1000, sealed_at / 1000, quality.get("every")
    ):
        age = (
            "an unknown time"
            if checked_at is None
            else _format_duration((now - checked_at) // 1000)
        )
        yield "warn", f"the quality checks last ran {age} ago, and epochs were sealed since"
    if quality.get("verdict") not in ("fail", "warn"):
        return
    failed = quality.get("failed") or []
    names = "; ".join(f"“{check.get('says') or check.get('id')}”" for check in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    tone = "bad" if quality["verdict"] == "fail" else "warn"
    yield tone, f"quality checks failed: {names}{more}" if names else "quality checks failed"


def read_instant(text: Any) -> int | None:
    """Return the milliseconds of a time in ISO 8601; None if it is not one."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (TypeError, ValueError):
        return None


def _format_duration(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


_TICKS_PER_SECOND = 1_000_000
# Upper bounds of the histogram's bars, in seconds: durations that people use for lateness.
_BAR_BOUNDS = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800)
_LATE_SHARE_TARGETS = TARGET_SHARES[:2]

LatenessSketches = Mapping[str, JsonView]


def to_milliseconds(ticks: Any) -> int | None:
    """Return milliseconds; None if `ticks` is not an instant, or an infinity."""
    return ticks // 1000 if isinstance(ticks, int) and TICK_MIN < ticks < TICK_MAX else None


def build_epoch_point(manifest: Manifest) -> JsonObject:
    """Return one epoch as the charts show it."""
    inputs, counters = manifest.decider.get("output", {}).get("inputs", {}), manifest.counters
    counts = {s: RowCounts.of_source(own) for s, own in counters.per_source.items()}
    every = RowCounts.add_up(counts.values())
    return {
        "id": str(manifest.id),
        "timeline": manifest.timeline,
        "slot": manifest.slot,
        "token": manifest.lease_token,
        "spec": manifest.spec_digest,
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
        "dead": counters.dead_lettered + every[RULE_QUARANTINED],
        "counts": every.to_record(),
        "sources": {
            source: {**counters.per_source[source], "late": own.late_rows}
            for source, own in counts.items()
        },
        "seconds": round(sum(manifest.timings.values()), 3),
        "steps": manifest.timings,
        "barriers": [_describe_barrier(row, manifest) for row in manifest.barriers],
    }


def describe_checkpoint_epoch(
    epochs: Sequence[JsonView | None],
    nth: int,
    describe_spec_change: Callable[[str, str], str],
) -> JsonObject:
    """Return what the table of checkpoints has of an epoch beside the index.

    `changed` is in what its spec differs from that of the epoch before it, if it does.

    Args:
        epochs: those of the page, newest first, as `build_epoch_point` returns them.
        nth: the one to describe.
        describe_spec_change: as for `list_driver_events`.
    """
    epoch = epochs[nth]
    if epoch is None:
        return {"dead": None, "spec": None, "changed": None}
    earlier = next((one["spec"] for one in epochs[nth + 1 :] if one is not None), epoch["spec"])
    changed = describe_spec_change(earlier, epoch["spec"]) if earlier != epoch["spec"] else None
    return {"dead": epoch["dead"], "spec": epoch["spec"], "changed": changed}


def describe_restore(fork: ForkRecord) -> JsonObject:
    """Return who went back to which checkpoint, and why."""
    names = {"timeline", "slot", "new_timeline", "fork_slot", "who", "why", "recover_to", "at"}
    facts = fork.model_dump(include={*names, "request_id"})
    return {**facts, "at": fork.at // 1000}


def describe_frontier_holder(driver: DriverOverview, newest: Manifest | None) -> JsonObject | None:
    """Return which member holds the frontier, why and since when; None without one."""
    # The newest epoch first, whose frontiers the page shows; a report is of another moment.
    holder = newest.frontier_holder if newest else driver.last_facts.get("holder")
    if not isinstance(holder, dict):
        return None
    return {
        "member": holder.get("member"),
        "why": holder.get("why"),
        "since": to_milliseconds(holder.get("since")),
    }


def describe_queries(newest: Manifest | None) -> JsonObject:
    """Return the queries of a job; empty for a pipeline."""
    notes = BatchNotes.from_manifest(newest)
    queries = notes.model_dump(mode="json")["queries"] if notes else {}
    return {
        name: {**at, "watermark": to_milliseconds(at["watermark"])} for name, at in queries.items()
    }


def _describe_barrier(row: JsonView, manifest: Manifest) -> JsonObject:
    """One closed barrier; its times are by the wall clock of the driver."""
    opened, closed = int(row.get("opened") or 0), int(row.get("closed") or 0)
    participants = (row.get("participants") or {}).items()
    return {
        **{name: row.get(name) for name in ("id", "outcome", "homogeneous", "section")},
        **{name: list(row.get(name) or ()) for name in ("types", "missing", "tardy", "ended")},
        "arrivals": {m: manifest.to_wall_time(part[0]) // 1000 for m, part in participants},
        "opened": manifest.to_wall_time(opened) // 1000,
        "at": manifest.to_wall_time(closed) // 1000,
        "waited": (closed - opened) / 1e6,
        "checkpoint": str(manifest.id),
    }


def list_open_barriers(manifest: Manifest, timeout: int | None) -> list[JsonObject]:
    """Return the barriers open after this epoch: who has arrived, who is missing, and until when.

    Only the oldest one times out; the others wait for their turn (docs/semantics.md, section 3.5).

    Args:
        manifest: the newest epoch.
        timeout: ticks until the oldest one times out; None for never.
    """
    kept = (manifest.decider.get("barriers") or {}).get("open", ())
    closes = to_milliseconds(manifest.find_barrier_deadline(timeout))
    return [
        {
            "id": state.id,
            "arrivals": {
                member: manifest.to_wall_time(part["at"]) // 1000
                for member, part in barrier["arrivals"].items()
            },
            "missing": list(state.awaited),
            "opened": manifest.to_wall_time(barrier["opened"]) // 1000,
            "closes": closes if barrier is kept[0] else None,
        }
        for state, barrier in zip(manifest.open_barriers, kept, strict=True)
    ]


def build_lateness_charts(epochs: Iterable[LatenessSketches]) -> JsonObject:
    """Return per source a histogram of lateness and the advisor's curve, both in seconds.

    The curve is the share of rows that would be late at each lag.
    """
    by_source = defaultdict[str, list[JsonView]](list)
    for sketches in epochs:
        for source, sketch in sketches.items():
            by_source[source].append(sketch)
    return {
        "bars": list(_BAR_BOUNDS),
        "sources": {
            source: _build_histogram(merge_sketches(own))
            for source, own in sorted(by_source.items())
        },
    }


def _build_histogram(counts: Mapping[int, int]) -> JsonObject:
    """Of rows by ticks behind; the last bar has no upper bound."""
    curve, bars = LatenessCurve(counts), [0] * (len(_BAR_BOUNDS) + 1)
    for behind, count in counts.items():
        if behind > 0:
            bars[bisect_left(_BAR_BOUNDS, behind / _TICKS_PER_SECOND)] += count
    return {
        "rows": curve.rows,
        "in_order": counts.get(0, 0),
        "bars": bars,
        "curve": _reduce_lag_curve(curve),
        "targets": [
            {
                "share": float(share),
                "lag": round((curve.lag_for(share) or 0) / _TICKS_PER_SECOND, 3),
            }
            for share in _LATE_SHARE_TARGETS
        ],
    }


def _reduce_lag_curve(curve: LatenessCurve) -> list[tuple[float, float]]:
    """(lag in seconds, share of late rows) at a few dozen points.

    Points closer than 15 % are joined: more of them would not be seen.
    """
    last_step = None
    points: list[tuple[float, float]] = []
    for lag, share in curve.points():
        step = ceil(log(lag / _TICKS_PER_SECOND) / log(1.15)) if lag else 0
        if step == last_step:
            points.pop()
        points.append((round(lag / _TICKS_PER_SECOND, 3), round(share, 6)))
        last_step = step
    return points


# The pipeline as a graph: what its rows pass, and how each part is. Rows per table are not in it:
# the page knows them from the tables.

REQUESTS = "merge requests"
"""Node of the requests to merge late rows, rejections and dead letters into history."""


def build_graph(spec: PipelineSpec, facts: JsonView, open_requests: int) -> JsonObject:
    """Return the nodes and edges of a pipeline; each node has a `column`, from left to right.

    Args:
        spec: the pipeline.
        facts: the stream's summary (`StreamView.summary`).
        open_requests: merge requests that wait for someone.
    """
    facts = defaultdict(dict, {name: fact for name, fact in facts.items() if fact})
    nodes = [*_list_sources(spec, facts), *_list_outputs(spec, facts, open_requests)]
    edges = [
        *(
            {"from": f"source:{name}", "to": EVENTS, **_describe_source(name, source, facts)}
            for name, source in spec.sources.items()
        ),
        *({"from": EVENTS, "to": name} for name in (*spec.windows, LATE, DEAD_LETTERS)),
        *(
            {"from": one.origin, "to": to, "label": name, "kind": kind}
            for name, one in spec.stream_graph.attachments.items()
            for kind in ["pipe" if isinstance(one, PipeSpec) else "reducer"]
            for to in one.destinations
        ),
        *({"from": stream, "to": REJECTIONS} for stream in spec.streams),
        *({"from": name, "to": REQUESTS} for name in (LATE, DEAD_LETTERS) if open_requests),
        *({"from": REQUESTS, "to": EVENTS, "back": True} for _ in range(bool(open_requests))),
    ]
    last = max(node["column"] for node in nodes) + 1
    for name, sink in spec.sinks.items():
        behind = facts["sinks"].get(name)
        tone = "warn" if behind and behind > spec.outputs.publish_every else "good"
        note = {None: "", 1: "1 epoch behind"}.get(behind, f"{behind} epochs behind")
        found = {"id": f"sink:{name}", "name": name, "kind": f"{sink.kind} sink", "note": note}
        nodes.append({**found, "column": last, "tone": tone if behind is not None else "off"})
        tables = sink.tables or spec.table_names
        shown = {node["id"] for node in nodes}
        edges += [{"from": t, "to": found["id"]} for t in tables if t in shown]
    return {"nodes": nodes, "edges": edges}


def _list_sources(spec: PipelineSpec, facts: JsonView) -> Iterable[JsonObject]:
    latest = facts["latest"]
    for name, source in spec.sources.items():
        rows = latest.get("sources", {}).get(name, {})
        status = latest.get("statuses", {}).get(name, "not read yet")
        ill = name in facts["silent"] or name in facts["stale"]
        yield {
            "id": f"source:{name}",
            "name": name,
            "kind": f"{source.format} source",
            "column": 0,
            "rows": rows.get("read", 0),
            "note": status,
            "tone": "warn" if ill else "good" if status == "active" else "off",
        }


def _describe_source(name: str, source: SourceSpec, facts: JsonView) -> JsonObject:
    """Backlog and freshness of a source, for its edge."""
    holder = facts["holder"].get("member") or ""
    visible = facts["freshness"].get(name, {}).get("visible")
    return {
        "label": _describe_backlog(name, source, facts),
        "held": holder.partition("/")[0] == name,
        "fresh": visible[1] if visible else None,
        "tone": "warn" if name in facts["stale"] else "off",
    }


def _describe_backlog(name: str, source: SourceSpec, facts: JsonView) -> str:
    """What waits to be read; empty if nothing does, or the driver does not say."""
    messages, objects = facts["lag"].get(name), facts["backlog"].get(name)
    if messages is not None:
        return f"{messages:,} messages behind"
    if not objects:
        return ""
    if source.discovery.order == "keys":  # nothing lists further than the next object
        return "more objects wait"
    return f"{objects:,} {'object' if objects == 1 else 'objects'} behind"


def _list_outputs(spec: PipelineSpec, facts: JsonView, open_requests: int) -> Iterable[JsonObject]:
    latest = facts["latest"]
    failed = [check.get("suite") for check in facts["quality"].get("failed") or ()]
    depth = _measure_depths(spec)
    late = {"rows": latest.get("late", 0), "tone": "warn" if "late_rows" in failed else "good"}
    dead = {"rows": latest.get("dead", 0), "tone": "warn" if latest.get("dead") else "good"}
    waiting = f"{latest.get('retained', 0):,} wait for order"
    events = {"rows": latest.get("released", 0), "note": waiting}
    yield {"id": EVENTS, "name": EVENTS, "kind": "released rows", **events, "column": 1} | {
        "tone": "bad" if facts["quality"].get("verdict") == "fail" else "good"
    }
    for name, window in spec.windows.items():
        yield _make_table(name, f"{window.kind} window", 2)
    for name in spec.streams:
        yield _make_table(name, "stream", depth[name])
    if spec.streams:
        yield _make_table(REJECTIONS, "rejected dispatches", max(depth.values()) + 1)
    yield _make_table(LATE, "late rows", 2) | late
    yield _make_table(DEAD_LETTERS, "unreadable rows", 2) | dead
    if open_requests:
        note = f"{open_requests} open: tidegate splice list {spec.name}"
        yield _make_table(REQUESTS, "merge", 3) | {"note": note, "tone": "warn"}


def _make_table(name: str, kind: str, column: int) -> JsonObject:
    return {"id": name, "name": name, "kind": kind, "column": column, "tone": "good"}


def _measure_depths(spec: PipelineSpec) -> dict[str, int]:
    """Return the column of each stream: one behind the stream that it is written from."""
    depth = {EVENTS: 1}
    for stream in spec.stream_graph.order[1:]:  # each comes after its origins
        origins = [
            one.origin
            for one in spec.stream_graph.attachments.values()
            if stream in one.destinations
        ]
        depth[stream] = 1 + max((depth[origin] for origin in origins), default=1)
    return depth


# Events in the life of a stream: drivers, specs, merges and verdicts. Restores and pins are part of
# `StreamView.detail`, and runs of DAGs are in Airflow's database.

_DRIVERS_SHOWN = 20


def list_driver_events(
    newest: JsonView | None,
    read_epoch: Callable[[int], JsonView | None],
    describe_spec_change: Callable[[str, str], str],
) -> Iterator[JsonObject]:
    """Yield each driver's first epoch, newest first, and whether it came with another spec.

    At most 20 drivers, and none before a retired epoch.

    Lease tokens only grow along a lineage, so a search by halves finds the first epoch of each.

    Args:
        newest: the newest epoch, as `build_epoch_point` returns it; None before the first.
        read_epoch: returns the epoch in a slot of the lineage; None if it is retired.
        describe_spec_change: says in what a spec differs from an earlier one, by their digests.
    """
    for _ in range(_DRIVERS_SHOWN):
        if newest is None:
            return
        first, before = _find_first_epoch(newest, read_epoch)
        event = {"at": first["at"], "checkpoint": first["id"]}
        did = "began"
        if before is not None:
            gap = f"{(first['at'] - before['at']) / 1000:.0f} s after the last checkpoint"
            did = f"took over from {before['token']}, {gap}"
        yield {**event, "kind": "driver", "says": f"the driver with token {first['token']} {did}"}
        if before is not None and first["spec"] != before["spec"]:
            says = f"the spec changed: {describe_spec_change(before['spec'], first['spec'])}"
            yield {**event, "kind": "spec", "says": says}
        newest = before


def list_lease_events(driver: DriverOverview, newest: JsonView | None) -> Iterator[JsonObject]:
    """Yield what the lease tells before the next epoch: a new driver, or that the driver is gone.

    Args:
        driver: who holds the lease, and the newest report.
        newest: as for `list_driver_events`.
    """
    lease, report = driver.lease, driver.report
    if lease is None or lease.record.holder is None or report is None:
        return
    event = {"kind": "driver", "checkpoint": None}
    who = f"the driver with token {lease.token}"
    if newest is None or newest["token"] != lease.token:
        at = report.body.get("started_at", report.at)
        yield {**event, "at": at // 1000, "says": f"{who} began, and has sealed no checkpoint yet"}
    if driver.lease_expired:
        says = f"{who} is gone: it reported last at this time, and did not say that it ends"
        yield {**event, "at": report.at // 1000, "says": says}


def _find_first_epoch(
    newest: JsonView, read_epoch: Callable[[int], JsonView | None]
) -> tuple[JsonView, JsonView | None]:
    """The first epoch of the driver that sealed `newest`, and the one before it if it is kept."""
    low, first, before = 0, newest, None
    while first["slot"] - low > 1:
        middle = (low + first["slot"]) // 2
        found = read_epoch(middle)
        if found is not None and found["token"] == newest["token"]:
            first = found
        else:
            low, before = middle, found
    return first, before


def list_merge_events(requests: Iterable[SpliceRequest]) -> Iterator[JsonObject]:
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


def list_deploy_events(
    deployed: DeployedDocument, describe_change: Callable[[Deploy, Deploy], str]
) -> Iterator[JsonObject]:
    """Yield the deploys that drivers ran, the one that waits, and the newest one if it went back.

    Args:
        deployed: what is deployed.
        describe_change: says in what a deploy differs from an earlier one.
    """
    ran = [*([deployed.current] if deployed.current else []), *deployed.past]
    for nth, deploy in enumerate(ran):
        says = "drivers ran this spec" if nth else "drivers run the spec that was deployed"
        changed = describe_change(ran[nth + 1], deploy) if nth + 1 < len(ran) else ""
        says += f"; it changed {changed}" if changed else ""
        yield _build_deploy_event(deploy, deploy.at, says, deploy.why)
    waiting = deployed.trying
    if waiting is not None:
        says = "a deploy waits for the first round of a driver with it"
        changed = describe_change(deployed.current, waiting) if deployed.current else ""
        says += f"; it changes {changed}" if changed else ""
        yield _build_deploy_event(waiting, waiting.at, says, waiting.why)
    failed = deployed.failed
    if failed is not None:
        says = "the deploy failed, and drivers run the spec before"
        yield _build_deploy_event(failed.deploy, failed.at, says, failed.message)


def _build_deploy_event(deploy: Deploy, at: int, says: str, why: str) -> JsonObject:
    says += f" (commit {deploy.commit})" if deploy.commit else ""
    event = {"at": at // 1000, "kind": "spec", "who": deploy.who, "says": says}
    return {**event, "why": why or None, "checkpoint": None}


def list_verdict_events(runs: Sequence[JsonObject]) -> Iterator[JsonObject]:
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
