"""Stops a driver, first by a request, then by force, and never another process.

1. A stop request, which the driver obeys between two epochs: it seals what it has read and releases
   the lease.
2. SIGTERM, which means the same to a driver that no longer reads requests.
3. SIGKILL; nothing sealed is lost by it.
4. Where no signal reaches (another host): take the lease away. The driver is fenced at its next
   step.
"""

import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.driver_requests import (
    HOLD_PREFIX,
    DriverRequest,
    RequestKind,
    submit_request,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock, poll_until
from tidegate.checkpoints.lease import LeaseObserver, evict_lease_holder
from tidegate.checkpoints.store import NotFoundError, Store

from .driver_launch import has_own_session, send_signal

# States that a person or a time-out gives a task. Any other state means that a new try is on its
# way or has adopted the driver.
ENDED_TASK_STATES = frozenset({"success", "failed", "removed", "skipped", "upstream_failed"})

_STOP_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class StopTimeouts:
    """Seconds to wait after each step of a stop."""

    request: float = 60.0
    terminate: float = 15.0
    kill: float = 5.0


@dataclass(frozen=True)
class StopOrder:
    """Which driver to stop, for whom and why.

    Attributes:
        who, why: recorded in the stop request, and shown by the driver.
        token: of the driver to stop; None for the present one.
        asker: idempotency key; callers with the same key share one request.
        timeouts: of each step.
    """

    who: str
    why: str
    token: int | None = None
    asker: str | None = None
    timeouts: StopTimeouts = StopTimeouts()


class _DriverStop:
    def __init__(self, store: Store, pipeline: str, clock: Clock, token: int | None = None) -> None:
        self._store, self._pipeline, self._clock = store, pipeline, clock
        self._watch = LeaseObserver(store, pipeline, clock)
        lease = self._watch.observe()
        self._process = lease.holder if lease else None
        self.token = token if token is not None else lease.token if lease else 0

    def has_ended(self) -> bool:
        """Whether the driver with this token no longer holds the lease."""
        return self._watch.has_ended(self.token)

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait at most so long; return whether the driver has ended."""
        return poll_until(self.has_ended, seconds, _STOP_POLL_SECONDS, self._clock)

    def escalate(self, timeouts: StopTimeouts, say: Callable[[str], None]) -> str:
        """Steps 2 to 4."""
        process = self._process
        steps = ((signal.SIGTERM, timeouts.terminate), (signal.SIGKILL, timeouts.kill))
        for number, seconds in steps:
            # A JVM that hangs would outlive a driver that is killed alone.
            group = number is signal.SIGKILL and process is not None and has_own_session(process)
            if process is None or not send_signal(process, number, group=group):
                break
            say(f"sent {number.name} to pid {process.pid}")
            if self.wait_until_ended(seconds):
                return f"the driver ended after {number.name}"
        if self.has_ended():
            return "the driver ended"
        # Only this token: another driver may have taken the lease in this moment.
        evict_lease_holder(self._store, self._pipeline, expected_token=self.token)
        return (
            "the lease was taken away; the driver stops at its next step, and until then its Spark"
            " runs next to the next driver's"
        )


def stop_driver(
    store: Store,
    pipeline: str,
    order: StopOrder,
    *,
    clock: Clock = SYSTEM_CLOCK,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Make sure that the driver no longer drives; return in one sentence how it ended.

    Takes the steps of this module, each for at most the seconds of `order.timeouts`. Does nothing
    if no driver holds the lease, or another one than `order.token`. The caller sets the desired
    state first; otherwise the sweep or a standby starts the next driver.

    Args:
        store: the bucket.
        pipeline: its name.
        order: which driver, for whom and why.
        clock: for waiting.
        say: called with a line per step.
    """
    stop = _DriverStop(store, pipeline, clock, order.token)
    if stop.has_ended():
        return "no driver was running"
    say(f"asking the driver with token {stop.token} to drain and stop")
    name = f"{order.asker}-{stop.token}" if order.asker else secrets.token_hex(8)
    submit_request(
        store,
        pipeline,
        RequestKind.DRAIN,
        who=order.who,
        why=order.why,
        token=stop.token,
        ttl=order.timeouts.request,
        request_id=f"{HOLD_PREFIX}{name}",
        clock=clock,
    )
    if stop.wait_until_ended(order.timeouts.request):
        return "the driver drained and stopped by itself"
    return stop.escalate(order.timeouts, say)


def terminate_driver(store: Store, pipeline: str, token: int, say: Callable[[str], None]) -> str:
    """Stop the driver with this token by SIGTERM, then SIGKILL, then by taking its lease away.

    For a driver that no longer reads requests. Does nothing if it no longer holds the lease.
    Returns in one sentence how it ended.
    """
    stop = _DriverStop(store, pipeline, SYSTEM_CLOCK, token)
    if stop.has_ended():
        return "no driver was running"
    return stop.escalate(StopTimeouts(terminate=5.0), say)


def find_stop_request(store: Store, pipeline: str, token: int) -> DriverRequest | None:
    """Return the request by which a person asked the driver with this token to end, if any.

    Those of `stop_driver` do not count.
    """
    layout = BucketLayout(pipeline)
    for entry in store.list_objects(layout.requests_prefix):
        if entry.key.removeprefix(layout.requests_prefix).startswith(HOLD_PREFIX):
            continue
        with suppress(NotFoundError, ValueError):
            request = DriverRequest.model_validate(parse_json(store.get(entry.key).data))
            if request.kind in (RequestKind.STOP, RequestKind.DRAIN) and request.token == token:
                return request
    return None
