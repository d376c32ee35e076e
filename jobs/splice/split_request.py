"""Split an open request in two, so that a part of its rows can be decided on its own."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    SpliceRequest,
    decide_splice_request,
    read_splice_request,
)
from tidegate.errors import ConfigurationError
from tidegate.jobs.rules.duck_frame import open_database
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.splice.errors import INDIVISIBLE, NO_PART
from tidegate.jobs.splice.request_creation import (
    LateFilter,
    RequestContents,
    RequestOptions,
    put_request,
    resolve_request_state,
)
from tidegate.jobs.splice.tables_at_head import read_data_file, set_outputs
from tidegate.jobs.splice.window_recompute import build_time_expression

_PART_NAMES = ("part", "rest")


def split_request(
    spec: PipelineSpec, log: SlotLog, request_id: str, which: LateFilter, options: RequestOptions
) -> tuple[SpliceRequest, SpliceRequest]:
    """Create a request of the chosen rows and one of the rest, and close the original.

    Their ids are the original's with ``-part`` and ``-rest``, and both have its requester. The
    original becomes rejected. After a crash in between it is still open; the same call then creates
    the same two requests, or returns them. A row of which some outputs are chosen is in both.

    Raises:
        ConfigurationError: the request is unknown, not open, expired, belongs to an attachment, or
            the choice selects all of it or nothing.
    """
    request = read_splice_request(log.store, spec.name, request_id)
    choice = {
        name: list(v) if isinstance(v, tuple) else v for name, v in asdict(which).items() if v
    }
    # The call may be a repetition after a crash or a lost answer.
    if request.state == "rejected" and (earlier := _find_earlier_split(log, request, choice)):
        return earlier
    _require_divisible(spec, log, request, options.clock.wall_ticks())
    parts = _divide_rows(spec, log, request, which)
    detail = {**request.origin_detail, "part_of": request_id, "choice": choice}
    part, rest = (
        put_request(
            spec,
            log,
            log.head(),
            RequestContents(rows, request.origin, detail),
            replace(options, who=request.who, request_id=f"{request_id}-{name}"),
        )
        for name, rows in zip(_PART_NAMES, parts, strict=True)
    )
    # The original is closed last: until then it still has all rows, and nothing can be lost.
    why = _format_close_reason(part, rest) + (f": {options.why}" if options.why else "")
    decide_splice_request(
        log.store,
        spec.name,
        request_id,
        "rejected",
        who=options.who,
        why=why,
        at=options.clock.wall_ticks(),
    )
    return part, rest


def _find_earlier_split(
    log: SlotLog, request: SpliceRequest, choice: dict[str, Any]
) -> tuple[SpliceRequest, SpliceRequest] | None:
    """Return the two requests if the same choice has closed this request."""
    try:
        part, rest = (
            read_splice_request(log.store, log.pipeline, f"{request.id}-{name}")
            for name in _PART_NAMES
        )
    except ConfigurationError:
        return None
    # A person may have rejected the request for another reason, although two requests of these
    # names exist.
    is_same = str(request.decided_why).startswith(_format_close_reason(part, rest))
    return (part, rest) if is_same and part.origin_detail.get("choice") == choice else None


def _format_close_reason(part: SpliceRequest, rest: SpliceRequest) -> str:
    return f"split into {part.id} and {rest.id}"


def _require_divisible(spec: PipelineSpec, log: SlotLog, request: SpliceRequest, now: int) -> None:
    state = resolve_request_state(log, request, now=now)
    if state not in OPEN_STATES:
        raise INDIVISIBLE(pipeline=spec.name, request=request.id, why=f"is {state}")
    if request.origin == "attachment":
        why = (
            f"is what {request.who} has collected, and goes into {request.destination} whole or not"
            " at all"
        )
        raise INDIVISIBLE(pipeline=spec.name, request=request.id, why=why)


def _divide_rows(
    spec: PipelineSpec, log: SlotLog, request: SpliceRequest, which: LateFilter
) -> tuple[Any, Any]:
    """Return the chosen rows and the rest; a row can be in both, with different outputs."""
    rows = pa.concat_tables([read_data_file(log, file) for file in request.row_files()])
    chosen = _choose_outputs(spec, rows, which)
    rest = [
        [name for name in names if name not in chosen_names]
        for names, chosen_names in zip(rows["_outputs"].to_pylist(), chosen, strict=True)
    ]
    part, remainder = set_outputs(rows, chosen), set_outputs(rows, rest)
    if not part.num_rows or not remainder.num_rows:
        # One of the two requests would be empty, and an empty request cannot be decided.
        share = "all" if part.num_rows else "nothing"
        raise NO_PART(pipeline=spec.name, request=request.id, share=share)
    return part, remainder


def _choose_outputs(spec: PipelineSpec, rows: Any, which: LateFilter) -> list[list[str]]:
    """Return, for each row, the outputs that the filter selects."""
    with open_database() as db:
        db.register("rows", rows)
        times = db.execute(f"select {build_time_expression(spec)} from rows").fetchall()
    facts = zip(
        rows["_outputs"].to_pylist(),
        rows["_source"].to_pylist(),
        rows["_reason"].to_pylist(),
        times,
        strict=True,
    )
    return [
        [
            output
            for output in outputs
            if (not which.outputs or output in which.outputs)
            and (not which.sources or source in which.sources)
            and (not which.reasons or reason in which.reasons)
            and (which.since is None or time >= which.since)
            and (which.until is None or time < which.until)
        ]
        for outputs, source, reason, (time,) in facts
    ]
