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
    from tidegate.checkpoints.pipeline_overview import DriverOverview, PipelineOverview
    from tidegate.checkpoints.slot_log import SlotLog
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
    from tidegate.checkpoints.slot_log import SlotLog

    if pipeline is not None:
        log = arguments.open_log(pipeline, store)
        report = describe_pipeline(log) | {
            "landings": _describe_landings(pipeline, log, store),
            "store": _describe_store(log.store),
        }
        output.print_envelope("status", report) if as_json else _print_pipeline_status(report)
        return
    # Without a name the landings are left out: they need the specs of all pipelines.
    place = arguments.open_existing_store(store)
    reports = [describe_pipeline(SlotLog(place, name)) for name in arguments.list_pipelines(place)]
    if as_json:
        output.print_envelope("statuses", {"store": _describe_store(place), "pipelines": reports})
    else:
        _print_all_pipelines(place, reports)


def describe_pipeline(log: SlotLog) -> JsonObject:
    """Return one pipeline as JSON-ready data.

    Progress is read from the log; only health comes from the driver's report. Instants are ticks.
    One look cannot see that a driver on another host is dead: it shows as `silent`.
    """
    from tidegate.checkpoints.batch_notes import BatchNotes
    from tidegate.checkpoints.pipeline_overview import read_overview

    overview = read_overview(log)
    driver, head, desired = overview.driver, overview.head, overview.desired
    notes = BatchNotes.from_manifest(head.record)
    word = driver.state.word_for("cli")
    facts = driver.facts
    return {
        "pipeline": log.pipeline,
        "state": word if driver.lease or head.record is None else "stopped",
        "why": facts.get("why"),
        "desired": (
            {"state": desired.state.value, "who": desired.who, "why": desired.why}
            if desired.at
            else None
        ),
        "driver": _describe_driver(driver),
        "checkpoint": _describe_checkpoint(overview),
        "timeline": head.timeline,
        # Each restore opens a timeline, so its number counts them.
        "restores": head.timeline,
        # The batches of a job have no tables.
        "unpublished": 0
        if notes
        else _count_unpublished(log.store, log.pipeline, head.timeline, head.slot),
        **({"queries": notes.model_dump(mode="json")["queries"]} if notes else {}),
        "sinks": facts.get("sinks", {}),
        "error": facts.get("error"),
        "trouble": facts.get("trouble"),
        "silent": {name: ticks // 1_000_000 for name, ticks in (facts.get("silent") or {}).items()},
        "freshness": facts.get("freshness") or {},
        "stale": facts.get("stale") or {},
        "lag": facts.get("lag") or {},
        "late_uploads": facts.get("late_uploads") or {},
        "held_back": facts.get("held_back") or [],
        "warnings": overview.warnings,
        **_describe_progress(overview),
        "open_barriers": _describe_open_barriers(overview, log),
    }


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


def _describe_driver(driver: DriverOverview) -> JsonObject | None:
    if driver.lease is None or driver.lease.holder is None:
        return None
    holder, report = driver.lease.holder, driver.report
    return {
        "name": holder.driver,
        "host": holder.host,
        "pid": holder.pid,
        "token": driver.lease.token,
        "step": report.step if report else None,
        "started_at": driver.facts.get("started_at"),
        "heard_of": driver.report_age if report else None,
    }


def _describe_checkpoint(overview: PipelineOverview) -> JsonObject | None:
    manifest = overview.newest
    if manifest is None:
        return None
    return {
        "id": str(manifest.id),
        "sealed_at": manifest.created_at,
        "age_seconds": overview.checkpoint_age,
        "epoch_seconds": round(sum(manifest.timings.values()), 3),
    }


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


def _format_query(at: JsonObject) -> str:
    watermark = "none" if at["watermark"] is None else output.format_short_instant(at["watermark"])
    # Spark counts after partial aggregation, so the true number may be larger.
    dropped = f", at least {at['dropped']:,} dropped" if at["dropped"] else ""
    took = "" if at["seconds"] is None else f" in {at['seconds']:.2f} s"
    # The phases add up to the whole, which Spark reports as one of them.
    phases = sorted(
        (seconds, phase)
        for phase, seconds in at.get("phases", {}).items()
        if phase != "triggerExecution"
    )
    if phases:
        took += f" ({phases[-1][1]} {phases[-1][0]:.2f} s)"
    sources = at.get("sources", ())
    behind = [
        f", {source['name']} {source['backlog']:,} messages behind"
        for source in sources
        if source["backlog"]
    ]
    read = [f"{source['rows']:,} of {source['name']}" for source in sources]
    rows = f"{at['rows']:,}" + (f" ({', '.join(read)})" if len(read) > 1 else "")
    held = f" held by {at['holder']}" if at.get("holder") and len(sources) > 1 else ""
    return (
        f"batch {at['batch']}{took}, rows {rows}{''.join(behind)}{dropped},"
        f" watermark {watermark}{held},"
        f" state {at['state_rows']:,} rows, {output.format_size(at['state_bytes'])},"
        f" to {at['sink']}"
    )


def _count_unpublished(store: Store, pipeline: str, timeline: int, slot: int) -> int | None:
    """Sealed epochs that the tables do not show.

    None while they still show an older timeline.
    """
    from tidegate.jobs.sinks.lineage_position import read_published_cut

    try:
        cut = read_published_cut(store, pipeline)
    except ValueError:
        cut = None
    # Never published, or not readable: all sealed slots count.
    if cut is None:
        return slot
    return slot - cut.upto if cut.timeline == timeline else None


def _describe_store(store: Store) -> JsonObject:
    # Looking must not write: only a driver probes the conditional writes, when it starts.
    return {"url": store.url, "honest": None, "detail": "probed when a driver starts"}


def _print_all_pipelines(store: Store, reports: list[JsonObject]) -> None:
    if not reports:
        output.console().print(f"no pipeline ran in {store.url} yet")
        return
    rows = [
        (
            r["pipeline"],
            r["state"],
            output.format_short_instant(r["frontier"]),
            r["checkpoint"]["id"] if r["checkpoint"] else "none",
            output.format_age(r["checkpoint"]["sealed_at"]) if r["checkpoint"] else "",
            "restore under way" if r["unpublished"] is None else r["unpublished"],
            _format_trouble(r),
        )
        for r in reports
    ]
    output.print_table(
        ["pipeline", "state", "frontier", "checkpoint", "age", "unpublished", "trouble"], rows
    )


def _print_pipeline_status(report: JsonObject) -> None:
    from tidegate.checkpoints.driver_reports import count_waiting_messages

    sinks = [
        f"{name} {lag:,} behind" if lag else f"{name} up to date"
        for name, lag in report["sinks"].items()
    ]
    silent = [f"{name} for {seconds:,} s" for name, seconds in sorted(report["silent"].items())]
    # Only Kafka sources know how many messages wait.
    waiting = sorted(count_waiting_messages(report).items())
    held_back = ", ".join(report["held_back"])
    facts = [
        ("pipeline", report["pipeline"]),
        ("state", _format_state(report)),
        ("driver", _format_driver(report["driver"])),
        ("checkpoint", _format_checkpoint(report["checkpoint"])),
        (
            "unpublished",
            "the tables still have to follow a restore"
            if report["unpublished"] is None
            else report["unpublished"],
        ),
        ("frontier", output.format_short_instant(report["frontier"])),
        ("held by", _format_frontier_holder(report["holder"])),
        ("rows", output.format_row_counts(report["rows"])),
        *_list_row_notes(report["counts"]),
        ("store", report["store"]["url"]),
        ("sinks", ", ".join(sinks) if len(sinks) > 1 else ""),
        ("silent", ", ".join(silent)),
        *(("freshness", _format_freshness(name, report)) for name in report["freshness"]),
        ("behind", ", ".join(f"{name} by {count:,} messages" for name, count in waiting)),
        (
            "late uploads",
            ", ".join(
                f"{name} {count:,}" for name, count in sorted(report["late_uploads"].items())
            ),
        ),
        ("held back", held_back and f"{held_back} (too far ahead, or the order buffer is full)"),
        *((f"query {name}", _format_query(at)) for name, at in report.get("queries", {}).items()),
        *(("warning", warning) for warning in report["warnings"]),
        ("trouble", _format_trouble(report)),
    ]
    output.print_facts(fact for fact in facts if fact[1] != "")
    _print_parts(report)


def _format_freshness(source: str, report: JsonObject) -> str:
    stages = report["freshness"][source]
    sealed, visible = (" / ".join(f"{s:,.1f}" for s in stages[k]) for k in stages)
    missed = ", beyond its goal" if source in report["stale"] else ""
    times = f"sealed {sealed} s, visible {visible} s after arrival (p50 / p95 / p99)"
    return f"{source}: {times}{missed}"


def _print_parts(report: JsonObject) -> None:
    """Print a table each of sources, open barriers, landings, and pipes and reducers."""
    paused = [n for n, one in report["attachments"].items() if one["status"] == "paused"]
    parts: tuple[tuple[list[str], list[tuple[object, ...]]], ...] = (
        (
            ["source", "status", "frontier", "read", "released", "late", "more waiting"],
            [_format_source_row(name, one) for name, one in report["sources"].items()],
        ),
        (
            ["open barrier", "age", "time left", "arrived", "waits for"],
            [_format_open_barrier(barrier) for barrier in report["open_barriers"]],
        ),
        (
            ["landing", "state", "on", "rows landed", "newest batch", "landed at"],
            [_format_landing_row(name, one) for name, one in report["landings"].items()],
        ),
        (
            ["pipe or reducer", "status", "next row", "paused by"],
            [
                (
                    *(name, one["status"], one["cursor"]),
                    f"{why['id']} (row {why['position']}): {why['error']}"
                    if (why := one["failure"])
                    else "",
                )
                for name, one in report["attachments"].items()
            ],
        ),
    )
    for columns, rows in parts:
        if rows:
            output.print_table(columns, rows)
    name = report["pipeline"]
    for one in paused:
        output.print_line(
            f"next: correct {one}, restart the driver, which keeps the code it has loaded"
            f" (tidegate stop {name}, then start it), and then: tidegate resume {name} {one}"
        )


def _format_state(report: JsonObject) -> str:
    wish, text = report["desired"], _add_reason(report["state"], report["why"])
    if not wish:
        return text
    return f"{text}; {wish['who']} wants: {_add_reason(wish['state'], wish['why'])}"


def _add_reason(state: str, why: str | None) -> str:
    return f"{state} ({why})" if why else state


def _format_source_row(name: str, source: JsonObject) -> tuple[object, ...]:
    rows, waiting = source["rows"], "yes" if source["pending"] else "no"
    counts = [rows.get("read", 0), rows.get("released", 0), source["counts"]["late_rows"]]
    return name, source["status"], output.format_short_instant(source["frontier"]), *counts, waiting


def _format_open_barrier(barrier: JsonObject) -> tuple[object, ...]:
    arrived, awaited = (", ".join(barrier[name]) for name in ("arrived", "awaited"))
    age, left = (
        "" if barrier[name] is None else f"{barrier[name] / 1e6:,.0f} s" for name in ("age", "left")
    )
    return barrier["id"], age, left, arrived, awaited or "no one"


def _format_landing_row(name: str, one: JsonObject) -> tuple[object, ...]:
    state = _add_reason(one["state"], one["why"])
    if one["state"] == "silent":
        state = f"silent: heard of {output.format_age(one['at'])} ago; is its process running?"
    if "pid" not in one:
        return name, state, "", "", "", ""
    batch = "" if one["batch"] is None else f"{one['batch']} ({one['rows']:,} rows)"
    at = output.format_short_instant(one["landed_at"]) if one["landed_at"] is not None else ""
    return name, state, f"{one['host']}, pid {one['pid']}", one["landed"], batch, at


def _format_driver(driver: JsonObject | None) -> str:
    if driver is None:
        return "none"
    heard = "" if driver["heard_of"] is None else f", heard of {driver['heard_of']:.0f} s ago"
    return (
        f"{driver['name']}, pid {driver['pid']} on {driver['host']}, token {driver['token']}, step"
        f" {driver['step']}{heard}"
    )


def _format_checkpoint(checkpoint: JsonObject | None) -> str:
    if checkpoint is None:
        return "none sealed yet"
    return (
        f"{checkpoint['id']}, {output.format_age(checkpoint['sealed_at'])} ago, epoch took"
        f" {checkpoint['epoch_seconds']:g} s"
    )


def _format_frontier_holder(holder: JsonObject | None) -> str:
    if holder is None:
        return "no one"
    since = output.format_short_instant(holder["since"])
    return f"{holder['member']} since {since}: {holder['why']}"


def _list_row_notes(counts: JsonObject | None) -> list[tuple[str, object]]:
    """Lines about rows that did not take the normal path; none if all did."""
    if counts is None:
        return []
    notes: list[tuple[str, object]] = []
    if counts["late_rows"]:
        outputs = ", ".join(
            f"{rows:,} for {output} ({counts['late_share'][output]:.1%})"
            for output, rows in counts["late_by_output"].items()
        )
        notes.append(
            ("late", f"{counts['late_rows']:,} rows ({counts['late_ratio']:.1%}): {outputs}")
        )
    # Dropped rows are in no table, so their reasons show nowhere else.
    dropped = [
        f"{one['rows']:,} for {one['output']} ({one['reason']})"
        for one in counts["missed"]
        if one["disposition"] == "dropped"
    ]
    if dropped:
        notes.append(("dropped", ", ".join(dropped)))
    if counts["dead_objects"]:
        rows = f"{counts['dead_object_rows']:,} rows known of them"
        notes.append(("set aside", f"{counts['dead_objects']:,} whole objects, {rows}"))
    for stream, rows in counts["stream_rejections"].items():
        notes.append((f"rejected by {stream}", f"{rows:,} rows"))
    for rule, rows in counts["rules"].items():
        notes.append((f"rule {rule}", f"{rows:,} rows broke it"))
    words = output.COLUMN_NOTES | {
        "flagged": "released late, flagged",
        "tardy": "read before a tardy barrier",
        "filtered": "left out by where",
    }
    notes += [(word, f"{counts[name]:,}") for name, word in words.items() if counts[name]]
    return notes


def _format_trouble(report: JsonObject) -> str:
    # The error that ended a driver outweighs a trouble that it waits out.
    error = report["error"] or report["trouble"]
    return f"{error['class']}: {error['message']}" if error else ""


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
        output.print_envelope(
            "logs", {"attempts": known} if all_attempts else {"attempt": chosen, "lines": found}
        )
    else:
        typer.echo("\n".join(known if all_attempts else found))
