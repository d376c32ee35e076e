"""`<p>.splice` on a real Airflow.

Of late rows a person decides about a part, which is merged; the rest is rejected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.engine.harness import Bench
from tests.operators.conftest import Cockpit, cockpit_of
from tests.servers.airflow import ApiForTests
from tests.splice.worlds import LATE_ONES, play

from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.splice_requests import OPEN_STATES, SpliceRequest, list_splice_requests
from tidegate.infra.airflow_processes import AirflowApi, AirflowApiError
from tidegate.jobs.spec.loader import load_spec

pytestmark = [pytest.mark.airflow, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SPEC = """\
apiVersion: tidegate/v1
name: mended
sources:
  a: &source
    path: inbox/a/
    schema: {t: timestamp, v: long, kind: string, n: long}
    event_time: t
    lag: "0"
  b: {<<: *source, path: inbox/b/}
windows:
  w: {kind: tumbling, size: 10s, keys: [_source], aggregates: {n: count(*), s: sum(v)}}
splice: {approvers: [olga]}
"""
_SETTLED = 3.0  # seconds after which an answer is safe from the parking of its task
_TAKEN = 60.0  # seconds after which a task that has its answer goes on, on any machine


@pytest.fixture(scope="module")
def cockpit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cockpit]:
    """A pipeline whose rows came late and whose driver has ended."""
    folder = tmp_path_factory.mktemp("splice")
    with cockpit_of(folder, {"mended": SPEC}) as found:
        ensure_identity(found.store, "mended")
        play(
            Bench(load_spec(folder / "dags" / "pipelines" / "mended.yaml"), found.store), LATE_ONES
        )
        found.known("mended.splice")
        yield found


def decide(cockpit: Cockpit, answer: str, request: str = "", **filled: str) -> str:
    """A run of the DAG, answered by olga; its id."""
    run = cockpit.api.trigger_dag("mended.splice", {"request": request} if request else {})
    olga = ApiForTests.of(cockpit.stack, "olga")
    waiting: dict[int, float] = {}

    def ended() -> bool:
        task = cockpit.task("mended", run, "splice", "approve")
        if task["state"] == "awaiting_input":
            since = time.monotonic() - waiting.setdefault(task["try_number"], time.monotonic())
            if since > _SETTLED and not answered(olga, run):
                with suppress(
                    AirflowApiError
                ):  # it was taken, although Airflow said otherwise; or it is asked again
                    olga.answer_question("mended.splice", run, "approve", [answer], filled)
            elif since > _TAKEN and answered(olga, run):
                cockpit.api.clear_task(
                    "mended.splice", run, "approve"
                )  # its task took no notice: a person lets it ask again
        return cockpit.api.get_run("mended.splice", run)["state"] in ("success", "failed")

    cockpit.until(ended, 600, f"end of the run that {answer.lower()}s")
    return run


def answered(api: AirflowApi, run: str) -> bool:
    """Whether Airflow has an answer."""
    path = f"/dags/mended.splice/dagRuns/{run}/taskInstances/approve/-1/hitlDetails"
    return api.request("GET", path)["responded_at"] is not None


def known(cockpit: Cockpit) -> dict[str, SpliceRequest]:
    """The requests in the bucket, by id."""
    return {request.id: request for request in list_splice_requests(cockpit.store, "mended")}


def test_a_part_is_merged_and_the_rest_rejected(cockpit: Cockpit) -> None:
    """Part makes two requests and merges nothing.

    One is approved and merged as promised, the other stays out.
    """
    before = cockpit.head("mended")
    run = decide(cockpit, "Part", part_source="a")
    assert cockpit.api.get_run("mended.splice", run)["state"] == "success", (
        cockpit.api.read_task_log("mended.splice", run, "report")
    )
    states = {
        task: found["state"]
        for task, found in cockpit.api.task_instances("mended.splice", run).items()
    }
    assert states == {"report": "success", "approve": "success", "merge": "skipped"}
    assert cockpit.head("mended") == before
    ours, rest = sorted(
        (request for request in known(cockpit).values() if request.state in OPEN_STATES),
        key=lambda request: request.id,
    )
    assert (ours.id.rpartition("-")[2], rest.id.rpartition("-")[2]) == ("part", "rest")

    run = decide(cockpit, "Approve", ours.id)
    # On SQLite Airflow may lose a question between two writers: a person then asks again.
    if cockpit.task("mended", run, "splice", "approve")["state"] == "failed":
        run = decide(cockpit, "Approve", ours.id)
    assert cockpit.api.get_run("mended.splice", run)["state"] == "success", (
        cockpit.api.task_instances("mended.splice", run)
    )
    assert cockpit.head("mended") == before + 1

    run = decide(cockpit, "Reject", rest.id)
    found = known(cockpit)
    assert (found[ours.id].state, found[ours.id].decided_by) == ("merged", "olga")
    assert (found[rest.id].state, found[rest.id].decided_by) == ("rejected", "olga")
    assert [line["what"] for line in found[ours.id].trail] == [
        "created",
        "reported",
        "approved",
        "merged",
    ]
    assert cockpit.head("mended") == before + 1
