"""PostgreSQL as a follower, on a real server.

Each slot once, restores followed, races and outages survived.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pyarrow as pa
import pytest

from tests.servers.postgres import PostgresServer, running
from tests.sinks.conftest import UID, World, make_spec
from tests.sinks.elsewhere import run_elsewhere
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError, FencedError, PoisonError, TransientError
from tidegate.jobs.engine.arrow_tables import TIMESTAMP_UTC
from tidegate.jobs.sinks.base_follower import read_stored_position
from tidegate.jobs.sinks.errors import LedgerMovedError
from tidegate.jobs.sinks.lineage_position import FollowerPosition
from tidegate.jobs.sinks.output_tables import write_parquet_once
from tidegate.jobs.sinks.postgres_sink import PostgresSink
from tidegate.jobs.sinks.published_tables import find_published_slot, have_followers_rewound
from tidegate.jobs.spec.operations import PostgresSinkSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with running(tmp_path_factory.mktemp) as found:
        yield found


@pytest.fixture
def pg(server: PostgresServer) -> PostgresServer:
    """The server without what other tests left."""
    server.run("drop schema if exists p cascade")
    return server


@pytest.fixture
def world(tmp_path: Path) -> World:
    given = {"warehouse": {"kind": "postgres", "url": "${TIDEGATE_TEST_URL}", "windows": "upsert"}}
    return World(LocalStore(tmp_path / "store"), tmp_path / "work", make_spec(sinks=given))


@pytest.fixture(autouse=True)
def _url(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TEST_URL", server.url)


def sink_of(world: World, uid: str = UID) -> PostgresSink:
    """A publisher."""
    given = world.spec.sinks["warehouse"]
    assert isinstance(given, PostgresSinkSpec)
    run = partial(run_elsewhere, world.store)
    return PostgresSink("warehouse", given, world.spec, world.store, uid, run)


def events(pg: PostgresServer) -> list[tuple[int, int]]:
    """(timeline, epoch) of every row."""
    return [(t, e) for t, e in pg.rows("select _timeline, _epoch from p.events order by 1, 2")]


def ledger(pg: PostgresServer) -> tuple[Any, ...]:
    """The position of the sink."""
    return pg.rows("select timeline, slot from p.tidegate_ledger")[0]


def results(world: World, *rows: tuple[int, int, int, list[str]]) -> None:
    """Seal an epoch with results of `hourly`: (hour, revision, n, replaced)."""
    head = world.log.head()
    with patch.object(
        world, "_file", side_effect=lambda table, me, _: _hourly(world, table, me, rows)
    ):
        world.seal(1, ("hourly",))
    assert world.log.head().slot == head.slot + 1


def _hourly(
    world: World, table: str, me: CheckpointId, rows: tuple[tuple[int, int, int, list[str]], ...]
) -> Any:
    hour = 3_600_000_000
    content = {
        "window_start": pa.array([h * hour for h, _, _, _ in rows], pa.int64()).cast(TIMESTAMP_UTC),
        "window_end": (
            pa.array([(h + 1) * hour for h, _, _, _ in rows], pa.int64()).cast(TIMESTAMP_UTC)
        ),
        "revision": pa.array([r for _, r, _, _ in rows], pa.int32()),
        "replaces": pa.array([names for _, _, _, names in rows], pa.list_(pa.string())),
        "n": pa.array([n for _, _, n, _ in rows], pa.int64()),
        "_timeline": pa.array([me.timeline] * len(rows), pa.int32()),
        "_epoch": pa.array([me.slot] * len(rows), pa.int64()),
    }
    return write_parquet_once(
        world.store, f"{world.layout.table_prefix(table, me)}part-0.parquet", pa.table(content)
    )


def hourly(pg: PostgresServer) -> list[tuple[int, int, int]]:
    """(hour, revision, n) of every result."""
    rows = pg.rows(
        "select extract(epoch from window_start)::bigint / 3600, revision, n from p.hourly order by"
        " 1, 2"
    )
    return [(int(h), r, n) for h, r, n in rows]


def test_every_slot_once(world: World, pg: PostgresServer) -> None:
    """Rows and ledger move together.

    Following again applies nothing; a sink that was away catches up.
    """
    sink = sink_of(world)
    assert sink.follow(world.log) == 0
    world.seal(3)
    assert sink.lag(world.log) == 3
    assert sink.follow(world.log) == 3
    assert sink.follow(world.log) == 0
    world.seal(20)
    assert sink_of(world).follow(world.log) == 20
    assert events(pg) == world.wanted("events")
    assert pg.rows("select count(*) from p.checkpoints") == [(23,)]
    assert ledger(pg) == (0, 23)
    mark = read_stored_position(world.store, "p", "warehouse")
    assert mark is not None
    assert mark.position == FollowerPosition(0, 23)


def test_an_epoch_is_all_or_nothing(world: World, pg: PostgresServer) -> None:
    """A failure after some tables leaves neither rows nor a moved ledger.

    The next call applies the slot.
    """
    world.seal(2, ("events", "late"))
    sink = sink_of(world)
    real, calls = PostgresSink._copy_rows, []

    def failing(self: PostgresSink, cursor: Any, target: Any, rows: Any) -> None:
        real(self, cursor, target, rows)
        calls.append(1)
        if len(calls) == 4:
            raise psycopg.OperationalError("the connection is lost")

    with (
        patch.object(PostgresSink, "_copy_rows", failing),
        pytest.raises(TransientError, match="connection is lost"),
    ):
        sink.follow(world.log)
    assert ledger(pg) == (0, 1)
    assert {e for _, e in events(pg)} == {1}
    assert sink.follow(world.log) == 1
    assert events(pg) == world.wanted("events")


def test_a_restore_is_followed(world: World, pg: PostgresServer) -> None:
    """Rows of abandoned slots go, the ledger is on the new timeline, and a restore of a restore
    comes back.
    """
    sink = sink_of(world)
    third = world.seal(3)
    world.seal(2)
    sink.follow(world.log)
    world.fork(third.id)
    assert not have_followers_rewound(world.spec, world.log)
    world.seal(1)
    assert sink.follow(world.log) == 1
    assert events(pg) == world.wanted("events")
    assert ledger(pg) == (1, 4)
    world.fork(None)
    sink.follow(world.log)
    assert (events(pg), ledger(pg)) == ([], (2, 0))


def test_a_publisher_that_slept_through_a_restore_changes_nothing(
    world: World, pg: PostgresServer
) -> None:
    """Its slot's predecessor is not what the ledger says any more."""
    world.seal(1)
    first = world.log.head().checkpoint
    sink_of(world).follow(world.log)
    slept = world.seal(1)
    world.fork(first)
    sink_of(world).follow(world.log)
    with pytest.raises(LedgerMovedError):
        sink_of(world)._apply_epoch(slept, FollowerPosition(0, 1), FollowerPosition(0, 2))
    assert events(pg) == world.wanted("events")


