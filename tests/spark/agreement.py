"""Runs the Spark mover and the oracle mover over the same cuts and decisions and compares every
table and counter.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.oracle.mover import OracleMover
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice, SurveyedCut, join_seq
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import Decision, Member, MemberSurvey, ReleaseMark
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_inspection import Footer, read_footer
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

    from tidegate.jobs.spark.mover import SparkMover

COLUMNS = {"t": "timestamp", "kind": "string", "k": "string", "n": "long", "v": "double"}
SECOND = 1_000_000
TIMESTAMP = pa.timestamp("us", "UTC")
_ARROW = pa.schema(
    [
        ("t", TIMESTAMP),
        ("kind", pa.string()),
        ("k", pa.string()),
        ("n", pa.int64()),
        ("v", pa.float64()),
    ]
)

ROW_GROUP = 1 << 20
"""Rows of a row group of an object."""

Row = dict[str, Any]


def divide_finely(monkeypatch: pytest.MonkeyPatch, share: int = 1) -> None:
    """Let a task read at most so many bytes, or a row group, of a slice that can be divided.

    A row group has two rows.
    """
    monkeypatch.setattr("tests.spark.agreement.ROW_GROUP", 2)
    for module in ("object_inspection", "object_decoding"):
        monkeypatch.setattr(f"tidegate.jobs.sources.{module}.BREAK_BYTES", 1)
    limits = {"UNIT_BYTES": 1, "_SHARE_BYTES": share, "_REQUEST_BYTES": 1, "_MOST_UNITS": 1 << 30}
    for name, value in limits.items():
        monkeypatch.setattr(f"tidegate.jobs.rows.cut_division.{name}", value)


def spec_of(sources: dict[str, dict[str, Any]] | None = None, **more: Any) -> PipelineSpec:
    """A pipeline over the columns above; sources differ from the default by what is given."""
    base = {"schema": COLUMNS, "event_time": "t", "lag": "5s"}
    named = {
        name: {**base, "path": f"inbox/{name}", **own}
        for name, own in (sources or {"a": {}, "b": {}}).items()
    }
    return PipelineSpec.model_validate({"name": "p", "sources": named, **more})


@dataclass
class Side:
    """One mover with its own state."""

    mover: Any
    pipeline: str
    segments: tuple[FileRef, ...] = ()
    position: int = 0
    moved: list[MoveResult] = field(default_factory=list)


class Pair:
    """Both movers over one store, epoch by epoch.

    The Spark mover reads through a view of it, if there is one.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        session: SparkSession | None,
        folder: Path,
        *,
        view: InputView | None = None,
    ) -> None:
        from tidegate.jobs.spark.mover import SparkMover

        self.spec = spec
        self.store = LocalStore(folder / "store")
        self.spark: SparkMover = SparkMover(
            view or self.store, spec, folder / "work", session=session
        )
        self.sides = {
            "spark": Side(self.spark, "spark"),
            "reference": Side(OracleMover(self.store, spec), "reference"),
        }
        self.state = create_initial_state(spec)
        self.ordinals: dict[Member, int] = {}
        self.waiting: dict[Member, list[dict[str, Any]]] = {}
        self.now = 0
        self.epoch = 0
        self.released: ReleaseMark | None = None
        self.decisions: list[Decision] = []

    def put(
        self, source: str, rows: list[Row] | pa.Table, partition: str = "0", **options: Any
    ) -> None:
        """Write one object of a source, with these options of Parquet's writer."""
        member = Member(source, partition)
        ordinal = self.ordinals.get(member, 0)
        self.ordinals[member] = ordinal + 1
        key = f"inbox/{source}/{partition}-{ordinal:05d}.parquet"
        table = rows if isinstance(rows, pa.Table) else table_of(rows)
        path = self.store.local_path(key)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, **{"row_group_size": ROW_GROUP, **options})
        found = self.store.stat(key)
        assert found is not None
        data = path.read_bytes()
        footer = read_footer(len(data), lambda start, length: data[start : start + length])
        assert isinstance(footer, Footer)
        columns = footer.columns
        part = {
            "key": key,
            "etag": found.etag,
            "size": found.size,
            "ordinal": ordinal,
            "rows": table.num_rows,
            "breaks": list(footer.breaks),
        }
        self.waiting.setdefault(member, []).append(
            {**part, "row_start": 0, "row_end": table.num_rows, "columns": columns}
        )

    def run(
        self, now: int, *, done: bool = False, decision: Decision | None = None
    ) -> tuple[MoveResult, MoveResult]:
        """One epoch over everything that waits; asserts that surveys, tables and counters agree."""
        blocked = {Member.parse(m) for m in self.state.get("blocked", ())}
        members = sorted(
            {*self.waiting, *(Member(s) for s in self.spec.sources if not self.ordinals)}
            | set(self.ordinals)
        )
        cut = Cut(tuple(self._slice(m, done=done, blocked=m in blocked) for m in members))
        cut = self._trimmed(cut, self._survey("reference", cut).survey.members)
        spark, reference = (self._survey(side, cut) for side in ("spark", "reference"))
        assert spark.survey.members == reference.survey.members
        self.now, self.epoch = now, self.epoch + 1
        survey = replace(reference.survey, now=now, released_max=self.released)
        decided = decision or decide(self.spec, self.state, survey)
        self.decisions.append(decided)
        moved = [
            self._move("spark", spark, decided),
            self._move("reference", reference, decided),
        ]
        self.state = decided.after or self.state
        for piece in cut.slices:
            self._consume(piece)
        self.compare(*moved)
        marks = filter(None, (self.released, moved[0].released_max))
        self.released = max(marks, default=None)
        return moved[0], moved[1]

    def run_alone(self, now: int, *, done: bool = False) -> MoveResult:
        """One epoch of the Spark mover only, over everything that waits: the oracle has no Spark SQL."""
        members = sorted({*self.waiting, *self.ordinals})
        cut = Cut(tuple(self._slice(m, done=done, blocked=False) for m in members))
        surveyed = self._survey("spark", cut)
        decided = decide(self.spec, self.state, replace(surveyed.survey, now=now))
        self.epoch += 1
        moved = self._move("spark", surveyed, decided)
        self.state = decided.after
        for piece in cut.slices:
            self._consume(piece)
        return moved

    def compare(self, spark: MoveResult, reference: MoveResult) -> None:
        """The two did the same."""
        for table in {*spark.files, *reference.files}:
            got, wanted = (
                self.rows(spark.files.get(table, ())),
                self.rows(reference.files.get(table, ())),
            )
            assert same(got, wanted), difference(table, got, wanted)
        assert spark.counters == reference.counters
        assert spark.counters.is_conserved()
        assert spark.next_position == reference.next_position
        assert spark.released_max == reference.released_max

    def rows(self, refs: tuple[FileRef, ...]) -> list[Row]:
        """Rows of table files, in a fixed order, without what may differ (texts of dead letters)."""
        found: list[Row] = []
        for ref in refs:
            path = self.store.local_path(ref.key)
            assert path is not None
            table = pq.read_table(path, partitioning=None)
            assert table.num_rows == ref.rows
            found += [
                {k: v for k, v in row.items() if k not in ("detail", "row")}
                for row in table.to_pylist()
            ]
        return sorted(found, key=lambda row: json.dumps(row, default=str, sort_keys=True))

    def table(self, name: str, side: str = "spark") -> list[Row]:
        """All rows of a table that one side has written."""
        return self.rows(
            tuple(ref for moved in self.sides[side].moved for ref in moved.files.get(name, ()))
        )

    def _slice(self, member: Member, *, done: bool, blocked: bool) -> Slice:
        parts = tuple(self.waiting.get(member, ()))
        if not parts or blocked:
            at = self._next(member)
            return Slice(member, at, at, pending=bool(parts), done=done and not parts)
        start = join_seq(parts[0]["ordinal"], parts[0]["row_start"])
        return Slice(
            member, start, join_seq(parts[-1]["ordinal"], parts[-1]["row_end"]), parts, done=done
        )

    def _next(self, member: Member) -> int:
        parts = self.waiting.get(member)
        return (
            join_seq(parts[0]["ordinal"], parts[0]["row_start"])
            if parts
            else join_seq(self.ordinals.get(member, 0), 0)
        )

    def _trimmed(self, cut: Cut, members: tuple[MemberSurvey, ...]) -> Cut:
        for piece, found in zip(cut.slices, members, strict=True):
            if found.barrier is not None and found.barrier.seq + 1 < piece.end:
                cut = cut.with_slice(_trim(piece, found.barrier.seq + 1))
        return cut

    def _survey(self, side: str, cut: Cut) -> SurveyedCut:
        # `run` counts the epoch behind its surveys.
        surveyed: SurveyedCut = self.sides[side].mover.survey(
            cut,
            self.state,
            self.folders(side, self.epoch + 1),
            self.released,
            self.sides[side].position,
        )
        return surveyed

    def folders(self, side: str, epoch: int) -> AttemptFolders:
        """Where one side writes in an epoch."""
        layout = BucketLayout(self.sides[side].pipeline)
        return AttemptFolders(layout, CheckpointId(0, epoch, "abcdef"))

    def _move(self, name: str, surveyed: SurveyedCut, decision: Decision) -> MoveResult:
        side = self.sides[name]
        order = MoveOrder(
            surveyed.cut,
            decision,
            side.segments,
            self.folders(name, self.epoch),
            side.position,
        )
        moved: MoveResult = side.mover.move(order, surveyed)
        side.segments, side.position = moved.segments, moved.next_position
        side.moved.append(moved)
        return moved

    def _consume(self, piece: Slice) -> None:
        left = []
        for part in self.waiting.get(piece.member, []):
            start = join_seq(part["ordinal"], part["row_start"])
            end = join_seq(part["ordinal"], part["row_end"])
            if end > max(piece.end, start):
                left.append({**part, "row_start": part["row_start"] + max(0, piece.end - start)})
        self.waiting[piece.member] = [part for part in left if part["row_start"] < part["row_end"]]


