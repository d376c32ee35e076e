"""The task around a batch run: what it is asked for, what it makes of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import CronDataIntervalTimetable
from airflow.sdk.exceptions import DagRunTriggerException
from tests.operators.closed_hours import SPEC

from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.operators import child_operators
from tidegate.operators.child_operators import BackfillOperator
from tidegate.operators.factory import build_dags

FOUND = {
    "equal": False,
    "windows": {"w": {"equal": 3, "different": 1, "only_stream": 0, "only_batch": 2}},
}


@pytest.fixture
def said(empty_store: Store, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands; the process answers with a difference."""
    empty_store.put("p/backfills/x.json", json.dumps(FOUND).encode())
    return _answer(monkeypatch, 0, "p/backfills/x.json\n")


def _answer(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str = "", err: str = ""
) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(_access: Any, command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(child_operators, "run_child", run)
    return commands


def _run(
    start: str = "2026-01-01T00:00:00Z", fail: bool = False, replace: bool = False, **context: Any
) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "start": start,
        "end": "2026-01-02T00:00:00Z",
        "fail": str(fail),
        "replace": str(replace),
    }
    return BackfillOperator(task_id="backfill", pipeline="p", spec="p.yaml", **chosen).execute(
        context
    )


def test_the_comparison_is_the_result(said: list[list[str]]) -> None:
    """The range goes to the process, its result comes from the bucket.

    A difference alone is not a failure.
    """
    found = _run()
    assert (found["equal"], found["key"]) == (False, "p/backfills/x.json")
    assert said[0][1:5] == ["-m", "tidegate.jobs.driver.backfill", "p.yaml", "--store"]
    assert said[0][-4:] == ["--start", "2026-01-01T00:00:00Z", "--end", "2026-01-02T00:00:00Z"]


def test_a_difference_fails_who_asked_for_that(said: list[list[str]]) -> None:
    """For a scheduled proof."""
    with pytest.raises(PoisonError, match="stream and batch differ"):
        _run(fail=True)


def test_a_difference_is_replaced_by_a_merge(
    said: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range's late rows become a request, and the splice's DAG is started with it.

    Without late rows nothing is.
    """
    asked: list[tuple[str, ...]] = []
    answers = [{"request": "s1"}, {}]

    def tidegate(
        access: Any, pipeline: str, *command: str, empty_on: tuple[str, ...]
    ) -> dict[str, Any]:
        asked.append(command)
        return answers.pop(0)

    monkeypatch.setattr(child_operators, "run_tidegate", tidegate)
    kept: dict[str, Any] = {}
    task = SimpleNamespace(xcom_push=lambda key, value: kept.update({key: value}))
    with pytest.raises(DagRunTriggerException) as started:
        _run(replace=True, ti=task)
    assert (started.value.trigger_dag_id, started.value.conf) == ("p.splice", {"request": "s1"})
    assert asked[0][:5] == ("splice", "late", "p.yaml", "--output", "w")
    assert asked[0][5:9] == ("--since", "2026-01-01T00:00:00Z", "--until", "2026-01-02T00:00:00Z")
    assert kept["return_value"]["request"] == "s1"
    assert _run(replace=True, ti=task)["equal"] is False


def test_a_run_by_hand_needs_a_range(said: list[list[str]]) -> None:
    """Without one nothing is started."""
    with pytest.raises(ConfigurationError, match="needs a range"):
        _run(start="")
    assert said == []


@pytest.mark.parametrize(
    ("code", "kind"), [(2, ConfigurationError), (1, PoisonError), (-9, TransientError)]
)
def test_a_batch_run_that_failed_says_why(
    said: list[list[str]], monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """Its exit code is the class of the failure."""
    _answer(monkeypatch, code, err="the store is away")
    with pytest.raises(kind, match="the store is away"):
        _run()


def test_a_schedule_has_a_data_interval(tmp_path: Path) -> None:
    """So that Airflow's own backfill runs it for any past day.

    Without `supervision.backfill` it is run by hand.
    """
    (tmp_path / "p.yaml").write_text(SPEC)
    assert build_dags(tmp_path)["p.backfill"].schedule is None
    (tmp_path / "p.yaml").write_text(SPEC.replace("announce: 1h", "backfill: '@daily'"))
    assert isinstance(build_dags(tmp_path)["p.backfill"].schedule, CronDataIntervalTimetable)
