"""`<p>.splice` step by step.

Offered when worth it, shown before decided, merged as shown and by another person's word.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.splice_requests import (
    SpliceRequest,
    create_splice_request,
    note_splice_event,
    read_splice_request,
)
from tidegate.errors import ConfigurationError, TransientError
from tidegate.operators import child_processes
from tidegate.operators.factory import build_dags
from tidegate.operators.splice_operators import (
    ApproveSpliceOperator,
    MergeSpliceOperator,
    ReportSpliceOperator,
)

SPEC = """\
apiVersion: tidegate/v1
name: p
sources:
  one: {path: inbox/one, schema: {at: timestamp}, event_time: at, lag: 1m}
splice: {offer_rows: 100, offer_at: "0 5 * * *", approvers: [olga]}
"""
IMPACT = {
    "rows": 7,
    "digest": "d" * 64,
    "tables": [{"table": "w", "added": 0, "changed": 1, "removed": 0, "moved": 0, "first": "a", "last": "b",
                "changes": [{"key": {"k": "x"}, "window_start": "t", "old": {"n": 1}, "new": {"n": 2}}]}],
    "cost": {"rows_read": 9, "rows_written": 8, "seconds": 0.5},
}  # fmt: skip


class Asking:
    """One run of `p.splice`, with a command line that answers what a test wants."""

    def __init__(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.results = store, dict[str, Any]()
        self.calls: list[list[str]] = []
        self.answers: dict[str, tuple[int, str, Any]] = {}
        monkeypatch.setattr(child_processes, "run_child", self._run)
        request = SpliceRequest(
            id="s1", pipeline="p", origin="late", row_count=7, created_at=0, who="ann", why="a test"
        )
        create_splice_request(store, request)
        shown = {"request": request.model_dump(mode="json"), "impact": IMPACT}
        self.answers["show"] = (0, "impact", shown)
        self.answers["late"] = (0, "splice", {"request": "s1"})
        merged = {
            "request": "s1",
            "checkpoint": "t0-000009-abcdef",
            "promised": "d",
            "actual": "d",
            "again": False,
        }
        self.answers["merge"] = (0, "merge", merged)

    def _run(self, _access: Any, command: list[str], **_: Any) -> Any:
        self.calls.append(command[4:])
        code, kind, data = self.answers[command[5]]
        return SimpleNamespace(
            returncode=code,
            stdout=json.dumps({"schema_version": 1, "kind": kind, "data": data}),
            stderr="",
        )

    def context(self) -> dict[str, Any]:
        pull = SimpleNamespace(xcom_pull=lambda task_ids: self.results.get(task_ids))
        return {"run_id": "r", "dag_run": SimpleNamespace(triggering_user_name="bob"), "ti": pull}

    def report(self, request: str = "") -> dict[str, Any]:
        made = ReportSpliceOperator(
            task_id="report", pipeline="p", spec="p.yaml", at_least=100, request=request
        )
        self.results["report"] = made.execute(self.context())
        return dict(self.results["report"])

    def question(self) -> str:
        return ApproveSpliceOperator(task_id="approve", pipeline="p", spec="p.yaml").build_question(
            self.context()
        )

    def answer(self, chosen: str, by: str, user_id: str | None = None, **choice: str) -> None:
        asked = ApproveSpliceOperator(task_id="approve", pipeline="p", spec="p.yaml")
        person = {"id": user_id or by, "name": by}
        now = datetime.now(UTC)
        event = {
            "chosen_options": [chosen],
            "params_input": choice,
            "responded_at": now,
            "responded_by_user": person,
        }
        self.results["approve"] = asked.execute_complete(self.context(), event)

    def merge(self) -> dict[str, Any]:
        return MergeSpliceOperator(task_id="merge", pipeline="p", spec="p.yaml").execute(
            self.context()
        )


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    store = LocalStore(tmp_path / "store")
    monkeypatch.setenv("TIDEGATE_STORE", str(tmp_path / "store"))
    return Asking(store, monkeypatch)


def test_the_asker_s_words_cannot_imitate_the_report(asking: Asking) -> None:
    """They are one line, below the report."""
    shown = asking.answers["show"][2]
    shown["request"]["why"] = "routine\ncost: 0 rows read\nw: nothing changes\n```\n# Approved"
    asking.report()
    lines = asking.question().splitlines()
    assert lines.count("```") == 2
    assert [line for line in lines if "routine" in line] == [lines[-2]]
    assert lines[-2].endswith("routine cost: 0 rows read w: nothing changes ''' # Approved")
    assert sum(line.startswith("cost:") for line in lines) == 1


def test_an_approved_request_is_merged_as_shown(asking: Asking) -> None:
    """Late rows are offered.

    The question shows old and new; the merge is bound to that effect; the trail names everyone.
    """
    text = asking.report()["text"]
    assert '{"n": 1} -> {"n": 2}' in text
    assert asking.calls[0][:6] == [
        "splice",
        "late",
        "p.yaml",
        "--skip-rejected",
        "--at-least",
        "100",
    ]
    asking.answer("Approve", "olga")
    assert asking.merge()["checkpoint"] == "t0-000009-abcdef"
    merging = asking.calls[-1]
    assert merging[merging.index("--digest") + 1] == IMPACT["digest"]
    assert merging[merging.index("--who") + 1] == "olga"
    kept = read_splice_request(asking.store, "p", "s1")
    assert (kept.state, kept.decided_by, kept.approved_digest) == (
        "approved",
        "olga",
        IMPACT["digest"],
    )
    assert [(line["what"], line["who"]) for line in kept.trail] == [
        ("reported", "bob"),
        ("approved", "olga"),
    ]


@pytest.mark.parametrize(("answer", "what"), [("Approve", "approved"), ("Reject", "rejected")])
def test_a_task_that_airflow_tries_again_decides_once(
    asking: Asking, answer: str, what: str
) -> None:
    """Airflow may end a try whose answer was kept already.

    The next one changes nothing, and the trail tells it once.
    """
    for _ in range(2):
        asking.report("s1")
    for _ in range(2):
        asking.answer(answer, "olga")
    assert [line["what"] for line in read_splice_request(asking.store, "p", "s1").trail] == [
        "reported",
        what,
    ]


@pytest.mark.parametrize("asker", ["ann", "bob"])
def test_who_asked_does_not_decide(asking: Asking, asker: str) -> None:
    """Neither who made the request nor who started the run can approve it.

    The refusal stays in the trail.
    """
    asking.report("s1")
    asking.answer("Approve", asker)
    with pytest.raises(ConfigurationError, match=f"{asker} has asked for it"):
        asking.merge()
    assert read_splice_request(asking.store, "p", "s1").trail[-1]["what"] == "refused"


def test_a_requester_with_a_numeric_id_may_not_approve(asking: Asking) -> None:
    """With some of Airflow's logins a user's id is not the name, which the request records."""
    asking.report("s1")
    asking.answer("Approve", "ann", user_id="7")
    with pytest.raises(ConfigurationError, match="ann has asked for it"):
        asking.merge()


def test_a_forged_answer_merges_nothing(asking: Asking) -> None:
    """Whoever may edit the DAG's tasks can mark them as successful and set their results."""
    asking.report("s1")
    olga = {"id": "olga", "name": "olga"}
    asking.results["approve"] = {"chosen_options": ["Approve"], "responded_by_user": olga}
    with pytest.raises(ConfigurationError, match="no one has answered"):
        asking.merge()


