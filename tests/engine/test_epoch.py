"""The epoch protocol on plain parts: steps 1 to 5 of `docs/architecture.md`, section 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.harness import SECOND, Bench, PlainSteps, barrier, row, spec_of
from tests.oracle.memory_source import MemorySource
from tests.oracle.mover import OracleMover
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.manifest import Manifest
from tidegate.errors import FencedError
from tidegate.jobs.engine.epoch_engine import EpochPorts, EpochRequests
from tidegate.jobs.engine.interfaces import EPOCH_POINTS, Slice
from tidegate.jobs.engine.recorded_epochs import RecordedEpoch
from tidegate.jobs.engine.replay import ReplayResult, replay_epoch
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.sinks.output_tables import DriverTables
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits


class Crash(BaseException):
    """What a kill -9 looks like to the code: nothing catches it."""


class CrashAt:
    """Raises at the n-th time a point is reached."""

    def __init__(self, point: str, nth: int = 1) -> None:
        self.point, self.left = point, nth

    def reach(self, point: str) -> None:
        """Raise when it is time."""
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                raise Crash(point)


def _feed(bench: Bench, step: int) -> None:
    """Deterministic rows of step n: mostly in order, one late row, a barrier now and then."""
    for offset, name in enumerate(bench.sources):
        bench.sources[name].append(*(row(10 * step + i + offset, i) for i in range(5)))
        if step == 3:
            bench.sources[name].append(row(1, 100))
        if step in (2, 4):
            bench.sources[name].append(barrier(10 * step + 6, step))


def _run(bench: Bench, steps: int = 6) -> None:
    engine = bench.engine()
    for step in range(steps):
        _feed(bench, step)
        _drain(bench, engine)


def _drain(bench: Bench, engine: Any) -> None:
    while True:
        bench.clock.advance(1.0)
        report = engine.run_epoch()
        if not report.rows and not report.pending:
            return


def _content(bench: Bench) -> dict[str, list[str]]:
    """All tables without timeline and epoch, which exactness leaves out."""
    tables = ("events", "late", "w", "barriers")
    volatile = {"_timeline", "_epoch", "opened", "closed", "waited_us", "participants"}
    return {
        name: sorted(
            repr(sorted((k, v) for k, v in r.items() if k not in volatile))
            for r in bench.rows(name)
        )
        for name in tables
    }


def test_every_manifest_conserves_and_chains() -> None:
    """Counters add up in every epoch and each manifest names its parent's bytes (9.1)."""
    bench = Bench(spec_of())
    _run(bench)
    epochs = bench.epochs()
    assert len(epochs) >= 6
    assert all(e.counters.is_conserved() for e in epochs)
    assert [e.parent for e in epochs[1:]] == [str(e.id) for e in epochs[:-1]]
    assert epochs[-1].counters.read == 62
    late = [r for r in bench.rows("late") if r["output"] == "events"]
    assert epochs[-1].counters.late == len(late) == 2


def test_the_report_names_members_that_back_pressure_has_not_read() -> None:
    """Full order buffer: who is ahead waits, and the status can say who that is."""
    bench = Bench(spec_of(release={"max_buffered_rows": 1}))
    engine = bench.engine()
    bench.sources["a"].append(row(10), row(11))
    bench.sources["b"].append(row(1))
    assert engine.run_epoch().held_back == ()
    bench.sources["a"].append(row(12))
    report = engine.run_epoch()
    assert (report.held_back, report.rows) == (("a/0",), 0)


@pytest.mark.parametrize("frame", [None, "30s"])
@pytest.mark.parametrize("limit", [{"max_ahead": "10s"}, {"max_buffered_rows": 3}])
@pytest.mark.parametrize("mode", ["ordered", "commit", "pass_through"])
def test_back_pressure_stops_no_pipeline(
    mode: str, limit: dict[str, Any], frame: str | None
) -> None:
    """b waits at its barrier for a, whose barrier lies far ahead of F; both are read to their end."""
    raw = spec_of(release={"mode": mode, **limit}).model_dump(mode="json", by_alias=True)
    for source in raw["sources"].values():
        source |= {"limits": {"rows": 1}, "frame": frame}
    bench = Bench(PipelineSpec.model_validate(raw))
    engine = bench.engine()
    bench.sources["a"].append(*map(row, range(1, 60, 3)), barrier(61, 1), row(62))
    bench.sources["b"].append(row(5), barrier(6, 1), row(7), row(8))
    read = 0
    for _ in range(60):
        bench.clock.advance(1.0)
        read += engine.run_epoch().rows
    assert (read, [b["outcome"] for b in bench.rows("barriers")]) == (24, ["complete"])


