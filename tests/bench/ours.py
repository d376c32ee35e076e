"""tidegate on generated files: the whole driver, from lease to published tables, in one process.

``python -m tests.bench.ours JOB INPUT OUT [--jvm quick] [--where CONDITION]`` prints one JSON
line. ``seconds`` counts from a warm session, with its Python workers, until the driver has drained
and its session stopped, so manifests, checksums, the Iceberg tables and the late table are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench.generate import SOURCES
from tests.bench.meter import cpu_seconds, peak_megabytes, since_start
from tidegate.jobs.driver.epoch_loop import EndConditions
from tidegate.jobs.driver.log_output import configure_logs
from tidegate.jobs.driver.pipeline_run import RunOptions, run_pipeline
from tidegate.jobs.engine.epoch_engine import EpochReport
from tidegate.jobs.spec.pipeline import PipelineSpec

_PATIENCE: Final = 60.0  # seconds without a row; then rows are missing, and the check will say so
_SCHEMA: Final = {
    "source": "int",
    "seq": "long",
    "event_time": "timestamp",
    "key": "int",
    "value": "double",
}
_AGGREGATES: Final = {"n": "count(*)", "s": "sum(value)"}
_WINDOWS: Final = {
    "per_key": {"kind": "tumbling", "size": "10s", "keys": ["key"], "aggregates": _AGGREGATES}
}
JOBS: Final[dict[str, dict[str, Any]]] = {
    "windows": {
        "windows": _WINDOWS,
        "release": {"mode": "pass_through"},
        "outputs": {"events": False},
    },
    "order": {"release": {"mode": "ordered"}},
    "sliding": {
        "windows": {
            "per_key": {**_WINDOWS["per_key"], "kind": "sliding", "size": "60s", "slide": "10s"}
        },
        "release": {"mode": "pass_through"},
        "outputs": {"events": False},
    },
    "sessions": {
        "windows": {
            "per_key": {"kind": "session", "gap": "1s", "keys": ["key"], "aggregates": _AGGREGATES}
        },
        "release": {"mode": "pass_through"},
        "outputs": {"events": False},
    },
    "pass": {"release": {"mode": "pass_through"}},
    "keys": {
        "windows": {"per_key": {**_WINDOWS["per_key"], "lateness": "3m"}},
        "release": {"mode": "pass_through"},
        "outputs": {"events": False},
    },
    "default": {"windows": _WINDOWS, "release": {"mode": "pass_through"}},
    "both": {"windows": _WINDOWS, "release": {"mode": "ordered"}},
}


def bench_spec(job: str, spark: dict[str, Any], where: str | None = None) -> PipelineSpec:
    """The pipeline of a job over the generated files in its store's inbox.

    `where` is a condition on the rows of each source.
    """
    source: dict[str, Any] = {
        "schema": _SCHEMA,
        "event_time": "event_time",
        "lag": "10s",
        "limits": {"objects": 1},
        "bounded": True,
    }
    if where is not None:
        source["where"] = where
    sources = {f"s{n}": {"path": f"inbox/s{n}", **source} for n in range(SOURCES)}
    fields = {"name": f"bench_{job}", "sources": sources, "spark": {"driver_memory": "4g", **spark}}
    return PipelineSpec.model_validate({**fields, **JOBS[job]})


def measure(spec: PipelineSpec, source: Path, out: Path) -> dict[str, Any]:
    """Run to the end of the input files; what it took."""
    shutil.copytree(source, out / "inbox", copy_function=os.link)  # the same files, below the store
    return run(spec, out)


def run(
    spec: PipelineSpec,
    out: Path,
    *,
    rows: int | None = None,
    on_epoch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run until the input ends or, asked to drain, until `rows` rows are sealed; what it took.

    `on_epoch` is called after each epoch with rows.
    """
    from tidegate.jobs.spark.python_tasks import start_workers
    from tidegate.jobs.spark.spark_session import open_session

    session = open_session(spec)
    session.range(10).count()
    start_workers(session)
    found: dict[str, Any] = {"epochs": [], "timings": []}

    def note(report: EpochReport, seconds: float) -> None:
        if report.manifest is not None:
            found.setdefault("first_seal", round(since_start(), 2))
            found["epochs"].append(round(seconds, 3))
            found["timings"].append(report.manifest.timings)
            found["rows"] = report.manifest.counters.read
            found["expired"] = sum(
                own.get("expired:per_key", 0)
                for own in report.manifest.counters.per_source.values()
            )
            on_epoch()
            if found["rows"] == rows:
                os.kill(os.getpid(), signal.SIGTERM)

    begun, spent = time.monotonic(), cpu_seconds()
    until = EndConditions() if rows is None else EndConditions(idle=_PATIENCE)
    code = run_pipeline(
        spec, RunOptions(store_url=str(out), until=until, on_epoch=_metered(note, found, spent))
    )
    return {"seconds": round(time.monotonic() - begun, 2), "code": code, **found}


def _metered(note: Any, found: dict[str, Any], spent: float) -> Any:
    """Processor time up to the newest epoch.

    After the run the JVM is gone, and its time with it.
    """

    def metered(report: EpochReport, seconds: float) -> None:
        note(report, seconds)
        found.update(cpu=round(cpu_seconds() - spent, 2), peak_mb=peak_megabytes())

    return metered


def main() -> None:
    """Run one job to its end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jvm", choices=["auto", "quick", "throughput"], default="auto")
    parser.add_argument("--where", help="a condition on the rows, in Spark SQL")
    parser.add_argument("--event-log", type=Path, help="write Spark's event log here")
    given = parser.parse_args()
    log = (
        {"spark.eventLog.enabled": "true", "spark.eventLog.dir": given.event_log.resolve().as_uri()}
        if given.event_log
        else {}
    )
    configure_logs(json=False)
    with contextlib.redirect_stdout(sys.stderr):
        spec = bench_spec(given.job, {"jvm": given.jvm, "conf": log}, given.where)
        found = measure(spec, given.source, given.out)
    print(json.dumps(found))
    sys.exit(found["code"])


if __name__ == "__main__":
    main()
