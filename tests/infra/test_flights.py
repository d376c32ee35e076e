"""The feed holds the facts of the data, arrives in order, and may be stopped at any moment."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from tests.servers.memory_store import MemoryBucket, MemoryStore
from typer.testing import CliRunner, Result

from tidegate.checkpoints.errors import OUTCOME_UNKNOWN, STORE_UNAVAILABLE
from tidegate.errors import ConfigurationError
from tidegate.infra import flights as module
from tidegate.infra.flights import AIRPORTS, SCHEMA, FlightsFeed, HourObject, feed_flights, main

NEW_YORK = ZoneInfo("America/New_York")


@cache
def week() -> list[HourObject]:
    """The objects of the week of 9 January."""
    return list(FlightsFeed().objects())


def rows(airport: str) -> list[tuple[HourObject, dict[str, Any]]]:
    """An airport's rows in order of arrival."""
    return [
        (item, row) for item in week() if item.airport == airport for row in item.table.to_pylist()
    ]


def test_the_year_is_complete() -> None:
    """336,776 flights were planned and 328,521 left: the known size of the data."""
    counts = FlightsFeed("2013-01-01", 365).counts()
    assert sum(counts.rows.values()) == 328_521
    assert sum(counts.rows.values()) + counts.cancelled == 336_776
    assert counts.barriers == dict.fromkeys(AIRPORTS, 365)


def test_the_week_agrees_with_the_file_read_by_hand() -> None:
    """Airport, flight and scheduled minute of every row equal those of the CSV file, local time
    turned to UTC by hand.
    """
    expected: Counter[tuple[str, str, int, datetime]] = Counter()
    with zipfile.ZipFile(module._find_archive()) as archive, archive.open("flights.csv") as raw:
        for line in islice(
            csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8")), 30_000
        ):  # January and more
            day, hour, minute = (int(line[part]) for part in ("day", "hour", "minute"))
            if line["month"] == "1" and 6 <= day < 13 and line["dep_time"] != "NA":
                local = datetime(2013, 1, day, hour, minute, tzinfo=NEW_YORK)
                expected[
                    line["origin"], line["carrier"], int(line["flight"]), local.astimezone(UTC)
                ] += 1
    found = Counter(
        (row["origin"], row["carrier"], row["flight"], row["event_time"])
        for airport in AIRPORTS
        for _, row in rows(airport)
        if row["kind"] == "data"
    )
    assert found == expected


def test_objects_are_keyed_and_ordered_by_hour_of_arrival() -> None:
    """The order of keys is the order of arrival, every row is in the object of its hour, and no
    object is empty.
    """
    for airport in AIRPORTS:
        keys = [item.key for item in week() if item.airport == airport]
        assert keys == sorted(set(keys))
    for item in week():
        assert item.key == f"inbox/{item.airport}/{item.hour:%Y%m%dT%H}.parquet"
        assert item.table.schema == SCHEMA
        assert item.table.num_rows > 0
    for airport in AIRPORTS:
        for item, row in rows(airport):
            if row["kind"] == "data":
                arrival = row["event_time"] + timedelta(minutes=row["dep_delay"])
                assert item.hour <= arrival < item.hour + timedelta(hours=1)


@pytest.mark.parametrize("airport", AIRPORTS)
def test_a_barrier_closes_each_service_day(airport: str) -> None:
    """After `day_close` of a day no row of that day comes, and the row before it is the day's last
    departure.
    """
    closed: list[int] = []
    for _, row in rows(airport):
        if row["kind"] == "day_close":
            assert row["barrier_type"] == "day_close"
            assert row["carrier"] is None
            closed.append(row["barrier_id"])
        else:
            assert int(f"{row['event_time'].astimezone(NEW_YORK):%Y%m%d}") not in closed
    assert closed == [20130106 + day for day in range(7)]


def test_next_day_rows_precede_the_barrier_of_a_late_airport() -> None:
    """The flight that left on 10 January, 21.7 hours late, holds JFK's 9 January open while the
    next day departs.
    """
    before = []
    for _, row in rows("JFK"):
        if row["barrier_id"] == 20130109:
            break
        before.append(row)
    last = before[-1]
    assert (last["carrier"], last["flight"], last["dep_delay"]) == ("HA", 51, 1301)
    next_day = [
        row for row in before if row["event_time"].astimezone(NEW_YORK).date() == date(2013, 1, 10)
    ]
    assert len(next_day) > 0


