"""Delivers alerts to Slack, PagerDuty and Alertmanager, one HTTP request each.

Each body follows what the provider publishes: Slack's incoming webhooks, PagerDuty's Events API v2
and Alertmanager's API v2. Addresses and keys are secrets: errors name only the variable.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pydantic import ValidationError

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.job_spec import SupervisedSpec
from tidegate.jobs.spec.operations import AlertSpec
from tidegate.jobs.spec.source_options import resolve_environment_value
from tidegate.json_types import JsonObject

from .canonical_json import sha256_of_bytes
from .errors import ALERT_NOT_DELIVERED, ALERTS_MALFORMED

ALERTS_VARIABLE = "TIDEGATE_ALERTS"
"""JSON of the alerts of pipelines whose spec has none."""

_log = logging.getLogger("tidegate.alerts")
_CONNECT_LIMIT, _READ_LIMIT = 3.0, 5.0  # seconds
_LONGEST_SUMMARY = 1024  # characters that PagerDuty takes
# Alertmanager ends an alert by itself that is not sent again by then.
_ALERTMANAGER_KEEPS = timedelta(hours=4)


@dataclass(frozen=True)
class Alert:
    """A message about one incident.

    Attributes:
        store: address of the pipeline's store.
        uid: the identity of the pipeline, whatever the address of its store; empty before its first
            driver.
        kind: of the incident (incident_kinds.toml).
        since: when the incident began, in ticks.
        until: when it ended, in ticks; None: it goes on.
        kept: what is safe.
        next_step: the next command or step.
        page: address of the pipeline's page; None: not known.
    """

    pipeline: str
    store: str
    uid: str
    kind: str
    severity: Literal["critical", "warning"]
    owner: str
    says: str
    since: int
    until: int | None
    kept: str
    next_step: str
    page: str | None

    @property
    def uid_hash(self) -> str:
        """What tells pipelines with the same name apart."""
        return sha256_of_bytes(self.uid.encode())[:12]

    @property
    def title(self) -> str:
        """Pipeline and incident in one line."""
        mark = self.severity if self.until is None else "over"
        return f"[{mark}] {self.pipeline}: {self.says}"

    def describe(self) -> dict[str, str]:
        """Return the further lines, by name."""
        lines = {
            "since": _format_time(self.since),
            "until": "" if self.until is None else _format_time(self.until),
            "kept": self.kept,
            "page": self.page or "",
            "next": "" if self.until is not None else self.next_step,
            "owner": self.owner,
        }
        return {name: text for name, text in lines.items() if text}


def find_alerts(spec: SupervisedSpec) -> AlertSpec | None:
    """Return the alerts of a spec, else those of the deployment; None without either.

    Raises:
        ConfigurationError: those of the deployment are not JSON of alerts.
    """
    given = os.environ.get(ALERTS_VARIABLE)
    if spec.supervision.alerts or not given:
        return spec.supervision.alerts
    try:
        return AlertSpec.model_validate_json(given)
    except ValidationError:
        # The text may hold the address of a hook, and the error of the library shows it.
        raise ALERTS_MALFORMED(variable=ALERTS_VARIABLE) from None


def find_usable_alerts(spec: SupervisedSpec) -> AlertSpec | None:
    """As `find_alerts`, but malformed ones are only logged: alerts stop neither data nor a DAG."""
    mistake = find_alerts_mistake(spec)
    if mistake is not None:
        _log.warning("%s", mistake)
        return None
    return find_alerts(spec)


def find_alerts_mistake(spec: SupervisedSpec) -> ConfigurationError | None:
    """Return why no alerts are sent although the deployment names some; None: they are."""
    try:
        find_alerts(spec)
    except ConfigurationError as error:
        return error
    return None


def send_alert(receiver: str, given: AlertSpec, alert: Alert) -> None:
    """Send an alert to one of the receivers of the spec; its status alone counts as the answer.

    Args:
        receiver: slack, pagerduty or alertmanager.
        given: the spec's alerts.
        alert: the message.

    Raises:
        ConfigurationError: the variable with the address or key is not set.
        TransientError: the receiver did not take it.
    """
    import urllib3  # not at the top: Airflow imports this module for every DAG file that it parses

    reference = given.receivers[receiver]
    secret = resolve_environment_value(f"supervision.alerts.{receiver}", reference, os.environ)
    url, body = _BUILDERS[receiver](secret, alert, given)
    try:
        with _drop_urllib3_lines():
            answer = urllib3.request(
                "POST",
                url,
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(connect=_CONNECT_LIMIT, read=_READ_LIMIT),
                redirect=False,
                retries=False,
                preload_content=False,
            )
            answer.close()
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # The text of the error may hold the address, which lets people post.
        cause = type(error).__name__
        raise ALERT_NOT_DELIVERED(
            pipeline=alert.pipeline, receiver=receiver, address=reference, cause=cause
        ) from None
    if not 200 <= answer.status < 300:
        cause = f"it answered {answer.status}"
        raise ALERT_NOT_DELIVERED(
            pipeline=alert.pipeline, receiver=receiver, address=reference, cause=cause
        )


_sends: ContextVar[bool] = ContextVar("sends", default=False)


@contextmanager
def _drop_urllib3_lines() -> Iterator[None]:
    """Drop what urllib3 logs of this request: its lines hold the path, which lets people post."""
    token = _sends.set(True)
    try:
        yield
    finally:
        _sends.reset(token)


for _name in ("connection", "connectionpool", "poolmanager"):
    logging.getLogger(f"urllib3.{_name}").addFilter(lambda _: not _sends.get())


def _build_slack(address: str, alert: Alert, _: AlertSpec) -> tuple[str, Any]:
    lines = [f"*{_escape_slack(alert.title)}*"]
    lines += [f"{name}: {_escape_slack(text)}" for name, text in alert.describe().items()]
    return address, {"text": "\n".join(lines)}


def _escape_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _build_pagerduty(key: str, alert: Alert, given: AlertSpec) -> tuple[str, Any]:
    body: JsonObject = {
        "routing_key": key,
        "event_action": "trigger" if alert.until is None else "resolve",
        "dedup_key": f"{alert.pipeline}/{alert.kind}/{alert.uid_hash}",
        "payload": {
            "summary": alert.title[:_LONGEST_SUMMARY],
            "source": alert.store,
            "severity": alert.severity,
            "timestamp": _format_time(alert.since),
            "component": alert.pipeline,
            "class": alert.kind,
            "custom_details": alert.describe(),
        },
        "client": "tidegate",
    }
    if alert.page:
        body["client_url"] = alert.page
    return given.pagerduty_url, body


def _build_alertmanager(address: str, alert: Alert, _: AlertSpec) -> tuple[str, Any]:
    end = datetime.now(UTC) + _ALERTMANAGER_KEEPS
    body: JsonObject = {
        "labels": {
            "alertname": f"tidegate_{alert.kind}",
            "pipeline": alert.pipeline,
            "uid": alert.uid_hash,
            "severity": alert.severity,
            "owner": alert.owner,
        },
        "annotations": {"summary": alert.title, "store": alert.store, **alert.describe()},
        "startsAt": _format_time(alert.since),
        "endsAt": end.isoformat() if alert.until is None else _format_time(alert.until),
    }
    if alert.page:
        body["generatorURL"] = alert.page
    return f"{address.rstrip('/')}/api/v2/alerts", [body]


def _format_time(ticks: int) -> str:
    return datetime.fromtimestamp(ticks // 1_000_000, UTC).isoformat()


_BUILDERS: dict[str, Callable[[str, Alert, AlertSpec], tuple[str, Any]]] = {
    "slack": _build_slack,
    "pagerduty": _build_pagerduty,
    "alertmanager": _build_alertmanager,
}
