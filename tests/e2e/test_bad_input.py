"""Bad input on real Spark.

Every object and row gets a clear outcome, nothing is lost, and the rest is exact.
"""

from __future__ import annotations

import io
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.drivers import Piped, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

START = datetime(2026, 3, 1, tzinfo=UTC)
UTC_STAMP = pa.timestamp("us", tz="UTC")
SPEC = """\
apiVersion: tidegate/v1
name: dirty
sources:
  clean: &source
    path: inbox/clean/
    schema: {kind: string, at: timestamp, item: string, amount: long}
    event_time: at
    lag: 30s
    min_event_time: "2026-01-01"
    max_jump: 1d
    limits: {objects: 8}
    evolution: {added: dead_letter}
    bounded: true
    barriers: {kind: kind, types: [shift]}
  dirty: {<<: *source, path: inbox/dirty/}
coalesce: {idle_timeout: never}
windows:
  per_minute: {kind: tumbling, size: 1m, keys: [item], aggregates: {n: count(*), total: sum(amount)}, lateness: 2m}
checkpoint: {idle_interval: 100ms}
spark: {driver_memory: 1g, jvm: quick}
"""


def rows(minute: int, count: int = 4, **columns: Any) -> pa.Table:
    """Rows of one minute; a column given as None is left out, one given as an array replaces."""
    stamps = [START + timedelta(minutes=minute, seconds=second) for second in range(count)]
    table = {
        "kind": pa.array(["data"] * count),
        "at": pa.array(stamps, UTC_STAMP),
        "item": pa.array(["ab"[n % 2] for n in range(count)]),
        "amount": pa.array(range(count), pa.int64()),
    }
    return pa.table(
        {name: column for name, column in {**table, **columns}.items() if column is not None}
    )


