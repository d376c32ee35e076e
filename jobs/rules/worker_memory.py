"""The memory that a Python worker may use, so that it refuses rows before its container is ended.

Only where a container has a limit. What counts is what YARN counts: the memory of the executor and
of this worker. Other workers of the executor do not count: work is refused only if it could not be
done alone either. It is looked at between the steps of a task and before large reads, never for
each row. What takes too much besides ends the container, and the driver counts lost executors.
"""

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

_SHARE: Final = 0.95
"""Of what the container has: YARN looks at it every three seconds."""
_PAUSE: Final = 0.1
"""Seconds for which a look is good enough."""
_LEAST_ROOM: Final = 256 << 20
"""Bytes that DuckDB gets at least: a container with less is too small for any batch."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HOST: Final = _PAGE * os.sysconf("SC_PHYS_PAGES")
_GROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1 of control groups
)


class OutOfRoomError(MemoryError):
    """A container has no memory for the next step of a task."""


class WorkerMemory:
    """What this worker may still use.

    Args:
        container: bytes of its container.
        counts_shared: memory that processes share counts for each of them, as YARN does it.
    """

    def __init__(self, container: int, *, counts_shared: bool) -> None:
        self._counts_shared = counts_shared
        self.limit = int(_SHARE * container)
        self._looked = 0.0

    def require_room(self, wanted: int = 0) -> None:
        """Refuse a step that needs so many bytes, or any step if nothing is left.

        Raises:
            OutOfRoomError: there is not so much left, also after memory that is free was given
                back.
        """
        now = time.monotonic()
        if not wanted and now - self._looked < _PAUSE:
            return
        self._looked = now
        if self.measure() + wanted <= self.limit:
            return
        _release_free_memory()
        used = self.measure()
        if used + wanted > self.limit:
            megabytes = [number >> 20 for number in (used, self.limit, wanted)]
            raise OutOfRoomError(
                "the executor and this worker use {} of {} MB, and the next step needs {} MB or"
                " more".format(*megabytes)
            )

    def count_room(self) -> int:
        """Return the bytes that are left, at least a few."""
        return max(self.limit - self.measure(), _LEAST_ROOM)

    def measure(self) -> int:
        """Return the bytes that this worker uses, its daemon, and the executor that started it."""
        daemon = os.getppid()
        return sum(map(self._read_use, (os.getpid(), daemon, _find_parent(daemon))))

    def _read_use(self, process: int) -> int:
        with suppress(OSError):  # it has ended, or belongs to another user
            fields = Path(f"/proc/{process}/statm").read_text("ascii").split()
            shared = 0 if self._counts_shared else int(fields[2])
            return (int(fields[1]) - shared) * _PAGE
        return 0


_memory: WorkerMemory | None = None


def watch_memory(container: int | None) -> None:
    """Begin to look at the memory of this process, a worker.

    `container` are the bytes of its container on YARN; None: those that its control group allows,
    if it has a limit. 0: none is looked at.
    """
    global _memory
    if container is not None:
        _memory = WorkerMemory(container, counts_shared=True) if container else None
    elif (limit := _read_group_limit()) is not None:
        _memory = WorkerMemory(limit, counts_shared=False)


def get_worker_memory() -> WorkerMemory | None:
    """Return what this process may use; None if its memory is not looked at."""
    return _memory


def require_room(wanted: int = 0) -> None:
    """Do what `WorkerMemory.require_room` does, if the memory of this process is looked at."""
    if _memory is not None:
        _memory.require_room(wanted)


def _read_group_limit() -> int | None:
    for path in _GROUP_LIMITS:
        with suppress(OSError, ValueError):  # no control group, or no limit
            limit = int(path.read_text("ascii"))
            if limit < _HOST:
                return limit
    return None


def _find_parent(process: int) -> int:
    with suppress(OSError):
        # The name of the program is in brackets and may hold blanks.
        fields = Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2]
        return int(fields.split()[1])
    return 0


def _release_free_memory() -> None:
    """Give back what workers keep between tasks."""
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError):  # another library of C
        ctypes.CDLL(None).malloc_trim(0)
