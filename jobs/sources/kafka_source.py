"""A Kafka topic, read by explicit offset ranges.

No consumer group: where a driver goes on stands in the manifest only.

A partition is a member, an offset a position. The range of a slice is cut between what the last
checkpoint read and the end the broker named when the epoch was planned, so the same range can be
read again. Offsets inside it may be missing (compaction, transaction markers); the mover counts
them. Offsets that retention removed before they were read are a gap: it is never stepped over
without a word (`KafkaOptions.on_gap`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from tidegate.errors import PoisonError, TransientError
from tidegate.jobs.engine.interfaces import DeadObject, Slice
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.input_view import STAGED_PREFIX
from tidegate.jobs.sources.object_decoding import BAD_REASON, BAD_TEXT
from tidegate.jobs.spec.pipeline import ReadLimits, SourceSpec

OFFSET_COLUMN: Final = "_at"
"""Column of a staged range: the lower half of the offset."""
_MAX_MESSAGES_PER_SLICE: Final = (
    1_000_000  # messages of one partition in one epoch, without a limit of its own
)
_OFFSETS_PER_ORDINAL: Final = 1 << 32

_ARROW_TYPES: Final = {
    "long": "int64",
    "int": "int32",
    "boolean": "bool",
    "float": "float",
    "timestamp": "timestamp[us, tz=UTC]",
    "date": "date32[day]",
}


class TopicOffsets(Protocol):
    """Asks the broker."""

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Partition -> (first offset held, offset behind the last that may be read).

        Args:
            settled: as the source's isolation level has it; without, open transactions count as
                well.

        Raises:
            TransientError: no broker answers, or there is no such topic.
        """
        ...

    def read_topic_id(self) -> str | None:
        """What tells the topic from another one of the same name.

        None from brokers that have no such ids.

        Raises:
            TransientError: as for `read_offsets`.
        """
        ...


def build_range_key(source: str, topic: str, partition: int, start: int, end: int) -> str:
    """What stands for an object's key: in parts, in dead letters."""
    return f"{STAGED_PREFIX}{source}/{topic}/{partition}/{start}-{end}"


