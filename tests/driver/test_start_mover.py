"""What a driver starts of Spark before its first epoch."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.harness import spec_of
from tidegate.jobs.driver.pipeline_run import _start_mover
from tidegate.jobs.spark import mover

_OBJECTS = {"path": "inbox/a/", "schema": {"t": "timestamp"}, "event_time": "t", "lag": "1s"}
_TOPIC = {
    **{name: value for name, value in _OBJECTS.items() if name != "path"},
    "kind": "kafka",
    "kafka": {"servers": "b:9092", "topic": "clicks"},
}


_TLS = {**_TOPIC, "kafka": {**_TOPIC["kafka"], "options": {"security.protocol": "SSL"}}}  # type: ignore[dict-item]


class _Mover:
    """Notes when Spark is started."""

    started = threading.Event()

    def __init__(self, *_: object) -> None:
        self.started.clear()

    @property
    def session(self) -> object:
        """Start Spark."""
        self.started.set()
        return object()

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("source", [_OBJECTS, _TOPIC, _TLS])
def test_no_source_needs_a_jvm_before_the_first_question(
    source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover starts one when it needs it."""
    monkeypatch.setattr(mover, "SparkMover", _Mover)
    run: Any = SimpleNamespace(spec=spec_of(sources={"a": source}), work=tmp_path)
    with _start_mover(run, None, []) as wait_for_mover:  # type: ignore[arg-type]
        wait_for_mover()
        assert not _Mover.started.is_set()
