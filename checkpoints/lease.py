"""The lease of a pipeline: which process drives it.

The lease only keeps two drivers from working at the same time. What makes the data safe are the
slots of the log: a driver that wrongly believes in its lease cannot fill a slot twice.

Rules, each with its reason:

* Every write swaps the record by its ETag, with a new nonce. Equal bytes would have an equal ETag,
  and an observer could not see a renewal.
* The holder counts the TTL from the moment *before it sent* the renewal, on a clock that runs while
  the host sleeps.
* An observer trusts no time in the record. It measures on its own clock how long the *ETag* has
  been unchanged, and waits for the TTL that the record names.
* The token grows with every takeover. Every manifest and status has it, so readers can tell an old
  driver from a new one.
* After a lost answer the holder reads the record back. A nonce that it sent proves that one of its
  requests arrived.
* A release swaps in a record without a holder. Nothing is deleted conditionally, because MinIO
  ignores that condition.
* `LeaseRenewer` renews only while the driver makes progress. A driver that hangs has to lose its
  lease, so that a standby can take over.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tidegate.errors import FencedError, TidegateError

from .bucket_layout import BucketLayout
from .errors import (
    LEASE_HELD,
    LEASE_LOST,
    LEASE_MALFORMED,
    LEASE_OF_OTHER_PIPELINE,
    OUTCOME_UNKNOWN,
    PRECONDITION_FAILED,
)
from .errors import LeaseHeldError as LeaseHeldError
from .errors import LeaseLostError as LeaseLostError
from .host_clock import SYSTEM_CLOCK, Clock, PeriodicThread
from .pipeline_identity import ProcessIdentity
from .record_models import BucketRecord
from .shared_documents import read_document
from .store import OutcomeUnknownError, PreconditionFailedError, Store

# Seconds; `LeaseRenewer` says how often a lease is renewed in that time. A takeover takes well
# under 15 s.
LEASE_TTL = 6.0
_OBSERVE_INTERVAL = 0.5  # seconds between two looks at another driver's lease
_TRIES = 8  # lost answers in a row before the store is reported


class LeaseRecord(BucketRecord):
    """The content of `lease.json`; `holder` is None if the lease is free.

    Attributes:
        uid: identity of the pipeline; None if the holder gave none.
        nonce: random, new in each write.
        ttl: seconds for which an observer has to see no renewal.
    """

    format_version: int = 1
    pipeline: str
    uid: str | None
    token: int
    nonce: str
    ttl: float
    holder: ProcessIdentity | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The lease as an observer read it; only `LeaseObserver` knows for how long it is unchanged."""

    record: LeaseRecord
    etag: str

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.record.token

    @property
    def holder(self) -> ProcessIdentity | None:
        """The process that drives, or None if the lease is free."""
        return self.record.holder

    @property
    def is_free(self) -> bool:
        """Whether no process holds it, or the holder is proven dead."""
        return self.holder is None or self.holder.is_proven_dead()


def read_lease(store: Store, pipeline: str) -> LeaseView | None:
    """Read the lease; None if the pipeline never had one.

    Raises:
        PoisonError: the object is not a lease.
    """
    key, malformed = BucketLayout(pipeline).lease_key, partial(LEASE_MALFORMED, pipeline=pipeline)
    record, etag = read_document(store, key, LeaseRecord, malformed)
    return LeaseView(record, etag) if record else None


