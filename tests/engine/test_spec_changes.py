"""Going on from a checkpoint under another spec: what the rules keep is kept, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import Bench, restore, row, spec_of
from tests.manual_clock import ManualClock
from tests.oracle.memory_source import MemorySource
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.checkpoint_specs import (
    SealedSpecs,
    plan_against_log,
    read_spec,
    write_spec,
)
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.errors import ConfigurationError
from tidegate.jobs.driver.startup import select_start_checkpoint
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_plan import PlanExit


def changed(bench: Bench, **fields: Any) -> Bench:
    """The same store and the same rows under another spec."""
    raw = bench.spec.model_dump(mode="json", by_alias=True) | fields
    other = Bench(PipelineSpec.model_validate(raw), bench.store)
    other.clock = bench.clock
    other.sources = {
        name: bench.sources.get(name) or MemorySource(name) for name in other.spec.sources
    }
    return other


def settle(bench: Bench, recover_to: str = "latest") -> None:
    """What a driver does before its first epoch; `tidegate plan` has said whether it will."""
    refused = plan_against_log(bench.log, bench.spec).exit_code is PlanExit.REFUSED
    lease = Lease.acquire(bench.store, "p", ProcessIdentity.this_process(), clock=bench.clock)
    try:
        select_start_checkpoint(bench.spec, bench.log, lease, recover_to)
    except ConfigurationError:
        assert refused
        raise
    assert not refused or recover_to != "latest"
    lease.release()


@pytest.fixture
def bench() -> Bench:
    """Two sources; an epoch sealed with open windows and rows in the order buffer."""
    found = Bench(spec_of(), MemoryStore())
    found.clock = ManualClock()
    settle(found)
    found.sources["a"].append(row(1), row(5), row(12))
    found.sources["b"].append(row(2), row(7))
    found.engine().run_epoch()
    assert found.epochs()[0].counters.retained > 0
    return found


def finish(bench: Bench) -> None:
    """Every row of every source, to the end."""
    for source in bench.sources.values():
        source.end()
    engine = bench.engine()
    for _ in range(6):
        engine.run_epoch()
    assert all(epoch.counters.is_conserved() for epoch in bench.epochs())
    assert bench.epochs()[-1].counters.retained == 0


def sources(bench: Bench) -> dict[str, Any]:
    """As in the spec."""
    return dict(bench.spec.model_dump(mode="json", by_alias=True)["sources"])


def test_a_new_window_counts_from_now_on(bench: Bench) -> None:
    """Old windows go on with what they hold."""
    windows = bench.spec.model_dump(mode="json", by_alias=True)["windows"]
    wider = changed(bench, windows=windows | {"x": windows["w"]})
    settle(wider)
    wider.sources["a"].append(row(13))
    finish(wider)
    assert sum(r["n"] for r in wider.rows("w")) == 6
    assert sum(r["n"] for r in wider.rows("x")) == 1


def test_a_column_is_added_while_rows_wait_in_the_order_buffer(bench: Bench) -> None:
    """Rows that waited leave with null in it, in order with the rows that have it."""
    schema = {"t": "timestamp", "v": "long", "kind": "string", "n": "long", "extra": "double"}
    wider = changed(bench, sources={n: s | {"schema": schema} for n, s in sources(bench).items()})
    settle(wider)
    wider.sources["a"].append({**row(13), "extra": 0.5})
    finish(wider)
    assert [r.get("extra") for r in wider.rows("events")] == [None] * 5 + [0.5]


def test_a_new_source_is_read_from_its_beginning(bench: Bench) -> None:
    """Its rows behind the frontier are late, like anybody's."""
    more = changed(bench, sources=sources(bench) | {"c": sources(bench)["a"]})
    settle(more)
    more.sources["c"].append(row(1), row(30))
    more.sources["a"].append(row(31))
    more.sources["b"].append(row(31))
    finish(more)
    placed = [r["_source"] for r in more.rows("events")] + [r["_source"] for r in more.rows("late")]
    assert placed.count("c") >= 2


def test_a_source_that_went_away_holds_nothing_up(bench: Bench) -> None:
    """Its buffered rows leave in order, and the frontier follows the others."""
    left = {name: source for name, source in sources(bench).items() if name != "b"}
    fewer = changed(bench, sources=left)
    settle(fewer)
    fewer.sources["a"].append(row(40), row(50))
    finish(fewer)
    times = [r["t"] for r in fewer.rows("events")]
    assert times == sorted(times)
    assert [r["_source"] for r in fewer.rows("events")].count("b") == 2


