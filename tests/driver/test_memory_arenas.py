"""The memory of the C library in a driver."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Sixteen threads allocate at the same time, which is what makes glibc add arenas.
_PROGRAM = """
import ctypes, sys, threading
from tidegate.jobs.driver.pipeline_run import open_run

libc, together = ctypes.CDLL(None), threading.Barrier(16)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def allocate():
    together.wait()
    for _ in range(1000):
        assert libc.malloc(100)
    together.wait()


with open_run("p", sys.argv[1]):
    threads = [threading.Thread(target=allocate) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
    libc.malloc_info(0, report)
    libc.fclose(report)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_info is glibc's")
def test_the_threads_of_a_driver_share_two_arenas(tmp_path: Path) -> None:
    """Each further arena would keep free pieces of its own, which grow with the epochs."""
    report = tmp_path / "malloc.xml"
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "store"), str(report)]
    subprocess.run(command, check=True, timeout=60)
    assert len(re.findall(r"<heap nr=", report.read_text())) <= 2
