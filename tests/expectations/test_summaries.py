from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.expectations.conftest import BARRIERS, DEAD, LATE, changed, manifest, rows

from tidegate.expectations import gx_runner, summaries
from tidegate.expectations.evidence import Evidence
from tidegate.expectations.summaries import SUMMARIES
from tidegate.jobs.spec.pipeline import PipelineSpec


@pytest.mark.parametrize("name", SUMMARIES)
def test_empty_pipeline_has_every_summary(healthy: Evidence, name: str) -> None:
    """Before the first epoch every frame exists with its columns."""
    empty = changed(
        healthy,
        late=healthy.late.slice(0, 0),
        barriers=healthy.barriers.slice(0, 0),
        checkpoints=healthy.checkpoints.slice(0, 0),
        events=healthy.events.slice(0, 0),
        head=None,
        sealed=0,
    )
    assert list(SUMMARIES[name](empty).columns) == list(SUMMARIES[name](healthy).columns)


def test_late_ratio_is_per_source_from_the_manifest(healthy: Evidence) -> None:
    """Late share is late over read, source by source."""
    frame = summaries.summarize_late_by_source(healthy).set_index("source")
    assert frame.loc["EWR", "late_ratio"] == pytest.approx(1 / 50)
    assert frame["late_rows_missing"].tolist() == [0, 0]


def test_late_rows_of_windows_are_not_counted_twice(healthy: Evidence) -> None:
    """The late table names a row once per output; it is one late row, and none is missing."""
    window = {
        "output": "per_hour",
        "reason": "late_window",
        "lateness_us": 5,
        "_source": "EWR",
        "_epoch": 1,
    }
    both = pa.concat_tables([healthy.late, rows(LATE, window)])
    head = manifest(3)
    head.counters.per_source["EWR"] |= {"late:per_hour": 1, "late_rows": 1}
    frame = summaries.summarize_late_by_source(changed(healthy, late=both, head=head))
    assert frame["late_rows_missing"].tolist() == [0, 0]
    assert frame["rows_late"].tolist() == [1, 1]


def test_lost_late_row_is_seen(healthy: Evidence) -> None:
    """A late row that is counted but not in the table leaves a difference."""
    frame = summaries.summarize_late_by_source(
        changed(healthy, late=healthy.late.slice(0, 1))
    ).set_index("source")
    assert frame.loc["JFK", "late_rows_missing"] == 1


def test_unknown_source_gets_a_row(healthy: Evidence) -> None:
    """Late rows of a source outside the spec are shown, not folded away."""
    stranger = rows(
        LATE,
        {
            "output": "events",
            "reason": "late_order",
            "lateness_us": 1,
            "_source": "XXX",
            "_epoch": 1,
        },
    )
    frame = summaries.summarize_late_by_source(
        changed(healthy, late=pa.concat_tables([healthy.late, stranger]))
    )
    assert frame.set_index("source").loc["XXX", "source_in_spec"] == "no"


def test_late_rise_compares_with_the_past(healthy: Evidence) -> None:
    """Late share of the newest checkpoints minus that of all before."""
    now, before = manifest(30, read=200, late=30), manifest(10, read=100, late=10)
    recent = changed(healthy, head=now, past=before, recent_since=10)
    frame = summaries.summarize_late_by_source(recent)
    assert frame["late_ratio_rise"].tolist() == pytest.approx([0.1, 0.1])


def test_barrier_id_gap_is_counted(healthy: Evidence) -> None:
    """Ids 1, 2, 5 miss two."""
    ids = [
        {
            "barrier_id": n,
            "outcome": "complete",
            "homogeneous": True,
            "waited_us": n * 10**6,
            "section": n,
            "_epoch": n,
        }
        for n in (1, 2, 5)
    ]
    health = summaries.summarize_barrier_health(changed(healthy, barriers=rows(BARRIERS, *ids)))
    assert health.loc[0, "ids_missing"] == 2
    assert health.loc[0, "waited_p99_s"] == pytest.approx(4.94)


def test_conservation_includes_the_order_buffer(healthy: Evidence) -> None:
    """Rows buffered by one epoch and released by the next are accounted for in both."""
    table = healthy.checkpoints
    retained, released = pa.array([5, 3, 0], pa.int64()), pa.array([27, 34, 35], pa.int64())
    table = table.set_column(table.column_names.index("rows_retained"), "rows_retained", retained)
    table = table.set_column(table.column_names.index("rows_released"), "rows_released", released)
    assert summaries.summarize_checkpoints(changed(healthy, checkpoints=table))[
        "rows_unaccounted"
    ].tolist() == [0, 0, 0]


