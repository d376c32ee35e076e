"""Later batches leave an Iceberg or Delta table in one commit."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from tidegate.errors import ConfigurationError
from tidegate.jobs.sealed_queries import sink_restore
from tidegate.jobs.sealed_queries.sink_restore import (
    _ROWLESS,
    SealedPoint,
    TableCommit,
    _read_snapshot,
    _read_version,
    _refuse_others,
    build_commit_marks,
    can_roll_back,
    choose_commit,
    roll_back_table,
)
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts


def _commits(*batches: int, launch: tuple[int, int] | None = (0, 1)) -> list[TableCommit]:
    return [TableCommit(n, "q", batch, "", "", launch) for n, batch in enumerate(batches)]


def _point(batch: int | None, lineage: dict[int, int] | None = None) -> SealedPoint:
    return SealedPoint("clicks", frozenset({"q"}), batch, "u/q", lineage or {0: 1 << 30})


def _choose_id(known: list[TableCommit], point: SealedPoint) -> int:
    chosen = choose_commit(known, known, point)
    assert chosen is not None
    return chosen.id


def test_the_timeline_decides_between_two_commits_of_a_batch() -> None:
    """Batch 2 exists on two timelines, which part after batch 1; so clocks do not matter."""
    again = [TableCommit(9, "q", 2, "", "", (1, 2)), TableCommit(10, "q", 3, "", "", (1, 2))]
    known = [*_commits(0, 1, 2, 3), *again]
    assert _choose_id(known, _point(2)) == 2
    assert _choose_id(known, _point(2, {0: 1, 1: 2})) == 9
    assert _choose_id(known, _point(1, {0: 1, 1: 2})) == 1
    # A batch without a commit leaves the one before, not that of the timeline that was left.
    assert _choose_id(known[:4], _point(2, {0: 1, 1: 2})) == 1


def test_the_last_launch_decides_between_two_commits_of_a_timeline() -> None:
    """A launch in a new folder takes a batch back that was not sealed, and writes it again."""
    known = [*_commits(0, 1), TableCommit(7, "q", 1, "", "", (0, 2))]
    assert _choose_id(known, _point(1)) == 7


def test_commits_of_older_versions_are_not_guessed() -> None:
    """They do not note their launch: one of a batch is chosen, several are refused."""
    known = _commits(0, 1, 2, 1, 2, launch=None)
    assert _choose_id(known, _point(0)) == 0
    with pytest.raises(LookupError, match=r"several commits of batch 1 .*: 1, 3"):
        choose_commit(known, known, _point(1))


def test_a_batch_that_wrote_nothing_leaves_the_one_before() -> None:
    """A batch without data makes no commit in some tables."""
    known = _commits(0, 1, 4)
    chosen = choose_commit(known, known, _point(3))
    assert chosen is not None
    assert chosen.batch == 1


def test_the_beginning_is_before_the_first_commit_of_the_query() -> None:
    """What was in the table before stays."""
    foreign = TableCommit(9, None, -1, "append")
    assert choose_commit([foreign, *_commits(0, 1)], [], _point(None)) == foreign
    assert choose_commit(_commits(0, 1), [], _point(None)) is None


def test_a_commit_that_the_table_no_longer_keeps_is_an_error() -> None:
    """Expired snapshots cannot be restored."""
    with pytest.raises(LookupError):
        choose_commit([], _commits(5, 6), _point(4))


@pytest.fixture
def table(tmp_path: Path) -> WriterFacts:
    """A Delta table with batches 0 to 3, as Delta's streaming sink notes them."""
    path = tmp_path / "table"
    for batch in range(4):
        done = CommitProperties(app_transactions=[Transaction("q", batch)])
        write_deltalake(path, pa.table({"v": [batch]}), mode="append", commit_properties=done)
        log = path / "_delta_log" / f"{batch:020}.json"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            if "commitInfo" in line:
                given = {"outputMode": "Append", "queryId": "q", "epochId": str(batch)}
                line["commitInfo"] |= {
                    "operation": "STREAMING UPDATE",
                    "operationParameters": given,
                }
        log.write_text("\n".join(map(json.dumps, lines)))
    return WriterFacts(name="sink", format="delta", path=str(path))