def test_racing_publishers_apply_each_slot_once(world: World, pg: PostgresServer) -> None:
    """Four at once, from the first statement on: the ledger's row lets one through at a time."""
    world.seal(12)
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            sink_of(world).follow(SlotLog(world.store, "p"))
        except TransientError:
            pass  # lost twenty times in a row: allowed, nothing was doubled
        except BaseException as error:  # looked at below
            errors.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink_of(world).follow(world.log)
    assert errors == []
    assert events(pg) == world.wanted("events")


def test_without_the_ledger_they_double_rows(world: World, pg: PostgresServer) -> None:
    """The mend taken out.

    A second publisher that judged before the first one committed applies the slot again.
    """
    epoch = world.seal(1)
    sink = sink_of(world)
    sink.follow(world.log)
    with patch.object(PostgresSink, "_move_ledger", lambda *_: None):
        sink_of(world)._apply_epoch(epoch, FollowerPosition(0, 0), FollowerPosition(0, 1))
    assert events(pg) != world.wanted("events")


def test_windows_are_upserted(world: World, pg: PostgresServer) -> None:
    """One row per result.

    A revision takes the place of the older one, a session that of those it replaces.
    """
    sink = sink_of(world)
    results(world, (1, 0, 10, []), (2, 0, 20, []))
    sink.follow(world.log)
    results(world, (1, 1, 11, []), (3, 0, 30, ["1970-01-01T02:00:00Z/1970-01-01T03:00:00Z"]))
    sink.follow(world.log)
    assert hourly(pg) == [(1, 1, 11), (3, 0, 30)]


