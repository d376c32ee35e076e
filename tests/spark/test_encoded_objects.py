"""Objects of other formats are inspected and decoded by Spark's Python tasks."""

from __future__ import annotations

import csv
import io
import json
import random
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow.orc as orc
import pytest

from tests.oracle.mover import OracleMover
from tests.spark.agreement import (
    COLUMNS,
    SECOND,
    Pair,
    _trim,
    divide_finely,
    rows_of,
    spec_of,
    table_of,
)
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.errors import CorruptObjectsError
from tidegate.jobs.engine.interfaces import Cut, Slice, join_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.rows import batch_reading, cut_division
from tidegate.jobs.rows.slice_scan import MOST_CELLS
from tidegate.jobs.sources import object_decoding, text_chunks
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.sources.object_source import ObjectSource
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spec.pipeline import ReadLimits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WINDOW = {
    "kind": "tumbling",
    "size": "10s",
    "keys": ["k"],
    "aggregates": {"rows": "count(*)", "total": "sum(v)", "most": "max(n)"},
}
OFF = {"release": {"mode": "pass_through"}, "outputs": {"events": False}}
Rows = list[dict[str, Any]]


def name_time(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a text as its time."""
    return {**row, "t": (EPOCH + timedelta(microseconds=row["t"])).isoformat()}


def encode_json(rows: Rows) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(name_time(row)) + "\n" for row in rows).encode()


def encode_csv(rows: Rows) -> bytes:
    """CSV with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(name_time, rows))
    return out.getvalue().encode()


def encode_avro(rows: Rows) -> bytes:
    """An Avro container."""
    time = {"type": "long", "logicalType": "timestamp-micros"}
    kinds = {"t": time, "kind": "string", "k": "string", "n": "long", "v": "double"}
    fields = [{"name": name, "type": ["null", kind]} for name, kind in kinds.items()]
    out = io.BytesIO()
    records = [{**row, "t": EPOCH + timedelta(microseconds=row["t"])} for row in rows]
    record = {"type": "record", "name": "row", "fields": fields}
    fastavro.writer(out, record, records, sync_interval=100)
    return out.getvalue()


def encode_orc(rows: Rows) -> bytes:
    """An ORC object."""
    out = io.BytesIO()
    orc.write_table(table_of(rows), out)
    return out.getvalue()


ENCODERS = {"json": encode_json, "csv": encode_csv, "avro": encode_avro, "orc": encode_orc}


class EncodedPair(Pair):
    """Both movers over objects of other formats, of one source `a`."""

    def __init__(
        self,
        session: SparkSession,
        folder: Path,
        events: dict[str, Any] = OFF,
        **source: Any,
    ) -> None:
        spec = spec_of({"a": source}, windows={"w": WINDOW}, **events)
        self.view = InputView(LocalStore(folder / "store"), spec, folder / "view")
        self.most_rows: int | None = None
        super().__init__(spec, session, folder, view=self.view)
        seen = InputView(self.store, spec, folder / "seen")
        self.sides["reference"].mover = OracleMover(seen, spec)

    def put_object(self, data: bytes) -> None:
        """Write one object, and plan it behind the others."""
        member, ordinal = Member("a"), self.ordinals.get(Member("a"), 0)
        name = f"{ordinal:05d}"
        self.store.put(f"inbox/a/{name}", data)
        resume = {"ordinal": ordinal, "key": f"inbox/a/{ordinal - 1:05d}"} if ordinal else None
        planned = ObjectSource("a", self.spec.sources["a"], self.view).plan(
            member, resume, ReadLimits()
        )
        assert planned.dead == ()
        assert planned.start == join_seq(ordinal, 0)
        self.waiting.setdefault(member, []).extend(planned.parts)
        self.ordinals[member] = ordinal + 1

    def _slice(self, member: Member, *, done: bool, blocked: bool) -> Slice:
        piece = super()._slice(member, done=done, blocked=blocked)
        if not piece.parts or self.most_rows is None:
            return piece
        return _trim(piece, piece.start + self.most_rows)


