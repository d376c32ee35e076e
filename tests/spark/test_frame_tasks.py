"""Pipelines whose rows are read by the Python tasks of a real Spark Connect server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from tests.rows.topic_inputs import message, plan_cut, topic_spec
from tests.servers.kafka_in_process import KafkaInProcess
from tests.servers.spark import connect_server
from tests.spark.connect_agreement import (
    FORMS,
    TABLES,
    count_late_files,
    explain_refusal,
    find_refused_versions,
    read_tables,
    run_far,
    run_far_topic,
    run_form,
)
from tests.spark.topic_epochs import run_epoch
from tidegate.checkpoints.errors import BUCKET_DENIED, STORE_UNAVAILABLE, StoreDeniedError
from tidegate.jobs.rows import cut_division
from tidegate.jobs.spark import frame_tasks, task_events
from tidegate.jobs.spark.python_tasks import StoreSample
from tidegate.jobs.spec.operations import SparkSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.jobs.engine.interfaces import Cut
    from tidegate.jobs.spec.pipeline import PipelineSpec

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]
CLIENT_VARIABLE = "TIDEGATE_TEST_CLIENT"
"""Hosts of the server have it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, whose hosts have tidegate and see the folders of the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CLIENT_VARIABLE, "tests")
        with connect_server(tmp_path_factory.mktemp("server")) as found:
            yield found.address


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """A process with a session of Spark Connect: one with a JVM can have none beside it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("form", FORMS)
def test_a_connect_server_gives_the_tables_of_a_classic_session(
    session: SparkSession,
    server: str,
    other_process: ProcessPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """Windows, events of all modes, late and dead rows; both agree with the oracle as well."""
    monkeypatch.setattr(cut_division, "UNIT_BYTES", 1)
    if form == "shuffle":
        monkeypatch.setattr(task_events, "RANGE_BYTES", 1000)
    there, files = other_process.submit(run_far, server, tmp_path / "far", form).result()
    pair = run_form(session, tmp_path / "near", form)
    here = read_tables(pair)
    for table in TABLES:
        assert here[table] or (table, form) == ("built", "pass_through")
        assert there[table] == here[table], table
    # The second job found the rows that the first one kept, and did not read them again.
    assert files == count_late_files(pair)


@pytest.mark.parametrize("odd", [[], [message(1, n="x"), b"{"]], ids=["plain", "odd"])
def test_hosts_of_a_server_read_topics_with_settings_of_their_own(
    session: SparkSession,
    server: str,
    other_process: ProcessPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    odd: list[bytes],
) -> None:
    """The plan names variables, which the hosts have; if they lack one, they say so.

    Odd messages are decoded in the tasks, too.
    """
    monkeypatch.setenv(CLIENT_VARIABLE, "tests")
    broker = KafkaInProcess()
    broker.send("t", 0, [*(message(second) for second in range(30)), *odd])
    kafka = {"options": {"client.id": f"env:{CLIENT_VARIABLE}"}}
    near = topic_spec(broker.servers, kafka=kafka)
    far = near.model_copy(update={"spark": SparkSpec(master=server)})
    cut = plan_cut(near, {0: (0, 30 + len(odd))})
    there = other_process.submit(_run_with_variable, far, tmp_path / "far", cut).result()
    members, moved = run_epoch(near, session, tmp_path / "near", cut)
    assert there == (members, moved.counters)
    kafka["options"]["client.id"] = "env:NOT_SET"
    other = topic_spec(broker.servers, kafka=kafka)
    other = other.model_copy(update={"spark": SparkSpec(master=server)})
    refusal = other_process.submit(explain_refusal, server, [], None, other).result()
    assert refusal is not None
    assert "NOT_SET" in refusal


def _run_with_variable(spec: PipelineSpec, folder: Path, cut: Cut) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CLIENT_VARIABLE, "tests")
        return run_far_topic(spec, folder, cut)


def test_hosts_that_cannot_run_tasks_say_why(
    server: str, other_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """They lack a package, or see another store; then the driver keeps Spark SQL."""
    (tmp_path / "here").write_text("{}")
    found = [
        other_process.submit(explain_refusal, server, libraries, sample).result()
        for libraries, sample in (
            ([], StoreSample(tmp_path.as_uri(), "here", is_there=True)),
            ([], StoreSample(tmp_path.as_uri(), "not_there", is_there=False)),
            ([], StoreSample(tmp_path.as_uri(), "not_there", is_there=True)),
            (["no_such_library"], None),
        )
    ]
    assert found == [
        None,
        None,
        f"FileNotFoundError: not_there is not in {tmp_path.as_uri()} as this host sees it",
        "ModuleNotFoundError: No module named 'no_such_library'",
    ]


def test_a_host_with_other_packages_computes_nothing(
    server: str, other_process: ProcessPoolExecutor
) -> None:
    """Neither at the start nor later, when a worker may be new; others on the server go on."""
    refused = other_process.submit(find_refused_versions, server).result()
    assert refused == ["spark.other_versions", "spark.other_versions"]
    assert other_process.submit(explain_refusal, server, [], None).result() is None


def test_only_a_store_that_refuses_a_host_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that does not answer says nothing about keys."""
    answer = Mock(side_effect=BUCKET_DENIED(location="s3://b", cause="no keys"))
    monkeypatch.setattr(frame_tasks, "open_task_store", lambda _: SimpleNamespace(stat=answer))
    sample = StoreSample("s3://b", "k", is_there=True)
    with pytest.raises(StoreDeniedError):
        frame_tasks._require_sample(sample)
    answer.side_effect = STORE_UNAVAILABLE(uri="s3://b", cause="cannot connect")
    frame_tasks._require_sample(sample)
