"""A person ends a stream's task: what the API server does about the driver.

No Airflow runs; the clock is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from tests.operators.clocks import World
from tests.servers.memory_store import Fault, MemoryStore

from tidegate.checkpoints.driver_requests import (
    DesiredState,
    RequestKind,
    list_pending_requests,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.operators import task_state_listener
from tidegate.operators.airflow_port import task_marks
from tidegate.operators.plugin import _LISTENER
from tidegate.operators.task_state_listener import MarkedTask, StopOnMark

ELSEWHERE = ProcessIdentity(
    driver="d", host="elsewhere", boot="b", namespace="n", pid=7, start_ticks=9
)
WHY = "the task was set to failed in Airflow"


def mark(*, asleep: bool = True) -> MarkedTask:
    """Of the first try of run `r`."""
    return MarkedTask("try", "p.stream", "r", "failed", asleep, datetime(2026, 1, 1, tzinfo=UTC))


class Stage:
    """A store with a stream that runs, and a driver that drains when it is asked by its token."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store, self.clock = store or MemoryStore(), World(self.beat)
        self.said: list[str] = []
        self.lease: Lease | None = None
        self.drive()

    def drive(self) -> None:
        """A driver begins, as run `r` wants it."""
        set_desired_state(self.store, "p", DesiredState.RUN, who="ann", why="run r")
        self.lease = Lease.acquire(self.store, "p", ELSEWHERE, clock=self.clock)

    def beat(self) -> None:
        """The driver looks for requests, whenever someone waits."""
        asked = [
            request
            for request in list_pending_requests(self.store, "p")
            if request.kind is RequestKind.DRAIN
        ]
        if self.lease is not None and self.lease.token in [request.token for request in asked]:
            self.lease.release()
            self.lease = None

    def obey(
        self, objections: Callable[[], str | None] = lambda: None, *, asleep: bool = True
    ) -> None:
        """Bring a mark to the driver."""
        StopOnMark(
            mark(asleep=asleep),
            lambda: self.store,
            objections,
            clock=self.clock,
            say=self.said.append,
        ).run()

    @property
    def wish(self) -> tuple[str, str]:
        """What shall be, and why."""
        desired = read_desired_state(self.store, "p")
        return desired.state.value, desired.why


def objections(*answers: str | None) -> Callable[[], str | None]:
    """These, one after another; then the last one forever."""
    left: Iterator[str | None] = iter(answers)
    return lambda: next(left, answers[-1])


def test_a_mark_stops_the_driver_and_nothing_starts_it() -> None:
    """The driver is asked by its token to drain, and the stream shall be stopped."""
    stage = Stage()
    stage.obey()
    assert stage.lease is None
    assert stage.wish == ("stopped", WHY)
    assert stage.said[-1] == "the driver drained and stopped by itself"


@pytest.mark.parametrize(
    "why", ["the task was cleared since", "another run waits or has begun, and adopts the driver"]
)
def test_a_mark_that_no_longer_holds_changes_nothing(why: str) -> None:
    """A clear right after the mark, a run that waits: the driver stays."""
    stage = Stage()
    stage.obey(objections(why))
    assert stage.wish == ("run", "run r")
    assert (stage.lease is not None, list_pending_requests(stage.store, "p")) == (True, [])
    assert stage.said == [f"{why}: the driver stays"]


def test_a_clear_that_overtakes_the_mark_is_not_undone_by_it() -> None:
    """The re-run has adopted the driver before the mark was written.

    What shall be is as before, no one is asked to stop.
    """
    stage = Stage()
    stage.obey(objections(None, "the task was cleared since"))
    assert stage.wish == ("run", "run r")
    assert list_pending_requests(stage.store, "p") == []


def test_the_driver_of_a_re_run_is_not_stopped_by_an_old_mark() -> None:
    """Another driver has begun while the mark was on its way.

    The request names the old one's token only.
    """
    stage = Stage()

    def meanwhile() -> None:
        assert stage.lease is not None
        stage.lease.release()
        stage.drive()

    answers = objections(None, None)

    def ask() -> str | None:
        if read_desired_state(stage.store, "p").state is DesiredState.STOPPED:
            meanwhile()
        return answers()

    stage.obey(ask)
    stage.clock.sleep(5)
    assert stage.lease is not None
    assert stage.said[-1] == "no driver was running"


def test_a_task_that_was_awake_is_looked_after() -> None:
    """It says `run` and launches a driver before its worker hears of the mark.

    Both are taken back, once for each driver.
    """
    stage = Stage()
    assert stage.lease is not None
    stage.lease.release()
    stage.lease = None
    waited: list[float] = []

    def beat() -> None:
        waited.append(stage.clock.monotonic())
        if len(waited) == 3:
            stage.drive()
        Stage.beat(stage)

    stage.clock.meanwhile = beat
    stage.obey(asleep=False)
    assert stage.lease is None
    assert stage.wish == ("stopped", WHY)
    assert stage.said.count("the driver drained and stopped by itself") == 1
    assert stage.clock.monotonic() >= 120


