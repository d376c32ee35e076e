"""The addresses of an S3 endpoint, whose name may belong to several servers of one store.

A client of boto3 connects to any of them. The races of the start-up probe pin clients to each.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


class ServerAddress(NamedTuple):
    """One address of one endpoint."""

    endpoint: str
    address: str


def resolve_endpoints(endpoints: Sequence[str]) -> list[ServerAddress]:
    """Return each address of the hosts of some endpoints; none of a name that is not known here.

    A proxy may know it.
    """
    found: dict[ServerAddress, None] = {}
    for endpoint in endpoints:
        host, port = _split_endpoint(endpoint)
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        found |= dict.fromkeys(ServerAddress(endpoint, str(info[4][0])) for info in infos)
    return list(found)


def select_reachable(servers: Sequence[ServerAddress], timeout: float) -> list[ServerAddress]:
    """Return the servers that accept a connection within so many seconds."""

    def is_reachable(server: ServerAddress) -> bool:
        where = server.address, _split_endpoint(server.endpoint)[1]
        try:
            socket.create_connection(where, timeout).close()
        except OSError:
            return False
        return True

    if not servers:
        return []
    with ThreadPoolExecutor(len(servers)) as pool:
        reachable = list(pool.map(is_reachable, servers))
    return [server for server, answers in zip(servers, reachable, strict=True) if answers]


def pin_client(client: Any, address: str) -> None:
    """Have a client of boto3 open its connections to this address of its endpoint's host.

    TLS, the Host header and the signature still have the name. A proxy chooses the address itself.
    """
    # botocore has no public place for it. tests/checkpoints/test_store_probe.py watches this one.
    manager = client._endpoint.http_session._manager
    manager.pool_classes_by_scheme = {
        scheme: _pin_pool(pool, address) for scheme, pool in manager.pool_classes_by_scheme.items()
    }


def _pin_pool(pool: Any, address: str) -> type:
    opened = pool.ConnectionCls

    def open_socket(connection: Any) -> Any:
        name, connection._dns_host = connection._dns_host, address
        try:
            return opened._new_conn(connection)
        finally:
            connection._dns_host = name

    pinned = type("PinnedConnection", (opened,), {"_new_conn": open_socket})
    return type("PinnedPool", (pool,), {"ConnectionCls": pinned})


def _split_endpoint(endpoint: str) -> tuple[str | None, int | None]:
    url = urlsplit(endpoint)
    return url.hostname, url.port or _PORTS.get(url.scheme)
