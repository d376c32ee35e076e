"""The processes below one that a test started, which may end while the test looks at them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil


def list_children(pid: int) -> list[psutil.Process]:
    """The processes below it, at any depth; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def find_jvms(pid: int) -> list[psutil.Process]:
    """The Java processes below it, such as the JVM of a driver."""
    found = []
    for child in list_children(pid):
        # A driver also starts short-lived helpers, which end between the list and this call.
        with suppress(psutil.NoSuchProcess):
            if child.name() == "java":
                found.append(child)
    return found


def has_busy_worker(executor: psutil.Process) -> bool:
    """Whether a Python worker of an executor computes at this moment."""
    with suppress(psutil.NoSuchProcess):
        children = executor.children(recursive=True)
        return any(child.status() == psutil.STATUS_RUNNING for child in children)
    return False


def kill_jvms(pid: int) -> bool:
    """kill -9 of each; False if there was none."""
    jvms = find_jvms(pid)
    for jvm in jvms:
        with suppress(psutil.NoSuchProcess):
            jvm.kill()
    return bool(jvms)


def suspend_without_lock(process: psutil.Process) -> None:
    """Stop a process at a moment at which it has no file locked.

    Whoever needs the lock of a local store would wait for it until the process goes on.

    Raises:
        AssertionError: the process ended.
    """
    while True:
        process.suspend()
        while (status := process.status()) != psutil.STATUS_STOPPED:
            assert status != psutil.STATUS_ZOMBIE, f"process {process.pid} has ended"
            time.sleep(0.001)
        if process.pid not in _list_lock_owners():
            return
        process.resume()
        time.sleep(0.01)


def _list_lock_owners() -> set[int]:
    """The processes that have a file locked, as Linux lists them: the fifth word of a line."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(words[4]) for words in lines if words[1] != "->"}
