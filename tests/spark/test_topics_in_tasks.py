"""Topics are read and decoded by Spark's Python tasks; the driver only plans ranges."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.rows.topic_inputs import message, plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.agreement import SECOND
from tests.spark.kafka_topics import rows as decoded_rows
from tests.spark.kafka_topics import spec_of as messages_spec
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.rows import cut_division
from tidegate.jobs.rows.dead_messages import explain_dead_message, show_message
from tidegate.jobs.sources.errors import CHANGED_WHILE_READ
from tidegate.jobs.sources.input_view import InputView
from tidegate.jobs.spark import kafka_staging, mover
from tidegate.jobs.spark.mover import SparkMover
from tidegate.jobs.spec.pipeline import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture
def broker() -> KafkaInProcess:
    return KafkaInProcess()


def run_epoch(
    spec: PipelineSpec, session: SparkSession, folder: Path, cut: Cut, *, in_tasks: bool
) -> tuple[Any, MoveResult]:
    """Survey and counters of a first epoch over a cut, by tasks or by the driver."""
    store = InputView(LocalStore(folder / "store"), spec, folder / "view")
    found = SparkMover(store, spec, folder / "work", session=session)
    assert found._in_tasks
    found._in_tasks = in_tasks
    folders = AttemptFolders(BucketLayout("p"), CheckpointId(0, 1, "abcdef"))
    state = create_initial_state(spec)
    try:
        surveyed = found.survey(cut, state, folders)
        decision = decide(spec, state, replace(surveyed.survey, now=SECOND))
        moved = found.move(MoveOrder(cut, decision, (), folders, 0), surveyed)
    finally:
        found.close()
    return surveyed.survey.members, moved


@pytest.mark.parametrize("bad", [False, True])
def test_tasks_read_what_the_driver_reads(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    bad: bool,
) -> None:
    """Surveys, counters and segments, of several units; of odd messages Spark SQL reads the cut."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(1)
    values = [
        [message(draw.randint(0, 50), v=draw.random() / 3) for _ in range(200)] for _ in range(3)
    ]
    if bad:
        values[1][7:7] = [b"not json"]
    for partition, own in enumerate(values):
        broker.send("t", partition, own)
    spec = topic_spec(broker.servers)
    cut = plan_cut(spec, {partition: (0, len(own)) for partition, own in enumerate(values)})
    by_driver = run_epoch(spec, session, tmp_path / "driver", cut, in_tasks=False)
    if not bad:

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("the driver has read messages")

        monkeypatch.setattr(mover, "open_cut", refuse)
        monkeypatch.setattr(kafka_staging.KafkaStager, "stage_ranges", refuse)
    by_tasks = run_epoch(spec, session, tmp_path / "tasks", cut, in_tasks=True)
    assert by_tasks[0] == by_driver[0]
    assert by_tasks[1].counters == by_driver[1].counters
    assert by_tasks[1].counters.dead_lettered == bad
    assert [(s.kind, s.rows) for s in by_tasks[1].segments] == [
        (s.kind, s.rows) for s in by_driver[1].segments
    ]


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("ordered", "n > 3"),
        ("pass_through", "n > 3"),
        ("ordered", "abs(n) > 3"),  # Spark SQL evaluates it
    ],
)
def test_tasks_write_the_events_that_the_driver_writes(
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broker: KafkaInProcess,
    mode: str,
    where: str,
) -> None:
    """With the same positions, of messages that `where` keeps; a bad one is a dead letter."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 600_000)
    draw = random.Random(2)
    values = [[message(draw.randint(0, 50), v=draw.random()) for _ in range(200)] for _ in range(3)]
    values[1][7:7] = [b"not json"]
    for partition, own in enumerate(values):
        broker.send("t", partition, own)
    events = {"release": {"mode": mode}, "outputs": {}}
    spec = topic_spec(broker.servers, events=events, where=where)
    cut = plan_cut(spec, {partition: (0, len(own)) for partition, own in enumerate(values)})
    _, by_driver = run_epoch(spec, session, tmp_path / "driver", cut, in_tasks=False)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the driver has read messages")

    monkeypatch.setattr(mover, "open_cut", refuse)
    monkeypatch.setattr(kafka_staging.KafkaStager, "stage_ranges", refuse)
    _, by_tasks = run_epoch(spec, session, tmp_path / "tasks", cut, in_tasks=True)
    assert by_tasks.counters == by_driver.counters
    assert by_tasks.counters.dead_lettered == 1
    found = read_events(by_tasks, tmp_path / "tasks")
    assert found == read_events(by_driver, tmp_path / "driver")
    assert [row["position"] for row in found] == list(range(len(found)))
    assert found


def read_events(moved: MoveResult, folder: Path) -> list[dict[str, Any]]:
    """The rows of the events table in the order of their positions."""
    refs = moved.files["events"]
    rows = [
        row
        for ref in refs
        for row in pq.read_table(folder / "store" / ref.key, partitioning=None).to_pylist()
    ]
    return sorted(rows, key=lambda row: row["position"])


ODD: list[bytes | None] = [
    *(None, b"", b" ", b"null", b"7", b"[]", b'[{"n": 1}]', b"{}", b"{", b"}", b" {} {}"),
    *(b"\xff", b"{\xff}", b"\xef\xbb\xbf{}", b"\0\0\0\0\7{}", b"\0\0\0\0\7[]", b"\0{}"),
    *(b'{"n": 1,}', b"{'n': 1}", b'{"n": 01}', b'{"n": 1} x', b'{"x": 1, "x": 2, "y": 3}'),
    *(b'{"x": {"n": 1}}', b'{"N": 1}', b'{"n": {"x": NaN}}', b'{"n": "a\nb"}', b'{"x": "\\q"}'),
    *(b'{"": 1}', b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"n" 1}', b'{"n": -}', b"{1: 2}"),
    *(b"\x0b{}", b"\xc2\xa0{}", b'{"n": 1e}', b'{"n": tru}', b'{"n": "\\u12"}', b'{"n": .5}'),
]


@pytest.mark.parametrize("added", ["dead_letter", "ignore"])
def test_messages_that_are_dead_for_certain_are_so_in_spark(
    session: SparkSession, added: str
) -> None:
    """With the same reason and text, for odd messages and for damaged ones."""
    draw = random.Random(added)
    good = b'{"at": "2026-03-01T10:00:00Z", "n": 7, "price": 1.5}'
    damaged = []
    for _ in range(300):
        data = bytearray(good[: draw.choice([len(good), draw.randint(0, len(good))])])
        for _ in range(draw.randint(1, 3)):
            data[draw.randint(0, len(data)) : draw.randint(0, len(data))] = draw.choice(
                [b'"', b"{", b"}", b",", b":", b"\\", b" ", b"x", b"0", b"\xe4", b"\n"]
            )
        damaged.append(bytes(data[:200]))
    values = [*ODD, *damaged]
    evolution = {"added": added}
    source = messages_spec(evolution=evolution)
    reasons = [explain_dead_message(value, source) for value in values]
    found = decoded_rows(session, values, evolution=evolution)
    wanted = [row["_why"] for row in found]
    compared = [(v, r, w) for v, r, w in zip(values, reasons, wanted, strict=True) if r is not None]
    assert [(v, r) for v, r, _ in compared] == [(v, w) for v, _, w in compared]
    assert len(compared) > 100
    texts = [show_message(v, b"ann") for v, reason in zip(values, reasons, strict=True) if reason]
    assert texts == [
        row["_text"] for row, reason in zip(found, reasons, strict=True) if reason is not None
    ]


def test_removed_messages_end_the_attempt(
    session: SparkSession, tmp_path: Path, broker: KafkaInProcess
) -> None:
    """They are a transient error of the source, as in the driver, and no failed task."""
    broker.send("t", 0, [message(1)])
    spec = topic_spec(broker.servers)
    cut = plan_cut(spec, {0: (7, 9)})
    wanted: Exception = CHANGED_WHILE_READ(source="a", what="messages of t were removed")
    with pytest.raises(type(wanted), match=r"messages of t were removed"):
        run_epoch(spec, session, tmp_path, cut, in_tasks=True)
