"""Incidents are found, announced once to every receiver, and once when they are over."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from traceback import format_exception
from typing import Any

import pytest
from pydantic import ValidationError
from tests.checkpoints.reporting_driver import bucket
from tests.manual_clock import ManualClock
from tests.servers.alert_receivers import ROUTING_KEY, AlertReceivers, running
from tests.servers.memory_store import MemoryStore

from tidegate.checkpoints import alert_delivery
from tidegate.checkpoints.alert_delivery import Alert, find_alerts, find_usable_alerts
from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.deployed_specs import Deploy, DeployedDocument, FailedDeploy
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import DesiredState, set_desired_state
from tidegate.checkpoints.errors import ALERT_NOT_DELIVERED
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.incidents import (
    INCIDENT_KINDS,
    TEST_KIND,
    Delivery,
    announce_incidents,
    find_incidents,
)
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.pipeline_overview import read_overview
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.operations import AlertSpec

BROKEN = {
    "class": "poison",
    "code": "source.object_changed",
    "message": "inbox/1.csv <changed> & more",
    "kept": "everything sealed so far",
    "advice": "tidegate checkpoints list p",
}
AWAY = {**BROKEN, "class": "transient", "code": "store.unavailable"}


def make_spec(*receivers: str, **alerts: Any) -> JobSpec:
    """A job `p` that announces to these receivers."""
    names = {
        "slack": "env:SLACK_WEBHOOK_URL",
        "pagerduty": "env:PAGERDUTY_KEY",
        "alertmanager": "env:ALERTMANAGER_URL",
    }
    given = {name: names[name] for name in receivers} | alerts
    supervision = {"owner": "shop-team", "alerts": given}
    fields = {"kind": "job", "name": "p", "app": "a.py", "supervision": supervision}
    return JobSpec.model_validate(fields)


def report(store: MemoryStore, state: str, **facts: Any) -> None:
    """Let the driver of `p` report."""
    body = {"state": state, **facts}
    at = SYSTEM_CLOCK.wall_ticks()
    write_status(store, "p", DriverStatus(token=1, driver="d", step="move", at=at, body=body))


def test_a_deployment_s_alerts_are_for_pipelines_without_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a spec count alone; another text is refused by the name of the variable."""
    monkeypatch.setenv("TIDEGATE_ALERTS", '{"pagerduty": "env:KEY"}')
    bare = JobSpec.model_validate({"name": "p", "app": "a.py", "kind": "job"})
    own, given = find_alerts(make_spec("slack")), find_alerts(bare)
    assert own is not None
    assert given is not None
    assert [*own.receivers] == ["slack"]
    assert given.receivers == {"pagerduty": "env:KEY"}
    monkeypatch.setenv("TIDEGATE_ALERTS", "slack")
    assert find_usable_alerts(bare) is None  # a mistake in alerts stops neither data nor a DAG
    monkeypatch.setenv("TIDEGATE_ALERTS", '{"slack": "https://hooks.example/SECRET"}')
    with pytest.raises(ConfigurationError, match="TIDEGATE_ALERTS is not JSON") as raised:
        find_alerts(bare)
    assert "SECRET" not in "".join(format_exception(raised.value))


