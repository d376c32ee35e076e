"""Ports are free, on loopback, and never offered twice."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tidegate.infra import local_processes
from tidegate.infra.local_processes import LOOPBACK, choose_free_port, is_port_free


def _listen() -> socket.socket:
    server = socket.socket()
    server.bind((LOOPBACK, 0))
    server.listen()
    return server


def test_offers_no_port_twice() -> None:
    """Two servers that are started one after the other never get the same port."""
    offered = [choose_free_port() for _ in range(50)]
    assert len(set(offered)) == 50


@pytest.mark.parametrize("given", ["32768\t60999\n", "20500 60999\n", "", None])
def test_offers_none_that_the_kernel_gives_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """A server may bind it half a minute later.

    By then a port of the kernel's own range may be someone else's.
    """
    told = tmp_path / "range"
    if given is not None:
        told.write_text(given)
    monkeypatch.setattr(local_processes, "_EPHEMERAL_RANGE_FILE", told)
    found = [choose_free_port() for _ in range(20)]
    if given and given.startswith("32768"):
        assert max(found) < 32768
    assert all(is_port_free(port) for port in found), (
        "and where that range leaves no room, one of it"
    )


def test_keeps_a_preferred_port_while_it_is_free() -> None:
    """A restarted server keeps its address unless someone took it meanwhile."""
    with _listen() as server:
        taken = server.getsockname()[1]
        assert not is_port_free(taken)
        assert choose_free_port(taken) != taken
    assert is_port_free(taken)
    assert choose_free_port(taken) == taken
