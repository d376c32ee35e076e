"""Where settings of Spark depend on who started the driver."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.spark.agreement import spec_of
from tidegate.jobs.spark import spark_session
from tidegate.jobs.spec.operations import SparkSpec

_SOCKETS = "spark.python.unix.domain.socket.enabled"


class Builder:
    """Takes the settings that Spark's builder would get."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.builder = self

    def appName(self, _: str) -> Builder:  # noqa: N802
        """Take a name, as Spark's builder does."""
        return self

    def master(self, _: str) -> Builder:
        """Take a master."""
        return self

    def config(self, *, map: dict[str, Any]) -> Builder:
        """Take settings."""
        self.settings = map
        return self

    def getOrCreate(self) -> Builder:  # noqa: N802
        """Make no session."""
        return self


@pytest.mark.parametrize(
    ("master", "submitted", "uses_sockets"),
    [("local[2]", False, True), ("local[2]", True, False), ("spark://host:7077", False, False)],
)
def test_only_a_driver_without_a_cluster_uses_unix_sockets(
    monkeypatch: pytest.MonkeyPatch, master: str, submitted: bool, uses_sockets: bool
) -> None:
    """In a container of YARN their paths are longer than a socket may have."""
    builder = Builder()
    monkeypatch.setattr(spark_session, "SparkSession", builder)
    monkeypatch.setattr(spark_session, "is_submitted", lambda: submitted)
    spark_session.start_classic_session(SparkSpec(master=master), "p")
    assert (_SOCKETS in builder.settings) is uses_sockets


@pytest.mark.parametrize(
    ("jvm", "master", "where", "is_quick", "are_executors_quick"),
    [
        ("auto", "local[2]", "k <> 'x'", True, True),
        ("auto", "local[2]", "xxhash64(k) <> 1", False, False),
        ("auto", "spark://host:7077", "k <> 'x'", True, True),
        ("auto", "spark://host:7077", "xxhash64(k) <> 1", True, False),
        ("quick", "local[2]", "xxhash64(k) <> 1", True, False),
        ("throughput", "local[2]", "k <> 'x'", False, False),
    ],
)
def test_a_jvm_compiles_lightly_unless_it_evaluates_rows(
    monkeypatch: pytest.MonkeyPatch,
    jvm: str,
    master: str,
    where: str,
    is_quick: bool,
    are_executors_quick: bool,
) -> None:
    """`auto`, which is the default, knows it by the master and by the expressions."""
    builder = Builder()
    monkeypatch.setattr(spark_session, "SparkSession", builder)
    monkeypatch.setattr(spark_session, "is_submitted", lambda: False)
    spec = spec_of({"a": {"where": where}}, spark={"master": master, "jvm": jvm})
    spark_session.open_session(spec)
    assert ("TieredStopAtLevel" in builder.settings["spark.driver.extraJavaOptions"]) is is_quick
    assert ("spark.executor.defaultJavaOptions" in builder.settings) is are_executors_quick
    assert SparkSpec().jvm == "auto"


def test_the_end_of_a_session_does_not_wait_for_the_server_of_accumulators(
    tmp_path: Path,
) -> None:
    """PySpark's server looks once in a second whether it shall end, and nothing needs it then.

    Its socket goes at once: the process may end before the server does.
    """
    may_end, stopped = Event(), Event()
    socket = tmp_path / "accumulators"
    socket.touch()
    server = SimpleNamespace(shutdown=may_end.wait, server_address=str(socket))
    context = SimpleNamespace(_accumulatorServer=server)
    session: Any = SimpleNamespace(sparkContext=context, stop=stopped.set)
    spark_session.stop_session(session)
    assert stopped.is_set()
    assert context._accumulatorServer is None
    assert not socket.exists()
    may_end.set()
