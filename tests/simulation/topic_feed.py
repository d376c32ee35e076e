"""A Kafka topic as a source: the real one, whose questions go to a model of the brokers.

A topic has two partitions. Some messages are in transactions: until one ends, nothing behind its
first message may be read, and a transaction that is aborted leaves offsets without a message. So
does the marker at the end of each transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.engine.harness import SECOND
from tests.oracle.rows import RawRow
from tests.simulation.coverage import KINDS, LOAD

from tidegate.errors import TransientError
from tidegate.jobs.engine.interfaces import Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.kafka_source import KafkaSource
from tidegate.jobs.spec.pipeline import SourceSpec

if TYPE_CHECKING:
    from tests.simulation.world import World

_PARTITIONS = 2
_FAR = 10**9 * SECOND  # behind every row of a schedule
_Message = dict[str, Any]


class _Partition:
    """Messages by offset, None where there is none, and where an open transaction begins."""

    def __init__(self) -> None:
        self.messages: list[_Message | None] = []
        self.open_from: int | None = None

    def end_transaction(self, *, aborts: bool) -> None:
        """Commit or abort the open transaction, if there is one."""
        if self.open_from is not None:
            if aborts:
                gone = len(self.messages) - self.open_from
                self.messages[self.open_from :] = [None] * gone
            self.messages.append(None)
            self.open_from = None

    @property
    def settled_end(self) -> int:
        """The offset up to which may be read."""
        return len(self.messages) if self.open_from is None else self.open_from


class TopicFeed:
    """One source: its producers, and what the judge knows of it. A topic never ends."""

    def __init__(self, name: str, spec: SourceSpec, world: World) -> None:
        self.name, self.spec, self.world = name, spec, world
        self._partitions = [_Partition() for _ in range(_PARTITIONS)]

    def open(self) -> KafkaSource:
        """The source of one driver."""
        return KafkaSource(self.name, self.spec, self)

    def append(self, *rows: Mapping[str, Any], partition: str = "0") -> None:
        """More messages in one of the partitions, and barriers in each.

        Some of them wait for the end of their transaction.
        """
        rng = self.world.rng
        chosen = rng.choice(self._partitions)
        for each in self._partitions:
            each.end_transaction(aborts=False)
            if each is not chosen:
                each.messages += [dict(row) for row in rows if row["kind"] == "cut"]
        if rng.random() < 0.2:  # a transaction that comes to nothing
            chosen.open_from = len(chosen.messages)
            chosen.messages += map(dict, rows)
            chosen.end_transaction(aborts=True)
        if rng.random() < 0.4:
            chosen.open_from = len(chosen.messages)
        chosen.messages += map(dict, rows)

    def end(self, partition: str = "0") -> None:
        """Every transaction ends, and a last message promises that no earlier row will come."""
        chosen = self._partitions[int(partition)]
        chosen.end_transaction(aborts=False)
        chosen.messages.append({"t": _FAR, "v": None, "kind": "cti", "n": None})

    def close(self) -> None:
        """Nothing to give back."""

    # What the source asks of brokers (`TopicOffsets`).

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Return the first and the last offset of each partition, or no answer."""
        self._travel("offsets")
        ends = (p.settled_end if settled else len(p.messages) for p in self._partitions)
        return {number: (0, end) for number, end in enumerate(ends)}

    def read_topic_id(self) -> str:
        """Return an id that never changes, or no answer."""
        self._travel("topic id")
        return "topic"

    def _travel(self, what: str) -> None:
        self.world.travel()
        kind = self.world.fate("brokers", what, KINDS[LOAD])
        if kind == "503":
            raise TransientError(f"no answer: {what}", code="source.kafka_unavailable")
        self.world.endure(kind)

    # What the mover and the judge ask.

    def list_members(self) -> Sequence[Member]:
        """The partitions."""
        return [Member(self.name, str(number)) for number in range(_PARTITIONS)]

    def rows(self, part: Slice) -> Iterator[RawRow]:
        """The rows of a slice."""
        messages = self._partitions[int(part.member.partition)].messages
        for piece in part.parts:
            for number in range(piece["row_start"], piece["row_end"]):
                offset = join_seq(piece["ordinal"], number)
                if (message := messages[offset]) is not None:
                    yield RawRow(offset, message)

    def list_placed(self) -> Iterator[tuple[Member, int, _Message]]:
        """Every message that was committed, with its member and its offset."""
        for member, partition in zip(self.list_members(), self._partitions, strict=True):
            for offset, message in enumerate(partition.messages):
                if message is not None:
                    yield member, offset, message

    def end_position(self, member: Member) -> int:
        """Where one is who has read everything."""
        return len(self._partitions[int(member.partition)].messages)
