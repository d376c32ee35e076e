"""Row rules in the protocol: where their rows are counted, and what `fail` stops."""

from __future__ import annotations

import pytest

from tests.engine.harness import Bench, row, spec_of
from tidegate.errors import PoisonError
from tidegate.jobs.spec.pipeline import PipelineSpec

RULES = {
    "small": {"predicate": "v < 100", "severity": "drop"},
    "positive": {"predicate": "v > 0", "severity": "quarantine"},
    "odd": {"predicate": "v % 2 = 1"},
    "known": {"predicate": "v is not null and v <> 13", "severity": "fail"},
}


def with_rules(rules: dict[str, dict[str, str]]) -> PipelineSpec:
    """The pipeline of the harness, with rules on source a."""
    spec = spec_of()
    raw = spec.model_dump(mode="json", by_alias=True)
    raw["sources"]["a"]["rules"] = rules
    return PipelineSpec.model_validate(raw)


def test_every_row_has_one_place() -> None:
    """Rules come before lateness, and the row equation has a place for each row they remove."""
    bench = Bench(with_rules(RULES))
    engine = bench.engine()
    bench.sources["a"].append(
        row(10), row(10, 200), row(10, -1), row(11, 2), {**row(12), "v": None}
    )
    bench.sources["b"].append(row(10, 200), row(11))
    engine.run_epoch()
    bench.sources["a"].append(row(1, 200), row(1, -1), row(1, 3), row(1, 4))
    engine.run_epoch()
    counters = bench.epochs()[-1].counters
    assert counters.is_conserved()
    assert (counters.read, counters.late, counters.rule_quarantined) == (11, 2, 2)
    assert counters.dropped == {"rule": 3}
    counted = {
        **dict.fromkeys(("late", "late:w", "late_rows", "rule_quarantined"), 2),
        **dict.fromkeys(("rule:positive", "rule:odd", "rule_warned"), 2),
        **dict.fromkeys(("dropped", "dropped:events:rule", "rule:small"), 3),
    }
    assert counters.per_source["a"] | counted == counters.per_source["a"]
    dead = bench.rows("dead_letters")
    assert [letter["reason"] for letter in dead] == ["rule_quarantined"] * 2


def test_fail_names_the_row_and_seals_nothing() -> None:
    """The error names rule, source, epoch and row; the epochs before it stay."""
    bench = Bench(with_rules(RULES))
    engine = bench.engine()
    bench.sources["a"].append(row(10))
    engine.run_epoch()
    bench.sources["a"].append(row(11), row(12, 13))
    with pytest.raises(PoisonError) as error:
        engine.run_epoch()
    assert error.value.code == "row.rule_failed"
    assert error.value.message.startswith("epoch 2 of p: ")
    assert "rule known of source a" in error.value.message
    assert "'v': 13" in error.value.message
    assert [manifest.slot for manifest in bench.epochs()] == [1]
    # With a rule that keeps the row, all rows are read again.
    changed = Bench(
        with_rules({"known": {**RULES["known"], "severity": "quarantine"}}), bench.store
    )
    changed.sources, changed.clock = bench.sources, bench.clock
    changed.engine().run_epoch()
    assert changed.epochs()[-1].counters.read == 3
    assert changed.epochs()[-1].counters.rule_quarantined == 1


def test_manifests_without_rules_keep_their_bytes() -> None:
    """The counts of rules are left out when there are none."""
    bench = Bench(spec_of())
    bench.sources["a"].append(row(10))
    bench.engine().run_epoch()
    assert b"rule" not in bench.epochs()[-1].to_bytes()
