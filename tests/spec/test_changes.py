"""What a checkpoint's state becomes under another spec, rule by rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs.spec.changes import Change, Live, Verdict, changes
from tidegate.jobs.spec.pipeline import PipelineSpec

BASE: dict[str, Any] = {
    "name": "p",
    "sources": {
        "a": {"path": "in/a", "schema": {"t": "timestamp", "k": "string", "v": "long"}, "event_time": "t", "lag": "1s"},
        "b": {"path": "in/b", "schema": {"t": "timestamp", "k": "string", "v": "long"}, "event_time": "t", "lag": "1s"},
    },
    "windows": {"w": {"kind": "tumbling", "size": "1h", "keys": ["k"], "aggregates": {"n": "count(*)", "s": "sum(v)"}}},
}
BUSY = Live(frozenset({"w"}), 7)


def judged(edit: Callable[[dict[str, Any]], object], live: Live = BUSY) -> list[Change]:
    """The changes that an edit of the base spec makes."""
    edited = copy.deepcopy(BASE)
    edit(edited)
    return changes(PipelineSpec.model_validate(BASE), PipelineSpec.model_validate(edited), live)


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
        (lambda s: s["windows"]["w"]["aggregates"].update(m="max(v)"), "windows.w.aggregates.m added", "refused"),
        (lambda s: s["windows"]["w"]["aggregates"].pop("s"), "windows.w.aggregates.s removed", "refused"),
        (lambda s: s["windows"]["w"]["aggregates"].update(s="sum(v + 1)"), "windows.w.aggregates.s changed", "refused"),
        (_reorder, "windows.w.aggregates in another order", "refused"),
        (lambda s: s["windows"].update(x=s["windows"]["w"]), "windows.x added", "kept"),
        (lambda s: s["windows"].pop("w"), "windows.w removed", "dropped"),
        (lambda s: s["windows"]["w"].update(keys=["k", "v"]), "windows.w.keys", "refused"),
        (lambda s: s["windows"]["w"].update(size="2h"), "windows.w.size", "refused"),
        (lambda s: s["windows"]["w"].update(lateness="5m"), "windows.w.lateness", "kept"),
        (lambda s: s["windows"]["w"].update(revisions="delta"), "windows.w.revisions", "refused"),
        (lambda s: s["sources"].update(c={**s["sources"]["a"], "path": "in/c"}), "sources.c added", "kept"),
        (lambda s: s["sources"].pop("b"), "sources.b removed", "dropped"),
        (lambda s: s["sources"]["a"].update(lag="9s"), "sources.a.lag", "kept"),
        (lambda s: s["sources"]["a"].update(path="in/z"), "sources.a.path", "refused"),
        (lambda s: s["sources"]["a"].update(timezone="Europe/Paris"), "sources.a.timezone", "refused"),
        (_add_column, "schema.extra added", "refused"),
        (_retype, "schema.v is double instead of long", "refused"),
        (lambda s: s.update(release={"mode": "commit"}), "release.mode", "refused"),
        (lambda s: s.update(release={"build_window": "3s"}), "release.build_window", "kept"),
        (lambda s: s.update(coalesce={"idle_timeout": "never"}), "coalesce.idle_timeout", "kept"),
    ],
)
def test_every_change_has_a_rule(edit: Callable[[dict[str, Any]], object], what: str, verdict: str) -> None:
    """With open windows and buffered rows."""
    assert [(c.what, c.verdict.value) for c in judged(edit)] == [(what, verdict)]


@pytest.mark.parametrize(
    "edit",
    [
        _add_column,
        _reorder,
        lambda s: s["windows"]["w"]["aggregates"].update(m="max(v)"),
        lambda s: s.update(release={"mode": "commit"}),
    ],
)
def test_without_state_there_is_nothing_to_misread(edit: Callable[[dict[str, Any]], object]) -> None:
    """No open window, no buffered row: kept."""
    assert {c.verdict for c in judged(edit, Live())} == {Verdict.KEPT}


def test_what_rows_do_not_depend_on_is_no_change() -> None:
    """Descriptions, supervision, sinks, and the spec itself."""
    assert judged(lambda s: s.update(description="x", supervision={"retries": 1})) == []
    assert judged(lambda s: None) == []


def test_refusals_come_first() -> None:
    """Then what is dropped, then what is kept."""

    def edit(spec: dict[str, Any]) -> None:
        spec["sources"]["a"]["lag"] = "2s"
        spec["sources"].pop("b")
        spec["windows"]["w"]["size"] = "2h"

    assert [c.verdict.value for c in judged(edit)] == ["refused", "dropped", "kept"]
