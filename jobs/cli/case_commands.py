"""`tidegate test`: runs the test cases of a pipeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments, output
from .arguments import EnvironmentOption, JsonOption, SpecArgument
from .errors import CANNOT_WRITE, TEST_OF_JOB

if TYPE_CHECKING:
    from tidegate.jobs.cases.case_report import CaseResult


def run_cases(
    spec: SpecArgument,
    cases: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CASE...]",
            help="Files of cases, or folders of them. Default: cases/NAME/ beside NAME.yaml.",
        ),
    ] = None,
    environment: EnvironmentOption = None,
    on_spark: Annotated[
        bool, typer.Option("--spark", help="Run the cases on Spark instead of in this process.")
    ] = False,
    is_recorded: Annotated[
        bool, typer.Option("--record", help="Write what happens into the cases, for review.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JUnit XML as well.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run test cases of a pipeline: given rows and times, are tables and counters as expected?

    Nothing is read but the spec and the cases, and no driver runs. Exit codes: 0 all cases pass, 1
    a case fails, 2 a case cannot be run as it is written.
    """
    from tidegate.jobs.cases.case_check import open_runner
    from tidegate.jobs.cases.case_file import find_cases
    from tidegate.jobs.cases.case_report import write_junit
    from tidegate.jobs.spec.job_spec import JobSpec

    pipeline = arguments.find_any_spec(spec, environment)
    if isinstance(pipeline, JobSpec):
        raise TEST_OF_JOB(name=pipeline.name)
    files = find_cases(arguments.resolve_spec_path(spec), cases or [])
    results: list[CaseResult] = []
    with open_runner(pipeline, on_spark=on_spark) as runner:
        for file in files:
            result = runner.check_case(file, is_recorded=is_recorded)
            results.append(result)
            if not as_json:
                output.print_line(f"{result.verdict:8}  {result.case}  {result.seconds:.2f} s")
                for problem in result.problems:
                    for line in problem.splitlines():
                        output.print_line(f"  {line}")
    if junit is not None:
        try:
            write_junit(junit, pipeline.name, results)
        except OSError as error:
            raise CANNOT_WRITE(file=junit, reason=error) from error
    counts = Counter(result.verdict for result in results)
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    records = [asdict(result) for result in results]
    output.print_result(as_json, "test", records, f"{pipeline.name}: {summary}")
    if counts["bad"] or counts["failed"]:
        raise typer.Exit(2 if counts["bad"] else 1)
