"""Build Airflow DAGs from a folder of pipeline specs.

Parsing reads YAML and nothing else: no store, no Spark, no expectations.

    <p>.stream      supervises the driver
    <p>.stop        ends the driver; it stays stopped
    <p>.recover     goes back to a chosen checkpoint
    <p>.pin         keeps a checkpoint by name
    <p>.deploy      has drivers run a changed spec
    <p>.abort_barrier  aborts an open barrier, where sources have barriers
    <p>.quality     checks, on asset events
    <p>.maintain    index, retention, scrub, by default once a night
    <p>.backfill    runs a past range as a batch
    <p>.splice      merges late rows into history
    <p>.windows     announces closed periods, if the spec says so
    tidegate.sweep  starts what should run and does not

A job has the DAGs `stream`, `stop`, `recover`, `pin`, `deploy`, `maintain` and `quality`.

One broken spec does not stop the others. What is wrong with it becomes a separate DAG, which fails
and names the mistakes, and an import error of a file that asks for it (`check_specs`); see
docs/decisions/0065-a-broken-spec-gets-a-failing-dag.md.
"""

import hashlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, BaseOperator, CronDataIntervalTimetable, Param

from tidegate.checkpoints.illness_record import QUALITY_EVERY_SECONDS
from tidegate.checkpoints.verify import count_scrub_shares
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.loader import list_unread_specs, load_any_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.json_types import JsonObject, JsonView, read_data_file

from .assets import ClosedWindowsOperator, stream_asset
from .child_operators import BackfillOperator, MaintainOperator, QualityOperator
from .deploy_operator import DeployOperator
from .errors import SPEC_INVALID, SPEC_NAME_TAKEN
from .pipeline_operator import PipelineOperator
from .recover_and_pin import (
    AbortBarrierOperator,
    PinOperator,
    RecoverOperator,
    ReportRestoreOperator,
)
from .stream_operator import StreamOperator
from .sweep_operator import StopOperator, SweepOperator, SweepReportOperator

