"""Probes what a store really does, when a driver starts: which conditional writes it honours.

A driver refuses to run on a store that only claims to honour them. The sequential probe is made at
each start. Some stores pass it and still let two racing writers win, because they judge the
condition before they have read the body, or because each of their servers judges for itself. So
writers are raced as well, over all addresses of the endpoint, once a week and when an address is
new. The verdict is a document in the bucket.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .canonical_json import canonical_bytes, parse_json
from .errors import STORE_DISHONEST
from .s3_store import S3Store
from .server_addresses import ServerAddress, resolve_endpoints, select_reachable
from .store import NotFoundError, OutcomeUnknownError, PreconditionFailedError, Store

PROBE_PREFIX = "tidegate-probe/"
_PROBES = 3  # until the store counts as one that breaks its promises
_RACERS = 8
# Bytes. Servers store small bodies in another way than large ones.
_RACED_SIZES = (64, (1 << 20) + 1)
_AWS = ".amazonaws.com"
_MOST_SERVERS = 8
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


def run_write_races(stores: Sequence[Store]) -> list[str]:
    """Let 8 writers race for one key, by `create` and then by `compare_and_swap`.

    They race with bodies below and above 1 MiB, over connections of their own.

    Args:
        stores: one store, by its different servers. Each has a writer at least.

    Returns:
        The promises that the store broke: more than one writer got an ETag, or a
        server has another content than the winner's.

    Raises:
        TidegateError: the store did not answer the winner, or cannot be reached.
    """
    broken = []
    for size in _RACED_SIZES:
        key = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
        try:
            etag = _run_writers(stores, key, size, None)
            if etag is None:
                broken.append(f"one_create_wins_of_{size}_bytes")
            elif _run_writers(stores, key, size, etag) is None:
                broken.append(f"one_swap_wins_of_{size}_bytes")
        finally:
            stores[0].delete(key)
    return broken


def require_atomic_writes(store: Store) -> None:
    """Refuse a bucket whose servers let two racing writers win.

    It races writers over all addresses of the endpoints, unless that was done within the last week.
    An address that accepts no connection is left out until it does. AWS itself changes its
    addresses all the time, so any are raced. A local folder is not raced: its store takes the
    kernel's word.

    Raises:
        ConfigurationError: the store lost a race.
    """
    if not isinstance(store, S3Store):
        return
    settings = store.settings
    endpoints = [settings.endpoint or _AWS, *settings.other_endpoints]
    servers = resolve_endpoints([one for one in endpoints if _AWS not in one])
    digest = hashlib.sha256(f"{settings.endpoint or 'AWS'} {store.url}".encode()).hexdigest()[:16]
    key = f"{PROBE_PREFIX}raced/{digest}.json"
    raced = _read_raced_servers(store, key)
    added = [server for server in servers if raced is None or server not in raced]
    fresh = select_reachable(added[:_MOST_SERVERS], settings.connect_timeout)
    if raced is not None and not fresh:
        return
    # New ones against known ones: names of large services have many, which change.
    known = [server for server in servers if server not in added][: _MOST_SERVERS - len(fresh)]
    reachable = [*fresh, *select_reachable(known, settings.connect_timeout)]
    pinned = [
        S3Store(settings.model_copy(update={"endpoint": endpoint}), address=address)
        for endpoint, address in reachable
    ]
    try:
        broken = run_write_races(pinned or [store])
    finally:
        for one in pinned:
            one.close()
    if broken:
        raise STORE_DISHONEST(url=store.url, broken=", ".join(broken))
    store.put(key, canonical_bytes({"raced": sorted({*(raced or ()), *reachable})}))


def _read_raced_servers(store: Store, key: str) -> set[ServerAddress] | None:
    """Return the servers of the last race; None if it is too old, or there was none."""
    try:
        found = store.get(key)
    except NotFoundError:
        return None
    if found.age is not None and found.age >= _VERDICT_AGE:  # None: a server without a clock
        return None
    return {ServerAddress(*server) for server in parse_json(found.data).get("raced", ())}


def _run_writers(stores: Sequence[Store], key: str, size: int, etag: str | None) -> str | None:
    """Return the ETag of the only winner's body; None if there is another outcome.

    The writers swap the object that has `etag`, or create it.
    """
    racers = max(_RACERS, len(stores))
    begin = threading.Barrier(racers)

    def write_body(number: int) -> tuple[bytes, str | None, OutcomeUnknownError | None]:
        """Write one body when all writers are ready: its ETag, or why nothing is known."""
        store = stores[number % len(stores)]
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

    with ThreadPoolExecutor(racers) as pool:
        outcomes = list(pool.map(write_body, range(racers)))
    winners = [(body, written) for body, written, _ in outcomes if written is not None]
    unknown = [error for _, _, error in outcomes if error is not None]
    if not winners and unknown:
        raise unknown[0]
    if len(winners) != 1:
        return None
    body, written = winners[0]
    return written if all(store.get(key).data == body for store in stores) else None
