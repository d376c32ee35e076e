"""A program: Airflow's own API application in one process, on a database of its own, with two
streams; no server, no scheduler.

    python -m tests.operators.api_server FOLDER

Prints what it saw as one line of JSON. `AIRFLOW_HOME` and `TIDEGATE_STORE` come from the
environment.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from airflow.api_fastapi.app import create_app
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.collection import update_dag_parsing_results_in_db
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.dag_processing.processor import _serialize_dags
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import Trigger
from airflow.utils.db import initdb
from airflow.utils.session import create_session
from fastapi.testclient import TestClient
from sqlalchemy import select
from tests.operators.conftest import spec_of

from tidegate.checkpoints.driver_requests import (
    DesiredState,
    list_pending_requests,
    read_desired_state,
    set_desired_state,
)
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.operators.airflow_port.database import AirflowQueries

BUNDLE, FILE = "dags-folder", "tidegate_dags.py"
STREAMS = ("one", "two")


def main(folder: Path) -> dict[str, Any]:
    """Everything that is seen."""
    dags = folder / "dags"
    (dags / "pipelines").mkdir(parents=True)
    shutil.copy(Path(__file__).resolve().parents[2] / "dags" / FILE, dags)
    for name in STREAMS:
        (dags / "pipelines" / f"{name}.yaml").write_text(spec_of(name))
    initdb()
    with create_session() as session:
        DagBundlesManager().sync_bundles_to_db(session=session)  # type: ignore[no-untyped-call]
    return {**broken_files(dags), **marks()}


def parse(dags: Path) -> dict[str, str]:
    """As the DAG processor does it; the import errors."""
    bag = BundleDagBag(
        dag_folder=str(dags / FILE), bundle_path=dags, bundle_name=BUNDLE, load_op_links=False
    )
    found, errors = _serialize_dags(bag, structlog.get_logger())
    errors |= bag.import_errors
    keyed = {(BUNDLE, path): error for path, error in errors.items()}
    with create_session() as session:
        update_dag_parsing_results_in_db(
            BUNDLE, None, found, keyed, 1.0, set(), session, files_parsed={(BUNDLE, FILE), *keyed}
        )
    return errors


def broken_files(dags: Path) -> dict[str, Any]:
    """What the page knows of the streams while a spec or the DAG file itself is broken, and when a
    spec was removed.
    """

    def look() -> dict[str, Any]:
        errors = parse(dags)
        return {
            "errors": len(errors),
            "streams": {row["dag_id"]: row["unread"] for row in AirflowQueries()._query_streams()},
        }

    bad, code = dags / "pipelines" / "bad.yaml", dags / FILE
    good = code.read_text()
    seen: dict[str, Any] = {"well": look()}
    bad.write_text("apiVersion: tidegate/v1\nname: bad\nsauces: {}\n")
    seen["broken spec"] = look()
    with create_session() as session:
        told = session.get(DagModel, "tidegate.broken_specs")
        seen["told"] = told.description if told is not None else None
    bad.unlink()
    code.write_text("# a DAG of airflow\nraise RuntimeError('broken on purpose')\n")
    seen["broken file"] = look()
    code.write_text(good)
    seen["mended"] = look()
    with create_session() as session:
        session.execute(
            DagModel.__table__.update().where(DagModel.dag_id == "two.stream").values(is_stale=True)
        )
    seen["removed"] = {row["dag_id"]: row["unread"] for row in AirflowQueries()._query_streams()}
    parse(dags)
    return seen


def marks() -> dict[str, Any]:
    """What becomes of a stream whose deferred task, or its run, is ended by a person.

    And of a mark of a run long over.
    """
    store = open_store(os.environ["TIDEGATE_STORE"])
    seen: dict[str, Any] = {}
    with TestClient(create_app()) as client:
        client.headers["Authorization"] = (
            f"Bearer {client.get('/auth/token').json()['access_token']}"
        )

        def marked(name: str, path: str, body: dict[str, str]) -> None:
            runs = f"/api/v2/dags/{name}.stream/dagRuns"
            client.post(runs, json={"logical_date": None, "dag_run_id": "r"}).raise_for_status()
            defer(f"{name}.stream")
            set_desired_state(store, name, DesiredState.RUN, who="ann", why="run r")
            lease = Lease.acquire(store, name, ProcessIdentity.this_process())
            client.patch(f"{runs}/r{path}", json=body).raise_for_status()
            until(lambda: list_pending_requests(store, name))
            lease.release()
            seen[name] = [
                read_desired_state(store, name).why,
                [(str(q.kind), q.token) for q in list_pending_requests(store, name)],
            ]

        marked("one", "", {"state": "failed"})
        marked("two", "/taskInstances/stream", {"new_state": "success"})
        set_desired_state(store, "two", DesiredState.RUN, who="ann", why="by hand")
        with create_session() as session:
            run = session.scalars(select(DagRun).where(DagRun.dag_id == "two.stream")).one()
            run.state = "success"
            run.end_date = datetime(2026, 1, 1, tzinfo=UTC)
        client.patch(
            "/api/v2/dags/two.stream/dagRuns/r/taskInstances/stream", json={"new_state": "failed"}
        ).raise_for_status()
        for thread in threading.enumerate():  # what must not happen would happen there
            if thread.name == "mark two.stream":
                thread.join()
        seen["long over"] = read_desired_state(store, "two").why
    return seen


def defer(dag_id: str) -> None:
    """The run is under way, its task sleeps."""
    with create_session() as session:
        session.scalars(select(DagRun).where(DagRun.dag_id == dag_id)).one().state = "running"
        trigger = Trigger("tidegate.operators.trigger.StreamTrigger", {})
        session.add(trigger)
        session.flush()
        task = session.scalars(select(TaskInstance).where(TaskInstance.dag_id == dag_id)).one()
        task.state, task.trigger_id = "deferred", trigger.id


def until(condition: Callable[[], object]) -> None:
    """Wait for a thread."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the mark was not heard")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main(Path(sys.argv[1])))}\n")
