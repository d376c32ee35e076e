"""`tidegate splice`: requests to merge late rows and dead letters, their effect, and decisions."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.json_types import JsonObject

from . import arguments, output
from .arguments import (
    JsonOption,
    OutputFilter,
    ReasonFilter,
    SinceOption,
    SourceFilter,
    SpecArgument,
    StoreOption,
    UntilOption,
    WhoOption,
    WhyOption,
)
from .errors import BAD_CORRECTIONS

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.splice_requests import SpliceRequest
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.splice.impact import Impact
    from tidegate.jobs.splice.request_creation import LateFilter, RequestOptions, RowRepair

app = typer.Typer(
    no_args_is_help=True,
    help="Merge late rows and dead letters: make a request, look at its effect, decide.",
)

_TICKS_PER_SECOND = 1_000_000
_TICKS_PER_DAY = 24 * 3600 * _TICKS_PER_SECOND

RequestArgument = Annotated[str, typer.Argument(metavar="REQUEST", help="Id of a splice request.")]
RequestIdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the new request; a repeated call with it makes no second one. Default: new.",
    ),
]
ExpiryOption = Annotated[
    float,
    typer.Option(
        "--expires", metavar="DAYS", min=0, help="It cannot be merged after N days; 0: never ends."
    ),
]


@app.command("late")
def request_late_rows(
    pipeline: SpecArgument,
    missed: OutputFilter = None,
    source: SourceFilter = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonFilter = None,
    skip_rejected: Annotated[
        bool, typer.Option(help="Without rows of requests that were rejected.")
    ] = False,
    at_least: Annotated[
        int, typer.Option(metavar="N", min=1, help="Make no request for fewer rows; exit code 0.")
    ] = 1,
    why: WhyOption = "",
    request_id: RequestIdOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Request that late rows are merged into the outputs that they missed.

    Rows that are merged, or in an open request, are left out. Exit code 2 if none is left, unless
    --at-least is above 1.
    """
    from tidegate.jobs.splice.request_creation import create_from_late_rows, list_pending_rows

    spec, log = arguments.open_spec_and_log(pipeline, store)
    which = _build_late_filter(missed, source, (since, until), reason, skip_rejected)
    # Asked for by Airflow's daily check, for which too few rows are a success.
    if at_least > 1 and (count := list_pending_rows(spec, log, which).num_rows) < at_least:
        facts = {"request": None, "rows": count, "at_least": at_least}
        text = f"{count:,} late rows: fewer than {at_least:,}"
        output.print_result(as_json, "splice", facts, text)
        return
    options = _build_request_options(why, request_id, days)
    _report_new_request(create_from_late_rows(spec, log, which, options), as_json, store)


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
            help="JSON lines with _source, _partition, _seq and corrected columns of single rows.",
        ),
    ] = None,
    reason: ReasonFilter = None,
    why: WhyOption = "",
    request_id: RequestIdOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Request that corrected dead letters are merged into all outputs. They keep their identity.

    All dead letters with a row; with --mend only those in its file, with --reason only those that
    have it. If one still does not fit the schema, no request is made.
    """
    from tidegate.jobs.splice.request_creation import create_from_dead_letters

    spec, log = arguments.open_spec_and_log(pipeline, store)
    corrections = _read_corrections(values or [], mend)
    options = _build_request_options(why, request_id, days)
    request = create_from_dead_letters(spec, log, corrections, options, reasons=reason or ())
    _report_new_request(request, as_json, store)


@app.command("file")
def request_file_rows(
    pipeline: SpecArgument,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Rows with the pipeline's columns: .parquet, .csv, .json, .jsonl."
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
    from tidegate.jobs.splice.request_creation import create_from_file

    spec, log = arguments.open_spec_and_log(pipeline, store)
    options = _build_request_options(why, request_id, days)
    _report_new_request(create_from_file(spec, log, path, options, source=source), as_json, store)


@app.command("list")
def list_requests(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """List splice requests, oldest first."""
    from tidegate.checkpoints.splice_requests import list_splice_requests
    from tidegate.jobs.splice.request_creation import resolve_request_state

    log = arguments.open_log(pipeline, store)
    # One head for all: the state of every request is shown at the same moment.
    head, now = log.head(), SYSTEM_CLOCK.wall_ticks()
    # The log decides about a state, so the documents alone would not do.
    requests = [
        (request, resolve_request_state(log, request, head, now))
        for request in list_splice_requests(log.store, log.pipeline)
    ]
    data = [_dump_request(request) | {"state": state} for request, state in requests]
    output.print_result(as_json, "splices", data)


@app.command("show")
def show_impact(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as a web page with a picture."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show exactly what a merge would change in every table. Changes nothing."""
    from tidegate.checkpoints.splice_requests import read_splice_request
    from tidegate.jobs.splice.impact import render_html
    from tidegate.jobs.splice.merge import estimate_impact, find_merge_checkpoint

    spec, log = arguments.open_spec_and_log(pipeline, store)
    request = read_splice_request(log.store, spec.name, request_id)
    # A merged request has no effect any more, so a report would show nothing.
    merged_in = find_merge_checkpoint(log, request_id)
    if merged_in is not None:
        facts = {"request": _dump_request(request), "checkpoint": merged_in}
        output.print_result(as_json, "splice", facts, f"{request_id} was merged in {merged_in}")
        return
    _, impact = estimate_impact(spec, log, request)
    # Written also with --json: the two do not exclude each other.
    if html is not None:
        html.write_text(render_html(request, impact), encoding="utf-8")
    if as_json:
        data = {"request": _dump_request(request), "impact": impact.model_dump(mode="json")}
        output.print_envelope("impact", data)
    else:
        _print_impact(request, impact)


