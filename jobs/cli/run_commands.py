"""`tidegate run`, `stop` and `start`.

A pipeline in this process, the polite end of one anywhere, and that it may go on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.jobs.driver.landing_log import LandingLog
from typing import TYPE_CHECKING

from tidegate.jobs.cli.arguments import PipelineArgument

if TYPE_CHECKING:
    from tidegate.checkpoints.driver_requests import DriverRequest
    from tidegate.checkpoints.slot_log import SlotLog

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.engine.epoch_engine import EpochReport


def run_in_foreground(
    spec: SpecArgument,
    store: StoreOption = None,
    until_idle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="End after this long without a row and with nothing waiting.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="End after this many sealed epochs.")
    ] = None,
    standby: Annotated[
        bool, typer.Option(help="Wait until no other drives and nobody wants it stopped.")
    ] = False,
    recover_to: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT",
            help="latest, latest_healthy, a pin or an id; anything but latest goes back for good.",
        ),
    ] = "latest",
    work: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Scratch folder; a temporary one by default."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line per epoch.")] = False,
) -> None:
    """Run a pipeline here, without Airflow, from its newest checkpoint until it is stopped.

    One that was stopped runs again. Ctrl-C drains: the epoch under way is sealed and published
    first. A second Ctrl-C ends at once; nothing sealed is lost.
    """
    pipeline, url = arguments.find_spec(spec), arguments.resolve_store_url(store)
    from tidegate.jobs.driver.epoch_loop import EndConditions
    from tidegate.jobs.driver.log_output import configure_logs
    from tidegate.jobs.driver.pipeline_run import RunOptions, run_pipeline

    configure_logs(json=False)
    options = RunOptions(
        store_url=url,
        until=EndConditions(until_idle, epochs),
        recover_to=recover_to,
        standby=standby,
        asked_by=None if standby else arguments.get_user_name(),
        work=work,
        on_epoch=(lambda _report, _seconds: None) if quiet else _print_epoch_line,
    )
    raise typer.Exit(run_pipeline(pipeline, options))


def stop_pipeline(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    why: Annotated[str, typer.Option(help="Kept with the request.")] = "",
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long to wait until the driver is gone."),
    ] = 60.0,
) -> None:
    """Ask the driver of a pipeline to seal what it has and end.

    It stays stopped, whoever stands by, until `tidegate start`.
    """
    from tidegate.checkpoints.desired_state import DesiredState, set_desired_state
    from tidegate.checkpoints.driver_requests import RequestKind, submit_request
    from tidegate.checkpoints.lease import read_lease
    from tidegate.errors import TransientError

    log = arguments.open_log(pipeline, store)
    set_desired_state(
        log.store, log.pipeline, DesiredState.STOPPED, who=arguments.get_user_name(), why=why
    )
    lease = read_lease(log.store, log.pipeline)
    if lease is None or lease.is_free:
        output.console().print(f"{log.pipeline} does not run; it stays stopped")
        return
    submit_request(
        log.store,
        log.pipeline,
        RequestKind.DRAIN,
        who=arguments.get_user_name(),
        why=why,
        token=lease.token,
    )
    if not _wait_for_driver_end(log, lease.token, wait):
        raise TransientError(
            f"the driver of {log.pipeline} has not ended within {wait:g} s",
            code="cli.still_running",
            pipeline=log.pipeline,
            kept="the request; the driver ends after the epoch it is in",
            advice=f"look again: tidegate status {log.pipeline}",
        )
    output.console().print(f"{log.pipeline} has stopped")


def allow_start(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    why: Annotated[str, typer.Option(help="Kept with the wish.")] = "",
) -> None:
    """Let a stopped pipeline run again.

    Who stands by takes over at once, Airflow's sweep within five minutes.

    This starts no process. Without either, use `tidegate run`.
    """
    from tidegate.checkpoints.desired_state import (
        DesiredState,
        read_desired_state,
        set_desired_state,
    )
    from tidegate.checkpoints.lease import read_lease
    from tidegate.errors import ConfigurationError

    log = arguments.open_log(pipeline, store)
    before, lease = read_desired_state(log.store, log.pipeline), read_lease(log.store, log.pipeline)
    driven = lease is not None and not lease.is_free
    if before.state is DesiredState.RECOVERING and driven:
        raise ConfigurationError(
            f"{before.who or 'somebody'} restores {log.pipeline}",
            code="cli.restoring",
            pipeline=log.pipeline,
            kept="the restore, which says itself what comes after it",
            advice=f"wait for its end: tidegate status {log.pipeline}",
        )
    set_desired_state(
        log.store, log.pipeline, DesiredState.RUN, who=arguments.get_user_name(), why=why
    )
    output.console().print(
        f"{log.pipeline} {'runs' if driven else 'should run: who stands by takes over'}"
    )


def _wait_for_driver_end(log: SlotLog, token: int, patience: float) -> bool:
    """Whether the holder of `token` gave the lease up, or lost it, in time."""
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.checkpoints.lease import LeaseObserver

    watch, deadline = LeaseObserver(log.store, log.pipeline), SYSTEM_CLOCK.monotonic() + patience
    while True:
        view = watch.observe()
        if view is None or view.token != token or watch.is_expired(view):
            return True
        if SYSTEM_CLOCK.monotonic() >= deadline:
            return False
        SYSTEM_CLOCK.sleep(0.3)


def _print_epoch_line(report: EpochReport, seconds: float) -> None:
    if report.sealed is None or report.manifest is None:
        return
    epoch = report.manifest.epoch_counters
    counts = {"read": epoch.read, "released": epoch.released, "late": epoch.late}
    parts = [f"{name} {rows:,}" for name, rows in counts.items() if rows]
    if report.decision.barriers:
        parts.append(
            "barriers " + ", ".join(f"{b.id} {b.outcome.value}" for b in report.decision.barriers)
        )
    frontier = output.format_short_instant(report.decision.frontier_after)
    output.console().print(
        f"{report.sealed}  {'  '.join(parts) or 'no rows'}  frontier {frontier}  {seconds:.2f} s"
    )


# `tidegate abort-barrier`, `savepoint`, `attach`, `detach` and `resume`: what people ask of a
# running driver.

WhyOption = Annotated[str, typer.Option(help="Kept with the request.")]
AttachmentArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A pipe or reducer of the spec.")
]
WaitOption = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the driver's answer.")
]


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
) -> None:
    """Close an open barrier event by hand as aborted; what stands behind it flows on."""
    from tidegate.checkpoints.driver_requests import RequestKind, submit_request

    log = arguments.open_log(pipeline, store)
    _await_answer(
        log,
        submit_request(
            log.store,
            log.pipeline,
            RequestKind.ABORT_BARRIER,
            who=arguments.get_user_name(),
            why=why,
            barrier=barrier,
        ),
        wait,
    )


def take_savepoint(
    pipeline: PipelineArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The checkpoint is pinned under this name.")
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Have a running driver seal an epoch now and pin it under a name."""
    from tidegate.checkpoints.driver_requests import RequestKind, submit_request

    log = arguments.open_log(pipeline, store)
    _await_answer(
        log,
        submit_request(
            log.store,
            log.pipeline,
            RequestKind.SAVEPOINT,
            who=arguments.get_user_name(),
            why=why,
            name=name,
        ),
        wait,
    )


