"""What a checkpoint's state becomes under another spec, rule by rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.jobs.spec.field_rules import ChangeEffect
from tidegate.jobs.spec.job_spec import JobSpec
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_changes import (
    LiveState,
    SpecChange,
    SpecHistory,
    compare_jobs,
    compare_specs,
    compare_table_types,
)
from tidegate.time_units import TICK_MAX, TICK_MIN

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
        (lambda s: s["windows"]["w"].update(fire_every="1m"), "windows.w.fire_every", "refused"),
        (lambda s: s["windows"]["w"].update(zero_rows=True), "windows.w.zero_rows", "refused"),
        (
            lambda s: s["windows"]["w"].update(min_window_start=0),
            "windows.w.min_window_start",
            "kept",
        ),
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
            "kept",
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


def edited(edit: Callable[[dict[str, Any]], object], base: dict[str, Any] = BASE) -> PipelineSpec:
    """The spec after an edit of a base."""
    raw = copy.deepcopy(base)
    edit(raw)
    return PipelineSpec.model_validate(raw)


def with_window(**fields: Any) -> PipelineSpec:
    """The base whose window has these fields as well."""
    return edited(lambda s: s["windows"]["w"].update(fields))


PLAIN = PipelineSpec.model_validate(BASE)
HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("before", "after", "frontier", "verdict"),
    [
        ("0s", "5m", 10 * HOUR, ChangeEffect.REFUSED),
        ("5m", "never", 10 * HOUR, ChangeEffect.REFUSED),
        ("5m", "1m", 10 * HOUR, ChangeEffect.KEPT),
        ("never", "5m", 10 * HOUR, ChangeEffect.KEPT),
        ("0s", "5m", TICK_MIN, ChangeEffect.KEPT),
        ("0s", "5m", TICK_MAX, ChangeEffect.KEPT),
    ],
    ids=["raised", "without end", "lowered", "ended", "before the first frontier", "at the end"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_purged_window_is_never_open_again(
    before: str, after: str, frontier: int, verdict: ChangeEffect, *, is_open: bool
) -> None:
    """Late rows would replace its result by one that counts them alone.

    Before the first frontier no window was purged, and at the end every window stays so.
    """
    old, new = with_window(lateness=before), with_window(lateness=after)
    live = LiveState(frozenset({"w"} if is_open else ()), frontier=frontier)
    (change,) = compare_specs(old, new, live)
    assert (change.what, change.verdict) == ("windows.w.lateness", verdict)


def test_a_session_that_was_purged_at_its_end_is_not_open_at_its_end() -> None:
    """`after_end` purges one tick later than `at_end`."""
    session = {"kind": "session", "gap": "1m", "aggregates": {"n": "count(*)"}}
    at, after = (
        PipelineSpec.model_validate({**BASE, "windows": {"w": {**session, "session_close": close}}})
        for close in ("at_end", "after_end")
    )
    live = LiveState(frontier=HOUR)
    assert [c.verdict for c in compare_specs(at, after, live)] == [ChangeEffect.REFUSED]
    assert [c.verdict for c in compare_specs(after, at, live)] == [ChangeEffect.KEPT]


def test_only_the_presence_of_fire_every_changes_the_form_of_the_state() -> None:
    """Another value is kept, and so is every change while no window is open."""
    minute, two = with_window(fire_every="1m"), with_window(fire_every="2m")
    assert [c.verdict for c in compare_specs(minute, two, BUSY)] == [ChangeEffect.KEPT]
    assert [c.verdict for c in compare_specs(minute, PLAIN, BUSY)] == [ChangeEffect.REFUSED]
    assert [c.verdict for c in compare_specs(minute, PLAIN, LiveState())] == [ChangeEffect.KEPT]


def test_a_time_zone_is_added_and_never_changed() -> None:
    """Without one every time that has no zone was a bad value: no row that was kept has changed."""
    paris = edited(lambda s: s["sources"]["a"].update(timezone="Europe/Paris"))
    rome = edited(lambda s: s["sources"]["a"].update(timezone="Europe/Rome"))
    assert [c.verdict for c in compare_specs(PLAIN, paris, BUSY)] == [ChangeEffect.KEPT]
    assert [c.verdict for c in compare_specs(paris, rome, BUSY)] == [ChangeEffect.REFUSED]
    assert [c.verdict for c in compare_specs(paris, PLAIN, BUSY)] == [ChangeEffect.REFUSED]


def _retype_extra(spec: dict[str, Any]) -> None:
    for source in spec["sources"].values():
        source["schema"]["extra"] = "string"


STREAM: dict[str, Any] = {
    "streams": {"totals": {"schema": {"k": "string", "total": "double"}}},
    "reducers": {
        "r": {"from": "events", "to": "totals", "keys": ["k"], "aggregates": {"total": "sum(v)"}}
    },
}


def _retype_stream(spec: dict[str, Any]) -> None:
    spec.update(copy.deepcopy(STREAM))
    spec["streams"]["totals"]["schema"]["total"] = "string"


@pytest.mark.parametrize(
    ("former", "old", "new", "what"),
    [
        (_add_column, lambda s: None, _retype_extra, "schema.extra added"),
        (
            lambda s: None,
            lambda s: None,
            lambda s: s["windows"]["w"]["aggregates"].update(s="avg(v)"),
            "windows.w.aggregates.s changed",
        ),
        (
            lambda s: None,
            lambda s: s["windows"]["w"]["aggregates"].pop("s"),
            lambda s: s["windows"]["w"]["aggregates"].update(s="max(k)"),
            "windows.w.aggregates.s added",
        ),
        (
            lambda s: None,
            lambda s: s.update(windows={}),
            lambda s: s["windows"]["w"]["aggregates"].update(s="max(k)"),
            "windows.w added",
        ),
        (
            lambda s: s.update(copy.deepcopy(STREAM)),
            lambda s: s.update(copy.deepcopy(STREAM)),
            _retype_stream,
            "streams.totals.schema.total is string instead of double",
        ),
        (
            lambda s: s.update(copy.deepcopy(STREAM)),
            lambda s: None,
            _retype_stream,
            "streams.totals.schema.total added",
        ),
    ],
    ids=[
        "a column that comes back",
        "an aggregate of another type",
        "an aggregate that comes back",
        "a window that comes back",
        "a stream's column",
        "a stream that comes back",
    ],
)
def test_a_column_has_one_type_in_the_life_of_its_table(
    former: Callable[[dict[str, Any]], object],
    old: Callable[[dict[str, Any]], object],
    new: Callable[[dict[str, Any]], object],
    what: str,
) -> None:
    """Whichever spec wrote it, and however long ago, and without any other state."""
    history = SpecHistory([edited(former)])
    found = compare_specs(edited(old), edited(new), LiveState(), history)
    refused = [change for change in found if change.verdict is ChangeEffect.REFUSED]
    assert [change.what for change in refused] == [what]
    assert "one type" in refused[0].why
    assert "new name" in refused[0].why


@pytest.mark.parametrize("expression", ["sum(v + 1)", "sum(k_is_unknown_to_us(v))"])
def test_the_type_of_an_aggregate_is_known_or_it_is_not_replaced(expression: str) -> None:
    """A sum of whole numbers is whole. The type of a function is unknown."""
    after = edited(lambda s: s["windows"]["w"]["aggregates"].update(s=expression))
    (change,) = compare_specs(PLAIN, after, LiveState())
    known = expression == "sum(v + 1)"
    assert change.verdict is (ChangeEffect.KEPT if known else ChangeEffect.REFUSED)


def test_tables_stay_after_a_restore_to_the_beginning() -> None:
    """No state is left, and the columns have the types that they had."""
    history = SpecHistory([edited(_add_column), PLAIN])
    found = compare_table_types(edited(_retype_extra), history)
    assert [(c.what, c.verdict) for c in found] == [("schema.extra", ChangeEffect.REFUSED)]
    assert compare_table_types(edited(_add_column), history) == []


def test_a_window_that_comes_back_does_not_replace_its_own_results() -> None:
    """Rows that are late for it would open windows that were purged in its earlier life."""
    without = edited(lambda s: s.update(windows={}))
    history = SpecHistory([PLAIN], [PLAIN])
    (change,) = compare_specs(without, PLAIN, LiveState(), history)
    assert (change.what, change.verdict) == ("windows.w added", ChangeEffect.REFUSED)
    assert "new name" in change.why
    # Another timeline had it: its results are not in the table any more.
    (change,) = compare_specs(without, PLAIN, LiveState(), SpecHistory([PLAIN]))
    assert change.verdict is ChangeEffect.KEPT


def test_what_comes_back_meets_the_state_that_it_left() -> None:
    """Positions of a source and the state of a reducer stay when the spec names them no more."""
    former = edited(lambda s: s.update(copy.deepcopy(STREAM)))
    old = edited(lambda s: (s.update(streams=STREAM["streams"]), s["sources"].pop("b")))
    again = edited(lambda s: s.update(copy.deepcopy(STREAM)))
    history = SpecHistory([former], [former])
    found = {c.what: c.verdict for c in compare_specs(old, again, LiveState(), history)}
    assert found == {
        "sources.b added": ChangeEffect.KEPT,
        "reducers.r added": ChangeEffect.KEPT,
    }

    def change(spec: dict[str, Any]) -> None:
        spec.update(copy.deepcopy(STREAM))
        spec["sources"]["b"]["path"] = "in/other"
        spec["reducers"]["r"]["aggregates"] = {"total": "max(v)"}

    refused = [
        c
        for c in compare_specs(old, edited(change), LiveState(), history)
        if c.verdict is ChangeEffect.REFUSED
    ]
    assert {c.what for c in refused} == {"sources.b added", "reducers.r added"}
    assert all("new name" in c.why for c in refused)
    # Another timeline had them: this one has no state of theirs.
    elsewhere = compare_specs(old, edited(change), LiveState(), SpecHistory([former]))
    assert {c.verdict for c in elsewhere} == {ChangeEffect.KEPT}


def test_rows_in_the_buffer_of_a_stream_are_not_forgotten() -> None:
    """Without its stage they would never leave it."""
    new = PipelineSpec.model_validate({**BASE, **STREAM})
    buffered = copy.deepcopy(STREAM)
    buffered["streams"]["totals"]["buffer"] = True
    old = PipelineSpec.model_validate({**BASE, **buffered})
    waiting = LiveState(streams=frozenset({"totals"}))
    assert [c.verdict for c in compare_specs(old, new, waiting)] == [ChangeEffect.REFUSED]
    assert [c.verdict for c in compare_specs(old, new, LiveState())] == [ChangeEffect.KEPT]


def test_the_rule_of_a_fold_does_not_change_over_its_state() -> None:
    """A changed aggregate is named as one, as in the YAML."""
    old = edited(lambda s: s.update(copy.deepcopy(STREAM)))

    def change(spec: dict[str, Any]) -> None:
        spec.update(copy.deepcopy(STREAM))
        spec["reducers"]["r"]["aggregates"]["total"] = "max(v + 1)"

    (found,) = compare_specs(old, edited(change), LiveState())
    assert (found.what, found.verdict) == ("reducers.r.aggregates.total", ChangeEffect.REFUSED)


def test_the_fields_of_jobs_are_compared_by_the_same_table() -> None:
    """What only Airflow uses is left out."""
    old, new = (
        JobSpec.model_validate({"kind": "job", "name": "j", "app": "a.py", **own})
        for own in ({}, {"args": ["--fast"], "supervision": {"retries": 1}})
    )
    assert [(c.what, c.verdict) for c in compare_jobs(old, new)] == [("args", ChangeEffect.KEPT)]