class LeaseObserver:
    """Measures on the observer's clock for how long a lease has not been renewed.

    Attributes:
        renewals_seen: how often a look found another version than the look before; a takeover and
            a release count as well.
    """

    def __init__(self, store: Store, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._pipeline, self._clock = store, pipeline, clock
        self._etag: str | None = None
        self._since = self._asked = clock.monotonic()
        self.renewals_seen = 0

    def observe(self) -> LeaseView | None:
        """Read the lease and note whether it changed; call this about once a second."""
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
        """Seconds between the first and the last look at the current version.

        The time since the last look does not count: the store may be slow, or the observer held up.
        """
        return max(0.0, self._asked - self._since)

    def is_expired(self, view: LeaseView | None) -> bool:
        """Return whether the lease may be taken: absent, free, or not renewed for its TTL.

        A lease whose holder is proven dead is free. `view` is what `observe` returned last.
        """
        return view is None or view.is_free or self.silent_seconds > view.record.ttl

    def has_ended(self, token: int) -> bool:
        """Look once; return whether the driver with this token no longer holds the lease.

        A crashed driver never releases its lease, so an expired one counts too.
        """
        view = self.observe()
        return view is None or view.token != token or self.is_expired(view)


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """How to wait for a lease.

    Attributes:
        standby: go on waiting while the holder renews the lease.
        stop: called between two looks; True ends the wait.
        may: called when the lease could be taken; while it returns False, the lease is left alone.
    """

    standby: bool = False
    stop: Callable[[], bool] = lambda: False
    may: Callable[[], bool] = lambda: True


class Lease:
    """The lease of this process. Thread-safe: a thread renews it while the driver checks it."""

    def __init__(
        self, store: Store, record: LeaseRecord, etag: str, sent: float, clock: Clock
    ) -> None:
        self._store, self._clock = store, clock
        self._record, self._etag = record, etag
        self._key = BucketLayout(record.pipeline).lease_key
        self._valid_until = sent + record.ttl
        self._sent: dict[str, float] = {}  # nonces without an answer -> when they were sent
        self._lost: str | None = None
        self._lock = threading.RLock()

    @classmethod
    def acquire(
        cls,
        store: Store,
        pipeline: str,
        holder: ProcessIdentity,
        *,
        clock: Clock = SYSTEM_CLOCK,
        uid: str | None = None,
        wait: LeaseWait | None = None,
    ) -> Lease:
        """Take the lease; if its holder does not renew it, wait until its TTL is over.

        A lease that is absent, free, or held by a process that is proven dead is taken at once.

        Args:
            store: the bucket.
            pipeline: its name.
            holder: this process.
            clock: measures the waits.
            uid: the pipeline's identity; None: do not compare it.
            wait: how to wait; default: until the holder has renewed the lease once.

        Raises:
            ConfigurationError: the lease in the bucket belongs to another pipeline uid.
            LeaseHeldError: the holder renewed the lease (not with `wait.standby`), or `wait.stop`
                ended the wait.
            OutcomeUnknownError: the store left several writes without an answer.
        """
        wait = wait or LeaseWait()
        observer = LeaseObserver(store, pipeline, clock)
        unanswered: set[str] = set()  # nonces of requests without an answer
        while True:
            view = observer.observe()
            if view is not None and uid is not None and view.record.uid not in (None, uid):
                raise LEASE_OF_OTHER_PIPELINE(pipeline=pipeline, found=view.record.uid, uid=uid)
            if view is not None and view.record.nonce in unanswered:
                lease = cls(store, view.record, view.etag, clock.monotonic() - LEASE_TTL, clock)
                lease.renew()
                return lease
            if observer.is_expired(view) and wait.may():
                record = LeaseRecord(
                    pipeline=pipeline,
                    uid=uid,
                    token=view.token + 1 if view else 1,
                    nonce=_make_nonce(),
                    ttl=LEASE_TTL,
                    holder=holder,
                )
                lease_or_none = _try_acquire(store, record, view, clock)
                if lease_or_none is not None:
                    return lease_or_none
                unanswered.add(record.nonce)
                if len(unanswered) > _TRIES:
                    uri = store.uri(BucketLayout(pipeline).lease_key)
                    raise OUTCOME_UNKNOWN(uri=uri, cause="no answer several times in a row")
            elif wait.stop() or (observer.renewals_seen and not wait.standby):
                raise LEASE_HELD(pipeline=pipeline, holder=_describe_holder(view))
            else:
                clock.sleep(_OBSERVE_INTERVAL)

    @property
    def token(self) -> int:
        """The fencing token, which every manifest and status has."""
        return self._record.token

    @property
    def holder(self) -> ProcessIdentity:
        """This process."""
        assert self._record.holder is not None  # noqa: S101 - by construction
        return self._record.holder

    @property
    def remaining_seconds(self) -> float:
        """Seconds for which an observer still has to wait; negative if it may take the lease."""
        return self._valid_until - self._clock.monotonic()

    def ensure_held(self) -> None:
        """Check that this process still holds the lease.

        If its time is over, because the host slept or the store was slow, renew it. While its time
        runs, no request is sent, and an eviction that no renewal has met yet is not noticed.

        Raises:
            LeaseLostError: another process took it, or it was released.
            OutcomeUnknownError: the store did not answer.
            StoreUnavailableError: the store cannot be reached.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lease_lost_error()
            if self.remaining_seconds <= 0:
                self.renew()

    def renew(self) -> None:
        """Swap in a new nonce, also on top of a renewal whose answer was lost.

        Raises:
            LeaseLostError: another process took it, or it was released.
            OutcomeUnknownError: no answer; the lease stays valid until its time is over.
            PreconditionFailedError: likewise, where the store shows the version that it refused.
            StoreUnavailableError: likewise.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lease_lost_error()
            record = self._record.model_copy(update={"nonce": _make_nonce()})
            sent = self._sent[record.nonce] = self._clock.monotonic()
            try:
                etag = self._store.compare_and_swap(self._key, record.to_bytes(), self._etag)
            except (PreconditionFailedError, OutcomeUnknownError):
                if not self._read_back_renewal():
                    raise
            else:
                self._accept_renewal(record, etag, sent)

    def release(self) -> None:
        """Release the lease, so that the next driver starts at once; nothing if it is lost.

        Raises:
            OutcomeUnknownError: no answer; this process gives the lease up nevertheless, and it
                expires by itself.
            StoreUnavailableError: likewise.
        """
        with self._lock:
            if self._lost is None:
                # Before the request: after a lost answer the lease must not be valid here.
                self._lost = "released by this driver"
                free = self._record.model_copy(update={"nonce": _make_nonce(), "holder": None})
                # On a refusal another process took it, or an earlier renewal arrived; the lease
                # then expires by itself.
                with suppress(PreconditionFailedError):
                    self._store.compare_and_swap(self._key, free.to_bytes(), self._etag)

    def _read_back_renewal(self) -> bool:
        """Return whether a renewal of this process arrived; raises if the lease is lost."""
        view = read_lease(self._store, self._record.pipeline)
        if view is not None and view.record.nonce in self._sent:
            self._accept_renewal(view.record, view.etag, self._sent[view.record.nonce])
            return True
        if view is not None and view.etag == self._etag:
            return False  # the renewal has not arrived, at least not yet
        self._lost = (
            f"token {view.token} is held by {_describe_holder(view)}"
            if view
            else "the lease is gone"
        )
        raise self._lease_lost_error()

    def _accept_renewal(self, record: LeaseRecord, etag: str, sent: float) -> None:
        self._record, self._etag = record, etag
        self._valid_until = sent + record.ttl
        # Older renewals had older versions as their condition: they can no longer succeed.
        self._sent = {}

    def _lease_lost_error(self) -> LeaseLostError:
        return LEASE_LOST(pipeline=self._record.pipeline, token=self.token, why=self._lost)


def evict_lease_holder(store: Store, pipeline: str, *, expected_token: int | None = None) -> int:
    """Take the lease away from its holder: swap in a free one with a higher token.

    The holder learns this from its next renewal, and may work until then. A free lease gets a
    higher token too.

    Args:
        store: the store.
        pipeline: its name.
        expected_token: evict only the holder with this token, not a successor.

    Returns:
        The token of the lease now, also if it was not `expected_token`; 0 if the pipeline never had
        a lease.

    Raises:
        PreconditionFailedError: at each try the lease changed or the store did not answer.
    """
    key = BucketLayout(pipeline).lease_key
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
            store.compare_and_swap(key, free.to_bytes(), view.etag)
        except (PreconditionFailedError, OutcomeUnknownError):
            continue  # the holder renewed it just now, or the store did not answer
        return free.token
    raise PRECONDITION_FAILED(
        uri=store.uri(key), expected="a quiet moment", found="a renewal each time"
    )


def _try_acquire(
    store: Store, record: LeaseRecord, view: LeaseView | None, clock: Clock
) -> Lease | None:
    """Try once to take the lease; None if another process was faster or no answer came."""
    data, sent = record.to_bytes(), clock.monotonic()
    key = BucketLayout(record.pipeline).lease_key
    try:
        if view is None:
            etag = store.create(key, data)
        else:
            etag = store.compare_and_swap(key, data, view.etag)
    except (PreconditionFailedError, OutcomeUnknownError):
        return None
    return Lease(store, record, etag, sent, clock)


def _describe_holder(view: LeaseView | None) -> str:
    if view is None or view.holder is None:
        return "no one"
    return f"{view.holder.driver} (pid {view.holder.pid} on {view.holder.host})"


def _make_nonce() -> str:
    return secrets.token_hex(8)


# Seconds; three renewals fit into `LEASE_TTL`.
LEASE_RENEW_INTERVAL = 2.0


class LeaseRenewer(PeriodicThread):
    """Renews a lease every `every` seconds while the current step is within its deadline.

    The driver announces each step with a deadline. After the deadline the renewals stop and the
    lease expires. A later step starts the renewals again, unless another process has the lease.

    Attributes:
        lost: set once a renewal found the lease lost.
        error: why `lost` is set.
        step_name: the step that was announced last.
        trouble: why the last renewal failed although the lease is not lost, for the status.
    """

    def __init__(
        self, lease: Lease, *, every: float = LEASE_RENEW_INTERVAL, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__("tidegate-lease", self.renew_once, every)
        self.lease = lease
        self.lost = threading.Event()
        self.error: FencedError | None = None
        self.trouble: TidegateError | None = None
        self.step_name = "starting"
        self._clock = clock
        self._deadline = clock.monotonic() + 60.0  # until the driver announces its first step

    def announce_step(self, name: str, deadline_seconds: float) -> None:
        """Announce a step and how long it may take."""
        self.step_name, self._deadline = name, self._clock.monotonic() + deadline_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether the current step has passed its deadline."""
        return self._clock.monotonic() > self._deadline

    def require_not_lost(self) -> None:
        """Raise what showed that the lease is lost, if it is; costs no request.

        Raises:
            FencedError: it is lost.
        """
        if self.lost.is_set():
            raise self.error or RuntimeError("lease lost without an error")

    def renew_once(self) -> None:
        """Renew the lease, unless the step is overdue; the thread calls this at each interval."""
        if self.is_overdue or self.lost.is_set():
            return
        try:
            self.lease.renew()
        except FencedError as error:
            self.error = error
            self.lost.set()
        except TidegateError as error:
            self.trouble = error  # the lease is still valid, and the next interval tries again
        else:
            self.trouble = None
