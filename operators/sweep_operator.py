"""The scheduled sweep.

Start what `desired.json` says should run and has neither a driver nor a run that cares for it.

A driver without a run (its run was deleted, or ended while the triggerer was down) is given one:
the run adopts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator

from tidegate.checkpoints.desired_state import DesiredState, read_desired_state, set_desired_state
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.store import Store
from tidegate.errors import FailureClass, TransientError
from tidegate.operators.liveness import read_flat_status
from tidegate.operators.store_access import StoreAccess

_ACTIVE_RUN_STATES = ["queued", "running"]
_ABANDONED_AFTER = 15 * 60 * 1_000_000  # ticks
_FINAL_FAILURE_CLASSES = {FailureClass.POISON.value, FailureClass.CONFIGURATION.value}


class SweepOperator(BaseOperator):
    """Looks at every pipeline and returns the stream DAGs that need a run.

    Args:
        pipelines: pipeline -> id of its stream DAG.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#e3e3e3"

    def __init__(
        self, *, pipelines: Mapping[str, str], conn_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.pipelines, self.conn_id = dict(pipelines), conn_id

    def execute(self, context: Any) -> Sequence[str]:
        """One look per pipeline; a store that does not answer is tried again by the next sweep."""
        store = StoreAccess.resolve(self.conn_id).open()
        wanted = []
        for pipeline, dag_id in self.pipelines.items():
            try:
                watched, recovering = (
                    context["ti"].get_dr_count(
                        dag_id=f"{pipeline}.{kind}", states=_ACTIVE_RUN_STATES
                    )
                    > 0
                    for kind in ("stream", "recover")
                )
                if not recovering:
                    end_abandoned_recovery(store, pipeline)
                start, why = decide_start(store, pipeline, watched=watched)
            except TransientError as error:
                start, why = False, error.message
            self.log.info("%s: %s", pipeline, why)
            if start:
                wanted.append(dag_id)
        return wanted


def end_abandoned_recovery(store: Store, pipeline: str, clock: Clock = SYSTEM_CLOCK) -> bool:
    """A recovery whose process was killed must not keep the stream down for ever: let it run again.

    The restore itself is one PUT, so it either happened or did not; in both cases the next driver
    knows where to go on.
    """
    desired = read_desired_state(store, pipeline)
    # Two hosts' clocks are compared, so generously: a restore from the command line has no run, and
    # takes a minute at most.
    if (
        desired.state is not DesiredState.RECOVERING
        or clock.wall_ticks() - desired.at < _ABANDONED_AFTER
    ):
        return False
    why = f"the recovery said by {desired.who} was abandoned"
    set_desired_state(
        store, pipeline, DesiredState.RUN, who="sweep", why=why, only_from=DesiredState.RECOVERING
    )
    return True


def decide_start(store: Store, pipeline: str, *, watched: bool) -> tuple[bool, str]:
    """Whether the stream needs a run, and why.

    Args:
        store: the bucket.
        pipeline: its name.
        watched: a run of its stream DAG is active; it cares for the driver itself.
    """
    desired = read_desired_state(store, pipeline)
    if desired.state is not DesiredState.RUN:
        return False, f"desired: {desired.state.value}"
    if watched:
        return False, "a run cares for it"
    lease = read_lease(store, pipeline)
    if lease is not None and not lease.is_free:
        return True, "a driver runs without a run: giving it one"
    status = read_flat_status(store, pipeline) or {}
    kind = (status.get("error") or {}).get("class")
    if status.get("state") == "failed" and kind in _FINAL_FAILURE_CLASSES:
        return False, f"waits for a person: {status['error'].get('message')}"
    return True, "should run and does not: starting it"
