"""What the counters of a manifest mean (docs/semantics.md, section 2, Counters)."""

from __future__ import annotations

from tidegate.checkpoints.row_counts import RowCounts, merge_counts, name_late_counts


def test_late_ratio_counts_a_row_once() -> None:
    """A row that misses two windows is one late row."""
    counts = RowCounts.of_source({"read": 10, "late:w": 3, "late:v": 2, "late_rows": 4})
    assert (counts.late_rows, counts.late_ratio) == (4, 0.4)
    assert counts.late_by_output == {"w": 3, "v": 2}


def test_rows_late_for_windows_only_are_late() -> None:
    """Under `pass_through` no row misses the events, and the late ratio still counts it."""
    counts = RowCounts.of_source({"read": 120, "released": 120, "late:w": 80, "late_rows": 80})
    assert counts.late_ratio == 80 / 120


def test_every_disposition_of_a_late_row_makes_it_late() -> None:
    """Dropped, rejected and flagged rows missed the events as well as those in the late table."""
    counts = RowCounts.of_source(
        {"read": 9, "late": 1, "dropped": 2, "rejected": 1, "flagged": 3, "late_rows": 7}
    )
    assert counts.late_by_output == {"events": 7}


def test_old_epochs_without_late_rows_have_a_lower_bound() -> None:
    """Manifests of older versions did not count the rows of several outputs once."""
    assert RowCounts.of_source({"read": 10, "late": 2, "late:w": 5}).late_rows == 5


def test_windows_are_not_offered_what_was_set_aside() -> None:
    """A row far in the future missed the events; no window saw it."""
    counts = RowCounts.of_source(
        {"read": 10, "dead_lettered": 1, "late": 4, "late:events:max_jump": 4, "late:w": 1}
    )
    assert (counts.count_offered("events"), counts.count_offered("w")) == (9, 5)
    assert (counts.late_share("events"), counts.late_share("w")) == (4 / 9, 1 / 5)


def test_rows_that_a_rule_removed_are_late_for_nothing() -> None:
    """They are offered to no output; the share of late rows is one of the others."""
    counts = RowCounts.of_source(
        {"read": 10, "dropped": 3, "dropped:events:rule": 2, "rule_quarantined": 3}
        | {"late_rows": 1, "rule:positive": 5, "rule:known": 4, "rule_warned": 4}
    )
    assert (counts.count_offered("events"), counts.count_offered("w")) == (5, 5)
    assert counts.late_by_output == {"events": 1}
    assert counts.count_broken_rules() == {"positive": 5, "known": 4}
    record = counts.to_record()
    assert (record["rules"], record["rule_quarantined"]) == ({"positive": 5, "known": 4}, 3)


def test_reasons_add_up_to_the_rows_of_an_output() -> None:
    """What has no reason of its own has the usual one of its output."""
    names = [
        *name_late_counts("events", "late_order"),
        *name_late_counts("events", "max_jump"),
        *name_late_counts("events", "rejected"),
        *name_late_counts("events", "flagged"),
        *name_late_counts("events", "cti_violation", dropped=True),
        *name_late_counts("w", "late_window"),
        *name_late_counts("w", "rejected"),
        *name_late_counts("w", "late_window", dropped=True),
    ]
    counts = RowCounts.of_source({name: names.count(name) for name in names})
    assert counts.late_by_reason == {
        ("events", "dropped", "cti_violation"): 1,
        ("events", "flagged", "flagged"): 1,
        ("events", "late", "late_order"): 1,
        ("events", "late", "max_jump"): 1,
        ("events", "rejected", "rejected"): 1,
        ("w", "dropped", "late_window"): 1,
        ("w", "late", "late_window"): 1,
        ("w", "late", "rejected"): 1,
    }
    assert counts.late_by_output == {"events": 5, "w": 3}


def test_a_stretch_is_the_difference_of_two_states() -> None:
    """Counts are cumulative, so that of two checkpoints the later one contains the earlier."""
    before = RowCounts.of_source({"read": 10, "late": 4})
    now = RowCounts.of_source({"read": 30, "late": 5})
    assert (now.since(before)["read"], now.since(before).late_rows) == (20, 1)


def test_sources_add_up_row_by_row() -> None:
    """Rows of different sources are different rows, also if they are late for different outputs."""
    both = RowCounts.of_sources({"a": {"read": 4, "late:w": 2}, "b": {"read": 4, "late": 1}})
    assert (both["read"], both.late_rows) == (8, 3)


def test_rejections_of_streams_are_not_late_rows() -> None:
    """A stream rejects rows that were made of events; these were in time."""
    counts = RowCounts.of_source({"read": 4, "rejected:alerts": 3, "rejected": 1})
    assert counts.count_stream_rejections() == {"alerts": 3}
    assert counts.late_by_output == {"events": 1}


def test_counts_merge_by_source() -> None:
    """Movers and engine count different things of one source."""
    merged = merge_counts({"b": {"read": 1}}, {"a": {"dead_objects": 1}, "b": {"read": 2}})
    assert merged == {"a": {"dead_objects": 1}, "b": {"read": 3}}
