"""Starts and stops detached process groups, which are identified by pid and start time.

A pid alone may belong to another process later, because the kernel uses pids again. With the start
time, in clock ticks since boot (`/proc/<pid>/stat`), the pair is unique. It can be written to a
file, be read by another process hours later, and never identifies another process. No function here
looks for processes by name.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidegate.checkpoints.host_clock import poll_until
from tidegate.checkpoints.pipeline_identity import read_process_stat

_POLL_SECONDS = 0.05

# Children of this very process become zombies until they are waited for; is_alive() does that.
_children: set[int] = set()


@dataclass(frozen=True)
class ProcessId:
    """A process, identified for all time by its pid and the clock tick at which it started."""

    pid: int
    start_ticks: int


def spawn_process(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> ProcessId:
    """Start a program as the leader of its own session, output appended to a file.

    It outlives its starter and gets no Ctrl-C of the terminal.

    Raises:
        OSError: the program or the working folder does not exist.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=partial(os.open, mode=0o600)) as output:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    child.returncode = (
        0  # waited for below, if at all: it may outlive us, and Popen would warn about that
    )
    _children.add(child.pid)
    # An unreaped child keeps its pid, so the file is there even if the program has ended already.
    return ProcessId(child.pid, read_process_stat(child.pid)[1])


def read_start_ticks(pid: int) -> int | None:
    """Return the start of a live process in clock ticks since boot.

    None if it is gone or a zombie.
    """
    _reap_child(pid)
    try:
        state, ticks = read_process_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else ticks


def is_process_alive(mark: ProcessId) -> bool:
    """Return whether the process with the mark's pid and start ticks still runs, not a later one.

    The mark must be of this host and this boot: neither is part of it.
    """
    return read_start_ticks(mark.pid) == mark.start_ticks


def stop_processes(marks: Iterable[ProcessId], grace: float = 10.0) -> None:
    """Send SIGTERM to all of these processes, then kill what is left of their groups.

    The kill comes when all of them have ended, at the latest after `grace` seconds.
    """
    everyone = list(marks)
    for mark in everyone:
        if is_process_alive(mark):
            _signal_process(mark.pid, signal.SIGTERM, group=False)
    _wait_until_gone(everyone, grace)
    kill_processes(everyone)


def kill_processes(marks: Iterable[ProcessId]) -> None:
    """Kill -9 the whole groups of these processes, even if a leader ended before its children.

    Waits for the end of the leaders, at most 60 s.
    """
    everyone = list(marks)
    for mark in everyone:
        # While a group has members the kernel does not give its number to a new process. So if
        # another process has this pid now, the group is empty; and if no process has it, the
        # members can only be ours.
        if read_start_ticks(mark.pid) in (None, mark.start_ticks):
            _signal_process(mark.pid, signal.SIGKILL, group=True)
    _wait_until_gone(everyone, 60.0)


def find_processes_with(variable: str, value: str) -> list[ProcessId]:
    """Return all processes of this user that were started with `variable=value` in the environment.

    So children are found that a server started in sessions of their own, such as a streaming
    driver. The calling process is left out.
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
    """Return the name of the program that a process runs, for example ``java``.

    At most 15 characters; empty if no process has this pid. The start time is not compared.
    """
    try:
        return Path(f"/proc/{mark.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _reap_child(pid: int) -> None:
    if pid not in _children:
        return
    try:
        gone = os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # another process has waited for it
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
    poll_until(lambda: not any(map(is_process_alive, marks)), seconds, _POLL_SECONDS)


LOOPBACK = "127.0.0.1"

# Between choosing a port and the server binding it nothing holds it: a server in Python or Java
# takes half a minute on a busy machine. So never offer one twice in a process, and none that the
# kernel gives away by itself: another program that asks for any port, or opens a connection,
# would get it in between.
_offered_ports: set[int] = set()
_LOWEST_PORT = 20_000
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_port_free(port: int) -> bool:
    """Return whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it a port in TIME_WAIT looks taken, and a restarted stack would change its
        # address.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_free_port(preferred: int = 0) -> int:
    """Return a free loopback port.

    Args:
        preferred: returned if it is free, so that a restarted server keeps its address.
    """
    if preferred and is_port_free(preferred):
        return preferred
    while True:
        port = _pick_random_port()
        if port not in _offered_ports and is_port_free(port):
            _offered_ports.add(port)
            return port


def _pick_random_port() -> int:
    """A port at random, below those that the kernel gives away.

    Where it leaves no room, one of its own.
    """
    try:
        room = int(_EPHEMERAL_RANGE_FILE.read_text().split()[0]) - _LOWEST_PORT
    except (OSError, ValueError, IndexError):
        room = 0
    if room >= 1_000:
        return _LOWEST_PORT + secrets.randbelow(room)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
