"""Start a driver that outlives the task, and name it so that it can be found again and never be mistaken for another.

The driver runs in a session of its own under a tiny shell that writes down its exit code: nobody is left to `wait` for
it once the task has ended.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tidegate.checkpoints.lease import ProcessIdentity
from tidegate.operators.access import StoreAccess, build_child_environment, get_tidegate_home

__all__ = [
    "LaunchedDriver",
    "Launcher",
    "LocalLauncher",
    "make_driver_folder",
    "is_on_this_host",
    "make_launcher",
    "make_attempt_name",
    "send_signal",
    "start_detached",
    "tail_log_file",
]

# The shell must survive a SIGTERM sent to the whole group, or the exit code is lost; `:` instead of '' because an ignored
# signal would stay ignored in the driver.
_EXIT_CODE_SHELL = 'trap : TERM INT HUP; "$@"; code=$?; echo "$code" > "$0.part" && mv "$0.part" "$0"'


@dataclass(frozen=True)
class LaunchedDriver:
    """One started driver.

    Attributes:
        attempt: unique name of this start.
        log: where its output goes.
        leader: the process group's leader, identified for ever; the driver itself is its child.
        exit_file: appears with the exit code when the driver has ended.
    """

    attempt: str
    log: str
    leader: ProcessIdentity
    exit_file: str

    def read_exit_code(self) -> int | None:
        """The driver's exit code; None while it runs, or when it was killed together with its group."""
        try:
            return int(Path(self.exit_file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether the driver may still run. Never False without proof."""
        return self.read_exit_code() is None and not self.leader.is_proven_dead()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for triggers."""
        return {**asdict(self), "leader": self.leader.model_dump()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LaunchedDriver:
        """Inverse of `as_dict`."""
        return cls(**{**data, "leader": ProcessIdentity.model_validate(data["leader"])})


class Launcher(Protocol):
    """Starts a driver and returns at once; called by a task, on its worker."""

    def launch(self, pipeline: str, spec: str, access: StoreAccess, recover_to: str) -> LaunchedDriver:
        """Start one driver process for the pipeline."""
        ...


class LocalLauncher:
    """Starts the driver on this host, as a process group of its own.

    Args:
        folder: of logs and exit codes; default `$TIDEGATE_HOME/drivers`.
        command: what to run; default `$TIDEGATE_DRIVER`, else `python -m tidegate.jobs.driver` of this Python.
    """

    def __init__(self, folder: Path | None = None, command: list[str] | None = None) -> None:
        self._folder = folder
        own = shlex.split(os.environ.get("TIDEGATE_DRIVER", ""))
        self._command = command or own or [sys.executable, "-m", "tidegate.jobs.driver"]

    def launch(self, pipeline: str, spec: str, access: StoreAccess, recover_to: str) -> LaunchedDriver:
        """Start the driver; secrets travel in its environment only."""
        attempt = make_attempt_name()
        driver = [*self._command, str(Path(spec).absolute()), "--store", access.url, "--recover-to", recover_to]
        return start_detached(make_driver_folder(pipeline, self._folder), attempt, driver, build_child_environment(access))


def make_launcher(submit: Mapping[str, Any] | None) -> Launcher:
    """The launcher a spec asks for: `supervision.submit` by spark-submit, else a process of its own on this host."""
    if submit is None:
        return LocalLauncher()
    from tidegate.operators.submit import SubmitLauncher

    return SubmitLauncher(**submit)


def make_attempt_name() -> str:
    """A unique name for a start; names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def make_driver_folder(pipeline: str, folder: Path | None = None) -> Path:
    """Where the logs and exit codes of a pipeline's drivers lie."""
    found = (folder or get_tidegate_home() / "drivers") / pipeline
    found.mkdir(parents=True, exist_ok=True)
    return found


def start_detached(folder: Path, attempt: str, command: Sequence[str], environment: Mapping[str, str]) -> LaunchedDriver:
    """Start a command as a process group that outlives us, its output in a log, its exit code in a file."""
    log, exit_file = folder / f"{attempt}.log", folder / f"{attempt}.exit"
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _EXIT_CODE_SHELL, str(exit_file), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # The driver sends its log to the bucket while it runs; jobs/driver/ship.py reads these.
            env={**environment, "TIDEGATE_DRIVER_LOG": str(log), "TIDEGATE_ATTEMPT": attempt},
            start_new_session=True,
        )
    child.returncode = 0  # never waited for: it is meant to outlive us, and Popen would warn about that
    launched = LaunchedDriver(attempt, str(log), _identify_process(child.pid, attempt), str(exit_file))
    (folder / f"{attempt}.json").write_text(json.dumps(launched.as_dict()), encoding="utf-8")
    return launched


def is_on_this_host(holder: ProcessIdentity) -> bool:
    """Whether the process belongs to this host, this boot and this pid namespace: only then its pid means anything."""
    me = ProcessIdentity.this_process()
    return (holder.host, holder.boot, holder.namespace) == (me.host, me.boot, me.namespace) and bool(me.boot)


def send_signal(holder: ProcessIdentity, number: signal.Signals, *, group: bool = False) -> bool:
    """Signal exactly this process (or the group it belongs to); False when it is not here or no longer itself."""
    if not is_on_this_host(holder) or holder.is_proven_dead():
        return False
    with suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(os.getpgid(holder.pid), number)
        else:
            os.kill(holder.pid, number)
        return True
    return False


def tail_log_file(log: str, lines: int = 20, most_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, reading at most the end of it."""
    try:
        with Path(log).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _identify_process(pid: int, driver: str) -> ProcessIdentity:
    # The second field of stat is the command in parentheses and may hold anything, also parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return ProcessIdentity.this_process(driver).model_copy(update={"pid": pid, "start_ticks": int(fields[19])})
