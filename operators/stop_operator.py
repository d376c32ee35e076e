"""`<p>.stop`: ends a pipeline's driver.

It stays stopped until a person starts it again, or another driver replaces it at once.
"""

from __future__ import annotations

from typing import Any

from tidegate.checkpoints.desired_state import (
    DesiredState,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import read_lease
from tidegate.operators.driver_shutdown import StopOrder, stop_driver, terminate_driver
from tidegate.operators.errors import STOP_DURING_RESTORE
from tidegate.operators.pipeline_operator import PipelineOperator, get_requester


class StopOperator(PipelineOperator):
    """Lets the driver seal what it has read, and waits for its end; then nothing starts the stream.

    A driver that has not ended after a minute is stopped by force (`stop_driver`).

    Args:
        reason: kept with the desired state; a template, by default the run's param.
        replace: end the driver by force, for example because it hangs, and leave the desired state,
            so that the stream's own task launches the next one; a template that renders to `True`
            or `False`.
    """

    ui_color = "#e8d5d5"
    template_fields = ("reason", "replace")

    def __init__(
        self,
        *,
        reason: str = "{{ params.reason }}",
        replace: str = "{{ params.replace }}",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reason, self.replace = reason, replace

    def execute(self, context: Any) -> dict[str, Any]:
        """Stop the driver; how it ended is the task's result.

        Raises:
            ConfigurationError: a restore is under way, which starts the stream at its end.
        """
        store, who = self.resolve_access().open(), get_requester(context)
        desired = read_desired_state(store, self.pipeline)
        if desired.state is DesiredState.RECOVERING:
            raise STOP_DURING_RESTORE(pipeline=self.pipeline, who=desired.who or "someone")
        if self.replace == "True":
            lease = read_lease(store, self.pipeline)
            said = terminate_driver(
                store, self.pipeline, lease.token if lease else 0, self.log.info
            )
            return {"pipeline": self.pipeline, "said": said}
        # First of all, or the trigger and the sweep would replace the driver that is stopped next.
        set_desired_state(store, self.pipeline, DesiredState.STOPPED, who=who, why=self.reason)
        order = StopOrder(who, self.reason, asker=str(context["run_id"])[-60:])
        said = stop_driver(store, self.pipeline, order, say=self.log.info)
        self.log.info("%s", said)
        return {"pipeline": self.pipeline, "said": said}
