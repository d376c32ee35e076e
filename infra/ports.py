"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

__all__ = ["LOOPBACK", "choose_free_port", "is_port_free"]

LOOPBACK = "127.0.0.1"

# Between choosing a port and the server binding it nothing holds it: a server in Python or Java takes half a minute on a busy
# machine. So never offer one twice in a process, and none that the kernel gives away by itself: another program that asks for any
# port, or connects to somebody, would get it in between.
_offered_ports: set[int] = set()
_LOWEST_PORT = 20_000
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_port_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it a port in TIME_WAIT looks taken, and a restarted stack would change its address.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_free_port(preferred: int | None = None) -> int:
    """Choose a free loopback port.

    Args:
        preferred: returned as it is while it is free, so that a restarted server keeps its address.
    """
    if preferred is not None and is_port_free(preferred):
        return preferred
    while True:
        port = _pick_random_port()
        if port not in _offered_ports and is_port_free(port):
            _offered_ports.add(port)
            return port


def _pick_random_port() -> int:
    """A port at random, below those that the kernel gives away; where it leaves no room, one of its own."""
    try:
        room = int(_EPHEMERAL_RANGE_FILE.read_text().split()[0]) - _LOWEST_PORT
    except (OSError, ValueError, IndexError):
        room = 0
    if room >= 1_000:
        return _LOWEST_PORT + secrets.randbelow(room)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
