"""Ports are free, on loopback, and never offered twice."""

from __future__ import annotations

import socket

from tidegate.infra.ports import LOOPBACK, free_port, is_free


def _listen() -> socket.socket:
    server = socket.socket()
    server.bind((LOOPBACK, 0))
    server.listen()
    return server


def test_offers_no_port_twice() -> None:
    """Two servers that are started one after the other never get the same port."""
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_keeps_a_preferred_port_while_it_is_free() -> None:
    """A restarted server keeps its address unless somebody took it meanwhile."""
    with _listen() as server:
        taken = server.getsockname()[1]
        assert not is_free(taken)
        assert free_port(taken) != taken
    assert is_free(taken)
    assert free_port(taken) == taken
