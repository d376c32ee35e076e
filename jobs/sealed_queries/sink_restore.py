"""Brings the sink of a query back to the batch from which the query starts again.

A file sink follows its log, and other sinks a callback of the script. An Iceberg or Delta table
goes back in one commit. Both kinds of table note in each commit which query wrote it and which
batch it was: Iceberg in the summary of a snapshot, Delta in the parameters of a version. A query
keeps its id in its checkpoint, so copies of the checkpoint have the same one. A batch of another
timeline may have the same number, so each commit also notes the timeline and the launch: an option
of the writer, which both formats store. No clock decides.

Iceberg is called in the script's own JVM, with the catalog that the script has configured.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import structlog

from tidegate.checkpoints.batch_notes import BatchNotes, SinkPlan, SinkRewind
from tidegate.checkpoints.manifest import ForkRecord, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog
from tidegate.errors import TidegateError, get_first_line
from tidegate.job import find_restore_callback
from tidegate.jobs.sinks.kafka_sink import (
    build_restore_message,
    tabulate_messages,
    write_messages,
)
from tidegate.jobs.spark.spark_session import SPARK_ERRORS, extract_cause
from tidegate.json_types import JsonObject

from .checkpoint_files import SINK_LOG
from .errors import (
    COMMIT_GONE,
    ROLLBACK_FAILED,
    SINK_AHEAD,
    SINK_UNKNOWN,
    TABLE_SHARED,
    TOPIC_NOT_INFORMED,
)
from .writer_hooks import WriterFacts

_log = structlog.get_logger("tidegate.job")

_FILE_FORMATS = {"avro", "csv", "json", "orc", "parquet", "text"}
_KEEP_NOTHING = {"console", "memory", "noop"}
_QUERY = "spark.sql.streaming.queryId"
_BATCH = "spark.sql.streaming.epochId"
_OURS = "tidegate.rollback"  # in a commit that deletes all rows: the query
_LAUNCH = "tidegate.launch"  # in a commit: owner of the query, timeline, token of the lease
_LAUNCH_MARK = re.compile(rf"{re.escape(_LAUNCH)}=(\S+) t(\d+)-(\d+)")
_ICEBERG = "org.apache.iceberg."
# Commits that change no row, so that nothing is lost if they are taken back.
_ROWLESS = {"replace", "OPTIMIZE", "VACUUM START", "VACUUM END", "RESTORE", "CREATE TABLE"}


@dataclass(frozen=True)
class SealedPoint:
    """Where a query should be after a restore.

    Attributes:
        pipeline: name of the job.
        queries: ids that the query has had, the present one included.
        batch: the last batch that stays; None: none.
        owner: of the query, as in `TableCommit`.
        lineage: timelines that lead there, each with the last batch of the query that counts.
        notice: what announces the restore to the readers of a topic.
    """

    pipeline: str
    queries: frozenset[str]
    batch: int | None
    owner: str = ""
    lineage: Mapping[int, int] = field(default_factory=dict)
    notice: JsonObject = field(default_factory=dict)

    def is_own(self, commit: "TableCommit") -> bool:
        """Whether a commit is one of the query, perhaps under an id that nothing has sealed."""
        return commit.query in self.queries or bool(self.owner and commit.owner == self.owner)

    def is_kept(self, commit: "TableCommit") -> bool:
        """Return whether a commit of the query belongs to what stays."""
        if not self.is_own(commit) or self.batch is None:
            return False
        last = self.batch
        if commit.launch is not None:  # those of older versions, or of the script before, have none
            last = min(last, self.lineage.get(commit.launch[0], -1))
        return commit.batch <= last


def find_local_folder(address: str) -> Path | None:
    """Return the folder of this host that an address of Hadoop means; None for another place."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path) if parts.scheme else address).absolute()


