"""Entry point ``python -m tidegate.jobs.sealed_queries JOB.yaml --store URL``, for Airflow.

It logs JSON lines to stderr and ends with the exit code of the failure class: 0 without one.
"""

import typer

from tidegate.jobs.driver.__main__ import (
    EndsWhenStoppedOption,
    RecoverOption,
    SpecArgument,
    StandbyOption,
    StoreOption,
)
from tidegate.jobs.driver.errors import OTHER_KIND
from tidegate.jobs.driver.launch_spec import load_launch_spec
from tidegate.jobs.driver.leak_reports import close_stderr_at_exit
from tidegate.jobs.driver.log_output import configure_logs, ship_log
from tidegate.jobs.driver.pipeline_run import exit_on_error, run_to_exit_code
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.loader import read_spec_name

from .job_run import JobOptions, require_script, run_job_until_end


def drive_job(
    spec: SpecArgument,
    store: StoreOption,
    recover_to: RecoverOption = "latest",
    standby: StandbyOption = False,
    ends_when_stopped: EndsWhenStoppedOption = False,
) -> None:
    """Drive one job until it is stopped or finished."""
    configure_logs(json=True, libraries=False)
    with exit_on_error(read_spec_name(spec)):
        launch = load_launch_spec(spec, store)
        job = launch.spec
        if not isinstance(job, JobSpec):
            raise OTHER_KIND(pipeline=job.name, found="job", given="pipeline")
        options = JobOptions(
            store_url=store,
            script=require_script(job, launch.script),
            place=launch.script_place,
            recover_to=recover_to,
            standby=standby,
            ends_when_stopped=ends_when_stopped,
            deploy=launch.turn,
        )
    with ship_log(store, job.name):
        code = run_to_exit_code(job.name, lambda: run_job_until_end(job, options))
    raise typer.Exit(code)


if __name__ == "__main__":
    close_stderr_at_exit()
    typer.run(drive_job)