def parquet(table: pa.Table) -> bytes:
    """The bytes of an object."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def corrupt(table: pa.Table) -> bytes:
    """An object whose footer is whole and whose pages are not."""
    data = bytearray(parquet(table))
    data[4:60] = bytes(56)
    return bytes(data)


def stamps(*values: datetime | None, tz: str | None = "UTC") -> pa.Array:
    """A time column."""
    return pa.array(values, pa.timestamp("us", tz=tz))


def marked(before: int, after: int, amount: int) -> pa.Table:
    """Rows around a barrier row; those behind it have `amount`."""
    kinds = ["data"] * before + ["shift"] + ["data"] * after
    amounts = [0] * (before + 1) + [amount] * after
    return rows(20, len(kinds), kind=pa.array(kinds), amount=pa.array(amounts, pa.int64()))


GOOD = START + timedelta(minutes=9)
DIRTY: dict[str, bytes] = {
    "000-good": parquet(rows(0)),
    "001-text": b"kind,at,item,amount\n",
    "002-cut": parquet(rows(1, 500))[:-100],
    "003-empty": b"",
    "004-no-rows": parquet(rows(2, 0)),
    "005-unknown-column": parquet(rows(3, color=pa.array(["red"] * 4))),
    "006-no-amount": parquet(rows(4, amount=None)),
    "007-no-time": parquet(rows(5, at=None)),
    "008-text-amount": parquet(rows(6, amount=pa.array(["7", "seven", None, "-8"]))),
    "009-null-times": parquet(rows(7, at=stamps(None, GOOD, None, GOOD))),
    "010-long-ago": parquet(rows(8, at=stamps(GOOD, datetime(1970, 1, 1, tzinfo=UTC), GOOD, GOOD))),
    "011-naive": parquet(rows(9, at=stamps(*[GOOD.replace(tzinfo=None)] * 4, tz=None))),
    "012-far-future": parquet(
        rows(10, at=stamps(GOOD, GOOD, datetime(2999, 1, 1, tzinfo=UTC), GOOD))
    ),
    "013-corrupt": corrupt(rows(11)),
    "013-good": parquet(rows(11)),
    "014-overwritten": parquet(marked(3, 3, 1)),
}
OBJECTS_DEAD = {
    "001-text": "not_parquet",
    "002-cut": "truncated",
    "003-empty": "empty_object",
    "005-unknown-column": "unknown_column",
    "007-no-time": "missing_column",
    "013-corrupt": "truncated",  # which only reading shows
    "014-overwritten": "changed_object",
}
ROWS_DEAD = {
    ("008-text-amount", 1, "bad_value"),
    ("009-null-times", 0, "no_event_time"),
    ("009-null-times", 2, "no_event_time"),
    ("010-long-ago", 1, "before_min_event_time"),
    *(("011-naive", row, "naive_time") for row in range(4)),
}
ROWS_READ = (
    8 * 4 + 3
)  # the eight objects with rows that can be read, and the overwritten one up to its barrier


def put(pipeline: Piped, source: str, name: str, data: bytes) -> None:
    """An object appears whole, as in a bucket."""
    folder = pipeline.inbox / "inbox" / source
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{name}"
    hidden.write_bytes(data)
    hidden.replace(folder / f"{name}.parquet")


def end(pipeline: Piped, source: str) -> None:
    """No more objects."""
    (pipeline.inbox / "inbox" / source / "_DONE").touch()


def waits_behind_barrier(pipeline: Piped) -> bool:
    """Whether the overwritten object was read up to its barrier, and no further."""
    record = pipeline.log().head().record
    resume = record.cut["dirty/0"]["resume"] if record and "dirty/0" in record.cut else {}
    return bool(resume.get("open"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Piped:
    """A run over everything.

    The last object is overwritten while its source waits for the other's barrier.
    """
    pipeline = Piped(tmp_path_factory.mktemp("dirty"), SPEC)
    for name, data in DIRTY.items():
        put(pipeline, "dirty", name, data)
    end(pipeline, "dirty")
    for minute in range(0, 18, 2):
        put(pipeline, "clean", f"{minute:03d}", parquet(rows(minute)))
    driver = pipeline.start()
    try:
        wait_for(lambda: waits_behind_barrier(pipeline), driver)
        put(pipeline, "dirty", "014-overwritten", parquet(marked(3, 3, 2)))
        put(pipeline, "clean", "999", parquet(marked(2, 2, 5)))
        end(pipeline, "clean")
        assert driver.wait(timeout=900) == 0, pipeline.log_text()
    finally:
        driver.kill()
        driver.wait()
    return pipeline


def test_the_rest_is_exact(ended: Piped) -> None:
    """Every row of every readable object is in one place, and the windows equal a
    recomputation.
    """
    found = ended.exact()
    assert found.problems == []
    assert found.rows["dirty"]["read"] == ROWS_READ
    assert found.rows["dirty"]["dead_lettered"] == len(ROWS_DEAD)
    assert found.rows["clean"] == {"read": 40, "released": 40, "late": 0, "dead_lettered": 0}
    assert found.windows["per_minute"] > 10
    counters = ended.log().head().record
    assert counters is not None
    assert counters.counters.per_source["dirty"]["read"] == ROWS_READ


def test_dead_objects_are_named(ended: Piped) -> None:
    """One dead letter per object that cannot be read, with key, ETag, reason and a sentence."""
    dead = [row for row in ended.table("dead_letters").to_pylist() if row["row"] is None]
    assert {Path(row["object"]).stem: row["reason"] for row in dead} == OBJECTS_DEAD
    assert len(dead) == len(OBJECTS_DEAD)
    assert all(
        row["etag"] and len(row["detail"]) > 10 and row["_source"] == "dirty" for row in dead
    )


def test_dead_rows_are_kept(ended: Piped) -> None:
    """One dead letter per bad row, with its object, its place, its reason and the row itself."""
    dead = [row for row in ended.table("dead_letters").to_pylist() if row["row"] is not None]
    assert {
        (Path(row["object"]).stem, row["_seq"] & 0xFFFFFFFF, row["reason"]) for row in dead
    } == ROWS_DEAD
    assert len(dead) == len(ROWS_DEAD)
    (seven,) = [row for row in dead if row["reason"] == "bad_value"]
    assert '"amount":"seven"' in seven["row"]
    assert "amount" in seven["detail"]


def test_good_values_next_to_bad_ones_go_on(ended: Piped) -> None:
    """Texts that are numbers are cast, a missing column reads as null."""
    events = (
        ended.table("events")
        .filter(pa.compute.equal(ended.table("events")["_source"], "dirty"))
        .to_pylist()
    )
    by_minute = {
        minute: [e["amount"] for e in events if e["at"] - START < timedelta(minutes=minute + 1)]
        for minute in (6,)
    }
    assert by_minute[6].count(7) == by_minute[6].count(-8) == 1
    assert [
        e["amount"]
        for e in events
        if timedelta(minutes=4) <= e["at"] - START < timedelta(minutes=5)
    ] == [None] * 4


def test_a_stamp_from_the_far_future_is_put_aside(ended: Piped) -> None:
    """It goes to the late table, and the frontier does not follow it."""
    late = ended.table("late").to_pylist()
    assert [row["at"].year for row in late if row["reason"] == "max_jump"] == [2999]
    assert Counter(row["reason"] for row in late if row["output"] == "events").keys() <= {
        "max_jump",
        "late_order",
    }
    frontiers = [
        row["frontier"]
        for row in ended.table("checkpoints").to_pylist()
        if row["frontier"] is not None
    ]
    assert max(frontiers).year == 2026


def test_on_bad_fail_ends_the_driver(tmp_path: Path) -> None:
    """Exit code 1; the message names pipeline, source, object, row and value; nothing of that epoch
    is sealed.
    """
    spec = SPEC.replace("limits: {objects: 8}", "limits: {objects: 1}\n    on_bad: fail")
    pipeline = Piped(tmp_path, spec)
    for name in ("000-good", "008-text-amount", "013-good"):
        put(pipeline, "dirty", name, DIRTY[name])
    put(pipeline, "clean", "000", parquet(rows(0)))
    assert pipeline.run() == 1, pipeline.log_text()
    (last,) = pipeline.said("ended")
    assert "row 1 of inbox/dirty/008-text-amount.parquet" in last["message"]
    assert all(word in last["message"] for word in ("dirty", "seven", "bad_value"))
    assert (last["pipeline"], last["class"], bool(last["kept"]), bool(last["advice"])) == (
        "dirty",
        "poison",
        True,
        True,
    )
    assert "Traceback" not in pipeline.log_text()
    head = pipeline.log().head()
    assert head.record is not None
    # Slot 1 recorded the clock for max_jump, slot 2 read the good object.
    assert (head.slot, head.record.cut["dirty/0"]["resume"]["key"]) == (
        2,
        "inbox/dirty/000-good.parquet",
    )
    assert pipeline.table("dead_letters").num_rows == 0
