"""Objects in a folder of a bucket as a source, read in the order of their keys or of their arrival.

They are Parquet, or look like it (`input_view`). A position is the object's ordinal and the row in
it (`join_seq`). The ordinal counts the objects consumed so far, good or bad, so the same resume
point gives the same slices again. A producer must keep two rules. Keys grow in arrival order: an
object that appears *before* the last consumed key is never seen, except with
``discovery.order: arrival`` (`arrival_log`). And an object is written once and stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

import structlog

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.local_store import LocalStore, escape_name
from tidegate.checkpoints.store import ObjectInfo, Store, map_in_threads
from tidegate.jobs.engine.interfaces import DeadObject, Slice, join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import ReadLimits, SourceSpec
from tidegate.json_types import JsonObject, JsonView

from .arrival_log import ArrivalLog, BucketNotifications
from .input_view import InputView, resolve_source_folder
from .object_decoding import FRAMING, BadObject, describe_framing
from .object_inspection import (
    READ_THREADS,
    UNKNOWN_SIZE,
    Footer,
    InspectedObject,
    ObjectInspector,
    describe_change,
    restore_footer,
)
from .table_versions import TableVersions, open_table_versions

DONE_MARKER = "_DONE"
"""Name of the object after which a member of a bounded source has no more objects."""
# In one epoch, if the spec has no limit: one page of a LIST, and a cut that fits into a manifest.
_MAX_OBJECTS_PER_SLICE = 1000
# Notified keys in folders that are not members (yet); the safety listing finds their objects.
_MAX_UNMATCHED_KEYS = 10_000
# Newest listed names of a member that are searched for skipped objects: ten pages of a LIST.
_MAX_KNOWN_KEYS = 10_000

_log = structlog.get_logger("tidegate.sources")


class ObjectSource:
    """Implements `Source`. Keeps no state but caches.

    Args:
        name: name of the source.
        spec: spec of the source.
        store: the pipeline's store; an `InputView` of it unless all objects are Parquet in the
            pipeline's own store.
        pipeline: name of the pipeline, for the arrival log.
        notices: notifications of new objects below the source's folder, for the arrival log.
        clock: seconds, monotonic.

    Attributes:
        backlog: member -> known objects after the last planned slice. In the order of keys at most
            one, because nothing lists further.
        ends_input: members end after the objects that are there, without an end marker.
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
        self.name, self.spec = name, spec
        self.store, self.prefix = store, resolve_source_folder(name, spec)
        self._pipeline, self._notices, self._clock = pipeline, notices, clock
        self._inspector = ObjectInspector(name, spec, store, self.prefix)
        self._logs: dict[Member, ArrivalLog] = {}
        self._table: TableVersions | None = None
        self._notified_keys: list[str] = []
        self._listed_to_end: set[Member] = set()  # since their end marker was seen
        self._searches: dict[Member, _SkippedObjectSearch] = {}
        self.backlog: dict[str, int] = {}
        self.ends_input = False

    def list_members(self) -> Sequence[Member]:
        """Return one member for the source, or one per folder directly below its path.

        Folders whose names begin with ``_`` or a dot are left out.
        """
        if self.spec.partition_by == "source":
            return [Member(self.name)]
        folders = self.store.list_folders(self.prefix)
        return [Member(self.name, folder) for folder in folders if _is_data_name(folder)]

    def open_logs(self) -> None:
        """Read the arrival logs of all members; `plan` would do it, but has less time."""
        if self.spec.table is not None or self.spec.discovery.order == "arrival":
            for member in self.list_members():
                self._get_arrival_log(member)

    def plan(
        self, member: Member, resume: JsonView | None, limits: ReadLimits, *, blocked: bool = False
    ) -> Slice:
        """Return the next slice after `resume`, within `limits`; by default at most 1,000 objects.

        1. Look for the end marker first: the listing then has what a producer wrote before it.
        2. List one object more than needed, which says whether more is pending.
        3. Read the footers of the listed objects, and cut at the limits.

        Raises:
            TransientError: the store cannot be reached, or an object vanished while it was read.
            PoisonError, ConfigurationError: of a table, as for `TableVersions`.
        """
        at = _ResumePoint.from_json(resume)
        if blocked:
            waiting = at.open is not None or bool(self._list_next_entries(member, at, 1))
            self._set_backlog(member, at.ordinal, pending=waiting)
            return Slice(member, at.seq, at.seq, resume=asdict(at), pending=waiting)
        marker = self._member_folder(member) + DONE_MARKER
        ended = self.ends_input or (self.spec.bounded and self.store.stat(marker) is not None)
        opened = [self._inspector.reopen_pinned_object(at.open)] if at.open else []
        wanted = (limits.objects or _MAX_OBJECTS_PER_SLICE) - len(opened)
        entries = self._list_next_entries(member, at, wanted + 1, ended=ended)
        builder = _SliceBuilder(member, at, limits, describe_framing(self.spec))
        for inspected in chain(opened, self._inspector.inspect_entries(entries[:wanted])):
            if not builder.add_object(inspected):
                break
        pending = builder.at.open is not None or builder.consumed_entries < len(entries)
        self._set_backlog(member, builder.at.ordinal, pending=pending)
        return builder.build_slice(pending=pending, done=ended and not pending)

    def trim(self, part: Slice, end: int) -> Slice:
        """Return the slice cut short at `end`, a position in one of its objects or after one."""
        if end >= part.end:
            return part
        ordinal, row = split_seq(end)
        # Parts that begin at `end` or after it are left to the next slice.
        kept = [p for p in part.parts if join_seq(p["ordinal"], p["row_start"]) < end]
        last = kept[-1]
        footer = restore_footer(last)
        planned = part.resume["open"] if part.resume else None
        if planned is not None and planned["key"] == last["key"]:
            footer = footer.add_breaks(restore_footer(planned))
        pinned = describe_framing(self.spec) | _pin_object(last, footer, row)
        resume = _ResumePoint(ordinal, row, None, pinned)
        if row >= last["rows"]:  # consumed whole after all
            resume = _ResumePoint(ordinal + 1, 0, last["key"], None)
        if last["ordinal"] == ordinal:
            kept[-1] = {**last, "row_end": min(row, last["row_end"])}
        return replace(
            part,
            end=end,
            parts=tuple(kept),
            resume=asdict(resume),
            pending=True,
            done=False,
            dead=tuple(d for d in part.dead if d.seq < end),
        )

    def find_changed_objects(self, part: Slice) -> tuple[DeadObject, ...]:
        """Return the objects of a planned slice that are gone or have another ETag now."""
        # An overwritten object would give other rows at every later reading of this epoch.
        heads = map_in_threads(
            lambda pinned: self.store.stat(pinned["key"]), part.parts, READ_THREADS
        )
        return tuple(
            DeadObject(
                part.member,
                join_seq(pinned["ordinal"], pinned["row_start"]),
                pinned["key"],
                pinned["etag"],
                pinned["size"],
                "changed_object",
                describe_change(pinned, head),
            )
            for pinned, head in zip(part.parts, heads, strict=True)
            if head is None or head.etag != pinned["etag"]
        )

    @property
    def late_uploads(self) -> int:
        """Objects with a name below the greatest known one, found since this process started.

        In the order of arrival they are read; in the order of keys they are not.
        """
        found = [log.late for log in self._logs.values()]
        return sum(found) + sum(len(search.skipped) for search in self._searches.values())

    def _member_folder(self, member: Member) -> str:
        by_source = self.spec.partition_by == "source"
        return self.prefix if by_source else f"{self.prefix}{member.partition}/"

    def _set_backlog(self, member: Member, ordinal: int, *, pending: bool) -> None:
        log = self._logs.get(member)
        self.backlog[str(member)] = int(pending) if log is None else len(log) - ordinal

    def _list_next_entries(
        self, member: Member, at: _ResumePoint, count: int, *, ended: bool = False
    ) -> list[ObjectInfo]:
        """Return the next `count` objects after the resume point, in the source's order."""
        if self.spec.table is not None:
            log = self._update_table_log(member)
        elif self.spec.discovery.order == "keys":
            return self._list_by_key(member, at, count)
        else:
            log = self._get_arrival_log(member)
            everything = ended and member not in self._listed_to_end
            # A bounded member ends only after a listing that began after its end marker was there.
            log.discover(self._take_notified_keys(member), everything=everything)
            self._listed_to_end |= {member} if ended else set()
        keys = log.read_keys(at.ordinal + (at.open is not None), count)
        return [ObjectInfo(key, UNKNOWN_SIZE, "", None) for key in keys]

    def _list_by_key(self, member: Member, at: _ResumePoint, count: int) -> list[ObjectInfo]:
        search = self._searches.setdefault(
            member, _SkippedObjectSearch(at.listed_after, self._clock())
        )
        if self._clock() - search.searched_at >= self.spec.discovery.safety_listing / 1e6:
            self._search_skipped_objects(member, search, at.listed_after)
        entries = self._list_data_objects(member, at.listed_after, count)
        search.add_listed(entries)
        return entries

    def _search_skipped_objects(
        self, member: Member, search: _SkippedObjectSearch, upto: str | None
    ) -> None:
        """Find the objects that appeared behind the position of reading since they were listed."""
        search.searched_at = self._clock()
        # As many as are known, and some more: one search need not find all.
        entries = self._list_data_objects(member, search.begin, 2 * len(search.known))
        skipped = {
            entry.key
            for entry in entries
            if upto is not None and entry.key <= upto and entry.key not in search.known
        }
        if fresh := sorted(skipped - search.skipped):
            search.skipped |= skipped
            _log.warning(
                "objects_skipped",
                source=str(member),
                objects=len(fresh),
                first=fresh[0],
                behind=upto,
                remedy="set discovery.order: arrival, or give each producer a source of its own",
            )

    def _update_table_log(self, member: Member) -> ArrivalLog:
        """Return the log after entering what the table's newest commits added."""
        assert self.spec.table is not None  # noqa: S101 - checked by the caller
        if self._table is None:
            self._table = open_table_versions(self.name, self.spec.table, *self._locate_home())
        log = self._get_arrival_log(member)
        for version, names in self._table.list_versions_after(log.version):
            log.enter_version([self.prefix + name for name in names], version)
        return log

    def _get_arrival_log(self, member: Member) -> ArrivalLog:
        if member not in self._logs:
            is_local = isinstance(self._locate_home()[0], LocalStore)
            self._logs[member] = ArrivalLog(
                self.store,
                BucketLayout(self._pipeline).arrivals_prefix(member.source, member.partition),
                self._member_folder(member),
                is_data=_is_data_name,
                safety=self.spec.discovery.safety_listing / 1e6,
                clock=self._clock,
                escape_name=escape_name if is_local else str,
            )
        return self._logs[member]

    def _locate_home(self) -> tuple[Store, str]:
        """Return the store of the objects, and their folder there."""
        if isinstance(self.store, InputView):
            return self.store.locate_source(self.name)
        return self.store, self.prefix

    def _take_notified_keys(self, member: Member) -> list[str]:
        """Return the notified keys in this member's folder; others wait for their own member."""
        if self._notices is not None:
            self._notified_keys += [self.prefix + name for name in self._notices.take_keys()]
        folder = self._member_folder(member)
        member_keys = [key for key in self._notified_keys if key.startswith(folder)]
        others = [key for key in self._notified_keys if not key.startswith(folder)]
        self._notified_keys = others[-_MAX_UNMATCHED_KEYS:]
        return member_keys

    def _list_data_objects(self, member: Member, after: str | None, count: int) -> list[ObjectInfo]:
        folder = self._member_folder(member)
        entries: list[ObjectInfo] = []
        while len(entries) < count:
            limit = count - len(entries) + 1  # one more, for an end marker
            page = list(self.store.list_objects(folder, start_after=after, limit=limit))
            entries += [entry for entry in page if _is_data_name(entry.key[len(folder) :])]
            if len(page) < limit:
                break
            after = page[-1].key
        return entries[:count]


