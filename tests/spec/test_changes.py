"""What a checkpoint's state becomes under another spec, rule by rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_changes import ChangeEffect, LiveState, SpecChange, compare_specs

BASE: dict[str, Any] = {
    "name": "p",
    "sources": {
        "a": {
            "path": "in/a",
            "schema": {"t": "timestamp", "k": "string", "v": "long"},
            "event_time": "t",
            "lag": "1s",
        },
        "b": {
            "path": "in/b",
            "schema": {"t": "timestamp", "k": "string", "v": "long"},
            "event_time": "t",
            "lag": "1s",
        },
    },
    "windows": {
        "w": {
            "kind": "tumbling",
            "size": "1h",
            "keys": ["k"],
            "aggregates": {"n": "count(*)", "s": "sum(v)"},
        }
    },
}
BUSY = LiveState(frozenset({"w"}), 7)


def judged(edit: Callable[[dict[str, Any]], object], live: LiveState = BUSY) -> list[SpecChange]:
    """The changes that an edit of the base spec makes."""
    edited = copy.deepcopy(BASE)
    edit(edited)
    return compare_specs(
        PipelineSpec.model_validate(BASE), PipelineSpec.model_validate(edited), live
    )


def _add_column(spec: dict[str, Any]) -> None:
    for source in spec["sources"].values():
        source["schema"]["extra"] = "double"


def _retype(spec: dict[str, Any]) -> None:
    for source in spec["sources"].values():
        source["schema"]["v"] = "double"


def _reorder(spec: dict[str, Any]) -> None:
    spec["windows"]["w"]["aggregates"] = {"s": "sum(v)", "n": "count(*)"}


@pytest.mark.parametrize(
    ("edit", "what", "verdict"),
    [
        (
            lambda s: s["windows"]["w"]["aggregates"].update(m="max(v)"),
            "windows.w.aggregates.m added",
            "refused",
        ),
        (
            lambda s: s["windows"]["w"]["aggregates"].pop("s"),
            "windows.w.aggregates.s removed",
            "refused",
        ),
        (
            lambda s: s["windows"]["w"]["aggregates"].update(s="sum(v + 1)"),
            "windows.w.aggregates.s changed",
            "refused",
        ),
        (_reorder, "windows.w.aggregates in another order", "kept"),
        (lambda s: s["windows"].update(x=s["windows"]["w"]), "windows.x added", "kept"),
        (lambda s: s["windows"].pop("w"), "windows.w removed", "dropped"),
        (lambda s: s["windows"]["w"].update(keys=["k", "v"]), "windows.w.keys", "refused"),
        (lambda s: s["windows"]["w"].update(size="2h"), "windows.w.size", "refused"),
        (lambda s: s["windows"]["w"].update(lateness="5m"), "windows.w.lateness", "kept"),
        (lambda s: s["windows"]["w"].update(revisions="delta"), "windows.w.revisions", "refused"),
        (
            lambda s: s["sources"].update(c={**s["sources"]["a"], "path": "in/c"}),
            "sources.c added",
            "kept",
        ),
        (lambda s: s["sources"].pop("b"), "sources.b removed", "dropped"),
        (lambda s: s["sources"]["a"].update(lag="9s"), "sources.a.lag", "kept"),
        (lambda s: s["sources"]["a"].update(path="in/z"), "sources.a.path", "refused"),
        (
            lambda s: s["sources"]["a"].update(timezone="Europe/Paris"),
            "sources.a.timezone",
            "refused",
        ),
        (
            lambda s: s["sources"]["a"].update(discovery={"order": "arrival"}),
            "sources.a.discovery.order",
            "refused",
        ),
        (
            lambda s: s["sources"]["a"].update(discovery={"safety_listing": "1h"}),
            "sources.a.discovery.safety_listing",
            "kept",
        ),
        (
            lambda s: s["sources"]["a"].update(table={"format": "delta"}),
            "sources.a.table",
            "refused",
        ),
        (_add_column, "schema.extra added", "kept"),
        (_retype, "schema.v is double instead of long", "refused"),
        (lambda s: s.update(release={"mode": "commit"}), "release.mode", "refused"),
        (lambda s: s.update(release={"build_window": "3s"}), "release.build_window", "kept"),
        (lambda s: s.update(coalesce={"idle_timeout": "never"}), "coalesce.idle_timeout", "kept"),
    ],
)
def test_every_change_has_a_rule(
    edit: Callable[[dict[str, Any]], object], what: str, verdict: str
) -> None:
    """With open windows and buffered rows."""
    assert [(c.what, c.verdict.value) for c in judged(edit)] == [(what, verdict)]


def topic(name: str, servers: str = "b:9092") -> dict[str, Any]:
    """A topic instead of objects."""
    return {"kind": "kafka", "path": "", "kafka": {"servers": servers, "topic": name}}


ICEBERG = {"format": "iceberg", "name": "n.a", "catalog": "sqlite:///a"}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ({"table": ICEBERG}, {"table": {**ICEBERG, "name": "n.b"}}, ChangeEffect.REFUSED),
        ({"table": ICEBERG}, {"table": {**ICEBERG, "catalog": "sqlite:///b"}}, ChangeEffect.KEPT),
        (
            {"table": {"format": "delta"}},
            {"table": {"format": "delta", "on_rewrite": "skip"}},
            ChangeEffect.KEPT,
        ),
        ({"discovery": {"order": "arrival"}}, {}, ChangeEffect.REFUSED),
        (topic("clicks"), topic("orders"), ChangeEffect.REFUSED),
        (topic("clicks"), topic("clicks", servers="other:9092"), ChangeEffect.KEPT),
    ],
    ids=[
        "another table",
        "a catalog that moved",
        "skip rewrites",
        "back to the order of keys",
        "another topic",
        "another broker",
    ],
)
def test_positions_hold_for_one_place(
    old: dict[str, Any], new: dict[str, Any], verdict: ChangeEffect
) -> None:
    """A position among a table's files, or in the order of arrival, means nothing elsewhere, even
    without any other state.
    """
    before, after = (
        PipelineSpec.model_validate({**BASE, "sources": {"a": {**BASE["sources"]["a"], **own}}})
        for own in (old, new)
    )
    assert [change.verdict for change in compare_specs(before, after, LiveState())] == [verdict]


@pytest.mark.parametrize(
    "edit",
    [
        _add_column,
        lambda s: s["windows"]["w"]["aggregates"].update(m="max(v)"),
        lambda s: s.update(release={"mode": "commit"}),
    ],
)
def test_without_state_there_is_nothing_to_misread(
    edit: Callable[[dict[str, Any]], object],
) -> None:
    """No open window, no buffered row: kept."""
    assert {c.verdict for c in judged(edit, LiveState())} == {ChangeEffect.KEPT}


@pytest.mark.parametrize("live", [BUSY, LiveState()])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"kind": "k", "keys": ["v"]}),
        ({"kind": "k", "keys": ["v"]}, None),
        ({"kind": "k", "keys": ["v"]}, {"start": "up"}),
    ],
)
def test_edges_are_never_changed_under_rows(
    before: dict[str, Any] | None, after: dict[str, Any] | None, live: LiveState
) -> None:
    """Added, removed or changed: a row that was an edge would be none, or the other way round.

    Refused, with state or without.
    """

    def of(edges: dict[str, Any] | None) -> PipelineSpec:
        spec = copy.deepcopy(BASE)
        spec["windows"]["w"]["late_unit"] = "event"
        spec["sources"]["a"]["edges"] = edges
        return PipelineSpec.model_validate(spec)

    found = compare_specs(
        of(before), of(after if before is None or after is None else {**before, **after}), live
    )
    assert {change.verdict for change in found} == {ChangeEffect.REFUSED}
    assert all(change.what.startswith("sources.a.edges") for change in found)
    assert "new name" in found[0].why


def test_a_source_that_is_gone_takes_its_open_edges_along() -> None:
    """No end of them can come any more; and a window that is new counts what is open."""
    old = copy.deepcopy(BASE)
    old["windows"]["w"]["late_unit"] = "event"
    for source in old["sources"].values():
        source["edges"] = {"kind": "k", "keys": ["v"]}
    new = copy.deepcopy(old)
    del new["sources"]["b"]
    new["windows"]["x"] = new["windows"]["w"]
    found = {
        c.what: c.why
        for c in compare_specs(
            PipelineSpec.model_validate(old), PipelineSpec.model_validate(new), BUSY
        )
    }
    assert "its open edges count no more" in found["sources.b removed"]
    assert "the edges that are open" in found["windows.x added"]


def test_what_rows_do_not_depend_on_is_no_change() -> None:
    """Descriptions, supervision, sinks, and the spec itself."""
    assert judged(lambda s: s.update(description="x", supervision={"retries": 1})) == []
    assert judged(lambda s: None) == []


def test_another_order_of_sources_and_rules_is_reported() -> None:
    """It decides the order of rows of one time, and which rule removes a row."""

    def turn(spec: dict[str, Any]) -> None:
        spec["sources"] = dict(reversed(spec["sources"].items()))

    assert [(c.what, c.verdict) for c in judged(turn)] == [("sources in another order", "kept")]
    ruled = copy.deepcopy(BASE)
    rules = {"x": {"predicate": "v > 0"}, "y": {"predicate": "v > 1", "severity": "drop"}}
    specs = []
    for order in (rules, dict(reversed(rules.items()))):
        ruled["sources"]["a"]["rules"] = order
        specs.append(PipelineSpec.model_validate(ruled))
    old, new = specs
    assert [c.what for c in compare_specs(old, new, BUSY)] == ["sources.a.rules in another order"]
    assert old.digest() != new.digest()


def test_refusals_come_first() -> None:
    """Then what is dropped, then what is kept."""

    def edit(spec: dict[str, Any]) -> None:
        spec["sources"]["a"]["lag"] = "2s"
        spec["sources"].pop("b")
        spec["windows"]["w"]["size"] = "2h"

    assert [c.verdict.value for c in judged(edit)] == ["refused", "dropped", "kept"]


def test_a_column_is_not_removed_from_rows_that_wait() -> None:
    """Their values would be lost without a trace; with an empty order buffer nothing is."""
    wide = copy.deepcopy(BASE)
    _add_column(wide)
    old, new = PipelineSpec.model_validate(wide), PipelineSpec.model_validate(BASE)
    verdicts = [
        [change.verdict for change in compare_specs(old, new, LiveState(buffered=rows))]
        for rows in (7, 0)
    ]
    assert verdicts == [[ChangeEffect.REFUSED], [ChangeEffect.KEPT]]
