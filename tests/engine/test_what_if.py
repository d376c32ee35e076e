"""What-if: recorded options give the record, other options give what a run with them gives."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.harness import SECOND, Bench, barrier, row, spec_of
from tests.epochs import retire_epoch
from tidegate.checkpoints.manifest import Manifest
from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.epoch_engine import EpochRequests
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests, read_recorded_epochs
from tidegate.jobs.engine.what_if import (
    WhatIfOptions,
    WhatIfReport,
    _ReleasedMarks,
    bound_late_rows,
    run_what_if,
)
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import (
    Decision,
    Member,
    MemberSurvey,
    ReleaseMark,
    Survey,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.time_units import TICK_MIN

SEEDS = range(int(os.environ.get("TIDEGATE_SOAK", "6")))


def random_spec(draw: random.Random, *, barriers: bool) -> PipelineSpec:
    """Two or three sources with drawn options and windows of all lateness units."""
    plain = spec_of().model_dump(by_alias=True, include={"sources"})["sources"]["a"]
    names = ("path", "schema", "event_time", *(("barriers",) if barriers else ()))
    source = {name: plain[name] for name in names}
    exact = draw.random() < 0.2
    more = {
        "frontier": "inclusive" if exact else draw.choice(["exclusive", "inclusive"]),
        "max_jump": draw.choice([None, None, "60s"]),
    }
    sources = {}
    for name in "abc"[: draw.choice([2, 3])]:
        lag = "0" if exact else draw.choice(["0", "2s", "20s"])
        sources[name] = {**source, **more, "lag": lag}
        if not exact and draw.random() < 0.3:
            violation = draw.choice(["error", "drop", "adjust"])
            punctuation = {"every_events": 3, "on_violation": violation}
            sources[name]["punctuation"] = punctuation
    window = {"kind": "tumbling", "size": "10s", "aggregates": {"n": "count(*)"}}
    sliding = {**window, "kind": "sliding", "slide": "5s"}
    session = {"kind": "session", "gap": "3s", "aggregates": {"n": "count(*)"}}
    late = {"lateness": draw.choice(["0", "5s", "never"])}
    unit = {"late_unit": draw.choice(["window", "event", "first_window"])}
    windows = {"w": window | late | unit, "s": sliding | late | unit, "v": session}
    return spec_of(
        sources=sources,
        windows=dict(draw.sample(sorted(windows.items()), draw.choice([0, 1, 3]))),
        coalesce={
            "idle_timeout": draw.choice(["6s", "15s", "never"]),
            "revived": draw.choice(["ignore", "freeze"]),
            "coalesce": draw.choice(["min", "min", "max"]),
        },
        release={
            "mode": draw.choice(["ordered", "commit", "pass_through"]),
            "on_late": draw.choice(["side_output", "drop", "emit_flagged", "adjust"]),
            "build_window": draw.choice([None, "20s"]),
            "startup_grace": draw.choice(["0", "4s"]),
        },
        barriers={"identity": "ordinal", "timeout": draw.choice(["9s", None])},
    )


def play(draw: random.Random, spec: PipelineSpec, *, barriers: bool, ends: bool) -> Bench:
    """Seal some thirty epochs of rows with disorder, silences, barriers, bad rows and an end.

    Source a brings a row in every epoch, so that each one is sealed.
    """
    bench = Bench(spec)
    engine, time = bench.engine(), 0.0
    for epoch in range(30):
        bench.clock.advance(draw.choice([1, 3, 8]))
        time += draw.choice([0, 1, 4, 15])
        for name, source in bench.sources.items():
            silent = epoch % 12 in range(4, 9) and name == draw.choice("abc")
            late = (
                []
                if silent
                else [draw.choice([0, 0, 1, 3, 40]) for _ in range(draw.choice([1, 4]))]
            )
            rows = [row(max(0.0, time - back)) for back in late] or (
                [row(time)] if name == "a" else []
            )
            if draw.random() < 0.05:
                rows.append({**row(0), "t": None})
            if draw.random() < 0.03:
                rows.append(row(time + 500))
            if barriers and draw.random() < 0.1:
                rows.append(barrier(time, epoch))
            if not (ends and epoch > 25 and name == "b"):
                source.append(*rows)
        if ends and epoch == 26:
            bench.sources["b"].end()
        asked = EpochRequests()
        if barriers and draw.random() < 0.1:
            opened = tuple(b["id"] for b in engine.resume_state.decider["barriers"]["open"][:1])
            verb = draw.choice(["aborts", "cancels", "ctis"])
            what: Any = (("a", int(time * SECOND)),) if verb == "ctis" else opened
            asked = EpochRequests(ids=(f"r{epoch}",), **{verb: what})
        engine.run_epoch(asked)
    return bench


def ask(bench: Bench, first: int | None = None, **options: Any) -> WhatIfReport:
    """What-if over the sealed epochs."""
    epochs = read_recorded_epochs(bench.log, bench.spec, first or 1)
    return run_what_if(bench.spec.name, epochs, WhatIfOptions(**options), first)


def test_slot_0_as_the_beginning_leaves_nothing_out() -> None:
    """Slot 1 is read without a parent, as it is without a beginning."""
    draw = random.Random(1)
    bench = play(draw, random_spec(draw, barriers=False), barriers=False, ends=False)
    slots = [e.manifest.slot for e in read_recorded_epochs(bench.log, bench.spec, 0)]
    assert slots == [e.slot for e in bench.epochs()]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_recorded_options_give_the_record(seed: int) -> None:
    """Every decision and every state comes out as it was sealed, and both courses are one."""
    draw = random.Random(seed)
    barriers = draw.random() < 0.7
    bench = play(draw, random_spec(draw, barriers=barriers), barriers=barriers, ends=True)
    report = ask(bench)
    assert report.not_reproduced == {}
    assert report.epochs == len(bench.epochs()) > 10
    assert report.happened == report.other


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bounds_hold_the_rows_that_were_late(seed: int) -> None:
    """Epoch by epoch the counted late rows lie between the bounds, which are tight where they can."""
    draw = random.Random(seed)
    bench = play(draw, random_spec(draw, barriers=False), barriers=False, ends=False)
    for epoch in read_recorded_epochs(bench.log, bench.spec):
        survey, decision = epoch.read_survey(), epoch.sealed_decision
        assert survey is not None
        per_source = epoch.manifest.epoch_counters.per_source
        for member in survey.members:
            least, greatest = bound_late_rows(bench.spec, member, decision)
            counted = per_source.get(member.member.source, {}).get("late_rows", 0)
            assert least <= counted <= greatest, (seed, epoch.manifest.slot, member)


@pytest.mark.parametrize("seed", SEEDS)
def test_other_options_give_what_a_run_with_them_gives(seed: int) -> None:
    """Over the same rows, the frontiers and late rows of a real run with the other lag and timeout
    are those that what-if tells beforehand.
    """
    draw = random.Random(seed)
    spec = random_spec(draw, barriers=False)
    lags = {name: draw.choice([0, 5, 30]) * SECOND for name in spec.sources}
    options: dict[str, Any] = {
        "lags": lags,
        "idle": {"": draw.choice([3 * SECOND, 30 * SECOND, None])},
    }
    rows = draw.getrandbits(32)
    told = ask(play(random.Random(rows), spec, barriers=False, ends=False), **options)
    changed = WhatIfOptions(**options).apply(spec)
    run = play(random.Random(rows), changed, barriers=False, ends=False)
    epochs = {manifest.slot: manifest for manifest in run.epochs()}
    if len(epochs) != told.epochs:
        pytest.skip("an epoch without rows was sealed in one of the runs only")
    assert [point[3] for point in told.points] == [m.frontier_after for m in epochs.values()]
    for source, counts in run.epochs()[-1].counters.per_source.items():
        least, greatest = told.other.late[source]
        assert least <= counts.get("late_rows", 0) <= greatest


def test_a_manifest_holds_a_survey_that_is_short() -> None:
    """A member without rows takes nothing, one with rows forty bytes; merges have none."""
    bench = Bench(spec_of())
    bench.sources["a"].append(row(1), row(2))
    bench.engine().run_epoch()
    (epoch,) = bench.epochs()
    assert (epoch.format_version, epoch.survey) == (
        2,
        {"members": {"a/0": [2, SECOND, 2 * SECOND]}},
    )


def test_epochs_without_a_survey_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest epoch that can be decided again begins the report; before it is one clear error."""
    bench = Bench(spec_of())
    engine = bench.engine()
    for second in range(6):
        bench.sources["a"].append(row(second))
        engine.run_epoch()
    assert ask(bench, first=3).first == 3
    retire_epoch(bench.log, 2)
    kept = ask(bench)
    assert (kept.first, kept.epochs) == (4, 3)
    with pytest.raises(ConfigurationError, match="epoch 2 of p is retired") as error:
        ask(bench, first=2)
    assert error.value.advice is not None
    assert "--since 4" in error.value.advice
    epochs = list(read_kept_manifests(bench.log, 3))
    plain = Manifest.model_copy
    monkeypatch.setattr(
        "tidegate.jobs.engine.recorded_epochs.read_kept_manifests",
        lambda *_: [plain(m, update={"survey": None}) for m in epochs],
    )
    with pytest.raises(ConfigurationError, match="no epoch that can be decided again"):
        ask(bench)


