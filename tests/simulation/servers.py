"""The servers behind the sinks: a database, brokers, and a receiver of requests and files.

Honest, and on a bad line.

The sinks are the real ones; replaced is only what sends SQL, a request or a file. A database
applies a transaction whole or not at all, locks the ledger's row, and breaks off who is idle in a
transaction; the answer to a commit may be lost either way. Brokers take a transaction of the
producer that was opened last, and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from tests.simulation.cheap import Rows, rows_of
from tests.simulation.coverage import KINDS, SERVE
from tests.simulation.world import World

from tidegate.checkpoints.canonical_json import canonical_bytes, parse_json
from tidegate.checkpoints.store import Store
from tidegate.errors import TransientError
from tidegate.jobs.sinks.base_follower import SlotFollower
from tidegate.jobs.sinks.files_webhook import FilesSink, WebhookSink
from tidegate.jobs.sinks.kafka_sink import (
    ExactlyOnceKafkaSink,
    KafkaClientError,
    KafkaMessage,
)
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.sinks.postgres_sink import PostgresSink
from tidegate.jobs.spec.pipeline import PipelineSpec

_LOCK_TIMEOUT, _IDLE_TIMEOUT = 20.0, 60.0  # seconds, as the sink asks for them


class _Line:
    """What becomes of a message to a server."""

    def __init__(self, world: World) -> None:
        self.world = world

    def send(self, what: str, act: Callable[[], None]) -> None:
        """Let it act, or not, or later, and answer or not.

        Raises TransientError where the sink would hear nothing.
        """
        self.world.travel()
        kind = self.world.fate("serve", what, KINDS[SERVE])
        if kind == "late":
            self.world.late.append((what, partial(self._silently, act)))
        if kind in ("503", "lost request", "late"):
            raise self.away(kind)
        if kind in ("slow", "sleep", "crash", "clock jump"):
            self.world.endure(kind)
        act()
        if kind in ("crash after", "slow answer"):
            self.world.endure(kind.removesuffix(" after"))
        if kind == "lost answer":
            raise self.away(kind)

    @staticmethod
    def _silently(act: Callable[[], None]) -> None:
        with suppress(TransientError):
            act()

    @staticmethod
    def away(cause: str) -> TransientError:
        """The error of a sink whose server does not answer."""
        return TransientError(f"no answer: {cause}", code="sink.unavailable", retry_after=1.0)


class Database(_Line):
    """Committed rows and the ledger's row. One transaction at a time holds the lock on it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.ledger: tuple[str, int, int] | None = None
        self.owner: Transaction | None = None


class Transaction:
    """Statements of one connection, until it commits.

    READ COMMITTED; changes are seen by others at the end.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._world = database, database.world
        self._changes: list[Callable[[], None]] = []
        self._ledger: tuple[str, int, int] | None = None
        self._touched = self._world.now
        self._answer: tuple[str, int, int] | None = None
        self.over = False

    def execute(self, sql: str, given: tuple[Any, ...] = ()) -> Transaction:
        """The statements that `PostgresSink` sends."""
        self._world.travel()
        self._require_open()
        words = sql.split()
        match words[0]:
            case "insert":
                self._lock()
                if self._ledger is None:
                    self._ledger = (given[2], 0, 0)
            case "select":
                if sql.endswith("for update"):
                    self._lock()
                self._answer = self._ledger or self._database.ledger
            case "update":
                self._ledger = (self._answer[0] if self._answer else "", given[0], given[1])
            case "delete":
                keep = (lambda row: row["_epoch"] <= given[0]) if given else (lambda row: False)
                self._change(words[2], lambda rows: [row for row in rows if keep(row)])
            case _:
                raise AssertionError(f"a new statement: {sql}")
        return self

    def fetchone(self) -> tuple[str, int, int] | None:
        """Of the last select."""
        return self._answer

    def insert(
        self, table: str, rows: Rows, replaces: Callable[[dict[str, Any]], object] | None
    ) -> None:
        """Rows into a table; with `replaces` a row takes the place of the one with the same key."""
        self._world.travel()
        self._require_open()
        own = [dict(row) for row in rows]
        keys = {replaces(row) for row in own} if replaces else set()
        self._change(
            table,
            lambda there: [
                *(r for r in there if replaces is None or replaces(r) not in keys),
                *own,
            ],
        )

    def commit(self) -> None:
        """All of it, unless the server broke it off."""
        self._require_open()
        for change in self._changes:
            change()
        if self._ledger is not None:
            self._database.ledger = self._ledger
            self._world.mark("database", self._ledger)
            self._world.judge.take("apply", "postgres", self._ledger[1:])
        self.end()

    def end(self) -> None:
        """Whatever is not committed by now never happened."""
        self.over = True
        if self._database.owner is self:
            self._database.owner = None

    def _change(
        self, table: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
    ) -> None:
        tables = self._database.tables
        self._changes.append(lambda: tables.update({table: change(tables.get(table, []))}))

    def _lock(self) -> None:
        until = self._world.now + _LOCK_TIMEOUT
        while (owner := self._database.owner) not in (None, self):
            if owner is not None and self._world.now - owner._touched > _IDLE_TIMEOUT:
                owner.end()
            elif self._world.now > until:
                raise self._database.away("lock timeout")
            else:
                self._world.pause(self._world.now + 2.0)
        self._database.owner = self
        self._ledger = self._database.ledger

    def _require_open(self) -> None:
        if self.over or self._world.now - self._touched > _IDLE_TIMEOUT:
            self.end()
            raise self._database.away("terminating connection due to idle-in-transaction timeout")
        self._touched = self._world.now


class SimPostgres(PostgresSink):
    """The real sink; its statements go to the model of a database."""

    database: Database

    @contextmanager
    def _transaction_cursor(self) -> Iterator[Any]:
        transaction = Transaction(self.database)
        try:
            yield transaction
            self.database.send("commit", transaction.commit)
        except TransientError as error:
            if "late" not in error.message:
                transaction.end()
            raise
        except BaseException:
            transaction.end()
            raise

    def _prepare_schema(self, cursor: Any) -> None:
        """The schema is there."""

    def _read_columns(self, cursor: Any, table: str) -> set[str]:
        return {"any"} if table in self.database.tables else set()

    def _insert_rows(self, cursor: Any, table: str, rows: Any) -> None:
        cursor.insert(table, rows, _window_of if self._is_upserted(table) else None)

    def _qualify_name(self, table: str) -> Any:
        return table


class Receiver(_Line):
    """What arrived, in order: requests by their id, files by their name."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.url = "receiver"
        self.arrived: list[tuple[str, bytes]] = []

    def put(self, key: str, data: bytes) -> None:
        """Take a file."""
        self.send(key, lambda: self.arrived.append((key, data)))


