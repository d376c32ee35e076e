"""Requests of operators and of Airflow to a running driver, and the driver's acknowledgements.

A request names its target (a lease token, a barrier id) and an expiry, so that a successor never
obeys a request that was meant for its predecessor. The driver of a pipeline applies requests in an
epoch, whose manifest names their ids, and then acknowledges them. Stops, holds and refusals need no
epoch. An acknowledgement is written once and never changed.

`desired.json` says whether people want a pipeline to run, whatever its drivers do at the moment.
The sweep starts only pipelines that people want to run. A driver that is started in another way is
kept from running only if a person has stopped the pipeline or a restore is under way.
"""

import secrets
from enum import StrEnum
from typing import Required, Self, TypedDict, Unpack

from pydantic import model_validator

from tidegate.errors import PoisonError
from tidegate.jobs.spec.event_time_options import OmittedIfEmpty, OmittedIfNone

from .bucket_layout import BucketLayout, CheckpointId
from .errors import DESIRED_STATE_MOVED, REQUEST_MALFORMED, REQUEST_UNDECIDED
from .host_clock import SYSTEM_CLOCK, Clock
from .record_models import BucketRecord
from .shared_documents import SharedDocument, change_document, create_record, read_document
from .store import Store

DAY = 24 * 3600.0  # seconds
HOLD_PREFIX = "hold-"
"""Begin of the ids of requests that only clear the way for a moment, such as those of a deploy.

`desired.json` says whether the pipeline may run after.
"""
ANSWER_RETENTION = 3600.0
"""Seconds for which an answered request and its acknowledgement are kept.

Airflow reads a stop request after the driver has ended, and a person may wait minutes for an
answer. A late PUT cannot bring a deleted request back: S3 refuses signatures older than 15 minutes.
"""


class RequestKind(StrEnum):
    """What a driver can be asked to do."""

    STOP = "stop"  # drivers treat it as DRAIN
    DRAIN = "drain"  # finish what was read, seal, end
    ABORT_BARRIER = "abort-barrier"  # close the barrier with this id as aborted
    CANCEL_BARRIERS = "cancel-barriers"  # close this barrier and all before it as aborted
    CTI = "cti"  # punctuation at `time` for every member of the source `name`
    SAVEPOINT = "savepoint"  # seal an epoch now and pin it under a name
    PIN = "pin"  # pin the newest checkpoint under a name
    ATTACH = "attach"  # a pipe or reducer: begin with its backfill
    DETACH = "detach"  # a pipe or reducer: dispatch no later row
    RESUME = "resume"  # a paused pipe or reducer: go on with the row at which it failed
    HOLD = "hold"  # seal nothing until a merge has had its slot, or the request has expired


_REQUIRED_FIELD = {
    RequestKind.STOP: "token",
    RequestKind.DRAIN: "token",
    RequestKind.ABORT_BARRIER: "barrier",
    RequestKind.CANCEL_BARRIERS: "barrier",
    RequestKind.CTI: "time",
}  # the other kinds need a name


class AckOutcome(StrEnum):
    """How a request ended."""

    APPLIED = "applied"
    REFUSED = "refused"  # it named another target, or cannot be done
    EXPIRED = "expired"


class _RequestMessage(BucketRecord):
    format_version: int = 1
    id: str


class RequestFields(TypedDict, total=False):
    """The fields that a requester fills in, besides the kind."""

    who: Required[str]
    why: str
    token: int | None
    barrier: int | None
    name: str | None
    time: int | None


class DriverRequest(_RequestMessage):
    """One request.

    `at` and `expires_at` are wall-clock microseconds of the asking host. The expiry is a courtesy;
    the lease token is what protects a successor. `time` is an event time in ticks.

    Attributes:
        token: only the driver with this lease token may apply it; None: any driver.
        name: what the kind needs: a pin, a source, or a pipe or reducer.

    Raises:
        ValueError: the field that the kind needs is missing: `token`, `barrier`, `time` or `name`.
    """

    kind: RequestKind
    who: str
    why: str = ""
    at: int
    expires_at: int
    token: int | None = None
    barrier: int | None = None
    name: str | None = None
    # Left out elsewhere: older drivers refuse requests with fields that they do not know.
    time: OmittedIfNone[int] = None

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        field = _REQUIRED_FIELD.get(self.kind, "name")
        if getattr(self, field) is None:
            raise ValueError(f"a {self.kind} request names its {field}")
        return self

    def refusal_outcome(self, token: int, now: int) -> AckOutcome | None:
        """Return why the driver with `token` must not apply it at `now` (ticks); None if it may."""
        if self.token is not None and self.token != token:
            return AckOutcome.REFUSED
        return AckOutcome.EXPIRED if now >= self.expires_at else None


