"""An S3 store of several servers, each at an address of its own on loopback, under one name."""

from __future__ import annotations

import hashlib
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tidegate.infra.local_processes import choose_free_port

_PATIENCE = 60.0  # seconds


def resolve_to(monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[str]) -> None:
    """Let a name have these addresses. The list may change later."""
    resolve = socket.getaddrinfo

    def resolve_name(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        hosts = addresses if host == name else [host]
        return [info for one in hosts for info in resolve(one, port, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_name)


class HastyNodes:
    """Servers of one store, each of which judges conditions under a lock of its own.

    Each is right alone. Of two, the first conditional creations meet between judging and writing.

    Attributes:
        port: of each server.
        requests: address -> number of conditional writes.
        hosts: each Host header.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.port = choose_free_port()
        self.requests: Counter[str] = Counter()
        self.hosts: set[str] = set()
        self._objects: dict[str, bytes] = {}
        self._meet = threading.Barrier(2)
        self._servers = [
            ThreadingHTTPServer((address, self.port), self._make_handler(address))
            for address in addresses
        ]

    @contextmanager
    def serving(self) -> Iterator[HastyNodes]:
        """Answer until the end of the block."""
        with ExitStack() as stack:
            for server in self._servers:
                thread = threading.Thread(target=server.serve_forever, args=(0.01,))
                thread.start()
                stack.callback(thread.join)
                stack.callback(server.server_close)
                stack.callback(server.shutdown)
            yield self

    def write(self, path: str, body: bytes, unless: str | None, given: str | None) -> str | None:
        """Store a body if the conditions hold; return its ETag."""
        found = self._objects.get(path)
        if unless and found is not None:
            return None
        if given and (found is None or given != _compute_etag(found)):
            return None
        if unless and len(self._servers) > 1:
            self._meet.wait(_PATIENCE)
        self._objects[path] = body
        return _compute_etag(body)

    def _make_handler(self, address: str) -> type[BaseHTTPRequestHandler]:
        nodes, judging = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = nodes._objects.get(self.path)
                self._answer(404 if found is None else 200, found or b"")

            def do_DELETE(self) -> None:
                nodes._objects.pop(self.path, None)
                self._answer(204)

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                unless, given = self.headers["If-None-Match"], self.headers["If-Match"]
                with judging:
                    if unless or given:
                        nodes.requests[address] += 1
                        nodes.hosts.add(self.headers["Host"])
                    etag = nodes.write(self.path, body, unless, given)
                self._answer(412 if etag is None else 200, etag=etag)

            def _answer(self, code: int, body: bytes = b"", etag: str | None = None) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Last-Modified", self.date_time_string())
                self.send_header("ETag", etag or _compute_etag(body))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        return Handler


@contextmanager
def relaying(address: str, port: int) -> Iterator[list[int]]:
    """Pass connections to an address on to 127.0.0.1, same port.

    Yields:
        How many bytes each connection has sent.
    """
    sizes: list[int] = []

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            sizes.append(0)
            number = len(sizes) - 1
            with socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=self.copy, args=(server, self.request))
                back.start()
                self.copy(self.request, server, number)
                back.join()

        def copy(
            self, source: socket.socket, target: socket.socket, number: int | None = None
        ) -> None:
            with suppress(OSError):  # one of both sides is closed
                while data := source.recv(1 << 16):
                    if number is not None:
                        sizes[number] += len(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer((address, port), Relay) as relay:
        thread = threading.Thread(target=relay.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield sizes
        finally:
            relay.shutdown()
            thread.join()


def _compute_etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