class FakeTime:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_one_simulated_hour_takes_the_pace() -> None:
    """From the first to the last hour pass as many paces as hours, nights included."""
    time, store = FakeTime(), MemoryStore(MemoryBucket())
    one_day = FlightsFeed("2013-01-06", 1)
    hours = [item.hour for item in one_day.objects()]
    feed_flights(
        one_day, store, pace=2.0, progress=lambda _: None, clock=lambda: time.now, sleep=time.sleep
    )
    assert time.now - 100.0 == pytest.approx(2.0 * ((hours[-1] - hours[0]) / timedelta(hours=1)))


def test_goes_on_where_it_stopped() -> None:
    """A second feed skips what is there without waiting, and the bucket ends the same."""
    time, store = FakeTime(), MemoryStore(MemoryBucket())
    one_day = FlightsFeed("2013-01-06", 1)
    everything = [item.key for item in one_day.objects()]

    class StoppedError(Exception):
        pass

    def give_up(seconds: float) -> None:
        time.sleep(seconds)
        if time.now > 110:
            raise StoppedError

    with pytest.raises(StoppedError):
        feed_flights(one_day, store, progress=lambda _: None, clock=lambda: time.now, sleep=give_up)
    already = len(list(store.list_objects("inbox/")))
    assert 0 < already < len(everything)
    resumed_at = time.now
    sent = feed_flights(
        one_day, store, progress=lambda _: None, clock=lambda: time.now, sleep=time.sleep
    )
    assert sent == len(everything) - already
    assert sorted(entry.key for entry in store.list_objects("inbox/")) == sorted(everything)
    assert time.now - resumed_at < 24


def test_waits_for_a_store_that_is_away() -> None:
    """An unreachable store and a lost answer delay the feed; they lose and double nothing."""
    time, lines = FakeTime(), list[str]()

    class Shaky(MemoryStore):
        calls = 0

        def create(self, key: str, data: bytes) -> str:
            self.calls += 1
            if self.calls == 3:
                raise STORE_UNAVAILABLE(uri=key, cause="refused")
            etag = super().create(key, data)
            if self.calls == 5:
                raise OUTCOME_UNKNOWN(uri=key, cause="time-out")
            return etag

    store = Shaky(MemoryBucket())
    one_day = FlightsFeed("2013-01-06", 1)
    feed_flights(
        one_day, store, pace=0.0, progress=lines.append, clock=lambda: time.now, sleep=time.sleep
    )
    written = {
        entry.key: pa.BufferReader(store.get(entry.key).data)
        for entry in store.list_objects("inbox/")
    }
    assert sum(pq.read_table(data).num_rows for data in written.values()) == sum(
        i.table.num_rows for i in one_day.objects()
    )
    assert sum("waiting for the store" in line for line in lines) == 2


def _run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def test_days_outside_the_year_are_refused() -> None:
    """A start without flights is a configuration error that names the year that has some."""
    with pytest.raises(ConfigurationError, match="choose days of the year 2013"):
        FlightsFeed("2014-01-01").counts()
    asked = _run("--describe", "--start", "2014-01-01")
    assert (asked.exit_code, "choose days" in asked.stderr) == (2, True)
    assert _run().exit_code == 2
    assert "--store" in _run().stderr  # one of the two is needed


def test_the_description_counts_rows_objects_and_barriers() -> None:
    """One line per airport, their sums, and the flights that never left."""
    lines = _run("--describe", "--days", "1").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [*AIRPORTS, "together"]
    counts = FlightsFeed(days=1).counts()
    assert int(lines[4].split()[1].replace(",", "")) == sum(counts.rows.values())
    assert lines[5].startswith(f"{counts.cancelled} cancelled")


def test_command_line_writes_into_a_folder(tmp_path: Path) -> None:
    """`--store FOLDER --pace 0` writes the whole feed at once and says how far it is."""
    fed = _run("--store", str(tmp_path / "bucket"), "--days", "1", "--pace", "0")
    assert fed.exit_code == 0
    assert len(list((tmp_path / "bucket" / "inbox").rglob("*.parquet"))) == len(
        list(FlightsFeed(days=1).objects())
    )
    assert "everything is fed" in fed.stdout
