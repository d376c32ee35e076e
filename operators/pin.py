"""Keep a checkpoint under a name, or give the name up. A run of its own, so that it stands in Airflow's audit log."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator

from tidegate.checkpoints.catalog import CheckpointCatalog
from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.roots import RootsFile, pin_checkpoint
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.operators.access import StoreAccess
from tidegate.operators.recover import get_requester

__all__ = ["PinOperator"]


class PinOperator(BaseOperator):
    """Pins a checkpoint of a pipeline, or unpins it. Trying again is harmless.

    Args:
        pipeline: name of the pipeline.
        action: `pin` or `unpin`; a template, as are the others; by default the run's params.
        checkpoint: `latest`, `latest_healthy`, another pin, or an id; not looked at by `unpin`.
        name: the name to give or to give up.
        reason: kept with the pin.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#d9e6f3"
    template_fields = ("action", "checkpoint", "name", "reason")

    def __init__(
        self,
        *,
        pipeline: str,
        action: str = "{{ params.action }}",
        checkpoint: str = "{{ params.checkpoint }}",
        name: str = "{{ params.name }}",
        reason: str = "{{ params.reason }}",
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.conn_id = pipeline, conn_id
        self.action, self.checkpoint, self.name, self.reason = action, checkpoint, name, reason

    def execute(self, context: Any) -> dict[str, Any]:
        """Change the pins; what they are afterwards is the task's result.

        Raises:
            ConfigurationError: the name is missing or taken, or the checkpoint is unknown or condemned.
            PoisonError: the checkpoint was retired.
        """
        log = SlotLog(StoreAccess.resolve(self.conn_id).open(), self.pipeline)
        roots = RootsFile(log.store, self.pipeline)
        if not self.name:
            raise ConfigurationError(
                "a pin needs a name", code="pin.no_name", pipeline=self.pipeline, advice="start it with a name"
            )
        if self.action == "unpin":
            roots.unpin(self.name)
            self.log.info("%s is no pin any more", self.name)
        else:
            target = CheckpointCatalog(log).resolve(self.checkpoint)
            pin_checkpoint(log, self.name, target, who=get_requester(context), why=self.reason)
            self.log.info("%s is kept as %s", target, self.name)
        return {"pipeline": self.pipeline, "pins": {name: pin.checkpoint for name, pin in roots.read().pins.items()}}
