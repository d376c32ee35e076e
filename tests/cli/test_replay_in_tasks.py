"""`tidegate replay` lets tasks read the sealed store and write into a temporary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cli.check_replay_quality import _read_epoch_and_parent, _replay_in_scratch_store
from tidegate.jobs.driver.pipeline_run import RunOptions, run_until_end
from tidegate.jobs.engine.recorded_epochs import find_own_spec
from tidegate.jobs.spark import mover
from tidegate.jobs.spark.local_session import LocalSession
from tidegate.jobs.spec.loader import load_spec

SPEC = """\
apiVersion: tidegate/v1
name: p
sources: {a: {path: in, format: json, schema: {t: timestamp, v: double}, event_time: t, lag: 5s,
  limits: {objects: 1}}}
windows: {w: {kind: tumbling, size: 10s, keys: [], aggregates: {n: count(*), s: sum(v)}}}
"""


def test_rows_that_waited_are_read_below_the_temporary_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are in the sealed store, and what the replay writes is not. One row is a dead letter.

    A spec that names a cluster is replayed here: its tasks would not see the temporary store.
    """
    sessions: list[Any] = []

    def open_local_session(spec: Any) -> Any:
        sessions.append(spec.spark.master)
        return LocalSession()

    monkeypatch.setattr(mover, "open_session", open_local_session)
    store, file = LocalStore(tmp_path / "store"), tmp_path / "p.yaml"
    file.write_text(SPEC)
    for number in range(4):
        times = (10 + number, 12 + number, 3 + 20 * number)
        lines = [f'{{"t": "2026-01-01T00:01:{t:02}Z", "v": {t / 7}}}\n' for t in times]
        store.put(f"in/{number}.json", "".join(lines).encode())
    run_until_end(load_spec(file), RunOptions(store.url, ends_input=True))
    before = sorted(path for path in (tmp_path / "store").rglob("*"))
    file.write_text(SPEC + "spark: {master: 'spark://far:7077'}\n")
    log, checked = SlotLog(store, "p"), 0
    for slot in range(1, log.head().slot + 1):
        sealed, parent = _read_epoch_and_parent(log, slot)
        spec = find_own_spec(load_spec(file), sealed, store)
        spec = spec.model_copy(update={"spark": load_spec(file).spark})
        result = _replay_in_scratch_store(spec, sealed, parent, store)
        assert result.is_equal, result
        checked += sum(segment.kind == "order" for segment in parent.segments) if parent else 0
    assert checked > 2
    assert sorted(path for path in (tmp_path / "store").rglob("*")) == before
    assert set(sessions) == {"local[2]"}


def test_rows_that_the_driver_wrote_are_compared_with_the_sealed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files have the same keys in both stores, so each was compared with itself."""
    monkeypatch.setattr(mover, "open_session", lambda _: LocalSession())
    store, file = LocalStore(tmp_path / "store"), tmp_path / "p.yaml"
    file.write_text(
        "apiVersion: tidegate/v1\nname: p\n"
        "sources: {a: {path: in, format: json, event_time: t, lag: 5s,"
        " schema: {t: timestamp, kind: string, n: long},"
        " barriers: {kind: kind, types: [cut], id: n}}}\n"
    )
    lines = [f'{{"t": "2026-01-01T00:00:0{n}Z", "kind": "cut", "n": {n}}}' for n in (1, 2)]
    store.put("in/a.json", "\n".join(lines).encode())
    run_until_end(load_spec(file), RunOptions(store.url, ends_input=True))
    log = SlotLog(store, "p")
    slot = next(
        filled.epoch.slot
        for filled in log.epochs_between(0, 1, log.head().slot)
        if "barriers" in filled.epoch.files
    )
    sealed, parent = _read_epoch_and_parent(log, slot)
    assert _replay_in_scratch_store(load_spec(file), sealed, parent, store).is_equal
    [barriers] = sealed.files["barriers"]
    path = store.local_path(barriers.key)
    assert path is not None
    pq.write_table(pq.read_table(path).slice(1), path)
    result = _replay_in_scratch_store(load_spec(file), sealed, parent, store)
    assert result.tables["barriers"][2] == 1
