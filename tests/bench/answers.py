"""Whether an engine's answer to a job of `tests.bench.suite` is right, as a sentence.

A wrong one ends the bench. tidegate keeps every late row, so its windows and late rows must be the
input. A peer may drop late rows: then none of its windows may have more rows than the input has, and
what it lacks is counted. Where it says how many it has dropped, the numbers must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import duckdb

from tests.bench.rounds import PER_KEY, WIDTH, check, require, scalar

_NAMES: Final = "{'w': 'BIGINT', 'key': 'INT', 'n': 'BIGINT', 's': 'DOUBLE'}"
_ROWS: Final = (
    "{'source': 'INT', 'seq': 'BIGINT', 'time': 'BIGINT', 'key': 'INT', 'value': 'DOUBLE'}"
)
_DIGEST: Final = "select count(*) || ' ' || sum(hash(seq, source, value)) from "


def check_answer(job: Any, name: str, source: Path, out: Path, took: Mapping[str, Any]) -> str:
    """Check what a contender wrote.

    Args:
        job: a `tests.bench.suite.Job`.
        name: of the contender.
        source: the input.
        out: the contender's folder.
        took: what it said of its run.
    """
    if name == "batch":
        return "one query over everything"
    if name == "tidegate" and job.name in ("windows", "order"):
        return check(job.name, source, out)
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'; set threads = 2")
        db.execute(f"create view rows as select * from '{source}/s*/*.parquet'")
        if name == "tidegate":
            return _check_tables(db, job, out / f"bench_{job.name}" / "timelines/0/tables", took)
        files = _list_files(out / ("windows" if name == "plain" else "win"), name)
        if job.name == "pass":
            columns = _ROWS if name == "hazelcast" else None
            return _check_same_rows(db, _read_files(files, columns))
        if job.name == "order":
            return _check_sorted(db, files)
        found = _read_files(files, _NAMES if name == "hazelcast" else None)
        micros = "epoch_us(w)" if name == "plain" else "w"
        # Flink gives a revision for each late row: the newest has the most rows.
        db.execute(
            f"create view found as select {micros} as w, key, max(n) as n, max_by(s, n) as s"
            f" from {found} group by all"
        )
        late = _list_files(out / "late", name)
        dropped = took.get("late") if job.copies == 1 else None
        return _check_windows(db, job, late, dropped)


def _list_files(folder: Path, name: str) -> list[str]:
    """Finished files, in the order in which they were written."""
    own = "*.parquet" if name == "plain" else "**/*"
    found = [
        path
        for path in folder.glob(own)
        # Spark's are hidden by an underscore, and Flink's unfinished ones by a dot.
        if path.is_file() and path.stat().st_size and path.name[0] not in "._"
    ]
    return [str(path) for path in sorted(found, key=lambda p: (len(p.name), p.name))]


def _read_files(files: list[str], columns: str | None) -> str:
    if columns is None:
        return f"read_parquet({files})"
    return f"read_csv({files}, header = false, columns = {columns})"


def _check_same_rows(db: duckdb.DuckDBPyConnection, found: str) -> str:
    left, right = (db.execute(_DIGEST + rows).fetchone() for rows in ("rows", found))
    require(left == right, f"{left} read, {right} written")
    return f"{scalar(db, 'select count(*) from rows'):,} rows written, equal to the input"


def _check_sorted(db: duckdb.DuckDBPyConnection, files: list[str]) -> str:
    places = ", ".join(f"('{file}', {place})" for place, file in enumerate(files))
    db.execute(
        f"create table events as select seq, source, event_time, place, file_row_number from"
        f" read_parquet({files}, filename = true, file_row_number = true) join"
        f" (values {places}) as files (filename, place) using (filename)"
    )
    unsorted = scalar(
        db,
        "select count(*) from (select event_time < lag(event_time) over"
        " (order by place, file_row_number) as x from events) where x",
    )
    kept = scalar(db, "select count(*) from events")
    known = scalar(
        db,
        "select count(*) from (select distinct source, seq, event_time from events) join (select"
        " source, seq, epoch_us(event_time) as event_time from rows) using (source, seq, event_time)",
    )
    require(unsorted == 0 and known == kept, f"{unsorted} out of order; {known} of {kept} known")
    lost = scalar(db, "select count(*) from rows") - kept
    return f"{kept:,} rows in order + {lost:,} dropped for being late"


def _check_windows(
    db: duckdb.DuckDBPyConnection, job: Any, late: list[str], dropped: int | None
) -> str:
    # Late rows change where sessions end, so these are compared by key.
    by, truth = "w, key", job.batch
    if job.name == "sessions":
        by, truth = "key", f"select {PER_KEY} from rows group by all"
    kept, rows, found = scalar(db, "select sum(n) from found"), 0, "from found"
    if late and job.copies == 1:
        rows = scalar(db, f"select count(*) from read_parquet({late})")
        found += f""" union all select event_time // {WIDTH} * {WIDTH}, key, count(*), sum(value)
            from read_parquet({late}) group by all"""
    for name, query in (("own", found), ("truth", truth)):
        db.execute(
            f"create view {name} as select {by}, sum(n) as n, sum(s) as s"
            f" from ({query}) as t (w, key, n, s) group by all"
        )
    total = scalar(db, "select sum(n) from truth")
    # Where no row is missing, nothing may differ at all.
    wrong = (
        "n > coalesce(truth.n, 0)"
        if kept + rows < total
        else "n is distinct from truth.n or own.s <> truth.s"
    )
    differing = scalar(
        db, f"select count(*) from own full join truth using ({by}) where own.{wrong}"
    )
    require(differing == 0, f"{differing} windows differ from the input")
    if late and job.copies == 1:
        require(kept + rows == total, f"{kept} + {rows} late of {total}")
        return f"{kept:,} in windows + {rows:,} late rows kept = {total:,}, every {by} exact"
    missed = total - kept
    if dropped is not None:
        require(dropped == missed, f"{kept} + {dropped} counted as late of {total}")
    return f"{kept:,} in windows + {missed:,} not = {total:,}; no window has too many"


def _check_tables(
    db: duckdb.DuckDBPyConnection, job: Any, tables: Path, took: Mapping[str, Any]
) -> str:
    """The tables of tidegate."""
    total = scalar(db, "select count(*) from rows")
    any_late = any(tables.glob("late/*/*"))
    late = scalar(db, f"select count(*) from '{tables}/late/*/*.parquet'") if any_late else 0
    if job.name == "pass":
        require(late == 0, f"{late} late rows")
        return _check_same_rows(db, f"'{tables}/events/*/*.parquet'")
    db.execute(f"""create view newest as select * from '{tables}/per_key/*/*.parquet'
        qualify row_number() over (partition by window_start, window_end, key order by revision desc) = 1""")
    kept = scalar(db, "select sum(n) from newest")
    # Of sliding windows a late row may miss some and reach others: those are pairs.
    missed = took["expired"] if job.copies > 1 else late
    whole = total * job.copies
    require(kept + missed == whole, f"{kept} + {missed} missed of {whole}")
    if job.name == "keys":
        without = (
            f"anti join (from '{tables}/late/*/*.parquet') using (source, seq)" if late else ""
        )
        differing = scalar(
            db,
            f"""select count(*) from (select {PER_KEY} from rows {without} group by all) a full join
            (select epoch_us(window_start) as w, key, n, s from newest) b using (w, key)
            where a.n is distinct from b.n or a.s <> b.s""",
        )
        require(differing == 0, f"{differing} windows differ")
    return f"{kept:,} in windows + {missed:,} missed = {whole:,}"
