"""`tidegate splice`.

Late rows and dead letters on their way back into history, with the effect known before anybody
decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.splice_requests import SpliceRequest
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.splice.impact import Impact
    from tidegate.jobs.splice.request_creation import RequestOptions, RowRepair

app = typer.Typer(
    no_args_is_help=True,
    help="Merge late rows and dead letters back: request, look at the effect, decide.",
)

RequestArgument = Annotated[str, typer.Argument(metavar="REQUEST", help="Id of a splice request.")]
WhyOption = Annotated[str, typer.Option(help="Kept with the request.")]
RequestIdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the new request: asking twice under one id makes one. Default: a new one.",
    ),
]
ExpiryOption = Annotated[
    float,
    typer.Option(
        "--expires", metavar="DAYS", min=0, help="Nobody can merge it after so many days; 0: never."
    ),
]


@app.command("late")
def request_late_rows(
    pipeline: SpecArgument,
    missed: Annotated[
        list[str] | None,
        typer.Option("--output", help="Only what the rows missed there: events or a window."),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="Only rows of this source.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Event time from here on, ISO 8601.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Event time before this, ISO 8601.")
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option("--reason", help="Only rows that are late for this reason.")
    ] = None,
    skip_rejected: Annotated[
        bool, typer.Option(help="Without rows that somebody has rejected once.")
    ] = False,
    at_least: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Fewer rows are no request: nothing is made, exit code 0."
        ),
    ] = 1,
    why: WhyOption = "",
    request_id: RequestIdOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Request that late rows are merged into the outputs that they missed.

    Rows in an open request are not asked for twice.
    """
    spec, log = _open_spec_and_log(pipeline, store)
    from tidegate.jobs.splice.request_creation import (
        LateFilter,
        create_from_late_rows,
        list_pending_rows,
    )

    which = LateFilter(
        tuple(missed or ()),
        tuple(source or ()),
        _parse_event_time(since),
        _parse_event_time(until),
        tuple(reason or ()),
        skip_rejected,
    )
    if at_least > 1 and (count := list_pending_rows(spec, log, which).num_rows) < at_least:
        facts = {"request": None, "rows": count, "at_least": at_least}
        (
            output.print_envelope("splice", facts)
            if as_json
            else output.console().print(f"{count:,} late rows: fewer than {at_least:,}")
        )
        return
    _report_new_request(
        create_from_late_rows(spec, log, which, _build_request_terms(why, request_id, days)),
        as_json,
    )


@app.command("dead-letters")
def request_dead_letters(
    pipeline: SpecArgument,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="COLUMN=VALUE", help="Put this value into every row."),
    ] = None,
    mend: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "JSON lines with _source, _partition, _seq and the mended columns: only these rows."
            ),
        ),
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option("--reason", help="Only rows that died of this.")
    ] = None,
    why: WhyOption = "",
    request_id: RequestIdOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Request that dead letters, mended, are merged into all outputs. They keep their identity."""
    spec, log = _open_spec_and_log(pipeline, store)
    from tidegate.jobs.splice.request_creation import create_from_dead_letters

    found = create_from_dead_letters(
        spec,
        log,
        _read_corrections(values or [], mend),
        _build_request_terms(why, request_id, days),
        reasons=reason or (),
    )
    _report_new_request(found, as_json)


@app.command("file")
def request_file_rows(
    pipeline: SpecArgument,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Rows with the pipeline's columns: .parquet, .csv, .json or .jsonl.",
        ),
    ],
    source: Annotated[str | None, typer.Option(help="The source that the rows belong to.")] = None,
    why: WhyOption = "",
    request_id: RequestIdOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Request that the rows of a file are merged into all outputs."""
    spec, log = _open_spec_and_log(pipeline, store)
    from tidegate.jobs.splice.request_creation import create_from_file

    _report_new_request(
        create_from_file(
            spec, log, path, _build_request_terms(why, request_id, days), source=source
        ),
        as_json,
    )


