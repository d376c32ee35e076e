"""`tidegate status` and `logs`: what runs, how far it is, who holds it back, what is wrong."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.row_counts import RowCounts
from tidegate.errors import TidegateError
from tidegate.json_types import JsonObject

from . import arguments, output
from .arguments import JsonOption, PipelineArgument, StoreOption
from .errors import NO_LOG

if TYPE_CHECKING:
    from tidegate.checkpoints.pipeline_overview import PipelineOverview
    from tidegate.checkpoints.slot_log import LogHead, SlotLog
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.spec.pipeline import SourceSpec

_LANDING_SILENT_AFTER = 40_000_000  # ticks; a landing leaves word every 10 s


def show_status(
    pipeline: Annotated[
        str | None,
        typer.Argument(
            metavar="PIPELINE", help="Name of a pipeline, or the path of its spec. Default: all."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show state, driver, frontiers, newest checkpoint and troubles of one pipeline or of all.

    The exit code does not tell the state.
    """
    from tidegate.checkpoints.driver_reports import count_waiting_messages
    from tidegate.checkpoints.slot_log import SlotLog

    if pipeline is not None:
        log = arguments.open_log(pipeline, store)
        report = describe_pipeline(log)
        report["warnings"] += _list_deploy_warnings(pipeline, log)
        report |= {
            "deployed": _describe_deployed(log),
            "landings": _describe_landings(pipeline, log, store),
            "store": _describe_store(log.store),
        }
        output.print_result(as_json, "status", report, waiting=count_waiting_messages(report))
        return
    # Without a name the landings are left out: they need the specs of all pipelines.
    place = arguments.open_existing_store(store)
    reports = [describe_pipeline(SlotLog(place, name)) for name in arguments.list_pipelines(place)]
    data = {"store": _describe_store(place), "pipelines": reports}
    output.print_result(as_json, "statuses", data)


def _describe_deployed(log: SlotLog) -> JsonObject | None:
    """Who deployed what drivers run, when, and its commit of git; None before the first driver."""
    from tidegate.checkpoints.deployed_specs import read_deployed

    current = read_deployed(log.store, log.pipeline).current
    if current is None:
        return None
    return {name: getattr(current, name) for name in ("who", "why", "commit", "at")}


def _list_deploy_warnings(pipeline: str, log: SlotLog) -> list[str]:
    """What people should know of deploys; the file is compared as far as it is found."""
    from tidegate.checkpoints.deployed_specs import list_deploy_warnings
    from tidegate.jobs.spec.user_code import collect_code

    try:
        path = arguments.resolve_spec_path(pipeline)
        file = arguments.find_any_spec(pipeline)
        code = collect_code(file, path)
    except TidegateError:
        file, code = None, {}
    return list_deploy_warnings(log.store, log.pipeline, file, code)


