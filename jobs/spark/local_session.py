"""A session without a JVM: the jobs of `python_tasks` run in this process, one task after another.

It has the few operations of RDDs that these jobs use, and no others. So test cases of pipelines
need no Spark, and an epoch that needs Spark SQL fails with an AttributeError of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class LocalSession:
    """What `SparkMover` takes for a session."""

    def __init__(self) -> None:
        self.sparkContext = LocalContext()

    def stop(self) -> None:
        """There is nothing to stop."""


class LocalContext:
    """The context of a `LocalSession`."""

    defaultParallelism = 1  # noqa: N815 - as PySpark has it

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}

    def parallelize(self, items: Iterable[Any], parts: int) -> LocalRows:
        """One partition for each item, as the jobs ask for; without items they are empty."""
        found = [[item] for item in items]
        return LocalRows(lambda: found or [[] for _ in range(parts)], parts)

    def union(self, rows: list[LocalRows]) -> LocalRows:
        """The partitions of all of them."""
        parts = sum(own.getNumPartitions() for own in rows)
        return LocalRows(lambda: [part for own in rows for part in own.glom()], parts)

    def accumulator(self, value: Any, kind: Any) -> LocalAccumulator:
        """What tasks add to."""
        return LocalAccumulator(value, kind)


class LocalAccumulator:
    """Adds at once."""

    def __init__(self, value: Any, kind: Any) -> None:
        self.value = value
        self._kind = kind

    def add(self, value: Any) -> None:
        """Add what a task has found."""
        self.value = self._kind.addInPlace(self.value, value)


class LocalRows:
    """An RDD; it is computed when it is asked for, and kept if it is to be."""

    def __init__(self, compute: Callable[[], list[list[Any]]], parts: int) -> None:
        self._compute = compute
        self._parts = parts
        self._keeps = False
        self._kept = list[list[Any]]()

    def mapPartitions(self, body: Callable[[Iterator[Any]], Iterable[Any]]) -> LocalRows:  # noqa: N802
        """Call the body of a task for each partition."""
        return self.mapPartitionsWithIndex(lambda _, rows: body(rows))

    def mapPartitionsWithIndex(  # noqa: N802
        self, body: Callable[[int, Iterator[Any]], Iterable[Any]]
    ) -> LocalRows:
        """As `mapPartitions`, with the number of the partition."""
        return LocalRows(
            lambda: [list(body(i, iter(rows))) for i, rows in enumerate(self.glom())],
            self._parts,
        )

    def coalesce(self, parts: int) -> LocalRows:
        """All rows in one partition."""
        assert parts == 1  # noqa: S101 - the jobs ask for no other number
        return LocalRows(lambda: [self.collect()], 1)

    def partitionBy(self, parts: int, choose: Callable[[Any], int]) -> LocalRows:  # noqa: N802
        """Pairs by what `choose` says of their keys."""

        def divide() -> list[list[Any]]:
            found: list[list[Any]] = [[] for _ in range(parts)]
            for pair in self.collect():
                found[choose(pair[0]) % parts].append(pair)
            return found

        return LocalRows(divide, parts)

    def persist(self, level: Any) -> None:
        """Keep what is computed next."""
        self._keeps = True

    def unpersist(self) -> None:
        """Forget it."""
        self._keeps = False
        self._kept = []

    @property
    def _jrdd(self) -> LocalRows:
        return self

    def count(self) -> int:
        """Compute, and count."""
        return len(self.collect())

    def collect(self) -> list[Any]:
        """Compute all rows."""
        return [row for part in self.glom() for row in part]

    def glom(self) -> list[list[Any]]:
        """Compute the rows of each partition."""
        if self._kept:
            return self._kept
        found = self._compute()
        if self._keeps:
            self._kept = found
        return found

    def getNumPartitions(self) -> int:  # noqa: N802
        """How many tasks compute it."""
        return self._parts
