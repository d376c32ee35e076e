"""The benches measure what they say.

Their input, their arithmetic and their checks, without Spark.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.bench import costs, kafka
from tests.bench.answers import check_answer
from tests.bench.generate import SOURCES, T0, generate
from tests.bench.rounds import PER_KEY, check, report
from tests.bench.suite import JOBS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generate(tmp_path / "input", 80_000, 2)
    return tmp_path / "input"


def test_input_has_the_disorder_it_promises(source: Path) -> None:
    """About 1 % of the rows are 1 to 30 s behind their place, the rest in place.

    Every source has its end.
    """
    behind = f"epoch_us(event_time) - ({T0} + seq * 1000)"
    with duckdb.connect() as db:
        total, some, bad = db.execute(
            f"""select count(*), count(*) filter ({behind} between -30000000 and -1000000),
            count(*) filter ({behind} not in (0, -120000000) and {behind} not between -30000000 and -1000000)
            from '{source}/s*/*.parquet'"""
        ).fetchall()[0]
    assert (total, bad) == (80_000, 0)
    assert 0.008 < some / total < 0.012
    assert len(list(source.glob("s*/_DONE"))) == SOURCES


def test_wrong_answers_are_found(source: Path, tmp_path: Path) -> None:
    """Windows that miss rows which no late table has are no result."""
    tables = tmp_path / "out" / "bench_windows" / "timelines" / "0" / "tables"
    start = "make_timestamptz(epoch_us(event_time) // 10000000 * 10000000)"
    for name, query in {
        "per_key": (
            f"select {start} as window_start, key, count(*) as n, sum(value) as s from rows where"
            " seq > 5 group by all"
        ),
        "late": "select event_time, key, value, 'per_key' as output from rows where seq <= 5",
    }.items():
        (tables / name / "1").mkdir(parents=True)
        query = query.replace("rows", f"'{source}/s*/*.parquet'")
        duckdb.sql(f"copy ({query}) to '{tables / name / '1' / 'part.parquet'}' (format parquet)")
    assert "24 late rows kept" in check("windows", source, tmp_path / "out")
    path = tables / "late" / "1" / "part.parquet"
    for select in (
        f"select *, 'per_key' as output from '{source}/s0/part-00000.parquet'",
        # Late for another output: these rows are missing in the windows.
        f"select event_time, key, value, 'events' as output from '{source}/s*/*.parquet'"
        " where seq <= 5",
    ):
        duckdb.sql(f"copy ({select}) to '{path}' (format parquet)")
        with pytest.raises(SystemExit, match="WRONG ANSWER"):
            check("windows", source, tmp_path / "out")


def test_ratio_is_the_median_of_the_rounds() -> None:
    """Each round is compared with itself: what slowed one round slowed all in it."""

    def took(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "cpu": seconds, "epochs": [2.0, 1.0]}

    rounds = [
        {"windows": took(ours), "plain": took(plain)}
        for ours, plain in ((10, 12), (100, 130), (5, 5))
    ]
    assert "throughput against plain: 1.20 x (rounds: 1.20, 1.30, 1.00)" in report(
        "windows", rounds
    )


def test_the_peers_losses_are_counted(source: Path, tmp_path: Path) -> None:
    """What the peer's windows lack is a number; a row that they have twice is an error."""
    start = "make_timestamptz(epoch_us(event_time) // 10000000 * 10000000)"
    (tmp_path / "windows").mkdir()
    for end, lost in ((5, 24), (-1, 0)):
        query = (
            f"select {start} as w, key, count(*) as n from '{source}/s*/*.parquet' where seq >"
            f" {end} group by all"
        )
        duckdb.sql(f"copy ({query}) to '{tmp_path}/windows/part.parquet' (format parquet)")
        assert kafka.dropped(source, tmp_path) == lost
    duckdb.sql(
        f"copy (from '{tmp_path}/windows/part.parquet' limit 1) to"
        f" '{tmp_path}/windows/again.parquet' (format parquet)"
    )
    with pytest.raises(SystemExit, match="1 windows of the peer's have too many rows"):
        kafka.dropped(source, tmp_path)


def test_rows_a_second() -> None:
    """Rows a second of both sides, medians, and the ratio within each round."""

    def took(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "cpu": seconds, "epochs": [2.0, 1.0]}

    rounds = [
        {"ours": took(ours), "plain": took(plain)} for ours, plain in ((10, 12), (100, 130), (5, 5))
    ]
    lines = kafka.report(1000, rounds).splitlines()
    assert lines[2] == "| 1 | 100 | 83 | 1.20 |"
    assert "| median | 100 | 83 | 1.20 |" in lines


@pytest.mark.parametrize(("lost", "kept"), [(5, True), (5, False), (0, True)])
def test_a_peers_windows_and_late_rows_are_the_input(
    source: Path, tmp_path: Path, lost: int, kept: bool
) -> None:
    """A peer that keeps late rows must have every row, in the right window."""
    rows = f"'{source}/s*/*.parquet'"
    for name in ("win", "late"):
        (tmp_path / name).mkdir()
    moved = f"select w, key, n - {int(not lost)} as n, s from"  # without late rows: a row too few
    duckdb.sql(
        f"copy ({moved} (select {PER_KEY} from {rows} where seq >= {lost} group by all))"
        f" to '{tmp_path}/win/part-0' (format parquet)"
    )
    if lost and kept:
        late = (
            f"select epoch_us(event_time) as event_time, key, value from {rows} where seq < {lost}"
        )
        duckdb.sql(f"copy ({late}) to '{tmp_path}/late/part-0' (format parquet)")
    job = JOBS["W1"]
    if lost and kept:
        said = check_answer(job, "flink", source, tmp_path, {})
        assert said == "79,980 in windows + 20 late rows kept = 80,000, every w, key exact"
        return
    with pytest.raises(SystemExit, match="WRONG ANSWER"):
        check_answer(job, "flink", source, tmp_path, {"late": 3})


def test_a_peers_order_is_checked(source: Path, tmp_path: Path) -> None:
    """Rows that are sorted in each file, but not over all files, are found."""
    (tmp_path / "win").mkdir()
    rows = f"(select * replace (epoch_us(event_time) as event_time) from '{source}/s*/*.parquet')"
    for place, part in enumerate(("seq < 9000", "seq >= 9000")):
        query = f"select * from {rows} where {part} order by event_time"
        duckdb.sql(f"copy ({query}) to '{tmp_path}/win/part-{place}' (format parquet)")
    with pytest.raises(SystemExit, match="out of order"):
        check_answer(JOBS["W4"], "flink", source, tmp_path, {})
    (tmp_path / "win" / "part-1").unlink()
    duckdb.sql(
        f"copy (from {rows} order by event_time) to '{tmp_path}/win/part-0' (format parquet)"
    )
    said = check_answer(JOBS["W4"], "flink", source, tmp_path, {})
    assert said == "80,000 rows in order + 0 dropped for being late"


def test_costs_leave_no_object_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is not collected in the end, and DuckDB's library then reports leaks."""
    monkeypatch.setattr(costs, "AGAINST_HISTORY", ())
    monkeypatch.setattr(costs, "make_history", lambda *_: None)
    monkeypatch.setattr(costs, "check_looks", lambda *_: True)
    gc.unfreeze()  # what tests/conftest.py froze
    assert costs.check_history([1_000]) == [True]
    assert gc.get_freeze_count() == 0
