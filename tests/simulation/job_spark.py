"""A model of Spark for the simulation of jobs: checkpoints, batches and sinks, one step at a time.

A batch has three steps, and a kill may come after each: the plan, the write to the sink, the
commit. What is modelled was read in Spark 4.1 and in the connectors of Iceberg and Delta: when a
sink leaves a batch out, and what a query keeps in its checkpoint.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from deltalake import CommitProperties
from tests.sealed_queries.fake_checkpoint import FakeCheckpoint

from tidegate.jobs.sealed_queries.checkpoint_files import (
    find_planned_batch,
    list_committed_batches,
    read_offsets,
    read_query_id,
)
from tidegate.jobs.sealed_queries.checkpoint_folder import HostFolder
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts

_KEPT_BATCHES = 2  # as `minBatchesToRetain`
_SNAPSHOT_EVERY = 3  # batches
Rows = list[int]


class ModelSink(ABC):
    """A sink, which lives longer than all drivers."""

    @abstractmethod
    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Write a batch as Spark's sink would: perhaps not at all."""

    @abstractmethod
    def read_rows(self) -> Rows:
        """Return what a reader sees."""


class FileSink(ModelSink):
    """Spark's file sink: its log says which batches it has, and which rows readers see."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "_spark_metadata"

    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Leave out what is not above the newest batch of the log."""
        if batch > max(self._list_batches(), default=-1):
            self._log.mkdir(parents=True, exist_ok=True)
            (self._log / str(batch)).write_text(json.dumps(rows))

    def read_rows(self) -> Rows:
        """Read the batches of the log."""
        return [
            row
            for batch in self._list_batches()
            for row in json.loads((self._log / str(batch)).read_text())
        ]

    def _list_batches(self) -> list[int]:
        return sorted(int(path.name) for path in self._log.glob("[0-9]*"))


@dataclass
class Snapshot:
    """One commit of a table, with the methods that the product calls through Py4J."""

    number: int
    parent: int | None
    at: int
    notes: dict[str, str]
    rows: Rows | None  # None: all rows are deleted

    def snapshotId(self) -> int:  # noqa: N802 - Iceberg's names
        """Return its id."""
        return self.number

    def parentId(self) -> int | None:  # noqa: N802
        """Return the id of the one before."""
        return self.parent

    def timestampMillis(self) -> int:  # noqa: N802
        """Return when it was made."""
        return self.at

    def summary(self) -> dict[str, str]:
        """Return what the writer has noted."""
        return self.notes

    def operation(self) -> str:
        """Return what it does."""
        return "append" if self.rows is not None else "delete"


class TableSink(ModelSink):
    """An Iceberg table, with as much of its Java interface as a rollback calls."""

    def __init__(self, read_clock: Callable[[], int]) -> None:
        self._read_clock = read_clock
        self._all: list[Snapshot] = []
        self._current: int | None = None

    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Leave out what is not above the newest batch of the query in the present table."""
        last = next(
            (
                int(one.notes["spark.sql.streaming.epochId"])
                for one in self._list_present()
                if one.notes.get("spark.sql.streaming.queryId") == query_id
            ),
            -1,
        )
        if batch > last:
            prefix = "snapshot-property."
            marks = {key.removeprefix(prefix): value for key, value in facts.marks.items()}
            own = {
                "spark.sql.streaming.queryId": query_id,
                "spark.sql.streaming.epochId": str(batch),
            }
            self._commit(marks | own, rows)

    def read_rows(self) -> Rows:
        """Read what the present snapshot and those before it have added."""
        found: Rows = []
        for one in self._list_present():
            if one.rows is None:
                break
            found += one.rows
        return found

    def _list_present(self) -> Iterator[Snapshot]:
        at = self._current
        while at is not None:
            yield self._all[at]
            at = self._all[at].parent

    def _commit(self, notes: dict[str, str], rows: Rows | None) -> None:
        number = len(self._all)
        at = self._read_clock() // 1000
        self._all.append(Snapshot(number, self._current, at, notes, rows))
        self._current = number

    # Iceberg's interface, as `sink_restore` calls it.

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots."""
        return self._all

    def currentSnapshot(self) -> Snapshot | None:  # noqa: N802
        """Return the present one."""
        return None if self._current is None else self._all[self._current]

    def manageSnapshots(self) -> TableSink:  # noqa: N802
        """Return what changes the present snapshot."""
        return self

    def setCurrentSnapshot(self, number: int) -> TableSink:  # noqa: N802
        """Change it."""
        self._current = number
        return self

    def newDelete(self) -> TableSink:  # noqa: N802
        """Return what deletes rows."""
        return self

    def deleteFromRowFilter(self, _filter: object) -> TableSink:  # noqa: N802
        """Delete all."""
        return self

    def set(self, key: str, value: str) -> TableSink:
        """Note something in the commit that deletes."""
        self._commit({key: value}, None)
        return self

    def commit(self) -> None:
        """Do nothing: the calls before have done it."""


