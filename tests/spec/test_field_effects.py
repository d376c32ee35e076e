"""Each field of a spec is read by code and named by a test."""

from __future__ import annotations

from typing import Any

import pytest
from tests.spec.field_effects import list_fields

from tidegate.expectations.suite_files import limit_values, load_suites
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.operations import QualityLimits
from tidegate.jobs.spec.pipeline import PipelineSpec

PIPELINE = {
    "name": "p",
    "sources": {
        "a": {
            "path": "in/a",
            "schema": {"t": "timestamp", "k": "string"},
            "event_time": "t",
            "lag": "1s",
            "barriers": {"kind": "k", "types": ["day"]},
            "rules": {"known": {"predicate": "k is not null"}},
        }
    },
    "windows": {"w": {"kind": "tumbling", "size": "1h", "aggregates": {"n": "count(*)"}}},
    "streams": {"big": {"schema": {"t": "timestamp", "k": "string"}}},
    "pipes": {"big": {"from": "events", "to": "big", "where": "k = 'x'"}},
}
JOB = {"kind": "job", "name": "j", "app": "a.py"}


def test_each_field_has_a_reader_and_a_test() -> None:
    """Otherwise nothing shows that it has an effect."""
    fields = list(list_fields())
    assert len(fields) > 250
    assert [one.name for one in fields if not one.readers] == []
    assert [one.name for one in fields if not one.tests] == []


def read_checks(kind: Any, facts: dict[str, Any], limits: dict[str, Any]) -> list[object]:
    """What all built-in checks compare with."""
    spec = kind.model_validate({**facts, "quality": {"limits": limits}})
    values = limit_values(spec)
    checks = [check for suite in load_suites(spec) for check in suite.checks]
    return [(one.id, one.resolve_kwargs(values), one.says.format(**values)) for one in checks]


@pytest.mark.parametrize("name", QualityLimits.model_fields)
def test_each_limit_of_quality_is_a_number_of_a_check(name: str) -> None:
    """Of a pipeline's, or of a job's."""
    default = QualityLimits.model_fields[name].default
    other = 0.123 if isinstance(default, float) and default < 1 else 7
    changes: list[bool] = []
    for kind, facts in ((PipelineSpec, PIPELINE), (JobSpec, JOB)):
        plain = read_checks(kind, facts, {})
        changed = read_checks(kind, facts, {name: other})
        changes.append(plain != changed)
    assert any(changes)
