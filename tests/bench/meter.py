"""What a process and its children (the JVM is one) have used.

On a busy machine processor time says more than the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


def cpu_seconds(own: psutil.Process | None = None) -> float:
    """Processor time of a process, by default this one, and its living descendants so far."""
    own = own or psutil.Process()
    total = 0.0
    for pid in _list_family(own.pid):
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _list_family(pid: int) -> Iterator[int]:
    """A process and its living descendants.

    psutil looks at every process of the machine for them: 50 ms of each epoch that is measured.
    """
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        found: list[int] = []
        # A thread that has ended meanwhile has no such file.
        with contextlib.suppress(OSError):
            found = [int(one) for one in children.read_text(encoding="ascii").split()]
        for child in found:
            yield from _list_family(child)


def list_peaks() -> dict[str, list[int]]:
    """The greatest sizes that this process and its living descendants have had, in MB.

    By what they are: driver, jvm or worker, which is any other process.
    """
    own = psutil.Process().pid
    found: dict[str, list[int]] = {}
    for pid in _list_family(own):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
            # A process that has ended but is not waited for yet has no such line.
            size = int((status.partition("VmHWM:")[2].split() or ["0"])[0])
            kind = "driver" if pid == own else "jvm" if name == "java" else "worker"
            found.setdefault(kind, []).append(size // 1024)
    return found


def peak_megabytes() -> int:
    """Sum of `list_peaks`: an upper bound of what the processes had at one time."""
    return sum(map(sum, list_peaks().values()))


def since_start() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()
