"""`tidegate up`, `down`, `demo` and `warm`: the local stack, and the archive of Spark classes."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import output
from .arguments import JsonOption

if TYPE_CHECKING:
    from tidegate.infra.local_stack import Stack

HomeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the stack keeps its state. Default: $TIDEGATE_HOME, else .tidegate here.",
    ),
]
DagsOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="The DAGs folder. Default: dags here.")
]


def _parse_alerts(text: str) -> tuple[str, str]:
    receiver, _, variable = text.partition("=")
    if text == "none":
        return receiver, variable
    if receiver not in ("slack", "pagerduty", "alertmanager") or not variable:
        raise typer.BadParameter(
            "slack=VARIABLE, pagerduty=VARIABLE, alertmanager=VARIABLE or none"
        )
    return receiver, variable


AlertsOption = Annotated[
    Any,  # typer knows no tuple that a parser makes
    typer.Option(
        metavar="RECEIVER=VARIABLE",
        parser=_parse_alerts,
        help="Where incidents of pipelines without supervision.alerts go: slack, pagerduty or"
        " alertmanager, and the variable with its address or key; none: nowhere from now on."
        " Default: as at the call before.",
    ),
]


def start_stack(
    home: HomeOption = None,
    dags: DagsOption = None,
    alerts: AlertsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start MinIO and Airflow on this machine and leave them running.

    The first call makes the folder of DAGs if there is none.
    A second call starts only the processes that have ended, or all of Airflow if its settings have
    changed, such as the receiver of alerts.
    """
    from tidegate.infra.local_stack import find_default_dags, make_dags_folder

    stack = _configure_stack(home, dags, alerts)
    # A stack that was up has its DAGs elsewhere if they are not here.
    if dags is None and not stack.was_up and not find_default_dags().is_dir():
        make_dags_folder(find_default_dags())
        _print_progress("made the folder dags; put specs into dags/pipelines")
    # Progress goes to standard error, so that --json has standard output to itself.
    found = stack.up(_print_progress)
    data = {
        "airflow": found.airflow_url,
        "minio": found.minio_endpoint,
        "credentials": str(found.credentials_file),
        "healthy": found.healthy,
        "processes": found.processes,
    }
    output.print_result(as_json, "stack", data)


def stop_stack(home: HomeOption = None) -> None:
    """Stop what `tidegate up` started; drivers first seal what they have read.

    Data and addresses are kept.
    """
    _configure_stack(home, None).down(_print_progress)


def archive_spark_classes(
    again: Annotated[bool, typer.Option(help="Make the archive even if there is one.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Archive the classes that Spark loads, so that drivers start faster.

    Takes about a minute and 160 MB, once per machine.
    """
    from tidegate.jobs.driver.class_archive_build import build_class_archive

    archive, made = build_class_archive(again)
    text = f"{archive}: {'made' if made else 'is there already'}"
    output.print_result(as_json, "warm", {"archive": str(archive), "made": made}, text)


def run_demo(
    start: Annotated[
        datetime, typer.Option(formats=["%Y-%m-%d"], help="First day fed.")
    ] = datetime(2013, 1, 6),  # noqa: DTZ001 - a date
    days: Annotated[int, typer.Option(min=1, help="Days fed.")] = 7,
    pace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds per simulated hour.")
    ] = 1.0,
    home: Annotated[Path, typer.Option(metavar="FOLDER", help="State of the demo's stack.")] = Path(
        ".tidegate/demo"
    ),
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave MinIO and Airflow running; `tidegate down` ends them."),
    ] = False,
) -> None:
    """Run everything once, on real flights.

    Airflow, Spark and MinIO, a killed driver, a recovery, quality checks and a summary. Data of an
    earlier demo in the same folder is deleted. Exit code 1 if the tables are not exact.
    """
    from tidegate.infra import demo

    with demo.run_demo(start.date(), days, pace, home.absolute(), keep=keep) as done:
        output.print_text("demo", demo=done, keep=keep)
    raise typer.Exit(0 if done.is_good else 1)


def _configure_stack(
    home: Path | None, dags: Path | None, alerts: tuple[str, str] | None = None
) -> Stack:
    from tidegate.infra.local_stack import Stack, StackSettings

    defaults, variable = StackSettings(), os.environ.get("TIDEGATE_HOME")
    # The same order as for the store: option, environment, this folder.
    folder = home or (Path(variable) if variable else defaults.home)
    return Stack(StackSettings(home=folder, dags=dags or defaults.dags, alerts=alerts))


def _print_progress(line: str) -> None:
    output.console(stderr=True).print(line, markup=False)
