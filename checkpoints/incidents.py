"""Incidents of a pipeline: found in its bucket, and announced once when they begin and end.

The driver and Airflow's sweep both look. `alerts.json` says which incidents there are and which
receivers have which message, so they do not announce the same twice. A process claims a message
just before it sends it, and notes that it arrived. If it ends in between, or the receiver does not
take the message, another look sends it after `_CLAIM_TICKS`. So a message arrives at least once: it
is repeated if a process ends right after sending it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final, Literal

from pydantic import Field

from tidegate.errors import PoisonError, TidegateError
from tidegate.jobs.spec.event_time_options import OmittedIfNone
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.operations import AlertSpec
from tidegate.json_types import JsonObject, JsonView, read_data_file
from tidegate.secret_masks import mask_address
from tidegate.time_units import format_duration, parse_duration

from .alert_delivery import Alert, find_usable_alerts, send_alert
from .bucket_layout import BucketLayout, generate_attempt_id
from .deployed_specs import DeployedDocument, read_deployed
from .driver_requests import DesiredState
from .host_clock import SYSTEM_CLOCK, Clock
from .illness_record import read_verdict
from .pipeline_identity import is_copied_store, read_identity
from .pipeline_overview import (
    FINAL_STATES,
    PipelineOverview,
    PipelineState,
    needs_person,
    read_overview,
)
from .record_models import BucketRecord
from .shared_documents import SharedDocument, change_document
from .slot_log import SlotLog

LOOK_EVERY: Final = 60.0  # seconds between two looks of a driver
# Ticks. A driver that fails again and again within this time is one incident.
_OVER_AFTER = 120_000_000
_FORGOTTEN_AFTER = 86_400_000_000  # ticks; by then a receiver that no process names is gone
_CLAIM_TICKS = 60_000_000  # longer than a receiver may take to answer
_SENDING_LIMIT = 30.0  # seconds after which a look begins no other message
BACKLOG_EPOCHS: Final = 20
"""Sealed epochs that the tables may lack; the driver itself waits at `outputs.max_unpublished`."""

INCIDENT_KINDS: Final[Mapping[str, Mapping[str, str]]] = read_data_file(
    __package__, "incident_kinds.toml"
)
"""Each kind of incident by its name; the file explains the fields."""
TEST_KIND: Final = "test"
"""The kind of a message that tries a receiver. No incident has it, so a test ends none."""


@dataclass(frozen=True)
class Finding:
    """What a look has found.

    Attributes:
        says: what happened, in a sentence.
        since: ticks; None: since this look.
        kept: what is safe.
        next_step: the next command; None: that of the kind.
    """

    says: str
    since: int | None = None
    kept: str | None = None
    next_step: str | None = None


Message = Literal["begin", "end"]


class Claim(BucketRecord):
    """The look that sends a message, and the ticks from which another one may send it."""

    look: str
    message: Message
    until: int


class Incident(BucketRecord):
    """An incident that is not over, or whose end a receiver does not have yet.

    Attributes:
        uid: of the pipeline when it began; a message about its end has to have the same.
        gone_since: ticks since which no look has found it.
        arrived: receiver -> the newest message that it has.
        claims: receiver -> who sends it a message now.
    """

    says: str
    since: int
    kept: str
    next_step: str
    uid: str = ""
    gone_since: OmittedIfNone[int] = None
    arrived: dict[str, Message] = Field(default_factory=dict)
    claims: dict[str, Claim] = Field(default_factory=dict)


class AlertDocument(SharedDocument):
    """The content of `alerts.json`: kind -> its incident."""

    incidents: dict[str, Incident] = Field(default_factory=dict)


@dataclass(frozen=True)
class Delivery:
    """A message that was sent; `error` says why it did not arrive."""

    alert: Alert
    receiver: str
    error: TidegateError | None = None


def announce_incidents(
    log: SlotLog,
    spec: SupervisedSpec,
    *,
    clock: Clock = SYSTEM_CLOCK,
    send: Callable[[str, AlertSpec, Alert], None] = send_alert,
) -> list[Delivery]:
    """Look at a pipeline, and send what its receivers do not have yet; return what was sent.

    Args:
        log: its log.
        spec: names the receivers. Without any, nothing is read or sent; nor of a copy.
        clock: for ages and claims.
        send: sends an alert to a receiver.
    """
    alerts = find_usable_alerts(spec)
    if alerts is None or _is_copy(log):
        return []
    receivers = [*alerts.receivers]
    key, look = BucketLayout(spec.name).alerts_key, generate_attempt_id()
    change = partial(change_document, log.store, key, AlertDocument())
    findings = read_findings(log)
    uid = _read_uid(log) if findings else ""

    note = partial(_note_findings, spec.name, uid, findings, receivers, clock.wall_ticks())
    incidents = change(note).incidents
    deliveries = []
    begun = clock.monotonic()
    for kind, receiver in product(INCIDENT_KINDS, receivers):
        if clock.monotonic() - begun >= _SENDING_LIMIT:
            break
        incident, now = incidents.get(kind), clock.wall_ticks()
        is_due = _choose_message(kind, incident, receiver, now) is not None
        if is_due:
            claimed = change(partial(_claim_message, kind, receiver, look, now))
            incident = _find_claimed(claimed, kind, receiver, look)
        elif not _needs_reminder(receiver, incident):
            incident = None
        if incident is None:
            continue
        error = None
        alert = build_alert(log.store.url, spec, kind, incident)
        try:
            send(receiver, alerts, alert)
        except TidegateError as failure:
            error = failure
        if is_due or error is not None:
            deliveries.append(Delivery(alert, receiver, error))
        if is_due:
            change(partial(_note_outcome, kind, receiver, look, arrived=error is None))
    return deliveries


def _read_uid(log: SlotLog) -> str:
    """The pipeline's uid; empty where it has no identity that can be read."""
    with suppress(PoisonError):
        return read_identity(log.store, log.pipeline) or ""
    return ""


