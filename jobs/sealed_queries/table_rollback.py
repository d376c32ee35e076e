"""Takes later batches of a query back out of its Iceberg or Delta table, in one commit.

Both kinds of table note in each commit which query wrote it and which batch it was: Iceberg in the
summary of a snapshot, Delta in the parameters of a version. A query keeps its id in its checkpoint,
so copies of the checkpoint have the same one. The table goes back to the newest commit of the batch
that was made before the batch was sealed; a batch of an older timeline may have the same number.

Iceberg is called in the script's own JVM, with the catalog that the script has configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import structlog

from tidegate.errors import TidegateError, get_first_line
from tidegate.jobs.sealed_queries.errors import COMMIT_GONE, ROLLBACK_FAILED, TABLE_SHARED
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts

_log = structlog.get_logger("tidegate.job")

_QUERY: Final = "spark.sql.streaming.queryId"
_BATCH: Final = "spark.sql.streaming.epochId"
_OURS: Final = "tidegate.rollback"  # in a commit that deletes all rows: the query
_ICEBERG: Final = "org.apache.iceberg."
# Commits that change no row, so that nothing is lost if they are taken back.
_ROWLESS: Final = {"replace", "OPTIMIZE", "VACUUM START", "VACUUM END", "RESTORE", "CREATE TABLE"}


@dataclass(frozen=True, slots=True)
class SealedPoint:
    """Where a query should stand after a restore.

    Attributes:
        queries: ids that the query has had, the present one included.
        batch: the last batch that stays; None: none.
        before: ticks; the batch was sealed by then.
    """

    queries: frozenset[str]
    batch: int | None
    before: int


@dataclass(frozen=True, slots=True)
class TableCommit:
    """One commit to a table.

    Attributes:
        id: of the snapshot, or the version.
        at: milliseconds since 1970.
        query: the id of the query that made it; None for another writer.
        batch: of the query; -1 for another writer.
        operation: what the table calls it.
    """

    id: int
    at: int
    query: str | None = None
    batch: int = -1
    operation: str = ""


def can_roll_back(facts: WriterFacts) -> bool:
    """Return whether the sink of a query is a table that can be rolled back from here."""
    if facts.format == "delta":
        return facts.path is not None and find_spec("deltalake") is not None
    return facts.format == "iceberg" or (facts.table is not None and _is_iceberg_catalog(facts))


def roll_back_table(pipeline: str, facts: WriterFacts, point: SealedPoint) -> None:
    """Bring the table of a query to a sealed batch. It makes no commit if the table is there.

    Raises:
        ConfigurationError: another writer has committed since, or the table does not keep the
            commit any more.
        TransientError: the table or its catalog did not answer.
    """
    name = facts.table or facts.path or ""
    roll_back = _roll_back_delta if facts.format == "delta" else _roll_back_iceberg
    try:
        done = roll_back(facts, point, pipeline)
    except TidegateError:
        raise
    except LookupError as error:
        what = {"table": name, "query": facts.name, "text": str(error)}
        raise COMMIT_GONE(pipeline=pipeline, **what) from error
    except Exception as error:  # py4j and delta-rs raise errors of their own
        text = get_first_line(error)
        raise ROLLBACK_FAILED(pipeline=pipeline, table=name, text=text) from error
    _log.info("table_rolled_back", table=name, query=facts.name, batch=point.batch, commit=done)


def choose_commit(
    line: Sequence[TableCommit], known: Iterable[TableCommit], point: SealedPoint
) -> TableCommit | None:
    """Return the commit to go back to; None: the table as it was before its first commit.

    Args:
        line: the commits that led to the present table, oldest first.
        known: all commits that the table keeps.
        point: where the query should stand.

    Raises:
        LookupError: the table does not keep the commit.
    """
    if point.batch is not None:
        found = [
            one
            for one in known
            if one.query in point.queries
            and one.batch <= point.batch
            and one.at * 1000 <= point.before
        ]
        if not found:
            raise LookupError(f"no commit of batch {point.batch} or before")
        return max(found, key=lambda one: (one.batch, one.at))
    own = [number for number, one in enumerate(line) if one.query in point.queries]
    if not own:
        return line[-1] if line else None
    return line[own[0] - 1] if own[0] > 0 else None


def _refuse_others(
    removed: Iterable[TableCommit], facts: WriterFacts, point: SealedPoint, pipeline: str
) -> None:
    """Refuse to take back what another writer has committed."""
    for one in removed:
        if one.query not in point.queries and one.operation not in _ROWLESS:
            name = facts.table or facts.path
            raise TABLE_SHARED(pipeline=pipeline, table=name, commit=one.id, query=facts.name)


def _roll_back_iceberg(facts: WriterFacts, point: SealedPoint, pipeline: str) -> object:
    jvm = facts.session._jvm
    table = _load_iceberg(facts)
    known = {one.snapshotId(): one for one in table.snapshots()}
    line, at = [], table.currentSnapshot()
    while at is not None:
        line.append(at.snapshotId())
        at = known.get(at.parentId())
    commits = {number: _read_snapshot(one) for number, one in known.items()}
    present = [commits[number] for number in reversed(line)]
    target = choose_commit(present, commits.values(), point)
    kept = set()
    at = known[target.id] if target else None
    while at is not None:
        kept.add(at.snapshotId())
        at = known.get(at.parentId())
    removed = [one for one in present if one.id not in kept]
    _refuse_others(removed, facts, point, pipeline)
    if target is not None and (not line or target.id != line[0]):
        table.manageSnapshots().setCurrentSnapshot(target.id).commit()
    elif target is None and line:
        every = jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        delete = table.newDelete().deleteFromRowFilter(every)
        delete.set(_OURS, facts.name or "").commit()
    return target and target.id


def _read_snapshot(snapshot: Any) -> TableCommit:
    summary = dict(snapshot.summary())
    batch = int(summary.get(_BATCH, -1))
    query = summary.get(_QUERY)
    operation = "RESTORE" if _OURS in summary else snapshot.operation()
    return TableCommit(snapshot.snapshotId(), snapshot.timestampMillis(), query, batch, operation)


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


def _roll_back_delta(facts: WriterFacts, point: SealedPoint, pipeline: str) -> object:
    from deltalake import CommitProperties, DeltaTable, Transaction

    table = DeltaTable((facts.path or "").replace("s3a://", "s3://"))
    line = [_read_version(one) for one in reversed(table.history())]
    target = choose_commit(line, line, point)
    first = target.id if target else -1
    removed = [one for one in line if one.id > first]
    _refuse_others(removed, facts, point, pipeline)
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
    return TableCommit(info["version"], info["timestamp"], query, batch, operation)
