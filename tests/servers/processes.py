"""The processes below one that a test started, which may end while the test looks at them."""

from __future__ import annotations

from contextlib import suppress

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


def kill_jvms(pid: int) -> bool:
    """kill -9 of each; False if there was none."""
    jvms = find_jvms(pid)
    for jvm in jvms:
        with suppress(psutil.NoSuchProcess):
            jvm.kill()
    return bool(jvms)
