"""Every field of every spec has a rule in the one table of changes."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tidegate.jobs.spec.field_rules import (
    FIELDS,
    RULES,
    RuleCondition,
    find_field_rule,
    list_spec_fields,
)
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import NON_DATA_SECTIONS, PipelineSpec

TABLES = {PipelineSpec: "pipeline", JobSpec: "job"}


@pytest.mark.parametrize("model", TABLES)
def test_every_field_has_a_rule(model: type[BaseModel]) -> None:
    """A new field fails here until someone has thought about the state that it meets."""
    listed = FIELDS[model]
    without = [names[-1] for names in list_spec_fields(model) if not listed.keys() & {*names}]
    assert not without, (
        f"no rule for: {', '.join(without)}. Say what becomes of the state when the field changes:"
        " in jobs/spec/spec_changes.toml, add under"
        f" [fields.{TABLES[model]}] a line such as\n"
        + "\n".join(f'    "{name}" = "next_epoch"' for name in without)
        + "\nThe rules are above it in the file: next_epoch and not_compared keep the state,"
        " the others refuse. If state is laid out by the field, choose or add a rule that refuses,"
        " add a case to tests/spec/test_changes.py, and a row to 'Going on with a changed spec'"
        " in docs/recovery.md."
    )


@pytest.mark.parametrize("model", TABLES)
def test_the_table_names_only_what_there_is(model: type[BaseModel]) -> None:
    """A field that is gone or misspelt, or a rule that is not there."""
    there = {name for names in list_spec_fields(model) for name in names}
    assert set(FIELDS[model]) <= there
    assert set(FIELDS[model].values()) <= set(RULES)


def test_every_rule_is_used_and_says_why() -> None:
    """A refused change says what to do instead."""
    used = {rule for fields in FIELDS.values() for rule in fields.values()}
    assert used == set(RULES)
    for rule in RULES.values():
        assert rule.why
        if rule.effect == "refused" and rule.name != "identity":
            assert "name" in rule.why


def test_the_nearest_section_decides() -> None:
    """A field has its own rule, or that of the section above it."""
    found = find_field_rule(PipelineSpec, "sources.*.discovery.order")
    assert (found.name, found.when) == ("listing", RuleCondition.ALWAYS)
    assert find_field_rule(PipelineSpec, "sources.*.parse.null").name == "next_epoch"
    with pytest.raises(KeyError):
        find_field_rule(PipelineSpec, "nonsense")


def test_what_the_digest_leaves_out_is_not_compared() -> None:
    """A driver does not notice a change of these, so the table must not judge it."""
    for names in list_spec_fields(PipelineSpec):
        is_apart = names[0] in NON_DATA_SECTIONS or names[-1] in {
            "outputs.layout",
            "outputs.compact",
            "outputs.file_mb",
        }
        path = names[-1] if names[0] != "outputs" else names[1]
        is_apart = is_apart or path == "outputs.layout"
        assert find_field_rule(PipelineSpec, names[-1]).is_compared != is_apart, names
