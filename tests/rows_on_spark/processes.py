"""The processes of one run: who is whose parent, what each one is, and its processor time.

All is read from /proc, so a test can give a folder of its own instead.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

RUN_MARK: Final = "TIDEGATE_ROWS_ON_SPARK_RUN"
"""Variable of the environment that all processes of a run inherit."""
TICKS: Final = os.sysconf("SC_CLK_TCK")
UNKNOWN: Final = "unknown"
COPY_SECONDS: Final = 0.1
"""A process that has used less, and is not known, may be a fork before its exec."""
_STARTED_BY_SPARK: Final = frozenset({"launcher", "daemon", "task"})
"""What starts only processes of the same kinds."""
_LASTING: Final = frozenset({"launcher", "jvm", "daemon"})
"""Kinds of processes that work until their end, so also between two looks."""
_PYTHON_OF_SPARK = re.compile(r"pyspark[./](daemon|worker)")
_LAUNCHER = re.compile(
    r"org\.apache\.spark\.launcher\.Main|/bin/(spark-class|spark-submit|load-spark-env|find-spark-home)"
)
_CLUSTER = re.compile(r"org\.apache\.spark\.deploy\.(master\.Master|worker\.Worker)")


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was last seen."""

    pid: int
    parent: int
    started: int
    """In ticks since the machine's start."""
    cpu: float
    """Seconds of processor time, its ended children left out."""
    command: str
    kind: str = UNKNOWN
    waited: float = 0.0
    """Seconds of processor time of the ended children for which it has waited, and of theirs."""
    last_look: float = 0.0
    """When it was last seen, in seconds of the monotonic clock."""
    missed: float | None = None
    """When it was first missing; None if it was there at the last look at the family."""
    is_copy: bool = False
    """It has no command, or that of its parent: a fork before its exec, or a zombie."""

    @property
    def is_short_copy(self) -> bool:
        """Whether it ended before it could be known, with the time that a fork and an exec take."""
        return self.kind == UNKNOWN and self.is_copy and self.cpu < COPY_SECONDS


