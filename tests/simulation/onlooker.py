"""Someone who looks at every surface at once, every second, and compares what they say.

The reads take no time and meet no fault, so that all surfaces judge the same bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.servers.memory_store import MemoryStore
from tests.simulation.basics import PIPELINE, Violation

from tidegate.checkpoints.driver_requests import read_desired_state
from tidegate.checkpoints.pipeline_overview import PipelineOverview, PipelineState
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.operators.liveness import LivenessLimits, StreamObserver

if TYPE_CHECKING:
    from tests.simulation.actors import Stage

_HEALTHY = frozenset(
    {
        PipelineState.LEASED,
        PipelineState.STARTING,
        PipelineState.RUNNING,
        PipelineState.WAITING,
        PipelineState.DRAINING,
    }
)
_LOOKS = 40


def look_on(stage: Stage) -> None:
    """Look again and again.

    Raises:
        Violation: a surface calls a driver healthy that another one calls lost, or they count
            differently.
    """
    clock = stage.world.clock()
    log = SlotLog(MemoryStore(stage.world.bucket, name="sim"), PIPELINE)
    # Both are equally patient here: a second of patience more does not contradict that.
    limits = LivenessLimits(lease_margin=0.0)
    observer = StreamObserver(log.store, PIPELINE, floor=0, limits=limits, clock=clock)
    for _ in range(_LOOKS):
        seen = observer.observe()
        if seen is not None and observer.seen is not None:
            desired = read_desired_state(log.store, PIPELINE)
            overview = PipelineOverview(observer.seen.driver, desired, log.head())
            _compare_states(seen.state, overview)
            _compare_counts(stage, overview)
        clock.sleep(1.0)
    stage.world.current_process().alive = False


def _compare_states(event: PipelineState, overview: PipelineOverview) -> None:
    page = overview.state
    if page is PipelineState.RECOVERING:
        return
    if (event is PipelineState.RUNNING) is not (page in _HEALTHY) and PipelineState.LOST in (
        event,
        page,
    ):
        raise Violation(f"the trigger says {event.value}, the page says {page.value}")


def _compare_counts(stage: Stage, overview: PipelineOverview) -> None:
    facts = overview.driver.last_facts
    if "slot" not in facts:
        return
    key = SlotLog(MemoryStore(stage.world.bucket), PIPELINE).layout.slot_key(
        facts["timeline"], facts["slot"]
    )
    record = stage.world.bucket.records.get(key)
    if record is not None and record["counters"] != facts["counters"]:
        raise Violation(f"the status counts {facts['counters']}, the log {record['counters']}")
