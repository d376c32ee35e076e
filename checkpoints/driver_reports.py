"""Drivers' logs and status reports in the bucket.

A log is written in pieces, because a store cannot append and a log may grow for weeks:

    <pipeline>/logs/<attempt>/000000.log 000001.log ...

The driver sends what is new while it runs. A process that finds a driver dead sends the rest of its
log. Full pieces never change. Of a long log only the first piece and the newest ones are kept, and
of a pipeline only the newest attempts.
"""

import secrets
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from tidegate.json_types import JsonObject, JsonView

from .bucket_layout import BucketLayout
from .canonical_json import canonical_bytes, parse_json
from .host_clock import SYSTEM_CLOCK
from .record_models import FrozenModel
from .store import NotFoundError, Store

PIECE_BYTES = 256 * 1024  # bytes
MAX_PIECES = 64  # of one attempt: 16 MiB
KEPT_ATTEMPTS = 20  # of one pipeline


class DriverLog:
    """Sends one driver's log file to the bucket, as far as it has grown.

    Args:
        store: the bucket.
        pipeline: its name.
        attempt: the launch's unique name; names start with the time and so sort by it.
        file: the log on this host.
    """

    def __init__(self, store: Store, pipeline: str, attempt: str, file: Path) -> None:
        self._store, self._file = store, file
        self._folder = BucketLayout(pipeline).attempt_logs_prefix(attempt)
        self._sent = 0

    def send_new_pieces(self) -> int:
        """Send the pieces that have grown since the last call; the first call sends the whole log.

        Of a log longer than `MAX_PIECES` the middle is deleted in the bucket, or not sent.

        Return the bytes sent, with those of a grown piece that were sent before; 0 if the file is
        missing or has not grown.
        """
        try:
            size = self._file.stat().st_size
        except OSError:
            return 0
        if size <= self._sent:
            return 0
        first, last = self._sent // PIECE_BYTES, (size - 1) // PIECE_BYTES
        newest = range(max(first, last - MAX_PIECES + 2), last + 1)
        # A log found at the end of a long life: its beginning as well.
        sent = sum(
            self._put_piece(piece)
            for piece in ([0, *newest] if first == 0 and newest.start > 0 else newest)
        )
        if last >= MAX_PIECES:
            kept = {
                _build_piece_key(self._folder, piece)
                for piece in (0, *range(last - MAX_PIECES + 2, last + 1))
            }
            for entry in list(self._store.list_objects(self._folder)):
                if entry.key not in kept:
                    self._store.delete(entry.key)
        self._sent = size
        return sent

    def _put_piece(self, piece: int) -> int:
        with self._file.open("rb") as file:
            file.seek(piece * PIECE_BYTES)
            data = file.read(PIECE_BYTES)
        self._store.put(_build_piece_key(self._folder, piece), data)
        return len(data)


def make_attempt_name() -> str:
    """Return a unique name for a driver's start; names sort by time, to the second."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def list_log_attempts(store: Store, pipeline: str) -> list[str]:
    """Return the attempts with a log, newest first."""
    return sorted(store.list_folders(BucketLayout(pipeline).logs_prefix), reverse=True)


def read_log_tail(store: Store, pipeline: str, attempt: str, lines: int = 200) -> list[str]:
    """Return the last lines of an attempt's log; reads at most the two newest pieces.

    Empty if there is no log.

    Args:
        store: the bucket.
        pipeline: its name.
        attempt: the launch's unique name.
        lines: at most this many; at least 1.
    """
    keys = [
        entry.key
        for entry in store.list_objects(BucketLayout(pipeline).attempt_logs_prefix(attempt))
    ]
    text = b"".join(store.get(key).data for key in keys[-2:]).decode(errors="replace")
    return text.splitlines()[-lines:]


def delete_old_logs(store: Store, pipeline: str, keep: int = KEPT_ATTEMPTS) -> list[str]:
    """Delete the logs of all but the newest `keep` attempts; return the attempts deleted."""
    old = list_log_attempts(store, pipeline)[keep:]
    for attempt in old:
        for entry in list(store.list_objects(BucketLayout(pipeline).attempt_logs_prefix(attempt))):
            store.delete(entry.key)
    return old


def _build_piece_key(folder: str, number: int) -> str:
    return f"{folder}{number:06d}.log"


# What a driver says about itself, for people and for Airflow. The last writer wins; nothing here is
# trusted for data.


class DriverStatus(FrozenModel):
    """What a driver reported about itself, the content of `status.json`.

    Attributes:
        token: lease token of the driver. If it is not the token of the lease, the report is by an
            earlier driver.
        driver: name of the driver, as in its `ProcessIdentity`.
        step: the step of the epoch that the driver is in.
        at: the driver's wall clock, microseconds UTC, for display.
        body: everything else: state, frontiers, lag, error, probe result, rates.
    """

    format_version: int = 1
    token: int
    driver: str
    step: str
    at: int
    body: JsonObject = {}


def write_status(store: Store, pipeline: str, status: DriverStatus) -> None:
    """Overwrite the report."""
    store.put(BucketLayout(pipeline).status_key, canonical_bytes(status.model_dump(mode="json")))


def count_waiting_messages(body: JsonView) -> dict[str, int]:
    """Return source -> messages that a driver has not yet planned to read; sources with any.

    Only Kafka sources count messages. Empty as well if the report does not say.
    """
    return _add_up_members(body.get("lag"))


def count_waiting_objects(body: JsonView) -> dict[str, int]:
    """Return source -> known objects that a driver has not yet planned to read, as above.

    Only with `discovery.order: arrival` all are known; otherwise at most one of each partition.
    """
    return _add_up_members(body.get("backlog"))


def _add_up_members(counts: Mapping[str, int] | None) -> dict[str, int]:
    found = Counter[str]()
    for member, count in (counts or {}).items():
        found[member.partition("/")[0]] += int(count)
    return {source: count for source, count in found.items() if count}


def read_status(store: Store, pipeline: str) -> DriverStatus | None:
    """Return the report; None if it is missing or unreadable."""
    return read_status_and_age(store, pipeline)[0]


def read_status_and_age(store: Store, pipeline: str) -> tuple[DriverStatus | None, float]:
    """Return the report, None if it is missing or unreadable, and its age in seconds.

    The age is by the clock of the store. Only if that has none, the clock of the host that wrote
    the report is compared with that of this one.
    """
    try:
        found = store.get(BucketLayout(pipeline).status_key)
        status = DriverStatus.model_validate(parse_json(found.data))
    except (NotFoundError, ValueError):
        return None, 0.0
    by_hosts = (SYSTEM_CLOCK.wall_ticks() - status.at) / 1_000_000
    return status, by_hosts if found.age is None else found.age
