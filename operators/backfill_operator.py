"""Batch beside stream.

The same pipeline over a past range, compared with what the stream made of it.

A process of its own, since it is a Spark job: `python -m tidegate.jobs.driver.backfill`. The stream
goes on meanwhile. A run of the DAG compares its data interval, so Airflow's own backfill works; a
run by hand takes the range of its form.

To replace what differs, the range's late rows become a splice request and `<p>.splice` is started
with it: that shows the exact effect, asks a person and merges, so that the stream's windows become
what the batch run found.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import DagRunTriggerException

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.operators.child_processes import classify_exit_code, rebuild_error, run_tidegate
from tidegate.operators.store_access import StoreAccess, build_child_environment

_DIFFERENCE_KINDS: Final = ("different", "only_stream", "only_batch")


class BackfillOperator(BaseOperator):
    """Compares the windows of a range with a batch run over the same input.

    Args:
        pipeline: name of the pipeline.
        spec: path of its YAML file.
        start: first window start; a template, by default the form's, else the run's data interval.
        end: windows end at this instant or before; as `start`.
        fail: a difference fails the task; a template that renders to `True` or `False`.
        replace: a difference starts `<p>.splice` with the range's late rows; a template as `fail`.
        conn_id: Airflow connection of the store; None for the environment.
    """

    ui_color = "#e7dcef"
    template_fields = ("start", "end", "fail", "replace")

    def __init__(
        self,
        *,
        pipeline: str,
        spec: str,
        start: str = "{{ params.start or data_interval_start or '' }}",
        end: str = "{{ params.end or data_interval_end or '' }}",
        fail: str = "{{ params.fail_on_difference }}",
        replace: str = "{{ params.replace }}",
        conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline, self.spec, self.conn_id = pipeline, spec, conn_id
        self.start, self.end, self.fail, self.replace = start, end, fail, replace

    def execute(self, context: Any) -> dict[str, Any]:
        """Run it; the comparison is the task's result.

        Raises:
            DagRunTriggerException: the windows differ and are to be replaced; Airflow starts the
                merge's run.
            PoisonError: the windows differ, and that was said to be a failure.
            TidegateError: the batch run could not be made.
        """
        if not self.start or not self.end:
            raise ConfigurationError(
                "a run by hand needs a range",
                code="backfill.range",
                pipeline=self.pipeline,
                advice="fill in start and end",
            )
        access = StoreAccess.resolve(self.conn_id)
        command = [
            sys.executable,
            "-m",
            "tidegate.jobs.driver.backfill",
            self.spec,
            "--store",
            access.url,
        ]
        command += ["--start", str(self.start), "--end", str(self.end)]
        done = subprocess.run(
            command,
            env=build_child_environment(access),
            capture_output=True,
            text=True,
            check=False,
        )
        self.log.info("%s", "\n".join(done.stderr.splitlines()[-40:]))
        key = (done.stdout.strip().splitlines() or [""])[-1].strip()
        if done.returncode != 0 or not key.startswith(BucketLayout(self.pipeline).pipeline_prefix):
            raise self._build_batch_error(done)
        found: dict[str, Any] = parse_json(access.open().get(key).data)
        for name, window in found["windows"].items():
            self.log.info(
                "%s: %s equal, %s",
                name,
                window["equal"],
                ", ".join(f"{window[k]} {k}" for k in _DIFFERENCE_KINDS),
            )
        if not found["equal"] and self.replace == "True":
            self._request_merge(context, access, {**found, "key": key})
        if not found["equal"] and self.fail == "True":
            raise PoisonError(
                f"stream and batch differ between {self.start} and {self.end}",
                code="backfill.different",
                pipeline=self.pipeline,
                kept="the stream's tables, as they are",
                advice=f"see {key} in the bucket; rows that came too late are in the late table",
            )
        return {**found, "key": key}

    def _request_merge(self, context: Any, access: StoreAccess, found: dict[str, Any]) -> None:
        """Hand the late rows of the windows that differ to the splice.

        Without such rows there is nothing to merge.
        """
        differing = [
            name
            for name, window in found["windows"].items()
            if any(window[kind] for kind in _DIFFERENCE_KINDS)
        ]
        outputs = [part for name in differing for part in ("--output", name)]
        span = ("--since", str(self.start), "--until", str(self.end))
        why = f"the backfill of {self.start} to {self.end} found a difference"
        command = ("splice", "late", self.spec, *outputs, *span, "--why", why)
        made = run_tidegate(access, self.pipeline, *command, nothing=("splice.no_rows",))
        if not made.get("request"):
            self.log.warning("the windows differ, but no late row of the range waits for a merge")
            return
        self.log.info(
            "splice request %s: %s.splice shows its effect and asks", made["request"], self.pipeline
        )
        context["ti"].xcom_push(key="return_value", value={**found, "request": made["request"]})
        raise DagRunTriggerException(
            trigger_dag_id=f"{self.pipeline}.splice",
            dag_run_id=f"backfill__{made['request']}",
            conf={"request": made["request"]},
            reset_dag_run=False,
            skip_when_already_exists=True,
            wait_for_completion=False,
            allowed_states=[],
            failed_states=[],
            poke_interval=1,
            deferrable=False,
            note=why,
        )

    def _build_batch_error(self, done: subprocess.CompletedProcess[str]) -> Exception:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:1000]
        kind = classify_exit_code(done.returncode)
        if kind is None:
            return TransientError(
                f"the batch run ended with code {done.returncode}: {last}", code="backfill.crashed"
            )
        return rebuild_error(
            {
                "class": kind.value,
                "code": "backfill.not_run",
                "message": last,
                "pipeline": self.pipeline,
            }
        )
