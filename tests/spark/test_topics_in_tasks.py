"""Topics are read and decoded by Spark's Python tasks; the driver only plans ranges."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rows.topic_inputs import message, plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.spark.agreement import SECOND
from tidegate.checkpoints.bucket_layout import AttemptFolders, BucketLayout, CheckpointId
from tidegate.checkpoints.local_store import LocalStore
from tidegate.jobs.engine.interfaces import Cut, MoveOrder, MoveResult
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.rows import cut_division
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
