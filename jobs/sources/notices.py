"""What a MinIO bucket's notifications say about new objects, gathered by a thread of its own.

A help, never a promise: a store without notifications, a lost connection or a full queue only mean that the safety listing finds
the object later.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote_plus, urlsplit

import structlog

from tidegate.checkpoints.s3 import S3Settings, S3Store
from tidegate.checkpoints.store import Store

__all__ = ["BucketNotifications", "listen_for_objects", "stream_minio_keys"]

_notification_log = structlog.get_logger("tidegate.driver")

_MAX_PENDING_KEYS: Final = 100_000  # keys kept for the driver; the safety listing finds those beyond
_RECONNECT_SECONDS: Final = 5.0  # seconds before a lost connection is opened again
_SILENCE_SECONDS: Final = 300.0  # seconds without a word, not even that nothing happened, after which a connection is lost; the SDK's own

OpenKeyStream = Callable[[], Iterator[str]]
"""Connects and gives the names of new objects, until the connection is lost."""


class BucketNotifications:
    """Names of new objects, below the prefix that is listened to, since the last `take_keys`."""

    def __init__(self, events: OpenKeyStream) -> None:
        self._events = events
        self._keys: deque[str] = deque(maxlen=_MAX_PENDING_KEYS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect_keys, name="tidegate-notices", daemon=True)
        self._thread.start()

    def take_keys(self) -> list[str]:
        """What was named since the last call."""
        found = []
        while self._keys:
            found.append(self._keys.popleft())
        return found

    def close(self) -> None:
        """Stop listening; a read under way ends with the connection, and the thread with the process."""
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
                    _notification_log.info("no_notifications", why=str(error).splitlines()[0][:200], instead="the safety listing")
                    return
                _notification_log.info("notifications_lost", why=str(error).splitlines()[0][:200], again_in=_RECONNECT_SECONDS)
            self._stop.wait(_RECONNECT_SECONDS)


def listen_for_objects(store: Store, prefix: str) -> BucketNotifications | None:
    """Listen for objects below a key prefix of an S3 store with an endpoint of its own; None for any other."""
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
    ca = os.environ.get("AWS_CA_BUNDLE")  # the SDK does not know it: a client of its own looks at SSL_CERT_FILE
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
    with client.listen_bucket_notification(bucket_name=settings.bucket, prefix=root + prefix, events=wanted) as events:
        for event in events:
            yield from (key[len(root + prefix) :] for key in _parse_event_keys(event))


def _parse_event_keys(event: dict[str, Any]) -> Iterator[str]:
    for record in event.get("Records") or ():
        yield unquote_plus(record["s3"]["object"]["key"])
