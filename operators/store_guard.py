"""Keeps a store that hangs from holding up the looks at other stores, and at each of its pipelines.

A triggerer watches hundreds of streams. With one pool of threads for all, the requests to a store
that hangs would fill it, and no stream of any other store would be looked at. So each store has
threads of its own, a client that gives up soon, and a breaker: after several requests in a row
without an answer it is not asked for some seconds, and each look fails at once.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from tidegate.checkpoints.errors import STORE_UNAVAILABLE
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import OutcomeUnknownError, Store, StoreUnavailableError

# Seconds for one request. Who looks again after a moment need not wait as long as a driver.
REQUEST_BUDGET = 3.0
_FAILURES_TO_OPEN = 3  # in a row: one slow answer says nothing of the next request
_OPEN_SECONDS = 5.0
_THREADS_PER_STORE = 8  # a look takes some 20 ms, so that they serve hundreds of streams

R = TypeVar("R")


def shorten_patience(store: Store) -> Store:
    """Return the same store with a client that gives up soon."""
    if not isinstance(store, S3Store):
        return store
    waits = {"budget": REQUEST_BUDGET, "connect_timeout": 1.0, "read_timeout": REQUEST_BUDGET}
    return S3Store(store.settings.model_copy(update=waits))


def wrap_store(store: Store, clock: Clock = SYSTEM_CLOCK) -> Store:
    """Return the store behind a breaker. While it is open, each request fails at once.

    A request raises `StoreUnavailableError` then, without being sent.
    """
    return cast("Store", _GuardedStore(store, clock))


class _GuardedStore:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._failures, self._open_until, self._cause = 0, 0.0, ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._send, found) if callable(found) else found

    def _send(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._lock:
            is_open = self._clock.monotonic() < self._open_until
        if is_open:
            raise STORE_UNAVAILABLE(uri=self._store.url, cause=f"a moment ago: {self._cause}")
        result = self._note_outcome(lambda: call(*args, **options))
        # A listing asks when it is read.
        return self._iterate(result) if isinstance(result, Iterator) else result

    def _iterate(self, entries: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while (entry := self._note_outcome(lambda: next(entries, end))) is not end:
            yield entry

    def _note_outcome(self, ask: Callable[[], R]) -> R:
        cause = None
        try:
            return ask()
        except (StoreUnavailableError, OutcomeUnknownError) as error:
            cause = error.message
            raise
        finally:  # that there is no such object is an answer as well
            with self._lock:
                self._failures = self._failures + 1 if cause else 0
                self._cause = cause or ""
                if self._failures >= _FAILURES_TO_OPEN:
                    self._open_until = self._clock.monotonic() + _OPEN_SECONDS


class StoreLooks:
    """The looks of this process at one store.

    Attributes:
        store: the store, behind a breaker.
    """

    def __init__(self, store: Store) -> None:
        self.store = wrap_store(store)
        self._pool = ThreadPoolExecutor(_THREADS_PER_STORE, thread_name_prefix="tidegate-look")

    async def run(self, call: Callable[..., R], *args: Any) -> R:
        """Return the result of a call that may wait for the store, made in a thread."""
        context = contextvars.copy_context()  # as `asyncio.to_thread` does, for the log
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(context.run, call, *args))


_looks: dict[int, tuple[Store, StoreLooks]] = {}
_looks_lock = threading.Lock()


def find_looks(store: Store) -> StoreLooks:
    """Return the looks at a store that triggers share: one object per open store."""
    with _looks_lock:
        # The store is kept as well, so that no other object gets its id.
        return _looks.setdefault(id(store), (store, StoreLooks(store)))[1]
