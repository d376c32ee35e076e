"""Requests of people, as the loop meets them.

Taken before an epoch, acknowledged after it was sealed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import structlog

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    DriverRequest,
    RequestKind,
    acknowledge_request,
    list_pending_requests,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.epoch_engine import EpochReport, EpochRequests

_log = structlog.get_logger("tidegate.driver")

_ENDING_KINDS = (
    RequestKind.STOP,
    RequestKind.DRAIN,
)  # between two epochs both come to the same: what was read is sealed
_PINNING_KINDS = (RequestKind.SAVEPOINT, RequestKind.PIN)
_ATTACHING_KINDS = (RequestKind.ATTACH, RequestKind.DETACH, RequestKind.RESUME)
_LONGEST_HOLD = (
    300.0  # seconds, on the own clock: whoever asked may be dead, and may have another time of day
)


class RequestInbox:
    """Reads ``requests/`` once an epoch; one LIST when there is nothing.

    `newest` gives the newest sealed manifest. A request that stands in it without an
    acknowledgement was applied by a driver that died, or did not know yet that it had sealed: what
    follows from it (a pin) is made up for, and nothing is applied twice.

    Attributes:
        held: the merge that asked to have the next slot; as long as it stands, nothing may be
            sealed.
    """

    def __init__(
        self,
        store: Store,
        pipeline: str,
        token: Callable[[], int],
        stop: threading.Event,
        newest: Callable[[], Manifest | None],
        clock: Clock = SYSTEM_CLOCK,
        attachments: Collection[str] = (),
    ) -> None:
        self._store, self._pipeline, self._token, self._stop = store, pipeline, token, stop
        self._newest, self._clock, self._attachments = newest, clock, attachments
        self._open: list[DriverRequest] = []
        self._holds: dict[str, float] = {}  # request -> when it was first met
        self.held: DriverRequest | None = None

    def collect(self) -> EpochRequests:
        """Requests for the coming epoch.

        A stop is obeyed at once: nothing has to be sealed for it.
        """
        fit = []
        self.held = None
        for request in self._list_unfinished():
            unfit = request.refusal_outcome(self._token(), self._clock.wall_ticks())
            if unfit is not None:
                self._acknowledge_request(request, unfit, "meant for another driver, or too old")
            elif request.kind in _ENDING_KINDS:
                _log.info("stop_requested", who=request.who, why=request.why)
                self._acknowledge_request(request, AckOutcome.APPLIED, "stopping")
                self._stop.set()
            elif request.kind in _ATTACHING_KINDS and request.name not in self._attachments:
                self._acknowledge_request(
                    request, AckOutcome.REFUSED, f"no pipe or reducer named {request.name}"
                )
            elif request.kind is RequestKind.HOLD:
                self._hold_next_slot(request)
            else:
                fit.append(request)
        self._open = fit
        return EpochRequests(
            ids=tuple(r.id for r in fit),
            aborts=tuple(r.barrier for r in fit if r.barrier is not None),
            savepoints=tuple(
                r.name for r in fit if r.kind in _PINNING_KINDS and r.name is not None
            ),
            attachments=tuple(
                (r.kind.value, r.name)
                for r in fit
                if r.kind in _ATTACHING_KINDS and r.name is not None
            ),
        )

    def acknowledge_applied(self, report: EpochReport) -> None:
        """Acknowledge what the sealed epoch applied.

        The ids stand in its manifest, so a crash before this repeats nothing.
        """
        for request in self._open:
            self._finish_request(request, report.sealed)
        self._open = []

    def _hold_next_slot(self, request: DriverRequest) -> None:
        """Hold for it, unless it has been held for too long.

        Whoever asked acknowledges it when the merge has ended.
        """
        since = self._holds.setdefault(request.id, self._clock.monotonic())
        if self._clock.monotonic() - since < _LONGEST_HOLD:
            self.held = request
        else:
            self._acknowledge_request(
                request, AckOutcome.EXPIRED, f"held for {_LONGEST_HOLD:.0f} s"
            )

    def _list_unfinished(self) -> list[DriverRequest]:
        """Open requests without those that the newest epoch applied, which are finished on the way."""
        manifest, left = self._newest(), []
        for request in list_pending_requests(self._store, self._pipeline):
            if manifest is not None and request.id in manifest.requests:
                self._finish_request(request, manifest.id)
            else:
                left.append(request)
        return left

    def _finish_request(self, request: DriverRequest, checkpoint: CheckpointId | None) -> None:
        outcome, detail = AckOutcome.APPLIED, ""
        if request.kind in _PINNING_KINDS and checkpoint is not None:
            outcome, detail = self._pin_checkpoint(request, checkpoint)
        self._acknowledge_request(request, outcome, detail, checkpoint)

    def _pin_checkpoint(
        self, request: DriverRequest, checkpoint: CheckpointId
    ) -> tuple[AckOutcome, str]:
        try:
            RootsFile(self._store, self._pipeline).pin(
                request.name or "", checkpoint, who=request.who, why=request.why
            )
        except ConfigurationError as error:
            return AckOutcome.REFUSED, error.message
        return AckOutcome.APPLIED, f"pinned as {request.name}"

    def _acknowledge_request(
        self,
        request: DriverRequest,
        outcome: AckOutcome,
        detail: str,
        checkpoint: CheckpointId | None = None,
    ) -> None:
        ack = Ack(
            id=request.id,
            outcome=outcome,
            detail=detail,
            checkpoint=str(checkpoint) if checkpoint else None,
            token=self._token(),
            at=self._clock.wall_ticks(),
        )
        acknowledge_request(self._store, self._pipeline, ack)