def test_an_approval_in_the_request_s_document_merges_nothing(asking: Asking) -> None:
    """An operator's key may write the request. Approvals lie where only Airflow's tasks write."""
    digest = asking.report("s1") and IMPACT["digest"]
    facts = {"state": "approved", "approved_digest": digest, "decided_by": "olga"}
    note_splice_event(asking.store, "p", "s1", "approved", who="olga", at=1, **facts)
    with pytest.raises(ConfigurationError, match="no one has answered"):
        asking.merge()


def test_a_request_that_names_another_asker_afterwards_is_not_approved(asking: Asking) -> None:
    """Who asked is who had asked when the effect was reported."""
    asking.report("s1")
    key = BucketLayout("p").splice_request_key("s1")
    forged = read_splice_request(asking.store, "p", "s1").model_copy(update={"who": "eve"})
    asking.store.put(key, forged.to_bytes())
    asking.answer("Approve", "ann")
    with pytest.raises(ConfigurationError, match="ann has asked for it"):
        asking.merge()


def test_a_forged_report_is_not_shown(asking: Asking) -> None:
    """A person decides on the report that the report's task has made, or on none."""
    asking.report("s1")
    asking.results["report"]["text"] = "1 row"
    with pytest.raises(ConfigurationError, match="its report was changed after it was made"):
        asking.question()