class Ack(_RequestMessage):
    """How the request with the same id ended.

    Attributes:
        checkpoint: the checkpoint that applied it; of a job, its newest. None without one.
        token: lease token of the driver; 0 if the merge that asked for a hold ended it.
        at: wall-clock microseconds of the host that acknowledged.
    """

    outcome: AckOutcome
    detail: str = ""
    checkpoint: str | None = None
    token: int
    at: int


def submit_request(
    store: Store,
    pipeline: str,
    kind: RequestKind,
    *,
    ttl: float = DAY,
    request_id: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    **fields: Unpack[RequestFields],
) -> DriverRequest:
    """Write a request and return it.

    Submitting the same `request_id` again is harmless and returns the first request, until that is
    deleted (`ANSWER_RETENTION`).

    Args:
        store: the bucket.
        pipeline: its name.
        kind: what to ask for.
        ttl: seconds until the request expires.
        request_id: default: a new random id.
        clock: gives the time of the request.
        **fields: the fields of the kind, see `DriverRequest`.

    Raises:
        ValueError: a field that the kind needs is missing.
        ConfigurationError: `request_id` cannot be part of a key.
        TransientError: the store gave no answer.
    """
    now = clock.wall_ticks()
    request = DriverRequest(
        id=request_id or secrets.token_hex(8),
        kind=kind,
        at=now,
        expires_at=now + int(ttl * 1_000_000),
        **fields,
    )
    key = BucketLayout(pipeline).request_key(request.id)
    return create_record(store, key, request, REQUEST_UNDECIDED, REQUEST_MALFORMED)


def list_pending_requests(store: Store, pipeline: str) -> list[DriverRequest]:
    """Return the requests without an acknowledgement, oldest first, for display.

    Expired ones are included, because only a driver answers them.

    Raises:
        PoisonError: this version cannot read a request.
    """
    layout = BucketLayout(pipeline)
    asked = [layout.parse_request_key(e.key) for e in store.list_objects(layout.requests_prefix)]
    if not asked:
        return []
    done = {layout.parse_request_key(e.key) for e in store.list_objects(layout.acks_prefix)}
    requests = [_read_request(store, layout, name) for name in asked if name not in done]
    return _sort_requests([request for request in requests if request])


