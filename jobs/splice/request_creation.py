"""Create splice requests from late rows, corrected dead letters or a file, and split them.

A request contains its rows from the start: what is late afterwards does not join it. Each row is
requested once per output (`docs/semantics.md`, section 6.5).
"""

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    SpliceRequest,
    build_rows_key,
    create_splice_request,
    generate_splice_request_id,
    list_splice_requests,
    read_splice_request,
    reject_splice_request,
)
from tidegate.errors import ConfigurationError, get_first_line
from tidegate.jobs.engine.arrow_tables import Row, RowView, list_rows, replace_column
from tidegate.jobs.rules.declared_values import build_plain_cast_sql
from tidegate.jobs.rules.duck_frame import DuckFrame, query_rows, query_table
from tidegate.jobs.rules.recomputation import SET_ASIDE_REASONS, build_time_expression
from tidegate.jobs.sinks.output_tables import (
    IDENTITY_COLUMNS,
    RowIdentity,
    iterate_identities,
    make_request_schema,
    write_parquet_once,
)
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENT_TIME, EVENTS, LATE, PipelineSpec
from tidegate.json_types import JsonObject, JsonView
from tidegate.time_units import format_instant

from .errors import (
    BAD_FILE,
    BAD_VALUE,
    INDIVISIBLE,
    NO_EVENT_TIME,
    NO_FILE,
    NO_PART,
    NO_ROWS,
    NO_SOURCE,
    WRONG_SOURCE,
)
from .tables_at_head import (
    TablesAtHead,
    find_merge_segments,
    iterate_output_pairs,
    read_data_file,
    set_outputs,
)

_DAYS = 24 * 3600 * 1_000_000


@dataclass(frozen=True)
class RequestOptions:
    """Who asks for a merge, and for how long.

    Attributes:
        who: who asks.
        why: the reason.
        expires_in: ticks after which the request can no longer be merged; None: never.
        request_id: id of the request; a random one unless given.
        clock: for the times in the document.
    """

    who: str
    why: str = ""
    expires_in: int | None = 30 * _DAYS
    request_id: str | None = None
    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True)
class LateFilter:
    """Which late rows to request; an empty field selects all.

    Attributes:
        outputs: only these outputs that the rows missed. Rows that were set aside missed all.
        sources: only rows of these sources.
        since, until: event time in ticks, half open.
        reasons: only rows that are late for one of these reasons.
        skip_rejected: leave out rows of requests that were rejected.
    """

    outputs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    reasons: tuple[str, ...] = ()
    skip_rejected: bool = False


@dataclass(frozen=True)
class RowRepair:
    """How dead letters are corrected.

    Attributes:
        values: column -> text for every row.
        rows: identity -> column -> text for single rows; takes precedence over `values`. Unless it
            is empty, only these rows are requested.
    """

    values: Mapping[str, str]
    rows: Mapping[RowIdentity, Mapping[str, str]]


def create_from_late_rows(
    spec: PipelineSpec, log: SlotLog, which: LateFilter, options: RequestOptions
) -> SpliceRequest:
    """Create a request of late rows that are neither merged nor in another open request.

    Raises:
        ConfigurationError: there are no such rows.
    """
    tables = TablesAtHead(spec, log)
    rows = _read_pending_rows(tables, which)
    detail = {k: v for k, v in asdict(which).items() if v not in (None, (), False)}
    return _put_request(tables, rows, "late", detail, options)


def list_pending_rows(spec: PipelineSpec, log: SlotLog, which: LateFilter) -> Any:
    """Return late rows with the outputs that they miss, as rows of a request.

    Left out are rows that left flagged, and (row, output) pairs that are merged or in an open
    request.
    """
    return _read_pending_rows(TablesAtHead(spec, log), which)


def _read_pending_rows(tables: TablesAtHead, which: LateFilter) -> Any:
    spec, until = tables.spec, None if which.until is None else which.until - 1
    columns = [*spec.row_columns, *IDENTITY_COLUMNS, "output", "reason", "_epoch"]
    times = {spec.event_time_column: [(which.since, until)]}
    is_bounded = which.since is not None or which.until is not None
    late = tables.read_rows(LATE, columns, times if is_bounded else {})
    late = late.filter(pc.not_equal(late["reason"], "flagged"))  # these are among the events
    # Every filter that is given narrows the rows; an empty one selects all.
    for column, chosen in (("_source", which.sources), ("reason", which.reasons)):
        if chosen:
            late = late.filter(pc.is_in(late[column], pa.array(list(chosen), pa.string())))
    taken = _find_taken_pairs(tables, with_rejected=which.skip_rejected)
    return _group_missed_outputs(tables, late, taken, which.outputs)


