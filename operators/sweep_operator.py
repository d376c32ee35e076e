"""The tasks that follow the desired state: the scheduled sweep, and `<p>.stop`.

The sweep gives a run to each stream that should run and has none.

That starts a stream without a driver. A driver without a run (its run was deleted, or ended while
the triggerer was down) is adopted by the new one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from tidegate.checkpoints.alert_delivery import find_usable_alerts
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    end_abandoned_recovery,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.incidents import announce_incidents
from tidegate.checkpoints.lease import read_lease
from tidegate.checkpoints.pipeline_overview import (
    PipelineState,
    needs_person,
    parse_reported_state,
    read_driver,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store, map_in_threads
from tidegate.errors import TidegateError, TransientError
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.loader import load_any_spec

from .driver_shutdown import StopOrder, stop_driver, terminate_driver
from .errors import STOP_DURING_RESTORE, SWEEP_UNREADABLE
from .pipeline_operator import (
    ACTIVE_RUN_STATES,
    PipelineOperator,
    get_requester,
)
from .store_access import StoreAccess
from .store_guard import shorten_patience, wrap_store

UNREADABLE_KEY = "unreadable"  # of the XCom with the pipelines that could not be judged
# Seconds. A store that is restarted is back by then, and an outage is reported within minutes.
_SECOND_LOOK_AFTER = 60.0
_REPLACED_KEY = "replaced_token"  # begins a key in the task state store


@dataclass(frozen=True)
class _Look:
    """What a sweep found of one pipeline.

    Attributes:
        why: of the conclusion.
        start: it needs a run.
        failed: it could not be judged.
        unanswered: because the store did not answer.
    """

    pipeline: str
    why: str
    start: bool = False
    failed: bool = False
    unanswered: bool = False


class SweepOperator(BaseOperator):
    """Looks at every pipeline and returns the stream DAGs that need a run.

    Args:
        pipelines: their names.
        conn_id: Airflow connection of the store; None for the environment.
        folder: of their specs.
    """

    ui_color = "#e3e3e3"

    def __init__(
        self,
        *,
        pipelines: Sequence[str],
        conn_id: str | None = None,
        folder: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipelines, self.conn_id, self.folder = pipelines, conn_id, folder

    def execute(self, context: Any) -> Sequence[str]:
        """Look at all pipelines side by side, whatever is wrong with the others.

        A recovery that was abandoned is ended, and its pipeline started. Where the store does not
        answer, it is asked once more after a minute. What could not be judged is left to another
        task, so that the other pipelines are started.
        """
        # The client gives up soon, and after some failures in a row at once.
        store = wrap_store(shorten_patience(StoreAccess.resolve(self.conn_id).open()))
        looks = self._look(context, store, self.pipelines)
        unanswered = [look.pipeline for look in looks if look.unanswered]
        if unanswered:
            self.log.info("no answer for %s: once more", ", ".join(unanswered))
            SYSTEM_CLOCK.sleep(_SECOND_LOOK_AFTER)
            again = {look.pipeline: look for look in self._look(context, store, unanswered)}
            looks = [again.get(look.pipeline, look) for look in looks]
        for look in looks:
            self.log.info("%s: %s", look.pipeline, look.why)
        unreadable = {look.pipeline: look.why for look in looks if look.failed}
        context["ti"].xcom_push(key=UNREADABLE_KEY, value=unreadable)
        return [f"{look.pipeline}.stream" for look in looks if look.start]

    def _look(self, context: Any, store: Store, pipelines: Sequence[str]) -> list[_Look]:
        # Airflow is asked first, one question after the other: a task has one line to it.
        active = [
            {
                kind: context["ti"].get_dr_count(
                    dag_id=f"{pipeline}.{kind}", states=ACTIVE_RUN_STATES
                )
                > 0
                for kind in ("stream", "recover")
            }
            for pipeline in pipelines
        ]

        def judge(asked: tuple[str, dict[str, bool]]) -> _Look:
            pipeline, runs = asked
            try:
                # With an active run, the recovery is slow but not abandoned.
                if not runs["recover"]:
                    end_abandoned_recovery(store, pipeline, who="sweep")
                start, why = decide_start(store, pipeline, watched=runs["stream"])
            except TidegateError as error:
                away = isinstance(error, TransientError)
                return _Look(pipeline, error.message, failed=True, unanswered=away)
            return _Look(pipeline, why, start=start)

        return map_in_threads(judge, list(zip(pipelines, active, strict=True)))


class SweepReportOperator(BaseOperator):
    """Announces incidents, and fails with the pipelines that the sweep could not judge.

    Args:
        specs: of the pipelines; those with alerts, of their own or the deployment's, are looked at.
        files: of their specs. In what they differ from what is deployed is noted for the page,
            which may have no file.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#e3e3e3"

    def __init__(
        self,
        *,
        specs: Sequence[SupervisedSpec] = (),
        files: Sequence[str] = (),
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.files = list(files)
        self.announcing = [spec for spec in specs if find_usable_alerts(spec)]
        self.conn_id = conn_id

    def execute(self, context: Any) -> None:
        """Name each pipeline and what is wrong with it.

        Raises:
            PoisonError: at least one pipeline could not be judged.
        """
        if self.announcing or self.files:
            store = wrap_store(shorten_patience(StoreAccess.resolve(self.conn_id).open()))
            map_in_threads(lambda spec: self._announce(store, spec), self.announcing)
            map_in_threads(lambda file: self._note_file(store, Path(file)), self.files)
        found = context["ti"].xcom_pull(task_ids="look", key=UNREADABLE_KEY) or {}
        if found:
            findings = "; ".join(f"{name}: {message}" for name, message in found.items())
            raise SWEEP_UNREADABLE(names=", ".join(found), findings=findings)

    def _note_file(self, store: Store, file: Path) -> None:
        """Note in what a file differs from what is deployed; the next sweep tries again."""
        # Imported here, because every parse of the DAGs would pay for the rules of changes.
        from tidegate.checkpoints.deployed_specs import note_file
        from tidegate.jobs.spec.user_code import collect_code

        try:
            spec = load_any_spec(file)
            note_file(store, spec.name, spec, collect_code(spec, file))
        except TidegateError as error:
            self.log.warning("%s: not compared with what is deployed: %s", file, error.message)
        except Exception:  # a defect must not hide what the sweep found
            self.log.exception("%s: not compared with what is deployed", file)

    def _announce(self, store: Store, spec: SupervisedSpec) -> None:
        """Announce the incidents of a pipeline; the next sweep tries again what fails."""
        try:
            for sent in announce_incidents(SlotLog(store, spec.name), spec):
                self.log.info("%s to %s: %s", sent.alert.title, sent.receiver, sent.error or "sent")
        except TidegateError as error:
            self.log.warning("%s: incidents not announced: %s", spec.name, error.message)
        except Exception:  # a defect must not hide what the sweep found
            self.log.exception("%s: incidents not announced", spec.name)


def decide_start(store: Store, pipeline: str, *, watched: bool) -> tuple[bool, str]:
    """Return whether the stream needs a run, and why.

    It does if it should run and no run watches it, unless its last driver has failed with an error
    that needs a person.

    Args:
        store: the bucket.
        pipeline: its name.
        watched: a run of its stream DAG is active; that run watches the driver itself.
    """
    desired = read_desired_state(store, pipeline).state
    if desired is not DesiredState.RUN:
        return False, f"desired: {desired.value}"
    if watched:
        return False, "a run cares for it"
    # One look cannot tell a silent lease from a lost one. The run that is started waits for that.
    driver = read_driver(store, pipeline)
    if not driver.lease_expired:
        return True, "a driver runs without a run: giving it one"
    # The last report, whichever driver wrote it: a lease may be newer than any report.
    error = driver.last_facts.get("error") or {}
    failed = parse_reported_state(driver.last_facts) is PipelineState.FAILED
    if failed and needs_person(error):
        return False, f"waits for a person: {error.get('message')}"
    return True, "should run and does not: starting it"


def _make_request_name(run_id: str) -> str:
    """Return a name for the request of a run; a run id may have characters that a key may not."""
    name = re.sub(r"[^A-Za-z0-9_.:@+-]", "_", run_id)
    # Two ids that differ only in such a character must not share one request.
    return name[-60:] if name == run_id else sha256(run_id.encode()).hexdigest()[:32]


class StopOperator(PipelineOperator):
    """Lets the driver seal what it has read, and waits for its end; then nothing starts the stream.

    A driver that has not ended after a minute is stopped by force (`stop_driver`).

    Args:
        reason: kept with the desired state.
        replace: end the driver by force, for example because it hangs, and leave the desired state,
            so that the stream's own task launches the next one.
    """

    ui_color = "#e8d5d5"
    template_fields = ("reason", "replace")
    reason: str
    replace: str

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
            token = self._choose_token(context, store)
            said = terminate_driver(store, self.pipeline, token, self.log.info)
            return {"pipeline": self.pipeline, "said": said}
        order = StopOrder(who, self.reason, asker=_make_request_name(str(context["run_id"])))
        # Before the stop, or the trigger and the sweep would replace the driver that is stopped.
        set_desired_state(store, self.pipeline, DesiredState.STOPPED, who=who, why=self.reason)
        said = stop_driver(store, self.pipeline, order, say=self.log.info)
        self.log.info("%s", said)
        return {"pipeline": self.pipeline, "said": said}

    def _choose_token(self, context: Any, store: Store) -> int:
        """The token of the driver to replace: the one that drove when the first try began.

        A retry that read the lease again would kill the driver that has replaced it meanwhile. A
        person who clears the task asks anew: Airflow raises `max_tries` then, so a token belongs to
        one value of it.
        """
        kept, key = context["task_state_store"], f"{_REPLACED_KEY}_{context['ti'].max_tries}"
        token = kept.get(key)
        if token is None:
            lease = read_lease(store, self.pipeline)
            token = lease.token if lease else 0
            kept.set(key, token, retention=NEVER_EXPIRE)
        return int(token)