@pytest.mark.parametrize("form", sorted(ENCODERS))
def test_tasks_decode_what_the_oracle_decodes(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Surveys, tables and counters, also of objects that are read in two epochs."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(form)
    marks = {"kind": "kind", "types": ["stop"]}
    pair = EncodedPair(session, tmp_path, format=form, barriers=marks, parse={"null": ""})

    def refuse(*_: Any) -> Any:
        raise AssertionError("the driver has decoded an object")

    monkeypatch.setattr(pair.view, "_decode_object", refuse)
    for epoch in range(4):
        for _ in range(2):
            rows = [row for row in rows_of(draw, 8 * epoch) if row["t"] > 0]
            pair.put_object(ENCODERS[form]([*rows, *rows_at(8 * epoch)]))
        pair.run(epoch * SECOND)
    for _ in range(4):
        pair.run(300 * SECOND, done=True)
    assert pair.table("w")


@pytest.mark.parametrize("mode", ["ordered", "pass_through"])
@pytest.mark.parametrize("form", ["avro", "csv", "json", "orc"])
def test_tasks_write_events_of_objects_that_they_decode(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, mode: str
) -> None:
    """Of rows that `where` keeps, late ones flagged; a line without a row is a dead letter.

    Where several objects are in a slice, each is read by a task.
    """
    divide_finely(monkeypatch)
    draw = random.Random(form)
    release = {"mode": mode, "on_late": "emit_flagged"}
    events = {"release": release, "outputs": {}}
    source = {"format": form, "parse": {"null": ""}, "where": "n > 0"}
    pair = EncodedPair(session, tmp_path, events, **source)
    bad = {"csv": b"never,,x,1,0.5\n", "json": b"no object\n"}.get(form, b"")
    for epoch in range(4):
        rows = [row for row in rows_of(draw, 8 * epoch) if row["t"] > 0]
        pair.put_object(ENCODERS[form](rows_at(8 * epoch)))
        pair.put_object(ENCODERS[form]([*rows, *rows_at(8 * epoch)]) + bad)
        pair.run(epoch * SECOND)
    for _ in range(3):
        pair.run(300 * SECOND, done=True)
    positions = [row["position"] for row in pair.table("events")]
    assert sorted(positions) == list(range(len(positions)))
    assert positions
    assert len(pair.table("dead_letters")) >= (4 if bad else 0)


@pytest.mark.parametrize(
    ("form", "most_cells"),
    [("avro", MOST_CELLS), ("csv", MOST_CELLS), ("csv", 10), ("json", MOST_CELLS)],
)
def test_tasks_share_an_object_that_they_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, most_cells: int
) -> None:
    """Late rows, dead letters and positions are those of the oracle, also of a part of an object.

    Tasks read what they share at once, or in batches of two rows.
    """
    divide_finely(monkeypatch)
    monkeypatch.setattr(batch_reading, "MOST_CELLS", most_cells)
    for module in (text_chunks, object_decoding):
        monkeypatch.setattr(module, "CHUNK_BYTES", 150)
    draw = random.Random(form)
    session: Any = LocalSession()
    events = {"release": {"on_late": "emit_flagged"}, "outputs": {}}
    rules = {"few": {"predicate": "n < 5"}}
    source = {"format": form, "parse": {"null": ""}, "where": "n > 0", "rules": rules}
    pair = EncodedPair(session, tmp_path, events, **source)
    bad = {"csv": b'never,,"x\n",1,0.5\n\n1,2\n', "json": b"\nno object\n"}.get(form, b"")
    shares: list[int] = []

    def divide_counted(*given: Any) -> Any:
        units = cut_division.divide_cut(*given)
        shares.append(len(units))
        return units

    monkeypatch.setattr("tidegate.jobs.spark.task_epochs.divide_cut", divide_counted)
    with closing(pair.spark):
        for epoch in range(4):
            rows = [row for _ in range(3) for row in rows_of(draw, 8 * epoch) if row["t"] > 0]
            data = ENCODERS[form](rows_at(*range(8 * epoch, 8 * epoch + 9)))
            more = ENCODERS[form](rows)
            joins = {"csv": data + bad + more.partition(b"\n")[2], "json": data + bad + more}
            pair.put_object(joins.get(form, ENCODERS[form]([*rows, *rows_at(8 * epoch)])))
            pair.most_rows = 11 if epoch < 3 else None
            pair.run(epoch * SECOND)
        for _ in range(3):
            pair.run(300 * SECOND, done=True)
    assert max(shares) > 4
    positions = [row["position"] for row in pair.table("events")]
    assert sorted(positions) == list(range(len(positions)))
    assert pair.table("late")
    assert bool(pair.table("dead_letters")) or not bad


def rows_at(*seconds: int) -> Rows:
    """Rows at these times."""
    return [{"t": s * SECOND, "kind": None, "k": "x", "n": 1, "v": 0.5} for s in seconds]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_rows_that_cannot_be_decoded_are_dead_letters(
    session: SparkSession, tmp_path: Path, form: str
) -> None:
    """They count and have places; the rows around them are folded."""
    pair = EncodedPair(session, tmp_path, format=form, parse={"null": ""})
    bad = {"csv": b"1,2\nnever,,x,1,0.5\n", "json": b'{"t": "never"}\nno object\n'}[form]
    pair.put_object(ENCODERS[form](rows_at(1, 2)) + bad)
    pair.put_object(ENCODERS[form](rows_at(20)))
    moved, _ = pair.run(0)
    assert (moved.counters.read, moved.counters.dead_lettered) == (5, 2)
    pair.run(300 * SECOND, done=True)
    assert sum(row["rows"] for row in pair.table("w")) == 3
    dead = pair.table("dead_letters")
    assert [(row["_seq"], row["reason"]) for row in dead] == [(2, "bad_value"), (3, "bad_value")]


def test_an_object_that_turns_out_damaged_is_named(session: SparkSession, tmp_path: Path) -> None:
    """The engine makes a dead letter of it, unless it has changed since it was planned."""
    pair = EncodedPair(session, tmp_path, format="avro")
    pair.put_object(encode_avro(rows_at(1)))
    path = pair.store.local_path("inbox/a/00000")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-3])
    cut = Cut((pair._slice(Member("a"), done=False, blocked=False),))
    with pytest.raises(CorruptObjectsError) as caught:
        pair._survey("spark", cut)
    assert caught.value.keys == ("inbox/a/00000",)


def test_what_tasks_find_in_objects_is_planned(session: SparkSession, tmp_path: Path) -> None:
    """Dead letters have the reasons that the driver would give."""
    pair = EncodedPair(session, tmp_path, format="csv", evolution={"added": "dead_letter"})
    objects = {"1": b"", "2": b"t,t\n1,2\n", "3": b"k,n\nx,1\n", "4": b"t,other\n,1\n"}
    for name, data in objects.items():
        pair.store.put(f"inbox/a/{name}", data)
    found = []
    for folder in ("tasks", "driver"):
        if folder == "driver":
            pair.view.let_tasks_inspect(None)
        source = ObjectSource("a", pair.spec.sources["a"], pair.view)
        planned = source.plan(Member("a"), None, ReadLimits())
        found.append((planned.dead, planned.parts))
    assert found[0] == found[1]
    assert [dead.reason for dead in found[0][0]] == [
        "empty_object",
        "truncated",
        "missing_column",
        "unknown_column",
    ]