def test_barriers_end_slices_and_split_sections() -> None:
    """A slice ends with its first barrier; rows behind it leave in the next section (3.4)."""
    bench = Bench(spec_of())
    _run(bench)
    assert [(b["barrier_id"], b["outcome"]) for b in bench.rows("barriers")] == [
        (1, "complete"),
        (2, "complete"),
    ]
    sections = [r["section"] for r in bench.rows("events")]
    assert sections == sorted(sections)
    assert set(sections) == {0, 1, 2}


def test_positions_are_contiguous() -> None:
    """Released events are numbered from zero without gaps, across epochs."""
    bench = Bench(spec_of())
    _run(bench)
    positions = [r["position"] for r in bench.rows("events")]
    assert positions == list(range(len(positions)))


def test_nothing_to_do_seals_nothing() -> None:
    """An empty cut without a change makes no epoch."""
    bench = Bench(spec_of(coalesce={"idle_timeout": "never"}))
    engine = bench.engine()
    bench.sources["a"].append(row(1))
    bench.sources["b"].append(row(1))
    assert engine.run_epoch().sealed is not None
    assert engine.run_epoch().sealed is None


class Chosen(MemorySource):
    """A source that chooses where it begins."""

    def plan(
        self,
        member: Member,
        resume: Mapping[str, Any] | None,
        limits: ReadLimits,
        *,
        blocked: bool = False,
    ) -> Slice:
        """As planned, and chosen where nothing is known."""
        return replace(super().plan(member, resume, limits, blocked=blocked), begins=resume is None)


def test_a_chosen_beginning_is_sealed_at_once() -> None:
    """Before a row is there: a driver that comes next would choose another beginning."""
    plain, chosen = (
        Bench(spec_of(coalesce={"idle_timeout": "never"})),
        Bench(spec_of(coalesce={"idle_timeout": "never"})),
    )
    chosen.sources["a"] = Chosen("a")
    for bench in (plain, chosen):
        bench.sources["a"].append()
    assert plain.engine().run_epoch().sealed is None
    engine = chosen.engine()
    assert engine.run_epoch().sealed is not None
    assert "a/0" in chosen.engine().resume_state.resume
    assert engine.run_epoch().sealed is None


@pytest.mark.parametrize(
    "point", [p for p in EPOCH_POINTS if not p.startswith(("publish", "report"))]
)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_crash_at_any_step_changes_nothing(point: str, nth: int) -> None:
    """Killed at a step and started again, twice, the tables equal an undisturbed run's.

    Equal cuts, equal rows.
    """
    calm, shaken = Bench(spec_of()), Bench(spec_of())
    _run(calm)
    engine = shaken.engine(faults=CrashAt(point, nth))
    crashes = 0
    for step in range(6):
        _feed(shaken, step)
        while True:
            try:
                _drain(shaken, engine)
                break
            except Crash:
                crashes += 1
                engine = shaken.engine(faults=CrashAt(point, nth) if crashes < 2 else None)
    assert crashes == 2
    assert _content(shaken) == _content(calm)


def test_two_drivers_one_winner_per_slot() -> None:
    """A second driver at the same head loses the slot, reloads and goes on; no row is doubled."""
    bench = Bench(spec_of())
    first, second = bench.engine(), bench.engine()
    for step in range(4):
        _feed(bench, step)
        assert first.run_epoch().sealed is not None
        assert second.run_epoch().lost
        _drain(bench, second)
        first.reload()
    seqs = [
        (r["_source"], r["_seq"])
        for name in ("events", "late")
        for r in bench.rows(name)
        if r.get("output") != "w"
    ]
    assert len(seqs) == len(set(seqs))


def test_a_fenced_driver_seals_nothing() -> None:
    """The lease is checked just before the PUT; a driver without it leaves garbage only."""
    bench = Bench(spec_of())
    steps = PlainSteps(bench.clock)
    engine = bench.engine(steps=steps)
    _feed(bench, 0)
    steps.lost = FencedError("gone", code="lease.lost")
    with pytest.raises(FencedError):
        engine.run_epoch()
    assert bench.epochs() == []


