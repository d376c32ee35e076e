"""Ask a store, at start-up, which conditional writes it really honours; refuse to run on one that lies."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from tidegate.checkpoints.store import OutcomeUnknownError, PreconditionFailedError, Store
from tidegate.jobs.spec.errors import ConfigurationError

__all__ = ["ProbeResult", "probe_store", "require_honest_store"]


class ProbeResult(BaseModel):
    """What was observed; every field has to be true."""

    model_config = ConfigDict(frozen=True)

    url: str
    creates: bool
    refuses_second_create: bool
    swaps: bool
    refuses_stale_swap: bool
    refuses_swap_of_missing: bool
    reads_own_writes: bool

    @property
    def broken_promises(self) -> list[str]:
        """The promises this store does not keep."""
        return [name for name, kept in self.model_dump(exclude={"url"}).items() if not kept]

    @property
    def is_honest(self) -> bool:
        """Whether every promise was kept."""
        return not self.broken_promises


def probe_store(store: Store) -> ProbeResult:
    """Try each conditional write once, on a key of its own, and remove it."""
    key = f"tidegate-probe/{secrets.token_hex(8)}"
    first, second = b"first " + secrets.token_bytes(8).hex().encode(), b"second"
    try:
        stale = store.create(key, first)
    except OutcomeUnknownError:
        store.delete(key)  # only then may there be something to remove: a store that is away is reported at once
        raise
    try:
        refuses_second = _is_write_refused(lambda: store.create(key, second))
        swapped = not _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
        reads = store.get(key).data == second and [e.key for e in store.list_objects(key)] == [key]
        refuses_stale = _is_write_refused(lambda: store.compare_and_swap(key, b"third", stale))
        store.delete(key)
        refuses_missing = _is_write_refused(lambda: store.compare_and_swap(key, second, stale)) and store.stat(key) is None
    finally:
        store.delete(key)
    return ProbeResult(
        url=store.url,
        creates=True,
        refuses_second_create=refuses_second,
        swaps=swapped,
        refuses_stale_swap=refuses_stale,
        refuses_swap_of_missing=refuses_missing,
        reads_own_writes=reads,
    )


def require_honest_store(store: Store) -> ProbeResult:
    """Probe the store.

    Raises:
        ConfigurationError: it does not keep every promise.
    """
    result = probe_store(store)
    if not result.is_honest:
        raise ConfigurationError(
            f"{store.url} does not keep its promises on conditional writes: {', '.join(result.broken_promises)}",
            code="store.dishonest",
            advice="use a server that honours If-None-Match and If-Match on PUT (AWS S3, MinIO, versitygw), or a local folder",
        )
    return result


def _is_write_refused(write: Callable[[], str]) -> bool:
    try:
        write()
    except PreconditionFailedError:
        return True
    return False
