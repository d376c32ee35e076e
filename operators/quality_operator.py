"""The quality task: Great Expectations in a child process.

Importing it costs seconds and 300 MB, which Airflow's workers need not spend.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.store import Store
from tidegate.operators.child_processes import build_child_error, run_child
from tidegate.operators.errors import QUALITY_CRASHED, QUALITY_FAILED
from tidegate.operators.pipeline_operator import PipelineOperator

# Seconds. The checks take one; importing Great Expectations takes up to ten on a busy machine.
_CHECKS_TIMEOUT = 900.0


class DataDocsLink(BaseOperatorLink):
    """Button on the task: the Data Docs of this check, served behind Airflow's login."""

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the link; Airflow calls this once, on the worker, when the task has ended.

        Without a result it leads to the newest one.
        """
        return build_docs_url(operator.pipeline, getattr(operator, "docs_key", None))


def build_docs_url(pipeline: str, key: str | None) -> str:
    """Return where the plugin serves a page of the Data Docs; the index without a key."""
    page = key.partition("/quality/docs/")[2] if key else "index.html"
    base_url = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base_url}/tidegate/docs/{pipeline}.quality/{page}"


class QualityOperator(PipelineOperator):
    """Runs the quality checks and names what failed.

    The command is `python -m tidegate.expectations`, or `$TIDEGATE_CHECKS`.
    """

    ui_color = "#efe6c9"
    operator_extra_links = (DataDocsLink(),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.docs_key: str | None = None  # for the link, which is made even if the task fails

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the checks.

        Raises:
            QualityFailedError: critical expectations failed; each is named.
            TidegateError: the check itself could not run.
        """
        access = self.resolve_access()
        command = shlex.split(os.environ.get("TIDEGATE_CHECKS", ""))
        command = command or [sys.executable, "-m", "tidegate.expectations"]
        child = run_child(
            access, [*command, "run", self.spec, "--store", access.url], timeout=_CHECKS_TIMEOUT
        )
        lines = [*child.stderr.splitlines()[-40:], *child.stdout.splitlines()]
        self.log.info("%s", "\n".join(lines))
        result = self._load_result(access.open(), child.stdout)
        if child.returncode not in (0, 1) or result is None:
            # Without a result, 1 is the exit code of Python itself after an exception.
            raise build_child_error(child, QUALITY_CRASHED, self.pipeline, crash_codes=(1,))
        self.docs_key = str(result["docs"])
        url = build_docs_url(self.pipeline, self.docs_key)
        if child.returncode == 1:
            names = list_failed_checks(result)
            for name in names:
                self.log.error("failed expectation: %s", name)
            raise QUALITY_FAILED(
                pipeline=self.pipeline, count=len(names), names="; ".join(names), url=url
            )
        return {"pipeline": self.pipeline, "verdict": result["verdict"], "docs": url}

    def _load_result(self, store: Store, output: str) -> dict[str, Any] | None:
        """The result whose key is the last line of the output."""
        key = (output.strip().splitlines() or [""])[-1].strip()
        if not key.startswith(BucketLayout(self.pipeline).quality_prefix):
            return None
        result: dict[str, Any] = parse_json(store.get(key).data)
        return result


def list_failed_checks(result: dict[str, Any]) -> list[str]:
    """Return one line per failed critical check; failed warnings do not fail the run."""
    return [
        f"{check['suite']}.{check['id']}: {check['says']} (seen: {check['observed']})"
        for check in result.get("failed", [])
        if check.get("severity") == "critical"
    ]
