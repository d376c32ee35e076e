"""The sections `quality:` and `splice:` of a pipeline.

Limits and severities of the checks, and merges in Airflow.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.jobs.spec.event_time_options import SpecModel
from tidegate.time_units import Duration

Severity = Literal["warn", "critical", "off"]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class QualityLimits(SpecModel):
    """Numbers that the suites compare with. A suite names them as ``{limit: late_ratio}``."""

    late_ratio: Ratio = 0.10
    """Rows of a source that were late for at least one output, as a share of the rows read from
    it: the limit of a warning.
    """
    late_share: Ratio = 0.10
    """Rows late for an output as a share of the rows offered to it."""
    dropped_ratio: Ratio = 0.10
    """Rows dropped for an output as a share of the rows read from the source."""
    stream_rejections: Ratio = 0.10
    """Rows that a stream rejected, as a share of the rows that the pipeline read."""
    late_ratio_critical: Ratio = 0.50
    """The same share: the limit of a critical finding."""
    late_ratio_rise: Ratio = 0.10
    """How far the late ratio of the recent epochs may exceed that of all epochs before."""
    lateness_p99: Duration = 86_400_000_000
    """99 % of a source's recent late rows missed the frontier by at most this."""
    lateness_lags: Annotated[float, Field(gt=0)] = 100
    """Largest lateness of a source's recent late rows, as a multiple of its lag."""
    barriers_complete: Ratio = 0.95
    """Least share of closed barriers that were complete."""
    barriers_missed: Ratio = 0.05
    """Largest share of closed barriers that a member missed."""
    barriers_tardy: Ratio = 0.05
    """Largest share of closed barriers to which a member came after they had closed."""
    barrier_waited_p99: Duration = 600_000_000
    """99 % of the barriers closed within this time after their first arrival."""
    barrier_complete_p99: Duration = 600_000_000
    """The same of the barriers that closed complete."""
    barrier_held_p99: Duration = 600_000_000
    """At 99 % of the barriers at which a member came last, the others waited at most this long
    for it alone.
    """
    checkpoint_age: Duration = 300_000_000
    """A pipeline that should run has sealed an epoch within this time."""
    seal_p95: Duration = 5_000_000
    """95 % of the seals took at most this long."""
    aborted_attempts: Count = 3
    """Largest number of attempts that failed before a recent epoch was sealed."""
    state_bytes: Count = 10_737_418_240
    """Largest size of the state that a recent checkpoint names, which a restore reads."""
    freshness: Annotated[Duration, Field(gt=0)] | None = None
    """95 % of the recent epochs were sealed within this time after the arrival of their oldest
    object. Without it `supervision.freshness` counts.
    """
    unpublished: Count = 50
    """Largest number of sealed epochs that the tables may lack."""
    dead_ratio: Ratio = 0.01
    """Dead letters as a share of the rows read."""
    dead_objects: Count = 0
    """Largest number of objects that could not be read."""
    rule_ratio: Ratio = 0.01
    """Rows that broke a rule of their source, as a share of the rows read from it."""
    changed_columns: Count = 0
    """Largest number of recent rows whose object lacks a declared column or has another one."""
    batch_time: Annotated[float, Field(gt=0)] = 1
    """Jobs: 95 % of the recent batches of a query took at most this share of the interval of its
    trigger.
    """
    batch_dropped: Ratio = 0.01
    """Jobs: rows of a query that the watermark dropped, as a share of the rows that it read."""
    state_growth: Annotated[float, Field(gt=0)] = 2
    """Jobs: size of a query's state in the newer half of its recent batches, as a multiple of that
    in the older half.
    """
    watermark_still: Count = 5
    """Jobs: largest number of batches that read rows while the watermark stayed where it was."""
    backlog_rising: Count = 5
    """Jobs: largest number of batches in a row after each of which more messages were waiting."""


class QualitySpec(SpecModel):
    """What the quality checks of a pipeline compare with, and how seriously they take it."""

    limits: QualityLimits = QualityLimits()
    """Numbers that the checks compare with."""
    severity: dict[str, Severity] = Field(default_factory=dict)
    """Check id and ``warn``, ``critical`` or ``off``; overrides the suite's severity."""
    owner: str | None = None
    """Who looks after the checks whose suite names no owner; without it `supervision.owner`."""
    suites: str | None = None
    """Folder of your own suites (``*.yaml``), in the folder of the spec or relative to the
    working folder.

    A file with the name of a built-in suite replaces it.
    """
    release_epochs: Annotated[int, Field(gt=0)] = 500
    """Number of newest epochs whose released events are checked; the events table is the only
    one that is never small.
    """
    # Over a pipeline's whole life a ratio hardly moves, so a fault of today would stay below every
    # limit.
    recent: Annotated[int, Field(gt=0)] = 20
    """Number of newest epochs that count as recent. Most checks judge these."""
    recent_time: Annotated[Duration, Field(gt=0)] | None = None
    """Instead of `recent`: epochs sealed within this time are recent."""


# The `splice:` section of a pipeline: when late rows are offered for a merge, by themselves.


class SpliceSpec(SpecModel):
    """What `<p>.splice` does in Airflow; the command line does not use it."""

    offer_rows: Annotated[int, Field(gt=0)] | None = None
    """Number of late rows that makes a request and asks for an approval.

    Without it requests are made only when a person starts the DAG.
    """
    offer_at: str = "0 6 * * *"
    """Cron expression of the check for late rows."""
    approvers: tuple[str, ...] = ()
    """Users who may approve.

    By default every user who can answer in Airflow may approve, except the one who asked.
    """
    patience: Duration = 86_400_000_000
    """How long a request waits for an answer.

    After that the run ends without a merge, and the request stays open.
    """
