"""Identifies a process, so that another process on the same host can prove it dead."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessIdentity(BaseModel):
    """One process of one boot of one host.

    Attributes:
        driver: name of the driver, random unless given.
        boot: the kernel's boot id; after a reboot a pid means nothing.
        namespace: the pid namespace; containers share the boot id, but not the pids.
        start_ticks: start of the process in clock ticks since boot; the kernel reuses pids. 0 if it
            cannot be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str
    host: str
    boot: str
    namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def this_process(cls, driver: str | None = None) -> ProcessIdentity:
        """Describe the calling process; `driver` is a random name unless given."""
        return cls.of_process(os.getpid(), driver)

    @classmethod
    def of_process(cls, pid: int, driver: str | None = None) -> ProcessIdentity:
        """Describe a process of this host and pid namespace."""
        return cls(
            driver=driver or secrets.token_hex(6),
            host=socket.gethostname(),
            boot=_read_boot_id(),
            namespace=_read_pid_namespace(),
            pid=pid,
            start_ticks=_read_start_ticks(pid) or 0,
        )

    def is_proven_dead(self) -> bool:
        """Return whether this process certainly no longer runs; False if that is not known.

        Only a process of this host, boot and pid namespace can be proven dead; a zombie is dead.
        """
        here = (self.host, self.boot, self.namespace) == (
            socket.gethostname(),
            _read_boot_id(),
            _read_pid_namespace(),
        )
        if not here or not self.boot or not self.namespace:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user runs a process with this pid: compare the start
        ticks = _read_start_ticks(self.pid)
        return ticks is not None and ticks != self.start_ticks


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: no process can be proven dead


def _read_pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read_start_ticks(pid: int) -> int | None:
    """Return the start of a live process; -1 for a zombie, None if it cannot be read."""
    try:
        # The second field is the command in parentheses, which may itself contain parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
