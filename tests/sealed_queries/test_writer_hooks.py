"""What the hooks see of a script's queries, with PySpark's own writer and no JVM."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from pyspark import SparkConf, SparkContext
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts, install_hooks


class Script:
    """Starts queries under the hooks."""

    def __init__(self, folder: str | None) -> None:
        self.started: list[WriterFacts] = []
        self._folder = folder

    def on_start(self, facts: WriterFacts) -> str | None:
        self.started.append(facts)
        return self._folder

    def writer(self) -> Any:
        frame = MagicMock()
        java = frame._jdf.writeStream.return_value
        for name in ("option", "format", "queryName", "trigger", "foreachBatch", "outputMode"):
            getattr(java, name).return_value = java
        return DataStreamWriter(frame)

    def run(self, script: Any) -> list[tuple[str, str]]:
        """The options that Spark got, in their order."""
        with install_hooks(lambda _: {}, lambda _: None, self.on_start):
            writer = self.writer()
            script(writer)
        return [call.args for call in writer._jwrite.option.call_args_list]


@pytest.mark.parametrize(
    "start",
    [
        lambda w: (
            w.queryName("q").option("checkpointLocation", "/own").format("parquet").start("/o")
        ),
        lambda w: w.start("/o", format="parquet", queryName="q", checkpointLocation="/own"),
        lambda w: w.options(CHECKPOINTLOCATION="/own", path="/o").start(
            format="parquet", queryName="q"
        ),
        lambda w: w.queryName("q").option("checkpointLocation", "/own").start(path="/o"),
    ],
)
def test_a_location_of_the_script_is_replaced(start: Any) -> None:
    """However the script names it: the last word is the folder of this launch."""
    script = Script("/launch/q")
    options = [pair for pair in script.run(start) if pair[0].lower() == "checkpointlocation"]
    assert options[-1] == ("checkpointLocation", "/launch/q")
    (facts,) = script.started
    assert (facts.name, facts.path) == ("q", "/o")
    assert facts.location in ("/own", "/launch/q")


def test_a_query_that_is_not_sealed_keeps_its_location() -> None:
    """The hooks change nothing then."""
    options = Script(None).run(lambda w: w.option("checkpointLocation", "/own").start("/o"))
    assert options == [("checkpointLocation", "/own")]


def test_the_kind_of_sink_and_trigger_is_seen() -> None:
    """A table, a function per batch, a format."""
    script = Script(None)
    script.run(lambda w: w.queryName("a").trigger(availableNow=True).toTable("t"))
    script.run(lambda w: w.queryName("b").trigger(continuous="1 second").format("kafka").start())
    assert [(one.name, one.format, one.trigger) for one in script.started] == [
        ("a", "table", "availableNow"),
        ("b", "kafka", "continuous"),
    ]


def test_a_query_gets_the_name_that_the_job_chooses() -> None:
    """Only one that has none."""
    script = Script(None)
    seen: list[list[Any]] = []
    starts: list[Any] = [lambda w: w.start("/o"), lambda w: w.queryName("own").start("/o")]

    def name_query(facts: WriterFacts) -> str | None:
        facts.name = facts.name or "chosen"
        return None

    with install_hooks(lambda _: {}, lambda _: None, name_query):
        for start in starts:
            writer = script.writer()
            start(writer)
            seen.append([call.args for call in writer._jwrite.queryName.call_args_list])
    assert seen == [[("chosen",)], [("own",)]]


def test_the_output_mode_is_seen() -> None:
    """Of the writer, or of the start."""
    script = Script(None)
    script.run(lambda w: w.queryName("a").outputMode("complete").format("memory").start())
    script.run(lambda w: w.queryName("b").format("memory").start(outputMode="update"))
    script.run(lambda w: w.queryName("c").format("memory").start())
    assert [(one.mode, one.is_forgotten()) for one in script.started] == [
        ("complete", False),
        ("update", True),
        (None, True),
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1 minute 30 seconds", 90),
        ("interval 500 milliseconds", 0.5),
        ("0 seconds", None),
        ("2 weeks 1 day", 1_296_000),
        ("1 second 500 microseconds", 1.0005),
    ],
)
def test_the_interval_of_a_trigger_is_seen(text: str, seconds: float | None) -> None:
    """As Spark reads the text; a trigger without a pause has none."""
    script = Script(None)
    script.run(lambda w: w.queryName("q").trigger(processingTime=text).format("noop").start())
    assert [one.interval for one in script.started] == [seconds]


def make_context(secrets: Collection[str] = (), **given: Any) -> tuple[dict[str, str], Any]:
    """The settings of a context that a script makes, and those that its JVM is launched with."""
    chosen = {"spark.cores.max": "2", "spark.app.name": "ours", "spark.my.key": "k3y"}
    with (
        patch.object(SparkContext, "_ensure_initialized") as launch,
        patch.object(SparkContext, "_do_init") as begin,
        install_hooks(lambda _: chosen, lambda _: None, lambda _: None, secrets),
    ):
        SparkContext(**given)
    names = inspect.signature(SparkContext._do_init).parameters
    arguments = dict(zip([*names][1:], begin.call_args.args, strict=False))
    assert arguments["master"] is arguments["appName"] is None
    launched = launch.call_args_list[0].kwargs["conf"]
    return dict(arguments["conf"].getAll()), dict(launched.getAll())


def test_a_context_of_the_script_gets_the_settings_of_the_job() -> None:
    """Also one that no builder of a session makes; what the job sets wins."""
    conf = SparkConf(loadDefaults=False).set("spark.cores.max", "9").set("spark.x", "y")
    found, _ = make_context(conf=conf, master="local[1]", appName="theirs")
    assert (found["spark.cores.max"], found["spark.x"]) == ("2", "y")
    assert (found["spark.master"], found["spark.app.name"]) == ("local[1]", "ours")
    found, _ = make_context()
    assert found["spark.cores.max"] == "2"


def test_a_secret_is_no_argument_of_the_jvm() -> None:
    """Everyone on the host could read it there."""
    found, launched = make_context(secrets=["spark.my.key"])
    assert found["spark.my.key"] == "k3y"
    assert "spark.my.key" not in launched
    assert launched["spark.cores.max"] == "2"


def test_pyspark_is_as_before_after_the_script() -> None:
    """Other code of the process starts queries as usual."""
    before = DataStreamWriter.start
    with pytest.raises(ZeroDivisionError):
        Script(None).run(lambda _: 1 / 0)
    assert DataStreamWriter.start is before