@pytest.mark.parametrize(("kept", "newest"), [(None, 21), (0, 0), (24, 24), (TICK_MIN, None)])
def test_a_manifest_tells_the_newest_row_that_was_kept(
    kept: int | None, newest: int | None
) -> None:
    """Also time zero, an adjusted row, and that there is none; without a note it is the newest row.

    docs/semantics.md, section 4.1.
    """
    member = MemberSurvey(Member("a"), 2, 0, 21, violations=1, newest_kept=kept)
    found = MemberSurvey.from_record(member.member, member.to_record())
    assert (found, found.max_kept_time) == (member, newest)


def test_a_row_that_broke_its_punctuation_is_never_the_greatest_released() -> None:
    """Where the order compares with what was released, later rows are late by rows that left only.

    docs/semantics.md, sections 3.3 and 4.1.
    """
    marks, member = _ReleasedMarks(), MemberSurvey(Member("a"), 2, 12, 21, newest_kept=12)
    other, same = (_decide_release(time) for time in (30, 10))
    marks.add(Survey(0, (member,)), other, same)
    found = marks.replace_released(Survey(0, (), released_max=ReleaseMark(0, 25)))
    assert found.released_max == ReleaseMark(0, 12)


def _decide_release(time: int) -> Decision:
    spec = spec_of()
    decision = decide(spec, create_initial_state(spec), Survey(0, ()))
    return replace(decision, release_after=ReleaseMark(0, time))
