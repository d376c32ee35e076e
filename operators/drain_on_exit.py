"""``python -m tidegate.operators.drain_on_exit COMMAND...``.

A command whose container is also that of the drivers started below it.

An init forwards SIGTERM to the one process it started; when that has ended the container ends, and
every driver in it is killed. This stands between: it forwards SIGTERM, and when the command has
ended it asks the drivers here to drain, and waits for them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tidegate.operators.driver_launch import LaunchedDriver, is_on_this_host, send_signal
from tidegate.operators.store_access import get_tidegate_home

# Seconds for the epoch under way; what is not sealed by then, the next driver reads again.
_DRAIN_TIMEOUT = 120.0
_DRAIN_POLL_SECONDS = 0.2


def main(command: Sequence[str]) -> int:
    """Run the command, then drain the drivers of this host; returns the command's exit code."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    code = child.wait()
    left = drain_drivers(get_tidegate_home() / "drivers")
    if left:
        sys.stderr.write(
            f"drivers that have not ended in time: {', '.join(one.attempt for one in left)}\n"
        )
    return code


def drain_drivers(folder: Path, patience: float = _DRAIN_TIMEOUT) -> list[LaunchedDriver]:
    """Ask every driver that was launched on this host and lives to drain.

    Returns those that did not end in time.
    """
    living = [
        one
        for path in folder.glob("*/*.json")
        if (one := _read_launch_record(path)) and is_on_this_host(one.leader) and one.is_alive()
    ]
    for one in living:
        send_signal(one.leader, signal.SIGTERM, group=True)
    deadline = time.monotonic() + patience
    while living and time.monotonic() < deadline:
        time.sleep(_DRAIN_POLL_SECONDS)
        living = [one for one in living if one.is_alive()]
    return living


def _read_launch_record(path: Path) -> LaunchedDriver | None:
    with suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # being written in this moment, or no driver's
        return LaunchedDriver.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
