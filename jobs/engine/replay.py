"""Checks a sealed epoch by its rows: runs it again and compares, or recounts its files.

Rule: docs/semantics.md, section 9.9.

From the same cut, clocks and requests the decider must come to the same decision. From the same
cut, decision and state segments the tables must hold the same rows. Nothing is sealed, and the
replayed files go to a scratch store.

The `--deep` part of verify opens every Parquet file that a checkpoint names and compares rows and
times with the manifest. Checksums show that the bytes are those that were sealed; this shows that
what was sealed adds up.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout
from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.row_counts import FLAGGED, RowCounts
from tidegate.checkpoints.store import NotFoundError, Store, StoreDeniedError
from tidegate.checkpoints.verify import DeepCheck, ObjectProblem, VerificationFinding
from tidegate.errors import TransientError, get_first_line
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE, PipelineSpec

from .arrow_tables import list_rows, read_parquet_object
from .epoch_engine import EpochPorts
from .errors import FileUnreadableError
from .interfaces import MoveOrder, join_table_files
from .manifest_writer import SPLICE_KIND
from .recorded_epochs import RecordedEpoch


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        checkpoint: the epoch's id.
        tables: table -> (rows sealed, rows replayed, rows that only one side has). A row that one
            side has more often counts for each time, and a row with another value on both sides.
        decided_differently: fields of the decision that differ; `after` is the decider's state.
    """

    checkpoint: str
    tables: dict[str, tuple[int, int, int]]
    decided_differently: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the decision and every table are equal."""
        return not self.decided_differently and all(
            difference == 0 for _, _, difference in self.tables.values()
        )


def replay_epoch(
    spec: PipelineSpec,
    epoch: Manifest,
    parent: Manifest | None,
    ports: EpochPorts,
    sealed: Store,
    scratch: Store,
) -> ReplayResult:
    """Decide and move one sealed epoch again, and compare its decision and its tables.

    Args:
        spec: the pipeline as it was when the epoch was sealed.
        epoch: the epoch to replay.
        parent: the epoch or merge before it on its lineage; None for the first.
        ports: these read inputs and segments from `sealed` and write to `scratch`. Sources are not
            asked; a dispatcher is needed if the spec has streams.
        sealed: where the pipeline lies. It must not show what is written to `scratch`: files of the
            driver have the same keys in both.
        scratch: where rows are written.

    Raises:
        NotFoundError: a file of the epoch is gone.
    """
    recorded = RecordedEpoch(spec, epoch, parent)
    order = rebuild_move_order(recorded)
    surveyed = ports.mover.survey(
        order.cut, recorded.state_before, order.folders, recorded.released_max
    )
    # Rows are moved by the sealed decision, not by the new one: if the two differ, the tables still
    # tell whether the mover is right.
    _, differences = recorded.decide_again(recorded.complete_survey(surveyed.survey))
    moved = ports.mover.move(order, surveyed)
    written = [moved.files, ports.driver_tables(order)]
    if ports.dispatcher is not None:
        before = parent.stream_state if parent else {}
        asked = [(verb, name) for verb, name in epoch.stream_state.get("asked", [])]
        written.append(ports.dispatcher.dispatch_rows(order, moved, before, asked).files)
    files = join_table_files(*written)
    tables = {}
    for table in sorted({*epoch.files, *files}):
        was = _read_rows_as_text(sealed, epoch.files.get(table, ()))
        now = _read_rows_as_text(scratch, files.get(table, ()))
        tables[table] = (was.total(), now.total(), ((was - now) + (now - was)).total())
    return ReplayResult(str(epoch.id), tables, differences)


def rebuild_move_order(epoch: RecordedEpoch) -> MoveOrder:
    """Return the order that the mover was given."""
    parent, manifest = epoch.parent, epoch.manifest
    return MoveOrder(
        cut=epoch.rebuild_cut(),
        decision=epoch.sealed_decision,
        segments=tuple(s for s in parent.segments if s.kind != SPLICE_KIND) if parent else (),
        folders=AttemptFolders(BucketLayout(manifest.pipeline), manifest.id),
        next_position=parent.next_position if parent else 0,
    )


def _read_rows_as_text(store: Store, files: Any) -> Counter[str]:
    """Rows as text, each with its number: rows are compared, not files.

    Provenance is part of a row.
    """
    rows: Counter[str] = Counter()
    for file in files:
        table = read_parquet_object(store, file.key)
        found = list_rows(table)
        if file.kind == f"table:{DEAD_LETTERS}":
            found = [{**row, "row": _sort_columns(row["row"])} for row in found]
        rows.update(repr(sorted(row.items())) for row in found)
    return rows


def _sort_columns(text: str | None) -> Any:
    """The row of a dead letter without the order of its columns, which no manifest keeps."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return text
    return sorted(found.items()) if isinstance(found, dict) else text


FLOAT_TOLERANCE: Final = 1e-9
"""Relative tolerance of doubles, absolute below 1: a sum of doubles depends on its order."""


def values_differ(left: Any, right: Any) -> bool:
    """Return whether two values differ; doubles, also in lists, may differ by `FLOAT_TOLERANCE`.

    >>> values_differ([1.0, float("nan")], [1.0 + 1e-12, float("nan")])
    False
    >>> values_differ(None, 0.0)
    True
    """
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) != math.isnan(right)
        return not math.isclose(left, right, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) != len(right) or any(map(values_differ, left, right))
    return bool(left != right)


# The column that a segment's bounds are about, by kind and mover.
_TIME_COLUMNS = {"order": ("_et", "_time"), "edges": ("_et", "_time"), "window": ("_we",)}


def make_content_check(store: Store) -> DeepCheck:
    """Return a check of the rows in a checkpoint's files, for the `deep` argument of `verify`."""
    return lambda manifest: _ContentCheck(store, manifest).collect_findings()