def test_replay_gives_the_same_rows() -> None:
    """Any sealed epoch, moved again from its recorded cut and decision, gives the same rows (9.9)."""
    bench = Bench(spec_of())
    _run(bench)
    epochs = bench.epochs()
    tables: set[str] = set()
    for parent, epoch in zip([None, *epochs], epochs, strict=False):
        scratch = _Overlay(bench.store)
        mover = OracleMover(scratch, bench.spec, bench.sources)
        ports = EpochPorts((), mover, DriverTables(scratch).write)
        replay = replay_epoch(bench.spec, epoch, parent, ports, bench.store, scratch)
        assert replay.is_equal, replay
        tables |= replay.tables.keys()
    assert "barriers" in tables


def test_replay_counts_rows_that_are_equal() -> None:
    """A row that was sealed twice and replayed once is a difference."""
    bench = Bench(spec_of())
    _run(bench)
    epoch = next(e for e in bench.epochs() if e.slot == 1)
    table = next(name for name, files in epoch.files.items() if files)
    doubled = epoch.model_copy(
        update={"files": {**epoch.files, table: (*epoch.files[table], *epoch.files[table])}}
    )
    scratch = _Overlay(bench.store)
    mover = OracleMover(scratch, bench.spec, bench.sources)
    ports = EpochPorts((), mover, DriverTables(scratch).write)
    found = replay_epoch(bench.spec, doubled, None, ports, bench.store, scratch)
    sealed, replayed, differ = found.tables[table]
    assert (sealed, differ, found.is_equal) == (2 * replayed, replayed, False)


def test_a_run_begins_with_a_start_and_not_with_a_process() -> None:
    """The start-up grace applies once per run; a replay knows where one begins."""
    bench = Bench(spec_of(release={"startup_grace": "2s"}))
    engines = (bench.engine(), bench.engine(), bench.engine(run=999), bench.engine(run=999))
    for number, engine in enumerate(engines):
        engine.reload()
        for second in range(2):
            at = 10 * number + 2 * second
            for source in bench.sources.values():
                source.append(row(at), row(at + 1))
            bench.clock.advance(1)
            engine.run_epoch()
    epochs = bench.epochs()
    over = [
        any(entry["kind"] == "startup_grace_over" for entry in epoch.decision["recorded"])
        for epoch in epochs
    ]
    # The third and the seventh epoch: two seconds after the first rows of each run.
    assert over == [n in (2, 6) for n in range(8)]
    assert [epoch.epoch_notes.run for epoch in epochs] == [0] * 4 + [999] * 4
    for parent, epoch in zip([None, *epochs], epochs, strict=False):
        scratch = _Overlay(bench.store)
        mover = OracleMover(scratch, bench.spec, bench.sources)
        ports = EpochPorts((), mover, DriverTables(scratch).write)
        assert replay_epoch(bench.spec, epoch, parent, ports, bench.store, scratch).is_equal


def test_replay_decides_again() -> None:
    """Idleness by the clock, an abort by request, a gap and members that come, go and end are decided
    again alike, and a decision that was changed in the manifest is found.
    """
    bench = Bench(spec_of(coalesce={"idle_timeout": "5s"}))
    engine = bench.engine()
    bench.sources["a"].append(row(1), barrier(2, 1))
    engine.run_epoch()
    bench.clock.advance(6)
    engine.run_epoch(EpochRequests(ids=("r",), aborts=(7,)))
    bench.clock.advance(3600)
    engine = bench.engine()  # another driver after a gap
    bench.sources["b"].append(row(3))
    engine.run_epoch()
    bench.sources["a"].append(row(4), partition="1")
    engine.run_epoch()
    bench.sources["a"].remove("1")  # its position stays in the cut
    bench.sources["b"].append(row(5))
    bench.sources["b"].end()
    engine.run_epoch()
    bench.sources["a"].append(row(6))
    engine.run_epoch()
    epochs = bench.epochs()
    assert len(epochs) == 6
    assert not epochs[5].cut["a/1"]["pending"]  # nothing is left to read of what is gone

    def replay(epoch: Manifest, parent: Manifest | None) -> ReplayResult:
        scratch = _Overlay(bench.store)
        mover = OracleMover(scratch, bench.spec, bench.sources)
        ports = EpochPorts((), mover, DriverTables(scratch).write)
        return replay_epoch(bench.spec, epoch, parent, ports, bench.store, scratch)

    for parent, epoch in zip([None, *epochs], epochs, strict=False):
        if epoch.cut.get("a/1", {"parts": []})["parts"] == []:  # the rows of a/1 are gone
            assert replay(epoch, parent).is_equal
    statuses = {**epochs[2].decision["statuses"], "a/0": "active"}
    changed = epochs[2].model_copy(
        update={"decision": {**epochs[2].decision, "statuses": statuses}}
    )
    found = replay(changed, epochs[1])
    assert (found.is_equal, found.decided_differently) == (False, ("statuses",))


