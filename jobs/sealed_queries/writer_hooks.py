"""Hooks into PySpark: they see which queries a script starts, and set their checkpoint folders.

The script stays as it is. The hooks replace methods of two classes of the Python API while it runs;
queries that are started in Scala or Java are not seen.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.checkpoints.batch_notes import TOPIC_SCHEME

_LOCATION = "checkpointlocation"
# Option of a writer -> fact.
_OPTIONS = {_LOCATION: "location", "path": "path", "topic": "topic", "usermetadata": "note"}
_WRITER = "_tidegate_facts"  # attribute of a `DataStreamWriter`
_NOT_BY_V2 = "spark.sql.streaming.disabledV2MicroBatchReaders"
# Spark reads no unit above a week in a trigger, as months differ in length.
_SECONDS = {
    "microsecond": 1e-6,
    "millisecond": 1e-3,
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 604_800,
}
_INTERVAL_PART = re.compile(rf"([\d.]+)\s*({'|'.join(_SECONDS)})")
_REDACTION = "spark.redaction.regex"
_REDACTED = "(?i)secret|password|token|access[.]?key"  # Spark's default
_KAFKA = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


@dataclass(slots=True)
class WriterFacts:
    """What a script has said about a query before it starts it.

    Attributes:
        name: of the query; None if it has none.
        format: of the sink; "foreach" for `foreach` and `foreachBatch`, "table" for `toTable`
            without a format; None for Spark's default.
        path: of a file sink, or of a table that the script does not name by `toTable`.
        table: of `toTable`.
        topic: of a Kafka sink; None if each row names its own.
        kafka: options of the sink for Kafka's client, which begin with ``kafka.``.
        session: PySpark's.
        location: of the script's own checkpoint.
        trigger: the kind of the trigger, such as "availableNow"; None for the default.
        mode: of the output; None for Spark's default, "append".
        interval: of a trigger by processing time, in seconds; None if it has none.
        query: PySpark's; None until it has started.
        note: what the commits of a Delta table should say, by the script.
        marks: options that the writer gets besides, once it is known where the query goes on.
    """

    name: str | None = None
    format: str | None = None
    path: str | None = None
    location: str | None = None
    trigger: str | None = None
    mode: str | None = None
    interval: float | None = None
    table: str | None = None
    session: Any = None
    query: Any = None
    topic: str | None = None
    kafka: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    marks: dict[str, str] = field(default_factory=dict)

    def note_options(self, /, **options: Any) -> None:
        """Note the options that matter here; Spark ignores the case of their names."""
        for key, value in options.items():
            if key.lower() in _OPTIONS:
                setattr(self, _OPTIONS[key.lower()], str(value))
            elif key.lower().startswith("kafka."):
                self.kafka = {**self.kafka, key.lower(): value}

    def get_format(self) -> str:
        """Return the format of the sink; Spark's default if the script has named none."""
        return self.format or "parquet"

    def is_forgotten(self) -> bool:
        """Return whether Spark lets the query begin anew at each start, without a checkpoint."""
        return self.get_format() == "memory" and (self.mode or "append").lower() != "complete"

    def find_topic(self) -> str | None:
        """Return the address of the one topic that a Kafka sink writes; None for other sinks."""
        if self.format != "kafka" or self.topic is None:
            return None
        servers = str(self.kafka.get("kafka.bootstrap.servers", ""))
        return f"{TOPIC_SCHEME}{servers.split(',')[0].strip()}/{self.topic}"


@contextmanager
def install_hooks(
    choose_settings: Callable[[Mapping[str, str]], Mapping[str, str]],
    on_session: Callable[[Any], None],
    on_start: Callable[[WriterFacts], str | None],
    secrets: Collection[str] = (),
) -> Iterator[None]:
    """Replace methods of PySpark, in the whole process, until the block ends.

    Errors of the callbacks pass to the script.

    Args:
        choose_settings: called with the settings of each builder of a session, and of each context,
            before it makes or finds one; returns those that replace them.
        on_session: called with each session that a builder gives, and that a query starts in.
        on_start: called before a query starts; returns the checkpoint location that the query
            gets, or None to leave it alone. It may give a query without a name one.
        secrets: names of settings that reach the JVM past the arguments of its process.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    build, patches = SparkSession.Builder.getOrCreate, ExitStack()

    def get_or_create(builder: Any) -> Any:
        """Make or find the session."""
        for key, value in choose_settings(builder._options).items():
            builder.config(key, value)
        session = build(builder)
        on_session(session)
        return session

    def replace_method(owner: type, name: str, value: Any) -> None:
        """Replace a method until the block ends."""
        patches.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    with patches:
        replace_method(SparkSession.Builder, "getOrCreate", get_or_create)
        hooked = _make_context_hook(SparkContext.__init__, choose_settings, secrets)
        replace_method(SparkContext, "__init__", hooked)
        for name, note in _NOTES.items():
            hooked = _note_call(getattr(DataStreamWriter, name), note)
            replace_method(DataStreamWriter, name, hooked)
        for name in ("start", "toTable"):
            method = getattr(DataStreamWriter, name)
            hooked = _make_start_hook(method, name, on_session, on_start)
            replace_method(DataStreamWriter, name, hooked)
        yield


def mask_settings(secrets: Collection[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting by which Spark masks these settings too, on its pages and in logs."""
    if not secrets:
        return {}
    names = "|".join(re.escape(key) for key in sorted(secrets))
    given = settings.get(_REDACTION, _REDACTED)
    return {_REDACTION: given if names in given else f"{given}|{names}"}


