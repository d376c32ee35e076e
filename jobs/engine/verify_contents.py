"""The `--deep` part of verify: reads the rows of a checkpoint's files and recounts them.

It opens every Parquet file that a checkpoint names and compares rows and times with the manifest.
Checksums show that the bytes are those that were sealed; this shows that what was sealed adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.checkpoints.manifest import FileRef, Manifest
from tidegate.checkpoints.row_counts import FLAGGED, RowCounts
from tidegate.checkpoints.store import NotFoundError, Store, StoreDeniedError
from tidegate.checkpoints.verify import DeepCheck, ObjectProblem, VerificationFinding
from tidegate.errors import TransientError
from tidegate.jobs.eventtime.decision_types import ReleaseMark
from tidegate.jobs.spec.pipeline import DEAD_LETTERS, EVENTS, LATE

# The column that a segment's bounds are about, by kind and mover.
_TIME_COLUMNS = {"order": ("_et", "_time"), "edges": ("_et", "_time"), "window": ("_we",)}


def make_content_check(store: Store) -> DeepCheck:
    """Return a check of the rows in a checkpoint's files, for the `deep` argument of `verify`."""
    return lambda manifest: _ContentCheck(store, manifest).collect_findings()


class _ContentCheck:
    """One manifest's check; each file is read once."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        # Not every row of these tables was counted by the epoch: the late table has a row for each
        # output that a row missed, and a dead letter without a row is an object.
        self._counts: dict[str, Callable[[Any], int]] = {
            EVENTS: lambda rows: int(rows.num_rows),
            LATE: lambda rows: int(pc.sum(pc.equal(rows["output"], EVENTS)).as_py() or 0),
            DEAD_LETTERS: lambda rows: int(rows.num_rows - rows["row"].null_count),
        }

    def collect_findings(self) -> list[VerificationFinding]:
        """Everything that does not add up."""
        found: list[VerificationFinding] = []
        tables = {
            table: [self._read_counted_rows(file, found) for file in files]
            for table, files in self._manifest.files.items()
        }
        for table, rows in tables.items():
            found += [
                f
                for file, own in zip(self._manifest.files[table], rows, strict=True)
                if own
                for f in self._check_epoch_column(file, own)
            ]
        # Totals say nothing if a file is missing, and the missing file is reported already.
        if all(rows is not None for files in tables.values() for rows in files):
            found += self._check_totals(tables)
        return [*found, *self._check_segments()]

    def _read_counted_rows(self, file: FileRef, found: list[VerificationFinding]) -> Any | None:
        """The rows of a file; None, with a finding, when they are not what the manifest says."""
        try:
            rows = pq.read_table(pa.BufferReader(self._store.get(file.key).data))
        except NotFoundError:
            problem, detail = ObjectProblem.MISSING, "does not exist"
        except (TransientError, StoreDeniedError) as error:
            # Evidence of nothing: the file may be whole.
            problem, detail = ObjectProblem.UNKNOWN, error.message
        except (pa.ArrowException, OSError) as error:
            problem = ObjectProblem.CONTENT
            detail = f"is not a readable Parquet file: {error}"
        else:
            if rows.num_rows == file.rows:
                return rows
            problem = ObjectProblem.CONTENT
            detail = f"has {rows.num_rows:,} rows instead of {file.rows:,}"
        found.append(VerificationFinding(key=file.key, problem=problem, detail=detail))
        return None

    def _check_epoch_column(self, file: FileRef, rows: Any) -> Iterator[VerificationFinding]:
        """Rows of a table belong to this epoch."""
        if "_epoch" in rows.column_names and set(pc.unique(rows["_epoch"]).to_pylist()) - {
            self._manifest.slot
        }:
            yield _make_content_finding(
                file.key, f"holds rows of other epochs than {self._manifest.slot}"
            )

    def _check_totals(self, tables: dict[str, list[Any]]) -> Iterator[VerificationFinding]:
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
            seen = sum(self._counts[table](rows) for rows in tables.get(table, []))
            if seen != count:
                yield _make_content_finding(
                    f"table {table}",
                    f"has {seen:,} rows of epoch {self._manifest.slot}, but {count:,} were counted",
                )
        for window, count in epoch.windows.items():
            seen = sum(rows.num_rows for rows in tables.get(window, []))
            if seen != count:
                yield _make_content_finding(
                    f"table {window}", f"has {seen:,} results, but {count:,} were counted"
                )

    def _check_segments(self) -> Iterator[VerificationFinding]:
        """Segments: bounds, and the rows that still wait."""
        found: list[VerificationFinding] = []
        # Segments are never rewritten when rows leave: what lies below the release mark has left.
        waiting, complete = 0, True
        released = ReleaseMark(*self._manifest.release_after)
        for file in self._manifest.segments:
            rows = self._read_counted_rows(file, found)
            if rows is None:
                complete = False
                continue
            names = _TIME_COLUMNS.get(file.kind.partition(":")[0], ())
            column = next((name for name in names if name in rows.column_names), None)
            if column is None:
                continue
            times = rows[column].cast(pa.int64())
            if file.min_time is not None:
                found += self._check_time_bounds(file, times)
            if file.kind == "order":
                waiting += _count_waiting_rows(rows["_section"], times, released)
        yield from found
        if complete and waiting != self._manifest.counters.retained:
            yield _make_content_finding(
                "the order buffer",
                f"holds {waiting:,} waiting rows, but {self._manifest.counters.retained:,} were"
                " counted",
            )

    def _check_time_bounds(self, file: FileRef, times: Any) -> Iterator[VerificationFinding]:
        seen = pc.min_max(times).as_py()
        if (seen["min"], seen["max"]) != (file.min_time, file.max_time):
            yield _make_content_finding(
                file.key,
                f"reaches from {seen['min']} to {seen['max']}, not from {file.min_time} to"
                f" {file.max_time}",
            )


def _count_waiting_rows(sections: Any, times: Any, released: ReleaseMark) -> int:
    """Rows at or above the mark up to which everything has left."""
    later = pc.greater(sections, released.section)
    same = pc.and_(pc.equal(sections, released.section), pc.greater_equal(times, released.time))
    return int(pc.sum(pc.or_(later, same)).as_py() or 0)


def _make_content_finding(key: str, detail: str) -> VerificationFinding:
    return VerificationFinding(key=key, problem=ObjectProblem.CONTENT, detail=detail)
