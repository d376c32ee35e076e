"""Rows and decisions of a lineage against a recomputation that knows no crash, restore or segment.

The recomputation keeps its state in memory and goes through the sealed cuts in order. What each
epoch decided must follow from the cut and the clock that it recorded, and what it wrote from what
it decided.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.oracle.row_moves import RowMoves, RowState
from tests.oracle.rows import read_rows
from tests.simulation.basics import Violation
from tests.simulation.cheap import rows_of

from tidegate.checkpoints.manifest import Manifest
from tidegate.jobs.engine.recorded_epochs import RecordedEpoch
from tidegate.jobs.spec.pipeline import BUILT, EVENTS, LATE

if TYPE_CHECKING:
    from tests.simulation.actors import Stage

_EPOCH = ("_timeline", "_epoch")


def judge_epochs(stage: Stage, lineage: list[Manifest]) -> None:
    """Go through the lineage.

    Raises:
        Violation: an epoch decided or wrote something else.
    """
    state = RowState()
    for parent, epoch in pairwise([None, *lineage]):
        if epoch is None or epoch.is_merge:
            continue
        recorded = RecordedEpoch(stage.spec, epoch, parent)
        survey = recorded.read_survey()
        if survey is not None and (fields := recorded.decide_again(survey)[1]):
            raise Violation(f"{epoch.id}: {', '.join(fields)} would be decided differently")
        for table, wanted in _move_again(stage, recorded, state).items():
            has = Counter(
                _text(row)
                for file in epoch.files.get(table, [])
                for row in rows_of(stage.world.bucket.written[file.key])
            )
            if has != wanted:
                raise Violation(
                    f"{epoch.id}: {table} lacks {_some(wanted - has)} and has {_some(has - wanted)}"
                )


def _move_again(stage: Stage, recorded: RecordedEpoch, state: RowState) -> dict[str, Counter[str]]:
    """Return the rows of each table, and take the state one epoch further."""
    spec, position = stage.spec, state.position
    slices = [
        read_rows(
            spec.sources[part.member.source],
            part,
            stage.sources[part.member.source].rows(part),
            recorded.state_before,
        )
        for part in recorded.rebuild_cut().slices
    ]
    moves = RowMoves(spec, state)
    moves.judge(slices, recorded.sealed_decision)
    moves.leave(recorded.sealed_decision)
    found = {
        EVENTS: Counter(
            _text(
                {
                    **placed.row.values,
                    "position": position + number,
                    "section": placed.section,
                    "_late": flagged or placed.tardy,
                    **_place(placed.row),
                }
            )
            for number, (placed, flagged) in enumerate(moves.released)
        ),
        LATE: Counter(
            _text({"output": one.output, "reason": one.reason, **_place(one.row)})
            for one in moves.late
        ),
        **{name: Counter(map(_text, moves.results[name])) for name in spec.windows},
    }
    if spec.release.glom is not None:
        found[BUILT] = Counter(_text(group.row(spec.release.glom)) for group in moves.built)
    for window in (window for fold in moves.folds.values() for window in fold.live.values()):
        window.changed = False
    return found


def _place(row: Any) -> dict[str, Any]:
    return {"_source": row.member.source, "_partition": row.member.partition, "_seq": row.seq}


def _text(row: dict[str, Any]) -> str:
    """A row as text: of a late one where it is from and what it missed, of others all but the epoch."""
    if "reason" in row:
        row = {name: row[name] for name in ("output", "reason", "_source", "_partition", "_seq")}
    return repr(sorted((name, value) for name, value in row.items() if name not in _EPOCH))


def _some(rows: Counter[str]) -> str:
    return next(iter(rows), "nothing")
