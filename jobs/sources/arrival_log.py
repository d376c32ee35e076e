"""The arrival log: objects in the order in which they were found, each entered once.

        <pipeline>/arrivals/<source>/<partition>/<index of its first object>.json
            {"keys": [...], "version": ...}

Names that grow give every object a position by themselves. For arbitrary names this log gives the
position, the same at every reading. The log belongs to the pipeline and to no timeline, so a
restore continues at an earlier position of the same log.

Objects are found in three ways:

1. A LIST after the greatest known name. It is enough for names that grow.
2. The bucket's notifications (`BucketNotifications`), which show late uploads at once. They are an
   optimisation: if a store has none, a connection is lost or the queue is full, the third way finds
   the object later.
3. The safety listing: everything, a few pages per call, so that a folder of millions does not stop
   an epoch.

The files of a table (`table_versions`) are entered commit by commit; a page then also records the
version up to which it brings the log.

A page grows by conditional swaps. If two drivers append at the same time, one of them fails and
reads all pages again. See docs/decisions/0071-unordered-objects-are-read-by-arrival-log.md.
"""

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote_plus, urlsplit

import numpy as np
import numpy.typing as npt
import structlog

from tidegate.checkpoints.s3_store import S3Settings, S3Store
from tidegate.checkpoints.shared_documents import parse_document
from tidegate.checkpoints.store import PreconditionFailedError, Store, map_in_threads
from tidegate.errors import get_first_line

from .object_inspection import READ_THREADS

_log = structlog.get_logger("tidegate.driver")

# About 200 KB, rewritten at most once per epoch; a million objects are 500 pages to read at start.
_KEYS_PER_PAGE = 2000
_PAGES_PER_BATCH = 16  # in memory at a time while all pages are read
_KEYS_PER_LISTING = 10_000  # 1.4 s on MinIO
_BEFORE_FIRST_KEY = ""
_MIN_UNSORTED_KEYS = 4096
_MAX_PENDING_KEYS = 100_000  # of notifications; the safety listing finds those beyond
_RECONNECT_SECONDS = 5.0
# A connection without even a keep-alive for this long is lost; the SDK's own value.
_SILENCE_SECONDS = 300.0


@dataclass(slots=True)
class _LogPage:
    first: int
    etag: str
    keys: list[str]
    version: int | None


