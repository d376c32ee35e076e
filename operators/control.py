"""Stop a driver: first by asking, then harder; never a process that is not exactly the one meant.

1. a stop request, which the driver obeys between two epochs: what was read is sealed, the lease is given back
2. SIGTERM, which means the same to a driver that does not read requests any more
3. SIGKILL; nothing sealed is lost by it
4. where no signal reaches (another host): take the lease away; the driver finds itself fenced at its next step
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidegate.checkpoints.canonical import parse_json
from tidegate.checkpoints.clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.layout import Layout
from tidegate.checkpoints.lease import Holder, LeaseWatch, evict
from tidegate.checkpoints.requests import Kind, Request, submit
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.operators.launch import send_signal

__all__ = ["OVER", "Patience", "asked_to_stop", "remove_driver", "stop_driver"]

# What a person, or a time-out, made of a task; anything else means that a new try is on its way or has adopted the driver.
OVER: Final = frozenset({"success", "failed", "removed", "skipped", "upstream_failed"})

_LOOK_EVERY = 0.5  # seconds
_OURS = "hold-"  # requests that only clear the way for a moment; what shall be afterwards stands in desired.json


@dataclass(frozen=True)
class Patience:
    """Seconds to wait after each step of a stop."""

    request: float = 60.0
    terminate: float = 15.0
    kill: float = 5.0


class _Stopper:
    def __init__(self, store: Store, pipeline: str, clock: Clock, token: int | None = None) -> None:
        self._clock = clock
        self._watch = LeaseWatch(store, pipeline, clock)
        self.view = self._watch.look()
        self.token = token if token is not None else self.view.token if self.view else 0

    def gone(self) -> bool:
        """The driver that was there at the beginning no longer drives."""
        view = self._watch.look()
        return self._watch.expired(view) or (view is not None and view.token != self.token)

    def wait(self, seconds: float) -> bool:
        deadline = self._clock.now() + seconds
        while not self.gone():
            if self._clock.now() >= deadline:
                return False
            self._clock.sleep(_LOOK_EVERY)
        return True

    @property
    def holder(self) -> Holder | None:
        return self.view.holder if self.view else None


def stop_driver(
    store: Store,
    pipeline: str,
    *,
    who: str,
    why: str,
    patience: Patience | None = None,
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
        asker: several who stop the same driver for the same reason have the same name, and ask once.
        clock: for waiting.
        say: told about every step.
    """
    patience = patience or Patience()
    stopper = _Stopper(store, pipeline, clock, token)
    if stopper.gone():
        return "no driver was running"
    say(f"asking the driver with token {stopper.token} to drain and stop")
    submit(
        store,
        pipeline,
        Kind.DRAIN,
        who=who,
        why=why,
        token=stopper.token,
        ttl=patience.request,
        request_id=f"{_OURS}{f'{asker}-{stopper.token}' if asker else secrets.token_hex(8)}",
        clock=clock,
    )
    if stopper.wait(patience.request):
        return "the driver drained and stopped by itself"
    return _harder(store, pipeline, stopper, patience, say)


def asked_to_stop(store: Store, pipeline: str, token: int) -> Request | None:
    """The request by which somebody outside asked the driver with this token to end, if there was one."""
    layout = Layout(pipeline)
    for entry in store.list(layout.requests):
        if entry.key.removeprefix(layout.requests).startswith(_OURS):
            continue
        request = _request(store, entry.key)
        if request is not None and request.kind in (Kind.STOP, Kind.DRAIN) and request.token == token:
            return request
    return None


def remove_driver(
    store: Store,
    pipeline: str,
    *,
    patience: Patience | None = None,
    clock: Clock = SYSTEM_CLOCK,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """As `stop_driver` for a driver that no longer listens: begins with SIGTERM."""
    stopper = _Stopper(store, pipeline, clock)
    if stopper.gone():
        return "no driver was running"
    return _harder(store, pipeline, stopper, patience or Patience(terminate=5.0), say)


def _harder(store: Store, pipeline: str, stopper: _Stopper, patience: Patience, say: Callable[[str], None]) -> str:
    holder = stopper.holder
    for number, seconds in ((signal.SIGTERM, patience.terminate), (signal.SIGKILL, patience.kill)):
        if holder is None or not send_signal(holder, number):
            break
        say(f"sent {number.name} to pid {holder.pid}")
        if stopper.wait(seconds):
            return f"the driver ended after {number.name}"
    if stopper.gone():
        return "the driver ended"
    evict(store, pipeline, expected_token=stopper.token)
    return "the lease was taken away; the driver stops at its next step"


def _request(store: Store, key: str) -> Request | None:
    try:
        return Request.model_validate(parse_json(store.get(key).data))
    except (NotFoundError, ValueError):
        return None