@pytest.mark.parametrize(
    "options", [{"overtake": "subsume"}, {"timeout": "5s", "on_timeout": "abort"}]
)
def test_replay_decides_again_which_barriers_are_aborted(options: dict[str, str]) -> None:
    """A barrier that was overtaken, or was too slow, was not aborted on request."""
    bench = Bench(
        spec_of(barriers={"identity": "id", **options}, coalesce={"idle_timeout": "never"})
    )
    engine = bench.engine()
    bench.sources["a"].append(row(1), barrier(3, 1), row(4))
    bench.sources["b"].append(row(2))
    engine.run_epoch()
    bench.clock.advance(20)
    bench.sources["b"].append(row(3), *([barrier(5, 2)] * ("overtake" in options)))
    for _ in range(3):
        engine.run_epoch()
        bench.clock.advance(20)
    epochs = bench.epochs()
    assert "aborted" in {one["outcome"] for epoch in epochs for one in epoch.barriers}
    for parent, epoch in zip([None, *epochs], epochs, strict=False):
        scratch = _Overlay(bench.store)
        mover = OracleMover(scratch, bench.spec, bench.sources)
        ports = EpochPorts((), mover, DriverTables(scratch).write)
        assert replay_epoch(bench.spec, epoch, parent, ports, bench.store, scratch).is_equal


def test_a_cut_is_rebuilt_in_the_order_in_which_it_was_read() -> None:
    """Folders come by their names, also if these are numbers: sums of doubles depend on it."""
    bench = Bench(spec_of())
    for partition in ("2", "10", "²"):
        bench.sources["a"].append(row(1), partition=partition)
    bench.engine().run_epoch()
    (epoch,) = bench.epochs()
    members = RecordedEpoch(bench.spec, epoch, None).rebuild_cut().slices
    own = [part.member.partition for part in members if part.member.source == "a"]
    assert own == sorted(own)


class _Overlay(MemoryStore):
    """Reads through to the sealed store, writes to itself."""

    def __init__(self, below: Any) -> None:
        super().__init__()
        self._below = below

    def get(self, key: str) -> Any:
        """Own object first."""
        return super().get(key) if self.stat(key) else self._below.get(key)


def test_idle_member_lets_the_frontier_pass() -> None:
    """A silent source is idle after its timeout on the pipeline clock, and the frontier goes on
    without it (section 1).
    """
    bench = Bench(spec_of(coalesce={"idle_timeout": "5s"}))
    engine = bench.engine()
    bench.sources["b"].append(row(0))
    for second in range(10):
        bench.sources["a"].append(row(second))
        bench.clock.advance(1.0)
        engine.run_epoch()
    assert bench.epochs()[-1].decision["frontier_after"] > 4 * SECOND
    assert {r["kind"] for e in bench.epochs() for r in e.decision["recorded"]} == {"idle"}


def test_a_late_row_names_the_frontier_it_missed() -> None:
    """Lateness is never negative.

    At an open barrier a row can be late by the section's mark, which lies above F (3.3).
    """
    bench = Bench(spec_of())
    engine = bench.engine()
    bench.sources["a"].append(row(5), barrier(5, 1))
    bench.sources["b"].append(row(8))
    _drain(bench, engine)
    bench.sources["b"].append(row(30), row(7))
    _drain(bench, engine)
    bench.sources["b"].append(row(20), row(6))
    _drain(bench, engine)
    late = [r for r in bench.rows("late") if r["output"] == "events"]
    assert late
    assert all(r["lateness_us"] > 0 for r in late)


def test_a_far_jump_in_the_very_first_rows_is_set_aside() -> None:
    """`max_jump` judges against a recorded clock, so the first epoch records one and reads nothing
    (semantics.md section 1).
    """
    source = spec_of().sources["a"].model_dump(mode="json", exclude_defaults=True, by_alias=True)
    bench = Bench(spec_of(sources={"a": source | {"max_jump": "1m"}}))
    ahead = bench.clock.wall_ticks() / SECOND + 3600
    bench.sources["a"].append(row(ahead), row(1), row(2))
    _drain(bench, bench.engine())
    first, *rest = bench.epochs()
    assert (first.counters.read, rest[-1].counters.read) == (0, 3)
    assert [(r["reason"], r["t"].timestamp()) for r in bench.rows("late")] == [("max_jump", ahead)]