class Looks:
    """Looks of drivers and sweeps at `p`, on one clock, with one receiver."""

    def __init__(self) -> None:
        self.store = bucket("held")
        set_desired_state(self.store, "p", DesiredState.RUN, who="ann")
        self.clock = ManualClock(wall_ticks=SYSTEM_CLOCK.wall_ticks())
        self.log = SlotLog(self.store, "p")
        self.sent: list[str] = []
        self.fails = False

    def send(self, receiver: str, _: AlertSpec, alert: Alert) -> None:
        """Take a message, or refuse it."""
        if self.fails:
            raise ALERT_NOT_DELIVERED(pipeline="p", receiver=receiver, address="x", cause="500")
        self.sent.append("begin" if alert.until is None else "end")

    def die_while_sending(self) -> None:
        """A look that ends before it notes what it may have sent."""

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            announce_incidents(self.log, make_spec("slack"), clock=self.clock, send=die)

    def look(self, after: float = 0.0, receiver: str = "slack") -> list[Delivery]:
        """Look once, some seconds later."""
        self.clock.advance(after)
        spec = make_spec(receiver)
        return announce_incidents(self.log, spec, clock=self.clock, send=self.send)


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[AlertReceivers]:
    with running() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def test_each_receiver_takes_begin_and_end(receivers: AlertReceivers) -> None:
    """In its provider's schema, with all that a person on call needs."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    spec = make_spec(
        "slack",
        "pagerduty",
        "alertmanager",
        page="https://airflow.example.org/",
        pagerduty_url=f"{receivers.url}/v2/enqueue",
    )
    announce_incidents(looks.log, spec, clock=looks.clock)
    report(looks.store, "running")
    announce_incidents(looks.log, spec, clock=looks.clock)
    looks.clock.advance(121)
    announce_incidents(looks.log, spec, clock=looks.clock)
    assert receivers.refused == []
    by_path: dict[str, list[Any]] = {}
    for path, body in receivers.taken:
        by_path.setdefault(path.split("/")[1], []).append(body)
    slack, pagerduty, alertmanager = by_path["services"], by_path["v2"], by_path["api"]
    assert "*[critical] p: inbox/1.csv &lt;changed&gt; &amp; more" in slack[0]["text"]
    for part in (
        "since: 20",
        "kept: everything sealed so far",
        "page: https://airflow.example.org/tidegate/page?dag=p.stream",
        "next: tidegate checkpoints list p",
        "owner: shop-team",
    ):
        assert part in slack[0]["text"]
    assert "*[over] p: " in slack[1]["text"]
    assert "until: 20" in slack[1]["text"]
    assert [one["event_action"] for one in pagerduty] == ["trigger", "resolve"]
    assert pagerduty[0]["dedup_key"] == pagerduty[1]["dedup_key"]
    assert [one[0]["labels"] for one in alertmanager] == [alertmanager[0][0]["labels"]] * 2
    ends = [one[0]["endsAt"] for one in alertmanager]
    assert ends[1] < ends[0]
    assert [len(slack), len(pagerduty), len(alertmanager)] == [2, 2, 2]


def test_driver_and_sweep_do_not_send_the_same_twice() -> None:
    """A look in the middle of another one's sending, and all later looks, send nothing."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    send = looks.send

    def look_meanwhile(receiver: str, given: AlertSpec, alert: Alert) -> None:
        assert announce_incidents(looks.log, make_spec("slack"), clock=looks.clock, send=send) == []
        send(receiver, given, alert)

    announce_incidents(looks.log, make_spec("slack"), clock=looks.clock, send=look_meanwhile)
    assert looks.look(3600) == []
    assert looks.sent == ["begin"]


def test_a_refused_message_is_sent_by_the_next_look() -> None:
    """Whoever looks next, such as the sweep after a driver that lacks the variable."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.fails = True
    assert [sent.error is None for sent in looks.look()] == [False]
    looks.fails = False
    assert [sent.error for sent in looks.look()] == [None]
    assert looks.sent == ["begin"]


def test_a_look_that_dies_holds_its_message_for_a_minute() -> None:
    """Its claim ends by itself."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.die_while_sending()
    assert looks.look(59) == []
    looks.look(2)
    assert looks.sent == ["begin"]


def test_what_passes_soon_is_not_announced() -> None:
    """A driver that waits for less than five minutes."""
    looks = Looks()
    report(looks.store, "waiting", error=AWAY)
    assert [looks.look(), looks.look(299)] == [[], []]
    report(looks.store, "running")
    looks.look()
    looks.look(120)
    report(looks.store, "waiting", error=AWAY)
    assert [looks.look(), looks.look(299)] == [[], []]
    assert [sent.alert.kind for sent in looks.look(2)] == ["in_trouble"]


def test_what_comes_and_goes_is_announced() -> None:
    """A driver that fails an epoch again and again, and is seen as running between two tries."""
    looks = Looks()
    for _ in range(3):
        report(looks.store, "waiting", error=AWAY)
        assert looks.look(60) == []
        report(looks.store, "running")
        assert looks.look(60) == []
    report(looks.store, "waiting", error=AWAY)
    assert [sent.alert.kind for sent in looks.look(60)] == ["in_trouble"]


def test_what_comes_back_after_a_long_time_without_a_look_is_new() -> None:
    """The sweep may look every ten minutes."""
    looks = Looks()
    report(looks.store, "waiting", error=AWAY)
    looks.look()
    report(looks.store, "running")
    looks.look(10)
    report(looks.store, "waiting", error=AWAY)
    assert looks.look(600) == []


