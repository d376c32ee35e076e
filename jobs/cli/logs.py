"""`tidegate logs`: what a driver wrote, as far as it has been sent to the bucket."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import JsonOption, PipelineArgument, StoreOption

__all__ = ["show_logs"]


def show_logs(
    pipeline: PipelineArgument,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="So many of the last lines.")] = 50,
    attempt: Annotated[str | None, typer.Option(metavar="NAME", help="Of which driver. Default: the one started last.")] = None,
    all_attempts: Annotated[bool, typer.Option("--attempts", help="List the drivers whose logs are kept, newest first.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the end of a driver's log, whichever host it runs or ran on.

    Drivers that Airflow starts send theirs every ten seconds; of `tidegate run` the log is what it prints.
    """
    from tidegate.checkpoints.driver_logs import list_log_attempts, read_log_tail
    from tidegate.jobs.spec.errors import ConfigurationError

    log = context.open_log(pipeline, store)
    known = list_log_attempts(log.store, log.pipeline)
    chosen = attempt or (known[0] if known else None)
    if chosen is None or chosen not in known:
        raise ConfigurationError(
            f"{log.pipeline} has no log of a driver" + (f" {chosen!r}" if chosen else ""),
            code="cli.no_log",
            pipeline=log.pipeline,
            advice=f"kept: {', '.join(known)}" if known else "only drivers that Airflow starts send their logs",
        )
    found = [] if all_attempts else read_log_tail(log.store, log.pipeline, chosen, lines)
    if as_json:
        output.print_envelope("logs", {"attempts": known} if all_attempts else {"attempt": chosen, "lines": found})
    else:
        typer.echo("\n".join(known if all_attempts else found))
