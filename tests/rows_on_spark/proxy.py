"""A proxy in front of the store that names the process of each request.

It passes every byte on as it came, also the Host header, so signatures stay valid. Plain HTTP on
this machine only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tests.rows_on_spark.processes import UNKNOWN, Family
from tests.rows_on_spark.requests import Request

_PIECE: Final = 1 << 18
_GRACE: Final = 5.0  # seconds for connections to close
_ENDED: Final = (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError)
Headers = dict[str, str]


class NamingProxy:
    """What one proxy has passed on.

    Args:
        port: of the store, on loopback.
        family: the processes that may ask.
    """

    def __init__(self, port: int, family: Family) -> None:
        self.requests: list[Request] = []
        self.port = 0
        self._upstream, self._family = port, family
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event, end: asyncio.Event) -> None:
        """Serve until `end`, then cut all connections."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await end.wait()
        server.close()
        # The connections of a driver that has ended close by themselves, and their last request is
        # counted. Others, such as those of a server, are cut.
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GRACE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_writer = None
        try:
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._upstream, limit=1 << 20
            )
            while True:
                await self._pass_one(reader, writer, up_reader, up_writer)
        except (*_ENDED, asyncio.CancelledError):
            pass  # one of both ends has closed, or the run is over
        finally:
            self._tasks.discard(task)
            for end in filter(None, (writer, up_writer)):
                end.close()

    async def _pass_one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        raw, (method, path, _), headers = await read_head(reader)
        # A connection can pass from a process to its child, so each request is asked for.
        client = writer.get_extra_info("peername")[1]
        owner = await asyncio.to_thread(self._family.find_owner, client, self.port)
        up_writer.write(raw)
        await up_writer.drain()
        waits = headers.get("expect", "").lower() == "100-continue"
        sent = 0 if waits else await pass_body(reader, up_writer, headers)
        answer, status, back = await read_head(up_reader)
        if waits and status[1] == "100":
            writer.write(answer)
            await writer.drain()
            sent = await pass_body(reader, up_writer, headers)
            answer, status, back = await read_head(up_reader)
        writer.write(answer)
        has_body = method != "HEAD" and status[1] not in ("204", "304")
        got = await pass_body(up_reader, writer, back, until_end=True) if has_body else 0
        await writer.drain()
        size = sent if method in ("PUT", "POST") else got if status[1][0] == "2" else 0
        pid, kind = (owner.pid, owner.kind) if owner else (0, UNKNOWN)
        whole = back.get("content-range", "")
        self.requests.append(Request(pid, kind, method, path, size, whole, time.time()))


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, list[str], Headers]:
    """The bytes, the words of the first line, and the headers of a request or an answer."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *others = raw.decode("latin-1").split("\r\n")
    parts = (line.partition(":") for line in others if line)
    return raw, first.split(" ", 2), {k.strip().lower(): v.strip() for k, _, v in parts}


async def pass_body(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    headers: Headers,
    *,
    until_end: bool = False,
) -> int:
    """Pass one body on and return its bytes."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _pass_chunks(reader, writer)
    total, length = 0, headers.get("content-length")
    if length is None:
        if until_end and headers.get("connection", "").lower() == "close":
            while piece := await reader.read(_PIECE):
                writer.write(piece)
                total += len(piece)
        return total
    while total < int(length):
        piece = await reader.read(min(int(length) - total, _PIECE))
        if not piece:
            raise ConnectionError("the body ended early")
        writer.write(piece)
        await writer.drain()
        total += len(piece)
    await writer.drain()
    return total


async def _pass_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    total = 0
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        writer.write(line)
        if not size:
            break
        writer.write(await reader.readexactly(size + 2))
        await writer.drain()
        total += size
    while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
        writer.write(trailer)
    writer.write(b"\r\n")
    await writer.drain()
    return total


@contextmanager
def run_proxy(port: int, family: Family) -> Iterator[NamingProxy]:
    """A proxy on a thread of its own, until the end of the block."""
    proxy, ready = NamingProxy(port, family), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready, end),))
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