def test_missing_epoch_is_counted(healthy: Evidence) -> None:
    """A checkpoints table without epoch 2 shows one skipped."""
    table = healthy.checkpoints.filter(pc.not_equal(healthy.checkpoints["_epoch"], 2))
    assert summaries.summarize_checkpoints(changed(healthy, checkpoints=table))[
        "epochs_skipped"
    ].tolist() == [0, 1]


def test_age_means_nothing_for_a_stopped_stream(healthy: Evidence) -> None:
    """Only a stream that should run can be behind."""
    assert summaries.summarize_checkpoint_health(healthy).loc[0, "age_s"] == pytest.approx(9.999997)
    assert (
        summaries.summarize_checkpoint_health(changed(healthy, wanted=False))["age_s"].isna().all()
    )


def test_whole_objects_are_not_rows(healthy: Evidence) -> None:
    """An unreadable object counts as an object, also where its rows are unknown."""
    dead = rows(
        DEAD,
        {"reason": "truncated", "_source": "EWR", "_epoch": 3},
        {"reason": "bad_value", "_source": "EWR", "row": "{}", "_epoch": 3},
    )
    broken = changed(healthy, dead_letters=dead)
    assert summaries.summarize_dead_letters(broken)[["rows", "objects"]].sum().tolist() == [1, 1]
    counted = manifest(3, dead_lettered=1, dead_objects=2, dead_object_rows=50)
    health = summaries.summarize_dead_letter_health(changed(healthy, head=counted)).iloc[0]
    assert (health["dead_rows"], health["dead_objects"], health["dead_object_rows"]) == (2, 4, 100)


def test_release_counts_gaps_doubles_and_disorder(healthy: Evidence) -> None:
    """One frame row tells lost, doubled and misplaced events apart."""
    events = healthy.events
    broken = pa.concat_tables([events.slice(0, 10), events.slice(11), events.slice(20, 1)])
    frame = summaries.summarize_release(changed(healthy, events=broken))
    found = frame.to_dict("records")[0]
    names = ("positions_missing", "positions_doubled", "rows_doubled", "rows_out_of_order")
    assert [found[name] for name in names] == [1, 1, 1, 0]
    position = pa.array([1, 0, *range(2, 96)], pa.int64())
    swapped = summaries.summarize_release(
        changed(healthy, events=events.set_column(0, "position", position))
    )
    assert swapped.loc[0, "rows_out_of_order"] == 1


def test_events_lost_at_the_end_are_missed(healthy: Evidence) -> None:
    """The manifest knows how many positions were given out; the table must have them all."""
    head = manifest(3).model_copy(update={"notes": {"next_position": 100}})
    assert summaries.summarize_release(changed(healthy, head=head)).loc[0, "positions_missing"] == 4
    empty = changed(healthy, head=head, events=healthy.events.slice(0, 0))
    assert summaries.summarize_release(empty).loc[0, "positions_missing"] == 100


def test_flagged_late_rows_may_be_out_of_order(healthy: Evidence) -> None:
    """`emit_flagged` releases late rows at once; that is not disorder."""
    position, flags = (
        pa.array([1, 0, *range(2, 96)], pa.int64()),
        pa.array([False, True, *[False] * 94]),
    )
    events = healthy.events.set_column(0, "position", position).set_column(2, "_late", flags)
    assert (
        summaries.summarize_release(changed(healthy, events=events)).loc[0, "rows_out_of_order"]
        == 0
    )


def closed(number: int, **fields: Any) -> dict[str, Any]:
    """A health row of a barrier that closed in the epoch of its number."""
    complete = {"outcome": "complete", "homogeneous": True, "types": ["day_close"]}
    return {**complete, "barrier_id": number, "section": number, "_epoch": number, **fields}