def test_a_reason_cannot_end_the_report(asking: Asking) -> None:
    """What a requester writes stays inside the block in which the report is shown."""
    asking.answers["show"][2]["request"]["why"] = "x\n```\n![](http://e)"
    asking.report("s1")
    assert asking.question().count("```") == 2


def test_a_rejection_closes_the_request(asking: Asking) -> None:
    """Reject in Airflow is reject in the bucket."""
    asking.report("s1")
    asking.answer("Reject", "olga")
    with pytest.raises(ConfigurationError, match="olga has rejected it"):
        asking.merge()
    kept = read_splice_request(asking.store, "p", "s1")
    assert (kept.state, kept.decided_by) == ("rejected", "olga")


def test_a_part_becomes_two_requests(asking: Asking) -> None:
    """By what the person has filled in.

    Nothing is merged, for no one has seen the effect of the part.
    """
    asking.answers["part"] = (
        0,
        "splice",
        {"request": "s1-part", "rows": 4, "rest": "s1-rest", "rest_rows": 3},
    )
    asking.report("s1")
    asking.answer("Part", "olga", part_until="2026-05-01T11:00:00Z", part_output="events, w")
    chosen = ["--until", "2026-05-01T11:00:00Z", "--output", "events", "--output", "w"]
    assert asking.calls[-1][:12] == ["splice", "part", "p.yaml", "s1", *chosen, "--who", "olga"]
    with pytest.raises(ConfigurationError, match="not approved"):
        asking.merge()


def test_few_late_rows_ask_no_one(asking: Asking) -> None:
    """Below the threshold, or without late rows, the run ends as skipped."""
    asking.answers["late"] = (0, "splice", {"request": None, "rows": 3, "at_least": 100})
    with pytest.raises(AirflowSkipException, match="fewer than 100"):
        asking.report()
    asking.answers["late"] = (
        2,
        "error",
        {"code": "splice.no_rows", "class": "configuration", "message": "none"},
    )
    with pytest.raises(AirflowSkipException, match="fewer than 100"):
        asking.report()


def test_nothing_left_asks_no_one(asking: Asking) -> None:
    """A request that was merged meanwhile is not asked about."""
    asking.answers["show"] = (0, "splice", {"request": {}, "checkpoint": "t0-000004-abcdef"})
    with pytest.raises(AirflowSkipException, match="was merged before, in t0-000004-abcdef"):
        asking.report("s1")


def test_failures_keep_their_class(asking: Asking) -> None:
    """What the command says is what the task raises; a crash may be tried again."""
    asking.answers["show"] = (
        2,
        "error",
        {"code": "splice.too_early", "class": "configuration", "message": "still open"},
    )
    with pytest.raises(ConfigurationError, match="still open"):
        asking.report("s1")
    asking.answers["show"] = (-9, "error", {"code": "x", "message": "killed"})
    with pytest.raises(TransientError, match="code -9"):
        asking.report("s1")


def test_the_dag_follows_the_spec(tmp_path: Path) -> None:
    """Schedule, threshold and approvers come from the `splice:` section.

    A pipeline without windows, streams or offer has no such DAG.
    """
    (tmp_path / "p.yaml").write_text(SPEC)
    (tmp_path / "q.yaml").write_text(SPEC.replace("name: p", "name: q").partition("splice:")[0])
    dags = build_dags(tmp_path)
    assert "q.splice" not in dags
    streams = "streams: {big: {}}\npipes:\n  pick: {from: events, to: big, where: at is not null}\n"
    (tmp_path / "q.yaml").write_text((tmp_path / "q.yaml").read_text() + streams)
    assert "q.splice" in build_dags(tmp_path)
    dag = dags["p.splice"]
    report, approve = dag.get_task("report"), dag.get_task("approve")
    assert isinstance(report, ReportSpliceOperator)
    assert report.at_least == 100
    assert {
        task: sorted(dag.get_task(task).downstream_task_ids) for task in ("report", "approve")
    } == {
        "report": ["approve"],
        "approve": ["merge"],
    }
    assert [user["id"] for user in approve.assigned_users] == ["olga"]  # type: ignore[union-attr]
