"""A JVM whose driver hangs is ended; here another process takes the JVM's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidegate.jobs.sealed_queries.jvm_watchdog import _SIGN, JvmWatchdog, wait_for_silence

_PATIENCE = 300.0  # seconds; the machine may be busy
_DRIVER = """
import sys
from tidegate.jobs.sealed_queries.jvm_watchdog import JvmWatchdog
JvmWatchdog(int(sys.argv[1]), lambda: 0.0)._send_sign()
print("watched", flush=True)
input()
"""


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    """A process that goes on until it is killed."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("signs", "rest"),
    [([9.0, 9.0, -1.0], None), ([9.0, 0.001], 0.0), ([], 0.0)],
)
def test_signs_of_life_are_waited_for(signs: list[float], rest: float | None) -> None:
    """Each says how long the next one may take; a goodbye ends the watch."""
    reading, writing = os.pipe()
    for sign in signs:
        os.write(writing, _SIGN.pack(sign))
    assert wait_for_silence(reading, 0.001) == rest
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_driver_that_is_gone_is_silent() -> None:
    """Nothing else holds its end of the pipe. The JVM has time to end by itself."""
    reading, writing = os.pipe()
    os.close(writing)
    assert wait_for_silence(reading, _PATIENCE) == 30.0
    os.close(reading)


def test_a_driver_that_says_goodbye_leaves_the_jvm_alone(jvm: subprocess.Popen[bytes]) -> None:
    """Its script may still use it."""
    watchdog = JvmWatchdog(jvm.pid, lambda: 5.0)
    watchdog.close()
    assert watchdog._process.wait(_PATIENCE) == 0
    assert jvm.poll() is None


def test_a_jvm_does_not_outlive_the_lease_of_a_driver_that_hangs(
    jvm: subprocess.Popen[bytes],
) -> None:
    """Otherwise it would write into a sink that another driver has taken over."""
    command = [sys.executable, "-c", _DRIVER, str(jvm.pid)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"watched\n"
        driver.send_signal(signal.SIGSTOP)
        assert jvm.wait(_PATIENCE) == -signal.SIGKILL
        driver.kill()
