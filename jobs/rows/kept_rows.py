"""The rows that a task keeps for the events table until it is decided which of them leave.

They stay in Spark's block manager, as pieces of Arrow streams, and a second job gets them. With
them go neither names of sources nor positions: a slice has a number, which names its member.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.rules.row_conditions import quote_name, time_below_sql
from tidegate.jobs.spec.event_time_options import LatePolicy
from tidegate.time_units import TICK_MAX

from .cut_division import ReadUnit
from .judged_rows import JudgedRows, adjust_late_rows

PIECE_BYTES: Final = 512 << 10
"""About so many bytes of rows are one piece.

The JVM moves pieces of 35 MB in two to three times the processor time of such small ones.
"""
_SAMPLES: Final = 512
_COMPUTED: Final = {"_slice": np.int32, "_late": np.bool_, "_seq": np.int64, "_et": np.int64}
_LAYOUT: Final = b"tidegate"
"""The name under which the schema of a stream says what `decode_rows` has to do."""


@dataclass(frozen=True)
class KeptPiece:
    """Rows of a unit, as an Arrow stream."""

    data: pa.Buffer


@dataclass(frozen=True)
class KeptSummary:
    """What a task keeps of its unit.

    Attributes:
        rows: index of a slice -> rows.
        size: of all rows, in bytes.
        late: rows that leave at once, flagged.
        times: event times of rows at even distances, late ones apart.
        late_times: those of late rows.
    """

    rows: Counter[int]
    size: int
    late: int
    times: list[int]
    late_times: list[int]


def keep_event_rows(judged: JudgedRows, unit: ReadUnit, rows: pa.Table) -> pa.Table:
    """Return the rows of a unit that join the events output, in the order of the cut.

    Rows are adjusted where the late policy says so.

    Args:
        judged: the rows.
        unit: what was read.
        rows: its data rows as `slice_scan.scan_slice` has them. DuckDB copies them if one is set
            aside or may be adjusted.
    """
    kinds = {name: to_arrow_type(kind) for name, kind in judged.spec.columns.items()}
    policy, has_late = judged.spec.release.on_late, judged.has_rows_below(judged.late_bound)
    adjusts = has_late and policy is LatePolicy.ADJUST
    if judged.aside is not None or adjusts:
        going = judged.data
        if adjusts:
            # The frontier has passed their start, so they begin at the frontier. A row that ended
            # before it cannot be moved and is left out.
            start = f"{max(judged.frontier, judged.late_bound)}L"
            is_late = time_below_sql(judged.late_bound)
            going = adjust_late_rows(going, judged.spec, is_late, start)
        rows = going.selectExpr(*map(quote_name, kinds), "_et", "_seq", "_m").toArrow()
    late = np.zeros(rows.num_rows, bool)
    if has_late:
        # As `time_below_sql` has it.
        late = np.minimum(rows["_et"].to_numpy(), TICK_MAX - 1) < judged.late_bound
    if has_late and policy is not LatePolicy.EMIT_FLAGGED:
        rows, late = rows.filter(pa.array(~late)), np.zeros(int((~late).sum()), bool)
    columns = {name: rows[name].cast(kind) for name, kind in kinds.items()}
    columns |= {name: rows[name] for name in ("_et", "_seq")}
    slices = np.array(unit.indexes, np.int32)[rows["_m"].to_numpy()]
    return pa.table({**columns, "_slice": slices, "_late": late})


def summarize_kept_rows(kept: pa.Table, *, with_times: bool) -> KeptSummary:
    """Return what the driver has to know of the rows; their times only for a release in order."""
    counts = zip(*np.unique(kept["_slice"].to_numpy(), return_counts=True), strict=True)
    late = kept["_late"].to_numpy()
    times = kept["_et"].to_numpy()
    return KeptSummary(
        Counter({int(index): int(rows) for index, rows in counts}),
        kept.nbytes,
        int(late.sum()),
        _sample_times(times[~late]) if with_times else [],
        _sample_times(times[late]) if with_times else [],
    )


def _sample_times(times: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[int]:
    found: list[int] = times[:: max(1, times.size // _SAMPLES)].tolist()
    return found


def encode_kept_rows(kept: pa.Table) -> Iterator[KeptPiece]:
    """Yield the rows of a unit as pieces of about `PIECE_BYTES`."""
    yield from map(KeptPiece, encode_in_pieces(kept))


def encode_in_pieces(rows: pa.Table) -> Iterator[pa.Buffer]:
    """Yield rows as Arrow streams of about `PIECE_BYTES`."""
    yield from map(encode_rows, slice_rows(rows, PIECE_BYTES))


def slice_rows(rows: pa.Table, size: int) -> Iterator[pa.Table]:
    """Yield rows in slices of about so many bytes."""
    slices = -(-rows.nbytes // size)
    step = -(-rows.num_rows // max(slices, 1))
    for first in range(0, rows.num_rows, max(step, 1)):
        yield rows.slice(first, step)


def encode_rows(rows: pa.Table) -> pa.Buffer:
    """Return rows as an Arrow stream, which is not compressed.

    Columns of `_COMPUTED` that follow from two numbers, or from another column, are left out: of a
    source of five numbers they are two fifths of what Spark would have to move.
    """
    computed: dict[str, list[int] | str] = {}
    for name in rows.column_names:
        if name in _COMPUTED and (how := _describe_column(rows, name)) is not None:
            computed[name] = how
    layout = {"names": rows.column_names, "rows": rows.num_rows, "computed": computed}
    sent = rows.drop_columns([*computed])
    sent = sent.replace_schema_metadata({_LAYOUT: json.dumps(layout)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sent.schema) as writer:
        writer.write_table(sent)
    return sink.getvalue()


def decode_rows(data: pa.Buffer) -> pa.Table:
    """The way back of `encode_rows`."""
    sent = pa.ipc.open_stream(data).read_all()
    layout = json.loads(sent.schema.metadata[_LAYOUT])
    computed: dict[str, list[int] | str] = layout["computed"]
    columns = {}
    for name in layout["names"]:
        how = computed.get(name)
        if how is None:
            columns[name] = sent[name]
        elif isinstance(how, str):
            columns[name] = sent[how].cast(pa.int64())
        else:
            first, step = how
            columns[name] = (first + step * np.arange(layout["rows"])).astype(_COMPUTED[name])
    return pa.table(columns)


def _describe_column(rows: pa.Table, name: str) -> list[int] | str | None:
    """The first value and the distance to the next, if all are the same, or the column of times."""
    values = rows[name].to_numpy().astype(np.int64)
    if not values.size:
        return None
    step = int(values[1] - values[0]) if values.size > 1 else 0
    if (np.diff(values) == step).all():
        return [int(values[0]), step]
    for other in rows.schema if name == "_et" else ():
        is_time = pa.types.is_timestamp(other.type) and other.type.unit == "us"
        if is_time:
            same = pc.equal(rows[other.name].cast(pa.int64()), rows[name])
            if pc.all(same, skip_nulls=False).as_py():
                return str(other.name)
    return None
