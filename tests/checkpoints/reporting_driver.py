"""A pipeline with a driver of which only lease and report matter."""

from __future__ import annotations

from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)


def bucket(lease: str = "none", reported: str | None = None, ago: float = 0.0) -> MemoryStore:
    """A pipeline `p` whose driver has the lease, gave it back or died, and last reported this."""
    store = MemoryStore()
    if lease != "none":
        dead = ProcessIdentity.this_process().model_copy(update={"start_ticks": 1})
        taken = Lease.acquire(store, "p", dead if lease == "dead" else ELSEWHERE)
        if lease == "free":
            taken.release()
    if reported:
        at = SYSTEM_CLOCK.wall_ticks() - int(ago * 1_000_000)
        body = {"state": reported}
        write_status(store, "p", DriverStatus(token=1, driver="d", step="move", at=at, body=body))
    return store
