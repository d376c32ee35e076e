"""The decider's state: typed while an epoch is decided, plain JSON between epochs.

`DeciderState.from_dict` copies what an epoch may change and shares the rest; nothing reachable from
the given dict is ever changed.

`ReleaseOrder` decides up to which mark buffered rows leave (semantics.md section 3, 1 to 3). The
mover keeps the order buffer itself. Here are only marks and, for the build window, one entry per
epoch that read rows: when it read, in which section, and its largest time. An entry with the time
of an older one adds nothing. One with a smaller time does: it expires while the older one has to
wait for a member that still has rows to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from tidegate.jobs.spec.event_time_options import CoalesceOptions, OrderOptions
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec
from tidegate.json_types import JsonObject, JsonView

from .barriers import Barriers
from .decision_types import FIRST_RELEASE_MARK, ReleaseMark
from .frontiers import Coalescer
from .pipeline_clock import PipelineTime, has_expired, read_pipeline_time


@dataclass(slots=True)
class ReleaseOrder:
    """Marks and residence of the order buffer.

    Attributes:
        options: see `OrderOptions`.
        released: every row below this mark has left.
        reach: the mark that follows from frontiers alone: no row in order can still come below it.
        entries: ``[read_at, section, max_time]`` per epoch, oldest first.
        grace_from: pipeline clock of the first event of this run; None before it.
        grace_over: the start-up grace of this run has passed.
    """

    options: OrderOptions
    released: ReleaseMark = FIRST_RELEASE_MARK
    reach: ReleaseMark = FIRST_RELEASE_MARK
    entries: list[list[int]] = field(default_factory=list)
    grace_from: int | None = None
    grace_over: bool = False

    @classmethod
    def from_dict(cls, options: OrderOptions, data: JsonView) -> ReleaseOrder:
        """Read the form of `to_dict`."""
        marks = ReleaseMark(*data["released"]), ReleaseMark(*data["reach"])
        return cls(options, *marks, list(data["entries"]), data["grace_from"], data["grace_over"])

    def to_dict(self) -> JsonObject:
        """Return the JSON-ready state."""
        return {
            "released": list(self.released),
            "reach": list(self.reach),
            "entries": self.entries,
            "grace_from": self.grace_from,
            "grace_over": self.grace_over,
        }

    def start_run(self) -> None:
        """Begin a new run: its start-up grace starts again."""
        self.grace_from, self.grace_over = None, False

    def in_grace(self, clock: int, *, events: bool) -> bool:
        """Advance the start-up grace to `clock` and return whether it still holds everything back.

        To be called once per epoch. The grace starts with the run's first epoch that has read
        something (`events`), and everything is held before that, too. Without `startup_grace`
        nothing is held.
        """
        if self.grace_over or self.options.startup_grace == 0:
            return False
        if self.grace_from is None and events:
            self.grace_from = clock
        self.grace_over = self.grace_from is not None and has_expired(
            clock, self.grace_from, self.options.startup_grace
        )
        return not self.grace_over

    def note_read(self, clock: int, section: int, max_time: int) -> None:
        """Note that this epoch read rows up to `max_time`; does nothing without a build window."""
        if self.options.build_window is None or (section, max_time) < self.released:
            # Nothing will ever expire, so the list must not grow; or the row is late or leaves at
            # once, and does not stay.
            return
        if all(entry[1:] != [section, max_time] for entry in self.entries):
            self.entries.append([clock, section, max_time])

    def latest_expired_time(self, clock: int, section: int, awaited: int | None) -> int | None:
        """Return the largest time in the section whose residence has expired.

        None if there is none.

        Args:
            clock: pipeline clock.
            section: the current section.
            awaited: least frontier of members that still had rows to read; no row at or above it
                expires.
        """
        times = [
            time
            for read_at, of, time in self.entries
            if of == section
            and has_expired(clock, read_at, self.options.build_window)
            and (awaited is None or time < awaited)
        ]
        return max(times, default=None)

    def release(self, mark: ReleaseMark) -> ReleaseMark:
        """Raise the released mark to `mark`, never lower it, and return the released mark.

        Forget entries below it.
        """
        self.reach = max(self.reach, mark)
        self.released = max(self.released, mark)
        self.entries = [e for e in self.entries if (e[1], e[2]) >= self.released]
        return self.released

    def next_timer(self) -> int | None:
        """Return when the grace or the next residence ends, on the pipeline clock.

        None: no timer runs.
        """
        if self.grace_from is not None and not self.grace_over:
            return self.grace_from + self.options.startup_grace
        if self.options.build_window is None or not self.entries:
            return None
        return self.entries[0][0] + self.options.build_window

    def expire_up_to(self, mark: ReleaseMark) -> None:
        """Release the rows up to and including the mark; `reach` stays.

        Their residence has expired, so no frontier is needed.
        """
        self.released = max(self.released, ReleaseMark(mark.section, mark.time + 1))


STATE_VERSION = 1
EMPTY_COALESCER = Coalescer(CoalesceOptions()).to_dict()
"""State of the coalescer of a source that was added to the spec later."""


class HeldRows(TypedDict):
    """The greatest event time and punctuation read behind a member's open barrier.

    Used with the alignment ``pass``: they move the member's frontier when the barrier closes. The
    rows themselves are not here.
    """

    seen: int | None
    punctuation: int | None


class MemberState(TypedDict):
    """What the decider carries from epoch to epoch for one member.

    Replaced, never changed in place.

    Attributes:
        seen: greatest event time before the member's open barrier.
        punctuation: greatest punctuation before it.
        behind: what was read behind it.
        active_at: pipeline clock of the last activity, or of the joining.
        pending: the member had rows left in the last cut.
        generator: state of its punctuation generator; only the mover reads it.
    """

    seen: int | None
    punctuation: int | None
    behind: HeldRows | None
    active_at: int
    pending: bool
    generator: dict[str, int] | None


@dataclass(slots=True)
class DeciderState:
    """Everything the decider knows between two epochs.

    Attributes:
        time: the pipeline clock and the recorded wall clock; None before the first epoch.
        members: by ``str(member)``.
        sources: per source, its partitions coalesced.
        output: the sources coalesced.
        active_at: per source, pipeline clock of its last activity or joining.
        barriers: open and missed barriers, and the section.
        order: release marks and residence.
        buffered_rows: rows in the order buffer, as far as known.
        holder: who holds the frontier, since when and why.
        last_exports: per source that others import from, its last frontier below +inf once it is
            at +inf.
    """

    time: PipelineTime | None
    members: dict[str, MemberState]
    sources: dict[str, Coalescer]
    output: Coalescer
    active_at: dict[str, int]
    barriers: Barriers
    order: ReleaseOrder
    buffered_rows: int = 0
    holder: JsonObject | None = None
    last_exports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def initial(cls, spec: PipelineSpec) -> DeciderState:
        """Return the state before the first epoch: no member, no frontier, section 0."""
        return cls(
            time=None,
            members={},
            sources={
                name: Coalescer(_resolve_partition_options(source))
                for name, source in spec.sources.items()
            },
            output=Coalescer(_resolve_output_options(spec)),
            active_at={},
            barriers=Barriers(spec.barriers, spec.barrier_timeout),
            order=ReleaseOrder(spec.release),
        )

    @classmethod
    def from_dict(cls, spec: PipelineSpec, data: JsonView) -> DeciderState:
        """Read the form of `to_dict`; leaves out sources that the spec no longer has.

        Their members stay in `members` until a survey is applied.
        """
        output = Coalescer.from_dict(_resolve_output_options(spec), data["output"])
        for gone in output.inputs.keys() - spec.sources.keys():
            output.remove(gone)
        return cls(
            time=read_pipeline_time(data),
            members=dict(data["members"]),
            sources={
                name: Coalescer.from_dict(
                    _resolve_partition_options(source), data["sources"].get(name, EMPTY_COALESCER)
                )
                for name, source in spec.sources.items()
            },
            output=output,
            active_at={name: at for name, at in data["active_at"].items() if name in spec.sources},
            barriers=Barriers.from_dict(spec.barriers, spec.barrier_timeout, data["barriers"]),
            order=ReleaseOrder.from_dict(spec.release, data["order"]),
            buffered_rows=data["buffered_rows"],
            holder=data["holder"],
            last_exports={
                name: frontier
                for name, frontier in data.get("last_exports", {}).items()
                if name in spec.sources
            },
        )

    def to_dict(self) -> JsonObject:
        """Return the JSON-ready state; it shares its parts with this object."""
        time = self.time
        return {
            "version": STATE_VERSION,
            "clock": time.clock if time else None,
            # Absent while the clocks agree, as in the manifests of versions that had one clock.
            **({"uncounted": time.uncounted} if time and time.uncounted else {}),
            "members": self.members,
            "sources": {name: source.to_dict() for name, source in self.sources.items()},
            "output": self.output.to_dict(),
            "active_at": self.active_at,
            "barriers": self.barriers.to_dict(),
            "order": self.order.to_dict(),
            "buffered_rows": self.buffered_rows,
            "holder": self.holder,
            # Absent in most pipelines, as in the manifests of versions that did not keep it.
            **({"last_exports": self.last_exports} if self.last_exports else {}),
            # Derived, but written: the next cut is planned from the state alone.
            "blocked": sorted(self.barriers.blocked_members()),
        }


def _resolve_partition_options(source: SourceSpec) -> CoalesceOptions:
    """`advance_to_end`.

    A completed source goes to +inf, whatever its partitions' `all_done` says (section 4.2).
    """
    # Applied here, so that the coalescer knows one set of options only.
    if source.punctuation is not None and source.punctuation.advance_to_end:
        return source.coalesce.model_copy(update={"all_done": "infinity"})
    return source.coalesce


def _resolve_output_options(spec: PipelineSpec) -> CoalesceOptions:
    if all(
        s.punctuation is not None and s.punctuation.advance_to_end for s in spec.sources.values()
    ):
        return spec.coalesce.model_copy(update={"all_done": "infinity"})
    return spec.coalesce