class KafkaSource:
    """Implements `Source`. Keeps what the broker said for one epoch, for the lag."""

    def __init__(self, name: str, spec: SourceSpec, offsets: TopicOffsets) -> None:
        assert spec.kafka is not None  # noqa: S101 - the spec says so
        self.name, self.spec, self.kafka, self._offsets = name, spec, spec.kafka, offsets
        self._held: Mapping[int, tuple[int, int]] = {}
        self._topic: str | None = None
        self._known = False  # a partition of the topic was read before
        self._told: set[Member] = set()
        self._begun: dict[Member, dict[str, Any]] = {}
        self.lag: dict[str, int] = {}
        """Member -> messages behind the last planned slice."""

    def list_members(self) -> Sequence[Member]:
        """One for each partition the topic has now."""
        self._topic, self._held = self._offsets.read_topic_id(), self._offsets.read_offsets()
        self._known = bool(self._begun)
        self._told.clear()
        return [Member(self.name, str(partition)) for partition in sorted(self._held)]

    def plan(
        self,
        member: Member,
        resume: Mapping[str, Any] | None,
        limits: ReadLimits,
        *,
        blocked: bool = False,
    ) -> Slice:
        """The next range.

        Raises:
            PoisonError: offsets to be read next are gone, or the topic is not the one that was read
                before.
        """
        first, behind = self._held[int(member.partition)]
        self._known = self._known or resume is not None
        begins = resume is None and self.kafka.start == "latest"
        start, dead = self._resolve_start(
            member, resume or self._first_resume(member, first, behind), first, behind
        )
        behind = max(behind, start)
        most = limits.rows or _MAX_MESSAGES_PER_SLICE
        end = (
            start
            if blocked
            else min(
                behind, start + most, (start // _OFFSETS_PER_ORDINAL + 1) * _OFFSETS_PER_ORDINAL
            )
        )
        self.lag[str(member)] = behind - end
        parts = (self._build_part(member, start, end),) if end > start else ()
        at = start if not dead else dead[0].seq
        return Slice(
            member,
            at,
            end,
            parts,
            self._build_resume(end),
            pending=end < behind,
            dead=dead,
            begins=begins,
        )

    def trim(self, part: Slice, end: int) -> Slice:
        """The range cut short."""
        if end >= part.end:
            return part
        parts = (
            (self._build_part(part.member, self._first_offset(part), end),)
            if end > self._first_offset(part)
            else ()
        )
        return replace(
            part, end=end, parts=parts, resume={**part.resume, "offset": end}, pending=True
        )

    def find_changed_objects(self, part: Slice) -> tuple[DeadObject, ...]:
        """A range is fetched whole or not at all, so retention may have it now.

        But it must be of the topic that was planned.

        One answer serves every partition once, so a whole cut.

        Raises:
            TransientError: it is not, or the brokers do not answer.
        """
        if not self._told or part.member in self._told:
            self._told.clear()
            if self._offsets.read_topic_id() != self._topic:
                raise topic_changed_error(
                    self.name, f"{self.kafka.topic} was deleted and made again"
                )
        self._told.add(part.member)
        return ()

    def _first_offset(self, part: Slice) -> int:
        """The first offset that is read; a gap may stand before it."""
        return int(part.parts[0]["kafka"]["from"]) if part.parts else part.end

    def _first_resume(self, member: Member, first: int, behind: int) -> Mapping[str, Any]:
        """Where a partition begins that no checkpoint knows.

        `start` is for a topic that is new to the source. Partitions that are added to one it reads
        have nothing that it was not to read; Kafka numbers them behind the others, so those were
        planned before.
        """
        if member not in self._begun:
            self._begun[member] = self._build_resume(
                behind if self.kafka.start == "latest" and not self._known else first
            )
        return self._begun[member]

    def _build_resume(self, offset: int) -> dict[str, Any]:
        return {"offset": offset} | ({} if self._topic is None else {"topic": self._topic})

    def _resolve_start(
        self, member: Member, place: Mapping[str, Any], first: int, behind: int
    ) -> tuple[int, tuple[DeadObject, ...]]:
        start, topic = int(place["offset"]), place.get("topic", self._topic)
        if other := self._describe_other_topic(member, start, topic, behind):
            raise PoisonError(
                f"{self.kafka.topic} partition {member.partition} {other}: it is not the topic that"
                f" source {self.name} read",
                code="kafka.truncated",
                kept="everything sealed so far",
                advice=(
                    "was the topic deleted and made again? Give the source another name to read it"
                    " from its beginning"
                ),
            )
        if start >= first:
            return start, ()
        if self.kafka.on_gap == "fail":
            raise PoisonError(
                f"offsets {start} to {first - 1} of {self.kafka.topic} partition {member.partition}"
                f" are gone before source {self.name} read them (retention)",
                code="kafka.gap",
                kept="everything sealed so far",
                advice=(
                    "set kafka.on_gap: report to go on behind the gap; it is then entered as a dead"
                    " letter"
                ),
            )
        return first, (self._build_gap(member, start, first),)

    def _describe_other_topic(
        self, member: Member, start: int, topic: str | None, behind: int
    ) -> str | None:
        """What shows that it is another topic of the same name."""
        if topic is not None and self._topic is not None and topic != self._topic:
            return f"has the id {self._topic} instead of {topic}"
        # Without transactions' isolation, once, a source may have read further than it may now.
        if start > behind and start > (
            end := self._offsets.read_offsets(settled=False)[int(member.partition)][1]
        ):
            return f"ends at offset {end}, but {start} was read before"
        return None

    def _build_gap(self, member: Member, start: int, first: int) -> DeadObject:
        key = build_range_key(self.name, self.kafka.topic, int(member.partition), start, first)
        detail = f"offsets {start} to {first - 1} were removed by retention before they were read"
        return DeadObject(member, start, key, "", 0, "missing_offsets", detail)

    def _build_part(self, member: Member, start: int, end: int) -> dict[str, Any]:
        partition = int(member.partition)
        low = start % _OFFSETS_PER_ORDINAL
        columns = {name: _to_arrow_type(kind) for name, kind in self.spec.columns.items()}
        return {
            "key": build_range_key(self.name, self.kafka.topic, partition, start, end),
            "etag": "",
            "size": 0,
            "ordinal": start // _OFFSETS_PER_ORDINAL,
            "rows": end - start,
            "row_start": low,
            "row_end": low + end - start,
            "columns": {
                **columns,
                BAD_REASON: "string",
                BAD_TEXT: "string",
                OFFSET_COLUMN: "int64",
            },
            "kafka": {"topic": self.kafka.topic, "partition": partition, "from": start, "to": end},
        }


def _to_arrow_type(kind: str) -> str:
    return (
        "decimal128" + kind[7:].replace(" ", "").replace(",", ", ")
        if kind.startswith("decimal")
        else _ARROW_TYPES.get(kind, kind)
    )


def topic_changed_error(source: str, what: str) -> TransientError:
    """The error for a topic that is not as it was planned any more.

    The next plan says what that means.
    """
    return TransientError(
        f"source {source}: {what} while it was read",
        code="source.changed",
        kept="everything sealed so far; nothing of this epoch was sealed",
        advice="the epoch is planned again by itself",
        retry_after=1.0,
    )


_ADDRESS_ADVICE: Final = (
    "check that the brokers run and that their advertised addresses can be reached from here"
)


def kafka_unreachable_error(
    servers: str, why: str, advice: str = _ADDRESS_ADVICE
) -> TransientError:
    """The error for a broker that does not answer."""
    return TransientError(
        f"Kafka at {servers} could not be reached ({why})",
        code="kafka.unavailable",
        kept="everything sealed so far",
        advice=f"{advice}; tidegate tries again",
        retry_after=2.0,
    )
