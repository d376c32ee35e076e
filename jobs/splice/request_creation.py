"""Making splice requests: from late rows, from dead letters (mended), from a file.

Making one fixes its rows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.checkpoints.splice_requests import (
    OPEN_STATES,
    SpliceRequest,
    build_rows_key,
    create_splice_request,
    generate_splice_request_id,
    list_splice_requests,
)
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENT_TIME, EVENTS, LATE, PipelineSpec
from tidegate.jobs.splice.merge_plan import SET_ASIDE_REASONS
from tidegate.jobs.splice.tables_at_head import (
    RowIdentity,
    Span,
    TablesAtHead,
    find_merge_segments,
    iterate_identities,
    make_request_schema,
    read_data_file,
    read_merged_rows,
)
from tidegate.jobs.splice.window_recompute import build_time_expression, open_database
from tidegate.time_units import format_instant

_DAYS = 24 * 3600 * 1_000_000
_IDENTITY_COLUMNS = ("_source", "_partition", "_seq")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Who asks, why, and for how long the request stands."""

    who: str
    why: str = ""
    expires_in: int | None = 30 * _DAYS
    request_id: str | None = None
    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class LateFilter:
    """Which late rows; empty means all.

    Attributes:
        outputs: only what they missed there.
        sources: only of these.
        since, until: event time, ticks, half open.
        reasons: only late for one of these.
        skip_rejected: without rows that somebody has rejected once.
    """

    outputs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    reasons: tuple[str, ...] = ()
    skip_rejected: bool = False


@dataclass(frozen=True, slots=True)
class RowRepair:
    """How dead rows become rows.

    Attributes:
        values: column -> text put into every row.
        rows: identity -> column -> text, for single rows; wins over `values`.
    """

    values: Mapping[str, str]
    rows: Mapping[RowIdentity, Mapping[str, str]]


def create_from_late_rows(
    spec: PipelineSpec, log: SlotLog, which: LateFilter, asking: RequestOptions
) -> SpliceRequest:
    """A request of late rows that were neither merged nor stand in another open request.

    Raises:
        ConfigurationError: no such row.
    """
    head = log.head()
    rows = list_pending_rows(spec, log, which, head)
    detail = {k: v for k, v in asdict(which).items() if v not in (None, (), False)}
    return put_request(spec, log, head, rows, "late", detail, asking)


def list_pending_rows(
    spec: PipelineSpec, log: SlotLog, which: LateFilter, head: LogHead | None = None
) -> Any:
    """Late rows that miss an output, with what they miss.

    Rows in open requests and merged ones are left out.
    """
    head = head or log.head()
    time = spec.event_time_column
    spans: list[Span] = []
    if which.since is not None or which.until is not None:
        spans = [
            (
                which.since if which.since is not None else -(1 << 62),
                which.until if which.until is not None else 1 << 62,
            )
        ]
    columns = [*spec.row_columns, *_IDENTITY_COLUMNS, "output", "reason", "_epoch"]
    late = TablesAtHead(spec, log, head).read_rows(LATE, columns, time=time, spans=spans)
    for column, chosen in (
        ("output", which.outputs),
        ("_source", which.sources),
        ("reason", which.reasons),
    ):
        if chosen:
            late = late.filter(pc.is_in(late[column], pa.array(list(chosen), pa.string())))
    taken = read_merged_rows(spec, log, head).pairs | _find_requested_pairs(
        log, spec, head, rejected=which.skip_rejected
    )
    return _group_missed_outputs(spec, log, head, late, taken)


