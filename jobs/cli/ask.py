"""`tidegate abort-barrier`, `savepoint`, `attach`, `detach` and `resume`: what people ask of a running driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import PipelineArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog
    from tidegate.checkpoints.requests import Request

__all__ = ["abort_barrier", "attach", "detach", "resume", "savepoint"]

Why = Annotated[str, typer.Option(help="Kept with the request.")]
Attachment = Annotated[str, typer.Argument(metavar="NAME", help="A pipe or reducer of the spec.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the driver's answer.")]


def abort_barrier(
    pipeline: PipelineArgument,
    barrier: Annotated[int, typer.Argument(metavar="ID", help="Id (or ordinal) of the barrier event, open or still to come.")],
    store: StoreOption = None,
    why: Why = "",
    wait: Wait = 60.0,
) -> None:
    """Close an open barrier event by hand as aborted; what stands behind it flows on."""
    from tidegate.checkpoints.requests import Kind, submit

    log = context.open_log(pipeline, store)
    _answered(log, submit(log.store, log.pipeline, Kind.ABORT_BARRIER, who=context.who(), why=why, barrier=barrier), wait)


def savepoint(
    pipeline: PipelineArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The checkpoint is pinned under this name.")],
    store: StoreOption = None,
    why: Why = "",
    wait: Wait = 60.0,
) -> None:
    """Have a running driver seal an epoch now and pin it under a name."""
    from tidegate.checkpoints.requests import Kind, submit

    log = context.open_log(pipeline, store)
    _answered(log, submit(log.store, log.pipeline, Kind.SAVEPOINT, who=context.who(), why=why, name=name), wait)


def attach(pipeline: PipelineArgument, name: Attachment, store: StoreOption = None, why: Why = "", wait: Wait = 60.0) -> None:
    """Begin a pipe or reducer: rows that its origin holds already are its backfill. After a detach, anew from the first row."""
    _ask("attach", pipeline, name, store, why, wait)


def detach(pipeline: PipelineArgument, name: Attachment, store: StoreOption = None, why: Why = "", wait: Wait = 60.0) -> None:
    """Dispatch no later row through a pipe or reducer; what it has dispatched stays."""
    _ask("detach", pipeline, name, store, why, wait)


def resume(pipeline: PipelineArgument, name: Attachment, store: StoreOption = None, why: Why = "", wait: Wait = 60.0) -> None:
    """Let a paused pipe or reducer go on with the row it failed at."""
    _ask("resume", pipeline, name, store, why, wait)


def _ask(kind: str, pipeline: str, name: str, store: str | None, why: str, wait: float) -> None:
    from tidegate.checkpoints.requests import Kind, submit

    log = context.open_log(pipeline, store)
    _answered(log, submit(log.store, log.pipeline, Kind(kind), who=context.who(), why=why, name=name), wait)


def _answered(log: SlotLog, request: Request, patience: float) -> None:
    """Wait for the acknowledgement and print it.

    Raises:
        TransientError: no answer in time; the request stands until it expires.
        ConfigurationError: the driver refused it.
    """
    from tidegate.checkpoints.clock import SYSTEM_CLOCK
    from tidegate.checkpoints.requests import AckOutcome, read_ack
    from tidegate.jobs.spec.errors import ConfigurationError, TransientError

    deadline = SYSTEM_CLOCK.now() + patience
    while (ack := read_ack(log.store, log.pipeline, request.id)) is None:
        if SYSTEM_CLOCK.now() >= deadline:
            raise TransientError(
                f"no driver of {log.pipeline} has answered within {patience:g} s",
                code="cli.no_answer",
                pipeline=log.pipeline,
                kept="the request; the next driver applies it unless it has expired by then",
                advice=f"look whether one runs: tidegate status {log.pipeline}",
            )
        SYSTEM_CLOCK.sleep(0.3)
    if ack.outcome is not AckOutcome.APPLIED:
        raise ConfigurationError(f"{request.kind} was {ack.outcome}: {ack.detail}", code="cli.refused", pipeline=log.pipeline)
    output.console().print(f"applied in {ack.checkpoint}" + (f": {ack.detail}" if ack.detail else ""))
