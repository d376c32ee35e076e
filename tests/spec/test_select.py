"""`where` and `select` in specs: types, what is refused, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.spec_checks import find_mistakes
from tidegate.jobs.rules.native_support import (
    explain_spark_condition,
    explain_spark_value,
    explain_unproven_expressions,
)
from tidegate.jobs.spec.field_rules import ChangeEffect
from tidegate.jobs.spec.loader import parse_spec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.row_rules import read_cast_type
from tidegate.jobs.spec.spec_changes import LiveState, compare_specs

OWN: dict[str, Any] = {
    "schema": {
        "at": "timestamp",
        "payload": "string",
        "shop": "struct<id: long, tags: array<string>>",
    },
    "select": {
        "placed": "at",
        "shop": "cast(shop.id as long)",
        "amount": "try_cast(get_json_object(payload, '$.amount') as double)",
    },
    "where": "payload is not null",
    "event_time": "placed",
    "lag": "30s",
    "path": "inbox/web",
}
PLAIN = {
    "schema": {"placed": "timestamp", "shop": "long", "amount": "double"},
    "event_time": "placed",
    "lag": "30s",
    "path": "inbox/store",
}


def spec_of(**own: Any) -> PipelineSpec:
    """Two sources with one set of columns, one of them by `select`."""
    return PipelineSpec.model_validate(
        {"name": "p", "sources": {"web": {**OWN, **own}, "store": PLAIN}}
    )


def test_other_fields_name_selected_columns() -> None:
    """The pipeline has the selected columns; the schema is only what is read."""
    spec = spec_of()
    assert spec.columns == {"placed": "timestamp", "shop": "long", "amount": "double"}
    assert spec.event_time_column == "placed"
    assert find_mistakes(spec)[0] == []
    with pytest.raises(ValueError, match=r"column 'at' is not in the select \(placed, shop"):
        spec_of(event_time="at")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"select": {"placed": "at", "amount": "1"}}, r"write cast\(1 as TYPE\)"),
        ({"select": {**OWN["select"], "shop": "shop"}}, r"unknown column type 'struct"),
        ({"schema": {**OWN["schema"], "bad": "map<string>"}}, "unknown column type 'map"),
        ({"format": "json"}, "JSON is read as text"),
        ({"select": {"placed": "at"}}, "needs a 'select'"),
    ],
)
def test_what_cannot_be_selected_is_refused(own: dict[str, Any], message: str) -> None:
    """The type of every column must be known without Spark."""
    with pytest.raises(ValueError, match=message):
        spec_of(**own)


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"where": "paylaod is not null"}, "where"),
        ({"where": "length(payload)"}, "where"),
        ({"where": "rand() < 0.5"}, "where"),
        ({"select": {**OWN["select"], "amount": "cast(sum(1) as double)"}}, "amount"),
        ({"select": {**OWN["select"], "amount": "cast(price as double)"}}, "amount"),
    ],
)
def test_mistakes_are_found_without_spark(own: dict[str, Any], place: str) -> None:
    """Unknown columns, wrong types and answers that change are named at their field."""
    (found,) = find_mistakes(spec_of(**own))[0]
    assert found[0][-1] == place


def test_specs_without_select_keep_their_digest() -> None:
    """Empty fields say what no fields say, in bytes too."""
    text = "name: p\nsources: {a: {path: x, schema: {t: timestamp}, event_time: t, lag: 1s}}\n"
    assert "select" not in parse_spec(text).canonical_json()
    assert "where" not in parse_spec(text).canonical_json()


def test_a_changed_selection_applies_from_the_next_epoch_on() -> None:
    """The columns of the tables stay, so the state does."""
    new = spec_of(where="payload <> ''", schema={**OWN["schema"], "more": "int"})
    found = compare_specs(spec_of(), new, LiveState(buffered=1))
    assert [c.what for c in found] == ["sources.web.schema.more", "sources.web.where"]
    assert {c.verdict for c in found} == {ChangeEffect.KEPT}


def test_the_expression_that_needs_spark_is_named() -> None:
    """DuckDB computes what is proven; a source that needs Spark SQL leaves all rows to it."""
    reason = explain_unproven_expressions(spec_of())
    assert reason is not None
    assert reason.startswith("source web: ")
    own = {"select": {"placed": "at", "shop": "n", "amount": "cast(n as double)"}}
    assert (
        explain_unproven_expressions(
            spec_of(schema={"at": "timestamp", "n": "long"}, where="n > 0", **own)
        )
        is None
    )


@pytest.mark.parametrize(
    "sql",
    [
        *(
            "a % b = 0",
            "a / 2 > 1",
            "lower(s) = 'a'",
            "s like 'a%'",
            "f > 1",
            "s > 5",
            "a in (select 1)",
        ),
        *(
            "a > 1 -- why",
            's = "x"',
            "s = 'it\\'s'",
            "a > 10000000000",
            "a",
            "a = 1e3",
            "a is true",
        ),
        *(
            "p = p in (true)",
            "p <=> p = p",
            "a between b and d",
            "a + 1 > 5",
            "(b * 2) in (4)",
            "length(s) * 999999999 > 5",
            "(coalesce(null, d) + a) % 2 = 0",
            "offset > 1",
        ),
    ],
)
def test_what_is_not_proven_is_left_to_spark(sql: str) -> None:
    """Other forms may differ: division by zero, case, patterns, literals, 32-bit floats, order of
    comparisons, overflow.
    """
    columns = {"a": "long", "b": "int", "s": "string", "f": "float", "d": "double", "p": "boolean"}
    columns |= {"offset": "long"}  # to be quoted in DuckDB
    assert explain_spark_condition(sql, columns) is not None


def test_only_casts_that_keep_every_value_are_proven() -> None:
    """Casts that may fail, and texts of numbers, are Spark's."""
    columns = {"a": "long", "s": "string", "v": "double"}
    proven = ["a", "`s`", "cast(a as double)", "cast(s as string)", "cast(a > 1 as boolean)"]
    assert [explain_spark_value(sql, columns) for sql in proven] == [None] * len(proven)
    for sql in ("cast(a as int)", "cast(s as long)", "try_cast(s as int)", "cast(v as long)"):
        assert explain_spark_value(sql, columns) is not None


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("CAST(a AS decimal(6,2))", "decimal(6,2)"),
        ("try_cast(cast(a as string) as integer)", "int"),
        ("cast(a as int) + cast(b as int)", None),
        ("cast(concat(a, ')') as string)", "string"),
        ("a", None),
    ],
)
def test_the_type_is_that_of_the_outermost_cast(sql: str, kind: str | None) -> None:
    """A sum of two casts is not a cast."""
    assert read_cast_type(sql) == kind


def test_nested_types_need_a_selection() -> None:
    """Tables have flat columns only."""
    text = "name: p\nsources: {a: {path: x, schema: {t: timestamp, c: struct<i: int>}, event_time: t, lag: 1s}}\n"
    with pytest.raises(ConfigurationError, match=r"schema\.c: unknown column type"):
        parse_spec(text.replace("struct<i: int>", "'struct<i: int>'"))


def test_spaces_in_a_type_do_not_count() -> None:
    """Two sources may write one type of decimals in two ways, also when the spec changes."""

    def parse(*kinds: str) -> PipelineSpec:
        sources = {
            f"s{number}": {**PLAIN, "schema": {"placed": "timestamp", "amount": kind}}
            for number, kind in enumerate(kinds)
        }
        return PipelineSpec.model_validate({"name": "p", "sources": sources})

    spec = parse("decimal(6,2)", "decimal(6, 2)")
    assert spec.columns["amount"] == "decimal(6,2)"
    changes = compare_specs(spec, parse("decimal(6, 2)", "decimal(6,2)"), LiveState(frozenset(), 0))
    assert changes == []
