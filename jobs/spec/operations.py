"""The `quality:` section of a pipeline.

Limits, severities and suites of the Great Expectations checks.
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
    """Late rows of a source as a share of the rows read from it."""
    late_ratio_critical: Ratio = 0.50
    """The same, where it stops being a warning."""
    late_ratio_rise: Ratio = 0.10
    """How far the late share of the newest checkpoints may lie above that of all before them."""
    lateness_p99: Duration = 86_400_000_000
    """99 % of a source's late rows missed the frontier by no more than this."""
    barriers_complete: Ratio = 0.95
    """Closed barriers that were complete, as a share."""
    barrier_waited_p99: Duration = 600_000_000
    """99 % of the barriers closed within this time after the first arrival."""
    checkpoint_age: Duration = 300_000_000
    """A stream that should run has sealed something within this time."""
    seal_p95: Duration = 5_000_000
    """95 % of the seals took no longer."""
    unpublished: Count = 50
    """Sealed epochs that the tables do not show yet."""
    dead_ratio: Ratio = 0.01
    """Dead letters as a share of the rows read."""
    dead_objects: Count = 0
    """Objects that could not be read at all."""


class QualitySpec(SpecModel):
    """What the quality checks of a pipeline compare with, and how seriously they take it."""

    limits: QualityLimits = QualityLimits()
    severity: dict[str, Severity] = Field(default_factory=dict)
    """Check id -> ``warn``, ``critical`` or ``off``; overrides the suite's own."""
    suites: str | None = None
    """Folder of own suites (``*.yaml``), relative to the working folder.

    A file named like a built-in one replaces it.
    """
    release_epochs: Annotated[int, Field(gt=0)] = 500
    """The newest epochs whose released events are looked at; the one table that is never small."""
    recent: Annotated[int, Field(gt=0)] = 20
    """The newest checkpoints that `late_ratio_rise` compares with all before them."""


# The `splice:` section of a pipeline: when late rows are offered for a merge, by themselves.


class SpliceSpec(SpecModel):
    """What `<p>.splice` does in Airflow; the command line needs none of it."""

    offer_rows: Annotated[int, Field(gt=0)] | None = None
    """As many late rows make a request and ask for an approval; default.

    Only when somebody starts the DAG.
    """
    offer_at: str = "0 6 * * *"
    """Cron of the look."""
    approvers: tuple[str, ...] = ()
    """Users who may approve; default: any who can answer in Airflow. Who asked cannot approve."""
    patience: Duration = 86_400_000_000
    """How long a question stands; then the request stays open, and the run ends without a merge."""
