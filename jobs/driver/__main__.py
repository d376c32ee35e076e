"""Entry point ``python -m tidegate.jobs.driver SPEC.yaml --store URL``, which Airflow launches.

It logs JSON lines to stderr and ends with the exit code of `run_pipeline`. If the spec cannot be
read, it ends with the exit code of that error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.jobs.spec.errors import SPEC_IS_JOB
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import read_spec_name

from .epoch_loop import EndConditions
from .launch_spec import load_launch_spec
from .leak_reports import drop_leak_reports
from .log_output import configure_logs, ship_log
from .pipeline_run import RunOptions, exit_on_error, run_pipeline

SpecArgument = Annotated[Path, typer.Argument(help="the YAML file of the pipeline or job")]
StoreOption = Annotated[
    str, typer.Option(help="s3://bucket/prefix or a folder", envvar="TIDEGATE_STORE")
]
StandbyOption = Annotated[
    bool, typer.Option(help="wait, with the imports done, until the lease is free")
]
EndsWhenStoppedOption = Annotated[
    bool, typer.Option(help="a standby ends when the pipeline is stopped")
]
RecoverOption = Annotated[str, typer.Option(help="latest, latest_healthy or a checkpoint id")]


def drive_pipeline(
    spec: SpecArgument,
    store: StoreOption,
    recover_to: RecoverOption = "latest",
    work: Annotated[
        Path | None, typer.Option(help="scratch folder; a temporary one by default")
    ] = None,
    until_idle: Annotated[
        float | None, typer.Option(help="end after this many seconds without a row")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="end after this many sealed epochs")] = None,
    standby: StandbyOption = False,
    ends_when_stopped: EndsWhenStoppedOption = False,
) -> None:
    """Drive one pipeline until it is stopped or finished."""
    configure_logs(json=True)
    with exit_on_error(read_spec_name(spec)):
        launch = load_launch_spec(spec, store)
        pipeline = launch.spec
        if isinstance(pipeline, JobSpec):
            raise SPEC_IS_JOB(pipeline=pipeline.name, path=spec)
    options = RunOptions(
        store_url=store,
        until=EndConditions(until_idle, epochs),
        recover_to=recover_to,
        standby=standby,
        ends_when_stopped=ends_when_stopped,
        work=work,
        deploy=launch.turn,
    )
    with ship_log(store, pipeline.name):
        code = run_pipeline(pipeline, options)
    raise typer.Exit(code)


if __name__ == "__main__":
    drop_leak_reports()
    typer.run(drive_pipeline)
