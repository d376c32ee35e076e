"""A log of arrivals.

Objects whose names say nothing about their order, each entered once, in the order they were found.

    <pipeline>/arrivals/<source>/<partition>/<index of its first object>.json   {"keys": [...],
    "version": ...}

The log gives a source of arbitrary names what one with growing names has by itself: a place for
every object, the same at every reading. It belongs to the pipeline and to no timeline: a restore
reads on at an older place of the same log.

Three ways to find objects, each cheap where it is used:

1. behind the greatest name known: one LIST of what is new, which is all there is to do where names
    do grow;
2. what the bucket's notifications name (`notices`): late uploads, at once;
3. the safety listing: everything, a few pages at every call, so that a folder of millions holds up
    no epoch. It finds what the others missed, and is the only way on a store without notifications.

The files of a table (`tables`) are entered commit by commit; a page then says how far it brings the
log in the table's versions.

A page grows by conditional swaps. Two drivers at work for a moment cannot both append: the loser
reads the page again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote_plus, urlsplit

import numpy as np
import numpy.typing as npt
import structlog

from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.store import PreconditionFailedError, Store

_log = structlog.get_logger("tidegate.driver")

# Keys: about 200 KB, written anew at most once an epoch, and a million objects are 500 pages to
# read at start.
_KEYS_PER_PAGE: Final = 2000
_KEYS_PER_LISTING: Final = 10_000  # keys listed in one call: 1.4 s on MinIO
_BEFORE_FIRST_KEY: Final = ""
_MIN_UNSORTED_KEYS: Final = 4096  # names known beside the array, at least


@dataclass(slots=True)
class _LogPage:
    first: int
    etag: str
    keys: list[str] = field(default_factory=list)
    version: int | None = None


class _SeenKeys:
    """Names that are known, by 16 bytes each.

    Sorted in one array, with the newest beside it until they are many.
    """

    def __init__(self) -> None:
        self._sorted: npt.NDArray[np.bytes_] = np.empty(0, "S16")
        self._fresh: set[bytes] = set()

    def __contains__(self, key: str) -> bool:
        mark = _hash_key(key)
        if mark in self._fresh:
            return True
        place = int(np.searchsorted(self._sorted, np.array(mark, "S16")))
        return place < self._sorted.size and bool(self._sorted[place] == np.array(mark, "S16"))

    def add(self, key: str) -> None:
        """Know a name from now on."""
        self._fresh.add(_hash_key(key))
        if len(self._fresh) > max(_MIN_UNSORTED_KEYS, self._sorted.size // 16):
            self._sorted = np.concatenate([self._sorted, np.array(sorted(self._fresh), "S16")])
            self._sorted.sort(kind="stable")  # of two sorted runs
            self._fresh.clear()


class ArrivalLog:
    """The arrivals of one member.

    Args:
        store: where the log lies; the pipeline's own.
        objects: where the objects lie.
        place: prefix of the log.
        folder: prefix of the objects.
        is_data: whether a name below the folder is data.
        safety: seconds between two safety listings.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        objects: Store,
        place: str,
        folder: str,
        *,
        is_data: Callable[[str], bool],
        safety: float,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._objects, self._place, self._folder = store, objects, place, folder
        self._is_data, self._safety, self._clock = is_data, safety, clock
        self._firsts: list[int] = []
        self._last: _LogPage | None = None
        self._seen = _SeenKeys()
        self._greatest = _BEFORE_FIRST_KEY
        self._cursor: str | None = (
            _BEFORE_FIRST_KEY  # of a safety listing under way; None between two
        )
        self._listed_at = clock()
        self.late = 0
        """Objects found behind a greater name since this process started."""
        self._read_all_pages()

    def __len__(self) -> int:
        return 0 if self._last is None else self._last.first + len(self._last.keys)

    def read_keys(self, start: int, count: int) -> list[str]:
        """Arrivals from `start` on, at most `count`."""
        found: list[str] = []
        while len(found) < count and start + len(found) < len(self):
            page = self._find_page(start + len(found))
            skip = start + len(found) - page.first
            found += page.keys[skip : skip + count - len(found)]
        return found

    def discover(self, notices: Iterable[str] = (), *, everything: bool = False) -> None:
        """Look for objects that are not in the log yet, and enter them.

        Args:
            notices: keys that notifications named.
            everything: list all of the folder, from its beginning: before a bounded source may end.
        """
        self._enter_new_keys(self._list_newer_keys())
        self._enter_new_keys(sorted(set(notices)))
        if everything or (self._cursor is None and self._clock() - self._listed_at >= self._safety):
            self._cursor = _BEFORE_FIRST_KEY  # also when a listing is under way: it began before
        while self._cursor is not None:
            self._enter_new_keys(self._list_safety_page())
            if not everything:
                break

    @property
    def version(self) -> int | None:
        """Of a table: everything up to this version is in the log; None before the first."""
        return None if self._last is None else self._last.version

    def enter_version(self, keys: Iterable[str], version: int) -> None:
        """Enter what a version of a table brought, in this order, and note the version with the last of it."""
        while fresh := [k for k in keys if not self._is_seen(k)]:
            taken = fresh[: self._room_in_page()]
            try:
                self._append_to_page(taken, version if len(taken) == len(fresh) else self.version)
            except PreconditionFailedError:
                self._read_all_pages()
        if self.version != version:
            try:
                self._append_to_page([], version)
            except PreconditionFailedError:
                self._read_all_pages()

    def _list_newer_keys(self) -> list[str]:
        return [
            e.key
            for e in self._objects.list_objects(
                self._folder, start_after=self._greatest or None, limit=_KEYS_PER_LISTING
            )
        ]

    def _list_safety_page(self) -> list[str]:
        page = list(
            self._objects.list_objects(
                self._folder, start_after=self._cursor or None, limit=_KEYS_PER_LISTING
            )
        )
        self._cursor = page[-1].key if len(page) == _KEYS_PER_LISTING else None
        if self._cursor is None:
            self._listed_at = self._clock()
        return [e.key for e in page]

    def _enter_new_keys(self, keys: Iterable[str]) -> None:
        """Append what is new.

        A page that somebody else changed is read again, and what it holds is not new any more.
        """
        while fresh := [k for k in keys if self._is_new_object(k)]:
            greatest = self._greatest
            try:
                self._append_to_page(fresh[: self._room_in_page()])
            except PreconditionFailedError:
                self._read_all_pages()
                continue
            behind = [
                k for k in fresh[:_KEYS_PER_PAGE] if greatest and k < greatest and self._is_seen(k)
            ]
            if behind:
                self.late += len(behind)
                _log.info(
                    "late_upload",
                    folder=self._folder,
                    objects=len(behind),
                    first=behind[0],
                    behind=greatest,
                )

    def _is_new_object(self, key: str) -> bool:
        return (
            key.startswith(self._folder)
            and self._is_data(key[len(self._folder) :])
            and not self._is_seen(key)
        )

    def _is_seen(self, key: str) -> bool:
        return key in self._seen

    def _room_in_page(self) -> int:
        full = self._last is None or len(self._last.keys) >= _KEYS_PER_PAGE
        return (
            _KEYS_PER_PAGE if full or self._last is None else _KEYS_PER_PAGE - len(self._last.keys)
        )

    def _append_to_page(self, keys: list[str], version: int | None = None) -> None:
        last = self._last
        if last is None or len(last.keys) >= _KEYS_PER_PAGE:
            page = _LogPage(len(self), "", keys, version)
            page.etag = self._store.create(self._page_key(page.first), _encode_page(page))
            self._firsts.append(page.first)
        else:
            page = _LogPage(last.first, last.etag, [*last.keys, *keys], version)
            page.etag = self._store.compare_and_swap(
                self._page_key(page.first), _encode_page(page), last.etag
            )
        self._last = page
        self._remember_keys(keys)

    def _remember_keys(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._seen.add(key)
            self._greatest = max(self._greatest, key)

    def _read_all_pages(self) -> None:
        """Every page: of older ones only which names they hold is kept, the last one stays as it stands."""
        self._seen = _SeenKeys()
        self._firsts = [
            int(e.key[len(self._place) : -5]) for e in self._store.list_objects(self._place)
        ]
        for first in self._firsts:
            self._last = self._load_page(first)
            self._remember_keys(self._last.keys)

    def _find_page(self, index: int) -> _LogPage:
        first = self._firsts[bisect_right(self._firsts, index) - 1]
        return (
            self._last
            if self._last is not None and self._last.first == first
            else self._load_page(first)
        )

    def _load_page(self, first: int) -> _LogPage:
        found = self._store.get(self._page_key(first))
        document: dict[str, Any] = json.loads(found.data)
        return _LogPage(first, found.etag, document["keys"], document.get("version"))

    def _page_key(self, first: int) -> str:
        return f"{self._place}{first:012d}.json"


def _encode_page(page: _LogPage) -> bytes:
    version = {} if page.version is None else {"version": page.version}
    return json.dumps(
        {"keys": page.keys, **version}, ensure_ascii=False, separators=(",", ":")
    ).encode()


def _hash_key(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


# What a MinIO bucket's notifications say about new objects, gathered by a thread of its own.
#
# A help, never a promise: a store without notifications, a lost connection or a full queue only
# mean that the safety listing finds the object later.

_notification_log = structlog.get_logger("tidegate.driver")

_MAX_PENDING_KEYS: Final = (
    100_000  # keys kept for the driver; the safety listing finds those beyond
)
_RECONNECT_SECONDS: Final = 5.0  # seconds before a lost connection is opened again
# Seconds without a word, not even that nothing happened, after which a connection is lost; the
# SDK's own.
_SILENCE_SECONDS: Final = 300.0

OpenKeyStream = Callable[[], Iterator[str]]
"""Connects and gives the names of new objects, until the connection is lost."""


class BucketNotifications:
    """Names of new objects, below the prefix that is listened to, since the last `take_keys`."""

    def __init__(self, events: OpenKeyStream) -> None:
        self._events = events
        self._keys: deque[str] = deque(maxlen=_MAX_PENDING_KEYS)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._collect_keys, name="tidegate-notices", daemon=True
        )
        self._thread.start()

    def take_keys(self) -> list[str]:
        """What was named since the last call."""
        found = []
        while self._keys:
            found.append(self._keys.popleft())
        return found

    def close(self) -> None:
        """Stop listening.

        A read under way ends with the connection, and the thread with the process.
        """
        self._stop.set()

    def _collect_keys(self) -> None:
        while not self._stop.is_set():
            try:
                for key in self._events():
                    self._keys.append(key)
                    if self._stop.is_set():
                        return
            except Exception as error:  # whatever the SDK raises: none of it may touch the stream
                if "NotImplemented" in str(error) or "AccessDenied" in str(error):
                    _notification_log.info(
                        "no_notifications",
                        why=str(error).splitlines()[0][:200],
                        instead="the safety listing",
                    )
                    return
                _notification_log.info(
                    "notifications_lost",
                    why=str(error).splitlines()[0][:200],
                    again_in=_RECONNECT_SECONDS,
                )
            self._stop.wait(_RECONNECT_SECONDS)


def listen_for_objects(store: Store, prefix: str) -> BucketNotifications | None:
    """Listen for objects below a key prefix of an S3 store with an endpoint of its own.

    None for any other.
    """
    if not isinstance(store, S3Store) or store.settings.endpoint is None:
        return None
    settings = store.settings
    return BucketNotifications(lambda: stream_minio_keys(settings, prefix))


def stream_minio_keys(settings: S3Settings, prefix: str) -> Iterator[str]:
    """Names, below `prefix`, of objects written there."""
    from minio import Minio
    from urllib3 import PoolManager, Timeout

    address = urlsplit(settings.endpoint or "")
    root = settings.prefix.strip("/") + "/" if settings.prefix.strip("/") else ""
    ca = os.environ.get(
        "AWS_CA_BUNDLE"
    )  # the SDK does not know it: a client of its own looks at SSL_CERT_FILE
    patience = Timeout(connect=settings.connect_timeout, read=_SILENCE_SECONDS)
    client = Minio(
        address.netloc,
        access_key=settings.access_key,
        secret_key=settings.secret_key.get_secret_value() if settings.secret_key else None,
        secure=address.scheme == "https",
        region=settings.region,
        http_client=PoolManager(ca_certs=ca, timeout=patience) if ca else None,
    )
    wanted = ("s3:ObjectCreated:*",)
    with client.listen_bucket_notification(
        bucket_name=settings.bucket, prefix=root + prefix, events=wanted
    ) as events:
        for event in events:
            yield from (key[len(root + prefix) :] for key in _parse_event_keys(event))


def _parse_event_keys(event: dict[str, Any]) -> Iterator[str]:
    for record in event.get("Records") or ():
        yield unquote_plus(record["s3"]["object"]["key"])
