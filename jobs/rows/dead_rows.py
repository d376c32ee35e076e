"""Rows that cannot be taken as the schema declares them, and what conditions say of rows.

Such a row is a dead letter, kept as JSON text with its origin, or it stops the epoch. Rows that
`where` leaves out, or that a rule drops, are counted only.
"""

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.row_counts import RULE, RULE_WARNED, name_broken_rule
from tidegate.errors import PoisonError
from tidegate.jobs.engine.arrow_tables import conform_to_schema, replace_column
from tidegate.jobs.engine.errors import RULE_FAILED as BROKEN_RULE
from tidegate.jobs.engine.interfaces import Cut, join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import MemberSurvey
from tidegate.jobs.rules.duck_frame import DuckFrame, Frame
from tidegate.jobs.rules.row_conditions import quote_text
from tidegate.jobs.spec.pipeline import EVENTS, PipelineSpec
from tidegate.jobs.spec.row_rules import FILTERED, RULE_DROPPED, RULE_FAILED, RULE_QUARANTINED

from .late_rows import LateCounts, SourceCounts, count_groups
from .member_scan import DEAD
from .row_texts import write_row_texts
from .slice_reading import CutPart, read_stored_rows

JUDGED: Final = ("_dead", "_rule", "_warned")
FAULTS: Final = ("_p", "_dead", "_detail", "_rule", "_json")
JUDGED_SCHEMA: Final = pa.schema(
    {
        "_m": pa.int32(),
        "_seq": pa.int64(),
        "_p": pa.int32(),
        **dict.fromkeys(("_dead", "_detail", "_rule", "_warned", "_json"), pa.string()),
    }
)
_CONDITION_GROUP: Final = ["_m", "_rule", "_warned"]
_IS_COUNTED: Final = f"_rule IS NOT NULL OR _warned <> '' OR _dead = '{FILTERED}'"
"""Whether conditions say something of a row, as Spark SQL."""
IS_LETTER: Final = f"_dead NOT IN ('{RULE_DROPPED}', '{FILTERED}')"


def add_faults(rows: pa.Table, frame: Frame, parts: Sequence[CutPart] | None) -> pa.Table:
    """Add `FAULTS` to the rows of a slice, null but for dead letters, if there is any.

    Args:
        rows: with `_seq`, `_code`, and `JUDGED` if the source has conditions.
        frame: the same rows with all columns of `slice_reading`.
        parts: of the cut; None if the frame has the texts of these rows in `_json`.
    """
    dead = pc.equal(rows["_code"], DEAD)
    if "_dead" in rows.column_names:
        dead = pc.and_(dead, pc.invert(pc.is_in(rows["_dead"], pa.array([FILTERED, RULE_DROPPED]))))
    if not pc.any(dead).as_py():
        return rows
    found = frame.where(IS_LETTER).selectExpr("_seq", *FAULTS).toArrow()
    if parts is not None:
        found = pa.concat_tables(
            _add_texts(found.filter(pc.equal(found["_p"], index)), part)
            for index, part in enumerate(parts)
        )
    places = pc.index_in(rows["_seq"], value_set=found["_seq"])
    for name in FAULTS:
        if name not in rows.column_names:
            rows = rows.append_column(name, found[name].take(places))
    return rows


def _add_texts(rows: pa.Table, part: CutPart) -> pa.Table:
    texts: list[str] = []
    if rows.num_rows:
        numbers = pc.subtract(rows["_seq"], join_seq(part.ordinal, 0))
        texts = write_row_texts(read_stored_rows(part, numbers.combine_chunks()))
    return replace_column(rows, "_json", pa.array(texts, pa.string()))


def select_judged(rows: pa.Table) -> pa.Table:
    """The rows that are dead, filtered, or break a rule, with the columns of `JUDGED_SCHEMA`.

    Args:
        rows: of slices, as `slice_scan.scan_slice` gives them.
    """
    found = pc.equal(rows["_code"], DEAD)
    if "_warned" in rows.column_names:
        found = pc.or_(found, pc.fill_null(pc.not_equal(rows["_warned"], ""), False))
    return conform_to_schema(rows.filter(found), JUDGED_SCHEMA)


