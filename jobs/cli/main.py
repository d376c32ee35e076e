"""The command line `tidegate`: registers every command in its help panel.

The modules named here hold the commands of one topic each. They import heavy packages inside the
functions, because `tidegate --help` must answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tidegate.jobs.cli import (
    check_replay_quality,
    checkpoint_commands,
    run_commands,
    spec_commands,
    splice_commands,
    stack_commands,
    starter_spec,
    status_and_logs,
    support_bundle,
    tables_and_storage,
)
from tidegate.jobs.cli.output import ErrorReportingGroup

app = typer.Typer(
    name="tidegate",
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Event-time streams that keep their late rows, their barriers and every checkpoint.",
    epilog=(
        "Exit codes: 0 fine, 1 the pipeline's data or logic, 2 spec, names or credentials, 3 gave"
        " up on a server, 4 another driver took over. TIDEGATE_DEBUG=1 shows tracebacks."
    ),
)

# Panels group the thirty commands by what a person wants, not by module.
_RUN, _LOOK, _WRITE, _LOCAL = "Run", "Look", "Specs", "Local stack"

app.command("run", rich_help_panel=_RUN)(run_commands.run_in_foreground)
app.command("land", rich_help_panel=_RUN)(run_commands.land_source)
app.command("stop", rich_help_panel=_RUN)(run_commands.stop_pipeline)
app.command("start", rich_help_panel=_RUN)(run_commands.allow_start)
app.command("abort-barrier", rich_help_panel=_RUN)(run_commands.abort_barrier)
app.command("cti", rich_help_panel=_RUN)(run_commands.send_cti)
app.command("savepoint", rich_help_panel=_RUN)(run_commands.take_savepoint)
app.command("attach", rich_help_panel=_RUN)(run_commands.request_attach)
app.command("detach", rich_help_panel=_RUN)(run_commands.request_detach)
app.command("resume", rich_help_panel=_RUN)(run_commands.request_resume)
app.command("status", rich_help_panel=_LOOK)(status_and_logs.show_status)
app.command("logs", rich_help_panel=_LOOK)(status_and_logs.show_logs)
app.add_typer(checkpoint_commands.app, name="checkpoints", rich_help_panel=_LOOK)
app.command("tables", rich_help_panel=_LOOK)(tables_and_storage.show_tables)
app.command("quality", rich_help_panel=_LOOK)(check_replay_quality.run_quality_checks)
app.command("check", rich_help_panel=_LOOK)(check_replay_quality.check_exactness)
app.command("replay", rich_help_panel=_LOOK)(check_replay_quality.replay_sealed_epoch)
app.command("advise", rich_help_panel=_LOOK)(spec_commands.show_lag_advice)
app.command("whatif", rich_help_panel=_LOOK)(spec_commands.show_what_if)
app.command("storage", rich_help_panel=_LOOK)(tables_and_storage.show_storage)
app.command("support-bundle", rich_help_panel=_LOOK)(support_bundle.write_support_bundle)
app.command("gc", rich_help_panel=_RUN)(tables_and_storage.collect_garbage)
app.command("row", rich_help_panel=_LOOK)(tables_and_storage.follow_row)
app.add_typer(splice_commands.app, name="splice", rich_help_panel=_RUN)
app.command("init", rich_help_panel=_WRITE)(starter_spec.write_starter_spec)
app.command("put", rich_help_panel=_RUN)(starter_spec.put_files)
app.command("reread", rich_help_panel=_RUN)(starter_spec.read_dead_letters_again)
app.command("validate", rich_help_panel=_WRITE)(spec_commands.validate_specs)
app.command("schema", rich_help_panel=_WRITE)(spec_commands.print_json_schema)
app.command("infer", rich_help_panel=_WRITE)(spec_commands.propose_source_schema)
app.command("up", rich_help_panel=_LOCAL)(stack_commands.start_stack)
app.command("down", rich_help_panel=_LOCAL)(stack_commands.stop_stack)
app.command("warm", rich_help_panel=_LOCAL)(stack_commands.archive_spark_classes)
app.command("demo", rich_help_panel=_LOCAL)(stack_commands.run_demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tidegate import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _accept_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


class _PandasHider:
    """Keeps pyarrow from importing pandas, for half a second, to recognise objects of pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Report pandas as missing."""
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


def main() -> None:
    """Entry point of the `tidegate` script."""
    if sys.argv[1:2] in (["row"], ["tables"]):
        sys.meta_path.insert(0, _PandasHider)
    app()