def create_from_dead_letters(
    spec: PipelineSpec,
    log: SlotLog,
    mend: RowRepair,
    asking: RequestOptions,
    *,
    reasons: Collection[str] = (),
) -> SpliceRequest:
    """A request of dead rows, mended: with `mend` they must fit the schema.

    Rows that were merged or asked for are left out.

    Raises:
        ConfigurationError: no such row, or some of them still cannot be read; they are named.
    """
    head = log.head()
    dead = TablesAtHead(spec, log, head).read_rows(
        DEAD_LETTERS, ["reason", "row", *_IDENTITY_COLUMNS, "_epoch"]
    )
    dead = dead.filter(pc.is_valid(dead["row"]))
    if reasons:
        dead = dead.filter(pc.is_in(dead["reason"], pa.array(list(reasons), pa.string())))
    taken = {
        who
        for who, _ in read_merged_rows(spec, log, head).pairs
        | _find_requested_pairs(log, spec, head)
    }
    found, numbers = [], _find_open_sections(log, head, dead["_epoch"].to_pylist())
    for row, who, section in zip(dead.to_pylist(), iterate_identities(dead), numbers, strict=True):
        if who not in taken and (not mend.rows or who in mend.rows):
            values = {**json.loads(row["row"]), **mend.values, **mend.rows.get(who, {})}
            found.append(
                {
                    **values,
                    **dict(zip(_IDENTITY_COLUMNS, who, strict=True)),
                    "_reason": f"dead:{row['reason']}",
                    "_section": section,
                }
            )
    rows = _cast_rows(spec, found)
    detail = {
        "mended": dict(mend.values),
        "mended_rows": len(mend.rows),
        "reasons": sorted(reasons),
    }
    return put_request(
        spec, log, head, _target_all_outputs(spec, rows), "dead_letters", detail, asking
    )


def create_from_file(
    spec: PipelineSpec,
    log: SlotLog,
    path: Path,
    asking: RequestOptions,
    *,
    source: str | None = None,
) -> SpliceRequest:
    """A request of the rows of a Parquet, CSV or JSON-lines file with the pipeline's columns.

    Their identity is the file's content and the row in it, so that the same file cannot be merged
    twice.

    Raises:
        ConfigurationError: the file cannot be read as the schema says, or it is not told which
            source it stands for.
    """
    if source is None and len(spec.sources) > 1:
        raise ConfigurationError(
            f"{spec.name} has several sources: say which one the rows of {path} belong to",
            code="splice.no_source",
            pipeline=spec.name,
            advice=f"--source with one of: {', '.join(spec.sources)}",
        )
    data = _read_file_bytes(path)
    partition = f"file:{sha256_of_bytes(data)[:12]}"
    raw = [
        {
            **row,
            "_source": source or next(iter(spec.sources)),
            "_partition": partition,
            "_seq": n,
            "_reason": "file",
        }
        for n, row in enumerate(_parse_file_rows(path, data))
    ]
    head = log.head()
    taken = {
        who
        for who, _ in read_merged_rows(spec, log, head).pairs
        | _find_requested_pairs(log, spec, head)
    }
    kept = [row for row in raw if (row["_source"], row["_partition"], row["_seq"]) not in taken]
    return put_request(
        spec,
        log,
        head,
        _target_all_outputs(spec, _cast_rows(spec, kept)),
        "file",
        {"file": path.name, "source": source},
        asking,
    )


def resolve_request_state(
    log: SlotLog, request: SpliceRequest, head: LogHead | None = None, now: int | None = None
) -> str:
    """The state of a request, told by the log.

    A merge that a restore took back leaves it open again.
    """
    if request.id in find_merge_segments(head or log.head()):
        return "merged"
    if now is not None and request.is_expired(now):
        return "expired"
    taken_back = request.state == "merged" and any(line.get("checkpoint") for line in request.trail)
    return "created" if taken_back else request.state


# rows


