"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import socket

__all__ = ["LOOPBACK", "free_port", "is_free"]

LOOPBACK = "127.0.0.1"

# Between choosing a port and the server binding it nothing holds it; never offer one twice in a process.
_offered: set[int] = set()


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it a port in TIME_WAIT looks taken, and a restarted stack would change its address.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """Choose a free loopback port.

    Args:
        preferred: returned as it is while it is free, so that a restarted server keeps its address.
    """
    if preferred is not None and is_free(preferred):
        return preferred
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if port not in _offered:
            _offered.add(port)
            return port