def test_an_incident_that_comes_back_at_once_is_the_same() -> None:
    """A driver that fails again and again is announced once, and once when it stays well."""
    looks = Looks()
    for _ in range(3):
        report(looks.store, "failed", error=BROKEN)
        looks.look(60)
        report(looks.store, "running")
        looks.look(60)
    looks.look(121)
    assert looks.sent == ["begin", "end"]
    report(looks.store, "failed", error=BROKEN)
    looks.look(60)
    assert looks.sent == ["begin", "end", "begin"]


def test_a_new_incident_waits_for_no_old_receiver() -> None:
    """Slack never took the end of the first incident, which the second continues for it."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.look()
    report(looks.store, "running")
    looks.look(60)
    looks.fails = True
    looks.look(121)
    report(looks.store, "failed", error=BROKEN)
    looks.fails = False
    assert looks.look(60) == []
    assert looks.sent == ["begin"]


def test_an_incident_that_passes_while_it_is_announced_ends_with_a_message() -> None:
    """Another look finds the driver well before the first message has arrived."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    send = looks.send

    def recover_meanwhile(receiver: str, given: AlertSpec, alert: Alert) -> None:
        report(looks.store, "running")
        announce_incidents(looks.log, make_spec("slack"), clock=looks.clock, send=send)
        send(receiver, given, alert)

    announce_incidents(looks.log, make_spec("slack"), clock=looks.clock, send=recover_meanwhile)
    looks.look(121)
    assert looks.sent == ["begin", "end"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_a_dying_look_may_have_sent_ends_with_a_message(comes_back: bool) -> None:
    """It sent the first message and ended before it noted that."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.die_while_sending()
    report(looks.store, "running")
    looks.look(10)
    assert looks.look(110) == []
    if comes_back:
        report(looks.store, "failed", error=BROKEN)
        looks.look()
    else:
        looks.look(10)
    assert looks.sent == ["begin" if comes_back else "end"]


def test_the_end_reaches_a_receiver_of_another_process() -> None:
    """The driver has the deployed spec, the sweep the file; waiting ends after a day."""
    looks = Looks()
    for passes in (120, 86_400):
        report(looks.store, "failed", error=BROKEN)
        looks.look(0, "slack")
        looks.look(0, "pagerduty")
        report(looks.store, "running")
        looks.look(0, "slack")
        looks.look(passes, "slack")
        looks.look(10, "slack")
        looks.look(10, "pagerduty")
    assert looks.sent == ["begin", "begin", "end", "end", "begin", "begin", "end"]
    document = json.loads(looks.store.get(BucketLayout("p").alerts_key).data)
    assert document["incidents"] == {}


def test_kinds_of_a_newer_version_are_left_alone() -> None:
    """During an upgrade, drivers and the sweep run different versions."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.look()
    key = BucketLayout("p").alerts_key
    document = json.loads(looks.store.get(key).data)
    newer = document["incidents"]["driver_failed"] | {"arrived": {"alertmanager": "begin"}}
    document["incidents"]["of_tomorrow"] = newer
    looks.store.put(key, json.dumps(document).encode())
    report(looks.store, "running")
    looks.look(60, "alertmanager")
    looks.look(121)
    assert looks.sent == ["begin", "end"]
    assert json.loads(looks.store.get(key).data)["incidents"]["of_tomorrow"] == newer


def test_a_slow_receiver_takes_no_more_than_its_look() -> None:
    """What the look has not begun by then is free for the next one."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    spec, tried = make_spec("slack", "pagerduty"), []

    def time_out(receiver: str, *_: object) -> None:
        tried.append(receiver)
        looks.clock.advance(31)
        raise ALERT_NOT_DELIVERED(pipeline="p", receiver=receiver, address="x", cause="timeout")

    announce_incidents(looks.log, spec, clock=looks.clock, send=time_out)
    assert len(tried) == 1
    announce_incidents(looks.log, spec, clock=looks.clock, send=looks.send)
    assert looks.sent == ["begin", "begin"]


def test_one_pipeline_has_one_key_whatever_its_address(
    receivers: AlertReceivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where the pipeline was moved to; two pipelines differ."""
    url = f"{receivers.url}/v2/enqueue"
    spec = make_spec("pagerduty", "alertmanager", pagerduty_url=url)
    looks, other = Looks(), Looks()
    for one in (looks, other):
        ensure_identity(one.store, "p")
        report(one.store, "failed", error=BROKEN)
        announce_incidents(one.log, spec, clock=one.clock)
    report(looks.store, "running")
    announce_incidents(looks.log, spec, clock=looks.clock)
    looks.clock.advance(121)
    key = BucketLayout("p").identity_key
    identity = looks.store.get(key).data.replace(looks.store.url.encode(), b"s3://elsewhere/p")
    looks.store.put(key, identity)
    monkeypatch.setattr(looks.store, "url", "s3://elsewhere/p")
    announce_incidents(looks.log, spec, clock=looks.clock)
    keys = [body["dedup_key"] for path, body in receivers.taken if path.startswith("/v2")]
    labels = [body[0]["labels"] for path, body in receivers.taken if path.startswith("/api")]
    for begin, foreign, *same in (keys, labels):
        assert begin != foreign
        assert begin == same[-1]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "ReadTimeoutError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nbroken\r\n\r\n", None),
    ],
)
def test_only_the_status_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: bytes | None,
    cause: str | None,
) -> None:
    """A body that never comes is not; and no line of urllib3 holds the hook's path."""
    caplog.set_level(logging.DEBUG)
    looks, held = Looks(), []
    report(looks.store, "failed", error=BROKEN)
    if answer is None:
        monkeypatch.setattr(alert_delivery, "_READ_LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            held.append(connection)
            if answer is not None:
                connection.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/services/T0/B0/hush"
        monkeypatch.setenv("SLACK_WEBHOOK_URL", address)
        (sent,) = announce_incidents(looks.log, make_spec("slack"), clock=looks.clock)
        thread.join(30)
        for connection in held:
            connection.close()
    assert (sent.error is None) == (cause is None)
    assert cause is None or cause in str(sent.error)
    assert "hush" not in caplog.text


def test_alertmanager_is_reminded_while_an_incident_lasts() -> None:
    """It forgets alerts that no one sends again; people get one message of it all the same."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    deliveries = [looks.look(60, "alertmanager") for _ in range(3)]
    assert looks.sent == ["begin"] * 3
    assert [len(one) for one in deliveries] == [1, 0, 0]


def test_a_stop_ends_the_incident() -> None:
    """People know of a pipeline that they have stopped."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    looks.look()
    set_desired_state(looks.store, "p", DesiredState.STOPPED, who="ann")
    looks.look()
    looks.look(121)
    assert looks.sent == ["begin", "end"]
    looks.look()
    assert json.loads(looks.store.get(BucketLayout("p").alerts_key).data)["incidents"] == {}


def test_a_pipeline_that_may_wait_pages_no_one() -> None:
    """`severity: warning`."""
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    spec = make_spec("slack", severity="warning")
    (sent,) = announce_incidents(looks.log, spec, clock=looks.clock, send=looks.send)
    assert sent.alert.severity == "warning"


def test_hooks_are_never_written_or_shown(
    receivers: AlertReceivers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the store, in a log, or in the error of a receiver that is away or refuses."""
    caplog.set_level(logging.DEBUG)
    looks = Looks()
    report(looks.store, "failed", error=BROKEN)
    url = f"{receivers.url}/v2/enqueue"
    spec = make_spec("slack", "pagerduty", pagerduty_url=url)
    receivers.answers = [500, 500]
    refused = announce_incidents(looks.log, spec, clock=looks.clock)
    monkeypatch.setenv("SLACK_WEBHOOK_URL", "http://127.0.0.1:1/services/T0/B0/hush")
    away = announce_incidents(looks.log, spec, clock=looks.clock)
    errors = [one.error for one in (*refused, *away) if one.error]
    shown = [json.dumps(error.as_dict()) for error in errors]
    stored = [looks.store.get(info.key).data.decode() for info in looks.store.list_objects("")]
    assert len(errors) == 3
    assert [
        text for text in (*shown, *stored, caplog.text) if "hush" in text or ROUTING_KEY in text
    ] == []
    assert all("env:" in text for text in shown)


@pytest.mark.parametrize("receiver", ["slack", "pagerduty", "alertmanager"])
def test_a_spec_names_only_the_variable(receiver: str) -> None:
    """An address in a spec would lie in git and in the bucket."""
    with pytest.raises(ValidationError, match="pattern"):
        AlertSpec.model_validate({receiver: "https://hooks.slack.com/services/T0/B0/hush"})


_DEPLOY = Deploy(digest="a" * 64, who="ann", at=1)
_FAILED = DeployedDocument(failed=FailedDeploy(deploy=_DEPLOY, at=1, code="c", message="m"))
_FOUND: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("held", "running", {}, set()),
    ("held", "failed", {"error": BROKEN}, {"driver_failed"}),
    ("free", "failed", {"error": BROKEN}, {"driver_failed"}),
    ("free", "failed", {"error": AWAY}, {"driver_gone"}),
    ("dead", "running", {}, {"driver_gone"}),
    ("free", "finished", {}, set()),
    ("held", "waiting", {"error": AWAY, "why": "trying"}, {"no_progress", "in_trouble"}),
    ("held", "waiting", {"why": "a merge has the next slot"}, {"no_progress"}),
    ("held", "running", {"step_since": 1, "step_limit": 60.0}, {"no_progress"}),
    ("held", "starting", {"step_since": 1, "step_limit": 60.0}, {"no_progress"}),
    ("held", "draining", {"step_since": 1, "step_limit": 60.0}, {"no_progress"}),
    ("held", "starting", {}, set()),
    ("held", "running", {"trouble": AWAY}, {"in_trouble"}),
    ("held", "running", {"unpublished": 21}, {"tables_behind"}),
    ("held", "running", {"silent": {"web": 7}}, {"source_silent"}),
    ("held", "running", {"stale": {"web": 7.0}}, {"source_stale"}),
]


@pytest.mark.parametrize(("lease", "state", "facts", "kinds"), _FOUND)
def test_incidents_of_a_driver(
    lease: str, state: str, facts: dict[str, Any], kinds: set[str]
) -> None:
    """By its lease and what it reports."""
    store = bucket(lease)
    set_desired_state(store, "p", DesiredState.RUN, who="ann")
    report(store, state, **facts)
    found = find_incidents(read_overview(SlotLog(store, "p")), None, DeployedDocument())
    assert {kind for kind, _ in found} == kinds


@pytest.mark.parametrize(
    ("lease", "reported", "kinds"),
    [
        ("none", None, []),
        ("held", None, ["driver_gone"]),
        ("dead", None, ["driver_gone"]),
        ("dead", "running", ["driver_gone"]),
        ("dead", "stopped", []),
        ("free", "stopped", []),
    ],
)
def test_incidents_of_a_driver_without_airflow(
    lease: str, reported: str | None, kinds: list[str]
) -> None:
    """`tidegate run` notes no desired state; a driver may die before its first report."""
    overview = read_overview(SlotLog(bucket(lease, reported), "p"))
    found = find_incidents(overview, None, DeployedDocument())
    assert [kind for kind, _ in found] == kinds


def test_incidents_of_quality_and_deploys() -> None:
    """They need no driver; with those of drivers, they are all kinds that there are."""
    overview = read_overview(SlotLog(bucket("held", "running"), "p"))
    kinds = {kind for *_, own in _FOUND for kind in own}
    for word, expected in (("fail", "quality_failed"), ("warn", "quality_warned"), ("pass", None)):
        verdict = {"verdict": word, "at": "2026-11-29", "checkpoint": "t0-1-abcdef"}
        found = {kind for kind, _ in find_incidents(overview, verdict, _FAILED)}
        assert found == {"deploy_failed", expected} - {None}
        kinds |= found
    assert kinds == INCIDENT_KINDS.keys()
    # A test would end a real incident of the same kind.
    assert TEST_KIND not in kinds


def test_a_copy_announces_nothing() -> None:
    """The pipeline announces its incidents where it runs; one that no driver can read does so too."""
    looks, key = Looks(), BucketLayout("p").identity_key
    ensure_identity(looks.store, "p")
    report(looks.store, "failed", error=BROKEN)
    identity = looks.store.get(key).data
    looks.store.put(key, identity.replace(b"memory://test", b"memory://elsewhere"))
    assert (looks.look(), looks.sent) == ([], [])
    looks.store.put(key, b"no identity")
    looks.look()
    assert looks.sent == ["begin"]
