"""``python -m tidegate.operators.drain_on_exit COMMAND...``: drain drivers when a container ends.

The container of Airflow's worker is also that of the drivers started in it. An init process
forwards SIGTERM to the one process that it started; when that has ended, the container ends and
every driver in it is killed. So this program runs between the two: it forwards SIGTERM to the
command, and when the command has ended it asks the drivers on this host to drain, and waits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .driver_launch import (
    LaunchedDriver,
    is_on_this_host,
    read_launch_record,
)
from .store_access import get_tidegate_home

# Seconds for the epoch under way; what is not sealed by then, the next driver reads again.
_DRAIN_TIMEOUT = 120.0
_DRAIN_POLL_SECONDS = 0.2


def main(command: Sequence[str]) -> int:
    """Run the command, then drain the drivers of this host, for at most two minutes.

    Returns the command's exit code, or minus the number of the signal that ended it.
    """
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    code = child.wait()
    remaining = drain_drivers(get_tidegate_home() / "drivers")
    if remaining:
        names = ", ".join(driver.attempt for driver in remaining)
        sys.stderr.write(f"drivers that have not ended in time: {names}\n")
    return code


def drain_drivers(folder: Path, timeout: float = _DRAIN_TIMEOUT) -> list[LaunchedDriver]:
    """Ask every living driver that was launched on this host to drain.

    Args:
        folder: launch records, `<pipeline>/<attempt>.json`.
        timeout: seconds to wait.

    Returns:
        The drivers that did not end in time.
    """
    records = (read_launch_record(path) for path in folder.glob("*/*.json"))
    # Records of other hosts and earlier boots name pids that are other processes here.
    living = [
        driver
        for driver in records
        if driver and is_on_this_host(driver.leader) and driver.is_alive()
    ]
    for driver in living:
        # The JVM would end before the driver, which then could not seal the epoch under way.
        for process in Path("/proc").iterdir():
            with suppress(OSError, ValueError):  # it has ended meanwhile, or is not a process
                pid, name = int(process.name), (process / "comm").read_text().strip()
                if os.getpgid(pid) == driver.leader.pid and name != "java":
                    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while living and time.monotonic() < deadline:
        time.sleep(_DRAIN_POLL_SECONDS)
        living = [driver for driver in living if driver.is_alive()]
    return living


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