@dataclass(slots=True)
class _SkippedObjectSearch:
    """What one process knows about the names of one member that is read in the order of keys.

    Attributes:
        begin: the name after which every listed name is in `known`.
        searched_at: time of the last search, by the source's clock.
        known: the newest listed names, in the order of their listing.
        skipped: names that appeared behind the position of reading.
    """

    begin: str | None
    searched_at: float
    known: dict[str, None] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)

    def add_listed(self, entries: Sequence[ObjectInfo]) -> None:
        """Remember listed names, and forget the oldest beyond `_MAX_KNOWN_KEYS`."""
        self.known |= dict.fromkeys(entry.key for entry in entries)
        while len(self.known) > _MAX_KNOWN_KEYS:
            oldest = next(iter(self.known))
            del self.known[oldest]
            # Not always greater: after a restore older names are listed again.
            self.begin = max(self.begin or "", oldest)


@dataclass(frozen=True)
class _ResumePoint:
    """Where a member continues: at a row of an ordinal.

    `key` is the last object that was consumed whole, `open` the one that was consumed in part; at
    most one of them is set.
    """

    ordinal: int = 0
    row: int = 0
    key: str | None = None
    open: JsonObject | None = None

    @classmethod
    def from_json(cls, raw: JsonView | None) -> _ResumePoint:
        """Return the point that a manifest holds; the beginning without one."""
        return cls(**raw) if raw else cls()

    @property
    def seq(self) -> int:
        """The position of the next row."""
        return join_seq(self.ordinal, self.row)

    @property
    def listed_after(self) -> str | None:
        """The key after which listing continues."""
        return self.open["key"] if self.open else self.key