def test_another_lag_never_moves_the_frontier_back(bench: Bench) -> None:
    """A larger one keeps it until the rows caught up."""
    before = bench.epochs()[-1].decision["frontier_after"]
    later = changed(bench, sources={n: s | {"lag": "1m"} for n, s in sources(bench).items()})
    settle(later)
    for source in later.sources.values():
        source.append(row(14))
    later.engine().run_epoch()
    assert later.epochs()[-1].decision["frontier_after"] == before
    finish(later)


def test_a_removed_window_is_dropped(bench: Bench) -> None:
    """Its segments are not carried on."""
    without = changed(bench, windows={})
    settle(without)
    finish(without)
    assert {s.kind for s in without.epochs()[-1].segments} <= {"order"}


@pytest.mark.parametrize("recover_to", ["latest", "t0-000001"])
def test_what_would_be_misread_is_refused_before_anything_is_done(
    bench: Bench, recover_to: str
) -> None:
    """The log stays as it is, no restore either; the message names the change and what to do."""
    bench.sources["a"].append(row(13))
    bench.engine().run_epoch()
    windows = bench.spec.model_dump(mode="json", by_alias=True)["windows"]
    windows["w"]["keys"] = ["v"]
    other = changed(bench, windows=windows)
    head = bench.log.head()
    with pytest.raises(ConfigurationError, match=r"windows\.w\.keys: .* a window with a new name"):
        settle(other, recover_to)
    assert bench.log.head() == head


def with_maximum(bench: Bench) -> Bench:
    """The same pipeline with one more aggregate in its window."""
    windows = bench.spec.model_dump(mode="json", by_alias=True)["windows"]
    windows["w"]["aggregates"]["most"] = "max(v)"
    return changed(bench, windows=windows)


def test_an_aggregate_is_added_by_reading_again_from_the_beginning(bench: Bench) -> None:
    """Open windows lack it, so it is refused.

    The message names the restore after which every window has it, whole.
    """
    wider = with_maximum(bench)
    with pytest.raises(
        ConfigurationError, match=r"windows\.w\.aggregates\.most added: .* new name"
    ) as refused:
        settle(wider)
    assert "since the beginning again: tidegate checkpoints restore SPEC.yaml beginning" in str(
        refused.value.advice
    )
    restore(wider, None)
    settle(wider)
    finish(wider)
    assert sorted((r["n"], r["most"]) for r in wider.rows("w")) == [(1, 1), (4, 1)]


def test_an_aggregate_is_added_from_a_checkpoint_without_open_windows() -> None:
    """The newest one that the spec fits is named, and going back to it is all there is to do."""
    idle = Bench(spec_of(checkpoint={"idle_epochs": "always"}), MemoryStore())
    settle(idle)
    idle.engine().run_epoch()
    idle.sources["a"].append(row(1), row(5, 7))
    idle.sources["b"].append(row(2))
    idle.engine().run_epoch()
    wider, quiet = with_maximum(idle), idle.epochs()[0].id
    with pytest.raises(ConfigurationError) as refused:
        settle(wider)
    assert f"since {quiet}, the newest checkpoint that it fits, again" in str(refused.value.advice)
    settle(wider, str(quiet))
    finish(wider)
    assert [(r["n"], r["most"]) for r in wider.rows("w")] == [(3, 7)]


def test_what_no_restore_repairs_is_not_offered_one(bench: Bench) -> None:
    """Another key would put two kinds of results into one table, from wherever it is read."""
    windows = bench.spec.model_dump(mode="json", by_alias=True)["windows"]
    windows["w"]["keys"] = ["v"]
    with pytest.raises(ConfigurationError) as refused:
        settle(changed(bench, windows=windows))
    assert "checkpoints restore" not in str(refused.value.advice)


def test_a_spec_that_was_not_kept_is_not_judged(bench: Bench) -> None:
    """State of older versions: said, and gone on."""
    other = changed(bench, windows={})
    manifest = bench.epochs()[-1]
    bench.store.delete(f"p/specs/{manifest.spec_digest}.json")
    assert SealedSpecs(bench.log).compare_with(other.spec, manifest) is None
    settle(other)


def test_the_stored_spec_keeps_the_order_of_its_names(bench: Bench) -> None:
    """A change of the lag is the only change, also where names are not in the alphabet's order."""
    window = bench.spec.model_dump(mode="json", by_alias=True)["windows"]["w"]
    named = window | {"aggregates": {"z": "sum(n)", "a": "count(*)"}}
    turned = dict(reversed(sources(bench).items()))
    before = changed(bench, windows={"w": named}, sources=turned)
    write_spec(bench.store, before.spec)
    kept = read_spec(bench.store, "p", before.spec.digest())
    assert kept is not None
    assert (kept.orders, kept.digest()) == (before.spec.orders, before.spec.digest())
    sealed = bench.epochs()[0].model_copy(update={"spec_digest": before.spec.digest()})
    slower = changed(before, coalesce={"idle_timeout": "5s"})
    found = SealedSpecs(bench.log).compare_with(slower.spec, sealed)
    assert found is not None
    assert [c.what for c in found] == ["coalesce.idle_timeout"]
    again = changed(before, windows={"w": named | {"aggregates": {"a": "count(*)", "z": "sum(n)"}}})
    found = SealedSpecs(bench.log).compare_with(again.spec, sealed)
    assert found is not None
    assert [c.what for c in found] == ["windows.w.aggregates in another order"]