def request_attach(
    pipeline: PipelineArgument,
    name: AttachmentArgument,
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Begin a pipe or reducer: rows that its origin holds already are its backfill.

    After a detach, anew from the first row.
    """
    _request_for_attachment("attach", pipeline, name, store, why, wait)


def request_detach(
    pipeline: PipelineArgument,
    name: AttachmentArgument,
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Dispatch no later row through a pipe or reducer; what it has dispatched stays."""
    _request_for_attachment("detach", pipeline, name, store, why, wait)


def request_resume(
    pipeline: PipelineArgument,
    name: AttachmentArgument,
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Let a paused pipe or reducer go on with the row it failed at."""
    _request_for_attachment("resume", pipeline, name, store, why, wait)


def _request_for_attachment(
    kind: str, pipeline: str, name: str, store: str | None, why: str, wait: float
) -> None:
    from tidegate.checkpoints.driver_requests import RequestKind, submit_request

    log = arguments.open_log(pipeline, store)
    _await_answer(
        log,
        submit_request(
            log.store,
            log.pipeline,
            RequestKind(kind),
            who=arguments.get_user_name(),
            why=why,
            name=name,
        ),
        wait,
    )


def _await_answer(log: SlotLog, request: DriverRequest, patience: float) -> None:
    """Wait for the acknowledgement and print it.

    Raises:
        TransientError: no answer in time; the request stands until it expires.
        ConfigurationError: the driver refused it.
    """
    from tidegate.checkpoints.driver_requests import AckOutcome, read_ack
    from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
    from tidegate.errors import ConfigurationError, TransientError

    deadline = SYSTEM_CLOCK.monotonic() + patience
    while (ack := read_ack(log.store, log.pipeline, request.id)) is None:
        if SYSTEM_CLOCK.monotonic() >= deadline:
            raise TransientError(
                f"no driver of {log.pipeline} has answered within {patience:g} s",
                code="cli.no_answer",
                pipeline=log.pipeline,
                kept="the request; the next driver applies it unless it has expired by then",
                advice=f"look whether one runs: tidegate status {log.pipeline}",
            )
        SYSTEM_CLOCK.sleep(0.3)
    if ack.outcome is not AckOutcome.APPLIED:
        raise ConfigurationError(
            f"{request.kind} was {ack.outcome}: {ack.detail}",
            code="cli.refused",
            pipeline=log.pipeline,
        )
    output.console().print(
        f"applied in {ack.checkpoint}" + (f": {ack.detail}" if ack.detail else "")
    )


# `tidegate land`: bring what Spark can stream into a source's folder, once.


def land_source(
    pipeline: SpecArgument,
    source: Annotated[str, typer.Argument(help="a source with a 'landing' section")],
    store: StoreOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Spark's checkpoint folder. Default: .tidegate/landing/...")
    ] = None,
    new_generation: Annotated[
        bool, typer.Option(help="The old checkpoint folder is lost: begin anew behind it.")
    ] = False,
    until_idle: Annotated[
        float | None, typer.Option(help="End after this many seconds without a row.")
    ] = None,
) -> None:
    """Run the landing query of one source until it is stopped.

    Rows land exactly once, whatever is killed when.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.errors import ConfigurationError
    from tidegate.jobs.driver.epoch_listeners import measure_landing
    from tidegate.jobs.driver.landing_log import LandingLog
    from tidegate.jobs.driver.landing_query import run_landing_query, start_landing_query
    from tidegate.jobs.driver.log_output import configure_logs
    from tidegate.jobs.engine.fault_points import read_faults_from_environment
    from tidegate.jobs.spark.spark_session import open_session

    spec = arguments.find_spec(pipeline)
    if source not in spec.sources or spec.sources[source].landing is None:
        raise ConfigurationError(
            f"{spec.name} has no source {source!r} with a 'landing' section",
            code="landing.none",
            advice=f"its sources: {', '.join(spec.sources)}",
        )
    configure_logs(json=True)
    folder = checkpoint or Path(".tidegate") / "landing" / spec.name / source
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with measure_landing(spec.name, source) as metrics:
        place = open_store(arguments.resolve_store_url(store))
        landing = LandingLog(
            source,
            spec.sources[source],
            place,
            folder,
            new_generation=new_generation,
            metrics=metrics,
            faults=read_faults_from_environment(),
        )
        with landing.lock_folder(), _record_landing_end(landing):
            session = open_session(spec)
            try:
                failed = run_landing_query(
                    lambda: start_landing_query(session, spec, landing), landing, stop, until_idle
                )
            finally:
                session.stop()
            if failed is not None:
                failed.pipeline = spec.name
                raise failed
    output.console().print(f"{landing.landed} rows landed by this process")


@contextmanager
def _record_landing_end(landing: LandingLog) -> Iterator[None]:
    """Leave for `tidegate status` how it ended."""
    from tidegate.errors import TidegateError

    try:
        yield
    except Exception as error:
        landing.report_status(
            "failed", error.message if isinstance(error, TidegateError) else repr(error)[:400]
        )
        raise
    landing.report_status("stopped")
