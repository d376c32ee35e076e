"""The decider's state: typed while an epoch is decided, plain JSON between epochs.

`DeciderState.from_dict` copies what an epoch may change and shares the rest; nothing reachable from
the given dict is ever changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from tidegate.jobs.eventtime.barriers import Barriers
from tidegate.jobs.eventtime.frontiers import Coalescer
from tidegate.jobs.eventtime.pipeline_clock import PipelineTime, read_pipeline_time
from tidegate.jobs.eventtime.release_order import ReleaseOrder
from tidegate.jobs.spec.event_time_options import CoalesceOptions
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

STATE_VERSION: Final = 1
EMPTY_COALESCER: Final = Coalescer(CoalesceOptions()).to_dict()
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
    """

    time: PipelineTime | None
    members: dict[str, MemberState]
    sources: dict[str, Coalescer]
    output: Coalescer
    active_at: dict[str, int]
    barriers: Barriers
    order: ReleaseOrder
    buffered_rows: int = 0
    holder: dict[str, Any] | None = None

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
    def from_dict(cls, spec: PipelineSpec, data: Mapping[str, Any]) -> DeciderState:
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
        )

    def to_dict(self) -> dict[str, Any]:
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
