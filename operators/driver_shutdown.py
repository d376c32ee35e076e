"""Stop a driver: first by asking, then harder; never a process that is not exactly the one meant.

1. a stop request, which the driver obeys between two epochs: what was read is sealed, the lease is
  given back
2. SIGTERM, which means the same to a driver that does not read requests any more
3. SIGKILL; nothing sealed is lost by it
4. where no signal reaches (another host): take the lease away; the driver finds itself fenced at
  its next step
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.driver_requests import DriverRequest, RequestKind, submit_request
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import LeaseObserver, evict_lease_holder
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.operators.driver_launch import send_signal

# What a person, or a time-out, made of a task; anything else means that a new try is on its way or
# has adopted the driver.
ENDED_TASK_STATES: Final = frozenset({"success", "failed", "removed", "skipped", "upstream_failed"})

_STOP_POLL_SECONDS = 0.5  # seconds
# Requests that only clear the way for a moment; what shall be afterwards stands in desired.json.
_HOLD_PREFIX = "hold-"


@dataclass(frozen=True)
class StopTimeouts:
    """Seconds to wait after each step of a stop."""

    request: float = 60.0
    terminate: float = 15.0
    kill: float = 5.0


class _DriverStop:
    def __init__(self, store: Store, pipeline: str, clock: Clock, token: int | None = None) -> None:
        self._clock = clock
        self._watch = LeaseObserver(store, pipeline, clock)
        self.view = self._watch.observe()
        self.token = token if token is not None else self.view.token if self.view else 0

    def has_ended(self) -> bool:
        """The driver that was there at the beginning no longer drives."""
        view = self._watch.observe()
        return self._watch.is_expired(view) or (view is not None and view.token != self.token)

    def wait_until_ended(self, seconds: float) -> bool:
        deadline = self._clock.monotonic() + seconds
        while not self.has_ended():
            if self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(_STOP_POLL_SECONDS)
        return True

    @property
    def driver_process(self) -> ProcessIdentity | None:
        return self.view.holder if self.view else None


def stop_driver(
    store: Store,
    pipeline: str,
    *,
    who: str,
    why: str,
    patience: StopTimeouts | None = None,
    token: int | None = None,
    asker: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Make sure that the present driver no longer drives; returns in one sentence how it went.

    Args:
        store: the bucket.
        pipeline: its name.
        who: said to the driver.
        why: said to the driver.
        patience: with each step.
        token: of the driver that is meant; None for whoever drives now.
        asker: several who stop the same driver for the same reason have the same name, and ask
            once.
        clock: for waiting.
        say: told about every step.
    """
    patience = patience or StopTimeouts()
    stopper = _DriverStop(store, pipeline, clock, token)
    if stopper.has_ended():
        return "no driver was running"
    say(f"asking the driver with token {stopper.token} to drain and stop")
    submit_request(
        store,
        pipeline,
        RequestKind.DRAIN,
        who=who,
        why=why,
        token=stopper.token,
        ttl=patience.request,
        request_id=f"{_HOLD_PREFIX}{f'{asker}-{stopper.token}' if asker else secrets.token_hex(8)}",
        clock=clock,
    )
    if stopper.wait_until_ended(patience.request):
        return "the driver drained and stopped by itself"
    return _escalate_stop(store, pipeline, stopper, patience, say)


def find_stop_request(store: Store, pipeline: str, token: int) -> DriverRequest | None:
    """The request by which somebody outside asked the driver with this token to end, if there was one."""
    layout = BucketLayout(pipeline)
    for entry in store.list_objects(layout.requests_prefix):
        if entry.key.removeprefix(layout.requests_prefix).startswith(_HOLD_PREFIX):
            continue
        request = _read_stop_request(store, entry.key)
        if (
            request is not None
            and request.kind in (RequestKind.STOP, RequestKind.DRAIN)
            and request.token == token
        ):
            return request
    return None


def terminate_driver(
    store: Store,
    pipeline: str,
    *,
    patience: StopTimeouts | None = None,
    clock: Clock = SYSTEM_CLOCK,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """As `stop_driver` for a driver that no longer listens: begins with SIGTERM."""
    stopper = _DriverStop(store, pipeline, clock)
    if stopper.has_ended():
        return "no driver was running"
    return _escalate_stop(store, pipeline, stopper, patience or StopTimeouts(terminate=5.0), say)


def _escalate_stop(
    store: Store,
    pipeline: str,
    stopper: _DriverStop,
    patience: StopTimeouts,
    say: Callable[[str], None],
) -> str:
    holder = stopper.driver_process
    for number, seconds in ((signal.SIGTERM, patience.terminate), (signal.SIGKILL, patience.kill)):
        if holder is None or not send_signal(holder, number):
            break
        say(f"sent {number.name} to pid {holder.pid}")
        if stopper.wait_until_ended(seconds):
            return f"the driver ended after {number.name}"
    if stopper.has_ended():
        return "the driver ended"
    evict_lease_holder(store, pipeline, expected_token=stopper.token)
    return "the lease was taken away; the driver stops at its next step"


def _read_stop_request(store: Store, key: str) -> DriverRequest | None:
    try:
        return DriverRequest.model_validate(parse_json(store.get(key).data))
    except (NotFoundError, ValueError):
        return None