def test_another_persons_wish_after_the_mark_is_left_alone() -> None:
    """While a task that was awake is looked after, a person may start the stream again."""
    stage = Stage()

    def beat() -> None:
        if stage.lease is None and stage.wish[0] == "stopped":
            stage.drive()
            set_desired_state(stage.store, "p", DesiredState.RUN, who="uwe", why="run another")
        Stage.beat(stage)

    stage.clock.meanwhile = beat
    stage.obey(asleep=False)
    assert stage.wish == ("run", "run another")
    assert stage.lease is not None


def test_a_restore_says_itself_what_shall_be() -> None:
    """The mark of a run during a restore changes nothing."""
    stage = Stage()
    set_desired_state(stage.store, "p", DesiredState.RECOVERING, who="ann", why="a restore")
    stage.obey()
    assert stage.wish == ("recovering", "a restore")


def test_what_the_trigger_does_as_well_is_done_once() -> None:
    """on_kill asks the same driver for the same try: there is one request."""
    from tidegate.operators.driver_shutdown import StopOrder, StopTimeouts, stop_driver

    stage = Stage()
    stage.clock.meanwhile = lambda: None
    stop_driver(
        stage.store,
        "p",
        StopOrder("airflow", WHY, asker="try", timeouts=StopTimeouts(0, 0, 0)),
        clock=stage.clock,
    )
    asked = list_pending_requests(stage.store, "p")
    assert [request.token for request in asked] == [1]
    again = Stage()
    again.clock.meanwhile = lambda: None
    for _ in range(2):
        stop_driver(
            again.store,
            "p",
            StopOrder("airflow", WHY, token=1, asker="try", timeouts=StopTimeouts(0, 0, 0)),
            clock=again.clock,
        )
    assert [request.id for request in list_pending_requests(again.store, "p")] == [asked[0].id]


def test_a_store_that_is_away_is_asked_again_for_a_while() -> None:
    """The mark waits for it; after five minutes it is given up, and that is said."""
    away = [True]
    store = MemoryStore(
        hook=lambda request: Fault.REFUSED if away[0] and request.key.startswith("p/") else None
    )
    away[0] = False
    stage = Stage(store)
    away[0] = True

    def beat() -> None:
        if stage.clock.monotonic() > 60:
            away[0] = False
            Stage.beat(stage)

    stage.clock.meanwhile = beat
    stage.obey()
    assert stage.wish == ("stopped", WHY)
    away[0], stage.clock.meanwhile = True, lambda: None
    stage.obey()
    assert stage.said[-1].startswith("given up, the driver may go on: ")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[MarkedTask]:
    """Marks for which a thread would be started."""
    found: list[MarkedTask] = []
    monkeypatch.setattr(task_state_listener, "_start_stop_thread", found.append)
    return found


def task(task_id: str = "stream", dag_id: str = "p.stream") -> Any:
    """As Airflow's API server has it."""
    return SimpleNamespace(id="try", dag_id=dag_id, task_id=task_id, run_id="r", trigger_id=3)


def test_only_a_person_s_mark_of_a_stream_is_heard(
    heard: list[MarkedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and the scheduler name the state before; other tasks are none of our business."""
    monkeypatch.setattr(task_marks, "object_session", lambda task: None)
    _LISTENER.on_task_instance_failed("running", task())
    _LISTENER.on_task_instance_success("running", task())
    _LISTENER.on_task_instance_success(None, task("other"))
    _LISTENER.on_task_instance_success(None, task(dag_id="p.recover"))
    assert heard == []
    _LISTENER.on_task_instance_failed(None, task())
    _LISTENER.on_task_instance_success(None, task())
    _LISTENER.on_task_instance_skipped(None, task())
    assert [(mark.pipeline, mark.state, mark.asleep) for mark in heard] == [
        ("p", "failed", True),
        ("p", "success", True),
        ("p", "skipped", True),
    ]


def test_a_mark_counts_when_it_is_committed(
    heard: list[MarkedTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, and not if the request fails."""
    engine = create_engine("sqlite://", poolclass=NullPool)
    with Session(engine) as session:
        monkeypatch.setattr(task_marks, "object_session", lambda task: session)
        session.execute(text("select 1"))
        task_state_listener.on_task_marked(task(), "failed")
        session.rollback()
        assert heard == []
    with Session(engine) as session:
        session.execute(text("select 1"))
        task_state_listener.on_task_marked(task(), "failed")
        assert heard == []
        session.commit()
        assert len(heard) == 1
        session.execute(text("select 1"))
        session.commit()
        assert len(heard) == 1
