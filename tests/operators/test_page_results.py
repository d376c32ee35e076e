"""What the page shows of tables and rows, read by the process that stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.cli.shop import OBJECTS, SPEC, Shop
from tests.operators.pages import FakeAirflowQueries, app_of, served

from tidegate.checkpoints.checkpoint_specs import write_spec
from tidegate.checkpoints.local_store import LocalStore
from tidegate.errors import TransientError
from tidegate.jobs.cli.page_results import PipelineResults
from tidegate.jobs.spec.loader import parse_spec
from tidegate.operators import child_processes
from tidegate.operators.child_processes import ResultsProcess
from tidegate.operators.store_access import StoreAccess


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Late rows, a dead letter, rows that wait, window results."""
    folder = tmp_path_factory.mktemp("shop")
    found = Shop(LocalStore(folder / "store"), parse_spec(SPEC), folder)
    write_spec(found.store, found.spec)
    for number, rows in enumerate(OBJECTS):
        found.put(number, rows)
    found.run()
    return found


@pytest.fixture(scope="module")
def base(shop: Shop) -> Iterator[str]:
    """The page's routes for the shop, with a real process behind them."""
    with served(app_of(FakeAirflowQueries(["shop"], shop.store))) as url:
        yield f"{url}/api/streams/shop.stream/results"


def _get(base: str, what: str, **asked: str) -> Any:
    """As the page asks: again while the process is starting."""
    while True:
        try:
            with urllib.request.urlopen(f"{base}/{what}?{urlencode(asked)}") as answer:
                data = answer.read()
            return data.decode() if what == "export" else json.loads(data)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise


def test_tables_are_listed_with_rows_and_address(base: str, shop: Shop) -> None:
    """Each count is the table's, each address can be opened."""
    tables = {table["table"]: table for table in _get(base, "tables")["tables"]}
    assert set(tables) == set(shop.spec.table_names)
    for name, table in tables.items():
        assert table["rows"] == len(shop.table(name)), name
        assert Path(table["address"]).is_file() if table["rows"] else True, name


def test_late_rows_are_filtered_by_reason_and_downloaded(base: str, shop: Shop) -> None:
    """The sample, its choices and the CSV show the same rows as the table."""
    late = shop.table("late")
    found = _get(base, "sample", table="late", output="hourly")
    wanted = [row["price"] for row in late if row["output"] == "hourly"]
    assert sorted(row["price"] for row in found["rows"]) == sorted(wanted)
    assert dict(found["choices"]["output"]) == {
        output: sum(row["output"] == output for row in late) for output in ("events", "hourly")
    }
    lines = _get(base, "export", table="late", output="hourly").splitlines()
    assert (len(lines), '"reason"' in lines[0]) == (1 + len(wanted), True)