def find_sink_log(facts: WriterFacts) -> Path | None:
    """Return the log folder of a local file sink, which need not exist; None for another sink."""
    if facts.path is None or facts.get_format().lower() not in _FILE_FORMATS:
        return None
    folder = find_local_folder(facts.path)
    return None if folder is None else folder / "_spark_metadata"


def choose_rewind(facts: WriterFacts, *, repeatable: bool) -> SinkRewind:
    """Return how the sink of a query follows a restore; the script has run up to its start.

    The first that holds: by the script's callback, by repeating if the sink is `repeatable` (a
    topic with an announcement) or keeps nothing, by its log if it is a local file sink, by a
    rollback if it is an Iceberg or Delta table; else a restore is refused.
    """
    if find_restore_callback(facts.name or ""):
        return SinkRewind.CALLBACK
    if repeatable or facts.format in _KEEP_NOTHING:
        return SinkRewind.ANNOUNCE if facts.find_topic() else SinkRewind.REPEAT
    if find_sink_log(facts):
        return SinkRewind.LOG
    return SinkRewind.ROLLBACK if can_roll_back(facts) else SinkRewind.REFUSED


def restore_sink(facts: WriterFacts, folder: Path, point: SealedPoint, rewind: SinkRewind) -> None:
    """Bring the sink to a batch, before the query starts from a new checkpoint folder.

    A file sink gets its sealed log back; later files stay and are not read. A table is rolled
    back. A callback is called, and its errors pass through. A topic gets a message. Another sink
    that may get a batch twice is left as it is.

    Args:
        facts: of the query.
        folder: its checkpoint as it was sealed, with the sealed log of a file sink.
        point: what the sink should hold.
        rewind: how.

    Raises:
        ConfigurationError: the sink can neither be read nor take back or repeat a batch.
    """
    query, batch, sink_log = facts.name or "", point.batch, find_sink_log(facts)
    callback = find_restore_callback(query)
    if sink_log is not None:
        # Also beside a callback: Spark skips batches that the log of a file sink has already.
        _replace_log(sink_log, folder / SINK_LOG)
    if rewind is SinkRewind.CALLBACK and callback is not None:
        _log.info("on_restore", query=query, batch=batch)
        callback(query, batch)
    elif rewind is SinkRewind.ROLLBACK:
        roll_back_table(facts, point)
    elif rewind is SinkRewind.ANNOUNCE:
        _announce_restore(facts, point)
    elif rewind is SinkRewind.REFUSED:
        # A restore was refused before it was committed, so this is a launch on a new folder.
        _refuse_unknown_sink(point.pipeline, query, batch)


def _refuse_unknown_sink(pipeline: str, query: str, batch: int | None) -> None:
    """Refuse a query that begins below a batch that its sink may have, where no one can tell.

    The same number would mean other rows. A sink that looks at it would leave them out, and one
    that does not would get rows twice.

    Args:
        pipeline: name of the job.
        query: its name.
        batch: after which it would go on; None: none.

    Raises:
        ConfigurationError: always.
    """
    first, planned = (0, "none") if batch is None else (batch + 1, batch)
    raise SINK_UNKNOWN(pipeline=pipeline, query=query, planned=planned, first=first)


def find_newest_written(facts: WriterFacts) -> int | None:
    """Return the newest batch in the log of a local file sink; None for another sink, or none."""
    return find_newest_entry(find_sink_log(facts))


def find_newest_entry(sink_log: Path | None) -> int | None:
    """Return the newest batch in the log folder of a file sink; None without a log, or a batch."""
    if sink_log is None or not sink_log.is_dir():
        return None
    names = (path.name.removesuffix(".compact") for path in sink_log.iterdir())
    return max((int(name) for name in names if name.isdigit()), default=None)