class RequestQueue:
    """The requests as a driver reads them, at each turn of its loop.

    A turn costs one LIST, and two GETs for each open request.

    It remembers which requests are answered, and deletes them with their acknowledgements when
    `ANSWER_RETENTION` is over, so that the LIST does not grow.

    Attributes:
        unreadable: request id -> why this version cannot read it. Such a request is left to a newer
            driver: during an upgrade people may use a newer version than the driver.
    """

    def __init__(self, store: Store, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._layout, self._clock = store, BucketLayout(pipeline), clock
        self._answered: dict[str, int] = {}  # request id -> wall clock of its answer
        self.unreadable: dict[str, PoisonError] = {}

    def list_pending(self) -> list[DriverRequest]:
        """Return the requests without an acknowledgement, oldest first, expired ones included.

        Requests that this version cannot read are left out (`unreadable`).
        """
        pending = []
        for entry in list(self._store.list_objects(self._layout.requests_prefix)):
            name = self._layout.parse_request_key(entry.key)
            # Not asked again: a request that this version cannot read stays unreadable for it.
            if name in self.unreadable:
                continue
            # An acknowledgement is final, so an answered request is not read again.
            if name not in self._answered:
                try:
                    ack = read_ack(self._store, self._layout.pipeline, name)
                    request = None if ack else _read_request(self._store, self._layout, name)
                except PoisonError as error:
                    # During an upgrade a newer version may have written it, for
                    # a newer driver.
                    self.unreadable[name] = error
                    continue
                if ack is None:
                    pending += [request] if request else []
                    continue
                self._answered[name] = ack.at
            age = self._clock.wall_ticks() - self._answered[name]
            if age >= ANSWER_RETENTION * 1_000_000:
                # The request goes first: without its acknowledgement it would be applied again.
                self._store.delete(self._layout.request_key(name))
                self._store.delete(self._layout.ack_key(name))
                del self._answered[name]
        return _sort_requests(pending)

    def acknowledge(
        self,
        request: DriverRequest,
        outcome: AckOutcome,
        detail: str,
        token: int,
        checkpoint: CheckpointId | None,
    ) -> None:
        """Write how a request ended; an acknowledgement that is there already stays.

        Args:
            request: the request.
            outcome: how it ended.
            detail: a sentence for people.
            token: of the driver's lease.
            checkpoint: the checkpoint that applied it.
        """
        ack = Ack(
            id=request.id,
            outcome=outcome,
            detail=detail,
            checkpoint=str(checkpoint) if checkpoint else None,
            token=token,
            at=self._clock.wall_ticks(),
        )
        acknowledge_request(self._store, self._layout.pipeline, ack)


def acknowledge_request(store: Store, pipeline: str, ack: Ack) -> Ack:
    """Write how a request ended; the first acknowledgement is final and is returned."""
    key = BucketLayout(pipeline).ack_key(ack.id)
    return create_record(store, key, ack, REQUEST_UNDECIDED, REQUEST_MALFORMED)


def read_ack(store: Store, pipeline: str, request_id: str) -> Ack | None:
    """Return how a request ended.

    None while it is open, if it is unknown, or once its answer is deleted (`ANSWER_RETENTION`).

    Raises:
        PoisonError: this version cannot read the acknowledgement.
    """
    key = BucketLayout(pipeline).ack_key(request_id)
    return read_document(store, key, Ack, REQUEST_MALFORMED)[0]


def _read_request(store: Store, layout: BucketLayout, request_id: str) -> DriverRequest | None:
    return read_document(store, layout.request_key(request_id), DriverRequest, REQUEST_MALFORMED)[0]


def _sort_requests(requests: list[DriverRequest]) -> list[DriverRequest]:
    return sorted(requests, key=lambda request: (request.at, request.id))


# Ticks. Generous, because clocks of two hosts are compared: a restore takes a minute at most.
_ABANDONED_AFTER = 15 * 60 * 1_000_000


class DesiredState(StrEnum):
    """What people want of a pipeline."""

    RUN = "run"
    STOPPED = "stopped"  # by a person; nothing starts it but a person
    RECOVERING = "recovering"  # a restore is under way; nothing else may start it


class DesiredDocument(SharedDocument):
    """The content of `desired.json`. A pipeline that was never started counts as stopped.

    Attributes:
        who: who wants it; empty before anything was wanted.
        at: wall clock of the host that recorded it, microseconds UTC.
        run: how often a stopped pipeline was started again.
    """

    state: DesiredState = DesiredState.STOPPED
    who: str = ""
    why: str = ""
    at: int = 0
    run: OmittedIfEmpty[int] = 0

    @property
    def keeps_drivers_away(self) -> bool:
        """Whether a person or a restore has asked that no driver runs now."""
        return self.who != "" and self.state is not DesiredState.RUN


def read_desired_state(store: Store, pipeline: str) -> DesiredDocument:
    """Return what people want now; stopped, without a `who`, if the pipeline was never started."""
    found, _ = read_document(store, BucketLayout(pipeline).desired_key, DesiredDocument)
    return found or DesiredDocument()


def set_desired_state(
    store: Store,
    pipeline: str,
    state: DesiredState,
    *,
    who: str,
    why: str = "",
    only_from: DesiredState | None = None,
) -> DesiredDocument:
    """Record what people want of a pipeline, by compare-and-swap, and return the document.

    The same state, person and reason again change nothing, whatever `only_from` is.

    Args:
        store: the bucket.
        pipeline: its name.
        state: what is wanted from now on.
        who: who wants it.
        why: the reason.
        only_from: the state that the caller expects; None: any.

    Raises:
        ConfigurationError: another state than `only_from` is wanted.
    """

    def apply_state(before: DesiredDocument) -> DesiredDocument:
        if before.state is state and before.who == who and before.why == why:
            return before
        if only_from is not None and before.state is not only_from:
            raise DESIRED_STATE_MOVED(
                pipeline=pipeline, state=before.state, who=before.who or "no one", only=only_from
            )
        # `who` is empty before anything was wanted: the first start follows no stop.
        starts = before.who and (before.state, state) == (DesiredState.STOPPED, DesiredState.RUN)
        run = before.run + bool(starts)
        return before.model_copy(
            update={
                "state": state,
                "who": who,
                "why": why,
                "at": SYSTEM_CLOCK.wall_ticks(),
                "run": run,
            }
        )

    return change_document(
        store, BucketLayout(pipeline).desired_key, DesiredDocument(), apply_state
    )


def end_abandoned_recovery(
    store: Store, pipeline: str, *, who: str, clock: Clock = SYSTEM_CLOCK
) -> DesiredDocument:
    """End a recovery whose process was killed, and return what people want then.

    A recovery counts as abandoned 15 minutes after its begin; the pipeline is then wanted running.
    Otherwise nothing ends. The store measures that time if it has a clock. Only if it has none, the
    clock of this host does, from now on if the begin is in its future. The restore is one PUT, so
    it either happened or did not; the next driver finds in the log where to continue.
    """
    key = BucketLayout(pipeline).desired_key
    desired = read_desired_state(store, pipeline)
    if desired.state is not DesiredState.RECOVERING:
        return desired
    # The clocks of two hosts may differ, and that of one may go back.
    now, age = clock.wall_ticks(), store.get(key).age
    passed = now - desired.at if age is None else age * 1_000_000
    if 0 <= passed < _ABANDONED_AFTER:
        return desired
    why = f"the recovery begun by {desired.who} was abandoned"
    ended = {"state": DesiredState.RUN, "who": who, "why": why}
    change = {"at": now, **(ended if passed > 0 else {})}
    return change_document(
        store,
        key,
        DesiredDocument(),
        lambda before: before.model_copy(update=change) if before == desired else before,
    )
