"""A container that ends: its drivers drain first."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tidegate.operators.drain_on_exit import drain_drivers
from tidegate.operators.driver_launch import LaunchedDriver, launch_driver
from tidegate.operators.store_access import StoreAccess

Wait = Callable[..., None]

# A driver that takes a moment to seal after SIGTERM, for which it needs its JVM, and says when it has.
DRIVER = """
import pathlib, signal, subprocess, sys, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
pathlib.Path("java").symlink_to("/bin/sleep")
jvm = subprocess.Popen(["./java", "600"])
pathlib.Path("started").touch()
asked.wait()
threading.Event().wait(0.5)
if jvm.poll() is None:
    pathlib.Path("sealed").touch()
jvm.kill()
"""
# The scheduler: ends at once on SIGTERM, with a code of its own.
COMMAND = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up',"
    " flush=True); signal.pause()"
)


def _launch(tmp_path: Path, script: str, wait_until: Wait) -> LaunchedDriver:
    home = {"TIDEGATE_HOME": str(tmp_path)}
    with patch.dict(os.environ, home, TIDEGATE_DRIVER=shlex.join([sys.executable, "-c", script])):
        started = launch_driver("p", str(tmp_path / "p.yaml"), StoreAccess(str(tmp_path)), "latest")
    wait_until(lambda: (tmp_path / "drivers" / "p" / "started").exists())
    return started


def test_drivers_drain_before_the_container_ends(tmp_path: Path, wait_until: Wait) -> None:
    """SIGTERM goes to the command.

    Its drivers, in sessions of their own, are asked after it and waited for.
    """
    driver = _launch(tmp_path, DRIVER, wait_until)
    (tmp_path / "drivers" / "p" / "torn.json").write_text("{")
    shelter = subprocess.Popen(
        [sys.executable, "-m", "tidegate.operators.drain_on_exit", sys.executable, "-c", COMMAND],
        env={**os.environ, "TIDEGATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert shelter.stdout is not None
    assert shelter.stdout.readline() == b"up\n"
    assert driver.is_alive()
    shelter.send_signal(signal.SIGTERM)
    assert shelter.wait(timeout=60) == 7
    assert driver.read_exit_code() == 0
    assert (tmp_path / "drivers" / "p" / "sealed").exists()
    shelter.stdout.close()


def test_a_driver_that_does_not_end_is_named(tmp_path: Path, wait_until: Wait) -> None:
    """The wait is bounded."""
    stuck = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN);"
        " pathlib.Path('started').touch(); time.sleep(600)"
    )
    driver = _launch(tmp_path, stuck, wait_until)
    assert drain_drivers(tmp_path / "drivers", timeout=0.5) == [driver]
    os.killpg(driver.leader.pid, signal.SIGKILL)