def test_what_if_shows_both_courses_and_the_present_options(base: str, shop: Shop) -> None:
    """A longer lag makes fewer rows late, within the bounds; a wrong option is refused by name."""
    plain, longer = _get(base, "whatif"), _get(base, "whatif", **{"lag.web": "3h", "idle": "never"})
    assert plain["present"]["sources"]["web"] == {"lag": 0, "idle": 60_000_000}
    assert (plain["reproduced"], plain["epochs"]) == (True, len(OBJECTS))
    late = plain["rows_late"]["web"]
    assert late == len({row["_seq"] for row in shop.table("late")})
    least, greatest = plain["other"]["late"]["web"]["rows"]
    assert least <= late <= greatest
    assert longer["other"]["late"]["web"]["rows"] == [0, 0]
    assert longer["other"]["delay_p50_us"] > plain["other"]["delay_p50_us"]
    for wrong in ({"lag.no one": "1h"}, {"lag.web": "soon"}, {"latency": "1h"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            _get(base, "whatif", **wrong)
        assert "whatif." in json.loads(refused.value.read())["code"]


def test_a_window_is_drawn_by_key(base: str, shop: Shop) -> None:
    """The chart has the newest revision of every result."""
    chart = _get(base, "sample", table="hourly")["chart"]
    drawn = {
        (point["at"], key): tuple(values[name] for name in ("sold", "revenue", "best"))
        for point in chart["points"]
        for key, values in point["results"].items()
    }
    assert sorted(drawn.values()) == sorted(shop.results().values())
    assert (chart["keys"], chart["left_out"]) == (["cup", "tea"], 0)


def test_a_late_row_tells_frontier_holder_and_lateness(base: str, shop: Shop) -> None:
    """10:20 came when the frontier was at 12:30, which `web` held: 2 h 10 min behind."""
    row = _get(base, "row", item="tea", price="2")["rows"][0]
    late = next(place["detail"] for place in row["places"] if place["output"] == "late")
    facts = (late["lateness_s"], late["held_by"], late["reason"])
    assert facts == (130 * 60, "web/0", "late_order")
    assert "12:30" in str(late["missed"])


def test_a_row_in_the_order_buffer_says_what_it_waits_for(base: str, shop: Shop) -> None:
    """The newest row waits until the frontier passes it; a released one does not wait."""
    states = {
        item: [place["state"] for place in row["places"] if place["output"] == "events"]
        for item, price in (("cup", "1"), ("tea", "3"))
        for row in _get(base, "row", item=item, price=price)["rows"]
    }
    assert states == {"cup": ["waits"], "tea": ["released"]}


def test_a_row_has_its_own_way_in_time(base: str) -> None:
    """10:40 arrived with the first object, and left when the second had moved the frontier."""
    row = _get(base, "row", item="tea", price="4")["rows"][0]
    (event,) = [place["detail"] for place in row["places"] if place["output"] == "events"]
    (counted,) = [place["detail"] for place in row["places"] if place["state"] == "counted"]
    assert (row["read"][:9], event["epoch"], counted["epoch"]) == ("t0-000001", 2, 2)
    assert (event["held_by"], event["waited_s"]) == ("web/0", 0.0)
    assert row["sealed"] == event["sealed"] == counted["sealed"] == "2025-06-15T15:06:40Z"
    assert row["arrived"] < event["visible"]


def test_the_command_finds_the_row_in_a_process_without_pandas(shop: Shop) -> None:
    """`tidegate row` hides pandas from pyarrow, which must not take that for an error."""
    command = [sys.executable, "-m", "tidegate.jobs.cli", "row", "shop", "item=tea", "price=3"]
    done = subprocess.run([*command, "--store", shop.store.url], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "released" in done.stdout


def test_a_wrong_value_is_an_answer(base: str) -> None:
    """The error of the command reaches the page with its advice."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        _get(base, "row", price="many")
    assert json.load(caught.value)["code"] == "row.bad_value"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_process_that_hangs_is_replaced(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question fails, the next one is answered."""
    monkeypatch.setattr(child_processes, "_START_PATIENCE", 120.0)
    monkeypatch.setattr(child_processes, "_ANSWER_TIMEOUT", 60.0)
    process = ResultsProcess(StoreAccess(shop.store.url))
    assert process.ask("shop", "tables", {})["tables"]
    assert process._child is not None
    process._child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(child_processes, "_ANSWER_TIMEOUT", 0.5)
    with pytest.raises(TransientError, match="could not be read"):
        process.ask("shop", "tables", {})
    monkeypatch.setattr(child_processes, "_ANSWER_TIMEOUT", 60.0)
    assert process.ask("shop", "tables", {})["tables"]


def test_a_recovery_is_proven_by_positions_and_counts(base: str, shop: Shop) -> None:
    """Tables follow the newest timeline; rows are equal by checkpoint and by table."""
    found = _get(base, "proof")
    assert found["followers"] == [{"name": "tables", "timeline": 0, "missing": 0}]
    counts = {count["what"]: count for count in found["counts"]}
    assert set(counts) == {"read", "events"}
    assert counts["events"]["found"] == len(shop.table("events")) > 0
    assert all(count["sealed"] == count["found"] for count in counts.values())


def test_a_sink_called_tables_is_not_the_tables(shop: Shop) -> None:
    """Both are followers, and rows are compared by what the tables show."""
    sink = "sinks: {tables: {kind: files, path: out/}}\n"
    found = PipelineResults(parse_spec(SPEC + sink), shop.log).prove_recovery()
    assert [(one["name"], one["timeline"]) for one in found["followers"]] == [
        ("tables", 0),
        ("tables", None),
    ]
    assert [one["what"] for one in found["counts"]] == ["read", "events"]
