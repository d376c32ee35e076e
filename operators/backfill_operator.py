"""Compare the stream's windows over a past range with a batch run over the same input.

The batch is a Spark job in a child process, `python -m tidegate.jobs.driver.backfill`; the stream
goes on meanwhile. A run of the DAG compares its data interval, so Airflow's own backfill works; a
manual run takes the range of its form.

To replace what differs, the late rows of the range become a splice request, and `<p>.splice` is
started with it: it shows the exact effect, asks a person and merges. Then the stream's windows are
what the batch run computed.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.operators.child_processes import build_child_error, run_child, run_tidegate
from tidegate.operators.errors import BACKFILL_CRASHED, BACKFILL_DIFFERENT, BACKFILL_RANGE
from tidegate.operators.pipeline_operator import PipelineOperator, start_dag_run
from tidegate.operators.store_access import StoreAccess

_DIFFERENCE_KINDS: Final = ("different", "only_stream", "only_batch")


class BackfillOperator(PipelineOperator):
    """Compares the windows of a range with a batch run over the same input.

    Args:
        start: first window start; a template, by default the form's, else the run's data interval.
        end: windows end at this instant or before; as `start`.
        fail: a difference fails the task; a template that renders to `True` or `False`.
        replace: a difference starts `<p>.splice` with the range's late rows; a template as `fail`.
    """

    ui_color = "#e7dcef"
    template_fields = ("start", "end", "fail", "replace")

    def __init__(
        self,
        *,
        start: str = "{{ params.start or data_interval_start or '' }}",
        end: str = "{{ params.end or data_interval_end or '' }}",
        fail: str = "{{ params.fail_on_difference }}",
        replace: str = "{{ params.replace }}",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.start, self.end, self.fail, self.replace = start, end, fail, replace

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the batch; the comparison is the task's result.

        Raises:
            DagRunTriggerException: the windows differ and are to be replaced; Airflow starts the
                merge's run.
            PoisonError: the windows differ, and `fail` says that this is a failure.
            TidegateError: the batch run could not be made.
        """
        if not self.start or not self.end:
            raise BACKFILL_RANGE(pipeline=self.pipeline)
        access = self.resolve_access()
        command = [sys.executable, "-m", "tidegate.jobs.driver.backfill", self.spec]
        command += ["--store", access.url, "--start", str(self.start), "--end", str(self.end)]
        # No time limit: a range may be a year. Airflow's execution_timeout still applies.
        child = run_child(access, command, timeout=None)
        self.log.info("%s", "\n".join(child.stderr.splitlines()[-40:]))
        key = (child.stdout.strip().splitlines() or [""])[-1].strip()
        if child.returncode != 0 or not key.startswith(BucketLayout(self.pipeline).pipeline_prefix):
            raise build_child_error(child, BACKFILL_CRASHED, self.pipeline)
        comparison: dict[str, Any] = {**parse_json(access.open().get(key).data), "key": key}
        for name, window in comparison["windows"].items():
            differences = ", ".join(f"{window[kind]} {kind}" for kind in _DIFFERENCE_KINDS)
            self.log.info("%s: %s equal, %s", name, window["equal"], differences)
        if not comparison["equal"] and self.replace == "True":
            self._request_merge(context, access, comparison)
        if not comparison["equal"] and self.fail == "True":
            raise BACKFILL_DIFFERENT(
                pipeline=self.pipeline, start=self.start, end=self.end, key=key
            )
        return comparison

    def _request_merge(self, context: Any, access: StoreAccess, comparison: dict[str, Any]) -> None:
        """Start `<p>.splice` with the late rows of the windows that differ, if there are any."""
        outputs = [
            option
            for name, window in comparison["windows"].items()
            if any(window[kind] for kind in _DIFFERENCE_KINDS)
            for option in ("--output", name)
        ]
        span = ("--since", str(self.start), "--until", str(self.end))
        why = f"the backfill of {self.start} to {self.end} found a difference"
        command = ("splice", "late", self.spec, *outputs, *span, "--why", why)
        made = run_tidegate(access, self.pipeline, *command, empty_on=("splice.no_rows",))
        request = made.get("request")
        if not request:
            self.log.warning("the windows differ, but no late row of the range waits for a merge")
            return
        self.log.info(
            "splice request %s: %s.splice shows its effect and asks", request, self.pipeline
        )
        # The exception ends the task without a return value, so the result is pushed here.
        context["ti"].xcom_push(key="return_value", value={**comparison, "request": request})
        raise start_dag_run(
            f"{self.pipeline}.splice",
            f"backfill__{request}",
            why,
            conf={"request": request},
            once=True,
        )
