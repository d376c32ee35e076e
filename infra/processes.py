"""Detached process groups, identified by pid and start ticks.

A pid alone may belong to somebody else by the time it is used: the kernel hands pids out again. The start time that
`/proc/<pid>/stat` gives in clock ticks since boot makes the pair unique, so it can be written to a file, read by another
process hours later, and still never hits a stranger. Nothing here looks for processes by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId", "is_process_alive", "kill_processes", "find_processes_with", "read_program_name", "spawn_process", "read_start_ticks", "stop_processes"]

_POLL_SECONDS = 0.05

# Children of this very process become zombies until they are waited for; is_alive() does that.
_children: set[int] = set()


@dataclass(frozen=True)
class ProcessId:
    """One process, for ever: its pid and the clock tick at which it started."""

    pid: int
    start_ticks: int


def spawn_process(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> ProcessId:
    """Start a program as the leader of its own session, output appended to a file.

    It outlives its starter and gets no Ctrl-C of the terminal.

    Raises:
        OSError: the program or the working folder does not exist.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    child.returncode = 0  # waited for below, if at all: it may outlive us, and Popen would warn about that
    _children.add(child.pid)
    # An unreaped child keeps its pid, so the file is there even if the program has ended already.
    return ProcessId(child.pid, _read_process_stat(child.pid)[1])


def read_start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when it is gone or a zombie."""
    _reap_child(pid)
    try:
        state, ticks = _read_process_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else ticks


def is_process_alive(mark: ProcessId) -> bool:
    """Whether this very process still runs."""
    return read_start_ticks(mark.pid) == mark.start_ticks


def stop_processes(marks: Iterable[ProcessId], grace: float = 10.0) -> None:
    """Ask the processes to end, all at once; after the grace time kill them and what is left of their groups."""
    everyone = list(marks)
    for mark in everyone:
        if is_process_alive(mark):
            _signal_process(mark.pid, signal.SIGTERM, group=False)
    _wait_until_gone(everyone, grace)
    kill_processes(everyone)


def kill_processes(marks: Iterable[ProcessId], wait: float = 60.0) -> None:
    """End with kill -9 the whole groups led by these processes, also when a leader has gone before its children."""
    everyone = list(marks)
    for mark in everyone:
        # While a group has members the kernel does not give its number to a new process. So if somebody else has this
        # pid now, the group is empty; and if nobody has it, the members can only be ours.
        if read_start_ticks(mark.pid) in (None, mark.start_ticks):
            _signal_process(mark.pid, signal.SIGKILL, group=True)
    _wait_until_gone(everyone, wait)


def find_processes_with(variable: str, value: str) -> list[ProcessId]:
    """All live processes of this user that were started with `variable=value` in their environment.

    Finds what a server's children started in sessions of their own, for example a streaming driver.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                ticks = read_start_ticks(int(entry.name))
                if ticks is not None:
                    found.append(ProcessId(int(entry.name), ticks))
    return found


def read_program_name(mark: ProcessId) -> str:
    """Name of the program a process runs, for example ``java``; empty when it is gone."""
    try:
        return Path(f"/proc/{mark.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_process_stat(pid: int) -> tuple[str, int]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def _reap_child(pid: int) -> None:
    if pid not in _children:
        return
    try:
        gone = os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # somebody else has waited for it
        gone = True
    if gone:
        _children.discard(pid)


def _signal_process(pid: int, number: signal.Signals, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _wait_until_gone(marks: Sequence[ProcessId], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(is_process_alive(mark) for mark in marks):
        time.sleep(_POLL_SECONDS)