def create_from_dead_letters(
    spec: PipelineSpec,
    log: SlotLog,
    repair: RowRepair,
    options: RequestOptions,
    *,
    reasons: Collection[str] = (),
) -> SpliceRequest:
    """Create a request of dead letters, which must fit the schema after the repair.

    Left out are rows that are merged or requested already, letters without a row, and those of
    other `reasons`, if any are given.

    Raises:
        ConfigurationError: there are no such rows; or a row still cannot be read or has no event
            time, and the first such value or row is named.
    """
    tables = TablesAtHead(spec, log)
    dead = tables.read_rows(DEAD_LETTERS, ["reason", "row", *IDENTITY_COLUMNS, "_epoch"])
    # Letters without a row stand for whole objects, or for ranges that no longer exist: they cannot
    # be corrected.
    dead = dead.filter(pc.is_valid(dead["row"]))
    if reasons:
        dead = dead.filter(pc.is_in(dead["reason"], pa.array(list(reasons), pa.string())))
    taken = {who for who, _ in _find_taken_pairs(tables)}
    sections = _find_open_sections(tables, dead["_epoch"].to_pylist())
    repaired = [
        {
            # Corrections of single rows win over those of all rows, and no correction changes the
            # identity.
            **json.loads(row["row"]),
            **repair.values,
            **repair.rows.get(who, {}),
            **dict(zip(IDENTITY_COLUMNS, who, strict=True)),
            "_reason": f"dead:{row['reason']}",
            "_section": section,
        }
        for row, who, section in zip(
            list_rows(dead), iterate_identities(dead), sections, strict=True
        )
        if who not in taken and (not repair.rows or who in repair.rows)
    ]
    detail = {
        "mended": dict(repair.values),
        "mended_rows": len(repair.rows),
        "reasons": sorted(reasons),
    }
    return _put_request(tables, cast_rows(spec, repaired), "dead_letters", detail, options)


def create_from_file(
    spec: PipelineSpec,
    log: SlotLog,
    path: Path,
    options: RequestOptions,
    *,
    source: str | None = None,
) -> SpliceRequest:
    """Create a request of the rows of a Parquet, CSV or JSON-lines file.

    A row's identity is the content of the file and its number in it, so the same file cannot be
    merged twice: rows that are merged or requested already are left out. Columns that the pipeline
    does not have are ignored.

    Raises:
        ConfigurationError: the file cannot be read, its rows do not fit the schema, no row is left,
            `source` is missing although the pipeline has several sources, or it is not one of them.
    """
    # Sources differ in lag and keys of windows (`_source`), so a guess could be wrong.
    if source is None and len(spec.sources) > 1:
        raise NO_SOURCE(pipeline=spec.name, path=path, sources=", ".join(spec.sources))
    if source is not None and source not in spec.sources:
        raise WRONG_SOURCE(pipeline=spec.name, source=source, sources=", ".join(spec.sources))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NO_FILE(path=path, text=error.strerror) from error
    tables = TablesAtHead(spec, log)
    identity = (source or next(iter(spec.sources)), f"file:{sha256_of_bytes(data)[:12]}")
    taken = {who for who, _ in _find_taken_pairs(tables)}
    rows = [
        {**row, **dict(zip(IDENTITY_COLUMNS, (*identity, n), strict=True)), "_reason": "file"}
        for n, row in enumerate(parse_file_rows(path, data))
        if (*identity, n) not in taken
    ]
    detail = {"file": path.name, "source": source}
    return _put_request(tables, cast_rows(spec, rows), "file", detail, options)


def resolve_request_state(
    log: SlotLog, request: SpliceRequest, head: LogHead | None = None, now: int | None = None
) -> str:
    """Return the state of a request as the log has it, one of `SpliceState`.

    The log decides whether a request is merged. If a restore took the merge back, the request is
    open again: "created".

    Args:
        log: the pipeline's log.
        request: the request.
        head: the head of the log, if the caller has read it.
        now: ticks; given, an open request whose time is over is "expired". Without it only one that
            was marked so is.
    """
    if request.id in find_merge_segments(head or log.head()):
        return "merged"
    if now is not None and request.is_expired(now):
        return "expired"
    # The document says merged, the log does not: a restore went back to before the merge. A merge
    # without a checkpoint had nothing to do, and nothing can be taken back.
    taken_back = request.state == "merged" and any(line.get("checkpoint") for line in request.trail)
    return "created" if taken_back else request.state


