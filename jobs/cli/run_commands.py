"""Commands that run, stop and steer pipelines: `run`, `stop`, `start`, `land`, and requests.

Requests (`abort-barrier`, `cti`, `savepoint`, `attach`, `detach`, `resume`) ask a running driver to
do something and wait for its answer. Exit code 2 if it refuses, 3 without an answer in time; the
next driver still applies the request within a day.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.checkpoints.host_clock import poll_until
from tidegate.errors import TidegateError

from . import arguments, output
from .arguments import (
    EnvironmentOption,
    PipelineArgument,
    SpecArgument,
    StoreOption,
    WaitOption,
    WhyOption,
)
from .errors import NO_ANSWER, NO_END, NO_LANDING, NOT_FOR_JOBS, REFUSED, RESTORING, STILL_RUNNING

if TYPE_CHECKING:
    from tidegate.checkpoints.manifest import Manifest
    from tidegate.jobs.driver.landing_log import LandingLog
    from tidegate.jobs.spec.pipeline import PipelineSpec

# A driver looks for requests once per epoch, so asking more often would not be answered sooner.
_POLL_SECONDS = 0.3


AttachmentArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A pipe or reducer of the spec.")
]


def run_in_foreground(
    spec: SpecArgument,
    store: StoreOption = None,
    until_idle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="End after this long without a row or a waiting row."
        ),
    ] = None,
    until_end: Annotated[
        bool,
        typer.Option(
            help="The sources end after the objects that they hold now; all rows are released."
        ),
    ] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="End after N sealed epochs.")] = None,
    standby: Annotated[
        bool, typer.Option(help="Wait until no other driver runs and the pipeline should run.")
    ] = False,
    recover_to: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT",
            help="latest, latest_healthy, a pin or an id; anything but latest is a restore.",
        ),
    ] = "latest",
    work: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Scratch folder. Default: temporary.")
    ] = None,
    environment: EnvironmentOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    """Run a pipeline or a job here, without Airflow, from its newest checkpoint until stopped.

    A stopped pipeline runs again. Ctrl-C drains: the driver seals and publishes the current epoch
    first. A second Ctrl-C ends it at once; nothing sealed is lost. A pipeline's log is that of
    `tidegate logs`; a job's is printed.
    """
    from tidegate.jobs.spec.job_spec import JobSpec

    # Before the heavy imports below: a wrong name or address is reported at once.
    path, url = arguments.resolve_spec_path(spec), arguments.resolve_store_url(store)
    given = None if standby else arguments.find_any_spec(spec, environment)
    # A person's run ends an earlier `tidegate stop`; a standby driver's does not.
    asked_by = None if given is None else arguments.get_user_name()
    from tidegate.jobs.driver.launch_spec import load_launch_spec, make_file_launch

    # A person's run deploys its file; a standby driver runs what is deployed.
    if given is None or asked_by is None:
        launch = load_launch_spec(path, url)
    else:
        launch = make_file_launch(given, path, who=asked_by, why="tidegate run", replaces=True)
    pipeline = launch.spec
    if isinstance(pipeline, JobSpec):
        if until_idle is not None or until_end or epochs is not None:
            raise NOT_FOR_JOBS(pipeline=pipeline.name)
        from tidegate.jobs.driver.log_output import configure_logs
        from tidegate.jobs.sealed_queries import job_run
        from tidegate.jobs.sealed_queries.job_location import find_jobs_home

        job_options = job_run.JobOptions(
            store_url=url,
            script=job_run.require_script(pipeline, launch.script),
            place=launch.script_place,
            recover_to=recover_to,
            standby=standby,
            asked_by=asked_by,
            deploy=launch.turn,
            home=work or find_jobs_home(),
            on_seal=(lambda _manifest: None) if quiet else _print_batch,
        )
        configure_logs(json=False, libraries=False)
        outcome = job_run.run_job_until_end(pipeline, job_options)
        output.print_line(f"{pipeline.name} {outcome.state}: {outcome.why}")
        return
    if until_end and (topics := [n for n, one in pipeline.sources.items() if one.kafka]):
        raise NO_END(pipeline=pipeline.name, sources=", ".join(topics))
    from tidegate.jobs.driver.epoch_loop import EndConditions
    from tidegate.jobs.driver.pipeline_run import RunOptions

    from .foreground_run import run_in_terminal

    options = RunOptions(
        store_url=url,
        until=EndConditions(until_idle, epochs),
        recover_to=recover_to,
        standby=standby,
        asked_by=asked_by,
        deploy=launch.turn,
        work=work,
        ends_input=until_end,
    )
    run_in_terminal(pipeline, options, quiet=quiet)


def _print_batch(manifest: Manifest) -> None:
    from tidegate.checkpoints.batch_notes import BatchNotes

    notes = BatchNotes.from_manifest(manifest)
    if notes is not None:
        at = notes.queries[notes.query]
        took = "" if at.seconds is None else f"  {at.seconds:.2f} s"
        output.print_line(
            f"{manifest.id}  {notes.query} {at.batch}  rows {at.rows:,}"
            f"  state {at.state_rows:,}{took}"
        )


def stop_pipeline(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    why: WhyOption = "",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the driver's end.")
    ] = 60.0,
) -> None:
    """Ask the driver of a pipeline to seal what it has read and to end.

    The pipeline stays stopped, also for standby drivers and Airflow's sweep, until `tidegate
    start`, `tidegate run` or a new run of its stream in Airflow. Refused during a restore,
    which sets the desired state at its end. Exit code 3 if the driver has not ended after --wait
    seconds; it ends after its epoch.
    """
    from tidegate.checkpoints.driver_requests import (
        DesiredState,
        RequestKind,
        end_abandoned_recovery,
        set_desired_state,
        submit_request,
    )
    from tidegate.checkpoints.lease import LeaseObserver, read_lease

    log, who = arguments.open_log(pipeline, store), arguments.get_user_name()
    desired = end_abandoned_recovery(log.store, log.pipeline, who=who)
    if desired.state is DesiredState.RECOVERING:
        raise RESTORING(pipeline=log.pipeline, who=desired.who or "someone")
    # First the desired state: otherwise a standby driver would take over from the ended one.
    # First what people want: a driver that ends before this would be started again.
    set_desired_state(log.store, log.pipeline, DesiredState.STOPPED, who=who, why=why)
    lease = read_lease(log.store, log.pipeline)
    if lease is None or lease.is_free:
        output.print_line(f"{log.pipeline} does not run; it stays stopped")
        return
    submit_request(log.store, log.pipeline, RequestKind.DRAIN, who=who, why=why, token=lease.token)
    observer, token = LeaseObserver(log.store, log.pipeline), lease.token
    if not poll_until(lambda: observer.has_ended(token), wait, _POLL_SECONDS):
        raise STILL_RUNNING(pipeline=log.pipeline, seconds=wait)
    output.print_line(f"{log.pipeline} has stopped")


def allow_start(pipeline: PipelineArgument, store: StoreOption = None, why: WhyOption = "") -> None:
    """Let a stopped pipeline run again.

    A standby driver takes over at once, Airflow's sweep by default within five minutes. The command
    itself starts no process; if you have neither, use `tidegate run`. Refused during a restore.
    """
    from tidegate.checkpoints.driver_requests import (
        DesiredState,
        read_desired_state,
        set_desired_state,
    )
    from tidegate.checkpoints.lease import read_lease
    from tidegate.checkpoints.pipeline_identity import refuse_copied_store

    log = arguments.open_log(pipeline, store)
    refuse_copied_store(log.store, log.pipeline)
    before, lease = read_desired_state(log.store, log.pipeline), read_lease(log.store, log.pipeline)
    has_driver = lease is not None and not lease.is_free
    # The end of the restore would set the desired state back.
    if before.state is DesiredState.RECOVERING and has_driver:
        raise RESTORING(pipeline=log.pipeline, who=before.who or "someone")
    set_desired_state(
        log.store, log.pipeline, DesiredState.RUN, who=arguments.get_user_name(), why=why
    )
    state = "runs" if has_driver else "should run: a standby driver or Airflow takes over"
    advice = "" if has_driver else f"; to run it here: tidegate run {log.pipeline}"
    output.print_line(f"{log.pipeline} {state}{advice}")


def abort_barrier(
    pipeline: PipelineArgument,
    barrier: Annotated[
        int,
        typer.Argument(
            metavar="ID", help="Id (or ordinal) of the barrier event, open or still to come."
        ),
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
    and_earlier: Annotated[
        bool, typer.Option("--and-earlier", help="Cancel all barriers before it as well.")
    ] = False,
) -> None:
    """Ask the driver to abort a barrier event, so that the rows behind it flow on."""
    kind = "cancel-barriers" if and_earlier else "abort-barrier"
    _request_and_wait(kind, pipeline, store, why, wait, barrier=barrier)


def send_cti(
    pipeline: PipelineArgument,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A source with a 'punctuation' section.")
    ],
    time: Annotated[
        str, typer.Argument(metavar="TIME", help="ISO 8601; in UTC unless it names an offset.")
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Send punctuation (a CTI): no later row of the source has an event time below TIME.

    A running driver has to apply it. It takes effect behind the rows of the epoch that applies it,
    and is sealed with it.
    """
    at = arguments.parse_event_time(time)
    _request_and_wait("cti", pipeline, store, why, wait, name=source, time=at)


def take_savepoint(
    pipeline: PipelineArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The checkpoint is pinned under this name.")
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Ask a running driver to seal an epoch now and to pin it under a name."""
    _request_and_wait("savepoint", pipeline, store, why, wait, name=name)


def _make_attachment_command(kind: str, text: str) -> Callable[..., None]:
    def request(
        pipeline: PipelineArgument,
        name: AttachmentArgument,
        store: StoreOption = None,
        why: WhyOption = "",
        wait: WaitOption = 60.0,
    ) -> None:
        _request_and_wait(kind, pipeline, store, why, wait, name=name)

    request.__doc__ = text
    return request


request_attach = _make_attachment_command(
    "attach",
    """Ask the driver to start a pipe or reducer; the rows of its origin so far are its backfill.

    After a detach it starts again at the first row.
    """,
)
request_detach = _make_attachment_command(
    "detach", "Ask the driver to stop a pipe or reducer; what it has dispatched stays."
)
request_resume = _make_attachment_command(
    "resume",
    """Ask the driver to let a paused pipe or reducer go on with the row at which it failed.

    A driver keeps the code of a reducer that it has loaded: after a correction restart it first.
    """,
)


def _request_and_wait(
    kind: str, pipeline: str, store: str | None, why: str, wait: float, **target: Any
) -> None:
    """Submit a request for `target` (barrier, name or time), wait for the answer, and print it.

    Raises:
        TransientError: no answer within `wait` seconds; the request stays until it expires.
        ConfigurationError: the driver refused it.
    """
    from tidegate.checkpoints.driver_requests import (
        AckOutcome,
        RequestKind,
        read_ack,
        submit_request,
    )

    log, who = arguments.open_log(pipeline, store), arguments.get_user_name()
    request = submit_request(log.store, log.pipeline, RequestKind(kind), who=who, why=why, **target)
    ack = poll_until(lambda: read_ack(log.store, log.pipeline, request.id), wait, _POLL_SECONDS)
    if ack is None:
        raise NO_ANSWER(pipeline=log.pipeline, seconds=wait)
    # The driver read the request and did nothing: the exit code must say so.
    if ack.outcome is not AckOutcome.APPLIED:
        raise REFUSED(
            pipeline=log.pipeline, kind=request.kind, outcome=ack.outcome, detail=ack.detail
        )
    output.print_line(f"applied in {ack.checkpoint}" + (f": {ack.detail}" if ack.detail else ""))


def land_source(
    pipeline: SpecArgument,
    source: Annotated[str, typer.Argument(help="a source with a 'landing' section")],
    store: StoreOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Spark's checkpoint folder. Default: .tidegate/landing/...")
    ] = None,
    new_generation: Annotated[
        bool, typer.Option(help="The old checkpoint folder is lost: start a new one after it.")
    ] = False,
    until_idle: Annotated[
        float | None, typer.Option(help="End after this many seconds without a row.")
    ] = None,
) -> None:
    """Run the landing query of one source until it is stopped.

    Every row lands exactly once, even if the process is killed at any moment. Ctrl-C lets the
    current batch end first.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.jobs.driver.epoch_listeners import measure_landing
    from tidegate.jobs.driver.landing_log import LandingLog
    from tidegate.jobs.driver.log_output import configure_logs

    spec = arguments.find_spec(pipeline)
    if source not in spec.sources or spec.sources[source].landing is None:
        raise NO_LANDING(pipeline=spec.name, source=source, sources=", ".join(spec.sources))
    configure_logs(json=True)
    stop = threading.Event()
    # The current batch is finished first; Spark would otherwise be interrupted in the middle of a
    # write.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with measure_landing(spec.name, source) as metrics:
        landing = LandingLog(
            source,
            spec.sources[source],
            open_store(arguments.resolve_store_url(store)),
            checkpoint or Path(".tidegate") / "landing" / spec.name / source,
            new_generation=new_generation,
            metrics=metrics,
        )
        with landing.lock_folder():
            _run_landing(spec, landing, stop, until_idle)
    output.print_line(f"{landing.landed} rows landed by this process")


def _run_landing(
    spec: PipelineSpec, landing: LandingLog, stop: threading.Event, until_idle: float | None
) -> None:
    """Run the query, and record for `tidegate status` how it ended."""
    from tidegate.jobs.driver.landing_log import run_landing_query, start_landing_query
    from tidegate.jobs.spark.spark_session import open_session

    try:
        session = open_session(spec)
        try:
            failure = run_landing_query(
                lambda: start_landing_query(session, spec, landing), landing, stop, until_idle
            )
        finally:
            session.stop()
        if failure is not None:
            failure.pipeline = spec.name
            raise failure
    except Exception as error:
        # Other exceptions can carry whole query plans.
        reason = error.message if isinstance(error, TidegateError) else repr(error)[:400]
        landing.report_status("failed", reason)
        raise
    landing.report_status("stopped")
