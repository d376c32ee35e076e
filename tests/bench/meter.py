"""What a process and its children (the JVM is one) have used.

On a busy machine processor time says more than the clock.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil


def cpu_seconds(own: psutil.Process | None = None) -> float:
    """Processor time of a process, by default this one, and its living descendants so far."""
    own = own or psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def peak_megabytes() -> int:
    """Sum of the greatest sizes that this process and its living descendants have had, in MB.

    An upper bound of what they had at one time.
    """
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            # A process that has ended but is not waited for yet has no such line.
            total += int((status.partition("VmHWM:")[2].split() or ["0"])[0])
    return total // 1024


def since_start() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()
