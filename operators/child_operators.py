"""The tasks that do their work in a child process: quality, maintenance and backfill.

Great Expectations, table libraries and Spark cost seconds and hundreds of megabytes to import,
which Airflow's workers need not spend. Each task runs a command, copies its output to the task log,
and turns its exit code into an error of the one taxonomy.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import parse_json
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.driver_reports import delete_old_logs
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.illness_record import INTERVAL_VARIABLE
from tidegate.checkpoints.verify import (
    SCRUB_EVERY,
    CheckpointVerdict,
    Verification,
    condemn_if_damaged,
    note_scrub,
    scrub_checkpoints,
    select_for_scrub,
)
from tidegate.errors import ErrorDefinition
from tidegate.json_types import JsonObject

from .child_processes import build_child_error, run_child, run_tidegate
from .errors import (
    BACKFILL_CRASHED,
    BACKFILL_DIFFERENT,
    BACKFILL_RANGE,
    MAINTAIN_CRASHED,
    MAINTAIN_DAMAGED,
    QUALITY_CRASHED,
    QUALITY_FAILED,
)
from .pipeline_operator import PipelineOperator, start_dag_run
from .store_access import StoreAccess

# Seconds. The checks take one; importing Great Expectations takes up to ten on a busy machine.
_CHECKS_TIMEOUT = 900.0


class DataDocsLink(BaseOperatorLink):
    """Button on the task: the Data Docs of this check, served behind Airflow's login."""

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the link; Airflow calls this once, on the worker, when the task has ended.

        Without a result it leads to the list of all runs.
        """
        return build_docs_url(operator.pipeline, getattr(operator, "docs_key", None))


def build_docs_url(pipeline: str, key: str | None) -> str:
    """Return where the plugin serves a page of the Data Docs; without a key, the list of runs."""
    page = key.partition("/quality/docs/")[2] if key else "index.html"
    base_url = conf.get("api", "base_url", fallback="").rstrip("/")
    return f"{base_url}/tidegate/docs/{pipeline}.quality/{page}"


class QualityOperator(PipelineOperator):
    """Runs the quality checks and names what failed.

    The command is `tidegate quality`, or `$TIDEGATE_CHECKS`.

    Args:
        every: seconds between two runs that assets start.
        kwargs: of `PipelineOperator`.
    """

    ui_color = "#efe6c9"
    operator_extra_links = (DataDocsLink(),)

    def __init__(self, *, every: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every = every
        self.docs_key: str | None = None  # for the link, which is made even if the task fails

    def execute(self, context: Any) -> JsonObject:
        """Run the checks.

        Raises:
            QualityFailedError: critical expectations failed; each is named.
            TidegateError: the check itself could not run.
            subprocess.TimeoutExpired: it still ran after 15 minutes.
        """
        access = self.resolve_access()
        # The result says how often the checks run, so that readers know when it is stale.
        interval = {} if self.every is None else {INTERVAL_VARIABLE: str(self.every)}
        command = shlex.split(os.environ.get("TIDEGATE_CHECKS", ""))
        command = command or [sys.executable, "-P", "-m", "tidegate.jobs.cli", "quality"]
        command += [self.spec, "--store", access.url]
        # Without a result, 1 is the exit code of Python itself after an exception.
        code, result = _run_for_document(
            self,
            access,
            command,
            QUALITY_CRASHED,
            bad_news=1,
            timeout=_CHECKS_TIMEOUT,
            settings=interval,
        )
        self.docs_key = str(result["docs"])
        url = build_docs_url(self.pipeline, self.docs_key)
        if code == 1:
            # A failed warning does not fail the run.
            names = [
                f"{check['suite']}.{check['id']}: {check['says']} (seen: {check['observed']})"
                for check in result.get("failed", [])
                if check.get("severity") == "critical"
            ]
            for name in names:
                self.log.error("failed expectation: %s", name)
            raise QUALITY_FAILED(
                pipeline=self.pipeline, count=len(names), names="; ".join(names), url=url
            )
        return {"pipeline": self.pipeline, "verdict": result["verdict"], "docs": url}


def _run_for_document(
    operator: PipelineOperator,
    access: StoreAccess,
    command: Sequence[str],
    crashed: ErrorDefinition,
    *,
    bad_news: int = 0,
    timeout: float | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, JsonObject]:
    """Run a command whose last line is the key of the document that it has written.

    Args:
        operator: its log gets the output, and only its pipeline's documents are read.
        access: the store.
        command: the program and its arguments.
        crashed: the error of a command without a document.
        bad_news: another exit code than 0 of a command that has written one.
        timeout: seconds; None: Airflow's `execution_timeout` still applies.
        settings: variables of the command's environment.

    Returns:
        The exit code, and the document with its `key`.

    Raises:
        TidegateError: as `build_child_error`.
        subprocess.TimeoutExpired: it still ran after `timeout` seconds.
    """
    child = run_child(access, command, timeout=timeout, settings=settings)
    printed = child.stdout.splitlines()
    operator.log.info("%s", "\n".join([*child.stderr.splitlines()[-40:], *printed]))
    key = (printed or [""])[-1].strip()
    is_own = key.startswith(BucketLayout(operator.pipeline).pipeline_prefix)
    if child.returncode not in (0, bad_news) or not is_own:
        raise build_child_error(child, crashed, operator.pipeline, crash_codes=(bad_news,))
    return child.returncode, {**parse_json(access.open().get(key).data), "key": key}


class MaintainOperator(PipelineOperator):
    """Refreshes the index, runs the retention, reads a share of the checkpoints, deletes old logs.

    Args:
        scrub_shares: daily runs until every checkpoint was read once (`count_scrub_shares`).
    """

    ui_color = "#dbe7d3"

    def __init__(self, *, scrub_shares: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scrub_shares = scrub_shares

    def execute(self, context: Any) -> JsonObject:
        """Do all parts in turn; their counts are the task's result.

        Before the first checkpoint there is nothing to do.

        Raises:
            PoisonError: checkpoints are damaged, and condemned now; all parts were done.
            TidegateError: the retention failed; the parts after it were not done.
        """
        catalog = CheckpointCatalog(self.open_log())
        if catalog.log.head().record is None:
            self.log.info("nothing was sealed yet")
            return {"pipeline": self.pipeline}
        catalog.index.refresh()
        crashed = MAINTAIN_CRASHED
        data = run_tidegate(self.resolve_access(), self.pipeline, "gc", self.spec, crashed=crashed)
        retired, deleted = len(data["retired"]), len(data["deleted"])
        before, after = (
            sum(table[when] for table in data["compacted"].values()) for when in ("before", "after")
        )
        self.log.info("retired %s checkpoints, deleted %s files", retired, deleted)
        self.log.info("the tables' %s data files became %s", before, after)
        # After the retention, so that nothing is read that is about to be deleted.
        results = list(self._scrub_checkpoints(catalog))
        note_scrub(catalog.log, SYSTEM_CLOCK.wall_ticks())
        forgotten = delete_old_logs(catalog.log.store, self.pipeline)
        damaged = [r for r in results if r.verdict is CheckpointVerdict.DAMAGED]
        if damaged:
            names = "; ".join(f"{r.checkpoint} ({_format_findings(r)})" for r in damaged)
            raise MAINTAIN_DAMAGED(pipeline=self.pipeline, count=len(damaged), names=names)
        return {
            "pipeline": self.pipeline,
            "retired": retired,
            "deleted": deleted,
            "deleted_bytes": data["deleted_bytes"],
            "data_files_before": before,
            "data_files_after": after,
            "scrubbed": len(results),
            "logs_forgotten": len(forgotten),
        }

    def _scrub_checkpoints(self, catalog: CheckpointCatalog) -> Iterator[Verification]:
        today = SYSTEM_CLOCK.wall_ticks() // SCRUB_EVERY
        chosen = select_for_scrub(catalog.log, self.scrub_shares, today)
        for result in scrub_checkpoints(catalog.log, chosen):
            condemn_if_damaged(catalog.log, result)
            if result.verdict is not CheckpointVerdict.HEALTHY:
                findings = _format_findings(result)
                self.log.warning("%s is %s: %s", result.checkpoint, result.verdict.value, findings)
            yield result


def _format_findings(result: Verification) -> str:
    return "; ".join(f"{f.problem.value}: {f.key}" for f in result.findings[:3])


_DIFFERENCE_KINDS = ("different", "only_stream", "only_batch")


class BackfillOperator(PipelineOperator):
    """Compares the windows of a range with a batch run over the same input.

    Args:
        start: first window start; by default the form's, else the run's data interval.
        end: windows end at this instant or before; as `start`.
        fail: a difference fails the task.
        replace: a difference starts `<p>.splice` with the range's late rows, if there are any.
    """

    ui_color = "#e7dcef"
    template_fields = ("start", "end", "fail", "replace")
    default_templates: ClassVar = {
        "start": "{{ params.start or data_interval_start or '' }}",
        "end": "{{ params.end or data_interval_end or '' }}",
        "fail": "{{ params.fail_on_difference }}",
    }
    start: str
    end: str
    fail: str
    replace: str

    def execute(self, context: Any) -> JsonObject:
        """Run the batch; the comparison is the task's result.

        Raises:
            DagRunTriggerException: the windows differ and are to be replaced; the task succeeds,
                and Airflow starts a run of `<p>.splice`, which asks a person.
            PoisonError: the windows differ, no merge was started, and `fail` says that this is a
                failure.
            ConfigurationError: the range has no start or no end.
            TidegateError: the batch run could not be made.
        """
        if not self.start or not self.end:
            raise BACKFILL_RANGE(pipeline=self.pipeline)
        access = self.resolve_access()
        command = [sys.executable, "-m", "tidegate.jobs.driver.backfill", self.spec]
        command += ["--store", access.url, "--start", str(self.start), "--end", str(self.end)]
        # No time limit: a range may be a year.
        _, comparison = _run_for_document(self, access, command, BACKFILL_CRASHED)
        for name, window in comparison["windows"].items():
            differences = ", ".join(f"{window[kind]} {kind}" for kind in _DIFFERENCE_KINDS)
            open_ = f"{window.get('uncompared', 0)} not compared"
            self.log.info("%s: %s equal, %s, %s", name, window["equal"], differences, open_)
        if not comparison["equal"] and self.replace == "True":
            self._request_merge(context, access, comparison)
        if not comparison["equal"] and self.fail == "True":
            raise BACKFILL_DIFFERENT(
                pipeline=self.pipeline, start=self.start, end=self.end, key=comparison["key"]
            )
        return comparison

    def _request_merge(self, context: Any, access: StoreAccess, comparison: JsonObject) -> None:
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
