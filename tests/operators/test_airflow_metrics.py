"""What a real triggerer and real tasks send to a collector, as Airflow's own configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers.otlp import collecting

from .conftest import cockpit_of, spec_of
from .stream_metrics import STREAM_METRICS

pytestmark = [pytest.mark.airflow, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_lost_driver_is_measured(tmp_path: Path) -> None:
    """Its stream's looks and ages, that it was lost, and that another driver was started in its
    place.
    """
    with collecting() as collector:
        host, port = collector.url.removeprefix("http://").split(":")
        sending = {
            "OTEL_ON": "True",
            "OTEL_HOST": host,
            "OTEL_PORT": port,
            "OTEL_INTERVAL_MILLISECONDS": "1000",
        }
        metrics = {f"AIRFLOW__METRICS__{name}": value for name, value in sending.items()}
        with cockpit_of(tmp_path, {"lost": spec_of("lost")}, metrics) as cockpit:
            cockpit.known("lost.stream")
            cockpit.runs["lost"] = cockpit.api.trigger_dag("lost.stream")
            cockpit.running("lost")
            cockpit.until(
                lambda: collector.last("airflow_tidegate_stream_watched", pipeline="lost") == 1,
                60,
                "a watched stream",
            )
            before = cockpit.kill("lost")
            cockpit.until(
                lambda: cockpit.token("lost") == before + 1,
                75,
                "new driver in place of the lost one",
            )
            seen = {"pipeline": "lost", "state": "lost"}
            cockpit.until(
                lambda: collector.last("airflow_tidegate_stream_ended_total", **seen) == 1,
                60,
                "word of the loss",
            )
            launched = {"pipeline": "lost", "why": "replacement"}
            cockpit.until(
                lambda: collector.last("airflow_tidegate_driver_launched_total", **launched),
                60,
                "word of the launch",
            )
            cockpit.until(
                lambda: collector.last("airflow_tidegate_stream_seal_age", pipeline="lost"),
                60,
                "the age of a seal",
            )
    ours = {
        name.removesuffix("_total")
        for name in collector.names
        if name.startswith("airflow_tidegate_")
    }
    assert ours - {f"airflow_{name}".replace(".", "_") for name in STREAM_METRICS} == set()
