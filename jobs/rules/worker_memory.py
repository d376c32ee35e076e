"""The memory that a Python worker may use, so that it refuses rows before its container is ended.

What counts is what YARN counts: the memory of the executor and of all workers that it has started.
It is looked at between the steps of a task and before large reads, never for each row. A step that
takes all that is left at once is not seen; then the driver counts lost executors.
"""

import ctypes
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

_SHARE: Final = 0.95
"""Of what the container or the host has: YARN looks at it every three seconds."""
_PAUSE: Final = 0.1
"""Seconds for which a look is good enough."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HOST: Final = _PAGE * os.sysconf("SC_PHYS_PAGES")
_GROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class OutOfRoomError(MemoryError):
    """A container has no memory left for the next step of a task."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that an executor uses: with its workers, of all workers, of this one."""

    total: int
    workers: int
    mine: int
    count: int

    @property
    def is_least_mine(self) -> bool:
        """Whether another worker is more to blame than this one."""
        return self.mine * self.count < self.workers


class WorkerMemory:
    """What this worker may still use.

    Args:
        container: bytes of the container if it counts memory as YARN does; None: those of the
            control group or of the host, where memory that processes share counts once.
    """

    def __init__(self, container: int | None) -> None:
        self._counts_shared = container is not None
        self.limit = int(_SHARE * (container or _read_group_limit()))
        self._looked = 0.0

    def require_room(self, wanted: int = 0) -> None:
        """Refuse a step that needs so many bytes, or any step if nothing is left.

        Raises:
            OutOfRoomError: there is not so much left, also after memory that is free was given
                back, and no other worker uses more than this one.
        """
        now = time.monotonic()
        if not wanted and now - self._looked < _PAUSE:
            return
        self._looked = now
        if self.measure().total + wanted <= self.limit:
            return
        _release_free_memory()
        use = self.measure()
        if use.total + wanted > self.limit and not use.is_least_mine:
            megabytes = [number >> 20 for number in (use.total, self.limit, use.mine, wanted)]
            raise OutOfRoomError(
                "the executor uses {} of {} MB, this worker {} MB, and the next step needs {} MB"
                " or more".format(*megabytes)
            )

    def count_room(self) -> int:
        """Return the bytes that are left, at least a few."""
        return max(self.limit - self.measure().total, 64 << 20)

    def measure(self) -> MemoryUse:
        """Measure what the executor uses. This process is a child of its daemon or of itself."""
        daemon = os.getppid()
        workers = {number: self._read_use(number) for number in {*_list_children(daemon)}}
        mine = workers.setdefault(os.getpid(), self._read_use(os.getpid()))
        others = self._read_use(daemon) + self._read_use(_find_parent(daemon))
        total = sum(workers.values())
        return MemoryUse(total + others, total, mine, len(workers))

    def _read_use(self, process: int) -> int:
        with suppress(OSError):  # it has ended, or belongs to another user
            fields = Path(f"/proc/{process}/statm").read_text("ascii").split()
            shared = 0 if self._counts_shared else int(fields[2])
            return (int(fields[1]) - shared) * _PAGE
        return 0


_memory: WorkerMemory | None = None


def set_container_memory(container: int | None) -> None:
    """Begin to look at the memory of this process, a worker; see `WorkerMemory`."""
    global _memory
    _memory = WorkerMemory(container)


def get_worker_memory() -> WorkerMemory | None:
    """Return what this process may use; None in a process that is not a worker."""
    return _memory


def require_room(wanted: int = 0) -> None:
    """Do what `WorkerMemory.require_room` does, if this process is a worker."""
    if _memory is not None:
        _memory.require_room(wanted)


def _read_group_limit() -> int:
    """Bytes that the control group allows, at most those of the host."""
    with suppress(OSError, ValueError):  # no control group, or no limit
        return min(_HOST, int(_GROUP_LIMIT.read_text("ascii")))
    return _HOST


def _list_children(process: int) -> list[int]:
    with suppress(OSError):
        found = Path(f"/proc/{process}/task/{process}/children").read_text("ascii")
        return list(map(int, found.split()))
    return []


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
