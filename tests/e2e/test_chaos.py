"""Real crashes at random moments, and while PostgreSQL is fed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chaos import BUCKET, chaos
from tests.e2e.drivers import SIGKILLED, Steady
from tests.e2e.feed import SPEC
from tests.servers.minio import RealMinio
from tests.servers.minio import running as running_minio
from tests.servers.postgres import running
from tidegate.jobs.sinks.published_tables import read_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def minio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealMinio]:
    """A MinIO of its own, to be killed."""
    with running_minio(tmp_path, BUCKET) as found:
        for key, value in found.environment().items():
            monkeypatch.setenv(key, value)
        yield found


def test_a_real_driver_feeds_postgresql(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed while it publishes, then to the end.

    PostgreSQL holds what the tables hold, each window's newest revision once.
    """
    with running(tmp_path_factory.mktemp) as server:
        sinks = f"sinks:\n  warehouse: {{kind: postgres, url: '{server.url}', windows: upsert}}\n"
        steady = Steady(tmp_path, 8, spec=SPEC + sinks)
        assert steady.run("publish.start:5") == SIGKILLED, steady.log_text()
        assert steady.run() == 0, steady.log_text()
        events = steady.table("events")
        wanted = sorted(zip(events["_source"].to_pylist(), events["_seq"].to_pylist(), strict=True))
        assert sorted(server.rows("select _source, _seq from steady.events")) == wanted
        current = read_table(steady.spec, steady.store(), "per_minute", current_only=True)
        rows = zip(
            current["item"].to_pylist(),
            current["window_start"].to_pylist(),
            current["total"].to_pylist(),
            strict=True,
        )
        found = server.rows("select item, window_start, total from steady.per_minute")
        assert sorted(found) == sorted(rows)


def test_three_kills_leave_no_trace(minio: RealMinio, tmp_path: Path) -> None:
    """Driver, JVM and MinIO at random moments.

    The tables equal the undisturbed run's (`make chaos` does fifty, and pauses the driver).
    """
    outcome = chaos(tmp_path, minio, kills=3, seed=1)
    sys.stdout.write(outcome.text() + "\n")
    assert outcome.problems == []
    assert sum(map(len, outcome.gaps.values())) == 3
    assert outcome.steps > 30
