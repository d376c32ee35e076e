"""Who drives.

The lease keeps drivers apart in peace; it is not what makes data safe, the slots are.

Rules, each with its reason:

* Every write is a swap by ETag with a fresh nonce: equal bytes would have an equal ETag, and an
  observer could not see a renewal.
* The holder counts its TTL from before it *sent* the renewal that counted, on a clock that runs
  during sleep.
* An observer trusts no time in the record: it times an *unchanged ETag* on its own clock, for the
  TTL the record names.
* The token grows with every takeover and stands in every manifest and status, so whoever reads them
  can tell old from new.
* A lost answer is read back; a nonce I sent is mine, whichever of my requests brought it there.
* Released means: swapped for a record without a holder. Nothing is ever deleted conditionally;
    MinIO ignores that condition.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.errors import OUTCOME_UNKNOWN, PRECONDITION_FAILED
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.store import (
    NotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
)
from tidegate.errors import ConfigurationError, FencedError, PoisonError

LEASE_TTL = (
    6.0  # seconds; three renewals may fail in a row, and a loss is still seen well under 15 s
)
LEASE_RENEW_INTERVAL = 2.0  # seconds
_OBSERVE_INTERVAL = 0.5  # seconds between looks at a foreign lease
_TRIES = 8  # lost answers in a row before giving the store up as ill


class LeaseHeldError(FencedError):
    """Somebody else drives and shows signs of life."""


class LeaseLostError(FencedError):
    """This process held the lease and no longer does. It stops; the stream goes on elsewhere."""


class LeaseRecord(BaseModel):
    """The bytes of `lease.json`. `holder` is None when the lease is free."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    pipeline: str
    uid: str | None
    token: int
    nonce: str
    ttl: float
    holder: ProcessIdentity | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What an observer sees.

    There is no age here: how long a lease has been silent is for `LeaseObserver` to measure.
    """

    record: LeaseRecord
    etag: str

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.record.token

    @property
    def holder(self) -> ProcessIdentity | None:
        """The driver, or None when the lease is free."""
        return self.record.holder

    @property
    def is_free(self) -> bool:
        """Nobody holds it, or the holder is proven dead."""
        return self.holder is None or self.holder.is_proven_dead()


def read_lease(store: Store, pipeline: str) -> LeaseView | None:
    """The lease as it lies in the bucket, or None if the pipeline never had one."""
    key = BucketLayout(pipeline).lease_key
    try:
        found = store.get(key)
    except NotFoundError:
        return None
    try:
        return LeaseView(LeaseRecord.model_validate(parse_json(found.data)), found.etag)
    except (ValueError, ValidationError) as error:
        raise PoisonError(
            f"{store.uri(key)} is not a lease", code="lease.malformed", pipeline=pipeline
        ) from error


class LeaseObserver:
    """An observer: how long has this lease shown no sign of life, on my clock?"""

    def __init__(self, store: Store, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._pipeline, self._clock = store, pipeline, clock
        self._etag: str | None = None
        self._since = self._asked = clock.monotonic()
        self.renewals_seen = 0

    def observe(self) -> LeaseView | None:
        """Read the lease and note whether it changed. Call it about once a second."""
        self._asked = self._clock.monotonic()
        view = read_lease(self._store, self._pipeline)
        if view is not None and view.etag != self._etag:
            self.renewals_seen += self._etag is not None
            self._etag, self._since = view.etag, self._clock.monotonic()
        elif view is None:
            self._etag, self._since = None, self._asked
        return view

    @property
    def silent_seconds(self) -> float:
        """Seconds from when the current version was first seen to when it was last asked for.

        What happened since then is not known: a store that is slow to answer, or an observer that
        is held up, is no silence.
        """
        return max(0.0, self._asked - self._since)

    def is_expired(self, view: LeaseView | None) -> bool:
        """Whether the lease just looked at may be taken.

        Absent, free, proven dead, or silent for longer than its TTL.
        """
        return view is None or view.is_free or self.silent_seconds > view.record.ttl


class Lease:
    """The lease as its holder has it. Thread-safe: the keeper renews while the driver checks."""

    def __init__(
        self, store: Store, record: LeaseRecord, etag: str, sent: float, clock: Clock
    ) -> None:
        self._store, self._clock = store, clock
        self._record, self._etag = record, etag
        self._key = BucketLayout(record.pipeline).lease_key
        self._valid_until = sent + record.ttl
        self._sent: dict[
            str, float
        ] = {}  # nonces whose answer was lost, with the time they were sent
        self._lost: str | None = None
        self._lock = threading.RLock()

    @classmethod
    def acquire(
        cls,
        store: Store,
        pipeline: str,
        holder: ProcessIdentity,
        *,
        ttl: float = LEASE_TTL,
        clock: Clock = SYSTEM_CLOCK,
        uid: str | None = None,
        standby: bool = False,
        stop: Callable[[], bool] = lambda: False,
        may: Callable[[], bool] = lambda: True,
    ) -> Lease:
        """Take the lease, waiting out a silent holder.

        Takes at once what is absent, free, or held by a process proven dead. Otherwise watches for
        the TTL of the record.

        With `standby`, go on waiting while the holder shows signs of life. `stop` is asked between
        looks and ends the wait. `may` is asked whenever the lease could be taken: while it says no,
        the lease is left alone.

        Raises:
            ConfigurationError: the lease in the bucket belongs to another pipeline uid.
            LeaseHeldError: the holder renewed while we watched (not with `standby`), or `stop` said
                so.
        """
        watch = LeaseObserver(store, pipeline, clock)
        lost_answers: dict[str, LeaseRecord] = {}
        while True:
            view = watch.observe()
            _require_same_uid(view, pipeline, uid)
            if view is not None and view.record.nonce in lost_answers:
                return cls(
                    store, view.record, view.etag, clock.monotonic() - ttl, clock
                )._renew_and_return()
            if watch.is_expired(view) and may():
                token = view.token + 1 if view else 1
                record = LeaseRecord(
                    pipeline=pipeline,
                    uid=uid,
                    token=token,
                    nonce=_make_nonce(),
                    ttl=ttl,
                    holder=holder,
                )
                taken = _try_acquire(store, record, view, clock)
                if taken is not None:
                    return taken
                lost_answers[record.nonce] = record
                if len(lost_answers) > _TRIES:
                    raise OUTCOME_UNKNOWN(
                        uri=store.uri(BucketLayout(pipeline).lease_key),
                        cause="no answer several times in a row",
                    )
                continue
            if stop() or (watch.renewals_seen and not standby):
                raise _lease_held_error(pipeline, view)
            clock.sleep(_OBSERVE_INTERVAL)

    @property
    def token(self) -> int:
        """The fencing token; stands in every manifest and status."""
        return self._record.token

    @property
    def holder(self) -> ProcessIdentity:
        """This process."""
        assert self._record.holder is not None  # noqa: S101 - by construction
        return self._record.holder

    @property
    def is_lost(self) -> bool:
        """Whether the lease is known to be somebody else's."""
        return self._lost is not None

    @property
    def remaining_seconds(self) -> float:
        """Seconds for which an observer must still wait; negative when it need not."""
        return self._valid_until - self._clock.monotonic()

    def ensure_held(self) -> None:
        """Make sure the lease is still ours, renewing it when its time ran out in between (a sleep, a slow store).

        Raises:
            LeaseLostError: somebody else took it.
            OutcomeUnknownError, StoreUnavailableError: that could not be found out.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lease_lost_error()
            if self.remaining_seconds <= 0:
                self.renew()

    def renew(self) -> None:
        """Swap in a fresh nonce. Also takes up a renewal whose answer was lost.

        Raises:
            LeaseLostError: somebody else took it.
            OutcomeUnknownError, StoreUnavailableError: no answer; the lease stays valid until its
            time runs out.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lease_lost_error()
            for _ in range(
                2
            ):  # a second swap is needed only when a lost renewal turns out to have arrived
                if self._try_renewal(self._record.model_copy(update={"nonce": _make_nonce()})):
                    return
            raise OUTCOME_UNKNOWN(
                uri=self._store.uri(self._key), cause="renewals overtook each other"
            )

    def release(self) -> None:
        """Let the next driver start at once. Silent when the lease is lost already.

        Raises:
            OutcomeUnknownError, StoreUnavailableError: no answer; the lease is given up here all
            the same and runs out by itself.
        """
        with self._lock:
            if self._lost is None:
                # Before sending: an answer that is lost must not leave it valid here.
                self._lost = "released by this driver"
                free = self._record.model_copy(update={"nonce": _make_nonce(), "holder": None})
                # A refusal means: taken over, or a lost renewal arrived. Then the lease ends by
                # itself.
                with suppress(PreconditionFailedError):
                    self._store.compare_and_swap(
                        self._key, canonical_bytes(free.model_dump(mode="json")), self._etag
                    )

    def _renew_and_return(self) -> Lease:
        self.renew()
        return self

    def _try_renewal(self, record: LeaseRecord) -> bool:
        """One renewal; False when an earlier one with a lost answer turned out to be in place."""
        sent = self._clock.monotonic()
        self._sent[record.nonce] = sent
        try:
            etag = self._store.compare_and_swap(
                self._key, canonical_bytes(record.model_dump(mode="json")), self._etag
            )
        except PreconditionFailedError:
            return self._read_back_renewal()
        except OutcomeUnknownError:
            if self._read_back_renewal():
                return True
            raise
        self._accept_renewal(record, etag, sent)
        return True

    def _read_back_renewal(self) -> bool:
        """Read the lease back: mine (True if newer than what I knew), or lost."""
        view = read_lease(self._store, self._record.pipeline)
        if view is not None and view.record.nonce in self._sent:
            self._accept_renewal(view.record, view.etag, self._sent[view.record.nonce])
            return True
        if view is not None and view.etag == self._etag:
            return False  # unchanged: the renewal has not arrived (yet)
        self._lost = (
            f"token {view.token} is held by {_describe_holder(view)}"
            if view
            else "the lease is gone"
        )
        raise self._lease_lost_error()

    def _accept_renewal(self, record: LeaseRecord, etag: str, sent: float) -> None:
        self._record, self._etag = record, etag
        self._valid_until = sent + record.ttl
        # Older renewals were conditioned on older versions and can no longer arrive.
        self._sent = {}

    def _lease_lost_error(self) -> LeaseLostError:
        return LeaseLostError(
            f"the lease of {self._record.pipeline} (token {self.token}) is no longer held here:"
            f" {self._lost}",
            code="lease.lost",
            pipeline=self._record.pipeline,
            kept="everything sealed; this driver stops",
            advice="nothing to do if another driver is meant to run; see: tidegate status",
        )