def test_an_upsert_is_taken_back_by_a_restore(world: World, pg: PostgresServer) -> None:
    """The older revision is back, from the Iceberg table at that cut.

    Until that follows, the sink waits.
    """
    sink, iceberg = sink_of(world), world.sink()
    results(world, (1, 0, 10, []))
    first = world.log.head().checkpoint
    results(world, (1, 1, 11, []), (2, 0, 20, []))
    sink.follow(world.log)
    iceberg.follow(world.log)
    world.fork(first)
    with pytest.raises(TransientError, match="waits for the Iceberg tables"):
        sink.follow(world.log)
    iceberg.follow(world.log)
    sink.follow(world.log)
    assert hourly(pg) == [(1, 0, 10)]
    assert ledger(pg) == (1, 1)


def test_a_new_sink_of_an_old_pipeline_is_filled_from_the_tables(
    world: World, pg: PostgresServer
) -> None:
    """Its first epochs were retired: the Iceberg tables have their rows."""
    world.seal(4)
    world.sink().follow(world.log)
    world.retire(1)
    world.retire(2)
    world.seal(2)
    assert sink_of(world).follow(world.log) == 6
    assert events(pg) == world.wanted_of(4) + [(0, 5)] * 2 + [(0, 6)] * 2


def test_retention_waits_for_it(world: World, pg: PostgresServer) -> None:
    """What the sink has not applied must not be retired, even if the Iceberg tables have it."""
    world.seal(3)
    sink = sink_of(world)
    sink.follow(world.log)
    world.seal(2)
    world.sink().follow(world.log)
    assert find_published_slot(world.spec, world.log) == 3
    sink.follow(world.log)
    assert find_published_slot(world.spec, world.log) == 5


def test_types_survive(tmp_path: Path, pg: PostgresServer) -> None:
    """Texts with quotes and line breaks, empty against null, bytes, decimals, NaN, dates, times to
    the microsecond.
    """
    columns = {
        "t": "timestamp",
        "s": "string",
        "x": "binary",
        "d": "decimal(12, 3)",
        "f": "double",
        "on_day": "date",
        "b": "boolean",
        "i": "int",
    }
    spec = make_spec(columns, sinks={"warehouse": {"kind": "postgres", "url": pg.url}})
    world = World(LocalStore(tmp_path / "typed"), tmp_path / "work", spec)
    values: dict[str, list[Any]] = {
        "t": [1, None],
        "s": ['a "b",\n\\N', ""],
        "x": [b"\x00\xff", None],
        "d": [None, None],
        "f": [float("nan"), 1e-300],
        "on_day": [None, None],
        "b": [True, None],
        "i": [-1, None],
    }
    rows = pa.table(
        {
            "t": pa.array(values["t"], pa.int64()).cast(TIMESTAMP_UTC),
            "s": pa.array([*values["s"][:1], None]),
            "x": pa.array(values["x"], pa.binary()),
            "d": pa.array(["-123.450", None]).cast(pa.decimal128(12, 3)),
            "f": pa.array(values["f"]),
            "on_day": pa.array([20_000, None], pa.int32()).cast(pa.date32()),
            "b": pa.array(values["b"]),
            "i": pa.array(values["i"], pa.int32()),
            "_epoch": pa.array([1, 1], pa.int64()),
        }
    )
    with patch.object(
        world,
        "_file",
        side_effect=lambda t, me, _: write_parquet_once(
            world.store, f"{world.layout.table_prefix(t, me)}x", rows
        ),
    ):
        world.seal(1, ("events",))
    sink_of(world).follow(world.log)
    found = pg.rows(
        "select extract(microseconds from t)::int, s, x, d::text, f::text, on_day::text, b, i from"
        " p.events order by f"
    )
    assert found == [
        (None, None, None, None, "1e-300", None, None, None),
        (1, 'a "b",\n\\N', b"\x00\xff", "-123.450", "NaN", "2024-10-04", True, -1),
    ]


