"""The faults of quality and recovery that a review found, with the tests of each: ``make quality-rows``.

Prints one line per fault; the last line is ``N passed, N failed``. A fault passes when all its
tests exist and pass.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Final

import pytest

_SUMMARIES: Final = "tests/expectations/test_summaries.py"
ROWS: Final[dict[int, tuple[str, tuple[str, ...]]]] = {
    1: (
        "rows late for windows show under pass_through",
        (
            "tests/operators/test_row_counts_on_surfaces.py::"
            "test_rows_late_for_windows_show_on_every_surface",
            f"{_SUMMARIES}::test_rows_late_for_windows_only_make_the_late_ratio",
            "tests/expectations/test_presets.py::test_a_preset_is_healthy_ill_and_recovered",
        ),
    ),
    2: (
        "flagged rows have a reason, lateness and a missed frontier",
        (
            "tests/oracle/test_mover.py::test_a_flagged_row_is_reported_with_what_it_missed",
            "tests/engine/test_deep.py::test_what_is_sealed_adds_up",
            "tests/spark/test_agreement.py::test_movers_agree",
        ),
    ),
    3: (
        "dropped rows and rejections of streams are counted and checked",
        (
            f"{_SUMMARIES}::test_drops_have_a_share",
            f"{_SUMMARIES}::test_rejections_of_streams_have_a_share",
            "tests/streams/test_dispatcher.py::test_rejections_are_logged_and_nothing_stops",
        ),
    ),
    4: (
        "a tardy barrier sends no healthy stream back",
        (
            "tests/expectations/test_presets.py::test_a_tardy_barrier_sends_no_stream_back",
            f"{_SUMMARIES}::test_a_tardy_source_is_no_second_barrier",
            "tests/checkpoints/test_health.py::"
            "test_only_checks_about_a_checkpoints_own_epoch_count",
            "tests/driver/test_recovery.py::test_when_everything_failed_a_person_has_to_look",
        ),
    ),
    5: (
        "recent epochs and the whole past are judged apart",
        (
            f"{_SUMMARIES}::test_many_good_barriers_hide_no_bad_ones",
            f"{_SUMMARIES}::test_an_old_heterogeneous_barrier_is_over",
            f"{_SUMMARIES}::test_recent_counts_leave_the_past_out",
            f"{_SUMMARIES}::test_a_sample_names_the_rows_behind_a_check",
            "tests/expectations/test_checks.py::"
            "test_there_are_no_checks_for_what_a_pipeline_does_not_have",
        ),
    ),
    6: (
        "each closed barrier is one asset event",
        ("tests/operators/test_trigger.py::test_each_closed_barrier_is_one_event",),
    ),
    7: (
        "maintenance keeps checkpoints for as long as the spec promises",
        (
            "tests/operators/test_maintain.py::test_a_good_run_says_what_it_did",
            "tests/driver/test_housekeeping.py::test_retention_runs_as_often_as_the_spec_says",
        ),
    ),
    8: (
        "streams join a pipeline with retired checkpoints, and reducers resume behind retention",
        (
            "tests/streams/test_tables.py::"
            "test_a_stream_is_added_to_a_pipeline_whose_first_epochs_were_retired",
            "tests/streams/test_tables.py::"
            "test_a_backfill_goes_on_where_all_its_epochs_were_retired",
            "tests/streams/test_tables.py::test_rows_that_are_in_no_table_pause_the_attachment",
        ),
    ),
    9: (
        "a pipeline with streams and without windows has a splice DAG",
        ("tests/operators/test_splice.py::test_the_dag_follows_the_spec",),
    ),
    10: (
        "a frontier that nothing can move is a warning",
        ("tests/cli/test_main.py::test_validate_warns_where_nothing_can_move_the_frontier",),
    ),
    11: (
        "`tidegate check` works behind retired epochs",
        ("tests/sinks/test_exact.py::test_retired_epochs_are_left_out_and_the_rest_is_compared",),
    ),
    12: (
        "`status` shows open barriers and members held back",
        (
            "tests/cli/test_status.py::test_open_barriers_are_shown_with_id_age_and_who_is_missing",
            "tests/cli/test_status.py::test_members_held_back_are_named",
        ),
    ),
    13: (
        "a replay decides again, with the epoch's own spec, and compares the barriers",
        (
            "tests/cli/test_replay.py::test_replay_takes_the_spec_that_sealed_the_epoch",
            "tests/engine/test_epoch.py::test_replay_gives_the_same_rows",
            "tests/engine/test_epoch.py::test_replay_decides_again",
        ),
    ),
    14: (
        "every checkpoint is read before it may retire, also without Airflow",
        (
            "tests/checkpoints/test_verify.py::test_every_checkpoint_is_read_before_it_may_retire",
            "tests/driver/test_housekeeping.py::test_without_airflow_the_driver_scrubs_once_a_day",
        ),
    ),
    15: (
        "a paused reducer says what to do, and columns can be added under ordered release",
        (
            "tests/cli/test_status.py::test_a_paused_reducer_is_named_with_the_row_and_the_reason",
            "tests/spec/test_changes.py::test_every_change_has_a_rule",
            "tests/engine/test_spec_changes.py::"
            "test_a_column_is_added_while_rows_wait_in_the_order_buffer",
            "tests/spark/test_mover.py::test_rows_that_waited_leave_without_a_column_added_since",
        ),
    ),
    16: (
        "a member without a frontier holds the frontier",
        (
            "tests/oracle/test_found.py::test_who_returns_before_the_first_frontier_holds_it",
            "tests/oracle/test_found.py::"
            "test_who_returns_behind_a_frontier_without_one_is_left_out",
        ),
    ),
    17: (
        "objects set aside as a whole, and columns filled with nulls, are counted",
        (
            "tests/engine/test_bad_objects.py::"
            "test_an_object_set_aside_as_a_whole_is_counted_with_its_rows",
            "tests/engine/test_bad_objects.py::test_rows_of_objects_that_lack_a_column_are_counted",
        ),
    ),
    18: (
        "an Airflow task launches and supervises by the Spark provider's public hook",
        (
            "tests/operators/test_submit.py::test_the_task_starts_it_and_goes",
            "tests/e2e/test_airflow_submit.py::test_a_submitted_driver_is_supervised",
        ),
    ),
    19: (
        "the grace counts per run; pipet, the JSON text 2 and far-future stamps as documented",
        (
            "tests/engine/test_epoch.py::test_a_run_begins_with_a_start_and_not_with_a_process",
            "tests/checkpoints/test_documents.py::test_a_start_behind_a_stop_is_counted",
            "tests/eventtime/test_presets.py::test_pipet",
            "tests/sources/test_decode.py::test_a_json_text_is_a_number_in_its_plain_form_only",
            "tests/rows/test_json_messages.py::test_values_are_those_of_single_messages",
            "tests/cli/test_status.py::test_a_far_future_stamp_is_a_warning",
        ),
    ),
}


class _Outcomes:
    """Collects the outcomes of a run by test, without parameters."""

    def __init__(self) -> None:
        self.found: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, or of a setup that failed."""
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid.partition("[")[0]].add(report.outcome)


def main() -> int:
    """Run the tests of all rows; return 1 if a row failed."""
    outcomes = _Outcomes()
    tests = [test for _, tests in ROWS.values() for test in tests]
    files = sorted({test.partition("::")[0] for test in tests})
    names = " or ".join(sorted({test.partition("::")[2] for test in tests}))
    # By name, so that a test that is gone fails its row and not the whole run.
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-m", "slow or not slow", "-k", names]
    pytest.main([*options, *files], plugins=[outcomes])
    passed = {row: _has_passed(outcomes, tests) for row, (_, tests) in ROWS.items()}
    for row, (says, _) in ROWS.items():
        sys.stdout.write(f"{'ok    ' if passed[row] else 'FAILED'} row {row:2}: {says}\n")
    failed = list(passed.values()).count(False)
    sys.stdout.write(f"{len(passed) - failed} passed, {failed} failed\n")
    return int(failed > 0)


def _has_passed(outcomes: _Outcomes, tests: tuple[str, ...]) -> bool:
    return all(outcomes.found.get(test) == {"passed"} for test in tests)


if __name__ == "__main__":
    raise SystemExit(main())
