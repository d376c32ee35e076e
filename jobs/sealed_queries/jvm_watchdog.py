"""Ends the JVM of a driver whose Python hangs.

The lease of such a driver runs out, and another driver takes over, while this JVM would go on
writing into sinks. So a small process of its own waits for signs of life of the driver, and kills
the JVM when none comes before the lease runs out. A JVM ends by itself when its driver is gone; it
is killed if it does not.

The time is that of the lease, so a driver that lives through an outage of the store keeps its JVM.
"""

import contextlib
import os
import select
import struct
import subprocess
import sys
from collections.abc import Callable

import psutil

from tidegate.checkpoints.host_clock import PeriodicThread

_SIGN = struct.Struct("d")  # seconds within which the next sign comes
_GOODBYE = -1.0
_EVERY = 0.5  # seconds
_LEAST_PATIENCE = 3.0  # seconds, also when the lease has run out because the store is away
_FIRST_PATIENCE = 30.0  # seconds, while the driver waits for Spark to start
_GONE_PATIENCE = 30.0  # seconds, in which a JVM without its driver ends by itself
_ENDS_WITHIN = 5.0  # seconds


class JvmWatchdog:
    """Lets another process kill a JVM when this process hangs, until `close`.

    Args:
        pid: of the JVM.
        read_patience: returns the seconds for which no one else takes the lease.
    """

    def __init__(self, pid: int, read_patience: Callable[[], float]) -> None:
        self._read_patience = read_patience
        # A session of its own: a signal to the driver's group, such as Ctrl-C, does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(pid)],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 - as asked for
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._signs = PeriodicThread("tidegate-watchdog", self._send_sign, _EVERY).start()

    def close(self) -> None:
        """End the other process; the JVM stays."""
        self._signs.stop(_ENDS_WITHIN)
        self._send(_GOODBYE)
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN)

    def _send_sign(self) -> None:
        self._send(max(self._read_patience(), _LEAST_PATIENCE))

    def _send(self, seconds: float) -> None:
        # Without the other process, or while it does not read, the driver goes on as it is.
        with contextlib.suppress(OSError):
            self._pipe.write(_SIGN.pack(seconds))


def wait_for_silence(descriptor: int, patience: float) -> float | None:
    """Read signs of life until none comes in time.

    Args:
        descriptor: of the pipe.
        patience: seconds within which the first sign comes.

    Returns:
        Seconds that the JVM still has. A driver that is gone ends it, and some launchers read its
        exit code. None after a goodbye.
    """
    while True:
        readable, _, _ = select.select([descriptor], [], [], patience)
        if not readable:
            return 0.0
        sign = os.read(descriptor, _SIGN.size)
        if len(sign) < _SIGN.size:
            return _GONE_PATIENCE
        (patience,) = _SIGN.unpack(sign)
        if patience == _GOODBYE:
            return None


def _watch_jvm(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        jvm = psutil.Process(pid)
        rest = wait_for_silence(sys.stdin.fileno(), _FIRST_PATIENCE)
        if rest is None:
            return
        with contextlib.suppress(psutil.TimeoutExpired):
            jvm.wait(rest)
            return
        jvm.kill()  # not if the pid is that of another process by now
        sys.stderr.write("tidegate: the driver hangs or is gone; its JVM was ended\n")


if __name__ == "__main__":
    _watch_jvm(int(sys.argv[1]))