def _rows(facts: WriterFacts) -> list[int]:
    return sorted(DeltaTable(facts.path or "").to_pyarrow_table()["v"].to_pylist())


def test_a_delta_table_goes_back_in_one_commit_and_takes_the_batches_again(
    table: WriterFacts,
) -> None:
    """The number of the newest batch goes back too, or Delta would skip those that come again."""
    assert can_roll_back(table)
    roll_back_table(table, _point(1))
    found = DeltaTable(table.path or "")
    assert (_rows(table), found.version(), found.transaction_version("q")) == ([0, 1], 4, 1)
    roll_back_table(table, _point(3))
    assert _rows(table) == [0, 1, 2, 3]
    roll_back_table(table, _point(None))
    assert _rows(table) == []
    assert DeltaTable(table.path or "").transaction_version("q") == -1


def test_without_delta_rs_a_restore_is_refused_beforehand(
    table: WriterFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be committed, and no launch could follow it."""
    monkeypatch.setattr(sink_restore, "find_spec", lambda _name: None)
    assert not can_roll_back(table)


def test_a_commit_of_a_query_that_was_never_sealed_is_its_own() -> None:
    """A query that begins anew has a new id, which nothing knows if it dies before its first seal."""
    unknown = TableCommit(2, "another id", 0, "append", "u/q", (1, 2))
    chosen = choose_commit([*_commits(0, 1), unknown], [], _point(None))
    assert chosen is None
    _refuse_others([unknown], WriterFacts(name="q"), _point(None))
    foreign = TableCommit(3, "another id", 0, "append", "v/q", (1, 2))
    with pytest.raises(ConfigurationError, match="another writer has made commit 3"):
        _refuse_others([foreign], WriterFacts(name="q"), _point(None))


def test_a_rollback_is_not_taken_for_another_writer(table: WriterFacts) -> None:
    """One to the beginning deletes all rows, and can be followed by another."""
    for _ in range(2):
        roll_back_table(table, _point(None))
    roll_back_table(table, _point(2))
    assert _rows(table) == [0, 1, 2]


def test_a_table_notes_the_launch_in_each_commit(table: WriterFacts) -> None:
    """By an option of the writer; a note of the script's own stays."""
    assert build_commit_marks(table, "u/q", 2, 7) == {
        "userMetadata": "tidegate.launch=u/q t2-000007"
    }
    info = DeltaTable(table.path or "").history(1)[0]
    marked = info | {"userMetadata": "tidegate.launch=u/q t2-000007"}
    assert _read_version(marked).launch == (2, 7)
    assert _read_version(info | {"userMetadata": "mine"}).launch is None
    table.note_options(userMetadata="mine")
    assert build_commit_marks(table, "u/q", 2, 7) == {}
    iceberg = WriterFacts(name="q", format="iceberg", path="t")
    assert build_commit_marks(iceberg, "u/q", 2, 7) == {
        "snapshot-property.tidegate.launch": "u/q t2-000007"
    }
    assert build_commit_marks(WriterFacts(name="q", format="kafka"), "u/q", 2, 7) == {}


def test_iceberg_snapshots_are_read_with_their_writer() -> None:
    """A rollback has marked its own."""

    def read(**summary: str) -> TableCommit:
        snapshot = MagicMock()
        snapshot.summary.return_value = summary
        snapshot.operation.return_value = "delete"
        return _read_snapshot(snapshot)

    note = {"spark.sql.streaming.queryId": "q", "spark.sql.streaming.epochId": "3"}
    own = read(**note, **{"tidegate.launch": "u/q t2-000007"})
    assert (own.query, own.batch, own.operation, own.launch) == ("q", 3, "delete", (2, 7))
    assert read(**note).launch is None
    assert read().operation == "delete"
    assert read(**{"tidegate.rollback": "q"}).operation in _ROWLESS


def test_what_another_writer_committed_is_not_taken_back(table: WriterFacts) -> None:
    """The rollback is refused, and the table stays."""
    write_deltalake(table.path or "", pa.table({"v": [99]}), mode="append")
    with pytest.raises(ConfigurationError, match="another writer has made commit 4"):
        roll_back_table(table, _point(1))
    assert _rows(table) == [0, 1, 2, 3, 99]
