"""The dashboard and the alerts speak of metrics that exist."""

from __future__ import annotations

import json
import re

import pytest
from ruamel.yaml import YAML
from tests.infra.deploy import DEPLOY

from tidegate.jobs.driver.metrics import NAMES

_METRIC = re.compile(r"tidegate_[a-z_]+")
_COUNTERS = {"epochs", "epochs.lost", "rows", "rows.late", "windows.emitted", "barriers"}
_SECONDS = {"frontier.lag", "member.frontier.lag", "checkpoint.age"}


def prometheus_names() -> set[str]:
    """The names as an OTLP-receiving Prometheus writes them."""
    found = set()
    for name in NAMES:
        short, flat = name.removeprefix("tidegate."), name.replace(".", "_")
        if short.endswith("duration"):
            found |= {f"{flat}_seconds_{part}" for part in ("bucket", "sum", "count")}
        else:
            found.add(flat + ("_total" if short in _COUNTERS else "_seconds" if short in _SECONDS else ""))
    return found


def dashboard_queries() -> list[str]:
    """Every query of the dashboard."""
    panels = json.loads((DEPLOY / "grafana" / "tidegate.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_rules() -> list[dict[str, str]]:
    """Every alert."""
    return list(YAML(typ="safe").load(DEPLOY / "alerts.yaml")["groups"][0]["rules"])


def test_every_metric_is_shown() -> None:
    """The dashboard asks for metrics that the driver has, and shows each of them."""
    asked = {name for query in dashboard_queries() for name in _METRIC.findall(query)}
    assert asked <= prometheus_names()
    assert {n for n in prometheus_names() if not n.endswith(("_sum", "_count", "_bucket"))} <= asked


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_alerts_follow_guarantees(rule: dict[str, dict[str, str]]) -> None:
    """An alert asks for metrics that exist, names the guarantee it watches and what to do."""
    assert set(_METRIC.findall(str(rule["expr"]))) <= prometheus_names()
    assert rule["annotations"]["guarantee"]
    assert "tidegate " in rule["annotations"]["action"] or "Bring" in rule["annotations"]["action"]
