"""Row rules in specs: what is refused, where the error points, and what stays as it was."""

from __future__ import annotations

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.source_spec import RowRule

SPEC = """\
apiVersion: tidegate/v1
name: orders
sources:
  web:
    path: inbox/web/
    schema: {placed: timestamp, shop: string, amount: double}
    event_time: placed
    lag: 30s
"""
RULES = """\
    rules:
      known:
        severity: drop
        predicate: shop in ('north', 'south')
      positive:
        predicate: amount > 0
"""


def test_an_unknown_severity_names_the_choices() -> None:
    """A severity that does not exist is refused at its place in the file."""
    text = SPEC + RULES.replace("drop", "ignore")
    with pytest.raises(ConfigurationError, match=r"orders.yaml:11: .*known.severity: .*'fail'"):
        parse_spec(text, where="orders.yaml")


def test_specs_without_rules_keep_their_digest() -> None:
    """An empty section says what no section says, in bytes too."""
    plain = parse_spec(SPEC)
    assert plain.digest() == parse_spec(SPEC + "    rules: {}\n").digest()
    assert "rules" not in plain.canonical_json()
    assert plain.digest() != parse_spec(SPEC + RULES).digest()


def test_only_removing_rules_have_a_reason() -> None:
    """The reason says what became of the row."""
    rules = [
        RowRule.model_validate({"predicate": "a > 0", "severity": severity})
        for severity in ("warn", "drop", "quarantine", "fail")
    ]
    found = [rule.removal_reason for rule in rules]
    assert found == [None, "rule_dropped", "rule_quarantined", "rule_failed"]