def test_tables_grow_with_the_spec(world: World, pg: PostgresServer) -> None:
    """A column that comes later is added; older rows are null there."""
    world.seal(1)
    sink_of(world).follow(world.log)
    wider = {"t": "timestamp", "carrier": "string", "delay": "double", "gate": "string"}
    world.spec = make_spec(wider, sinks={"warehouse": world.spec.sinks["warehouse"]})
    world.seal(1)
    sink_of(world).follow(world.log)
    assert pg.rows("select count(*), count(gate) from p.events") == [(4, 0)]


def test_what_a_person_has_to_correct_is_reported(
    world: World, pg: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pipeline's ledger, a table that does not fit, a missing database, a missing variable,
    a log that fell behind.
    """
    world.seal(1)
    sink_of(world).follow(world.log)
    with pytest.raises(ConfigurationError, match="another pipeline"):
        sink_of(world, uid="1" * 32).follow(world.log)
    pg.run(
        "alter table p.events drop column delay, add column delay jsonb, alter column carrier type"
        " int using 0"
    )
    world.seal(1, rows=1)
    pg.run("alter table p.events add constraint c check (_epoch < 2)")
    with pytest.raises(PoisonError, match="check constraint"):
        sink_of(world).follow(world.log)
    world.forget_after(0, 0)
    with pytest.raises(FencedError, match="is at slot 1"):
        sink_of(world).follow(world.log)
    monkeypatch.setenv("TIDEGATE_TEST_URL", pg.url.replace("/postgres", "/nowhere"))
    with pytest.raises(ConfigurationError, match="does not exist"):
        sink_of(world).follow(world.log)
    monkeypatch.delenv("TIDEGATE_TEST_URL")
    with pytest.raises(ConfigurationError, match="TIDEGATE_TEST_URL is not set"):
        sink_of(world).follow(world.log)


def test_two_sinks_never_share_a_table(world: World, pg: PostgresServer, tmp_path: Path) -> None:
    """A second sink of the pipeline and a second pipeline are refused before they change a row.

    Both would delete rows of the first one with every rewind. Other tables of the schema are free.
    """
    world.seal(2)
    sink_of(world).follow(world.log)
    before = events(pg)
    other = World(LocalStore(tmp_path / "other"), tmp_path / "work")
    given = {"kind": "postgres", "url": "${TIDEGATE_TEST_URL}", "namespace": "p"}
    other.spec = make_spec(sinks={"second": given})
    other.seal(1)
    for uid in (UID, "1" * 32):
        own = PostgresSinkSpec.model_validate(given)
        second = PostgresSink("second", own, other.spec, other.store, uid)
        with pytest.raises(ConfigurationError, match=r"p\.\w+: sink warehouse") as refused:
            second.follow(other.log)
        assert refused.value.code == "sink.table_taken"
    assert events(pg) == before
    assert pg.rows("select sink from p.tidegate_ledger") == [("warehouse",)]
    narrow = PostgresSinkSpec.model_validate(given | {"tables": ["edges"]})
    PostgresSink("third", narrow, other.spec, other.store, UID).follow(other.log)


def test_an_outage_is_transient_and_nothing_is_lost(
    world: World, pg: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle and started again: the sink goes on where it was."""
    world.seal(2)
    sink_of(world).follow(world.log)
    world.seal(1)
    pg.stop(hard=True)
    try:
        with pytest.raises(TransientError, match="warehouse"):
            sink_of(world).follow(world.log)
    finally:
        pg.start()
    monkeypatch.setenv("TIDEGATE_TEST_URL", pg.url)
    assert sink_of(world).follow(world.log) == 1
    assert events(pg) == world.wanted("events")
