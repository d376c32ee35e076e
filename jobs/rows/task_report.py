"""What a task of Spark has cost, as the driver logs it."""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class TaskReport:
    """What a task has cost.

    Attributes:
        pid, parent: its process, and that one's parent.
        cpu: seconds of processor time.
        memory: the most bytes that the process has held so far, in earlier tasks too.
    """

    pid: int
    parent: int
    cpu: float
    memory: int

    @classmethod
    def measure_since(cls, begun: float) -> Self:
        """Return what this process has cost since `time.process_time` was `begun`."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return cls(os.getpid(), os.getppid(), time.process_time() - begun, memory)

    @classmethod
    def sum_up(cls, reports: Sequence[Self]) -> Self:
        """Return what several pieces of work in one process have cost."""
        cpu, memory = sum(one.cpu for one in reports), max(one.memory for one in reports)
        return replace(reports[0], cpu=cpu, memory=memory)

    def describe(self) -> dict[str, Any]:
        """Return it as the log has it."""
        cpu = round(self.cpu, 6)
        return {"pid": self.pid, "parent": self.parent, "cpu": cpu, "memory": self.memory}
