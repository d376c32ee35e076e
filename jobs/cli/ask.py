"""`tidegate abort-barrier`, `savepoint`, `attach`, `detach` and `resume`: what people ask of a running driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import PipelineArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog
    from tidegate.checkpoints.requests import DriverRequest

__all__ = ["abort_barrier", "request_attach", "request_detach", "request_resume", "take_savepoint"]

WhyOption = Annotated[str, typer.Option(help="Kept with the request.")]
AttachmentArgument = Annotated[str, typer.Argument(metavar="NAME", help="A pipe or reducer of the spec.")]
WaitOption = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the driver's answer.")]


def abort_barrier(
    pipeline: PipelineArgument,
    barrier: Annotated[int, typer.Argument(metavar="ID", help="Id (or ordinal) of the barrier event, open or still to come.")],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Close an open barrier event by hand as aborted; what stands behind it flows on."""
    from tidegate.checkpoints.requests import RequestKind, submit_request

    log = context.open_log(pipeline, store)
    _await_answer(log, submit_request(log.store, log.pipeline, RequestKind.ABORT_BARRIER, who=context.get_user_name(), why=why, barrier=barrier), wait)


def take_savepoint(
    pipeline: PipelineArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The checkpoint is pinned under this name.")],
    store: StoreOption = None,
    why: WhyOption = "",
    wait: WaitOption = 60.0,
) -> None:
    """Have a running driver seal an epoch now and pin it under a name."""
    from tidegate.checkpoints.requests import RequestKind, submit_request

    log = context.open_log(pipeline, store)
    _await_answer(log, submit_request(log.store, log.pipeline, RequestKind.SAVEPOINT, who=context.get_user_name(), why=why, name=name), wait)


def request_attach(pipeline: PipelineArgument, name: AttachmentArgument, store: StoreOption = None, why: WhyOption = "", wait: WaitOption = 60.0) -> None:
    """Begin a pipe or reducer: rows that its origin holds already are its backfill. After a detach, anew from the first row."""
    _request_for_attachment("attach", pipeline, name, store, why, wait)


def request_detach(pipeline: PipelineArgument, name: AttachmentArgument, store: StoreOption = None, why: WhyOption = "", wait: WaitOption = 60.0) -> None:
    """Dispatch no later row through a pipe or reducer; what it has dispatched stays."""
    _request_for_attachment("detach", pipeline, name, store, why, wait)


def request_resume(pipeline: PipelineArgument, name: AttachmentArgument, store: StoreOption = None, why: WhyOption = "", wait: WaitOption = 60.0) -> None:
    """Let a paused pipe or reducer go on with the row it failed at."""
    _request_for_attachment("resume", pipeline, name, store, why, wait)


def _request_for_attachment(kind: str, pipeline: str, name: str, store: str | None, why: str, wait: float) -> None:
    from tidegate.checkpoints.requests import RequestKind, submit_request

    log = context.open_log(pipeline, store)
    _await_answer(log, submit_request(log.store, log.pipeline, RequestKind(kind), who=context.get_user_name(), why=why, name=name), wait)


def _await_answer(log: SlotLog, request: DriverRequest, patience: float) -> None:
    """Wait for the acknowledgement and print it.

    Raises:
        TransientError: no answer in time; the request stands until it expires.
        ConfigurationError: the driver refused it.
    """
    from tidegate.checkpoints.clock import SYSTEM_CLOCK
    from tidegate.checkpoints.requests import AckOutcome, read_ack
    from tidegate.jobs.spec.errors import ConfigurationError, TransientError

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
        raise ConfigurationError(f"{request.kind} was {ack.outcome}: {ack.detail}", code="cli.refused", pipeline=log.pipeline)
    output.console().print(f"applied in {ack.checkpoint}" + (f": {ack.detail}" if ack.detail else ""))
