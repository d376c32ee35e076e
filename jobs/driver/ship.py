"""Sends the driver's own log to the bucket while it runs, so that it can be read when its host is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tidegate.checkpoints.driver_logs import DriverLog
from tidegate.checkpoints.open import open_store
from tidegate.jobs.spec.errors import TidegateError

__all__ = ["ATTEMPT_VARIABLE", "LOG_VARIABLE", "ship_log"]

LOG_VARIABLE: Final = "TIDEGATE_DRIVER_LOG"
ATTEMPT_VARIABLE: Final = "TIDEGATE_ATTEMPT"
_SHIP_INTERVAL: Final = 10.0  # seconds; the last piece is put anew each time, at most 256 KiB
_FINAL_SEND_TIMEOUT: Final = 10.0  # seconds; a store that is away must not keep a driver from ending: its task sends the rest


@contextmanager
def ship_log(store_url: str, pipeline: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Ship the log the launcher told us of, until the block ends; without one, do nothing."""
    path, attempt = environment.get(LOG_VARIABLE), environment.get(ATTEMPT_VARIABLE)
    if not path or not attempt:
        yield
        return
    stop = threading.Event()

    def send_periodically() -> None:
        log: DriverLog | None = None
        ended = False
        while not ended:
            ended = stop.wait(_SHIP_INTERVAL)
            with suppress(TidegateError, OSError):  # next time, or by the task that finds the log
                log = log or DriverLog(open_store(store_url), pipeline, attempt, Path(path))
                log.send_new_pieces()

    thread = threading.Thread(target=send_periodically, name="tidegate-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_FINAL_SEND_TIMEOUT)
