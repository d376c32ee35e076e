"""`tidegate up`, `down`, `demo`.

The local stack of MinIO and Airflow; `warm`: make drivers here start faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import output
from tidegate.jobs.cli.arguments import JsonOption

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


def start_stack(
    home: HomeOption = None, dags: DagsOption = None, as_json: JsonOption = False
) -> None:
    """Start MinIO and Airflow on this machine and leave them running.

    Repeating it starts what has died.
    """
    stack = _configure_stack(home, dags)
    found = stack.up(_print_progress)
    if as_json:
        data = {
            "airflow": found.airflow_url,
            "minio": found.minio_endpoint,
            "credentials": str(found.credentials_file),
        }
        output.print_envelope(
            "stack", data | {"healthy": found.healthy, "processes": found.processes}
        )
        return
    screen = output.console()
    screen.print(f"Airflow   {found.airflow_url}")
    screen.print(f"MinIO     {found.minio_endpoint}")
    screen.print(f"logins    {found.credentials_file}  (mode 0600; user admin)")
    screen.print("look      tidegate status --store stack")
    screen.print("stop      tidegate down")


def stop_stack(home: HomeOption = None) -> None:
    """Stop what `tidegate up` started; drivers seal what they have first.

    Data and addresses stay.
    """
    _configure_stack(home, None).down(_print_progress)


def archive_spark_classes(
    again: Annotated[bool, typer.Option(help="Make it anew, even if there is one.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Archive the classes Spark loads (about a minute, 160 MB, once per machine).

    Then drivers start faster.
    """
    from tidegate.jobs.driver.class_archive_build import build_class_archive

    archive, made = build_class_archive(again)
    if as_json:
        output.print_envelope("warm", {"archive": str(archive), "made": made})
    else:
        output.console().print(
            f"{archive}: {'made' if made else 'is there already'}", soft_wrap=True
        )


def run_demo(
    ctx: typer.Context,
    start: Annotated[
        str | None, typer.Option(metavar="DATE", help="First day fed. Default: 2013-01-06.")
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, help="Days fed. Default: 7.")] = None,
    pace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Seconds per simulated hour. Default: 1."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The demo's own stack. Default: .tidegate/demo here."),
    ] = None,
) -> None:
    """Run the whole shape once, on real flights.

    Airflow, Spark, MinIO, a kill, a recovery, quality, a summary.
    """
    from tidegate.infra.demo import main

    given = {"--start": start, "--days": days, "--pace": pace, "--home": home}
    known = [
        text for name, value in given.items() if value is not None for text in (name, str(value))
    ]
    raise typer.Exit(main([*known, *ctx.args]))


def _configure_stack(home: Path | None, dags: Path | None) -> Stack:
    import os

    from tidegate.infra.local_stack import Stack, StackSettings

    chosen = home or (
        Path(os.environ["TIDEGATE_HOME"]) if os.environ.get("TIDEGATE_HOME") else None
    )
    settings = StackSettings()
    return Stack(StackSettings(home=chosen or settings.home, dags=dags or settings.dags))


def _print_progress(line: str) -> None:
    output.console(stderr=True).print(line)