class ProcTable:
    """What /proc says now.

    Args:
        root: where it is mounted.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self.root = root

    def list_pids(self) -> list[int]:
        """All processes."""
        return [int(name) for name in os.listdir(self.root) if name.isdigit()]

    def read_process(self, pid: int) -> Seen | None:
        """One process, or None if it has ended."""
        stat = self._read(pid, "stat").decode(errors="replace")
        if not stat:
            return None
        fields = stat.rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / TICKS
        waited = (int(fields[13]) + int(fields[14])) / TICKS
        command = self.read_command(pid)
        return Seen(pid, int(fields[1]), int(fields[19]), cpu, command, waited=waited)

    def read_command(self, pid: int) -> str:
        """Its command line."""
        return self._read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()

    def has_mark(self, pid: int, mark: str) -> bool:
        """Whether its environment carries the mark of a run."""
        return f"{RUN_MARK}={mark}".encode() in self._read(pid, "environ").split(b"\0")

    def holds_socket(self, pid: int, inode: str) -> bool:
        """Whether it has this socket open."""
        folder, target = self.root / str(pid) / "fd", f"socket:[{inode}]"
        try:
            names = os.listdir(folder)
        except OSError:
            return False
        return any(_read_link(folder / name) == target for name in names)

    def find_inode(self, port: int, listening: int) -> str | None:
        """The socket of the client that is connected from `port` to our port."""
        for table in ("tcp", "tcp6"):
            for line in self._read("net", table).decode().splitlines()[1:]:
                fields = line.split()
                ports = [int(fields[place].rpartition(":")[2], 16) for place in (1, 2)]
                if ports == [port, listening] and fields[9] != "0":
                    return fields[9]
        return None

    def _read(self, *parts: object) -> bytes:
        try:
            return self.root.joinpath(*map(str, parts)).read_bytes()
        except OSError:
            return b""


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Family:
    """The processes of one run, remembered after they have ended.

    A process belongs to the run if it carries the run's mark or its parent belongs to it.
    """

    def __init__(self, mark: str, table: ProcTable | None = None) -> None:
        self.driver = 0
        self._mark, self._table = mark, table or ProcTable()
        self._seen: dict[int, Seen] = {}
        self._ended: list[Seen] = []
        self._strangers: set[int] = set()
        self._lock = threading.RLock()

    def refresh(self) -> None:
        """Look at all processes of the run again."""
        with self._lock:
            now = time.monotonic()
            alive = set(self._table.list_pids())
            for pid in self._seen.keys() - alive:
                self._ended.append(replace(self._seen.pop(pid), missed=now))
            self._strangers &= alive
            found = filter(None, map(self._table.read_process, alive - self._strangers))
            # The oldest first: pids begin again at 1, so a child can have a smaller one.
            for process in sorted(found, key=lambda one: (one.started, one.pid)):
                self._note(replace(process, last_look=now))

    def _note(self, found: Seen) -> None:
        before = self._seen.get(found.pid)
        if before is None and not self._belongs(found):
            # A child of ours has our environment until its exec, so it may belong to the run.
            if found.parent != os.getpid():
                self._strangers.add(found.pid)
            return
        if before is not None:  # an orphan gets another parent, and a zombie loses its command
            found = replace(found, parent=before.parent, command=found.command or before.command)
            if found.command == before.command and before.kind != UNKNOWN:
                self._seen[found.pid] = replace(found, kind=before.kind)
                return
        above = self._seen.get(found.parent)
        is_copy = not found.command or (above is not None and found.command == above.command)
        self._seen[found.pid] = replace(found, kind=self._identify(found), is_copy=is_copy)

    def _belongs(self, process: Seen) -> bool:
        if process.pid == self.driver or process.parent in self._seen:
            return True
        return self._table.has_mark(process.pid, self._mark)

    def _identify(self, process: Seen) -> str:
        """Name what a process is, by its command and the nearest of its ancestors."""
        command = process.command
        if process.pid == self.driver:
            return "driver"
        if "CoarseGrainedExecutorBackend" in command:
            return "executor"
        if _CLUSTER.search(command):
            return "cluster"
        if _LAUNCHER.search(command):
            return "launcher"
        program = command.split(" ")[0].rpartition("/")[2]
        if program == "java" and "org.apache.spark" in command:
            return "jvm"
        above = self._seen.get(process.parent)
        above_kind = above.kind if above else UNKNOWN
        if _PYTHON_OF_SPARK.search(command):
            return {"jvm": "daemon", "executor": "daemon", "daemon": "task", "task": "task"}.get(
                above_kind, UNKNOWN
            )
        # The scripts that start Spark run small tools of the shell.
        if above_kind == "launcher" and not program.startswith("python"):
            return "launcher"
        if above_kind == "daemon" and not command:  # a worker that was seen only after its end
            return "task"
        return UNKNOWN

    def find_owner(self, port: int, listening: int) -> Seen | None:
        """The process at the client's end of a connection to us.

        A forked worker shares the sockets of its parent. The youngest process uses them.
        """
        inode = self._table.find_inode(port, listening)
        if inode is None:
            return None
        with self._lock:
            self.refresh()
            holders = [
                one for one in self._seen.values() if self._table.holds_socket(one.pid, inode)
            ]
        return max(holders, key=lambda one: (one.started, one.pid), default=None)

    def list_members(self) -> list[Seen]:
        """All processes that were ever seen."""
        with self._lock:
            return [*self._ended, *self._seen.values()]


def sum_unseen(members: list[Seen]) -> float:
    """Return the processor time below the driver that no process of `members` can have used.

    The kernel adds the time of a process to its parent when the parent has waited for it, so the
    driver's total is exact. Between two looks processes end, and others begin and end. What these
    have used is neither more than the time between the looks on all processors, nor hidden where
    only Spark starts processes.
    """
    below = _list_below(members)
    total = sum(one.cpu + one.waited for one in below if one.kind == "driver")
    seen = sum(one.cpu for one in below if not one.is_short_copy)
    of_ended: dict[int, float] = defaultdict(float)
    for one in below:
        if one.missed is not None:
            of_ended[one.parent] += one.cpu + one.waited
    of_spark = sum(
        max(one.waited - of_ended[one.pid], 0.0) for one in below if one.kind in _STARTED_BY_SPARK
    )
    between = _measure_union(
        (one.last_look, one.missed)
        for one in below
        if one.missed is not None and one.kind in _LASTING
    )
    copies = sum(one.cpu for one in members if one.is_short_copy and one not in below)
    return copies + max(total - seen - of_spark - between * (os.cpu_count() or 1), 0.0)


def _list_below(members: list[Seen]) -> list[Seen]:
    """The driver and all processes below it."""
    pids = {one.pid for one in members if one.kind == "driver"}
    found = []
    for one in sorted(members, key=lambda one: (one.started, one.pid)):
        if one.pid in pids or one.parent in pids:
            pids.add(one.pid)
            found.append(one)
    return found


def _measure_union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


class Watch:
    """A thread that looks at a family again and again."""

    def __init__(self, family: Family, seconds: float = 0.05) -> None:
        self._family, self._seconds = family, seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._family.refresh()

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            self._family.refresh()
