"""`tidegate run`, `stop` and `start`: a pipeline in this process, the polite end of one anywhere, and that it may go on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import PipelineArgument, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog
    from tidegate.jobs.engine.epoch import EpochReport

__all__ = ["run_in_foreground", "allow_start", "stop_pipeline"]


def run_in_foreground(
    spec: SpecArgument,
    store: StoreOption = None,
    until_idle: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="End after this long without a row and with nothing waiting.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="End after this many sealed epochs.")] = None,
    standby: Annotated[bool, typer.Option(help="Wait until no other drives and nobody wants it stopped.")] = False,
    recover_to: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT", help="latest, latest_healthy, a pin or an id; anything but latest goes back for good."
        ),
    ] = "latest",
    work: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Scratch folder; a temporary one by default.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line per epoch.")] = False,
) -> None:
    """Run a pipeline here, without Airflow, from its newest checkpoint until it is stopped.

    One that was stopped runs again. Ctrl-C drains: the epoch under way is sealed and published first. A second Ctrl-C ends at
    once; nothing sealed is lost.
    """
    pipeline, url = context.find_spec(spec), context.resolve_store_url(store)
    from tidegate.jobs.driver.logs import configure_logs
    from tidegate.jobs.driver.loop import EndConditions
    from tidegate.jobs.driver.process import RunOptions, run_pipeline

    configure_logs(json=False)
    options = RunOptions(
        store_url=url,
        until=EndConditions(until_idle, epochs),
        recover_to=recover_to,
        standby=standby,
        asked_by=None if standby else context.get_user_name(),
        work=work,
        on_epoch=(lambda _report, _seconds: None) if quiet else _print_epoch_line,
    )
    raise typer.Exit(run_pipeline(pipeline, options))


def stop_pipeline(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    why: Annotated[str, typer.Option(help="Kept with the request.")] = "",
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait until the driver is gone.")] = 60.0,
) -> None:
    """Ask the driver of a pipeline to seal what it has and end. It stays stopped, whoever stands by, until `tidegate start`."""
    from tidegate.checkpoints.desired import DesiredState, set_desired_state
    from tidegate.checkpoints.lease import read_lease
    from tidegate.checkpoints.requests import RequestKind, submit_request
    from tidegate.jobs.spec.errors import TransientError

    log = context.open_log(pipeline, store)
    set_desired_state(log.store, log.pipeline, DesiredState.STOPPED, who=context.get_user_name(), why=why)
    lease = read_lease(log.store, log.pipeline)
    if lease is None or lease.is_free:
        output.console().print(f"{log.pipeline} does not run; it stays stopped")
        return
    submit_request(log.store, log.pipeline, RequestKind.DRAIN, who=context.get_user_name(), why=why, token=lease.token)
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
    """Let a stopped pipeline run again: who stands by takes over at once, Airflow's sweep within five minutes.

    This starts no process. Without either, use `tidegate run`.
    """
    from tidegate.checkpoints.desired import DesiredState, read_desired_state, set_desired_state
    from tidegate.checkpoints.lease import read_lease
    from tidegate.jobs.spec.errors import ConfigurationError

    log = context.open_log(pipeline, store)
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
    set_desired_state(log.store, log.pipeline, DesiredState.RUN, who=context.get_user_name(), why=why)
    output.console().print(f"{log.pipeline} {'runs' if driven else 'should run: who stands by takes over'}")


def _wait_for_driver_end(log: SlotLog, token: int, patience: float) -> bool:
    """Whether the holder of `token` gave the lease up, or lost it, in time."""
    from tidegate.checkpoints.clock import SYSTEM_CLOCK
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
    counts = report.manifest.notes.get("epoch", {})
    parts = [f"{name} {counts.get(name, 0):,}" for name in ("read", "released", "late") if counts.get(name)]
    if report.decision.barriers:
        parts.append("barriers " + ", ".join(f"{b.id} {b.outcome.value}" for b in report.decision.barriers))
    frontier = output.format_short_instant(report.decision.frontier_after)
    output.console().print(f"{report.sealed}  {'  '.join(parts) or 'no rows'}  frontier {frontier}  {seconds:.2f} s")
