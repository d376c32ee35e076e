"""Processes that end while a test looks at them do not fail the test."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.servers.processes import find_jvms, kill_jvms, list_children

pytestmark = pytest.mark.unit


def test_a_child_that_ends_between_the_list_and_its_name_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`psutil` raises NoSuchProcess for such a child."""
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = psutil.Process(ended.pid)
    ended.communicate(b"\n")
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [child])
    assert find_jvms(os.getpid()) == []
    assert not kill_jvms(os.getpid())


def test_a_process_that_has_ended_has_no_children() -> None:
    """The process may end before a test asks for them."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert list_children(process.pid) == []
