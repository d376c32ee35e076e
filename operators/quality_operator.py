"""The quality task.

Great Expectations in a process of its own, since importing it costs seconds and 300 MB.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.configuration import conf

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.store import Store
from tidegate.errors import PoisonError, TransientError
from tidegate.operators.child_processes import classify_exit_code, rebuild_error
from tidegate.operators.store_access import StoreAccess, build_child_environment

_CHECKS_TIMEOUT = (
    900.0  # seconds; the checks take one, importing Great Expectations up to ten on a busy machine
)


class QualityFailedError(PoisonError):
    """Expectations failed: the stream goes on, a person has to look.

    Retrying would find the same rows.
    """


class DataDocsLink(BaseOperatorLink):
    """Button on the task.

    The Data Docs of this check, served behind Airflow's login by the plugin.
    """

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Called once, on the worker, when the task has ended.

        Without a result it leads to the newest one.
        """
        return build_docs_url(operator.pipeline, getattr(operator, "docs_key", None))


def build_docs_url(pipeline: str, key: str | None) -> str:
    """Where the plugin serves a page of the Data Docs; the index without a key."""
    page = key.partition("/quality/docs/")[2] if key else "index.html"
    return f"{conf.get('api', 'base_url', fallback='').rstrip('/')}/tidegate/docs/{pipeline}.quality/{page}"


class QualityOperator(BaseOperator):
    """Runs `python -m tidegate.expectations` (or `$TIDEGATE_CHECKS`) with `run SPEC --store URL` and names what failed.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#efe6c9"
    operator_extra_links = (DataDocsLink(),)

    def __init__(
        self, *, pipeline: str, spec: str, conn_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id
        self.docs_key: str | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the checks.

        Raises:
            QualityFailedError: critical expectations failed; each is named.
            TidegateError: the check itself could not run.
        """
        access = StoreAccess.resolve(self.conn_id)
        own = shlex.split(os.environ.get("TIDEGATE_CHECKS", ""))
        command = [
            *(own or [sys.executable, "-m", "tidegate.expectations"]),
            "run",
            self.spec,
            "--store",
            access.url,
        ]
        done = subprocess.run(
            command,
            env=build_child_environment(access),
            capture_output=True,
            text=True,
            timeout=_CHECKS_TIMEOUT,
            check=False,
        )
        self.log.info("%s", "\n".join([*done.stderr.splitlines()[-40:], *done.stdout.splitlines()]))
        result = self._load_result(access.open(), done.stdout)
        if done.returncode not in (0, 1) or result is None:
            raise self._build_run_error(done)
        self.docs_key = str(result["docs"])
        if done.returncode == 1:
            raise self._build_quality_error(result)
        return {
            "pipeline": self.pipeline,
            "verdict": result["verdict"],
            "docs": build_docs_url(self.pipeline, self.docs_key),
        }

    def _load_result(self, store: Store, output: str) -> dict[str, Any] | None:
        """The result whose key stands on the last line of the output."""
        key = (output.strip().splitlines() or [""])[-1].strip()
        if not key.startswith(BucketLayout(self.pipeline).quality_prefix):
            return None
        found: dict[str, Any] = parse_json(store.get(key).data)
        return found

    def _build_run_error(self, done: subprocess.CompletedProcess[str]) -> Exception:
        kind = classify_exit_code(done.returncode)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if kind is None or done.returncode == 1:
            return TransientError(
                f"the checks ended with code {done.returncode}: {last}",
                code="quality.crashed",
                pipeline=self.pipeline,
            )
        return rebuild_error(
            {
                "class": kind.value,
                "code": "quality.not_run",
                "message": last,
                "pipeline": self.pipeline,
            }
        )

    def _build_quality_error(self, result: dict[str, Any]) -> QualityFailedError:
        names = list_failed_checks(result)
        for name in names:
            self.log.error("failed expectation: %s", name)
        return QualityFailedError(
            f"{len(names)} critical expectation(s) failed: {'; '.join(names)}",
            code="quality.failed",
            pipeline=self.pipeline,
            kept="the stream runs on; nothing was rolled back",
            advice=f"see the Data Docs: {build_docs_url(self.pipeline, str(result['docs']))}",
        )


def list_failed_checks(result: dict[str, Any]) -> list[str]:
    """One line per failed critical check of a result.

    Warnings are in the log, but do not fail the run.
    """
    bad = [check for check in result.get("failed", []) if check.get("severity") == "critical"]
    return [
        f"{check['suite']}.{check['id']}: {check['says']} (seen: {check['observed']})"
        for check in bad
    ]
