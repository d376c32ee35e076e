"""The command line `tidegate`: registers every command in its help panel.

The modules named here hold the commands of one topic each. They import heavy packages inside the
functions, because `tidegate --help` must answer at once.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tidegate.jobs.driver.leak_reports import close_stderr_at_exit

from . import (
    alert_commands,
    backup_command,
    case_commands,
    check_replay_quality,
    checkpoint_commands,
    pack_command,
    plan_command,
    run_commands,
    size_command,
    spec_commands,
    splice_commands,
    stack_commands,
    starter_spec,
    status_and_logs,
    support_bundle,
    tables_and_storage,
)
from .output import ErrorReportingGroup

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
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {
        "run": run_commands.run_in_foreground,
        "land": run_commands.land_source,
        "stop": run_commands.stop_pipeline,
        "start": run_commands.allow_start,
        "abort-barrier": run_commands.abort_barrier,
        "cti": run_commands.send_cti,
        "savepoint": run_commands.take_savepoint,
        "attach": run_commands.request_attach,
        "detach": run_commands.request_detach,
        "resume": run_commands.request_resume,
        "gc": tables_and_storage.collect_garbage,
        "backup": backup_command.copy_pipeline,
        "move": backup_command.move_pipeline,
        "put": starter_spec.put_files,
        "reread": starter_spec.read_dead_letters_again,
    },
    "Look": {
        "status": status_and_logs.show_status,
        "logs": status_and_logs.show_logs,
        "tables": tables_and_storage.show_tables,
        "quality": check_replay_quality.run_quality_checks,
        "check": check_replay_quality.check_exactness,
        "replay": check_replay_quality.replay_sealed_epoch,
        "advise": spec_commands.show_lag_advice,
        "whatif": spec_commands.show_what_if,
        "storage": tables_and_storage.show_storage,
        "support-bundle": support_bundle.write_support_bundle,
        "row": tables_and_storage.follow_row,
    },
    "Specs": {
        "init": starter_spec.write_starter_spec,
        "validate": spec_commands.validate_specs,
        "test": case_commands.run_cases,
        "plan": plan_command.show_plan,
        "deploy": plan_command.deploy_spec,
        "pack": pack_command.write_executor_archive,
        "size": size_command.show_cluster_size,
        "schema": spec_commands.print_json_schema,
        "infer": spec_commands.propose_source_schema,
    },
    "Local stack": {
        "up": stack_commands.start_stack,
        "down": stack_commands.stop_stack,
        "warm": stack_commands.archive_spark_classes,
        "demo": stack_commands.run_demo,
    },
}
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(checkpoint_commands.app, name="checkpoints", rich_help_panel="Look")
app.add_typer(splice_commands.app, name="splice", rich_help_panel="Run")
app.add_typer(alert_commands.app, name="alerts", rich_help_panel="Look")


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


# pyarrow would import pandas, for half a second, to recognise objects of pandas. Great Expectations
# imports all of pyspark, for two seconds, and no frame that it checks is Spark's.
_UNNEEDED = {"row": "pandas", "tables": "pandas", "quality": "pyspark"}


class _ModuleHider:
    """Keeps libraries from importing others that the command does not need."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Report the module that the command does not need as missing."""
        if name == _UNNEEDED[sys.argv[1]]:
            raise ModuleNotFoundError(name, name=name)


def main() -> None:
    """Entry point of the `tidegate` script."""
    if {*sys.argv[1:2]} & {*_UNNEEDED}:
        sys.meta_path.insert(0, _ModuleHider)
    close_stderr_at_exit()
    app()