def _is_copy(log: SlotLog) -> bool:
    """Whether the pipeline runs at another address, where its incidents are announced."""
    # An identity that cannot be read keeps drivers from running, which has to be announced.
    with suppress(PoisonError):
        return is_copied_store(log.store, log.pipeline)
    return False


def _note_findings(
    pipeline: str,
    uid: str,
    findings: Mapping[str, Finding],
    receivers: Sequence[str],
    now: int,
    before: AlertDocument,
) -> AlertDocument:
    """Note what there is; kinds of a newer version are left to it."""
    foreign, kept = dict[str, Incident](), dict[str, Incident]()
    for kind, incident in before.incidents.items():
        if kind not in INCIDENT_KINDS:
            foreign[kind] = incident
        elif not _is_forgotten(incident, receivers, now):
            kept[kind] = incident
    merged = _merge_findings(pipeline, uid, kept, findings, now)
    return before.model_copy(update={"incidents": foreign | merged})


def _merge_findings(
    pipeline: str,
    uid: str,
    before: Mapping[str, Incident],
    findings: Mapping[str, Finding],
    now: int,
) -> dict[str, Incident]:
    """The incidents after a look; texts and time stay those of the look that found it first."""
    merged = {
        kind: incident
        if kind in findings or incident.gone_since is not None
        else incident.model_copy(update={"gone_since": now})
        for kind, incident in before.items()
    }
    for kind, finding in findings.items():
        there = merged.get(kind)
        if there is not None and "end" not in there.arrived.values():
            merged[kind] = there.model_copy(update={"gone_since": None})
            continue
        arrived = there.arrived if there else {}
        merged[kind] = Incident(
            says=finding.says,
            # The clock of the host that reported it may be ahead.
            since=min(finding.since or now, now),
            kept=finding.kept or "everything sealed so far",
            next_step=finding.next_step or INCIDENT_KINDS[kind]["next"].format(pipeline=pipeline),
            uid=uid,
            # For a receiver that never took the end of the old incident, this one continues it.
            arrived={one: "begin" for one, has in arrived.items() if has == "begin"},
            claims=there.claims if there else {},
        )
    return merged


def _is_forgotten(incident: Incident, receivers: Sequence[str], now: int) -> bool:
    """Whether it is over, and no receiver waits for that message or gets one just now.

    An incident that no receiver knows is kept as long: one that comes and goes is due at last. The
    driver and the sweep may have different receivers: those of the other one are kept for a day.
    """
    if incident.gone_since is None or now - incident.gone_since < _OVER_AFTER:
        return False
    is_old = now - incident.gone_since >= _FORGOTTEN_AFTER
    known = {*incident.arrived, *incident.claims}
    waits = any(
        _has_begin(incident, one, now) and (one in receivers or not is_old) for one in known
    )
    gets = any(claim.until > now for claim in incident.claims.values())
    return not waits and not gets


