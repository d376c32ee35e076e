"""Objects in a folder of a bucket, read in the order of their keys.

They are Parquet, or read as if they were (`view`). A position is the object's ordinal and the row
in it (`join_seq`). The ordinal counts the objects consumed so far, good or bad, in key order, so
the same resume point gives the same slices again. Two things a producer must keep: keys grow in
arrival order (an object that appears *before* the last consumed key is never seen; with
``discovery.order: arrival`` it is, see `arrivals`), and an object is written once and stays.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tidegate.checkpoints.store import NotFoundError, ObjectInfo, Store
from tidegate.errors import TransientError
from tidegate.jobs.engine.interfaces import DeadObject, Slice, join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sources.arrival_log import ArrivalLog, BucketNotifications
from tidegate.jobs.sources.input_view import InputView, resolve_source_folder
from tidegate.jobs.sources.object_decoding import BAD_REASON, BAD_TEXT
from tidegate.jobs.sources.parquet_footers import BadObject, Footer, parse_footer, read_footer
from tidegate.jobs.sources.table_versions import TableVersions, open_table_versions, rewrite_reason
from tidegate.jobs.spec.pipeline import ReadLimits, SourceSpec

DONE_MARKER = "_DONE"
_MAX_OBJECTS_PER_SLICE = (
    1000  # per epoch without a limit of its own: one LIST page, and a cut that fits into a manifest
)
_READ_THREADS = 4  # footers are waiting time, not work
_WHOLE_READ_BYTES = (
    256 << 10
)  # bytes: below, one GET of everything is faster than a HEAD and a range
_MAX_CACHED_FOOTERS = 8192  # footers; about 10 MB
_UNKNOWN_SIZE = -1  # the size of an object known by name only
_MAX_UNMATCHED_KEYS = (
    10_000  # notices of folders that are no members (yet); the safety listing finds their objects
)


@dataclass(frozen=True, slots=True)
class _InspectedObject:
    """One object as it was when it was looked at."""

    key: str
    etag: str
    size: int
    content: Footer | BadObject

    @property
    def row_count(self) -> int:
        return self.content.rows if isinstance(self.content, Footer) else 0


class ObjectSource:
    """A source whose events lie as objects below one path. Keeps no state but a cache of footers.

    Args:
        name: of the source.
        spec: of the source.
        store: the pipeline's; an `InputView` of it unless all objects are Parquet in the pipeline's
            own store.
        pipeline: its name, for the log of arrivals.
        notices: names below the source's folder that notifications name, for the log of arrivals.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        spec: SourceSpec,
        store: Store,
        *,
        pipeline: str = "",
        notices: BucketNotifications | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.spec = spec
        self.store, self.prefix = store, resolve_source_folder(name, spec)
        self._pipeline, self._notices, self._clock = pipeline, notices, clock
        self._logs: dict[Member, ArrivalLog] = {}
        self._table: TableVersions | None = None
        self._heard: list[str] = []
        self._whole: set[Member] = set()  # listed from end to end since their end marker was seen
        self._cache: OrderedDict[tuple[str, str, int, float | None], _InspectedObject] = (
            OrderedDict()
        )
        self.backlog: dict[str, int] = {}
        """Member -> objects known behind the last planned slice; in the order of keys at most one.

        Nobody lists on.
        """

    def list_members(self) -> Sequence[Member]:
        """One member for the source, or one per folder directly below its path."""
        if self.spec.partition_by == "source":
            return [Member(self.name)]
        return [
            Member(self.name, folder)
            for folder in self.store.list_folders(self.prefix)
            if _is_data_name(folder)
        ]

    def plan(
        self,
        member: Member,
        resume: Mapping[str, Any] | None,
        limits: ReadLimits,
        *,
        blocked: bool = False,
    ) -> Slice:
        """The next slice from `resume`, at most `limits`.

        1. Look for the end marker first: whatever a producer wrote before it is then in the
            listing.
        2. List behind the last consumed key, one object more than wanted: it tells whether more is
          pending.
        3. Read the footers of the listed objects, and cut at the limits.

        Raises:
            TransientError: the store cannot be reached, or an object vanished while it was looked
                at.
        """
        at = _ResumePoint.from_json(resume)
        if blocked:
            waiting = at.open is not None or bool(self._list_next_entries(member, at, 1))
            self.backlog[str(member)] = self._count_backlog(member, at.ordinal, pending=waiting)
            return Slice(member, at.seq, at.seq, resume=at.to_json(), pending=waiting)
        ended = (
            self.spec.bounded
            and self.store.stat(self._member_folder(member) + DONE_MARKER) is not None
        )
        opened = [self._reopen_pinned_object(at.open)] if at.open else []
        wanted = (limits.objects or _MAX_OBJECTS_PER_SLICE) - len(opened)
        entries = self._list_next_entries(member, at, wanted + 1, ended=ended)
        cutter = _SliceBuilder(member, at, limits)
        for facts in chain(opened, self._inspect_entries(entries[:wanted])):
            if not cutter.add_object(facts):
                break
        pending = cutter.at.open is not None or cutter.listed < len(entries)
        self.backlog[str(member)] = self._count_backlog(member, cutter.at.ordinal, pending=pending)
        return cutter.build_slice(pending=pending, done=ended and not pending)

    def trim(self, part: Slice, end: int) -> Slice:
        """The slice cut short to end at `end`.

        Behind a barrier row, always inside one of its objects or at its end.
        """
        if end >= part.end:
            return part
        ordinal, row = split_seq(end)
        kept = [
            p
            for p in part.parts
            if p["ordinal"] <= ordinal and join_seq(p["ordinal"], p["row_start"]) < end
        ]
        last = kept[-1]
        resume = _ResumePoint(ordinal, row, None, _pin_object(last))
        if row >= last["rows"]:
            resume = _ResumePoint(ordinal + 1, 0, last["key"], None)
        if last["ordinal"] == ordinal:
            kept[-1] = {**last, "row_end": min(row, last["row_end"])}
        dead = tuple(d for d in part.dead if d.seq < end)
        return replace(
            part,
            end=end,
            parts=tuple(kept),
            resume=resume.to_json(),
            pending=True,
            done=False,
            dead=dead,
        )

    def find_changed_objects(self, part: Slice) -> tuple[DeadObject, ...]:
        """Objects of a planned slice that are no longer what was pinned.

        The same key with a new ETag, or gone.
        """
        heads = self._map_in_threads(lambda p: self.store.stat(p["key"]), part.parts)
        return tuple(
            _build_changed_object(part.member, join_seq(p["ordinal"], p["row_start"]), p, head)
            for p, head in zip(part.parts, heads, strict=True)
            if head is None or head.etag != p["etag"]
        )

    @property
    def late_uploads(self) -> int:
        """Objects found behind a greater name since this process started."""
        return sum(log.late for log in self._logs.values())

    def _member_folder(self, member: Member) -> str:
        return (
            self.prefix
            if self.spec.partition_by == "source"
            else f"{self.prefix}{member.partition}/"
        )

    def _list_next_entries(
        self, member: Member, at: _ResumePoint, count: int, *, ended: bool = False
    ) -> list[ObjectInfo]:
        """The next `count` objects behind the resume point, in the source's order."""
        if self.spec.table is not None:
            log = self._update_table_log(member)
        elif self.spec.discovery.order == "keys":
            return self._list_data_objects(member, at.listed_after, count)
        else:
            log = self._get_arrival_log(member)
            log.discover(
                self._take_notified_keys(member), everything=ended and member not in self._whole
            )
            self._whole |= {member} if ended else set()
        return [
            ObjectInfo(key, _UNKNOWN_SIZE, "", None)
            for key in log.read_keys(at.ordinal + (at.open is not None), count)
        ]

    def _count_backlog(self, member: Member, ordinal: int, *, pending: bool) -> int:
        log = self._logs.get(member)
        return int(pending) if log is None else len(log) - ordinal

    def _update_table_log(self, member: Member) -> ArrivalLog:
        """The log, with what the table's newest commits added."""
        assert self.spec.table is not None  # noqa: S101 - asked by the caller
        if self._table is None:
            home = (
                self.store.locate_source(self.name)
                if isinstance(self.store, InputView)
                else (self.store, self.prefix)
            )
            self._table = open_table_versions(self.name, self.spec.table, *home)
        log = self._get_arrival_log(member)
        for version, names in self._table.list_versions_after(log.version):
            log.enter_version([self.prefix + name for name in names], version)
        return log

    def _get_arrival_log(self, member: Member) -> ArrivalLog:
        if member not in self._logs:
            self._logs[member] = ArrivalLog(
                self.store,
                self.store,
                f"{self._pipeline}/arrivals/{member.source}/{member.partition}/",
                self._member_folder(member),
                is_data=_is_data_name,
                safety=self.spec.discovery.safety_listing / 1e6,
                clock=self._clock,
            )
        return self._logs[member]

    def _take_notified_keys(self, member: Member) -> list[str]:
        """What notifications named in this member's folder.

        What they named elsewhere waits for its own member.
        """
        if self._notices is not None:
            self._heard += [self.prefix + name for name in self._notices.take_keys()]
        folder = self._member_folder(member)
        mine = [key for key in self._heard if key.startswith(folder)]
        self._heard = [key for key in self._heard if not key.startswith(folder)][
            -_MAX_UNMATCHED_KEYS:
        ]
        return mine

    def _list_data_objects(self, member: Member, after: str | None, count: int) -> list[ObjectInfo]:
        """The next `count` data objects; names with a leading underscore or dot are not data."""
        folder = self._member_folder(member)
        found: list[ObjectInfo] = []
        while len(found) < count:
            asked = count - len(found) + 1  # one to spare for an end marker
            page = list(self.store.list_objects(folder, start_after=after, limit=asked))
            found += [e for e in page if _is_data_name(e.key[len(folder) :])]
            if len(page) < asked:
                break
            after = page[-1].key
        return found[:count]

    def _reopen_pinned_object(self, pinned: Mapping[str, Any]) -> _InspectedObject:
        """The object whose beginning was consumed already.

        It must still be the one that was pinned.
        """
        content: Footer | BadObject = Footer(pinned["rows"], pinned["columns"])
        head = self.store.stat(pinned["key"])
        if head is None or head.etag != pinned["etag"]:
            content = BadObject("changed_object", _describe_change(pinned, head))
        return _InspectedObject(pinned["key"], pinned["etag"], pinned["size"], content)

    def _inspect_entries(self, entries: Sequence[ObjectInfo]) -> Iterator[_InspectedObject]:
        """Facts in key order, a batch ahead of the consumer at most.

        A row limit may end the cut early.
        """
        rest = iter(entries)
        while batch := list(islice(rest, 4 * _READ_THREADS)):
            yield from self._map_in_threads(self._inspect_entry, batch)

    def _map_in_threads(self, task: Any, items: Sequence[Any]) -> list[Any]:
        if len(items) < 2:
            return [task(item) for item in items]
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            return list(pool.map(task, items))

    def _inspect_entry(self, entry: ObjectInfo) -> _InspectedObject:
        said = rewrite_reason(entry.key[len(self.prefix) :])
        if self.spec.table is not None and said is not None:
            return _InspectedObject(entry.key, "", 0, BadObject("table_rewritten", said))
        if entry.size == _UNKNOWN_SIZE:  # an arrival: what it is now is asked now
            head = self.store.stat(entry.key)
            if head is None:
                gone = BadObject(
                    "changed_object", "the object is gone; it was there when it was found"
                )
                return _InspectedObject(entry.key, "", 0, gone)
            entry = head
        identity = (entry.key, entry.etag, entry.size, entry.modified)
        facts = self._cache.get(identity)
        if facts is None:
            facts = self._read_content(entry)
            self._cache[identity] = facts
            while len(self._cache) > _MAX_CACHED_FOOTERS:
                self._cache.popitem(last=False)
        return facts

    def _read_content(self, entry: ObjectInfo) -> _InspectedObject:
        try:
            seen = (
                self.store.inspect_object(entry.key) if isinstance(self.store, InputView) else None
            )
            if seen is not None:
                etag, size, copy = seen
                content = (
                    copy
                    if isinstance(copy, BadObject)
                    else self._check_columns(_read_copy_footer(copy))
                )
                return _InspectedObject(entry.key, etag, size, content)
            if entry.size <= _WHOLE_READ_BYTES:
                found = self.store.get(entry.key)
                content = self._check_columns(parse_footer(found.data, len(found.data)))
                return _InspectedObject(entry.key, found.etag, len(found.data), content)
            head = self.store.stat(entry.key)
            if head is None:
                raise NotFoundError.for_uri(self.store.uri(entry.key))
            content = self._check_columns(
                read_footer(head.size, partial(self.store.get_range, entry.key))
            )
            return _InspectedObject(entry.key, head.etag, head.size, content)
        except NotFoundError as error:
            raise TransientError(
                f"{self.store.uri(entry.key)} vanished while source {self.name} looked at it",
                code="source.vanished",
                kept="everything sealed so far",
                advice="objects of a source must stay; the cut is planned again without it",
                retry_after=1.0,
            ) from error

    def _check_columns(self, content: Footer | BadObject) -> Footer | BadObject:
        """A column nobody declared makes its object a dead letter.

        A missing one reads as null, but for the event time.
        """
        if isinstance(content, BadObject):
            return content
        unknown = [
            c
            for c in content.columns
            if c not in self.spec.columns and c not in (BAD_TEXT, BAD_REASON)
        ]
        if unknown and self.spec.evolution.added == "dead_letter":
            declared = ", ".join(self.spec.columns)
            return BadObject(
                "unknown_column", f"column {', '.join(unknown)} is not in the schema ({declared})"
            )
        if self.spec.event_time not in content.columns:
            return BadObject(
                "missing_column",
                f"there is no column {self.spec.event_time}, which is the event time",
            )
        missing = [c for c in self.spec.columns if c not in content.columns]
        if missing and self.spec.evolution.missing == "dead_letter":
            return BadObject("missing_column", f"there is no column {', '.join(missing)}")
        return content


