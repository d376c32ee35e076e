from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.expectations.conftest import BARRIERS, DEAD, LATE, changed, manifest, rows

from tidegate.expectations import summaries
from tidegate.expectations.summaries import SUMMARIES, Evidence


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
    """The late table names a row once per output; only the events output is the row equation's."""
    window = {
        "output": "per_hour",
        "reason": "late_window",
        "lateness_us": 5,
        "_source": "EWR",
        "_epoch": 1,
    }
    both = pa.concat_tables([healthy.late, rows(LATE, window)])
    assert summaries.summarize_late_by_source(changed(healthy, late=both))[
        "late_rows_missing"
    ].tolist() == [0, 0]


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
    frame = summaries.summarize_late_by_source(changed(healthy, head=now, past=before))
    assert frame["late_ratio_rise"].tolist() == pytest.approx([0.1, 0.1])


def test_barrier_id_gap_is_counted(healthy: Evidence) -> None:
    """Ids 1, 2, 5 miss two."""
    ids = [
        {
            "barrier_id": n,
            "outcome": "complete",
            "homogeneous": True,
            "waited_us": n * 10**6,
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
    """An unreadable object counts as an object, its rows are unknown."""
    dead = rows(
        DEAD,
        {"reason": "truncated", "_source": "EWR"},
        {"reason": "bad_value", "_source": "EWR", "row": "{}"},
    )
    health = summaries.summarize_dead_letter_health(changed(healthy, dead_letters=dead))
    assert (health.loc[0, "dead_rows"], health.loc[0, "dead_objects"]) == (1, 1)


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


def test_flagged_late_rows_may_stand_out_of_order(healthy: Evidence) -> None:
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
