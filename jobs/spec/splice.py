"""The `splice:` section of a pipeline: when late rows are offered for a merge, by themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.jobs.spec.options import SpecModel
from tidegate.jobs.spec.time import Duration

__all__ = ["SpliceSpec"]


class SpliceSpec(SpecModel):
    """What `<p>.splice` does in Airflow; the command line needs none of it."""

    offer_rows: Annotated[int, Field(gt=0)] | None = None
    """As many late rows make a request and ask for an approval; default: only when somebody starts the DAG."""
    offer_at: str = "0 6 * * *"
    """Cron of the look."""
    approvers: tuple[str, ...] = ()
    """Users who may approve; default: any who can answer in Airflow. Who asked cannot approve."""
    patience: Duration = 86_400_000_000
    """How long a question stands; then the request stays open, and the run ends without a merge."""