def _has_begin(incident: Incident, receiver: str, now: int) -> bool:
    """Whether the receiver has, or may have, the first message and not the last one.

    A process that ended before it noted the outcome may have sent the first message.
    """
    arrived, claim = incident.arrived.get(receiver), incident.claims.get(receiver)
    may_have = claim is not None and claim.message == "begin" and claim.until <= now
    return arrived == "begin" or (arrived is None and may_have)


def _choose_message(
    kind: str, incident: Incident | None, receiver: str, now: int
) -> Message | None:
    """The message that is due to the receiver and that no one sends just now."""
    if incident is None:
        return None
    claim = incident.claims.get(receiver)
    if claim is not None and claim.until > now:
        return None
    if incident.gone_since is None:
        is_due = now - incident.since >= parse_duration(INCIDENT_KINDS[kind]["after"])
        return "begin" if is_due and receiver not in incident.arrived else None
    is_due = now - incident.gone_since >= _OVER_AFTER
    return "end" if is_due and _has_begin(incident, receiver, now) else None


def _claim_message(
    kind: str, receiver: str, look: str, now: int, before: AlertDocument
) -> AlertDocument:
    """Claim what is due for this look."""
    incident = before.incidents.get(kind)
    message = _choose_message(kind, incident, receiver, now)
    if incident is None or message is None:
        return before
    claim = Claim(look=look, message=message, until=now + _CLAIM_TICKS)
    claimed = incident.model_copy(update={"claims": {**incident.claims, receiver: claim}})
    return before.model_copy(update={"incidents": {**before.incidents, kind: claimed}})


def _find_claimed(document: AlertDocument, kind: str, receiver: str, look: str) -> Incident | None:
    """The incident if this look has the claim; None if another one was faster."""
    incident = document.incidents.get(kind)
    claim = incident.claims.get(receiver) if incident else None
    return incident if claim is not None and claim.look == look else None


def _needs_reminder(receiver: str, incident: Incident | None) -> bool:
    """Whether the receiver forgets an alert that is not sent again."""
    if incident is None:
        return False
    is_open = incident.gone_since is None and incident.arrived.get(receiver) == "begin"
    return receiver == "alertmanager" and is_open


def _note_outcome(
    kind: str, receiver: str, look: str, before: AlertDocument, *, arrived: bool
) -> AlertDocument:
    """Free what this look has claimed; if the message did not arrive, the next look sends it."""
    incident = before.incidents.get(kind)
    claim = incident.claims.get(receiver) if incident else None
    if incident is None or claim is None or claim.look != look:
        return before
    claims = {one: claim for one, claim in incident.claims.items() if one != receiver}
    message = {receiver: claim.message} if arrived else {}
    change = {"claims": claims, "arrived": {**incident.arrived, **message}}
    changed = {kind: incident.model_copy(update=change)}
    return before.model_copy(update={"incidents": {**before.incidents, **changed}})


def build_alert(store: str, spec: SupervisedSpec, kind: str, incident: Incident) -> Alert:
    """Return the message about an incident, which has begun, or is over.

    Args:
        store: address of the pipeline's store.
        spec: says who owns the pipeline, how severe its incidents are, and where its page is.
        kind: of the incident; or `TEST_KIND`.
        incident: the incident.
    """
    alerts = find_usable_alerts(spec) or AlertSpec()
    severity = "critical" if kind == TEST_KIND else INCIDENT_KINDS[kind]["severity"]
    page = alerts.page and f"{alerts.page.rstrip('/')}/tidegate/page?dag={spec.name}.stream"
    return Alert(
        pipeline=spec.name,
        store=mask_address(store),
        uid=incident.uid,
        kind=kind,
        severity="critical" if severity == alerts.severity == "critical" else "warning",
        owner=spec.supervision.owner,
        says=incident.says,
        since=incident.since,
        until=incident.gone_since,
        kept=incident.kept,
        next_step=incident.next_step,
        page=page,
    )


