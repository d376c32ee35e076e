"""The command line `tidegate`. One module per group of commands; each imports what it needs when it runs.

`tidegate --help` has to answer at once, so nothing heavier than typer is imported here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.jobs.cli import (
    advise,
    ask,
    checkpoints,
    conformance,
    land,
    logs,
    maintain,
    proof,
    quality,
    row,
    run,
    spec,
    splice,
    stack,
    status,
    support_bundle,
    tables,
)
from tidegate.jobs.cli.output import ErrorReportingGroup

__all__ = ["app", "main"]

app = typer.Typer(
    name="tidegate",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Event-time streams that keep their late rows, their barriers and every checkpoint.",
    epilog="Exit codes: 0 fine, 1 the pipeline's data or logic, 2 spec, names or credentials, 3 gave up on a server, "
    "4 another driver took over. TIDEGATE_DEBUG=1 shows tracebacks.",
)

_RUN, _LOOK, _WRITE, _LOCAL = "Run", "Look", "Specs", "Local stack"

app.command("run", rich_help_panel=_RUN)(run.run_in_foreground)
app.command("land", rich_help_panel=_RUN)(land.land_source)
app.command("stop", rich_help_panel=_RUN)(run.stop_pipeline)
app.command("start", rich_help_panel=_RUN)(run.allow_start)
app.command("abort-barrier", rich_help_panel=_RUN)(ask.abort_barrier)
app.command("savepoint", rich_help_panel=_RUN)(ask.take_savepoint)
app.command("attach", rich_help_panel=_RUN)(ask.request_attach)
app.command("detach", rich_help_panel=_RUN)(ask.request_detach)
app.command("resume", rich_help_panel=_RUN)(ask.request_resume)
app.command("status", rich_help_panel=_LOOK)(status.show_status)
app.command("logs", rich_help_panel=_LOOK)(logs.show_logs)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel=_LOOK)
app.command("tables", rich_help_panel=_LOOK)(tables.show_tables)
app.command("quality", rich_help_panel=_LOOK)(quality.run_quality_checks)
app.command("check", rich_help_panel=_LOOK)(proof.check_exactness)
app.command("replay", rich_help_panel=_LOOK)(proof.replay_sealed_epoch)
app.command("advise", rich_help_panel=_LOOK)(advise.show_lag_advice)
app.command("storage", rich_help_panel=_LOOK)(maintain.show_storage)
app.command("support-bundle", rich_help_panel=_LOOK)(support_bundle.write_support_bundle)
app.command("gc", rich_help_panel=_RUN)(maintain.collect_garbage)
app.command("row", rich_help_panel=_LOOK)(row.follow_row)
app.add_typer(splice.app, name="splice", rich_help_panel=_RUN)
app.command("validate", rich_help_panel=_WRITE)(spec.validate_specs)
app.command("schema", rich_help_panel=_WRITE)(spec.print_json_schema)
app.command("infer", rich_help_panel=_WRITE)(spec.propose_source_schema)
app.add_typer(conformance.app, name="conformance", rich_help_panel=_WRITE)
app.command("up", rich_help_panel=_LOCAL)(stack.start_stack)
app.command("down", rich_help_panel=_LOCAL)(stack.stop_stack)
app.command("warm", rich_help_panel=_LOCAL)(stack.archive_spark_classes)
app.command("demo", rich_help_panel=_LOCAL, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    stack.run_demo
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tidegate import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _accept_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `tidegate` script."""
    app()
