"""The protocol as steps: what a write means, and under which conditions it may be taken.

A step is one change that others can see: a slot is filled, a file comes or goes, `roots.json`,
the lease, a table, a sink's ledger or the readers' pointer moves. `Protocol.take` knows the
conditions of each step and asks no code of the product. `protocol_search` takes every step that
the conditions allow, in every order, within small bounds, and requires that nothing is ever lost;
each condition is needed for that. A soak then takes the steps of each schedule by the same rules:
a step that cannot be taken means that the product has left the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

Slot = tuple[int, int]  # timeline, number
Mark = tuple[int, int]  # timeline, newest slot on its lineage
File = Any  # a key; in the search a triple
START: Slot = (0, 0)

CONDITIONS = (
    "a slot is filled once",
    "no slot follows a fork",
    "slots have no gap",
    "a record names the one before it",
    "an epoch carries files of its parent only",
    "a restore claims its target",
    "a restore finds its target",
    "a restore finds the way to its target",
    "a condemned checkpoint is not claimed",
    "a condemned checkpoint is not pinned",
    "the head stays",
    "what is pinned stays",
    "what is claimed stays",
    "what a follower needs stays",
    "only what is condemned is retired",
    "a file that an epoch names stays",
    "a file that readers may open stays",
    "an undecided attempt stays",
    "a follower goes forward",
    "a rewind keeps what is shared",
    "a follower applies what is sealed",
    "a table is what its position says",
    "the pointer goes forward",
    "the pointer shows one cut",
)
"""The search finds a loss as soon as one of these is left out. The other conditions of the steps
below say when a process has to look, which a search without memory of processes cannot need, or
they are about the lease and about ledgers, which it leaves out."""


class UntakeableError(Exception):
    """A condition of the protocol forbids this step now."""


class Record(NamedTuple):
    """What a slot holds.

    `rows` are pairs of a table and a file with rows for it; `files` are all that it names.
    """

    kind: str  # epoch, fork or stub
    name: str
    sha: str
    parent: str | None = None
    files: frozenset[File] = frozenset()
    rows: frozenset[tuple[str, File]] = frozenset()


class Table(NamedTuple):
    """A table: its position and the files of its newest version."""

    mark: Mark
    files: frozenset[File] = frozenset()


class Claim(NamedTuple):
    """A restore under way: its target and the slot that its record goes into."""

    target: str
    slot: Slot


@dataclass(frozen=True, eq=False)
class Protocol:
    """Everything that a condition looks at.

    Attributes:
        slots: what each slot holds now.
        sealed: the epoch that each slot held first.
        bases: timeline -> slot that it continues.
        opened: timeline -> hash of the record that opened it.
        retiring: condemned by retention.
        written: attempts' files that were ever written; `files` are those that are there.
        shown: files of the versions that the pointer names.
        without: conditions that are left out, to show that each is needed.
    """

    slots: dict[Slot, Record] = field(default_factory=dict)
    sealed: dict[Slot, Record] = field(default_factory=dict)
    bases: dict[int, Slot] = field(default_factory=lambda: {0: START})
    opened: dict[int, str | None] = field(default_factory=lambda: {0: None})
    claims: frozenset[Claim] = frozenset()
    pins: frozenset[str] = frozenset()
    retiring: frozenset[str] = frozenset()
    damaged: frozenset[str] = frozenset()
    files: frozenset[File] = frozenset()
    written: frozenset[File] = frozenset()
    tables: dict[str, Table] = field(default_factory=dict)
    sinks: dict[str, Mark] = field(default_factory=dict)
    pointer: Mark = START
    shown: frozenset[File] = frozenset()
    lease: tuple[int, str | None] = (0, None)
    without: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Protocol) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        """What tells two states of a search apart; records of one name differ in two things only."""
        records = self.slots.items()
        held = frozenset((slot, r.kind, r.name, r.parent, len(r.files)) for slot, r in records)
        roots = (self.claims, self.pins, self.retiring)
        follow = (*self.tables.items(), self.pointer, self.shown)
        return held, (*self.bases.items(),), roots, self.files, self.written, follow

    def _with(self, **changes: Any) -> Protocol:
        """As `dataclasses.replace`, in a third of the time."""
        changed = object.__new__(Protocol)
        changed.__dict__.update(self.__dict__)
        changed.__dict__.pop("_identity", None)
        changed.__dict__.update(changes)
        return changed

    def take(self, step: tuple[Any, ...]) -> Protocol:
        """Return the protocol after a step: its name, then what it is about.

        Raises:
            UntakeableError: a condition forbids it.
        """
        changed: Protocol = getattr(self, step[0])(*step[1:])
        return changed

    # where things are

    @property
    def timeline(self) -> int:
        """The current timeline."""
        return max(self.bases)

    def newest(self, timeline: int) -> int:
        """The newest slot of a timeline; what it continues while it is empty."""
        slot = self.bases[timeline][1]
        while (timeline, slot + 1) in self.slots:
            slot += 1
        return slot

    def head(self) -> Slot:
        """The slot of the newest checkpoint of the current lineage."""
        return self.home(self.timeline, self.newest(self.timeline))

    def home(self, timeline: int, slot: int) -> Slot:
        """Where a slot of a timeline's lineage lies."""
        while slot <= self.bases[timeline][1] and timeline > 0:
            timeline = self.bases[timeline][0]
        return timeline, slot

    def shared(self, one: int, other: int) -> int:
        """How many slots two lineages share."""
        shared = 1 << 60
        while one != other:
            one, other = max(one, other), min(one, other)
            one, base = self.bases[one]
            shared = min(shared, base)
        return shared

    def lineage(self, mark: Mark) -> Iterator[Slot]:
        """The slots up to a position."""
        return (self.home(mark[0], slot) for slot in range(1, mark[1] + 1))

    def rows_at(self, table: str, mark: Mark) -> frozenset[File]:
        """The files that a table has at a position; slots that are not sealed add nothing."""
        epochs = (self.sealed[slot] for slot in self.lineage(mark) if slot in self.sealed)
        return frozenset(file for epoch in epochs for name, file in epoch.rows if name == table)

    def needed_by(self, mark: Mark) -> Iterator[Slot]:
        """What a follower at a position may have to apply yet, whatever its publishers have read.

        One of them may sleep and rewind it to any timeline since.
        """
        for timeline in range(mark[0], self.timeline + 1):
            for slot in range(self.lowest(mark, timeline) + 1, self.newest(timeline) + 1):
                yield self.home(timeline, slot)

    def lowest(self, mark: Mark, timeline: int) -> int:
        """The last slot that a follower keeps on any way from a position to a timeline."""
        later = range(mark[0] + 1, timeline + 1)
        return min([mark[1], *(self.shared(mark[0], one) for one in later)])

    def _require(self, condition: str, holds: bool, what: object) -> None:
        if not holds and condition not in self.without:
            raise UntakeableError(f"{condition}: {what}")

    # the log

    def write(self, file: File) -> Protocol:
        """A file of an attempt, or a merged one, is there."""
        return self._with(files=self.files | {file}, written=self.written | {file})

    def seal(self, slot: Slot, record: Record) -> Protocol:
        """An epoch fills the next slot."""
        self._fill(slot, record)
        before = self.sealed.get(self.home(slot[0], slot[1] - 1))
        own = frozenset(file for file in record.files if self._is_of(file, record.name))
        carried = record.files - own - (before.files if before else frozenset())
        self._require("an epoch carries files of its parent only", not carried, carried)
        sealed = {**self.sealed, slot: record}
        return self._with(slots={**self.slots, slot: record}, sealed=sealed)

    def fork(self, slot: Slot, record: Record, new: int, base: int, target: str | None) -> Protocol:
        """A restore fills the next slot; `new` continues slot `base`."""
        self._fill(slot, record)
        at = next((s for s, r in self.sealed.items() if r.name == target), START)
        if target is not None:
            kind = self.slots[at].kind if at in self.slots else "empty"
            there = kind == "epoch" and at[1] == base
            self._require("a restore finds its target", there, f"{target} is {kind}")
            claimed = Claim(target, slot) in self.claims
            self._require("a restore claims its target", claimed, target)
            self._find_way(at)
        self._require("no slot follows a fork", new == self.timeline + 1, f"timeline {new}")
        return self._with(
            slots={**self.slots, slot: record},
            bases={**self.bases, new: at},
            opened={**self.opened, new: record.sha},
        )

    def _find_way(self, target: Slot) -> None:
        """Every epoch that a follower applies again on its way to a target is there."""
        parting = self.shared(self.timeline, target[0])
        for mark in self._followers():
            done = min(parting, self.lowest(mark, self.timeline))
            for number in range(done + 1, target[1] + 1):
                record = self.slots[self.home(target[0], number)]
                whole = record.kind == "epoch" and record.name not in self.retiring
                self._require("a restore finds the way to its target", whole, record.name)

    def _followers(self) -> list[Mark]:
        return [self.pointer, *self.sinks.values()]

    def _fill(self, slot: Slot, record: Record) -> None:
        timeline, number = slot
        self._require("a slot is filled once", slot not in self.slots, slot)
        self._require("no slot follows a fork", timeline == self.timeline, slot)
        newest = self.newest(timeline)
        following = slot in self.slots or number == newest + 1
        self._require("slots have no gap", following, f"{slot} after {newest}")
        before = self.slots.get((timeline, number - 1))
        sha = before.sha if before else self.opened[timeline]
        self._require("a record names the one before it", record.parent == sha, slot)

    def retire(self, slot: Slot, sha: str) -> Protocol:
        """A stub takes the place of an epoch."""
        there = self.slots.get(slot)
        if there is None or there.kind == "fork" or there.sha != sha:
            raise UntakeableError(f"a stub takes the place of its epoch: {slot}")
        condemned = there.kind == "stub" or there.name in self.retiring
        self._require("only what is condemned is retired", condemned, there.name)
        stub = there._replace(kind="stub", files=frozenset(), rows=frozenset())
        return self._with(slots={**self.slots, slot: stub})

    # roots.json

    def protect(
        self,
        claims: frozenset[Claim],
        pins: frozenset[str],
        retiring: frozenset[str],
        damaged: frozenset[str] = frozenset(),
    ) -> Protocol:
        """`roots.json` is swapped."""
        condemned = self.retiring | self.damaged
        for claim in claims - self.claims:
            free = claim.target not in condemned
            self._require("a condemned checkpoint is not claimed", free, claim.target)
        for name in pins - self.pins:
            self._require("a condemned checkpoint is not pinned", name not in condemned, name)
        for claim in self.claims - claims:
            self._require("a claim ends with its slot", claim.slot in self.slots, claim)
        stubs = {record.name for record in self.slots.values() if record.kind == "stub"}
        for name in self.retiring - retiring:
            self._require("an entry goes after its stub is there", name in stubs, name)
        kept = self._with(claims=claims, pins=pins, damaged=damaged)
        for name in retiring - self.retiring:
            kept._condemn(name)
        return kept._with(retiring=retiring)

    def _condemn(self, name: str) -> None:
        slot = next((s for s, record in self.slots.items() if record.name == name), START)
        self._require("the head stays", slot != self.head(), name)
        self._require("what is pinned stays", name not in self.pins, name)
        for claim in self.claims:
            self._require("what is claimed stays", claim.target != name, name)
            if claim.slot not in self.slots:  # a claim whose slot is filled is void
                on_way = slot in self._way_to(claim.target)
                self._require("the way to what is claimed stays", not on_way, name)
        needed = {at for mark in self._followers() for at in self.needed_by(mark)}
        self._require("what a follower needs stays", slot not in needed, name)

    def _way_to(self, target: str) -> Iterator[Slot]:
        """The epochs that a restore of a target applies again."""
        at = next((s for s, record in self.sealed.items() if record.name == target), START)
        first = self.shared(at[0], self.timeline) + 1
        return (self.home(at[0], number) for number in range(first, at[1] + 1))

    # files, tables and readers

    def delete(self, file: File, slot: Slot | None, name: str) -> Protocol:
        """A file goes. `slot` and `name` are those of its attempt; None for a merged file."""
        for at, record in self.slots.items():
            named = file in record.files or (record.kind == "epoch" and record.name == name)
            self._require("a file that an epoch names stays", not named, f"{file} of {at}")
        for table, there in self.tables.items():
            self._require("a file that a table names stays", file not in there.files, table)
        self._require("a file that readers may open stays", file not in self.shown, file)
        decided = slot is None or slot[1] <= self.newest(slot[0])
        self._require("an undecided attempt stays", decided, file)
        return self._with(files=self.files - {file})

    def follow(self, table: str, mark: Mark, files: frozenset[File]) -> Protocol:
        """A table's newest version is at a position and holds these files."""
        before = self.tables.get(table)
        if before is not None:
            what = f"{table}: {before.mark} to {mark}"
            self._require("a follower goes forward", mark >= before.mark, what)
            common = min(before.mark[1], self.shared(before.mark[0], mark[0]))
            self._require("a rewind keeps what is shared", mark[1] >= common, what)
        self._require_sealed(mark)
        there = before.files if before else frozenset()
        if any(map(self._is_merged, files | there)):  # whose rows the judge compares
            wanted = files
            if before is not None and before.mark[0] == mark[0]:
                past = self.rows_at(table, before.mark)
                new = self.rows_at(table, mark) - past
                wanted = new | frozenset(f for f in files if self._is_merged(f)) | (files & there)
        else:
            wanted = self.rows_at(table, mark)
        what = f"{table} at {mark} has {set(files ^ wanted)}"
        self._require("a table is what its position says", files == wanted, what)
        return self._with(tables={**self.tables, table: Table(mark, files)})

    def apply(self, sink: str, mark: Mark) -> Protocol:
        """A sink's ledger moves: by one slot, or onto the lineage of a later timeline."""
        before = self.sinks.get(sink, START)
        self._require_sealed(mark)
        next_one = (before[0], before[1] + 1)
        back = (mark[0], min(before[1], self.shared(before[0], mark[0])))
        moved = mark in (before, next_one) if mark[0] == before[0] else mark == back
        self._require("a ledger moves by one slot", moved, f"{before} to {mark}")
        self._require("a follower goes forward", mark[0] >= before[0], f"{before} to {mark}")
        return self._with(sinks={**self.sinks, sink: mark})

    def publish(self, mark: Mark, tables: dict[str, Table]) -> Protocol:
        """The readers' pointer names a version of each table."""
        forward = mark >= self.pointer
        self._require("the pointer goes forward", forward, f"{self.pointer} to {mark}")
        self._require_sealed(mark)
        for name in {name for epoch in self.sealed.values() for name, _ in epoch.rows}:
            shown = tables.get(name, Table(START))
            if not shown.mark[1] and not shown.files:
                shown = Table((mark[0], 0))  # empty on every timeline
            lacks = self.rows_at(name, mark) - self.rows_at(name, (mark[0], shown.mark[1]))
            exact = shown.mark[0] == mark[0] and shown.mark[1] <= mark[1] and not lacks
            self._require("the pointer shows one cut", exact, f"{name} at {shown.mark} for {mark}")
        files = frozenset(file for table in tables.values() for file in table.files)
        return self._with(pointer=mark, shown=files)

    def hold(self, token: int, holder: str | None) -> Protocol:
        """The lease is written: a new holder has a new token."""
        held, by = self.lease
        renewed = token == held and holder in (by, None)
        taken = renewed or token == held + 1
        self._require("a new holder has a new token", taken, f"{token} after {self.lease}")
        return self._with(lease=(token, holder))

    def _require_sealed(self, mark: Mark) -> None:
        known = mark[0] in self.bases
        upto = self._newest_epoch(mark[0]) if known else -1
        self._require("a follower applies what is sealed", mark[1] <= upto, f"{mark}, not {upto}")

    def _newest_epoch(self, timeline: int) -> int:
        newest = self.newest(timeline)
        there = self.slots.get((timeline, newest))
        return newest - (there is not None and there.kind == "fork")

    @staticmethod
    def _is_of(file: File, name: str) -> bool:
        if isinstance(file, tuple):
            return bool(file[2] == name)
        return name.partition("-")[2] in file

    @staticmethod
    def _is_merged(file: File) -> bool:
        return isinstance(file, str) and "/merged/" in file
