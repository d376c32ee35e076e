"""Structured logs of the driver.

JSON lines under Airflow, readable lines for people; libraries' own lines among them.

Not among them: what Spark's JVM writes to the same stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from structlog.typing import Processor

from tidegate.checkpoints.driver_reports import DriverLog
from tidegate.checkpoints.open_store import open_store
from tidegate.errors import TidegateError

_log_context: dict[str, Any] = {}


def bind_log_context(**facts: Any) -> None:
    """Let every later line of this process carry these, whatever thread writes it.

    None takes one away.

    A driver is a process of one pipeline, and half of its lines come from threads and pools that no
    context variable reaches.
    """
    # Replaced, never changed: a thread that writes meanwhile sees the one or the other.
    global _log_context
    _log_context = {
        name: value for name, value in {**_log_context, **facts}.items() if value is not None
    }


def add_log_context(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The processor that adds them; what a line says itself goes first."""
    return {**event, **{name: value for name, value in _log_context.items() if name not in event}}


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at the moment: it may be replaced, and the replaced one closed."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def configure_logs(*, json: bool) -> None:
    """Send structlog's events to stderr, with time and level.

    The libraries' own logs and warnings only from WARNING on.
    """
    renderer = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    shared: list[Processor] = [
        add_log_context,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: structlog.PrintLogger(
            sys.stderr
        ),  # asked each time: stderr may be replaced
        cache_logger_on_first_use=False,
    )
    libraries = _CurrentStderr()
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[libraries])
    logging.captureWarnings(True)


# Sends the driver's own log to the bucket while it runs, so that it can be read when its host is
# gone.

LOG_VARIABLE: Final = "TIDEGATE_DRIVER_LOG"
ATTEMPT_VARIABLE: Final = "TIDEGATE_ATTEMPT"
_SHIP_INTERVAL: Final = 10.0  # seconds; the last piece is put anew each time, at most 256 KiB
# Seconds; a store that is away must not keep a driver from ending: its task sends the rest.
_FINAL_SEND_TIMEOUT: Final = 10.0


@contextmanager
def ship_log(
    store_url: str, pipeline: str, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
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
