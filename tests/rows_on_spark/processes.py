"""The processes of one run: who is whose parent, what each one is, and its processor time.

All is read from /proc, so a test can give a folder of its own instead.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

RUN_MARK: Final = "TIDEGATE_ROWS_ON_SPARK_RUN"
"""Variable of the environment that all processes of a run inherit."""
TICKS: Final = os.sysconf("SC_CLK_TCK")
UNKNOWN: Final = "unknown"
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
        return Seen(pid, int(fields[1]), int(fields[19]), cpu, self.read_command(pid))

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
            alive = set(self._table.list_pids())
            for pid in self._seen.keys() - alive:
                self._ended.append(self._seen.pop(pid))
            self._strangers &= alive
            for pid in sorted(alive - self._strangers):
                self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        found = self._table.read_process(pid)
        if found is None:
            return
        if pid not in self._seen and not self._belongs(found):
            self._strangers.add(pid)
            return
        # A zombie has no command any more; what it was is known.
        before = self._seen.get(pid)
        if not found.command and before is not None:
            found = replace(found, command=before.command, kind=before.kind)
            self._seen[pid] = found
            return
        self._seen[pid] = found
        self._seen[pid] = replace(found, kind=self._identify(found))

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


def sum_cpu(members: list[Seen]) -> dict[str, float]:
    """Processor time by kind of process."""
    total: dict[str, float] = defaultdict(float)
    for one in members:
        total[one.kind] += one.cpu
    return dict(total)


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