def evict_lease_holder(store: Store, pipeline: str, *, expected_token: int | None = None) -> int:
    """Take the lease away from whoever holds it, by swapping in a free one with a higher token.

    Return that token.

    With `expected_token` only that holder is evicted; a successor is left alone and its token
    returned.

    Raises:
        PreconditionFailedError: the lease changed each time it was tried.
    """
    for _ in range(_TRIES):
        view = read_lease(store, pipeline)
        if view is None:
            return 0
        if expected_token is not None and view.token != expected_token:
            return view.token
        free = view.record.model_copy(
            update={"token": view.token + 1, "nonce": _make_nonce(), "holder": None}
        )
        try:
            store.compare_and_swap(
                BucketLayout(pipeline).lease_key,
                canonical_bytes(free.model_dump(mode="json")),
                view.etag,
            )
        except (PreconditionFailedError, OutcomeUnknownError):
            continue  # a renewal came in between, or no answer: look again
        return free.token
    raise PRECONDITION_FAILED(
        uri=store.uri(BucketLayout(pipeline).lease_key),
        expected="a quiet moment",
        found="a renewal each time",
    )


def _try_acquire(
    store: Store, record: LeaseRecord, view: LeaseView | None, clock: Clock
) -> Lease | None:
    """One try to take the lease; None when somebody was faster or nobody answered."""
    data, sent = canonical_bytes(record.model_dump(mode="json")), clock.monotonic()
    key = BucketLayout(record.pipeline).lease_key
    try:
        etag = (
            store.create(key, data)
            if view is None
            else store.compare_and_swap(key, data, view.etag)
        )
    except (PreconditionFailedError, OutcomeUnknownError):
        return None
    return Lease(store, record, etag, sent, clock)


def _require_same_uid(view: LeaseView | None, pipeline: str, uid: str | None) -> None:
    if view is not None and uid is not None and view.record.uid not in (None, uid):
        raise ConfigurationError(
            f"the lease of {pipeline} belongs to the pipeline with uid {view.record.uid}, not"
            f" {uid}",
            code="identity.mismatch",
            pipeline=pipeline,
            kept="everything on both sides; nothing was changed",
            advice="point the pipeline at its own bucket, or give it a new name",
        )


def _lease_held_error(pipeline: str, view: LeaseView | None) -> LeaseHeldError:
    return LeaseHeldError(
        f"{pipeline} is driven by {_describe_holder(view)}",
        code="lease.held",
        pipeline=pipeline,
        kept="the running stream, untouched",
        advice=f"stop it first: tidegate stop {pipeline}; or wait beside it: --standby",
    )


def _describe_holder(view: LeaseView | None) -> str:
    if view is None or view.holder is None:
        return "nobody"
    return f"{view.holder.driver} (pid {view.holder.pid} on {view.holder.host})"


def _make_nonce() -> str:
    return secrets.token_hex(8)
