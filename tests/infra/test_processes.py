"""Pid and start ticks identify a process, and it is stopped with all its children."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.infra.local_processes import (
    ProcessId,
    find_processes_with,
    is_port_free,
    is_process_alive,
    kill_processes,
    read_start_ticks,
    spawn_process,
    stop_processes,
)

# A parent with a child of its own; both end on SIGTERM only if the parent gets the signal.
_FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(600)
"""

Family = Callable[[str], tuple[ProcessId, ProcessId]]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    marks: list[ProcessId] = []

    def start(manner: str) -> tuple[ProcessId, ProcessId]:
        note = tmp_path / "child"
        parent = spawn_process(
            [sys.executable, "-c", _FAMILY, str(note), manner], log=tmp_path / "log"
        )
        marks.append(parent)
        _until(lambda: Path(f"{note}.ready").exists())
        pid = int(note.read_text())
        ticks = read_start_ticks(pid)
        assert ticks is not None
        return parent, ProcessId(pid, ticks)

    yield start
    kill_processes(marks)


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_process_leads_its_own_session(family: Family) -> None:
    """A Ctrl-C at the terminal of the starter does not reach it."""
    parent, _ = family("obedient")
    assert os.getsid(parent.pid) == parent.pid
    assert is_process_alive(parent)


@pytest.mark.parametrize("manner", ["obedient", "deaf"])
def test_stop_ends_the_whole_group(family: Family, manner: str) -> None:
    """SIGTERM where it helps, SIGKILL where it does not, and no child is left behind."""
    parent, child = family(manner)
    stop_processes([parent], grace=0.3)
    assert not is_process_alive(parent)
    _until(lambda: not is_process_alive(child))


def test_kill_reaches_the_children_of_a_dead_leader(family: Family) -> None:
    """A leader that crashed does not save its children."""
    parent, child = family("obedient")
    os.kill(parent.pid, 9)
    _until(lambda: not is_process_alive(parent))
    assert is_process_alive(child)
    kill_processes([parent])
    _until(lambda: not is_process_alive(child))


def test_never_touches_a_reused_pid(family: Family) -> None:
    """The same pid with other start ticks is a stranger: it is reported as dead and left alone."""
    parent, _ = family("obedient")
    stranger = ProcessId(parent.pid, parent.start_ticks - 1)
    assert not is_process_alive(stranger)
    stop_processes([stranger], grace=0.1)
    assert is_process_alive(parent)


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    """A process that has ended is dead even before its parent has waited for it."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    _until(lambda: read_start_ticks(pid) is None)
    assert Path(f"/proc/{pid}/stat").exists()
    os.waitpid(pid, 0)


# Its first thread has ended, and another one goes on and holds a port.
_LEFT_BY_ITS_LEADER = """
import ctypes, socket, sys, threading
server = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1], "w").write(str(server.getsockname()[1]))
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_runs_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    """After `kill_processes` what it listened on is free."""
    note = tmp_path / "port"
    command = [sys.executable, "-c", _LEFT_BY_ITS_LEADER, str(note)]
    mark = spawn_process(command, log=tmp_path / "log")
    try:
        stat = Path(f"/proc/{mark.pid}/stat")
        _until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        assert is_process_alive(mark)
        assert not ProcessIdentity.of_process(mark.pid).is_proven_dead()
        assert not is_port_free(int(note.read_text()))
    finally:
        kill_processes([mark])
    assert not is_process_alive(mark)
    assert is_port_free(int(note.read_text()))


def test_finds_descendants_by_their_environment(tmp_path: Path) -> None:
    """What a server starts in a session of its own is still found, by a random value in its
    environment.
    """
    value = os.urandom(8).hex()
    env = {**os.environ, "TIDEGATE_STACK_ID": value}
    mark = spawn_process(
        [sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "log", env=env
    )
    try:
        _until(lambda: mark in find_processes_with("TIDEGATE_STACK_ID", value))
        assert find_processes_with("TIDEGATE_STACK_ID", "another") == []
    finally:
        kill_processes([mark])