def _group_missed_outputs(
    spec: PipelineSpec,
    log: SlotLog,
    head: LogHead,
    late: Any,
    taken: Collection[tuple[RowIdentity, str]],
) -> Any:
    """One row per identity, with all outputs that it misses."""
    outputs: dict[RowIdentity, list[str]] = {}
    first: dict[RowIdentity, int] = {}
    facts = zip(
        iterate_identities(late),
        late["output"].to_pylist(),
        late["reason"].to_pylist(),
        strict=True,
    )
    for number, (who, output, reason) in enumerate(facts):
        missed = [EVENTS, *spec.windows] if reason in SET_ASIDE_REASONS else [output]
        left = [name for name in missed if (who, name) not in taken]
        if left:
            first.setdefault(who, number)
            outputs.setdefault(who, []).extend(
                name for name in left if name not in outputs.get(who, [])
            )
    chosen = late.take(pa.array(list(first.values()), pa.int64()))
    sections = _find_open_sections(log, head, chosen["_epoch"].to_pylist())
    own = {
        "_reason": chosen["reason"],
        "_section": pa.array(sections, pa.int64()),
        "_outputs": pa.array(list(outputs.values()), pa.list_(pa.string())),
    }
    schema = make_request_schema(spec)
    return pa.table(
        {name: own[name] if name in own else chosen[name] for name in schema.names}
    ).cast(schema)


def _target_all_outputs(spec: PipelineSpec, rows: Any) -> Any:
    """Rows that no output has seen are meant for all of them."""
    names = [[EVENTS, *spec.windows]] * rows.num_rows
    place = rows.column_names.index("_outputs")
    return rows.set_column(place, "_outputs", pa.array(names, pa.list_(pa.string())))


def _find_open_sections(log: SlotLog, head: LogHead, epochs: Sequence[int]) -> list[int | None]:
    """The section that was open when a row was read; None where the epoch was retired."""
    known: dict[int, int | None] = {}
    for epoch in set(epochs):
        filled = next(log.epochs_between(head.timeline, epoch, epoch), None)
        known[epoch] = (
            filled.epoch.section if filled and isinstance(filled.record, Manifest) else None
        )
    return [known[epoch] for epoch in epochs]


def _find_requested_pairs(
    log: SlotLog, spec: PipelineSpec, head: LogHead, *, rejected: bool = False
) -> set[tuple[RowIdentity, str]]:
    """(row, output) pairs in open requests: nobody should have to decide twice about one row."""
    found: set[tuple[RowIdentity, str]] = set()
    now = SYSTEM_CLOCK.wall_ticks()
    states = (*OPEN_STATES, "rejected") if rejected else OPEN_STATES
    for request in list_splice_requests(log.store, spec.name):
        if (
            resolve_request_state(log, request, head, now) in states
            and request.origin != "attachment"
        ):
            for file in request.row_files():
                rows = read_data_file(log, file)
                pairs = zip(iterate_identities(rows), rows["_outputs"].to_pylist(), strict=True)
                found |= {(who, name) for who, names in pairs for name in names or ()}
    return found


def _cast_rows(spec: PipelineSpec, raw: Sequence[Mapping[str, Any]]) -> Any:
    """Rows in the pipeline's types: texts are cast value by value, ticks are taken for times.

    Raises:
        ConfigurationError: naming the first value that cannot be cast.
    """
    schema = make_request_schema(spec)
    arrays = [_cast_column([row.get(f.name) for row in raw], f) for f in schema]
    rows = pa.table(arrays, schema=schema)
    with open_database() as db:
        db.register("typed", rows)
        missing = db.execute(
            f"select _source, _partition, _seq from typed where {build_time_expression(spec)} is"
            " null"
        ).fetchall()
        times = db.execute(f"select {build_time_expression(spec)} from typed").fetchall()
    if missing:
        raise ConfigurationError(
            f"{len(missing)} rows have no event time, first: {'/'.join(map(str, missing[0]))}",
            code="splice.no_event_time",
            pipeline=spec.name,
            kept="the rows, where they are",
            advice="mend them with --set COLUMN=VALUE or --mend FILE",
        )
    if EVENT_TIME in schema.names:
        column = pa.array([time for (time,) in times], pa.int64()).cast(
            schema.field(EVENT_TIME).type
        )
        rows = rows.set_column(schema.names.index(EVENT_TIME), EVENT_TIME, column)
    return rows


