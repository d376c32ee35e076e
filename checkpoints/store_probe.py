"""Probes what a store really does, when a driver starts: which conditional writes it honours.

A driver refuses to run on a store that only claims to honour them. The sequential probe is made at
each start. Some stores pass it and still let two racing writers win, because they judge the
condition before they have read the body. So writers are raced as well, once a week for each
endpoint; the verdict is a document in the bucket.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from .errors import STORE_DISHONEST
from .s3_store import S3Store
from .store import NotFoundError, OutcomeUnknownError, PreconditionFailedError, Store

PROBE_PREFIX = "tidegate-probe/"
_PROBES = 3  # until the store counts as one that breaks its promises
_RACERS = 8
# Bytes. Servers store small bodies in another way than large ones.
_RACED_SIZES = (64, (1 << 20) + 1)
_VERDICT_AGE = 7 * 86_400.0  # seconds; a server may be replaced behind its address


def probe_store(store: Store) -> list[str]:
    """Try each conditional write once, on a new key; return the promises that the store broke."""
    key = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    first, second = f"first {secrets.token_hex(8)}".encode(), b"second"
    kept: dict[str, bool] = {}
    try:
        stale = store.create(key, first)
    except OutcomeUnknownError:
        store.delete(key)  # on other errors nothing was written
        raise
    try:
        kept["refuses_second_create"] = _is_write_refused(lambda: store.create(key, second))
        kept["swaps"] = not _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
        found = store.get(key).data, [entry.key for entry in store.list_objects(key)]
        kept["reads_own_writes"] = found == (second, [key])
        kept["refuses_stale_swap"] = _is_write_refused(
            lambda: store.compare_and_swap(key, b"third", stale)
        )
        store.delete(key)
        kept["refuses_swap_of_missing"] = (
            _is_write_refused(lambda: store.compare_and_swap(key, second, stale))
            and store.stat(key) is None
        )
    finally:
        store.delete(key)
    return [promise for promise, is_kept in kept.items() if not is_kept]


def require_honest_store(store: Store) -> None:
    """Probe the store, up to three times: a repeated or late request may have disturbed a probe.

    Raises:
        ConfigurationError: it does not keep every promise.
    """
    for _ in range(_PROBES):
        broken = probe_store(store)
        if not broken:
            return
    raise STORE_DISHONEST(url=store.url, broken=", ".join(broken))


def _is_write_refused(write: Callable[[], str]) -> bool:
    try:
        write()
    except PreconditionFailedError:
        return True
    return False


def run_write_races(store: Store) -> list[str]:
    """Let 8 writers race for one key, by `create` and then by `compare_and_swap`.

    They race with bodies below and above 1 MiB, over connections of their own.

    Returns:
        The promises that the store broke: more than one writer got an ETag, or the
        object has another content than the winner's.

    Raises:
        TidegateError: the store did not answer the winner, or cannot be reached.
    """
    broken = []
    for size in _RACED_SIZES:
        key = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        try:
            etag = _run_writers(store, key, size, None)
            if etag is None:
                broken.append(f"one_create_wins_of_{size}_bytes")
            elif _run_writers(store, key, size, etag) is None:
                broken.append(f"one_swap_wins_of_{size}_bytes")
        finally:
            store.delete(key)
    return broken


def require_atomic_writes(store: Store) -> None:
    """Refuse a bucket whose server lets two racing writers win.

    It races writers unless it did so on this endpoint within the last week. A local folder is not
    raced: its store takes the kernel's word.

    Raises:
        ConfigurationError: the store lost a race.
    """
    if not isinstance(store, S3Store):
        return
    endpoint = store.settings.endpoint or "AWS"
    digest = hashlib.sha256(f"{endpoint} {store.url}".encode()).hexdigest()[:16]
    key = f"{PROBE_PREFIX}raced/{digest}.json"
    with suppress(NotFoundError):
        age = store.get(key).age
        if age is None or age < _VERDICT_AGE:  # None: a server that does not tell its time
            return
    broken = run_write_races(store)
    if broken:
        raise STORE_DISHONEST(url=store.url, broken=", ".join(broken))
    store.put(key, b"{}")


def _run_writers(store: Store, key: str, size: int, etag: str | None) -> str | None:
    """Return the ETag of the only winner's body; None if there is another outcome.

    The writers swap the object that has `etag`, or create it.
    """
    begin = threading.Barrier(_RACERS)

    def write_body(number: int) -> tuple[bytes, str | None, OutcomeUnknownError | None]:
        """Write one body when all writers are ready: its ETag, or why nothing is known."""
        body = f"{number:08d}".encode() + secrets.token_bytes(size - 8)
        begin.wait()
        try:
            if etag is None:
                return body, store.create(key, body), None
            return body, store.compare_and_swap(key, body, etag), None
        except PreconditionFailedError:
            return body, None, None
        except OutcomeUnknownError as error:
            return body, None, error

    with ThreadPoolExecutor(_RACERS) as pool:
        outcomes = list(pool.map(write_body, range(_RACERS)))
    winners = [(body, written) for body, written, _ in outcomes if written is not None]
    unknown = [error for _, _, error in outcomes if error is not None]
    if not winners and unknown:
        raise unknown[0]
    if len(winners) != 1:
        return None
    body, written = winners[0]
    return written if store.get(key).data == body else None