def _trim(piece: Slice, end: int) -> Slice:
    parts = []
    for part in piece.parts:
        start = join_seq(part["ordinal"], part["row_start"])
        if start < end:
            parts.append({**part, "row_end": min(part["row_end"], part["row_start"] + end - start)})
    return replace(piece, end=end, parts=tuple(parts), pending=True, done=False)


def rows_of(draw: random.Random, around: int) -> list[Row]:
    """A few rows about a time, some of them behind, some equal, some a barrier."""
    rows: list[Row] = []
    for _ in range(draw.randint(0, 9)):
        behind = draw.choice([0, 0, 0, 1, 3, 12, 30])
        time = (around + draw.randint(0, 8) - behind) * SECOND + draw.choice([0, 0, 500_000])
        kind = "stop" if draw.random() < 0.05 else draw.choice([None, "data"])
        value = draw.choice([None, draw.randint(0, 64) / 4])
        rows.append(
            {
                "t": time,
                "kind": kind,
                "k": draw.choice([None, "x", "y"]),
                "n": draw.randint(0, 5),
                "v": value,
            }
        )
    return rows


def feed_random_rows(pair: Pair, draw: random.Random, epochs: int) -> None:
    """Run a pipeline to its end with disorder, silence, late rows and barriers."""
    around = draw.choice([0, -50])
    for epoch in range(epochs):
        for source in "ab":
            for partition in draw.choice([["0"], ["0", "1"]]):
                if draw.random() < 0.85:
                    pair.put(source, rows_of(draw, around), partition)
        pair.run(epoch * SECOND)
        around += draw.choice([5, 10, 10, 25])
    for drain in range(1, 20):  # a barrier that the others never meet is closed by its timeout
        if not any(pair.waiting.values()):
            break
        pair.run(drain * 10 * SECOND)
    assert not any(pair.waiting.values())
    pair.run(300 * SECOND, done=True)


def table_of(rows: list[Row]) -> pa.Table:
    """Rows with ticks as times, as an Arrow table of the declared types."""
    columns = {f.name: [row.get(f.name) for row in rows] for f in _ARROW}
    times = pa.array(columns.pop("t"), pa.int64()).cast(TIMESTAMP)
    return pa.table(
        [times, *(pa.array(columns[f.name], f.type) for f in _ARROW if f.name != "t")],
        schema=_ARROW,
    )


def same(left: Any, right: Any) -> bool:
    """Equal, floats up to the order of their summands."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9) or (
            math.isnan(left) and math.isnan(right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def difference(table: str, got: list[Row], wanted: list[Row]) -> str:
    """The rows that only one side has."""
    only_got = [row for row in got if not any(same(row, other) for other in wanted)]
    only_wanted = [row for row in wanted if not any(same(row, other) for other in got)]
    return (
        f"{table}: {len(got)} rows, wanted {len(wanted)}\nonly spark: {only_got[:5]}\nonly"
        f" reference: {only_wanted[:5]}"
    )
