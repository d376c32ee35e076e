"""Which of the DAGs that Airflow calls stale are streams someone still wants to see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints.driver_requests import DesiredState
from tidegate.operators.airflow_port.database import AirflowQueries, _explain_stale_dag
from tidegate.operators.stream_view import StreamView

from .history import History, drives

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FILE = ("dags-folder", "tidegate_dags.py")


def dag(parsed: datetime | None = NOW) -> Any:
    """A stale DAG of the file, last seen in it at this time."""
    return SimpleNamespace(bundle_name=FILE[0], relative_fileloc=FILE[1], last_parsed_time=parsed)


def test_a_broken_file_hides_no_stream() -> None:
    """Every stream that the file had when it was last read is shown."""
    assert _explain_stale_dag(dag(), 0, {FILE: NOW + timedelta(seconds=20)}, {FILE}) == "errors"
    assert _explain_stale_dag(dag(), 1, {FILE: NOW}, {FILE}) == "errors"


def test_a_stream_removed_before_stays_hidden() -> None:
    """Errors make every DAG that a file ever had stale.

    One that was removed from it long ago is not meant.
    """
    assert _explain_stale_dag(dag(NOW - timedelta(days=9)), 0, {FILE: NOW}, {FILE}) is None
    assert _explain_stale_dag(dag(None), 0, {FILE: NOW}, {FILE}) is None


def test_a_removed_stream_is_hidden_when_nothing_runs() -> None:
    """Its spec is gone, or the whole file.

    While a run is active its driver may live, so it is shown.
    """
    assert _explain_stale_dag(dag(), 0, {FILE: NOW}, set()) is None
    assert _explain_stale_dag(dag(), 1, {FILE: NOW}, set()) == "missing"


def test_the_list_says_which_streams_the_user_may_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right to start `<p>.recover`; a stream whose DAG is not there cannot be restored."""
    queries = AirflowQueries()
    streams = [{"dag_id": f"{name}.stream"} for name in ("a", "b", "c", "d")]
    readable = {"a.stream", "a.recover", "b.stream", "b.recover", "c.stream"}
    monkeypatch.setattr(queries, "_query_streams", lambda: streams)
    monkeypatch.setattr(queries, "_readable_dag_ids", lambda user: readable)
    monkeypatch.setattr(queries, "_may_start", lambda user, dag_id: dag_id in user)
    shown = queries.list_streams({"a.recover", "c.recover", "d.recover"})
    assert [(one["dag_id"], one["may_restore"]) for one in shown] == [
        ("a.stream", True),
        ("b.stream", False),
        ("c.stream", False),
    ]


@pytest.mark.parametrize(
    ("unread", "says"),
    [("errors", "cannot read its DAG file"), ("missing", "does not find its DAG")],
)
def test_the_page_says_that_nothing_new_starts(unread: str, says: str) -> None:
    """A running stream whose DAG Airflow does not find needs attention, and goes on."""
    store = MemoryStore()
    history = History(store, "p")
    history.extend(2)
    keeper = drives(store, "p")
    history.wanted(DesiredState.RUN)
    history.says("running")
    for found in (
        StreamView(store, "p").summary(unread=unread),
        StreamView(store, "p").detail(unread=unread),
    ):
        assert (found["state"], found["tone"], found["unread"]) == ("running", "warn", unread)
        assert says in found["findings"][0]["says"]
        assert "nothing new starts" in found["findings"][0]["says"]
    keeper.stop()