def read_findings(log: SlotLog) -> dict[str, Finding]:
    """Return the kinds of incidents that a pipeline has now; eight requests."""
    overview = read_overview(log)
    verdict = read_verdict(
        log.store,
        log.pipeline,
        sealed_at=overview.newest.created_at if overview.newest else None,
        now=overview.driver.read_at,
    )
    deployed = read_deployed(log.store, log.pipeline)
    return dict(find_incidents(overview, verdict, deployed))


def find_incidents(
    overview: PipelineOverview,
    verdict: JsonObject | None,
    deployed: DeployedDocument,
) -> Iterator[tuple[str, Finding]]:
    """Yield the kinds of incidents in what was read; none while people want the pipeline stopped.

    Args:
        overview: of the pipeline.
        verdict: of the newest quality run, as `read_verdict` returns it.
        deployed: what is deployed.
    """
    if overview.desired.keeps_drivers_away:
        return
    yield from _find_driver_incidents(overview)
    if deployed.failed is not None:
        failed = deployed.failed
        says = f"the deploy by {failed.deploy.who} failed: {failed.message}"
        yield "deploy_failed", Finding(says, failed.at)
    judged = verdict["verdict"] if verdict else None
    if verdict and judged in ("fail", "warn"):
        kind = "quality_failed" if judged == "fail" else "quality_warned"
        says = f"the quality run of {verdict['at']} judged {verdict['checkpoint']} as {kind[8:]}"
        yield kind, Finding(says)


_REPORTING_STATES = frozenset(
    {
        PipelineState.STARTING,
        PipelineState.RUNNING,
        PipelineState.WAITING,
        PipelineState.DRAINING,
    }
)


def _find_driver_incidents(overview: PipelineOverview) -> Iterator[tuple[str, Finding]]:
    driver = overview.driver
    facts, reported, report = driver.facts, driver.reported_state, driver.report
    error = facts.get("error") or {}
    # Its lease may not be free yet: the driver itself announces how it ends.
    heard = report.at if report else 0
    if reported is PipelineState.FAILED and needs_person(error):
        yield "driver_failed", _describe_error(error, heard)
        return
    # `tidegate run` notes no wish; a driver that ends by itself says so, and gives the lease back.
    is_killed = driver.lease is not None and driver.lease.holder is not None
    is_killed = is_killed and reported not in FINAL_STATES
    is_wanted = overview.desired.state is DesiredState.RUN or is_killed
    if driver.lease_expired and is_wanted and reported is not PipelineState.FINISHED:
        why = f" ({error['message']})" if error else ""
        says = f"it should run, and no driver runs{why}"
        yield "driver_gone", Finding(says, max(heard, overview.desired.at))
    elif overview.state is PipelineState.SILENT:
        yield "driver_gone", Finding("its driver does not report any more", heard)
    elif overview.state is PipelineState.LEASED:
        yield "driver_gone", Finding("a driver has begun, and has not reported yet")
    elif report is not None and overview.state in _REPORTING_STATES:
        yield from _find_hindrances(facts, report.step, driver.read_at)


def _find_hindrances(facts: JsonView, step: str, now: int) -> Iterator[tuple[str, Finding]]:
    """Yield what keeps a driver that runs from its work."""
    waits = facts.get("state") == PipelineState.WAITING
    passed = now - (facts.get("step_since") or now)  # ticks
    if waits:
        yield "no_progress", Finding(f"the driver waits: {facts.get('why')}")
    elif passed > (facts.get("step_limit") or 0) * 1e6:
        says = f"the step {step} has taken {format_duration(passed)}, longer than it may"
        yield "no_progress", Finding(says, now - passed)
    trouble = facts.get("trouble") or (facts.get("error") if waits else None)
    if trouble:
        yield "in_trouble", _describe_error(trouble, None)
    if (facts.get("unpublished") or 0) > BACKLOG_EPOCHS:
        says = f"{facts['unpublished']} sealed epochs are not in the tables or sinks yet"
        yield "tables_behind", Finding(says)
    if silent := facts.get("silent"):
        yield "source_silent", Finding(f"no row from {', '.join(sorted(silent))}")
    if stale := facts.get("stale"):
        yield "source_stale", Finding(f"rows of {', '.join(sorted(stale))} are visible too late")


def _describe_error(error: JsonView, since: int | None) -> Finding:
    says = f"{error.get('message')} ({error.get('code')})"
    return Finding(says, since, error.get("kept"), error.get("advice"))
