"""What is known of a sink before its query starts from another checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sealed_queries.conftest import JobBench
from tidegate.checkpoints.batch_notes import BatchReport, SinkPlan, SinkRewind
from tidegate.checkpoints.restore import commit_restore, plan_restore
from tidegate.checkpoints.retention import Retention, RetentionPolicy
from tidegate.errors import ConfigurationError
from tidegate.jobs.sealed_queries import sink_restore
from tidegate.jobs.sealed_queries.writer_hooks import WriterFacts
from tidegate.jobs.spec.job_spec import JobSpec


def write_log(folder: Path, *names: str) -> WriterFacts:
    """The log of a file sink, and the facts of its query."""
    log = folder / "_spark_metadata"
    log.mkdir()
    for name in names:
        (log / name).touch()
    return WriterFacts(name="q", path=str(folder), format="parquet")


def test_the_newest_batch_of_a_file_sink_is_read_from_its_log(tmp_path: Path) -> None:
    """Also from a compacted one; other sinks, and a folder without a log, have none."""
    assert sink_restore.find_newest_written(WriterFacts(name="q", path=str(tmp_path))) is None
    assert (
        sink_restore.find_newest_written(write_log(tmp_path, "7", "9.compact", "10", ".10.crc"))
        == 10
    )
    assert sink_restore.find_newest_written(WriterFacts(name="q", format="kafka")) is None


@pytest.mark.parametrize("planned", [None, 0, 7])
def test_a_query_does_not_start_over_a_file_sink_that_is_ahead(
    tmp_path: Path, planned: int | None
) -> None:
    """Renamed, or begun anew: Spark would leave out the rows of its next batches."""
    facts = write_log(tmp_path, "0", "8")
    with pytest.raises(ConfigurationError, match=r"query q has batch 8 already") as refused:
        sink_restore.refuse_sink_ahead("j", facts, planned)
    assert refused.value.code == "job.sink_ahead"
    sink_restore.refuse_sink_ahead("j", facts, 8)


def test_a_second_restore_right_after_one_to_the_beginning_leaves_no_slot_zero(
    bench: JobBench,
) -> None:
    """The ids of the query are found all the same."""
    query, made = bench.query("q")
    for batch in range(3):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())
    newest = bench.sealed[-1].id
    for number, target in enumerate((None, newest)):
        plan = plan_restore(bench.log, target)
        commit_restore(
            bench.log, bench.lease, plan, request_id=f"r{number}", who="ann", why="a mistake"
        )
    assert sink_restore.list_query_ids(bench.log, bench.log.head().record, "q") == {query.id}


def test_what_a_restore_owes_outlives_the_batches_that_were_left(bench: JobBench) -> None:
    """Retention may retire them before the next launch; the fork names the query all the same."""
    query, made = bench.query("q", SinkRewind.LOG)
    for batch in range(5):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())
    plan = plan_restore(bench.log, None)
    commit_restore(bench.log, bench.lease, plan, request_id="r", who="ann", why="a mistake")
    policy = RetentionPolicy(keep_last=1, keep_for=0, grace=0)
    retired = Retention(bench.log, policy, external=list).run().retired
    assert len(retired) == 5
    (fork,) = bench.log.list_forks()
    owed = [SinkPlan.model_validate(one) for one in fork.sinks]
    assert [(one.query, one.newest, one.batch, one.rewind) for one in owed] == [
        ("q", 4, None, SinkRewind.LOG)
    ]
    assert sink_restore.list_query_ids(bench.log, bench.log.head().record, "q") == {query.id}
    assert sink_restore.list_query_ids(bench.log, bench.log.head().record, "another") == frozenset()


def test_the_lineage_of_a_query_ends_where_each_timeline_was_left(bench: JobBench) -> None:
    """Batches behind a fork belong to no later timeline, whatever their number."""
    query, made = bench.query("q")
    for batch in range(4):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())
    plan = plan_restore(bench.log, bench.sealed[1].id)
    commit_restore(bench.log, bench.lease, plan, request_id="r", who="ann", why="a mistake")
    assert sink_restore.list_lineage(bench.log, bench.log.head(), "q", 1) == {0: 1, 1: 1}
    bench.sealer = bench.make_sealer()
    for batch in (2, 3):
        bench.sealer.seal(query, batch, BatchReport())
    assert sink_restore.list_lineage(bench.log, bench.log.head(), "q", 3) == {0: 1, 1: 3}


def test_what_the_present_spec_says_of_a_sink_counts_for_a_restore(bench: JobBench) -> None:
    """A job that fails seals no other batch that could note it."""
    query, made = bench.query("q", SinkRewind.REFUSED)
    topic, published = bench.query("topic", SinkRewind.REFUSED)
    topic.facts = WriterFacts(name="topic", format="kafka", topic="t")
    made.commit(0)
    bench.sealer.seal(query, 0, BatchReport())
    published.commit(0)
    bench.sealer.seal(topic, 0, BatchReport())
    spec = {"kind": "job", "name": "clicks", "app": "clicks.py"}
    plain = JobSpec.model_validate(spec)
    with pytest.raises(ConfigurationError, match="query q"):
        plan_restore(bench.log, None, spec=plain).require_sinks_follow()
    declared = JobSpec.model_validate({**spec, "repeatable": ["q", "topic"]})
    plan = plan_restore(bench.log, None, spec=declared)
    plan.require_sinks_follow()
    assert {one.query: one.rewind for one in plan.sinks} == {
        "q": SinkRewind.REPEAT,
        "topic": SinkRewind.ANNOUNCE,
    }


def test_what_a_function_took_back_is_not_restored(bench: JobBench) -> None:
    """The rows have left the sink, and the log of an abandoned timeline does not bring them back."""
    query, made = bench.query("q", SinkRewind.CALLBACK)
    for batch in range(2):
        made.commit(batch)
        bench.sealer.seal(query, batch, BatchReport())
    plan = plan_restore(bench.log, bench.sealed[0].id)
    commit_restore(bench.log, bench.lease, plan, request_id="r", who="ann", why="a mistake")
    undone = plan_restore(bench.log, bench.sealed[1].id)
    with pytest.raises(ConfigurationError, match=r"took its batches up to 1 out of .* query q"):
        commit_restore(bench.log, bench.lease, undone, request_id="s", who="ann", why="no")
    again = plan_restore(bench.log, bench.sealed[0].id)
    commit_restore(bench.log, bench.lease, again, request_id="t", who="ann", why="yes")