def refuse_sink_ahead(pipeline: str, facts: WriterFacts, planned: int | None) -> None:
    """Refuse a query whose file sink has batches that its checkpoint does not know.

    Spark would skip its batches of those numbers, with rows that no file has.

    Args:
        pipeline: name of the job.
        facts: of the query.
        planned: the newest batch of its checkpoint; None before the first.

    Raises:
        ConfigurationError: the sink has a newer one.
    """
    written = find_newest_written(facts)
    if written is not None and written > (-1 if planned is None else planned):
        raise SINK_AHEAD(
            pipeline=pipeline,
            query=facts.name,
            folder=facts.path,
            sink=written,
            planned="none" if planned is None else planned,
        )


def list_query_ids(log: SlotLog, sealed: Manifest | None, query: str) -> frozenset[str]:
    """Return the ids that a query has had in this timeline and in those that were left.

    Empty if it was never sealed; a slot of an older version gives an empty id.

    Args:
        log: of the job.
        sealed: the batch from which the job goes on; None before the first.
        query: its name.
    """
    ends, forks = [sealed], log.list_forks()
    owed = {one.id for fork in forks for one in _read_debts(fork) if one.query == query}
    # Forks of older versions do not say what they owe. One in the first slot leaves a timeline
    # without a batch.
    for fork in (fork for fork in forks if fork.slot > 1 and not fork.sinks):
        filled = log.read_slot(fork.timeline, fork.slot - 1)
        if filled is not None and isinstance(filled.record, Manifest):
            ends.append(filled.record)
    found = (BatchNotes.from_manifest(end) for end in ends)
    return frozenset(owed) | {
        notes.queries[query].id or "" for notes in found if notes and query in notes.queries
    }


def _read_debts(fork: ForkRecord) -> list[SinkPlan]:
    return [SinkPlan.model_validate(one) for one in fork.sinks]


def list_lineage(log: SlotLog, head: LogHead, query: str, batch: int) -> dict[int, int]:
    """Return the timelines that lead to the head, each with the last batch of a query that counts.

    Args:
        log: of the job.
        head: of it.
        query: its name.
        batch: its newest sealed batch.
    """
    forks, last = log.list_forks(), dict[int, int]()
    lineage = log.lineage(head.timeline)
    for segment, after in zip(lineage, (*lineage[1:], None), strict=True):
        # The fork that opened the next timeline says where the query was when it parted.
        debts = _read_debts(forks[after.timeline - 1]) if after else []
        ends = [-1 if one.batch is None else one.batch for one in debts if one.query == query]
        last[segment.timeline] = min([batch, *ends])
    return last


def build_commit_marks(facts: WriterFacts, owner: str, timeline: int, token: int) -> dict[str, str]:
    """Return the options of a writer that let its table note the launch in each commit.

    Empty for other sinks, and for a Delta table whose commits carry the script's own note.

    Args:
        facts: of the query.
        owner: of the query, as in `TableCommit`.
        timeline: of the head from which the launch goes on.
        token: of its lease.
    """
    launch = f"{owner} t{timeline}-{token:06d}"
    if not can_roll_back(facts):
        return {}
    if facts.format != "delta":
        return {f"snapshot-property.{_LAUNCH}": launch}
    return {} if facts.note else {"userMetadata": f"{_LAUNCH}={launch}"}


def _read_mark(text: str | None) -> tuple[str, tuple[int, int] | None]:
    found = _LAUNCH_MARK.fullmatch(text or "")
    return (found[1], (int(found[2]), int(found[3]))) if found else ("", None)


def _announce_restore(facts: WriterFacts, point: SealedPoint) -> None:
    """Send the message of a pipeline's Kafka sink, with the query and the last batch that stays."""
    notice = {**point.notice, "query": facts.name, "after_batch": point.batch}
    message = build_restore_message(facts.topic or "", notice)
    try:
        write_messages(facts.session, tabulate_messages([message]), facts.kafka)
    except SPARK_ERRORS as error:
        raise TOPIC_NOT_INFORMED(
            pipeline=point.pipeline,
            query=facts.name,
            topic=facts.topic,
            text=extract_cause(error),
        ) from error
    _log.info("restore_announced", query=facts.name, topic=facts.topic, after_batch=point.batch)


