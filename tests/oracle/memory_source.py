"""A source in memory: rows as Python dicts, for tests and the simulation. Timestamps are ticks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.oracle.rows import RawRow
from tidegate.jobs.engine.interfaces import DeadObject, Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import ReadLimits


class MemorySource:
    """Partitions are lists of rows that only grow; a position is an index into its list.

    Share one instance between engine and movers: it is the world, not a driver's memory of it.
    """

    def __init__(
        self, name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    ) -> None:
        self.name = name
        self._rows: dict[Member, list[dict[str, Any]]] = {}
        self._ended: set[Member] = set()
        for partition, given in (rows if rows is not None else {"0": ()}).items():
            self.append(*given, partition=partition)

    def append(self, *rows: Mapping[str, Any], partition: str = "0") -> None:
        """More rows arrive; a partition not seen before appears."""
        self._rows.setdefault(Member(self.name, partition), []).extend(dict(row) for row in rows)

    def end(self, partition: str = "0") -> None:
        """No more rows will come."""
        self._ended.add(Member(self.name, partition))

    def remove(self, partition: str) -> None:
        """The partition disappears."""
        self._rows.pop(Member(self.name, partition))

    def list_placed(self) -> Iterator[tuple[Member, int, dict[str, Any]]]:
        """Every row, with its member and its position."""
        for member, rows in self._rows.items():
            yield from ((member, position, row) for position, row in enumerate(rows))

    def end_position(self, member: Member) -> int:
        """Where one is who has read everything."""
        return len(self._rows[member])

    def close(self) -> None:
        """Nothing to give back."""

    def list_members(self) -> Sequence[Member]:
        """Partitions that exist now."""
        return sorted(self._rows)

    def plan(
        self,
        member: Member,
        resume: Mapping[str, Any] | None,
        limits: ReadLimits,
        *,
        blocked: bool = False,
    ) -> Slice:
        """The next slice from `resume`."""
        start = int(resume["next"]) if resume else 0
        available = len(self._rows[member]) - start
        take = 0 if blocked else min(available, limits.rows or available)
        return self._slice(member, start, start + take)

    def trim(self, part: Slice, end: int) -> Slice:
        """The slice cut short."""
        return replace(self._slice(part.member, part.start, end), dead=part.dead)

    def find_changed_objects(self, _part: Slice) -> Sequence[DeadObject]:
        """Nothing: partitions only grow."""
        return ()

    def rows(self, part: Slice) -> Iterator[RawRow]:
        """The rows of a slice (for the oracle mover)."""
        for piece in part.parts:
            for index in range(piece["row_start"], piece["row_end"]):
                yield RawRow(index, self._rows[part.member][index])

    def _slice(self, member: Member, start: int, end: int) -> Slice:
        behind = len(self._rows[member]) > end
        return Slice(
            member=member,
            start=start,
            end=end,
            parts=({"row_start": start, "row_end": end},) if end > start else (),
            resume={"next": end},
            pending=behind,
            done=not behind and member in self._ended,
        )