def _read_copy_footer(copy: Path) -> Footer | BadObject:
    with copy.open("rb") as file:

        def read_range(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        return read_footer(copy.stat().st_size, read_range)


@dataclass(frozen=True, slots=True)
class _ResumePoint:
    """Where a member goes on.

    The next row, and behind which key: one consumed whole, or the open object, consumed in part.
    """

    ordinal: int = 0
    row: int = 0
    key: str | None = None
    open: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> _ResumePoint:
        return cls(raw["ordinal"], raw["row"], raw["key"], raw["open"]) if raw else cls()

    def to_json(self) -> dict[str, Any]:
        return {"ordinal": self.ordinal, "row": self.row, "key": self.key, "open": self.open}

    @property
    def seq(self) -> int:
        return join_seq(self.ordinal, self.row)

    @property
    def listed_after(self) -> str | None:
        """Listing goes on behind this key."""
        return self.open["key"] if self.open else self.key


class _SliceBuilder:
    """Takes objects in order until a limit is reached."""

    def __init__(self, member: Member, at: _ResumePoint, limits: ReadLimits) -> None:
        self.member = member
        self.at = at
        self.start = at.seq
        self.listed = 0
        self._left, self._bytes = limits.rows, limits.bytes
        self._parts: list[dict[str, Any]] = []
        self._dead: list[DeadObject] = []

    def add_object(self, facts: _InspectedObject) -> bool:
        """Consume an object, whole or up to the row limit. False when the slice is full."""
        if self._left == 0 or (self._bytes is not None and self._bytes <= 0):
            return False
        if self._bytes is not None:
            self._bytes -= facts.size
        self.listed += self.at.open is None
        first, rows = self.at.row, facts.row_count
        if isinstance(facts.content, BadObject):
            bad = facts.content
            self._dead.append(
                DeadObject(
                    self.member,
                    self.at.seq,
                    facts.key,
                    facts.etag,
                    facts.size,
                    bad.reason,
                    bad.detail,
                )
            )
            self.at = _ResumePoint(self.at.ordinal + 1, 0, facts.key, None)
            return True
        last = rows if self._left is None else min(rows, first + self._left)
        part = _build_object_part(facts, facts.content, self.at.ordinal, first, last)
        if last > first:
            self._parts.append(part)
        if self._left is not None:
            self._left -= last - first
        if last < rows:
            self.at = _ResumePoint(self.at.ordinal, last, None, _pin_object(part))
            return False
        self.at = _ResumePoint(self.at.ordinal + 1, 0, facts.key, None)
        return True

    def build_slice(self, *, pending: bool, done: bool) -> Slice:
        return Slice(
            self.member,
            self.start,
            self.at.seq,
            tuple(self._parts),
            self.at.to_json(),
            pending,
            done,
            tuple(self._dead),
        )


def _build_object_part(
    facts: _InspectedObject, footer: Footer, ordinal: int, first: int, last: int
) -> dict[str, Any]:
    return {
        "key": facts.key,
        "etag": facts.etag,
        "size": facts.size,
        "ordinal": ordinal,
        "rows": footer.rows,
        "row_start": first,
        "row_end": last,
        "columns": footer.columns,
    }


def _pin_object(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("key", "etag", "size", "rows", "columns")}


def _describe_change(pinned: Mapping[str, Any], head: ObjectInfo | None) -> str:
    found = "it is gone" if head is None else f"its ETag is {head.etag}"
    return f"the object was pinned with ETag {pinned['etag']}, now {found}"


def _build_changed_object(
    member: Member, seq: int, pinned: Mapping[str, Any], head: ObjectInfo | None
) -> DeadObject:
    detail = _describe_change(pinned, head)
    return DeadObject(
        member, seq, pinned["key"], pinned["etag"], pinned["size"], "changed_object", detail
    )


def _is_data_name(name: str) -> bool:
    """Whether a name below the source's folder is data.

    No part of it starts with an underscore or a dot.
    """
    return (
        bool(name)
        and not name.endswith("/")
        and all(piece[0] not in "_." for piece in name.split("/") if piece)
    )