def _group_missed_outputs(
    tables: TablesAtHead,
    late: Any,
    taken: Collection[tuple[RowIdentity, str]],
    chosen: Collection[str],
) -> Any:
    """Return one row per identity, with all outputs that it misses.

    `chosen` limits them to these outputs, unless it is empty.
    """
    outputs: dict[RowIdentity, list[str]] = {}
    first_index: dict[RowIdentity, int] = {}
    facts = zip(
        iterate_identities(late),
        late["output"].to_pylist(),
        late["reason"].to_pylist(),
        strict=True,
    )
    for index, (who, output, reason) in enumerate(facts):
        # These rows stand once in the late table, although they missed every output.
        names = [EVENTS, *tables.spec.windows] if reason in SET_ASIDE_REASONS else [output]
        missed = [
            name for name in names if (who, name) not in taken and (not chosen or name in chosen)
        ]
        if missed:
            first_index.setdefault(who, index)
            known = outputs.setdefault(who, [])
            known.extend(name for name in missed if name not in known)
    rows = late.take(pa.array(list(first_index.values()), pa.int64()))
    sections = _find_open_sections(tables, rows["_epoch"].to_pylist())
    derived = {
        "_reason": rows["reason"],
        "_section": pa.array(sections, pa.int64()),
        "_outputs": pa.array(list(outputs.values()), pa.list_(pa.string())),
    }
    schema = make_request_schema(tables.spec)
    columns = {n: derived[n] if n in derived else rows[n] for n in schema.names}
    return pa.table(columns).cast(schema)


def _find_open_sections(tables: TablesAtHead, epochs: Sequence[int]) -> list[int | None]:
    """Return the section that was open when each row was read; None for retired epochs."""
    # Many rows share an epoch, and each look into the log costs a request.
    sections = {
        slot: epoch.section if (epoch := tables.find_epoch(slot)) else None for slot in set(epochs)
    }
    return [sections[slot] for slot in epochs]


def _find_taken_pairs(
    tables: TablesAtHead, *, with_rejected: bool = False
) -> set[tuple[RowIdentity, str]]:
    """Return the (row, output) pairs that are merged or in open requests.

    No one should have to decide twice about a row. With `with_rejected`, pairs of rejected requests
    are included.
    """
    pairs, log = set(tables.merged.slots), tables.log
    now = SYSTEM_CLOCK.wall_ticks()
    states = (*OPEN_STATES, "rejected") if with_rejected else OPEN_STATES
    for request in list_splice_requests(log.store, log.pipeline):
        # Its rows go into a stream, where they have no outputs of this kind.
        if request.origin == "attachment":
            continue
        if resolve_request_state(log, request, tables.head, now) in states:
            for file in request.row_files():
                pairs.update(iterate_output_pairs(read_data_file(log, file)))
    return pairs


def _put_request(
    tables: TablesAtHead, rows: Any, origin: str, detail: JsonView, options: RequestOptions
) -> SpliceRequest:
    """Write the rows of a request, then its document, and return it.

    If a request with the id exists, its rows and document stay, and it is returned.

    Args:
        tables: the tables at the head of the log.
        rows: with the columns of `make_request_schema`; an error if there are none.
        origin: late, dead_letters or file, as `SpliceRequest.origin`.
        detail: how the rows were chosen; JSON.
        options: who asks, and for how long.
    """
    spec, head = tables.spec, tables.head
    if rows.num_rows == 0:
        raise NO_ROWS(pipeline=spec.name)
    time = build_time_expression(spec)
    low, high = query_rows(rows, f"select min({time}), max({time}) from rows")[0]
    request_id = options.request_id or generate_splice_request_id()
    now = options.clock.wall_ticks()
    # Rows first: a document without its rows could be approved, but not merged.
    # If the same request was created before, the rows of that time stay.
    key = build_rows_key(spec.name, request_id)
    ref = write_parquet_once(tables.log.store, key, rows, "request", (low, high))
    request = SpliceRequest.model_validate(
        {
            "id": request_id,
            "pipeline": spec.name,
            "origin": origin,
            "origin_detail": dict(detail),
            "rows": [ref.model_dump(mode="json")],
            "row_count": rows.num_rows,
            "min_time": low,
            "max_time": high,
            "created_at": now,
            "expires_at": None if options.expires_in is None else now + options.expires_in,
            "who": options.who,
            "why": options.why,
            "at_slot": {"timeline": head.timeline, "slot": head.slot},
            "trail": [{"at": now, "who": options.who, "what": "created", "because": options.why}],
        }
    )
    return create_splice_request(tables.log.store, request)