def windowed(bench: Bench, name: str = "w", **fields: Any) -> Bench:
    """The same pipeline whose window has other fields, or another name."""
    window = bench.spec.model_dump(mode="json", by_alias=True)["windows"]["w"]
    return changed(bench, windows={name: window | fields})


@pytest.fixture
def purged(bench: Bench) -> Bench:
    """A window that was closed, published and purged, and one that is open."""
    for source in bench.sources.values():
        source.append(row(31))
    bench.engine().run_epoch()
    assert [r["n"] for r in bench.rows("w")] == [4, 1]
    return bench


def test_a_window_that_was_purged_is_not_opened_by_more_lateness(purged: Bench) -> None:
    """A late row would replace the result of four rows by one of itself alone."""
    patient = windowed(purged, lateness="1h")
    with pytest.raises(ConfigurationError, match=r"windows\.w\.lateness: .* new name") as refused:
        settle(patient)
    assert "checkpoints restore SPEC.yaml beginning" in str(refused.value.advice)
    restore(patient, None)
    settle(patient)
    patient.sources["a"].append(row(4))
    finish(patient)
    newest = {r["window_start"]: r["n"] for r in patient.rows("w")}
    assert sorted(newest.values()) == [1, 2, 5]


@pytest.mark.parametrize("retired", [False, True])
def test_a_window_does_not_come_back_over_its_own_results(purged: Bench, *, retired: bool) -> None:
    """It was in the spec before, or the epochs that would show it are not known."""
    first = purged.epochs()[0]
    without = changed(purged, windows={})
    settle(without)
    without.sources["a"].append(row(33))
    without.engine().run_epoch()
    if retired:
        purged.store.delete(f"p/specs/{first.spec_digest}.json")
        write_spec(purged.store, windowed(purged, lateness="2h").spec)
    with pytest.raises(ConfigurationError, match=r"windows\.w added: .* new name"):
        settle(windowed(purged))
    settle(windowed(purged, "w2"))


def test_a_window_of_another_timeline_is_no_hindrance(bench: Bench) -> None:
    """Its results left the table with the restore."""
    plain = changed(bench, windows={})
    restore(bench, None)
    settle(plain)
    plain.sources["a"].append(row(12))
    plain.engine().run_epoch()
    settle(windowed(bench))


def test_a_source_that_comes_back_goes_on_where_it_stood(bench: Bench) -> None:
    """Its positions stay, so under its name only the same objects are read."""
    without = changed(bench, sources={n: s for n, s in sources(bench).items() if n != "b"})
    settle(without)
    without.sources["a"].append(row(40))
    without.engine().run_epoch()
    elsewhere = sources(bench) | {"b": sources(bench)["b"] | {"path": "inbox/other/"}}
    with pytest.raises(ConfigurationError, match=r"sources\.b added: .*path differs.* new name"):
        settle(changed(bench, sources=elsewhere))
    settle(bench)
    # After a restore to before it had any state, its name is free.
    restore(bench, None)
    settle(without)
    without.sources["a"].append(row(41))
    without.engine().run_epoch()
    settle(changed(bench, sources=elsewhere))


def test_a_spec_that_was_refused_leaves_no_types_behind(bench: Bench) -> None:
    """It wrote no table, so its column may have the right type next time."""

    def with_column(kind: str, **fields: Any) -> Bench:
        """One more column; a window without keys, to be refused."""
        return changed(
            bench,
            sources={
                n: s | {"schema": s["schema"] | {"extra": kind}} for n, s in sources(bench).items()
            },
            **fields,
        )

    with pytest.raises(ConfigurationError):
        settle(with_column("string", windows=windowed(bench, size="1m").spec.windows))
    settle(with_column("double"))
    with_column("double").engine().run_epoch()


def test_after_a_restore_to_the_beginning_tables_have_their_types(bench: Bench) -> None:
    """Nothing is started that no table would take."""
    retyped = changed(
        bench,
        sources={
            n: s | {"schema": s["schema"] | {"v": "double"}} for n, s in sources(bench).items()
        },
    )
    restore(bench, None)
    with pytest.raises(ConfigurationError, match=r"does not fit the tables: schema\.v"):
        settle(retyped)
    settle(bench)