def choose_older_kafka_reader(session: Any) -> None:
    """Let queries that start in a session from now on read Kafka by the older of Spark's readers.

    The newer one of connector 4.1.1 fails at the end of a batch that a start repeats, because it
    has not asked for the latest offsets then (SPARK-57438). Both keep the same offsets.
    """
    before = session.conf.get(_NOT_BY_V2, "")
    session.conf.set(_NOT_BY_V2, f"{before},{_KAFKA}".strip(","))


def _get_facts(writer: Any) -> WriterFacts:
    facts: WriterFacts = writer.__dict__.setdefault(_WRITER, WriterFacts())
    return facts


def _note_name(facts: WriterFacts, queryName: str) -> None:  # noqa: N803 - Spark's name
    facts.name = queryName


def _note_format(facts: WriterFacts, source: str) -> None:
    facts.format = source


def _note_foreach(facts: WriterFacts, *_: Any, **__: Any) -> None:
    facts.format = "foreach"


def _note_trigger(facts: WriterFacts, **kinds: Any) -> None:
    facts.trigger = next((kind for kind, value in kinds.items() if value), None)
    text = kinds.get("processingTime") or ""
    found = _INTERVAL_PART.findall(text.lower())
    facts.interval = sum(float(number) * _SECONDS[unit] for number, unit in found) or None


def _note_mode(facts: WriterFacts, outputMode: str) -> None:  # noqa: N803 - Spark's name
    facts.mode = outputMode


def _note_option(facts: WriterFacts, key: str, value: Any) -> None:
    facts.note_options(**{key: value})


_NOTES: dict[str, Callable[..., None]] = {
    "queryName": _note_name,
    "format": _note_format,
    "foreach": _note_foreach,
    "foreachBatch": _note_foreach,
    "trigger": _note_trigger,
    "outputMode": _note_mode,
    "option": _note_option,
    "options": WriterFacts.note_options,
}


def _note_call(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(writer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method, and note its arguments if it accepts them."""
        result = method(writer, *args, **kwargs)
        note(_get_facts(writer), *args, **kwargs)
        return result

    return call


def _make_context_hook(
    method: Callable[..., None],
    choose_settings: Callable[[Mapping[str, str]], Mapping[str, str]],
    secrets: Collection[str],
) -> Callable[..., None]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def make_context(context: Any, *args: Any, **kwargs: Any) -> None:
        """Make the context with the settings that `choose_settings` wants."""
        from pyspark import SparkConf, SparkContext

        call = signature.bind(context, *args, **kwargs)
        given = call.arguments
        conf = given["conf"] = given.get("conf") or SparkConf()
        # Spark lets these two arguments win against its settings.
        for argument, key in (("master", "spark.master"), ("appName", "spark.app.name")):
            if value := given.pop(argument, None):
                conf.set(key, value)
        for key, value in choose_settings(dict(conf.getAll())).items():
            conf.set(key, value)
        if secrets:
            shown = [pair for pair in conf.getAll() if pair[0] not in secrets]
            # What the JVM is launched with is in the arguments of its process.
            SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(shown))
        method(*call.args, **call.kwargs)

    return make_context


def _make_start_hook(
    method: Callable[..., Any],
    kind: str,
    on_session: Callable[[Any], None],
    on_start: Callable[[WriterFacts], str | None],
) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def start(writer: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the query with its checkpoint where `on_start` says."""
        call = signature.bind(writer, *args, **kwargs)
        given, options = call.arguments, call.arguments.get("options", {})
        facts = replace(_get_facts(writer))  # a writer may start several queries
        facts.note_options(**options)
        facts.name = given.get("queryName") or facts.name
        facts.format = given.get("format") or facts.format
        facts.mode = given.get("outputMode") or facts.mode
        facts.session = writer._spark
        if kind == "toTable":
            facts.format, facts.table = facts.format or "table", given["tableName"]
        else:
            facts.path = given.get("path") or facts.path
        on_session(writer._spark)  # one of `newSession` comes from no builder
        unnamed, location = facts.name is None, on_start(facts)
        if unnamed and facts.name is not None:
            writer.queryName(facts.name)
        if location is not None:
            kept = {key: one for key, one in options.items() if key.lower() != _LOCATION}
            given["options"] = kept
            for key, value in {"checkpointLocation": location, **facts.marks}.items():
                writer.option(key, value)
        facts.query = method(*call.args, **call.kwargs)
        return facts.query

    return start
