"""Drivers' logs in the bucket, in pieces: a store has no append, and a log may grow for weeks.

    <pipeline>/logs/<attempt>/000000.log 000001.log ...

The driver sends what is new while it runs; whoever finds it dead sends what it could not. Full pieces never change. Of a long
log the first piece and the newest ones are kept, of a pipeline the newest attempts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tidegate.checkpoints.layout import Layout, require_name
from tidegate.checkpoints.store import Store

__all__ = ["ATTEMPTS", "DriverLog", "attempts_of", "forget_old_logs", "tail_of"]

PIECE: Final = 256 * 1024  # bytes
PIECES: Final = 64  # of one attempt: 16 MiB
ATTEMPTS: Final = 20  # of one pipeline


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
        self._folder = _folder(pipeline, attempt)
        self._sent = 0

    def send(self) -> int:
        """Send what is new since the last call; bytes sent. A file that is not here is nothing new."""
        try:
            size = self._file.stat().st_size
        except OSError:
            return 0
        if size <= self._sent:
            return 0
        first, last = self._sent // PIECE, (size - 1) // PIECE
        newest = range(max(first, last - PIECES + 2), last + 1)
        # A log found at the end of a long life: its beginning as well.
        sent = sum(self._put(piece) for piece in ([0, *newest] if first == 0 and newest.start > 0 else newest))
        if last >= PIECES:
            kept = {_piece(self._folder, piece) for piece in (0, *range(last - PIECES + 2, last + 1))}
            for entry in list(self._store.list(self._folder)):
                if entry.key not in kept:
                    self._store.delete(entry.key)
        self._sent = size
        return sent

    def _put(self, piece: int) -> int:
        with self._file.open("rb") as file:
            file.seek(piece * PIECE)
            data = file.read(PIECE)
        self._store.put(_piece(self._folder, piece), data)
        return len(data)


def attempts_of(store: Store, pipeline: str) -> list[str]:
    """Attempts with a log, newest first."""
    return sorted(store.list_folders(Layout(pipeline).logs), reverse=True)


def tail_of(store: Store, pipeline: str, attempt: str, lines: int = 200) -> list[str]:
    """The last lines of an attempt's log; at most the two newest pieces are read."""
    keys = [entry.key for entry in store.list(_folder(pipeline, attempt))]
    text = b"".join(store.get(key).data for key in keys[-2:]).decode(errors="replace")
    return text.splitlines()[-lines:]


def forget_old_logs(store: Store, pipeline: str, keep: int = ATTEMPTS) -> list[str]:
    """Delete the logs of all but the newest attempts; the attempts deleted."""
    old = attempts_of(store, pipeline)[keep:]
    for attempt in old:
        for entry in list(store.list(_folder(pipeline, attempt))):
            store.delete(entry.key)
    return old


def _folder(pipeline: str, attempt: str) -> str:
    return f"{Layout(pipeline).logs}{require_name(attempt, 'attempt')}/"


def _piece(folder: str, number: int) -> str:
    return f"{folder}{number:06d}.log"
