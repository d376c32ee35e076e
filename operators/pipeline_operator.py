"""The base of tidegate's operators: which pipeline, its spec, and its store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import DagRunTriggerException
from airflow.triggers.base import BaseTrigger

from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.operations import SupervisionSpec
from tidegate.json_types import JsonObject

from .child_processes import kill_children
from .store_access import StoreAccess

ACTIVE_RUN_STATES = ["queued", "running"]


class PipelineOperator(BaseOperator):
    """A task about one pipeline.

    Each of its `template_fields` is an option and an attribute. Its default is in
    `default_templates`, or it is the run's param of that name. It renders to text, a flag to `True`
    or `False`.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file, as the workers see it; not every task needs it.
        conn_id: Airflow connection of the store; None for the environment (`TIDEGATE_STORE`).
        supervision: options of the spec; None for the defaults. Not every task needs it.
    """

    default_templates: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str = "",
        conn_id: str | None = None,
        supervision: SupervisionSpec | None = None,
        **kwargs: Any,
    ) -> None:
        templates = {name: f"{{{{ params.{name} }}}}" for name in self.template_fields}
        templates |= self.default_templates
        options = {name: kwargs.pop(name, default) for name, default in templates.items()}
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id
        self.supervision = supervision or SupervisionSpec()
        for name, option in options.items():
            setattr(self, name, option)

    def on_kill(self) -> None:
        """End the command that the task runs, if any: Airflow is about to end the task."""
        kill_children()

    def resolve_access(self) -> StoreAccess:
        """Return the address of the pipeline's store."""
        return StoreAccess.resolve(self.conn_id)

    def open_log(self) -> SlotLog:
        """Open the pipeline's log; its `store` is the pipeline's store."""
        return SlotLog(self.resolve_access().open(), self.pipeline)


def get_requester(context: Any) -> str:
    """Return the user who started the run; ``airflow`` for a scheduled one."""
    return str(getattr(context.get("dag_run"), "triggering_user_name", None) or "airflow")


def render_text(template: str, **values: Any) -> str:
    """Return what `templates/<template>.txt` makes of values, without the last line break."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(  # noqa: S701 - the texts are not HTML
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,  # a misspelt field must fail in the tests
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["json"] = json.dumps
    return templates.get_template(f"{template}.txt").render(values).strip("\n")


@dataclass(kw_only=True, eq=False, repr=False)
class PipelineTrigger(BaseTrigger):
    """A trigger about one pipeline.

    Airflow's database has the class path and the fields of each subclass, so neither may change.

    Attributes:
        pipeline: its name.
        conn_id: Airflow connection of the store; None for the environment.
    """

    pipeline: str
    conn_id: str | None = None

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's

    def serialize(self) -> tuple[str, JsonObject]:
        """Return the class path and the arguments that Airflow's database keeps."""
        kind = type(self)
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"{kind.__module__}.{kind.__name__}", arguments

    def open_store(self) -> Store:
        """Open the store, by the client that all triggers of this process share."""
        return StoreAccess.resolve(self.conn_id).open_shared()


def start_dag_run(
    dag_id: str, run_id: str, note: str, *, conf: JsonObject | None = None, once: bool = False
) -> DagRunTriggerException:
    """Return the exception by which a task ends successfully and has Airflow start a run.

    If a run with this id exists, the task fails; with `once` it is skipped. The `note` is shown
    with the run.
    """
    return DagRunTriggerException(
        trigger_dag_id=dag_id,
        dag_run_id=run_id,
        conf=conf,
        reset_dag_run=False,
        skip_when_already_exists=once,
        wait_for_completion=False,
        allowed_states=[],
        failed_states=[],
        poke_interval=1,
        deferrable=False,
        note=note,
    )