# An open request can be split in two, so that a part of its rows is decided on its own.

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
    tables = TablesAtHead(spec, log)
    part, rest = (
        _put_request(
            tables,
            rows,
            request.origin,
            detail,
            replace(options, who=request.who, request_id=f"{request_id}-{name}"),
        )
        for name, rows in zip(_PART_NAMES, parts, strict=True)
    )
    # The original is closed last: until then it still has all rows, and nothing can be lost.
    why = _format_close_reason(part, rest) + (f": {options.why}" if options.why else "")
    now = options.clock.wall_ticks()
    reject_splice_request(log.store, spec.name, request_id, who=options.who, why=why, at=now)
    return part, rest


def _find_earlier_split(
    log: SlotLog, request: SpliceRequest, choice: JsonObject
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
    time = build_time_expression(spec)
    facts = query_rows(rows, f"select _outputs, _source, _reason, {time} from rows")
    chosen = [
        [
            output
            for output in outputs
            if (not which.outputs or output in which.outputs)
            and (not which.sources or source in which.sources)
            and (not which.reasons or reason in which.reasons)
            and (which.since is None or instant >= which.since)
            and (which.until is None or instant < which.until)
        ]
        for outputs, source, reason, instant in facts
    ]
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


# Rows from outside the pipeline: they are cast to its types, and may come from a file.


def cast_rows(spec: PipelineSpec, raw: Sequence[RowView]) -> Any:
    """Return rows with the columns of a request, meant for all outputs.

    Texts are cast value by value; integers in a timestamp column are ticks.

    Raises:
        ConfigurationError: naming a value that cannot be cast, or the first row without event time.
    """
    schema = make_request_schema(spec)
    types = DuckFrame.from_table(schema.empty_table()).types
    # Rows from outside were in no output, so they are requested for all.
    outputs = [[EVENTS, *spec.windows]] * len(raw)
    arrays = [
        pa.array(outputs, field.type)
        if field.name == "_outputs"
        else _cast_column(
            [row.get(field.name) for row in raw],
            field,
            types[field.name],
            spec.columns.get(field.name, ""),
        )
        for field in schema
    ]
    rows = pa.table(arrays, schema=schema)
    time = build_time_expression(spec)
    facts = query_rows(rows, f"select _source, _partition, _seq, {time} from rows")
    missing = [identity for *identity, ticks in facts if ticks is None]
    if missing:
        first = "/".join(map(str, missing[0]))
        raise NO_EVENT_TIME(pipeline=spec.name, count=len(missing), first=first)
    if EVENT_TIME in schema.names:  # the one column for sources with different columns
        instants = pa.array([fact[-1] for fact in facts], pa.int64())
        times = instants.cast(schema.field(EVENT_TIME).type)
        rows = replace_column(rows, EVENT_TIME, times)
    return rows


def _cast_column(values: list[Any], field: Any, sql_type: str, declared: str) -> Any:
    is_time = pa.types.is_timestamp(field.type)
    if declared in ("int", "long"):  # a file may have whole numbers in a column of doubles
        values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    texts = [
        format_instant(v) if is_time and isinstance(v, int) else _format_value(v) for v in values
    ]
    try:
        # DuckDB casts from text as strictly for a file as for a correction on the command line.
        query = f"select cast(v as {sql_type}) as v from rows"
        # A file may have NaN, which no text format has.
        if declared in ("int", "long", "boolean", "date") or declared.startswith("decimal"):
            query = f"select {build_plain_cast_sql('v', declared)} as v from rows"
        given = pa.array(texts, pa.string())
        found = query_table(pa.table({"v": given}), query)["v"]
        if found.null_count > given.null_count:
            lost = given.filter(pc.and_(found.is_null(), given.is_valid()).combine_chunks())
            raise ValueError(f"{lost[0]} is no {declared}")
        return found.cast(field.type).combine_chunks()
    except Exception as error:
        raise BAD_VALUE(column=field.name, text=get_first_line(error)) from error


def _format_value(value: Any) -> str | None:
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def parse_file_rows(path: Path, data: bytes) -> list[Row]:
    """Return the rows of a Parquet, CSV or JSON-lines file; the extension of `path` says which.

    Raises:
        ConfigurationError: the data does not fit the extension, or it is another than .parquet,
            .csv, .json and .jsonl.
    """
    import pyarrow.csv
    import pyarrow.json

    readers: dict[str, Any] = {
        ".parquet": pq.read_table,
        ".csv": pyarrow.csv.read_csv,
        ".json": pyarrow.json.read_json,
        ".jsonl": pyarrow.json.read_json,
    }
    try:
        return list(readers[path.suffix](io.BytesIO(data)).to_pylist())
    except (KeyError, pa.ArrowException) as error:
        raise BAD_FILE(path=path, kind=path.suffix or "a table", text=error) from error