def _replace_log(live: Path, sealed: Path) -> None:
    """Replace the log of a file sink by the sealed one. Files of later batches stay, unread."""
    kept = {path.name: path for path in sealed.iterdir()} if sealed.is_dir() else {}
    live.mkdir(parents=True, exist_ok=True)
    # First what is missing, so that a crash leaves a log that still names all that it should.
    for name, path in kept.items():
        shutil.copyfile(path, live / name)
        (live / f".{name}.crc").unlink(missing_ok=True)
    for path in list(live.iterdir()):
        if path.name not in kept and not path.is_dir():
            path.unlink()


@dataclass(frozen=True)
class TableCommit:
    """One commit to a table.

    Attributes:
        id: of the snapshot, or the version.
        query: the id of the query that made it; None for another writer.
        batch: of the query; -1 for another writer.
        operation: what the table calls it.
        owner: uid of the job and name of the query; empty if the commit does not say.
        launch: timeline and token of the launch; None if the commit does not say.
    """

    id: int
    query: str | None = None
    batch: int = -1
    operation: str = ""
    owner: str = ""
    launch: tuple[int, int] | None = None


def can_roll_back(facts: WriterFacts) -> bool:
    """Return whether the sink of a query is a table that can be rolled back from here."""
    if facts.format == "delta":
        return facts.path is not None and find_spec("deltalake") is not None
    return facts.format == "iceberg" or (facts.table is not None and _is_iceberg_catalog(facts))


def roll_back_table(facts: WriterFacts, point: SealedPoint) -> None:
    """Bring the table of a query to a sealed batch. It makes no commit if the table is there.

    Raises:
        ConfigurationError: another writer has committed since, or the table does not keep the
            commit any more.
        TransientError: the table or its catalog did not answer.
    """
    name = facts.table or facts.path or ""
    roll_back = _roll_back_delta if facts.format == "delta" else _roll_back_iceberg
    try:
        done = roll_back(facts, point)
    except TidegateError:
        raise
    except LookupError as error:
        raise COMMIT_GONE(
            pipeline=point.pipeline, table=name, query=facts.name, text=str(error)
        ) from error
    except Exception as error:  # py4j and delta-rs raise errors of their own
        text = get_first_line(error)
        raise ROLLBACK_FAILED(pipeline=point.pipeline, table=name, text=text) from error
    _log.info("table_rolled_back", table=name, query=facts.name, batch=point.batch, commit=done)


def choose_commit(
    line: Sequence[TableCommit], known: Iterable[TableCommit], point: SealedPoint
) -> TableCommit | None:
    """Return the commit to go back to; None: the table as it was before its first commit.

    Args:
        line: the commits that led to the present table, oldest first.
        known: all commits that the table keeps.
        point: where the query should be.

    Raises:
        LookupError: the table does not keep the commit, or several that may be it.
    """
    if point.batch is not None:
        found = [one for one in known if point.is_kept(one)]
        if not found:
            raise LookupError(f"no commit of batch {point.batch} or before")
        newest = max((one.batch, one.launch or (-1, -1)) for one in found)
        same = [one for one in found if (one.batch, one.launch or (-1, -1)) == newest]
        if len(same) > 1:
            numbers = ", ".join(str(one.id) for one in same)
            raise LookupError(
                f"several commits of batch {newest[0]} of unknown launches: {numbers}"
            )
        return same[0]
    own = [number for number, one in enumerate(line) if point.is_own(one)]
    if not own:
        return line[-1] if line else None
    return line[own[0] - 1] if own[0] > 0 else None


def _refuse_others(removed: Iterable[TableCommit], facts: WriterFacts, point: SealedPoint) -> None:
    """Refuse to take back what another writer has committed."""
    for one in removed:
        if not point.is_own(one) and one.operation not in _ROWLESS:
            name = facts.table or facts.path
            raise TABLE_SHARED(pipeline=point.pipeline, table=name, commit=one.id, query=facts.name)


