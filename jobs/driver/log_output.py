"""Structured logs of the driver: their format, their context, and their way to the bucket.

Lines are JSON under Airflow and readable text for people. Libraries' log lines have the same
format; what Spark's JVM writes to the same stderr does not.
"""

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

_log_context: dict[str, Any] = {}


def bind_log_context(**facts: Any) -> None:
    """Add fields to every later line of this process, whichever thread writes it.

    The value None removes a field. A context variable is not enough: half of a driver's lines come
    from threads and pools that do not inherit it.
    """
    # The mapping is replaced, never changed: a thread that logs meanwhile sees the old or the new.
    global _log_context
    _log_context = {
        name: value for name, value in {**_log_context, **facts}.items() if value is not None
    }


def add_log_context(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Structlog processor that adds the context; fields of the line itself win."""
    return {**event, **{name: value for name, value in _log_context.items() if name not in event}}


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Handler that looks up stderr for each line, because tests replace and close it."""

    @property
    def stream(self) -> TextIO:
        """The stderr of this moment."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Ignore the stream that the base class sets."""


def configure_logs(*, json: bool, file: TextIO | None = None, libraries: bool = True) -> None:
    """Send structlog's events from INFO on to stderr, and libraries' logs from WARNING on.

    Libraries' logs go where the first call sent them.

    Args:
        json: JSON lines instead of readable text.
        file: takes all lines instead of stderr, which then only gets the warnings of tidegate.
        libraries: also take the logs of libraries. They come by the root logger, which a job's
            script configures: `logging.basicConfig` does nothing where a handler is already.
    """
    renderer = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=file is None and sys.stderr.isatty())
    )
    shared: list[Processor] = [
        add_log_context,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*([_print_warning] if file else []), *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Called for each line, because stderr may be replaced.
        logger_factory=lambda *_: structlog.PrintLogger(file or sys.stderr),
        cache_logger_on_first_use=False,
    )
    if not libraries:
        return
    handler = logging.StreamHandler(file) if file else _CurrentStderr()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)


def _print_warning(
    _logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Structlog processor that shows a warning to the person at the terminal, in one line."""
    if method == "warning":
        facts = ", ".join(f"{name}: {value}" for name, value in event.items() if name != "event")
        sys.stderr.write(f"warning: {event['event']} ({facts})\n")
    return event


LOG_VARIABLE: Final = "TIDEGATE_DRIVER_LOG"  # the file that the launcher redirects the log to
ATTEMPT_VARIABLE: Final = "TIDEGATE_ATTEMPT"
_SHIP_INTERVAL = 10.0  # seconds; each time the last piece, up to 256 KiB, is sent again
# Seconds. A store that is away must not keep a driver from ending: its task sends the rest.
_FINAL_SEND_TIMEOUT = 10.0


@contextmanager
def ship_log(
    store_url: str, pipeline: str, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Send the driver's log to the bucket until the block ends.

    So the log can be read when the driver's host is gone. Does nothing unless the launcher named
    the log file and the attempt in the environment. Lines that cannot be sent raise no error; the
    end waits at most 10 s.
    """
    path, attempt = environment.get(LOG_VARIABLE), environment.get(ATTEMPT_VARIABLE)
    if not path or not attempt:
        yield
        return
    stop = threading.Event()

    def send_periodically() -> None:
        """Send what is new, and the rest once more after the block has ended."""
        log: DriverLog | None = None
        ended = False
        while not ended:
            ended = stop.wait(_SHIP_INTERVAL)
            # What fails is sent the next time, or at last by the driver's task. Any error is
            # suppressed, because the thread must not end before the driver.
            with suppress(Exception):
                log = log or DriverLog(open_store(store_url), pipeline, attempt, Path(path))
                log.send_new_pieces()

    thread = threading.Thread(target=send_periodically, name="tidegate-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_FINAL_SEND_TIMEOUT)