@dataclass
class DeltaVersion:
    """One commit of a Delta table: what it says of itself, and the rows that readers see then."""

    info: dict[str, Any]
    rows: Rows


class DeltaSink(ModelSink):
    """A Delta table, with as much of delta-rs as a rollback calls.

    A table keeps the newest batch of each query, and a rollback to an older version does not take
    that number back by itself: Delta leaves out every batch up to it.
    """

    def __init__(self) -> None:
        self._versions: list[DeltaVersion] = []
        self._newest: dict[str, int] = {}

    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Leave out what is not above the newest batch of the query."""
        if batch <= self._newest.get(query_id, -1):
            return
        self._newest[query_id] = batch
        info = {
            "operation": "STREAMING UPDATE",
            "operationParameters": {"queryId": query_id, "epochId": str(batch)},
        }
        self._add(info | facts.marks, self.read_rows() + rows)

    def read_rows(self) -> Rows:
        """Read the newest version."""
        return self._versions[-1].rows if self._versions else []

    def _add(self, info: dict[str, Any], rows: Rows) -> None:
        self._versions.append(DeltaVersion(info | {"version": len(self._versions)}, rows))

    # The interface of delta-rs, as `sink_restore` calls it.

    def history(self) -> list[dict[str, Any]]:
        """Return what all commits say of themselves, the newest first."""
        return [one.info for one in reversed(self._versions)]

    def delete(self, commit_properties: CommitProperties) -> None:
        """Delete all rows."""
        self._change("DELETE", [], commit_properties)

    def restore(self, target: int, commit_properties: CommitProperties) -> None:
        """Show the rows of an older version."""
        self._change("RESTORE", self._versions[target].rows, commit_properties)

    def _change(self, operation: str, rows: Rows, properties: CommitProperties) -> None:
        for one in properties.app_transactions or []:
            self._newest[one.app_id] = one.version
        self._add({"operation": operation, **(properties.custom_metadata or {})}, rows)


class KeyedSink(ModelSink):
    """A database by `foreachBatch`: a batch counts once. A function may take batches back."""

    def __init__(self) -> None:
        self._batches: dict[int, Rows] = {}

    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Leave out a number that is there, as Spark's guide shows it."""
        self._batches.setdefault(batch, rows)

    def take_back(self, _query: str, batch: int | None) -> None:
        """Delete later batches, as the script's `on_restore`."""
        last = -1 if batch is None else batch
        self._batches = {at: rows for at, rows in self._batches.items() if at <= last}

    def read_rows(self) -> Rows:
        """Read all batches."""
        return [row for batch in sorted(self._batches) for row in self._batches[batch]]


class RepeatingSink(ModelSink):
    """A sink that may get a batch twice: the spec names its query under `repeatable`."""

    def __init__(self) -> None:
        self._rows: Rows = []

    def write_batch(self, facts: WriterFacts, query_id: str, batch: int, rows: Rows) -> None:
        """Append."""
        self._rows += rows

    def read_rows(self) -> Rows:
        """Read everything."""
        return self._rows