@app.command("list")
def list_requests(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """List splice requests, oldest first."""
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.checkpoints.splice_requests import list_splice_requests
    from tidegate.jobs.splice.request_creation import resolve_request_state

    _, log = _open_spec_and_log(pipeline, store)
    head, now = log.head(), SYSTEM_CLOCK.wall_ticks()
    found = [
        (request, resolve_request_state(log, request, head, now))
        for request in list_splice_requests(log.store, log.pipeline)
    ]
    if as_json:
        output.print_envelope(
            "splices", [_dump_request(request) | {"state": state} for request, state in found]
        )
        return
    columns = ["request", "state", "rows", "from", "event time", "asked by", "age", "why"]
    output.print_table(columns, [_format_request_row(request, state) for request, state in found])


@app.command("show")
def show_impact(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as a page with a picture.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show exactly what a merge would change, in every table, before anybody decides.

    Changes nothing.
    """
    from tidegate.checkpoints.splice_requests import read_splice_request

    spec, log = _open_spec_and_log(pipeline, store)
    request = read_splice_request(log.store, spec.name, request_id)
    from tidegate.jobs.splice.merge import estimate_impact, find_merge_checkpoint

    done = find_merge_checkpoint(log, request_id)
    if done is not None:
        facts = {"request": _dump_request(request), "checkpoint": done}
        (
            output.print_envelope("splice", facts)
            if as_json
            else output.console().print(f"{request_id} was merged in {done}")
        )
        return
    _, impact = estimate_impact(spec, log, request)
    if html is not None:
        from tidegate.jobs.splice.impact_rendering import render_html

        html.write_text(render_html(request, impact), encoding="utf-8")
    if as_json:
        output.print_envelope(
            "impact", {"request": _dump_request(request), "impact": impact.model_dump(mode="json")}
        )
    else:
        _print_impact(request, impact)


@app.command("merge")
def merge_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    digest: Annotated[
        str | None,
        typer.Option(
            help="Of the report that was looked at: another effect is refused. Default: ask here."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    why: WhyOption = "",
    who: Annotated[str | None, typer.Option(help="Who decided. Default: you.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a request.

    One sealed slot, published in one step; a running driver goes on after it.
    """
    from tidegate.checkpoints.splice_requests import read_splice_request

    spec, log = _open_spec_and_log(pipeline, store)
    from tidegate.jobs.splice import merge as merging
    from tidegate.jobs.splice.merge_attempt import MergeDecision

    if digest is None and merging.find_merge_checkpoint(log, request_id) is None:
        request = read_splice_request(log.store, spec.name, request_id)
        _, impact = merging.estimate_impact(spec, log, request)
        digest = impact.digest
        if not yes:
            _print_impact(request, impact)
            typer.confirm("Merge?", abort=True)
    outcome = merging.merge_request(
        spec,
        log,
        request_id,
        MergeDecision(who or arguments.get_user_name(), why=why, digest=digest),
    )
    _publish_merged_tables(spec, log)
    facts: dict[str, Any] = {
        "request": request_id,
        "checkpoint": outcome.checkpoint,
        "promised": outcome.reported_digest,
        "actual": outcome.actual,
    }
    facts |= {
        "again": outcome.again,
        "slots_lost": outcome.lost,
        "seconds": round(outcome.seconds, 3),
    }
    if as_json:
        output.print_envelope(
            "merge",
            facts | {"impact": outcome.impact.model_dump(mode="json") if outcome.impact else None},
        )
    else:
        _print_merge_outcome(facts)


@app.command("reject")
def reject_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    why: WhyOption = "",
    who: str = "",
    store: StoreOption = None,
) -> None:
    """Reject a request: everything stays as it is; its rows can be asked for again."""
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.checkpoints.splice_requests import decide_splice_request

    spec, log = _open_spec_and_log(pipeline, store)
    decide_splice_request(
        log.store,
        spec.name,
        request_id,
        "rejected",
        who=who or arguments.get_user_name(),
        why=why,
        at=SYSTEM_CLOCK.wall_ticks(),
    )
    output.console().print(f"{request_id} is rejected")


@app.command("part")
def divide_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    missed: Annotated[
        list[str] | None, typer.Option("--output", help="Only for these outputs.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="Only rows of this source.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Event time from here on, ISO 8601.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Event time before this, ISO 8601.")
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option("--reason", help="Only rows for this reason.")
    ] = None,
    why: WhyOption = "",
    who: Annotated[str | None, typer.Option(help="Who decided. Default: you.")] = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide about a part.

    Make two requests of one, the chosen rows and the rest, each with an effect of its own.
    """
    spec, log = _open_spec_and_log(pipeline, store)
    from tidegate.jobs.splice.request_creation import LateFilter
    from tidegate.jobs.splice.split_request import split_request

    which = LateFilter(
        tuple(missed or ()),
        tuple(source or ()),
        _parse_event_time(since),
        _parse_event_time(until),
        tuple(reason or ()),
    )
    asking = _build_request_terms(why, None, days)
    chosen, rest = split_request(
        spec, log, request_id, which, asking if who is None else replace(asking, who=who)
    )
    if as_json:
        output.print_envelope(
            "splice",
            {
                "request": chosen.id,
                "rows": chosen.row_count,
                "rest": rest.id,
                "rest_rows": rest.row_count,
            },
        )
        return
    for made in (chosen, rest):
        output.console().print(
            f"{made.id}: {made.row_count:,} rows; look at its effect: tidegate splice show"
            f" {spec.name} {made.id}"
        )


@app.command("expire")
def expire_requests(pipeline: SpecArgument, store: StoreOption = None) -> None:
    """Close requests that nobody decided in time."""
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.checkpoints.splice_requests import (
        OPEN_STATES,
        decide_splice_request,
        list_splice_requests,
    )

    spec, log = _open_spec_and_log(pipeline, store)
    now = SYSTEM_CLOCK.wall_ticks()
    due = [
        r
        for r in list_splice_requests(log.store, spec.name)
        if r.state in OPEN_STATES and r.is_expired(now)
    ]
    for request in due:
        decide_splice_request(
            log.store,
            spec.name,
            request.id,
            "expired",
            who="clock",
            why="nobody decided in time",
            at=now,
        )
    output.console().print(f"{len(due)} requests have expired")


def _open_spec_and_log(pipeline: str, store: str | None) -> tuple[PipelineSpec, SlotLog]:
    spec = arguments.find_spec(pipeline)
    return spec, arguments.open_log(spec.name, store)


def _build_request_terms(why: str, request_id: str | None, days: float) -> RequestOptions:
    from tidegate.jobs.splice.request_creation import RequestOptions

    return RequestOptions(
        arguments.get_user_name(), why, round(days * 24 * 3600 * 1_000_000) or None, request_id
    )


def _parse_event_time(text: str | None) -> int | None:
    from datetime import UTC, datetime

    from tidegate.errors import ConfigurationError

    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no time", code="cli.bad_time", advice="write 2013-01-06T12:00:00Z"
        ) from error
    return round(
        (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() * 1_000_000
    )


def _read_corrections(values: list[str], path: Path | None) -> RowRepair:
    from tidegate.errors import ConfigurationError
    from tidegate.jobs.splice.request_creation import RowRepair

    pairs = [value.partition("=") for value in values]
    rows: dict[tuple[str, str, int], Mapping[str, str]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines() if path else ():
            raw: dict[str, Any] = json.loads(line)
            who = str(raw.pop("_source")), str(raw.pop("_partition")), int(raw.pop("_seq"))
            rows[who] = raw
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as mended rows: {error!r}",
            code="splice.bad_mend",
            advice=(
                'one JSON object per line: {"_source": "a", "_partition": "0", "_seq": 7, "amount":'
                ' "1.50"}'
            ),
        ) from error
    return RowRepair({name: text for name, _, text in pairs}, rows)


def _report_new_request(request: SpliceRequest, as_json: bool) -> None:
    if as_json:
        output.print_envelope(
            "splice", _dump_request(request) | {"request": request.id, "rows": request.row_count}
        )
        return
    _print_new_request(request)


def _print_new_request(request: SpliceRequest) -> None:
    effect = f"look at its effect: tidegate splice show {request.pipeline} {request.id}"
    output.console().print(f"{request.id}: {request.row_count:,} rows; {effect}")


def _dump_request(request: SpliceRequest) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude={"rows", "format_version", "revision"})


def _format_request_row(request: SpliceRequest, state: str) -> tuple[object, ...]:
    times = (
        f"{output.format_short_instant(request.min_time)} to"
        f" {output.format_short_instant(request.max_time)}"
    )
    return (
        request.id,
        state,
        request.row_count,
        request.origin,
        times,
        request.who,
        output.format_age(request.created_at),
        request.why,
    )


def _print_impact(request: SpliceRequest, impact: Impact) -> None:
    from tidegate.jobs.splice.impact_rendering import (
        MAX_SHOWN_CHANGES,
        format_change,
        render_text,
        select_listable_changes,
    )

    screen = output.console()
    screen.print(render_text(request, impact))
    for table in impact.tables:
        lines = [format_change(change) for change in select_listable_changes(table)]
        for line in lines[:MAX_SHOWN_CHANGES]:
            screen.print(f"    {table.table}  {line}")
        more = table.added + table.changed + table.removed - MAX_SHOWN_CHANGES
        if len(lines) > MAX_SHOWN_CHANGES:
            screen.print(f"    {table.table}  and {more:,} more: --json or --html FILE")


def _print_merge_outcome(facts: Mapping[str, Any]) -> None:
    screen = output.console()
    if facts["checkpoint"] is None:
        screen.print(f"{facts['request']}: nothing was left to merge")
    elif facts["again"]:
        screen.print(f"{facts['request']} was merged before, in {facts['checkpoint']}")
    else:
        same = (
            "exactly what the report said"
            if facts["promised"] == facts["actual"]
            else "NOT what the report said"
        )
        screen.print(
            f"{facts['request']} is merged in {facts['checkpoint']}: {same}"
            f" ({facts['seconds']:.1f} s)"
        )


def _publish_merged_tables(spec: PipelineSpec, log: SlotLog) -> None:
    """Bring the tables to the head: nobody else may be running.

    Two publishers disturb each other as little as two drivers.
    """
    from tidegate.checkpoints.pipeline_identity import ensure_identity
    from tidegate.jobs.sinks.iceberg_sink import IcebergSink

    with TemporaryDirectory(prefix="tidegate-splice-") as folder:
        IcebergSink(spec, log.store, ensure_identity(log.store, spec.name), Path(folder)).follow(
            log
        )
