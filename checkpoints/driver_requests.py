"""What people and Airflow ask of a running driver, and what became of it.

A request names its target (a lease token, a barrier id) and an expiry, so that a successor never
obeys what was meant for its predecessor. The driver applies it, writes its id into the manifest,
and then acknowledges: the ack is put once and final.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from enum import StrEnum
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
)
from tidegate.errors import PoisonError, TransientError

_TRIES = 8
DAY = 24 * 3600.0  # seconds


class RequestKind(StrEnum):
    """What can be asked for."""

    STOP = "stop"  # seal nothing more, end now
    DRAIN = "drain"  # finish what was read, seal, end
    ABORT_BARRIER = "abort-barrier"  # barrier event by id
    SAVEPOINT = "savepoint"  # seal an epoch now and pin it under a name
    PIN = "pin"  # pin the newest checkpoint under a name
    ATTACH = "attach"  # a pipe or reducer: begin with its backfill
    DETACH = "detach"  # a pipe or reducer: dispatch no later row
    RESUME = "resume"  # a paused pipe or reducer: go on with the row it failed at
    HOLD = "hold"  # seal nothing until a merge has had its slot, or the request has expired


class AckOutcome(StrEnum):
    """What became of a request."""

    APPLIED = "applied"
    REFUSED = "refused"  # named another target, or cannot be done
    EXPIRED = "expired"


class _RequestMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    id: str

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        return canonical_bytes(self.model_dump(mode="json"))


class DriverRequest(_RequestMessage):
    """One request.

    `expires_at` and `at` are wall-clock microseconds of the asking host: a courtesy, not a guard.
    """

    kind: RequestKind
    who: str
    why: str = ""
    at: int
    expires_at: int
    token: int | None = None
    barrier: int | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        needed = {
            RequestKind.STOP: ("token", self.token),
            RequestKind.DRAIN: ("token", self.token),
            RequestKind.ABORT_BARRIER: ("barrier", self.barrier),
            RequestKind.SAVEPOINT: ("name", self.name),
            RequestKind.PIN: ("name", self.name),
            RequestKind.ATTACH: ("name", self.name),
            RequestKind.DETACH: ("name", self.name),
            RequestKind.RESUME: ("name", self.name),
            RequestKind.HOLD: ("name", self.name),
        }
        field, value = needed[self.kind]
        if value is None:
            raise ValueError(f"a {self.kind} request names its {field}")
        return self

    def refusal_outcome(self, token: int, now: int) -> AckOutcome | None:
        """Why the driver with `token` must not apply it at `now`; None when it may."""
        if self.token is not None and self.token != token:
            return AckOutcome.REFUSED
        return AckOutcome.EXPIRED if now >= self.expires_at else None


class Ack(_RequestMessage):
    """What became of the request with the same id."""

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
    who: str,
    why: str = "",
    token: int | None = None,
    barrier: int | None = None,
    name: str | None = None,
    ttl: float = DAY,
    request_id: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> DriverRequest:
    """Put a request.

    Submitting the same `request_id` again is harmless and returns the first one.
    """
    now = clock.wall_ticks()
    request = DriverRequest(
        id=request_id or secrets.token_hex(8),
        kind=kind,
        who=who,
        why=why,
        at=now,
        expires_at=now + int(ttl * 1_000_000),
        token=token,
        barrier=barrier,
        name=name,
    )
    return _put_message_once(store, BucketLayout(pipeline).request_key(request.id), request)


def list_pending_requests(
    store: Store, pipeline: str, *, applied: Collection[str] = ()
) -> list[DriverRequest]:
    """Requests without an acknowledgement, oldest first.

    `applied` are ids that stand in manifests but were not acked yet.

    One LIST when there is nothing: a driver asks at every turn of its loop.
    """
    layout = BucketLayout(pipeline)
    asked = [entry.key for entry in store.list_objects(layout.requests_prefix)]
    done = (
        {entry.key[len(layout.acks_prefix) :] for entry in store.list_objects(layout.acks_prefix)}
        if asked
        else set()
    )
    keys = [key for key in asked if key[len(layout.requests_prefix) :] not in done]
    found = [
        request
        for key in keys
        if (request := _read_message(store, key, DriverRequest)) and request.id not in applied
    ]
    return sorted(found, key=lambda request: (request.at, request.id))


def acknowledge_request(store: Store, pipeline: str, ack: Ack) -> Ack:
    """Say what became of a request; the first acknowledgement is final and is returned."""
    return _put_message_once(store, BucketLayout(pipeline).ack_key(ack.id), ack)


def read_ack(store: Store, pipeline: str, request_id: str) -> Ack | None:
    """What became of a request, or None while it is open."""
    return _read_message(store, BucketLayout(pipeline).ack_key(request_id), Ack)


def delete_acknowledged_requests(store: Store, pipeline: str, *, now: int) -> int:
    """Delete requests that are acknowledged and past their expiry, with their acks.

    Return how many.

    Past its expiry, because a request that comes back (a late PUT) must be one that nobody applies.
    """
    layout, count = BucketLayout(pipeline), 0
    for entry in list(store.list_objects(layout.acks_prefix)):
        name = entry.key[len(layout.acks_prefix) :]
        request = _read_message(store, layout.requests_prefix + name, DriverRequest)
        if request is None or now >= request.expires_at:
            store.delete(layout.requests_prefix + name)
            store.delete(entry.key)
            count += 1
    return count


M = TypeVar("M", DriverRequest, Ack)


def _put_message_once(store: Store, key: str, message: M) -> M:
    for _ in range(_TRIES):
        try:
            store.create(key, message.to_bytes())
            return message
        except (PreconditionFailedError, OutcomeUnknownError):
            found = _read_message(store, key, type(message))
            if found is not None:
                return found
    raise TransientError(
        f"{store.uri(key)} could not be written", code="request.undecided", retry_after=2.0
    )


def _read_message(store: Store, key: str, kind: type[M]) -> M | None:
    try:
        found = store.get(key)
    except NotFoundError:
        return None
    try:
        return kind.model_validate(parse_json(found.data))
    except ValueError as error:
        raise PoisonError(
            f"{store.uri(key)} is not a readable {kind.__name__.lower()}",
            code="request.malformed",
            advice="delete the object and ask again",
        ) from error
