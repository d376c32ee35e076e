"""Spark's events about queries, as its listeners get them through Py4J."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

from tidegate.jobs.sealed_queries.seal_loop import SparkReports


def start_query(reports: SparkReports, run: str, name: str | None) -> None:
    """Report that a query has started."""
    event = MagicMock()
    event.runId().toString.return_value, event.name.return_value = run, name
    reports.onQueryStarted(event)


def report_batch(reports: SparkReports, **report: Any) -> None:
    """Report a batch; the fields are those of Spark's JSON."""
    event = MagicMock()
    event.progress().json.return_value = json.dumps(report)
    reports.onQueryProgress(event)


def report_idle(reports: SparkReports, run: str) -> None:
    """Report that a trigger of a query has found nothing to do."""
    event = MagicMock()
    event.runId().toString.return_value = run
    reports.onQueryIdle(event)


def end_query(reports: SparkReports, run: str, error: str | None) -> None:
    """Report that a query has ended, with or without an error."""
    event = MagicMock()
    event.runId().toString.return_value = run
    event.exception().isDefined.return_value = error is not None
    event.exception().get.return_value = error
    reports.onQueryTerminated(event)
