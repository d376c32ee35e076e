"""Deciding about a part.

An open request becomes two, the rows that were chosen and the rest, each with an effect of its own.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    SpliceRequest,
    decide_splice_request,
    read_splice_request,
)
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestOptions,
    put_request,
    resolve_request_state,
)
from tidegate.jobs.splice.tables_at_head import read_data_file
from tidegate.jobs.splice.window_recompute import build_time_expression, open_database

_PART_NAMES = ("part", "rest")


def split_request(
    spec: PipelineSpec, log: SlotLog, request_id: str, which: LateFilter, asking: RequestOptions
) -> tuple[SpliceRequest, SpliceRequest]:
    """Make two requests of one, and close it: the chosen part, and the rest.

    Who asked for it asks for both.

    A crash in between leaves the old one open; called again it makes the same two, and after its
    end it finds them.

    Raises:
        ConfigurationError: it is not open, is of an attachment, or the choice takes all of it or
            nothing.
    """
    request = read_splice_request(log.store, spec.name, request_id)
    choice = {
        name: list(v) if isinstance(v, tuple) else v for name, v in asdict(which).items() if v
    }
    if request.state == "rejected" and (done := _find_earlier_split(log, request, choice)):
        return done
    _require_divisible(spec, log, request)
    rows = pa.concat_tables([read_data_file(log, file) for file in request.row_files()])
    chosen = _select_outputs(spec, rows, which)
    rest = [
        [o for o in all_of if o not in mine]
        for all_of, mine in zip(rows["_outputs"].to_pylist(), chosen, strict=True)
    ]
    parts = [_keep_chosen_outputs(rows, outputs) for outputs in (chosen, rest)]
    if not all(part.num_rows for part in parts):
        raise ConfigurationError(
            f"the choice takes {'all' if parts[0].num_rows else 'nothing'} of splice request"
            f" {request_id} of {spec.name}",
            code="splice.no_part",
            pipeline=spec.name,
            kept="the request, as it was",
            advice=(
                "choose some of its rows: --until TIME, --since TIME, --source NAME, --output NAME"
            ),
        )
    detail = {**request.origin_detail, "part_of": request_id, "choice": choice}
    made = [
        put_request(
            spec,
            log,
            log.head(),
            part,
            request.origin,
            detail,
            _make_part_options(asking, request, name),
        )
        for name, part in zip(_PART_NAMES, parts, strict=True)
    ]
    why = _format_close_reason(*made) + (f": {asking.why}" if asking.why else "")
    decide_splice_request(
        log.store,
        spec.name,
        request_id,
        "rejected",
        who=asking.who,
        why=why,
        at=asking.clock.wall_ticks(),
    )
    return made[0], made[1]


def _find_earlier_split(
    log: SlotLog, request: SpliceRequest, choice: dict[str, Any]
) -> tuple[SpliceRequest, SpliceRequest] | None:
    """The two requests, if this very choice was what closed the request."""
    try:
        part, rest = (
            read_splice_request(log.store, log.pipeline, f"{request.id}-{name}")
            for name in _PART_NAMES
        )
    except ConfigurationError:
        return None
    ours = (
        str(request.decided_why).startswith(_format_close_reason(part, rest))
        and part.origin_detail.get("choice") == choice
    )
    return (part, rest) if ours else None


def _format_close_reason(part: SpliceRequest, rest: SpliceRequest) -> str:
    return f"split into {part.id} and {rest.id}"


def _make_part_options(asking: RequestOptions, request: SpliceRequest, name: str) -> RequestOptions:
    return replace(asking, who=request.who, request_id=f"{request.id}-{name}")


def _require_divisible(spec: PipelineSpec, log: SlotLog, request: SpliceRequest) -> None:
    state = resolve_request_state(log, request)
    if state in OPEN_STATES and request.origin != "attachment":
        return
    whole = (
        f"is what {request.who} has collected, and goes into {request.destination} whole or not"
        " at all"
    )
    raise ConfigurationError(
        f"splice request {request.id} of {spec.name}"
        f" {f'is {state}' if state not in OPEN_STATES else whole}",
        code="splice.indivisible",
        pipeline=spec.name,
        kept="the request, as it was",
        advice=f"see: tidegate splice list {spec.name}",
    )


def _select_outputs(spec: PipelineSpec, rows: Any, which: LateFilter) -> list[list[str]]:
    """For each row the outputs that were chosen."""
    with open_database() as db:
        db.register("rows", rows)
        times = [
            t for (t,) in db.execute(f"select {build_time_expression(spec)} from rows").fetchall()
        ]
    found = []
    facts = zip(
        rows["_outputs"].to_pylist(),
        rows["_source"].to_pylist(),
        times,
        rows["_reason"].to_pylist(),
        strict=True,
    )
    for outputs, source, time, reason in facts:
        inside = (which.since is None or time >= which.since) and (
            which.until is None or time < which.until
        )
        inside = (
            inside
            and (not which.sources or source in which.sources)
            and (not which.reasons or reason in which.reasons)
        )
        found.append([o for o in outputs if inside and (not which.outputs or o in which.outputs)])
    return found


def _keep_chosen_outputs(rows: Any, outputs: list[list[str]]) -> Any:
    """The rows that have an output left."""
    column = pa.array(outputs, pa.list_(pa.string()))
    rows = rows.set_column(rows.column_names.index("_outputs"), "_outputs", column)
    return rows.filter(pc.greater(pc.list_value_length(rows["_outputs"]), 0))
