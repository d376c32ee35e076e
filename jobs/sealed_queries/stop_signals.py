"""Keeps the driver's handlers of SIGTERM and SIGINT while a script installs its own."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_STOPS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def keep_stop_handlers() -> Iterator[None]:
    """Until the block ends, a handler that is installed for a stop is called after the present one.

    So a stop has the same end, whatever the script installs. PySpark's own handler of SIGINT is
    left out, because it cancels the jobs of the batch that should end. Child processes, which
    PySpark lets ignore SIGINT, install what they want.
    """
    install, driver = signal.signal, os.getpid()
    ours: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPS}
    theirs = dict(ours)

    def install_after(number: int, handler: Any) -> Any:
        """Install a handler as `signal.signal` does, and return the one before."""
        present = ours.get(number)
        if os.getpid() != driver or not callable(present):
            return install(number, handler)
        install(number, present if handler is present else _make_signal_hook(present, handler))
        before, theirs[number] = theirs[number], handler
        return before

    signal.signal = install_after  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install


def _make_signal_hook(first: Callable[..., Any], second: Any) -> Callable[..., None]:
    from_pyspark = (getattr(second, "__module__", None) or "").startswith("pyspark.")

    def handle_signal(number: int, frame: object) -> None:
        """Call both handlers."""
        first(number, frame)
        if callable(second) and not from_pyspark:
            second(number, frame)

    return handle_signal