class _SliceBuilder:
    """Takes objects in order until a limit is reached.

    Args:
        member: whose slice it is.
        at: where it begins.
        limits: of one slice.
        framing: of an object that is begun (`describe_framing`).

    Attributes:
        at: where the next slice continues.
        consumed_entries: objects taken, without the one that was open before.
    """

    def __init__(
        self, member: Member, at: _ResumePoint, limits: ReadLimits, framing: JsonObject
    ) -> None:
        self._member, self._start, self._framing = member, at.seq, framing
        self.at, self.consumed_entries = at, 0
        self._rows_left, self._bytes_left = limits.rows, limits.bytes
        self._parts: list[JsonObject] = []
        self._dead: list[DeadObject] = []
        self._arrived: int | None = None

    def add_object(self, inspected: InspectedObject) -> bool:
        """Consume an object, whole or up to the row limit. Return False if the slice is full."""
        if self._rows_left == 0 or (self._bytes_left is not None and self._bytes_left <= 0):
            return False
        if self._bytes_left is not None:
            self._bytes_left -= inspected.size
        self.consumed_entries += self.at.open is None
        if inspected.modified is not None:
            arrived = int(inspected.modified * 1e6)
            self._arrived = min(arrived, self._arrived or arrived)
        found = inspected.content
        if isinstance(found, BadObject):
            place = self._member, self.at.seq, inspected.key, inspected.etag, inspected.size
            rows = None if found.rows is None else found.rows - self.at.row
            self._dead.append(DeadObject(*place, found.reason, found.detail, rows))
        else:
            part = self._add_rows(inspected, found)
            if part["row_end"] < part["rows"]:
                pinned = self._framing | _pin_object(part, found, part["row_end"])
                self.at = _ResumePoint(self.at.ordinal, part["row_end"], None, pinned)
                return False
        self.at = _ResumePoint(self.at.ordinal + 1, 0, inspected.key, None)
        return True

    def _add_rows(self, inspected: InspectedObject, footer: Footer) -> JsonObject:
        start, end = self.at.row, footer.rows
        if self._rows_left is not None:
            end = min(end, start + self._rows_left)
            self._rows_left -= end - start
        part = {
            "key": inspected.key,
            "etag": inspected.etag,
            "size": inspected.size,
            "ordinal": self.at.ordinal,
            "rows": footer.rows,
            "row_start": start,
            "row_end": end,
            "columns": footer.columns,
        }
        part |= footer.list_breaks(start, end)
        if self.at.open is not None and FRAMING in self.at.open:
            part[FRAMING] = self.at.open[FRAMING]
        if end > start:
            self._parts.append(part)
        return part

    def build_slice(self, *, pending: bool, done: bool) -> Slice:
        """Return the slice of everything that was taken."""
        return Slice(
            self._member,
            self._start,
            self.at.seq,
            tuple(self._parts),
            asdict(self.at),
            pending,
            done,
            tuple(self._dead),
            arrived=self._arrived,
        )


def _pin_object(part: JsonView, footer: Footer, row: int) -> JsonObject:
    """What is kept of an object of which the rows from this one on are left."""
    names = ("key", "etag", "size", "rows", "columns", FRAMING)
    pinned = {name: part[name] for name in names if name in part}
    return pinned | footer.list_breaks(row, footer.rows)


def _is_data_name(name: str) -> bool:
    """Return whether a name below the source's folder is data: no part begins with _ or a dot."""
    parts = [part for part in name.split("/") if part]
    return bool(name) and not name.endswith("/") and all(part[0] not in "_." for part in parts)