def _cast_column(values: list[Any], field: Any) -> Any:
    if pa.types.is_list(field.type):
        return pa.array(values, field.type)
    times = pa.types.is_timestamp(field.type)
    texts = [
        format_instant(v) if times and isinstance(v, int) else _format_value(v) for v in values
    ]
    try:
        with open_database() as db:
            db.register("texts", pa.table({"v": pa.array(texts, pa.string())}))
            kind = _name_sql_type(field.type)
            return (
                db.sql(f"select cast(v as {kind}) as v from texts")
                .to_arrow_table()["v"]
                .cast(field.type)
                .combine_chunks()
            )
    except Exception as error:
        raise ConfigurationError(
            f"column {field.name}: {str(error).splitlines()[0]}",
            code="splice.bad_value",
            kept="the rows, where they are",
            advice="mend the value with --set COLUMN=VALUE or --mend FILE",
        ) from error


def _format_value(value: Any) -> str | None:
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _name_sql_type(kind: Any) -> str:
    names = {
        pa.string(): "varchar", pa.bool_(): "boolean", pa.int32(): "integer", pa.int64(): "bigint",
        pa.float32(): "float", pa.float64(): "double", pa.date32(): "date", pa.binary(): "blob",
    }  # fmt: skip
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    return names.get(kind) or f"decimal({kind.precision},{kind.scale})"


def _read_file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}", code="splice.no_file", advice="check the path"
        ) from error


def _parse_file_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    import pyarrow.csv
    import pyarrow.json

    readers: dict[str, Any] = {
        ".parquet": pq.read_table,
        ".csv": lambda buffer: pyarrow.csv.read_csv(buffer),
        ".json": lambda buffer: pyarrow.json.read_json(buffer),
        ".jsonl": lambda buffer: pyarrow.json.read_json(buffer),
    }
    try:
        return list(readers[path.suffix](io.BytesIO(data)).to_pylist())
    except (KeyError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{path} cannot be read as {path.suffix or 'a table'}: {error}",
            code="splice.bad_file",
            advice="give a .parquet, .csv, .json or .jsonl file",
        ) from error


# the request


def put_request(
    spec: PipelineSpec,
    log: SlotLog,
    head: LogHead,
    rows: Any,
    origin: str,
    detail: Mapping[str, Any],
    asking: RequestOptions,
) -> SpliceRequest:
    """Write the rows, then the document that makes them a request."""
    if rows.num_rows == 0:
        raise ConfigurationError(
            f"{spec.name} has no such rows that were not merged or asked for already",
            code="splice.no_rows",
            pipeline=spec.name,
            advice=f"see: tidegate splice list {spec.name}; tidegate tables {spec.name} late",
        )
    with open_database() as db:
        db.register("asked", rows)
        low, high = db.execute(
            f"select min(t), max(t) from (select {build_time_expression(spec)} as t from asked)"
        ).fetchall()[0]
    request_id, now = asking.request_id or generate_splice_request_id(), asking.clock.wall_ticks()
    ref = _write_rows_once(log, build_rows_key(spec.name, request_id), rows, low, high)
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
            "expires_at": None if asking.expires_in is None else now + asking.expires_in,
            "who": asking.who,
            "why": asking.why,
            "at_slot": {"timeline": head.timeline, "slot": head.slot},
            "trail": [{"at": now, "who": asking.who, "what": "created", "because": asking.why}],
        }
    )
    return create_splice_request(log.store, request)


def _write_rows_once(log: SlotLog, key: str, rows: Any, low: int, high: int) -> FileRef:
    """Write the rows once: a second creation under the same id keeps the first one's."""
    if log.store.stat(key) is not None:
        data = log.store.get(key).data
        count = pq.read_metadata(io.BytesIO(data)).num_rows
        return FileRef(
            key=key,
            rows=count,
            bytes=len(data),
            sha256=sha256_of_bytes(data),
            min_time=low,
            max_time=high,
            kind="request",
        )
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="snappy", coerce_timestamps="us")
    data = buffer.getvalue()
    log.store.put(key, data)
    return FileRef(
        key=key,
        rows=rows.num_rows,
        bytes=len(data),
        sha256=sha256_of_bytes(data),
        min_time=low,
        max_time=high,
        kind="request",
    )
