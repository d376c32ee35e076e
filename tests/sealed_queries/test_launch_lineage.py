"""OpenLineage events of jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from openlineage.client.serde import Serde

from tests.sealed_queries.conftest import JobBench
from tidegate.checkpoints.batch_notes import BatchReport, SourceProgress
from tidegate.errors import PoisonError
from tidegate.jobs.driver import epoch_listeners
from tidegate.jobs.driver.epoch_listeners import LaunchListeners, OpenLineageSender


def test_a_launch_is_a_run(bench: JobBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts, runs with each batch, and ends; the next launch is another run."""
    sent: list[dict[str, Any]] = []
    sender = OpenLineageSender(
        "spark-jobs", SimpleNamespace(emit=lambda event: sent.append(Serde.to_dict(event)))
    )
    monkeypatch.setattr(epoch_listeners, "create_lineage_sender", lambda _: sender)
    query, made = bench.query("q")
    query.facts.note_options(**{"topic": "out", "kafka.bootstrap.servers": "broker:9092"})
    query.facts.format = "kafka"
    sources = (SourceProgress(name="FileStreamSource[file:/in]", rows=3),)
    made.commit(0)
    bench.sealer.seal(query, 0, BatchReport(rows=3, sources=sources, sink="KafkaTable@1f"))
    first = LaunchListeners("clicks", dict, "uid", 1)
    first.record_batch(bench.sealed[0], 0.1)
    first.on_end(None)
    LaunchListeners("clicks", dict, "uid", 2).on_end(PoisonError("clicks: gone", code="x.y"))
    sender.close(10.0)
    assert [event["eventType"] for event in sent] == [
        *("START", "RUNNING", "COMPLETE"),
        *("START", "FAIL"),
    ]
    assert {event["job"]["name"] for event in sent} == {"clicks"}
    assert {event["job"]["namespace"] for event in sent} == {"spark-jobs"}
    runs = [event["run"]["runId"] for event in sent]
    assert (len(set(runs)), len(set(runs[:3]))) == (2, 1)
    (read,), (written,) = sent[1]["inputs"], sent[1]["outputs"]
    assert (read["namespace"], read["name"]) == ("file", "/in")
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 3
    assert (written["namespace"], written["name"]) == ("kafka://broker:9092", "out")
    assert sent[4]["run"]["facets"]["errorMessage"]["message"] == "clicks: gone"
