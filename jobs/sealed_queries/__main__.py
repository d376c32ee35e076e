"""Entry point ``python -m tidegate.jobs.sealed_queries JOB.yaml --store URL``, for Airflow.

It logs JSON lines to stderr and ends with the exit code of `run_job`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.errors import TidegateError
from tidegate.jobs.driver.errors import OTHER_KIND
from tidegate.jobs.driver.log_output import configure_logs, ship_log
from tidegate.jobs.sealed_queries.job_run import JobOptions, find_script, run_job
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import load_any_spec


def drive_job(
    spec: Annotated[Path, typer.Argument(help="the job's YAML file")],
    store: Annotated[
        str, typer.Option(help="s3://bucket/prefix or a folder", envvar="TIDEGATE_STORE")
    ],
    recover_to: Annotated[
        str, typer.Option(help="latest, latest_healthy or a checkpoint id")
    ] = "latest",
) -> None:
    """Drive one job until it is stopped or finished."""
    configure_logs(json=True)
    try:
        job = load_any_spec(spec)
        if not isinstance(job, JobSpec):
            raise OTHER_KIND(pipeline=job.name, found="job", given="pipeline")
        options = JobOptions(store, find_script(job, spec), recover_to)
    except TidegateError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.failure_class.exit_code) from None
    with ship_log(store, job.name):
        code = run_job(job, options)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(drive_job)