def _roll_back_iceberg(facts: WriterFacts, point: SealedPoint) -> object:
    jvm = facts.session._jvm
    table = _load_iceberg(facts)
    known = {one.snapshotId(): one for one in table.snapshots()}
    commits = {number: _read_snapshot(one) for number, one in known.items()}
    line = [one.snapshotId() for one in _list_ancestors(table.currentSnapshot(), known)]
    present = [commits[number] for number in reversed(line)]
    target = choose_commit(present, commits.values(), point)
    kept = {one.snapshotId() for one in _list_ancestors(target and known[target.id], known)}
    removed = [one for one in present if one.id not in kept]
    _refuse_others(removed, facts, point)
    if target is not None and (not line or target.id != line[0]):
        table.manageSnapshots().setCurrentSnapshot(target.id).commit()
    elif target is None and line:
        every = jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        delete = table.newDelete().deleteFromRowFilter(every)
        delete.set(_OURS, facts.name or "").commit()
    return target and target.id


def _list_ancestors(snapshot: Any, known: Mapping[int, Any]) -> Iterator[Any]:
    """Yield a snapshot and those that led to it, newest first; none for None."""
    while snapshot is not None:
        yield snapshot
        snapshot = known.get(snapshot.parentId())


def _read_snapshot(snapshot: Any) -> TableCommit:
    summary = dict(snapshot.summary())
    batch = int(summary.get(_BATCH, -1))
    query = summary.get(_QUERY)
    operation = "RESTORE" if _OURS in summary else snapshot.operation()
    mark = _read_mark(f"{_LAUNCH}={summary.get(_LAUNCH)}")
    return TableCommit(snapshot.snapshotId(), query, batch, operation, *mark)


def _load_iceberg(facts: WriterFacts) -> Any:
    name, jvm = facts.table or facts.path or "", facts.session._jvm
    if "/" in name:
        configuration = facts.session._jsparkSession.sessionState().newHadoopConf()
        return jvm.org.apache.iceberg.hadoop.HadoopTables(configuration).load(name)
    spark = facts.session._jsparkSession
    return jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark, name)


def _is_iceberg_catalog(facts: WriterFacts) -> bool:
    first, _, rest = (facts.table or "").partition(".")
    current = facts.session.catalog.currentCatalog()
    settings = (f"spark.sql.catalog.{name}" for name in ((first, current) if rest else (current,)))
    found: list[str] = [facts.session.conf.get(key, None) or "" for key in settings]
    return next((name for name in found if name), "").startswith(_ICEBERG)


def _roll_back_delta(facts: WriterFacts, point: SealedPoint) -> object:
    from deltalake import CommitProperties, DeltaTable, Transaction

    table = DeltaTable((facts.path or "").replace("s3a://", "s3://"))
    line = [_read_version(one) for one in reversed(table.history())]
    target = choose_commit(line, line, point)
    first = target.id if target else -1
    removed = [one for one in line if one.id > first]
    _refuse_others(removed, facts, point)
    # Without this Delta skips the batches that come again: it keeps the newest one of each query.
    done = -1 if target is None or target.query is None else target.batch
    seen = [Transaction(query, done) for query in sorted(point.queries)]
    ours = {_OURS: facts.name or ""}
    commit = CommitProperties(app_transactions=seen, custom_metadata=ours)
    if target is None:
        table.delete(commit_properties=commit)
    elif removed:
        table.restore(target.id, commit_properties=commit)
    return target and target.id


def _read_version(info: dict[str, Any]) -> TableCommit:
    given = info.get("operationParameters") or {}
    query, batch = given.get("queryId"), int(given.get("epochId", -1))
    operation = "RESTORE" if _OURS in info else info["operation"]
    mark = _read_mark(info.get("userMetadata"))
    return TableCommit(info["version"], query, batch, operation, *mark)
