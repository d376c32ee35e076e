"""PostgreSQL as a follower of the log.

An epoch's rows and the ledger that says so are one transaction.

1. Lock the ledger's row, and refuse any other predecessor than the slot before this one: a second
  publisher, or one that slept through a restore, changes nothing.
2. Rows into the tables: appended, or for window tables with ``windows: upsert`` in the place of
    older revisions.
3. Move the ledger; commit.

After a restore the rows of abandoned slots are deleted. A table that was upserted has overwritten
what it would need for that, and is filled again from the Iceberg table at that cut; so is a new
sink whose first epochs were retired already.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv

from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, PoisonError, TidegateError, TransientError
from tidegate.jobs.sinks.base_follower import SlotFollower, expand_variables, import_client_library
from tidegate.jobs.sinks.lineage_position import (
    CurrentLineage,
    FollowerPosition,
    read_published_cut,
)
from tidegate.jobs.sinks.published_tables import flatten_for_csv, read_table
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.sinks import PostgresSinkSpec

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import SQL, Composed, Identifier

_LEDGER_TABLE = "tidegate_ledger"
_CONNECT_OPTIONS = {
    "connect_timeout": 10,
    "application_name": "tidegate",
    # A publisher that was stopped in the middle must not hold the ledger's row for ever.
    "options": "-c idle_in_transaction_session_timeout=60s -c lock_timeout=20s -c timezone=UTC",
}
_DELETE_REPLACED_SQL = (
    "delete from {} t using (select s.*, jsonb_array_elements_text(s.replaces) as r from {} s where"
    " jsonb_typeof(s.replaces) = 'array') s where t.window_start = split_part(r, '/',"
    " 1)::timestamptz and t.window_end = split_part(r, '/', 2)::timestamptz"
)
_DELETE_OLDER_SQL = (
    "delete from {} t using {} s where t.window_start = s.window_start and t.window_end ="
    " s.window_end"
)
_POSTGRES_TYPES = {
    pa.string(): "text",
    pa.large_string(): "text",
    pa.bool_(): "boolean",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.binary(): "bytea",
    pa.large_binary(): "bytea",
}


class PostgresSink(SlotFollower):
    """Tables `<namespace>.<table>`, each slot exactly once.

    One connection per call: nothing is held between epochs.
    """

    def __init__(
        self, name: str, given: PostgresSinkSpec, spec: PipelineSpec, store: Store, uid: str
    ) -> None:
        super().__init__(name, spec, store, uid, given.tables)
        self._given = given
        self._namespace = given.namespace or spec.name
        self._ready = False

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """As promised by `SlotFollower`; afterwards the copy of the mark is brought up to date."""
        applied = super().follow(log, flush=flush)
        mark = self._load_position()
        if mark is not None:
            self.move_position(None, mark)
        return applied

    def _load_position(self) -> FollowerPosition | None:
        with self._transaction_cursor() as cursor:
            self._prepare_schema(cursor)
            return self._read_ledger(cursor)

    def _create_ledger(self, log: SlotLog, way: CurrentLineage) -> FollowerPosition:
        with self._transaction_cursor() as cursor:
            put = (
                "insert into {} (pipeline, sink, uid, timeline, slot) values (%s, %s, %s, 0, 0) on"
                " conflict do nothing"
            )
            cursor.execute(
                self._compose_sql(put, self._qualify_name(_LEDGER_TABLE)),
                (self.spec.name, self.name, self.uid),
            )
            return self._read_ledger(cursor) or FollowerPosition(0, 0)

    def _apply_epoch(
        self, epoch: Manifest, before: FollowerPosition, after: FollowerPosition
    ) -> None:
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                for rows in self.read_epoch_rows(epoch, table):
                    self._insert_rows(cursor, table, rows)

    def _rewind_sink(
        self, before: FollowerPosition, after: FollowerPosition, way: CurrentLineage
    ) -> None:
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                if not self._read_columns(cursor, table):
                    continue
                if self._is_upserted(table):
                    self._refill_table(cursor, table, after)
                else:
                    cursor.execute(
                        self._compose_sql(
                            "delete from {} where _epoch > %s", self._qualify_name(table)
                        ),
                        (after.upto,),
                    )

    def _handle_retired_epoch(
        self, slot: int, before: FollowerPosition, way: CurrentLineage
    ) -> FollowerPosition:
        """Whatever was retired stands in the Iceberg tables: start from their newest cut."""
        current = read_published_cut(self.store, self.spec.name)
        if (
            current is None
            or current.timeline != way.timeline
            or not before.upto < current.upto <= way.slot
        ):
            raise self._not_published_error(slot)
        after = FollowerPosition(way.timeline, current.upto)
        with self._transaction_cursor() as cursor:
            self._move_ledger(cursor, before, after)
            for table in self.tables:
                self._refill_table(cursor, table, after)
        return after

    def _refill_table(
        self, cursor: psycopg.Cursor[Any], table: str, mark: FollowerPosition
    ) -> None:
        """Fill a table anew from the Iceberg table as of a mark."""
        current = read_published_cut(self.store, self.spec.name)
        if current is None or current.timeline != mark.timeline or current.upto < mark.upto:
            raise self._not_published_error(mark.upto)
        rows = read_table(
            self.spec, self.store, table, at=mark.upto, current_only=self._is_upserted(table)
        )
        if self._read_columns(cursor, table):
            cursor.execute(self._compose_sql("delete from {}", self._qualify_name(table)))
        if rows.num_rows:
            self._insert_rows(cursor, table, rows)

    def _not_published_error(self, slot: int) -> TransientError:
        return TransientError(
            f"sink {self.name} of {self.spec.name} waits for the Iceberg tables, which do not show"
            f" slot {slot} yet",
            code="sink.waits_for_tables",
            pipeline=self.spec.name,
            retry_after=1.0,
        )

    def _move_ledger(
        self, cursor: psycopg.Cursor[Any], before: FollowerPosition, after: FollowerPosition
    ) -> None:
        """Move the ledger, in the transaction of the rows."""
        found = self._read_ledger(cursor, lock=True)
        if found != before:
            raise self.ledger_moved_error(found or FollowerPosition(0, 0), before)
        to = (
            "update {} set timeline = %s, slot = %s, moved_at = now() where pipeline = %s and sink"
            " = %s"
        )
        cursor.execute(
            self._compose_sql(to, self._qualify_name(_LEDGER_TABLE)),
            (after.timeline, after.upto, self.spec.name, self.name),
        )

    def _read_ledger(
        self, cursor: psycopg.Cursor[Any], *, lock: bool = False
    ) -> FollowerPosition | None:
        ask = f"select uid, timeline, slot from {{}} where pipeline = %s and sink = %s{' for update' if lock else ''}"  # noqa: S608
        found = cursor.execute(
            self._compose_sql(ask, self._qualify_name(_LEDGER_TABLE)), (self.spec.name, self.name)
        ).fetchone()
        if found is None:
            return None
        self.refuse_other_owner(found[0])
        return FollowerPosition(found[1], found[2])

    def _prepare_schema(self, cursor: psycopg.Cursor[Any]) -> None:
        """Make schema and ledger.

        Two publishers that start together take turns: `if not exists` alone races in PostgreSQL.
        """
        if self._ready:
            return
        cursor.execute(
            "select pg_advisory_xact_lock(hashtext(%s))", (f"tidegate {self._namespace}",)
        )
        if not self._read_columns(cursor, _LEDGER_TABLE):
            from psycopg.sql import Identifier

            cursor.execute(
                self._compose_sql("create schema if not exists {}", Identifier(self._namespace))
            )
            make = (
                "create table {} (pipeline text, sink text, uid text not null, timeline integer not"
                " null, slot bigint not null, moved_at timestamptz not null default now(), primary"
                " key (pipeline, sink))"
            )
            cursor.execute(self._compose_sql(make, self._qualify_name(_LEDGER_TABLE)))
        self._ready = True

    def _insert_rows(self, cursor: psycopg.Cursor[Any], table: str, rows: Any) -> None:
        """Rows into their table, which is made or widened to hold them."""
        self._fit_table(cursor, table, rows.schema)
        if not self._is_upserted(table):
            self._copy_rows(cursor, self._qualify_name(table), rows)
            return
        from psycopg.sql import Identifier

        stage, target = Identifier("tidegate_stage"), self._qualify_name(table)
        cursor.execute(
            self._compose_sql("create temporary table {} (like {}) on commit drop", stage, target)
        )
        self._copy_rows(cursor, stage, rows)
        for step in (_DELETE_REPLACED_SQL, _DELETE_OLDER_SQL):
            cursor.execute(
                self._compose_sql(step + self._same_keys_condition(table), target, stage)
            )
        columns = self._join_identifiers(rows.schema.names)
        cursor.execute(
            self._compose_sql(
                "insert into {} ({}) select {} from {}", target, columns, columns, stage
            )
        )
        cursor.execute(self._compose_sql("drop table {}", stage))

    def _copy_rows(self, cursor: psycopg.Cursor[Any], target: Identifier, rows: Any) -> None:
        """CSV made by Arrow.

        A million rows a second; null is empty and unquoted, texts are quoted, as PostgreSQL has it.
        """
        buffer = io.BytesIO()
        pyarrow.csv.write_csv(
            _to_csv_values(rows), buffer, pyarrow.csv.WriteOptions(include_header=False)
        )
        into = self._compose_sql(
            "copy {} ({}) from stdin (format csv)",
            target,
            self._join_identifiers(rows.schema.names),
        )
        with cursor.copy(into) as copy:
            copy.write(buffer.getbuffer())

    def _fit_table(self, cursor: psycopg.Cursor[Any], table: str, schema: Any) -> None:
        from psycopg.sql import SQL, Identifier

        known = self._read_columns(cursor, table)
        wanted = {field.name: _to_postgres_type(field.type) for field in schema}
        if not known:
            body = SQL(", ").join(
                self._compose_sql("{} " + kind, Identifier(name)) for name, kind in wanted.items()
            )
            cursor.execute(
                self._compose_sql("create table {} ({})", self._qualify_name(table), body)
            )
            cursor.execute(
                self._compose_sql(
                    "create index on {} ({})",
                    self._qualify_name(table),
                    self._join_identifiers(self._index_columns(table)),
                )
            )
            return
        for name in wanted.keys() - known:
            cursor.execute(
                self._compose_sql(
                    "alter table {} add column {} " + wanted[name],
                    self._qualify_name(table),
                    Identifier(name),
                )
            )

    def _read_columns(self, cursor: psycopg.Cursor[Any], table: str) -> set[str]:
        ask = (
            "select column_name from information_schema.columns where table_schema = %s and"
            " table_name = %s"
        )
        return {row[0] for row in cursor.execute(ask, (self._namespace, table))}

    def _is_upserted(self, table: str) -> bool:
        window = self.spec.windows.get(table)
        return (
            window is not None and self._given.windows == "upsert" and window.revisions != "delta"
        )

    def _index_columns(self, table: str) -> list[str]:
        return (
            ["window_start", "window_end", *self.spec.windows[table].keys]
            if self._is_upserted(table)
            else ["_epoch"]
        )

    def _same_keys_condition(self, table: str) -> str:
        return "".join(
            f' and t."{key}" is not distinct from s."{key}"'
            for key in self.spec.windows[table].keys
        )

    def _qualify_name(self, table: str) -> Identifier:
        from psycopg.sql import Identifier

        return Identifier(self._namespace, table)

    @staticmethod
    def _join_identifiers(names: Sequence[str]) -> Composed:
        from psycopg.sql import SQL, Identifier

        return SQL(", ").join(Identifier(name) for name in names)

    @staticmethod
    def _compose_sql(text: str, *parts: SQL | Composed | Identifier) -> Composed:
        """A statement; `text` is written in this module, names of people's tables and columns come quoted, as `parts`."""
        from psycopg.sql import SQL

        return SQL(text).format(*parts)

    def _import_psycopg(self) -> Any:
        return import_client_library(
            "psycopg", of=f"sinks.{self.name}", package="psycopg", extra="postgres"
        )

    @contextmanager
    def _transaction_cursor(self) -> Iterator[psycopg.Cursor[Any]]:
        """One transaction."""
        psycopg = self._import_psycopg()
        try:
            with (
                psycopg.connect(
                    expand_variables(self._given.url, self.name), **_CONNECT_OPTIONS
                ) as connection,
                connection.cursor() as cursor,
            ):
                yield cursor
        except psycopg.Error as error:
            self._ready = False
            raise self._translate_database_error(error) from error

    def _translate_database_error(self, error: psycopg.Error) -> TidegateError:
        psycopg = self._import_psycopg()
        text = str(error).strip().partition("\n")[0]
        what = f"sink {self.name} of {self.spec.name}: {text}"
        refused = isinstance(error, psycopg.errors.InsufficientPrivilege) or any(
            sign in text
            for sign in (
                "authentication failed",
                "no password supplied",
                "does not exist",
                "no pg_hba.conf",
            )
        )
        if refused:
            return ConfigurationError(
                what,
                code="sink.refused",
                pipeline=self.spec.name,
                kept="everything sealed",
                advice=f"mend sinks.{self.name}.url, the database or its grants",
            )
        if isinstance(error, psycopg.OperationalError | psycopg.InternalError):
            return TransientError(
                what,
                code="sink.unavailable",
                pipeline=self.spec.name,
                kept="everything sealed; the sink catches up later",
                advice="bring PostgreSQL back; tidegate tries again by itself",
                retry_after=1.0,
            )
        return PoisonError(
            what,
            code="sink.misfit",
            pipeline=self.spec.name,
            kept="the sealed epochs; the sink shows the ones before",
            advice="mend the table in PostgreSQL, or give the sink another namespace",
        )


def _to_postgres_type(kind: Any) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    return _POSTGRES_TYPES.get(kind, "jsonb")


def _to_csv_values(rows: Any) -> Any:
    """Columns that CSV has no form for, as texts that PostgreSQL reads back."""
    rows = flatten_for_csv(rows, hex_prefix="\\x")
    for i, field in enumerate(rows.schema):
        if pa.types.is_decimal(field.type):
            rows = rows.set_column(i, field.name, rows.column(i).cast(pa.string()))
    return rows