class _SeenKeys:
    """A set of names that takes 16 bytes for each: hashes in a sorted array.

    New names are collected in a small set and merged into the array when there are many.
    """

    def __init__(self) -> None:
        self._sorted: npt.NDArray[np.bytes_] = np.empty(0, "S16")
        self._fresh: set[bytes] = set()

    def __contains__(self, key: str) -> bool:
        digest = _hash_key(key)
        if digest in self._fresh:
            return True
        wanted = np.array(digest, "S16")
        index = int(np.searchsorted(self._sorted, wanted))
        return index < self._sorted.size and bool(self._sorted[index] == wanted)

    def add(self, key: str) -> None:
        """Add a name."""
        self._fresh.add(_hash_key(key))
        if len(self._fresh) > max(_MIN_UNSORTED_KEYS, self._sorted.size // 16):
            self._sorted = np.concatenate([self._sorted, np.array(sorted(self._fresh), "S16")])
            self._sorted.sort(kind="stable")  # merges the two sorted runs
            self._fresh.clear()


class ArrivalLog:
    """The objects of one member in the order in which they were found, kept in the store.

    Each object is entered once and keeps its index; a restore changes nothing here. The constructor
    reads the whole log.

    Args:
        store: the store of the log and, as the pipeline sees it, of the objects.
        prefix: key prefix of the log.
        folder: key prefix of the objects.
        is_data: whether a name below the folder is data.
        safety: seconds between two safety listings.
        clock: seconds, monotonic.
        escape_name: how a file's name is written in a key; earlier versions entered it as it is.

    Attributes:
        late: objects with a name below the greatest known one, found since this process started.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        folder: str,
        *,
        is_data: Callable[[str], bool],
        safety: float,
        clock: Callable[[], float],
        escape_name: Callable[[str], str] = str,
    ) -> None:
        self._escape_name = escape_name
        self._store, self._prefix, self._folder = store, prefix, folder
        self._is_data, self._safety, self._clock = is_data, safety, clock
        self._first_indexes: list[int] = []  # of all pages
        self._last: _LogPage | None = None
        self._seen = _SeenKeys()
        self._greatest = _BEFORE_FIRST_KEY
        # Where a safety listing that is under way continues; None between two listings.
        self._cursor: str | None = _BEFORE_FIRST_KEY
        self._listed_at = clock()
        self.late = 0
        self._read_all_pages()

    def __len__(self) -> int:
        return 0 if self._last is None else self._last.first + len(self._last.keys)

    def read_keys(self, start: int, count: int) -> list[str]:
        """Return the keys from index `start` on, at most `count`; empty behind the end."""
        keys: list[str] = []
        while len(keys) < count and start + len(keys) < len(self):
            page = self._find_page(start + len(keys))
            skip = start + len(keys) - page.first
            keys += page.keys[skip : skip + count - len(keys)]
        return keys

    def discover(self, notices: Iterable[str] = (), *, everything: bool = False) -> None:
        """Look for objects that are not in the log yet, and enter them.

        Without `everything` one call lists at most 10,000 names after the greatest known one, and
        as many of a safety listing that is due.

        Args:
            notices: keys that notifications named; those that are not the member's data are left
                out.
            everything: list the whole folder from its beginning, before a bounded source may end.
        """
        self._enter_new_keys(self._list_after(self._greatest))
        self._enter_new_keys(sorted(set(notices)))
        is_due = self._cursor is None and self._clock() - self._listed_at >= self._safety
        if everything or is_due:
            # Also if a listing is under way: it may have passed keys that came since.
            self._cursor = _BEFORE_FIRST_KEY
        while self._cursor is not None:
            keys = self._list_after(self._cursor)
            self._cursor = keys[-1] if len(keys) == _KEYS_PER_LISTING else None
            if self._cursor is None:
                self._listed_at = self._clock()
            self._enter_new_keys(keys)
            if not everything:
                break

    @property
    def version(self) -> int | None:
        """The version of a table up to which everything is in the log; None before the first."""
        return None if self._last is None else self._last.version

    def enter_version(self, keys: Iterable[str], version: int) -> None:
        """Enter the files of a table's version in this order, and the version with the last one.

        Files that are in the log already are left out.
        """
        while fresh := [key for key in keys if key not in self._seen]:
            page_keys = fresh[: self._room_in_page()]
            complete = len(page_keys) == len(fresh)
            self._append_or_reload(page_keys, version if complete else self.version)
        if self.version != version:  # the version added no files
            self._append_or_reload([], version)

    def _list_after(self, key: str) -> list[str]:
        entries = self._store.list_objects(
            self._folder, start_after=key or None, limit=_KEYS_PER_LISTING
        )
        return [entry.key for entry in entries]

    def _enter_new_keys(self, keys: Iterable[str]) -> None:
        while fresh := [key for key in keys if self._is_new_object(key)]:
            greatest, page_keys = self._greatest, fresh[: self._room_in_page()]
            late = [key for key in page_keys if key < greatest]
            if self._append_or_reload(page_keys) and late:
                self.late += len(late)
                _log.info(
                    "late_upload",
                    folder=self._folder,
                    objects=len(late),
                    first=late[0],
                    behind=greatest,
                )

    def _is_new_object(self, key: str) -> bool:
        return (
            key.startswith(self._folder)
            and self._is_data(key[len(self._folder) :])
            and key not in self._seen
        )

    def _room_in_page(self) -> int:
        keys_in_page = 0 if self._last is None else len(self._last.keys)
        return _KEYS_PER_PAGE - keys_in_page % _KEYS_PER_PAGE

    def _append_or_reload(self, keys: list[str], version: int | None = None) -> bool:
        """Append to the last page; if another driver changed it, read all pages instead."""
        last = self._last
        try:
            if last is None or len(last.keys) >= _KEYS_PER_PAGE:
                page = _LogPage(len(self), "", keys, version)
                page.etag = self._store.create(self._page_key(page.first), _encode_page(page))
                self._first_indexes.append(page.first)
            else:
                page = _LogPage(last.first, last.etag, [*last.keys, *keys], version)
                page.etag = self._store.compare_and_swap(
                    self._page_key(page.first), _encode_page(page), last.etag
                )
        except PreconditionFailedError:
            self._read_all_pages()
            return False
        self._last = page
        self._remember_keys(keys)
        return True

    def _remember_keys(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._seen.add(key)
            self._greatest = max(self._greatest, key)

    def _read_all_pages(self) -> None:
        """Read every page; only hashes of names and the last page stay in memory."""
        self._seen = _SeenKeys()
        keys = [entry.key for entry in self._store.list_objects(self._prefix)]
        self._first_indexes = [int(k.removeprefix(self._prefix)[: -len(".json")]) for k in keys]
        for start in range(0, len(self._first_indexes), _PAGES_PER_BATCH):
            batch = self._first_indexes[start : start + _PAGES_PER_BATCH]
            for page in map_in_threads(self._load_page, batch, READ_THREADS):
                self._last = page
                self._remember_keys(page.keys)

    def _find_page(self, index: int) -> _LogPage:
        first = self._first_indexes[bisect_right(self._first_indexes, index) - 1]
        if self._last is not None and self._last.first == first:
            return self._last
        return self._load_page(first)

    def _load_page(self, first: int) -> _LogPage:
        stored = self._store.get(self._page_key(first))
        return parse_document(
            self._store,
            stored,
            "page of the arrival log",
            lambda raw: _LogPage(
                first, stored.etag, [*map(self._escape_key, raw["keys"])], raw.get("version")
            ),
        )

    def _escape_key(self, key: str) -> str:
        return "/".join(map(self._escape_name, key.split("/"))) if "\\" in key else key

    def _page_key(self, first: int) -> str:
        return f"{self._prefix}{first:012d}.json"


def _encode_page(page: _LogPage) -> bytes:
    document = {"keys": page.keys} | ({} if page.version is None else {"version": page.version})
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _hash_key(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


OpenKeyStream = Callable[[], Iterator[str]]
"""Connects and yields the names of new objects until the connection is lost."""


class BucketNotifications:
    """Collects the names of new objects below a prefix of a bucket, in a thread that it starts.

    It keeps the newest 100,000 names that were not taken, and connects again after a failure. If
    the store refuses to send notifications, the thread ends and no name comes.
    """

    def __init__(self, open_stream: OpenKeyStream) -> None:
        self._open_stream = open_stream
        self._keys: deque[str] = deque(maxlen=_MAX_PENDING_KEYS)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._collect_keys, name="tidegate-notices", daemon=True
        )
        self._thread.start()

    def take_keys(self) -> list[str]:
        """Return the names, below the prefix, that came since the last call, oldest first."""
        keys = []
        while self._keys:
            keys.append(self._keys.popleft())
        return keys

    def close(self) -> None:
        """Ask the thread to end, and return at once; its next name or lost connection ends it."""
        self._stop.set()

    def _collect_keys(self) -> None:
        while not self._stop.is_set():
            try:
                for key in self._open_stream():
                    self._keys.append(key)
                    if self._stop.is_set():
                        return
            except Exception as error:  # of any kind, from the SDK: the stream must go on
                why = get_first_line(error)[:200]
                if "NotImplemented" in str(error) or "AccessDenied" in str(error):
                    _log.info("no_notifications", why=why, instead="the safety listing")
                    return
                _log.info("notifications_lost", why=why, again_in=_RECONNECT_SECONDS)
            self._stop.wait(_RECONNECT_SECONDS)


def listen_for_objects(store: Store, prefix: str) -> BucketNotifications | None:
    """Listen for new objects below a key prefix; None if the store is not S3 with an endpoint.

    AWS has no such long-lived connection; MinIO does.
    """
    if not isinstance(store, S3Store) or store.settings.endpoint is None:
        return None
    settings = store.settings
    return BucketNotifications(lambda: stream_minio_keys(settings, prefix))


def stream_minio_keys(settings: S3Settings, prefix: str) -> Iterator[str]:
    """Yield the name below `prefix` of each object when it is written.

    It waits for names until the connection is lost (300 s without a sign of it) or fails; then it
    ends, or raises the SDK's exception.
    """
    from minio import Minio
    from urllib3 import PoolManager, Timeout

    address = urlsplit(settings.endpoint or "")
    root = settings.prefix.strip("/")
    full_prefix = (f"{root}/" if root else "") + prefix
    # The SDK reads only SSL_CERT_FILE; the rest of tidegate follows boto3.
    ca = os.environ.get("AWS_CA_BUNDLE")
    timeout = Timeout(connect=settings.connect_timeout, read=_SILENCE_SECONDS)
    access_key, secret_key, session_token = settings.reveal_keys()
    client = Minio(
        address.netloc,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        secure=address.scheme == "https",
        region=settings.region,
        http_client=PoolManager(ca_certs=ca, timeout=timeout) if ca else None,
    )
    with client.listen_bucket_notification(
        bucket_name=settings.bucket, prefix=full_prefix, events=("s3:ObjectCreated:*",)
    ) as events:
        for event in events:
            for record in event.get("Records") or ():
                yield unquote_plus(record["s3"]["object"]["key"])[len(full_prefix) :]
