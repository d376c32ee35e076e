"""Structured logs of the driver: JSON lines under Airflow, readable lines for people; libraries' own lines among them.

Not among them: what Spark's JVM writes to the same stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

__all__ = ["configure_logs", "bind_log_context", "add_log_context"]

_log_context: dict[str, Any] = {}


def bind_log_context(**facts: Any) -> None:
    """Let every later line of this process carry these, whatever thread writes it; None takes one away.

    A driver is a process of one pipeline, and half of its lines come from threads and pools that no context variable reaches.
    """
    global _log_context  # replaced, never changed: a thread that writes meanwhile sees the one or the other
    _log_context = {name: value for name, value in {**_log_context, **facts}.items() if value is not None}


def add_log_context(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
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
    """Send structlog's events to stderr, with time and level; the libraries' own logs and warnings only from WARNING on."""
    renderer = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
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
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # asked each time: stderr may be replaced
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