def test_a_tardy_source_is_no_second_barrier(healthy: Evidence) -> None:
    """The tardy row of barrier 2 is about the same close: one barrier, and its newest row counts."""
    incomplete = {"outcome": "incomplete", "missing": ["JFK/0"]}
    table = rows(
        BARRIERS,
        closed(1),
        closed(2, **incomplete),
        closed(3),
        closed(2, **incomplete, tardy=["JFK/0"], _epoch=9),
    )
    frame = summaries.summarize_barriers(changed(healthy, barriers=table)).set_index("barrier_id")
    assert frame["closings"].tolist() == [1, 1, 1]
    assert (frame.loc[2, "tardy"], frame.loc[2, "epoch"]) == ("JFK/0", 2)
    health = summaries.summarize_barrier_health(changed(healthy, barriers=table)).iloc[0]
    assert (health["barriers"], health["recent_incomplete"], health["ids_missing"]) == (3, 1, 0)


def test_a_barrier_that_closes_twice_is_a_defect(healthy: Evidence) -> None:
    """Another section, or the same row again although no one was tardy."""
    for again in (closed(2, section=7, _epoch=4), closed(2, _epoch=4)):
        table = rows(BARRIERS, closed(1), closed(2), again)
        frame = summaries.summarize_barriers(changed(healthy, barriers=table))
        assert sorted(frame["closings"]) == [1, 2, 2]


def test_many_good_barriers_hide_no_bad_ones(healthy: Evidence) -> None:
    """10,000 complete barriers, then 500 incomplete ones: the recent share is 0."""
    table = rows(
        BARRIERS,
        *(closed(n, outcome="complete" if n <= 10_000 else "incomplete") for n in range(1, 10_501)),
    )
    evidence = changed(healthy, barriers=table, recent_since=10_400)
    health = summaries.summarize_barrier_health(evidence).iloc[0]
    assert (health["recent_complete_ratio"], health["recent_barriers"]) == (0, 100)
    assert health["complete_ratio"] == pytest.approx(10_000 / 10_500)


def test_an_old_heterogeneous_barrier_is_over(healthy: Evidence) -> None:
    """Checks about single barriers look at recent ones."""
    table = rows(BARRIERS, closed(1, homogeneous=False), closed(2), closed(3))
    evidence = changed(healthy, barriers=table, recent_since=1)
    assert summaries.summarize_barriers(evidence)["homogeneous"].tolist() == ["yes", "yes"]


def test_outcomes_are_counted_by_type(healthy: Evidence) -> None:
    """All begins may be complete while no end is; an aborted barrier may have no type."""
    table = rows(
        BARRIERS,
        *(closed(n, types=["begin, or so"]) for n in (1, 3, 5)),
        closed(2, types=["end"], outcome="incomplete"),
        closed(4, types=["begin, or so", "end"], outcome="aborted"),
        closed(6, types=[], outcome="aborted"),
    )
    frame = summaries.summarize_barrier_types(changed(healthy, barriers=table))
    assert frame.to_numpy().tolist() == [
        ["begin, or so", 4, 3, 0, 1, 0.75],
        ["end", 2, 0, 1, 1, 0.0],
    ]


def test_members_show_who_is_last_missing_and_tardy(healthy: Evidence) -> None:
    """Of the members that arrived, the last one; missing and tardy ones beside it."""
    arrivals = json.dumps({"EWR/0": {"arrived": 1}, "JFK/0": {"arrived": 2_000_001}})
    alone = json.dumps({"EWR/0": {"arrived": 1}})
    table = rows(
        BARRIERS,
        closed(1, participants=arrivals),
        closed(2, participants=alone, missing=["JFK/0"], tardy=["JFK/0"]),
    )
    frame = summaries.summarize_barrier_members(changed(healthy, barriers=table))
    never, ratios = frame["held_p99_s"].isna().tolist(), ["missing_ratio", "tardy_ratio"]
    assert frame[["member", "arrived", "last", "missing", "tardy"]].to_numpy().tolist() == [
        ["EWR/0", 2, 0, 0, 0],
        ["JFK/0", 1, 1, 1, 1],
    ]
    assert frame[ratios].to_numpy().tolist() == [[0, 0], [0.5, 0.5]]
    assert (never, frame["held_p99_s"][1]) == ([True, False], 2.0)


def test_rows_late_for_windows_only_make_the_late_ratio(healthy: Evidence) -> None:
    """Under `pass_through` no row is late for the events; the ratio is of late input rows."""
    head = manifest(3, late=0, late__w=40, late_rows=40)
    frame = summaries.summarize_late_by_source(changed(healthy, head=head))
    assert frame["recent_late_ratio"].tolist() == [0.8, 0.8]