class ModelCheckpoint(FakeCheckpoint):
    """A checkpoint that may exist already; a new one gets an id."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "metadata").exists():
            super().__init__(folder, partitions=1)
            self.put("metadata", json.dumps({"id": str(uuid.uuid4())}))
        self.folder, self.partitions, self.store = folder, 1, "hdfs"
        self.host = HostFolder(folder)


class DeadJVMError(Exception):
    """What Py4J raises when no JVM answers."""


@dataclass
class ModelJVM:
    """The JVM of one driver.

    Attributes:
        pid: known to the owners of a folder.
        alive: whether it runs.
    """

    pid: int
    alive: bool = True


@dataclass(eq=False)
class ModelQuery:
    """One query of a running driver, and PySpark's object for it.

    Args:
        jvm: in which it runs.
        folder: its checkpoint.
        sink: where its batches go.
        facts: what the script has said about it.
    """

    jvm: ModelJVM
    folder: Path
    sink: ModelSink
    facts: WriterFacts
    error: str | None = None
    ended: bool = False
    hangs: bool = False
    _written: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._made = ModelCheckpoint(self.folder)
        self.id = read_query_id(self._made.host) or ""

    @property
    def isActive(self) -> bool:  # noqa: N802 - PySpark's name
        """Whether the query runs, as Spark says."""
        self._ask()
        return not self.ended

    @property
    def status(self) -> dict[str, bool]:
        """What the query does, as Spark says."""
        self._ask()
        return {"isTriggerActive": self.hangs}

    def exception(self) -> str | None:
        """Return what has ended it, as Spark says."""
        self._ask()
        return self.error

    def _ask(self) -> None:
        if not self.jvm.alive:
            raise DeadJVMError("An error occurred while calling into a JVM that is gone")

    def take_step(self, arrived: int, poison: int | None, choose_size: Callable[[], int]) -> bool:
        """Do the next step; False if there is nothing to do.

        Args:
            arrived: number of rows of the input so far: they are 0, 1, 2 and so on.
            poison: a row that no batch can hold; None without one.
            choose_size: returns how many rows the next batch may have.
        """
        if not self.jvm.alive or self.ended or self.hangs:
            return False
        planned = find_planned_batch(self._made.host)
        done = list_committed_batches(self._made.host)
        if planned is None or planned in done:
            begin = 0 if planned is None else self._read_end(planned)
            if begin >= arrived:
                return False
            batch = 0 if planned is None else planned + 1
            self._made.plan(batch, {"rows": min(arrived, begin + choose_size())})
            return True
        begin = self._read_end(planned - 1) if planned else 0
        rows = list(range(begin, self._read_end(planned)))
        if planned not in self._written:
            if poison in rows:
                self.error, self.ended = f"row {poison} cannot be read", True
                return True
            self.sink.write_batch(self.facts, self.id, planned, rows)
            self._written.add(planned)
            return True
        self._made.write_state(planned + 1, snapshot=planned % _SNAPSHOT_EVERY == 0)
        self._made.put(f"commits/{planned}", "v1\n{}")
        for old in (one for one in done if one <= planned - _KEPT_BATCHES):
            for name in (f"offsets/{old}", f"commits/{old}"):
                (self.folder / name).unlink()
        return True

    def _read_end(self, batch: int) -> int:
        (offset,) = read_offsets(self._made.host, batch)
        return int(offset["rows"])


class ModelContext:
    """As much of a session as `_start_query` touches."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.conf = self
        self._jvm: Any = MagicMock()  # of a table, only names of classes are looked up in it

    def get(self, key: str, default: str | None = None) -> str | None:
        """Read a setting."""
        return self.settings.get(key, default)

    def set(self, key: str, value: str) -> None:
        """Write a setting."""
        self.settings[key] = value
