"""Writes into PostgreSQL, exactly once: an epoch's rows and the ledger are one transaction.

1. Lock the ledger's row, and refuse any position but the slot before this one. So a second
   publisher, or one that was suspended during a restore, changes nothing.
2. Insert the rows: appended, or for window tables with ``windows: upsert`` in place of older
   revisions.
3. Move the ledger; commit.

After a restore the rows of abandoned slots are deleted. A table with upserts has overwritten the
rows that it would need for that, so it is filled again from the Iceberg table at that cut. A new
sink whose first epochs were retired is filled from the Iceberg tables as well.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.engine.arrow_tables import ARROW_TYPES
from tidegate.jobs.spec.operations import PostgresSinkSpec

from .base_follower import SlotFollower, import_client_library, resolve_sink_address
from .errors import (
    LEDGER_MOVED,
    SINK_MISFIT,
    SINK_REFUSED,
    SINK_UNAVAILABLE,
    TARGET_TABLE_TAKEN,
    WAITS_FOR_TABLES,
)
from .lineage_position import CurrentLineage, FollowerPosition, read_published_cut
from .published_tables import flatten_for_csv, read_table

if TYPE_CHECKING:
    import psycopg

    Cursor = psycopg.Cursor[Any]

_LEDGER_TABLE = "tidegate_ledger"
_OWNERS_TABLE = "tidegate_tables"
_CONNECT_OPTIONS = {
    "connect_timeout": 10,
    "application_name": "tidegate",
    # A server that is gone without a word must not keep a task for longer than a minute.
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 4,
    "tcp_user_timeout": 60_000,
    # A publisher that is suspended in a transaction must not lock the ledger's row indefinitely.
    "options": "-c idle_in_transaction_session_timeout=60s -c lock_timeout=20s -c timezone=UTC",
}
# Upserts: first the sessions that a new row replaces (`replaces` holds "start/end"), then older
# revisions of the same window.
_DELETE_REPLACED_SQL = (
    "using (select s.*, jsonb_array_elements_text(s.replaces) as r from tidegate_stage s where"
    " jsonb_typeof(s.replaces) = 'array') s where t.window_start = split_part(r, '/',"
    " 1)::timestamptz and t.window_end = split_part(r, '/', 2)::timestamptz"
)
_DELETE_OLDER_SQL = (
    "using tidegate_stage s where t.window_start = s.window_start and t.window_end = s.window_end"
)
_REFUSALS = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf")


class PostgresSink(SlotFollower):
    """Fills the tables `<namespace>.<table>`, each slot exactly once.

    It opens one connection per transaction and holds none between epochs. The first transaction,
    also of `lag`, creates schema and ledger and claims the tables.
    """

    given: PostgresSinkSpec

    def _set_up(self) -> None:
        self._namespace = self.given.namespace or self.spec.name
        self._ledger = self._qualify_name(_LEDGER_TABLE)
        self._ready = False

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Follow as `SlotFollower` does, then update the copy of the position in the store."""
        applied = super().follow(log, flush=flush)
        position = self._load_position()
        if position is not None:
            self.move_position(None, position)
        return applied

    def _load_position(self) -> FollowerPosition | None:
        with self._transaction_cursor() as cursor:
            self._prepare_schema(cursor)
            return self._read_ledger(cursor)

    def _create_ledger(self, lineage: CurrentLineage) -> FollowerPosition:
        with self._transaction_cursor() as cursor:
            insert = (
                f"insert into {self._ledger} (pipeline, sink, uid, timeline, slot)"
                " values (%s, %s, %s, 0, 0) on conflict do nothing"
            )
            cursor.execute(insert, (self.spec.name, self.name, self.uid))
            return self._read_ledger(cursor) or FollowerPosition(0, 0)

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        self._move_epoch(self._insert_epoch, epoch, before, after)

    def _move_rows(self, move: Callable[..., None], *given: Any) -> bool:
        try:
            return super()._move_rows(move, *given)
        except TidegateError:
            self._ready = False  # the server may have come back without the schema
            raise

    def _insert_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                for rows in self.read_epoch_rows(epoch, table):
                    self._insert_rows(cursor, table, rows)

    def _rewind_sink(
        self, before: FollowerPosition | None, after: FollowerPosition, lineage: CurrentLineage
    ) -> None:
        if any(map(self._is_upserted, self.tables)):
            self._move_rows(self._take_slots_back, before, after)
        else:
            self._take_slots_back(before, after)

    def _take_slots_back(self, before: FollowerPosition | None, after: FollowerPosition) -> None:
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                if not self._read_columns(cursor, table):
                    continue
                if self._is_upserted(table):
                    self._refill_table(cursor, table, after)
                else:
                    delete = f"delete from {self._qualify_name(table)} where _epoch > %s"
                    cursor.execute(delete, (after.upto,))

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, lineage: CurrentLineage
    ) -> FollowerPosition:
        """Start from the newest cut of the Iceberg tables, which hold all retired rows."""
        current = read_published_cut(self.store, self.spec.name)
        if (
            current is None
            or current.timeline != lineage.timeline
            or not before.upto < current.upto <= lineage.slot
        ):
            raise self.make_error(WAITS_FOR_TABLES, slot=slot)
        after = FollowerPosition(lineage.timeline, current.upto)
        self._move_rows(self._refill_tables, before, after)
        return after

    def _refill_tables(self, before: FollowerPosition, after: FollowerPosition) -> None:
        # In one transaction, so that readers see the old tables or the cut and never a part of it.
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                self._refill_table(cursor, table, after)

    def _refill_table(self, cursor: Cursor, table: str, position: FollowerPosition) -> None:
        """Replace a table's rows by those of the Iceberg table as of a position."""
        current = read_published_cut(self.store, self.spec.name)
        if current is None or current.timeline != position.timeline or current.upto < position.upto:
            raise self.make_error(WAITS_FOR_TABLES, slot=position.upto)
        upserted = self._is_upserted(table)
        rows = read_table(self.spec, self.store, table, at=position.upto, current_only=upserted)
        if self._read_columns(cursor, table):
            # Not `truncate`: readers would wait for its lock until the commit.
            cursor.execute(f"delete from {self._qualify_name(table)}")
        if rows.num_rows:
            self._insert_rows(cursor, table, rows)

    def _move_ledger(
        self, cursor: Cursor, before: FollowerPosition | None, after: FollowerPosition
    ) -> None:
        """Move the ledger, in the transaction of the rows."""
        # Locked until the commit: a second publisher waits here, and then finds a moved ledger.
        ledger = self._read_ledger(cursor, lock=True)
        if ledger != before:
            raise self.make_error(LEDGER_MOVED, position=ledger, expected=before)
        update = (
            f"update {self._ledger} set timeline = %s, slot = %s, moved_at = now()"
            " where pipeline = %s and sink = %s"
        )
        cursor.execute(update, (after.timeline, after.upto, self.spec.name, self.name))

    def _read_ledger(self, cursor: Cursor, *, lock: bool = False) -> FollowerPosition | None:
        select = f"select uid, timeline, slot from {self._ledger} where pipeline = %s and sink = %s"
        select += " for update" * lock
        row = cursor.execute(select, (self.spec.name, self.name)).fetchone()
        if row is None:
            return None
        self.refuse_other_owner(row[0])
        return FollowerPosition(row[1], row[2])

    def _prepare_schema(self, cursor: Cursor) -> None:
        """Create the schema, the ledger and the table of owners, and claim the sink's tables.

        Publishers that start together take turns: `if not exists` alone races in PostgreSQL.
        """
        if self._ready:
            return
        cursor.execute(
            "select pg_advisory_xact_lock(hashtext(%s))", (f"tidegate {self._namespace}",)
        )
        if not self._read_columns(cursor, _LEDGER_TABLE):
            cursor.execute(f"create schema if not exists {_quote_name(self._namespace)}")
            cursor.execute(
                f"create table {self._ledger} (pipeline text, sink text, uid text not null,"
                " timeline integer not null, slot bigint not null,"
                " moved_at timestamptz not null default now(), primary key (pipeline, sink))"
            )
        if not self._read_columns(cursor, _OWNERS_TABLE):
            cursor.execute(
                f"create table {self._qualify_name(_OWNERS_TABLE)}"
                " (table_name text primary key, uid text not null, sink text not null)"
            )
        self._read_ledger(cursor)  # another pipeline's ledger is a clearer reason than its tables
        self._claim_tables(cursor)
        self._ready = True

    def _claim_tables(self, cursor: Cursor) -> None:
        """Note this sink as the owner of its tables.

        A rewind and an upsert delete rows of the whole table, whichever sink wrote them. So a table
        may have one owner only, also among the sinks of one pipeline.

        Raises:
            ConfigurationError: another sink owns one of the tables.
        """
        owners = self._qualify_name(_OWNERS_TABLE)
        claim = f"insert into {owners} values (%s, %s, %s) on conflict do nothing"
        cursor.executemany(claim, [(table, self.uid, self.name) for table in self.tables])
        select = (
            f"select table_name, uid, sink from {owners} where table_name = any(%s)"
            " and (uid, sink) <> (%s, %s) order by 1"
        )
        taken = cursor.execute(select, (list(self.tables), self.uid, self.name)).fetchone()
        if taken is not None:
            raise self.make_error(
                TARGET_TABLE_TAKEN,
                table=f"{self._namespace}.{taken[0]}",
                owner=taken[1],
                owner_sink=taken[2],
            )

    def _insert_rows(self, cursor: Cursor, table: str, rows: Any) -> None:
        """Insert rows into their table, which is created or widened to hold them."""
        self._fit_table(cursor, table, rows.schema)
        target = self._qualify_name(table)
        if not self._is_upserted(table):
            self._copy_rows(cursor, target, rows)
            return
        # COPY cannot replace rows, so they go through a table of the transaction.
        cursor.execute(f"create temporary table tidegate_stage (like {target}) on commit drop")
        self._copy_rows(cursor, "tidegate_stage", rows)
        keys = self.spec.windows[table].keys
        same = "".join(f' and t."{key}" is not distinct from s."{key}"' for key in keys)
        for step in (_DELETE_REPLACED_SQL, _DELETE_OLDER_SQL):
            cursor.execute(f"delete from {target} t {step}{same}")
        columns = _quote_names(rows.schema.names)
        cursor.execute(f"insert into {target} ({columns}) select {columns} from tidegate_stage")
        cursor.execute("drop table tidegate_stage")

    def _copy_rows(self, cursor: Cursor, target: str, rows: Any) -> None:
        """Copy rows as CSV made by Arrow: a million rows a second.

        As PostgreSQL expects it, null is empty and unquoted, and texts are quoted.
        """
        # What CSV cannot hold becomes texts that PostgreSQL reads back.
        rows = flatten_for_csv(rows, hex_prefix="\\x")
        types = [
            f.with_type(pa.string()) if pa.types.is_decimal(f.type) else f for f in rows.schema
        ]
        buffer = io.BytesIO()
        options = pyarrow.csv.WriteOptions(include_header=False)
        pyarrow.csv.write_csv(rows.cast(pa.schema(types)), buffer, options)
        columns = _quote_names(rows.schema.names)
        with cursor.copy(f"copy {target} ({columns}) from stdin (format csv)") as copy:
            copy.write(buffer.getbuffer())

    def _fit_table(self, cursor: Cursor, table: str, schema: Any) -> None:
        present = self._read_columns(cursor, table)
        columns = {f.name: f"{_quote_name(f.name)} {_to_postgres_type(f.type)}" for f in schema}
        target = self._qualify_name(table)
        if present:
            for name in columns.keys() - present:
                cursor.execute(f"alter table {target} add column {columns[name]}")
            return
        cursor.execute(f"create table {target} ({', '.join(columns.values())})")
        # Rewinds and upserts look rows up by these columns in every epoch.
        indexed = ["_epoch"]
        if self._is_upserted(table):
            indexed = ["window_start", "window_end", *self.spec.windows[table].keys]
        cursor.execute(f"create index on {target} ({_quote_names(indexed)})")

    def _read_columns(self, cursor: Cursor, table: str) -> set[str]:
        select = (
            "select column_name from information_schema.columns where table_schema = %s and"
            " table_name = %s"
        )
        return {row[0] for row in cursor.execute(select, (self._namespace, table))}

    def _is_upserted(self, table: str) -> bool:
        window = self.spec.windows.get(table)
        return window is not None and self.given.windows == "upsert" and window.revisions != "delta"

    def _qualify_name(self, table: str) -> str:
        return f"{_quote_name(self._namespace)}.{_quote_name(table)}"

    @contextmanager
    def _transaction_cursor(self) -> Iterator[Cursor]:
        """Open a connection for one transaction."""
        psycopg = import_client_library("psycopg", of=f"sinks.{self.name}", extra="postgres")
        try:
            with (
                psycopg.connect(
                    resolve_sink_address(self.name, "url", self.given.url), **_CONNECT_OPTIONS
                ) as connection,
                connection.cursor() as cursor,
            ):
                yield cursor
        except psycopg.Error as error:
            self._ready = False
            raise self._translate_database_error(error) from error

    def _translate_database_error(self, error: psycopg.Error) -> TidegateError:
        import psycopg

        cause = get_first_line(error)
        # PostgreSQL reports refused logins without an error class, only in the text.
        refused = isinstance(error, psycopg.errors.InsufficientPrivilege) or any(
            refusal in cause for refusal in _REFUSALS
        )
        if refused:
            remedy = f"sinks.{self.name}.url, the database or its grants"
            return self.make_error(SINK_REFUSED, cause=cause, remedy=remedy)
        if isinstance(error, psycopg.OperationalError | psycopg.InternalError):
            return self.make_error(SINK_UNAVAILABLE, cause=cause, remedy="bring PostgreSQL back")
        return self.make_error(SINK_MISFIT, cause=cause)


def _quote_names(names: Iterable[str]) -> str:
    """Return names as a list in SQL."""
    return ", ".join(map(_quote_name, names))


def _quote_name(name: str) -> str:
    """Return a name as SQL. Users choose names: quotes in them are doubled."""
    return '"' + name.replace('"', '""') + '"'


def _to_postgres_type(kind: Any) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    return str(ARROW_TYPES.get(str(kind), {}).get("postgres", "jsonb"))