# Not every row of these tables was counted by the epoch: the late table has a row for each output
# that a row missed, and a dead letter without a row is an object.
_COUNTED_ROWS: dict[str, Callable[[Any], int]] = {
    EVENTS: lambda rows: int(rows.num_rows),
    LATE: lambda rows: int(pc.sum(pc.equal(rows["output"], EVENTS)).as_py() or 0),
    DEAD_LETTERS: lambda rows: int(rows.num_rows - rows["row"].null_count),
}


@dataclass(frozen=True)
class _ContentCheck:
    """One manifest's check; each file is read once."""

    _store: Store
    _manifest: Manifest
    _found: list[VerificationFinding] = field(default_factory=list)

    def collect_findings(self) -> list[VerificationFinding]:
        """Everything that does not add up."""
        tables = {
            table: [self._read_counted_rows(file) for file in files]
            for table, files in self._manifest.files.items()
        }
        for table, rows in tables.items():
            for file, own in zip(self._manifest.files[table], rows, strict=True):
                if own:
                    self._check_epoch_column(file, own)
        # Totals say nothing if a file is missing, and the missing file is reported already.
        if all(rows is not None for files in tables.values() for rows in files):
            self._check_totals(tables)
        self._check_segments()
        return self._found

    def _add_finding(
        self, key: str, detail: str, problem: ObjectProblem = ObjectProblem.CONTENT
    ) -> None:
        self._found.append(VerificationFinding(key=key, problem=problem, detail=detail))

    def _read_counted_rows(self, file: FileRef) -> Any | None:
        """The rows of a file; None, with a finding, when they are not what the manifest says."""
        try:
            rows = read_parquet_object(self._store, file.key)
        except NotFoundError:
            problem, detail = ObjectProblem.MISSING, "does not exist"
        except (TransientError, StoreDeniedError) as error:
            # Evidence of nothing: the file may be whole.
            problem, detail = ObjectProblem.UNKNOWN, error.message
        except (FileUnreadableError, OSError) as error:
            problem, detail = ObjectProblem.CONTENT, get_first_line(error)
        else:
            if rows.num_rows == file.rows:
                return rows
            problem = ObjectProblem.CONTENT
            detail = f"has {rows.num_rows:,} rows instead of {file.rows:,}"
        self._add_finding(file.key, detail, problem)
        return None

    def _check_epoch_column(self, file: FileRef, rows: Any) -> None:
        """Rows of a table belong to this epoch."""
        if "_epoch" in rows.column_names and set(pc.unique(rows["_epoch"]).to_pylist()) - {
            self._manifest.slot
        }:
            self._add_finding(file.key, f"holds rows of other epochs than {self._manifest.slot}")

    def _check_totals(self, tables: dict[str, list[Any]]) -> None:
        """Rows by table against the epoch's own counters.

        A splice merges rows that were counted when they were read.
        """
        if self._manifest.is_merge:
            return
        epoch = self._manifest.epoch_counters
        wanted = {
            EVENTS: epoch.released,
            LATE: epoch.late + epoch.rejected + RowCounts.of_sources(epoch.per_source)[FLAGGED],
            DEAD_LETTERS: epoch.dead_lettered + epoch.rule_quarantined,
        }
        if EVENTS not in tables:
            # `outputs` may leave the table out. That rows were not simply lost from the manifest is
            # proven by its hash, which the next manifest holds.
            del wanted[EVENTS]
        for table, count in wanted.items():
            seen = sum(_COUNTED_ROWS[table](rows) for rows in tables.get(table, []))
            if seen != count:
                self._add_finding(
                    f"table {table}",
                    f"has {seen:,} rows of epoch {self._manifest.slot}, but {count:,} were counted",
                )
        for window, count in epoch.windows.items():
            seen = sum(rows.num_rows for rows in tables.get(window, []))
            if seen != count:
                self._add_finding(
                    f"table {window}", f"has {seen:,} results, but {count:,} were counted"
                )

    def _check_segments(self) -> None:
        """Segments: bounds, and the rows that still wait."""
        # Segments are never rewritten when rows leave: what lies below the release mark has left.
        waiting, complete = 0, True
        released = ReleaseMark(*self._manifest.release_after)
        for file in self._manifest.segments:
            rows = self._read_counted_rows(file)
            if rows is None:
                complete = False
                continue
            names = _TIME_COLUMNS.get(file.kind.partition(":")[0], ())
            column = next((name for name in names if name in rows.column_names), None)
            if column is None:
                continue
            times = rows[column].cast(pa.int64())
            if file.min_time is not None:
                self._check_time_bounds(file, times)
            if file.kind == "order":
                waiting += count_waiting_rows(rows["_section"], times, released)
        if complete and waiting != self._manifest.counters.retained:
            self._add_finding(
                "the order buffer",
                f"holds {waiting:,} waiting rows, but {self._manifest.counters.retained:,} were"
                " counted",
            )

    def _check_time_bounds(self, file: FileRef, times: Any) -> None:
        seen = pc.min_max(times).as_py()
        if (seen["min"], seen["max"]) != (file.min_time, file.max_time):
            self._add_finding(
                file.key,
                f"reaches from {seen['min']} to {seen['max']}, not from {file.min_time} to"
                f" {file.max_time}",
            )


def count_waiting_rows(sections: Any, times: Any, released: ReleaseMark) -> int:
    """Return how many rows are at or above the mark up to which everything has left."""
    later = pc.greater(sections, released.section)
    same = pc.and_(pc.equal(sections, released.section), pc.greater_equal(times, released.time))
    return int(pc.sum(pc.or_(later, same)).as_py() or 0)
