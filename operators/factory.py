"""Build Airflow DAGs from a folder of pipeline specs.

Parsing reads YAML and nothing else: no store, no Spark, no expectations.

    <p>.stream      supervises the driver
    <p>.recover     goes back to a chosen checkpoint
    <p>.pin         keeps a checkpoint by name
    <p>.quality     checks, on asset events
    <p>.maintain    index, retention, scrub, once a night
    <p>.backfill    runs a past range as a batch
    <p>.splice      merges late rows into history
    <p>.windows     announces closed periods, if the spec says so
    tidegate.sweep  starts what should run and does not

One broken spec does not stop the others. What is wrong with it becomes a separate DAG, which fails
and names the mistakes, and an import error of a file that asks for it (`check_specs`); see
docs/decisions/0065-a-broken-spec-gets-a-failing-dag.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, BaseOperator, CronDataIntervalTimetable, Param

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.operators.assets import ClosedWindowsOperator, stream_asset
from tidegate.operators.backfill_operator import BackfillOperator
from tidegate.operators.errors import SPEC_INVALID, SPEC_NAME_TAKEN
from tidegate.operators.maintain_operator import MaintainOperator
from tidegate.operators.quality_operator import QualityOperator
from tidegate.operators.recover_and_pin import PinOperator, RecoverOperator
from tidegate.operators.stream_operator import StreamOperator
from tidegate.operators.sweep_operator import SweepOperator

STORE_TAG_PREFIX: Final = "store:"  # of the tag that names the store's Airflow connection
SWEEP_DAG_ID: Final = "tidegate.sweep"
BROKEN_SPECS_DAG_ID: Final = "tidegate.broken_specs"
_BROKEN_SPECS_CRON: Final = "*/15 * * * *"
# A check costs about ten seconds of one core, most of it importing Great Expectations.
QUALITY_EVERY_SECONDS: Final = 600.0
# The least time between two announcements of closed periods; long periods need fewer looks.
ANNOUNCE_EVERY_SECONDS: Final = 10.0
_DAG_DEFAULTS: Final[dict[str, Any]] = {
    "start_date": datetime(2026, 1, 1, tzinfo=UTC),
    "catchup": False,
    "max_active_runs": 1,
    "is_paused_upon_creation": False,
}


def build_dags(
    folder: str | Path,
    *,
    conn_id: str | None = None,
    quality_every: float = QUALITY_EVERY_SECONDS,
    on_failure: Sequence[Callable[[Any], Any]] = (),
) -> dict[str, DAG]:
    """Return all DAGs for the specs in a folder, by id.

    Args:
        folder: holds one `*.yaml` file per pipeline.
        conn_id: Airflow connection of the store; None for the environment (`TIDEGATE_STORE`).
        quality_every: at most one check per pipeline in so many seconds.
        on_failure: Airflow's notifiers, or functions of a context, called when a task of any of
            these DAGs fails.
    """
    specs, findings = _read_specs(folder)
    dags = [
        dag
        for spec, path in specs.values()
        for dag in _build_pipeline_dags(spec, str(path.absolute()), conn_id, quality_every)
    ]
    dags += _build_sweep_dags([spec for spec, _ in specs.values()], conn_id)
    if findings:
        dags.append(_build_broken_specs_dag(findings))
    for task in (task for dag in dags for task in dag.tasks if isinstance(task, BaseOperator)):
        task.on_failure_callback = list(on_failure)
    return {dag.dag_id: dag for dag in dags}


def check_specs(folder: str | Path) -> None:
    """Read all specs of a folder, so that mistakes show in Airflow's banner of import errors.

    The DAG file that calls this must build no DAGs: an import error makes all DAGs of its file
    stale, and Airflow starts none of them.

    Args:
        folder: holds one `*.yaml` file per pipeline.

    Raises:
        ConfigurationError: file, line and field of each mistake.
    """
    _, findings = _read_specs(folder)
    if findings:
        raise _build_spec_error(findings)


def _read_specs(folder: str | Path) -> tuple[dict[str, tuple[PipelineSpec, Path]], list[str]]:
    """The valid specs by name, and what is wrong with the others."""
    specs: dict[str, tuple[PipelineSpec, Path]] = {}
    findings = []
    for path in sorted(Path(folder).glob("*.yaml")):
        try:
            spec = load_spec(path)
            if spec.name in specs:
                taken_by = specs[spec.name][1]
                raise SPEC_NAME_TAKEN(path=path, name=spec.name, taken_by=taken_by)
        except ConfigurationError as error:
            findings.append(error.message)
        else:
            specs[spec.name] = (spec, path)
    return specs, findings


def _build_spec_error(findings: Sequence[str]) -> ConfigurationError:
    return SPEC_INVALID(findings="\n".join(findings))


def _build_pipeline_dags(
    spec: PipelineSpec, path: str, conn_id: str | None, quality_every: float
) -> Iterable[DAG]:
    yield _build_stream_dag(spec, path, conn_id)
    yield _build_recover_dag(spec, path, conn_id)
    yield _build_pin_dag(spec, conn_id)
    yield _build_quality_dag(spec, path, conn_id, quality_every)
    yield _build_maintain_dag(spec, path, conn_id)
    if spec.windows:
        yield _build_backfill_dag(spec, path, conn_id)
    if spec.windows or spec.splice.offer_rows is not None:
        yield _build_splice_dag(spec, path, conn_id)
    if spec.supervision.announce is not None and spec.windows:
        yield _build_windows_dag(spec, spec.supervision.announce, conn_id)


def _build_stream_dag(spec: PipelineSpec, path: str, conn_id: str | None) -> DAG:
    supervision = spec.supervision
    what = "Runs the stream: adopts a live driver or launches one, and stays with it."
    # The page reads DAGs from Airflow's database, which has no arguments of operators but has tags.
    tags = [] if conn_id is None else [f"{STORE_TAG_PREFIX}{conn_id}"]
    rotate_after = supervision.rotate_after
    with _make_dag(spec, "stream", what, tags=tags) as dag:
        StreamOperator(
            task_id="stream",
            pipeline=spec.name,
            spec=path,
            recover_to=supervision.recover_to,
            conn_id=conn_id,
            stall_after=supervision.stall_after / 1e6,
            start_timeout=supervision.start_timeout / 1e6,
            submit=_dump_submit_settings(spec),
            rotate_after=None if rotate_after is None else rotate_after / 1e6,
            retries=supervision.retries,
            retry_delay=timedelta(microseconds=supervision.retry_delay),
        )
    return dag


def _dump_submit_settings(spec: PipelineSpec) -> dict[str, Any] | None:
    submit = spec.supervision.submit
    return None if submit is None else submit.model_dump()


def _text(title: str, description: str, default: str = "") -> Param:
    return Param(default, type="string", title=title, description=description)


def _flag(title: str, description: str = "") -> Param:
    return Param(False, type="boolean", title=title, description=description or None)


def _build_recover_dag(spec: PipelineSpec, path: str, conn_id: str | None) -> DAG:
    names = "`latest`, `latest_healthy`, a pin, or an id such as t0-000123-ab12cd"
    params = {
        "checkpoint": _text("Checkpoint", f"{names} from the Streams page.", "latest"),
        "reason": _text("Reason", "Kept with the restore, for people who ask later."),
        "dry_run": _flag("Dry run", "Verify and report only; nothing is changed."),
    }
    what = "Goes back to a checkpoint: verify, report, stop, restore, start again."
    with _make_dag(spec, "recover", what, params=params) as dag:
        approval = _add_approval_tasks(spec, conn_id) if spec.supervision.approval else None
        recover = RecoverOperator(
            task_id="recover",
            pipeline=spec.name,
            spec=path,
            approval=approval and (approval.task_id, *approval.upstream_task_ids),
            submit=_dump_submit_settings(spec),
            conn_id=conn_id,
        )
        if approval is not None:
            approval >> recover
    return dag


def _add_approval_tasks(spec: PipelineSpec, conn_id: str | None) -> Any:
    # Imported only for specs that ask for it: the human-in-the-loop costs every parse a tenth of a
    # second.
    from tidegate.operators.restore_approval import (
        REPORT_TASK_ID,
        ApproveRestoreOperator,
        ReportRestoreOperator,
    )

    supervision = spec.supervision
    report = ReportRestoreOperator(task_id=REPORT_TASK_ID, pipeline=spec.name, conn_id=conn_id)
    timeout = supervision.approval_timeout
    approve = ApproveRestoreOperator(
        task_id="approve",
        pipeline=spec.name,
        approvers=supervision.approvers,
        conn_id=conn_id,
        response_timeout=None if timeout is None else timedelta(microseconds=timeout),
        retries=2,
        retry_delay=timedelta(seconds=2),
    )
    report >> approve
    return approve


def _build_pin_dag(spec: PipelineSpec, conn_id: str | None) -> DAG:
    params = {
        "action": Param("pin", type="string", enum=["pin", "unpin"], title="Action"),
        "checkpoint": _text("Checkpoint", "`latest`, a pin, or an id; for `pin`.", "latest"),
        "name": _text("Name", "The pin's name, by which the checkpoint can be restored."),
        "reason": _text("Reason", "Kept with the pin."),
    }
    what = "Keeps a checkpoint under a name, or gives the name up."
    retry: dict[str, Any] = {"retries": 2, "retry_delay": timedelta(seconds=5)}
    with _make_dag(spec, "pin", what, params=params) as dag:
        PinOperator(task_id="pin", pipeline=spec.name, conn_id=conn_id, **retry)
    return dag


def _build_quality_dag(spec: PipelineSpec, path: str, conn_id: str | None, every: float) -> DAG:
    # One asset, so that there is one throttle: late rows and troubled barriers come with a sealed
    # checkpoint anyway.
    schedule = [stream_asset(spec.name, "sealed", every, conn_id)]
    what = "Checks late rows, barriers and checkpoints."
    with _make_dag(spec, "quality", what, schedule=schedule) as dag:
        QualityOperator(task_id="quality", pipeline=spec.name, spec=path, conn_id=conn_id)
    return dag


def _build_maintain_dag(spec: PipelineSpec, path: str, conn_id: str | None) -> DAG:
    what = "Retires old checkpoints, reads a share of the others, keeps the index fresh."
    with _make_dag(spec, "maintain", what, schedule=spec.supervision.maintain) as dag:
        MaintainOperator(task_id="maintain", pipeline=spec.name, spec=path, conn_id=conn_id)
    return dag


def _build_backfill_dag(spec: PipelineSpec, path: str, conn_id: str | None) -> DAG:
    instant = "An instant with its offset, 2026-01-31T00:00:00Z; empty in a scheduled run: its"
    params = {
        "start": _text("First window start", f"{instant} data interval."),
        "end": _text("End of the last window", f"{instant} data interval."),
        "fail_on_difference": _flag("Fail on a difference"),
        "replace": _flag("Replace", "Ask for the late rows of the range to be merged."),
    }
    cron = spec.supervision.backfill
    schedule = None if cron is None else CronDataIntervalTimetable(cron, timezone="UTC")
    what = (
        "Runs the pipeline over a past range as a batch and compares its windows with the stream's."
    )
    with _make_dag(spec, "backfill", what, schedule=schedule, params=params) as dag:
        BackfillOperator(task_id="backfill", pipeline=spec.name, spec=path, conn_id=conn_id)
    return dag


def _build_splice_dag(spec: PipelineSpec, path: str, conn_id: str | None) -> DAG:
    # Imported here as in `_add_approval_tasks`.
    from tidegate.operators.splice_operators import add_splice_tasks

    request = _text("Splice request", "Its id; empty: the late rows are offered as one.")
    schedule = spec.splice.offer_at if spec.splice.offer_rows is not None else None
    what = "Merges late rows and dead letters back, after a person has seen the exact effect."
    with _make_dag(spec, "splice", what, schedule=schedule, params={"request": request}) as dag:
        add_splice_tasks(spec, path, conn_id)
    return dag


def _build_windows_dag(spec: PipelineSpec, period: int, conn_id: str | None) -> DAG:
    # A tenth of the period, in seconds: a DAG per hour need not start within a second of its end.
    every = max(ANNOUNCE_EVERY_SECONDS, period / 1e7)
    schedule = [stream_asset(spec.name, "frontier", every, conn_id)]
    what = "Announces closed periods as partitions of the windows' assets."
    with _make_dag(spec, "windows", what, schedule=schedule) as dag:
        ClosedWindowsOperator(
            task_id="windows",
            pipeline=spec.name,
            windows=list(spec.windows),
            period=period,
            conn_id=conn_id,
            retries=2,
        )
    return dag


def _make_dag(
    spec: PipelineSpec, kind: str, what: str, *, tags: Sequence[str] = (), **kwargs: Any
) -> DAG:
    return DAG(
        dag_id=f"{spec.name}.{kind}",
        description=what,
        doc_md=spec.description or None,
        tags=["tidegate", spec.name, *tags],
        default_args={"owner": spec.supervision.owner},
        **{"schedule": None, **_DAG_DEFAULTS, **kwargs},
    )


def _build_sweep_dags(specs: Sequence[PipelineSpec], conn_id: str | None) -> list[DAG]:
    """One sweep for all pipelines with the same cron.

    A process per pipeline would cost more than the streams that it guards.
    """
    groups: dict[str, list[PipelineSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.supervision.sweep].append(spec)
    usual = max(groups, key=lambda cron: len(groups[cron]), default="")
    return [
        _build_sweep_dag(
            SWEEP_DAG_ID if cron == usual else f"{SWEEP_DAG_ID}.{_slugify_cron(cron)}",
            cron,
            group,
            conn_id,
        )
        for cron, group in groups.items()
    ]


def _build_sweep_dag(
    dag_id: str, cron: str, specs: Sequence[PipelineSpec], conn_id: str | None
) -> DAG:
    with DAG(
        dag_id=dag_id,
        description="Starts every stream that should run and has no driver.",
        schedule=cron,
        tags=["tidegate"],
        **_DAG_DEFAULTS,
    ) as dag:
        look = SweepOperator(
            task_id="look",
            pipelines={spec.name: f"{spec.name}.stream" for spec in specs},
            conn_id=conn_id,
        )
        TriggerDagRunOperator.partial(task_id="start").expand(trigger_dag_id=look.output)
    return dag


def _slugify_cron(cron: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", cron.lower().replace("*", "x")).strip("_")


def _build_broken_specs_dag(findings: list[str]) -> DAG:
    """A DAG that fails and says why.

    An import error instead would make every DAG of the file stale, and Airflow would start none.
    """
    with DAG(
        dag_id=BROKEN_SPECS_DAG_ID,
        description=findings[0],
        doc_md="\n".join(f"- {finding}" for finding in findings),
        schedule=_BROKEN_SPECS_CRON,
        tags=["tidegate"],
        **_DAG_DEFAULTS,
    ) as dag:
        BrokenSpecsOperator(task_id="read", findings=findings, retries=0)
    return dag


class BrokenSpecsOperator(BaseOperator):
    """Fails with what is wrong in the specs of a folder.

    Args:
        findings: file, line, field and problem of each mistake.
    """

    ui_color = "#f5d5d5"

    def __init__(self, *, findings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.findings = list(findings)

    def execute(self, context: Any) -> None:
        """Raise the mistakes, for the log and for notifiers."""
        raise _build_spec_error(self.findings)
