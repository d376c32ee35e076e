"""Requests of people, as the loop meets them: taken before an epoch, acknowledged after it was sealed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from tidegate.checkpoints.requests import Request, acknowledge, pending_requests
from tidegate.checkpoints.roots import pin
from tidegate.checkpoints.store import Store
from tidegate.jobs.engine.epoch import Asked, EpochReport

__all__ = ["Inbox"]

_log = structlog.get_logger("tidegate.driver")


class Inbox:
    """Reads ``requests/`` once an epoch; one LIST when there is nothing."""

    def __init__(self, store: Store, pipeline: str, token: Callable[[], int], stop: threading.Event) -> None:
        self._store, self._pipeline, self._token, self._stop = store, pipeline, token, stop
        self._open: tuple[Request, ...] = ()

    def collect(self) -> Asked:
        """Requests for the coming epoch. A stop is acknowledged and obeyed at once: nothing has to be sealed for it."""
        waiting = pending_requests(self._store, self._pipeline, token=self._token())
        for request in (r for r in waiting if r.kind in ("stop", "drain")):
            acknowledge(self._store, self._pipeline, request, outcome="stopping")
            _log.info("stop_requested", who=request.who, why=request.why)
            self._stop.set()
        self._open = tuple(r for r in waiting if r.kind not in ("stop", "drain"))
        return Asked(
            ids=tuple(r.id for r in self._open),
            aborts=tuple(int(r.target) for r in self._open if r.kind == "abort-barrier" and r.target),
            savepoints=tuple(r.target for r in self._open if r.kind == "savepoint" and r.target),
        )

    def applied(self, report: EpochReport) -> None:
        """Acknowledge what the sealed epoch applied; its id stands in the manifest, so a crash before this repeats nothing."""
        for request in self._open:
            if request.kind == "savepoint" and report.sealed is not None and request.target:
                pin(self._store, self._pipeline, report.sealed, name=request.target, who=request.who, why=request.why)
            acknowledge(self._store, self._pipeline, request, outcome=f"applied in {report.sealed}")
        self._open = ()
