"""Who holds the output frontier back, since when, and why (semantics.md section 4.4, issue "who holds the frontier")."""

from __future__ import annotations

from typing import Any

from tidegate.jobs.eventtime.coalesce import ACTIVE, Coalescer
from tidegate.jobs.eventtime.members import resolve_partition_timeout
from tidegate.jobs.eventtime.state import DeciderState
from tidegate.jobs.spec.pipeline import PipelineSpec, SourceSpec

__all__ = ["find_frontier_holder"]


def find_frontier_holder(spec: PipelineSpec, world: DeciderState, standing: set[str], clock: int) -> dict[str, Any] | None:
    """The member with the least frontier among those that make F; `since` is when it became that member."""
    source = _find_slowest_input(world.output)
    if source is None:
        return None
    member = _find_slowest_input(world.sources[source]) or source
    before = world.holder
    since = before["since"] if before is not None and before["member"] == member else clock
    return {"member": member, "since": since, "why": _explain_hold(spec, world, source, member, standing)}


def _needs_punctuation(source: SourceSpec) -> bool:
    """Whether nothing but punctuation of its own moves the source's frontier."""
    own = source.punctuation is not None and source.punctuation.import_from is None
    return own and source.lag is None and source.wall_clock is None


def _find_slowest_input(coalescer: Coalescer) -> str | None:
    """Name of the included input without a frontier, else with the least one; ties by name, so that a replay agrees."""
    included = {n: i["frontier"] for n, i in coalescer.inputs.items() if i["aligned"] and i["status"] == ACTIVE}
    known = [frontier for frontier in included.values() if frontier is not None]
    least = min(known) if known and len(known) == len(included) else None
    return min((n for n, frontier in included.items() if frontier == least), default=None)


def _explain_hold(spec: PipelineSpec, world: DeciderState, source: str, member: str, standing: set[str]) -> str:
    state = world.members.get(member)
    options = spec.sources[source]
    if member in standing:
        return "open barrier"
    if state is not None and state["pending"]:
        return "buffered rows"
    if _needs_punctuation(options) and (state is None or state["punctuation"] is None):
        return "no punctuation"
    if spec.coalesce.idle_timeout is not None or resolve_partition_timeout(spec, options) is not None:
        return "idle timer running"
    return "no data"
