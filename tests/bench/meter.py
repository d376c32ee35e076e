"""What a process and its children (the JVM is one) have used.

On a busy machine processor time says more than the clock.
"""

from __future__ import annotations

import time

import psutil


def cpu_seconds() -> float:
    """Processor time of this process and its living descendants so far."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def since_start() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()
