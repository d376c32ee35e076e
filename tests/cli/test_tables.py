from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Cli
from tests.cli.shop import OBJECTS, Shop
from tests.cli.shop import SPEC as SHOP_SPEC

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.expectations import quality_run
from tidegate.jobs.cli.tables_and_storage import _print_newest_rows
from tidegate.jobs.sinks import published_tables as sink
from tidegate.jobs.spec.loader import parse_spec


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> pa.Table:
    """What every table holds here; reading real ones is tested where they are written."""
    table = pa.table({"position": [0, 1, 2], "carrier": ["UA", "DL", None], "_epoch": [1, 1, 2]})

    def read(
        spec: object,
        store: object,
        name: str,
        *,
        columns: Any = None,
        current_only: bool = False,
        at: Any = None,
    ) -> pa.Table:
        return table.select(list(columns)) if columns else table

    monkeypatch.setattr(sink, "read_table", read)
    return table


def test_tables_are_listed_with_their_rows(
    cli: Cli, log: SlotLog, spec_file: Path, rows: pa.Table
) -> None:
    """Without a name every table of the pipeline is listed."""
    data = cli("tables", "flights.yaml", "--json").data
    assert {row["table"] for row in data} == {
        "events",
        "late",
        "barriers",
        "checkpoints",
        "dead_letters",
    }


def test_counting_rows_reads_no_rows(
    cli: Cli, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list takes rows and addresses from the tables' metadata, so it is quick."""
    shop = Shop(store, parse_spec(SHOP_SPEC), tmp_path)
    (tmp_path / "shop.yaml").write_text(SHOP_SPEC)
    for number, rows in enumerate(OBJECTS):
        shop.put(number, rows)
    shop.run()
    monkeypatch.setattr(sink, "read_table", None)
    listed = {row["table"]: row for row in cli("tables", "shop.yaml", "--json").data}
    assert (listed["events"]["rows"], listed["dead_letters"]["rows"]) == (5, 1)
    assert Path(listed["events"]["address"]).is_file()


def test_table_is_shown_from_its_end(
    cli: Cli, log: SlotLog, spec_file: Path, rows: pa.Table
) -> None:
    """The newest rows on the screen, all of them as JSON."""
    out = cli("tables", "flights.yaml", "events", "--limit", "2").out
    assert "UA" not in out
    assert "2 of 3 rows of events" in out
    assert len(cli("tables", "flights.yaml", "events", "--json").data["rows"]) == 3


def test_rows_are_chosen_by_a_condition(
    cli: Cli, log: SlotLog, spec_file: Path, rows: pa.Table
) -> None:
    """`--where` takes SQL over the table's columns; a condition that does not parse names them."""
    found = cli("tables", "flights.yaml", "events", "--where", "carrier = 'UA'", "--json").data
    assert [row["carrier"] for row in found["rows"]] == ["UA"]
    said = cli("tables", "flights.yaml", "events", "--where", "carier = 'UA'")
    assert (said.exit_code, "carier" in said.err, "carrier" in said.err) == (2, True, True)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_table_is_written(
    cli: Cli, log: SlotLog, spec_file: Path, rows: pa.Table, tmp_path: Path, ending: str
) -> None:
    """The ending of the file chooses the format."""
    out = tmp_path / f"events.{ending}"
    assert cli("tables", "flights.yaml", "events", "--out", str(out)).exit_code == 0
    if ending == "parquet":
        assert pq.read_table(out).equals(rows)
    elif ending == "csv":
        assert out.read_text().splitlines()[1] == '0,"UA",1'
    else:
        assert [json.loads(line)["carrier"] for line in out.read_text().splitlines()] == [
            "UA",
            "DL",
            None,
        ]


def test_tables_need_a_spec(cli: Cli, log: SlotLog) -> None:
    """A name without a spec says where it was looked for."""
    said = cli("tables", "flights")
    assert (said.exit_code, "dags/pipelines" in said.err) == (2, True)


def test_quality_docs_are_copied(
    cli: Cli, log: SlotLog, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data Docs of a bucket can be opened from a folder, also when a check failed."""
    docs, key = "flights/quality/docs/1/index.html", "flights/quality/results/1.json"
    check: dict[str, Any] = {
        "suite": "late",
        "id": "late_ratio",
        "severity": "critical",
        "says": "few are late",
    }
    check |= {"observed": "0.7 of LGA", "command": "tidegate tables flights late"}
    check["sample"] = [{"_source": "LGA", "_seq": 7, "output": None, "missing": []}]
    result: dict[str, Any] = {
        "pipeline": "flights",
        "verdict": "fail",
        "checkpoint": None,
        "docs": docs,
    }
    result |= {"key": key, "checks": [check], "failed": [check]}
    monkeypatch.setattr(quality_run, "check_quality", lambda spec, store: result)
    for page in ("index", "release.release"):
        log.store.put(f"flights/quality/docs/1/{page}.html", page.encode())
    said = cli("quality", "flights.yaml", "--docs", "docs")
    assert (said.exit_code, (tmp_path / "docs" / "release.release.html").read_text()) == (
        1,
        "release.release",
    )
    assert said.out.splitlines() == [
        "flights: fail (1 checks, 1 failed)",
        "newest checkpoint looked at: none",
        "CRITICAL late.late_ratio: few are late",
        "         seen: 0.7 of LGA",
        "         row:  _source LGA, _seq 7",
        "         all:  tidegate tables flights late",
        f"Data Docs: {log.store.uri(docs)}",
        "Data Docs copied: docs/index.html",
        key,
    ]


def test_dead_letters_and_windows_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """A dead letter is three lines; the results of a window are in order of time."""
    dead = {"reason": "bad_value", "detail": "v is no long: x", "object": "in/1.csv", "row": "{}"}
    place = {"_source": "a", "_partition": "0", "_seq": 7}
    _print_newest_rows("dead_letters", pa.Table.from_pylist([dead | place]), 20)
    said = capsys.readouterr().out
    assert said.startswith("bad_value  a/0/7 of in/1.csv\n  v is no long: x\n  {}\n")
    times = [{"window_start": n, "window_end": n + 1, "revision": 0} for n in (3, 1, 2)]
    results = [one | {"sum": 0.1 + 0.2} for one in times]
    _print_newest_rows("late", pa.table({"output": ["events", "hourly"]}), 20)
    assert "once for each output that it missed" in capsys.readouterr().out
    _print_newest_rows("hourly", pa.Table.from_pylist(results), 20)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert [line.split()[3] for line in lines[1:4]] == ["0.3"] * 3
