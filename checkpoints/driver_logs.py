"""Drivers' logs in the bucket, in pieces: a store has no append, and a log may grow for weeks.

    <pipeline>/logs/<attempt>/000000.log 000001.log ...

The driver sends what is new while it runs; whoever finds it dead sends what it could not. Full pieces never change. Of a long
log the first piece and the newest ones are kept, of a pipeline the newest attempts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tidegate.checkpoints.layout import BucketLayout, require_name
from tidegate.checkpoints.store import Store

__all__ = ["KEPT_ATTEMPTS", "DriverLog", "list_log_attempts", "delete_old_logs", "read_log_tail"]

PIECE_BYTES: Final = 256 * 1024  # bytes
MAX_PIECES: Final = 64  # of one attempt: 16 MiB
KEPT_ATTEMPTS: Final = 20  # of one pipeline


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
        self._folder = _build_log_prefix(pipeline, attempt)
        self._sent = 0

    def send_new_pieces(self) -> int:
        """Send what is new since the last call; bytes sent. A file that is not here is nothing new."""
        try:
            size = self._file.stat().st_size
        except OSError:
            return 0
        if size <= self._sent:
            return 0
        first, last = self._sent // PIECE_BYTES, (size - 1) // PIECE_BYTES
        newest = range(max(first, last - MAX_PIECES + 2), last + 1)
        # A log found at the end of a long life: its beginning as well.
        sent = sum(self._put_piece(piece) for piece in ([0, *newest] if first == 0 and newest.start > 0 else newest))
        if last >= MAX_PIECES:
            kept = {_build_piece_key(self._folder, piece) for piece in (0, *range(last - MAX_PIECES + 2, last + 1))}
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


def list_log_attempts(store: Store, pipeline: str) -> list[str]:
    """Attempts with a log, newest first."""
    return sorted(store.list_folders(BucketLayout(pipeline).logs_prefix), reverse=True)


def read_log_tail(store: Store, pipeline: str, attempt: str, lines: int = 200) -> list[str]:
    """The last lines of an attempt's log; at most the two newest pieces are read."""
    keys = [entry.key for entry in store.list_objects(_build_log_prefix(pipeline, attempt))]
    text = b"".join(store.get(key).data for key in keys[-2:]).decode(errors="replace")
    return text.splitlines()[-lines:]


def delete_old_logs(store: Store, pipeline: str, keep: int = KEPT_ATTEMPTS) -> list[str]:
    """Delete the logs of all but the newest attempts; the attempts deleted."""
    old = list_log_attempts(store, pipeline)[keep:]
    for attempt in old:
        for entry in list(store.list_objects(_build_log_prefix(pipeline, attempt))):
            store.delete(entry.key)
    return old


def _build_log_prefix(pipeline: str, attempt: str) -> str:
    return f"{BucketLayout(pipeline).logs_prefix}{require_name(attempt, 'attempt')}/"


def _build_piece_key(folder: str, number: int) -> str:
    return f"{folder}{number:06d}.log"
