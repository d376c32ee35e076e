"""The quality task: Great Expectations in a process of its own, since importing it costs seconds and 300 MB."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from airflow.sdk import BaseOperator, BaseOperatorLink

from tidegate.jobs.spec.errors import PoisonError, TransientError
from tidegate.operators.access import StoreAccess, child_environment
from tidegate.operators.failures import class_of_exit, failure_of

__all__ = ["DataDocsLink", "QualityFailedError", "QualityOperator"]

_TIME_OUT = 900.0  # seconds; the checks take one, importing Great Expectations up to ten on a busy machine


class QualityFailedError(PoisonError):
    """Expectations failed: the stream goes on, a person has to look. Retrying would find the same rows."""


class DataDocsLink(BaseOperatorLink):
    """Button on the task: the Data Docs of this check."""

    name = "Data Docs"
    xcom_key = "data_docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        from airflow.sdk.bases.xcom import BaseXCom

        found = BaseXCom.get_value(key=self.xcom_key, ti_key=ti_key)
        return str(found or "")


class QualityOperator(BaseOperator):
    """Runs `python -m tidegate.expectations` (or `$TIDEGATE_CHECKS`) with `run SPEC --store URL` and names what failed.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#efe6c9"
    operator_extra_links = (DataDocsLink(),)

    def __init__(self, *, pipeline: str, spec: str, conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the checks.

        Raises:
            QualityFailedError: critical expectations failed; each is named.
            TidegateError: the check itself could not run.
        """
        access = StoreAccess.resolve(self.conn_id)
        own = shlex.split(os.environ.get("TIDEGATE_CHECKS", ""))
        command = [*(own or [sys.executable, "-m", "tidegate.expectations"]), "run", self.spec, "--store", access.url]
        done = subprocess.run(
            command, env=child_environment(access), capture_output=True, text=True, timeout=_TIME_OUT, check=False
        )
        self.log.info("%s", "\n".join([*done.stderr.splitlines()[-40:], *done.stdout.splitlines()]))
        report = _report(done.stdout)
        if done.returncode not in (0, 1) or report is None:
            raise self._could_not_run(done)
        docs = report.get("docs") or report.get("docs_url")
        if docs:
            context["ti"].xcom_push(key=DataDocsLink.xcom_key, value=str(docs))
        if done.returncode == 1:
            raise self._failed(report, docs)
        return {"pipeline": self.pipeline, "passed": True, "docs": docs}

    def _could_not_run(self, done: subprocess.CompletedProcess[str]) -> Exception:
        kind = class_of_exit(done.returncode)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if kind is None or done.returncode == 1:
            return TransientError(
                f"the checks ended with code {done.returncode}: {last}", code="quality.crashed", pipeline=self.pipeline
            )
        return failure_of({"class": kind.value, "code": "quality.not_run", "message": last, "pipeline": self.pipeline})

    def _failed(self, report: dict[str, Any], docs: Any) -> QualityFailedError:
        names = failed_checks(report)
        for name in names:
            self.log.error("failed expectation: %s", name)
        return QualityFailedError(
            f"{len(names)} expectation(s) failed: {'; '.join(names)}",
            code="quality.failed",
            pipeline=self.pipeline,
            kept="the stream runs on; nothing was rolled back",
            advice=f"see the Data Docs: {docs}" if docs else "see the report in the task log",
        )


def failed_checks(report: dict[str, Any]) -> list[str]:
    """One line per failed critical check of a report."""
    checks = report.get("checks", [])
    bad = [c for c in checks if not c.get("success", True) and c.get("severity", "critical") == "critical"]
    return [" ".join(str(c[k]) for k in ("suite", "id", "message") if c.get(k)) for c in bad] or ["(the report names none)"]


def _report(stdout: str) -> dict[str, Any] | None:
    """The JSON report whose path stands on the last line of the output."""
    lines = stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(Path(lines[-1].strip()).read_text(encoding="utf-8"))
    except (IndexError, OSError, ValueError):
        return None
    return found
