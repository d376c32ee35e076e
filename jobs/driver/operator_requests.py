"""Requests of operators: collected before an epoch, acknowledged after the epoch was sealed."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.driver_requests import (
    AckOutcome,
    DriverRequest,
    RequestKind,
    RequestQueue,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.pins import pin_checkpoint
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, PoisonError
from tidegate.jobs.engine.epoch_engine import EpochReport, EpochRequests
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import format_instant

_log = structlog.get_logger("tidegate.driver")

# Between two epochs, stop and drain mean the same: everything that was read is sealed.
ENDING_KINDS: Final = (RequestKind.STOP, RequestKind.DRAIN)
PINNING_KINDS: Final = (RequestKind.SAVEPOINT, RequestKind.PIN)
_ATTACHING_KINDS = (RequestKind.ATTACH, RequestKind.DETACH, RequestKind.RESUME)
# Seconds on the driver's clock. The process that asked may be dead, or its clock may be wrong.
_LONGEST_HOLD = 300.0


@dataclass
class RequestInbox:
    """Reads ``requests/`` once per `collect`: one LIST, and two GETs per open request.

    A request whose id is in the newest manifest, but which has no acknowledgement, was applied by a
    driver that died after the seal. Only what follows from it (a pin, the acknowledgement) is then
    done. So no request is applied twice.

    Attributes:
        store: the pipeline's store.
        spec: the pipeline; its pipes and reducers may be attached.
        token: returns the token of the lease.
        stop: set when a request asks the driver to end.
        newest: returns the manifest of the newest epoch or merge; None before the first.
        clock: for expiry and holds.
        held: the request of a merge that has the next slot; until it is None, the driver must not
            seal.
    """

    store: Store
    spec: PipelineSpec
    token: Callable[[], int]
    stop: threading.Event
    newest: Callable[[], Manifest | None]
    clock: Clock = SYSTEM_CLOCK
    held: DriverRequest | None = None

    def __post_init__(self) -> None:
        self._attachments = self.spec.stream_graph.attachments
        self._queue = RequestQueue(self.store, self.spec.name, self.clock)
        self._collected: list[DriverRequest] = []
        self._held_since: dict[str, float] = {}  # request id -> when it was first read

    def collect(self) -> EpochRequests:
        """Return the requests for the coming epoch.

        Stop, drain and hold take effect at once, because they need no sealed epoch. Requests that
        are refused or too old are acknowledged here. A later call returns the same requests again
        until they are acknowledged.
        """
        self.held = None
        self._collected = [r for r in self._list_unfinished() if self._is_for_epoch(r)]
        named = [(r.kind, r.name) for r in self._collected if r.name is not None]
        return EpochRequests(
            ids=tuple(r.id for r in self._collected),
            aborts=self._list_barriers(RequestKind.ABORT_BARRIER),
            cancels=self._list_barriers(RequestKind.CANCEL_BARRIERS),
            ctis=tuple(
                (r.name, r.time)
                for r in self._collected
                if r.kind is RequestKind.CTI and r.name is not None and r.time is not None
            ),
            savepoints=tuple(name for kind, name in named if kind in PINNING_KINDS),
            attachments=tuple(
                (kind.value, name) for kind, name in named if kind in _ATTACHING_KINDS
            ),
        )

    def _is_for_epoch(self, request: DriverRequest) -> bool:
        """Carry out or refuse what needs no epoch; return True for all other requests."""
        refusal = request.refusal_outcome(self.token(), self.clock.wall_ticks())
        if refusal is not None:
            self._acknowledge_request(request, refusal, "meant for another driver, or too old")
        elif request.kind in ENDING_KINDS:
            _log.info("stop_requested", who=request.who, why=request.why)
            # Acknowledged first. If this process dies in between, nothing is lost: it has stopped.
            self._acknowledge_request(request, AckOutcome.APPLIED, "stopping")
            self.stop.set()
        elif request.kind in _ATTACHING_KINDS and request.name not in self._attachments:
            self._acknowledge_request(
                request, AckOutcome.REFUSED, f"no pipe or reducer named {request.name}"
            )
        elif refused := self._refuse_cti(request):
            self._acknowledge_request(request, AckOutcome.REFUSED, refused)
        elif request.kind is RequestKind.HOLD:
            self._hold_next_slot(request)
        else:
            return True
        return False

    def _list_barriers(self, kind: RequestKind) -> tuple[int, ...]:
        found = [r.barrier for r in self._collected if r.kind is kind]
        return tuple(barrier for barrier in found if barrier is not None)

    def _refuse_cti(self, request: DriverRequest) -> str:
        """Say why a CTI cannot be sent; empty if it can, or for another request.

        A CTI in the past of all members is a violation: they have promised more than it says.
        """
        if request.kind is not RequestKind.CTI:
            return ""
        source, newest = self.spec.sources.get(request.name or ""), self.newest()
        if source is None or source.punctuation is None:
            known = [name for name, one in self.spec.sources.items() if one.punctuation]
            listed = f"sources with one: {', '.join(known) or 'none'}"
            return f"no source {request.name} with a 'punctuation' section; {listed}"
        states = newest.decider["members"] if newest else {}
        promised = [
            (state["generator"] or {}).get("current")
            for name, state in states.items()
            if name.partition("/")[0] == request.name
        ]
        known_marks = [mark for mark in promised if mark is not None]
        mark = (request.time or 0) + (source.frontier == "inclusive")
        if known_marks and len(known_marks) == len(promised) and mark <= min(known_marks):
            return f"CTI violation: {request.name} has promised {format_instant(min(known_marks))}"
        return ""

    def acknowledge_applied(self, report: EpochReport) -> None:
        """Acknowledge what the sealed epoch applied, and pin it for requests that ask for that.

        `report` is that of the sealed epoch with the requests of the last `collect`. The ids are in
        its manifest, so a crash before this call repeats nothing.
        """
        for request in self._collected:
            self._finish_request(request, report.sealed)
        self._collected = []

    def _hold_next_slot(self, request: DriverRequest) -> None:
        """Hold for a merge, but not longer than `_LONGEST_HOLD`.

        The merge acknowledges its request when it has ended.
        """
        since = self._held_since.setdefault(request.id, self.clock.monotonic())
        if self.clock.monotonic() - since < _LONGEST_HOLD:
            self.held = request
        else:
            self._acknowledge_request(
                request, AckOutcome.EXPIRED, f"held for {_LONGEST_HOLD:.0f} s"
            )

    def _list_unfinished(self) -> list[DriverRequest]:
        """List the open requests; those that the newest epoch applied are finished on the way."""
        newest, unfinished = self.newest(), []
        known = set(self._queue.unreadable)
        pending = self._queue.list_pending()
        for name in self._queue.unreadable.keys() - known:
            error = self._queue.unreadable[name]
            _log.warning("request_not_read", request=name, error=error.message, advice=error.advice)
        for request in pending:
            if newest is not None and request.id in newest.requests:
                self._finish_request(request, newest.id)
            else:
                unfinished.append(request)
        return unfinished

    def _finish_request(self, request: DriverRequest, checkpoint: CheckpointId | None) -> None:
        outcome, detail = AckOutcome.APPLIED, ""
        if request.kind in PINNING_KINDS and checkpoint is not None:
            log = SlotLog(self.store, self.spec.name)
            outcome, detail = pin_for_request(log, request, checkpoint)
        self._acknowledge_request(request, outcome, detail, checkpoint)

    def _acknowledge_request(
        self,
        request: DriverRequest,
        outcome: AckOutcome,
        detail: str,
        checkpoint: CheckpointId | None = None,
    ) -> None:
        self._queue.acknowledge(request, outcome, detail, self.token(), checkpoint)


def pin_for_request(
    log: SlotLog, request: DriverRequest, checkpoint: CheckpointId
) -> tuple[AckOutcome, str]:
    """Pin a checkpoint under the name of a request, and return how the request ends."""
    # The answer to the seal may have come late: another driver may have sealed behind this epoch,
    # and retention may have retired it. Then there is nothing left to pin.
    try:
        pin_checkpoint(log, request.name or "", checkpoint, who=request.who, why=request.why)
    except (ConfigurationError, PoisonError) as error:
        return AckOutcome.REFUSED, error.message
    return AckOutcome.APPLIED, f"pinned as {request.name}"
