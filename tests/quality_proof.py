"""Every preset in every trouble, on every surface: ``make quality-proof``.

Each cell writes down the rows of a pipeline, so what has to be counted and which checks have to
fail follow from the cell itself. A preset only sets defaults, so a trouble that its own policies
exclude is played with the option that allows it; `choose_options` has these. What no option makes
possible is not applicable, with the reason where the trouble returns None. The real engine seals the epochs with the oracle mover, which the
Spark mover is compared with elsewhere. The last line is ``N cells, N differences, N not
applicable``.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.driver.sealed_epochs import FACTS, measured
from tests.engine.harness import barrier, row, spec_of
from tests.expectations.evidence_reading import gather_evidence
from tests.expectations.preset_pipelines import BREAKING_VALUES, FILTERED_VALUE, RECENT, Pipeline
from tidegate.checkpoints.pipeline_overview import read_overview
from tidegate.checkpoints.slot_index import SlotIndex
from tidegate.expectations.summaries import (
    summarize_barriers,
    summarize_dead_letter_health,
    summarize_dropped,
    summarize_late_by_output,
    summarize_late_by_source,
    summarize_rules,
)
from tidegate.jobs.cli.status_and_logs import _describe_progress
from tidegate.jobs.driver.otel_metrics import DriverMetrics
from tidegate.jobs.engine.interfaces import DeadObject
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.operators.assets import _extract_event_position
from tidegate.operators.page_data import build_epoch_point

PASS_THROUGH: Final = ("hazelcast", "flink", "wire")
ORDERED: Final = {"nscldaq": "flagged", "streaminsight": "dropped", "pipet": "rejected"}
PRESETS: Final = (*ORDERED, *PASS_THROUGH)
HEALTHY_EPOCHS: Final = 3
BAD: Final = 3  # rows in trouble of each source in an epoch, beside one healthy row
_TOTAL: Final = 2 * RECENT * BAD
_LATE_CHECKS: Final = (
    *("late_ratio", "late_ratio_critical", "late_ratio_all", "late_ratio_rise", "late_share"),
)
_DEAD_CHECKS: Final = ("dead_ratio", "dead_ratio_critical", "dead_ratio_all")
_INCOMPLETE_CHECKS: Final = (
    *("barriers_complete", "barriers_complete_all", "barriers_missed", "barrier_types_complete"),
)


@dataclass
class Expected:
    """What a cell has to show.

    Attributes:
        counts: name of a count -> rows of all sources; counts that are left out are 0.
        late: output -> rows late for it.
        barriers: (id, outcome, homogeneous, tardy members) of each barrier.
        failed: ids of the checks that fail.
    """

    counts: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    barriers: list[tuple[int, str, str, str]] = field(default_factory=list)
    failed: tuple[str, ...] = ()


POLICIES: Final = {"flagged": "emit_flagged", "dropped": "drop", "rejected": "reject_to_origin"}
"""Disposition of a late row -> the `on_late` that gives it."""


def choose_options(preset: str, trouble: str) -> dict[str, Any]:
    """The options of the spec that a trouble needs beside the preset."""
    if trouble in POLICIES and preset in ORDERED:
        return {"release": {"on_late": POLICIES[trouble]}}
    if trouble in POLICIES:
        window = spec_of().windows["w"].model_dump(mode="json", exclude_defaults=True)
        return {"windows": {"w": {**window, "on_late": POLICIES[trouble]}}}
    # These wait for a barrier without end by themselves.
    if trouble in ("incomplete", "tardy") and preset not in ("nscldaq", "wire"):
        return {"barriers": {"timeout": "80s"}}
    return {}


def start_pipeline(preset: str, trouble: str) -> Pipeline:
    """A pipeline with the options of a trouble, after its healthy epochs."""
    pipeline = Pipeline(preset, choose_options(preset, trouble))
    for _ in range(HEALTHY_EPOCHS):
        pipeline.run_epoch()
    return pipeline


Trouble = Callable[[Pipeline, str], Expected | None]
"""Plays a trouble on a preset; None if the preset cannot have it."""


def play_no_late_rows(pipeline: Pipeline, _preset: str) -> Expected:
    """Everything in time."""
    for _ in range(RECENT):
        pipeline.run_epoch()
    return Expected()


def play_late_for_events(pipeline: Pipeline, preset: str) -> Expected | None:
    """Rows behind everything that left; the window has been purged as well."""
    if preset not in ORDERED:  # under `pass_through` no row is late for the order (semantics, 3.3)
        return None
    return play_late_for_both(pipeline, ORDERED[preset])


def play_late_for_both(pipeline: Pipeline, disposition: str) -> Expected:
    """Rows late for events and window, with what the release does with them."""
    for _ in range(RECENT):
        pipeline.run_epoch(*(row(n) for n in range(1, 1 + BAD)))
    dropped = ("dropped_ratio",) if disposition == "dropped" else ()
    return Expected(
        {"late_rows": _TOTAL, disposition: _TOTAL},
        {"events": _TOTAL, "w": _TOTAL},
        failed=(*_LATE_CHECKS, *dropped),
    )


def play_late_for_windows(pipeline: Pipeline, preset: str) -> Expected | None:
    """Under `pass_through` rows are late for windows only."""
    if (
        preset not in PASS_THROUGH
    ):  # late for a window is late for the events too, in the cell above
        return None
    for _ in range(RECENT):
        pipeline.run_epoch(*(row(n) for n in range(1, 1 + BAD)))
    return Expected({"late_rows": _TOTAL}, {"w": _TOTAL}, failed=_LATE_CHECKS)


def play_disposition(disposition: str) -> Trouble:
    """Late rows of the release that has this policy; under `pass_through` of the window."""

    def play(pipeline: Pipeline, preset: str) -> Expected | None:
        if preset in ORDERED:
            return play_late_for_both(pipeline, disposition)
        if disposition == "flagged":  # windows have no such policy: they release no rows
            return None
        expected = play_late_for_windows(pipeline, preset)
        if expected and disposition == "dropped":
            expected.failed = (*expected.failed, "dropped_ratio")
        return expected

    return play


def play_incomplete(pipeline: Pipeline, preset: str) -> Expected:
    """One source does not bring its barrier within the timeout."""
    outcome = close_without_b(pipeline, preset)
    waited = ("barriers_waited",) if preset == "wire" else ()  # its timeout is as long as the limit
    return Expected(barriers=[(1, outcome, "yes", "")], failed=(*_INCOMPLETE_CHECKS, *waited))


def play_tardy(pipeline: Pipeline, preset: str) -> Expected | None:
    """The source brings its barrier after the close, behind one row of the same epoch."""
    if preset == "wire":  # it aborts the barrier, and ignores later rows of its id
        return None
    outcome = close_without_b(pipeline, preset)
    pipeline.run_epoch(markers={"b": barrier(pipeline.time + 10, 1)})
    failed = (*_INCOMPLETE_CHECKS, "barriers_tardy", "barrier_members_tardy")
    return Expected({"tardy": 1}, barriers=[(1, outcome, "yes", "b/0")], failed=failed)


def close_without_b(pipeline: Pipeline, preset: str) -> str:
    """Let a barrier of source a time out; return its outcome."""
    pipeline.run_epoch(markers={"a": barrier(pipeline.time + 10, 1)})
    # More than the timeout: 10 minutes, or four build windows of 20 s.
    pipeline.bench.clock.advance(700 if preset == "wire" else 100)
    while not pipeline.bench.rows("barriers"):
        pipeline.run_epoch()
    return "aborted" if preset == "wire" else "incomplete"


def play_heterogeneous(pipeline: Pipeline, _preset: str) -> Expected:
    """The sources bring different types to one barrier."""
    at = pipeline.time + 10
    pipeline.run_epoch(markers={"a": barrier(at, 1), "b": {**barrier(at, 1), "kind": "end"}})
    pipeline.run_epoch()
    return Expected(barriers=[(1, "complete", "no", "")], failed=("barriers_homogeneous",))


def play_dead_rows(pipeline: Pipeline, _preset: str) -> Expected:
    """Rows without an event time."""
    for _ in range(RECENT):
        pipeline.run_epoch(*({**row(0), "t": None} for _ in range(BAD)))
    return Expected({"dead_lettered": _TOTAL}, failed=_DEAD_CHECKS)


def play_broken_rule(severity: str, *counts: str, failed: tuple[str, ...] = ()) -> Trouble:
    """Rows in time that break the rule of one severity."""

    def play(pipeline: Pipeline, _preset: str) -> Expected:
        for _ in range(RECENT):
            bad = row(pipeline.time + 10, BREAKING_VALUES[severity])
            pipeline.run_epoch(*(bad for _ in range(BAD)))
        return Expected(dict.fromkeys(counts, _TOTAL), failed=("rule_ratio", *failed))

    return play


def play_filtered(pipeline: Pipeline, _preset: str) -> Expected:
    """Rows that `where` leaves out."""
    for _ in range(RECENT):
        bad = row(pipeline.time + 10, FILTERED_VALUE)
        pipeline.run_epoch(*(bad for _ in range(BAD)))
    return Expected({"filtered": _TOTAL})


def play_dead_objects(pipeline: Pipeline, _preset: str) -> Expected:
    """An object with a column that no one declared: 50 rows that no one reads."""
    source = pipeline.bench.sources["a"]
    dead = DeadObject(Member("a"), 1, "inbox/x/1", "e", 9, "unknown_column", "extra", 50)
    source.set_aside.append(dead)  # type: ignore[attr-defined]
    for _ in range(RECENT):
        pipeline.run_epoch()
    return Expected({"dead_objects": 1, "dead_object_rows": 50}, failed=("dead_objects",))


TROUBLES: Final[Mapping[str, Trouble]] = {
    "no late rows": play_no_late_rows,
    "late for events": play_late_for_events,
    "late for windows": play_late_for_windows,
    "flagged": play_disposition("flagged"),
    "dropped": play_disposition("dropped"),
    "rejected": play_disposition("rejected"),
    "tardy": play_tardy,
    "incomplete": play_incomplete,
    "heterogeneous": play_heterogeneous,
    "dead rows": play_dead_rows,
    "dead objects": play_dead_objects,
    "quarantined": play_broken_rule(
        "quarantine", "rule_quarantined", failed=("dead_ratio_critical",)
    ),
    "dropped by a rule": play_broken_rule("drop", "dropped", failed=("dropped_ratio",)),
    "warned": play_broken_rule("warn", "rule_warned"),
    "filtered": play_filtered,
}
COUNTED: Final = (
    *("late_rows", "flagged", "dropped", "rejected", "tardy"),
    *("dead_lettered", "dead_objects", "dead_object_rows", "rule_quarantined", "rule_warned"),
    "filtered",
)


def list_differences(pipeline: Pipeline, expected: Expected) -> Iterator[str]:
    """Compare every surface with what the cell has to show."""
    wanted = {name: expected.counts.get(name, 0) for name in COUNTED}
    for surface, shown in read_surfaces(pipeline).items():
        for name, value in shown.items():
            right = expected.late if name == "late" else wanted[name]
            if value != right:
                yield f"{surface}: {name} is {value}, not {right}"
    evidence = gather_evidence(
        pipeline.bench.spec, pipeline.bench.store, pipeline.read_table, clock=pipeline.bench.clock
    )
    frame = summarize_barriers(evidence)[["barrier_id", "outcome", "homogeneous", "tardy"]]
    barriers = [tuple(found) for found in frame.itertuples(index=False)]
    if barriers != expected.barriers:
        yield f"suites: barriers are {barriers}, not {expected.barriers}"
    failed = {check["id"] for check in pipeline.check()["failed"]}
    if failed != set(expected.failed):
        yield f"suites: {sorted(failed)} failed, not {sorted(expected.failed)}"


def read_surfaces(pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """What each surface shows, as far as it shows it."""
    bench, head = pipeline.bench, pipeline.bench.epochs()[-1]
    overview = read_overview(bench.log)
    counts = overview.row_counts
    status, page = _describe_progress(overview)["counts"], build_epoch_point(head)
    rows, outputs = measure_rows(pipeline)
    evidence = gather_evidence(bench.spec, bench.store, pipeline.read_table, clock=bench.clock)
    by_output = summarize_late_by_output(evidence).set_index("output")["rows_late"]
    dead = summarize_dead_letter_health(evidence).iloc[0]
    noted = [*("late_rows", "flagged", "tardy", "dead_objects", "dead_object_rows")]
    noted += ("rule_quarantined", "rule_warned", "filtered")
    rules = summarize_rules(evidence).groupby("severity")["rows_broken"].sum()
    return {
        "manifest": {**{name: counts[name] for name in COUNTED}, "late": counts.late_by_output},
        "status": {**{name: status[name] for name in noted}, "late": status["late_by_output"]},
        "page": {
            **{name: page["counts"][name] for name in noted},
            "late": page["counts"]["late_by_output"],
            "late_rows": page["late"],
            "dead_lettered": page["dead"] - page["counts"]["rule_quarantined"],
        },
        "list of checkpoints": {
            "late_rows": next(SlotIndex(bench.log).iterate_newest_first(0)).late
        },
        "asset": {"late_rows": _extract_event_position(head)["late"]},
        "metrics": {**{name: rows.get(name, 0) for name in COUNTED}, "late": outputs},
        "suites": {
            "late_rows": int(summarize_late_by_source(evidence)["rows_late"].sum()),
            "late": {output: int(late) for output, late in by_output.items() if late},
            "dropped": int(
                summarize_dropped(evidence).query("output == 'events'")["rows_dropped"].sum()
            ),
            "dead_lettered": int(dead["dead_rows"]),
            "dead_objects": int(dead["dead_objects"]),
            "dead_object_rows": int(dead["dead_object_rows"]),
            "rule_quarantined": int(rules["quarantine"]),
            "rule_warned": int(rules["warn"]),
        },
    }


def measure_rows(pipeline: Pipeline) -> tuple[dict[str, int], dict[str, int]]:
    """Rows by disposition and late rows by output, as the driver's metrics add them up."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    clock = pipeline.bench.clock
    metrics = DriverMetrics(provider.get_meter("t"), "p", lambda: FACTS, clock, lambda: 5.0)
    for report in pipeline.reports:
        metrics.record_epoch(report, 0.5)
    rows: dict[str, int] = {}
    outputs: dict[str, int] = {}
    for (name, attributes), value in measured(reader).items():
        labels = dict(attributes)
        if name == "tidegate.rows":
            rows[labels["disposition"]] = rows.get(labels["disposition"], 0) + value
        if name == "tidegate.rows.late":
            outputs[labels["output"]] = value
    provider.shutdown()
    return rows, outputs


def main() -> int:
    """Play every cell; return 1 if a surface differs."""
    warnings.simplefilter("ignore")  # Great Expectations warns about its own dependencies
    logging.disable(logging.WARNING)
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)
    cells = differences = skipped = 0
    for trouble, play in TROUBLES.items():
        for preset in PRESETS:
            pipeline = start_pipeline(preset, trouble)
            expected = play(pipeline, preset)
            if expected is None:
                skipped += 1
                continue
            cells += 1
            for difference in list_differences(pipeline, expected):
                differences += 1
                sys.stdout.write(f"{trouble}, {preset}: {difference}\n")
    sys.stdout.write(f"{cells} cells, {differences} differences, {skipped} not applicable\n")
    return int(differences > 0)


if __name__ == "__main__":
    raise SystemExit(main())
