"""The real Spark mover on the bench.

Rows become objects in a store, the decider decides, Spark moves.

All cases of a run share one Spark session (`SparkRoom`); each is a pipeline of its own with its own
frontier, segments and folder. A case is a few dozen epochs of a few rows, so several run at the
same time.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.oracle.tables import read_rows_of, user_schema
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import FileRef
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult, Slice, join_seq, split_seq
from tidegate.jobs.eventtime.decider import create_initial_state, decide, list_blocked_members
from tidegate.jobs.eventtime.decision_types import Decision, Member, ReleaseMark
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.jobs.spark.mover import SparkMover

Values = Mapping[str, Any]


@dataclass(frozen=True)
class SparkRoom:
    """A Spark session and a folder, for all cases of a run."""

    session: SparkSession
    folder: Path
    numbers: Iterator[int] = field(default_factory=count)

    def bench(self, spec: PipelineSpec) -> SparkBench:
        """A pipeline of its own."""
        return SparkBench(spec, self.session, self.folder / f"{next(self.numbers):05d}")


@contextmanager
def open_room() -> Iterator[SparkRoom]:
    """Start Spark for a run, and stop it behind the last case."""
    from tidegate.jobs.spark.spark_session import open_session

    source = {"path": "x", "schema": {"t": "timestamp"}, "event_time": "t", "lag": 0}
    spec = PipelineSpec.model_validate(
        {"name": "conformance", "sources": {"s": source}, "spark": {"jvm": "quick"}}
    )
    folder = Path(mkdtemp(prefix="tidegate-conformance-"))
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = open_session(spec)
    try:
        yield SparkRoom(session, folder)
    finally:
        session.stop()
        shutil.rmtree(folder, ignore_errors=True)


class SparkBench:
    """The real decider and the Spark mover: survey, decide, move, as the engine does."""

    def __init__(self, spec: PipelineSpec, session: SparkSession, folder: Path) -> None:
        self.spec = spec
        self.session = session
        self.folder = folder
        self.store = LocalStore(folder / "store")
        self.mover = self._mover()
        self.state = create_initial_state(spec)
        self.segments: tuple[FileRef, ...] = ()
        self.released: ReleaseMark | None = None
        self.position = 0
        self.buffered = 0
        self.epochs = 0
        self.ordinals = dict.fromkeys(spec.sources, 0)
        self.firsts: dict[str, list[int]] = {name: [0] for name in spec.sources}
        self.waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in spec.sources}
        self.ended: set[str] = set()

    def epoch(
        self, rows: Mapping[str, Sequence[Values]], end: Collection[str] = ()
    ) -> tuple[Decision, MoveResult]:
        """One epoch over everything that has arrived: an object for each source that brought rows.

        Raises:
            TidegateError: the pipeline refuses the rows.
        """
        for name, given in rows.items():
            if given:
                self._put(name, given)
        self.ended |= set(end)
        self.epochs += 1
        standing = list_blocked_members(self.state)
        cut = Cut(
            tuple(self._slice(name, blocked=Member(name) in standing) for name in self.spec.sources)
        )
        folders = AttemptFolders(BucketLayout("bench"), CheckpointId(0, self.epochs, "be0c4a"))
        surveyed = self.mover.survey(cut, self.state, folders, self.released)
        for found in surveyed.survey.members:
            part = next(s for s in cut.slices if s.member == found.member)
            if found.barrier is not None and found.barrier.seq + 1 < part.end:
                cut = cut.with_slice(self._trimmed(part, found.barrier.seq + 1))
                surveyed = self.mover.survey(cut, self.state, folders, self.released)
        survey = replace(
            surveyed.survey,
            now=self.epochs,
            buffered_rows=self.buffered,
            released_max=self.released,
        )
        decision = decide(self.spec, self.state, survey)
        order = MoveOrder(
            cut,
            decision,
            self.segments,
            folders,
            self.position,
        )
        moved: MoveResult = self.mover.move(order, surveyed)
        if not moved.counters.is_conserved():
            raise AssertionError(f"rows do not add up: {moved.counters}")
        self._take(cut, decision, moved)
        return decision, moved

    def table(self, moved: MoveResult, name: str) -> list[dict[str, Any]]:
        """Rows that an epoch wrote to a table.

        Positions count a source's rows from zero, as on the other benches.
        """
        rows = [row for ref in moved.files.get(name, ()) for row in read_rows_of(self.store, ref)]
        return [
            row if "_seq" not in row else {**row, "_seq": self._number(row["_source"], row["_seq"])}
            for row in rows
        ]

    def _number(self, source: str, seq: int) -> int:
        ordinal, row = split_seq(seq)
        return self.firsts[source][ordinal] + row

    def restore(self) -> None:
        """State through JSON, as a manifest holds it; a new mover on the same store."""
        self.state = json.loads(json.dumps(self.state))
        self.mover.close()
        self.mover = self._mover()

    def close(self) -> None:
        """Remove everything of this pipeline; the session stays."""
        self.mover.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mover(self) -> SparkMover:
        from tidegate.jobs.spark.mover import SparkMover

        return SparkMover(self.store, self.spec, self.folder / "work", session=self.session)

    def _put(self, name: str, rows: Sequence[Values]) -> None:
        ordinal = self.ordinals[name]
        self.ordinals[name] += 1
        self.firsts[name].append(self.firsts[name][-1] + len(rows))
        key = f"in/{name}/{ordinal:06d}.parquet"
        path = self.store.local_path(key)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table(
            {
                column: _array([row.get(column) for row in rows], kind)
                for column, kind in user_schema(self.spec)
            }
        )
        pq.write_table(table, path)
        found = self.store.stat(key)
        assert found is not None
        own = {
            "key": key,
            "etag": found.etag,
            "size": found.size,
            "ordinal": ordinal,
            "rows": len(rows),
        }
        columns = {column.name: str(column.type) for column in table.schema}
        self.waiting[name].append({**own, "row_start": 0, "row_end": len(rows), "columns": columns})

    def _slice(self, name: str, *, blocked: bool) -> Slice:
        parts, next_seq = tuple(self.waiting[name]), join_seq(self.ordinals[name], 0)
        if blocked or not parts:
            start = join_seq(parts[0]["ordinal"], parts[0]["row_start"]) if parts else next_seq
            return Slice(
                Member(name),
                start,
                start,
                pending=bool(parts),
                done=not parts and name in self.ended,
            )
        start = join_seq(parts[0]["ordinal"], parts[0]["row_start"])
        return Slice(Member(name), start, next_seq, parts, done=name in self.ended)

    def _trimmed(self, part: Slice, end: int) -> Slice:
        kept = []
        for piece in part.parts:
            start = join_seq(piece["ordinal"], piece["row_start"])
            if start < end:
                kept.append(
                    {**piece, "row_end": min(piece["row_end"], piece["row_start"] + end - start)}
                )
        return replace(part, end=end, parts=tuple(kept), pending=True, done=False)

    def _take(self, cut: Cut, decision: Decision, moved: MoveResult) -> None:
        self.state = decision.after
        self.segments, self.position, self.buffered = (
            moved.segments,
            moved.next_position,
            moved.counters.retained,
        )
        if moved.released_max is not None:
            self.released = (
                moved.released_max
                if self.released is None
                else max(self.released, moved.released_max)
            )
        for part in cut.slices:
            left = [_rest(piece, part.end) for piece in self.waiting[part.member.source]]
            self.waiting[part.member.source] = [
                piece for piece in left if piece["row_start"] < piece["row_end"]
            ]


def _rest(piece: dict[str, Any], end: int) -> dict[str, Any]:
    """What a cut that ends here leaves of an object."""
    read = max(0, end - join_seq(piece["ordinal"], 0))
    return {**piece, "row_start": min(max(piece["row_start"], read), piece["row_end"])}


def _array(values: list[Any], kind: Any) -> Any:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    return pa.array(values, kind)
