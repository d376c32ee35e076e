"""Runs cases and says what is not as they expect: for the command line and for pytest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigurationError

from .case_file import read_case
from .case_recording import record_expectation
from .case_report import CaseResult, Verdict
from .case_run import make_local_session, replace_sources, run_case
from .table_diff import find_differences

if TYPE_CHECKING:
    from tidegate.jobs.spec.pipeline import PipelineSpec


class CaseRunner:
    """Runs cases of one pipeline.

    Args:
        spec: as it is written; its sources are never read.
        session: see `open_runner`.
    """

    def __init__(self, spec: PipelineSpec, session: Any) -> None:
        self._given, self._spec, self._session = spec, replace_sources(spec), session

    def check_case(self, path: Path, *, is_recorded: bool = False) -> CaseResult:
        """Run a case and compare; or write what happens into its file."""
        begun = time.monotonic()
        description, problems = "", list[str]()
        try:
            case = read_case(path, self._given)
            description = case.description
            outcome = run_case(self._spec, case, self._session)
            if is_recorded:
                record_expectation(case, outcome, self._spec)
                verdict: Verdict = "recorded"
            else:
                problems = [str(one) for one in find_differences(case, outcome)]
                verdict = "failed" if problems else "passed"
        except ConfigurationError as error:
            verdict, problems = "bad", str(error).splitlines()
        seconds = round(time.monotonic() - begun, 3)
        return CaseResult(str(path), description, verdict, seconds, problems)


@contextmanager
def open_runner(spec: PipelineSpec, *, on_spark: bool = False) -> Iterator[CaseRunner]:
    """Yield what runs the cases of a pipeline: in this process, or on a Spark of this machine.

    Raises:
        ConfigurationError: the pipeline needs Spark.
    """
    if not on_spark:
        yield CaseRunner(spec, make_local_session(replace_sources(spec)))
        return
    from tidegate.jobs.spark.spark_session import open_session

    session = open_session(replace_sources(spec))
    try:
        yield CaseRunner(spec, session)
    finally:
        session.stop()