def test_drops_have_a_share(healthy: Evidence) -> None:
    """Rows that violate declared punctuation are only counted, and still show."""
    head = manifest(3, late=0, dropped=5, dropped__events__cti_violation=5)
    frame = summaries.summarize_dropped(changed(healthy, head=head))
    assert frame["output"].tolist() == ["events", "events"]
    assert frame["recent_dropped_ratio"].tolist() == [0.1, 0.1]


def test_rejections_of_streams_have_a_share(healthy: Evidence) -> None:
    """Rows that pipes sent and streams rejected, beside the rows that were read."""
    pipe = {"from": "events", "to": "d"}
    spec = PipelineSpec.model_validate(
        healthy.spec.model_dump(by_alias=True) | {"streams": {"d": {}}, "pipes": {"p": pipe}}
    )
    head = manifest(3, rejected__d=10)
    frame = summaries.summarize_stream_rejections(changed(healthy, spec=spec, head=head))
    assert frame.iloc[0].tolist() == ["d", 20, 20, 0.2]


def test_recent_counts_leave_the_past_out(healthy: Evidence) -> None:
    """An ill past is not held against recent rows, and an ill present is not hidden by the past."""
    past, head = manifest(10, read=1000, late=0), manifest(12, read=1010, late=10)
    evidence = changed(healthy, head=head, past=past, recent_since=10)
    frame = summaries.summarize_late_by_source(evidence)
    assert frame["recent_late_ratio"].tolist() == [1.0, 1.0]
    assert frame["late_ratio"].tolist() == pytest.approx([10 / 1010] * 2)


def test_a_sample_names_the_rows_behind_a_check(healthy: Evidence) -> None:
    """The newest recent rows of what broke the check, and the command for all of them."""
    late = rows(
        LATE,
        *(
            {"output": "events", "reason": "late_order", "_source": s, "_partition": "0"}
            | {"_seq": n, "_epoch": n, "lateness_us": 5}
            for s in ("EWR", "JFK")
            for n in range(1, 10)
        ),
    )
    evidence = changed(healthy, late=late, recent_since=2)
    sample = gx_runner.sample_rows(evidence, "late_by_source", ["JFK"], recent=True)
    assert [(r["_source"], r["_seq"]) for r in sample.rows] == [("JFK", n) for n in (9, 8, 7, 6, 5)]
    assert sample.command == (
        "tidegate tables flights late --where \"_epoch > 2 and _source in ('JFK')\""
    )


def test_a_sample_of_a_rule_has_the_rows_that_it_quarantined(healthy: Evidence) -> None:
    """They are in the dead letters; rows that a rule dropped or warned about were only counted."""
    fields = healthy.spec.model_dump(by_alias=True)
    predicate = {"predicate": "delay > 0"}
    fields["sources"]["EWR"]["rules"] = {
        "known": predicate | {"severity": "quarantine"},
        "known_too": predicate | {"severity": "quarantine"},
        "seen": predicate,
    }
    dead = rows(
        DEAD,
        *(
            {"reason": reason, "detail": detail, "row": "{}", "_source": s, "_partition": "0"}
            | {"_seq": n, "_epoch": n}
            for n, (s, reason, detail) in enumerate(
                [
                    ("EWR", "rule_quarantined", "rule known: delay > 0"),
                    ("EWR", "rule_quarantined", "rule known: delay > 0"),
                    ("EWR", "rule_quarantined", "rule known_too: delay > 0"),
                    ("EWR", "bad_value", "rule known: is not a number"),
                    ("JFK", "rule_quarantined", "rule known: delay > 0"),
                ],
                start=1,
            )
        ),
    )
    spec = healthy.spec.model_validate(fields)
    evidence = changed(healthy, spec=spec, dead_letters=dead, recent_since=1)
    sample = gx_runner.sample_rows(evidence, "rules", ["EWR.known", "EWR.seen"], recent=True)
    assert [(r["_source"], r["_seq"]) for r in sample.rows] == [("EWR", 2)]
    assert sample.command == (
        "tidegate tables flights dead_letters --where \"_epoch > 1 and reason = 'rule_quarantined'"
        " and (_source = 'EWR' and starts_with(detail, 'rule known:'))\""
    )
    only_counted = gx_runner.sample_rows(evidence, "rules", ["EWR.seen"], recent=True)
    assert (only_counted.rows, only_counted.command) == ((), "tidegate status flights")
