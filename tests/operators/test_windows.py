"""Closed periods as partitions.

Each once, also after restarts and restores; the example in the docs listens to them.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import PartitionedAssetTimetable
from tests.epochs import seal_epoch
from tests.operators.closed_hours import SPEC

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.operators import assets
from tidegate.operators.assets import (
    ClosedWindowsOperator,
    format_partition_key,
    list_closed_periods,
    window_asset,
)
from tidegate.operators.factory import build_dags

MINUTE = 60_000_000
HOUR = 60 * MINUTE
START = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "closed_hours.py"


class Outlets(defaultdict[Any, Any]):
    """What a task adds to its outlets."""

    def __init__(self) -> None:
        super().__init__(lambda: SimpleNamespace(add_partitions=self.keys_added.extend))
        self.keys_added: list[str] = []


def _seal(log: SlotLog, frontier: int | None) -> None:
    seal_epoch(log, decision={"frontier_after": frontier})


def _announce(run: str | None = None) -> list[str]:
    outlets = Outlets()
    operator = ClosedWindowsOperator(
        task_id="windows", pipeline="p", windows=["per_hour"], period=HOUR
    )
    context = {"outlet_events": outlets, "run_id": run or secrets.token_hex(4)}
    said = operator.execute(context)
    assert outlets.keys_added == said
    return said


def test_every_period_is_announced_once(empty_log: SlotLog) -> None:
    """From where the stream began, when the frontier has passed the end.

    A second run has nothing to say.
    """
    assert _announce() == []
    _seal(empty_log, None)  # before the first row
    _seal(empty_log, START + 10 * MINUTE)
    assert _announce() == []
    _seal(empty_log, START + 2 * HOUR)
    assert _announce() == ["2026-01-01T00:00:00", "2026-01-01T01:00:00"]
    assert _announce() == []
    _seal(empty_log, START + 3 * HOUR - 1)
    assert _announce() == []
    _seal(empty_log, START + 3 * HOUR)
    assert _announce() == ["2026-01-01T02:00:00"]


def test_a_run_that_is_tried_again_announces_its_periods_again(empty_log: SlotLog) -> None:
    """Airflow hears of the periods only when the task succeeds; the next run has new ones only."""
    _seal(empty_log, START)
    _seal(empty_log, START + 2 * HOUR)
    first = _announce("r")
    _seal(empty_log, START + 3 * HOUR)
    assert _announce("r") == first == ["2026-01-01T00:00:00", "2026-01-01T01:00:00"]
    assert _announce("next") == ["2026-01-01T02:00:00"]


def test_a_restore_announces_again(empty_log: SlotLog) -> None:
    """What was taken back closes again, and its listeners are called again."""
    _seal(empty_log, START)
    _seal(empty_log, START + HOUR)
    _seal(empty_log, START + 3 * HOUR)
    assert len(_announce()) == 3
    target = empty_log.read_slot(0, 2)
    assert target is not None
    empty_log.fork(empty_log.head(), target.epoch.id, request_id="r", who="ann", why="")
    assert _announce() == []
    _seal(empty_log, START + 2 * HOUR)
    assert _announce() == ["2026-01-01T01:00:00"]


def test_a_stream_that_catches_up_is_announced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than so many periods at once, oldest first."""
    monkeypatch.setattr(assets, "MAX_PERIODS", 3)
    assert list_closed_periods(START, START + 9 * HOUR, HOUR) == [
        START,
        START + HOUR,
        START + 2 * HOUR,
    ]
    assert list_closed_periods(None, START, HOUR) == []
    assert format_partition_key(START + 90 * MINUTE) == "2026-01-01T01:30:00"


def test_only_who_asks_gets_the_dag(tmp_path: Path) -> None:
    """`supervision.announce` switches it on; its task has the windows' assets as outlets."""
    (tmp_path / "p.yaml").write_text(SPEC)
    dag = build_dags(tmp_path)["p.windows"]
    assert [asset.uri for asset in dag.get_task("windows").outlets] == [
        window_asset("p", "per_hour").uri
    ]
    (tmp_path / "p.yaml").write_text(SPEC.replace("supervision: {announce: 1h}\n", ""))
    assert "p.windows" not in build_dags(tmp_path)


def test_the_example_listens_to_the_right_asset() -> None:
    """The DAG in the docs is scheduled on the partitions of `flights.per_carrier_hour`."""
    spec = importlib.util.spec_from_file_location("closed_hours", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.dag.schedule, PartitionedAssetTimetable)
    assert module.dag.schedule.asset_condition == window_asset("flights", "per_carrier_hour")