@app.command("merge")
def merge_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    digest: Annotated[
        str | None,
        typer.Option(help="Digest of the report you saw; another effect is refused. Default: ask."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    why: WhyOption = "",
    who: WhoOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a request into all tables.

    A merge is one sealed slot, published in one step; a running driver continues after it. A
    repeated call only reports the merge.
    """
    from tidegate.jobs.splice import merge
    from tidegate.jobs.splice.merge import MergeDecision

    spec, log = arguments.open_spec_and_log(pipeline, store)
    # Without a digest the effect is confirmed now; a repeated call after a crash must not ask
    # again.
    if digest is None and merge.find_merge_checkpoint(log, request_id) is None:
        digest = _confirm_impact(spec, log, request_id, ask=not yes, as_json=as_json)
    # A request that is merged already has no effect to confirm: the call then only reports it.
    decision = MergeDecision(who or arguments.get_user_name(), why=why, digest=digest)
    outcome = merge.merge_request(spec, log, request_id, decision)
    # Here, since these imports take a second that a refused request need not wait for.
    from tidegate.checkpoints.pipeline_identity import ensure_identity
    from tidegate.jobs.sinks.iceberg_sink import IcebergSink

    # The command returns when readers see the merge, as there may be no running driver to publish
    # it. A running one may publish at the same time: the rules of the tables' follower
    # (docs/architecture.md, section 2) hold for any number of publishers.
    IcebergSink(spec, log.store, ensure_identity(log.store, spec.name)).follow(log)
    data = {
        "request": request_id,
        "checkpoint": outcome.checkpoint,
        "promised": outcome.reported_digest,
        "actual": outcome.actual,
        "again": outcome.again,
        "slots_lost": outcome.lost,
        "seconds": round(outcome.seconds, 3),
        "impact": outcome.impact.model_dump(mode="json") if outcome.impact else None,
    }
    output.print_result(as_json, "merge", data)


def _confirm_impact(
    spec: PipelineSpec, log: SlotLog, request_id: str, *, ask: bool, as_json: bool
) -> str:
    """Show the effect of a merge, ask for a confirmation, and return the effect's digest.

    With `as_json` all of it goes to standard error: standard output has the envelope alone.
    """
    from tidegate.checkpoints.splice_requests import read_splice_request
    from tidegate.jobs.splice.merge import estimate_impact

    request = read_splice_request(log.store, spec.name, request_id)
    _, impact = estimate_impact(spec, log, request)
    if ask:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            _print_impact(request, impact)
        typer.confirm("Merge?", abort=True, err=as_json)
    return impact.digest


@app.command("reject")
def reject_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    why: WhyOption = "",
    who: WhoOption = None,
    store: StoreOption = None,
) -> None:
    """Reject a request. Nothing changes; a later request may ask for its rows."""
    from tidegate.checkpoints.splice_requests import reject_splice_request

    log, now = arguments.open_log(pipeline, store), SYSTEM_CLOCK.wall_ticks()
    who = who or arguments.get_user_name()
    reject_splice_request(log.store, log.pipeline, request_id, who=who, why=why, at=now)
    output.print_line(f"{request_id} is rejected")


@app.command("part")
def divide_request(
    pipeline: SpecArgument,
    request_id: RequestArgument,
    missed: OutputFilter = None,
    source: SourceFilter = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonFilter = None,
    why: WhyOption = "",
    who: WhoOption = None,
    days: ExpiryOption = 30,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split a request into two, the chosen rows and the rest, to decide about each.

    The request itself is closed as rejected.
    """
    from tidegate.jobs.splice.request_creation import split_request

    spec, log = arguments.open_spec_and_log(pipeline, store)
    which = _build_late_filter(missed, source, (since, until), reason)
    options = _build_request_options(why, None, days, who)
    chosen, rest = split_request(spec, log, request_id, which, options)
    if as_json:
        facts = {"request": chosen.id, "rows": chosen.row_count}
        output.print_envelope("splice", facts | {"rest": rest.id, "rest_rows": rest.row_count})
        return
    # Both ids are needed: each part is decided on its own.
    for request in (chosen, rest):
        _print_new_request(request, store)


@app.command("expire")
def expire_requests(pipeline: SpecArgument, store: StoreOption = None) -> None:
    """Close the requests whose time has run out."""
    from tidegate.checkpoints.splice_requests import (
        OPEN_STATES,
        expire_splice_request,
        list_splice_requests,
    )

    log, now = arguments.open_log(pipeline, store), SYSTEM_CLOCK.wall_ticks()
    expired = [
        request.id
        for request in list_splice_requests(log.store, log.pipeline)
        if request.state in OPEN_STATES and request.is_expired(now)
    ]
    for request_id in expired:
        expire_splice_request(log.store, log.pipeline, request_id, now)
    output.print_line(f"{len(expired)} requests have expired")


def _build_late_filter(
    outputs: list[str] | None,
    sources: list[str] | None,
    times: tuple[str | None, str | None],
    reasons: list[str] | None,
    skip_rejected: bool = False,
) -> LateFilter:
    from tidegate.jobs.splice.request_creation import LateFilter

    since, until = (None if text is None else arguments.parse_event_time(text) for text in times)
    outputs, sources, reasons = outputs or [], sources or [], reasons or []
    return LateFilter(tuple(outputs), tuple(sources), since, until, tuple(reasons), skip_rejected)


def _build_request_options(
    why: str, request_id: str | None, days: float, who: str | None = None
) -> RequestOptions:
    from tidegate.jobs.splice.request_creation import RequestOptions

    who = who or arguments.get_user_name()
    return RequestOptions(who, why, round(days * _TICKS_PER_DAY) or None, request_id)


def _read_corrections(values: list[str], path: Path | None) -> RowRepair:
    """Read corrections: values for every row, and a file with the columns of single rows."""
    from tidegate.jobs.splice.request_creation import RowRepair

    # The first equals sign separates: values may contain others.
    pairs = [value.partition("=") for value in values]
    rows: dict[tuple[str, str, int], Mapping[str, str]] = {}
    try:
        for line in path.read_text("utf-8").splitlines() if path else ():
            row: JsonObject = json.loads(line)
            identity = str(row.pop("_source")), str(row.pop("_partition")), int(row.pop("_seq"))
            # The identity columns were taken out: what remains are corrections.
            rows[identity] = row
    except (OSError, ValueError, KeyError) as error:
        raise BAD_CORRECTIONS(path=path, reason=error) from error
    return RowRepair({name: text for name, _, text in pairs}, rows)


def _report_new_request(request: SpliceRequest, as_json: bool, store: str | None) -> None:
    if as_json:
        facts = {"request": request.id, "rows": request.row_count}
        output.print_envelope("splice", _dump_request(request) | facts)
    else:
        _print_new_request(request, store)


def _print_new_request(request: SpliceRequest, store: str | None) -> None:
    option = f" --store {store}" if store else ""
    output.print_line(
        f"{request.id}: {request.row_count:,} rows; look at its effect: tidegate splice show"
        f" {request.pipeline} {request.id}{option}"
    )


def _dump_request(request: SpliceRequest) -> JsonObject:
    return request.model_dump(mode="json", exclude={"rows", "format_version", "revision"})


def _print_impact(request: SpliceRequest, impact: Impact) -> None:
    from tidegate.jobs.splice.impact import MAX_SHOWN_CHANGES

    output.print_text("impact", request=request, impact=impact, shown=MAX_SHOWN_CHANGES)