def describe_pipeline(log: SlotLog) -> JsonObject:
    """Return one pipeline as JSON-ready data.

    Progress is read from the log; only health comes from the driver's report. Instants are ticks.
    One look cannot see that a driver on another host is dead: it shows as `silent`.
    """
    from tidegate.checkpoints.batch_notes import BatchNotes
    from tidegate.checkpoints.illness_record import read_verdict
    from tidegate.checkpoints.pipeline_overview import read_overview

    overview = read_overview(log)
    driver, head, desired = overview.driver, overview.head, overview.desired
    notes = BatchNotes.from_manifest(head.record)
    facts, newest = driver.facts, head.record
    lease, report = driver.lease, driver.report
    holder = lease.holder if lease else None
    return {
        "pipeline": log.pipeline,
        "state": driver.state.word_for("cli") if lease or newest is None else "stopped",
        "desired": (
            {"state": desired.state.value, "who": desired.who, "why": desired.why}
            if desired.at
            else None
        ),
        "driver": (
            {
                "name": holder.driver,
                "host": holder.host,
                "pid": holder.pid,
                "token": lease.token,
                "step": report.step if report else None,
                "started_at": facts.get("started_at"),
                "heard_of": driver.report_age if report else None,
            }
            if lease and holder
            else None
        ),
        "checkpoint": (
            {
                "id": str(newest.id),
                "sealed_at": newest.created_at,
                "age_seconds": overview.checkpoint_age,
                "epoch_seconds": round(sum(newest.timings.values()), 3),
            }
            if newest
            else None
        ),
        "timeline": head.timeline,
        # Each restore opens a timeline, so its number counts them.
        "restores": head.timeline,
        # The batches of a job have no tables.
        "unpublished": 0 if notes else _count_unpublished(log, head),
        **({"queries": notes.model_dump(mode="json")["queries"]} if notes else {}),
        "sinks": facts.get("sinks", {}),
        **{name: facts.get(name) for name in ("why", "error", "trouble")},
        "silent": {name: ticks // 1_000_000 for name, ticks in (facts.get("silent") or {}).items()},
        **{name: facts.get(name) or {} for name in ("freshness", "stale", "lag", "late_uploads")},
        "held_back": facts.get("held_back") or [],
        "warnings": overview.warnings,
        **_describe_progress(overview),
        "open_barriers": _describe_open_barriers(overview, log),
        "quality": read_verdict(
            log.store,
            log.pipeline,
            sealed_at=newest.created_at if newest else None,
            now=SYSTEM_CLOCK.wall_ticks(),
        ),
    }


def _count_unpublished(log: SlotLog, head: LogHead) -> int | None:
    """Count the sealed epochs that the tables do not show; None if they show an older timeline."""
    from tidegate.jobs.sinks.lineage_position import read_published_cut

    try:
        cut = read_published_cut(log.store, log.pipeline)
    except ValueError:
        cut = None  # not readable, as if never published: all sealed slots count
    if cut is not None and cut.timeline != head.timeline:
        return None
    return head.slot - (cut.upto if cut else 0)


def _describe_open_barriers(overview: PipelineOverview, log: SlotLog) -> list[JsonObject]:
    """The barriers that are open now; times are ticks of the pipeline's clock.

    `left` is the time until a barrier times out: None for all but the oldest, which close later,
    and if the spec has no timeout or is not known.
    """
    from tidegate.checkpoints.checkpoint_specs import read_spec

    newest = overview.newest
    if newest is None or not newest.open_barriers:
        return []
    spec = read_spec(log.store, log.pipeline, newest.spec_digest)
    deadline = newest.find_barrier_deadline(spec.barrier_timeout if spec else None)
    # Without a driver the pipeline's clock does not go on.
    driver = overview.driver
    since = 0 if driver.lease_expired else max(0, driver.read_at - newest.created_at)
    left = None if deadline is None else max(0, deadline - newest.created_at - since)
    return [
        {**asdict(barrier), "age": barrier.age + since, "left": None if place else left}
        for place, barrier in enumerate(newest.open_barriers)
    ]


def _describe_landings(pipeline: str, log: SlotLog, store: str | None) -> dict[str, JsonObject]:
    """What the processes say that land this pipeline's sources, as far as its spec can be read."""
    try:
        sources = arguments.find_or_read_spec(pipeline, store).sources
    except TidegateError:
        return {}
    return {
        name: _describe_landing(name, source, log.store)
        for name, source in sources.items()
        if source.landing is not None
    }


def _describe_landing(name: str, source: SourceSpec, store: Store) -> JsonObject:
    """One of them. `silent`: it should speak every ten seconds and does not."""
    from tidegate.jobs.driver.landing_log import read_landing_status

    try:
        said = read_landing_status(name, source, store)
    except TidegateError as error:
        return {"state": "unknown", "why": error.message}
    if said is None:
        return {"state": "never ran", "why": None}
    # A killed process leaves "running" behind.
    age = SYSTEM_CLOCK.wall_ticks() - said["at"]
    silent = said["state"] == "running" and age > _LANDING_SILENT_AFTER
    return said | ({"state": "silent"} if silent else {})


def _describe_progress(overview: PipelineOverview) -> JsonObject:
    """Frontiers and rows as of the newest sealed epoch."""
    manifest = overview.newest
    if manifest is None:
        unknown = dict.fromkeys(("frontier", "holder", "rows", "counts"))
        return {**unknown, "sources": {}, "attachments": {}}
    inputs = manifest.decider.get("output", {}).get("inputs", {})
    counters = manifest.counters
    waiting = {
        member.partition("/")[0] for member, part in manifest.cut.items() if part.get("pending")
    }
    sources = {}
    for name in sorted({*inputs, *counters.per_source}):
        decided, rows = inputs.get(name, {}), counters.per_source.get(name, {})
        sources[name] = {
            "frontier": decided.get("frontier"),
            "status": decided.get("status"),
            "rows": rows,
            "counts": _describe_counts(RowCounts.of_source(rows)),
            "pending": name in waiting,
        }
    return {
        "frontier": overview.frontier,
        "sources": sources,
        "holder": manifest.frontier_holder,
        "blocked": manifest.blocked_members,
        "attachments": manifest.stream_state.get("attachments", {}),
        "rows": counters.model_dump(mode="json", exclude={"per_source"}),
        "counts": _describe_counts(overview.row_counts),
    }


def _describe_counts(counts: RowCounts) -> JsonObject:
    """What every surface shows, and the rows that missed an output by reason."""
    missed = [
        {"output": output, "disposition": disposition, "reason": reason, "rows": rows}
        for (output, disposition, reason), rows in counts.late_by_reason.items()
    ]
    return {**counts.to_record(), "missed": missed}


def _describe_store(store: Store) -> JsonObject:
    # Looking must not write: only a driver probes the conditional writes, when it starts.
    return {"url": store.url, "honest": None, "detail": "probed when a driver starts"}


# `tidegate logs`: what a driver wrote, as far as it has been sent to the bucket.


def show_logs(
    pipeline: PipelineArgument,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="So many of the last lines.")
    ] = 50,
    attempt: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of which driver. Default: the one started last."),
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--attempts", help="List the drivers whose logs are kept, newest first.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the end of a driver's log, whichever host it runs or ran on.

    Drivers send it every ten seconds and at their end.
    """
    from tidegate.checkpoints.driver_reports import list_log_attempts, read_log_tail

    log = arguments.open_log(pipeline, store)
    known = list_log_attempts(log.store, log.pipeline)
    chosen = attempt or (known[0] if known else None)
    if chosen not in known:
        names = f"kept: {', '.join(known)}"
        available = names if known else "a driver sends its log ten seconds after its start"
        given = f" {chosen!r}" if chosen else ""
        raise NO_LOG(pipeline=log.pipeline, attempt=given, available=available)
    # The list of attempts needs no log.
    found = [] if all_attempts else read_log_tail(log.store, log.pipeline, chosen, lines)
    if as_json:
        data = {"attempts": known} if all_attempts else {"attempt": chosen, "lines": found}
        output.print_envelope("logs", data)
    else:
        # As they were written: long lines are not wrapped on a terminal.
        typer.echo("\n".join(known if all_attempts else found))