class SimWebhook(WebhookSink):
    """The real sink; its requests go to the model of a receiver."""

    receiver: Receiver

    def _post_json(self, body: dict[str, Any], identity: str) -> None:
        self.receiver.put(identity, canonical_bytes(body))


class SimFiles(FilesSink):
    """The real sink; its files go to the model of a receiver."""

    def _set_up(self) -> None:
        """Open nothing: the receiver is set afterwards."""


class Brokers(_Line):
    """Committed messages in order, and the offset of the sink's group: its metadata is the ledger."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.messages: list[KafkaMessage] = []
        self.ledger: tuple[int, int] | None = None
        self._text: str | None = None
        self._opened = 0  # producers so far

    def open_producer(self) -> int:
        """Fence every older producer; return the number of the new one."""
        self._opened += 1
        return self._opened

    def read_ledger(self) -> str | None:
        """The metadata of the group's offset."""
        return self._text

    def commit(self, producer: int, messages: list[KafkaMessage], ledger: str) -> None:
        """All of a transaction, unless its producer is not the newest."""
        if producer != self._opened:
            raise TransientError("there is a newer producer", code="_FENCED")
        position = parse_json(ledger.encode())
        self.messages += messages
        self.ledger, self._text = (position["timeline"], position["upto"]), ledger
        self.world.mark("brokers", self.ledger)
        self.world.judge.take("apply", "kafka", self.ledger)


class SimProducer:
    """A transactional producer of one publisher, in place of `ConfluentProducer`."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers, self._number = brokers, 0

    def acquire_ledger(self) -> str | None:
        """Open a producer, then read."""

        def open_producer() -> None:
            self._number = self._brokers.open_producer()

        self._send("init", open_producer)
        read: list[str | None] = []
        self._send("read the group", lambda: read.append(self._brokers.read_ledger()))
        return read[-1]

    def commit_messages(self, messages: Iterable[KafkaMessage], ledger: str, number: int) -> None:
        """One transaction."""
        commit = partial(self._brokers.commit, self._number, [*messages], ledger)
        self._send("commit", commit)

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _send(self, what: str, act: Callable[[], None]) -> None:
        try:
            self._brokers.send(what, act)
        except TransientError as error:
            raise KafkaClientError(error.code, error.message) from error


class SimKafka(ExactlyOnceKafkaSink):
    """The real sink; its transactions go to the model of brokers."""

    def connect(self, brokers: Brokers) -> None:
        """Use these brokers."""
        self._client = SimProducer(brokers)


def server_of(spec: PipelineSpec, world: World) -> Any:
    """The server that the spec's sink writes to; None without a sink."""
    servers = {"postgres": Database, "kafka": Brokers, "webhook": Receiver, "files": Receiver}
    return next((servers[given.kind](world) for given in spec.sinks.values()), None)


def sink_of(spec: PipelineSpec, store: Store, uid: str, server: Any) -> Iterator[SlotFollower]:
    """The spec's sink on its server."""
    for name, given in spec.sinks.items():
        sink: Any
        match given.kind:
            case "postgres":
                sink = SimPostgres(name, given, spec, store, uid)
                sink.database = server
            case "kafka":
                sink = SimKafka(name, given, spec, store, uid)
                sink.connect(server)
            case "webhook":
                sink = SimWebhook(name, given, spec, store, uid)
                sink.receiver = server
            case "files":
                sink = SimFiles(name, given, spec, store, uid)
                sink._target = server
        yield sink


def read_model_table(
    spec: PipelineSpec, store: Any, table: str, *, at: int, current_only: bool
) -> Rows:
    """`tables.read_table` on the model of the catalog."""
    current = read_published_cut(store, spec.name)
    location = current.tables.get(table) if current else None
    if location is None:
        return Rows()
    main = store.world.catalog.versions[location].main
    found = [
        row
        for key in (main.files if main else ())
        for row in rows_of(store.get(key).data)
        if row["_epoch"] <= at
    ]
    if not current_only:
        return Rows(found)
    newest: dict[object, dict[str, Any]] = {}
    for row in sorted(found, key=lambda row: row["revision"]):
        newest[_window_of(row)] = row
    return Rows(newest.values())


def _window_of(row: dict[str, Any]) -> object:
    return row["window_start"], row["window_end"]