STORE_TAG_PREFIX = "store:"  # of the tag that names the store's Airflow connection
APPROVAL_TAG = "approval"  # of streams whose restores another person approves
SWEEP_DAG_ID = "tidegate.sweep"
BROKEN_SPECS_DAG_ID = "tidegate.broken_specs"
_BROKEN_SPECS_CRON = "*/15 * * * *"
# The least time between two announcements of closed periods; long periods need fewer looks.
ANNOUNCE_EVERY_SECONDS = 10.0
# Kind of DAG -> its description and the fields of its form.
_SHOWN = read_data_file("tidegate.operators", "dags.toml")
_RETRIED = {"retries": 2, "retry_delay": timedelta(seconds=5)}
# One run at a time, because a pipeline has one driver. DAGs start unpaused, because a spec in the
# folder is meant to run.
_DAG_DEFAULTS: JsonObject = {
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

    Broken specs raise nothing: they become the DAG `tidegate.broken_specs`.

    The ids of the sweep and of broken specs carry the connection. A DAG file may call this for
    several folders: what an earlier call has put among the file's global names is not made again.
    The sweep of the later folder carries the folder's name then, and a pipeline whose name is taken
    is reported like a broken spec.

    Args:
        folder: holds one `*.yaml` file per pipeline or job.
        conn_id: Airflow connection of the store; None for the environment (`TIDEGATE_STORE`).
        quality_every: at most one check per pipeline in so many seconds.
        on_failure: Airflow's notifiers, or functions of a context, called when a task of any of
            these DAGs fails, except the sweep's `start`.
    """
    specs, findings = _read_specs(folder)
    frame = inspect.currentframe()
    taken = _find_other_dags(folder, frame.f_back.f_globals if frame and frame.f_back else {})
    for name in [name for name in specs if f"{name}.stream" in taken]:
        path = specs.pop(name)[1]
        other: Any = taken[f"{name}.stream"].get_task("stream")
        findings.append(SPEC_NAME_TAKEN(path=path, name=name, taken_by=other.spec).message)
    suffix = _choose_suffix(Path(folder), conn_id, taken)
    dags: list[DAG] = []
    swept = []
    for spec, path in specs.values():
        # What Airflow refuses about one spec must not take the DAGs of the others along.
        try:
            built = [*_PipelineDags(spec, str(path.absolute()), conn_id).build(quality_every)]
            dags += built
            swept.append((spec, path))
        except Exception as error:
            findings.append(f"{path}: Airflow cannot build its DAGs: {error}")
    dags += _build_sweep_dags(swept, conn_id, str(folder), f"{SWEEP_DAG_ID}{suffix}")
    if findings:
        dags.append(_build_broken_specs_dag(findings, f"{BROKEN_SPECS_DAG_ID}{suffix}"))
    # A mapped task (the sweep's `start`) has no callback that could be set.
    for task in (task for dag in dags for task in dag.tasks if isinstance(task, BaseOperator)):
        task.on_failure_callback = list(on_failure)
    return {dag.dag_id: dag for dag in dags}


def _find_other_dags(folder: str | Path, names: JsonView) -> dict[str, DAG]:
    """DAGs by id among the global names of a DAG file that were made of another folder's specs."""
    found: dict[str, DAG] = {}
    for value in list(names.values()):
        some = value.values() if isinstance(value, dict) else (value,)
        for dag in (dag for dag in some if isinstance(dag, DAG)):
            folders = {_read_folder(task) for task in dag.tasks} - {None}
            if folders and Path(folder).absolute() not in folders:
                found[dag.dag_id] = dag
    return found


def _read_folder(task: Any) -> Path | None:
    """The folder of specs that a task belongs to; None if the task does not say."""
    if isinstance(task, SweepOperator):
        return Path(task.folder).absolute()
    spec = getattr(task, "spec", "") if isinstance(task, PipelineOperator) else ""
    return Path(spec).absolute().parent if spec else None


def _choose_suffix(folder: Path, conn_id: str | None, taken: Mapping[str, DAG]) -> str:
    """What follows in the ids of the DAGs of a whole folder; empty in the usual case."""
    suffix = "" if conn_id is None else f".store_{_make_slug(conn_id)}"
    if f"{SWEEP_DAG_ID}{suffix}" not in taken:
        return suffix
    suffix = f"{suffix}.folder_{_make_slug(folder.absolute().name)}"
    numbered = (f"{suffix}{number}" for number in ("", *range(2, len(taken) + 3)))
    return next(found for found in numbered if f"{SWEEP_DAG_ID}{found}" not in taken)


def _make_slug(text: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_")


def check_specs(folder: str | Path) -> None:
    """Read all specs of a folder, so that mistakes show in Airflow's banner of import errors.

    The DAG file that calls this must build no DAGs: an import error makes all DAGs of its file
    stale, and Airflow starts none of them.

    Args:
        folder: holds one `*.yaml` file per pipeline or job.

    Raises:
        ConfigurationError: file, line and field of each mistake.
    """
    _, findings = _read_specs(folder)
    if findings:
        raise SPEC_INVALID(findings="\n".join(findings))


def _read_specs(
    folder: str | Path,
) -> tuple[dict[str, tuple[PipelineSpec | JobSpec, Path]], list[str]]:
    """The valid specs by name, and what is wrong with the others."""
    specs: dict[str, tuple[PipelineSpec | JobSpec, Path]] = {}
    findings = []
    for path in sorted(Path(folder).glob("*.yaml")):
        try:
            # A variable that only drivers have must not keep the DAGs away.
            spec = load_any_spec(path, needs_variables=False)
            if spec.name in specs:
                taken_by = specs[spec.name][1]
                raise SPEC_NAME_TAKEN(path=path, name=spec.name, taken_by=taken_by)
        except ConfigurationError as error:
            findings.append(error.message)
        else:
            specs[spec.name] = (spec, path)
    findings += [
        f"{path}: not read: a spec lies in {folder} itself, and its name ends in .yaml"
        for path in list_unread_specs(Path(folder))
    ]
    return specs, findings


class _PipelineDags:
    """Builds the DAGs of one pipeline or job."""

    def __init__(self, spec: PipelineSpec | JobSpec, path: str, conn_id: str | None) -> None:
        self._spec, self._conn_id = spec, conn_id
        self._about: JsonObject = {"pipeline": spec.name, "spec": path, "conn_id": conn_id}

    def build(self, quality_every: float) -> Iterator[DAG]:
        """All DAGs that the spec asks for."""
        supervision = self._spec.supervision
        # The page reads DAGs from Airflow's database, which has no arguments of operators but tags.
        tags = [] if self._conn_id is None else [f"{STORE_TAG_PREFIX}{self._conn_id}"]
        if supervision.approval:
            tags.append(APPROVAL_TAG)
        own = {"supervision": supervision}
        yield self._build_task_dag("stream", StreamOperator, own, tags=tags)
        yield self._build_task_dag("stop", StopOperator, _RETRIED)
        yield self._build_recover_dag()
        yield self._build_task_dag("pin", PinOperator, _RETRIED)
        yield self._build_task_dag("deploy", DeployOperator)  # a retry would deploy what failed
        shares = {"scrub_shares": count_scrub_shares(self._spec.checkpoint.retain_for)}
        cron = supervision.maintain
        yield self._build_task_dag("maintain", MaintainOperator, shares, schedule=cron)
        # One asset, so that there is one throttle: late rows and troubled barriers come with a
        # sealed checkpoint anyway.
        sealed = stream_asset(self._spec.name, "sealed", quality_every, self._conn_id)
        yield self._build_task_dag(
            "quality", QualityOperator, {"every": quality_every}, schedule=[sealed]
        )
        if isinstance(self._spec, PipelineSpec):
            yield from self._build_event_time_dags(self._spec)

    def _build_event_time_dags(self, spec: PipelineSpec) -> Iterator[DAG]:
        """The DAGs about rows, which a job does not have."""
        if any(source.barriers is not None for source in spec.sources.values()):
            yield self._build_task_dag("abort_barrier", AbortBarrierOperator, _RETRIED)
        if spec.windows:
            cron = spec.supervision.backfill
            timetable = None if cron is None else CronDataIntervalTimetable(cron, timezone="UTC")
            yield self._build_task_dag("backfill", BackfillOperator, schedule=timetable)
        if spec.windows or spec.streams or spec.splice.offer_rows is not None:
            # Imported here as in `_build_recover_dag`.
            from .splice_operators import add_splice_tasks

            schedule = spec.splice.offer_at if spec.splice.offer_rows is not None else None
            with self._make_dag("splice", schedule=schedule) as dag:
                add_splice_tasks(spec.splice, self._about)
            yield dag
        if spec.supervision.announce is not None and spec.windows:
            period = spec.supervision.announce
            # A tenth of the period: a DAG per hour need not start within a second of its end.
            every = max(ANNOUNCE_EVERY_SECONDS, period / 1e7)
            frontier = stream_asset(spec.name, "frontier", every, self._conn_id)
            own = {"windows": list(spec.windows), "period": period, "retries": 2}
            yield self._build_task_dag("windows", ClosedWindowsOperator, own, schedule=[frontier])

    def _build_task_dag(
        self,
        kind: str,
        operator: type[PipelineOperator],
        arguments: JsonView = MappingProxyType({}),
        **options: Any,
    ) -> DAG:
        """A DAG of one task, which has the name of the DAG's kind.

        Args:
            kind: the last part of the DAG's id.
            operator: the class of the task.
            arguments: of the task, beyond those of every task.
            options: of the DAG.
        """
        with self._make_dag(kind, **options) as dag:
            operator(task_id=kind, **arguments, **self._about)
        return dag

    def _make_dag(self, kind: str, *, tags: Sequence[str] = (), **kwargs: Any) -> DAG:
        spec, shown = self._spec, _SHOWN[kind]
        return DAG(
            dag_id=f"{spec.name}.{kind}",
            description=shown["what"],
            params={name: Param(**schema) for name, schema in shown.get("params", {}).items()},
            doc_md=spec.description or None,
            tags=["tidegate", spec.name, *tags],
            default_args={"owner": spec.supervision.owner},
            **{"schedule": None, **_DAG_DEFAULTS, **kwargs},
        )

    def _build_recover_dag(self) -> DAG:
        with self._make_dag("recover") as dag:
            supervision = self._spec.supervision
            recover = RecoverOperator(task_id="recover", supervision=supervision, **self._about)
            if supervision.approval:
                # Imported only for specs that ask for it: the human-in-the-loop costs every parse a
                # tenth of a second.
                from .splice_operators import ApproveRestoreOperator

                report = ReportRestoreOperator(task_id="report", **self._about)
                approve = ApproveRestoreOperator(
                    task_id="approve",
                    pipeline=self._spec.name,
                    approvers=supervision.approvers,
                    conn_id=self._conn_id,
                    patience=supervision.approval_timeout,
                )
                report >> approve >> recover
        return dag


def _build_sweep_dags(
    specs: Sequence[tuple[SupervisedSpec, Path]], conn_id: str | None, folder: str, dag_id: str
) -> Iterator[DAG]:
    """One sweep for all pipelines with the same cron.

    A process per pipeline would cost more than the streams that it guards.
    """
    groups: dict[str, list[tuple[SupervisedSpec, Path]]] = defaultdict(list)
    for spec, path in specs:
        groups[spec.supervision.sweep].append((spec, path))
    # The sweep of the most pipelines has the plain id, so that a usual site has only that one.
    usual = max(groups, key=lambda cron: len(groups[cron]), default="")
    taken: set[str] = set()
    for cron, group in groups.items():
        name = dag_id if cron == usual else f"{dag_id}.{_make_slug(cron.replace('*', 'x'))}"
        # 1-5 and 1,5 are other times with the same letters and digits.
        if name in taken:
            name += f".{hashlib.sha256(cron.encode()).hexdigest()[:8]}"
        taken.add(name)
        with DAG(
            dag_id=name,
            description="Starts every stream that should run and has no driver.",
            schedule=cron,
            tags=["tidegate"],
            **_DAG_DEFAULTS,
        ) as dag:
            own = [spec for spec, _ in group]
            pipelines = [spec.name for spec in own]
            look = SweepOperator(
                task_id="look", pipelines=pipelines, conn_id=conn_id, folder=folder
            )
            TriggerDagRunOperator.partial(task_id="start").expand(trigger_dag_id=look.output)
            files = [str(path.absolute()) for _, path in group]
            look >> SweepReportOperator(task_id="report", specs=own, files=files, conn_id=conn_id)
        yield dag


def _build_broken_specs_dag(findings: list[str], dag_id: str) -> DAG:
    """A DAG that fails and says why.

    An import error instead would make every DAG of the file stale, and Airflow would start none.
    """
    with DAG(
        dag_id=dag_id,
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
        raise SPEC_INVALID(findings="\n".join(self.findings))
