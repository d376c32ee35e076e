"""Keeps what a library reports when Python has ended from hiding a process's last words."""

import atexit
import os


def drop_leak_reports() -> None:
    """Let nothing reach stderr once Python's own end is over.

    DuckDB reports some forty lines of objects that were not freed whenever a thread of py4j, or
    anything else, lives until the process ends. It has no setting for that, and the memory goes
    with the process. Call this first: functions of `atexit` that are registered later run earlier,
    so their output still gets there.
    """
    atexit.register(_close_stderr)


def _close_stderr() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
