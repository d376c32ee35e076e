"""Pipelines whose rows are read by the Python tasks of a real Spark Connect server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers.spark import connect_server
from tests.spark.connect_agreement import (
    FORMS,
    TABLES,
    count_late_files,
    read_tables,
    run_far,
    run_form,
)
from tidegate.jobs.rows import cut_division
from tidegate.jobs.spark import task_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, whose hosts have tidegate and see the folders of the tests."""
    with connect_server(tmp_path_factory.mktemp("server")) as found:
        yield found.address


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    """A process with a session of Spark Connect: one with a JVM can have none beside it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@pytest.mark.usefixtures("only_tasks")
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
        assert here[table], table
        assert there[table] == here[table], table
    # The second job found the rows that the first one kept, and did not read them again.
    assert files == count_late_files(pair)
