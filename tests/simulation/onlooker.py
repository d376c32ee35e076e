"""Someone who looks at every surface at once, every second, and compares what they say.

Every few seconds also what is offered: the list of checkpoints, the page and the index must agree
with the log, and a restore of whatever they offer must be accepted.

The reads take no time and meet no fault, so that all surfaces judge the same bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.storage import JudgeStore

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_requests import read_desired_state
from tidegate.checkpoints.pipeline_overview import PipelineOverview, PipelineState
from tidegate.checkpoints.restore import plan_restore
from tidegate.checkpoints.slot_index import SlotSummary
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.operators.liveness import LivenessLimits, StreamObserver
from tidegate.operators.stream_view import StreamView

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
_OFFERS_EVERY = 4


def look_on(stage: Stage) -> None:
    """Look again and again.

    Raises:
        Violation: a surface calls a driver healthy that another one calls lost, or they count
            differently.
    """
    clock = stage.world.clock()
    log = SlotLog(JudgeStore(stage.world.bucket), PIPELINE)
    # Both are equally patient here: a second of patience more does not contradict that.
    limits = LivenessLimits(lease_margin=0.0)
    observer = StreamObserver(log.store, PIPELINE, floor=0, limits=limits, clock=clock)
    page = StreamView(log.store, PIPELINE, fresh=0.0, clock=clock)
    for number in range(_LOOKS):
        seen = observer.observe()
        if seen is not None and observer.seen is not None:
            desired = read_desired_state(log.store, PIPELINE)
            overview = PipelineOverview(observer.seen.driver, desired, log.head())
            _compare_states(seen.state, overview)
            _compare_counts(stage, overview)
        if number % _OFFERS_EVERY == 0:
            compare_offers(stage, page)
        clock.sleep(1.0)
    stage.world.current_process().alive = False


def compare_offers(stage: Stage, page: StreamView) -> None:
    """Compare the list of checkpoints, the page and the log, and plan to restore what is offered.

    Raises:
        Violation: they differ, or a restore of what is offered is refused.
    """
    listed = CheckpointCatalog(page.log, workers=1).list_checkpoints(all_timelines=True)
    offered = {row.id: row for row in listed if row.is_restorable}
    shown = {
        row["id"]
        for abandoned in (False, True)
        for row in page.checkpoint_page(limit=1000, abandoned=abandoned)["rows"]
        if row["restorable"]
    }
    if shown != offered.keys():
        raise Violation(
            f"the list alone offers {offered.keys() - shown}, the page {shown - offered.keys()}"
        )
    for row in offered.values():
        _require_plan(stage, page.log, row)


def _require_plan(stage: Stage, log: SlotLog, row: SlotSummary) -> None:
    key = log.layout.slot_key(row.timeline, row.slot)
    counters = stage.world.bucket.records[key]["counters"]
    names = ("read", "released", "retained")
    if any(getattr(row, name) != counters[name] for name in names):
        raise Violation(f"{row.id}: the index counts {row}, the log {counters}")
    try:
        plan_restore(log, CheckpointId.parse(row.id or ""))
    except TidegateError as error:
        if stage.world.garbled:  # what a damaged document names may be offered in vain
            return
        raise Violation(f"{row.id} is offered, but {error.message}") from error


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
    key = SlotLog(JudgeStore(stage.world.bucket), PIPELINE).layout.slot_key(
        facts["timeline"], facts["slot"]
    )
    record = stage.world.bucket.records.get(key)
    if record is not None and record["counters"] != facts["counters"]:
        raise Violation(f"the status counts {facts['counters']}, the log {record['counters']}")