def show_dead_letters(frame: Frame, parts: Sequence[CutPart], provenance: list[str]) -> Frame:
    """The dead letters among some rows, with the columns of their table.

    `provenance` are the columns that say where a row is from, as Spark SQL.
    """
    objects = ", ".join(quote_text(part.key) for part in parts)
    etags = ", ".join(quote_text(part.etag) for part in parts)
    return frame.where(IS_LETTER).selectExpr(
        "_dead AS reason",
        "_detail AS detail",
        f"array({objects})[_p] AS object",
        f"array({etags})[_p] AS etag",
        "_json AS row",
        *provenance,
    )


def count_dead_letters(letters: pa.Table) -> SourceCounts:
    """Count (source, what became of it) -> rows of the table of dead letters."""
    found = SourceCounts()
    for row in count_groups(letters, ["_source", "reason"]):
        quarantined = row["reason"] == RULE_QUARANTINED
        name = RULE_QUARANTINED if quarantined else "dead_lettered"
        found[row["_source"], name] += row["count_all"]
    return found


def count_conditions(spec: PipelineSpec, cut: Cut, frame: Frame) -> tuple[LateCounts, SourceCounts]:
    """What rules dropped, and how many rows of each source conditions say something of."""
    dropped = LateCounts()
    counts = SourceCounts()
    counted = frame.where(_IS_COUNTED).selectExpr(*_CONDITION_GROUP).toArrow()
    for row in count_groups(counted, _CONDITION_GROUP):
        source = cut.slices[row["_m"]].member.source
        names = [FILTERED]
        if row["_rule"] is not None:
            names = [name_broken_rule(row["_rule"])]
            if spec.sources[source].rules[row["_rule"]].severity == "drop":
                dropped[source, EVENTS, RULE, True] += row["count_all"]
        elif row["_warned"] is not None:
            names = [RULE_WARNED, *map(name_broken_rule, row["_warned"].split(","))]
        for name in names:
            counts[source, name] += row["count_all"]
    return dropped, counts


def find_refused_row(
    spec: PipelineSpec, parts: Sequence[CutPart], found: MemberSurvey, judged: pa.Table
) -> PoisonError | None:
    """The error for the first dead row of a slice that `on_bad` or a rule does not allow.

    None if all are allowed. `judged` are rows of `select_judged`, of this slice.
    """
    source = spec.sources[found.member.source]
    refused = [f"_rule IS NULL AND _dead <> '{FILTERED}'"] if source.on_bad == "fail" else []
    if any(rule.severity == "fail" for rule in source.rules.values()):
        refused.append(f"_dead = '{RULE_FAILED}'")
    if not refused or not found.dead:
        return None
    wanted = f"_dead IS NOT NULL AND ({' OR '.join(refused)})"
    if found.barrier is not None:  # rows behind it belong to another epoch
        wanted += f" AND _seq < {found.barrier.seq}"
    rows = DuckFrame.from_table(judged).where(wanted).toArrow().sort_by("_seq")
    first = rows.slice(0, 1).to_pylist()
    return _make_refusal(spec, parts, found, first[0]) if first else None


def _make_refusal(
    spec: PipelineSpec, parts: Sequence[CutPart], found: MemberSurvey, row: dict[str, Any]
) -> PoisonError:
    """The error for a dead row, which has `_seq` and `FAULTS`."""
    place = parts[row["_p"]].key
    number = split_seq(row["_seq"])[1]
    if row["_rule"] is not None:
        rule = spec.sources[found.member.source].rules[row["_rule"]]
        return BROKEN_RULE(
            pipeline=spec.name,
            row=number,
            where=place,
            rule=row["_rule"],
            source=found.member,
            predicate=rule.predicate,
            sample=row["_json"],
        )
    return PoisonError(
        f"bad rows in {found.member}; the first is row {number} of {place}:"
        f" {row['_dead']} ({row['_detail']}): {row['_json']}",
        code=f"row.{row['_dead']}",  # the reason is part of it: alerts can tell them apart
        pipeline=spec.name,
        kept="everything sealed so far",
        advice="correct the row at its origin, or set on_bad: dead_letter",
    )
